"""Shapes of known models' parameters, in the order of their layers, under their Hugging Face names."""

from __future__ import annotations

from typing import NamedTuple

Form = tuple[str, tuple[int, ...], str]
"""(name, shape, dtype) of a tensor."""


class Decoder(NamedTuple):
    """Decoder like Qwen3: grouped-query attention with normalised heads, gated feed-forward, tied or own head."""

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    tied: bool


DECODERS = {
    "tiny": Decoder(2, 64, 128, 4, 2, 16, 512, True),
    "small": Decoder(8, 1024, 3072, 16, 8, 128, 32_000, True),
    "qwen3-0.6b": Decoder(28, 1024, 3072, 16, 8, 128, 151_936, True),
    "qwen3-8b": Decoder(36, 4096, 12_288, 32, 8, 128, 151_936, False),
    "1t": Decoder(135, 20_480, 106_496, 160, 8, 128, 151_936, False),  # no known model: for planning alone
}


def forms(name: str, layers: int | None = None) -> list[Form]:
    """Tensors of a model in bfloat16, or of its first `layers` and all that is outside of layers. ValueError for an
    unknown one."""
    if name not in DECODERS:
        raise ValueError(f"no model is known as {name!r}; there are {', '.join(DECODERS)}")
    d = DECODERS[name]
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (d.vocabulary, d.width))]
    for i in range(d.layers if layers is None else layers):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (d.width,),
            "self_attn.q_proj": (d.heads * d.head_width, d.width),
            "self_attn.k_proj": (d.key_heads * d.head_width, d.width),
            "self_attn.v_proj": (d.key_heads * d.head_width, d.width),
            "self_attn.q_norm": (d.head_width,),
            "self_attn.k_norm": (d.head_width,),
            "self_attn.o_proj": (d.width, d.heads * d.head_width),
            "post_attention_layernorm": (d.width,),
            "mlp.gate_proj": (d.hidden, d.width),
            "mlp.up_proj": (d.hidden, d.width),
            "mlp.down_proj": (d.width, d.hidden),
        }
        shapes += [(f"model.layers.{i}.{part}.weight", shape) for part, shape in parts.items()]
    shapes.append(("model.norm.weight", (d.width,)))
    shapes += [] if d.tied else [("lm_head.weight", (d.vocabulary, d.width))]
    return [(each, shape, "bfloat16") for each, shape in shapes]
