"""Scenarios that the simulator runs on: one log compiled to fixed shapes, and a bank of many.

A `Scenario` is local: the origin is the ego's position at the log's current step, axes stay those of the source,
float32. N agents (padded), T steps **from the current step on** (t = 0 is where simulation starts), A controlled
agents, R route points one metre apart, L lights of one route, C cells of a distance field.

No JAX here: scenarios are made on the host, by NumPy, in parallel processes; `Bank` holds arrays of either kind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets.log import CYCLIST, PEDESTRIAN, VEHICLE

ROUTE_SPACING = 1.0
"""Metres between two points of a route."""

CELL = 0.5
"""Metres between two samples of a distance field."""

ONWARD, ONWARD_SPACING = 16, 2.5
"""Points, and metres between them, of a vehicle's way after the log's last sight of it."""


class Road(NamedTuple):
    """The road around the routes as M directed segments (rows), those of its W lanes first, and a grid of G blocks
    along the routes that says which rows are near; made by `lane_graph.make_road`. The last two columns follow from the
    others."""

    origin: np.ndarray  # float32 [2]: x, y from which places count
    place: np.ndarray  # int16 [M, 2], 2 cm: a row's middle
    half: np.ndarray  # int16 [M, 2], 2 mm: from its middle to its end
    kind: np.ndarray  # int8 [M]: see `lanes.CODES`
    lane: np.ndarray  # int16 [M]: number of the lane, 0 .. W-1; -1: none
    lane_limit: np.ndarray  # float32 [W]: speed limit, m/s; 0 unknown
    lane_flags: np.ndarray  # int8 [W]: bits `lanes.LIMIT_INFERRED`, `lanes.JUNCTION`
    corner: np.ndarray  # float32 [2]: x, y of the grid's first cell
    cells: np.ndarray  # int16 [G, 2]: column and row of each block
    directory: np.ndarray  # int16 [rows, columns]: the block of a cell, or the nearest one
    near: np.ndarray  # int16 [G, CANDIDATES]: rows for an observation, nearest first; -1 is none
    near_lanes: np.ndarray  # int16 [G, FINE * FINE, NEAREST]: lanes' rows near each part of a block; -1 is none


NO_ROAD = Road(
    origin=np.zeros(2, np.float32),
    place=np.zeros((0, 2), np.int16),
    half=np.zeros((0, 2), np.int16),
    kind=np.zeros(0, np.int8),
    lane=np.zeros(0, np.int16),
    lane_limit=np.zeros(0, np.float32),
    lane_flags=np.zeros(0, np.int8),
    corner=np.zeros(2, np.float32),
    cells=np.zeros((0, 2), np.int16),
    directory=np.zeros((1, 1), np.int16),
    near=np.zeros((0, 0), np.int16),
    near_lanes=np.zeros((0, 0, 0), np.int16),
)
"""Road of a source without a map."""


class Scenario(NamedTuple):
    id: str
    steps: int  # T of this scenario; a policy acts at most T - 1 times
    dt: float
    # what moves
    pose: np.ndarray  # float32 [T, N, 3]: x, y, heading
    velocity: np.ndarray  # float32 [T, N, 2]
    present: np.ndarray  # bool [T, N]
    size: np.ndarray  # float32 [N, 2]: length, width
    kind: np.ndarray  # int8 [N]: log.VEHICLE ...; 0 is padding
    # who is driven, ego first; -1 is padding
    controlled: np.ndarray  # int32 [A], index into N
    # the route of each controlled agent: s = ROUTE_SPACING * index from where it starts
    route: np.ndarray  # float32 [A, R, 3]: x, y, heading; past `route_length` it goes on for lookahead
    route_length: np.ndarray  # float32 [A]: the logged path's length, m: the goal
    route_points: np.ndarray  # int32 [A]: how many of R are real
    expert_s: np.ndarray  # float32 [A, T]: the log's own arc length along the route over time
    # lights that the route meets
    light_s: np.ndarray  # float32 [A, L]: arc length of the stop line; inf is padding
    light_state: np.ndarray  # int8 [A, L, T]: RED, YELLOW, GREEN, or 0
    # signed distance to the edge of the road, metres, negative on the road; sampled every CELL metres around the routes
    field: np.ndarray  # int16 [H, W] centimetres; row = y, column = x. Empty [0, 0] where the source has no road edges
    field_origin: np.ndarray  # float32 [2]: x, y of sample [0, 0]
    # for pictures only: polylines, [(kind, float32 [P, 2])]
    drawing: tuple[tuple[int, np.ndarray], ...]
    # the road around the routes, for lanes and observations
    road: Road = NO_ROAD
    # how K vehicles that are under way when the log ends, or loses them, go on along the lanes
    onward_of: np.ndarray = np.zeros(0, np.int16)  # int16 [K], index into N
    onward: np.ndarray = np.zeros((0, 2), np.float32)  # float32 [K * ONWARD, 2]: x, y, ONWARD_SPACING apart
    # tracks that may be controlled: "vehicles" or "all", see `from_log.CONTROLS`; "chosen": tracks by number
    control: str = "vehicles"


RED, YELLOW, GREEN = 1, 2, 3
"""States of a light; 0: none, or unknown."""

CONTROLS = {"vehicles": (VEHICLE,), "all": (VEHICLE, CYCLIST, PEDESTRIAN)}
"""Kinds of road user that may be controlled beside the ego."""

CANDIDATES, NEARBY = 384, 256
"""Rows of a block's list for observations. Where more lie within RANGE, NEARBY of them are the nearest and the rest are
spread evenly over the others, two and one by turns and the spread ones in bit-reversed order, so that any beginning of
the list is as fair: 200 rows reach RANGE, and nearby few are missing."""
