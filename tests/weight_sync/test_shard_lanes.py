"""Bytes through shared memory: what is copied, its digest on both sides, and the memory that copying takes."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from longhaul.runtime import shared_memory
from longhaul.weight_sync import digest, resharding, shard_lanes
from longhaul.weight_sync.resharding import Box, Layout, Runs

SHAPES = {
    "rows": ((96, 512), "bfloat16"),  # runs of whole cache lines, whichever axis is split
    "experts": ((6, 32, 128), "bfloat16"),  # two axes of runs, which are one
    "corner": ((4, 8, 4, 64), "bfloat16"),  # two axes that are not
    "odd": ((33, 7), "float32"),
    "bias": ((300,), "bfloat16"),
    "one": ((), "int32"),
}


def split(axes: tuple[int, ...], parts: int) -> Layout:
    """Layout of parts**len(axes) ranks; each axis is split as far as a tensor has it."""

    def boxes(name: str, shape: tuple[int, ...]) -> list[tuple[int, Box]]:
        found = []
        for rank in range(parts ** len(axes)):
            whole = [(0, size) for size in shape]
            for place, axis in enumerate(axes):
                at = rank // parts**place % parts
                if -len(shape) <= axis < len(shape):
                    whole[axis] = shape[axis] * at // parts, shape[axis] * (at + 1) // parts
            found.append((rank, tuple(whole)))
        return found

    return resharding.make(SHAPES, boxes)


FIRST, LAST, BOTH, MIDDLE = split((0,), 3), split((-1,), 2), split((0, -1), 2), split((1, -1), 2)


def parts_of(layout: Layout, rank: int) -> dict[str, np.ndarray]:
    """Shards of a rank, as bytes; every tensor has its own."""
    found = {}
    for number, tensor in enumerate(layout.tensors):
        whole = np.random.default_rng(number).integers(0, 256, tensor.nbytes, np.uint8)
        box = dict(tensor.boxes)[rank]
        array = whole.view(np.dtype(tensor.dtype)).reshape(tensor.shape)[tuple(slice(a, b) for a, b in box)]
        found[tensor.name] = np.array(array, order="C").reshape(-1).view(np.uint8)
    return found


@pytest.fixture(params=["compiled", "library"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "library":
        monkeypatch.setattr(digest, "compiled", lambda: None)
    else:
        pytest.importorskip("numba")
    return str(request.param)


def blocks_of(layout: Layout) -> tuple[list[int], list[np.ndarray]]:
    """Empty memories of all ranks, and arrays over them."""
    sizes = [shard_lanes.shard(layout, rank).size for rank in layout.ranks]
    memories = [shared_memory.create(size) for size in sizes]
    maps = [shared_memory.mapped(each, size) for each, size in zip(memories, sizes, strict=True)]
    return memories, [np.frombuffer(each, np.uint8, size) for each, size in zip(maps, sizes, strict=True)]


def sent(
    plan: resharding.Plan, source: Layout, destination: Layout, memories: list[int]
) -> dict[tuple[int, int], bytes]:
    """Digests by sender and receiver of all pieces, which are written."""
    found = {}
    for sender in source.ranks:
        for way in shard_lanes.routes(plan, source, destination, sender):
            descriptors = [memories[rank] for rank in way.receivers]
            digests = shard_lanes.write(way, parts_of(source, sender), descriptors, time.monotonic() + 60.0)
            found |= {(sender, rank): each for rank, each in zip(way.receivers, digests, strict=True)}
    return found


PAIRS = {
    "first-last": (FIRST, LAST),
    "last-first": (LAST, FIRST),
    "first-both": (FIRST, BOTH),
    "both-middle": (BOTH, MIDDLE),
    "middle-first": (MIDDLE, FIRST),
    "last-middle": (LAST, MIDDLE),
    "first-replicas": (FIRST, resharding.replicas(LAST, 3)),
}


@pytest.mark.parametrize("most", [600, 4096, 1 << 20])
@pytest.mark.parametrize(("source", "destination"), PAIRS.values(), ids=PAIRS)
def test_written_shards_are_those_that_numpy_slices_with_equal_digests(
    source: Layout, destination: Layout, most: int, loops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_lanes, "COPIED_PIECE", most)
    plan = resharding.plan(source, destination)
    memories, blocks = blocks_of(destination)
    found = sent(plan, source, destination, memories)
    for rank, block in zip(destination.ranks, blocks, strict=True):
        parts = shard_lanes.shard(destination, rank).parts(block)
        for name, wanted in parts_of(destination, rank).items():
            assert parts[name].tobytes() == wanted.tobytes(), name
        for sender in {move.source for move in plan.moves if move.destination == rank}:
            way = shard_lanes.route(plan, source, destination, sender, (rank,))
            assert way.nbytes == sum(move.nbytes for move in shard_lanes.between(plan, sender, rank))
            assert shard_lanes.digest(way, block) == found.pop((sender, rank))
    assert not found
    monkeypatch.setattr(digest, "compiled", lambda: None)  # a side without the compiled loop finds the same
    others, _ = blocks_of(destination)
    again = sent(plan, source, destination, others)
    for (sender, rank), each in again.items():
        way = shard_lanes.route(plan, source, destination, sender, (rank,))
        assert shard_lanes.digest(way, blocks[rank]) == each
    for each in (*memories, *others):
        os.close(each)


def test_a_large_tensor_is_copied_by_the_compiled_loop_whichever_axis_is_split() -> None:
    """Else it would be packed, digested and written, each in a pass of its own."""
    for source, destination in ((FIRST, LAST), (LAST, FIRST), (FIRST, BOTH)):
        plan = resharding.plan(source, destination)
        ways = [way for sender in source.ranks for way in shard_lanes.routes(plan, source, destination, sender)]
        lines = {piece.name for way in ways for step in way.steps for piece in step.lines}
        loose = {piece.name for way in ways for step in way.steps for _, piece in step.loose}
        assert {"rows", "experts"} <= lines and not {"rows", "experts"} & loose
        assert {"odd", "bias", "one"} <= loose


def test_a_sender_goes_through_its_shard_once_for_all_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of its rows, and copies for replicas, follow one another: the second one finds them in the cache."""
    monkeypatch.setattr(shard_lanes, "COPIED_PIECE", 4096)
    for destination in (LAST, resharding.replicas(split((), 1), 3)):
        (way,) = shard_lanes.routes(resharding.plan(FIRST, destination), FIRST, destination, 0)
        places = [(tensor, row[0]) for step in way.steps for tensor, row in zip(step.tensors, step.rows, strict=True)]
        assert len(way.receivers) > 1 and len(places) > 4 and places == sorted(places)
        begins = [[0, *step.bundles[:-1]] for step in way.steps]
        sizes = {n for step, first in zip(way.steps, begins, strict=True) for n in step.bundles - first}
        assert max(sizes) == len(way.receivers)
        for step, first in zip(way.steps, begins, strict=True):
            for a, b in zip(first, step.bundles, strict=True):
                assert len({*map(tuple, step.rows[a:b, [1, 4, 5]].tolist())}) == 1
                assert np.ptp(step.rows[a:b, 0]) < step.rows[a, 1] and len({*step.tensors[a:b]}) == 1


def test_a_byte_that_changed_after_it_was_copied_changes_the_digest(loops: str) -> None:
    plan = resharding.plan(FIRST, LAST)
    memories, blocks = blocks_of(LAST)
    found = sent(plan, FIRST, LAST, memories)[2, 1]
    way, parts = shard_lanes.route(plan, FIRST, LAST, 2, (1,)), shard_lanes.shard(LAST, 1).parts(blocks[1])
    lines = [piece for step in way.steps for piece in step.lines]
    loose = [piece for step in way.steps for _, piece in step.loose]
    assert lines and loose
    for piece in (*lines, *loose):
        for at in (piece.put.offset, piece.put.end - 1):
            parts[piece.name][at] ^= 1
            assert shard_lanes.digest(way, blocks[1]) != found
            parts[piece.name][at] ^= 1
    assert shard_lanes.digest(way, blocks[1]) == found
    for each in memories:
        os.close(each)


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
    ):
        yield near, far


def streamed(
    pieces: tuple[shard_lanes.Piece, ...], parts: dict[str, np.ndarray], target: dict[str, np.ndarray]
) -> list[bytes]:
    """Digests of both sides of a stream."""
    until = time.monotonic() + 60.0
    with connected() as (near, far), ThreadPoolExecutor(1) as pool:
        came = pool.submit(shard_lanes.draw, pieces, target, far, until)
        return [shard_lanes.pour(pieces, parts, near, until), came.result()]


@pytest.mark.parametrize("most", [600, 1 << 22])
@pytest.mark.parametrize(("source", "destination"), PAIRS.values(), ids=PAIRS)
def test_streamed_shards_are_those_that_numpy_slices_with_equal_digests(
    source: Layout, destination: Layout, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_lanes, "BATCH", most)
    monkeypatch.setattr(shard_lanes, "MOST_BUFFERS", 3)
    plan = resharding.plan(source, destination)
    blocks = {rank: np.zeros(shard_lanes.shard(destination, rank).size, np.uint8) for rank in destination.ranks}
    for sender, rank in sorted({(move.source, move.destination) for move in plan.moves}):
        pieces = shard_lanes.stream(plan, source, destination, sender, rank, 4096)
        target = shard_lanes.shard(destination, rank).parts(blocks[rank])
        ours, theirs = streamed(pieces, parts_of(source, sender), target)
        sent = b"".join(target[each.name][each.put.starts()[:, None] + np.arange(each.put.length)].tobytes()
                        for each in pieces)  # fmt: skip
        assert ours == theirs == digest.digest(sent)
    for rank, block in blocks.items():
        parts = shard_lanes.shard(destination, rank).parts(block)
        for name, wanted in parts_of(destination, rank).items():
            assert parts[name].tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize(("seconds", "ends", "error"), [(0.3, False, TimeoutError), (60.0, True, ConnectionResetError)])
def test_a_stream_that_stops_is_left_at_its_deadline_and_one_that_ends_at_once(
    seconds: float, ends: bool, error: type[Exception]
) -> None:
    pieces = shard_lanes.stream(resharding.plan(FIRST, LAST), FIRST, LAST, 2, 1, 4096)
    with connected() as (near, far):
        near.sendall(b"x" * 1000)
        if ends:
            near.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        with pytest.raises(error):
            shard_lanes.draw(pieces, parts_of(LAST, 1), far, began + seconds)
        assert time.monotonic() - began < 10.0


def test_a_receiver_that_takes_nothing_is_left_at_the_deadline() -> None:
    shapes = {"a": ((1 << 23,), "uint8")}
    layout = resharding.replicated(shapes, 1)
    pieces = shard_lanes.stream(resharding.plan(layout, layout), layout, layout, 0, 0, 1 << 20)
    with connected() as (near, _):
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            shard_lanes.pour(pieces, {"a": np.ones(1 << 23, np.uint8)}, near, began + 0.3)
        assert time.monotonic() - began < 10.0


def test_a_deadline_ends_a_transfer() -> None:
    way = shard_lanes.route(resharding.plan(FIRST, LAST), FIRST, LAST, 2, (1,))
    memories, _ = blocks_of(LAST)
    with pytest.raises(TimeoutError, match="deadline"):
        shard_lanes.write(way, parts_of(FIRST, 2), memories[1:], time.monotonic() - 1.0)
    for each in memories:
        os.close(each)


def resident() -> int:
    """Bytes of shared memory that this process has mapped and touched."""
    found = re.search(r"RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's memory")
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_a_sender_has_a_span_of_the_receivers_memory_at_a_time(columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where its bytes are spread over all of it."""
    pytest.importorskip("numba")
    monkeypatch.setattr(shard_lanes, "SPANS", 8 << 20)
    monkeypatch.setattr(shard_lanes, "REACH", 1 << 20)
    shapes = {"a": ((4096, 2048), "bfloat16"), "b": ((4096, 2048), "bfloat16")}
    source, destination = resharding.sharded(shapes, 4, int(columns)), resharding.replicated(shapes, 2)
    ways = shard_lanes.routes(resharding.plan(source, destination), source, destination, 3)
    assert [len(way.steps) > 1 for way in ways] == [True]
    box = {tensor.name: dict(tensor.boxes)[3] for tensor in source.tensors}
    parts = {name: np.ones(resharding.volume(each) * 2, np.uint8) for name, each in box.items()}
    memories = [shared_memory.create(place.size) for place in ways[0].places]
    most, before, pour = [0], resident(), digest.compiled().pour_rows

    class Loops:
        @staticmethod
        def pour_rows(rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
            found: np.ndarray = pour(rows, ends)
            most[0] = max(most[0], resident() - before)
            return found

    monkeypatch.setattr(digest, "compiled", lambda: Loops)
    shard_lanes.write(ways[0], parts, memories, time.monotonic() + 60.0)
    for each in memories:
        os.close(each)
    assert 1 << 20 < most[0] <= (8 << 20) + 2 * shared_memory.HUGE
    assert resident() - before < 1 << 20


def test_runs_end_after_their_last_byte_and_axes_that_go_on_are_one() -> None:
    for box, whole in (
        (((0, 2), (0, 3), (1, 3)), ((0, 2), (0, 3), (0, 4))),
        (((0, 2), (0, 2), (1, 3)), ((0, 2), (0, 3), (0, 4))),
        (((1, 2), (0, 3), (1, 3)), ((0, 2), (0, 3), (0, 4))),
        (((0, 2), (0, 3), (0, 4)), ((0, 2), (0, 3), (0, 4))),
    ):
        runs = resharding.runs(box, whole, 2)
        assert runs.end == runs.starts()[-1] + runs.length
        assert runs.merged().starts().tolist() == runs.starts().tolist()
    assert Runs(4, 4, ((2, 24), (3, 8))).merged() == Runs(4, 4, ((6, 8),))
    assert Runs(4, 4, ((2, 25), (3, 8))).merged() == Runs(4, 4, ((2, 25), (3, 8)))
