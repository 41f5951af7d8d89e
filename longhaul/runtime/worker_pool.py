"""Worker processes for NumPy work, beside a parent that may run JAX."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process

GRACE = 5.0
"""Seconds after SIGTERM until a worker ends by itself."""


def pool(workers: int) -> ProcessPoolExecutor:
    """Pool of fresh processes with one arithmetic thread each; a fork of a process with JAX's threads may hang."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=attend)


@contextmanager
def ending(made: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """Context that waits for a pool at its end; on an error, pending work is cancelled."""
    try:
        yield made
    finally:
        made.shutdown(cancel_futures=True)


def attend() -> None:
    """Worker's initialiser: leaves Ctrl-C and SIGTERM to its parent, and ends with the parent, even if killed.

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
