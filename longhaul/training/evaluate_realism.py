"""Realism of a policy's driving: repeated simulations of each scenario against its log (`evaluation.realism`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import rollout
from longhaul.driving.evaluation.realism import realism
from longhaul.spaces import Measure
from longhaul.training.evaluate import Scores
from longhaul.training.evaluate_driving import Drives
from longhaul.types import Params

ROLLOUTS = 32
"""Rollouts of a scenario, the number of the Waymo Open Sim Agents Challenge."""


class Rollouts(NamedTuple):
    """R simulations of one scenario, [R, T, N, ...] from its first frame on."""

    pose: np.ndarray  # float32 [R, T, N, 3]
    present: np.ndarray  # bool [R, T, N]


def simulate(drives: Drives, policy: Params | None, driver: str, count: int) -> Callable[[int], Rollouts]:
    """Function from a scenario's number to `count` rollouts of it; compiles once.

    The policy's actions are samples. Nothing ends before the log, since realism needs whole rollouts. A deterministic
    driver ("idm", "log", "constant") drives once, and the rollouts are copies.
    """
    if count < 1:
        raise ValueError(f"rollouts is {count}; realism needs at least 1")
    environment = drives.simulator(driver, terminations=())
    act, memory = drives.actor(environment, driver)
    steps = environment.spec.max_steps
    assert steps is not None
    worlds = count if driver == "policy" else 1

    def observe(state: Any) -> Any:
        frame = jax.vmap(environment.frame)(state)
        return frame.pose, frame.present

    through = rollout.play(environment, act, memory, steps=steps, observe=observe)

    @jax.jit
    def program(params: Params | None, which: jax.Array, key: jax.Array) -> Any:
        starts = jax.vmap(environment.start)(jnp.broadcast_to(which, (worlds,)))
        return through(params, starts, key if driver == "policy" else None, key)[1]

    def play(which: int) -> Rollouts:
        scenario = drives.scenarios[which]
        frames = jax.device_get(program(policy, jnp.int32(which), jax.random.fold_in(jax.random.key(2), which)))
        objects = scenario.kind.shape[0]
        pose, present = (np.swapaxes(leaf[: scenario.steps, :, :objects], 0, 1) for leaf in frames)
        copies = count // worlds
        return Rollouts(np.repeat(pose, copies, 0), np.repeat(present, copies, 0))

    return play


def score(drives: Drives, policy: Params | None, driver: str, count: int = ROLLOUTS) -> Scores:
    """Realism of each scenario, a row each; metrics have the names of `realism.realism`."""
    play = simulate(drives, policy, driver, count)
    rows = [realism(scenario, *play(i)) for i, scenario in enumerate(drives.scenarios)]
    metrics = {
        name: Measure(np.array([row[name].value for row in rows], float), np.array([row[name].valid for row in rows]))
        for name in rows[0]
    }
    return Scores(metrics, [scenario.id for scenario in drives.scenarios], np.arange(len(rows)))
