"""Fate of agents that reach their goal, or fail.

A world's agents are each in one stage, a number kept in the state:

- PLAYING: drives, sees and is seen.
- GONE: its episode is over (or its slot is empty); it is nowhere.
- STANDING: its episode is over; it stands where it ended, an obstacle to all, from the step after the event on. It
  stands at once, whatever its speed was.
- ARRIVED: reached its goal and is put back in the next step; nowhere meanwhile.
- GHOST: was put back, and is not free yet. It drives and sees; nobody sees or meets it, and it collides with nobody.

`Config.goal`, for who reaches its goal: "remove" ends its episode, and it is GONE; "stop" ends it, and it is STANDING;
with "respawn" it goes on: it is paid for the goal, and in the step after it (of which nothing is paid or counted) it is
put to where and how fast its log begins, its route ahead of it once more, as a GHOST. A ghost becomes real after a step
in which nobody real was within CLEARANCE, counting for each what it comes nearer in HEED seconds; only the first of
several in one step, so that two ghosts never become real within each other. An episode then ends by another event or
with the log. Goals that only the log's end decides (nothing to reach) are as with "remove", and so are all where the
log drives.

`Config.crash`, for who fails (by any other event that ends an episode): "remove" or "stop", likewise. Where goal and
failure fall in one step, it failed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from longhaul.driving.sim.features import Features

GONE, STANDING, PLAYING, GHOST, ARRIVED = range(5)
"""Stages, uint8."""


CLEARANCE, HEED = 0.5, 1.0
"""m, s."""


def playing(stage: jax.Array) -> jax.Array:
    """bool: whose episode is running."""
    return stage >= PLAYING


def present(stage: jax.Array) -> jax.Array:
    """bool: whom others see and meet."""
    return (stage == PLAYING) | (stage == STANDING)


def begin(there: jax.Array) -> jax.Array:
    """The stages of an episode's start: who is `there` plays."""
    return jnp.where(there, PLAYING, GONE).astype(jnp.uint8)


def clear(features: Features) -> jax.Array:
    """bool [A]: nobody is near, nor comes near soon; `features` have a leading [A]."""
    f = features
    distance = jnp.maximum(jnp.hypot(f.x, f.y), 0.1)
    closing = jnp.maximum(-(f.x * f.vx + f.y * f.vy) / distance, 0.0)
    return ~jnp.any(f.seen & (f.separation - HEED * closing < CLEARANCE), axis=-1)


def following(
    stage: jax.Array, failed: jax.Array, arrived: jax.Array, over: jax.Array, free: jax.Array, goal: str, crash: str
) -> jax.Array:
    """The stages [A] after a step: who failed, who arrived (each only where that ends an episode or puts back),
    whether the log is over, and who is `clear`."""
    plays = playing(stage)
    if goal == "respawn":
        ready = (stage == GHOST) & free
        first = ready & (jnp.arange(len(stage)) == jnp.argmax(ready))
        stage = jnp.where(first, PLAYING, stage)
        stage = jnp.where(plays & arrived, ARRIVED, stage)
        arrived = jnp.zeros_like(arrived)
    after_goal = STANDING if goal == "stop" else GONE
    after_crash = STANDING if crash == "stop" else GONE
    stage = jnp.where(plays & arrived, after_goal, stage)
    stage = jnp.where(plays & failed, after_crash, stage)
    return jnp.where(plays & over, GONE, stage).astype(jnp.uint8)
