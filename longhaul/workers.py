"""Worker processes that make data with NumPy, beside a parent that may run JAX."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path


def pool(workers: int) -> ProcessPoolExecutor:
    """A pool of fresh processes (a fork of one that runs JAX's threads may hang), one thread of arithmetic each."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=attend)


def machine_memory() -> int | None:
    """Bytes of this machine's memory, or of its container's. None where nobody says."""
    if not hasattr(os, "sysconf"):
        return None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total


def attend() -> None:
    """In a worker: leaves Ctrl-C to its parent, and ends when that ends, be it killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
