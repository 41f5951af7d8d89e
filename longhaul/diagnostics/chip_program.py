"""Program of a run for a GPU that this machine lacks: compiled by the GPU's compiler here, and not run.

XLA compiles for a chip from its description, without the chip and its driver; JAX's CUDA plugin has the compiler. So
the planner counts the kernels that the chip would run, and not a CPU's instructions. Where this differs from a
compilation on the chip: no kernel is tuned by trying several.
"""

from __future__ import annotations

import importlib.util
from contextlib import closing
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from longhaul.config.run import Run
from longhaul.diagnostics import compiled_run, compute_plan, hlo
from longhaul.diagnostics.chips import CHIPS
from longhaul.diagnostics.compute_plan import Measured
from longhaul.runtime import device_memory
from longhaul.runtime import mesh as meshes
from longhaul.topologies import fused
from longhaul.training.assemble import assemble
from longhaul.training.data import Feeding, feed
from longhaul.types import PLATFORM, PyTree

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")

TUNING: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""Compiler's options: nothing is tried on a device."""


class Layout(NamedTuple):
    """Layout of a GPU that the compiler asks for, from NVIDIA's data sheets and architecture papers."""

    capability: tuple[int, int]  # of compute: major, minor
    processors: int  # streaming multiprocessors
    lanes: int  # float32 units of each
    threads: int  # most at once in each
    shared: int  # bytes of shared memory of each
    block: int  # bytes of it that a block of threads may have
    cache: int  # bytes of the second level
    clock: float  # GHz


LAYOUTS = {
    "l4": Layout((8, 9), 58, 128, 1536, 102_400, 101_376, 48 << 20, 2.04),
    "a100": Layout((8, 0), 108, 64, 2048, 167_936, 166_912, 40 << 20, 1.41),
    "h100": Layout((9, 0), 132, 128, 2048, 233_472, 232_448, 50 << 20, 1.98),
    "h200": Layout((9, 0), 132, 128, 2048, 233_472, 232_448, 50 << 20, 1.98),
}
"""GPUs of `chips.CHIPS` that programs are compiled for."""


def description(name: str) -> str:
    """Description of a GPU of `LAYOUTS` in the compiler's format, a text protobuf."""
    layout, chip = LAYOUTS[name], CHIPS[name]
    major, minor = layout.capability
    return f"""gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {layout.processors} fpus_per_core: {layout.lanes} clock_rate_ghz: {layout.clock}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {layout.threads}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {layout.block} shared_memory_per_core: {layout.shared}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {chip.memory_bandwidth:.0f} device_memory_size: {chip.memory:.0f} l2_cache_size: {layout.cache}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "NVIDIA {name.upper()}"
"""


def missing(chip: str) -> str | None:
    """Reason why programs are not compiled for a chip of `chips.CHIPS` here; None if they are."""
    if chip not in LAYOUTS:
        return f"only {', '.join(LAYOUTS)} have a compiler on other machines"
    if not any(map(_installed, PLUGINS)):
        return "the GPU's compiler is not installed: pip install 'longhaul-rl[plan]'"
    return None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # no plugin at all
        return False


def measured(run: Run, chip: str, most: int) -> Measured:
    """The program of a resolved run, compiled for `chip` in a process of its own, for a plan of at most so many shards.

    Raises RunError with the last line of a failed process.
    """
    program = compiled_run.ask(run, __name__, "compiled", chip, variables={PLATFORM: "gpu"})
    shards = run.all_devices // run.model
    crossings = compiled_run.crossings_of(program["crossings"])
    if shards == 1 and most > 1:
        crossings = compiled_run.two_shards(run)
    return Measured(
        None, program["steps"] // shards, tuple(tuple(each) for each in program["work"]),
        compute_plan.collectives(crossings, run.model), program["memory"], program["state_bytes"],
        program["carry_bytes"] / shards, run.model, own=True,
    )  # fmt: skip


def mesh(chip: str, devices: int, model: int = 1, fsdp: bool = False) -> Mesh:
    """Mesh of so many GPUs of `LAYOUTS`, to compile for. The compiler is asked in a process without GPUs."""
    topology = topologies.get_topology_desc(chip, "cuda", target_config=description(chip), topology=f"1x1x{devices}")
    return meshes.mesh_of(topology.devices, model, fsdp)


def compiled(run: Run, chip: str) -> dict[str, Any]:
    """Work of the process of `measured`."""
    chips, source = mesh(chip, run.all_devices, run.model, run.fsdp), feed(run)
    with closing(Feeding(source)) as feeding:
        context = feeding.now.context
    assembly = assemble(run, source.within, context, mesh=chips)
    progress = fused.outline(assembly.algorithm, assembly.enter, context, chips)
    assert run.block is not None
    lowered = fused.lowered(
        assembly.algorithm, assembly.collector_in, progress, everywhere(context, chips), chips, block=run.block,
        shards=assembly.shards,
    )  # fmt: skip
    executable = lowered.compile(compiler_options=TUNING)
    need, text = device_memory.need(executable), executable.as_text() or ""
    return {
        "work": compute_plan.work(1, 1, hlo.runs(text), hlo.read(text)), "crossings": hlo.crossings(text),
        "steps": assembly.steps_per_update, "memory": 0.0 if need is None else float(need.total),
        "state_bytes": total_bytes(progress.state), "carry_bytes": total_bytes(progress.carry),
    }  # fmt: skip


def everywhere(tree: PyTree, mesh: Mesh) -> PyTree:
    """Shapes of a pytree that each device of `mesh` holds."""
    lies = meshes.replicated(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), tree)


def total_bytes(tree: PyTree) -> float:
    """Bytes of a pytree of shapes, over all devices."""
    return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)))
