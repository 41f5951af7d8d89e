"""Gymnasium's spaces as forms of ours, with the ways between: observations are read, actions are given.

64-bit numbers become 32-bit ones, `start` of a discrete space becomes 0, a dict of exactly "observation" and
"action_mask" becomes a `Masked`. Torch environments of Isaac Lab and EnvPool speak of the same spaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from longhaul.spaces import Action, Box, Discrete, Leaf, Masked, MultiDiscrete, Tree, mapped

MASKED = {"observation", "action_mask"}
"""The keys of an observation with legal actions, after PettingZoo."""


class Way(NamedTuple):
    """One space in our words."""

    form: Any  # a tree of Leaf, or an Action
    convert: Callable[[Any], Any]  # observations: theirs -> ours; actions: ours [B, ...] -> theirs


def observation(space: Any) -> Way:
    """A space of observations; `convert` takes one or a batch. ValueError where arrays of fixed size can't hold it."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        parts = {key: observation(space.spaces[key]) for key in sorted(space.spaces)}
        read = {key: part.convert for key, part in parts.items()}
        if set(parts) == MASKED:
            return _masked(parts)
        return Way(
            {key: part.form for key, part in parts.items()},
            lambda value: {key: convert(value[key]) for key, convert in read.items()},
        )
    if isinstance(space, spaces.Tuple):
        ways = [observation(part) for part in space.spaces]
        return Way(
            tuple(way.form for way in ways),
            lambda value: tuple(way.convert(part) for way, part in zip(ways, value, strict=True)),
        )
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        sizes = np.atleast_1d(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        start = space.start
        leaf = Leaf(tuple(space.shape or ()), np.dtype(np.int32), tuple(int(n) for n in sizes.ravel()))
        return Way(leaf, (lambda value: value - start) if np.any(start) else _same)
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return Way(Leaf(tuple(space.shape), _narrow(space.dtype)), _same)
    raise ValueError(f"observations are {space}, and arrays of a fixed size can't hold them; wrap the environment")


def _masked(parts: dict[str, Way]) -> Way:
    inner, legal = parts["observation"], parts["action_mask"]
    if not isinstance(legal.form, Leaf) or len(legal.form.shape) != 1:
        raise ValueError(f"action_mask is {legal.form}; it must be a vector with a number an action")
    form = Masked(inner.form, Leaf(legal.form.shape, np.dtype(bool)))
    return Way(form, lambda value: Masked(inner.convert(value["observation"]), value["action_mask"]))


def action(space: Any, bound: float | None = None) -> Way:
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


def stack(rows: list[Tree]) -> Tree:
    """Single observations as a batch."""
    return mapped(lambda *parts: np.stack([np.asarray(part) for part in parts]), rows[0], *rows[1:])


def _same(value: Any) -> Any:
    return value


def _narrow(dtype: Any) -> np.dtype:
    """The type with no more than 32 bits."""
    kind = np.dtype(dtype)
    narrow = {"f": np.float32, "i": np.int32, "u": np.uint32}
    return np.dtype(narrow[kind.kind]) if kind.itemsize > 4 else kind
