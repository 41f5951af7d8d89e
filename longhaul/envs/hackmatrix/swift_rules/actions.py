"""Actions of the player and their effects in the canonical game ([S])."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.envs.hackmatrix import actions
from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.state import CORNERS, SIDE, SLOTS
from longhaul.envs.hackmatrix.swift_rules import state as c
from longhaul.envs.hackmatrix.swift_rules.state import Cells, Enemies, Ground, State


class Outcome(NamedTuple):
    reached: jax.Array  # bool: the exit
    killed: jax.Array  # int32: enemies and transmissions, without scheduled ones
    collected: jax.Array  # bool: a data siphon, by walking


def legal(state: State, ground: Ground) -> jax.Array:
    """bool [ACTIONS]; a move up where nothing is legal, which then passes the turn.

    No game comes to that by itself: each board is joined, so that one neighbour of each cell is free.
    """
    player = c.cell_at(state.row, state.col)
    manned, sent = c.places(state.foes), c.places(state.sent)
    open_ = ~ground.blocks | manned
    near = c.around(player)
    able = {
        w.CRASH: (near & (ground.blocks | manned | sent)).any(),
        w.DEBUG: (manned & ground.blocks).any(),
        w.UNDO: state.history.depth > 0,
        w.EXCH: jnp.bool_(True),  # which costs the 4 credits that it asks for
        w.REDUC: c.total(ground.spawn) > 0,
        w.ATK: state.attacks < 2,
        w.HACK: c.cells(state.siphoned).any(),
    }
    moves = {action: (move(player) & open_).any() for action, move in enumerate(c.MOVES)}
    return actions.mask(state, manned.any(), sent.any(), able, moves)


def act(state: State, ground: Ground, action: jax.Array, words: jax.Array) -> tuple[State, Outcome]:
    """The state after a legal action but UNDO, before the enemies' turn; `words`: 3 random uint32."""
    target = _target(state, ground, action)
    state = state._replace(
        credits=state.credits - actions.w_at(w.CREDITS, action), energy=state.energy - actions.w_at(w.ENERGY, action)
    )
    walked, collected = _walk(state, ground, action, target)
    to_enemy, to_sent, warps = _warp(walked, action, words[0])
    codes = jnp.sum(jnp.where(to_enemy, state.foes, 0) + jnp.where(to_sent, state.sent, 0))
    warped = walked._replace(
        row=jnp.where(warps, codes >> 2 & 7, walked.row), col=jnp.where(warps, codes >> 5 & 7, walked.col)
    )
    siphoned = _siphon(warped, ground, action)
    bought = siphoned._replace(
        **actions.bought(siphoned, action),
        attack=siphoned.attack + (action == w.ATK),
        reduced=siphoned.reduced + (action == w.REDUC),
    )
    player = c.cell_at(state.row, state.col)
    crash = c.around(player).only(action == w.CRASH)
    mass = crash | c.cell_at(warped.row, warped.col).only(warps & jnp.any(to_enemy))
    foes, dead = _strike(bought, ground, action, target, mass, words[1:3])
    p = state.pending
    gone = (p.turns > 0) & (to_sent | (crash | target).has(p.row, p.col))
    delayed = jnp.where(p.turns > 0, jnp.where(action == w.DELAY, 3 << 10, 0), 0)
    done = bought._replace(
        foes=foes,
        sent=jnp.where(gone, 0, state.sent + delayed),
        removed=bought.removed | (crash & ground.blocks).words(),
    )
    cell = SIDE * done.row + done.col
    corner = jnp.asarray(CORNERS)
    moved = (done.row != state.row) | (done.col != state.col)
    reached = moved & ~warps & (cell == corner[state.door]) | warps & (cell == corner[state.exit])
    return done, Outcome(reached, dead + jnp.sum(gone & ~p.scheduled), collected)


def _target(state: State, ground: Ground, action: jax.Array) -> Cells:
    """The cell of the enemy or transmission that a move strikes; no cell for none."""
    player = c.cell_at(state.row, state.col)
    anybody = c.places(state.foes) | c.places(state.sent)
    stops = anybody | ground.blocks
    target = Cells(jnp.uint32(0), jnp.uint32(0))
    for number, move in enumerate(c.MOVES):
        target = target | (c.line(player, stops, move) & anybody).only(action == number)
    return target


def _walk(state: State, ground: Ground, action: jax.Array, target: Cells) -> tuple[State, jax.Array]:
    """The player goes to the next cell if nothing is to be struck; a data siphon is all that it picks up."""
    player, pickup = c.cell_at(state.row, state.col), c.cells(state.pickup)
    entered = Cells(jnp.uint32(0), jnp.uint32(0))
    for number, move in enumerate(c.MOVES):
        entered = entered | move(player).only(action == number)
    entered = (entered & ~ground.blocks).only(~target.any())
    goes = entered.any()
    collected = (pickup & entered).any()
    walked = state._replace(
        row=state.row + jnp.where(goes, actions.w_at(w.DROW, action), 0),
        col=state.col + jnp.where(goes, actions.w_at(w.DCOL, action), 0),
        siphons=state.siphons + collected,
        pickup=(pickup & ~entered).words(),
    )
    return walked, collected


def _warp(state: State, action: jax.Array, word: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One of all enemies and transmissions, bool [SLOTS] each, and whether the player goes there."""
    alive, waits = state.foes > 0, state.sent > 0
    many = jnp.sum(alive)
    total = many + jnp.sum(waits)
    number = (word % jnp.maximum(total, 1).astype(jnp.uint32)).astype(jnp.int32)
    warps = (action == w.WARP) & (total > 0)
    to_enemy, to_sent = alive & (w.rank(alive) == number), waits & (w.rank(waits) == number - many)
    return to_enemy & warps, to_sent & warps, warps


def _siphon(state: State, ground: Ground, action: jax.Array) -> State:
    """The player's cell and the four beside it give what they have, unless they did before."""
    siphons = action == w.SIPHON
    player = c.cell_at(state.row, state.col)
    old = c.cells(state.siphoned)
    cross = (player | c.beside(player)).only(siphons)
    new = (cross & ~old).flags()
    programs = new & (ground.kind == w.PROGRAM)
    # Sums of at most five cells: 45 points, 45 transmissions, 15 credits, 15 energy.
    gains = ground.points | ground.spawn << 8 | ground.credits << 16 | ground.energy << 24
    gains = c.total(jnp.where(new, gains, 0))
    own = jnp.where(programs, jnp.uint32(1) << ground.program.astype(jnp.uint32), np.uint32(0))
    return state._replace(
        score=state.score + (gains & 255),
        pool=state.pool + (gains >> 8 & 255),
        credits=state.credits + (gains >> 16 & 255),
        energy=state.energy + (gains >> 24),
        programs=state.programs | lax.reduce_or(own.reshape(SIDE, SIDE), (0, 1)),
        siphons=state.siphons - siphons,
        siphoned=(old | cross).words(),
        centre=(c.cells(state.centre) | player.only(siphons)).words(),
        interval=jnp.where(siphons, jnp.maximum(state.interval - 1, c.LEAST_INTERVAL), state.interval),
        next_task=state.next_task + jnp.where(siphons, 5, 0),
    )


def _strike(
    state: State, ground: Ground, action: jax.Array, target: Cells, mass: Cells, words: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(codes of the enemies after an action, how many died without scheduled ones).

    `mass`: cells in which everybody dies, of whom the first of each cell counts.
    """
    e = state.enemies
    slot = np.arange(SLOTS)
    after = c.follows(state.foes, e.alive)
    struck = e.alive & ~after & (target & ~c.places(state.sent)).has(e.row, e.col)
    attacked = struck | (action == w.ROW) & (e.row == state.row) | (action == w.COL) & (e.col == state.col)
    attacked |= (action == w.DEBUG) & ground.blocks.has(e.row, e.col)
    attacked |= (action == w.HACK) & c.cells(state.siphoned).has(e.row, e.col)
    away = jnp.abs(e.row - state.row) + jnp.abs(e.col - state.col)
    nearest = jnp.min(jnp.where(e.alive & (e.kind == w.DAEMON), 32 * away + slot, w.FAR))
    bomb = (slot == nearest % 32) & (nearest < w.FAR) & (action == w.D_BOM)
    at = jnp.sum(jnp.where(bomb, state.foes, 0))
    blast = jnp.any(bomb) & (jnp.maximum(jnp.abs(e.row - (at >> 2 & 7)), jnp.abs(e.col - (at >> 5 & 7))) == 1)
    harmed = blast | (action == w.ANTI_V) & (e.kind == w.VIRUS)
    # health left; POLY keeps the harm that was done
    turned = action == w.POLY
    kind = jnp.where(turned, (e.kind + 1 + actions.trits(words)) & 3, e.kind)
    change = jnp.where(kind == w.DAEMON, 3, 2) - jnp.where(e.kind == w.DAEMON, 3, 2)
    hp = e.hp + change - jnp.where(attacked, state.attack, 0) - harmed
    killed_at_once = mass.has(e.row, e.col)
    lives = e.alive & (hp > 0) & ~bomb & ~killed_at_once
    dies = e.alive & ~lives & ~e.scheduled & ~(killed_at_once & after)
    row, col = _shift(state, e, action)
    changed = Enemies(lives, kind, row, col, hp, e.stunned | attacked | harmed, e.siphoned, e.scheduled)
    return c.foes(changed), jnp.sum(dies)


def _shift(state: State, e: Enemies, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows and columns of enemies after PUSH and PULL, which look at no block and no transmission.

    PUSH goes as far away as the border lets it, PULL as near as it comes without entering the player's cell: past the
    corner by rows. Of several that would enter one cell only the first does.
    """
    way_row, way_col = jnp.sign(state.row - e.row), jnp.sign(state.col - e.col)
    row, col = e.row + way_row, e.col + way_col
    hits = (row == state.row) & (col == state.col)
    diagonal = (way_row != 0) & (way_col != 0)
    pulled = (row, jnp.where(hits, e.col, col))
    pushed = (jnp.clip(e.row - way_row, 0, SIDE - 1), jnp.clip(e.col - way_col, 0, SIDE - 1))
    away = action == w.PUSH
    row, col = (jnp.where(away, a, b) for a, b in zip(pushed, pulled, strict=True))
    goes = e.alive & (away | (action == w.PULL) & (~hits | diagonal)) & ((row != e.row) | (col != e.col))
    goes &= ~c.follows(row << 2 | col << 5, goes)
    return jnp.where(goes, row, e.row), jnp.where(goes, col, e.col)
