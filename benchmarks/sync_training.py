"""Small training whose bf16 parameters, step by step, are the data of `sync_delta`.

A transformer over bytes (3.5 M parameters: width 256, 4 layers, RMSNorm, SwiGLU, tied embedding) in plain JAX learns
this repository's own Python sources; fp32 masters, gradients clipped to norm 1, Adam(0.9, 0.999). It is pretrained at
1e-3, then branched with a fresh Adam at each learning rate, as fine-tuning and reinforcement learning do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = Path(__file__).resolve().parent.parent

WIDTH, LAYERS, HEADS, HIDDEN, LENGTH, BATCH = 256, 4, 4, 768, 64, 8

PRETRAINING, RATE = 400, 1e-3
"""Updates before the branches, and their learning rate."""

Params = dict[str, jax.Array]


def text() -> np.ndarray:
    """This repository's Python sources as one array of bytes, [N] uint8, in the order of their paths."""
    paths = sorted(path for folder in ("longhaul", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)


def initial(key: jax.Array) -> Params:
    shapes = {
        "embedding": (256, WIDTH),
        "position": (LENGTH, WIDTH),
        "layers/query_key_value": (LAYERS, WIDTH, 3 * WIDTH),
        "layers/output": (LAYERS, WIDTH, WIDTH),
        "layers/gate": (LAYERS, WIDTH, HIDDEN),
        "layers/up": (LAYERS, WIDTH, HIDDEN),
        "layers/down": (LAYERS, HIDDEN, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    made = {name: 0.02 * jax.random.normal(k, shape) for (name, shape), k in zip(shapes.items(), keys)}
    norms = {"layers/attention_norm": (LAYERS, WIDTH), "layers/hidden_norm": (LAYERS, WIDTH), "last_norm": (WIDTH,)}
    return made | {name: jnp.ones(shape) for name, shape in norms.items()}


def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None]


def logits(params: Params, tokens: jax.Array) -> jax.Array:
    """[B, T] int32 -> [B, T, 256]."""
    batch, length = tokens.shape
    x = params["embedding"][tokens] + params["position"][None, :length]
    future = jnp.where(jnp.tri(length, dtype=bool), 0.0, -1e9)[None, None]

    def layer(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        joined = normalised(x, p["attention_norm"]) @ p["query_key_value"]
        q, k, v = jnp.moveaxis(joined.reshape(batch, length, 3, HEADS, -1), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5 + future
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["output"]
        h = normalised(x, p["hidden_norm"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    stacked = {name.removeprefix("layers/"): leaf for name, leaf in params.items() if name.startswith("layers/")}
    x, _ = jax.lax.scan(layer, x, stacked)
    return normalised(x, params["last_norm"]) @ params["embedding"].T


def loss(params: Params, rows: jax.Array) -> jax.Array:
    """Nats a byte of [B, T + 1] uint8 rows."""
    rows = rows.astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, rows[:, :-1]), rows[:, 1:]).mean()


def training(params: Params, rate: float, rows: Iterator[np.ndarray]) -> Iterator[tuple[Params, float]]:
    """Endless (parameters after an update, its loss), from a fresh Adam."""
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, 0.9, 0.999))

    @jax.jit
    def update(params: Params, state: Any, rows: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, rows)
        steps, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, steps), state, value

    state = optimiser.init(params)
    for batch in rows:
        params, state, value = update(params, state, batch)
        yield params, float(value)


def batches(seed: int) -> Iterator[np.ndarray]:
    """Endless [B, T + 1] rows of the text at random places."""
    source, generator = text(), np.random.default_rng(seed)
    while True:
        starts = generator.integers(0, source.size - LENGTH - 1, BATCH)
        yield np.stack([source[start : start + LENGTH + 1] for start in starts])


def pretrained(updates: int = PRETRAINING) -> tuple[Params, float]:
    """-> (parameters, mean loss of the last tenth of the updates)."""
    losses: list[float] = []
    params = initial(jax.random.key(0))
    for params, value in training(params, RATE, batches(0)):
        losses.append(value)
        if len(losses) == updates:
            break
    return params, float(np.mean(losses[-max(1, updates // 10) :]))


def snapshots(params: Params, rate: float, updates: int) -> Iterator[dict[str, np.ndarray]]:
    """The parameters as bf16, as a publisher casts them: before the first update, then after each of `updates`."""
    cast = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree))
    yield {name: np.asarray(leaf) for name, leaf in cast(params).items()}
    for i, (now, _) in enumerate(training(params, rate, batches(1)), 1):
        yield {name: np.asarray(leaf) for name, leaf in cast(now).items()}
        if i == updates:
            return
