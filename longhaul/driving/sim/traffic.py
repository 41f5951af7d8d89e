"""Objects of a world and their positions: replayed logs, vehicles that react, and the agents that are driven.

Reactive vehicles keep to their logged way, go on along the lanes where it ends, and choose their speed by the
Intelligent Driver Model (`idm`). A leader is whatever stands in the corridor ahead, with its present pose. Three things
stand in for what a log does not tell: a vehicle slows for the bends of its way; it does not pass a place where its log
waits, now or next (mostly at a red light), before its log leaves it; and it gives way to objects that will cross its
corridor within `HORIZON` seconds and will be there first.

A reactive vehicle appears at the step and place at which the log sees it first, or as soon as that place is free; it
is gone when the log has lost it and it has come as far as there. One that the log lost while it stood is gone then:
mostly it goes on under another name.

When tracks enter that replay their log and begin in the middle of an episode, is told by `insertion`.

With `drift`, every object that is not driven keeps the velocity that it has when the log sees it first.

`Partners` say, as data of one world, what drives the agents beside the ego: one compiled program plays all kinds.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.datasets.log import VEHICLE
from longhaul.driving.scenario.bank import STIR
from longhaul.driving.sim.device_bank import PATH_SPACING, PATH_WINDOW, DeviceBank, Paths, logged_at, slice_at, stretch
from longhaul.driving.sim.dynamics import MAX_ACCELERATION, Motion, travel
from longhaul.driving.sim.geometry import FREE, into, wrap
from longhaul.driving.sim.idm import ACCELERATION, STANDSTILL, acceleration, bend_speed, interaction

MARGIN = 0.2  # m, kept beside a corridor
TOUCH = -0.1  # m, likewise of what stands replayed: the log came past it
HORIZON = 3.0  # s ahead in which crossing traffic counts
SLANT = 0.3  # sine of the angle from which on ways cross
PATIENCE = 1.5  # s by which others may come later and still go before a standing vehicle
STILL = 0.3  # m/s, below which a log's velocity is noise
STRIDE = 2  # every second point of a path is examined
OUTSIDE = -1.0  # m, as arc length: not in the world yet
S_UNIT, SPEED_UNIT, SPEED_BITS = np.float32(2e-3), np.float32(1e-2), 12  # m, m/s
NOT_YET = np.uint32(0xFFFFFFFF)
"""Packing of the numbers of `Reactive`: a world of 64 vehicles and agents is 4 kB. Half a unit of speed is lost: IDM's
last 0.05 m/s^2 at steps of 0.1 s."""


class Scene(NamedTuple):
    """Everybody of one world at one time, each [N]."""

    x: jax.Array  # m, of the centre
    y: jax.Array  # m
    heading: jax.Array  # rad
    cos: jax.Array  # of the heading
    sin: jax.Array
    vx: jax.Array  # m/s
    vy: jax.Array  # m/s
    half_length: jax.Array  # m
    half_width: jax.Array  # m
    kind: jax.Array  # float32: log.VEHICLE ...
    present: jax.Array  # bool
    slot: jax.Array  # int32: index among the controlled agents, or -1


class Reactive(NamedTuple):
    """Positions of the reactive vehicles on their ways; means nothing for the others. Made by `reacting`."""

    word: jax.Array  # uint32 [N]: 20 bits of S_UNIT, 12 bits of SPEED_UNIT; NOT_YET before they appear

    @property
    def s(self) -> jax.Array:
        """float32 [N], m; OUTSIDE before they appear."""
        return jnp.where(self.word == NOT_YET, OUTSIDE, (self.word >> SPEED_BITS).astype(np.float32) * S_UNIT)

    @property
    def speed(self) -> jax.Array:
        """float32 [N], m/s; 0 before they appear."""
        units = (self.word & np.uint32((1 << SPEED_BITS) - 1)).astype(np.float32)
        return jnp.where(self.word == NOT_YET, 0.0, units * SPEED_UNIT)


DRIVEN, REACTING, REPLAYED, DRIFTING = range(4)
"""Kinds of `Partners`. DRIVEN: the policy drives all slots. Else the slots that it does not drive, and all objects
without a slot, react by IDM (REACTING), replay the log (REPLAYED) or keep their velocity (DRIFTING)."""


class Partners(NamedTuple):
    """Drivers of the others of one world, and how those drive that react. Tables need paths for all but the ego if any
    do."""

    kind: jax.Array  # int32 scalar
    driven: jax.Array  # bool [A]: the agents that the policy drives; the others are of `kind`
    pace: jax.Array  # of the logged speed, that a reactive vehicle strives for
    headway: jax.Array  # of IDM's
    yields: jax.Array  # bool: it gives way to crossing objects
    checked: jax.Array  # bool: `Config.safety` holds for all that are driven, not for the ego alone

    def of(self, kind: int) -> jax.Array:
        """bool scalar."""
        return self.kind == kind


def reacting(s: jax.Array, speed: jax.Array) -> Reactive:
    """Vehicles at arc lengths `s` [N], OUTSIDE where they have not appeared, with `speed` [N]. Both stop at the ends of
    their bits: 2.1 km and 41 m/s."""
    ways = jnp.clip(jnp.round(s * np.float32(1.0 / S_UNIT)), 0.0, (1 << 32 - SPEED_BITS) - 2.0).astype(jnp.uint32)
    paces = jnp.clip(jnp.round(speed * np.float32(1.0 / SPEED_UNIT)), 0.0, (1 << SPEED_BITS) - 1.0).astype(jnp.uint32)
    return Reactive(jnp.where(s < 0.0, NOT_YET, (ways << SPEED_BITS) | paces))


def scene_at(
    tables: DeviceBank,
    scenario: jax.Array,
    t: jax.Array,
    motion: Motion,
    present_agents: jax.Array,
    reactive: Reactive | None,
    drift: bool = False,
    partners: Partners | None = None,
    inserted: jax.Array | None = None,
) -> Scene:
    """Scene at step t, with the controlled agents at `motion` [A] where `present_agents` [A] says so, and nowhere else.
    With partners, those are the agents that the policy drives. Of all others those are absent that are not `inserted`
    [N] yet; None: nobody waits."""
    logged, body = slice_at(tables, scenario, t), tables.body[scenario]
    x, y, heading, vx, vy, present = (logged[i] for i in range(6))
    slot = body[3].astype(jnp.int32)
    if partners is not None:
        slot = jnp.where(partners.driven[jnp.maximum(slot, 0)], slot, -1)
        drifts, drifting = partners.of(DRIFTING), adrift(tables, scenario, t)
        x, y, heading, vx, vy = (jnp.where(drifts, a, b) for a, b in zip(drifting, (x, y, heading, vx, vy)))
    if drift:
        x, y, heading, vx, vy = adrift(tables, scenario, t)
    if reactive is not None and tables.paths is not None:
        path_x, path_y, path_heading = on_path(tables.paths, scenario, reactive.s)
        react = reacts(tables, scenario, partners)
        x, y = jnp.where(react, path_x, x), jnp.where(react, path_y, y)
        heading = jnp.where(react, path_heading, heading)
        vx = jnp.where(react, reactive.speed * jnp.cos(path_heading), vx)
        vy = jnp.where(react, reactive.speed * jnp.sin(path_heading), vy)
        present = jnp.where(react, inside(tables.paths, scenario, t, reactive), present)
    driven, present = slot >= 0, present > 0.5
    if inserted is not None:
        present = present & inserted

    def put(agents: jax.Array, others: jax.Array) -> jax.Array:
        of_agents = jnp.broadcast_to(agents, slot.shape) if agents.shape[0] == 1 else agents[jnp.maximum(slot, 0)]
        return jnp.where(driven, of_agents, others)

    heading = put(motion.heading, heading)
    return Scene(
        x=put(motion.x, x),
        y=put(motion.y, y),
        heading=heading,
        cos=jnp.cos(heading),
        sin=jnp.sin(heading),
        vx=put(motion.speed * jnp.cos(motion.heading), vx),
        vy=put(motion.speed * jnp.sin(motion.heading), vy),
        half_length=body[0],
        half_width=body[1],
        kind=body[2],
        present=put(present_agents, present),
        slot=slot,
    )


def reacts(tables: DeviceBank, scenario: jax.Array, partners: Partners | None = None) -> jax.Array:
    """bool [N]: which objects are vehicles that react. The tables have paths."""
    assert tables.paths is not None
    reactive: jax.Array = tables.paths.reactive[scenario]
    return reactive if partners is None else reactive & partners.of(REACTING)


def adrift(tables: DeviceBank, scenario: jax.Array, t: jax.Array) -> tuple[jax.Array, ...]:
    """x, y, heading, velocity x and y [N] of all objects if each keeps the velocity of its first logged step."""
    first = tables.first[scenario].astype(jnp.int32)
    x, y, heading, vx, vy, _ = logged_at(tables, scenario, first, jnp.arange(len(first), dtype=jnp.int32))
    moves = jnp.hypot(vx, vy) > STILL
    vx, vy = jnp.where(moves, vx, 0.0), jnp.where(moves, vy, 0.0)
    steps = jnp.minimum(t, tables.steps[scenario] - 1) - first
    time = tables.dt[scenario] * jnp.maximum(steps, 0).astype(jnp.float32)
    return x + time * vx, y + time * vy, heading, vx, vy


def inside(paths: Paths, scenario: jax.Array, t: jax.Array, state: Reactive) -> jax.Array:
    """float32 [N], 0 or 1: which reactive vehicles are in the world at step t."""
    left = (t > paths.last[scenario]) & (state.s > paths.gone[scenario] - STIR)
    return ((state.s >= 0.0) & ~left).astype(jnp.float32)


def on_path(paths: Paths, scenario: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, y, heading [N] at arc lengths `s` [N], m, of all objects' logged paths."""
    place = jnp.maximum(s, 0.0) / PATH_SPACING
    index = jnp.clip(place.astype(jnp.int32), 0, paths.lines.count[scenario] - 2)
    part = place - index.astype(jnp.float32)
    ends = read(paths, scenario, index, 2)
    low, high = ends[:, :, 0], ends[:, :, 1]
    step = high - low
    return low[:, 0] + part * step[:, 0], low[:, 1] + part * step[:, 1], low[:, 2] + part * wrap(step[:, 2])


def read(paths: Paths, scenario: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """float32 [N, 3, size]: points (x, y, heading) of all objects' paths from `index` [N] on."""

    def one(n: jax.Array, i: jax.Array) -> jax.Array:
        return stretch(paths.lines, scenario, n, i, size)

    return jax.vmap(one)(jnp.arange(index.shape[0], dtype=jnp.int32), index)


def begin(tables: DeviceBank, scenario: jax.Array) -> Reactive | None:
    """Reactive vehicles [N] as the log has them at its first step; None where no object reacts."""
    if tables.paths is None:
        return None
    logged = slice_at(tables, scenario, jnp.zeros_like(scenario))
    present = logged[5] > 0.5
    return reacting(jnp.where(present, logged[6], OUTSIDE), jnp.hypot(logged[3], logged[4]))


def react(
    tables: DeviceBank, scenario: jax.Array, t: jax.Array, scene: Scene, state: Reactive,
    partners: Partners | None = None,
) -> Reactive:  # fmt: skip
    """Reactive vehicles [N] one step on, from step `t` (int32 scalar), whose objects are in `scene`."""
    paths = tables.paths
    assert paths is not None
    acceleration = respond(paths, scenario, scene, state, partners)
    after = slice_at(tables, scenario, t + 1)
    # a vehicle that is past the place where its log waits has nothing more to wait for
    wall = jnp.where(state.s <= after[7] + STIR, after[7], paths.end[scenario])
    wall = jnp.minimum(wall, paths.end[scenario]) - state.s + STANDSTILL  # vehicles rest STANDSTILL before it
    stop = ACCELERATION * (1.0 - interaction(state.speed, wall, jnp.zeros_like(wall)))
    acceleration = jnp.maximum(jnp.minimum(acceleration, stop), -MAX_ACCELERATION)
    distance, speed = travel(state.speed, acceleration, tables.dt[scenario])
    waits = state.word == NOT_YET
    appears = waits & (t + 1 >= tables.first[scenario]) & free_entrance(paths, scenario, scene)
    return reacting(
        jnp.where(waits, jnp.where(appears, 0.0, OUTSIDE), jnp.minimum(state.s + distance, paths.end[scenario])),
        jnp.where(waits, jnp.where(appears, paths.begin[scenario], 0.0), speed),
    )


def free_entrance(paths: Paths, scenario: jax.Array, scene: Scene) -> jax.Array:
    """bool [N]: no object stands where a vehicle's path begins."""
    x, y, heading = on_path(paths, scenario, jnp.zeros_like(scene.x))
    cos, sin = jnp.cos(heading)[:, None], jnp.sin(heading)[:, None]
    u, v = into(scene.x[None, :] - x[:, None], scene.y[None, :] - y[:, None], cos, sin)
    turn_cos, turn_sin = into(scene.cos[None, :], scene.sin[None, :], cos, sin)
    c, s = jnp.abs(turn_cos), jnp.abs(turn_sin)
    length, width = scene.half_length[None, :], scene.half_width[None, :]
    long = scene.half_length[:, None] + length * c + width * s + STANDSTILL
    wide = scene.half_width[:, None] + length * s + width * c + MARGIN
    return ~jnp.any(scene.present[None, :] & (jnp.abs(u) < long) & (jnp.abs(v) < wide), axis=1)


def respond(
    paths: Paths, scenario: jax.Array, scene: Scene, state: Reactive, partners: Partners | None = None
) -> jax.Array:
    """IDM's acceleration [N], m/s^2, of every vehicle because of objects in its corridor, objects that will cross it,
    and the bends of its path."""
    index = jnp.clip((state.s / PATH_SPACING).astype(jnp.int32), 0, paths.lines.count[scenario] - PATH_WINDOW)
    points = read(paths, scenario, index, PATH_WINDOW)
    offset = PATH_SPACING * np.arange(PATH_WINDOW, dtype=np.float32)
    along = (PATH_SPACING * index.astype(jnp.float32) - state.s)[:, None] + offset[None, ::STRIDE]
    speed, length, width = state.speed[:, None], scene.half_length[:, None], scene.half_width[:, None]
    pace = jnp.hypot(scene.vx, scene.vy)
    moves = paths.reactive[scenario]
    stands = ~moves & (scene.slot < 0) & (pace < STILL)
    margin = width + jnp.where(stands, TOUCH, MARGIN)[None, :]
    conflicts = survey(points[:, :, ::STRIDE], along, scene, pace, margin)
    others = scene.present[None, :] & ~np.eye(scene.x.shape[0], dtype=bool)
    theirs = scene.vx[None, :] * scene.cos[:, None] + scene.vy[None, :] * scene.sin[:, None]
    headway = 1.0 if partners is None else partners.headway
    cost = interaction(speed, conflicts.near - length, jnp.maximum(theirs, 0.0), headway)
    cost = jnp.where(conflicts.near < FREE, cost, 0.0)
    gap = conflicts.crossing - length - scene.half_width[None, :] - MARGIN
    yields = gives_way(conflicts, scene, state.speed, pace, gap)
    if partners is not None:
        yields = yields & partners.yields
    cost = jnp.maximum(cost, jnp.where(yields, interaction(speed, gap, jnp.zeros_like(gap)), 0.0))
    hindrance = jnp.max(jnp.where(others, cost, 0.0), axis=1)
    bend = bend_speed(points[:, 2], PATH_SPACING, offset)
    cruise = paths.cruise[scenario] * (1.0 if partners is None else partners.pace)
    return acceleration(state.speed, jnp.minimum(cruise, bend), hindrance)


class Survey(NamedTuple):
    """Places on each of N paths because of each of N other objects, m ahead of the path's vehicle, or FREE."""

    near: jax.Array  # [N, N]: where the other stands in the corridor
    crossing: jax.Array  # [N, N]: where it will cross the corridor
    away: jax.Array  # [N, N]: how far the other has to go to there


def survey(points: jax.Array, along: jax.Array, scene: Scene, pace: jax.Array, margin: jax.Array) -> Survey:
    """Survey of N paths of M points [N, 3, M], which lie `along` [N, M] metres ahead.

    Of each path it finds two points because of each other object: the first in its box, enlarged by PATH_SPACING and
    `margin` [N, N]; and the first in the band that it sweeps in HORIZON seconds at its `pace` [N], m/s, unless the two
    are almost parallel. Unrolled as `geometry.blocked` is, with one look at every point.
    """
    cos, sin = scene.cos[None, :], scene.sin[None, :]
    own_u, own_v = into(scene.x[None, :], scene.y[None, :], cos, sin)
    long, wide = scene.half_length[None, :] + PATH_SPACING, scene.half_width[None, :] + margin
    reach = scene.half_length[None, :] + HORIZON * pace[None, :]
    way_cos, way_sin = jnp.cos(points[:, 2]), jnp.sin(points[:, 2])
    near = crossing = away = jnp.full(margin.shape, FREE)
    for j in reversed(range(along.shape[-1])):
        at = along[:, j, None]
        u, v = into(points[:, 0, j, None], points[:, 1, j, None], cos, sin)
        u = u - own_u
        within = (jnp.abs(v - own_v) <= wide) & (at > 0.0)
        near = jnp.where(within & (jnp.abs(u) <= long), at, near)
        slant = jnp.abs(way_sin[:, j, None] * cos - way_cos[:, j, None] * sin)
        sweeps = within & (u > 0.0) & (u <= reach) & (slant > SLANT)
        crossing, away = jnp.where(sweeps, at, crossing), jnp.where(sweeps, u, away)
    return Survey(near, crossing, away)


def gives_way(conflicts: Survey, scene: Scene, speed: jax.Array, pace: jax.Array, gap: jax.Array) -> jax.Array:
    """bool [N, N]: a vehicle lets another object cross its corridor, `gap` [N, N] metres ahead.

    It does so where both would be there at one time and the other first; pedestrians and cyclists always go first. A
    standing vehicle also lets those pass who would come a little later. It does not stop where it no longer can, nor
    within the crossing.
    """
    length, width = scene.half_length, scene.half_width
    own_speed, other_speed = jnp.maximum(speed, 2.0)[:, None], jnp.maximum(pace, STILL)[None, :]
    far = length[:, None] + width[None, :]
    begin, end = jnp.maximum(conflicts.crossing - far, 0.0) / own_speed, (conflicts.crossing + far) / own_speed
    far = length[None, :] + width[:, None]
    enters, leaves = jnp.maximum(conflicts.away - far, 0.0) / other_speed, (conflicts.away + far) / other_speed
    meet = (enters < end + 0.5) & (begin < leaves + 0.5)
    patience = jnp.where(speed < 1.0, PATIENCE, 0.0)[:, None]
    first = (enters < begin + patience) | (scene.kind != VEHICLE)[None, :]
    stops = (gap > 0.0) & (jnp.square(speed)[:, None] < 2.0 * MAX_ACCELERATION * gap)
    return (conflicts.crossing < FREE) & (pace > 2.0 * STILL)[None, :] & meet & first & stops
