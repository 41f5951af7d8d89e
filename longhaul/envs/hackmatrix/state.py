"""The world of HackMatrix: its constants, the state of one game, and sets of cells as bits.

Cells are numbered 0 .. 35, row by row from the bottom; a set of cells is two words of 18 bits. Enemies and
transmissions lie in slots, the lowest free one is taken first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIDE = 6
CELLS = SIDE * SIDE
SLOTS = 20
"""Slots of enemies, and of transmissions."""

CORNERS = np.array([0, 5, 30, 35], np.int32)
CORNER_BITS = np.array([[1, 0], [1 << 5, 0], [0, 1 << 12], [0, 1 << 17]], np.uint32)
"""The sets of the single corners."""

STAGES = 8

VIRUS, DAEMON, GLITCH, CRYPTOG = 0, 1, 2, 3
NONE, DATA, PROGRAM, QUESTION = 0, 1, 2, 3
"""Kinds of block."""

MOST_HP = 3
FIRST_PROGRAM = 5  # action id of program 0
PROGRAMS = 23
ACTIONS = FIRST_PROGRAM + PROGRAMS
UP, DOWN, LEFT, RIGHT, SIPHON = range(5)
(
    PUSH, PULL, CRASH, WARP, POLY, WAIT, DEBUG, ROW, COL, UNDO, STEP, SIPH, EXCH, SHOW, RESET, CALM, D_BOM, DELAY,
    ANTI_V, SCORE, REDUC, ATK, HACK,
) = range(FIRST_PROGRAM, ACTIONS)  # fmt: skip

NAMES = (
    "up", "down", "left", "right", "siphon", "push", "pull", "crash", "warp", "poly", "wait", "debug", "row", "col",
    "undo", "step", "siph+", "exch", "show", "reset", "calm", "d_bom", "delay", "anti-v", "score", "reduc", "atk+",
    "hack",
)  # fmt: skip

CREDITS = np.array([0, 0, 0, 0, 0, 0, 0, 3, 2, 1, 0, 3, 3, 3, 1, 0, 5, 4, 2, 0, 2, 3, 1, 3, 0, 2, 4, 2], np.int32)
"""Cost of an action."""
ENERGY = np.array([0, 0, 0, 0, 0, 2, 2, 2, 2, 1, 1, 0, 1, 1, 0, 3, 0, 0, 0, 4, 4, 0, 2, 0, 5, 1, 4, 2], np.int32)

DROW = np.array([1, -1, 0, 0], np.int32)
DCOL = np.array([0, 0, -1, 1], np.int32)
"""Columns of the four moves."""

FAR = 1 << 20


class Enemies(NamedTuple):
    """Slots of enemies, each [SLOTS]."""

    alive: jax.Array  # bool
    kind: jax.Array  # int32
    row: jax.Array  # int32
    col: jax.Array  # int32
    hp: jax.Array  # int32
    stunned: jax.Array  # bool
    siphoned: jax.Array  # bool: came of a siphon


class Pending(NamedTuple):
    """Slots of transmissions, from which enemies come; each [SLOTS]."""

    turns: jax.Array  # int32, left; 0 is a free slot
    kind: jax.Array  # int32
    row: jax.Array  # int32
    col: jax.Array  # int32
    siphoned: jax.Array  # bool: came of a siphon


class State(NamedTuple):
    """One game. Scalars are int32 or bool."""

    row: jax.Array
    col: jax.Array
    hp: jax.Array
    credits: jax.Array
    energy: jax.Array
    siphons: jax.Array
    attack: jax.Array
    score: jax.Array
    programs: jax.Array  # uint32, bit i: owns program i
    stage: jax.Array  # 1 .. 8; 9 is won
    turn: jax.Array
    next_task: jax.Array  # turn at which the next scheduled transmission comes
    attacks: jax.Array  # ATK+ used in this stage
    show: jax.Array
    calm: jax.Array
    step: jax.Array
    undo: jax.Array  # whether UNDO is legal
    over: jax.Array  # the game has ended
    board: jax.Array  # row of the bank
    exit: jax.Array  # 0 .. 3, index into CORNERS
    siphoned: jax.Array  # uint32 [2]: blocks
    centre: jax.Array  # uint32 [2]: cells that were siphoned from
    collected: jax.Array  # uint32 [2]: cells whose resources are taken
    pickup: jax.Array  # uint32 [2]: cells with a data siphon
    spawn: jax.Array  # int8 [CELLS]: spawn counts of blocks
    enemies: Enemies
    pending: Pending
    tally: Tally
    past: Any  # the game before the last step, which the fix "undo" goes back to; () without that fix


class Tally(NamedTuple):
    parts: jax.Array  # float32 [15]: sums of the parts of the reward
    moves: jax.Array  # int32
    siphons: jax.Array
    programs: jax.Array
    stage: jax.Array  # the highest

    def add(self, parts: jax.Array, action: jax.Array, stage: jax.Array) -> Tally:
        """The score after one more action, by which the game came to `stage`."""
        return Tally(
            self.parts + parts,
            self.moves + (action < 4),
            self.siphons + (action == SIPHON),
            self.programs + (action > SIPHON),
            jnp.maximum(self.stage, stage),
        )

    def late(self, over: jax.Array, max_steps: int | None) -> jax.Array:
        """bool: a game that is not over has had its last step."""
        if max_steps is None:
            return jnp.zeros_like(over)
        return ~over & (self.moves + self.siphons + self.programs >= max_steps)


def bits(cell: jax.Array) -> jax.Array:
    """uint32 [2]: the set of one cell."""
    place = jnp.arange(2) * 18
    inside = (cell >= place) & (cell < place + 18)
    return jnp.where(inside, jnp.uint32(1) << ((cell - place) % 18).astype(jnp.uint32), jnp.uint32(0))


def has(words: jax.Array, cell: jax.Array) -> jax.Array:
    """bool [...]: whether cells are in a set."""
    low = cell < 18
    word = jnp.where(low, words[0], words[1])
    return ((word >> jnp.where(low, cell, cell - 18).astype(jnp.uint32)) & 1).astype(bool)


def gather_bits(flags: jax.Array) -> jax.Array:
    """uint32 [2]: the set of the cells whose flag [CELLS] is true."""
    weight = np.left_shift(np.uint32(1), np.arange(18, dtype=np.uint32))
    return jnp.sum(flags.reshape(2, 18).astype(jnp.uint32) * weight[None], axis=-1, dtype=jnp.uint32)


def spread_bits(words: jax.Array) -> jax.Array:
    """bool [CELLS]: the reverse of `gather_bits`."""
    shift = np.arange(18, dtype=np.uint32)
    return ((words[:, None] >> shift[None]) & 1).astype(bool).reshape(CELLS)


def occupied(row: jax.Array, col: jax.Array, present: jax.Array) -> jax.Array:
    """uint32 [2]: the set of the cells of slots [SLOTS], as far as something is there."""
    upper = row >= 3
    bit = jnp.uint32(1) << (SIDE * (row - jnp.where(upper, 3, 0)) + col).astype(jnp.uint32)
    halves = (jnp.where(present & ~upper, bit, jnp.uint32(0)), jnp.where(present & upper, bit, jnp.uint32(0)))
    return join([jnp.bitwise_or.reduce(half) for half in halves])


def next_exit(row: jax.Array, col: jax.Array, random: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(one of the corners where the player is not, 0 .. 3, by a random uint32; uint32 [2]: the set of the others)."""
    others = SIDE * row + col != CORNERS
    order = jnp.sum(np.tri(4, k=-1, dtype=np.int32) * others.astype(jnp.int32)[None], axis=-1)
    leads = others & (order == (random % jnp.sum(others).astype(jnp.uint32)).astype(jnp.int32))
    pickup = jnp.where((others & ~leads)[:, None], CORNER_BITS, np.uint32(0))
    return jnp.argmax(leads).astype(jnp.int32), jnp.sum(pickup, axis=0, dtype=jnp.uint32)


def join(values: Sequence[jax.Array]) -> jax.Array:
    """[len(values)]: `jnp.stack` of scalars, without a concatenation, into which XLA:CPU pulls all that leads to it."""
    place = np.arange(len(values))
    joined = jnp.broadcast_to(values[0], place.shape)
    for i, value in enumerate(values[1:], start=1):
        joined = jnp.where(place == i, value, joined)
    return joined


def rank(flags: jax.Array) -> jax.Array:
    """int32 [SLOTS]: how many flags are set before each slot."""
    slot = np.arange(SLOTS, dtype=np.uint32)
    word = jnp.sum(jnp.where(flags, np.left_shift(np.uint32(1), slot), np.uint32(0)), dtype=jnp.uint32)
    return lax.population_count(word & (np.left_shift(np.uint32(1), slot) - np.uint32(1))).astype(jnp.int32)


def pick(words: jax.Array, random: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A cell of a set with equal chances, int32, and whether there is one, by a random uint32."""
    count = lax.population_count(words).astype(jnp.int32)
    total = count[0] + count[1]
    number = (random % jnp.maximum(total, 1).astype(jnp.uint32)).astype(jnp.int32)
    upto = np.left_shift(np.uint32(2), np.arange(18, dtype=np.uint32)) - np.uint32(1)
    before = lax.population_count(words[:, None] & upto[None]).astype(jnp.int32)
    before = before + jnp.where(np.arange(2)[:, None] == 1, count[0], 0)
    return jnp.sum(before <= number), total > 0
