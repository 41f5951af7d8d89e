"""BC-SAC: which rows are the expert's is kept, and their likelihood alone joins the actor's loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import registry, sac
from longhaul.algorithms.config import SACConfig
from longhaul.algorithms.context import Context
from longhaul.envs.probes import PROBES
from longhaul.replay import Sizes, Transitions
from longhaul.runtime import mesh as meshes
from longhaul.runtime.settings import replaced
from longhaul.spaces import Box, Discrete
from longhaul.types import Guided, Rollout, Spec, Successors

SPEC: Spec = replace(PROBES["successor"]().environment.spec, action=Box((-1.0, 0.0), (1.0, 4.0)))


def sample(action: Any, weight: Any) -> Transitions:
    n = len(weight)
    nothing: Any = jnp.zeros(n)
    return Transitions(
        nothing, jnp.asarray(action), nothing[None], nothing, nothing, nothing, jnp.asarray(weight), nothing
    )


def test_the_loss_is_the_mean_over_the_experts_rows() -> None:
    """Two of four rows are the expert's, and one of these is nobody's step."""
    batch = sample([[0.1, 1.0], [0.2, 0.0], [0.3, 1.0], [0.4, 1.0]], [1.0, 1.0, 1.0, 0.0])
    rows, told = sac._imitated(SACConfig(imitation=0.5), batch, lambda kept: -10.0 * kept[:, 0])
    np.testing.assert_allclose(rows, 0.5 * np.array([2.0, 0.0, 6.0, 0.0]), rtol=1e-6)
    assert float(jnp.mean(told["imitation_loss"])) == pytest.approx((1.0 + 3.0) / 2)
    assert float(jnp.mean(told["expert"])) == 0.5
    nobody = sample([[0.1, 0.0]] * 4, [1.0] * 4)
    assert float(jnp.sum(sac._imitated(SACConfig(imitation=0.5), nobody, lambda kept: kept[:, 0])[0])) == 0.0
    assert sac._imitated(SACConfig(), batch, lambda kept: kept[:, 0])[1] == {}


def test_what_can_not_work_is_refused() -> None:
    sizes = Sizes(1, 4, 4)
    for changes, word in (
        ({"imitation": -1.0}, "imitation"),
        ({"imitation": 1.0, "expert_share": 0.0}, "expert_share"),
    ):
        with pytest.raises(ValueError, match=word):
            registry.check(replaced(SACConfig(), learning_starts=64, **changes), sizes)
    spec = replace(SPEC, action=Discrete(3))
    with pytest.raises(ValueError, match="--actions continuous"):
        registry.make(spec, SACConfig(imitation=1.0), Context(updates=1, mean=meshes.identity, sizes=sizes))
    assert registry.guidance(SACConfig()) is None
    assert registry.guidance(SACConfig(imitation=0.1, expert_share=0.5)) == 0.5


@pytest.mark.slow
def test_the_expert_is_imitated_from_the_replay_and_others_are_not() -> None:
    """Without rewards, and with an entropy that weighs nothing, only likelihood is left to learn from."""
    columns, steps, updates = 8, 8, 150
    config = replaced(SACConfig(),
        lr=1e-2, imitation=1.0, temperature=0.0, batch_size=64, gradient_steps=4, learning_starts=64, replay_size=256,
        hidden_dim=16, num_layers=1,
    )  # fmt: skip
    sizes = Sizes(1, columns, steps)
    registry.check(config, sizes)
    algorithm = registry.make(SPEC, config, Context(updates=updates, mean=meshes.identity, sizes=sizes))
    place = np.arange(columns * steps).reshape(steps, columns) % 4
    best = np.array([[0.5, 1.0], [-0.8, 3.5], [0.0, 2.0], [0.9, 0.4]], np.float32)
    his = np.arange(columns) < 4
    others = np.broadcast_to(np.float32([-0.9, 3.9]), (steps, columns, 2))
    action = jnp.asarray(np.where(his[:, None], best[place], others))
    seen, never = jnp.eye(4)[place], jnp.zeros((steps, columns), bool)
    extras = Guided((), action, ~never, jnp.broadcast_to(his, (steps, columns)))
    data = Rollout(
        seen, action, jnp.zeros((steps, columns)), ~never, never, ~never, extras, Successors(seen[0], seen[:1]), (),
        jnp.int32(0),
    )  # fmt: skip
    run = jax.jit(
        lambda: jax.lax.scan(
            lambda state, key: algorithm.learn(state, data, key),
            algorithm.init(jax.random.key(0)), jax.random.split(jax.random.key(1), updates),
        )
    )  # fmt: skip
    state, metrics = run()
    found = algorithm.act(algorithm.policy(state), (), jnp.eye(4), None)[0]
    np.testing.assert_allclose(found, best, atol=0.2)
    assert 0.3 < float(metrics["sac/expert"][-1]) < 0.7
    assert float(metrics["sac/imitation_loss"][-1]) < float(metrics["sac/imitation_loss"][0]) - 1.0
