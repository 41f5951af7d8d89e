"""Transport between machines: frames over bidirectional gRPC streams, one per actor (as in SEED RL; Espeholt et al.
2020).

The server's event loop runs in the inference thread, while that waits or answers: passing each frame between threads
would cost more than its processing. gRPC's own threads serve the network meanwhile. Only complete steps that are due
are delivered. Any other frame ends its stream, with the reason; other streams are unaffected. Memory is bounded: one
step per group, and gRPC refuses frames longer than the layout allows.

Networks fail, and a stream ends with its connection. So a life waits `AWAY` seconds for its actor to come back in
another stream. Each side keeps the last frame of a group, and sends it again where it did not come: no step is lost.

No protobuf: messages are the bytes of frames. The token is metadata of the call and is checked before any read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import random
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from longhaul.runtime import descriptors
from longhaul.runtime.credentials import NOBODY, Credentials, channel, check_bind, server_credentials, split
from longhaul.topologies.inference_server import wire
from longhaul.topologies.inference_server.wire import (
    ACT,
    NONE_HELD,
    OBSERVE,
    Answer,
    Arrival,
    Codec,
    Due,
    Head,
    Held,
    Lost,
    WireError,
)

SERVICE, METHOD = "longhaul.Central", "Play"
PATH = f"/{SERVICE}/{METHOD}"

TOKEN = "longhaul-token"
"""Metadata key of the token."""

GREETING = 10.0
"""Seconds a stream may take to send HELLO, and a connection to begin one."""

HANDSHAKE = 5.0
"""Seconds for the handshakes of TLS and HTTP/2."""

AWAY = 10.0
"""Seconds within which an actor whose stream ended may go on with its life in another stream."""

FIRST, LONGEST = 0.1, 1.0
"""Seconds between two attempts of such an actor: first and longest, doubled in between, with random jitter."""

KEEPALIVE = 20.0
"""Seconds after which a side asks whether the other one is there; the answer may take half as long."""

STRANGERS = 32
"""Connections beside those of the actors, at most; fewer where the process may have few descriptors. gRPC closes a
further one at once."""

SPARE = 8
"""Extra streams, so that surplus actors get a refusal with its reason."""

PIPES = 4
"""Descriptors of an actor's process beside its connection."""

AGAIN = 0.02
"""Seconds between two looks at the port of a server that has crashed."""

CRASH = "AioServer.shutdown"
"""Name of the task that gRPC begins where its server crashes, and never else."""

NAME = int.from_bytes(os.urandom(8), "little")
"""Random id of this process, by which a server recognises it in another stream."""

Seeds = Callable[[int, int], Sequence[int]]
"""(actor, life) -> one seed per group."""

T = TypeVar("T")

Read = Callable[[], Coroutine[Any, Any, Any]]

Write = Callable[[bytes], Coroutine[Any, Any, None]]

_HEARING = threading.Lock()
"""Lock around reads of gRPC's wake-up socket, which all loops of a process share."""


# -------------------------------------------------------------------------------------------------------------- streams


@contextlib.contextmanager
def _in_turn() -> Iterator[None]:
    """Context in which a loop may run though another one of the thread is running, as in a notebook; that one waits."""
    other = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(other)


class Loop(asyncio.SelectorEventLoop):
    """Event loop for gRPC alone. gRPC writes one byte to a socket per event; a turn of the loop reads one byte and
    handles all events, so the turns for the other bytes find nothing. This loop reads all bytes at once.

    All loops of a process that uses gRPC must be of this class (`run`). With a plain closed loop, gRPC stops handling
    events at the first one for that loop, and the bytes for the rest have been read."""

    def __init__(self) -> None:
        super().__init__()
        self._turning = False
        self._alarm: asyncio.TimerHandle | None = None
        self.crashed: Callable[[], None] | None = None  # called after gRPC's server has crashed

    def create_task(self, coro: Any, **more: Any) -> Any:
        task = super().create_task(coro, **more)
        if self.crashed is not None and getattr(coro, "__qualname__", "") == CRASH:
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it fails like the server
            self.call_soon(self.crashed)
        return task

    def run_forever(self) -> None:
        with _in_turn():
            super().run_forever()

    def run_until_complete(self, future: Any) -> Any:
        with _in_turn():
            return super().run_until_complete(future)

    def turn(self, seconds: float) -> None:
        """Turn until a gRPC event or for `seconds`; 0: one pass over the work that is due. It may return earlier."""
        if seconds <= 0.0:
            self.call_soon(self.stop)
        else:
            self._wake(self.time() + seconds)
        self._turning = True
        try:
            self.run_forever()
        finally:
            self._turning = False

    def rest(self) -> None:
        """End the current turn after the work that is due."""
        if self._turning:
            self.stop()

    def _wake(self, when: float) -> None:
        """Set the timer, which serves many turns: a new timer each turn would double the cost of a turn."""
        if self._alarm is not None:
            if self._alarm.when() <= when:
                return
            self._alarm.cancel()
        self._alarm = self.call_at(when, self._woken)

    def _woken(self) -> None:
        self._alarm = None
        self.rest()

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        def hear() -> None:
            # One loop at a time: two that read at once would leave no byte, and the events would not be handled.
            with _HEARING:
                try:
                    rings = len(fd.recv(4096, socket.MSG_PEEK))
                    if rings > 1:
                        fd.recv(rings - 1)
                except BlockingIOError:  # another loop of this process reads the events
                    return
                callback(*args)
            self.rest()

        super().add_reader(fd, hear if isinstance(fd, socket.socket) else callback)

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """Callbacks for a closed loop are dropped: loops of a process read each other's events, and an error here would
        keep gRPC from handling the rest, whose bytes have been read."""

        def heard() -> None:
            callback(*args)
            self.rest()

        try:
            return super().call_soon_threadsafe(heard, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self, context)


def _is_news(record: logging.LogRecord) -> bool:
    """False for the traceback of a crash that another server answers: a stranger could fill a disk with them."""
    return not isinstance(record.msg, UnicodeDecodeError)


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in a `Loop`."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(work)


class Reader:
    """Frames received in a stream, polled by the server: waking a task for each frame would double its cost."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.until: asyncio.Future[Any] | None = None  # when done or None, `take` may return a frame
        self.begin()

    def begin(self) -> None:
        """Start of reading the next frame. Raises if the stream is gone."""
        self._work = self._read()
        try:
            self.until = self._work.send(None)
        except StopIteration as done:
            self.until, self._found = None, done.value

    def take(self) -> Any:
        """Received frame, after which `begin` follows; None: no frame yet. Raises if the stream is gone."""
        if self.until is None:
            return self._found
        try:
            self.until = self._work.send(None)
        except StopIteration as done:
            return done.value
        return None

    def stop(self) -> None:
        """End of reading. A pending read still completes, because gRPC writes to its memory."""
        if self.until is not None:
            self.until.add_done_callback(self._stopped)

    def _stopped(self, until: asyncio.Future[Any]) -> None:
        if not until.cancelled():
            until.exception()  # the end of the stream is known


class Writer:
    """Frames to send in a stream, one at a time as gRPC requires; `say` does not wait.

    A finished write is noticed at the next one: a task for each would double the cost. The protocol bounds the queue:
    one frame per group.
    """

    def __init__(self, write: Write, failed: Callable[[BaseException], None]) -> None:
        """`failed` is called if the stream is gone: the reader may not notice."""
        self._write, self._failed = write, failed
        self._later: deque[bytes] = deque()
        self._work: Coroutine[Any, Any, None] | None = None  # the pending write
        self._until: asyncio.Future[Any] | None = None  # `_work` continues when this is done

    def say(self, frame: bytes) -> None:
        self._later.append(frame)
        self._go_on()

    def stop(self) -> None:
        """End of the queue, which is dropped; a pending write still completes."""
        self._later.clear()
        self._go_on()
        if self._until is not None:
            self._until.add_done_callback(self._go_on)

    async def stopped(self) -> None:
        """End, after the pending write."""
        self.stop()
        while self._until is not None:
            await asyncio.wait((self._until,))
            self._go_on()

    def _go_on(self, _: Any = None) -> None:
        """Write until it must wait; a loop, because this runs once per frame."""
        while (until := self._until) is None or until.done():
            if until is None:
                if not self._later:
                    return
                self._work = self._write(self._later.popleft())
            assert self._work is not None
            try:
                self._until = self._work.send(None)
            except StopIteration:
                self._work = self._until = None
            except (Exception, asyncio.CancelledError) as error:
                self._work = self._until = None
                self._later.clear()
                self._failed(error)
        if self._later:
            until.add_done_callback(self._go_on)


# -------------------------------------------------------------------------------------------------------- the two sides


def _options(most: int) -> list[tuple[str, int]]:
    """Options of both sides. A silently lost peer is noticed within 1.5 `KEEPALIVE`, which is 30 s.

    A server ends the connection of a peer that asks three times more often than every 5 minutes and has nothing else to
    say, as an actor while the learner learns: gRPC's default. So the interval that it accepts is given.
    """
    often = int(1000 * KEEPALIVE)
    return [
        ("grpc.max_receive_message_length", most),
        ("grpc.max_send_message_length", most),
        ("grpc.keepalive_time_ms", often),
        ("grpc.keepalive_timeout_ms", often // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", often // 4),
        ("grpc.so_reuseport", 0),
    ]


class Busy(WireError):
    """Temporary refusal: a later attempt may succeed."""


class StreamEnded(ConnectionError):
    """End of a stream without a word of the server: a later stream may go on."""


class _Life:
    """Life of an actor, in one stream after another."""

    def __init__(self, actor: int, number: int, slots: int, name: int) -> None:
        self.actor, self.number, self.name = actor, number, name
        self.first = actor * slots  # its first group
        self.step = [0] * slots  # number of the frame that is due, or came last
        self.due = [True] * slots
        self.answers = [b""] * slots  # the last one of each group
        self.stream: _Stream | None = None  # None: its actor is away
        self.waiting: asyncio.Task[None] | None = None  # for its actor
        self.ended: str | None = None

    @property
    def came(self) -> list[int]:
        """Steps of each group that came."""
        return [step + (not due) for step, due in zip(self.step, self.due, strict=True)]

    def end(self, why: str) -> None:
        self.ended = self.ended or why
        if self.stream is not None:
            self.stream.over.set()


class _Stream:
    """Stream of a life."""

    def __init__(self, read: Read, write: Write) -> None:
        self._read = read
        self.writer = Writer(write, lambda error: self.end(f"its stream ended: {error}"))
        self.reader: Reader | None = None
        self.over = asyncio.Event()
        self.why = ""

    def begin(self) -> None:
        """Begin of what follows on WELCOME."""
        self.reader = Reader(self._read)

    def end(self, why: str) -> None:
        """End of the stream alone."""
        self.why = self.why or why
        self.over.set()

    def stop(self) -> None:
        if self.reader is not None:
            self.reader.stop()
        self.writer.stop()


class GrpcTransport:
    """Server side; a `wire.Transport`. ValueError if the address is not allowed or cannot be bound.

    The event loop of gRPC's server ends at the first call whose path is not UTF-8, which any stranger can make: streams
    go on, and nobody else can come. Then another server takes its address, and the old one ends after its streams.
    """

    def __init__(
        self, codec: Codec, actors: int, slots: int, seeds: Seeds, *, bind: str = "127.0.0.1:0",
        credentials: Credentials = NOBODY, held: Held = NONE_HELD,
    ) -> None:  # fmt: skip
        check_bind(bind, credentials)
        self._codec, self._actors, self._slots, self._seeds = codec, actors, slots, seeds
        self._credentials, self._held = credentials, held
        self._lives: dict[int, _Life] = {}
        self._numbers = [0] * actors
        self._inbox: deque[tuple[_Life, int, wire.Block | None, np.ndarray | None]] = deque()
        self._ending = self._answered = False
        self._loop = Loop()
        self._servers: dict[int, Any] = {}  # by number: the last one takes streams
        self._streams: Counter[int] = Counter()  # of each
        self._renewal: asyncio.Task[None] | None = None
        self._loop.crashed = self._crashed
        try:
            self.address = self._loop.run_until_complete(self._serve(bind))
        except BaseException:
            self._loop.close()
            raise

    def wait(self, seconds: float) -> None:
        until = self._loop.time() + seconds
        self._turn(0.0 if self._inbox else seconds)
        while not self._inbox and (seconds := until - self._loop.time()) > 0.0:
            self._turn(seconds)

    def _turn(self, seconds: float) -> None:
        """Turn of the event loop, which sends queued frames; then take the frames received."""
        self._answered = False
        self._loop.turn(seconds)
        for life in list(self._lives.values()):
            stream = life.stream
            if stream is None or (reader := stream.reader) is None:
                continue
            if reader.until is None or reader.until.done():
                self._hear(life, stream, reader)

    def take(self) -> list[Arrival | Lost]:
        if self._answered:
            self._turn(0.0)
        found: list[Arrival | Lost] = []
        while self._inbox:
            life, slot, step, state = self._inbox.popleft()
            if step is None:
                found.append(Lost(life.actor, life.ended or ""))
            elif life.ended is None:
                found.append(Arrival(life.first + slot, life.number, life.step[slot] == 0, step, state))
        return found

    def answer(self, answers: Sequence[Answer]) -> None:
        for group, number, action in answers:
            actor, slot = divmod(group, self._slots)
            life = self._lives.get(actor)
            if life is None or life.number != number or life.due[slot]:
                continue
            due = Due(ACT, group, number, life.step[slot])
            life.answers[slot] = frame = self._codec.act_frame(due, action)
            if (stream := life.stream) is not None and stream.reader is not None:
                stream.writer.say(frame)
            life.step[slot] += 1
            life.due[slot] = True
            self._answered = True

    def cut(self, actor: int, why: str) -> None:
        if actor in self._lives:
            self._leave(self._lives[actor], why)

    def live(self) -> frozenset[int]:
        return frozenset(actor for actor, life in self._lives.items() if life.stream is not None)

    def close(self) -> None:
        self._ending = True
        for life in list(self._lives.values()):
            life.end("the server ends")
            if life.waiting is not None:
                life.waiting.cancel()
        self._loop.run_until_complete(self._stop())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    # ----------------------------------------------------------------------------------------------------- inside

    async def _stop(self) -> None:
        if self._renewal is not None:
            await self._renewal
        await asyncio.gather(*(server.stop(grace=1.0) for server in self._servers.values()))

    def _crashed(self) -> None:
        if self._renewal is None or self._renewal.done():
            self._renewal = self._loop.create_task(self._renew())

    async def _renew(self) -> None:
        """Start of another server at the same address, after the crash of one."""
        host, port = split(self.address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        while not self._ending:
            try:
                socket.create_server((host, port), family=family).close()  # it is free
                await self._serve(self.address)
                break
            except (OSError, ValueError):  # not yet, or another program has it
                await asyncio.sleep(AGAIN)
        for number in [each for each in list(self._servers)[:-1] if not self._streams[each]]:
            del self._streams[number]
            await self._servers.pop(number).stop(grace=None)

    async def _serve(self, bind: str) -> str:
        """Address of a server that has started."""
        import grpc

        number = max(self._servers, default=-1) + 1

        async def play(request: Any, context: Any) -> None:
            self._streams[number] += 1
            try:
                await self._play(request, context)
            finally:
                self._streams[number] -= 1

        handler = grpc.stream_stream_rpc_method_handler(play)
        streams = self._actors + SPARE
        self._end = grpc.aio.EOF
        pipes, room = PIPES * self._actors, descriptors.room()
        if room < streams + pipes:
            raise ValueError(
                f"--actors {self._actors} take {streams + pipes} descriptors, and {room} are left; "
                "raise their limit (ulimit -n), or give fewer actors"
            )
        options = [
            *_options(self._codec.most),
            ("grpc.max_allowed_incoming_connections", min(room - pipes, streams + STRANGERS)),
            ("grpc.max_concurrent_streams", streams),
            ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)),
            ("grpc.max_connection_idle_ms", int(1000 * GREETING)),
        ]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=streams)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        try:
            secure = server_credentials(self._credentials)
            port = server.add_insecure_port(bind) if secure is None else server.add_secure_port(bind, secure)
            await server.start()
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"--bind {bind}: {error}") from error
        self._servers[number] = server
        return f"{bind.rpartition(':')[0]}:{port}"

    async def _play(self, _: Any, context: Any) -> None:
        """Handler of one stream."""
        import grpc

        if not self._admits(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
        await context.send_initial_metadata(())  # the client waits for it
        life, at, stream = None, None, _Stream(context.read, context.write)
        try:
            async with asyncio.timeout(GREETING):
                hello = await context.read()
            if hello is grpc.aio.EOF:
                return
            life, at = self._greet(hello, stream)
            await context.write(self._welcome(life) if at is None else self._welcome_back(life))
            if life.stream is stream:
                stream.begin()
                for slot, step in enumerate(at or ()):
                    if step < life.step[slot]:
                        stream.writer.say(life.answers[slot])
            await stream.over.wait()
            if life.ended is not None and not context.cancelled():
                raise (Busy if self._ending else WireError)(life.ended)  # a server that ends may be restarted
        except WireError as error:
            why = str(error)
            if life is not None:
                life.end(why)
            head = Head(wire.REFUSE, step=int(isinstance(error, Busy)))
            with contextlib.suppress(Exception):  # the stream may be gone
                async with asyncio.timeout(1.0):
                    if life is not None:
                        await stream.writer.stopped()
                    await context.write(wire.frame(head, why.encode()[: wire.MOST_TEXT]))
        except TimeoutError:
            pass
        finally:
            stream.stop()
            if life is not None and life.stream is stream:
                life.stream = None
                if life.ended is not None or self._ending or (at is None and stream.reader is None):
                    self._leave(life, stream.why or "its stream ended")
                elif self._lives.get(life.actor) is life:
                    life.waiting = self._loop.create_task(self._wait(life, stream.why or "its stream ended"))

    async def _wait(self, life: _Life, why: str) -> None:
        """Wait for an actor that is away. Time in which the loop does not turn, as in an update, counts as one part."""
        for _ in range(10):
            await asyncio.sleep(AWAY / 10)
        self._leave(life, f"{why}, and it did not come back within {AWAY:g} s")

    def _admits(self, context: Any) -> bool:
        wanted = self._credentials.token
        if wanted is None:
            return True
        given = next((value for key, value in context.invocation_metadata() if key == TOKEN), "")
        found = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(found, wanted.encode())

    def _greet(self, data: bytes, stream: _Stream) -> tuple[_Life, list[int] | None]:
        """Life of the actor of a HELLO, in its stream, and the steps that it is at if it has come back to that life.
        WireError if it is refused."""
        head = wire.read(data, self._codec.most)
        if head.kind != wire.HELLO:
            raise WireError(f"a stream begins with a frame of kind {head.kind}; it must begin with HELLO, {wire.HELLO}")
        numbers = 8 * self._slots if head.incarnation else 0
        if head.length < numbers:
            raise WireError(f"HELLO of {head.length} bytes, of which {numbers} are numbers of steps")
        theirs = wire.text(data, numbers)
        if theirs != self._codec.layout.text:
            found = wire.difference(self._codec.layout.text, theirs)
            raise WireError(f"another environment: {found}; give the actor the run's --env and sizes")
        if head.finals != self._slots:
            raise WireError(f"{head.finals} groups; the server takes {self._slots} of an actor")
        actor = head.group
        if actor == wire.ANY:
            free = [a for a in range(self._actors) if a not in self._lives]
            if not free:
                raise Busy(f"all {self._actors} actors are here; raise --actors to take more")
            actor = free[0]
        if actor >= self._actors:
            raise WireError(f"actor {actor}; there are 0 to {self._actors - 1}")
        old = self._lives.get(actor)
        if head.incarnation:
            if old is None or old.ended is not None or (old.number, old.name) != (head.incarnation, head.step):
                raise Busy(f"life {head.incarnation} of actor {actor} is over; it may begin another one")
            return old, self._comes_back(old, np.frombuffer(data, "<u8", self._slots, wire.HEAD_BYTES), stream)
        if old is not None:
            if old.name != head.step and old.stream is not None:
                raise Busy(f"actor {actor} is here already")
            self._leave(old, "it came back in another stream")  # its end was not noticed yet
        self._numbers[actor] += 1
        life = self._lives[actor] = _Life(actor, self._numbers[actor], self._slots, head.step)
        life.stream = stream
        return life, None

    def _comes_back(self, life: _Life, at: np.ndarray, stream: _Stream) -> list[int]:
        """Steps `at` which a life's actor is, that goes on in another stream. WireError if it can't be at these."""
        found = [int(each) for each in at]
        for slot, (theirs, answered, due) in enumerate(zip(found, life.step, life.due, strict=True)):
            if theirs != answered and not (due and theirs == answered - 1):
                raise WireError(f"group {life.first + slot} is at step {theirs}, and was answered {answered} times")
        if life.waiting is not None:
            life.waiting.cancel()
            life.waiting = None
        if life.stream is not None:  # its end was not noticed yet
            life.stream.stop()
            life.stream.end("it came back in another stream")
        life.stream = stream
        return found

    def _welcome(self, life: _Life) -> bytes:
        seeds = np.asarray(self._seeds(life.actor, life.number), "<u8")
        head = Head(wire.WELCOME, life.actor * self._slots, life.number, columns=self._codec.layout.columns)
        names = "\n".join(self._codec.layout.scores).encode()
        held = {slot: self._held[life.first + slot] for slot in range(self._slots) if life.first + slot in self._held}
        about = np.array([self._codec.keeps.every, sum(1 << slot for slot in held)], "<u8")
        parts = [seeds.tobytes(), about.tobytes(), *(state.tobytes() for state in held.values()), names]
        return wire.frame(head._replace(finals=self._slots, digest=self._codec.digest), b"".join(parts))

    def _welcome_back(self, life: _Life) -> bytes:
        head = Head(wire.WELCOME, life.first, life.number, columns=self._codec.layout.columns, finals=self._slots)
        return wire.frame(head._replace(digest=self._codec.digest), np.array(life.came, "<u8").tobytes())

    def _hear(self, life: _Life, stream: _Stream, reader: Reader) -> None:
        """Take a received frame; end the life if the frame is not due, and the stream if that ended."""
        if stream.over.is_set():
            return
        try:
            data = reader.take()
            if data is self._end:
                stream.end("its stream ended")
            elif data is not None:
                self._check(life, data)
                reader.begin()
        except WireError as error:
            life.end(str(error))
        except (Exception, asyncio.CancelledError) as error:
            stream.end(f"its stream ended: {error}")

    def _check(self, life: _Life, data: bytes) -> None:
        """Check that a frame is a step that is due, and queue it; else WireError."""
        codec, head = self._codec, wire.read(data, self._codec.most)
        if head.kind == wire.BYE:
            raise WireError("its actor has left")
        slot = head.group - life.first
        if not 0 <= slot < self._slots or not life.due[slot]:
            raise WireError(f"a frame of group {head.group}, of which none is due")
        t = life.step[slot]
        codec.check_head(head, Due(OBSERVE, head.group, life.number, t))
        step = codec.observed(data, head.finals, first=t == 0)
        state = codec.state(data, head.finals, wire.HEAD_BYTES) if codec.keeps.after(t) else None
        life.due[slot] = False
        self._inbox.append((life, slot, step, state))

    def _leave(self, life: _Life, why: str) -> None:
        life.end(why)
        if life.waiting is not None:
            life.waiting.cancel()
        if self._lives.get(life.actor) is life:
            del self._lives[life.actor]
            self._inbox.append((life, 0, None, None))
            self._loop.rest()


class GrpcActorTransport:
    """Actor side, a `wire.ActorTransport`: one stream, in one event loop."""

    def __init__(self, codec: Codec, slots: int, address: str, *, actor: int, credentials: Credentials) -> None:
        """`codec` has a layout without scores: WELCOME names those the server wants."""
        self.codec, self._slots, self._address = codec, slots, address
        self._actor, self._credentials = actor, credentials
        self._steps, self._held = [0] * slots, dict[int, np.ndarray]()
        self._posted: list[int | None] = [None] * slots  # finals of the step that was posted and not answered
        self._first = self._life = 0
        self._channel: Any = None
        self._call: Any = None
        self._writer: Writer | None = None

    async def open(self) -> list[int]:
        codec = self.codec
        data, head = await self._greet(self._actor, 0, b"")
        size = 8 * (self._slots + 2)
        if head.kind != wire.WELCOME or head.length < size or head.finals != self._slots:
            raise WireError(f"the server answers HELLO with a frame of kind {head.kind}; give both the same version")
        *seeds, every, there = (int(word) for word in np.frombuffer(data, "<u8", size // 8, wire.HEAD_BYTES))
        slots, one = [slot for slot in range(self._slots) if there >> slot & 1], codec.keeps.size
        held = len(slots) * one
        if head.length < size + held:
            raise WireError("the server's states are of another size; give the actor the run's --env and sizes")
        rows = np.frombuffer(data, np.uint8, held, wire.HEAD_BYTES + size).reshape(len(slots), one)
        self._held = dict(zip(slots, rows, strict=True))
        names = wire.text(data, size + held).split("\n")
        keeps = codec.keeps._replace(every=every)
        self.codec = codec = Codec(codec.layout._replace(scores=tuple(name for name in names if name)), keeps)
        if head.digest != codec.digest:
            raise WireError("the server wants scores of another layout; give both the same version")
        most = wire.HEAD_BYTES + codec.block_bytes(codec.layout.columns) + keeps.size
        self._memory = [bytearray(most) for _ in range(self._slots)]
        self.blocks = [codec.block(memory, 0, wire.HEAD_BYTES) for memory in self._memory]
        self._first, self._life = head.group, head.incarnation
        return seeds

    async def _greet(self, actor: int, life: int, numbers: bytes) -> tuple[bytes, Head]:
        """Answer to the HELLO of a stream, which begins."""
        import grpc

        self._grpc, self._end, codec = grpc, grpc.aio.EOF, self.codec
        # Who comes back has a connection of its own: gRPC makes a shared one wait longer after each failure.
        alone = ("grpc.use_local_subchannel_pool", int(life > 0))
        self._channel = channel(self._address, self._credentials, [*_options(codec.most), alone])
        token = self._credentials.token
        self._call = self._channel.stream_stream(PATH)(metadata=() if token is None else ((TOKEN, token),))
        await self._call.initial_metadata()  # from the server, or the end of the stream
        if self._call.done():
            raise self._gone(await self._call.code(), await self._call.details())
        hello = Head(wire.HELLO, actor, life, NAME, codec.layout.columns, self._slots, codec.digest)
        # Errors of writes are ignored: the reader gets the reason.
        self._writer = Writer(self._call.write, lambda error: None)
        self._writer.say(wire.frame(hello, numbers + codec.layout.text.encode()))
        return await self._read()

    async def _come_back(self, ended: StreamEnded) -> None:
        """Another stream of the same life. Raises `ended` if there is none within `AWAY` seconds."""
        until, pause = time.monotonic() + AWAY, FIRST
        while True:
            await self._hang_up()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # not all at once
            pause = min(2.0 * pause, LONGEST)
            try:
                numbers = np.array(self._steps, "<u8").tobytes()
                data, head = await self._greet(self._first // self._slots, self._life, numbers)
                break
            except StreamEnded:
                if time.monotonic() > until:
                    raise ended from None
        wanted = wire.WELCOME, self._first, self._life, 8 * self._slots
        if (head.kind, head.group, head.incarnation, head.length) != wanted:
            raise WireError(f"the server answers HELLO with a frame of kind {head.kind}; give both the same version")
        came = np.frombuffer(data, "<u8", self._slots, wire.HEAD_BYTES)
        for slot, (step, count) in enumerate(zip(self._steps, came, strict=True)):
            if self._posted[slot] is not None and step == count:
                self._say(slot)

    def post(self, slot: int, finals: int) -> None:
        self._posted[slot] = finals
        self._say(slot)

    def _say(self, slot: int) -> None:
        finals = self._posted[slot]
        assert self._writer is not None and finals is not None, "it is open, and the step is there"
        memory, due = self._memory[slot], Due(OBSERVE, self._first + slot, self._life, self._steps[slot])
        self._writer.say(bytes(memoryview(memory)[: self.codec.write_head(memory, due, finals)]))

    def held(self, slot: int) -> np.ndarray | None:
        return self._held.get(slot)

    def keeps(self, slot: int, finals: int) -> np.ndarray | None:
        if not self.codec.keeps.after(self._steps[slot]):
            return None
        return self.codec.state(self._memory[slot], finals, wire.HEAD_BYTES)

    def ended(self, slot: int, finals: int) -> wire.Block:
        return self.codec.block(self._memory[slot], finals, wire.HEAD_BYTES)

    async def next(self) -> tuple[int, np.ndarray]:
        while True:
            try:
                data, head = await self._read()
                break
            except StreamEnded as ended:
                await self._come_back(ended)
        slot = head.group - self._first
        if not 0 <= slot < self._slots:
            raise WireError(f"actions for group {head.group}, which is not this actor's")
        self.codec.check_head(head, Due(ACT, head.group, self._life, self._steps[slot]))
        self._steps[slot] += 1
        self._posted[slot] = None
        return slot, self.codec.action(data, wire.HEAD_BYTES)

    async def close(self) -> None:
        """End of the life, of which the server hears if it can."""
        if self._writer is not None and not self._call.done():
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1.0):
                    await self._writer.stopped()
                    await self._call.write(wire.frame(Head(wire.BYE, self._first, self._life)))
                    while await self._call.read() is not self._end:
                        pass
        await self._hang_up()

    async def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.stop()
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            await self._channel.close()
        self._writer = None

    def _gone(self, code: Any, details: str | None) -> Exception:
        """Exception for the end of a stream: WireError if another attempt is useless, else StreamEnded."""
        import grpc

        fatal = code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
        return (WireError if fatal else StreamEnded)(f"{self._address}: {details or 'the stream ended'}")

    async def _read(self) -> tuple[bytes, Head]:
        """Next frame. WireError or ConnectionError with the reason if the server refuses; StreamEnded if it is gone."""
        try:
            data = await self._call.read()
        except self._grpc.RpcError as error:
            raise self._gone(error.code(), error.details()) from error
        if data is self._end:
            raise StreamEnded(f"{self._address}: the stream ended")
        head = wire.read(data, self.codec.most)
        if head.kind == wire.REFUSE:
            kind = ConnectionError if head.step else WireError
            raise kind(f"{self._address} refuses: {wire.text(data)}")
        return data, head
