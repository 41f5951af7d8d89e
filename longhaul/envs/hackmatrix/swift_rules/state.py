"""The world of the canonical game ([S]): sets of cells as two words, its slots as codes, and the state of one game.

Beside what `hackmatrix.state` says: a slot of an enemy or a transmission is one int32, so that moving, ordering and
remembering slots costs one array each; 0 is a free slot. Slots are kept in the order of arrival, which decides who
comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.state import CELLS, SIDE, Tally

SPAWN = np.array([4, 4, 6, 5, 3, 1, 4, 2, 2, 3, 4, 7, 3, 2, 2, 6, 4, 4, 4, 5, 3, 8, 4], np.int32)
"""Transmissions that siphoning a program brings, by program."""

DEPTH = 4
"""Turns that UNDO can go back, one after the other; the Swift game remembers all of them."""

INTERVAL = 12
"""Turns between two scheduled transmissions in the first stage."""
LEAST_INTERVAL = 4

_HALF = np.uint32((1 << 18) - 1)
_NOT_LEFT = np.uint32(0b111110_111110_111110)
_NOT_RIGHT = np.uint32(0b011111_011111_011111)


class Cells(NamedTuple):
    """A set of cells: rows 0 to 2 and rows 3 to 5, cell 6 * row + column of each half as a bit of uint32."""

    low: Any
    high: Any

    def __and__(self, other: Cells) -> Cells:
        return Cells(self.low & other.low, self.high & other.high)

    def __or__(self, other: Cells) -> Cells:
        return Cells(self.low | other.low, self.high | other.high)

    def __invert__(self) -> Cells:
        return Cells(~self.low & _HALF, ~self.high & _HALF)

    def any(self) -> jax.Array:
        """True if it has a cell."""
        return (self.low | self.high) > 0

    def only(self, yes: jax.Array) -> Cells:
        """Itself, or no cell."""
        return Cells(jnp.where(yes, self.low, np.uint32(0)), jnp.where(yes, self.high, np.uint32(0)))

    def words(self) -> jax.Array:
        """uint32 [2]."""
        return w.join([self.low, self.high])

    def flags(self) -> jax.Array:
        """bool [CELLS]."""
        place = np.arange(CELLS)
        word = jnp.where(place < 18, self.low, self.high)
        return ((word >> (place % 18).astype(np.uint32)) & 1).astype(bool)

    def has(self, row: jax.Array, col: jax.Array) -> jax.Array:
        """True if cells, of any shape, are in it."""
        upper = row >= 3
        place = SIDE * (row - jnp.where(upper, 3, 0)) + col
        return ((jnp.where(upper, self.high, self.low) >> place.astype(jnp.uint32)) & 1).astype(bool)


def cells(words: jax.Array) -> Cells:
    """The set of two words, uint32 [2]."""
    return Cells(words[0], words[1])


def up(a: Cells) -> Cells:
    return Cells((a.low << 6) & _HALF, ((a.high << 6) & _HALF) | (a.low >> 12))


def down(a: Cells) -> Cells:
    return Cells((a.low >> 6) | ((a.high << 12) & _HALF), a.high >> 6)


def left(a: Cells) -> Cells:
    return Cells((a.low & _NOT_LEFT) >> 1, (a.high & _NOT_LEFT) >> 1)


def right(a: Cells) -> Cells:
    return Cells((a.low & _NOT_RIGHT) << 1, (a.high & _NOT_RIGHT) << 1)


MOVES: tuple[Callable[[Cells], Cells], ...] = (up, down, left, right)
"""A set moved by one cell, in the order of the actions; what leaves the board is gone."""


def beside(a: Cells) -> Cells:
    """The cells above, below, left and right of a set's."""
    return up(a) | down(a) | left(a) | right(a)


def around(a: Cells) -> Cells:
    """The eight cells around one."""
    flat = a | left(a) | right(a)
    return (flat | up(flat) | down(flat)) & ~a


def cell_at(row: jax.Array, col: jax.Array) -> Cells:
    """The set of one cell."""
    upper = row >= 3
    bit = jnp.uint32(1) << (SIDE * (row - jnp.where(upper, 3, 0)) + col).astype(jnp.uint32)
    return Cells(jnp.where(upper, np.uint32(0), bit), jnp.where(upper, bit, np.uint32(0)))


def line(start: Cells, stops: Cells, move: Callable[[Cells], Cells]) -> Cells:
    """The cells from `start` in one direction up to the first of `stops`, with it."""
    reached = move(start)
    seen = reached
    for _ in range(SIDE - 2):
        reached = move(reached & ~stops)
        seen = seen | reached
    return seen


class Enemies(NamedTuple):
    """Enemies, from their codes, each [SLOTS]."""

    alive: Any  # bool
    kind: Any  # int32
    row: Any  # int32
    col: Any  # int32
    hp: Any  # int32
    stunned: Any  # bool
    siphoned: Any  # bool: came of a siphon
    scheduled: Any  # bool: came of a scheduled transmission; killing it is worth nothing


class Pending(NamedTuple):
    """Transmissions, from their codes, each [SLOTS]."""

    turns: Any  # int32, left; 0 is a free slot
    kind: Any  # int32
    row: Any  # int32
    col: Any  # int32
    siphoned: Any  # bool
    scheduled: Any  # bool


ORIGIN = 3 << 8
"""The bits of a code that say where an enemy came from: of a siphon, scheduled."""


def enemies(foes: Any) -> Enemies:
    """Codes [SLOTS]: kind in bits 0-1, row 2-4, column 5-7, of a siphon 8, scheduled 9, health 10-11, stunned 12."""
    hp = (foes >> 10) & 3
    kind, row, col = foes & 3, (foes >> 2) & 7, (foes >> 5) & 7
    return Enemies(hp > 0, kind, row, col, hp, foes >> 12 & 1 > 0, foes >> 8 & 1 > 0, foes >> 9 & 1 > 0)


def foes(e: Enemies) -> jax.Array:
    """int32 [SLOTS]: the reverse of `enemies`."""
    code = e.kind | e.row << 2 | e.col << 5 | e.siphoned.astype(jnp.int32) << 8 | e.scheduled.astype(jnp.int32) << 9
    return jnp.where(e.alive, code | e.hp << 10 | e.stunned.astype(jnp.int32) << 12, 0)


def pending(sent: Any) -> Pending:
    """Codes [SLOTS]: as those of enemies up to bit 9, then the turns left."""
    kind, row, col = sent & 3, (sent >> 2) & 7, (sent >> 5) & 7
    return Pending(sent >> 10, kind, row, col, sent >> 8 & 1 > 0, sent >> 9 & 1 > 0)


def places(codes: jax.Array) -> Cells:
    """The cells in which enemies or transmissions are, by their codes [SLOTS]."""
    each = cell_at(codes >> 2 & 7, codes >> 5 & 7).only(codes > 0)
    return Cells(*(jnp.bitwise_or.reduce(half) for half in each))


class History(NamedTuple):
    """The last DEPTH ends of an enemies' turn, as a ring, to which UNDO goes back.

    An UNDO right after such an end gives back only its own cost, the next one goes back a turn. It restores the player,
    enemies, transmissions and the board, also that of an earlier stage with its exit; not the number of the stage, the
    time of the next scheduled transmission, nor where enemies came from, as in the Swift game.
    """

    depth: jax.Array  # int32: how many are remembered
    top: jax.Array  # int32: place of the last
    numbers: jax.Array  # int32 [DEPTH, 10], see `remember`
    sets: jax.Array  # uint32 [DEPTH, 8]
    foes: jax.Array  # int32 [DEPTH, SLOTS]
    sent: jax.Array  # int32 [DEPTH, SLOTS]


class State(NamedTuple):
    """One game. Scalars are int32 or bool; names that the trainer's State has, too, mean the same."""

    row: jax.Array
    col: jax.Array
    hp: jax.Array
    credits: jax.Array
    energy: jax.Array
    siphons: jax.Array
    attack: jax.Array
    score: jax.Array
    programs: jax.Array  # uint32
    stage: jax.Array  # 1 .. 8; a won game stays in 8
    turn: jax.Array  # of this stage
    next_task: jax.Array
    interval: jax.Array  # turns between two scheduled transmissions
    pool: jax.Array  # transmissions that the next enemies' turn brings, of blocks that were siphoned
    attacks: jax.Array
    show: jax.Array
    calm: jax.Array
    step: jax.Array
    over: jax.Array
    board: jax.Array  # row of the bank
    exit: jax.Array  # 0 .. 3: the corner that distances and WARP mean
    door: jax.Array  # 0 .. 3: the corner that walking in completes the stage; another one only after some UNDO
    reduced: jax.Array  # REDUC used on this board
    siphoned: jax.Array  # uint32 [2]: cells, with and without a block
    centre: jax.Array  # uint32 [2]
    removed: jax.Array  # uint32 [2]: blocks that are gone
    pickup: jax.Array  # uint32 [2]
    foes: jax.Array  # int32 [SLOTS]
    sent: jax.Array  # int32 [SLOTS]
    history: History
    tally: Tally

    @property
    def enemies(self) -> Enemies:
        return enemies(self.foes)

    @property
    def pending(self) -> Pending:
        return pending(self.sent)


class Ground(NamedTuple):
    """The board of a game, as it is now; each int32 [CELLS] but for the last."""

    kind: jax.Array  # NONE, DATA, PROGRAM; of a question block, what it will turn out to be
    hidden: jax.Array  # bool: a question block that was not siphoned
    points: jax.Array
    program: jax.Array
    spawn: jax.Array
    credits: jax.Array
    energy: jax.Array
    blocks: Cells


def ground(code: jax.Array, blocks: jax.Array, state: State) -> Ground:
    """The cells of a board's row of the bank: codes [CELLS] and the set of its blocks, uint32 [2]."""
    siphoned = cells(state.siphoned)
    standing = cells(blocks) & ~cells(state.removed)
    present, taken = standing.flags(), siphoned.flags()
    block = jnp.where(present, code & 3, w.NONE)
    points = (code >> 2) & 15
    return Ground(
        kind=jnp.where(block == w.QUESTION, jnp.where(points > 0, w.DATA, w.PROGRAM), block),
        hidden=(block == w.QUESTION) & ~taken,
        points=jnp.where(present, points, 0),
        program=(code >> 6) & 31,
        spawn=jnp.where(present & ~taken, jnp.maximum(((code >> 11) & 15) - state.reduced, 0), 0),
        credits=jnp.where(taken, 0, (code >> 15) & 3),
        energy=jnp.where(taken, 0, (code >> 17) & 3),
        blocks=standing,
    )


def once(values: jax.Array) -> jax.Array:
    """The same int32 or uint32 below the type's maximum, computed once.

    XLA:CPU computes cheap values again wherever they are used, in a table of pairs for each pair; a remainder is not
    cheap to it.
    """
    return lax.rem(values, jnp.full_like(values, jnp.iinfo(values.dtype).max))


def total(values: jax.Array) -> jax.Array:
    """The sum of int32 over the cells, the last axis; XLA:CPU is slow at sums of more than 32 values."""
    return jnp.sum(values.reshape(*values.shape[:-1], SIDE, SIDE), axis=(-2, -1))


def compact(codes: jax.Array, which: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """Codes int32 [SLOTS] where `which` is True, one after the other from slot `first` on; what is beyond is lost."""
    place = once(jnp.where(which, w.rank(which) + first, w.FAR))
    codes = once(codes)
    moves = place[:, None] == np.arange(w.SLOTS)[None]
    return jnp.sum(jnp.where(moves, codes[:, None], 0), axis=0)


def follows(codes: jax.Array, present: jax.Array) -> jax.Array:
    """bool [SLOTS]: whether an earlier slot is in the same cell, by codes that are `present`."""
    place = once(jnp.where(present, codes & 0xFC, 256 + np.arange(w.SLOTS)))
    earlier = np.tri(w.SLOTS, k=-1, dtype=bool)
    return jnp.any((place[:, None] == place[None]) & earlier, axis=1)


# ----------------------------------------------------------------------------------------------------------------- undo

_NUMBERS = ("credits", "energy", "siphons", "score", "turn", "board", "reduced", "attack")
_SETS = ("siphoned", "centre", "removed", "pickup")
_SMALL = (("row", 3), ("col", 3), ("hp", 2), ("show", 1), ("calm", 1), ("attacks", 2), ("door", 2))
"""Numbers that share a word, with their bits."""


def no_history() -> History:
    zero = jnp.zeros((), jnp.int32)
    return History(
        zero, zero, jnp.zeros((DEPTH, 2 + len(_NUMBERS)), jnp.int32), jnp.zeros((DEPTH, 2 * len(_SETS)), jnp.uint32),
        jnp.zeros((DEPTH, w.SLOTS), jnp.int32), jnp.zeros((DEPTH, w.SLOTS), jnp.int32),
    )  # fmt: skip


def remember(state: State, happens: jax.Array) -> History:
    """The history with `state` as its last entry, or as it is."""
    past = state.history
    small, place = jnp.int32(0), 0
    for name, bits in _SMALL:
        small = small | getattr(state, name).astype(jnp.int32) << place
        place += bits
    programs = lax.bitcast_convert_type(state.programs, jnp.int32)
    numbers = w.join([small, programs, *(getattr(state, name) for name in _NUMBERS)])
    sets = w.join([getattr(state, name)[i] for name in _SETS for i in range(2)])
    top = jnp.where(happens, (past.top + 1) % DEPTH, past.top)
    at_top = ((np.arange(DEPTH) == top) & happens)[:, None]

    def put(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(at_top, new[None], old)

    return History(
        jnp.where(happens, jnp.minimum(past.depth + 1, DEPTH), past.depth),
        top,
        put(numbers, past.numbers),
        put(sets, past.sets),
        put(state.foes & ~np.int32(ORIGIN), past.foes),
        put(state.sent & ~np.int32(ORIGIN), past.sent),
    )


def restore(state: State, happens: jax.Array) -> State:
    """The state after UNDO, if it happens; the entry is taken off the history."""
    past = state.history
    at_top = (np.arange(DEPTH) == past.top)[:, None]

    def get(entries: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(at_top, entries, jnp.zeros((), entries.dtype)), axis=0, dtype=entries.dtype)

    numbers, sets = get(past.numbers), get(past.sets)
    values = {name: numbers[2 + i] for i, name in enumerate(_NUMBERS)}
    values |= {name: sets[2 * i : 2 * i + 2] for i, name in enumerate(_SETS)}
    values |= {"foes": get(past.foes), "sent": get(past.sent)}
    values["programs"] = lax.bitcast_convert_type(numbers[1], jnp.uint32)
    place = 0
    for name, bits in _SMALL:
        values[name] = (numbers[0] >> place & ((1 << bits) - 1)).astype(getattr(state, name).dtype)
        place += bits
    chosen = {name: jnp.where(happens, value, getattr(state, name)) for name, value in values.items()}
    history = past._replace(
        depth=past.depth - happens, top=jnp.where(happens, (past.top + DEPTH - 1) % DEPTH, past.top)
    )
    return state._replace(**chosen, history=history)  # type: ignore[arg-type]
