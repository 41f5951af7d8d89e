"""Configuration of a network: plain data, without JAX, so that flags start fast."""

from __future__ import annotations

from dataclasses import dataclass

from longhaul.runtime.config_fields import CHANGEABLE, setting

ENCODERS = ("latent", "wayformer", "mtr")
"""Torsos with attention: networks/attention.py."""

CONVOLUTIONS = ("nature", "impala", "minatar")
"""Torsos on pixels: networks/conv.py."""

TORSOS = ("mlp", "deepset", *ENCODERS, *CONVOLUTIONS)

ACTIVATIONS = ("tanh", "relu", "silu", "gelu")

INITS = ("orthogonal", "lecun")
"""Initialisers of kernels: orthogonal with a scale for each layer (0.01 for the policy's), or LeCun's normal."""

SMALLEST, LARGEST = 0.01, 1000
"""Bounds of a network's size, in millions of parameters; the rule is tested from 0.3 to 25."""

DEEPEST = 4096
"""Layers of a network, at most: each one is traced."""

PRECISIONS = ("fp32", "bf16")
"""Types that a torso computes in."""

REMATS = ("none", "full", "dots", "dots-no-batch")
"""Values of a part kept for its gradient: all; none but its input; all products; products with a kernel."""


@dataclass(frozen=True)
class NetworkConfig:
    """Network of an actor and a critic; an algorithm that lacks some of the fields leaves them as they are."""

    torso: str = setting(
        "mlp",
        "network before the heads; deepset: neighbours without order; latent, wayformer, mtr: by attention; "
        "module:name: your own",
        choices=TORSOS,
        own=True,
    )
    hidden_dim: int = setting(64, "width of a layer", least=1)
    num_layers: int = setting(2, "layers of the torso, or blocks of an encoder by attention", least=1, most=DEEPEST)
    model_size: float | None = setting(
        None,
        "millions of parameters, 0.3 to 25, from which hidden-dim and num-layers follow; none: they count",
        least=SMALLEST,
        most=LARGEST,
        why=" (millions of parameters)",
    )
    activation: str = setting("tanh", "activation between layers of mlp and deepset", choices=ACTIVATIONS)
    shared: bool = setting(False, "one torso for actor and critic of mlp and deepset, without memory, too")
    init: str = setting("orthogonal", "first weights of mlp, deepset and heads; lecun: Flax's default", choices=INITS)
    memory: int = setting(0, "width of the recurrent unit; 0: none", least=0)
    precision: str = setting(
        "fp32",
        "type of the torso's computation; parameters and losses are fp32",
        choices=PRECISIONS,
        resume=CHANGEABLE,
    )
    remat: str = setting(
        "none",
        "parts of the torso computed again for its gradient, which saves memory: none, all, all but products",
        choices=REMATS,
        resume=CHANGEABLE,
        bare=("full", "none"),  # the flag was a switch once
    )
