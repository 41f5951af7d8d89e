"""Controllers of the agents: the policy's actions, the log, or IDM along the route; what action would have done
the same; and how it feels.

Each function takes how the agents [A] moved until now and gives how they move in the step that follows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.sim import device_bank, dynamics, traffic
from longhaul.driving.sim.actions import make_actions
from longhaul.driving.sim.device_bank import DeviceBank
from longhaul.driving.sim.dynamics import MODELS, Drive, Limits, Motion
from longhaul.driving.sim.features import RED, Features
from longhaul.driving.sim.geometry import into, wrap
from longhaul.driving.sim.reward import Ride


def act(now: Drive, action: jax.Array, limits: Limits, dt: jax.Array, model: str, actions: str) -> Drive:
    """A policy's action, as `Config.dynamics` and `Config.actions` read it."""
    moves = MODELS[model]()
    shares = make_actions(actions, moves.grids).read(action)
    return moves.advance(now, moves.scale(shares, now, limits, dt), limits, dt)


def coast(now: Drive, dt: jax.Array) -> Drive:
    """Straight on at constant speed."""
    zeros = jnp.zeros_like(now.motion.speed)
    motion = dynamics.advance(now.motion, zeros, zeros, dt)
    return Drive(motion, (motion.speed - now.motion.speed) / dt, zeros)


def replay(now: Drive, logged: Motion, present: jax.Array, dt: jax.Array) -> Drive:
    """To where the log has the agents next, where it has them."""
    motion = jax.tree.map(lambda new, old: jnp.where(present, new, old), logged, now.motion)
    return Drive(motion, *dynamics.invert(now.motion, motion, dt))


def follow(known: DeviceBank, scenario: jax.Array, now: Drive, features: Features, dt: jax.Array) -> Drive:
    """IDM along the own route: behind leaders, before red lights, slowly through bends."""
    speed = now.motion.speed
    hindrance = traffic.interaction(speed, features.gap, jnp.maximum(features.leader_speed, 0.0))
    # a red light counts while a stop is possible
    stop = features.light_distance
    braking = jnp.square(speed) / (2.0 * jnp.maximum(stop, 0.1))
    red = ((features.light_state == RED) & (braking < 8.0)) | ((features.light_state == RED + 1) & (braking < 3.0))
    halt = traffic.interaction(speed, stop + 1.0, jnp.zeros_like(stop))
    hindrance = jnp.maximum(hindrance, jnp.where(red, halt, 0.0))
    offsets = np.arange(device_bank.AHEAD, dtype=np.float32)
    bend = traffic.bend_speed(features.route[:, 2, device_bank.BEHIND :], 1.0, offsets)
    desired = jnp.minimum(known.desired[scenario], bend)
    distance, after = dynamics.travel(speed, traffic.idm(speed, desired, hindrance), dt)
    s = features.s + distance

    def place(slot: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        points, first = device_bank.window(known, scenario, slot, s, 2)
        x, y, heading = device_bank.ahead_of(points, first, s, np.zeros(1, np.int64))
        return x[0], y[0], wrap(heading[0])

    x, y, heading = jax.vmap(place)(jnp.arange(len(s), dtype=jnp.int32), s)
    moves = distance > 1e-3  # who stands keeps the pose that the log gave it
    old = now.motion
    motion = Motion(
        jnp.where(moves, x, old.x), jnp.where(moves, y, old.y), jnp.where(moves, heading, old.heading), after
    )
    return Drive(motion, (after - speed) / dt, dynamics.invert(old, motion, dt)[1])


PULL, STEER, SOFT = 1.0, 2.0, 1.0
"""1/s, 1/s and m/s: what is made up for of a distance to the way that is followed, along it and beside it."""

ASTRAY, TURNED = 5.0, 0.5
"""m, and rad: who is farther from where the log has it can't be told by the log what to do."""


def steer_back(now: Motion, aim: Motion, dt: jax.Array) -> Motion:
    """Aim one step ahead, so as to come (back) to the way that leads through `aim`: its speed and heading alone
    would leave beside it whoever is beside it. The lateral part is Stanley's (Hoffmann et al. 2007)."""
    ahead, left = into(aim.x - now.x, aim.y - now.y, jnp.cos(aim.heading), jnp.sin(aim.heading))
    behind = ahead - 0.5 * (now.speed + aim.speed) * dt
    heading = aim.heading + jnp.arctan(STEER * left / (SOFT + now.speed))
    return aim._replace(speed=jnp.maximum(aim.speed + PULL * behind, 0.0), heading=wrap(heading))


def tell(now: Drive, aim: Motion, limits: Limits, dt: jax.Array, model: str, actions: str) -> jax.Array:
    """The action that leads nearest to `aim` in a step: inverse dynamics, within what actions can say."""
    moves = MODELS[model]()
    after = aim if model == "delta" else steer_back(now.motion, aim, dt)  # whose moves are told by the place itself
    command = moves.invert(now, after, limits, dt)
    return make_actions(actions, moves.grids).write(moves.share(command, now, limits, dt))


def beside(now: Motion, logged: Motion) -> jax.Array:
    """bool: near enough to where the log has it for the log to tell what to do."""
    away = jnp.square(now.x - logged.x) + jnp.square(now.y - logged.y)
    return (away <= ASTRAY**2) & (jnp.abs(wrap(now.heading - logged.heading)) <= TURNED)


def rest(now: Drive, held: jax.Array, drive: Drive) -> Drive:
    """`drive`, but of those who are `held` [A] the motion until now, as if nothing moved them."""
    zeros = jnp.zeros_like(now.acceleration)
    return jax.tree.map(lambda kept, moved: jnp.where(held, kept, moved), Drive(now.motion, zeros, zeros), drive)


def halt(drive: Drive, stands: jax.Array) -> Drive:
    """`drive`, but those who stand [A] have no speed."""
    acceleration, curvature = (jnp.where(stands, 0.0, value) for value in (drive.acceleration, drive.curvature))
    return Drive(drive.motion._replace(speed=jnp.where(stands, 0.0, drive.motion.speed)), acceleration, curvature)


def feel(now: Drive, drive: Drive, first: jax.Array, dt: jax.Array) -> Ride:
    """Comfort of a step; the `first` of an episode has no jerk, for nothing is known of what was before."""
    before, after = now.motion, drive.motion
    longitudinal = (after.speed - before.speed) / dt
    yaw = wrap(after.heading - before.heading) / dt
    jerk = jnp.where(first, 0.0, (longitudinal - now.acceleration) / dt)
    return Ride(longitudinal, yaw * 0.5 * (before.speed + after.speed), jerk, yaw)
