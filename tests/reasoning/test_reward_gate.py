"""The gate as a table of looks; then in the learner: what is due, what a look changes, and what it does not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import grpo, registry
from longhaul.algorithms.run_context import RunContext
from longhaul.reasoning import reward_gate, sampler, tasks
from longhaul.reasoning.config import GateConfig
from longhaul.replay import Sizes
from longhaul.runtime import mesh as meshes
from tests.algorithms.test_grpo import ROWS, TINY, completions, config
from tests.helpers.quick import quick

SETTINGS = GateConfig(threshold=0.6, hysteresis=0.1, patience=3, rise=0.05, every=4)
LOOK = quick(lambda now, level: reward_gate.look(SETTINGS, now, level))


def looks(levels: Sequence[float]) -> list[reward_gate.Gate]:
    after = itertools.accumulate(map(jnp.float32, levels), LOOK, initial=reward_gate.begin(SETTINGS))
    return list(after)[1:]


@pytest.mark.parametrize(
    ("levels", "opened", "visits"),
    [
        ([0.2, 0.4, 0.59], [False, False, False], 1),
        ([0.2, 0.61, 0.55, 0.51], [False, True, True, True], 1),  # within the hysteresis it stays open
        ([0.2, 0.61, 0.49, 0.59], [False, True, False, False], 2),
        ([0.2, 0.2, 0.24, 0.2], [False, False, False, True], 1),  # no rise of 0.05 in three looks: let through
        ([0.2, 0.2, 0.26, 0.2, 0.2], [False, False, False, False, False], 1),
    ],
)
def test_it_opens_and_closes_as_it_says(levels: list[float], opened: list[bool], visits: int) -> None:
    found = looks(levels)
    assert [bool(each.open) for each in found] == opened
    assert int(found[-1].visits) == visits


def test_who_was_let_through_is_not_taught_again() -> None:
    found = looks([0.2, 0.2, 0.2, 0.2, 0.0, 0.0])
    assert [bool(each.through) for each in found] == [False, False, False, True, True, True]
    assert bool(found[-1].open)


def test_without_a_threshold_it_is_open_for_good() -> None:
    free = GateConfig()
    now = reward_gate.begin(free)
    for level in (0.0, 0.0):
        now = reward_gate.look(free, now, jnp.float32(level))
        assert bool(now.open)
        assert not bool(now.through)


@pytest.mark.parametrize(
    ("name", "value"), [("threshold", 1.5), ("hysteresis", -0.1), ("patience", 0), ("every", 0), ("fewest", 0)]
)
def test_settings_out_of_bounds_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"gate_{name} is {value}"):
        registry.check(config(gate=dataclasses.replace(SETTINGS, **{name: value})), Sizes(1, ROWS, 6))


def learner(**changes: Any) -> Any:
    settings = config(gate=SETTINGS, taught=2, warmup=0, lr=1e-2, **changes)
    return grpo.grpo(None, settings, RunContext(updates=9, mean=meshes.identity))


def test_while_it_is_closed_chains_are_due_but_for_looks() -> None:
    made = learner()
    state = quick(made.init)(jax.random.key(0))
    lesson = quick(lambda state, update: made.policy(state._replace(updates=update)).lesson)
    due = [int(lesson(state, jnp.int32(u))) for u in range(8)]
    look, chains, shown = sampler.SAMPLED, sampler.SOLVED, sampler.DEMONSTRATED
    assert due == [shown, shown, look, chains, chains, chains, look, chains]
    opened = state._replace(gate=state.gate._replace(open=jnp.bool_(True)))
    assert [int(lesson(opened, jnp.int32(u))) for u in (2, 3)] == [look, look]


@pytest.mark.slow
def test_a_look_at_a_closed_gate_changes_nothing_but_the_gate() -> None:
    made, (params, data) = learner(), completions()
    state = made.init(jax.random.key(0))._replace(params=params, updates=jnp.int32(2), imitated=jnp.int32(2))
    learn = quick(made.learn)
    shut, told = learn(state, data, jax.random.key(1))  # soundness 0.25 on the mean
    jax.tree.map(np.testing.assert_array_equal, (shut.params, shut.opt_state), (state.params, state.opt_state))
    assert float(shut.gate.level) == pytest.approx(0.25)
    assert float(told["grpo/gate_open"]) == 0.0
    sound = data._replace(soundness=jnp.full(ROWS, 0.7))
    opened, told = learn(state, sound, jax.random.key(1))
    assert float(told["grpo/gate_open"]) == 1.0
    assert float(told["grpo/grad_norm"]) > 0.0
    moved = [float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, (opened.params, params)))]
    assert max(moved) > 1e-3
    taught = data._replace(lesson=jnp.full(ROWS, sampler.SOLVED))
    scaffolded, told = learn(state, taught, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, scaffolded.gate, state.gate)  # what it copies says nothing of it
    assert float(told["grpo/lr"]) == pytest.approx(1e-3)
    assert int(scaffolded.imitated) == 3


@pytest.mark.slow
def test_own_chains_are_imitated_where_there_are_enough() -> None:
    """STaR: of 8 completions 3 are verified chains and learnt, whatever the others are; 2 are too few."""
    params, data = completions()
    settings = dataclasses.replace(SETTINGS, chains="own", fewest=3)
    made = grpo.grpo(
        None, config(gate=settings, warmup=0, lr_scaffold=1e-2), RunContext(updates=9, mean=meshes.identity)
    )
    state = made.init(jax.random.key(0))._replace(params=params)
    due = [int(made.policy(state._replace(updates=jnp.int32(u))).lesson) for u in (0, 1)]
    assert due == [sampler.SAMPLED, sampler.OWN]
    learn = quick(made.learn)

    def learnt(chains: jax.Array, token: jax.Array) -> Any:
        own = data._replace(lesson=jnp.full(ROWS, sampler.OWN), taken=data.taken & chains[:, None], token=token)
        return learn(state, own, jax.random.key(1))[0].params

    three = jnp.arange(ROWS) % 3 == 0
    after = learnt(three, data.token)
    before, now = (sampler.log_probs(TINY, each, data.prompt, data.token, 1.0)[0] for each in (params, after))
    assert float(jnp.sum((now - before) * data.taken * three[:, None])) > 0.1
    others = learnt(three, jnp.where(three[:, None] | (data.token == 0), data.token, 5))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), others, after)
    jax.tree.map(np.testing.assert_array_equal, learnt(three & (jnp.arange(ROWS) > 0), data.token), params)


def test_a_model_in_words_is_looked_at_by_its_verdicts() -> None:
    """Text without steps has no soundness: the share of right answers opens the gate."""
    settings = config(gate=dataclasses.replace(SETTINGS, verdict=True), taught=0)
    made, (params, data) = grpo.grpo(None, settings, RunContext(updates=9, mean=meshes.identity)), completions()
    state = quick(made.init)(jax.random.key(0))._replace(params=params)
    for right in (0.25, 0.75):
        marked = data._replace(soundness=jnp.zeros(ROWS), reward=(jnp.arange(ROWS) < right * ROWS).astype(jnp.float32))
        after, _ = quick(lambda state, marked: grpo._next_gate(settings, state, marked, meshes.identity))(state, marked)
        assert float(after.level) == pytest.approx(right)
        assert bool(after.open) == (right >= SETTINGS.threshold)


@pytest.mark.slow
def test_a_closed_gate_is_looked_at_by_problems_that_are_never_imitated() -> None:
    task = tasks.arithmetic(1, 3)
    asked = tasks.problems(task, np.random.default_rng(0), 43)
    bank = sampler.bank(task, asked, np.random.default_rng(0), 21)
    how = sampler.Sampling(21, group=2, wave=64)
    collect = jax.jit(sampler.collector(TINY, bank, how, prompts=64, gated=True).collect)
    params = completions()[0]
    seen: dict[str, set[int]] = {}
    for name, lesson, look in (("look", sampler.SAMPLED, True), ("solved", sampler.SOLVED, False),
                               ("own", sampler.OWN, False), ("rewards", sampler.SAMPLED, False)):  # fmt: skip
        seen[name] = set()
        for seed in range(8):
            speaker = sampler.Speaker(params, jnp.int32(lesson), jnp.float32(1.0), jnp.int32(look))
            data = collect(speaker, (), jax.random.key(seed), jnp.int32(0))[1]
            seen[name] |= set(np.asarray(data.problem).tolist())
    assert seen["look"] == {7, 15, 23, 31, 39}
    assert seen["solved"] == seen["own"] == set(range(43)) - seen["look"]
    assert seen["rewards"] == set(range(43))
