"""Ring of weights: what is read was written whole, also where the writer is killed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from longhaul.runtime import shared_memory
from longhaul.topologies.actor_learner import shared_buffers
from longhaul.topologies.actor_learner.shared_buffers import WeightRing
from tests.helpers.weights_conformance import check_weights

SIZE, PLACES = 1 << 16, 3

WRITER = f"""
import sys, numpy as np
from longhaul.topologies.actor_learner import shared_buffers
from longhaul.runtime import shared_memory as memory
arrays = memory.arrays(int(sys.argv[1]), memory.plan(shared_buffers.weight_regions({SIZE}, {PLACES})))
mine = shared_buffers.WeightRing(arrays)
version = 0
while True:
    mine.publish(version, np.full({SIZE}, version % 251, np.uint8))
    version += 1
"""


def rings(size: int, count: int = 1) -> list[WeightRing]:
    """Views of one ring."""
    planned = shared_memory.plan(shared_buffers.weight_regions(size, PLACES))
    block = shared_memory.create(planned.size)
    found = [WeightRing(shared_memory.arrays(block, planned)) for _ in range(count)]
    os.close(block)
    return found


def test_a_ring_does_what_weights_must() -> None:
    learner, actor = rings(64, 2)
    check_weights(learner, actor, lambda version: np.full(64, version, np.uint8), stays=False)


def test_weights_are_read_whole_while_another_process_writes_and_when_it_is_killed() -> None:
    planned = shared_memory.plan(shared_buffers.weight_regions(SIZE, PLACES))
    block = shared_memory.create(planned.size)
    mine, out = WeightRing(shared_memory.arrays(block, planned)), np.empty(SIZE, np.uint8)
    with pytest.raises(LookupError, match="no weights"):
        mine.read(-1, out)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(block)], pass_fds=(block,)) as writer:
        try:
            deadline = time.monotonic() + 30.0
            while mine.newest < 0 and time.monotonic() < deadline:
                time.sleep(0.01)
            seen = []
            while len(seen) < 300 or (seen[-1] == seen[0] and time.monotonic() < deadline):
                seen.append(mine.read(-1, out))
                assert np.all(out == seen[-1] % 251), "torn"
            assert seen == sorted(seen)
            assert seen[-1] > seen[0]
        finally:
            writer.send_signal(signal.SIGKILL)
    last = mine.read(-1, out)
    assert np.all(out == last % 251)
    with pytest.raises(LookupError, match="is not there"):
        mine.read(last - PLACES, out)
    os.close(block)


def test_versions_are_kept_as_long_as_there_are_places() -> None:
    (mine,), out = rings(4), np.empty(4, np.uint8)
    for version in range(5):
        mine.publish(version, np.full(4, version, np.uint8))
    assert [mine.read(version, out) for version in (2, 3, 4)] == [2, 3, 4]
    assert mine.view(3).tolist() == [3] * 4
    assert mine.view(1).tolist() == [0] * 4
    for gone in (0, 1, 5):
        with pytest.raises(LookupError, match=f"version {gone}"):
            mine.read(gone, out)


def test_weights_that_are_not_what_was_published_are_refused() -> None:
    (mine,), out = rings(SIZE), np.empty(SIZE, np.uint8)
    weights = np.random.default_rng(0).integers(0, 256, SIZE).astype(np.uint8)
    mine.publish(4, weights)
    assert mine.read(-1, out) == 4
    mine._weights[4 % PLACES, 1_000] ^= 1
    for version in (-1, 4):
        with pytest.raises(LookupError, match="version 4 of the weights is damaged"):
            mine.read(version, out)
    mine.publish(5, weights)
    assert mine.read(-1, out) == 5
