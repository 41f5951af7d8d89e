"""Evaluation scores what a policy does in whole episodes: known returns, the same twice, whatever it was trained on."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longhaul
from longhaul.algorithms import ppo
from longhaul.algorithms.run_context import RunContext
from longhaul.cli import evaluate
from longhaul.cli.flags import FlagError
from longhaul.config import recipes
from longhaul.config import resolve as runs
from longhaul.config.run import Driving, Named, Run
from longhaul.driving import scenario_source
from longhaul.driving.datasets.log import BadData
from longhaul.driving.evaluation import benchmark_scores as benchmarks
from longhaul.driving.render import recording
from longhaul.driving.sim import simulator
from longhaul.driving.sim.config import HELD_OUT
from longhaul.envs import probes
from longhaul.runtime import process_group
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.spaces import Box, Discrete, Measure
from longhaul.training import evaluate as evaluation
from longhaul.training import evaluate_driving
from longhaul.training.evaluate import Scores
from longhaul.training.evaluate_driving import Drives
from longhaul.training.run_dir import save_run
from longhaul.types import Environment, Spec, TimeStep, transition
from tests.helpers import log_files
from tests.helpers.measures import measured
from tests.helpers.quick import quick
from tests.helpers.small_runs import small


def policy(run: Run, environment: Environment, seed: int = 0) -> Any:
    """A policy of the run before any training."""
    algorithm = ppo.ppo(environment.spec, run.algorithm, RunContext(updates=1, mean=lambda tree: tree))
    return algorithm.policy(quick(algorithm.init)(jax.random.key(seed)))


def test_means_are_means_and_episodes_are_counted() -> None:
    values, everywhere = np.array([1.0, 2.0, 6.0]), np.ones(3, bool)
    told = {"return": everywhere, "some": np.array([True, False, True]), "none": ~everywhere}
    scores = Scores({name: Measure(values, valid) for name, valid in told.items()}, ["a", "b", "b"])
    assert scores.means() == {"return": 3.0, "some": 3.5, "episodes": 3}


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

    def metrics(self, state: Any) -> dict[str, Measure]:
        return {"began": Measure(state[1].astype(jnp.float32), jnp.bool_(True))}


def test_each_episode_is_played_once_to_its_end() -> None:
    """Those that end early earn nothing more: from n, the return is n + (n - 1) + ... + 1."""
    environment = Countdown()
    run = small(environment=Named("cartpole"))
    scores = evaluation.player(run, environment, 40)(policy(run, environment))
    began = scores.metrics["began"].value
    assert set(began) == {1.0, 2.0, 3.0}
    np.testing.assert_array_equal(scores.metrics["length"].value, began)
    np.testing.assert_array_equal(scores.metrics["return"].value, began * (began + 1) / 2)
    assert scores.names == [""] * 40
    assert scores.means()["return"] == np.mean(began * (began + 1) / 2)


def test_agents_are_episodes_each() -> None:
    """The probe of several agents, some of which never play: none of them is counted."""
    probe = probes.PROBES["agents"]()
    run = small(environment=Named("probe/agents"), num_envs=8)
    scores = evaluation.player(run, probe.environment, 5)(policy(run, probe.environment))
    begun = quick(jax.vmap(lambda key: probe.environment.active(probe.environment.reset(key)[0])))
    playing = int(np.sum(begun(jax.random.split(jax.random.key(0), 5))))
    assert len(scores.names) == len(scores.metrics["return"].value) == playing
    assert np.all(scores.metrics["return"].value > probes.POISON)


def test_it_is_the_same_twice_and_whatever_the_run_was_trained_on() -> None:
    """The mode of the policy, from starts that depend on the seed alone."""
    environment = runs.named(Named("pendulum"))
    assert isinstance(environment.spec.action, Box)
    run = small(environment=Named("pendulum"))
    acting = policy(run, environment)
    found = evaluation.player(run, environment, 4)(acting).metrics
    others = (run, small(environment=Named("pendulum"), devices=4, num_envs=16, total_steps=10**6))
    for other in others:
        again = evaluation.player(other, environment, 4)(acting).metrics
        assert {k: v.value.tobytes() for k, v in again.items()} == {k: v.value.tobytes() for k, v in found.items()}
    else_where = evaluation.player(dataclasses.replace(run, seed=4), environment, 4)(acting).metrics
    assert np.all(else_where["return"].value != found["return"].value)
    assert np.all(found["length"].value == 200)


def test_an_environment_without_a_time_limit_is_refused() -> None:
    environment = Countdown(dataclasses.replace(Countdown().spec, max_steps=None))
    with pytest.raises(ValueError, match="may never end; give it a time limit"):
        evaluation.player(small(), environment, 1)(policy(small(), environment))


# ---------------------------------------------------------------------------------------------------------- driving


def driving(**changes: Any) -> Run:
    recipe = recipes.recipe("driving")
    algorithm = replaced(recipe.algorithm, hidden_dim=8, num_layers=1)
    return runs.resolve(dataclasses.replace(recipe, algorithm=algorithm, devices=1, **changes))


@pytest.fixture(scope="module")
def generated() -> Drives:
    return evaluate_driving.drives(driving(), count=4)


def test_generated_scenarios_are_those_that_no_run_trains_in(generated: Drives) -> None:
    wanted = scenario_source.generated(HELD_OUT, 4, agents=1, horizon=None, workers=1)
    assert [s.id for s in generated.scenarios] == [s.id for s in wanted]
    train = scenario_source.generated(0, 4, agents=1, horizon=None, workers=1)
    assert not {s.id for s in train} & {s.id for s in wanted}


@pytest.mark.slow
def test_who_replays_the_log_makes_no_fault(generated: Drives) -> None:
    scores, films = generated.play(None, "log", [2, 0])
    assert scores.names == [s.id for s in generated.scenarios]
    means = scores.means()
    assert means["accuracy"] == 1.0
    assert means["progress"] >= 0.99
    assert means["log_divergence"] == pytest.approx(0.0, abs=1e-4)
    assert means["episodes"] == 4
    for which, film in zip((2, 0), films, strict=True):  # a recording is of the drive that was scored
        scenario = generated.scenarios[which]
        assert film.id == scenario.id
        assert film.dt == scenario.dt
        frames = len(film.pose)
        assert frames == scores.metrics["length"].value[which] + 1
        ego = int(scenario.controlled[0])
        np.testing.assert_allclose(film.pose[:, film.ego, :2], scenario.pose[:frames, ego, :2], atol=0.01)
        assert film.metrics["accuracy"] == 1.0
        assert all(film.events[name] is None for name in ("collision", "offroad", "red_light"))
    named = evaluate_driving.label(films, "the log")
    recording.check(named)
    assert [film.label for film in named] == ["the log"] * 2


@pytest.mark.slow
def test_a_log_is_driven_in_as_the_run_had_it_or_as_it_is_asked_for(tmp_path: Path) -> None:
    """The log's own driver in two formats of one log scores alike, and each scenario once."""
    paths = log_files.write_all(log_files.make_log(), tmp_path)
    run = driving(environment=Driving((str(paths["gpudrive"]),)))
    own = evaluate_driving.drives(run)
    assert len(own.scenarios) == 1
    both = evaluate_driving.drives(run, [str(paths["womd-example"]), str(paths["gpudrive"])])
    scores = both.play(None, "log")[0]
    assert scores.means()["log_divergence"] == pytest.approx(0.0, abs=0.01)
    assert scores.means()["episodes"] == 2
    for name, measure in scores.metrics.items():
        assert measure.valid[0] == measure.valid[1], name
        assert measure.value[0] == pytest.approx(measure.value[1], abs=1e-3), name
    assert len(evaluate_driving.drives(run, [str(paths["womd-example"]), str(paths["gpudrive"])], 1).scenarios) == 1


@pytest.mark.slow
def test_policies_differ_in_what_they_score_and_are_the_same_twice(generated: Drives) -> None:
    task = generated.run.environment
    assert isinstance(task, Driving)
    environment = generated.shell("policy")
    play = generated.player("policy", 1)
    first, second = (policy(generated.run, environment, seed) for seed in (0, 1))
    found, again, other = (play(each, [1]) for each in (first, first, second))
    for name, measure in found[0].metrics.items():
        assert measure.value.tobytes() == again[0].metrics[name].value.tobytes()
    assert any(np.any(found[0].metrics[k].value != other[0].metrics[k].value) for k in found[0].metrics)
    assert found[1][0].pose.tobytes() == again[1][0].pose.tobytes()


@pytest.mark.slow
def test_scores_do_not_depend_on_batches_or_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five scenarios, two at a time, on one device and on four, of which the last batches are padded; and all at once.

    On any number of devices bit for bit; recordings, too.
    """
    drives = evaluate_driving.drives(driving(), count=5)
    acting = policy(drives.run, drives.shell("policy"))
    whole, _ = drives.play(acting, "policy")
    monkeypatch.setattr(evaluate_driving, "LANES", 2)
    monkeypatch.setattr(evaluate_driving, "WORTH", 1)
    found = []
    for devices in (1, 4):
        monkeypatch.setattr(evaluate_driving.each_device, "local", lambda most, n=devices: _local(min(most, n)))
        assert len(drives.devices()) == min(devices, 3)
        found.append(drives.play(acting, "policy", [4, 1]))
    (one, films), (four, others) = found
    assert one.names == four.names == whole.names == list(drives.scenarios.ids)
    for name, measure in one.metrics.items():
        assert measure.value.tobytes() == four.metrics[name].value.tobytes()
        np.testing.assert_array_equal(measure.valid, whole.metrics[name].valid)
        np.testing.assert_allclose(measure.value, whole.metrics[name].value, atol=1e-4)
    assert [film.id for film in films] == [drives.scenarios.ids[i] for i in (4, 1)]
    for film, other in zip(films, others, strict=True):
        assert film.pose.tobytes() == other.pose.tobytes()


_local = evaluate_driving.each_device.local


@pytest.mark.parametrize(
    ("scenarios", "agents", "devices"), [(1, 1, 1), (128, 1, 1), (5000, 1, 4), (64, 16, 1), (128, 16, 2)]
)
def test_another_core_drives_where_it_saves_more_than_it_compiles(scenarios, agents, devices):
    run = driving()
    simulator = dataclasses.replace(run.environment.simulator, agents=agents)
    run = dataclasses.replace(run, environment=dataclasses.replace(run.environment, simulator=simulator))
    assert len(evaluate_driving.Drives(run, range(scenarios)).devices()) == devices


def test_the_worst_scenario_comes_first() -> None:
    """By accuracy, of all its agents; then by progress; one that tells neither comes last."""
    scenario = np.array([4, 4, 0, 1, 2, 3])
    scores = Scores(
        {
            "accuracy": measured([1, 0, 1, 1, 0, 0], [True, True, True, True, True, False]),
            "progress": measured([1, 1, 0.5, 0.2, 1, 0], [True, True, True, True, True, False]),
        },
        [f"s{i}" for i in scenario], scenario,
    )  # fmt: skip
    assert evaluate_driving.worst(scores, 3) == [2, 4, 1]
    assert evaluate_driving.worst(scores, 99) == [2, 4, 1, 0, 3]


# ---------------------------------------------------------------------------------------------------------- traffic


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return log_files.write_all(log_files.make_log(steps=41, cyclist=-2.5), tmp_path_factory.mktemp("logs"))


@pytest.mark.slow
def test_the_policy_drives_everybody_or_the_ego_alone(logs: dict[str, Path]) -> None:
    """Whatever the run trained with."""
    run = driving(environment=Driving((str(logs["gpudrive"]),), simulator=simulator.Config(agents=2)))
    both, alone, everybody = (evaluate_driving.drives(run, traffic=traffic) for traffic in (None, "idm", "self"))
    for drives, agents, traffic in ((both, 2, "log"), (alone, 1, "idm"), (everybody, None, "log")):
        assert isinstance(drives.run.environment, Driving)
        config = drives.run.environment.simulator
        controlled = drives.scenarios[0].controlled
        assert config.agents == (agents or int(np.sum(controlled >= 0)))
        assert config.traffic == traffic
        assert drives.shell("log").spec.agents == config.agents
    assert np.sum(everybody.scenarios[0].controlled >= 0) >= 2


@pytest.mark.slow
def test_the_picture_knows_of_everybody_what_the_table_says(logs: dict[str, Path]) -> None:
    drives = evaluate_driving.drives(driving(environment=Driving((str(logs["gpudrive"]),))), traffic="self")
    moving = drives.scenarios[0].controlled
    scores, films = drives.play(None, "log", [0])
    assert scores.agent is not None
    np.testing.assert_array_equal(np.sort(scores.agent), np.sort(moving[moving >= 0]))
    assert set(scores.groups()) == {0}
    assert {film.agent for film in films[0].others} | {films[0].ego} == set(scores.agent.tolist())
    for row, agent in enumerate(scores.agent):
        if agent != films[0].ego:
            verdict = next(other for other in films[0].others if other.agent == agent)
            measure = scores.metrics["progress"]
            assert not measure.valid[row] or verdict.metrics["progress"] == pytest.approx(measure.value[row])


def test_scenarios_are_driven_by_their_ids(folder: Path, tmp_path: Path) -> None:
    """From the command line and from Python, all of an id; the nearest is named where there is none."""
    paths = {}
    for name, id_ in (("first", "first"), ("second", "second"), ("again", "second")):
        paths[name] = tmp_path / f"{name}.json"
        log = log_files.make_log(steps=41, cyclist=-2.5)
        paths[name].write_text(json.dumps(log_files.gpudrive(dataclasses.replace(log, id=id_))))
    drives = evaluate_driving.drives(driving(), [str(path) for path in paths.values()])
    assert drives.named(()) is drives
    assert drives.named(["first"]).files == (str(paths["first"]),)
    assert drives.named(["second", "second"]).scenarios.ids == ("second", "second")
    assert drives.named(["second"]).files == (str(paths["second"]), str(paths["again"]))
    says = r"no scenario is named 'secnd'; did you mean second\?$"
    with pytest.raises(RunError, match=says):
        longhaul.evaluate("d", policy="log", scenario="secnd", data=list(paths.values()))
    with pytest.raises(RunError, match=says):
        evaluate.evaluate(["d", "--policy", "log", "--scenario", "secnd", "--data", *map(str, paths.values())])


@pytest.mark.slow
def test_only_as_many_scenarios_are_made_as_are_asked_for(logs: dict[str, Path], tmp_path: Path) -> None:
    """What comes after is not even read: it may be damaged."""
    (tmp_path / "broken.json").write_text("{")
    paths = [str(logs["gpudrive"]), str(logs["womd-example"]), str(tmp_path / "broken.json")]
    run = driving()
    drives = evaluate_driving.drives(run, paths, 2)
    assert drives.files == tuple(paths[:2])
    assert [s.id for s in drives.subset([1]).scenarios] == [drives.scenarios[1].id]
    assert drives.subset([1]).files == (paths[1],)
    with pytest.raises(BadData, match=r"broken\.json"):
        evaluate_driving.drives(run, paths, 3)


@pytest.mark.slow
def test_the_log_is_more_real_than_who_goes_straight_on(generated: Drives) -> None:
    few = generated.subset([0, 2])
    log, constant = (evaluate_driving.score(few, None, who, 4) for who in ("log", "constant"))
    assert log.names == [s.id for s in few.scenarios]
    assert np.all(log.metrics["realism"].valid)
    away = constant.metrics["min_ade"].value > 1.0  # m; elsewhere the log itself goes straight on
    assert np.any(away), "the log goes straight on in every scenario: nothing is tested"
    assert np.all(log.metrics["realism"].value[away] > constant.metrics["realism"].value[away])
    np.testing.assert_allclose(log.metrics["min_ade"].value, 0.0, atol=0.02)


# ---------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of driving, without a checkpoint: drivers that no learning made can be evaluated in it."""
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "runs" / "d"
    made.mkdir(parents=True)
    environment = dataclasses.replace(recipes.recipe("driving").environment, horizon=25)
    save_run(made, driving(evaluation_episodes=2, environment=environment), {})
    return made


def test_tracks_that_wait_are_counted_once_and_frames_after_an_episode_not_at_all() -> None:
    """Two lanes of 0.1 s and 0.2 s a step and one that repeats a scenario; the first ends after two steps."""
    t = np.array([[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 3, 3]])
    waiting = np.zeros((4, 3, 5), bool)
    waiting[1:, :, 0] = True  # to the end
    waiting[2, 1, 3] = True
    tables = SimpleNamespace(dt=np.array([0.1, 0.2, 0.2]))
    batch = SimpleNamespace(numbers=np.array([[4, 5, -1]]), tables=(tables,))
    tracks, seconds = evaluate_driving.waits_of([(t, waiting)], batch)  # type: ignore[arg-type]
    assert tracks == 3 and seconds == pytest.approx(2 * 0.1 + 3 * 0.2 + 0.2)


def test_evaluate_writes_what_it_prints(
    folder: Path, logs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two files of one log: rows by scenario and file, means with intervals, a row an episode, pictures."""
    words = "d --policy idm --traffic self --json out.json --csv out.csv --data"
    assert evaluate.evaluate([*words.split(), str(logs["gpudrive"]), str(logs["womd-example"])]) == 0
    out = capsys.readouterr().out
    report = json.loads(Path("out.json").read_text())
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == report["episodes"] == len(report["scenarios"]) > 2
    assert {row["file"] for row in rows} == {str(logs["gpudrive"]), str(logs["womd-example"])}
    for row, entry in zip(rows, report["scenarios"], strict=True):
        assert row == {name: "" if value is None else str(value) for name, value in entry.items()}
    for name in ("accuracy", "progress", "vmax_score"):
        values = [entry[name] for entry in report["scenarios"] if entry[name] is not None]
        assert report["mean"][name] == pytest.approx(np.mean(values))
        assert report["told"][name] == len(values)
        low, high = report["interval"][name]
        assert low <= report["mean"][name] <= high
    tables = [table.splitlines() for table in out.split("\n\n")]
    waits = report["waits"]
    waited = [str(waits["tracks"])] if waits["tracks"] else []  # the first word of a line in place of a table
    assert [table[0].split()[0] for table in tables] == ["scenario", "file", "metric", "infraction", *waited]
    assert (waits["seconds"] > 0) == bool(waited)
    assert [row.split()[0] for row in tables[1][1:3]] == [logs[n].name for n in ("gpudrive", "womd-example")]
    assert len(tables[2]) - 1 == len(report["mean"])
    driven = sum(entry["distance"] for entry in report["scenarios"]) / 1000
    assert report["infractions"]["any"]["driven"] == pytest.approx(driven)
    assert report["infractions"]["any"]["events"] == sum(entry["accuracy"] == 0 for entry in report["scenarios"])
    # the benchmarks' scores are those of the rows; accuracy, made on the device, is the same made here
    columns = {name: [entry[name] for entry in report["scenarios"]] for name in report["mean"]}
    measures = {
        name: measured([0.0 if v is None else v for v in column], [v is not None for v in column])
        for name, column in columns.items()
        if name not in benchmarks.NAMES
    }
    again = benchmarks.aggregates(measures)
    assert again.keys() == set(benchmarks.NAMES)
    assert np.any(again["accuracy"].value < 1)
    for name, measure in again.items():
        found = [value if valid else None for value, valid in zip(*measure, strict=True)]
        assert found == pytest.approx(columns[name]), name


@pytest.mark.slow
def test_evaluate_tells_how_real_it_is_and_draws_the_worst(
    folder: Path, logs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = "d --policy constant --json out.json --worst 1 --realism --rollouts 3 --data"
    assert evaluate.evaluate([*words.split(), str(logs["gpudrive"])]) == 0
    out, report = capsys.readouterr().out, json.loads(Path("out.json").read_text())
    assert [table.split()[0] for table in out.split("\n\n")] == ["scenario", "metric", "infraction", "realism"]
    assert report["realism"]["rollouts"] == 3
    assert report["realism"]["mean"].keys() >= {"realism", "collision", "linear_speed"}
    picture = Path(out.splitlines()[-1])
    assert picture.resolve().parent == folder.resolve() / "worst"
    assert picture.name.startswith("01-")
    assert "constant" in picture.read_text()


@pytest.mark.slow
def test_a_driver_that_no_run_made_needs_none(logs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--policy", "log", "--traffic", "self", "--json", "-", "--data", str(logs["gpudrive"])]
    assert evaluate.evaluate(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["policy"] == "log" and report["mean"]["log_divergence"] == pytest.approx(0.0, abs=0.05)


def test_without_a_run_or_such_a_driver_it_is_asked_which(logs: dict[str, Path]) -> None:
    with pytest.raises(FlagError, match="which run"):
        evaluate.evaluate(["--data", str(logs["gpudrive"])])


@pytest.mark.slow
def test_two_processes_print_the_table_of_one(tmp_path: Path) -> None:
    """65 scenarios are two batches: each process drives one, and the second prints nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "longhaul", *["evaluate", "--policy", "pretrained", "--episodes", "65"]]
    group = {process_group.COORDINATOR: f"127.0.0.1:{port}", process_group.COUNT: "2"}
    told = [{}, *(group | {process_group.INDEX: str(i)} for i in range(2))]
    started = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=os.environ | each) for each in told
    ]
    alone, first, second = (process.communicate()[0] for process in started)
    assert [process.returncode for process in started] == [0, 0, 0]
    assert alone == first and "mean of 65" in first and second == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--traffic carla", "--traffic is 'carla'; it must be one of log, idm"),
        ("--csv nowhere/x.csv", "--csv is 'nowhere/x.csv'; it must be a file in a folder that exists"),
        ("--csv - --json -", "--json and --csv are both stdout; write one of them to a file"),
        ("--realism --rollouts 0", "--rollouts is 0; it must be at least 1"),
        ("--worst -1", "--worst is -1; it must be at least 0"),
        ("--worst-dir somewhere", "--worst-dir is 'somewhere', and nothing is to be drawn; give --worst 3"),
        ("--worst-as gif", "--worst-as is 'gif', and nothing is to be drawn; give --worst 3"),
        ("--rollouts 4", "--rollouts is 4, and nothing is simulated several times; give --realism"),
        ("--worst 1 --worst-dir runs/d/run.json", "--worst-dir is 'runs/d/run.json', a file; give a folder"),
        ("--data nowhere", "nowhere: no such file or folder"),
        ("--cross-play idm", "--policy is 'log'; with --cross-play the ego is a run's policy; leave it out"),
        ("--cross-play idm --traffic log", "--traffic is not for --cross-play; leave one of them out"),
        ("--devices 0", "--devices is 0; it must be at least 1"),
        ("--scenario a --episodes 2", "--episodes is 2, and --scenario names those to drive; leave one of them out"),
    ],
)
def test_impossible_flags_are_refused_before_work_is_done(folder: Path, words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        evaluate.evaluate(["d", "--policy", "log", *words.split()])
    assert "\n" not in str(refused.value)


def test_flags_of_driving_are_refused_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(environment=Named("cartpole"))
    monkeypatch.setattr(evaluate, "policy_of", lambda *_: (run, None))
    for flag in ("--realism", "--traffic log", "--worst 2", "--data x"):
        name = flag.split()[0]
        with pytest.raises(ValueError, match=f"{name} is for driving, and run d is cartpole; leave {name} out"):
            evaluate.evaluate(["d", *flag.split()])


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios are made here: workers would take longer to start."""
    monkeypatch.setattr(evaluate_driving, "cores", lambda: 1)
