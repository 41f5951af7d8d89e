"""A receiver that serves others: what comes from above goes on below, as it is, from the same memory.

So a sender feeds a few hosts, each of which feeds a few more (a tree), and a folder becomes a server. Bytes go on as
they come, so that a deep tree takes little longer than a flat one; but those below serve a version only when it counts
here. Who comes late is fed from here, and the sender knows nothing of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from longhaul.weight_sync.buffers import Image
from longhaul.weight_sync.manifest import Manifest
from longhaul.weight_sync.protocol import STANDARD, Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Onward, Receiver
from longhaul.weight_sync.transports.base import Lane, Source


class Relay:
    """Follows `sources` as a `Receiver` does, and serves what it has by `lanes`, from the first version on."""

    def __init__(
        self,
        *sources: Callable[[], Source],
        lanes: Sequence[Lane],
        settings: Settings = STANDARD,
        on_commit: Callable[[int], None] | None = None,
        **options: Any,
    ) -> None:
        self._lanes, self._settings, self._on_commit = lanes, settings, on_commit
        self.publisher: Publisher | None = None
        self.failed: Exception | None = None  # why nobody can be served
        self._whole = threading.Event()  # a version may come before there is a `receiver` to ask
        onward = Onward(self._begins, self._withdrawn)
        self.receiver = Receiver(*sources, on_commit=self._forward, onward=onward, **options)
        self._whole.set()

    def _begins(self, manifest: Manifest, image: Image) -> None:
        if self.publisher is not None:
            self.publisher.ahead(manifest, image)

    def _withdrawn(self, manifest: Manifest) -> None:
        if self.publisher is not None:
            self.publisher.withdraw(manifest.version)

    def _forward(self, version: int) -> None:
        self._whole.wait()
        served = self.receiver.served
        if served is None:
            return
        manifest = served.manifest
        if self.publisher is None:
            self.publisher = self._opened(manifest)
        self.publisher.forward(manifest, Image(served.image, served.block))
        if self._on_commit is not None:
            self._on_commit(version)

    def _opened(self, manifest: Manifest) -> Publisher:
        try:
            return Publisher(manifest.run, epoch=manifest.epoch, lanes=self._lanes, settings=self._settings)
        except Exception as error:
            self.failed = error
            raise

    def close(self) -> None:
        """Idempotent."""
        self.receiver.close()
        if self.publisher is not None:
            self.publisher.close(0.0)  # who still follows finds it elsewhere
        else:
            for lane in self._lanes:
                lane.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
