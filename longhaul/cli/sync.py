"""Commands of `longhaul sync`: versions of parameters served, fetched, inspected, measured, and their costs planned.

Starts without JAX.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from longhaul.cli import flags, tables
from longhaul.cli.flags import ALONE, DEBUG, FLOAT, INT, OUTPUT, PATH, SWITCH, TEXT, Flag, FlagError, Kind, choice
from longhaul.cli.run_flags import RUNS_DIR
from longhaul.runtime import credentials
from longhaul.runtime.errors import FAILED, FieldError
from longhaul.weight_sync import cost_model, model_shapes, transports
from longhaul.weight_sync.cost_model import Cost, Setting
from longhaul.weight_sync.receiver import SHARE
from longhaul.weight_sync.relay import Relay
from longhaul.weight_sync.transports.base import Source
from longhaul.weight_sync.transports.folder import FolderTransport
from longhaul.weight_sync.transports.safetensors_files import folder_name, read_manifest

LOOK = 0.2
"""Seconds between two checks of whether a server can serve at all."""

CHECKPOINTS = "checkpoints"
"""Kind of address that only these commands know: the folder of a run without versions."""

WHERE = "the sender: tcp:HOST:PORT, shm:NAME, a folder of versions, or a run by its name or folder"

BUDGET = Flag(
    "budget", FLOAT, None, "GB that versions may take in memory, whatever the sender says",
    shown=f"{SHARE:.0%} of this machine's",
)  # fmt: skip

TOKEN = Flag("token-file", flags.optional(PATH), None, "file with the token that both sides know")


def serve(argv: Sequence[str]) -> int:
    """`longhaul sync serve SOURCE --port N`."""
    source = Flag(
        "SOURCE", TEXT, None, "a folder of versions, a run by its name or folder, or another server's address"
    )
    port = Flag("port", INT, 7171, "TCP port; 0 takes a free one", least=0, most=65535)
    host = Flag("host", TEXT, "127.0.0.1", "address to listen at; beyond this machine it needs --token-file")
    name = Flag("shm", TEXT, None, "also serve processes of this machine: a socket's path, or @NAME")
    about = "Serves a folder's versions, or relays another server's, to any number of receivers, until it is stopped."
    known = [source, port, host, name, BUDGET, TOKEN, RUNS_DIR, DEBUG]
    values = flags.parse("sync serve", about, {"": known}, argv).values
    if values["SOURCE"] is None:
        raise FlagError("a source is missing: longhaul sync serve FOLDER --port N, or an address, as tcp:HOST:PORT")

    token = _token(values["token-file"])
    if token is None and not credentials.is_loopback(values["host"]):
        raise FlagError(
            f"--host is {values['host']}, which other machines can reach: give --token-file FILE, or set LONGHAUL_TOKEN"
        )
    source_address = _address(values["SOURCE"], values["runs-dir"])
    host_name = f"[{values['host']}]" if ":" in values["host"] else values["host"]
    opened = [transports.serve(f"tcp:{host_name}:{values['port']}", token)]
    if values["shm"] is not None:
        opened.append(transports.serve(f"shm:{values['shm']}"))

    def say(version: int) -> None:
        tables.progress(f"version {version} is served")

    with (
        _stop_event() as stop,
        Relay(
            lambda: _connect(source_address, token, "relay"), transports=opened, on_commit=say, budget=_budget(values)
        ) as relay,
    ):
        tables.progress(
            f"waits for a version from {tables.clean(source_address)}; addresses are printed once it listens"
        )
        listens = False
        while not stop.wait(LOOK):
            if relay.failed is not None:
                return tables.say(str(relay.failed), FAILED)
            if not listens and relay.publisher is not None:
                listens = True
                for transport in opened:
                    print(transport.address, flush=True)
    return 0


def pull(argv: Sequence[str]) -> int:
    """`longhaul sync pull ADDRESS --out FOLDER`."""
    address = Flag("ADDRESS", TEXT, None, WHERE)
    out = Flag("out", PATH, None, "folder for versions, in Hugging Face's naming")
    seconds = Flag("timeout", FLOAT, 60.0, "seconds to wait for a version")
    follow = Flag("follow", ALONE, False, "fetch each newer version too, until stopped")
    keep = Flag("keep", INT, 3, "versions that are kept in the folder", least=1)
    about = "Fetches the newest version, verified, as safetensors files: FOLDER/version-EPOCH-VERSION."
    known = [address, out, seconds, follow, keep, BUDGET, TOKEN, RUNS_DIR, DEBUG]
    values = flags.parse("sync pull", about, {"": known}, argv).values
    if values["ADDRESS"] is None or values["out"] is None:
        raise FlagError("ADDRESS or --out is missing: longhaul sync pull ADDRESS --out FOLDER")
    if not values["timeout"] > 0:
        raise FlagError(f"--timeout is {values['timeout']:g}; it must be seconds, above 0")

    where, token = _address(values["ADDRESS"], values["runs-dir"]), _token(values["token-file"])
    try:
        Path(values["out"]).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=values["out"]):
            pass
    except OSError as error:
        raise FlagError(f"--out is {values['out']}; it must be a writable folder: {error.strerror}") from error
    folder = FolderTransport(values["out"], keep=values["keep"])
    budget = _budget(values)
    with (
        _stop_event() as stop,
        Relay(lambda: _connect(where, token, "pull"), transports=[folder], budget=budget) as relay,
    ):
        shown = None
        while not stop.is_set():

            def settled(shown: Path | None = shown) -> bool:
                return relay.failed is not None or _fetched_folder(relay, folder) not in (None, shown)

            if not _wait_until(settled, stop, values["timeout"]):
                if stop.is_set() or (values["follow"] and shown is not None):
                    continue
                why = "; ".join([*relay.receiver.errors, *folder.errors][-1:])
                return tables.say(f"no version came from {where} in {values['timeout']:g} s{why and ': '}{why}", FAILED)
            if relay.failed is not None:
                return tables.say(f"{values['out']} can't take what {where} serves: {relay.failed}", FAILED)
            shown = _fetched_folder(relay, folder)
            print(shown, flush=True)
            if not values["follow"]:
                break
    return 0


def _budget(values: Mapping[str, Any]) -> int | None:
    """Bytes of --budget."""
    if values["budget"] is None:
        return None
    if not 0 < values["budget"] < 1e9:
        raise FlagError(f"--budget is {values['budget']:g}; it must be gigabytes, above 0")
    return int(1e9 * values["budget"])


def _fetched_folder(relay: Relay, folder: FolderTransport) -> Path | None:
    """Folder of the version that the relay serves; None where it is not complete there."""
    held, latest = relay.receiver.held, folder.latest
    if latest is None or latest.name != folder_name(held.epoch, held.version):
        return None
    try:
        return latest if read_manifest(latest).root == held.root else None  # another run may use the same name
    except (OSError, ValueError):  # a later one has taken its place
        return None


def status(argv: Sequence[str]) -> int:
    """`longhaul sync status ADDRESS`."""
    address = Flag("ADDRESS", TEXT, None, WHERE)
    out = Flag("json", OUTPUT, None, "write it to this file; - is stdout")
    about = "Prints the version that a sender serves, and its receivers."
    values = flags.parse("sync status", about, {"": [address, out, TOKEN, RUNS_DIR, DEBUG]}, argv).values
    if values["ADDRESS"] is None:
        raise FlagError("ADDRESS is missing: longhaul sync status ADDRESS")

    where, token = _address(values["ADDRESS"], values["runs-dir"]), _token(values["token-file"])
    kind, _, path = where.partition(":")
    if kind == "folder" and not Path(path).is_dir():
        return tables.say(f"there is no folder {path}, so nothing was published there yet", FAILED)
    try:
        source = _connect(where, token, "status")
    except PermissionError:  # a wrong token: the error says so
        raise
    except OSError as error:
        return tables.say(f"nobody answers at {where}: {error.strerror or error}; is it served there?", FAILED)
    try:
        state = source.status()
    finally:
        source.close()
    if values["json"] is not None:
        tables.write_json(values["json"], state)
    if values["json"] != "-":
        version = f"version {state['version']} of epoch {state['epoch']}" if state["version"] >= 0 else "no version yet"
        print(tables.clean(f"run {state['run'] or 'unknown'}: {version}, {state['image_bytes']:,} bytes"))
        names = ("name", "version", "phase", "target", "failures")
        if state["receivers"]:
            tables.table(names, [[tables.clean(str(each[name])) for name in names] for each in state["receivers"]])
        for name, why in state.get("dropped", []):
            print(tables.clean(f"dropped {name}: {why}"))
    return 0


BENCH_FLAGS = [
    Flag("model", TEXT, "qwen3-0.6b", "model whose parameters are sent, by its name"),
    Flag("receivers", INT, 2, "processes that receive", least=1),
    Flag("lane", choice(("shm", "tcp", "folder")), (), "a figure for each", many=True, shown="shm, tcp"),
    Flag("repeats", INT, 5, "repeats, of which medians are reported", least=5),
    Flag("learning-rate", FLOAT, None, "versions are one step of Adam apart, and tcp sends the changes", shown="all"),
    Flag("layouts", TEXT, (), "instead: plan from one to another, as fsdp:8 tp:2x4, by shapes alone", many=True),
    Flag("peers", ALONE, False, "instead: sockets, gRPC, Orbax and others, in a clone of the project"),
    Flag("json", OUTPUT, None, "write the figures as a list to this file, too"),
    DEBUG,
]


def bench(argv: Sequence[str]) -> int:
    """`longhaul sync bench`: `longhaul bench sync` with flags of its own."""
    about = "Measures a version from one process to others, by stages, beside the limits of memory and sockets."
    values = flags.parse("sync bench", about, {"": BENCH_FLAGS}, argv).values
    model_shapes.forms(values["model"])
    if values["peers"]:
        return _peers(values)

    sizes = {name: values[name] for name in ("model", "receivers", "lane", "repeats") if values[name] not in ((), [])}
    rate, layouts = values["learning-rate"], tuple(values["layouts"])
    if rate is not None and not 0.0 < rate < 1.0:
        raise FlagError(f"--learning-rate is {rate:g}; it must lie above 0 and below 1")
    if layouts and (len(layouts) != 2 or rate is not None or values["lane"]):
        raise FlagError("--layouts takes two, of trainers and receivers, without --lane and --learning-rate")
    if rate is not None:
        if any(lane != "tcp" for lane in values["lane"]):
            raise FlagError("--learning-rate needs --lane tcp, which alone sends changes; leave --lane out")
        sizes |= {"lane": ("tcp",), "learning_rate": rate}

    from longhaul.bench import harness
    from longhaul.bench.cases import sync as case

    figures = []
    for figure in case.layouts(values["model"], *layouts) if layouts else harness.run("sync", **sizes):
        figures.append(figure)
        tables.write_line(figure)
    if values["json"] not in (None, "-"):
        tables.write_json(values["json"], figures)
    return 0


def _peers(values: Mapping[str, Any]) -> int:
    """Exit code of `python -m benchmarks.peers.sync`, which only a clone of the project has."""
    clone = Path(__file__).resolve().parents[2]
    if not (clone / "benchmarks/peers/sync.py").is_file():
        raise FlagError(
            "--peers runs benchmarks/peers/sync.py, which no installation has; run it in a clone of the project"
        )
    if values["lane"] or values["layouts"] or values["learning-rate"] is not None:
        raise FlagError("--peers has transports of its own; leave --lane, --layouts and --learning-rate out")
    command = ["--model", values["model"], "--repeats", str(values["repeats"])]
    command += [] if values["json"] in (None, "-") else ["--json", str(Path(values["json"]).absolute())]
    return subprocess.run([sys.executable, "-m", "benchmarks.peers.sync", *command], cwd=clone, check=False).returncode


def _address(address: str, runs_dir: str = RUNS_DIR.default) -> str:
    """An address; a folder is one, too, and so are a run's name and HOST:PORT."""
    if address.partition(":")[0] in transports.KINDS:
        transports.split(address)
        return address
    named = Path(runs_dir, address)
    path = named if (named / "run.json").is_file() else Path(address)
    if path.is_dir():
        if not (path / "run.json").exists():
            return f"folder:{path}"
        if (path / "weights").is_dir():
            return f"folder:{path / 'weights'}"
        if not any(path.glob("checkpoints/*/manifest.json")):
            raise FlagError(
                f"{address} is a run without checkpoints yet, and with no versions in {path / 'weights'}; wait for its "
                "first one"
            )
        return f"{CHECKPOINTS}:{path}"
    if ":" in address:
        with suppress(ValueError):
            credentials.split(address)
            return f"tcp:{address}"
        transports.split(address)  # which says what there is
    runs = sorted(run.parent.name for run in Path(runs_dir).glob("*/run.json"))
    hint = flags.suggestion(address, runs, "write tcp:HOST:PORT, shm:NAME or folder:PATH")
    raise FlagError(f"{address}: neither a folder, a run in {runs_dir}, nor an address; {hint}")


def _connect(address: str, token: str | None, name: str) -> Source:
    """Receiver's end of the transport at an address, or of a run's checkpoints."""
    kind, _, rest = address.partition(":")
    if kind == CHECKPOINTS:
        from longhaul.training.checkpoint.weight_source import CheckpointSource

        return CheckpointSource(rest)
    return transports.connect(address, token, name)


def _token(path: str | None) -> str | None:
    return credentials.load(token_file=path, environment=True).token


@contextmanager
def _stop_event() -> Iterator[threading.Event]:
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


def _wait_until(condition: Callable[[], bool], stop: threading.Event, seconds: float) -> bool:
    """True once `condition` holds; False after `seconds`, or when stopped."""
    until = time.monotonic() + seconds
    while not condition():
        left = until - time.monotonic()
        if left <= 0.0 or stop.wait(min(0.05, left)):
            return False
    return True


# ----------------------------------------------------------------------------------------------------------------- plan


ITEMSIZES = {"float32": 4.0, "bfloat16": 2.0, "bf16": 2.0, "float16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0}

UNITS = {
    "B/s": 1.0,
    "MB/s": 1e6,
    "GB/s": 1e9,
    "TB/s": 1e12,
    "Mb/s": 1e6 / 8,
    "Gb/s": 1e9 / 8,
    "Tb/s": 1e12 / 8,
}

PLAN = "Cost of an update of a model's parameters, stage by stage, full and by deltas; from a model, not measured."


def _rate(word: str) -> float:
    """Bytes a second: 400Gb/s -> 5e10. A unit is required: links are sold in bits, memory in bytes."""
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([KMGT]?[Bb]/s)", word.strip())
    if match is None or match[2] not in UNITS:
        raise ValueError(word)
    return float(match[1]) * UNITS[match[2]]


def _receivers(word: str) -> tuple[int, int]:
    """(replicas, receivers of each): 16x8 -> (16, 8)."""
    replicas, _, each = word.lower().partition("x")
    return int(replicas), int(each or 1)


RATE = Kind("RATE", "a rate with its unit, as 400Gb/s or 50GB/s", _rate)
RECEIVERS = Kind("MxR", "replicas x receivers of each, as 16x16", _receivers)

PLAN_FLAGS = [
    Flag("params", FLOAT, None, "number of parameters, as 1e12"),
    Flag("dtype", choice(tuple(ITEMSIZES)), "bf16", "dtype that is sent"),
    Flag("trainers", INT, 256, "accelerators that hold a shard each"),
    Flag("receivers", RECEIVERS, (16, 16), "replicas x accelerators that share one", shown="16x16"),
    Flag("nic", RATE, 50e9, "an accelerator's link, each direction", shown="400Gb/s"),
    Flag("efficiency", FLOAT, 0.9, "share of links that is reached"),
    Flag("pcie", RATE, 55e9, "between accelerator and host", shown="55GB/s"),
    Flag("hbm", RATE, 3350e9, "an accelerator's memory", shown="3350GB/s"),
    Flag("memory-gb", FLOAT, 180.0, "gigabytes of an accelerator's memory, which must hold its part"),
    Flag("staged", SWITCH, False, "through the hosts' memory"),
    Flag("relay", SWITCH, True, "replicas pass buckets on where that is faster"),
    Flag("bucket-mb", FLOAT, 256.0, "megabytes of a receiver's bucket"),
    Flag("delta-ratio", FLOAT, 50.0, "dense bytes / bytes of a delta"),
    Flag("codec-share", FLOAT, 0.2, "share of memory bandwidth that encoding on accelerators reaches"),
    Flag("cores", INT, 16, "cores of a host, an accelerator"),
    Flag("core-encode", RATE, 1e9, "dense bytes that a core encodes a second", shown="1GB/s"),
    Flag("core-decode", RATE, 2e9, "dense bytes that a core decodes a second", shown="2GB/s"),
    Flag("check", ALONE, False, "measure runs on this machine, and print the model's error"),
    Flag("model", TEXT, "qwen3-0.6b", "with --check: the model whose parameters are sent, by its name"),
    Flag("json", OUTPUT, None, "write everything to this file; - is stdout"),
    DEBUG,
]


def plan(argv: Sequence[str]) -> int:
    """`longhaul sync plan --params 1e12 --trainers 256 --receivers 16x16 --nic 400Gb/s [--json FILE]`."""
    values = flags.parse("sync plan", PLAN, {"": PLAN_FLAGS}, argv).values
    if values["check"]:
        return check(values["model"], values["json"])
    if values["params"] is None:
        raise FlagError("--params is missing: longhaul sync plan --params 1e12")
    replicas, each = values["receivers"]
    with _of_flags():
        setting = Setting(
            values["params"], ITEMSIZES[values["dtype"]], values["trainers"], replicas, each, values["nic"],
            values["efficiency"], values["pcie"], values["hbm"], values["staged"], values["relay"],
            values["bucket-mb"] * 1e6, values["delta-ratio"], values["codec-share"], values["cores"],
            values["core-encode"], values["core-decode"], memory=values["memory-gb"] * 1e9,
        )  # fmt: skip
    costs = cost_model.costs(setting)
    tables.report(values["json"], as_json(setting, costs), lambda: show(setting, costs))
    return 0


NAMES = {"replicas": "receivers", "per_replica": "receivers", "bucket": "bucket-mb", "memory": "memory-gb"}
"""Fields of `Setting` -> their flags, where these are called otherwise."""


@contextmanager
def _of_flags() -> Iterator[None]:
    """Context in which an error of a `Setting` names the flag of its field."""
    try:
        yield
    except FieldError as error:
        raise FieldError(NAMES.get(error.field, error.field), error.value, error.remedy).of_flag() from error


def check(model: str, out: str | None) -> int:
    """`longhaul sync plan --check`: predictions of `cost_model.local` for this machine beside measured runs."""
    model_shapes.forms(model)
    from longhaul.bench import harness

    figures = list(harness.run("sync", model=model))
    if out is not None:
        tables.write_json(out, figures)
    if out != "-":
        rows = [
            [each["config"]["lane"], _seconds(each["wall_seconds"]),
             _seconds(each["model_seconds"]), f"{each['model_error']:+.0%}"]
            for each in figures
        ]  # fmt: skip
        tables.table(["lane", "seconds", "model", "error"], rows)
    return 0


def show(of: Setting, costs: Sequence[Cost]) -> None:
    """Tables of assumptions, of the stages of each kind, and of the sums."""
    tables.listing(cost_model.assumptions(of))
    for each in costs:
        print()
        rows = [[term.name, _seconds(term.seconds), term.formula] for term in each.terms]
        tables.table([each.name, "seconds", "from"], rows)
    print()
    header = ["update", "seconds", "serial", "pause", "bound by"]
    rows = [[e.name, _seconds(e.pipelined), _seconds(e.serial), _seconds(e.pause), e.bottleneck] for e in costs]
    tables.table(header, rows)


def as_json(of: Setting, costs: Sequence[Cost]) -> dict[str, Any]:
    """Everything that `show` prints, as numbers."""
    return {
        "setting": dataclasses.asdict(of),
        "assumptions": dict(cost_model.assumptions(of)),
        "updates": [
            {
                "name": each.name, "seconds": each.pipelined, "serial_seconds": each.serial,
                "pause_seconds": each.pause, "bottleneck": each.bottleneck, "buckets": each.buckets,
                "terms": [term._asdict() for term in each.terms],
            }
            for each in costs
        ],
    }  # fmt: skip


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100.0 else f"{value:,.0f}"


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "plan": plan,
    "serve": serve,
    "pull": pull,
    "status": status,
    "bench": bench,
}

ANSWERS = {
    "push publish send": "receivers pull: longhaul train RECIPE --publish ADDRESS sends versions, and so does "
    "longhaul sync serve RUN; longhaul sync pull ADDRESS takes them"
}
"""Commands of other programs -> what to give."""


def sync(argv: Sequence[str]) -> int:
    """The group of commands `longhaul sync`."""
    return flags.of_group("sync", COMMANDS, [f"longhaul sync {name}" for name in COMMANDS], argv, ANSWERS)
