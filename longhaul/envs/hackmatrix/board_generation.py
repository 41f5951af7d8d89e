"""Boards drawn in advance: what a stage begins with, and how far its exits are.

A stage's content depends on nothing but chance, so a bank of boards is drawn once, on the host, with the way to each
corner; the compiled game only picks one. No search is left in a step.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from longhaul.envs.hackmatrix.state import CELLS, CORNERS, DATA, PROGRAM, PROGRAMS, SIDE, STAGES

BOARDS = 16_384

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
    amount = np.where(free, rng.choice([1, 2, 3], (count, CELLS), p=[0.45, 0.45, 0.10]), 0)
    is_energy = rng.random((count, CELLS)) < 0.5
    kind = np.where(program, PROGRAM, np.where(data, DATA, 0))
    cell = pack(kind, points, index, spawn, np.where(is_energy, 0, amount), np.where(is_energy, amount, 0))
    order = np.argsort(np.where(free, rng.random((count, CELLS)), 2.0), axis=1)[:, :STAGES]
    pending = np.stack([order, rng.integers(0, 4, order.shape)], -1)
    empty = np.zeros((1, CELLS), np.int64)
    return Boards(
        np.concatenate([cell, empty]).astype(np.int32),
        distances(np.concatenate([blocks, empty.astype(bool)])),
        np.concatenate([pending, np.zeros((1, STAGES, 2), np.int64)]).astype(np.int8),
    )


def place_blocks(rng: np.random.Generator, count: int) -> np.ndarray:
    """bool [count, CELLS]: 5 to 11 blocks, anywhere but in the corners."""
    key = rng.random((count, CELLS))
    key[:, CORNERS] = 2.0
    place = np.argsort(np.argsort(key, axis=1), axis=1)
    return place < rng.integers(5, 12, (count, 1))


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
            found = np.where(inner >= far, np.int8(0), inner).reshape(CELLS, 4, -1)
            return np.ascontiguousarray(found.transpose(2, 1, 0))
