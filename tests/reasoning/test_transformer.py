"""Language models: transformers' logits, padding, rematerialisation, precision, the model axis."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longhaul.reasoning import transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.runtime import mesh as meshes
from longhaul.runtime import partition
from tests.helpers import reference_logits as reference
from tests.helpers.quick import language_model, quick

TINY = dataclasses.replace(reference.CONFIGS["qwen3"], layers=2)
FEW = ("llama", "llama3-rope", "qwen2", "qwen3-untied")
"""Families that are not slow."""
SLOW = pytest.mark.slow
ALL = np.ones(reference.TOKENS.shape, bool)
forward = quick(transformer.forward, static_argnums=0)


@pytest.fixture(autouse=True)
def rolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in one loop, which compiles faster. A test below has them one by one."""
    monkeypatch.setattr(transformer, "UNROLLED", 0)


def relative(found: Any, wanted: Any) -> float:
    return float(np.max(np.abs(np.asarray(found) - np.asarray(wanted))) / np.max(np.abs(wanted)))


# ------------------------------------------------------------------------------------------------ transformers' files


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else SLOW) for name in reference.CONFIGS])
def test_logits_are_those_that_transformers_gave(name: str) -> None:
    config = reference.CONFIGS[name]
    with np.load(reference.STORED) as stored:
        wanted = stored[name]
    found = forward(config, reference.params(config), reference.TOKENS, ALL)
    assert found.dtype == jnp.float32
    assert relative(found, wanted) < 2e-4
    plain = dataclasses.replace(config, rope_scaling=None)
    if config.rope_scaling is not None:  # the reference can tell one rope from another
        assert relative(forward(plain, reference.params(config), reference.TOKENS, ALL), wanted) > 2e-3


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_stored_reference_outputs_are_those_of_transformers(tmp_path: Path) -> None:
    file = tmp_path / "now.npz"
    subprocess.run([sys.executable, reference.__file__, str(file)], check=True)
    with np.load(file) as now, np.load(reference.STORED) as stored:
        for name in reference.CONFIGS:
            assert relative(now[name], stored[name]) < 1e-5


# ------------------------------------------------------------------------------------------------------------ padding


@functools.cache
def padded() -> tuple[np.ndarray, np.ndarray]:
    """Two rows, of 10 and of 6 tokens behind 4 of padding."""
    mask = np.arange(10)[None, :] >= np.array([[0], [4]])
    return np.where(mask, reference.TOKENS[:, :10], 0), mask


def test_padding_changes_nothing() -> None:
    (rows, mask), params = padded(), reference.params(TINY)
    found = forward(TINY, params, rows, mask)
    other = forward(TINY, params, np.where(mask, rows, 17), mask)
    alone = forward(TINY, params, rows[1:, 4:], mask[1:, 4:])
    assert relative(found[1, 4:], alone[0]) < 2e-6
    np.testing.assert_array_equal(found[1, 4:], other[1, 4:])


def test_layers_one_by_one_are_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    params = reference.params(TINY)
    wanted = forward(TINY, params, reference.TOKENS, ALL)
    monkeypatch.setattr(transformer, "UNROLLED", 4)
    found = quick(lambda params: transformer.forward(TINY, params, reference.TOKENS, jnp.asarray(ALL)))(params)
    assert relative(found, wanted) < 2e-6


def test_no_token_sees_what_follows() -> None:
    params, rows = reference.params(TINY), reference.TOKENS
    changed = rows.copy()
    changed[:, 12:] = (changed[:, 12:] + 1) % 31
    one, two = (forward(TINY, params, each, ALL) for each in (rows, changed))
    np.testing.assert_array_equal(one[:, :12], two[:, :12])
    assert relative(one[:, 12:], two[:, 12:]) > 0.01


# -------------------------------------------------------------------------------------------------- memory, precision


@pytest.mark.slow
def test_rematerialisation_changes_no_gradient_and_bfloat16_little() -> None:
    params, rows = reference.params(TINY), reference.TOKENS

    @functools.partial(quick, static_argnums=0)
    def gradient(config: ModelConfig, params: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = transformer.forward(config, params, rows, jnp.asarray(ALL))
            return jnp.mean(jnp.square(jax.nn.log_softmax(logits)))

        return jax.grad(loss)(params)

    wanted = gradient(TINY, params)
    found = gradient(dataclasses.replace(TINY, remat="full"), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), found, wanted)
    exact = forward(TINY, params, rows, ALL)
    rounded = forward(dataclasses.replace(TINY, precision="bf16"), params, rows, ALL)
    assert rounded.dtype == jnp.float32
    assert 1e-5 < relative(rounded, exact) < 0.05


def test_a_model_is_split_over_the_model_axis_and_says_the_same() -> None:
    mesh = meshes.make_mesh(1, 2)
    params = reference.params(TINY)
    specs = partition.specs(params, 2)
    layers = specs["layers"]
    assert layers["query"] == layers["up"] == PartitionSpec(None, None, "model")
    assert layers["out"] == layers["narrow"] == PartitionSpec(None, "model", None)
    split = jax.device_put(params, partition.shardings(params, mesh))
    assert split["layers"]["up"].addressable_data(0).shape == (2, 64, 48)
    assert relative(forward(TINY, split, reference.TOKENS, ALL), forward(TINY, params, reference.TOKENS, ALL)) < 2e-6


def test_a_model_begins_as_its_shapes_say() -> None:
    params = language_model(TINY)
    assert jax.tree.map(jnp.shape, params) == transformer.shapes(TINY)
    assert transformer.size(TINY) == sum(leaf.size for leaf in jax.tree.leaves(params))
    # By hand: 23 x 64 embedded, 2 layers of 4 x 64 x 64 and 3 x 64 x 192 with 2 norms of 64 and 2 of 32, a norm.
    assert transformer.size(ModelConfig()) == 23 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 192 + 2 * 64 + 2 * 32) + 64
    layers, root = params["layers"], 1 / np.sqrt(2 * TINY.layers)
    assert float(jnp.std(layers["up"])) == pytest.approx(1 / np.sqrt(TINY.width), rel=0.1)
    assert float(jnp.std(layers["narrow"])) == pytest.approx(root / np.sqrt(TINY.hidden), rel=0.1)
    with pytest.raises(ValueError, match="head_dim is 15"):
        transformer.init(jax.random.key(0), dataclasses.replace(TINY, head_dim=15))


def adapted(rank: int = 3) -> tuple[ModelConfig, Any]:
    """A model with LoRA's factors, none of them zero."""
    config = dataclasses.replace(reference.CONFIGS["llama"], layers=2, lora=rank)
    params = transformer.init(jax.random.key(2), config)
    learnt, rest = transformer.split(config, params)
    learnt = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(3), x.shape), learnt)
    return config, transformer.joined(learnt, rest)


@pytest.mark.slow
def test_adapters_are_their_merged_model_and_begin_as_none() -> None:
    config, params = adapted()
    plain = dataclasses.replace(config, lora=0)
    tokens, ones = reference.TOKENS[:2], ALL[:2]
    merged = {**params, "layers": transformer.merged(config, params["layers"])}
    wanted = forward(plain, merged, tokens, ones)
    assert relative(forward(config, params, tokens, ones), wanted) < 1e-4  # rounding, by the machine: 4e-6 to 4e-5
    _, rest = transformer.split(config, params)
    assert relative(forward(plain, rest, tokens, ones), wanted) > 1e-2
    begun = transformer.init(jax.random.key(2), config)
    _, kernels = transformer.split(config, begun)
    np.testing.assert_array_equal(forward(config, begun, tokens, ones), forward(plain, kernels, tokens, ones))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "none"])
def test_frozen_kernels_are_rounded_and_the_program_has_no_wider_copy_of_them(remat: str) -> None:
    config = dataclasses.replace(reference.CONFIGS["llama"], layers=6, lora=3, remat=remat)
    rounding = dataclasses.replace(config, frozen="bf16")
    params = transformer.init(jax.random.key(2), rounding)
    learnt, rest = transformer.split(rounding, params)
    plain_learnt, plain = transformer.split(config, transformer.init(jax.random.key(2), config))
    jax.tree.map(np.testing.assert_array_equal, learnt, plain_learnt)
    jax.tree.map(lambda x, wide: np.testing.assert_array_equal(x, wide.astype(x.dtype)), rest, plain)
    blank, zeros = transformer.split(rounding, transformer.init(jax.random.key(2), rounding, blank=True))
    jax.tree.map(np.testing.assert_array_equal, blank, learnt)
    jax.tree.map(lambda x, zero: np.testing.assert_array_equal(np.zeros(x.shape, x.dtype), zero), rest, zeros)
    kernels = {name: x.shape for name, x in rest["layers"].items() if x.dtype == jnp.bfloat16}
    assert set(kernels) == set(transformer.ADAPTED)

    def total(learnt: Any, rest: Any) -> jax.Array:
        hidden, _ = transformer.trunk(rounding, transformer.joined(learnt, rest), reference.TOKENS[:2], ALL[:2])
        return jnp.sum(hidden * jnp.arange(hidden.size, dtype=jnp.float32).reshape(hidden.shape))

    text = jax.jit(jax.grad(total)).lower(learnt, rest).compile().as_text()
    sizes = [",".join(map(str, size)) for size in kernels.values()]
    assert [f"bf16[{size}]" in text for size in sizes] == [True] * 7
    assert [size for size in sizes if f"f32[{size}]" in text] == []


def test_tokens_after_a_shared_prompt_are_those_of_the_whole_text() -> None:
    config = dataclasses.replace(reference.CONFIGS["qwen3"], layers=2)
    params, rng = language_model(config), np.random.default_rng(0)
    prompt, text = rng.integers(1, config.vocabulary, (2, 5)), rng.integers(1, config.vocabulary, (6, 4))
    asked = np.array([[True] * 5, [False, False, True, True, True]])
    read = np.arange(4)[None] < np.array([4, 3, 1, 4, 2, 4])[:, None]

    @quick
    def both(params: Any) -> tuple[jax.Array, ...]:
        first, after = transformer.continued(config, params, *map(jnp.asarray, (prompt, asked, text, read)))
        whole = jnp.concatenate([jnp.repeat(jnp.asarray(prompt), 3, axis=0), jnp.asarray(text)], axis=1)
        mask = jnp.concatenate([jnp.repeat(jnp.asarray(asked), 3, axis=0), jnp.asarray(read)], axis=1)
        return first, after, transformer.trunk(config, params, whole, mask)[0]

    first, after, wanted = map(np.asarray, both(params))
    assert relative(first[asked], wanted[::3, :5][asked]) < 1e-5
    assert relative(after[read], wanted[:, 5:][read]) < 1e-5
