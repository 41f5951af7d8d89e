"""Completion: what the last word may become, and that bash itself takes the script."""

from __future__ import annotations

import contextlib
import os
import pty
import re
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
        (["train", "cartpole-"], ["cartpole-dqn", "cartpole-pqn", "cartpole-swingup-apg"]),
        (["evaluate", ""], ["new", "old"]),
        (["serve", "n"], ["new"]),
        (["push", "n"], ["new"]),
        (["actor", ""], []),
        (["train", "cartpole", "--resume", ""], ["new", "old"]),
        (["train", "cartpole", "--init-from", "o"], ["old"]),
        (["train", "cartpole", "--init-f"], ["--init-from"]),
        (["train", "pendulum-sac", "--replay-s"], ["--replay-size"]),
        (["train", "nothing", "--"], ["--help"]),
        (["evaluate", "new", "x"], []),
    ],
)
def test_the_last_word_is_completed(words: list[str], found: list[str]) -> None:
    assert completion.candidates(words) == found


def test_every_shell_has_its_script_and_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in completion.SCRIPTS:
        assert main(["completion", shell]) == 0
        assert "longhaul completion --words" in capsys.readouterr().out
    with pytest.raises(FlagError, match="SHELL is tcsh; choose one of bash, zsh, fish"):
        completion.completion(["tcsh"])


TRIED = (
    ("train pendulum-s", "pendulum-sac"),
    ("train cartpole --resume n", "new"),
    ("train cartpole --init-f", "--init-from"),
)
"""What is written behind `longhaul` -> what the shell makes of its last word."""


@pytest.fixture
def shell(tmp_path: Path, _runs: None, request: pytest.FixtureRequest) -> dict[str, str]:
    """Environment of a shell that has the command `longhaul`."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    command = tmp_path / "bin" / "longhaul"
    command.parent.mkdir()
    command.write_text(
        '#!/bin/sh\n[ "$1" = completion ] || { echo got: "$@"; exit; }\n'
        f'PYTHONPATH={REPOSITORY} exec {sys.executable} -m longhaul "$@"\n'
    )
    command.chmod(0o755)
    return os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}", "TERM": "dumb"}


def printed(environment: dict[str, str], *words: str) -> list[str]:
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("shell", ["bash"], indirect=True)
def test_bash_completes_by_the_script(shell: dict[str, str]) -> None:
    script = ['eval "$(longhaul completion bash)"']
    for line, _ in TRIED:
        words = f"longhaul {line}".split()
        script.append(f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _longhaul; echo ${{COMPREPLY[@]}}")
    assert printed(shell, "bash", "-c", "; ".join(script)) == [found for _, found in TRIED]


@pytest.mark.parametrize("shell", ["fish"], indirect=True)
def test_fish_completes_by_the_script(shell: dict[str, str]) -> None:
    for line, found in TRIED:
        script = f"longhaul completion fish | source; complete -C 'longhaul {line}'"
        assert printed(shell, "fish", "--no-config", "-c", script) == [found]


@pytest.mark.parametrize("shell", ["zsh"], indirect=True)
def test_zsh_completes_by_the_script(shell: dict[str, str]) -> None:
    """A line is written on a terminal, with a tab at its end; the shell runs what the tab makes of it."""
    begin = 'PS1= PROMPT_EOL_MARK=; autoload -Uz compinit; compinit -u -D; eval "$(longhaul completion zsh)"\n'
    typed = "".join(f"longhaul {line}\t\n" for line, _ in TRIED)
    ours, its = pty.openpty()
    with subprocess.Popen(["zsh", "-f", "-i"], env=shell, stdin=its, stdout=its, stderr=its, start_new_session=True):
        os.close(its)
        os.write(ours, f"{begin}{typed}exit\n".encode())
        shown = b""
        with contextlib.suppress(OSError):  # the shell has ended
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    wanted = [f"got: {' '.join([*line.split()[:-1], found])}" for line, found in TRIED]
    assert re.findall(r"got: .*?(?=\r)", shown.decode()) == wanted, shown.decode()
