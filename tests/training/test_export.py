"""Exported policies: the program gives the policy's actions in a process without Longhaul; files hold its arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import longhaul
from longhaul.cli import export as command
from longhaul.training import export, init_from
from tests.helpers import own_environments as own

pytest.importorskip("flatbuffers")

SMALL: dict[str, Any] = {
    "num_envs": 4, "num_steps": 8, "total_steps": 64, "evaluation_episodes": 2, "hidden_dim": 8, "num_minibatches": 1,
}  # fmt: skip


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
    for count in (1, 5):
        rows = np.eye(own.LENGTH, dtype=np.float32)[:count]
        np.testing.assert_array_equal(program.call({"observation": rows}), trained.policy(rows))


@pytest.mark.parametrize(
    "settings",
    [{"env": "pendulum"}, {"env": "probe/memory", "memory": 4}, {"env": "probe/masked"}],
    ids=lambda s: s["env"],
)
def test_continuous_recurrent_and_masked_policies_pass_the_check(settings: dict[str, Any], folder: Path) -> None:
    name = settings["env"].replace("/", "-")
    result = longhaul.train("ppo", runs_dir=folder, run_name=name, **SMALL, **settings)
    assert result.policy.export(folder / "out" / name)[0].stat().st_size > 1000


def test_a_program_of_another_policy_fails_the_check(trained: longhaul.Result, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "policy.jax"
    path.write_bytes(export.program(longhaul.load(trained)))
    other = longhaul.load(trained)
    other.params = other.params._replace(params=_turned(other.params.params))
    with pytest.raises(ValueError, match="gives other actions than the run's policy, by up to 1"):
        export.check(other, path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="does not run outside Longhaul"):
        export.check(other, path)


def _turned(params: Any) -> Any:
    import jax

    return jax.tree.map(lambda x: -x + 0.3, params)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_file_of_arrays_is_what_a_run_begins_from(kind: str, trained: longhaul.Result, tmp_path: Path) -> None:
    path = trained.policy.export(tmp_path, kind)[0]
    arrays = init_from.arrays(str(path), trained.policy.spec)
    for name, value in export.names(trained.policy.params, "params").items():
        np.testing.assert_array_equal(arrays[name], value)
    with pytest.raises(ValueError, match="--to is 'onnx'; choose one of jax, safetensors, npz"):
        trained.policy.export(tmp_path, "onnx")
