"""DQN on the probes, each of its parts on and off, and what it refuses."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from longhaul.algorithms import dqn
from longhaul.algorithms.config import DQNConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.environment import vectorise
from longhaul.envs.probes import PROBES, Probe
from longhaul.replay import Sizes
from longhaul.rollout import collector
from longhaul.runtime.config_fields import replaced
from longhaul.spaces import Masked
from tests.algorithms.test_sac import SMALL, STEPS, UPDATES, WORLDS, learnt, steered
from tests.helpers.quick import quick, zeros

SIMPLE: dict[str, Any] = {"double": False, "duelling": False, "n_step": 1, "priority_exponent": None}


def config(probe: Probe, **changes: Any) -> DQNConfig:
    return replaced(DQNConfig(), gamma=probe.gamma, **(SMALL | changes))


def told(probe: Probe) -> Probe:
    """The masked probe with an observation that tells its places apart.

    As it is, only the mask does, which no value sees. The choice that is right where it is alone is then worth as much
    as the right ones elsewhere, is taken there, too, as soon as its value is the greater, and is unlearnt again:
    measured without any exploration, a learner of values goes round so, and its last value there was 0.95.
    """
    world: Any = probe.environment
    eye = np.eye(3, dtype=np.float32)
    seen = Masked(eye, world.observation.mask)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), seen)
    world = replace(world, observation=seen, spec=replace(world.spec, observation=shapes))

    def pairs(known: Any) -> Any:
        return tuple((Masked(eye[i], place.mask), what) for i, (place, what) in enumerate(known))

    return replace(probe, environment=world, value=pairs(probe.value), policy=pairs(probe.policy))


CELLS = [
    *(pytest.param(name, {}, marks=pytest.mark.slow) for name in
      ("constant", "terminal_reward", "two_step", "action", "agents")),
    pytest.param("masked", {}, marks=pytest.mark.slow),
    ("successor", {"replay_precision": "bf16"}),
    # Not with XLA's older emitters of fusions (QUICK_COMPILE of conftest.py): they take 24 GB and more for it.
    pytest.param("time_limit", {"replay_precision": "bf16"}, marks=pytest.mark.slow),
    *(pytest.param(name, SIMPLE, marks=pytest.mark.slow) for name in ("masked", "successor", "agents")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), CELLS)
def test_choices_have_their_known_values(name: str, changes: dict[str, Any]) -> None:
    probe = told(PROBES[name]()) if name == "masked" else PROBES[name]()
    learnt(probe, config(probe, **changes))


@pytest.mark.slow
def test_many_devices_learn_the_same_policy() -> None:
    probe = PROBES["agents"]()
    learnt(probe, config(probe), devices=4)


def test_exploration_falls_and_what_is_told_acts_by_it() -> None:
    probe = PROBES["masked"]()
    settings = config(probe, epsilon=0.9, epsilon_final=0.2, exploration=0.5)
    algorithm = dqn.dqn(probe.environment.spec, settings, RunContext(updates=UPDATES, mean=lambda x: x))
    state = zeros(algorithm.init, jax.random.key(0))
    # Without a replay nothing is in it: what is random says the cursor alone.
    ready = state._replace(cursor=state.cursor._replace(filled=np.int32(10**6)))
    shares = [float(algorithm.policy(ready._replace(updates=np.int32(n))).random) for n in (0, 30, 60, 120)]
    np.testing.assert_allclose(shares, [0.9, 0.55, 0.2, 0.2], rtol=1e-6)
    assert float(algorithm.policy(state).random) == 1.0


@pytest.mark.slow
def test_the_rate_falls_to_nothing_at_the_last_update_that_int32_counts() -> None:
    """Adam's first step is as long as the rate, and there are more steps of the optimiser than int32 counts."""
    probe, last = PROBES["constant"](), 2**31 - 1
    settings = config(probe, **SIMPLE, gradient_steps=2, learning_starts=WORLDS * STEPS)
    context = RunContext(updates=last, mean=lambda x: x, sizes=Sizes(1, WORLDS, STEPS))
    algorithm = dqn.dqn(probe.environment.spec, settings, context)
    collect = collector(vectorise(probe.environment, WORLDS), algorithm.act, algorithm.memory, steps=STEPS)

    def learn(state: Any, key: Any) -> Any:
        _, data, _ = collect.collect(algorithm.policy(state), collect.start(key), key, state.updates)
        return algorithm.learn(state, data, key)[0].params

    state, program = quick(algorithm.init)(jax.random.key(0)), quick(learn)

    def moved(updates: int) -> float:
        after = program(state._replace(updates=np.int32(updates)), jax.random.key(1))
        return max(float(abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (after, state.params)), strict=True))

    begun, half, ended = map(moved, (0, last // 2, last))
    assert begun == pytest.approx(2 * settings.lr, rel=0.1)
    assert half == pytest.approx(begun / 2, rel=1e-3) and ended == 0.0


def test_a_vector_is_refused() -> None:
    probe = steered(PROBES["constant"]())
    with pytest.raises(ValueError, match="DQN learns one choice"):
        dqn.dqn(probe.environment.spec, config(probe), RunContext(updates=1, mean=lambda x: x))
