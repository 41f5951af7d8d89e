"""Bytes of a language model on each of several H100s, by their compiler, on a machine that has none:

    pip install 'longhaul-rl[plan]'
    python -m benchmarks.model_shares --json FILE

Compiled is the program of an update of `--mesh data=N --fsdp` with the shapes of Qwen3-8B (GRPO, 8 problems of 16
completions, prompts of 256 tokens, `--model-precision bf16 --model-remat full --accumulate 4`), each in a process of
its own, for one device and for eight. `compiled_bytes` is what XLA reserves on a device, `share` that of eight as a
part of that of one, `planned_bytes` what `--dry-run` tells without weights on their way. `gathers` are kernels of a
layer that each device gathers, by their bytes: how often a kernel in each micro-batch. Nothing is run.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import results
from longhaul.algorithms import grpo
from longhaul.algorithms.config import GRPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.diagnostics import chip_program, hlo, memory_plan
from longhaul.reasoning import sampler, tokenizer, transformer
from longhaul.runtime import device_memory, partition
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import MeshShape
from longhaul.topologies import fused
from longhaul.types import PLATFORM

CHIP, MODEL, GROUP, PROBLEMS, PROMPT = "h100", "qwen3-8b", 16, 8, 256

KERNELS = ("query", "key", "value", "out", "gate", "up", "narrow")


def main() -> int:
    flags = results.parser(__doc__)
    flags.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    flags.add_argument("--layers", type=int, default=36, help="of the model's, for a trial")
    flags.add_argument("--length", type=int, default=1_024, help="most tokens of a completion")
    flags.add_argument("--lora", type=int, nargs="+", default=[0, 16], help="rank; 0: all parameters are learnt")
    flags.add_argument("--here", action="store_true", help="compile the first of each in this process, and print it")
    args = flags.parse_args()
    if args.here:
        print(json.dumps(compiled(args.devices[0], args.layers, args.length, args.lora[0])))
        return 0
    if reason := chip_program.missing(CHIP):
        print(reason, file=sys.stderr)
        return 2
    for lora in args.lora:
        figures = [asked(devices, args.layers, args.length, lora) for devices in args.devices]
        for figure in figures:
            share = figure["compiled_bytes"] / figures[0]["compiled_bytes"]
            results.emit({"name": "model-shares", "model": MODEL, "chip": CHIP, **figure, "share": share}, args.json)
    return 0


def asked(devices: int, layers: int, length: int, lora: int) -> dict[str, Any]:
    """`compiled` by a process of its own."""
    words = ["--devices", str(devices), "--layers", str(layers), "--length", str(length), "--lora", str(lora)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", PLATFORM: "gpu"}
    command = [sys.executable, "-m", "benchmarks.model_shares", "--here", *words]
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    figure: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return figure


def compiled(devices: int, layers: int, length: int, lora: int) -> dict[str, Any]:
    """Figures of the program of an update on so many devices."""
    fsdp = devices > 1
    model = dataclasses.replace(
        memory_plan.SHAPES[MODEL], layers=layers, precision="bf16", remat="full", lora=lora, vocabulary=151_936
    )
    config = GRPOConfig(group=GROUP, num_minibatches=1, update_epochs=1, accumulate=4, model=model)
    mesh, shape = chip_program.mesh(CHIP, devices, fsdp=fsdp), MeshShape(devices, 1, fsdp)
    context = RunContext(100, meshes.identity)
    if fsdp:
        context = context._replace(mean=lambda tree: partition.laid(tree, shape), spread=meshes.spread, split=True)
    learner, words = grpo.grpo(None, config, context), tokenizer.Tokeniser(model.vocabulary, list, str, ends=(0,))
    sampling = sampler.Sampling(length, GROUP, wave=64)

    def collector(bank: sampler.Bank) -> Any:
        return sampler.collector(model, bank, sampling, prompts=PROBLEMS, tokeniser=words)

    bank = jax.eval_shape(lambda: sampler.Bank(*(jnp.zeros((64, n), jnp.int32) for n in (PROMPT, length, length))))
    progress = fused.outline(learner, lambda key, context: (), bank, mesh)
    program = fused.lowered(learner, collector, progress, chip_program.everywhere(bank, mesh), mesh, block=1)
    executable = program.compile(compiler_options=chip_program.TUNING)
    need = device_memory.need(executable)
    assert need is not None
    load = memory_plan.Load(PROBLEMS, PROMPT, length, sampling.wave)
    planned = memory_plan.parts(config, load, devices)
    item = transformer.PRECISIONS[model.precision].dtype.itemsize
    sizes = collections.Counter(
        item * transformer.shapes(model)["layers"][name][1] * transformer.shapes(model)["layers"][name][2]
        for name in KERNELS
    )
    gathers = collections.Counter[int]()
    for each in hlo.crossings(executable.as_text() or ""):
        if each.operation == "all-gather" and each.bytes in sizes:
            gathers[each.bytes] += each.times()
    return {
        "devices": devices, "layers": layers, "length": length, "lora": lora, "parameters": transformer.size(model),
        "state_bytes": need.arguments, "compiled_bytes": need.total,
        "planned_bytes": planned["total"] - planned["weights on their way"],
        "gathers": {size: count / (sizes[size] * layers * config.accumulate) for size, count in gathers.items()},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
