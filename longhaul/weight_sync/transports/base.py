"""What every lane can do: the two small protocols that engine and receiver are written against.

One suite of tests (tests/weight_sync/transports/test_base.py) runs for each lane. A receiver always asks, and nobody
is ever called:
so who dies simply stops asking, and a silent side is noticed by the deadline of whoever waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from longhaul.weight_sync.buffers import Image
from longhaul.weight_sync.delta.version_delta import Changes
from longhaul.weight_sync.manifest import Manifest
from longhaul.weight_sync.protocol import Held, Offer, Settings, Verdict
from longhaul.weight_sync.shared_verification import Ledger

DAMAGED = "damaged"


class Parcel(NamedTuple):
    """An offer with the manifest of what is offered."""

    offer: Offer
    manifest: Manifest


class Source(Protocol):
    """A receiver's end of a lane, to one sender. All calls end within `seconds`, by TimeoutError at the worst;
    ConnectionError means that the sender is gone, ProtocolError that it refused. After any of them: `close`."""

    moves: bool  # whether bytes travel, or the sender's memory is mapped

    def bind(self, held: Held, seconds: float) -> None:
        """Says who comes, and what it serves."""

    def ask(self, held: Held, wait: float) -> Parcel | None:
        """What is newer than `held`; None where nothing came within `wait` seconds."""

    def fetch(self, parcel: Parcel, staging: Staging, seconds: float) -> np.ndarray:
        """The image of a parcel, uint8 [size]: in memory that `staging` gave, or a map of the sender's."""

    def ready(self, held: Held, version: int, root: bytes, wait: float) -> Verdict:
        """Says that a version is staged and whole; -> what is to become of it, WAIT where that is open after `wait`."""

    def failed(self, version: int, why: str) -> None:
        """Says that a version could not be taken."""

    def done(self, held: Held) -> None:
        """Says what is served after a verdict."""

    def status(self) -> dict[str, Any]:
        """What the sender tells of itself."""

    def interrupt(self) -> None:
        """From another thread: whoever waits in a call gets a ConnectionError soon."""

    def close(self) -> None:
        """Idempotent."""


class Staging(NamedTuple):
    """What a receiver gives to a source. `take(size)` is memory of the receiver's, LookupError where all of it is read.
    `arrived(image, n)` is told, once or often, that the first n bytes are in place, so that they are verified while
    they are hot. `base` is what is served now, for who sends changes. `shared` is told where those who map the same
    image note what they have verified of it; `made`, that the image was made with every tensor's digest found.
    `spare(n)` counts n bytes that are taken beside the image while it is made, and says how many more may be.
    Where there is a `buffer`, what comes should go by way of it: `draw(image, buffer, n)` takes of its first n bytes,
    which come next, as many as it says; at the end all have `arrived`. `pull(image, buffer, descriptor, stop)`, where
    there is one for this image, does so with what it receives itself (`Wire.pull`)."""

    take: Callable[[int], np.ndarray]
    arrived: Callable[[np.ndarray, int], None]
    base: tuple[Manifest, np.ndarray] | None = None
    shared: Callable[[Ledger], None] = lambda found: None
    made: Callable[[], None] = lambda: None
    spare: Callable[[int], int] = lambda taken: 0
    buffer: np.ndarray | None = None
    draw: Callable[[np.ndarray, np.ndarray, int], int] = lambda image, buffer, held: 0
    pull: Callable[[np.ndarray, np.ndarray, int, float], int] | None = None


class Hub(Protocol):
    """A sender as its lanes see it; every call may come from any thread."""

    run: str
    epoch: int
    settings: Settings

    def bind(self, name: str, held: Held) -> str:
        """-> the name under which the receiver is known: its own, made unique."""

    def ask(self, name: str, wait: float, partly: bool = False) -> tuple[Parcel, Image] | None:
        """What the receiver should have next. The image stays as it is as long as it is referred to.

        It is whole, unless the lane takes it `partly`: then it may have an `arriving`, which is to be followed.
        """

    def changes(self, parcel: Parcel, image: Image) -> Changes | None:
        """What changed since the offer's base; None where that is not to be had, or not worth it."""

    def ready(self, name: str, version: int, root: bytes, wait: float) -> Verdict: ...

    def failed(self, name: str, version: int, why: str) -> None: ...

    def done(self, name: str, held: Held) -> None: ...

    def gone(self, name: str, why: str) -> None: ...

    def heard(self, name: str) -> None: ...

    def status(self) -> dict[str, Any]: ...

    def watch(self, name: str, end: Callable[[], None]) -> None:
        """`end` is called when the receiver is dropped: it should close what connects it."""


class Lane(Protocol):
    """A sender's end: serves receivers from a hub, in threads of its own, until it is closed."""

    address: str

    def open(self, hub: Hub) -> None: ...

    def close(self) -> None: ...
