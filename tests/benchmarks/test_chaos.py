"""The killer of runs: it tells a run that ends otherwise from one that does not, and a real one ends alike."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chaos

RUN = """
import json, sys, time
from pathlib import Path
folder, how = Path(sys.argv[1]), sys.argv[2]
folder.mkdir(exist_ok=True)
again = (folder / "run.json").exists()
(folder / "run.json").write_text("{}")
if how == "falls" and again:
    raise OSError("no such thing")
for _ in range(20):
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write("{}\\n")
    time.sleep(0.05)
params = "other" if again and how == "forgets" else "same"
(folder / "result.json").write_text(json.dumps({"params_sha256": params}))
"""
"""Stands for a run of a second; the argument says what it does when it is started again."""


def killed(kind: str, whole: str | None, scratch: Path) -> dict[str, Any]:
    """The row of a run that was killed at least once."""
    for seed in range(20):
        row = chaos.disturbed(kind, "kill", whole, scratch / "run", random.Random(seed))
        if row["kills"]:
            return row
    raise AssertionError("no moment fell within the run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "wrong"), [("goes on", ""), ("forgets", "other parameters"), ("falls", "ended by a traceback with 1")]
)
def test_a_run_that_ends_otherwise_is_told(
    how: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(kind: str, folder: Path, hit: chaos.Hit) -> subprocess.Popen[bytes]:
        with chaos.log_file(folder).open("wb") as said:
            command = [sys.executable, "-c", RUN, str(folder), how]
            return subprocess.Popen(command, start_new_session=True, stdout=said, stderr=said)

    monkeypatch.setattr(chaos, "start", start)
    row = killed("ppo", chaos.undisturbed("ppo", tmp_path), tmp_path)
    assert row["wrong"].startswith(wrong) and bool(row["wrong"]) == bool(wrong), row
    assert row["same"] == (how == "goes on")
    chaos.show([row])
    assert capsys.readouterr().out.splitlines()[-1].split() == ["together", "1", str(row["kills"])]


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_an_undisturbed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "DROPS", [])  # the folders of pytest are its user's alone
    monkeypatch.setitem(chaos.KINDS, "ppo", chaos.KINDS["ppo"]._replace(updates=300))
    row = killed("ppo", chaos.undisturbed("ppo", tmp_path), tmp_path)
    assert (row["wrong"], row["same"]) == ("", True), row
