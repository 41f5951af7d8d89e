"""Device banks in shared memory: written once by one process, mapped by others, which read them without a copy."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import google_crc32c
import jax
import numpy as np

from longhaul.driving.scenario.lane_graph import Roadmap
from longhaul.driving.sim.config import Config
from longhaul.driving.sim.device_bank import DeviceBank, Lights, Lines, Paths
from longhaul.runtime import shared_memory
from longhaul.runtime.shared_memory import Leaf

PARTS: dict[str, Any] = {"routes": Lines, "lines": Lines, "lights": Lights, "paths": Paths, "map": Roadmap}
"""Types of the fields of a bank that are no arrays."""

Rows = Sequence[Sequence[Any]]
"""(name, shape, dtype) of each array, as JSON can hold it."""


class Shared(NamedTuple):
    """Bank in shared memory."""

    descriptor: int
    rows: Rows


@contextmanager
def sharing(bank: DeviceBank) -> Iterator[Shared]:
    """Copy of a bank of NumPy arrays in shared memory, which lasts until the block is left and the last process that
    mapped it ends."""
    named = {name: np.asarray(leaf) for name, leaf in _leaves(bank)}
    rows = [(name, leaf.shape, leaf.dtype.name) for name, leaf in named.items()]
    plan = _plan(rows)
    descriptor = shared_memory.create(plan.size)
    try:
        for name, view in shared_memory.arrays(descriptor, plan).items():
            view[...] = named[name]
        yield Shared(descriptor, rows)
    finally:
        os.close(descriptor)


def mapped(descriptor: int, rows: Rows) -> DeviceBank:
    """Bank in shared memory, as NumPy arrays that can't be written."""
    views = shared_memory.arrays(descriptor, _plan(rows))
    tree: dict[str, Any] = {}
    for name, view in views.items():
        view.flags.writeable = False
        *path, last = name.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = view
    bank: DeviceBank = _made(DeviceBank, tree)
    return bank


def digest(bank: DeviceBank, config: Config) -> str:
    """Digest of a bank of NumPy arrays and of the way to drive in it, behind what it is of."""
    sums = [(name, google_crc32c.value(np.ascontiguousarray(leaf).tobytes())) for name, leaf in _leaves(bank)]
    plain = replace(config, reward=None)  # a function of the user's own: its name depends on the process
    return f"scenarios and settings {hashlib.sha256(repr((sums, plain)).encode()).hexdigest()[:16]}"


def _leaves(bank: DeviceBank) -> list[tuple[str, Any]]:
    """(name, array) of each array: "routes.points" ..."""
    return [(jax.tree_util.keystr(path)[1:], leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(bank)]


def _plan(rows: Rows) -> shared_memory.Plan:
    return shared_memory.plan((name, Leaf(tuple(shape), dtype)) for name, shape, dtype in rows)


def _made(kind: Any, tree: dict[str, Any]) -> Any:
    """Tuple of named fields; those that `tree` lacks are None."""
    values = {name: tree.get(name) for name in kind._fields}
    return kind(**{name: _made(PARTS[name], v) if isinstance(v, dict) else v for name, v in values.items()})
