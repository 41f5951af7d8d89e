"""Evasion: who is believed not to react, who is not, and what agents do about them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.scenario.scenario import RED
from longhaul.driving.sim import evasion
from tests.driving.sim.test_safety import CHECKED, SPEED, T, both
from tests.helpers.driving_scenarios import DT, line, scenario, trip

STANDS = line((0, 0), (0, 0), T)


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


def test_only_where_is_the_function_where_it_is_needed_and_the_default_elsewhere() -> None:
    def function(agent: jax.Array, world: jax.Array, shared: jax.Array) -> jax.Array:
        return agent * world + shared.sum()

    some = evasion.only_where(function)
    key = jax.random.key(0)
    agents, world = jax.random.normal(key, (3, 5, 7)), jnp.arange(15.0).reshape(3, 5)
    shared = jnp.arange(4.0)
    for share in (0.0, 0.3, 1.0):
        needed = jax.random.uniform(jax.random.key(1), (3, 5, 7)) < share
        default = jnp.full((3, 5, 7), -1.0)
        found = jax.jit(jax.vmap(jax.vmap(some, (0, 0, 0, 0, None)), (0, 0, 0, 0, None)))(
            needed, default, agents, world, shared
        )
        np.testing.assert_allclose(found, jnp.where(needed, agents * world[..., None] + 6.0, default), rtol=1e-6)
