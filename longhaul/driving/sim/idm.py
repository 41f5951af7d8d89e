"""Intelligent Driver Model: the law, and the driver `idm` of controlled vehicles.

Treiber, Hennecke and Helbing, "Congested traffic states in empirical observations and microscopic simulations", 2000.
Reactive traffic (traffic.py) follows the same law.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.scenario.scenario import RED, YELLOW
from longhaul.driving.sim import device_bank
from longhaul.driving.sim.device_bank import DeviceBank
from longhaul.driving.sim.dynamics import MAX_ACCELERATION, Drive, Motion, invert, travel
from longhaul.driving.sim.geometry import wrap

if TYPE_CHECKING:
    from longhaul.driving.sim.features import Features

HEADWAY = 1.2  # s
STANDSTILL = 2.0  # m
ACCELERATION = 2.0  # m/s^2
BRAKING = 3.0  # m/s^2, comfortable
BEND = 2.5  # m/s^2 of lateral acceleration in a bend


def interaction(speed: jax.Array, gap: jax.Array, leader: jax.Array, headway: jax.Array | float = 1.0) -> jax.Array:
    """IDM's interaction term, (desired gap / gap)^2: what a leader costs, as a share of ACCELERATION.

    `gap` is the free road ahead, m; `speed` and `leader` are m/s; `headway` is a factor of HEADWAY. Arrays broadcast.
    """
    closing = speed * (speed - leader) / (2.0 * (ACCELERATION * BRAKING) ** 0.5)
    desired_gap = STANDSTILL + jnp.maximum(speed * (HEADWAY * headway) + closing, 0.0)
    return jnp.square(desired_gap / jnp.maximum(gap, 0.1))


def acceleration(speed: jax.Array, desired: jax.Array, hindrance: jax.Array) -> jax.Array:
    """Acceleration, m/s^2, towards the `desired` speed, m/s; `hindrance` is the largest `interaction`.

    It lies between -MAX_ACCELERATION and ACCELERATION.
    """
    free = jnp.square(jnp.square(speed / jnp.maximum(desired, 0.1)))
    return jnp.clip(ACCELERATION * (1.0 - free - hindrance), -MAX_ACCELERATION, ACCELERATION)


def bend_speed(headings: jax.Array, spacing: float, offset: np.ndarray, lateral: float = BEND) -> jax.Array:
    """Speed [...], m/s, from which comfortable braking meets every bend of a path ahead with at most `lateral` m/s^2.

    `headings` [..., M] of points `spacing` apart, the first of them `offset` [M] metres ahead.
    """
    span = max(int(4.0 / spacing), 1)
    turn = jnp.abs(wrap(headings[..., span:] - headings[..., :-span])) / (span * spacing)
    square = lateral / jnp.maximum(turn, 1e-3)
    ramp = np.broadcast_to(2.0 * 0.5 * BRAKING * offset[:-span], turn.shape)
    return jnp.sqrt(jnp.min(square + ramp, axis=-1))


def follow(tables: DeviceBank, scenario: jax.Array, now: Drive, features: Features, dt: jax.Array) -> Drive:
    """Drive [A] one step on by IDM along the own routes: behind leaders, before red lights, slowly through bends."""
    speed, old = now.motion.speed, now.motion
    hindrance = interaction(speed, features.gap, jnp.maximum(features.leader_speed, 0.0))
    # a red light counts while a stop is possible
    stop = features.light_distance
    braking = jnp.square(speed) / (2.0 * jnp.maximum(stop, 0.1))
    red = ((features.light_state == RED) & (braking < 8.0)) | ((features.light_state == YELLOW) & (braking < 3.0))
    halt = interaction(speed, stop + 1.0, jnp.zeros_like(stop))
    hindrance = jnp.maximum(hindrance, jnp.where(red, halt, 0.0))
    offsets = np.arange(device_bank.AHEAD, dtype=np.float32)
    bend = bend_speed(features.route[:, 2, device_bank.BEHIND :], 1.0, offsets)
    desired = jnp.minimum(tables.desired[scenario], bend)
    distance, after = travel(speed, acceleration(speed, desired, hindrance), dt)
    s = features.s + distance
    place = jax.vmap(lambda slot, s: device_bank.place_on(tables, scenario, slot, s))
    x, y, heading = place(jnp.arange(len(s), dtype=jnp.int32), s).T
    moves = distance > 1e-3  # a standing agent keeps the pose that the log gave it
    motion = Motion(
        jnp.where(moves, x, old.x), jnp.where(moves, y, old.y), jnp.where(moves, wrap(heading), old.heading), after
    )
    return Drive(motion, (after - speed) / dt, invert(old, motion, dt)[1])
