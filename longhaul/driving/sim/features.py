"""Every geometric quantity of a step, once: what observation, reward, termination and metrics share."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.datasets.log import CYCLIST, LANE_FREEWAY, LANE_STREET, PEDESTRIAN
from longhaul.driving.scenario.lane_graph import INFERRED, SLOWEST
from longhaul.driving.scenario.scenario import RED
from longhaul.driving.sim import device_bank
from longhaul.driving.sim.device_bank import DeviceBank
from longhaul.driving.sim.dynamics import Drive
from longhaul.driving.sim.geometry import (
    FREE,
    Relative,
    blocked,
    clearance,
    corners,
    into,
    nearest,
    out_of,
    project,
    separation,
    wrap,
)
from longhaul.driving.sim.road_lookup import HALF_WIDTH, LanesHere, lanes_at
from longhaul.driving.sim.traffic import MARGIN, Scene

STOPPED = 0.05
"""Speed, m/s, below which an object stands (nuPlan, V-Max)."""

NARROW = float(np.tan(np.deg2rad(30.0)))
"""Others are ahead, or behind, within 30 degrees of the agent's axis."""

NEAR_LANE = 5.0
"""Distance, m, to the nearest lane beyond which an agent has no relation to lanes."""

OPPOSED = -0.5
"""The cosine of the angle to a lane below which an agent drives against it: 120 degrees."""

PARALLEL = 0.8
"""The cosine, either way, from which an agent drives along a lane."""

SEPARATE = 2.0
"""Metres between the centres of two lanes that are beside each other; nearer ones lie over each other, in junctions."""


class OnLanes(NamedTuple):
    """An agent and the lanes for its kind of traffic."""

    near: jax.Array  # bool: some lane is within NEAR_LANE
    along: jax.Array  # m to the nearest lane that leads within 90 degrees of its heading; FREE without
    against: jax.Array  # bool: it is in a lane that leads against it, and in none that does not
    straddles: jax.Array  # bool: its box reaches from its lane into another beside it
    limit: jax.Array  # m/s, of the nearest lane that leads its way, else of the nearest; SLOWEST where none has one
    inferred: jax.Array  # bool: the limit is not the source's
    rule: jax.Array  # m/s: the limit by which a drive is scored: the source's, else that of the lane's kind


Pose = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""An agent's x and y, m, and the cosine and sine of its heading."""

Half = tuple[jax.Array, jax.Array]
"""Half of an agent's length and width, m."""


def time_to_contact(boxes: Relative) -> jax.Array:
    """Time to collision, s, of boxes that keep their velocities: 0 where they touch, FREE where they never will."""
    x, y, cos, sin, (length, width), (other_length, other_width), vx, vy = boxes
    c, s = jnp.abs(cos), jnp.abs(sin)
    u, v = into(x, y, cos, sin)
    du, dv = into(vx, vy, cos, sin)
    begins = jnp.zeros_like(x)
    ends = jnp.full_like(x, FREE)
    for place, speed, reach in (
        (x, vx, length + other_length * c + other_width * s),
        (y, vy, width + other_length * s + other_width * c),
        (u, du, other_length + length * c + width * s),
        (v, dv, other_width + length * s + width * c),
    ):
        away = jnp.abs(place)
        closing = jnp.where(place < 0.0, speed, -speed)
        closing = jnp.where(jnp.abs(closing) < 1e-6, 1e-6, closing)
        gap, nearer, rate = away - reach, closing > 0.0, 1.0 / closing
        begins = jnp.maximum(begins, jnp.where(gap > 0.0, jnp.where(nearer, gap * rate, FREE), 0.0))
        ends = jnp.minimum(ends, jnp.where(nearer, away + reach, gap) * rate)
    return jnp.where(begins <= ends, jnp.minimum(begins, FREE), FREE)


def front_inside(boxes: Relative) -> jax.Array:
    """bool: the front bumper, a line, meets the other's box; of the boxes' shape."""
    x, y, cos, sin, (length, width), (other_length, other_width), _, _ = boxes
    c, s = jnp.abs(cos), jnp.abs(sin)
    u, v = into(x - length, y, cos, sin)
    return (
        (jnp.abs(x - length) <= other_length * c + other_width * s)
        & (jnp.abs(y) <= width + other_length * s + other_width * c)
        & (jnp.abs(u) <= other_length + width * s)
        & (jnp.abs(v) <= other_width + width * c)
    )


def contact(
    others: Relative, seen: jax.Array, touches: jax.Array, kind: jax.Array, speed: jax.Array, straddles: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(time to collision, s, flag that a contact is its fault), scalars of an agent among others [N].

    `speed`, m/s, is the agent's own, `kind` [N] is theirs; `touches` [N] are those whose boxes overlap its own. Only
    those ahead count for the time to collision, and only while the agent moves.
    """
    moving = speed >= STOPPED
    beside = jnp.abs(others.y)
    ahead = seen & (beside <= NARROW * others.x)
    ttc = jnp.where(moving, jnp.min(jnp.where(ahead, time_to_contact(others), FREE), axis=-1), FREE)
    stands = jnp.square(others.vx + speed) + jnp.square(others.vy) < STOPPED * STOPPED
    frail = (kind == PEDESTRIAN) | (kind == CYCLIST)
    behind = beside <= -NARROW * others.x
    fault = touches & (frail | stands | front_inside(others) | (straddles & ~behind))
    return ttc, moving & jnp.any(fault, axis=-1)


def on_lanes(lanes: LanesHere, cos: jax.Array, sin: jax.Array, half: Half, kind: jax.Array) -> OnLanes:
    """Relation of an agent to the `lanes` around its centre, scalars; cyclists alone have lanes for bicycles.

    `cos` and `sin` are of its heading, `half` its half length and width, m, `kind` that of the log.
    """
    counts = (lanes.lane >= 0) & (~lanes.bike | (kind == CYCLIST))
    distance = jnp.where(counts, lanes.distance, FREE)
    turn = lanes.cos * cos + lanes.sin * sin
    across = jnp.abs(lanes.cos * sin - lanes.sin * cos)
    along = jnp.where(turn > 0.0, distance, FREE)
    nearest = jnp.argmin(along)
    known = along[nearest] <= NEAR_LANE
    limit = lanes.limit[jnp.where(known, nearest, jnp.argmin(lanes.distance))]
    within = distance <= HALF_WIDTH
    opposed = turn < OPPOSED
    reach = half[0] * across + half[1] * jnp.abs(turn)
    parallel = jnp.where(jnp.abs(turn) >= PARALLEL, distance, FREE)
    # offsets to the left of the agent, whichever way the lane leads; two lanes meet midway between their centres
    lateral = jnp.where(turn > 0.0, lanes.lateral, -lanes.lateral)
    apart = jnp.abs(lateral - lateral[jnp.argmin(parallel)])
    reaches = (parallel - reach < jnp.minimum(0.5 * apart, HALF_WIDTH)) & (apart >= SEPARATE)
    rule = jnp.where(lanes.freeway, INFERRED[LANE_FREEWAY], INFERRED[LANE_STREET]).astype(jnp.float32)
    rule = jnp.where(lanes.inferred, rule, lanes.limit)
    return OnLanes(
        near=jnp.min(distance) <= NEAR_LANE,
        along=along[nearest],
        against=jnp.any(within & opposed) & ~jnp.any(within & ~opposed),
        straddles=jnp.any(reaches),
        limit=jnp.where(limit > 0.0, limit, SLOWEST),
        inferred=known & lanes.inferred[nearest],
        rule=jnp.where(known, rule[nearest], 0.0),
    )


FAN = np.array(
    [(r * np.cos(a), r * np.sin(a)) for r in (4.0, 9.0, 17.0) for a in np.deg2rad([-90, -50, -22, 0, 22, 50, 90])]
    + [(28.0, 0.0), (42.0, 0.0), (-6.0, 0.0)],
    np.float32,
)
"""Points where the road's clearance is measured, in the agent's frame: three arcs, two points far ahead, one behind."""

CORRIDOR = np.concatenate([np.arange(1, 17), np.arange(18, device_bank.AHEAD - 1, 2)])
"""Metres ahead along the route at which the corridor is tested."""

BEYOND_LINE = 5.0
"""A stop line holds for who is within this lateral distance, m, of the route that meets it."""


class Features(NamedTuple):
    """Surroundings of one controlled agent; [N] are the others."""

    others: Relative  # [N], in its frame
    seen: jax.Array  # bool [N]: present and not the agent itself
    separation: jax.Array  # [N], m, negative where boxes overlap
    blocks: jax.Array  # [N], m ahead of the front bumper at which it stands in the corridor; FREE where it does not
    corner_clearance: jax.Array  # [4], signed distance of the corners to the road's edge, m
    fan_clearance: jax.Array  # [P], of the points of FAN
    s: jax.Array  # arc length along the route, m
    lateral: jax.Array  # offset from the route, m, left positive
    heading_error: jax.Array  # rad
    route: jax.Array  # [3, BEHIND + AHEAD], the route around s, world frame
    route_first: jax.Array  # index of its first point
    gap: jax.Array  # m from the front bumper to the nearest that blocks the corridor; FREE if none does
    leader_speed: jax.Array  # its speed along the route, m/s
    headway: jax.Array  # m from the front bumper to what it must not pass now: the leader or a red light; else FREE
    closing: jax.Array  # the speed at which it comes nearer to that, m/s
    braking: jax.Array  # the steady braking that meets it without touching, m/s^2; 0 where it does not come nearer
    light_distance: jax.Array  # m from the front bumper to the next stop line; FREE if none is ahead
    light_state: jax.Array  # int32: 0 unknown or none, 1 red, 2 yellow, 3 green
    ran_red: jax.Array  # bool: the front bumper passed a stop line in this step, red before and after
    lit: jax.Array  # bool: the state of some light of the route is known
    kind: jax.Array  # float32: of the agent, log.VEHICLE ...
    ttc: jax.Array  # s until it touches somebody ahead; FREE if it does not
    fault: jax.Array  # bool: it touches somebody, and would be at fault if the contact began now
    lanes: OnLanes


class Agent(NamedTuple):
    """One controlled agent."""

    drive: Drive
    s: jax.Array  # arc length one step ago
    slot: jax.Array  # int32
    object: jax.Array  # int32, index into N; -1 is an empty slot


class _Lights(NamedTuple):
    """Lights of an agent's route in a step."""

    distance: jax.Array  # m from the front bumper to the next stop line; FREE if none is ahead
    state: jax.Array  # int32, of the next: 0 unknown or none, 1 red, 2 yellow, 3 green
    passed_red: jax.Array  # bool: the front bumper passed a stop line, red before and after
    lit: jax.Array  # bool: the state of some light is known


def extract(tables: DeviceBank, search: int, scenario: jax.Array, t: jax.Array, scene: Scene, agent: Agent) -> Features:
    """Features of one controlled agent at step `t` (int32 scalar) of `scenario` (int32 scalar).

    Its route is searched `search` metres ahead of where it was.
    """
    own = jnp.maximum(agent.object, 0)
    half = scene.half_length[own], scene.half_width[own]
    x, y, heading, _ = agent.drive.motion
    cos, sin = jnp.cos(heading), jnp.sin(heading)
    others = relative(scene, own, half, (x, y, cos, sin))
    seen = scene.present & (scene.slot != agent.slot)
    edge = _edge_clearance(tables, scenario, half, (x, y, cos, sin))

    searched, first = device_bank.window(tables, scenario, agent.slot, agent.s, search)
    place = project(searched, first, x, y)
    route, first = device_bank.window(tables, scenario, agent.slot, place.s, device_bank.AHEAD)

    near, leader, along = _leader(device_bank.ahead_of(route, first, place.s, CORRIDOR), scene, half[1], seen)
    lights = _lights(tables, scenario, t, agent, place.s, half[0])
    heading_error = wrap(heading - place.heading)
    on_route = (jnp.abs(place.lateral) <= BEYOND_LINE) & (jnp.abs(heading_error) < np.float32(np.pi / 2))
    speed = scene.vx[own] * cos + scene.vy[own] * sin
    gap = jnp.where(near[leader] < FREE, near[leader] - half[0], FREE)
    leader_speed = scene.vx[leader] * jnp.cos(along) + scene.vy[leader] * jnp.sin(along)
    headway, closing, braking = _headway(gap, leader_speed, lights, speed)

    kind, gaps = scene.kind[own], separation(others)
    lanes = on_lanes(lanes_at(tables.map, scenario, x, y), cos, sin, half, kind)
    ttc, fault = contact(others, seen, seen & (gaps < 0.0), scene.kind, speed, lanes.straddles)
    return Features(
        others=others,
        seen=seen,
        separation=gaps,
        blocks=jnp.where(near < FREE, near - half[0], FREE),
        corner_clearance=edge[:4],
        fan_clearance=edge[4:],
        s=place.s,
        lateral=place.lateral,
        heading_error=heading_error,
        route=route,
        route_first=first,
        gap=gap,
        leader_speed=leader_speed,
        headway=headway,
        closing=closing,
        braking=braking,
        light_distance=lights.distance,
        light_state=lights.state,
        ran_red=lights.passed_red & on_route,
        lit=lights.lit,
        kind=kind,
        ttc=ttc,
        fault=fault,
        lanes=lanes,
    )


def relative(scene: Scene, own: jax.Array, half: Half, pose: Pose) -> Relative:
    """Boxes of all objects [N] in the frame of object number `own`, whose half length and width are `half`."""
    x, y, cos, sin = pose
    position = into(scene.x - x, scene.y - y, cos, sin)
    turn_cos, turn_sin = scene.cos * cos + scene.sin * sin, scene.sin * cos - scene.cos * sin
    velocity = into(scene.vx - scene.vx[own], scene.vy - scene.vy[own], cos, sin)
    return Relative(*position, turn_cos, turn_sin, half, (scene.half_length, scene.half_width), *velocity)


def _edge_clearance(tables: DeviceBank, scenario: jax.Array, half: Half, pose: Pose) -> jax.Array:
    """Signed distances to the road's edge, m, of the four corners and then of the points of FAN: [4 + P]."""
    x, y, cos, sin = pose
    corner_x, corner_y = corners(*half)
    ahead, left = jnp.concatenate([corner_x, FAN[:, 0]]), jnp.concatenate([corner_y, FAN[:, 1]])
    east, north = out_of(ahead, left, cos, sin)
    return clearance(device_bank.field(tables, scenario), east + x, north + y)


def _leader(
    ahead: tuple[jax.Array, jax.Array, jax.Array], scene: Scene, half_width: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(m [N] ahead of the agent's centre at which each blocks the corridor, or FREE; number of the leader, the nearest
    of these; the route's heading there), where `ahead` are x, y and heading [M] of the route at CORRIDOR."""
    x, y, heading = ahead
    boxes, sizes = (scene.x, scene.y, scene.cos, scene.sin), (scene.half_length, scene.half_width)
    margin, offset = half_width + MARGIN, jnp.asarray(CORRIDOR, jnp.float32)
    near = jnp.where(seen, blocked((x, y), offset, boxes, sizes, (margin, margin)), FREE)
    leader = nearest(near, 1)[0]
    return near, leader, heading[jnp.minimum(jnp.sum(offset < near[leader]), len(CORRIDOR) - 1)]


def _lights(
    tables: DeviceBank, scenario: jax.Array, t: jax.Array, agent: Agent, s: jax.Array, half_length: jax.Array
) -> _Lights:
    """Lights for an agent that came to `s` in this step."""
    stop, now = device_bank.lights_at(tables, scenario, t, agent.slot)
    _, before = device_bank.lights_at(tables, scenario, t - 1, agent.slot)
    front, front_before = s + half_length, agent.s + half_length
    passed = (front_before < stop) & (stop <= front) & (now == RED) & (before == RED)
    distance = jnp.where(stop > front, stop - front, FREE)
    first = nearest(distance, 1)[0]
    state = jnp.where(distance[first] < FREE, now[first].astype(jnp.int32), 0)
    return _Lights(distance[first], state, jnp.any(passed), jnp.any(jnp.isfinite(stop) & (now > 0)))


def _headway(
    gap: jax.Array, leader_speed: jax.Array, lights: _Lights, speed: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(headway to the leader or a red light, the speed at which it closes, the steady braking that meets it)."""
    red = jnp.where(lights.state == RED, lights.distance, FREE)
    headway, closing = jnp.minimum(gap, red), jnp.where(red < gap, speed, speed - leader_speed)
    closing = jnp.where(headway < FREE, closing, 0.0)
    return headway, closing, jnp.square(jnp.maximum(closing, 0.0)) / (2.0 * jnp.maximum(headway, 0.5))
