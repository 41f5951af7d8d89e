"""The commit of a checkout and of none; a digest that is equal exactly where the parameters are."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import longhaul
from longhaul.runtime.provenance import commit, params_sha256, provenance


class Pair(NamedTuple):
    b: jax.Array
    a: jax.Array


PARAMS = {"w": jnp.array([[1.0, -0.0]]), "pair": Pair(jnp.arange(3), jnp.zeros((0, 2))), "n": None}


def test_provenance_is_json_and_says_what_runs() -> None:
    found = provenance()
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["longhaul"] == longhaul.__version__
    assert found["versions"]["jax"] == jax.__version__
    assert found["python"] == sys.version.split()[0]
    assert found["cpus"] == os.cpu_count()
    assert found["devices"] == {jax.devices()[0].device_kind: len(jax.devices())}
    assert found["command"] == sys.argv


def test_the_commit_is_that_of_the_package_s_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, other = tmp_path / "longhaul", tmp_path / "venv" / "longhaul"
    for folder in (package, other):
        folder.mkdir(parents=True)
        (folder / "types.py").write_text("1")
    assert commit(package) is None
    names = {f"GIT_{role}_{what}": "x@y" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **names, "GIT_CONFIG_GLOBAL": os.devnull, "HOME": str(tmp_path)}

    def git(*words: str) -> str:
        command = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(tmp_path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()

    git("init", "-q")
    assert commit(package) is None  # no commit yet
    git("add", "longhaul")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert commit(package) == head
    (tmp_path / "notes").write_text("beside the package")
    assert commit(package) == head
    (package / "types.py").write_text("2")
    assert commit(package) == head + "+"
    assert commit(other) is None  # below a checkout that is not its own
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(package) is None  # no git on this machine


def test_the_digest_is_by_definition() -> None:
    digest = hashlib.sha256()
    for name, dtype, shape, data in [
        ("['pair'].a", "float32", "[0, 2]", b""),
        ("['pair'].b", "int32", "[3]", np.arange(3, dtype=np.int32).tobytes()),
        ("['w']", "float32", "[1, 2]", np.array([1, -0.0], np.float32).tobytes()),
    ]:
        digest.update(f"{name}\0{dtype}\0{shape}\0".encode() + len(data).to_bytes(8, "little") + data)
    assert params_sha256(PARAMS) == digest.hexdigest()


def test_the_digest_does_not_know_order_devices_or_kind_of_array() -> None:
    wanted = params_sha256(PARAMS)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spread = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
    for same in (dict(reversed(PARAMS.items())), spread, jax.tree.map(np.asarray, PARAMS)):
        assert params_sha256(same) == wanted
    rows = jnp.arange(24.0).reshape(8, 3)
    assert params_sha256(jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))) == params_sha256(rows)


@pytest.mark.parametrize(
    "change",
    [
        {"w": jnp.array([[1.0, 0.0]])},
        {"w": jnp.array([1.0, -0.0])},
        {"w": PARAMS["w"].view(jnp.int32)},
        {"v": jnp.zeros(())},
        {"pair": Pair(jnp.arange(3), jnp.zeros((2, 0)))},
        {"pair": PARAMS["pair"]._replace(b=jnp.zeros((0, 2)), a=jnp.arange(3))},
        {"n": 0},
    ],
)
def test_the_digest_sees_each_difference(change: dict) -> None:
    assert params_sha256({**PARAMS, **change}) != params_sha256(PARAMS)
