"""CartPole-v1 in NumPy, many at once: an environment for actors that start without JAX and go on exactly.

The dynamics are Gymnasium's (Barto, Sutton and Anderson 1983), in float64 as there. Where we differ: starts are a hash
of (seed, world, episode), so that they depend on nothing that happened before (SplitMix64, Steele, Lea and Flood 2014).
"""

from __future__ import annotations

import math

import numpy as np

from longhaul.forms import Discrete, Leaf, Tree
from longhaul.vectors import HostSpec

GRAVITY, CART_MASS, POLE_MASS, POLE_HALF, PUSH, DT = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TRACK, TILT = 2.4, math.radians(12.0)
START = 0.05  # the bound of a fresh episode's numbers


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, uint64 of any shape."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seed: int, world: np.ndarray, episode: np.ndarray, size: int) -> np.ndarray:
    """float64 [n, size] in [0, 1) for worlds and episodes int [n]: a function of these three numbers alone."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        key = _mix(np.full(len(world), seed % 2**64, np.uint64) + golden)
        key = _mix(key + golden * (world.astype(np.uint64) + np.uint64(1)))
        key = _mix(key + golden * (episode.astype(np.uint64) + np.uint64(1)))
        bits = _mix(key[:, None] + golden * (np.arange(size, dtype=np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class CartPole:
    """W poles on carts; an `envs.host_numpy.Batched`."""

    def __init__(self, worlds: int, max_steps: int = 500) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}, but an episode has at least 1 step; give a positive limit")
        leaf = Leaf((4,), np.dtype(np.float32))
        self.spec = HostSpec(leaf, Discrete(2), truncation_interval=max_steps, max_steps=max_steps)
        self._limit, self._worlds, self._seed = max_steps, np.arange(worlds), 0
        self._physics = np.zeros((worlds, 4))
        self._steps, self._episode = np.zeros(worlds, np.int64), np.zeros(worlds, np.int64)

    def _start(self, which: np.ndarray) -> Tree:
        drawn = uniform(self._seed, self._worlds[which], self._episode[which], 4)
        self._physics[which] = START * (2.0 * drawn - 1.0)
        self._steps[which] = 0
        return self._physics.astype(np.float32)

    def reset(self, seed: int) -> Tree:
        self._seed = seed
        self._episode[:] = 0
        return self._start(np.ones(len(self._worlds), bool))

    def restart(self, which: np.ndarray) -> Tree:
        self._episode[which] += 1
        return self._start(which)

    def step(self, action: np.ndarray) -> tuple[Tree, np.ndarray, np.ndarray, np.ndarray]:
        x, speed, angle, spin = self._physics.T
        cos, sin = np.cos(angle), np.sin(angle)
        total = CART_MASS + POLE_MASS
        thrust = (np.where(action == 1, PUSH, -PUSH) + POLE_MASS * POLE_HALF * spin**2 * sin) / total
        spin_up = (GRAVITY * sin - cos * thrust) / (POLE_HALF * (4.0 / 3.0 - POLE_MASS * cos**2 / total))
        speed_up = thrust - POLE_MASS * POLE_HALF * spin_up * cos / total
        change = np.stack([speed, speed_up, spin, spin_up], axis=1)
        self._physics = self._physics + DT * change
        self._steps += 1
        x, angle = self._physics[:, 0], self._physics[:, 2]
        terminated = (np.abs(x) > TRACK) | (np.abs(angle) > TILT)
        truncated = (self._steps >= self._limit) & ~terminated
        return self._physics.astype(np.float32), np.ones(len(x), np.float32), terminated, truncated

    def state(self) -> Tree:
        return {
            "physics": self._physics.copy(),
            "steps": self._steps.copy(),
            "episode": self._episode.copy(),
            "seed": np.int64(self._seed),
        }

    def restore(self, state: Tree) -> None:
        if state["physics"].shape != self._physics.shape:
            raise ValueError(f"a state of {len(state['physics'])} worlds for {len(self._worlds)}; sizes must be equal")
        self._physics, self._steps = state["physics"].copy(), state["steps"].copy()
        self._episode, self._seed = state["episode"].copy(), int(state["seed"])


def cartpole(worlds: int, max_steps: int = 500) -> CartPole:
    """CartPole-v1 of so many worlds; `numpy/longhaul.envs.batched:cartpole`."""
    return CartPole(worlds, max_steps)
