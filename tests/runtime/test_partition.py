"""The rule that splits parameters: what it chooses where, for any shape, and what then lies on a device."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longhaul.algorithms import ppo
from longhaul.algorithms.config import PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.networks import attention
from longhaul.runtime import mesh as meshes
from longhaul.runtime import partition
from longhaul.runtime.config_fields import replaced
from longhaul.spaces import Discrete
from longhaul.types import PLATFORM, Algorithm, Spec
from tests.helpers.quick import quick

WHOLE = PartitionSpec()
COLUMNS, ROWS = PartitionSpec(None, "model"), PartitionSpec("model", None)


@pytest.mark.parametrize(
    ("path", "shape", "model", "wanted"),
    [
        ("params torso layer_0 kernel", (8, 256), 2, COLUMNS),
        ("params torso layer_1 kernel", (256, 256), 2, ROWS),  # a pair: one sum, after the second
        ("params torso layer_2 kernel", (256, 256), 2, COLUMNS),
        ("opt_state 1 mu torso layer_1 kernel", (256, 256), 2, ROWS),  # moments lie as their parameter
        ("params torso encoder blocks query", (3, 64, 64), 4, PartitionSpec(None, None, "model")),
        ("params torso encoder blocks out", (3, 64, 64), 4, PartitionSpec(None, "model", None)),
        ("params torso encoder blocks narrow", (3, 256, 64), 4, PartitionSpec(None, "model", None)),
        ("params torso encoder embed_0 kernel", (7, 256), 2, COLUMNS),
        ("params policy kernel", (256, 5), 2, ROWS),  # its outputs can't be shared evenly
        ("params torso layer_1 kernel", (255, 256), 2, COLUMNS),  # nor the inputs of this one
        ("params torso table", (9, 3, 1000), 3, PartitionSpec(None, "model", None)),
        ("params torso blocks wide", (6, 25, 35), 3, PartitionSpec("model", None, None)),
        ("params torso layer_0 kernel", (255, 257), 2, WHOLE),  # nothing can be
        ("params torso layer_0 kernel", (4, 64), 2, WHOLE),  # little
        ("params torso layer_0 bias", (64,), 2, WHOLE),
        ("params torso layer_0 bias", (4096,), 2, PartitionSpec("model")),
        ("updates", (), 2, WHOLE),
        ("params torso layer_0 kernel", (8, 256), 1, WHOLE),
    ],
)
def test_kernels_are_split_by_the_rule(path: str, shape: tuple[int, ...], model: int, wanted: PartitionSpec) -> None:
    assert partition.spec(tuple(path.split()), shape, model) == wanted


@pytest.mark.parametrize(
    ("path", "shape", "model", "wanted"),
    [
        ("params torso layer_0 kernel", (8, 256), 1, PartitionSpec(None, "fsdp")),
        ("params torso layer_0 kernel", (64, 256), 2, PartitionSpec("fsdp", "model")),
        ("params torso layer_1 kernel", (256, 64), 2, PartitionSpec("model", "fsdp")),
        ("params torso layer_0 kernel", (3, 512), 2, PartitionSpec(None, ("fsdp", "model"))),  # one axis for both
        ("params layers up", (8, 64, 48), 1, PartitionSpec(None, None, "fsdp")),  # not by layers: a loop takes one
        ("params layers narrow", (8, 48, 64), 1, PartitionSpec(None, "fsdp", None)),
        ("params layers up", (8, 63, 47), 1, PartitionSpec("fsdp", None, None)),
        ("params torso layer_0 bias", (4096,), 2, PartitionSpec(("fsdp", "model"))),
        ("params torso layer_0 kernel", (4, 64), 2, WHOLE),
    ],
)
def test_the_rule_of_four_parts_that_share_the_data(
    path: str, shape: tuple[int, ...], model: int, wanted: PartitionSpec
) -> None:
    assert partition.spec(tuple(path.split()), shape, model, 4) == wanted


def test_any_shape_is_split_once_and_evenly_where_that_can_be() -> None:
    rng, split = np.random.default_rng(0), 0
    for _ in range(2000):
        shape = tuple(int(n) for n in rng.integers(1, 70, rng.integers(0, 4)))
        model, name = int(rng.integers(1, 9)), str(rng.choice(["kernel", "out", "layer_3", "bias"]))
        found = partition.spec(("params", name), shape, model)
        parts = [axis for axis, over in enumerate(found) if over is not None]
        can = model > 1 and math.prod(shape) >= partition.LEAST and any(n % model == 0 for n in shape)
        assert len(parts) == can, (shape, model, found)
        assert all(shape[axis] % model == 0 for axis in parts)
        alike = [over and "model" for over in partition.spec(("params", name), shape, 1, model)]
        assert alike == list(found), "devices that share the data hold what devices of one model would"
        split += len(parts)
    assert 200 < split < 1800, "both kinds must have been drawn"


def test_a_gpus_program_turns_a_layers_part_and_not_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel split by its outputs is taken row by row where it is gathered, and so is its gradient's part."""
    rng = np.random.default_rng(0)
    up, x = (rng.normal(size=shape).astype(np.float32) for shape in ((64, 48), (8, 64)))

    def slope(up: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda up: jnp.sum(jnp.square(x @ partition.fetched({"up": up})["up"])))(up)

    monkeypatch.setenv(PLATFORM, "gpu")
    program = jax.jit(meshes.per_shard(slope, meshes.make_mesh(2, fsdp=True), (WHOLE, WHOLE), WHOLE))
    assert program.lower(up, x).as_text().count("LayoutConstraint") == 2
    np.testing.assert_allclose(program(up, x), 2 * x.T @ (x @ up), rtol=1e-4, atol=1e-3)


def algorithm(**settings: Any) -> Algorithm:
    spec = Spec(jax.ShapeDtypeStruct((6,), jnp.float32), Discrete(3))
    config = replaced(PPOConfig(), **{"hidden_dim": 48, "num_layers": 3, **settings})
    return ppo.ppo(spec, config, RunContext(updates=1, mean=meshes.identity))


@pytest.mark.parametrize("settings", [{}, {"shared": True}, {"memory": 32}, {"torso": "wayformer"}])
def test_moments_lie_beside_their_parameters(settings: dict[str, Any]) -> None:
    state = jax.eval_shape(algorithm(**settings).init, jax.random.key(0))
    found = partition.specs(state, 2)
    adam = next(part for part in found.opt_state if hasattr(part, "mu"))
    assert adam.mu == adam.nu == found.params
    assert any(
        "model" in each for each in jax.tree.leaves(found.params, is_leaf=lambda x: isinstance(x, WHOLE.__class__))
    )


def test_announced_bytes_of_a_device_are_those_that_lie_on_it() -> None:
    state = quick(algorithm().init)(jax.random.key(0))
    for data, model in ((2, 2), (1, 4), (4, 1), (1, 3)):
        mesh = meshes.make_mesh(data, model)
        placed = jax.device_put(state, partition.shardings(state, mesh))
        share = partition.shares(jax.eval_shape(lambda: state), model)
        for device in mesh.devices.flat:
            here = [s.data.nbytes for x in jax.tree.leaves(placed) for s in x.addressable_shards if s.device == device]
            assert sum(here) == share.own
        assert share.whole == sum(x.nbytes for x in jax.tree.leaves(state))
        assert share.own < 1.4 * share.whole / model


def test_kernels_of_an_encoder_come_in_pairs() -> None:
    """Of a block all that is multiplied first is split by its outputs, all that takes these by its inputs."""
    encoder = attention.encoder(jax.ShapeDtypeStruct((5, 8), jnp.float32), "latent", 64, 2, dtype=jnp.float32)
    blocks = partition.specs(jax.eval_shape(encoder.init, jax.random.key(0)), 2)["blocks"]
    axes = {name: each.index("model") for name, each in blocks.items() if isinstance(each, PartitionSpec) and each}
    kernels = {name: axis for name, axis in axes.items() if "bias" not in name}
    assert kernels == {"query": 2, "key": 2, "value": 2, "wide": 2, "out": 1, "narrow": 1}
