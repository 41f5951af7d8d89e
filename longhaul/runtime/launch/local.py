"""Training processes of one run on this machine, each with the environment that `process_group.find` reads."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence

from longhaul.runtime import heartbeat, process_group
from longhaul.runtime.devices import cores
from longhaul.runtime.launch.process import DROP, Process, Take
from longhaul.runtime.launch.supervisor import Look, OutputForwarder

PROGRAM = (sys.executable, "-m", "longhaul")

LOOK = 0.05
"""Seconds between two looks at the processes."""


def environment(base: Mapping[str, str], index: int, count: int, place: str, devices: int | None) -> dict[str, str]:
    """Environment of process `index` of `count`, which meet at the socket `place`; by default several share the cores
    evenly as devices."""
    ours = {
        process_group.COORDINATOR: f"{process_group.SOCKET}{place}",
        process_group.INDEX: str(index),
        process_group.COUNT: str(count),
    }
    if count > 1 or devices is not None:
        ours[process_group.DEVICES] = str(devices or max(1, cores() // count))
    if devices is not None and count > 1:  # obeyed by GPUs only
        ours["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(index * devices + i) for i in range(devices))
    return {**base, **ours}


class Local:
    """`longhaul WORDS` in `count` processes of this machine with `devices` devices each, as a `supervisor.Gang`.

    They meet at a socket in a folder that is this user's alone: a port could be another program's before they listen.
    """

    pause = LOOK

    def __init__(self, arguments: Sequence[str], output: OutputForwarder, *, count: int, devices: int | None) -> None:
        self.members: list[TrainingProcess] = []
        self._folder = tempfile.mkdtemp(prefix="longhaul-launch-")
        place = os.path.join(self._folder, "socket")
        try:
            for i in range(count):
                out = output.out if i == 0 else None
                variables = environment(os.environ, i, count, place, devices)
                member = TrainingProcess([*PROGRAM, *arguments], variables, out=out, error=output.error(i))
                self.members.append(member)
        except BaseException:
            self.end()
            raise

    def look(self) -> list[Look]:
        return [member.look() for member in self.members]

    def send(self, number: int) -> None:
        for member in self.members:
            member.process.send(number)

    def end(self) -> None:
        for member in self.members:  # all are signalled before any is awaited
            member.process.kill()
        for member in self.members:
            member.end()
        shutil.rmtree(self._folder, ignore_errors=True)


class TrainingProcess:
    """Training process with a heartbeat. `out` and `error` receive the lines that it prints."""

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], *, out: Take | None, error: Take,
        folder: str | None = None,
    ):  # fmt: skip
        self._signs, signs = os.pipe()
        ours = {heartbeat.DESCRIPTOR: str(signs), "PYTHONUNBUFFERED": "1"}
        try:  # a session of its own: its launcher alone handles the terminal, and kills its children
            self.process = Process(
                command, variables={**variables, **ours}, descriptors=[signs], out=DROP if out is None else out,
                error=error, folder=folder, session=True,
            )  # fmt: skip
        except BaseException:
            os.close(self._signs)
            raise
        finally:
            os.close(signs)
        os.set_blocking(self._signs, False)

    def look(self) -> Look:
        code, signs = self.process.code, b""
        with contextlib.suppress(BlockingIOError):
            signs = os.read(self._signs, 65536)
        return Look(code, signs, self.process.stopped())

    def end(self) -> None:
        """End the process and its children, after taking all that it printed."""
        self.process.end()
        os.close(self._signs)


def free_port(host: str = "127.0.0.1") -> int:
    """Port on which no process listens now."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
