"""Shards of a batch and their reductions: one a device, or a fixed number that devices share.

A mean over devices is a sum whose order, and so whose last bits, depend on their number, and rollouts soon diverge from
them. Where runs must be equal on 1, 2, 4 and 8 devices, the batch has `VIRTUAL` shards on any of them: each device
computes its share one after the other, and sums are taken in one fixed order (see `virtual`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh

from longhaul.runtime import mesh as meshes
from longhaul.runtime import overlap
from longhaul.runtime.mesh import DATA, MODEL
from longhaul.types import Local, PyTree, is_local

VIRTUAL = 8
"""Number of virtual shards of a deterministic run, a power of two: the most devices that it can use."""

AXIS = "virtual"
"""Axis of a device's own virtual shards."""


def refusal(devices: int, worlds: int) -> str | None:
    """Error line if the devices and worlds cannot form virtual shards, else None."""
    if VIRTUAL % devices:
        fit = ", ".join(str(n) for n in range(1, VIRTUAL + 1) if VIRTUAL % n == 0)
        return (
            f"--deterministic computes in {VIRTUAL} virtual shards, which {devices} devices can't share evenly; "
            f"choose --mesh data=N with N one of {fit}"
        )
    if worlds % VIRTUAL:
        return (
            f"--num-envs is {worlds}, which the {VIRTUAL} virtual shards of --deterministic can't share evenly; "
            f"choose a multiple of {VIRTUAL}"
        )
    return None


class Shards(NamedTuple):
    """Functions through which code for one shard runs on all. Within `each`: `mean`, `most`, `apart`."""

    number: int  # over all devices
    mean: Callable[[PyTree], PyTree]
    most: Callable[[PyTree], PyTree]  # maximum
    apart: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Function of its arguments without collectives -> the same, compiled apart from its surroundings where needed. It
    may close over numbers, not over arrays."""
    each: Callable[[Callable[..., Any]], Callable[..., Any]]
    """f(number of the shard, its carry) -> (carry, value equal on all shards), for one shard -> the same for carries
    [columns of the device, ...]."""
    in_buckets: Callable[[PyTree, Callable[[], Sequence[int]]], PyTree] | None = None
    """`mean` of gradients that meet while others are computed (overlap.py)."""


def part(state: PyTree) -> tuple[PyTree, list[PyTree]]:
    """(an algorithm's state with `()` in place of each shard's own parts; those parts)."""
    own = [x.value for x in jax.tree.leaves(state, is_leaf=is_local) if is_local(x)]
    return jax.tree.map(lambda x: Local(()) if is_local(x) else x, state, is_leaf=is_local), own


def whole(common: PyTree, own: list[PyTree]) -> PyTree:
    rest = iter(own)
    return jax.tree.map(lambda x: Local(next(rest)) if is_local(x) else x, common, is_leaf=is_local)


def by_device(mesh: Mesh) -> Shards:
    """Shards with one per device."""

    def each(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda carry: function(meshes.shard_index(), carry)

    mean = meshes.mean_over_data if mesh.shape[MODEL] == 1 else meshes.mean_by_leaf
    in_buckets = overlap.mean if mesh.shape[MODEL] == 1 < mesh.shape[DATA] else None
    return Shards(mesh.shape[DATA], mean, meshes.max_over_data, meshes.identity, each, in_buckets)


def alone() -> Shards:
    """Single shard: a member of a population, computed on one device."""

    def each(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda carry: function(jnp.int32(0), carry)

    return Shards(1, meshes.identity, meshes.identity, meshes.identity, each)


def virtual(mesh: Mesh) -> Shards:
    """`VIRTUAL` shards on any number of devices: the same numbers bit for bit.

    Two rules make them equal. Sums over shards are taken in one order, as a tree of pairs. And the computation of one
    shard is a program of its own, `apart`: XLA's additions and rounding depend on a batch's shape and on fusion, so
    neither may depend on the number of shards on a device.
    """
    devices = mesh.shape[DATA]
    if VIRTUAL % devices:
        raise ValueError(
            f"{VIRTUAL} virtual shards can't be shared evenly by {devices} devices; give a divisor of {VIRTUAL}"
        )
    own = VIRTUAL // devices

    def each(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(carry: PyTree) -> tuple[PyTree, PyTree]:
            numbers = meshes.shard_index() * own + jnp.arange(own)
            parts = jax.tree.map(lambda x: x.reshape(own, x.shape[0] // own, *x.shape[1:]), carry)
            carry, same = jax.vmap(function, out_axes=(0, None), axis_name=AXIS)(numbers, parts)
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), carry), same

        return run

    def most(tree: PyTree) -> PyTree:
        return meshes.max_over_data(jax.lax.pmax(tree, AXIS))

    return Shards(VIRTUAL, lambda tree: mean_in_order(tree, devices), most, apart, each)


def mean_in_order(tree: PyTree, devices: int) -> PyTree:
    """Mean over all virtual shards, equally many on each of the `devices`, in one order.

    Each device sums a slice of all shards' numbers: that moves twice the bytes of an all-reduce, not `VIRTUAL` times.
    """
    vector, whole = ravel_pytree(tree)
    rows = jax.lax.all_gather(vector, AXIS)  # [own shards, numbers] of this device
    if devices == 1:
        return _isolated_branch(lambda rows: whole(_sum(rows) / VIRTUAL))(rows)
    size = -(-vector.size // devices)
    padded = jnp.pad(rows, ((0, 0), (0, size * devices - vector.size)))
    parts = jax.lax.all_to_all(padded.reshape(-1, devices, size), DATA, split_axis=1, concat_axis=0)
    part = _isolated_branch(lambda rows: _sum(rows) / VIRTUAL)(parts.reshape(VIRTUAL, size))
    return _isolated_branch(lambda row: whole(row[: vector.size]))(jax.lax.all_gather(part, DATA, tiled=True))


def _sum(rows: jax.Array) -> jax.Array:
    """Sum over the leading axis, a power of two long, by pairs: XLA keeps a written-out order of additions."""
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled as if alone; several shards run one after the other."""
    function = _isolated_branch(jax.jit(function, inline=True))  # traced once for all uses
    alone = jax.custom_batching.custom_vmap(function)

    @alone.def_vmap
    def one_by_one(size: int, batched: PyTree, *args: PyTree) -> tuple[PyTree, PyTree]:
        leaves, tree = jax.tree.leaves(args), jax.tree.structure(args)
        own = jax.tree.leaves(batched)

        def one(moving: list[jax.Array]) -> PyTree:
            rest = iter(moving)
            parts = [next(rest) if x else y for x, y in zip(own, leaves, strict=True)]
            return function(*jax.tree.unflatten(tree, parts))

        out = jax.lax.map(one, [y for x, y in zip(own, leaves, strict=True) if x])
        return out, jax.tree.map(lambda _: True, out)

    return alone


def _isolated_branch(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a branch that XLA does not know to be always taken: it neither fuses across nor moves code out."""

    def run(*args: PyTree) -> PyTree:
        taken = jax.lax.optimization_barrier(jnp.bool_(True))  # a variable to XLA until after fusion
        shapes = jax.eval_shape(function, *args)
        return jax.lax.cond(taken, function, lambda *_: jax.tree.map(_blank, shapes), *args)

    return run


def _blank(shape: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), shape.shape)
    return jnp.zeros(shape.shape, shape.dtype)
