"""Placement of the programs that act: which device of this process each actor computes on.

An actor in a thread computes on a device that the learner leaves free, if there is one; actors take these in turn.
Where the learner has all devices, an actor computes on one of those that learn from its rollouts, so that the programs
lie on all of them (Sebulba; Hessel et al. 2021). No number depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longhaul.runtime.errors import RunError
from longhaul.topologies.actor_learner.actor import Collect, Leaves
from longhaul.topologies.staleness import Ticket
from longhaul.types import PyTree


def devices(mesh: Mesh, actors: int, asked: Sequence[int] = ()) -> list[jax.Device]:
    """Device of each of this process's actors. `asked`: numbers of this process's devices, taken in turn.

    Raises RunError for a device that is not there.
    """
    local = jax.local_devices()
    if missing := [number for number in asked if number >= len(local)]:
        raise RunError(
            f"--actor-devices is {' '.join(map(str, asked))}, and this process has {len(local)} device(s): there is no "
            f"device {missing[0]}; give 0 to {len(local) - 1}, or leave it out"
        )
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    free = [local[number] for number in asked] or [device for device in local if device not in own]
    if free:
        return [free[actor % len(free)] for actor in range(actors)]
    return [own[actor * len(own) // actors] for actor in range(actors)]


def copies(devices: Sequence[jax.Device]) -> NamedSharding:
    """Layout of arrays that each of these devices holds whole, once."""
    return NamedSharding(Mesh(np.array([*dict.fromkeys(devices)]), ("actors",)), PartitionSpec())


def copy_on(device: jax.Device, tree: PyTree) -> PyTree:
    """Arrays of which each of several devices has a copy, as `device` holds them: the same memory."""

    def own(leaf: jax.Array) -> jax.Array:
        return next(shard.data for shard in leaf.addressable_shards if shard.device == device)

    return jax.tree.map(own, tree)


def on(device: jax.Device, collect: Collect) -> Collect:
    """`collect` whose programs and arrays are the device's."""

    def run(weights: list[np.ndarray], state: Leaves, key: np.ndarray, ticket: Ticket, version: int) -> Any:
        with jax.default_device(device):
            return collect(weights, state, key, ticket, version)

    return run


def name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


def describe(placed: Sequence[jax.Device]) -> str:
    """Line for people: "actors act on cpu:1 (0, 2), cpu:2 (1, 3)"."""
    groups: dict[str, list[int]] = {}
    for actor, device in enumerate(placed):
        groups.setdefault(name(device), []).append(actor)
    return "actors act on " + ", ".join(
        f"{label} ({', '.join(map(str, numbers))})" for label, numbers in groups.items()
    )
