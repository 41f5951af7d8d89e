"""Cost of strangers' connections to each port that listens during training: `python -m benchmarks.connections`.

    python -m benchmarks.connections [--port publish tls serve shm central launch board] [--count 5000] [--rate 250]
                                     [--turns 5] [--control] [--json FILE]

For each port one CartPole run trains, with a follower of its versions where it serves any. In turns there are a quiet
time and an attack from this machine alone: `--count` connections in all, `--rate` a second, that are idle, slow (one
byte a second), lie (noise, another protocol, a meaningless frame), or mute: they do all that the protocol asks of a
newcomer, with the right token, half of them bind as receivers, and then nothing. All are kept open as long as the
server lets them. A figure gives agent steps a second and a CPU-second of the run under the attack and in the quiet
times around it (medians of the turns), the versions that arrived, the descriptors of the process that listens, and the
memory of all processes. `loss` counts the processor's time that the attacker takes, too (`attacker_cpu_share`, of all
processors that this program may use); `cpu_loss` is what the training itself spends; `listening_cpu` are the
CPU-seconds a second of a server that does not train. At the end SIGTERM stops the run, which must have lost no save.

With `--control` each attack is followed by the same one on a listener of this program that never accepts: the system
answers alone. `loss_to_control` compares the run's speed under both, so it is what the port adds, and not what the
attacker takes from the processors that both use. A mute connection of a protocol that needs answers has no control.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import select
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import results
from longhaul.runtime import credentials, descriptors
from longhaul.runtime.gloo_listener import MEETING
from longhaul.weight_sync.protocol import NOTHING
from longhaul.weight_sync.receiver import Receiver, follow
from longhaul.weight_sync.transports.shared_memory import SharedCollection
from longhaul.weight_sync.transports.sockets import SocketSource
from longhaul.weight_sync.transports.tcp import TcpCollection

ROOT = Path(__file__).resolve().parent.parent

PORTS = ("publish", "tls", "serve", "shm", "central", "launch", "board")
KINDS = ("idle", "slow", "lying", "mute")

TRAIN = ("train", "cartpole", "--seed", "3", "--total-steps", str(10**11), "--save-interval-minutes", "0.1",
         "--log-interval", "20")  # fmt: skip

CENTRAL = ("--topology", "central", "--lane", "grpc", "--actors", "2", "--num-envs", "64", "--num-steps", "64")

LIES = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # as TLS begins
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
    b"LHS1" + bytes(38) + b"\x10\x00{}",  # a frame of the weights' server, and of no meaning
)

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""Bytes that a slow connection sends one by one, and all that HTTP/2 asks of a client."""

PLAIN = ("central", "board")
"""Ports whose mute connections send all that is asked of them, and wait for no answer."""

TOKEN = "a token of more than sixteen letters"

Address = tuple[str, int] | str


class Target(NamedTuple):
    """A training run, the process that listens, and where."""

    folder: Path
    training: psutil.Process
    listening: psutil.Process
    address: Address
    follower: Receiver | None


class Reading(NamedTuple):
    """State of a run at one time."""

    when: float
    steps: int
    version: int
    open: int  # descriptors of the process that listens
    memory: int  # bytes of the run's processes
    cpu: float  # seconds of the training's processes
    server_cpu: float  # seconds of a process that listens and does not train
    own_cpu: float  # seconds of this process


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--port", nargs="+", choices=PORTS, default=PORTS)
    parser.add_argument("--count", type=int, default=5000, help="connections of each kind")
    parser.add_argument("--rate", type=float, default=250.0, help="connections a second")
    parser.add_argument("--turns", type=int, default=5, help="attacks into which the connections are divided")
    parser.add_argument(
        "--quiet", type=float, default=5.0, help="seconds without connections, before and after each attack"
    )
    parser.add_argument("--control", action="store_true", help="attack a listener that never accepts, too, in turn")
    args = parser.parse_args()
    descriptors.raise_limit()
    needed = args.count + 256
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < needed:
        raise SystemExit(f"--count {args.count} needs {needed} descriptors; raise `ulimit -Hn`, or give fewer")
    if args.control and args.count // args.turns > (most := int(Path("/proc/sys/net/core/somaxconn").read_text())):
        raise SystemExit(
            f"--control holds at most {most} connections (net.core.somaxconn), and a turn has "
            f"{args.count // args.turns}: give more --turns"
        )
    for port in args.port:
        for figure in measure(port, args.count, args.rate, args.quiet, args.turns, args.control):
            results.emit({"name": "connections", "port": port, **figure}, args.json)


def measure(port: str, count: int, rate: float, quiet: float, turns: int, control: bool) -> Iterator[dict[str, Any]]:
    """Figures of one port: one a kind of connection, and one of the run's end."""
    with tempfile.TemporaryDirectory() as home, (Path(home) / "log").open("wb") as log:
        with running(port, Path(home), log) as target:
            before = window(target, rest(quiet))
            for kind in KINDS:
                if (port, kind) == ("launch", "mute"):  # Gloo asks nothing of who connects
                    continue
                begin = greeter(port, target.address) if kind == "mute" else None
                still, under, deaf = [before], [], list[Window]()
                has_control = control and (kind != "mute" or port in PLAIN)
                for _ in range(turns):
                    under.append(window(target, attack(kind, target.address, count // turns, rate, begin)))
                    still.append(window(target, rest(quiet)))
                    if has_control:
                        with listener() as address:
                            deaf.append(window(target, attack(kind, address, count // turns, rate, begin)))
                        rested(quiet)
                yield {"kind": kind, "connections": count // turns * turns} | compared(still, under, deaf)
                before = still[-1]
            target.training.send_signal(signal.SIGTERM)
            code = target.training.wait(120)
        lines = Path(log.name).read_text()
        saves = sorted(int(path.name) for path in (target.folder / "checkpoints").iterdir() if path.name.isdigit())
        lost = len(re.findall(r"cannot save|until then it trains on", lines))
        yield {"kind": "end", "exit_code": code, "newest_save": saves[-1], "saves_lost": lost}


@contextmanager
def running(port: str, home: Path, log: Any, prefix: Sequence[str] = ()) -> Iterator[Target]:
    """A run that trains, saves and listens; `prefix` is a program that starts its processes, under limits."""
    folder = home / port
    words = [*TRAIN, "--runs-dir", str(home), "--run-name", port]
    secret, path = home / "token", str(home / "socket")
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    more = {
        "publish": ("--publish", "tcp:127.0.0.1:0", "--publish-every", "100", "--publish-token-file", str(secret)),
        "tls": ("--publish", "tls:127.0.0.1:0", "--publish-every", "100", "--publish-token-file", str(secret)),
        "shm": ("--publish", f"shm:{path}", "--publish-every", "100"),
        "board": (),
        "serve": ("--publish", "run", "--publish-every", "100"),
        "central": CENTRAL,
        "launch": (),
    }
    command = [*words, *more[port]]
    if port == "launch":
        command = ["launch", "--hosts", "2", "--", *command, "--mesh", "data=2"]
    with ExitStack() as ends:
        if port == "tls":
            ends.enter_context(certified(home))
        training = started(ends, log, *command, prefix=prefix)
        await_(lambda: steps(folder) > 0 and (folder / "checkpoints").is_dir(), log)
        listening = training
        if port == "serve":
            listening = started(ends, log, "sync", "serve", str(folder / "weights"), "--port", "0", prefix=prefix)
        if port == "board":
            listening = started(ends, log, "board", str(home), "--port", "0", prefix=prefix)
        process, follower = training, None
        address: Address = path
        if port != "shm":
            await_(lambda: bool(listeners(listening)), log)
            process, address = listeners(listening)[0]
        if port in ("publish", "tls", "serve", "shm"):
            kind = "tls" if port == "tls" else "tcp"
            where = f"shm:{path}" if port == "shm" else f"{kind}:{address[0]}:{address[1]}"
            token = TOKEN if port in ("publish", "tls") else None
            if port == "tls":
                os.environ["LONGHAUL_TLS_CA"] = str(home / "cert.pem")
            follower = ends.enter_context(closing(follow([where], token=token)))
            await_(lambda: follower.held.version >= 0, log)
        time.sleep(MEETING + 5.0 if port == "launch" else 5.0)  # what is made once is made
        yield Target(folder, training, process, address, follower)


@contextmanager
def certified(home: Path) -> Iterator[None]:
    """A certificate for this machine, which the environment names."""
    pair = credentials.self_signed("127.0.0.1")
    assert pair.certificate is not None and pair.key is not None
    cert, key = home / "cert.pem", home / "key.pem"
    cert.write_bytes(pair.certificate)
    key.write_bytes(pair.key)
    served = {"LONGHAUL_TLS_CERT": str(cert), "LONGHAUL_TLS_KEY": str(key)}
    before = dict(os.environ)
    os.environ.update(served | {"LONGHAUL_TLS_CA": ""})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def started(ends: ExitStack, log: Any, *words: str, prefix: Sequence[str] = ()) -> psutil.Process:
    process = subprocess.Popen([*prefix, sys.executable, "-m", "longhaul", *words], cwd=ROOT, stdout=log, stderr=log)

    def end() -> None:
        process.terminate()
        process.wait()

    ends.callback(end)
    return psutil.Process(process.pid)


def listeners(process: psutil.Process) -> list[tuple[psutil.Process, tuple[str, int]]]:
    """Ports on which a process, or one of its children, listens."""
    pairs = []
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            for connection in each.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    host = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}.get(connection.laddr.ip, connection.laddr.ip)
                    pairs.append((each, (host.removeprefix("::ffff:"), connection.laddr.port)))
    return pairs


def await_(ready: Callable[[], bool], log: Any, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise SystemExit(f"nothing happened for long:\n{Path(log.name).read_text()[-2000:]}")
        time.sleep(0.1)


def steps(folder: Path) -> int:
    """Agent steps of the newest record."""
    with suppress(OSError, ValueError, IndexError), (folder / "metrics.jsonl").open("rb") as records:
        records.seek(max(0, records.seek(0, 2) - 20_000))
        return int(json.loads(records.read().splitlines()[-1])["agent_steps"])
    return 0


def reading(target: Target) -> Reading:
    count = steps(target.folder)
    while steps(target.folder) == count:  # from one record to the next: windows begin and end at one
        time.sleep(0.002)
    memory, cpu, server_cpu = 0, 0.0, 0.0
    training = {target.training, *target.training.children(recursive=True)}
    for process in training | {target.listening}:
        with suppress(psutil.Error):
            memory += process.memory_info().rss
            spent = sum(process.cpu_times()[:2])
            cpu, server_cpu = (cpu + spent, server_cpu) if process in training else (cpu, server_cpu + spent)
    version = -1 if target.follower is None else target.follower.held.version
    now, own = time.monotonic(), time.process_time()
    return Reading(now, steps(target.folder), version, target.listening.num_fds(), memory, cpu, server_cpu, own)


class Window(NamedTuple):
    begin: Reading
    end: Reading
    most: int  # descriptors at any time

    @property
    def per_second(self) -> float:
        return (self.end.steps - self.begin.steps) / (self.end.when - self.begin.when)

    @property
    def per_cpu_second(self) -> float:
        return (self.end.steps - self.begin.steps) / (self.end.cpu - self.begin.cpu)


def window(target: Target, meanwhile: Iterable[Any]) -> Window:
    """Readings before and after what is done meanwhile, which yields now and then."""
    begin, most = reading(target), 0
    for _ in meanwhile:
        most = max(most, target.listening.num_fds())
    return Window(begin, reading(target), most)


@contextmanager
def listener() -> Iterator[tuple[str, int]]:
    """Address of a socket whose connections the system takes and nobody accepts."""
    with socket.create_server(("127.0.0.1", 0), backlog=1 << 16) as sock:
        yield sock.getsockname()


def rested(seconds: float) -> None:
    for _ in rest(seconds):
        pass


def rest(seconds: float) -> Iterator[None]:
    for _ in range(max(1, round(2 * seconds))):
        time.sleep(0.5)
        yield None


def compared(quiet: Sequence[Window], under: Sequence[Window], deaf: Sequence[Window] = ()) -> dict[str, Any]:
    """Figures of attacks, each between two quiet times and, with a control, before one on a deaf listener."""

    def losses(rate: Callable[[Window], float]) -> list[float]:
        around = [(rate(before) + rate(after)) / 2 for before, after in pairwise(quiet)]
        return [round(1.0 - rate(each) / usual, 4) for each, usual in zip(under, around, strict=True)]

    def a_second(quantity: Callable[[Reading], float]) -> float:
        return sum(quantity(each.end) - quantity(each.begin) for each in under) / seconds

    first, last, seconds = under[0].begin, under[-1].end, sum(each.end.when - each.begin.when for each in under)
    loss, cpu_loss = losses(lambda each: each.per_second), losses(lambda each: each.per_cpu_second)
    served = {} if last.version < 0 else {"newest_version": [first.version, last.version]}
    if deaf:
        added = [round(1.0 - each.per_second / other.per_second, 4) for each, other in zip(under, deaf, strict=True)]
        served |= {"loss_to_control": statistics.median(added), "losses_to_control": added}
    return {
        "seconds": round(seconds, 1),
        "per_second": round(a_second(lambda each: each.steps)),
        "quiet_per_second": [round(each.per_second) for each in quiet],
        "loss": statistics.median(loss),
        "losses": loss,
        "attacker_cpu_share": round(a_second(lambda each: each.own_cpu) / len(os.sched_getaffinity(0)), 4),
        "cpu_loss": statistics.median(cpu_loss),
        "cpu_losses": cpu_loss,
        "listening_cpu": round(a_second(lambda each: each.server_cpu), 4),
        **served,
        "descriptors": [first.open, max(each.most for each in under), quiet[-1].end.open],
        "memory_mb": [round(each.memory / 2**20) for each in (first, last, quiet[-1].end)],
    }


def greeter(port: str, address: Address) -> Callable[[int, socket.socket], Any]:
    """Function that does for the newcomer of a number all that a port asks of one."""

    def http(number: int, sock: socket.socket) -> None:
        plain = b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        sock.send(plain if port == "board" else GREETING + bytes([0, 0, 0, 4, 1, 0, 0, 0, 0]))

    def weights(number: int, sock: socket.socket) -> SocketSource | None:
        collection = SharedCollection() if port == "shm" else TcpCollection()
        source = SocketSource(sock, TOKEN if port == "publish" else None, f"mute-{number}", collection)
        if number % 2:
            source.bind(NOTHING, 10.0)
        return source

    def tls(number: int, sock: socket.socket) -> ssl.SSLSocket:
        return ssl.create_default_context(cafile=os.environ["LONGHAUL_TLS_CA"]).wrap_socket(
            sock, server_hostname="127.0.0.1"
        )

    if port == "tls":
        return tls
    return weights if port in ("publish", "serve", "shm") else http


def attack(
    kind: str, address: Address, count: int, rate: float, begin: Callable[[int, socket.socket], Any] | None = None
) -> Iterator[int]:
    """Opens connections to `address`, which must be of this machine; yields their number each half second.

    `begin` is called with each new connection, and its number.
    """
    if not isinstance(address, str) and not address[0].startswith("127."):
        raise ValueError(f"{address[0]} is another machine; connections are made on this one alone")
    draw, began = random.Random(0), time.monotonic()
    held: dict[int, tuple[socket.socket, Any]] = {}
    poll, sent, noted = select.poll(), 0, began
    try:
        for number in range(count):
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
            if (connection := opened(address, None if begin is None else partial(begin, number))) is not None:
                held[connection[0].fileno()] = connection
                poll.register(connection[0], select.POLLIN | select.POLLOUT if kind == "lying" else select.POLLIN)
            for descriptor, events in poll.poll(0):
                other = held[descriptor][0]
                try:
                    if events & select.POLLOUT:  # connected: it lies once
                        poll.modify(other, select.POLLIN)
                        other.send(draw.choice(LIES) if draw.random() < 0.8 else draw.randbytes(200))
                    if events & ~select.POLLOUT and not other.recv(4096):
                        raise ConnectionResetError
                except (BlockingIOError, ssl.SSLWantReadError):
                    pass
                except OSError:  # the server has ended it
                    poll.unregister(other)
                    held.pop(descriptor)[0].close()
            if time.monotonic() - noted > 0.5:
                noted = time.monotonic()
                yield len(held)
            if kind == "slow" and time.monotonic() - began > sent + 1:
                for other, _ in held.values():
                    with suppress(OSError):
                        other.send(GREETING[sent % len(GREETING) :][:1])
                sent += 1
    finally:
        for sock, _ in held.values():
            sock.close()


def opened(address: Address, begin: Callable[[socket.socket], Any] | None) -> tuple[socket.socket, Any] | None:
    """A new connection, and what was made of it; None where it is refused."""
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    begun = None
    try:
        sock.settimeout(2.0 if begin is not None or isinstance(address, str) else 0.0)
        with suppress(BlockingIOError):
            sock.connect(address)
        begun = None if begin is None else begin(sock)
        sock = begun if isinstance(begun, socket.socket) else sock  # TLS takes its place
        sock.setblocking(False)
    except OSError:
        sock.close()
        return None
    return sock, begun


if __name__ == "__main__":
    main()
