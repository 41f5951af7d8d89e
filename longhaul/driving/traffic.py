"""Who is where in a world: replayed logs, vehicles that react, and the agents that are driven.

Reactive vehicles keep to their logged way and choose their speed by the Intelligent Driver Model (Treiber, Hennecke
and Helbing, "Congested traffic states in empirical observations and microscopic simulations", 2000). A leader is
whatever stands in the corridor ahead, with its present pose. Two things stand in for what a log does not tell: a
vehicle slows for the bends of its way, and it does not pass a place where its log waits, now or next (mostly at a red
light), before its log leaves it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.driving.dynamics import MAX_ACCELERATION, Motion, travel
from longhaul.driving.geometry import FREE, blocked, wrap
from longhaul.driving.tables import PATH_SPACING, PATH_WINDOW, STIR, Paths, Tables

HEADWAY = 1.2  # s
STANDSTILL = 2.0  # m
ACCELERATION = 2.0  # m/s^2
BRAKING = 3.0  # m/s^2, comfortable
BEND = 2.5  # m/s^2 of lateral acceleration that a reactive vehicle takes
MARGIN = 0.2  # m, kept beside a corridor

class Scene(NamedTuple):
    """Everybody of one world at one time, each [N]."""

    x: jax.Array
    y: jax.Array
    heading: jax.Array
    cos: jax.Array
    sin: jax.Array
    vx: jax.Array
    vy: jax.Array
    half_length: jax.Array
    half_width: jax.Array
    kind: jax.Array  # float32: log.VEHICLE ...
    present: jax.Array  # bool
    slot: jax.Array  # int32: index among the controlled agents, or -1


class Reactive(NamedTuple):
    """Where the reactive vehicles are on their ways; means nothing for the others. Each float32 [N]."""

    s: jax.Array
    speed: jax.Array


def slice_at(tables: Tables, scenario: jax.Array, t: jax.Array) -> jax.Array:
    """float32 [C, N]: everybody's logged motion at step t."""
    zero = jnp.zeros_like(t)
    size = (1, 1, *tables.motion.shape[2:])
    return lax.dynamic_slice(tables.motion, (scenario, t, zero, zero), size)[0, 0]


def scene(
    tables: Tables,
    scenario: jax.Array,
    t: jax.Array,
    motion: Motion,
    there: jax.Array,
    reactive: Reactive | None,
) -> Scene:
    """The world at step t, with the controlled agents at `motion` [A] where they are `there`, and nowhere else."""
    logged, body = slice_at(tables, scenario, t), tables.body[scenario]
    x, y, heading, vx, vy, present = (logged[i] for i in range(6))
    slot = body[3].astype(jnp.int32)
    if reactive is not None and tables.paths is not None:
        path_x, path_y, path_heading = on_path(tables.paths, scenario, reactive.s)
        moves = tables.paths.reactive[scenario]
        x, y = jnp.where(moves, path_x, x), jnp.where(moves, path_y, y)
        heading = jnp.where(moves, path_heading, heading)
        vx = jnp.where(moves, reactive.speed * jnp.cos(path_heading), vx)
        vy = jnp.where(moves, reactive.speed * jnp.sin(path_heading), vy)
    driven = slot >= 0

    def put(agents: jax.Array, others: jax.Array) -> jax.Array:
        theirs = jnp.broadcast_to(agents, slot.shape) if agents.shape[0] == 1 else agents[jnp.maximum(slot, 0)]
        return jnp.where(driven, theirs, others)

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
        present=put(there, present > 0.5),
        slot=slot,
    )


def interaction(speed: jax.Array, gap: jax.Array, leader: jax.Array) -> jax.Array:
    """The part of IDM that a leader `gap` metres ahead at speed `leader` costs, as a share of ACCELERATION."""
    closing = speed * (speed - leader) / (2.0 * (ACCELERATION * BRAKING) ** 0.5)
    wanted = STANDSTILL + jnp.maximum(speed * HEADWAY + closing, 0.0)
    return jnp.square(wanted / jnp.maximum(gap, 0.1))


def idm(speed: jax.Array, desired: jax.Array, hindrance: jax.Array) -> jax.Array:
    """IDM's acceleration, m/s^2, given the largest `interaction`; within the vehicle's limits."""
    free = jnp.square(jnp.square(speed / jnp.maximum(desired, 0.1)))
    return jnp.clip(ACCELERATION * (1.0 - free - hindrance), -MAX_ACCELERATION, ACCELERATION)


def bend_speed(headings: jax.Array, spacing: float, offset: np.ndarray) -> jax.Array:
    """The speed from which comfortable braking meets every bend of a way ahead, m/s.

    `headings` [..., M] of points `spacing` apart, the first of them `offset` [M] metres ahead.
    """
    span = max(int(4.0 / spacing), 1)
    turn = jnp.abs(wrap(headings[..., span:] - headings[..., :-span])) / (span * spacing)
    square = BEND / jnp.maximum(turn, 1e-3)
    ramp = np.broadcast_to(2.0 * 0.5 * BRAKING * offset[:-span], turn.shape)
    return jnp.sqrt(jnp.min(square + ramp, axis=-1))


def on_path(paths: Paths, scenario: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, y, heading [N] at arc lengths `s` of everybody's logged way."""
    place = jnp.maximum(s, 0.0) / PATH_SPACING
    index = jnp.clip(place.astype(jnp.int32), 0, paths.points.shape[3] - 2)
    part = place - index.astype(jnp.float32)
    ends = read(paths, scenario, index, 2)
    low, high = ends[:, :, 0], ends[:, :, 1]
    x, y, heading = (low[:, i] + part * (high[:, i] - low[:, i]) for i in range(3))
    return x, y, heading


def read(paths: Paths, scenario: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """float32 [N, 3, size]: points of everybody's way from `index` [N] on."""

    def one(n: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_slice(paths.points, (scenario, n, jnp.zeros_like(i), i), (1, 1, 3, size))[0, 0]

    return jax.vmap(one)(jnp.arange(index.shape[0], dtype=jnp.int32), index)


def begin(tables: Tables, scenario: jax.Array) -> Reactive | None:
    """Reactive vehicles as the log has them at its first step; None where nobody reacts."""
    if tables.paths is None:
        return None
    logged = slice_at(tables, scenario, jnp.zeros_like(scenario))
    return Reactive(logged[6], jnp.hypot(logged[3], logged[4]))


def react(tables: Tables, scenario: jax.Array, t: jax.Array, here: Scene, state: Reactive) -> Reactive:
    """Reactive vehicles one step on, from step t, where everybody is as in the scene `here`."""
    paths = tables.paths
    assert paths is not None
    acceleration = respond(paths, scenario, here, state)
    now, after = slice_at(tables, scenario, t), slice_at(tables, scenario, t + 1)
    logged_speed = jnp.hypot(after[3], after[4])
    # who is past the place where its log waits has nothing more to wait for
    wall = jnp.where(state.s <= after[7] + STIR, after[7], paths.end[scenario])
    wall = jnp.minimum(wall, paths.end[scenario]) - state.s + STANDSTILL  # vehicles rest STANDSTILL before it
    stop = ACCELERATION * (1.0 - interaction(state.speed, wall, jnp.zeros_like(wall)))
    acceleration = jnp.maximum(jnp.minimum(acceleration, stop), -MAX_ACCELERATION)
    distance, speed = travel(state.speed, acceleration, tables.dt[scenario])
    appears = (after[5] > 0.5) & (now[5] < 0.5)
    return Reactive(
        jnp.where(appears, after[6], jnp.minimum(state.s + distance, paths.end[scenario])),
        jnp.where(appears, logged_speed, speed),
    )


def respond(paths: Paths, scenario: jax.Array, here: Scene, state: Reactive) -> jax.Array:
    """IDM's acceleration [N] of every vehicle towards everybody in its corridor and the bends of its way."""
    stride = 2
    index = jnp.clip(state.s / PATH_SPACING, 0, paths.points.shape[3] - PATH_WINDOW).astype(jnp.int32)
    points = read(paths, scenario, index, PATH_WINDOW)
    offset = PATH_SPACING * np.arange(PATH_WINDOW, dtype=np.float32)
    along = (PATH_SPACING * index.astype(jnp.float32) - state.s)[:, None] + offset[None, ::stride]
    way = (points[:, 0, ::stride], points[:, 1, ::stride])
    margin = here.half_width[:, None] + MARGIN
    boxes = (here.x, here.y, here.cos, here.sin)
    near = blocked(way, along, boxes, (here.half_length, here.half_width), (PATH_SPACING, margin))
    speed, count = state.speed[:, None], near.shape[0]
    theirs = here.vx[None, :] * here.cos[:, None] + here.vy[None, :] * here.sin[:, None]
    cost = interaction(speed, near - here.half_length[:, None], jnp.maximum(theirs, 0.0))
    counts = here.present[None, :] & (near < FREE) & ~np.eye(count, dtype=bool)
    hindrance = jnp.max(jnp.where(counts, cost, 0.0), axis=1)
    bend = bend_speed(points[:, 2], PATH_SPACING, offset)
    return idm(state.speed, jnp.minimum(paths.cruise[scenario], bend), hindrance)
