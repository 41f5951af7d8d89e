"""Rules of one turn of the canonical game ([S]): the player's actions; then the enemies' arrivals, moves and attacks.

Enemies block each other's way, so that one moves after another, in random order: a loop over the enemies of a game is
inherent in these rules. Each looks for its way by waves over sets of cells, for all games of a batch at once. No other
search is in a step but the same waves from the exit (`way`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.rules import bought, mask, trits, w_at, warp_to
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
    return mask(state, manned.any(), sent.any(), able, moves)


def act(state: State, ground: Ground, action: jax.Array, words: jax.Array) -> tuple[State, Outcome]:
    """The state after a legal action but UNDO, before the enemies' turn; `words`: 3 random uint32."""
    target = _target(state, ground, action)
    state = state._replace(
        credits=state.credits - w_at(w.CREDITS, action), energy=state.energy - w_at(w.ENERGY, action)
    )
    walked, collected = _walk(state, ground, action, target)
    to_enemy, to_sent = (slots & (action == w.WARP) for slots in warp_to(walked, words))
    warps = jnp.any(to_enemy | to_sent)
    codes = jnp.sum(jnp.where(to_enemy, state.foes, 0) + jnp.where(to_sent, state.sent, 0))
    warped = walked._replace(
        row=jnp.where(warps, codes >> 2 & 7, walked.row), col=jnp.where(warps, codes >> 5 & 7, walked.col)
    )
    siphoned = _siphon(warped, ground, action)
    paid = siphoned._replace(
        **bought(siphoned, action),
        attack=siphoned.attack + (action == w.ATK),
        reduced=siphoned.reduced + (action == w.REDUC),
    )
    player = c.cell_at(state.row, state.col)
    crash = c.around(player).only(action == w.CRASH)
    mass = crash | c.cell_at(warped.row, warped.col).only(warps & jnp.any(to_enemy))
    foes, dead = _strike(paid, ground, action, target, mass, words[1:3])
    p = state.pending
    gone = (p.turns > 0) & (to_sent | (crash | target).has(p.row, p.col))
    delayed = jnp.where(p.turns > 0, jnp.where(action == w.DELAY, 3 << 10, 0), 0)
    done = paid._replace(
        foes=foes,
        sent=jnp.where(gone, 0, state.sent + delayed),
        removed=paid.removed | (crash & ground.blocks).words(),
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
        row=state.row + jnp.where(goes, w_at(w.DROW, action), 0),
        col=state.col + jnp.where(goes, w_at(w.DCOL, action), 0),
        siphons=state.siphons + collected,
        pickup=(pickup & ~entered).words(),
    )
    return walked, collected


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
    kind = jnp.where(turned, (e.kind + 1 + trits(words)) & 3, e.kind)
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


# --------------------------------------------------------------------------------------------------- the enemies' turn

WAVES = 6
"""Waves between two looks at whether all games have found their way; any number gives the same."""

ATTACKED = 1 << 13
NEW = 1 << 14
"""Bits of a code during a turn."""

NEVER = 2 * SLOTS


def respond(state: State, blocks: Cells, words: jax.Array, found_first: bool) -> tuple[State, jax.Array]:
    """(the state after the enemies' turn, whether a scheduled transmission is due), before any is sent (`send`).

    `words`: 2 * SLOTS random uint32. STEP skips the whole turn. `found_first`: see `environment.FIXES`.
    """
    arrived = _arrive(state)
    moved = _move(arrived, blocks, words.reshape(2, SLOTS), found_first)
    turn = state.turn + 1
    due = ~state.calm & (turn >= state.next_task)
    lasting = ~np.int32(1 << 12 | ATTACKED | NEW)  # who was stunned is so no more
    after = moved._replace(
        foes=moved.foes & lasting,
        turn=turn,
        next_task=jnp.where(due, turn + state.interval, state.next_task),
    )
    skipped = state._replace(step=jnp.zeros_like(state.step))
    after = jax.tree.map(lambda a, b: jnp.where(state.step, a, b), skipped, after)
    return after, due & ~state.step


def _arrive(state: State) -> State:
    """Transmissions count down; those that are due become enemies, behind those that are there, or are lost."""
    sent = jnp.maximum(state.sent - (1 << 10), 0)
    due = (state.sent > 0) & (sent < 1 << 10)
    alive = state.foes > 0
    fresh = state.sent & 0x3FF
    fresh = fresh | jnp.where(fresh & 3 == w.DAEMON, 3, 2) << 10 | NEW
    foes = c.compact(state.foes, alive) | c.compact(fresh, due, jnp.sum(alive))
    return state._replace(foes=foes, sent=jnp.where(due, 0, sent))


_Round = tuple[jax.Array, jax.Array, jax.Array]
"""Loop over the enemies of a game: (int32, how many have had their move; codes int32 [SLOTS]; health)."""


def _move(state: State, blocks: Cells, words: jax.Array, found_first: bool) -> State:
    """Each enemy that is neither stunned nor new attacks the player beside it, or takes a step; viruses twice.

    Who attacked is done. Both rounds are one loop: a second order follows the first.
    """
    moves = (state.foes > 0) & (state.foes & (NEW | 1 << 12) == 0)
    first = _order(words[0] >> 16, moves)
    many = jnp.sum(moves)
    twice = moves & (state.foes & 3 == w.VIRUS)
    second = _order(words[0] & 0xFFFF, twice)
    second = jnp.where(twice, second + many, NEVER)
    total = many + jnp.sum(twice)
    sent = c.places(state.sent)
    player = c.cell_at(state.row, state.col)

    def move(carried: _Round) -> _Round:
        number, foes, hp = carried
        now, again = first == number, second == number
        moving = now | again
        lot = jnp.where(now, words[1] >> 16, words[1] & 0xFFFF)
        picked = jnp.sum(jnp.where(moving, foes.astype(jnp.uint32) | lot << 15, np.uint32(0)), dtype=jnp.uint32)
        code, lot = (picked & 0x7FFF).astype(jnp.int32), picked >> 15
        row, col = code >> 2 & 7, code >> 5 & 7
        acts = (code > 0) & (code & ATTACKED == 0)
        beside = jnp.abs(row - state.row) + jnp.abs(col - state.col) == 1
        taken = c.places(jnp.where(moving, 0, foes)) | sent
        steps = _step(code, taken, blocks, player, state, acts & ~beside, lot, found_first)
        up = jnp.where(steps == w.UP, 1, jnp.where(steps == w.DOWN, -1, 0))
        right = jnp.where(steps == w.RIGHT, 1, jnp.where(steps == w.LEFT, -1, 0))
        attacks = acts & beside
        changed = code + (up << 2) + (right << 5) + jnp.where(attacks, ATTACKED, 0)
        return number + 1, jnp.where(moving, changed, foes), jnp.maximum(hp - attacks, 0)

    start = jnp.zeros_like(total), state.foes, state.hp
    _, foes, hp = lax.while_loop(lambda carried: carried[0] < total, move, start)
    return state._replace(foes=foes, hp=hp)


def _order(keys: jax.Array, which: jax.Array) -> jax.Array:
    """Ranks int32 [SLOTS], 0, 1, ..., of 16-bit keys among the slots where `which` is True; NEVER for others."""
    key = c.once(jnp.where(which, keys.astype(jnp.int32) << 5 | np.arange(SLOTS, dtype=np.int32), 1 << 21))
    before = key[None] < key[:, None]
    return jnp.where(which, jnp.sum(before, axis=1), NEVER)


def _step(
    code: jax.Array,
    taken: Cells,
    blocks: Cells,
    player: Cells,
    state: State,
    wanted: jax.Array,
    lot: jax.Array,
    found_first: bool,
) -> jax.Array:
    """The direction of an enemy's step, int32; 4 for none.

    One that shortens the way past blocks (which a glitch walks over) and everybody; where there is no such way, one
    that shortens the way past blocks alone; where there is none, any free one, as near to the player as can be. Among
    equally good ones a cryptog prefers to be out of the player's row and column, a glitch to be on a block; the rest
    is chance, by a 16-bit random number.
    """
    kind, row, col = code & 3, code >> 2 & 7, code >> 5 & 7
    me = c.cell_at(row, col)
    near = c.beside(me)
    walls = blocks.only(kind != w.GLITCH)
    free = ~(walls | taken)
    starts = wanted & ~(walls & player).any() & ~(me & player).any()
    past_all, past_blocks = _first_steps(near, player.only(starts), free, ~walls)
    steps = [move(me) for move in c.MOVES]
    if found_first:
        past_blocks = _first(steps, past_blocks)
    good = past_blocks & ~taken
    good = Cells(*(jnp.where(past_all.any(), a, b) for a, b in zip(past_all, good, strict=True)))
    if found_first:
        good = _first(steps, good)
    can = [(step & good).any() for step in steps]
    chosen = _draw(_preferred(kind, row, col, steps, can, blocks, state), lot)
    away = [jnp.abs(row + w.DROW[i] - state.row) + jnp.abs(col + w.DCOL[i] - state.col) for i in range(4)]
    away = [jnp.where((step & free).any(), far, w.FAR) for step, far in zip(steps, away, strict=True)]
    nearest, least = jnp.where(away[0] < w.FAR, 0, 4), away[0]
    for i in range(1, 4):
        nearest, least = jnp.where(away[i] < least, i, nearest), jnp.minimum(least, away[i])
    return jnp.where(wanted, jnp.where(chosen < 4, chosen, nearest), 4)


def _preferred(
    kind: jax.Array,
    row: jax.Array,
    col: jax.Array,
    steps: list[Cells],
    can: list[jax.Array],
    blocks: Cells,
    state: State,
) -> list[jax.Array]:
    """bool by direction: those of the steps that an enemy can take which its kind prefers, or all of them."""
    likes = []
    for i, step in enumerate(steps):
        unseen = (row + w.DROW[i] != state.row) & (col + w.DCOL[i] != state.col)
        on_block = (step & blocks).any()
        likes.append(can[i] & ((kind == w.GLITCH) & on_block | (kind == w.CRYPTOG) & unseen))
    choosy = likes[0] | likes[1] | likes[2] | likes[3]
    return [jnp.where(choosy, liked, flag) for liked, flag in zip(likes, can, strict=True)]


def _first_steps(near: Cells, start: Cells, free: Cells, open_: Cells) -> tuple[Cells, Cells]:
    """The cells of `near` that waves from `start` reach first, through `free` and through `open_`."""

    def wave(carried: tuple[Cells, Cells, Cells, Cells]) -> tuple[Cells, Cells, Cells, Cells]:
        ring, wide, hit, wide_hit = carried
        ring, wide = ring | c.beside(ring) & free, wide | c.beside(wide) & open_
        hit = hit | (ring & near).only(~hit.any())
        wide_hit = wide_hit | (wide & near).only(~wide_hit.any())
        return ring, wide, hit, wide_hit

    def spread(carried: tuple[tuple[Cells, Cells, Cells, Cells], jax.Array]) -> tuple[Any, jax.Array]:
        before, _ = carried
        after = before
        for _ in range(WAVES):
            after = wave(after)
        grew, wide_grew = _differs(before[0], after[0]), _differs(before[1], after[1])
        return after, ~after[2].any() & (grew | wide_grew & ~after[3].any())

    none = start.only(jnp.bool_(False))
    (_, _, hit, wide_hit), _ = lax.while_loop(
        lambda carried: carried[1], spread, ((start, start, none, none), start.any())
    )
    return hit, wide_hit


def _differs(a: Cells, b: Cells) -> jax.Array:
    return (a.low != b.low) | (a.high != b.high)


def _first(steps: list[Cells], good: Cells) -> Cells:
    """The first of `steps` that is in `good`, as a set."""
    chosen = good.only(jnp.bool_(False))
    for step in steps:
        chosen = chosen | (step & good).only(~chosen.any())
    return chosen


def _draw(can: list[jax.Array], lot: jax.Array) -> jax.Array:
    """int32: one of the directions with a flag, with equal chances by a 16-bit random number; 4 for none."""
    count = sum((flag.astype(jnp.uint32) for flag in can), jnp.uint32(0))
    number = lot * count >> 16
    chosen, seen = jnp.int32(4), jnp.uint32(0)
    for i, flag in enumerate(can):
        chosen = jnp.where(flag & (seen == number), i, chosen)
        seen = seen + flag
    return chosen


def send(state: State, blocks: Cells, number: jax.Array, origin: jax.Array, words: jax.Array) -> State:
    """`number` more transmissions, one turn away, on cells without anybody, as far as cells and slots are free.

    First out of the player's line of fire, then anywhere; by chance among equals. (The Swift game draws a hundred
    times for each, and may miss the last cells.) `origin`: bits of ORIGIN by number, int32 [SLOTS]; `words`: 20 random
    uint32.
    """
    player, manned = c.cell_at(state.row, state.col), c.places(state.foes)
    empty = ~(player | manned | c.places(state.sent) | blocks)
    fire = player
    for move in c.MOVES:
        fire = fire | c.line(player, manned | blocks, move)
    keys = (words[:18, None] >> np.array([[0, 16]], np.uint32)).reshape(-1) & 0xFFFF
    key = (keys.astype(jnp.int32) + 1) << 6 | np.arange(w.CELLS, dtype=np.int32)
    key = jnp.where(empty.flags(), jnp.where(fire.flags(), key, key | 1 << 24), 0)
    key = c.once(key)
    place = c.once(c.total((key[None] > key[:, None]).astype(jnp.int32)))  # 0 is the first choice
    number = jnp.minimum(number, c.total((key > 0).astype(jnp.int32)))
    waits = state.sent > 0
    many = jnp.sum(waits)
    order = np.arange(SLOTS) - many
    new = (order >= 0) & (order < number)
    cell = c.total(jnp.where(place[None] == order[:, None], np.arange(w.CELLS), 0))
    slot = np.arange(SLOTS)
    kind = (jnp.where(slot < 16, words[18], words[19]) >> (2 * (slot % 16)).astype(np.uint32) & 3).astype(jnp.int32)
    row = cell // SIDE
    code = kind | row << 2 | (cell - SIDE * row) << 5 | 1 << 10
    origins = jnp.sum(jnp.where(np.arange(SLOTS)[None] == order[:, None], origin[None], 0), axis=1)
    return state._replace(sent=jnp.where(new, code | origins, c.compact(state.sent, waits)))


def way(blocks: Cells, start: Cells, exit_: Cells) -> jax.Array:
    """int32: steps from one cell to another past blocks; it may begin and end on one. 0 where there is no way."""

    def spread(carried: tuple[Cells, jax.Array, jax.Array, jax.Array]) -> tuple[Cells, jax.Array, jax.Array, jax.Array]:
        before, steps, arrived, _ = carried
        reached = before
        for _ in range(WAVES):
            steps = steps + ~arrived
            grown = reached | c.beside(reached)
            arrived = arrived | (grown & start).any()
            reached = grown & ~blocks | exit_
        return reached, steps, arrived, ~arrived & _differs(before, reached)

    reachable = (start & exit_).any()
    zero = jnp.zeros((), jnp.int32)
    _, steps, arrived, _ = lax.while_loop(lambda carried: carried[3], spread, (exit_, zero, reachable, ~reachable))
    return jnp.where(arrived, steps, 0)
