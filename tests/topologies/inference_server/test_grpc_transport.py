"""Whoever sends garbage to a living server harms nobody else: streams end, memory and answers stay."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.runtime import descriptors
from longhaul.runtime.credentials import Credentials
from longhaul.topologies.inference_server import grpc_transport, wire
from longhaul.topologies.inference_server.grpc_transport import PATH, GrpcActorTransport, GrpcTransport, Loop, run
from longhaul.topologies.inference_server.wire import Answer, Arrival, Lost
from tests.helpers.malformed_frames import BARE, CODEC, COLUMNS, SLOTS, hello, malformed, observe

pytest.importorskip("grpc")


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Echo:
    """A server that answers each group with its first reward's bits, in a thread; and what it saw."""

    def __init__(self, lane: GrpcTransport) -> None:
        self.lane, self.arrivals, self.lost, self.most = lane, 0, 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            self.lane.wait(0.05)
            answers = []
            events = self.lane.take()
            self.most = max(self.most, len(events))
            for event in events:
                if isinstance(event, Lost):
                    self.lost += 1
                elif isinstance(event, Arrival):
                    self.arrivals += 1
                    value = np.full(COLUMNS, event.step.reward.view(np.int32)[0], np.int32)
                    answers.append(Answer(event.group, event.life, value))
            self.lane.answer(answers)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def silent() -> Iterator[GrpcTransport]:
    """A lane that nobody turns yet."""
    with closing(GrpcTransport(CODEC, 5, SLOTS, lambda actor, life: [actor, life])) as lane:
        yield lane


async def play_well(address: str, over: asyncio.Event, life: int) -> int:
    """Actor 0, which must get the answers to its own steps, in order, whatever others do; -> steps."""
    rng, line = np.random.default_rng(5), GrpcActorTransport(BARE, SLOTS, address, actor=0, credentials=Credentials())
    assert await line.open() == [0, life], "another one was actor 0 meanwhile"
    wanted, done = [0, 0], 0

    async def post(slot: int) -> None:
        line.blocks[slot].flags[:] = False
        line.blocks[slot].reward[:] = rng.random()
        wanted[slot] = int(line.blocks[slot].reward.view(np.int32)[0])
        line.post(slot, 0)

    for slot in range(SLOTS):
        await post(slot)
    while not over.is_set():
        async with asyncio.timeout(20.0):
            slot, action = await line.next()
        assert (action == wanted[slot]).all()
        await asyncio.sleep(0.002)  # the test is of the others
        await post(slot)
        done += 1
    await line.close()
    return done


async def play_badly(call: Any, rng: np.random.Generator, actor: int, more: int = 0) -> None:
    """One stream with one malformed frame somewhere, and `more` after it; it must be ended by the server."""
    import grpc

    try:
        greeting = hello(actor, name=int(rng.integers(2**60)))
        chance = rng.random()
        if chance < 0.1:
            await call.write(malformed(rng, *observe(rng, actor * SLOTS, 1, 0)))
        elif chance < 0.2:
            bad = bytearray(greeting)
            where = [*range(6), *range(wire.HEAD_BYTES, len(bad))]  # the magic, the version, the layout
            bad[rng.choice(where)] ^= 1 << int(rng.integers(8))
            await call.write(bytes(bad))
        else:
            await call.write(greeting)
            welcome = wire.read(await call.read(), CODEC.most)
            if welcome.kind == wire.WELCOME:
                last = actor * SLOTS + SLOTS - 1  # the group after it is another's
                head, payload = observe(rng, last, welcome.incarnation, 0)
                for _ in range(1 + more):
                    await call.write(malformed(rng, head, payload))
        async with asyncio.timeout(20.0):
            while (await call.read()) is not grpc.aio.EOF:
                pass
    except (grpc.RpcError, asyncio.InvalidStateError):
        pass


STREAMS = 10
"""Malformed streams of one connection. After about 80 with 50 frames each gRPC writes no further frame of it until the
server ends it as idle, 19 s later."""


async def attack(address: str, frames: int, life: int = 1, more: int = 0) -> int:
    """So many malformed frames from four streams at once, while actor 0 plays; -> its steps. `more` follow in each."""
    import grpc

    over = asyncio.Event()
    good = asyncio.create_task(play_well(address, over, life))
    await asyncio.sleep(0.2)

    async def bad(actor: int) -> None:
        rng, left = np.random.default_rng(actor), frames // 4 // (1 + more)
        while left > 0:
            async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                for _ in range(min(left, STREAMS)):
                    await play_badly(channel.stream_stream(PATH)(), rng, actor, more)
            left -= STREAMS

    await asyncio.gather(*(bad(actor) for actor in range(1, 5)))
    over.set()
    return await good


@pytest.mark.parametrize(("frames", "more"), [(200, 0), pytest.param(100_000, 49, marks=pytest.mark.slow)])
def test_malformed_frames_harm_nobody_else(silent: GrpcTransport, frames: int, more: int) -> None:
    """With `more`, many in each stream, whose end the sender does not wait for."""
    with closing(Echo(silent)) as echo:
        run(attack(silent.address, 80))  # all that is made once
        before = resident()
        steps = run(attack(silent.address, frames, life=2, more=more))
        grown = resident() - before
        assert steps > frames / (1 + more) / 100, "the good stream was held up"
        assert grown < 48 * 2**20, f"{grown / 2**20:.0f} MiB more after {frames} malformed frames"
        assert echo.most <= 5 * (SLOTS + 2), "more waited than one step for each group"


def opened() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def flooded(address: str, ends: ExitStack, count: int, most: int, said: bytes = b"") -> None:
    """So many connections, of which all but `most` are ended, long before `patient` ends one."""
    host, _, port = address.rpartition(":")
    left, end = [], time.monotonic() + 50.0
    for _ in range(count):
        left.append(ends.enter_context(socket.create_connection((host, int(port)), timeout=20)))
        with contextlib.suppress(OSError):
            left[-1].sendall(said)
        left[-1].settimeout(0.0)

    def lives(sock: socket.socket) -> bool:
        try:
            return bool(sock.recv(4096))
        except BlockingIOError:
            return True
        except OSError:
            return False

    while len(left := [sock for sock in left if lives(sock)]) > most:
        assert time.monotonic() < end, f"{len(left)} of {count} are open"
        time.sleep(0.01)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that let an idle connection be for a minute."""
    monkeypatch.setattr(grpc_transport, "HANDSHAKE", 60.0)
    monkeypatch.setattr(grpc_transport, "GREETING", 60.0)


IDLE = pytest.mark.parametrize("said", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])])
"""Connections that say nothing, or greet as HTTP/2 does."""

MOST = 1 + grpc_transport.SPARE + grpc_transport.STRANGERS
"""Connections to a server of one actor."""


@IDLE
def test_idle_connections_are_few(patient: None, said: bytes) -> None:
    with closing(GrpcTransport(CODEC, 1, SLOTS, lambda actor, life: [actor, life])) as lane, ExitStack() as ends:
        before = opened()
        flooded(lane.address, ends, 3 * MOST, MOST, said)
        assert opened() - before <= 4 * MOST + 8  # both ends are ours


@IDLE
def test_idle_connections_end(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """An actor plays on meanwhile."""
    with monkeypatch.context() as patch:  # of the server's connections alone, not of the actor's stream
        patch.setattr(grpc_transport, "HANDSHAKE", 0.5)
        patch.setattr(grpc_transport, "GREETING", 0.5)
        lane, over = GrpcTransport(CODEC, 1, SLOTS, lambda actor, life: [actor, life]), threading.Event()
    host, _, port = lane.address.rpartition(":")

    async def played() -> int:
        ended = asyncio.Event()
        good = asyncio.create_task(play_well(lane.address, ended, 1))
        while not over.is_set():
            await asyncio.sleep(0.02)
        ended.set()
        return await good

    def flood(echo: Echo) -> None:
        try:
            while not echo.arrivals:
                time.sleep(0.01)
            idle = [socket.create_connection((host, int(port)), timeout=20) for _ in range(3 * MOST)]
            for sock in idle:
                with contextlib.suppress(OSError):
                    sock.sendall(said)
            for sock in idle:
                with contextlib.suppress(ConnectionError), sock:
                    while sock.recv(4096):
                        pass
        finally:
            over.set()

    with closing(lane), closing(Echo(lane)) as echo, ThreadPoolExecutor(1) as pool:
        flooded = pool.submit(flood, echo)
        assert run(played()) > 10
        flooded.result()


def test_an_idle_stream_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a learner learns for minutes, nothing is said but that both sides are there."""
    monkeypatch.setattr(grpc_transport, "KEEPALIVE", 1.0)

    async def play(address: str) -> None:
        transport = GrpcActorTransport(BARE, SLOTS, address, actor=0, credentials=Credentials())
        await asyncio.wait_for(transport.open(), 20.0)
        for pause in (5.5, 0.0):
            for slot in range(SLOTS):
                transport.post(slot, 0)
            for _ in range(SLOTS):
                await asyncio.wait_for(transport.next(), 20.0)
            await asyncio.sleep(pause)
        await transport.close()

    lane = GrpcTransport(CODEC, 1, SLOTS, lambda actor, life: [actor, life])
    with closing(lane), closing(Echo(lane)) as echo:
        run(play(lane.address))
    assert echo.arrivals == 2 * SLOTS


class Network:
    """A way to a port that can be cut."""

    def __init__(self, port: int) -> None:
        self._port, self.up = port, True
        self._listener, self._ends = socket.create_server(("127.0.0.1", 0)), list[socket.socket]()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self.up:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(700):  # so little that frames are torn
                other.sendall(data)
        self._end(one, other)

    def _end(self, *socks: socket.socket) -> None:
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self._end(*self._ends)

    def close(self) -> None:
        self._end(self._listener)
        self._listener.close()
        self._thread.join()
        self.cut()
        for sock in self._ends:
            sock.close()


@contextlib.contextmanager
def flaky() -> Iterator[tuple[Echo, Network]]:
    """A server of one actor that is reached by a network that can be cut."""
    lane = GrpcTransport(CODEC, 1, SLOTS, lambda actor, life: [actor, life])
    with (
        closing(lane),
        closing(Echo(lane)) as echo,
        closing(Network(int(lane.address.rpartition(":")[2]))) as network,
    ):
        yield echo, network


@pytest.mark.parametrize("cuts", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_no_step_is_lost_where_a_network_is_cut(cuts: int) -> None:
    """An actor goes on with its life: each of its steps comes once, and each answer."""
    rng = np.random.default_rng(cuts)

    async def play(address: str, network: Network) -> int:
        line = GrpcActorTransport(BARE, SLOTS, address, actor=0, credentials=Credentials())
        await asyncio.wait_for(line.open(), 20.0)
        wanted, steps = [0] * SLOTS, 0

        async def disturb() -> None:
            for number in range(cuts):
                await asyncio.sleep(rng.uniform(0.02, 0.2))
                before = steps
                while number % 4 > 1 and steps < before + 3:  # half of them while it comes back, the others when it has
                    await asyncio.sleep(0.01)
                network.up = number % 4 > 0  # sometimes it is away for longer
                network.cut()
                await asyncio.sleep(0.3 * (not network.up))
                network.up = True

        def post(slot: int) -> None:
            line.blocks[slot].flags[:] = False
            line.blocks[slot].reward[:] = rng.random()
            wanted[slot] = int(line.blocks[slot].reward.view(np.int32)[0])
            line.post(slot, 0)

        for slot in range(SLOTS):
            post(slot)
        over = asyncio.create_task(disturb())
        while not over.done() or steps < 20:
            slot, action = await asyncio.wait_for(line.next(), 20.0)
            assert (action == wanted[slot]).all()
            post(slot)
            steps += 1
        for _ in range(SLOTS):
            await asyncio.wait_for(line.next(), 20.0)
        assert line._life == 1
        await line.close()
        return steps + SLOTS

    with flaky() as (echo, network):
        steps = run(play(network.address, network))
        end = time.monotonic() + grpc_transport.AWAY / 2
        while not echo.lost and time.monotonic() < end:
            time.sleep(0.01)
        assert (echo.arrivals, echo.lost) == (steps, 1), "a step is missing, came twice, or who left is waited for"


def test_an_actor_that_stays_away_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_transport, "AWAY", 0.5)
    with flaky() as (echo, network):

        async def play() -> None:
            line = GrpcActorTransport(BARE, SLOTS, network.address, actor=0, credentials=Credentials())
            await asyncio.wait_for(line.open(), 20.0)
            network.up = False
            network.cut()
            with pytest.raises(ConnectionError, match=f"^{network.address}: "):
                await asyncio.wait_for(line.next(), 20.0)
            await line.close()

        run(play())
        end = time.monotonic() + 10.0
        while not echo.lost and time.monotonic() < end:
            time.sleep(0.01)
        assert echo.lost == 1


def test_an_actor_whose_place_was_taken_cannot_come_back() -> None:
    with flaky() as (echo, network):

        async def play() -> None:
            one, other = (
                GrpcActorTransport(BARE, SLOTS, address, actor=0, credentials=Credentials())
                for address in (network.address, echo.lane.address)
            )
            assert await asyncio.wait_for(one.open(), 20.0) == [0, 1]
            network.up = False
            network.cut()
            late = asyncio.create_task(one.next())
            assert await asyncio.wait_for(other.open(), 20.0) == [0, 2]
            network.up = True
            with pytest.raises(ConnectionError, match="life 1 of actor 0 is over"):
                await asyncio.wait_for(late, 20.0)
            other.post(0, 0)
            await asyncio.wait_for(other.next(), 20.0)
            await one.close()
            await other.close()

        run(play())


class Fed:
    """A stream without a network: what its actor says is made as it is read."""

    def __init__(self, rng: np.random.Generator, actor: int) -> None:
        self._rng, self._actor, self._read = rng, actor, 0
        self.answers: list[bytes] = []

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    def cancelled(self) -> bool:
        return False

    async def read(self) -> Any:
        self._read += 1
        if self._read == 1:
            return hello(self._actor, name=int(self._rng.integers(2**60)))
        life = wire.read(self.answers[0], CODEC.most).incarnation
        return malformed(self._rng, *observe(self._rng, self._actor * SLOTS, life, 0))

    async def write(self, frame: bytes) -> None:
        self.answers.append(frame)


@pytest.mark.parametrize(("at", "why"), [(1, "is at step 1, and was answered 0 times"), (-1, "numbers of steps")])
def test_an_actor_cannot_come_back_to_a_step_it_was_not_at(silent: GrpcTransport, at: int, why: str) -> None:
    class Back(Fed):
        async def read(self) -> Any:
            self._read += 1
            if self._read > 1:
                await asyncio.sleep(60.0)
            if not self._actor:
                return hello(0)
            head = wire.Head(wire.HELLO, 0, 1, 7, COLUMNS, SLOTS, CODEC.digest)
            return wire.frame(
                head, b"x" if at < 0 else np.full(SLOTS, at, "<u8").tobytes() + CODEC.layout.text.encode()
            )

    first, second = (Back(np.random.default_rng(0), number) for number in range(2))
    streams = [silent._loop.create_task(silent._play(None, fed)) for fed in (first, second)]
    while not streams[1].done():
        silent._turn(0.01)
    assert wire.read(second.answers[-1], CODEC.most).kind == wire.REFUSE
    assert why in wire.text(second.answers[-1])
    assert silent.live() == {0}, "the life goes on in its stream"


def test_a_server_turns_where_another_loop_is_running() -> None:
    """As in a notebook, whose cells are run by an event loop."""

    async def cell() -> None:
        with closing(GrpcTransport(CODEC, 1, SLOTS, lambda actor, life: [actor, life])) as lane:
            lane.wait(0.01)
            assert lane.take() == []
        assert asyncio.get_running_loop() is here

    with asyncio.Runner() as runner:
        here = runner.get_loop()
        runner.run(cell())


def test_few_descriptors_are_for_actors_first(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may hold few has fewer strangers, or says at its start that it can't hold the actors."""

    def possible(count: int) -> None:
        used = opened() - 1
        monkeypatch.setattr(descriptors, "raise_limit", lambda: used + descriptors.RESERVE + count)

    needed = 1 + grpc_transport.SPARE + grpc_transport.PIPES
    possible(needed - 2)
    with pytest.raises(ValueError, match=r"--actors 1 take 13 descriptors, and \d+ are left; .*ulimit -n"):
        GrpcTransport(CODEC, 1, SLOTS, lambda actor, life: [actor, life])
    possible(needed + 8)
    with closing(GrpcTransport(CODEC, 1, SLOTS, lambda actor, life: [actor, life])) as lane, ExitStack() as ends:
        before = opened()
        flooded(lane.address, ends, 40, needed + 8)
        assert opened() - before - 40 <= needed + 8


@pytest.mark.parametrize("streams", [1_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_malformed_frame_ends_its_stream(silent: GrpcTransport, streams: int) -> None:
    """Each stream's second frame is malformed: it ends with a reason, and nothing of it arrives."""
    rng, before = np.random.default_rng(3), 0
    for number in range(streams):
        fed = Fed(rng, number % 5)
        stream = silent._loop.create_task(silent._play(None, fed))
        while not stream.done():
            silent._turn(0.0)
        first, last = (wire.read(answer, CODEC.most).kind for answer in (fed.answers[0], fed.answers[-1]))
        assert (len(fed.answers), first, last) == (2, wire.WELCOME, wire.REFUSE)
        assert [type(event) for event in silent.take()] == [Lost]
        assert not silent.live()
        if number == streams // 10:
            before = resident()
    assert resident() - before < 16 * 2**20, "memory grows with what is refused"


def called(path: bytes) -> bytes:
    """First bytes of a connection that calls a path."""
    names = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers",
             b"content-type": b"application/grpc"}  # fmt: skip
    head = b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in names.items())
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]) + len(head).to_bytes(3, "big")
        + b"\1\4\0\0\0\1" + head
    )  # fmt: skip


@pytest.mark.parametrize("calls", [3, pytest.param(500, marks=pytest.mark.slow)])
def test_a_path_that_is_not_text_keeps_nobody_out(
    calls: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """gRPC's server ends at such a call: those that play play on, others come after it, and nothing is left of it."""
    with closing(Echo(GrpcTransport(CODEC, 3, SLOTS, lambda actor, life: [actor, life]))) as server:
        host, _, port = server.lane.address.rpartition(":")

        async def play(actor: int, storm: Any = None) -> int:
            """Steps before and after what happens meanwhile."""
            transport = GrpcActorTransport(BARE, SLOTS, server.lane.address, actor=actor, credentials=Credentials())
            await asyncio.wait_for(transport.open(), 20.0)
            steps = 0
            for part in range(2):
                for slot in range(SLOTS) if not part else ():
                    transport.post(slot, 0)
                for _ in range(20):
                    slot, _ = await asyncio.wait_for(transport.next(), 20.0)
                    transport.post(slot, 0)
                    steps += 1
                if storm is not None and not part:
                    await asyncio.to_thread(storm)
            await transport.close()
            return steps

        def storm() -> None:
            for number in range(calls):
                # The first connection is not ended by the server that it crashed.
                with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2) as sock:
                    sock.sendall(called(PATH.encode().replace(b"P", b"\x96")))
                    while sock.recv(4096):
                        pass
                if number == calls // 10:
                    sizes.append((resident(), opened()))
                time.sleep(0.03)

        sizes: list[tuple[int, int]] = []
        assert run(play(0, storm)) == 40
        assert run(play(1)) == 40
        assert len(server.lane._servers) <= 3, "of those that crashed one had a stream"
        grown, more = resident() - sizes[0][0], opened() - sizes[0][1]
        assert grown < 24 * 2**20 and more < 8, f"{grown / 2**20:.0f} MiB and {more} descriptors more"
    said = "".join(each.getMessage() for each in caplog.records) + capfd.readouterr().err
    assert "UnicodeDecodeError" not in said and "never retrieved" not in said


# ---------------------------------------------------------------------------------------------------- event loops


class SlowSocket(socket.socket):
    """Who has looked at what was rung hears it a while later, when the other one may have looked, too."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        found = super().recv(size, flags)
        if flags & socket.MSG_PEEK:
            time.sleep(0.02)
        return found


def test_two_loops_that_hear_one_bell_leave_nothing_undone() -> None:
    """No byte of gRPC's wake-up socket is lost, however many loops read it."""
    ends = socket.socketpair()
    heard, rings = SlowSocket(fileno=ends[0].detach()), ends[1]
    heard.setblocking(False)
    waiting: deque[int] = deque()
    done, over = threading.Semaphore(0), threading.Event()

    def look() -> None:
        """As gRPC does: one ring is heard, and then all that waits is done."""
        heard.recv(1)
        with contextlib.suppress(IndexError):
            while True:
                waiting.popleft()
                done.release()

    def turn() -> None:
        loop = Loop()
        loop.set_exception_handler(lambda loop, context: None)
        loop.add_reader(heard, look)
        while not over.is_set():
            loop.turn(0.02)
        loop.remove_reader(heard)
        loop.close()

    threads = [threading.Thread(target=turn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(20):
            waiting.extend([number] * 3)
            rings.send(b"111")  # at once, so that there is something to drain
            for _ in range(3):
                assert done.acquire(timeout=10.0), f"of round {number} something waits for ever"
            time.sleep(0.06)  # until both loops wait again
    finally:
        over.set()
        for thread in threads:
            thread.join()
        heard.close()
        rings.close()
