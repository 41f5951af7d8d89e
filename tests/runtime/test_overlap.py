"""Gradients in buckets: their order and sizes, their mean, and their place in the compiled program."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longhaul.diagnostics import hlo
from longhaul.runtime import mesh as meshes
from longhaul.runtime import overlap
from longhaul.types import PyTree

LAYERS, WIDTH = 4, 256

Params = dict[str, jax.Array]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of these tests is a bucket."""
    monkeypatch.setattr(overlap, "BUCKET", 4 * WIDTH * WIDTH)


def params() -> Params:
    """Layers in another order than that of their names."""
    names = ("c", "a", "d", "b")
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {name: jax.random.normal(key, (WIDTH, WIDTH)) / 8.0 for name, key in zip(names, keys, strict=True)}


def loss(given: Params, x: jax.Array) -> jax.Array:
    for name in ("c", "a", "d", "b"):
        x = jax.nn.tanh(x @ given[name])
    return jnp.sum(x * x)


def gradient(given: Params, x: jax.Array) -> tuple[Params, None]:
    return jax.grad(loss)(given, x), None


def update(given: Params, x: jax.Array) -> Params:
    grads, _ = gradient(given, x)
    grads = overlap.mean(grads, lambda: overlap.ready(gradient, given, x))
    return jax.tree.map(lambda p, g: p - 0.01 * g, given, grads)


def program(trips: int) -> jax.stages.Compiled:
    """So many updates on two devices."""
    mesh = meshes.make_mesh(2)

    def run(given: Params, x: jax.Array) -> Params:
        return jax.lax.fori_loop(0, trips, lambda i, now: update(now, x), given)

    everywhere = PartitionSpec()
    shards = meshes.per_shard(run, mesh, (everywhere, PartitionSpec(meshes.DATA)), everywhere)
    lowered = jax.jit(shards).lower(params(), jnp.ones((32, WIDTH)))
    return overlap.compiled(lowered, mesh)


def test_gradients_computed_first_are_sent_first() -> None:
    """The last layer's gradient; leaves are numbered by name."""
    assert overlap.ready(gradient, params(), jnp.ones((32, WIDTH))) == [1, 3, 0, 2]


def test_casts_after_the_last_product_keep_the_order() -> None:
    """Casts after the last product keep the order of the products."""

    def cast(given: Params, x: jax.Array) -> tuple[Params, None]:
        return jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradient(given, x)[0]), None

    assert overlap.ready(cast, params(), jnp.ones((32, WIDTH))) == [1, 3, 0, 2]


def test_a_bucket_is_sent_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "BUCKET", 100)
    assert overlap.buckets([60, 10, 100, 30, 40, 1], [5, 0, 3, 2, 1, 4]) == [[5, 0, 3, 2], [1, 4]]
    assert overlap.buckets([100, 100], [1, 0]) == [[1], [0]]
    assert overlap.buckets([100, 10, 14], [0, 1, 2]) == [[0, 1, 2]]  # the rest is less than a quarter


def test_the_mean_in_buckets_is_the_mean_bit_for_bit(small_buckets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given, x = params(), jax.random.normal(jax.random.key(1), (32, WIDTH))
    ended = program(3)(given, x)
    monkeypatch.setattr(overlap, "BUCKET", 2**30)
    for one, other in zip(jax.tree.leaves(ended), jax.tree.leaves(program(3)(given, x)), strict=True):
        np.testing.assert_array_equal(one, other)


def sequence(text: str) -> list[str]:
    """Products of the backward pass and all-reduces, in the order of the scheduled program."""
    assert "is_scheduled=true" in text
    (body,) = [part for part in text.split("\n\n") if " all-reduce(" in part]
    backward = r'= \S+ (all-reduce|dot|fusion)\(.*op_name="[^"]*(?:psum|transpose\(jvp[^"]*(?:dot_general|transpose))"'
    return ["all-reduce" if found == "all-reduce" else "product" for found in re.findall(backward, body)]


def test_all_reduces_begin_while_the_backward_pass_goes_on(small_buckets: None) -> None:
    """In the scheduled program of a CPU: after the last layer's gradient, not after that of the first."""
    text = program(3).as_text() or ""
    assert [each.bytes for each in hlo.crossings(text)] == [4 * WIDTH * WIDTH] * LAYERS
    order = sequence(text)
    sent = [place for place, each in enumerate(order) if each == "all-reduce"]
    assert len(sent) == LAYERS
    assert order.count("product") == 2 * LAYERS - 1  # two of each layer but the first
    for done, place in enumerate(sent[:-2], 1):
        assert "product" in order[place:], f"nothing is left to compute when all-reduce {done} begins"


def test_small_leaves_do_not_let_the_large_ones_of_several_buckets_meet(small_buckets: None) -> None:
    """Each layer with a bias, which is ready before its kernel, and travels by itself: a kernel waits for both."""

    def biased(given: PyTree, x: jax.Array) -> jax.Array:
        for name in ("c", "a", "d", "b"):
            x = jax.nn.tanh(x @ given[name]["kernel"] + given[name]["bias"][None])
        return jnp.sum(x * x)

    def descend(given: PyTree, x: jax.Array) -> PyTree:
        def gradient(given: PyTree, x: jax.Array) -> tuple[PyTree, None]:
            return jax.grad(biased)(given, x), None

        grads = overlap.mean(gradient(given, x)[0], lambda: overlap.ready(gradient, given, x))
        return jax.tree.map(lambda p, g: p - 0.01 * g, given, grads)

    given = {name: {"kernel": kernel, "bias": kernel[0]} for name, kernel in params().items()}
    everywhere = PartitionSpec()
    shards = meshes.per_shard(descend, meshes.make_mesh(2), (everywhere, PartitionSpec(meshes.DATA)), everywhere)
    text = overlap.compiled(jax.jit(shards).lower(given, jnp.ones((32, WIDTH))), meshes.make_mesh(2)).as_text() or ""
    kernel = 4 * WIDTH * WIDTH
    large = [each.bytes for each in hlo.crossings(text) if each.bytes >= kernel]
    assert len(large) == LAYERS and max(large) < 2 * kernel


def test_an_option_that_the_compiler_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = program(3).as_text() or ""
    monkeypatch.setitem(overlap.OPTIONS, "cpu", {"xla_gone_since_this_version": True})
    assert sequence(program(3).as_text() or "") == sequence(plain)


def test_few_gradients_travel_together() -> None:
    assert not overlap.several(params())
    text = program(3).as_text() or ""
    assert [each.bytes for each in hlo.crossings(text)] == [4 * LAYERS * WIDTH * WIDTH]


def test_a_single_shard_sends_nothing(small_buckets: None) -> None:
    def run(given: Params, x: jax.Array) -> Params:
        return update(given, x)

    everywhere, mesh = PartitionSpec(), meshes.make_mesh(1)
    shards = meshes.per_shard(run, mesh, (everywhere, everywhere), everywhere)
    made: Any = overlap.compiled(jax.jit(shards).lower(params(), jnp.ones((32, WIDTH))), mesh)
    assert hlo.crossings(made.as_text()) == []
