"""The fifteen parts of a step's reward, by the rules of either game ([J], [S])."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.state import SIDE, Tally
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
    """Results of a step, beside its state; int32 but for flags."""

    died: jax.Array  # bool
    completed: jax.Array  # bool: the stage
    won: jax.Array  # bool: the game
    stage: jax.Array  # whose completion is paid
    killed: jax.Array  # enemies; by [S] transmissions, too, and no scheduled ones
    collected: jax.Array  # data siphons
    approach: jax.Array  # steps nearer to the exit; those away from it earn nothing
    lost: jax.Array  # health
    healed: jax.Array  # health
    missed: jax.Array  # float32: resources that a better place to siphon from had


def parts(before: Any, after: Any, action: jax.Array, events: Events) -> jax.Array:
    """float32 [15], in the order of PARTS; their sum is the reward. States are those of either rule set."""

    def number(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    e = after.enemies
    beside = e.alive & e.siphoned & (jnp.abs(e.row - after.row) + jnp.abs(e.col - after.col) == 1)
    gained = number(after.credits - before.credits + after.energy - before.energy)
    values = [
        jnp.float32(-0.01),
        jnp.where(events.completed, jnp.asarray(STAGE)[jnp.clip(events.stage - 1, 0, 7)], 0.0),
        0.5 * number(after.score - before.score),
        0.3 * number(events.killed),
        jnp.maximum(number(events.collected), 0.0),
        0.05 * number(jnp.maximum(events.approach, 0)),
        -number(events.lost),
        number(events.healed),
        jnp.where(events.won, 500.0 + 100.0 * number(after.score), 0.0),
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


def missed(state: Any, cells: Any, walls: jax.Array, mine: jax.Array | None = None) -> jax.Array:
    """float32: credits and energy that the player misses by siphoning from where it stands; 0 without a siphon.

    Only cells count that offer the same data and programs, no less of both resources, and more of one. `cells` are the
    board's of either rule set, `walls` bool [CELLS] its unsiphoned blocks. With `mine`, bool [CELLS], the blocks that
    the player would siphon: if it gets something of a block, only cells from which the same blocks are siphoned.
    """
    new = ((state.programs >> cells.program.astype(jnp.uint32)) & 1) == 0
    points = jnp.left_shift(1, 3 * jnp.maximum(cells.points - 1, 0))  # eight of a value fit; five are the most
    data = jnp.where(walls & (cells.kind == w.DATA), points, 0)
    programs = jnp.where(walls & (cells.kind == w.PROGRAM) & new, jnp.left_shift(1, cells.program), 0)
    standing = cells.kind == w.NONE
    data = jnp.where(standing, cross(data, jnp.add), 0)
    programs = jnp.where(standing, cross(programs, jnp.bitwise_or), 0)
    stocks = jnp.where(standing, cells.credits | cells.energy << 8, 0)
    if mine is not None:
        stocks = stocks | mine.astype(jnp.int32) << 16
    stocks = jnp.where(standing, cross(stocks, jnp.add), 0)
    credits, energy = stocks & 255, stocks >> 8 & 255
    own = SIDE * state.row + state.col
    more_credits, more_energy = credits - credits[own], energy - energy[own]
    better = (data == data[own]) & (programs == programs[own]) & (more_credits >= 0) & (more_energy >= 0)
    better &= (more_credits > 0) | (more_energy > 0)
    if mine is not None:
        same = stocks >> 16
        better &= (same == same[own]) | ((data[own] == 0) & (programs[own] == 0))
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
