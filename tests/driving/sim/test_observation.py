"""What agents perceive: by hand-made places, and the statistics of what is drawn."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.datasets.log import VEHICLE
from longhaul.driving.generator.generate import generate
from longhaul.driving.scenario import lane_graph
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.sim import road_lookup
from longhaul.driving.sim.config import Config
from longhaul.driving.sim.dynamics import Drive, Motion
from longhaul.driving.sim.features import Agent, on_lanes
from longhaul.driving.sim.geometry import FREE
from longhaul.driving.sim.observation import perceive, perceive_road, view_limit
from longhaul.driving.sim.road_lookup import LanesHere, Pieces
from longhaul.driving.sim.simulator import driving
from longhaul.driving.sim.traffic import Scene
from tests.helpers.driving_scenarios import bank


def scene(places: list[tuple[float, float]], headings: list[float] | None = None, size: float = 2.0) -> Scene:
    """The agent itself at the first place, slot 0, and others; 2 size long, size wide."""
    x, y = np.array(places, np.float32).T
    heading = np.array(headings or [0.0] * len(x), np.float32)
    ones, slot = np.ones(len(x), np.float32), np.where(np.arange(len(x)) == 0, 0, -1).astype(np.int32)
    made = Scene(
        x=x, y=y, heading=heading, cos=np.cos(heading), sin=np.sin(heading), vx=0 * x, vy=0 * x,
        half_length=size * ones, half_width=0.5 * size * ones, kind=ones, present=ones > 0, slot=slot,
    )  # fmt: skip
    return jax.tree.map(jnp.asarray, made)


def looking(heading: float = 0.0, x: float = 0.0, y: float = 0.0) -> Agent:
    zero = jnp.float32(0.0)
    motion = Motion(jnp.float32(x), jnp.float32(y), jnp.float32(heading), zero)
    return Agent(Drive(motion, zero, zero), zero, jnp.int32(0), jnp.int32(0))


AROUND = [(0.0, 0.0), (10.0, 0.0), (0.0, 10.0), (-10.0, 0.0), (0.0, -10.0), (50.0, 0.0)]


@pytest.mark.parametrize(
    ("sight", "heading", "seen"),
    [
        (Config(view_range=20.0), 0.0, [1, 2, 3, 4]),
        (Config(view_range=9.0), 0.0, []),
        (Config(view_angle=math.pi / 2), 0.0, [1, 5]),
        (Config(view_angle=math.pi / 2), math.pi / 2, [2]),
        (Config(view_angle=1.02 * math.pi), 0.0, [1, 2, 4, 5]),
        (Config(view_angle=1.9 * math.pi, view_range=20.0), math.pi, [2, 3, 4]),
        (Config(), 0.3, [1, 2, 3, 4, 5]),
    ],
)
def test_what_lies_outside_of_a_limited_view_is_not_seen(sight: Config, heading: float, seen: list[int]) -> None:
    found = perceive(sight, scene(AROUND), looking(heading), None)
    assert np.flatnonzero(found.present).tolist() == [0, *seen]  # oneself always
    x, y = np.array(AROUND[1:], np.float32).T
    c, s = math.cos(heading), math.sin(heading)
    there = Pieces(c * x + s * y, c * y - s * x, 0 * x, 0 * x, np.ones(5, np.int32), np.ones(5, bool))
    road = perceive_road(sight, there, None)
    assert (1 + np.flatnonzero(road.there)).tolist() == seen


@jax.jit
def behind(here: Scene, agent: Agent) -> Scene:
    """What an agent perceives where boxes hide others."""
    return perceive(Config(view_occlusion=True), here, agent, None)


@pytest.mark.parametrize(
    ("places", "headings", "size", "hidden"),
    [
        ([(0, 0), (10, 0), (20, 0)], None, 2.0, [2]),
        ([(0, 0), (10, 0), (20, 5)], None, 2.0, []),  # past the box's end
        ([(0, 0), (10, 0), (20, 1.5)], None, 2.0, [2]),  # 0.75 to the side there, of half a width of 1
        ([(0, 0), (10, 1.8), (20, 0)], None, 2.0, []),
        ([(0, 0), (10, 1.8), (20, 0)], [0, math.pi / 2, 0], 2.0, [2]),  # stands across
        ([(0, 0), (20, 0), (10, 0)], None, 2.0, [1]),
        ([(0, 0), (1, 0), (20, 0)], None, 2.0, []),  # who stands in us hides nobody
        ([(0, 0), (-10, 0), (20, 0)], None, 2.0, []),
        ([(0, 0), (7, 7), (30, 30), (-7, 7), (-30, 30), (0, 30)], None, 2.0, [2, 4]),
    ],
)
def test_boxes_hide_whose_middle_is_behind_them(
    places: list[tuple[float, float]], headings: list[float] | None, size: float, hidden: list[int]
) -> None:
    found = behind(scene(places, headings, size), looking())
    assert np.flatnonzero(~np.asarray(found.present)).tolist() == hidden
    # wherever all this is, and whichever way it is turned
    turn, shift = 2.1, np.array([300.0, -80.0])
    turned = [
        tuple(np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]) @ p + shift) for p in places
    ]
    moved = scene(turned, [h + turn for h in headings or [0.0] * len(places)], size)
    found = behind(moved, looking(turn, *shift))
    assert np.flatnonzero(~np.asarray(found.present)).tolist() == hidden


def test_who_misses_everything_sees_itself_alone() -> None:
    found = perceive(Config(observation_mask=1.0), scene(AROUND), looking(), jax.random.key(0))
    assert np.flatnonzero(found.present).tolist() == [0]


def test_the_absent_hide_nobody() -> None:
    made = scene([(0, 0), (10, 0), (20, 0)])._replace(present=jnp.array([True, False, True]))
    found = behind(made, looking())
    assert found.present.tolist() == [True, False, True]


def test_noise_has_the_deviations_asked_for_and_spares_oneself() -> None:
    sight = Config(observation_noise=(0.5, 0.1, 2.0))
    made = scene([(3.0, -4.0)] * 40)
    keys = jax.random.split(jax.random.key(0), 500)
    found = jax.jit(jax.vmap(lambda key: perceive(sight, made, looking(), key)))(keys)
    drawn = {name: np.asarray(getattr(found, name))[:, 1:] for name in ("x", "y", "heading", "vx", "vy")}
    for name, deviation, mean in zip(drawn, (0.5, 0.5, 0.1, 2.0, 2.0), (3.0, -4.0, 0.0, 0.0, 0.0), strict=True):
        assert drawn[name].std() == pytest.approx(deviation, rel=0.03)
        assert drawn[name].mean() == pytest.approx(mean, abs=0.05 * deviation)
    table = np.corrcoef([values.reshape(-1) for values in drawn.values()])
    assert np.abs(table - np.eye(5)).max() < 0.03  # independent of each other
    np.testing.assert_allclose(found.cos, np.cos(found.heading), atol=1e-6)
    assert (np.asarray(found.x)[:, 0] == 3.0).all()
    assert (np.asarray(found.heading)[:, 0] == 0.0).all()


def test_the_mask_misses_its_share() -> None:
    sight = Config(observation_mask=0.3)
    made = scene([(3.0, -4.0)] * 40)
    nothing = jnp.zeros(50)
    road = Pieces(nothing, nothing, nothing, nothing, nothing.astype(jnp.int32), jnp.arange(50) < 40)
    keys = jax.random.split(jax.random.key(0), 500)
    present, there = jax.jit(
        jax.vmap(lambda key: (perceive(sight, made, looking(), key).present, perceive_road(sight, road, key).there))
    )(keys)
    assert np.asarray(present)[:, 0].all()
    assert np.asarray(present)[:, 1:].mean() == pytest.approx(0.7, abs=0.01)
    assert np.asarray(there)[:, :40].mean() == pytest.approx(0.7, abs=0.01)
    assert not np.asarray(there)[:, 40:].any()


QUICK = {"xla_backend_optimization_level": 0}
"""Little is computed here, and much compiled."""


class Ridden(NamedTuple):
    """Three steps of scenario 0, for two keys, [2, ...]."""

    first: Any  # the observation before the first step
    reset: Any  # that of a reset with the key
    seen: Any  # observations [2, T, ...]
    reward: Any


@lru_cache
def ride(**settings: Any) -> Ridden:
    made = bank(scenario_from_log(generate(3), agents=2), agents=2)
    environment = driving(made, Config(agents=2, terminations=(), **settings))

    def program(key: Any) -> Ridden:
        state, first = environment.start(0)

        def body(state: Any, key: Any) -> Any:
            state, step = environment.step(key, state, jnp.full((2, 2), 3))
            return state, (step.observation, step.reward)

        seen, reward = jax.lax.scan(body, state, jax.random.split(key, 3))[1]
        return Ridden(first, environment.reset(key)[1] if settings else None, seen, reward)

    keys = jnp.stack([jax.random.key(0), jax.random.key(1)])
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(program), compiler_options=QUICK)(keys))


@pytest.mark.slow
def test_options_change_what_is_seen_and_nothing_else() -> None:
    plain = ride()
    found = ride(road_points=64, observation_noise=(0.3, 0.05, 0.5), observation_mask=0.2)
    np.testing.assert_array_equal(found.reward, plain.reward)  # rewards are those of the truth
    for name in ("road", "route"):
        np.testing.assert_allclose(getattr(found.seen, name), getattr(plain.seen, name), atol=1e-6, err_msg=name)
    assert plain.seen.points is None
    assert found.seen.points.shape == (2, 3, 2, 64, road_lookup.ROAD)
    for part in (found.first, found.reset, found.seen):
        assert part.points[..., -1].mean() == pytest.approx(0.8, abs=0.12)
    # what is drawn comes from the key; where there is none, from the scenario
    np.testing.assert_array_equal(found.first.agents[0], found.first.agents[1])
    assert (found.first.agents != plain.first.agents).any()
    for part in (found.reset, found.seen):
        assert (part.agents[0] != part.agents[1]).any()
        assert (part.points[0] != part.points[1]).any()


@pytest.mark.parametrize(
    ("distance", "turn", "told", "seen"),
    [
        ((1.0, 3.0), (1.0, 1.0), (12.0, 20.0), 12.0),
        ((1.0, 3.0), (-1.0, 1.0), (12.0, 20.0), 20.0),  # the nearest leads the other way
        (
            (9.0, 8.0),
            (1.0, -1.0),
            (12.0, 20.0),
            20.0,
        ),  # beside all lanes, as on a forecourt: the nearest, however it leads
        ((9.0, 8.0), (1.0, -1.0), (12.0, 0.0), lane_graph.SLOWEST),  # that tells none
        ((FREE, FREE), (0.0, 0.0), (0.0, 0.0), lane_graph.SLOWEST),
    ],
)
def test_there_is_always_a_limit(
    distance: tuple[float, ...], turn: tuple[float, ...], told: tuple[float, ...], seen: float
) -> None:
    """Of two lanes, whose directions differ from the agent's by a cosine of `turn`."""
    at, zeros = np.array(distance, np.float32), np.zeros(2, np.float32)
    no, numbers = zeros > 0.0, np.where(at < FREE, np.arange(2), -1).astype(np.int32)
    lanes = LanesHere(at, at, np.array(turn, np.float32), zeros, numbers, np.array(told, np.float32), no, no, no)
    limit, view = limited(jax.tree.map(jnp.asarray, lanes))
    assert float(limit) == pytest.approx(seen)
    assert view.tolist() == pytest.approx([1.0, seen / 20.0, max(-seen / 4.0, -1.5)])


@jax.jit
def limited(lanes: LanesHere) -> tuple[jax.Array, jax.Array]:
    """The limit that a vehicle which stands knows of, and as it sees it."""
    one, zero = jnp.float32(1.0), jnp.float32(0.0)
    found = on_lanes(lanes, one, zero, (one * 2.0, one), jnp.int32(VEHICLE))
    return found.limit, view_limit(found.limit, zero)
