"""The edge of the road as a signed distance, metres, negative on the road: exact, on a grid, and in tiles of bytes.

Road edges run with the road on their left. A point's sign is that of its nearest edge; where the nearest place is a
vertex that two segments share, neither segment alone can tell, and the sum of their two normals does (the
pseudo-normal of Baerentzen and Aanaes, "Signed distance computation using the angle weighted pseudonormal", 2005, in
two dimensions).

`distance_field` samples it on a grid. It is exact in float64: patches first narrow the segments down to those that can
be nearest to any of their samples (within the nearest one's distance plus the patch's diameter), then each sample
looks at these only.

`tile` stores such fields in a tenth of their memory: tiles that are finer the nearer they are to an edge of the road. A
sample takes a byte. Its code c stands for sign(c) * REACH * (c / 127)^2 metres: steps of a millimetre at the edge, a
centimetre at 4 cm, a decimetre at 5 m; no sample is 0, so that its sign stays. Beyond REACH it saturates. A tile has
TILE x TILE cells and repeats the samples of its neighbours' first row and column, so that one tile answers for a
point. Where no sample is nearer than NEAR to the edge and all are on one side, every second sample is enough; where all
are saturated on one side, all such tiles of a bank share one. The look-up is `geometry.clearance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from longhaul.driving.scenario.scenario import CELL

MERGE = 0.002
"""Metres by which a merged edge may differ from its points: a fifth of the field's own resolution."""
REPEATED = 1e-3
"""Metres, along both axes, within which a point of an edge repeats the one before."""
JOIN = 0.1
"""Metres within which one edge's end is taken for another one's start."""
SAMPLES, COARSE_SAMPLES = 8, 64
"""Samples along a side of a patch, and of a block of patches."""
FARTHEST = 32000.0
"""Centimetres that a sample says at most."""


class Edges(NamedTuple):
    """M directed segments, float64; the road is on their left. Normals point left, to the road."""

    start: np.ndarray  # [M, 2]
    vector: np.ndarray  # [M, 2], to the end
    start_normal: np.ndarray  # [M, 2], pseudo-normal of the vertex where it starts
    end_normal: np.ndarray  # [M, 2]


def make_edges(polylines: Sequence[np.ndarray]) -> Edges:
    """The segments of `polylines` [P, 2], joined where one ends within `JOIN` of another's (or its own) start.

    Polylines of fewer than two distinct points are left out; `M` is 0 if none is left.
    """
    lines = [np.asarray(line, np.float64)[:, :2] for line in polylines if len(line)]
    if not lines:
        return Edges(*np.zeros((4, 0, 2)))
    return edges_of(np.concatenate(lines), np.cumsum([len(line) for line in lines]))


def edges_of(points: np.ndarray, ends: np.ndarray) -> Edges:
    """Edges of polylines, each `points[ends[l - 1] : ends[l]]` [P, 2+], as in `make_edges`."""
    from longhaul.driving.scenario import kernels

    return Edges(*kernels.edges(points, ends, REPEATED, MERGE, JOIN))


def signed_distance(points: np.ndarray, edges: Edges) -> np.ndarray:
    """Signed distance, m [...], of points [..., 2] to the nearest of `edges`; minus infinity without any."""
    if not len(edges.start):
        return np.full(points.shape[:-1], -np.inf)
    from longhaul.driving.scenario import kernels

    return kernels.signed_distances(points.reshape(-1, 2), *edges).reshape(points.shape[:-1])


def distance_field(edges: Edges, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The field over the rectangle `low` .. `high` [2], and its origin: int16 [H, W] centimetres, float64 [2].

    Clipped to +-FARTHEST. Rows are y, columns x, a sample every `CELL` metres. Without edges the field is empty,
    [0, 0].
    """
    origin = np.floor(np.asarray(low, np.float64) / CELL) * CELL
    if not len(edges.start):
        return np.zeros((0, 0), np.int16), origin
    from longhaul.driving.scenario import kernels

    width, height = (np.ceil((np.asarray(high) - origin) / CELL).astype(int) + 1).clip(2)
    return kernels.field(origin, CELL, width, height, SAMPLES, COARSE_SAMPLES, FARTHEST, *edges), origin


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
