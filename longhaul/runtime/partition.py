"""Partition of a model's parameters over the `model` axis of a mesh, by names and shapes alone.

A kernel [inputs, outputs] is split by its outputs, or by its inputs if these are the outputs of a split kernel, so that
a pair of layers needs one sum over the devices and no exchange between them (Megatron-LM, Shoeybi et al. 2019, arXiv
1909.08053). If neither can be split evenly, and for leaves other than kernels, it is the longest axis that can be
(ZeRO's third stage, Rajbhandari et al. 2020, arXiv 1910.02054). Small leaves are whole on every device: fetching them
would take longer than keeping them.

Where we differ: the rule sees one leaf at a time, by the end of its name and its shape. So Adam's moments, whose names
end like their parameter's, have its layout. The layout changes no number except by the order of sums.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longhaul.runtime.devices import MeshShape
from longhaul.runtime.mesh import DATA, MODEL
from longhaul.types import PyTree, is_local

LEAST = 1024
"""Number of elements below which each device has the whole leaf."""

_ROWS = re.compile(r"out|narrow|layer_\d*[13579]")
"""Names of layers whose inputs are the outputs of a layer that is split by these."""


def spec(path: tuple[str, ...], shape: tuple[int, ...], model: int) -> PartitionSpec:
    """Layout of a leaf over `model` devices: `path` is its names from the root, its last two axes a kernel's.

    Example: (..., "layer_0", "kernel") of shape (8, 256) over 2 -> P(None, "model"), and "layer_1" -> P("model", None).
    """
    if model == 1 or math.prod(shape) < LEAST:
        return PartitionSpec()
    axes = sorted(range(len(shape)), key=lambda axis: -shape[axis])
    if len(shape) > 1:
        names = [name for name in path[-2:] if name != "kernel"]
        pair = [len(shape) - 1, len(shape) - 2]
        axes = [*(reversed(pair) if names and _ROWS.fullmatch(names[-1]) else pair), *axes]
    chosen = next((axis for axis in axes if shape[axis] % model == 0), None)
    if chosen is None:
        return PartitionSpec()
    return PartitionSpec(*(MODEL if axis == chosen else None for axis in range(len(shape))))


def specs(tree: PyTree, model: int) -> PyTree:
    """`spec` of each leaf of a pytree of arrays or shapes. `Local` parts are not split over `model`."""

    def one(path: tuple[Any, ...], leaf: Any) -> PyTree:
        if is_local(leaf):
            return jax.tree.map(lambda _: PartitionSpec(), leaf)
        return spec(names(path), tuple(leaf.shape), model)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_local)


def shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """Layout of each leaf of an algorithm's state on the mesh; `Local` parts lie with their shard."""
    laid = jax.tree.map(lambda each: NamedSharding(mesh, each), specs(tree, mesh.shape[MODEL]), is_leaf=_is_spec)
    own = NamedSharding(mesh, PartitionSpec(DATA))
    return jax.tree.map(lambda x: jax.tree.map(lambda _: own, x) if is_local(x) else x, laid, is_leaf=is_local)


class Shares(NamedTuple):
    """Bytes of a pytree."""

    whole: int
    own: int  # on each device


def shares(tree: PyTree, model: int) -> Shares:
    """Bytes of a pytree of shapes on each of `model` devices."""
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]
    split = [MODEL in each for each in jax.tree.leaves(specs(tree, model), is_leaf=_is_spec)]
    return Shares(sum(sizes), sum(size // (model if apart else 1) for size, apart in zip(sizes, split, strict=True)))


def check(tree: PyTree, mesh: MeshShape) -> None:
    """Raise ValueError if a mesh shall split an algorithm's state (its shapes), and no leaf can be split."""
    if mesh.model == 1:
        return
    share = shares(tree, mesh.model)
    if share.own == share.whole:
        raise ValueError(
            f"--mesh is {mesh}, and no parameters of this network can be split into {mesh.model} parts: choose a "
            f"model that divides the layers' width, a wider network (leaves of less than {LEAST} numbers stay whole), "
            "or --mesh data=N alone"
        )


def describe(tree: PyTree, mesh: MeshShape) -> list[str]:
    """Line on the share of an algorithm's state (its shapes) on a device, if it is split."""
    if mesh.model == 1:
        return []
    whole, own = shares(tree, mesh.model)
    return [
        f"parameters and optimiser are split over {mesh.model} devices: {own / 1e6:,.3g} of {whole / 1e6:,.3g} MB lie "
        f"on each ({own / whole:.0%})"
    ]


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Keys of a path in a pytree, as words."""
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
