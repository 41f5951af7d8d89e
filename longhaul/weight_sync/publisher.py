"""Publisher: takes versions of a model from a trainer, and serves them to receivers by any number of transports.

`publish` copies the tensors into an image, with their digests, and returns: the version travels while training goes on,
and of several that wait only the newest is sent (latest wins). `protocol` decides which version counts; this file adds
its clock, memory and threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from longhaul.weight_sync import packing, protocol
from longhaul.weight_sync.buffers import Image, Pool
from longhaul.weight_sync.delta import version_delta
from longhaul.weight_sync.delta.version_delta import Changes
from longhaul.weight_sync.digest import library
from longhaul.weight_sync.manifest import Manifest, Tensor
from longhaul.weight_sync.protocol import STANDARD, Held, Settings, Verdict
from longhaul.weight_sync.transports.base import Parcel, Transport

IMAGES = 4
"""Images of a sender by default: one that is served, one on its way, one that waits, one that a slow reader holds."""

COPIERS = 2
"""Threads that copy a version into an image."""

LOOK = 0.01
"""Seconds between two checks of which receivers have the last version."""


class _Version(NamedTuple):
    """A gathered version."""

    manifest: Manifest
    image: Image


class Publisher:
    """Sender of versions of one run, and the `PublisherSide` of its transports.

    `epoch` is larger with each start of the trainer: by default the time, in nanoseconds. `budget` bounds the bytes of
    all images together. With `send_changes`, receivers that hold the version before get the changes since then, where
    their transport can send them and they are much smaller; this takes one image more. Example:

        with Publisher("run-7", transports=[transports.serve("shm:@weights")]) as weights:
            weights.publish(version, params)      # {name: array}; returns as soon as they are copied

    `close`, which ends the `with`, delivers the published versions to the receivers; an exception ends it at once.
    """

    def __init__(
        self,
        run: str,
        *,
        epoch: int | None = None,
        transports: Sequence[Transport] = (),
        settings: Settings = STANDARD,
        budget: int | None = None,
        send_changes: bool = False,
    ) -> None:
        self.run, self.epoch = run, time.time_ns() if epoch is None else epoch
        self.settings = settings
        self.skipped = 0  # versions for which no memory was free
        self.seconds: dict[str, float] = {}  # stages of the newest version: gather, round
        self._budget = budget
        if send_changes:
            library("zstandard")  # changes are coded by both; without them no version after the first would come
            library("numba")
        self._encodes, self._encoding = send_changes, threading.Lock()
        self._encoded: tuple[int, Changes | None] = (-1, None)  # changes of the newest version that was requested
        self._peak_changes = 0
        self._cohort = protocol.open_cohort(run, self.epoch, settings)
        self._changed = threading.Condition(threading.RLock())
        self._publishing = threading.Lock()
        self._pool: Pool | None = None
        self._planned: tuple[tuple[Tensor, ...], int] | None = None
        self._waiting: _Version | tuple[int, Mapping[str, Any]] | None = None
        self._newest = -1  # newest version that was taken from the trainer
        self._versions: dict[int, _Version] = {}  # those that are undecided, or count
        self._began = 0.0
        self._ends: dict[str, Callable[[], None]] = {}
        self._alerts: list[Callable[[], None]] = []
        self._numbers = 0
        self._ending, self._closed = False, False
        self._copiers = ThreadPoolExecutor(COPIERS, "longhaul-gather")
        self._transports: list[Transport] = []
        self._thread = threading.Thread(target=self._work, name="longhaul-publisher", daemon=True)
        self._thread.start()
        try:
            for transport in transports:
                transport.open(self)
                self._transports.append(transport)
        except BaseException:
            self.close(0.0)
            raise

    # ---------------------------------------------------------------------------------------------- for the trainer

    def publish(self, version: int, tensors: Mapping[str, Any], *, lent: bool = False, patience: float = 1.0) -> bool:
        """Takes a version; returns False where it was skipped. It replaces a version that still waits.

        `tensors` are arrays by name, in the order of layers, always of the same names, shapes and dtypes. They are
        copied before this returns, unless they are `lent`: then they must not change until `wait(version, ...)`. A
        version is skipped, and counted in `skipped`, where all images are being read for `patience` seconds. ValueError
        where versions do not grow, or the tensors have another form.
        """
        with self._publishing:
            if self._ending:
                raise ValueError("the publisher is closed; open a new one")
            self._check(version, tensors)
            self._waiting = None  # frees its image
            fresh = (version, tensors) if lent else self._gathered(version, tensors, patience)
            return fresh is not None and self._waits(version, fresh)

    def forward(self, manifest: Manifest, image: Image) -> None:
        """Takes a version of another sender as it is: what a relay does. A later epoch resets the cohort.

        Raises ValueError for another run, or an earlier epoch.
        """
        with self._publishing:
            epoch, version = manifest.epoch, manifest.version
            if manifest.run != self.run or epoch < self.epoch:
                raise ValueError(f"version {version} of {manifest.run}, epoch {epoch} can't be forwarded here")
            if epoch > self.epoch:
                self._begin(epoch)
            self._waits(version, _Version(manifest, image))

    def wait(self, version: int, seconds: float) -> bool:
        """True if the version, or a later one, counts within `seconds`."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._cohort.committed < version and version not in self._cohort.aborted and not self._closed:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._cohort.committed >= version

    def flush(self, seconds: float) -> bool:
        """Waits until every version that was taken is decided, and the present receivers serve the newest or are
        dropped; returns False where that took longer than `seconds`."""
        until = time.monotonic() + seconds
        with self._changed:
            names = set(self._cohort.receivers)
            while not self._closed and not self._settled(names):
                left = until - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._changed.wait(min(left, LOOK))
            return True

    def _settled(self, names: set[str]) -> bool:
        cohort = self._cohort
        newest = (cohort.epoch, cohort.committed)
        served = [member.held for name, member in cohort.receivers.items() if name in names]
        decided = cohort.prepared >= self._newest and cohort.round is None
        return decided and (cohort.committed < 0 or all((held.epoch, held.version) >= newest for held in served))

    def close(self, seconds: float | None = None) -> None:
        """Takes no more versions, delivers those that were taken for at most `seconds` (by default the settings'
        `deadline`; 0: at once), and closes all transports. Idempotent."""
        with self._changed:
            self._ending = True
        try:
            if self._thread is not threading.current_thread():
                self.flush(self.settings.deadline if seconds is None else seconds)
        finally:
            self._end()

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for transport in self._transports:
            transport.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._copiers.shutdown()
        self._versions.clear()
        self._waiting = None
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(None if kind is None else 0.0)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that its images and their changes ever took."""
        return self._peak_changes + (0 if self._pool is None else self._pool.peak)

    def _check(self, version: int, tensors: Mapping[str, Any]) -> None:
        if version <= self._newest:
            raise ValueError(
                f"version {version} after {self._newest}: versions grow; a restarted trainer has a new epoch"
            )
        planned = packing.describe(tensors)
        if self._planned is None:
            size = planned[1]
            usual = (IMAGES + self._encodes) * size
            self._pool = Pool(size, usual if self._budget is None else self._budget)
            self._planned = planned
        elif planned != self._planned:
            names = sorted({tensor.name for tensor in set(planned[0]) ^ set(self._planned[0])})
            raise ValueError(f"another form of tensors than before ({', '.join(names[:3])}); open a new publisher")

    def _gathered(self, version: int, tensors: Mapping[str, Any], patience: float) -> _Version | None:
        assert self._pool is not None and self._planned is not None
        image = self._pool.take(patience)
        if image is None:
            self.skipped += 1
            return None
        began = time.perf_counter()
        planned, size = self._planned
        gathered = packing.gather(tensors, planned, image.array, self._copiers, COPIERS)
        self.seconds["gather"] = time.perf_counter() - began
        return _Version(Manifest(self.run, self.epoch, version, -1, size, gathered), image)

    def _waits(self, version: int, published: _Version | tuple[int, Mapping[str, Any]]) -> bool:
        """Queues a version; False where `close` was called before."""
        with self._changed:
            if self._ending:
                return False
            self._newest = version
            self._waiting = published
            self._changed.notify_all()
            return True

    def _begin(self, epoch: int) -> None:
        with self._changed:
            for name in list(self._cohort.receivers):
                self.gone(name, "a new epoch begins")
            self.epoch, self._newest = epoch, -1
            self._versions.clear()
            self._encoded = (-1, None)
            self._cohort = protocol.open_cohort(self.run, epoch, self.settings)

    # ------------------------------------------------------------------------------------------------ its own thread

    def _work(self) -> None:
        """Prepares the waiting version when none is undecided, and applies the passing of time."""
        while not self._closed:
            version = self._next()
            if version is not None:
                self._prepare(version)
            del version  # or its image would not return while this thread waits

    def _next(self) -> _Version | None:
        """Waiting version, gathered; None where there is none yet, or time has passed."""
        with self._changed:
            self._apply(lambda cohort: protocol.tick(cohort, time.monotonic()))
            if self._waiting is None or self._cohort.round is not None:
                wake = protocol.wakes(self._cohort)
                if not self._closed:
                    self._changed.wait(None if wake is None else max(0.0, wake - time.monotonic()) + 0.001)
                return None
            waiting, self._waiting = self._waiting, None
        if isinstance(waiting, _Version):
            return waiting
        fresh = self._gathered(*waiting, 0.0)
        if fresh is None:  # it is not skipped: it waits on
            with self._changed:
                self.skipped -= 1
                self._waiting = self._waiting or waiting
                self._changed.wait(0.005)
        return fresh

    def _prepare(self, fresh: _Version) -> None:
        version, root = fresh.manifest.version, fresh.manifest.root
        with self._changed:
            if version <= self._cohort.prepared or self._cohort.round is not None:
                return  # another epoch has begun
            self._versions[version] = fresh
            self._began = time.perf_counter()
            self._apply(lambda cohort: protocol.prepare(cohort, version, root, time.monotonic()))

    def _apply(self, step: Callable[[protocol.Cohort], protocol.Cohort]) -> None:
        """Applies one step of the protocol and its consequences. ProtocolError leaves everything as it was."""
        with self._changed:
            before = self._cohort
            after = self._cohort = step(before)
            undecided = None if after.round is None else after.round.version
            if (before.prepared, before.round is None) != (after.prepared, after.round is None):
                if undecided is None:
                    self.seconds["round"] = time.perf_counter() - self._began
                keep = {after.committed, undecided, after.before[0] if self._encodes else None}
                self._versions = {version: kept for version, kept in self._versions.items() if version in keep}
                self._changed.notify_all()
                for changed in self._alerts:
                    changed()
            ended = [self._ends.pop(name, None) for name in before.receivers.keys() - after.receivers.keys()]
        for end in ended:
            if end is not None:
                end()

    # -------------------------------------------------------------------------------------------- for its transports

    def bind(self, name: str, held: Held) -> str:
        with self._changed:
            self._numbers += 1
            name = f"{name[:80]}#{self._numbers}"
            self._apply(lambda cohort: protocol.bind(cohort, name, held, time.monotonic()))
            return name

    def alert(self, changed: Callable[[], None]) -> None:
        self._alerts.append(changed)

    def watch(self, name: str, end: Callable[[], None]) -> None:
        with self._changed:
            protocol.receiver(self._cohort, name)
            self._ends[name] = end

    def heard(self, name: str) -> None:
        self._apply(lambda cohort: protocol.heard(cohort, name, time.monotonic()))

    def ask(self, name: str, wait: float) -> tuple[Parcel, Image] | None:
        until = time.monotonic() + wait
        with self._changed:
            while True:
                self.heard(name)
                self._cohort, offered = protocol.offer(self._cohort, name, time.monotonic())
                if offered is not None:
                    version = self._versions[offered.version]
                    return Parcel(offered, version.manifest), version.image
                left = until - time.monotonic()
                if left <= 0 or self._closed:
                    return None
                self._changed.wait(left)

    def changes(self, parcel: Parcel, image: Image) -> Changes | None:
        base, version = parcel.offer.base, parcel.offer.version
        if not self._encodes or base < 0:
            return None
        with self._encoding:
            if self._encoded[0] != version:
                self._encoded = (-1, None)
                with self._changed:
                    before = self._versions.get(base)
                if before is None:
                    return None
                began = time.perf_counter()
                changes = version_delta.make(
                    before.manifest, before.image.array, parcel.manifest, image.array, self._copiers
                )
                self.seconds["encode"] = time.perf_counter() - began
                size = 0 if changes is None else len(changes.body)
                if self._budget is not None and self._pool is not None and self._pool.bytes + size > self._budget:
                    changes, size = None, 0
                self._peak_changes = max(self._peak_changes, size)
                self._encoded = (version, changes)
            changes = self._encoded[1]
            return changes if changes is not None and changes.base == base else None

    def sent_changes(self, version: int) -> int | None:
        """Bytes of the changes that were sent for this version; None where it went whole."""
        with self._encoding:
            number, changes = self._encoded
            return len(changes.body) if changes is not None and number == version else None

    def ready(self, name: str, version: int, root: bytes, wait: float) -> Verdict:
        until = time.monotonic() + wait
        with self._changed:
            self._apply(lambda cohort: protocol.ready(cohort, name, version, root, time.monotonic()))
            while True:
                verdict = protocol.verdict(self._cohort, version)
                left = until - time.monotonic()
                if verdict is not Verdict.WAIT or left <= 0 or self._closed:
                    return verdict
                self._changed.wait(left)

    def failed(self, name: str, version: int, why: str) -> None:
        self._apply(lambda cohort: protocol.failed(cohort, name, version, why, time.monotonic()))

    def done(self, name: str, held: Held) -> None:
        self._apply(lambda cohort: protocol.done(cohort, name, held, time.monotonic()))

    def gone(self, name: str, why: str) -> None:
        self._apply(lambda cohort: protocol.drop(cohort, name, why))

    def _image_bytes(self) -> int:
        """Bytes of a version's image: a relay has no plan, but the images that came."""
        if self._planned is not None:
            return self._planned[1]
        return max((version.manifest.size for version in self._versions.values()), default=0)

    def status(self) -> dict[str, Any]:
        """Status for people and other programs: the version that is served, its receivers, the one on its way."""
        with self._changed:
            now, cohort = time.monotonic(), self._cohort
            receivers = [
                {"name": name, "epoch": member.held.epoch, "version": member.held.version, "phase": str(member.phase)}
                | {"target": member.target, "lease_seconds": round(member.lease - now, 1), "failures": member.failures}
                for name, member in sorted(cohort.receivers.items())
            ]
            return {
                "run": self.run,
                "epoch": self.epoch,
                "version": cohort.committed,
                "root": cohort.root.hex(),
                "undecided": None if cohort.round is None else cohort.round.version,
                "receivers": receivers,
                "dropped": [list(each) for each in cohort.dropped[-8:]],
                "skipped": self.skipped,
                "image_bytes": self._image_bytes(),
                "peak_bytes": self.peak_bytes,
            }
