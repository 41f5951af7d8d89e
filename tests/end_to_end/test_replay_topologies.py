"""Learners with a replay where others act: through `actors` they end as fused does, and find the known values; through
`central` they find them, too."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import registry
from longhaul.algorithms.config import OffPolicy
from longhaul.algorithms.run_context import RunContext
from longhaul.environment import vectorise
from longhaul.envs.host.jax_vector import JaxVector, Programs
from longhaul.envs.probes import PROBES, Probe
from longhaul.replay import Sizes
from longhaul.rollout import collector, join
from longhaul.runtime import mesh as meshes
from longhaul.topologies import fused
from longhaul.topologies.actor_learner import learner
from longhaul.topologies.actor_learner.actor_pool import ActorPool
from longhaul.topologies.staleness import Rule
from longhaul.types import Algorithm
from tests.algorithms import test_dqn, test_sac, test_td3
from tests.algorithms.test_sac import STEPS, UPDATES, WORLDS, steered
from tests.helpers import inference_server_runs
from tests.helpers.inference_server_runs import site
from tests.topologies.inference_server.test_server import serve

COUNT = 2
"""Of actors."""


def made(probe: Probe, settings: OffPolicy, devices: int, *, alone: bool = False) -> Algorithm:
    sizes = Sizes(devices, WORLDS // devices * (probe.environment.spec.agents or 1), STEPS)
    registry.check(settings, sizes)
    mean = meshes.identity if alone else meshes.mean_over_data
    return registry.make(probe.environment.spec, settings, RunContext(updates=UPDATES, mean=mean, sizes=sizes))


def collecting(probe: Probe, algorithm: Algorithm, worlds: int) -> fused.CollectorIn:
    collect = collector(vectorise(probe.environment, worlds), algorithm.act, algorithm.memory, steps=STEPS)
    return lambda context: collect


def by_actors(
    probe: Probe, settings: OffPolicy, bound: int | None, *, devices: int = 1, updates: int = UPDATES
) -> tuple[Any, Algorithm, list[Any]]:
    """(the last state, the algorithm, metrics of each update) of two actors in threads."""
    algorithm, mesh = made(probe, settings, devices), meshes.make_mesh(devices)
    collector_in = collecting(probe, algorithm, WORLDS // COUNT)
    begun = fused.start(algorithm, learner.entering(collector_in, COUNT), (), jax.random.key(0), mesh)
    does = learner.acting(collector_in, jax.eval_shape(algorithm.policy, begun.state))
    update = learner.compiled(algorithm, does, join, begun, mesh, actors=COUNT)
    rows = []
    rule = Rule(COUNT, bound, until=updates)
    with closing(ActorPool(rule, does.shapes, lambda actor: does.collect, kind="thread")) as crew:
        weights = learner.weights_of(algorithm, mesh)
        for progress, _, row in learner.actors(update, mesh, crew, begun, weights, updates=updates):
            rows.append(jax.device_get(row))
        state = jax.device_get(progress.state)
    return state, algorithm, rows


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_without_staleness_it_is_fused_bit_for_bit() -> None:
    """Parameters, targets, moments, both rings and what of them is sampled first."""
    probe, updates = steered(PROBES["successor"]()), 12
    settings = test_sac.config(probe, priority_exponent=0.6, temperature=None)
    state, _, rows = by_actors(probe, settings, 0, devices=2, updates=updates)
    algorithm, mesh = made(probe, settings, 2), meshes.make_mesh(2)
    collector_in = collecting(probe, algorithm, WORLDS // 2)
    progress = fused.start(algorithm, fused.entering(collector_in, mesh), (), jax.random.key(0), mesh)
    program = fused.compiled(algorithm, collector_in, progress, (), mesh, block=updates)
    progress, told = program(progress, (), jnp.int32(updates))
    jax.tree.map(np.testing.assert_array_equal, state, jax.device_get(progress.state))
    for name, values in jax.device_get(told).items():
        np.testing.assert_array_equal([row[name][0] for row in rows], values, err_msg=name)
    assert rows[-1]["sac/value_loss"][0] > 0.0


SETTINGS = {"sac": test_sac.config, "dqn": test_dqn.config, "td3": test_td3.config}

BY_ACTORS = [
    ("dqn", "successor", 1), ("dqn", "time_limit", None), ("dqn", "agents", 2), ("sac", "successor", 1),
    ("sac", "time_limit", None), ("sac", "masked", 2), ("sac", "agents", 1), ("td3", "successor", 2),
    ("td3", "time_limit", 1),
]  # fmt: skip


def probed(name: str, probe: str) -> Probe:
    """The probe as the learner can take it: TD3 needs a vector."""
    return steered(PROBES[probe]()) if name == "td3" else PROBES[probe]()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "probe", "bound"), BY_ACTORS)
def test_actors_behind_the_learner_lead_to_the_known_values(name: str, probe: str, bound: int | None) -> None:
    there = probed(name, probe)
    settings = SETTINGS[name](there)
    state, algorithm, rows = by_actors(there, settings, bound)
    assert max(row["actors/staleness_max"][0] for row in rows) <= (bound or 10**6)
    test_sac.check(there, settings, state, algorithm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "probe", "lane", "staleness"),
    [("sac", "successor", "shm", 0), ("dqn", "time_limit", "grpc", 1), ("td3", "successor", "shm", None)],
)
def test_central_inference_leads_to_the_known_values(
    name: str, probe: str, lane: str, staleness: int | None
) -> None:  # fmt: skip
    """Without a bound a column is one group's now and another's then: the replay must not make one step of both."""
    there = probed(name, probe)
    settings, environment = SETTINGS[name](there), there.environment
    algorithm = made(there, settings, 1, alone=True)
    learn = jax.jit(algorithm.learn, donate_argnums=0)
    sizes = inference_server_runs.Sizes(2, 2, WORLDS // 4, STEPS, staleness)
    state, programs = jax.jit(algorithm.init)(jax.random.key(0)), Programs(environment, sizes.worlds)
    with site(algorithm, environment.spec, lambda a, s: JaxVector(programs), sizes, lane=lane) as here:
        for update in range(UPDATES):
            serve(here)
            data, _, _ = here.server.gather()
            state, _ = learn(state, data, jax.random.key(update))
            # What acts must outlive the state, which the next update takes.
            policy = jax.block_until_ready(jax.tree.map(jnp.copy, algorithm.policy(state)))
            here.server.learnt(policy)
    test_sac.check(there, settings, jax.device_get(state), algorithm)
