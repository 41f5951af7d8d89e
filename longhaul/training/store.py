"""Stores of runs: a run at an address (s3://, gs://, az://, or any of fsspec) is a local folder with a mirror there.

A run trains in a staging folder, as every run does. A thread, the `Mirror`, copies what is new to the address, under
the same names. A checkpoint's manifest goes last, after its files and after the metrics that belong to it; so whatever
moment a machine is lost at, the store holds a run that can be resumed. Training never waits for the store: while that
is out of reach the thread tries again, and catches up.

To resume, or to read a run, `fetched` brings its files into the staging folder, with the newest complete checkpoint.
The checkpoint's own digests tell whether each byte is as written; a damaged one is dropped for the one before.

S3, Google Cloud Storage and Azure are reached through obstore, with the credentials of their usual environment
variables (AWS_ENDPOINT_URL for a server of one's own); other addresses through fsspec.
"""

from __future__ import annotations

import contextlib
import datetime as dt
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from longhaul.runtime import bounded_json, cache_dir, files
from longhaul.runtime.errors import RunError, did_you_mean
from longhaul.runtime.files import MANIFEST

MARK = "store.json"
"""File of a staging folder: the address that it is mirrored to."""

CHECKPOINTS = "checkpoints"

LOCAL = {MARK, "wandb", "swanlab", "swanlab.session"}
"""Entries of a run's folder that stay local."""

CLOUDS = ("s3", "s3a", "gs", "az", "abfs", "abfss")
"""Schemes that obstore serves."""

PERIOD = 5.0
"""Seconds between two looks at the folder."""

RATE = 1e6
"""Bytes a second, at most, at which files that grow are sent again: a log of 100 MB goes every 100 s."""

PAUSES = (1.0, 30.0)
"""Seconds before the first new try of a store that is out of reach, and the most between two."""

PATIENCE, HASTE = 120.0, 15.0
"""Seconds that the end of a run waits for a store that is out of reach; likewise after a signal or an error."""


def address(path: str | os.PathLike[str]) -> str | None:
    """Address of a store that `path` stands for, also where a `Path` has folded its slashes; None for a folder."""
    match = re.fullmatch(r"([a-z][a-z0-9+.-]+):(?:/+(.*?)/*)?", str(path))
    return None if match is None else f"{match[1]}://{'/' * (match[1] in ('file', 'local'))}{match[2] or ''}"


def staging(url: str) -> Path:
    """Local folder in which the runs of the address `url` are trained: in $LONGHAUL_STAGING, or the cache."""
    folder = os.environ.get("LONGHAUL_STAGING")
    base = Path(folder).expanduser().absolute() if folder else cache_dir.folder("runs")
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", url)[:80] + "-" + hashlib.sha256(url.encode()).hexdigest()[:8]
    return (base or Path(tempfile.gettempdir(), "longhaul-runs")) / name


class Unreachable(OSError):
    """A store that gives no answer, or refuses; the message is one line."""


class Objects(Protocol):
    """Objects below an address, by name. Errors are the library's own, and FileNotFoundError."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each object whose name begins with the folder `prefix`."""
        ...

    def has(self, name: str) -> bool: ...

    def put(self, name: str, path: Path, size: int) -> int:
        """Bytes of the object that gets the first `size` bytes of a file, more where it has grown."""
        ...

    def get(self, name: str, path: Path) -> None: ...

    def remove(self, name: str) -> None: ...


CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS to the file of a service account's key",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Variables that a store's credentials are read from, by scheme."""


class Cloud:
    """Objects of S3, Google Cloud Storage or Azure, by obstore."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
        except ImportError as error:
            raise RunError(f"{url} needs obstore: pip install 'longhaul-rl[stores]'") from error
        from obstore.exceptions import NotFoundError

        scheme, _, path = url.partition("://")
        if not path.split("/")[0]:
            raise RunError(f"{url} names no bucket; give {scheme}://BUCKET/FOLDER")
        self._obstore, self._missing = obstore, (FileNotFoundError, NotFoundError)
        try:
            self._store = obstore.store.from_url(
                url,
                client_options={"allow_http": True, "timeout": "60s", "connect_timeout": "5s"},
                retry_config={"max_retries": 2, "retry_timeout": dt.timedelta(seconds=20)},
            )
        except Exception as error:  # an account or a setting that is missing
            raise RunError(f"{url}: {_line(error)}; set {CREDENTIALS.get(scheme, CREDENTIALS['s3'])}") from error

    def sizes(self, prefix: str) -> dict[str, int]:
        pages = self._obstore.list(self._store, prefix or None)
        return {entry["path"]: int(entry["size"]) for page in pages for entry in page}

    def has(self, name: str) -> bool:
        try:
            self._obstore.head(self._store, name)
        except self._missing:
            return False
        return True

    def put(self, name: str, path: Path, size: int) -> int:
        with open(path, "rb") as file:  # a large file goes in parts
            self._obstore.put(self._store, name, file.read(size) if size <= WHOLE else file)
        return int(self._obstore.head(self._store, name)["size"])

    def get(self, name: str, path: Path) -> None:
        try:
            with open(path, "wb") as file:
                for part in self._obstore.get(self._store, name).stream(min_chunk_size=WHOLE):
                    file.write(part)
        except self._missing as error:
            raise FileNotFoundError(name) from error

    def remove(self, name: str) -> None:
        self._obstore.delete(self._store, name)


class Fsspec:
    """Objects of any other address, by fsspec."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise RunError(f"{url} needs fsspec: pip install 'longhaul-rl[stores]'") from error
        scheme = url.partition(":")[0]
        known = sorted({*CLOUDS, *fsspec.available_protocols()})
        if scheme not in known:
            near = difflib.get_close_matches(scheme, known, n=3) or ["s3", "gs", "az"]
            raise RunError(f"{url}: no store has the scheme {scheme!r}; did you mean {' or '.join(near)}?")
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, TypeError, OSError) as error:
            raise RunError(f"{url} can't be opened ({_line(error)}); install what it needs, or give another") from error
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        self._fs.invalidate_cache()
        return f"{self._root}/{name}".rstrip("/")

    def sizes(self, prefix: str) -> dict[str, int]:
        try:
            local_folder = self._fs.find(self._path(prefix), detail=True)
        except FileNotFoundError:  # a folder that nobody has made
            return {}
        begin = len(self._root.lstrip("/")) + 1
        return {name.lstrip("/")[begin:]: int(about["size"]) for name, about in local_folder.items()}

    def has(self, name: str) -> bool:
        return bool(self._fs.exists(self._path(name)))

    def put(self, name: str, path: Path, size: int) -> int:
        target = self._path(name)
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        if size > WHOLE:
            self._fs.put_file(str(path), target)
        else:
            with open(path, "rb") as file:
                self._fs.pipe_file(target, file.read(size))
        return int(self._fs.info(self._path(name))["size"])

    def get(self, name: str, path: Path) -> None:
        self._fs.get_file(self._path(name), str(path))

    def remove(self, name: str) -> None:
        self._fs.rm_file(self._path(name))


class Store:
    """Objects below an address, whose every method raises Unreachable, or FileNotFoundError."""

    def __init__(self, url: str) -> None:
        """RunError where the scheme is unknown or its library missing; nothing is contacted."""
        self.url = url
        self._objects: Objects = Cloud(url) if url.partition(":")[0] in CLOUDS else Fsspec(url)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of each object whose name begins with the folder `prefix`, by name.

        Those whose name as a path leads out of its folder are left out.
        """
        with self._asking():
            local_folder = self._objects.sizes(prefix)
        return {name: size for name, size in local_folder.items() if not {"", ".", ".."} & set(name.split("/"))}

    def has(self, name: str) -> bool:
        with self._asking():
            return self._objects.has(name)

    def put(self, name: str, path: Path, size: int) -> None:
        with self._asking():
            uploaded = self._objects.put(name, path, size)
        if uploaded < size:
            raise Unreachable(f"{self.url}/{name} has {uploaded} bytes, and {size} were sent")

    def get(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.partial")
        with self._asking():
            self._objects.get(name, beside)
        os.replace(beside, path)

    def remove(self, name: str) -> None:
        with self._asking():
            self._objects.remove(name)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each library has errors of its own
            if isinstance(error, RunError) or (
                isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error)
            ):
                raise
            raise Unreachable(_reason(self.url, error)) from error


WHOLE = 8 << 20
"""Bytes above which a file is sent in parts instead of through memory."""


def _line(error: BaseException) -> str:
    """First line of an error's text, at most 200 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _reason(url: str, error: Exception) -> str:
    """One line on why a store did not answer, with the remedy where it is known."""
    text = str(error)
    if "NoSuchBucket" in text:
        return f"{url}: there is no such bucket; make it, or give another address"
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        scheme = url.partition("://")[0]
        return f"{url}: no credentials are set; set {CREDENTIALS.get(scheme, CREDENTIALS['s3'])}"
    if any(word in text for word in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403 Forbidden")):
        return f"{url}: the credentials that are set are refused; give others, or ask for the right to read and write"
    return f"{url} is out of reach ({_line(error)}); see to the network and the address"


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
        sizes = {path.removeprefix(f"{name}/"): size for path, size in store.sizes(name).items()}
        remote = _complete(sizes)
        newest = max((_order(path.name) for path in (folder / CHECKPOINTS).glob("*") if _is_whole(path)), default=None)
        if (folder / "run.json").is_file() and newest is not None and (not remote or newest >= _order(remote[0])):
            return folder
        for path in sorted(sizes):
            if not path.startswith(f"{CHECKPOINTS}/") and path not in LOCAL:
                store.get(f"{name}/{path}", folder / path)
        for step in remote:
            target = folder / CHECKPOINTS / step
            if not _is_whole(target):
                beside = target.with_name(f"{step}.partial")
                files.remove(beside) if beside.exists() else None
                for path in (path for path in sizes if path.startswith(f"{CHECKPOINTS}/{step}/")):
                    store.get(f"{name}/{path}", beside / path.removeprefix(f"{CHECKPOINTS}/{step}/"))
                if not _is_intact(beside):
                    _say(f"checkpoint {step} in {store.url}/{name} is damaged and skipped")
                    files.remove(beside)
                    continue
                beside.rename(target)
            break
        (folder / MARK).write_text(json.dumps({"address": f"{store.url}/{name}"}) + "\n")
    return folder


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
            sizes = {path.removeprefix(f"{self._name}/"): size for path, size in self._store.sizes(self._name).items()}
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
        local_folder = []
        for folder, folders, names in os.walk(self._folder):
            inner = Path(folder) != self._folder
            folders[:] = [name for name in folders if inner or (name not in LOCAL and name != CHECKPOINTS)]
            hidden = (".partial", ".lock")
            local_folder += [
                Path(folder, name) for name in names if not name.endswith(hidden) and (inner or name not in LOCAL)
            ]
        return iter(sorted(local_folder, key=lambda path: (path.name == "result.json", path)))

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
