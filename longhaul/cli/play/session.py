"""A game of HackMatrix on the host, between two steps, for whoever looks at it; and records of whole games."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.cli.play import episodes as matches
from longhaul.cli.play.episodes import Agent, Moment
from longhaul.envs.hackmatrix import reward, screen
from longhaul.envs.hackmatrix import view as views
from longhaul.types import Environment

VICTORY = reward.PARTS.index("victory")


class Playing(NamedTuple):
    """A game between two steps."""

    number: int  # the episode's
    moment: Moment  # on the device
    view: views.View
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
    remember: Callable[[Moment], Moment] = _unchanged
    if agent is not None:
        remember, chooser = matches.chooser(environment, agent.config, greedy)
        chosen = jax.jit(lambda policy, i, t, moment: chooser(policy, matches.keys(seed, i), t, moment))

    def seen(moment: Moment) -> Any:
        return moment.state, expand(moment.observation.observation), moment.observation.mask

    def begin_on_device(i: jax.Array) -> Any:
        moment = remember(matches.begin(environment, matches.keys(seed, i)))
        return moment, seen(moment)

    def step_on_device(i: jax.Array, t: jax.Array, moment: Moment, action: jax.Array) -> Any:
        led = matches.step(environment, matches.keys(seed, i), t, moment, action)
        return led.moment, seen(led.moment), led.reward, led.terminated, led.truncated

    begun, stepped = jax.jit(begin_on_device), jax.jit(step_on_device)

    def begin(number: int) -> Playing:
        moment, there = begun(jnp.int32(number))
        return Playing(number, moment, views.view(*jax.device_get(there)))

    def step(playing: Playing, action: int) -> Playing:
        t, before = jnp.int32(len(playing.actions)), playing.view
        moment, there, gained, terminated, truncated = stepped(
            jnp.int32(playing.number), t, playing.moment, jnp.int32(action)
        )
        view = views.view(*jax.device_get(there))
        parts = tuple(after - so_far for after, so_far in zip(view.parts, before.parts, strict=True))
        end = _end(view.parts, bool(terminated), bool(truncated))
        last = screen.Last(action, float(gained), parts)
        return Playing(playing.number, moment, view, last, (*playing.actions, action), end)

    def choose(playing: Playing) -> Choice:
        assert agent is not None
        found = chosen(agent.policy, jnp.int32(playing.number), jnp.int32(len(playing.actions)), playing.moment)
        action, chances, value = jax.device_get((found.action, found.probabilities, found.value))
        return Choice(int(action), screen.Opinion(tuple(map(float, chances)), float(value)), found.memory)

    first = begin(0)
    step(first, 0)  # compiled now: later a screen waits
    if agent is None:
        return Game(begin, step, None)
    choose(first)
    return Game(begin, step, choose)


def _unchanged(moment: Moment) -> Moment:
    return moment


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
    play = matches.player(environment, agent.config, greedy=greedy, limit=limit)
    played = jax.device_get(play(agent.policy, jnp.int32(seed), jnp.arange(episodes, dtype=jnp.int32)))
    tally = played.state.tally
    for i in range(episodes):
        parts = tuple(map(float, tally.parts[i]))
        end = _end(parts, bool(played.terminated[i]), not played.terminated[i])
        length, stage, score = (int(each[i]) for each in (played.length, tally.stage, played.state.score))
        yield Record(i, float(played.total[i]), length, stage, score, end, parts)


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
    found: dict[str, Any] = {name: float(np.mean(values)) for name, values in means.items()}
    return {"episodes": len(records), **found, "highest_stage": max(means["stage"]), **ends(records)}
