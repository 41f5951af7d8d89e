"""`longhaul launch`: several processes of one training run on this machine, started and looked after from outside.

Each process gets the environment that `hosts.find` reads. Where one dies the others abort or hang, so all are ended;
with `--restarts` they begin again from the newest intact checkpoint. The supervisor runs no JAX: nothing that they do
can take it down, and where it is killed itself, they end too, by a pipe that they hold the other end of.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from longhaul import flags, hosts, pulse
from longhaul.flags import DEBUG, FLOAT, INT, Flag, FlagError

STOPPED, BAD_INPUT, FAILED = 75, 2, 1

PROGRAM = (sys.executable, "-m", "longhaul")

LINGER, HANGING, LOST = 15.0, 3.0, 0.3
"""Seconds that processes have to end after one of them did; after one failed, which the others may wait for in vain;
after one was killed, of which they can have nothing to say."""

KILLED = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)

LOOK = 0.05
"""Seconds between two looks at the processes."""

AWAY = 5.0
"""Seconds between two looks after which the launcher itself was away: a laptop that slept, say."""

DEADLINE = 1800.0

PAUSES = (1.0, 60.0)
"""Seconds before the first new start, which double with each, and their bound."""

ABOUT = "Several processes of one training run on this machine: longhaul launch --hosts N -- train RECIPE ..."

FLAGS = (
    Flag("hosts", INT, 2, "processes, each of which stands for a host"),
    Flag("devices_per_host", INT, None, "devices of each process", shown="the machine's cores, shared"),
    Flag("restarts", INT, 0, "new starts from the newest checkpoint, after deaths without a new one between"),
    Flag("deadline", FLOAT, DEADLINE, "seconds in which a process must get from its start, or a save, to updates"),
    DEBUG,
)


class Death(NamedTuple):
    """How a process ended that should have gone on."""

    process: int
    code: int  # of the process; negative: the signal that killed it
    why: str = ""  # it lived, and was killed for that

    def words(self) -> str:
        if self.why:
            return f"process {self.process} {self.why}, and was killed"
        if self.code >= 0:
            return f"process {self.process} ended with exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"process {self.process} was ended by {name}"


class Ended(NamedTuple):
    """How all processes ended."""

    codes: tuple[int | None, ...]  # None: it had to be killed
    first: Death | None  # the first that failed


def launch(words: Sequence[str]) -> int:
    """`longhaul launch [--hosts N] [--devices-per-host M] [--restarts K] -- train RECIPE ...`."""
    words = list(words)
    cut = words.index("--") if "--" in words else len(words)
    own, command = words[:cut], words[cut + 1 :]
    given = flags.parse("launch", ABOUT, {"": list(FLAGS)}, own).values
    if command[:1] != ["train"]:
        raise FlagError("what is to be launched? longhaul launch --hosts N -- train RECIPE ...")
    for name, least in (("hosts", 1), ("devices_per_host", 1), ("restarts", 0)):
        if given[name] is not None and given[name] < least:
            raise FlagError(f"--{name.replace('_', '-')} is {given[name]}; it must be at least {least}")
    if not given["deadline"] >= pulse.SILENCE:
        raise FlagError(f"--deadline is {given['deadline']:g}; it must be at least {pulse.SILENCE:g}")
    return supervise(command, given["hosts"], given["devices_per_host"], given["restarts"], given["deadline"])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def supervise(
    command: Sequence[str], count: int, devices: int | None, restarts: int, deadline: float = DEADLINE
) -> int:
    """Runs `longhaul COMMAND` in `count` processes to its end; -> its exit code."""
    asked: list[int] = []  # signals that came
    said: list[Path] = []  # the run's folder, when process 0 has said it
    failures, before, words = 0, -1, list(command)
    with _listening(asked):
        while True:
            ended = Group(words, count, devices, said, deadline).run(asked)
            there = bool(said) and (said[0] / "run.json").is_file()
            code = verdict(ended, asked, there)
            if code != FAILED:
                return code
            newest = newest_step(said[0]) if there else -1
            failures = 1 if newest > before else failures + 1
            before = newest
            _say(report(ended))
            if failures <= restarts:
                _rest(min(PAUSES[0] * 2 ** (failures - 1), PAUSES[1]), asked)
            if asked or failures > restarts:
                return code
            words = again(command, said[0]) if there else list(command)
            _say(f"starts again ({failures} of {restarts}), from update {max(newest, 0)}")


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


def environment(
    base: Mapping[str, str], index: int, count: int, port: int, devices: int | None, lifeline: int, signs: int
) -> dict[str, str]:
    """What process `index` of `count` finds; by default each of several has its share of the cores as devices."""
    ours = {hosts.LIFELINE: str(lifeline), pulse.DESCRIPTOR: str(signs)}
    if count > 1 or devices is not None:
        ours[hosts.DEVICES] = str(devices or max(1, _cores() // count))
    ours |= {hosts.COORDINATOR: f"127.0.0.1:{port}", hosts.INDEX: str(index), hosts.COUNT: str(count)}
    if devices is not None and count > 1:  # heeded by GPUs alone
        ours["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(index * devices + i) for i in range(devices))
    return {**base, **ours, "PYTHONUNBUFFERED": "1"}


# ----------------------------------------------------------------------------------------------------- processes


class Group:
    """The processes of one start."""

    def __init__(
        self, words: Sequence[str], count: int, devices: int | None, said: list[Path], deadline: float = DEADLINE
    ):
        """`said` takes the run's folder when process 0 has said it."""
        self._said, self._first_line = said, True
        port = _free_port()
        lifeline, self._line = os.pipe()
        pipes = [os.pipe() for _ in range(count)]
        self._signs = [reading for reading, _ in pipes]
        try:
            self._processes = [
                _start(words, i, environment(os.environ, i, count, port, devices, lifeline, signs), (lifeline, signs))
                for i, (_, signs) in enumerate(pipes)
            ]
        finally:
            for descriptor in (lifeline, *(signs for _, signs in pipes)):
                os.close(descriptor)
        for reading in self._signs:
            os.set_blocking(reading, False)
        self._looked = time.monotonic()
        self._listeners = [pulse.Listener(self._looked, deadline) for _ in range(count)]
        self._threads = [_pump(process.stderr, _prefixed(f"[{i}] ")) for i, process in enumerate(self._processes)]
        self._threads.append(_pump(self._processes[0].stdout, self._passed))

    def run(self, asked: list[int]) -> Ended:
        """Waits for their end; passes on the signals that come, and ends what is left when one has ended."""
        passed, first, deadline = len(asked), None, None
        try:
            while True:
                codes = [process.poll() for process in self._processes]
                if first is None:
                    first = _first(codes)
                if None not in codes:
                    break
                if first is None:
                    first = self._hung(codes)
                    if first is not None:
                        break
                if deadline is None and any(code is not None for code in codes):
                    wait = LINGER if first is None else LOST if first.code in KILLED else HANGING
                    deadline = time.monotonic() + wait
                if deadline is not None and time.monotonic() > deadline:
                    break
                for number in asked[passed:]:
                    self._signal(number)
                passed = len(asked)
                time.sleep(LOOK)
        finally:
            codes = [process.poll() for process in self._processes]
            self._end()
        return Ended(tuple(codes), first)

    def _hung(self, codes: Sequence[int | None]) -> Death | None:
        """A process that lives, and does not go on."""
        now = time.monotonic()
        away, self._looked = now - self._looked > AWAY, now
        for i, (listener, signs) in enumerate(zip(self._listeners, self._signs, strict=True)):
            with contextlib.suppress(BlockingIOError):
                listener.hear(os.read(signs, 65536), now)
            listener.see(pulse.stopped(self._processes[i].pid), now)
            if away:
                listener.forgive(now)
        found = [(i, self._listeners[i].verdict(now)) for i, code in enumerate(codes) if code is None]
        hung = [Death(i, -signal.SIGKILL, why) for i, why in found if why is not None]
        return min(hung, key=lambda death: "stopped" not in death.why, default=None)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def _end(self) -> None:
        """No process is left after this, nor any that they started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for thread in self._threads:
            thread.join()
        for descriptor in (self._line, *self._signs):
            os.close(descriptor)

    def _passed(self, line: bytes) -> None:
        """What process 0 prints: first the run's folder, which whoever reads all starts needs once."""
        folder = Path(line.decode(errors="replace").strip())
        first, self._first_line = self._first_line, False
        if first and self._said == [folder]:
            return
        if first:
            self._said[:] = [folder]
        print(line.decode(errors="replace"), end="", flush=True)


def _start(
    words: Sequence[str], index: int, variables: dict[str, str], descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """A process of its own session: what a terminal sends, or what it starts, is its launcher's matter."""
    return subprocess.Popen(
        [*PROGRAM, *words], env=variables, pass_fds=descriptors, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if index == 0 else subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def _first(codes: Sequence[int | None]) -> Death | None:
    """Who failed, of those that have ended; one that was killed before one that aborts because of it."""
    failed = [Death(i, code) for i, code in enumerate(codes) if code not in (None, 0, STOPPED)]
    return min(failed, key=lambda death: (death.code == -signal.SIGABRT, death.code > 0), default=None)


def _pump(stream: IO[bytes] | None, take: Callable[[bytes], None]) -> threading.Thread:
    """A thread that gives each line of `stream` to `take`, to its end."""

    def run() -> None:
        assert stream is not None
        with stream, contextlib.suppress(OSError):  # nobody reads what we print any more
            for line in stream:
                take(line)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _prefixed(prefix: str) -> Callable[[bytes], None]:
    def take(line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r\n")
        sys.stderr.write(f"{prefix}{text}\n")
        sys.stderr.flush()

    return take


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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
        time.sleep(LOOK)


def _say(line: str) -> None:
    print(f"longhaul launch: {line}", file=sys.stderr, flush=True)
