"""The lane between machines: frames over bidirectional gRPC streams, one for each actor (as in SEED RL; Espeholt et al.
2020).

The server's event loop runs in the thread that infers, whenever that waits or answers: handing each frame from a thread
to another costs more than all else that is done with it. What the network needs meanwhile, gRPC's own threads do. Only
whole steps that are due come out. A stream that says anything else is ended with the reason, and nobody else hears of
it. What waits is bounded: one step for each group, and frames that gRPC refuses above the longest that the layout has.

No protobuf: messages are the frames' bytes. A token travels in the call's metadata, and is looked at before anything
is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from longhaul.central import wire
from longhaul.central.credentials import NOBODY, Credentials, channel, check_bind, server_credentials
from longhaul.central.lane import Answer, Arrival, Lost
from longhaul.central.streaming import Loop, Write, Writer
from longhaul.central.wire import Codec, Due, Head, WireError

SERVICE, METHOD = "longhaul.Central", "Play"
PATH = f"/{SERVICE}/{METHOD}"

TOKEN = "longhaul-token"
"""The metadata's name of the token."""

GREETING = 10.0
"""Seconds that a stream may take until it says HELLO."""

SPARE = 8
"""Streams beside those of the actors, which are there to be refused."""

NAME = int.from_bytes(os.urandom(8), "little")
"""By which a server knows this process again when it comes back in another stream."""

Seeds = Callable[[int, int], Sequence[int]]
"""(actor, life) -> a seed for each of its groups."""


def _options(most: int) -> list[tuple[str, int]]:
    """Of both sides. A peer that is gone without a word is noticed within half a minute."""
    return [
        ("grpc.max_receive_message_length", most),
        ("grpc.max_send_message_length", most),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.so_reuseport", 0),
    ]


class Busy(WireError):
    """Refused for now; who tries again later may find room."""


class _Life:
    """One stream of an actor, from HELLO to its end."""

    def __init__(self, actor: int, number: int, slots: int, name: int, write: Write) -> None:
        self.actor, self.number, self.name = actor, number, name
        self.step = [0] * slots  # of the frame that is due, or was the last to come
        self.due = [True] * slots
        self.writer = Writer(write, lambda error: self.end(f"its stream ended: {error}"))
        self.over = asyncio.Event()
        self.ended: str | None = None

    def end(self, why: str) -> None:
        self.ended = self.ended or why
        self.over.set()


class GrpcLane:
    """The server's side; a `lane.Lane`. Raises ValueError where it may not or can't be bound."""

    def __init__(
        self, codec: Codec, actors: int, slots: int, seeds: Seeds, *, bind: str = "127.0.0.1:0",
        credentials: Credentials = NOBODY,
    ) -> None:  # fmt: skip
        check_bind(bind, credentials)
        self._codec, self._actors, self._slots, self._seeds = codec, actors, slots, seeds
        self._credentials = credentials
        self._lives: dict[int, _Life] = {}
        self._numbers = [0] * actors
        self._inbox: deque[tuple[_Life, int, wire.Block | None]] = deque()
        self._ending = self._unsent = False
        self._loop = Loop()
        try:
            self._server, self.address = self._loop.run_until_complete(self._serve(bind))
        except BaseException:
            self._loop.close()
            raise

    def wait(self, seconds: float) -> None:
        self._turn(0.0 if self._inbox else seconds)

    def _turn(self, seconds: float) -> None:
        """Runs the event loop until something came, or for so long; 0: once. What there is to say is said."""
        self._unsent = False
        if seconds > 0.0:
            over = self._loop.call_later(seconds, self._loop.stop)
            self._loop.run_forever()
            over.cancel()
        else:
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()

    def take(self) -> list[Arrival | Lost]:
        if self._unsent:
            self._turn(0.0)
        found: list[Arrival | Lost] = []
        while self._inbox:
            life, slot, step = self._inbox.popleft()
            if step is None:
                found.append(Lost(life.actor, life.ended or ""))
            elif life.ended is None:
                found.append(Arrival(life.actor * self._slots + slot, life.number, life.step[slot] == 0, step))
        return found

    def answer(self, answers: Sequence[Answer]) -> None:
        for group, number, action in answers:
            actor, slot = divmod(group, self._slots)
            life = self._lives.get(actor)
            if life is None or life.number != number or life.due[slot]:
                continue
            due = Due(wire.ACT, group, life.number, life.step[slot])
            life.step[slot] += 1
            life.due[slot] = True
            life.writer.say(self._codec.acts(due, action))
            self._unsent = True

    def cut(self, actor: int, why: str) -> None:
        if actor in self._lives:
            self._leave(self._lives[actor], why)

    def live(self) -> frozenset[int]:
        return frozenset(self._lives)

    def close(self) -> None:
        self._ending = True
        self._turn(0.0)  # what came may have stopped the loop in advance
        for life in list(self._lives.values()):
            life.end("the server ends")
        self._loop.run_until_complete(self._server.stop(grace=1.0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    # ----------------------------------------------------------------------------------------------------- inside

    async def _serve(self, bind: str) -> tuple[Any, str]:
        """-> (server, address)."""
        import grpc

        handler = grpc.stream_stream_rpc_method_handler(self._play)
        streams = self._actors + SPARE
        server = grpc.aio.server(options=_options(self._codec.most), maximum_concurrent_rpcs=streams)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        try:
            secure = server_credentials(self._credentials)
            port = server.add_insecure_port(bind) if secure is None else server.add_secure_port(bind, secure)
            await server.start()
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"--bind {bind}: {error}") from error
        return server, f"{bind.rpartition(':')[0]}:{port}"

    async def _play(self, _: Any, context: Any) -> None:
        """One stream."""
        import grpc

        if not self._admits(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
        await context.send_initial_metadata(())  # which the other side waits for
        life: _Life | None = None
        tasks: list[asyncio.Task[Any]] = []
        try:
            async with asyncio.timeout(GREETING):
                hello = await context.read()
            if hello is grpc.aio.EOF:
                return
            life = self._greet(hello, context.write)
            await context.write(self._welcome(life))
            tasks = [asyncio.create_task(work) for work in (self._hear(context, life), life.over.wait())]
            done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if life.ended is not None and not context.cancelled():
                raise (Busy if self._ending else WireError)(life.ended)  # who ends may begin again
        except WireError as error:
            why = str(error)
            if life is not None:
                life.end(why)
            head = Head(wire.REFUSE, step=int(isinstance(error, Busy)))
            with contextlib.suppress(Exception):  # it may be gone
                async with asyncio.timeout(1.0):
                    if life is not None:
                        await life.writer.stopped()
                    await context.write(wire.frame(head, why.encode()[: wire.MOST_TEXT]))
        except TimeoutError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if life is not None:
                life.writer.stop()
                self._leave(life)

    def _admits(self, context: Any) -> bool:
        wanted = self._credentials.token
        if wanted is None:
            return True
        given = next((value for key, value in context.invocation_metadata() if key == TOKEN), "")
        found = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(found, wanted.encode())

    def _greet(self, data: bytes, write: Write) -> _Life:
        """A new life for an actor that says HELLO. WireError where it can't play."""
        head = wire.read(data, self._codec.most)
        if head.kind != wire.HELLO:
            raise WireError(f"a stream begins with a frame of kind {head.kind}; it must begin with HELLO, {wire.HELLO}")
        theirs = wire.text(data)
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
        if actor in self._lives:
            if self._lives[actor].name != head.step:
                raise Busy(f"actor {actor} is here already")
            self._leave(self._lives[actor], "it came back in another stream")  # before we knew that it was gone
        self._numbers[actor] += 1
        life = _Life(actor, self._numbers[actor], self._slots, head.step, write)
        self._lives[actor] = life
        return life

    def _welcome(self, life: _Life) -> bytes:
        seeds = np.asarray(self._seeds(life.actor, life.number), "<u8")
        head = Head(wire.WELCOME, life.actor * self._slots, life.number, columns=self._codec.layout.columns)
        names = "\n".join(self._codec.layout.scores).encode()
        return wire.frame(head._replace(finals=self._slots, digest=self._codec.digest), seeds.tobytes() + names)

    async def _hear(self, context: Any, life: _Life) -> None:
        """Reads until the stream ends, by either side."""
        import grpc

        codec, slots, number, first = self._codec, self._slots, life.number, life.actor * self._slots
        while life.ended is None:
            data = await context.read()
            if data is grpc.aio.EOF:
                life.end("its stream ended")
                return
            group = wire.group(data)
            slot = group - first
            if not 0 <= slot < slots or not life.due[slot]:
                wire.read(data, codec.most)  # it may be none at all
                raise WireError(f"a frame of group {group}, of which none is due")
            t = life.step[slot]
            finals = codec.whole(data, Due(wire.OBSERVE, group, number, t))
            step = codec.observed(data, finals, first=t == 0)
            life.due[slot] = False
            self._hand(life, slot, step)

    def _hand(self, life: _Life, slot: int, step: wire.Block | None) -> None:
        self._inbox.append((life, slot, step))
        if len(self._inbox) == 1 and not self._ending:
            self._loop.call_soon(self._loop.stop)  # after whatever else came by then

    def _leave(self, life: _Life, why: str = "its stream ended") -> None:
        life.end(why)
        if self._lives.get(life.actor) is life:
            del self._lives[life.actor]
            self._hand(life, 0, None)


class GrpcLine:
    """The actor's side, a `lane.Line`: one stream, in one event loop."""

    def __init__(self, codec: Codec, slots: int, address: str, *, actor: int, credentials: Credentials) -> None:
        """`codec` is of a layout without scores: which are wanted, the server says."""
        self.codec, self._slots, self._address = codec, slots, address
        self._actor, self._credentials = actor, credentials
        self._steps = [0] * slots
        self._life = self._first = 0
        self._channel: Any = None
        self._call: Any = None

    async def open(self) -> list[int]:
        codec = self.codec
        self._channel = channel(self._address, self._credentials, _options(codec.most))
        token = self._credentials.token
        self._call = self._channel.stream_stream(PATH)(metadata=() if token is None else ((TOKEN, token),))
        await self._call.initial_metadata()  # the server's, or the end
        if self._call.done():
            raise self._gone(await self._call.code(), await self._call.details())
        hello = Head(wire.HELLO, self._actor, 0, NAME, codec.layout.columns, self._slots, codec.digest)
        await self._write(wire.frame(hello, codec.layout.text.encode()))
        data = await self._read()
        head = wire.read(data, codec.most)
        size = 8 * self._slots
        if head.kind != wire.WELCOME or head.length < size or head.finals != self._slots:
            raise WireError(f"the server answers HELLO with a frame of kind {head.kind}; give both the same version")
        names = wire.text(data, size).split("\n")
        self.codec = codec = Codec(codec.layout._replace(scores=tuple(name for name in names if name)))
        if head.digest != codec.digest:
            raise WireError("the server wants scores of another layout; give both the same version")
        most = wire.HEAD_BYTES + codec.block_bytes(codec.layout.columns)
        self._memory = [bytearray(most) for _ in range(self._slots)]
        self.blocks = [codec.block(memory, 0, wire.HEAD_BYTES) for memory in self._memory]
        self._life, self._first = head.incarnation, head.group
        return [int(seed) for seed in np.frombuffer(data, "<u8", self._slots, wire.HEAD_BYTES)]

    async def post(self, slot: int, finals: int) -> None:
        due = Due(wire.OBSERVE, self._first + slot, self._life, self._steps[slot])
        await self._write(self.codec.sealed(self._memory[slot], due, finals))

    def ended(self, slot: int, finals: int) -> wire.Block:
        return self.codec.block(self._memory[slot], finals, wire.HEAD_BYTES)

    async def next(self) -> tuple[int, np.ndarray]:
        data = await self._read()
        group = wire.group(data)
        slot = group - self._first
        if not 0 <= slot < self._slots:
            raise WireError(f"actions for group {group}, which is not this actor's")
        self.codec.whole(data, Due(wire.ACT, group, self._life, self._steps[slot]))
        self._steps[slot] += 1
        return slot, self.codec.action(data, wire.HEAD_BYTES)

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def _write(self, frame: bytes) -> None:
        import grpc

        try:
            await self._call.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise ConnectionError(f"{self._address}: the stream ended") from error

    def _gone(self, code: Any, details: str | None) -> Exception:
        """How a stream's end is told: as a refusal where trying again won't help."""
        import grpc

        fatal = code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
        return (WireError if fatal else ConnectionError)(f"{self._address}: {details or 'the stream ended'}")

    async def _read(self) -> bytes:
        """The next frame. WireError with the server's reason where it refuses; ConnectionError where it is gone."""
        import grpc

        try:
            data = await self._call.read()
        except grpc.RpcError as error:
            raise self._gone(error.code(), error.details()) from error
        if data is grpc.aio.EOF:
            raise ConnectionError(f"{self._address}: the stream ended")
        if wire.kind(data) == wire.REFUSE:
            kind = ConnectionError if wire.read(data, self.codec.most).step else WireError
            raise kind(f"{self._address} refuses: {wire.text(data)}")
        return data
