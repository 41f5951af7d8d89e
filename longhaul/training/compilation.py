"""Compilation of a run's program before its first update, and the device memory that the program needs.

`opened` starts the compiler while the first data are read, where their shapes are known before (`Precompilation`).
`compiled` returns the program of the run's topology, and `weigh` refuses one that the devices cannot hold.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import jax

from longhaul.config.run import Driving, Origin, Run, to_dict
from longhaul.runtime import device_memory as footprints
from longhaul.runtime import process_group
from longhaul.runtime.errors import RunError
from longhaul.telemetry import screen
from longhaul.topologies import fused, fused_population
from longhaul.training import actor_learner, inference_server, members, reasoning_setup
from longhaul.training.assemble import Assembly, assemble, check_room
from longhaul.training.data import Feed, Feeding, feed
from longhaul.training.run_dir import write_json
from longhaul.types import Progress, PyTree

THREAD = "compiling ahead"
"""Name of a thread that compiles beside other work."""

COMPILED_FROM = (
    "environment", "algorithm", "topology", "population", "num_envs", "num_steps", "devices", "model", "block",
)  # fmt: skip
"""Fields of a Run on which the time depends that its program takes to compile."""

Program = fused.Program | actor_learner.CompiledActorLearner | inference_server.CompiledServer
"""Compiled program of a run's topology."""


class Precompilation:
    """Compilation of a resolved run's program in a thread, while its first data are read; `close` it.

    Possible if a feed knows the shapes of its contexts before reading (`Feed.like`): shards, whose index has all sizes.
    """

    def __init__(self, run: Run, assembly: Assembly, context: PyTree):
        assert run.block is not None
        self._like = fused.outline(assembly.algorithm, assembly.enter, context, assembly.mesh), context
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        parts = assembly.algorithm, assembly.collector_in, *self._like, assembly.mesh
        self._program = self._thread.submit(fused.compiled, *parts, block=run.block, shards=assembly.shards)

    def program(self, progress: Progress, context: PyTree) -> fused.Program | None:
        """The compiled program, awaited; None if it was compiled for other shapes."""
        return self._program.result() if matches((progress, context), self._like) else None

    def close(self) -> None:
        """Wait for the compiler, which cannot be stopped."""
        self._thread.shutdown()


def matches(tree: PyTree, like: PyTree) -> bool:
    """True if arrays have the structure, shapes, types and shardings that a program was compiled for."""
    (leaves, structure), (expected, expected_structure) = jax.tree.flatten(tree), jax.tree.flatten(like)
    if bool(structure != expected_structure):  # type: ignore[operator]  # JAX says nothing of their types
        return False
    pairs = zip(leaves, expected, strict=True)
    return all(
        (x.shape, x.dtype) == (y.shape, y.dtype) and x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in pairs
    )


class Opened(NamedTuple):
    """Data of a run with its functions, and its compilation if under way."""

    feeding: Feeding
    assembly: Assembly
    precompilation: Precompilation | None  # None for populations, several processes, other topologies than `fused`


def opened(run: Run, source: Feed, origin: Origin, closed: ExitStack) -> Opened:
    """Data of a resolved run from `origin` on, open until `closed`."""
    if source.like is None:
        feeding = closed.enter_context(closing(Feeding(source, origin)))
        return Opened(feeding, assemble(run, source.within, feeding.now.context, origin), None)
    assembly = assemble(run, source.within, source.like, origin)
    precompilation = None
    if run.topology == "fused" and not run.many and not assembly.mesh.is_multi_process:
        precompilation = closed.enter_context(closing(Precompilation(run, assembly, source.like)))
    return Opened(closed.enter_context(closing(Feeding(source, origin))), assembly, precompilation)


def key(run: Run) -> dict[str, Any]:
    """Settings on which the time depends that a run's program takes to compile."""
    return {name: value for name, value in to_dict(run).items() if name in COMPILED_FROM}


def compiled(
    run: Run, assembly: Assembly, context: PyTree, progress: Progress, precompilation: Precompilation | None = None
) -> Program:
    """Program of the run's topology. Raises RunError if the compiler finds no room on a device."""
    if run.topology == "actors":
        return actor_learner.prepare(run, assembly, context, progress)
    if run.topology == "central":
        return inference_server.prepare(run, assembly, context, progress)
    assert run.block is not None
    try:
        if run.many:
            assert run.population.together is not None
            return fused_population.compiled(
                assembly.algorithm, assembly.collector_in, progress, context, assembly.mesh, block=run.block,
                width=run.population.together, within=members.within(assembly.members),
            )  # fmt: skip
        if precompilation is not None and (program := precompilation.program(progress, context)):
            return program
        return fused.compiled(
            assembly.algorithm, assembly.collector_in, progress, context, assembly.mesh, block=run.block,
            shards=assembly.shards,
        )  # fmt: skip
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise RunError(f"the compiler finds no room on a device ({error}); give {footprints.REMEDY}") from error


def weigh(
    folder: Path, run: Run, assembly: Assembly, program: Program, progress: Progress, feeding: Feeding
) -> None:  # fmt: skip
    """Report the run's device memory before its first update. Raises RunError if it cannot fit."""
    footprint = _footprint(run, assembly, program, progress, feeding)
    if footprint is None:
        return
    if refusal := footprint.refusal():  # nothing is written: a run that never started leaves no folder
        raise RunError(refusal)
    process_group.say(footprint.line())
    if warning := footprint.warning():
        process_group.say(warning)
    if process_group.index() == 0:
        write_json(folder / footprints.FILE, footprint.plain())


def learner_footprint(run: Run) -> footprints.Footprint | None:
    """Memory that a resolved run of actors takes on the learner's device, compiled as for training.

    Nothing is trained and no folder made. Policies that one process serves to all actors are not in it.
    """
    with closing(Feeding(source := feed(run))) as feeding:
        context = feeding.now.context
        assembly = assemble(run, source.within, context)
        check_room(assembly, context, fused_too=False)
        progress = assembly.start(run.seed, context)
        progress = progress._replace(state=reasoning_setup.loaded(run, progress.state))
        untrained = actor_learner.policy_on_host(run, assembly, progress.state)  # as a run keeps it
        with screen.stage("compiling"):
            program = compiled(run, assembly, context, progress)
        result = _footprint(run, assembly, program, progress, feeding)
        del untrained
    return result


def _footprint(
    run: Run, assembly: Assembly, program: Program, progress: Progress, feeding: Feeding
) -> footprints.Footprint | None:
    """Device memory of a compiled program with the state that it carries; None if the compiler does not report it."""
    context = feeding.now.context
    if isinstance(program, fused.Program):
        parts = footprints.parts(assembly.algorithm, progress, context)
        return footprints.footprint(program.executable, assembly.mesh, parts, feeding.ahead())
    parts = footprints.parts(assembly.algorithm, progress._replace(carry=()), ())
    footprints.trim()
    beside: dict[str, int] = {}
    elsewhere: dict[str, int] = {}
    if isinstance(program, actor_learner.CompiledActorLearner):
        beside = actor_learner.beside(run, assembly, program, progress.state)
    if run.topology == "actors" and isinstance(run.environment, Driving):
        banks = {"bank": footprints.bytes_on_device(context)} | feeding.ahead()
        if actor_learner.acts_on_learner(run, assembly):
            beside |= banks
        else:
            elsewhere = {f"{name} on each device of actors": n for name, n in banks.items()}
    found = footprints.footprint(program.update, assembly.mesh, parts, beside)
    return None if found is None else found._replace(elsewhere=elsewhere)
