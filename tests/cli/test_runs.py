"""Runs of a folder: listed, filtered, compared, reported at any time, removed unless others need them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from longhaul.cli import runs as commands
from longhaul.config import recipes
from longhaul.config.resolve import resolve
from longhaul.runtime.config_fields import replaced
from longhaul.telemetry import sinks
from longhaul.training.run_dir import alone, save_run
from tests.helpers.command_line import assert_refused


def made(name: str, *returns: float, recipe: str = "cartpole", done: bool = False, **settings: Any) -> Path:
    """A run's folder with a record for each return, a tenth of the whole run apart."""
    run = recipes.recipe(recipe)
    init_from = settings.pop("init_from", None)
    run = resolve(dataclasses.replace(replaced(run, **settings), devices=1, init_from=init_from))
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    save_run(folder, run, {})
    sink = sinks.jsonl(folder / "metrics.jsonl")
    for i, value in enumerate(returns, 1):
        steps = i * run.total_steps // 10
        counts = {"update": i, "env_steps": steps, "agent_steps": steps, "wall_seconds": float(i), "sps": 100.0 * i}
        sink.write(counts | {"episode/return": value, "ppo/entropy": 0.5})
    sink.close()
    if done:
        (folder / "result.json").write_text('{"status": "done", "evaluation": {"trained": {"return": 9.5}}}')
    return folder


def names(longhaul: Any, *words: str) -> list[str]:
    code, out, _ = longhaul("runs", *words, "--json", "-")
    assert code == 0
    return [run["name"] for run in json.loads(out)]


def shown_score(page: str) -> float:
    """Mean return in a report's table, to four digits at most."""
    found = re.search(r'<th scope="row">(?:<a [^>]*>)?trained(?:</a>)?</th><td[^>]*>([\d.]+)</td>', page)
    assert found is not None and page.index('<th scope="col">return') < found.start()
    return float(found[1])


def test_runs_are_listed_filtered_and_sorted(longhaul: Any) -> None:
    made("a-slow", 1.0, 2.0, lr=0.001)
    made("b-best", 5.0, 7.0, 9.0, lr=0.01, done=True)
    made("c-swing", -5.0, recipe="pendulum")
    code, out, _ = longhaul("runs")
    header, *rows = out.splitlines()
    assert code == 0
    assert header.split()[:6] == ["run", "status", "steps", "done", "steps/s", "return"]
    assert [row.split()[:2] for row in rows if row.startswith("b")] == [["b-best", "done"]]
    assert "150,000   30%" in out and "▁▅█" in out
    assert sorted(names(longhaul)) == ["a-slow", "b-best", "c-swing"]
    assert names(longhaul, "--sort", "return") == ["b-best", "a-slow", "c-swing"]
    assert names(longhaul, "--sort", "steps", "--most", "1") == ["c-swing"]
    assert names(longhaul, "lr=1e-2") == ["b-best"]
    assert sorted(names(longhaul, "cartpole")) == ["a-slow", "b-best"]
    assert names(longhaul, "?-s*", "pendulum") == ["c-swing"]
    assert names(longhaul, "done") == ["b-best"]
    assert names(longhaul, "nothing") == []
    assert longhaul("runs", "nothing")[1] == "no run in runs fits nothing\n"
    Path("others").mkdir()
    said = "no run in runs fits others; others is a folder: longhaul runs --runs-dir others\n"
    assert longhaul("runs", "others")[1] == said
    assert longhaul("runs", "--runs-dir", "others")[1] == "no run in others\n"
    assert longhaul("runs", "--runs-dir", "other")[1] == "no run in other; there is no such folder\n"
    Path("runs/c-swing/run.json").write_text("{")  # whose steps to train for are not known
    rows = [line.split() for line in longhaul("runs")[1].splitlines()]
    assert [row[3] for row in rows if row[0] == "c-swing"] == ["-"]
    assert_refused(longhaul("runs", "--sort", "lenght"), "--sort is 'lenght'; it must be one of newest")


def test_status_without_a_name_is_of_the_newest(longhaul: Any) -> None:
    assert_refused(longhaul("status"), "which run? there is none in runs")
    made("old", 1.0)
    made("new", 1.0)
    about = Path("runs/old/run.json").stat()
    os.utime("runs/new/run.json", ns=(about.st_atime_ns, about.st_mtime_ns + 1_000_000))
    code, out, _ = longhaul("status")
    assert code == 0 and out.splitlines()[0].split() == ["run", "runs/new"]


def test_runs_are_compared_by_their_settings_and_over_seeds(longhaul: Any) -> None:
    for seed, value in enumerate((1.0, 2.0, 6.0)):
        made(f"low-{seed}", value, lr=0.001, seed=seed)
    made("high", 4.0, lr=0.01)
    code, out, _ = longhaul("compare", "low-*", "high", "--metric", "episode/return")
    assert code == 0
    assert [line.split() for line in out.splitlines()[:5]] == [
        ["run", "lr", "seed"], ["low-0", "0.001", "0"], ["low-1", "0.001", "1"], ["low-2", "0.001", "2"],
        ["high", "0.01", "0"],
    ]  # fmt: skip
    low, high = out.splitlines()[-2:]
    assert low.startswith("low-0, low-1, low-2  episode/return     3")
    assert high.split() == ["high", "episode/return", "4", "-", "-", "4", "-", "-", "1"]
    _, out, _ = longhaul("compare", "low-0", "high", "--json", "-")
    found = json.loads(out)
    assert found["differences"]["algorithm.lr"] == [0.001, 0.01]
    assert [row["metric"] for row in found["table"]] == ["episode/return", "episode/return", "sps", "sps"]
    assert_refused(longhaul("compare", "high"), "which runs?")
    assert_refused(longhaul("compare", "low-0", "high", "--metric", "episode/retrun"), "did you mean episode/return")
    assert_refused(longhaul("compare", "low-0", "hihg"), "hihg", "high")


def test_removal_asks_and_keeps_what_trains_and_what_others_began_from(
    longhaul: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made("source", 1.0)
    made("later", 1.0, init_from=f"{source.absolute()}@3")
    made("other", 1.0)
    busy = made("busy", 1.0)
    assert_refused(longhaul("rm", "other"), "1 run would be removed, and nobody can be asked here; give --yes")
    with alone(busy):
        code, _, err = longhaul("rm", "busy", "source", "--yes")
    assert (code, err.splitlines()) == (1, ["busy is kept: it trains", "source is kept: later began from it"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, left in (("", True), ("y", False)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        code, out, _ = longhaul("rm", "oth*")
        assert code == (1 if left else 0)
        assert "runs/other" in out
        assert Path("runs/other").exists() == left
    assert longhaul("rm", "source", "later", "--yes")[0] == 0, "nothing that stays began from it"
    assert [path.name for path in Path("runs").iterdir()] == ["busy"]


@pytest.mark.slow
@pytest.mark.usefixtures("filmed")
def test_a_run_is_reported_at_any_time_and_scored_at_any_checkpoint(longhaul: Any) -> None:
    words = "--total-steps 4096 --num-envs 16 --num-steps 32 --save-interval 4 --evaluation-episodes 4 --run-name a"
    assert longhaul("train", "cartpole", *words.split())[0] == 0
    page = Path("runs/a/report.html")
    whole = page.read_bytes()
    assert all(f'<a href="#film-{who}">' in whole.decode() for who in ("trained", "untrained"))
    code, out, _ = longhaul("report", "a")
    assert (code, out, page.read_bytes()) == (0, "runs/a/report.html\n", whole), "that of its end is kept"
    Path("runs/a/result.json").unlink()  # as after a kill
    page.unlink()
    assert longhaul("report", "a")[:2] == (0, "runs/a/report.html\n")
    text = page.read_text()
    assert "Episode length" in text and "trained" not in text.partition("<main>")[2].partition("run.json")[0]
    code, out, _ = longhaul("report", "a", "--checkpoint", "4")
    assert (code, out) == (0, "runs/a/report-4.html\n")
    text = Path("runs/a/report-4.html").read_text()
    assert "checkpoint 4" in text and 'id="film-untrained"' in text
    _, out, _ = longhaul("evaluate", "a", "--checkpoint", "4", "--json", "-")
    score = json.loads(out)["mean"]["return"]
    assert shown_score(text) == pytest.approx(score, abs=0.051)
    assert_refused(longhaul("report", "a", "--past-violations"), "no checkpoint is to be driven")
    assert_refused(longhaul("report", "a", "--out", "."), "--out is '.', a folder; give a file in it")
    assert_refused(longhaul("evaluate", "a", "--past-violations"), "nothing is to be drawn; give --worst 3")
    assert_refused(longhaul("report", "a", "--checkpoint", "5"), "keeps no checkpoint 5; it has [4, 8]")
    assert commands.MAIN[0] == "episode/return"


@pytest.mark.slow
def test_a_population_is_reported_run_by_run(longhaul: Any) -> None:
    words = "--total-steps 2048 --num-envs 16 --num-steps 32 --save-interval 2 --evaluation-episodes 4 --run-name many"
    assert longhaul("train", "cartpole", "--seeds", "2", *words.split())[0] == 0
    page = Path("runs/many/report.html")
    for i, member in enumerate(json.loads(Path("runs/many/result.json").read_text())["members"]):
        assert f'id="run-{i}"><summary>Run {i}: seed {member["seed"]}' in page.read_text()
    code, out, _ = longhaul("report", "many", "--member", "1", "--checkpoint", "2")
    assert (code, out) == (0, "runs/many/report-2-run-1.html\n")
    text = Path("runs/many/report-2-run-1.html").read_text()
    assert "checkpoint 2" in text and "untrained" in text and 'id="run-0"' not in text
    _, out, _ = longhaul("evaluate", "many", "--member", "1", "--checkpoint", "2", "--json", "-")
    score = json.loads(out)["mean"]["return"]
    assert shown_score(text) == pytest.approx(score, abs=0.051)
    assert_refused(longhaul("report", "many", "--checkpoint", "2"), "holds 2 runs; give --member 0 to 1")
    assert_refused(longhaul("report", "many", "--member", "2"), "--member is 2; it must be 0 to 1")
    Path("runs/many/result.json").unlink()
    page.unlink()
    assert longhaul("report", "many")[0] == 0 and 'id="run-1"' in page.read_text()
