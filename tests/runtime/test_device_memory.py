"""Memory of a device: donation of the program's state, its parts, and the footprint that a run reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from longhaul.cli import main
from longhaul.cli import train as train_command
from longhaul.config import recipes
from longhaul.config.resolve import changed, resolve
from longhaul.config.run import Run
from longhaul.diagnostics import compiled_run
from longhaul.diagnostics.compiled_run import Program, compiled
from longhaul.driving import scenario_source
from longhaul.runtime import device_memory
from longhaul.runtime.errors import RunError
from longhaul.telemetry import screen
from longhaul.topologies import fused
from longhaul.training import compilation, final_evaluation
from longhaul.training.assemble import Assembly
from tests.helpers.small_runs import begin, small


@pytest.fixture(scope="module")
def made() -> Program:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPROC", "4")
        return compiled(small(devices=2))


@pytest.mark.slow
def test_all_of_progress_is_donated(made: Program) -> None:
    """Compiled program: each part has its result in its place, and no byte exists twice."""
    progress = made.start(0)
    text = made.text().splitlines()[0]
    aliases = re.findall(r"\{[\d,\s]*\}: \((\d+), \{\}, (?:may|must)-alias\)", text)
    assert sorted(map(int, aliases)) == list(range(len(jax.tree.leaves(progress))))
    need = device_memory.need(made.executable)
    assert need is not None
    assert need.donated == device_memory.bytes_on_device(progress)
    assert need.arguments - need.donated == device_memory.bytes_on_device(made.context) + 4, (
        "the bank, and the number of updates"
    )


@pytest.mark.slow
def test_parts_are_those_of_one_device(made: Program) -> None:
    progress = made.start(0)
    parts = device_memory.parts(made.assembly.algorithm, progress, made.context)
    assert parts["parameters"] == 4 * made.parameters
    assert 2 * parts["parameters"] < parts["optimiser"] < 2 * parts["parameters"] + 64, "two moments and some counters"
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(progress.carry))
    assert 2 * parts["environments"] == whole, "each of two devices has half of them"
    assert parts["bank"] == 0


@pytest.mark.slow
def test_the_footprint_is_told_before_the_first_update(
    made: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and memory.json; a warning where it is tight; an error, exit code 2 and no folder where it can't fit."""
    need = device_memory.need(made.executable)
    assert need is not None
    program = fused.Program(made.executable, made.assembly.mesh)
    monkeypatch.setattr(fused, "compiled", lambda *args, **words: program)
    monkeypatch.setattr(final_evaluation, "evaluations", lambda *_, **__: iter(()))
    monkeypatch.setattr(device_memory, "memory_of", lambda device: 2 * need.total * 20 // 19)
    run = small(devices=2, total_steps=8 * 16 * 2)
    result = begin(run, tmp_path / "tight").result
    report = capsys.readouterr().err
    assert report.index("memory a device: ") < report.index("agent steps"), "before the first record"
    assert "warning: that is 95% of what a device has" in report
    written = json.loads((tmp_path / "tight" / device_memory.FILE).read_text())
    assert result is not None
    assert result["memory"] == written
    assert written["needed"] == need.total
    assert written["share"] == pytest.approx(0.95, rel=1e-3)

    monkeypatch.setattr(device_memory, "memory_of", lambda device: 2 * (need.total - 1))
    words = ["train", "cartpole", "--runs-dir", str(tmp_path / "runs"), "--run-name", "large", "--mesh", "data=2"]
    words += ["--num-envs", "8", "--num-steps", "16", "--hidden-dim", "8", "--num-minibatches", "2", "--block", "2"]
    assert main.main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"needs {need.total:,} bytes on each of 2 device(s), and one has {need.total - 1:,}" in line
    assert all(remedy in line for remedy in ("--num-envs", "--accumulate", "--remat", "--mesh"))
    assert not (tmp_path / "runs" / "large").exists()


@pytest.mark.slow
def test_a_dry_run_tells_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "cartpole", "--dry-run", "--runs-dir", str(tmp_path / "runs"), "--mesh", "data=1"]
    words += ["--num-envs", "4", "--num-steps", "8", "--hidden-dim", "8", "--num-layers", "1"]
    assert main.main(words) == 0
    rows = dict(re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines())
    assert rows["parameters"] == "428 B", "two towers of 4 x 8 + 8, and heads of 8 x 2 + 2 and 8 + 1"
    assert rows["memory a device"].endswith(f"of {device_memory.size(device_memory.memory_of(jax.devices()[0]) or 0)}")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["actors", "central"])
def test_a_dry_run_weighs_the_learner_of_actors(topology: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "cartpole", "--dry-run", "--mesh", "data=1", "--topology", topology, "--actors", "1"]
    words += ["--num-envs", "4", "--num-steps", "8", "--hidden-dim", "8", "--num-layers", "1"]
    assert main.main(words) == 0
    rows = dict(re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines())
    assert rows["parameters"] == "428 B" and "environments" not in rows


@pytest.mark.parametrize(("topology", "weighed"), [("actors", True), ("central", True), ("fused", False)])
def test_a_dry_run_looks_at_the_program_of_its_topology(
    topology: str, weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fused_program(run: Run) -> None:
        asked.append(run.topology)
        raise RunError("far enough")

    monkeypatch.setattr(compilation, "learner_footprint", lambda run: asked.append("learner"))
    monkeypatch.setattr(compiled_run, "compiled", fused_program)
    code = main.main(["train", "cartpole", "--dry-run", "--mesh", "data=1", "--topology", topology])
    assert (code, asked) == ((0, ["learner"]) if weighed else (2, ["fused"]))


@pytest.mark.parametrize("topology", ["actors", "central"])
def test_there_is_no_program_of_worlds_and_learner_where_actors_are_apart(topology: str) -> None:
    run = resolve(changed(recipes.recipe("cartpole"), {"topology": topology}))
    with pytest.raises(RunError, match=f"--topology {topology} has several; choose --topology fused"):
        compiled_run.compiled(run)


@pytest.mark.parametrize("topology", ["fused", "actors"])
def test_a_dry_run_says_that_it_compiles(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As training does: of a large network it takes minutes."""
    shown: list[str] = []

    @contextmanager
    def stage(title: str, *_: Any, **__: Any) -> Iterator[None]:
        shown.append(title)
        yield

    def compiling(*_: Any, **__: Any) -> None:
        shown.append("now")
        raise RunError("far enough")

    monkeypatch.setattr(screen, "stage", stage)
    monkeypatch.setattr(fused, "lowered", compiling)
    monkeypatch.setattr(compilation, "compiled", compiling)
    assert main.main(["train", "cartpole", "--dry-run", "--mesh", "data=1", "--topology", topology]) == 2
    assert shown[-2:] == ["compiling", "now"]


def test_a_dry_run_prepares_the_devices_of_both_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []

    def prepare(devices: int, threads: int | None) -> None:
        prepared.append(devices)
        raise RunError("far enough")

    monkeypatch.setattr(train_command, "prepare_devices", prepare)
    assert main.main(["train", "cartpole", "--dry-run", "--mesh", "data=1,model=2"]) == 2
    assert prepared == [2]


@pytest.mark.parametrize("how", ["", "--topology actors", "--seeds 2", "--dry-run", "--scenarios 4096"])
def test_a_state_that_cannot_fit_is_refused_before_it_is_allocated(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def allocated(*_: object) -> None:
        raise AssertionError("would wait for 24 TB")

    monkeypatch.setattr(Assembly, "start", allocated)
    monkeypatch.setattr(fused, "lowered", allocated)
    monkeypatch.setattr(device_memory, "memory_of", lambda device: 10**9)
    monkeypatch.setattr(scenario_source, "generated", allocated)  # takes minutes
    recipe = "driving" if "scenarios" in how else "cartpole"
    words = ["train", recipe, "--hidden-dim", "8192", "--mesh", "data=1", *how.split()]
    assert main.main([*words, *([] if "dry" in how else ["--runs-dir", str(tmp_path)])]) == 2
    assert "its state alone" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_memory_of_the_compiler_is_given_back_before_its_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(device_memory, "trim", lambda: given_back.append(True))
    program = device_memory.compiled(jax.jit(lambda x, y: x - 2.0 * y), jnp.float32(5.0), jnp.float32(1.0))
    assert given_back == [True]
    assert float(program(jnp.float32(7.0), jnp.float32(3.0))) == 1.0


def test_memory_that_was_given_back_counts_in_the_most_that_there_was() -> None:
    size, before = 300 << 20, device_memory.resident()
    code = f"import sys; x = bytearray(b'1') * {size}; del x; print(1, flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"1\n"
        most = device_memory.high_water(child.pid)
        assert most is not None and size < most < size + (100 << 20)
        assert device_memory.peak() >= before + size, "of this process and its children"
        assert device_memory.resident() < before + size, "now"
    finally:
        child.communicate()
    assert device_memory.high_water(child.pid) is None, "it has ended"
