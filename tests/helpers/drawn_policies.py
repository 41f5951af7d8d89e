"""Policies with parameters drawn at random: what is not about learning needs no run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from longhaul.algorithms import registry
from longhaul.algorithms.run_context import RunContext
from longhaul.config import recipes
from longhaul.config.resolve import changed, resolve
from longhaul.config.run import Named
from longhaul.runtime.mesh import identity
from longhaul.training import api
from longhaul.training.data import spec


def drawn(recipe: str, env: str | None = None, **settings: Any) -> api.Policy:
    """The policy of a recipe with parameters drawn at random, in another environment if that is named."""
    made = changed(recipes.recipe(recipe), settings)
    run = resolve(dataclasses.replace(made, environment=Named(env)) if env else made)
    algorithm = registry.make(spec(run), run.algorithm, RunContext(updates=1, mean=identity))
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: draw.normal(size=x.shape, scale=0.2).astype(np.float32) if x.dtype == np.float32 else x,
        jax.eval_shape(lambda key: algorithm.policy(algorithm.init(key)), jax.random.key(0)),
    )
    return api.Policy(run, params)
