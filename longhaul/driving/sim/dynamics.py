"""Dynamics of driven agents: four models of motion, the actions that command them, and a log's motion as actions.

An agent is the centre of its box, as in the logs. The models, by name:

- `bicycle`: acceleration and curvature, held over the step and solved exactly (the model and its bounds for vehicles
  are those of Waymax, arXiv 2310.08710). Two differences: it never reverses, and the curvature it may command shrinks
  with the square of the speed, as a tyre's grip does, so that the same action is a gentle correction on a motorway and
  a sharp turn in a car park.
- `steering`: acceleration and the angle of the front wheels; the curvature is tan(angle) / wheelbase, and grip bounds
  it as above. Logs do not tell the wheelbase: it is taken as 0.6 of the box's length (2.8 m for a car of 4.7 m). The
  centre's slip, which GPUDrive's model of this kind has (arXiv 2408.01584), is left out.
- `delta`: the move dx, dy in the own frame and the turn, within bounds of the agent's kind (Waymax's and GPUDrive's
  delta-local). The speed afterwards is the move's length by the time, negative if it went backwards.
- `jerk`: the changes of longitudinal and of lateral acceleration (bounds and choices of PufferDrive: -15 .. 4 and
  +-4 m/s^3, steering within +-0.55 rad). Two differences: the acceleration that a jerk leads to holds for the whole
  step, since with a mean of before and after the inverse rings; and the top speed is that of the agent's kind, where
  theirs is 20 m/s.

Each holds a command over one step, and has its inverse, from logged motion to the command that comes nearest. A
policy's actions are commands as shares of what the agent can do now:

- `continuous`: a `Box` of shares, -1 .. 1; what is outside is clipped.
- `discrete`: a `MultiDiscrete`, an index into each grid of the model.
- `joint`: one `Discrete` of all combinations, the last grid running fastest (7 x 13 = 91 for the bicycle, 4 x 3 = 12
  for the jerk model, as PufferDrive has them).

`Limits` are those of each agent's kind.

Bounds of vehicles: Waymax's bicycle, the grip of a dry road, and moves of `delta` that a vehicle can make. Cyclists:
a rider goes over the handlebar at about half of gravity, and 15 m/s is a fast descent (Wilson and Schmidt, "Bicycling
Science", 2020). Pedestrians: a sprint of ordinary people, and a turn on the spot in a second. 99 of 100 logged speeds
of the shared real logs lie within them (vehicles 17.5, cyclists 5.6, pedestrians 3.2 m/s); logged accelerations beyond
the bounds are mostly noise of a tracker. Objects of unknown kind count as vehicles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.datasets.log import CYCLIST, PEDESTRIAN
from longhaul.driving.sim.geometry import into, out_of, wrap
from longhaul.spaces import Action, Box, Discrete, MultiDiscrete

MAX_ACCELERATION = 6.0  # m/s^2, either way
MAX_CURVATURE = 0.3  # 1/m
MAX_LATERAL = 6.0  # m/s^2, what the tyres hold
MAX_SPEED = 35.0  # m/s
"""A vehicle's, as `VEHICLE` has them."""

MAX_STEERING = 0.55  # rad
STEERING_RATE = 0.6  # rad/s, of the jerk model
BRAKING_JERK, PUSHING_JERK, LATERAL_JERK = 15.0, 4.0, 4.0  # m/s^3

WHEELBASE = 0.6
"""Between the axles, as a share of the box's length."""

ACCELERATIONS = np.array([-6.0, -3.0, -1.2, 0.0, 1.2, 2.4, 4.0], np.float32)
"""The discrete choices of a vehicle's acceleration, m/s^2."""

STEERINGS = np.array([np.sign(k) * (k / 6) ** 2 for k in range(-6, 7)], np.float32)
"""The discrete choices of steering, as a part of what is possible at this speed; finer around 0."""

MOVES = np.array([-0.1, *((k / 20) ** 1.5 for k in range(21))], np.float32)
"""Choices of moving on, as a part of what the top speed allows (backwards: of what reversing allows)."""

SLIPS = np.array([-1.0, -0.25, 0.0, 0.25, 1.0], np.float32)
"""Choices of moving sideways."""

JERKS = np.array([-1.0, -4.0 / 15.0, 0.0, 1.0], np.float32)
"""Choices of longitudinal jerk: -15, -4, 0 and 4 m/s^3."""

SMALL = 1e-2
"""Move in a step, m, below which a motion has no curvature."""

STEADY = 1e-3
"""Square of a speed, m^2/s^2, below which lateral acceleration does not determine the curvature."""

Number = Any  # a float, or a float32 array that broadcasts against the motion


class Motion(NamedTuple):
    """Motion of agents' centres, each a float32 array of one shape."""

    x: jax.Array  # m
    y: jax.Array  # m
    heading: jax.Array  # rad
    speed: jax.Array  # m/s, along the heading


class Drive(NamedTuple):
    """A motion and how it came about, arrays of one shape."""

    motion: Motion
    acceleration: jax.Array  # m/s^2, in the last step
    curvature: jax.Array  # 1/m, likewise


class Limits(NamedTuple):
    """Limits of an agent's motion; numbers, or arrays of the motion's shape."""

    speed: Number  # m/s, forwards
    acceleration: Number  # m/s^2
    braking: Number  # m/s^2, positive
    curvature: Number  # 1/m
    lateral: Number  # m/s^2
    reverse: Number  # m/s, positive; of `delta` alone, as the next two
    slip: Number  # m/s, sideways, either way
    turn: Number  # rad/s, either way
    wheelbase: Number  # m; of `steering` and `jerk`


VEHICLE = Limits(MAX_SPEED, MAX_ACCELERATION, MAX_ACCELERATION, MAX_CURVATURE, MAX_LATERAL, 5.0, 1.5, 1.5, 2.8)

Command = tuple[jax.Array, ...]
"""Command held over a step, in metres, radians and seconds; two or three numbers by the model."""


class Model(NamedTuple):
    """One model of motion. A `share` is a command as a part, -1 .. 1, of what the agent can do now."""

    grids: tuple[np.ndarray, ...]  # the discrete choices, ascending shares, one array for each number of a command
    scale: Callable[[Command, Drive, Limits, jax.Array], Command]  # (shares, now, limits, dt) -> command
    share: Callable[[Command, Drive, Limits, jax.Array], Command]  # its inverse
    advance: Callable[[Drive, Command, Limits, jax.Array], Drive]  # (now, command, limits, dt) -> one step on
    invert: Callable[[Drive, Motion, Limits, jax.Array], Command]  # (now, motion a step on, limits, dt) -> command


# ------------------------------------------------------------------------------------------------------- arcs


def steerable(speed: jax.Array, limits: Limits = VEHICLE) -> jax.Array:
    """Largest curvature, 1/m, that an agent can take at `speed`, m/s of any shape."""
    return jnp.minimum(limits.curvature, limits.lateral / jnp.maximum(speed * speed, 1e-3))


def advance(
    motion: Motion, acceleration: jax.Array, curvature: jax.Array, dt: jax.Array, limits: Limits = VEHICLE
) -> Motion:
    """Motion after `dt` seconds of constant acceleration, m/s^2, and curvature, 1/m, between standstill and top speed.

    Both are clipped to `limits`. Arrays have the motion's shape; `dt` may be a scalar.
    """
    acceleration = jnp.clip(acceleration, -limits.braking, limits.acceleration)
    curvature = jnp.clip(curvature, -limits.curvature, limits.curvature)
    distance, speed = travel(motion.speed, acceleration, dt, limits.speed)
    turn = curvature * distance
    half = 0.5 * turn
    chord = distance * jnp.sinc(half / jnp.pi)  # an arc's chord has the heading of its middle
    along = motion.heading + half
    return Motion(
        motion.x + chord * jnp.cos(along), motion.y + chord * jnp.sin(along), wrap(motion.heading + turn), speed
    )


def travel(
    speed: jax.Array, acceleration: jax.Array, dt: jax.Array, limit: Number = MAX_SPEED
) -> tuple[jax.Array, jax.Array]:
    """(distance, m, and speed, m/s) after `dt` seconds of constant acceleration, between standstill and `limit`, m/s.

    Whoever is faster than `limit` already may keep its speed.
    """
    aim = speed + acceleration * dt
    after = jnp.clip(aim, 0.0, jnp.maximum(limit, speed))
    # the bound is reached before dt is over; the rest is driven at the bound
    ramp = jnp.where(aim == after, dt, (after - speed) / jnp.where(acceleration == 0.0, 1.0, acceleration))
    return 0.5 * (speed + after) * ramp + after * (dt - ramp), after


def invert(before: Motion, after: Motion, dt: jax.Array, limits: Limits = VEHICLE) -> tuple[jax.Array, jax.Array]:
    """(acceleration, m/s^2, curvature, 1/m) from one motion to the next: `advance` reversed, where it met no bound.

    Where the agent hardly moves, its curvature is 0. Bounded like the actions: a log beyond them is followed roughly.
    """
    acceleration = (after.speed - before.speed) / dt
    distance = 0.5 * (before.speed + after.speed) * dt
    curvature = jnp.where(distance > SMALL, wrap(after.heading - before.heading) / jnp.maximum(distance, SMALL), 0.0)
    return (
        jnp.clip(acceleration, -limits.braking, limits.acceleration),
        jnp.clip(curvature, -limits.curvature, limits.curvature),
    )


def two_sided(share: jax.Array, low: Number, high: Number) -> jax.Array:
    """Shares -1 .. 1, any shape, mapped to -low .. high; 0 stays 0."""
    return share * jnp.where(share < 0.0, low, high)


def as_share(value: jax.Array, low: Number, high: Number) -> jax.Array:
    """Shares -1 .. 1 of values: `two_sided` reversed, and clipped."""
    return jnp.clip(value / jnp.where(value < 0.0, low, high), -1.0, 1.0)


# ----------------------------------------------------------------------------------------------------- models


def arc(now: Drive, acceleration: jax.Array, curvature: jax.Array, limits: Limits, dt: jax.Array) -> Drive:
    """Drive one step on by `advance`."""
    motion = advance(now.motion, acceleration, curvature, dt, limits)
    return Drive(motion, (motion.speed - now.motion.speed) / dt, curvature)


def bicycle(accelerations: np.ndarray, steerings: np.ndarray) -> Model:
    """Model whose command is acceleration, m/s^2, and curvature, 1/m; the arguments are their discrete shares."""

    def scale(share: Command, now: Drive, limits: Limits, dt: jax.Array) -> Command:
        push = two_sided(share[0], limits.braking, limits.acceleration)
        return push, share[1] * steerable(now.motion.speed, limits)

    def share(command: Command, now: Drive, limits: Limits, dt: jax.Array) -> Command:
        part = jnp.clip(command[1] / steerable(now.motion.speed, limits), -1.0, 1.0)
        return as_share(command[0], limits.braking, limits.acceleration), part

    def step(now: Drive, command: Command, limits: Limits, dt: jax.Array) -> Drive:
        return arc(now, command[0], command[1], limits, dt)

    def inverse(now: Drive, after: Motion, limits: Limits, dt: jax.Array) -> Command:
        return invert(now.motion, after, dt, limits)

    return Model((accelerations, steerings), scale, share, step, inverse)


def steering(accelerations: np.ndarray, steerings: np.ndarray, most: float) -> Model:
    """Model whose command is acceleration, m/s^2, and the angle of the front wheels, rad, at most `most`."""
    free = bicycle(accelerations, steerings)

    def scale(share: Command, now: Drive, limits: Limits, dt: jax.Array) -> Command:
        return two_sided(share[0], limits.braking, limits.acceleration), most * share[1]

    def share(command: Command, now: Drive, limits: Limits, dt: jax.Array) -> Command:
        push = as_share(command[0], limits.braking, limits.acceleration)
        return push, jnp.clip(command[1] / most, -1.0, 1.0)

    def step(now: Drive, command: Command, limits: Limits, dt: jax.Array) -> Drive:
        grip = steerable(now.motion.speed, limits)
        bend = jnp.tan(jnp.clip(command[1], -most, most)) / limits.wheelbase
        return arc(now, command[0], jnp.clip(bend, -grip, grip), limits, dt)

    def inverse(now: Drive, after: Motion, limits: Limits, dt: jax.Array) -> Command:
        push, curvature = invert(now.motion, after, dt, limits)
        return push, jnp.clip(jnp.arctan(curvature * limits.wheelbase), -most, most)

    return Model(free.grids, scale, share, step, inverse)


def delta(moves: np.ndarray, slips: np.ndarray, turns: np.ndarray) -> Model:
    """Model whose command is the move of one step, ahead and to the left, m, and the turn, rad, in the own frame."""

    def bounds(limits: Limits, dt: jax.Array) -> tuple[tuple[Number, Number], ...]:
        sides = (limits.reverse, limits.speed), (limits.slip, limits.slip), (limits.turn, limits.turn)
        return tuple((low * dt, high * dt) for low, high in sides)

    def scale(share: Command, now: Drive, limits: Limits, dt: jax.Array) -> Command:
        return tuple(two_sided(part, *sides) for part, sides in zip(share, bounds(limits, dt), strict=True))

    def share(command: Command, now: Drive, limits: Limits, dt: jax.Array) -> Command:
        return tuple(as_share(part, *sides) for part, sides in zip(command, bounds(limits, dt), strict=True))

    def within(command: Command, limits: Limits, dt: jax.Array) -> Command:
        return tuple(jnp.clip(part, -low, high) for part, (low, high) in zip(command, bounds(limits, dt), strict=True))

    def step(now: Drive, command: Command, limits: Limits, dt: jax.Array) -> Drive:
        ahead, left, turn = within(command, limits, dt)
        heading = now.motion.heading
        x, y = out_of(ahead, left, jnp.cos(heading), jnp.sin(heading))
        way = jnp.hypot(ahead, left)
        speed = jnp.where(ahead < 0.0, -way, way) / dt
        curvature = jnp.where(way > SMALL, turn / jnp.maximum(way, SMALL), 0.0)
        motion = Motion(now.motion.x + x, now.motion.y + y, wrap(heading + turn), speed)
        curvature = jnp.clip(curvature, -limits.curvature, limits.curvature)
        return Drive(motion, (speed - now.motion.speed) / dt, curvature)

    def inverse(now: Drive, after: Motion, limits: Limits, dt: jax.Array) -> Command:
        x, y, heading, _ = now.motion
        ahead, left = into(after.x - x, after.y - y, jnp.cos(heading), jnp.sin(heading))
        return within((ahead, left, wrap(after.heading - heading)), limits, dt)

    return Model((moves, slips, turns), scale, share, step, inverse)


def jerk(along: np.ndarray, across: np.ndarray, bounds: tuple[float, float, float], most: float, rate: float) -> Model:
    """Model whose command is longitudinal and lateral jerk, m/s^3, within `bounds` (braking, pushing, sideways).

    The wheels' angle stays within `most`, rad, and changes by at most `rate`, rad/s. A jerk given as a share ends at
    an acceleration or curvature of exactly 0 where it would cross it.
    """
    braking, pushing, sideways = bounds

    def weight(now: Drive) -> jax.Array:
        """The lateral acceleration that a unit of curvature makes, m^2/s^2."""
        return jnp.maximum(now.motion.speed * now.motion.speed, STEADY)

    def halt(value: jax.Array, change: jax.Array) -> jax.Array:
        return jnp.where(value * (value + change) < 0.0, -value, change)

    def scale(share: Command, now: Drive, limits: Limits, dt: jax.Array) -> Command:
        push = halt(now.acceleration, two_sided(share[0], braking, pushing) * dt) / dt
        bend = halt(now.curvature, sideways * share[1] * dt / weight(now))
        return push, bend * weight(now) / dt

    def share(command: Command, now: Drive, limits: Limits, dt: jax.Array) -> Command:
        return as_share(command[0], braking, pushing), jnp.clip(command[1] / sideways, -1.0, 1.0)

    def step(now: Drive, command: Command, limits: Limits, dt: jax.Array) -> Drive:
        push = jnp.clip(now.acceleration + command[0] * dt, -limits.braking, limits.acceleration)
        quick = rate * dt / limits.wheelbase
        bend = now.curvature + jnp.clip(command[1] * dt / weight(now), -quick, quick)
        grip = jnp.minimum(steerable(now.motion.speed, limits), np.tan(most) / limits.wheelbase)
        return arc(now, push, jnp.clip(bend, -grip, grip), limits, dt)

    def inverse(now: Drive, after: Motion, limits: Limits, dt: jax.Array) -> Command:
        push, curvature = invert(now.motion, after, dt, limits)
        return (
            jnp.clip((push - now.acceleration) / dt, -braking, pushing),
            jnp.clip((curvature - now.curvature) * weight(now) / dt, -sideways, sideways),
        )

    return Model((along, across), scale, share, step, inverse)


MODELS: dict[str, Callable[[], Model]] = {
    "bicycle": lambda: bicycle(ACCELERATIONS / np.float32(MAX_ACCELERATION), STEERINGS),
    "steering": lambda: steering(ACCELERATIONS / np.float32(MAX_ACCELERATION), STEERINGS, MAX_STEERING),
    "delta": lambda: delta(MOVES, SLIPS, STEERINGS),
    "jerk": lambda: jerk(
        JERKS, np.array([-1.0, 0.0, 1.0], np.float32), (BRAKING_JERK, PUSHING_JERK, LATERAL_JERK), MAX_STEERING,
        STEERING_RATE,
    ),
}  # fmt: skip
"""Each model with its numbers."""

LIMITS: dict[int, Limits] = {
    PEDESTRIAN: Limits(7.0, 4.0, 6.0, 3.0, 4.0, 2.0, 2.0, 6.0, 0.4),
    CYCLIST: Limits(15.0, 3.0, 5.0, 0.7, 5.0, 1.0, 1.0, 2.5, 1.1),
}
"""Limits by kind of track; all others have `VEHICLE`."""

LIMITS_BY_KIND = np.array([LIMITS.get(kind, VEHICLE) for kind in range(max(LIMITS) + 2)], np.float32)
"""The limits [kinds, fields] by number of the kind."""


def limits_of(kind: jax.Array, length: jax.Array) -> Limits:
    """The limits [A] of agents of these kinds (int32 [A]) and lengths (m)."""
    row = jnp.asarray(LIMITS_BY_KIND)[jnp.clip(kind, 0, len(LIMITS_BY_KIND) - 1)]
    limits = Limits(*(row[..., i] for i in range(len(Limits._fields))))
    return limits._replace(wheelbase=WHEELBASE * length)


# ---------------------------------------------------------------------------------------------------- actions


class Actions(NamedTuple):
    """Coding of shares as actions. `read` and `write` take and give arrays [..., D], or [...] for joint choices."""

    action: Action
    read: Callable[[jax.Array], Command]  # action -> shares
    write: Callable[[Command], jax.Array]  # shares -> the action that comes nearest


def make_actions(name: str, grids: tuple[np.ndarray, ...]) -> Actions:
    """Actions of that name, one of `config.ACTIONS`, over a model's grids."""
    sizes = tuple(len(grid) for grid in grids)

    def nearest(shares: Command) -> Command:
        return tuple(
            jnp.argmin(jnp.abs(share[..., None] - jnp.broadcast_to(jnp.asarray(grid), (*share.shape, len(grid)))), -1)
            for share, grid in zip(shares, grids, strict=True)
        )

    def look_up(indices: Command) -> Command:
        return tuple(jnp.asarray(grid)[index] for grid, index in zip(grids, indices, strict=True))

    if name == "continuous":
        ones = (1.0,) * len(grids)
        return Actions(
            Box(tuple(-limit for limit in ones), ones),
            lambda action: tuple(jnp.clip(action[..., i], -1.0, 1.0) for i in range(len(grids))),
            lambda shares: jnp.stack(shares, -1),
        )
    if name == "discrete":
        return Actions(
            MultiDiscrete(sizes),
            lambda action: look_up(tuple(action[..., i] for i in range(len(grids)))),
            lambda shares: jnp.stack(nearest(shares), -1).astype(jnp.int32),
        )
    return Actions(
        Discrete(math.prod(sizes)),
        lambda action: look_up(jnp.unravel_index(action, sizes)),
        lambda shares: jnp.ravel_multi_index(nearest(shares), sizes, mode="clip").astype(jnp.int32),
    )


def act(now: Drive, action: jax.Array, limits: Limits, dt: jax.Array, model: str, actions: str) -> Drive:
    """Drive one step on by a policy's action [A, ...]; `model` and `actions` are `Config.dynamics` and `.actions`."""
    motion_model = MODELS[model]()
    shares = make_actions(actions, motion_model.grids).read(action)
    return motion_model.advance(now, motion_model.scale(shares, now, limits, dt), limits, dt)


PULL, STEER, SOFT = 1.0, 2.0, 1.0
"""1/s, 1/s and m/s: what is made up for of a distance to the way that is followed, along it and beside it."""

ASTRAY, TURNED = 5.0, 0.5
"""Distances, m and rad, from an agent's logged place beyond which the log gives no action for it."""


def steer_back(now: Motion, aim: Motion, dt: jax.Array) -> Motion:
    """Aim one step ahead that leads back to the path through `aim`. The lateral part is Stanley's (Hoffmann et al.
    2007). Without it, an agent beside the path would keep its distance from it."""
    ahead, left = into(aim.x - now.x, aim.y - now.y, jnp.cos(aim.heading), jnp.sin(aim.heading))
    behind = ahead - 0.5 * (now.speed + aim.speed) * dt
    heading = aim.heading + jnp.arctan(STEER * left / (SOFT + now.speed))
    return aim._replace(speed=jnp.maximum(aim.speed + PULL * behind, 0.0), heading=wrap(heading))


def nearest_action(now: Drive, aim: Motion, limits: Limits, dt: jax.Array, model: str, actions: str) -> jax.Array:
    """Action [A, ...] that leads nearest to `aim` in a step: inverse dynamics, as exactly as actions can say."""
    motion_model = MODELS[model]()
    after = aim if model == "delta" else steer_back(now.motion, aim, dt)  # a move of `delta` aims at the place itself
    command = motion_model.invert(now, after, limits, dt)
    return make_actions(actions, motion_model.grids).write(motion_model.share(command, now, limits, dt))


def near_log(now: Motion, logged: Motion) -> jax.Array:
    """bool, of the motions' shape: an agent is near enough to its logged place for the log to say what to do."""
    away = jnp.square(now.x - logged.x) + jnp.square(now.y - logged.y)
    return (away <= ASTRAY**2) & (jnp.abs(wrap(now.heading - logged.heading)) <= TURNED)


def hold(held: jax.Array, motion: Motion, drive: Drive) -> Drive:
    """`drive`, but agents that are `held` [A] have this motion, as if nothing moved them."""
    zeros = jnp.zeros_like(drive.acceleration)
    return jax.tree.map(lambda kept, moved: jnp.where(held, kept, moved), Drive(motion, zeros, zeros), drive)
