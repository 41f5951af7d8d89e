"""Exported policies: the program gives the policy's actions in a process without Longhaul; files hold its arrays."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import longhaul
from longhaul.cli import export as command
from longhaul.cli import main
from longhaul.config import recipes
from longhaul.config.resolve import resolve
from longhaul.runtime.errors import RunError
from longhaul.training import export, init_from, onnx_program
from tests.helpers import own_environments as own
from tests.helpers.drawn_policies import drawn
from tests.helpers.small_runs import quick_programs
from tests.training.test_api import SMALL

pytest.importorskip("flatbuffers")

_programs = quick_programs(evaluated=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def trained(folder: Path) -> longhaul.Result:
    return longhaul.train("ppo", env=own.Corridor, runs_dir=folder, run_name="run", **SMALL)


def test_the_command_writes_a_checked_program_and_what_it_takes(
    trained: longhaul.Result, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.export(["run", "--runs-dir", str(folder)]) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [file.name for file in files] == ["policy.jax", "policy.json"]
    about = json.loads(files[1].read_text())
    assert about["observation"] == {"observation": {"shape": [own.LENGTH], "dtype": "float32"}}
    assert about["action"] == {"kind": "Discrete", "n": 2} and about["memory"] == {}
    assert about["params_sha256"] == trained.summary["params_sha256"]
    from jax import export as programs

    program = programs.deserialize(bytearray(files[0].read_bytes()))
    rows = np.eye(own.LENGTH, dtype=np.float32)  # beside the check's, which are another number of rows
    np.testing.assert_array_equal(program.call({"observation": rows}), trained.policy(rows))


@pytest.fixture(scope="module")
def onnxruntime() -> Any:
    pytest.importorskip("onnx")
    return pytest.importorskip("onnxruntime")


def test_an_onnx_model_acts_as_the_run_on_every_batch(
    trained: longhaul.Result, folder: Path, capsys: pytest.CaptureFixture[str], onnxruntime: Any
) -> None:
    assert command.export(["run", "--runs-dir", str(folder), "--to", "onnx"]) == 0
    path = Path(capsys.readouterr().out.splitlines()[0])
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [(x.name, x.shape, x.type) for x in session.get_inputs()] == [
        ("observation", [onnx_program.BATCH, own.LENGTH], "tensor(float)")
    ]
    for count in (1, 1200):
        rows = np.random.default_rng(count).normal(size=(count, own.LENGTH)).astype(np.float32)
        action, parameters = session.run(["action", "parameters"], {"observation": rows})
        np.testing.assert_array_equal(action, trained.policy(rows))
        assert action.dtype == np.int32 and parameters.shape == (count, 2)
        np.testing.assert_array_equal(np.argmax(parameters, axis=-1), action)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        pytest.param("cartpole", {}, marks=pytest.mark.slow),  # the run above has its kind of policy
        ("driving", {}),
        pytest.param("driving", {"torso": "wayformer", "num_layers": 1}, marks=pytest.mark.slow),
        pytest.param("hackmatrix", {"memory": 8}, marks=pytest.mark.slow),
        ("pendulum-sac", {}),
    ],
    ids=str,
)
def test_recipes_policies_are_the_same_in_onnxruntime(
    recipe: str, settings: dict[str, Any], tmp_path: Path, onnxruntime: Any
) -> None:
    policy = drawn(recipe, hidden_dim=32, **settings)
    path = policy.export(tmp_path, "onnx")[0]  # checked on 1,001 observations in a process without JAX
    draw, session = np.random.default_rng(1), onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def words(leaf: Any) -> np.ndarray:
        shape, dtype = (1001, *leaf.shape), np.dtype(leaf.dtype)
        if dtype.kind == "f":
            return draw.normal(size=shape).astype(dtype)
        most = np.iinfo(dtype).max if dtype.itemsize == 4 else 8  # words of bits, or numbers
        return draw.random(shape) < 0.8 if dtype.kind == "b" else draw.integers(0, most, shape, dtype)

    seen = jax.tree.map(words, policy.spec.observation)
    held = jax.tree.map(lambda x: draw.normal(size=(1001, *x.shape[1:])).astype(x.dtype), policy.memory(1))
    given = export.names(seen, "observation") | (export.names(held, "memory") if policy.recurrent else {})
    found = dict(zip((x.name for x in session.get_outputs()), session.run(None, given), strict=True))
    action, after = policy(seen, memory=held) if policy.recurrent else (policy(seen), ())
    np.testing.assert_allclose(found["action"], action, rtol=0, atol=1e-5)  # choices: the same
    if policy.recurrent:
        np.testing.assert_allclose(found["next_memory"], after, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("env", "memory"),
    [("probe/memory", 4), *(pytest.param(name, 0, marks=pytest.mark.slow) for name in ("pendulum", "probe/masked"))],
)
def test_continuous_recurrent_and_masked_policies_pass_the_check(env: str, memory: int, tmp_path: Path) -> None:
    policy = drawn("ppo", env=env, hidden_dim=8, memory=memory)
    for kind in export.RUNNERS:
        assert policy.export(tmp_path, kind)[0].stat().st_size > 1000


@pytest.mark.slow
def test_a_policy_of_an_own_algorithm_is_its_actions_alone(folder: Path, onnxruntime: Any) -> None:
    from tests.algorithms.test_external import Constant

    run = {"num_envs": 4, "num_steps": 8, "total_steps": 32, "evaluation_episodes": 2}
    policy = longhaul.train("ppo", env=own.Corridor, algorithm=Constant, runs_dir=folder, run_name="own", **run).policy
    jax_file, onnx_file = (policy.export(folder / "own" / kind, kind)[0] for kind in ("jax", "onnx"))
    assert jax_file.is_file()
    session = onnxruntime.InferenceSession(onnx_file, providers=["CPUExecutionProvider"])
    (action,) = session.run(None, {"observation": np.eye(own.LENGTH, dtype=np.float32)})
    assert action.tolist() == [1] * own.LENGTH


@pytest.mark.parametrize("kind", ["onnx", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_program_of_another_policy_fails_the_check(kind: str, trained: longhaul.Result, tmp_path: Path) -> None:
    path = tmp_path / f"policy.{kind}"
    path.write_bytes(export.program(longhaul.load(trained)) if kind == "jax" else export.onnx(longhaul.load(trained)))
    other = longhaul.load(trained)
    other.params = other.params._replace(params=_turned(other.params.params))
    with pytest.raises(ValueError, match=r"gives other actions than the run's policy, in [1-9]"):
        export.check(other, path, kind)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="does not run outside Longhaul"):
        export.check(other, path, kind)


def _turned(params: Any) -> Any:
    return jax.tree.map(lambda x: -x + 0.3, params)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_file_of_arrays_is_what_a_run_begins_from(kind: str, trained: longhaul.Result, tmp_path: Path) -> None:
    path, about = trained.policy.export(tmp_path, kind)
    assert path.stat().st_mode == about.stat().st_mode, "whoever reads one reads the other"
    arrays = init_from.arrays(str(path), trained.policy.spec)
    for name, value in export.names(trained.policy.params, "params").items():
        np.testing.assert_array_equal(arrays[name], value)
    with pytest.raises(ValueError, match="--to is 'torch'; choose one of jax, onnx, safetensors, npz"):
        trained.policy.export(tmp_path, "torch")


def test_a_policys_mean_with_another_is_of_their_parameters() -> None:
    one, other = drawn("ppo", env="cartpole", hidden_dim=8), drawn("ppo", env="cartpole", hidden_dim=8)
    other.params = jax.tree.map(lambda x: -3.0 * x if x.dtype == np.float32 else x, other.params)
    mixed = one.averaged(other, 0.25)
    for x, y in zip(jax.tree.leaves(mixed.params.params), jax.tree.leaves(one.params.params), strict=True):
        np.testing.assert_allclose(x, 0.75 * y - 0.25 * 3.0 * y, atol=1e-6)
    with pytest.raises(RunError, match=r"bias is \[16\] there and \[8\] here"):
        one.averaged(drawn("ppo", env="cartpole", hidden_dim=16), 0.5)
    with pytest.raises(RunError, match=r"networks differ: .* absent here"):
        one.averaged(drawn("ppo", env="cartpole", hidden_dim=8, num_layers=3), 0.5)


@pytest.mark.parametrize("average", ["other", "=0.5", "other=2", "other=half"])
def test_a_mean_without_a_share_is_refused(average: str, trained: longhaul.Result, capsys: Any) -> None:
    assert main.main(["export", str(trained.folder), "--to", "npz", "--average", average]) == 2
    assert f"--average is {average}; give RUN=SHARE" in capsys.readouterr().err


def test_a_model_without_files_goes_out_without_a_tokeniser_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = resolve(recipes.recipe("reasoning-arithmetic"))
    monkeypatch.setattr(command, "folder_of", lambda *_, **__: tmp_path / "sums")
    monkeypatch.setattr(command, "restore_policy", lambda *_: (run, SimpleNamespace(params=None), None))
    monkeypatch.setattr(command.huggingface, "save", lambda *_, **__: None)
    assert main.main(["export", "sums", "--to", "hf", "--out", "out"]) == 0
    out, err = capsys.readouterr()
    assert out == "out\n" and err.startswith("without tokenizer.json") and "longhaul serve sums reads texts" in err
