"""The law of the Intelligent Driver Model; its driver is tested on whole trips in test_simulator.py."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.sim import idm


def test_idm_balances_at_its_own_gap_and_speed() -> None:
    speed, desired = 10.0, 15.0
    # the equilibrium gap of the paper: (s0 + vT) / sqrt(1 - (v / v0)^4)
    gap = (idm.STANDSTILL + speed * idm.HEADWAY) / np.sqrt(1 - (speed / desired) ** 4)
    hindrance = idm.interaction(jnp.float32(speed), jnp.float32(gap), jnp.float32(speed))
    assert float(idm.acceleration(jnp.float32(speed), jnp.float32(desired), hindrance)) == pytest.approx(0.0, abs=1e-5)
    free = idm.acceleration(jnp.array([0.0, desired]), jnp.full(2, desired), jnp.zeros(2))
    np.testing.assert_allclose(free, [idm.ACCELERATION, 0.0], atol=1e-6)


def test_a_bend_is_met_at_its_speed_and_reached_by_braking() -> None:
    radius, away = 20.0, 30
    offsets = np.arange(60, dtype=np.float32)
    headings = np.maximum(offsets - away, 0.0) / radius
    expected = np.sqrt(idm.BEND * radius + idm.BRAKING * away)
    found = float(idm.bend_speed(jnp.asarray(headings), 1.0, offsets))
    # the bend begins within the span over which a turn is measured
    assert found == pytest.approx(expected, rel=0.1)
    assert float(idm.bend_speed(jnp.zeros(60), 1.0, offsets)) > 40.0
