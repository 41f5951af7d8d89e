"""Peak rates of accelerators from data sheets: operations and bytes a second, memory, links.

Dense products without sparsity. Prices are about the clouds' on-demand prices in dollars an hour a chip; they change:
give your own if they matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul.runtime.devices import machine_memory


class Chip(NamedTuple):
    name: str
    bf16: float  # operations a second
    fp32: float  # of products whose inputs are float32, at JAX's default precision
    memory_bandwidth: float  # bytes a second
    memory: float  # bytes
    link: float  # bytes a second to other devices of its host or slice, one way
    per_host: int  # devices of a host
    price: float  # dollars an hour

    @property
    def kind(self) -> str:
        """ "cpu", "gpu" or "tpu": only a CPU has no price."""
        return "tpu" if self.name.startswith("tpu") else "gpu" if self.price else "cpu"


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("l4", 121e12, 60e12, 300e9, 24e9, 32e9, 8, 0.7),
        Chip("a100", 312e12, 156e12, 2039e9, 80e9, 300e9, 8, 3.7),
        Chip("h100", 989e12, 494e12, 3350e9, 80e9, 450e9, 8, 6.0),
        Chip("h200", 989e12, 494e12, 4800e9, 141e9, 450e9, 8, 7.0),
        Chip("b200", 2250e12, 1125e12, 8000e9, 180e9, 900e9, 8, 9.0),
        Chip("tpu-v4", 275e12, 275e12, 1228e9, 32e9, 150e9, 4, 3.2),
        Chip("tpu-v5e", 197e12, 197e12, 819e9, 16e9, 100e9, 4, 1.2),
        Chip("tpu-v5p", 459e12, 459e12, 2765e9, 95e9, 300e9, 4, 4.2),
        Chip("tpu-v6e", 918e12, 918e12, 1640e9, 32e9, 224e9, 4, 2.7),
    )
}
"""TPUs take float32 inputs of a product in bfloat16 by default, GPUs from the A100 on in TensorFloat-32."""

KINDS = {
    "l4": "l4", "a100": "a100", "h100": "h100", "h200": "h200", "b200": "b200", "tpu v4": "tpu-v4",
    "tpu v5 lite": "tpu-v5e", "tpu v5e": "tpu-v5e", "tpu v5p": "tpu-v5p", "tpu v5": "tpu-v5p", "tpu v6": "tpu-v6e",
}  # fmt: skip
"""Part of JAX's device name -> name here; the first match counts."""


def listed(kind: str) -> Chip | None:
    """Chip of JAX's device kind ("NVIDIA H100 80GB HBM3", "TPU v4"); None if not listed."""
    lowered = kind.lower()
    return next((CHIPS[name] for part, name in KINDS.items() if part in lowered), None)


def of_this_process(devices: int = 1) -> Chip:
    """Chip of this process: listed, else measured in about a second.

    A CPU is shared evenly by `devices` devices.
    """
    device = jax.devices()[0]
    chip = listed(device.device_kind)
    if chip is not None:
        return chip
    memory = (device.memory_stats() or {}).get("bytes_limit") or machine_memory()
    x, w = jnp.ones((4096, 1024), jnp.float32), jnp.ones((1024, 1024), jnp.float32)  # at the size of torsos
    products = 2.0 * x.size * w.shape[1] / least_seconds(jax.jit(jnp.matmul), x, w) / devices
    x = jnp.zeros(32 * 2**20, jnp.float32)  # a large array is read, and another written
    stream = 2.0 * x.nbytes / least_seconds(jax.jit(lambda x: x + 1.0), x) / devices
    return Chip(device.platform, products, products, stream, memory / devices, stream, devices, 0.0)


def machine() -> Chip:
    """This machine's CPU, whose memory its processes share; its rates are those of a short run."""
    return Chip("cpu", 0.0, 0.0, 0.0, float(machine_memory()), 0.0, 1, 0.0)


def least_seconds(work: Callable[..., Any], *arguments: Any) -> float:
    """Wall time of the fastest of five runs, after one to warm up."""
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        jax.block_until_ready(work(*arguments))
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
