"""Evaluation scores what a policy does in whole episodes: known returns, the same twice, whatever it was trained on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import evaluation, recipes, worlds
from longhaul import run as runs
from longhaul.algorithms import ppo
from longhaul.driving import recording, simulator
from longhaul.envs import probes
from longhaul.evaluation import Drives, Scores
from longhaul.run import Driving, Named
from longhaul.types import Box, Discrete, Environment, Spec, TimeStep, transition
from tests import fixtures_logs
from tests.small_runs import small


def policy(run: runs.Run, environment: Environment, seed: int = 0) -> Any:
    """A policy of the run before any training."""
    algorithm = ppo.ppo(environment.spec, run.algorithm, updates=1, mean=lambda tree: tree)
    return algorithm.policy(algorithm.init(jax.random.key(seed)))


def test_means_are_means_and_episodes_are_counted() -> None:
    scores = Scores({"return": np.array([1.0, 2.0, 6.0]), "length": np.array([3.0, 3.0, 3.0])}, ["a", "b", "b"])
    assert scores.means() == {"return": 3.0, "length": 3.0, "episodes": 3}


COUNTDOWN = Spec(jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), max_steps=3)


@dataclasses.dataclass(frozen=True)
class Countdown:
    """Begins with 1, 2 or 3 steps to go; each earns what is still to go, whatever is done. Metric: how it began."""

    spec: Spec = COUNTDOWN

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        left = jax.random.randint(key, (), 1, 4)
        return (left, left), left[None].astype(jnp.float32)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        left, began = state
        after = left - 1
        observation = after[None].astype(jnp.float32)
        return (after, began), transition(observation, left.astype(jnp.float32), after == 0, jnp.bool_(False))

    def active(self, state: Any) -> jax.Array:
        return state[0] > 0

    def metrics(self, state: Any) -> dict[str, jax.Array]:
        return {"began": state[1].astype(jnp.float32)}


def test_each_episode_is_played_once_to_its_end() -> None:
    """Those that end early earn nothing more: from n, the return is n + (n - 1) + ... + 1."""
    environment = Countdown()
    run = small(environment=Named("cartpole"))
    scores = evaluation.play_classic(run, environment, policy(run, environment), 40)
    began = scores.metrics["began"]
    assert set(began) == {1.0, 2.0, 3.0}
    np.testing.assert_array_equal(scores.metrics["length"], began)
    np.testing.assert_array_equal(scores.metrics["return"], began * (began + 1) / 2)
    assert scores.names == [""] * 40
    assert scores.means()["return"] == np.mean(began * (began + 1) / 2)


def test_agents_are_episodes_each() -> None:
    """The probe of several agents, some of which never play: none of them is counted."""
    probe = probes.PROBES["agents"]()
    run = small(environment=Named("probe/agents"), num_envs=8)
    scores = evaluation.play_classic(run, probe.environment, policy(run, probe.environment), 5)
    state, _ = jax.vmap(probe.environment.reset)(jax.random.split(jax.random.key(0), 5))
    playing = int(np.sum(jax.vmap(probe.environment.active)(state)))
    assert len(scores.names) == len(scores.metrics["return"]) == playing
    assert np.all(scores.metrics["return"] > probes.POISON)


def test_it_is_the_same_twice_and_whatever_the_run_was_trained_on() -> None:
    """The mode of the policy, from starts that depend on the seed alone."""
    environment = runs.named(Named("pendulum"))
    assert isinstance(environment.spec.action, Box)
    run = small(environment=Named("pendulum"))
    acting = policy(run, environment)
    found = evaluation.play_classic(run, environment, acting, 4).metrics
    others = (run, small(environment=Named("pendulum"), devices=4, num_envs=16, total_steps=10**6))
    for other in others:
        again = evaluation.play_classic(other, environment, acting, 4).metrics
        assert {k: v.tobytes() for k, v in again.items()} == {k: v.tobytes() for k, v in found.items()}
    else_where = evaluation.play_classic(dataclasses.replace(run, seed=4), environment, acting, 4).metrics
    assert np.all(else_where["return"] != found["return"])
    assert np.all(found["length"] == 200)


def test_what_may_never_end_is_refused() -> None:
    environment = Countdown(dataclasses.replace(Countdown().spec, max_steps=None))
    with pytest.raises(ValueError, match="may never end; give it a time limit"):
        evaluation.play_classic(small(), environment, policy(small(), environment), 1)


# ---------------------------------------------------------------------------------------------------------- driving


def driving(**changes: Any) -> runs.Run:
    recipe = recipes.driving()
    algorithm = dataclasses.replace(recipe.algorithm, hidden_dim=8, num_layers=1)
    return runs.resolve(dataclasses.replace(recipe, algorithm=algorithm, devices=1, **changes))


@pytest.fixture(scope="module")
def generated() -> Drives:
    return evaluation.drives(driving(), count=4)


def test_generated_scenarios_are_those_that_no_run_trains_in(generated: Drives) -> None:
    wanted = worlds.generated(worlds.HELD_OUT, 4, agents=1, horizon=None, workers=1)
    assert [s.id for s in generated.scenarios] == [s.id for s in wanted]
    train = worlds.generated(0, 4, agents=1, horizon=None, workers=1)
    assert not {s.id for s in train} & {s.id for s in wanted}


def test_who_replays_the_log_makes_no_fault(generated: Drives) -> None:
    scores, films = generated.play(None, "log", [2, 0])
    assert scores.names == [s.id for s in generated.scenarios]
    means = scores.means()
    assert means["accuracy"] == 1.0
    assert means["progress"] >= 0.99
    assert means["log_divergence"] == 0.0
    assert means["episodes"] == 4
    for which, film in zip((2, 0), films, strict=True):  # a recording is of the drive that was scored
        scenario = generated.scenarios[which]
        assert film.id == scenario.id
        assert film.dt == scenario.dt
        frames = len(film.pose)
        assert frames == scores.metrics["length"][which] + 1
        ego = int(scenario.controlled[0])
        np.testing.assert_allclose(film.pose[:, film.ego, :2], scenario.pose[:frames, ego, :2], atol=1e-4)
        assert film.metrics["accuracy"] == 1.0
        assert all(film.events[name] is None for name in ("collision", "offroad", "red_light"))
    named = evaluation.label(films, "the log")
    recording.check(named)
    assert [film.label for film in named] == ["the log"] * 2


def test_a_log_is_driven_in_as_the_run_had_it_or_as_it_is_asked_for(tmp_path: Path) -> None:
    """The log's own driver in two formats of one log scores alike, and each scenario once."""
    paths = fixtures_logs.write_all(fixtures_logs.make_log(), tmp_path)
    run = driving(environment=Driving((str(paths["gpudrive"]),)))
    own = evaluation.drives(run)
    assert len(own.scenarios) == 1
    both = evaluation.drives(run, [str(paths["womd-example"]), str(paths["gpudrive"])])
    scores = both.play(None, "log")[0]
    assert scores.means()["accuracy"] == 1.0
    assert scores.means()["episodes"] == 2
    for name, (one, other) in scores.metrics.items():
        assert one == pytest.approx(other, abs=1e-3), name
    assert len(evaluation.drives(run, [str(paths["womd-example"]), str(paths["gpudrive"])], 1).scenarios) == 1


@pytest.mark.slow
def test_policies_differ_in_what_they_score_and_are_the_same_twice(generated: Drives) -> None:
    task = generated.run.environment
    assert isinstance(task, Driving)
    environment = simulator.driving(generated.bank, task.simulator)
    play = generated.player("policy", [1])
    first, second = (policy(generated.run, environment, seed) for seed in (0, 1))
    found, again, other = play(first), play(first), play(second)
    for name, values in found[0].metrics.items():
        assert values.tobytes() == again[0].metrics[name].tobytes()
    assert any(np.any(found[0].metrics[k] != other[0].metrics[k]) for k in found[0].metrics)
    assert found[1][0].pose.tobytes() == again[1][0].pose.tobytes()


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios are made here: workers would take longer to start."""
    monkeypatch.setattr(evaluation, "cores", lambda: 1)
