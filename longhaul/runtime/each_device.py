"""Program that several devices run side by side, each with arguments of its own, and each with the bits of one alone.

A program over a mesh (`mesh.per_shard`) is compiled otherwise for one device than for several: XLA partitions it first,
and then fuses and rounds in another order. Here each device has a program of its own, compiled from the same text. What
is computed then does not depend on how many devices there are. The price is a compilation a device, as many at once
as there are cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from longhaul.runtime.devices import cores
from longhaul.types import PyTree


class EachDevice:
    """`function` on each of D devices. There is no communication between them."""

    def __init__(self, function: Callable[..., PyTree], devices: Sequence[jax.Device]) -> None:
        self.devices = tuple(devices)
        self._program = jax.jit(function)

    def put(self, tree: PyTree) -> list[PyTree]:
        """`tree` on each of the devices, D copies."""
        return [jax.device_put(tree, device) for device in self.devices]

    def __call__(self, *arguments: Iterable[PyTree]) -> list[PyTree]:
        """Results of the devices, D trees of NumPy arrays. Each argument has a tree a device, which lies on it."""
        own = list(zip(*arguments, strict=True))
        if len(own) != len(self.devices):
            raise ValueError(f"arguments for {len(own)} devices; give them for each of the {len(self.devices)}")
        if len(own) == 1:
            return [jax.device_get(self._program(*own[0]))]
        self._program.trace(*own[0])  # once: the threads would each trace it
        with ThreadPoolExecutor(min(len(own), cores())) as pool:  # a compiler takes a core, and a gigabyte or more
            begun = list(pool.map(lambda args: self._program(*args), own))
        return [jax.device_get(each) for each in begun]


def local(most: int) -> tuple[jax.Device, ...]:
    """At most so many of this process's own devices."""
    return tuple(jax.local_devices()[:most])
