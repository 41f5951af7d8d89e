"""Two processes that train under a supervisor are hit by all that can go wrong, and end as if nothing had been."""

from __future__ import annotations

import json
import math
import random
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from longhaul.cli import main
from longhaul.runtime.launch import supervisor
from longhaul.telemetry import sinks
from longhaul.training import final_evaluation, loop
from tests.helpers import launch_faults, nan_environment
from tests.helpers.small_runs import records, result

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")

FLAGS = shlex.split(
    "--num-envs 8 --num-steps 16 --hidden-dim 8 --num-layers 1 --num-minibatches 2 --update-epochs 1 --lr 3e-3 "
    "--no-anneal --seed 3 --block 2 --log-interval 4 --evaluation-episodes 4 --save-interval 6"
)

OWN = ("--hosts", "2", "--devices-per-host", "1", "--restarts", "4")


def words(runs_dir: Path, updates: int, *more: str, recipe: tuple[str, ...] = ("cartpole",)) -> list[str]:
    return ["train", *recipe, *FLAGS, "--total-steps", str(8 * 16 * updates), "--runs-dir", str(runs_dir), *more]


def undisturbed(runs_dir: Path, updates: int, recipe: tuple[str, ...] = ("cartpole",)) -> Path:
    """The same run in one process of two devices, this one: a sum over two devices has one order."""
    assert main.main(words(runs_dir, updates, "--run-name", "whole", "--mesh", "data=2", recipe=recipe)) == 0
    return runs_dir / "whole"


class Storm:
    """A run under a supervisor, and what befalls it."""

    def __init__(self, runs_dir: Path, updates: int, seed: int, recipe: tuple[str, ...] = ("cartpole",)):
        self.folder, self.rng = runs_dir / "hit", random.Random(seed)
        self.log, self.full = runs_dir / "log", runs_dir / "full"
        self.begin = words(runs_dir, updates, "--run-name", "hit", recipe=recipe)
        self.go_on = words(runs_dir, updates, "--resume", "hit", recipe=recipe)
        self.variables = {launch_faults.FULL: str(self.full), "LONGHAUL_CACHE": str(runs_dir / "cache")}

    def run(self, hits: list[str]) -> None:
        """To the end, through all hits, each after a few more saves; the launcher is started again where it ended."""
        train = self.begin
        while True:
            with launch_faults.launched(train, *OWN, variables=self.variables, log=self.log) as launcher:
                while hits and launcher.poll() is None:
                    self.wait(launcher)
                    if launcher.poll() is not None:
                        break
                    hit = hits.pop(0)
                    with open(self.log, "a") as log:
                        log.write(f"--- {hit} after checkpoint {supervisor.newest_step(self.folder)}\n")
                    HITS[hit](self, launcher)
                    if hit in ("terminate", "launcher"):
                        break
                code = launcher.wait(timeout=600)
            if code == 0:
                assert not hits, "it was done before all had hit"
                return
            assert code in (loop.STOPPED, -9), self.log.read_text()
            launch_faults.wait_for(lambda: not launch_faults.pids("hit"))
            train = self.go_on

    def wait(self, launcher: subprocess.Popen[bytes]) -> None:
        """For one to three new checkpoints, and a little longer."""
        before = supervisor.newest_step(self.folder)
        wanted = before + 6 * self.rng.randint(1, 2)
        launch_faults.wait_for(lambda: supervisor.newest_step(self.folder) >= wanted or launcher.poll() is not None)
        end = self.rng.uniform(0.0, 0.3)
        if launcher.poll() is None:
            try:
                launcher.wait(timeout=end)
            except subprocess.TimeoutExpired:
                return

    def one(self) -> tuple[int]:
        return (self.rng.randint(0, 1),)


def _harm(how: str) -> Callable[[Storm, subprocess.Popen[bytes]], None]:
    def harm(storm: Storm, launcher: subprocess.Popen[bytes]) -> None:
        """And both are killed at once, so that it is what they would go on from, if no save is under way."""
        launch_faults.send("hit", launch_faults.STOP, (0, 1))
        launch_faults.damage(storm.folder, how)
        launch_faults.send("hit", launch_faults.KILL, (0, 1))

    return harm


def _fill(storm: Storm, launcher: subprocess.Popen[bytes]) -> None:
    """The disk is full until two saves have failed."""
    before = storm.log.read_text().count("cannot save checkpoint")
    storm.full.touch()
    launch_faults.wait_for(lambda: storm.log.read_text().count("cannot save checkpoint") >= before + 2)
    storm.full.unlink()


HITS: dict[str, Callable[[Storm, subprocess.Popen[bytes]], None]] = {
    "kill one": lambda storm, launcher: launch_faults.send("hit", launch_faults.KILL, storm.one()),
    "kill both": lambda storm, launcher: launch_faults.send("hit", launch_faults.KILL, (0, 1)),
    "stop": lambda storm, launcher: launch_faults.send("hit", launch_faults.STOP, storm.one()),
    "terminate": lambda storm, launcher: launcher.terminate(),
    "launcher": lambda storm, launcher: launcher.kill(),
    "truncate": _harm("truncate"),
    "flip": _harm("flip"),
    "full disk": _fill,
}


def assert_as_if_nothing_had_been(folder: Path, whole: Path) -> None:
    ours, theirs = (result(run) | {"cache": None} for run in (folder, whole))
    assert ours == theirs
    assert records(folder) == records(whole)


@pytest.mark.slow
def test_one_hit_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are killed, and a bit of the newest checkpoint is flipped: they go on from the one before."""
    # The hits of the slow tests go through evaluations, too.
    monkeypatch.setattr(final_evaluation, "evaluations", lambda *_, **__: iter(()))
    whole = undisturbed(tmp_path, 60)
    storm = Storm(tmp_path, 60, seed=5)
    storm.variables[launch_faults.UNSCORED] = "1"
    storm.run(["flip"])
    assert_as_if_nothing_had_been(storm.folder, whole)
    said = storm.log.read_text()
    assert said.count("starts again (1 of 4)") == 1, said
    assert "is damaged and skipped" in said


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--staleness", "1", "--pin")])
def test_two_learners_with_two_actors_each_are_one_learner_with_four(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Also where one learner is killed, and both go on from the newest checkpoint."""
    recipe, updates = ("cartpole", "--topology", "actors", "--actors", "4", *more), 120
    whole = undisturbed(tmp_path, updates, recipe)
    storm = Storm(tmp_path, updates, seed=3, recipe=recipe)
    storm.run(["kill one", "terminate"])
    assert result(storm.folder)["params_sha256"] == result(whole)["params_sha256"]
    ours, theirs = ([{name: value for name, value in record.items() if not name.startswith("actors/")}
                     for record in records(folder)] for folder in (storm.folder, whole))  # fmt: skip
    assert ours == theirs
    assert "starts again (1 of 4)" in storm.log.read_text()


@pytest.mark.slow
def test_twenty_hits_leave_no_trace(tmp_path: Path) -> None:
    updates, rng = 480, random.Random(1)
    hits = [*HITS, *HITS, "kill one", "kill both", "stop", "terminate"]
    rng.shuffle(hits)
    assert len(hits) == 20
    whole = undisturbed(tmp_path, updates)
    storm = Storm(tmp_path, updates, seed=2)
    storm.run(hits)
    assert_as_if_nothing_had_been(storm.folder, whole)


@pytest.mark.slow
def test_nan_and_kills_end_finite_and_as_without_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detours are part of the run: the same whoever was killed in between, as saves fall on the same updates."""
    chance, updates, recipe = 1e-4, 120, ("ppo", "--env", "poisonous", "--rollbacks", "20")
    nan_environment.add(monkeypatch, "poisonous", chance)
    whole = undisturbed(tmp_path, updates, recipe)
    storm = Storm(tmp_path, updates, seed=4)
    storm.begin = words(tmp_path, updates, "--run-name", "hit", recipe=recipe)
    storm.variables[launch_faults.CHANCE] = str(chance)
    storm.run(["kill one", "kill both", "kill one"])
    assert_as_if_nothing_had_been(storm.folder, whole)
    assert len(json.loads((storm.folder / "run.json").read_text())["detours"]) >= 1
    values = [value for record in sinks.read(storm.folder / "metrics.jsonl") for value in record.values()]
    assert all(value is not None and math.isfinite(value) for value in values)
