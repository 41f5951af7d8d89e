"""Gradients that meet while the backward pass still computes others.

The gradients of the last layers are ready first. They travel in buckets, in the order in which the program computes
them, while the gradients of earlier layers are computed (Li et al. 2020, arXiv 2006.15704). Where we differ: the order
is read from the traced program, not from the order in which the layers were made.

A bucket waits for all of the one before it, and nothing else does: so a compiler neither joins them into one
collective, which would wait for all gradients, nor sends them in another order. They wait by an addition of nothing
that the compiler has to compute: it drops its own barrier (`optimization_barrier`) before it joins collectives. Small
networks are one bucket, and their programs are those without any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh

from longhaul.runtime import mesh as meshes
from longhaul.types import PyTree

BUCKET = 4 * 2**20
"""Bytes from which a bucket is sent. A smaller one costs more messages, a larger one begins later."""

OPTIONS: dict[str, dict[str, str | bool]] = {"gpu": {"xla_gpu_enable_latency_hiding_scheduler": True}}
"""Options of the compiler by platform: it computes what it can while a collective is under way. A CPU's compiler does
so by itself, and a TPU's."""

_HEAVY = ("dot_general", "conv_general_dilated", "scan", "while", "cond", "custom_vmap_call", "ragged_dot_general")
"""Operations of a gradient that take time; those between them follow at once."""


def several(tree: PyTree) -> bool:
    """True if gradients like `tree`, arrays or shapes, are more than one bucket."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) > BUCKET


def mean(tree: PyTree, order: Callable[[], Sequence[int]]) -> PyTree:
    """Mean over `data` of gradients in buckets. `order`: numbers of their leaves as they are ready."""
    if jax.lax.axis_size(meshes.DATA) == 1 or not several(tree):
        return meshes.mean_over_data(tree)
    leaves, structure = jax.tree.flatten(tree)
    nothing: jax.Array | None = None
    for bucket in buckets([leaf.nbytes for leaf in leaves], order()):
        sent = [leaves[i] for i in bucket]
        if nothing is not None:
            sent = [leaf + nothing.astype(leaf.dtype) for leaf in sent]
        means = meshes.mean_over_data(sent)
        for i, leaf in zip(bucket, means, strict=True):
            leaves[i] = leaf
        # Of each leaf: a bucket is several collectives. 0 y is not 0 to a compiler: y may be infinite.
        nothing = jnp.sum(jnp.stack([0.0 * leaf.reshape(-1)[0].astype(jnp.float32) for leaf in means]))
    return jax.tree.unflatten(structure, leaves)


def buckets(sizes: Sequence[int], order: Sequence[int]) -> list[list[int]]:
    """Numbers of leaves of these bytes in buckets, each full but the last."""
    filled: list[list[int]] = [[]]
    for i in order:
        if sum(sizes[j] for j in filled[-1]) >= BUCKET:
            filled.append([])
        filled[-1].append(i)
    if len(filled) > 1 and sum(sizes[j] for j in filled[-1]) < least():
        last = filled.pop()
        filled[-1] += last
    return filled


def least() -> int:
    """Bytes of the smallest bucket: a last one that is smaller travels with the one before it."""
    return BUCKET // 4


def ready(function: Callable[..., tuple[PyTree, Any]], *arguments: Any) -> list[int]:
    """Numbers of the leaves of a function's first result, in the order in which its program has computed them."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    count = len(jax.tree.leaves(shapes[0]))
    known: dict[Any, int] = {}

    def when(atom: Any) -> int:
        return -1 if isinstance(atom, core.Literal) else known.get(atom, -1)

    for place, equation in enumerate(closed.jaxpr.eqns):
        last = max(map(when, equation.invars), default=-1)
        known.update(dict.fromkeys(equation.outvars, place if _is_heavy(equation) else last))
    times = [when(atom) for atom in closed.jaxpr.outvars[:count]]
    return sorted(range(count), key=lambda i: (times[i], -i))


def _is_heavy(equation: Any) -> bool:
    """True for an operation that takes time, or a call of a program with one."""
    if equation.primitive.name in _HEAVY:
        return True
    inner = [each for each in equation.params.values() if isinstance(each, core.ClosedJaxpr | core.Jaxpr)]
    return any(_is_heavy(each) for part in inner for each in part.eqns)


def compiled(lowered: jax.stages.Lowered, mesh: Mesh) -> jax.stages.Compiled:
    """Program of a mesh, compiled such that collectives of several shards overlap with other work.

    An option that this version of the compiler does not know is left out.
    """
    options = OPTIONS.get(mesh.devices.flat[0].platform, {}) if mesh.shape[meshes.DATA] > 1 else {}
    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if "compile option" not in str(error):
            raise
        return lowered.compile()
