"""Consumers of a version's tensors: JAX on any mesh, and torch modules in place. For vLLM's workers see `vllm`.

A receiver serves NumPy arrays over one image (`receiver.Served`). Each JAX device takes its own box straight from the
image; a torch module's parameters are written where they lie, since others (compiled graphs, optimisers) hold them.
Names, shapes and dtypes that do not fit are refused before anything is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from longhaul.weight_sync.producer import Producer, named

Arrays = Mapping[str, np.ndarray]
"""Version: read-only arrays by name."""

Forms = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype by name."""


class Latest(Protocol):
    """Part of a `Receiver` that consumers use."""

    def latest(self) -> tuple[int, Arrays]: ...


def fitting(offered: Forms, wanted: Forms) -> None:
    """Raises ValueError for the first tensor that is missing, or of another shape or dtype than wanted."""
    for name, form in wanted.items():
        if name not in offered:
            near = ", ".join(list(offered)[:3])
            raise ValueError(f"{name} is not in the version, whose tensors are {near} ...; give names that map to them")
        if offered[name] != form:
            theirs, ours = (f"{dtype} {list(shape)}" for shape, dtype in (offered[name], form))
            raise ValueError(f"{name} is {theirs} in the version, and {ours} here; publish it so, or cast it first")


def forms(tensors: Mapping[str, Any]) -> Forms:
    """Name -> (shape, dtype) of arrays, or of objects with both."""
    return {name: (tuple(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in tensors.items()}


# ------------------------------------------------------------------------------------------------------------------ JAX


def to_jax(tensors: Arrays, like: Any) -> Any:
    """Version as a pytree of `jax.Array`s with the structure, dtypes and shardings of `like`.

    `like` has arrays or `jax.ShapeDtypeStruct`s; where one has a sharding, on any mesh, each device is given its box of
    the tensor alone. The version may have more tensors. ValueError where it does not fit.
    """
    import jax

    wanted = named(like)
    fitting(forms({name: tensors[name] for name in wanted if name in tensors}), forms(wanted))

    def placed(name: str, leaf: Any) -> Any:
        array, sharding = tensors[name], getattr(leaf, "sharding", None)
        if sharding is None:
            return jax.numpy.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    leaves = [placed(name, leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


class JaxWeights:
    """Received versions as pytrees for JAX, placed on the devices once a version; see `SyncWeights`."""

    def __init__(self, receiver: Latest, like: Any) -> None:
        self._receiver, self._like = receiver, like
        self._held: tuple[int, Any] | None = None
        self._lock = threading.Lock()

    def latest(self) -> tuple[int, Any]:
        """Newest (version, pytree). LookupError before the first version, ValueError where it does not fit."""
        with self._lock:
            version, tensors = self._receiver.latest()
            if self._held is None or self._held[0] != version:
                self._held = (version, to_jax(tensors, self._like))
            return self._held


class SyncWeights:
    """One end of `longhaul.types.Weights`: a learner's with a producer, or an actor's with received weights.

    A process that both publishes and acts may have both. Example:

        learner = SyncWeights(producer=Producer(Publisher("run-7", transports=[transports.serve("tcp:HOST:7171")])))
        actor = SyncWeights(received=JaxWeights(follow(["tcp:HOST:7171"]), like=params))
    """

    def __init__(self, producer: Producer | None = None, received: JaxWeights | None = None) -> None:
        if producer is None and received is None:
            raise ValueError("weights without an end: give a producer, or received weights")
        self._producer, self._received = producer, received

    def publish(self, version: int, params: Any) -> None:
        """Hands over a version and returns at once; `params` must not change afterwards. RuntimeError at an actor."""
        if self._producer is None:
            raise RuntimeError("this end receives weights; publish at the learner's")
        self._producer.publish(version, params)

    def latest(self) -> tuple[int, Any]:
        """Newest (version, params) that was committed here. LookupError before the first; RuntimeError at a learner."""
        if self._received is None:
            raise RuntimeError("this end publishes weights; receive them at an actor's")
        return self._received.latest()


# ---------------------------------------------------------------------------------------------------------------- torch


class _Window:
    """Memory of an array for `numpy.asarray`, not marked read-only: torch has no such mark, and warns."""

    def __init__(self, array: np.ndarray) -> None:
        place = (array.__array_interface__["data"][0], False)
        self.__array_interface__ = {"data": place, "shape": (array.nbytes,), "typestr": "|u1", "version": 3}
        self._array = array  # keeps the memory alive


def torch_tensor(array: np.ndarray) -> Any:
    """Torch tensor of a read-only array, over the same memory where that is contiguous. It must not be written."""
    import torch

    array = np.ascontiguousarray(array).reshape(array.shape)
    dtype = getattr(torch, str(array.dtype))
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    flat = torch.from_numpy(np.asarray(_Window(array)))
    return flat.view(dtype).reshape(array.shape)


def to_torch(tensors: Arrays, module: Any) -> list[str]:
    """Writes a version into a torch module's parameters and buffers, in place; returns the written names.

    ValueError where any does not fit, before the first is written. Tied parameters are written once, and the version
    needs only one of their names. Non-persistent buffers are left alone.
    """
    import torch

    groups: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else (name,)
        groups.setdefault(place, []).append((name, tensor))
    chosen = [next((pair for pair in group if pair[0] in tensors), group[0]) for group in groups.values()]
    wanted = dict(chosen)
    fitting(forms({name: tensors[name] for name in wanted if name in tensors}), forms(wanted))
    with torch.no_grad():
        for name, tensor in chosen:
            tensor.copy_(torch_tensor(tensors[name]))
    return [name for name, _ in chosen]


class TorchWeights:
    """Torch module that follows the newest version: `refresh()` between two batches writes a newer one.

    `before` and `after` are called around a write (to stop admitting requests, to flush a prefix cache).
    """

    def __init__(
        self,
        receiver: Latest,
        module: Any,
        before: Callable[[int], None] = lambda version: None,
        after: Callable[[int], None] = lambda version: None,
    ) -> None:
        self._receiver, self._module, self._before, self._after = receiver, module, before, after
        self.version = -1

    def refresh(self) -> bool:
        """True if a newer version was written. LookupError before the first, ValueError where it does not fit."""
        version, tensors = self._receiver.latest()
        if version == self.version:
            return False
        self._before(version)
        to_torch(tensors, self._module)
        self.version = version
        self._after(version)
        return True
