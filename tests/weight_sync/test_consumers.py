"""Versions at those who compute with them: JAX on a mesh, torch modules."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from longhaul.runtime import mesh as meshes
from longhaul.weight_sync import vllm
from longhaul.weight_sync.consumers import JaxWeights, SyncWeights, TorchWeights, to_jax, to_torch, torch_tensor
from longhaul.weight_sync.producer import Producer
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from tests.helpers import reference_logits as reference
from tests.helpers.weight_sync_transports import way
from tests.helpers.weights_conformance import check_weights, params_of

TINY = dataclasses.replace(reference.CONFIGS["qwen3"], layers=2)


class Fixed:
    """A receiver that serves what it is told."""

    def __init__(self, version: int, tensors: dict[str, np.ndarray]) -> None:
        self.now = version, tensors

    def latest(self) -> tuple[int, dict[str, np.ndarray]]:
        return self.now


# ------------------------------------------------------------------------------------------------------------------ JAX


def test_each_device_of_a_mesh_gets_its_box_and_nothing_else(tmp_path: Path) -> None:
    mesh = meshes.make_mesh(2, 2)
    specs = {"w": PartitionSpec("data", "model"), "b": PartitionSpec("model"), "s": PartitionSpec()}
    values = {"w": np.arange(48.0, dtype=np.float32).reshape(8, 6), "b": np.arange(4).astype(ml_dtypes.bfloat16)}
    values |= {"s": np.array(3, np.int32)}
    like = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, array in values.items()
    }
    there = way("shared", tmp_path)
    with Publisher("run", transports=[there.serve()]) as sender, vllm.Receiver(there.connect) as receiver:
        weights = JaxWeights(receiver, like)
        with pytest.raises(LookupError, match="no version"):
            weights.latest()
        sender.publish(1, values)
        assert receiver.wait(1, 20)
        version, tree = weights.latest()
        assert version == 1 and weights.latest()[1] is tree
        for name, array in values.items():
            assert tree[name].sharding == like[name].sharding
            assert np.asarray(tree[name]).tobytes() == array.tobytes()
            for shard in tree[name].addressable_shards:
                assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(array[shard.index]).tobytes()
        assert {shard.data.shape for shard in tree["w"].addressable_shards} == {(4, 3)}
        for version in range(
            2, 9
        ):  # the image of version 1 is written over as soon as nobody reads it; who holds it does
            sender.publish(version, {**values, "w": values["w"] + version})
            assert receiver.wait(version, 20)
        assert np.asarray(tree["w"]).tobytes() == values["w"].tobytes()
        jax.jit(lambda x: x * 2, donate_argnums=0)(tree["w"])  # and may give it away
        del tree
        assert np.array_equal(weights.latest()[1]["w"], values["w"] + 8)


def test_tensors_that_do_not_fit_jax_are_named() -> None:
    held = {"w": np.zeros((2, 3), np.float32)}
    assert to_jax(held, {"w": jnp.ones((2, 3))})["w"].shape == (2, 3)
    for like, told in (
        ({"v": jnp.ones(1)}, "v is not in the version"),
        ({"w": jnp.ones((3, 2))}, r"w is float32 \[2, 3\] in the version, and float32 \[3, 2\] here"),
        ({"w": jnp.ones((2, 3), jnp.bfloat16)}, "bfloat16"),
    ):
        with pytest.raises(ValueError, match=told):
            to_jax(held, like)


# ---------------------------------------------------------------------------------------------------------------- torch


def module(torch: Any) -> Any:
    """An embedding tied to its head, a norm with buffers; bf16 and fp32."""
    made = torch.nn.Sequential(
        torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False), torch.nn.BatchNorm1d(4).to(torch.bfloat16)
    )
    made[1].weight = made[0].weight
    return made


def test_a_torch_module_is_written_in_place_and_its_tied_parameters_once() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from longhaul.weight_sync.producer import of_torch

    source, target = module(torch), module(torch)
    for tensor in source.state_dict().values():
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape).to(tensor.dtype) + 0.5)
    sent = {name: array.copy() for name, array in of_torch(source).items()}
    for array in sent.values():
        array.flags.writeable = False  # as a receiver has them
    places = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    seen: list[tuple[str, int]] = []
    weights = TorchWeights(
        Fixed(7, sent), target, lambda version: seen.append(("before", version)), lambda v: seen.append(("after", v))
    )
    assert weights.refresh() and not weights.refresh()
    assert seen == [("before", 7), ("after", 7)] and weights.version == 7
    for name, tensor in target.state_dict().items():
        assert tensor.data_ptr() == places[name] and torch.equal(tensor, source.state_dict()[name])
    assert len(to_torch(sent, target)) == len(target.state_dict()) - 1
    other = {("1.weight" if name == "0.weight" else name): array for name, array in sent.items()}
    assert "1.weight" in to_torch(other, target)  # by either of their names

    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    target[0].weight.requires_grad_(True)
    for odd, told in (
        ({"2.bias": sent["2.bias"].astype(np.float32)}, "2.bias"),
        ({"2.weight": np.zeros(3)}, "2.weight"),
    ):
        with pytest.raises(ValueError, match=told):
            to_torch({**sent, "0.weight": sent["0.weight"] * 0, **odd}, target)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def test_torch_reads_an_array_of_any_dtype_where_it_lies() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float64, np.int8, np.bool_, ml_dtypes.float8_e4m3fn):
        array = np.arange(6).astype(dtype).reshape(2, 3)
        array.flags.writeable = False
        found = torch_tensor(array)
        assert found.data_ptr() == array.__array_interface__["data"][0] and tuple(found.shape) == (2, 3)
        assert found.float().tolist() == array.astype(np.float32).tolist()
    assert torch_tensor(np.zeros((0, 2), np.int32)).shape == (0, 2) and torch_tensor(np.array(3)).item() == 3


# -------------------------------------------------------------------------------------------------------------- Weights


@pytest.mark.parametrize("kind", ["shared", "tcp", "folder"])
def test_both_ends_do_what_weights_must(kind: str, tmp_path: Path) -> None:
    there = way(kind, tmp_path)
    with (
        Publisher("run", transports=[there.serve()]) as publisher,
        Producer(publisher) as producer,
        Receiver(there.connect) as receiver,
    ):
        check_weights(SyncWeights(producer), SyncWeights(received=JaxWeights(receiver, params_of(0))))


def test_an_end_does_not_do_the_others_part(tmp_path: Path) -> None:
    with (
        Publisher("run") as publisher,
        Producer(publisher) as producer,
        pytest.raises(RuntimeError, match="receive them at an actor's"),
    ):
        SyncWeights(producer).latest()
    with (
        Receiver(way("folder", tmp_path).connect) as receiver,
        pytest.raises(RuntimeError, match="publish at the learner's"),
    ):
        SyncWeights(received=JaxWeights(receiver, params_of(0))).publish(1, params_of(1))
    with pytest.raises(ValueError, match="without an end"):
        SyncWeights()
