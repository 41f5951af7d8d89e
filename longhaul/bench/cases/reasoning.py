"""Benchmark of reasoning: tokens that a small language model samples, and those that it learns from.

transformers does the same under its own Python, with a model of the same sizes: `generate` of the same rows, prompts
and new tokens, of which none ends early on either side; and a training step of torch, with the same loss, logits of the
new tokens alone, a gradient cut to the same norm, and Adam. Weights are random, as is what they write.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import prng
from longhaul.algorithms import grpo
from longhaul.algorithms.config import GRPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.bench.cases.training import Prepared
from longhaul.reasoning import sampler, tokenizer, transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import prepare_devices


def reasoning(rows: int, prompt: int, length: int, width: int, layers: int, calls: int, what: str) -> Prepared:
    """`calls` times: `rows` completions of `length` tokens sampled, or as many learnt from in one step of DAPO."""
    prepare_devices(1)
    config = ModelConfig(width=width, layers=layers, heads=width // 32, kv_heads=width // 32, hidden=3 * width)
    rng = np.random.default_rng(0)
    prompts = jnp.asarray(rng.integers(1, 23, (rows, prompt)), jnp.int32)
    if what == "sample":
        arguments: tuple[Any, ...] = transformer.init(jax.random.key(0), config), prompts
        sample = sampler.sampler(config, sampler.Sampling(length, 1, wave=rows), ends=False)

        def program(params: Any, prompts: jax.Array, key: jax.Array) -> sampler.Drawn:
            return sample(params, prompts, prng.split(key, rows), jnp.int32(sampler.UNBOUNDED))
    else:
        learner = grpo.grpo(
            None, GRPOConfig(model=config, num_minibatches=1), RunContext(updates=1, mean=meshes.identity)
        )
        token = jnp.asarray(rng.integers(tokenizer.PAD + 1, 23, (rows, length)), jnp.int32)
        written, nothing, zero = jnp.ones(token.shape, bool), jnp.zeros(token.shape), jnp.zeros(rows, jnp.int32)
        reward = jnp.asarray(rng.integers(0, 2, rows), jnp.float32)
        drawn = sampler.Drawn(token, written, written, nothing, nothing)
        data = sampler.Completions(prompts, *drawn, reward, reward, zero, zero, zero, zero > 0)
        arguments = jax.jit(learner.init)(jax.random.key(0)), data
        program = learner.learn  # type: ignore[assignment]
    began = time.perf_counter()
    compiled = jax.jit(program).lower(*arguments, jax.random.key(0)).compile()
    seconds = time.perf_counter() - began

    def work(key: jax.Array) -> dict[str, float]:
        for call in range(calls):
            jax.block_until_ready(compiled(*arguments, jax.random.fold_in(key, call)))
        return {}

    sizes = {"rows": rows, "prompt": prompt, "length": length, "calls": calls, "what": what}
    about = sizes | {"model": dataclasses.asdict(config), "parameters": transformer.size(config)}
    return Prepared(about, calls * rows * length, "tokens", seconds, jax.random.key, work)
