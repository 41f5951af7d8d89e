"""Receiver: follows a sender, and always serves one whole version.

A version is staged beside the one that is served, verified tensor by tensor, and takes its place by one assignment when
the sender commits it. Readers hold what they took for as long as they like. A failure before the assignment changes
nothing: after a pause the receiver connects again, to the first of its sources that has a newer version.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from longhaul.runtime.devices import machine_memory
from longhaul.weight_sync import manifest, packing, protocol, shared_verification
from longhaul.weight_sync.buffers import Block, Pool
from longhaul.weight_sync.digest import library
from longhaul.weight_sync.manifest import Manifest
from longhaul.weight_sync.protocol import ProtocolError, ReceiverSide, Verdict
from longhaul.weight_sync.shared_verification import VerifiedMarks
from longhaul.weight_sync.transports.base import DAMAGED, Parcel, Source

IMAGES = 3.5
"""Images of a receiver by default: one served, one staged, one that readers hold, and room for changes on their way."""

SHARE = 0.75
"""Share of the machine's memory that images may take by default, whatever size a sender names."""

LEAVE = 0.5
"""Seconds that `close` waits: a receiver that still connects can't be interrupted, and ends by itself."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds before a receiver connects again; the pause doubles each time."""


class Served(NamedTuple):
    """A whole version: read-only arrays by name, valid for as long as they are held."""

    version: int
    tensors: Mapping[str, np.ndarray]
    manifest: Manifest
    image: np.ndarray  # uint8 [size]
    block: Block | None = None  # block of the image; None where it is mapped from the sender


class Receiver:
    """Follows a sender in a thread of its own.

    `sources` are functions that connect, each to a sender of the same run: the first is followed, the others (peers, a
    folder) are used where it can't be reached, and for the first version where theirs is newer. `on_commit(version)` is
    called after each swap (to flush a prefix cache, say); an exception there is kept in `errors`, and undoes nothing.
    `budget` bounds the bytes of images in the receiver's memory, by default to `SHARE` of the machine's; mapped images
    are the sender's. Every byte that is
    served was verified on this host: of the receivers that map one image, by one of them (`shared_verification`).
    """

    def __init__(
        self,
        *sources: Callable[[], Source],
        budget: int | None = None,
        on_commit: Callable[[int], None] | None = None,
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not sources:
            raise ValueError("a receiver without sources: give at least one")
        self._sources, self._budget, self._on_commit, self._clock = sources, budget, on_commit, clock
        self._threads = max(1, threads)
        self._side = ReceiverSide()
        self._served: Served | None = None
        self._pool: Pool | None = None
        self._peak = 0  # bytes of images and of changes beside them
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._current: Source | None = None
        self.errors: list[str] = []  # the newest last, at most 32
        self.seconds: dict[str, float] = {}  # stages of the newest version: fetch, verify, decide, swap
        self._hashers = ThreadPoolExecutor(self._threads, "longhaul-verify")
        self._thread = threading.Thread(target=self._follow, name="longhaul-receiver", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------------------------- for readers

    def latest(self) -> tuple[int, Mapping[str, np.ndarray]]:
        """(version, arrays by name). LookupError before the first."""
        served = self._served
        if served is None:
            raise LookupError(f"no version has come yet{'; ' + self.errors[-1] if self.errors else ''}")
        return served.version, served.tensors

    @property
    def served(self) -> Served | None:
        """The newest version with its manifest and image; None before the first."""
        return self._served

    @property
    def held(self) -> protocol.Held:
        """Version that is served, as the protocol names it."""
        return self._side.held

    def wait(self, version: int, seconds: float) -> bool:
        """True if that version or a newer one is served within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._served is not None and self._served.version >= version, seconds)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that images in the receiver's memory, and changes on their way, ever took."""
        return 0 if self._pool is None else max(self._peak, self._pool.peak)

    def close(self) -> None:
        """Stops following within about `LEAVE` seconds; arrays that were taken stay valid. Idempotent."""
        self._closed.set()
        current = self._current
        if current is not None:
            current.interrupt()
        self._thread.join(LEAVE)
        self._hashers.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------- its own thread

    def _seed(self) -> None:
        """Takes the first version from the source that has the newest; of equals from the last, to spare the first."""
        newest: list[tuple[int, int, int]] = []
        for which, connect in enumerate(self._sources):
            with self._attempt(), contextlib.closing(connect()) as source:
                status = source.status()
                if status["version"] >= 0:
                    newest.append((int(status["epoch"]), int(status["version"]), which))
        best = max(newest)[2] if newest else 0
        if best > 0:
            with self._attempt(), contextlib.closing(self._sources[best]()) as source:
                source.bind(self.held, 10.0)
                parcel = source.ask(self.held, 0.0)
                if parcel is not None:
                    self._take(source, parcel)

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Notes an exception within it, and gives up what was staged."""
        try:
            yield
        except Exception as error:  # the served version stays, and the next attempt may succeed
            self._note(f"{type(error).__name__}: {error}")
        finally:
            self._side = protocol.lost(self._side)

    def _follow(self) -> None:
        pause, which = FIRST_PAUSE, 0
        if len(self._sources) > 1:
            self._seed()
        while not self._closed.is_set():
            source = None
            before = self._side.held
            try:
                source = self._sources[which]()
                self._current = source
                source.bind(self._side.held, 10.0)
                while not self._closed.is_set():
                    parcel = source.ask(self._side.held, 5.0)
                    if parcel is not None:
                        self._take(source, parcel)
                        pause = FIRST_PAUSE
            except Exception as error:  # the served version stays, and the next attempt may succeed
                self._note(f"{type(error).__name__}: {error}")
            finally:
                self._side = protocol.lost(self._side)
                self._current = None
                if self._closed.is_set():
                    self._served = None  # so that the last frame reports the image as released
                if source is not None:
                    source.close()
            if self._side.held == before:
                which = (which + 1) % len(self._sources)
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _take(self, source: Source, parcel: Parcel) -> None:
        """Handles one offer to its end. Raises the errors that end the connection."""
        offer = parcel.offer
        side = protocol.accept(self._side, offer, self._clock())
        if offer.root != parcel.manifest.root:
            raise ProtocolError("an offer has another root than its manifest")
        self._side = side
        try:
            array, block = self._staged(source, parcel)
        except LookupError as error:  # no memory, or damage: the connection is good
            self._side = protocol.lost(self._side)
            self._note(str(error))
            source.failed(offer.version, str(error))
            return
        self._side = protocol.staged(self._side, parcel.manifest.root, self._clock())
        fresh = Served(offer.version, manifest.views(parcel.manifest, array), parcel.manifest, array, block)
        began = time.perf_counter()
        verdict = Verdict.WAIT
        while verdict is Verdict.WAIT and not self._closed.is_set():
            if self._clock() > side.deadline + offer.seconds:
                raise TimeoutError(f"version {offer.version} is not decided, {2 * offer.seconds:g} s after its offer")
            verdict = source.ready(self.held, offer.version, offer.root, 5.0)
        self.seconds["decide"] = time.perf_counter() - began
        if verdict is Verdict.COMMIT:
            began = time.perf_counter()
            self._side = protocol.commit(self._side, offer.version)
            self._served = fresh  # the swap: readers have the one or the other
            self.seconds["swap"] = time.perf_counter() - began
            del fresh, array
            self._committed(offer.version)
        else:
            self._side = protocol.lost(self._side)
        source.done(self.held)

    def _committed(self, version: int) -> None:
        if self._on_commit is not None:
            try:
                self._on_commit(version)
            except Exception as error:
                self._note(f"on_commit({version}) raised {type(error).__name__}: {error}")
        with self._changed:
            self._changed.notify_all()

    def _staged(self, source: Source, parcel: Parcel) -> tuple[np.ndarray, Block | None]:
        """Verified image of a parcel, read-only. LookupError where it can't be had, but the connection is good."""
        began = time.perf_counter()
        seconds = parcel.offer.seconds
        target = _Target(self, parcel.manifest, seconds / 2)
        array = source.fetch(parcel, target, seconds)
        fetched = time.perf_counter()
        if target.arrival.complete:
            damaged = target.arrival.damaged
        elif target.marks is not None:
            damaged = shared_verification.verify(
                parcel.manifest, array, target.marks, seconds, self._hashers, self._threads
            )
        else:
            damaged = packing.verify(parcel.manifest, array, self._hashers, self._threads)
        if damaged:
            raise LookupError(f"version {parcel.offer.version} came {DAMAGED}: {', '.join(damaged[:3])}")
        self.seconds |= {"fetch": fetched - began, "verify": time.perf_counter() - fetched}
        array = array[:]
        array.flags.writeable = False
        return array, target.block

    def _memory(self, size: int) -> Pool:
        if self._pool is None or self._pool.size < size:
            usual = min(int(IMAGES * size), int(SHARE * machine_memory()))
            self._pool = Pool(size, usual, least=1) if self._budget is None else Pool(size, self._budget)
        return self._pool

    def _spare(self, taken: int) -> int:
        """Bytes of the budget beside images and the bytes `taken`."""
        if self._pool is None:
            return 0
        used = self._pool.bytes + taken
        self._peak = max(self._peak, used)
        return self._pool.budget - used

    def _note(self, line: str) -> None:
        self.errors = [*self.errors, line][-32:]


class _Target:
    """Target of one version (`base.ReceiveTarget`), in the memory of its receiver."""

    def __init__(self, receiver: Receiver, manifest: Manifest, patience: float) -> None:
        served = receiver.served
        self.base = None if served is None else (served.manifest, served.image)
        self.arrival = packing.Arrival(manifest)
        self.block: Block | None = None
        self.marks: VerifiedMarks | None = None
        self._receiver, self._patience = receiver, patience
        self.arrived, self.verified = self.arrival.arrived, self.arrival.verified

    def take(self, size: int) -> np.ndarray:
        pool = self._receiver._memory(size)
        image = pool.take(self._patience)
        if image is None:
            raise LookupError(f"readers hold all {pool.budget:,} bytes of images; let old versions go")
        self.block = image.block
        return image.array

    def spare(self, taken: int) -> int:
        return self._receiver._spare(taken)

    def share(self, marks: VerifiedMarks) -> None:
        self.marks = marks


def follow(addresses: Sequence[str], *, token: str | None = None, name: str = "receiver", **options: Any) -> Receiver:
    """Receiver of senders by address: shm:NAME, tcp:HOST:PORT, tls:HOST:PORT, folder:PATH.

    ValueError where the library that verifies versions is not installed: else each would only fail when it comes.
    """
    from longhaul.weight_sync.transports import connect

    library("xxhash")
    return Receiver(*(lambda each=each: connect(each, token, name) for each in addresses), **options)
