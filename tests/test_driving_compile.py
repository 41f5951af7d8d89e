"""Logs to scenarios: routes, lights, the distance field against an oracle, padding, bad logs, real logs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from longhaul.datasets import sources
from longhaul.datasets.log import (
    EDGE_BOUNDARY,
    LANE_STREET,
    LIGHT_CAUTION,
    LIGHT_GO,
    LIGHT_STOP,
    STOP_SIGN,
    VEHICLE,
    BadData,
    Feature,
    Lights,
    Log,
    Tracks,
)
from longhaul.driving.bank import bucket, sample, stack
from longhaul.driving.bodies import corners
from longhaul.driving.compile import compile_log, disputes
from longhaul.driving.edges import distance_field, make_edges, signed_distance, simplify
from longhaul.driving.generator import generate
from longhaul.driving.routes import lights_disputed
from longhaul.driving.scenario import CELL, Scenario

ORIGIN = np.array([4321.5, -987.25, 12.0])
DATA = Path(os.environ.get("LONGHAUL_DATA", Path(__file__).resolve().parent.parent / "../shared/data"))


def no_lights(steps: int) -> Lights:
    return Lights(np.zeros(0, np.int64), np.zeros((0, 3)), np.zeros((0, steps), np.int8), np.zeros((0, steps), bool))


def make_log(
    xy: np.ndarray,
    heading: np.ndarray | None = None,
    *,
    features: tuple[Feature, ...] = (),
    lights: Lights | None = None,
    valid: np.ndarray | None = None,
    sdc: int = 0,
    current: int = 0,
    kind: int = VEHICLE,
) -> Log:
    """A log of tracks that were at `xy` [N, T, 2] or [T, 2], 4 m by 2 m, far away from the origin."""
    xy = xy if xy.ndim == 3 else xy[None]
    n, steps = xy.shape[:2]
    velocity = np.gradient(xy, 0.1, axis=1)
    if heading is None:
        heading = np.arctan2(velocity[..., 1], velocity[..., 0])
    position = np.concatenate([xy, np.zeros((n, steps, 1))], -1) + ORIGIN
    size = np.broadcast_to(np.array([4.0, 2.0, 1.5], np.float32), (n, steps, 3))
    known = np.ones((n, steps), bool) if valid is None else valid
    tracks = Tracks(
        np.arange(n), np.full(n, kind, np.int8), position, np.broadcast_to(heading, (n, steps)).astype(np.float32),
        velocity.astype(np.float32), size, known,
    )  # fmt: skip
    times = 0.1 * np.arange(steps)
    return Log("made", "test", times, current, tracks, sdc, (), features, lights or no_lights(steps))


def polyline(*points: tuple[float, ...], z: float = 0.0) -> np.ndarray:
    return np.array([(*p, z) if len(p) == 2 else p for p in points]) + ORIGIN


def straight(speed: float = 10.0, steps: int = 50) -> np.ndarray:
    return np.stack([speed * 0.1 * np.arange(steps), np.zeros(steps)], -1)


def on_route(scenario: Scenario, s: np.ndarray, a: int = 0) -> np.ndarray:
    route = scenario.route[a, : scenario.route_points[a]]
    return np.stack([np.interp(s, np.arange(len(route)), route[:, i]) for i in range(2)], -1)


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
    assert disputes(log)[1] == 0


# --- lights


def lights_at(stops: list[tuple[int, tuple[float, float], int]], steps: int) -> Lights:
    """Lights (lane, stop point, state throughout)."""
    return Lights(
        np.array([lane for lane, _, _ in stops]),
        np.concatenate([polyline(p) for _, p, _ in stops]),
        np.array([[state] * steps for _, _, state in stops], np.int8),
        np.ones((len(stops), steps), bool),
    )


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
    assert disputes(log) == (1, int(disputed))


def test_a_light_is_disputed_only_around_the_crossing() -> None:
    front = np.arange(0.0, 20.0)
    state = np.full((3, 20), 3, np.int8)
    state[0, :8] = 1  # green from step 8, crossed between 9 and 10
    state[1, :11] = 1  # still red at the crossing
    state[2, 13:] = 1  # red long after it
    assert lights_disputed(front, np.full(3, 9.5), state).tolist() == [False, True, False]
    assert not lights_disputed(front, np.array([-1.0, 30.0]), np.ones((2, 20), np.int8)).any()


# --- the distance field


def oracle(points: np.ndarray, lines: list[np.ndarray]) -> np.ndarray:
    """Signed distances, a point at a time; where segments tie, the one of the farthest line decides."""
    segments = np.concatenate([np.stack([line[:-1], line[1:]], 1) for line in lines])
    start, chord = segments[:, 0], segments[:, 1] - segments[:, 0]
    size = np.hypot(*chord.T)
    out = []
    for point in points:
        to = point - start
        share = np.clip((to * chord).sum(1) / size**2, 0, 1)
        away = np.hypot(*(to - share[:, None] * chord).T)
        side = (chord[:, 0] * to[:, 1] - chord[:, 1] * to[:, 0]) / size
        tied = np.flatnonzero(away < away.min() + 1e-7)
        out.append(-np.sign(side[tied[np.abs(side[tied]).argmax()]]) * away.min())
    return np.array(out)


def star(rng: np.random.Generator, middle: np.ndarray, size: float, corners: int, *, road_inside: bool) -> np.ndarray:
    """A closed polygon with sharp corners both ways."""
    angle = np.sort(rng.uniform(0, 2 * np.pi, corners))
    line = middle + (size * rng.uniform(0.4, 1.0, corners))[:, None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    line = np.concatenate([line, line[:1]])
    return line if road_inside else line[::-1]


def test_the_field_has_the_sign_and_the_distance_of_an_oracle() -> None:
    rng = np.random.default_rng(5)
    outer = star(rng, np.zeros(2), 60.0, 40, road_inside=True)
    inner = [star(rng, m, 4.0, 9, road_inside=False) for m in (np.array([12.0, 3.0]), np.array([-9.0, -8.0]))]
    # the outline arrives in pieces, as sources cut it
    pieces = [outer[:15], outer[14:30], outer[29:], *inner]
    field, origin = distance_field(make_edges(pieces), np.array([-70.0, -70.0]), np.array([70.0, 70.0]))
    y, x = rng.integers(0, field.shape[0], 12000), rng.integers(0, field.shape[1], 12000)
    true = oracle(origin + CELL * np.stack([x, y], -1), [outer, *inner])
    got = field[y, x] / 100.0
    # never more than 1 cm of merging and half of rounding
    assert np.abs(np.abs(got) - np.abs(true)).max() < 0.016
    clear = np.abs(true) > 0.011
    assert (np.sign(got) == np.sign(true))[clear].mean() >= 0.9999
    assert 0.1 < (got < 0).mean() < 0.9


def test_the_interpolated_field_is_close_between_its_samples() -> None:
    rng = np.random.default_rng(6)
    lines = [star(rng, np.zeros(2), 40.0, 25, road_inside=True)]
    field, origin = distance_field(make_edges(lines), np.array([-45.0, -45.0]), np.array([45.0, 45.0]))
    points = rng.uniform(-44, 44, (4000, 2))
    error = np.abs(sample(field, origin, points) - oracle(points, lines))
    assert np.median(error) < 0.01
    assert np.percentile(error, 99) < 0.25


def test_tiles_leave_out_no_segment_that_is_nearest() -> None:
    rng = np.random.default_rng(7)
    lines = [rng.uniform(-80, 80, (2, 2)) + rng.normal(0, 3, (1, 2)) for _ in range(120)]
    edges = make_edges(lines)
    field, origin = distance_field(edges, np.array([-90.0, -60.0]), np.array([77.0, 90.0]))
    y, x = np.meshgrid(np.arange(0, field.shape[0], 3), np.arange(0, field.shape[1], 3), indexing="ij")
    true = signed_distance(origin + CELL * np.stack([x, y], -1).astype(float), edges)
    assert np.abs(np.abs(field[y, x] / 100.0) - np.abs(true)).max() < 0.0101


def test_the_road_is_left_of_its_edge_and_a_bridge_above_does_not_count() -> None:
    here = Feature(1, EDGE_BOUNDARY, polyline((-60, -4), (150, -4)))
    across = Feature(2, EDGE_BOUNDARY, polyline((25, 60), (25, -60), z=6.0))
    far_climb = Feature(3, EDGE_BOUNDARY, polyline((-60, 60, 4.0), (150, 60, 4.0))[::-1])
    scenario = compile_log(make_log(straight(), features=(here, across, far_climb)))
    points = np.array([[20.0, 0.0], [30.0, 0.0], [30.0, -5.0], [30.0, 25.0]])
    got = sample(scenario.field, scenario.field_origin, points)
    np.testing.assert_allclose(got, [-4.0, -4.0, 1.0, -29.0], atol=0.02)
    level = dataclasses.replace(across, points=across.points - np.array([0.0, 0.0, 6.0]))
    crossed = compile_log(make_log(straight(), features=(here, level)))
    beside = np.array([[24.0, 10.0], [26.0, 10.0]])
    np.testing.assert_allclose(sample(crossed.field, crossed.field_origin, beside), [1.0, -1.0], atol=0.02)


def test_the_field_covers_the_route_and_its_margin() -> None:
    edge = Feature(1, EDGE_BOUNDARY, polyline((-60, -4), (150, -4)))
    scenario = compile_log(make_log(straight(10.0, 41), features=(edge,)), route_margin=30.0)
    high = scenario.field_origin + CELL * (np.array(scenario.field.shape[::-1]) - 1)
    assert (scenario.field_origin <= -30.0).all()
    assert high[0] >= 40.0 + 15.0 + 30.0 - 1.0
    assert high[1] >= 30.0
    assert high[0] <= 40.0 + 15.0 + 30.0 + 1.0


def test_simplified_lines_stay_near_and_keep_their_ends() -> None:
    rng = np.random.default_rng(8)
    lines = [np.cumsum(rng.normal(0, 1, (n, 2)), 0) for n in (1, 2, 3, 50, 200)]
    lines.append(np.concatenate([lines[-1], lines[-1][:1]]))  # closed
    for line, thin in zip(lines, simplify(lines, 0.8), strict=True):
        assert (thin[[0, -1]] == line[[0, -1]]).all()
        assert len(thin) <= len(line)
        if len(line) > 1:
            gaps = np.abs(signed_distance(line, make_edges([thin])))
            assert gaps.max() < 0.8 + 0.011
    assert len(simplify([np.stack([np.arange(50.0), np.zeros(50)], -1)], 0.1)[0]) == 2


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
    for log in sources.load([str(DATA / folder)]):
        scenario = compile_log(log, agents=8)
        for a, i in enumerate(scenario.controlled[scenario.controlled >= 0]):
            there = scenario.present[:, i]
            error = np.hypot(*(on_route(scenario, scenario.expert_s[a], a) - scenario.pose[:, i, :2])[there].T)
            assert np.median(error) < 0.3
        assert scenario.dt == pytest.approx(0.1, abs=0.005)
        if scenario.field.size:
            outline = corners(scenario.pose[:, 0].astype(float), np.broadcast_to(scenario.size[0], (scenario.steps, 2)))
            assert (sample(scenario.field, scenario.field_origin, outline) < 0).all(-1).mean() > 0.99
        assert disputes(log)[1] == 0
