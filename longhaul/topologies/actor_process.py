"""Processes of actors: begun with what they must know on their standard input, ended for good, and begun again with a
delay that grows."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

FEW = {
    "JAX_PLATFORMS": "cpu", "NPROC": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
}  # fmt: skip
"""The environment of an actor's process, whatever the learner's says: it computes on the CPU, with one thread, in which
JAX's programs run, too (`run.prepare_devices` says why)."""

BACK_OFF, LONGEST = 0.1, 10.0
"""Seconds before an actor is begun again: the first, doubled with each failure in a row, at most the last."""


class CrewError(RuntimeError):
    """Actors that can't go on; one line."""


def delay(failures: int) -> float:
    """Seconds until another takes the place of an actor that has failed so often in a row, at least once."""
    return min(LONGEST, BACK_OFF * 2.0 ** (failures - 1))


class Child:
    """One life of an actor, in a process of its own: `python -m MODULE`."""

    def __init__(self, module: str, orders: bytes, descriptors: Sequence[int] = ()) -> None:
        """`orders` are all that it reads; the descriptors are its own, too."""
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, pass_fds=descriptors, env=os.environ | FEW
        )
        self.id = process.pid
        assert process.stdin is not None
        try:
            with process.stdin as pipe:
                pipe.write(orders)
        except BrokenPipeError:
            pass  # it ended at once, which `ended` tells

    def ended(self) -> str | None:
        """How it ended; None while it lives."""
        code = self._process.poll()
        if code is None:
            return None
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.wait()

    def end(self, within: float) -> None:
        """Waits for its end; kills it where that takes more than so many seconds."""
        try:
            self._process.wait(timeout=within)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()


def end_with_parent(parent: int) -> None:
    """This process is killed when its parent ends. Exits where it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
