"""A bank laid out for the simulator's gathers, on its device.

One step of one world reads one slice of everybody's motion, two windows of each route, and a few dozen cells of the
distance field. So what is read together lies together, agents or points last, where arithmetic runs along them.
Routes get points before their beginning and after their end, that no window has to be cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.datasets.log import VEHICLE
from longhaul.driving.bank import Bank
from longhaul.driving.geometry import Field, wrap
from longhaul.driving.scenario import ROUTE_SPACING

Array = Any  # numpy.ndarray while tables are made, jax.Array then

BEHIND = 4
"""Points of a route before its beginning, and of a window behind its cursor."""

AHEAD = 60
"""Points of a window from its cursor on."""

PATH_SPACING = 2.0
"""Metres between two points of the path that a reactive vehicle follows."""

NOWHERE = 1e6
"""An arc length, m, that nobody reaches."""

PATH_WINDOW = 24
"""Points of such a path that are read at once."""

STIR = 0.5
"""A logged vehicle that moves by less than this, m, stands still: trackers jitter."""

EXTENSION = 30.0
"""Metres that the path of a vehicle still under way at its last logged step goes straight on."""


class Paths(NamedTuple):
    """The logged ways of vehicles that react, by arc length."""

    points: Array  # float32 [S, N, 3, P]: x, y, heading; PATH_SPACING apart
    end: Array  # float32 [S, N]: arc length at which it has to stop
    cruise: Array  # float32 [S, N]: the highest logged speed
    reactive: Array  # bool [S, N]: whether it reacts; the others are replayed


class Tables(NamedTuple):
    """A bank on the device. C is 6, or 8 with reactive traffic."""

    motion: Array  # float32 [S, T, C, N]: x, y, heading, velocity x and y, present, (arc length, wall)
    body: Array  # float32 [S, 4, N]: half length, half width, kind, slot among the controlled or -1
    steps: Array  # int32 [S]
    dt: Array  # float32 [S]
    controlled: Array  # int32 [S, A]
    route: Array  # float32 [S, A, 3, BEHIND + R + AHEAD]
    route_length: Array  # float32 [S, A]
    start_s: Array  # float32 [S, A]: arc length at which the agent begins
    desired: Array  # float32 [S, A]: the speed that an IDM driver strives for
    light_s: Array  # float32 [S, A, L]
    light_state: Array  # int8 [S, T, A, L]
    cells: Array  # int16, the distance fields
    field_start: Array  # int32 [S]
    field_shape: Array  # int32 [S, 2]
    field_origin: Array  # float32 [S, 2]
    paths: Paths | None

    @property
    def scenarios(self) -> int:
        return self.steps.shape[0]


def tabulate(bank: Bank, agents: int, reactive: bool) -> Tables:
    """The tables of a bank of NumPy arrays, for its first `agents` controlled agents, with `Paths` if others react."""
    bank = bank._replace(pose=tidy(bank.pose, bank.present), velocity=tidy(bank.velocity, bank.present))
    controlled = bank.controlled[:, :agents].astype(np.int32)
    slot = np.full(bank.kind.shape, -1, np.int32)
    scenario, agent = np.nonzero(controlled >= 0)
    slot[scenario, controlled[scenario, agent]] = agent
    channels = [bank.pose[..., 0], bank.pose[..., 1], bank.pose[..., 2], bank.velocity[..., 0], bank.velocity[..., 1]]
    channels.append(bank.present.astype(np.float32))
    paths = None
    if reactive:
        travelled = arc_lengths(bank.pose, bank.present)
        paths = follow(bank, travelled, slot >= 0)
        channels += [travelled, walls(bank, travelled)]
    half = 0.5 * bank.size
    host = Tables(
        motion=np.stack(channels, 2).astype(np.float32),
        body=np.stack([half[..., 0], half[..., 1], bank.kind, slot], 1).astype(np.float32),
        steps=bank.steps.astype(np.int32),
        dt=bank.dt.astype(np.float32),
        controlled=controlled,
        route=prolong(bank.route[:, :agents]),
        route_length=bank.route_length[:, :agents].astype(np.float32),
        start_s=bank.expert_s[:, :agents, 0].astype(np.float32),
        desired=top_speed(bank, agents),
        light_s=bank.light_s[:, :agents].astype(np.float32),
        light_state=np.ascontiguousarray(np.moveaxis(bank.light_state[:, :agents], 3, 1)),
        cells=bank.field,
        field_start=bank.field_start.astype(np.int32),
        field_shape=bank.field_shape.astype(np.int32),
        field_origin=bank.field_origin.astype(np.float32),
        paths=paths,
    )
    return jax.tree.map(jnp.asarray, host)


def tidy(values: np.ndarray, present: np.ndarray) -> np.ndarray:
    """`values` [S, T, N, ...] with zeros where they are not finite and nobody is present."""
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
    reactive = (bank.kind == VEHICLE) & (length >= 1.0) & ~driven
    end = np.where(leaves, length + EXTENSION, length)
    count = int(np.ceil(end[reactive].max(initial=0.0) / PATH_SPACING)) + 1 + PATH_WINDOW
    points = np.zeros((*bank.kind.shape, 3, count), np.float32)
    at = PATH_SPACING * np.arange(count)
    for i, n in zip(*np.nonzero(reactive), strict=True):
        s = travelled[i, :, n]
        knots = np.nonzero(bank.present[i, :, n])[0]
        knots = knots[np.r_[True, np.diff(s[knots]) > 0]]
        x, y, heading = bank.pose[i, knots, n].T.astype(np.float64)
        further = np.maximum(at - s[knots[-1]], 0.0)
        points[i, n, 0] = np.interp(at, s[knots], x) + further * np.cos(heading[-1])
        points[i, n, 1] = np.interp(at, s[knots], y) + further * np.sin(heading[-1])
        points[i, n, 2] = np.interp(at, s[knots], np.unwrap(heading))
    return Paths(points, end.astype(np.float32), cruise.astype(np.float32), reactive)


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


def walls(bank: Bank, travelled: np.ndarray) -> np.ndarray:
    """The arc length [S, T, N] that an agent may not pass yet: where its log waits now, or waits next.

    A log waits where it stands below half a metre a second. NOWHERE where it does not wait any more.
    """
    waits = bank.present & (np.hypot(bank.velocity[..., 0], bank.velocity[..., 1]) < 0.5)
    wall = np.full(travelled.shape, NOWHERE, np.float32)
    following = np.full(travelled[:, 0].shape, NOWHERE, np.float32)
    for t in range(travelled.shape[1] - 1, -1, -1):
        following = np.where(waits[:, t], travelled[:, t], following)
        wall[:, t] = following
    return wall


def field(tables: Tables, scenario: jax.Array) -> Field:
    """The distance field of a scenario."""
    return Field(
        tables.cells, tables.field_start[scenario], tables.field_shape[scenario], tables.field_origin[scenario]
    )


def window(
    tables: Tables, scenario: jax.Array, agent: jax.Array, s: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """-> points [3, BEHIND + size] of a route around arc length `s`, and the index of the first (-BEHIND at s = 0)."""
    cursor = jnp.clip(jnp.floor(s / ROUTE_SPACING).astype(jnp.int32), 0, tables.route.shape[3] - BEHIND - size)
    start = (scenario, agent, jnp.zeros_like(cursor), cursor)
    return lax.dynamic_slice(tables.route, start, (1, 1, 3, BEHIND + size))[0, 0], cursor - BEHIND


def ahead_of(
    points: Array, first: jax.Array, s: jax.Array, offsets: np.ndarray
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, y, heading [M] of a window's route at arc lengths `s` + `offsets` (whole metres, at most AHEAD - 2)."""
    place = s / ROUTE_SPACING - first.astype(jnp.float32) - BEHIND
    part = jnp.clip(place, 0.0, 1.0)
    low, high = points[:, BEHIND + offsets], points[:, BEHIND + 1 + offsets]
    step = high - low
    return low[0] + part * step[0], low[1] + part * step[1], low[2] + part * wrap(step[2])
