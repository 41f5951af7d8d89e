"""Completion: what the last word may become, and that bash itself takes the script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longhaul.cli import completion
from longhaul.cli.flags import FlagError
from longhaul.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, age in (("old", 10.0), ("new", 20.0)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        os.utime(folder, (age, age))


@pytest.mark.usefixtures("_runs")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["tra"], ["train"]),
        (["data", ""], ["inspect", "convert"]),
        (["sync", "p"], ["plan", "pull"]),
        (["train", "cartpole-"], ["cartpole-dqn", "cartpole-pqn"]),
        (["evaluate", ""], ["new", "old"]),
        (["train", "cartpole", "--resume", ""], ["new", "old"]),
        (["train", "cartpole", "--init-from", "o"], ["old"]),
        (["train", "cartpole", "--init-f"], ["--init-from"]),
        (["train", "pendulum-sac", "--replay-s"], ["--replay-size"]),
        (["train", "nothing", "--"], ["--help"]),
        (["evaluate", "new", "x"], []),
    ],
)
def test_what_the_last_word_may_become(words: list[str], found: list[str]) -> None:
    assert completion.candidates(words) == found


def test_every_shell_has_its_script_and_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in completion.SCRIPTS:
        assert main(["completion", shell]) == 0
        assert "longhaul completion --words" in capsys.readouterr().out
    with pytest.raises(FlagError, match="SHELL is tcsh; choose one of bash, zsh, fish"):
        completion.completion(["tcsh"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.usefixtures("_runs")
def test_bash_completes_by_the_script(tmp_path: Path) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "longhaul").write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} -m longhaul "$@"\n')
    (bin_folder / "longhaul").chmod(0o755)
    script = (
        'eval "$(longhaul completion bash)"; COMP_WORDS=(longhaul train cartpole --resume n); COMP_CWORD=4; _longhaul; '
        'echo "${COMPREPLY[@]}"; COMP_WORDS=(longhaul train pendulum-); COMP_CWORD=2; _longhaul; echo "${COMPREPLY[@]}"'
    )
    environment = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["new", "pendulum-sac pendulum-td3 pendulum-apg"]
