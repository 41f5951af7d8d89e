"""A torso of the user's own: every algorithm takes it, leading axes are free, and what keeps not the form is named."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import registry
from longhaul.algorithms.config import AlgorithmConfig, DQNConfig, PPOConfig, SACConfig
from longhaul.networks import actor_critic
from longhaul.networks.config import NetworkConfig
from longhaul.runtime import config_fields
from longhaul.types import Box, Discrete, Spec
from tests.helpers.quick import quick

HERE = "tests.networks.test_user_network"


def network(observation: Any, width: int) -> Any:
    def init(key: jax.Array) -> Any:
        return {"kernel": jax.random.normal(key, (*observation.shape, width))}

    def apply(params: Any, seen: jax.Array) -> jax.Array:
        assert seen.ndim == 2
        return jnp.tanh(seen @ params["kernel"])

    return init, apply


def joined(observation: Any, width: int) -> Any:
    """The same for what has several parts, as the critic of SAC looks at (observation, action)."""
    size = sum(leaf.shape[-1] for leaf in jax.tree.leaves(observation))
    init, apply = network(jax.ShapeDtypeStruct((size,), jnp.float32), width)
    return init, lambda params, seen: apply(params, jnp.concatenate(jax.tree.leaves(seen), axis=-1))


def narrow(observation: Any, width: int) -> Any:
    return network(observation, width - 1)


def alone(observation: Any, width: int) -> Any:
    return network(observation, width)[0]


def failing(observation: Any, width: int) -> Any:
    def init(key: jax.Array) -> Any:
        raise RuntimeError("no weights\nare here")

    return init, init


SEEN = jax.ShapeDtypeStruct((3,), jnp.float32)


@pytest.mark.parametrize("memory", [0, 4])
def test_actor_and_critic_share_it_and_leading_axes_are_free(memory: int) -> None:
    made = actor_critic.actor_critic(SEEN, 2, torso=f"{HERE}:network", sizes=(8,), memory=memory)
    params, apply = quick(made.init)(jax.random.key(0)), quick(made.apply)
    assert params["torso"]["encoder"]["kernel"].shape == (3, 8) and "actor" not in params
    seen = jnp.arange(30.0).reshape(5, 2, 3)
    if memory:
        logits, value, carried = apply(params, made.memory(2), seen[0])
        assert (logits.shape, value.shape, carried.shape) == ((2, 2), (2,), (2, memory))
        return
    logits, value, _ = apply(params, (), seen)
    assert (logits.shape, value.shape) == ((5, 2, 2), (5, 2))
    features = np.tanh(np.asarray(seen) @ np.asarray(params["torso"]["encoder"]["kernel"]))
    expected = features @ np.asarray(params["policy"]["kernel"]) + np.asarray(params["policy"]["bias"])
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "action"), [(PPOConfig(), Discrete(2)), (DQNConfig(), Discrete(2)), (SACConfig(), Box((-1.0,), (1.0,)))]
)
def test_every_kind_of_algorithm_takes_it(config: AlgorithmConfig, action: Any) -> None:
    spec = Spec(SEEN, action, max_steps=5)
    own = config_fields.replaced(config, torso=f"{HERE}:joined", hidden_dim=8)
    config_fields.check(own)
    made = registry.network(spec, own)
    shapes = jax.eval_shape(made.init, jax.random.key(0))
    assert any("encoder" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(shapes))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("narrow", r"of 2 observations the features are float32\[2, 7\]; they must be float32\[2, 8\]"),
        ("alone", r"it must take \(observation, width\) and return \(init, apply\)"),
        ("failing", "can't be traced by JAX: RuntimeError: no weights"),
        ("nothing", "has no nothing; it has .*narrow"),
    ],
)
def test_a_network_of_another_form_is_one_line(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"--torso {HERE}:{name}.*{says}") as caught:
        actor_critic.actor_critic(SEEN, 2, torso=f"{HERE}:{name}", sizes=(8,))
    assert "\n" not in str(caught.value)


def test_another_word_is_still_no_torso() -> None:
    with pytest.raises(ValueError, match="torso is 'mlq'"):
        config_fields.check(NetworkConfig(torso="mlq"))
    with pytest.raises(ValueError, match="torso is 'mlq'; it must be one of mlp"):
        actor_critic.actor_critic(SEEN, 2, torso="mlq")
