"""What the episodes earned that ended within a trajectory: counted once it is whole, for all its columns together.

Counted step by step it costs as much as all else that the server does with a step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Running(NamedTuple):
    """Of the episode that runs in each column, so far."""

    earned: np.ndarray  # float64 [C]
    length: np.ndarray  # int64 [C]


class Ended(NamedTuple):
    """Sums over the episodes that ended."""

    episodes: int
    earned: float
    length: int


def fresh(columns: int) -> Running:
    """Episodes that begin."""
    return Running(np.zeros(columns), np.zeros(columns, np.int64))


def count(running: Running, reward: np.ndarray, over: np.ndarray, valid: np.ndarray) -> tuple[Ended, Running]:
    """-> (sums, what runs after it). All are [T, C]: float, and bool; `over` only where `valid`.

    Steps up to a column's last end belong to episodes that ended, those after it to the one that runs.
    """
    ends = over.any(axis=0)
    last = np.where(ends, len(over) - 1 - over[::-1].argmax(axis=0), -1)
    after = np.arange(len(over))[:, None] > last
    after &= valid
    steps, left = valid.sum(axis=0), after.sum(axis=0)
    earned = np.add.reduce(reward, axis=0, dtype=np.float64, where=valid)
    rest = np.add.reduce(reward, axis=0, dtype=np.float64, where=after)
    done = (running.earned + earned - rest)[ends], (running.length + steps - left)[ends]
    now = Running(np.where(ends, rest, running.earned + earned), np.where(ends, left, running.length + steps))
    return Ended(int(over.sum()), float(done[0].sum()), int(done[1].sum())), now
