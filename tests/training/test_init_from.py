"""--init-from: a run begins with what another run or a file has; what does not fit is named with both shapes."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import longhaul
from longhaul.cli import main
from longhaul.runtime import pytree_serialization
from longhaul.runtime.errors import RunError
from longhaul.runtime.provenance import params_sha256
from longhaul.training import actor_learner, cross_play, hub, init_from
from longhaul.training.checkpoint.resume import restore_policy
from tests.helpers.small_runs import quick_programs

SMALL: dict[str, Any] = {
    "num_envs": 4, "num_steps": 8, "total_steps": 8 * 16, "evaluation_episodes": 4, "block": 1, "log_interval": 1,
    "hidden_dim": 8, "save_interval": 2, "keep": 9, "normalise_observation": True, "seed": 3,
}  # fmt: skip

_programs = quick_programs(evaluated=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("init")


@pytest.fixture(scope="module")
def source(folder: Path) -> longhaul.Result:
    return longhaul.train("cartpole", runs_dir=folder, run_name="source", **SMALL)


@pytest.fixture(scope="module")
def still(folder: Path) -> longhaul.Result:
    """A run that no test goes on with."""
    return longhaul.train("cartpole", runs_dir=folder, run_name="still", **SMALL)


def dotted(policy: Any) -> dict[str, np.ndarray]:
    return {init_from.dotted(name): np.asarray(leaf) for name, leaf in pytree_serialization.name(policy).items()}


def policy_arrays(result: longhaul.Result, step: int | None = None) -> dict[str, np.ndarray]:
    return dotted(longhaul.load(result, step=step).params)


def beginning(folder: Path, name: str, **changes: Any) -> tuple[longhaul.Result, dict[str, np.ndarray]]:
    """A run, and the arrays of the policy that it began with."""
    begun: list[dict[str, np.ndarray]] = []
    aside = actor_learner.policy_on_host

    def kept(*given: Any) -> Any:
        begun.append(dotted(policy := aside(*given)))
        return policy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor_learner, "policy_on_host", kept)
        run = longhaul.train("cartpole", runs_dir=folder, run_name=name, **(SMALL | changes))
    assert any((begun[0][name] != begun[-1][name]).any() for name in begun[0]), "it learnt nothing"
    return run, begun[0]


@pytest.mark.slow
def test_a_run_begins_with_the_parameters_of_another(
    source: longhaul.Result, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, here = beginning(folder, "begun", init_from="source@2")
    assert begun.run.init_from == f"{folder / 'source'}@2"
    assert "12 of 12 of the parameters, 3 of 3 of the normaliser" in capsys.readouterr().err
    there = policy_arrays(source, 2)
    for name in there:
        if name.startswith("params"):
            np.testing.assert_array_equal(here[name], there[name])
    assert any((policy_arrays(source)[name] != there[name]).any() for name in there)


def test_a_file_of_arrays_is_matched_by_its_names(still: longhaul.Result, folder: Path) -> None:
    whole = {name: value + value.dtype.type(1) for name, value in policy_arrays(still).items()}  # as no run begins
    arrays = {name: value for name, value in whole.items() if "critic" not in name}
    path = folder / "policy.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    _, here = beginning(folder, "file", init_from=path, init_parts=("parameters",))
    for name, value in here.items():
        if name.startswith("params"):  # what the file has not begins as it would without
            assert np.array_equal(value, whole[name]) == (name in arrays), name


def test_runs_npz_and_safetensors_hold_the_same_arrays_by_the_same_names(still: longhaul.Result, folder: Path) -> None:
    of_run, policy = init_from.arrays(str(still.folder), still.policy.spec), policy_arrays(still)
    files = pytest.importorskip("safetensors.numpy")
    files.save_file(policy, folder / "policy.safetensors")
    of_file = init_from.arrays(str(folder / "policy.safetensors"), still.policy.spec)
    for name, value in policy.items():
        np.testing.assert_array_equal(of_run[name], value)
        np.testing.assert_array_equal(of_file[name], value)
    assert {name.partition(".")[0] for name in of_run} >= {"params", "moments", "opt_state"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"init_from": "nowhere"}, "no run 'nowhere' in"),
        ({"init_from": "nowhere.npz"}, "--init-from is nowhere.npz, and there is no such file"),
        ({"init_from": "still@last"}, "behind the @ stands the number of a checkpoint, RUN@120"),
        ({"init_from": "still@3"}, r"no such checkpoint; it has \[2, 4\]"),
        ({"init_from": "still", "hidden_dim": 16}, r"params\..* is \[.*\] there and \[.*\] here; give the sizes"),
        ({"init_from": "still", "init_parts": ("weights",)}, "--init-parts is 'weights'"),
        ({"init_from": "other.npz"}, "has none of this run's leaves; it has sun, and the run moments.mean"),
        ({"init_from": "bad.npz"}, "bad.npz is no whole .npz file"),
        ({"init_from": "bad.safetensors"}, "bad.safetensors"),
        ({"init_from": "old.pkl"}, "old.pkl is of the old HackMatrix trainer, and this run is of something else"),
    ],
)
def test_parameters_that_do_not_fit_are_one_line_and_leave_no_folder(
    settings: dict[str, Any], says: str, still: longhaul.Result, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    np.savez("other.npz", sun=np.zeros(3))
    for name in ("bad.npz", "bad.safetensors", "old.pkl"):
        Path(name).write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ValueError, match=says) as caught:
        longhaul.train("cartpole", runs_dir=folder, run_name="refused", **(SMALL | settings))
    assert "\n" not in str(caught.value) and not (folder / "refused").exists()


@pytest.mark.slow
def test_a_finished_run_trains_on_to_a_later_end(
    source: longhaul.Result, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = source.summary["params_sha256"]
    longer = longhaul.resume(source, total_steps=8 * 32)
    said = "schedules go on: the learning rate is 50% of its largest again and falls to 0 at the new end"
    assert said in capsys.readouterr().err
    np.testing.assert_allclose(longer.metrics["ppo/lr"][4:] / source.run.algorithm.lr, [0.5, 0.375, 0.25, 0.125])
    assert longer.summary["agent_steps"] == 256 and longer.summary["params_sha256"] != before
    assert longer.metrics["update"].tolist() == list(range(1, 9))
    assert (folder / "source" / "result-128.json").exists() and longhaul.load(source).run.total_steps == 256
    with pytest.raises(ValueError, match="--total-steps is 64, and 256 are done; give more, or leave it out"):
        longhaul.resume(source, total_steps=64)
    with pytest.raises(ValueError, match="--seed is 9, and run source has 3"):
        longhaul.resume(source, seed=9)
    assert longhaul.resume(source).summary == longer.summary  # done again


@pytest.mark.slow
def test_an_extended_run_is_the_same_whenever_it_was_stopped(folder: Path) -> None:
    """Stopped at half, or at its first end: the schedule goes on to the new end from there."""
    short = longhaul.train("cartpole", runs_dir=folder, run_name="short", anneal=False, **SMALL)
    long = longhaul.train(
        "cartpole", runs_dir=folder, run_name="long", anneal=False, **(SMALL | {"total_steps": 8 * 32})
    )
    again = longhaul.resume(short, total_steps=8 * 32)
    assert again.summary["params_sha256"] == long.summary["params_sha256"]


def test_a_policy_of_the_old_trainer_is_where_training_begins(folder: Path) -> None:
    from longhaul.envs import registry
    from longhaul.training import legacy_params
    from tests.training.test_legacy_params import arrays, pickled, save, tree

    path = save(folder / "params_40.npz", arrays(16, 2))
    game = registry.make("hackmatrix")
    config, policy = legacy_params.load(path, game.spec)
    found = init_from.arrays(str(path), game.spec)
    named = {init_from.dotted(name): leaf for name, leaf in pytree_serialization.name(policy).items()}
    assert found.keys() == named.keys()
    jax.tree.map(np.testing.assert_array_equal, found, named)
    of_pickle = init_from.arrays(str(pickled(folder / "checkpoint_40.pkl", tree(arrays(16, 2)))), game.spec)
    jax.tree.map(np.testing.assert_array_equal, of_pickle, found)
    assert config.network.hidden_dim == 16


@pytest.mark.slow
def test_training_begins_at_the_return_that_play_shows_for_the_old_trainers_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without learning: the returns of training's episodes and of the evaluation are those of games by `play`."""
    from tests.training.test_legacy_params import arrays, save

    monkeypatch.chdir(folder)
    drawn = arrays(16, 2, seed=3)
    drawn["params.Dense_2.kernel"] *= 8.0  # far from even choices
    path = save(folder / "params_50.npz", drawn)
    sizes = {"hidden_dim": 16, "num_layers": 2, "num_envs": 64, "num_steps": 128, "total_steps": 64 * 128 * 12}
    sizes |= {"log_interval": 12, "evaluation_episodes": 200}
    begun = longhaul.train("hackmatrix", init_from=path, lr=0.0, runs_dir="runs", run_name="begun", **sizes)
    shown = {}
    for name, words in {"mode": [], "sample": ["--sample"], "run": ["--run", "begun"]}.items():
        source = words if name == "run" else ["--params", str(path), *words]
        command = ["play", "hackmatrix", *source, "--episodes", "200", "--show", "table", "--json", "found.json"]
        assert main.main(command) == 0
        shown[name] = [row["return"] for row in json.loads(Path("found.json").read_text())["episodes"]]
    assert shown["run"] == shown["mode"]
    (trained,), untrained = begun.metrics["episode/return"], begun.evaluation["untrained"]["return"]
    for found, of in ((trained, shown["sample"]), (untrained, shown["mode"])):
        assert abs(found - np.mean(of)) < 5 * np.std(of) / 200**0.5


def test_the_shipped_policy_acts_and_damage_is_named(tmp_path: Path) -> None:
    policy = longhaul.load("pretrained")
    assert policy.run.recipe == "driving"
    assert sum(file.stat().st_size for file in hub.folder_of("pretrained").iterdir()) < 4_000_000
    observation = jax.tree.map(lambda x: np.zeros((3, *x.shape), x.dtype), policy.spec.observation)
    assert len(policy(observation)) == 3
    copy = tmp_path / "pretrained"
    shutil.copytree(hub.folder_of("pretrained"), copy)
    data = bytearray((copy / hub.POLICY).read_bytes())
    data[-1] ^= 1
    (copy / hub.POLICY).write_bytes(data)
    with pytest.raises(RunError, match=r"policy.safetensors is damaged: its arrays have the digest"):
        init_from.published(copy, policy.params)
    (copy / hub.POLICY).write_bytes(data[:-100])
    with pytest.raises(RunError, match=r"^[^-].*policy.safetensors: .*: the file is damaged; download or install it"):
        init_from.published(copy, policy.params)


def test_the_early_policy_is_another_of_the_same_shape_and_both_are_in_the_wheel() -> None:
    later, early = (restore_policy(hub.folder_of(name))[1] for name in hub.SHIPPED)
    assert cross_play.fitting("early", early, later) is early
    assert params_sha256(early.params) != params_sha256(later.params)
    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["longhaul"]
    packed = {path for pattern in patterns for path in (root / "longhaul").glob(pattern)}
    assert {hub.folder_of(name) / file for name in hub.SHIPPED for file in hub.FILES} <= packed


def shipped_with(folder: Path, part: str, within: str, field: str, value: int) -> Path:
    """Copy of the shipped policy whose run.json has another value in one field."""
    copy = folder / "pretrained"
    shutil.copytree(hub.folder_of("pretrained"), copy)
    about = json.loads((copy / "run.json").read_text())
    about["run"][part][within][field] = value
    (copy / "run.json").write_text(json.dumps(about))
    return copy


def test_a_policy_whose_sizes_no_memory_holds_is_refused_at_once(tmp_path: Path) -> None:
    """It was allocated, which took for ever, and no signal ended it."""
    copy = shipped_with(tmp_path, "algorithm", "network", "hidden_dim", 10_000_000)
    with pytest.raises(RunError, match=r"its parameters take .* TB, and .* GB are possible here; see to its run.json"):
        restore_policy(copy)


def test_a_policy_of_another_observation_is_refused_by_name(tmp_path: Path) -> None:
    """As where the observation of this Longhaul is another than that of the one which trained it."""
    copy = shipped_with(tmp_path, "environment", "simulator", "waypoints", 12)
    message = r"is not the policy of the run.json beside it: \S+ is float32\[.*\], and the network .* needs float32\["
    with pytest.raises(RunError, match=message):
        restore_policy(copy)
