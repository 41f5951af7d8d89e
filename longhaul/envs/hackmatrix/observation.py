"""Observation of the player: 222 bytes in a rollout, 1,545 numbers in a network.

The numbers are those of the game's own trainer, in its order: 10 about the player, 23 programs, then 42 channels of
each cell, row by row from the bottom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.rules import Cells
from longhaul.envs.hackmatrix.state import CELLS, SIDE, SLOTS, State
from longhaul.spaces import Discrete, Masked
from longhaul.types import Compact, Spec, platform

CHANNELS = 42
SIZE = 10 + w.PROGRAMS + CELLS * CHANNELS


class Packed(NamedTuple):
    """An observation as it is stored."""

    player: Any  # int16 [9]: row, column, hp, credits, energy, stage, siphons, attack, flags
    programs: Any  # uint32
    board: Any  # int32 [CELLS]: as `board_generation.pack`, and bits 19 siphoned, 20 centre, 21 data siphon, 22 exit
    life: Any  # int16 [CELLS]: kinds bits 0-3, hp 4-5, stunned 6, of a siphon 7, turns of a transmission 8-10


def shapes() -> Packed:
    return Packed(
        jax.ShapeDtypeStruct((9,), jnp.int16),
        jax.ShapeDtypeStruct((), jnp.uint32),
        jax.ShapeDtypeStruct((CELLS,), jnp.int32),
        jax.ShapeDtypeStruct((CELLS,), jnp.int16),
    )


def spec(max_steps: int | None, compact: Compact) -> Spec:
    """Spec of the game, which `max_steps` truncates (None: nothing does). Raises ValueError for fewer than 1."""
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps is {max_steps}; at least 1 is needed")
    mask: Any = jax.ShapeDtypeStruct((w.ACTIONS,), jnp.bool_)
    seen = Masked(shapes(), mask)
    return Spec(seen, Discrete(w.ACTIONS), None, max_steps, max_steps, expand, compact, peaks=("stage",))


def about(state: Any) -> jax.Array:
    """int16 [9]: `Packed.player` of a game of either rule set."""
    return w.join(
        [
            state.row, state.col, state.hp, jnp.minimum(state.credits, 50), jnp.minimum(state.energy, 50), state.stage,
            state.siphons, state.attack, state.show.astype(jnp.int32) | state.calm.astype(jnp.int32) << 1,
        ]
    ).astype(jnp.int16)  # fmt: skip


def observe(state: State, cells: Cells) -> Packed:
    corner = jnp.asarray(w.CORNERS)[state.exit]
    board = cells.kind | cells.points << 2 | cells.program << 6 | state.spawn.astype(jnp.int32) << 11
    board = board | cells.credits << 15 | cells.energy << 17
    for place, words in ((19, state.siphoned), (20, state.centre), (21, state.pickup)):
        board = board | w.spread_bits(words).astype(jnp.int32) << place
    board = board | (np.arange(CELLS) == corner).astype(jnp.int32) << 22
    return Packed(about(state), state.programs, board, _life(state))


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
        at_cell = cell == place[slot]
        kinds = kinds | jnp.where(at_cell, kind[slot], 0)
        last = jnp.where(at_cell, code[slot], last)
        coming = jnp.where(cell == sent[slot], turns[slot], coming)
    return (kinds | last | coming).astype(jnp.int16)


# --------------------------------------------------------------------------------------------------- what networks take


class Feature(NamedTuple):
    """A number read from a word: its bits, or whether they are `equals`, times `scale`."""

    word: int
    shift: int
    mask: int = 1
    scale: float = 1.0
    equals: int = -1  # the bits themselves


BOARD, LIFE = 0, 1
"""The two words of a cell. In its board's word, bits 23-27 are the program + 1 here, 0 for none."""

CELL = (
    *(Feature(LIFE, kind) for kind in range(4)), Feature(LIFE, 4, 3, 1 / 3), Feature(LIFE, 6), Feature(LIFE, 7),
    *(Feature(BOARD, 0, 3, equals=kind) for kind in (w.DATA, w.PROGRAM, w.QUESTION)),
    Feature(BOARD, 2, 15, 1 / 9), Feature(BOARD, 19),
    *(Feature(BOARD, 23, 31, equals=i + 1) for i in range(w.PROGRAMS)), Feature(BOARD, 11, 15, 1 / 9),
    Feature(LIFE, 8, 7, 1 / 4), Feature(BOARD, 15, 3, 1 / 3), Feature(BOARD, 17, 3, 1 / 3), Feature(BOARD, 21),
    Feature(BOARD, 22), Feature(BOARD, 20),
)  # fmt: skip
"""The channels of a cell."""

HEAD = (
    *(Feature(i, 0, -1, 1 / most) for i, most in enumerate((5, 5, 3, 50, 50, 7, 10, 2))), Feature(8, 0), Feature(8, 1),
    *(Feature(9, i) for i in range(w.PROGRAMS)),
)  # fmt: skip
"""About the player: words 0 to 8 are `Packed.player` (stage and attack less 1), word 9 the programs."""

QUESTION, SIPHONED, CREDITS, ENERGY, PICKUP, EXIT = 9, 11, 37, 38, 39, 40
"""Some channels."""

OF_BLOCKS = (7, 8, QUESTION, 10, *range(12, 36))


def compact(corner: frozenset[int], inner: frozenset[int]) -> Compact:
    """Channels that networks take, without the channels `corner` of corner cells and `inner` of the others."""
    groups = []
    for cells, dead in ((w.CORNERS.tolist(), corner), (sorted({*range(CELLS)} - {*w.CORNERS.tolist()}), inner)):
        groups.append((np.array(cells), [channel for channel in range(CHANNELS) if channel not in dead]))
    places = [*range(len(HEAD))]
    for cells, channels in groups:
        places += [len(HEAD) + CHANNELS * cell + channel for cell in cells.tolist() for channel in channels]

    def expand(packed: Packed) -> jax.Array:
        # Rows along the minor axis: each number is then the same few operations on whole rows of words.
        lead = packed.programs.shape
        head, words = _words(packed)
        parts = [_read(jnp.stack([head[f.word] for f in HEAD]), HEAD)]
        for cells, channels in groups:
            features = [CELL[channel] for channel in channels]
            of_life = np.array([f.word == LIFE for f in features])[None, :, None]
            board, life = (word[cells][:, None] for word in words)
            parts.append(_read(jnp.where(of_life, life, board), features).reshape(len(cells) * len(channels), -1))
        return jnp.moveaxis(jnp.concatenate(parts).reshape(len(places), *lead), 0, -1)

    return Compact(expand, tuple(places))


def _words(packed: Packed) -> tuple[list[jax.Array], tuple[jax.Array, jax.Array]]:
    """int32: the player's words, [rows] each, and the two of the cells, [CELLS, rows] each."""
    player = packed.player.reshape(-1, 9).astype(jnp.int32) - np.array([[0, 0, 0, 0, 0, 1, 0, 1, 0]], np.int32)
    board = packed.board.reshape(-1, CELLS)
    program = jnp.where(board & 2 > 0, (board >> 6 & 31) + 1, 0)
    board = board & (1 << 23) - 1 | program << 23
    life = packed.life.reshape(-1, CELLS).astype(jnp.int32)
    turned = board.T, life.T
    if platform() != "cpu":  # else a GPU reads them across rows, anew for each channel
        turned = lax.optimization_barrier(turned)
    return [*player.T, packed.programs.reshape(-1).astype(jnp.int32)], turned


def _read(words: jax.Array, features: Sequence[Feature]) -> jax.Array:
    """float32 [..., len(features), rows], of words [..., len(features) or 1, rows]."""
    shape = (1,) * (words.ndim - 2) + (-1, 1)
    shift, mask, equals = (np.array([f[i] for f in features], np.int32).reshape(shape) for i in (1, 2, 4))
    scale = np.array([f.scale for f in features], np.float32).reshape(shape)
    value = words >> shift & mask
    return jnp.where(equals < 0, value, (value == equals).astype(jnp.int32)).astype(jnp.float32) * scale


WHOLE = compact(frozenset(), frozenset())


def expand(packed: Packed) -> jax.Array:
    """float32 [..., SIZE]: what a network takes, in the trainer's order."""
    return jnp.take(WHOLE.expand(packed), np.argsort(WHOLE.places), axis=-1)


TRAINER = compact(frozenset({*OF_BLOCKS, SIPHONED, CREDITS, ENERGY}), frozenset({QUESTION, PICKUP, EXIT}))
"""Channels by the rules [J]: corners have neither blocks nor resources, and nothing else has exits and data siphons."""
