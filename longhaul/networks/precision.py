"""What a torso computes in, and what of it is kept for the gradient: precisions, and rematerialisation policies.

bfloat16 has the exponents of float32, so that no gradient vanishes and no loss is scaled (Micikevicius et al. 2018,
arXiv 1710.03740, scale theirs for float16). Parameters, the optimiser, gradients, normalisation, memory, heads and
losses stay in float32; what is rounded are the factors of a torso's products.

Rematerialisation (Chen et al. 2016, arXiv 1604.06174) computes a part of the network again for its gradient instead of
keeping what it computed. The parts are those that lie in a row: a layer of a perceptron, the embedding of a set's
items, a step of the recurrent unit, a block of an encoder. A part's input is kept in any case, so that what is needed
at once is all inputs, and what the widest part computes within. Numbers stay the same but for the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

PRECISIONS = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
"""What a torso computes in."""

POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots-no-batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What of a part is kept beside its input: nothing; all products; products with a kernel, but not attention's."""

REMATS = ("none", *POLICIES)


Function = TypeVar("Function", bound=Callable[..., Any])


def rematerialised(part: Function, remat: str, *, scanned: bool = False) -> Function:
    """A part of a network, whose gradient computes it again as `remat`, one of REMATS, says.

    `scanned`: it is the body of a loop, whose gradient is another loop. XLA can't merge the two computations of it
    there, and is not told to keep them apart, which costs.
    """
    if remat == "none":
        return part
    return jax.checkpoint(part, policy=POLICIES[remat], prevent_cse=not scanned)  # type: ignore[return-value]
