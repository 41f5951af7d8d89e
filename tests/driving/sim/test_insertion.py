"""Insertion: who has to wait for room, for how long, and where nobody does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.datasets.log import PEDESTRIAN, VEHICLE
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.sim import insertion, traffic
from longhaul.driving.sim.config import Config
from longhaul.driving.sim.simulator import driving
from longhaul.driving.sim.traffic import Partners, Scene
from tests.helpers.driving_scenarios import DT, ENDLESS, Trip, bank, line, scenario, trip

T, BEGINS = 61, 31
EGO = line((0, 0), (5, 0), T)
"""Drives on at 5 m/s: 15.5 m after BEGINS steps, its front bumper 0.5 m before a car that stands 20 m ahead."""


def appears(*places: tuple[float, float], **about: Any) -> Scenario:
    """The ego, and others that stand at `places` and whose tracks begin after BEGINS steps."""
    present = np.ones((T, 1 + len(places)), bool)
    present[:BEGINS, 1:] = False
    return scenario([EGO, *(line(place, (0, 0), T) for place in places)], present=present, road=None, **about)


def first(driven: Trip, n: int) -> int:
    """Step at which object `n` is first in the world."""
    return 1 + int(np.argmax(driven.states.inserted[:, n]))


def test_a_track_waits_for_room_where_agents_drive_and_begins_as_logged_in_log_traffic() -> None:
    made = appears((19.9, 0), (23.4, 0), (19.9, 3.5), (60, 0))
    driven = trip(made, **ENDLESS)
    # the ego's rear bumper is 2 m beyond their front ones 25.9 m and 29.4 m ahead; the others are beside, and far away
    assert [first(driven, n) for n in (1, 2, 3, 4)] == [52, 59, BEGINS, BEGINS]
    assert driven.metrics["collision"][0] == 0.0
    logged = trip(made)
    assert logged.states.inserted is None and logged.metrics["collision"] == [1.0]


def test_a_track_that_was_lost_waits_likewise_and_who_is_there_stays() -> None:
    made = appears((19.9, 0), (30, 0), (19.9, 3.5))
    present = made.present.copy()
    present[:10, 1], present[:, 2], present[:BEGINS, 3], present[50:, 3] = True, True, True, False
    driven = trip(made._replace(present=present), **ENDLESS)
    there = driven.states.inserted
    assert there[:9, 1].all() and not there[9:51, 1].any() and there[51:, 1].all()
    assert driven.metrics["collision"][0] == 1.0
    np.testing.assert_array_equal(there[:, 2:4], present[1:, 2:4])  # one of them is driven through


def test_vehicles_that_react_have_room_too() -> None:
    """A walker who stands in the way of one is not put before it."""
    poses = [line((0, -60), (0, 0), T), line((0, 0), (5, 0), T), line((19, 0), (0, 0), T), line((19, 9), (0, 0), T)]
    present = np.ones((T, 4), bool)
    present[:BEGINS, 2:] = False
    kinds, sizes = [VEHICLE, VEHICLE, PEDESTRIAN, PEDESTRIAN], [(4.0, 2.0)] * 2 + [(0.8, 0.8)] * 2
    driven = trip(scenario(poses, kinds=kinds, sizes=sizes, present=present, road=None), traffic="idm")
    assert first(driven, 3) == BEGINS < first(driven, 2)
    way = driven.states.reactive.s[first(driven, 2) - 2 :, 1]
    assert way[0] < 19.0 + 0.4 + 2.0 + 2.0 <= way[1] + 0.01


def near(x: float, y: float, turn: float, speeds: tuple[float, float]) -> bool:
    """Whether a track at (x, y) of the ego's frame, with `turn`, has no room; both are 4 m by 2 m."""
    heading, speed, pair = jnp.array([0.0, turn]), jnp.array(speeds), jnp.ones(2)
    cos, sin = jnp.cos(heading), jnp.sin(heading)
    here = Scene(
        jnp.array([0.0, x]), jnp.array([0.0, y]), heading, cos, sin, speed * cos, speed * sin, 2 * pair, pair, pair,
        pair > 0, jnp.array([0, -1]),
    )  # fmt: skip
    return bool(crowded(np.int32(1), here, here.slot >= 0, np.float32(DT)))


crowded = jax.jit(insertion.crowded)


@pytest.mark.parametrize(("behind", "ahead"), [(0.0, 0.0), (10.0, 4.0), (10.0, 14.0)])
def test_the_follower_is_at_krauss_safe_distance(behind: float, ahead: float) -> None:
    least = 2.0 + behind * DT + max(behind**2 - ahead**2, 0.0) / 9.0
    for x, speeds in ((1.0, (behind, ahead)), (-1.0, (ahead, behind))):
        assert near(x * (4.0 + least - 0.01), 0.5, 0.0, speeds)
        assert not near(x * (4.0 + least + 0.01), 0.5, 0.0, speeds)


def test_others_need_no_more_than_not_to_touch() -> None:
    assert near(0.0, 2.19, 0.0, (10.0, 0.0)) and not near(0.0, 2.21, 0.0, (10.0, 0.0))  # beside
    assert near(3.19, 0.0, np.pi / 2, (10.0, 10.0)) and not near(3.21, 0.0, np.pi / 2, (10.0, 10.0))  # across
    assert near(4.19, 0.0, np.pi, (10.0, 10.0)) and not near(4.21, 0.0, np.pi, (10.0, 10.0))  # towards each other


def test_where_nobody_else_drives_tracks_begin_as_logged() -> None:
    worlds = bank(scenario([EGO, EGO + [0, 9, 0], EGO + [0, 18, 0]], drivers=3, road=None), agents=3)
    for waits, settings in (
        (False, {}),
        (False, {"traffic": "constant"}),
        (False, {"driver": "log", "agents": 3}),
        (True, {"agents": 3}),
        (True, {"traffic": "idm"}),
    ):
        assert driving(worlds, Config(**settings)).inserts() == waits
    for waits, kind, slots in (
        (False, traffic.REPLAYED, [True, False, False]),
        (False, traffic.DRIFTING, [True, False, False]),
        (True, traffic.REACTING, [True, False, False]),
        (True, traffic.DRIVEN, [True, True, True]),
        (True, traffic.REPLAYED, [True, False, True]),
    ):
        one = jnp.ones(())
        assert insertion.simulated(Partners(jnp.int32(kind), jnp.array(slots), one, one, one > 0, one > 0)) == waits
