"""The sender: takes versions of a model from a trainer, and serves them to receivers by any number of lanes.

`publish` copies the tensors into an image, with their digests, and returns: the version travels while training goes on,
and of several that wait only the newest goes (latest wins). What counts when is `protocol`'s to say; here are its
clock, its memory and its threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from longhaul.weight_sync import image as images
from longhaul.weight_sync import protocol
from longhaul.weight_sync.buffers import Image, Pool
from longhaul.weight_sync.delta import backend, version_delta
from longhaul.weight_sync.delta.version_delta import Changes
from longhaul.weight_sync.manifest import Manifest, Tensor
from longhaul.weight_sync.protocol import STANDARD, Held, Settings, Verdict
from longhaul.weight_sync.transports.base import Lane, Parcel

IMAGES = 4
"""How many images a sender has unless a budget says otherwise: one that is served, one on its way, one that waits, and
one that a slow reader has not let go."""

LOOK = 0.01
"""Seconds between two looks at who has the last version."""


class _Made(NamedTuple):
    manifest: Manifest
    image: Image


class Publisher:
    """A sender of versions of one run. Also the hub that its lanes speak with (`lanes.base.Hub`).

    `epoch` is larger with each start of the trainer: by default the time, in nanoseconds. `budget` bounds the bytes of
    all images together. With `send_changes`, receivers that hold the version before get what changed since, where
    their lane can and it is much less; then one image more is kept. Example:

        with Publisher("run-7", lanes=[lanes.serve("shm:@weights")]) as weights:
            weights.publish(version, params)      # {name: array}; returns as soon as they are copied

    Its end, as `close`, brings what was taken to who follows; an error ends it at once.
    """

    def __init__(
        self,
        run: str,
        *,
        epoch: int | None = None,
        lanes: Sequence[Lane] = (),
        settings: Settings = STANDARD,
        budget: int | None = None,
        send_changes: bool = False,
        threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.epoch = run, time.time_ns() if epoch is None else epoch
        self.settings = settings
        self.skipped = 0  # versions for which there was no memory
        self.seconds: dict[str, float] = {}  # of the newest version: gather, round
        self._budget, self._threads, self._clock = budget, threads, clock
        if send_changes:
            backend.library("zstandard")  # which changes are coded with
        self._encodes, self._encoding = send_changes, threading.Lock()
        self._encoded: tuple[int, Changes | None] = (-1, None)  # of the newest version that was asked for
        self._peak_changes = 0
        self._cohort = protocol.open_cohort(run, self.epoch, settings)
        self._changed = threading.Condition(threading.RLock())
        self._publishing = threading.Lock()
        self._pool: Pool | None = None
        self._planned: tuple[tuple[Tensor, ...], int] | None = None
        self._waiting: _Made | tuple[int, Mapping[str, Any]] | None = None
        self._ahead: _Made | None = None  # that is arriving
        self._given = -1
        self._made: dict[int, _Made] = {}  # what is undecided, and what counts
        self._began = 0.0
        self._ends: dict[str, Callable[[], None]] = {}
        self._numbers = 0
        self._ending, self._closed = False, False
        self._copiers = ThreadPoolExecutor(max(1, threads), "longhaul-gather")
        self._lanes: list[Lane] = []
        self._thread = threading.Thread(target=self._work, name="longhaul-publisher", daemon=True)
        self._thread.start()
        try:
            for lane in lanes:
                self.add(lane)
        except BaseException:
            self.close(0.0)
            raise

    def add(self, lane: Lane) -> None:
        """One more lane, now."""
        lane.open(self)
        self._lanes.append(lane)

    # ---------------------------------------------------------------------------------------------- for the trainer

    def publish(self, version: int, tensors: Mapping[str, Any], *, lent: bool = False, patience: float = 1.0) -> bool:
        """Takes a version; -> whether it was taken. It replaces one that still waits.

        `tensors` are arrays by name, in the order of layers, of one form throughout. They are copied before this
        returns, unless they are `lent`: then they must stay as they are until `wait(version, ...)`. Where all images
        are being read for `patience` seconds, the version is skipped: False, and `skipped` counts it. ValueError where
        versions do not grow or the tensors have another form.
        """
        with self._publishing:
            if self._ending:
                raise ValueError("the publisher is closed")
            self._check(version, tensors)
            self._waiting = None  # its image serves again
            made = (version, tensors) if lent else self._gathered(version, tensors, patience)
            return made is not None and self._waits(version, made)

    def forward(self, manifest: Manifest, image: Image) -> None:
        """A version that came from another sender, as it is: what a relay does. A later epoch begins anew."""
        with self._publishing:
            epoch, version = manifest.epoch, manifest.version
            if manifest.run != self.run or epoch < self.epoch:
                raise ValueError(f"version {version} of {manifest.run}, epoch {epoch} can't be forwarded here")
            if epoch > self.epoch:
                self._begin(epoch)
            if self._ahead is None or self._ahead.manifest.version != version:
                self._waits(version, _Made(manifest, image))
                return
            with self._changed:
                self._ends_ahead(True)
                if version in self._made:
                    self._made[version] = _Made(manifest, image)
                self._apply(lambda cohort: protocol.release(cohort, version, True, self._clock()))

    def ahead(self, manifest: Manifest, image: Image) -> bool:
        """Offers a version while its image is `arriving`; -> whether it is. Then `forward` says that it counts, or
        `withdraw` that it does not: until then it is undecided here."""
        with self._publishing, self._changed:
            known = (manifest.run, manifest.epoch) == (self.run, self.epoch) and manifest.version > self._given
            if not known or self._waiting is not None or self._cohort.round is not None:
                return False  # when it counts is soon enough
            self._ahead = _Made(manifest, image)
            self._waits(manifest.version, self._ahead)
            return True

    def withdraw(self, version: int) -> None:
        """What was offered `ahead` does not count: it is as if it had never been, and may come again."""
        with self._publishing, self._changed:
            if self._ahead is not None and self._ahead.manifest.version == version:
                self._ends_ahead(False)
                self._waiting, self._given = None, version - 1
                self._apply(lambda cohort: protocol.release(cohort, version, False, self._clock()))

    def _ends_ahead(self, counts: bool) -> None:
        made, self._ahead = self._ahead, None
        if made is not None and made.image.arriving is not None:
            made.image.arriving.counts = counts
            if not counts:
                made.image.arriving.broken()

    def wait(self, version: int, seconds: float) -> bool:
        """Whether the version, or one after it, counts within `seconds`."""
        until = self._clock() + seconds
        with self._changed:
            while self._cohort.committed < version and version not in self._cohort.aborted and not self._closed:
                left = until - self._clock()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._cohort.committed >= version

    def flush(self, seconds: float) -> bool:
        """Waits until what was taken counts, or can't, and who followed when this began serves it, or was dropped; ->
        whether that came within `seconds`."""
        until = self._clock() + seconds
        with self._changed:
            names = set(self._cohort.members)
            while not self._closed and not self._settled(names):
                left = until - self._clock()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._changed.wait(min(left, LOOK))
            return True

    def _settled(self, names: set[str]) -> bool:
        cohort = self._cohort
        newest = (cohort.epoch, cohort.committed)
        there = [one.held for name, one in cohort.members.items() if name in names]
        decided = cohort.prepared >= self._given and cohort.round is None
        return decided and (cohort.committed < 0 or all((held.epoch, held.version) >= newest for held in there))

    def close(self, seconds: float | None = None) -> None:
        """Takes no more, brings what was taken to who follows, for at most `seconds` (by default the settings'
        `deadline`; 0: at once), and ends all lanes. Idempotent."""
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
        for lane in self._lanes:
            lane.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._copiers.shutdown()
        self._made.clear()
        self._waiting = None
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(None if kind is None else 0.0)

    @property
    def peak_bytes(self) -> int:
        """The most that its images, and their changes, ever took."""
        return self._peak_changes + (0 if self._pool is None else self._pool.peak)

    def _check(self, version: int, tensors: Mapping[str, Any]) -> None:
        if version <= self._given:
            raise ValueError(
                f"version {version} after {self._given}: versions grow; a restarted trainer has a new epoch"
            )
        planned = images.describe(tensors)
        if self._planned is None:
            size = planned[1]
            usual = (IMAGES + self._encodes) * size
            self._pool = Pool(size, usual if self._budget is None else self._budget)
            self._planned = planned
        elif planned != self._planned:
            names = sorted({tensor.name for tensor in set(planned[0]) ^ set(self._planned[0])})
            raise ValueError(f"another form of tensors than before ({', '.join(names[:3])}); open a new publisher")

    def _gathered(self, version: int, tensors: Mapping[str, Any], patience: float) -> _Made | None:
        assert self._pool is not None and self._planned is not None
        image = self._pool.take(patience)
        if image is None:
            self.skipped += 1
            return None
        began = time.perf_counter()
        planned, size = self._planned
        found = images.gather(tensors, planned, image.array, self._copiers, self._threads)
        self.seconds["gather"] = time.perf_counter() - began
        return _Made(Manifest(self.run, self.epoch, version, -1, size, found), image)

    def _waits(self, version: int, what: _Made | tuple[int, Mapping[str, Any]]) -> bool:
        """-> whether it will be prepared; it is not where `close` has begun."""
        with self._changed:
            if self._ending:
                return False
            self._given = version
            self._waiting = what
            self._changed.notify_all()
            return True

    def _begin(self, epoch: int) -> None:
        with self._changed:
            for name in list(self._cohort.members):
                self.gone(name, "a new epoch begins")
            self.epoch, self._given = epoch, -1
            self._made.clear()
            self._encoded = (-1, None)
            self._cohort = protocol.open_cohort(self.run, epoch, self.settings)

    # ------------------------------------------------------------------------------------------------ its own thread

    def _work(self) -> None:
        """Prepares what waits when nothing is undecided, and lets time pass."""
        while not self._closed:
            made = self._next()
            if made is not None:
                self._prepare(made)
            del made  # or its image would not come back while we wait

    def _next(self) -> _Made | None:
        """What waits, gathered; None where it is not yet time, or time has passed."""
        with self._changed:
            self._apply(lambda cohort: protocol.tick(cohort, self._clock()))
            if self._waiting is None or self._cohort.round is not None:
                wake = protocol.wakes(self._cohort)
                if not self._closed:
                    self._changed.wait(None if wake is None else max(0.0, wake - self._clock()) + 0.001)
                return None
            what, self._waiting = self._waiting, None
        if isinstance(what, _Made):
            return what
        made = self._gathered(*what, 0.0)
        if made is None:  # it is not given up: it waits on
            with self._changed:
                self.skipped -= 1
                self._waiting = self._waiting or what
                self._changed.wait(0.005)
        return made

    def _prepare(self, made: _Made) -> None:
        version, root, arriving = made.manifest.version, made.manifest.root, made.image.arriving
        with self._changed:
            if version <= self._cohort.prepared or self._cohort.round is not None:
                return  # another epoch has begun
            if arriving is not None and arriving.counts is False:
                return
            held = arriving is not None and arriving.counts is None
            self._made[version] = made
            self._began = time.perf_counter()
            self._apply(lambda cohort: protocol.prepare(cohort, version, root, self._clock(), held))

    def _apply(self, step: Callable[[protocol.Cohort], protocol.Cohort]) -> None:
        """One step of the protocol, and what follows from it. ProtocolError leaves all as it was."""
        with self._changed:
            before = self._cohort
            after = self._cohort = step(before)
            undecided = None if after.round is None else after.round.version
            if (before.prepared, before.round is None) != (after.prepared, after.round is None):
                if undecided is None:
                    self.seconds["round"] = time.perf_counter() - self._began
                keep = {after.committed, undecided, after.before[0] if self._encodes else None}
                self._made = {version: made for version, made in self._made.items() if version in keep}
                self._changed.notify_all()
            ended = [self._ends.pop(name, None) for name in before.members.keys() - after.members.keys()]
        for end in ended:
            if end is not None:
                end()

    # ------------------------------------------------------------------------------------------------- for its lanes

    def bind(self, name: str, held: Held) -> str:
        with self._changed:
            self._numbers += 1
            name = f"{name[:80]}#{self._numbers}"
            self._apply(lambda cohort: protocol.bind(cohort, name, held, self._clock()))
            return name

    def watch(self, name: str, end: Callable[[], None]) -> None:
        with self._changed:
            protocol.member(self._cohort, name)
            self._ends[name] = end

    def heard(self, name: str) -> None:
        self._apply(lambda cohort: protocol.heard(cohort, name, self._clock()))

    def ask(self, name: str, wait: float, partly: bool = False) -> tuple[Parcel, Image] | None:
        until = self._clock() + wait
        with self._changed:
            while True:
                self.heard(name)
                cohort, offered = protocol.offer(self._cohort, name, self._clock())
                ahead = self._cohort.round is not None and self._cohort.round.held
                if offered is not None and (partly or not ahead):
                    self._cohort = cohort
                    made = self._made[offered.version]
                    return Parcel(offered, made.manifest), made.image
                left = until - self._clock()
                if left <= 0 or self._closed:
                    return None
                self._changed.wait(left)

    def changes(self, parcel: Parcel, image: Image) -> Changes | None:
        base, version = parcel.offer.base, parcel.offer.version
        if not self._encodes or base < 0 or image.arriving is not None:
            return None
        with self._encoding:
            if self._encoded[0] != version:
                self._encoded = (-1, None)
                with self._changed:
                    before = self._made.get(base)
                if before is None:
                    return None
                began = time.perf_counter()
                found = version_delta.make(
                    before.manifest, before.image.array, parcel.manifest, image.array, self._copiers
                )
                self.seconds["encode"] = time.perf_counter() - began
                size = 0 if found is None else len(found.body)
                if self._budget is not None and self._pool is not None and self._pool.bytes + size > self._budget:
                    found, size = None, 0
                self._peak_changes = max(self._peak_changes, size)
                self._encoded = (version, found)
            found = self._encoded[1]
            return found if found is not None and found.base == base else None

    def sent_changes(self, version: int) -> int | None:
        """Bytes of the changes by which the newest version went to who had the one before; None where it went whole."""
        with self._encoding:
            number, found = self._encoded
            return len(found.body) if found is not None and number == version else None

    def ready(self, name: str, version: int, root: bytes, wait: float) -> Verdict:
        until = self._clock() + wait
        with self._changed:
            self._apply(lambda cohort: protocol.ready(cohort, name, version, root, self._clock()))
            while True:
                found = protocol.verdict(self._cohort, version)
                left = until - self._clock()
                if found is not Verdict.WAIT or left <= 0 or self._closed:
                    return found
                self._changed.wait(left)

    def failed(self, name: str, version: int, why: str) -> None:
        self._apply(lambda cohort: protocol.failed(cohort, name, version, why, self._clock()))

    def done(self, name: str, held: Held) -> None:
        self._apply(lambda cohort: protocol.done(cohort, name, held, self._clock()))

    def gone(self, name: str, why: str) -> None:
        self._apply(lambda cohort: protocol.drop(cohort, name, why))

    def _image_bytes(self) -> int:
        """Of a version: a relay plans none, and has what came."""
        if self._planned is not None:
            return self._planned[1]
        return max((made.manifest.size for made in self._made.values()), default=0)

    def status(self) -> dict[str, Any]:
        """For people and other programs: what is served, to whom, what is on its way."""
        with self._changed:
            now, cohort = self._clock(), self._cohort
            members = [
                {"name": name, "epoch": one.held.epoch, "version": one.held.version, "phase": str(one.phase)}
                | {"target": one.target, "lease_seconds": round(one.lease - now, 1), "failures": one.failures}
                for name, one in sorted(cohort.members.items())
            ]
            return {
                "run": self.run,
                "epoch": self.epoch,
                "version": cohort.committed,
                "root": cohort.root.hex(),
                "undecided": None if cohort.round is None else cohort.round.version,
                "receivers": members,
                "dropped": [list(each) for each in cohort.dropped[-8:]],
                "skipped": self.skipped,
                "image_bytes": self._image_bytes(),
                "peak_bytes": self.peak_bytes,
            }
