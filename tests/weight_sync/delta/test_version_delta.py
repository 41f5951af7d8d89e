"""Changes between versions are verified while they are applied."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from longhaul.weight_sync import packing
from longhaul.weight_sync.delta import version_delta
from longhaul.weight_sync.manifest import Manifest
from tests.helpers.weight_sync_transports import (
    CODEC,
)


@CODEC
def test_changes_are_verified_in_the_making() -> None:
    """A bit of the base that flipped since it was verified is found, in what changes and in what does not."""
    draw = np.random.default_rng(0)
    given = {"w": draw.integers(0, 1 << 16, 4000, np.uint16), "still": draw.random(500), "none": np.empty(0, np.uint8)}
    planned, size = packing.describe(given)
    before, after, made = (np.zeros(size, np.uint8) for _ in range(3))
    with ThreadPoolExecutor(1) as pool:
        base = Manifest("run", 0, 1, -1, size, packing.gather(given, planned, before, pool, 1))
        given["w"][::100] += 1
        new = Manifest("run", 0, 2, -1, size, packing.gather(given, planned, after, pool, 1))
    found = version_delta.make(base, before, new, after)
    assert found is not None

    def made_by(body: bytes) -> None:
        came = version_delta.frames(version_delta.taken(memoryview(body)), len(body), found.most, new)
        version_delta.apply(came, base, before, new, made, None)

    made_by(found.body)
    assert np.array_equal(made, after)
    for at in (33, base.tensors[1].offset, base.tensors[1].end - 1):
        before[at] ^= 16
        with pytest.raises(ValueError, match=r"damaged|is not what it was"):
            made_by(found.body)
        before[at] ^= 16
    for body in (found.body[:-1], found.body + found.body, found.body[: version_delta.HEAD.size - 1]):
        with pytest.raises(ValueError, match="the changes are"):
            made_by(body)
    new = new._replace(tensors=(new.tensors[0]._replace(digest=bytes(16)), *new.tensors[1:]))
    with pytest.raises(ValueError, match="make another w than"):
        made_by(found.body)
