"""Shared memory: arrays of their own cache lines, and wake-ups that notice the death of the other side."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from longhaul.runtime import shared_memory
from longhaul.runtime.shared_memory import Leaf, Wakeup, wakeup


def test_arrays_have_lines_of_their_own_and_are_the_same_memory() -> None:
    named = [("a", Leaf((3,), "int8")), ("none", Leaf((0, 4), "float32")), ("b", Leaf((2, 2), "float64"))]
    planned = shared_memory.plan(named)
    assert [region.offset % shared_memory.LINE for region in planned.regions.values()] == [0, 0, 0]
    assert planned.size == 128
    block = shared_memory.create(planned.size)
    one, other = shared_memory.arrays(block, planned), shared_memory.arrays(block, planned)
    os.close(block)
    one["b"][1, 0] = 4.5
    one["a"][:] = [1, 2, 3]
    assert other["b"].tolist() == [[0.0, 0.0], [4.5, 0.0]]
    assert other["a"].tolist() == [1, 2, 3]
    assert other["none"].shape == (0, 4)
    with pytest.raises(ValueError, match="two arrays"):
        shared_memory.plan([("a", Leaf((), "int8"))] * 2)


def test_a_map_is_where_huge_pages_can_be_and_is_gone_with_its_last_view() -> None:
    size = 2 * shared_memory.HUGE + 5000
    block = shared_memory.create(size)
    one, other = (shared_memory.mapped(block, size) for _ in range(2))
    shared_memory.allocate(one)
    views = [np.frombuffer(memory, np.uint8, size) for memory in (one, other)]
    views[0][:] = 7
    assert (views[1] == 7).all()
    shared_memory.forget(other, shared_memory.HUGE, size)
    assert (views[1] == 7).all()  # its bytes stay
    assert os.fstat(block).st_size == size
    os.close(block)
    if sys.platform.startswith("linux"):
        places = [each.ctypes.data for each in views]
        assert [place % shared_memory.HUGE for place in places] == [0, 0]

        def mapped(place: int) -> bool:
            return any(line.startswith(f"{place:x}-") for line in Path("/proc/self/maps").read_text().splitlines())

        assert all(map(mapped, places))
        del one, other, views
        assert not any(map(mapped, places))


def test_wakeups_count_once_and_tell_that_nobody_is_left() -> None:
    door = wakeup()
    for _ in range(200_000):  # more than a pipe holds
        door.wake()
    assert door.wait(1.0)
    while door._poll.poll(0):
        door.wait(0.0)
    began = time.monotonic()
    assert door.wait(0.05)
    assert time.monotonic() - began >= 0.04
    os.close(door.writes)
    door.writes = -1
    assert not door.wait(5.0)
    door.close()
    gone = Wakeup(*os.pipe())
    os.close(gone.reads)
    gone.reads = -1
    gone.wake()
    gone.close()
