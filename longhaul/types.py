"""Types that the whole package shares.

Axes: T time, B batch (columns), K slots, A controlled agents of one world; time first. A *column* of the batch is one
agent's stream of experience: B = worlds x A. All lengths are metres, angles radians, times seconds.

The invariant of the whole package: **an episode ends in two ways, and they are not the same.** `terminated`: the task
is over, nothing follows, the value of the successor is zero. `truncated`: watching stopped; the episode would continue
from `successor`, the observation that the step led to, and its value counts.
"""

from __future__ import annotations

import os
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
"""Scopes of a compiled program's instructions; a profile groups by them."""

PLATFORM = "LONGHAUL_PLATFORM"
"""Variable of the environment of a process that compiles for a chip which its machine lacks: the chip's platform."""


def platform() -> str:
    """Platform that programs are traced for: "cpu", "gpu" or "tpu"."""
    return os.environ.get(PLATFORM) or jax.default_backend()


class Compact(NamedTuple):
    """Long input without the numbers that are 0 in every observation."""

    expand: Callable[[PyTree], jax.Array]  # stored observations [..., *shape] -> float32 [..., len(places)]
    places: tuple[int, ...]  # of these numbers in the whole input


@dataclass(frozen=True)
class Spec:
    """Observations, actions and bounds of an environment.

    `observation` is a pytree of `jax.ShapeDtypeStruct` for ONE agent (a `Masked` where actions can be illegal).
    `agents` is None for an ordinary environment, whose arrays have no agent axis; with a number A, observation, reward,
    terminated and truncated have a leading [A], and `Environment.active` is the mask of agents that still play.
    `truncation_interval` is a promise: no agent is truncated twice within fewer steps (None: never). It bounds the
    memory for successors of truncated steps in a rollout; 1 is always correct, a time limit needs much less memory.
    `max_steps` bounds an episode's length; None: unbounded. `expand` turns stored observations [..., *shape] (without
    their mask) into a network's input, where the two differ: rollouts then keep the small form. `compact` does the same
    for networks that can leave out the numbers of one long vector that are always 0. `peaks` names metrics whose
    greatest value is reported too.
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
    """Result of a step; leaves [...] of one world, [A, ...] with agents, [B, ...] from `environment.vectorise`.

    From an environment: `observation` and `successor` are the same object. From `environment.vectorise`, which resets:
    `observation` is the input of the next action (the first of a new episode where one ended), `successor` the
    observation that the step led to. They differ only where `terminated | truncated`.
    """

    observation: PyTree
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    successor: PyTree


def transition(observation: PyTree, reward: jax.Array, terminated: jax.Array, truncated: jax.Array) -> TimeStep:
    """Time step of an environment that does not reset itself: its successor is its observation.

    Without agents `reward` is float32 [], `terminated` and `truncated` are bool []; with A agents they are [A].
    """
    return TimeStep(observation, reward, terminated, truncated, observation)


class Environment(Protocol):
    """World as pure functions; `environment.vectorise` makes many of one.

    After an agent's episode ended, `step` may be called again before `reset`; its results are then ignored.
    """

    @property
    def spec(self) -> Spec: ...

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """-> (state, observation) of a fresh episode."""

    def step(self, key: Key, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]: ...

    def active(self, state: PyTree) -> jax.Array:
        """Flag bool: an episode is running; with `spec.agents` = A: mask bool [A] of the agents that still play."""

    def metrics(self, state: PyTree) -> dict[str, Measure]:
        """Scores, beside return and length, of an episode that ends in `state`: scalars ([A] with agents); may be
        empty."""


class Demonstrator(Environment, Protocol):
    """Environment with an expert."""

    def demonstrate(self, state: PyTree) -> tuple[jax.Array, jax.Array]:
        """(the expert's action in `state`, bool: it is known), [A, ...] with agents. An unknown action is any legal
        value and means nothing."""


class Guided(NamedTuple):
    """`Rollout.extras` of rollouts with an expert."""

    own: PyTree  # the extras of `act`
    action: jax.Array  # [T, B, ...], the expert's
    known: jax.Array  # bool [T, B]: the expert has one
    followed: jax.Array  # bool [T, B]: it was taken


class Pathwise(NamedTuple):
    """Gradient of a rollout's rewards by the parameters of the acting policy."""

    gradient: PyTree  # like `params`, of "objective"
    metrics: Metrics  # "objective": the discounted sum of a column's rewards, the mean over columns


class Successors(NamedTuple):
    """Successors of a rollout, kept where they are not a copy of the next observation.

    The successor of step t in column b is `observation[t + 1, b]` (`last[b]` for t = T-1), except where the step was
    truncated: there it is `truncated[k, b]`, k being the number of truncations of column b before step t. Terminated
    steps have none: their value is zero. K = ceil(T / spec.truncation_interval) slots always suffice.

    Example, one column, T = 4, truncated at t = 1: observations o0 o1 | p0 p1, last = p2; K >= 1, truncated[0] = o2.
    The successors are o1, o2, p1, p2.
    """

    last: PyTree  # [B, ...]
    truncated: PyTree  # [K, B, ...]


class Rollout(NamedTuple):
    """Experience, [T, B, ...], time first, with the memory before its first step.

    `valid` is False where a column's agent was not playing (it ended earlier than its world, or the slot is empty):
    such steps mean nothing and count nowhere. `extras` are the further results of `act` (log-probabilities, for
    example). `version` is the number of updates behind the acting weights.
    """

    observation: PyTree  # [T, B, ...], the input of the action
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
    """Part of an algorithm's State that each shard has for itself, never averaged: its part of a replay.

    A shard sees leaves [1, ...]; those of all shards together are [shards, ...].
    """

    value: PyTree


def is_local(tree: PyTree) -> bool:
    return isinstance(tree, Local)


def changing(tree: PyTree) -> PyTree:
    """False for each leaf: an update may change all of them."""
    return jax.tree.map(lambda _: False, tree)


Act = Callable[[Params, PyTree, PyTree, Key | None], tuple[jax.Array, PyTree, PyTree]]
"""Acting: (params, memory, observation [B, ...], key) -> (action [B, ...], memory, extras)."""


class Algorithm(NamedTuple):
    """Learner as pure functions, written for one shard and independent of devices.

    `policy(state)` is the part of the state that `act` needs (parameters, normalisers). `memory(B)` is the memory at an
    episode's start, `()` where there is none; the caller resets it where an episode ended. `act` with `key=None` takes
    the mode of the policy instead of a sample. `fixed` of a State or a policy is a pytree of the same structure, True
    for the arrays that no update changes.
    """

    init: Callable[[Key], PyTree]  # key -> State
    policy: Callable[[PyTree], Params]  # State -> the part that acting needs
    memory: Callable[[int], PyTree]  # B -> memory at an episode's start
    act: Act
    learn: Callable[[PyTree, PyTree, Key], tuple[PyTree, Metrics]]  # (State, data, key) -> (State, metrics)
    fixed: Callable[[PyTree], PyTree] = changing


class Collector(NamedTuple):
    """Experience as pure functions: `start(key) -> carry`; `collect(params, carry, key, version) -> (carry, data,
    metrics)`."""

    start: Callable[[Key], PyTree]
    collect: Callable[[Params, PyTree, Key, jax.Array], tuple[PyTree, PyTree, Metrics]]
    steps: int  # agent steps (B x T) that one call gathers on one shard
    env_steps: int  # the same in steps of worlds


class Progress(NamedTuple):
    """Training run between two updates: with the Run itself, everything that an exact continuation needs."""

    state: PyTree  # the algorithm's
    carry: PyTree  # the collector's
    key: Key
    updates: jax.Array  # int32: finished updates


class Weights(Protocol):
    """Transfer of parameters from a learner to its actors; versions only grow.

    Between hosts it is `weight_sync.consumers.SyncWeights`.
    """

    def publish(self, version: int, params: Params) -> None: ...

    def latest(self) -> tuple[int, Params]: ...
