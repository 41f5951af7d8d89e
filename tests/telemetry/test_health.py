"""Findings: each can fire where a synthetic curve is ill from a known update on, and none fires on healthy ones."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.config import recipes
from longhaul.spaces import Box, Discrete, MultiDiscrete
from longhaul.telemetry import health, health_log, sinks
from longhaul.telemetry.health import CHECKS, GRAVE, REMEDIES, Bounds, Finding, Plan, review, trend
from longhaul.training import report

UPDATES = 400
PLAN = Plan(UPDATES, entropy=0.05)
ILL = 200
"""The first update of a synthetic illness."""

Change = Callable[[int, float, dict[str, float]], dict[str, float]]
"""(update, progress, healthy record) -> what an illness changes of it."""


def healthy(update: int, rng: np.random.Generator) -> dict[str, float]:
    """A record of a run that learns to the end, at a rate that falls, with a tenth of its gain as noise."""
    progress = update / UPDATES
    return {
        "update": update, "env_steps": 1000 * update, "agent_steps": 1000 * update, "wall_seconds": 10.0 * update,
        "sps": 100.0 * math.exp(rng.normal(0.0, 0.15)),
        "episode/count": 50.0,
        "episode/return": 10.0 * (math.log(0.05 + progress) - math.log(0.05)) + rng.normal(0.0, 3.0),
        "episode/length": 80.0 + rng.normal(0.0, 3.0),
        "ppo/lr": 3e-4 * (1.0 - 0.9 * progress),
        "ppo/entropy": 2.0 - 1.2 * progress + rng.normal(0.0, 0.05),
        "ppo/approx_kl": abs(rng.normal(0.01, 0.003)),
        "ppo/clip_fraction": abs(rng.normal(0.1, 0.02)),
        "ppo/value_loss": 5.0 * math.exp(rng.normal(0.0, 0.5)),
        "ppo/explained_variance": min(1.0, 0.6 + rng.normal(0.0, 0.1)),
    }  # fmt: skip


def curve(change: Change | None = None, seed: int = 0) -> list[dict[str, float]]:
    """All records of a run whose health is `healthy`, changed from `ILL` on."""
    rng, records = np.random.default_rng(seed), []
    for update in range(1, UPDATES + 1):
        record = healthy(update, rng)
        if change is not None and update >= ILL:
            record |= change(update, update / UPDATES, record)
        records.append(record)
    return records


def found(records: list[dict[str, float]], bounds: Bounds | None = None, plan: Plan = PLAN) -> dict[str, Finding]:
    findings = review(records, plan, bounds or Bounds()).findings()
    assert len({finding.check for finding in findings}) == len(findings), "said more than once"
    return {finding.check: finding for finding in findings}


def flat(update: int, progress: float, record: dict[str, float]) -> dict[str, float]:
    """The return stands still at its value of `ILL`, with the noise that it had."""
    grown = 10.0 * (math.log(0.05 + progress) - math.log(0.05 + ILL / UPDATES))
    return {"episode/return": record["episode/return"] - grown, "ppo/lr": 3e-4}


ILLNESSES: dict[str, Change] = {
    "finite": lambda *_: {"ppo/value_loss": math.nan},
    "lr": lambda *_: {"ppo/lr": 0.0},
    "entropy": lambda *_: {"ppo/entropy": 0.01},
    "kl": lambda *_: {"ppo/approx_kl": 0.2},
    "clip": lambda *_: {"ppo/clip_fraction": 0.45},
    "value loss": lambda *_: {"ppo/value_loss": 5e3},
    "episodes": lambda *_: {"episode/count": 0.0, "episode/return": math.nan, "episode/length": math.nan},
    "plateau": flat,
    "stalling": lambda u, p, r: flat(u, p, r) | {"episode/length": r["episode/length"] + 0.5 * (u - ILL)},
    "loss of return": lambda *_: {"episode/return": 1.0},
    "speed": lambda *_: {"sps": 30.0},
}
"""Of every check but that of the critic, which asks for a run that never learnt: what makes it fire from `ILL` on."""

TOGETHER = {"stalling": {"plateau"}, "loss of return": {"plateau"}}
"""Findings beside an illness, and rightly."""


@pytest.mark.parametrize("check", ILLNESSES)
def test_each_illness_is_found_after_it_began_and_by_its_name(check: str) -> None:
    findings = found(curve(ILLNESSES[check]))
    assert {check} <= set(findings) <= {check} | TOGETHER.get(check, set())
    finding = findings[check]
    window = int(Bounds().window * UPDATES) if check in ("plateau", "stalling") else 0
    assert ILL - window // 2 <= finding.since <= ILL + 40
    assert finding.until is None
    assert finding.remedy == REMEDIES[check]


@pytest.mark.parametrize("seed", range(20))
def test_healthy_curves_are_silent(seed: int) -> None:
    assert found(curve(seed=seed)) == {}


def test_a_critic_that_says_nothing_counts_only_where_nothing_is_learnt() -> None:
    def blind(update: int, rng: np.random.Generator, returns: float) -> dict[str, float]:
        return healthy(update, rng) | {"ppo/explained_variance": -0.5, "episode/return": returns + rng.normal(0.0, 1.0)}

    rng = np.random.default_rng(0)
    stuck = found([blind(update, rng, 3.0) for update in range(1, UPDATES + 1)])
    assert set(stuck) == {"critic", "plateau"}
    learning = found([blind(update, rng, 0.1 * update) for update in range(1, UPDATES + 1)])
    assert learning == {}


@pytest.mark.parametrize("check", ["finite", "lr", "entropy", "kl", "clip", "value loss", "episodes", "speed"])
def test_an_illness_that_passes_is_said_when_it_begins_and_when_it_ends(check: str) -> None:
    def passing(update: int, progress: float, record: dict[str, float]) -> dict[str, float]:
        return ILLNESSES[check](update, progress, record) if update < ILL + 80 else {}

    finding = found(curve(passing))[check]
    assert finding.until is not None
    assert ILL + 80 <= finding.until <= ILL + 130


@pytest.mark.parametrize(("longest", "late"), [(0, True), (20, True), (60, False)])
def test_episodes_have_the_time_that_the_longest_takes(longest: int, late: bool) -> None:
    """None ends in 50 updates: that is silence, but where an episode may take 60."""
    quiet = curve(lambda update, *_: ILLNESSES["episodes"](update, 0.0, {}) if ILL < update <= ILL + 50 else {})
    assert bool(health.review(quiet, PLAN._replace(longest=longest), Bounds()).findings()) == late


def test_values_that_waver_about_a_bound_begin_one_finding() -> None:
    """Hysteresis: between 0.8 of the bound and the bound nothing begins and nothing ends."""
    wavering = curve(lambda update, *_: {"ppo/approx_kl": 0.065 if update % 20 < 10 else 0.055})
    assert found(wavering)["kl"].until is None


def test_one_odd_record_is_no_finding_but_a_number_that_is_not_finite_is() -> None:
    spike = {"ppo/approx_kl": 9.0, "ppo/clip_fraction": 1.0, "ppo/entropy": 0.0, "ppo/value_loss": 1e6, "sps": 1.0}
    assert found(curve(lambda update, *_: spike if update % 50 == 0 else {})) == {}
    assert set(found(curve(lambda update, *_: {"ppo/entropy": math.inf} if update == 250 else {}))) == {"finite"}


def test_the_first_updates_may_be_extreme() -> None:
    wild = {"ppo/approx_kl": 3.0, "ppo/clip_fraction": 0.9, "ppo/value_loss": 1e9, "ppo/explained_variance": -50.0}
    records = curve()
    records[: int(0.03 * UPDATES) - 2] = [record | wild for record in records[: int(0.03 * UPDATES) - 2]]
    assert found(records) == {}
    assert "kl" in found([record | wild for record in records])


def annealed(update: int, progress: float, record: dict[str, float]) -> dict[str, float]:
    return flat(update, progress, record) | {"ppo/lr": 2e-5}


def both(*_: Any) -> dict[str, float]:
    return {"ppo/approx_kl": 0.2, "ppo/clip_fraction": 0.9}


@pytest.mark.parametrize(
    ("change", "bounds", "checks"),
    [
        (None, Bounds(entropy=1.0), {"entropy"}),
        (None, Bounds(kl=0.001, clip=0.01), {"kl", "clip"}),
        (both, Bounds(kl=None, clip=None), set()),
        (flat, Bounds(window=None), set()),
        (flat, Bounds(), {"plateau"}),
        (flat, Bounds(solved=20.0), set()),  # it need not rise
        (flat, Bounds(solved=60.0), {"plateau"}),
        (annealed, Bounds(), set()),  # it stands still while the learning rate runs out
    ],
)
def test_bounds_of_a_run_are_kept_and_none_leaves_a_check_out(
    change: Change | None, bounds: Bounds, checks: set[str]
) -> None:
    assert set(found(curve(change), bounds)) == checks


def test_null_is_what_a_file_has_for_not_finite(tmp_path: Path) -> None:
    """Findings of a file are those of the stream that wrote it."""
    for name in ("finite", "episodes"):
        records, path = curve(ILLNESSES[name]), tmp_path / f"{name}.jsonl"
        with closing(sinks.jsonl(path)) as sink:
            for record in records:
                sink.write(record)
        assert review(sinks.read(path), PLAN, Bounds()).findings() == review(records, PLAN, Bounds()).findings()


def test_coarse_records_tell_the_same_as_fine_ones() -> None:
    """A record may sum up any number of updates: 25 records of 16 find what 400 of one do."""
    for name in ("entropy", "kl", "episodes"):
        coarse = found(curve(ILLNESSES[name])[15::16])
        assert set(coarse) == {name}
        assert ILL - 16 <= coarse[name].since <= ILL + 32
    assert found(curve()[15::16]) == {}


# ------------------------------------------------------------------------------------------------------------- trend


def test_kendalls_s_has_the_textbook_variance_and_sens_slope_is_the_line() -> None:
    """Of n distinct values S is at most n (n - 1) / 2, with variance n (n - 1)(2 n + 5) / 18 (Kendall 1975)."""
    rising = trend([2.0 * i + 1.0 for i in range(12)])
    assert rising.z == pytest.approx((66 - 1) / math.sqrt(12 * 11 * 29 / 18))
    assert rising.gain == pytest.approx(22.0)
    assert trend([-v for v in range(12)]).z == pytest.approx(-rising.z)
    assert trend([5.0] * 12) == (0.0, 0.0, 0.0)
    spoilt = [2.0 * i + 1.0 for i in range(12)]
    spoilt[6] = 1e6
    assert trend(spoilt).gain == pytest.approx(22.0, rel=0.1), "one outlier moves a mean, not a median"


def test_noise_alone_is_called_rising_as_often_as_the_bound_says() -> None:
    rng = np.random.default_rng(1)
    trends = [trend(row) for row in rng.normal(size=(4000, 12)).tolist()]
    z = np.array([each.z for each in trends])
    assert 0.13 < np.mean(z > health.FLAT) < 0.19  # of a normal distribution: 0.159
    assert 0.005 < np.mean(z > health.CERTAIN) < 0.02  # 0.0099
    assert 0.8 < np.median([each.noise for each in trends]) < 1.2, "a unit deviation"


# ----------------------------------------------------------------------------------------------------- in the folder


def _watched(folder: Path, records: list[dict[str, float]], bounds: Bounds = Bounds()) -> list[str]:  # noqa: B008
    """Lines said while `records` are written to a run's files, as training does."""
    lines: list[str] = []
    watch = health_log.watch(folder, PLAN, bounds, lines.append)
    with closing(sinks.fan(sinks.jsonl(folder / "metrics.jsonl"), watch)) as sink:
        for record in records:
            sink.write(record)
    return lines


def test_a_run_that_goes_on_has_said_and_kept_what_one_without_a_break_has(tmp_path: Path) -> None:
    """Broken off at update 260, gone on with from a checkpoint of update 230: nothing twice, nothing lost."""

    def ill(update: int, progress: float, record: dict[str, float]) -> dict[str, float]:
        kl = {"ppo/approx_kl": 0.2 if update < 300 else 0.01}
        return kl | ({"ppo/entropy": 0.01} if update >= 240 else {})

    records, whole, broken = curve(ill), tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    lines = _watched(whole, records)
    assert [line.split(",")[0] for line in lines] == [
        "warning: approx_kl is 0.2 nats", "warning: entropy is 0.01 nats", "over: kl",
    ]  # fmt: skip
    _watched(broken, records[:260])
    sinks.truncate_after(broken / "metrics.jsonl", 230)
    again = _watched(broken, records[230:])
    assert [line.split(" (")[0] for line in again] == [line.split(" (")[0] for line in lines]
    assert (broken / health_log.FILE).read_bytes() == (whole / health_log.FILE).read_bytes()
    findings = {finding.check: finding for finding in health_log.read(whole)}
    assert findings == found(records)
    assert (findings["kl"].until is not None) and findings["entropy"].until is None
    for line in (whole / health_log.FILE).read_text().splitlines():
        assert json.loads(line)["event"] in ("begins", "ends")


def test_a_healthy_run_and_one_that_is_not_watched_have_no_file(tmp_path: Path) -> None:
    assert _watched(tmp_path, curve()) == []
    assert _watched(tmp_path, curve(ILLNESSES["kl"]), Bounds(watch=False)) == []
    assert not (tmp_path / health_log.FILE).exists()
    assert health_log.read(tmp_path) == []


def test_findings_are_dropped_with_the_records_after_a_kill(tmp_path: Path) -> None:
    _watched(tmp_path, curve(ILLNESSES["kl"]))
    assert (tmp_path / health_log.FILE).exists()
    sinks.truncate_after(tmp_path / "metrics.jsonl", 100)
    assert _watched(tmp_path, curve()[100:]) == []
    assert not (tmp_path / health_log.FILE).exists()


@pytest.mark.parametrize(
    ("action", "largest"),
    [
        (Discrete(8), math.log(8)),
        (MultiDiscrete((3, 5)), math.log(15)),
        (Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32)), math.log(4.0)),
    ],
)
def test_a_collapse_is_far_below_the_largest_entropy(action: Any, largest: float) -> None:
    """Of Box: the uniform distribution's over its range. A Gaussian of a thousandth of the range has collapsed."""
    bound = health_log.least_entropy(action)
    if isinstance(action, Box):
        widths = np.asarray(action.high) - np.asarray(action.low)
        narrow = sum(math.log(1e-3 * width / math.sqrt(2 * math.pi * math.e)) for width in widths)
        assert narrow < bound < largest - 1.0
    else:
        assert 0.0 < bound == pytest.approx(0.02 * largest)


# ------------------------------------------------------------------------------------------------------- consistency


def test_every_check_has_a_remedy_and_every_grave_one_is_a_check() -> None:
    assert list(CHECKS) == list(REMEDIES)
    assert set(GRAVE) < set(CHECKS)
    assert {*ILLNESSES, "critic"} == set(CHECKS)


def test_bounds_of_recipes_go_through_a_runs_file() -> None:
    from longhaul.config.run import Run, from_dict, to_dict

    run = recipes.recipe("hackmatrix")
    assert run.health.entropy == 0.3
    changed = dataclasses.replace(run, health=dataclasses.replace(run.health, kl=None, solved=3.0))
    assert from_dict(Run, json.loads(json.dumps(to_dict(changed)))) == changed


def test_the_report_shows_findings_and_nothing_where_there_are_none(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    findings = review(curve(ILLNESSES["kl"]), PLAN, Bounds()).findings()
    report.write_report(page, run={}, records=curve()[:5], result={}, findings=findings)
    assert ">Health<" in page.read_text() and "approx_kl is 0.2 nats, above 0.06" in page.read_text()
    report.write_report(page, run={}, records=curve()[:5], result={})
    assert ">Health<" not in page.read_text()
