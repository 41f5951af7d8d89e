"""Producer: a thread that carries parameters from a trainer to a `Publisher`, and ways to name their tensors.

A publisher takes a flat mapping of names to arrays. `named` makes one of any pytree, whose names are the paths in it;
`of_torch` makes one of a torch module or state dict, with its own names. `Producer` returns to training at once; of the
versions that wait only the newest is sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from longhaul.weight_sync.manifest import ITEMSIZES, numpy_dtype
from longhaul.weight_sync.publisher import Publisher

PATIENCE = 60.0
"""Seconds that `Producer.drain` waits by default for receivers that still take the last version."""

Tensors = Mapping[str, Any]
"""Arrays by name, in the order of layers: NumPy's, JAX's, all that `numpy.asarray` takes."""


def named(tree: Any) -> dict[str, Any]:
    """Leaves of any pytree by their paths, {"params.torso.0": array}, without a copy.

    ValueError where two have the same name, or a leaf's dtype can't be sent.
    """
    import jax

    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        if name in leaves:
            raise ValueError(f"two leaves are named {name}; give the tree's nodes other keys")
        if not hasattr(leaf, "shape"):
            leaf = np.asarray(leaf)
        if str(leaf.dtype) not in ITEMSIZES:
            raise ValueError(f"leaf {name} has dtype {leaf.dtype}; there are {', '.join(ITEMSIZES)}")
        leaves[name] = leaf
    return leaves


def of_torch(given: Any) -> dict[str, np.ndarray]:
    """Tensors of a torch module or state dict by name, as NumPy arrays; those on the CPU without a copy.

    Tied parameters appear once, under the first of their names, as safetensors requires. Sharded ones (DTensor) are
    gathered, which all ranks must do together. ValueError for an entry that is no tensor, or of an unknown dtype.
    """
    import torch

    state = given.state_dict() if isinstance(given, torch.nn.Module) else given
    tensors: dict[str, np.ndarray] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}, and no tensor; leave it out")
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        tensor = tensor.detach()
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEMSIZES:
            raise ValueError(f"{name} has dtype {dtype}; there are {', '.join(ITEMSIZES)}")
        flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        tensors[name] = flat.numpy().view(numpy_dtype(dtype)).reshape(tuple(tensor.shape))
    return tensors


class Producer:
    """Publishes a trainer's versions in a thread of its own. The caller opens and closes the `Publisher`.

    `take` turns the given parameters into tensors, in that thread: by default `named`. A version for which it returns
    None is left out. Each kind of error there is reported to `note` once, and never stops training. Example:

        with Publisher("run-7", transports=[...]) as publisher, Producer(publisher) as weights:
            weights.publish(version, params)  # returns at once; params must stay as they are
    """

    def __init__(
        self,
        publisher: Publisher,
        take: Callable[[Any], Tensors | None] = named,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.publisher, self._take, self._note = publisher, take, note
        self.published = 0
        self.newest = -1
        self._waiting: tuple[int, Any] | None = None
        self._busy, self._closed = False, False
        self._noted: set[str] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="longhaul-producer", daemon=True)
        self._thread.start()

    def publish(self, version: int, params: Any) -> None:
        """Hands over a version; one that still waits is dropped. `params` are read later and must not change.

        Raises ValueError after `close`.
        """
        with self._changed:
            if self._closed:
                raise ValueError("the producer is closed; make a new one")
            self._waiting = (version, params)
            self._changed.notify_all()

    def drain(self, seconds: float = PATIENCE) -> bool:
        """Waits until the newest version counts and all receivers have it; False where that takes longer than
        `seconds`."""
        until = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._busy, seconds)
        if self.newest < 0:
            return True
        return self.publisher.flush(until - time.monotonic()) and self.publisher.wait(self.newest, 0.0)

    def close(self) -> None:
        """Stops; a version that waits is dropped. Idempotent."""
        with self._changed:
            self._closed, self._waiting = True, None
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                if self._waiting is None:
                    return
                (version, params), self._waiting = self._waiting, None
                self._busy = True
            try:
                tensors = self._take(params)
                if tensors is not None and self.publisher.publish(version, tensors, patience=5.0):
                    self.published += 1
                    self.newest = version
                del tensors
            except Exception as error:  # training goes on, and a later version may succeed
                if (kind := f"{type(error).__name__}: {error}"[:60]) not in self._noted:
                    self._noted.add(kind)
                    self._note(f"version {version} is not published: {error}")
            del params  # or its memory would be held until the next version
