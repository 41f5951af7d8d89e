"""Routes from logged paths and lanes, and the lights along them."""

from __future__ import annotations

import numpy as np
import pytest

from longhaul.driving.datasets.log import LANE_STREET, LIGHT_CAUTION, LIGHT_GO, LIGHT_STOP, Feature, Lights
from longhaul.driving.scenario.compile import compile_log, lights_disputed
from longhaul.driving.scenario.distance_field import make_edges, signed_distance
from tests.helpers.short_logs import lights_at, make_log, on_route, polyline, straight

# --- routes


def test_a_route_is_the_logged_path_by_arc_length() -> None:
    radius, angle = 30.0, np.linspace(0.0, 1.5, 70)
    xy = radius * np.stack([np.sin(angle), 1.0 - np.cos(angle)], -1)
    scenario = compile_log(make_log(xy, angle[None], current=10))
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
    scenario = compile_log(make_log(straight()))
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
    scenario = compile_log(make_log(straight(15.0), features=lanes))
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
    scenario = compile_log(make_log(xy, np.full((1, 50), 0.7)))
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
    scenario = compile_log(make_log(xy, np.zeros((1, 140))))
    np.testing.assert_allclose(scenario.route_length, 40.0, atol=0.1)
    assert np.abs(scenario.route[0, :, 2]).max() < 0.2
    assert (np.diff(scenario.expert_s[0]) >= 0.0).all()


def test_reversing_makes_no_progress() -> None:
    back = np.stack([-0.3 * np.arange(60), np.zeros(60)], -1)
    scenario = compile_log(make_log(back, np.zeros((1, 60))))
    assert scenario.route_length[0] == 0.0
    assert (scenario.expert_s == 0.0).all()
    assert np.abs(scenario.route[0, :, 2]).max() == 0.0
    x = np.concatenate([-0.2 * np.arange(30), -5.8 + 0.5 * np.arange(60)])
    scenario = compile_log(make_log(np.stack([x, np.zeros(90)], -1), np.zeros((1, 90))))
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
    scenario = compile_log(log)
    np.testing.assert_allclose(scenario.light_s, [[60.0]], atol=0.01)
    assert (scenario.light_state == 3).all()
    # a light of an unknown lane counts by its stop point
    log = make_log(straight(8.0), lights=lights_at([(99, (55.0, 1.0), LIGHT_CAUTION), (98, (55.0, 9.0), LIGHT_GO)], 50))
    scenario = compile_log(log)
    np.testing.assert_allclose(scenario.light_s, [[55.0]], atol=0.01)
    assert (scenario.light_state == 2).all()


def test_light_states_are_mapped_from_the_current_step_on() -> None:
    states = np.array([[0, 9, *range(9)] + [4] * 39], np.int8)
    states[0, 1] = 4
    known = np.ones((1, 50), bool)
    known[0, 20] = False
    lights = Lights(np.array([7]), polyline((70.0, 0.0)), states, known)
    scenario = compile_log(make_log(straight(10.0), lights=lights, current=2))
    assert scenario.light_state[0, 0, :9].tolist() == [0, 1, 2, 3, 1, 2, 3, 1, 2]
    assert scenario.light_state[0, 0, 18] == 0
    assert scenario.light_state[0, 0, 19] == 1
    np.testing.assert_allclose(scenario.light_s, [[68.0]], atol=0.01)


@pytest.mark.parametrize(("x", "disputed"), [(20.0, True), (60.0, False)])
def test_a_red_light_that_the_log_itself_passes_is_unknown(x: float, disputed: bool) -> None:
    log = make_log(straight(10.0), lights=lights_at([(1, (x, 0.0), LIGHT_STOP)], 50))
    scenario = compile_log(log)
    assert scenario.light_s.shape == (1, 1)
    assert (scenario.light_state == (0 if disputed else 1)).all()


def test_a_light_is_disputed_only_around_the_crossing() -> None:
    front = np.arange(0.0, 20.0)
    state = np.full((3, 20), 3, np.int8)
    state[0, :8] = 1  # green from step 8, crossed between 9 and 10
    state[1, :11] = 1  # still red at the crossing
    state[2, 13:] = 1  # red long after it
    assert lights_disputed(front, np.full(3, 9.5), state).tolist() == [False, True, False]
    assert not lights_disputed(front, np.array([-1.0, 30.0]), np.ones((2, 20), np.int8)).any()
