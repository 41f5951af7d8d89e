"""The kinematic bicycle: acceleration and curvature held over one step, solved exactly.

A vehicle is the centre of its box, as in the logs; it follows an arc of the commanded curvature (the model and its
bounds are those of Waymax, arXiv 2310.08710). Two differences: it never reverses, and the curvature it may command
shrinks with the square of the speed, as a tyre's grip does, so that the same action is a gentle correction on a
motorway and a sharp turn in a car park.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.geometry import wrap

MAX_ACCELERATION = 6.0  # m/s^2, either way
MAX_CURVATURE = 0.3  # 1/m
MAX_LATERAL = 6.0  # m/s^2, what the tyres hold
MAX_SPEED = 35.0  # m/s

ACCELERATIONS = np.array([-6.0, -3.0, -1.2, 0.0, 1.2, 2.4, 4.0], np.float32)
"""The discrete choices of acceleration, m/s^2."""

STEERINGS = np.array([np.sign(k) * (k / 6) ** 2 for k in range(-6, 7)], np.float32)
"""The discrete choices of steering, as a part of the curvature that is possible at this speed; finer around 0."""


class Motion(NamedTuple):
    """The motion of vehicles, each a float32 array of one shape."""

    x: jax.Array
    y: jax.Array
    heading: jax.Array
    speed: jax.Array


def steerable(speed: jax.Array) -> jax.Array:
    """The largest curvature that a vehicle can take at this speed, 1/m."""
    return jnp.minimum(MAX_CURVATURE, MAX_LATERAL / jnp.maximum(speed * speed, 1e-3))


def discrete(action: jax.Array, speed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices [..., 2] into `ACCELERATIONS` and `STEERINGS` -> acceleration and curvature."""
    steering = jnp.asarray(STEERINGS)[action[..., 1]]
    return jnp.asarray(ACCELERATIONS)[action[..., 0]], steering * steerable(speed)


def continuous(action: jax.Array, speed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers [..., 2] within [-1, 1] -> acceleration and curvature; what is outside is clipped."""
    action = jnp.clip(action, -1.0, 1.0)
    return MAX_ACCELERATION * action[..., 0], action[..., 1] * steerable(speed)


def advance(motion: Motion, acceleration: jax.Array, curvature: jax.Array, dt: jax.Array) -> Motion:
    """The motion after `dt` seconds of constant acceleration and curvature, within standstill and MAX_SPEED."""
    acceleration = jnp.clip(acceleration, -MAX_ACCELERATION, MAX_ACCELERATION)
    curvature = jnp.clip(curvature, -MAX_CURVATURE, MAX_CURVATURE)
    distance, speed = travel(motion.speed, acceleration, dt)
    turn = curvature * distance
    half = 0.5 * turn
    chord = distance * jnp.sinc(half / jnp.pi)  # an arc's chord has the heading of its middle
    along = motion.heading + half
    return Motion(
        motion.x + chord * jnp.cos(along), motion.y + chord * jnp.sin(along), wrap(motion.heading + turn), speed
    )


def travel(speed: jax.Array, acceleration: jax.Array, dt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-> distance and speed after `dt` seconds of constant acceleration, within standstill and MAX_SPEED."""
    aim = speed + acceleration * dt
    after = jnp.clip(aim, 0.0, jnp.maximum(MAX_SPEED, speed))
    # the bound is reached before dt is over; the rest is driven at the bound
    ramp = jnp.where(aim == after, dt, (after - speed) / jnp.where(acceleration == 0.0, 1.0, acceleration))
    return 0.5 * (speed + after) * ramp + after * (dt - ramp), after


def invert(before: Motion, after: Motion, dt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What leads from one motion to the next: acceleration, curvature; the reverse of `advance` where it met no bound.

    Where the vehicle hardly moves, its curvature is 0. Bounded like the actions; so a log that exceeds them is
    followed only roughly.
    """
    acceleration = (after.speed - before.speed) / dt
    distance = 0.5 * (before.speed + after.speed) * dt
    curvature = jnp.where(distance > 0.01, wrap(after.heading - before.heading) / jnp.maximum(distance, 0.01), 0.0)
    return (
        jnp.clip(acceleration, -MAX_ACCELERATION, MAX_ACCELERATION),
        jnp.clip(curvature, -MAX_CURVATURE, MAX_CURVATURE),
    )
