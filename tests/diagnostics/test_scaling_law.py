"""The scaling law: exponents recovered from made losses, intervals that cover, the grid that goes on, the page."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.cli import main
from longhaul.config.population import SCENARIOS
from longhaul.config.recipes import Grid, driving_scaling
from longhaul.config.resolve import members_of, resolve
from longhaul.config.run import Driving, Run, from_dict, to_dict
from longhaul.diagnostics import scaling_grid as grids
from longhaul.diagnostics.scaling_grid import Job
from longhaul.diagnostics.scaling_law import Law, TooFew, fit
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.telemetry import pages, sinks
from longhaul.training import loop
from longhaul.training.run_dir import write_json
from tests.helpers.small_runs import begin

TRUE = Law(e=0.02, a=300.0, alpha=0.7, b=2.0, beta=0.5)


def measured(sizes: int, data: int, noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(n, d, losses of the true law on a grid, with noise in their logarithm)."""
    n, d = (axis.ravel() for axis in np.meshgrid(np.geomspace(3e4, 2.5e7, sizes), 2.0 ** np.arange(4, 4 + data)))
    return n, d, TRUE.at(n, d) * np.exp(noise * np.random.default_rng(seed).normal(size=n.shape))


def test_without_noise_the_law_is_found_exactly() -> None:
    found = fit(*measured(4, 4, 0.0), draws=10)
    np.testing.assert_allclose(found.law, TRUE, rtol=1e-4)
    assert found.error < 1e-6


@pytest.mark.slow
def test_noise_moves_the_exponents_little_and_the_intervals_cover_them() -> None:
    covered = 0
    for seed in range(6):
        found = fit(*measured(6, 7, 0.05, seed))
        assert abs(found.law.alpha - TRUE.alpha) < 0.15
        assert abs(found.law.beta - TRUE.beta) < 0.15
        assert 0.02 < found.error < 0.08
        for name in Law._fields:
            low, high = found.intervals[name]
            covered += low <= getattr(TRUE, name) <= high
    assert covered >= 20, "of 30 intervals of 90 %"


def test_one_absurd_run_does_not_bend_the_law() -> None:
    n, d, loss = measured(6, 7, 0.02)
    plain = fit(n, d, loss, draws=2).law
    loss[17] *= 5.0
    bent = fit(n, d, loss, draws=2).law
    assert abs(bent.alpha - plain.alpha) < 0.1
    assert abs(bent.beta - plain.beta) < 0.1


@pytest.mark.parametrize("unit", [1.0, 1e6])
def test_the_units_of_size_change_nothing_but_its_factor(unit: float) -> None:
    n, d, loss = measured(5, 5, 0.03)
    one, other = fit(n, d, loss, draws=2).law, fit(n / unit, d, loss, draws=2).law
    np.testing.assert_allclose(other.at(n / unit, d), one.at(n, d), rtol=1e-3)
    assert abs(one.alpha - other.alpha) < 1e-2


def test_too_few_cells_and_losses_of_0_give_no_law() -> None:
    with pytest.raises(TooFew, match="4 cells with 2 sizes of model and 2 of data; a law needs 6 cells and 3 of each"):
        fit(*measured(2, 2, 0.0))
    n, d, loss = measured(3, 3, 0.0)
    with pytest.raises(ValueError, match="a loss of 0 has no logarithm"):
        fit(n, d, loss * 0.0)
    with pytest.raises(ValueError, match="give three equal vectors"):
        fit(n[:-1], d, loss)


# ------------------------------------------------------------------------------------------------------------- grid


def tiny(**changes: Any) -> Grid:
    """A grid of three sizes on three numbers of scenarios."""
    default = driving_scaling()
    base = dataclasses.replace(
        default.base, total_steps=512, num_envs=8, num_steps=16, devices=1, threads=1, evaluation_episodes=8,
        algorithm=dataclasses.replace(default.base.algorithm, num_minibatches=2, update_epochs=1),
    )  # fmt: skip
    settings: dict[str, Any] = {"sizes": (0.1, 0.03, 0.3), "scenarios": (4, 8, 16)}
    return dataclasses.replace(default, base=base, **(settings | {"seeds": 1} | changes))


class Trainer:
    """A stand-in for training: fails a quarter as often as the true law has it, and stops where it is told to."""

    def __init__(self) -> None:
        self.trained: list[tuple[str, bool]] = []
        self.stop_at: int | None = None

    def __call__(self, run: Run, folder: Path, *, resumed: bool, sole: bool = False) -> loop.Outcome:
        self.trained.append((folder.name, resumed))
        write_json(folder / "run.json", {"stands": "for one"})
        if len(self.trained) == self.stop_at:
            return loop.Outcome(loop.STOPPED, None)
        assert isinstance(run.environment, Driving)
        assert run.algorithm.network.model_size is not None
        parameters = round(run.algorithm.network.model_size * 1e6)
        rows = []
        for i, member in enumerate(members_of(run)):
            goal = 1.0 - float(TRUE.at(parameters, member.values[SCENARIOS])) / 4
            scores = {"trained": {"goal": goal, "accuracy": 0.5, "episodes": 10_000}}
            rows.append(
                {"member": i, "seed": member.seed, "hyperparameters": member.values, "evaluation": scores}
            )  # fmt: skip
        result = {"parameters": parameters, "agent_steps": run.total_steps, "members": rows}
        write_json(folder / "result.json", result)
        return loop.Outcome(0, result)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    stand_in = Trainer()
    monkeypatch.setattr(loop, "train", stand_in)
    monkeypatch.setattr(grids, "load_run", lambda folder: grids.run_of(tiny(), job_of(folder)))
    monkeypatch.setattr(grids.jax, "clear_caches", lambda: None)  # other tests' programs stay
    return stand_in


def job_of(folder: Path) -> Job:
    return next(job for job in grids.jobs(tiny()) if job.name == folder.name)


def test_a_grid_that_was_stopped_goes_on_where_it_was(trainer: Trainer, tmp_path: Path) -> None:
    names = [job.name for job in grids.jobs(tiny())]
    assert names == ["0.03M", "0.1M", "0.3M"]
    trainer.stop_at = 2
    assert grids.run_grid(tmp_path, tiny()) == loop.STOPPED
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert (len(found["points"]), found["unfinished"], found["law"], found["forecasts"]) == (3, 6, None, None)
    assert "3 cells with 1 sizes of model" in found["why"]
    assert grids.run_grid(tmp_path, tiny()) == 0
    assert trainer.trained == [("0.03M", False), ("0.1M", False), ("0.1M", True), ("0.3M", False)]
    assert grids.run_grid(tmp_path, tiny()) == 0
    assert len(trainer.trained) == 4, "finished sizes are not run again"
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert (len(found["points"]), found["unfinished"], found["why"]) == (9, 0, None)
    law = Law(*(found["law"][name] for name in Law._fields))
    for point in found["points"]:
        true = float(TRUE.at(point["parameters"], point["scenarios"])) / 4
        assert abs(float(law.at(point["parameters"], point["scenarios"])) / true - 1.0) < 0.05


def test_a_check_is_left_out_of_the_fit_and_stands_beside_its_forecast(trainer: Trainer, tmp_path: Path) -> None:
    plain, checked = tmp_path / "plain", tmp_path / "checked"
    for folder, grid in ((plain, tiny()), (checked, tiny(checks=("1:64",)))):
        folder.mkdir()
        assert grids.run_grid(folder, grid) == 0
    one, other = (json.loads((folder / "scaling.json").read_text()) for folder in (plain, checked))
    assert one["law"] == other["law"]
    assert (len(one["cells"]), len(other["cells"]), len(other["points"])) == (9, 10, 9)
    further, check = other["forecasts"]
    assert (further["parameters"], further["scenarios"], further["measured"]) == (3_000_000, 16, None)
    assert (check["parameters"], check["scenarios"]) == (1_000_000, 64)
    true = float(TRUE.at(1_000_000, 64)) / 4
    assert abs(check["measured"] / true - 1.0) < 0.01, "half a failure is added"
    assert abs(check["forecast"] / true - 1.0) < 0.1
    assert check["interval"][0] < check["forecast"] < check["interval"][1]
    assert "not measured" in (checked / "scaling.html").read_text()


@pytest.mark.slow
def test_intervals_of_forecasts_cover_what_is_measured_there() -> None:
    covered = 0
    for seed in range(20):
        found = fit(*measured(4, 4, 0.1, seed))
        true = TRUE.at(1e8, 1024) * np.exp(0.1 * np.random.default_rng(100 + seed).normal())
        _, low, high = found.forecast(1e8, 1024)
        covered += low <= true <= high
    assert covered >= 14, "of 20 intervals of 90 %, at four times the size"


def test_each_job_is_a_population_over_scenarios_and_seeds() -> None:
    grid = tiny(seeds=2, checks=("1:64",))
    runs = {job.name: grids.run_of(grid, job) for job in grids.jobs(grid)}
    assert list(runs) == ["0.03M", "0.1M", "0.3M", "1M-64"]
    for (name, run), size in zip(runs.items(), (0.03, 0.1, 0.3, 1.0), strict=True):
        assert isinstance(run.environment, Driving)
        counts = (64,) if name == "1M-64" else (4, 8, 16)
        assert run.algorithm.network.model_size == size
        assert run.environment.scenarios == counts[-1], "the bank holds the most of them"
        assert [(m.values[SCENARIOS], m.seed) for m in members_of(run)] == [(n, s) for n in counts for s in (0, 1)]
    assert from_dict(Grid, json.loads(json.dumps(to_dict(grid)))) == grid


def test_seeds_are_pooled_and_no_failure_is_still_a_number() -> None:
    row = {"parameters": 1000, "scenarios": 4, "episodes": 99}
    points = grids._pooled([row | {"failed": 0.0}, row | {"failed": 1 / 99}, row | {"scenarios": 8, "failed": 0.0}])
    assert [point["seeds"] for point in points] == [2, 1]
    np.testing.assert_allclose([point["failure"] for point in points], [1.5 / 199, 0.5 / 100])
    np.testing.assert_allclose([(p["least"], p["greatest"]) for p in points], [(0.0, 1 / 99), (0.0, 0.0)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sizes": ()}, "--sizes is empty; give different values"),
        ({"scenarios": (4, 4)}, "--scenarios is 4,4; give different values"),
        ({"seeds": 0}, "--seeds is 0; it must be at least 1"),
        ({"sizes": (0.0,)}, "--model-size is 0.0; it must lie in 0.01 to 1000"),
        ({"scenarios": (0,)}, "--sweep is of scenarios=0; give whole numbers, 1 to"),
        ({"checks": ("3",)}, "--checks is '3'; give SIZE:SCENARIOS"),
        ({"checks": ("0.1:8",)}, "--checks has 0.1:8, a point of the fit"),
        ({"checks": ("1:8", "1:8")}, "--checks is 1:8,1:8; give different points"),
    ],
)
def test_impossible_grids_are_refused_before_anything_runs(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        grids.check(tiny(**changes))


SMALL = (
    "--total-steps 512 --num-envs 8 --num-steps 16 --mesh data=1 --threads 1 --evaluation-episodes 8 "
    "--num-minibatches 2 --update-epochs 1 --sizes 0.03,0.1,0.3 --scenarios 4,8,16 --seeds 1"
)


@pytest.mark.parametrize("command", ["scaling driving", pytest.param("train driving-scaling", marks=pytest.mark.slow)])
def test_the_command_runs_a_grid_and_goes_on(
    command: str, trainer: Trainer, runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.stop_at = 2
    words = [*command.split(), *SMALL.split(), "--runs-dir", str(runs_dir), "--run-name", "law"]
    assert main.main(words) == loop.STOPPED
    assert capsys.readouterr().out == f"{runs_dir / 'law'}\n"
    assert grids.load_grid(runs_dir / "law") == tiny(sizes=(0.03, 0.1, 0.3))
    again = [*command.split(), "--runs-dir", str(runs_dir), "--resume", "law"]
    assert main.main(again) == 0
    out = capsys.readouterr().out
    assert "alpha " in out
    assert f"page: {runs_dir / 'law' / 'scaling.html'}" in out
    assert "forecast of 3,000,000 parameters, 16 scenarios: " in out
    assert main.main([*again, "--at-once", "0"]) == 2
    assert "--at-once is 0; it must be at least 1" in capsys.readouterr().err
    assert main.main([*again, "--seeds", "2"]) == 2
    assert "--seeds and --resume are both given" in capsys.readouterr().err
    assert main.main([*again[:-1], "loss"]) == 2
    assert "no grid 'loss'" in capsys.readouterr().err


def test_the_command_says_what_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["scaling", "--help"]) == 0
    assert "driving" in capsys.readouterr().out
    assert main.main(["scaling", "cartpole"]) == 2
    assert "longhaul scaling has no 'cartpole'; there is longhaul scaling driving" in capsys.readouterr().err
    assert main.main(["scaling", "driving", "--sizes", "big"]) == 2
    assert "--sizes is 'big'; it must be a finite number, or several with commas" in capsys.readouterr().err
    assert main.main(["scaling", "driving", "--data", "x"]) == 2
    assert "has no flag --data" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- page


DISC = re.compile(r'<circle [^>]*cx="([\d.]+)" cy="([\d.]+)"')


def test_the_page_draws_every_point_at_its_place() -> None:
    """On logarithmic axes equal factors are equal distances."""
    points = [
        {"parameters": n, "scenarios": 64, "failure": f, "least": f, "greatest": f, "seeds": 1}
        for n, f in ((1e5, 0.4), (1e6, 0.2), (1e7, 0.1))
    ]
    drawn = grids.figure("t", points, "parameters", "scenarios", "parameters", TRUE)
    (x0, y0), (x1, y1), (x2, y2) = ((float(x), float(y)) for x, y in DISC.findall(drawn))
    assert x0 < x1 < x2
    assert y0 < y1 < y2, "less failure is further down"
    np.testing.assert_allclose([x1 - x0, y1 - y0], [x2 - x1, y2 - y1], atol=0.03)
    assert grids.figure("t", [], "parameters", "scenarios", "parameters", None) == ""


def test_the_page_holds_all_runs_and_the_law(trainer: Trainer, tmp_path: Path) -> None:
    assert grids.run_grid(tmp_path, tiny()) == 0
    text = (tmp_path / "scaling.html").read_text()
    assert len(DISC.findall(text)) == 18, "nine points, in two figures"
    assert all(f"{job.name}/report.html#run-{i}" in text for job in grids.jobs(tiny()) for i in range(3))
    assert "90 % interval" in text
    assert "http" not in text.replace("http://www.w3.org", "")


def test_ticks_are_round() -> None:
    np.testing.assert_allclose(pages.decades(-1.2, 0.4), [0.1, 0.2, 0.5, 1.0, 2.0])
    np.testing.assert_allclose(pages.decades(0.0, 5.0), 10.0 ** np.arange(6))


@pytest.mark.slow
def test_a_real_grid_runs_side_by_side_and_is_not_run_again(tmp_path: Path) -> None:
    grid = tiny(sizes=(0.03, 0.05), scenarios=(4, 8))
    grid = dataclasses.replace(grid, base=dataclasses.replace(grid.base, log_interval=1))
    grids.save_grid(tmp_path, grid)
    assert grids.run_grid(tmp_path, grid, at_once=2) == 0
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert [row["scenarios"] for row in found["cells"]] == [4, 8, 4, 8]
    for row, size in zip(found["cells"], (0.03e6, 0.03e6, 0.05e6, 0.05e6), strict=True):
        assert abs(row["parameters"] / size - 1.0) < 0.2
        assert 0.0 <= row["failed"] <= 1.0
    assert "0.03M" in (tmp_path / "0.03M" / grids.LOG).read_text() or (tmp_path / "0.03M" / grids.LOG).stat().st_size
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    assert grids.run_grid(tmp_path, grid, at_once=2) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")} == written

    assert isinstance(grid.base.environment, Driving)
    task = dataclasses.replace(grid.base.environment, scenarios=4)
    alone = resolve(replaced(dataclasses.replace(grid.base, environment=task), model_size=0.03))
    assert begin(alone, tmp_path / "alone").code == 0
    one = sinks.read(tmp_path / "alone" / "metrics.jsonl")
    both = sinks.read(tmp_path / "0.03M" / "members.jsonl")
    for record, together in zip(one, both, strict=True):
        for name in ("episode/return", "ppo/total_loss", "ppo/entropy"):
            np.testing.assert_allclose(together[name][0], record[name], rtol=1e-3, err_msg=name)
    assert both[-1]["ppo/total_loss"][0] != both[-1]["ppo/total_loss"][1], "the other drives in other scenarios, too"
