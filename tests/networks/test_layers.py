"""Layers against NumPy, and against Flax where it is installed: the same initial values and results, bit for bit; the
greatest over a set, item by item, beside all items at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.networks import actor_critic as actor_critics
from longhaul.networks import config, layers
from longhaul.networks.actor_critic import actor_critic
from longhaul.networks.config import INITS
from longhaul.networks.layers import NamedKey
from tests.helpers.quick import quick

X = np.random.default_rng(0).normal(2.0, 1.5, size=(3, 4, 6)).astype(np.float32)


def alive(params, seed=1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.5, size=leaf.shape), jnp.float32), params)


@pytest.mark.parametrize("norm", [layers.layer_norm, layers.one_pass_layer_norm])
def test_layer_norm_has_mean_bias_and_deviation_scale(norm):
    params = alive(layers.init_norm(6))
    wide = X.astype(np.float64)
    wanted = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + layers.EPSILON)
    wanted = wanted * np.asarray(params["scale"]) + np.asarray(params["bias"])
    np.testing.assert_allclose(quick(norm)(params, X), wanted, rtol=1e-4, atol=1e-4)
    assert jax.eval_shape(norm, params, jnp.asarray(X, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("axis", [-1, -2])
def test_rms_norm_divides_by_the_root_of_the_mean_square(axis):
    scale = np.arange(1.0, 1.0 + X.shape[axis]).astype(np.float32)
    wanted = X / np.sqrt(np.mean(X.astype(np.float64) ** 2, axis=axis, keepdims=True) + 1e-6)
    wanted = np.moveaxis(np.moveaxis(wanted, axis, -1) * scale, -1, axis)
    found = quick(lambda x: layers.rms_norm(x, jnp.asarray(scale), 1e-6, axis))(X)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_recurrent_unit_by_hand():
    params = alive(jax.eval_shape(lambda key: layers.init_gru(NamedKey(key), 6, 5), jax.random.key(0)))
    memory = np.random.default_rng(2).normal(size=(3, 4, 5)).astype(np.float32)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def of(name, x):
        return x @ p[name]["kernel"] + p[name].get("bias", 0.0)

    reset, keep = (1 / (1 + np.exp(-(of("i" + gate, X) + of("h" + gate, memory)))) for gate in "rz")
    wanted = (1 - keep) * np.tanh(of("in", X) + reset * of("hn", memory)) + keep * memory
    for found in quick(layers.gru)(params, memory, X):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert set(params["hr"]) == {"kernel"}
    assert set(params["hn"]) == {"kernel", "bias"}


def test_a_product_of_rounded_factors_has_exact_sums_and_its_own_gradients():
    rng = np.random.default_rng(3)
    x, kernel, bias = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((7, 6), (6, 5), (5,)))
    round_off = lambda part: part.astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    found, back = jax.vjp(layers.mixed_affine, x, kernel, bias)
    np.testing.assert_allclose(found, round_off(x) @ round_off(kernel) + bias[None], rtol=1e-5, atol=1e-5)
    g = round_off(jnp.asarray(rng.normal(size=(7, 5)), jnp.float32))
    for own, wanted in zip(back(g), (g @ round_off(kernel).T, round_off(x).T @ g, g.sum(0)), strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-5)


def test_keys_differ_by_path_and_stay_the_same():
    """The rule of Flax 0.12: runs of earlier versions began with these numbers."""
    root = NamedKey(jax.random.key(5))
    keys = [root.draw(), root.child("actor").draw(), root.child("actor").child("layer_0").draw()]
    data = [jax.random.key_data(key).tolist() for key in keys]
    assert len({tuple(each) for each in data}) == 3
    assert data[2] == jax.random.key_data(jax.random.fold_in(jax.random.key(5), np.uint32(0x02E94469))).tolist()


@pytest.mark.parametrize("init", INITS)
def test_parameters_and_results_are_those_of_flax(init):
    nn = pytest.importorskip("flax.linen")

    class Both(nn.Module):
        @nn.compact
        def __call__(self, memory, x):
            kernels = layers.kernel_init(init, 1.5)
            x = nn.LayerNorm(name="first_norm")(nn.Dense(5, kernel_init=kernels, name="first")(x))
            return nn.GRUCell(7, name="memory")(memory, x)

    memory, key = jnp.ones((3, 4, 7)), jax.random.key(4)
    root = NamedKey(key)
    params = {
        "first": layers.init_dense(root.child("first").draw(), (6, 5), layers.kernel_init(init, 1.5)),
        "first_norm": layers.init_norm(5),
        "memory": layers.init_gru(root.child("memory"), 5, 7),
    }
    jax.tree.map(np.testing.assert_array_equal, params, Both().init(key, memory, X)["params"])
    params = alive(params)

    def ours(params, x):
        y = layers.one_pass_layer_norm(params["first_norm"], layers.dense(params["first"], x))
        return layers.gru(params["memory"], memory, y)

    theirs = quick(lambda params, x: Both().apply({"params": params}, memory, x))
    jax.tree.map(np.testing.assert_array_equal, quick(ours)(params, X), theirs(params, X))


# ------------------------------------------------------------------------------------------- the greatest over a set


def a_set(rows, items, inputs, features, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, items, inputs))
    x[..., -1] = rng.random((rows, items)) < 0.6
    parts = rng.normal(size=(inputs, features)), rng.normal(size=features), x
    return tuple(jnp.asarray(part, jnp.float32) for part in parts)


def at_once(kernel, bias, items):
    return jnp.max((items @ kernel + bias[None, None]) * items[..., -1:], axis=1)


@pytest.mark.parametrize(("rows", "items", "inputs", "features"), [(40, 5, 4, 6), (7, 1, 3, 2), (1, 9, 2, 1)])
def test_the_greatest_item_by_item_is_that_of_all_at_once_and_so_are_its_gradients(rows, items, inputs, features):
    parts = a_set(rows, items, inputs, features)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(rows, features)), jnp.float32)

    def slope(function):
        total = lambda *parts: jnp.sum(weight * jnp.sin(function(*parts)))  # noqa: E731
        return quick(jax.value_and_grad(total, argnums=(0, 1, 2)))(*parts)

    found, expected = slope(layers.max_pooled_embedding), slope(at_once)
    there = parts[2][..., -1:]  # of several that are not, each is as much the greatest as the others
    (value, (*own, of_items)), (expected_value, (*others, expected_items)) = found, expected
    assert float(jnp.abs(expected_items * there).max()) > 0.0
    found, expected = (value, own, of_items * there), (expected_value, others, expected_items * there)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, expected)


def test_pooling_absent_items_is_zero_and_has_no_gradient():
    kernel, bias, items = a_set(6, 4, 3, 5)
    items = items.at[..., -1].set(0.0).at[:3, 1, -1].set(1.0)
    pooled = quick(layers.max_pooled_embedding)
    np.testing.assert_array_equal(pooled(kernel, bias, items)[3:], 0.0)
    of_kernel = quick(jax.grad(lambda kernel: jnp.sum(layers.max_pooled_embedding(kernel, bias, items[3:]))))(kernel)
    np.testing.assert_array_equal(of_kernel, 0.0)
    changed = items.at[:, 2, :-1].add(100.0)
    np.testing.assert_array_equal(pooled(kernel, bias, changed), pooled(kernel, bias, items))


def test_of_equal_items_one_has_the_whole_gradient():
    kernel, bias, items = a_set(4, 1, 3, 5)
    items = items.at[..., -1].set(1.0)
    twice = jnp.concatenate([items, items], axis=1)
    slope = quick(jax.grad(lambda k, x: jnp.sum(layers.max_pooled_embedding(k, bias, x))))
    one, two = (slope(kernel, x) for x in (items, twice))
    np.testing.assert_allclose(one, two, rtol=1e-6)


def test_the_greatest_of_many_networks_at_once():
    """Networks of a population: parameters [N, ...], each with its own observation."""
    each = [a_set(3, 4, 3, 5, seed) for seed in range(4)]
    parts = [jnp.stack(leaves) for leaves in zip(*each)]
    slope = jax.grad(lambda *parts: jnp.sum(jnp.cos(layers.max_pooled_embedding(*parts))))
    found, single = quick(jax.vmap(slope))(*parts), quick(slope)
    for i, own in enumerate(each):
        alone = single(*own)
        np.testing.assert_allclose(found[i], alone, rtol=1e-5, atol=1e-6)


def test_bfloat16_rounds_the_factors_of_the_greatest_and_not_its_sums():
    kernel, bias, items = a_set(20, 5, 8, 6)

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    found = layers.max_pooled_embedding(kernel, bias, items.astype(jnp.bfloat16))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, at_once(rounded(kernel), bias, rounded(items)), rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(found - at_once(rounded(kernel), bias, items)).max()) > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"shared": True}, {"memory": 3})),
        {"activation": "relu", "remat": "full"},
    ],
)
def test_networks_are_the_same_on_a_cpu_and_elsewhere(monkeypatch, options):
    """Same parameters from the same key, same outputs, same gradients: a run may go on on another device."""
    seen = {"ego": jax.ShapeDtypeStruct((3,), jnp.float32), "items": jax.ShapeDtypeStruct((5, 4), jnp.float32)}
    observed = {"ego": jnp.ones((6, 3)), "items": a_set(6, 5, 4, 1)[2]}
    begins: list[str] = []
    found = []
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        network = actor_critic(seen, 2, torso="deepset", sizes=(16, 8), init="lecun", **options)
        begins.append(str(jax.make_jaxpr(network.init)(jax.random.key(3))))
        params = alive(jax.tree.map(jnp.zeros_like, jax.eval_shape(network.init, jax.random.key(3))))

        def total(params, network=network):
            parameters, value, _ = network.apply(params, network.memory(6), observed)
            return jnp.sum(jnp.sin(parameters)) + jnp.sum(jnp.cos(value))

        found.append(quick(jax.value_and_grad(total))(params))
    assert begins[0] == begins[1]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *found)


# ------------------------------------------------------------------------------------------------------------- names


def test_each_name_has_its_function() -> None:
    assert tuple(actor_critics.ACTIVATIONS) == config.ACTIVATIONS
    assert tuple(layers.PRECISIONS) == config.PRECISIONS
    assert ("none", *layers.POLICIES) == config.REMATS
