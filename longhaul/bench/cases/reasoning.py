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

from longhaul.algorithms import grpo
from longhaul.algorithms.config import GRPOConfig
from longhaul.algorithms.context import Context
from longhaul.bench.cases.training import Prepared
from longhaul.reasoning import sampler, tokenizer, transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import prepare_devices


def cases(
    *, rows: int = 64, prompt: int = 16, length: int = 48, width: int = 64, layers: int = 2, calls: int = 8
) -> list[dict[str, Any]]:
    """One figure of sampling, one of learning."""
    sizes = {"rows": rows, "prompt": prompt, "length": length, "width": width, "layers": layers, "calls": calls}
    return [sizes | {"what": what} for what in ("sample", "train")]


def reasoning(rows: int, prompt: int, length: int, width: int, layers: int, calls: int, what: str) -> Prepared:
    """`calls` times: `rows` completions of `length` tokens sampled, or as many learnt from in one step of DAPO."""
    prepare_devices(1)
    config = ModelConfig(width=width, layers=layers, heads=width // 32, kv_heads=width // 32, hidden=3 * width)
    rng = np.random.default_rng(0)
    asked = jnp.asarray(rng.integers(1, 23, (rows, prompt)), jnp.int32)
    params = transformer.init(jax.random.key(0), config)
    program, arguments = _sampling(config, asked, params, length) if what == "sample" else (
        _learning(config, asked, params, length, rng)
    )  # fmt: skip
    began = time.perf_counter()
    compiled = jax.jit(program).lower(*arguments, jax.random.key(0)).compile()
    seconds = time.perf_counter() - began

    def work(key: jax.Array) -> dict[str, float]:
        for call in range(calls):
            jax.block_until_ready(compiled(*arguments, jax.random.fold_in(key, call)))
        return {}

    sizes = {"rows": rows, "prompt": prompt, "length": length, "calls": calls, "what": what}
    about = sizes | {"model": dataclasses.asdict(config), "parameters": transformer.size(config)}
    return Prepared(about, calls * rows * length, "tokens", seconds, lambda number: jax.random.key(number), work)


def _sampling(config: ModelConfig, asked: jax.Array, params: Any, length: int) -> tuple[Any, tuple[Any, ...]]:
    sample = sampler.sampler(config, length, 1.0, ends=False)

    def program(params: Any, asked: jax.Array, key: jax.Array) -> sampler.Drawn:
        return sample(params, asked, key, jnp.int32(sampler.UNBOUNDED))

    return program, (params, asked)


def _learning(
    config: ModelConfig, asked: jax.Array, params: Any, length: int, rng: np.random.Generator
) -> tuple[Any, tuple[Any, ...]]:
    rows = asked.shape[0]
    learner = grpo.grpo(None, GRPOConfig(model=config, num_minibatches=1), Context(updates=1, mean=meshes.identity))
    state = jax.jit(learner.init)(jax.random.key(0))
    token = jnp.asarray(rng.integers(tokenizer.PAD + 1, 23, (rows, length)), jnp.int32)
    written, zero = jnp.ones(token.shape, bool), jnp.zeros(rows, jnp.int32)
    reward = jnp.asarray(rng.integers(0, 2, rows), jnp.float32)
    nothing = jnp.zeros(token.shape)
    data = sampler.Completions(asked, token, written, written, nothing, reward, reward, zero, zero, zero)
    return learner.learn, (state, data)


PEER = """
import importlib.metadata, json, os, resource, sys, time
about = json.loads(sys.argv[1])
config, sizes = about["config"], about["config"]["model"]
import torch, transformers
from transformers import Qwen3Config, Qwen3ForCausalLM
torch.set_num_threads(int(os.environ.get("NPROC", "1")))
began = time.perf_counter()
model = Qwen3ForCausalLM(Qwen3Config(
    vocab_size=sizes["vocabulary"], hidden_size=sizes["width"], num_hidden_layers=sizes["layers"],
    num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv_heads"], head_dim=sizes["head_dim"],
    intermediate_size=sizes["hidden"], tie_word_embeddings=sizes["tied"], eos_token_id=None, pad_token_id=0,
    bos_token_id=None)).eval()
seed = torch.Generator().manual_seed(0)
asked = torch.randint(1, 23, (config["rows"], config["prompt"]), generator=seed)
token = torch.randint(1, 23, (config["rows"], config["length"]), generator=seed)
reward = torch.randint(0, 2, (config["rows"] // 16, 16), generator=seed).float()
worth = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
optimiser = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.9, 0.98))
def train():
    for _ in range(config["calls"]):
        logits = model(torch.cat([asked, token], 1), logits_to_keep=config["length"] + 1, use_cache=False).logits
        log_prob = logits[:, :-1].log_softmax(-1).gather(2, token[:, :, None])[:, :, 0]
        ratio = log_prob.exp()
        loss = -torch.minimum(ratio * worth, ratio.clamp(0.8, 1.28) * worth).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
def sample():
    for _ in range(config["calls"]):
        with torch.no_grad():
            found = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=config["length"],
                                   min_new_tokens=config["length"], do_sample=True, top_k=0, use_cache=True)
        assert found.shape[1] == config["prompt"] + config["length"]
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
def tell(what):
    print("figure " + json.dumps(what), flush=True)
work = train if config["what"] == "train" else sample
work()
compiled = time.perf_counter() - began
versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
tell({"steps": about["steps"], "unit": about["unit"], "compile_seconds": compiled, "versions": versions})
for _ in sys.stdin:
    used, began = cpu(), time.perf_counter()
    work()
    tell({"wall_seconds": time.perf_counter() - began, "cpu_seconds": cpu() - used})
"""
"""Drives transformers, sampling or learning, as `bench.serve` drives our program; runs under its own Python."""
