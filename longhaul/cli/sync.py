"""Commands of `longhaul sync`: versions of parameters served, fetched, inspected and measured. Starts without JAX."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from longhaul.cli import flags, tables
from longhaul.cli.flags import DEBUG, FLOAT, INT, OUTPUT, PATH, TEXT, Flag, FlagError, choice
from longhaul.runtime import credentials
from longhaul.weight_sync import model_shapes, transports
from longhaul.weight_sync.relay import Relay
from longhaul.weight_sync.transports.base import Source
from longhaul.weight_sync.transports.folder import FolderTransport
from longhaul.weight_sync.transports.safetensors_files import folder_name, read_manifest

FAILED = 1

LOOK = 0.2
"""Seconds between two checks of whether a server can serve at all."""

CHECKPOINTS = "checkpoints"
"""Kind of address that only these commands know: the folder of a run without versions."""

WHERE = "the sender: tcp:HOST:PORT, shm:NAME, a folder of versions or of a run"

TOKEN = Flag("token-file", flags.optional(PATH), None, "file with the token that both sides know", shown="")


def serve(words: Sequence[str]) -> int:
    """`longhaul sync serve SOURCE --port N`."""
    source = Flag("SOURCE", TEXT, None, "a folder of versions or of a run, or the address of another server", shown="")
    port = Flag("port", INT, 7171, "TCP port; 0 takes a free one")
    host = Flag("host", TEXT, "127.0.0.1", "address to listen at; beyond this machine it needs --token-file")
    name = Flag("shm", TEXT, None, "also serve processes of this machine: a socket's path, or @NAME", shown="")
    about = "Serves a folder's versions, or relays another server's, to any number of receivers, until it is stopped."
    given = flags.parse("sync serve", about, {"": [source, port, host, name, TOKEN, DEBUG]}, words).values
    if given["SOURCE"] is None:
        raise FlagError("a source is missing: longhaul sync serve FOLDER --port N, or an address, as tcp:HOST:PORT")

    token = _token(given["token-file"])
    source_address = _address(given["SOURCE"])
    host_name = f"[{given['host']}]" if ":" in given["host"] else given["host"]
    opened = [transports.serve(f"tcp:{host_name}:{given['port']}", token)]
    if given["shm"] is not None:
        opened.append(transports.serve(f"shm:{given['shm']}"))

    def say(version: int) -> None:
        print(f"version {version} is served", file=sys.stderr, flush=True)

    with (
        _stopped() as stop,
        Relay(lambda: _connect(source_address, token, "relay"), transports=opened, on_commit=say) as relay,
    ):
        for transport in opened:
            print(transport.address, flush=True)
        while not stop.wait(LOOK):
            if relay.failed is not None:
                return _failed(str(relay.failed))
    return 0


def pull(words: Sequence[str]) -> int:
    """`longhaul sync pull ADDRESS --out FOLDER`."""
    address = Flag("ADDRESS", TEXT, None, WHERE, shown="")
    out = Flag("out", PATH, None, "folder for versions, in Hugging Face's naming", shown="")
    seconds = Flag("timeout", FLOAT, 60.0, "seconds to wait for a version")
    follow = Flag("follow", flags.ALONE, False, "fetch each newer version too, until stopped")
    keep = Flag("keep", INT, 3, "versions that are kept in the folder")
    about = "Fetches the newest version, verified, as safetensors files: FOLDER/version-EPOCH-VERSION."
    given = flags.parse("sync pull", about, {"": [address, out, seconds, follow, keep, TOKEN, DEBUG]}, words).values
    if given["ADDRESS"] is None or given["out"] is None:
        raise FlagError("ADDRESS or --out is missing: longhaul sync pull ADDRESS --out FOLDER")
    if given["keep"] < 1 or not given["timeout"] > 0:
        raise FlagError(f"--keep {given['keep']} must be at least 1, --timeout {given['timeout']} above 0")

    where, token = _address(given["ADDRESS"]), _token(given["token-file"])
    _writable(given["out"])
    folder = FolderTransport(given["out"], keep=given["keep"])
    with _stopped() as stop, Relay(lambda: _connect(where, token, "pull"), transports=[folder]) as relay:
        shown = None
        while not stop.is_set():

            def settled(shown: Path | None = shown) -> bool:
                return relay.failed is not None or _fetched(relay, folder) not in (None, shown)

            if not _until(settled, stop, given["timeout"]):
                if stop.is_set() or (given["follow"] and shown is not None):
                    continue
                why = "; ".join([*relay.receiver.errors, *folder.errors][-1:])
                return _failed(f"no version came from {where} in {given['timeout']:g} s{why and ': '}{why}")
            if relay.failed is not None:
                return _failed(f"{given['out']} can't take what {where} serves: {relay.failed}")
            shown = _fetched(relay, folder)
            print(shown, flush=True)
            if not given["follow"]:
                break
    return 0


def _writable(out: str) -> None:
    """Raises FlagError where a folder can't be written; makes it if needed."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise FlagError(f"--out is {out}; it must be a writable folder: {error.strerror}") from error


def _fetched(relay: Relay, folder: FolderTransport) -> Path | None:
    """Folder of the version that the relay serves; None where it is not complete there."""
    held, latest = relay.receiver.held, folder.latest
    if latest is None or latest.name != folder_name(held.epoch, held.version):
        return None
    try:
        return latest if read_manifest(latest).root == held.root else None  # another run may use the same name
    except (OSError, ValueError):  # a later one has taken its place
        return None


def _failed(line: str) -> int:
    print(f"longhaul: error: {tables.clean(line)}", file=sys.stderr, flush=True)
    return FAILED


def status(words: Sequence[str]) -> int:
    """`longhaul sync status ADDRESS`."""
    address = Flag("ADDRESS", TEXT, None, WHERE, shown="")
    out = Flag("json", OUTPUT, None, "write it to this file; - is stdout", shown="")
    about = "Prints the version that a sender serves, and its receivers."
    given = flags.parse("sync status", about, {"": [address, out, TOKEN, DEBUG]}, words).values
    if given["ADDRESS"] is None:
        raise FlagError("ADDRESS is missing: longhaul sync status ADDRESS")

    where, token = _address(given["ADDRESS"]), _token(given["token-file"])
    kind, _, path = where.partition(":")
    if kind == "folder" and not Path(path).is_dir():
        return _failed(f"there is no folder {path}, so nothing was published there yet")
    try:
        source = _connect(where, token, "status")
    except PermissionError:  # a wrong token: the error says so
        raise
    except OSError as error:
        return _failed(f"nobody answers at {where}: {error.strerror or error}; is it served there?")
    try:
        state = source.status()
    finally:
        source.close()
    if given["json"] is not None:
        tables.write_json(given["json"], state)
    if given["json"] != "-":
        about_it = (
            f"version {state['version']} of epoch {state['epoch']}" if state["version"] >= 0 else "no version yet"
        )
        print(tables.clean(f"run {state['run'] or 'unknown'}: {about_it}, {state['image_bytes']:,} bytes"))
        names = ("name", "version", "phase", "target", "failures")
        if state["receivers"]:
            tables.table(names, [[tables.clean(str(each[name])) for name in names] for each in state["receivers"]])
        for name, why in state.get("dropped", []):
            print(tables.clean(f"dropped {name}: {why}"))
    return 0


def bench(words: Sequence[str]) -> int:
    """`longhaul sync bench`: `longhaul bench sync` with flags of its own."""
    model = Flag("model", TEXT, "qwen3-0.6b", "model whose parameters are sent, by its name")
    receivers = Flag("receivers", INT, 2, "processes that receive")
    lane = Flag("lane", choice(("shm", "tcp", "folder")), (), "a figure for each", True, "shm, tcp")
    repeats = Flag("repeats", INT, 5, "repeats, of which medians are reported; at least 5")
    rate = Flag(
        "learning-rate", FLOAT, None, "versions are one step of Adam at this rate apart, and tcp sends the changes",
        shown="all of a version",
    )  # fmt: skip
    layouts = Flag(
        "layouts",
        TEXT,
        (),
        "instead: planning from one layout to another, as fsdp:8 tp:2x4, by shapes alone",
        True,
        "",
    )
    peers = Flag(
        "peers", flags.ALONE, False, "instead: sockets, gRPC, Orbax and others beside ours, in a clone of the project"
    )
    out = Flag("json", OUTPUT, None, "write the figures as a list to this file, too", shown="")
    about = "Measures a version from one process to others, by stages, beside the limits of memory and sockets."
    groups = {"": [model, receivers, lane, repeats, rate, layouts, peers, out, DEBUG]}
    given = flags.parse("sync bench", about, groups, words).values
    if given["receivers"] < 1:
        raise FlagError(f"--receivers is {given['receivers']}; at least 1")

    model_shapes.forms(given["model"])
    if given["peers"]:
        return _peers(given)

    sizes = {name: given[name] for name in ("model", "receivers", "lane", "repeats") if given[name] not in ((), [])}
    figures = []
    for figure in _figures(sizes, given):
        figures.append(figure)
        tables.write_line(figure)
    if given["json"] not in (None, "-"):
        tables.write_json(given["json"], figures)
    return 0


def _peers(given: Mapping[str, Any]) -> int:
    """Exit code of `python -m benchmarks.peers.sync`, which only a clone of the project has."""
    clone = Path(__file__).resolve().parents[2]
    if not (clone / "benchmarks/peers/sync.py").is_file():
        raise FlagError(
            "--peers runs benchmarks/peers/sync.py, which no installation has; run it in a clone of the project"
        )
    if given["lane"] or given["layouts"] or given["learning-rate"] is not None:
        raise FlagError("--peers has transports of its own; leave --lane, --layouts and --learning-rate out")
    words = ["--model", given["model"], "--repeats", str(given["repeats"])]
    words += [] if given["json"] in (None, "-") else ["--json", str(Path(given["json"]).absolute())]
    return subprocess.run([sys.executable, "-m", "benchmarks.peers.sync", *words], cwd=clone, check=False).returncode


def _figures(sizes: dict[str, Any], given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    rate, layouts = given["learning-rate"], tuple(given["layouts"])
    if rate is not None and not 0.0 < rate < 1.0:
        raise FlagError(f"--learning-rate is {rate:g}; it must lie above 0 and below 1")
    if layouts:
        if len(layouts) != 2 or rate is not None or given["lane"]:
            raise FlagError("--layouts takes two, of trainers and receivers, without --lane and --learning-rate")
        from longhaul.bench.cases import sync

        return sync.layouts(given["model"], *layouts)
    if rate is not None:
        if any(lane != "tcp" for lane in given["lane"]):
            raise FlagError("--learning-rate needs --lane tcp, which alone sends changes; leave --lane out")
        sizes |= {"lane": ("tcp",), "learning_rate": rate}
    from longhaul.bench import harness

    return harness.run("sync", **sizes)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"serve": serve, "pull": pull, "status": status, "bench": bench}


def _address(words: str) -> str:
    """An address; a folder is one, too, and so is HOST:PORT."""
    if words.partition(":")[0] in transports.KINDS:
        transports.split(words)
        return words
    path = Path(words)
    if path.is_dir():
        if not (path / "run.json").exists():
            return f"folder:{path}"
        if (path / "weights").is_dir():
            return f"folder:{path / 'weights'}"
        if not any(path.glob("checkpoints/*/manifest.json")):
            raise FlagError(f"{words} is a run without checkpoints yet, and with no versions in {path / 'weights'}")
        return f"{CHECKPOINTS}:{path}"
    if ":" in words:
        with suppress(ValueError):
            credentials.split(words)
            return f"tcp:{words}"
        transports.split(words)  # which says what there is
    raise FlagError(f"{words}: neither a folder nor an address; write tcp:HOST:PORT, shm:NAME or folder:PATH")


def _connect(address: str, token: str | None, name: str) -> Source:
    """Receiver's end of the transport at an address, or of a run's checkpoints."""
    kind, _, rest = address.partition(":")
    if kind == CHECKPOINTS:
        from longhaul.training.checkpoint.weight_source import CheckpointSource

        return CheckpointSource(rest)
    return transports.connect(address, token, name)


def _token(path: str | None) -> str | None:
    return credentials.load(token_file=path).token


@contextmanager
def _stopped() -> Iterator[threading.Event]:
    """Event that Ctrl-C and SIGTERM set."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only that thread gets signals
        yield stop
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _until(what: Callable[[], bool], stop: threading.Event, seconds: float) -> bool:
    """True once `what` holds; False after `seconds`, or when stopped."""
    for _ in range(max(1, int(seconds / 0.05))):
        if what():
            return True
        if stop.wait(0.05):
            return False
    return what()
