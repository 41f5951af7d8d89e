"""Stand-in for an environment on the host where one of JAX is expected: it has the spec alone."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from longhaul.envs.host import registry
from longhaul.spaces import Measure
from longhaul.types import Key, PyTree, Spec, TimeStep


@dataclass(frozen=True)
class SpecStub:
    """Spec of an environment that only actors can step."""

    name: str
    spec: Spec

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        raise ValueError(f"{self.name} is stepped on the host; choose --topology actors")

    def step(self, key: Key, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        raise ValueError(f"{self.name} is stepped on the host; choose --topology actors")

    def active(self, state: PyTree) -> jax.Array:
        return jnp.bool_(True)

    def metrics(self, state: PyTree) -> dict[str, Measure]:
        return {}


@functools.cache
def spec_stub(name: str) -> SpecStub:
    """Stub of the environment of that name. ValueError, one line, where it can't be made."""
    vector = registry.make(registry.describe(name), 1)
    try:
        spec = registry.specification(vector)
        return SpecStub(name, dataclasses.replace(spec, agents=spec.agents or 1))
    finally:
        vector.close()
