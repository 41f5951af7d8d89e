"""Screens of a terminal while commands work: something moves all the time, Ctrl-C is answered, pipes may close."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longhaul.runtime import closed_pipe
from tests.helpers.terminal import running, silences

LONGHAUL = shlex.join([sys.executable, "-m", "longhaul"])

SILENT = 3.0
"""Seconds that a screen may stand still: what a new user takes for work."""

TMUX = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")

FEW = "--num-envs 32 --num-steps 8 --scenarios 96 --evaluation-episodes 16"


@pytest.mark.slow
@TMUX
@pytest.mark.parametrize(
    ("line", "stands"),
    [
        ("train cartpole --total-steps 100_000", ["importing", "compiling", "agent steps", "steps/s", "played"]),
        (f"train driving {FEW} --total-steps 1024", ["making scenarios", "of 96", "compiling", "driven by idm"]),
        ("train hackmatrix --total-steps 65_536 --evaluation-episodes 4", ["compiling", "agent steps", "played"]),
        ("render --policy idm --out drive.gif", ["importing", "driven by idm", "drawing"]),
        ("evaluate runs/done --episodes 20", ["restoring the policy", "20 episodes played"]),
    ],
    ids=lambda value: value.split()[1] if isinstance(value, str) else "",
)  # fmt: skip
def test_no_screen_stands_still(line: str, stands: list[str], tmp_path: Path) -> None:
    train = f"{LONGHAUL} train cartpole --total-steps 2048 --evaluation-episodes 1 --run-name done >/dev/null 2>&1; "
    before = train if line.startswith("evaluate") else ""
    with running(tmp_path, f"export LONGHAUL_CACHE=cache; {before} echo begins; {LONGHAUL} {line}") as terminal:
        terminal.watch(until="begins")
        pictures = terminal.watch(until="exit ")
    assert "exit 0" in pictures[-1].text
    for text in stands:
        assert any(text in picture.text for picture in pictures), text
    longest, text = max(silences(pictures))
    assert longest < SILENT, text


@pytest.mark.slow
@TMUX
def test_ctrl_c_is_answered_at_once_and_saves(tmp_path: Path) -> None:
    words = "train cartpole --total-steps 400_000_000 --run-name a"
    with running(tmp_path, f"{LONGHAUL} {words}") as terminal:
        terminal.watch(until="steps/s")
        terminal.press("C-c")
        pictures = terminal.watch(until="exit ")
    assert any("SIGINT: saving after this call; again to leave now" in picture.text for picture in pictures)
    assert "exit 75" in pictures[-1].text
    assert "go on with --resume a" in pictures[-1].text.replace("\n", "")


@pytest.mark.slow
def test_a_closed_pipe_ends_no_run_and_its_folder_says_so(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "longhaul", "train", "cartpole", "--total-steps", "40_960", "--run-name", "a",
             "--evaluation-episodes", "1"]  # fmt: skip
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "runs/a\n"
        process.stdout.close()
        assert process.wait(300) == 0
    assert (tmp_path / "runs/a/result.json").exists()
    said, *others = (tmp_path / "runs/a" / closed_pipe.OUTPUT).read_text().splitlines()
    assert said.endswith("nobody reads the output any more; the run goes on")
    assert others[-1] == "report: runs/a/report.html"
