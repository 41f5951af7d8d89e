"""Logits of tiny random models by transformers (torch): `python tests/helpers/reference_logits.py FILE` writes them.

Run where torch, transformers, JAX and safetensors are, with this project on PYTHONPATH. The file beside the tests,
reasoning_logits.npz, was made so, by transformers 5.23.0 and torch 2.14.1.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.reasoning import huggingface
from longhaul.reasoning.config import ModelConfig, RopeScaling
from longhaul.reasoning.transformer import shapes
from longhaul.types import Params

STORED = Path(__file__).with_name("reasoning_logits.npz")

TINY: dict[str, Any] = {"vocabulary": 31, "width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16,
                        "hidden": 96, "context": 128}  # fmt: skip

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 16)

CONFIGS = {
    "llama": ModelConfig(family="llama", tied=False, **TINY),
    "llama-all-heads": ModelConfig(family="llama", tied=False, **{**TINY, "kv_heads": 4}),
    "llama3-rope": ModelConfig(family="llama", tied=True, theta=50_000.0, rope_scaling=LLAMA3, **TINY),
    "linear-rope": ModelConfig(family="llama", tied=True, rope_scaling=RopeScaling("linear", 4.0), **TINY),
    "qwen2": ModelConfig(family="qwen2", tied=True, theta=1e6, **TINY),
    "qwen2-untied": ModelConfig(family="qwen2", tied=False, **TINY),
    "qwen3": ModelConfig(family="qwen3", tied=True, theta=1e6, **{**TINY, "head_dim": 32}),
    "qwen3-untied": ModelConfig(family="qwen3", tied=False, **TINY),
}

TOKENS = np.random.default_rng(7).integers(0, 31, (2, 24)).astype(np.int32)


def params(config: ModelConfig) -> Params:
    """Random ones, norms and biases too, by NumPy: so that no version of JAX changes them."""
    rng = np.random.default_rng(3)

    def made(name: str, shape: tuple[int, ...]) -> np.ndarray:
        drawn = rng.normal(size=shape).astype(np.float32)
        return 1.0 + 0.2 * drawn if name.endswith("norm") else drawn * np.float32(0.15)

    ours = shapes(config)
    layers = {name: made(name, shape) for name, shape in ours["layers"].items()}
    return {name: made(name, shape) for name, shape in ours.items() if name != "layers"} | {"layers": layers}


def by_transformers(config: ModelConfig, shard_bytes: int = huggingface.SHARD_BYTES) -> np.ndarray:
    """Logits [2, 24, 31] of a model that `hub.save` wrote and transformers loaded."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        huggingface.save(folder, config, params(config), shard_bytes=shard_bytes)
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loading[kind], f"{kind}: {loading[kind]}"
    with torch.no_grad():
        return model(torch.tensor(TOKENS.astype(np.int64))).logits.numpy()


if __name__ == "__main__":
    # The first is written in many files, so that transformers reads our index, too.
    made = {name: by_transformers(config, 40_000 if name == "llama" else 10**9) for name, config in CONFIGS.items()}
    np.savez_compressed(sys.argv[1], **made)
