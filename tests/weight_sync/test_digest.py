"""Digests of memory equal the library's, however the bytes come."""

from __future__ import annotations

import numpy as np
import xxhash

from longhaul.weight_sync.buffers import Pool
from longhaul.weight_sync.digest import Running, copied, digest

LENGTHS = [*range(4), 16, 17, 128, 240, 241, 255, 256, 1023, 1024, 1025, 1088, 2047, 2048, 2049, 5000, 70_001]


def test_a_copy_has_the_librarys_digest(past: bool) -> None:
    draw = np.random.default_rng(1)
    data = draw.integers(0, 256, LENGTHS[-1] + 1, np.uint8)
    image = Pool(1 << 17, 1 << 18).take()
    assert image is not None
    for length in LENGTHS:
        for begin in (0, 1):  # aligned, and not
            part = data[begin : begin + length]
            target = image.array[:length]
            target[:] = 0
            assert copied(part, target, past) == xxhash.xxh3_128_digest(part.tobytes()) == digest(part)
            assert np.array_equal(target, part)


def test_a_digest_is_the_same_however_the_bytes_come() -> None:
    draw = np.random.default_rng(2)
    whole = draw.integers(0, 256, 5001, np.uint8)
    for data in (whole[:5000], whole[1:], whole[:4096]):
        for _ in range(20):
            running = Running(data)
            for count in sorted(draw.integers(0, data.size + 1, 4)):
                running.upto(int(count))
            assert running.end() == digest(data)
