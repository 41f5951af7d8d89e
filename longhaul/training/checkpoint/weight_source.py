"""Checkpoints of a run as a source of versions, for runs that publish none (`longhaul sync`).

The version is the number of updates, the epoch the time at which the checkpoint was written: a rolled-back run is never
stale. The policy is restored on request, in this process, by JAX.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.runtime import files
from longhaul.weight_sync import packing
from longhaul.weight_sync.manifest import Manifest
from longhaul.weight_sync.producer import named
from longhaul.weight_sync.protocol import Held, Offer, Verdict
from longhaul.weight_sync.transports.base import Parcel, ReceiveTarget

SECONDS = 600.0
"""Seconds within which a reader must have taken a version."""

LOOK = 1.0
"""Seconds between two looks at the checkpoints."""


class CheckpointSource:
    """Reader's end, a `transports.base.Source`, of the checkpoints in a run's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._interrupted = threading.Event()
        self._found: tuple[tuple[int, int], Manifest, np.ndarray] | None = None

    def bind(self, held: Held, seconds: float) -> None:
        """Nothing: checkpoints do not know their readers."""

    def ask(self, held: Held, wait: float) -> Parcel | None:
        until = time.monotonic() + wait
        while True:
            latest = self._latest()
            if latest is not None and latest > (held.epoch, held.version):
                manifest, _ = self._restored(latest)
                offer = Offer(manifest.run, manifest.epoch, manifest.version, -1, manifest.root, SECONDS)
                return Parcel(offer, manifest)
            left = until - time.monotonic()
            if left <= 0:
                return None
            if self._interrupted.wait(min(LOOK, left)):
                raise ConnectionAbortedError("interrupted")

    def fetch(self, parcel: Parcel, target: ReceiveTarget, seconds: float) -> np.ndarray:
        assert self._found is not None
        size = parcel.manifest.size
        image = target.take(size)[:size]
        image[:] = self._found[2]
        target.arrived(image, size)
        return image

    def ready(self, held: Held, version: int, root: bytes, wait: float) -> Verdict:
        return Verdict.COMMIT  # a checkpoint counts

    def failed(self, version: int, why: str) -> None:
        if self._interrupted.wait(LOOK):
            raise ConnectionAbortedError("interrupted")

    def done(self, held: Held) -> None:
        """Nothing: checkpoints do not know their readers."""

    def status(self) -> dict[str, Any]:
        latest = self._latest()
        about = {"run": self.folder.name, "epoch": -1, "version": -1, "root": "", "image_bytes": 0, "receivers": []}
        if latest is None:
            return about
        manifest, _ = self._restored(latest)
        return about | {
            "epoch": manifest.epoch,
            "version": manifest.version,
            "root": manifest.root.hex(),
            "image_bytes": manifest.size,
        }

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self._interrupted.set()

    def _latest(self) -> tuple[int, int] | None:
        """(epoch, version) of the newest checkpoint, intact or not; None where there is none."""
        versions = [
            (path.stat().st_mtime_ns, int(match[1]))
            for path in self.folder.glob("checkpoints/*/manifest.json")
            if (match := files.CHECKPOINT.fullmatch(path.parent.name))
        ]
        return max(versions, default=None)

    def _restored(self, latest: tuple[int, int]) -> tuple[Manifest, np.ndarray]:
        """The policy of the newest intact checkpoint, as a manifest and an image; restored once."""
        if self._found is None or self._found[0] != latest:
            from longhaul.training.checkpoint.resume import restore_policy

            _, policy, _ = restore_policy(self.folder)
            tensors = named(policy)
            planned, size = packing.describe(tensors)
            image = np.zeros(size, np.uint8)
            with ThreadPoolExecutor(1) as pool:
                parts = tuple(packing.gather(tensors, planned, image, pool, 1))
            self._found = (latest, Manifest(self.folder.name, *latest, -1, size, parts), image)
        return self._found[1], self._found[2]
