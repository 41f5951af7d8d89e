"""Training loop around a topology: logging, checkpoints, stopping, resuming.

Exactness: metrics up to a checkpoint are on disk before it is saved, and those after it are dropped on resume. Every
random number comes from the run's seed and the update's number. So a run killed anywhere and resumed ends with the same
parameters, bit for bit, and a metrics file without gap or repeat.

Before the loop comes compilation.py, after it final_evaluation.py.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from longhaul.algorithms import pbt
from longhaul.config import population
from longhaul.config.run import Driving, Named, Run
from longhaul.envs import external
from longhaul.networks import actor_critic
from longhaul.runtime import bounded_json, compile_cache, files, heartbeat, partition, process_group, user_modules
from longhaul.runtime import mesh as meshes
from longhaul.runtime.closed_pipe import outlasting
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.errors import STOPPED, RunError
from longhaul.runtime.process_group import say
from longhaul.runtime.provenance import provenance
from longhaul.runtime.signals import Stop, Stopped, listening
from longhaul.telemetry import health_log, screen, sinks, tracking
from longhaul.telemetry.aggregate import Sums
from longhaul.topologies import fused, fused_population
from longhaul.topologies.actor_learner import learner
from longhaul.training import (
    actor_learner,
    compilation,
    final_evaluation,
    inference_server,
    init_from,
    members,
    nan_rollback,
    reasoning_setup,
    run_dir,
    runs,
    store,
)
from longhaul.training import data as feeds
from longhaul.training import publish as publishing
from longhaul.training.assemble import Assembly, check_room, decisions
from longhaul.training.checkpoint import resume
from longhaul.training.checkpoint.checkpoint import Checkpoint, CheckpointError, Checkpoints
from longhaul.training.clock import Clock, Seconds
from longhaul.training.data import Feed, Feeding, feed
from longhaul.training.nan_rollback import Poisoned
from longhaul.training.periodic_evaluation import Evaluations
from longhaul.training.run_dir import alone, called, load_run, read_result, save_run
from longhaul.types import Progress


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
    with alone(folder), outlasting(folder), listening(say) as stop, _open_mirror(folder, stop):
        sole = sole and not process_group.together() and store.address_of(folder) is None
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
                say(line)
                attempt = replace(attempt, source=None, resumed=True, detours=detours, number=attempt.number + 1)
        except Stopped as stopped:
            _farewell(stop, folder, stopped.done)
        except KeyboardInterrupt:
            if not stop.requested or not (folder / "run.json").exists():
                raise
            say(f"{stop.cause()}: nothing was left to save; go on with --resume {called(folder)}")
        return Outcome(STOPPED, None)


def _farewell(stop: Stop, folder: Path, done: int) -> None:
    where = f"saved after update {done}" if done else "stopped before its first update"
    say(f"{stop.cause()}: {where}; go on with --resume {called(folder)}")


def _leave_function(stop: Stop, folder: Path, done: int) -> Callable[[], None]:
    """Function that ends the process while all of its work is on disk, from any thread."""

    def leave() -> None:
        _farewell(stop, folder, done)
        os._exit(STOPPED)

    return leave


def _open_mirror(folder: Path, stop: Stop) -> AbstractContextManager[None]:
    """Copy of the folder in the store that it belongs to, kept by the first process."""
    return store.mirrored(folder, lambda: stop.requested, say) if process_group.index() == 0 else nullcontext()


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
        inline = run.topology != "fused" and run.all_devices == 1
        prepare_devices(run.shown_devices, run.threads, inline=inline)
        saving = Checkpoints(folder / "checkpoints", keep=run.keep, every=run.keep_every, turn=self.number)
        with closing(saving) as checkpoints, ExitStack() as closed:
            clock = Clock(closed.enter_context(closing(compile_cache.Ledger())))
            checkpoint = checkpoints.newest() if self.resumed else None
            edits = self._edits(checkpoint)
            standing = resume.standing(run, checkpoint)
            modules = _modules(run)
            with stop.at_once():
                source = self.source or feed(run, standing.origin)
                if self.resumed:
                    self._compare(source, modules)
                with screen.stage("preparing data"):
                    feeding, assembly, precompilation = compilation.opened(run, source, standing.origin, closed)
            check_room(assembly, feeding.now.context, fused_too=run.topology == "fused")
            parameters, decided = self._describe(source, assembly, modules)
            if self.sole:
                stop.leave = _leave_function(stop, folder, checkpoint.step if checkpoint is not None else 0)
            progress = self._begin(assembly, feeding, clock, checkpoint)
            untrained = actor_learner.policy_on_host(run, assembly, progress.state)
            say(f"{parameters:,} parameters" + f" in each of {len(assembly.members)} runs" * run.many)
            sums = Sums(len(assembly.members), checkpoint.metadata["pending"] if checkpoint is not None else None)
            if checkpoint is not None:
                clock.before = Seconds(**checkpoint.metadata["seconds"])
                with stop.at_once():
                    feeding.move(feeds.place(checkpoint.metadata["place"]))
                progress = resume.restored(
                    run, checkpoints, checkpoint, progress, standing, source, assembly, feeding.now.context
                )
            progress = nan_rollback.around(progress, checkpoint, self.detours, assembly.mesh)
            if self.resumed and process_group.index() == 0:
                about = {"decisions": decided, "asked": run_dir.load_asked_settings(folder) | dict(self.asked)}
                resume.record(folder, run, standing, source, about, edits)
            _look(stop, int(progress.updates), assembly)
            if int(progress.updates) < assembly.updates:
                try:
                    progress = Loop(
                        run, folder, assembly, feeding, progress, checkpoints, stop, clock, sums, self.resumed,
                        about={"detours": self.detours} | resume.based(run), callback=self.callback,
                    ).train(precompilation)  # fmt: skip
                except Poisoned as poisoned:
                    poisoned.before = checkpoints.newest()
                    raise
            if self.sole:
                stop.leave = _leave_function(stop, folder, assembly.updates)
            policy = actor_learner.policy_on_host(run, assembly, progress.state)
            if process_group.index() > 0:
                return {}
            say("evaluating")
            return final_evaluation.result(run, folder, assembly, policy, untrained, clock, stop)

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
            say(f"run {self.folder.name} is done already; with more --total-steps it trains on")
            return result
        if process_group.index() == 0:
            done.replace(self.folder / f"result-{steps}.json")
        return None

    def _edits(self, checkpoint: Checkpoint | None) -> dict[str, list[Any]]:
        """Fields of run.json that were edited by hand since the checkpoint. Raises RunError unless that is taken."""
        if checkpoint is None:
            return {}
        edits = resume.edits(self.folder, checkpoint)
        if not self.edited:
            resume.check_edits(self.folder, checkpoint, edits)
        return edits

    def _compare(self, source: Feed, modules: Mapping[str, user_modules.Source]) -> None:
        """Comparison of a resumed run's data and modules with those that it began with. Raises RunError for the data;
        warns of the modules."""
        stored = bounded_json.read(self.folder / "run.json")
        feeds.check(self.run, source, stored, self.folder.name)
        before = {"env": stored.get("module"), **stored.get("modules", {})}
        for flag, module in modules.items():
            if line := user_modules.change(before.get(flag), module):
                say(f"warning: {line}")

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
            save_run(self.folder, run, provenance() | about | {"asked": run_dir.load_asked_settings(self.folder)})
        for line in decided:
            say(line)
        return parameters, decided

    def _begin(self, assembly: Assembly, feeding: Feeding, clock: Clock, checkpoint: Checkpoint | None) -> Progress:
        """Progress before the first update; of a new run from the parameters of another, where it begins from them."""
        with screen.stage("making the networks and the first worlds"), clock.compiling():
            progress = assembly.start(self.run.seed, feeding.now.context)
            progress = progress._replace(state=reasoning_setup.loaded(self.run, progress.state))
        if checkpoint is None and self.run.init_from is not None:
            state, line = init_from.applied(self.run, assembly.spec, progress.state)
            progress = progress._replace(state=state)
            say(line)
        return progress


def _modules(run: Run) -> dict[str, user_modules.Source]:
    """Modules of the user's own that a run imports, by the flag that names them."""
    modules = run_dir.sources(run)
    if isinstance(run.environment, Named) and (module := external.source(run.environment.env)):
        modules["env"] = module
    return modules


def _look(stop: Stop, done: int, assembly: Assembly) -> None:
    """Raise Stopped if any process received a signal; `done` updates are saved."""
    if any(meshes.asking(assembly.mesh)(stop.requested)):
        raise Stopped(done)


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
    mirror = closed.enter_context(tracking.mirror(folder, console.note, lambda: stop.requested))

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

    def train(self, precompilation: compilation.Precompilation | None) -> Progress:
        """Progress after all updates. Raises Stopped and Poisoned."""
        run, assembly, done, writes = self.run, self.assembly, int(self.progress.updates), process_group.index() == 0
        if writes:
            self._drop_records_after(done)
        program = self._program(precompilation)
        with ExitStack() as closed:
            if writes:
                self.out = _outlets(run, self.folder, assembly, closed, self.stop, done, resumed=self.resumed)
            publish = closed.enter_context(publishing.publishing(
                self.folder, run, assembly.policy, assembly.mesh, self.out.note, lambda: self.stop.requested
            ))  # fmt: skip
            alone = not assembly.mesh.is_multi_process
            evaluations = Evaluations(run, self.folder, assembly.updates, done, alone=alone)
            records = Records(self, evaluations)
            _look(self.stop, done, assembly)
            self.clock.train()
            self.stop.ending, self.stop.leave = "saving after this call", None
            self.tell(heartbeat.WORKS)
            calls = closed.enter_context(closing(self._calls(program)))
            done, stopping = self._go_through(calls, done, publish, records, evaluations)
            self.tell(heartbeat.RESTS)
            with screen.stage("saving"):
                self.checkpoints.wait()
            self.stop.ending = "stopping after this stage"
        if stopping:
            raise Stopped(done)
        if writes:  # the other processes wait for this one
            self.stop.look(done)
        return self.progress

    def _go_through(
        self, calls: Iterable[tuple[Progress, int, Any]], done: int, publish: publishing.Tell, records: Records,
        evaluations: Evaluations,
    ) -> tuple[int, bool]:  # fmt: skip
        """(finished updates, flag that the run stops here), after `calls`: each is recorded, and after it the policy is
        evaluated and the progress saved when that is due. `done` updates were finished before."""
        run, ask, writes = self.run, meshes.asking(self.assembly.mesh, late=True), process_group.index() == 0
        updates, stopping, saved_at = self.assembly.updates, False, time.perf_counter()
        for self.progress, n, rows in calls:
            done += n
            publish(done, n, self.progress.state)
            records.add(done, n, rows)
            due = writes and time.perf_counter() - saved_at >= 60.0 * run.save_interval_minutes
            if due:  # all processes learn of it, with several one call later
                saved_at = time.perf_counter()
            due, stopping = ask(due, self.stop.requested)
            if run.save_interval is not None:
                due = done // run.save_interval > (done - n) // run.save_interval
            if evaluations.due(done, n) and not stopping and done < updates:
                records.flush()
                self._evaluate(evaluations, done)
            if due or stopping or done == updates:
                records.flush()
                self._save(done, last=stopping or done == updates)
            if stopping:
                break
        if done < updates and not stopping:  # actors were left alone at their work
            stopping = True
            if records.flush():
                self._save(done, last=True)
        return done, stopping

    def _program(self, precompilation: compilation.Precompilation | None) -> compilation.Program:
        """Program of the run's topology, reported with its seconds and its memory. Raises RunError if it cannot fit."""
        run, assembly, clock, context = self.run, self.assembly, self.clock, self.feeding.now.context
        key = compilation.key(run)
        began = time.perf_counter()
        with screen.stage("compiling", before=compile_cache.seconds_before(key)), clock.compiling():
            program = compilation.compiled(run, assembly, context, self.progress, precompilation)
        if process_group.index() == 0:
            compile_cache.remember(key, time.perf_counter() - began)
        seconds = clock.read()
        # Printed by each process: all wait for the one that compiles.
        print(f"compiled in {seconds.compile - clock.before.compile:.1f} s, {seconds.trace - clock.before.trace:.1f} s "
              f"of that traced; {clock.ledger.summary}", file=sys.stderr, flush=True)  # fmt: skip
        compilation.weigh(self.folder, run, assembly, program, self.progress, self.feeding)
        return program

    def _drop_records_after(self, done: int) -> None:
        metrics = self.folder / "metrics.jsonl"
        last = sinks.truncate_after(metrics, done)
        if self.run.many:
            sinks.truncate_after(self.folder / members.FILE, done)
        sinks.truncate_after(self.folder / runs.EVALUATIONS, done)
        if (last["update"] if last else 0) != done - self.sums.updates:
            say(f"{metrics} lacks records before update {done}; the run goes on without them")

    def _calls(self, program: Any) -> Generator[tuple[Progress, int, Any]]:
        """All remaining calls of the run's topology, as in `fused.fused`."""
        run, assembly, feeding, progress = self.run, self.assembly, self.feeding, self.progress
        if run.topology == "actors":
            leaving = (lambda: False) if assembly.mesh.is_multi_process else lambda: self.stop.requested
            scenarios = None
            if isinstance(run.environment, Driving):
                scenarios = actor_learner.Scenarios(lambda: feeding.now.context, self._enter)
            yield from actor_learner.calls(
                run, self.folder, assembly, program, progress, self.out.note, leaving, scenarios
            )
            return
        if run.topology == "central":
            context = lambda: feeding.now.context  # noqa: E731
            yield from inference_server.calls(run, assembly, program, progress, self.out.note, context, self._enter)
            return
        assert run.block is not None
        if run.many:
            every = run.population.pbt_interval
            evolve = fused_population.evolving(pbt.evolve(population.bounds(assembly.members)), assembly.mesh)
            yield from fused_population.fused_population(
                program, progress, feeding.now.context, updates=assembly.updates, block=run.block,
                evolve=evolve if every else None, every=every,
            )  # fmt: skip
            return
        while int(progress.updates) < assembly.updates:  # through one context after the other
            progress, until = self._enter(progress)
            calls = fused.fused(program, progress, feeding.now.context, updates=until, block=run.block)
            for progress, n, rows in calls:
                yield progress, n, rows
            del calls  # and with it the context

    def _enter(self, progress: Progress) -> tuple[Progress, int]:
        """Progress between two calls in the context that is due, and the update at which that one ends."""
        feeding, updates, done = self.feeding, self.assembly.updates, int(progress.updates)
        if feeding.ends(done):
            jax.block_until_ready(progress.updates)  # no program uses the old context any more
            self.tell(heartbeat.RESTS)
            feeding.turn(done)
            self.tell(heartbeat.WORKS)
            progress = learner.entered(progress, self.assembly.enter, feeding.now.context)
        return progress, min(updates, feeding.until(done) or updates)

    def _evaluate(self, evaluations: Evaluations, done: int) -> None:
        """Evaluate the policy after `done` updates; all processes call this, and the first one evaluates."""
        self.tell(heartbeat.RESTS)
        with self.clock.aside():
            policy = actor_learner.policy_on_host(self.run, self.assembly, self.progress.state)
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
            progress = progress._replace(carry=learner.joined_carry(progress.carry, self.assembly.mesh))
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
        numbers = jax.device_get(rows)
        sound = watch.look(numbers, n, update) if watch else nan_rollback.look(numbers, n, update, loop.progress)
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
            loop.stop.request()
        if loop.run.many:
            loop.out.members.write(record | loop.sums.each)
        self._read_at, self._fresh = now, 0
