"""Versions of a model that differ a little: each process computes them again from the same files.

Of version v each tensor has noise of 2 % of its own deviation, from (v, place of the tensor) alone. NumPy and
safetensors only: `vllm_reference.py` runs this in a Python without Longhaul.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

SHARE = 0.02
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def base(folder: Path) -> dict[str, np.ndarray]:
    """Tensors of a folder's model, float32."""
    return {name: x.astype(np.float32) for name, x in load_file(folder / "model.safetensors").items()}


def moved(tensors: dict[str, np.ndarray], version: int, only: str | None = None) -> dict[str, np.ndarray]:
    """Tensors of a version, or one of them."""
    found = {}
    for place, (name, x) in enumerate(tensors.items()):
        if only in (None, name):
            noise = np.random.default_rng((version, place)).random(x.shape, np.float32) - 0.5
            found[name] = x + noise * np.float32(SHARE * np.sqrt(12.0) * float(x.std()) or SHARE)
    return found
