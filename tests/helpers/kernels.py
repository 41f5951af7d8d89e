"""Compiles what numba compiles, once for all workers of the tests: python -m tests.helpers.kernels"""

from __future__ import annotations

import os

import numpy as np

from longhaul.driving import scenario_source
from longhaul.telemetry import screen
from longhaul.weight_sync import digest
from longhaul.weight_sync.delta import tensor_delta


def compile_all() -> None:
    """The loops of the generator, of scenarios, of digests and of deltas, for what tests call them with."""
    os.environ["LONGHAUL_CACHE"] = "off"  # what is found there would not be made
    screen.PLAIN_SOON = 600.0
    scenario_source.generated(0, 6, agents=2, horizon=40, workers=1)
    generator = np.random.default_rng(0)
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
        base = generator.integers(0, np.iinfo(dtype).max, 4096, dtype)
        new = base + (generator.random(base.size) < 0.1).astype(dtype)
        out = np.empty_like(base)
        for before in (None, base):
            tensor_delta.decode(before, tensor_delta.encode(before, new, dtype), out)
        assert (out == new).all()
    source, room = np.zeros(1 << 20, np.uint8), np.empty((1 << 20) + 64, np.uint8)
    begin = -room.ctypes.data % 64
    target = room[begin : begin + source.size]
    digest.copied(source, target, past=True)
    row = digest.Row(source.ctypes.data, 4096, target.ctypes.data, 4096, 4096, 256)
    loops = digest.compiled()
    assert loops is not None
    assert loops.pour_rows(np.array([row], np.int64))[0].tobytes() == digest.digest(source)


if __name__ == "__main__":
    compile_all()
