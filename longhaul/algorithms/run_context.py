"""Context of an algorithm: the facts of a run that its factory needs beside the environment's spec and the config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from longhaul.replay import Sizes
from longhaul.runtime import overlap
from longhaul.types import PyTree

Isolate = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function of one shard -> the same function, compiled in isolation from its surroundings (batch_shards.py)."""

Spread = Callable[[PyTree, int], PyTree]
"""(rows of a minibatch, their axis) -> the same rows, split over devices along that axis where it can be."""


class RunContext(NamedTuple):
    """Context of an algorithm; whatever a shard computes between two means goes through `isolated`.

    A run that continues from update `first` with batches of another size has the share `done` of its steps behind it.
    """

    updates: int  # of the whole run; learning rates are annealed over them
    mean: Callable[[PyTree], PyTree]  # averages over shards
    isolated: Isolate = lambda function: function
    first: int = 0
    done: float = 0.0
    split: bool = False  # parameters are split over devices: the optimiser takes them one by one
    spread: Spread = lambda rows, axis: rows  # lays a minibatch over the devices that share its parameters
    in_buckets: Callable[[PyTree, Callable[[], Sequence[int]]], PyTree] | None = None  # `overlap.mean`, if it can be
    sizes: Sizes | None = None  # of the experience; without them an algorithm with a replay acts and cannot learn

    def mean_of(self, gradients: PyTree, program: Callable[..., Any], *arguments: Any) -> PyTree:
        """Mean over shards of gradients like the first result of `program`: what it computes first is sent first."""
        if self.in_buckets is None:
            return self.mean(gradients)
        return self.in_buckets(gradients, lambda: overlap.ready(program, *arguments))

    def overlaps(self, params: PyTree) -> bool:
        """True if gradients of such parameters meet while others are computed."""
        return self.in_buckets is not None and overlap.several(params)
