"""Algorithms of the user's own, by `package.module:name`: the class of a config that makes the algorithm.

    @dataclass(frozen=True)
    class A2C:
        lr: float = setting(7e-4, "learning rate", above=0)

        def make(self, spec, context):  # types.Spec, algorithms.run_context.Context
            return Algorithm(init, policy, memory, act, learn)

Its described fields become flags. It may have `check(*, columns, steps)`, which raises FieldError for sizes of a shard,
and a `title` for the help. Without JAX, so that flags start fast; the user's module imports it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import types
import typing
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from longhaul.algorithms.config import ALGORITHMS, LOSSES, AlgorithmConfig, InMinibatches
from longhaul.runtime import config_fields, user_modules
from longhaul.runtime.errors import ModuleError, RunError, did_you_mean

if TYPE_CHECKING:
    from longhaul.algorithms.run_context import RunContext
    from longhaul.types import Algorithm, Spec

GROUP = "longhaul.algorithms"
"""Entry points of installed packages whose objects are algorithms."""

PLAIN = (int, float, str, bool)
"""Types of a described field, alone, as elements of a tuple, or beside None."""


@functools.cache
def installed() -> dict[str, str]:
    """Algorithms of installed packages by their name: "module:name" each."""
    return {point.name: point.value for point in entry_points(group=GROUP)}


def load(name: str) -> AlgorithmConfig:
    """Config of an algorithm by its name: ours, an installed package's, or the user's own "module:name".

    Raises RunError, one line, where there is none, or where a part of it is missing.
    """
    if name in ALGORITHMS:
        ours: AlgorithmConfig = ALGORITHMS[name]()
        return ours
    path = installed().get(name, name)
    if not user_modules.is_named(path):
        names = [*ALGORITHMS, *installed()]
        near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
        hint = did_you_mean(near, f"there are {', '.join(names)}, or module:name")
        hint = f"it is a loss of grpo: --loss {name.lower()}" if name.lower() in LOSSES else hint
        raise RunError(f"no algorithm is named {name!r}; {hint}")
    try:
        return config_of(user_modules.load(path))
    except ValueError as error:
        raise ModuleError(f"--algorithm {name}: {error}") from error


def config_of(candidate: Any) -> AlgorithmConfig:
    """Config of a class, or one that is made. Raises ValueError, one line, that names the part that is missing."""
    kind = candidate if inspect.isclass(candidate) else type(candidate)
    if kind in ALGORITHMS.values():
        return typing.cast(AlgorithmConfig, candidate() if candidate is kind else candidate)
    if inspect.isroutine(candidate) or not dataclasses.is_dataclass(kind):
        found_type = "a function" if inspect.isroutine(candidate) else f"{kind.__name__}, which is no dataclass"
        raise ValueError(f"it is {found_type}; an algorithm is the class of its config: @dataclass(frozen=True), with "
                         "make(self, spec, context)")  # fmt: skip
    if not is_own(kind):
        raise ValueError("it has no make(self, spec, context), which returns its longhaul.types.Algorithm")
    if "<" in kind.__qualname__:
        raise ValueError("it stands within a function, where a resumed run does not find it; move it out")
    without = [field.name for field in dataclasses.fields(kind) if not _default(field)]
    if without:
        raise ValueError(f"{without[0]} has no default; every field of an algorithm needs one")
    config = candidate() if candidate is kind else candidate
    for leaf in config_fields.walk(config):
        hint = typing.get_type_hints(leaf.owner)[leaf.path[-1]]
        inner = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union, tuple) else (hint,)
        if not {option for option in inner if option not in (type(None), ...)} <= set(PLAIN):
            raise ValueError(f"{leaf.name} is {hint}; a field with a setting is an int, float, str or bool")
    return typing.cast(AlgorithmConfig, config)


def is_own(kind: type) -> bool:
    """True for the class of an algorithm of the user's own."""
    return dataclasses.is_dataclass(kind) and kind not in ALGORITHMS.values() and callable(getattr(kind, "make", None))


def name_of(config: Any) -> str:
    """Name of an algorithm: ours, or "module:name"."""
    kind = type(config)
    return f"{kind.__module__}:{kind.__qualname__}" if is_own(kind) else str(kind.name)


def title(config: Any) -> str:
    """Name of an algorithm for a person."""
    return str(getattr(config, "title", type(config).__name__))


def in_minibatches(config: Any) -> TypeGuard[InMinibatches]:
    """True where the minibatches and epochs of a config follow from the batch."""
    named = {field.name for field in dataclasses.fields(config)}
    return isinstance(config, InMinibatches) or (is_own(type(config)) and {"num_minibatches", "update_epochs"} <= named)


def memory(config: Any) -> int:
    """Width of the network's memory; 0 where there is none."""
    return int(getattr(getattr(config, "network", None), "memory", 0))


def _default(field: dataclasses.Field[Any]) -> bool:
    return (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)


class Acting(NamedTuple):
    """Acting part of a state where it is no NamedTuple with `params`, which runs count and digest."""

    params: Any


def make(config: Any, spec: Spec, context: RunContext) -> Algorithm:
    """Algorithm of the user's own. Raises ValueError, one line, where `make` returns something else."""
    from longhaul.types import Algorithm

    algorithm = config.make(spec, context)
    if not isinstance(algorithm, Algorithm):
        raise ValueError(
            f"{name_of(config)}: make returns {type(algorithm).__name__}; it must return a longhaul.types.Algorithm of "
            f"{', '.join(Algorithm._fields)}"
        )

    def policy(state: Any) -> Any:
        acting = algorithm.policy(state)
        return acting if "params" in getattr(acting, "_fields", ()) else Acting(acting)

    def act(acting: Any, memory: Any, observation: Any, key: Any) -> Any:
        return algorithm.act(acting.params if isinstance(acting, Acting) else acting, memory, observation, key)

    return algorithm._replace(policy=policy, act=act)


def check(config: Any, spec: Spec, context: RunContext) -> None:
    """Raises ValueError, one line, where the algorithm does not act as its environment asks. Traces, never runs."""
    import jax

    from longhaul.spaces import action_shape

    name, algorithm = name_of(config), make(config, spec, context)

    def traced(part: str, function: Any, *arguments: Any) -> Any:
        try:
            return jax.eval_shape(function, *arguments)
        except Exception as error:
            raise ValueError(user_modules.untraceable(f"{name}: {part}", error)) from error

    key = jax.eval_shape(lambda: jax.random.key(0))
    state = traced("init", algorithm.init, key)
    acting = traced("policy", algorithm.policy, state)
    memory = traced("memory", lambda: algorithm.memory(2))
    seen = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), spec.observation)
    shape, dtype = action_shape(spec.action)
    for sampled in (True, False):
        result = traced("act", algorithm.act, acting, memory, seen, key if sampled else None)
        if not isinstance(result, tuple) or len(result) != 3:
            raise ValueError(f"{name}: act returns {type(result).__name__}; it must return (action, memory, extras)")
        action = result[0]
        if (action.shape, action.dtype) != ((2, *shape), dtype):
            raise ValueError(
                f"{name}: of 2 observations act returns actions {action.dtype}{list(action.shape)}; the environment "
                f"takes {jax.numpy.dtype(dtype)}{[2, *shape]}"
            )
