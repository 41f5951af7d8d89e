"""Encoders by attention: oracles in NumPy, what a set may not depend on, nearness, the dial, precision."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.config import recipes
from longhaul.config.resolve import resolve
from longhaul.config.run import Driving
from longhaul.networks import attention
from longhaul.networks.attention import HEAD, NEIGHBOURS, encoder
from longhaul.networks.config import ENCODERS
from longhaul.networks.layers import Encoder
from longhaul.runtime.config_fields import replaced
from longhaul.telemetry import sinks
from longhaul.training import loop
from tests.helpers.quick import quick

ITEMS = 20
KINDS = [pytest.param(kind, marks=() if kind == "latent" else pytest.mark.slow) for kind in ENCODERS]

SEEN = {
    "ego": jax.ShapeDtypeStruct((3,), jnp.float32),
    "grid": jax.ShapeDtypeStruct((2, 2, 2), jnp.int32),
    "items": jax.ShapeDtypeStruct((ITEMS, 5), jnp.float32),
    "others": jax.ShapeDtypeStruct((4, 2), jnp.float32),
}


def observation(*lead: int, seed: int = 0, present: float = 0.7) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)

    def items(count: int, features: int) -> jax.Array:
        x = rng.normal(size=(*lead, count, features))
        x[..., -1] = rng.random((*lead, count)) < present
        return jnp.asarray(x * x[..., -1:], jnp.float32)

    return {
        "ego": jnp.asarray(rng.normal(size=(*lead, 3)), jnp.float32),
        "grid": jnp.asarray(rng.integers(0, 3, size=(*lead, 2, 2, 2)), jnp.int32),
        "items": items(ITEMS, 5),
        "others": items(4, 2),
    }


@cache
def made(kind: str, width: int = 40, depth: int = 2, dtype: Any = jnp.float32, remat: str = "none") -> tuple[Any, ...]:
    """(apply, compiled; parameters with life in all of them; apply itself)."""
    built = encoder(SEEN, kind, width, depth, dtype=dtype, remat=remat)
    return quick(built.apply), lively(built), built.apply


def lively(built: Encoder) -> Any:
    """Parameters with life in all of them, without compiling what makes them."""
    rng = np.random.default_rng(1)

    def drawn(path: Any, leaf: Any) -> jax.Array:
        around = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(around + rng.normal(scale=0.15, size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(drawn, jax.eval_shape(built.init, jax.random.key(0)))


# ---------------------------------------------------------------------------------------------------------- oracles


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def norm(p: dict, x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def turned(head: np.ndarray, position: np.ndarray) -> np.ndarray:
    """A head's features as complex numbers, each turned by its frequency times x (the first half) or y."""
    frequency = 64.0 ** (np.arange(HEAD // 4) / (HEAD // 4 - 1))
    angle = np.concatenate([position[0] * frequency, position[1] * frequency])
    z = (head[: HEAD // 2] + 1j * head[HEAD // 2 :]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag])


def block_by_hand(p: dict, x: np.ndarray, context: Any, allowed: np.ndarray, at: Any = None) -> np.ndarray:
    """One block, query by query and head by head; `allowed` bool [Q, S]; `at` positions [S, 2] for relative ones."""
    queries = norm(p["norm_query"], x)
    keys = queries if context is None else norm(p["norm_key"], context)
    q, k, v = queries @ p["query"], keys @ p["key"], keys @ p["value"]
    out = np.zeros((len(x), q.shape[1]))
    for i in range(len(x)):
        there = np.flatnonzero(allowed[i])
        for h in range(q.shape[1] // HEAD):
            part = slice(h * HEAD, (h + 1) * HEAD)
            if at is None:
                logits = np.array([q[i, part] @ k[j, part] for j in there])
            else:  # by the difference of positions alone
                logits = np.array([turned(q[i, part], at[i] - at[j]) @ k[j, part] for j in there])
            weight = np.exp(logits / np.sqrt(HEAD))
            if len(there):
                out[i, part] = (weight / weight.sum()) @ v[there, part]
    x = x + out @ p["out"]
    return x + gelu(norm(p["norm_wide"], x) @ p["wide"] + p["wide_bias"]) @ p["narrow"] + p["narrow_bias"]


def by_hand(kind: str, params: Any, seen: dict[str, jax.Array], depth: int) -> np.ndarray:
    """The features of one observation in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    tokens, positions, vectors = [], [], []
    for i, name in enumerate(("ego", "grid", "items", "others")):
        x = np.asarray(seen[name], np.float64)
        own = p[f"embed_{i}"]
        rows = x[x[:, -1] > 0] if name in ("items", "others") else x.reshape(1, -1)
        value = gelu(rows @ own["kernel"] + own["bias"]) + own["kind"]
        tokens.append(value)
        positions.append(rows[:, :2] if name == "items" else np.zeros((len(rows), 2)))
        if name in ("ego", "grid"):
            vectors.append(value)
    x, at = np.concatenate(tokens), np.concatenate(positions)
    every = lambda a, b: np.ones((len(a), len(b)), bool)  # noqa: E731
    if kind == "mtr":
        far = ((at[:, None] - at[None]) ** 2).sum(-1)
        allowed = far <= np.sort(far, axis=1)[:, min(NEIGHBOURS, len(x)) - 1 :][:, :1]
    else:
        x = block_by_hand(p["reduce"], p["latents"] + sum(vectors), x, every(p["latents"], x))
        allowed = every(x, x)
    for i in range(depth):
        own = {name: jax.tree.map(lambda leaf, i=i: leaf[i], leaf) for name, leaf in p["blocks"].items()}
        x = block_by_hand(own, x, None, allowed, at if kind == "mtr" else None)
    if kind == "latent":
        return norm(p["norm"], x.mean(0))
    query = p["query"] + sum(vectors)
    return norm(p["norm"], block_by_hand(p["pool"], query, x, every(query, x))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_is_what_its_paper_says(kind):
    apply, params, _ = made(kind)
    seen = observation(3)
    features = apply(params, seen)
    assert features.shape == (3, 40)
    assert features.dtype == jnp.float32
    for i in range(3):
        expected = by_hand(kind, params, jax.tree.map(lambda x, i=i: x[i], seen), 2)
        np.testing.assert_allclose(features[i], expected, rtol=2e-3, atol=2e-4)
    deep = jax.tree.map(lambda x: x[None], seen)
    np.testing.assert_allclose(apply(params, deep)[0], features, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- sets


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_has_no_order(kind):
    apply, params, _ = made(kind)
    seen = observation(3)
    order = np.random.default_rng(2).permutation(ITEMS)
    turned_round = seen | {"items": seen["items"][:, order]}
    np.testing.assert_allclose(apply(params, turned_round), apply(params, seen), rtol=1e-4, atol=1e-5)
    moved = seen | {"items": seen["items"].at[:, :, 0].multiply(1.3)}
    assert float(jnp.abs(apply(params, moved) - apply(params, seen)).max()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_padding_counts_for_nothing_whatever_it_holds_and_however_much_there_is(kind):
    apply, params, _ = made(kind)
    seen = observation(3)
    there = seen["items"][..., -1:] > 0
    noise = jnp.where(there, seen["items"], 50.0).at[..., -1].set(seen["items"][..., -1])
    np.testing.assert_array_equal(apply(params, seen | {"items": noise}), apply(params, seen))
    noise = noise.at[..., 0].set(jnp.where(there[..., 0], noise[..., 0], jnp.nan))
    np.testing.assert_array_equal(apply(params, seen | {"items": noise}), apply(params, seen))
    longer = SEEN | {"items": jax.ShapeDtypeStruct((ITEMS + 9, 5), jnp.float32)}
    wider = quick(encoder(longer, kind, 40, 2, dtype=jnp.float32).apply)
    padded = seen | {"items": jnp.pad(seen["items"], ((0, 0), (0, 9), (0, 0)))}
    np.testing.assert_allclose(wider(params, padded), apply(params, seen), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_set_is_finite_and_gets_no_gradient(kind):
    _, params, apply = made(kind)
    seen = observation(3, present=0.0)
    seen["others"] = seen["others"].at[..., -1].set(1.0)
    target = jnp.asarray(np.random.default_rng(3).normal(size=(3, 40)), jnp.float32)

    def loss(params: Any, items: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.sum(apply(params, seen | {"items": items, "others": others}) * target)

    slope = quick(jax.value_and_grad(loss, (0, 1, 2)))
    value, (of_params, of_items, of_others) = slope(params, seen["items"], seen["others"])
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(of_params))
    np.testing.assert_array_equal(of_items, 0.0)
    assert all(not np.any(leaf) for leaf in of_params["embed_2"].values())
    assert np.any(of_others)
    assert all(np.any(leaf) for leaf in of_params["embed_3"].values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_observation_of_nothing_but_an_empty_set_is_finite(kind):
    built = encoder(SEEN["items"], kind, 32, 1, dtype=jnp.float32)
    params = lively(built)
    empty = jnp.zeros((2, ITEMS, 5))
    slope = quick(jax.value_and_grad(lambda p: jnp.sum(built.apply(p, empty)[..., 0])))
    features, of_params = slope(params)
    assert np.isfinite(features)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(of_params))
    assert not np.any(of_params["embed_0"]["kernel"])


def test_local_attention_looks_at_the_nearest_that_are_there():
    """A far item changes what the near ones become only through the pooling: never by attention to each other."""
    position = jnp.asarray(np.random.default_rng(4).uniform(-1, 1, (40, 2)), jnp.float32)
    present = jnp.arange(40) % 4 != 3
    tokens = attention.Tokens(jnp.zeros((40, 8)), present, position)
    near = np.asarray(attention._neighbour_mask(tokens))
    far = np.linalg.norm(np.asarray(position)[:, None] - np.asarray(position)[None], axis=-1)
    far[:, ~np.asarray(present)] = np.inf
    for i in range(40):
        assert set(np.flatnonzero(near[i])) == set(np.argsort(far[i])[:NEIGHBOURS])
    few = attention.Tokens(jnp.zeros((40, 8)), jnp.arange(40) < 5, position)
    np.testing.assert_array_equal(attention._neighbour_mask(few), np.tile(np.arange(40) < 5, (40, 1)))


# --------------------------------------------------------------------------------------------- sizes and precision


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_close(kind):
    apply, params, _ = made(kind)
    seen = observation(3)
    features = np.asarray(apply(params, seen))
    low = made(kind, dtype=jnp.bfloat16)[0](params, seen)
    assert low.dtype == jnp.float32
    error = np.sqrt(np.mean((low - features) ** 2) / np.mean(features**2))
    assert 1e-5 < error < 0.05, "bfloat16 has 8 bits"


@pytest.mark.slow
def test_with_remat_the_gradient_is_the_same_and_blocks_are_computed_twice():
    seen = observation(3)
    weights = jnp.asarray(np.random.default_rng(5).normal(size=(3, 40)), jnp.float32)
    found, products = [], []
    for remat in ("none", "full"):
        _, params, apply = made("latent", remat=remat)
        slope = jax.grad(lambda p, f=apply: jnp.sum(f(p, seen) * weights))
        found.append(jax.tree.leaves(quick(slope)(params)))
        products.append(str(jax.make_jaxpr(slope)(params)).count("dot_general"))
    for kept, again in zip(*found, strict=True):
        np.testing.assert_allclose(kept, again, rtol=1e-3, atol=1e-4)
    assert products[1] > products[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_encoder_tells_observations_apart(kind):
    """Also by their sets alone: what no feature shows, no policy learns."""
    built = encoder(SEEN, kind, 64, 2, dtype=jnp.float32)
    seen = observation(64)
    same = seen | {name: jnp.broadcast_to(seen[name][:1], seen[name].shape) for name in ("ego", "grid")}
    both = jax.tree.map(lambda one, other: jnp.stack([one, other]), seen, same)

    def begin(key: jax.Array) -> tuple[Any, jax.Array]:
        params = built.init(key)
        return params, built.apply(params, both)

    params, found = quick(begin)(jax.random.key(7))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    assert np.any(params["blocks"]["wide"][0] != params["blocks"]["wide"][1])
    for features, least in zip(found, (0.2, 0.05)):
        assert abs(float(jnp.sqrt(jnp.mean(features**2))) - 1.0) < 0.05
        assert float(jnp.std(features, axis=0).mean()) > least


def test_an_unknown_encoder_is_named():
    with pytest.raises(ValueError, match="encoder is 'lstm'; it must be one of latent, wayformer, mtr"):
        encoder(SEEN, "lstm", 32, 1, dtype=jnp.float32)


@pytest.mark.slow
def test_the_large_recipe_trains_when_it_is_made_small(tmp_path: Path) -> None:
    """Its observation, encoder, precision and losses, in a few updates of a few worlds."""
    whole = recipes.recipe("driving-large")
    assert isinstance(whole.environment, Driving)
    run = resolve(
        dataclasses.replace(
            whole, environment=dataclasses.replace(whole.environment, scenarios=2), total_steps=96, num_envs=4,
            num_steps=8, devices=1, threads=1, evaluation_episodes=2, log_interval=1, block=1,
            algorithm=replaced(whole.algorithm, model_size=0.1, num_minibatches=2, update_epochs=1, lr=1e-2),
        )
    )  # fmt: skip
    assert (run.algorithm.network.torso, run.algorithm.network.precision) == ("wayformer", "bf16")
    folder = tmp_path / "large"
    folder.mkdir()
    outcome = loop.train(run, folder, resumed=False)
    assert outcome.result is not None
    assert outcome.result["parameters"] == pytest.approx(1e5, rel=0.1)
    records = sinks.read(folder / "metrics.jsonl")
    assert [record["update"] for record in records] == [1, 2, 3]
    assert all(np.isfinite(value) for record in records for value in record.values() if value is not None)
    assert records[-1]["ppo/approx_kl"] > 0.0, "the policy moved"
