"""Probe environments: tiny worlds whose values are known in closed form, each of which catches one kind of bug.

A trainer that solves the probes has its bootstrapping, discounting, masks, memory and action heads right; one that
fails tells by the probe's name where to look (after Jones, "Debugging RL, without the agonizing pain", 2021, whose
five probes are the first of these). Here every probe is a table of places and moves, but for the one with continuous
actions.

A move by an agent whose episode has ended earns `POISON`: whoever counts it, sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.spaces import Action, Box, Discrete, Masked, Measure, MultiDiscrete
from longhaul.types import Environment, Key, Spec, TimeStep, transition

POISON = -10.0
"""The reward of what must never count: an illegal action, a step after the end."""

NEVER = 2**30
"""The truncation interval of a world that is never truncated."""

ON, END, CUT = 0, 1, 2
"""State of the episode after a move: it goes on, is terminated, is truncated."""


@dataclass(frozen=True)
class Probe:
    """An environment and what is known of it.

    `value` pairs an observation with the discounted return from it under the best policy, at `gamma`. The
    observations are of one agent and differ from each other. `policy` pairs an observation with the best action, None
    where there is nothing to choose or where it takes memory. `best_return` is the mean undiscounted return of an
    agent's episode under the best policy. With `memory`, `value` lists first observations only: at later ones the
    value depends on what is remembered.
    """

    environment: Environment
    gamma: float
    value: tuple[tuple[Any, float], ...]
    policy: tuple[tuple[Any, Any], ...] | None
    best_return: float
    memory: bool = False
    gae_lambda: float = 0.95


class Move(NamedTuple):
    to: int
    reward: float
    ending: int = ON


class WalkState(NamedTuple):
    """Place of each agent, and whether its episode runs; scalars, or [A]."""

    place: jax.Array  # int32
    playing: jax.Array  # bool


@dataclass(frozen=True, eq=False)
class Walk:
    """A finite deterministic world: at place s, action a leads to `to[s, a]`; made by `_walk` and equal only to itself.

    Without agents the first place is drawn evenly from `starts`; agent j of several begins at `starts[j]`.
    """

    spec: Spec
    observation: Any  # NumPy pytree, [S, ...] per leaf
    to: np.ndarray  # int32 [S, N]
    reward: np.ndarray  # float32 [S, N]
    ending: np.ndarray  # int32 [S, N]
    starts: np.ndarray  # int32 [...]

    def reset(self, key: Key) -> tuple[WalkState, Any]:
        starts = jnp.asarray(self.starts)
        place = starts if self.spec.agents else starts[jax.random.randint(key, (), 0, len(self.starts))]
        return WalkState(place, jnp.ones(place.shape, bool)), self._observe(place)

    def step(self, key: Key, state: WalkState, action: jax.Array) -> tuple[WalkState, TimeStep]:
        """One move of every agent; `key` is not used."""
        at = state.place, self._index(action)
        ending = jnp.asarray(self.ending)[at]
        place = jnp.asarray(self.to)[at]
        reward = jnp.where(state.playing, jnp.asarray(self.reward)[at], POISON)
        terminated, truncated = (ending == END) & state.playing, (ending == CUT) & state.playing
        playing = state.playing & (ending == ON)
        return WalkState(place, playing), transition(self._observe(place), reward, terminated, truncated)

    def active(self, state: WalkState) -> jax.Array:
        return state.playing

    def metrics(self, state: WalkState) -> dict[str, Measure]:
        return {}

    def _observe(self, place: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[place], self.observation)

    def _index(self, action: jax.Array) -> jax.Array:
        """The column of `to` for an action; the choices of a MultiDiscrete count like digits, the last one fastest."""
        if not isinstance(self.spec.action, MultiDiscrete):
            return action
        sizes = self.spec.action.sizes
        weights = np.array([np.prod(sizes[i + 1 :], dtype=np.int32) for i in range(len(sizes))], np.int32)
        return jnp.sum(action * jnp.asarray(weights), axis=-1, dtype=jnp.int32)


def _walk(
    places: Sequence[tuple[Any, Sequence[Move]]],
    starts: Sequence[int],
    max_steps: int,
    interval: int = NEVER,
    action: Action | None = None,
    agents: int | None = None,
) -> Walk:
    """A Walk from its places, each an observation and a move per action (`action` is None: Discrete)."""
    observation = jax.tree.map(lambda *leaves: np.stack(leaves), *[observation_of for observation_of, _ in places])
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), observation)
    moves = [list(row) for _, row in places]
    return Walk(
        spec=Spec(shapes, action or Discrete(len(moves[0])), agents, interval, max_steps),
        observation=observation,
        to=np.array([[move.to for move in row] for row in moves], np.int32),
        reward=np.array([[move.reward for move in row] for row in moves], np.float32),
        ending=np.array([[move.ending for move in row] for row in moves], np.int32),
        starts=np.array(starts, np.int32),
    )


def _see(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def _either(*moves: Move) -> list[Move]:
    """The moves of a place where both of two actions do the same."""
    return [move for move in moves for _ in range(2)]


def constant() -> Probe:
    """One step, reward 1, the end: value 1.

    Finds: a value loss that does not learn, a reward lost on the way, bootstrapping past a terminal step (value 1 /
    (1 - gamma)).
    """
    world = _walk([(_see(1.0), _either(Move(0, 1.0, END)))], starts=[0], max_steps=1)
    return Probe(world, 0.9, ((_see(1.0), 1.0),), None, 1.0)


def time_limit(limit: int = 5) -> Probe:
    """Reward 1 a step for ever, watched for `limit` steps: value 1 / (1 - gamma) = 10, and the time is not seen.

    Finds: truncation taken for termination (2.6 to 3.6 then, by lambda), and slots of `Successors` mixed up.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}, but an episode has at least 1 step; give a positive limit")
    last = limit - 1
    places = [(_see(1.0), _either(Move(min(t + 1, last), 1.0, CUT if t == last else ON))) for t in range(limit)]
    world = _walk(places, starts=[0], max_steps=limit, interval=limit)
    return Probe(world, 0.9, ((_see(1.0), 10.0),), None, float(limit))


def terminal_reward() -> Probe:
    """One step; the observation, 1 or -1, is the reward: value = observation.

    Finds: observations and rewards of different steps or columns put together, a value that does not look at its input.
    """
    places = [(_see(sign), _either(Move(i, sign, END))) for i, sign in enumerate((-1.0, 1.0))]
    world = _walk(places, starts=[0, 1], max_steps=1)
    return Probe(world, 0.9, ((_see(-1.0), -1.0), (_see(1.0), 1.0)), None, 0.0)


def two_step() -> Probe:
    """Two steps; the second pays the sign that both observations (sign, step) show: values gamma x sign, then sign.

    Finds: a discount that is missing or applied twice, rewards shifted by one step, credit that does not travel back.
    """
    gamma = 0.5  # far from 1, so that gamma, 1 and gamma^2 are well apart
    signs = (-1.0, 1.0)
    places = [(_see(sign, 0.0), _either(Move(2 + i, 0.0))) for i, sign in enumerate(signs)]
    places += [(_see(sign, 1.0), _either(Move(2 + i, sign, END))) for i, sign in enumerate(signs)]
    world = _walk(places, starts=[0, 1], max_steps=2)
    value = tuple((_see(sign, step), sign * gamma ** (1.0 - step)) for step in (0.0, 1.0) for sign in signs)
    return Probe(world, gamma, value, None, 0.0)


def action() -> Probe:
    """One step; action 1 is right at observation 1, action 0 at observation -1; reward 1 if right, else -1: value 1.

    Finds: a policy gradient of the wrong sign, actions or log-probabilities of other steps, advantages normalised
    wrongly.
    """
    places = [
        (_see(-1.0), [Move(0, 1.0, END), Move(0, -1.0, END)]),
        (_see(1.0), [Move(1, -1.0, END), Move(1, 1.0, END)]),
    ]
    world = _walk(places, starts=[0, 1], max_steps=1)
    policy = ((_see(-1.0), 0), (_see(1.0), 1))
    return Probe(world, 0.9, ((_see(-1.0), 1.0), (_see(1.0), 1.0)), policy, 1.0)


def memory(delay: int = 3) -> Probe:
    """A cue, 1 or -1, is seen at the first step only; `delay` steps later the action must match it to earn 1.

    Observations (cue or 0, t / delay). The best return is 1 with memory and 0.5 without; the first value is
    gamma^delay. Finds: memory lost between steps, not reset where an episode ends, or not the one that a rollout
    began with.
    """
    if delay < 1:
        raise ValueError(f"delay is {delay}, but the cue must be gone when it is needed; give at least 1")
    gamma = 0.9
    places = []
    for i, cue in enumerate((-1.0, 1.0)):
        base = i * (delay + 1)
        places += [(_see(cue if t == 0 else 0.0, t / delay), _either(Move(base + t + 1, 0.0))) for t in range(delay)]
        answers = [Move(base + delay, float(choice == i), END) for choice in range(2)]
        places.append((_see(0.0, 1.0), answers))
    world = _walk(places, starts=[0, delay + 1], max_steps=delay + 1)
    value = tuple((_see(cue, 0.0), gamma**delay) for cue in (-1.0, 1.0))
    return Probe(world, gamma, value, None, 1.0, memory=True, gae_lambda=1.0)


def masked() -> Probe:
    """One step, three actions; only the mask tells which one pays 1: value 1, and an illegal action earns POISON.

    The masks are {0, 1} where 1 is right, {0, 2} where 2 is right, and {0} alone. A policy that ignores the mask
    can't tell them apart: its best is action 0, with a mean of 1/3. Finds: masks ignored or of another step, in
    acting or in the loss, and NaNs of -inf x 0 where one action is left.
    """
    pays = ((0.0, 1.0, None), (0.0, None, 1.0), (1.0, None, None))
    places = []
    for i, row in enumerate(pays):
        mask: Any = np.array([pay is not None for pay in row])
        moves = [Move(i, POISON if pay is None else pay, END) for pay in row]
        places.append((Masked(_see(1.0), mask), moves))
    world = _walk(places, starts=[0, 1, 2], max_steps=1)
    value = tuple((seen, 1.0) for seen, _ in places)
    policy = tuple((seen, best) for (seen, _), best in zip(places, (1, 2, 0)))
    return Probe(world, 0.9, value, policy, 1.0)


def successor() -> Probe:
    """One step from one of four places; at two of them it is truncated, with a future worth 1 or -1.

    Places are one-hot. Place 0 leads to place 1, truncated, and place 1 ends with reward 1; place 2 leads to place 3,
    and place 3 ends with -1. The values are gamma, 1, -gamma, -1. Finds: bootstrapping from the next episode's first
    observation (0 at places 0 and 2, on the mean), from nothing or from the step's own observation (0), or from
    another slot's successor.
    """
    gamma = 0.9
    moves = (Move(1, 0.0, CUT), Move(1, 1.0, END), Move(3, 0.0, CUT), Move(3, -1.0, END))
    eye = np.eye(4, dtype=np.float32)
    world = _walk([(eye[i], _either(move)) for i, move in enumerate(moves)], starts=range(4), max_steps=1, interval=1)
    value = tuple((eye[i], worth) for i, worth in enumerate((gamma, 1.0, -gamma, -1.0)))
    return Probe(world, gamma, value, None, 0.0)


def agents() -> Probe:
    """Three agents; agent j plays j + 1 steps of reward 1; agents 0 and 2 are then terminated, agent 1 truncated.

    Observations: who (one-hot of three), and the step / 3, which agent 1 does not see. With gamma 0.5 the values are
    1 for agent 0; 1 / (1 - gamma) = 2 for agent 1; 1.75, 1.5, 1 for agent 2. Finds: steps after an agent's own end
    counted (POISON), `valid` of the wrong column or one step late, an agent's truncation lost because its world goes
    on.
    """
    gamma = 0.5
    eye = np.eye(3, dtype=np.float32)
    # (agent, step seen, next place, ending), agent by agent; starts are places 0, 1 and 3.
    rows = ((0, 0, 0, END), (1, 0, 2, ON), (1, 0, 2, CUT), (2, 0, 4, ON), (2, 1, 5, ON), (2, 2, 5, END))
    places = [(_see(*eye[who], t / 3), _either(Move(to, 1.0, ending))) for who, t, to, ending in rows]
    world = _walk(places, starts=[0, 1, 3], max_steps=3, interval=3, agents=3)
    worth = (1.0, 1.0 / (1.0 - gamma), None, 1.0 + gamma + gamma**2, 1.0 + gamma, 1.0)
    value = tuple((seen, number) for (seen, _), number in zip(places, worth) if number is not None)
    return Probe(world, gamma, value, None, 2.0)


def multi_discrete() -> Probe:
    """One step; of two choices (2 and 3 options) each pays 1/2 if it fits the observation, 1 or -1: value 1.

    Right are (0, 2) at observation -1 and (1, 0) at 1. Finds: choices in the wrong order or of the wrong size,
    log-probabilities averaged or broadcast where they must be summed.
    """
    right = ((-1.0, (0, 2)), (1.0, (1, 0)))
    sizes = (2, 3)
    places = []
    for i, (sign, best) in enumerate(right):
        pays = [0.5 * (a == best[0]) + 0.5 * (b == best[1]) for a in range(sizes[0]) for b in range(sizes[1])]
        places.append((_see(sign), [Move(i, pay, END) for pay in pays]))
    world = _walk(places, starts=[0, 1], max_steps=1, action=MultiDiscrete(sizes))
    policy = tuple((_see(sign), np.array(best, np.int32)) for sign, best in right)
    return Probe(world, 0.9, tuple((_see(sign), 1.0) for sign, _ in right), policy, 1.0)


class AimState(NamedTuple):
    """The sign that is shown, float32 scalar, and whether the episode runs."""

    sign: jax.Array
    playing: jax.Array


@dataclass(frozen=True)
class Aim:
    """One step: reward 1 - |action - sign x target|^2, `target` one number per dimension of the action."""

    spec: Spec
    target: tuple[float, ...]

    def reset(self, key: Key) -> tuple[AimState, jax.Array]:
        sign = jnp.where(jax.random.bernoulli(key), jnp.float32(1.0), jnp.float32(-1.0))
        return AimState(sign, jnp.ones((), bool)), sign[None]

    def step(self, key: Key, state: AimState, action: jax.Array) -> tuple[AimState, TimeStep]:
        """The one step; `key` is not used."""
        miss = action - state.sign * jnp.array(self.target, jnp.float32)
        reward = jnp.where(state.playing, 1.0 - jnp.sum(miss * miss), POISON)
        never = jnp.zeros((), bool)
        return AimState(state.sign, never), transition(state.sign[None], reward, state.playing, never)

    def active(self, state: AimState) -> jax.Array:
        return state.playing

    def metrics(self, state: AimState) -> dict[str, Measure]:
        return {}


def continuous() -> Probe:
    """One step, a Box of two: reward 1 - |action - observation x (0.5, -1)|^2, the second bound twice as wide: value 1.

    Under a policy of spread s the value is 1 - (s_1^2 + s_2^2). Finds: bounds applied to the wrong dimension or
    twice, a missing correction of the tanh, a spread that never shrinks.
    """
    seen = jax.ShapeDtypeStruct((1,), jnp.float32)
    world = Aim(Spec(seen, Box((-1.0, -2.0), (1.0, 2.0)), None, NEVER, 1), (0.5, -1.0))
    policy = ((_see(-1.0), _see(-0.5, 1.0)), (_see(1.0), _see(0.5, -1.0)))
    return Probe(world, 0.9, ((_see(-1.0), 1.0), (_see(1.0), 1.0)), policy, 1.0)


PROBES = {
    probe.__name__: probe
    for probe in (
        constant, time_limit, terminal_reward, two_step, action, memory, masked, successor, agents, continuous,
        multi_discrete,
    )
}  # fmt: skip
"""Every probe by name."""
