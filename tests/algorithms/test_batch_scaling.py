"""Minibatches, epochs and learning rates by batch size, against the trainer's own numbers and by identities."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from longhaul.algorithms import batch_scaling, ppo
from longhaul.algorithms.batch_scaling import Passes
from longhaul.algorithms.config import LR_RULES, PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.cli import flags, run_flags
from longhaul.config import recipes
from longhaul.config import resolve as runs
from longhaul.config.run import Named, Run
from longhaul.envs import classic_control
from longhaul.networks.config import NetworkConfig
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.training import assemble
from tests.helpers.quick import quick


def trainers(batch: int) -> Passes:
    """The facts, as they are written down: scale = batch // 32768; min(4 scale, 64); max(2, 4 // scale)."""
    if batch <= 32768:
        return Passes(4, 4)
    scale = batch // 32768
    return Passes(min(4 * scale, 64), max(2, 4 // scale))


@pytest.mark.parametrize(
    ("envs", "steps", "expected"),
    [(256, 128, (4, 4)), (512, 128, (8, 2)), (2048, 128, (32, 2)), (2048, 256, (64, 2)), (4096, 256, (64, 2))],
)
def test_minibatches_and_epochs_are_the_trainers(envs: int, steps: int, expected: tuple[int, int]) -> None:
    assert batch_scaling.passes(envs * steps, "batch") == expected
    assert batch_scaling.passes(envs * steps, "none") == (4, 4)


def test_the_rule_at_each_edge() -> None:
    for batch in (1, 32767, 32768, 32769, 65535, 65536, 98304, 131071, 131072, 524288, 1 << 24):
        assert batch_scaling.passes(batch, "batch") == trainers(batch)


def test_given_minibatches_and_epochs_stay() -> None:
    assert batch_scaling.decide(262_144, 262_144, "batch", None, None) == (32, 2)
    assert batch_scaling.decide(262_144, 262_144, "batch", None, 3) == (32, 3)
    assert batch_scaling.decide(262_144, 262_144, "batch", 4, None) == (4, 4), (
        "as in the trainer: who gives one rules both"
    )
    assert batch_scaling.decide(262_144, 262_144, "batch", 7, 1) == (7, 1), "what is given is never corrected"


def test_the_nearest_divisor_is_that_of_a_plain_search() -> None:
    for n in range(1, 200):
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        for wanted in range(1, 70):
            best = min(divisors, key=lambda d: (abs(d - wanted), -d))
            assert batch_scaling.nearest_divisor(n, wanted) == best, (n, wanted)


def test_a_device_s_batch_is_divided_and_it_is_said() -> None:
    """The wanted number where it divides; else the nearest that does, with the number that it is not."""
    run = runs.resolve(_run(num_envs=1000, num_steps=99, devices=1))
    assert run.algorithm.num_minibatches == 12  # the batch is 99,000 steps, scale 3
    odd = runs.resolve(_run(num_envs=1000, num_steps=77, devices=8))
    assert odd.algorithm.num_minibatches == 7  # 9,625 rows, which 8 does not divide
    assert assemble.decisions(odd) == [
        "the batch is 77,000 steps: 7 minibatches (not 8, which does not divide 9,625) and 2 epochs, by --scaling batch"
    ]
    assert assemble.decisions(runs.resolve(_run())) == []


def _run(**changes: object) -> Run:
    config = PPOConfig(num_minibatches=None, update_epochs=None)
    base = Run("x", Named("cartpole"), config, num_envs=256, num_steps=128, total_steps=10**8, scaling="batch")
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_with_memory_columns_are_divided() -> None:
    config = PPOConfig(num_minibatches=None, update_epochs=None, network=NetworkConfig(memory=8))
    run = runs.resolve(_run(algorithm=config, num_envs=600, num_steps=128, devices=2))
    assert (run.algorithm.num_minibatches, run.algorithm.update_epochs) == (10, 2)  # of 300 columns; wanted: 8


def test_learning_rates_scale_by_their_rule() -> None:
    assert batch_scaling.lr_factor("none", 262_144, 32_768) == 1.0
    assert batch_scaling.lr_factor("linear", 262_144, 32_768) == 8.0
    assert batch_scaling.lr_factor("sqrt", 262_144, 32_768) == pytest.approx(math.sqrt(8))
    for rule in LR_RULES:
        assert batch_scaling.lr_factor(rule, 4096, 4096) == 1.0
        product = batch_scaling.lr_factor(rule, 300, 100) * batch_scaling.lr_factor(rule, 100, 300)
        assert product == pytest.approx(1.0)


def _chosen(recipe: str, *words: str) -> Run:
    made = recipes.recipe(recipe)
    return runs.resolve(run_flags.chosen(made, flags.parse(f"train {recipe}", "", run_flags.table(made), words)))


def test_the_base_is_the_recipes_own_batch() -> None:
    run = _chosen("cartpole", "--num-envs", "128", "--lr-rule", "sqrt")
    assert run.base_batch == 32 * 64
    assert assemble.learning_rate(run) == pytest.approx(2.5e-3 * 2)
    assert assemble.decisions(run) == [
        "the learning rate is 0.005: 0.0025 x 2, by --lr-rule sqrt for a batch of 8,192 steps instead of 2,048"
    ]
    assert run.algorithm.lr == 2.5e-3, "what was given stays in run.json"
    assert assemble.learning_rate(_chosen("cartpole", "--num-envs", "128")) == 2.5e-3
    assert assemble.learning_rate(_chosen("cartpole", "--lr-rule", "linear")) == 2.5e-3
    driven = _chosen("driving", "--num-envs", "512", "--lr-rule", "linear")
    assert assemble.learning_rate(driven) == pytest.approx(2 * driven.algorithm.lr)


def test_the_game_follows_its_batch_and_others_do_not() -> None:
    game = recipes.recipe("hackmatrix")
    assert (game.scaling, game.lr_rule) == ("batch", "none")
    larger = _chosen("hackmatrix", "--num-envs", "2048")
    assert (larger.algorithm.num_minibatches, larger.algorithm.update_epochs) == (32, 2)
    assert _chosen("hackmatrix", "--num-envs", "2048", "--scaling", "none").algorithm.num_minibatches == 4
    others = [recipes.recipe(name).scaling for name in recipes.RECIPES if not name.startswith("hackmatrix")]
    assert set(others) == {"none"}


def test_rules_that_are_none_are_refused() -> None:
    with pytest.raises(RunError, match="--scaling is 'much'; it must be one of none, batch"):
        runs.resolve(_run(scaling="much"))
    with pytest.raises(RunError, match="--lr-rule is 'cube'; it must be one of none, linear, sqrt"):
        runs.resolve(_run(lr_rule="cube"))
    with pytest.raises(RunError, match="--base-batch is 0; it must be at least 1"):
        runs.resolve(_run(base_batch=0))
    with pytest.raises(RunError, match="--warmup is -1; it must be at least 0"):
        runs.resolve(_run(algorithm=PPOConfig(warmup=-1)))


def test_a_resolved_run_is_resolved() -> None:
    run = runs.resolve(_run(num_envs=1024, lr_rule="sqrt", base_batch=100))
    assert runs.resolve(run) == run
    assert run.base_batch == 100


@pytest.mark.slow
def test_a_warm_up_rises_to_the_rate() -> None:
    """The learning rate that an update reports: 1/4, 2/4, 3/4 of it, then what it would be without."""
    spec = classic_control.cartpole().spec
    found: dict[int, list[float]] = {}
    for warmup in (0, 4):
        config = replaced(PPOConfig(), hidden_dim=4, num_layers=1, num_minibatches=1, update_epochs=1, warmup=warmup)
        algorithm = ppo.ppo(spec, config, RunContext(updates=10, mean=lambda x: x))
        state = algorithm.init(jax.random.key(0))
        data = _rollout(algorithm, state)
        learn = quick(algorithm.learn)
        rates = [learn(state._replace(updates=jnp.int32(i)), data, jax.random.key(1))[1]["ppo/lr"] for i in range(10)]
        found[warmup] = [float(rate) for rate in rates]
    expected = [rate * min(1.0, (i + 1) / 4) for i, rate in enumerate(found[0])]
    assert found[4] == pytest.approx(expected, rel=1e-6)
    assert found[4][4:] == found[0][4:]


def _rollout(algorithm: object, state: object) -> object:
    from longhaul.environment import vectorise
    from longhaul.rollout import collector

    made = collector(vectorise(classic_control.cartpole(), 2), algorithm.act, algorithm.memory, steps=4)  # type: ignore[attr-defined]
    carry = made.start(jax.random.key(0))
    policy = algorithm.policy(state)  # type: ignore[attr-defined]
    return made.collect(policy, carry, jax.random.key(1), jnp.int32(0))[1]
