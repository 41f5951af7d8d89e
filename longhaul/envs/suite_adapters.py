"""Environments of other libraries that compute on the device, as ours: gymnax, Brax, MuJoCo Playground, Jumanji, Navix,
Craftax, XLand-MiniGrid, Pgx.

    make("brax/ant"), make("brax/ant?backend=spring&max_steps=500")

Each suite is one function from a name to a `World`, which never resets. What is the same for all is done once, in
`Adapted`: the clock, the time limit, who is still playing. So an episode's last observation is never lost (a suite's
own automatic reset is left aside), and a time limit is a truncation wherever the suite lets us tell it from an end.

Nothing of a suite is imported before an environment of it is made.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import operator
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.runtime.errors import did_you_mean
from longhaul.spaces import Action, Box, Discrete, Masked, Measure, MultiDiscrete
from longhaul.types import Environment, Key, PyTree, Spec, TimeStep, transition

LIMIT = 1000
"""Steps of an episode where a suite names no limit, and none is given."""


class Step(NamedTuple):
    state: PyTree
    observation: PyTree
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array | bool = False  # beside the time limit, which `Adapted` knows


class World(NamedTuple):
    action: Action
    begin: Callable[[Key], tuple[PyTree, PyTree]]  # -> (state, observation)
    step: Callable[[Key, PyTree, jax.Array], Step]
    limit: int | None = None  # steps of an episode; None: none that is known
    interval: int | None = None  # least steps between two truncations of its own; None: it has none


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
        inner, observation = self.world.begin(key)
        return State(formed(inner, self.form), jnp.int32(0), jnp.bool_(False)), _clean(observation)

    def step(self, key: Key, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        inner = jax.tree.map(lambda leaf: leaf, state.inner)  # Playground writes metrics into the state it is given
        led_to = self.world.step(key, inner, action)
        steps = state.steps + 1
        terminated = jnp.asarray(led_to.terminated, bool).reshape(())
        truncated = (jnp.asarray(led_to.truncated, bool).reshape(()) | (steps >= self.limit)) & ~terminated
        reward = jnp.asarray(led_to.reward, jnp.float32).reshape(())
        after = State(formed(led_to.state, self.form), steps, terminated | truncated)
        return after, transition(_clean(led_to.observation), reward, terminated, truncated)

    def active(self, state: State) -> jax.Array:
        return ~state.over

    def metrics(self, state: State) -> dict[str, Measure]:
        return {}


def _clean(observation: PyTree) -> PyTree:
    """An observation as arrays of at most 32 bits, of types that say what they are."""
    return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.asarray(x).dtype), observation)


def formed(state: PyTree, form: PyTree) -> PyTree:
    """`state` with the types of `form`: some suites begin with whole numbers and go on with others, or with weak types,
    and no scan takes that. Keys have one type alone, and no cast."""

    def one(like: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
        return x if jnp.issubdtype(like.dtype, jax.dtypes.prng_key) else jnp.asarray(x).astype(like.dtype)

    return jax.tree.map(one, form, state)


class Suite(NamedTuple):
    module: str  # what must be importable
    package: str  # what pip calls it
    make: Callable[..., World]  # (name, options of the suite's own)
    listing: str | tuple[str, ...]  # names of its environments, or "module:attribute" that has or returns them
    example: str
    about: str

    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def names(self) -> list[str]:
        if isinstance(self.listing, tuple):
            return list(self.listing)
        module, _, attribute = self.listing.partition(":")
        listing = operator.attrgetter(attribute)(_import(module))
        return list(listing() if callable(listing) else listing)


@functools.lru_cache(maxsize=8)
def make(name: str, **given: Any) -> Environment:
    """The environment of a name "SUITE/NAME", with "?option=value&..." behind it: `max_steps` in any suite, `backend`
    of Brax, `impl` of Playground, `iterations` of MJX in both.

    The same object for the same name. Raises ValueError, one line, where the suite is not installed, or has no such
    environment or option.
    """
    whole, _, query = name.partition("?")
    kind, _, inner = whole.partition("/")
    suite = _installed(kind, name)
    options: dict[str, Any] = dict(part.partition("=")[::2] for part in query.split("&")) if query else {}
    options |= given
    most = options.pop("max_steps", None)
    if most is not None and not (str(most).isdecimal() and int(most) > 0):
        raise ValueError(f"{name}: max_steps is {most!r}; it must be a whole number of at least 1")
    if inner not in suite.names():
        near = [f"{kind}/{each}" for each in difflib.get_close_matches(inner, suite.names(), n=3, cutoff=0.3)]
        hint = did_you_mean(near, f"longhaul envs {kind}")
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
    return name.partition("/")[0] in SUITES


def rows() -> list[tuple[str, str]]:
    """An example of each suite, with its version, or what to install."""
    lines = []
    for kind, suite in SUITES.items():
        if not suite.installed():
            lines.append((suite.example, f"{suite.about}; pip install {suite.package}"))
            continue
        try:
            version = importlib.metadata.version(suite.package)
        except importlib.metadata.PackageNotFoundError:
            version = "of unknown version"
        lines.append((suite.example, f"{suite.about}; {suite.package} {version} is here: longhaul envs {kind}"))
    return lines


def names(kind: str) -> list[str]:
    """Every environment of a suite. Raises ValueError where there is no such suite, or it is not installed."""
    return [f"{kind}/{name}" for name in _installed(kind, kind).names()]


def _installed(kind: str, name: str) -> Suite:
    """Suite of this kind; ValueError, one line, where there is none, or where it is not installed."""
    if kind not in SUITES:
        raise ValueError(f"no suite is named {kind!r}; there are {', '.join(SUITES)}")
    suite = SUITES[kind]
    if not suite.installed():
        raise ValueError(f"{name} needs {suite.package}: pip install {suite.package}")
    return suite


def _import(module: str) -> Any:
    with warnings.catch_warnings():  # of what a suite imports, which its user can't help
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def box(low: Any, high: Any, shape: tuple[int, ...]) -> Box:
    """Bounds as one vector; a bound without end becomes 1."""
    sides = [np.broadcast_to(np.asarray(bound, np.float32), shape).reshape(-1) for bound in (low, high)]
    finite = [np.where(np.isfinite(side), side, sign) for side, sign in zip(sides, (-1.0, 1.0), strict=True)]
    return Box(*(tuple(float(x) for x in side) for side in finite))


def gymnax(name: str) -> World:
    """gymnax 1.x, whose `step_env` neither resets nor counts a time limit as an end."""
    env, params = _import("gymnax").make(name)
    if not hasattr(env, "is_truncated"):
        raise ValueError("gymnax before 1.0 does not tell truncation from an end: pip install 'gymnax>=1.0'")
    return gymnax_world(env, params)


def gymnax_world(env: Any, params: Any) -> World:
    """Environment with gymnax's signature; without `is_truncated`, whatever it calls an end is one."""
    space = env.action_space(params)
    whole = hasattr(space, "n")
    action: Action = Discrete(int(space.n)) if whole else box(space.low, space.high, tuple(space.shape))
    shape = tuple(space.shape)

    def begin(key: Key) -> tuple[PyTree, PyTree]:
        observation, state = env.reset_env(key, params)
        return state, observation

    def step(key: Key, state: PyTree, action: jax.Array) -> Step:
        chosen = action if whole else action.reshape(shape)
        observation, state, reward, terminated, _ = env.step_env(key, state, chosen, params)
        truncated = env.is_truncated(state, params) if hasattr(env, "is_truncated") else False
        return Step(state, observation, reward, terminated, truncated)

    limit = getattr(params, "max_steps_in_episode", None)
    return World(action, begin, step, limit and int(limit), limit and int(limit))


def brax(name: str, backend: str | None = None, iterations: Any = None) -> World:
    """Brax without its wrappers, of which the one for episodes cuts after 1,000 steps, as we do.

    `iterations` are those of MJX's solver, with backend mjx alone.
    """
    env = _import("brax.envs").get_environment(name, **({"backend": backend} if backend else {}))
    if iterations is not None:
        if backend != "mjx":
            raise ValueError(f"iterations is {iterations}, and they are MJX's: give backend=mjx, or leave it out")
        env.unwrapped.sys = _iterated(env.unwrapped.sys, iterations)
    return physics_world(env, lambda seen: seen, 1000)


def _iterated(model: Any, iterations: Any) -> Any:
    """Model of MJX whose solver makes at most so many iterations; a single one is no loop, and has a gradient."""
    if not (str(iterations).isdecimal() and int(iterations) > 0):
        raise ValueError(f"iterations is {iterations!r}; it must be a whole number of at least 1")
    return model.tree_replace({"opt.iterations": int(iterations)})


def playground(name: str, impl: str = "jax", iterations: Any = None) -> World:
    """MuJoCo Playground in MJX's JAX form, for its default needs Warp.

    The policy sees `state`, where what only a critic may see is apart. `iterations` are those of MJX's solver.
    """
    registry = _import("mujoco_playground").registry
    config = registry.get_default_config(name)
    overrides = {"impl": impl} if "impl" in config else {}
    env = registry.load(name, config=config, config_overrides=overrides)
    if iterations is not None:
        env._mjx_model = _iterated(env.mjx_model, iterations)  # which has no setter
    repeat = int(config.get("action_repeat", 1))
    return physics_world(
        env, lambda seen: seen["state"] if isinstance(seen, dict) else seen, config.episode_length, repeat
    )


def physics_world(env: Any, see: Callable[[Any], Any], limit: int, repeat: int = 1) -> World:
    """Common part of Brax and Playground: the state is all, and `done` is an end."""

    def begin(key: Key) -> tuple[PyTree, PyTree]:
        state = env.reset(key)
        return state, see(state.obs)

    def step(key: Key, state: PyTree, action: jax.Array) -> Step:
        total, over = jnp.float32(0.0), jnp.bool_(False)
        for _ in range(repeat):
            after = env.step(state, jnp.clip(action, -1.0, 1.0))
            total = total + jnp.where(over, 0.0, after.reward)
            state = after if repeat == 1 else jax.tree.map(functools.partial(jnp.where, over), state, after)
            over = over | (state.done > 0)
        return Step(state, see(state.obs), total, over)

    size = int(env.action_size)
    return World(Box((-1.0,) * size, (1.0,) * size), begin, step, max(1, int(limit) // repeat))


def jumanji(name: str) -> World:
    """Jumanji, whose last step is an end where its discount is 0, and a truncation elsewhere. Nearly all of its
    environments call their time limit an end, so they are told of none: it is kept outside, as a truncation. A mask of
    one choice becomes ours; of several it stays among what is observed."""
    env = _import("jumanji").make(name)
    limit = getattr(env, "time_limit", None)
    if limit is not None:  # of its own episodes: what it made for so many steps is large enough
        env.time_limit = np.iinfo(np.int32).max
    spec = env.action_spec
    if hasattr(spec, "num_values"):
        sizes = np.asarray(spec.num_values)
        counts = tuple(int(n) for n in sizes.ravel())
        action: Action = Discrete(counts[0]) if sizes.ndim == 0 else MultiDiscrete(counts)
    else:
        action = box(spec.minimum, spec.maximum, tuple(spec.shape))
    if np.prod(env.reward_spec.shape, dtype=int) != 1:
        raise ValueError(
            f"jumanji/{name} has a reward for each of several agents, which can't be trained here; choose a game of one"
        )
    shape = tuple(spec.shape)

    def see(observation: Any) -> Any:
        fields = dict(observation._asdict()) if hasattr(observation, "_asdict") else {"observation": observation}
        mask = fields.get("action_mask")
        if mask is not None and isinstance(action, Discrete) and mask.shape == (action.n,):
            del fields["action_mask"]
            return Masked(fields, mask)
        return fields

    def begin(key: Key) -> tuple[PyTree, PyTree]:
        state, timestep = env.reset(key)
        return state, see(timestep.observation)

    def step(key: Key, state: PyTree, action: jax.Array) -> Step:
        state, timestep = env.step(state, action.reshape(shape))
        over, cut = timestep.last(), jnp.all(timestep.discount > 0)
        return Step(state, see(timestep.observation), timestep.reward, over & ~cut, over & cut)

    return World(action, begin, step, limit, limit or 1)


def navix(name: str) -> World:
    """Navix. Its `step` resets after an end, and drops that step's result; so its inner step is called."""
    env = _import("navix").make(name)

    def begin(key: Key) -> tuple[PyTree, PyTree]:
        timestep = env.reset(key)
        return timestep, timestep.observation

    def step(key: Key, timestep: PyTree, action: jax.Array) -> Step:
        running = timestep.replace(step_type=jnp.zeros_like(timestep.step_type))
        after = env.step(running, action)
        kind = after.step_type
        return Step(after, after.observation, after.reward, kind == 2, kind == 1)

    return World(Discrete(len(env.action_set)), begin, step, int(env.max_steps), int(env.max_steps))


CRAFTAX = tuple(f"{kind}-{form}-v1" for kind in ("Craftax", "Craftax-Classic") for form in ("Symbolic", "Pixels"))


def craftax(name: str) -> World:
    """Craftax, which calls its time limit an end: what ends in no other way is a truncation here."""
    env = _import("craftax.craftax_env").make_craftax_env_from_name(name, auto_reset=False)
    params = env.default_params
    endless = params.replace(max_timesteps=np.iinfo(np.int32).max)

    def begin(key: Key) -> tuple[PyTree, PyTree]:
        observation, state = env.reset_env(key, params)
        return state, observation

    def step(key: Key, state: PyTree, action: jax.Array) -> Step:
        observation, state, reward, _, _ = env.step_env(key, state, action, params)
        return Step(state, observation, reward, env.is_terminal(state, endless), state.timestep >= limit)

    limit = int(params.max_timesteps)
    return World(Discrete(int(env.action_space(params).n)), begin, step, limit, limit)


def minigrid(name: str) -> World:
    """XLand-MiniGrid; its observations are tiles and colours by number. A goal reached in the last step is an end."""
    env, params = _import("xminigrid").make(name)

    def begin(key: Key) -> tuple[PyTree, PyTree]:
        timestep = env.reset(params, key)
        return timestep, see(timestep)

    def see(timestep: Any) -> jax.Array:
        return timestep.observation.astype(jnp.uint8)

    def step(key: Key, timestep: PyTree, action: jax.Array) -> Step:
        after = env.step(params, timestep, action)
        over, ended = after.last(), after.discount == 0
        return Step(after, see(after), after.reward, over & ended, over & ~ended)

    limit = int(params.max_steps)
    return World(Discrete(int(env.num_actions(params))), begin, step, limit, limit)


def pgx(name: str) -> World:
    """Pgx's games of one player, with the mask of what is legal. A step that finds a game over gives no reward."""
    env = _import("pgx").make(name)
    if env.num_players != 1:
        raise ValueError(
            f"pgx/{name} is a game of {env.num_players}, and only games of one can be trained in here; choose one: "
            "pgx/minatar-breakout"
        )

    def see(state: Any) -> Masked:
        return Masked(state.observation, state.legal_action_mask)

    def begin(key: Key) -> tuple[PyTree, PyTree]:
        state = env.init(key)
        return state, see(state)

    def step(key: Key, state: PyTree, action: jax.Array) -> Step:
        after = env.step(state, action, key)
        return Step(after, see(after), after.rewards[0], after.terminated, after.truncated)

    return World(Discrete(int(env.num_actions)), begin, step, None, 1)


SUITES: dict[str, Suite] = {
    "gymnax": Suite(
        "gymnax", "gymnax", gymnax, "gymnax:registered_envs", "gymnax/CartPole-v1", "classic control, bsuite, MinAtar"
    ),
    "brax": Suite(
        "brax", "brax", brax, "brax.envs:_envs", "brax/ant", "robots; ?backend=spring, positional, generalized"
    ),
    "playground": Suite(
        "mujoco_playground", "playground", playground, "mujoco_playground:registry.ALL_ENVS",
        "playground/CartpoleBalance", "robots by MuJoCo MJX",
    ),
    "jumanji": Suite(
        "jumanji", "jumanji", jumanji, "jumanji:registered_environments", "jumanji/Snake-v1",
        "games, packing, routing",
    ),
    "navix": Suite("navix", "navix", navix, "navix:registry", "navix/Navix-Empty-5x5-v0", "MiniGrid"),
    "craftax": Suite(
        "craftax", "craftax", craftax, CRAFTAX, "craftax/Craftax-Classic-Symbolic-v1", "Crafter and NetHack"
    ),
    "xminigrid": Suite(
        "xminigrid", "xminigrid", minigrid, "xminigrid:registered_environments", "xminigrid/MiniGrid-Empty-5x5",
        "MiniGrid and XLand",
    ),
    "pgx": Suite("pgx", "pgx", pgx, "pgx:available_envs", "pgx/minatar-breakout", "board games of one player"),
}  # fmt: skip
"""A plain table: to add a suite, write its function and one row here."""
