"""CartPole-v1 in NumPy, many at once: an environment for actors that start without JAX and go on exactly.

The dynamics are Gymnasium's (Barto, Sutton and Anderson 1983), in float64 as there. Where we differ: starts are a hash
of (seed, world, episode), so that they depend on nothing that happened before (runtime/splitmix.py).
"""

from __future__ import annotations

import math

import numpy as np

from longhaul.envs.host.vector import HostSpec
from longhaul.runtime.splitmix import GOLDEN, mix
from longhaul.spaces import Discrete, Leaf, Tree

GRAVITY, CART_MASS, POLE_MASS, POLE_HALF, PUSH, DT = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TRACK, TILT = 2.4, math.radians(12.0)
START = 0.05  # the bound of a fresh episode's numbers
PUSHES = np.array([-PUSH, PUSH])  # by action
BOUNDS = np.array([[TRACK], [TILT]])


def uniform(seed: int, world: np.ndarray, episode: np.ndarray, size: int) -> np.ndarray:
    """float64 [n, size] in [0, 1) for worlds and episodes int [n]: a function of these three numbers alone."""
    with np.errstate(over="ignore"):
        key = mix(np.full(len(world), seed % 2**64, np.uint64) + GOLDEN)
        key = mix(key + GOLDEN * (world.astype(np.uint64) + np.uint64(1)))
        key = mix(key + GOLDEN * (episode.astype(np.uint64) + np.uint64(1)))
        place: np.ndarray = GOLDEN * (np.arange(size, dtype=np.uint64) + np.uint64(1))
        bits = mix(key[:, None] + place)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


AHEAD = 16
"""Episodes whose starts are drawn at once: one draw for many worlds and episodes costs little more than one for one."""


class CartPole:
    """W poles on carts; a `vector.Batched`.

    With a few hundred worlds NumPy's calls cost more than what they compute, so there are few of them: numbers of one
    kind lie beside each other, [4, W], and results go to memory that is there. So do observations, the same each step.
    """

    def __init__(self, worlds: int, max_steps: int = 500) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}, but an episode has at least 1 step; give a positive limit")
        leaf = Leaf((4,), np.dtype(np.float32))
        self.spec = HostSpec(leaf, Discrete(2), truncation_interval=max_steps, max_steps=max_steps)
        self._limit, self._worlds, self._seed = max_steps, np.arange(worlds), 0
        self._physics = np.zeros((4, worlds))  # position, its speed, angle, its speed
        self._rates = np.zeros((4, worlds))  # how they change, by the second
        self._steps, self._episode = np.zeros(worlds, np.int64), np.zeros(worlds, np.int64)
        self._starts, self._first = np.zeros((worlds, 0, 4)), self._episode  # of episodes from `first` on
        self._seen, self._reward = np.zeros((worlds, 4), np.float32), np.ones(worlds, np.float32)
        self._scratch, self._far = tuple(np.zeros((5, worlds))), np.zeros((2, worlds))
        self._moved = tuple(self._physics), tuple(self._rates)  # rows: of views made at every step, ten cost a tenth

    def _start(self, worlds: np.ndarray) -> Tree:
        """Begins the episodes of so many worlds, int [n]."""
        ahead = self._episode[worlds] - self._first[worlds]
        if not self._starts.shape[1] or np.maximum.reduce(ahead, initial=0) >= AHEAD:
            self._draw()
            ahead[:] = 0
        starts = self._starts[worlds, ahead]
        self._physics[:, worlds], self._seen[worlds] = starts.T, starts
        self._steps[worlds] = 0
        return self._seen

    def _draw(self) -> None:
        """The starts of every world's episode and of those that follow."""
        worlds, self._first = len(self._worlds), self._episode.copy()
        episodes = self._first[:, None] + np.arange(AHEAD)
        drawn = uniform(self._seed, np.repeat(self._worlds, AHEAD), episodes.ravel(), 4)
        self._starts = (START * (2.0 * drawn - 1.0)).reshape(worlds, AHEAD, 4)

    def reset(self, seed: int) -> Tree:
        self._seed, self._starts = seed, self._starts[:, :0]
        self._episode[:] = 0
        return self._start(self._worlds)

    def restart(self, which: np.ndarray) -> Tree:
        worlds = which.nonzero()[0]
        self._episode[worlds] += 1
        return self._start(worlds)

    def step(self, action: np.ndarray) -> tuple[Tree, np.ndarray, np.ndarray, np.ndarray]:
        (_, _, angle, spin), (_, speed_up, _, spin_up) = self._moved
        physics, rates = self._physics, self._rates
        cos, sin, thrust, leaning, below = self._scratch
        total = CART_MASS + POLE_MASS
        np.cos(angle, out=cos)
        np.sin(angle, out=sin)
        # thrust = (push + m l spin^2 sin) / total
        np.multiply(spin, spin, out=thrust)
        thrust *= POLE_MASS * POLE_HALF
        thrust *= sin
        thrust += PUSHES.take(action)
        thrust /= total
        # spin_up = (g sin - cos thrust) / (l (4/3 - m cos^2 / total))
        np.multiply(sin, GRAVITY, out=spin_up)
        np.multiply(cos, thrust, out=leaning)
        spin_up -= leaning
        np.multiply(cos, cos, out=below)
        below *= -POLE_MASS * POLE_HALF / total
        below += POLE_HALF * 4.0 / 3.0
        spin_up /= below
        # speed_up = thrust - m l spin_up cos / total
        np.multiply(spin_up, cos, out=speed_up)
        speed_up *= -POLE_MASS * POLE_HALF / total
        speed_up += thrust
        rates[::2] = physics[1::2]
        rates *= DT
        physics += rates
        self._steps += 1
        np.abs(physics[::2], out=self._far)
        fell, fallen = self._far > BOUNDS
        fell |= fallen
        self._seen.T[...] = physics
        # Truncated: at the limit, and not terminated.
        return self._seen, self._reward, fell, (self._steps >= self._limit) > fell

    def state(self) -> Tree:
        return {
            "physics": self._physics.T.copy(),
            "steps": self._steps.copy(),
            "episode": self._episode.copy(),
            "seed": np.int64(self._seed),
        }

    def restore(self, state: Tree) -> None:
        if state["physics"].shape != self._physics.T.shape:
            count = len(state["physics"])
            raise ValueError(f"a state of {count} worlds for {len(self._worlds)}; sizes must be equal")
        self._physics[:], self._steps[:], self._episode[:] = state["physics"].T, state["steps"], state["episode"]
        self._seen[:] = state["physics"]
        self._seed, self._starts = int(state["seed"]), self._starts[:, :0]


def cartpole(worlds: int, max_steps: int = 500) -> CartPole:
    """CartPole-v1 of so many worlds; `numpy/longhaul.envs.host.numpy_cartpole:cartpole`."""
    return CartPole(worlds, max_steps)
