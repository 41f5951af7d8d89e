"""Processes of one training run on this machine: each in a session of its own, with what `hosts.find` reads.

Each gives signs of life through a pipe, and ends when another one is closed: so they end with whoever started them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from longhaul.runtime import heartbeat, process_group
from longhaul.runtime.launch.supervisor import Look, Printed

PROGRAM = (sys.executable, "-m", "longhaul")

LOOK = 0.05
"""Seconds between two looks at the processes."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(base: Mapping[str, str], index: int, count: int, port: int, devices: int | None) -> dict[str, str]:
    """What process `index` of `count` finds; by default each of several has its share of the cores as devices."""
    ours = {
        process_group.COORDINATOR: f"127.0.0.1:{port}",
        process_group.INDEX: str(index),
        process_group.COUNT: str(count),
    }
    if count > 1 or devices is not None:
        ours[process_group.DEVICES] = str(devices or max(1, cores() // count))
    if devices is not None and count > 1:  # heeded by GPUs alone
        ours["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(index * devices + i) for i in range(devices))
    return {**base, **ours}


def local(words: Sequence[str], printed: Printed, *, count: int, devices: int | None) -> Local:
    """Starts `longhaul WORDS` in `count` processes with so many devices each."""
    port = free_port()
    command = [*PROGRAM, *words]
    started = Local()
    try:
        for i in range(count):
            out = printed.out if i == 0 else None
            variables = environment(os.environ, i, count, port, devices)
            started.members.append(Member(command, variables, out=out, error=printed.error(i)))
    except BaseException:
        started.end()
        raise
    return started


class Local:
    """Processes on this machine, as a `gang.Gang`."""

    pause = LOOK

    def __init__(self) -> None:
        self.members: list[Member] = []

    def look(self) -> list[Look]:
        return [member.look() for member in self.members]

    def send(self, number: int) -> None:
        for member in self.members:
            member.send(number)

    def end(self) -> None:
        for member in self.members:  # all of them, before any is waited for
            member.kill()
        for member in self.members:
            member.end()


Take = Callable[[bytes], None]


class Member:
    """One process. `out` and `error` take the lines that it prints."""

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], *, out: Take | None, error: Take,
        folder: str | None = None,
    ):  # fmt: skip
        lifeline, self._line = os.pipe()
        self._signs, signs = os.pipe()
        ours = {process_group.LIFELINE: str(lifeline), heartbeat.DESCRIPTOR: str(signs), "PYTHONUNBUFFERED": "1"}
        try:  # in a session of its own: what a terminal sends, or what it starts, is its launcher's matter
            self._process = subprocess.Popen(
                list(command), env={**variables, **ours}, cwd=folder, pass_fds=(lifeline, signs),
                start_new_session=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL if out is None else subprocess.PIPE,
            )  # fmt: skip
        except BaseException:
            for descriptor in (self._line, self._signs):
                os.close(descriptor)
            raise
        finally:
            os.close(lifeline)
            os.close(signs)
        os.set_blocking(self._signs, False)
        self._threads = [_pump(self._process.stderr, error)]
        if out is not None:
            self._threads.append(_pump(self._process.stdout, out))

    def look(self) -> Look:
        code, signs = self._process.poll(), b""
        with contextlib.suppress(BlockingIOError):
            signs = os.read(self._signs, 65536)
        return Look(code, signs, code is None and heartbeat.stopped(self._process.pid))

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """It, and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Nothing is left of it after this, and all that it printed was taken."""
        self.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for descriptor in (self._line, self._signs):
            os.close(descriptor)


def _pump(stream: IO[bytes] | None, take: Take) -> threading.Thread:
    """A thread that gives each line of `stream` to `take`, to its end."""

    def run() -> None:
        assert stream is not None
        with stream, contextlib.suppress(OSError):  # nobody reads what we print any more
            for line in stream:
                take(line)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nobody listens now."""
    with socket.socket() as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])
