"""Evaluation and report of a population: each member is evaluated as if alone, and all are compared."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longhaul.config.population import Member
from longhaul.config.run import Driving, Run
from longhaul.runtime.provenance import params_sha256
from longhaul.telemetry import charts
from longhaul.telemetry import html as pages
from longhaul.training import evaluate, evaluate_driving, population
from longhaul.types import Params

MOST_LINES = 5
"""Largest number of settings drawn in a figure, the best ones."""

RETURN = "episode/return"


def evaluated(
    run: Run, members: tuple[Member, ...], policy: Any, untrained: Any, look: Callable[[], None]
) -> dict[str, Any]:
    """Population part of result.json, from policies [M, ...]: means over members, deviations (n - 1), and each
    member's.

    `look` is called between two members, and may raise.
    """
    play = _player(run)
    rows: list[dict[str, Any]] = []
    for i, member in enumerate(members):
        mine, untaught = (jax.tree.map(lambda x: x[i], each) for each in (policy, untrained))  # noqa: B023
        scores = {"trained": play(mine, member.seed), "untrained": play(untaught, member.seed)}
        digest = params_sha256(jax.device_get(mine.params))
        rows.append(
            {
                "member": i, "seed": member.seed, "hyperparameters": member.values, "params_sha256": digest,
                "evaluation": scores,
            }
        )  # fmt: skip
        look()
    kinds = ("trained", "untrained")
    over = {kind: _over([row["evaluation"][kind] for row in rows]) for kind in kinds}
    return {
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


def _over(scores: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, float]]:
    """(means over members, with all their `episodes`; deviations)."""
    names = [name for name in scores[0] if name != "episodes"]
    values_of = {name: np.array([score[name] for score in scores if name in score]) for name in names}
    means = {name: float(values.mean()) for name, values in values_of.items()}
    spread = {name: float(values.std(ddof=1)) if len(values) > 1 else 0.0 for name, values in values_of.items()}
    return means | {"episodes": sum(score["episodes"] for score in scores)}, spread


def settings(rows: list[Mapping[str, Any]]) -> Iterator[tuple[str, list[int]]]:
    """(label, numbers of its members) of each setting of the swept hyperparameters, in order."""
    for _, some in itertools.groupby(rows, key=lambda row: sorted(row["hyperparameters"].items())):
        group = list(some)
        yield Member(0, dict(group[0]["hyperparameters"])).label(), [row["member"] for row in group]


def section(run: Run, folder: Path, result: Mapping[str, Any]) -> str:
    """HTML section on the members: a figure of returns with 95 % intervals, and a table."""
    steps, values = population.columns(folder, RETURN)
    rows = list(result["members"])
    lines, groups = [], list(settings(rows))
    returns = [float(row["evaluation"]["trained"].get("return", -np.inf)) for row in rows]
    scores = {label: np.mean([returns[i] for i in which]) for label, which in groups}
    best = sorted(scores, key=lambda label: -scores[label])[:MOST_LINES]
    for label, which in (group for group in groups if group[0] in best):
        mean, low, high = evaluate.around(values[:, which]) if len(steps) else (np.zeros(0),) * 3
        lines.append(charts.Series(label or f"mean of {len(which)} runs", steps, mean, low, high))
    drawn = charts.figure("Return of the runs", lines, "agent steps", "per episode; band: 95 %")
    note = (
        '<p class="muted note">Lines are means over the seeds of a setting; bands are 95 % bootstrap intervals of '
        "these means, over the seeds. Each run was evaluated as if it were alone.</p>"
    )
    header, body, footer = columns(rows)

    def cell(value: Any) -> str:
        return html.escape(f"{value:,.3f}" if isinstance(value, float) else str(value))

    table = [f"<tr>{''.join(f'<td>{cell(value)}</td>' for value in row)}</tr>" for row in [*body, footer]]
    return f'<div class="curves">{drawn}</div>{note * bool(drawn)}{pages.table([cell(name) for name in header], table)}'


def columns(rows: list[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]], list[Any]]:
    """(header, a row a member, means with intervals): the table on stdout and in the report."""
    names = list(rows[0]["hyperparameters"])
    metrics = [name for name in rows[0]["evaluation"]["trained"] if name != "episodes"]
    header = ["run", "seed", *(name.replace("_", "-") for name in names), *metrics]
    body = [
        [row["member"], row["seed"], *(f"{row['hyperparameters'][name]:.4g}" for name in names)]
        + [row["evaluation"]["trained"].get(name) for name in metrics]
        for row in rows
    ]
    footer: list[Any] = [f"mean of {len(rows)}", "", *("" for _ in names)]
    for name in metrics:
        values = np.array([row["evaluation"]["trained"].get(name, np.nan) for row in rows], float)
        mean, low, high = (float(edge[0]) for edge in evaluate.around(values[None]))
        footer.append(f"{mean:.3f}" if np.isnan(low) else f"{mean:.3f} [{low:.3f}, {high:.3f}]")
    return header, body, footer
