"""Observation of a driver: a few dozen numbers about itself, its route, the road, the lights and its nearest
neighbours.

All in the agent's own frame and within about [-1, 1]. Distances are squashed, d / (scale + |d|), so that a metre
counts more nearby than far away; nothing is cut off. Whoever comes closest within the next seconds, if all keep their
velocity, is among the neighbours even while it is far.

The time is not seen. A log's end truncates: its value is that of going on. Where an agent saw the end coming, it never
acted from there and that value never met a reward; it grew by itself, and policies learnt to wait short of the goal
(measured: the share of goals rose to 0.75 and fell to 0.14 again).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.datasets.log import CYCLIST, PEDESTRIAN, VEHICLE
from longhaul.driving.sim.device_bank import AHEAD, ahead_of
from longhaul.driving.sim.dynamics import MAX_ACCELERATION, MAX_CURVATURE, steerable
from longhaul.driving.sim.features import FAN, Features, Pose
from longhaul.driving.sim.geometry import FREE, into, nearest, pick
from longhaul.driving.sim.road_lookup import ROAD
from longhaul.driving.sim.traffic import Scene

EGO = 22


NEIGHBOUR = 18


LIGHTS = 6


WAYPOINT = 4


RANGE = 60.0
"""Metres within which neighbours are seen."""


HORIZON = 4.0
"""Seconds over which a closest approach is looked for."""


class Observation(NamedTuple):
    """One agent's view, float32 arrays (or their shapes). M waypoints, P points of the fan, K neighbours."""

    ego: Any  # [EGO]
    route: Any  # [M * WAYPOINT]: the way ahead, in order
    road: Any  # [P]: clearance at the points of the fan, negative on the road
    lights: Any  # [LIGHTS]: the next stop line
    agents: Any  # [K, NEIGHBOUR], the last feature 1 where there is one; nearest first
    points: Any = None  # [P, ROAD], pieces of road likewise, in no order; None where none are asked for


class Motives(NamedTuple):
    """Knowledge of an agent about itself beside its features, float32 scalars."""

    speed: jax.Array  # m/s
    acceleration: jax.Array  # m/s^2, in the last step
    curvature: jax.Array  # 1/m, likewise
    half_length: jax.Array  # m
    half_width: jax.Array  # m
    left: jax.Array  # m of the route to its end


def squash(value: jax.Array, scale: float) -> jax.Array:
    """value / (scale + |value|): within (-1, 1), finest around 0."""
    return value / (scale + jnp.abs(value))


def shapes(neighbours: int, waypoints: int, road_points: int = 0) -> Observation:
    """The shapes of one agent's observation."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return Observation(
        leaf(EGO),
        leaf(waypoints * WAYPOINT),
        leaf(len(FAN)),
        leaf(LIGHTS),
        leaf(neighbours, NEIGHBOUR),
        leaf(road_points, ROAD) if road_points else None,
    )


def waypoint_offsets(count: int) -> np.ndarray:
    """Metres ahead of `count` waypoints (at most MAX_WAYPOINTS): dense at first, the last near the window's end."""
    share = np.arange(1, count + 1) / count
    spread = 0.35 * share + 0.65 * share**2
    return np.maximum(np.round((AHEAD - 4) * spread), np.arange(1, count + 1)).astype(np.int64)


def observe(
    features: Features, here: Scene, pose: Pose, motives: Motives, neighbours: int, offsets: np.ndarray
) -> Observation:
    """The observation of one agent."""
    return Observation(
        ego=view_self(features, motives),
        route=view_route(features, pose, offsets),
        road=jnp.clip(features.fan_clearance / 5.0, -1.0, 1.0),
        lights=view_lights(features, motives.speed),
        agents=view_neighbours(features, here, neighbours),
    )


def view_self(features: Features, motives: Motives) -> jax.Array:
    """Float32 [EGO]."""
    speed = motives.speed
    left = jnp.maximum(motives.left, 0.0)
    hindered = features.headway < FREE
    closing = jnp.where(hindered, features.closing, 0.0)
    error = features.heading_error
    values = [
        speed / 20.0,
        squash(speed, 3.0),
        motives.half_length / 4.0,
        motives.half_width / 2.0,
        motives.acceleration / MAX_ACCELERATION,
        motives.curvature / MAX_CURVATURE,
        motives.curvature / steerable(speed),
        jnp.clip(motives.curvature * speed * speed / 6.0, -1.5, 1.5),
        jnp.clip(features.lateral / 4.0, -1.5, 1.5),
        squash(features.lateral, 0.5),
        jnp.sin(error),
        jnp.cos(error),
        squash(left, 10.0),
        (motives.left > 0.0).astype(jnp.float32),
        jnp.where(hindered, squash(features.headway, 8.0), 1.0),
        jnp.clip(closing / 10.0, -1.5, 1.5),
        jnp.clip(features.braking / MAX_ACCELERATION, 0.0, 1.5),
        squash(features.braking, 1.0),
    ]
    return jnp.concatenate([jnp.stack(values), jnp.clip(features.corner_clearance / 3.0, -1.0, 1.0)])


def view_route(features: Features, pose: Pose, offsets: np.ndarray) -> jax.Array:
    """Float32 [M * WAYPOINT]: x, y, and the sine and cosine of the heading, of the way ahead."""
    x, y, heading = ahead_of(features.route, features.route_first, features.s, offsets)
    x, y = into(x - pose.x, y - pose.y, jnp.cos(pose.heading), jnp.sin(pose.heading))
    turn = heading - pose.heading
    return jnp.stack([x / AHEAD, squash(y, 5.0), jnp.sin(turn), jnp.cos(turn)]).T.reshape(-1)


def view_lights(features: Features, speed: jax.Array) -> jax.Array:
    """Float32 [LIGHTS]: presence, distance, red, yellow, green, and the braking that a stop would need."""
    distance, known = features.light_distance, features.light_distance < FREE
    braking = jnp.square(speed) / (2.0 * jnp.maximum(distance, 0.5)) / MAX_ACCELERATION
    states = [(features.light_state == state).astype(jnp.float32) for state in (1, 2, 3)]
    near = jnp.where(known, squash(distance, 8.0), 1.0)
    return jnp.stack([known.astype(jnp.float32), near, *states, jnp.where(known, jnp.minimum(braking, 1.5), 0.0)])


def approach(x: jax.Array, y: jax.Array, vx: jax.Array, vy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Positions of others at their closest approach within HORIZON, if all keep their velocity, and when, s."""
    when = jnp.clip(-(x * vx + y * vy) / jnp.maximum(vx * vx + vy * vy, 1e-2), 0.0, HORIZON)
    return x + when * vx, y + when * vy, when


def view_neighbours(features: Features, here: Scene, count: int) -> jax.Array:
    """Float32 [K, NEIGHBOUR]: the `count` that are nearest, now and at their closest approach."""
    f = features
    then_x, then_y, _ = approach(f.x, f.y, f.vx, f.vy)
    now, then = jnp.sqrt(f.x * f.x + f.y * f.y), jnp.sqrt(then_x * then_x + then_y * then_y)
    chosen = nearest(jnp.where(f.seen & (now < RANGE), now + then, FREE), count)
    # first choose, then count: most are not seen
    x, y, vx, vy, blocks, kind = (pick(v, chosen) for v in (f.x, f.y, f.vx, f.vy, f.blocks, here.kind))
    then_x, then_y, when = approach(x, y, vx, vy)
    now = jnp.sqrt(x * x + y * y)
    values = [
        squash(x, 10.0),
        squash(y, 10.0),
        pick(f.cos, chosen),
        pick(f.sin, chosen),
        vx / 20.0,
        vy / 20.0,
        squash(pick(f.separation, chosen), 2.0),
        pick(here.half_length, chosen) / 4.0,
        pick(here.half_width, chosen) / 2.0,
        (kind == VEHICLE).astype(jnp.float32),
        (kind == PEDESTRIAN).astype(jnp.float32),
        (kind == CYCLIST).astype(jnp.float32),
        when / HORIZON,
        squash(then_x, 3.0),
        squash(then_y, 3.0),
        jnp.where(blocks < FREE, 1.0 - squash(jnp.maximum(blocks, 0.0), 8.0), 0.0),
        jnp.exp(-now / 20.0),
        jnp.ones_like(now),
    ]
    # stacked along the major axis: along the minor one it is several times as slow on a CPU
    table = jnp.where((pick(f.seen, chosen) & (now < RANGE))[None], jnp.stack(values), 0.0).T
    return jnp.concatenate([table, jnp.zeros((count - table.shape[0], NEIGHBOUR), jnp.float32)])
