"""What a scenario needs in `tables` beside what its shapes tell: counts that shards keep, so that the room for a chunk
of scenarios is known before any is read. NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets.log import CYCLIST, PEDESTRIAN, VEHICLE
from longhaul.driving.scenario import distance_field
from longhaul.driving.scenario.scenario import Scenario

STIR = 0.5
"""A logged vehicle that moves by less than this, m, stands still: trackers jitter."""

MOVES = 1.0
"""Metres that a vehicle's log must go for it to react."""

MOST = 2**32 - 1
"""Beyond any count."""


class Extents(NamedTuple):
    """Counts of one scenario, whole numbers up to MOST."""

    routes: int  # controlled agents
    points: int  # of their routes together
    slow: int  # the first slot beside the ego with a cyclist or pedestrian; MOST: there is none
    courses: int  # different courses of lights' states, and one that is dark
    cells: int  # bytes of the field's own tiles
    lanes: int  # lanes' rows of the road
    movers: int  # vehicles whose log goes MOVES metres
    way: int  # m: the logged ways of these together, each rounded up


def extents(scenario: Scenario, pose: np.ndarray) -> Extents:
    """The extents of `scenario` whose `pose` is as a shard gives it back: rounded to its units."""
    driven = scenario.controlled >= 0
    kinds = np.where(driven, scenario.kind[np.maximum(scenario.controlled, 0)], 0)
    slow = 1 + np.flatnonzero(np.isin(kinds[1:], (CYCLIST, PEDESTRIAN)))
    length = arc_lengths(pose[None], scenario.present[None])[0, -1]
    moves = (scenario.kind == VEHICLE) & (length >= MOVES)
    field = scenario.field
    cells = 0 if min(field.shape) < 2 else len(distance_field.tile([field]).cells) - 2 * distance_field.COARSE
    return Extents(
        routes=int(driven.sum()),
        points=int(scenario.route_points[driven].sum()),
        slow=int(slow[0]) if len(slow) else MOST,
        courses=len(courses(scenario.light_s, scenario.light_state)[0]),
        cells=cells,
        lanes=int((scenario.road.lane >= 0).sum()),
        movers=int(moves.sum()),
        way=int(np.ceil(length[moves]).sum()),
    )


def arc_lengths(pose: np.ndarray, present: np.ndarray) -> np.ndarray:
    """The way [S, T, N] that agents have come since the log first saw them, m, in steps of at least STIR."""
    travelled = np.zeros(present.shape, np.float32)
    anchor, seen = pose[:, 0, :, :2].copy(), present[:, 0].copy()
    for t in range(1, present.shape[1]):
        moved = np.linalg.norm(pose[:, t, :, :2] - anchor, axis=-1)
        counts = present[:, t] & seen & (moved >= STIR)
        travelled[:, t] = travelled[:, t - 1] + np.where(counts, moved, 0.0)
        anchor = np.where((counts | (present[:, t] & ~seen))[..., None], pose[:, t, :, :2], anchor)
        seen |= present[:, t]
    return travelled


def courses(s: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different courses of states [K, T] of lights at `s` [A, L], the first dark throughout; and which of them each
    light has, as `s`; `state` is [A, L, T], not negative."""
    lit = np.isfinite(s) & state.any(-1)
    dark = np.zeros((1, state.shape[-1]), state.dtype)
    each, number = np.unique(np.concatenate([dark, state[lit]]), axis=0, return_inverse=True)
    which = np.zeros(s.shape, np.int64)
    which[lit] = number.reshape(-1)[1:]
    return each, which
