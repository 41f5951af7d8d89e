"""A Gymnasium environment as one that computes on the device: each step calls it back on the host.

    make("callback/my_env:Corridor")

An environment's state travels through the program as bytes: the snapshot of its attributes (`host/snapshot.py`). So a
step is a function of its arguments, and all that holds for the environments on the device holds for it: many seeds in
one program, several processes, exact resume. It is far slower than actors, which keep the environments where they are.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.envs.host import registry as host
from longhaul.envs.host import snapshot
from longhaul.envs.host.gymnasium_vector import Loop
from longhaul.envs.host.vector import specification
from longhaul.spaces import Measure, mapped
from longhaul.types import Environment, Key, PyTree, Spec, TimeStep, transition

PREFIX = "callback/"


class State(NamedTuple):
    packed: jax.Array  # uint8 [N]: the environment's snapshot
    over: jax.Array  # bool


class Called:
    """Gymnasium's environment, one of it for all worlds: each call puts it into the caller's state first."""

    def __init__(self, name: str, vector: Loop) -> None:
        self.name, self._vector, self._lock = name, vector, threading.Lock()
        self.spec: Spec = specification(vector.spec)
        vector.reset(0)
        taken = snapshot.take(vector.environments[0])
        if taken is None:
            raise ValueError(
                f"{name} has attributes that no snapshot holds ({snapshot.unknown(vector.environments[0])}); "
                "choose --topology actors, on one host and with one seed"
            )
        self._form = {name: (value.shape, value.dtype) for name, value in taken.items()}
        self._seen = mapped(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), vector.spec.observation)
        self._size = sum(value.nbytes for value in taken.values())

    def reset(self, key: Key) -> tuple[State, PyTree]:
        packed, observation = self._call(self._begin, (), jax.random.key_data(key))
        return State(packed, jnp.bool_(False)), observation

    def step(self, key: Key, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        numbers = (jax.ShapeDtypeStruct((), jnp.float32), *[jax.ShapeDtypeStruct((), jnp.bool_)] * 2)
        packed, observation, reward, terminated, truncated = self._call(self._go, numbers, state.packed, action)
        led_to = transition(observation, reward, terminated, truncated & ~terminated)
        return State(packed, terminated | truncated), led_to

    def active(self, state: State) -> jax.Array:
        return ~state.over

    def metrics(self, state: State) -> dict[str, Measure]:
        return {}

    def _call(self, function: Any, numbers: tuple[Any, ...], *given: jax.Array) -> Any:
        """Call on the host, once for a whole batch of any shape."""
        results = jax.ShapeDtypeStruct((self._size,), jnp.uint8), self._seen, *numbers
        ranks = [array.ndim for array in given]

        def batched(*arrays: Any) -> Any:
            values = [np.asarray(array) for array in arrays]
            lead = values[0].shape[: values[0].ndim - ranks[0]]
            rows = [value.reshape((-1, *value.shape[len(lead) :])) for value in values]
            with self._lock:
                each = [function(*row) for row in zip(*rows, strict=True)]
            stacked = mapped(lambda *parts: np.stack(parts), each[0], *each[1:])
            return mapped(lambda array: array.reshape((*lead, *array.shape[1:])), stacked)

        return jax.pure_callback(batched, results, *given, vmap_method="broadcast_all")

    def _begin(self, key_data: np.ndarray) -> tuple[Any, ...]:
        observation = self._vector.reset(int(key_data[0] ^ key_data[-1]) & 0x7FFFFFFF)
        return self._pack(), mapped(lambda leaf: leaf[0].copy(), observation)

    def _go(self, packed: np.ndarray, action: np.ndarray) -> tuple[Any, ...]:
        inner = self._vector.environments[0]
        snapshot.restore(inner, self._unpack(packed))
        observation, reward, terminated, truncated = self._vector.once(inner, action)
        return self._pack(), observation, np.float32(reward), np.bool_(terminated), np.bool_(truncated)

    def _pack(self) -> np.ndarray:
        taken = snapshot.take(self._vector.environments[0])
        if taken is None or {name: (value.shape, value.dtype) for name, value in taken.items()} != self._form:
            raise ValueError(f"an attribute of {self.name} changed its form since the first reset; choose --topology "
                             "actors")  # fmt: skip
        return np.concatenate([value.reshape(-1).view(np.uint8) for value in taken.values()])

    def _unpack(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        state, at = {}, 0
        for name, (shape, dtype) in self._form.items():
            count = int(np.prod(shape, dtype=int)) * dtype.itemsize
            state[name] = packed[at : at + count].copy().view(dtype).reshape(shape)
            at += count
        return state


def is_called(name: str) -> bool:
    return name.startswith(PREFIX)


@functools.lru_cache(maxsize=8)
def make(name: str, **options: Any) -> Environment:
    """The environment of a name "callback/module:name". Raises ValueError, one line, where it can't be made, or has no
    snapshot."""
    vector = host.make(host.describe("single/" + name.removeprefix(PREFIX), **options), 1)
    assert isinstance(vector, Loop)
    return Called(name.removeprefix(PREFIX), vector)
