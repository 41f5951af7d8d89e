"""The loop around a topology: logs, saves, stops, goes on, evaluates, reports.

Exactness: metrics up to a checkpoint are on disk before it is saved, and those after it are dropped on resume; every
random number comes from the run's seed and the update's number; so a run killed anywhere and resumed ends with the same
parameters, bit by bit, and a metrics file without gap or repeat.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import evaluation, networks, report, telemetry
from longhaul import feed as feeds
from longhaul import mesh as meshes
from longhaul.algorithms import ppo
from longhaul.checkpoint import Checkpoints
from longhaul.clock import Clock, Seconds
from longhaul.driving.recording import Recording
from longhaul.feed import Feed, Feeding, feed
from longhaul.folders import alone, load_run, save_run, write_json
from longhaul.provenance import params_sha256, provenance
from longhaul.records import Sums
from longhaul.run import Assembly, Driving, Run, RunError, assemble, named, prepare_devices
from longhaul.stopping import Stop, Stopped, listening
from longhaul.topologies import fused
from longhaul.types import Params, Progress

STOPPED = 75
"""Exit code of a run that a signal stopped after it had saved: resume me."""


class Outcome(NamedTuple):
    code: int  # 0 done, STOPPED
    result: dict[str, Any] | None


def train(run: Run, folder: Path, *, resumed: bool, source: Feed | None = None) -> Outcome:
    """Trains the resolved `run` in `folder` to its end, from its newest intact checkpoint if `resumed`.

    `source` is what it trains in, where that has been made already.

    A signal before the folder is that of a run raises KeyboardInterrupt, as one without this function would.
    """
    with alone(folder), listening() as stop:
        try:
            return Outcome(0, _train(run, folder, stop, source, resumed=resumed))
        except Stopped as stopped:
            where = f"saved after update {stopped.done}" if stopped.done else "stopped before its first update"
        except KeyboardInterrupt:
            if stop.signal is None or not (folder / "run.json").exists():
                raise
            where = "nothing was left to save"
        assert stop.signal is not None
        _say(f"{signal.Signals(stop.signal).name}: {where}; go on with --resume {folder.name}")
        return Outcome(STOPPED, None)


def _train(run: Run, folder: Path, stop: Stop, source: Feed | None, *, resumed: bool) -> dict[str, Any]:
    """The result; raises Stopped."""
    assert run.devices is not None
    clock = Clock()
    if resumed and (folder / "result.json").exists():
        _say(f"run {folder.name} is done already")
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result
    prepare_devices(run.devices, run.threads)
    with stop.at_once():
        source = source or feed(run)
        if resumed:
            feeds.check(run, source, json.loads((folder / "run.json").read_text()), folder.name)
        feeding = Feeding(source)
    with closing(feeding), closing(Checkpoints(folder / "checkpoints", keep=run.keep)) as checkpoints:
        assembly = assemble(run, source.within, feeding.now.context)
        if not resumed:  # not before: bad data or sizes are an error, not a run
            save_run(folder, run, provenance() | {"data": source.about, "parameters": _parameters(assembly)})
        with clock.compiling():
            progress = assembly.start(run.seed, feeding.now.context)
        untrained = _on_host(assembly.algorithm.policy(progress.state))
        _say(f"{networks.count(untrained.params):,} parameters")
        restored = checkpoints.latest(progress)
        sums = Sums()
        if restored is not None:
            progress, about = restored.progress, restored.metadata
            clock.before, sums = Seconds(**about["seconds"]), Sums(about["pending"])
            with stop.at_once():
                feeding.move(feeds.place(about["place"]))
        stop.look(int(progress.updates))
        if int(progress.updates) < assembly.updates:
            progress = _loop(run, folder, assembly, feeding, progress, checkpoints, stop, clock, sums, resumed=resumed)
        policy = _on_host(assembly.algorithm.policy(progress.state))
        return _finish(run, folder, assembly, policy, untrained, clock.read(), stop)


def _parameters(assembly: Assembly) -> int:
    """How many numbers are learnt."""
    algorithm = assembly.algorithm
    return networks.count(jax.eval_shape(lambda: algorithm.policy(algorithm.init(jax.random.key(0))).params))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _on_host(policy: Params) -> Params:
    """A copy of its own: what device_get gives may lie in a buffer that is donated next."""
    return jax.tree.map(np.array, jax.device_get(policy))


def _loop(
    run: Run, folder: Path, assembly: Assembly, feeding: Feeding, progress: Progress, checkpoints: Checkpoints,
    stop: Stop, clock: Clock, sums: Sums, *, resumed: bool,
) -> Progress:  # fmt: skip
    """All updates that are left; what was done is saved. Raises Stopped."""
    assert run.block is not None and run.log_interval is not None
    done, metrics = int(progress.updates), folder / "metrics.jsonl"
    last = telemetry.truncate_after(metrics, done)
    if (last["update"] if last else 0) != done - sums.updates:
        _say(f"{metrics} lacks records before update {done}; the run goes on without them")
    program = _compiled(run, assembly, feeding, progress, clock)
    steps, total = (updates * assembly.steps_per_update for updates in (done, assembly.updates))
    with ExitStack() as closed:
        sinks = [closed.enter_context(closing(telemetry.jsonl(metrics)))]
        sinks.append(closed.enter_context(closing(telemetry.tensorboard(folder, after=steps if resumed else None))))
        console = closed.enter_context(closing(telemetry.console(total, start=steps)))
        log = _logger(run, assembly, telemetry.fan(*sinks, console), sums, clock)
        stop.look(done)
        clock.train()
        saved_at = time.perf_counter()
        waiting: tuple[int, int, Any] | None = None
        for progress, n, rows in _calls(run, assembly, feeding, progress, program):
            if waiting is not None:  # of the call before: the device works meanwhile
                log(*waiting)
            done, waiting = done + n, (done + n, n, rows)
            due = time.perf_counter() - saved_at >= 60.0 * run.save_interval_minutes
            if run.save_interval is not None:
                due = done // run.save_interval > (done - n) // run.save_interval
            stopping = stop.signal
            if due or stopping is not None or done == assembly.updates:
                log(*waiting)
                waiting, saved_at = None, time.perf_counter()
                _sync(metrics)
                about = {"seconds": clock.read()._asdict(), "pending": sums.pending()}
                checkpoints.save(done, progress, about | {"place": feeding.place(done).plain()})
            if stopping is not None:
                break
        checkpoints.wait()
    stop.look(done)
    return progress


def _compiled(run: Run, assembly: Assembly, feeding: Feeding, progress: Progress, clock: Clock) -> fused.Program:
    assert run.block is not None
    collector_in, context = assembly.collector_in, feeding.now.context
    with clock.compiling():
        return fused.compiled(assembly.algorithm, collector_in, progress, context, assembly.mesh, block=run.block)


def _calls(
    run: Run, assembly: Assembly, feeding: Feeding, progress: Progress, program: fused.Program
) -> Iterator[tuple[Progress, int, Any]]:
    """All calls that are left, as `fused.fused` has them, through one context after the other."""
    assert run.block is not None
    done = int(progress.updates)
    while done < assembly.updates:
        if feeding.ends(done):
            jax.block_until_ready(progress.updates)  # nothing computes any more with the context that is given up
            feeding.turn(done)
            progress = fused.entered(progress, assembly.enter, feeding.now.context)
        until = min(assembly.updates, feeding.until(done) or assembly.updates)
        for progress, n, rows in fused.fused(program, progress, feeding.now.context, updates=until, block=run.block):
            done += n
            yield progress, n, rows


def _sync(path: Path) -> None:
    """Makes a file durable, which a checkpoint is too: a machine that fails must not lose the one alone."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _logger(
    run: Run, assembly: Assembly, sink: telemetry.Sink, sums: Sums, clock: Clock
) -> Callable[[int, int, Any], None]:
    """(update, n, rows) -> counts the n updates up to `update`, waiting for them; writes the record that they end."""
    assert run.log_interval is not None
    interval = run.log_interval
    last = clock.read().wall
    fresh = 0  # updates since `last`

    def log(update: int, n: int, rows: Any) -> None:
        nonlocal last, fresh
        sums.add(n, jax.device_get(rows))
        fresh += n
        if sums.updates < interval and update < assembly.updates:
            return
        now = clock.read().wall
        record = {
            "update": update,
            "env_steps": update * assembly.env_steps_per_update,
            "agent_steps": update * assembly.steps_per_update,
            "wall_seconds": now,
            "sps": fresh * assembly.steps_per_update / max(now - last, 1e-9),
        }
        sink.write(record | sums.take())
        last, fresh = now, 0

    return log


def _finish(
    run: Run, folder: Path, assembly: Assembly, policy: Params, untrained: Params, seconds: Seconds, stop: Stop
) -> dict[str, Any]:
    """Evaluates, and writes report.html and result.json. Raises Stopped."""
    _say("evaluating")
    scores: dict[str, Any] = {}
    recordings: list[Recording] = []
    both = jax.device_put((policy, untrained), jax.devices()[0])
    for name, means, films in evaluations(run, *both):
        scores[name] = means
        recordings += films
        stop.look(assembly.updates)
    steps = assembly.updates * assembly.steps_per_update
    result = {
        "status": "done",
        "agent_steps": steps,
        "env_steps": assembly.updates * assembly.env_steps_per_update,
        "train_seconds": seconds.train,
        "compile_seconds": seconds.compile,
        "wall_seconds": seconds.wall,
        "sps": steps / max(seconds.train, 1e-9),
        "params_sha256": params_sha256(policy.params),
        "parameters": networks.count(policy.params),
        "evaluation": scores,
    }
    write_report(folder, result, recordings)
    write_json(folder / "result.json", result)  # last: who sees it sees a run that is complete
    return result


def evaluations(run: Run, policy: Params, untrained: Params) -> Iterator[tuple[str, dict[str, Any], list[Recording]]]:
    """Of each policy its name, the means that it scores, and for driving some recordings."""
    assert run.evaluation_episodes is not None
    if not isinstance(run.environment, Driving):
        environment = named(run.environment)
        for name, params in (("trained", policy), ("untrained", untrained)):
            yield name, evaluation.play_classic(run, environment, params, run.evaluation_episodes).means(), []
        return
    drives = evaluation.drives(run)
    shown = range(min(6, len(drives.scenarios)))
    by_policy, idm, log = drives.player("policy", shown), drives.player("idm", shown), drives.player("log")
    for name, play, params in (
        ("trained", by_policy, policy), ("untrained", by_policy, untrained), ("idm", idm, None), ("log", log, None),
    ):  # fmt: skip
        scores, films = play(params)
        yield name, scores.means(), evaluation.label(films, name) if films else []


def write_report(folder: Path, result: dict[str, Any], recordings: list[Recording]) -> None:
    about = json.loads((folder / "run.json").read_text())
    records = telemetry.read(folder / "metrics.jsonl")
    report.write_report(folder / "report.html", run=about, records=records, result=result, recordings=recordings)


def restore_policy(folder: Path) -> tuple[Run, Params, Params]:
    """(run, its policy from the newest intact checkpoint, the untrained policy), on the host, to evaluate.

    The policy alone is restored, so that no scenario to train in is made again: any tells what it sees and does.
    """
    run = load_run(folder)
    assert run.devices is not None
    prepare_devices(run.devices, run.threads)
    algorithm = ppo.ppo(feeds.spec(run), run.algorithm, updates=1, mean=meshes.identity)
    begun = jax.jit(algorithm.init)(jax.random.split(jax.random.key(run.seed), 3)[0])  # as `fused.start` has it
    progress = Progress(begun, (), (), jnp.int32(0))  # type: ignore[arg-type]
    with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        restored = checkpoints.latest(progress, part=True)
    if restored is None:
        raise RunError(f"{folder} has no checkpoint yet; go on with --resume {folder.name}, or wait for its first save")
    return run, _on_host(algorithm.policy(restored.progress.state)), _on_host(algorithm.policy(begun))
