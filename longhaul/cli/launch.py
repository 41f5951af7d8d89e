"""`longhaul launch`: several processes of one training run, started and looked after from outside.

Each process gets the environment that `hosts.find` reads. Where one dies the others abort or hang, so all are ended;
with `--restarts` they begin again from the newest intact checkpoint. The supervisor runs no JAX: nothing that they do
can take it down, and where it is killed itself, they end too. Who starts them is one of two: this machine (`processes`)
or a Ray cluster (`cluster`); the rest is the same.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longhaul.cli import flags
from longhaul.cli.flags import DEBUG, FLOAT, INT, TEXT, Flag, FlagError, choice
from longhaul.runtime import heartbeat
from longhaul.runtime.devices import machine_memory
from longhaul.runtime.launch import local, supervisor
from longhaul.runtime.launch.process import Restarts
from longhaul.runtime.launch.supervisor import STOPPED, Death, Ended, Gang, Printed
from longhaul.runtime.process_group import HostsError

BAD_INPUT, FAILED = 2, 1

DEADLINE = 1800.0

FOOTPRINT = 2**29
"""Bytes that a process takes at least: training CartPole on four worlds takes 0.62 GB."""

PAUSES = (1.0, 60.0)
"""Seconds before the first new start, which double with each, and their bound."""

ABOUT = "Several processes of one training run, looked after: longhaul launch --hosts N -- train RECIPE ..."

FLAGS = (
    Flag("hosts", INT, 2, "processes, each of which stands for a host", least=1),
    Flag("devices_per_host", INT, None, "devices of each process", shown="the machine's cores, shared", least=1),
    Flag("restarts", INT, 0, "new starts from the newest checkpoint, after deaths without a new one between", least=0),
    Flag(
        "deadline",
        FLOAT,
        DEADLINE,
        "seconds in which a process must get from its start, or a save, to updates",
        least=heartbeat.SILENCE,
    ),
    Flag("on", choice(("here", "ray")), "here", "where: on this machine, or on the nodes of a Ray cluster"),
    DEBUG,
)

RAY = (
    Flag("address", TEXT, "auto",
         "of the cluster: HOST:PORT; auto: RAY_ADDRESS, or one on this machine; local: a new one"),
    Flag("place", choice(("strict", "spread", "pack")), "strict",
         "strict: each process has a node of its own; spread: on as many nodes as there are; pack: on few"),
    Flag("fewest", INT, None, "processes with which a run may go on where nodes are gone", shown="all", least=1),
    Flag("patience", FLOAT, 60.0, "seconds that a start waits for nodes", least=0),
)  # fmt: skip

Start = Callable[[Sequence[str], Printed], Gang]
"""Starts `longhaul WORDS` in all processes. Raises HostsError, one line, where there is no room for them."""


def launch(words: Sequence[str]) -> int:
    """`longhaul launch [--hosts N] [--devices-per-host M] [--restarts K] [--on ray] -- train RECIPE ...`."""
    words = list(words)
    cut = words.index("--") if "--" in words else len(words)
    own, command = words[:cut], words[cut + 1 :]
    groups = {"": list(FLAGS), "ray: With --on ray, which needs longhaul-rl[cluster].": list(RAY)}
    given = flags.parse("launch", ABOUT, groups, own)
    values = given.values
    if command[:1] != ["train"]:
        raise FlagError("what is to be launched? longhaul launch --hosts N -- train RECIPE ...")
    count, devices, restarts, deadline = (values[n] for n in ("hosts", "devices_per_host", "restarts", "deadline"))
    if values["on"] == "ray":
        return _on_ray(command, values)
    lost = [f"--{flag.name}" for flag in RAY if flag.name in given.given]
    if lost:
        raise FlagError(f"{', '.join(lost)} can be given with --on ray only")
    _check_room(count)
    return supervise(command, functools.partial(local.local, count=count, devices=devices), restarts, deadline)


def _check_room(count: int) -> None:
    """Raises FlagError where this machine's memory can't hold so many processes: they would take it down together."""
    total = machine_memory()
    if count > (most := max(1, total // FOOTPRINT)):
        raise FlagError(
            f"--hosts is {count}; this machine's {total / 1e9:.1f} GB hold at most {most} processes, "
            f"of {FOOTPRINT / 1e9:.1f} GB or more each; choose fewer, or a cluster by --on ray"
        )


def _on_ray(command: Sequence[str], values: dict[str, Any]) -> int:
    from longhaul.runtime.launch import ray, ray_cluster

    count, fewest = values["hosts"], values["fewest"] or values["hosts"]
    if fewest > count:
        raise FlagError(f"--fewest is {fewest}; it must be at most --hosts, {count}")
    wanted = ray.Wanted(count, fewest, values["devices_per_host"], values["place"], values["patience"])
    with ray_cluster.joined(values["address"]):
        return supervise(command, ray.starter(wanted, say), values["restarts"], values["deadline"])


def supervise(command: Sequence[str], start: Start, restarts: int, deadline: float = DEADLINE) -> int:
    """Runs `longhaul COMMAND` in all processes to its end; -> its exit code."""
    asked: list[int] = []  # signals that came
    printed = Printed()
    history, before, words = Restarts(restarts, *PAUSES), -1, list(command)
    with _listening(asked):
        while True:
            printed.begin()
            try:
                started = start(words, printed)
            except HostsError as error:
                if not history.failures:
                    raise
                say(str(error))
                return FAILED
            ended = supervisor.watch(started, asked, deadline)
            folder = printed.folder
            there = folder is not None and (folder / "run.json").is_file()
            code = verdict(ended, asked, there)
            if code != FAILED:
                return code
            newest = newest_step(folder) if folder is not None and there else -1
            history = history.failed(progress=newest > before)
            before = newest
            say(report(ended))
            if not history.exhausted:
                _rest(history.pause, asked)
            if asked or history.exhausted:
                return code
            words = again(command, folder) if folder is not None and there else list(command)
            say(f"starts again ({history.failures} of {restarts}), from update {max(newest, 0)}")


def verdict(ended: Ended, asked: Sequence[int], there: bool) -> int:
    """The exit code of all: 0 done, 75 stopped by a signal, 2 bad input, 1 something died.

    `asked` are signals that came, `there` says whether there is a run to go on with.
    """
    if ended.first is None:
        return STOPPED if STOPPED in ended.codes else FAILED if None in ended.codes else 0
    if there and -ended.first.code in asked:  # it had not begun to listen
        return STOPPED
    return BAD_INPUT if ended.first == Death(0, BAD_INPUT) else FAILED


def report(ended: Ended) -> str:
    """One line on a failure."""
    if ended.first is None:
        return f"process {ended.codes.index(None)} did not end after the others, and was killed"
    if ended.first.why:  # the others had to wait for it
        return ended.first.words()
    others = [Death(i, code).words() for i, code in enumerate(ended.codes) if code not in (0, None)]
    others = [words for words in others if words != ended.first.words()]
    killed = [str(i) for i, code in enumerate(ended.codes) if code is None]
    after = [*others, *([f"{', '.join(killed)} had to be killed"] if killed else [])]
    return ended.first.words() + (f"; after it: {', '.join(after)}" if after else "")


def again(command: Sequence[str], folder: Path) -> list[str]:
    """The command that goes on with the run in `folder`."""
    if any(word == "--resume" or word.startswith("--resume=") for word in command):
        return list(command)
    words, skip = [], False
    for word in command:
        if not skip and word != "--run-name" and not word.startswith("--run-name="):
            words.append(word)
        skip = not skip and word == "--run-name"
    return [*words, "--resume", str(folder)]


def newest_step(folder: Path) -> int:
    """The newest checkpoint's; -1 where there is none."""
    names = (path.name.split(".")[0] for path in (folder / "checkpoints").glob("*") if "partial" not in path.name)
    return max((int(name) for name in names if name.isdecimal()), default=-1)


@contextlib.contextmanager
def _listening(asked: list[int]) -> Any:
    """Within it SIGINT and SIGTERM are noted in `asked`."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: asked.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _rest(seconds: float, asked: list[int]) -> None:
    """Waits, unless a signal comes."""
    end = time.monotonic() + seconds
    while not asked and time.monotonic() < end:
        time.sleep(local.LOOK)


def say(line: str) -> None:
    print(f"longhaul launch: {line}", file=sys.stderr, flush=True)
