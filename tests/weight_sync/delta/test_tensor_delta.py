"""Deltas of bit patterns: exact on every pattern, smaller than independent changes could be, safe when damaged."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longhaul.weight_sync.delta import block_codec, tensor_delta
from longhaul.weight_sync.digest import digest
from tests.helpers import delta_oracle
from tests.helpers.delta_oracle import LOOPS, loops

pytest.importorskip("zstandard", reason="zstandard, of the extra sync, is not installed")

DTYPES = {
    "bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32, "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8, "int8": np.uint8, "float64": np.uint64,
}  # fmt: skip


def special(dtype: np.dtype) -> np.ndarray:
    """Both zeros, least and greatest numbers, infinities, NaNs of both kinds and signs: patterns of bf16 and others."""
    bits = dtype.itemsize * 8
    sign, every = 1 << (bits - 1), (1 << bits) - 1
    exponent = {8: 0x7C, 16: 0x7F80, 32: 0x7F800000, 64: 0x7FF << 52}[bits]
    found = [0, 1, sign - 1, exponent, exponent - 1, exponent + 1, exponent | exponent >> 1, every, every >> 1]
    return np.array([one ^ flip for one in found for flip in (0, sign)], np.uint64).astype(dtype)


def pair(generator: np.random.Generator, dtype: np.dtype, size: int, kind: int) -> tuple[np.ndarray, np.ndarray]:
    """A base and what is new: training-like, or one of the ways to be unlike it."""
    least, most = 0, np.iinfo(dtype).max
    noise = generator.integers(least, most, size, dtype, endpoint=True)
    if kind == 0 or size == 0:  # all of it at random
        return noise, generator.integers(least, most, size, dtype, endpoint=True)
    if kind == 1:  # nothing changes
        return noise, noise.copy()
    if kind == 2:  # from special to special patterns
        return generator.choice(special(dtype), size), generator.choice(special(dtype), size)
    new = noise.copy()
    share = (0.0, 1.0, 0.02, 0.3)[kind - 3] if kind < 7 else 1.0 / size
    hit = generator.random(size) <= share
    step = generator.integers(-3, 3, size, np.int64, endpoint=True).astype(dtype)
    new[hit] += step[hit]  # wraps around: from the greatest pattern to 0 and back
    if kind == 7:  # one sign, in one element
        new[generator.integers(size)] ^= dtype.type(1 << (dtype.itemsize * 8 - 1))
    return noise, new


@pytest.mark.parametrize(
    ("by", "count"),
    [(LOOPS[0], 90), (LOOPS[1], 800), pytest.param(LOOPS[1], 10_000, marks=pytest.mark.slow)],
    ids=["plain", "compiled", "ten thousand"],
)
def test_tensors_come_back_bit_for_bit(by: ModuleType, count: int) -> None:
    generator = np.random.default_rng(7)
    sizes = [0, 1, 2, 63, 64, 65, 127, 128, 200, 1000]
    for i in generator.permutation(10_000)[:count].tolist():
        name = list(DTYPES)[i % len(DTYPES)]
        base, new = pair(generator, np.dtype(DTYPES[name]), sizes[i // 7 % len(sizes)], i // 70 % 8)
        out = np.empty_like(base)
        with loops(by):
            frame = tensor_delta.encode(base, new, name)
            tensor_delta.decode(base, frame, out)
            assert out.tobytes() == new.tobytes(), (i, name, base.size)
            tensor_delta.apply(base, frame)
        assert base.tobytes() == new.tobytes(), (i, name, base.size)


@pytest.mark.parametrize("size", [5, 4096, 4160, 4161, 20_000])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_the_compiled_loops_write_what_numpy_writes(dtype: type, size: int) -> None:
    generator = np.random.default_rng(size)
    for kind in range(8):
        base, new = pair(generator, np.dtype(dtype), size, kind)
        frames = []
        for by in LOOPS:
            with loops(by):
                frames.append(tensor_delta.encode(base, new, dtype))
        assert frames[0] == frames[1]
        for by in LOOPS:
            out = np.empty_like(base)
            with loops(by):
                tensor_delta.decode(base, frames[0], out)
            np.testing.assert_array_equal(out, new)


def test_blocks_in_a_pool_are_those_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_codec, "BLOCK", 1 << 12)
    base, new = trained(50_000, 1e-5)
    with ThreadPoolExecutor(3) as pool:
        frame = tensor_delta.encode(base, new, np.uint16, pool=pool)
        assert frame == tensor_delta.encode(base, new, np.uint16)
        assert len(tensor_delta.read(frame).blocks) == 13
        out = np.empty_like(base)
        tensor_delta.decode(base, frame, out, pool=pool)
    np.testing.assert_array_equal(out, new)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_a_result_is_digested_whatever_its_blocks_are(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of every mode, the last one short: the digest, which `decode` compares, is that of all of them; in place
    and elsewhere, and nothing around is touched."""
    monkeypatch.setattr(block_codec, "BLOCK", 1 << 13)
    generator = np.random.default_rng(3)
    for last in (1000, 4096, 4097, 5000):
        parts = [pair(generator, np.dtype(dtype), 1 << 13, kind) for kind in (5, 5, 0, 1, 7, 5)]
        parts.append(pair(generator, np.dtype(dtype), last, 5))
        base, new = (np.concatenate(each) for each in zip(*parts))
        frame = tensor_delta.encode(base, new, dtype)
        memory = np.full(base.size + 100, 171, dtype)
        out = memory[50:-50]
        tensor_delta.decode(base, frame, out)
        np.testing.assert_array_equal(out, new)
        out[:] = base
        tensor_delta.apply(out, frame)
        np.testing.assert_array_equal(out, new)
        assert (memory[:50] == 171).all() and (memory[-50:] == 171).all()
    damaged = bytearray(frame[: -tensor_delta.SEAL])
    damaged[tensor_delta.HEAD.size - 1] ^= 1  # of the digest that should come out
    with pytest.raises(ValueError, match="its result is"):
        tensor_delta.apply(base, tensor_delta.seal(damaged))
    np.testing.assert_array_equal(base, new)


def test_keys_grow_with_the_numbers_and_are_all_different() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    signed = delta_oracle.keys(every)
    signed = np.where(signed >= 1 << 15, signed - (1 << 16), signed)
    assert np.unique(signed).size == every.size
    numbers = every.view(ml_dtypes.bfloat16).astype(np.float32)
    real = np.isfinite(numbers)
    by_key = numbers[real][np.argsort(signed[real])]
    assert (np.diff(by_key) >= 0).all()
    # One unit in the last place is one key.
    one = np.array([1.0], ml_dtypes.bfloat16)
    after = np.nextafter(one, np.array([2.0], ml_dtypes.bfloat16))
    assert delta_oracle.keys(after.view(np.uint16)) - delta_oracle.keys(one.view(np.uint16)) == 1


# --------------------------------------------------------------------------------------------------------------- size


def rounded(x: np.ndarray) -> np.ndarray:
    """To bf16, as bit patterns."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def trained(size: int, rate: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """bf16 of normal weights and of an update whose size does not depend on theirs, as Adam's does not."""
    generator = np.random.default_rng(seed)
    weights = generator.standard_normal(size) * 0.03
    return rounded(weights), rounded(weights + 0.3 * rate * generator.standard_normal(size))


def entropy(base: np.ndarray, new: np.ndarray) -> float:
    """Bits that independent changes need: which elements, and by how many units in the last place."""
    share = (base != new).mean()
    positions = -base.size * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    steps = delta_oracle.keys(new) - delta_oracle.keys(base)
    counts = np.unique(steps[base != new], return_counts=True)[1]
    return float(positions - (counts * np.log2(counts / counts.sum())).sum())


@pytest.mark.parametrize(("rate", "share"), [(1e-6, 0.86), (1e-5, 0.88), (1e-4, 0.97)])
def test_a_delta_is_smaller_than_independent_changes_could_be(rate: float, share: float) -> None:
    base, new = trained(1 << 19, rate)
    frame = tensor_delta.encode(base, new, "bfloat16")
    assert 8 * len(frame) < share * entropy(base, new)


def test_steps_and_gaps_that_are_rare() -> None:
    base = np.zeros(1 << 18, np.uint16)
    new = base.copy()
    new[[0, 1, 70_000, -1]] = [1, 0x8000, 0x7F80, 300]
    frame = tensor_delta.encode(base, new, "bfloat16")
    assert len(frame) < tensor_delta.HEAD.size + tensor_delta.SEAL + 90
    out = np.empty_like(base)
    tensor_delta.decode(base, frame, out)
    np.testing.assert_array_equal(out, new)


@pytest.mark.parametrize("base", [None, np.zeros(4096, np.float32)])
def test_noise_is_no_larger_as_a_delta(base: np.ndarray | None) -> None:
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 1 << 32, 4096, np.uint32)
    head = tensor_delta.HEAD.size + 4 + 1 + tensor_delta.SEAL
    assert len(tensor_delta.encode(base, noise, "float32")) == noise.nbytes + head
    weights = generator.standard_normal(4096).astype(np.float32)  # exponents of normal numbers are worth compressing
    assert len(tensor_delta.encode(base, weights, "float32")) < 0.95 * weights.nbytes
    for new in (noise, weights):
        out = np.empty_like(new)
        tensor_delta.decode(base, tensor_delta.encode(base, new, "float32"), out)
        assert out.tobytes() == new.tobytes()


def test_an_unchanged_tensor_costs_its_head() -> None:
    base = np.arange(100_000, dtype=np.uint16)
    assert len(tensor_delta.encode(base, base.copy(), np.uint16)) == tensor_delta.HEAD.size + 4 + 1 + tensor_delta.SEAL
    assert len(tensor_delta.encode(b"", b"", "bfloat16")) == tensor_delta.HEAD.size + tensor_delta.SEAL


# -------------------------------------------------------------------------------------------------------------- guards


def test_a_delta_is_for_its_base_alone_and_for_once() -> None:
    base, new = trained(1000, 1e-4)
    frame = tensor_delta.encode(base, new, "bfloat16")
    staging = base.copy()
    tensor_delta.apply(staging, frame)
    with pytest.raises(ValueError, match="needs the base"):
        tensor_delta.apply(staging, frame)
    np.testing.assert_array_equal(staging, new)  # and nothing was written
    for other, known in ((None, None), (base[:-1], None), (base, digest(new))):
        out = np.full_like(base, 7)
        with pytest.raises(ValueError, match="needs the base"):
            tensor_delta.decode(other, frame, out, known=known)
        assert (out == 7).all()
    for other in (np.zeros_like(base), new, new[::-1].copy()):  # which is only known when all is made
        with pytest.raises(ValueError, match=f"needs the base .*; here is {digest(other).hex()}"):
            tensor_delta.decode(other, frame, np.empty_like(base))
    # Who claims to know the digest of another base is found out by what comes of it.
    with pytest.raises(ValueError, match="damaged"):
        tensor_delta.decode(new, frame, np.empty_like(base), known=digest(base))
    assert frame == tensor_delta.encode(base, new, "bfloat16", known=digest(base))


def test_buffers_that_do_not_fit() -> None:
    base, new = trained(1000, 1e-4)
    frame = tensor_delta.encode(base, new, "bfloat16")
    with pytest.raises(ValueError, match="there is room for 1998"):
        tensor_delta.decode(base, frame, np.empty(999, np.uint16))
    with pytest.raises(ValueError, match="read-only"):
        tensor_delta.decode(base, frame, bytes(2000))
    with pytest.raises(ValueError, match="contiguous"):
        tensor_delta.encode(base[::2], new[::2], "bfloat16")
    with pytest.raises(ValueError, match="one shape"):
        tensor_delta.encode(base, new[1:], "bfloat16")
    with pytest.raises(ValueError, match="whole number"):
        tensor_delta.encode(b"abc", b"abd", "bfloat16")
    odd = memoryview(bytearray(2001))[1:]  # begins at an odd address: read, not written
    odd[:] = new.tobytes()
    assert tensor_delta.encode(base, odd, "bfloat16") == frame


def test_buffers_of_any_kind_are_taken() -> None:
    base, new = trained(500, 1e-4)
    frame = tensor_delta.encode(base.tobytes(), memoryview(new), "bfloat16")
    out = bytearray(1000)
    tensor_delta.decode(base.view(ml_dtypes.bfloat16), bytearray(frame), out)
    assert bytes(out) == new.tobytes()


# ------------------------------------------------------------------------------------------------------------- damage


def guarded(size: int) -> tuple[np.ndarray, np.ndarray]:
    """A buffer in the middle of another whose ends nobody may touch; -> (whole, middle)."""
    whole = np.full(size + 512, 0xABCD, np.uint16)
    return whole, whole[256:-256]


SIZE = 3000
BASE, NEW = trained(SIZE, 3e-5)
NEW[:40] = special(np.dtype(np.uint16))[np.arange(40) % 18]  # so that rare values are there, too
FRAME = tensor_delta.encode(BASE, NEW, "bfloat16")


def decoded(frame: bytes, by: ModuleType) -> bytes:
    """Result of `frame` on BASE; nothing beyond the buffer is ever touched."""
    whole, out = guarded(SIZE)
    try:
        with loops(by):
            tensor_delta.decode(BASE, frame, out)
    finally:
        assert (whole[:256] == 0xABCD).all()
        assert (whole[-256:] == 0xABCD).all()
    return out.tobytes()


def test_every_cut_and_every_byte_that_is_flipped_is_noticed() -> None:
    generator = np.random.default_rng(3)
    for at in range(len(FRAME)):
        damaged = bytearray(FRAME)
        damaged[at] ^= int(generator.integers(1, 256))
        for frame in (FRAME[:at], bytes(damaged)):
            with pytest.raises(ValueError, match="delta"):
                tensor_delta.read(frame)
    with pytest.raises(ValueError, match="delta"):
        tensor_delta.read(FRAME + b"\0")


def check_forged(data: bytes) -> None:
    """With a sound checksum: refused by both kinds of loops, or harmless: an exponent that nobody has, a spare bit."""
    found, said = [], ""
    for by in LOOPS:
        try:
            found.append(decoded(tensor_delta.seal(data), by))
        except ValueError as error:
            found.append(None)
            said = str(error)
    assert found[0] == found[1]
    assert found[0] in (None, NEW.tobytes())
    assert found[0] is not None or "delta" in said


def test_forged_bytes_are_refused_or_decode_to_the_target() -> None:
    generator = np.random.default_rng(4)
    for at in range(len(FRAME) - tensor_delta.SEAL):
        data = bytearray(FRAME[: -tensor_delta.SEAL])
        data[at] ^= int(generator.integers(1, 256))
        check_forged(bytes(data))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 4), st.integers(0, 3000))
def test_blocks_of_garbage_are_refused_or_decode_to_the_target(garbage: bytes, mode: int, cut: int) -> None:
    block = FRAME[tensor_delta.HEAD.size + 4 : -tensor_delta.SEAL]
    for data in (bytes([mode]) + garbage, block[:cut] + garbage, garbage + block[cut:]):
        check_forged(FRAME[: tensor_delta.HEAD.size] + struct.pack("<I", len(data)) + data)
