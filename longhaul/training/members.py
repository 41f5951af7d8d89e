"""Members of a population run: their shared algorithm, metrics, records, evaluation and report.

`metrics.jsonl` has the mean over the members under a metric's own name, and their standard deviation (n - 1) as
NAME_std. `members.jsonl` has the same records with a list of values, one a member, for every metric.

A member with non-finite metrics is recorded as null and excluded from means; members are independent. Each is evaluated
as if alone, and all are compared.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms import pbt, registry
from longhaul.algorithms.pbt import Make, Tuned
from longhaul.algorithms.run_context import RunContext
from longhaul.config.population import SCENARIOS, Member, values_of
from longhaul.config.resolve import members_of
from longhaul.config.run import Driving, Run
from longhaul.runtime import device_memory
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError
from longhaul.runtime.provenance import params_sha256
from longhaul.telemetry import pages
from longhaul.telemetry.sinks import read
from longhaul.topologies import fused_population
from longhaul.training import confidence, evaluate, evaluate_driving, report
from longhaul.types import Algorithm, Key, Params, PyTree, Spec

FILE = "members.jsonl"

FINITE = "finite"
"""Name of `topologies.fused.FINITE`, the row with the finiteness of each update."""


def tuned(make: Make, members: tuple[Member, ...]) -> tuple[Algorithm, Callable[[PyTree, Key], Tuned]]:
    """Algorithm with the members' differing hyperparameters as arguments; RunError if one cannot be an argument."""
    try:
        return pbt.tuned(make, tuple(members[0].values))
    except ValueError as error:
        raise RunError(str(error)) from error


def within(members: tuple[Member, ...]) -> fused_population.Within:
    """Context of each member: where scenarios are swept, episodes are drawn among the member's first ones."""
    if not members or SCENARIOS not in members[0].values:
        return fused_population.same

    def narrowed(context: PyTree, own: PyTree) -> PyTree:
        return context._replace(among=own[SCENARIOS].astype(jnp.int32))

    return narrowed


def keys(members: tuple[Member, ...]) -> Key:
    """Random key [M] of each member, from its seed."""
    return jax.vmap(jax.random.key)(jnp.array([member.seed for member in members], jnp.uint32))


def initial_states(run: Run, spec: Spec) -> tuple[Algorithm, PyTree]:
    """(algorithm of a population, its initial states [M, ...] without a replay), to restore a policy that acts."""
    swept = members_of(run)
    algorithm, init = tuned(
        lambda values: registry.make(
            spec, dataclasses.replace(run.algorithm, **{n: v for n, v in values.items() if n != SCENARIOS}),
            RunContext(updates=1, mean=meshes.identity),
        ),
        swept,
    )  # fmt: skip
    first = jax.vmap(lambda key: jax.random.split(key, 3)[0])(keys(swept))  # keys as in a population's start
    of_all = jax.jit(lambda members: jax.lax.map(lambda member: init(*member), members))
    states = device_memory.allocated(of_all, (values_of(swept), first))
    return algorithm, states


def chosen(run: Run, member: int | None, name: str) -> Member:
    """Member number `member` of run `name`. Raises RunError if it does not exist, or None is given."""
    members = members_of(run)
    if member is None or not 0 <= member < len(members):
        if len(members) == 1:
            raise RunError(f"--member is {member}, and {name} is one run; leave --member out")
        remedy = "give --member" if member is None else f"--member is {member}; it must be"
        raise RunError(f"run {name} holds {len(members)} runs; {remedy} 0 to {len(members) - 1}")
    return members[member]


class Watch:
    """Monitor of non-finite members: one note when a member turns non-finite, one when it recovers."""

    def __init__(self, members: int, note: Callable[[str], None]):
        self._sound = np.ones(members, bool)
        self._note = note

    def look(self, rows: Mapping[str, np.ndarray], n: int, update: int) -> dict[str, np.ndarray]:
        """Rows without the finiteness row, after the n updates up to `update`."""
        sound: np.ndarray = np.all(rows[FINITE][:n], axis=0)
        for member in np.flatnonzero(sound != self._sound).tolist():
            state = "is finite again" if sound[member] else "has numbers that are not finite; the others go on"
            self._note(f"run {member} {state} (updates {update - n + 1} to {update})")
        self._sound = sound
        if not sound.any():
            raise RunError("no run has finite numbers any more; lower --lr or --max-grad-norm, or see to the rewards")
        return {name: values for name, values in rows.items() if name != FINITE}


# ------------------------------------------------------------------------------------------------ evaluation and report


MOST_LINES = 5
"""Largest number of settings drawn in a figure, the best ones."""

RETURN = "episode/return"

MOST_POINTS = 200
"""Largest number of points of a member's curves in a report."""


def evaluated(
    run: Run, members: tuple[Member, ...], policy: Any, untrained: Any, look: Callable[[], None]
) -> dict[str, Any]:
    """Population part of result.json, from policies [M, ...]: means over the members of the best `setting`, deviations
    (n - 1), and each member's.

    `look` is called between two members, and may raise.
    """
    play = _player(run)
    rows: list[dict[str, Any]] = []
    for i, member in enumerate(members):
        trained, untaught = (jax.tree.map(lambda x: x[i], each) for each in (policy, untrained))  # noqa: B023
        scores = {"trained": play(trained, member.seed), "untrained": play(untaught, member.seed)}
        digest = params_sha256(jax.device_get(trained.params))
        rows.append(
            {
                "member": i, "seed": member.seed, "hyperparameters": member.values, "params_sha256": digest,
                "evaluation": scores,
            }
        )  # fmt: skip
        look()
    kinds = ("trained", "untrained")
    best, numbers = ranked(rows)[0]
    over = {kind: _mean_and_deviation([rows[i]["evaluation"][kind] for i in numbers]) for kind in kinds}
    return {
        **({"setting": best} if len(numbers) < len(rows) else {}),
        "evaluation": {kind: mean for kind, (mean, _) in over.items()},
        "spread": {kind: spread for kind, (_, spread) in over.items()},
        "members": rows,
    }


def _player(run: Run) -> Callable[[Params, int], dict[str, Any]]:
    """(policy, seed) -> mean scores, compiled once."""
    assert run.evaluation_episodes is not None
    if isinstance(run.environment, Driving):
        drive = evaluate_driving.drives(run).player("policy")
        return lambda policy, seed: drive(policy)[0].means()
    score = evaluate.scorer(run, run.evaluation_episodes)
    return lambda policy, seed: score(policy, seed)[0].means()


def _mean_and_deviation(scores: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, float]]:
    """(means over members, with all their `episodes`; deviations)."""
    names = [name for name in scores[0] if name != "episodes"]
    values_of = {name: np.array([score[name] for score in scores if name in score]) for name in names}
    means = {name: float(values.mean()) for name, values in values_of.items()}
    spread = {name: float(values.std(ddof=1)) if len(values) > 1 else 0.0 for name, values in values_of.items()}
    return means | {"episodes": sum(score["episodes"] for score in scores)}, spread


def settings(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[int]]]:
    """(label, numbers of its members) of each setting of the swept hyperparameters, in order."""
    for _, grouped in itertools.groupby(rows, key=lambda row: sorted(row["hyperparameters"].items())):
        group = list(grouped)
        yield Member(0, dict(group[0]["hyperparameters"])).label(), [row["member"] for row in group]


def ranked(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int]]]:
    """Settings by the mean return of their members, the best first; those without a return last."""
    scores = [float(row["evaluation"]["trained"].get("return", -np.inf)) for row in rows]
    return sorted(settings(rows), key=lambda group: -float(np.mean([scores[i] for i in group[1]])))


def section(folder: Path, result: Mapping[str, Any]) -> str:
    """HTML section on the members: a figure of returns with 95 % intervals, and a table."""
    every_record = read(folder / FILE) if (folder / FILE).exists() else []
    records = [record for record in every_record if RETURN in record]  # null becomes NaN
    steps = np.array([record["agent_steps"] for record in records], float)
    values = np.array([record[RETURN] for record in records], float).reshape(len(steps), -1 if records else 0)
    rows = list(result["members"])
    lines = []
    for label, which in ranked(rows)[:MOST_LINES]:
        mean, low, high = confidence.bootstrap_runs(values[:, which]) if len(steps) else (np.zeros(0),) * 3
        lines.append(pages.Series(label or f"mean of {len(which)} runs", steps, mean, low, high))
    drawn = pages.figure("Return of the runs", lines, "agent steps", "per episode; band: 95 %")
    note = (
        '<p class="muted note">Lines are means over the seeds of a setting; bands are 95 % bootstrap intervals of '
        "these means, over the seeds. Each run was evaluated as if it were alone.</p>"
    )
    header, body, footer = columns(rows)
    best, ranks = ranking(rows)
    tables = [(best, ranks), (header, body)] if ranks else [(header, [*body, footer])]

    def cell(value: Any) -> str:
        return html.escape(f"{value:,.3f}" if isinstance(value, float) else str(value))

    def table(header: list[str], body: list[list[Any]]) -> str:
        lines = [f"<tr>{''.join(f'<td>{cell(value)}</td>' for value in row)}</tr>" for row in body]
        return pages.table([cell(name) for name in header], lines)

    tables_of = "".join(table(*each) for each in tables)
    return f'<div class="curves">{drawn}</div>{note * bool(drawn)}{tables_of}{member_sections(every_record, rows)}'


def member_sections(records: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """HTML of a folded part a member: its evaluation, where there is one, and its curves."""
    parts = []
    sampled = records[:: -(-len(records) // MOST_POINTS) or 1]
    for row in rows:
        label = Member(row["seed"], dict(row["hyperparameters"])).label()
        title = html.escape(f"Run {row['member']}: " + ", ".join(filter(None, (f"seed {row['seed']}", label))))
        main, others = report.figures([of_member(record, row["member"]) for record in sampled])
        drawn = f'<div class="curves">{main or "".join(others)}</div>'
        scores = report.evaluation_table(row.get("evaluation"))
        parts.append(
            f'<details class="more" id="run-{row["member"]}"><summary>{title}</summary>{scores}{drawn}</details>'
        )
    return "".join(parts)


def of_member(record: Mapping[str, Any], member: int) -> dict[str, Any]:
    """Record of members.jsonl with the values of one member."""
    return {name: value[member] if isinstance(value, list) else value for name, value in record.items()}


def unfinished(folder: Path, run: Run) -> str:
    """HTML section on the members of a population that has no result yet."""
    records = read(folder / FILE) if (folder / FILE).exists() else []
    rows = [
        {"member": i, "seed": member.seed, "hyperparameters": member.values}
        for i, member in enumerate(members_of(run))
    ]  # fmt: skip
    return member_sections(records, rows)


def ranking(rows: list[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """(header, a row a setting with means and intervals over its members, the best first); no row for one setting."""
    groups = ranked(rows)
    header = ["rank", "setting", "runs", *_metrics(rows)]
    body = [
        [rank, label, len(which), *_intervals([rows[i] for i in which])]
        for rank, (label, which) in enumerate(groups, 1)
    ]
    return header, body if len(groups) > 1 else []


def _metrics(rows: list[Mapping[str, Any]]) -> list[str]:
    return [name for name in rows[0]["evaluation"]["trained"] if name != "episodes"]


def _intervals(rows: list[Mapping[str, Any]]) -> list[str]:
    """Mean over members of each metric, with its interval where there are several."""
    shown = []
    for name in _metrics(rows):
        values = np.array([row["evaluation"]["trained"].get(name, np.nan) for row in rows], float)
        mean, low, high = (float(edge[0]) for edge in confidence.bootstrap_runs(values[None]))
        shown.append(f"{mean:.3f}" if np.isnan(low) else f"{mean:.3f} [{low:.3f}, {high:.3f}]")
    return shown


def columns(rows: list[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]], list[Any]]:
    """(header, a row a member, means with intervals, none over several settings): the table on stdout and in the
    report."""
    names = list(rows[0]["hyperparameters"])
    metrics = _metrics(rows)
    header = ["run", "seed", *(name.replace("_", "-") for name in names), *metrics]
    body = [
        [row["member"], row["seed"], *(f"{row['hyperparameters'][name]:.4g}" for name in names)]
        + [row["evaluation"]["trained"].get(name) for name in metrics]
        for row in rows
    ]
    if len(ranked(rows)) > 1:
        return header, body, []
    return header, body, [f"mean of {len(rows)}", "", *("" for _ in names), *_intervals(rows)]
