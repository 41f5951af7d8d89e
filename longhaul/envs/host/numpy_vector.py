"""Any batched NumPy environment as a `HostVector`: what it must keep is `Batched`, and knows of no reset of its own."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from longhaul.envs.host.gymnasium_vector import Interval, load
from longhaul.envs.host.vector import Finals, HostSpec, HostStep, Slot, check_action, no_finals, slot, take, write
from longhaul.spaces import Tree, mapped


class Batched(Protocol):
    """W worlds as NumPy computes them, all at once; arrays are [W, ...]. Example: `envs.batched.CartPole`."""

    @property
    def spec(self) -> HostSpec: ...

    def reset(self, seed: int) -> Tree:
        """Begins anew everywhere -> observations."""

    def step(self, action: np.ndarray) -> tuple[Tree, np.ndarray, np.ndarray, np.ndarray]:
        """-> observation, reward, terminated, truncated: what the step truly led to. It resets nothing."""

    def restart(self, which: np.ndarray) -> Tree:
        """Begins anew in the worlds `which`, bool [W] -> observations of all."""

    def state(self) -> Tree | None:
        """All that decides what comes, as arrays; None where it can't be told."""

    def restore(self, state: Tree) -> None: ...


class NumpyVector:
    """A `Batched` that is reset in the step that ended an episode."""

    def __init__(self, batched: Batched, worlds: int) -> None:
        self.spec, self.worlds, self.columns, self._inner = batched.spec, worlds, worlds, batched
        self._interval, self._none = Interval(self.spec, worlds), no_finals(self.spec)

    def reset(self, seed: int, out: Slot | None = None) -> Tree:
        out = slot(self.spec, self.columns) if out is None else out
        self._interval = Interval(self.spec, self.columns)
        write(out.observation, self._inner.reset(seed))
        return out.observation

    def step(self, action: np.ndarray, out: Slot | None = None) -> HostStep:
        out = slot(self.spec, self.columns) if out is None else out
        observation, reward, terminated, truncated = self._inner.step(check_action(self.spec, self.columns, action))
        out.reward[:], out.terminated[:], out.truncated[:] = reward, terminated, truncated
        out.valid.fill(True)
        self._interval.check(out.truncated)
        ended, finals = out.terminated | out.truncated, self._none
        rows = ended.nonzero()[0]
        if len(rows):
            last = mapped(lambda leaf, value: value.astype(leaf.dtype), self.spec.observation, take(observation, rows))
            finals = Finals(rows.astype(np.int32), last, {})
            observation = self._inner.restart(ended)
        write(out.observation, observation)
        return HostStep(*out, finals)

    def state(self) -> Tree | None:
        return self._inner.state()

    def restore(self, state: Tree) -> None:
        self._interval = Interval(self.spec, self.columns)
        self._inner.restore(state)

    def close(self) -> None:
        pass


def numpy(name: str, num_envs: int, seed: int, **options: Any) -> NumpyVector:
    """`name` is module:factory, called with the number of worlds and the options; it gives a `Batched`."""
    return NumpyVector(load(name)(num_envs, **options), num_envs)
