"""Width and depth of an actor-critic network by its number of parameters.

depth = round(2 x (size / 0.3)^(1/3)), at least 1: 2, 3, 4, 6 and 9 at 0.3, 1, 3, 10 and 25 million parameters. The
width, a multiple of 8 (of 4 below 96), is the one whose network comes nearest to the size. Heads and latents follow
from these (attention.py): a head every 32 features, 4 latents a block of `latent`, 8 a block of `wayformer`. With a
transformer's 12 x depth x width^2 parameters, width / depth stays between 35 and 60, in which the shape matters little
(Kaplan et al. 2020, arXiv 2001.08361, section 3.1).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax

from longhaul.networks import actor_critic
from longhaul.networks.config import LARGEST, SMALLEST
from longhaul.types import PyTree


def width_and_depth(observation: PyTree, outputs: int, size: float, **options: Any) -> tuple[int, int]:
    """Width and depth of the network of about `size` million parameters for observations like `observation`.

    `outputs` and `options` are those of `actor_critic`, without `sizes`. Raises ValueError where no network is within a
    third of the size: its fixed part (layers on a long observation, for example) may already be larger.
    """
    if not SMALLEST <= size <= LARGEST:
        raise ValueError(f"model_size is {size}; it must lie in {SMALLEST} to {LARGEST} (millions of parameters)")
    leaves, tree = jax.tree.flatten(observation)
    described = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)
    return _width_and_depth(described, tree, outputs, size, tuple(sorted(options.items())))


@cache
def _width_and_depth(
    leaves: Any, tree: Any, outputs: int, size: float, options: tuple[tuple[str, Any], ...]
) -> tuple[int, int]:
    observation = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
    depth = max(1, round(2.0 * (size / 0.3) ** (1.0 / 3.0)))

    def parameters(width: int) -> int:
        network = actor_critic.actor_critic(observation, outputs, sizes=(width,) * depth, **dict(options))
        return actor_critic.count(jax.eval_shape(network.init, jax.random.key(0)))

    # The count grows like a power of the width between 1 and 2: each guess takes the power 2.
    wanted, tried, guess = size * 1e6, {}, _rounded(math.sqrt(size * 1e6 / (12 * (depth + 2))))
    while guess not in tried:
        tried[guess] = parameters(guess)
        guess = _rounded(guess * math.sqrt(wanted / tried[guess]))
    best = min(tried, key=lambda width: abs(math.log(tried[width] / wanted)))
    if not 2 / 3 <= tried[best] / wanted <= 3 / 2:
        raise ValueError(
            f"model_size is {size}, and the nearest network for this observation has {tried[best] / 1e6:.3g} million "
            f"parameters; give that, or hidden_dim and num_layers"
        )
    return best, depth


def _rounded(width: float) -> int:
    """The nearest width that is allowed."""
    step = 8 if width >= 96 else 4
    return max(step, step * round(width / step))
