"""Relay: a receiver that serves others, from the same memory.

A sender feeds a few hosts, each of which feeds a few more (a tree), and a folder becomes a server. A version is passed
on when it counts here. Receivers that come late are fed from here; the sender knows nothing of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from longhaul.weight_sync.buffers import Image
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.transports.base import Source, Transport


class Relay:
    """Follows `sources` as a `Receiver` does, and serves each version by `transports`, from the first one on."""

    def __init__(
        self,
        *sources: Callable[[], Source],
        transports: Sequence[Transport],
        on_commit: Callable[[int], None] | None = None,
        **options: Any,
    ) -> None:
        self._transports, self._on_commit = transports, on_commit
        self.publisher: Publisher | None = None
        self.failed: Exception | None = None  # error because of which no receiver can be served
        self._complete = threading.Event()  # a version may come before `receiver` is assigned
        self.receiver = Receiver(*sources, on_commit=self._forward, **options)
        self._complete.set()

    def _forward(self, version: int) -> None:
        self._complete.wait()
        served = self.receiver.served
        if served is None:
            return
        if self.publisher is None:
            self.publisher = self._opened(served.manifest.run, served.manifest.epoch)
        self.publisher.forward(served.manifest, Image(served.image, served.block))
        if self._on_commit is not None:
            self._on_commit(version)

    def _opened(self, run: str, epoch: int) -> Publisher:
        try:
            return Publisher(run, epoch=epoch, transports=self._transports)
        except Exception as error:
            self.failed = error
            raise

    def close(self) -> None:
        """Idempotent."""
        self.receiver.close()
        if self.publisher is not None:
            self.publisher.close(0.0)  # its receivers find another sender
        else:
            for transport in self._transports:
                transport.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
