"""TD3 on the probes that take a vector, and how often its actor steps."""

from typing import Any

import jax
import optax
import pytest

from longhaul.algorithms import registry, td3
from longhaul.algorithms.config import TD3Config
from longhaul.algorithms.run_context import RunContext
from longhaul.envs.probes import PROBES, Probe
from longhaul.replay import Sizes
from longhaul.runtime.config_fields import replaced
from tests.algorithms.test_sac import SMALL, STEPS, UPDATES, learnt, steered


def config(probe: Probe, **changes: Any) -> TD3Config:
    return replaced(TD3Config(), gamma=probe.gamma, **(SMALL | {"target_noise": 0.1} | changes))


@pytest.mark.slow
def test_a_vector_is_aimed_and_its_actor_steps_half_as_often() -> None:
    probe = PROBES["continuous"]()
    state, _ = learnt(probe, config(probe))

    def is_adam(part: Any) -> bool:
        return isinstance(part, optax.ScaleByAdamState)

    steps = {
        name: int(adam.count)
        for name, part in state.opt_state.items()
        for adam in filter(is_adam, jax.tree.leaves(part, is_leaf=is_adam))
    }
    assert 8 * (UPDATES - 3) <= steps["critics"] == 2 * steps["actor"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["successor", "time_limit"])
def test_it_bootstraps_from_the_true_successor(name: str) -> None:
    probe = steered(PROBES[name]())
    learnt(probe, config(probe))


def test_settings_out_of_bounds_and_choices_are_refused() -> None:
    for changes, word in (({"actor_interval": 9}, "actor_interval"), ({"noise": -1.0}, "noise")):
        with pytest.raises(ValueError, match=word):
            registry.check(config(PROBES["continuous"](), **changes), Sizes(1, 8, STEPS))
    probe = PROBES["action"]()
    with pytest.raises(ValueError, match="TD3 learns a vector"):
        td3.td3(probe.environment.spec, config(probe), RunContext(updates=1, mean=lambda x: x))
