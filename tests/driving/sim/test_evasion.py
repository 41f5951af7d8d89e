"""Evasion: who is believed not to react, who is not, and what agents do about them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.datasets.log import PEDESTRIAN, VEHICLE
from longhaul.driving.scenario.scenario import RED
from longhaul.driving.sim import evasion
from longhaul.driving.sim.features import Features
from longhaul.driving.sim.geometry import FREE, Relative
from longhaul.driving.sim.safety import View
from longhaul.driving.sim.traffic import Scene
from tests.driving.sim.test_safety import CHECKED, SPEED, T, both
from tests.helpers import driving_scenarios
from tests.helpers.driving_scenarios import DT, line, scenario, trip

STANDS = line((0, 0), (0, 0), T)
watch = jax.jit(evasion.watch)


def wide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A road of 18 m."""
    return np.abs(y) - 9.0


def changing(start: float, speed: float, acceleration: float, begins: float = 0.0) -> np.ndarray:
    """Poses [T, 3] along x of somebody who wavers by 0.2 m/s^2, as drivers do, and from `begins` seconds on changes
    speed, down to standstill."""
    time = DT * np.arange(T)
    wavers = 0.03 * np.sin(2.0 * np.pi * time) * (time < begins)
    speeds = np.maximum(speed + wavers + acceleration * np.maximum(time - begins, 0.0), 0.0)
    x = start + np.concatenate([[0.0], np.cumsum(0.5 * (speeds[1:] + speeds[:-1]) * DT)])
    return np.stack([x, np.zeros(T), np.zeros(T)], -1).astype(np.float32)


def watched(
    start: tuple[float, float], speed: float, pushes: list[float], turn: float = 0.0, aside: float = 0.0,
    own: float = 0.0, kind: int = VEHICLE, facing: float = 0.0, excused: bool = False,
) -> evasion.Habits:  # fmt: skip
    """Habits of an object after `pushes`, m/s^2, one a step, and `turn` across, seen from an agent that keeps the speed
    `own` along x. The object comes from `start` with `speed` and the heading `facing`, drifts to the left of that by
    `aside`, m/s, and may be `excused`."""
    (x, y), heading, mine = start, facing, 0.0
    blank = Features(*[None] * len(Features._fields))  # type: ignore[arg-type]
    habits = None
    for push in [0.0, *pushes]:
        vx, vy = speed * np.cos(heading) - aside * np.sin(heading), speed * np.sin(heading) + aside * np.cos(heading)
        cos, sin = np.cos(heading), np.sin(heading)
        numbers = (x, y, heading, cos, sin, vx, vy, 2.0, 1.0, float(kind))
        here = Scene(*[*(jnp.full(1, n, jnp.float32) for n in numbers), jnp.array([True]), jnp.array([-1])])
        x_rel, y_rel, cos_rel, sin_rel, vx_rel, vy_rel, length, width = (
            jnp.full((1, 1), n, jnp.float32) for n in (x - mine, y, cos, sin, vx - own, vy, 2.0, 1.0)
        )
        half = jnp.full(1, 2.0), jnp.full(1, 1.0)
        others = Relative(x_rel, y_rel, cos_rel, sin_rel, half, (length, width), vx_rel, vy_rel)
        features = blank._replace(others=others, seen=jnp.array([[True]]))
        if habits is None:
            habits = evasion.begin(here)
        else:
            yes, may = jnp.array([True]), jnp.array([excused])
            habits = watch(habits, here, features, jnp.full(1, own), yes, may, jnp.float32(DT))
        x, y, mine = x + vx * DT, y + vy * DT, mine + own * DT
        # a turn of the velocity by `turn` across, whose change has the heading after it
        heading += turn * DT / max(speed, 1.0)
        speed += push * DT
    assert habits is not None
    return habits


WAVERS = [0.1, -0.1] * 5


@pytest.mark.parametrize(
    ("start", "speed", "expected"),
    [
        pytest.param(-18.0, 8.0, True, id="too fast"),
        pytest.param(-24.0, 8.0, False, id="more than 2 s away"),
        pytest.param(-6.5, 1.5, False, id="braking of 0.45 m/s^2 is enough"),
        pytest.param(20.0, 8.0, False, id="is past"),
    ],
)
def test_who_runs_into_somebody_else_is_believed_not_to_react(start: float, speed: float, expected: bool) -> None:
    """An agent that stands 10 m beside sees the first of two others drive at the second, which stands."""
    x, y, vx = jnp.array([0.0, start, 0.0]), jnp.array([0.0, 10.0, 10.0]), jnp.array([0.0, speed, 0.0])
    zeros, ones = jnp.zeros(3), jnp.ones(3)
    here = Scene(x, y, zeros, ones, zeros, vx, zeros, 2.0 * ones, ones, zeros, ones > 0.0, jnp.array([0, -1, -1]))
    blank = Features(*[None] * len(Features._fields))  # type: ignore[arg-type]
    features = blank._replace(others=Relative(x[None], y[None], *[None] * 6))  # type: ignore[arg-type]
    asleep = jnp.array([False, True, False])
    found = evasion.runs_into(here, features, jnp.array([True]), asleep)
    np.testing.assert_array_equal(found, [False, expected, False])
    assert not evasion.runs_into(here, features, jnp.array([True]), ~asleep)[1]


@pytest.mark.parametrize(
    ("start", "speed", "pushes", "more", "expected"),
    [
        pytest.param((-20, 0), 8.0, [0.0] * 8, {}, True, id="keeps its velocity"),
        pytest.param((-20, 0), 8.0, WAVERS[:8], {}, False, id="wavers"),
        pytest.param((-16, 0), 6.0, [1.2] * 8, {}, False, id="pushes gently"),
        pytest.param((-20, 0), 8.0, [-0.5] * 8, {}, False, id="brakes too little"),
        pytest.param((32, 0), 8.0, [0.0] * 8, {"facing": np.pi}, False, id="is far"),
    ],
)  # fmt: skip
def test_who_is_believed_not_to_react(
    start: tuple[float, float], speed: float, pushes: list[float], more: dict[str, float], expected: bool
) -> None:
    assert watched(start, speed, pushes, **more).blind[0] == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pushes", "more", "expected"),
    [
        pytest.param([4.0] * 4 + WAVERS, {}, True, id="pushed hard, always alike"),
        pytest.param([4.2, 3.8] * 2 + WAVERS, {}, False, id="pushed hard, as noise shows it"),
        pytest.param([4.0] * 2 + WAVERS, {}, False, id="pushed hard for a moment"),
        pytest.param([2.3] * 4 + WAVERS, {}, False, id="pushed as copies do"),
        pytest.param([-6.0] * 4 + WAVERS, {}, False, id="braked hard"),
        pytest.param([0.0] * 5, {"turn": 5.8}, True, id="swerved"),
        pytest.param([0.0] * 5, {"turn": 4.5}, False, id="steered as copies do"),
        pytest.param([4.0] * 4 + WAVERS, {"kind": PEDESTRIAN}, False, id="is no vehicle"),
        pytest.param([4.0] * 4 + WAVERS, {"excused": True}, False, id="evaded"),
    ],
)
def test_who_drove_harshly_and_always_alike_is_wild_for_ever(
    pushes: list[float], more: dict[str, float], expected: bool
) -> None:
    habits = watched((-20, 40), 8.0, pushes, **more)  # type: ignore[arg-type]
    assert habits.wild[0] == expected
    assert habits.blind[0] == expected


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([line((-40, 0), (8, 0), T)], id="from behind"),
        pytest.param([line((-40, 0), (8, 0), T), line((9, 0), (0, 0), T)], id="from behind, with somebody ahead"),
        pytest.param([changing(-60, 4, 4.0)], id="from behind, pushing"),
    ],
)
def test_who_stands_gets_out_of_the_way_of_somebody_who_does_not_react(others: list[np.ndarray]) -> None:
    free, checked = both(scenario([STANDS, *others], road=wide))
    assert (free.metrics["collision"][0], checked.metrics["collision"][0]) == (1.0, 0.0)
    assert checked.metrics["offroad"][0] == 0.0


def test_near_who_is_asleep_everybody_who_keeps_the_velocity_is_expected_to_keep_it() -> None:
    unknown, never, ones = jnp.zeros(3), jnp.zeros(3, bool), jnp.ones(3)
    half = jnp.full(1, 2.0), jnp.full(1, 1.0)
    others = Relative(
        jnp.array([-20.0, 3.0, 9.0]), 3.0 * ones, ones, unknown, half, (2.0 * ones, ones), unknown, unknown
    )
    features = Features(*[None] * len(Features._fields))._replace(  # type: ignore[arg-type]
        others=others, seen=~never, blocks=jnp.full(3, FREE)
    )
    habits = evasion.Habits(
        unknown, unknown, unknown, unknown, jnp.array([0.6, 0.6, 0.2]), unknown, unknown, never, never.at[0].set(True)
    )
    view = View(*[None] * len(View._fields))._replace(features=features)  # type: ignore[arg-type]
    view, kept, _ = evasion.around(view, habits)
    index, there = view.others
    assert {int(i): bool(k) for i, k, t in zip(index, kept, there, strict=True) if t} == {0: True, 1: True, 2: False}


def test_where_no_way_out_has_the_usual_room_one_with_little_room_is_taken() -> None:
    """For an agent 2 m wide there are 2.8 m between the other's way and the road's edge."""
    others = [line((-40, 0), (8, 0), T), line((13, 0), (0, 0), T)]
    checked = trip(scenario([STANDS, *others], road=lambda x, y: np.maximum(y - 3.8, -1.6 - y)), **CHECKED)
    assert (checked.metrics["collision"][0], checked.metrics["offroad"][0]) == (0.0, 0.0)


def test_near_who_is_asleep_no_command_leads_over_the_edge_of_the_road() -> None:
    """The road ends. The other one is evaded before, and is no danger any more; and the check brakes for no edge."""
    others = [line((0, 0), (12, 0), T), line((-25, 0), (18, 0), T)]
    checked = trip(scenario(others, road=lambda x, y: np.maximum(np.abs(y) - 9.0, x - 45.0)), **CHECKED)
    assert (checked.metrics["collision"][0], checked.metrics["offroad"][0]) == (0.0, 0.0)


def driven(start: tuple[float, float], heading: float, speed: float, *parts: tuple[float, float, float]) -> np.ndarray:
    """Poses [T, 3] of somebody who drives `parts`: until which second, with which acceleration, and which one across to
    the left."""
    x, y = start
    poses = []
    for step in range(T):
        poses.append((x, y, heading))
        along, across = next((a, b) for until, a, b in parts if DT * step < until - 1e-6)
        after = max(speed + along * DT, 0.0)
        way, turned = 0.5 * (speed + after) * DT, across / max(speed * speed, 1.0) * 0.5 * (speed + after) * DT
        x, y = x + way * np.cos(heading + 0.5 * turned), y + way * np.sin(heading + 0.5 * turned)
        heading, speed = heading + turned, after
    return np.asarray(poses, np.float32)


PUSHED = (0.8, 4.0, 0.0), (1.1, 0.3, 0.0), (1.4, -0.3, 0.0)
"""Hard pushing for 0.8 s, and then a driver who wavers."""


@pytest.mark.parametrize(
    ("ego", "start", "parts"),
    [
        pytest.param(STANDS, (44, 3.6), ((2.0, -1.0, 0.8), (9.0, -1.0, 0.0)), id="stands"),
        pytest.param(
            line((0, 0), (8, 0), T), (66, 3.6), ((2.0, 1.2, 1.2), (9.0, 1.2, 0.0)), id="drives", marks=pytest.mark.slow
        ),
    ],
)
def test_who_was_wild_and_cuts_in_later_is_evaded(
    ego: np.ndarray, start: tuple[float, float], parts: tuple[tuple[float, float, float], ...]
) -> None:
    other = driven(start, np.pi, 6.0, *PUSHED, *parts)
    free, checked = both(scenario([ego, other], road=wide))
    assert (free.metrics["collision"][0], checked.metrics["collision"][0]) == (1.0, 0.0)
    assert checked.metrics["offroad"][0] == 0.0


@pytest.mark.parametrize(
    ("begins", "braking"), [(0.0, 0.9), (1.5, 1.4), (2.5, 2.2)], ids=["early", "late", "at the last moment"]
)
def test_nobody_gets_out_of_the_way_of_who_brakes(begins: float, braking: float) -> None:
    gap = 8.0 * begins + 8.0**2 / (2.0 * braking)
    checked = trip(scenario([STANDS, changing(-gap - 4.5, 8, -braking, begins)], road=wide), **CHECKED)
    assert np.abs(checked.states.motion.x[:, 0]).max() < 0.05
    assert checked.metrics["collision"][0] == 0.0


def test_a_kept_velocity_alone_is_no_reason_to_evade() -> None:
    """Somebody who passes on the next lane, and somebody who comes nearer slowly."""
    ego = line((0, 0), (SPEED, 0), T)
    passes, follows = line((-30, 3.0), (SPEED + 6, 0), T), line((-30, 0), (SPEED + 2, 0), T)
    checked = trip(scenario([ego, passes, follows], road=wide), **CHECKED)
    np.testing.assert_allclose(checked.states.motion.speed[:, 0], SPEED, atol=1e-5)


def test_no_red_light_is_passed_to_evade() -> None:
    made = scenario([STANDS, line((-40, 0), (8, 0), T)], lights=[(5.0, [RED] * T)], road=wide)
    checked = trip(made, **CHECKED)
    assert checked.metrics["red_light"][0] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        pytest.param([line((-40, 0), (8, 0), T), line((9, 0), (0, 0), T)], id="asleep"),
        pytest.param([driven((44, 3.6), np.pi, 6.0, *PUSHED, (2.0, -1.0, 0.8), (9.0, -1.0, 0.0))], id="wild"),
    ],
)
def test_who_is_not_threatened_would_not_evade(others: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    made = scenario([STANDS, *others], road=wide)
    few = trip(made, **CHECKED)
    looked: list[int] = []
    monkeypatch.setattr(evasion, "threatened", lambda *_: looked.append(1) or jnp.array(True))
    monkeypatch.setattr(driving_scenarios, "_program", driving_scenarios._program.__wrapped__)  # traced anew
    every = trip(made, **CHECKED)
    assert looked
    moved = np.abs(every.states.motion.y[:, 0]).max()
    assert moved > 0.2  # it evades
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), few.states.motion, every.states.motion)
