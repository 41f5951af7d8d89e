"""Extension of vLLM's workers that digests what their layers compute with; for `benchmarks.vllm_updates`.

A layer on a CPU keeps its weight in a packed form alone. The product of the layer with the identity is the weight, bit
for bit, since each sum has one term that is not zero.
"""

from __future__ import annotations

import hashlib
from typing import Any


class Digests:
    """`vllm serve --worker-extension-cls benchmarks.peers.vllm_digests.Digests`."""

    def digests(self) -> dict[str, str]:
        """SHA-256 of each layer's weight, float32, by the layer's name."""
        import torch

        model: Any = self.model_runner.get_model()  # type: ignore[attr-defined]
        found: dict[str, str] = {}
        with torch.no_grad():
            for name, layer in model.named_modules():
                if (method := getattr(layer, "quant_method", None)) is not None and name != "model.embed_tokens":
                    width = getattr(layer, "input_size", None) or layer.embedding_dim
                    weight = method.apply(layer, torch.eye(width), None).T
                elif getattr(layer, "weight", None) is not None and not list(layer.children()):
                    weight = layer.weight
                else:
                    continue
                data = weight.detach().contiguous().float().numpy().tobytes()
                found[name] = hashlib.sha256(data).hexdigest()
        return found
