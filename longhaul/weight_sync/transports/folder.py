"""The durable lane: versions as folders of safetensors files that outlive every process, on a disk or a shared mount.

The sender's end is a receiver as any other: it stages by writing, is ready when all is on the disk, and commits by a
rename. Readers look at the folder alone; nobody knows of them. A full disk fails one version after the other, each
quickly, and never the trainer; when there is room again, it goes on by itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.weight_sync.buffers import Image
from longhaul.weight_sync.delta import backend, version_delta
from longhaul.weight_sync.manifest import Manifest
from longhaul.weight_sync.protocol import NOTHING, Held, Offer, ProtocolError, Verdict
from longhaul.weight_sync.transports import delta_chain, safetensors_files
from longhaul.weight_sync.transports.base import Hub, Parcel, Staging

SECONDS = 600.0
"""Until a reader must have read a version."""

FIRST_LOOK, LONGEST_LOOK = 0.02, 0.5
"""Seconds between two looks at a folder."""

PAUSE = 0.2
"""Seconds before a writer that was dropped comes again."""


class FolderLane:
    """Writes the versions of a hub into a folder. `keep` is how many stay; shards have at most `shard` bytes.

    Every `anchor`-th version at least is whole; between them are written what changed since the one before (`chain`),
    where that is less than half. Then the lane holds the image that it wrote last, one more of the sender's. `beside`
    are files that lie in each version's folder (a model's config.json), by name.
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 3, shard: int = safetensors_files.SHARD, durable: bool = True,
        anchor: int = 1, beside: Mapping[str, bytes] | None = None,
    ) -> None:  # fmt: skip
        if keep < 1 or shard < 1 or anchor < 1:
            raise ValueError(f"keep {keep} versions, in shards of {shard} bytes, each {anchor}th whole: all at least 1")
        if odd := [name for name in beside or {} if Path(name).name != name or name.startswith((".", "model"))]:
            raise ValueError(f"{odd[0]!r} can't be a file's name beside a version's; give a plain name")
        if anchor > 1:
            backend.library("zstandard")  # which changes are coded with; without it no version after the first came
        self._anchor, self._beside = anchor, dict(beside or {})
        self._before: tuple[Manifest, Image] | None = None  # what was written last, for changes upon it
        self._links = 0  # versions since the last whole one
        self.folder, self.address = Path(folder), f"folder:{folder}"
        self._keep, self._shard, self._durable = keep, shard, durable
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.errors: list[str] = []  # the newest last, at most 32

    def open(self, hub: Hub) -> None:
        """ValueError where the folder can't be written, or belongs to another run or a later epoch."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held = self._held()
        except OSError as error:
            raise ValueError(f"{self.folder}: {error.strerror}") from error
        name = hub.bind("folder", held)
        self._thread = threading.Thread(target=self._follow, args=(hub, name), name="longhaul-folder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._before = None

    @property
    def latest(self) -> Path | None:
        """The folder of the latest version; None where there is none."""
        found = safetensors_files.newest(self.folder)
        return None if found is None else self.folder / safetensors_files.folder_name(*found)

    def _held(self) -> Held:
        """What is in the folder; NOTHING where its latest version is none."""
        latest = safetensors_files.newest(self.folder)
        with contextlib.suppress(OSError, ValueError):
            if latest is not None:
                found = safetensors_files.read_manifest(self.folder / safetensors_files.folder_name(*latest))
                return Held(found.run, found.epoch, found.version, found.root)
        return NOTHING

    def _follow(self, hub: Hub, name: str) -> None:
        while not self._closed.is_set():
            why = "it has closed"
            try:
                name = name or hub.bind("folder", self._held())
                while not self._closed.is_set():
                    carried = hub.ask(name, min(1.0, hub.settings.lease / 3))
                    if carried is not None:
                        self._take(hub, name, *carried)
                    del carried
            except (OSError, ValueError) as error:
                why = str(error)
                self._note(why)
            finally:
                if name:
                    hub.gone(name, why)
                name = ""
            self._closed.wait(PAUSE)

    def _take(self, hub: Hub, name: str, parcel: Parcel, image: Image) -> None:
        version, root = parcel.offer.version, parcel.offer.root
        try:
            staging, links = self._staged(parcel, image)
        except (OSError, safetensors_files.Damaged) as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "the disk is full" if full else str(error)
            self._note(f"version {version}: {why}")
            hub.failed(name, version, why)
            return
        found = Verdict.WAIT
        while found is Verdict.WAIT and not self._closed.is_set():
            found = hub.ready(name, version, root, min(1.0, hub.settings.lease / 3))
        if found is Verdict.COMMIT:
            with self._locked():
                latest = self._held()
                if (latest.epoch, latest.version) >= (parcel.offer.epoch, version):
                    raise ProtocolError(f"{self.folder} has version {latest.version} of epoch {latest.epoch} already")
                safetensors_files.publish(staging, parcel.manifest, self._durable)
                delta_chain.prune(self.folder, self._keep)
            if self._anchor > 1:
                self._before, self._links = (parcel.manifest, image), links
        else:
            shutil.rmtree(staging, ignore_errors=True)
        hub.done(name, self._held())

    def _staged(self, parcel: Parcel, image: Image) -> tuple[Path, int]:
        """(what is staged, how many links its chain then has)."""
        written = self._changes(parcel.manifest, image)
        if written is not None:
            return written, self._links + 1
        for room in (False, True):
            try:
                whole = parcel.manifest, image.array, self.folder, self._shard, self._durable, self._beside
                return safetensors_files.stage(*whole), 0
            except OSError as error:
                if room or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
            delta_chain.prune(self.folder, 1)  # what is older than the latest makes room
        raise AssertionError

    def _changes(self, manifest: Manifest, image: Image) -> Path | None:
        """What changed since the version before, staged; None where the whole is due, or as good."""
        if self._before is None or self._links + 1 >= self._anchor:
            return None
        base, before = self._before
        if self._held().root != base.root:  # somebody else has written
            return None
        found = version_delta.make(base, before.array, manifest, image.array)
        if found is None:
            return None
        with contextlib.suppress(OSError):  # full, say: the whole may tell more
            return delta_chain.stage(manifest, base, found.body, self.folder, self._durable, self._beside)
        return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among writers of the folder, of whatever process."""
        with (self.folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _note(self, line: str) -> None:
        self.errors = [*self.errors, line][-32:]


class FolderSource:
    """A reader's end (`lanes.base.Source`): looks, reads, and tells nobody."""

    moves = True

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._interrupted = threading.Event()

    def bind(self, held: Held, seconds: float) -> None:
        """Nobody is there to be told."""

    def ask(self, held: Held, wait: float) -> Parcel | None:
        until, pause = time.monotonic() + wait, FIRST_LOOK
        while True:
            found = self._newer(held)
            left = until - time.monotonic()
            if found is not None or left <= 0:
                return found
            if self._interrupted.wait(min(pause, left)):
                raise ConnectionAbortedError("interrupted")
            pause = min(2 * pause, LONGEST_LOOK)

    def _newer(self, held: Held) -> Parcel | None:
        latest = safetensors_files.newest(self.folder)
        if latest is None or latest == (held.epoch, held.version):
            return None
        try:
            found = safetensors_files.read_manifest(self.folder / safetensors_files.folder_name(*latest))
        except FileNotFoundError:
            return None  # a later one has taken its place
        if (found.epoch, found.version) != latest:
            raise ProtocolError(f"{self.folder}: the manifest is of another version than its folder")
        return Parcel(Offer(found.run, found.epoch, found.version, -1, found.root, SECONDS), found)

    def fetch(self, parcel: Parcel, staging: Staging, seconds: float) -> np.ndarray:
        image = staging.take(parcel.manifest.size)[: parcel.manifest.size]
        delta_chain.read(self.folder, parcel.manifest, image, staging.base, staging.arrived)
        return image

    def ready(self, held: Held, version: int, root: bytes, wait: float) -> Verdict:
        return Verdict.COMMIT  # what has a version's name counts

    def failed(self, version: int, why: str) -> None:
        if self._interrupted.wait(PAUSE):  # it will be there again
            raise ConnectionAbortedError("interrupted")

    def done(self, held: Held) -> None:
        """Nobody is there to be told."""

    def status(self) -> dict[str, Any]:
        """What is in the folder."""
        latest = safetensors_files.newest(self.folder)
        found = (
            None
            if latest is None
            else safetensors_files.read_manifest(self.folder / safetensors_files.folder_name(*latest))
        )
        return {
            "run": "" if found is None else found.run,
            "epoch": -1 if found is None else found.epoch,
            "version": -1 if found is None else found.version,
            "root": "" if found is None else found.root.hex(),
            "versions": sorted(safetensors_files.versions(self.folder)),
            "image_bytes": 0 if found is None else found.size,
            "receivers": [],
        }

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self._interrupted.set()
