"""Names that the settings of a network may take, without JAX, so that flags start fast."""

from __future__ import annotations

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

PRECISIONS = ("fp32", "bf16")
"""Types that a torso computes in."""

REMATS = ("none", "full", "dots", "dots-no-batch")
"""Values of a part kept for its gradient: all; none but its input; all products; products with a kernel."""
