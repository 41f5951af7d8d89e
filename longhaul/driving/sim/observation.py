"""Observation of a driver: what it perceives of the others, and a few dozen numbers about itself, its route, the road,
the lights and its nearest neighbours.

The truth decides about rewards, ends and scores. An agent perceives a scene of its own: measured with noise, some
missed, only within reach, not behind others (`Config`). Whoever it does not see is absent there; so nothing that
is derived from the scene (gaps, headways, closest approaches) tells of the unseen. All is off by default, and then
costs nothing.

Numbers are in the agent's own frame and within about [-1, 1]. Distances are squashed, d / (scale + |d|), so that a
metre counts more nearby than far away; nothing is cut off. Whoever comes closest within the next seconds, if all keep
their velocity, is among the neighbours even while it is far.

The time is not seen. A log's end truncates: its value is that of going on. Where an agent saw the end coming, it never
acted from there and that value never met a reward; it grew by itself, and policies learnt to wait short of the goal
(measured: the share of goals rose to 0.75 and fell to 0.14 again).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import prng
from longhaul.driving.datasets.log import CYCLIST, PEDESTRIAN, VEHICLE
from longhaul.driving.sim.config import Config
from longhaul.driving.sim.device_bank import AHEAD, ahead_of
from longhaul.driving.sim.dynamics import MAX_ACCELERATION, MAX_CURVATURE, Motion, steerable
from longhaul.driving.sim.features import FAN, Agent, Features
from longhaul.driving.sim.geometry import FREE, Relative, into, nearest, pick
from longhaul.driving.sim.road_lookup import ROAD, Pieces
from longhaul.driving.sim.traffic import Scene
from longhaul.types import Key

EGO, NEIGHBOUR, LIGHTS, WAYPOINT, LIMIT = 22, 18, 6, 4, 3
"""Numbers of each part of an observation."""

RANGE = 60.0
"""Metres within which neighbours are seen."""

HORIZON = 4.0
"""Seconds ahead over which the closest approach is computed."""


class Observation(NamedTuple):
    """One agent's view, float32 arrays (or their shapes). M waypoints, P points of the fan, K neighbours."""

    ego: Any  # [EGO]
    route: Any  # [M * WAYPOINT]: the way ahead, in order
    road: Any  # [P]: clearance at the points of the fan, negative on the road
    lights: Any  # [LIGHTS]: the next stop line
    agents: Any  # [K, NEIGHBOUR], the last feature 1 where there is one; nearest first
    points: Any = None  # [P, ROAD], pieces of road likewise, in no order; None where none are observed


def perceive(config: Config, scene: Scene, agent: Agent, key: Key | None) -> Scene:
    """The scene as one agent perceives it; it knows itself exactly. `key` is of this step: None if nothing is drawn."""
    own = scene.slot == agent.slot
    present, at = scene.present, agent.drive.motion
    x, y = into(scene.x - at.x, scene.y - at.y, jnp.cos(at.heading), jnp.sin(at.heading))
    if config.limited:
        present = present & within(config, x, y)
    if config.view_occlusion:
        present = present & ~hidden(scene, at, scene.present & ~own)
    if config.observation_mask > 0.0:
        assert key is not None
        present = present & (prng.uniform(jax.random.fold_in(key, 0), scene.x.shape) >= config.observation_mask)
    scene = scene._replace(present=present | (scene.present & own))
    if not any(config.observation_noise):
        return scene
    assert key is not None
    metre, turn, speed = config.observation_noise
    drawn = jnp.where(own, 0.0, prng.normal(jax.random.fold_in(key, 1), (5, *scene.x.shape)))
    heading = scene.heading + turn * drawn[2]
    return scene._replace(
        x=scene.x + metre * drawn[0],
        y=scene.y + metre * drawn[1],
        heading=heading,
        cos=jnp.cos(heading),
        sin=jnp.sin(heading),
        vx=scene.vx + speed * drawn[3],
        vy=scene.vy + speed * drawn[4],
    )


def perceive_road(config: Config, pieces: Pieces, key: Key | None) -> Pieces:
    """The pieces of road that one agent perceives: those within its view and not missed."""
    present = pieces.there
    if config.limited:
        present = present & within(config, pieces.x, pieces.y)
    if config.observation_mask > 0.0:
        assert key is not None
        present = present & (prng.uniform(jax.random.fold_in(key, 2), present.shape) >= config.observation_mask)
    return pieces._replace(there=present)


def within(config: Config, x: jax.Array, y: jax.Array) -> jax.Array:
    """bool: whether places in an agent's frame are within its reach and field of view."""
    square = x * x + y * y
    seen = square <= jnp.float32((1e6 if config.view_range is None else min(config.view_range, 1e6)) ** 2)
    if config.view_angle < 2.0 * math.pi:
        seen = seen & (x >= math.cos(0.5 * config.view_angle) * jnp.sqrt(square))
    return seen


def hidden(scene: Scene, at: Motion, solid: jax.Array) -> jax.Array:
    """bool [N]: an object's middle is not seen from the agent's, because another `solid` [N] box stands between.

    Boxes in which the agent's middle lies hide nothing, or an agent in a collision would see nothing at all.
    """
    # the line of sight in each box's frame: row i is the object seen, column j may hide it
    u, v = into(at.x - scene.x, at.y - scene.y, scene.cos, scene.sin)
    du, dv = into((scene.x - at.x)[:, None], (scene.y - at.y)[:, None], scene.cos[None], scene.sin[None])
    enter_u, leave_u = _slab(u[None], du, scene.half_length[None])
    enter_v, leave_v = _slab(v[None], dv, scene.half_width[None])
    enter, leave = jnp.maximum(enter_u, enter_v), jnp.minimum(leave_u, leave_v)
    crosses = (enter < leave) & (enter > 0.0) & (enter < 1.0)
    other = ~jnp.eye(scene.x.shape[0], dtype=bool)
    return jnp.any(crosses & other & solid[None], axis=1)


def _slab(start: jax.Array, step: jax.Array, half: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The shares of a line's way at which it enters and leaves |coordinate| <= half."""
    slope = jnp.where(jnp.abs(step) < 1e-6, 1e-6, step)
    enter, leave = (-half - start) / slope, (half - start) / slope
    return jnp.minimum(enter, leave), jnp.maximum(enter, leave)


# ------------------------------------------------------------------------------------------------------ numbers


def squash(value: jax.Array, scale: float) -> jax.Array:
    """value / (scale + |value|): within (-1, 1), finest around 0."""
    return value / (scale + jnp.abs(value))


def shapes(neighbours: int, waypoints: int, road_points: int = 0, more: int = 0) -> Observation:
    """The shapes of one agent's observation; `more` numbers about itself, by `Config.speed_limit`, `conditioning`."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return Observation(
        leaf(EGO + more),
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
    features: Features, scene: Scene, agent: Agent, left: jax.Array, neighbours: int, offsets: np.ndarray
) -> Observation:
    """The observation of one agent, whose route goes on for `left` metres."""
    return Observation(
        ego=view_self(features, agent, left),
        route=view_route(features, agent.drive.motion, offsets),
        road=jnp.clip(features.fan_clearance / 5.0, -1.0, 1.0),
        lights=view_lights(features, agent.drive.motion.speed),
        agents=view_neighbours(features, scene, neighbours),
    )


def view_self(features: Features, agent: Agent, left: jax.Array) -> jax.Array:
    """Float32 [EGO]."""
    (_, _, _, speed), acceleration, curvature = agent.drive
    half_length, half_width = features.others.own
    hindered = features.headway < FREE
    closing = jnp.where(hindered, features.closing, 0.0)
    error = features.heading_error
    values = [
        speed / 20.0,
        squash(speed, 3.0),
        half_length / 4.0,
        half_width / 2.0,
        acceleration / MAX_ACCELERATION,
        curvature / MAX_CURVATURE,
        curvature / steerable(speed),
        jnp.clip(curvature * speed * speed / 6.0, -1.5, 1.5),
        jnp.clip(features.lateral / 4.0, -1.5, 1.5),
        squash(features.lateral, 0.5),
        jnp.sin(error),
        jnp.cos(error),
        squash(jnp.maximum(left, 0.0), 10.0),
        (left > 0.0).astype(jnp.float32),
        jnp.where(hindered, squash(features.headway, 8.0), 1.0),
        jnp.clip(closing / 10.0, -1.5, 1.5),
        jnp.clip(features.braking / MAX_ACCELERATION, 0.0, 1.5),
        squash(features.braking, 1.0),
    ]
    return jnp.concatenate([jnp.stack(values), jnp.clip(features.corner_clearance / 3.0, -1.0, 1.0)])


def view_limit(limit: jax.Array, speed: jax.Array) -> jax.Array:
    """Float32 [LIMIT]: 1, since there is always a limit, the limit, and the speed above it."""
    return jnp.stack([jnp.ones_like(limit), limit / 20.0, jnp.clip((speed - limit) / 4.0, -1.5, 1.5)])


def view_route(features: Features, at: Motion, offsets: np.ndarray) -> jax.Array:
    """Float32 [M * WAYPOINT]: x, y, and the sine and cosine of the heading, of the way ahead."""
    x, y, heading = ahead_of(features.route, features.route_first, features.s, offsets)
    x, y = into(x - at.x, y - at.y, jnp.cos(at.heading), jnp.sin(at.heading))
    turn = heading - at.heading
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


def nearness(others: Relative) -> tuple[jax.Array, jax.Array]:
    """Distances [N], m, of the others' centres now and at their closest approach."""
    then_x, then_y, _ = approach(others.x, others.y, others.vx, others.vy)
    return jnp.sqrt(others.x * others.x + others.y * others.y), jnp.sqrt(then_x * then_x + then_y * then_y)


def nearby(features: Features, count: int) -> tuple[jax.Array, jax.Array]:
    """Indices [K] of the `count` others that are nearest, now and at their closest approach; whether each is seen."""
    now, later = nearness(features.others)
    near = features.seen & (now < RANGE)
    chosen = nearest(jnp.where(near, now + later, FREE), count)
    return chosen, pick(near, chosen)


def view_neighbours(features: Features, scene: Scene, count: int) -> jax.Array:
    """Float32 [K, NEIGHBOUR]: the `count` that are nearest, now and at their closest approach."""
    f, others = features, features.others
    chosen, present = nearby(f, count)
    # first choose, then count: most are not seen
    known = (others.x, others.y, others.vx, others.vy, f.blocks, scene.kind)
    x, y, vx, vy, blocks, kind = (pick(values, chosen) for values in known)
    then_x, then_y, when = approach(x, y, vx, vy)
    now = jnp.sqrt(x * x + y * y)
    values = [
        squash(x, 10.0),
        squash(y, 10.0),
        pick(others.cos, chosen),
        pick(others.sin, chosen),
        vx / 20.0,
        vy / 20.0,
        squash(pick(f.separation, chosen), 2.0),
        pick(scene.half_length, chosen) / 4.0,
        pick(scene.half_width, chosen) / 2.0,
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
    table = jnp.where(present[None], jnp.stack(values), 0.0).T
    return jnp.concatenate([table, jnp.zeros((count - table.shape[0], NEIGHBOUR), jnp.float32)])
