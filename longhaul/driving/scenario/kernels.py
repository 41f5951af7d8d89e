"""Numba kernels of compiling a scenario: lines, distances to the road's edges, its rows, routes, and grids of lanes.

Each does in one pass what would take hundreds of NumPy calls a scenario, with the same arithmetic in the same order:
results are those of plain NumPy bit for bit. Compiled code is cached beside this file, or in NUMBA_CACHE_DIR. The cache
does not notice a change of another file, so a kernel calls only kernels of its own file. Imported inside functions
only: numba takes a second to load.
"""

# mypy: disable-error-code="no-untyped-def, call-arg"

from __future__ import annotations

import numpy as np
from numba import njit

jit = njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")

ZERO, ONE, LEAST, NINE_TENTHS = np.float32(0.0), np.float32(1.0), np.float32(1e-18), np.float32(0.9)
SLACK = 1e-6
"""Metres by which a bound on a distance may err by rounding."""


# ---------------------------------------------------------------------------------------------------------------- lines


@jit
def copy_row(out, i, points, k):
    """Copy of row `points[k]` in `out[i]`.

    An assignment of an array to a slice would be compiled with the message for shapes that differ, in Python's strings:
    two seconds and more for each kind of assignment.
    """
    for column in range(out.shape[1]):
        out[i, column] = points[k, column]


@jit
def arcs_of(points, ends):
    """Arc lengths [P] along each of several lines in turn."""
    s, begin = np.zeros(len(points)), 0
    for end in ends:
        add_arcs(points, begin, end, s)
        begin = end
    return s


@jit
def arcs(line):
    """`from_log.arc_length`."""
    s = np.zeros(len(line))
    add_arcs(line, 0, len(line), s)
    return s


@jit
def add_arcs(points, begin, end, s):
    """Arc lengths of the line `points[begin:end]`, put in `s` from `s[begin]` = 0 on."""
    for i in range(begin + 1, end):
        s[i] = s[i - 1] + np.hypot(points[i, 0] - points[i - 1, 0], points[i, 1] - points[i - 1, 1])


@jit
def place_on(s, where, guess):
    """Index of the last of the arc lengths `s` [P], ascending, that is not above `where`; `guess` is none above it."""
    while guess + 1 < len(s) and s[guess + 1] <= where:
        guess += 1
    return guess


@jit
def between(line, s, i, where, column):
    """A column of a line [P, D] at arc length `where`, which lies at or after s[i], as `np.interp` has it."""
    if i == len(s) - 1 or where <= s[i]:
        return line[i, column]
    slope = (line[i + 1, column] - line[i, column]) / (s[i + 1] - s[i])
    return slope * (where - s[i]) + line[i, column]


@jit
def spaced(line, spacing, count):
    """`count` points [count, 2] of a line [P, 2+] that are `spacing` m apart, the first so far from its beginning."""
    s, out, i = arcs(line), np.empty((count, 2)), 0
    for k in range(count):
        where = spacing * (k + 1)
        i = place_on(s, where, i)
        out[k, 0], out[k, 1] = between(line, s, i, where, 0), between(line, s, i, where, 1)
    return out


@jit
def direction(line, i):
    """Direction of a line [P, 2+] from its point i to the next, in radians."""
    return np.arctan2(line[i + 1, 1] - line[i, 1], line[i + 1, 0] - line[i, 0])


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
def nearest(x, y, points, enough=0.0):
    """Square of the distance in the plane from (x, y) to the nearest of `points` [K, 2 or 3], or to the first of which
    it is below `enough`; and that point's index."""
    least, at = np.inf, 0
    for k in range(len(points)):
        dx, dy = x - points[k, 0], y - points[k, 1]
        square = dx * dx + dy * dy
        if square < least:
            least, at = square, k
            if square < enough:
                break
    return least, at


@jit
def nearest_points(points, near):
    """Index [P] of the nearest of `near` [R, 2], R >= 1, to each of `points` [P, 2]."""
    out = np.empty(len(points), np.int64)
    for p in range(len(points)):
        _, out[p] = nearest(points[p, 0], points[p, 1], near)
    return out


@jit
def gaps(places, line):
    """Distances [K] of `places` [K, 2] from the nearest point of a line [P, 2+]."""
    out, square = np.full(len(places), np.inf), np.empty(len(line))
    for k in range(len(places)):
        least = np.inf
        for i in range(len(line)):
            dx, dy = places[k, 0] - line[i, 0], places[k, 1] - line[i, 1]
            square[i] = dx * dx + dy * dy
            least = min(least, square[i])
        for i in range(len(line)):
            if square[i] <= least * (1.0 + 1e-9):
                out[k] = min(out[k], np.hypot(places[k, 0] - line[i, 0], places[k, 1] - line[i, 1]))
    return out


@jit
def distinct(points, ends, least):
    """Lines [P, D] without points that lie within `least` m, in the plane, of the one before: what is left of each in
    turn, and new ends [L]."""
    kept, bounds, count, begin = np.empty(len(points), np.int64), np.empty(len(ends), np.int64), 0, 0
    for line in range(len(ends)):
        for i in range(begin, ends[line]):
            if i > begin and np.hypot(points[i, 0] - points[i - 1, 0], points[i, 1] - points[i - 1, 1]) <= least:
                continue
            kept[count] = i
            count += 1
        begin, bounds[line] = ends[line], count
    return points[kept[:count]], bounds


@jit
def thin(points, begin, last, tolerance, keep, stack):
    """Marks in `keep` the points of a line, `begin` to `last`, that stay; none is farther than `tolerance` m from what
    is left. `stack` [P + 1, 2] is room.

    Douglas and Peucker's algorithm: a chord is split at its farthest point, the first of several.
    """
    keep[begin] = keep[last] = True
    stack[0, 0], stack[0, 1], size = begin, last, 1
    while size:
        size -= 1
        a, b = stack[size, 0], stack[size, 1]
        vx, vy = points[b, 0] - points[a, 0], points[b, 1] - points[a, 1]
        length2 = max(vx * vx + vy * vy, 1e-18)
        worst, at = tolerance, -1
        for k in range(a + 1, b):
            x, y = points[k, 0] - points[a, 0], points[k, 1] - points[a, 1]
            along = (x * vx + y * vy) / length2
            along = 0.0 if along < 0.0 else (1.0 if along > 1.0 else along)
            x, y = x - along * vx, y - along * vy
            away = np.sqrt(x * x + y * y)
            if away > worst:
                worst, at = away, k
        if at >= 0:
            keep[at] = True
            stack[size, 0], stack[size, 1], stack[size + 1, 0], stack[size + 1, 1] = a, at, at, b
            size += 2


# -------------------------------------------------------------------------------------------------- segments as columns


@jit
def columns(start, vector):
    """float32 [5, M]: segments as columns, x and y of the start, of the vector, and its square, above 0."""
    out = np.empty((5, len(start)), np.float32)
    for i in range(len(start)):
        vx, vy = vector[i, 0], vector[i, 1]
        out[0, i], out[1, i], out[2, i], out[3, i] = start[i, 0], start[i, 1], vx, vy
        out[4, i] = max(vx * vx + vy * vy, LEAST)
    return out


@jit
def gather(segments, which, count, out):
    """Puts in `out` [5, count] the first `count` columns `which` of `segments`."""
    for i in range(5):
        for k in range(count):
            out[i, k] = segments[i, which[k]]


@jit
def to_segments(x, y, segments, count, out):
    """Distances float32, put in `out`, of a point to the first `count` of `segments`, see `columns`."""
    for k in range(count):
        vx, vy = segments[2, k], segments[3, k]
        u, v = x - segments[0, k], y - segments[1, k]
        share = (u * vx + v * vy) / segments[4, k]
        share = ZERO if share < ZERO else (ONE if share > ONE else share)
        u, v = u - share * vx, v - share * vy
        out[k] = np.sqrt(u * u + v * v)


@jit
def narrow(x, y, radius, segments, count, square, out):
    """Number of those of the first `count` of `segments`, see `columns`, that can be nearest to a point within `radius`
    of (x, y). They are put in `out` [count + 1]; `square` [count] is room."""
    least, kept = np.inf, 0
    for k in range(count):  # the compiler makes vectors of it
        vx, vy = segments[2, k], segments[3, k]
        u, v = x - segments[0, k], y - segments[1, k]
        share = (u * vx + v * vy) / segments[4, k]
        share = 0.0 if share < 0.0 else (1.0 if share > 1.0 else share)
        u, v = u - share * vx, v - share * vy
        square[k] = u * u + v * v
    for k in range(count):
        least = min(least, square[k])
    most = (np.sqrt(least) + 2.0 * radius + SLACK) ** 2
    for k in range(count):
        out[kept] = k
        kept += square[k] <= most
    return kept


# ---------------------------------------------------------------------------------------- distances to the road's edges


@jit
def edges(points, ends, least, tolerance, near):
    """Starts, vectors and normals [M, 2] of `distance_field.Edges` of lines: line l is `points[ends[l - 1] : ends[l]]`
    [P, 2+].

    They are cleaned by `least` m, simplified by `tolerance` m, and joined within `near` m.
    """
    points, ends = cleaned(points, ends, least)
    start, vector, normal, firsts, lasts = simplified(points, ends, tolerance)
    start_normal, end_normal = joint_normals(points, ends, normal, firsts, lasts, near)
    return start, vector, start_normal, end_normal


@jit
def cleaned(points, ends, least):
    """Lines [P, 2] of two points or more, and their ends [L], without points that are not finite and those that repeat
    the one before within `least` m along both axes."""
    out, bounds, size, lines, begin = np.empty((len(points), 2)), np.empty(len(ends), np.int64), 0, 0, 0
    for end in ends:
        first, before = size, -1
        for i in range(begin, end):
            x, y = points[i, 0], points[i, 1]
            if not (np.isfinite(x) and np.isfinite(y)):
                continue
            if before < 0 or max(abs(x - points[before, 0]), abs(y - points[before, 1])) > least:
                out[size, 0], out[size, 1] = x, y
                size += 1
            before = i
        begin = end
        if size - first > 1:
            bounds[lines] = size
            lines += 1
        else:
            size = first
    return out[:size], bounds[:lines]


@jit
def simplified(points, ends, tolerance):
    """Segments of lines that `thin` simplifies: starts, vectors and unit normals [M, 2], and of each line the numbers
    [L] of the first and the last segment."""
    keep, stack = np.zeros(len(points), np.bool_), np.empty((len(points) + 1, 2), np.int64)
    start, vector, normal = np.empty((len(points), 2)), np.empty((len(points), 2)), np.empty((len(points), 2))
    firsts, lasts, count, begin = np.empty(len(ends), np.int64), np.empty(len(ends), np.int64), 0, 0
    for line in range(len(ends)):
        firsts[line], before = count, begin
        thin(points, begin, ends[line] - 1, tolerance, keep, stack)
        for i in range(begin + 1, ends[line]):
            if keep[i]:
                x, y = points[i, 0] - points[before, 0], points[i, 1] - points[before, 1]
                length = np.sqrt(x * x + y * y)
                start[count, 0], start[count, 1] = points[before, 0], points[before, 1]
                vector[count, 0], vector[count, 1] = x, y
                normal[count, 0], normal[count, 1] = -(y / length), x / length
                count, before = count + 1, i
        begin, lasts[line] = ends[line], count - 1
    return start[:count], vector[:count], normal[:count], firsts, lasts


@jit
def joint_normals(points, ends, normal, firsts, lasts, near):
    """Normals [M, 2] at the starts and at the ends of segments: sums over the two that meet there. Lines meet where one
    ends within `near` m of another one's beginning, or of its own."""
    start_normal, end_normal, begin = np.empty((len(normal), 2)), np.empty((len(normal), 2)), 0
    for line in range(len(ends)):
        first, last, tail = firsts[line], lasts[line], ends[line] - 1
        before, after, least_before, least_after, other_begin = first, last, near, near, 0
        for other in range(len(ends)):
            other_tail = ends[other] - 1
            x, y = points[other_tail, 0] - points[begin, 0], points[other_tail, 1] - points[begin, 1]
            gap = np.sqrt(x * x + y * y)
            if gap < least_before:
                least_before, before = gap, lasts[other]
            x, y = points[tail, 0] - points[other_begin, 0], points[tail, 1] - points[other_begin, 1]
            gap = np.sqrt(x * x + y * y)
            if gap < least_after:
                least_after, after = gap, firsts[other]
            other_begin = ends[other]
        for i in range(first, last + 1):
            summed(normal, i, i - 1 if i > first else before, start_normal)
            summed(normal, i, i + 1 if i < last else after, end_normal)
        begin = ends[line]
    return start_normal, end_normal


@jit
def summed(normal, i, j, out):
    """Puts in out[i] the sum of the normals i and j; normal i where they cancel, where an edge turns back."""
    x, y = normal[i, 0] + normal[j, 0], normal[i, 1] + normal[j, 1]
    cancels = x * x + y * y < 1e-8
    out[i, 0], out[i, 1] = normal[i, 0] if cancels else x, normal[i, 1] if cancels else y


@jit
def signed_distances(points, start, vector, start_normal, end_normal):
    """Signed distances [P] of `points` [P, 2] to the nearest of M >= 1 segments; negative on their left."""
    xs, ys = points[:, 0].copy(), points[:, 1].copy()
    out, toward, some = np.empty(len(points)), np.empty(len(points)), 512
    every = np.arange(len(start))
    for a in range(0, len(points), some):
        b = min(a + some, len(points))
        against(
            xs[a:b], ys[a:b], every, len(every), start, vector, start_normal, end_normal, out[a:b], toward[a:b]
        )  # fmt: skip
    for p in range(len(points)):
        out[p] = -np.sqrt(out[p]) if toward[p] > 0.0 else np.sqrt(out[p])
    return out


@jit
def field(origin, cell, width, height, patch, block, most, start, vector, start_normal, end_normal):
    """Signed distances [height, width], int16 centimetres up to `most`, on a grid of `cell` m; never 0, so that the
    rounded distance keeps its sign.

    The grid has blocks of `block` samples, in them patches of `patch`: these narrow the segments down to those that can
    be nearest to one of their samples.
    """
    out, total, samples = np.empty((height, width), np.int16), len(start), patch * patch
    every, near, square = np.empty((5, total)), np.empty((5, total)), np.empty(total)
    few, fewer = np.empty(total + 1, np.int64), np.empty(total + 1, np.int64)
    for i in range(total):
        vx, vy = vector[i, 0], vector[i, 1]
        every[0, i], every[1, i], every[2, i], every[3, i] = start[i, 0], start[i, 1], vx, vy
        every[4, i] = vx * vx + vy * vy
    right, up, xs, ys = np.empty(samples), np.empty(samples), np.empty(samples), np.empty(samples)
    least, toward, number = np.empty(samples), np.empty(samples), 0
    for i in range(patch):
        for j in range(patch):
            right[number], up[number] = cell * j, cell * i
            number += 1
    wide, half = cell * (block - 1) / 2.0, cell * (patch - 1) / 2.0
    root = np.sqrt(2.0)
    for top in range(0, height, block):
        for left in range(0, width, block):
            x, y = origin[0] + cell * left + wide, origin[1] + cell * top + wide
            some = narrow(x, y, wide * root, every, total, square, few)
            gather(every, few, some, near)
            for row in range(top, min(top + block, height), patch):
                for column in range(left, min(left + block, width), patch):
                    x, y = origin[0] + cell * column, origin[1] + cell * row
                    count = narrow(x + half, y + half, half * root, near, some, square, fewer)
                    for k in range(count):
                        fewer[k] = few[fewer[k]]
                    for j in range(samples):
                        xs[j], ys[j] = x + right[j], y + up[j]
                    against(xs, ys, fewer, count, start, vector, start_normal, end_normal, least, toward)
                    for j in range(samples):
                        size = min(max(np.rint(np.sqrt(least[j]) * 100.0), 1.0), most)
                        inside = size if toward[j] <= 0.0 else -size
                        least[j] = inside if least[j] > 0.0 else -size
                    across = min(patch, width - column)
                    for i in range(min(patch, height - row)):
                        for j in range(across):
                            out[row + i, column + j] = np.int16(least[i * patch + j])
    return out


@jit
def against(xs, ys, which, count, start, vector, start_normal, end_normal, least, toward):
    """Compares points at `xs`, `ys` with the first `count` segments of `which`.

    Puts in `least` each one's squared distance to the nearest, the first of several, and in `toward` a number above 0
    if it lies on the left of that.
    """
    for j in range(len(xs)):
        least[j], toward[j] = np.inf, 0.0
    for k in range(count):
        s = which[k]
        x, y, vx, vy = start[s, 0], start[s, 1], vector[s, 0], vector[s, 1]
        ax, ay, bx, by = start_normal[s, 0], start_normal[s, 1], end_normal[s, 0], end_normal[s, 1]
        length2 = vx * vx + vy * vy
        for j in range(len(xs)):  # the loop that takes the time: the compiler makes vectors of it
            u, v = xs[j] - x, ys[j] - y
            share = (u * vx + v * vy) / length2
            share = 0.0 if share < 0.0 else (1.0 if share > 1.0 else share)
            u, v = u - share * vx, v - share * vy
            square = u * u + v * v
            to_start, to_end, to_side = u * ax + v * ay, u * bx + v * by, u * -vy + v * vx
            side = to_end if share >= 1.0 else (to_start if share <= 0.0 else to_side)
            nearer = square < least[j]
            least[j] = square if nearer else least[j]
            toward[j] = side if nearer else toward[j]


# ----------------------------------------------------------------------------------------------------- rows of the road


OPEN, OUTLINE, SIGN = 1, 2, 3
"""Kinds of line of `rows`: a line, an outline to be closed, a place of which the first point counts."""


@jit
def rows(points, ends, how, longest, tolerance):
    """Segments of lines: starts and ends [M, 3], and numbers of their lines [M].

    Line l is `points[ends[l - 1] : ends[l]]` [P, 3], of kind how[l], and left out if this is 0. It is cut at its points
    into pieces of about equal length, `longest` or less where points allow it, and these are simplified.
    """
    count, total = len(ends), 0
    for line in range(count):
        total += ends[line] - (ends[line - 1] if line else 0) + 1
    start, end, of = np.empty((total, 3)), np.empty((total, 3)), np.empty(total, np.int64)
    size = begin = 0
    for line in range(count):
        first, begin = begin, ends[line]
        number = begin - first
        if how[line] == SIGN and number:
            copy_row(start, size, points, first)
            copy_row(end, size, points, first)
            of[size] = line
            size += 1
        if how[line] != OPEN and how[line] != OUTLINE:
            continue
        closed = how[line] == OUTLINE and number > 2
        own = np.empty((number + closed, 3))
        for i in range(number):
            copy_row(own, i, points, first + i)
        if closed:
            copy_row(own, number, points, first)
        number += closed
        if number < 2:
            continue
        s, keep, stack = arcs(own), np.zeros(number, np.bool_), np.empty((number + 1, 2), np.int64)
        if not s[-1] > 0.0:
            continue
        # by points, not by pieces: a damaged line may be ten thousand kilometres long
        parts, last = np.ceil(s[-1] / longest), 0
        for i in range(1, number):
            cut = parts > 1 and np.floor(s[i] * (parts / s[-1])) > np.floor(s[i - 1] * (parts / s[-1]))
            if cut or i == number - 1:
                thin(own, last, i, tolerance, keep, stack)
                last = i
        last = 0
        for i in range(1, number):
            if keep[i]:
                copy_row(start, size, own, last)
                copy_row(end, size, own, i)
                of[size] = line
                size, last = size + 1, i
    return start[:size], end[:size], of[:size]


@jit
def pieces(start, end, of, how, longest, shortest, most):
    """Segments of `rows`, whose lines are of the kinds `how` [L]; but for places, those of `shortest` m are left out.

    Some are longer than 1.5 `longest` m where a line's own points lie far apart: these are cut into equal parts.
    Kilometres are left out where more than `most` parts would come of it.
    """
    parts, kept, total = np.empty(len(of), np.int64), 0, 0
    for i in range(len(of)):
        length = np.hypot(end[i, 0] - start[i, 0], end[i, 1] - start[i, 1])
        if length > shortest or how[of[i]] == SIGN:
            copy_row(start, kept, start, i)
            copy_row(end, kept, end, i)
            of[kept] = of[i]
            parts[kept] = np.ceil(length / longest) if length > 1.5 * longest else 1
            total += parts[kept]
            kept += 1
    if total == kept:
        return start[:kept], end[:kept], of[:kept]
    fewest = 100 if total > most else total + 1
    total = 0
    for i in range(kept):
        total += parts[i] if parts[i] < fewest else 0
    starts, stops, numbers, count = np.empty((total, 3)), np.empty((total, 3)), np.empty(total, np.int64), 0
    for i in range(kept):
        for part in range(parts[i] if parts[i] < fewest else 0):
            for k in range(3):
                step = (end[i, k] - start[i, k]) / parts[i]
                starts[count, k] = start[i, k] + part * step
                stops[count, k] = starts[count, k] + step
            numbers[count] = of[i]
            count += 1
    return starts, stops, numbers


@jit
def packed(
    start, end, of, code, lane, near, centre, reach, level, slope, bridge, place_unit, most_place, half_unit, most_half
):
    """Rows whose middle is within `reach` m of one of `near` [Q, 3], and on its level, as in `scenario.Road` around
    `centre`: places, halves, kinds, numbers of lanes, and distances [M]; and what `lane` says of the lanes [W].

    Row i belongs to line of[i], which is of the kind `code` [L] and of the lane `lane` [L]; -1: none. Lanes come first,
    in ascending order.
    """
    rows, count, lanes = len(of), 0, 0
    place, half, away = np.empty((rows, 2), np.int16), np.empty((rows, 2), np.int16), np.empty(rows)
    kind, number, used = np.empty(rows, np.int8), np.empty(rows, np.int16), np.empty(rows, np.int64)
    for i in range(rows):
        x, y, z = 0.5 * (start[i, 0] + end[i, 0]), 0.5 * (start[i, 1] + end[i, 1]), 0.5 * (start[i, 2] + end[i, 2])
        least, at = nearest(x, y, near)
        gap = np.sqrt(least)
        to_x, to_y = np.rint((x - centre[0]) / place_unit), np.rint((y - centre[1]) / place_unit)
        flat = abs(z - near[at, 2]) <= min(level + slope * gap, bridge)
        if not (flat and gap <= reach and abs(to_x) <= most_place and abs(to_y) <= most_place):
            continue
        place[count, 0], place[count, 1], away[count] = to_x, to_y, gap
        for k in range(2):
            size = np.rint(0.5 * (end[i, k] - start[i, k]) / half_unit)
            half[count, k] = min(max(size, -most_half), most_half)
        kind[count], number[count] = code[of[i]], -1
        if lane[of[i]] >= 0:
            if not lanes or used[lanes - 1] != lane[of[i]]:
                used[lanes] = lane[of[i]]
                lanes += 1
            number[count] = lanes - 1
        count += 1
    return place[:count], half[:count], kind[:count], number[:count], away[:count], used[:lanes]


@jit
def boxes(points, size):
    """Indices of the first of `points` [P, 3] in each box of `size` [3] m."""
    room = 4
    while room < 2 * len(points):
        room *= 2
    table, found, count = np.full(room, -1), np.empty(len(points), np.int64), 0
    cells = np.empty((len(points), 3), np.int64)
    for p in range(len(points)):
        for i in range(3):
            cells[p, i] = int(np.floor(points[p, i] / size[i]))
        at = (cells[p, 0] * 73856093 ^ cells[p, 1] * 19349663 ^ cells[p, 2] * 83492791) & (room - 1)
        while table[at] >= 0:
            q = table[at]
            if cells[q, 0] == cells[p, 0] and cells[q, 1] == cells[p, 1] and cells[q, 2] == cells[p, 2]:
                break
            at = (at + 1) & (room - 1)
        if table[at] < 0:
            table[at], found[count] = p, p
            count += 1
    return found[:count]


@jit
def drawn(points, ends, whole, near, limit, tolerance):
    """Pieces of lines [P, 2] that are nearer than `limit` m to one of `near` [R, 2], R >= 1, simplified: indices of
    their points [Q], their ends [D] there, and numbers of their lines [D].

    Lines that are `whole` [L] are not cut.
    """
    close, keep = np.zeros(len(points), np.bool_), np.zeros(len(points), np.bool_)
    kept, bounds, of = np.empty(len(points), np.int64), np.empty(len(points), np.int64), np.empty(len(points), np.int64)
    stack, surely = np.empty((len(points) + 1, 2), np.int64), (limit - SLACK) ** 2
    size = count = first = 0
    for line in range(len(ends)):
        begin, first, some = first, ends[line], False
        for p in range(begin, first):
            x, y = points[p, 0], points[p, 1]
            least, at = nearest(x, y, near, surely)
            close[p] = least < surely or np.hypot(x - near[at, 0], y - near[at, 1]) < limit
            some = some or close[p]
        if whole[line] and some:
            close[begin:first] = True
        a = begin
        while a < first:
            if not close[a]:
                a += 1
                continue
            b = a
            while b + 1 < first and close[b + 1]:
                b += 1
            thin(points, a, b, tolerance, keep, stack)
            for p in range(a, b + 1):
                if keep[p]:
                    kept[size] = p
                    size += 1
            bounds[count], of[count] = size, line
            count, a = count + 1, b + 1
    return kept[:size], bounds[:count], of[:count]


# ---------------------------------------------------------------------------------------------------- tracks and routes


@jit
def hold(position, heading, valid):
    """Puts in `position` [N, T, 3] and `heading` [N, T], where not `valid` [N, T], those of the nearest earlier valid
    step, else of the first."""
    for i in range(len(valid)):
        first = 0
        while first < valid.shape[1] - 1 and not valid[i, first]:
            first += 1
        first = first if valid[i, first] else 0
        for t in range(valid.shape[1]):
            if not valid[i, t]:
                at = max(t - 1, first)
                heading[i, t] = heading[i, at]
                for k in range(3):
                    position[i, t, k] = position[i, at, k]


@jit
def nearness(position, valid, path, far):
    """Least distance [N] of bodies at `position` [N, T, 3] from the places `path` [K, 2]; inf for those that are
    never `valid` [N, T] or not finite, and those that stand farther than `far` m away."""
    out = np.full(len(position), np.inf)
    for i in range(len(position)):
        low_x, low_y, high_x, high_y, known, finite = np.inf, np.inf, -np.inf, -np.inf, False, True
        for t in range(position.shape[1]):
            x, y, z = position[i, t, 0], position[i, t, 1], position[i, t, 2]
            known, finite = known or valid[i, t], finite and np.isfinite(x) and np.isfinite(y) and np.isfinite(z)
            low_x, high_x, low_y, high_y = min(low_x, x), max(high_x, x), min(low_y, y), max(high_y, y)
        if not (known and finite):
            continue
        moved, best, surely = np.hypot(high_x - low_x, high_y - low_y) > 1.0, np.inf, -np.inf
        for t in range(position.shape[1] if moved else 1):
            x, y = position[i, t, 0], position[i, t, 1]
            if t:  # it is nearer than before by its own step at most
                dx, dy = x - position[i, t - 1, 0], y - position[i, t - 1, 1]
                surely -= np.sqrt(dx * dx + dy * dy) + SLACK
            if surely > best:
                continue
            _, at = nearest(x, y, path)
            surely = np.hypot(x - path[at, 0], y - path[at, 1])
            best = min(best, surely)
        out[i] = best if moved or best <= far else np.inf
    return out


@jit
def traced(position, heading, valid, noise):
    """`from_log.trace`: the path [K, 3] and its arc length [T]."""
    steps = np.flatnonzero(valid)
    count = len(steps)
    kept, size = np.zeros(count, np.int64), 1
    for i in range(1, count):
        t, k = steps[i], steps[kept[size - 1]]
        dx, dy = position[t, 0] - position[k, 0], position[t, 1] - position[k, 1]
        away = np.hypot(dx, dy)
        ahead = dx * np.cos(heading[t]) + dy * np.sin(heading[t]) > 0.3 * away
        if ahead and away >= noise:
            kept[size] = i
            size += 1
        elif ahead and i == count - 1:  # the log's end replaces the point just before it
            size = max(size - 1, 1)
            kept[size] = i
            size += 1
    knots = np.empty((size, 3))
    for k in range(size):
        copy_row(knots, k, position, steps[kept[k]])
    s, reached, knot, most = arcs(knots), np.empty(count), 0, -np.inf
    for i in range(count):
        while knot + 1 < size and kept[knot + 1] <= i:
            knot += 1
        now = s[size - 1]
        if knot + 1 < size:
            x, y = knots[knot + 1, 0] - knots[knot, 0], knots[knot + 1, 1] - knots[knot, 1]
            chord = max(np.hypot(x, y), 1e-9)
            t = steps[i]
            along = ((position[t, 0] - knots[knot, 0]) * x + (position[t, 1] - knots[knot, 1]) * y) / chord
            now = s[knot] + min(max(along, 0.0), chord)
        most = max(most, now)
        reached[i] = most
    out, seen = np.empty(len(valid)), 0
    for t in range(len(valid)):
        seen += valid[t]
        out[t] = reached[max(seen - 1, 0)]
    return knots, out


@jit
def laid(line, length, beyond, spacing):
    """Points [R, 4] of `from_log.lay`."""
    s = arcs(line)
    missing = length + beyond + 2.0 - s[-1]
    if missing > 0.0:
        more, s_more = np.empty((len(line) + 1, 3)), np.empty(len(line) + 1)
        for i in range(len(line)):
            copy_row(more, i, line, i)
            s_more[i] = s[i]
        x, y = line[-1, 0] - line[-2, 0], line[-1, 1] - line[-2, 1]
        size = max(np.hypot(x, y), 1e-9)
        more[-1, 0], more[-1, 1], more[-1, 2] = (
            line[-1, 0] + missing * x / size, line[-1, 1] + missing * y / size, line[-1, 2]
        )  # fmt: skip
        s_more[-1] = s[-1] + missing
        line, s = more, s_more
    count = int(np.ceil((length + beyond) / spacing)) + 1
    out, a, b, c = np.empty((count, 4)), 0, 0, 0
    for r in range(count):
        where = spacing * r
        before, after = min(max(where - 1.0, 0.0), s[-1]), min(max(where + 1.0, 0.0), s[-1])
        a, b, c = place_on(s, before, a), place_on(s, where, b), place_on(s, after, c)
        for i in range(3):
            out[r, i] = between(line, s, b, where, i)
        x = between(line, s, c, after, 0) - between(line, s, a, before, 0)
        y = between(line, s, c, after, 1) - between(line, s, a, before, 1)
        out[r, 3] = np.arctan2(y, x)
    return out


@jit
def continued(end, heading, lane, where, wanted, blend, points, s, starts, turn, exits, exit_starts):
    """Points [P, 3] from `end` [3] on for `wanted` m or more: along `lane` from arc length
    `where` on and its straightest exits; straight on where they end, or if `lane` is below 0."""
    way, marks, ways, total, left = np.empty(len(turn), np.int64), np.empty(len(turn)), 0, 1, wanted
    seen = np.zeros(len(turn), np.bool_)
    while lane >= 0:
        seen[lane], way[ways], marks[ways] = True, lane, where
        ways, total = ways + 1, total + starts[lane + 1] - starts[lane] + 1
        left -= s[starts[lane + 1] - 1] - where
        best = -1
        if left > 0.0:
            for e in range(exit_starts[lane], exit_starts[lane + 1]):
                if not seen[exits[e]] and (best < 0 or abs(turn[exits[e]]) < abs(turn[best])):
                    best = exits[e]
        lane, where = best, 0.0
    ahead, count = np.empty((total, 3)), 0
    for w in range(ways):
        a, b = starts[way[w]], starts[way[w] + 1]
        if w == 0:
            i = place_on(s[a:b], marks[w], 0)
            for column in range(3):
                ahead[0, column] = between(points[a:b], s[a:b], i, marks[w], column)
            count = 1
        for i in range(a, b):
            if s[i] > marks[w] + 1e-6:
                copy_row(ahead, count, points, i)
                count += 1
    line, size, along = np.empty((count + 2, 3)), 1, 0.0
    for column in range(3):
        line[0, column] = end[column]
    for i in range(count):
        if i:
            along += np.hypot(ahead[i, 0] - ahead[i - 1, 0], ahead[i, 1] - ahead[i - 1, 1])
        if along > 0.5:
            share = min(max(1.0 - along / blend, 0.0), 1.0)
            for column in range(3):
                line[size, column] = ahead[i, column] + share * share * (3.0 - 2.0 * share) * (
                    end[column] - ahead[0, column]
                )
            size += 1
    if size > 1:
        heading = direction(line, size - 2)
    missing = wanted - arcs(line[:size])[-1]
    if missing > 0.0:
        line[size, 0] = line[size - 1, 0] + missing * np.cos(heading)
        line[size, 1] = line[size - 1, 1] + missing * np.sin(heading)
        line[size, 2] = line[size - 1, 2]
        size += 1
    return line[:size]


# ---------------------------------------------------------------------------------------------------------------- lanes


@jit
def turns(points, starts):
    """Angles [W] by which lanes turn between their ends; lane l is `points[starts[l] : starts[l + 1]]` [P, 3]."""
    out = np.empty(len(starts) - 1)
    for lane in range(len(out)):
        a, b = starts[lane], starts[lane + 1] - 1
        out[lane] = (direction(points, b - 1) - direction(points, a) + np.pi) % (2.0 * np.pi) - np.pi
    return out


@jit
def beside(places, within, points, s, starts, box):
    """Lanes whose nearest place is about `within` m or less from one of `places` [K, 3]: number of the place and of the
    lane, arc length there, direction, height above the place, and x and y from there, float64 [C, 7]."""
    count = 0
    for place in places:
        for lane in range(len(box)):
            count += around(place, within, box[lane])
    out, count = np.empty((count, 7)), 0
    for k in range(len(places)):
        place = places[k]
        for lane in range(len(box)):
            if not around(place, within, box[lane]):
                continue
            begin = starts[lane]
            i, share, x, y = project(points[begin : starts[lane + 1]], place)
            i += begin
            if x * x + y * y < (within + SLACK) ** 2:
                out[count, 0], out[count, 1], out[count, 2] = k, lane, s[i] + share * (s[i + 1] - s[i])
                out[count, 3] = direction(points, i)
                out[count, 4], out[count, 5], out[count, 6] = points[i, 2] - place[2], x, y
                count += 1
    return out[:count]


@jit
def around(place, within, box):
    """True if `place` lies `within` m or less of a box [4]: least x and y, most x and y."""
    return box[0] - within <= place[0] <= box[2] + within and box[1] - within <= place[1] <= box[3] + within


@jit
def near_line(line, places, within):
    """Nearest place on a line [P, 3+] to each of `places` [L, 3] that lies within `within` m of it along both axes:
    number of the place, index, share, direction, height above it, and x and y from there, float64 [C, 7]."""
    out, count = np.empty((len(places), 7)), 0
    for p in range(len(places)):
        i, share, x, y = project(line, places[p])
        if max(abs(x), abs(y)) <= within:
            out[count, 0], out[count, 1], out[count, 2] = p, i, share
            out[count, 3] = direction(line, i)
            out[count, 4], out[count, 5], out[count, 6] = line[i, 2] - places[p, 2], x, y
            count += 1
    return out[:count]


@jit
def beyond_stop(stop, shared, count, line, s):
    """`count` places [count, 2] of a lane [P, 3] over the first `shared` m after a stop point [3], and its direction
    there."""
    i, share, _, _ = project(line, stop)
    begin = s[i] + share * (s[i + 1] - s[i])
    end = min(begin + shared, s[-1])
    step, out, at = (end - begin) / (count - 1), np.empty((count, 2)), 0
    for k in range(count):
        where = k * step + begin if k < count - 1 else end
        at = place_on(s, where, 0)
        out[k, 0], out[k, 1] = between(line, s, at, where, 0), between(line, s, at, where, 1)
    return out, direction(line, i)


# -------------------------------------------------------------------------------------------------------- grid of lanes


@jit
def blocks(along, margin, block, most):
    """The grid's corner [2], blocks [G, 2], and directory, around places `along` [Q, 2] of routes, Q >= 1; see
    `lane_graph.lay_grid`."""
    low_x, low_y, high_x, high_y = np.inf, np.inf, -np.inf, -np.inf
    for q in range(len(along)):
        low_x, high_x = min(low_x, along[q, 0] - margin), max(high_x, along[q, 0] + margin)
        low_y, high_y = min(low_y, along[q, 1] - margin), max(high_y, along[q, 1] + margin)
    corner = np.array([np.floor(low_x / block) * block, np.floor(low_y / block) * block])
    wide, tall = int((high_x - corner[0]) / block) + 1, int((high_y - corner[1]) / block) + 1
    directory = np.full((tall, wide), -1, np.int16)
    cells, count = np.empty((wide * tall, 2), np.int64), 0
    for q in range(len(along)):
        for i in range(-1, 2):
            for j in range(-1, 2):
                column = int((along[q, 0] + margin * i - corner[0]) / block)
                row = int((along[q, 1] + margin * j - corner[1]) / block)
                if directory[row, column] < 0 and count < most:
                    directory[row, column], cells[count, 0], cells[count, 1] = count, column, row
                    count += 1
    for row in range(tall):
        for column in range(wide):
            if directory[row, column] >= 0:
                continue
            least = 1 << 62
            for k in range(count):
                dx, dy = column - cells[k, 0], row - cells[k, 1]
                if dx * dx + dy * dy < least:
                    least, directory[row, column] = dx * dx + dy * dy, k
    return corner, cells[:count], directory


BUCKETS = 1024


@jit
def candidates(start, vector, centre, reach, most, nearby, turn):
    """Rows [G, most] of M segments for blocks at `centre`, see `lane_graph.candidates`; `turn` [most - nearby] is the
    order of the spread ones."""
    count, spread = len(start), len(turn)
    out, segments = np.full((len(centre), most), -1, np.int16), columns(start, vector)
    away, which, order = np.empty(count, np.float32), np.empty(count + 1, np.int64), np.empty(count, np.int64)
    begin, scale = np.empty(BUCKETS + 2, np.int64), np.float32(BUCKETS / reach)
    for g in range(len(centre)):
        to_segments(centre[g, 0], centre[g, 1], segments, count, away)
        some = 0
        for k in range(count):
            which[some] = k
            some += away[k] < reach
        # sorted into buckets of distances, then within them; of equal ones the first row comes first
        begin[:] = 0
        for k in range(some):
            begin[int(away[which[k]] * scale) + 1] += 1
        for i in range(1, BUCKETS + 2):
            begin[i] += begin[i - 1]
        for k in range(some):
            bucket = int(away[which[k]] * scale)
            order[begin[bucket]] = which[k]
            begin[bucket] += 1
        for k in range(1, some):
            row, at = order[k], k
            while at and away[order[at - 1]] > away[row]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = row
        near = far = 0
        for k in range(min(some, most)):
            if some <= most:
                out[g, k] = order[k]
            elif k % 3 < 2:
                out[g, k] = order[near]
                near += 1
            else:
                out[g, k] = order[nearby + (some - nearby) * turn[far] // spread]
                far += 1
    return out


@jit
def nearest_lanes(
    start, vector, lane, lanes, centre, points, at, around, diagonal, most_rows, nearest, second, farthest
):
    """Rows [G, C, nearest] of M lanes' segments for the cells of blocks at `centre`, as in `lane_graph.nearest_lanes`.

    `lane` [M] is below `lanes`. `points` [U, 2], from the middle of a block, are the probes; `at[c]` [P] those of cell
    c, its own middle first, the others within `around` m of it.
    """
    out, total = np.full((len(centre), len(at), nearest), -1, np.int16), len(start)
    every, near, close = columns(start, vector), np.empty((5, total), np.float32), np.empty((5, total), np.float32)
    away, middle, gap = np.empty(total, np.float32), np.empty(total, np.float32), np.empty(total, np.float32)
    rank, least, number = np.empty(total, np.float32), np.empty(lanes, np.float32), np.empty(lanes, np.int64)
    own, few_own, few = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(nearest, np.int64)
    some, rows = np.empty(total + 1, np.int64), np.empty(total + 1, np.int64)
    found, counts = np.empty((len(points), nearest), np.int64), np.empty(len(points), np.int64)
    reach, unranked = np.float32(2.0 * around + 0.01), np.float32(nearest)  # a centimetre more than rounding may take
    for g in range(len(centre)):
        x, y = centre[g, 0], centre[g, 1]
        to_segments(x, y, every, total, away)
        closest, count, here = np.float32(np.inf), 0, 0
        for k in range(total):
            closest = min(closest, away[k])
        for k in range(total):
            rows[count] = k
            count += away[k] <= float(closest) + diagonal
        if count > most_rows:
            for k in range(count):
                gap[k] = away[rows[k]]
            count = first_ones(gap, count, most_rows, some)
            for k in range(count):
                own[k] = rows[some[k]]
            for k in range(count):
                rows[k] = own[k]
        number[:], counts[:], rank[:count] = -1, -1, unranked
        gather(every, rows, count, near)
        for k in range(count):
            if number[lane[rows[k]]] < 0:
                number[lane[rows[k]]] = here
                here += 1
            own[k] = number[lane[rows[k]]]
        for c in range(len(at)):
            to_segments(x + points[at[c, 0], 0], y + points[at[c, 0], 1], near, count, middle)
            size = nearly(middle, count, own, here, least, nearest, reach, few, some)
            gather(near, some, size, close)
            for k in range(size):
                few_own[k] = own[some[k]]
            for probe in range(at.shape[1]):
                p = at[c, probe]
                if counts[p] < 0:  # neighbours share probes
                    to_segments(x + points[p, 0], y + points[p, 1], close, size, gap)
                    later(gap, size, few_own, here, least, farthest)
                    counts[p] = first_ones(gap, size, nearest, few)
                    for place in range(counts[p]):
                        found[p, place] = some[few[place]]
                for place in range(counts[p]):
                    k = found[p, place]
                    rank[k] = min(rank[k], np.float32(place))
            # the best rank at any probe counts, and of equal ones the distance from the middle; a second row of a lane
            # is worth less than the first of another one
            for ranked in (True, False):  # rows without a rank count only where too few have one
                size = good = 0
                for k in range(count):
                    if rank[k] < unranked or not ranked:
                        some[size], few_own[size] = k, own[k]
                        gap[size] = rank[k] * farthest + min(middle[k], NINE_TENTHS * farthest)
                        size += 1
                later(gap, size, few_own, here, least, second * farthest)
                for k in range(size):
                    good += gap[k] < unranked * farthest
                if good >= nearest:
                    break
            for place in range(first_ones(gap, size, nearest, few)):
                out[g, c, place] = rows[some[few[place]]]
            rank[:count] = unranked
    return out


@jit
def nearly(distance, count, lane, lanes, least, nearest, reach, few, out):
    """Number of rows put in `out`, of `count` rows: all that can be among the `nearest` at a place, where distances
    differ from `distance` by at most `reach` / 2.

    A lane's nearest row comes before every other lane's second one. So a row is there only if it is about the nearest
    of its lane, and its lane about one of the nearest; with fewer lanes, if it is about the nearest of its lane, or
    about one of the nearest rows.
    """
    least_of(distance, count, lane, lanes, least)
    many, size = lanes >= nearest, 0
    kept = first_ones(least, lanes, nearest, few) if many else first_ones(distance, count, nearest, few)
    if kept < nearest:
        most = np.float32(np.inf)
    else:
        most = (least if many else distance)[few[nearest - 1]] + reach
    for k in range(count):
        own, out[size] = least[lane[k]], k
        first = distance[k] <= own + reach
        size += (first and own <= most) if many else (first or distance[k] <= most)
    return size


@jit
def later(values, count, lane, lanes, least, extra):
    """Adds `extra` to those of values[:count] that are not the least of their `lane`."""
    least_of(values, count, lane, lanes, least)
    for k in range(count):
        values[k] += ZERO if values[k] <= least[lane[k]] else extra


@jit
def least_of(values, count, lane, lanes, least):
    """Puts in `least` the smallest of values[:count] of each of `lanes` lanes; `lane` [count] is below `lanes`."""
    least[:lanes] = np.float32(np.inf)
    for k in range(count):
        least[lane[k]] = min(least[lane[k]], values[k])


@jit
def first_ones(values, count, most, out):
    """Number of indices put in `out`, at most `most`: those of the smallest of values[:count], in order."""
    kept = 0
    for k in range(count):
        if kept == most and values[k] >= values[out[most - 1]]:
            continue
        at = kept if kept < most else most - 1
        while at and values[out[at - 1]] > values[k]:
            out[at] = out[at - 1]
            at -= 1
        out[at] = k
        kept = min(kept + 1, most)
    return kept
