"""Games of an environment with masked actions, one at a time or many at once, step by step the same.

Episode i of a seed begins and goes on by random numbers of its own, whoever plays and however many others there are:
so a game that was watched counts in a table, and a person can play the very game that an agent played.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul.algorithms import registry
from longhaul.algorithms.actor_critic import Policy
from longhaul.algorithms.config import AlgorithmConfig
from longhaul.distributions import distribution
from longhaul.spaces import Masked
from longhaul.types import Environment, Key, PyTree


class Agent(NamedTuple):
    """Player: a policy, and how its network is made."""

    label: str
    config: AlgorithmConfig
    policy: Policy


class Moment(NamedTuple):
    """A game between two steps."""

    state: PyTree
    observation: Masked
    memory: PyTree  # the agent's; () for a person


class Led(NamedTuple):
    """Result of a step."""

    moment: Moment
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array


class Choice(NamedTuple):
    """Choice of an agent at a moment."""

    action: jax.Array  # int32
    probabilities: jax.Array  # float32 [n]; 0 where an action is not legal
    value: jax.Array
    memory: PyTree


class Played(NamedTuple):
    """A whole game."""

    total: jax.Array  # the sum of its rewards
    length: jax.Array
    state: PyTree  # the last
    terminated: jax.Array  # it ended, and was not cut


def keys(seed: int | jax.Array, episode: jax.Array | int) -> Key:
    """All random numbers of an episode come of it."""
    return jax.random.fold_in(jax.random.key(seed), episode)


def begin(environment: Environment, key: Key) -> Moment:
    """The start of the game of `key`, for a person or for an agent without a memory."""
    state, observation = environment.reset(jax.random.fold_in(key, 0))
    return Moment(state, observation, ())


def step(environment: Environment, key: Key, t: jax.Array, moment: Moment, action: jax.Array) -> Led:
    """Step t, counted from 0, of the game of `key`."""
    key_world = jax.random.fold_in(key, 2 * t + 1)
    state, led = environment.step(key_world, moment.state, action)
    return Led(Moment(state, led.observation, moment.memory), led.reward, led.terminated, led.truncated)


def chooser(
    environment: Environment, config: AlgorithmConfig, greedy: bool
) -> tuple[Callable[[Moment], Moment], Callable[[Policy, Key, jax.Array, Moment], Choice]]:
    """(moment -> the same with the agent's memory at the start, (policy, key, t, moment) -> what it does)."""
    network = registry.network(environment.spec, config)
    policy_of = distribution(environment.spec.action)

    def choose(policy: Policy, key: Key, t: jax.Array, moment: Moment) -> Choice:
        one = jax.tree.map(lambda leaf: leaf[None], moment.observation)
        logits, value, memory = network.apply(policy, moment.memory, one)
        key_act = jax.random.fold_in(key, 2 * t + 2)
        raw = policy_of.mode(logits, one.mask) if greedy else policy_of.sample(logits, one.mask, key_act)
        chances = jax.nn.softmax(jnp.where(one.mask, logits, -jnp.inf))
        return Choice(raw[0], chances[0], value[0], memory)

    return lambda moment: moment._replace(memory=network.memory(1)), choose


def player(
    environment: Environment, config: AlgorithmConfig, *, greedy: bool, limit: int
) -> Callable[[Policy, int | jax.Array, jax.Array], Played]:
    """A function (policy, seed, numbers [E]) -> the games of those numbers, all at once, of at most `limit` steps."""
    remember, choose = chooser(environment, config, greedy)

    def one(policy: Policy, seed: int | jax.Array, episode: jax.Array) -> Played:
        key = keys(seed, episode)

        def goes_on(carried: Any) -> jax.Array:
            t, _, _, terminated, truncated = carried
            return (t < limit) & ~terminated & ~truncated

        def turn(carried: Any) -> Any:
            t, moment, total, _, _ = carried
            choice = choose(policy, key, t, moment)
            led = step(environment, key, t, moment._replace(memory=choice.memory), choice.action)
            return t + 1, led.moment, total + led.reward, led.terminated, led.truncated

        no = jnp.bool_(False)
        begun = (jnp.int32(0), remember(begin(environment, key)), jnp.float32(0.0), no, no)
        t, moment, total, terminated, _ = jax.lax.while_loop(goes_on, turn, begun)
        return Played(total, t, moment.state, terminated)

    return jax.jit(jax.vmap(one, in_axes=(None, None, 0)))
