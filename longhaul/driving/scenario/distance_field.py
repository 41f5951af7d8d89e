"""Distance fields in a tenth of their memory: tiles that are finer the nearer they are to an edge of the road.

A sample takes a byte. Its code c stands for sign(c) * REACH * (c / 127)^2 metres: steps of a millimetre at the edge,
a centimetre at 4 cm, a decimetre at 5 m; no sample is 0, so that its sign stays. Beyond REACH it saturates.

A tile has TILE x TILE cells and repeats the samples of its neighbours' first row and column, so that one tile answers
for a point. Where no sample is nearer than NEAR to the edge and all are on one side, every second sample is enough;
where all are saturated on one side, all such tiles of a bank share one. NumPy; the look-up is `geometry.clearance`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BITS = 3
TILE = 1 << BITS
"""Cells along a side of a tile."""

REACH = 8.0
"""Metres from the edge beyond which the field says no more than this."""

NEAR = 1.5
"""Metres from the edge within which every sample is kept."""

FINE, COARSE = (TILE + 1) ** 2, (TILE // 2 + 1) ** 2
"""Bytes of a tile with every sample, and with every second."""

UNIT = np.float32(REACH / 127.0**2)
"""Metres of c * |c| = 1."""


class Tiles(NamedTuple):
    """The fields of S scenarios."""

    cells: np.ndarray  # int8 [bytes of all tiles]
    tiles: np.ndarray  # int32 [tiles of all fields, row by row]: 2 * the first of its bytes in `cells`, + 1 if coarse
    start: np.ndarray  # int32 [S]: the first of a field's tiles


def encode(distance: np.ndarray) -> np.ndarray:
    """int8: the codes of signed distances, m; what is not above 0 is on the road."""
    code = np.rint(127.0 * np.sqrt(np.minimum(np.abs(distance), REACH) / REACH))
    code = np.maximum(code, 1.0)
    return np.where(distance > 0.0, code, -code).astype(np.int8)


def decode(code: np.ndarray) -> np.ndarray:
    """float32: signed distances, m."""
    value = code.astype(np.float32)
    return value * np.abs(value) * UNIT


def across(samples: int) -> int:
    """Number of tiles that cover a side of `samples` samples."""
    return -(-(samples - 1) // TILE)


def tile(fields: list[np.ndarray]) -> Tiles:
    """The tiles of fields [H, W], int16 centimetres; one without edges, [0, 0], has none.

    Raises ValueError where they take 2^30 bytes or more together.
    """
    shared = [np.full(COARSE, -127, np.int8), np.full(COARSE, 127, np.int8)]
    parts, tables, counts, size = shared, [], [], 2 * COARSE
    for field in fields:
        if min(field.shape) < 2:
            counts.append(0)
            continue
        cells, table = _tile_one(encode(field.astype(np.float32) * 0.01), size)
        parts.append(cells)
        tables.append(table)
        counts.append(table.size)
        size += cells.size
        if size >= 2**30:
            raise ValueError(
                f"the distance fields of {len(fields)} scenarios take 2^30 bytes or more: make several banks"
            )
    start = np.cumsum(counts) - counts
    flat = np.concatenate(tables) if tables else np.zeros(1, np.int64)
    return Tiles(np.concatenate(parts), flat.astype(np.int32), start.astype(np.int32))


def _tile_one(codes: np.ndarray, begin: int) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of one field's own tiles, which are to lie at `begin`, and the entries of its table."""
    rows, columns = (across(side) for side in codes.shape)
    padding = ((0, rows * TILE + 1 - codes.shape[0]), (0, columns * TILE + 1 - codes.shape[1]))
    codes = np.pad(codes, padding, mode="edge")
    views = np.lib.stride_tricks.sliding_window_view(codes, (TILE + 1, TILE + 1))[::TILE, ::TILE]
    views = views.reshape(-1, TILE + 1, TILE + 1)
    least, most = views.min((1, 2)).astype(np.int16), views.max((1, 2)).astype(np.int16)
    near = encode(np.array(NEAR, np.float32)).astype(np.int16)
    fine = (least < near) & (most > -near)
    inner, outer = most == -127, least == 127
    coarse = ~fine & ~inner & ~outer
    place = begin + np.cumsum(fine * FINE + coarse * COARSE) - (fine * FINE + coarse * COARSE)
    table = 2 * np.where(inner, 0, np.where(outer, COARSE, place)) + ~fine
    kept = [views[i] if fine[i] else views[i, ::2, ::2] for i in np.flatnonzero(fine | coarse)]
    return np.concatenate([np.zeros(0, np.int8), *(piece.reshape(-1) for piece in kept)]), table
