"""Vector environments of Gymnasium, EnvPool and ale_py as a `HostVector`, in any of Gymnasium's autoreset modes.

With SAME_STEP the true last observation is in `infos["final_obs"]`; with NEXT_STEP it is what the step returns, and
the step after it is none; with DISABLED we reset ourselves, by `reset_mask`. Where there is a choice we take the first
or the last, whose steps are all real. Environments that exist one by one only are stepped in a loop of ours, straight
into the caller's memory.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from longhaul.envs.host import gymnasium_spaces
from longhaul.envs.host.vector import (
    Finals,
    HostSpec,
    HostStep,
    Slot,
    check_action,
    no_finals,
    seeds,
    slot,
    take,
    write,
)
from longhaul.spaces import Leaf, Masked, Tree, mapped

SAME_STEP, NEXT_STEP, DISABLED = "SameStep", "NextStep", "Disabled"
"""Values of gymnasium.vector.AutoresetMode."""


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
    seen, done = gymnasium_spaces.observation(observations), gymnasium_spaces.action(actions, bound)
    spec = HostSpec(seen.form, done.form, truncation_interval=interval or limit or 1, max_steps=limit)
    if mask is None:
        return Form(spec, lambda value, infos: seen.convert(value), done.convert)
    legal = Leaf((gymnasium_spaces.choices(spec.action),), np.dtype(bool))

    def read(value: Any, infos: dict[str, Any]) -> Tree:
        if mask not in infos:
            raise ValueError(f"infos have no {mask!r} but {', '.join(sorted(infos)) or 'nothing'}; see the option mask")
        allowed = np.asarray(infos[mask]).astype(bool)
        # Where an episode ended nothing may be legal, and no policy can choose among nothing.
        return Masked(seen.convert(value), allowed | ~allowed.any(axis=-1, keepdims=True))

    return Form(replace(spec, observation=Masked(seen.form, legal)), read, done.convert)


Begin = Callable[[int], tuple[Any, Any, dict[str, Any]]]


class Interval:
    """Holds an environment to its `truncation_interval`, by which memory is measured."""

    def __init__(self, spec: HostSpec, columns: int) -> None:
        self._interval = spec.truncation_interval or 2**31
        self._now, self._last = 0, np.full(columns, -self._interval, np.int64)  # steps; that of the last truncation

    def check(self, truncated: np.ndarray) -> None:
        """After a step; ValueError where the promise is broken."""
        self._now += 1
        if self._interval == 1 or not np.count_nonzero(truncated):  # a third of what `any` costs
            return
        least = self._now - int(self._last[truncated].max())
        if least < self._interval:
            raise ValueError(
                f"the environment truncates an episode {least} steps after another; its limit promises "
                f"{self._interval}: give the option truncation_interval={least}, or 1, which is always right"
            )
        self._last[truncated] = self._now


class Vector:
    """A Gymnasium vector environment `made`. `begin(seed)` -> (environment, observations, infos) of fresh episodes."""

    def __init__(self, begin: Begin, made: Any, worlds: int, form: Form, mode: str) -> None:
        if mode not in (SAME_STEP, NEXT_STEP, DISABLED):
            raise ValueError(f"autoreset mode {mode!r}; it must be one of {SAME_STEP}, {NEXT_STEP}, {DISABLED}")
        self.spec, self._form, self._mode, self._begin, self._inner = form.spec, form, mode, begin, made
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
        """Observations that the steps of these rows truly led to, in memory of its own, typed as the spec says."""
        if self._mode != SAME_STEP:
            found = take(self._form.read(observation, infos), rows)
        else:
            last, of_last = infos["final_obs"], infos.get("final_info", {})
            if isinstance(last, np.ndarray) and last.dtype == object:
                last = gymnasium_spaces.stack([last[row] for row in rows])
                of_last = {
                    key: np.asarray(value)[rows] for key, value in of_last.items() if not isinstance(value, dict)
                }
                found = self._form.read(last, of_last)
            else:
                found = take(self._form.read(last, of_last), rows)
        return mapped(lambda leaf, value: np.asarray(value, leaf.dtype), self.spec.observation, found)

    def state(self) -> None:
        return None

    def restore(self, state: Tree) -> None:
        raise ValueError("this environment can't be put back into a state; reset it")

    def close(self) -> None:
        self._inner.close()


class Loop:
    """Environments one by one, each with the seed that `vectors.seeds` gives it, reset in the step that ended."""

    def __init__(self, environments: Sequence[Any], form: Form) -> None:
        self.spec, self._form, self._inner = form.spec, form, list(environments)
        self.worlds = self.columns = len(self._inner)
        self._interval, self._none = Interval(self.spec, self.columns), no_finals(self.spec)
        self._alone = isinstance(self.spec.observation, Leaf)

    def _put(self, out: Slot, world: int, observation: Any, infos: dict[str, Any]) -> Tree:
        value = self._form.read(observation, infos)
        if self._alone:
            out.observation[world] = value
        else:
            mapped(lambda to, part: to.__setitem__(world, part), out.observation, value)
        return value

    def reset(self, seed: int, out: Slot | None = None) -> Tree:
        out = slot(self.spec, self.columns) if out is None else out
        self._interval = Interval(self.spec, self.columns)
        for world, (inner, its_seed) in enumerate(zip(self._inner, seeds(seed, self.worlds), strict=True)):
            self._put(out, world, *inner.reset(seed=its_seed))
        return out.observation

    def step(self, action: np.ndarray, out: Slot | None = None) -> HostStep:
        out = slot(self.spec, self.columns) if out is None else out
        ended, lasts = [], []
        for world, chosen in enumerate(self._form.act(check_action(self.spec, self.columns, action))):
            observation, reward, terminated, truncated, infos = self._inner[world].step(chosen)
            out.reward[world], out.terminated[world], out.truncated[world] = reward, terminated, truncated
            if terminated or truncated:
                ended.append(world)
                lasts.append(self._form.read(observation, infos))
                observation, infos = self._inner[world].reset()
            self._put(out, world, observation, infos)
        out.valid[:] = True
        self._interval.check(out.truncated)
        if not ended:
            return HostStep(*out, self._none)
        last = mapped(
            lambda leaf, value: np.array(value, leaf.dtype), self.spec.observation, gymnasium_spaces.stack(lasts)
        )
        return HostStep(*out, Finals(np.asarray(ended, np.int32), last, {}))

    def state(self) -> None:
        return None

    def restore(self, state: Tree) -> None:
        raise ValueError("this environment can't be put back into a state; reset it")

    def close(self) -> None:
        for inner in self._inner:
            inner.close()


def gymnasium(
    name: str, num_envs: int, seed: int, *, vectorised: bool = True, mask: str | None = None,
    action_bound: float | None = None, truncation_interval: int | None = None, **options: Any,
) -> Vector | Loop:  # fmt: skip
    """An environment of Gymnasium's registry: its own vector form where it has one (and `vectorised`), else a loop.

    `options` are those of the environment. ValueError where there is no such environment, or it can't be made.
    """
    import gymnasium as gym

    with _plainly(name):
        own = vectorised and gym.spec(name).vector_entry_point is not None
        if own:
            made: Any = gym.make_vec(name, num_envs, vectorization_mode="vector_entry_point", **options)
            limit = made.spec.kwargs.get("max_episode_steps")
            return _vector(made, limit, truncation_interval, mask, action_bound)
        inner = [gym.make(name, disable_env_checker=True, **options) for _ in range(num_envs)]
    assert inner[0].spec is not None
    spaces = form(
        inner[0].observation_space, inner[0].action_space, limit=inner[0].spec.max_episode_steps,
        interval=truncation_interval, mask=mask, bound=action_bound,
    )  # fmt: skip
    return Loop(inner, spaces)


def vector(
    name: str, num_envs: int, seed: int, *, mask: str | None = None, action_bound: float | None = None,
    truncation_interval: int | None = None, **options: Any,
) -> Vector:  # fmt: skip
    """Any Gymnasium vector environment: `name` is module:factory, called with the number of worlds and the options."""
    made = load(name)(num_envs, **options)
    if "autoreset_mode" not in made.metadata:
        raise ValueError(f"{name} does not say in its metadata which autoreset_mode it has; Gymnasium asks for it")
    return _vector(made, None, truncation_interval, mask, action_bound)


def ale(name: str, num_envs: int, seed: int, *, num_threads: int = 1, **options: Any) -> Vector:
    """Atari by ale_py's own vector environment, several times as fast as a loop: frames [4, 84, 84] of uint8.

    `options` are those of `ale_py.vector_env.AtariVectorEnv`. One thread: actors are what runs side by side.
    """
    from ale_py.vector_env import AtariVectorEnv
    from gymnasium.vector import AutoresetMode

    options = {"max_num_frames_per_episode": 108_000, "frameskip": 4, **options}
    with _plainly(name):
        made = AtariVectorEnv(
            name, num_envs, num_threads=num_threads, autoreset_mode=AutoresetMode.SAME_STEP, **options
        )
    return _vector(made, options["max_num_frames_per_episode"] // options["frameskip"], None, None, None, many=True)


def envpool(
    name: str, num_envs: int, seed: int, *, mask: str | None = None, action_bound: float | None = None,
    truncation_interval: int | None = None, **options: Any,
) -> Vector:  # fmt: skip
    """An environment of EnvPool, synchronous. It resets in the step after the end, and takes its seed when made."""
    import envpool as pools

    def made(seed: int) -> Any:
        with _plainly(name):
            return pools.make(name, env_type="gymnasium", num_envs=num_envs, seed=seeds(seed, 1)[0], **options)

    def begin(seed: int) -> tuple[Any, Any, dict[str, Any]]:
        fresh = made(seed)
        with _plainly(name):
            return fresh, *fresh.reset()

    first = made(seed)
    limit = int(first.spec.config.max_episode_steps)
    with _plainly(name):  # its bounds are of 64 bits, of which Gymnasium warns
        spaces = form(
            first.observation_space, first.action_space, limit=limit, interval=truncation_interval, mask=mask,
            bound=action_bound,
        )  # fmt: skip
    return Vector(begin, first, num_envs, spaces, NEXT_STEP)


def _vector(
    made: Any, limit: int | None, interval: int | None, mask: str | None, bound: float | None, many: bool = False
) -> Vector:
    """`many`: it takes a seed for each of its environments."""

    def begin(seed: int) -> tuple[Any, Any, dict[str, Any]]:
        given: Any = np.asarray(seeds(seed, made.num_envs)) if many else seeds(seed, 1)[0]
        return made, *made.reset(seed=given)

    spaces = form(
        made.single_observation_space, made.single_action_space, limit=limit, interval=interval, mask=mask, bound=bound
    )
    return Vector(begin, made, made.num_envs, spaces, made.metadata["autoreset_mode"].value)


def load(name: str) -> Callable[..., Any]:
    """Object that "module:function" names; ValueError, one line, where there is none."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{name!r} names no function; write module:function")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{module} can't be imported: {error}") from error
    if function not in vars(found):
        raise ValueError(f"{module} has no {function}")
    return vars(found)[function]


class _plainly:
    """Warnings of a package's making stay silent, and its errors become one line that names the environment."""

    def __init__(self, name: str) -> None:
        self._name, self._silent = name, warnings.catch_warnings()

    def __enter__(self) -> None:
        self._silent.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._silent.__exit__(kind, error, trace)
        if isinstance(error, Exception):
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"{self._name} can't be made: {lines[0]}") from error
