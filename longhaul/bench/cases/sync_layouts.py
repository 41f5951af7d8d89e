"""Case of `longhaul sync bench --layouts`: planning the moves from one layout of a model to another.

It works by shapes alone, so a model of any size is planned; its layers are alike, so one of them is. Where both layouts
of that layer are small, the moves are also made between arrays, and the result is compared with the layout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from longhaul.runtime.provenance import provenance
from longhaul.weight_sync import cost_model, model_shapes
from longhaul.weight_sync.manifest import numpy_dtype
from longhaul.weight_sync.resharding.layout import Box, Layout, Shapes, replicas, replicated, sharded
from longhaul.weight_sync.resharding.plan import Plan, execute_numpy, plan

SMALL = 256 << 20
"""Bytes of both layouts on all ranks, up to which the moves are made."""

BY_ROWS = ("o_proj", "down_proj")
"""Kernels that tensor-parallel serving splits along their input; all other matrices along their output."""


def parsed(word: str) -> tuple[str, int, int]:
    """(kind, replicas, ranks of each) of a layout: `tp:16x8` -> ("tp", 16, 8). ValueError for a wrong one."""
    kind, _, sizes = word.partition(":")
    count, _, each = sizes.rpartition("x")
    numbers = [count or "1", each]
    if kind not in KINDS or not all(each.isascii() and each.isdigit() and 0 < int(each) <= 4096 for each in numbers):
        raise ValueError(
            f"{word!r} is no layout; write {', '.join(f'{kind}:N' for kind in KINDS)} (N ranks, 1 to 4096) or "
            "tp:MxN (M replicas of it)"
        )
    return kind, int(numbers[0]), int(numbers[1])


def _tensor_parallel(name: str, shape: tuple[int, ...]) -> int | None:
    if len(shape) < 2:
        return None
    return 1 if any(part in name for part in BY_ROWS) else 0


KINDS: dict[str, Callable[[Shapes, int], Layout]] = {
    "replicated": replicated,
    "fsdp": sharded,
    "tp": lambda shapes, ranks: sharded(shapes, ranks, _tensor_parallel),
}
"""Kinds of layouts: every tensor on each rank; split along its first axis; split as tensor-parallel serving does."""


def layout_of(word: str, shapes: Shapes) -> Layout:
    """Layout of these tensors by its word."""
    kind, count, ranks = parsed(word)
    one = KINDS[kind](shapes, ranks)
    return replicas(one, count) if count > 1 else one


def measure(model: str, source: str, destination: str, delta_ratio: float = 50.0) -> Iterator[dict[str, Any]]:
    """Figure of one plan. ValueError for words that are no layouts, or an unknown model."""
    (_, m, n), (kind, count, each) = parsed(source), parsed(destination)
    count, each = (each, count) if kind == "replicated" else (count, each)  # each rank has all of it
    forms = model_shapes.forms(model)
    params = sum(math.prod(shape) for _, shape, _ in forms)
    shapes = {name: (shape, dtype) for name, shape, dtype in model_shapes.forms(model, layers=1) if ".layers." in name}
    held, needed = layout_of(source, shapes), layout_of(destination, shapes)
    used, began = time.process_time(), time.perf_counter()
    moves = plan(held, needed)
    planned = {"plan_seconds": time.perf_counter() - began, "plan_cpu_seconds": time.process_time() - used}
    setting = cost_model.Setting(float(params), 2.0, m * n, count, each, delta_ratio=delta_ratio)
    about = provenance()
    yield {
        "name": "sync-layouts",
        "config": {
            "model": model, "params": params, "layers": model_shapes.DECODERS[model].layers, "tensors": len(forms),
            "image_bytes": 2 * params, "source": source, "destination": destination, "planned_layers": 1,
            "delta_ratio": delta_ratio,
        },
        "layer_bytes": held.nbytes,
        **planned,
        "moves": sum(len(bucket) for bucket in moves.buckets),
        "buckets": len(moves.buckets),
        "moved_bytes": moves.nbytes,
        "most_sent_bytes": max((size for _, size in moves.sent), default=0),
        "most_received_bytes": max((size for _, size in moves.received), default=0),
        "verified": _size(held) + _size(needed) <= SMALL and _moved(moves, held, needed),
        "model_seconds": {each.name: each.pipelined for each in cost_model.costs(setting)},
        **{key: about[key] for key in ("versions", "commit")},
    }  # fmt: skip


def _size(of: Layout) -> int:
    """Bytes of all parts on all ranks."""
    return sum(_elements(box) * tensor.itemsize for tensor in of.tensors for _, box in tensor.boxes)


def _elements(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)


def _moved(what: Plan, held: Layout, needed: Layout) -> bool:
    """Makes the moves between arrays; returns True. RuntimeError where a part differs from its layout."""
    random = np.random.default_rng(0)
    whole = {
        tensor.name: random.integers(0, 1 << 16, tensor.shape, np.uint16).view(numpy_dtype(tensor.dtype))
        for tensor in held.tensors
    }
    parts: dict[int, dict[str, np.ndarray]] = {rank: {} for rank in held.ranks}
    into: dict[int, dict[str, np.ndarray]] = {rank: {} for rank in needed.ranks}
    for tensor in held.tensors:
        for rank, box in tensor.boxes:
            parts[rank][tensor.name] = np.ascontiguousarray(_part(whole[tensor.name], box))
    for tensor in needed.tensors:
        for rank, box in tensor.boxes:
            into[rank][tensor.name] = np.zeros([end - begin for begin, end in box], whole[tensor.name].dtype)
    execute_numpy(what, parts, into)
    for tensor in needed.tensors:
        for rank, box in tensor.boxes:
            came, expected = into[rank][tensor.name], _part(whole[tensor.name], box)
            if not np.array_equal(came.view(np.uint16), np.ascontiguousarray(expected).view(np.uint16)):
                raise RuntimeError(f"rank {rank} has another {tensor.name} than it should")
    return True


def _part(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(begin, end) for begin, end in box)]
