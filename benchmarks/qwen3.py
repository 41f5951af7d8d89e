"""Qwen3-0.6B on one accelerator, its shapes with random weights: tokens a second sampled and learnt from, and memory.

    python -m benchmarks.qwen3 --side sample --json FILE
    python -m benchmarks.qwen3 --side train --json FILE

A side is a process of its own, as the device's peak is of all that a process did. The layers compute in bf16, with
float32 masters. `sample`: 128 completions, 8 behind each prompt of 64 tokens, written by 64 rows; first all of 1,024
tokens, then of lengths that are log-normal (mean 256, most 1,024), where a row whose completion ends begins the next.
`train`: one update from 64 completions of 1,024 tokens, with Adam's step; the layers are computed again for the
gradient, and the loss has the logits of a few tokens at a time. `planned_bytes` is what `longhaul train --dry-run`
tells of these shapes, of the parts that the side holds; `compiled_bytes` the compiler's own sum, `peak_bytes` what the
device's allocator had.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import results
from longhaul.algorithms import grpo
from longhaul.algorithms.config import GRPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.diagnostics import memory_plan
from longhaul.reasoning import sampler, tokenizer, transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.runtime import device_memory
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import prepare_devices

GROUP, MEAN, SPREAD = 8, 256, 1.0
"""Completions of a prompt; mean and deviation of the lengths that are drawn."""

HELD = {"sample": ("parameters", "sampling"), "train": ("parameters", "optimiser", "learning")}
"""Parts of a plan that a side holds: none has weights on their way, and none does both."""

UPDATES = 3
"""Updates that are timed, behind one that is not."""


def main() -> None:
    flags = results.parser(__doc__)
    flags.add_argument("--side", choices=("sample", "train"), required=True)
    flags.add_argument("--rows", type=int, default=64, help="completions written at a time, or learnt from")
    flags.add_argument("--length", type=int, default=1_024, help="most tokens of a completion")
    flags.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    flags.add_argument("--accumulate", type=int, default=1, help="micro-batches of an update")
    flags.add_argument("--layers", type=int, default=28, help="of Qwen3-0.6B's, for a trial")
    flags.add_argument("--width", type=int, default=1_024, help="the same")
    flags.add_argument("--vocabulary", type=int, default=151_936, help="the same")
    args = flags.parse_args()
    prepare_devices(1)
    shape = dataclasses.replace(
        memory_plan.SHAPES["qwen3-0.6b"], layers=args.layers, width=args.width, vocabulary=args.vocabulary
    )
    model = dataclasses.replace(shape, precision="bf16", remat="full")
    config = GRPOConfig(group=GROUP, num_minibatches=1, update_epochs=1, accumulate=args.accumulate, model=model)
    completions = args.rows if args.side == "train" else 2 * args.rows
    load = memory_plan.Load(completions // GROUP, args.prompt, args.length, args.rows)
    about = {
        "name": f"qwen3-{args.side}", "parameters": transformer.size(model), "model": dataclasses.asdict(model),
        "completions": completions, "group": GROUP, "rows": args.rows, "prompt": args.prompt, "length": args.length,
        "device": str(jax.devices()[0].device_kind), "planned_bytes": planned(config, load, args.side),
    }  # fmt: skip
    for figure in sampled(model, args) if args.side == "sample" else learnt(config, args):
        results.emit(about | figure | {"peak_bytes": peak()}, args.json)


def planned(config: GRPOConfig, load: memory_plan.Load, side: str) -> dict[str, int]:
    """Bytes of a side's parts, and their sum."""
    parts = memory_plan.parts(config, load, 1)
    held = {name: parts[name] for name in HELD[side]}
    return held | {"total": sum(held.values())}


def peak() -> int | None:
    """Most bytes that the device's arrays took so far; None on a CPU, which does not count them."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def compiled(program: Any, *arguments: Any) -> tuple[Any, dict[str, Any]]:
    """(a compiled program, its seconds and bytes)."""
    began = time.perf_counter()
    executable = program.lower(*arguments).compile()
    record = {"compile_seconds": time.perf_counter() - began, "compiled_bytes": None}
    if (need := device_memory.need(executable)) is not None:
        record["compiled_bytes"] = need.total
    print(record, file=sys.stderr, flush=True)
    return executable, record


def drawn_lengths(count: int, most: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(MEAN) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(np.round(lengths), 1, most).astype(np.int32)


def sampled(model: ModelConfig, args: Any) -> Any:
    """Figures of sampling: all completions as long as can be, and of drawn lengths."""
    count, rng = 2 * args.rows, np.random.default_rng(0)
    words = tokenizer.Tokeniser(model.vocabulary, list, str, ends=(0,))
    draws = sampler.Sampling(args.length, GROUP, wave=args.rows)
    prompts = jnp.asarray(rng.integers(1, model.vocabulary, (count // GROUP, args.prompt)), jnp.int32)
    params = jax.jit(lambda key: transformer.init(key, model))(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), count)

    def asked(most: np.ndarray) -> tuple[Any, ...]:
        return params, prompts, keys, jnp.int32(sampler.UNBOUNDED), jnp.asarray(most, jnp.int32)

    program, record = compiled(
        jax.jit(sampler.sampler(model, draws, ends=False, tokeniser=words)), *asked(np.ones(count))
    )
    jax.block_until_ready(program(*asked(np.full(count, 4))))
    for name, most in (("all", np.full(count, args.length)), ("drawn", drawn_lengths(count, args.length))):
        arguments = jax.block_until_ready(asked(most))
        began = time.perf_counter()
        written = np.asarray(program(*arguments).written)
        seconds = time.perf_counter() - began
        np.testing.assert_array_equal(written.sum(axis=1), most)
        tokens = int(most.sum())
        yield record | {"lengths": name, "tokens": tokens, "wall_seconds": seconds, "per_second": tokens / seconds}


def learnt(config: GRPOConfig, args: Any) -> Any:
    """Figure of one update from completions of random tokens, all as long as can be, half of them rewarded."""
    rows, rng = args.rows, np.random.default_rng(0)
    prompts = np.repeat(rng.integers(1, config.model.vocabulary, (rows // GROUP, args.prompt)), GROUP, axis=0)
    texts = rng.integers(1, config.model.vocabulary, (rows, args.length))
    flags, zeros = np.ones(texts.shape, bool), np.zeros(rows, np.int32)
    log_prob = np.full(texts.shape, -np.log(config.model.vocabulary), np.float32)
    reward = (np.arange(rows) % 2).astype(np.float32)
    data = jax.tree.map(
        jnp.asarray,
        sampler.Completions(
            prompts.astype(np.int32), texts.astype(np.int32), flags, flags, log_prob, log_prob, reward, reward, zeros,
            zeros, np.arange(rows, dtype=np.int32) // GROUP, zeros > 0,
        ),
    )  # fmt: skip
    learner = grpo.grpo(None, config, RunContext(100, meshes.identity))
    state, key = jax.jit(learner.init)(jax.random.key(0)), jax.random.key(1)
    program, record = compiled(jax.jit(learner.learn, donate_argnums=0), state, data, key)
    seconds, norms = [], []
    for update in range(1 + UPDATES):
        began = time.perf_counter()
        state, metrics = program(state, data, jax.random.fold_in(key, update))
        norms.append(float(metrics["grpo/grad_norm"]))
        seconds.append(time.perf_counter() - began)
        print(f"update {update}: {seconds[-1]:.3f} s", file=sys.stderr, flush=True)
    assert all(np.isfinite(norms)), norms
    middle = statistics.median(seconds[1:])
    yield record | {
        "accumulate": config.accumulate, "logits_at_once": sampler.logits_at_once(), "tokens": texts.size,
        "wall_seconds": middle, "seconds": seconds, "per_second": texts.size / middle, "grad_norm": norms,
    }  # fmt: skip


if __name__ == "__main__":
    main()
