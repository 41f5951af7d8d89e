"""Logs to scenarios and banks of them: who is in, padding, bad logs, routes, lights, generated and real ones."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np
import pytest

from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import (
    EDGE_BOUNDARY,
    LANE_STREET,
    LIGHT_CAUTION,
    LIGHT_GO,
    LIGHT_STOP,
    STOP_SIGN,
    BadData,
    Feature,
    Lights,
    Path,
)
from longhaul.driving.generator.generate import corners, generate
from longhaul.driving.scenario import from_log
from longhaul.driving.scenario.bank import bucket, stack
from longhaul.driving.scenario.distance_field import make_edges, signed_distance
from longhaul.driving.scenario.from_log import lights_disputed, scenario_from_log
from longhaul.driving.sim.config import Config
from longhaul.driving.sim.simulator import driving
from tests.helpers.short_logs import ORIGIN, lights_at, make_log, on_route, polyline, sample, straight

DATA = FilePath(os.environ.get("LONGHAUL_DATA", FilePath(__file__).resolve().parents[3] / "../shared/data"))


@pytest.fixture
def disputes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of lights that each route disputes of the logs that a test compiles; the ego's is the first of a log."""
    counts: list[int] = []
    signals_of = from_log.signals_of

    def begins(*known: Any) -> Any:
        counts.append(0)
        return signals_of(*known)

    def counted(*known: Any) -> np.ndarray:
        counts[-1] += int(lights_disputed(*known).sum())
        return lights_disputed(*known)

    monkeypatch.setattr(from_log, "signals_of", begins)
    monkeypatch.setattr(from_log, "lights_disputed", counted)
    return counts


@pytest.mark.parametrize("seed", range(12))
def test_generated_logs_come_back_from_their_scenarios(seed: int, disputes: list[int]) -> None:
    log = generate(seed)
    scenario = scenario_from_log(log, agents=4)
    for a, i in enumerate(scenario.controlled[scenario.controlled >= 0]):
        there = scenario.present[:, i]
        error = on_route(scenario, scenario.expert_s[a], a) - scenario.pose[:, i, :2]
        assert np.hypot(*error[there].T).max() < 0.3
        assert (np.diff(scenario.expert_s[a]) >= 0.0).all()
    ego = log.tracks.position[log.sdc, log.current :, :2] - log.tracks.position[log.sdc, log.current, :2]
    np.testing.assert_allclose(scenario.pose[:, 0, :2], ego, atol=1e-4)
    outline = corners(scenario.pose[:, 0].astype(float), np.broadcast_to(scenario.size[0], (scenario.steps, 2)))
    assert sample(scenario.field, scenario.field_origin, outline).max() < 0.0
    assert disputes[0] == 0


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
    scenario = scenario_from_log(log, agents=4)
    np.testing.assert_allclose(scenario.pose[10, :, 1], [0.0, 3.5, 4.0, -7.0, 30.0], atol=1e-4)
    assert scenario.controlled.tolist() == [0, 1, -1, -1]  # not: too slow, standing, not there from the start
    assert scenario.route_points[2:].tolist() == [0, 0]
    np.testing.assert_allclose(scenario.route_length, [29.5, 35.4, 0, 0], atol=0.01)
    assert not scenario.present[:5, 4].any()
    assert scenario.present[5:, 4].all()
    assert scenario_from_log(log, objects=3).kind.shape == (3,)
    np.testing.assert_allclose(scenario.size, np.broadcast_to([4.0, 2.0], (5, 2)))


def test_the_scenario_ends_with_the_horizon_or_the_ego() -> None:
    assert scenario_from_log(make_log(straight()), horizon=20).steps == 20
    valid = np.ones((1, 50), bool)
    valid[0, 31:33] = False
    log = make_log(straight(), valid=valid, current=10)
    assert scenario_from_log(log).steps == 21
    assert scenario_from_log(log, horizon=40).pose.shape[0] == 21


@pytest.mark.parametrize(
    ("first", "current", "word"), [(5, 3, "not known at the current step"), (0, 49, "fewer than 2")]
)
def test_a_log_that_cannot_be_driven_is_refused_with_its_name(first: int, current: int, word: str) -> None:
    valid = np.ones((1, 50), bool)
    valid[0, :first] = False
    with pytest.raises(BadData, match=f"made: .*{word}"):
        scenario_from_log(make_log(straight(), valid=valid, current=current))


def test_logs_without_a_map_or_with_broken_features_compile() -> None:
    empty, single = np.zeros((0, 3)), polyline((5.0, 0.0))
    broken = (
        Feature(1, EDGE_BOUNDARY, empty), Feature(2, EDGE_BOUNDARY, single), Feature(3, LANE_STREET, single),
        Feature(4, LANE_STREET, np.repeat(single, 3, 0)), Feature(5, STOP_SIGN, single), Feature(6, 12, empty),
    )  # fmt: skip
    for features in ((), broken):
        scenario = scenario_from_log(make_log(straight(), features=features))
        assert scenario.field.shape == (0, 0)
        assert scenario.light_s.shape == (1, 0)
        np.testing.assert_allclose(scenario.route_length, 49.0, atol=1e-3)
    assert [kind for kind, _ in scenario.drawing] == [EDGE_BOUNDARY, LANE_STREET, LANE_STREET, STOP_SIGN]


def test_a_bank_holds_each_scenario_and_pads_the_rest() -> None:
    light = lights_at([(1, (60.0, 0.0), LIGHT_STOP)], 50)
    plain = scenario_from_log(make_log(straight(), lights=light))
    rich = scenario_from_log(generate(4), agents=3)
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
    scenario = scenario_from_log(make_log(straight()))
    huge = scenario._replace(field=np.broadcast_to(np.int16(0), (46341, 46341)))
    with pytest.raises(ValueError, match=r"2\^31"):
        stack([huge])


@pytest.mark.parametrize(("count", "size"), [(1, 16), (16, 16), (17, 32), (129, 256)])
def test_a_size_is_rounded_up_to_a_power_of_two(count: int, size: int) -> None:
    assert bucket(count) == size


# --- real logs


@pytest.mark.parametrize("folder", ["womd", "gpudrive", "scenarionet"])
def test_the_egos_of_real_logs_stay_on_the_road_and_on_their_routes(folder: str, disputes: list[int]) -> None:
    if not (DATA / folder).is_dir():
        pytest.skip(f"no real logs of {folder}: set LONGHAUL_DATA")
    for log in [log for path in readers.expand([str(DATA / folder)]) for log in readers.read(path)]:
        disputes.clear()
        scenario = scenario_from_log(log, agents=8)
        assert disputes[0] == 0
        for a, i in enumerate(scenario.controlled[scenario.controlled >= 0]):
            there = scenario.present[:, i]
            error = np.hypot(*(on_route(scenario, scenario.expert_s[a], a) - scenario.pose[:, i, :2])[there].T)
            assert np.median(error) < 0.3
        assert scenario.dt == pytest.approx(0.1, abs=0.005)
        if scenario.field.size:
            outline = corners(scenario.pose[:, 0].astype(float), np.broadcast_to(scenario.size[0], (scenario.steps, 2)))
            assert (sample(scenario.field, scenario.field_origin, outline) < 0).all(-1).mean() > 0.99


# --- routes


def test_a_route_is_the_logged_path_by_arc_length() -> None:
    radius, angle = 30.0, np.linspace(0.0, 1.5, 70)
    xy = radius * np.stack([np.sin(angle), 1.0 - np.cos(angle)], -1)
    scenario = scenario_from_log(make_log(xy, angle[None], current=10))
    length = radius * (angle[-1] - angle[10])
    assert scenario.steps == 60
    np.testing.assert_allclose(scenario.route_length, [length], rtol=1e-4)
    np.testing.assert_allclose(scenario.expert_s[0], radius * (angle[10:] - angle[10]), atol=0.01)
    np.testing.assert_allclose(on_route(scenario, scenario.expert_s[0]), scenario.pose[:, 0, :2], atol=0.02)
    assert (scenario.pose[0, 0, :2] == 0.0).all()
    logged = np.arange(int(length))
    np.testing.assert_allclose(scenario.route[0, logged, 2], angle[10] + logged / radius, atol=0.03)
    spacing = np.hypot(*np.diff(scenario.route[0, :, :2], axis=0).T)
    np.testing.assert_allclose(spacing, 1.0, atol=2e-3)
    assert scenario.route_points[0] - 1 >= length + 50.0


def test_without_lanes_a_route_goes_straight_on() -> None:
    scenario = scenario_from_log(make_log(straight()))
    count = scenario.route_points[0]
    np.testing.assert_allclose(scenario.route[0, :count, 0], np.arange(count), atol=1e-4)
    np.testing.assert_allclose(scenario.route[0, :count, 1:], 0.0, atol=1e-4)


def test_a_route_goes_on_along_lanes_and_their_straightest_exit() -> None:
    turn = np.linspace(0.0, np.pi / 2, 40)
    bend = np.stack([80.0 + 20.0 * np.sin(turn), 21.0 - 20.0 * np.cos(turn)], -1)
    sharp = np.stack([80.0 + 5.0 * np.sin(turn), -4.0 + 5.0 * np.cos(turn)], -1)
    lanes = (
        Feature(1, LANE_STREET, polyline((0, 1), (80, 1)), exit=(3, 2)),
        Feature(2, LANE_STREET, polyline(*map(tuple, bend)), exit=(4,)),
        Feature(3, LANE_STREET, polyline(*map(tuple, np.concatenate([sharp, [[85.0, -60.0], [30.0, -60.0]]])))),
        Feature(4, LANE_STREET, polyline((100, 21), (100, 90))),
        Feature(5, LANE_STREET, polyline((200, 0.2), (-50, 0.2))),  # nearer, but against the direction of travel
    )
    scenario = scenario_from_log(make_log(straight(15.0), features=lanes))
    route = scenario.route[0, : scenario.route_points[0], :2]
    assert np.abs(route[: int(scenario.route_length[0]), 1]).max() < 1e-3
    beyond = route[int(scenario.route_length[0]) + 16 :]
    centre = np.concatenate([[[0.0, 1.0]], bend, [[100.0, 90.0]]])
    edges = make_edges([centre])
    assert np.abs(signed_distance(beyond.astype(float), edges)).max() < 0.05
    assert route[-1, 1] > 15.0


def test_a_standing_vehicle_has_a_straight_route_and_no_progress_to_make() -> None:
    rng = np.random.default_rng(0)
    xy = rng.normal(0.0, 0.04, (50, 2))
    scenario = scenario_from_log(make_log(xy, np.full((1, 50), 0.7)))
    assert scenario.route_length[0] < 0.5
    assert scenario.expert_s.max() < 0.5
    route = scenario.route[0, : scenario.route_points[0]]
    np.testing.assert_allclose(route[:, 2], 0.7, atol=1e-6)
    np.testing.assert_allclose(route[-1, :2], (len(route) - 1) * np.array([np.cos(0.7), np.sin(0.7)]), rtol=1e-5)


def test_noise_at_rest_adds_no_length_and_no_turn() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([np.linspace(0.0, 20.0, 40), np.full(60, 20.0), np.linspace(20.0, 40.0, 40)])
    xy = np.stack([x, np.zeros_like(x)], -1)
    xy[40:100] += rng.normal(0.0, 0.05, (60, 2))
    scenario = scenario_from_log(make_log(xy, np.zeros((1, 140))))
    np.testing.assert_allclose(scenario.route_length, 40.0, atol=0.1)
    assert np.abs(scenario.route[0, :, 2]).max() < 0.2
    assert (np.diff(scenario.expert_s[0]) >= 0.0).all()


def test_reversing_makes_no_progress() -> None:
    back = np.stack([-0.3 * np.arange(60), np.zeros(60)], -1)
    scenario = scenario_from_log(make_log(back, np.zeros((1, 60))))
    assert scenario.route_length[0] == 0.0
    assert (scenario.expert_s == 0.0).all()
    assert np.abs(scenario.route[0, :, 2]).max() == 0.0
    x = np.concatenate([-0.2 * np.arange(30), -5.8 + 0.5 * np.arange(60)])
    scenario = scenario_from_log(make_log(np.stack([x, np.zeros(90)], -1), np.zeros((1, 90))))
    assert (np.diff(scenario.expert_s[0]) >= 0.0).all()
    np.testing.assert_allclose(scenario.route_length, x[-1], atol=0.05)


# --- lights


def test_the_lights_of_a_route_are_those_whose_lanes_follow_it() -> None:
    turn = np.linspace(0.0, np.pi / 2, 30)
    left = [(60.0 + 12.0 * np.sin(a), 12.0 - 12.0 * np.cos(a)) for a in turn]
    features = (
        Feature(1, LANE_STREET, polyline((60, 0), (100, 0))),
        Feature(2, LANE_STREET, polyline(*left)),
        Feature(3, LANE_STREET, polyline((75, 2.5), (-20, 2.5))),
        Feature(4, LANE_STREET, polyline((60, -3.5), (100, -3.5))),
    )
    stops = [
        (2, (60.0, 0.0), 1),
        (1, (60.0, 0.0), LIGHT_GO),
        (3, (75.0, 2.5), LIGHT_STOP),
        (4, (60.0, -3.5), LIGHT_STOP),
    ]
    log = make_log(straight(8.0), features=features, lights=lights_at(stops, 50))
    scenario = scenario_from_log(log)
    np.testing.assert_allclose(scenario.light_s, [[60.0]], atol=0.01)
    assert (scenario.light_state == 3).all()
    # a light of an unknown lane counts by its stop point
    log = make_log(straight(8.0), lights=lights_at([(99, (55.0, 1.0), LIGHT_CAUTION), (98, (55.0, 9.0), LIGHT_GO)], 50))
    scenario = scenario_from_log(log)
    np.testing.assert_allclose(scenario.light_s, [[55.0]], atol=0.01)
    assert (scenario.light_state == 2).all()


def test_light_states_are_mapped_from_the_current_step_on() -> None:
    """States 7 and 8 flash: a stop sign, and a warning. Neither is a light to wait for."""
    states = np.array([[0, 9, *range(9)] + [4] * 39], np.int8)
    states[0, 1] = 4
    known = np.ones((1, 50), bool)
    known[0, 20] = False
    lights = Lights(np.array([7]), polyline((70.0, 0.0)), states, known)
    scenario = scenario_from_log(make_log(straight(10.0), lights=lights, current=2))
    assert scenario.light_state[0, 0, :9].tolist() == [0, 1, 2, 3, 1, 2, 3, 0, 0]
    assert scenario.light_state[0, 0, 18] == 0
    assert scenario.light_state[0, 0, 19] == 1
    np.testing.assert_allclose(scenario.light_s, [[68.0]], atol=0.01)


@pytest.mark.parametrize(("x", "disputed"), [(20.0, True), (60.0, False)])
def test_a_red_light_that_the_log_itself_passes_is_unknown(x: float, disputed: bool, disputes: list[int]) -> None:
    log = make_log(straight(10.0), lights=lights_at([(1, (x, 0.0), LIGHT_STOP)], 50))
    scenario = scenario_from_log(log)
    assert scenario.light_s.shape == (1, 1)
    assert (scenario.light_state == (0 if disputed else 1)).all()
    assert disputes == [int(disputed)]


def test_a_light_is_disputed_only_around_the_crossing() -> None:
    front = np.arange(0.0, 20.0)
    state = np.full((3, 20), 3, np.int8)
    state[0, :8] = 1  # green from step 8, crossed between 9 and 10
    state[1, :11] = 1  # still red at the crossing
    state[2, 13:] = 1  # red long after it
    assert lights_disputed(front, np.full(3, 9.5), state).tolist() == [False, True, False]
    assert not lights_disputed(front, np.array([-1.0, 30.0]), np.ones((2, 20), np.int8)).any()


def drift(lateral: np.ndarray) -> np.ndarray:
    """A way [T, 2] of 8 m/s along x with these offsets to its left."""
    return np.stack([0.8 * np.arange(len(lateral)), lateral], 1)


def line(x: np.ndarray, y: float, z: float = 0.0) -> np.ndarray:
    return np.stack([x, np.full(len(x), y), np.full(len(x), z)], 1) + ORIGIN


def lanes() -> tuple[Feature, ...]:
    """Two lanes along x, each in two parts: of the first the parts are joined by the source, of the second by place."""
    west, east = np.arange(-20.0, 31.0, 2.0), np.arange(30.0, 160.0, 2.0)
    return (
        Feature(1, LANE_STREET, line(west, 0.0), exit=(2,)),
        Feature(2, LANE_STREET, line(east, 0.0), entry=(1,)),
        Feature(3, LANE_STREET, line(west, 3.5)),
        Feature(4, LANE_STREET, line(east, 3.5)),
    )


def compiled(lateral: np.ndarray, routes: str = "lanes", **more: Any) -> Any:
    log = make_log(drift(lateral), features=lanes())
    return scenario_from_log(dataclasses.replace(log, **more), routes=routes)


WOBBLE = 0.8 * np.sin(np.arange(60) / 8.0)


@pytest.mark.parametrize("y", [0.0, 3.5])
def test_a_route_lies_on_the_lanes_that_the_log_follows(y: float) -> None:
    scenario = compiled(WOBBLE + y)
    count = scenario.route_points[0]
    np.testing.assert_allclose(scenario.route[0, :count, 1], y - WOBBLE[0] - y, atol=1e-6)  # local: from the ego on
    np.testing.assert_allclose(scenario.route[0, :count, 2], 0.0, atol=1e-6)
    np.testing.assert_allclose(scenario.route[0, :count, 0], np.arange(count), atol=1e-5)
    # progress is the log's x, and the goal where the log ends
    np.testing.assert_allclose(scenario.expert_s[0], 0.8 * np.arange(60), atol=1e-4)
    assert scenario.route_length[0] == pytest.approx(0.8 * 59, abs=1e-4)


def test_the_default_is_the_logged_path() -> None:
    logged, guided = compiled(WOBBLE, "log"), compiled(WOBBLE)
    assert np.abs(logged.route[0, :40, 1]).max() > 0.7
    assert logged.route_length[0] > guided.route_length[0] + 0.1
    with pytest.raises(ValueError, match="routes is 'road': choose from log, lanes"):
        compiled(WOBBLE, "road")


@pytest.mark.parametrize(
    "lateral",
    [np.linspace(0.0, 3.5, 60), np.full(60, 12.0), np.append(WOBBLE[:40], np.full(20, -4.0)), np.zeros(60)[:3]],
    ids=["lane change", "no lane near", "leaves the lane", "hardly moves"],
)
def test_where_no_lane_fits_the_route_is_the_logged_path(lateral: np.ndarray) -> None:
    guided, logged = compiled(lateral), compiled(lateral, "log")
    for name in ("route", "route_length", "expert_s"):
        np.testing.assert_array_equal(getattr(guided, name), getattr(logged, name))


def test_a_path_of_the_source_comes_before_lanes() -> None:
    x = np.arange(-10.0, 130.0)
    paths = (
        Path(line(x, 0.5), on_route=False),
        Path(line(x, 1.5), on_route=True),
        Path(line(x, 30.0), on_route=True),
        Path(line(x[:30], 0.25), on_route=True),  # ends before the log does
    )
    scenario = compiled(np.zeros(60), paths=paths)
    np.testing.assert_allclose(scenario.route[0, : scenario.route_points[0], 1], 1.5, atol=1e-5)
    assert scenario.route_length[0] == pytest.approx(0.8 * 59, abs=1e-4)
    far = compiled(np.zeros(60), paths=paths[2:])
    np.testing.assert_allclose(far.route[0, : far.route_points[0], 1], 0.0, atol=1e-5)  # none fits: the lane


def test_after_the_log_a_route_goes_on_along_the_path_of_the_source() -> None:
    """Where the lane goes straight on and the path turns left."""
    turn = np.arange(0.0, 60.0)
    path = np.concatenate([line(np.arange(0.0, 50.0), 0.0), line(np.full(60, 50.0), 0.0) + turn[:, None] * [[0, 1, 0]]])
    log = make_log(drift(np.zeros(60)), features=lanes())
    onward = dataclasses.replace(log, paths=(Path(path, on_route=True),))
    end = scenario_from_log(onward).route[0, scenario_from_log(onward).route_points[0] - 1]
    assert end[1] > 35.0
    assert scenario_from_log(log).route[0, -1, 1] == pytest.approx(0.0, abs=1e-3)
    other = dataclasses.replace(log, paths=(Path(path, on_route=False),))
    assert scenario_from_log(other).route[0, -1, 1] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.slow
def test_replayed_logs_still_reach_their_goals() -> None:
    """All agents of generated logs, on lanes' centres: nobody misses its goal, and progress is whole."""
    made = [scenario_from_log(generate(seed), agents=8, routes="lanes") for seed in (3, 4)]
    environment = driving(stack(made, agents=8), Config(agents=8, driver="log", terminations=()))

    def roll(index: Any) -> Any:
        state, _ = environment.start(index)
        begun = environment.active(state)

        def body(state: Any, _: None) -> Any:
            return environment.step(jax.random.key(0), state, np.zeros((8, 2), np.int32))[0], None

        return begun, environment.metrics(jax.lax.scan(body, state, None, length=80)[0])

    begun, metrics = jax.jit(jax.vmap(roll))(np.arange(2))
    assert begun.sum() > 8
    for name in ("goal", "progress"):
        np.testing.assert_allclose(np.asarray(metrics[name].value)[np.asarray(begun)], 1.0, atol=0.02, err_msg=name)
