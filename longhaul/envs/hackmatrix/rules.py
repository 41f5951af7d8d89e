"""Rules of one turn ([J]): the player's moves, siphon and 23 programs; the enemies' arrivals, moves and attacks."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.state import SIDE, SLOTS, Enemies, Pending, State

MOST_SENT = 9
"""Transmissions of one siphon."""


class Cells(NamedTuple):
    """The board of a game, as it is now; each [CELLS]."""

    kind: jax.Array  # int32: NONE, DATA, PROGRAM, QUESTION
    points: jax.Array  # int32
    program: jax.Array  # int32
    credits: jax.Array  # int32, 0 where taken
    energy: jax.Array  # int32
    walls: jax.Array  # uint32 [2]: unsiphoned blocks
    blocks: jax.Array  # uint32 [2]: all blocks


def unpack(code: jax.Array, state: State) -> Cells:
    """The cells of a board's row [CELLS] of the bank."""
    block = code & 3
    taken = w.spread_bits(state.collected)
    blocks = w.gather_bits(block > 0)
    return Cells(
        kind=block,
        points=(code >> 2) & 15,
        program=(code >> 6) & 31,
        credits=jnp.where(taken, 0, (code >> 15) & 3),
        energy=jnp.where(taken, 0, (code >> 17) & 3),
        walls=blocks & ~state.siphoned,
        blocks=blocks,
    )


def in_line(state: State, row: jax.Array, col: jax.Array, present: jax.Array) -> jax.Array:
    """uint32 [SLOTS]: bit 5 * direction + distance - 1 of what stands in a line with the player; 0 otherwise."""
    up, right = row - state.row, col - state.col
    direction = jnp.where(right == 0, jnp.where(up > 0, w.UP, w.DOWN), jnp.where(right < 0, w.LEFT, w.RIGHT))
    distance = jnp.abs(up) + jnp.abs(right)
    inline = present & ((up == 0) | (right == 0)) & (distance > 0)
    return jnp.where(inline, jnp.uint32(1) << (5 * direction + distance - 1).astype(jnp.uint32), jnp.uint32(0))


def legal(state: State, cells: Cells) -> jax.Array:
    """bool [ACTIONS]; a move up where nothing is legal, which then passes the turn."""
    e, p = state.enemies, state.pending
    waiting = p.turns > 0
    lines = jnp.bitwise_or.reduce(in_line(state, e.row, e.col, e.alive) | in_line(state, p.row, p.col, waiting))
    target = lines >> (5 * np.arange(4, dtype=np.uint32)) & 31 > 0
    row, col = state.row + w.DROW, state.col + w.DCOL
    inside = (row >= 0) & (row < SIDE) & (col >= 0) & (col < SIDE)
    wall = w.has(cells.walls, jnp.clip(SIDE * row + col, 0, w.CELLS - 1))
    moves = inside & (~wall | target)

    place = SIDE * e.row + e.col
    near = _neighbours(state, np.arange(w.CELLS) // SIDE, np.arange(w.CELLS) % SIDE)
    around = jnp.any(near & (cells.kind > 0))
    around |= jnp.any(e.alive & _neighbours(state, e.row, e.col))
    around |= jnp.any(waiting & _neighbours(state, p.row, p.col))
    anyone, sent = jnp.any(e.alive), jnp.any(waiting)
    walls = w.spread_bits(cells.walls)
    able = {
        w.CRASH: around,
        w.DEBUG: jnp.any(e.alive & w.has(cells.blocks, place)),
        w.UNDO: state.undo,
        w.EXCH: state.credits > 0,
        w.REDUC: jnp.any(walls & (state.spawn > 0)),
        w.ATK: (state.attacks < 2) & (state.attack < 3),
        w.HACK: jnp.any((cells.blocks & state.siphoned) > 0),
    }
    return mask(state, anyone, sent, able, {action: moves[action] for action in range(4)})


def mask(
    state: Any, anyone: jax.Array, sent: jax.Array, own: dict[int, jax.Array], moves: dict[int, jax.Array]
) -> jax.Array:
    """bool [ACTIONS]: the legal actions of a game of either rule set.

    `anyone`: there is an enemy, `sent`: a transmission. `own`: programs whose condition is the rule set's own.
    """
    e, yes = state.enemies, jnp.bool_(True)
    able = own | {
        w.PUSH: anyone,
        w.PULL: anyone,
        w.WARP: anyone | sent,
        w.POLY: anyone,
        w.WAIT: yes,
        w.ROW: jnp.any(e.alive & (e.row == state.row)),
        w.COL: jnp.any(e.alive & (e.col == state.col)),
        w.STEP: yes,
        w.SIPH: yes,
        w.SHOW: ~state.show,
        w.RESET: state.hp < w.MOST_HP,
        w.CALM: ~state.calm,
        w.D_BOM: jnp.any(e.alive & (e.kind == w.DAEMON)),
        w.DELAY: sent,
        w.ANTI_V: jnp.any(e.alive & (e.kind == w.VIRUS)),
        w.SCORE: state.stage < w.STAGES,
    }
    # A word of bits instead of a concatenation, which the compiler would build element by element.
    can = word(able) & (state.programs << w.FIRST_PROGRAM)
    can &= paid(state.credits, w.CREDITS) & paid(state.energy, w.ENERGY)
    can |= word(moves | {w.SIPHON: state.siphons > 0})
    can = jnp.where(can == 0, jnp.uint32(1 << w.UP), can)
    return ((can >> np.arange(w.ACTIONS, dtype=np.uint32)) & 1).astype(bool)


def word(flags: dict[int, jax.Array]) -> jax.Array:
    """uint32: the flags as bits, by action."""
    return functools.reduce(jnp.bitwise_or, (flag.astype(jnp.uint32) << action for action, flag in flags.items()))


def paid(stock: jax.Array, costs: np.ndarray) -> jax.Array:
    """uint32: the actions that `stock` suffices for, as bits."""
    able = jnp.uint32(0)
    for cost in sorted(set(costs.tolist())):
        word = sum(1 << action for action in range(w.ACTIONS) if costs[action] == cost)
        able = able | jnp.where(stock >= cost, jnp.uint32(word), jnp.uint32(0))
    return able


def _neighbours(state: State, row: jax.Array | np.ndarray, col: jax.Array | np.ndarray) -> jax.Array:
    """True if cells are among the eight around the player."""
    return jnp.maximum(jnp.abs(row - state.row), jnp.abs(col - state.col)) == 1


def act(state: State, cells: Cells, action: jax.Array, words: jax.Array) -> State:
    """The state after the player's action, before the enemies' turn; `words`: 4 random uint32.

    With CELLS more, the transmissions of a siphon lie on cells of their own.
    """
    credits, energy = w_at(w.CREDITS, action), w_at(w.ENERGY, action)
    state = state._replace(credits=state.credits - credits, energy=state.energy - energy)
    walked = _walk(state, cells, action)
    siphoned = _siphon(walked, cells, action, words)
    done = _program(siphoned, cells, action, words)
    enemies, pending = _strike(state, done, cells, action)
    turn = done.turn + ends_turn(action)
    return done._replace(enemies=enemies, pending=pending, turn=turn)


def w_at(table: np.ndarray, action: jax.Array) -> jax.Array:
    """A row of a small table, as a sum, which is faster than a gather."""
    return jnp.sum(jnp.where(np.arange(len(table)) == action, table, 0))


def ends_turn(action: jax.Array) -> jax.Array:
    return (action <= w.SIPHON) | (action == w.WAIT)


def _targets(state: State, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Slots of the enemy and of the transmission that a move strikes; -1 for none, and never both."""
    e, p = state.enemies, state.pending
    field = jnp.where(action < 4, jnp.uint32(31) << (5 * jnp.minimum(action, 3)).astype(jnp.uint32), jnp.uint32(0))
    enemy = in_line(state, e.row, e.col, e.alive) & field
    sent = in_line(state, p.row, p.col, p.turns > 0) & field
    any_enemy, any_sent = jnp.bitwise_or.reduce(enemy), jnp.bitwise_or.reduce(sent)
    near_enemy, near_sent = (word & (~word + 1) for word in (any_enemy, any_sent))
    strikes = (any_enemy > 0) & ((near_enemy <= near_sent) | (any_sent == 0))  # in one cell the enemy is struck
    slot = np.arange(SLOTS)

    def first(lines: jax.Array, near: jax.Array) -> jax.Array:
        return jnp.min(jnp.where(lines == near, slot, SLOTS))

    return (
        jnp.where(strikes, first(enemy, near_enemy), -1),
        jnp.where((any_sent > 0) & ~strikes, first(sent, near_sent), -1),
    )


def _walk(state: State, cells: Cells, action: jax.Array) -> State:
    """The player goes to the next cell if nothing is to be struck, and takes what lies there."""
    enemy, sent = _targets(state, action)
    free = (action < 4) & (enemy < 0) & (sent < 0)
    row, col = state.row + w_at(w.DROW, action), state.col + w_at(w.DCOL, action)
    goes = free & (row >= 0) & (row < SIDE) & (col >= 0) & (col < SIDE)
    cell = jnp.where(goes, SIDE * row + col, 0)
    goes &= ~w.has(cells.walls, cell)
    at_cell = (np.arange(w.CELLS) == cell) & goes
    entered = jnp.where(goes, w.bits(cell), jnp.uint32(0))
    return state._replace(
        row=jnp.where(goes, row, state.row),
        col=jnp.where(goes, col, state.col),
        credits=state.credits + jnp.sum(jnp.where(at_cell, cells.credits, 0)),
        energy=state.energy + jnp.sum(jnp.where(at_cell, cells.energy, 0)),
        siphons=state.siphons + jnp.any((state.pickup & entered) > 0),
        collected=state.collected | entered,
        pickup=state.pickup & ~entered,
    )


def _siphon(state: State, cells: Cells, action: jax.Array, words: jax.Array) -> State:
    """The best block beside the player is siphoned: a program before data, more points before fewer."""
    siphons = action == w.SIPHON
    row, col = state.row + w.DROW, state.col + w.DCOL
    inside = (row >= 0) & (row < SIDE) & (col >= 0) & (col < SIDE)
    cell = jnp.where(inside, SIDE * row + col, 0)
    value = jnp.where(cells.kind == w.PROGRAM, 100, jnp.where(cells.kind == w.DATA, cells.points, 0))
    worth = jnp.where(inside & w.has(cells.walls, cell), value[cell], 0)
    best = jnp.argmax(worth)  # the first of equals
    gives = siphons & (worth[best] > 0)
    chosen = cell[best]
    is_data = gives & (cells.kind[chosen] == w.DATA)
    is_program = gives & (cells.kind[chosen] == w.PROGRAM)
    taken = jnp.where(gives, w.bits(chosen), jnp.uint32(0))
    number = jnp.where(gives, jnp.minimum(state.spawn[chosen].astype(jnp.int32), MOST_SENT), 0)
    place = chosen
    if words.shape[0] > 4:
        lot = jnp.where(w.spread_bits(crowded(state, cells.walls)), 0, (words[4:] >> 8).astype(jnp.int32) | 1)
        lots, places = lax.top_k(lot, MOST_SENT)
        number = jnp.minimum(number, jnp.sum(lots > 0))
        order = jnp.minimum(w.rank(state.pending.turns == 0), MOST_SENT - 1)
        place = jnp.sum(jnp.where(order[:, None] == np.arange(MOST_SENT)[None], places[None], 0), axis=1)
    pending = send(state.pending, number, place, 3, words[3], True)
    own = jnp.uint32(1) << cells.program[chosen].astype(jnp.uint32)
    return state._replace(
        score=state.score + jnp.where(is_data, cells.points[chosen], 0),
        programs=state.programs | jnp.where(is_program, own, jnp.uint32(0)),
        siphons=state.siphons - siphons,
        next_task=state.next_task + jnp.where(gives, 5, 0),
        siphoned=state.siphoned | taken,
        centre=state.centre | jnp.where(gives, w.bits(SIDE * state.row + state.col), jnp.uint32(0)),
        pending=pending,
    )


def crowded(state: State, walls: jax.Array) -> jax.Array:
    """uint32 [2]: the cells on which no transmission begins by chance."""
    e, p = state.enemies, state.pending
    taken = w.occupied(e.row, e.col, e.alive) | w.occupied(p.row, p.col, p.turns > 0)
    return walls | taken | w.bits(SIDE * state.row + state.col)


def send(
    pending: Pending, number: jax.Array, cell: jax.Array, turns: int, random: jax.Array, siphoned: bool
) -> Pending:
    """`number` (at most 9) more transmissions as far as slots are free, at `cell` ([] or by slot), of random kinds."""
    free = pending.turns == 0
    order = w.rank(free)
    new = free & (order < number)
    kind = ((random >> (2 * jnp.minimum(order, 15)).astype(jnp.uint32)) & 3).astype(jnp.int32)
    return Pending(
        jnp.where(new, turns, pending.turns),
        jnp.where(new, kind, pending.kind),
        jnp.where(new, cell // SIDE, pending.row),
        jnp.where(new, cell % SIDE, pending.col),
        jnp.where(new, siphoned, pending.siphoned),
    )


def _program(state: State, cells: Cells, action: jax.Array, words: jax.Array) -> State:
    """Effects of programs beside harming enemies."""
    e, p = state.enemies, state.pending
    away_row, away_col = jnp.sign(e.row - state.row), jnp.sign(e.col - state.col)
    shift = jnp.where(action == w.PUSH, 1, jnp.where(action == w.PULL, -1, 0))
    turned = (action == w.POLY) & e.alive
    kind = jnp.where(turned, (e.kind + 1 + trits(words[1:3])) & 3, e.kind)
    fresh = jnp.where(kind == w.DAEMON, 3, 2)
    to_enemy, to_sent = warp_to(state, words)
    warps = action == w.WARP
    cell = jnp.sum(jnp.where(to_enemy, 8 * e.row + e.col + 64, 0) + jnp.where(to_sent, 8 * p.row + p.col + 64, 0))
    warps &= cell > 0
    walls = w.spread_bits(cells.walls)
    fewer = (action == w.REDUC) & walls & (state.spawn > 0)
    return state._replace(
        **bought(state, action),
        row=jnp.where(warps, cell >> 3 & 7, state.row),
        col=jnp.where(warps, cell & 7, state.col),
        # UNDO restores what was before its cost
        credits=state.credits + jnp.where(action == w.UNDO, 1, 0),
        attack=jnp.where(action == w.ATK, jnp.minimum(state.attack + 1, 3), state.attack),
        undo=action != w.UNDO,
        spawn=state.spawn - fewer.astype(jnp.int8),
        enemies=e._replace(
            alive=e.alive & ~(warps & to_enemy),
            kind=kind,
            hp=jnp.where(turned, fresh, e.hp),
            row=jnp.clip(e.row + shift * away_row, 0, SIDE - 1),
            col=jnp.clip(e.col + shift * away_col, 0, SIDE - 1),
        ),
        pending=p._replace(
            turns=jnp.where(warps & to_sent, 0, p.turns + jnp.where((action == w.DELAY) & (p.turns > 0), 3, 0))
        ),
    )


def bought(state: Any, action: jax.Array) -> dict[str, Any]:
    """Fields of the state that programs change alike by either rule set, and that are neither a place nor an enemy."""
    return {
        "hp": jnp.where(action == w.RESET, w.MOST_HP, state.hp),
        "energy": state.energy + jnp.where(action == w.EXCH, 4, 0),
        "siphons": state.siphons + (action == w.SIPH),
        "attacks": state.attacks + (action == w.ATK),
        "score": state.score + jnp.where(action == w.SCORE, w.STAGES - state.stage, 0),
        "show": state.show | (action == w.SHOW),
        "calm": state.calm | (action == w.CALM),
        "step": state.step | (action == w.STEP),
    }


def warp_to(state: Any, words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool [SLOTS] each: one of all enemies and transmissions, with equal chances."""
    alive, sent = state.enemies.alive, state.pending.turns > 0
    many = jnp.sum(alive)
    number = (words[0] % jnp.maximum(many + jnp.sum(sent), 1).astype(jnp.uint32)).astype(jnp.int32)
    return alive & (w.rank(alive) == number), sent & (w.rank(sent) == number - many)


def trits(words: jax.Array) -> jax.Array:
    """int32 [SLOTS] of 0, 1 or 2 with equal chances: the first digits to base 3 of two random fractions, uint32 [2]."""
    power = np.array([3**i for i in range(SLOTS // 2)], np.uint32)
    fraction = words[:, None] * power[None]
    return (((fraction >> 2) * 3) >> 30).astype(jnp.int32).reshape(SLOTS)


def _strike(before: State, state: State, cells: Cells, action: jax.Array) -> tuple[Enemies, Pending]:
    """Enemies and transmissions after the harm of an action; `before` it the player stood elsewhere."""
    e, p = state.enemies, state.pending
    enemy, sent = _targets(before, action)
    slot = np.arange(SLOTS)
    place = SIDE * e.row + e.col
    on_block = w.has(cells.blocks, place)
    away = jnp.abs(e.row - state.row) + jnp.abs(e.col - state.col)
    daemons = jnp.where(e.alive & (e.kind == w.DAEMON), 32 * away + slot, w.FAR)
    bomb = slot == jnp.min(daemons) % 32
    bomb &= (jnp.min(daemons) < w.FAR) & (action == w.D_BOM)
    at_row, at_col = jnp.sum(jnp.where(bomb, e.row, 0)), jnp.sum(jnp.where(bomb, e.col, 0))
    blast = jnp.any(bomb) & (jnp.maximum(jnp.abs(e.row - at_row), jnp.abs(e.col - at_col)) == 1)
    stuns = (action == w.DEBUG) & on_block | (action == w.ANTI_V) & (e.kind == w.VIRUS) | blast
    hurts = stuns | (action == w.CRASH)
    hurts |= (action == w.ROW) & (e.row == state.row) | (action == w.COL) & (e.col == state.col)
    harm = hurts.astype(jnp.int32)
    harm = harm + jnp.where((action == w.HACK) & on_block & w.has(state.siphoned, place), 2, 0)
    harm = harm + jnp.where(slot == enemy, state.attack, 0)
    hp = jnp.maximum(e.hp - harm, 0)
    alive = e.alive & (hp > 0) & ~bomb
    struck = e._replace(alive=alive, hp=hp, stunned=e.stunned | (stuns & alive))
    return struck, p._replace(turns=jnp.where(slot == sent, 0, p.turns))


# --------------------------------------------------------------------------------------------------- the enemies' turn

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
    place, exists = w.pick(~crowded(state, cells.walls) & np.uint32((1 << 18) - 1), words[0])
    number = (due & exists).astype(jnp.int32)
    return state._replace(
        pending=send(state.pending, number, place, 1, words[1], False),
        next_task=jnp.where(due, state.turn + INTERVAL, state.next_task),
    )
