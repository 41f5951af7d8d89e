"""End of a run: evaluation, report and result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from longhaul.config.resolve import named
from longhaul.config.run import Driving, Run
from longhaul.driving.render.recording import Recording
from longhaul.networks import actor_critic
from longhaul.reasoning.config import Reasoning
from longhaul.runtime import device_memory as footprints
from longhaul.runtime.clock import Clock, Seconds
from longhaul.runtime.provenance import params_sha256
from longhaul.runtime.signals import Stop
from longhaul.telemetry import health_log, sinks
from longhaul.training import evaluate, evaluate_driving, population_report, report
from longhaul.training.assemble import Assembly
from longhaul.training.run_dir import write_json
from longhaul.types import Params


def finish(
    run: Run, folder: Path, assembly: Assembly, policy: Params, untrained: Params, clock: Clock, stop: Stop
) -> dict[str, Any]:
    """Evaluate, and write report.html and result.json. Raises Stopped."""
    seconds = clock.read()
    both = jax.device_put((policy, untrained), jax.local_devices()[0])
    recordings: list[Recording] = []
    if run.many:
        outcome = population_report.evaluated(
            run, assembly.members, both[0], both[1], lambda: stop.look(assembly.updates)
        )
        parameters = actor_critic.count(policy.params) // len(assembly.members)
    else:
        scores: dict[str, Any] = {}
        chains: list[dict[str, Any]] = []
        for name, means, films in evaluations(run, *both):
            chains = chains or means.pop("chains", [])
            scores[name] = {key: value for key, value in means.items() if key != "chains"}
            recordings += films
            stop.look(assembly.updates)
        outcome, parameters = {"evaluation": scores}, actor_critic.count(policy.params)
        outcome |= {"chains": chains} if chains else {}
    result = _facts(assembly, clock, seconds) | {
        "params_sha256": params_sha256(policy.params), "parameters": parameters, "memory": _memory(folder), **outcome,
    }  # fmt: skip
    write_report(folder, result, recordings, population_report.section(run, folder, result) if run.many else "")
    write_json(folder / "result.json", result)  # last: its presence means that the run is complete
    return result


def _facts(assembly: Assembly, clock: Clock, seconds: Seconds) -> dict[str, Any]:
    """Totals and speed; steps are those of each run, `sps` is the sum over all."""
    steps, ledger = assembly.agent_steps(assembly.updates), clock.ledger
    return {
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
    }


def _memory(folder: Path) -> dict[str, Any] | None:
    """Device memory of the run, as measured before its first update."""
    path = folder / footprints.FILE
    memory: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return memory


def evaluations(run: Run, policy: Params, untrained: Params) -> Iterator[tuple[str, dict[str, Any], list[Recording]]]:
    """Name, mean scores and, for driving, recordings of each policy."""
    assert run.evaluation_episodes is not None
    if isinstance(run.environment, Reasoning):
        each = evaluate.reasoner(run, run.evaluation_episodes)
        for name, params in (("trained", policy), ("untrained", untrained)):
            scores, chains = each(params)
            yield name, scores.means() | {"chains": chains}, []
        return
    if not isinstance(run.environment, Driving):
        once = evaluate.player(run, named(run.environment), run.evaluation_episodes)
        for name, params in (("trained", policy), ("untrained", untrained)):
            yield name, once(params).means(), []
        return
    drives = evaluate_driving.drives(run)
    shown = range(min(6, len(drives.scenarios)))
    by_policy, idm, log = drives.player("policy", shown), drives.player("idm", shown), drives.player("log")
    for name, play, params in (
        ("trained", by_policy, policy), ("untrained", by_policy, untrained), ("idm", idm, None), ("log", log, None),
    ):  # fmt: skip
        scores, films = play(params)
        yield name, scores.means(), evaluate_driving.label(films, name) if films else []


def write_report(folder: Path, result: dict[str, Any], recordings: list[Recording], runs: str = "") -> None:
    about = json.loads((folder / "run.json").read_text())
    records = sinks.read(folder / "metrics.jsonl")
    report.write_report(
        folder / "report.html", run=about, records=records, result=result, recordings=recordings,
        findings=health_log.read(folder), runs=runs,
    )  # fmt: skip
