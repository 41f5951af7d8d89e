"""Off-road and collision on real maps, against slow references in float64 that share no line with the simulator."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import EDGE_BOUNDARY, EDGE_MEDIAN, Log
from longhaul.driving.scenario import from_log
from longhaul.driving.scenario.bank import stack
from longhaul.driving.scenario.from_log import Route
from longhaul.driving.scenario.scenario import CELL, Scenario
from longhaul.driving.sim import device_bank
from longhaul.driving.sim.geometry import Relative, clearance, into, separation
from tests.helpers import polygons

MAPS = (
    "womd/motion_data_one_example.tfrecord",
    "womd/motion_data_one_scenario.tfrecord",
    "gpudrive/tfrecord-00000-of-01000_325.json",
    "gpudrive/tfrecord-00000-of-01000_4.json",
    "scenarionet/sd_waymo_v1.2_eb4b91b10ca94ff2.pkl",
)

JOINED = 0.1
"""Metres between the end of one edge and the start of another that belong together."""

ALL = 100_000
"""Boxes of a test."""


def edges(log: Log, near: np.ndarray, origin: np.ndarray) -> list[np.ndarray]:
    """The road edges [P, 2] of the level on which the route points `near` [R, 3] are, as docs and `from_log` define it:
    a vertex counts if its height differs from the nearest route point's by at most 3 m and 8 % of their distance, and
    by at most 5 m."""
    lines = []
    for feature in log.features:
        if feature.kind not in (EDGE_BOUNDARY, EDGE_MEDIAN):
            continue
        points = np.asarray(feature.points, np.float64) - origin
        away = np.sqrt(((points[:, None, :2] - near[None, :, :2]) ** 2).sum(-1))
        nearest = away.argmin(1)
        slope = np.minimum(3.0 + 0.08 * away.min(1), 5.0)
        level = np.abs(points[:, 2] - near[nearest, 2]) <= slope
        run: list[np.ndarray] = []
        for point, counts in zip([*points, points[-1]], [*level, False]):
            if counts:
                if not run or np.abs(point[:2] - run[-1]).max() > 1e-3:
                    run.append(point[:2])
            else:
                lines += [np.array(run)] if len(run) > 1 else []
                run = []
    return lines


def joined(lines: list[np.ndarray]) -> np.ndarray:
    """The segments [M, 2, 2] of lines; where one ends near the start of another, it goes on to there."""
    heads = np.array([line[0] for line in lines])
    whole = []
    for line in lines:
        gap = np.linalg.norm(heads - line[-1], axis=1)
        near = 1e-9 < gap.min() < JOINED
        whole.append(np.concatenate([line, heads[gap.argmin()][None]]) if near else line)
    return polygons.segments(whole)


def signed_distances(points: np.ndarray, lines: np.ndarray, side: float = 16.0) -> np.ndarray:
    """Distance [P] of points [P, 2] to the nearest segment, negative on its left. Exact: a tile's points look at every
    segment that can be nearest to any of them."""
    out = np.zeros(len(points))
    tile = np.floor(points / side).astype(int)
    order = np.lexsort(tile.T)
    bounds = np.flatnonzero(np.append(True, (np.diff(tile[order], axis=0) != 0).any(1)))
    for chosen in np.split(order, bounds[1:]):
        centre = (tile[chosen[0]] + 0.5) * side
        away = polygons.distances(centre[None], lines)[0]
        out[chosen] = polygons.signed_distance(points[chosen], lines[away <= away.min() + side * 1.5])
    return out


def sample_boxes(made: Scenario, lines: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Boxes [B, 5] near edges, along routes, anywhere, and where the log has its agents; within the field."""
    quarter = count // 4
    chosen = random.integers(0, len(lines), quarter)
    share = random.random(quarter)[:, None]
    along = (lines[:, 1] - lines[:, 0])[chosen]
    normal = np.stack([-along[:, 1], along[:, 0]], -1) / np.linalg.norm(along, axis=1, keepdims=True)
    by_edges = lines[chosen, 0] + share * along + normal * random.normal(0.0, 2.0, quarter)[:, None]
    routes = [made.route[a, : made.route_points[a], :2] for a in np.flatnonzero(made.controlled >= 0)]
    by_routes = np.concatenate(routes)
    by_routes = by_routes[random.integers(0, len(by_routes), quarter)] + random.uniform(-10.0, 10.0, (quarter, 2))
    low = made.field_origin.astype(np.float64)
    high = low + CELL * (np.array(made.field.shape[::-1]) - 1)
    anywhere = random.uniform(low, high, (count - 3 * quarter, 2))
    step, agent = np.nonzero(made.present)
    pick = random.integers(0, len(step), quarter)
    logged = made.pose[step[pick], agent[pick]].astype(np.float64)
    place = np.concatenate([by_edges, by_routes, anywhere, logged[:, :2]])
    sizes = made.size[made.kind > 0].astype(np.float64)
    heading = np.append(random.uniform(-np.pi, np.pi, count - quarter), logged[:, 2])
    boxes = np.concatenate([place, heading[:, None], sizes[random.integers(0, len(sizes), count)]], 1)
    whole = polygons.corners(boxes)
    return boxes[((whole > low) & (whole < high)).all((1, 2))]


@pytest.fixture(scope="module")
def maps(logs: Path) -> list[Log]:
    found = [log for name in MAPS if (logs / name).exists() for log in readers.read(logs / name)]
    if len(found) < len(MAPS):
        pytest.skip(f"{len(found)} of {len(MAPS)} real logs")
    return found


def verdicts(log: Log, agents: int, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """Of sampled boxes: whether the simulator's verdict, any corner off the road, is another one than the reference's;
    and whether this is so farther than 0.1 m from an edge. There, the exact sign itself jumps within a cell."""
    near: list[np.ndarray] = []
    whole = from_log.road_field

    def spy(log: Log, routes: list[Route], origin: np.ndarray, margin: float) -> tuple[np.ndarray, np.ndarray]:
        near.extend(each.points[: int(each.length + from_log.FIELD_BEYOND) + 1 : 5, :3] for each in routes)
        return whole(log, routes, origin, margin)

    with monkeypatch.context() as patch:
        patch.setattr(from_log, "road_field", spy)
        made = from_log.scenario_from_log(log, agents=agents)
    lines = joined(edges(log, np.concatenate(near), log.tracks.position[log.sdc, log.current]))
    boxes = sample_boxes(made, lines, count, np.random.default_rng(agents))
    points = polygons.corners(boxes)
    expected = signed_distances(points.reshape(-1, 2), lines).reshape(len(boxes), 4)
    field = device_bank.field(device_bank.tabulate(stack([made], agents=agents), agents, reactive=False), jnp.int32(0))
    measure = jax.jit(lambda at: clearance(field, at[..., 0], at[..., 1]))
    found = np.asarray(measure(jnp.asarray(points, jnp.float32)))
    off = expected.max(1) > 0.0
    assert 0.05 < off.mean() < 0.95  # both verdicts are put to the test
    wrong = (found.max(1) > 0.0) != off
    far = wrong & (np.abs(expected.max(1)) > 0.1)
    for box in np.flatnonzero(far):
        differ = (found[box] > 0.0) != (expected[box] > 0.0)
        assert torn(points[box][differ], lines).all()
    print(f"{log.id}, {agents} agents: {len(boxes)} boxes, {wrong.sum()} differ, {far.sum()} farther than 0.1 m")
    return wrong, far


@pytest.mark.slow
@pytest.mark.parametrize(("agents", "count"), [(1, 2 * ALL), (64, ALL + ALL // 10)])  # some leave the field
def test_offroad_of_a_hundred_thousand_boxes_agrees_with_the_exact_distance(
    maps: list[Log], agents: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [verdicts(log, agents, count // len(maps), monkeypatch) for log in maps]
    wrong, far = (np.concatenate(column) for column in zip(*parts))
    assert len(wrong) > count // 2
    assert wrong.mean() <= 0.001
    # behind the free end of an edge, and half way between two edges that contradict each other, nobody can say where
    # the road is; around the ego's route there is none of this
    assert far.mean() <= (0.0 if agents == 1 else 0.0003)


def torn(points: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """True where the exact sign changes within a cell of each of `points` [P, 2] without an edge in between."""
    angle = np.linspace(0.0, 2.0 * np.pi, 32, endpoint=False)
    ring = np.stack([np.cos(angle), np.sin(angle)], -1)
    here = signed_distances(points, lines)
    out = np.zeros(len(points), bool)
    for radius in np.linspace(0.05, 1.0, 20) * CELL * np.sqrt(2.0):
        there = signed_distances((points[:, None] + radius * ring).reshape(-1, 2), lines).reshape(len(points), -1)
        apart = np.abs(there) + np.abs(here)[:, None] > radius + 1e-9  # an edge in between were nearer
        out |= (((there > 0.0) != (here > 0.0)[:, None]) & apart).any(1)
    return out


def test_the_reference_itself_by_hand() -> None:
    """A square of road, counter-clockwise, with a bay; and a line whose ends are free."""
    square = np.array([[0.0, 0], [10, 0], [10, 10], [6, 10], [6, 5], [4, 5], [4, 10], [0, 10], [0, 0]])
    lines = polygons.segments([square])
    points = np.array([[5.0, 2], [5, 7], [-1, -1], [11, 11], [3, 4], [5, 4.5], [5.9, 4.9]])
    diagonal = np.hypot(0.1, 0.1)
    expected = [-2.0, 1.0, np.sqrt(2), np.sqrt(2), -np.hypot(1, 1), -0.5, -0.1]
    np.testing.assert_allclose(signed_distances(points, lines), expected, atol=1e-12)
    np.testing.assert_allclose(
        signed_distances(np.array([[6.1, 4.9], [3.9, 4.9]]), lines), [-diagonal, -diagonal], atol=1e-12
    )
    assert not torn(np.array([[5.0, 0.05], [5.0, -0.05]]), lines).any()
    free = polygons.segments([np.array([[0.0, 0], [10, 0]])])
    np.testing.assert_allclose(signed_distances(np.array([[13.0, 4], [13, -4]]), free), [-5, 5])
    assert torn(np.array([[13.0, 0.05], [5.0, 0.05]]), free).tolist() == [True, False]


def pairs(log: Log, count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Boxes [B, 5] of two agents at one step of the log, near each other, a half of them shaken; and made ones."""
    tracks, origin = log.tracks, log.tracks.position[log.sdc, log.current]
    state = np.concatenate(
        [tracks.position[..., :2] - origin[:2], tracks.heading[..., None], tracks.size[..., :2]], -1
    ).astype(np.float64)
    found = []
    for step in range(tracks.valid.shape[1]):
        there = state[tracks.valid[:, step], step]
        gap = np.linalg.norm(there[:, None, :2] - there[None, :, :2], axis=-1)
        first, second = np.nonzero(np.triu(gap < 12.0, 1))
        found.append(np.stack([there[first], there[second]], 1))
    logged = np.concatenate(found)
    logged = logged[random.integers(0, len(logged), count * 2 // 3)]
    half = len(logged) // 2
    logged[:half, 1, :3] += random.normal(0.0, [1.0, 1.0, 0.3], (half, 3))
    rest = count - len(logged)
    made = random.uniform([-4, -4, -np.pi, 0.4, 0.4], [4, 4, np.pi, 12, 3], (rest, 2, 5))
    made[..., :2] += random.uniform(-200.0, 200.0, (rest, 1, 2))
    both = np.concatenate([logged, made])
    return both[:, 0], both[:, 1]


@pytest.mark.parametrize("index", range(len(MAPS)))
def test_collisions_agree_with_exact_polygons(maps: list[Log], index: int) -> None:
    """Of 100,000 pairs in all: the verdict is the exact one wherever a centimetre more or less does not change that."""
    own, other = pairs(maps[index], ALL // len(MAPS), np.random.default_rng(3))
    touch, deep = (
        polygons.overlap(polygons.corners(own + larger), polygons.corners(other + larger))
        for larger in ([0.0, 0.0, 0.0, 0.01, 0.01], [0.0, 0.0, 0.0, -0.01, -0.01])
    )
    clear = touch == deep
    assert clear.mean() > 0.95
    assert 0.05 < deep.mean() < 0.95

    def gap(a: jax.Array, b: jax.Array) -> jax.Array:
        cos, sin = jnp.cos(a[2]), jnp.sin(a[2])
        x, y = into(b[0] - a[0], b[1] - a[1], cos, sin)
        turn = b[2] - a[2]
        return separation(Relative(x, y, jnp.cos(turn), jnp.sin(turn), (a[3] / 2, a[4] / 2), (b[3] / 2, b[4] / 2)))

    found = np.asarray(jax.jit(jax.vmap(gap))(jnp.asarray(own, jnp.float32), jnp.asarray(other, jnp.float32)))
    np.testing.assert_array_equal((found < 0.0)[clear], deep[clear])
