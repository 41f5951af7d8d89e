"""Use of the machine as a line of text: the process's memory and cores, and each GPU by its driver."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable

import psutil

PERIOD = 2.0
"""Seconds between two looks at the machine's use."""

PATIENCE = 10.0
"""Seconds after which a driver that does not answer is queried again."""

QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")
"""Command whose answer has a line a GPU: its use in percent, and its memory in use and in all, in MiB."""


def meter() -> Callable[[], str]:
    """Function to a text: memory that this process takes, and the use of GPUs where there are some.

    It never waits for the driver: a thread queries it, and the answer is in a later text.
    """
    usage, gpus, at, process, program = "", "", -PERIOD, psutil.Process(), shutil.which(QUERY[0])
    asking = threading.Thread()

    def ask() -> None:
        nonlocal gpus
        gpus = _gpus()

    def use() -> str:
        nonlocal usage, at, asking
        if time.monotonic() - at >= PERIOD:
            at, free = time.monotonic(), psutil.virtual_memory().available
            usage = f"memory {process.memory_info().rss / 1e9:.1f} GB, {free / 1e9:.1f} GB free"
            usage += f"  CPU {process.cpu_percent():.0f} %"
            if program and not asking.is_alive():
                asking = threading.Thread(target=ask, name="use of GPUs", daemon=True)
                asking.start()
        return usage + gpus

    return use


def _gpus() -> str:
    """Use and memory of each GPU; nothing where the driver does not say."""
    try:
        output = subprocess.run(QUERY, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
        rows = [[float(cell) for cell in line.split(",")] for line in output.splitlines()]
        return "".join(
            f"  GPU {i} {use:.0f} %, {taken / 1024:.1f} of {size / 1024:.1f} GiB"
            for i, (use, taken, size) in enumerate(rows)
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
