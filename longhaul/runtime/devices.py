"""Cores, memory and devices of this machine, the mesh of a run as plain data, and the number of devices that JAX shows.

JAX is imported inside functions: launchers need cores and memory without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil

from longhaul.runtime.errors import RunError

NVIDIA = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/nvgpu/igpu0")
"""Devices by which JAX knows that there is a GPU of NVIDIA; where none is there, and no other platform may be taken,
JAX fails by an assertion without a text."""

CGROUP = Path("/sys/fs/cgroup")
"""Limits of a container (cgroup version 2)."""


MOST_OF_A_CPU = 2048
"""Largest number of devices that a process's CPU shows: JAX takes those after them for another process's."""


class MeshShape(NamedTuple):
    """Numbers of shards of the worlds and of parts of the parameters; a device holds one of each."""

    data: int | None  # None: as many as there are devices for
    model: int = 1
    fsdp: bool = False  # the devices of `data` hold a part of the parameters each

    @property
    def fully(self) -> int:
        """Parts of the parameters over `data`."""
        return (self.data or 1) if self.fsdp else 1

    @property
    def parts(self) -> int:
        """Parts of the parameters."""
        return self.fully * self.model

    def __str__(self) -> str:
        """The shape as `--mesh` takes it."""
        return f"data={self.data or 'all'}" + f",model={self.model}" * (self.model > 1)


def cores() -> int:
    """Number of cores that this process may use: its affinity, and its container's share of the machine."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _limit("cpu.max").partition(" ")
    return max(1, min(own, -(-int(quota) // int(period)))) if quota.isdigit() and period.isdigit() else own


def machine_memory() -> int:
    """Bytes of memory of this machine, or of its container."""
    total, limit = int(psutil.virtual_memory().total), _limit("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def most_of_a_file() -> int:
    """Bytes that the arrays of one file may take: three quarters of the memory. A megabyte may hold a gigabyte of
    zeros."""
    return machine_memory() * 3 // 4


def _limit(name: str) -> str:
    """Text of a limit of the container; "" where there is none."""
    try:
        return (CGROUP / name).read_text().strip()
    except OSError:
        return ""


def on_cpu() -> bool:
    """True if a run computes on the CPU, without starting JAX (which then could not create several CPU devices)."""
    accelerators = "/dev/nvidia0", "/dev/kfd", "/dev/accel0", "/dev/vfio/0"
    return os.environ.get("JAX_PLATFORMS", "").startswith("cpu") or not any(map(os.path.exists, accelerators))


def default_threads(devices: int) -> int:
    setting = os.environ.get("NPROC", "")
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    # One thread: a pool only slows many small kernels (1.4 times at 4 environments). On an accelerator the host's
    # threads compile.
    return 1 if devices == 1 and on_cpu() else max(cores(), devices)


def started() -> int | None:
    """Number of this process's devices if JAX has started, and shows no others any more; else None."""
    import jax

    before: int = jax.config.values["jax_num_cpu_devices"]
    try:
        jax.config.update("jax_num_cpu_devices", max(before, 0) + 1)  # a value that changes nothing would be taken
    except RuntimeError:
        return jax.local_device_count()
    jax.config.update("jax_num_cpu_devices", before)
    return None


_announced = False


def announce(devices: int, threads: int | None) -> None:
    """Message of process 0's devices to the others' `prepare_announced`: JAX starts in all of them at once.

    The first call counts.
    """
    global _announced
    from longhaul.runtime import process_group

    if not _announced:
        _announced = True
        process_group.tell("devices", [devices, threads])


def prepare_announced() -> None:
    """Start of JAX with the devices that process 0 announces."""
    import jax

    from longhaul.runtime import process_group

    devices, threads = process_group.hear("devices")
    prepare_devices(devices, threads)
    jax.devices()


def prepare_devices(devices: int, threads: int | None = None, *, inline: bool = False) -> None:
    """Preparation of the CPU to show `devices` devices, with `threads` in all. After JAX's start it changes nothing.

    `devices` counts both axes of the mesh; several processes share them evenly. With `inline` the CPU's programs run in
    the calling thread: handing small ones to a thread of JAX's and waiting costs as much as their computation.
    """
    import jax

    from longhaul.runtime import compile_cache, process_group

    if os.environ.get("JAX_PLATFORMS") == "cuda" and not any(map(os.path.exists, NVIDIA)):
        raise RunError("JAX_PLATFORMS is cuda, and this machine shows no GPU of NVIDIA; unset it, or set it to cpu")
    if inline:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    processes, all_devices = process_group.count(), devices
    if devices % processes:
        raise RunError(
            f"--mesh is of {devices} devices, which {processes} processes can't share evenly; choose a multiple of "
            f"{processes}, or another number of processes"
        )
    devices //= processes
    if devices > MOST_OF_A_CPU and on_cpu():
        raise RunError(
            f"--mesh is of {devices} devices in a process, and a CPU shows at most {MOST_OF_A_CPU}; choose fewer, or "
            "more processes by longhaul launch"
        )
    threads = threads or default_threads(devices) * processes
    os.environ["NPROC"] = str(threads if processes == 1 else max(threads // processes, devices))
    compile_cache.enable(int(os.environ["NPROC"]), on_cpu=on_cpu(), process=process_group.index())
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        if len(jax.devices()) < all_devices:
            count = len(jax.devices())
            raise RunError(
                f"{all_devices} devices are wanted, and JAX already runs with {count}; ask before JAX starts: restart "
                f"Python, or give --mesh data={count}"
            ) from None
