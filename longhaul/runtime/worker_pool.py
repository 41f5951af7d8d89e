"""Worker processes for NumPy work, beside a parent that may run JAX, and bounds of what such work may take."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any

GRACE = 5.0
"""Seconds after SIGTERM until a worker ends by itself."""


class OutOfTime(BaseException):
    """More CPU time than `bounded` allows; past every `except Exception`, so that none hides it."""


@contextmanager
def bounded(memory: int, seconds: float) -> Iterator[None]:
    """Context in which this process may take so many more bytes of address space, and so many seconds of CPU time.

    Beyond them MemoryError and OutOfTime are raised. It does nothing where JAX is loaded, whose threads would fail too,
    nor outside of Linux and a process's main thread.
    """
    alone = threading.current_thread() is threading.main_thread()
    if sys.platform != "linux" or not alone or "jax" in sys.modules:
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise OutOfTime

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory
    before = signal.signal(signal.SIGPROF, stop)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (bound if soft < 0 else min(bound, soft), hard))
        signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


BLANK, BLANKING = ModuleType("__main__"), threading.Lock()
"""Module that stands for the user's script while a worker starts, and who may put it there."""


class Worker(SpawnProcess):
    """Process that does not import the user's script.

    Spawned processes do, to find what it defines. Ours need this package alone; and a script without
    `if __name__ == "__main__":` would train in each of them.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with BLANKING:
            script = sys.modules["__main__"]
            sys.modules["__main__"] = BLANK
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                sys.modules["__main__"] = script


class Fresh(SpawnContext):
    """Context whose processes are `Worker`s."""

    Process = Worker


def pool(workers: int) -> ProcessPoolExecutor:
    """Pool of fresh processes with one arithmetic thread each; a fork of a process with JAX's threads may hang.

    They run functions of modules, not of the user's script.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return ProcessPoolExecutor(workers, mp_context=Fresh(), initializer=initialise_worker)


@contextmanager
def ending(pool: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """Context that waits for a pool at its end; on an error, pending work is cancelled."""
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def initialise_worker() -> None:
    """Worker's beginning: leaves Ctrl-C and SIGTERM to its parent, and ends with the parent, even if killed.

    Both signals come to whole groups of processes. A parent ends its pool on them, which would break if workers died
    first. A broken pool ends its workers by SIGTERM, so that is obeyed after `GRACE`.
    """

    def end_soon(number: int, frame: object) -> None:
        late = threading.Timer(GRACE, os._exit, [1])
        late.daemon = True
        late.start()

    def end_with_parent() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_soon)
    threading.Thread(target=end_with_parent, daemon=True).start()
