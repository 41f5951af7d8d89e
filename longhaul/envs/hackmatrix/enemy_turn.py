"""The enemies' turn ([J]): transmissions arrive, enemies move and attack, a scheduled transmission is sent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.actions import Cells, crowded, send
from longhaul.envs.hackmatrix.state import SIDE, SLOTS, Enemies, State

INTERVAL = 12
"""Turns between two scheduled transmissions."""


def respond(state: State, cells: Cells, words: jax.Array) -> State:
    """The state after the enemies' turn; `words`: 2 random uint32."""
    state = arrive(state)
    e = state.enemies
    awake = e.alive & ~e.stunned & ~state.step
    e = approach(state, e, cells.walls, awake)
    e = approach(state, e, cells.walls, awake & (e.kind == w.VIRUS))
    away = jnp.abs(e.row - state.row) + jnp.abs(e.col - state.col)
    attackers = jnp.sum(e.alive & ~e.stunned & (away == 1))
    state = state._replace(hp=jnp.maximum(state.hp - attackers, 0), enemies=e)
    state = schedule(state, cells, words)
    return state._replace(enemies=state.enemies._replace(stunned=jnp.zeros(SLOTS, bool)), step=jnp.bool_(False))


def arrive(state: State) -> State:
    """Transmissions count down; those that are due become enemies in free slots, or are lost."""
    p, e = state.pending, state.enemies
    turns = jnp.maximum(p.turns - 1, 0)
    due = (p.turns > 0) & (turns == 0)
    free = ~e.alive
    code = p.kind | p.row << 2 | p.col << 5 | p.siphoned.astype(jnp.int32) << 8
    code = jnp.where(due, code | 1 << 9, 0)
    place = jnp.where(due, w.rank(due), -1)
    code = jnp.sum(jnp.where(place[:, None] == w.rank(free)[None, :], code[:, None], 0), axis=0)
    new = free & (code > 0)
    kind = code & 3
    enemies = Enemies(
        e.alive | new,
        jnp.where(new, kind, e.kind),
        jnp.where(new, (code >> 2) & 7, e.row),
        jnp.where(new, (code >> 5) & 7, e.col),
        jnp.where(new, jnp.where(kind == w.DAEMON, 3, 2), e.hp),
        e.stunned & ~new,
        jnp.where(new, (code >> 8) & 1 > 0, e.siphoned),
    )
    return state._replace(pending=p._replace(turns=turns), enemies=enemies)


def approach(state: State, e: Enemies, walls: jax.Array, moves: jax.Array) -> Enemies:
    """One cell nearer to the player, along the longer way first; a block is passed diagonally, whatever lies there."""
    up, right = state.row - e.row, state.col - e.col
    by_row = jnp.abs(up) >= jnp.abs(right)
    row = e.row + jnp.where(by_row, jnp.sign(up), 0)
    col = e.col + jnp.where(by_row, 0, jnp.sign(right))
    stays = (row == state.row) & (col == state.col)
    hindered = w.has(walls, SIDE * row + col) & (e.kind != w.GLITCH)
    row = jnp.where(hindered, e.row + jnp.sign(up), row)
    col = jnp.where(hindered, e.col + jnp.sign(right), col)
    goes = moves & ~stays
    return e._replace(row=jnp.where(goes, row, e.row), col=jnp.where(goes, col, e.col))


def schedule(state: State, cells: Cells, words: jax.Array) -> State:
    """When it is due, one transmission somewhere free."""
    due = ~state.calm & (state.turn >= state.next_task)
    place, found = w.pick(~crowded(state, cells.walls) & np.uint32((1 << 18) - 1), words[0])
    number = (due & found).astype(jnp.int32)
    return state._replace(
        pending=send(state.pending, number, place, 1, words[1], False),
        next_task=jnp.where(due, state.turn + INTERVAL, state.next_task),
    )
