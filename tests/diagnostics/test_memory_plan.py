"""Memory by shapes alone: numbers of parameters as published, and what scales with what."""

from __future__ import annotations

import dataclasses

import pytest

from longhaul.algorithms.config import GRPOConfig
from longhaul.diagnostics import memory_plan
from longhaul.diagnostics.memory_plan import Load
from longhaul.reasoning import transformer

LOAD = Load(prompts=8, prompt=256, length=1024, wave=64)


@pytest.mark.parametrize(("name", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.720), ("qwen3-8b", 8.191)])
def test_models_by_name_have_as_many_parameters_as_published(name: str, billions: float) -> None:
    assert transformer.size(memory_plan.SHAPES[name]) / 1e9 == pytest.approx(billions, abs=1e-3)


def test_parts_of_a_device_follow_from_shapes_precision_and_micro_batches() -> None:
    model = dataclasses.replace(memory_plan.SHAPES["qwen3-0.6b"], precision="bf16", remat="full")
    config = GRPOConfig(group=8, num_minibatches=1, accumulate=8, model=model)
    whole, split = (memory_plan.parts(config, LOAD, devices) for devices in (1, 8))
    count = transformer.size(model)
    assert (whole["parameters"], whole["optimiser"]) == (4 * count, 8 * count)
    assert 8 * split["parameters"] < 1.01 * whole["parameters"]  # but for norms
    again = memory_plan.parts(dataclasses.replace(config, accumulate=64), LOAD, 1)
    logits = 16 * memory_plan.LOGITS_WIDE  # as many, whatever the tokens
    assert whole["learning"] - again["learning"] > 0.8 * (whole["learning"] - 8 * count - logits)  # an eighth of them
    packed = memory_plan.parts(dataclasses.replace(config, accumulate=1, pack=512), LOAD, 1)  # in rows of 1280 at least
    assert packed["learning"] - again["learning"] == 16 * 4 * memory_plan.ATTENTION * 256 * 1280  # prompts ask, too
    adapters = dataclasses.replace(config, model=dataclasses.replace(model, lora=16, frozen="bf16"))
    small = memory_plan.parts(adapters, LOAD, 1)
    assert 2 * count < small["parameters"] < 2.1 * count
    assert small["optimiser"] < 0.05 * whole["optimiser"]


def test_announced_memory_is_within_15_percent_of_the_peaks_of_an_h100() -> None:
    """The peaks: benchmarks/results/h100.jsonl, qwen3-train and qwen3-sample, bytes of the device's allocator."""
    model = dataclasses.replace(memory_plan.SHAPES["qwen3-0.6b"], precision="bf16", remat="full")
    config = GRPOConfig(group=8, num_minibatches=1, accumulate=1, model=model)
    found = memory_plan.parts(config, Load(prompts=8, prompt=64, length=1024, wave=64), 1)
    learning = found["parameters"] + found["optimiser"] + found["learning"]
    assert learning == pytest.approx(32_926_697_984, rel=0.15)
    assert found["parameters"] + found["sampling"] == pytest.approx(14_951_480_064, rel=0.15)


def test_completions_of_a_large_model_have_a_second_cache_of_half_the_rows() -> None:
    """An unembedding that is the embedding is no copy of it, unless that is kept in bf16."""
    model = dataclasses.replace(memory_plan.SHAPES["qwen3-0.6b"], precision="bf16")
    row = 2 * 2 * model.layers * (64 + 1024) * model.kv_heads * model.head_dim
    for rows, copied in ((64, 32), (5, 2)):
        for frozen, widened in (("fp32", 0), ("bf16", 4 * model.vocabulary * model.width)):
            lora = 16 if frozen == "bf16" else 0
            sizes = dataclasses.replace(model, lora=lora, frozen=frozen)
            config = GRPOConfig(group=8, num_minibatches=1, accumulate=1, model=sizes)
            found = memory_plan.parts(config, Load(prompts=8, prompt=64, length=1024, wave=rows), 1)
            assert found["sampling"] == (rows + copied) * row + 2 * transformer.size(sizes) + widened
            # At most 32 go on together, each with room for prompt, completion so far, and as much again.
            turns = memory_plan.parts(config, Load(prompts=8, prompt=64, length=1024, wave=rows, turns=True), 1)
            cache = max((rows + copied) * row, (min(32, rows) + min(16, copied)) * row // 1088 * 2112)
            assert turns["sampling"] == cache + 2 * transformer.size(sizes) + widened
    short = memory_plan.parts(config, Load(prompts=8, prompt=64, length=32, wave=64), 1)
    assert short["sampling"] == 64 * row * (64 + 32) // (64 + 1024) + 2 * transformer.size(sizes) + widened
