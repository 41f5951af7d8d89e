"""Device mesh: a `data` axis for environments and learning, a `model` axis for parameters (partition.py).

Programs are written for one shard of `data` and use explicit collectives. Over `model` they are written as for one
device, and the compiler splits them by the layout of their parameters (GSPMD; Xu et al. 2021, arXiv 2105.04663).

With fully sharded data parallelism the devices of `data` form the axis `fsdp` instead. The compiler splits it, too:
worlds and batches lie apart, and so do parameters, gradients and the optimiser's moments, gathered where they are used
(ZeRO's third stage, Rajbhandari et al. 2020, arXiv 1910.02054). Such a run is one shard, with the random numbers of one
device.

Wraps API that moved between JAX versions: nothing else in the package calls `shard_map` or makes a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from longhaul.runtime import pytree_serialization
from longhaul.runtime.errors import RunError
from longhaul.types import PyTree, platform

DATA, FSDP, MODEL = "data", "fsdp", "model"
"""Axes of every mesh; those that a run does not use have one device."""

PACKED = 2**18
"""Bytes from which an array is sent by itself."""


def make_mesh(data: int | None = None, model: int = 1, fsdp: bool = False) -> Mesh:
    """Mesh over `data` x `model` devices, the first ones of each process; all by default.

    The parts of the parameters are neighbours, in one process if it has enough devices. With `fsdp` the devices of
    `data` are the axis `fsdp`. Raises ValueError where there are fewer devices.
    """
    devices, processes = jax.devices(), jax.process_count()
    if model < 1:
        raise ValueError(f"--mesh model={model}; it must be at least 1")
    data = len(devices) // model if data is None else data
    if processes > 1:
        return _over_processes(data, model, fsdp, processes)
    if not 1 <= data * model <= len(devices):
        most = len(devices) // model
        remedy = f"give 1 to {most}" if model == 1 else f"give at most {len(devices)} in all"
        raise ValueError(f"--mesh {_mesh_text(data, model)}, but this machine has {len(devices)} device(s); {remedy}")
    return _mesh(data, model, fsdp, devices[: data * model])


def mesh_of(devices: Sequence[jax.Device], model: int = 1, fsdp: bool = False) -> Mesh:
    """Mesh over these devices, also of a machine that programs are only compiled for."""
    return _mesh(len(devices) // model, model, fsdp, list(devices))


def _over_processes(data: int, model: int, fsdp: bool, processes: int) -> Mesh:
    """Mesh with equally many devices of each process, side by side."""
    own = [[device for device in jax.devices() if device.process_index == i] for i in range(processes)]
    most, count = processes * min(map(len, own)), data * model
    if count % processes or not 1 <= count <= most:
        raise ValueError(
            f"--mesh {_mesh_text(data, model)}, but {processes} processes have {most} device(s) to share in equal "
            f"parts; give a multiple of {processes} up to {most}" + " in all" * (model > 1)
        )
    return _mesh(data, model, fsdp, [device for some in own for device in some[: count // processes]])


def _mesh(data: int, model: int, fsdp: bool, devices: list[jax.Device]) -> Mesh:
    shape = (1, data, model) if fsdp else (data, 1, model)
    # Explicit axes are make_mesh's default, and ordinary programs fail on them.
    return jax.make_mesh(shape, (DATA, FSDP, MODEL), axis_types=(AxisType.Auto,) * 3, devices=devices)


def _mesh_text(data: int, model: int) -> str:
    return f"data={data}" + f",model={model}" * (model > 1)


def mean_over_data(tree: PyTree) -> PyTree:
    """Mean over the shards of the `data` axis, for gradients.

    Leaves of fewer than `PACKED` bytes travel in one buffer a type, as in buckets of data-parallel training (Li et al.
    2020, arXiv 2006.15704): each separate array costs a further round trip, on a CPU over gloo ten times the work. A
    single shard sends nothing: a CPU would copy every gradient.
    """
    if jax.lax.axis_size(DATA) == 1:
        return tree
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        alone = x.nbytes >= PACKED
        groups.setdefault(i if alone else x.dtype, []).append(i)
    packed = [[leaves[i] for i in group] for group in groups.values()]
    sent = [xs[0] if len(xs) == 1 else jnp.concatenate([jnp.ravel(x) for x in xs]) for xs in packed]
    for group, xs, mean in zip(groups.values(), packed, jax.lax.pmean(sent, DATA), strict=True):
        ends = np.cumsum([x.size for x in xs])[:-1]
        parts = [mean] if len(xs) == 1 else jnp.split(mean, ends)
        for i, x, part in zip(group, xs, parts, strict=True):
            leaves[i] = part.reshape(x.shape)
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def mean_by_leaf(tree: PyTree) -> PyTree:
    """Mean over `data` leaf by leaf: for leaves split over `model`, which one buffer would gather."""
    return tree if jax.lax.axis_size(DATA) == 1 else jax.lax.pmean(tree, DATA)


def max_over_data(tree: PyTree) -> PyTree:
    """Maximum over the shards of the `data` axis."""
    return tree if jax.lax.axis_size(DATA) == 1 else jax.lax.pmax(tree, DATA)


def identity(value: Any) -> Any:
    """Mean, maximum or separate program of a single shard."""
    return value


def shard_index() -> jax.Array:
    return jnp.int32(0) if jax.lax.axis_size(DATA) == 1 else jax.lax.axis_index(DATA)


def per_shard(function: Callable[..., Any], mesh: Mesh, in_specs: PyTree, out_specs: PyTree) -> Callable[..., Any]:
    """`function` run on each shard of `data` with its part of the arguments; the specs name that axis alone."""
    # Axes of one device are excluded, so that the compiler does not search for a split.
    manual = {DATA} | {axis for axis in (FSDP, MODEL) if mesh.shape[axis] == 1}
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False
    )


def check_compiler(carry: Callable[[], PyTree], mesh: Mesh) -> None:
    """Refusal of a compiler that dies. jaxlib 0.11.2 ends by a segmentation fault where shards of a mesh are given
    arrays without elements; its releases before and after do not. `carry`: shapes of what the worlds hold, asked for
    only where that matters. Raises RunError."""
    if jax.__version__ != "0.11.2" or mesh.size == 1 or all(leaf.size for leaf in jax.tree.leaves(carry())):
        return
    raise RunError(
        f"JAX 0.11.2 crashes on {mesh.size} devices where worlds have arrays without elements, as MuJoCo's have; "
        "take another: pip install 'jax!=0.11.2', or --mesh data=1"
    )


def parts() -> tuple[int, int]:
    """(devices of `model`, of `fsdp`) in the program of a shard that is being traced; 1 in any other."""
    shape = jax.sharding.get_abstract_mesh().shape
    return int(shape.get(MODEL, 1)), int(shape.get(FSDP, 1))


def spread(tree: PyTree, axis: int) -> PyTree:
    """`tree` with the given axis of each leaf split over `fsdp`, while the program of a shard is traced; leaves that
    have no such axis, or one that the devices do not divide, as they are."""
    count = parts()[1]

    def one(leaf: jax.Array) -> jax.Array:
        if count == 1 or leaf.ndim <= axis or leaf.shape[axis] % count:
            return leaf
        return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*[None] * axis, FSDP))

    return jax.tree.map(one, tree)


def on_parts(function: Callable[[jax.Array], jax.Array], x: jax.Array, axis: int) -> jax.Array:
    """`function` of an array of the same shape, computed by each device of `fsdp` on its part along `axis`: for what
    the compiler can't split, and would gather. Devices that do not divide the axis compute it whole."""
    count = parts()[1]
    if count == 1 or x.shape[axis] % count:
        return function(x)
    part = PartitionSpec(*[None] * axis, FSDP)
    computed: jax.Array = jax.shard_map(
        function, in_specs=part, out_specs=part, axis_names={FSDP}, check_vma=False
    )(spread(x, axis))  # fmt: skip
    return computed


def in_order(x: jax.Array, order: tuple[int, ...], axis: int) -> jax.Array:
    """`x` split over `fsdp` along `axis`, and on a GPU each part in memory with its axes in this order, the longest
    stride first. Left to XLA, a loop may want another order than the code around it, and what it reads is copied."""
    if platform() != "gpu":
        return spread(x, axis)
    return on_parts(lambda part: with_layout_constraint(part, Layout(major_to_minor=order)), x, axis)


def whole(tree: PyTree) -> PyTree:
    """`tree` on each device of `fsdp`, while the program of a shard is traced."""
    return tree if parts()[1] == 1 else jax.lax.with_sharding_constraint(tree, PartitionSpec())


def rows(tree: PyTree) -> PyTree:
    """`tree` with the leading axis of each leaf split over `fsdp`; whole leaves where the devices do not divide it."""
    count = parts()[1]
    return jax.tree.map(lambda leaf: whole(leaf) if leaf.shape[0] % count else spread(leaf, 0), tree)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def sharded(mesh: Mesh) -> NamedSharding:
    """Sharding along the leading axis."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def splits(mesh: Mesh) -> bool:
    """True if parameters are split over devices of the mesh."""
    return mesh.shape[FSDP] * mesh.shape[MODEL] > 1


def columns(tree: PyTree, mesh: Mesh) -> PyTree:
    """Sharding of each leaf of worlds or columns, arrays or shapes: the leading axis, over `data` and `fsdp`."""
    parts = mesh.shape[DATA] * mesh.shape[FSDP]

    def one(leaf: Any) -> NamedSharding:
        even = leaf.ndim and leaf.shape[0] % parts == 0
        return NamedSharding(mesh, PartitionSpec((DATA, FSDP) if even and mesh.shape[FSDP] > 1 else DATA))

    return jax.tree.map(one, tree)


def in_columns(tree: PyTree, mesh: Mesh) -> PyTree:
    """`tree` constrained to the layout of `columns` while a program is traced."""
    return jax.lax.with_sharding_constraint(tree, columns(tree, mesh))


def everywhere(tree: PyTree, mesh: Mesh) -> PyTree:
    """`tree`, equal in all processes, on each device of `mesh`."""
    layout = replicated(mesh)
    if not mesh.is_multi_process:
        return jax.device_put(tree, layout)
    return jax.tree.map(lambda leaf: pytree_serialization.put(leaf, layout), tree)


def gathered(tree: PyTree, mesh: Mesh) -> PyTree:
    """`tree`, possibly split over the mesh, whole on each of its devices. All processes must call this alike."""
    if all(leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.jit(lambda tree: tree, out_shardings=replicated(mesh))(tree)


def local_part(leaf: jax.Array) -> np.ndarray:
    """Part of a possibly split array in this process; 0 elsewhere."""
    first = leaf.addressable_data(0)
    if first.shape == leaf.shape:
        return np.asarray(first)
    whole = np.zeros(leaf.shape, leaf.dtype)
    for shard in leaf.addressable_shards:
        whole[shard.index] = shard.data
    return whole


Ask = Callable[..., tuple[bool, ...]]
"""Yes-no answers of this process -> for each, True if any process says yes; equal in all processes."""


def asking(mesh: Mesh, *, late: bool = False) -> Ask:
    """Agreement of processes at points that all reach in the same order; a single process's answers hold.

    With `late` each call returns the answers of the previous one, and so need not wait for running programs.
    """
    if not mesh.is_multi_process:
        return lambda *answers: answers
    count = jax.jit(lambda votes: jnp.sum(votes, axis=0), out_shardings=replicated(mesh))
    each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))  # one vote a device
    before: list[jax.Array] = []

    def ask(*answers: bool) -> tuple[bool, ...]:
        shape = mesh.size, len(answers)
        votes = jax.make_array_from_callback(
            shape, each, lambda index: np.broadcast_to(np.array(answers, np.int32), shape)[index]
        )
        before.append(count(votes))
        if late and len(before) == 1:
            return (False,) * len(answers)
        return tuple(bool(n) for n in np.asarray(before.pop(0)))

    return ask
