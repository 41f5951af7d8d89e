"""Supervision of processes that train together: failures and hangs, their consequence for all, and the output.

`watch` supervises one start on this machine (`local`) or on a cluster (`ray`). If one dies, the others abort or hang,
so one failure ends all. `supervise` starts them again from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from longhaul.runtime import files, heartbeat
from longhaul.runtime.errors import BAD_INPUT, FAILED, STOPPED
from longhaul.runtime.launch.process import Restarts
from longhaul.runtime.process_group import HostsError

DEADLINE = 1800.0
"""Seconds in which a process must get from its start, or a save, to updates."""

PAUSES = (1.0, 60.0)
"""Seconds before the first new start, which double with each, and their bound."""

LOOK = 0.05
"""Seconds between two looks at the signals during a pause."""

LINGER, HANGING, LOST = 15.0, 3.0, 0.3
"""Seconds that processes have to end after one ended; after one failed, for which the others may wait in vain; after
one was killed, which the others cannot explain."""

KILLED = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)

AWAY = 5.0
"""Seconds between two looks after which the launcher itself was suspended, for example on a sleeping laptop."""


class Look(NamedTuple):
    """State of one process at a look."""

    code: int | None = None  # exit code; negative: the signal that killed it; None: it runs, or unknown
    signs: bytes = b""  # signs of life since the last look
    stopped: bool = False
    lost: str = ""  # reason why the process cannot be observed any more: it counts as dead


class Gang(Protocol):
    """Processes of one start."""

    pause: float
    """Seconds between two looks."""

    def look(self) -> list[Look]:
        """State of each process, whose output is forwarded meanwhile."""

    def send(self, number: int) -> None:
        """Signal to all that run."""

    def end(self) -> None:
        """End all processes and their children, after forwarding all their output."""


class Death(NamedTuple):
    """Unexpected end of a process."""

    process: int
    code: int  # of the process; negative: the signal that killed it
    why: str = ""  # reason for which a live or lost process was killed

    def words(self) -> str:
        if self.why:
            return f"process {self.process} {self.why}"
        if self.code >= 0:
            return f"process {self.process} ended with exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"process {self.process} was ended by {name}"


class Ended(NamedTuple):
    """End of all processes."""

    codes: tuple[int | None, ...]  # None: it had to be killed
    first: Death | None  # the first that failed


class OutputForwarder:
    """Forwarding of output: standard error with process numbers, standard output of process 0.

    The first line of standard output is the run's folder, which is forwarded once over all starts.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._first = True

    def begin(self) -> None:
        """Reset before each start."""
        self._first = True

    def out(self, line: bytes) -> None:
        """Forward a line of process 0."""
        text = line.decode(errors="replace")
        folder, first, self._first = Path(text.strip()), self._first, False
        if first and self.folder == folder:
            return
        if first:
            self.folder = folder
        print(text, end="", flush=True)

    def error(self, process: int) -> Callable[[bytes], None]:
        """Receiver of the lines that `process` writes to standard error."""

        def take(line: bytes) -> None:
            text = line.decode(errors="replace").rstrip("\r\n")
            sys.stderr.write(f"[{process}] {text}\n")
            sys.stderr.flush()

        return take


def watch(gang: Gang, signals: Sequence[int], deadline: float) -> Ended:
    """Wait for the end of all: `signals` are forwarded, and the rest is ended after one has ended.

    `deadline` is the limit in seconds of phases other than updates.
    """
    passed, first, until = 0, None, None  # signals during the start are forwarded too
    watchdog: Watchdog | None = None
    try:
        while True:
            looks = gang.look()
            codes = [look.code for look in looks]
            watchdog = watchdog or Watchdog(len(looks), deadline, time.monotonic())
            first = first or first_to_fail(codes)
            lost = [Death(i, -signal.SIGKILL, look.lost) for i, look in enumerate(looks) if look.lost]
            if lost and (first is None or first.code == -signal.SIGABRT):  # the others abort because of it
                first = lost[0]
                break
            if None not in codes:
                break
            if first is None:
                first = watchdog.hung(looks, time.monotonic())
                if first is not None:
                    break
            if until is None and any(code is not None for code in codes):
                wait = LINGER if first is None else LOST if first.code in KILLED else HANGING
                until = time.monotonic() + wait
            if until is not None and time.monotonic() > until:
                break
            for number in signals[passed:]:
                gang.send(number)
            passed = len(signals)
            time.sleep(gang.pause)
        codes = [look.code for look in gang.look()]
    finally:
        gang.end()
    return Ended(tuple(codes), first)


class Watchdog:
    """Hang detection of several processes by their signs of life."""

    def __init__(self, count: int, deadline: float, now: float):
        self._looked = now
        self._listeners = [heartbeat.Listener(now, deadline) for _ in range(count)]

    def hung(self, looks: Sequence[Look], now: float) -> Death | None:
        """A live process that hangs; a stopped one before those that wait for it."""
        away, self._looked = now - self._looked > AWAY, now
        for listener, look in zip(self._listeners, looks, strict=True):
            if look.signs:
                listener.hear(look.signs, now)
            listener.see(look.stopped, now)
            if away:
                listener.forgive(now)
        verdicts = [
            listener.verdict(now) if look.code is None else None for listener, look in zip(self._listeners, looks)
        ]
        hung = [Death(i, -signal.SIGKILL, f"{why}, and was killed") for i, why in enumerate(verdicts) if why]
        return min(hung, key=lambda death: "stopped" not in death.why, default=None)


def first_to_fail(codes: Sequence[int | None]) -> Death | None:
    """First failed process of those that ended; a killed one before one that aborts because of it."""
    failed = [Death(i, code) for i, code in enumerate(codes) if code not in (None, 0, STOPPED)]
    return min(failed, key=lambda death: (death.code == -signal.SIGABRT, death.code > 0), default=None)


Start = Callable[[Sequence[str], OutputForwarder], Gang]
"""Starts `longhaul WORDS` in all processes. Raises HostsError, one line, where there is no room for them."""


def supervise(command: Sequence[str], start: Start, restarts: int, deadline: float = DEADLINE) -> int:
    """Run of `longhaul COMMAND` in all processes to its end; -> its exit code."""
    signals: list[int] = []  # signals that came
    output = OutputForwarder()
    history, before, arguments = Restarts(restarts, *PAUSES), -1, list(command)
    with _listening(signals):
        while True:
            output.begin()
            try:
                started = start(arguments, output)
            except HostsError as error:
                if not history.failures:
                    raise
                say(str(error))
                return FAILED
            ended = watch(started, signals, deadline)
            folder = output.folder
            began = folder is not None and (folder / "run.json").is_file()
            code = verdict(ended, signals, began)
            if code != FAILED:
                return code
            newest = newest_step(folder) if folder is not None and began else -1
            history = history.failed(progress=newest > before)
            before = newest
            say(report(ended))
            end = time.monotonic() + (0.0 if history.exhausted else history.pause)
            while not signals and time.monotonic() < end:  # a signal ends the pause
                time.sleep(LOOK)
            if signals or history.exhausted:
                return code
            arguments = resume_command(command, folder) if folder is not None and began else list(command)
            say(f"starts again ({history.failures} of {restarts}), from update {max(newest, 0)}")


def verdict(ended: Ended, signals: Sequence[int], began: bool) -> int:
    """Exit code of all: 0 done, 75 stopped by a signal, 2 bad input, 1 something died.

    `signals` are those that came, `began` says whether there is a run to go on with.
    """
    if ended.first is None:
        return STOPPED if STOPPED in ended.codes else FAILED if None in ended.codes else 0
    if began and -ended.first.code in signals:  # it had not begun to listen
        return STOPPED
    refused = ended.first.code == BAD_INPUT and not ended.first.why
    return BAD_INPUT if refused and ended.codes[0] == BAD_INPUT else FAILED  # whoever refused first: process 0 did, too


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


def resume_command(command: Sequence[str], folder: Path) -> list[str]:
    """Command that resumes the run in `folder`."""
    if any(word == "--resume" or word.startswith("--resume=") for word in command):
        return list(command)
    arguments, skip = [], False
    for word in command:
        if not skip and word != "--run-name" and not word.startswith("--run-name="):
            arguments.append(word)
        skip = not skip and word == "--run-name"
    return [*arguments, "--resume", str(folder)]


def newest_step(folder: Path) -> int:
    """Update of the newest checkpoint; -1 without one."""
    return max(files.checkpoint_steps(folder), default=-1)


@contextlib.contextmanager
def _listening(signals: list[int]) -> Any:
    """Context in which SIGINT and SIGTERM are noted in `signals`."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: signals.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(line: str) -> None:
    print(f"longhaul launch: {line}", file=sys.stderr, flush=True)
