"""Every environment of ours, driving first, as an environment of Gymnasium, for whoever trains with something else.

`vector` gives a `gymnasium.vector.VectorEnv` with a column for each agent of each world, all stepped by one compiled
call; `single` a `gymnasium.Env` with one agent. Episodes that end are reset in the same step (AutoresetMode.SAME_STEP):
what the step truly led to is in `infos["final_obs"]`. `stable_baselines` is the same for Stable-Baselines3, whose
vectors are of another kind. `register` makes the names known to `gymnasium.make` and `make_vec`.

Observations are what our networks take, named tuples as Dict spaces; legal actions are "action_mask" beside
"observation", and in `infos`. Agents that wait for the end of their world are columns, too: `infos["valid"]` is False
there, their reward is 0, and their actions are ignored. Classes stand inside functions, since Gymnasium, from which
they must inherit, may not be installed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from longhaul.envs.host import registry as host
from longhaul.envs.host.vector import HostVector
from longhaul.spaces import Action, Box, Discrete, Leaf, Masked, MultiDiscrete, Tree, leaves, mapped

if TYPE_CHECKING:
    import gymnasium


def describe(name: str, **options: Any) -> host.Description:
    """Our environment of that name: one of `longhaul envs`, "driving", or "driving/PATH" of logs."""
    if name == "driving":
        return host.describe("driving/generated", **options)
    return host.describe(name if name.startswith("driving/") else f"jax/{name}", **options)


def action_space(action: Action) -> gymnasium.Space[Any]:
    from gymnasium import spaces

    match action:
        case Discrete(n):
            return spaces.Discrete(n)
        case MultiDiscrete(sizes):
            return spaces.MultiDiscrete(list(sizes))
        case Box(low, high):
            return spaces.Box(np.asarray(low, np.float32), np.asarray(high, np.float32))


def observation_space(form: Tree) -> gymnasium.Space[Any]:
    from gymnasium import spaces

    match form:
        case Leaf(shape, dtype):
            if dtype.kind == "b":
                return spaces.MultiBinary(shape)
            whole = np.issubdtype(dtype, np.integer)
            low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if whole else (-np.inf, np.inf)
            return spaces.Box(low, high, shape, dtype.type)
        case Masked(observation, mask):
            return spaces.Dict({"observation": observation_space(observation), "action_mask": observation_space(mask)})
        case dict():
            return spaces.Dict({str(key): observation_space(part) for key, part in form.items()})
        case _:
            return spaces.Dict({key: observation_space(part) for key, part in _parts(form)})


def _parts(tree: Any) -> list[tuple[str, Any]]:
    """Names and values of a tuple's places, those that are None left out."""
    names = getattr(tree, "_fields", None) or [str(i) for i in range(len(tree))]
    return [(name, part) for name, part in zip(names, tree, strict=True) if part is not None]


def as_spaces(tree: Tree) -> Any:
    """Arrays of ours as `observation_space` has them."""
    match tree:
        case np.ndarray() | np.generic():
            return tree.astype(np.int8) if tree.dtype.kind == "b" else tree
        case Masked(observation, mask):
            return {"observation": as_spaces(observation), "action_mask": as_spaces(mask)}
        case dict():
            return {str(key): as_spaces(part) for key, part in tree.items()}
        case _:
            return {key: as_spaces(part) for key, part in _parts(tree)}


def _network_input(vector: HostVector) -> tuple[Tree, Any]:
    """(the form of what a network takes of an observation, the function that gives it)."""
    import jax

    from longhaul.envs.host.jax_vector import JaxVector

    expand = vector.programs.environment.spec.expand if isinstance(vector, JaxVector) else None
    if expand is None:
        return vector.spec.observation, as_spaces
    masked, compiled = isinstance(vector.spec.observation, Masked), jax.jit(expand)
    stored = vector.spec.observation.observation if masked else vector.spec.observation
    shapes = jax.eval_shape(expand, mapped(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stored))
    form = mapped(lambda leaf: Leaf(tuple(leaf.shape), np.dtype(leaf.dtype)), shapes)

    def seen(tree: Tree) -> Any:
        """With a row for each column, whatever their number: few are compiled for."""
        inner = tree.observation if masked else tree
        rows = len(leaves(inner)[0])
        padded = mapped(lambda x: np.concatenate([x, np.zeros((vector.columns - rows, *x.shape[1:]), x.dtype)]), inner)
        wide = mapped(lambda x: np.asarray(x)[:rows], compiled(padded))
        return as_spaces(Masked(wide, tree.mask) if masked else wide)

    return Masked(form, vector.spec.observation.mask) if masked else form, seen


def vector(name: str, num_envs: int = 1, **options: Any) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """`num_envs` worlds, `num_envs` x agents columns. `options` are those of the environment."""
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space

    inner = host.make(describe(name, **options), num_envs)
    form, seen = _network_input(inner)

    class Exported(VectorEnv[Any, Any, Any]):
        def __init__(self) -> None:
            self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}
            self.num_envs, self.render_mode = inner.columns, None
            self.single_observation_space = observation_space(form)
            self.single_action_space = action_space(inner.spec.action)
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)
            self.action_space = batch_space(self.single_action_space, self.num_envs)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
            """`options` may not ask for some worlds alone: they reset themselves."""
            if options and "reset_mask" in options:
                raise ValueError("reset_mask: these worlds reset themselves, in the step that ends an episode")
            drawn = np.random.SeedSequence().generate_state(1)[0] if seed is None else seed
            observation = inner.reset(int(drawn) % 2**31)
            return seen(observation), _mask(observation)

        def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
            step = inner.step(_to_32_bits(actions))
            infos: dict[str, Any] = {"valid": step.valid, **_mask(step.observation)}
            columns = step.finals.columns
            if len(columns):
                ended = np.zeros(self.num_envs, bool)
                ended[columns] = True
                last, objects = seen(step.finals.observation), np.full(self.num_envs, None, object)
                for row, column in enumerate(columns):
                    objects[column] = mapped(lambda leaf, row=row: leaf[row], last)
                scores: dict[str, np.ndarray] = {}  # each a value and, with an underscore, whether it is one
                for name, measure in step.finals.scores.items():
                    scores[name], scores[f"_{name}"] = np.zeros(self.num_envs, np.float32), np.zeros_like(ended)
                    scores[name][columns], scores[f"_{name}"][columns] = measure.value, measure.valid
                infos |= {"final_obs": objects, "_final_obs": ended, "final_info": scores, "_final_info": ended}
            return seen(step.observation), step.reward, step.terminated, step.truncated, infos

        def close_extras(self, **kwargs: Any) -> None:
            inner.close()

    return Exported()


def _mask(observation: Tree) -> dict[str, np.ndarray]:
    return {"action_mask": observation.mask.astype(np.int8)} if isinstance(observation, Masked) else {}


def _to_32_bits(actions: Any) -> np.ndarray:
    array = np.asarray(actions)
    return array.astype(np.int32 if array.dtype.kind in "iu" else np.float32)


def single(name: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """One world of one agent, that waits to be reset. ValueError where it has more."""
    import gymnasium as gym

    inner = host.make(describe(name, **options), 1)
    if inner.columns != 1:
        raise ValueError(f"{name} has {inner.columns} agents; gymnasium.Env has one: use vector, a column each")
    form, seen = _network_input(inner)

    class Single(gym.Env[Any, Any]):
        def __init__(self) -> None:
            self.metadata: dict[str, Any] = {"render_modes": []}
            self.render_mode = None
            self.observation_space, self.action_space = observation_space(form), action_space(inner.spec.action)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
            super().reset(seed=seed)
            observation = inner.reset(int(self.np_random.integers(2**31)))
            return _row(seen(observation)), _row(_mask(observation))

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            step = inner.step(_to_32_bits(action)[None])
            infos = dict(_row(_mask(step.observation)))
            observation = step.observation
            if len(step.finals.columns):
                observation = step.finals.observation
                scores = step.finals.scores.items()
                infos |= {key: float(score.value[0]) for key, score in scores if score.valid[0]}
            flags = bool(step.terminated[0]), bool(step.truncated[0])
            return _row(seen(observation)), float(step.reward[0]), *flags, infos

        def close(self) -> None:
            inner.close()

    return Single()


def _row(batch: Any) -> Any:
    return mapped(lambda leaf: leaf[0].copy(), batch)


def stable_baselines(name: str, num_envs: int, **options: Any) -> Any:
    """Worlds as a `VecEnv` of Stable-Baselines3: one compiled call a step, with ends and scores of episodes in the
    form that it expects."""
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv

    columns = vector(name, num_envs, **options)

    class Columns(VecEnv):
        def __init__(self) -> None:
            super().__init__(columns.num_envs, columns.single_observation_space, columns.single_action_space)
            self._given: Any = None

        def reset(self) -> Any:
            seeds = [seed for seed in self._seeds if seed is not None]
            observation, _ = columns.reset(seed=seeds[0] if seeds else None)
            self._reset_seeds()
            return observation

        def step_async(self, actions: np.ndarray) -> None:
            self._given = actions

        def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
            observation, reward, terminated, truncated, infos = columns.step(self._given)
            reports: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
            for column in np.flatnonzero(terminated | truncated):
                reports[column]["terminal_observation"] = infos["final_obs"][column]
                reports[column]["TimeLimit.truncated"] = bool(truncated[column] & ~terminated[column])
                scores = infos["final_info"]
                for name in [name for name in scores if f"_{name}" in scores and scores[f"_{name}"][column]]:
                    reports[column][name] = float(scores[name][column])
            return observation, reward, terminated | truncated, reports

        def close(self) -> None:
            columns.close()

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [getattr(columns, attr_name)] * len(self._get_indices(indices))

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
            raise ValueError(f"{attr_name} can't be set: worlds are values; give options where they are made")

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
            if method_name != "action_masks":  # what sb3_contrib's MaskablePPO asks for
                raise ValueError(f"there is no method {method_name}: worlds are values, stepped all at once")
            raise ValueError("legal actions are in the observation, under action_mask")

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * len(self._get_indices(indices))

    return Columns()


def register() -> list[str]:
    """Ids of our environments, made known to Gymnasium: gymnasium.make("longhaul/cartpole-v0"), make_vec likewise."""
    import gymnasium as gym

    from longhaul.envs import registry

    ids = []
    for name in ("driving", *registry.TABLE):
        known = f"longhaul/{name}-v0"
        ids.append(known)
        if known not in gym.registry:
            gym.register(
                known, functools.partial(single, name), vector_entry_point=functools.partial(vector, name),
                disable_env_checker=True, order_enforce=False,
            )  # fmt: skip
    return ids
