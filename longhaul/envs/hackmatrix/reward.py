"""The fifteen parts of a step's reward ([J])."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.actions import Cells
from longhaul.envs.hackmatrix.state import SIDE, State, Tally
from longhaul.spaces import Measure

PARTS = (
    "step_penalty", "stage_completion", "score_gain", "kills", "data_siphon", "distance_shaping", "damage_penalty",
    "hp_recovery", "victory", "death_penalty", "siphon_death_penalty", "resource_gain", "resource_holding",
    "program_waste", "siphon_quality",
)  # fmt: skip

STAGE = np.array([1, 2, 4, 8, 16, 32, 64, 100], np.float32)
"""Reward of completing a stage."""
LOST = -0.5 * np.concatenate([[0.0], np.cumsum(STAGE)]).astype(np.float32)
"""Cost of dying, by completed stages."""


class Events(NamedTuple):
    """Results of a step, beside its state."""

    died: jax.Array
    completed: jax.Array
    way: jax.Array  # steps to the exit before the action
    way_after: jax.Array  # and after all; 0 where there is none
    killed: jax.Array  # int32: enemies
    lost: jax.Array  # int32: health
    won: jax.Array  # int32: health
    missed: jax.Array  # float32: resources that a better place to siphon from had


def parts(before: State, after: State, action: jax.Array, events: Events) -> jax.Array:
    """float32 [15], in the order of PARTS; their sum is the reward."""

    def number(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    e = after.enemies
    beside = e.alive & e.siphoned & (jnp.abs(e.row - after.row) + jnp.abs(e.col - after.col) == 1)
    gained = number(after.credits - before.credits + after.energy - before.energy)
    won = after.stage > w.STAGES
    values = [
        jnp.float32(-0.01),
        jnp.where(events.completed, jnp.asarray(STAGE)[jnp.clip(before.stage - 1, 0, 7)], 0.0),
        0.5 * number(after.score - before.score),
        0.3 * number(events.killed),
        jnp.maximum(number(after.siphons - before.siphons), 0.0),
        0.05 * number(jnp.maximum(events.way - events.way_after, 0)),
        -number(events.lost),
        number(events.won),
        jnp.where(won, 500.0 + 100.0 * number(after.score), 0.0),
        jnp.where(events.died, jnp.asarray(LOST)[jnp.clip(after.stage - 1, 0, 8)], 0.0),
        jnp.where(events.died & jnp.any(beside), -10.0, 0.0),
        0.05 * gained,
        jnp.where(events.completed, 0.01 * number(after.credits + after.energy), 0.0),
        jnp.where((action == w.RESET) & (before.hp == 2), -0.3, 0.0),
        jnp.where(action == w.SIPHON, -0.5 * 0.05 * events.missed, 0.0),
    ]
    return w.join(values)


def metrics(tally: Tally, score: jax.Array) -> dict[str, Measure]:
    """The parts of the return of a game, the shares of actions, and how far it came."""
    yes = jnp.ones((), bool)
    steps = jnp.maximum(tally.moves + tally.siphons + tally.programs, 1).astype(jnp.float32)
    values = {f"reward_{name}": tally.parts[i] for i, name in enumerate(PARTS)}
    for name in ("moves", "siphons", "programs"):
        values[f"{name.removesuffix('s')}_frac"] = getattr(tally, name).astype(jnp.float32) / steps
    values["stage"] = tally.stage.astype(jnp.float32)
    values["score"] = score.astype(jnp.float32)
    return {name: Measure(value, yes) for name, value in values.items()}


def missed(state: State, cells: Cells) -> jax.Array:
    """float32: credits and energy that the player misses by siphoning from where it stands; 0 without a siphon.

    Only cells count that offer the same data and programs, no less of both resources, and more of one.
    """
    walls = w.spread_bits(cells.walls)
    new = ((state.programs >> cells.program.astype(jnp.uint32)) & 1) == 0
    data = jnp.where(walls & (cells.block == w.DATA), jnp.left_shift(1, 3 * jnp.maximum(cells.points - 1, 0)), 0)
    programs = jnp.where(walls & (cells.block == w.PROGRAM) & new, jnp.left_shift(1, cells.program), 0)
    stocks = jnp.where(cells.block == w.NONE, cells.credits | cells.energy << 8, 0)
    standing = cells.block == w.NONE
    data = jnp.where(standing, cross(data, jnp.add), 0)
    programs = jnp.where(standing, cross(programs, jnp.bitwise_or), 0)
    stocks = jnp.where(standing, cross(stocks, jnp.add), 0)
    credits, energy = stocks & 255, stocks >> 8
    own = SIDE * state.row + state.col
    more_credits, more_energy = credits - credits[own], energy - energy[own]
    better = (data == data[own]) & (programs == programs[own]) & (more_credits >= 0) & (more_energy >= 0)
    better &= (more_credits > 0) | (more_energy > 0)
    most = jnp.max(jnp.where(better, more_credits, 0)) + jnp.max(jnp.where(better, more_energy, 0))
    return jnp.where(state.siphons > 0, most, 0).astype(jnp.float32)


def cross(values: jax.Array, join: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """[CELLS]: each cell joined with its four neighbours."""
    grid = jnp.pad(values.reshape(SIDE, SIDE), 1)
    around = [grid[1:-1, 1:-1], grid[2:, 1:-1], grid[:-2, 1:-1], grid[1:-1, 2:], grid[1:-1, :-2]]
    total = around[0]
    for neighbour in around[1:]:
        total = join(total, neighbour)
    return total.reshape(-1)
