"""Fixtures of weight synchronisation."""

from __future__ import annotations

import importlib.util

import pytest

from longhaul.weight_sync import image as images
from longhaul.weight_sync.digest import digest as digests


@pytest.fixture(params=[False, True], ids=["library", "streams"])
def past(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether all is large here: images are written past the caches, and digested by the compiled loops."""
    if request.param and importlib.util.find_spec("numba") is None:
        pytest.skip("numba, of the extra sync, is not installed")
    monkeypatch.setattr(digests, "LEAST", 241)
    monkeypatch.setattr(digests, "LARGE", 241 if request.param else 1 << 60)
    monkeypatch.setattr(digests, "PIECE", 4096)
    monkeypatch.setattr(images, "LARGE", 0 if request.param else 1 << 60)
    return request.param
