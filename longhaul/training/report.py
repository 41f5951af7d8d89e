"""Report of a run: one self-contained page with key figures, evaluation, driving, learning curves and configuration.

Built from the run's files (`run.json`, `metrics.jsonl`, `result.json`), any of which may be empty or hold NaN or null:
missing parts are left out.
"""

from __future__ import annotations

import html
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from longhaul.driving.render import web_player
from longhaul.driving.render.recording import Recording
from longhaul.runtime import files
from longhaul.runtime.files import finite_number
from longhaul.telemetry import films as filming
from longhaul.telemetry import forecast, pages
from longhaul.telemetry.films import Film
from longhaul.telemetry.health import Finding

COUNTERS = ("update", "env_steps", "agent_steps", "wall_seconds")
"""Fields of a record that count progress; all others are metrics."""

AXIS = ("agent_steps", "env_steps", "update")
"""Candidates for the curves' axis: the first that the records have."""

HIGHER = (
    *("return", "accuracy", "progress", "goal", "comfort", "vmax_score", "nuplan_score", "puffer_score", "completion"),
    *("accuracy_at_fault", "making_progress", "driving_direction", "time_to_collision", "smallest_ttc", "speed_limit"),
    *("lanes", "comfortable"),
    *("pass_at_1", "pass_at_k", "majority_at_k", "soundness"),
)
LOWER = (
    *("collision", "offroad", "red_light", "at_fault_collision", "wrong_way", "off_route", "log_divergence"),
    *("final_divergence", "kinematic_infeasibility", "truncated"),
)
"""Metrics of an evaluation whose best is the highest, or the lowest, in the order of columns; others have no best."""

MAIN = (*HIGHER[:7], *LOWER[:3], "length", *HIGHER[-4:], "steps")
"""Metrics shown at once; the others are in a folded table."""

POLICIES = ("trained", "untrained", "idm", "log", "constant")
"""Order of an evaluation's rows."""

REFERENCES = ("idm", "log", "constant")
"""Drivers that no learning made: rows apart, never the best."""

PROVENANCE = ("commit", "machine", "host", "platform", "cpus", "backend", "devices", "python", "versions")
"""Fields of run.json shown as provenance, beside the command."""

SHOWN = ("return", "accuracy", "progress", "pass_at_1")
"""Metrics of the trained policy among the key figures."""

CROSS_PLAY = "cross-play.json"
"""File of a run's folder: the cells of `training.cross_play`."""

CROSS_PLAYED = ("goal", "collision", "at_fault_collision", "offroad", "red_light")
"""Metrics shown in a cell of the cross-play, below the accuracy."""

MATRIX = "<!--cross-play-->", "<!--/cross-play-->"
"""Marks around the cross-play's matrix in a page, which is drawn again when there is a newer one."""

DASH = "–"
"""Placeholder of a missing value."""


class Panel(NamedTuple):
    """A figure: the metrics whose last part (of "group/name") is among `names`."""

    title: str
    names: tuple[str, ...]
    unit: str = ""


PANELS = (
    Panel("Return", ("return",), "per episode"),
    Panel("Accuracy", ("accuracy",), "share of episodes without fault"),
    Panel("Progress", ("progress",), "share of the route"),
    Panel("Goal", ("goal",), "share of episodes"),
    Panel("Faults", ("collision", "offroad", "red_light"), "share of episodes"),
    Panel("Episode length", ("length",), "steps"),
    Panel("Policy loss", ("policy_loss",)),
    Panel("Value loss", ("value_loss",)),
    Panel("Loss", ("loss",)),
    Panel("Entropy", ("entropy",), "nats"),
    Panel("Approximate KL", ("approx_kl", "kl"), "nats"),
    Panel("Speed of training", ("sps",), "steps a second"),
)


def write_report(
    path: Path | str,
    *,
    run: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
    recordings: Sequence[Recording] = (),
    films: Sequence[Film] = (),
    findings: Sequence[Finding] = (),
    runs: str = "",
) -> None:
    """Report at `path`, written atomically.

    `run` is run.json: `id`, `recipe`, `command` and the fields of `PROVENANCE` are read at its top or within
    `provenance`, all optional; all of it is shown as the configuration. `records` are the objects of metrics.jsonl in
    order, `result` is result.json (`{}` before the run's end), `recordings` are of driving and `films` of any other
    environment, `runs` is the HTML section of a population. Every text is escaped. Raises ValueError if a recording's
    arrays do not fit together.
    """
    whole, run = run, {**_mapping(run.get("provenance")), **run}
    name = str(run.get("id") or Path(path).absolute().parent.name)
    taught = any(forecast.TAUGHT in record for record in records)  # a reasoning run's final reward is bounded
    links = {film.label: filming.address(film.label) for film in films if film.images}
    links |= {r.label: f"episode-{i}" for i, r in reversed(list(enumerate(recordings)))}
    parts = [
        _header(name, run, result),
        _section("Key figures", _key_figures(records, result)),
        _section("Failures", web_player.failures(recordings)),
        _section("Runs", runs),
        _section("Evaluation", evaluation_table(result.get("evaluation"), links, result.get("setting"))),
        _section("Episodes", filming.section(films)),
        _section("Chains", _chains(result.get("chains"))),
        _section("Driving", _driving(recordings)),
        _cross_play(_document(Path(path).parent / CROSS_PLAY)),
        *curves(records),
        _section("Forecast", _listing(forecast.in_words(records) if taught else [])),
        _section("Health", _health(findings)),
        _section("Where it comes from", _provenance(run)),
        _section("Configuration", _folded("run.json", whole) + _folded("result.json", result)),
    ]
    files.write(
        path,
        pages.page(
            f"{name} · Longhaul",
            f"<main>{''.join(parts)}</main>",
            styles=[pages.asset(f"{sheet}.css") for sheet in ("page", "report", "curves")]
            + web_player.styles() * bool(recordings)
            + filming.styles() * bool(films),
            scripts=[
                pages.asset("curves.js"),
                *web_player.scripts() * bool(recordings),
                *filming.scripts() * bool(films),
            ],
        ),
    )


def _header(name: str, run: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    facts = [str(run["recipe"])] if run.get("recipe") else []
    if run.get("commit"):
        facts.append(f"commit {str(run['commit'])[:12]}")
    status = result.get("status")
    chip = f'<span class="chip {"done" if status == "done" else ""}">{_text(status)}</span>' if status else ""
    return f'<header><h1>{_text(name)} {chip}</h1><p class="muted">{_text(" · ".join(facts))}</p></header>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{content}</section>" if content else ""


def _key_figures(records: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> str:
    last = records[-1] if records else {}

    def known(key: str, other: str) -> float | None:
        value = finite_number(result.get(key))
        return finite_number(last.get(other)) if value is None else value

    agent_steps, env_steps = known("agent_steps", "agent_steps"), known("env_steps", "env_steps")
    figures = [
        ("agent steps", _count(agent_steps)),
        ("environment steps", _count(env_steps) if env_steps != agent_steps else ""),
        ("training", _duration(known("train_seconds", "wall_seconds"))),
        ("compilation", _duration(finite_number(result.get("compile_seconds")))),
        ("steps a second", _count(known("sps", "sps"))),
    ]
    trained = _mapping(_mapping(result.get("evaluation")).get("trained"))
    scores = {name: value for name in SHOWN if (value := finite_number(trained.get(name))) is not None}
    figures += [(f"{k}, trained", f"{v:,.{_digits([v])}f}".replace("-", "−")) for k, v in scores.items()]
    cards = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in figures if value)
    return f'<dl class="figures">{cards}</dl>' if cards else ""


def _driving(recordings: Sequence[Recording]) -> str:
    if not recordings:
        return ""
    return f'<div class="card">{web_player.section(recordings)}</div>{web_player.outcomes(recordings)}'


def evaluation_table(evaluation: Any, links: Mapping[str, str] = MappingProxyType({}), setting: Any = None) -> str:
    """Table of means: a row a policy with a link to its episodes, a column a metric, the best of a column marked."""
    rows = {str(policy): _mapping(means) for policy, means in _mapping(evaluation).items()}
    rows = {policy: rows[policy] for policy in sorted(rows, key=lambda name: _rank(name, POLICIES)) if rows[policy]}
    present = {str(key) for means in rows.values() for key, value in means.items() if finite_number(value) is not None}
    columns = sorted(present - {"episodes"}, key=lambda name: _rank(name, HIGHER + LOWER))
    if not columns:
        return ""
    shown = [name for name in columns if name in MAIN] or columns
    note = (
        '<p class="muted note">Means over the episodes that tell a metric'
        + (f" of the best setting, {_text(setting)}" if setting else "")
        + "; the best policy of a column is marked, ↑ where more is better, ↓ where less is.</p>"
    )
    others = [name for name in columns if name not in shown]
    more = f"<details><summary>Further metrics ({len(others)})</summary>{_table(rows, others, links)}</details>"
    return _table(rows, shown, links) + note + more * bool(others)


def draw_cross_play(folder: Path) -> None:
    """Drawing of the matrix of a run's folder in its report, where there is one."""
    page = folder / "report.html"
    if page.is_file():
        before, _, rest = page.read_text("utf-8").partition(MATRIX[0])
        files.write(page, before + _cross_play(_document(folder / CROSS_PLAY)) + rest.partition(MATRIX[1])[2])


def _document(path: Path) -> Mapping[str, Any]:
    return _mapping(json.loads(path.read_text("utf-8"))) if path.is_file() else {}


def _cross_play(matrix: Mapping[str, Any]) -> str:
    """Section of the matrix: a row an ego, a column a driver of the others; faults below the accuracy."""
    cells = {(cell["ego"], cell["partner"]): cell["mean"] for cell in matrix.get("cells", ())}
    partners = list(dict.fromkeys(partner for _, partner in cells))
    rows = []
    for ego in dict.fromkeys(ego for ego, _ in cells):
        drawn = ""
        for partner in partners:
            mean = cells[ego, partner]
            accuracy = finite_number(mean.get("accuracy")) or 0.0
            rates = (f"{_spaced(k)} {v:.3f}" for k in CROSS_PLAYED if (v := finite_number(mean.get(k))) is not None)
            faults = "<br>".join(rates)
            shade = f"color-mix(in srgb, #2a9d5c {max(0.0, 10 * accuracy - 9) * 45:.0f}%, transparent)"
            drawn += f'<td style="background:{shade}">{accuracy:.3f}<br><small>{faults}</small></td>'
        rows.append(f'<tr><th scope="row">{_text(ego)}</th>{drawn}</tr>')
    note = '<p class="muted note">Accuracy of the ego in a row, by who drives the others; greener is nearer to 1.</p>'
    content = pages.table(("ego", *map(_text, partners)), rows) + note if rows else ""
    return MATRIX[0] + _section("Cross-play", content) + MATRIX[1]


def _chains(chains: Any) -> str:
    """Table of a language model's completions of held-out problems, one each, after training and before, with the
    verdict of the task's verifier."""
    if not chains:
        return ""

    def marked(text: str, right: bool) -> str:
        return f"<td><code>{_text(text)}</code></td><td>{'right' if right else 'wrong'}</td>"

    rows = [
        f'<tr><th scope="row"><code>{_text(each["prompt"])}</code></th>'
        + (marked(each["before"], each["before_right"]) if "before" in each else "<td></td><td></td>")
        + f"{marked(each['chain'], each['right'])}</tr>"
        for each in chains
    ]
    return pages.table(("problem", "before", "verifier", "after", "verifier"), rows)


def _table(rows: Mapping[str, Mapping[str, Any]], columns: Sequence[str], links: Mapping[str, str]) -> str:
    arrows = dict.fromkeys(HIGHER, " ↑") | dict.fromkeys(LOWER, " ↓")
    heads = [_text(_spaced(column)) + arrows.get(column, "") for column in columns]
    body = []
    best = {column: best_policies(column, rows) for column in columns}
    digits = {column: _digits([finite_number(means.get(column)) for means in rows.values()]) for column in columns}
    for policy, means in rows.items():
        cells = ""
        for column in columns:
            value = finite_number(means.get(column))
            text = DASH if value is None else f"{value:,.{digits[column]}f}".replace("-", "−")
            cells += f"<td{' class=best' if policy in best[column] else ''}>{text}</td>"
        episodes = _text(_count(finite_number(means.get("episodes"))) or DASH)
        name = f'<a href="#{_text(links[policy])}">{_text(policy)}</a>' if policy in links else _text(policy)
        apart = ' class="reference"' if policy in REFERENCES else ""
        body.append(f'<tr{apart}><th scope="row">{name}</th>{cells}<td class="muted">{episodes}</td></tr>')
    return pages.table(("policy", *heads, "episodes"), body)


def _digits(values: Sequence[float | None]) -> int:
    """Decimals of a column: four digits of its greatest value, at most three after the point."""
    size = max((abs(value) for value in values if value is not None), default=0.0)
    return next((digits for bound, digits in ((10, 3), (100, 2), (1000, 1)) if size < bound), 0)


def best_policies(column: str, rows: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Policies with the best value of a metric, references aside; none if its direction is unknown or all are equal."""
    known = {policy: finite_number(means.get(column)) for policy, means in rows.items() if policy not in REFERENCES}
    values = {policy: value for policy, value in known.items() if value is not None}
    if column not in HIGHER + LOWER or len(set(values.values())) < 2:
        return set()
    best = max(values.values()) if column in HIGHER else min(values.values())
    return {policy for policy, value in values.items() if value == best}


def curves(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Known panels, then the other metrics folded."""
    main, others = figures(records)
    note = '<p class="muted note">Faint lines are as logged, strong ones their running means.</p>'
    smoothed = note * ('class="faint' in main)
    parts = [_section("Learning curves", f'<div class="curves">{main}</div>{smoothed}' if main else "")]
    if count := sum(1 for figure in others if figure):
        summary = f"<summary>{'Further' if main else 'Learning'} curves ({count})</summary>"
        opened = "" if main else " open"
        parts.append(f'<details class="more"{opened}>{summary}<div class="curves">{"".join(others)}</div></details>')
    return parts


def figures(records: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """(known panels, figures of the other metrics) of records."""
    axis = next((name for name in AXIS if any(finite_number(record.get(name)) is not None for record in records)), "")
    lines = {line.name: line for line in series(records, axis)}
    label = _spaced(axis) or "log points"
    drawn_panels = []
    rest = dict(lines)
    for panel in PANELS:
        own = [name for name in lines if name.split("/")[-1] in panel.names]
        drawn = [lines[name]._replace(name=_spaced(_shortest(name, own))) for name in own]
        drawn_panels.append(pages.figure(panel.title, drawn, label, panel.unit))
        for name in own:
            rest.pop(name, None)
    others = [pages.figure(name, [line], label) for name, line in sorted(rest.items())]
    return "".join(drawn_panels), others


def series(records: Sequence[Mapping[str, Any]], axis: str) -> list[pages.Series]:
    """A line for each metric of the records over `axis` (their number if empty); NaN where a record lacks it."""
    steps = [finite_number(record.get(axis)) for record in records] if axis else [float(i) for i in range(len(records))]
    chosen = [(step, record) for step, record in zip(steps, records, strict=True) if step is not None]
    x = np.array([step for step, _ in chosen], float)
    names = dict.fromkeys(str(key) for _, record in chosen for key in record if key not in COUNTERS)
    lines = []
    for name in names:
        values = [finite_number(record.get(name)) for _, record in chosen]
        lines.append(pages.Series(name, x, np.array([math.nan if value is None else value for value in values], float)))
    return lines


def _health(findings: Sequence[Finding]) -> str:
    """Table of health problems: from which update to which, and the remedy."""
    rows = [
        f'<tr><th scope="row">{_text(finding.says)}</th><td>{finding.since:,}</td>'
        f"<td>{'the end' if finding.until is None else f'{finding.until:,}'}</td><td>{_text(finding.remedy)}</td></tr>"
        for finding in findings
    ]
    return pages.table(("what", "from update", "to", "remedy"), rows) if rows else ""


def _provenance(run: Mapping[str, Any]) -> str:
    """Command line, versions and machine of a run, as far as they are known."""
    command = run.get("command")
    line = shlex.join(str(word) for word in command) if isinstance(command, list | tuple) else command
    return _listing([("command", line), *((key, run.get(key)) for key in PROVENANCE)])


def _listing(facts: Sequence[tuple[str, Any]]) -> str:
    """Names with their values, those that have one; a command as code."""
    tags = {"command": "<code>{}</code>"}
    cells = ((_text(name), tags.get(name, "{}").format(_text(_flat(value)))) for name, value in facts if value)
    rows = [f"<dt>{name}</dt><dd>{value}</dd>" for name, value in cells]
    return f'<dl class="card provenance">{"".join(rows)}</dl>' if rows else ""


def _folded(title: str, value: Mapping[str, Any]) -> str:
    if not value:
        return ""
    text = json.dumps(value, indent=2, default=str, ensure_ascii=False)
    return f'<details><summary>{_text(title)}</summary><pre tabindex="0">{_text(text)}</pre></details>'


def _flat(value: Any) -> str:
    """A mapping on one line, "jax 0.10.2, numpy 2.4"; other values as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{_spaced(str(key))} {_flat(inner)}" for key, inner in value.items() if inner is not None)
    if isinstance(value, list | tuple):
        return ", ".join(_flat(inner) for inner in value)
    return str(value)


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{int(minutes)} min {int(seconds % 60)} s" if minutes < 60 else f"{int(hours)} h {int(minutes % 60)} min"


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _shortest(name: str, own: Sequence[str]) -> str:
    """Shortest distinguishing label of a metric "group/last" in its panel: the group, the last part, or both."""
    group, _, last = name.rpartition("/")
    if len({other.rpartition("/")[2] for other in own}) == 1:
        return group or last
    return last if len({other.rpartition("/")[0] for other in own}) == 1 else name


def _rank(name: str, order: tuple[str, ...]) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order), name)
