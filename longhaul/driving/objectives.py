"""What a driver is to do and to leave: events, reward, and the metrics of an episode.

Events, of one agent in one step (after its motion, t >= 1):

- collision: its box overlaps the box of anybody present.
- offroad: one of its four corners has a positive signed distance to the road's edge.
- red_light: its front bumper, half a length ahead of its place s on the route, passes a stop line of the route
  (s_before + l/2 < light_s <= s + l/2) and the light is red both before and after the step; only within 5 m and 90
  degrees of the route.
- goal: s >= route_length - min(1 m, 2 % of it). Where the log moved less than 0.5 m there is nothing to reach: the
  goal is then to be still within 2 m of there when the log ends.

Metrics of an episode: each event 1 if it ever was; accuracy 1 if none of collision, offroad and red_light ever was;
progress the largest s / route_length within [0, 1], 1 where the goal was reached or the log moved less than 0.5 m
(facts of V-Max, arXiv 2503.08388); comfort the share of steps within the limits below (nuPlan's, arXiv 2106.11810, as
V-Max sets them; theirs is one verdict for an episode, a share says more); log_divergence the mean distance to where
the log had the agent, over the steps at which it had (Waymax, arXiv 2310.08710).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from longhaul.driving.features import Features

MAX_COMFORT_LATERAL = 2.0  # m/s^2
MIN_COMFORT_LONGITUDINAL, MAX_COMFORT_LONGITUDINAL = -4.05, 2.40  # m/s^2
MAX_COMFORT_JERK = 8.3  # m/s^3
MAX_COMFORT_YAW = 0.95  # rad/s

HARD = 3.0
"""Braking, m/s^2, that nobody should come to need: the sooner a driver feels it, the sooner it learns to stop."""

STILL = 0.5
"""A route shorter than this, m, has nothing to reach."""

STAY = 2.0
"""How far, m, whoever has nothing to reach may be from its route's beginning at the end."""

EVENTS = ("collision", "offroad", "red_light", "goal")


@dataclass(frozen=True)
class Weights:
    """What things are worth. Events count once an episode."""

    progress: float = 0.1  # a metre along the route, not beyond its end
    collision: float = -4.0
    offroad: float = -4.0
    red_light: float = -4.0
    goal: float = 2.0
    discomfort: float = -0.01  # each limit of comfort exceeded by itself, at most twice
    haste: float = -0.05  # needed braking (`Features.braking`) above HARD, in parts of HARD, at most twice
    lateral: float = -0.01  # a metre beside the route, at most 4
    heading: float = -0.02  # 1 - cos of the angle to the route


class Events(NamedTuple):
    """What happened in one step, each bool [A]."""

    collision: jax.Array
    offroad: jax.Array
    red_light: jax.Array
    goal: jax.Array


class Ride(NamedTuple):
    """How a step felt, each [A]."""

    longitudinal: jax.Array  # m/s^2
    lateral: jax.Array  # m/s^2
    jerk: jax.Array  # m/s^3
    yaw: jax.Array  # rad/s


class Tally(NamedTuple):
    """What an episode has scored so far, each [A]."""

    happened: Events
    furthest: jax.Array  # m along the route
    steps: jax.Array  # int16: steps played
    comfortable: jax.Array  # int16: of them
    divergence: jax.Array  # float32: mean over the steps at which the log had the agent, m
    logged: jax.Array  # int16: those steps


def begin(agents: int, s: jax.Array) -> Tally:
    """Nothing scored yet, at arc lengths `s` [A]."""
    no, none = jnp.zeros(agents, bool), jnp.zeros(agents, jnp.int16)
    return Tally(Events(no, no, no, no), s, none, none, jnp.zeros(agents, jnp.float32), none)


def judge(features: Features, route_length: jax.Array, over: jax.Array) -> Events:
    """The events of a step; `over`: whether the log ends with it."""
    arrived = features.s >= route_length - jnp.minimum(1.0, 0.02 * route_length)
    stayed = over & (jnp.abs(features.s) <= STAY) & (jnp.abs(features.lateral) <= STAY)
    return Events(
        collision=jnp.any(features.seen & (features.separation < 0.0), axis=-1),
        offroad=jnp.max(features.corner_clearance, axis=-1) > 0.0,
        red_light=features.ran_red,
        goal=jnp.where(route_length < STILL, stayed, arrived),
    )


def excess(ride: Ride) -> jax.Array:
    """By how much of themselves the limits of comfort are exceeded, each at most twice, summed [A]."""
    parts = (
        jnp.abs(ride.lateral) / MAX_COMFORT_LATERAL,
        ride.longitudinal / MAX_COMFORT_LONGITUDINAL,
        ride.longitudinal / MIN_COMFORT_LONGITUDINAL,
        jnp.abs(ride.jerk) / MAX_COMFORT_JERK,
        jnp.abs(ride.yaw) / MAX_COMFORT_YAW,
    )
    return sum((jnp.clip(part - 1.0, 0.0, 2.0) for part in parts), start=jnp.zeros_like(ride.jerk))


def reward(
    weights: Weights, events: Events, tally: Tally, features: Features, ride: Ride, route_length: jax.Array
) -> jax.Array:
    """The reward [A] of a step; `tally` is the one before it."""
    metres = jnp.minimum(jnp.maximum(features.s, tally.furthest), jnp.maximum(route_length, tally.furthest))
    total = weights.progress * (metres - tally.furthest)
    total = total + weights.discomfort * excess(ride)
    total = total + weights.haste * jnp.clip(features.braking / HARD - 1.0, 0.0, 2.0)
    total = total + weights.lateral * jnp.minimum(jnp.abs(features.lateral), 4.0)
    total = total + weights.heading * (1.0 - jnp.cos(features.heading_error))
    for name in EVENTS:
        first = getattr(events, name) & ~getattr(tally.happened, name)
        total = total + getattr(weights, name) * first.astype(jnp.float32)
    return total


def score(
    tally: Tally,
    playing: jax.Array,
    events: Events,
    features: Features,
    ride: Ride,
    divergence: jax.Array,
    logged: jax.Array,
) -> Tally:
    """The tally after a step, unchanged for those who are not `playing`; `divergence` counts where `logged`."""
    counts = playing & logged
    number = tally.logged + counts.astype(jnp.int16)
    share = jnp.where(counts, divergence - tally.divergence, 0.0) / jnp.maximum(number, 1).astype(jnp.float32)
    return Tally(
        happened=jax.tree.map(lambda before, now: before | (now & playing), tally.happened, events),
        furthest=jnp.where(playing, jnp.maximum(tally.furthest, features.s), tally.furthest),
        steps=tally.steps + playing.astype(jnp.int16),
        comfortable=tally.comfortable + (playing & (excess(ride) <= 0.0)).astype(jnp.int16),
        divergence=tally.divergence + share,
        logged=number,
    )


def metrics(tally: Tally, route_length: jax.Array) -> dict[str, jax.Array]:
    """An episode's metrics, float32 [A]."""
    happened = tally.happened
    bad = happened.collision | happened.offroad | happened.red_light
    progress = jnp.clip(tally.furthest / jnp.maximum(route_length, STILL), 0.0, 1.0)
    steps = jnp.maximum(tally.steps, 1).astype(jnp.float32)
    return {
        "accuracy": (~bad).astype(jnp.float32),
        "collision": happened.collision.astype(jnp.float32),
        "offroad": happened.offroad.astype(jnp.float32),
        "red_light": happened.red_light.astype(jnp.float32),
        "progress": jnp.where((route_length < STILL) | happened.goal, 1.0, progress),
        "goal": happened.goal.astype(jnp.float32),
        "comfort": tally.comfortable.astype(jnp.float32) / steps,
        "log_divergence": tally.divergence,
    }
