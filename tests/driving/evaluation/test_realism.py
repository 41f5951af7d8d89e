"""Realism by known distributions: what is measured of trajectories, and how likely the log is among rollouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from longhaul.driving.datasets.log import PEDESTRIAN, VEHICLE
from longhaul.driving.evaluation import realism
from longhaul.driving.generator.generate import generate
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.scenario.scenario import GREEN, RED, Scenario
from longhaul.spaces import Measure
from tests.helpers import driving_scenarios as worlds
from tests.helpers import polygons


def test_boxes_are_as_far_apart_as_their_outlines_and_overlap_by_what_parts_them() -> None:
    draw = np.random.default_rng(0)
    count = 400
    x, y, turn = draw.uniform(-8, 8, count), draw.uniform(-8, 8, count), draw.uniform(-np.pi, np.pi, count)
    half, other = draw.uniform(0.3, 3.0, (2, count, 2))

    def apart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return realism.boxes_apart(x, y, np.cos(turn), np.sin(turn), half, other)

    found = apart(x, y)
    assert 50 < np.sum(found > 0) < count - 50
    own, others = np.zeros((count, 3)), np.stack([x, y, turn], -1)
    pair = (polygons.corners(np.concatenate([pose, 2 * size], -1)) for pose, size in ((own, half), (others, other)))
    np.testing.assert_allclose(np.maximum(found, 0.0), polygons.distance(*pair), atol=1e-9)
    # the other way round it is the same
    cos, sin = np.cos(turn), np.sin(turn)
    back = realism.boxes_apart(-(x * cos + y * sin), x * sin - y * cos, cos, -sin, other, half)
    np.testing.assert_allclose(back, found, atol=1e-9)
    # of all ways of one length, some way as long as the overlap parts two boxes, and no shorter one does
    ways = np.linspace(-np.pi, np.pi, 721)[:, None]
    depth = np.where(found < 0, -found, 0.0)
    longer = np.stack([apart(x + 1.001 * depth * np.cos(w) + 1e-6, y + 1.001 * depth * np.sin(w)) for w in ways])
    shorter = np.stack([apart(x + 0.99 * depth * np.cos(w), y + 0.99 * depth * np.sin(w)) for w in ways])
    assert np.all(longer.max(0)[found < 0] > -2e-3)
    assert np.all(shorter.max(0)[found < 0] < 0)


def measured(made: Scenario, pose: np.ndarray | None = None) -> realism.Features:
    pose = made.pose if pose is None else pose
    return realism.measure(realism.scene(made), pose[None], made.present[None])


def test_motion_on_a_circle_has_its_speed_and_yaw_rate_and_no_acceleration() -> None:
    """12 m/s, 0.3 rad/s, headings past half a turn: nothing accelerates."""
    time = worlds.DT * np.arange(91)
    heading = 0.3 * time + 2.9
    pose = np.stack([40 * np.sin(heading), -40 * np.cos(heading), np.arctan2(np.sin(heading), np.cos(heading))], -1)
    series = measured(worlds.scenario([pose], road=None)).series
    for name, value, ends in (
        ("linear_speed", 12.0, 1),
        ("angular_speed", 0.3, 1),
        ("linear_acceleration", 0.0, 2),
        ("angular_acceleration", 0.0, 2),
    ):
        known = np.zeros(91, bool)
        known[ends:-ends] = True
        np.testing.assert_array_equal(series[name].valid[0, :, 0], known, name)
        np.testing.assert_allclose(series[name].value[0, known, 0], value, atol=5e-3, err_msg=name)
    assert not series["distance_to_road_edge"].valid.any()
    assert not series["distance_to_object"].valid.any()


def test_motion_that_changes_and_agents_that_come_and_go() -> None:
    time = worlds.DT * np.arange(60)
    pose = np.stack([5 * time + time**2, 0 * time, 0.1 * time**2], -1)  # 2 m/s^2, 0.2 rad/s^2
    made = worlds.scenario([pose])
    present = np.ones((60, 1), bool)
    present[30] = False
    series = measured(made._replace(present=present)).series
    known = np.ones(60, bool)
    known[[0, 1, 58, 59, *range(28, 33)]] = False
    for name, value in (("linear_acceleration", 2.0), ("angular_acceleration", 0.2)):
        np.testing.assert_array_equal(series[name].valid[0, :, 0], known, name)
        np.testing.assert_allclose(series[name].value[0, known, 0], value, atol=1e-3, err_msg=name)


def follow(gap: float, own: float, other: float, **changes: Any) -> realism.Features:
    """A vehicle behind another one, `gap` metres from bumper to bumper, at these speeds, and a pedestrian far off."""
    poses = [worlds.line((0, 0), (own, 0), 41), worlds.line((gap + 4, 0.5), (other, 0), 41),
             worlds.line((300, 0), (0, 0), 41)]  # fmt: skip
    return measured(worlds.scenario(poses, **({"drivers": 3, "kinds": [VEHICLE, VEHICLE, PEDESTRIAN]} | changes)))


def test_who_follows_is_as_near_as_the_gap_and_the_speeds_say() -> None:
    features = follow(20.0, 10.0, 5.0)
    time = worlds.DT * np.arange(41)
    gap = 20.0 - 5.0 * time
    near, soon = (features.series[name] for name in ("distance_to_object", "time_to_collision"))
    np.testing.assert_allclose(near.value[0, 1:, 0], gap[1:], atol=1e-4)
    np.testing.assert_allclose(soon.value[0, 1:-1, 0], gap[1:-1] / 5.0, atol=1e-3)
    np.testing.assert_allclose(soon.value[0, 1:-1, 1], realism.HORIZON)  # nobody is ahead of the first
    assert not soon.valid[..., 2].any()  # a pedestrian has no such thing
    assert not features.events["collision"].value.any()
    # at the same speed nobody nears, and who touches collides
    assert np.all(follow(20.0, 5.0, 5.0).series["time_to_collision"].value[0, 1:-1, 0] == realism.HORIZON)
    np.testing.assert_array_equal(follow(20.0, 10.0, 4.0).events["collision"].value[0], [True, True, False])


def test_a_box_off_the_road_and_by_how_much() -> None:
    """The road's edge is 5 m beside its middle, the box 1 m wide on either side."""
    made = worlds.scenario([worlds.line((0, 3.0), (5, 0), 31), worlds.line((20, 4.5), (5, 0), 31)], drivers=2)
    features = measured(made)
    edge = features.series["distance_to_road_edge"].value[0, 1:]
    np.testing.assert_allclose(edge, np.broadcast_to([-1.0, 0.5], edge.shape), atol=0.02)
    np.testing.assert_array_equal(features.events["offroad"].value[0], [False, True])


@pytest.mark.parametrize(
    ("states", "beside", "kind", "ran", "known"),
    [
        ([RED] * 41, 0.0, VEHICLE, True, True),
        ([GREEN] * 41, 0.0, VEHICLE, False, True),
        ([GREEN] * 20 + [RED] * 21, 0.0, VEHICLE, True, True),  # at the line from step 31 to 32
        ([GREEN] * 32 + [RED] * 9, 0.0, VEHICLE, False, True),  # red only after
        ([RED] * 41, 6.0, VEHICLE, False, True),  # another road's
        ([RED] * 41, 0.0, PEDESTRIAN, True, False),
    ],
)
def test_a_red_light_is_run_where_it_is_red_before_and_after(
    states: list[int], beside: float, kind: int, ran: bool, known: bool
) -> None:
    """The front bumper, 2 m ahead, is at the stop line (17.6 m) after 15.6 m: 3.12 s at 5 m/s."""
    made = worlds.scenario([worlds.line((0, 0), (5, 0), 41)], lights=[(17.6, states)], kinds=[kind])
    event = measured(made, made.pose + np.array([0, beside, 0], np.float32)).events["red_light"]
    assert bool(event.valid[0, 0]) is known
    assert bool(event.value[0, 0]) is ran


# ------------------------------------------------------------------------------------------------------ likelihoods


def samples(values: np.ndarray, valid: np.ndarray | None = None) -> Measure:
    return Measure(values, np.ones(values.shape, bool) if valid is None else valid)


def test_a_likelihood_by_histogram_is_that_by_hand() -> None:
    """Four bins over 0 .. 4 with a quarter of a sample in each; three simulated samples, two logged ones."""
    simulated = samples(np.array([[[0.5], [1.5]], [[1.7], [9.0]]]), np.array([[[True], [True]], [[True], [False]]]))
    logged = samples(np.array([[[1.1], [-5.0]]]))
    found = realism.histogram(simulated, logged, 0.0, 4.0, 4)
    assert found.valid[0]
    assert float(found.value[0]) == pytest.approx(np.sqrt(2.25 / 4 * 1.25 / 4))
    nothing = realism.histogram(samples(np.zeros((2, 2, 1)), np.zeros((2, 2, 1), bool)), logged, 0.0, 4.0, 4)
    assert not nothing.valid[0]
    unseen = realism.histogram(simulated, logged._replace(valid=np.zeros((1, 2, 1), bool)), 0.0, 4.0, 4)
    assert not unseen.valid[0]


def test_no_rollouts_make_the_log_likelier_than_copies_of_it() -> None:
    """Gibbs' inequality: the mean log-probability is greatest under the log's own distribution, and is its entropy."""
    draw = np.random.default_rng(1)
    logged = draw.normal(5.0, 1.5, (1, 80, 1))
    copies = realism.histogram(samples(np.repeat(logged, 32, 0)), samples(logged), 0.0, 10.0, 20).value[0]
    share = np.bincount((logged[0, :, 0] * 2).astype(int), minlength=20) / 80
    entropy = -np.sum(share[share > 0] * np.log(share[share > 0]))
    assert copies == pytest.approx(np.exp(-entropy), rel=0.01)
    right = draw.normal(5.0, 1.5, (32, 80, 1))
    noise = draw.uniform(0.0, 10.0, (32, 80, 1))
    wrong = draw.normal(1.0, 0.5, (32, 80, 1))
    levels = [realism.histogram(samples(r), samples(logged), 0.0, 10.0, 20).value[0] for r in (right, noise, wrong)]
    assert copies > levels[0] > 1.5 * levels[1] > 3.0 * levels[2]
    assert levels[1] == pytest.approx(1 / 20, rel=0.1)  # equal chances for 20 bins


def test_a_likelihood_of_a_verdict_is_that_by_hand() -> None:
    """Three of four rollouts collided; with half a sample for either, 3.5 / 5 and 1.5 / 5."""
    simulated = samples(np.array([[True, True], [True, True], [True, True], [False, False]]))
    found = realism.bernoulli(simulated, samples(np.array([[True, False]])))
    np.testing.assert_allclose(found.value, [0.7, 0.3])
    one = realism.bernoulli(simulated, Measure(np.array([[True, False]]), np.array([[True, False]])))
    np.testing.assert_array_equal(one.valid, [True, False])


def test_weights_are_shares_of_what_is_known() -> None:
    assert sum(realism.WEIGHTS.values()) == pytest.approx(1.0)
    parts = {name: Measure(0.25, False) for name in realism.WEIGHTS}
    assert not realism.weighted(parts).valid
    parts |= {"collision": Measure(1.0, True), "linear_speed": Measure(0.4, True)}
    assert realism.weighted(parts).value == pytest.approx((0.25 + 0.05 * 0.4) / 0.3)


# ------------------------------------------------------------------------------------------------- whole scenarios


@pytest.fixture(scope="module")
def generated() -> list[Scenario]:
    return [scenario_from_log(generate(seed), agents=4, horizon=60) for seed in (4, 9)]


def drive(made: Scenario, how: str, rollouts: int = 8) -> np.ndarray:
    """Rollouts [R, T, N, 3]: the agents go on at their first speed and heading, wander, or do what the log did."""
    pose = np.repeat(made.pose[None].astype(float), rollouts, 0)
    own = made.controlled[made.controlled >= 0]
    time = made.dt * np.arange(made.steps)
    draw = np.random.default_rng(5)
    if how == "constant":
        pose[:, :, own] = made.pose[0, own]
        pose[:, :, own, :2] += time[:, None, None] * made.velocity[0, own]
    elif how == "random":
        pose[:, 1:, own, :2] += np.cumsum(draw.normal(0, 1.0, (rollouts, made.steps - 1, len(own), 2)), 1)
        pose[:, 1:, own, 2] += np.cumsum(draw.normal(0, 0.3, (rollouts, made.steps - 1, len(own))), 1)
    elif how == "near":
        pose[:, 1:, own, :2] += 0.02 * np.cumsum(draw.normal(0, 0.1, (rollouts, made.steps - 1, len(own), 2)), 1)
    return pose.astype(np.float32)


def test_the_log_is_most_real_and_the_farther_from_it_the_less(generated: list[Scenario]) -> None:
    for made in generated:
        there = np.repeat(made.present[None], 8, 0)
        found = {how: realism.realism(made, drive(made, how), there) for how in ("log", "near", "constant", "random")}
        worth = {how: float(parts["realism"].value) for how, parts in found.items()}
        assert worth["log"] >= worth["near"] > worth["random"] + 0.2, worth
        assert worth["log"] > worth["constant"] > worth["random"], worth
        assert float(found["log"]["min_ade"].value) == 0.0
        away = [float(found[how]["min_ade"].value) for how in ("log", "near", "random")]
        assert away == sorted(away)
        for name in realism.WEIGHTS:  # no component likes anything better than the log
            for how in ("constant", "random"):
                if found["log"][name].valid:
                    assert found["log"][name].value >= found[how][name].value - 1e-9, (name, how)


def test_a_likelihood_does_not_depend_on_chunks_or_on_the_order_of_rollouts(
    generated: list[Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = generated[0]
    pose, there = drive(made, "random"), np.repeat(made.present[None], 8, 0)
    found = realism.realism(made, pose, there)
    monkeypatch.setattr(realism, "CHUNK", 1)
    assert realism.realism(made, pose[::-1], there) == found


def test_shapes_that_do_not_fit_are_refused(generated: list[Scenario]) -> None:
    made = generated[0]
    with pytest.raises(ValueError, match=r"rollouts of .* have shapes .*; expected \[R, 60, "):
        realism.realism(made, made.pose[None, :-1], made.present[None, :-1])
