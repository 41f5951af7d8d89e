"""A network of one's own: layer-normalised, with skips, under PPO's heads. Run: python examples/own_network.py"""

import jax
import jax.numpy as jnp

import longhaul

LAYERS = 2


def network(observation, width):
    """Torso for one observation, a jax.ShapeDtypeStruct: (init, apply), which gives features [B, width]."""

    def init(key):
        first, *rest = jax.random.split(key, 1 + LAYERS)
        scaled = jax.nn.initializers.orthogonal(2**0.5)
        size = observation.size
        return {"in": scaled(first, (size, width)), "layers": jnp.stack([scaled(key, (width, width)) for key in rest])}

    def apply(params, observed):  # [B, *shape]
        features = observed.reshape(len(observed), -1) @ params["in"]
        for kernel in params["layers"]:
            features = features + jax.nn.relu(normalised(features) @ kernel)
        return normalised(features)

    return init, apply


def normalised(x):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


if __name__ == "__main__":  # by the module's name, so that a later process finds it again from this folder
    result = longhaul.train("cartpole", torso="own_network:network", hidden_dim=32, total_steps=200_000)
    print(result.evaluation["trained"])
