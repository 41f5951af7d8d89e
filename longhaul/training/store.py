"""Stores of runs: a run at an address (s3://, gs://, az://, or any of fsspec) is a local folder with a mirror there.

A run trains in a staging folder, as every run does. A thread, the `Mirror`, copies what is new to the address, under
the same names. A checkpoint's manifest goes last, after its files and after the metrics that belong to it; so whatever
moment a machine is lost at, the store holds a run that can be resumed. Training never waits for the store: while that
is out of reach the thread tries again, and catches up.

To resume, or to read a run, `fetched` brings its files into the staging folder, with the newest complete checkpoint.
The checkpoint's own digests tell whether each byte is as written; a damaged one is dropped for the one before.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longhaul.runtime import bounded_json, cache_dir, files
from longhaul.runtime.errors import RunError, did_you_mean
from longhaul.runtime.files import MANIFEST
from longhaul.runtime.object_store import Store, Unreachable

MARK = "store.json"
"""File of a staging folder: the address that it is mirrored to."""

CHECKPOINTS = "checkpoints"

LOCAL = {MARK, "wandb", "swanlab", "swanlab.session"}
"""Entries of a run's folder that stay local."""

PERIOD = 5.0
"""Seconds between two looks at the folder."""

RATE = 1e6
"""Bytes a second, at most, at which files that grow are sent again: a log of 100 MB goes every 100 s."""

PAUSES = (1.0, 30.0)
"""Seconds before the first new try of a store that is out of reach, and the most between two."""

PATIENCE, HASTE = 120.0, 15.0
"""Seconds that the end of a run waits for a store that is out of reach; likewise after a signal or an error."""


def staging(url: str) -> Path:
    """Local folder in which the runs of the address `url` are trained: in $LONGHAUL_STAGING, or the cache."""
    folder = os.environ.get("LONGHAUL_STAGING")
    base = Path(folder).expanduser().absolute() if folder else cache_dir.folder("runs")
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", url)[:80] + "-" + hashlib.sha256(url.encode()).hexdigest()[:8]
    return (base or Path(tempfile.gettempdir(), "longhaul-runs")) / name


# ------------------------------------------------------------------------------------------------------ a run's folder


def address_of(folder: Path) -> str | None:
    """Address that a run's folder is mirrored to."""
    try:
        return str(bounded_json.read(folder / MARK)["address"])
    except FileNotFoundError:
        return None


def shown(folder: Path) -> str:
    """Address of a run, or its folder where it has none."""
    return address_of(folder) or str(folder)


def prepared(url: str, taken: Callable[[Path], Path]) -> Path:
    """New staging folder of a run at the address `url`, made by `taken` in the folder of its runs.

    Raises RunError where the store can't be written to, or holds a run of that name.
    """
    store, local = Store(url), staging(url)
    folder = taken(local)
    try:
        if store.has(f"{folder.name}/run.json"):
            raise RunError(f"run {folder.name!r} exists in {url}; choose another --run-name, or --resume {folder.name}")
        probe = folder / MARK
        probe.write_text(json.dumps({"address": f"{url}/{folder.name}"}) + "\n")
        store.put(f"{folder.name}/{MARK}", probe, probe.stat().st_size)
        store.remove(f"{folder.name}/{MARK}")  # it can be written to
    except (OSError, RunError) as error:
        shutil.rmtree(folder)
        raise error if isinstance(error, RunError) else RunError(str(error)) from error
    return folder


def local_folder(url: str, name: str) -> Path:
    """Staging folder of the run `name` of the address `url`, with what the store has of it. RunError if it has none."""
    names: set[str] = set()
    try:
        store = Store(url)
        if store.has(f"{name}/run.json"):
            return fetched(store, name)
        names = {path.split("/")[0] for path in store.sizes() if path.endswith("/run.json") and path.count("/") == 1}
    except Unreachable as error:
        if (staging(url) / name / "run.json").is_file():
            _say(f"{error}; going on with what is in {staging(url) / name}")
            return staging(url) / name
        raise RunError(str(error)) from error
    near = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.4) or sorted(names)[-3:]
    hint = did_you_mean(near, "there are none yet")
    raise RunError(f"no run {name!r} in {url}; {hint}")


def fetched(store: Store, name: str) -> Path:
    """Staging folder of a run that the store has, brought up to what that holds.

    A folder whose checkpoint is as new as the store's is left as it is: this machine trained it, or still does.
    """
    folder = staging(store.url) / name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if trains(folder):
            return folder
        sizes = _sizes_of_run(store, name)
        remote = _complete(sizes)
        newest = max((_order(path.name) for path in (folder / CHECKPOINTS).glob("*") if _is_whole(path)), default=None)
        if (folder / "run.json").is_file() and newest is not None and (not remote or newest >= _order(remote[0])):
            return folder
        for path in sorted(sizes):
            if not path.startswith(f"{CHECKPOINTS}/") and path not in LOCAL:
                store.get(f"{name}/{path}", folder / path)
        for step in remote:
            if _fetch_checkpoint(
                store, name, step, [path for path in sizes if path.startswith(f"{CHECKPOINTS}/{step}/")]
            ):
                break
        (folder / MARK).write_text(json.dumps({"address": f"{store.url}/{name}"}) + "\n")
    return folder


def _fetch_checkpoint(store: Store, name: str, step: str, paths: Iterable[str]) -> bool:
    """Transfer of the checkpoint `step` of the run `name`, whose objects are `paths`, to the run's staging folder.

    What is there already stays. False if the store's is damaged.
    """
    target = staging(store.url) / name / CHECKPOINTS / step
    if _is_whole(target):
        return True
    beside = target.with_name(f"{step}.partial")
    files.remove(beside)
    inside = f"{CHECKPOINTS}/{step}/"
    for path in paths:
        if path.startswith(inside):
            store.get(f"{name}/{path}", beside / path.removeprefix(inside))
    if not _is_intact(beside):
        _say(f"checkpoint {step} in {store.url}/{name} is damaged and skipped")
        files.remove(beside)
        return False
    beside.rename(target)
    return True


def _sizes_of_run(store: Store, name: str) -> dict[str, int]:
    """Bytes of each object of the run `name`, by its path in the run's folder."""
    return {path.removeprefix(f"{name}/"): size for path, size in store.sizes(name).items()}


def _complete(sizes: dict[str, int]) -> list[str]:
    """Names of the checkpoints whose manifest is in the store, newest first."""
    names = {path.split("/")[1] for path in sizes if re.fullmatch(rf"{CHECKPOINTS}/[^/]+/{MANIFEST}", path)}
    return sorted((name for name in names if files.CHECKPOINT.fullmatch(name)), key=_order, reverse=True)


def _order(name: str) -> tuple[int, int]:
    step, _, again = name.partition(".")
    return int(step), int(again or 0)


def _is_whole(path: Path) -> bool:
    """True for a local checkpoint: its folder gets its name last."""
    return bool(files.CHECKPOINT.fullmatch(path.name)) and (path / MANIFEST).is_file()


def _is_intact(path: Path) -> bool:
    """True if each file of a checkpoint that was fetched has the size and digest of its manifest."""
    try:
        expected = bounded_json.read(path / MANIFEST)["contents"]["files"]
        for name, (size, digest) in expected.items():
            with open(path / name, "rb") as file:
                if os.fstat(file.fileno()).st_size != size or hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return False
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock against other processes of this machine that fetch the same run."""
    with open(folder.with_name(f".{folder.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def trains(folder: Path) -> bool:
    """True while a process of this machine trains in the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------------------- mirror


class Mirror:
    """Thread that keeps the store of a run's folder up to date; `close` sends the rest."""

    def __init__(self, folder: Path, url: str, say: Callable[[str], None] = _say, period: float = PERIOD) -> None:
        parent, _, name = url.rpartition("/")
        self._folder, self._store, self._name, self._say = folder, Store(parent), name, say
        self._period = period
        self._sent: dict[str, tuple[int, int]] = {}  # (bytes, modification time) of each file there
        self._due: dict[str, float] = {}  # when a file that grows is sent again
        self._there: set[str] | None = None  # names of the objects; None until asked
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def close(self, patience: float = PATIENCE) -> None:
        """Transfer of what is left. Raises RunError if the store stays out of reach for `patience` seconds."""
        self._ending.set()
        self._thread.join()
        deadline, pause = time.monotonic() + patience, PAUSES[0]
        while True:
            try:
                self.once(last=True)
                return
            except OSError as error:
                if time.monotonic() + pause > deadline:
                    raise RunError(
                        f"{error}; the run is whole in {self._folder}: train --resume "
                        f"{self._store.url}/{self._name} sends the rest"
                    ) from error
                time.sleep(pause)
                pause = min(2.0 * pause, PAUSES[1])

    def _work(self) -> None:
        pause, away = 0.0, False
        wait = min(0.5, self._period)  # at first: a short run is there soon
        while not self._ending.wait(pause or wait):
            wait = min(2.0 * wait, self._period)
            try:
                self.once()
            except OSError as error:
                if not away:
                    self._say(f"{error}; it trains on, and tries again")
                self._there = None
                pause, away = min(max(2.0 * pause, PAUSES[0]), PAUSES[1]), True
                continue
            if away:
                self._say(f"{self._store.url} is in reach again, and has all up to now")
            pause, away = 0.0, False

    def once(self, *, last: bool = False) -> None:
        """Transfer of what is new: all files, then checkpoints, each manifest last; what is gone is dropped last."""
        if self._there is None:
            sizes = _sizes_of_run(self._store, self._name)
            self._sent = {name: state for name, state in self._sent.items() if sizes.get(name) == state[0]}
            self._there = set(sizes)
        steps = [path for path in sorted((self._folder / CHECKPOINTS).glob("*")) if _is_whole(path)]
        fresh = [path for path in steps if f"{CHECKPOINTS}/{path.name}/{MANIFEST}" not in self._there]
        for path in self._plain_files():
            self._send(path, at_once=last or bool(fresh))
        for step in sorted(fresh, key=lambda path: _order(path.name)):
            try:
                parts = [path for path in sorted(step.rglob("*")) if path.is_file() and path.name != MANIFEST]
                for path in (*parts, step / MANIFEST):
                    self._send(path, at_once=True)
            except FileNotFoundError:  # removed meanwhile, for newer ones
                continue
        kept = {path.name for path in (self._folder / CHECKPOINTS).glob("*") if _is_whole(path)}
        gone = [name for name in self._there if name.startswith(f"{CHECKPOINTS}/") and name.split("/")[1] not in kept]
        for name in sorted(gone, key=lambda name: not name.endswith(MANIFEST)):  # no longer complete from the first on
            with contextlib.suppress(FileNotFoundError):
                self._store.remove(f"{self._name}/{name}")
            self._there.discard(name)

    def _plain_files(self) -> Iterator[Path]:
        """All files but checkpoints; the result last, since it marks the run as done."""
        paths: list[Path] = []
        for folder, folders, names in os.walk(self._folder):
            inner = Path(folder) != self._folder
            folders[:] = [name for name in folders if inner or (name not in LOCAL and name != CHECKPOINTS)]
            hidden = (".partial", ".lock")
            paths += [
                Path(folder, name) for name in names if not name.endswith(hidden) and (inner or name not in LOCAL)
            ]
        return iter(sorted(paths, key=lambda path: (path.name == "result.json", path)))

    def _send(self, path: Path, *, at_once: bool) -> None:
        assert self._there is not None
        name = path.relative_to(self._folder).as_posix()
        try:
            about = path.stat()
        except FileNotFoundError:
            if name.startswith(f"{CHECKPOINTS}/"):
                raise
            return
        state = about.st_size, about.st_mtime_ns
        if self._sent.get(name) == state or (not at_once and time.monotonic() < self._due.get(name, 0.0)):
            return
        self._store.put(f"{self._name}/{name}", path, about.st_size)
        self._sent[name] = state
        self._due[name] = time.monotonic() + about.st_size / RATE
        self._there.add(name)


@contextmanager
def mirrored(folder: Path, stopped: Callable[[], bool], say: Callable[[str], None] = _say) -> Iterator[None]:
    """Mirror of a run's folder while its training is under way; nothing for a folder without an address.

    Raises RunError if the store is out of reach at the end; after a signal (`stopped`) or an error it is only said.
    """
    url = address_of(folder)
    if url is None:
        yield
        return
    mirror = Mirror(folder, url, say)
    failed = True
    try:
        yield
        failed = stopped()
    finally:
        try:
            mirror.close(HASTE if failed else PATIENCE)
        except RunError as error:
            if not failed:
                raise
            say(str(error))
