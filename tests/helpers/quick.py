"""Compilation without optimisation, for programs that run once or are small: compiling takes longer than running."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from longhaul.reasoning import transformer
from longhaul.reasoning.config import ModelConfig

QUICK = {"xla_backend_optimization_level": 0}


def quick(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` with these options, without optimisation."""
    return jax.jit(function, compiler_options=QUICK, **options)


def zeros(function: Callable[..., Any], *arguments: Any) -> Any:
    """Zeros of the shapes of function(*arguments), which is not compiled."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *arguments))


def language_model(config: ModelConfig, seed: int = 0) -> transformer.Params:
    """Initial parameters by one program; `transformer.init` by itself compiles one for each of its operations."""
    return quick(functools.partial(transformer.init, config=config))(jax.random.key(seed))
