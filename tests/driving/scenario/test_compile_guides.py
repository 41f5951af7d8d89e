"""Routes along given paths and lanes' centres: where they lie, when they are left alone, and that logs reach them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from longhaul.driving.datasets.log import LANE_STREET, Feature, Path
from longhaul.driving.generator.generate import generate
from longhaul.driving.scenario.bank import stack
from longhaul.driving.scenario.compile import compile_log
from longhaul.driving.sim.config import Config
from longhaul.driving.sim.simulator import driving
from tests.helpers.short_logs import ORIGIN, make_log


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
    return compile_log(dataclasses.replace(log, **more), routes=routes)


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
    end = compile_log(onward).route[0, compile_log(onward).route_points[0] - 1]
    assert end[1] > 35.0
    assert compile_log(log).route[0, -1, 1] == pytest.approx(0.0, abs=1e-3)
    other = dataclasses.replace(log, paths=(Path(path, on_route=False),))
    assert compile_log(other).route[0, -1, 1] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.slow
def test_replayed_logs_still_reach_their_goals() -> None:
    """All agents of generated logs, on lanes' centres: nobody misses its goal, and progress is whole."""
    made = [compile_log(generate(seed), agents=8, routes="lanes") for seed in (1, 2)]
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
