"""Peak memory of a learner's update on completions of a real model: the process, and the compiler's own figures.

    python -m benchmarks.reasoning_memory --model smollm2-135m --lora 16 --frozen bf16 --json FILE
    python -m benchmarks.reasoning_memory --model smollm2-135m --lora 0 --precision bf16 --json FILE
    python -m benchmarks.reasoning_memory --model smollm2-135m --lora 16 --drawn --accumulate 1 --pack 1024 --json FILE

One process loads the model, compiles the update and makes it, on random tokens: memory does not depend on which. The
peak of the update is the kernel's (VmHWM), counted anew after loading and compiling; that of the start stands beside
it. All completions are as long as is allowed, or with `--drawn` as those of `benchmarks.decoding`: log-normal, of 64
tokens on the mean. `loss` and `grad_norm` are the same for all ways to compute an update.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decoding import asked
from longhaul.algorithms import grpo
from longhaul.algorithms.config import GRPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.config.resolve import computing_as
from longhaul.reasoning import huggingface, tokenizer
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.sampler import SAMPLED, Completions
from longhaul.runtime import device_memory
from longhaul.runtime import mesh as meshes
from longhaul.training import reasoning_setup


def peak() -> int:
    """Most bytes that this process had since `forget`."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def forget() -> None:
    """Begins a new count of the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def completions(args: argparse.Namespace, vocabulary: int) -> Completions:
    """Random texts, half of them rewarded."""
    rng, rows = np.random.default_rng(0), args.completions
    texts = [rng.integers(0, vocabulary, (rows, length), np.int32) for length in (args.prompt, args.length)]
    lengths = np.minimum(asked(rows, args.prompt)[1], args.length) if args.drawn else np.full(rows, args.length)
    flags, rewards = np.arange(args.length)[None] < lengths[:, None], (np.arange(rows) % 2).astype(np.float32)
    texts[1] = np.where(flags, texts[1], np.int32(tokenizer.NONE))
    log_prob = np.where(flags, np.float32(-np.log(vocabulary)), np.float32(0.0))
    whole, problem = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32) // args.group
    return Completions(
        np.repeat(texts[0][:: args.group], args.group, axis=0), texts[1], flags, flags, log_prob, log_prob, rewards,
        rewards, whole + SAMPLED, whole, problem, np.zeros(rows, bool),
    )  # fmt: skip


def measured(args: argparse.Namespace) -> dict[str, Any]:
    own = ModelConfig(precision=args.precision, remat="full", lora=args.lora, frozen=args.frozen)
    model = dataclasses.replace(computing_as(huggingface.config(args.model), own), pad=tokenizer.NONE)
    config = GRPOConfig(
        group=args.group, num_minibatches=1, update_epochs=1, accumulate=args.accumulate, pack=args.pack,
        warmup=0, model=model, model_folder=args.model,
    )  # fmt: skip
    grpo.check(config, columns=args.completions, steps=args.length)
    algorithm = grpo.grpo(None, config, RunContext(10, meshes.identity))
    state = reasoning_setup.loaded(SimpleNamespace(algorithm=config), jax.jit(algorithm.init)(jax.random.key(0)))  # type: ignore[arg-type]
    data = jax.tree.map(jnp.asarray, completions(args, model.vocabulary))
    written = np.asarray(data.written)
    update = jax.jit(algorithm.learn, donate_argnums=0).lower(state, data, jax.random.key(1)).compile()
    need = device_memory.need(update)
    assert need is not None
    device_memory.trim()
    before, start = device_memory.resident(), peak()
    forget()
    began, cpu = time.perf_counter(), time.process_time()
    state, metrics = jax.block_until_ready(update(state, data, jax.random.key(1)))
    return {
        "completions": args.completions, "length": args.length, "prompt": args.prompt, "group": args.group,
        "lora": args.lora, "precision": args.precision, "frozen": args.frozen, "accumulate": args.accumulate,
        "pack": args.pack, "tokens": int(np.sum(written)),
        "peak_bytes": peak(), "peak_bytes_of_start": start, "bytes_before": before, "compiler": need._asdict(),
        "seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu,
        "grad_norm": float(metrics["grpo/grad_norm"]), "loss": float(metrics["grpo/loss"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--frozen", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", type=Path, required=True, help="a line is added")
    sizes = (("lora", 0), ("completions", 16), ("length", 512), ("prompt", 64), ("group", 16), ("accumulate", 16),
             ("pack", 0))  # fmt: skip
    for name, value in sizes:
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--drawn", action="store_true", help="completions of log-normal lengths")
    record = measured(parser.parse_args())
    with parser.parse_args().json.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
