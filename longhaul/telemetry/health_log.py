"""Health of a running run: a sink of records that reports findings and stores them in `health.jsonl`.

The file follows from the records of `metrics.jsonl` and the bounds alone: a resumed run rebuilds it from the records
that remain.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longhaul.runtime import files
from longhaul.spaces import Action, Box, Discrete, MultiDiscrete
from longhaul.telemetry import sinks
from longhaul.telemetry.health import Bounds, Event, Finding, Plan, Record, Watch

if TYPE_CHECKING:
    from longhaul.types import Spec

FILE = "health.jsonl"

SHARE = 0.02
"""Share of a choice's largest entropy below which a policy is nearly deterministic."""

NATS = 6.0
"""Nats below a uniform distribution over the range of each number of an action: a deviation of 0.06 % of the range."""


def plan(spec: Spec, updates: int, num_steps: int) -> Plan:
    """Plan of a run of `updates` updates of `num_steps` steps in environments of `spec`."""
    return Plan(updates, least_entropy(spec.action), math.ceil((spec.max_steps or 0) / num_steps))


def least_entropy(action: Action) -> float:
    """Entropy in nats below which a policy with these actions has collapsed."""
    match action:
        case Discrete(n):
            return SHARE * math.log(n)
        case MultiDiscrete(sizes):
            return SHARE * sum(math.log(n) for n in sizes)
        case Box(low, high):
            width = np.asarray(high, np.float64) - np.asarray(low, np.float64)
            return float(np.sum(np.log(width) - NATS))


def watch(folder: Path, plan: Plan, bounds: Bounds, note: Callable[[str], None]) -> sinks.Sink:
    """Sink of a run in `folder`, whose records so far are in metrics.jsonl there; `note` takes a line of text.

    Lasting findings are reported again at a resume. An event is in the file before it is reported.
    """
    if not bounds.watch:
        return sinks.Sink()
    path, metrics = folder / FILE, folder / "metrics.jsonl"
    seen = Watch(plan, bounds)
    before = sinks.read(metrics) if metrics.exists() else []
    past = [json.dumps(plain(event)) + "\n" for record in before for event in seen.look(record)]
    path.unlink(missing_ok=True)
    if past:
        files.write(path, "".join(past))
    for finding in seen.findings():
        if finding.until is None:
            note(Event(finding.since, finding).line())
    out: list[sinks.Sink] = []  # opened with the first event: a healthy run has no such file

    def write(record: Record) -> None:
        for event in seen.look(record):
            if not out:
                out.append(sinks.patient(sinks.jsonl(path), note))
            out[0].write(plain(event))
            note(event.line())

    return sinks.Sink(write, lambda: out[0].close() if out else None)


def plain(event: Event) -> dict[str, Any]:
    """An event as a line of the file."""
    state = {"update": event.update, "event": "begins" if event.finding.until is None else "ends"}
    return state | files.finite(event.finding._asdict())


def read(folder: Path) -> list[Finding]:
    """Findings of a folder's file, by their start; none without a file."""
    path = folder / FILE
    lines = sinks.read(path) if path.exists() else []
    findings: dict[tuple[str, int], Finding] = {}
    for line in lines:
        try:
            value, bound = (math.nan if line[name] is None else float(line[name]) for name in ("value", "bound"))
            finding = Finding(str(line["check"]), value, bound, *(line[name] for name in Finding._fields[3:]))
            if type(finding.since) is not int:
                raise TypeError(f"since is {finding.since!r}")
            findings[finding.check, finding.since] = finding
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} has a line that is no finding ({error}): remove the file") from error
    return list(findings.values())
