"""The store of compiled programs: where it lies, how large it is, and that it changes no number and fails no run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longhaul.runtime import cache_dir as caches
from longhaul.runtime import compile_cache

# Trains a small run in a process of its own, where the store may be on.
TRAIN = """
import json, sys
from pathlib import Path
import jax
from longhaul.algorithms.config import PPOConfig
from longhaul.config.run import Named
from longhaul.networks.config import NetworkConfig
from longhaul.training import loop as training
from tests.helpers.small_runs import small
folder, names = Path(sys.argv[1]), []
def note(event, seconds, fun_name="", **_):
    if event == "/jax/core/compile/backend_compile_duration":
        names.append(fun_name)
jax.monitoring.register_event_duration_secs_listener(note)
folder.mkdir(parents=True)
algorithm = PPOConfig(num_minibatches=1, update_epochs=1, network=NetworkConfig(hidden_dim=8, num_layers=1))
run = small(
    environment=Named("probe/action"), algorithm=algorithm, total_steps=8 * 16 * 5, evaluation_episodes=1, threads=1,
)
training.train(run, folder, resumed=False)
(folder / "compiled.json").write_text(json.dumps(names))
"""

ENABLE = """
import os, sys
from longhaul.runtime import compile_cache as compilation
assert compilation.enable(1, on_cpu=True) is None
import jax
ledger = compilation.Ledger()
assert float(jax.jit(lambda x: x + 1)(1.0)) == 2.0
assert (ledger.hits, ledger.misses, ledger.summary) == (0, 0, "no compilation cache")
"""


def start(folder: Path, store: str, program: str = TRAIN) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"} | {"LONGHAUL_CACHE": store}
    command = [sys.executable, "-W", "error", "-c", program, str(folder)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen, folder: Path) -> tuple[dict[str, Any], str]:
    """(result.json, what was said)."""
    said = process.communicate()[1]
    assert process.returncode == 0, said
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result, said


def train(folder: Path, store: str) -> tuple[dict[str, Any], str]:
    return end(start(folder, store), folder)


def entries(store: Path) -> list[Path]:
    return sorted(store.rglob("*-cache"))


def programs(store: Path) -> list[str]:
    """Names of the programs without their digests, into which JAX takes the store's path."""
    return [path.name.rsplit("-", 2)[0] for path in entries(store)]


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A store that a process filled, and its result."""
    base = tmp_path_factory.mktemp("store")
    result, said = train(base / "a", str(base / "store"))
    assert result["cache"]["misses"] > 0
    assert "from the compilation cache" in said
    return base / "store", result


@pytest.mark.slow
def test_two_processes_fill_a_store_at_once(cold: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    both = [start(tmp_path / name, str(tmp_path / "store")) for name in ("a", "b")]
    for process, name in zip(both, ("a", "b"), strict=True):
        result, _ = end(process, tmp_path / name)
        assert result["params_sha256"] == cold[1]["params_sha256"]
    assert programs(tmp_path / "store") == programs(cold[0]), "both wrote the same, each once"


@pytest.mark.slow
def test_cached_programs_give_the_same_numbers(cold: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Every program is found, the one compiled ahead too; nothing is warned of, of the processor's features neither."""
    store, before = cold
    files = entries(store)
    after, said = train(tmp_path / "run", str(store))
    assert after["cache"]["misses"] == 0
    assert after["cache"]["hits"] > 5
    assert entries(store) == files
    assert after["params_sha256"] == before["params_sha256"]
    assert after["evaluation"] == before["evaluation"]
    assert not any(word in said.lower() for word in ("warn", "error", "feature", "failed"))
    assert any(path.name.startswith("jit_run-") for path in files), "the update itself is among them"


@pytest.mark.slow
def test_a_run_compiles_its_update_once(cold: tuple[Path, dict[str, Any]]) -> None:
    """Five updates in calls of two: the last call is a part of one, and as with resumes, n is an argument."""
    store, result = cold
    names = json.loads((store.parent / "a" / "compiled.json").read_text())
    assert result["agent_steps"] == 8 * 16 * 5
    assert sum("run" in name for name in names) == 2, names  # the update, and the evaluation's episodes


@pytest.mark.slow
def test_with_other_threads_programs_are_others(cold: tuple[Path, dict[str, Any]]) -> None:
    """JAX's key does not tell them apart, and a program's sums depend on their number."""
    assert compile_cache.subfolder(1, on_cpu=True) != compile_cache.subfolder(2, on_cpu=True)
    assert compile_cache.subfolder(1, on_cpu=False) == compile_cache.subfolder(2, on_cpu=False) == ""
    store, _ = cold
    assert {path.parent.name for path in entries(store)} == {compile_cache.subfolder(1, on_cpu=True)}


@pytest.mark.slow
def test_torn_entries_are_compiled_anew_said_once_and_replaced(
    cold: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    store, before = cold
    whole = {path: path.read_bytes() for path in entries(store)}
    for path, data in whole.items():
        path.write_bytes(data[: len(data) // 2])
    after, said = train(tmp_path / "run", str(store))
    assert after["params_sha256"] == before["params_sha256"]
    lines = [line for line in said.splitlines() if "compilation cache" in line and "failed" in line]
    assert len(lines) == 1
    assert "it was compiled anew" in lines[0]
    last, said = train(tmp_path / "last", str(store))
    assert last["cache"]["misses"] == 0
    assert "failed" not in said


@pytest.mark.parametrize("place", ["a file", pytest.param("below a file", marks=pytest.mark.slow)])
def test_where_nothing_can_be_kept_programs_are_compiled(tmp_path: Path, place: str) -> None:
    """It is said once. Root may write anywhere, so that a folder without the right to is no test."""
    (tmp_path / "file").write_text("")
    store = tmp_path / "file" if place == "a file" else tmp_path / "file" / "store"
    process = start(tmp_path, str(store), ENABLE)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    assert len([line for line in said.splitlines() if "no compilation cache in" in line]) == 1


def test_the_cache_lies_where_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LONGHAUL_CACHE", "JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert compile_cache.root() == Path("/home/somebody/.cache/longhaul/xla")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert compile_cache.root() == Path("/cache/longhaul/xla")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/jax")
    assert compile_cache.root() == Path("/jax")
    monkeypatch.setenv("LONGHAUL_CACHE", "~/ours")
    assert compile_cache.root() == Path("/home/somebody/ours")
    monkeypatch.setenv("LONGHAUL_CACHE", "off")
    assert compile_cache.root() is None


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    for i in range(10):
        path = tmp_path / f"part-{i % 2}" / f"jit_f-{i}-cache"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (1000.0 + i, 1000.0))
    (tmp_path / "notes").write_bytes(bytes(10_000))
    os.utime(tmp_path / "part-0" / "jit_f-0-cache", (5000.0, 1000.0))  # read again since
    caches.trim(tmp_path, "*-cache", 1000)
    assert len(entries(tmp_path)) == 10
    caches.trim(tmp_path, "*-cache", 399)
    assert [path.name for path in entries(tmp_path)] == ["jit_f-0-cache", "jit_f-8-cache", "jit_f-9-cache"]
    assert (tmp_path / "notes").exists(), "what is no entry stays"
    caches.trim(tmp_path, "*-cache", 0)
    assert entries(tmp_path) == []


def test_the_tests_have_no_store() -> None:
    """What was compiled yesterday proves nothing about the code of today."""
    assert compile_cache.enable(1, on_cpu=True) is None
    assert compile_cache.root() is None
