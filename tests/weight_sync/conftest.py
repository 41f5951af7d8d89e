"""Fixtures of weight synchronisation."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from longhaul.weight_sync import digest, packing


@pytest.fixture(scope="session", autouse=True)
def compiled_deltas() -> None:
    """Compiled loops of deltas: in a fresh clone numba takes 10 s for them, which no test's patience should pay."""
    if any(importlib.util.find_spec(name) is None for name in ("numba", "zstandard", "xxhash")):
        return
    from longhaul.weight_sync.delta import tensor_delta

    for dtype in (np.uint8, np.float16, np.float32):
        base = np.arange(5000).astype(dtype)
        new = base.copy()
        new[::7] += 1
        out = bytearray(base.tobytes())
        tensor_delta.apply(out, tensor_delta.encode(base.tobytes(), new.tobytes(), dtype))
        assert bytes(out) == new.tobytes()


@pytest.fixture(params=[False, True], ids=["library", "streams"])
def past(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True where all is large here: images are written past the caches, by the compiled loops."""
    if request.param and importlib.util.find_spec("numba") is None:
        pytest.skip("numba, of the extra sync, is not installed")
    monkeypatch.setattr(digest, "LEAST", 241)
    monkeypatch.setattr(digest, "PIECE", 4096)
    monkeypatch.setattr(packing, "LARGE", 0 if request.param else 1 << 60)
    return request.param
