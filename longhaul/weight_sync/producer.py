"""Trees of parameters as tensors by name, and the thread that carries them from a trainer to a `Publisher`.

What is published is a flat mapping of names to arrays (`engine`). Here are the ways to it: of any pytree, whose names
are the paths in it; of a torch module or state dict, whose names are its own. `Producer` is the publishing half of the
`Weights` of `types.py`: training hands over a version and goes on, and of those that wait only the newest travels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from longhaul.weight_sync.manifest import ITEMSIZES
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.torch_arrays import torch_array

PATIENCE = 60.0
"""Seconds that `Producer.drain` waits, unless told otherwise, for who still takes the last version."""

Tensors = Mapping[str, Any]
"""Arrays by name, in the order of layers: NumPy's, JAX's, whatever `numpy.asarray` takes."""


def named(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree by their paths, {"params.torso.0": array}, as they are: nothing is copied.

    ValueError where two have one name, or a leaf is no array that can travel.
    """
    import jax

    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        if name in found:
            raise ValueError(f"two leaves are named {name}; give the tree's nodes other keys")
        if not hasattr(leaf, "shape"):
            leaf = np.asarray(leaf)
        if str(leaf.dtype) not in ITEMSIZES:
            raise ValueError(f"leaf {name} has dtype {leaf.dtype}; there are {', '.join(ITEMSIZES)}")
        found[name] = leaf
    return found


def of_torch(given: Any) -> dict[str, np.ndarray]:
    """The tensors of a torch module or state dict by name, as NumPy's; those on the CPU without a copy.

    Tied parameters go once, under the first of their names, as safetensors asks for. Sharded ones (DTensor) are
    gathered, which all ranks must do alike. ValueError for an entry that is no tensor, or of an unknown dtype.
    """
    import torch

    state = given.state_dict() if isinstance(given, torch.nn.Module) else given
    found: dict[str, np.ndarray] = {}
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
        found[name] = torch_array(tensor, name)
    return found


class Producer:
    """Publishes what a trainer gives it, in a thread of its own. The engine's `Publisher` stays the caller's.

    `take` makes tensors of what was given, in that thread: by default `named`. A version whose `take` returns None is
    left out. What goes wrong there is told to `note` once for each kind of error, and never stops who trains. Example:

        with Publisher("run-7", lanes=[...]) as publisher, Producer(publisher) as weights:
            weights.publish(version, params)  # returns at once; params must stay as they are
    """

    def __init__(
        self,
        publisher: Publisher,
        take: Callable[[Any], Tensors | None] = named,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.publisher, self._take, self._note = publisher, take, note
        self.published, self.passed = 0, 0  # versions that were taken, and that newer ones overtook
        self.newest = -1
        self.seconds: list[float] = []  # of the newest versions, from `publish` until they were copied
        self._waiting: tuple[int, Any, float] | None = None
        self._busy, self._closed = False, False
        self._told: set[str] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="longhaul-producer", daemon=True)
        self._thread.start()

    def publish(self, version: int, params: Any) -> None:
        """Hands over a version; what waits yet is passed over. `params` are read later: nobody may write them."""
        with self._changed:
            if self._closed:
                raise ValueError("the producer is closed")
            self.passed += self._waiting is not None
            self._waiting = (version, params, time.perf_counter())
            self._changed.notify_all()

    def drain(self, seconds: float = PATIENCE) -> bool:
        """Waits until the newest version counts, and whoever follows has it; -> whether that came within `seconds`."""
        until = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._busy, seconds)
        if self.newest < 0:
            return True
        settled = self.publisher.wait(self.newest, max(0.0, until - time.monotonic()))
        while settled:
            told = self.publisher.status()
            if all(each["version"] >= told["version"] for each in told["receivers"]):
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return False

    def close(self) -> None:
        """Takes no more; what waits is let go. Idempotent."""
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
                (version, params, began), self._waiting = self._waiting, None
                self._busy = True
            try:
                self._one(version, params)
            except Exception as error:  # whatever it is: training goes on, and a later version may do
                if (kind := f"{type(error).__name__}: {error}"[:60]) not in self._told:
                    self._told.add(kind)
                    self._note(f"version {version} is not published: {error}")
            del params  # or its memory would be held until the next one comes
            self.seconds = [*self.seconds, time.perf_counter() - began][-64:]

    def _one(self, version: int, params: Any) -> None:
        tensors = self._take(params)
        if tensors is None:
            return
        if self.publisher.publish(version, tensors, patience=5.0):
            self.published += 1
            self.newest = version
