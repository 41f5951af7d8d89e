"""Many scenarios as one set of arrays: what a driving simulator holds, immutable, on its device.

An environment's state then needs only the number of its scenario and a time step; a reset changes two integers.
Everything is padded to the largest scenario of the bank, except the distance fields, which differ most in size: they
lie one behind the other in one flat array.

`Extents` are counts of one scenario which its shapes do not tell. Shards keep them, so that the memory for a chunk of
scenarios is known before any is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from longhaul.driving.datasets import log
from longhaul.driving.scenario import distance_field
from longhaul.driving.scenario.lane_graph import Roadmap, join
from longhaul.driving.scenario.scenario import ONWARD, ROUTE_SPACING, Scenario

Array = Any  # numpy.ndarray or jax.Array

ROUTE_MULTIPLE, LIGHT_MULTIPLE = 32, 4
"""Route points and lights are padded to these multiples, so that banks of like scenarios share compiled programs."""


class Bank(NamedTuple):
    """S scenarios; T steps, N agents, A controlled agents, R route points, L lights of a route; see `Scenario`.

    Padding: steps past `steps` hold the last pose with `present` False; `kind` 0 and `present` False where there is
    no agent; `controlled` -1, `route_points` 0 and `route_length` 0 where there is no controlled agent; routes go
    straight on past `route_points`; `light_s` inf and `light_state` 0 where there is no light.

    The sample of scenario i at row y, column x of its field is `field[field_start[i] + y * field_shape[i, 1] + x]`,
    and lies at `field_origin[i] + CELL * (x, y)`. A shape of (0, 0) means that the source has no road edges: never
    off the road. `field` itself is never empty, so that a clamped gather is always legal.
    """

    pose: Array  # float32 [S, T, N, 3]: x, y, heading
    velocity: Array  # float32 [S, T, N, 2]
    present: Array  # bool [S, T, N]
    size: Array  # float32 [S, N, 2]: length, width
    kind: Array  # int32 [S, N]: log.VEHICLE ...; 0 is padding
    onward: Array  # float32 [S, N, ONWARD, 2]: the way after the log's; NaN where it is not known
    steps: Array  # int32 [S]
    dt: Array  # float32 [S], s
    controlled: Array  # int32 [S, A], index into N; -1 is padding
    route: Array  # float32 [S, A, R, 3]: x, y, heading
    route_length: Array  # float32 [S, A], m
    route_points: Array  # int32 [S, A]
    expert_s: Array  # float32 [S, A, T], m
    light_s: Array  # float32 [S, A, L], m; inf is padding
    light_state: Array  # int8 [S, A, L, T]: 0 none or unknown, 1 red, 2 yellow, 3 green
    field: Array  # int16 [cells], centimetres
    field_start: Array  # int32 [S]
    field_shape: Array  # int32 [S, 2]: H, W
    field_origin: Array  # float32 [S, 2]: x, y of sample [0, 0]
    map: Roadmap


class Sizes(NamedTuple):
    """Sizes to which the scenarios of a bank are padded."""

    steps: int  # T
    objects: int  # N
    points: int  # R
    lights: int  # L


def sizes_of(steps: int, objects: int, points: int, lights: int) -> Sizes:
    """The sizes of a bank whose largest scenario has these, so that banks of like scenarios share compiled programs.

    Objects are padded to a power of two, at least 16; route points and lights to multiples.
    """
    return Sizes(steps, bucket(objects), multiple(points, ROUTE_MULTIPLE), multiple(lights, LIGHT_MULTIPLE))


def stack(scenarios: Sequence[Scenario], *, agents: int = 1, sizes: Sizes | None = None) -> Bank:
    """The bank of `scenarios`, with `agents` controlled agents each: the first ones, padded where a scenario has fewer.

    All are padded to `sizes`, by default those of the largest (see `sizes_of`). Raises `ValueError` if there is no
    scenario, or if the distance fields have 2^31 cells or more together.
    """
    if not scenarios:
        raise ValueError("a bank of 0 scenarios: give at least 1")
    if agents < 1:
        raise ValueError(f"agents is {agents}: a scenario has at least 1 controlled agent")
    cells = sum(s.field.size for s in scenarios)
    if cells >= 2**31:
        raise ValueError(
            f"the distance fields of {len(scenarios)} scenarios have {cells} cells, not below 2^31: make several banks"
        )
    to = sizes
    if to is None:
        extents = [(s.steps, s.kind.shape[0], s.route.shape[1], s.light_s.shape[1]) for s in scenarios]
        to = sizes_of(*(max(each) for each in zip(*extents, strict=True)))
    rows = [pad(s, to.steps, to.objects, agents, to.points, to.lights) for s in scenarios]
    columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    taken = np.array([s.field.size for s in scenarios], np.int64)
    flat = [s.field.reshape(-1) for s in scenarios] if cells else [np.full(1, -32000, np.int16)]
    return Bank(
        steps=np.array([s.steps for s in scenarios], np.int32),
        dt=np.array([s.dt for s in scenarios], np.float32),
        field=np.concatenate(flat).astype(np.int16),
        field_start=(np.cumsum(taken) - taken).astype(np.int32),
        field_shape=np.array([s.field.shape for s in scenarios], np.int32).reshape(-1, 2),
        field_origin=np.array([s.field_origin for s in scenarios], np.float32).reshape(-1, 2),
        map=join([s.road for s in scenarios]),
        **columns,
    )


def pad(scenario: Scenario, steps: int, objects: int, agents: int, points: int, lights: int) -> dict[str, np.ndarray]:
    """The arrays of one scenario at the bank's sizes; see `Bank` for what the padding holds."""
    s = scenario
    return {
        "pose": grow(hold(s.pose, steps), 1, objects),
        "velocity": grow(grow(s.velocity, 0, steps), 1, objects),
        "present": grow(grow(s.present, 0, steps), 1, objects),
        "size": grow(s.size, 0, objects),
        "kind": grow(s.kind.astype(np.int32), 0, objects),
        "onward": go_on(s, objects),
        "controlled": grow(s.controlled.astype(np.int32), 0, agents, -1),
        "route": grow(extend(s.route[:agents], s.route_points[:agents], points), 0, agents),
        "route_length": grow(s.route_length, 0, agents),
        "route_points": grow(s.route_points.astype(np.int32), 0, agents),
        "expert_s": grow(hold(s.expert_s.T, steps).T, 0, agents),
        "light_s": grow(grow(s.light_s, 1, lights, np.inf), 0, agents, np.inf),
        "light_state": grow(grow(grow(s.light_state, 2, steps), 1, lights), 0, agents),
    }


def go_on(scenario: Scenario, objects: int) -> np.ndarray:
    """float32 [objects, ONWARD, 2]: every agent's way after the log's."""
    out = np.full((objects, ONWARD, 2), np.nan, np.float32)
    fits = scenario.onward_of < min(objects, len(scenario.kind))
    out[scenario.onward_of[fits]] = scenario.onward.reshape(-1, ONWARD, 2)[fits]
    return out


def bucket(count: int, least: int = 16) -> int:
    """The power of two, at least `least`, that holds `count`."""
    size = least
    while size < count:
        size *= 2
    return size


def multiple(count: int, of: int) -> int:
    """The multiple of `of`, at least `of`, that holds `count`."""
    return max(-(-count // of), 1) * of


def grow(array: np.ndarray, axis: int, size: int, fill: float = 0) -> np.ndarray:
    """`array` cut or padded by `fill` to `size` along `axis`."""
    array = np.take(array, range(min(array.shape[axis], size)), axis=axis)
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return np.pad(array, widths, constant_values=fill)


def hold(array: np.ndarray, steps: int) -> np.ndarray:
    """`array` [T, ...] padded to `steps` by its last row."""
    return np.pad(array, [(0, steps - array.shape[0])] + [(0, 0)] * (array.ndim - 1), mode="edge")


def extend(route: np.ndarray, count: np.ndarray, points: int) -> np.ndarray:
    """Routes [A, R, 3] of `count` [A] real points, going straight on up to `points`; zeros where `count` is 0."""
    out = np.zeros((route.shape[0], points, 3), np.float32)
    for a, n in enumerate(count):
        if n < 1:
            continue
        out[a, :n] = route[a, :n]
        x, y, heading = route[a, n - 1]
        further = ROUTE_SPACING * np.arange(1, points - n + 1)
        straight = [x + further * np.cos(heading), y + further * np.sin(heading), np.full_like(further, heading)]
        out[a, n:] = np.stack(straight, -1)
    return out


STIR = 0.5
"""A logged vehicle that moves by less than this, m, stands still: trackers jitter."""

MOVES = 1.0
"""Metres that a vehicle's log must go for it to react."""

MOST = 2**32 - 1
"""Beyond any count."""


class Extents(NamedTuple):
    """Counts of one scenario, whole numbers up to MOST."""

    routes: int  # controlled agents
    points: int  # of their routes together
    slow: int  # the first slot beside the ego with a cyclist or pedestrian; MOST: there is none
    courses: int  # different courses of lights' states, and one that is dark
    cells: int  # bytes of the field's own tiles
    lanes: int  # lanes' rows of the road
    movers: int  # vehicles whose log goes MOVES metres
    way: int  # m: the logged ways of these together, each rounded up


def extents(scenario: Scenario, pose: np.ndarray) -> Extents:
    """The extents of `scenario` whose `pose` is as a shard gives it back: rounded to its units."""
    driven = scenario.controlled >= 0
    kinds = np.where(driven, scenario.kind[np.maximum(scenario.controlled, 0)], 0)
    slow = 1 + np.flatnonzero(np.isin(kinds[1:], (log.CYCLIST, log.PEDESTRIAN)))
    length = arc_lengths(pose[None], scenario.present[None])[0, -1]
    moves = (scenario.kind == log.VEHICLE) & (length >= MOVES)
    field = scenario.field
    cells = 0 if min(field.shape) < 2 else len(distance_field.tile([field]).cells) - 2 * distance_field.COARSE
    return Extents(
        routes=int(driven.sum()),
        points=int(scenario.route_points[driven].sum()),
        slow=int(slow[0]) if len(slow) else MOST,
        courses=len(courses(scenario.light_s, scenario.light_state)[0]),
        cells=cells,
        lanes=int((scenario.road.lane >= 0).sum()),
        movers=int(moves.sum()),
        way=int(np.ceil(length[moves]).sum()),
    )


def arc_lengths(pose: np.ndarray, present: np.ndarray) -> np.ndarray:
    """The way [S, T, N] that agents have come since the log first saw them, m, in steps of at least STIR."""
    travelled = np.zeros(present.shape, np.float32)
    anchor, seen = pose[:, 0, :, :2].copy(), present[:, 0].copy()
    for t in range(1, present.shape[1]):
        moved = np.linalg.norm(pose[:, t, :, :2] - anchor, axis=-1)
        counts = present[:, t] & seen & (moved >= STIR)
        travelled[:, t] = travelled[:, t - 1] + np.where(counts, moved, 0.0)
        anchor = np.where((counts | (present[:, t] & ~seen))[..., None], pose[:, t, :, :2], anchor)
        seen |= present[:, t]
    return travelled


def courses(s: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different courses of states [K, T] of lights at `s` [A, L], the first dark throughout; and which of them each
    light has, as `s`; `state` is [A, L, T], not negative."""
    lit = np.isfinite(s) & state.any(-1)
    dark = np.zeros((1, state.shape[-1]), state.dtype)
    each, number = np.unique(np.concatenate([dark, state[lit]]), axis=0, return_inverse=True)
    which = np.zeros(s.shape, np.int64)
    which[lit] = number.reshape(-1)[1:]
    return each, which
