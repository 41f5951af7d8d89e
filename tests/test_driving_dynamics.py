"""The bicycle against fine numerical integration, and its reverse."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving import dynamics
from longhaul.driving.dynamics import MAX_ACCELERATION, MAX_CURVATURE, MAX_LATERAL, MAX_SPEED, Motion


def integrate(
    x: float, y: float, h: float, v: float, a: float, k: float, dt: float
) -> tuple[float, float, float, float]:
    """The same differential equation in two thousand midpoint steps, float64, with the bounds of the speed."""
    count = 2000
    tick = dt / count
    for _ in range(count):
        middle = min(max(v + a * tick / 2, 0.0), MAX_SPEED)
        turned = h + k * middle * tick / 2
        x, y = x + middle * np.cos(turned) * tick, y + middle * np.sin(turned) * tick
        h, v = h + k * middle * tick, min(max(v + a * tick, 0.0), MAX_SPEED)
    return x, y, h, v


@pytest.mark.parametrize(
    ("speed", "acceleration", "curvature", "dt"),
    [
        (8.0, 2.0, 0.1, 0.1),
        (12.0, -3.0, -0.05, 0.5),
        (0.4, -6.0, 0.3, 0.1),  # comes to rest within the step
        (34.9, 6.0, 0.01, 0.2),  # meets the highest speed within the step
        (0.0, 0.0, 0.3, 0.1),
        (5.0, 1.0, 1e-7, 0.1),
        (10.0, 0.0, 0.3, 1.0),
    ],
)
def test_a_step_solves_the_equation_exactly(speed: float, acceleration: float, curvature: float, dt: float) -> None:
    begin = Motion(*(jnp.float32(v) for v in (3.0, -2.0, 0.7, speed)))
    end = dynamics.advance(begin, jnp.float32(acceleration), jnp.float32(curvature), jnp.float32(dt))
    x, y, h, v = integrate(3.0, -2.0, 0.7, speed, acceleration, curvature, dt)
    np.testing.assert_allclose([end.x, end.y, end.speed], [x, y, v], atol=2e-4)
    assert np.cos(float(end.heading) - h) == pytest.approx(1.0, abs=1e-6)


def test_inversion_gives_back_the_action() -> None:
    rng = np.random.default_rng(0)
    speed = rng.uniform(3.0, 20.0, 300).astype(np.float32)
    begin = Motion(*(jnp.asarray(v, jnp.float32) for v in (*rng.uniform(-3, 3, (3, 300)), speed)))
    acceleration = rng.uniform(-6, 6, 300).astype(np.float32)
    curvature = rng.uniform(-0.3, 0.3, 300).astype(np.float32)
    dt = jnp.float32(0.1)
    end = dynamics.advance(begin, jnp.asarray(acceleration), jnp.asarray(curvature), dt)
    found = dynamics.invert(begin, end, dt)
    np.testing.assert_allclose(found[0], acceleration, atol=1e-3)
    np.testing.assert_allclose(found[1], curvature, atol=1e-4)


def test_actions_stay_within_the_vehicles_bounds() -> None:
    speed = jnp.linspace(0.0, 35.0, 50)
    for corner in ([1.0, 1.0], [-1.0, -1.0], [7.0, -9.0]):
        acceleration, curvature = dynamics.continuous(jnp.broadcast_to(jnp.array(corner), (50, 2)), speed)
        assert float(jnp.abs(acceleration).max()) == MAX_ACCELERATION
        assert float(jnp.abs(curvature).max()) == pytest.approx(MAX_CURVATURE)
        assert float((jnp.abs(curvature) * speed**2).max()) <= MAX_LATERAL * 1.0001
    grid = jnp.stack(jnp.meshgrid(jnp.arange(7), jnp.arange(13), indexing="ij"), -1).reshape(-1, 2)
    acceleration, curvature = dynamics.discrete(grid, jnp.full(91, 4.0))
    assert sorted(set(np.asarray(acceleration).tolist())) == sorted(dynamics.ACCELERATIONS.tolist())
    assert float(acceleration[3 * 13 + 6]) == 0.0
    assert float(curvature[3 * 13 + 6]) == 0.0
    np.testing.assert_allclose(curvature[:13], -curvature[:13][::-1], atol=1e-7)  # as far to the left as to the right


def test_standing_still_lasts() -> None:
    begin = Motion(*(jnp.float32(v) for v in (1.0, 2.0, 0.5, 0.0)))
    end = dynamics.advance(begin, jnp.float32(-6.0), jnp.float32(0.3), jnp.float32(0.1))
    np.testing.assert_allclose(np.asarray(end), np.asarray(begin), atol=1e-6)
