"""Compiled digests: what calling them leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


@pytest.mark.slow
def test_compiling_holds_on_to_nothing_of_its_callers() -> None:
    """Else an image whose digest compiled the loop would count as read until somebody collects garbage."""
    numba = pytest.importorskip("numba")
    from longhaul.weight_sync import xxh3_kernels

    def digested(call: Callable[..., Any]) -> weakref.ref[np.ndarray]:
        image = np.arange(8, dtype=np.uint8)
        call(numba.njit(lambda data: np.where(data > 3, data + 1, 0).sum()), image)
        return weakref.ref(image)

    gc.disable()
    try:
        assert digested(lambda loop, data: loop(data))() is not None, "numba lets go by itself: `called` can go, too"
        assert digested(xxh3_kernels.called)() is None
    finally:
        gc.enable()
