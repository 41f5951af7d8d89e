"""Plans of the two sides of the benchmark of Qwen3's shapes."""

from __future__ import annotations

import dataclasses

from benchmarks import qwen3
from longhaul.algorithms.config import GRPOConfig
from longhaul.diagnostics import memory_plan
from longhaul.diagnostics.memory_plan import Load


def test_a_run_holds_what_its_larger_side_holds_and_the_weights_on_their_way() -> None:
    model = dataclasses.replace(memory_plan.SHAPES["qwen3-0.6b"], precision="bf16", remat="full")
    few, many = (GRPOConfig(group=8, num_minibatches=1, accumulate=each, model=model) for each in (64, 1))
    load = Load(prompts=8, prompt=64, length=1024, wave=64)
    for config, side in ((many, "train"), (few, "sample")):
        whole, held = memory_plan.parts(config, load, 1), qwen3.planned(config, load, side)
        moments = 0 if side == "train" else whole["optimiser"]
        assert held["total"] + moments + whole["weights on their way"] == whole["total"]
