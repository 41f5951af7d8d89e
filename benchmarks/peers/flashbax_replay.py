"""flashbax in turn with `longhaul bench replay`: rows added and steps sampled in one compiled loop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
import turns

config = turns.about()["config"]
size, columns, batch = config["size"], config["columns"], config["batch"]
make = flashbax.make_prioritised_flat_buffer if config["prioritised"] else flashbax.make_flat_buffer
buffer = make(max_length=size, min_length=columns, sample_batch_size=batch, add_batch_size=columns)


def rows(key: jax.Array) -> dict[str, jax.Array]:
    seen = jax.random.normal(key, (columns, config["width"]))
    none = jnp.zeros(columns, bool)
    return {"seen": seen, "action": jnp.zeros(columns, jnp.uint8), "reward": seen[:, 0], "done": none}


def once(i: jax.Array, carried: Any) -> Any:
    state, total, data, key = carried
    state = buffer.add(state, data | {"seen": data["seen"] + total})
    sample = buffer.sample(state, jax.random.fold_in(key, i))
    first, second = sample.experience.first, sample.experience.second
    seen = jnp.sum(first["seen"]) + jnp.sum(second["seen"])
    if config["prioritised"]:
        seen = seen + jnp.sum(sample.probabilities)
        state = buffer.set_priorities(state, sample.indices, jnp.abs(first["reward"]) + 0.1)
    return state, 1e-9 * seen, data, key


def many(state: Any, data: Any, key: jax.Array) -> Any:
    return jax.lax.fori_loop(0, config["iterations"], once, (state, jnp.float32(0), data, key))[:2]


@jax.jit
def filled(key: jax.Array) -> Any:
    empty = buffer.init(jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), rows(key)))
    count = max(2, int(config["fill"] * size / columns))
    return jax.lax.fori_loop(0, count, lambda _, state: buffer.add(state, rows(key)), empty)


state, data = jax.block_until_ready(filled(jax.random.PRNGKey(0))), rows(jax.random.PRNGKey(1))
held = sum(x.nbytes for x in jax.tree.leaves(state))
began = time.perf_counter()
program = jax.jit(many, donate_argnums=0).lower(state, data, jax.random.PRNGKey(0)).compile()
compiled = time.perf_counter() - began


def work(number: int) -> dict[str, float]:
    global state
    state, total = program(state, data, jax.random.PRNGKey(number))
    jax.block_until_ready(total)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0.0)
    return {"peak_bytes": peak, "ring_bytes": float(held)}


work(0)
turns.ready(compiled, ["jax", "flashbax"])
turns.serve(work)
