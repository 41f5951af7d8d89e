"""Time that a save holds training up, and whether what it wrote is exact: `python -m benchmarks.checkpoint_stall`.

A stand-in of training updates `--bytes` of random float32 in place (its buffers are donated, as in training) over
`--devices` forced CPU devices. In each repeat it saves once through `longhaul.training.checkpoint.checkpoint`, and
goes on updating until
the checkpoint is durable: digests, manifest, name. Taken are

    blocked_seconds   of `save` itself, in which training stands
    first_seconds     by which the update after it is longer than the slowest of those before: a copy of donated buffers
    whole_seconds     from the call of `save` to a durable checkpoint
    stall             (blocked + first) / whole: the bar is 0.05

Beside the save the updates share cores with what compresses, writes and digests: `during_seconds` and `before_seconds`
are the medians of an update then and before. At last the checkpoint is restored on one device and on half of them, and
each byte compared. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import results

STALL = 0.05
"""The most of a save's own time that it may hold up training."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=float, default=1e9)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where checkpoints go; a temporary folder by default")
    args = parser.parse_args()
    os.environ.setdefault("NPROC", str(max(4, args.devices)))
    import jax

    jax.config.update("jax_num_cpu_devices", args.devices)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        record = measure(Path(folder), int(args.bytes), args.devices, args.repeats)
    results.emit(record)
    return int(record["stall"] >= STALL or not record["exact"])


def measure(folder: Path, size: int, devices: int, repeats: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from longhaul.runtime import mesh as meshes
    from longhaul.training.checkpoint.checkpoint import Checkpoints

    mesh = meshes.make_mesh(devices)
    rows = size // 4 // 8 // 1024 // devices * devices
    draw = jax.jit(
        lambda key: {f"w{i}": jax.random.normal(jax.random.fold_in(key, i), (rows, 1024)) for i in range(8)},
        out_shardings=meshes.sharded(mesh),
    )
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0.999 + 0.001, tree), donate_argnums=0)
    tree = jax.block_until_ready(draw(jax.random.key(0)))

    def step(tree: Any) -> tuple[Any, float]:
        began = time.perf_counter()
        tree = jax.block_until_ready(update(tree))
        return tree, time.perf_counter() - began

    taken: list[dict[str, float]] = []
    with_saves = Checkpoints(folder / "checkpoints", keep=1)
    for repeat in range(repeats + 1):  # the first one imports Orbax
        before = []
        for _ in range(5):
            tree, seconds = step(tree)
            before.append(seconds)
        kept = jax.device_get(tree) if repeat == repeats else None
        began = time.perf_counter()
        with_saves.save(repeat, tree)
        blocked = time.perf_counter() - began
        during = []
        while with_saves.saving() or not during:
            tree, seconds = step(tree)
            during.append(seconds)
        whole = time.perf_counter() - began
        with_saves.wait()
        first = max(0.0, during[0] - max(before))
        taken.append(
            {"blocked_seconds": blocked, "first_seconds": first, "whole_seconds": whole,
             "before_seconds": statistics.median(before), "during_seconds": statistics.median(during),
             "stall": (blocked + first) / whole}
        )  # fmt: skip
    with_saves.close()
    exact = True
    for fewer in {1, max(1, devices // 2)}:
        layout = meshes.sharded(meshes.make_mesh(fewer))
        like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout) for name, leaf in tree.items()}
        restored = Checkpoints(folder / "checkpoints").latest(like)
        assert restored is not None and kept is not None
        for name, leaf in restored.progress.items():
            exact &= leaf.sharding == layout and jax.device_get(leaf).tobytes() == kept[name].tobytes()
    middle = {name: round(statistics.median(row[name] for row in taken[1:]), 4) for name in taken[0]}
    return {
        "name": "checkpoint-stall", "bytes": sum(jnp.size(x) * 4 for x in tree.values()), "devices": devices,
        "repeats": repeats, **middle, "worst_stall": round(max(row["stall"] for row in taken[1:]), 4), "bar": STALL,
        "exact": exact,
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
