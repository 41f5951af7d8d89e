"""Networks: shapes, memory, what a set of items may not depend on, initial scales, errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.networks import actor_critic as networks
from longhaul.networks.actor_critic import ActorCritic, actor_critic
from tests.helpers.quick import quick

SEEN = {
    "ego": jax.ShapeDtypeStruct((3,), jnp.float32),
    "items": jax.ShapeDtypeStruct((5, 4), jnp.float32),
    "grid": jax.ShapeDtypeStruct((2, 2, 2), jnp.int32),
}


def observation(*lead: int, seed: int = 0) -> dict[str, jax.Array]:
    """Observations [*lead, ...] of which the items 0, 1 and 4 are there."""
    rng = np.random.default_rng(seed)
    items = rng.normal(size=(*lead, 5, 4))
    items[..., -1] = [1, 1, 0, 0, 1]
    return {
        "ego": jnp.asarray(rng.normal(size=(*lead, 3)), jnp.float32),
        "items": jnp.asarray(items, jnp.float32),
        "grid": jnp.asarray(rng.integers(0, 3, size=(*lead, 2, 2, 2)), jnp.int32),
    }


def drawn(network: ActorCritic | networks.Tower, seed: int = 0) -> Any:
    """Parameters of the right shapes, without the work of making layers orthogonal."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.4, size=x.shape), jnp.float32), shapes)


@pytest.mark.parametrize(
    ("torso", "memory"),
    [
        *(("mlp", 0), ("deepset", 0), ("mlp", 6), ("deepset", 6), ("latent", 6)),
        pytest.param("latent", 0, marks=pytest.mark.slow),  # its leading axes are in test_attention.py, too
    ],
)
def test_leading_axes_are_free_and_rows_do_not_mix(torso, memory):
    network = actor_critic(SEEN, 3, free=2, torso=torso, sizes=(8, 7), memory=memory)
    params = drawn(network)
    apply = quick(network.apply)
    seen = observation(4)
    remembered = network.memory(4)
    assert remembered == () if not memory else remembered.shape == (4, 6)
    parameters, value, after = apply(params, remembered, seen)
    assert parameters.shape == (4, 5)
    assert value.shape == (4,)
    assert parameters.dtype == value.dtype == jnp.float32
    np.testing.assert_array_equal(parameters[:, 3:], np.tile(params["log_std"], (4, 1)))  # whatever is seen
    others = jax.tree.map(lambda x, y: y.at[2].set(x[2]), (remembered, seen), (remembered, observation(4, seed=1)))
    again = apply(params, *others)
    for one, other in zip((parameters, value, *jax.tree.leaves(after)), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(one[2], other[2], rtol=1e-4, atol=1e-6)
    if not memory:
        deep = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), seen)
        np.testing.assert_allclose(apply(params, (), deep)[1], value.reshape(2, 2), rtol=1e-4, atol=1e-6)


def test_without_memory_actor_and_critic_share_nothing():
    network = actor_critic(SEEN, 3, sizes=(8,))
    params, seen = drawn(network), observation(4)
    assert set(params) == {"actor", "critic", "policy", "value"}
    of_value = quick(jax.grad(lambda p: jnp.sum(network.apply(p, (), seen)[1])))(params)
    of_policy = quick(jax.grad(lambda p: jnp.sum(network.apply(p, (), seen)[0] ** 2)))(params)
    size = lambda tree: sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(tree))  # noqa: E731
    assert size(of_value["actor"]) == size(of_value["policy"]) == 0.0
    assert size(of_policy["critic"]) == size(of_policy["value"]) == 0.0
    assert size(of_value["critic"]) > 0
    assert size(of_policy["actor"]) > 0


def test_a_shared_set_serves_policy_and_value():
    network = actor_critic(SEEN, 3, torso="deepset", sizes=(8,), shared=True)
    params, seen = drawn(network), observation(4)
    assert set(params) == {"torso", "policy", "value"}
    for pick, idle in ((0, "value"), (1, "policy")):
        slope = quick(jax.grad(lambda p, pick=pick: jnp.sum(network.apply(p, (), seen)[pick] ** 2)))(params)
        size = {name: sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(slope[name])) for name in slope}
        assert size[idle] == 0.0
        assert size["torso"] > 0.0


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"torso": "deepset"}])
def test_layers_begin_as_flax_has_it(options):
    """lecun_normal: mean 0, variance 1 / inputs, cut at two deviations of the normal before; biases 0; heads, too."""
    seen = jax.ShapeDtypeStruct((40, 16), jnp.float32)
    params = quick(actor_critic(seen, 50, sizes=(128, 128), init="lecun", **options).init)(jax.random.key(0))
    assert set(params) >= {"policy", "value"}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key == "bias":
            np.testing.assert_array_equal(leaf, 0.0)
            continue
        scaled = np.asarray(leaf, np.float64) * np.sqrt(leaf.shape[0])
        assert abs(scaled.mean()) < 5 / np.sqrt(scaled.size)
        assert abs(scaled.std() - 1.0) < 4 / np.sqrt(scaled.size)
        assert np.abs(scaled).max() <= 2.0 / 0.87962566 + 1e-5
        assert np.abs(scaled).max() > 1.6


@pytest.mark.slow
def test_an_encoder_by_attention_is_shared_and_each_head_has_a_layer_of_its_own():
    network = actor_critic(SEEN, 3, torso="wayformer", sizes=(32,))
    params, seen = drawn(network), observation(4)
    assert set(params) == {"torso", "policy_hidden", "value_hidden", "policy", "value"}
    slope = jax.grad(lambda p: jnp.sum(network.apply(p, (), seen)[1]))
    of_value = quick(slope)(params)
    size = lambda tree: sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(tree))  # noqa: E731
    assert size(of_value["policy_hidden"]) == size(of_value["policy"]) == 0.0
    assert size(of_value["torso"]) > 0
    assert size(of_value["value_hidden"]) > 0
    begin = lambda key: network.apply(network.init(key), (), observation(64))[0]  # noqa: E731
    parameters = quick(begin)(jax.random.key(0))
    assert float(jnp.abs(parameters).max()) < 0.1, "whatever is seen, a new policy chooses almost evenly"


@pytest.mark.parametrize(
    ("torso", "memory"), [("mlp", 6), ("deepset", 0), pytest.param("latent", 6, marks=pytest.mark.slow)]
)
def test_bf16_is_in_the_torso_alone(torso, memory):
    """Parameters, gradients, memory, policy and values stay float32; the difference is bfloat16's 8 bits."""
    options = {"torso": torso, "sizes": (32,), "memory": memory}
    full, low = (actor_critic(SEEN, 3, precision=precision, **options) for precision in ("fp32", "bf16"))
    params, seen = jax.tree.map(lambda x: x / 3, drawn(full)), observation(16)
    assert jax.eval_shape(full.init, jax.random.key(0)) == jax.eval_shape(low.init, jax.random.key(0))
    found = []
    for network in (full, low):
        apply = lambda p, network=network: network.apply(p, network.memory(16), seen)  # noqa: E731
        slope = jax.grad(lambda p, apply=apply: jnp.sum(apply(p)[1]))
        both = quick(lambda p, apply=apply, slope=slope: (apply(p), slope(p)))
        out, gradient = both(params)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((out, gradient)))
        found.append((out, gradient))
    for exact, rounded in zip(jax.tree.leaves(found[0][0]), jax.tree.leaves(found[1][0]), strict=True):
        error = float(jnp.sqrt(jnp.mean((exact - rounded) ** 2) / jnp.mean(exact**2)))
        assert 1e-5 < error < 0.05
    lines = str(jax.make_jaxpr(lambda p: low.apply(p, low.memory(16), seen))(params)).splitlines()
    products = [line for line in lines if "dot_general[" in line]
    assert any(":bf16[" in line for line in products)
    assert any(":f32[16,3]" in line for line in products), "the policy's own layer"


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def test_memory_is_a_gated_recurrent_unit():
    """Cho et al. 2014, in NumPy, for two steps; and what was seen first still matters at the second."""
    network = actor_critic(SEEN["ego"], 2, sizes=(5,), memory=4)
    params = drawn(network, 1)
    assert set(params) == {"torso", "memory", "policy", "value"}
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    memory, apply = network.memory(1), quick(network.apply)
    np.testing.assert_array_equal(memory, 0.0)
    by_hand = np.zeros((1, 4))
    for step in range(2):
        seen = observation(1, seed=step)["ego"]
        _, value, memory = apply(params, memory, seen)
        x = np.tanh(np.asarray(seen) @ p["torso"]["layer_0"]["kernel"] + p["torso"]["layer_0"]["bias"])
        unit = p["memory"]
        gate = {
            g: sigmoid(x @ unit[f"i{g}"]["kernel"] + unit[f"i{g}"]["bias"] + by_hand @ unit[f"h{g}"]["kernel"])
            for g in "rz"
        }
        new = x @ unit["in"]["kernel"] + unit["in"]["bias"]
        new = np.tanh(new + gate["r"] * (by_hand @ unit["hn"]["kernel"] + unit["hn"]["bias"]))
        by_hand = (1.0 - gate["z"]) * new + gate["z"] * by_hand
        np.testing.assert_allclose(memory, by_hand, rtol=1e-5, atol=1e-6)
        expected = by_hand @ p["value"]["kernel"][:, 0] + p["value"]["bias"]
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    forgot = apply(params, network.memory(1), observation(1, seed=1)["ego"])[1]
    assert abs(float(forgot[0] - value[0])) > 1e-4


def test_a_set_has_no_order_and_what_is_not_there_does_not_count():
    network = actor_critic(SEEN, 3, torso="deepset", sizes=(16, 8))
    params = drawn(network)
    seen = observation(6)
    run = quick(lambda items: network.apply(params, (), seen | {"items": items})[:2])
    parameters, value = run(seen["items"])
    turned = run(seen["items"][:, jnp.array([4, 2, 0, 3, 1])])
    np.testing.assert_array_equal(turned[0], parameters)
    np.testing.assert_array_equal(turned[1], value)
    absent = seen["items"][..., -1:] == 0.0
    noise = jnp.where(absent, seen["items"] + 100.0, seen["items"]).at[..., -1].set(seen["items"][..., -1])
    np.testing.assert_array_equal(run(noise)[1], value)
    there = seen["items"].at[:, 0, 0].add(1.0)
    assert float(jnp.abs(run(there)[1] - value).max()) > 1e-4
    plain = actor_critic(SEEN, 3, torso="mlp", sizes=(16, 8))
    weights = drawn(plain)
    orders = (seen["items"], seen["items"][:, ::-1])
    sees = quick(lambda items: plain.apply(weights, (), seen | {"items": items})[1])
    ahead, back = map(sees, orders)
    assert float(jnp.abs(ahead - back).max()) > 1e-4, "an MLP sees the order"


@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
def test_of_a_set_each_feature_is_the_greatest_of_the_items_that_are_there(activation):
    network = actor_critic(SEEN, 3, torso="deepset", sizes=(16, 8), activation=activation)
    params, seen = drawn(network), observation(6)
    function = networks.ACTIVATIONS[activation]

    def through(own, x):
        return function(x @ own["kernel"] + own["bias"][None])

    own = params["critic"]["item_2"]
    items = through(own | {"bias": own["bias"][None]}, seen["items"])
    greatest = jnp.max(jnp.where(seen["items"][..., -1:] > 0.0, items, 0.0), axis=1)
    x = jnp.concatenate([seen["ego"], seen["grid"].reshape(6, -1).astype(jnp.float32), greatest], axis=1)
    for name in ("layer_0", "layer_1"):
        x = through(params["critic"][name], x)
    value = (x @ params["value"]["kernel"])[:, 0] + params["value"]["bias"]
    np.testing.assert_allclose(quick(network.apply)(params, (), seen)[1], value, rtol=1e-5, atol=1e-5)


def test_a_rising_activation_is_taken_of_the_greatest_alone():
    """Activating every item costs a factor of the number of items: most of a set's time on a CPU."""
    network = actor_critic(SEEN, 3, torso="deepset", sizes=(16, 8))
    params, seen = drawn(network), observation(6)
    program = str(jax.make_jaxpr(network.apply)(params, (), seen))
    shapes = [line.split("=")[0].split(":")[1].strip() for line in program.splitlines() if "= tanh" in line]
    assert sorted(shapes) == ["f32[6,16]"] * 2 + ["f32[6,8]"] * 4


@pytest.mark.parametrize("options", [{}, {"torso": "deepset"}, {"torso": "deepset", "precision": "bf16"}])
def test_both_towers_at_once_are_what_they_are_apart(monkeypatch, options):
    on_cpu = actor_critic(SEEN, 3, free=1, sizes=(16, 8), **options)
    assert on_cpu.both is on_cpu.apply, "a CPU multiplies one after the other faster"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    network = actor_critic(SEEN, 3, free=1, sizes=(16, 8), **options)
    for one_torso in ({"torso": "deepset", "shared": True}, {"memory": 4}):
        alone = actor_critic(SEEN, 3, **one_torso)
        assert alone.both is alone.apply
    params, seen = drawn(network), observation(6)

    def told(apply):
        def total(params):
            parameters, value, memory = apply(params, (), seen)
            assert memory == ()
            return jnp.sum(jnp.sin(parameters)) + jnp.sum(jnp.cos(value)), (parameters, value)

        return quick(jax.grad(total, has_aux=True))(params)

    both, apart = told(network.both), told(network.apply)
    near = {"rtol": 1e-5, "atol": 1e-5} if not options.get("precision") else {"rtol": 0.05, "atol": 0.05}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **near), both, apart)


def test_layers_begin_orthogonal_with_their_scales():
    network = actor_critic(SEEN["ego"], 3, free=2, sizes=(16, 16))
    init = quick(network.init)
    params = init(jax.random.key(0))
    for name, scale in (("policy", 0.01), ("value", 1.0)):
        kernel = np.asarray(params[name]["kernel"])
        np.testing.assert_allclose(kernel.T @ kernel, scale**2 * np.eye(kernel.shape[1]), atol=1e-6)
    for tower in ("actor", "critic"):
        kernel = np.asarray(params[tower]["layer_1"]["kernel"])
        np.testing.assert_allclose(kernel.T @ kernel, 2.0 * np.eye(16), atol=1e-5)
        np.testing.assert_array_equal(params[tower]["layer_1"]["bias"], 0.0)
    np.testing.assert_array_equal(params["log_std"], [-0.5, -0.5])
    other = init(jax.random.key(1))
    assert np.any(params["actor"]["layer_0"]["kernel"] != other["actor"]["layer_0"]["kernel"])
    assert np.any(params["actor"]["layer_0"]["kernel"] != params["critic"]["layer_0"]["kernel"])


@pytest.mark.parametrize(("name", "function"), [("tanh", np.tanh), ("relu", lambda x: np.maximum(x, 0))])
def test_activations_by_name(name, function):
    network = actor_critic(SEEN["ego"], 2, sizes=(6,), activation=name)
    params, seen = drawn(network), observation(5)["ego"]
    p = jax.tree.map(np.asarray, params)
    hidden = function(np.asarray(seen) @ p["critic"]["layer_0"]["kernel"] + p["critic"]["layer_0"]["bias"])
    expected = hidden @ p["value"]["kernel"][:, 0] + p["value"]["bias"]
    np.testing.assert_allclose(quick(network.apply)(params, (), seen)[1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"torso": "cnn"}, "torso is 'cnn'; it must be one of mlp, deepset, latent, wayformer, mtr"),
        ({"precision": "fp8"}, "precision is 'fp8'; it must be one of fp32, bf16"),
        ({"init": "zeros"}, "init is 'zeros'; it must be one of orthogonal, lecun"),
        ({"activation": "sine"}, "activation is 'sine'; it must be one of tanh, relu"),
        ({"sizes": ()}, "give at least one, all positive"),
        ({"sizes": (8, 0)}, "give at least one, all positive"),
        ({"memory": -1}, "memory is -1; it must be at least 0"),
    ],
)
def test_impossible_networks_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        actor_critic(SEEN, 3, **options)


def test_a_tower_in_bf16_rounds_factors_and_nothing_else() -> None:
    """Compared with a tower in float32, and by the types of all its products."""
    seen = {"a": jax.ShapeDtypeStruct((3,), jnp.float32), "b": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    options: dict[str, Any] = {
        "torso": "mlp", "sizes": (16, 16), "activation": "relu", "remat": "none", "init": "lecun"
    }  # fmt: skip
    full, low = (networks.tower(seen, 2, precision=precision, **options) for precision in ("fp32", "bf16"))
    assert str(jax.make_jaxpr(full.init)(jax.random.key(0))) == str(jax.make_jaxpr(low.init)(jax.random.key(0)))
    params = drawn(full)
    rng = np.random.default_rng(1)
    shown = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=(5, 4, *x.shape)), jnp.float32), seen)

    def slope(tower: networks.Tower) -> Any:
        return jax.value_and_grad(lambda params: jnp.sum(jnp.square(tower.apply(params, shown))))

    (value, gradient), (rounded, near) = (quick(slope(tower))(params) for tower in (full, low))
    assert jax.eval_shape(low.apply, params, shown).shape == (5, 4, 2)
    assert 0.0 < abs(value - rounded) < 0.02 * value
    for exact, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(near), strict=True):
        assert other.dtype == jnp.float32
        np.testing.assert_allclose(other, exact, rtol=0.05, atol=0.02 * float(jnp.abs(exact).max()))
    dots = [eqn for eqn in jax.make_jaxpr(slope(low))(params).eqns if eqn.primitive.name == "dot_general"]
    rounded_ones = [eqn for eqn in dots if all(x.aval.dtype == jnp.bfloat16 for x in eqn.invars)]
    assert (len(rounded_ones), len(dots)) == (6, 9), "three a layer, and the head's own three in float32"
    assert all(eqn.outvars[0].aval.dtype == jnp.float32 for eqn in dots)
