"""Batching rule of the inference server: the time and the groups of the next inference.

A rule that waits for a full batch (SEED RL, Acme) stops for ever when an actor dies. Here a batch is due when every
actor that still owes a step has one waiting, or when the oldest step has waited for `deadline`. The batch is padded to
one of a few sizes, for each of which the policy is compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

DEADLINE = 0.002
"""Longest wait of a step for its batch, in seconds."""


class Rule(NamedTuple):
    slots: int  # groups of an actor
    most: int  # groups of one batch
    deadline: float = DEADLINE


class Decision(NamedTuple):
    take: tuple[int, ...]  # groups, longest waiting first; empty: wait
    wait: float  # seconds until the deadline, where there is nothing to take


def decide(rule: Rule, waiting: Mapping[int, float], owing: Collection[int], now: float) -> Decision:
    """Groups to infer now, or the seconds to wait.

    `waiting`: group -> time of arrival. `owing`: groups of running actors that still owe a step; groups of dead actors,
    and groups that wait for the learner, are not among them.
    """
    if not waiting:
        return Decision((), rule.deadline)
    order = sorted(waiting, key=waiting.__getitem__)
    here = {group // rule.slots for group in waiting}
    missed = any(group // rule.slots not in here for group in owing)
    left = rule.deadline - (now - waiting[order[0]])
    if missed and len(order) < rule.most and left > 0.0:
        return Decision((), left)
    return Decision(tuple(order[: rule.most]), 0.0)


def buckets(groups: int, *, fixed: bool) -> tuple[int, ...]:
    """Batch sizes in groups: 1, 2, 3, 4, 6, 8, 12 ... up to `groups`, so that padding is at most a third of a batch.
    `fixed`: `groups` only."""
    if fixed:
        return (groups,)
    powers = [1 << i for i in range(groups.bit_length())]
    return (*sorted({size for size in (*powers, *(3 * power for power in powers)) if size < groups}), groups)


def bucket(sizes: tuple[int, ...], count: int) -> int:
    """Smallest batch size for `count` groups."""
    return next(size for size in sizes if size >= count)
