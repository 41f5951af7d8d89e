"""Insertion of logged tracks that begin in the middle of an episode.

A track begins where a sensor sees somebody first, whatever drives there in a simulation. Agents are elsewhere than in
their log, and nobody can brake for a car that appears on top of him. So where traffic is simulated, a track is inserted
only where there is room, as by SUMO's insertion checks (Lopez et al., "Microscopic traffic simulation using SUMO",
2018) and MetaDrive's filter of overlapping cars:

- It is MARGIN or more away from everybody who drives.
- Where one of the two follows the other in its path, the follower is STANDSTILL and a safe distance behind: that of
  Krauss ("Microscopic modeling of traffic flow", 1998), the way of one step and by how much longer the follower brakes.

Until then the track is absent. It enters at the first later step at which its logged place has room, and follows its
log from there on. So does a track that the log lost for a while. Who is in the world is never removed, and tracks that
replay their log need no room of each other.

Traffic is simulated where several agents are driven or others react. One agent among logs that are replayed meets each
track when the log has it, as in Waymax, and so does every agent where the log drives. Vehicles that react are inserted
by `traffic.free_entrance`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from longhaul.driving.sim.conditional import only_where
from longhaul.driving.sim.features import relative
from longhaul.driving.sim.geometry import separation
from longhaul.driving.sim.idm import STANDSTILL
from longhaul.driving.sim.traffic import MARGIN, REACTING, Partners, Scene

BRAKING = 4.5
"""m/s^2 with which both are taken to brake: SUMO's default, and that of the safety check's firm manoeuvre."""

ALIGNED = 0.7
"""Cosine of the angle between headings from which on two drive the same way."""

CHUNK = 64
"""Tracks for which room is sought at a time: many begin together, of all worlds, and each costs little."""


def simulated(partners: Partners) -> jax.Array:
    """bool scalar: several agents are driven, or others react."""
    return (jnp.sum(partners.driven) > 1) | partners.of(REACTING)


def insert(scene: Scene, begins: jax.Array, drives: jax.Array, dt: jax.Array) -> Scene:
    """`scene` without those whose track `begins` [N] and who have no room beside those who `drives` [N].

    It costs hardly more than what begins.
    """

    def of_track(track: jax.Array, world: Any, _: Any) -> jax.Array:
        return crowded(track, *world)

    given = jax.lax.stop_gradient((jnp.arange(len(begins)), (scene, drives, dt), ()))
    waits = only_where(of_track, CHUNK)(begins, jnp.zeros_like(begins), *given)
    return scene._replace(present=scene.present & ~waits)


def crowded(track: jax.Array, scene: Scene, drives: jax.Array, dt: jax.Array) -> jax.Array:
    """bool scalar: object number `track` has no room, in steps of `dt` seconds, beside those who `drives` [N]."""
    pose = scene.x[track], scene.y[track], scene.cos[track], scene.sin[track]
    others = relative(scene, track, (scene.half_length[track], scene.half_width[track]), pose)
    (length, width), (other_length, other_width) = others.own, others.half
    c, s = jnp.abs(others.cos), jnp.abs(others.sin)
    gap = jnp.abs(others.x) - length - other_length * c - other_width * s
    in_path = jnp.abs(others.y) - width - other_length * s - other_width * c < MARGIN
    speed = scene.vx[track] * pose[2] + scene.vy[track] * pose[3]
    mine, theirs = jnp.maximum(speed, 0.0), jnp.maximum(others.vx + speed, 0.0)
    follower, leader = jnp.where(others.x > 0.0, mine, theirs), jnp.where(others.x > 0.0, theirs, mine)
    longer = jnp.maximum(jnp.square(follower) - jnp.square(leader), 0.0) / (2.0 * BRAKING)
    unsafe = in_path & (others.cos > ALIGNED) & (gap < STANDSTILL + follower * dt + longer)
    return jnp.any(drives & (unsafe | (separation(others) < MARGIN)))
