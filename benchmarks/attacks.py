"""Attacks by strangers, full machines and small files, each by the command that a user would type.

    python -m benchmarks.attacks [NAME ...] [--json FILE]

An attack (`ATTACKS`) makes its folder, runs `longhaul` in it, and gives rows: what was done, what came, and whether the
promise of SECURITY.md holds. Connections are made to this machine alone. Root's runs with few threads or without
rights are another user's, by setpriv.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import connections, results
from longhaul.runtime import descriptors
from longhaul.weight_sync import manifest
from longhaul.weight_sync.digest import digest
from longhaul.weight_sync.protocol import Verdict
from longhaul.weight_sync.receiver import follow
from longhaul.weight_sync.transports.sockets import Wire, welcome
from tests.helpers import resource_attacks

ROOT = Path(__file__).resolve().parent.parent

SMALL = "--num-envs 16 --num-steps 16 --hidden-dim 16 --num-layers 1 --evaluation-episodes 4 --threads 1"

POLES = "--env numpy/longhaul.envs.host.numpy_cartpole:cartpole"

IDLE = 1500
"""Idle connections of a stranger, more than the descriptors of a process under the usual soft limit."""

PATIENCE = 600.0
"""Seconds that a command may take on a full machine."""

STRANGER = shlex.split(
    "setpriv --reuid=65533 --regid=65533 --clear-groups --inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
)
"""Program by which root's runs are another user's."""


class Row(NamedTuple):
    item: int  # of the list of attacks in SECURITY.md
    attack: str
    found: str
    holds: bool


class Outcome(NamedTuple):
    code: int | None  # None: it was still running after PATIENCE
    seconds: float
    said: str

    @property
    def line(self) -> str:
        """Its last line."""
        lines = self.said.strip().splitlines() or ["nothing"]
        return f"code {self.code} after {self.seconds:.1f} s: {lines[-1][:160]}"

    @property
    def one_line(self) -> bool:
        """True for an error in a line, exit code 2."""
        return self.code == 2 and "Traceback" not in self.said and bool(self.said.strip())

    @property
    def told(self) -> bool:
        """True for a report that may name errors."""
        return self.code in (0, 1, 2) and "Traceback" not in self.said and bool(self.said.strip())


class Started:
    """A `longhaul` command that runs."""

    def __init__(self, home: Path, words: str, *, prefix: Sequence[str] = (), **variables: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.log = home / f"log-{time.monotonic_ns()}"
        own_variables = {"HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [*prefix, sys.executable, "-m", "longhaul", *shlex.split(words)]
        self.began = time.monotonic()
        with self.log.open("wb") as output:
            self.process = psutil.Popen(
                command, cwd=home, env=os.environ | own_variables | variables, stdout=output, stderr=output, umask=0,
                start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def outcome(self, seconds: float = PATIENCE) -> Outcome:
        try:
            code: int | None = self.process.wait(seconds)
        except psutil.TimeoutExpired:
            code = None
            self.kill()
        return Outcome(code, time.monotonic() - self.began, self.said)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def longhaul(home: Path, words: str, **more: Any) -> Outcome:
    return Started(home, words, **more).outcome()


def until(ready: Callable[[], Any], seconds: float = PATIENCE) -> bool:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def saves(folder: Path) -> list[int]:
    """Updates of the checkpoints; `4000.1` stands beside something else that is called 4000."""
    with suppress(OSError):
        names = (re.fullmatch(r"(\d+)(\.\d+)?", each.name) for each in (folder / "checkpoints").iterdir())
        return sorted(int(each[1]) for each in names if each is not None)
    return []


# ------------------------------------------------------------------------------------- 1: stray entries of checkpoints/


def stray_entries(home: Path) -> Iterator[Row]:
    words = f"train cartpole {SMALL} --total-steps 1024000 --save-interval 500 --run-name a --runs-dir runs"
    folder = home / "runs" / "a"
    checkpoints = folder / "checkpoints"
    started = Started(home, words)
    until(lambda: len(saves(folder)) > 0 or started.process.poll() is not None)
    (checkpoints / "x.partial").touch()
    (checkpoints / "4000").write_text("a file")
    os.mkfifo(checkpoints / "y.partial")
    (checkpoints / "z.partial").symlink_to("nowhere")
    (checkpoints / "3500.partial").touch()
    done = started.outcome()
    kept = saves(folder)
    bad = re.findall(r"(?m)^.*(?:cannot save|can't|warning).*$", done.said)
    again = longhaul(home, "evaluate a --episodes 4 --runs-dir runs")
    yield Row(
        1, "touch checkpoints/x.partial, a file 4000, a pipe and a dangling link .partial, while it trains",
        f"{done.line}; saves {kept}; says {bad[:2]}; evaluate {again.code}",
        done.code == 0 and again.code == 0 and not any("cannot save" in each for each in bad) and len(kept) > 0,
    )  # fmt: skip

    folder = home / "runs" / "b"
    checkpoints = folder / "checkpoints"
    started = Started(home, words.replace("--run-name a", "--run-name b"))
    until(lambda: len(saves(folder)) > 1 or started.process.poll() is not None)
    started.process.send_signal(signal.SIGTERM)
    stopped = started.outcome()
    newest, aside = checkpoints / str(saves(folder)[-1]), home / "aside"
    newest.rename(aside)
    newest.symlink_to(aside)
    before = {each.name: each.stat().st_size for each in aside.rglob("*")}
    done = longhaul(home, "train cartpole --resume b --runs-dir runs")
    after = {each.name: each.stat().st_size for each in aside.rglob("*")}
    yield Row(
        1, "a checkpoint moved and symlinked, then --resume",
        f"stopped {stopped.code}; {done.line}; saves {saves(folder)}; "
        f"the moved one {'unchanged' if before == after else 'changed'}, from it: {newest.name in done.said}",
        done.code == 0 and before == after and "cannot save" not in done.said,
    )  # fmt: skip

    home.chmod(0o777)
    folder = home / "runs-c" / "c"
    own = Started(
        home, words.replace("--run-name a --runs-dir runs", "--run-name c --runs-dir runs-c"), prefix=STRANGER,
        LONGHAUL_CACHE=str(home / "cache-c"),
    )  # fmt: skip
    until(lambda: len(saves(folder)) > 0 or own.process.poll() is not None)
    for name in ("1500.partial", "4000", "w.partial"):
        (folder / "checkpoints" / name / "x").mkdir(parents=True)
        (folder / "checkpoints" / name).chmod(0o755)
    done = own.outcome()
    bad = re.findall(r"(?m)^.*checkpoints/.*$", done.said)
    yield Row(
        1, "folders of root's in checkpoints/, which the run's user can't remove: 1500.partial, w.partial, 4000",
        f"{done.line}; saves {saves(folder)}; says {bad[:2]}",
        done.code == 0 and "cannot save" not in done.said and "Traceback" not in done.said,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- 2: idle connections


def flood(address: connections.Address, count: int, seconds: float) -> Iterator[int]:
    """Opens idle connections, and again those that were ended, for so many seconds; yields how many are open."""
    held: list[socket.socket] = []
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            while len(held) < count:
                sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
                sock.setblocking(False)
                if sock.connect_ex(address) not in (0, 115):
                    sock.close()
                    break
                held.append(sock)
            time.sleep(0.5)
            open_ = []
            for sock in held:
                try:
                    ended = sock.recv(4096) == b""
                except BlockingIOError:
                    ended = False
                except OSError:
                    ended = True
                if ended:
                    sock.close()
                else:
                    open_.append(sock)
            held = open_
            yield len(held)
    finally:
        for sock in held:
            sock.close()


def idle(home: Path) -> Iterator[Row]:
    for port, limit in [
        *((port, 1024) for port in connections.PORTS),
        ("publish", 256),
        ("tls", 256),
        ("central", 256),
    ]:
        try:
            row = idle_at(home / f"{port}-{limit}", port, limit)
        except (psutil.NoSuchProcess, SystemExit) as error:
            row = Row(2, f"idle connections to {port}, ulimit -n {limit}", f"it has ended: {error}"[:2000], False)
        yield row


def idle_at(home: Path, port: str, limit: int) -> Row:
    """A port of processes that may hold so many descriptors, and no more."""
    home.mkdir(parents=True)
    attack = f"{IDLE} idle connections for 25 s to {port}, ulimit -n {limit}"
    prefix = ["prlimit", f"--nofile={limit}:{limit}"]
    with (home / "log").open("wb") as log, connections.running(port, home, log, prefix) as target:
        first, version = saves(target.folder), target.follower and target.follower.held.version
        most, answers = 0, []
        for open_ in flood(target.address, IDLE, 25.0):
            most = max(most, target.listening.num_fds())
            if port == "board":
                answers.append(answer(target.address))
        came = target.follower and target.follower.held.version
        last = saves(target.folder)
        target.training.send_signal(signal.SIGTERM)
        code = target.training.wait(120)
        lines = Path(log.name).read_text()
    lost = len(re.findall(r"cannot save|until then it trains on", lines))
    outcome = (
        f"newest save {first[-1:]} -> {last[-1:]}, lost {lost}, descriptors at most {most}, {open_} open, code {code}"
    )
    holds = code == 75 and not lost and last > first and "Traceback" not in lines
    if target.follower is not None:
        outcome, holds = f"{outcome}, versions {version} -> {came}", holds and came > version
    if answers:
        outcome, holds = f"{outcome}, HTTP {answers[-3:]}", holds and all(each == 200 for each in answers[-3:])
    return Row(2, attack, outcome, holds)


def answer(address: Any, seconds: float = 5.0) -> int | str:
    """Status of an HTTP server."""
    try:
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/api/runs", timeout=seconds) as got:
            got.read()
            return int(got.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except Exception as error:
        return type(error).__name__


# --------------------------------------------------------------------------------------------- 3: no thread can start


def allow_threads(process: psutil.Process, count: int) -> None:
    """Sets the limit of processes and threads, as the process's own user may."""
    subprocess.run([*STRANGER, "prlimit", f"--pid={process.pid}", f"--nproc={count}:"], check=True)


def threads(home: Path) -> Iterator[Row]:
    for port in ("publish", "serve", "board"):
        folder = home / port
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        with (folder / "log").open("wb") as log, connections.running(port, folder, log, STRANGER) as target:
            allow_threads(target.listening, 1)  # its user has more already
            if port == "board":
                under = [answer(target.address, 2.0) for _ in range(20)]
            else:
                where = f"tcp:{target.address[0]}:{target.address[1]}"
                token = connections.TOKEN if port == "publish" else None
                with closing(follow([where], token=token)) as other:
                    time.sleep(8.0)
                    under = [f"a new receiver has version {other.held.version}"]
            listens = target.listening.is_running()
            allow_threads(target.listening, 4096)
            if port == "board":
                back = until(lambda target=target: answer(target.address) == 200, 30.0)
            else:
                with closing(follow([where], token=token)) as other:
                    back = until(lambda other=other: other.held.version >= 0, 30.0)
            target.training.send_signal(signal.SIGTERM)
            code = target.training.wait(120)
        log_text = Path(log.name).read_text()
        outcome = (
            f"{under[-1]}; it {'goes on' if listens else 'has ended'}, serves {'again' if back else 'no more'} when "
        )
        outcome += f"threads can start; code {code}"
        yield Row(
            3,
            f"{port} can start no thread (prlimit --nproc=1)",
            outcome,
            back and code == 75 and "Traceback" not in log_text,
        )


# ----------------------------------------------------------------------------------------------------- 4: small files


def small_files(home: Path) -> Iterator[Row]:
    for name, attack in resource_attacks.ATTACKS.items():
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.resource_attacks", name], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        row = (
            json.loads(done.stdout)
            if done.returncode == 0
            else {"seconds": 1e9, "megabytes": 1e9, "outcome": done.stderr}
        )
        outcome = f"{row['seconds']} s, {row['megabytes']} MB: {row['outcome'][:100]}"
        yield Row(4, f"{name}, {row.get('bytes')} bytes", outcome, row["seconds"] < 1.0 and row["megabytes"] < 500)
        if attack.read is not resource_attacks.log:
            continue
        folder = home / name
        folder.mkdir(parents=True)
        path = attack.make(folder)
        result = longhaul(home, f"data inspect {path}")
        yield Row(4, f"longhaul data inspect, {name}", result.line, result.told)


# ---------------------------------------------------------------------------------------- 5: what fits into no memory

TOO_LARGE = (
    "train cartpole --hidden-dim 1000000",
    "train cartpole --num-envs 100000000",
    "train cartpole --num-steps 100000000",
    "train cartpole --num-layers 100000000",
    "train cartpole --seeds 10000000",
    "train cartpole-dqn --hidden-dim 1000000",
    "train cartpole-dqn --replay-size 100000000000",
    "train pendulum-sac --hidden-dim 1000000",
    "train driving --num-envs 10000000",
    "train driving --hidden-dim 10000000",
    "train hackmatrix --num-envs 1000000000",
    "train reasoning-arithmetic --num-envs 100000000",
    f"train cartpole {POLES} --topology actors --actors 2 --hidden-dim 1000000",
    f"train cartpole {POLES} --topology central --actors 2 --hidden-dim 1000000",
    "launch --hosts 2 -- train cartpole --hidden-dim 1000000",
)


def too_large(home: Path) -> Iterator[Row]:
    for number, words in enumerate(TOO_LARGE):
        done = longhaul(home, words + ("" if "launch" in words else f" --run-name run-{number}"))
        left = list((home / "runs").glob(f"run-{number}")) if (home / "runs").is_dir() else []
        refused = done.told and done.code == 2 if "launch" in words else done.one_line  # each process has a line
        yield Row(5, f"longhaul {words}", done.line, refused and not left)


def signals(home: Path) -> Iterator[Row]:
    """Two signals while it imports, compiles or trains: the second one ends it."""
    for after, words in [
        (0.3, f"train cartpole {SMALL}"),
        (0.0, "train driving --scenarios 8 --num-envs 8"),
        (3.0, "train driving --scenarios 8 --num-envs 8"),
        (8.0, "train driving --scenarios 8 --num-envs 8"),
        (2.0, "train reasoning-arithmetic"),
    ]:
        where = home / f"signals-{time.monotonic_ns()}"
        cache = str(where / "cache")  # an empty one
        started = Started(where, f"{words} --run-name a --total-steps 100000000", LONGHAUL_CACHE=cache)
        if after != 0.3:
            until(lambda where=where: (where / "runs" / "a").is_dir())
        time.sleep(after)
        psutil_alive = started.process.poll() is None
        started.process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        second = time.monotonic()
        with suppress(psutil.NoSuchProcess):
            started.process.send_signal(signal.SIGTERM)
        done = started.outcome(60.0)
        took = time.monotonic() - second
        when = "while it imports" if after == 0.3 else f"{after:g} s after its folder"
        yield Row(
            5, f"SIGTERM twice, {when}: longhaul {words}", f"{took:.2f} s after the second: {done.line}",
            psutil_alive and done.code is not None and took < 2.0 and "Traceback" not in done.said,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- 6: orphans


def alive(process: psutil.Process) -> bool:
    """False too for one that has ended and that nobody has asked for."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def orphans(home: Path) -> Iterator[Row]:
    """Children of a process that is killed, at moments from their start on."""
    small = f"{SMALL} --total-steps 1000000000"
    for name, words in {
        "actors": f"train cartpole {POLES} {small} --topology actors --actors 2",
        "central, shared memory": f"train cartpole {POLES} {small} --topology central --actors 2",
        "central, gRPC": f"train cartpole {POLES} {small} --topology central --lane grpc --actors 2",
        "launch": f"launch --hosts 2 -- train cartpole {small}",
    }.items():
        longest = 0.0
        for after in (0.0, 0.3, 1.0, 3.0):
            started = Started(home, words + f" --run-name run-{time.monotonic_ns()}")
            until(lambda started=started: started.process.poll() is not None or started.process.children())
            time.sleep(after)
            children = started.process.children(recursive=True)
            started.process.kill()
            began = time.monotonic()
            until(lambda children=children: not any(map(alive, children)), 20.0)
            longest = max(longest, time.monotonic() - began)
            for each in children:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            started.kill()
        yield Row(
            6, f"kill -9 of a parent, {name}: 0, 0.3, 1 and 3 s after its first child begins",
            f"the last child ends {longest:.2f} s later", longest < 1.0,
        )  # fmt: skip


def edited(home: Path) -> Iterator[Row]:
    words = f"train cartpole {SMALL} --total-steps 51200 --save-interval 50 --run-name a --runs-dir runs"
    longhaul(home, words)
    path = home / "runs" / "a" / "run.json"
    whole = path.read_text()

    def change(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: 99.0 if name in ("lr", "learning_rate") else change(each) for name, each in values.items()}
        return values

    path.write_text(json.dumps(change(json.loads(whole))))
    done = longhaul(home, "train cartpole --resume a --runs-dir runs --total-steps 102400")
    yield Row(7, "run.json with a learning rate of 99, then --resume", done.line, done.one_line and "99" in done.said)
    done = longhaul(home, "train cartpole --resume a --runs-dir runs --total-steps 102400 --take-edits")
    yield Row(7, "the same with --take-edits", done.line, done.code == 0 and "99" in done.said)


# ---------------------------------------------------------------------------------------------------- 8: model folders


def models(home: Path) -> Iterator[Row]:
    sound = home / "sound"
    sound.mkdir(parents=True)
    resource_attacks.many_layers(sound)
    config = json.loads((sound / "config.json").read_text()) | {"num_hidden_layers": 1}
    (sound / "config.json").write_text(json.dumps(config))
    deep = "[" * 200_000 + "]" * 200_000
    bad: dict[str, dict[str, str]] = {
        "config.json is []": {"config.json": "[]"},
        "config.json is null": {"config.json": "null"},
        "config.json is 200,000 lists in one another": {"config.json": deep},
        "config.json is cut": {"config.json": json.dumps(config)[:50]},
        "sizes as text": {"config.json": json.dumps(config | {"hidden_size": "4"})},
        "sizes as lists": {"config.json": json.dumps(config | {"num_attention_heads": [1]})},
        "a size of 1e400": {"config.json": json.dumps(config).replace('"hidden_size": 4', '"hidden_size": 1e400')},
        "negative layers": {"config.json": json.dumps(config | {"num_hidden_layers": -1})},
        "no heads": {"config.json": json.dumps(config | {"num_attention_heads": 0})},
        "an index without weight_map": {"model.safetensors.index.json": "{}", "model.safetensors": ""},
        "an index that is a list": {"model.safetensors.index.json": "[1]", "model.safetensors": ""},
        "an index that leaves the folder": {
            "model.safetensors.index.json": json.dumps({"weight_map": {"a": "../../etc/passwd"}}),
            "model.safetensors": "",
        },
        "an index that is 200,000 lists in one another": {
            "model.safetensors.index.json": deep,
            "model.safetensors": "",
        },
        "weights that are no safetensors": {"model.safetensors": "x" * 100},
        "a tokenizer.json that is []": {"tokenizer.json": "[]"},
        "a tokenizer.json that is 200,000 lists in one another": {"tokenizer.json": deep},
        "a tokenizer_config.json that is []": {"tokenizer_config.json": "[]"},
    }
    for number, (edit, files) in enumerate(bad.items()):
        folder = home / f"model-{number}"
        shutil.copytree(sound, folder)
        for name, text in files.items():
            (folder / name).unlink(missing_ok=True)
            if text:
                (folder / name).write_text(text)
        for words in (f"train reasoning-smollm --model-folder {folder}", f"serve {folder} --port 0")[: 1 + number % 2]:
            done = Started(home, words).outcome(60.0)
            named = words.replace(str(folder), "FOLDER").split(" --port")[0]
            yield Row(8, f"{edit}: longhaul {named}", done.line, done.one_line)


# -------------------------------------------------------------------------------------------- 9: receivers, and pickles


def body_of(tensors: list[list[Any]], size: int) -> bytes:
    """A manifest under a right digest, whatever it says."""
    fields = {"run": "a", "epoch": 1, "version": 1, "base": -1, "size": size, "tensors": tensors}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return manifest.MAGIC + digest(text) + len(text).to_bytes(8, "little") + text


@contextmanager
def liar(offer: bytes | None, silent: bool = False) -> Iterator[str]:
    """A sender that offers what it is told to, and its address; `silent`: it accepts connections and says nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    held = []

    def serve(sock: socket.socket) -> None:
        wire = Wire(sock)
        with suppress(Exception):
            wire.send("hello", 5.0, {"nonce": "0" * 32, "asks": False})
            connection = wire.receive(5.0)
            entered = welcome(connection, "0" * 32, None)
            wire.send("welcome", 5.0, entered)
            wire.session = entered["session"]
            while True:
                frame = wire.receive(60.0)
                if frame.kind == "bind":
                    wire.send("bound", 5.0, {"lease": 30.0})
                elif frame.kind == "ask" and offer is not None:
                    wire.send("offer", 5.0, {"base": -1, "seconds": 60.0}, offer)
                elif frame.kind == "ask":
                    time.sleep(float(frame.fields["wait"]))
                    wire.send("nothing", 5.0)
                elif frame.kind == "ready":
                    wire.send("verdict", 5.0, {"verdict": Verdict.COMMIT.value})
                elif frame.kind == "fetch":
                    time.sleep(60.0)
                else:
                    wire.send("ok", 5.0)

    def accept() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                held.append(sock)
                if not silent:
                    threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
        for sock in held:
            sock.close()


def receivers(home: Path) -> Iterator[Row]:
    row = [["__metadata__", [4], "float32", 0, "", "00" * 16]]
    huge = [["a", [1 << 38], "float32", 0, "", "00" * 16]]
    tensors = [["a", [1 << 28], "float32", 0, "", "00" * 16]]
    for offered, offer, more in [
        ("a tensor called __metadata__", body_of(row, 64), ""),
        ("an image of 1 TiB", body_of(huge, 1 << 40), ""),
        ("an image of 1 GiB, --budget 0.5", body_of(tensors, 1 << 30), "--budget 0.5"),
        ("an image of 1 GiB that never comes", body_of(tensors, 1 << 30), ""),
        ("no version", None, ""),
    ]:
        with liar(offer) as where:
            started = Started(home, f"sync pull {where} --out out --timeout 12 {more}")
            most = 0
            while started.process.poll() is None and time.monotonic() - started.began < 60:
                with suppress(psutil.NoSuchProcess):
                    most = max(most, started.process.memory_info().rss)
                time.sleep(0.1)
            done = started.outcome(60.0)
        written = [each.name for each in (home / "out").rglob("*.safetensors")]
        yield Row(
            9, f"sync pull --timeout 12 from a sender of {offered}", f"{done.line}; {most >> 20} MB; {written}",
            done.code not in (0, None) and "Traceback" not in done.said and not written and most < 700 << 20,
        )  # fmt: skip
    with liar(None, silent=True) as where:
        done = longhaul(home, f"sync pull {where} --out out --timeout 12")
    yield Row(
        9,
        "sync pull --timeout 12 from one who says nothing",
        done.line,
        done.code not in (0, None) and done.seconds < 20,
    )
    done = longhaul(home, "sync pull tcp:127.0.0.1:9 --out out --timeout 12")
    yield Row(
        9, "sync pull --timeout 12 where nobody listens", done.line, done.code not in (0, None) and done.seconds < 20
    )


def pickles(home: Path) -> Iterator[Row]:
    home.mkdir(exist_ok=True)
    state = pickle.dumps({"__setstate__": 1, "answer": 42}, 4)[2:-1]
    payloads = {
        "the function of _codecs.encode": b"c_codecs\nencode\n",
        "the class numpy.ndarray": b"cnumpy\nndarray\n",
        "an OrderedDict": b"ccollections\nOrderedDict\n)R",
        "a dictionary": b"}",
        "os.system": b"cos\nsystem\n",
    }
    for target, code in payloads.items():
        path = home / "evil.pkl"
        path.write_bytes(b"\x80\x04" + code + state + b"b.")
        done = longhaul(home, f"data inspect {path}")
        yield Row(9, f"longhaul data inspect, a pickle with BUILD on {target}", done.line, done.told)


ATTACKS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "stray-entries": stray_entries,
    "idle": idle,
    "threads": threads,
    "small-files": small_files,
    "too-large": too_large,
    "signals": signals,
    "orphans": orphans,
    "edited": edited,
    "models": models,
    "receivers": receivers,
    "pickles": pickles,
}


def main() -> int:
    parser = results.parser(__doc__)
    parser.add_argument("attacks", nargs="*", metavar="NAME", help=f"one of {', '.join(ATTACKS)}; all without")
    args = parser.parse_args()
    if unknown := [each for each in args.attacks if each not in ATTACKS]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(ATTACKS)}")
    descriptors.raise_limit()
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as cache:
        os.chmod(cache, 0o777)
        os.environ.setdefault("LONGHAUL_CACHE", cache)
        failed = [name for name in args.attacks or ATTACKS if not attacked(name, args.json)]
    return 1 if failed else 0


def attacked(name: str, file: Path | None) -> bool:
    """True where all promises hold."""
    held = True
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o777)
        for row in ATTACKS[name](Path(home) / name):
            held = held and row.holds
            print(f"{row.item}  {'holds' if row.holds else 'FAILS'}  {row.attack}\n          {row.found}", flush=True)
            if file is not None:
                with file.open("a") as lines:
                    lines.write(json.dumps(row._asdict()) + "\n")
    return held


if __name__ == "__main__":
    sys.exit(main())
