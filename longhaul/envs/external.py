"""Environments of the user's own, by `package.module:name`: a class, a function that makes one, or one that is made.

    make("my_env:Corridor"), make("my_env:Corridor?length=7")

What it is follows from the methods that it has, in this order: Longhaul's own protocol (`types.Environment`), gymnax's
(`reset_env`, `step_env`), JaxMARL's (`agents`), Brax's (`action_size`). Those of Gymnasium and PettingZoo are stepped
on the host: `canonical` gives them the name of their kind there.

Every environment is traced once before it is used, so that a spec that does not hold is an error that names the part.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.envs import callback, suite_adapters
from longhaul.envs.host import registry as host
from longhaul.runtime import user_modules
from longhaul.runtime.user_modules import is_named, load
from longhaul.spaces import Action, Discrete, Measure, MultiDiscrete, action_shape
from longhaul.types import Environment, Key, PyTree, Spec, TimeStep, transition

OURS = ("spec", "reset", "step")
GYMNAX = ("reset_env", "step_env", "action_space", "default_params")
JAXMARL = ("agents", "reset", "step_env", "observation_space", "action_space")
BRAX = ("reset", "step", "observation_size", "action_size")
GYMNASIUM = ("observation_space", "action_space", "reset", "step")
PETTINGZOO = ("possible_agents", "observation_space", "action_space", "reset", "step")
"""Attributes of an environment of each kind."""


def is_external(name: str) -> bool:
    """True for "package.module:name", with options behind it or not."""
    return is_named(name)


GROUP = "longhaul.environments"
"""Entry points of installed packages whose objects are environments."""


@functools.cache
def installed() -> dict[str, str]:
    """Environments of installed packages by their name: "module:name" each."""
    return {point.name: point.value for point in entry_points(group=GROUP)}


def canonical(name: str, fused: bool = False) -> str:
    """Name by which an environment is made everywhere: that of its kind on the host if it is stepped there.

    `fused`: in a compiled program one of Gymnasium's is called back instead.
    """
    name = installed().get(name, name)
    if not is_external(name):
        return name
    kind = _kind(name, _object(name))
    if kind == "single" and fused:
        return callback.PREFIX + name
    return f"{kind}/{name}" if kind in host.KINDS else name


@functools.lru_cache(maxsize=8)
def make(name: str, **given: Any) -> Environment:
    """The environment of a name "module:name", with "?option=value&..." behind it; the same object for the same name.

    Raises ValueError, one line, where the module or the name in it is missing, where the object is no environment that
    is stepped on the device, and where its spec does not hold.
    """
    name = installed().get(name, name)
    built = _object(name, **given)
    kind = _kind(name, built)
    if kind in host.KINDS:
        raise ValueError(f"{name} is stepped on the host; choose --topology actors")
    if kind == "longhaul":
        check(name, built)  # as it is written
        environment: Environment = _Completed(built)
    elif kind == "gymnax":
        environment = suite_adapters.adapted(suite_adapters.gymnax_world(built, built.default_params))
    elif kind == "jaxmarl":
        environment = multi_agent(built)
    else:
        environment = suite_adapters.adapted(
            suite_adapters.physics_world(built, lambda seen: seen, suite_adapters.LIMIT)
        )
    check(name, environment)
    return environment


def importable(name: str) -> bool:
    """False for what a notebook or a script defines, where no other process finds it."""
    path = name.partition("/")[2] if host.is_hosted(name) else name
    if not is_external(path):
        return True
    module = path.partition(":")[0]
    try:
        return module != "__main__" and importlib.util.find_spec(module) is not None
    except (ValueError, ModuleNotFoundError):  # a module that came from no file; a part of one that is no package
        return False


def source(name: str) -> user_modules.Source | None:
    """Origin of an environment of the user's, whose module can be imported; None for any other."""
    kind, _, path = name.partition("/") if host.is_hosted(name) or callback.is_called(name) else ("", "", name)
    if not is_external(path):
        return None
    registers = kind == "gymnasium"  # the module, when it is imported: the name is no object in it
    return user_modules.source(path.partition(":" if registers else "?")[0])


def _object(name: str, **given: Any) -> Any:
    """Object that "module:name?options" names, made where it is a class or a function."""
    path, options = host.with_options(name)
    target = load(path)
    if not callable(target) or (_has(target, OURS) and not inspect.isclass(target)):
        return target
    try:
        return target(**options | given)
    except TypeError as error:
        if "argument" in str(error):
            raise ValueError(f"{name}: {error}; options are written behind the name: {path}?option=value") from error
        raise ValueError(f"{name} can't be made: {user_modules.described(error)}") from error
    except Exception as error:
        raise ValueError(f"{name} can't be made: {user_modules.described(error)}") from error


def _has(object_: Any, names: tuple[str, ...]) -> bool:
    return all(hasattr(object_, name) for name in names)


def _kind(name: str, object_: Any) -> str:
    """Kind of an environment: a key of `host.registry.KINDS`, or longhaul, gymnax, jaxmarl, brax."""
    if _has(object_, PETTINGZOO):
        return "parallel"
    if _has(object_, OURS) and isinstance(object_.spec, Spec):
        return "longhaul"
    if _has(object_, GYMNAX):
        return "gymnax"
    if _has(object_, JAXMARL):
        return "jaxmarl"
    if _has(object_, BRAX):
        return "brax"
    if _has(object_, GYMNASIUM):
        return "vector" if _has(object_, ("num_envs", "single_action_space")) else "single"
    if {*OURS} <= {*dir(object_)}:  # a property that fails is not there for `hasattr`
        try:
            spec = object_.spec
        except Exception as error:
            raise ValueError(f"{name}: its spec can't be read: {user_modules.described(error)}") from error
        raise ValueError(f"{name}: its spec is a {type(spec).__name__}; it must be a longhaul.types.Spec")
    raise ValueError(
        f"{name} is a {type(object_).__name__}, and no environment: it has neither {', '.join(OURS)} (Longhaul), "
        f"{', '.join(GYMNAX[:2])} (gymnax), {', '.join(BRAX[2:])} (Brax) nor {', '.join(GYMNASIUM[:2])} (Gymnasium)"
    )


class _Own(NamedTuple):
    inner: PyTree
    over: jax.Array  # bool, [A] with agents


@dataclasses.dataclass(frozen=True)
class _Completed:
    """An environment with what ours may leave out (`active` without agents, `metrics`), and numbers of fixed types."""

    environment: Any

    @property
    def spec(self) -> Spec:
        spec: Spec = self.environment.spec
        return spec

    @functools.cached_property
    def form(self) -> PyTree:
        """Form of the state at an episode's start, which later ones are brought into."""
        return jax.eval_shape(self.environment.reset, jax.random.key(0))[0]

    def reset(self, key: Key) -> tuple[_Own, PyTree]:
        inner, observation = self.environment.reset(key)
        return _Own(suite_adapters.formed(inner, self.form), jnp.zeros(self._agents, bool)), observation

    def step(self, key: Key, state: _Own, action: jax.Array) -> tuple[_Own, TimeStep]:
        inner, led_to = self.environment.step(key, state.inner, action)
        reward = jnp.asarray(led_to.reward, jnp.float32)
        after = _Own(suite_adapters.formed(inner, self.form), state.over | led_to.terminated | led_to.truncated)
        return after, transition(led_to.observation, reward, led_to.terminated, led_to.truncated)

    def active(self, state: _Own) -> jax.Array:
        if not _has(self.environment, ("active",)):
            return ~state.over
        playing: jax.Array = self.environment.active(state.inner)
        return playing

    def metrics(self, state: _Own) -> dict[str, Measure]:
        scores: dict[str, Measure] = (
            self.environment.metrics(state.inner) if _has(self.environment, ("metrics",)) else {}
        )
        return scores

    @property
    def _agents(self) -> tuple[int, ...]:
        return () if self.spec.agents is None else (self.spec.agents,)


# ------------------------------------------------------------------------------------------------------- multi-agent


class _Team(NamedTuple):
    inner: PyTree
    steps: jax.Array  # int32, of this episode
    over: jax.Array  # bool [A]


@dataclasses.dataclass(frozen=True)
class _MultiAgent:
    """An environment with JaxMARL's signature, whose agents all see and do what has one shape."""

    spec: Spec
    environment: Any

    def _rows(self, by_agent: Any, dtype: Any = None) -> jax.Array:
        return jnp.stack([jnp.asarray(by_agent[name], dtype) for name in self.environment.agents])

    def reset(self, key: Key) -> tuple[_Team, PyTree]:
        observation, inner = self.environment.reset(key)
        return _Team(inner, jnp.int32(0), jnp.zeros(self.spec.agents or 0, bool)), self._rows(observation)

    def step(self, key: Key, state: _Team, action: jax.Array) -> tuple[_Team, TimeStep]:
        assert self.spec.max_steps is not None
        actions = {name: action[i] for i, name in enumerate(self.environment.agents)}
        observation, inner, reward, done, _ = self.environment.step_env(key, state.inner, actions)
        steps = state.steps + 1
        terminated = self._rows(done, bool)
        truncated = (steps >= self.spec.max_steps) & ~terminated
        after = _Team(inner, steps, state.over | terminated | truncated)
        return after, transition(self._rows(observation), self._rows(reward, jnp.float32), terminated, truncated)

    def active(self, state: _Team) -> jax.Array:
        return ~state.over

    def metrics(self, state: _Team) -> dict[str, Measure]:
        return {}


def multi_agent(environment: Any) -> Environment:
    """JaxMARL's environment as ours. ValueError where its agents differ in what they see or do."""
    names = list(environment.agents)
    actions = [environment.action_space(name) for name in names]
    spaces = [_action(space) for space in actions]
    seen = jax.eval_shape(environment.reset, jax.random.key(0))[0]
    shapes = [(seen[name].shape, seen[name].dtype) for name in names]
    for i, name in enumerate(names):
        if (spaces[i], shapes[i]) != (spaces[0], shapes[0]):
            raise ValueError(
                f"agent {name} sees {shapes[i]} and does {spaces[i]}, and {names[0]} sees {shapes[0]} and does "
                f"{spaces[0]}; agents must be alike: pad them (JaxMARL's CTRolloutManager does)"
            )
    limit = int(getattr(environment, "max_steps", suite_adapters.LIMIT))
    observation = jax.ShapeDtypeStruct(*shapes[0])
    spec = Spec(observation, spaces[0], agents=len(names), truncation_interval=limit, max_steps=limit)
    return _MultiAgent(spec, environment)


def _action(space: Any) -> Action:
    if hasattr(space, "n"):
        return Discrete(int(space.n))
    if hasattr(space, "num_categories"):
        return MultiDiscrete(tuple(int(n) for n in np.ravel(space.num_categories)))
    return suite_adapters.box(space.low, space.high, tuple(space.shape))


# ------------------------------------------------------------------------------------------------------------- checks


def check(name: str, environment: Environment) -> None:
    """Raises ValueError, naming the part, where an environment does not do what its spec says. Traces, never runs."""
    spec = environment.spec
    agents = () if spec.agents is None else (spec.agents,)
    if spec.max_steps is None:
        raise ValueError(
            f"{name}: spec.max_steps is None, and episodes must end to be evaluated; say how long the longest is, or "
            "wrap it: longhaul.environment.time_limit(env, 1000)"
        )
    shape, dtype = action_shape(spec.action)
    action = jax.ShapeDtypeStruct((*agents, *shape), dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state, first = _trace(f"{name}: reset", environment.reset, key)
    _check_against_spec(f"{name}: the observation of reset", first, spec.observation, agents)
    following, led_to = _trace(f"{name}: step", environment.step, key, state, action)
    if not isinstance(led_to, TimeStep):
        raise ValueError(f"{name}: step returns {type(led_to).__name__} second; it must be a longhaul TimeStep")
    _check_against_spec(f"{name}: the observation of step", led_to.observation, spec.observation, agents)
    for part, expected, kind in (("reward", "float32", jnp.number), ("terminated", "bool", jnp.bool_),
                               ("truncated", "bool", jnp.bool_)):  # fmt: skip
        value = getattr(led_to, part)
        if value.shape != agents or not jnp.issubdtype(value.dtype, kind):
            raise ValueError(f"{name}: {part} is {_form(value)}; it must be {expected}{list(agents)}")
    _check_same_form(f"{name}: the state after step", following, state)


def _trace(name: str, function: Any, *given: Any) -> Any:
    try:
        result = jax.eval_shape(function, *given)
    except Exception as error:
        raise ValueError(user_modules.untraceable(name, error)) from error
    if not isinstance(result, tuple) or len(result) != 2:
        returned = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        pair = "(state, longhaul.types.transition(...))" if name.endswith("step") else "(state, observation)"
        raise ValueError(f"{name} returns {returned}; it must be a pair {pair}")
    return result


def _form(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}"


def _check_against_spec(name: str, found: PyTree, expected: PyTree, agents: tuple[int, ...]) -> None:
    whole = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*agents, *leaf.shape), leaf.dtype), expected)
    _check_same_form(name, found, whole, "the spec says")


def _check_same_form(name: str, found: PyTree, expected: PyTree, says: str = "reset's is") -> None:
    structure, expected_structure = jax.tree.structure(found), jax.tree.structure(expected)
    if bool(structure != expected_structure):  # type: ignore[operator]  # JAX says nothing of their types
        raise ValueError(f"{name} is {structure}; {says} {expected_structure}")
    for (path, leaf), like in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
            raise ValueError(f"{name}{jax.tree_util.keystr(path)} is {_form(leaf)}; {says} {_form(like)}")
