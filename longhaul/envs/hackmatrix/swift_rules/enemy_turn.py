"""The enemies' turn of the canonical game ([S]): transmissions arrive, enemies attack or approach, more are sent.

Here enemies block each other's way, so that one moves after another, in random order: a loop over the enemies of a
game, as long as it has some (of a batch, as many as the fullest game has), is inherent in these rules. Each looks for
its way by waves over sets of cells, two words each, for all games of a batch at once. No other search is in a step but
the same waves from the exit (`way`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.state import SIDE, SLOTS
from longhaul.envs.hackmatrix.swift_rules import state as c
from longhaul.envs.hackmatrix.swift_rules.state import Cells, State

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
    """int32 [SLOTS]: 0, 1, ... in the order of 16-bit keys for slots that `which` says; NEVER for others."""
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

    there = (start & exit_).any()
    zero = jnp.zeros((), jnp.int32)
    _, steps, arrived, _ = lax.while_loop(lambda carried: carried[3], spread, (exit_, zero, there, ~there))
    return jnp.where(arrived, steps, 0)
