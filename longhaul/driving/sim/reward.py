"""Events and reward of a driver.

Events, of one agent in one step (after its motion, t >= 1):

- collision: its box overlaps the box of anybody present.
- offroad: one of its four corners has a positive signed distance to the road's edge; never for pedestrians.
- red_light: its front bumper, half a length ahead of its place s on the route, passes a stop line of the route
  (s_before + l/2 < light_s <= s + l/2) and the light is red both before and after the step; only within 5 m and 90
  degrees of the route.
- goal: s >= route_length - min(1 m, 2 % of it). Where the log moved less than 0.5 m there is nothing to reach: the
  goal is then to be still within 2 m of there when the log ends, and a metre onward costs what a metre of progress is
  worth elsewhere.

The limits of comfort are V-Max's (arXiv 2503.08388), after nuPlan (arXiv 2106.11810). What an episode is worth in the
end is said by `metrics`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.datasets.log import PEDESTRIAN
from longhaul.driving.sim.config import EVENTS, Weights
from longhaul.driving.sim.dynamics import Drive
from longhaul.driving.sim.features import Features
from longhaul.driving.sim.geometry import wrap
from longhaul.runtime.user_modules import load

MAX_COMFORT_LATERAL, MAX_COMFORT_JERK, MAX_COMFORT_YAW = 2.0, 8.3, 0.95  # m/s^2, m/s^3, rad/s
MIN_COMFORT_LONGITUDINAL, MAX_COMFORT_LONGITUDINAL = -4.05, 2.40  # m/s^2

HARD = 3.0
"""Braking, m/s^2, that a driver should never come to need: the sooner it is penalised, the sooner a policy stops."""

STILL = 0.5
"""A route shorter than this, m, has nothing to reach."""

STAY = 2.0
"""Distance, m, at which an agent with nothing to reach may be from its route's beginning at the end."""


class Events(NamedTuple):
    """Events of one step, each bool [A]."""

    collision: jax.Array
    offroad: jax.Array
    red_light: jax.Array
    goal: jax.Array


class Ride(NamedTuple):
    """Comfort of a step, each [A]."""

    longitudinal: jax.Array  # m/s^2
    lateral: jax.Array  # m/s^2
    jerk: jax.Array  # m/s^3
    yaw: jax.Array  # rad/s


class Conduct(NamedTuple):
    """Conduct in a step as the benchmarks' scores judge it, each [A]."""

    speeding: jax.Array  # m/s above the speed limit, 0 where that is unknown
    unease: jax.Array  # bool: outside nuPlan's limits of comfort
    near_collision: jax.Array  # bool: a time to collision below 0.95 s


def ride_of(now: Drive, drive: Drive, first: jax.Array, dt: jax.Array) -> Ride:
    """Comfort [A] of the step from `now` to `drive`, `dt` seconds later.

    With `first`, a bool scalar, it is an episode's first step, whose jerk is 0: no acceleration is known before it.
    """
    before, after = now.motion, drive.motion
    longitudinal = (after.speed - before.speed) / dt
    yaw = wrap(after.heading - before.heading) / dt
    jerk = jnp.where(first, 0.0, (longitudinal - now.acceleration) / dt)
    return Ride(longitudinal, yaw * 0.5 * (before.speed + after.speed), jerk, yaw)


def detect_events(features: Features, route_length: jax.Array, over: jax.Array) -> Events:
    """Events [A] of a step; `route_length` [A] is in m, `over` a bool scalar: the log ends with this step."""
    arrived = features.s >= route_length - jnp.minimum(1.0, 0.02 * route_length)
    stayed = over & (jnp.abs(features.s) <= STAY) & (jnp.abs(features.lateral) <= STAY)
    return Events(
        collision=jnp.any(features.seen & (features.separation < 0.0), axis=-1),
        offroad=(jnp.max(features.corner_clearance, axis=-1) > 0.0) & (features.kind != PEDESTRIAN),
        red_light=features.ran_red,
        goal=jnp.where(route_length < STILL, stayed, arrived),
    )


def excess(ride: Ride) -> jax.Array:
    """Share by which the limits of comfort are exceeded, each at most twice, summed [A]."""
    parts = (
        jnp.abs(ride.lateral) / MAX_COMFORT_LATERAL,
        ride.longitudinal / MAX_COMFORT_LONGITUDINAL,
        ride.longitudinal / MIN_COMFORT_LONGITUDINAL,
        jnp.abs(ride.jerk) / MAX_COMFORT_JERK,
        jnp.abs(ride.yaw) / MAX_COMFORT_YAW,
    )
    return sum((jnp.clip(part - 1.0, 0.0, 2.0) for part in parts), start=jnp.zeros_like(ride.jerk))


def covered(furthest: jax.Array, features: Features, route_length: jax.Array) -> jax.Array:
    """Metres [A] of the route beyond the `furthest` place before this step, not beyond its end."""
    return jnp.minimum(jnp.maximum(features.s, furthest), jnp.maximum(route_length, furthest)) - furthest


def reward(
    weights: Weights,
    events: Events,
    happened: Events,
    furthest: jax.Array,
    features: Features,
    ride: Ride,
    route_length: jax.Array,
    conduct: Conduct | None = None,
) -> jax.Array:
    """Reward [A] of a step; what has `happened`, and the `furthest` arc length [A], m, are those before it.

    Without `conduct` its three terms are left out.
    """
    onward = jnp.maximum(features.s - furthest, 0.0)
    gained = jnp.where(route_length < STILL, -onward, covered(furthest, features, route_length))
    total = weights.progress * gained
    total = total + weights.discomfort * excess(ride)
    total = total + weights.haste * jnp.clip(features.braking / HARD - 1.0, 0.0, 2.0)
    total = total + weights.lateral * jnp.minimum(jnp.abs(features.lateral), 4.0)
    total = total + weights.heading * (1.0 - jnp.cos(features.heading_error))
    if conduct is not None:
        total = total + weights.speeding * jnp.minimum(conduct.speeding, 4.0)
        total = total + weights.unease * conduct.unease + weights.near_collision * conduct.near_collision
    for name in EVENTS:
        first = getattr(events, name) & ~getattr(happened, name)
        total = total + getattr(weights, name) * first.astype(jnp.float32)
    return total


class Step(NamedTuple):
    """Step of the agents as a reward of the user's own sees it; every leaf begins with [A]."""

    events: Events  # of this step
    happened: Events  # before it
    metres: jax.Array  # m of its route that the agent had not covered before
    features: Features
    ride: Ride
    route_length: jax.Array  # m


def user_reward(name: str, step: Step) -> jax.Array:
    """The reward [A] by the function "module:name" of a `Step`. ValueError where it returns something else."""
    value = load(name)(step)
    if not isinstance(value, jax.Array) or value.shape != step.metres.shape:
        shown = f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else type(value).__name__
        raise ValueError(f"--reward {name} returns {shown}; it must be float32{list(step.metres.shape)}, an agent each")
    return value.astype(jnp.float32)


RANGES: dict[str, float] = {
    "progress": 2.0,
    "collision": 3.0,
    "offroad": 3.0,
    "red_light": 3.0,
    "goal": 2.0,
    "discomfort": 8.0,
    "haste": 4.0,
    "lateral": 4.0,
    "heading": 4.0,
}
"""Range by term of `Weights`: the factor, up and down, within which its weight is drawn."""


def weight_draws(episode: jax.Array, agents: int) -> jax.Array:
    """float32 [A, len(RANGES)] within -1 .. 1, for the uint32 scalar `episode`."""
    count = agents * len(RANGES)
    number = jnp.arange(1, count + 1, dtype=jnp.uint32) * np.uint32(0x9E3779B9)
    bits = mix_bits(mix_bits(number ^ episode) + episode) >> 8
    share = bits.astype(jnp.float32) * np.float32(2.0**-23) - 1.0
    return jnp.where(episode == 0, 0.0, share).reshape(agents, len(RANGES))


def mix_bits(bits: jax.Array) -> jax.Array:
    """uint32 -> uint32, a bijection in which each bit of the input moves half of the output (the finaliser of
    Appleby's MurmurHash3)."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def drawn_weights(weights: Weights, draws: jax.Array) -> Weights:
    """The weights of agents, arrays [A], given their draws [A, len(RANGES)]; terms without a range stay numbers."""
    terms = {
        name: getattr(weights, name) * jnp.exp(np.log(factor) * draws[:, i])
        for i, (name, factor) in enumerate(RANGES.items())
    }
    return replace(weights, **terms)
