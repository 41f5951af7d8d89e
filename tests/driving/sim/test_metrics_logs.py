"""Metrics of whole episodes of real logs, against the slow reference."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.datasets.log import LANE_BIKE, Log
from longhaul.driving.scenario.bank import stack
from longhaul.driving.scenario.compile import compile_log
from longhaul.driving.scenario.lane_graph import BLOCK
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.sim.config import Config
from longhaul.driving.sim.simulator import Simulator, State, driving
from tests.helpers import reference_driving_metrics as reference
from tests.helpers.measured_drives import ON_LANES, compare, lane_of, world_of

DATA = Path(os.environ.get("LONGHAUL_DATA", Path(__file__).resolve().parents[3] / "../shared/data"))


def shared_logs() -> list[Log]:
    from longhaul.driving.datasets import readers

    names = {"womd": "*.tfrecord", "gpudrive": "*.json", "scenarionet": "*.pkl"}
    found = [str(path) for folder, name in names.items() for path in sorted((DATA / folder).glob(name))]
    if not found:
        pytest.skip("the shared logs are not here")
    return [log for path in readers.expand(found) for log in readers.read(path)]


def drive_all(environment: Simulator, seed: int) -> tuple[Any, Any, Any]:
    """Every scenario of a bank to the end of the longest: -> states' motion and playing [S, T+1, ...] and metrics by
    step [S, T, ...]."""
    steps = environment.spec.max_steps
    shape = (environment.scenarios, steps, environment.config.agents, 2)
    rng = np.random.default_rng(seed)  # actions that are held for half a second, mostly gentle
    gentle = np.stack([rng.choice([2, 3, 4, 5], shape[:3]), rng.choice([4, 5, 6, 6, 7, 8], shape[:3])], -1)
    plan = np.repeat(gentle[:, ::5], 5, axis=1)[:, :steps].astype(np.int32)

    def one(index: jax.Array, actions: jax.Array) -> Any:
        state, _ = environment.start(index)

        def body(state: State, action: jax.Array) -> Any:
            after, _ = environment.step(jax.random.key(0), state, action)
            return after, (after.motion, environment.active(state), environment.metrics(after))

        motion, playing, metrics = jax.lax.scan(body, state, actions)[1]
        whole = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), state.motion, motion)
        return whole, playing, metrics

    return jax.device_get(jax.jit(jax.vmap(one))(jnp.arange(environment.scenarios), plan))


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["log", "constant", "policy"])
def test_real_logs_agree_with_the_reference(driver: str) -> None:
    logs, agents = shared_logs(), 2
    scenarios = [compile_log(log, agents=agents) for log in logs]
    environment = driving(stack(scenarios, agents=agents), Config(agents=agents, driver=driver, terminations=()))
    motion, playing, metrics = drive_all(environment, 5)
    compared = vague = inside = 0
    for i, (log, made) in enumerate(zip(logs, scenarios, strict=True)):
        lanes = lanes_of(log, made)
        moved = np.stack([np.asarray(part[i])[: made.steps] for part in motion], -1)
        there = np.concatenate([playing[i][: made.steps - 1], playing[i][made.steps - 2 : made.steps - 1]])
        for agent in np.flatnonzero(made.controlled >= 0):
            found = {
                name: (float(m.value[i, made.steps - 2, agent]), bool(m.valid[i, made.steps - 2, agent]))
                for name, m in metrics.items()
            }
            world = world_of(made, moved, int(agent), lanes, there, driver == "log")
            mapped = is_mapped(made, moved[:, agent, :2])
            vague += compare(found, world, f"{made.id}, agent {agent}, {driver}", mapped)
            compared += len(found) - len(ON_LANES) * (not mapped)
            inside += mapped
    assert compared > 20 * len(logs)
    assert inside >= len(logs) / 2
    assert vague < 0.02 * compared, "thresholds are met too often to say that verdicts agree"


def is_mapped(made: Scenario, place: np.ndarray) -> bool:
    """Whether all places [T, 2] are in blocks of the scenario's own: some 8 m around its routes."""
    blocks = np.floor((place - made.road.corner) / BLOCK).astype(int)
    return {tuple(block) for block in blocks.tolist()} <= {tuple(cell) for cell in made.road.cells.tolist()}


def lanes_of(log: Log, made: Scenario) -> list[reference.Lane]:
    """The lanes of a log on the ego's level, relative to its scenario's origin."""
    origin = log.tracks.position[log.sdc, log.current]
    height = log.tracks.position[log.sdc, log.current : log.current + made.steps, 2]
    features = [f for f in log.features if f.kind <= LANE_BIKE and len(f.points) > 1]
    level = [f for f in features if np.abs(f.points[:, 2, None] - height[None]).min() < 4.0]
    return [lane_of(f, origin) for f in level]
