"""Reward weights that differ from driver to driver, and that each driver sees.

As in Gigaflow (arXiv 2502.03349) and PufferDrive: one policy learns many characters, and is asked for one when it is
used. Each agent of each episode draws, for every term of the reward, a number d, uniform in -1 .. 1; its weight is the
configured one times RANGES ** d, so it is log-uniform and the configured weights lie in the middle. The d are what the
agent sees. Gigaflow draws from ranges of its own; these are ours.

Nothing of this is stored: the draws are hashed from the episode's number, a uint32, the agent's slot and the term.
Episode 0 has d = 0 throughout: the configured weights, as evaluations have them.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.sim.config import Weights

RANGES: dict[str, float] = {
    "progress": 2.0,
    "collision": 3.0,
    "offroad": 3.0,
    "red_light": 3.0,
    "goal": 2.0,
    "discomfort": 8.0,
    "haste": 4.0,
    "lateral": 4.0,
    "heading": 4.0,
}
"""Range by term of `Weights`: the factor, up and down, within which its weight is drawn."""


def draws(episode: jax.Array, agents: int) -> jax.Array:
    """float32 [A, len(RANGES)] within -1 .. 1, for the uint32 scalar `episode`."""
    count = agents * len(RANGES)
    number = jnp.arange(1, count + 1, dtype=jnp.uint32) * np.uint32(0x9E3779B9)
    drawn = mix(mix(number ^ episode) + episode) >> 8
    share = drawn.astype(jnp.float32) * np.float32(2.0**-23) - 1.0
    return jnp.where(episode == 0, 0.0, share).reshape(agents, len(RANGES))


def mix(bits: jax.Array) -> jax.Array:
    """uint32 -> uint32, a bijection in which each bit of the input moves half of the output (the finaliser of
    Appleby's MurmurHash3)."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def weigh(weights: Weights, drawn: jax.Array) -> Weights:
    """The weights of agents, arrays [A], given their draws [A, len(RANGES)]; terms without a range stay numbers."""
    terms = {
        name: getattr(weights, name) * jnp.exp(np.log(factor) * drawn[:, i])
        for i, (name, factor) in enumerate(RANGES.items())
    }
    return replace(weights, **terms)
