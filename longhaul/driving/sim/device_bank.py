"""Device bank: a bank laid out for the gathers of the simulator, in few bytes.

One step of one world reads one slice of all objects' motion, two windows of each route, and a few dozen cells of the
distance field. So what is read together lies together, agents or points last, where arithmetic runs along them.
Numbers are int16 or int8 (see `distance_field`); only the slices that a step reads become float32. Nothing is
padded to the largest scenario: steps, points, lights and tiles of all scenarios lie one behind the other, and a
scenario has offsets. Routes get points before their beginning and after their end, that no window has to be cut.

Positions are whole multiples of a scale of their scenario: 2 cm or finer where everything lies within 655 m of the
origin. Floats of 16 bits would have steps of half a metre there. Angles are 65,536ths of a turn, so that addition wraps
by itself. Encoding is NumPy; decoding takes arrays of either kind.

Nobody else depends on the packing: read through `slice_at`, `logged_at`, `window`, `place_on`, `lights_at`, `field`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.driving.datasets.log import VEHICLE
from longhaul.driving.scenario import distance_field
from longhaul.driving.scenario.bank import MOVES, Bank, arc_lengths, courses
from longhaul.driving.scenario.lane_graph import FINE, Roadmap
from longhaul.driving.scenario.scenario import ONWARD, ONWARD_SPACING, ROUTE_SPACING
from longhaul.driving.sim.geometry import Field, wrap

Array = Any  # numpy.ndarray while tables are made, jax.Array then

BEHIND = 4
"""Points of a route before its beginning, and of a window behind its cursor."""

AHEAD = 60
"""Points of a window from its cursor on."""

PATH_SPACING = 2.0
"""Metres between two points of the path that a reactive vehicle follows."""

NOWHERE = 1e6
"""Arc length, m, that no object reaches."""

PATH_WINDOW = 24
"""Points of such a path that are read at once."""

EXTENSION = 30.0
"""Metres that the path of a vehicle still under way when the log sees it last goes straight on, where no lane is
known that it could follow."""

TURN = np.float32(2.0 * np.pi / 65536.0)
"""Radians of one unit of an angle."""

MOST = 32767
"""The largest int16."""

NOTHING = -32768
"""The int16 that no number is encoded as, so that it can say that there is none."""

FINEST = 1e-3
"""The smallest scale: a millimetre, or a millimetre a second, is finer than any log."""


class Lines(NamedTuple):
    """Polylines of all scenarios, M a scenario, one behind the other."""

    points: Array  # int16 [3, points]: x, y (units of `scale`), heading (units of TURN)
    start: Array  # int32 [S, M]: the first point of a line
    count: Array  # int32 [S, M]: how many it has
    scale: Array  # float32 [S], m


class Paths(NamedTuple):
    """The logged ways of vehicles that react, by arc length."""

    lines: Lines  # M = N; PATH_SPACING apart; those that do not react share one without meaning
    end: Array  # float32 [S, N]: arc length at which it has to stop
    cruise: Array  # float32 [S, N]: the highest logged speed
    reactive: Array  # bool [S, N]: whether it reacts; the others are replayed
    gone: Array  # float32 [S, N]: arc length at which the log lost it under way; 0 if it stood
    last: Array  # int16 [S, N]: the step at which the log sees it last
    begin: Array  # float32 [S, N]: the speed at which it appears


class Lights(NamedTuple):
    """The lights that routes meet. A scenario has K different courses of states; one is dark throughout."""

    s: Array  # float32 [S, A, L]: arc length of the stop line; inf is padding
    course: Array  # int16 [S, A, L], which of the K
    states: Array  # int8 [states]: 0 none or unknown, 1 red, 2 yellow, 3 green; of a scenario [T, K]
    start: Array  # int32 [S]: the first of a scenario's states
    courses: Array  # int32 [S]: K


class DeviceBank(NamedTuple):
    """A bank on the device. C is 5, or 7 with reactive traffic."""

    motion: Array  # int16 [steps of all scenarios, C, N]: x, y, heading, velocity x (NOTHING: absent) and y, (arc
    # length, wall: MOST is nowhere)
    start: Array  # int32 [S]: a scenario's first row of `motion`
    scale: Array  # float32 [S, 3]: units of positions, m, of velocities, m/s, and of arc lengths, m
    body: Array  # float32 [S, 4, N]: half length, half width, kind, slot among the controlled or -1
    first: Array  # int16 [S, N]: the step at which the log sees somebody first
    steps: Array  # int32 [S]
    dt: Array  # float32 [S]
    controlled: Array  # int32 [S, A]
    routes: Lines  # M = A; of BEHIND + route_points + AHEAD points; empty slots share a straight one
    route_length: Array  # float32 [S, A]
    start_s: Array  # float32 [S, A]: arc length at which the agent begins
    desired: Array  # float32 [S, A]: the speed that an IDM driver strives for
    lights: Lights
    cells: Array  # int8, see `distance_field.Tiles`
    tiles: Array  # int32
    field_start: Array  # int32 [S]
    field_shape: Array  # int32 [S, 2]
    field_origin: Array  # float32 [S, 2]
    paths: Paths | None
    map: Roadmap
    among: Array | None = None  # int32: episodes begin in the first so many scenarios; None: in all

    @property
    def scenarios(self) -> int:
        return self.steps.shape[0]


FLAT = {
    ".motion": 0,
    ".routes.points": 1,
    ".lights.states": 0,
    ".cells": 0,
    ".tiles": 0,
    ".paths.lines.points": 1,
    ".map.place": 0,
    ".map.shape": 0,
    ".map.lane": 0,
    ".map.directory": 0,
    ".map.points": 0,
    ".map.lanes": 0,
}
"""The arrays in which all scenarios lie one behind the other, by their paths, and the axis along which they do: there
they may be longer than they need to be."""


def tabulate(bank: Bank, agents: int, *, reactive: bool) -> DeviceBank:
    """The tables of a bank of NumPy arrays, for its first `agents` controlled agents, with `Paths` if others react; on
    the default device."""
    host = arrange(bank, agents, reactive=reactive)
    if host.paths is not None and not host.paths.reactive.any():  # no object can react: a state keeps nothing of it
        host = arrange(bank, agents, reactive=False)
    return jax.tree.map(jnp.asarray, host)


def arrange(bank: Bank, agents: int, *, reactive: bool, driven: int | None = None) -> DeviceBank:
    """Device bank of NumPy arrays; see `tabulate`. The slots from `driven` on have paths, too: they may react."""
    bank = bank._replace(pose=tidy(bank.pose, bank.present), velocity=tidy(bank.velocity, bank.present))
    controlled = bank.controlled[:, :agents].astype(np.int32)
    slot = np.full(bank.kind.shape, -1, np.int32)
    scenario, agent = np.nonzero(controlled >= 0)
    slot[scenario, controlled[scenario, agent]] = agent
    paths, arcs = None, []
    if reactive:
        travelled = arc_lengths(bank.pose, bank.present)
        paths = follow(bank, travelled, (slot >= 0) & (slot < (driven or agents)))
        arcs = [travelled, walls(bank, travelled)]
    motion, scale = record(bank, arcs)
    known = np.arange(motion.shape[1]) < bank.steps[:, None]
    half = 0.5 * bank.size
    count = np.where(controlled >= 0, bank.route_points[:, :agents] + BEHIND + AHEAD, 0)
    edges = distance_field.tile(fields_of(bank))
    return DeviceBank(
        motion=motion[known],
        start=(np.cumsum(bank.steps) - bank.steps).astype(np.int32),
        scale=scale,
        body=np.stack([half[..., 0], half[..., 1], bank.kind, slot], 1).astype(np.float32),
        first=bank.present.argmax(1).astype(np.int16),
        steps=bank.steps.astype(np.int32),
        dt=bank.dt.astype(np.float32),
        controlled=controlled,
        routes=lay(prolong(bank.route[:, :agents]), count, BEHIND + 1 + AHEAD),
        route_length=bank.route_length[:, :agents].astype(np.float32),
        start_s=bank.expert_s[:, :agents, 0].astype(np.float32),
        desired=top_speed(bank, agents),
        lights=share_lights(bank, agents),
        cells=edges.cells,
        tiles=edges.tiles,
        field_start=edges.start,
        field_shape=bank.field_shape.astype(np.int32),
        field_origin=bank.field_origin.astype(np.float32),
        paths=paths,
        map=bank.map,
    )


def record(bank: Bank, arcs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """`motion` [S, T, C, N] with its scales [S, 3]; `arcs`: nothing, or arc lengths and walls [S, T, N]."""
    wall = [np.where(values < NOWHERE, values, 0.0) for values in arcs]
    no_wall = np.zeros((len(bank.steps), 1), np.float32)
    known = (bank.pose[..., :2], bank.velocity, np.stack(wall, 1) if arcs else no_wall)
    scale = np.stack([scale_for(values) for values in known], 1)
    scale[:, 2] *= np.float32(MOST / (MOST - 1))  # for MOST itself means nowhere
    metre, speed, arc = (scale[:, i, None, None] for i in range(3))
    there = encode(bank.velocity[..., 0], speed)
    channels = [
        encode(bank.pose[..., 0], metre),
        encode(bank.pose[..., 1], metre),
        encode_angle(bank.pose[..., 2]),
        np.where(bank.present, there, np.int16(NOTHING)),
        encode(bank.velocity[..., 1], speed),
    ]
    channels += [np.where(values < NOWHERE, encode(values, arc), np.int16(MOST)) for values in arcs]
    return np.stack(channels, 2), scale


def lay(points: np.ndarray, count: np.ndarray, least: int) -> Lines:
    """Lines [S, M, 3, P] of which the first `count` [S, M] points count; those without any share one of `least`."""
    counts = np.where(count > 0, count, least).astype(np.int32)
    kept = np.arange(points.shape[3]) < count[..., None]
    scale = scale_for(np.where(kept[:, :, None], points[:, :, :2], 0.0))
    # the one that is shared comes first: straight on, along x
    shared = np.zeros((3, least), np.int16)
    shared[0] = 256 * np.arange(least)
    units = np.stack(
        [*(encode(points[:, :, i], scale[:, None, None])[kept] for i in range(2)), encode_angle(points[:, :, 2][kept])]
    )
    start = least + np.cumsum(count).reshape(count.shape) - count
    start = np.where(count > 0, start, 0).astype(np.int32)
    return Lines(np.concatenate([shared, units], 1), start, counts, scale)


def share_lights(bank: Bank, agents: int) -> Lights:
    """The lights of all routes, each course of states once a scenario."""
    s, state = bank.light_s[:, :agents].astype(np.float32), bank.light_state[:, :agents]
    course = np.zeros(s.shape, np.int16)
    parts, count = [], []
    for i, steps in enumerate(bank.steps):
        different, course[i] = courses(s[i], state[i, ..., :steps])
        parts.append(np.ascontiguousarray(different.T).reshape(-1))
        count.append(len(different))
    sizes = np.array([part.size for part in parts])
    start = (np.cumsum(sizes) - sizes).astype(np.int32)
    return Lights(s, course, np.concatenate(parts).astype(np.int8), start, np.array(count, np.int32))


def fields_of(bank: Bank) -> list[np.ndarray]:
    """The distance field [H, W] of each scenario."""
    ends = bank.field_start + bank.field_shape.prod(1)
    flat = zip(bank.field_start, ends, bank.field_shape, strict=True)
    return [bank.field[start:end].reshape(shape) for start, end, shape in flat]


def tidy(values: np.ndarray, present: np.ndarray) -> np.ndarray:
    """`values` [S, T, N, ...] with zeros where they are not finite and no object is present."""
    return np.where(present[..., None] | np.isfinite(values), values, 0.0)


def prolong(route: np.ndarray) -> np.ndarray:
    """Routes [S, A, R, 3] -> [S, A, 3, BEHIND + R + AHEAD], going straight on at both ends."""

    def straight(point: np.ndarray, distance: np.ndarray) -> np.ndarray:
        x, y, heading = (point[..., None, i] for i in range(3))
        columns = [x + distance * np.cos(heading), y + distance * np.sin(heading), heading + 0.0 * distance]
        return np.stack(columns, -1)

    before = straight(route[:, :, 0], -ROUTE_SPACING * np.arange(BEHIND, 0, -1))
    after = straight(route[:, :, -1], ROUTE_SPACING * np.arange(1, AHEAD + 1))
    return np.ascontiguousarray(np.moveaxis(np.concatenate([before, route, after], 2), 3, 2), np.float32)


def top_speed(bank: Bank, agents: int) -> np.ndarray:
    """The speed that IDM drivers desire [S, A], m/s: a tenth above the log's fastest half second, 0 if it stood."""
    s = bank.expert_s[:, :agents]
    span = min(5, s.shape[2] - 1)
    fastest = np.max(s[..., span:] - s[..., :-span], axis=-1) / (span * bank.dt[:, None])
    return np.where(bank.route_length[:, :agents] < 0.5, 0.0, np.maximum(1.1 * fastest, 3.0)).astype(np.float32)


def follow(bank: Bank, travelled: np.ndarray, driven: np.ndarray) -> Paths:
    """The paths of all agents of a bank, given the arc lengths [S, T, N] at which the log has them."""
    length = travelled[:, -1]
    speed = np.where(bank.present, np.hypot(bank.velocity[..., 0], bank.velocity[..., 1]), 0.0)
    cruise = speed.max(1)
    last = bank.present.shape[1] - 1 - np.argmax(bank.present[:, ::-1], axis=1)
    leaves = np.take_along_axis(speed, last[:, None], 1)[:, 0] > 1.0
    reactive = (bank.kind == VEHICLE) & (length >= MOVES) & ~driven
    knows = np.isfinite(bank.onward).all((2, 3))
    place = np.take_along_axis(bank.pose, last[:, None, :, None], 1)[:, 0, :, :2]
    near = np.hypot(*np.moveaxis(np.nan_to_num(bank.onward[:, :, 0]) - place, -1, 0)) < 2.0 * ONWARD_SPACING
    onward = leaves & knows & near  # a scenario that was cut short ends elsewhere
    end = length + np.where(leaves, np.where(onward, ONWARD * ONWARD_SPACING, EXTENSION), 0.0)
    count = int(np.ceil(end[reactive].max(initial=0.0) / PATH_SPACING)) + 1 + PATH_WINDOW
    points = np.zeros((*bank.kind.shape, 3, count), np.float32)
    at = PATH_SPACING * np.arange(count)
    for i, n in zip(*np.nonzero(reactive), strict=True):
        s = travelled[i, :, n]
        knots = np.nonzero(bank.present[i, :, n])[0]
        knots = knots[np.r_[True, np.diff(s[knots]) > 0]]
        line, s = bank.pose[i, knots, n].astype(np.float64), s[knots].astype(np.float64)
        if onward[i, n]:
            line, s = prolonged(line, s, bank.onward[i, n])
        x, y, heading = line.T
        further = np.maximum(at - s[-1], 0.0)
        points[i, n, 0] = np.interp(at, s, x) + further * np.cos(heading[-1])
        points[i, n, 1] = np.interp(at, s, y) + further * np.sin(heading[-1])
        points[i, n, 2] = np.interp(at, s, np.unwrap(heading))
    counts = np.where(reactive, np.ceil(end / PATH_SPACING).astype(int) + 1 + PATH_WINDOW, 0)
    lines = lay(points, counts, 1 + PATH_WINDOW)
    first = np.take_along_axis(speed, bank.present.argmax(1)[:, None], 1)[:, 0]
    end, cruise, gone, first = (x.astype(np.float32) for x in (end, cruise, np.where(leaves, length, 0.0), first))
    return Paths(lines, end, cruise, reactive, gone, last.astype(np.int16), first)


def prolonged(line: np.ndarray, s: np.ndarray, onward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A logged way [K, 3] and its arc lengths [K], with the points [ONWARD, 2] at which it goes on."""
    steps = np.diff(np.concatenate([line[-1:, :2], onward]), axis=0)
    more = np.concatenate([onward, np.arctan2(steps[:, 1], steps[:, 0])[:, None]], -1)
    return np.concatenate([line, more]), np.concatenate([s, s[-1] + np.cumsum(np.hypot(*steps.T))])


def walls(bank: Bank, travelled: np.ndarray) -> np.ndarray:
    """The arc length [S, T, N] that an agent may not pass yet: where its log waits now, or waits next.

    A log waits where it stands below half a metre a second. NOWHERE where it does not wait any more.
    """
    waits = bank.present & (np.hypot(bank.velocity[..., 0], bank.velocity[..., 1]) < 0.5)
    places = np.where(waits, travelled, NOWHERE).astype(np.float32)
    return np.minimum.accumulate(places[:, ::-1], axis=1)[:, ::-1]


def slice_at(tables: DeviceBank, scenario: jax.Array, t: jax.Array) -> jax.Array:
    """float32 [C + 1, N]: all objects' logged motion at step t, at most the last one: x, y, heading, velocity x and y,
    present (0 or 1), and with reactive traffic arc length and wall."""
    zero = jnp.zeros_like(t)
    size = (1, *tables.motion.shape[1:])
    return _decode(tables, scenario, lax.dynamic_slice(tables.motion, (_row(tables, scenario, t), zero, zero), size)[0])


def logged_at(tables: DeviceBank, scenario: jax.Array, t: jax.Array, objects: jax.Array) -> jax.Array:
    """float32 [6, M]: the first rows of `slice_at` for `objects` [M] alone, each at a step of its own if `t` is [M]."""
    return _decode(tables, scenario, tables.motion[_row(tables, scenario, t), :5, objects].T)


def _row(tables: DeviceBank, scenario: jax.Array, t: jax.Array) -> jax.Array:
    return tables.start[scenario] + jnp.clip(t, 0, tables.steps[scenario] - 1)


def _decode(tables: DeviceBank, scenario: jax.Array, units: jax.Array) -> jax.Array:
    metre, speed, arc = (tables.scale[scenario, i] for i in range(3))
    scales = (metre, metre, TURN, speed, speed, arc, arc)
    values = [row.astype(jnp.float32) * scale for row, scale in zip(units, scales[: units.shape[0]], strict=True)]
    present = units[3] != NOTHING
    values[3] = jnp.where(present, values[3], 0.0)
    if len(values) == 7:
        values[6] = jnp.where(units[6] == MOST, NOWHERE, values[6])
    return jnp.stack([*values[:5], present.astype(jnp.float32), *values[5:]])


def field(tables: DeviceBank, scenario: jax.Array) -> Field:
    """The distance field of a scenario."""
    start, shape, origin = tables.field_start[scenario], tables.field_shape[scenario], tables.field_origin[scenario]
    return Field(tables.cells, tables.tiles, start, shape, origin)


def lights_at(tables: DeviceBank, scenario: jax.Array, t: jax.Array, agent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lights of an agent's route: arc lengths of their stop lines, float32 [L], inf where there is none, and
    their states at step t, int8 [L]."""
    lights = tables.lights
    row = lights.start[scenario] + jnp.clip(t, 0, tables.steps[scenario] - 1) * lights.courses[scenario]
    return lights.s[scenario, agent], lights.states[row + lights.course[scenario, agent].astype(jnp.int32)]


def window(
    tables: DeviceBank, scenario: jax.Array, agent: jax.Array, s: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """-> points [3, BEHIND + size] of a route around arc length `s`, and the index of the first (-BEHIND at s = 0)."""
    last = tables.routes.count[scenario, agent] - BEHIND - size
    cursor = jnp.clip(jnp.floor(s / ROUTE_SPACING).astype(jnp.int32), 0, jnp.maximum(last, 0))
    return stretch(tables.routes, scenario, agent, cursor, BEHIND + size), cursor - BEHIND


def stretch(lines: Lines, scenario: jax.Array, line: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """float32 [3, size]: x, y, heading of a line's points from `first` on."""
    start = lines.start[scenario, line] + first
    units = lax.dynamic_slice(lines.points, (jnp.zeros_like(start), start), (3, size)).astype(jnp.float32)
    metre = lines.scale[scenario]
    return jnp.stack([units[0] * metre, units[1] * metre, units[2] * TURN])


def place_on(tables: DeviceBank, scenario: jax.Array, agent: jax.Array, s: jax.Array) -> jax.Array:
    """float32 [3]: x, y, heading of a route at arc length `s` >= 0."""
    points, first = window(tables, scenario, agent, s, 2)
    return jnp.stack(ahead_of(points, first, s, np.zeros(1, np.int64)))[:, 0]


def ahead_of(
    points: Array, first: jax.Array, s: jax.Array, offsets: np.ndarray
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, y, heading [M] of a window's route at arc lengths `s` + `offsets` (whole metres, at most AHEAD - 2)."""
    place = s / ROUTE_SPACING - first.astype(jnp.float32) - BEHIND
    part = jnp.clip(place, 0.0, 1.0)
    low, high = points[:, BEHIND + offsets], points[:, BEHIND + 1 + offsets]
    step = high - low
    return low[0] + part * step[0], low[1] + part * step[1], low[2] + part * wrap(step[2])


def scale_for(values: np.ndarray) -> np.ndarray:
    """float32 [S]: the scale at which all of `values` [S, ...] fit; FINEST where they are small."""
    largest = np.abs(values.reshape(len(values), -1)).max(1, initial=0.0)
    return np.maximum(largest.astype(np.float64) / MOST, FINEST).astype(np.float32)


def encode(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """int16: `values` as multiples of `scale`, which broadcasts against them; never NOTHING."""
    return np.clip(np.rint(values / scale.astype(np.float64)), -MOST, MOST).astype(np.int16)


def encode_angle(angle: np.ndarray) -> np.ndarray:
    """int16: angles, rad, of any number of turns."""
    units = np.rint(np.asarray(angle, np.float64) / (2.0 * np.pi) * 65536.0)
    return (np.mod(units + 32768.0, 65536.0) - 32768.0).astype(np.int16)


# ------------------------------------------------------------------------------------------------ room of chunks

Room = Mapping[str, int]
"""Length of each array of `FLAT`."""


def needs(
    sizes: Mapping[str, np.ndarray],
    extents: Mapping[str, np.ndarray],
    *,
    agents: int,
    horizon: int | None,
    reactive: bool,
) -> dict[str, tuple[int, np.ndarray]]:
    """Upper bounds of each array of `FLAT`: what all scenarios of a chunk share, and what each adds, int64 [scenarios].

    Scenarios have shapes `sizes` (letters as of `shard.LETTERS`) and `Extents` `extents`, int64 [scenarios] all, and
    are cut to `agents` controlled agents and `horizon` steps, to any number of objects. Exact, but for routes where
    some agents are cut, for lights where steps or agents are, and for paths: those count as if no object were
    controlled and all went on past the log's end.
    """
    steps = np.minimum(sizes["T"], horizon or np.iinfo(np.int64).max)
    driven = np.minimum(extents["routes"], agents)
    points = np.minimum(extents["points"], driven * sizes["R"])
    rows, columns = (-(-(sizes[side] - 1) // distance_field.TILE) for side in "HW")
    room = {
        ".motion": (0, steps),
        ".routes.points": (BEHIND + 1 + AHEAD, points + driven * (BEHIND + AHEAD)),
        ".lights.states": (0, steps * extents["courses"]),
        ".cells": (2 * distance_field.COARSE, extents["cells"]),
        ".tiles": (0, np.where(np.minimum(sizes["H"], sizes["W"]) < 2, 0, rows * columns)),
        ".map.place": (1, sizes["M"]),
        ".map.shape": (1, sizes["M"]),
        ".map.lane": (1, extents["lanes"]),
        ".map.directory": (1, np.where(sizes["B"] > 0, sizes["Y"] * sizes["X"], 0)),
        ".map.points": (1, sizes["B"]),
        ".map.lanes": (FINE * FINE, sizes["B"] * FINE * FINE),
    }
    if reactive:
        # of each way: what is left of a metre and of a step, where it goes on to, both ends, and the window
        beyond = np.ceil(max(ONWARD * ONWARD_SPACING, EXTENSION) / PATH_SPACING).astype(np.int64) + 2 + PATH_WINDOW
        ways = np.ceil(extents["way"] / PATH_SPACING).astype(np.int64)
        room[".paths.lines.points"] = (1 + PATH_WINDOW, ways + extents["movers"] * beyond)
    return room


def lengths(host: DeviceBank) -> dict[str, int]:
    """Lengths of the flat arrays of some tables."""
    leaves = ((jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(host))
    return {name: leaf.shape[FLAT[name]] for name, leaf in leaves if name in FLAT}


def padded(host: DeviceBank, room: Room) -> DeviceBank:
    """The tables with zeros where there is room behind the last scenario. ValueError where there is too little."""

    def pad(path: Any, leaf: np.ndarray) -> np.ndarray:
        name = jax.tree_util.keystr(path)
        if name not in FLAT:
            return leaf
        long = leaf.shape[FLAT[name]]
        if long > room[name]:
            raise ValueError(
                f"{name} has {long} places; by the index of the shards it should have {room[name]} at most: "
                "convert the logs again"
            )
        widths = [(0, 0)] * leaf.ndim
        widths[FLAT[name]] = (0, room[name] - long)
        return np.pad(leaf, widths)

    longer: DeviceBank = jax.tree_util.tree_map_with_path(pad, host)
    return longer
