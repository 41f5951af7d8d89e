"""The mesh of devices: a `data` axis for environments and learning, a `model` axis for parameters (of size 1 for now).

Wraps what moved between JAX versions; nothing else in the package names `shard_map` or a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from longhaul import leaves
from longhaul.types import PyTree

DATA = "data"


def make_mesh(data: int | None = None) -> Mesh:
    """A mesh over `data` devices, of each process the first ones; all by default."""
    devices, processes = jax.devices(), jax.process_count()
    data = len(devices) if data is None else data
    if processes > 1:
        return _over_processes(data, processes)
    if not 1 <= data <= len(devices):
        raise ValueError(
            f"--mesh data={data}, but this machine has {len(devices)} device(s); give 1 to {len(devices)}"
        )
    # Explicit axes are make_mesh's default, and ordinary programs fail on them.
    return jax.make_mesh((data,), (DATA,), axis_types=(AxisType.Auto,), devices=devices[:data])


def _over_processes(data: int, processes: int) -> Mesh:
    """A mesh with as many devices of each process, side by side."""
    own = [[device for device in jax.devices() if device.process_index == i] for i in range(processes)]
    most = processes * min(map(len, own))
    if data % processes or not 1 <= data <= most:
        raise ValueError(
            f"--mesh data={data}, but {processes} processes have {most} device(s) to share in equal parts; "
            f"give a multiple of {processes} up to {most}"
        )
    devices = [device for some in own for device in some[: data // processes]]
    return jax.make_mesh((data,), (DATA,), axis_types=(AxisType.Auto,), devices=devices)


def mean_over_data(tree: PyTree) -> PyTree:
    """The mean over the shards of the `data` axis: where gradients meet."""
    return jax.lax.pmean(tree, DATA)


def max_over_data(tree: PyTree) -> PyTree:
    """The greatest over the shards of the `data` axis."""
    return jax.lax.pmax(tree, DATA)


def identity(tree: PyTree) -> PyTree:
    """Where gradients meet on one device."""
    return tree


def shard_index() -> jax.Array:
    return jax.lax.axis_index(DATA)


def per_shard(function: Callable[..., Any], mesh: Mesh, in_specs: PyTree, out_specs: PyTree) -> Callable[..., Any]:
    """`function` run on each shard with its part of the arguments."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def sharded(mesh: Mesh) -> NamedSharding:
    """Split along the leading axis."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def everywhere(tree: PyTree, mesh: Mesh) -> PyTree:
    """`tree`, which all processes have alike, on each device of `mesh`."""
    layout = replicated(mesh)
    if not mesh.is_multi_process:
        return jax.device_put(tree, layout)
    return jax.tree.map(lambda leaf: leaves.put(leaf, layout), tree)


Ask = Callable[..., tuple[bool, ...]]
"""Answers of this process, yes or no -> to each, whether any process says yes; all processes learn the same."""


def asking(mesh: Mesh, *, late: bool = False) -> Ask:
    """How processes agree, at points that all of them reach in the same order. Alone: what a process says, holds.

    With `late` they learn of one time what they were asked the time before, and so need not wait for what runs.
    """
    if not mesh.is_multi_process:
        return lambda *answers: answers
    count = jax.jit(lambda votes: jnp.sum(votes, axis=0), out_shardings=replicated(mesh))
    before: list[jax.Array] = []

    def ask(*answers: bool) -> tuple[bool, ...]:
        shape = mesh.size, len(answers)
        votes = jax.make_array_from_callback(
            shape, sharded(mesh), lambda index: np.broadcast_to(np.array(answers, np.int32), shape)[index]
        )
        before.append(count(votes))
        if late and len(before) == 1:
            return (False,) * len(answers)
        return tuple(bool(n) for n in np.asarray(before.pop(0)))

    return ask
