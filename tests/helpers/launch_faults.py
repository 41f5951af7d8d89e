"""Faults of runs under `longhaul launch`, on purpose, and the program that can have them.

`python -m tests.helpers.launch_faults launch ...` is `longhaul launch` whose processes, of this program too, find
their disk full as
long as the file `FULL` names is there, and know the environment "poisonous", whose rewards are now and then NaN.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]

FULL, CHANCE, UNSCORED = "FAULTS_FULL", "FAULTS_CHANCE", "FAULTS_UNSCORED"
"""Variables: a file's path, the chance of a NaN in a step, whether no policy is evaluated (which takes a while)."""


def main() -> int:
    from longhaul.cli import main as cli
    from longhaul.runtime.launch import local

    local.PROGRAM = (sys.executable, "-m", "tests.helpers.launch_faults")
    if sys.argv[1:2] == ["train"]:  # who launches starts without JAX
        spoil()
    return cli.main(sys.argv[1:])


def spoil() -> None:
    """Faults in a process that trains, until it ends."""
    from longhaul.training import final_evaluation
    from longhaul.training.checkpoint import checkpoint

    if UNSCORED in os.environ:
        final_evaluation.evaluations = lambda *_, **__: iter(())
    if CHANCE in os.environ:
        import pytest

        from tests.helpers import nan_environment

        nan_environment.add(pytest.MonkeyPatch(), "poisonous", float(os.environ[CHANCE]))
    if FULL in os.environ:
        full, free, write = Path(os.environ[FULL]), checkpoint._free_bytes, os.write

        def filling(descriptor: int, data: bytes) -> int:
            if bytes(data).startswith(b'{"update"') and full.exists():
                raise OSError(errno.ENOSPC, "")
            return write(descriptor, data)

        checkpoint._free_bytes = lambda folder: 0 if full.exists() else free(folder)
        os.write = filling


# ------------------------------------------------------------------------------------------------------ what goes on


@contextmanager
def launched(
    train: list[str], *own: str, variables: dict[str, str] | None = None, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """`longhaul launch` with this program; nothing is left of it afterwards. Its standard error is added to `log`."""
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"} | (variables or {})
    command = [sys.executable, "-m", "tests.helpers.launch_faults", "launch", *own, "--", *train]
    with open(log, "ab") as errors:
        launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors, cwd=ROOT)
        try:
            yield launcher
        finally:
            launcher.kill()
            launcher.wait()


def processes() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """(id, words of the command line, variables) of every process that can be looked into."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            yield process.pid, process.cmdline(), process.environ()


def pids(name: str) -> dict[int, int]:
    """The processes that train the run of this name: number -> process id."""
    return {
        int(variables["LONGHAUL_PROCESS_ID"]): process
        for process, words, variables in processes()
        if any(word == name or word.endswith(f"/{name}") for word in words)
        and "launch" not in words
        and "LONGHAUL_PROCESS_ID" in variables
    }


def wait_for(ready: Callable[[], object], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def send(name: str, number: int, victims: tuple[int, ...]) -> None:
    """A signal to some processes of a run, where they are still there."""
    there = pids(name)
    for victim in victims:
        try:
            os.kill(there[victim], number)
        except (KeyError, ProcessLookupError):
            continue


def damage(folder: Path, kind: str) -> str:
    """Does harm to the newest checkpoint of the run in `folder`; -> its name."""
    steps = [path for path in (folder / "checkpoints").iterdir() if path.name.replace(".", "").isdecimal()]
    newest = max(steps, key=lambda path: float(path.name))
    files = [path for path in newest.rglob("*") if path.is_file() and path.name != "manifest.json"]
    largest = max(files, key=lambda path: path.stat().st_size)
    if kind == "truncate":
        os.truncate(largest, largest.stat().st_size // 2)
    else:
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 16
        largest.write_bytes(data)
    return newest.name


KILL, STOP = signal.SIGKILL, signal.SIGSTOP

if __name__ == "__main__":
    sys.exit(main())
