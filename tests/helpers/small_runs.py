"""Runs that take a second, and what two runs must have in common to be the same."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from longhaul.algorithms.config import PPOConfig
from longhaul.config import resolve as runs
from longhaul.config.run import BEGINNING, Named, Origin, Run
from longhaul.networks.config import NetworkConfig
from longhaul.runtime.provenance import params_sha256
from longhaul.telemetry import sinks
from longhaul.topologies import fused
from longhaul.training import assemble as training_assemble
from longhaul.training import compilation, evaluate, final_evaluation, loop, run_dir
from longhaul.training.assemble import Assembly
from longhaul.training.checkpoint.checkpoint import Checkpoints

TIMES = ("wall_seconds", "sps")
"""Names that may differ between records of two runs that are the same."""


def small(**changes: Any) -> Run:
    """CartPole, 60 updates of 8 worlds in calls of 2; a record every 4, a checkpoint every 6."""
    settings: dict[str, Any] = {
        "algorithm": PPOConfig(num_minibatches=2, update_epochs=1, lr=3e-3, network=NetworkConfig(hidden_dim=8)),
        "environment": Named("cartpole"),
        "total_steps": 8 * 16 * 60,
        "num_envs": 8,
        "num_steps": 16,
        "seed": 3,
        "devices": 1,
        "log_interval": 4,
        "block": 2,
        "save_interval": 6,
        "evaluation_episodes": 4,
    }
    return runs.resolve(Run("small", **(settings | changes)))


def begin(run: Run, folder: Path) -> loop.Outcome:
    """Trains from the start in a new folder."""
    folder.mkdir(parents=True)
    return loop.train(run, folder, resumed=False)


def resume(folder: Path) -> loop.Outcome:
    return loop.train(run_dir.load_run(folder), folder, resumed=True)


def stop(run: Run, folder: Path, save: int = 1) -> None:
    """Trains in `folder`, or goes on there, until SIGTERM after checkpoint number `save`; checks the outcome."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", after(save, lambda: signal.raise_signal(signal.SIGTERM), Checkpoints.save))
        assert (resume(folder) if folder.exists() else begin(run, folder)) == (loop.STOPPED, None)


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, without the times."""
    return [{k: v for k, v in r.items() if k not in TIMES} for r in sinks.read(folder / "metrics.jsonl")]


def result(folder: Path) -> dict[str, Any]:
    """result.json, without the times, and without the memory, which depends on how many updates a call has."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return {k: v for k, v in found.items() if not k.endswith("seconds") and k not in {*TIMES, "memory"}}


def checkpoints(folder: Path) -> list[int]:
    """The updates at which there are checkpoints."""
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


ASSEMBLIES: dict[str, Assembly] = {}
PROGRAMS: dict[tuple[Any, ...], fused.Program] = {}
STARTS: dict[tuple[int, int], Any] = {}
SCORERS: dict[str, Any] = {}
"""Parts that quick runs share, by their shape, or by an assembly's algorithm."""

COMMON = Named("cartpole"), Named("tests.helpers.own_environments:Corridor")
"""Environments whose runs share their parts with those of other files."""

NUMBERS = itertools.count()


def quick_programs(*, evaluated: bool) -> Any:
    """Fixture of a module in which `make_quick` holds."""

    @pytest.fixture(scope="module", autouse=True)
    def programs() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            make_quick(patch, evaluated=evaluated)
            yield

    return programs


def make_quick(patch: pytest.MonkeyPatch, *, evaluated: bool = False) -> None:
    """Until `patch` is undone, runs of the same shape share what is compiled, and no episode is played at the end,
    unless they are to be `evaluated`.

    Compiling takes far longer than these runs do. Those in COMMON environments share it with the tests of other files,
    too; in those that a test has changed, only until `patch` is undone. The stand-in of an evaluation tells policies
    apart by every bit.
    """
    own = next(NUMBERS)
    assemble, compiled, start = training_assemble.assemble, fused.compiled, Assembly.start
    scorer = evaluate.scorer

    def whose(run: Run) -> Any:
        return "everybody's" if run.environment in COMMON else own

    def assemble_once(run: Run, within: Any, context: Any, origin: Origin = BEGINNING) -> Assembly:
        sizes = run.total_steps, run.num_envs, run.num_steps, run.mesh, run.lr_rule, run.base_batch
        begins = run.topology, run.acting.actors, run.acting.pin and run.acting.staleness  # what a carry holds at first
        shape = repr((whose(run), run.environment, run.algorithm, run.deterministic, *sizes, origin, begins))
        if shape not in ASSEMBLIES:
            ASSEMBLIES[shape] = assemble(run, within, context, origin)
        return ASSEMBLIES[shape]

    def compiled_once(
        algorithm: Any, collector_in: Any, progress: Any, context: Any, mesh: Any, *, block: int, shards: Any
    ) -> fused.Program:
        key = id(algorithm), block, *(leaf.shape for leaf in jax.tree.leaves(context))
        if key not in PROGRAMS:
            PROGRAMS[key] = compiled(algorithm, collector_in, progress, context, mesh, block=block, shards=shards)
        return PROGRAMS[key]

    def start_once(assembly: Assembly, seed: int, context: Any) -> Any:
        key = id(assembly.algorithm), seed
        if key not in STARTS:
            STARTS[key] = start(assembly, seed, context)
        return jax.tree.map(lambda leaf: leaf.copy(), STARTS[key])  # the loop donates what it gets

    def digests(run: Run, policy: Any, untrained: Any, **_: Any) -> Iterator[final_evaluation.Evaluated]:
        for name, params in (("trained", policy), ("untrained", untrained)):
            yield final_evaluation.Evaluated(name, {"digest": params_sha256(params)})

    patch.setattr(compilation, "assemble", assemble_once)

    def scorer_once(run: Run, episodes: int) -> Any:
        key = repr((whose(run), run.environment, run.algorithm, run.seed, episodes))
        if key not in SCORERS:
            SCORERS[key] = scorer(run, episodes)
        return SCORERS[key]

    if evaluated:
        patch.setattr(evaluate, "scorer", scorer_once)
    else:
        patch.setattr(final_evaluation, "evaluations", digests)
    patch.setattr(fused, "compiled", compiled_once)
    patch.setattr(Assembly, "start", start_once)


def after(calls: int, act: Callable[[], object], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which also does `act()` at the end of its call number `calls`, counted from 1."""
    count = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        value = function(*args, **kwargs)
        count += 1
        if count == calls:
            act()
        return value

    return counted
