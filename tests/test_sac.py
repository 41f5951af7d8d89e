"""SAC on the probes: known values, true successors, many devices, and its place in a run."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import mesh as meshes
from longhaul.algorithms import sac
from longhaul.environment import vectorise
from longhaul.envs.probes import PROBES, Probe
from longhaul.replay import Sizes
from longhaul.rollout import collector, play, starts
from longhaul.topologies import fused
from longhaul.types import Algorithm, Box, Key, TimeStep

UPDATES, WORLDS, STEPS = 120, 16, 8


@dataclass(frozen=True)
class Steered:
    """A probe whose actions do not matter, with a vector for its action."""

    inner: Any

    @property
    def spec(self) -> Any:
        return replace(self.inner.spec, action=Box((-1.0,), (3.0,)))

    def reset(self, key: Key) -> Any:
        return self.inner.reset(key)

    def step(self, key: Key, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        return self.inner.step(key, state, jnp.zeros(action.shape[:-1], jnp.int32))

    def active(self, state: Any) -> jax.Array:
        return self.inner.active(state)

    def metrics(self, state: Any) -> dict:
        return {}


def steered(probe: Probe) -> Probe:
    return replace(probe, environment=Steered(probe.environment))


def config(probe: Probe, **changes: Any) -> sac.Config:
    settings: dict[str, Any] = {
        "lr": 1e-2, "gamma": probe.gamma, "tau": 0.1, "temperature": 0.0, "batch_size": 128, "gradient_steps": 8,
        "learning_starts": 3 * WORLDS * STEPS, "replay_size": 4096, "hidden_dim": 32, "num_layers": 1,
    }  # fmt: skip
    return sac.Config(**(settings | changes))


def trained(probe: Probe, settings: sac.Config, devices: int = 1, wrong: Any = None) -> tuple[Any, Algorithm, Any]:
    """(the last state, the algorithm, metrics of the last updates); `wrong` changes what is learnt from."""
    mesh = meshes.make_mesh(devices)
    sizes = Sizes(devices, WORLDS // devices * (probe.environment.spec.agents or 1), STEPS)
    sac.check(settings, shards=devices, columns=sizes.columns, steps=STEPS)
    made = sac.sac(probe.environment.spec, settings, updates=UPDATES, mean=meshes.mean_over_data, sizes=sizes)
    algorithm = made if wrong is None else made._replace(learn=lambda s, data, key: made.learn(s, wrong(data), key))
    collect = collector(vectorise(probe.environment, WORLDS // devices), algorithm.act, algorithm.memory, steps=STEPS)
    progress = fused.start(algorithm, fused.entering(lambda _: collect, mesh), (), jax.random.key(0), mesh)
    program = fused.compiled(algorithm, lambda _: collect, progress, (), mesh, block=UPDATES)
    for progress, _, metrics in fused.fused(program, progress, (), updates=UPDATES, block=UPDATES):
        pass
    assert np.all(jax.device_get(metrics["finite"]))
    return jax.device_get(progress.state), algorithm, jax.device_get(metrics)


def check(probe: Probe, settings: sac.Config, state: Any, algorithm: Algorithm) -> None:
    observations, expected = zip(*probe.value, strict=True)
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *observations)
    found = sac.critic(probe.environment.spec, settings)(state, batch)
    np.testing.assert_allclose(found, expected, atol=0.05 * max(1.0, *map(abs, expected)))
    if probe.policy is not None:
        environment = probe.environment
        begun = starts(environment, jax.random.key(1), 64)
        player = play(environment, algorithm.act, algorithm.memory, steps=environment.spec.max_steps)
        episodes, _ = player(algorithm.policy(state), begun, None, jax.random.key(2))
        score = np.asarray(episodes.scores["return"].value)[np.asarray(episodes.valid)]
        assert abs(score.mean() - probe.best_return) <= 0.05 * max(1.0, abs(probe.best_return))


CHOICES = ["constant", "time_limit", "terminal_reward", "two_step", "action", "masked", "successor", "agents"]


@pytest.mark.parametrize("name", CHOICES)
def test_choices_have_their_known_values(name: str) -> None:
    probe = PROBES[name]()
    settings = config(probe)
    state, algorithm, _ = trained(probe, settings)
    check(probe, settings, state, algorithm)
