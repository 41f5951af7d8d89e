"""Lengths of the flat arrays of `tables`, by what the index of a shard says of its scenarios; and tables that are
padded to that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from longhaul.driving.scenario import distance_field
from longhaul.driving.scenario.lane_graph import FINE
from longhaul.driving.scenario.scenario import ONWARD, ONWARD_SPACING
from longhaul.driving.sim.device_bank import AHEAD, BEHIND, EXTENSION, FLAT, PATH_SPACING, PATH_WINDOW, DeviceBank

Room = Mapping[str, int]
"""Length of each array of `tables.FLAT`."""


class Needs(NamedTuple):
    """Upper bounds, by the names of `tables.FLAT`."""

    shared: dict[str, int]  # what all scenarios of a chunk share
    each: dict[str, np.ndarray]  # int64 [scenarios]: what a scenario adds


def needs(
    sizes: Mapping[str, np.ndarray],
    extents: Mapping[str, np.ndarray],
    *,
    agents: int,
    horizon: int | None,
    reactive: bool,
) -> Needs:
    """Needs of scenarios, int64 [scenarios] all, whose shapes are `sizes` (letters as of `packing.LETTERS`) and whose
    `Extents` are `extents`, cut to `agents` controlled agents and `horizon` steps, to any number of objects.

    Exact, but for routes where some agents are cut, for lights where steps or agents are, and for paths: those count as
    if nobody were controlled and everybody went on past the log's end.
    """
    steps = np.minimum(sizes["T"], horizon or np.iinfo(np.int64).max)
    driven = np.minimum(extents["routes"], agents)
    points = np.minimum(extents["points"], driven * sizes["R"])
    blocks = np.where(np.minimum(sizes["H"], sizes["W"]) < 2, 0, tiled(sizes["H"]) * tiled(sizes["W"]))
    shared = {
        ".motion": 0,
        ".routes.points": BEHIND + 1 + AHEAD,
        ".lights.states": 0,
        ".cells": 2 * distance_field.COARSE,
        ".tiles": 0,
        ".map.place": 1,
        ".map.shape": 1,
        ".map.lane": 1,
        ".map.directory": 1,
        ".map.points": 1,
        ".map.lanes": FINE * FINE,
    }
    each = {
        ".motion": steps,
        ".routes.points": points + driven * (BEHIND + AHEAD),
        ".lights.states": steps * extents["courses"],
        ".cells": extents["cells"],
        ".tiles": blocks,
        ".map.place": sizes["M"],
        ".map.shape": sizes["M"],
        ".map.lane": extents["lanes"],
        ".map.directory": np.where(sizes["B"] > 0, sizes["Y"] * sizes["X"], 0),
        ".map.points": sizes["B"],
        ".map.lanes": sizes["B"] * FINE * FINE,
    }
    if reactive:
        # of each way: what is left of a metre and of a step, where it goes on to, both ends, and the window
        beyond = np.ceil(max(ONWARD * ONWARD_SPACING, EXTENSION) / PATH_SPACING).astype(np.int64) + 2 + PATH_WINDOW
        shared[".paths.lines.points"] = 1 + PATH_WINDOW
        ways = np.ceil(extents["way"] / PATH_SPACING).astype(np.int64)
        each[".paths.lines.points"] = ways + extents["movers"] * beyond
    return Needs(shared, each)


def tiled(side: np.ndarray) -> np.ndarray:
    """Tiles across many sides, int64."""
    return -(-(side - 1) // distance_field.TILE)


def lengths(host: DeviceBank) -> dict[str, int]:
    """Lengths of the flat arrays of some tables."""
    return {name: leaf.shape[FLAT[name]] for name, leaf in _leaves(host) if name in FLAT}


def padded(host: DeviceBank, room: Room) -> DeviceBank:
    """The tables with zeros where there is room behind the last scenario. ValueError where there is too little."""

    def pad(path: Any, leaf: np.ndarray) -> np.ndarray:
        name = jax.tree_util.keystr(path)
        if name not in FLAT:
            return leaf
        long = leaf.shape[FLAT[name]]
        if long > room[name]:
            raise ValueError(
                f"{name} has {long} places; by the index of the shards it should have {room[name]} at most"
            )
        widths = [(0, 0)] * leaf.ndim
        widths[FLAT[name]] = (0, room[name] - long)
        return np.pad(leaf, widths)

    longer: DeviceBank = jax.tree_util.tree_map_with_path(pad, host)
    return longer


def _leaves(host: DeviceBank) -> Iterator[tuple[str, np.ndarray]]:
    return ((jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(host))
