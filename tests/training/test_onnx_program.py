"""Translation to ONNX: every primitive's rule computes in onnxruntime what JAX computes, for batches of any length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from longhaul.training import onnx_program
from tests.helpers.libraries import library

library("onnx")
onnxruntime = library("onnxruntime")

Given = dict[str, Any]

DRAW = np.random.default_rng(0)

INPUTS: Given = {
    "x": DRAW.normal(size=(5, 4, 6)).astype(np.float32),
    "y": DRAW.uniform(0.1, 0.9, size=(5, 4, 6)).astype(np.float32),
    "i": DRAW.integers(-9, 9, (5, 7), np.int32),
    "u": DRAW.integers(0, 2**32, (5, 7), np.uint32),
    "small": DRAW.integers(0, 255, (5, 7), np.uint8),
    "b": DRAW.random((5, 7)) < 0.5,
    "image": DRAW.normal(size=(5, 9, 8, 3)).astype(np.float32),
}
KERNEL = DRAW.normal(size=(6, 3)).astype(np.float32)
CONV = DRAW.normal(size=(3, 2, 3, 5)).astype(np.float32)


def of_x(*functions: Callable[..., Any]) -> Callable[[Given], Given]:
    return lambda g: {f"{k}": f(g["x"], g["y"]) for k, f in enumerate(functions)}


def of_words(*functions: Callable[..., Any]) -> Callable[[Given], Given]:
    return lambda g: {f"{k}": f(g["i"], g["u"], g["small"], g["b"]) for k, f in enumerate(functions)}


def loop(x: jax.Array, reverse: bool) -> tuple[jax.Array, jax.Array]:
    return lax.scan(lambda c, row: (c * 0.5 + row, c - row), x[:, 0], jnp.moveaxis(x, 1, 0), reverse=reverse)


def patch(image: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(image, CONV, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pooled(image: jax.Array) -> jax.Array:
    return lax.reduce_window(image, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def per_row(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.vmap(function)


CASES: dict[str, Callable[[Given], Given]] = {
    "functions": of_x(
        lambda x, y: jnp.exp(-x) + jnp.log(y) + jnp.tanh(x) + lax.erf(x) + jnp.sqrt(y) + jnp.abs(x) + jnp.sign(x),
        lambda x, y: jnp.floor(x) + jnp.ceil(y) + jnp.round(3 * x) + lax.round(4 * x) + jax.nn.sigmoid(x),
        lambda x, y: jnp.log1p(y) + jnp.expm1(x) + jnp.exp2(x) + lax.erfc(x) + lax.rsqrt(y),
        lambda x, y: lax.integer_pow(x, 3) + x**2 + y**-2 + lax.rem(x, y),
        lambda x, y: jnp.sin(x) + jnp.cos(x) + jnp.tan(y) + jnp.arcsin(y) + jnp.arccos(y) + jnp.arctan(x),
        lambda x, y: jnp.sinh(y) + jnp.cosh(y) + y**x + jnp.maximum(x, y) / jnp.minimum(x, y),
        lambda x, y: jnp.isfinite(x / jnp.round(y)),
        lambda x, y: lax.reduce_precision(x, 8, 7),
        lambda x, y: lax.optimization_barrier(x) + lax.stop_gradient(y) + jnp.copy(x) + jnp.square(x),
        lambda x, y: jax.nn.gelu(x) + jax.nn.silu(x) + jax.nn.softmax(x) + lax.clamp(-0.5, x, 0.5),
        lambda x, y: jax.checkpoint(jnp.tanh)(x) + checkpoint_name(x, "x"),
        lambda x, y: lax.cumsum(x, axis=2) + lax.cumsum(y, axis=1, reverse=True),
    ),
    "words": of_words(
        lambda i, u, s, b: (i >> 2 & 3) + (i << 3 | 5) + (i ^ 7) + ~i + lax.shift_right_logical(i, 3) // 2,
        lambda i, u, s, b: (u >> 5 & 31) + u * 3,
        lambda i, u, s, b: s + s // 3 - s % 7,
        lambda i, u, s, b: s << 1,
        lambda i, u, s, b: ~b & (i > 0) | (b ^ (s >= 9)),
        lambda i, u, s, b: lax.div(i, 4) + lax.rem(i, 4) + abs(i),
        lambda i, u, s, b: jnp.where(b, i, -i),
        lambda i, u, s, b: jnp.where(b, s, s + 1),
        lambda i, u, s, b: jnp.where(i > 0, b, ~b),
        lambda i, u, s, b: (i == 3) | (s != 4) & (u < 5) | (i <= -5),
        lambda i, u, s, b: jnp.sum(b, axis=1) + jnp.sum(s, axis=1) + jnp.max(i, axis=1),
        lambda i, u, s, b: b.any(1) | b.all(1),
        lambda i, u, s, b: jnp.argmax(b, axis=1) + jnp.argmin(s, axis=1),
        lambda i, u, s, b: lax.select_n(jnp.clip(i, 0, 2), i, i + 1, i + 2),
        lambda i, u, s, b: i.astype(jnp.uint8),
        lambda i, u, s, b: u.astype(jnp.int32).astype(jnp.float32) * 1e-9,
        lambda i, u, s, b: jnp.prod(i, axis=1),
    ),
    "shapes": of_x(
        lambda x, y: x.reshape(-1, 3, 8).swapaxes(1, 2)[:, 1:7:2],
        lambda x, y: jnp.concatenate([x, y], axis=1)[:, ::-1],
        lambda x, y: jnp.stack([x, y], axis=2),
        lambda x, y: jnp.stack(jnp.unstack(x, axis=1)[::-1]).swapaxes(0, 1),
        lambda x, y: jnp.split(x, [2, 5], axis=2)[1],
        lambda x, y: jnp.pad(x, ((0, 0), (1, 2), (0, 3)), constant_values=2),
        lambda x, y: jnp.tile(x, (1, 2, 1)),
        lambda x, y: x + jnp.broadcast_to(jnp.arange(6.0), x.shape),
        lambda x, y: lax.broadcasted_iota(jnp.int32, x.shape, 0),
        lambda x, y: lax.broadcasted_iota(jnp.float32, (x.shape[0], 2000), 1),
        lambda x, y: lax.expand_dims(x, (1,))[:, :, :, 2],
        lambda x, y: jnp.ones((1, 5000)) * x[:, 0, :1],
    ),
    "products": of_x(
        lambda x, y: x @ KERNEL,
        lambda x, y: jnp.einsum("bij,bkj->bik", x, y),
        lambda x, y: lax.dot_general(KERNEL, x, (((0,), (2,)), ((), ()))).swapaxes(0, 1),
        lambda x, y: (x.astype(jnp.bfloat16) @ KERNEL.astype(jnp.bfloat16)).astype(jnp.float32),
    ),
    "order": of_x(
        lambda x, y: jnp.sort(x, axis=1), lambda x, y: jnp.argsort(x, axis=2), lambda x, y: lax.top_k(x, 3)[0],
        lambda x, y: lax.top_k(x, 3)[1], lambda x, y: jnp.min(x, axis=(1, 2)) + jnp.mean(y, axis=(1, 2)),
    ),
    "places": of_x(
        lambda x, y: jnp.take(x, np.array([3, 0, 3]), axis=1), lambda x, y: x[:, np.array([1, 2]), np.array([0, 5])],
        lambda x, y: per_row(lambda x, y: x[jnp.argmax(y[:, 0])])(x, y),
        lambda x, y: per_row(lambda x, y: jnp.take_along_axis(x, jnp.argsort(y, axis=1), axis=1))(x, y),
        lambda x, y: jnp.asarray(KERNEL)[jnp.argmax(y, axis=2)], lambda x, y: loop(x, False)[0],
        lambda x, y: jnp.moveaxis(loop(x, False)[1], 0, 1), lambda x, y: jnp.moveaxis(loop(x, True)[1], 0, 1),
    ),
    "images": lambda g: {"patch": patch(g["image"]), "pooled": pooled(g["image"])},
}  # fmt: skip


def primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in equation.params.values():
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from primitives(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_computes_what_jax_computes(name: str) -> None:
    forms = {key: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for key, x in INPUTS.items()}
    model = onnx_program.translate(CASES[name], forms, "")
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    for count in (5, 1):
        given = {key: x[:count] for key, x in INPUTS.items()}
        wanted = jax.jit(CASES[name])(given)
        for out, x in zip(session.get_outputs(), session.run(None, given), strict=True):
            assert x.dtype == wanted[out.name].dtype, out.name
            close = 0.02 if (name, out.name) == ("products", "3") else 2e-5  # bfloat16
            np.testing.assert_allclose(x, wanted[out.name], rtol=close, atol=close, err_msg=out.name)


def test_every_rule_has_a_case() -> None:
    covered = {p for case in CASES.values() for p in primitives(jax.make_jaxpr(case)(INPUTS).jaxpr)}
    assert onnx_program.RULES.keys() - covered == set()


def test_operations_without_a_rule_are_named() -> None:
    form = {"x": jax.ShapeDtypeStruct((3, 3), jnp.float32)}
    with pytest.raises(ValueError, match="computes cholesky, which --to onnx does not translate; take --to jax"):
        onnx_program.translate(lambda given: {"y": jnp.linalg.cholesky(given["x"])}, form, "")
    with pytest.raises(ValueError, match="has a loop of 513 steps; --to onnx takes 512"):
        onnx_program.translate(lambda g: {"y": lax.fori_loop(0, 513, lambda i, x: x * 0.9, g["x"])}, form, "")
