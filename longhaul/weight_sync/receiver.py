"""The receiver: follows a sender, and always serves one whole version.

A version is staged beside the one that is served, verified tensor by tensor, and put in its place by one assignment
when the sender says that it counts. Readers hold what they took for as long as they like. Whatever fails before the
assignment changes nothing; then the receiver comes again, after a while, to the first of its sources that has more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from longhaul.weight_sync import image as images
from longhaul.weight_sync import manifest, protocol, shared_verification
from longhaul.weight_sync.buffers import Arriving, Block, Image, Pool
from longhaul.weight_sync.manifest import Manifest
from longhaul.weight_sync.protocol import ProtocolError, Seat, Verdict
from longhaul.weight_sync.transports.base import DAMAGED, Parcel, Source, Staging

IMAGES = 3.5
"""How many images a receiver has, unless a budget says otherwise: served, staged, one that readers hold, and room for
changes on their way."""

BUFFER = 1 << 19
"""Bytes that fit in the second of a processor's caches: large images come by way of so many."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds before a receiver comes again: twice as long each time."""


Verify = Literal["once", "always", "moved"]
"""Which of the receivers that map one image verify it: one of them for all, each, or none."""


class Served(NamedTuple):
    """A whole version: read-only arrays by name, good for as long as they are held."""

    version: int
    tensors: Mapping[str, np.ndarray]
    manifest: Manifest
    image: np.ndarray  # uint8 [size]
    block: Block | None = None  # where it lies, if in memory of ours


class Onward(NamedTuple):
    """Who passes versions on while they come: `begins` is told of an image that has begun to arrive, and `withdrawn` of
    one that came to nothing. Those that are served are told of by `on_commit`."""

    begins: Callable[[Manifest, Image], None]
    withdrawn: Callable[[Manifest], None]


class Receiver:
    """Follows a sender in a thread of its own.

    `sources` connect, each to a sender of the same run: the first is followed, the others (peers, a folder) are
    asked where it can't be reached, and for the first version where theirs is newer. `on_commit(version)` is called
    after each swap (flush a prefix cache, tag requests); what it raises is kept in `errors`, and undoes nothing.
    `budget` bounds the bytes of images in memory of ours; mapped ones are the sender's. Of those, `verify` says who
    reads them for their digests: "once", one of the receivers that map the same memory (`ledger`); "always", each;
    "moved", none: they are taken at the sender's word, which it gave while it wrote them. What travelled is always
    verified.
    """

    def __init__(
        self,
        *sources: Callable[[], Source],
        budget: int | None = None,
        on_commit: Callable[[int], None] | None = None,
        verify: Verify = "once",
        threads: int = 1,
        onward: Onward | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not sources:
            raise ValueError("a receiver of nothing: name a source")
        if verify not in get_args(Verify):
            raise ValueError(f"verify is {verify!r}; there are {', '.join(get_args(Verify))}")
        self._verify = verify
        self._sources, self._budget, self._on_commit, self._clock = sources, budget, on_commit, clock
        self._threads = max(1, threads)
        self._seat = Seat()
        self._served: Served | None = None
        self._pool: Pool | None = None
        self._block: Block | None = None  # of what is being staged
        self._peak = 0  # bytes, with what was taken beside images
        self._onward = onward
        self._arriving: Arriving | None = None  # of what is being staged, where it was told of
        self._buffer: np.ndarray | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._current: Source | None = None
        self.errors: list[str] = []  # the newest last, at most 32
        self.seconds: dict[str, float] = {}  # of the newest version: fetch, verify, decide, swap
        self._hashers = ThreadPoolExecutor(self._threads, "longhaul-verify")
        self._thread = threading.Thread(target=self._follow, name="longhaul-receiver", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------------------------- for who serves

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
        """What is served, in the protocol's words."""
        return self._seat.held

    def wait(self, version: int, seconds: float) -> bool:
        """Whether that version or a newer one is served within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._served is not None and self._served.version >= version, seconds)

    @property
    def peak_bytes(self) -> int:
        """The most that images in memory of ours, and changes on their way to one, ever took."""
        return 0 if self._pool is None else max(self._peak, self._pool.peak)

    def close(self) -> None:
        """Follows no more; what was taken stays good. Idempotent."""
        self._closed.set()
        current = self._current
        if current is not None:
            current.interrupt()
        self._thread.join()
        self._hashers.shutdown()
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------- its own thread

    def _seed(self) -> None:
        """The first version, from whichever source has the newest; of equals the last, to spare the first."""
        found: list[tuple[int, int, int]] = []
        for which, connect in enumerate(self._sources):
            with self._attempt(), contextlib.closing(connect()) as source:
                told = source.status()
                if told["version"] >= 0:
                    found.append((int(told["epoch"]), int(told["version"]), which))
        best = max(found)[2] if found else 0
        if best > 0:
            with self._attempt(), contextlib.closing(self._sources[best]()) as source:
                source.bind(self._seat.held, 10.0)
                parcel = source.ask(self._seat.held, 0.0)
                if parcel is not None:
                    with self._passing(parcel):
                        self._take(source, parcel)

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """What fails within it is noted, and what was staged forgotten."""
        try:
            yield
        except Exception as error:  # whatever it is, what is served stays, and the next try may do
            self._note(f"{type(error).__name__}: {error}")
        finally:
            self._seat = protocol.lost(self._seat)

    def _follow(self) -> None:
        pause, which = FIRST_PAUSE, 0
        if len(self._sources) > 1:
            self._seed()
        while not self._closed.is_set():
            source = None
            before = self._seat.held
            try:
                source = self._sources[which]()
                self._current = source
                source.bind(self._seat.held, 10.0)
                while not self._closed.is_set():
                    parcel = source.ask(self._seat.held, 5.0)
                    if parcel is not None:
                        with self._passing(parcel):
                            self._take(source, parcel)
                        pause = FIRST_PAUSE
            except Exception as error:  # whatever it is, what is served stays, and the next try may do
                self._note(f"{type(error).__name__}: {error}")
            finally:
                self._seat = protocol.lost(self._seat)
                self._current = None
                if self._closed.is_set():
                    self._served = None  # so that the last word can say that we have let it go
                if source is not None:
                    source.close()
            if self._seat.held == before:
                which = (which + 1) % len(self._sources)
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    @contextlib.contextmanager
    def _passing(self, parcel: Parcel) -> Iterator[None]:
        """Who was told that a version arrives is told if it comes to nothing."""
        try:
            yield
        finally:
            told, self._arriving = self._arriving is not None, None
            if told and self._onward is not None and self._seat.held.root != parcel.offer.root:
                self._onward.withdrawn(parcel.manifest)

    def _take(self, source: Source, parcel: Parcel) -> None:
        """One offer, to its end. Raises what ends the connection."""
        offer = parcel.offer
        seat = protocol.accept(self._seat, offer, self._clock())
        if offer.root != parcel.manifest.root:
            raise ProtocolError("an offer has another root than its manifest")
        self._seat = seat
        try:
            array = self._staged(source, parcel)
        except LookupError as error:  # no memory, or damage: the connection is good
            self._seat = protocol.lost(self._seat)
            self._note(str(error))
            source.failed(offer.version, str(error))
            return
        self._seat = protocol.staged(self._seat, parcel.manifest.root, self._clock())
        fresh = Served(offer.version, manifest.views(parcel.manifest, array), parcel.manifest, array, self._block)
        began = time.perf_counter()
        found = Verdict.WAIT
        while found is Verdict.WAIT and not self._closed.is_set():
            if self._clock() > seat.deadline + offer.seconds:
                raise TimeoutError(f"version {offer.version} is not decided, {2 * offer.seconds:g} s after its offer")
            found = source.ready(self._seat.held, offer.version, offer.root, 5.0)
        self.seconds["decide"] = time.perf_counter() - began
        if found is Verdict.COMMIT:
            began = time.perf_counter()
            self._seat = protocol.commit(self._seat, offer.version)
            self._served = fresh  # the swap: readers have the one or the other
            self.seconds["swap"] = time.perf_counter() - began
            del fresh, array
            self._committed(offer.version)
        else:
            self._seat = protocol.lost(self._seat)
        source.done(self._seat.held)

    def _committed(self, version: int) -> None:
        if self._on_commit is not None:
            try:
                self._on_commit(version)
            except Exception as error:
                self._note(f"on_commit({version}) raised {type(error).__name__}: {error}")
        with self._changed:
            self._changed.notify_all()

    def _staged(self, source: Source, parcel: Parcel) -> np.ndarray:
        """The verified image of a parcel, read-only. LookupError where it can't be had, but the connection is good."""
        began = time.perf_counter()
        self._block = None
        arrival = images.Arrival(parcel.manifest)
        served = self._served
        base = None if served is None else (served.manifest, served.image)
        seconds, shared = parcel.offer.seconds, list[shared_verification.Ledger]()

        def arrived(image: np.ndarray, count: int) -> None:
            arrival(image, count)
            if self._onward is not None:
                self._passed_on(parcel.manifest, image, count)

        def drawn(image: np.ndarray, buffer: np.ndarray, held: int) -> int:
            used = arrival.draw(image, buffer, held)
            if self._onward is not None:
                self._passed_on(parcel.manifest, image, arrival.at)
            return used

        def pulled(image: np.ndarray, buffer: np.ndarray, descriptor: int, stop: float) -> int:
            left = arrival.pull(image, buffer, descriptor, stop, self._onward is not None)
            if self._onward is not None:
                self._passed_on(parcel.manifest, image, arrival.at)
            return left

        large = parcel.manifest.size >= images.LARGE
        if self._buffer is None and source.moves and large:
            self._buffer = np.empty(BUFFER, np.uint8)
        staging = Staging(
            lambda size: self._room(size, seconds / 2), arrived, base, shared.append, arrival.made, self._spare,
            self._buffer if large else None, drawn, pulled,
        )  # fmt: skip
        array = source.fetch(parcel, staging, seconds)
        fetched = time.perf_counter()
        if arrival.complete:
            damaged = arrival.damaged
        elif self._verify == "moved" and not source.moves:
            damaged = []
        elif self._verify == "once" and shared:
            threads = self._threads
            damaged = shared_verification.verify(parcel.manifest, array, shared[0], seconds, self._hashers, threads)
        else:
            damaged = images.verify(parcel.manifest, array, self._hashers, self._threads)
        if damaged:
            raise LookupError(f"version {parcel.offer.version} came {DAMAGED}: {', '.join(damaged[:3])}")
        self.seconds |= {"fetch": fetched - began, "verify": time.perf_counter() - fetched}
        array = array[:]
        array.flags.writeable = False
        return array

    def _room(self, size: int, seconds: float) -> np.ndarray:
        if self._pool is None or self._pool.size < size:
            self._pool = Pool(size, int(IMAGES * size) if self._budget is None else self._budget)
        image = self._pool.take(seconds)
        if image is None:
            raise LookupError(f"readers hold all {self._pool.budget:,} bytes of images; let old versions go")
        self._block = image.block
        return image.array

    def _passed_on(self, found: Manifest, array: np.ndarray, count: int) -> None:
        assert self._onward is not None
        if self._arriving is None:
            self._arriving = Arriving()
            self._onward.begins(found, Image(array, self._block, self._arriving))
        self._arriving.told(count)

    def _spare(self, taken: int) -> int:
        """Bytes of the budget that neither images nor what is `taken` beside them have."""
        if self._pool is None:
            return 0
        used = self._pool.bytes + taken
        self._peak = max(self._peak, used)
        return self._pool.budget - used

    def _note(self, line: str) -> None:
        self.errors = [*self.errors, line][-32:]


def follow(addresses: Sequence[str], *, token: str | None = None, name: str = "receiver", **options: Any) -> Receiver:
    """A receiver of senders by address: shm:NAME, tcp:HOST:PORT, folder:PATH."""
    from longhaul.weight_sync.transports import connect

    return Receiver(*(lambda each=each: connect(each, token, name) for each in addresses), **options)
