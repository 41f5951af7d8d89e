"""Numba kernels of compiling a scenario: signed distance to the road's edges, and the lanes nearest to a cell.

Each does in one pass what took hundreds of NumPy calls a scenario, with the same arithmetic in the same order: results
are those of plain NumPy bit for bit. Compiled code is cached beside this file, or in NUMBA_CACHE_DIR. Imported inside
functions only: numba takes a second to load.
"""

# mypy: disable-error-code="no-untyped-def, call-arg"

from __future__ import annotations

import numpy as np
from numba import njit

jit = njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")

ZERO, ONE, LEAST, NINE_TENTHS = np.float32(0.0), np.float32(1.0), np.float32(1e-18), np.float32(0.9)
SLACK = 1e-6
"""Metres by which a bound on a distance may err by rounding."""


@jit
def from_segment(x, y, vx, vy):
    """x and y from the nearest place of a segment, which leads from the origin to (vx, vy), and its share of it."""
    share = (x * vx + y * vy) / (vx * vx + vy * vy)
    share = 0.0 if share < 0.0 else (1.0 if share > 1.0 else share)
    return x - share * vx, y - share * vy, share


@jit
def simplified(xy, ends, tolerance):
    """bool [P]: the points of polylines that are kept; line l is xy[ends[l - 1] : ends[l]] [P, 2], see `simplify`."""
    keep, first, last = np.zeros(len(xy), np.bool_), np.empty(len(xy), np.int64), np.empty(len(xy), np.int64)
    begin = 0
    for end in ends:
        keep[begin] = keep[end - 1] = True
        first[0], last[0], size = begin, end - 1, 1
        while size:
            size -= 1
            a, b = first[size], last[size]
            vx, vy = xy[b, 0] - xy[a, 0], xy[b, 1] - xy[a, 1]
            length2 = max(vx * vx + vy * vy, 1e-18)
            worst, at = tolerance, -1
            for k in range(a + 1, b):
                x, y = xy[k, 0] - xy[a, 0], xy[k, 1] - xy[a, 1]
                along = (x * vx + y * vy) / length2
                along = 0.0 if along < 0.0 else (1.0 if along > 1.0 else along)
                x, y = x - along * vx, y - along * vy
                away = np.sqrt(x * x + y * y)
                if away > worst:
                    worst, at = away, k
            if at >= 0:
                keep[at] = True
                first[size], last[size], first[size + 1], last[size + 1] = a, at, at, b
                size += 2
        begin = end
    return keep


@jit
def narrow(x, y, radius, start, vector, which, count, out, away):
    """Number of segments of which[:count] that can be nearest to a point within `radius` of (x, y), put in `out`."""
    least, kept = np.inf, 0
    for k in range(count):
        i = which[k]
        dx, dy, _ = from_segment(x - start[i, 0], y - start[i, 1], vector[i, 0], vector[i, 1])
        away[k] = np.sqrt(dx * dx + dy * dy)
        least = min(least, away[k])
    for k in range(count):
        if away[k] <= least + 2.0 * radius + SLACK:
            out[kept] = which[k]
            kept += 1
    return kept


@jit
def signed(x, y, i, start, vector, start_normal, end_normal):
    """Signed distance of a point to segment i; negative on its left."""
    dx, dy, share = from_segment(x - start[i, 0], y - start[i, 1], vector[i, 0], vector[i, 1])
    if share >= 1.0:
        toward = dx * end_normal[i, 0] + dy * end_normal[i, 1]
    elif share <= 0.0:
        toward = dx * start_normal[i, 0] + dy * start_normal[i, 1]
    else:
        toward = dx * -vector[i, 1] + dy * vector[i, 0]
    distance = np.sqrt(dx * dx + dy * dy)
    return -distance if toward > 0.0 else distance


@jit
def signed_distances(points, start, vector, start_normal, end_normal):
    """Signed distances [P] of `points` [P, 2] to the nearest of M >= 1 segments."""
    out = np.empty(len(points))
    for p in range(len(points)):
        x, y, least, best = points[p, 0], points[p, 1], np.inf, 0
        for i in range(len(start)):
            dx, dy, _ = from_segment(x - start[i, 0], y - start[i, 1], vector[i, 0], vector[i, 1])
            square = dx * dx + dy * dy
            if square < least:
                least, best = square, i
        out[p] = signed(x, y, best, start, vector, start_normal, end_normal)
    return out


@jit
def field(origin, cell, width, height, patch, block, start, vector, start_normal, end_normal):
    """Signed distances [height, width] on a grid of `cell` m: blocks of `block` samples, in them patches of `patch`.

    Blocks, then patches, narrow the segments down to those that can be nearest to one of their samples.
    """
    out = np.empty((height, width))
    every, away = np.arange(len(start)), np.empty(len(start))
    few, fewer = np.empty(len(start), np.int64), np.empty(len(start), np.int64)
    least, best = np.empty(patch), np.empty(patch)
    wide, half = cell * (block - 1) / 2.0, cell * (patch - 1) / 2.0
    root = np.sqrt(2.0)
    for top in range(0, height, block):
        for left in range(0, width, block):
            x, y = origin[0] + cell * left + wide, origin[1] + cell * top + wide
            some = narrow(x, y, wide * root, start, vector, every, len(every), few, away)
            for row in range(top, min(top + block, height), patch):
                for column in range(left, min(left + block, width), patch):
                    x, y = origin[0] + cell * column, origin[1] + cell * row
                    count = narrow(x + half, y + half, half * root, start, vector, few, some, fewer, away)
                    across = min(patch, width - column)
                    for i in range(min(patch, height - row)):
                        for j in range(across):
                            least[j], best[j] = np.inf, 0.0
                        for k in range(count):
                            s = fewer[k]
                            vx, vy, v = vector[s, 0], vector[s, 1], y + cell * i - start[s, 1]
                            begin, length2, number = start[s, 0], vx * vx + vy * vy, float(s)
                            for j in range(across):  # the loop that takes the time: the compiler makes vectors of it
                                u = x + cell * j - begin
                                share = (u * vx + v * vy) / length2
                                share = 0.0 if share < 0.0 else (1.0 if share > 1.0 else share)
                                dx, dy = u - share * vx, v - share * vy
                                square = dx * dx + dy * dy
                                nearer = square < least[j]
                                least[j] = square if nearer else least[j]
                                best[j] = number if nearer else best[j]
                        for j in range(across):
                            out[row + i, column + j] = signed(
                                x + cell * j, y + cell * i, int(best[j]), start, vector, start_normal, end_normal
                            )
    return out


@jit
def project(line, place):
    """Nearest segment of a polyline [P, 2+] to `place` [2+]: (index, share of it, x and y from there)."""
    least, best, best_share, best_x, best_y = np.inf, 0, 0.0, 0.0, 0.0
    for i in range(len(line) - 1):
        x, y = place[0] - line[i, 0], place[1] - line[i, 1]
        vx, vy = line[i + 1, 0] - line[i, 0], line[i + 1, 1] - line[i, 1]
        share = (x * vx + y * vy) / max(vx * vx + vy * vy, 1e-12)
        share = min(max(share, 0.0), 1.0)
        x, y = x - share * vx, y - share * vy
        if x * x + y * y < least:
            least, best, best_share, best_x, best_y = x * x + y * y, i, share, x, y
    return best, best_share, best_x, best_y


@jit
def nearest_points(points, near):
    """Index [P] of the nearest of `near` [R, 2], R >= 1, to each of `points` [P, 2]."""
    out = np.empty(len(points), np.int64)
    for p in range(len(points)):
        x, y, least = points[p, 0], points[p, 1], np.inf
        for k in range(len(near)):
            dx, dy = x - near[k, 0], y - near[k, 1]
            square = dx * dx + dy * dy
            if square < least:
                least, out[p] = square, k
    return out


@jit
def first_ones(values, most, out):
    """Number of indices put in `out`, at most `most`: those of the smallest `values`, in order."""
    kept = 0
    for k in range(len(values)):
        if kept == most and values[k] >= values[out[most - 1]]:
            continue
        at = kept if kept < most else most - 1
        while at and values[out[at - 1]] > values[k]:
            out[at] = out[at - 1]
            at -= 1
        out[at] = k
        kept = min(kept + 1, most)
    return kept


@jit
def later(values, lane, least, extra):
    """Adds `extra` to the `values` of rows that are not the nearest of their `lane`; `least` is room for its lanes."""
    for k in range(len(values)):
        least[lane[k]] = np.float32(np.inf)
    for k in range(len(values)):
        least[lane[k]] = min(least[lane[k]], values[k])
    for k in range(len(values)):
        values[k] += np.float32(0.0) if values[k] <= least[lane[k]] else extra


@jit
def to_segments(x, y, start, vector, which, out):
    """Distances float32, put in `out`, of a point to the segments `which`."""
    for k in range(len(which)):
        i = which[k]
        vx, vy = vector[i, 0], vector[i, 1]
        u, v = x - start[i, 0], y - start[i, 1]
        share = (u * vx + v * vy) / max(vx * vx + vy * vy, LEAST)
        share = ZERO if share < ZERO else (ONE if share > ONE else share)
        u, v = u - share * vx, v - share * vy
        out[k] = np.sqrt(u * u + v * v)


@jit
def nearest_lanes(start, vector, lane, lanes, centre, probes, diagonal, most_rows, nearest, second, farthest):
    """Rows [G, C, nearest] of M lanes' segments for the cells of blocks at `centre`, as in `lane_graph.nearest_lanes`.

    `lane` [M] is below `lanes`; `probes` [C, P, 2] lie around the middle of a block, each cell's own middle first.
    """
    out = np.full((len(centre), probes.shape[0], nearest), -1, np.int16)
    away, least = np.empty(len(start), np.float32), np.empty(lanes, np.float32)
    every, few = np.arange(len(start)), np.empty(nearest, np.int64)
    for g in range(len(centre)):
        x, y = centre[g, 0], centre[g, 1]
        to_segments(x, y, start, vector, every, away)
        rows = np.flatnonzero(away <= float(away.min()) + diagonal)
        if len(rows) > most_rows:
            rows = rows[np.argsort(away[rows], kind="mergesort")[:most_rows]]
        own, most = lane[rows], min(nearest, len(rows))
        gap, middle = np.empty(len(rows), np.float32), np.empty(len(rows), np.float32)
        rank = np.empty(len(rows), np.float32)
        for c in range(probes.shape[0]):
            rank[:] = np.float32(nearest)
            for p in range(probes.shape[1]):
                to_segments(x + probes[c, p, 0], y + probes[c, p, 1], start, vector, rows, gap)
                if p == 0:
                    middle[:] = gap
                later(gap, own, least, farthest)
                for place in range(first_ones(gap, most, few)):
                    rank[few[place]] = min(rank[few[place]], np.float32(place))
            # the best rank at any probe counts, and of equal ones the distance from the middle; a second row of a lane
            # is worth less than the first of another one
            for k in range(len(rows)):
                rank[k] = rank[k] * farthest + min(middle[k], NINE_TENTHS * farthest)
            later(rank, own, least, second * farthest)
            for place in range(first_ones(rank, most, few)):
                out[g, c, place] = rows[few[place]]
    return out
