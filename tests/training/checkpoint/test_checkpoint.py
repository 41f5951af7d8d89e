"""What is restored is what was saved, bit for bit, however a save or the disk fails; what doesn't fit is refused.

Checkpoints that are damaged, foreign or torn are named, skipped, and never taken for a fresh start.
"""

from __future__ import annotations

import errno
import gc
import inspect
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from longhaul.runtime import files
from longhaul.runtime import mesh as meshes
from longhaul.training.checkpoint import checkpoint
from longhaul.training.checkpoint.checkpoint import LEAST, CheckpointError, Checkpoints, Staging
from longhaul.types import Progress


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


def test_arrays_donated_or_overwritten_after_save_are_saved_as_they_were(tmp_path: Path) -> None:
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
        (range(1, 13), 2, 4, [4, 8, 11, 12]),
        ((3, 7, 11, 15, 19, 23, 27), 1, 10, [11, 23, 27]),  # the first at or after 10 and after 20
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
def test_leaves_that_cannot_be_saved_are_refused_before_anything_is_written(
    tmp_path: Path, leaf: Any, message: str
) -> None:
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
        # Of arrays alike: JAX 0.11 does not overwrite one that was read as a whole.
        wanted = {name: np.array(array) for name, array in progress(4, add).items()}
        tree = progress(4, add)
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


# --------------------------------------------------------------------------------------------------------------- damage


def test_a_damaged_one_that_stayed_is_passed_over_and_goes(tmp_path: Path) -> None:
    said: list[str] = []
    with closing(Checkpoints(tmp_path, keep=1, every=4, warn=said.append)) as checkpoints:
        for step in (4, 8, 9):
            checkpoints.save(step, {"n": np.int32(step)})
        checkpoints.wait()
        for name in ("8", "9"):
            (tmp_path / name / "manifest.json").write_text("{}")
        restored = checkpoints.latest({"n": np.int32(0)})
        assert restored is not None
        assert restored.step == 4
        assert [line.split()[1] for line in said] == ["9", "8"]
        checkpoints.save(10, {"n": np.int32(10)})
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [4, 10]


def test_steps_found_damaged_do_not_push_out_intact_ones(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20, 30)
    for step in ("20", "30"):
        (tmp_path / step / "manifest.json").unlink()
    said: list[str] = []
    with closing(Checkpoints(tmp_path, keep=2, warn=said.append)) as checkpoints:
        found = checkpoints.latest(step_progress(0))
        assert found is not None
        assert (found.step, len(said)) == (10, 2)
        checkpoints.save(15, step_progress(15))
        checkpoints.save(20, step_progress(20), {"step": 20})
    assert names(tmp_path) == ["15", "20"]
    assert restore(tmp_path, said) == (20, {"step": 20})
    assert len(said) == 2


def damages(path: Path, rng: random.Random) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, function) of the ways in which one file is damaged."""
    data = path.read_bytes()
    place, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
    yield "flip", lambda: path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
    yield "shorten", lambda: path.write_bytes(data[: rng.randrange(len(data))])
    yield "lengthen", lambda: path.write_bytes(data + b"\n")
    yield "remove", path.unlink


def test_each_damage_of_each_file_is_named_and_the_step_before_is_used(tmp_path: Path) -> None:
    fill(tmp_path / "sound", 10, 20)
    rng = random.Random(0)
    files = [path.relative_to(tmp_path / "sound") for path in (tmp_path / "sound" / "20").rglob("*") if path.is_file()]
    assert len(files) > 5
    with closing(Checkpoints(tmp_path / "folder")) as checkpoints:
        said: list[str] = []
        checkpoints._warn = said.append
        for file, kind in itertools.product(files, range(4)):
            shutil.rmtree(tmp_path / "folder", ignore_errors=True)
            shutil.copytree(tmp_path / "sound", tmp_path / "folder")
            name, damage = list(damages(tmp_path / "folder" / file, rng))[kind]
            damage()
            said.clear()
            path = tmp_path / "folder" / "20"
            with pytest.raises(checkpoint.Damaged, match=file.name.replace(".", r"\.")):
                checkpoint._verify(path, 20)
            if kind == 0:
                found = checkpoints.latest(step_progress(0))
                assert found is not None
                assert_same(found.progress, step_progress(10))
                assert len(said) == 1, (file, name)
                assert said[0].startswith(f"checkpoint 20 in {path.parent} is damaged")


def test_foreign_files_and_empty_or_renamed_steps_are_damage(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20)
    (tmp_path / "20" / "progress" / "d" / "more").write_bytes(b"")
    (tmp_path / "30").mkdir()
    shutil.copytree(tmp_path / "10", tmp_path / "40")
    (tmp_path / "50").write_text("a file")
    said: list[str] = []
    assert restore(tmp_path, said) == (10, {"step": 10})
    reasons = [line.partition(": ")[2] for line in said]
    assert reasons[1:] == ["manifest.json is that of step 10", "manifest.json is missing", reasons[3]]
    assert reasons[3] == "progress/d/more does not belong to it"
    assert "cannot be read: " in reasons[0]


def test_no_silent_fresh_start_where_all_are_damaged(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20)
    for step in ("10", "20"):
        manifest = tmp_path / step / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float16"))
    with pytest.raises(
        CheckpointError, match=r"all 2 checkpoints in .* are damaged: 20 \(.*\); 10 \(.*\); bring"
    ) as caught:
        restore(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_format_is_no_damage(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20)
    manifest = tmp_path / "20" / "manifest.json"
    contents = json.loads(manifest.read_bytes())["contents"]
    manifest.write_bytes(checkpoint._render({**contents, "format": 99}))
    with pytest.raises(ValueError, match="is of format 99, and this version reads 1: use the version"):
        restore(tmp_path)


def test_stray_entries_stop_no_save(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", 20)
    folder = tmp_path / "checkpoints"
    fill(folder, 10, keep=2)
    (folder / "20").symlink_to(tmp_path / "elsewhere" / "20")
    (folder / "x.partial").touch()
    (folder / "40.partial").symlink_to(tmp_path / "elsewhere")
    for name in ("30", "500"):
        (folder / name).write_text("a file")
    said: list[str] = []
    with closing(Checkpoints(folder, keep=2, warn=said.append)) as checkpoints:
        for step in (30, 40):
            checkpoints.save(step, step_progress(step), {"step": step})
        checkpoints.wait()
        assert names(folder) == ["20", "30.1", "40"]
        shutil.rmtree(folder / "40")
        shutil.rmtree(folder / "30.1")
        found = checkpoints.latest(step_progress(0))
        assert found is not None
        assert_same(found.progress, step_progress(20))
        checkpoints.save(50, step_progress(50))
        checkpoints.save(60, step_progress(60))
    assert names(folder) == ["20", "50", "60"]
    assert names(tmp_path / "elsewhere") == ["20"]
    assert said == []


def test_arrays_of_another_form_than_the_manifest_says_are_not_read(tmp_path: Path) -> None:
    """Zeros take no room in a file: 8 kB may hold any number of them, with right digests."""
    fill(tmp_path, 3)
    with closing(Checkpoints(tmp_path)) as checkpoints:
        found = checkpoints.newest()
        assert found is not None
        arrays = checkpoints.arrays(found, "")
        name = max(arrays, key=lambda name: arrays[name].nbytes)
        for shape, words in (([4], "is stored in another form"), ([1 << 50], "its arrays take [0-9,]{17,} bytes")):
            found.manifest["leaves"][name]["shape"] = shape
            with pytest.raises(CheckpointError, match=words):
                checkpoints.arrays(found, "")


def test_entries_that_cannot_be_removed_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "20.partial").mkdir()
    (tmp_path / "x.partial").touch()
    remove = files.remove

    def refused(path: Path) -> None:
        if path.name in ("20.partial", "x.partial"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        remove(path)

    monkeypatch.setattr(files, "remove", refused)
    said: list[str] = []
    with closing(Checkpoints(tmp_path, keep=1, warn=said.append)) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, step_progress(step), {"step": step})
    assert names(tmp_path) == ["20.partial", "30", "x.partial"]
    assert sorted(line.split()[2] for line in said) == [f"{tmp_path}/{name}.partial," for name in ("20", "x")]
    assert restore(tmp_path) == (30, {"step": 30})


# -------------------------------------------------------------------------------------------------- a full disk, a kill


def test_a_failure_of_the_step_before_fails_the_save(tmp_path: Path) -> None:
    def no_room() -> None:
        raise OSError(errno.ENOSPC, "")

    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, {"n": np.int32(1)})
        with pytest.raises(CheckpointError, match=r"checkpoint 2 .*the disk is full; those before it are intact"):
            checkpoints.save(2, {"n": np.int32(2)}, before=no_room)
        checkpoints.save(3, {"n": np.int32(3)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


def test_old_steps_go_only_after_a_newer_one_is_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 1, keep=1)
    with closing(Checkpoints(tmp_path, keep=1)) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_digest", lambda *_, **__: full())
            checkpoints.save(2, step_progress(2))
            with pytest.raises(CheckpointError):
                checkpoints.wait()
        assert names(tmp_path) == ["1"]
        checkpoints.save(3, step_progress(3))
    assert names(tmp_path) == ["3"]


def fail_like_tensorstore(*_: Any) -> None:
    """Its words, when a file system of 3 MB was full."""
    text = 'RESOURCE_EXHAUSTED: Error writing "l8/0": Failed to write 5197824 bytes to file 14: No space left on device'
    raise ValueError(text + " [os_error_code='28']")


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("os.fsync", full),
        ("os.rename", full),
        ("pathlib.Path.mkdir", full),
        ("orbax.checkpoint.StandardCheckpointer.save", fail_like_tensorstore),
        ("orbax.checkpoint.StandardCheckpointer.wait_until_finished", fail_like_tensorstore),
        ("shutil.disk_usage", lambda _: SimpleNamespace(free=5000)),
    ],
)
def test_a_full_disk_is_one_clear_line_and_leaves_the_steps_before(
    tmp_path: Path, function: str, fault: Callable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    fill(tmp_path, 10)
    with closing(Checkpoints(tmp_path)) as checkpoints:

        def save() -> None:
            checkpoints.save(20, step_progress(20), {"step": 20})
            checkpoints.wait()

        with monkeypatch.context() as patch:
            patch.setattr(function, fault)
            with pytest.raises(CheckpointError) as caught:
                save()
        start = rf"cannot save checkpoint 20 in .* \({4012 + 2**20} bytes wanted, \d+ free\)"
        pattern = f"^{start}: the disk is full; those before it are intact: make room and resume$"
        assert caught.match(pattern)
        assert names(tmp_path) == ["10"]
        assert restore(tmp_path) == (10, {"step": 10})
        save()
    assert restore(tmp_path) == (20, {"step": 20})
    assert capfd.readouterr().err == ""


def test_a_refused_write_inside_tensorstore_is_one_clear_line(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    fill(tmp_path, 10)
    with closing(Checkpoints(tmp_path)) as checkpoints:
        refused(checkpoints, np.random.default_rng(0).normal(size=1_000_000))
        assert names(tmp_path) == ["10"]
        checkpoints.save(30, step_progress(30), {"step": 30})
    assert restore(tmp_path) == (30, {"step": 30})
    assert capfd.readouterr().err == ""


def test_writes_behind_the_first_refused_one_say_nothing_and_meet_no_later_save(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    fill(tmp_path, 10)
    noise = np.random.default_rng(0)
    with closing(Checkpoints(tmp_path)) as checkpoints:
        refused(checkpoints, {str(i): noise.normal(size=100_000) for i in range(30)})
        assert "20" not in names(tmp_path)
        checkpoints.save(20, step_progress(20), {"step": 20})
    assert restore(tmp_path) == (20, {"step": 20})
    assert [name for name in names(tmp_path) if not name.endswith(".partial")] == ["10", "20"]
    gc.collect()  # of a task that nobody asked asyncio complains once it is gone
    said = capfd.readouterr().err.splitlines()
    assert not [line for line in said if "20.partial, which is left" not in line], "it is being written to meanwhile"


def refused(checkpoints: Checkpoints, progress: Any) -> None:
    """Saves step 20 under a limit on the size of files, by which it fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        checkpoints.save(20, progress)
        with pytest.raises(CheckpointError, match=r"cannot save checkpoint 20 .*File too large.*see to the folder"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_stopping_at_any_call_to_the_disk_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only step is saved again; each call that changes the disk fails for good, in turn, as if all ended there."""
    fill(tmp_path / "before", 20)
    newest = []
    for stop in itertools.count():
        folder = tmp_path / str(stop)
        shutil.copytree(tmp_path / "before", folder)
        count = itertools.count()
        with monkeypatch.context() as patch:
            for name in ("rename", "fsync", "unlink", "rmdir"):
                whole = getattr(os, name)

                def limited(*args: Any, whole=whole, count=count, stop=stop, **kwargs: Any) -> Any:
                    if next(count) >= stop:
                        raise OSError(errno.EIO, "stopped")
                    return whole(*args, **kwargs)

                patch.setattr(os, name, limited)
            checkpoints = Checkpoints(folder, keep=1, warn=lambda line: None)
            checkpoints.save(20, step_progress(20), {"step": "again"})
            with suppress(CheckpointError):
                checkpoints.close()
        newest.append(restore(folder))
        if next(count) <= stop:
            break
    before, after = (20, {"step": 20}), (20, {"step": "again"})
    assert newest[0] == before and newest[-1] == after  # between: as its threads take turns
    assert all(found in (before, after) for found in newest)
    assert names(folder) == ["20.1"]


SAVING = f"""
import os
import sys
from typing import Any
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # takes seconds, and once is enough: each line of stdin is answered by a fork
from longhaul.training.checkpoint.checkpoint import Checkpoints
{inspect.getsource(step_progress)}
for _ in sys.stdin:
    if child := os.fork():
        os.waitpid(child, 0)
        print("killed", flush=True)
        continue
    print(os.getpid(), flush=True)
    checkpoints = Checkpoints(sys.argv[1], keep=2)
    found = checkpoints.latest(step_progress(0, 300_000))
    first = 1 if found is None else found.step + 1
    for step in range(first, first + 10_000):
        checkpoints.save(step, step_progress(step, 300_000), {{"step": step}})
        print(step, flush=True)
"""


def test_kill_9_at_any_moment_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    rng, before = random.Random(1), 0
    command = [sys.executable, "-c", SAVING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(3):
            process.stdin.write("\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            begun = [int(process.stdout.readline()) for _ in range(rng.randrange(2, 6))]
            time.sleep(rng.random() * 0.1)
            os.kill(child, signal.SIGKILL)
            begun += [int(line) for line in iter(process.stdout.readline, "killed\n")]
            assert begun[0] == before + 1
            said: list[str] = []
            found = restore(tmp_path, said, 300_000)
            assert found is not None
            # The save before the last begun one was waited for; the last may be whole, and so may one begun unheard.
            assert begun[-1] - 1 <= found[0] <= begun[-1] + 1
            assert said == []
            before = found[0]
