"""Worker processes that make data with NumPy, beside a parent that may run JAX."""

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
    """A pool of fresh processes (a fork of one that runs JAX's threads may hang), one thread of arithmetic each."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=attend)


@contextmanager
def ending(made: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """Waits for a pool at the end; what it has not begun when there is an error it never does."""
    try:
        yield made
    finally:
        made.shutdown(cancel_futures=True)


def attend() -> None:
    """In a worker: leaves Ctrl-C and SIGTERM to its parent, and ends when that ends, be it killed.

    Both come to whole groups of processes. A parent that hears them ends its pool, which would be broken if workers
    died before. A pool that is broken ends its workers by SIGTERM: so that is heeded after `GRACE`, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_soon)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_soon(number: int, frame: object) -> None:
    late = threading.Timer(GRACE, os._exit, [1])
    late.daemon = True
    late.start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
