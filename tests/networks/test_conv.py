"""Convolutions: sizes and parameters by hand, numbers by NumPy's loops, both ways to compute them alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.networks import actor_critic, conv
from longhaul.networks.config import CONVOLUTIONS, REMATS
from longhaul.runtime import partition
from tests.helpers.quick import quick

ATARI = jax.ShapeDtypeStruct((4, 84, 84), jnp.uint8)


def _by_loops(x: np.ndarray, kernel: np.ndarray, stride: int, before: int, after: int) -> np.ndarray:
    """The definition: sums over what lies under a kernel, zeros around the image."""
    x = np.pad(x, ((0, 0), (before, after), (before, after), (0, 0)))
    n, height, width, _ = x.shape
    side = kernel.shape[0]
    rows, columns = (height - side) // stride + 1, (width - side) // stride + 1
    found = np.zeros((n, rows, columns, kernel.shape[-1]))
    for i in range(rows):
        for j in range(columns):
            under = x[:, i * stride : i * stride + side, j * stride : j * stride + side]
            found[:, i, j] = np.einsum("nijc,ijco->no", under, kernel)
    return found


def _plain(kind: str, seen: jax.ShapeDtypeStruct, **options: object) -> actor_critic.ActorCritic:
    return actor_critic.actor_critic(seen, 6, torso=kind, init="lecun", **options)  # type: ignore[arg-type]


def _network(kind: str, seen: jax.ShapeDtypeStruct = ATARI, **options: object) -> actor_critic.ActorCritic:
    """Network whose functions are compiled, each by itself."""
    made = _plain(kind, seen, **options)
    return made._replace(init=quick(made.init), apply=quick(made.apply))


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(("length", "side", "stride"), [(7, 3, 2), (8, 4, 2), (9, 3, 1), (12, 8, 4)])
def test_both_ways_agree_with_the_definition(length: int, side: int, stride: int, padding: str) -> None:
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, length, length, 3)), rng.normal(size=(side, side, 3, 5))
    around = max((-(-length // stride) - 1) * stride + side - length, 0) if padding == "SAME" else 0
    wanted = _by_loops(x, kernel, stride, around // 2, around - around // 2)
    given = jnp.float32(x), jnp.float32(kernel)

    def both(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        axes = ("NHWC", "HWIO", "NHWC")
        direct = jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=axes)
        return direct, conv.im2col_convolution(x, kernel, stride, padding)

    for found in quick(both)(*given):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_greatest_is_over_three_by_three() -> None:
    x = np.random.default_rng(1).normal(size=(1, 5, 4, 2)).astype(np.float32)
    lines = np.pad(x, ((0, 0), (1, 1), (0, 1), (0, 0)), constant_values=-np.inf)  # SAME: 5 rows need 2 more, 4 need 1
    found = np.asarray(conv.max_pool(jnp.asarray(x)))
    assert found.shape == (1, 3, 2, 2)
    for i in range(3):
        for j in range(2):
            np.testing.assert_array_equal(found[0, i, j], lines[0, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max((0, 1)))


def test_parameters_are_as_many_as_the_papers_have() -> None:
    heads = {features: features * 6 + 6 + features + 1 for features in (512, 256)}
    nature = (8 * 8 * 4 * 32 + 32) + (4 * 4 * 32 * 64 + 64) + (3 * 3 * 64 * 64 + 64) + (7 * 7 * 64 * 512 + 512)
    impala, channels = 11 * 11 * 32 * 256 + 256, 4
    for outputs in (16, 32, 32):
        impala += 9 * channels * outputs + outputs + 4 * (9 * outputs * outputs + outputs)
        channels = outputs
    for kind, wanted in (("nature", nature + heads[512]), ("impala", impala + heads[256])):
        shapes = jax.eval_shape(_network(kind).init, jax.random.key(0))
        assert actor_critic.count(shapes) == wanted
    board = jax.ShapeDtypeStruct((10, 10, 4), jnp.bool_)
    minatar = (3 * 3 * 4 * 16 + 16) + (8 * 8 * 16 * 128 + 128) + 128 * 6 + 6 + 128 + 1
    for norm in (False, True):  # a scale and a shift for each of 16 channels and 128 features
        shapes = jax.eval_shape(_network("minatar", board, norm=norm).init, jax.random.key(0))
        assert actor_critic.count(shapes) == minatar + norm * 2 * (16 + 128)
    assert conv.sizes("nature", conv.image(ATARI)) == [(20, 20), (9, 9), (7, 7)]
    assert conv.sizes("impala", conv.image(ATARI)) == [(42, 42), (21, 21), (11, 11)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_an_image_is_the_same_with_channels_first_or_last_in_bytes_or_shares(kind: str) -> None:
    rng = np.random.default_rng(2)
    first = rng.integers(0, 256, (2, 3, 4, 36, 40)).astype(np.uint8)  # [T, B, C, H, W]
    last = np.moveaxis(first, 2, -1)
    by_first = _network(kind, jax.ShapeDtypeStruct(first.shape[2:], jnp.uint8))
    by_last = _network(kind, jax.ShapeDtypeStruct(last.shape[2:], jnp.uint8))
    params = by_first.init(jax.random.key(0))
    wanted = by_first.apply(params, (), jnp.asarray(first))
    assert wanted[0].shape == (2, 3, 6) and wanted[1].shape == (2, 3)
    assert float(jnp.std(wanted[1])) > 1e-3  # it sees something
    for other in (jnp.asarray(last), jnp.asarray(last, jnp.float32) / 255.0):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), wanted[:2],
                     by_last.apply(params, (), other)[:2])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_rematerialised_gradients_are_the_same_and_bf16_is_near(kind: str) -> None:
    seen = jax.ShapeDtypeStruct((36, 36, 2), jnp.uint8)
    frames = jnp.asarray(np.random.default_rng(3).integers(0, 256, (3, *seen.shape)), jnp.uint8)
    params = _network(kind, seen).init(jax.random.key(1))

    def gradient(**options: object) -> object:
        network = _plain(kind, seen, **options)
        return quick(jax.grad(lambda p: jnp.sum(network.apply(p, (), frames)[1] ** 2)))(params)

    plain = gradient()
    assert all(float(jnp.max(jnp.abs(leaf))) > 0 for leaf in jax.tree.leaves(plain["torso"]))  # type: ignore[index]
    for remat in REMATS[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, gradient(remat=remat))
    exact, rounded = (
        _network(kind, seen, precision=precision).apply(params, (), frames)[1] for precision in ("fp32", "bf16")
    )
    np.testing.assert_allclose(rounded, exact, rtol=0.05, atol=0.05)
    assert not np.array_equal(rounded, exact)


def test_kernels_are_split_in_pairs_over_a_model_axis() -> None:
    shapes = jax.eval_shape(_network("nature").init, jax.random.key(0))
    split = partition.specs(shapes, 2)["torso"]["encoder"]
    assert [tuple(split[f"layer_{i}"]["kernel"]).index("model") for i in range(3)] == [3, 2, 3]
    assert tuple(split["layer_3"]["kernel"]) == ("model", None)
    share = partition.shares(jax.eval_shape(_network("impala").init, jax.random.key(0)), 2)
    assert share.own < 0.53 * share.whole


@pytest.mark.parametrize(
    ("seen", "kind", "message"),
    [
        (jax.ShapeDtypeStruct((4,), jnp.float32), "nature", r"takes one image, .* observation is \(4,\); choose torso"),
        ({"a": ATARI, "b": jax.ShapeDtypeStruct((2,), jnp.float32)}, "impala", r"\(4, 84, 84\) and \(2,\)"),
        (jax.ShapeDtypeStruct((35, 84, 1), jnp.uint8), "nature", "image is 35x84, and torso nature needs 36x36"),
    ],
)
def test_observations_that_are_no_image_are_refused(seen: object, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        actor_critic.actor_critic(seen, 2, torso=kind)


@pytest.mark.slow
def test_normalised_layers_do_not_see_how_bright_an_image_is() -> None:
    """Up to the shift of kernels' biases, which begin at 0: twice the image is the same one."""
    seen = jax.ShapeDtypeStruct((6, 6, 2), jnp.float32)
    x = jnp.asarray(np.random.default_rng(5).normal(size=(3, *seen.shape)), jnp.float32)
    for kind in ("minatar", "mlp"):
        network = _network(kind, seen, norm=True, shared=True)
        params, apply = network.init(jax.random.key(0)), network.apply
        wanted, found = (apply(params, (), factor * x)[0] for factor in (1.0, 2.0))
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
        assert float(jnp.std(wanted)) > 1e-3
        other = _network(kind, seen, shared=True)
        params, apply = other.init(jax.random.key(0)), other.apply
        assert not np.allclose(*(apply(params, (), factor * x)[0] for factor in (1.0, 2.0)), rtol=0.1)
