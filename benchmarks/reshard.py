"""Sharded transfer between processes: `python -m benchmarks.reshard [--model NAME] [--to grid:2x2] [--json FILE]`.

Four sending processes hold a model as global `jax.Array`s over a mesh of four, split along the first axis (fsdp:4).
Receiving processes need it as `--to` says: `tp:2x2` (two replicas of tensor-parallel serving), `grid:2x2` (both axes
split). Nobody has the whole model. The receivers compare what came with what it should be, bit by bit. A figure has

    seconds       of a round, from the first message to the last receiver's swap; the median of the repeats
    limit         seconds in which the sending processes, together, copy as many bytes in their own memory
    limit_ratio   median of seconds / limit, each pair measured one after the other
    work          seconds in which they copy as many bytes, digest them on the way, and digest the copy: a transfer
                  that is verified does that; `work_ratio` is the median of seconds / work
    lane_limit    by `tcp` alone: seconds in which bare sockets move as many bytes between the same processes, without
                  packing or digests (`stream`); `lane_ratio` is the median of seconds / lane_limit
    model_error   of `cost_model.sharded`: the median of its forecasts over that of the rounds, - 1. A forecast is made
                  right before each round (`model_errors`: over that round), from rounds of a part of the plan between
                  the same processes (`resharding.sample`), whose memory is not in `rss_ratio`
    stages        seconds of a round's stages, medians; `model_stages` are the forecasts of them
    rss_ratio     largest growth of a process's peak memory over that of its imports, / bytes of its shards; of
                  receivers in the first version, then with the version before beside it (`rss_ratio_next`)
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import results
from longhaul.bench.cases import sync as case
from longhaul.runtime import shared_memory
from longhaul.runtime.provenance import provenance
from longhaul.weight_sync import cost_model, digest, model_shapes, resharding, shard_lanes, sharded
from longhaul.weight_sync.resharding import Box, Layout
from longhaul.weight_sync.transports.tcp import NEAR

SENDERS = 4

ROWS = 1 << 20
"""Elements that are made or compared at once."""

SCRATCH = 128 << 20
"""Bytes of the memory that a sender copies to for the limit: more than its caches hold."""

SHARE = 0.2
"""Share of the bytes that a rehearsal moves."""

REHEARSALS = 5
"""Rounds of a forecast of each kind: of that share, and of next to nothing."""

DEADLINE = 120.0

DRAWN = 1 << 20
"""Bytes that a bare socket receives at once, at most."""


def shapes(model: str) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (shape, dtype) for name, shape, dtype in model_shapes.forms(model)}


def source(model: str) -> Layout:
    return resharding.sharded(shapes(model), SENDERS, 0)


def destination(model: str, word: str) -> Layout:
    """Layout of `grid:RxC`, both axes split, or one that `longhaul sync bench --layouts` knows."""
    if not word.startswith("grid:"):
        return case.layout_of(word, shapes(model))
    rows, columns = (int(each) for each in word.removeprefix("grid:").split("x"))

    def boxes(name: str, shape: tuple[int, ...]) -> list[tuple[int, Box]]:
        def box(i: int, j: int) -> Box:
            whole = [(0, size) for size in shape]
            whole[0] = shape[0] * i // rows, shape[0] * (i + 1) // rows
            if len(shape) > 1:
                whole[1] = shape[1] * j // columns, shape[1] * (j + 1) // columns
            return tuple(whole)

        return [(columns * i + j, box(i, j)) for i in range(rows) for j in range(columns)]

    return resharding.make(shapes(model), boxes)


def content(box: Box, number: int, version: int) -> np.ndarray:
    """Bits of a box of tensor `number`, uint16; one element in a hundred differs from the version before."""
    spans = [np.arange(a, b, dtype=np.uint32) for a, b in box]
    at = spans[0][:, None] * np.uint32(2654435761) if len(spans) > 1 else spans[0][:, None]
    at = at + (spans[1] * np.uint32(40503) if len(spans) > 1 else np.uint32(0)) + np.uint32(number * 977)
    bits = (at >> 7).astype(np.uint16)
    bits += ((at % 101) < version).astype(np.uint16)
    return bits.reshape([b - a for a, b in box])


def pieces(box: Box) -> Iterator[Box]:
    return resharding.parts(box, ROWS)


def memory(kind: str) -> int:
    """Bytes of this process's memory: VmRSS, or its peak VmHWM."""
    match = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# ---------------------------------------------------------------------------------------------------------------- ranks


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def sender(rank: int, where: str, model: str, to: str, world: str) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(world, SENDERS, rank)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    jax.device_put(np.zeros(8), jax.local_devices()[0]).block_until_ready()
    held, needed = source(model), destination(model, to)
    endpoint = sharded.Sender(where, rank, held, needed)
    shard_bytes = shard_lanes.shard(held, rank).size
    scratch = np.ones(min(SCRATCH, shard_bytes) + shared_memory.LINE, np.uint8)
    scratch = scratch[-scratch.ctypes.data % shared_memory.LINE :][: -shared_memory.LINE]
    verified(np.ones(1 << 20, np.uint8), scratch[: 1 << 20])  # loads its compiled loop, which is none of the transfer's
    before = memory("VmRSS")

    def arrays(version: int) -> dict[str, np.ndarray]:
        tensors = {}
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
        for number, (name, (shape, dtype)) in enumerate(shapes(model).items()):

            def part(index: Any, shape: Any = shape, number: int = number, dtype: str = dtype) -> np.ndarray:
                box = tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))
                whole = np.empty([b - a for a, b in box], np.uint16)
                for each in pieces(box):
                    own = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(each, box, strict=True))
                    whole[own] = content(each, number, version)
                return whole.view(np.dtype(dtype))

            tensors[name] = jax.make_array_from_callback(shape, sharding, part)
        layout = resharding.of_jax(tensors, lambda device: int(device.process_index))
        assert layout == held, "the arrays are sharded otherwise than planned"
        return sharded.of_jax(tensors, rank, lambda device: int(device.process_index))

    shards: dict[int, dict[str, np.ndarray]] = {}
    parts_of: list[tuple[sharded.Sender, Layout]] = []
    say("here")
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "make":
            shards = {version: shards[version] for version in shards if version == int(rest[1])}
            shards[int(rest[0])] = arrays(int(rest[0]))
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what making them took is none of the transfer's
            forget_peak()
            say(memory("VmRSS") - before)
        elif word == "push":
            version, base = int(rest[0]), int(rest[1])
            used = cpu()
            base_version = None if base < 0 else (base, shards[base])
            outcome = endpoint.push(version, shards[version], base=base_version, seconds=DEADLINE)
            del base_version  # else the version before would stay beside the next two
            say({**outcome._asdict(), "cpu": cpu() - used, "rss": memory("VmHWM") - before, "shard": shard_bytes})
        elif word == "open":
            layouts = resharding.sample(held, needed, float(rest[0]))
            parts_of.append((sharded.Sender(rest[1], rank, *layouts), layouts[0]))
            say("here")
        elif word == "rehearse":
            which, *numbers = (int(each) for each in rest)
            say(pushed_part(*parts_of[which], rank, shards, *numbers)._asdict())
        elif word == "shut":
            while parts_of:
                parts_of.pop()[0].close()
            forget_peak()
            say("shut")
        elif word in ("copy", "work"):  # as many bytes as a push sends
            parts = [resharding.raw(each) for each in shards[int(rest[0])].values()]
            left, began, used, at = int(rest[1]), time.perf_counter(), cpu(), 0
            while left > 0:
                for each in parts:
                    for start in range(0, min(len(each), left), 1 << 24):
                        data = each[start : min(start + (1 << 24), left)]
                        at = at if at + len(data) <= scratch.size else 0
                        if word == "copy":
                            np.copyto(scratch[at : at + len(data)], data)
                        else:
                            verified(data, scratch[at : at + len(data)])
                        at += -(-len(data) // shared_memory.LINE) * shared_memory.LINE
                    left -= len(each)
            del parts, each, data  # else the next version's peak would count this one
            say([time.perf_counter() - began, cpu() - used])
        elif word == "stream":
            say(poured(list(shards[int(rest[0])].values()), [tuple(map(int, each.split(":"))) for each in rest[1:]]))


def poured(arrays: Sequence[np.ndarray], ways: Sequence[tuple[int, int]]) -> list[float]:
    """Sends arrays' bytes by a bare socket to each (port, bytes); [when it began, CPU-seconds]."""
    began, used = time.perf_counter(), cpu()
    for port, left in ways:
        with shard_lanes.connected("127.0.0.1", port, DEADLINE) as sock:
            for part in itertools.cycle(map(resharding.raw, arrays)):
                sock.sendall(part[:left].data)
                left -= min(left, len(part))
                if not left:
                    break
    return [began, cpu() - used]


def drawn(server: socket.socket, count: int, scratch: np.ndarray) -> list[float]:
    """Receives all that comes by so many connections, at once, into memory; [when it ended, CPU-seconds]."""
    used = cpu()

    def draw(sock: socket.socket, room: memoryview) -> None:
        with sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NEAR)
            at = 0
            while got := sock.recv_into(room[at : at + DRAWN]):
                at = (at + got) % len(room)

    with server, ThreadPoolExecutor(count) as pool:
        room = len(scratch) // count
        for number in range(count):
            pool.submit(draw, server.accept()[0], scratch[number * room : (number + 1) * room].data)
    return [time.perf_counter(), cpu() - used]


def pushed_part(
    part: sharded.Sender,
    layout: Layout,
    rank: int,
    shards: dict[int, dict[str, np.ndarray]],
    number: int,
    version: int,
    base: int,
) -> sharded.Outcome:
    """Outcome of a rehearsal; `number` is that of its version, which has the content of `version`."""
    before = None if base < 0 else (number - 1, resharding.rows(layout, rank, shards[base]))
    return part.push(number, resharding.rows(layout, rank, shards[version]), base=before, seconds=DEADLINE)


def verified(data: np.ndarray, target: np.ndarray) -> None:
    """Copies bytes with a digest on the way, as senders do, and digests the copy, as receivers do."""
    assert digest.copied(data, target, past=True) == digest.digest(target)


def receiver(rank: int, where: str, model: str, to: str, gives: str = "") -> None:
    """`gives`: each version is handed over, as to an accelerator."""
    held, needed = source(model), destination(model, to)
    digest.compiled()  # what it imports is none of the transfer's
    shard_bytes = shard_lanes.shard(needed, rank).size
    scratch = np.ones(min(SCRATCH, shard_bytes), np.uint8)
    before = memory("VmRSS")
    forget_peak()
    peaks: list[int] = []  # at the end of each round: after the first one a second block is allocated
    decided = {"decided": lambda: peaks.append(memory("VmHWM"))}
    endpoint = sharded.Receiver(
        where,
        rank,
        held,
        needed,
        seconds=DEADLINE,
        hands_over=bool(gives),
        at=lambda stage: decided.get(stage, lambda: None)(),
    )
    boxes = shard_lanes.shard(needed, rank).boxes
    parts_of: list[sharded.Receiver] = []
    say("here")
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "open":
            parts_of.append(sharded.Receiver(rest[1], rank, *resharding.sample(held, needed, float(rest[0]))))
            say("here")
        elif word == "shut":
            while parts_of:
                parts_of.pop().close()
            time.sleep(0.3)  # their threads end
            gc.collect()
            forget_peak()
            say("shut")
        elif word == "check":
            version = int(rest[0])
            if gives:
                _, tensors = endpoint.take(DEADLINE)
            else:
                assert endpoint.wait(version, DEADLINE), endpoint.errors
                _, tensors = endpoint.latest()
            peak = peaks[-1] - before
            right = True
            for number, name in enumerate(shapes(model)):
                if name not in boxes:
                    continue
                for each in pieces(boxes[name]):
                    own = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(each, boxes[name], strict=True))
                    right &= bool(np.array_equal(tensors[name][own].view(np.uint16), content(each, number, version)))
            del tensors
            say({"right": right, "rss": peak, "shard": shard_bytes, "errors": endpoint.errors})
        elif word == "cpu":
            say(cpu())
        elif word == "stream":
            server = socket.create_server(("127.0.0.1", 0))
            say(server.getsockname()[1])
            say(drawn(server, int(rest[0]), scratch))


class Rank:
    """A rank in a process of its own."""

    def __init__(self, *words: str) -> None:
        variables = os.environ | {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
        command = [sys.executable, "-m", "benchmarks.reshard", "--rank", *words]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a rank has died; its message is above")
        return json.loads(line)


def together(ranks: Sequence[Rank], line: str) -> list[Any]:
    for each in ranks:
        each.say(line)
    return [each.answer() for each in ranks]


# ------------------------------------------------------------------------------------------------------------ measuring


def streamed(
    senders: Sequence[Rank], receivers: Sequence[Rank], plan: resharding.Plan, version: int
) -> tuple[float, float]:
    """(seconds, CPU-seconds of all) in which bare sockets move as many bytes between the ranks as a plan."""
    nbytes: Counter[tuple[int, int]] = Counter()
    for move in plan.moves:
        nbytes[move.source, move.destination] += move.nbytes
    for rank, each in enumerate(receivers):
        each.say(f"stream {sum(to == rank for _, to in nbytes)}")
    ports = [each.answer() for each in receivers]
    for rank, each in enumerate(senders):  # as `Sender`: not all begin with the same receiver
        order = (*range(rank % len(ports), len(ports)), *range(rank % len(ports)))
        ways = [f"{ports[to]}:{nbytes[rank, to]}" for to in order if nbytes[rank, to]]
        each.say(f"stream {version} {' '.join(ways)}")
    began, ended = (np.array([each.answer() for each in side]) for side in (senders, receivers))
    return float(ended[:, 0].max() - began[:, 0].min()), float(ended[:, 1].sum() + began[:, 1].sum())


class Group(NamedTuple):
    held: Layout
    needed: Layout
    lane: str
    plan: resharding.Plan


def rehearsed(senders: Sequence[Rank], receivers: Sequence[Rank], group: Group, version: int, base: int) -> Any:
    """Forecast of a round that follows, by stages: from rounds of a part of it, and of next to nothing."""
    coordinators = []
    rounds: list[list[cost_model.Rehearsal]] = [[], []]
    try:
        for share in (0.0, SHARE):
            layouts = resharding.sample(group.held, group.needed, share)
            coordinators.append(sharded.Coordinator("127.0.0.1:0", *layouts, lane=group.lane, seconds=DEADLINE))
            together([*senders, *receivers], f"open {share} {coordinators[-1].address}")
        numbers = [0, 0]
        for _ in range(REHEARSALS + 1):
            for which, share in enumerate((0.0, SHARE)):
                for now, before in ((version, -1),) if base < 0 else ((base, -1), (version, base)):
                    outcome = sharded.Outcome(
                        **together(senders, f"rehearse {which} {numbers[which]} {now} {before}")[0]
                    )
                    assert outcome.committed, outcome
                    numbers[which] += 1
                rounds[which].append(rehearsal(resharding.plan(*resharding.sample(group.held, group.needed, share)),
                                               outcome))  # fmt: skip
        together([*senders, *receivers], "shut")
    finally:
        for each in coordinators:
            each.close()
    whole = rehearsal(group.plan, outcome)
    return cost_model.sharded(whole.sent, whole.received, *(each[1:] for each in rounds))  # the first ones allocate


def rehearsal(plan: resharding.Plan, outcome: sharded.Outcome) -> cost_model.Rehearsal:
    busiest = (max(count for _, count in side) for side in (plan.sent, plan.received))
    return cost_model.Rehearsal(*busiest, outcome.prepared, outcome.sent, outcome.ready, outcome.seconds)


def measured(model: str, to: str, lane: str, repeats: int, changes: bool, gives: bool) -> dict[str, Any]:
    held, needed = source(model), destination(model, to)
    coordinator = sharded.Coordinator("127.0.0.1:0", held, needed, lane=lane, seconds=DEADLINE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        world = f"127.0.0.1:{free.getsockname()[1]}"
    where = coordinator.address
    senders = [Rank("sender", str(rank), where, model, to, world) for rank in held.ranks]
    receivers = [Rank("receiver", str(rank), where, model, to, *["gives"] * gives) for rank in needed.ranks]
    plan = resharding.plan(held, needed)
    group, sent = Group(held, needed, lane, plan), dict(plan.sent)
    try:
        assert {each.answer() for each in (*senders, *receivers)} == {"here"}
        seconds, rss = [], []
        compared: dict[str, list[tuple[float, float]]] = {"copy": [], "work": []}  # (seconds, of all CPUs)
        if lane == "tcp":
            compared["stream"] = []
        used: list[float] = []
        stages: list[list[float]] = []
        forecasts: list[cost_model.Cost] = []
        for version in range(1, repeats + 1):
            base = version - 1 if changes and version > 1 else -1
            together(senders, f"make {version} {base}")
            for word in ("copy", "work"):
                for rank, each in enumerate(senders):
                    each.say(f"{word} {version} {sent[rank]}")
                took = np.array([each.answer() for each in senders])
                compared[word].append((took[:, 0].max(), took[:, 1].sum()))
            forecasts.append(rehearsed(senders, receivers, group, version, base))
            if lane == "tcp":
                compared["stream"].append(streamed(senders, receivers, plan, version))
            cpu_before = sum(together(receivers, "cpu 0"))
            pushed = together(senders, f"push {version} {base}")
            assert all(each["committed"] for each in pushed), pushed
            used.append(sum(each["cpu"] for each in pushed) + sum(together(receivers, "cpu 0")) - cpu_before)
            checked = together(receivers, f"check {version}")
            assert all(each["right"] for each in checked), checked
            seconds.append(pushed[0]["seconds"])
            ends = [0.0, *(pushed[0][each] for each in ("prepared", "sent", "ready", "seconds"))]
            stages.append([end - begin for begin, end in itertools.pairwise(ends)])
            rss.append([max(each["rss"] / each["shard"] for each in side) for side in (pushed, checked)])
    finally:
        for each in (*senders, *receivers):
            each.process.kill()
            each.process.communicate()
        coordinator.close()
    later = slice(min(1, repeats - 1), None)  # without the first version, which allocates
    ratios = {
        word: [own / took for own, (took, _) in zip(seconds, each, strict=True)] for word, each in compared.items()
    }
    forecast = statistics.median(each.serial for each in forecasts[later])
    middle = {word: np.median(each, 0).tolist() for word, each in compared.items()}
    record: dict[str, Any] = {
        "name": "reshard",
        "config": {
            "model": model, "image_bytes": held.nbytes, "source": f"fsdp:{SENDERS}", "destination": to, "lane": lane,
            "changes": changes, "hands_over": gives, "repeats": repeats, "rehearsed_share": SHARE,
            "moves": sum(len(bucket) for bucket in plan.buckets),
        },
        "moved_bytes": plan.nbytes,
        "sent_bytes": pushed[0]["nbytes"],
        "seconds": statistics.median(seconds[later]),
        "seconds_first": seconds[0],
        "cpu_seconds": statistics.median(used[later]),
        "limit": middle["copy"][0],
        "limit_cpu_seconds": middle["copy"][1],
        "limit_ratio": statistics.median(ratios["copy"][later]),
        "limit_ratio_first": ratios["copy"][0],
        "work": middle["work"][0],
        "work_cpu_seconds": middle["work"][1],
        "work_ratio": statistics.median(ratios["work"][later]),
        **({"lane_limit": middle["stream"][0], "lane_limit_cpu_seconds": middle["stream"][1],
            "lane_ratio": statistics.median(ratios["stream"][later]),
            "all_lane_limits": [took for took, _ in compared["stream"]]} if lane == "tcp" else {}),
        "all_seconds": seconds,
        "all_limits": [took for took, _ in compared["copy"]],
        "rss_ratio": {"senders": max(each[0] for each in rss), "receivers": rss[0][1]},
        "rss_ratio_next": max((each[1] for each in rss[1:]), default=None),
        "stages": np.median(stages[later], 0).tolist(),
        "model_stages": np.median([[term.seconds for term in each.terms] for each in forecasts[later]], 0).tolist(),
        "model_seconds": forecast,
        "model_error": forecast / statistics.median(seconds[later]) - 1.0,
        "model_errors": [each.serial / took - 1.0 for each, took in zip(forecasts, seconds, strict=True)],
        "bit_exact": True,
        "device": ", ".join(provenance()["devices"]),
    }  # fmt: skip
    return record


def main(words: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] == ["--rank"]:
        role, rank, *rest = words[1:]
        sender(int(rank), *rest) if role == "sender" else receiver(int(rank), *rest)
        return 0
    parser = results.parser(__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--to", nargs="+", default=["grid:2x2"])
    parser.add_argument("--lane", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--changes", action="store_true", help="versions after the first as changes")
    parser.add_argument(
        "--hands-over", action="store_true", help="receivers give each version away, and have one block"
    )
    args = parser.parse_args(words)
    for to in args.to:
        for lane in args.lane:
            results.emit(measured(args.model, to, lane, args.repeats, args.changes, args.hands_over), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
