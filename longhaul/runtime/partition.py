"""Partition of a model's parameters over the `model` and `fsdp` axes of a mesh, by names and shapes alone.

A kernel [inputs, outputs] is split by its outputs, or by its inputs if these are the outputs of a split kernel, so that
a pair of layers needs one sum over the devices and no exchange between them (Megatron-LM, Shoeybi et al. 2019, arXiv
1909.08053). If neither can be split evenly, and for leaves other than kernels, it is the longest axis that can be
(ZeRO's third stage, Rajbhandari et al. 2020, arXiv 1910.02054). Small leaves are whole on every device: fetching them
would take longer than keeping them. Over `fsdp` it is the same axis, or the next one where `model` has it: so what
computes by tensor parallelism on the devices of `fsdp` takes each kernel where it lies.

Where we differ: the rule sees one leaf at a time, by the end of its name and its shape. So Adam's moments, whose names
end like their parameter's, have its layout. The layout changes no number except by the order of sums.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import MeshShape
from longhaul.runtime.mesh import DATA, FSDP, MODEL
from longhaul.types import PyTree, is_local

LEAST = 1024
"""Number of elements below which each device has the whole leaf."""

_ROWS = re.compile(r"out|narrow|layer_\d*[13579]")
"""Names of layers whose inputs are the outputs of a layer that is split by these."""


def spec(path: tuple[str, ...], shape: tuple[int, ...], model: int, fsdp: int = 1) -> PartitionSpec:
    """Layout of a leaf over `fsdp` x `model` devices: `path` is its names from the root, its last two axes a kernel's.

    Example: (..., "layer_0", "kernel") of shape (8, 256) over 2 -> P(None, "model"), and "layer_1" -> P("model", None).
    """
    if math.prod(shape) < LEAST:
        return PartitionSpec()
    longest = sorted(range(len(shape)), key=lambda axis: -shape[axis])
    axes, pair = longest, [len(shape) - 1, len(shape) - 2]
    if len(shape) > 1:
        names = [name for name in path[-2:] if name != "kernel"]
        axes = [*(reversed(pair) if names and _ROWS.fullmatch(names[-1]) else pair), *axes]
    axes_of: dict[int, tuple[str, ...]] = {}
    if model > 1 and (chosen := next((axis for axis in axes if shape[axis] % model == 0), None)) is not None:
        axes_of[chosen] = (MODEL,)
    if fsdp > 1:
        free = [axis for axis in axes if axis not in axes_of and shape[axis] % fsdp == 0]
        both = [axis for axis in axes_of if shape[axis] % (fsdp * model) == 0]
        for axis in [*free, *both][:1]:
            axes_of[axis] = (FSDP, *axes_of.get(axis, ()))
    if not axes_of:
        return PartitionSpec()
    split = {axis: mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes for axis, mesh_axes in axes_of.items()}
    return PartitionSpec(*(split.get(axis) for axis in range(len(shape))))


def specs(tree: PyTree, model: int, fsdp: int = 1) -> PyTree:
    """`spec` of each leaf of a pytree of arrays or shapes. `Local` parts are not split over these axes."""

    def one(path: tuple[Any, ...], leaf: Any) -> PyTree:
        if is_local(leaf):
            return jax.tree.map(lambda _: PartitionSpec(), leaf)
        return spec(names(path), tuple(leaf.shape), model, fsdp)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_local)


def specs_on(tree: PyTree, mesh: Mesh) -> PyTree:
    """`specs` for the sizes of a mesh."""
    return specs(tree, mesh.shape[MODEL], mesh.shape[FSDP])


def shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """Layout of each leaf of an algorithm's state on the mesh; `Local` parts lie with their shard."""
    laid = jax.tree.map(lambda each: NamedSharding(mesh, each), specs_on(tree, mesh), is_leaf=_is_spec)

    def own(part: PyTree) -> PyTree:
        return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec(DATA)), part)

    return jax.tree.map(lambda x: own(x) if is_local(x) else x, laid, is_leaf=is_local)


def laid(tree: PyTree, mesh: MeshShape) -> PyTree:
    """`tree` of gradients in the layout of their parameters, while a program is traced.

    Left to itself, the compiler splits what is smaller than `LEAST` as well, and gathers it again for every use.
    """
    return jax.lax.with_sharding_constraint(tree, specs(tree, mesh.model, mesh.fully))


def fetched(tree: PyTree) -> PyTree:
    """`tree` of kernels, whole on each device of `fsdp`, while the program of a shard is traced. Their gradients are
    summed into parts."""
    model, fsdp = meshes.parts()
    if fsdp == 1:
        return tree

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        there, here = (spec(names(path), leaf.shape, model, count) for count in (fsdp, 1))
        return leaf if there == here else _fetched(leaf, there, here)

    return jax.tree_util.tree_map_with_path(one, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _fetched(leaf: jax.Array, there: PartitionSpec, here: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(_by_rows(leaf, there), here)


def _fetched_forwards(leaf: jax.Array, there: PartitionSpec, here: PartitionSpec) -> tuple[jax.Array, None]:
    return _fetched(leaf, there, here), None


def _fetched_backwards(there: PartitionSpec, here: PartitionSpec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (_by_rows(jax.lax.with_sharding_constraint(gradient, there), there),)


def _by_rows(kernel: jax.Array, there: PartitionSpec) -> jax.Array:
    """A kernel that lies `there`, row by row in a GPU's memory.

    A GPU gathers along the axis of the longest stride, and products take transposed kernels. Left to XLA, the stack of
    all layers would be copied into the order of either; so a layer's part is turned where it is used.
    """
    split = kernel.ndim == 2 and set(there) == {None, FSDP}
    return meshes.in_order(kernel, (0, 1), there.index(FSDP)) if split else kernel


_fetched.defvjp(_fetched_forwards, _fetched_backwards)


def tensor_parallel(tree: PyTree) -> PyTree:
    """`tree` of kernels, split over the devices of `fsdp` as over those of `model`, while the program of a shard is
    traced."""
    model, fsdp = meshes.parts()
    if fsdp == 1:
        return tree
    both = FSDP if model == 1 else (FSDP, MODEL)  # an axis of one device is none of the compiler's

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        axes = spec(names(path), leaf.shape, model * fsdp)
        here = PartitionSpec(*(both if axis else None for axis in axes))
        return _by_rows(jax.lax.with_sharding_constraint(leaf, here), here)

    return jax.tree_util.tree_map_with_path(one, tree)


class Shares(NamedTuple):
    """Bytes of a pytree."""

    whole: int
    own: int  # on each device


def shares(tree: PyTree, model: int, fsdp: int = 1) -> Shares:
    """Bytes of a pytree of shapes on each of `fsdp` x `model` devices."""
    size = {MODEL: model, FSDP: fsdp}

    def parts(each: PartitionSpec) -> int:
        named = [name for names in each if names for name in ((names,) if isinstance(names, str) else names)]
        return math.prod(size[name] for name in named)

    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]
    split = [parts(each) for each in jax.tree.leaves(specs(tree, model, fsdp), is_leaf=_is_spec)]
    return Shares(sum(sizes), sum(size // count for size, count in zip(sizes, split, strict=True)))


def check(tree: PyTree, mesh: MeshShape) -> None:
    """Check of a mesh: ValueError if it shall split an algorithm's state (its shapes), and no leaf can be split."""
    if mesh.parts == 1:
        return
    for axis, model, fsdp in ((f"--mesh is {mesh}", mesh.model, 1), (f"--fsdp with --mesh {mesh}", 1, mesh.fully)):
        share = shares(tree, model, fsdp)
        if model * fsdp > 1 and share.own == share.whole:
            raise ValueError(
                f"{axis}, and no parameters of this network can be split into {model * fsdp} parts: choose a number "
                f"that divides the layers' width, a wider network (leaves of less than {LEAST} numbers stay whole), "
                f"or {'--mesh data=N alone' if fsdp == 1 else 'leave --fsdp out'}"
            )


def describe(tree: PyTree, mesh: MeshShape) -> list[str]:
    """Line on the share of an algorithm's state (its shapes) on a device, if it is split."""
    if mesh.parts == 1:
        return []
    whole, own = shares(tree, mesh.model, mesh.fully)
    return [
        f"parameters and optimiser are split over {mesh.parts} devices: {own / 1e6:,.3g} of {whole / 1e6:,.3g} MB lie "
        f"on each ({own / whole:.0%})"
    ]


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Keys of a path in a pytree, as words."""
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
