"""Minibatches, epochs and learning rate by the size of a batch. Pure numbers.

The rule "batch" is that of the HackMatrix trainer: a batch above 32,768 steps has more minibatches, so that each keeps
about its size, and fewer epochs. Learning rates scale linearly (Goyal et al. 2017) or by the square root (Krizhevsky
2014), with a warm-up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LARGE = 32_768
"""Agent steps of a batch above which the rule "batch" has an effect."""

MINIBATCHES, EPOCHS = 4, 4
"""Minibatches and epochs of a batch that is not large."""

MOST_MINIBATCHES, LEAST_EPOCHS = 64, 2


class Passes(NamedTuple):
    """Passes over a batch."""

    minibatches: int
    epochs: int


def passes(batch: int, scaling: str) -> Passes:
    """Passes over `batch` agent steps by a rule; for 262,144 by "batch" they are 32 minibatches and 2 epochs."""
    scale = batch // LARGE if scaling == "batch" and batch > LARGE else 1
    return Passes(min(MINIBATCHES * scale, MOST_MINIBATCHES), max(LEAST_EPOCHS, EPOCHS // scale))


def decide(batch: int, rows: int, scaling: str, minibatches: int | None, epochs: int | None) -> Passes:
    """Passes as given; those not given (None) follow the rule.

    If minibatches are given, the rule does not apply to the epochs either. A number of minibatches that is not given
    divides `rows`, the steps of one device's batch (with memory: its columns).
    """
    scaled = passes(batch, scaling if minibatches is None else "none")
    chosen = nearest_divisor(rows, scaled.minibatches) if minibatches is None else minibatches
    return Passes(chosen, scaled.epochs if epochs is None else epochs)


def nearest_divisor(n: int, wanted: int) -> int:
    """Divisor of n nearest to `wanted`, the larger of two equally near; n and `wanted` at least 1."""
    for distance in range(wanted):
        for divisor in (wanted + distance, wanted - distance):
            if n % divisor == 0:
                return divisor
    return 1


def lr_factor(rule: str, batch: int, base: int) -> float:
    """Factor of the learning rate from a batch of `base` steps to one of `batch`."""
    ratio = batch / base
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def describe(batch: int, base: int, scaling: str, chosen: Passes, rows: int, lr_rule: str, lr: float) -> list[str]:
    """Lines that explain the effect of the rules on a batch; none where they changed nothing.

    `rows` as in `decide`; `lr` before the rule.
    """
    lines = []
    scaled = passes(batch, scaling)
    ruled = Passes(nearest_divisor(rows, scaled.minibatches), scaled.epochs)
    if scaled != passes(batch, "none") and chosen == ruled:
        differs = ruled.minibatches != scaled.minibatches
        more = f" (not {scaled.minibatches}, which does not divide {rows:,})" * differs
        lines.append(
            f"the batch is {batch:,} steps: {chosen.minibatches} minibatches{more} and {chosen.epochs} epochs, "
            "by --scaling batch"
        )
    elif scaled != passes(batch, "none"):
        lines.append(
            f"the batch is {batch:,} steps: --scaling batch would take {ruled.minibatches} minibatches and "
            f"{ruled.epochs} epochs, and {chosen.minibatches} and {chosen.epochs} are given"
        )
    factor = lr_factor(lr_rule, batch, base)
    if factor != 1.0:
        lines.append(
            f"the learning rate is {lr * factor:.4g}: {lr:g} x {factor:.4g}, by --lr-rule {lr_rule} for a batch of "
            f"{batch:,} steps instead of {base:,}"
        )
    return lines
