"""Boards drawn in advance, by the rules of either game, with which stages begin.

A stage's content depends on nothing but chance, so a bank of boards is drawn once, on the host; the compiled game only
picks one. By the trainer's rules [J] it comes with the way to each corner: no search is left in a step.

By the canonical rules [S] it is in order of exit and number of blocks. The Swift game draws the number and then redraws
the places of blocks, not on enemies or transmissions, until the board is sound (`sound`). Enemies stay when a stage
ends, and the bank doesn't know their cells. The game therefore takes a random one of the SHELF boards of a random shelf
whose blocks touch nobody. Where a shelf has none, it takes one with the fewest blocks under somebody, and those blocks
fall away: in none of 532 stages with 5 random cells taken, a tenth of them with 8, a quarter with 10. Where the exit is
the corner (0, 0), the Swift game's own test passes it, since it begins there; ours passes no exit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from longhaul.envs.hackmatrix.state import CELLS, CORNERS, DATA, PROGRAM, PROGRAMS, QUESTION, SIDE, STAGES
from longhaul.envs.hackmatrix.swift_rules.state import SPAWN

BOARDS = 16_384

FEWEST, MOST = 5, 11
"""Blocks of a board."""

EMPTY = -1
"""Row of the bank that holds the empty board, on which the first stage is played."""


class Boards(NamedTuple):
    """S boards and, last, the empty one."""

    cell: np.ndarray  # int32 [S + 1, CELLS]: packed, see `pack`
    distance: np.ndarray  # int8 [S + 1, 4, CELLS]: steps to each corner; 0 where there is no way
    pending: np.ndarray  # int8 [S + 1, STAGES, 2]: cell and kind of the transmissions, in order


def pack(
    block: np.ndarray,
    points: np.ndarray,
    program: np.ndarray,
    spawn: np.ndarray,
    credits: np.ndarray,
    energy: np.ndarray,
) -> np.ndarray:
    """int32: block in bits 0-1, points 2-5, program 6-10, spawn count 11-14, credits 15-16, energy 17-18."""
    return block | points << 2 | program << 6 | spawn << 11 | credits << 15 | energy << 17


@functools.lru_cache(maxsize=2)  # a run makes its environment several times before it starts
def draw(seed: int, count: int = BOARDS, connected: bool = False) -> Boards:
    """`count` boards of the trainer's rules, which test none for a way to the exit; to be read only.

    With `connected` there is one from each corner to each other, without siphoning.
    """
    if count < 1:
        raise ValueError(f"boards is {count}; at least 1 is needed")
    rng = np.random.default_rng(seed)
    blocks = place_blocks(rng, count)
    bad = np.arange(count if connected else 0)
    while len(bad := bad[~joined(distances(blocks[bad]))]):
        blocks[bad] = place_blocks(rng, len(bad))
    program = blocks & (rng.random((count, CELLS)) < 0.5)
    data = blocks & ~program
    points = np.where(data, rng.integers(1, 10, (count, CELLS)), 0)
    index = np.where(program, rng.integers(0, PROGRAMS, (count, CELLS)), 0)
    spawn = np.where(program, 2, points)
    free = ~blocks
    free[:, CORNERS] = False
    kind = np.where(program, PROGRAM, np.where(data, DATA, 0))
    cell = fill(rng, free, kind, points, index, spawn)
    order = np.argsort(np.where(free, rng.random((count, CELLS)), 2.0), axis=1)[:, :STAGES]
    pending = np.stack([order, rng.integers(0, 4, order.shape)], -1)
    empty = np.zeros((1, CELLS), np.int64)
    return Boards(
        np.concatenate([cell, empty.astype(np.int32)]),
        distances(np.concatenate([blocks, empty.astype(bool)])),
        np.concatenate([pending, np.zeros((1, STAGES, 2), np.int64)]).astype(np.int8),
    )


def fill(
    rng: np.random.Generator, free: np.ndarray, kind: np.ndarray, points: np.ndarray, program: np.ndarray,
    spawn: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """int32 [S, CELLS]: packed boards, with 1 to 3 credits or energy drawn for each `free` cell."""
    amount = np.where(free, rng.choice([1, 2, 3], free.shape, p=[0.45, 0.45, 0.10]), 0)
    energy = rng.random(free.shape) < 0.5
    return pack(kind, points, program, spawn, np.where(energy, 0, amount), np.where(energy, amount, 0)).astype(np.int32)


def place_blocks(rng: np.random.Generator, count: int, number: np.ndarray | None = None) -> np.ndarray:
    """bool [count, CELLS]: `number` [count] of blocks each (None: 5 to 11), anywhere but in the corners."""
    key = rng.random((count, CELLS))
    key[:, CORNERS] = 2.0
    number = rng.integers(FEWEST, MOST + 1, count) if number is None else number
    return np.argsort(np.argsort(key, axis=1), axis=1) < number[:, None]


def joined(distance: np.ndarray) -> np.ndarray:
    """bool [S]: whether there is a way from each corner to each other, by `distances` [S, 4, CELLS]."""
    return (distance[:, :, CORNERS] > 0).sum((1, 2)) == 12


def distances(blocks: np.ndarray) -> np.ndarray:
    """int8 [S, 4, CELLS]: steps to each corner past `blocks` [S, CELLS]; 0 where there is no way.

    A way may begin on a block, and not go over one.
    """
    # Boards along the last axis, and a border around each: so a wave is a few passes over bytes.
    far, edge = 100, SIDE + 1
    walls = np.ascontiguousarray(blocks.T).reshape(SIDE, SIDE, 1, len(blocks))
    steps = np.full((SIDE + 2, SIDE + 2, 4, len(blocks)), far, np.int8)
    for corner, cell in enumerate(CORNERS.tolist()):
        steps[1 + cell // SIDE, 1 + cell % SIDE, corner] = 0
    inner = steps[1:edge, 1:edge]
    while True:
        before = inner.copy()
        inner[:] = np.where(walls & (before > 0), np.int8(far), before)  # a way goes on from no block
        near = np.minimum(
            np.minimum(steps[2:, 1:edge], steps[:SIDE, 1:edge]), np.minimum(steps[1:edge, 2:], steps[1:edge, :SIDE])
        )
        np.minimum(before, near + np.int8(1), out=inner)
        if (inner == before).all():
            ways = np.where(inner >= far, np.int8(0), inner).reshape(CELLS, 4, -1)
            return np.ascontiguousarray(ways.transpose(2, 1, 0))


# ----------------------------------------------------------------------------------------------- the canonical rules

NUMBERS = MOST - FEWEST + 1
SHELF = 32
"""Boards among which a stage chooses."""
CLASSES = len(CORNERS) * NUMBERS


class Bank(NamedTuple):
    """S boards: by exit, number of blocks, shelf, place on it."""

    cell: np.ndarray  # int32 [S, CELLS]: packed, see `pack`; a question block with points is data
    blocks: np.ndarray  # uint32 [S, 2]: the set of the blocks

    @property
    def shelves(self) -> int:
        """Shelves of one exit and number of blocks."""
        return len(self.blocks) // (CLASSES * SHELF)


@functools.lru_cache(maxsize=2)  # a run makes its environment several times before it starts
def draw_shelves(seed: int, count: int = BOARDS) -> Bank:
    """At least `count` boards, a whole number of shelves for each exit and number of blocks; to be read only."""
    if count < 1:
        raise ValueError(f"boards is {count}; at least 1 is needed")
    rng = np.random.default_rng(seed)
    shelf = SHELF * -(-count // (CLASSES * SHELF))
    corner = np.repeat(CORNERS, NUMBERS * shelf)
    number = np.tile(np.repeat(np.arange(FEWEST, MOST + 1), shelf), len(CORNERS))
    blocks = place_blocks(rng, len(number), number)
    bad = np.flatnonzero(~sound(blocks, corner))
    while len(bad):
        blocks[bad] = place_blocks(rng, len(bad), number[bad])
        bad = bad[~sound(blocks[bad], corner[bad])]
    return Bank(contents(rng, blocks, corner), words(blocks))


def sound(blocks: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """bool [S]: whether a board [S, CELLS] with its exit in `corner` [S] (a cell) can be played.

    All free cells are joined, without a way over the exit, and each block has a free neighbour.
    """
    free, exit_ = ~blocks, np.arange(CELLS) == corner[:, None]
    start = np.where(corner == CORNERS[0], CORNERS[1], CORNERS[0])
    reached, before = np.arange(CELLS) == start[:, None], np.zeros_like(free)
    while (reached != before).any():
        before, reached = reached, reached | (neighbours(reached & ~exit_) & free)
    return (reached == free).all(1) & (free | neighbours(free)).all(1)


def neighbours(flags: np.ndarray) -> np.ndarray:
    """bool [S, CELLS]: the cells beside flagged ones."""
    grid = np.pad(flags.reshape(-1, SIDE, SIDE), ((0, 0), (1, 1), (1, 1)))
    beside = grid[:, 2:, 1:-1] | grid[:, :-2, 1:-1] | grid[:, 1:-1, 2:] | grid[:, 1:-1, :-2]
    return beside.reshape(-1, CELLS)


def contents(rng: np.random.Generator, blocks: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """int32 [S, CELLS]: packed boards with these blocks [S, CELLS] and their exits in `corner` [S]."""
    size = blocks.shape
    data = rng.random(size) < 0.5
    question = rng.random(size) < 0.1
    points = np.where(blocks & data, rng.integers(1, 10, size), 0)
    order = np.argsort(rng.random((len(blocks), PROGRAMS)), axis=1)  # no program lies twice on a board
    program = np.take_along_axis(order, np.minimum(np.cumsum(blocks, axis=1), PROGRAMS) - 1, axis=1)
    program = np.where(blocks & ~data, program, 0)
    spawn = np.where(blocks, np.where(data, points, SPAWN[program]), 0)
    kind = np.where(blocks, np.where(question, QUESTION, np.where(data, DATA, PROGRAM)), 0)
    return fill(rng, ~blocks & (np.arange(CELLS) != corner[:, None]), kind, points, program, spawn)


def words(flags: np.ndarray) -> np.ndarray:
    """uint32 [S, 2]: sets of the cells whose flags [S, CELLS] are true."""
    weight = np.left_shift(np.uint32(1), np.arange(18, dtype=np.uint32))
    return (flags.reshape(-1, 2, 18).astype(np.uint32) * weight).sum(-1, dtype=np.uint32)
