"""Logs to scenarios and banks of them: who is in, padding, bad logs, generated and real ones."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import EDGE_BOUNDARY, LANE_STREET, LIGHT_STOP, STOP_SIGN, BadData, Feature
from longhaul.driving.generator.generate import corners, generate
from longhaul.driving.scenario.bank import bucket, stack
from longhaul.driving.scenario.compile import compile_log
from tests.helpers.short_logs import lights_at, make_log, on_route, polyline, sample, straight

DATA = Path(os.environ.get("LONGHAUL_DATA", Path(__file__).resolve().parents[3] / "../shared/data"))


@pytest.mark.parametrize("seed", range(12))
def test_generated_logs_come_back_from_their_scenarios(seed: int) -> None:
    log = generate(seed)
    scenario = compile_log(log, agents=4)
    for a, i in enumerate(scenario.controlled[scenario.controlled >= 0]):
        there = scenario.present[:, i]
        error = on_route(scenario, scenario.expert_s[a], a) - scenario.pose[:, i, :2]
        assert np.hypot(*error[there].T).max() < 0.3
        assert (np.diff(scenario.expert_s[a]) >= 0.0).all()
    ego = log.tracks.position[log.sdc, log.current :, :2] - log.tracks.position[log.sdc, log.current, :2]
    np.testing.assert_allclose(scenario.pose[:, 0, :2], ego, atol=1e-4)
    outline = corners(scenario.pose[:, 0].astype(float), np.broadcast_to(scenario.size[0], (scenario.steps, 2)))
    assert sample(scenario.field, scenario.field_origin, outline).max() < 0.0


# --- agents, padding, bad logs


def test_agents_are_the_ego_then_the_nearest_and_far_standing_ones_are_left_out() -> None:
    lanes = np.array([0.0, 30.0, 3.5, 300.0, -7.0, 4.0])
    speed = np.array([5.0, 5.0, 6.0, 0.0, 0.2, 0.0])
    t = 0.1 * np.arange(60)
    xy = np.stack([speed[:, None] * t, np.broadcast_to(lanes[:, None], (6, 60))], -1)
    order = [3, 1, 0, 4, 2, 5]
    valid = np.ones((6, 60), bool)
    valid[order.index(1), :5] = False
    log = make_log(xy[order], np.zeros((6, 60)), sdc=2, valid=valid)
    scenario = compile_log(log, agents=4)
    np.testing.assert_allclose(scenario.pose[10, :, 1], [0.0, 3.5, 4.0, -7.0, 30.0], atol=1e-4)
    assert scenario.controlled.tolist() == [0, 1, -1, -1]  # not: too slow, standing, not there from the start
    assert scenario.route_points[2:].tolist() == [0, 0]
    np.testing.assert_allclose(scenario.route_length, [29.5, 35.4, 0, 0], atol=0.01)
    assert not scenario.present[:5, 4].any()
    assert scenario.present[5:, 4].all()
    assert compile_log(log, objects=3).kind.shape == (3,)
    np.testing.assert_allclose(scenario.size, np.broadcast_to([4.0, 2.0], (5, 2)))


def test_the_scenario_ends_with_the_horizon_or_the_ego() -> None:
    assert compile_log(make_log(straight()), horizon=20).steps == 20
    valid = np.ones((1, 50), bool)
    valid[0, 31:33] = False
    log = make_log(straight(), valid=valid, current=10)
    assert compile_log(log).steps == 21
    assert compile_log(log, horizon=40).pose.shape[0] == 21


@pytest.mark.parametrize(
    ("first", "current", "word"), [(5, 3, "not known at the current step"), (0, 49, "fewer than 2")]
)
def test_a_log_that_cannot_be_driven_is_refused_with_its_name(first: int, current: int, word: str) -> None:
    valid = np.ones((1, 50), bool)
    valid[0, :first] = False
    with pytest.raises(BadData, match=f"made: .*{word}"):
        compile_log(make_log(straight(), valid=valid, current=current))


def test_logs_without_a_map_or_with_broken_features_compile() -> None:
    empty, single = np.zeros((0, 3)), polyline((5.0, 0.0))
    broken = (
        Feature(1, EDGE_BOUNDARY, empty), Feature(2, EDGE_BOUNDARY, single), Feature(3, LANE_STREET, single),
        Feature(4, LANE_STREET, np.repeat(single, 3, 0)), Feature(5, STOP_SIGN, single), Feature(6, 12, empty),
    )  # fmt: skip
    for features in ((), broken):
        scenario = compile_log(make_log(straight(), features=features))
        assert scenario.field.shape == (0, 0)
        assert scenario.light_s.shape == (1, 0)
        np.testing.assert_allclose(scenario.route_length, 49.0, atol=1e-3)
    assert [kind for kind, _ in scenario.drawing] == [EDGE_BOUNDARY, LANE_STREET, LANE_STREET, STOP_SIGN]


def test_a_bank_holds_each_scenario_and_pads_the_rest() -> None:
    light = lights_at([(1, (60.0, 0.0), LIGHT_STOP)], 50)
    plain = compile_log(make_log(straight(), lights=light))
    rich = compile_log(generate(4), agents=3)
    bank = stack([plain, rich, plain], agents=2)
    steps, n = max(plain.steps, rich.steps), len(rich.kind)
    assert bank.pose.shape == (3, steps, bucket(n), 3)
    assert bank.route.shape[2] % 32 == 0
    assert bank.light_s.shape[2] % 4 == 0
    assert bank.steps.tolist() == [plain.steps, rich.steps, plain.steps]
    np.testing.assert_array_equal(bank.pose[1, : rich.steps, :n], rich.pose)
    np.testing.assert_array_equal(bank.pose[0, 60:, 0], np.broadcast_to(plain.pose[-1, 0], (steps - 60, 3)))
    assert not bank.present[0, plain.steps :].any()
    assert not bank.present[1, :, n:].any()
    assert (bank.kind[1, n:] == 0).all()
    assert bank.controlled[0].tolist() == [0, -1]
    assert bank.controlled[1].tolist() == rich.controlled[:2].tolist()
    assert (bank.expert_s[0, 0, 50:] == plain.expert_s[0, -1]).all()
    assert np.isinf(bank.light_s[0, 0, 1:]).all()
    assert (bank.light_state[0, 0, 0] == [1] * 50 + [0] * (steps - 50)).all()
    spacing = np.hypot(*np.diff(bank.route[0, 0, :, :2], axis=0).T)
    np.testing.assert_allclose(spacing, 1.0, atol=1e-4)
    assert bank.field_shape.tolist() == [[0, 0], list(rich.field.shape), [0, 0]]
    start, (height, width) = bank.field_start[1], bank.field_shape[1]
    np.testing.assert_array_equal(bank.field[start : start + height * width].reshape(height, width), rich.field)
    assert stack([plain]).field.size > 0


def test_a_bank_that_is_empty_or_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="0 scenarios"):
        stack([])
    scenario = compile_log(make_log(straight()))
    huge = scenario._replace(field=np.broadcast_to(np.int16(0), (46341, 46341)))
    with pytest.raises(ValueError, match=r"2\^31"):
        stack([huge])


@pytest.mark.parametrize(("count", "size"), [(1, 16), (16, 16), (17, 32), (129, 256)])
def test_buckets(count: int, size: int) -> None:
    assert bucket(count) == size


# --- real logs


@pytest.mark.parametrize("folder", ["womd", "gpudrive", "scenarionet"])
def test_the_egos_of_real_logs_stay_on_the_road_and_on_their_routes(folder: str) -> None:
    if not (DATA / folder).is_dir():
        pytest.skip(f"no real logs of {folder}: set LONGHAUL_DATA")
    for log in [log for path in readers.expand([str(DATA / folder)]) for log in readers.read(path)]:
        scenario = compile_log(log, agents=8)
        for a, i in enumerate(scenario.controlled[scenario.controlled >= 0]):
            there = scenario.present[:, i]
            error = np.hypot(*(on_route(scenario, scenario.expert_s[a], a) - scenario.pose[:, i, :2])[there].T)
            assert np.median(error) < 0.3
        assert scenario.dt == pytest.approx(0.1, abs=0.005)
        if scenario.field.size:
            outline = corners(scenario.pose[:, 0].astype(float), np.broadcast_to(scenario.size[0], (scenario.steps, 2)))
            assert (sample(scenario.field, scenario.field_origin, outline) < 0).all(-1).mean() > 0.99
