"""State of a group of worlds between two trajectories, as bytes: sent by its actor, restored by a successor.

The bytes hold the whole state and the observation for the next action. They do not describe their layout: the reader
derives it from its own worlds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longhaul.envs.host.vector import HostVector
from longhaul.spaces import Tree, leaves, mapped


class Keeps(NamedTuple):
    """Size and schedule of the states that actors send."""

    size: int = 0  # bytes of a group's state; 0: none is reported
    every: int = 0  # trajectory length: the state follows its last step; 0: never

    def after(self, step: int) -> int:
        """Bytes that follow step number `step` of a life."""
        return self.size if self.every and step and not step % self.every else 0


NOTHING = Keeps()


class EnvSnapshot(NamedTuple):
    """State of G groups of C columns between two batches: a run without staleness resumes from it exactly."""

    there: np.ndarray  # uint8 [1]: 0 if empty; new episodes begin then
    states: np.ndarray  # uint8 [G, size]
    begins: np.ndarray  # bool [G, C]: memory is put back
    earned: np.ndarray  # float64 [G, C], of the episodes that run
    length: np.ndarray  # int64 [G, C]
    memory: list[np.ndarray]  # [G x C, ...]


def size(vector: HostVector, observation: Tree) -> int:
    """Bytes of the state of a vector that was reset; 0 if it reports none."""
    state = vector.state()
    return 0 if state is None else sum(np.asarray(leaf).nbytes for leaf in leaves((state, observation)))


def write(into: np.ndarray, vector: HostVector, observation: Tree) -> None:
    """Write the state to memory, uint8 [size]. ValueError if its size differs."""
    rows = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in leaves((vector.state(), observation))]
    np.concatenate(rows, out=into)


def restore(data: np.ndarray, vector: HostVector, observation: Tree) -> None:
    """Inverse of `write`, for a vector that was reset; overwrites the leaves of `observation`."""
    at = 0

    def read(like: np.ndarray) -> np.ndarray:
        nonlocal at
        begin, at = at, at + np.asarray(like).nbytes
        return np.frombuffer(data[begin:at].tobytes(), np.asarray(like).dtype).reshape(np.shape(like)).copy()

    vector.restore(mapped(read, vector.state()))
    mapped(lambda to: np.copyto(to, read(to)), observation)
