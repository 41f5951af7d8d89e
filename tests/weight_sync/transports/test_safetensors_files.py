"""Versions as safetensors files that other libraries read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from longhaul.reasoning import huggingface, transformer
from longhaul.weight_sync import manifest
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.transports import safetensors_files
from longhaul.weight_sync.transports.folder import FolderTransport
from tests.helpers import reference_logits as reference
from tests.helpers.weight_sync_transports import tensors, until

TINY = dataclasses.replace(reference.CONFIGS["qwen3"], layers=2)


def test_a_language_model_is_published_as_files_that_others_read(tmp_path: Path) -> None:
    params = jax.tree.map(
        lambda shape: np.random.default_rng(1).normal(size=shape).astype(ml_dtypes.bfloat16),
        transformer.shapes(TINY), is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip
    lane = FolderTransport(tmp_path, durable=False, shard=20_000, beside=huggingface.beside(TINY, dtype="bfloat16"))
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
    views, sent = manifest.views(found, image), huggingface.exported(TINY, params)
    assert {name: view.tobytes() for name, view in views.items()} == {name: a.tobytes() for name, a in sent.items()}


def test_the_index_names_the_shard_of_every_tensor(tmp_path: Path) -> None:
    with Publisher("run", epoch=0, transports=[FolderTransport(tmp_path, shard=3000, durable=False)]) as sender:
        sender.publish(1, tensors(1))
        assert sender.wait(1, 20)
        until(lambda: (tmp_path / "LATEST").exists())
    index = json.loads((tmp_path / "version-0-1" / safetensors_files.INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in tensors(1).values())}
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
