"""Compilation of a run's program in a thread, while its first data are read.

Possible if a feed knows the shapes of its contexts before reading (`Feed.like`): shards, whose index has all sizes.
Otherwise sizes follow from the data, and the compiler waits for them.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from typing import Any

import jax

from longhaul.config.run import Origin, Run
from longhaul.topologies import fused
from longhaul.training.assemble import Assembly, assemble
from longhaul.training.data import Feed, Feeding
from longhaul.types import Progress, PyTree

THREAD = "compiling ahead"
"""Name of the compiling thread."""


class Ahead:
    """Compilation under way of a resolved run's program; `close` it."""

    def __init__(self, run: Run, assembly: Assembly, context: PyTree):
        assert run.block is not None
        how: dict[str, Any] = {"block": run.block, "shards": assembly.shards}
        self._like = fused.outline(assembly.algorithm, assembly.enter, context, assembly.mesh), context
        self._made: fused.Program | None = None
        self._error: BaseException | None = None

        def work() -> None:
            try:
                progress, context = self._like
                self._made = fused.compiled(
                    assembly.algorithm, assembly.collector_in, progress, context, assembly.mesh, **how
                )
            except BaseException as error:  # raised where the program is asked for
                self._error = error

        self._thread = threading.Thread(target=work, name=THREAD)
        self._thread.start()

    def program(self, progress: Progress, context: PyTree) -> fused.Program | None:
        """The compiled program, awaited; None if it was compiled for other shapes."""
        if not alike((progress, context), self._like):
            return None
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._made

    def close(self) -> None:
        """Wait for the compiler, which cannot be stopped."""
        self._thread.join()


def opened(run: Run, source: Feed, origin: Origin, closed: ExitStack) -> tuple[Feeding, Assembly, Ahead | None]:
    """Data of a resolved run from `origin` on, its functions, and its compilation if under way.

    None is under way for populations, several processes, and other topologies than `fused`.
    """
    if source.like is None:
        feeding = closed.enter_context(closing(Feeding(source, origin)))
        return feeding, assemble(run, source.within, feeding.now.context, origin), None
    assembly = assemble(run, source.within, source.like, origin)
    sooner = None
    if run.topology == "fused" and not run.many and not assembly.mesh.is_multi_process:
        sooner = closed.enter_context(closing(Ahead(run, assembly, source.like)))
    return closed.enter_context(closing(Feeding(source, origin))), assembly, sooner


def alike(tree: PyTree, like: PyTree) -> bool:
    """True if arrays have the structure, shapes, types and shardings that a program was compiled for."""
    (leaves, one), (others, other) = jax.tree.flatten(tree), jax.tree.flatten(like)
    if bool(one != other):  # type: ignore[operator]  # JAX says nothing of their types
        return False
    pairs = zip(leaves, others, strict=True)
    return all(
        (x.shape, x.dtype) == (y.shape, y.dtype) and x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in pairs
    )
