"""The names of the environments that ship with Longhaul.

A plain table of functions: to add an environment, write the function that makes it and one line here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from longhaul.envs import callback, classic_control, external, hackmatrix, probes, suite_adapters
from longhaul.envs.hackmatrix.swift_rules.environment import canonical
from longhaul.envs.host import registry as host
from longhaul.runtime.errors import did_you_mean
from longhaul.spaces import Measure
from longhaul.types import Environment, Key, PyTree, Spec, TimeStep

TABLE: dict[str, tuple[Callable[..., Environment], str]] = {
    "cartpole": (classic_control.cartpole, "CartPole-v1: keep a pole upright; 2 actions, 500 steps"),
    "pendulum": (classic_control.pendulum, "Pendulum-v1: swing a rod up and hold it; 1 continuous action, 200 steps"),
    "mountaincar": (classic_control.mountaincar, "MountainCar-v0: rock a car out of a valley; 3 actions, 200 steps"),
    "mountaincar-continuous": (
        classic_control.mountaincar_continuous,
        "MountainCarContinuous-v0: the same with a force; 1 continuous action, 999 steps",
    ),
    "hackmatrix": (hackmatrix.make, "HackMatrix: a turn-based game of 8 stages; 28 masked actions, no time limit"),
    "hackmatrix-fixed": (hackmatrix.fixed, "HackMatrix with eight defects of its trainer's rules put right"),
    "hackmatrix-canonical": (
        canonical,
        "HackMatrix by the rules of the game itself: enemies stay, plan their way, and hit first",
    ),
    "acrobot": (classic_control.acrobot, "Acrobot-v1: swing a two-link arm up; 3 actions, 500 steps"),
}
"""Name -> (function that makes it, one line about it)."""

PROBE = "probe/"


def names() -> list[tuple[str, str]]:
    """Every name with one line about it, probes last."""
    ours = [(name, line) for name, (_, line) in TABLE.items()]
    return ours + [(PROBE + name, (maker.__doc__ or name).splitlines()[0]) for name, maker in probes.PROBES.items()]


def make(name: str, **options: Any) -> Environment:
    """The environment of that name, or of the user's own "package.module:name".

    The options are those of the function that makes it (`max_steps`, say); they may stand behind the name:
    "cartpole?max_steps=200".

    Raises ValueError for an unknown name or option, with the nearest ones, and where the function finds a bad value.
    """
    if suite_adapters.is_suite(name):
        return suite_adapters.make(name, **options)
    if callback.is_called(name):
        return callback.make(name, **options)
    if external.is_external(name) or name in external.installed():
        return external.make(name, **options)
    name, behind = host.with_options(name)
    options = behind | options
    known = [known_name for known_name, _ in names()]
    if name not in known:
        near, elsewhere = _suggest(name, known), _elsewhere(name)
        hints = [elsewhere] if elsewhere and near.startswith("there are") else [near, elsewhere]
        raise ValueError(f"no environment is named {name!r}; {' '.join(filter(None, hints))}")
    maker = probes.PROBES[name.removeprefix(PROBE)] if name.startswith(PROBE) else TABLE[name][0]
    takes = list(inspect.signature(maker).parameters)
    for option in options:
        if option not in takes:
            raise ValueError(f"{name} has no option {option!r}; {_suggest(option, takes)}")
    built = maker(**options)
    return built.environment if isinstance(built, probes.Probe) else built


@dataclass(frozen=True)
class SpecStub:
    """Stand-in for an environment on the host where one of JAX is expected: it has the spec alone; actors step it."""

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
    vector = host.make(host.describe(name), 1)
    try:
        spec = host.specification(vector)
        return SpecStub(name, dataclasses.replace(spec, agents=spec.agents or 1))
    finally:
        vector.close()


def _elsewhere(name: str) -> str:
    """Name to give for an environment of the user's, of Gymnasium or of Atari that is written otherwise; "" if none."""
    if file := re.fullmatch(r"(?:.*/)?(\w+)\.py(?::(\w+))?", name):
        return f"one of your own is {file[1]}:{file[2] or 'NAME'}, given in the folder of its file"
    module, _, path = name.rpartition(".")
    if external.is_external(f"{module}:{path}"):
        return f"one of your own is {module}:{path}"
    if atari := re.fullmatch(r"(?:ALE|[Aa]tari)/(\w+?)(?:-v\d+)?", name):
        return f"Atari's is ale/{re.sub(r'(?<!^)(?=[A-Z])', '_', atari[1]).lower()}"
    return f"Gymnasium's is gymnasium/{name}" if re.fullmatch(r"[\w./-]+-v\d+", name) else ""


def _suggest(name: str, known: list[str]) -> str:
    if not known:
        return "it takes none"
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return did_you_mean(near, f"there are {', '.join(known)}")
