"""Every geometric quantity of a step, once: what observation, reward, termination and metrics share."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.sim import device_bank
from longhaul.driving.sim.device_bank import DeviceBank
from longhaul.driving.sim.geometry import (
    FREE,
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
from longhaul.driving.sim.interactions import OnLanes, Towards, on_lanes, towards
from longhaul.driving.sim.road_lookup import lanes_at
from longhaul.driving.sim.traffic import MARGIN, Scene

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

RED = 1


class Features(NamedTuple):
    """Surroundings of one controlled agent; [N] are the others, in its frame."""

    x: jax.Array  # [N], of centres, m
    y: jax.Array
    cos: jax.Array  # [N], of the difference of headings
    sin: jax.Array
    vx: jax.Array  # [N], relative velocity, m/s
    vy: jax.Array
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
    towards: Towards
    lanes: OnLanes


class Pose(NamedTuple):
    """Pose of one controlled agent, as `extract` needs it."""

    x: jax.Array
    y: jax.Array
    heading: jax.Array
    s: jax.Array  # arc length one step ago
    slot: jax.Array  # int32
    object: jax.Array  # int32, index into N; -1 is an empty slot


def extract(tables: DeviceBank, search: int, scenario: jax.Array, t: jax.Array, here: Scene, pose: Pose) -> Features:
    """The features of one controlled agent at step t; its route is searched `search` metres ahead of where it was."""
    own = jnp.maximum(pose.object, 0)
    half = (here.half_length[own], here.half_width[own])
    cos, sin = jnp.cos(pose.heading), jnp.sin(pose.heading)
    x, y = into(here.x - pose.x, here.y - pose.y, cos, sin)
    relative_cos = here.cos * cos + here.sin * sin
    relative_sin = here.sin * cos - here.cos * sin
    vx, vy = into(here.vx - here.vx[own], here.vy - here.vy[own], cos, sin)
    seen = here.present & (here.slot != pose.slot)

    box_x, box_y = corners(*half)
    felt_x, felt_y = jnp.concatenate([box_x, FAN[:, 0]]), jnp.concatenate([box_y, FAN[:, 1]])
    felt_x, felt_y = out_of(felt_x, felt_y, cos, sin)
    road = clearance(device_bank.field(tables, scenario), felt_x + pose.x, felt_y + pose.y)

    near, first = device_bank.window(tables, scenario, pose.slot, pose.s, search)
    place = project(near, first, pose.x, pose.y)
    route, first = device_bank.window(tables, scenario, pose.slot, place.s, device_bank.AHEAD)

    ahead = device_bank.ahead_of(route, first, place.s, CORRIDOR)
    boxes = (here.x, here.y, here.cos, here.sin)
    margin = half[1] + MARGIN
    offset = jnp.asarray(CORRIDOR, jnp.float32)
    near = blocked(ahead[:2], offset, boxes, (here.half_length, here.half_width), (margin, margin))
    near = jnp.where(seen, near, FREE)
    leader = nearest(near, 1)[0]
    along = ahead[2][jnp.minimum(jnp.sum(offset < near[leader]), len(CORRIDOR) - 1)]

    stop, lights = device_bank.lights_at(tables, scenario, t, pose.slot)
    _, lights_before = device_bank.lights_at(tables, scenario, t - 1, pose.slot)
    front, front_before = place.s + half[0], pose.s + half[0]
    passed = (front_before < stop) & (stop <= front) & (lights == RED) & (lights_before == RED)
    heading_error = wrap(pose.heading - place.heading)
    on_route = (jnp.abs(place.lateral) <= BEYOND_LINE) & (jnp.abs(heading_error) < np.float32(np.pi / 2))
    distance = jnp.where(stop > front, stop - front, FREE)
    next_light = nearest(distance, 1)[0]
    known = distance[next_light] < FREE
    light_state = jnp.where(known, lights[next_light].astype(jnp.int32), 0)
    speed = here.vx[own] * cos + here.vy[own] * sin
    gap = jnp.where(near[leader] < FREE, near[leader] - half[0], FREE)
    leader_speed = here.vx[leader] * jnp.cos(along) + here.vy[leader] * jnp.sin(along)
    red = jnp.where(light_state == RED, distance[next_light], FREE)
    headway, closing = jnp.minimum(gap, red), jnp.where(red < gap, speed, speed - leader_speed)
    closing = jnp.where(headway < FREE, closing, 0.0)
    braking = jnp.square(jnp.maximum(closing, 0.0)) / (2.0 * jnp.maximum(headway, 0.5))
    kind, sizes = here.kind[own], (here.half_length, here.half_width)
    gaps = separation(x, y, relative_cos, relative_sin, half, sizes)
    lanes = on_lanes(lanes_at(tables.map, scenario, pose.x, pose.y), cos, sin, half, kind)
    others = towards(
        x, y, relative_cos, relative_sin, vx, vy, half, sizes, seen=seen, touches=seen & (gaps < 0.0), kind=here.kind,
        speed=speed, straddles=lanes.straddles,
    )  # fmt: skip
    return Features(
        x=x,
        y=y,
        cos=relative_cos,
        sin=relative_sin,
        vx=vx,
        vy=vy,
        seen=seen,
        separation=gaps,
        blocks=jnp.where(near < FREE, near - half[0], FREE),
        corner_clearance=road[:4],
        fan_clearance=road[4:],
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
        light_distance=distance[next_light],
        light_state=light_state,
        ran_red=jnp.any(passed) & on_route,
        lit=jnp.any(jnp.isfinite(stop) & (lights > 0)),
        kind=kind,
        towards=others,
        lanes=lanes,
    )
