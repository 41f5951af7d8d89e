"""Device memory of a compiled program, reported before it runs.

The sums are the compiler's own (`memory_analysis`); the parts of its arguments follow from their shards. Where the CPU
is the device, a run may count what its process has beside the program (`Footprint.beside`). Other users of the device's
memory are not counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import psutil
from jax.sharding import Mesh

from longhaul.runtime.devices import machine_memory, most_of_a_file
from longhaul.runtime.errors import RunError
from longhaul.types import Algorithm, Progress, PyTree, is_local

FILE = "memory.json"
"""File of a run's folder: `Footprint.plain` of the last start."""

FULL, TIGHT = 1.0, 0.9
"""Shares of a device's memory: above the first a run is refused, above the second it is warned."""

KEPT = 32 << 20
"""Bytes of a block, at most, that the C library keeps for the thread that gave it back: the largest threshold to which
glibc's malloc adapts. Larger ones are the machine's again at once."""

REMEDY = (
    "a smaller network, fewer --num-envs or --num-steps, --accumulate N, --remat full, or more devices by --mesh data=N"
)


class Need(NamedTuple):
    """Bytes of a compiled program on each device."""

    arguments: int
    outputs: int
    donated: int  # of the arguments, reused by outputs
    temporaries: int  # during computation
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.donated + self.temporaries + self.code


class Footprint(NamedTuple):
    """Memory need of a program against a device's capacity."""

    need: Need
    parts: dict[str, int]  # bytes of a device's arguments by kind
    capacity: int | None  # bytes of a device; None if unknown
    devices: int
    beside: dict[str, int] = {}  # noqa: RUF012  bytes outside of the program, by kind
    elsewhere: dict[str, int] = {}  # noqa: RUF012  bytes on each of other devices, by kind; in no sum

    @property
    def total(self) -> int:
        return self.need.total + sum(self.beside.values())

    @property
    def share(self) -> float:
        """Share of the device's memory; 0 if unknown."""
        return self.total / self.capacity if self.capacity else 0.0

    def line(self) -> str:
        """ "memory a device: 0.31 GB of 12.6 GB: parameters 1.2 MB, ...; 9 MB of it donated"."""
        (_, whole), *inner, (_, donated) = self._replace(elsewhere={}).rows()
        others = "".join(f"; {name} {size(n)}" for name, n in self.elsewhere.items())
        return f"memory a device: {whole}: {', '.join(f'{name} {n}' for name, n in inner)}; {donated} donated{others}"

    def rows(self) -> list[tuple[str, str]]:
        """Need, its parts, its donated bytes and those elsewhere, each as (name, bytes)."""
        known = f" of {size(self.capacity)}" if self.capacity else ""
        inner = self.parts | {"temporaries": self.need.temporaries, "code": self.need.code}
        inner["the rest"] = self.need.total - sum(inner.values())
        within = [(name, size(n)) for name, n in (inner | self.beside).items() if n > 0]
        others = [(name, size(n)) for name, n in self.elsewhere.items()]
        return [("memory a device", size(self.total) + known), *within, ("donated", size(self.need.donated)), *others]

    def warning(self) -> str | None:
        """Warning line if memory is tight."""
        if not TIGHT < self.share <= FULL:
            return None
        return f"warning: that is {self.share:.0%} of what a device has, and more than {TIGHT:.0%} may fail: {REMEDY}"

    def refusal(self) -> str | None:
        """Error line if the program cannot fit."""
        if self.capacity is None or self.share <= FULL:
            return None
        when = f"{size(self.need.temporaries)} of it while an update computes" if self.need.code else "its state alone"
        return (
            f"the run needs {self.total:,} bytes on each of {self.devices} device(s), and one has "
            f"{self.capacity:,} ({when}); give {REMEDY}"
        )

    def plain(self) -> dict[str, Any]:
        """The footprint as JSON can hold it."""
        return {
            "devices": self.devices, "needed": self.total, "beside": self.beside, "capacity": self.capacity,
            "elsewhere": self.elsewhere, "share": self.share if self.capacity else None, **self.need._asdict(),
            "parts": self.parts,
        }  # fmt: skip


def footprint(
    executable: jax.stages.Compiled,
    mesh: Mesh,
    parts: dict[str, int] | None = None,
    beside: dict[str, int] | None = None,
) -> Footprint | None:
    """Footprint of a program on `mesh`; None if the compiler does not report it."""
    needed = need(executable)
    if needed is None:
        return None
    return Footprint(needed, parts or {}, capacity(mesh), mesh.size, beside or {})


def check_state(need: int, mesh: Mesh) -> None:
    """Raises RunError if a state of `need` bytes a device, by its shapes, cannot fit; before any of it is allocated."""
    if refusal := Footprint(Need(need, 0, 0, 0, 0), {}, capacity(mesh), mesh.size).refusal():
        raise RunError(refusal)


def capacity(mesh: Mesh) -> int | None:
    """Bytes of a device of `mesh`; None if unknown."""
    device = mesh.local_devices[0]
    total = memory_of(device)
    if total is not None and device.platform == "cpu":  # all CPU devices share this machine
        total //= len(mesh.local_devices)
    return total


def need(executable: jax.stages.Compiled) -> Need | None:
    """Memory need by the compiler; None if not reported."""
    about = executable.memory_analysis()
    if about is None:
        return None
    names = ("argument", "output", "alias", "temp", "generated_code")
    return Need(*(int(getattr(about, f"{name}_size_in_bytes")) for name in names))


def parts(algorithm: Algorithm, progress: Progress, context: PyTree) -> dict[str, int]:
    """Bytes on one device of the state that a run carries from update to update, and of its context.

    `optimiser` is all of a learner's state except the acting parameters: Adam's moments, and counters.
    """
    parameters = bytes_on_device(algorithm.policy(progress.state))
    replay = bytes_on_device([x for x in jax.tree.leaves(progress.state, is_leaf=is_local) if is_local(x)])
    sizes = {
        "parameters": parameters,
        "optimiser": bytes_on_device(progress.state) - parameters - replay,
        "environments": bytes_on_device(progress.carry),
        "bank": bytes_on_device(context),
    }
    return sizes | ({"replay": replay} if replay else {})


def bytes_on_device(tree: PyTree) -> int:
    """Bytes of a pytree of arrays on the first device that has a part of it."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def allocated(function: Any, *arguments: Any) -> PyTree:
    """Result of a jitted function. RunError, before it is allocated, where the memory can't hold it.

    A file may name any sizes, and an allocation that can't succeed may wait for ever.
    """
    leaves = jax.tree.leaves(function.eval_shape(*arguments))
    if (need := sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)) > (most := most_of_a_file()):
        raise RunError(f"its parameters take {size(need)}, and {size(most)} are possible here; see to its run.json")
    return function(*arguments)


def resident() -> int:
    """Bytes of memory of this process and of those that it started."""
    return _over_processes(lambda process: int(process.memory_info().rss))


def peak() -> int:
    """Bytes of memory that this process and those that it started had at most until now, each at its own time."""
    return _over_processes(lambda process: high_water(process.pid) or int(process.memory_info().rss))


def _over_processes(measure: Callable[[psutil.Process], int]) -> int:
    """Sum of a measure over this process and those that it started and that have not ended."""
    process, total = psutil.Process(), 0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended
            total += measure(each)
    return total


def high_water(pid: int) -> int | None:
    """Bytes of memory that a process had at most until now; None where the system does not say.

    `getrusage` would have the parent's peak where that was higher.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return None


def trim() -> None:
    """Return of freed memory, as by the compiler, to the machine, where the C library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def compiled(function: Any, *arguments: Any) -> jax.stages.Compiled:
    """Program of a jitted function for such arguments. What its compiler took is the machine's again before it runs."""
    program: jax.stages.Compiled = function.lower(*arguments).compile()
    trim()
    return program


def memory_of(device: jax.Device) -> int | None:
    """Bytes of a device; of a CPU device all of this machine's memory. None if unknown."""
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
