"""What is restored is what was saved, bit for bit; what doesn't fit is refused; of old steps the asked-for stay."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from longhaul.runtime import mesh as meshes
from longhaul.training.checkpoint.checkpoint import LEAST, Checkpoints, Staging
from longhaul.types import Progress
from tests.helpers.checkpoints import assert_same, fill, names, step_progress

ODD_FLOATS = np.array([0x7FC00001, 0xFFC12345, 0x7FA00001, 0x80000000, 1, 0xFF800000], np.uint32).view(np.float32)
"""Three NaNs with payloads, -0.0, a subnormal number, -inf."""


def every_leaf() -> Progress:
    """A progress with each kind of leaf that algorithms, collectors and optimisers hold."""
    state = {
        "odd": jnp.asarray(ODD_FLOATS),
        "minus zeros": jnp.full((4, 3), -0.0),  # equal to the fill value, which stores may leave out
        "a/b": jnp.arange(6, dtype=jnp.int8).reshape(2, 3),
        "a": {"b": jnp.array([True, False])},
        "é\n'": jnp.asarray(np.float32(2.5)).astype(jnp.bfloat16),
        "half": jnp.array([1.5, -0.0], jnp.float16),
        "wide": np.array([2**62 + 1, -1]),
        "double": np.float64(-0.0),
        "complex": np.array([1 + 2j], np.complex64),
        "strided": np.arange(12.0).reshape(3, 4).T[::2],
        "small": np.array([[-3, 2]], jnp.float8_e4m3fn),
        "weak": jnp.asarray(1.0),
        "numbers": (3, 2**80, -1, True, False, -0.0, float("nan"), 1e-310),
        "empty": (jnp.zeros((0, 3)), np.zeros((2, 0), np.int16), None, (), {}),
    }
    keys = {
        "one": jax.random.key(7),
        "many": jax.random.split(jax.random.key(1), 3),
        "rbg": jax.random.key(5, impl="rbg"),
    }
    carry = {**keys, "no keys": jax.random.split(jax.random.key(1), 3)[:0]}
    return Progress(state, carry, jax.random.key(3), jnp.int32(20))


def test_restores_each_kind_of_leaf_bit_for_bit(tmp_path: Path) -> None:
    progress = every_leaf()
    with closing(Checkpoints(tmp_path / "runs" / "checkpoints")) as checkpoints:
        assert checkpoints.latest(progress) is None
        checkpoints.save(20, progress, {"agent_steps": 2**40, "name": "é", "list": [1, None]})
        found = checkpoints.latest(progress)
    assert found is not None
    assert (found.step, found.metadata) == (20, {"agent_steps": 2**40, "name": "é", "list": [1, None]})
    assert_same(found.progress, progress)


def test_restores_into_shapes_without_values(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    like = jax.eval_shape(lambda: step_progress(0))
    with closing(Checkpoints(tmp_path)) as checkpoints:
        found = checkpoints.latest(like)
    assert found is not None
    assert_same(found.progress, step_progress(5))


def test_restores_a_part(tmp_path: Path) -> None:
    progress = every_leaf()
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(20, progress)
        for part in (progress._replace(carry=(), key=()), Progress((), (), progress.key, progress.updates), ()):
            found = checkpoints.latest(part, part=True)
            assert found is not None
            assert_same(found.progress, part)
        with pytest.raises(
            ValueError, match=r"has a leaf \.carry\['many'\] \(key<fry> \[3\]\), which this run has not"
        ):
            checkpoints.latest(progress._replace(carry=()))
        with pytest.raises(ValueError, match=r"has no leaf \.carry \(float32 \[\]\), which this run has"):
            checkpoints.latest(progress._replace(carry=jnp.float32(1)), part=True)


@pytest.mark.parametrize("leaves", [{"n": 3}, {}, jnp.arange(3), {"none": jnp.zeros((0,))}])
def test_saves_trees_of_nothing_to_store_and_single_leaves(tmp_path: Path, leaves: Any) -> None:
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(0, leaves)
        found = checkpoints.latest(leaves)
    assert found is not None
    assert_same(found.progress, leaves)


def test_restores_where_like_says_over_four_devices_and_one(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    plain = {
        "split": jnp.arange(24.0).reshape(8, 3),
        "whole": jnp.arange(5),
        "keys": jax.random.split(jax.random.key(0), 8),
        "weak": jnp.asarray(2.0),
        "none": jnp.zeros((0, 4)),
    }
    spread = {name: jax.device_put(leaf, split if name in ("split", "keys") else whole) for name, leaf in plain.items()}
    on_one = jax.device_put(plain, jax.devices()[2])
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), spread)
    for step, (saved, like, wanted) in enumerate(
        [(spread, spread, spread), (spread, plain, plain), (plain, spread, spread), (spread, on_one, on_one)]
        + [(on_one, shapes, spread)]
    ):
        with closing(Checkpoints(tmp_path / str(step))) as checkpoints:
            checkpoints.save(step, saved)
            found = checkpoints.latest(like)
        assert found is not None
        assert_same(found.progress, wanted)


def test_what_is_donated_or_overwritten_after_save_is_saved_as_it_was(tmp_path: Path) -> None:
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with closing(Checkpoints(tmp_path, keep=9)) as checkpoints:
        for i in range(3):
            device = {f"{j}": jnp.full((300_000,), float(i)) for j in range(8)}
            host = {f"{j}": np.full((300_000,), float(i)) for j in range(8)}
            checkpoints.save(i, (device, host))
            jax.block_until_ready(step(device))
            for array in host.values():
                array[:] = -1.0
            found = checkpoints.latest((jax.tree.map(jnp.zeros_like, device), host))
            assert found is not None
            assert all(np.all(np.asarray(leaf) == i) for leaf in jax.tree.leaves(found.progress))


@pytest.mark.parametrize(
    ("steps", "keep", "every", "stay"),
    [
        (range(1, 10), 2, 4, [4, 8, 9]),
        (range(1, 13), 2, 4, [4, 8, 11, 12]),
        ((3, 7, 11, 15, 19, 23), 1, 10, [11, 23]),  # the first at or after 10 and after 20
        ((3, 7, 11, 15, 19, 23, 27), 1, 10, [11, 23, 27]),
        ((3, 7), 1, 10, [7]),
    ],
)
def test_of_every_so_many_steps_one_stays(
    tmp_path: Path, steps: Iterable[int], keep: int, every: int, stay: list[int]
) -> None:
    with closing(Checkpoints(tmp_path, keep=keep, every=every)) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"n": np.int32(step)})
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == stay


def test_keeps_the_newest_and_the_last_save_of_a_step(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3, 4, keep=2)
    assert names(tmp_path) == ["3", "4"]
    other = {**step_progress(4), "params": jnp.ones(1000)}
    with closing(Checkpoints(tmp_path, keep=2)) as checkpoints:
        for tree in (step_progress(4), other):
            checkpoints.save(4, tree)
        found = checkpoints.latest(other)
        assert found is not None
        assert_same(found.progress, other)
        assert names(tmp_path) == ["3", "4.2"]
        checkpoints.save(5, step_progress(5))
    assert names(tmp_path) == ["4.2", "5"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"params": jnp.zeros((4, 2))},
            r"leaf \['params'\] is float32 \[1000\] in checkpoint 5 .* and float32 \[4, 2\] in",
        ),
        (
            {"params": jnp.zeros(1000, jnp.bfloat16)},
            r"leaf \['params'\] is float32 \[1000\] .* and bfloat16 \[1000\] in",
        ),
        ({"step": 5}, r"leaf \['step'\] is int32 \[\] .* and Python int \[\] in this run"),
        ({"key": jax.random.key(0, impl="rbg")}, r"leaf \['key'\] is key<fry> \[\] .* and key<rbg> \[\] in this run"),
        ({"more": {"x": True}}, r"has no leaf \['more'\]\['x'\] \(Python bool \[\]\), which this run has"),
        ({"step": None}, r"has a leaf \['step'\] \(int32 \[\]\), which this run has not"),
    ],
)
def test_another_structure_is_an_error_that_names_the_leaf(tmp_path: Path, change: dict, message: str) -> None:
    fill(tmp_path, 4, 5)
    with closing(Checkpoints(tmp_path)) as checkpoints, pytest.raises(ValueError, match=message) as caught:
        checkpoints.latest({**step_progress(0), **change})
    assert "start a new run" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("text", r"leaf \['x'\] is a str: arrays"),
        (np.array(["a"]), r"leaf \['x'\] has dtype <U1: arrays"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), r"leaf \['x'\] is a shape without values"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path, leaf: Any, message: str) -> None:
    with closing(Checkpoints(tmp_path / "folder")) as checkpoints:
        with pytest.raises(ValueError, match=message):
            checkpoints.save(1, {"x": leaf})
        with pytest.raises(ValueError, match="metadata of a checkpoint must be JSON"):
            checkpoints.save(1, {}, {"x": jnp.ones(())})
        with pytest.raises(ValueError, match="step is -1"):
            checkpoints.save(-1, {})
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpoints(tmp_path, keep=0)
    assert names(tmp_path) == []


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
