"""Choices of a policy, as commands of a model of motion: numbers, a choice for each of them, or one choice of all.

- `continuous`: a `Box` of shares, -1 .. 1 of what the agent can do; what is outside is clipped.
- `discrete`: a `MultiDiscrete`, an index into each grid of the model.
- `joint`: one `Discrete` of all combinations, the last grid running fastest (7 x 13 = 91 for the bicycle, 4 x 3 = 12
  for the jerk model, as PufferDrive has them).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.sim.config import ACTIONS
from longhaul.driving.sim.dynamics import Command
from longhaul.spaces import Action, Box, Discrete, MultiDiscrete


class Actions(NamedTuple):
    """Coding of shares as actions. `read` and `write` take and give arrays [..., D], or [...] for joint choices."""

    action: Action
    read: Callable[[jax.Array], Command]  # action -> shares
    write: Callable[[Command], jax.Array]  # shares -> the action that comes nearest


def make_actions(name: str, grids: tuple[np.ndarray, ...]) -> Actions:
    """The actions of that name, one of ACTIONS, over a model's grids."""
    sizes = tuple(len(grid) for grid in grids)

    def nearest(shares: Command) -> Command:
        return tuple(
            jnp.argmin(jnp.abs(share[..., None] - jnp.broadcast_to(jnp.asarray(grid), (*share.shape, len(grid)))), -1)
            for share, grid in zip(shares, grids, strict=True)
        )

    def look_up(indices: Command) -> Command:
        return tuple(jnp.asarray(grid)[index] for grid, index in zip(grids, indices, strict=True))

    if name == "continuous":
        ones = (1.0,) * len(grids)
        return Actions(
            Box(tuple(-one for one in ones), ones),
            lambda action: tuple(jnp.clip(action[..., i], -1.0, 1.0) for i in range(len(grids))),
            lambda shares: jnp.stack(shares, -1),
        )
    if name == "discrete":
        return Actions(
            MultiDiscrete(sizes),
            lambda action: look_up(tuple(action[..., i] for i in range(len(grids)))),
            lambda shares: jnp.stack(nearest(shares), -1).astype(jnp.int32),
        )
    if name == "joint":
        return Actions(
            Discrete(math.prod(sizes)),
            lambda action: look_up(_split(action, sizes)),
            lambda shares: _join(nearest(shares), sizes),
        )
    raise ValueError(f"actions is {name!r}: choose from {', '.join(ACTIONS)}")


def _split(joint: jax.Array, sizes: tuple[int, ...]) -> Command:
    """One number -> an index into each of `sizes`."""
    parts = []
    for size in reversed(sizes):
        parts.append(joint % size)
        joint = joint // size
    return tuple(reversed(parts))


def _join(parts: Command, sizes: tuple[int, ...]) -> jax.Array:
    """The reverse of `_split`."""
    joint = jnp.zeros_like(parts[0])
    for part, size in zip(parts, sizes, strict=True):
        joint = joint * size + part
    return joint.astype(jnp.int32)
