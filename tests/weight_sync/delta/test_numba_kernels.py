"""Compiled loops of the delta codec; test_block_codec compares them with the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from longhaul.weight_sync.delta import numba_kernels


def test_bits_are_placed_without_the_processors_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no PDEP."""
    draw = np.random.default_rng(0)
    monkeypatch.setattr(numba_kernels, "BMI2", False)
    place = njit(numba_kernels.place.py_func)
    for mask in draw.integers(1, 1 << 64, 100, np.uint64, endpoint=False):
        bits = [at for at in range(64) if int(mask) >> at & 1]
        assert [place(mask, rank) for rank in range(len(bits))] == bits
    assert "pdep" not in next(iter(place.inspect_llvm().values()))
