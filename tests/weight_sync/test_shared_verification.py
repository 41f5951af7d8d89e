"""Of those who map one image, one reads each byte of it, and none believes what it should not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from longhaul.weight_sync import packing, shared_verification
from longhaul.weight_sync.digest import digest
from longhaul.weight_sync.manifest import Manifest
from longhaul.weight_sync.publisher import Publisher
from tests.helpers.weight_sync_transports import receivers, until, way

COUNT = 40


class Host:
    """An image of COUNT tensors, each a portion, its notes, and how many bytes of it were digested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = np.random.default_rng(0)
        given = {f"t{i}": draw.integers(0, 256, 500 + 64 * i, np.uint8) for i in range(COUNT)}
        planned, size = packing.describe(given)
        self.image, self.notes = np.empty(size, np.uint8), np.zeros(shared_verification.SIZE, np.uint8)
        self.pool = ThreadPoolExecutor(1)
        self.manifest = Manifest("run", 0, 1, -1, size, packing.gather(given, planned, self.image, self.pool, 1))
        self.nbytes, self.read = sum(each.nbytes for each in given.values()), 0

        def counted(data: np.ndarray | bytes) -> bytes:
            self.read += data.size if isinstance(data, np.ndarray) else 0
            return digest(data)

        monkeypatch.setattr(shared_verification, "digest", counted)
        monkeypatch.setattr(shared_verification, "PORTION", 1)

    def verify(self, turn: int = 0, seconds: float = 60.0, manifest: Manifest | None = None) -> tuple[list[str], int]:
        """-> (what is damaged, bytes that were read for it)."""
        before = self.read
        shared = shared_verification.marks(self.notes, turn)
        found = shared_verification.verify(manifest or self.manifest, self.image, shared, seconds, self.pool, 1)
        return found, self.read - before


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_who_comes_second_reads_nothing(host: Host) -> None:
    assert host.verify() == ([], host.nbytes)
    for turn in range(1, 5):
        assert host.verify(turn) == ([], 0)


def test_damage_is_found_by_everyone_who_looks(host: Host) -> None:
    for name in (0, 17, COUNT - 1):
        tensor = host.manifest.tensors[name]
        host.image[tensor.end - 1] ^= 4
        assert host.verify(0) == ([tensor.name], host.nbytes)
        for turn in (1, 2):
            assert host.verify(turn) == ([tensor.name], tensor.nbytes)  # nobody has noted what it should be
        host.image[tensor.end - 1] ^= 4
        assert host.verify(3) == ([], tensor.nbytes)
        host.notes[:] = 0


@pytest.mark.parametrize(
    "bend",
    [
        lambda host: {"manifest": host.manifest._replace(version=2)},  # the same bytes, noted for another version
        lambda host: {"seconds": 0.0},  # noted too long ago
        lambda host: host.notes.view(shared_verification.ROW)["note"].__ixor__(1) is None or {},  # torn
        lambda host: host.notes.view(shared_verification.ROW)["at"].__isub__(1) is None or {},  # of another time
        lambda host: host.notes.view(shared_verification.ROW)["at"].__iadd__(1 << 40) is None or {},  # to come
    ],
)
def test_other_notes_are_not_believed(host: Host, bend: Callable[[Host], dict[str, object]]) -> None:
    host.verify()
    assert host.verify(1, **bend(host)) == ([], host.nbytes)


def test_who_dies_in_the_midst_of_it_holds_nobody_up(host: Host) -> None:
    """All is begun, and nothing will be ended."""
    host.verify()
    host.notes.view(shared_verification.ROW)["note"] = 0
    assert host.verify(1) == ([], host.nbytes)


def test_two_at_once_share_the_work(host: Host) -> None:
    both, found = threading.Barrier(2), dict[int, list[str]]()

    def one(turn: int) -> None:
        both.wait()
        found[turn] = host.verify(turn)[0]

    threads = [threading.Thread(target=one, args=(turn,)) for turn in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: [], 1: []}
    assert host.read < 1.9 * host.nbytes  # what both begin at the same moment is read twice


def test_every_turn_goes_over_all_of_it() -> None:
    for turn in range(9):
        assert sorted(shared_verification.order(COUNT, turn)) == list(range(COUNT))
    assert shared_verification.order(4, 0) == [0, 1, 2, 3] and shared_verification.order(4, 1) == [3, 2, 1, 0]


def test_portions_have_all_tensors_in_few_rows(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for least in (1, 3000, 1 << 30):
        monkeypatch.setattr(shared_verification, "PORTION", least)
        found = shared_verification.portions(host.manifest)
        assert [each for group in found for each in group] == list(host.manifest.tensors)
        assert all(sum(each.nbytes for each in group) >= least for group in found[:-1])
    many = packing.describe({f"t{i}": np.empty(0, np.uint8) for i in range(3000)})
    assert len(shared_verification.portions(Manifest("run", 0, 1, -1, many[1], many[0]))) <= shared_verification.ROWS


def test_receivers_of_a_host_read_an_image_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    given = {name: np.full(1000, 3, np.uint8) for name in "abcdefgh"}
    there = way("shared", tmp_path)
    with Publisher("run", transports=[there.serve()]) as sender, receivers(there, 3) as three:
        until(lambda: len(sender.status()["receivers"]) == 3)
        for version in range(3):
            given["a"][0] = version
            host.read = 0
            sender.publish(version, given)
            assert all(receiver.wait(version, 20) for receiver in three)
            assert 8000 <= host.read < 24_000  # what several begin at the same moment is read by each
            assert all(receiver.latest()[1]["a"][0] == version for receiver in three)
