"""Checkpoints whose contents are known from their step alone, for tests that save, damage and restore them."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.training.checkpoint.checkpoint import Checkpoints


def bits(leaf: Any) -> tuple:
    """All that must be equal of a leaf."""
    if isinstance(leaf, jax.Array):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data, weak = (jax.random.key_data(leaf), False) if is_key else (leaf, leaf.weak_type)
        return (str(leaf.dtype), leaf.shape, np.asarray(data).tobytes(), weak, leaf.committed and leaf.sharding)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return (type(leaf), str(leaf.dtype), leaf.shape, leaf.tobytes())
    return (type(leaf), repr(leaf))


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        assert bits(a) == bits(b), jax.tree_util.keystr(path)


def step_progress(step: int, size: int = 1000) -> dict[str, Any]:
    """The progress that step `step` must hold, a function of the step alone."""
    values = np.random.default_rng(step).normal(size=size).astype(np.float32)
    return {"params": jnp.asarray(values), "step": jnp.int32(step), "key": jax.random.key(step)}


def fill(folder: Path, *steps: int, keep: int = 9, size: int = 1000) -> None:
    with closing(Checkpoints(folder, keep=keep)) as checkpoints:
        for step in steps:
            checkpoints.save(step, step_progress(step, size), {"step": step})


def restore(folder: Path, warnings: list[str] | None = None, size: int = 1000) -> tuple[int, dict] | None:
    """-> (step, metadata) of the newest, its values checked."""
    said: list[str] = [] if warnings is None else warnings
    with closing(Checkpoints(folder, warn=said.append)) as checkpoints:
        found = checkpoints.latest(step_progress(0, size))
    if found is None:
        return None
    assert_same(found.progress, step_progress(found.step, size))
    return found.step, found.metadata


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
