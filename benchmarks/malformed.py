"""Malformed requests and frames to every port: `python -m benchmarks.malformed [--port NAME...] [--count 100000]`.

    serve      HTTP of `longhaul serve`, of a small language model
    board      HTTP of `longhaul board`
    publish    frames of a run's versions (TCP)
    central    HTTP/2 and frames of central inference (gRPC)
    sharded    frames of a coordinator of sharded transfers, and of a receiver

Each connection sends one request or frame: sound ones that were damaged in one of several ways, or bodies that are
whole and mean nothing. Most then end their side. Those that keep it must be closed within `DEADLINE`. A figure counts
them, those that were sent anything (`answered`), those that were not answered nor closed in time (`late`), refused
statuses by number, and the process's memory before the first one and after each tenth, its descriptors and threads
after the first and the last tenth. After the last one a sound client must be served.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks import connections, results
from longhaul.topologies.inference_server import grpc_transport
from longhaul.weight_sync.receiver import follow
from longhaul.weight_sync.sharded import HEAD
from tests.helpers import malformed_frames, small_chat

PORTS = ("serve", "board", "publish", "central", "sharded")

DEADLINE = 40.0
"""Seconds within which a connection that says nothing more must be closed; the longest promise is 20."""

HELD = 0.002
"""Share of connections that keep their side open."""

ROOT = Path(__file__).resolve().parent.parent

SHARDED = """
import sys, time
from longhaul.weight_sync import resharding
from longhaul.weight_sync.sharded import Coordinator, Receiver, Sender
import numpy as np
layout = resharding.replicated({"a": ((4,), "float32")}, 1)
head = Coordinator("127.0.0.1:0", layout, layout)
tail = Receiver(head.address, 0, layout, layout)
print(head.address.split(":")[1], tail._listener.getsockname()[1], flush=True)
version = 0
for line in sys.stdin:
    version += 1
    outcome = Sender(head.address, 0, layout, layout).push(version, {"a": np.full(4, version, np.float32)})
    print(outcome.committed and tail.latest()[0] == version, flush=True)
"""


class Listener(NamedTuple):
    """A process that listens, where, what is sound there, and a check that it still serves."""

    process: psutil.Process
    ports: Sequence[int]
    made: Callable[[random.Random], bytes]
    serves: Callable[[], bool]


# ------------------------------------------------------------------------------------------------------------- payloads


def damaged(draw: random.Random, data: bytes) -> bytes:
    """Bytes that are not `data`, in one of several ways."""
    mutated, at = bytearray(data), draw.randrange(len(data))
    match draw.randrange(7):
        case 0:
            mutated[at] ^= 1 << draw.randrange(8)
        case 1:
            del mutated[at:]
        case 2:
            mutated[at:at] = draw.randbytes(draw.randrange(1, 64))
        case 3:
            end = min(len(mutated), at + draw.randrange(1, 32))
            mutated[at:at] = mutated[at:end] * draw.randrange(1, 9)
        case 4:
            mutated[at : at + 8] = draw.choice((b"\xff" * 8, bytes(8), b"9" * 40, b"\r\n\r\n", b"-1"))
        case 5:
            for _ in range(draw.randrange(2, 20)):
                mutated[draw.randrange(len(mutated))] = draw.randrange(256)
        case 6:
            mutated = bytearray(draw.randbytes(draw.randrange(1, 400)))
    return bytes(mutated)


ODD = (
    None, True, -1, 0, 1e308, -1e-308, 2**63, 10**400, "", "x" * 3000, "\ud800", "\0", [], [[]], {}, {"a": {}},
    [1, "x", None], [[[[]]]], float("nan"), float("inf"), "1" * 500, [2**31] * 4, ["a"] * 200, {"role": "user"},
    [{"role": "x", "content": 1}],
)  # fmt: skip
"""Values that few fields may have."""


def odd_body(draw: random.Random, sound: dict[str, Any]) -> bytes:
    """A document in which some fields have other values, are missing, or unknown."""
    body: dict[str, Any] = dict(sound)
    for _ in range(draw.randrange(1, 4)):
        name = draw.choice([*sound, "unknown", "stream", "n", "stop", "seed", "logprobs", "model"])
        if draw.random() < 0.2:
            body.pop(name, None)
        else:
            body[name] = draw.choice(ODD)
    text = json.dumps(body).encode()
    if draw.random() < 0.1:
        text = draw.choice((b"[" * 3000, b'{"a":' * 500, b"1" * 6000, text * 3, text[:-1], b"\xff" + text, b""))
    return text


def http(draw: random.Random, requests: Sequence[tuple[str, dict[str, Any] | None]]) -> bytes:
    target, sound = draw.choice(requests)
    whole = draw.random() < 0.5
    body = b"" if sound is None else odd_body(draw, sound) if whole else json.dumps(sound).encode()
    length = draw.choice((str(len(body)), "-1", "9" * 30, "5", "x")) if draw.random() < 0.1 else str(len(body))
    kind = "text/plain" if draw.random() < 0.02 else "application/json"
    head = f"{target} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n"
    data = head.encode() + body
    return data if whole else damaged(draw, data)


def frame(kind: int, stream: int, flags: int, data: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


def header(name: str, value: str) -> bytes:
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def grpc(draw: random.Random, rng: np.random.Generator) -> bytes:
    """A call of central inference with frames that are malformed, or damaged as a whole."""
    names = {":method": "POST", ":scheme": "http", ":path": grpc_transport.PATH, ":authority": "x", "te": "trailers",
             "content-type": "application/grpc"}  # fmt: skip
    data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    data += frame(1, 1, 4, b"".join(header(*pair) for pair in names.items()))
    for _ in range(draw.randrange(1, 3)):
        if draw.random() < 0.5:
            head, payload = malformed_frames.observe(rng, 0, 0, 0)
            payload = malformed_frames.malformed(rng, head, payload)
        else:
            payload = damaged(draw, malformed_frames.hello(draw.randrange(4)))
        data += frame(0, 1, 0, b"\x00" + len(payload).to_bytes(4, "big") + payload)
    return data if draw.random() < 0.5 else damaged(draw, data)


WORDS = [b'{"kind":"hello","nonce":"00","proof":"00"}', b'{"kind":"bind","name":"x","run":"","epoch":-1,"version":-1}',
         b'{"kind":"ask","wait":1e999}', b"[" * 500, b'{"kind":"status"}']  # fmt: skip


def sync_frame(draw: random.Random) -> bytes:
    """A frame of the weights' protocol."""
    from longhaul.weight_sync.transports import sockets

    text = draw.choice(WORDS)
    digest = sockets._check(0, 0, text, b"", b"") if draw.random() < 0.8 else draw.getrandbits(64)
    data = sockets.HEAD.pack(sockets.MAGIC, 0, 0, digest, 0, len(text)) + text
    return data if draw.random() < 0.3 else damaged(draw, data)


def sharded_frame(draw: random.Random) -> bytes:
    if draw.random() < 0.5:
        return sync_frame(draw)
    data = HEAD.pack(b"LHR1", draw.choice((b"s", b"?", b"x")), draw.randbytes(16), draw.randrange(-5, 5), 0)
    return data if draw.random() < 0.5 else damaged(draw, data)


# ------------------------------------------------------------------------------------------------------------ listeners


@contextmanager
def listening(port: str, home: Path) -> Iterator[Listener]:
    if port in ("serve", "sharded"):
        with own(port, home) as process:
            yield process
        return
    with (home / "log").open("wb") as log, connections.running(port, home, log) as run:
        rng, address = np.random.default_rng(0), run.address
        assert not isinstance(address, str)
        where = address[1]
        requests = [("GET /api/runs", None), ("GET /api/run/board/curves", None), ("POST /player/board", {}),
                    ("GET /api/compare?run=board&axis=agent_steps", None), ("GET /", None)]  # fmt: skip

        def follows() -> bool:
            with follow([f"tcp:127.0.0.1:{where}"], token=connections.TOKEN) as receiver:
                return receiver.wait(0, 60.0)

        def trains() -> bool:
            before, end = connections.steps(run.folder), time.monotonic() + 60.0
            while connections.steps(run.folder) <= before and time.monotonic() < end:
                time.sleep(0.5)
            return connections.steps(run.folder) > before

        own_bodies = {
            "board": lambda draw: http(draw, requests),
            "publish": sync_frame,
            "central": lambda draw: grpc(draw, rng),
        }

        def trains_and_greets() -> bool:
            return greets(where) and trains()

        serves = {"board": lambda: answers(where, "/api/runs"), "publish": follows, "central": trains_and_greets}
        yield Listener(run.listening, [where], own_bodies[port], serves[port])


@contextmanager
def started(words: Sequence[str], cwd: Path = ROOT) -> Iterator[tuple[psutil.Process, str]]:
    """(process, its first line); it must end well on SIGTERM."""
    process = subprocess.Popen(words, cwd=cwd, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        yield psutil.Process(process.pid), line
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def own(port: str, home: Path) -> Iterator[Listener]:
    """`longhaul serve`, or a coordinator and a receiver of sharded transfers."""
    if port == "serve":
        small_chat.write(home / "model")
        words = [sys.executable, "-m", "longhaul", "serve", str(home / "model"), "--port", "0", "--max-tokens", "8"]
        turns = [{"role": "user", "content": "hi"}]
        requests = [
            ("POST /v1/completions", {"prompt": "hello", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9}),
            ("POST /v1/chat/completions", {"messages": turns, "max_tokens": 2}),
            ("GET /v1/models", None), ("GET /metrics", None),
        ]  # fmt: skip
        with started(words) as (process, line):
            where = int(line.rpartition(":")[2])
            body = {"prompt": "hello", "max_tokens": 4}
            yield Listener(process, [where], lambda draw: http(draw, requests),
                           lambda: answers(where, "/v1/completions", body))  # fmt: skip
        return
    process = subprocess.Popen([sys.executable, "-c", SHARDED], cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE,
                               text=True)  # fmt: skip
    try:
        assert process.stdout is not None and process.stdin is not None
        ports = [int(word) for word in process.stdout.readline().split()]

        def pushes() -> bool:
            assert process.stdout is not None and process.stdin is not None
            process.stdin.write("push\n")
            process.stdin.flush()
            return process.stdout.readline().strip() == "True"

        yield Listener(psutil.Process(process.pid), ports, sharded_frame, pushes)
    finally:
        process.kill()
        process.communicate()


def greets(port: int) -> bool:
    """Flag: who comes anew is answered as HTTP/2 does, within a minute."""
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
            if sock.recv(9):
                return True
        time.sleep(0.5)
    return False


def answers(port: int, path: str, body: Any = None) -> bool:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return bool(reply.status == 200)


# --------------------------------------------------------------------------------------------------------------- storms


class Storm:
    """What many connections met."""

    def __init__(self, listener: Listener, count: int, workers: int, seconds: float) -> None:
        self.listener, self.count, self.workers = listener, count, workers
        self.until = time.monotonic() + seconds
        self.sent = self.late = self.refused = self.answered = 0
        self.slowest = 0.0
        self.statuses: Counter[str] = Counter()
        self.held: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        await asyncio.gather(*(self._worker(number) for number in range(self.workers)))
        await asyncio.gather(*self.held)

    async def _worker(self, number: int) -> None:
        draw = random.Random(number)
        while self.sent < self.count and time.monotonic() < self.until:
            self.sent += 1
            data, port = self.listener.made(draw), draw.choice(self.listener.ports)
            if draw.random() < HELD and len(self.held) < 64:
                task = asyncio.ensure_future(self._one(port, data, ends=False))
                self.held.add(task)
                task.add_done_callback(self.held.discard)
            else:
                await self._one(port, data, ends=True)

    async def _one(self, port: int, data: bytes, *, ends: bool) -> None:
        began = time.monotonic()
        writer = None
        try:
            async with asyncio.timeout(DEADLINE):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                if ends:
                    writer.write_eof()
                first = await reader.read(64)
                self.answered += bool(first)
                if first.startswith(b"HTTP/1.1 "):
                    self.statuses[first[9:12].decode()] += 1
                while first:
                    first = await reader.read(1 << 16)
        except TimeoutError:
            self.late += 1
        except OSError:
            self.refused += 1
        finally:
            if writer is not None:
                writer.close()
                with suppress(OSError, asyncio.CancelledError):
                    await writer.wait_closed()
        if ends:
            self.slowest = max(self.slowest, time.monotonic() - began)


class State(NamedTuple):
    memory: int
    descriptors: int
    threads: int


def state(process: psutil.Process) -> State:
    return State(process.memory_info().rss, process.num_fds(), process.num_threads())


async def stormed(storm: Storm) -> list[State]:
    """States before the first one and after each tenth."""
    states = [state(storm.listener.process)]
    task = asyncio.ensure_future(storm.run())
    while len(states) < 10:
        while storm.sent < storm.count * len(states) / 10 and not task.done():
            await asyncio.sleep(0.05)
        states.append(state(storm.listener.process))
    await task
    await asyncio.sleep(2.0)
    return [*states, state(storm.listener.process)]


def main() -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--port", nargs="+", choices=PORTS, default=PORTS)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="most seconds of a port, whatever was sent")
    parser.add_argument("--workers", type=int, default=24, help="connections at once")
    args = parser.parse_args()
    failed = False
    for port in args.port:
        with tempfile.TemporaryDirectory() as home, listening(port, Path(home)) as listener:
            assert listener.serves()
            storm, began = Storm(listener, args.count, args.workers, args.seconds), time.monotonic()
            states = asyncio.run(stormed(storm))
            serves = listener.process.is_running() and listener.serves()
            record = {
                "name": "malformed", "port": port, "count": storm.sent, "seconds": round(time.monotonic() - began, 1),
                "answered": storm.answered,
                "serves_after": serves, "late": storm.late, "slowest_seconds": round(storm.slowest, 2),
                "reset": storm.refused, "statuses": dict(storm.statuses),
                "memory_mb": [round(each.memory / 2**20, 1) for each in states],
                "descriptors": [each.descriptors for each in (states[1], states[-1])],
                "threads": [each.threads for each in (states[1], states[-1])],
            }  # fmt: skip
            results.emit(record, args.json)
            failed |= not serves or storm.late > 0 or "500" in storm.statuses
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
