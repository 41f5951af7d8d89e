"""A run's program compiled in a thread, while the data of its first context are read.

Possible where a feed knows what its contexts look like before the first is read (`Feed.like`): of shards, whose index
has all sizes. Elsewhere sizes follow from the data, and the compiler waits for them.
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
"""The name of the thread that does."""


class Ahead:
    """The program of a resolved run, under way; `close` it."""

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
            except BaseException as error:  # of the compiler: whoever asks for the program hears of it
                self._error = error

        self._thread = threading.Thread(target=work, name=THREAD)
        self._thread.start()

    def program(self, progress: Progress, context: PyTree) -> fused.Program | None:
        """The program, awaited, for what is like this; None where it was compiled for something else."""
        if not alike((progress, context), self._like):
            return None
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._made

    def close(self) -> None:
        """Waits for the compiler, which can't be stopped."""
        self._thread.join()


def opened(run: Run, source: Feed, origin: Origin, closed: ExitStack) -> tuple[Feeding, Assembly, Ahead | None]:
    """The data of a resolved run from `origin` on, its functions, and its program, if that is under way.

    Of several runs side by side, of several processes and of other topologies than `fused` it is not.
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
    """Whether arrays have the structure, shapes, types and places that a program was compiled for."""
    (leaves, one), (others, other) = jax.tree.flatten(tree), jax.tree.flatten(like)
    if bool(one != other):  # type: ignore[operator]  # JAX says nothing of their types
        return False
    pairs = zip(leaves, others, strict=True)
    return all(
        (x.shape, x.dtype) == (y.shape, y.dtype) and x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in pairs
    )
