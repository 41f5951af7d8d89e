"""Checkpoints of a run: its progress saved, and the newest intact one restored, bit for bit.

Orbax writes the arrays; it restores flipped bits silently and has no fallback, so integrity is checked here.

    checkpoints/20/progress/...      Orbax: one array a leaf, named by its path in the pytree (".state.params['w']")
    checkpoints/20/manifest.json     size and SHA-256 of each file, the table of the leaves, the caller's metadata

A checkpoint is written as `20.partial` and renamed only after its files and then its manifest are on disk. So a folder
whose name is a number was complete once, and a killed process leaves the checkpoints before it. A step saved again
becomes `20.1`, `20.2`, ...; the older ones of that step are removed after that.

What else stands in the folder stops no save: what a killed process or a user left as `NAME.partial` is removed, or
named once and left where that fails. A link to a checkpoint is read, and never removed.

`runtime.pytree_serialization` handles keys, Python numbers and empty arrays, which Orbax refuses. One run writes a
folder. Each of its processes writes and reads the data on its devices, and all call `save`, `latest` and `wait` alike.
The first process makes folders, checks integrity, and writes the manifest when all have written their parts.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from longhaul.runtime import bounded_json, files, process_group, pytree_serialization
from longhaul.runtime.devices import most_of_a_file
from longhaul.runtime.files import MANIFEST
from longhaul.types import PyTree

FORMAT = 1
ARRAYS = "progress"
PARTIAL = ".partial"
MARGIN = 1 << 20
"""Bytes of a checkpoint beyond its arrays, an upper bound."""


class CheckpointError(OSError):
    """A checkpoint that cannot be written, or none that can be read; the message is one line."""


class Damaged(Exception):
    """Reason why one checkpoint is damaged."""


class Restored(NamedTuple):
    step: int
    progress: PyTree
    metadata: dict[str, Any]


class Checkpoint(NamedTuple):
    """A verified checkpoint: each byte is as written."""

    name: str
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = self.manifest["metadata"]
        return metadata


class Checkpoints:
    """Checkpoints of one run. Reading changes nothing on disk; the first save removes a killed process's remains.

    One save is under way at a time, in a thread; its failure is raised by the next `save`, `wait`, `latest` or `close`.
    Call `close` (or use `contextlib.closing`) at the end.

        checkpoints = Checkpoints("runs/ID/checkpoints", keep=3)
        restored = checkpoints.latest(like=progress)      # None in an empty folder
        checkpoints.save(20, progress, {"agent_steps": 40960})
        checkpoints.close()
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int = 3, every: int | None = None,
        warn: Callable[[str], None] | None = None, turn: int = 0,
    ):  # fmt: skip
        """`keep` newest steps stay, at least 1; `warn` takes a line on each damaged checkpoint (default: stderr).

        With `every` the first one at or after each multiple of that many steps stays too. `turn` distinguishes the
        Checkpoints that a process opens one after the other.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}, and at least 1 checkpoint must be kept: set keep >= 1")
        self._folder = Path(folder).absolute()
        self._keep, self._every = keep, every
        self._warn = warn or (lambda line: print(line, file=sys.stderr))
        self._writer: Any = None
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._damaged: set[str] = set()
        self._stuck: set[str] = set()  # entries that could not be removed, each reported once
        self._turn, self._asked = turn, 0
        self._failures = 0

    def save(
        self, step: int, progress: PyTree, metadata: dict[str, Any] | None = None, *,
        before: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """Start of a save; returns when `progress` may be changed or donated. `metadata` must fit JSON.

        Waits for the previous save. A step may be saved again; the last one counts. The first process calls `before`;
        if it raises, the save fails in all. Raises ValueError if `progress` cannot be saved; CheckpointError if the
        disk is full or not writable. What it leaves of the step then, the next save removes.
        """
        if step < 0:
            raise ValueError(f"step is {step}, and steps of checkpoints are >= 0")
        arrays, table = pytree_serialization.split(progress)
        size = sum(array.nbytes for array in arrays.values())
        try:
            plain = json.loads(json.dumps(metadata or {}))  # as it is restored
        except (TypeError, ValueError) as error:
            raise ValueError(f"metadata of a checkpoint must be JSON: {error}") from error
        contents = {"format": FORMAT, "step": step, "bytes": size, "metadata": plain, "leaves": table}
        self.wait()
        partial = self._folder / f"{step}{PARTIAL}"
        try:
            name = process_group.share(f"save {self._turn}/{step}", lambda: self._prepare(step, size, before))
            partial = self._folder / name
            if self._writer is None:
                self._writer = _checkpointer()
            if arrays:
                self._writer.save(partial / ARRAYS, self._staging.copy(arrays))
        except Exception as error:
            raise self._failure(contents, partial, error) from error
        self._thread = threading.Thread(target=self._finish, args=(contents, partial), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until all saves are durable. Raises CheckpointError if one failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def saving(self) -> bool:
        """True while a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def latest(self, like: PyTree, *, part: bool = False) -> Restored | None:
        """Newest intact checkpoint; None if there is none at all.

        `like` has the structure, shapes and dtypes, as arrays or `jax.ShapeDtypeStruct`s; restored leaves take its
        shardings. Each damaged checkpoint is reported by a warning and skipped. Raises CheckpointError if all are
        damaged, ValueError if the newest intact one does not fit `like`.

        With `part` the checkpoint may have leaves that `like` lacks: `progress._replace(carry=(), key=())` restores the
        algorithm's state without the collector's.
        """
        newest = self.newest()
        return None if newest is None else self.restore(newest, like, part=part)

    def newest(self) -> Checkpoint | None:
        """Newest intact checkpoint with its metadata, not restored yet; warns and raises as `latest`."""
        self.wait()
        self._asked += 1
        newest = process_group.share(f"newest checkpoint {self._turn}/{self._asked}", self._newest)
        return None if newest is None else Checkpoint(*newest)

    def steps(self) -> list[int]:
        """Updates after which a checkpoint was saved that is still there, ascending."""
        return sorted({step for step, _ in _steps(self._folder)})

    def at(self, step: int) -> Checkpoint | None:
        """Checkpoint after `step` updates; None if there is none. Raises CheckpointError if it is damaged."""
        for number, path in _steps(self._folder):
            if number == step:
                try:
                    return Checkpoint(path.name, _verify(path, step))
                except Damaged as damage:
                    raise CheckpointError(
                        f"checkpoint {path.name} in {self._folder} is damaged: {damage}; name another, or leave the "
                        "step out"
                    ) from damage
        return None

    def arrays(self, checkpoint: Checkpoint, prefix: str) -> dict[str, np.ndarray]:
        """Arrays of a checkpoint whose names begin with `prefix`, by name, on the host.

        Raises CheckpointError where its files hold others than its manifest says, or more than memory does: zeros take
        no room in a file.
        """
        targets = {
            name: np.broadcast_to(np.zeros((), entry["dtype"]), entry["shape"])
            for name, entry in checkpoint.manifest["leaves"].items()
            if name.startswith(prefix) and pytree_serialization.is_stored(entry) and "key" not in entry
        }
        if wrong := _unlike_stored(self._folder / checkpoint.name / ARRAYS, targets) if targets else "":
            raise CheckpointError(f"{self._folder / checkpoint.name}: {wrong}")
        values = _read(self._folder / checkpoint.name / ARRAYS, targets) if targets else {}
        return {name: np.asarray(value) for name, value in values.items()}

    def restore(self, checkpoint: Checkpoint, like: PyTree, *, part: bool = False) -> Restored:
        """Restored progress of a checkpoint from `newest`."""
        progress = _restore(self._folder / checkpoint.name, checkpoint.manifest, like, part)
        return Restored(checkpoint.step, progress, checkpoint.metadata)

    def _newest(self) -> tuple[str, dict[str, Any]] | None:
        """(name, manifest) of the newest intact checkpoint, None if there is none at all."""
        steps = _steps(self._folder)
        reasons = []
        for step, path in steps:
            try:
                return path.name, _verify(path, step)
            except Damaged as damage:
                self._damaged.add(path.name)
                reasons.append(f"{path.name} ({damage})")
                self._warn(f"checkpoint {path.name} in {self._folder} is damaged and skipped: {damage}")
        if steps:
            raise CheckpointError(
                f"all {len(steps)} checkpoints in {self._folder} are damaged: {'; '.join(reasons)}; "
                "bring back a copy of the folder, or start a new run"
            )
        return None

    def close(self) -> None:
        """Wait for the last save and free Orbax's threads. Raises as `wait`."""
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def _prepare(self, step: int, size: int, before: Callable[[], object] | None) -> str:
        """Name of the partial step, made; an interrupted save's remains are removed."""
        if before is not None:
            before()
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True)
            files.sync(self._folder.parent)
        for left in self._folder.glob(f"*{PARTIAL}"):
            self._remove(left)
        if _free_bytes(self._folder) < size + MARGIN:  # Orbax would fail too, but litter stderr
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        partial = self._partial(str(step))
        partial.mkdir()
        return partial.name

    def _partial(self, name: str) -> Path:
        """Free path for a partial checkpoint: what could not be removed has kept the others, and writes of a save that
        failed may go on in its own."""
        taken = {path.name for path in self._folder.iterdir()}
        names = (f"{name}{(n and f'-{n}') or ''}{PARTIAL}" for n in itertools.count(self._failures))
        return self._folder / next(name for name in names if name not in taken)

    def _remove(self, path: Path) -> None:
        """Remove an entry, a checkpoint under another name: a half-removed one must not pass for one."""
        try:
            if not path.name.endswith(PARTIAL):
                path = path.rename(self._partial(path.name))
            files.remove(path)
        except OSError as error:
            if path.name not in self._stuck:
                self._warn(f"cannot remove {path}, which is left: {_reason(error)}")
            self._stuck.add(path.name)

    def _finish(self, contents: dict[str, Any], partial: Path) -> None:
        """Rest of a save, in its thread: wait for Orbax, make all durable, rename the step, remove old ones."""
        try:
            self._writer.wait_until_finished()  # all processes wrote their parts
            if process_group.index() > 0:
                return
            contents["files"] = {name: _digest(path, sync=True) for name, path in _files(partial)}
            for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
                files.sync(folder)
            _write(partial / MANIFEST, _render(contents))
            taken = [path.name for step, path in _steps(self._folder) if step == contents["step"]]
            again = f".{int((taken[0].split('.') + ['0'])[1]) + 1}" if taken else ""
            final = self._folder / f"{contents['step']}{again}"
            os.rename(partial, final)
            files.sync(self._folder)
        except Exception as error:
            self._error = self._failure(contents, partial, error)
            return
        try:
            self._prune(contents["step"], final)
        except OSError as error:
            self._warn(f"cannot remove old checkpoints in {self._folder}: {_reason(error)}")

    def _prune(self, step: int, final: Path) -> None:
        """Remove damaged checkpoints, and steps up to `step` beyond the `keep` newest and the `every` ones; keep
        `final`, and links to checkpoints elsewhere.
        """
        kept: set[int] = set()
        steps = _steps(self._folder)
        stay = {} if self._every is None else {
            number // self._every: number for number, path in steps  # newest first: the oldest of a stretch remains
            if number >= self._every and path.name not in self._damaged and path.is_dir()
        }  # fmt: skip
        for number, path in steps:
            damaged = path.name in self._damaged or not path.is_dir()
            old = len(kept) >= self._keep and number not in stay.values()
            surplus = number <= step and (number in kept or old)
            if path != final and (damaged or surplus):
                if not path.is_symlink():
                    self._remove(path)
                    self._damaged.discard(path.name)
            elif number <= step:
                kept.add(number)

    def _failure(self, contents: dict[str, Any], partial: Path, error: Exception) -> CheckpointError:
        """Remove the partial step; -> the error to raise."""
        if self._writer is not None:
            try:
                self._writer.wait_until_finished()
            except Exception as later:  # a full disk is the fault to report
                error = later if _is_full(later) else error
        shutil.rmtree(partial, ignore_errors=True)
        self._failures += 1
        remedy = "make room and resume" if _is_full(error) else "see to the folder and resume"
        needed = contents["bytes"] + MARGIN
        failure = CheckpointError(
            f"cannot save checkpoint {contents['step']} in {self._folder} ({needed} bytes wanted, "
            f"{_free_bytes(self._folder)} free): {_reason(error)}; those before it are intact: {remedy}"
        )
        failure.errno = _code(error)
        return failure


def _restore(path: Path, manifest: dict[str, Any], like: PyTree, part: bool) -> PyTree:
    """Pytree of a verified checkpoint, placed as `like`."""
    table, named = manifest["leaves"], pytree_serialization.name(like)
    where = f"checkpoint {path.name} in {path.parent}"
    pytree_serialization.fit(table, named, where, part=part)
    targets = {
        name: pytree_serialization.target(leaf, table[name])
        for name, leaf in named.items()
        if pytree_serialization.is_stored(table[name])
    }
    try:
        values = _read(path / ARRAYS, targets) if targets else {}
    except Exception as error:
        remedy = "use the package versions in the run's run.json"
        raise CheckpointError(f"{where} is intact, but Orbax cannot read it: {_reason(error)}; {remedy}") from error
    placed = [pytree_serialization.place(values.get(name), leaf, table[name]) for name, leaf in named.items()]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), placed)


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of all named checkpoints, newest first; of one step the last saved first."""
    entries = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = files.CHECKPOINT.fullmatch(path.name)
        if match:
            entries.append((int(match[1]), int(match[2] or 0), path))
    return [(step, path) for step, _, path in sorted(entries, key=lambda entry: entry[:2], reverse=True)]


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of all files below a checkpoint's folder but its manifest, in order."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name != MANIFEST and (path.is_symlink() or not path.is_dir()):
            yield name, path


def _digest(path: Path, *, sync: bool = False) -> list[Any]:
    """[size in bytes, SHA-256] of a file; `sync` makes it durable first."""
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _verify(path: Path, step: int) -> dict[str, Any]:
    """Manifest of a checkpoint after comparing every byte. Raises Damaged."""
    try:
        data = (path / MANIFEST).read_bytes()
        manifest = _parse(data)
        if manifest["format"] != FORMAT:
            raise ValueError(
                f"{path} is of format {manifest['format']}, and this version reads {FORMAT}: "
                "use the version in the run's run.json"
            )
        if manifest["step"] != step:
            raise Damaged(f"{MANIFEST} is that of step {manifest['step']}")
        files = dict(_files(path))
        odd = sorted(files.keys() ^ manifest["files"].keys())
        if odd:
            raise Damaged(f"{odd[0]} " + ("does not belong to it" if odd[0] in files else "is missing"))
        for name, (size, digest) in manifest["files"].items():
            length = files[name].lstat().st_size
            if length != size:
                raise Damaged(f"{name} has {length} bytes, not {size}")
            if _digest(files[name])[1] != digest:
                raise Damaged(f"{name} is not what was written (SHA-256)")
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).relative_to(path).as_posix()} is missing") from error
    except OSError as error:
        raise Damaged(f"it cannot be read: {_reason(error)}") from error
    return manifest


def _render(contents: dict[str, Any]) -> bytes:
    """Bytes of a manifest: its contents with their SHA-256, in a unique form."""
    digest = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
    return json.dumps({"sha256": digest, "contents": contents}, indent=1).encode() + b"\n"


def _parse(data: bytes) -> dict[str, Any]:
    """Contents of a manifest. Raises Damaged if a byte differs from `_render`'s."""
    try:
        contents: dict[str, Any] = bounded_json.parse(data)["contents"]
        intact = _render(contents) == data
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise Damaged(f"{MANIFEST} is not what was written")
    return contents


def _write(path: Path, data: bytes) -> None:
    """Write a file durably under another name first, so that `path` is always whole."""
    partial = path.with_name(path.name + PARTIAL)
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, path)
    files.sync(path.parent)


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _code(error: BaseException) -> int | None:
    """System error number of a failure. TensorStore raises ValueErrors that quote it."""
    quoted = re.search(r"os_error_code='(\d+)'", str(error))
    return int(quoted[1]) if quoted else error.errno if isinstance(error, OSError) else None


def _is_full(error: BaseException) -> bool:
    return _code(error) in (errno.ENOSPC, errno.EDQUOT)


def _reason(error: BaseException) -> str:
    """One short line on a failure."""
    code = _code(error)
    if code is not None:
        return "the disk is full" if _is_full(error) else os.strerror(code)
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."


def _read(path: Path, targets: dict[str, Any]) -> dict[str, Any]:
    """Arrays of `targets` from Orbax's files."""
    import orbax.checkpoint as ocp

    places = ocp.checkpoint_utils.construct_restore_args(targets)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arguments = ocp.args.PyTreeRestore(item=targets, restore_args=places, partial_restore=True)
        values: dict[str, Any] = reader.restore(path, args=arguments)
    return values


def _unlike_stored(path: Path, targets: Mapping[str, np.ndarray]) -> str:
    """Difference of stored arrays from those to be read, or "". Orbax takes the form that its own files say."""
    import orbax.checkpoint as ocp

    if (size := sum(math.prod(each.shape) * each.dtype.itemsize for each in targets.values())) > most_of_a_file():
        return f"its arrays take {size:,} bytes; {most_of_a_file():,} are possible"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        stored = reader.metadata(path).item_metadata.tree
    for name, each in targets.items():
        entry = stored.get(name)
        if entry is None or (tuple(entry.shape), np.dtype(entry.dtype)) != (each.shape, each.dtype):
            return f"{name} is stored in another form than its {MANIFEST} says"
    return ""


def _checkpointer() -> Any:
    """Orbax writer, imported late as that takes seconds. It logs tracebacks of failures, which we raise instead; so do
    the writes that go on behind the first failure, when they end and no caller waits for them any more."""
    import orbax.checkpoint as ocp

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_no_traceback)  # which is there but once
    if not isinstance(sys.unraisablehook, _NotOfLeftWrites):
        sys.unraisablehook = _NotOfLeftWrites(sys.unraisablehook)
    everyone = ocp.options.MultiprocessingOptions(
        active_processes=set(range(process_group.count()))
    )  # then threads may wait
    return ocp.StandardCheckpointer(**({"multiprocessing_options": everyone} if process_group.together() else {}))


class _NotOfLeftWrites:
    """Hook of unraisable exceptions that says nothing of a write whose event loop is closed: TensorStore's threads
    report there."""

    def __init__(self, hook: Callable[[Any], object]) -> None:
        self._hook = hook

    def __call__(self, about: Any) -> None:
        if not (isinstance(about.exc_value, RuntimeError) and str(about.exc_value) == "Event loop is closed"):
            self._hook(about)


def _is_no_traceback(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in (*Path(record.pathname).parts, *Path(record.getMessage()).parts))


LEAST = 1 << 20
"""Bytes of the smallest array that is worth a copy."""

ALIGNED = 64
"""Alignment in bytes that JAX needs to use memory without a copy."""


class Staging:
    """Memory for one copy of some arrays, which a save reads while training goes on; each overwrites the one before.

    On the CPU, saved and trained arrays share memory. A buffer under read cannot be donated, so XLA would copy it in
    the next update into fresh pages, which takes about four times as long as copying into existing pages, and training
    waits. On other devices Orbax itself copies before it returns, and nothing is done here.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], np.ndarray] = {}

    def copy(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays by name, the large ones of CPU devices as copies with the same shardings."""
        copies = dict(arrays)
        memory: dict[tuple[Any, ...], np.ndarray] = {}
        places: dict[str, list[tuple[np.ndarray, Any]]] = {}  # the parts of each large array with their devices
        work: list[tuple[np.ndarray, np.ndarray]] = []
        for name, array in arrays.items():
            if not _is_large(array):
                continue
            places[name] = []
            for shard in array.addressable_shards:
                key = name, *((part.start, part.stop) for part in shard.index)
                if key not in memory:  # devices that hold the same part share its copy
                    source = np.asarray(shard.data)
                    memory[key] = self._place(key, source)
                    work.append((memory[key], source))
                places[name].append((memory[key], shard.device))
        self._memory = memory
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            list(threads.map(lambda pair: np.copyto(*pair), work))
        for name, parts in places.items():
            shape, sharding = arrays[name].shape, arrays[name].sharding
            placed = [jax.device_put(part, device, may_alias=True) for part, device in parts]
            copies[name] = jax.make_array_from_single_device_arrays(shape, sharding, placed)
        return copies

    def _place(self, key: tuple[Any, ...], source: np.ndarray) -> np.ndarray:
        """Memory for a copy of `source`: the previous copy's if it fits."""
        before = self._memory.get(key)
        if before is not None and (before.shape, before.dtype) == (source.shape, source.dtype):
            return before
        space = np.empty(source.nbytes + ALIGNED, np.uint8)
        start = -space.ctypes.data % ALIGNED
        return space[start : start + source.nbytes].view(source.dtype).reshape(source.shape)


def _is_large(array: Any) -> bool:
    """True for a large array of CPU devices with a dtype that NumPy lays out alike."""
    if not isinstance(array, jax.Array) or array.nbytes < LEAST or array.is_deleted():
        return False
    on_cpu = all(shard.device.platform == "cpu" for shard in array.addressable_shards)
    return on_cpu and array.dtype.kind in "fiub"
