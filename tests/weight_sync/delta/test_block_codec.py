"""Blocks of a delta that lie: refused in one line, or read alike by both kinds of loops; nothing is written outside."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from longhaul.weight_sync.delta import block_codec
from longhaul.weight_sync.delta.block_codec import CLASSES, Mode
from tests.helpers.delta_oracle import LOOPS, loops

zstandard = pytest.importorskip("zstandard", reason="zstandard, of the extra sync, is not installed")

SIZE = 3000
BASE = np.zeros(SIZE, np.uint16)  # of the first class, all of them
ONE = (1, 0, 0, 0)
NO = b""


def block(
    counts: Sequence[int] = ONE,
    highs: Sequence[bytes] = (b"\0", NO, NO, NO),
    halves: Sequence[bytes] = (b"\1", NO, NO, NO),
    more: bytes = NO,
    lows: Sequence[int] = (0, 0, 0, 0),
    rest: Sequence[int] = (),
    whole: Sequence[int] = (),
    bits: bytes = NO,
    bounds: bytes = b"\xff\xff\xff",
    rare: Sequence[int] | None = None,
    packed: int = 0,
    lengths: Sequence[int] | None = None,
) -> bytes:
    """A block as it travels; by default one that adds one unit to the first element. `packed` is of the first stream;
    `rare` and `lengths` are what it says of its streams, if that is not so."""
    streams = [*highs, *halves, more]
    said = [len(each) << 1 for each in streams] if lengths is None else list(lengths)
    said[0] |= packed
    numbers = [*counts, *lows, *((len(rest), len(more), len(whole)) if rare is None else rare), *said]
    words = [np.array(each, np.uint32).tobytes() for each in (rest, whole)]
    return b"".join([bytes([Mode.DELTA]), bounds, block_codec._varints(numbers), *streams, bits, *words])


def decoded(data: bytes, by: ModuleType, base: np.ndarray = BASE) -> np.ndarray | str:
    """What a block makes of `base`, or why it is none. Nobody touches what lies around."""
    around = np.full(base.size + 512, 171, base.dtype)
    out = around[256:-256]
    try:
        with loops(by):
            block_codec.decode(base, out, memoryview(data))
    except ValueError as error:
        return str(error)
    finally:
        assert (around[:256] == 171).all() and (around[-256:] == 171).all()
    return out


@pytest.mark.parametrize("by", LOOPS, ids=["plain", "compiled"])
def test_a_block_by_hand_is_read_as_it_is_meant(by: ModuleType) -> None:
    """The places and steps that the format's words say: gaps in three ways, steps in three."""
    assert np.flatnonzero(decoded(block(), by)).tolist() == [0]
    made = decoded(
        block(
            counts=(4, 0, 0, 0),
            highs=(bytes([3, 0, 255, 1]), NO, NO, NO),
            lows=(2, 0, 0, 0),
            bits=bytes([0b01_00_01_10]),  # the first gap's are the lowest
            rest=[1000],
            halves=(bytes([0xF1, 0xFF]), NO, NO, NO),
            more=bytes([7, 255, 0]),
            whole=[40_000],
        ),
        by,
    )
    assert isinstance(made, np.ndarray)
    # Gaps of 3 * 4 + 2, 0 * 4 + 1, 1000 and 1 * 4 + 1; a step is told less one, and zigzag: 2 is +1, 23 is -12.
    assert np.flatnonzero(made).tolist() == [14, 16, 1017, 1023]
    keys = [1, -12, -20_001, 8]  # of the width: below zero the sign is set, and all other bits are flipped
    assert made[[14, 16, 1017, 1023]].tolist() == [key if key > 0 else (key & 0xFFFF) ^ 0x7FFF for key in keys]


def stream(start: bytes) -> dict[str, Any]:
    """A compressed stream that begins so, of one byte."""
    return {"highs": (start + b"\x09\0\0\0", NO, NO, NO), "packed": 1}


BOMB = zstandard.ZstdCompressor(
    compression_params=zstandard.ZstdCompressionParameters(
        write_content_size=False, window_log=17, format=zstandard.FORMAT_ZSTD1_MAGICLESS
    )
).compress(bytes(1 << 20))


@pytest.mark.parametrize("by", LOOPS, ids=["plain", "compiled"])
@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"counts": (SIZE, 1, 0, 0)}, "more elements than it has"),
        ({"counts": ((1 << 35) - 1, 0, 0, 0)}, "more elements than it has"),
        ({"lows": (block_codec.MOST_LOW + 1, 0, 0, 0)}, "more elements than it has"),
        ({"rare": (2, 0, 0)}, "more elements than it has"),
        ({"rare": (0, 0, 1)}, "too short"),
        ({"rest": [7]}, "too long"),
        ({"more": b"\0"}, "too long"),
        ({"whole": [7]}, "too long"),
        ({"bits": b"\0"}, "too long"),
        ({"lows": (1, 0, 0, 0)}, "too short"),
        ({"highs": (b"\xff", NO, NO, NO)}, "ends too early"),
        ({"halves": (b"\x0f", NO, NO, NO)}, "ends too early"),
        ({"halves": (b"\x0f", NO, NO, NO), "more": b"\xff"}, "ends too early"),
        ({"highs": (b"\xff", NO, NO, NO), "rest": [SIZE]}, "lead outside"),
        ({"highs": (b"\xff", NO, NO, NO), "rest": [0xFFFFFFFF]}, "lead outside"),
        ({"bounds": b"\0\0\0", "counts": (0, 1, 0, 0), "highs": (NO, b"\0", NO, NO), "halves": (NO, b"\1", NO, NO)},
         "lead outside"),
        ({"bounds": b"\x09\x08\xff"}, "do not ascend"),
        ({"highs": (b"\0\0", NO, NO, NO)}, "another length"),
        ({"lengths": [1 << 30, *8 * [0]]}, "another length"),
        ({"lengths": [0, *8 * [0]], "highs": (NO, NO, NO, NO)}, "another length"),
        ({"packed": 1, "highs": (NO, NO, NO, NO)}, "damaged"),
        (stream(b"\xc0\x48" + (1 << 45).to_bytes(8, "little")), "as none of ours"),  # memory for 32 TB
        (stream(b"\x20\x01"), "as none of ours"),
        (stream(b"\x00\x88"), "too much memory"),  # to look back by 128 MB
        ({"highs": (BOMB, NO, NO, NO), "packed": 1}, "damaged"),
    ],
    ids=str,
)  # fmt: skip
def test_a_block_that_lies_is_refused(lie: dict[str, Any], said: str, by: ModuleType) -> None:
    assert said in str(decoded(block(**lie), by))


@pytest.mark.parametrize("by", LOOPS, ids=["plain", "compiled"])
def test_truncated_and_endless_blocks_are_refused(by: ModuleType) -> None:
    for cut in range(len(block())):
        assert "the delta is damaged" in str(decoded(block()[:cut], by))
    assert "a number has no end" in str(decoded(bytes([Mode.DELTA, 255, 255, 255]) + 40 * b"\xff", by))
    assert "too long" in str(decoded(block() + b"\0", by))
    assert "no known mode" in str(decoded(b"\4", by))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_both_kinds_of_loops_read_any_block_alike(dtype: type) -> None:
    """Streams of the right lengths and of any content, classes of any bounds: what they make is the same, bit for bit,
    and what one refuses the other does."""
    draw, made = np.random.default_rng(11), 0
    for _ in range(150):
        size = int(draw.choice([3, 64, 65, 4096, 4160, 9000]))
        base = draw.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
        counts = draw.multinomial(int(draw.integers(0, min(size, 200))), draw.dirichlet(np.ones(CLASSES))).tolist()
        lows = draw.integers(0, 3, CLASSES).tolist()
        rarely = np.append(draw.integers(0, 9), 255)
        highs = [draw.choice(rarely, count, p=[0.98, 0.02]).astype(np.uint8) for count in counts]
        halves = [draw.integers(0, 256, -(-count // 2), np.uint8) for count in counts]
        steps = [np.stack([each & 15, each >> 4], 1).reshape(-1)[:count] for each, count in zip(halves, counts)]
        more = draw.choice([3, 255], sum(int((each == 15).sum()) for each in steps)).astype(np.uint8)
        words = (sum(int((each == 255).sum()) for each in highs), int((more == 255).sum()))
        rest, whole = (draw.integers(0, 50 if i == 0 else 1 << 32, count).tolist() for i, count in enumerate(words))
        raw = b"".join(draw.bytes(-(-count * low // 8)) for count, low in zip(counts, lows))
        bounds = bytes(sorted(draw.integers(0, 256, CLASSES - 1).tolist()))
        data = block(
            counts, [each.tobytes() for each in highs], [each.tobytes() for each in halves], more.tobytes(), lows,
            rest, whole, raw, bounds,
        )  # fmt: skip
        found = [decoded(data, by, base) for by in LOOPS]
        assert type(found[0]) is type(found[1]), found
        assert np.array_equal(found[0], found[1])
        made += isinstance(found[0], np.ndarray)
    assert 30 <= made <= 145  # of both sorts there are enough
