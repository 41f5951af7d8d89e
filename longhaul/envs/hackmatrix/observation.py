"""What the player sees: 222 bytes in a rollout, 1,545 numbers in a network.

The numbers are those of the game's own trainer, in its order: 10 about the player, 23 programs, then 42 channels of
each cell, row by row from the bottom.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.envs.hackmatrix import world as w
from longhaul.envs.hackmatrix.actions import Cells
from longhaul.envs.hackmatrix.world import CELLS, SIDE, SLOTS, State

CHANNELS = 42
SIZE = 10 + w.PROGRAMS + CELLS * CHANNELS


class Packed(NamedTuple):
    """An observation as it is stored."""

    player: Any  # int16 [9]: row, column, hp, credits, energy, stage, siphons, attack, flags
    programs: Any  # uint32
    board: Any  # int32 [CELLS]: as `boards.pack`, and bits 19 siphoned, 20 centre, 21 data siphon, 22 exit
    life: Any  # int16 [CELLS]: kinds bits 0-3, hp 4-5, stunned 6, of a siphon 7, turns of a transmission 8-10


def shapes() -> Packed:
    """The shapes of an observation."""
    return Packed(
        jax.ShapeDtypeStruct((9,), jnp.int16),
        jax.ShapeDtypeStruct((), jnp.uint32),
        jax.ShapeDtypeStruct((CELLS,), jnp.int32),
        jax.ShapeDtypeStruct((CELLS,), jnp.int16),
    )


def observe(state: State, cells: Cells) -> Packed:
    """The packed observation of a game."""
    player = w.join(
        [
            state.row, state.col, state.hp, jnp.minimum(state.credits, 50), jnp.minimum(state.energy, 50), state.stage,
            state.siphons, state.attack, state.show.astype(jnp.int32) | state.calm.astype(jnp.int32) << 1,
        ]
    )  # fmt: skip
    corner = jnp.asarray(w.CORNERS)[state.exit]
    board = cells.block | cells.points << 2 | cells.program << 6 | state.spawn.astype(jnp.int32) << 11
    board = board | cells.credits << 15 | cells.energy << 17
    for place, words in ((19, state.siphoned), (20, state.centre), (21, state.pickup)):
        board = board | w.spread_bits(words).astype(jnp.int32) << place
    board = board | (np.arange(CELLS) == corner).astype(jnp.int32) << 22
    return Packed(player.astype(jnp.int16), state.programs, board, _life(state))


def _life(state: State) -> jax.Array:
    """int16 [CELLS]; of several in a cell, the last slot tells hp and flags, and every kind shows."""
    e, p = state.enemies, state.pending
    hidden = (e.kind == w.CRYPTOG) & (e.row != state.row) & (e.col != state.col) & ~state.show
    place = jnp.where(e.alive & ~hidden, SIDE * e.row + e.col, -1)
    code = jnp.clip(e.hp, 0, 3) << 4 | e.stunned.astype(jnp.int32) << 6 | e.siphoned.astype(jnp.int32) << 7
    kind = 1 << e.kind
    sent = jnp.where(p.turns > 0, SIDE * p.row + p.col, -1)
    turns = jnp.minimum(p.turns, 4) << 8
    cell = np.arange(CELLS)
    kinds, last, coming = (jnp.zeros(CELLS, jnp.int32) for _ in range(3))
    for slot in range(SLOTS):  # unrolled: every operation runs along the cells
        here = cell == place[slot]
        kinds = kinds | jnp.where(here, kind[slot], 0)
        last = jnp.where(here, code[slot], last)
        coming = jnp.where(cell == sent[slot], turns[slot], coming)
    return (kinds | last | coming).astype(jnp.int16)


def expand(packed: Packed) -> jax.Array:
    """float32 [..., SIZE]: what the network takes."""
    player, board, life = packed.player.astype(jnp.float32), packed.board, packed.life.astype(jnp.int32)
    row, col, hp, credits, energy, stage, siphons, attack, _ = jnp.moveaxis(player, -1, 0)
    flags = packed.player[..., 8].astype(jnp.int32)
    about = [
        row / 5, col / 5, hp / 3, credits / 50, energy / 50, (stage - 1) / 7, siphons / 10, (attack - 1) / 2,
        (flags & 1).astype(jnp.float32), (flags >> 1).astype(jnp.float32),
    ]  # fmt: skip
    index = np.arange(w.PROGRAMS, dtype=np.uint32).reshape((1,) * packed.programs.ndim + (-1,))
    owned = ((packed.programs[..., None] >> index) & 1).astype(jnp.float32)
    block = board & 3
    program = jnp.where((block == w.PROGRAM) | (block == w.QUESTION), (board >> 6) & 31, -1)

    def bit(words: jax.Array, place: int) -> jax.Array:
        return ((words >> place) & 1).astype(jnp.float32)

    def part(words: jax.Array, place: int, mask: int, scale: float) -> jax.Array:
        return ((words >> place) & mask).astype(jnp.float32) / scale

    channels = [bit(life, kind) for kind in range(4)]
    channels += [part(life, 4, 3, 3.0), bit(life, 6), bit(life, 7)]
    channels += [(block == kind).astype(jnp.float32) for kind in (w.DATA, w.PROGRAM, w.QUESTION)]
    channels += [part(board, 2, 15, 9.0), bit(board, 19)]
    channels += [(program == index).astype(jnp.float32) for index in range(w.PROGRAMS)]
    channels += [part(board, 11, 15, 9.0), part(life, 8, 7, 4.0), part(board, 15, 3, 3.0), part(board, 17, 3, 3.0)]
    channels += [bit(board, 21), bit(board, 22), bit(board, 20)]
    cells = jnp.stack(channels, axis=-1)
    return jnp.concatenate([jnp.stack(about, -1), owned, cells.reshape(*cells.shape[:-2], -1)], axis=-1)
