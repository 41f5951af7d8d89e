"""Every probe's closed form against its own steps: enumerated, and played."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.envs import probes
from longhaul.envs.probes import POISON, PROBES, Probe
from longhaul.spaces import Box, Discrete, Masked, MultiDiscrete

FINITE = [name for name in PROBES if name != "continuous"]


class Edge(NamedTuple):
    """One move of one agent: from a state and what is seen there, to another."""

    state: bytes
    seen: bytes
    action: tuple[int, ...]
    reward: float
    terminated: bool
    truncated: bool
    after: bytes
    after_seen: bytes


def name_of(observation: Any) -> bytes:
    """An observation as something to look up."""
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(observation))


def row(tree: Any, agent: int | None) -> Any:
    return tree if agent is None else jax.tree.map(lambda leaf: leaf[agent], tree)


def actions_of(probe: Probe) -> list[tuple[int, ...]]:
    action = probe.environment.spec.action
    sizes = action.sizes if isinstance(action, MultiDiscrete) else (action.n,) if isinstance(action, Discrete) else ()
    return list(np.ndindex(*sizes))


def as_action(probe: Probe, choice: tuple[int, ...]) -> jax.Array:
    spec = probe.environment.spec
    one = jnp.array(choice if isinstance(spec.action, MultiDiscrete) else choice[0], jnp.int32)
    return one if spec.agents is None else jnp.broadcast_to(one, (spec.agents,))


def firsts(probe: Probe) -> list[Any]:
    """The different (state, observation) that episodes begin with, over 64 keys."""
    reset = jax.jit(jax.vmap(probe.environment.reset))
    states, seen = jax.device_get(reset(jax.random.split(jax.random.key(0), 64)))
    every = [jax.tree.map(lambda leaf, i=i: np.asarray(leaf[i]), (states, seen)) for i in range(64)]
    return list({name_of(one): one for one in every}.values())


def explore(probe: Probe) -> Iterator[Edge]:
    """Every move that can be made, by the environment's own step from every state that is reached."""
    environment = probe.environment
    step = jax.jit(environment.step)
    waiting = firsts(probe)
    known = {name_of(state) for state, _ in waiting}
    while waiting:
        state, seen = waiting.pop()
        playing = np.asarray(environment.active(state))
        for choice in actions_of(probe):
            after, result = jax.tree.map(np.asarray, step(jax.random.key(0), state, as_action(probe, choice)))
            for agent in [None] if environment.spec.agents is None else range(environment.spec.agents):
                if not row(playing, agent):
                    assert row(result.reward, agent) == POISON
                    continue
                here = row(seen, agent)
                if isinstance(here, Masked) and not here.mask[choice]:
                    assert row(result.reward, agent) == POISON
                    continue
                yield Edge(
                    name_of(row(state, agent)),
                    name_of(here),
                    choice,
                    float(row(result.reward, agent)),
                    bool(row(result.terminated, agent)),
                    bool(row(result.truncated, agent)),
                    name_of(row(after, agent)),
                    name_of(row(result.successor, agent)),
                )
            if environment.active(after).any() and name_of(after) not in known:
                known.add(name_of(after))
                waiting.append((after, result.observation))


def solve(edges: set[Edge], gamma: float) -> tuple[dict[bytes, float], dict[bytes, list[tuple[int, ...]]]]:
    """Value iteration in NumPy: value by observation (mean over the states that show it), and the best actions there.

    What follows a truncated step is worth what its observation is worth, for that is all a trainer can know of it.
    """
    shows = {edge.state: edge.seen for edge in edges}
    value = dict.fromkeys(shows, 0.0)
    for _ in range(400):
        seen_value = {
            seen: float(np.mean([value[state] for state in shows if shows[state] == seen])) for seen in shows.values()
        }
        quality: dict[tuple[bytes, tuple[int, ...]], float] = {}
        for edge in edges:
            later = seen_value[edge.after_seen] if edge.truncated else value.get(edge.after, 0.0)
            quality[edge.state, edge.action] = edge.reward + (0.0 if edge.terminated else gamma * later)
        value = {state: max(q for (s, _), q in quality.items() if s == state) for state in shows}
    best: dict[bytes, list[tuple[int, ...]]] = {}
    for (state, choice), q in quality.items():
        if q > value[state] - 1e-9:
            best.setdefault(shows[state], []).append(choice)
    return seen_value, best


def played(probe: Probe, act: Any, episodes: int) -> float:
    """Mean undiscounted return of an agent's episode; `act` maps a world's (observations so far, key) to an action."""
    environment = probe.environment
    steps = environment.spec.max_steps
    assert steps is not None

    def episode(key: jax.Array) -> jax.Array:
        state, seen = environment.reset(key)
        total, past = 0.0, [seen]
        for t in range(steps):
            playing = environment.active(state)
            state, result = environment.step(key, state, act(past, jax.random.fold_in(key, t)))
            total = total + jnp.where(playing, result.reward, 0.0)
            past.append(result.observation)
        return jnp.mean(total)

    return float(jnp.mean(jax.jit(jax.vmap(episode))(jax.random.split(jax.random.key(1), episodes))))


def best_act(probe: Probe) -> Any:
    """A function for `played`: the probe's policy, or the first action where there is nothing to choose."""
    spec = probe.environment.spec

    def act(past: list[Any], key: jax.Array) -> jax.Array:
        if probe.policy is None:
            return as_action(probe, (0,))
        chosen = jnp.asarray(probe.policy[0][1])
        for observation, action in probe.policy[1:]:
            pairs = zip(jax.tree.leaves(observation), jax.tree.leaves(past[-1]), strict=True)
            here = jnp.array([jnp.all(jnp.asarray(a) == b) for a, b in pairs]).all()
            chosen = jnp.where(here, jnp.asarray(action), chosen)
        return chosen.astype(jnp.float32 if isinstance(spec.action, Box) else jnp.int32)

    return act


@pytest.mark.parametrize("name", FINITE)
def test_values_and_policies_are_those_of_value_iteration(name: str) -> None:
    probe = PROBES[name]()
    value, best = solve(set(explore(probe)), probe.gamma)
    listed = [name_of(observation) for observation, _ in probe.value]
    assert len(set(listed)) == len(listed), "an observation is listed twice"
    for observation, expected in probe.value:
        assert value[name_of(observation)] == pytest.approx(expected, abs=1e-6)
    if not probe.memory:
        assert set(listed) == set(value), "an observation is missing from the list"
    if probe.policy is None:
        # Then there is nothing to choose, but for the probe whose choice takes memory.
        assert all(len(set(choices)) == len(actions_of(probe)) for choices in best.values()) or probe.memory
    else:
        for observation, action in probe.policy:
            assert set(best[name_of(observation)]) == {tuple(np.atleast_1d(action))}, "not the only best action"
        assert {name_of(observation) for observation, _ in probe.policy} == set(value)


@pytest.mark.parametrize("name", [name for name in PROBES if not PROBES[name]().memory])
def test_the_best_policy_earns_the_best_return(name: str) -> None:
    probe = PROBES[name]()
    episodes = 4096
    # The probes whose return is a fair sign have a standard error of 1 / 64.
    assert played(probe, best_act(probe), episodes) == pytest.approx(probe.best_return, abs=4 / 64)


def test_memory_is_worth_half_a_reward() -> None:
    probe = probes.memory()

    def recall(past: list[Any], key: jax.Array) -> jax.Array:
        return (past[0][0] > 0).astype(jnp.int32)

    def react(past: list[Any], key: jax.Array) -> jax.Array:
        return (past[-1][0] > 0).astype(jnp.int32)  # the best of what is seen now, which is nothing at the end

    assert played(probe, recall, 256) == probe.best_return == 1.0
    assert played(probe, react, 4096) == pytest.approx(0.5, abs=4 * 0.5 / 64)


@pytest.mark.parametrize("delay", [1, 5])
def test_memory_waits_as_long_as_it_is_told(delay: int) -> None:
    probe = probes.memory(delay)
    assert probe.environment.spec.max_steps == delay + 1
    value, _ = solve(set(explore(probe)), probe.gamma)
    assert [value[name_of(seen)] for seen, _ in probe.value] == pytest.approx([0.9**delay] * 2)


def test_the_continuous_reward_is_one_less_the_squared_miss() -> None:
    probe = probes.continuous()
    state, seen = probe.environment.reset(jax.random.key(0))
    target = float(seen[0]) * np.array([0.5, -1.0])
    for action in np.random.default_rng(0).uniform(-1, 1, (8, 2)).astype(np.float32):
        after, result = probe.environment.step(jax.random.key(0), state, jnp.asarray(action))
        assert float(result.reward) == pytest.approx(1.0 - ((action - target) ** 2).sum(), abs=1e-6)
        assert bool(result.terminated)
        again = probe.environment.step(jax.random.key(0), after, jnp.asarray(action))[1]
        assert float(again.reward) == POISON
    action_space = probe.environment.spec.action
    assert isinstance(action_space, Box)
    assert probe.policy is not None
    for observation, best in probe.policy:
        np.testing.assert_array_equal(best, observation * np.array([0.5, -1.0], np.float32))
        assert (np.array(action_space.low) < best).all()
        assert (best < np.array(action_space.high)).all()


def test_wrong_bootstraps_miss_the_values_by_more_than_the_tolerance() -> None:
    """The probes can fail: what the usual bugs would learn, from the same edges, is far from the oracle."""
    limit = probes.time_limit()
    cut_is_end = {edge._replace(terminated=edge.terminated or edge.truncated) for edge in explore(limit)}
    assert solve(cut_is_end, limit.gamma)[0][name_of(limit.value[0][0])] < 5.0

    # The next episode's first observation instead of the successor: each of the four places as likely, so their mean.
    future = probes.successor()
    edges = set(explore(future))
    wrong = dict.fromkeys({edge.seen for edge in edges}, 0.0)
    for _ in range(200):
        mean = float(np.mean(list(wrong.values())))
        wrong = {e.seen: e.reward + (future.gamma * mean if e.truncated else 0.0) for e in edges}
    right = {name_of(seen): worth for seen, worth in future.value}
    cut = {edge.seen for edge in edges if edge.truncated}
    assert len(cut) == 2
    assert all(abs(wrong[seen] - right[seen]) > 0.5 for seen in cut)


def test_without_its_mask_the_masked_probe_pays_a_third() -> None:
    probe = probes.masked()
    earned = [
        played(probe, lambda past, key, a=a: jnp.int32(a), 4096) for a in range(3)
    ]  # an action for all masks, legal or not
    assert max(earned) == pytest.approx(1 / 3, abs=4 * 0.48 / 64)


@pytest.mark.parametrize("make", [lambda: probes.time_limit(0), lambda: probes.memory(0)])
def test_impossible_lengths_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="is 0, but"):
        make()
