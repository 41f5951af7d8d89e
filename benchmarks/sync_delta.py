"""Size and speed of deltas on a real training: `python -m benchmarks.sync_delta [--rates ...] [--json FILE]`.

`sync_training` pretrains a small transformer once and branches it at each learning rate; of the bf16 parameters of the
second half of a branch, every update's delta is taken, tensor by tensor. Prints a JSON object a learning rate and
operation: `encode`; `decode` (the base copied and changed, its digest known from the version before, as a receiver has
it); `decode-unknown` (the base is digested, too); `apply` (in place, known). Bytes and seconds are of dense parameters.

    ratio        dense bytes / bytes of all frames, heads and digests included
    independent  the same where changes were independent: the entropy of which elements change, and by how many units
    bound        bytes of the frames / that entropy: below 1, since which elements change follows from their exponents
    xor          the same ratio by XOR and zstd -1; gaps_values: by zstd -1 of byte gaps and of new values
    memcpy       bytes a CPU-second that copying the same took in between, as a measure of how busy the machine is
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zstandard

from benchmarks import results, sync_training
from longhaul.bench import harness
from longhaul.runtime.provenance import provenance
from longhaul.weight_sync.delta import tensor_delta
from longhaul.weight_sync.digest import digest
from tests.helpers import delta_oracle

RATES = (1e-6, 3e-6, 1e-5, 1e-4, 3e-4)

UPDATES = 32

LEAST = 100 * 10**6
"""Bytes that are timed at once, at least: the model is repeated."""


def main(words: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--pretraining", type=int, default=sync_training.PRETRAINING)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(words)
    used = harness.cpu_seconds()
    params, loss = sync_training.pretrained(args.pretraining)
    device = ", ".join(provenance()["devices"])
    config = {"params": sum(map(np.size, params.values())), "updates": args.updates, "loss": loss}
    config |= {"pretraining": args.pretraining, "pretraining_cpu_seconds": harness.cpu_seconds() - used}
    for rate in args.rates:
        used = harness.cpu_seconds()
        taken = list(sync_training.snapshots(params, rate, args.updates))
        training = {"learning_rate": rate, "training_cpu_seconds": harness.cpu_seconds() - used}
        found = sizes(taken[args.updates // 2 :])
        for operation, row in speeds(taken[-2], taken[-1], args.repeats).items():
            line = {"name": "sync-delta", "config": config | training | {"operation": operation}} | row
            results.emit(line | {"repeats": args.repeats, **found, "device": device}, args.json)
    return 0


def sizes(taken: Sequence[dict[str, np.ndarray]]) -> dict[str, float]:
    """Ratios over all updates between the snapshots, and the share of elements that an update changes."""
    dense = ours = 0
    others = {"xor": 0, "gaps_values": 0}
    entropy, shares = 0.0, []
    packed = zstandard.ZstdCompressor(level=1)
    for before, after in itertools.pairwise(taken):
        pairs = [(before[name].reshape(-1).view(np.uint16), after[name].reshape(-1).view(np.uint16)) for name in before]
        for base, new in pairs:
            dense += new.nbytes
            ours += len(tensor_delta.encode(base, new, "bfloat16"))
            others["xor"] += len(packed.compress((base ^ new).tobytes()))
            at = np.flatnonzero(base != new)
            gaps = np.diff(at, prepend=-1) - 1
            escaped = np.insert(gaps % 255, np.repeat(np.arange(gaps.size), gaps // 255), 255).astype(np.uint8)
            others["gaps_values"] += len(packed.compress(escaped.tobytes()))
            others["gaps_values"] += len(packed.compress(new[at].tobytes()))
        base, new = (np.concatenate(each) for each in zip(*pairs))
        entropy += independent(base, new)
        shares.append(float((base != new).mean()))
    found = {"changed": statistics.fmean(shares), "ratio": dense / ours, "independent": 8 * dense / entropy}
    return found | {"bound": 8 * ours / entropy} | {name: dense / size for name, size in others.items()}


def independent(base: np.ndarray, new: np.ndarray) -> float:
    """Bits that independent changes need: which elements change, and by how many units in the last place."""
    share = (base != new).mean()
    if not 0.0 < share < 1.0:
        return 1.0
    steps = (delta_oracle.keys(new) - delta_oracle.keys(base))[base != new]
    counts = np.unique(steps, return_counts=True)[1]
    positions = -base.size * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    return float(positions - (counts * np.log2(counts / counts.sum())).sum())


def speeds(before: dict[str, np.ndarray], after: dict[str, np.ndarray], repeats: int) -> dict[str, dict[str, Any]]:
    """operation -> medians; operations take turns, so that all meet the same load."""
    base, new = (np.concatenate([leaf.reshape(-1) for leaf in tree.values()]) for tree in (before, after))
    times = -(-LEAST // base.nbytes)
    base, new = np.tile(base, times).view(np.uint16), np.tile(new, times).view(np.uint16)
    known, out, staging = digest(base), np.empty_like(base), base.copy()
    frame = tensor_delta.encode(base, new, "bfloat16")
    work: dict[str, Callable[[], Any]] = {
        "encode": lambda: tensor_delta.encode(base, new, "bfloat16"),
        "decode": lambda: tensor_delta.decode(base, frame, out, known=known),
        "decode-unknown": lambda: tensor_delta.decode(base, frame, out),
        "apply": lambda: tensor_delta.apply(staging, frame, known=known),
        "memcpy": lambda: np.copyto(staging, base),
    }
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for i in range(repeats + 1):
        for name, call in work.items():
            used, began = harness.cpu_seconds(), time.perf_counter()
            call()
            if i:
                rows[name].append((time.perf_counter() - began, harness.cpu_seconds() - used))
    assert np.array_equal(out, new)
    middle = {name: [statistics.median(each) for each in zip(*found)] for name, found in rows.items()}
    copied = base.nbytes / middle.pop("memcpy")[1]
    return {
        name: {
            "steps": base.nbytes, "unit": "bytes", "wall_seconds": wall, "cpu_seconds": cpu,
            "per_second": base.nbytes / wall, "per_cpu_second": base.nbytes / cpu, "compile_seconds": 0.0,
            "memcpy": copied,
        }
        for name, (wall, cpu) in middle.items()
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
