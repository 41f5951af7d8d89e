"""Compiled digests: that they are the library's, and what calling them leaves behind."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash

from longhaul.runtime import shared_memory
from longhaul.weight_sync.digest import LEAST_ROW, Row


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


def test_rows_are_copied_and_digested_as_the_library_does() -> None:
    """Runs of every length beside blocks of the digest, contiguous and apart on either side, from any address."""
    pytest.importorskip("numba")
    from longhaul.weight_sync import xxh3_kernels

    size = 1 << 18
    memory = shared_memory.create(size)
    target = np.frombuffer(shared_memory.mapped(memory, size), np.uint8, size)
    source = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    rows, wanted = [], []
    for length in (64, 128, 192, 960, 1024, 1088, 2048, 3072, 5056):
        for count in (1, 2, 4, 5, 15, 16, 17):
            for apart, away in ((0, 0), (72, 0), (0, 128)):
                if length * count < LEAST_ROW:
                    continue
                begin, from_step, step = count, length + apart, length + away
                copied = np.zeros(size, np.uint8)
                runs = [source[begin + i * from_step :][:length] for i in range(count)]
                for i, run in enumerate(runs):
                    copied[128 + i * step :][:length] = run
                row = Row(source.ctypes.data + begin, from_step, target.ctypes.data + 128, step, length, count)
                target[:] = 0
                found = xxh3_kernels.pour_rows(np.array([row], np.int64)).tobytes()
                assert found == xxhash.xxh3_128_digest(b"".join(run.tobytes() for run in runs)), row
                assert np.array_equal(target, copied), row
                rows.append(row)
                wanted.append(found)
    assert xxh3_kernels.pour_rows(np.array(rows, np.int64)).tobytes() == b"".join(wanted)
    os.close(memory)


def test_rows_that_go_in_step_are_copied_and_digested_as_one_by_one() -> None:
    """Three parts of each run of the source, and a copy of one of them; then a bundle of another form."""
    pytest.importorskip("numba")
    from longhaul.weight_sync import xxh3_kernels

    size, place = 1 << 20, 1 << 18
    memory = shared_memory.create(size)
    target = np.frombuffer(shared_memory.mapped(memory, size), np.uint8, size)
    source = np.random.default_rng(2).integers(0, 256, size, np.uint8)
    begin, to = source.ctypes.data, target.ctypes.data
    for length, count in ((64, 5), (1024, 3), (1088, 17), (3072, 40)):
        rows = [
            Row(begin + part * length, 3 * length, to + i * place, length + 64 * i, length, count)
            for i, part in enumerate((0, 1, 2, 1))
        ]
        rows.append(Row(begin + 7, 256, to + 3 * place + (3 * place) // 4, 256, 256, 9))
        target[:] = 0
        one_by_one = xxh3_kernels.pour_rows(np.array(rows, np.int64))
        copied = target.copy()
        target[:] = 0
        found = xxh3_kernels.pour_rows(np.array(rows, np.int64), np.array([4, 5]))
        assert found.tobytes() == one_by_one.tobytes() and np.array_equal(target, copied) and copied.any()
        assert found[1].tobytes() == found[3].tobytes() != found[2].tobytes()
    os.close(memory)
