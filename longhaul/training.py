"""The loop around a topology: logs, saves, stops, goes on, evaluates, reports.

Exactness: metrics up to a checkpoint are on disk before it is saved, and those after it are dropped on resume; every random number
comes from the run's seed and the update's number; so a run killed anywhere and resumed ends with the same parameters, bit by bit,
and a metrics file without gap or repeat.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from longhaul import evaluation, report, telemetry, worlds
from longhaul.checkpoint import Checkpoints
from longhaul.driving import simulator
from longhaul.driving.bank import stack
from longhaul.driving.recording import Recording
from longhaul.provenance import params_sha256, provenance
from longhaul.run import (
    Assembly, Driving, Run, RunError, assemble, cores, load_run, named, prepare_devices, save_run, write_json,
)  # fmt: skip
from longhaul.topologies import fused
from longhaul.types import Environment, Params, Progress

STOPPED = 75
"""Exit code of a run that a signal stopped after it had saved: resume me."""


class Outcome(NamedTuple):
    code: int  # 0 done, STOPPED
    result: dict[str, Any] | None


class Stop:
    """Whether SIGINT or SIGTERM came; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = number


@contextmanager
def listening() -> Iterator[Stop]:
    stop = Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_environment(run: Run) -> Environment:
    """The environment that a run trains in."""
    task = run.environment
    if not isinstance(task, Driving):
        return named(task)
    agents = task.simulator.agents
    if task.data:
        scenarios = worlds.from_logs(task.data, agents=agents, horizon=task.horizon)
    else:
        scenarios = worlds.generated(0, task.scenarios, agents=agents, horizon=task.horizon, workers=cores())
    return simulator.driving(stack(scenarios, agents=agents), task.simulator)


def train(run: Run, folder: Path, *, resumed: bool) -> Outcome:
    """Trains the resolved `run` in `folder` to its end, from its newest intact checkpoint if `resumed`."""
    assert run.devices is not None
    prepare_devices(run.devices)
    about = provenance()
    began = time.perf_counter()
    environment = make_environment(run)  # before anything is written: bad data is an error, not a run
    prepared = time.perf_counter() - began
    if not resumed:
        save_run(folder, run, about)
    assembly = assemble(run, environment)
    with listening() as stop, closing(Checkpoints(folder / "checkpoints", keep=run.keep)) as checkpoints:
        state = _loop(run, folder, assembly, checkpoints, stop, prepared, resumed=resumed)
        if state is None:
            return Outcome(STOPPED, None)
        progress, seconds = state
        return Outcome(0, _finish(run, folder, assembly, progress, seconds))


class Seconds(NamedTuple):
    """Of the whole run, over all its resumes."""

    train: float  # in updates, logging and saving
    compile: float
    wall: float  # train, compile and preparing data


def _loop(
    run: Run, folder: Path, assembly: Assembly, checkpoints: Checkpoints, stop: Stop, prepared: float, *, resumed: bool
) -> tuple[Progress, Seconds] | None:
    """All updates that are left; None where a signal came first (and what was done is saved)."""
    assert run.log_interval is not None
    progress = assembly.start(run.seed)
    restored = checkpoints.latest(progress)
    spent, wall = {"train": 0.0, "compile": 0.0}, prepared
    if restored is not None:
        progress = restored.progress
        spent, wall = restored.metadata["seconds"], prepared + restored.metadata["wall_seconds"]
    done = int(progress.updates)
    metrics = folder / "metrics.jsonl"
    telemetry.truncate_after(metrics, done)
    began = time.perf_counter()
    program = fused.compiled(
        assembly.algorithm, assembly.collector, progress, assembly.mesh, block=run.log_interval
    )
    spent["compile"] += time.perf_counter() - began
    wall += time.perf_counter() - began
    began = saved_at = time.perf_counter()
    base = spent["train"]
    steps = done * assembly.steps_per_update
    total = assembly.updates * assembly.steps_per_update
    with (
        closing(telemetry.jsonl(metrics)) as lines,
        closing(telemetry.tensorboard(folder, after=steps if resumed else None)) as events,
        closing(telemetry.console(total, start=steps)) as console,
    ):
        log = _logger(assembly, telemetry.fan(lines, events, console), done, lambda: wall + time.perf_counter() - began)

        def save(progress: Progress, done: int) -> None:
            spent["train"] = base + time.perf_counter() - began
            metadata = {"seconds": spent, "wall_seconds": wall + time.perf_counter() - began}
            checkpoints.save(done, progress, metadata)

        waiting: tuple[int, int, Any] | None = None
        for progress, n, rows in fused.fused(program, progress, updates=assembly.updates, block=run.log_interval):
            if waiting is not None:
                log(*waiting)
            done, waiting = done + n, (done + n, n, rows)
            now = time.perf_counter()
            due = now - saved_at >= 60.0 * run.save_interval_minutes
            if run.save_interval is not None:
                due = done // run.save_interval > (done - n) // run.save_interval
            if due or stop.signal is not None or done == assembly.updates:
                log(*waiting)
                waiting, saved_at = None, now
                save(progress, done)
            if stop.signal is not None and done < assembly.updates:
                checkpoints.wait()
                name = signal.Signals(stop.signal).name
                console.note(f"{name}: saved after update {done}; go on with --resume {folder.name}")
                return None
        checkpoints.wait()
    spent["train"] = base + time.perf_counter() - began
    return progress, Seconds(spent["train"], spent["compile"], wall + time.perf_counter() - began)


def _logger(
    assembly: Assembly, sink: telemetry.Sink, done: int, clock: Callable[[], float]
) -> Callable[[int, int, Any], None]:
    """(update, n, rows) -> writes the record of the n updates up to `update`; waits for the device to have made them."""
    last = [done, clock()]

    def log(update: int, n: int, rows: Any) -> None:
        rows = {name: np.asarray(values[:n], np.float64) for name, values in jax.device_get(rows).items()}
        now = clock()
        elapsed = max(now - last[1], 1e-9)
        record = {
            "update": update,
            "env_steps": update * assembly.env_steps_per_update,
            "agent_steps": update * assembly.steps_per_update,
            "wall_seconds": now,
            "sps": n * assembly.steps_per_update / elapsed,
        }
        sink.write(record | summarise(rows))
        last[:] = [update, now]

    return log


def summarise(rows: dict[str, np.ndarray]) -> dict[str, float]:
    """Updates' rows as one record: episodes' sums over their number (NaN where none ended), the rest by their mean."""
    episodes = float(np.sum(rows["episodes"]))
    record = {"episode/count": episodes}
    for name, values in sorted(rows.items()):
        if name.startswith("episode/"):
            record[name] = float(np.sum(values)) / episodes if episodes else float("nan")
        elif name != "episodes":
            record[name] = float(np.mean(values))
    return record


def _finish(run: Run, folder: Path, assembly: Assembly, progress: Progress, seconds: Seconds) -> dict[str, Any]:
    """Evaluates, and writes result.json and report.html."""
    on_one = jax.devices()[0]
    policy = jax.device_put(jax.device_get(assembly.algorithm.policy(progress.state)), on_one)
    begun = assembly.algorithm.policy(assembly.algorithm.init(jax.random.split(jax.random.key(run.seed), 3)[0]))
    untrained = jax.device_put(jax.device_get(begun), on_one)
    print("evaluating", file=sys.stderr, flush=True)
    scores, recordings = evaluate_all(run, assembly.environment, policy, untrained)
    steps = assembly.updates * assembly.steps_per_update
    result = {
        "status": "done",
        "agent_steps": steps,
        "env_steps": assembly.updates * assembly.env_steps_per_update,
        "train_seconds": seconds.train,
        "compile_seconds": seconds.compile,
        "wall_seconds": seconds.wall,
        "sps": steps / max(seconds.train, 1e-9),
        "params_sha256": params_sha256(jax.device_get(policy.params)),
        "evaluation": scores,
    }
    write_report(folder, result, recordings)
    write_json(folder / "result.json", result)  # last: who sees it sees a run that is complete
    return result


def evaluate_all(
    run: Run, environment: Environment, policy: Params, untrained: Params
) -> tuple[dict[str, Any], list[Recording]]:
    """Means by policy, and for driving some recordings."""
    assert run.evaluation_episodes is not None
    if not isinstance(run.environment, Driving):
        both = {"trained": policy, "untrained": untrained}
        episodes = run.evaluation_episodes
        return {k: evaluation.play_classic(run, environment, p, episodes).means() for k, p in both.items()}, []
    drives = evaluation.drives(run)
    scores: dict[str, Any] = {}
    recordings: list[Recording] = []
    shown = range(min(6, len(drives.scenarios)))
    for name, params, driver in (
        ("trained", policy, "policy"), ("untrained", untrained, "policy"), ("idm", None, "idm"), ("log", None, "log"),
    ):  # fmt: skip
        played, films = drives.play(params, driver, shown if name == "trained" else ())
        scores[name] = played.means()
        recordings += evaluation.label(films, name) if films else []
    return scores, recordings


def write_report(folder: Path, result: dict[str, Any], recordings: list[Recording]) -> None:
    import json

    about = json.loads((folder / "run.json").read_text())
    records = telemetry.read(folder / "metrics.jsonl")
    report.write_report(folder / "report.html", run=about, records=records, result=result, recordings=recordings)


def restore_policy(folder: Path) -> tuple[Run, Params, Params]:
    """(run, its policy from the newest intact checkpoint, the untrained policy), on one device, to evaluate."""
    run = load_run(folder)
    assert run.devices is not None
    prepare_devices(run.devices)
    environment = make_environment(run)
    assembly = assemble(run, environment)
    progress = assembly.start(run.seed)
    untrained = jax.device_get(assembly.algorithm.policy(progress.state))
    with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        restored = checkpoints.latest(progress)
    if restored is None:
        raise RunError(f"{folder} has no checkpoint yet; go on with --resume {folder.name}, or wait for its first save")
    trained = jax.device_get(assembly.algorithm.policy(restored.progress.state))
    return run, trained, untrained
