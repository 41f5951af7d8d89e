"""Interfaces of a transport: `Transport` and `PublisherSide` for the sender, `Source` and `ReceiveTarget` for a
receiver.

One suite of tests (tests/weight_sync/transports/test_base.py) runs for each transport. A receiver always asks and is
never called: one that dies simply stops asking, and a silent side is noticed by the deadline of the side that waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from longhaul.weight_sync.buffers import Image
from longhaul.weight_sync.delta.version_delta import Changes
from longhaul.weight_sync.manifest import Manifest
from longhaul.weight_sync.protocol import Held, Offer, Settings, Verdict
from longhaul.weight_sync.shared_verification import VerifiedMarks

DAMAGED = "damaged"
"""Word of every error about bytes that do not match their digest."""


class Parcel(NamedTuple):
    """An offer with the manifest of the offered version."""

    offer: Offer
    manifest: Manifest


class ReceiveTarget(Protocol):
    """Memory of a receiver for one version, and the verification of what arrives there."""

    base: tuple[Manifest, np.ndarray] | None  # version that is served now, upon which changes may come

    def take(self, size: int) -> np.ndarray:
        """Image of `size` bytes or more, uint8. LookupError where readers hold all of the memory."""

    def spare(self, taken: int) -> int:
        """Bytes of the budget that are left beside the images and `taken` bytes, which are counted as used."""

    def arrived(self, image: np.ndarray, count: int) -> None:
        """Reports that the first `count` bytes are in place and will not change: they are digested while cached."""

    def verified(self) -> None:
        """Reports that the image is complete, and that every tensor's digest was checked while it was made."""

    def share(self, marks: VerifiedMarks) -> None:
        """Reports where the processes that map the same image note what they have verified."""


class Source(Protocol):
    """A receiver's end of a transport, to one sender.

    Every call ends within its seconds, by TimeoutError at the latest. ConnectionError: the sender is gone;
    ProtocolError: it refused. After any of them `close` must be called.
    """

    def bind(self, held: Held, seconds: float) -> None:
        """Introduces the receiver and what it serves."""

    def ask(self, held: Held, wait: float) -> Parcel | None:
        """Newer version than `held`; None where none came within `wait` seconds."""

    def fetch(self, parcel: Parcel, target: ReceiveTarget, seconds: float) -> np.ndarray:
        """Image of a parcel, uint8 [size]: in memory of the target, or a map of the sender's."""

    def ready(self, held: Held, version: int, root: bytes, wait: float) -> Verdict:
        """Reports that a version is staged and verified; returns its verdict, WAIT if undecided after `wait`."""

    def failed(self, version: int, why: str) -> None:
        """Reports that a version could not be taken."""

    def done(self, held: Held) -> None:
        """Reports what is served after a verdict."""

    def status(self) -> dict[str, Any]:
        """Status of the sender, for people and other programs."""

    def interrupt(self) -> None:
        """Ends waiting calls by ConnectionError soon; called from another thread."""

    def close(self) -> None:
        """Idempotent."""


class PublisherSide(Protocol):
    """A publisher as its transports see it; every call may come from any thread."""

    run: str
    epoch: int
    settings: Settings

    def bind(self, name: str, held: Held) -> str:
        """Name under which the receiver is known: its own, made unique."""

    def ask(self, name: str, wait: float) -> tuple[Parcel, Image] | None:
        """Next version for the receiver, with its image, which does not change while it is referred to."""

    def changes(self, parcel: Parcel, image: Image) -> Changes | None:
        """Changes since the offer's base; None where they can't be had, or are not worth it."""

    def ready(self, name: str, version: int, root: bytes, wait: float) -> Verdict: ...

    def failed(self, name: str, version: int, why: str) -> None: ...

    def done(self, name: str, held: Held) -> None: ...

    def gone(self, name: str, why: str) -> None: ...

    def heard(self, name: str) -> None: ...

    def status(self) -> dict[str, Any]: ...

    def alert(self, changed: Callable[[], None]) -> None:
        """Registers `changed`, which is called when `ask` or `ready` may have another answer. It must not wait."""

    def watch(self, name: str, end: Callable[[], None]) -> None:
        """Registers `end`, which is called when the receiver is dropped: it should close the connection."""


class Transport(Protocol):
    """A sender's end: serves receivers from a publisher, in threads of its own, until it is closed."""

    address: str

    def open(self, publisher: PublisherSide) -> None: ...

    def close(self) -> None: ...
