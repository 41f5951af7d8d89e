"""Perception of an agent: what it sees of the others: measured with noise, some missed, only within reach, not behind
others.

The truth decides about rewards, ends and scores; only what is observed goes through here. An agent perceives a scene
of its own, in which whoever it does not see is absent; so nothing that is derived from the scene (gaps, headways,
closest approaches) tells of the unseen. All is off by default, and then costs nothing.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from longhaul import prng
from longhaul.driving.sim.config import Sight
from longhaul.driving.sim.features import Pose
from longhaul.driving.sim.geometry import into
from longhaul.driving.sim.road_lookup import Pieces
from longhaul.driving.sim.traffic import Scene
from longhaul.types import Key


def perceive(sight: Sight, here: Scene, pose: Pose, key: Key | None) -> Scene:
    """The scene as one agent perceives it; it knows itself exactly. `key` is of this step: None if nothing is drawn."""
    own = here.slot == pose.slot
    present = here.present
    cos, sin = jnp.cos(pose.heading), jnp.sin(pose.heading)
    x, y = into(here.x - pose.x, here.y - pose.y, cos, sin)
    if sight.limited:
        present = present & within(sight, x, y)
    if sight.occlusion:
        present = present & ~hidden(here, pose, here.present & ~own)
    if sight.mask > 0.0:
        assert key is not None
        present = present & (prng.uniform(jax.random.fold_in(key, 0), here.x.shape) >= sight.mask)
    here = here._replace(present=present | (here.present & own))
    if not any(sight.noise):
        return here
    assert key is not None
    metre, turn, speed = sight.noise
    drawn = jnp.where(own, 0.0, prng.normal(jax.random.fold_in(key, 1), (5, *here.x.shape)))
    heading = here.heading + turn * drawn[2]
    return here._replace(
        x=here.x + metre * drawn[0],
        y=here.y + metre * drawn[1],
        heading=heading,
        cos=jnp.cos(heading),
        sin=jnp.sin(heading),
        vx=here.vx + speed * drawn[3],
        vy=here.vy + speed * drawn[4],
    )


def perceive_road(sight: Sight, pieces: Pieces, key: Key | None) -> Pieces:
    """The pieces of road that one agent perceives: those within its view and not missed."""
    there = pieces.there
    if sight.limited:
        there = there & within(sight, pieces.x, pieces.y)
    if sight.mask > 0.0:
        assert key is not None
        there = there & (prng.uniform(jax.random.fold_in(key, 2), there.shape) >= sight.mask)
    return pieces._replace(there=there)


def within(sight: Sight, x: jax.Array, y: jax.Array) -> jax.Array:
    """bool: whether places in an agent's frame are within its reach and field of view."""
    square = x * x + y * y
    seen = square <= jnp.float32(min(sight.reach, 1e6) ** 2)
    if sight.angle < 2.0 * math.pi:
        seen = seen & (x >= math.cos(0.5 * sight.angle) * jnp.sqrt(square))
    return seen


def hidden(here: Scene, pose: Pose, solid: jax.Array) -> jax.Array:
    """bool [N]: whose middle is not seen from the agent's, because one of the other `solid` [N] boxes stands between.

    Boxes in which the agent's middle lies hide nobody: who is in a collision would see nothing at all.
    """
    # the line of sight in each box's frame: row i is looked at, column j may hide it
    u, v = into(pose.x - here.x, pose.y - here.y, here.cos, here.sin)
    du, dv = into((here.x - pose.x)[:, None], (here.y - pose.y)[:, None], here.cos[None], here.sin[None])
    enter_u, leave_u = _slab(u[None], du, here.half_length[None])
    enter_v, leave_v = _slab(v[None], dv, here.half_width[None])
    enter, leave = jnp.maximum(enter_u, enter_v), jnp.minimum(leave_u, leave_v)
    crosses = (enter < leave) & (enter > 0.0) & (enter < 1.0)
    other = ~jnp.eye(here.x.shape[0], dtype=bool)
    return jnp.any(crosses & other & solid[None], axis=1)


def _slab(start: jax.Array, step: jax.Array, half: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The shares of a line's way at which it enters and leaves |coordinate| <= half."""
    slope = jnp.where(jnp.abs(step) < 1e-6, 1e-6, step)
    one, other = (-half - start) / slope, (half - start) / slope
    return jnp.minimum(one, other), jnp.maximum(one, other)
