"""Sharded transfer: what arrives is NumPy's slices; a rank that dies at any stage commits for all or for none."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from longhaul.runtime import credentials
from longhaul.weight_sync import buffers, resharding, shard_lanes, sharded
from longhaul.weight_sync.resharding import Box, Layout
from longhaul.weight_sync.sharded import Coordinator, Outcome, Receiver, Sender, Standing
from longhaul.weight_sync.transports.socket_server import STRANGERS
from longhaul.weight_sync.transports.sockets import PATIENCE, Wire

SHAPES = {"a": ((64, 48), "bfloat16"), "b": ((33,), "float32"), "c": ((7, 12, 30), "bfloat16"), "d": ((), "int32")}
SECONDS = 120.0
"""Deadline of a round: the first changes compile their kernels."""


def mesh(rows: int, columns: int) -> Layout:
    """Layout of a mesh whose axes split a tensor's first and last axis, as far as it has them."""

    def boxes(name: str, shape: tuple[int, ...]) -> list[tuple[int, Box]]:
        def span(size: int, parts: int, at: int) -> tuple[int, int]:
            return size * at // parts, size * (at + 1) // parts

        def box(i: int, j: int) -> Box:
            whole = [(0, size) for size in shape]
            if len(shape) > 1:
                whole[-1] = span(shape[-1], columns, j)
            if shape:
                whole[0] = span(shape[0], rows, i)
            return tuple(whole)

        return [(columns * i + j, box(i, j)) for i in range(rows) for j in range(columns)]

    return resharding.make(SHAPES, boxes)


FSDP, TP, WIDE = mesh(4, 1), mesh(2, 2), mesh(1, 4)


def values(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        name: np.asarray(draw.integers(-999, 999, shape) / 7).astype(np.dtype(dtype)).reshape(shape)
        for name, (shape, dtype) in SHAPES.items()
    }


def part(whole: Mapping[str, np.ndarray], layout: Layout, rank: int) -> dict[str, np.ndarray]:
    """Shards of a rank, by NumPy's slices."""
    return {
        each.name: np.array(whole[each.name][tuple(slice(a, b) for a, b in box)], order="C")
        for each in layout.tensors
        for holder, box in each.boxes
        if holder == rank
    }


class Group:
    """All ranks of two layouts, as threads of this process."""

    def __init__(
        self, source: Layout, destination: Layout, lane: str = "shm", token: str | None = None, hands_over: bool = False
    ) -> None:  # fmt: skip
        self.source, self.destination = source, destination
        self.coordinator = Coordinator(
            "127.0.0.1:0", source, destination, token=token, lane=lane, seconds=SECONDS, at=lambda stage: self.at(stage)
        )
        self.at: Any = lambda stage: None
        where = self.coordinator.address, source, destination
        self.senders = [Sender(where[0], rank, *where[1:], token=token) for rank in source.ranks]
        self.receivers = [
            Receiver(where[0], rank, *where[1:], token=token, seconds=SECONDS, hands_over=hands_over)
            for rank in destination.ranks
        ]

    def push(self, version: int, whole: Mapping[str, np.ndarray], base: Any = None) -> list[Outcome | None]:
        found: list[Outcome | None] = [None] * len(self.senders)

        def one(rank: int) -> None:
            before = None if base is None else (base[0], part(base[1], self.source, rank))
            with contextlib.suppress(OSError):
                found[rank] = self.senders[rank].push(
                    version, part(whole, self.source, rank), base=before, seconds=SECONDS
                )

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.senders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        return found

    def check(self, version: int, whole: Mapping[str, np.ndarray]) -> None:
        for receiver in self.receivers:
            held, tensors = receiver.latest()
            assert held == version
            for name, wanted in part(whole, self.destination, receiver.rank).items():
                assert tensors[name].tobytes() == wanted.tobytes() and tensors[name].shape == wanted.shape
                assert not tensors[name].flags.writeable

    def close(self) -> None:
        for each in (*self.senders, *self.receivers, self.coordinator):
            each.close()


@contextlib.contextmanager
def group(*given: Any) -> Iterator[Group]:
    made = Group(*given)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("lane", ["shm", "tcp"])
@pytest.mark.parametrize(("source", "destination"), [(FSDP, TP), (TP, WIDE), (WIDE, mesh(3, 1))])
def test_shards_arrive_as_sent_whole_and_as_changes(
    source: Layout, destination: Layout, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_lanes, "PIECE", 512)
    monkeypatch.setattr(shard_lanes, "BATCH", 1024)
    monkeypatch.setattr(shard_lanes, "COPIED_PIECE", 512)
    first, second = values(1), values(1)
    second["a"][3, 5] += 1
    with group(source, destination, lane, "a-token-of-sixteen-or-more") as ranks:
        outcomes = ranks.push(1, first)
        assert [each.committed for each in outcomes if each] == [True] * len(source.ranks), outcomes
        ranks.check(1, first)
        held = ranks.receivers[0].latest()[1]["a"].copy()
        old = ranks.receivers[0].latest()[1]["a"]
        whole = outcomes[0]
        changed = ranks.push(2, second, (1, first))[0]
        ranks.check(2, second)
        assert old.tobytes() == held.tobytes()  # a version that is read does not change
        assert whole is not None and changed is not None and 0 < changed.nbytes < whole.nbytes
        assert ranks.push(3, first, (1, first))[0].committed  # type: ignore[union-attr]  # no receiver holds the base
        ranks.check(3, first)


def test_damage_and_a_file_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    first, write = values(1), shard_lanes.write

    def damaging(way: Any, parts: Any, descriptors: Any, *more: Any) -> list[bytes]:
        digests = write(way, parts, descriptors, *more)
        step = way.steps[-1]
        to, last = [*zip(step.receivers, step.lines, strict=True), *step.loose][-1]
        place = way.places[to].offsets[last.name] + last.put.offset
        os.pwrite(descriptors[to], bytes([255 - os.pread(descriptors[to], 1, place)[0]]), place)
        return digests

    with group(FSDP, TP) as ranks:
        assert ranks.push(1, first)[0].committed  # type: ignore[union-attr]
        with monkeypatch.context() as patch:
            patch.setattr(shard_lanes, "write", damaging)
            outcomes = ranks.push(2, values(2))
        assert all(each is not None and not each.committed and "is damaged" in each.why for each in outcomes), outcomes
        ranks.check(1, first)
        assert ranks.push(3, values(3))[0].committed  # type: ignore[union-attr]
        ranks.check(3, values(3))
    with open(tmp_path / "file", "wb") as file, pytest.raises(ConnectionError, match="is no memory"):
        shard_lanes.opened((os.getpid(), file.fileno()), 0)


def test_a_second_block_comes_while_the_first_version_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """No round waits for it, and one that comes too early takes no third one."""
    blocks = []

    class Slow(buffers.Block):
        def __init__(self, size: int, serial: int) -> None:
            time.sleep(0.0 if serial == 1 else 0.3)
            super().__init__(size, serial)
            blocks.append(threading.current_thread())

    with group(FSDP, TP) as ranks, monkeypatch.context() as patch:
        patch.setattr(buffers, "Block", Slow)
        for version in (1, 2, 3):
            outcome = ranks.push(version, values(version))[0]
            assert outcome is not None and outcome.committed
            assert 0.0 < outcome.prepared < outcome.sent < outcome.ready < outcome.seconds
            ranks.check(version, values(version))
        assert len(blocks) == len(TP.ranks) and len(set(blocks)) == len(TP.ranks)
        assert {each._pool.peak for each in ranks.receivers} == {2 * each._shard.size for each in ranks.receivers}


@pytest.mark.parametrize("lane", sharded.LANES)
def test_a_receiver_that_hands_over_has_one_block(lane: str) -> None:
    """The next round waits for the last array of the version before, so that none is torn; changes have no base."""
    with group(FSDP, TP, lane, None, True) as ranks:
        with pytest.raises(TimeoutError):
            ranks.receivers[0].take(0.0)
        later: list[Any] = []
        next_round = threading.Thread(target=lambda: later.extend(ranks.push(4, values(4))))
        for version in (1, 2, 3):
            base = (version - 1, values(version - 1))
            assert all(each is not None and each.committed for each in ranks.push(version, values(version), base=base))
            taken = [receiver.take(20.0) for receiver in ranks.receivers]
            if version == 3:
                next_round.start()
                time.sleep(0.5)
                assert not later, "a round began in memory that is read"
            for receiver, (held, tensors) in zip(ranks.receivers, taken, strict=True):
                assert held == version
                for name, wanted in part(values(version), TP, receiver.rank).items():
                    assert tensors[name].tobytes() == wanted.tobytes()
            del taken, tensors
        next_round.join(60.0)
        assert all(each.committed for each in later)
        assert {receiver.take(20.0)[0] for receiver in ranks.receivers} == {4}
        assert all(each._pool.peak == each._shard.size for each in ranks.receivers)
    with group(FSDP, TP) as ranks, pytest.raises(ValueError, match="hands_over=True"):
        ranks.receivers[0].take(0.0)


def test_other_layouts_and_another_token_are_refused() -> None:
    with group(FSDP, TP, "shm", "a-token-of-sixteen-or-more") as ranks:
        where = ranks.coordinator.address
        with pytest.raises(ValueError, match="its role, rank or layouts are others"):
            Sender(where, 0, TP, FSDP, token="a-token-of-sixteen-or-more").push(1, {})
        with pytest.raises(PermissionError):
            Sender(where, 0, FSDP, TP, token="another-token-of-sixteen").push(1, {})
        with pytest.raises(PermissionError, match="asks for a token"):
            Sender(where, 0, FSDP, TP).push(1, {})
    with pytest.raises(ValueError, match="can be reached by other machines"):
        Coordinator("0.0.0.0:0", FSDP, TP)


def test_shards_that_are_not_the_layouts_are_refused() -> None:
    """A sender copies from their addresses: bytes beyond them would be read."""
    with group(FSDP, TP) as ranks:
        right = part(values(1), FSDP, 0)
        for wrong, found in (({"a": right["a"][:-1]}, "they are 1440 bytes"), ({"a": None}, "they are missing")):
            given = {name: array for name, array in (right | wrong).items() if array is not None}
            with pytest.raises(ValueError, match=f"a: rank 0 must have 1536 bytes of it; {found}"):
                ranks.senders[0].push(1, given)
        assert all(each is not None and each.committed for each in ranks.push(1, values(1)))


def test_strangers_make_room_for_one_another_and_hold_up_no_round() -> None:
    """Each port of a group is full of connections that say nothing, while a version is pushed."""
    whole = values(1)
    with group(FSDP, TP, "tcp") as ranks, contextlib.ExitStack() as ends:
        assert ranks.push(1, whole)
        _, port = credentials.split(ranks.coordinator.address)
        ports = [port, *(each._listener.getsockname()[1] for each in ranks.receivers)]
        idle = {port: [socket.create_connection(("127.0.0.1", port)) for _ in range(STRANGERS + 4)] for port in ports}
        for sock in itertools.chain(*idle.values()):
            ends.enter_context(sock).settimeout(PATIENCE / 2)
        began = time.monotonic()
        assert ranks.push(2, whole) and time.monotonic() - began < PATIENCE / 2
        ranks.check(2, whole)
        for sock in itertools.chain(*(socks[:4] for socks in idle.values())):
            while sock.recv(4096):  # the coordinator's greeting, then its end
                pass


def test_an_acceptor_that_can_start_no_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(sock: socket.socket) -> None:
        with sock:
            sock.sendall(b"x")

    start, listener = threading.Thread.start, socket.create_server(("127.0.0.1", 0))
    acceptor = sharded.Acceptor(listener, answer)
    acceptor.open()

    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    with socket.create_connection(listener.getsockname(), timeout=5.0) as sock:
        assert sock.recv(1) == b""
    monkeypatch.setattr(threading.Thread, "start", start)
    with socket.create_connection(listener.getsockname(), timeout=5.0) as sock:
        assert sock.recv(1) == b"x"
    acceptor.close()


# --------------------------------------------------------------------------------------------------------------- deaths


def test_whoever_is_asked_takes_no_verdict_any_more() -> None:
    assert [sharded.after_inquiry(each) for each in (None, *Standing)] == [
        Standing.ABORTED, Standing.ABORTED, Standing.TERMINATING, Standing.TERMINATING, Standing.COMMITTED,
        Standing.ABORTED,
    ]  # fmt: skip
    assert sharded.verdict_of([None, Standing.TERMINATING, Standing.COMMITTED]) is Standing.COMMITTED
    for others in ([], [None], [Standing.TERMINATING, Standing.ABORTED]):
        assert sharded.verdict_of(others) is Standing.ABORTED


@pytest.mark.parametrize(("told", "heard"), [(0, False), (1, False), (1, True)])
def test_a_coordinator_that_dies_while_it_decides_leaves_all_with_one_verdict(
    told: int, heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has told so many receivers to commit. Where the others ask one before it has `heard`, none commits."""
    send = Wire.send

    def versions() -> list[int]:
        return [each.latest()[0] for each in ranks.receivers]

    with group(FSDP, TP) as ranks:
        assert ranks.push(1, values(1))[0].committed  # type: ignore[union-attr]
        left, until = [told], time.monotonic() + 60.0

        def dying(self: Wire, kind: str, *given: Any, **more: Any) -> None:
            if kind == "commit":
                if not left[0]:
                    while heard and versions().count(2) < told and time.monotonic() < until:
                        time.sleep(0.001)
                    ranks.coordinator._closed.set()
                    for member in list(ranks.coordinator._members.values()):
                        member.wire.close()
                    raise ConnectionResetError("dead")
                left[0] -= 1
            send(self, kind, *given, **more)

        monkeypatch.setattr(Wire, "send", dying)
        ranks.push(2, values(2))
        while any(each._round is not None for each in ranks.receivers):
            assert time.monotonic() < until
            time.sleep(0.01)
        version = versions()[0] if told and not heard else 1 + told
        ranks.check(version, values(version))


PROGRAM = """
import json, os, signal, sys
import numpy as np
from tests.weight_sync.test_sharded import FSDP, TP, SECONDS, part, values
from longhaul.weight_sync.sharded import Coordinator, Receiver, Sender

role, rank, where, lane, stage = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
count = {}
def at(name):
    count[name] = count.get(name, 0) + 1
    if version > 1 and name == stage:
        os.kill(os.getpid(), signal.SIGKILL)

version = 1
def say(value):
    print(json.dumps(value), flush=True)

if role == "coordinator":
    made = Coordinator(where, FSDP, TP, lane=lane, seconds=SECONDS, at=at)
    say(made.address)
elif role == "sender":
    made = Sender(where, rank, FSDP, TP, at=at)
    say("here")
else:
    made = Receiver(where, rank, FSDP, TP, seconds=SECONDS, at=at)
    say("here")
for line in sys.stdin:
    word, version = line.split()[0], int(line.split()[1])
    if word == "push":
        try:
            say(made.push(version, part(values(version), FSDP, rank), seconds=SECONDS).committed)
        except OSError as error:
            say(str(error))
    elif word == "held":
        held, tensors = made.latest()
        whole = part(values(held), TP, rank)
        say([held, all(tensors[name].tobytes() == whole[name].tobytes() for name in whole), made._round is None])
    else:
        say("begun")
"""


class Rank:
    """A rank in a process of its own."""

    def __init__(self, role: str, rank: int, where: str, lane: str, stage: str) -> None:
        command = [sys.executable, "-c", PROGRAM, role, str(rank), where, lane, stage]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.role, self.rank = role, rank

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


STAGES = [
    *(("sender", stage) for stage in ("offer", "send", "between", "sent")),
    *(("receiver", stage) for stage in ("prepare", "prepared", "verify", "ready", "verdict", "decided")),
    *(("coordinator", stage) for stage in ("begin", "prepared", "sent", "ready", "deciding")),
]


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["shm", "tcp"])
@pytest.mark.parametrize(("role", "stage"), STAGES)
def test_a_rank_that_is_killed_at_any_stage_commits_for_all_or_for_none(role: str, stage: str, lane: str) -> None:
    """Rank 1 of its role dies in the round of version 2; then it is back, and version 3 comes."""
    ranks: list[Rank] = []
    try:
        head = Rank("coordinator", 1, "127.0.0.1:0", lane, stage if role == "coordinator" else "")
        ranks.append(head)
        where = head.answer()
        for kind, layout in (("sender", FSDP), ("receiver", TP)):
            ranks += [
                Rank(kind, rank, where, lane, stage if (kind, rank) == (role, 1) else "") for rank in layout.ranks
            ]
        assert [each.answer() for each in ranks[1:]] == ["here"] * 8
        senders, receivers = ranks[1:5], ranks[5:]

        def push(version: int) -> list[Any]:
            for each in (*receivers, head):
                each.say(f"begin {version}")
            for each in (*receivers, head):
                each.answer()
            for each in senders:
                each.say(f"push {version}")
            return [each.answer() for each in senders]

        def held() -> list[Any]:
            """(version, right, no round under way) of the receivers that live, once no round is under way."""
            until = time.monotonic() + 30.0
            while True:
                for each in receivers:
                    each.say("held 0")
                found = [each.answer() for each in receivers]
                if all(each is None or each[2] for each in found):
                    return found
                assert time.monotonic() < until, found
                time.sleep(0.02)

        assert push(1) == [True] * 4
        assert held() == [[1, True, True]] * 4
        push(2)
        victim = next(each for each in ranks if (each.role, each.rank) == (role, 1))
        assert victim.process.wait(30) == -signal.SIGKILL
        living = [each for each in held() if each is not None]
        assert len(living) == 4 - (role == "receiver")
        assert len({each[0] for each in living}) == 1 and all(each[1] for each in living), living
        again = Rank(role, 1, where, lane, "")
        place = ranks.index(victim)
        victim.end()
        ranks[place] = again
        again.answer()
        if role == "coordinator":
            head = again
        senders, receivers = ranks[1:5], ranks[5:]
        assert True in push(3) or True in push(4)
        until = time.monotonic() + 30.0
        while len({each[0] for each in held()}) > 1:
            assert time.monotonic() < until
        assert all(each[0] >= 3 and each[1] for each in held())
    finally:
        for each in ranks:
            each.end()
