"""Copies on the host of what trains on: exact, untouched by what trains, in the same memory each time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.runtime import mesh as meshes
from longhaul.training.checkpoint.checkpoint import LEAST, Checkpoints, Staging

ROWS = LEAST // 4 // 256


def progress(devices: int, add: float) -> dict[str, jax.Array]:
    """Split, copied, of 16 bits, and a small one."""
    mesh = meshes.make_mesh(devices)
    x = jnp.arange(ROWS * 256, dtype=jnp.float32).reshape(ROWS, 256) + add
    return {
        "split": jax.device_put(x, meshes.sharded(mesh)),
        "copied": jax.device_put(x * 2.0, meshes.replicated(mesh)),
        "half": jax.device_put(jnp.concatenate([x, x]).astype(jnp.float16), meshes.sharded(mesh)),
        "small": jax.device_put(x[:1], meshes.replicated(mesh)),
    }


def places(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


train = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)


def test_copies_are_exact_and_what_trains_on_leaves_them_alone() -> None:
    staging = Staging()
    for add in (0.0, 5.0):
        tree = progress(4, add)
        wanted = {name: np.array(array) for name, array in tree.items()}
        copy = staging.copy(tree)
        before = {name: places(array) for name, array in tree.items()}
        tree = jax.block_until_ready(train(tree))
        for name in ("split", "copied", "half"):
            assert places(tree[name]) == before[name], "a donated buffer is used in place: nobody reads it any more"
            assert copy[name].sharding == tree[name].sharding
            np.testing.assert_array_equal(np.asarray(copy[name]), wanted[name])
    assert len(set(places(copy["copied"]))) == 1, "devices that hold the same share its copy"


def test_memory_is_used_again_and_what_is_small_is_left_as_it_is() -> None:
    staging, tree = Staging(), progress(2, 0.0)
    first = {name: places(array) for name, array in staging.copy(tree).items()}
    again = {name: places(array) for name, array in staging.copy(progress(2, 1.0)).items()}
    for name in ("split", "copied", "half"):
        assert first[name] == again[name] != places(tree[name])
    assert first["small"] == places(tree["small"])
    host: Any = {"a": np.zeros(LEAST), "b": 3}
    assert staging.copy(host)["a"] is host["a"]


def test_a_save_under_way_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    """Saves one after the other, each into the memory of the one before, while what they save is overwritten."""
    with_saves = Checkpoints(tmp_path, keep=4)
    wanted = {}
    for step in range(3):
        tree = progress(4, float(step))
        wanted[step] = {name: np.array(array) for name, array in tree.items()}
        with_saves.save(step, tree)
        tree = jax.block_until_ready(train(tree))
    with_saves.close()
    for step in (2, 1, 0):
        restored = Checkpoints(tmp_path).latest(progress(2, 0.0))
        assert restored is not None and restored.step == step
        for name, array in restored.progress.items():
            np.testing.assert_array_equal(np.asarray(array), wanted[step][name])
        shutil.rmtree(tmp_path / str(step))
