"""What a compiled program takes of each device's memory, told before it runs.

The sums are the compiler's own (`memory_analysis`); what of its arguments is what, follows from their shards. What lies
beside the program on the device (another process, what the host holds where the CPU is the device) is not counted.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from longhaul.runtime.devices import machine_memory
from longhaul.types import Algorithm, Progress, PyTree, is_local

FILE = "memory.json"
"""In a run's folder: `Footprint.plain` of the last start."""

FULL, TIGHT = 1.0, 0.9
"""Shares of a device's memory: more can't run, more may not."""

REMEDY = "fewer --num-envs or --num-steps, --accumulate N, --remat full, or more devices by --mesh data=N"


class Need(NamedTuple):
    """Bytes that a compiled program takes on each device."""

    arguments: int
    outputs: int
    donated: int  # of the arguments, in whose place outputs lie
    temporaries: int  # while it computes
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.donated + self.temporaries + self.code


class Footprint(NamedTuple):
    """A program's need against what a device has."""

    need: Need
    parts: dict[str, int]  # bytes of a device's arguments, by what they are
    capacity: int | None  # bytes that a device has; None where nobody says
    devices: int

    @property
    def share(self) -> float:
        """Of what a device has; 0 where that is unknown."""
        return self.need.total / self.capacity if self.capacity else 0.0

    def line(self) -> str:
        """ "memory a device: 0.31 GB of 12.6 GB: parameters 1.2 MB, ...; 9 MB of it donated"."""
        (_, whole), *inner, (_, donated) = self.rows()
        return f"memory a device: {whole}: {', '.join(f'{name} {n}' for name, n in inner)}; {donated} donated"

    def rows(self) -> list[tuple[str, str]]:
        """The need, what it is made of, and what of it is donated, each as (what, bytes)."""
        known = f" of {size(self.capacity)}" if self.capacity else ""
        inner = self.parts | {"temporaries": self.need.temporaries, "code": self.need.code}
        inner["the rest"] = self.need.total - sum(inner.values())
        within = [(name, size(n)) for name, n in inner.items() if n > 0]
        return [("memory a device", size(self.need.total) + known), *within, ("donated", size(self.need.donated))]

    def warning(self) -> str | None:
        """A line where it is tight."""
        if not TIGHT < self.share <= FULL:
            return None
        return f"warning: that is {self.share:.0%} of what a device has, and more than {TIGHT:.0%} may fail: {REMEDY}"

    def refusal(self) -> str | None:
        """A line where it can't fit."""
        if self.capacity is None or self.share <= FULL:
            return None
        return (
            f"the run needs {self.need.total:,} bytes on each of {self.devices} device(s), and one has "
            f"{self.capacity:,} ({size(self.need.temporaries)} of it while an update computes); give {REMEDY}"
        )

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "devices": self.devices, "needed": self.need.total, "capacity": self.capacity,
            "share": self.share if self.capacity else None, **self.need._asdict(), "parts": self.parts,
        }  # fmt: skip


def footprint(executable: jax.stages.Compiled, mesh: Mesh, parts: dict[str, int] | None = None) -> Footprint | None:
    """The footprint of a program on `mesh`; None where the compiler does not say."""
    found = need(executable)
    if found is None:
        return None
    device = mesh.local_devices[0]
    total = memory_of(device)
    if total is not None and device.platform == "cpu":  # all of them are this machine
        total //= len(mesh.local_devices)
    return Footprint(found, parts or {}, total, mesh.size)


def need(executable: jax.stages.Compiled) -> Need | None:
    """What the compiler says of a program; None where it does not."""
    about = executable.memory_analysis()
    if about is None:
        return None
    names = ("argument", "output", "alias", "temp", "generated_code")
    return Need(*(int(getattr(about, f"{name}_size_in_bytes")) for name in names))


def parts(algorithm: Algorithm, progress: Progress, context: PyTree) -> dict[str, int]:
    """Bytes on one device of what a run carries from update to update, and of the context that it reads.

    `optimiser` is all of a learner's state but what acts: Adam's moments, and counters.
    """
    parameters = held(algorithm.policy(progress.state))
    replay = held([x for x in jax.tree.leaves(progress.state, is_leaf=is_local) if is_local(x)])
    found = {
        "parameters": parameters,
        "optimiser": held(progress.state) - parameters - replay,
        "environments": held(progress.carry),
        "bank": held(context),
    }
    return found | ({"replay": replay} if replay else {})


def held(tree: PyTree) -> int:
    """Bytes of a pytree of arrays on the first device that has a part of it."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_of(device: jax.Device) -> int | None:
    """Bytes that a device has; of a CPU device all of this machine's memory. None where nobody says."""
    counted = device.memory_stats() if device.platform != "cpu" else None
    if counted and "bytes_limit" in counted:
        return int(counted["bytes_limit"])
    return machine_memory() if device.platform == "cpu" else None


def size(n: float) -> str:
    """1,500,000 -> "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"
