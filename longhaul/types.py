"""The types that everything speaks.

Axes, once and for all: T time, B batch (columns), K slots, A controlled agents of one world; time first. A *column* of
the batch is one agent's stream of experience: B = worlds x A. All lengths are metres, angles radians, times seconds.

The one invariant that the whole package rests on: **an episode ends in two ways, and they are not the same.**
`terminated` says that the task is over: nothing follows, its value is zero. `truncated` says that we stopped watching:
the episode would have gone on from `successor`, the observation that the step truly led to, and its value counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from longhaul.spaces import Action as Action
from longhaul.spaces import Box as Box
from longhaul.spaces import Discrete as Discrete
from longhaul.spaces import Masked as Masked
from longhaul.spaces import Measure as Measure
from longhaul.spaces import MultiDiscrete as MultiDiscrete

PyTree = Any
Key = jax.Array
Params = PyTree
Metrics = dict[str, jax.Array]

ENVIRONMENT, INFERENCE, LEARNING = "environment", "inference", "learning"
"""Scopes of a compiled program's instructions, by which a profile tells them apart."""


class Compact(NamedTuple):
    """A long input without the numbers that are 0 in every observation."""

    expand: Callable[[PyTree], jax.Array]  # stored observations [..., *shape] -> float32 [..., len(places)]
    places: tuple[int, ...]  # of these numbers in the whole input


@dataclass(frozen=True)
class Spec:
    """What an environment takes and gives.

    `observation` is a pytree of `jax.ShapeDtypeStruct` for ONE agent (a `Masked` where actions can be illegal).
    `agents` is None for an ordinary environment, whose arrays have no agent axis; with a number A, observation, reward,
    terminated and truncated have a leading [A], and `Environment.active` says which agents still play.
    `truncation_interval` is a promise: no agent is truncated twice within fewer steps (None: never). It bounds the
    memory that the successors of truncated steps take in a rollout; 1 is always right, a time limit is much better.
    `max_steps` bounds an episode's length; None where nothing does. `expand` turns stored observations [..., *shape]
    (without their mask) into what a network takes, where that is not the same: rollouts then keep the small form.
    `compact` is the same for networks that can leave out what is always 0 of one long vector.
    `peaks` names metrics of which a run is told the greatest value, too.
    """

    observation: PyTree
    action: Action
    agents: int | None = None
    truncation_interval: int | None = 1
    max_steps: int | None = None
    expand: Callable[[PyTree], PyTree] | None = None
    compact: Compact | None = None
    peaks: tuple[str, ...] = ()


class TimeStep(NamedTuple):
    """What a step led to.

    From an environment: `observation` and `successor` are the same object. From `environment.vectorise`, which resets:
    `observation` is what the next action is chosen on (the first of a new episode where one ended) and `successor`
    what the step truly led to. They differ only where `terminated | truncated`.
    """

    observation: PyTree
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    successor: PyTree


def transition(observation: PyTree, reward: jax.Array, terminated: jax.Array, truncated: jax.Array) -> TimeStep:
    """The time step of an environment that does not reset itself."""
    return TimeStep(observation, reward, terminated, truncated, observation)


class Environment(Protocol):
    """One world, as pure functions; `environment.vectorise` makes many of it.

    After an agent's episode ended, `step` may be called again before `reset`; its results are then ignored.
    """

    @property
    def spec(self) -> Spec: ...

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """-> (state, observation) of a fresh episode."""

    def step(self, key: Key, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]: ...

    def active(self, state: PyTree) -> jax.Array:
        """bool: whether an episode is running; with `spec.agents` = A: bool [A], which agents still play."""

    def metrics(self, state: PyTree) -> dict[str, Measure]:
        """What an episode that ends in `state` scored beside its return and length, scalars ([A] with agents); may be
        empty."""


class Demonstrator(Environment, Protocol):
    """An environment with an expert whom one can ask."""

    def demonstrate(self, state: PyTree) -> tuple[jax.Array, jax.Array]:
        """(what the expert would do in `state`, an action; bool: whether there is one to tell), [A, ...] with agents.

        Where nothing can be told the action is one all the same, and means nothing.
        """


class Guided(NamedTuple):
    """`Rollout.extras` where an expert was asked."""

    own: PyTree  # what `act` gave, as ever
    action: jax.Array  # [T, B, ...], the expert's
    known: jax.Array  # bool [T, B]: whether there is one
    followed: jax.Array  # bool [T, B]: it is what was done


class Pathwise(NamedTuple):
    """How much more the rewards of a rollout would be, by each parameter of who acted."""

    gradient: PyTree  # like `params`, of "objective"
    told: Metrics  # "objective": the discounted sum of a column's rewards, the mean over columns


class Successors(NamedTuple):
    """The successors of a rollout, kept where they are not a copy of the next observation.

    The successor of step t in column b is `observation[t + 1, b]` (`last[b]` for t = T-1), except where the step was
    truncated: there it is `truncated[k, b]`, k being the number of truncations of column b before step t. Terminated
    steps have none: their value is zero. K = ceil(T / spec.truncation_interval) slots always suffice.

    Example, one column, T = 4, truncated at t = 1: observations o0 o1 | p0 p1, last = p2; K >= 1, truncated[0] = o2.
    The successors are o1, o2, p1, p2.
    """

    last: PyTree  # [B, ...]
    truncated: PyTree  # [K, B, ...]


class Rollout(NamedTuple):
    """Experience, [T, B, ...], time first, with the memory that it began with.

    `valid` is False where a column's agent was not playing (it ended earlier than its world, or the slot is empty):
    such steps mean nothing and count nowhere. `extras` is what `act` gave beside the action (log-probabilities, say).
    `version` counts the updates that had made the weights which acted.
    """

    observation: PyTree  # [T, B, ...], what the action was chosen on
    action: jax.Array  # [T, B, ...]
    reward: jax.Array  # float32 [T, B]
    terminated: jax.Array  # bool [T, B]
    truncated: jax.Array  # bool [T, B]
    valid: jax.Array  # bool [T, B]
    extras: PyTree  # [T, B, ...]
    successors: Successors
    memory: PyTree  # [B, ...], before the first step
    version: jax.Array  # int32 scalar


class Local(NamedTuple):
    """What of an algorithm's State each shard has for itself, and never meets with the others': its part of a replay.

    A shard sees leaves [1, ...]; those of all shards together are [shards, ...].
    """

    value: PyTree


def is_local(tree: PyTree) -> bool:
    """Whether a part of a State is such a one."""
    return isinstance(tree, Local)


class Algorithm(NamedTuple):
    """A learner as pure functions; written for one shard, and ignorant of devices.

    `policy(state)` is what `act` needs of the state (parameters, normalisers). `memory(B)` is the memory at an
    episode's start, `()` where there is none; the caller puts it back where an episode ended. `act` with `key=None`
    takes the mode of the policy instead of a sample.
    """

    init: Callable[[Key], PyTree]  # key -> State
    policy: Callable[[PyTree], Params]  # State -> what acting needs
    memory: Callable[[int], PyTree]  # B -> memory at an episode's start
    act: Callable[[Params, PyTree, PyTree, Key | None], tuple[jax.Array, PyTree, PyTree]]
    #     (params, memory, observation [B, ...], key) -> (action, memory, extras)
    learn: Callable[[PyTree, PyTree, Key], tuple[PyTree, Metrics]]  # (State, data, key) -> (State, metrics)


class Collector(NamedTuple):
    """Experience as pure functions: `start(key) -> carry`; `collect(params, carry, key, version) -> (carry, data,
    metrics)`."""

    start: Callable[[Key], PyTree]
    collect: Callable[[Params, PyTree, Key, jax.Array], tuple[PyTree, PyTree, Metrics]]
    steps: int  # agent steps (B x T) that one call gathers on one shard
    env_steps: int  # the same in steps of worlds


class Progress(NamedTuple):
    """A training run between two updates: with the Run itself, all that is needed to go on exactly."""

    state: PyTree  # the algorithm's
    carry: PyTree  # the collector's
    key: Key
    updates: jax.Array  # int32: finished updates


class Weights(Protocol):
    """The way of parameters from a learner to whoever acts; versions only grow."""

    def publish(self, version: int, params: Params) -> None: ...

    def latest(self) -> tuple[int, Params]: ...
