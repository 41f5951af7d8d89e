"""Boards of the canonical game ([S]), drawn in advance by exit and number of blocks.

The Swift game draws the number of blocks, 5 to 11, and then redraws their places, not on enemies or transmissions,
until the board is sound: all free cells are joined without passing the exit, and each block has a free neighbour.
Enemies stay when a stage ends, so that a bank can't know which cells are taken. The game therefore looks at the
SHELF boards of a random shelf of its exit and number, and takes a random one whose blocks touch nobody: the
distribution of the rules, as far as a shelf has such a board. Where none has, it takes one with the fewest blocks
under somebody, and those blocks fall away. That was so in none of 532 stages with 5 random cells taken, in a tenth of
them with 8 and in a quarter with 10; such boards have a block or two fewer than the number drawn.

One difference more: where the exit is the corner (0, 0), the Swift game's own test passes it, since it begins there;
ours passes no exit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from longhaul.envs.hackmatrix.board_generation import pack
from longhaul.envs.hackmatrix.state import CELLS, CORNERS, DATA, PROGRAM, PROGRAMS, QUESTION, SIDE
from longhaul.envs.hackmatrix.swift_rules.state import SPAWN

BOARDS = 16_384
FEWEST, MOST = 5, 11
"""Blocks of a board."""
NUMBERS = MOST - FEWEST + 1
SHELF = 32
"""Boards among which a stage chooses."""
CLASSES = len(CORNERS) * NUMBERS


class Bank(NamedTuple):
    """S boards: by exit, number of blocks, shelf, place on it."""

    cell: np.ndarray  # int32 [S, CELLS]: packed, see `boards.pack`; a question block with points is data
    blocks: np.ndarray  # uint32 [S, 2]: the set of the blocks

    @property
    def shelves(self) -> int:
        """Shelves of one exit and number of blocks."""
        return len(self.blocks) // (CLASSES * SHELF)


@functools.lru_cache(maxsize=2)  # a run makes its environment several times before it starts
def draw(seed: int, count: int = BOARDS) -> Bank:
    """At least `count` boards, a whole number of shelves for each exit and number of blocks; to be read only."""
    if count < 1:
        raise ValueError(f"boards is {count}; at least 1 is needed")
    rng = np.random.default_rng(seed)
    shelf = SHELF * -(-count // (CLASSES * SHELF))
    corner = np.repeat(CORNERS, NUMBERS * shelf)
    number = np.tile(np.repeat(np.arange(FEWEST, MOST + 1), shelf), len(CORNERS))
    blocks = place(rng, number)
    bad = np.flatnonzero(~sound(blocks, corner))
    while len(bad):
        blocks[bad] = place(rng, number[bad])
        bad = bad[~sound(blocks[bad], corner[bad])]
    return Bank(fill(rng, blocks, corner), words(blocks))


def place(rng: np.random.Generator, number: np.ndarray) -> np.ndarray:
    """bool [S, CELLS]: so many blocks each [S], anywhere but in the corners."""
    key = rng.random((len(number), CELLS))
    key[:, CORNERS] = 2.0
    return np.argsort(np.argsort(key, axis=1), axis=1) < number[:, None]


def sound(blocks: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """bool [S]: whether a board [S, CELLS] with its exit in `corner` [S] (a cell) can be played."""
    return joined(blocks, corner) & (~blocks | neighbours(~blocks)).all(1)


def joined(blocks: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """bool [S]: whether all free cells are joined, without a way over the exit."""
    free, exit_ = ~blocks, np.arange(CELLS) == corner[:, None]
    start = np.where(corner == CORNERS[0], CORNERS[1], CORNERS[0])
    reached = np.arange(CELLS) == start[:, None]
    while True:
        following = reached | (neighbours(reached & ~exit_) & free)
        if (following == reached).all():
            return (reached == free).all(1)
        reached = following


def neighbours(flags: np.ndarray) -> np.ndarray:
    """bool [S, CELLS]: the cells beside flagged ones."""
    grid = np.pad(flags.reshape(-1, SIDE, SIDE), ((0, 0), (1, 1), (1, 1)))
    beside = grid[:, 2:, 1:-1] | grid[:, :-2, 1:-1] | grid[:, 1:-1, 2:] | grid[:, 1:-1, :-2]
    return beside.reshape(-1, CELLS)


def fill(rng: np.random.Generator, blocks: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """int32 [S, CELLS]: what lies in the cells of boards [S, CELLS] whose exits are `corner` [S]."""
    size = blocks.shape
    data = rng.random(size) < 0.5
    question = rng.random(size) < 0.1
    points = np.where(blocks & data, rng.integers(1, 10, size), 0)
    order = np.argsort(rng.random((len(blocks), PROGRAMS)), axis=1)  # no program lies twice on a board
    program = np.take_along_axis(order, np.minimum(np.cumsum(blocks, axis=1), PROGRAMS) - 1, axis=1)
    program = np.where(blocks & ~data, program, 0)
    spawn = np.where(blocks, np.where(data, points, SPAWN[program]), 0)
    kind = np.where(blocks, np.where(question, QUESTION, np.where(data, DATA, PROGRAM)), 0)
    free = ~blocks & (np.arange(CELLS) != corner[:, None])
    amount = np.where(free, rng.choice([1, 2, 3], size, p=[0.45, 0.45, 0.10]), 0)
    energy = rng.random(size) < 0.5
    return pack(kind, points, program, spawn, np.where(energy, 0, amount), np.where(energy, amount, 0)).astype(np.int32)


def words(flags: np.ndarray) -> np.ndarray:
    """uint32 [S, 2]: sets of the cells whose flags [S, CELLS] are true."""
    weight = np.left_shift(np.uint32(1), np.arange(18, dtype=np.uint32))
    return (flags.reshape(-1, 2, 18).astype(np.uint32) * weight).sum(-1, dtype=np.uint32)
