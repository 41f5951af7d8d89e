"""Tensors of trees and torch modules by name."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.weight_sync.producer import named


class Pair(NamedTuple):
    a: Any
    b: Any


def test_the_leaves_of_any_tree_have_the_names_of_their_paths() -> None:
    tree = {"x": Pair(np.zeros(2, np.int8), [jnp.ones(1), 3.0]), "none": None}
    found = named(tree)
    assert list(found) == ["x.a", "x.b.0", "x.b.1"]
    assert found["x.a"] is tree["x"].a and found["x.b.1"] == 3.0
    with pytest.raises(ValueError, match=r"two leaves are named x\.y"):
        named({"x": {"y": np.zeros(1)}, "x.y": np.zeros(1)})
    with pytest.raises(ValueError, match="leaf k has dtype key"):
        named({"k": jax.random.key(0)})


def test_torch_gives_its_tensors_and_tied_ones_once() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from longhaul.weight_sync.producer import of_torch

    module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
    module[1].weight = module[0].weight
    assert list(of_torch(module)) == ["0.weight"]
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool):
        given = torch.arange(6).reshape(2, 3).to(dtype)
        for tensor in (given, given.T):
            found = of_torch({"w": tensor})["w"]
            assert found.shape == tuple(tensor.shape) and str(found.dtype) == str(dtype).removeprefix("torch.")
            assert found.astype(np.float32).tolist() == tensor.float().tolist()
    with pytest.raises(ValueError, match="complex64"):
        of_torch({"w": torch.zeros(1, dtype=torch.complex64)})
