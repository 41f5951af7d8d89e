"""Other ways to bring a model's parameters from one process to two, each in turns with ours and with the limit.

What `longhaul sync bench --peers` runs. A repeat is one transfer by the other way, one of ours (shared memory, verified
once), and a private copy of shared memory in each receiver: the limit. So all three meet the same load, and ratios
between them compare across ways. The time is from the start of sending until the last receiver has all tensors in
memory that it may read: its own, or, by ours, mapped and verified. Receivers are there, and warmed up by two transfers
of each, after which both sides' digests must agree.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from longhaul.bench.cases.sync_ways import RECEIVERS, WAYS, Copy, Memory, Ours, Way


def _ends(rank: int, name: str, memory: Memory) -> dict[str, Way]:
    """This process's ends, in the order in which both sides must meet."""
    return {"limit": Copy(rank, memory), "theirs": WAYS[name].way(rank, memory), "ours": Ours(rank, memory)}


def serve(rank: int, name: str, model: str, folder: str, orders: Any) -> None:
    """A receiver's process: one transfer an order, which is a way and whether to digest what came."""
    memory = Memory(rank, model, folder)
    ends = _ends(rank, name, memory)
    orders.send(None)
    while order := orders.recv():
        used, began = time.process_time(), time.monotonic()
        came = ends[order[0]].receive()
        at = (began, time.monotonic(), time.process_time() - used)
        orders.send((*at, memory.digest(came) if order[1] else ""))
        del came  # or an image would stay lent
    for each in ends.values():
        each.close()
    orders.send(None)
    memory.close(False)


class Took(NamedTuple):
    """A transfer: seconds, and CPU-seconds of all processes."""

    wall: float
    cpu: float


def measure(name: str, model: str, repeats: int) -> dict[str, Any]:
    """The figure of one way: medians of repeats, and of the ratios within them. RuntimeError where other bytes came."""
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    folder = tempfile.mkdtemp(prefix="sync-peers-")
    memory = Memory(0, model, folder)
    for rank in range(1, RECEIVERS + 1):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(rank, name, model, folder, theirs), daemon=True))
        processes[-1].start()
        theirs.close()  # so that the pipe ends with its process
        pipes.append(mine)
    ends = _ends(0, name, memory)
    for pipe in pipes:
        pipe.recv()
    right = memory.digest(memory.tensors.values())

    def transfer(which: str, check: bool = False) -> Took:
        ends[which].clear()
        used, began = time.process_time(), time.monotonic()
        for pipe in pipes:
            pipe.send((which, check))
        ends[which].send()
        found = [pipe.recv() for pipe in pipes]
        used = time.process_time() - used
        if check and {each[-1] for each in found} != {right}:
            raise RuntimeError(f"{name}: what came by {which} is not what was sent")
        # Nothing is sent for the limit: its time begins with the first who copies.
        start = min(each[0] for each in found) if which == "limit" else began
        return Took(max(each[1] for each in found) - start, used + sum(each[2] for each in found))

    try:
        for which in 2 * list(ends):  # twice: our two images are touched then
            transfer(which, check=True)
        rows = [{which: transfer(which) for which in ends} for _ in range(repeats)]
        for pipe in pipes:
            pipe.send(None)
            pipe.recv()
    finally:
        for each in ends.values():
            each.close()
        for process in processes:
            process.join(10)
            process.kill()
        ends.clear()
        memory.close(True)
        shutil.rmtree(folder, ignore_errors=True)
    about = {"name": "sync-peer", "peer": name, "model": model, "receivers": RECEIVERS, "repeats": repeats}
    return about | condensed(rows) | {"load": os.getloadavg()[0]}


def condensed(rows: list[dict[str, Took]]) -> dict[str, float]:
    """Medians: `limit_ratio` is of the other way's time to the limit's, `times_ours` to ours, each within a repeat."""

    def middle(of: Callable[[dict[str, Took]], float]) -> float:
        return statistics.median(of(row) for row in rows)

    return {
        "wall_seconds": middle(lambda row: row["theirs"].wall),
        "cpu_seconds": middle(lambda row: row["theirs"].cpu),
        "limit_seconds": middle(lambda row: row["limit"].wall),
        "limit_cpu_seconds": middle(lambda row: row["limit"].cpu),
        "ours_seconds": middle(lambda row: row["ours"].wall),
        "ours_cpu_seconds": middle(lambda row: row["ours"].cpu),
        "limit_ratio": middle(lambda row: row["theirs"].wall / row["limit"].wall),
        "ours_limit_ratio": middle(lambda row: row["ours"].wall / row["limit"].wall),
        "times_ours": middle(lambda row: row["theirs"].wall / row["ours"].wall),
        "cpu_times_ours": middle(lambda row: row["theirs"].cpu / row["ours"].cpu),
    }
