"""Memory of a language model's run on devices that are not here, by shapes alone.

Parameters and Adam's moments are exact, as their layout on a mesh is known (`partition.py`). Results kept for
gradients, logits and the cache are sums over the arrays of transformer.py and decode.py; what a compiler adds or saves
is not known. Learning and sampling take turns on a device, so the larger of the two counts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul.algorithms.config import GRPOConfig
from longhaul.reasoning import transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.sampler import FEWER, LARGE, LOGITS_WIDE, LONG
from longhaul.reasoning.turns import TOGETHER
from longhaul.runtime import partition


def _qwen3(width: int, layers: int, heads: int, hidden: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        family="qwen3", vocabulary=151_936, width=width, layers=layers, heads=heads, kv_heads=8, head_dim=128,
        hidden=hidden, theta=1e6, tied=tied, context=40_960, pad=-1,
    )  # fmt: skip


SHAPES = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, tied=False),
}
"""Models whose memory is known without their files, by name (Yang et al. 2025, arXiv 2505.09388)."""

DEVICES = {"24 GB": (24e9, 1), "80 GB": (80e9, 1), "8 x 80 GB": (80e9, 8)}
"""Bytes of a device, and devices."""

ATTENTION = 4
"""Arrays of all scores that the gradient of a layer's attention has at once: scores, their softmax, and the same of the
gradient."""

FACTORS = 4
"""Arrays of logits that a loss has at once, its gradient among them."""


class Load(NamedTuple):
    """Work of an update."""

    prompts: int  # problems
    prompt: int  # tokens of the longest one
    length: int  # most tokens of a completion
    wave: int  # completions sampled together
    turns: bool = False  # completions call tools, and go on behind their results


def parts(config: GRPOConfig, load: Load, devices: int) -> dict[str, int]:
    """Bytes on each device, by kind.

    Several (`--mesh data=N --fsdp`) share parameters and moments. Where they learn, each has a part of the rows, and
    holds one layer whole. Where they sample, each has a part of every kernel and some heads of all rows.
    """
    assert config.num_minibatches is not None
    sizes, item = config.model, transformer.PRECISIONS[config.model.precision].dtype.itemsize
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), sizes))
    learnt, rest = transformer.split(sizes, params)
    own, frozen = (partition.shares(tree, 1, devices).own for tree in (learnt, rest))
    completions = load.prompts * config.group
    together = max(1, completions // (config.num_minibatches * config.accumulate))
    asked = max(1, together // config.group)
    rows, prompts = (count // devices if count % devices == 0 else count for count in (together, asked))
    tokens = rows * load.length + prompts * load.prompt
    pairs = rows * load.length * (load.length + load.prompt)
    if config.pack:
        tokens = max(config.pack, load.length + load.prompt)
        pairs = tokens * tokens
    inside = tokens * item * (6 * sizes.width + 4 * sizes.heads * sizes.head_dim + 4 * sizes.hidden)
    scores = 4 * ATTENTION * sizes.heads * pairs
    inputs = sizes.layers * tokens * item * sizes.width
    kept = inputs + inside + scores if sizes.remat == "full" else sizes.layers * (inside + scores)
    logits = 4 * FACTORS * min(LOGITS_WIDE, together * load.length * sizes.vocabulary) // devices
    gradients = own * (2 if config.accumulate > 1 or config.pack else 1)
    table = 4 * sizes.vocabulary * sizes.width
    fetched = 0
    if devices > 1:  # a layer's kernels and, where they are learnt, their gradient; a tied embedding lies in two ways
        fetched = (1 if rest else 2) * item * _of_layers(sizes, params) // sizes.layers
        fetched += table // devices if sizes.tied else 0
    slots, rows = load.prompt + load.length, min(load.wave, completions)  # on all devices together
    large = transformer.size(sizes) >= LARGE and load.length >= LONG
    rows += int(rows / FEWER[0]) if large else 0  # the last completions', whose cache is copied out of the whole one
    if load.turns:  # a later turn reads prompt and completion so far, and has room for as much again
        later = min(TOGETHER, load.wave, completions)
        later += int(later / FEWER[0]) if large else 0
        rows, slots = max((rows, slots), (later, slots + load.length), key=math.prod)
    cache = 2 * item * sizes.layers * rows * slots * sizes.kv_heads * sizes.head_dim
    widened = 0 if sizes.tied and params["embedding"].dtype == jnp.float32 else table
    kernels = (item * transformer.size(sizes) + widened) // devices
    cache //= devices if sizes.kv_heads % devices == 0 else 1
    sent = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(learnt)) if devices == 1 else 0
    learning, sampling = gradients + kept + logits + fetched, kernels + cache
    return {
        "parameters": own + frozen,
        "optimiser": 2 * own,
        "weights on their way": sent,
        "learning": learning,
        "sampling": sampling,
        "total": 3 * own + frozen + sent + max(learning, sampling),
    }


def _of_layers(sizes: ModelConfig, params: Any) -> int:
    """Number of parameters of all layers, without LoRA's factors."""
    frozen = transformer.split(sizes, params)[1] or params
    return sum(leaf.size for leaf in jax.tree.leaves(frozen["layers"]))


def plan(config: GRPOConfig, load: Load) -> dict[str, dict[str, Any]]:
    """`parts` for each of `DEVICES`, with its capacity and whether the run fits."""
    plans = {}
    for name, (capacity, devices) in DEVICES.items():
        own = parts(config, load, devices)
        plans[name] = own | {"capacity": int(capacity), "fits": own["total"] <= 0.9 * capacity}
    return plans
