"""Encoders of images by convolutions: the network of DQN, the deep one of IMPALA, MinAtar's.

- `nature`: 32 kernels of 8x8 every 4 pixels, 64 of 4x4 every 2, 64 of 3x3, and 512 features of all that (Mnih et al.
  2015, Nature 518, "Methods").
- `impala`: three sections of 16, 32 and 32 channels, each a convolution of 3x3, the maximum of 3x3 every 2 pixels, and
  two residual blocks; and 256 features of all that (Espeholt et al. 2018, arXiv 1802.01561, figure 3, right, without
  its language and its LSTM; memory is actor_critic.py's).
- `minatar`: 16 kernels of 3x3 and 128 features of all that, for images of 10x10 (Young and Tian 2019, arXiv
  1903.03176).

An observation is one image, [H, W, C] or, like Atari's stacked frames, [C, H, W]: the smaller of the first axis and the
last holds the channels. Bytes are scaled to 0 to 1 here, so that rollouts keep them as bytes; numbers of other types
are taken as they are.

Widths are the papers'; `hidden_dim` and `num_layers` do not matter. Names of layers follow the rule of partition.py:
`layer_0` is split by its outputs, `layer_1` by its inputs, and so on in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.networks.config import CONVOLUTIONS
from longhaul.networks.layers import (
    EPSILON,
    Encoder,
    Initialise,
    affine,
    along_last,
    init_dense,
    init_norm,
    rematerialised,
)
from longhaul.types import Key, Params, PyTree, platform

Stage = tuple[int, int, int]

NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Convolutions of `nature`: (kernels, their side in pixels, the stride)."""

STACKS: dict[str, tuple[Stage, ...]] = {"nature": NATURE, "minatar": ((16, 3, 1),)}
"""Convolutions of each encoder that is a plain stack of them."""

LEAST = {"nature": 36, "minatar": 3, "impala": 1}
"""Smallest height and width of an image, in pixels."""

SECTIONS, BLOCKS = (16, 32, 32), 2
"""Channels of the sections of `impala`, and residual blocks of each."""

FEATURES = {"nature": 512, "impala": 256, "minatar": 128}


class Image(NamedTuple):
    """Layout of an image."""

    height: int
    width: int
    channels: int
    first: bool  # the channels are the first axis


def image(observation: PyTree) -> Image:
    """The layout of an image. ValueError where the observation (a pytree of shapes) is none."""
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(observation)]
    if len(shapes) != 1 or len(shapes[0]) != 3:
        raise ValueError(
            f"torso {' or '.join(CONVOLUTIONS)} takes one image, [H, W, C] or [C, H, W], and this environment's "
            f"observation is {' and '.join(map(str, shapes))}; choose torso mlp"
        )
    first, middle, last = shapes[0]
    if first < last:
        return Image(middle, last, first, True)
    return Image(first, middle, last, False)


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1, padding: str = "VALID") -> jax.Array:
    """Cross-correlation of [N, H, W, C] with [side, side, C, outputs] -> [N, H', W', outputs].

    Without `padding` H' = (H - side) // stride + 1; with "SAME" H' = ceil(H / stride).
    """
    if platform() == "cpu":
        return im2col_convolution(x, kernel, stride, padding)
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def im2col_convolution(x: jax.Array, kernel: jax.Array, stride: int, padding: str) -> jax.Array:
    """`convolve` (the same shapes) as one product of matrices: the pixels below a kernel are laid side by side.

    XLA's own convolutions have slow gradients on a CPU within a loop (jax issue 12868), and an update's minibatches are
    one: measured 2.4 ms against 0.2 for a row of `nature` at 42x42.
    """
    side, _, _, outputs = kernel.shape
    if padding == "SAME":
        x = jnp.pad(x, ((0, 0), *(_same_padding(length, side, stride) for length in x.shape[1:3]), (0, 0)))
    down, across = ((length - side) // stride + 1 for length in x.shape[1:3])
    covered = [
        x[:, i : i + (down - 1) * stride + 1 : stride, j : j + (across - 1) * stride + 1 : stride]
        for i in range(side)
        for j in range(side)
    ]
    return jnp.concatenate(covered, axis=-1) @ kernel.reshape(-1, outputs)


def _same_padding(length: int, side: int, stride: int) -> tuple[int, int]:
    """Padding before and after, for ceil(length / stride) outputs."""
    lacking = max((-(-length // stride) - 1) * stride + side - length, 0)
    return lacking // 2, lacking - lacking // 2


def max_pool(x: jax.Array) -> jax.Array:
    """Maximum of 3x3 every 2 pixels: [N, H, W, C] -> [N, ceil(H / 2), ceil(W / 2), C]."""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def encoder(
    observation: PyTree, kind: str, kernels: Initialise, *, dtype: Any, remat: str = "none", norm: bool = False
) -> Encoder:
    """Encoder for observations like `observation` (a pytree of ShapeDtypeStruct), with FEATURES[kind] features.

    Computing is in `dtype`, parameters are float32. `remat`, one of config.REMATS: parts of a stack's layer, or of a
    section of `impala`, that are computed again for the gradient. `norm` normalises the channels after each convolution
    of a stack, and all features, before ReLU. ValueError where the observation is no such image.
    """
    seen = check(observation, kind)
    sides = sizes(kind, seen)
    stack = STACKS.get(kind)
    channels = stack[-1][0] if stack else SECTIONS[-1]
    last = len(sides)

    def init(key: Key) -> Params:
        convolutions, dense = jax.random.split(key)
        if stack:
            params = _init_stack(convolutions, seen.channels, kernels, stack, norm)
        else:
            params = _init_impala(convolutions, seen.channels, kernels)
        inputs = math.prod(sides[-1]) * channels
        params |= {f"norm_{last}": init_norm(FEATURES[kind])} if norm else {}
        return params | {f"layer_{last}": init_dense(dense, (inputs, FEATURES[kind]), kernels)}

    def apply(params: Params, observed: PyTree) -> jax.Array:
        (x,) = jax.tree.leaves(observed)
        lead = x.shape[:-3]
        x = x.reshape(-1, *x.shape[-3:])
        x = jnp.moveaxis(x, 1, -1) if seen.first else x
        scale = np.float32(1 / 255) if x.dtype == jnp.uint8 else np.float32(1)
        x = (x.astype(jnp.float32) * scale).astype(dtype)
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        x = _stack(params, x, stack, remat) if stack else _impala(params, x, remat)
        x = affine(x.reshape(len(x), -1), **params[f"layer_{last}"])
        x = jax.nn.relu(_layer_norm(params[f"norm_{last}"], x) if norm else x)
        return x.reshape(*lead, -1)

    return Encoder(init, apply)


def check(observation: PyTree, kind: str) -> Image:
    """The image that an encoder of this kind would see. ValueError where the observation is none, or too small."""
    if kind not in CONVOLUTIONS:
        raise ValueError(f"torso is {kind!r}; of images it must be one of {', '.join(CONVOLUTIONS)}")
    seen = image(observation)
    if min(sizes(kind, seen)[-1]) < 1:
        raise ValueError(
            f"the image is {seen.height}x{seen.width}, and torso {kind} needs {LEAST[kind]}x{LEAST[kind]} at least; "
            "choose torso impala"
        )
    return seen


def sizes(kind: str, seen: Image) -> list[tuple[int, int]]:
    """Height and width after each convolution of a stack, or after each section of `impala`."""
    sides, now = [], (seen.height, seen.width)
    if kind not in STACKS:
        for _ in SECTIONS:
            now = (-(-now[0] // 2), -(-now[1] // 2))
            sides.append(now)
        return sides
    for _, side, stride in STACKS[kind]:
        now = ((now[0] - side) // stride + 1, (now[1] - side) // stride + 1)
        sides.append(now)
    return sides


def _layer_norm(norm: Params, x: jax.Array) -> jax.Array:
    """`layers.layer_norm`; its gradient has other last bits, which old runs continue with."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
    scale, bias = along_last(norm["scale"], x), along_last(norm["bias"], x)
    return ((wide - mean) * jax.lax.rsqrt(variance + EPSILON) * scale + bias).astype(x.dtype)


def _init_stack(key: Key, channels: int, kernels: Initialise, stack: Sequence[Stage], norm: bool) -> Params:
    params = {}
    for i, (outputs, side, _) in enumerate(stack):
        params[f"layer_{i}"] = init_dense(jax.random.fold_in(key, i), (side, side, channels, outputs), kernels)
        params |= {f"norm_{i}": init_norm(outputs)} if norm else {}
        channels = outputs
    return params


def _init_impala(key: Key, channels: int, kernels: Initialise) -> Params:
    params = {}
    for i, outputs in enumerate(SECTIONS):
        keys = iter(jax.random.split(jax.random.fold_in(key, i), 1 + 2 * BLOCKS))
        section: dict[str, Any] = {"conv": init_dense(next(keys), (3, 3, channels, outputs), kernels)}
        for b in range(BLOCKS):
            section[f"block_{b}"] = {
                f"layer_{j}": init_dense(next(keys), (3, 3, outputs, outputs), kernels) for j in range(2)
            }
        params[f"section_{i}"] = section
        channels = outputs
    return params


def _convolution(layer: Params, x: jax.Array, stride: int = 1, padding: str = "SAME") -> jax.Array:
    return convolve(x, layer["kernel"], stride, padding) + layer["bias"].reshape(1, 1, 1, -1)


def _stack(params: Params, x: jax.Array, stack: Sequence[Stage], remat: str) -> jax.Array:
    for i, (_, _, stride) in enumerate(stack):

        def part(layer: Params, norm: Params, x: jax.Array, stride: int = stride) -> jax.Array:
            x = _convolution(layer, x, stride, "VALID")
            return jax.nn.relu(_layer_norm(norm, x) if norm else x)

        x = rematerialised(part, remat)(params[f"layer_{i}"], params.get(f"norm_{i}", {}), x)
    return x


def _section(params: Params, x: jax.Array) -> jax.Array:
    x = max_pool(_convolution(params["conv"], x))
    for b in range(BLOCKS):
        block = params[f"block_{b}"]
        inner = _convolution(block["layer_0"], jax.nn.relu(x))
        x = x + _convolution(block["layer_1"], jax.nn.relu(inner))
    return x


def _impala(params: Params, x: jax.Array, remat: str) -> jax.Array:
    for i in range(len(SECTIONS)):
        x = rematerialised(_section, remat)(params[f"section_{i}"], x)
    return jax.nn.relu(x)
