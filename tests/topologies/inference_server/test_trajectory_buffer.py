"""Trajectory buffer: sums over episodes are those that counting step by step gives."""

from __future__ import annotations

import numpy as np

from longhaul.topologies.inference_server.trajectory_buffer import count_episodes, fresh


def test_episodes_that_end_within_a_trajectory_count_as_step_by_step() -> None:
    rng = np.random.default_rng(0)
    steps, columns, told = 9, 40, [0.0, 0.0, 0.0]
    now, earned, length = fresh(columns), np.zeros(columns), np.zeros(columns, int)
    for _ in range(6):
        reward = rng.integers(-3, 4, (steps, columns)).astype(np.float32)
        valid = rng.random((steps, columns)) < 0.8
        over = (rng.random((steps, columns)) < 0.1) & valid
        reward[~valid] = np.nan  # means nothing
        wanted = [0.0, 0.0, 0.0]
        for t in range(steps):
            earned[valid[t]] += reward[t, valid[t]]
            length += valid[t]
            wanted = [wanted[0] + over[t].sum(), wanted[1] + earned[over[t]].sum(), wanted[2] + length[over[t]].sum()]
            earned[over[t]], length[over[t]] = 0.0, 0
        found, now = count_episodes(now, reward, over, valid)
        assert list(found) == wanted
        np.testing.assert_array_equal(now.earned, earned)
        np.testing.assert_array_equal(now.length, length)
        told = [a + b for a, b in zip(told, wanted, strict=True)]
    assert told[0] > 50
