"""The fifteen parts of a step's reward in the canonical game ([S])."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.reward import LOST, STAGE, cross
from longhaul.envs.hackmatrix.state import SIDE
from longhaul.envs.hackmatrix.swift_rules.state import Ground, State, beside, cell_at, cells


class Events(NamedTuple):
    """Results of a step, beside its state."""

    valid: jax.Array  # whether the action was legal
    died: jax.Array
    completed: jax.Array
    won: jax.Array
    way: jax.Array  # steps to the exit before the action
    way_after: jax.Array  # and after all; 0 where there is none
    killed: jax.Array  # int32: enemies and transmissions, but scheduled ones
    collected: jax.Array  # a data siphon was walked on
    missed: jax.Array  # float32: resources that a better place to siphon from had


def parts(before: State, after: State, action: jax.Array, events: Events, last_stage: bool) -> jax.Array:
    """float32 [15], in the order of `reward.PARTS`; their sum is the reward, which is 0 for an illegal action.

    `last_stage`: whether the eighth stage is worth its own 100; the Swift game, which leaves the number of the stage
    at 8, pays the 64 of the seventh.
    """

    def number(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    e = after.enemies
    adjacent = e.alive & e.siphoned & (jnp.abs(e.row - after.row) + jnp.abs(e.col - after.col) == 1)
    gained = number(after.credits - before.credits + after.energy - before.energy)
    approach = jnp.where(events.completed, events.way, events.way - events.way_after)
    stage = before.stage if last_stage else jnp.minimum(before.stage, w.STAGES - 1)
    values = [
        jnp.float32(-0.01),
        jnp.where(events.completed, jnp.asarray(STAGE)[stage - 1], 0.0),
        0.5 * number(after.score - before.score),
        0.3 * number(events.killed),
        number(events.collected),
        jnp.where(events.died, 0.0, 0.05 * number(jnp.maximum(approach, 0))),
        -number(jnp.maximum(before.hp - after.hp, 0)),
        number(jnp.maximum(after.hp - before.hp, 0)),
        jnp.where(events.won, 500.0 + 100.0 * number(after.score), 0.0),
        jnp.where(events.died, jnp.asarray(LOST)[after.stage - 1], 0.0),
        jnp.where(events.died & jnp.any(adjacent), -10.0, 0.0),
        0.05 * gained,
        jnp.where(events.completed, 0.01 * number(after.credits + after.energy), 0.0),
        jnp.where((action == w.RESET) & (before.hp == 2), -0.3, 0.0),
        jnp.where(action == w.SIPHON, -0.5 * 0.05 * events.missed, 0.0),
    ]
    return jnp.where(events.valid, w.join(values), 0.0)


def missed(state: State, ground: Ground) -> jax.Array:
    """float32: credits and energy that the player misses by siphoning from where it stands.

    Only cells count that offer the same data and programs, no less of both resources, and more of one; and if it gets
    something of a block, only those from which the same blocks are siphoned.
    """
    walls = (ground.blocks & ~cells(state.siphoned)).flags()
    new = ((state.programs >> ground.program.astype(jnp.uint32)) & 1) == 0
    points = jnp.left_shift(1, 3 * jnp.maximum(ground.points - 1, 0))  # eight of a value fit; five are the most
    data = jnp.where(walls & (ground.kind == w.DATA), points, 0)
    programs = jnp.where(walls & (ground.kind == w.PROGRAM) & new, jnp.left_shift(1, ground.program), 0)
    player = cell_at(state.row, state.col)
    mine = ((player | beside(player)).flags() & walls).astype(jnp.int32)
    standing = ground.kind == w.NONE
    data = jnp.where(standing, cross(data, jnp.add), 0)
    programs = jnp.where(standing, cross(programs, jnp.bitwise_or), 0)
    stocks = jnp.where(standing, ground.credits | ground.energy << 8, 0) | mine << 16
    stocks = jnp.where(standing, cross(stocks, jnp.add), 0)
    credits, energy, same = stocks & 255, stocks >> 8 & 255, stocks >> 16
    own = SIDE * state.row + state.col
    more_credits, more_energy = credits - credits[own], energy - energy[own]
    better = (data == data[own]) & (programs == programs[own]) & (more_credits >= 0) & (more_energy >= 0)
    better &= (more_credits > 0) | (more_energy > 0)
    better &= (same == same[own]) | ((data[own] == 0) & (programs[own] == 0))
    better &= standing
    most = jnp.max(jnp.where(better, more_credits, 0)) + jnp.max(jnp.where(better, more_energy, 0))
    return jnp.where(state.siphons > 0, most, 0).astype(jnp.float32)
