"""Versions at those who compute with them: JAX on a mesh, torch modules, Hugging Face's files, vLLM's phases."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from longhaul.reasoning import huggingface, transformer
from longhaul.runtime import mesh as meshes
from longhaul.weight_sync import manifest, vllm
from longhaul.weight_sync.consumers import JaxWeights, TorchWeights, to_jax, to_torch
from longhaul.weight_sync.producer import named
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.torch_arrays import torch_tensor
from longhaul.weight_sync.transports import safetensors_files
from longhaul.weight_sync.transports.folder import FolderTransport
from longhaul.weight_sync.vllm import Announced, Http, Phase, PhaseError, Rollout, Worker
from tests.helpers import reference_logits as reference
from tests.helpers.weight_sync_transports import until, way

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


def test_what_does_not_fit_jax_is_named() -> None:
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


# ------------------------------------------------------------------------------------------------- Hugging Face's files


def test_a_language_model_is_published_as_files_that_others_read(tmp_path: Path) -> None:
    params = jax.tree.map(
        lambda shape: np.random.default_rng(1).normal(size=shape).astype(ml_dtypes.bfloat16),
        transformer.shapes(TINY), is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip
    lane = FolderTransport(tmp_path, durable=False, shard=20_000, beside={"config.json": huggingface.config_text(TINY)})
    with Publisher("run", epoch=1, transports=[lane]) as sender:
        sender.publish(3, huggingface.exported(TINY, params))
        until(lambda: lane.latest is not None)
    where = tmp_path / safetensors_files.folder_name(1, 3)
    assert (where / safetensors_files.INDEX).exists()
    pytest.importorskip("safetensors", reason="safetensors, of the extra llm, is not installed")
    config, loaded = huggingface.load(where, dtype="bfloat16")
    assert config == TINY
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), loaded, params)))
    found = safetensors_files.read_manifest(where)
    assert found.tensors[0].name == "model.embed_tokens.weight" and ".layers.1." in found.tensors[-2].name
    image = np.zeros(found.size, np.uint8)
    safetensors_files.read(where, found, image, lambda image, count: None)
    again = huggingface.imported(TINY, manifest.views(found, image))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), again, params)))
    with pytest.raises(huggingface.HubError, match=r"model\.norm\.weight is missing"):
        huggingface.imported(
            TINY, {name: a for name, a in manifest.views(found, image).items() if "model.norm" not in name}
        )


# ----------------------------------------------------------------------------------------------------------------- vLLM


class Fake:
    """vLLM as its trainers see it: a server whose workers each load into a dictionary of their own."""

    def __init__(self, count: int = 2) -> None:
        self.models: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
        self.flushed: list[int] = []
        self.fail = 0  # calls of update_weights from now until one fails in the last worker
        self.workers = [
            Worker(
                lambda pairs, into=into: into.update((n, t.clone()) for n, t in pairs), on_commit=self.flushed.append
            )
            for into in self.models
        ]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for worker in self.workers:
            worker.init_transfer_engine(**init_info)

    def start_weight_update(self) -> None:
        for worker in self.workers:
            worker.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.fail -= 1
        for worker in self.workers:
            if self.fail == 0 and worker is self.workers[-1]:
                raise RuntimeError("a worker has died")
            worker.receive_weights(Announced(**update_info))

    def finish_weight_update(self) -> None:
        for worker in self.workers:
            worker.finish_weight_update()

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()


@pytest.fixture
def plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no torch, its tensors are NumPy's: the phases are tested all the same."""
    try:
        import torch  # noqa: F401
    except ImportError:

        class Array(np.ndarray):
            def clone(self) -> np.ndarray:
                return np.array(self)

        monkeypatch.setattr(vllm, "torch_tensor", lambda array: array.view(Array))


@pytest.fixture
def fake() -> Iterator[Fake]:
    engine = Fake()
    yield engine
    engine.close()


def filled(version: int) -> dict[str, np.ndarray]:
    return {f"layer.{i}": np.full((4, 8), 100 * version + i, np.float32) for i in range(5)}


def loaded(fake: Fake, version: int) -> bool:
    return all(
        list(model) == list(filled(version)) and all(np.array_equal(model[n], a) for n, a in filled(version).items())
        for model in fake.models
    )


@pytest.mark.usefixtures("plain_tensors")
def test_vllm_is_brought_to_a_version_in_its_four_phases(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "CHUNK", 300)  # two tensors of 128 bytes a call
    lane = way("shared", tmp_path).serve()
    with Publisher("run", transports=[lane]) as sender:
        rollout = Rollout(sender, fake, [lane.address])
        for version in (1, 2):
            rollout.update(version, filled(version), 20)
            assert loaded(fake, version) and fake.flushed == sorted(2 * list(range(1, version + 1)))
        fake.fail = 2
        with pytest.raises(RuntimeError, match="died"):
            rollout.update(3, filled(3), 20)
        assert [worker.version for worker in fake.workers] == [2, 2] and len(fake.flushed) == 4
        with pytest.raises(PhaseError, match="start it again"):
            fake.finish_weight_update()
        rollout.update(4, filled(4), 20)  # all of it is loaded anew
        assert loaded(fake, 4) and [worker.version for worker in fake.workers] == [4, 4]


@pytest.mark.usefixtures("plain_tensors")
def test_phases_out_of_order_and_other_versions_are_refused(tmp_path: Path) -> None:
    got: dict[str, Any] = {}
    worker = Worker(lambda pairs: got.update(pairs))
    lane = way("shared", tmp_path).serve()
    for call in (worker.start_weight_update, worker.finish_weight_update):
        with pytest.raises(PhaseError, match="not initialised"):
            call()
    with Publisher("run", transports=[lane]) as sender:
        worker.init_transfer_engine([lane.address])
        with pytest.raises(PhaseError, match="shut it down"):
            worker.init_transfer_engine([lane.address])
        until(lambda: sender.status()["receivers"])
        sender.publish(1, filled(1))
        assert sender.wait(1, 20)
        root = sender.status()["root"]
        with pytest.raises(PhaseError, match="start_weight_update before"):
            worker.receive_weights(Announced(1, root, 0, 5))
        for told, error in (
            (Announced(1, root, 0, 6), "missing, or already loaded"),
            (Announced(2, "00", 0, 5, 0.05), "version 2 did not come"),
        ):
            worker.start_weight_update()
            with pytest.raises((PhaseError, TimeoutError), match=error):
                worker.receive_weights(told)
            assert worker.phase is Phase.BROKEN
            with pytest.raises(PhaseError):
                worker.receive_weights(Announced(1, root, 0, 5))
        worker.start_weight_update()
        worker.receive_weights(Announced(1, root, 0, 4))
        with pytest.raises(PhaseError, match="1 tensors are missing"):
            worker.finish_weight_update()
        worker.start_weight_update()
        worker.receive_weights(Announced(1, root, 0, 4))
        with pytest.raises(PhaseError, match="already loaded"):
            worker.receive_weights(Announced(1, root, 3, 5))
        worker.shutdown()
        got.clear()
    assert worker.phase is Phase.CLOSED and worker.version == -1


def test_the_routes_are_those_of_vllm() -> None:
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        http = Http(f"http://127.0.0.1:{server.server_port}/")
        http.init_weight_transfer_engine({"addresses": ["shm:@w"], "token": None})
        http.start_weight_update()
        http.update_weights(Announced(1, "ab", 0, 5)._asdict())
        http.finish_weight_update()
        server.shutdown()
        thread.join()
    assert [route for route, _ in asked] == [
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        "/reset_prefix_cache",
    ]
    assert asked[2][1] == {"update_info": {"version": 1, "root": "ab", "begin": 0, "end": 5, "seconds": 60.0}}
    with pytest.raises(ValueError, match="no address of a server"):
        Http("127.0.0.1:8000")
    with pytest.raises(ValueError, match="vLLM"):
        vllm.register()


def test_chunks_cut_a_row_by_bytes() -> None:
    assert list(vllm.chunks([5, 5, 5, 20, 1], 10)) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert list(vllm.chunks([], 10)) == []
    assert named({"a": 1})["a"] == 1
