"""Environments of other libraries that compute on the device, as ours: gymnax, Brax, MuJoCo Playground, Jumanji, Navix,
Craftax, XLand-MiniGrid, Pgx.

    make("brax/ant"), make("brax/ant?backend=spring&max_steps=500")

Each suite is one function in `suite_worlds`, from a name to a world that never resets. What is the same for all is done
once, in `Adapted`: the clock, the time limit, who is still playing. So an episode's last observation is never lost (a
suite's own automatic reset is left aside), and a time limit is a truncation wherever the suite lets us tell it from an
end.

Nothing of a suite is imported before an environment of it is made.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul.envs import suite_adapters as worlds
from longhaul.envs.suite_adapters import World
from longhaul.spaces import Measure
from longhaul.types import Environment, Key, PyTree, Spec, TimeStep, transition

LIMIT = 1000
"""Steps of an episode where a suite names no limit, and none is given."""


class State(NamedTuple):
    inner: PyTree
    steps: jax.Array  # int32, of this episode
    over: jax.Array  # bool


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A suite's world that keeps our contract."""

    spec: Spec
    world: World
    limit: int

    @functools.cached_property
    def form(self) -> PyTree:
        """Form of the suite's own state at an episode's start, which later ones are brought into."""
        return jax.eval_shape(self.world.begin, jax.random.key(0))[0]

    def reset(self, key: Key) -> tuple[State, PyTree]:
        """-> (state, observation) of a fresh episode."""
        inner, observation = self.world.begin(key)
        return State(_formed(inner, self.form), jnp.int32(0), jnp.bool_(False)), _clean(observation)

    def step(self, key: Key, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """One step, which never resets."""
        led_to = self.world.step(key, state.inner, action)
        steps = state.steps + 1
        terminated = jnp.asarray(led_to.terminated, bool).reshape(())
        truncated = (jnp.asarray(led_to.truncated, bool).reshape(()) | (steps >= self.limit)) & ~terminated
        reward = jnp.asarray(led_to.reward, jnp.float32).reshape(())
        after = State(_formed(led_to.state, self.form), steps, terminated | truncated)
        return after, transition(_clean(led_to.observation), reward, terminated, truncated)

    def active(self, state: State) -> jax.Array:
        """True if an episode is running."""
        return ~state.over

    def metrics(self, state: State) -> dict[str, Measure]:
        """Nothing beside the return."""
        return {}


def _clean(observation: PyTree) -> PyTree:
    """An observation as arrays of at most 32 bits, of types that say what they are."""
    return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.asarray(x).dtype), observation)


def _formed(state: PyTree, form: PyTree) -> PyTree:
    """`state` with the types of `form`: some suites begin with whole numbers and go on with others, or with weak types,
    and no scan takes that. Keys have one type alone, and no cast."""

    def one(like: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
        return x if jnp.issubdtype(like.dtype, jax.dtypes.prng_key) else jnp.asarray(x).astype(like.dtype)

    return jax.tree.map(one, form, state)


class Suite(NamedTuple):
    """Source of environments of a kind."""

    module: str  # what must be importable
    package: str  # what pip calls it
    make: Callable[..., World]  # (name, options of the suite's own)
    names: Callable[[], list[str]]
    example: str
    about: str


@functools.lru_cache(maxsize=8)
def make(name: str, **given: Any) -> Environment:
    """The environment of a name "SUITE/NAME", with "?option=value&..." behind it: `max_steps` in any suite, `backend`
    of Brax, `impl` of Playground.

    The same object for the same name. Raises ValueError, one line, where the suite is not installed, or has no such
    environment or option.
    """
    whole, _, query = name.partition("?")
    kind, _, inner = whole.partition("/")
    if kind not in SUITES:
        raise ValueError(f"no suite is named {kind!r}; there are {', '.join(SUITES)}")
    suite = SUITES[kind]
    if importlib.util.find_spec(suite.module) is None:
        raise ValueError(f"{name} needs {suite.package}: pip install {suite.package}")
    options: dict[str, Any] = dict(part.partition("=")[::2] for part in query.split("&")) if query else {}
    options |= given
    most = options.pop("max_steps", None)
    if most is not None and not (str(most).isdecimal() and int(most) > 0):
        raise ValueError(f"{name}: max_steps is {most!r}; it must be a whole number of at least 1")
    if inner not in suite.names():
        near = difflib.get_close_matches(inner, suite.names(), n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(f'{kind}/{each}' for each in near)}?" if near else f"longhaul envs {kind}"
        raise ValueError(f"{suite.package} has no environment {inner!r}; {hint}")
    try:
        world = suite.make(inner, **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise ValueError(f"{name}: {error}; every suite takes max_steps") from error
    return adapted(world, int(most) if most else None)


def adapted(world: World, most: int | None = None) -> Adapted:
    """`world`, ended after `most` steps at the latest: else after its own limit, else after `LIMIT`."""
    limit = min(most or world.limit or LIMIT, world.limit or most or LIMIT)
    interval = min(limit, world.interval or limit)
    observation = jax.eval_shape(lambda key: _clean(world.begin(key)[1]), jax.random.key(0))
    spec = Spec(observation, world.action, truncation_interval=interval, max_steps=limit)
    return Adapted(spec, world, limit)


def is_suite(name: str) -> bool:
    """True if an environment's name is of a suite."""
    return name.partition("/")[0] in SUITES


def rows() -> list[tuple[str, str]]:
    """An example of each suite, with its version, or what to install."""
    found = []
    for kind, suite in SUITES.items():
        if importlib.util.find_spec(suite.module) is None:
            found.append((suite.example, f"{suite.about}; pip install {suite.package}"))
            continue
        try:
            version = importlib.metadata.version(suite.package)
        except importlib.metadata.PackageNotFoundError:
            version = "of unknown version"
        found.append((suite.example, f"{suite.about}; {suite.package} {version} is here: longhaul envs {kind}"))
    return found


def names(kind: str) -> list[str]:
    """Every environment of a suite. Raises ValueError where there is no such suite, or it is not installed."""
    if kind not in SUITES:
        raise ValueError(f"no suite is named {kind!r}; there are {', '.join(SUITES)}")
    suite = SUITES[kind]
    if importlib.util.find_spec(suite.module) is None:
        raise ValueError(f"{kind} is not installed: pip install {suite.package}")
    return [f"{kind}/{name}" for name in suite.names()]


SUITES: dict[str, Suite] = {
    "gymnax": Suite(
        "gymnax", "gymnax", worlds.gymnax, worlds.gymnax_names, "gymnax/CartPole-v1", "classic control, bsuite, MinAtar"
    ),
    "brax": Suite(
        "brax", "brax", worlds.brax, worlds.brax_names, "brax/ant", "robots; ?backend=spring, positional, generalized"
    ),
    "playground": Suite(
        "mujoco_playground", "playground", worlds.playground, worlds.playground_names, "playground/CartpoleBalance",
        "robots by MuJoCo MJX",
    ),
    "jumanji": Suite(
        "jumanji", "jumanji", worlds.jumanji, worlds.jumanji_names, "jumanji/Snake-v1", "games, packing, routing"
    ),
    "navix": Suite("navix", "navix", worlds.navix, worlds.navix_names, "navix/Navix-Empty-5x5-v0", "MiniGrid"),
    "craftax": Suite(
        "craftax", "craftax", worlds.craftax, worlds.craftax_names, "craftax/Craftax-Classic-Symbolic-v1",
        "Crafter and NetHack",
    ),
    "xminigrid": Suite(
        "xminigrid", "xminigrid", worlds.minigrid, worlds.minigrid_names, "xminigrid/MiniGrid-Empty-5x5",
        "MiniGrid and XLand",
    ),
    "pgx": Suite("pgx", "pgx", worlds.pgx, worlds.pgx_names, "pgx/minatar-breakout", "board games of one player"),
}  # fmt: skip
"""A plain table: to add a suite, write a function in `suite_worlds` and one row here."""
