"""When to infer, and on what: all that waits, as soon as waiting for more is not worth it.

A batch that must be exactly full before it is inferred stands still for ever when one actor has died (SEED RL's and
Acme's rule). Here it is taken when every actor that could still send something has something waiting, or when the
oldest has waited for `deadline`; and padded to one of a few sizes, each of which the policy is compiled for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

DEADLINE = 0.002
"""Seconds."""


class Rule(NamedTuple):
    slots: int  # groups of an actor
    most: int  # groups of one batch
    deadline: float = DEADLINE


class Decision(NamedTuple):
    take: tuple[int, ...]  # groups, the longest waiting first; none: not yet
    wait: float  # seconds until the deadline, where there is nothing to take


def decide(rule: Rule, waiting: Mapping[int, float], owing: Collection[int], now: float) -> Decision:
    """What to infer now.

    `waiting`: group -> when it came. `owing`: the groups that are to send a step, of living actors alone: who is dead,
    or waits for the learner, is waited for by nobody.
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
    """The sizes of batches, in groups: 1, 2, 3, 4, 6, 8, 12 ... up to all of them, so that a third of one may be filled
    up at most; `fixed`: all of them alone."""
    if fixed:
        return (groups,)
    powers = [1 << i for i in range(groups.bit_length())]
    return (*sorted({size for size in (*powers, *(3 * power for power in powers)) if size < groups}), groups)


def bucket(sizes: tuple[int, ...], count: int) -> int:
    """The smallest size that holds so many groups."""
    return next(size for size in sizes if size >= count)
