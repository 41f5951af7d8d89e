"""Images: gathered with the digests of what was given, whatever copies them, and within the memory that was granted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from longhaul.weight_sync import packing
from longhaul.weight_sync.buffers import Pool
from longhaul.weight_sync.digest import digest
from longhaul.weight_sync.manifest import Manifest


def test_an_image_has_what_was_given_and_its_digests(past: bool) -> None:
    draw = np.random.default_rng(0)
    sizes = [0, 1, 7, 8, 63, 64, 65, 4095, 4096, 4097, 8192, 20_000, 40_960]
    given = {f"t{size}": draw.integers(0, 256, size, np.uint8) for size in sizes}
    given["odd"] = draw.integers(0, 256, 9001, np.uint8)[1:]  # not aligned to words
    given["turned"] = draw.integers(0, 1 << 16, (60, 90), np.uint16).T
    given["read-only"] = draw.random(5000)
    given["read-only"].flags.writeable = False
    planned, size = packing.describe(given)
    image = Pool(size, 2 * size).take()
    assert image is not None
    with ThreadPoolExecutor(2) as pool:
        found = packing.gather(given, planned, image.array, pool, 2)
    for tensor in found:
        held = np.ascontiguousarray(given[tensor.name]).tobytes()
        assert image.array[tensor.offset : tensor.end].tobytes() == held
        assert tensor.digest == digest(held)


def test_a_bit_that_flips_on_the_way_is_found(past: bool) -> None:
    """Any one bit, in any place of a block, a stripe and what is behind them, however the bytes come."""
    draw = np.random.default_rng(2)
    given = {"a": draw.integers(0, 256, 5001, np.uint8), "b": draw.integers(0, 256, 300, np.uint8)}
    planned, size = packing.describe(given)
    image = np.empty(size, np.uint8)
    with ThreadPoolExecutor(1) as pool:
        tensors = packing.gather(given, planned, image, pool, 1)
    manifest = Manifest("run", 0, 1, -1, size, tensors)
    for at in (*range(0, 5001, 97), 4095, 4096, 5000, tensors[1].offset, tensors[1].end - 1):
        image[at] ^= 1 << at % 8
        arrival = packing.Arrival(manifest)
        for count in (100, 1500, 4096, 5001, size):
            arrival.arrived(image, count)
        assert arrival.complete and arrival.damaged == ["a" if at < 5001 else "b"]
        image[at] ^= 1 << at % 8
