"""The doctor's checks of a recipe: each passes on a sound one, and fails where the fault it looks for is made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import rollout
from longhaul.algorithms.config import OnPolicy, PPOConfig
from longhaul.cli import doctor
from longhaul.config import recipes
from longhaul.config.resolve import resolve
from longhaul.config.run import Named, Run
from longhaul.diagnostics import checks, hlo
from longhaul.diagnostics.checks import Check, fresh_cache
from longhaul.diagnostics.compiled_run import Program, compiled, smaller
from longhaul.diagnostics.hlo import Crossing
from longhaul.networks.config import NetworkConfig
from longhaul.runtime import device_memory
from longhaul.training import assemble


def tiny(**changes: Any) -> Run:
    """CartPole at a size that compiles and trains in seconds."""
    config = PPOConfig(num_minibatches=2, update_epochs=3, lr=3e-3, network=NetworkConfig(hidden_dim=8, num_layers=1))
    settings: dict[str, Any] = {
        "num_envs": 8, "num_steps": 32, "total_steps": 256 * 400, "devices": 2, "block": 4, "log_interval": 4,
        "algorithm": config,
    }  # fmt: skip
    return Run("tiny", Named("cartpole"), **(settings | changes))


@pytest.fixture(scope="module")
def pair() -> Program:
    """On two devices."""
    return compiled(resolve(tiny()))


@pytest.fixture(scope="module")
def alone() -> Program:
    return compiled(resolve(tiny(devices=1)))


def test_an_update_sends_its_gradients_once_a_step_of_the_optimiser(pair: Program) -> None:
    found = checks.crossings(pair)
    assert found.verdict == checks.PASS
    assert found.figures["gradients"] == 2 * 3
    assert found.figures["gradient_bytes"] == 2 * 3 * 4 * pair.parameters
    assert found.figures["operations"] == ["all-reduce"]


def test_an_unexpected_or_a_missing_collective_fails(pair: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hlo.crossings(pair.text())
    for extra in (Crossing("all-gather", 64, (None,)), Crossing("all-reduce", 10**6, (None, 3))):
        monkeypatch.setattr(hlo, "crossings", lambda text, extra=extra: [*real, extra])
        assert checks.crossings(pair).verdict == checks.FAIL
    monkeypatch.setattr(hlo, "crossings", lambda text: real[:1])
    assert checks.crossings(pair).verdict == checks.FAIL


def test_a_program_stays_on_its_devices_and_fits(pair: Program) -> None:
    home = checks.host(pair)
    assert home.verdict == checks.PASS
    rows = pair.executable.out_info[1]
    assert home.figures["metrics_bytes"] == 4 * (4 * (len(rows) - 1) + 1), "of each update: float32, and one bool"
    need = checks.memory(pair)
    assert need.verdict == checks.PASS
    assert need.figures["needed"] > 4 * 3 * pair.parameters, "parameters and two moments"


def test_memory_that_is_not_there_fails(pair: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = checks.memory(pair).figures["needed"]
    for total, verdict in ((needed // 2, checks.FAIL), (int(needed * 1.1), checks.WARN)):
        monkeypatch.setattr(device_memory, "memory_of", lambda device, total=total: 2 * total)
        assert checks.memory(pair).verdict == verdict


def test_the_same_seed_gives_the_same_parameters_and_another_others(pair: Program) -> None:
    found, seconds = checks.determinism(pair)
    assert found.verdict == checks.PASS and seconds > 0.0
    assert found.figures["digests"][0] == pair.digest(pair.updates(pair.start(pair.run.seed), checks.SHORT)[0])
    assert found.figures["digests"][0] != pair.digest(pair.updates(pair.start(pair.run.seed + 1), checks.SHORT)[0])


def test_a_sum_that_differs_from_run_to_run_fails(pair: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter((0, 1, 0))
    monkeypatch.setattr(Program, "start", lambda self, seed: self.begin(jax.random.key(next(seeds))))
    assert checks.determinism(pair)[0].verdict == checks.FAIL


@pytest.mark.slow
def test_times_are_shares(pair: Program, alone: Program) -> None:
    reduced = checks.all_reduce(pair, 1.0)
    assert 0.0 < reduced.figures["share"] == pytest.approx(reduced.figures["seconds"] * 6)
    assert checks.all_reduce(pair, 1e-9).verdict == checks.FAIL
    assert checks.all_reduce(alone, 1.0).verdict == checks.SKIP
    stalled = checks.stalls(pair, 1.0, calls=3)
    assert 0.0 <= stalled.figures["between_calls"] <= 1.0


def test_a_device_that_waits_for_the_host_is_seen(alone: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that sleeps far longer than a call takes leaves the device idle for most of the time."""
    import time

    take = checks.Sums.take

    def slow(self: Any) -> Any:
        time.sleep(0.4)
        return take(self)

    monkeypatch.setattr(checks.Sums, "take", slow)
    assert checks.stalls(alone, 1.0, calls=5).verdict == checks.FAIL


def test_one_device_and_two_learn_the_same(alone: Program, pair: Program) -> None:
    found = checks.convergence(alone, pair, seeds=5, updates=24)
    assert found.verdict == checks.PASS
    assert found.figures["gained"] > 0.0
    assert np.shape(found.figures["curves"]) == (2, 5, 24)


def test_devices_that_learn_something_else_fail(alone: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second side is given a curve that stays where it began."""
    real = checks.curve

    def curve(made: Program, seed: int, updates: int) -> np.ndarray:
        found = real(made, seed, updates)
        return found if made is alone else np.full_like(found, 10.0 + 0.1 * seed)

    monkeypatch.setattr(checks, "curve", curve)
    found = checks.convergence(alone, alone._replace(parameters=1), seeds=5, updates=24)
    assert found.verdict == checks.FAIL
    assert found.figures["chance"] == pytest.approx(2 / math.comb(10, 5))


def test_the_chance_of_a_permutation_is_exact() -> None:
    """Of 20 ways to deal 3 and 3, two are as extreme as 1 2 3 against 4 5 6."""
    assert checks.permutation_chance([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == pytest.approx(2 / 20)
    assert checks.permutation_chance([1.0, 2.0], [2.0, 1.0]) == 1.0
    rng = np.random.default_rng(0)
    chances = [checks.permutation_chance(*rng.normal(size=(2, 5)).tolist()) for _ in range(400)]
    assert np.mean(np.array(chances) <= 0.05) < 0.09, "no more often than it says"


@pytest.mark.slow
def test_a_learning_rate_of_zero_leaves_the_policy_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a rollout that keeps another observation than the policy saw is found: HackMatrix's own trainer did that."""
    run = resolve(tiny(devices=1))
    assert checks.still(run) == Check(
        "lr 0", checks.PASS, "approx_kl 0.0e+00", "< 1e-06", "", {"approx_kl": 0.0}
    )  # fmt: skip
    made = rollout.collector

    def mixed_up(*arguments: Any, **keywords: Any) -> Any:
        inner = made(*arguments, **keywords)

        def collect(*given: Any) -> Any:
            carry, data, scores = inner.collect(*given)
            return carry, data._replace(observation=jnp.roll(data.observation, -1, axis=0)), scores

        return inner._replace(collect=collect)

    monkeypatch.setattr(assemble, "collector", mixed_up)
    found = checks.still(run)
    assert found.verdict == checks.FAIL
    assert found.figures["approx_kl"] > checks.COARSE * checks.STILL


def test_the_doctors_cache_is_its_own_and_empty() -> None:
    before = jax.config.jax_compilation_cache_dir
    with fresh_cache() as folder:
        assert list(folder.iterdir()) == []
        assert jax.config.jax_compilation_cache_dir == str(folder) != before
    assert not folder.exists()
    assert jax.config.jax_compilation_cache_dir == before


def test_sizes_and_the_learning_rate_are_said() -> None:
    found, resolved = checks.sizes(tiny(num_envs=12, devices=None))
    assert found.verdict == checks.PASS and resolved is not None
    assert found.figures == {"steps": 12 * 32, "devices": [1, 2, 4]}
    found, resolved = checks.sizes(tiny(num_envs=7))
    assert (found.verdict, resolved) == (checks.FAIL, None)
    assert "multiple of 2" in found.remedy
    grown = dataclasses.replace(recipes.recipe("cartpole"), num_envs=256, devices=2)
    assert checks.rate(resolve(grown)).verdict == checks.WARN
    ruled = dataclasses.replace(grown, lr_rule="sqrt", base_batch=2048)
    said = checks.rate(resolve(ruled))
    assert said.verdict == checks.PASS
    assert said.figures["lr"] == pytest.approx(2.5e-3 * math.sqrt(8))
    assert said.figures["batch"] == 8 * 2048


ON_POLICY = [n for n in recipes.RECIPES if isinstance(recipes.recipe(n).algorithm, OnPolicy) and n != "brax-ant"]
"""Without the one whose environment is of a suite that need not be installed."""


@pytest.mark.parametrize("name", ON_POLICY)
def test_every_recipe_has_a_smaller_self(name: str) -> None:
    for devices in (1, 2):
        run = resolve(smaller(recipes.recipe(name), devices=devices))
        assert (run.devices, run.block) == (devices, 2)
        assert run.num_envs * run.num_steps <= 4096


@pytest.mark.slow
def test_collectives_are_counted_in_another_process_where_one_device_is_all() -> None:
    found = doctor.of_two_shards(tiny(devices=1))
    assert (found.verdict, found.figures["gradients"]) == (checks.PASS, 6)
    assert found.figures["devices"] == 2
