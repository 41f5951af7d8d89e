"""`import longhaul`: a run from Python is the command line's; a callback stops it and changes nothing; a loaded policy
acts as the evaluation does; bad input is one line."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import longhaul
from longhaul.cli.main import main
from longhaul.training import api
from longhaul.training.checkpoint import resume
from tests.helpers import own_environments as own
from tests.helpers.drawn_policies import drawn
from tests.helpers.small_runs import quick_programs

HERE = "tests.helpers.own_environments"
SMALL: dict[str, Any] = {
    "num_envs": 4,
    "num_steps": 8,
    "total_steps": 8 * 32,
    "evaluation_episodes": 6,
    "block": 1,
    "log_interval": 1,
}


def own_network(observation: Any, width: int) -> Any:
    """Network of a user's, which is not made here."""


_programs = quick_programs(evaluated=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def trained(folder: Path) -> longhaul.Result:
    return longhaul.train("ppo", env=own.Corridor, runs_dir=folder, run_name="whole", **SMALL)


def test_a_run_from_python_is_that_of_the_command_line(trained: longhaul.Result, folder: Path) -> None:
    flags = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    name = f"{HERE}:Corridor"
    assert main(["train", "ppo", "--env", name, "--runs-dir", str(folder), "--run-name", "shell", *flags]) == 0
    shell = longhaul.resume(folder / "shell")  # which is done already
    assert shell.summary["params_sha256"] == trained.summary["params_sha256"]
    assert shell.run == trained.run and trained.run.environment == api.Named(name)


def test_a_result_has_metrics_as_arrays_scores_and_a_curve(trained: longhaul.Result, tmp_path: Path) -> None:
    assert trained.metrics["update"].tolist() == list(range(1, 9))
    assert trained.metrics["agent_steps"].dtype == np.float64 and trained.metrics["agent_steps"][-1] == 256
    assert set(trained.evaluation) == {"trained", "untrained"} and not trained.stopped
    page = trained.plot("agent_steps").save(tmp_path / "new" / "curve.html").read_text()
    assert "<svg" in page and "<svg" in trained.plot("agent_steps")._repr_html_()
    assert trained.plot("agent_steps", "sps")._repr_html_().count("<svg") == 2
    with pytest.raises(KeyError, match=r"no metric is named 'returns'; did you mean episode/return"):
        trained.plot("agent_steps", "returns")
    with pytest.raises(KeyError, match=r"no metric is named 'loss'; did you mean ppo/policy_loss or ppo/total_loss"):
        trained.plot("loss")
    with pytest.raises(ValueError, match=r"the curve's file is 'curve.png'; it is a page, so name it .html"):
        trained.plot().save("curve.png")
    assert repr(trained).startswith("Result(") and "return" in repr(trained)


def test_a_population_has_metrics_of_each_of_its_runs(trained: longhaul.Result, tmp_path: Path) -> None:
    run = dataclasses.replace(trained.run, population=dataclasses.replace(trained.run.population, seeds=2))
    lines = [{"update": 1, "sps": 9.0, "a/b": [1.0, None]}, {"update": 2, "a/b": None}]
    (tmp_path / "members.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = dataclasses.replace(trained, folder=tmp_path, run=run).members
    np.testing.assert_array_equal(found["a/b"], [[1.0, np.nan], [np.nan, np.nan]])
    np.testing.assert_array_equal(found["sps"], [9.0, np.nan])
    with pytest.raises(ValueError, match=r"whole is one run, whose metrics are in result\.metrics"):
        trained.members  # noqa: B018


def test_a_callback_stops_the_run_which_goes_on_to_the_same_end(trained: longhaul.Result, folder: Path) -> None:
    seen: list[int] = []

    def third(metrics: Any) -> bool:
        seen.append(metrics["update"])
        return bool(metrics["update"] == 3)

    cut = longhaul.train("ppo", env=own.Corridor, runs_dir=folder, run_name="cut", callback=third, **SMALL)
    assert cut.stopped and cut.evaluation == {} and 3 <= len(seen) < 8
    whole = longhaul.resume("cut", runs_dir=folder, callback=lambda metrics: seen.append(metrics["update"]))
    assert not whole.stopped and seen == list(range(1, 9))
    assert whole.summary["params_sha256"] == trained.summary["params_sha256"]
    np.testing.assert_array_equal(whole.metrics["episode/return"], trained.metrics["episode/return"])


def test_a_loaded_policy_acts_as_the_evaluation_does(trained: longhaul.Result) -> None:
    policy = longhaul.load(trained.folder)
    evaluation = longhaul.evaluate(trained)
    assert longhaul.evaluate(policy).mean == evaluation.mean
    environment: Any = longhaul.make(own.Corridor)
    count = trained.run.evaluation_episodes
    keys = jax.random.split(jax.random.key(trained.run.seed + 10_000), count)
    state, seen = jax.jit(jax.vmap(environment.reset))(keys)
    step, playing, total = jax.jit(jax.vmap(environment.step)), np.ones(count, bool), np.zeros(count, np.float32)
    for _ in range(own.LIMIT):
        state, led_to = step(keys, state, policy(seen))
        total += np.where(playing, led_to.reward, np.float32(0.0))
        playing &= ~np.asarray(led_to.terminated | led_to.truncated)
        seen = led_to.observation
    np.testing.assert_array_equal(total, evaluation.scores.metrics["return"].value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policy": "ppo"}, r"policy is 'ppo'; it must be one of run, untrained, idm, log, constant"),
        ({"policy": None}, r"policy is None; it must be one of run, untrained, idm, log, constant"),
        ({"traffic": "IDM"}, r"traffic is 'IDM'; it must be one of log, idm, constant, self"),
        ({"episodes": 0}, r"episodes is 0; it must be a whole number, 1 at least"),
        ({"episodes": 2.5}, r"episodes is 2\.5; it must be a whole number, 1 at least"),
        ({"seed": -1}, r"seed is -1; it must be a whole number, 0 at least"),
        ({"policy": "idm"}, r"policy is 'idm', a driver, and run whole is .*Corridor; give run or untrained"),
        (
            {"data": "logs"},
            r"^data, scenario, traffic, safety, skip_bad_logs and the drivers idm, log and constant are",
        ),
        ({"scenario": "x"}, r"^data, scenario, traffic, safety, skip_bad_logs and the drivers idm, log and constant"),
        ({"scenario": "x", "episodes": 2}, "episodes is 2, and scenario names those to drive; leave one of them out"),
        (
            {"safety": False},
            r"safety, skip_bad_logs and the drivers idm, log and constant are driving's; leave them out",
        ),
        ({"skip_bad_logs": False}, r"skip_bad_logs and the drivers idm, log and constant are driving's"),
    ],
)
def test_an_evaluation_refuses_what_it_does_not_know(
    trained: longhaul.Result, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        longhaul.evaluate(trained, **given)


def test_an_evaluation_takes_the_untrained_policy_and_earlier_ones(trained: longhaul.Result) -> None:
    untrained = longhaul.evaluate(trained, policy="untrained", episodes=6).mean["return"]
    assert untrained == pytest.approx(trained.evaluation["untrained"]["return"])
    with pytest.raises(ValueError, match=r"checkpoint"):
        longhaul.evaluate(trained, step=3)
    with pytest.raises(ValueError, match="a loaded Policy is one policy"):
        longhaul.evaluate(trained.policy, policy="untrained")
    for function in (longhaul.load, longhaul.evaluate, longhaul.resume):
        with pytest.raises(ValueError, match="the run is a Run; give its name, its folder or the Result"):
            function(trained.run)


def test_a_result_is_found_again(trained: longhaul.Result, folder: Path) -> None:
    """As it was returned; of a run under way what its files have."""
    for again in (longhaul.result("whole", runs_dir=folder), longhaul.result(trained.folder), longhaul.result(trained)):
        assert (again.folder, again.run, again.stopped) == (trained.folder, trained.run, False)
        assert again.summary["params_sha256"] == trained.summary["params_sha256"]
        assert again.evaluation.keys() == trained.evaluation.keys()
        np.testing.assert_array_equal(again.metrics["episode/return"], trained.metrics["episode/return"])
    begun = folder / "begun"
    begun.mkdir()
    shutil.copy(trained.folder / "run.json", begun)
    try:
        half = longhaul.result(begun)
        assert half.stopped and half.evaluation == half.metrics == half.summary == {}
        found = {each.name: each for each in longhaul.runs(folder)}
        assert (found["whole"].status, found["begun"].status) == ("done", "stopped")
        assert found["whole"].trained == pytest.approx(trained.evaluation["trained"]["return"])
    finally:
        shutil.rmtree(begun)
    with pytest.raises(ValueError, match=r"no run 'whol' in .*; did you mean whole"):
        longhaul.result("whol", runs_dir=folder)


def test_an_evaluation_plays_the_episodes_of_its_seed(
    trained: longhaul.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default those of the run's own evaluation, here and on the command line, which prints the intervals too."""
    usual, again, other = (longhaul.evaluate(trained, seed=seed).scores.metrics for seed in (None, 0, 5))
    for name, measure in usual.items():
        np.testing.assert_array_equal(measure.value, again[name].value)
    assert not np.array_equal(usual["return"].value, other["return"].value)
    file = tmp_path / "a.json"
    assert main(["evaluate", str(trained.folder), "--seed", "5", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["mean"]["return"] == pytest.approx(float(np.mean(other["return"].value)))
    header, *rows = (line.split("  ") for line in capsys.readouterr().out.splitlines() if line)
    assert [cell.strip() for cell in header if cell] == ["6 episodes", "mean", "2.5 %", "97.5 %", "std", "min", "max"]
    estimate = longhaul.evaluate(trained, seed=5).estimates["return"]
    (row,) = ([cell.strip() for cell in row if cell] for row in rows if row[0] == "return")
    assert row[1:4] == [f"{value:.3f}" for value in estimate[:3]]


def test_a_tilde_is_the_home_folder(
    trained: longhaul.Result, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no shell replaces it: in Python, and behind the = of a flag."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    assert longhaul.load("~/whole").run == longhaul.load("whole", runs_dir="~").run == trained.run
    saved = trained.policy.export("~/out", to="npz")
    assert saved == [folder / "out/policy.npz", folder / "out/policy.json"]
    assert trained.plot().save("~/out/curve.html") == folder / "out/curve.html"
    assert main(["runs", "--runs-dir=~", "--json=~/out/runs.json"]) == 0
    assert "whole" in {run["name"] for run in json.loads((folder / "out/runs.json").read_text())}
    (folder / "own.yaml").write_text("num_envs: 0")
    for given in ({"config": "~/own.yaml"}, {"config": Path("~/own.yaml")}):
        with pytest.raises(ValueError, match="--num-envs is 0"):
            longhaul.train("cartpole", runs_dir="~/new", **given)
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_of_driving_hands_on_what_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    class Asked(Exception):
        pass

    def drives(run: Any, data: Any, episodes: Any, traffic: Any, seed: Any) -> None:
        asked.append((run.environment.simulator.safety, data, episodes, traffic, seed))
        raise Asked

    monkeypatch.setattr(api.evaluate_driving, "drives", drives)
    monkeypatch.setattr(resume, "prepare_devices", lambda *_: None)
    for given in (
        {"policy": "idm", "data": str(tmp_path)},
        {"policy": "log", "data": [tmp_path, "b"], "safety": False, "seed": np.int64(3)},
        {"policy": "log", "episodes": np.int32(5), "traffic": "self"},
    ):
        with pytest.raises(Asked):
            longhaul.evaluate("pretrained", **given)
    here = str(tmp_path)
    assert asked == [
        (True, [here], None, None, 0),
        (False, [here, "b"], None, None, 3),
        (True, [], 5, "self", 0),
    ]


def test_one_observation_or_a_batch_by_mode_or_by_sample(trained: longhaul.Result) -> None:
    policy = trained.policy
    rows = np.eye(own.LENGTH)  # float64: numbers of another type are taken
    modes = policy.act_numpy(rows)
    assert modes.dtype == np.int32 and [int(policy(row)) for row in rows] == modes.tolist()
    drawn = {int(policy(rows[0], key=jax.random.key(i))) for i in range(40)}
    assert drawn == {0, 1} and not policy.recurrent and policy.memory() == ()
    assert repr(policy).startswith("Policy(ppo, ") and f"parameters: [{own.LENGTH}] -> Discrete" in repr(policy)
    with pytest.raises(ValueError, match=r"the observation is \[4\]; the policy takes \[5\], or a batch of such"):
        policy(np.zeros(4))
    with pytest.raises(ValueError, match=r"the observation is a dict of seen; the policy takes an array \[5\]"):
        policy({"seen": rows})


def test_a_policy_is_sent_to_other_processes(trained: longhaul.Result) -> None:
    seen = np.eye(own.LENGTH, dtype=np.float32)
    for copied in (pickle.loads(pickle.dumps(trained.policy)), copy.deepcopy(trained).policy):
        np.testing.assert_array_equal(copied.act_numpy(seen), trained.policy.act_numpy(seen))
        assert repr(copied) == repr(trained.policy)


def test_a_policy_stands_within_a_compiled_function(trained: longhaul.Result) -> None:
    policy, batch = trained.policy, np.eye(own.LENGTH, dtype=np.float32)
    wanted = policy(batch)
    np.testing.assert_array_equal(jax.jit(policy)(batch), wanted)
    np.testing.assert_array_equal(jax.vmap(policy)(batch), wanted)
    with pytest.raises(ValueError, match=r"key is 3; give jax\.random\.key\(3\)"):
        policy(batch, key=3)


def test_a_memory_is_given_and_comes_back() -> None:
    policy = drawn("ppo", env="probe/memory", memory=8)
    seen = np.zeros((3, *policy.spec.observation.shape), policy.spec.observation.dtype)
    action, memory = policy(seen)
    assert policy.recurrent and action.shape[0] == 3
    again, _ = policy(seen, memory=memory)
    single, after = policy(seen[0], memory=policy.memory())
    assert np.array_equal(single, action[0]) and again.shape == action.shape
    jax.tree.map(lambda one, many: np.testing.assert_allclose(one, many[0], rtol=1e-5, atol=1e-6), after, memory)


@pytest.mark.slow
def test_a_gymnasium_environment_is_stepped_by_actors_and_acted_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = longhaul.train("ppo", env=own.GymCorridor, runs_dir=folder, run_name="gym", actors=1, **SMALL)
    assert result.run.topology == "actors" and result.run.environment == api.Named(f"single/{HERE}:GymCorridor")
    environment, policy, steps = own.GymCorridor(), longhaul.load(result), 0
    seen, _ = environment.reset(seed=1)
    over = False
    while not over:
        seen, _, terminated, truncated, _ = environment.step(policy.act_numpy(seen))
        over, steps = terminated or truncated, steps + 1
    assert 1 <= steps <= own.LIMIT
    vector: Any = longhaul.make(own.GymCorridor, num_envs=3)
    assert vector.reset(0).shape == (3, own.LENGTH)
    monkeypatch.delattr(own, "GymCorridor")
    api.environments.spec_stub.cache_clear()
    with pytest.raises(ValueError, match=r"^run gym: --env single/.*:GymCorridor: .* has no GymCorridor"):
        longhaul.load(result)


@pytest.mark.parametrize(
    ("recipe", "settings", "says"),
    [
        ("cartpol", {}, "no recipe is named 'cartpol'; did you mean cartpole"),
        ("ppo", {"num_env": 3}, "recipe ppo has no setting 'num_env'; did you mean num_envs"),
        ("cartpole", {"num_envs": 0}, "--num-envs is 0"),
        ("ppo", {"num_envs": "many"}, "--num-envs is 'many'; it must be a whole number"),
        ("driving", {"env": "cartpole"}, "env is 'cartpole', and recipe driving has none to choose"),
        ("ppo", {"env": lambda: own.Corridor()}, "give the class, or a function with a name"),
        ("ppo", {"env": own.Corridor()}, "give the class, or a function with a name"),
        ("PPO", {"env": "cartpole"}, "no recipe is named 'PPO'; did you mean ppo"),
        ("dqn", {"env": "cartpole"}, "dqn is an algorithm, .*: longhaul train cartpole-dqn --env"),
        ("ppo", {"lr": [1e-3, 1e-4]}, r'it must be a number; runs with several values are sweep="lr=V1,V2"'),
        ("ppo", {"seed": [0, 1]}, "--seed is .*; it must be a whole number; runs with several seeds are seeds=N"),
        ("ppo", {"env": "cartpole", "sweep": {"lr": []}}, "sweep is 'lr='"),
        (
            "cartpole",
            {"lr": own_network},
            "lr is <function .*; it must be a number, no function; with anneal",
        ),
        ("ppo", {"total_steps": 9}, "recipe ppo is for any environment; give env=NAME"),
        ("cartpole", {"config": {"lr": 1e-3}}, "config is a dict; give a file's path, or its settings as keywords"),
        ("cartpole", {"callback": "metrics"}, "callback is 'metrics'; give a function of one argument"),
        ("ppo", {"lr": np.ones(2)}, "--lr is .*; it must be a number; runs with several values are sweep"),
        ("ppo", {"env": "my_env.Corridor"}, "named 'my_env.Corridor'; one of your own is my_env:Corridor$"),
        ("ppo", {"env": "my_env.py:Corridor"}, "my_env.py is a file; write my_env:NAME"),
        (
            "ppo",
            {"env": "cartpole", "algorithm": "dqn"},
            "is 1000; .*: give 8192, or lower --num-envs",
        ),
        ("ppo", {"torso": lambda: None}, "torso is .*; give the class, or a function with a name"),
        ("ppo", {"network": "mlp"}, "no setting 'network'; the network is torso, a name or my_module:function"),
        ("ppo", {"mesh": "two"}, "mesh is 'two'; write data=2 or data=2,model=2"),
        (
            "ppo",
            {"env": f"{HERE}:Wide"},
            r":Wide: the observation of reset is float32\[6\]; the spec says float32\[5\]",
        ),
        ("ppo", {"env": f"{HERE}:ListCorridor", "topology": "fused"}, r"no snapshot holds \(visited: list\)"),
        ("ppo", {"env": f"{HERE}:PairCorridor", "topology": "fused"}, "choose --topology actors"),
        ("bc", {"env": "cartpole"}, "has no expert in cartpole; give --recorded FILES"),
        ("bc", {"env": "cartpole", "recorded": "nowhere.npz"}, "nowhere.npz: there is no such file or folder"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(
    recipe: str, settings: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        longhaul.train(recipe, runs_dir=tmp_path, **settings)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
    assert capsys.readouterr().out == "", "no folder is named that is gone"


def test_values_that_python_has_are_those_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NumPy's and JAX's numbers, 1e6, paths, a text for a list of one, functions."""
    begun: list[tuple[Any, Any]] = []

    def begin(run: Any, runs_dir: Path, **rest: Any) -> tuple[Path, Any]:
        begun.append((run, rest["asked"]))
        return tmp_path, api.Outcome(0, None)

    monkeypatch.setattr(api, "begin", begin)
    longhaul.train(
        "cartpole", lr=np.float32(0.5), gamma=jax.numpy.float32(0.5), num_envs=np.int64(16), total_steps=1e6,
        mesh="data=1", sweep="ent_coef=0.1,0.2", torso=own_network, runs_dir=tmp_path,
    )  # fmt: skip
    longhaul.train("driving", data=tmp_path / "a.json", runs_dir=tmp_path, project="p")
    assert capsys.readouterr().err == "--project does nothing without --wandb\n"
    longhaul.train("cartpole", sweep={"lr": np.array([1e-3, 3e-4]), "ent_coef": "0..0.1:3"}, runs_dir=tmp_path)
    (run, asked), (driving, _), (swept, _) = begun
    assert swept.population.sweep == ("lr=0.001,0.0003", "ent_coef=0..0.1:3")
    assert (run.algorithm.lr, run.algorithm.gamma, run.num_envs, run.total_steps) == (0.5, 0.5, 16, 1_000_000)
    assert run.algorithm.network.torso == f"{__name__}:own_network" and run.population.sweep == ("ent_coef=0.1,0.2",)
    assert json.loads(json.dumps(asked))["total_steps"] == 1_000_000
    assert driving.environment.data == (str(tmp_path / "a.json"),)


def test_a_traced_setting_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="it must be a whole number; runs with several seeds are seeds=N"):
        jax.vmap(lambda seed: longhaul.train("cartpole", seed=seed).summary)(jax.numpy.arange(2))


def test_a_run_at_an_address_is_trained_loaded_and_gone_on_with(
    trained: longhaul.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/remote"
    monkeypatch.setenv("LONGHAUL_STAGING", str(tmp_path / "staging"))
    half = longhaul.train(
        "ppo", env=own.Corridor, runs_dir=url, run_name="first", callback=lambda metrics: True, **SMALL
    )
    assert half.stopped and (tmp_path / "remote/first/run.json").is_file()
    shutil.rmtree(tmp_path / "staging")  # a fresh machine
    whole = longhaul.resume("first", runs_dir=url)
    shutil.rmtree(tmp_path / "staging")
    there = json.loads((tmp_path / "remote/first/result.json").read_text())
    assert there["params_sha256"] == whole.summary["params_sha256"] == trained.summary["params_sha256"]
    assert longhaul.load(f"{url}/first").run == trained.run
    with pytest.raises(ValueError, match="no store has the scheme 's4'"):
        longhaul.train("cartpole", runs_dir="s4://bucket/runs", **SMALL)


def test_a_run_whose_module_is_gone_says_so(trained: longhaul.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(own, "Corridor")
    with pytest.raises(ValueError, match=r"run whole: --env .*:Corridor: .* has no Corridor; did you mean"):
        longhaul.resume(trained)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        longhaul.trian  # noqa: B018
