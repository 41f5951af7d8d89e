"""A group of worlds between two trajectories, as bytes: what its actor tells there, and another one can go on from.

All that decides what comes is in them, and the observation that the next action is chosen on. Who reads them knows from
worlds of its own what they are made of; no byte says so.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longhaul.envs.host.vector import HostVector
from longhaul.spaces import Tree, leaves, mapped


class Keeps(NamedTuple):
    """How much travels, and when."""

    size: int = 0  # bytes of a group's state; 0: it can't be told
    every: int = 0  # it follows on the steps that end a trajectory of so many; 0: on none

    def after(self, step: int) -> int:
        """Bytes that follow on a life's step of this number."""
        return self.size if self.every and step and not step % self.every else 0


NOTHING = Keeps()


class EnvSnapshot(NamedTuple):
    """Where G groups of C columns are between two batches: what a run without staleness needs to go on exactly."""

    there: np.ndarray  # uint8 [1]: 0 where it means nothing, and new episodes begin
    states: np.ndarray  # uint8 [G, size]
    begins: np.ndarray  # bool [G, C]: memory is put back
    earned: np.ndarray  # float64 [G, C], of the episodes that run
    length: np.ndarray  # int64 [G, C]
    memory: list[np.ndarray]  # [G x C, ...]


def size(vector: HostVector, observation: Tree) -> int:
    """Bytes of a vector's state, which was reset; 0 where it can't be told."""
    state = vector.state()
    return 0 if state is None else sum(np.asarray(leaf).nbytes for leaf in leaves((state, observation)))


def write(into: np.ndarray, vector: HostVector, observation: Tree) -> None:
    """The state to memory, uint8 [size]. ValueError where it is of another size."""
    rows = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in leaves((vector.state(), observation))]
    np.concatenate(rows, out=into)


def restore(data: np.ndarray, vector: HostVector, observation: Tree) -> None:
    """The reverse, for a vector that was reset; the observation's leaves are written to."""
    at = 0

    def read(like: np.ndarray) -> np.ndarray:
        nonlocal at
        begin, at = at, at + np.asarray(like).nbytes
        return np.frombuffer(data[begin:at].tobytes(), np.asarray(like).dtype).reshape(np.shape(like)).copy()

    vector.restore(mapped(read, vector.state()))
    mapped(lambda to: np.copyto(to, read(to)), observation)
