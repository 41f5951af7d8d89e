"""The command `status`: records, checkpoints and result of a run, and its actors' current state. Without JAX."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longhaul.cli import flags, tables
from longhaul.cli.flags import DEBUG
from longhaul.cli.run_flags import RUN, RUNS_DIR, folder_of
from longhaul.config.run import Driving, Named, Run
from longhaul.runtime import bounded_json, files
from longhaul.telemetry import forecast, sinks, tracking
from longhaul.topologies.actor_learner.config import LIVE
from longhaul.training import runs
from longhaul.training.run_dir import called, read_result, read_run

OLD = 10.0
"""Seconds after which the actors' state is called old."""

HEADER = ["actor", "process", "on", "state", "for", "rollouts", "waiting", "queue", "restarts"]


def status(argv: Sequence[str]) -> int:
    """`longhaul status [RUN]`."""
    line = "Progress of a run, the newest if none is named."
    parsed = flags.parse("status", line, {"": [RUN, RUNS_DIR, DEBUG]}, argv).values
    if parsed["RUN"] is None and (newest := runs.summaries(runs.local(parsed["runs-dir"]))):
        parsed["RUN"] = newest[0].name
    folder = folder_of(parsed, f"there is none in {parsed['runs-dir']}; longhaul status RUN [--runs-dir FOLDER]")
    run = read_run(folder)
    about = bounded_json.read(folder / "run.json")
    metrics = folder / "metrics.jsonl"
    records = sinks.read(metrics) if metrics.is_file() else []
    last, lines = (records[-1] if records else {}), len(records)
    result = folder / "result.json"
    saved = files.checkpoint_steps(folder)
    update = run.num_envs * _agents(run, records) * run.num_steps
    done = last.get("agent_steps", 0)
    total = done + (run.total_steps - done) // update * update  # `done` may be in updates of other sizes
    going_on = f"not done; longhaul train {run.recipe} --resume {called(folder)} goes on"
    rows = [
        ("run", str(folder)),
        ("recipe", run.recipe),
        ("topology", run.topology),
        ("commit", str(about.get("commit") or "unknown")),
        ("state", "done" if result.is_file() else going_on),
        ("agent steps", f"{done:,} of {total:,} ({done / total:.1%})"),
        ("updates", f"{last.get('update', 0)}, in {lines} records"),
        ("checkpoints", ", ".join(map(str, saved)) or "none"),
    ]
    for name, tracked in tracking.load_all(folder).items():
        project = f"{tracked.id} in project {tracked.project}{'' if tracked.on else ', no more'}"
        rows.append((tracking.KINDS[name].title, project))
    shown = ("wall_seconds", "sps", "episode/return")
    rows += [(name, f"{last[name]:,.1f}") for name in shown if last.get(name) is not None]
    rows += forecast.in_words(records)
    if about.get("detours"):
        rows.append(("detours", f"{len(about['detours'])} of {run.rollbacks}, around numbers that were not finite"))
    if lines:
        age = time.time() - metrics.stat().st_mtime
        rows.append(("last record", f"{max(0, round(age))} s ago"))
    tables.listing(rows)
    show_live(folder)
    if result.is_file():
        show_result(read_result(folder))
    return 0


def _agents(run: Run, records: Sequence[Mapping[str, Any]]) -> int:
    """Columns of the batch that one world makes, from the records where there are any: `resolve.agents` needs JAX."""
    if isinstance(run.environment, Named) and records and records[-1].get("env_steps"):
        return int(records[-1]["agent_steps"]) // int(records[-1]["env_steps"])
    if isinstance(run.environment, Driving):
        return run.environment.simulator.agents
    from longhaul.config.resolve import agents

    return agents(run)


def show_result(result: dict[str, Any]) -> None:
    """The table of a result: of policies, or of runs."""
    if "members" not in result:
        tables.scores(result["evaluation"])
        return
    from longhaul.training import members

    header, rows, footer = members.columns(result["members"])
    best, ranks = members.ranking(result["members"])
    tables.table(header, [[tables.number(value) for value in row] for row in rows], footer=footer or None)
    if ranks:
        print()
        tables.table(best, [[str(value) for value in row] for row in ranks])


def show_live(folder: Path) -> None:
    """State of a run's actors, printed: staleness, queue, waits, bottleneck; nothing where none are at work."""
    try:
        state: dict[str, Any] = bounded_json.read(folder / LIVE)
        _show_actors(state)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError):  # another program's file
        return


def _show_actors(state: dict[str, Any]) -> None:
    metrics, bound, age = state["metrics"], state["staleness"], max(0.0, time.time() - state["time"])
    late = ", which is long: the learner waits, is stopped, or was killed" * (age > OLD)
    tables.listing(
        [
            ("actors", f"{len(state['actors'])}, {state['kind']}"),
            ("staleness", f"{metrics['staleness_mean']:.2f}, bound {'none' if bound is None else bound}"),
            ("queue", f"{state['queue']} rollouts"),
            ("waits", f"learner {metrics['learner_wait']:.0%}, actors {metrics['actor_wait']:.0%} of their time"),
            ("bottleneck", state["bottleneck"]),
            ("restarts", str(int(metrics["restarts"]))),
            ("told", f"{age:.0f} s ago{late}"),
        ]
    )
    rows = []
    for actor in state["actors"]:
        whole = actor["seconds_acting"] + actor["seconds_waiting"]
        waiting = f"{actor['seconds_waiting'] / whole:.0%}" if whole else ""
        where = actor.get("device", "cpu")  # a process of its own computes there
        cells = [actor["actor"], actor["process"], where, actor["state"], f"{actor['since']:.1f} s", actor["rollouts"]]
        rows.append([str(cell) for cell in (*cells, waiting, actor["queue"], actor["restarts"])])
    tables.table(HEADER, rows)
