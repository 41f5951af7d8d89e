"""Images: gathered with the digests of what was given, whatever copies them, and within the memory that was granted."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from longhaul.weight_sync import image as images
from longhaul.weight_sync.buffers import Pool
from longhaul.weight_sync.digest import digest as digests
from longhaul.weight_sync.manifest import Manifest, digest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=[False, True], ids=["library", "streams"])
def past(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether all is large here: images are written past the caches, and digested by the compiled loops."""
    if request.param and importlib.util.find_spec("numba") is None:
        pytest.skip("numba, of the extra sync, is not installed")
    monkeypatch.setattr(digests, "LEAST", 241)
    monkeypatch.setattr(digests, "LARGE", 241 if request.param else 1 << 60)
    monkeypatch.setattr(digests, "PIECE", 4096)
    monkeypatch.setattr(images, "LARGE", 0 if request.param else 1 << 60)
    return request.param


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
            assert digests.poured(part, target, past) == xxhash.xxh3_128_digest(part.tobytes()) == digests.digest(part)
            assert np.array_equal(target, part)


def test_a_digest_is_the_same_however_the_bytes_come(past: bool) -> None:
    draw = np.random.default_rng(2)
    whole = draw.integers(0, 256, 5001, np.uint8)
    for data in (whole[:5000], whole[1:], whole[:4096]):
        for _ in range(20):
            running = digests.Running(data)
            for count in sorted(draw.integers(0, data.size + 1, 4)):
                running.upto(int(count))
            assert running.end() == digest(data)


def test_an_image_has_what_was_given_and_its_digests(past: bool) -> None:
    draw = np.random.default_rng(0)
    sizes = [0, 1, 7, 8, 63, 64, 65, 4095, 4096, 4097, 8192, 20_000, 40_960]
    given = {f"t{size}": draw.integers(0, 256, size, np.uint8) for size in sizes}
    given["odd"] = draw.integers(0, 256, 9001, np.uint8)[1:]  # not aligned to words
    given["turned"] = draw.integers(0, 1 << 16, (60, 90), np.uint16).T
    given["read-only"] = draw.random(5000)
    given["read-only"].flags.writeable = False
    planned, size = images.describe(given)
    image = Pool(size, 2 * size).take()
    assert image is not None
    with ThreadPoolExecutor(2) as pool:
        found = images.gather(given, planned, image.array, pool, 2)
    for tensor in found:
        held = np.ascontiguousarray(given[tensor.name]).tobytes()
        assert image.array[tensor.offset : tensor.end].tobytes() == held
        assert tensor.digest == digest(held)


def test_what_is_flipped_on_the_way_is_found(past: bool) -> None:
    """Any one bit, in any place of a block, a stripe and what is behind them, however the bytes come."""
    draw = np.random.default_rng(2)
    given = {"a": draw.integers(0, 256, 5001, np.uint8), "b": draw.integers(0, 256, 300, np.uint8)}
    planned, size = images.describe(given)
    image = np.empty(size, np.uint8)
    with ThreadPoolExecutor(1) as pool:
        tensors = images.gather(given, planned, image, pool, 1)
    manifest = Manifest("run", 0, 1, -1, size, tensors)
    for at in (*range(0, 5001, 97), 4095, 4096, 5000, tensors[1].offset, tensors[1].end - 1):
        image[at] ^= 1 << at % 8
        arrival = images.Arrival(manifest)
        for count in (100, 1500, 4096, 5001, size):
            arrival.arrived(image, count)
        assert arrival.complete and arrival.damaged == ["a" if at < 5001 else "b"]
        image[at] ^= 1 << at % 8


PEAK = """
import json, sys
import numpy as np
from longhaul.weight_sync import transports
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver

SIZE, SEND, RECEIVE = 32 << 20, 3, 2
lane, folder = sys.argv[1], sys.argv[2]

def memory(what):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(what)).split()[1])

given = {f"layer.{i}": np.ones(SIZE // 32 // 4, np.float32) for i in range(32)}
opened = transports.serve(lane)
before = memory("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the high-water mark begins anew
with Publisher("run", transports=[opened], budget=SEND * SIZE) as sender, Receiver(
    lambda: transports.connect(opened.address), budget=RECEIVE * SIZE
) as receiver:
    for version in range(6):
        given["layer.0"][0] = version
        assert sender.publish(version, given, patience=60)
        assert receiver.wait(version, 60), receiver.errors
        assert receiver.latest()[1]["layer.0"][0] == version
    peak = memory("VmHWM") - before
    print(json.dumps({"peak": peak, "sender": sender.peak_bytes, "receiver": receiver.peak_bytes, "size": SIZE}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not tell a process's peak")
@pytest.mark.parametrize("kind", ["shm", "tcp", "folder"])
def test_a_process_takes_no_more_memory_than_it_was_granted(kind: str, tmp_path: Path) -> None:
    """Both sides in one process, as the system counts its pages: the images, and a little for all the rest."""
    where = {"shm": f"shm:{tmp_path}/socket", "tcp": "tcp:127.0.0.1:0", "folder": f"folder:{tmp_path}/versions"}[kind]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, where, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=90
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    granted = found["size"] * (3 + (0 if kind == "shm" else 2))
    assert found["sender"] + found["receiver"] <= granted
    twice = 2 if kind == "shm" else 1  # the receiver has the sender's pages mapped once more
    assert found["size"] < found["peak"] <= twice * granted + (8 << 20)


def test_compiling_holds_on_to_nothing_of_its_callers() -> None:
    """Else an image whose digest compiled the loop would count as read until somebody collects garbage."""
    numba = pytest.importorskip("numba")
    from longhaul.weight_sync.digest import xxh3_kernels

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
