"""The player of recordings for web pages: markup, styles and compactly encoded data.

Positions are int16 multiples of a scale (a centimetre where the scene is small enough) in base64; the map is cut to the
surroundings of the ego's path, thinned to 5 cm, and kept once for all recordings of a scenario.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from longhaul.driving.render.recording import (
    DARK,
    GOOD_EVENTS,
    LIGHT,
    Recording,
    Verdict,
    camera,
    check,
    clip,
    simplify,
    speeds,
)
from longhaul.telemetry import pages

REACH = 150.0
"""Metres around the ego's path that a page keeps of the map and of the other agents."""

NOWHERE = -32768
"""The int16 that stands for an absent agent."""

NOT_REACHED = "not reached"
KINDS = ("collision", "offroad", "red_light", NOT_REACHED)
"""Kinds of failures in the order of a gallery."""

SHOWN = 12
"""Largest number of pictures of a kind."""

Packed = dict[str, Any]

PACKAGE = "longhaul.driving.render"
"""Package whose `assets` folder holds the player."""


def document(recordings: Sequence[Recording]) -> str:
    """A whole page with nothing but the player."""
    title = recordings[0].id if len(recordings) == 1 else f"{len(recordings)} recordings of driving"
    shown = failures(recordings)
    first = f"<section><h2>Failures</h2>{shown}</section>\n" if shown and len({r.id for r in recordings}) > 1 else ""
    card = f'{first}<section class="card">{section(recordings)}</section>'
    body = f"<main><header><h1>{html.escape(title)}</h1></header>\n{card}</main>"
    return pages.page(title, body, styles=[pages.asset("page.css"), *styles()], scripts=scripts())


def section(recordings: Sequence[Recording]) -> str:
    """The player's markup with its data, for a page that also has `styles()` and `scripts()`."""
    check(recordings)
    data = pages.embed(encode(recordings))
    markup = pages.asset("player.html", PACKAGE)
    return f'<div class="player">\n{markup}<script type="application/json">{data}</script>\n</div>'


class Failure(NamedTuple):
    """An agent's fault in a recording, or its missed goal."""

    kind: str
    severity: float  # speed at the fault, m/s; of a missed goal the share of the route that is left
    recording: int
    agent: int  # index into N
    frame: int
    says: str


def failed(recordings: Sequence[Recording]) -> dict[str, list[Failure]]:
    """Failures of the first recording's policy by kind, in the order of `KINDS`, the most severe first."""
    failures: dict[str, list[Failure]] = {}
    for i, r in enumerate(recordings):
        if r.label != recordings[0].label:
            continue
        for who in (Verdict(r.ego, r.events, r.metrics), *r.others):
            faults = {name: at for name, at in who.events.items() if at is not None and name not in GOOD_EVENTS}
            for name, frame in faults.items():
                speed = float(np.nan_to_num(speeds(r._replace(ego=who.agent)))[max(frame - 1, 0)])
                says = f"{frame * r.dt:.1f} s, {speed:.1f} m/s"
                failures.setdefault(name, []).append(Failure(name, speed, i, who.agent, frame, says))
            if not faults and "goal" in who.events and who.events["goal"] is None:
                left = 1.0 - who.metrics.get("progress", 0.0)
                says = f"{100 * left:.0f} % of the route left"
                failures.setdefault(NOT_REACHED, []).append(
                    Failure(NOT_REACHED, left, i, who.agent, len(r.present) - 1, says)
                )
    order = sorted(failures, key=lambda kind: (KINDS.index(kind) if kind in KINDS else len(KINDS), kind))
    return {kind: sorted(failures[kind], key=lambda each: -each.severity) for kind in order}


def failures(recordings: Sequence[Recording]) -> str:
    """Gallery of the failures, a row of pictures a kind, each a link to its episode; "" where there are none."""
    parts = []
    for kind, some in failed(recordings).items():
        items = [
            f'<li><a href="#episode-{each.recording}-{each.agent}"><canvas data-episode="{each.recording}" '
            f'data-agent="{each.agent}" data-frame="{each.frame}" aria-hidden="true"></canvas>'
            f"<b>{html.escape(recordings[each.recording].id)}</b><br>{html.escape(each.says)}</a></li>"
            for each in some[:SHOWN]
        ]
        more = f", the {SHOWN} most severe" if len(some) > SHOWN else ""
        heading = html.escape(kind.replace("_", " "))
        parts.append(f'<h3>{heading} ({len(some)}{more})</h3><ul class="gallery">{"".join(items)}</ul>')
    return f'<div class="failures">{"".join(parts)}</div>' if parts else ""


def outcomes(recordings: Sequence[Recording]) -> str:
    """Table of the episodes: a row a scenario, a column a policy, what came of the ego a link to its episode."""
    labels, ids = (list(dict.fromkeys(names)) for names in zip(*((r.label, r.id) for r in recordings)))
    cells = {(r.id, r.label): f'<a href="#episode-{i}">{html.escape(outcome(r))}</a>' for i, r in enumerate(recordings)}
    rows = [
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{cells.get((name, label), '')}</td>" for label in labels)
        + "</tr>"
        for name in ids
    ]
    return pages.table(("scenario", *map(html.escape, labels)), rows)


def outcome(r: Recording) -> str:
    """Outcome of the ego: its first fault, else whether it reached its goal, else its progress."""
    faults = [(at, name) for name, at in r.events.items() if at is not None and name not in GOOD_EVENTS]
    if faults:
        at, name = min(faults)
        return f"{name.replace('_', ' ')} at {at * r.dt:.1f} s"
    if "goal" in r.events:
        return NOT_REACHED if r.events["goal"] is None else "goal"
    return f"progress {r.metrics['progress']:.2f}" if "progress" in r.metrics else "drive"


def styles() -> list[str]:
    return [colours(), pages.asset("player.css", PACKAGE)]


def scripts() -> list[str]:
    return [pages.asset("player.js", PACKAGE)]


def colours() -> str:
    """The colours of the map as CSS variables, for light and dark pages."""

    def block(theme: dict[str, str]) -> str:
        return ":root{" + "".join(f"--map-{role}:{code};" for role, code in theme.items()) + "}"

    return f"{block(LIGHT)}\n@media (prefers-color-scheme: dark){{{block(DARK)}}}\n"


def encode(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Data that `assets/player.js` reads: {"maps": [...], "recordings": [...]}, fit for JSON."""
    maps: list[dict[str, Any]] = []
    episodes = []
    known: dict[str, int] = {}
    for recording in recordings:
        scene = _pack_map(recording)
        key = repr(scene)
        if key not in known:
            known[key] = len(maps)
            maps.append(scene)
        episodes.append({**_pack_episode(recording), "map": known[key]})
    return {"maps": maps, "recordings": episodes}


def pack(points: np.ndarray) -> Packed:
    """[..., 2] metres -> {"o": origin, "s": metres a unit, "d": little-endian int16, base64}; NaN becomes `NOWHERE`."""
    points = np.asarray(points, float)
    known = np.isfinite(points).all(-1)
    if not known.any():
        origin, scale = np.zeros(2), 0.01
    else:
        low, high = points[known].min(0), points[known].max(0)
        origin = ((low + high) / 2).round(2)
        scale = max(0.01, float(np.abs(points[known] - origin).max()) / 32000)
    units = np.where(known[..., None], np.round((np.nan_to_num(points) - origin) / scale), NOWHERE)
    return {"o": origin.tolist(), "s": scale, "d": _base64(units)}


def _base64(units: np.ndarray) -> str:
    return base64.b64encode(np.asarray(units).astype("<i2").tobytes()).decode("ascii")


def _pack_headings(heading: np.ndarray) -> str:
    """Radians as int16 ten-thousandths within -pi .. pi; NaN as 0."""
    wrapped = np.angle(np.exp(1j * np.nan_to_num(np.asarray(heading, float))))
    return _base64(np.round(wrapped * 1e4))


def _pack_map(recording: Recording) -> dict[str, Any]:
    path = camera(recording).astype(float)
    low, high = path.min(0) - REACH, path.max(0) + REACH
    kinds: list[int] = []
    runs: list[np.ndarray] = []
    for kind, points in recording.drawing:
        line = np.asarray(points, float)[:, :2]
        for run in clip(line, low, high):
            kinds.append(int(kind))
            runs.append(simplify(run, 0.05) if len(run) > 2 else run)
    points = np.concatenate(runs) if runs else np.zeros((0, 2))
    return {"kinds": kinds, "counts": [len(run) for run in runs], "points": pack(points)}


def _pack_episode(r: Recording) -> dict[str, Any]:
    present = r.present & (r.kind > 0)
    distance = np.linalg.norm(r.pose[:, :, :2] - camera(r)[:, None], axis=-1)
    near = np.any(present & ((distance < REACH) | r.controlled), axis=0)
    near[r.ego] = True
    place = np.cumsum(near) - 1  # of those that are kept
    position = np.where(present[:, near, None], r.pose[:, near, :2], np.nan)
    return {
        "id": r.id,
        "label": r.label,
        "dt": round(float(r.dt), 6),
        "frames": len(r.present),
        "ego": int(place[r.ego]),
        "numbers": np.flatnonzero(near).tolist(),
        "kinds": r.kind[near].tolist(),
        "sizes": np.round(np.nan_to_num(r.size[near].astype(float)), 2).tolist(),
        "controlled": r.controlled[near].astype(int).tolist(),
        "position": pack(position),
        "heading": _pack_headings(r.pose[:, near, 2]),
        "expert": None if r.expert is None else pack(r.expert[:, :2]),
        "expertHeading": None if r.expert is None else _pack_headings(r.expert[:, 2]),
        "route": pack(simplify(r.route.astype(float), 0.05) if len(r.route) > 2 else r.route),
        "lights": pack(r.light_position),
        "lightStates": ["".join(str(int(state)) for state in row) for row in r.light_state],
        "speed": [finite(speed, 2) for speed in speeds(r).tolist()],
        "camera": pack(camera(r)),
        **_pack_verdict(r.events, r.metrics),
        "others": [
            {"agent": int(place[v.agent]), **_pack_verdict(v.events, v.metrics)}
            for v in r.others
            if near[v.agent] and v.agent != r.ego
        ],
    }


def _pack_verdict(events: Mapping[str, int | None], metrics: Mapping[str, float]) -> dict[str, Any]:
    return {
        "events": [
            {"name": name, "frame": int(frame), "good": name in GOOD_EVENTS}
            for name, frame in events.items()
            if frame is not None
        ],
        "metrics": {name: finite(value, 5) for name, value in metrics.items()},
    }


def finite(value: float | None, digits: int) -> float | None:
    """`value` rounded, or None where JSON has no word for it."""
    return round(float(value), digits) if value is not None and math.isfinite(value) else None
