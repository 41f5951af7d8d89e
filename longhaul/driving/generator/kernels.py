"""Numba kernels of the generator: lines of roads, vehicles driven along their paths, where paths meet, and boxes that
touch.

The rules stand beside the functions of `roads`, `traffic` and `generate` that call these. Compiled code is cached
beside this file, or in NUMBA_CACHE_DIR. Imported inside functions only: numba takes a second to load.
"""

# mypy: disable-error-code="no-untyped-def, call-arg"

from __future__ import annotations

import numpy as np
from numba import njit

from longhaul.driving.datasets import log

jit = njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")

GO, CAUTION = int(log.LIGHT_GO), int(log.LIGHT_CAUTION)
CAUTION_BRAKING, RED_BRAKING, INSIDE_BRAKING = 2.8, 6.0, 3.5
"""m/s^2 of braking that would be needed, above which a driver goes on: at yellow; at red and before people; and before
a stretch shared with another path."""


@jit
def copy_rows(out, at, points, begin, end):
    """Copy of `points[begin:end]` [P, 2] in `out` from row `at` on; why not by a slice: `scenario.kernels.copy_row`."""
    for i in range(begin, end):
        out[at + i - begin, 0], out[at + i - begin, 1] = points[i, 0], points[i, 1]


@jit
def unit(line, i):
    """x and y of the unit vector from point i of a line [P, 2] to the next."""
    x, y = line[i + 1, 0] - line[i, 0], line[i + 1, 1] - line[i, 1]
    size = np.hypot(x, y)
    return x / size, y / size


@jit
def ray(angle, near, far, left, count):
    """`roads.ray` of `count` points."""
    x, y, out = np.cos(angle), np.sin(angle), np.empty((count, 2))
    for i in range(count):
        r = near + (far - near) * (i / (count - 1))
        out[i, 0], out[i, 1] = r * x - left * y, r * y + left * x
    return out


@jit
def offset(line, distance):
    """`roads.offset`."""
    count, out = len(line), np.empty((len(line), 2))
    for i in range(count):
        a, b = max(i - 1, 0), min(i + 1, count - 1)
        x, y = line[b, 0] - line[a, 0], line[b, 1] - line[a, 1]
        size = np.sqrt(x * x + y * y)
        out[i, 0], out[i, 1] = line[i, 0] - distance * y / size, line[i, 1] + distance * x / size
    return out


@jit
def bend(x, y, dx, dy, end_x, end_y, end_dx, end_dy):
    """`roads.bend` between two points and directions."""
    chord_x, chord_y = end_x - x, end_y - y
    size = np.hypot(chord_x, chord_y)
    reach, end_reach = size / 3, size / 3
    cross = dx * end_dy - dy * end_dx
    if abs(cross) > 0.15:
        a = (chord_x * end_dy - chord_y * end_dx) / cross
        b = (dx * chord_y - dy * chord_x) / cross
        turn = np.arctan2(abs(cross), dx * end_dx + dy * end_dy)
        if a > 0 and b > 0:
            factor = (4 / 3) * np.tan(turn / 4) / np.tan(turn / 2)
            reach, end_reach = a * factor, b * factor
    count = max(3, int(size / 0.8))
    out = np.empty((count, 2))
    ax, ay, bx, by = x + reach * dx, y + reach * dy, end_x - end_reach * end_dx, end_y - end_reach * end_dy
    for i in range(count):
        t = i / (count - 1)
        u = 1 - t
        p, q, r, s = u * u * u, 3 * t * u * u, 3 * t * t * u, t * t * t
        out[i, 0], out[i, 1] = p * x + q * ax + r * bx + s * end_x, p * y + q * ay + r * by + s * end_y
    return out


@jit
def joined(line, other):
    """`roads.joined`: `line` [P, 2], a bend, `other` [Q, 2]."""
    (x, y), (end_x, end_y) = unit(line, len(line) - 2), unit(other, 0)
    curve = bend(line[-1, 0], line[-1, 1], x, y, other[0, 0], other[0, 1], end_x, end_y)
    out = np.empty((len(line) + len(curve) - 2 + len(other), 2))
    copy_rows(out, 0, line, 0, len(line))
    copy_rows(out, len(line), curve, 1, len(curve) - 1)
    copy_rows(out, len(out) - len(other), other, 0, len(other))
    return out


@jit
def through(approach, leaving, room):
    """`roads.through`: a connector that runs straight for `room` m at both ends."""
    (x, y), (end_x, end_y) = unit(approach, len(approach) - 2), unit(leaving, 0)
    first, last = np.empty((2, 2)), np.empty((2, 2))
    copy_rows(first, 0, approach, len(approach) - 1, len(approach))
    copy_rows(last, 1, leaving, 0, 1)
    first[1, 0], first[1, 1] = approach[-1, 0] + room * x, approach[-1, 1] + room * y
    last[0, 0], last[0, 1] = leaving[0, 0] - room * end_x, leaving[0, 1] - room * end_y
    return joined(first, last)


@jit
def island(line, half):
    """`roads.island`."""
    count, left, right = len(line), offset(line, half), offset(line, -half)
    out = np.empty((2 * count + 3, 2))
    (begin_x, begin_y), (x, y) = unit(line, 0), unit(line, count - 2)
    out[0, 0], out[0, 1] = line[0, 0] - half * begin_x, line[0, 1] - half * begin_y
    copy_rows(out, 1, left, 0, count)
    copy_rows(out, count + 2, right[::-1], 0, count)
    copy_rows(out, len(out) - 1, out, 0, 1)
    out[count + 1, 0], out[count + 1, 1] = line[-1, 0] + half * x, line[-1, 1] + half * y
    return out


@jit
def glide(line, begin, pace, steps, dt):
    """`bystanders.glide`: poses [M, T, 3] and speeds [M, T]."""
    count, last = len(line), len(line) - 1
    s, turn = np.zeros(count), np.empty(last)
    for i in range(last):
        x, y = line[i + 1, 0] - line[i, 0], line[i + 1, 1] - line[i, 1]
        s[i + 1], turn[i] = s[i] + np.hypot(x, y), np.arctan2(y, x)
    pose, speed = np.empty((len(begin), steps, 3)), np.empty((len(begin), steps))
    for m in range(len(begin)):
        i = 0
        for t in range(steps):
            free = begin[m] + pace[m] * (dt * t)
            where = min(max(free, 0.0), s[last])
            while i < last and s[i + 1] <= where:
                i += 1
            for k in range(2):
                if i == last or where == s[i]:
                    pose[m, t, k] = line[i, k]
                else:
                    pose[m, t, k] = (line[i + 1, k] - line[i, k]) / (s[i + 1] - s[i]) * (where - s[i]) + line[i, k]
            pose[m, t, 2] = turn[min(i, last - 1)]
            speed[m, t] = pace[m] if free < s[last] else 0.0
    return pose, speed


@jit
def micro(x):
    """A number rounded to micrometres, as `np.round` does."""
    return np.rint(x * 1e6) / 1e6


@jit
def strayed(xy, headings, path, s, wave, shift, dt):
    """Poses [N, T, 3] at arc lengths `s` [N, T] of the paths `path` [N], beside them as `generate.stray` says, and the
    speeds [N, T] of these."""
    out, speed, last = poses(xy, headings, path, s), np.empty(s.shape), s.shape[1] - 1
    for i in range(len(out)):
        amount, rate, phase = wave[i, 0], wave[i, 1], wave[i, 2]
        beside, begin, within = shift[i, 0], shift[i, 1], shift[i, 2]
        for t in range(out.shape[1]):
            share = min(max((s[i, t] - begin) / within, 0.0), 1.0)
            angle = rate * s[i, t] + phase
            aside = amount * np.sin(angle) + beside * (1.0 - share * share * (3.0 - 2.0 * share))
            slope = amount * rate * np.cos(angle) - beside * 6.0 * share * (1.0 - share) / within
            aside, heading = micro(aside), out[i, t, 2]
            out[i, t, 0] = out[i, t, 0] - aside * np.sin(heading)
            out[i, t, 1] = out[i, t, 1] + aside * np.cos(heading)
            out[i, t, 2] = heading + micro(np.arctan(slope))
        for t in range(last + 1):  # as `np.gradient` has it
            a, b = max(t - 1, 0), min(t + 1, last)
            lasts = 2.0 * dt if b - a == 2 else dt
            speed[i, t] = micro(np.hypot((out[i, b, 0] - out[i, a, 0]) / lasts, (out[i, b, 1] - out[i, a, 1]) / lasts))
    return out, speed


@jit
def tables(points, starts, cuts, lane, lanes, limit, lateral, slowing):
    """Places [P, K, 2] a metre apart, headings and speeds [P, K], lengths [P], bounds [P, 2] and offsets [P, lanes] of
    paths, where path p is `points[starts[p] : starts[p + 1]]` [Q, 2]; see `traffic.Network`.

    `cuts` [P, 2] are the points of a path at which its connector begins and ends. All are rounded, so that the last bit
    of a sine, which machines differ in, does not decide what happens.
    """
    paths, reach = len(starts) - 1, np.zeros(len(points))
    for i in range(1, len(points)):
        reach[i] = reach[i - 1] + np.hypot(points[i, 0] - points[i - 1, 0], points[i, 1] - points[i - 1, 1])
    most = 0
    for p in range(paths):
        most = max(most, int(reach[starts[p + 1] - 1] - reach[starts[p]]) + 2)
    xy, heading, speed = np.empty((paths, most, 2)), np.empty((paths, most)), np.empty((paths, most))
    length, bound, offset = np.zeros(paths), np.full((paths, 2), np.inf), np.full((paths, lanes), np.nan)
    for p in range(paths):
        offset[p, lane[p, 0]] = 0.0
        for k in range(2 if lane[p, 0] != lane[p, 2] else 0):
            bound[p, k] = offset[p, lane[p, k + 1]] = micro(reach[starts[p] + cuts[p, k]] - reach[starts[p]])
        length[p] = metre_apart(points, starts[p], starts[p + 1] - 1, xy[p])
        turn_along(xy[p], length[p], heading[p])
        slow_in_curves(heading[p], limit, lateral, slowing, speed[p])
        length[p] = micro(length[p])
        for m in range(most):
            xy[p, m, 0], xy[p, m, 1] = micro(xy[p, m, 0]), micro(xy[p, m, 1])
            heading[p, m], speed[p, m] = micro(heading[p, m]), micro(speed[p, m])
    return xy, heading, speed, length, bound, offset


@jit
def metre_apart(points, first, last, out):
    """Length in m of the line `points[first]` to `points[last]`, of which `out` [K, 2] gets places a metre apart, and
    its end from there on."""
    length, i, s = 0.0, first, 0.0
    for k in range(first, last):
        length += np.hypot(points[k + 1, 0] - points[k, 0], points[k + 1, 1] - points[k, 1])
    size = np.hypot(points[i + 1, 0] - points[i, 0], points[i + 1, 1] - points[i, 1])
    for m in range(len(out)):
        while i < last - 1 and m > s + size:
            s, i = s + size, i + 1
            size = np.hypot(points[i + 1, 0] - points[i, 0], points[i + 1, 1] - points[i, 1])
        share = min((m - s) / max(size, 1e-9), 1.0)
        out[m, 0] = points[i, 0] + share * (points[i + 1, 0] - points[i, 0])
        out[m, 1] = points[i, 1] + share * (points[i + 1, 1] - points[i, 1])
    return length


@jit
def turn_along(xy, length, heading):
    """Puts in `heading` [K] the mean of the directions before and after each of the places `xy` [K, 2] of a path,
    without jumps by a full turn; beyond its `length` the last one."""
    before = 0.0
    for m in range(len(xy)):
        if m > length - 1.0 or m == len(xy) - 1:
            heading[m] = heading[m - 1]
            continue
        turn = np.arctan2(xy[m + 1, 1] - xy[m, 1], xy[m + 1, 0] - xy[m, 0])
        if m == 0:
            before = turn
        turn = before + (turn - before + np.pi) % (2.0 * np.pi) - np.pi
        heading[m] = (before + turn) / 2.0
        before = turn


@jit
def slow_in_curves(heading, limit, lateral, slowing, speed):
    """Puts in `speed` [K] the most in m/s a metre apart: `limit`, what turns at `lateral` m/s^2, and what slows down to
    that at `slowing` m/s^2."""
    last = len(heading) - 1
    for m in range(last + 1):
        a, b = max(m - 1, 0), min(m + 1, last)
        curvature = abs(heading[b] - heading[a]) / (b - a)
        speed[m] = min(limit, np.sqrt(lateral / max(curvature, 1e-6)))
    for m in range(last - 1, -1, -1):
        speed[m] = min(speed[m], np.sqrt(speed[m + 1] ** 2 + 2.0 * slowing))


@jit
def poses(xy, heading, path, s):
    """x, y, heading [N, T, 3] at arc lengths `s` [N, T] of the paths `path` [N]."""
    out = np.empty((s.shape[0], s.shape[1], 3))
    for i in range(s.shape[0]):
        p = path[i]
        for t in range(s.shape[1]):
            low = min(max(int(s[i, t]), 0), xy.shape[1] - 2)
            share = s[i, t] - low
            out[i, t, 0] = xy[p, low, 0] * (1.0 - share) + xy[p, low + 1, 0] * share
            out[i, t, 1] = xy[p, low, 1] * (1.0 - share) + xy[p, low + 1, 1] * share
            out[i, t, 2] = heading[p, low] * (1.0 - share) + heading[p, low + 1] * share
    return out


@jit
def first_speeds(path, s, length, urge, halt, unseen, allowed, bound, lane, offset):
    """Speeds [N] at the first step, see `generate.first_speeds`; `halt` [N]: before a light that is not green."""
    count = len(path)
    speed, at, own = np.empty(count), np.empty(count), np.empty(count, np.int64)
    for i in range(count):
        p = path[i]
        part = 0 if s[i] < bound[p, 0] else 2
        own[i] = lane[p, part]
        at[i] = s[i] - offset[p, own[i]]
        speed[i] = allowed[p, min(max(int(s[i]), 0), allowed.shape[1] - 1)] * urge[i]
    before = np.full(offset.shape[1], -1)
    order = np.empty(count, np.int64)  # the first ahead of the others
    for i in range(count):
        k = i
        while k and at[order[k - 1]] < at[i]:
            order[k] = order[k - 1]
            k -= 1
        order[k] = i
    for each in order:
        i = int(each)
        if unseen[i]:
            continue
        if halt[i]:
            room = bound[path[i], 0] - s[i] - length[i] / 2.0 - 1.5
            speed[i] = min(speed[i], np.sqrt(3.0 * max(room, 0.0)))
        ahead = before[own[i]]
        if ahead >= 0:
            gap = max(at[ahead] - at[i] - (length[ahead] + length[i]) / 2.0 - 2.0, 0.0)
            speed[i] = min(speed[i], min(np.sqrt(speed[ahead] ** 2 + 2.5 * gap), gap / 0.9))
        before[own[i]] = i
    return speed


@jit
def meetings(xy, bound, lane, near):
    """`enter`, `leave` and `shared` [P, P] of `traffic.Network`, of paths that all have a connector.

    Points of a path are at most a metre apart, so that about as many as a point is metres away can be left out.
    """
    paths = len(xy)
    enter, leave, shared = np.full((paths, paths), np.inf), np.full((paths, paths), -np.inf), np.zeros((paths, paths))
    for p in range(paths):
        first, last = int(bound[p, 0]), int(bound[p, 1])
        for q in range(paths):
            begin, end = int(bound[q, 0]), int(bound[q, 1])
            if lane[p, 0] == lane[q, 0]:
                k, size = 0, min(last - first, end - begin)
                while k < size:
                    dx, dy = xy[p, first + k, 0] - xy[q, begin + k, 0], xy[p, first + k, 1] - xy[q, begin + k, 1]
                    if np.hypot(dx, dy) > near:
                        break
                    k += 1
                shared[p, q] = first + k
                continue
            for a in range(first, last + 1):
                b = begin
                while b <= end:
                    dx, dy = xy[p, a, 0] - xy[q, b, 0], xy[p, a, 1] - xy[q, b, 1]
                    square = dx * dx + dy * dy
                    if square < near * near:
                        enter[p, q], leave[p, q] = min(enter[p, q], float(a)), float(a)
                        break
                    b += max(int((np.sqrt(square) - near) / 1.01), 1)
    return enter, leave, shared


@jit
def foresee(xy, used, walkers, near, ahead):
    """[P, M, T]: the first metre of each path [P, K, 2] near each of `walkers` [M, T, 2] now or within `ahead` steps;
    inf for paths that are not `used` [P].

    Every third step is looked at. Points of a path are at most a metre apart, so that as many as the walker is metres
    away can be left out.
    """
    paths, count, steps = len(xy), len(walkers), walkers.shape[1]
    coarse = (steps + 2) // 3
    found, first = np.full((paths, count, steps), np.inf), np.empty(coarse)
    for p in range(paths):
        for m in range(count if used[p] else 0):
            for c in range(coarse):
                x, y, k = walkers[m, 3 * c, 0], walkers[m, 3 * c, 1], 0
                first[c] = np.inf
                while k < xy.shape[1]:
                    away = np.hypot(xy[p, k, 0] - x, xy[p, k, 1] - y)
                    if away < near:
                        first[c] = k
                        break
                    k += max(int(away - near), 1)
            for t in range(steps):
                for c in range(t // 3, min((t + ahead) // 3 + 1, coarse)):
                    found[p, m, t] = min(found[p, m, t], first[c])
    return found


@jit
def drive(
    path, start, speed, length, urge, joins, lights, leg, walk, allowed, ends, bound, lane, offset, shared, enter,
    leave, priority, dt, push, comfort, hardest, headway, room, line_room, preview, patience,
):  # fmt: skip
    """Arc lengths and speeds [N, T] of vehicles on their paths, as `traffic.run` says; `lights` may be [0, T]."""
    n, steps, lanes = urge.shape[0], urge.shape[1], offset.shape[1]
    s, v, half = start.copy(), speed.copy(), length / 2.0
    track, speeds = np.zeros((n, steps)), np.zeros((n, steps))
    held, part, own, faster = np.zeros(n, np.bool_), np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n)
    # lists of who is seen: of a lane, and of the connectors from it; and those who have paths to cross ahead of them
    first, first_beyond, following = np.empty(lanes, np.int64), np.empty(lanes, np.int64), np.empty(n, np.int64)
    crossing, through = np.empty(n, np.int64), np.empty(n)
    for i in range(n):
        through[i] = leave[path[i]].max() + half[i] + 0.01  # more than rounding may take
    for t in range(steps):
        first[:], first_beyond[:], crosses = -1, -1, 0
        for i in range(n):
            p = path[i]
            track[i, t], speeds[i, t] = s[i], v[i]
            part[i] = (s[i] >= bound[p, 0]) + (s[i] >= bound[p, 1])
            own[i] = lane[p, part[i]]
            held[i] = False
            if len(lights):
                state, away = lights[leg[p], t], bound[p, 0] - (s[i] + half[i])
                most = CAUTION_BRAKING if state == CAUTION else RED_BRAKING
                held[i] = state != GO and away >= 0.0 and v[i] * v[i] / 2.0 <= most * max(away, 0.05)
            if s[i] < ends[p]:
                if s[i] >= joins[i]:
                    heads, at = (first_beyond, lane[p, 0]) if part[i] == 1 else (first, own[i])
                    following[i], heads[at] = heads[at], i
                if s[i] <= through[i]:
                    crossing[crosses] = i
                    crosses += 1
        for i in range(n):
            p, front, brakes2 = path[i], s[i] + half[i], v[i] * v[i] / 2.0
            gap, leader, line, nearest = np.inf, 0.0, np.inf, -1
            for k in range(3):  # the vehicle ahead on one's own path
                if k == 2 and lane[p, 2] == lane[p, 0]:  # a path of one lane
                    continue
                j = first_beyond[lane[p, 0]] if k == 1 else first[lane[p, k]]
                while j >= 0:
                    q = path[j]
                    if k == 1 and s[j] - half[j] < shared[p, q]:
                        place = s[j]
                    else:
                        place = offset[p, own[j]] + (s[j] - offset[q, own[j]])  # nan on another connector
                    away = place - s[i] - (half[i] + half[j])
                    if j != i and place > s[i] and (away < gap or (away == gap and j < nearest)):
                        gap, leader, nearest = away, v[j], j
                    j = following[j]
            # lines to stop at: a light, a stretch to leave to others, people
            if held[i]:
                line = bound[p, 0] - front
            for k in range(crosses if s[i] <= through[i] else 0):
                j = crossing[k]
                if enter[p, path[j]] < np.inf and waits(i, j, path, s, v, half, held, enter, leave, priority, patience):
                    line = min(line, enter[p, path[j]] - 1.0 - front)
            for m in range(walk.shape[1]):
                free = walk[p, m, t] - 2.5 - front
                if free > -0.5 and brakes2 <= RED_BRAKING * max(free, 0.05):
                    line = min(line, free)
            here = min(int(s[i]), allowed.shape[1] - 1)
            soon = min(int(s[i] + preview * v[i]), allowed.shape[1] - 1)
            wanted = min(allowed[p, here], allowed[p, soon]) * urge[i, t] if urge[i, t] >= 0.0 else urge[i, t]
            change = acceleration(v[i], wanted, gap, leader, line, push, comfort, hardest, headway, room, line_room)
            faster[i] = max(v[i] + change * dt, 0.0)
        for i in range(n):
            s[i], v[i] = s[i] + (v[i] + faster[i]) / 2.0 * dt, faster[i]
    return track, speeds


@jit
def acceleration(v, wanted, gap, leader, line, push, comfort, hardest, headway, room, line_room):
    """Acceleration of the driver model, m/s^2, at `gap` metres behind one of speed `leader`, and before a line."""
    share, scale = v / max(wanted, 0.1), 2.0 * np.sqrt(push * comfort)
    if wanted < 0.0:  # who brakes at will
        free = wanted
    elif wanted == 0.0:  # who wants to stand does not creep
        free = -comfort * min(4.0 * share, 1.2)
    elif share > 1.0:
        free = -comfort * min(4.0 * (share - 1.0), 1.2)
    else:
        free = push * (1.0 - share * share * (share * share))
    behind = (room + max(v * headway + v * (v - leader) / scale, 0.0)) / max(gap, 0.1)
    before = (line_room + max(v * 0.5 + v * v / scale, 0.0)) / max(line, 0.1)
    change = min(free - push * (behind * behind), free - push * (before * before))
    return min(max(change, -hardest), push)


@jit
def waits(i, j, path, s, v, half, held, enter, leave, priority, patience):
    """True if vehicle i leaves to j the stretch that their paths share.

    Who is on it, or cannot stop before it, has it. Else i waits for a j of higher right of way, or of equal right and
    earlier arrival, that arrives before i would be through.
    """
    p, q = path[i], path[j]
    front, other_front, rear, other_rear = s[i] + half[i], s[j] + half[j], s[i] - half[i], s[j] - half[j]
    senior = priority[q] - priority[p]
    if rear > leave[p, q] or other_rear > leave[q, p]:
        return False
    margin, other_margin = enter[p, q] - 1.0 - front, enter[q, p] - 1.0 - other_front
    inside = margin < -0.3 or v[i] * v[i] / 2.0 > INSIDE_BRAKING * max(margin, 0.05)
    other_inside = other_margin < -0.3 or v[j] * v[j] / 2.0 > INSIDE_BRAKING * max(other_margin, 0.05)
    if other_inside and not inside:
        return True
    # two that can no longer both pass: the junior one still brakes
    if senior < 0 or (inside and not (other_inside and margin > -0.3)) or (held[j] and not inside):
        return False
    other_arrival = max(enter[q, p] - other_front, 0.0) / max(v[j], 1.5)
    if senior == 0:
        arrival = max(enter[p, q] - front, 0.0) / max(v[i], 1.5)
        if arrival < other_arrival or (arrival == other_arrival and j > i):
            return False
    return inside or max(leave[p, q] - rear, 0.0) / max(v[i], 4.0) + patience > other_arrival


@jit
def touch(x, y, cos, sin, length, width, other_x, other_y, other_cos, other_sin, other_length, other_width):
    """True if two boxes, given by half lengths and widths, overlap: the separating axis theorem."""
    dx, dy = other_x - x, other_y - y
    c, d = abs(cos * other_cos + sin * other_sin), abs(cos * other_sin - sin * other_cos)
    return (
        abs(dx * cos + dy * sin) <= length + other_length * c + other_width * d
        and abs(dy * cos - dx * sin) <= width + other_length * d + other_width * c
        and abs(dx * other_cos + dy * other_sin) <= other_length + length * c + width * d
        and abs(dy * other_cos - dx * other_sin) <= other_width + length * d + width * c
    )


@jit
def meet(i, j, pose, cos, sin, size, valid, clearance):
    """True if bodies i and j come within `clearance` metres of each other at some step."""
    length, width = size[i, 0] / 2.0 + clearance, size[i, 1] / 2.0 + clearance
    reach = np.hypot(size[i, 0], size[i, 1]) / 2.0 + np.hypot(size[j, 0], size[j, 1]) / 2.0 + 1.5 * clearance
    for t in range(pose.shape[1]):
        if not (valid[i, t] and valid[j, t]):
            continue
        dx, dy = pose[j, t, 0] - pose[i, t, 0], pose[j, t, 1] - pose[i, t, 1]
        if dx * dx + dy * dy < reach * reach and touch(
            pose[i, t, 0], pose[i, t, 1], cos[i, t], sin[i, t], length, width,
            pose[j, t, 0], pose[j, t, 1], cos[j, t], sin[j, t], size[j, 0] / 2.0, size[j, 1] / 2.0,
        ):  # fmt: skip
            return True
    return False


@jit
def any_near_first(pose, cos, sin, size, valid, clearance):
    """True if any body comes within `clearance` of the first one."""
    for j in range(1, len(pose)):  # noqa: SIM110 (numba compiles no generator)
        if meet(0, j, pose, cos, sin, size, valid, clearance):
            return True
    return False


@jit
def sifted(pose, cos, sin, size, valid):
    """bool [N]: the bodies that stay when each that touches an earlier one is left out."""
    keep, ways = np.ones(len(pose), np.bool_), np.empty((len(pose), 4))
    for i in range(len(pose)):  # the box around all that a body ever covers, and a little more
        reach = np.hypot(size[i, 0], size[i, 1]) / 2.0 + 0.01
        low_x, low_y, high_x, high_y = np.inf, np.inf, -np.inf, -np.inf
        for t in range(pose.shape[1]):
            low_x, high_x = min(low_x, pose[i, t, 0]), max(high_x, pose[i, t, 0])
            low_y, high_y = min(low_y, pose[i, t, 1]), max(high_y, pose[i, t, 1])
        ways[i, 0], ways[i, 1], ways[i, 2], ways[i, 3] = low_x - reach, low_y - reach, high_x + reach, high_y + reach
        for j in range(i):
            apart = (
                ways[i, 0] > ways[j, 2] or ways[j, 0] > ways[i, 2] or ways[i, 1] > ways[j, 3] or ways[j, 1] > ways[i, 3]
            )
            if keep[j] and not apart and meet(i, j, pose, cos, sin, size, valid, 0.0):
                keep[i] = False
                break
    return keep


@jit
def in_frame(own_x, own_y, cos, sin, x, y):
    """x and y of a point in the frame of a log: turned by an angle of `cos` and `sin`, shifted by `x` and `y`;
    rounded."""
    return micro(own_x * cos - own_y * sin + x), micro(own_x * sin + own_y * cos + y)


@jit
def placed(points, cos, sin, x, y, height):
    """Places [P, 3] of `points` [P, 2] in the frame of a log, see `in_frame`, at `height`."""
    out = np.empty((len(points), 3))
    for i in range(len(points)):
        out[i, 0], out[i, 1] = in_frame(points[i, 0], points[i, 1], cos, sin, x, y)
        out[i, 2] = micro(height)
    return out


@jit
def recorded(order, seen, pose, speed, size, heading, heading_cos, heading_sin, cos, sin, x, y, height):
    """Positions [M, T, 3], headings [M, T], velocities [M, T, 2], sizes [M, T, 3] and validity [M, T] of the tracks of
    a log: the bodies `order` [M], where they are `seen` [N, T], in the frame of `in_frame`; zeros elsewhere.

    `heading` [M, T] is in that frame already.
    """
    count, steps = len(order), seen.shape[1]
    position, valid = np.zeros((count, steps, 3)), np.zeros((count, steps), np.bool_)
    turn, sizes = np.zeros((count, steps), np.float32), np.zeros((count, steps, 3), np.float32)
    velocity = np.zeros((count, steps, 2), np.float32)
    for m in range(count):
        i = order[m]
        for t in range(steps):
            if seen[i, t]:
                valid[m, t] = True
                position[m, t, 0], position[m, t, 1] = in_frame(pose[i, t, 0], pose[i, t, 1], cos, sin, x, y)
                position[m, t, 2] = micro(height) + size[i, 2] / 2.0
                turn[m, t] = heading[m, t]
                velocity[m, t, 0] = heading_cos[m, t] * speed[i, t]
                velocity[m, t, 1] = heading_sin[m, t] * speed[i, t]
                for k in range(3):
                    sizes[m, t, k] = size[i, k]
    return position, turn, velocity, sizes, valid
