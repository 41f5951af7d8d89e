"""Games of HackMatrix: one between two steps for whoever looks at it, or many at once, step by step the same.

Episode i of a seed begins and goes on by random numbers of its own, whoever plays and however many others there are:
so a game that was watched counts in a table, and a person can play the very game that an agent played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms import registry
from longhaul.algorithms.actor_critic import Policy
from longhaul.algorithms.config import AlgorithmConfig
from longhaul.distributions import distribution
from longhaul.envs.hackmatrix import reward, screen
from longhaul.spaces import Masked
from longhaul.types import Environment, Key, PyTree, TimeStep

VICTORY = reward.PARTS.index("victory")


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


class Decision(NamedTuple):
    """Choice of an agent at a moment, on the device."""

    action: jax.Array  # int32
    probabilities: jax.Array  # float32 [n]; 0 where an action is not legal
    value: jax.Array
    memory: PyTree


def keys(seed: int | jax.Array, episode: jax.Array | int) -> Key:
    """All random numbers of an episode come of it."""
    return jax.random.fold_in(jax.random.key(seed), episode)


def begin(environment: Environment, key: Key) -> Moment:
    """The start of the game of `key`, for a person or for an agent without a memory."""
    state, observation = environment.reset(jax.random.fold_in(key, 0))
    return Moment(state, observation, ())


def step(
    environment: Environment, key: Key, t: jax.Array, moment: Moment, action: jax.Array
) -> tuple[Moment, TimeStep]:
    """Step t, counted from 0, of the game of `key`."""
    state, led = environment.step(jax.random.fold_in(key, 2 * t + 1), moment.state, action)
    return Moment(state, led.observation, moment.memory), led


def chooser(
    environment: Environment, config: AlgorithmConfig, greedy: bool
) -> tuple[Callable[[Moment], Moment], Callable[[Policy, Key, jax.Array, Moment], Decision]]:
    """(moment -> the same with the agent's memory at the start, (policy, key, t, moment) -> what it does)."""
    network = registry.network(environment.spec, config)
    policy_of = distribution(environment.spec.action)

    def choose(policy: Policy, key: Key, t: jax.Array, moment: Moment) -> Decision:
        batch = jax.tree.map(lambda leaf: leaf[None], moment.observation)
        logits, value, memory = network.apply(policy, moment.memory, batch)
        key_act = jax.random.fold_in(key, 2 * t + 2)
        raw = policy_of.mode(logits, batch.mask) if greedy else policy_of.sample(logits, batch.mask, key_act)
        chances = jax.nn.softmax(jnp.where(batch.mask, logits, -jnp.inf))
        return Decision(raw[0], chances[0], value[0], memory)

    return lambda moment: moment._replace(memory=network.memory(1)), choose


def player(
    environment: Environment, config: AlgorithmConfig, *, greedy: bool, limit: int
) -> Callable[[Policy, int | jax.Array, jax.Array], Any]:
    """A function (policy, seed, numbers [E]) -> the games of those numbers, all at once, of at most `limit` steps.

    Of each the sum of its rewards, its length, its last state, and whether it ended, and was not cut.
    """
    remember, choose = chooser(environment, config, greedy)

    def one(policy: Policy, seed: int | jax.Array, episode: jax.Array) -> Any:
        key = keys(seed, episode)

        def goes_on(carried: Any) -> jax.Array:
            t, _, _, terminated, truncated = carried
            return (t < limit) & ~terminated & ~truncated

        def turn(carried: Any) -> Any:
            t, moment, total, _, _ = carried
            choice = choose(policy, key, t, moment)
            after, led = step(environment, key, t, moment._replace(memory=choice.memory), choice.action)
            return t + 1, after, total + led.reward, led.terminated, led.truncated

        no = jnp.bool_(False)
        begun = (jnp.int32(0), remember(begin(environment, key)), jnp.float32(0.0), no, no)
        t, moment, total, terminated, _ = jax.lax.while_loop(goes_on, turn, begun)
        return total, t, moment.state, terminated

    return jax.jit(jax.vmap(one, in_axes=(None, None, 0)))


class Playing(NamedTuple):
    """A game between two steps."""

    number: int  # the episode's
    moment: Moment  # on the device
    view: screen.View
    last: screen.Last | None = None
    actions: tuple[int, ...] = ()
    end: str = ""  # "won", "died", "cut" at the most steps; "" while it goes on


class Choice(NamedTuple):
    """Choice of an agent in a game."""

    action: int
    opinion: screen.Opinion
    memory: Any


class Game(NamedTuple):
    """The functions of the games of a seed. Compiled before they are first needed."""

    begin: Callable[[int], Playing]  # the episode's number -> its start
    step: Callable[[Playing, int], Playing]
    choose: Callable[[Playing], Choice] | None  # of an agent


class Record(NamedTuple):
    """A game that was played, or left."""

    episode: int
    total: float  # the sum of its rewards
    length: int
    stage: int  # the highest
    score: int
    end: str  # "won", "died", "cut", or "left"
    parts: tuple[float, ...]
    actions: tuple[int, ...] | None = None  # None where nobody looked


def game(environment: Environment, seed: int, agent: Agent | None = None, *, greedy: bool = True) -> Game:
    """The games of a seed in HackMatrix, for a person or an agent. Compiles, which takes some seconds."""
    expand = environment.spec.expand
    assert expand is not None
    remember: Callable[[Moment], Moment] | None = None
    if agent is not None:
        remember, decide = chooser(environment, agent.config, greedy)
        chosen = jax.jit(lambda policy, i, t, moment: decide(policy, keys(seed, i), t, moment))

    def seen(moment: Moment) -> Any:
        return moment.state, expand(moment.observation.observation), moment.observation.mask

    def begin_on_device(i: jax.Array) -> Any:
        moment = begin(environment, keys(seed, i))
        moment = moment if remember is None else remember(moment)
        return moment, seen(moment)

    def step_on_device(i: jax.Array, t: jax.Array, moment: Moment, action: jax.Array) -> Any:
        after, led = step(environment, keys(seed, i), t, moment, action)
        return after, seen(after), led.reward, led.terminated, led.truncated

    begun, stepped = jax.jit(begin_on_device), jax.jit(step_on_device)

    def begun_game(number: int) -> Playing:
        moment, cells = begun(jnp.int32(number))
        return Playing(number, moment, screen.view(*jax.device_get(cells)))

    def stepped_game(playing: Playing, action: int) -> Playing:
        t, before = jnp.int32(len(playing.actions)), playing.view
        moment, cells, gained, terminated, truncated = stepped(
            jnp.int32(playing.number), t, playing.moment, jnp.int32(action)
        )
        view = screen.view(*jax.device_get(cells))
        parts = tuple(after - so_far for after, so_far in zip(view.parts, before.parts, strict=True))
        end = _end(view.parts, bool(terminated), bool(truncated))
        last = screen.Last(action, float(gained), parts)
        return Playing(playing.number, moment, view, last, (*playing.actions, action), end)

    def choose(playing: Playing) -> Choice:
        assert agent is not None
        choice = chosen(agent.policy, jnp.int32(playing.number), jnp.int32(len(playing.actions)), playing.moment)
        action, chances, value = jax.device_get((choice.action, choice.probabilities, choice.value))
        return Choice(int(action), screen.Opinion(tuple(map(float, chances)), float(value)), choice.memory)

    first = begun_game(0)
    stepped_game(first, 0)  # compiled now: later a screen waits
    if agent is not None:
        choose(first)
    return Game(begun_game, stepped_game, None if agent is None else choose)


def _end(parts: Sequence[float], terminated: bool, truncated: bool) -> str:
    if terminated:
        return "won" if parts[VICTORY] > 0 else "died"
    return "cut" if truncated else ""


def remembered(playing: Playing, choice: Choice) -> Playing:
    """A game in which the agent has made up its mind: its memory goes on."""
    return playing._replace(moment=playing.moment._replace(memory=choice.memory))


def record(playing: Playing) -> Record:
    """The record of a game as it is."""
    tally = jax.device_get(playing.moment.state.tally)
    view = playing.view
    return Record(
        playing.number, sum(view.parts), len(playing.actions), int(tally.stage), view.score, playing.end or "left",
        view.parts, playing.actions,
    )  # fmt: skip


def table(
    environment: Environment, seed: int, agent: Agent, *, episodes: int, greedy: bool, limit: int
) -> Iterator[Record]:
    """The records of the first `episodes` games of a seed, all played at once."""
    play = player(environment, agent.config, greedy=greedy, limit=limit)
    played = jax.device_get(play(agent.policy, jnp.int32(seed), jnp.arange(episodes, dtype=jnp.int32)))
    total, lengths, state, terminated = played
    for i in range(episodes):
        parts = tuple(map(float, state.tally.parts[i]))
        end = _end(parts, bool(terminated[i]), not terminated[i])
        length, stage, score = (int(values[i]) for values in (lengths, state.tally.stage, state.score))
        yield Record(i, float(total[i]), length, stage, score, end, parts)


def ends(records: Sequence[Record]) -> dict[str, int]:
    """Number of games by outcome."""
    return {end: sum(record.end == end for record in records) for end in ("won", "died", "cut", "left")}


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Means over games, the highest stage of all, and how they ended."""
    if not records:
        return {"episodes": 0}
    means: dict[str, list[Any]] = {
        "return": [record.total for record in records],
        "length": [record.length for record in records],
        "stage": [record.stage for record in records],
        "score": [record.score for record in records],
    }
    averages: dict[str, Any] = {name: float(np.mean(values)) for name, values in means.items()}
    return {"episodes": len(records), **averages, "highest_stage": max(means["stage"]), **ends(records)}
