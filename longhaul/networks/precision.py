"""Precisions of a torso, and rematerialisation: the parts of it that are kept for the gradient.

bfloat16 has the exponents of float32, so that no gradient vanishes and no loss is scaled (Micikevicius et al. 2018,
arXiv 1710.03740, scale theirs for float16). Parameters, the optimiser, gradients, normalisation, memory, heads and
losses stay in float32; only the factors of a torso's products are rounded.

Rematerialisation (Chen et al. 2016, arXiv 1604.06174) computes a part of the network again for its gradient instead of
keeping its results. The parts are a layer of a perceptron, the embedding of a set's items, a step of the recurrent
unit, a block of an encoder. A part's input is always kept, so the memory needed is that of all inputs and of the widest
part's inside. Numbers change in their last bits at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

PRECISIONS = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
"""Types that a torso computes in."""

POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots-no-batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""Values of a part kept beside its input: none; all products; products with a kernel, but not attention's."""

Function = TypeVar("Function", bound=Callable[..., Any])


def rematerialised(part: Function, remat: str, *, scanned: bool = False) -> Function:
    """Part of a network whose gradient computes it again by the rule `remat`, one of config.REMATS.

    `scanned`: it is the body of a loop. Its gradient is another loop, so XLA cannot merge the two computations, and the
    barrier that keeps them apart elsewhere would only cost time.
    """
    if remat == "none":
        return part
    return jax.checkpoint(part, policy=POLICIES[remat], prevent_cse=not scanned)  # type: ignore[return-value]
