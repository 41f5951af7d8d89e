"""The mesh of devices: a `data` axis for environments and learning, a `model` axis for parameters (of size 1 for now).

Wraps what moved between JAX versions; nothing else in the package names `shard_map` or a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from longhaul.types import PyTree

DATA = "data"


def make_mesh(data: int | None = None) -> Mesh:
    """A mesh over the first `data` devices; all local ones by default."""
    devices = jax.devices()
    data = len(devices) if data is None else data
    if not 1 <= data <= len(devices):
        raise ValueError(
            f"--mesh data={data}, but this machine has {len(devices)} device(s); give 1 to {len(devices)}"
        )
    # Explicit axes are make_mesh's default, and ordinary programs fail on them.
    return jax.make_mesh((data,), (DATA,), axis_types=(AxisType.Auto,), devices=devices[:data])


def mean_over_data(tree: PyTree) -> PyTree:
    """The mean over the shards of the `data` axis: where gradients meet."""
    return jax.lax.pmean(tree, DATA)


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
