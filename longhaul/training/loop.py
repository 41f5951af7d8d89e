"""Training loop around a topology: logging, checkpoints, stopping, resuming, evaluation and report.

Exactness: metrics up to a checkpoint are on disk before it is saved, and those after it are dropped on resume. Every
random number comes from the run's seed and the update's number. So a run killed anywhere and resumed ends with the same
parameters, bit by bit, and a metrics file without gap or repeat.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from longhaul.algorithms import population as pbt
from longhaul.config import population
from longhaul.config.run import Driving, Named, Origin, Run, to_dict
from longhaul.driving.render.recording import Recording
from longhaul.envs import external
from longhaul.networks import actor_critic
from longhaul.runtime import bounded_json, compile_cache, files, heartbeat, partition, process_group, user_modules
from longhaul.runtime import device_memory as footprints
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.errors import STOPPED, RunError
from longhaul.runtime.provenance import params_sha256, provenance
from longhaul.runtime.signals import Stop, Stopped, listening
from longhaul.telemetry import health_log, screen, sinks, tracking
from longhaul.telemetry.aggregate import Sums
from longhaul.telemetry.films import Film
from longhaul.topologies import fused
from longhaul.topologies import population as populations
from longhaul.topologies.actor_learner import learner
from longhaul.training import (
    actor_learner,
    evaluate,
    evaluate_driving,
    inference_server,
    init_from,
    nan_rollback,
    reasoning_setup,
    report,
    run_dir,
    runs,
    store,
)
from longhaul.training import data as feeds
from longhaul.training import population as members
from longhaul.training import publish as publishing
from longhaul.training.assemble import Assembly, assemble, check_room, decisions
from longhaul.training.checkpoint import resume
from longhaul.training.checkpoint.checkpoint import CheckpointError, Checkpoints, Found
from longhaul.training.clock import Clock, Seconds
from longhaul.training.data import Feed, Feeding, feed
from longhaul.training.nan_rollback import Poisoned
from longhaul.training.periodic_evaluation import Evaluations
from longhaul.training.run_dir import alone, called, load_run, read_result, save_run, write_json
from longhaul.types import Params, Progress, PyTree

COMPILED_FROM = (
    "environment", "algorithm", "topology", "population", "num_envs", "num_steps", "devices", "model", "block",
)  # fmt: skip
"""Fields of a Run on which the time depends that its program takes to compile."""

Program = fused.Program | actor_learner.CompiledActorLearner | inference_server.CompiledServer
"""Compiled program of a run's topology."""


class Outcome(NamedTuple):
    code: int  # 0 done, STOPPED
    result: dict[str, Any] | None


Callback = Callable[[Mapping[str, Any]], Any]
"""Function of a record of metrics, called between two compiled calls; where it returns true, the run saves and stops.
"""


def train(
    run: Run,
    folder: Path,
    *,
    resumed: bool,
    source: Feed | None = None,
    asked: Mapping[str, Any] | None = None,
    callback: Callback | None = None,
    edited: bool = False,
    sole: bool = False,
) -> Outcome:
    """Training of the resolved `run` in `folder` to its end, from its newest intact checkpoint if `resumed`.

    `source` is the run's training data if already opened; `asked` are the settings that a resume's user gave, for
    run.json. `callback` is called with each record. With `edited` a run.json that was edited by hand is taken. All
    processes of a run call this with the same run. Process 0 writes what is written once, evaluates, and alone has a
    result.

    Updates that are not finite are rolled back; RunError when rollbacks run out. A signal before the folder holds a
    run raises KeyboardInterrupt, as without this function. If this process has nothing but the run to do (`sole`), a
    signal ends it at once with code STOPPED while it compiles or evaluates, which no exception could interrupt.
    """
    process_group.tell("folder", {"folder": str(folder.absolute()), "resumed": resumed, "edited": edited})
    with alone(folder), screen.outlasting(folder), listening(_say) as stop, _mirrored(folder, stop):
        sole = sole and not process_group.together() and store.of(folder) is None
        try:
            detours = process_group.share("detours", lambda: nan_rollback.detours(folder)) if resumed else 0
            attempt = Attempt(run, folder, stop, source, asked or {}, callback, edited, sole, resumed, detours)
            while True:
                try:
                    return Outcome(0, attempt.train())
                except Poisoned as poisoned:
                    detours, line = process_group.share(
                        f"detour {attempt.number}", functools.partial(nan_rollback.keep, run, folder, poisoned)
                    )
                _say(line)
                attempt = replace(attempt, source=None, resumed=True, detours=detours, number=attempt.number + 1)
        except Stopped as stopped:
            _farewell(stop, folder, stopped.done)
        except KeyboardInterrupt:
            if not stop.asked or not (folder / "run.json").exists():
                raise
            _say(f"{stop.who()}: nothing was left to save; go on with --resume {called(folder)}")
        return Outcome(STOPPED, None)


def _farewell(stop: Stop, folder: Path, done: int) -> None:
    where = f"saved after update {done}" if done else "stopped before its first update"
    _say(f"{stop.who()}: {where}; go on with --resume {called(folder)}")


def _leaving(stop: Stop, folder: Path, done: int) -> Callable[[], None]:
    """Function that ends the process while all of its work is on disk, from any thread."""

    def leave() -> None:
        _farewell(stop, folder, done)
        os._exit(STOPPED)

    return leave


def _mirrored(folder: Path, stop: Stop) -> AbstractContextManager[None]:
    """Copy of the folder in the store that it belongs to, kept by the first process."""
    return store.mirrored(folder, lambda: stop.asked, _say) if process_group.index() == 0 else nullcontext()


@dataclass(frozen=True)
class Attempt:
    """Attempt to train a run to its end, cut short by updates that are not finite."""

    run: Run
    folder: Path
    stop: Stop
    source: Feed | None  # training data, if already opened
    asked: Mapping[str, Any]  # settings that a resume's user gave
    callback: Callback | None
    edited: bool  # a run.json that was edited by hand is taken
    sole: bool  # a signal may end the process while all of its work is on disk
    resumed: bool
    detours: int  # rollbacks of the run before
    number: int = 0  # attempts of this process before

    def train(self) -> dict[str, Any]:
        """Result of the run. Raises Stopped and Poisoned."""
        run, folder, stop = self.run, self.folder, self.stop
        if (result := self._earlier_result()) is not None:
            return result
        # Other topologies wait for each program at once, or in a thread of their own.
        prepare_devices(run.shown_devices, run.threads, run.topology != "fused" and run.all_devices == 1)
        saving = Checkpoints(folder / "checkpoints", keep=run.keep, every=run.keep_every, turn=self.number)
        with closing(saving) as checkpoints, ExitStack() as closed:
            clock = Clock(closed.enter_context(closing(compile_cache.Ledger())))
            found = checkpoints.newest() if self.resumed else None
            edits = self._edits(found)
            standing = resume.standing(run, found)
            modules = _modules(run)
            with stop.at_once():
                source = self.source or feed(run, standing.origin)
                if self.resumed:
                    self._compare(source, modules)
                with screen.stage("preparing data"):
                    feeding, assembly, sooner = opened(run, source, standing.origin, closed)
            check_room(assembly, feeding.now.context, fused_too=run.topology == "fused")
            parameters, decided = self._describe(source, assembly, modules)
            if self.sole:
                stop.leave = _leaving(stop, folder, found.step if found is not None else 0)
            progress = self._begin(assembly, feeding, clock, found)
            untrained = _aside(run, assembly, progress.state)
            _say(f"{parameters:,} parameters" + f" in each of {len(assembly.members)} runs" * run.many)
            sums = Sums(len(assembly.members), found.metadata["pending"] if found is not None else None)
            if found is not None:
                clock.before = Seconds(**found.metadata["seconds"])
                with stop.at_once():
                    feeding.move(feeds.place(found.metadata["place"]))
                progress = resume.restored(
                    run, checkpoints, found, progress, standing, source, assembly, feeding.now.context
                )
            progress = nan_rollback.around(progress, found, self.detours, assembly.mesh)
            if self.resumed and process_group.index() == 0:
                known = {"decisions": decided, "asked": run_dir.load_asked(folder) | dict(self.asked)}
                resume.record(folder, run, standing, source, known, edits)
            _look(stop, int(progress.updates), assembly)
            if int(progress.updates) < assembly.updates:
                try:
                    progress = Loop(
                        run, folder, assembly, feeding, progress, checkpoints, stop, clock, sums, self.resumed,
                        about={"detours": self.detours} | resume.based(run), callback=self.callback,
                    ).train(sooner)  # fmt: skip
                except Poisoned as poisoned:
                    poisoned.before = checkpoints.newest()
                    raise
            if self.sole:
                stop.leave = _leaving(stop, folder, assembly.updates)
            policy = _aside(run, assembly, progress.state)
            if process_group.index() > 0:
                return {}
            _say("evaluating")
            return finish(run, folder, assembly, policy, untrained, clock, stop)

    def _earlier_result(self) -> dict[str, Any] | None:
        """Result of a run that is done already; None where it trains, also on to a later end."""
        done = self.folder / "result.json"
        if not self.resumed or not done.exists():
            return None
        result = read_result(self.folder)
        steps = result.get("agent_steps", 0)
        if self.run.total_steps < steps:
            raise RunError(f"--total-steps is {self.run.total_steps}, and {steps} are done; give more, or leave it out")
        if self.run.total_steps <= load_run(self.folder).total_steps:
            _say(f"run {self.folder.name} is done already; with more --total-steps it trains on")
            return result
        if process_group.index() == 0:
            done.replace(self.folder / f"result-{steps}.json")
        return None

    def _edits(self, found: Found | None) -> dict[str, list[Any]]:
        """Fields of run.json that were edited by hand since the checkpoint. Raises RunError unless that is taken."""
        if found is None:
            return {}
        edits = resume.edits(self.folder, found)
        if not self.edited:
            resume.check_edits(self.folder, found, edits)
        return edits

    def _compare(self, source: Feed, modules: Mapping[str, user_modules.Source]) -> None:
        """Comparison of a resumed run's data and modules with those that it began with. Raises RunError for the data;
        warns of the modules."""
        stored = bounded_json.read(self.folder / "run.json")
        feeds.check(self.run, source, stored, self.folder.name)
        before = {"env": stored.get("module"), **stored.get("modules", {})}
        for flag, module in modules.items():
            if line := user_modules.change(before.get(flag), module):
                _say(f"warning: {line}")

    def _describe(
        self, source: Feed, assembly: Assembly, modules: Mapping[str, user_modules.Source]
    ) -> tuple[int, list[str]]:
        """(number of parameters, lines on derived settings), reported; and the run.json of a new run.

        It is written here and not before, because bad data or sizes are an error and not a run.
        """
        run, algorithm = self.run, assembly.algorithm
        shapes = jax.eval_shape(algorithm.init, jax.random.key(run.seed))
        decided = [*decisions(run), *partition.describe(shapes, run.mesh)]
        policy = jax.eval_shape(lambda: algorithm.policy(algorithm.init(jax.random.key(0))))
        parameters = actor_critic.count((policy.state if assembly.members else policy).params)
        if not self.resumed and process_group.index() == 0:
            about = {"data": source.about, "parameters": parameters, "decisions": decided}
            others = {flag: module._asdict() for flag, module in modules.items()}
            about |= {"module": others.pop("env")} if "env" in others else {}
            about |= {"modules": others} if others else {}
            save_run(self.folder, run, provenance() | about | {"asked": run_dir.load_asked(self.folder)})
        for line in decided:
            _say(line)
        return parameters, decided

    def _begin(self, assembly: Assembly, feeding: Feeding, clock: Clock, found: Found | None) -> Progress:
        """Progress before the first update; of a new run from the parameters of another, where it begins from them."""
        with screen.stage("making the networks and the first worlds"), clock.compiling():
            progress = assembly.start(self.run.seed, feeding.now.context)
            progress = progress._replace(state=reasoning_setup.loaded(self.run, progress.state))
        if found is None and self.run.init_from is not None:
            state, line = init_from.applied(self.run, assembly.spec, progress.state)
            progress = progress._replace(state=state)
            _say(line)
        return progress


def _modules(run: Run) -> dict[str, user_modules.Source]:
    """Modules of the user's own that a run imports, by the flag that names them."""
    modules = run_dir.sources(run)
    if isinstance(run.environment, Named) and (module := external.source(run.environment.env)):
        modules["env"] = module
    return modules


def _say(line: str) -> None:
    if process_group.index() == 0:
        print(line, file=sys.stderr, flush=True)


def _look(stop: Stop, done: int, assembly: Assembly) -> None:
    """Raise Stopped if any process received a signal; `done` updates are saved."""
    if any(meshes.asking(assembly.mesh)(stop.asked)):
        raise Stopped(done)


def _on_host(policy: Params, mesh: Mesh | None = None) -> Params:
    """Copy on the host: a buffer of device_get may be donated next. On a mesh every process must call this."""
    if mesh is not None and mesh.is_multi_process:  # else parts on several devices are joined here, not on a device
        policy = meshes.gathered(policy, mesh)
    return jax.tree.map(np.array, jax.device_get(policy))


def _aside(run: Run, assembly: Assembly, state: PyTree) -> Params:
    """Policy of a state on the host, where no update overwrites it; arrays that no update changes are not copied."""
    policy = assembly.policy(state)
    if not actor_learner.shares(run, assembly):
        return _on_host(policy, assembly.mesh)
    parts = learner.parted(policy, assembly.algorithm, shared=True)
    changing, fixed = parts.split(policy)
    return parts.join(_on_host(changing), fixed)


class Outlets(NamedTuple):
    """Outputs of a run: records and notes."""

    sink: sinks.Sink
    note: Callable[[str], None]  # takes a line beside the progress
    settle: Callable[[], None]  # makes the records durable; OSError while some wait for disk space
    members: sinks.Sink  # records of each member of a population


SILENT = Outlets(sinks.Sink(), lambda line: None, lambda: None, sinks.Sink())
"""Outputs of every process but the first."""


def _outlets(
    run: Run, folder: Path, assembly: Assembly, closed: ExitStack, stop: Stop, done: int, *, resumed: bool
) -> Outlets:
    """Outputs of a run that has done `done` updates, open until `closed`."""
    steps, total = (assembly.agent_steps(updates) for updates in (done, assembly.updates))
    console = closed.enter_context(closing(screen.console(total, start=steps)))
    metrics = folder / "metrics.jsonl"
    both = sinks.jsonl(metrics), sinks.tensorboard(folder, after=steps if resumed else None)
    lines, events = (closed.enter_context(closing(sinks.patient(file, console.note))) for file in both)
    single = sinks.Sink()
    if run.many:
        apart = sinks.jsonl(folder / members.FILE, files.finite)
        single = closed.enter_context(closing(sinks.patient(apart, console.note)))
    plan = health_log.plan(assembly.spec, assembly.updates, run.num_steps)
    health = closed.enter_context(closing(health_log.watch(folder, plan, run.health, console.note)))
    mirror = closed.enter_context(tracking.mirror(folder, console.note, lambda: stop.asked))

    def settle() -> None:  # durable, like the checkpoint: a machine's failure must not lose one of them alone
        lines.flush()
        files.sync(metrics)
        if run.many:
            single.flush()
            files.sync(folder / members.FILE)

    return Outlets(sinks.fan(lines, events, health, mirror, console), console.note, settle, single)


@dataclass
class Loop:
    """Remaining updates of a run from `progress` on; each checkpoint holds `about` too."""

    run: Run
    folder: Path
    assembly: Assembly
    feeding: Feeding
    progress: Progress
    checkpoints: Checkpoints
    stop: Stop
    clock: Clock
    sums: Sums
    resumed: bool
    about: dict[str, Any]
    callback: Callback | None = None
    tell: heartbeat.Tell = field(default_factory=lambda: heartbeat.teller(os.environ))
    out: Outlets = SILENT

    def train(self, sooner: Ahead | None) -> Progress:
        """Progress after all updates. Raises Stopped and Poisoned."""
        run, assembly, done, writes = self.run, self.assembly, int(self.progress.updates), process_group.index() == 0
        if writes:
            self._drop_records_after(done)
        program = self._program(sooner)
        with ExitStack() as closed:
            if writes:
                self.out = _outlets(run, self.folder, assembly, closed, self.stop, done, resumed=self.resumed)
            publish = closed.enter_context(publishing.publishing(
                self.folder, run, assembly.policy, assembly.mesh, self.out.note, lambda: self.stop.asked
            ))  # fmt: skip
            alone = not assembly.mesh.is_multi_process
            evaluations = Evaluations(run, self.folder, assembly.updates, done, alone=alone)
            records = Records(self, evaluations)
            _look(self.stop, done, assembly)
            ask = meshes.asking(assembly.mesh, late=True)
            self.clock.train()
            saved_at = time.perf_counter()
            stopping = False
            self.stop.ending, self.stop.leave = "saving after this call", None
            self.tell(heartbeat.WORKS)
            for self.progress, n, rows in closed.enter_context(closing(self._calls(program))):
                done += n
                publish(done, n, self.progress.state)
                records.add(done, n, rows)
                due = writes and time.perf_counter() - saved_at >= 60.0 * run.save_interval_minutes
                if due:  # all processes learn of it, with several one call later
                    saved_at = time.perf_counter()
                due, stopping = ask(due, self.stop.asked)
                if run.save_interval is not None:
                    due = done // run.save_interval > (done - n) // run.save_interval
                if evaluations.due(done, n) and not stopping and done < assembly.updates:
                    records.flush()
                    self._evaluate(evaluations, done)
                if due or stopping or done == assembly.updates:
                    records.flush()
                    self._save(done, last=stopping or done == assembly.updates)
                if stopping:
                    break
            if done < assembly.updates and not stopping:  # actors were left alone at their work
                stopping = True
                if records.flush():
                    self._save(done, last=True)
            self.tell(heartbeat.RESTS)
            with screen.stage("saving"):
                self.checkpoints.wait()
            self.stop.ending = "stopping after this stage"
        if stopping:
            raise Stopped(done)
        if writes:  # the other processes wait for this one
            self.stop.look(done)
        return self.progress

    def _program(self, sooner: Ahead | None) -> Program:
        """Program of the run's topology, reported with its seconds and its memory. Raises RunError if it cannot fit."""
        run, assembly, clock, feeding = self.run, self.assembly, self.clock, self.feeding
        key = {name: value for name, value in to_dict(run).items() if name in COMPILED_FROM}
        began = time.perf_counter()
        with screen.stage("compiling", before=compile_cache.seconds_before(key)):
            program = _compiled(run, assembly, feeding, self.progress, clock, sooner)
        if process_group.index() == 0:
            compile_cache.remember(key, time.perf_counter() - began)
        seconds = clock.read()
        # Printed by each process: all wait for the one that compiles.
        print(f"compiled in {seconds.compile - clock.before.compile:.1f} s, {seconds.trace - clock.before.trace:.1f} s "
              f"of that traced; {clock.ledger.found}", file=sys.stderr, flush=True)  # fmt: skip
        if isinstance(program, fused.Program):
            parts = footprints.parts(assembly.algorithm, self.progress, feeding.now.context)
            _weigh(self.folder, program.executable, assembly.mesh, parts)
            return program
        parts = footprints.parts(assembly.algorithm, self.progress._replace(carry=()), ())
        footprints.trim()
        around: dict[str, int] = {}
        if isinstance(program, actor_learner.CompiledActorLearner):
            around = actor_learner.beside(run, assembly, program, self.progress.state)
        _weigh(self.folder, program.update, assembly.mesh, parts, around)
        return program

    def _drop_records_after(self, done: int) -> None:
        metrics = self.folder / "metrics.jsonl"
        last = sinks.truncate_after(metrics, done)
        if self.run.many:
            sinks.truncate_after(self.folder / members.FILE, done)
        sinks.truncate_after(self.folder / runs.EVALUATIONS, done)
        if (last["update"] if last else 0) != done - self.sums.updates:
            _say(f"{metrics} lacks records before update {done}; the run goes on without them")

    def _calls(self, program: Any) -> Generator[tuple[Progress, int, Any]]:
        """All remaining calls of the run's topology, as in `fused.fused`."""
        run, assembly, feeding, progress = self.run, self.assembly, self.feeding, self.progress
        if run.topology == "actors":
            leaving = (lambda: False) if assembly.mesh.is_multi_process else lambda: self.stop.asked
            yield from actor_learner.calls(run, self.folder, assembly, program, progress, self.out.note, leaving)
            return
        if run.topology == "central":
            yield from inference_server.calls(run, assembly, program, progress, self.out.note)
            return
        assert run.block is not None
        if run.many:
            every = run.population.pbt_interval
            evolve = populations.evolving(pbt.evolve(population.bounds(assembly.members)), assembly.mesh)
            yield from populations.populations(
                program, progress, feeding.now.context, updates=assembly.updates, block=run.block,
                evolve=evolve if every else None, every=every,
            )  # fmt: skip
            return
        done = int(progress.updates)
        while done < assembly.updates:  # through one context after the other
            if feeding.ends(done):
                jax.block_until_ready(progress.updates)  # no program uses the old context any more
                self.tell(heartbeat.RESTS)
                feeding.turn(done)
                self.tell(heartbeat.WORKS)
                progress = fused.entered(progress, assembly.enter, feeding.now.context)
            until = min(assembly.updates, feeding.until(done) or assembly.updates)
            context = feeding.now.context
            for progress, n, rows in fused.fused(program, progress, context, updates=until, block=run.block):
                done += n
                yield progress, n, rows

    def _evaluate(self, evaluations: Evaluations, done: int) -> None:
        """Evaluate the policy after `done` updates; all processes call this, and the first one evaluates."""
        self.tell(heartbeat.RESTS)
        with self.clock.aside():
            policy = _aside(self.run, self.assembly, self.progress.state)
            if process_group.index() == 0:
                policy = jax.device_put(policy, jax.local_devices()[0])
                try:
                    evaluations.make(policy, self.counts(done))
                except OSError as error:
                    self.out.note(f"warning: the evaluation after update {done} is not kept: {error}")
        self.tell(heartbeat.WORKS)

    def counts(self, update: int) -> dict[str, Any]:
        """Counts of a record after this many updates."""
        assembly = self.assembly
        return {
            "update": update,
            "env_steps": assembly.env_steps(update),
            "agent_steps": assembly.agent_steps(update),
            "wall_seconds": self.clock.read().wall,
        }

    def _save(self, done: int, *, last: bool) -> None:
        """Start a save. If it fails, training goes on and a later save may succeed; the `last` raises
        CheckpointError."""

        def warn(error: CheckpointError) -> None:
            self.out.note(f"warning: {error}; until then it trains on, and tries to save when that is due")

        about = self.about | {"seconds": self.clock.read()._asdict(), "pending": self.sums.pending()}
        about |= {"place": self.feeding.place(done).plain()} | resume.counted(self.run, self.assembly, done)
        self.tell(heartbeat.RESTS)
        progress = self.progress
        if self.run.topology == "actors":
            progress = progress._replace(carry=learner.whole_carry(progress.carry, self.assembly.mesh))
        if reasoning_setup.adapts(self.run):
            progress = reasoning_setup.adapters(self.run, progress)
        try:
            self.checkpoints.wait()
        except CheckpointError as error:  # of the previous save
            warn(error)
        try:
            self.checkpoints.save(done, progress, about, before=self.out.settle)
        except CheckpointError as error:
            if last:
                raise
            warn(error)
        self.tell(heartbeat.WORKS)


class Records:
    """Metrics of a loop's updates, written as records.

    A call's rows are read when the next call is under way, or at `flush`: so the device never waits for the host.
    """

    def __init__(self, loop: Loop, evaluations: Evaluations) -> None:
        self._loop, self._evaluations = loop, evaluations
        self._runs = max(1, len(loop.assembly.members))
        self._watch = members.Watch(self._runs, loop.out.note) if loop.run.many else None
        self._waiting: tuple[int, int, Any] | None = None  # the call whose rows are not read yet
        self._read_at = loop.clock.read().train  # seconds of training at the last record
        self._fresh = 0  # updates since then

    def add(self, update: int, n: int, rows: Any) -> None:
        """Rows of a call, the n updates up to `update`; those of the call before are read."""
        self.flush()
        self._waiting = update, n, rows

    def flush(self) -> bool:
        """True if rows were left to read; waits for their updates.

        Raises Poisoned, with the loop's progress, where their numbers are not finite.
        """
        if self._waiting is None:
            return False
        self._read(*self._waiting)
        self._waiting = None
        return True

    def _read(self, update: int, n: int, rows: Any) -> None:
        """Sums with these updates, and a record where one is complete."""
        loop, watch = self._loop, self._watch
        assert loop.run.log_interval is not None
        found = jax.device_get(rows)
        sound = watch.look(found, n, update) if watch else nan_rollback.look(found, n, update, loop.progress)
        loop.sums.add(n, sound)
        loop.tell(heartbeat.CALL)
        loop.clock.started()
        self._fresh += n
        if loop.sums.updates < loop.run.log_interval and update < loop.assembly.updates:
            return
        now = loop.clock.read().train
        steps = self._fresh * self._runs * loop.assembly.steps_per_update
        speed = {"sps": steps / max(now - self._read_at, 1e-9)}
        record = loop.counts(update) | speed | loop.sums.take() | self._evaluations.taken(update)
        loop.out.sink.write(record)
        if loop.callback is not None and loop.callback(record):
            loop.stop.ask()
        if loop.run.many:
            loop.out.members.write(record | loop.sums.each)
        self._read_at, self._fresh = now, 0


def _compiled(
    run: Run, assembly: Assembly, feeding: Feeding, progress: Progress, clock: Clock, sooner: Ahead | None
) -> Program:
    assert run.block is not None
    collector_in, context = assembly.collector_in, feeding.now.context
    with clock.compiling():
        if run.topology == "actors":
            return actor_learner.prepare(run, assembly, context, progress)
        if run.topology == "central":
            return inference_server.prepare(run, assembly, progress)
        try:
            if run.many:
                assert run.population.together is not None
                return populations.compiled(
                    assembly.algorithm, collector_in, progress, context, assembly.mesh, block=run.block,
                    width=run.population.together, within=members.within(assembly.members),
                )  # fmt: skip
            if sooner is not None and (program := sooner.program(progress, context)):
                return program
            return fused.compiled(
                assembly.algorithm, collector_in, progress, context, assembly.mesh, block=run.block,
                shards=assembly.shards,
            )  # fmt: skip
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("RESOURCE_EXHAUSTED"):
                raise
            raise RunError(f"the compiler finds no room on a device ({error}); give {footprints.REMEDY}") from error


def weighed(run: Run) -> footprints.Footprint | None:
    """Memory that a resolved run of actors takes on the learner's device, compiled as for training.

    Nothing is trained and no folder made. Policies that one process serves to all actors are not in it.
    """
    with closing(Feeding(source := feed(run))) as feeding:
        context = feeding.now.context
    assembly = assemble(run, source.within, context)
    check_room(assembly, context, fused_too=False)
    progress = assembly.start(run.seed, context)
    progress = progress._replace(state=reasoning_setup.loaded(run, progress.state))
    parts = footprints.parts(assembly.algorithm, progress._replace(carry=()), ())
    if run.topology == "central":
        return footprints.footprint(inference_server.prepare(run, assembly, progress).update, assembly.mesh, parts)
    untrained = _aside(run, assembly, progress.state)  # as a run keeps it
    program = actor_learner.prepare(run, assembly, context, progress)
    footprints.trim()
    around = actor_learner.beside(run, assembly, program, progress.state)
    del untrained
    return footprints.footprint(program.update, assembly.mesh, parts, around)


def _weigh(
    folder: Path,
    executable: jax.stages.Compiled,
    mesh: Mesh,
    parts: dict[str, int],
    beside: dict[str, int] | None = None,
) -> None:
    """Report the run's device memory before its first update. Raises RunError if it cannot fit."""
    found = footprints.footprint(executable, mesh, parts, beside)
    if found is None:
        return
    if refusal := found.refusal():  # nothing is written: a run that never started leaves no folder
        raise RunError(refusal)
    _say(found.line())
    if warning := found.warning():
        _say(warning)
    if process_group.index() == 0:
        write_json(folder / footprints.FILE, found.plain())


def finish(
    run: Run, folder: Path, assembly: Assembly, policy: Params, untrained: Params, clock: Clock, stop: Stop
) -> dict[str, Any]:
    """Content of result.json, after the evaluation; report.html is written with it. Raises Stopped."""
    seconds = clock.read()
    both = jax.device_put((policy, untrained), jax.local_devices()[0])
    recordings: list[Recording] = []
    films: list[Film] = []
    if run.many:
        outcome = members.evaluated(run, assembly.members, both[0], both[1], lambda: stop.look(assembly.updates))
        parameters = actor_critic.count(policy.params) // len(assembly.members)
    else:
        scores: dict[str, Any] = {}
        chains: dict[str, Any] = {}
        for name, means, driven in evaluations(run, *both):
            chains[name] = means.pop("chains", ())
            scores[name] = means
            recordings += driven
            stop.look(assembly.updates)
        films = evaluate.filmed(run, ("trained", both[0]), ("untrained", both[1]))
        outcome, parameters = {"evaluation": scores}, actor_critic.count(policy.params)
        outcome |= {"chains": shown} if (shown := evaluate.conversations(chains)) else {}
    measured = folder / footprints.FILE  # device memory, before the first update
    steps, ledger = assembly.agent_steps(assembly.updates), clock.ledger  # of each run; `sps` is the sum over all
    result: dict[str, Any] = {
        "status": "done",
        "agent_steps": steps,
        "env_steps": assembly.env_steps(assembly.updates),
        "train_seconds": seconds.train,
        "compile_seconds": seconds.compile,
        "trace_seconds": seconds.trace,
        "wall_seconds": seconds.wall,
        "start_seconds": seconds.start,
        "cache": {"hits": ledger.hits, "misses": ledger.misses} if ledger.hits + ledger.misses else None,
        "sps": steps * max(1, len(assembly.members)) / max(seconds.train, 1e-9),
        "params_sha256": params_sha256(policy.params),
        "parameters": parameters,
        "memory": bounded_json.read(measured) if measured.exists() else None,
        **outcome,
    }
    report.write_report(
        folder / "report.html", run=bounded_json.read(folder / "run.json"),
        records=sinks.read(folder / "metrics.jsonl"), result=result, recordings=recordings, films=films,
        findings=health_log.read(folder), runs=members.section(folder, result) if run.many else "",
    )  # fmt: skip
    write_json(folder / "result.json", result)  # last: its presence means that the run is complete
    return result


FILMS = 6
"""Scenarios drawn in a report."""


def evaluations(
    run: Run, policy: Params, untrained: Params, past_violations: bool = False
) -> Iterator[tuple[str, dict[str, Any], list[Recording]]]:
    """Name, mean scores and, for driving, recordings of each policy, which go on past violations if asked."""
    assert run.evaluation_episodes is not None
    if not isinstance(run.environment, Driving):
        score = evaluate.scorer(run, run.evaluation_episodes)
        for name, params in (("trained", policy), ("untrained", untrained)):
            scores, chains = score(params)
            yield name, scores.means() | {"chains": chains}, []
        return
    drives = evaluate_driving.drives(run)
    films = min(FILMS, len(drives.scenarios))
    by_policy, idm, log = (drives.player(driver, films) for driver in ("policy", "idm", "log"))
    with ThreadPoolExecutor(1, thread_name_prefix=THREAD) as compiler:  # the policy's program is longest
        rules = compiler.map(lambda play: play.compile(None), (idm, log))
        shown = evaluate_driving.telling(by_policy(policy)[0], films)
        list(rules)
    for name, play, params in (
        ("trained", by_policy, policy), ("untrained", by_policy, untrained), ("idm", idm, None), ("log", log, None),
    ):  # fmt: skip
        scores, recorded = play(params, shown)
        if past_violations:
            driver = "policy" if play is by_policy else name
            _, recorded = drives.some(shown).play(params, driver, range(films), **evaluate_driving.past_violations(run))
        yield name, scores.means(), evaluate_driving.label(recorded, name)


THREAD = "compiling ahead"
"""Name of the compiling thread."""


class Ahead:
    """Compilation of a resolved run's program in a thread, while its first data are read; `close` it.

    Possible if a feed knows the shapes of its contexts before reading (`Feed.like`): shards, whose index has all sizes.
    """

    def __init__(self, run: Run, assembly: Assembly, context: PyTree):
        assert run.block is not None
        self._like = fused.outline(assembly.algorithm, assembly.enter, context, assembly.mesh), context
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        parts = assembly.algorithm, assembly.collector_in, *self._like, assembly.mesh
        self._made = self._thread.submit(fused.compiled, *parts, block=run.block, shards=assembly.shards)

    def program(self, progress: Progress, context: PyTree) -> fused.Program | None:
        """The compiled program, awaited; None if it was compiled for other shapes."""
        return self._made.result() if alike((progress, context), self._like) else None

    def close(self) -> None:
        """Wait for the compiler, which cannot be stopped."""
        self._thread.shutdown()


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
