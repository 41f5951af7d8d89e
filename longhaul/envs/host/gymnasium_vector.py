"""Vector environments of Gymnasium, EnvPool and ale_py as a `HostVector`, in any of Gymnasium's autoreset modes.

With SAME_STEP the true last observation is in `infos["final_obs"]`; with NEXT_STEP it is what the step returns, and
the step after it is none; with DISABLED we reset ourselves, by `reset_mask`. Where there is a choice we take the first
or the last, whose steps are all real. Environments that exist one by one only are stepped in a loop of ours, straight
into the caller's memory.

Gymnasium's spaces become forms of ours: 64-bit numbers become 32-bit ones, `start` of a discrete space becomes 0, and a
dict of exactly "observation" and "action_mask" becomes a `Masked`. Isaac Lab and EnvPool speak of the same spaces.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from longhaul.envs.host.snapshot import Snapshots
from longhaul.envs.host.vector import (
    NO_RESTORE,
    Finals,
    HostSpec,
    HostStep,
    Interval,
    Slot,
    check_action,
    no_finals,
    no_restore,
    no_state,
    seeds,
    slot,
    stacked,
    take,
    typed,
    write,
)
from longhaul.runtime.errors import first_line
from longhaul.runtime.user_modules import imported, load
from longhaul.spaces import Action, Box, Discrete, Leaf, Masked, MultiDiscrete, Tree, action_shape, mapped

SAME_STEP, NEXT_STEP, DISABLED = "SameStep", "NextStep", "Disabled"
"""Values of gymnasium.vector.AutoresetMode."""

MASKED = {"observation", "action_mask"}
"""The keys of an observation with legal actions, after PettingZoo."""


class Way(NamedTuple):
    """One space in our words."""

    form: Any  # a tree of Leaf, or an Action
    convert: Callable[[Any], Any]  # observations: theirs -> ours; actions: ours [B, ...] -> theirs


def observation_way(space: Any) -> Way:
    """A space of observations; `convert` takes one or a batch. ValueError where arrays of fixed size can't hold it."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        parts = {key: observation_way(space.spaces[key]) for key in sorted(space.spaces)}
        read = {key: part.convert for key, part in parts.items()}
        if set(parts) == MASKED:
            inner, legal = parts["observation"], parts["action_mask"]
            if not isinstance(legal.form, Leaf) or len(legal.form.shape) != 1:
                raise ValueError(f"action_mask is {legal.form}; it must be a vector with a number an action")
            masked = Masked(inner.form, Leaf(legal.form.shape, np.dtype(bool)))
            return Way(masked, lambda value: Masked(inner.convert(value["observation"]), value["action_mask"]))
        return Way(
            {key: part.form for key, part in parts.items()},
            lambda value: {key: convert(value[key]) for key, convert in read.items()},
        )
    if isinstance(space, spaces.Tuple):
        ways = [observation_way(part) for part in space.spaces]
        return Way(
            tuple(way.form for way in ways),
            lambda value: tuple(way.convert(part) for way, part in zip(ways, value, strict=True)),
        )
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        sizes = np.atleast_1d(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        start = space.start
        leaf = Leaf(tuple(space.shape or ()), np.dtype(np.int32), tuple(int(n) for n in sizes.ravel()))
        return Way(leaf, lambda value: value - start if np.any(start) else value)
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        kind = np.dtype(space.dtype)
        narrow = {"f": np.float32, "i": np.int32, "u": np.uint32}
        dtype = np.dtype(narrow[kind.kind]) if kind.itemsize > 4 else kind
        return Way(Leaf(tuple(space.shape), dtype), lambda value: value)
    raise ValueError(f"observations are {space}, and arrays of a fixed size can't hold them; wrap the environment")


def action_way(space: Any, bound: float | None = None) -> Way:
    """A space of actions. `bound` stands in for infinite bounds, within which no policy could choose."""
    from gymnasium import spaces

    shape, dtype = space.shape, space.dtype
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return Way(Discrete(int(space.n)), lambda given: (given + first).astype(dtype))
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        sizes, start = (space.nvec, space.start) if isinstance(space, spaces.MultiDiscrete) else (np.full(shape, 2), 0)
        form: Action = MultiDiscrete(tuple(int(n) for n in np.ravel(sizes)))
        return Way(form, lambda given: (given.reshape(len(given), *shape) + start).astype(dtype))
    if isinstance(space, spaces.Box) and np.issubdtype(dtype, np.floating):
        low, high = (np.ravel(side).astype(np.float64) for side in (space.low, space.high))
        if not np.isfinite([low, high]).all():
            if bound is None:
                raise ValueError(f"actions are {space}, without bounds; the option action_bound=1.0 gives them some")
            low, high = np.maximum(low, -bound), np.minimum(high, bound)
        form = Box(tuple(low.tolist()), tuple(high.tolist()))
        return Way(form, lambda given: np.asarray(given, dtype).reshape(len(given), *shape))
    raise ValueError(f"actions are {space}; they must be Discrete, MultiDiscrete, MultiBinary or a Box of floats")


def choices(action: Action) -> int:
    """The length of a mask of legal actions; ValueError where none can be."""
    match action:
        case Discrete(n):
            return n
        case MultiDiscrete(sizes):
            return sum(sizes)
        case Box():
            raise ValueError("a mask of legal actions for actions that are a Box; leave the option mask away")


class Form(NamedTuple):
    """The spaces of an environment in our words, and the ways between."""

    spec: HostSpec
    read: Callable[[Any, dict[str, Any]], Tree]  # (its observations, infos) -> ours
    act: Callable[[np.ndarray], Any]  # our actions -> its


def form(
    observations: Any, actions: Any, *, limit: int | None = None, interval: int | None = None,
    mask: str | None = None, bound: float | None = None,
) -> Form:  # fmt: skip
    """`limit` steps bound an episode, where known; no column is truncated twice within `interval` (default: limit).

    `mask`: infos have the legal actions under this key. `bound`: of actions that have none.
    """
    seen, done = observation_way(observations), action_way(actions, bound)
    spec = HostSpec(seen.form, done.form, truncation_interval=interval or limit or 1, max_steps=limit)
    if mask is None:
        return Form(spec, lambda value, infos: seen.convert(value), done.convert)
    legal = Leaf((choices(spec.action),), np.dtype(bool))

    def read(value: Any, infos: dict[str, Any]) -> Tree:
        if mask not in infos:
            raise ValueError(f"infos have no {mask!r} but {', '.join(sorted(infos)) or 'nothing'}; see the option mask")
        allowed = np.asarray(infos[mask]).astype(bool)
        # Where an episode ended nothing may be legal, and no policy can choose among nothing.
        return Masked(seen.convert(value), allowed | ~allowed.any(axis=-1, keepdims=True))

    return Form(replace(spec, observation=Masked(seen.form, legal)), read, done.convert)


Begin = Callable[[int], tuple[Any, Any, dict[str, Any]]]


class Vector:
    """A Gymnasium vector environment `inner`. `begin(seed)` -> (environment, observations, infos) of fresh episodes."""

    def __init__(self, begin: Begin, inner: Any, worlds: int, form: Form, mode: str) -> None:
        self.spec, self._form, self._mode, self._begin, self._inner = form.spec, form, mode, begin, inner
        self.worlds = self.columns = worlds
        self._waits = np.zeros(self.columns, bool)  # whose next step only resets
        self._interval, self._none = Interval(self.spec, self.columns), no_finals(self.spec)

    def reset(self, seed: int, out: Slot | None = None) -> Tree:
        self._inner, observation, infos = self._begin(seed)
        self._waits[:] = False
        self._interval = Interval(self.spec, self.columns)
        out = slot(self.spec, self.columns) if out is None else out
        write(out.observation, self._form.read(observation, infos))
        return out.observation

    def step(self, action: np.ndarray, out: Slot | None = None) -> HostStep:
        action = self._form.act(check_action(self.spec, self.columns, action))
        observation, reward, terminated, truncated, infos = self._inner.step(action)
        out = slot(self.spec, self.columns) if out is None else out
        valid = ~self._waits
        np.copyto(out.valid, valid)
        np.multiply(reward, valid, out=out.reward, casting="unsafe")
        np.logical_and(terminated, valid, out=out.terminated)
        np.logical_and(truncated, valid, out=out.truncated)
        ended = out.terminated | out.truncated
        self._interval.check(out.truncated)
        finals = self._none
        if ended.any():
            rows = np.flatnonzero(ended)
            finals = finals._replace(columns=rows.astype(np.int32), observation=self._last(observation, infos, rows))
            if self._mode == DISABLED:
                observation, infos = self._inner.reset(options={"reset_mask": ended})
        if self._mode == NEXT_STEP:
            self._waits = ended
        write(out.observation, self._form.read(observation, infos))
        return HostStep(*out, finals)

    def _last(self, observation: Any, infos: dict[str, Any], rows: np.ndarray) -> Tree:
        """Observations that the steps of these rows truly led to, in memory of their own, of the spec's types."""
        if self._mode != SAME_STEP:
            seen = take(self._form.read(observation, infos), rows)
        else:
            last, of_last = infos["final_obs"], infos.get("final_info", {})
            if isinstance(last, np.ndarray) and last.dtype == object:
                last = _stack([last[row] for row in rows])
                of_last = {
                    key: np.asarray(value)[rows] for key, value in of_last.items() if not isinstance(value, dict)
                }
                seen = self._form.read(last, of_last)
            else:
                seen = take(self._form.read(last, of_last), rows)
        return typed(self.spec, seen)

    state, restore = no_state, no_restore

    def close(self) -> None:
        self._inner.close()


class Loop:
    """Environments one by one, each with the seed that `vector.seeds` gives it, reset in the step that ended.

    With `snapshots` the vector tells its state, as far as the environments' attributes hold it (`snapshot.py`).
    """

    def __init__(self, environments: Sequence[Any], form: Form, *, snapshots: bool = False) -> None:
        self.spec, self._form, self.environments = form.spec, form, list(environments)
        self._snapshots = Snapshots() if snapshots else None
        self.worlds = self.columns = len(self.environments)
        self._interval, self._none = Interval(self.spec, self.columns), no_finals(self.spec)
        self._alone = isinstance(self.spec.observation, Leaf)

    def _put(self, out: Slot, world: int, observation: Any, infos: dict[str, Any]) -> None:
        value = self._form.read(observation, infos)
        if self._alone:
            out.observation[world] = value
        else:
            mapped(lambda to, part: to.__setitem__(world, part), out.observation, value)

    def reset(self, seed: int, out: Slot | None = None) -> Tree:
        out = slot(self.spec, self.columns) if out is None else out
        self._interval = Interval(self.spec, self.columns)
        for world, (inner, its_seed) in enumerate(zip(self.environments, seeds(seed, self.worlds), strict=True)):
            self._put(out, world, *inner.reset(seed=its_seed))
        return out.observation

    def step(self, action: np.ndarray, out: Slot | None = None) -> HostStep:
        out = slot(self.spec, self.columns) if out is None else out
        ended, lasts = [], []
        for world, chosen in enumerate(self._form.act(check_action(self.spec, self.columns, action))):
            observation, reward, terminated, truncated, infos = self.environments[world].step(chosen)
            out.reward[world], out.terminated[world], out.truncated[world] = reward, terminated, truncated
            if terminated or truncated:
                ended.append(world)
                lasts.append(self._form.read(observation, infos))
                observation, infos = self.environments[world].reset()
            self._put(out, world, observation, infos)
        out.valid[:] = True
        self._interval.check(out.truncated)
        if not ended:
            return HostStep(*out, self._none)
        return HostStep(*out, Finals(np.asarray(ended, np.int32), stacked(self.spec, lasts), {}))

    def once(self, inner: Any, action: np.ndarray) -> tuple[Tree, float, bool, bool]:
        """(observation, reward, terminated, truncated) of one environment's step, which resets nothing."""
        observation, reward, terminated, truncated, infos = inner.step(self._form.act(action[None])[0])
        read = self._form.read(observation, infos)
        return typed(self.spec, read), reward, terminated, truncated

    def state(self) -> Tree | None:
        return None if self._snapshots is None else self._snapshots.take(self.environments)

    def restore(self, state: Tree) -> None:
        if self._snapshots is None:
            raise ValueError(NO_RESTORE)
        self._interval = Interval(self.spec, self.columns)
        self._snapshots.restore(self.environments, state)

    def close(self) -> None:
        for inner in self.environments:
            inner.close()


def gymnasium(
    name: str, num_envs: int, seed: int, *, vectorised: bool = True, mask: str | None = None,
    action_bound: float | None = None, truncation_interval: int | None = None, **options: Any,
) -> Vector | Loop:  # fmt: skip
    """An environment of Gymnasium's registry: its own vector form where it has one (and `vectorised`), else a loop.

    "module:Name-v0" is one that the module registers when it is imported, as in `gymnasium.make`. `options` are those
    of the environment. ValueError where there is no such environment, or it can't be made.
    """
    import gymnasium as gym

    module, _, name = name.rpartition(":")
    if module:
        imported(module)
    with _one_line_errors(name):
        own = vectorised and gym.spec(name).vector_entry_point is not None
        if own:
            worlds: Any = gym.make_vec(name, num_envs, vectorization_mode="vector_entry_point", **options)
            limit = worlds.spec.kwargs.get("max_episode_steps")
            return _vector(worlds, limit, truncation_interval, mask, action_bound)
        inner = [gym.make(name, disable_env_checker=True, **options) for _ in range(num_envs)]
    assert inner[0].spec is not None
    spaces = form(
        inner[0].observation_space, inner[0].action_space, limit=inner[0].spec.max_episode_steps,
        interval=truncation_interval, mask=mask, bound=action_bound,
    )  # fmt: skip
    return Loop(inner, spaces)


def single(
    name: str, num_envs: int, seed: int, *, max_steps: int | None = None, mask: str | None = None,
    action_bound: float | None = None, truncation_interval: int | None = None, **options: Any,
) -> Loop:  # fmt: skip
    """Environments of a class or function: `name` is module:name, called with the options, in a loop.

    `max_steps` sets a time limit. ValueError where it makes no environment, or one whose first observations are not
    what its spaces say.
    """
    from gymnasium.wrappers import TimeLimit

    makes = load(name)
    if not callable(makes):
        raise ValueError(f"{name} is one environment; name its class or a function, so that more can be made")
    with _one_line_errors(name):
        inner = [makes(**options) for _ in range(num_envs)]
        if max_steps is not None:
            inner = [TimeLimit(each, max_steps) for each in inner]
    limit = max_steps or getattr(getattr(inner[0], "spec", None), "max_episode_steps", None)
    spaces = form(
        inner[0].observation_space, inner[0].action_space, limit=limit, interval=truncation_interval, mask=mask,
        bound=action_bound,
    )  # fmt: skip
    _check_first(name, inner[0], spaces)
    return Loop(inner, spaces, snapshots=True)


def _check_first(name: str, inner: Any, spaces: Form) -> None:
    """Raises ValueError, naming the part, where a reset or a step does not return what the spaces say."""
    try:
        begun = inner.reset(seed=0)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ValueError(f"{name}: {error}; Gymnasium's is reset(self, *, seed=None, options=None)") from error
    if not isinstance(begun, tuple) or len(begun) != 2:
        raise ValueError(f"{name}: reset returns {type(begun).__name__}; it must be (observation, info)")
    check_observation(f"{name}: the observation of reset", spaces, *begun)
    shape, dtype = action_shape(spaces.spec.action)
    if isinstance(spaces.spec.observation, Masked):  # a legal one is not known before it is asked for
        return
    stepped = inner.step(spaces.act(np.zeros((1, *shape), dtype))[0])
    if not isinstance(stepped, tuple) or len(stepped) != 5:
        found = f"{len(stepped)} values" if isinstance(stepped, tuple) else type(stepped).__name__
        raise ValueError(f"{name}: step returns {found}; it must be (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, infos = stepped
    check_observation(f"{name}: the observation of step", spaces, observation, infos)
    for part, value, kinds in (
        ("reward", reward, "fiu"), ("terminated", terminated, "b"), ("truncated", truncated, "b"),
    ):  # fmt: skip
        array = np.asarray(value)
        if array.shape != () or array.dtype.kind not in kinds:
            expected = "a bool" if kinds == "b" else "a number"
            raise ValueError(f"{name}: {part} is {array.dtype}{list(array.shape)}; it must be {expected}")


def check_observation(name: str, spaces: Form, observation: Any, infos: dict[str, Any]) -> None:
    """Raises ValueError where an observation has not the shapes, or the kinds of numbers, of its space."""

    def compare(leaf: Leaf, value: Any) -> None:
        array = np.asarray(value)
        kind = "i" if array.dtype.kind == "u" and leaf.dtype.kind == "i" else array.dtype.kind
        if array.shape != leaf.shape or kind != leaf.dtype.kind:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}; its space says {leaf.dtype}{list(leaf.shape)}: "
                "make them agree"
            )

    try:
        mapped(compare, spaces.spec.observation, spaces.read(observation, infos))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{name} has not the structure of its space ({error}); return what observation_space says"
        ) from error


def vector(
    name: str, num_envs: int, seed: int, *, mask: str | None = None, action_bound: float | None = None,
    truncation_interval: int | None = None, **options: Any,
) -> Vector:  # fmt: skip
    """Any Gymnasium vector environment: `name` is module:factory, called with the number of worlds and the options."""
    try:
        worlds = load(name)(num_envs, **options)
    except TypeError as error:
        if "positional argument" not in str(error):
            raise
        raise ValueError(f"{name}: {error}; it is called with the number of worlds: def make(num_envs)") from error
    if worlds.num_envs != num_envs:
        raise ValueError(
            f"{name} has made {worlds.num_envs} worlds, and {num_envs} were asked for; make as many "
            "as it is called with"
        )
    if "autoreset_mode" not in worlds.metadata:
        raise ValueError(f"{name} does not say in its metadata which autoreset_mode it has; Gymnasium asks for it")
    return _vector(worlds, None, truncation_interval, mask, action_bound)


def ale(name: str, num_envs: int, seed: int, *, num_threads: int = 1, **options: Any) -> Vector:
    """Atari by ale_py's own vector environment, several times as fast as a loop: frames [4, 84, 84] of uint8.

    `options` are those of `ale_py.vector_env.AtariVectorEnv`. One thread: actors are what runs side by side.
    """
    from ale_py.vector_env import AtariVectorEnv
    from gymnasium.vector import AutoresetMode

    options = {"max_num_frames_per_episode": 108_000, "frameskip": 4, **options}
    with _one_line_errors(name):
        worlds = AtariVectorEnv(
            name, num_envs, num_threads=num_threads, autoreset_mode=AutoresetMode.SAME_STEP, **options
        )
    return _vector(worlds, options["max_num_frames_per_episode"] // options["frameskip"], None, None, None, many=True)


def envpool(
    name: str, num_envs: int, seed: int, *, mask: str | None = None, action_bound: float | None = None,
    truncation_interval: int | None = None, **options: Any,
) -> Vector:  # fmt: skip
    """An environment of EnvPool, synchronous. It resets in the step after the end, and takes its seed when made."""
    import envpool as pools

    def made(seed: int) -> Any:
        with _one_line_errors(name):
            return pools.make(name, env_type="gymnasium", num_envs=num_envs, seed=seeds(seed, 1)[0], **options)

    def begin(seed: int) -> tuple[Any, Any, dict[str, Any]]:
        fresh = made(seed)
        with _one_line_errors(name):
            return fresh, *fresh.reset()

    first = made(seed)
    limit = int(first.spec.config.max_episode_steps)
    with _one_line_errors(name):  # its bounds are of 64 bits, of which Gymnasium warns
        spaces = form(
            first.observation_space, first.action_space, limit=limit, interval=truncation_interval, mask=mask,
            bound=action_bound,
        )  # fmt: skip
    return Vector(begin, first, num_envs, spaces, NEXT_STEP)


def _stack(rows: list[Tree]) -> Tree:
    """Single observations as a batch."""
    return mapped(lambda *parts: np.stack([np.asarray(part) for part in parts]), rows[0], *rows[1:])


def _vector(
    pool: Any, limit: int | None, interval: int | None, mask: str | None, bound: float | None, many: bool = False
) -> Vector:
    """`many`: it takes a seed for each of its environments."""

    def begin(seed: int) -> tuple[Any, Any, dict[str, Any]]:
        given: Any = np.asarray(seeds(seed, pool.num_envs)) if many else seeds(seed, 1)[0]
        return pool, *pool.reset(seed=given)

    spaces = form(
        pool.single_observation_space, pool.single_action_space, limit=limit, interval=interval, mask=mask, bound=bound
    )
    return Vector(begin, pool, pool.num_envs, spaces, pool.metadata["autoreset_mode"].value)


@contextlib.contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Warnings of a package's making stay silent, and its errors become one line that names the environment."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except Exception as error:
            raise ValueError(f"{name} can't be made: {first_line(error)}") from error
