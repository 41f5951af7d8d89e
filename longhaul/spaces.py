"""Actions, masks, measures and trees of NumPy arrays: the types of processes without JAX.

`types` exports them too, for code that computes with JAX. Trees are those of JAX: dicts, tuples, named tuples, lists,
None; leaves come in JAX's order, dicts by key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Tree = Any


@dataclass(frozen=True)
class Discrete:
    """Actions 0 .. n-1 as int32 scalars."""

    n: int


@dataclass(frozen=True)
class MultiDiscrete:
    """Vector of independent choices, int32 [len(sizes)]; choice i is in 0 .. sizes[i]-1."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Vector float32 within `low` .. `high`, both of the action's length."""

    low: tuple[float, ...]
    high: tuple[float, ...]


Action = Discrete | MultiDiscrete | Box


class Measure(NamedTuple):
    """Number with its validity: a mask travels with its value.

    Not every episode has every metric: without a traffic light there is no red-light metric. Where `valid` is False,
    `value` means nothing and counts nowhere. Example: the mean of Measure([1.0, 7.0, 0.0], [True, False, True]) is 0.5,
    over 2 episodes.
    """

    value: Any  # float32 [...]
    valid: Any  # bool [...]


class Masked(NamedTuple):
    """Observation together with the set of actions that are legal now."""

    observation: Tree
    mask: Any  # bool [..., n]: True where the action is legal


def unmasked(observation: Tree | Masked) -> tuple[Tree, Any]:
    """(observation without its mask, the mask or None), of arrays as of their shapes."""
    return observation if isinstance(observation, Masked) else (observation, None)


@dataclass(frozen=True)
class Leaf:
    """Shape and type of an array. `choices`: its numbers are labels, each below its entry, and no quantities."""

    shape: tuple[int, ...]
    dtype: np.dtype
    choices: tuple[int, ...] | None = None  # as many as the array has numbers


def action_shape(action: Action) -> tuple[tuple[int, ...], np.dtype]:
    match action:
        case Discrete():
            return (), np.dtype(np.int32)
        case MultiDiscrete(sizes):
            return (len(sizes),), np.dtype(np.int32)
        case Box(low, _):
            return (len(low),), np.dtype(np.float32)


def mapped(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Tree of `function(leaf, *leaves of the others)`. ValueError where the structures differ."""
    match tree:
        case None:
            return None
        case dict():
            if any(set(tree) != set(other) for other in others):
                raise ValueError(f"dicts of other keys than {', '.join(map(str, sorted(tree)))}")
            return {key: mapped(function, tree[key], *(other[key] for other in others)) for key in sorted(tree)}
        case tuple() | list():
            rows = zip(tree, *others, strict=True)
            parts = [mapped(function, *row) for row in rows]
            return type(tree)(parts) if type(tree) in (tuple, list) else type(tree)(*parts)
        case _:
            return function(tree, *others)


def leaves(tree: Tree) -> list[Any]:
    """Leaves in JAX's order."""
    collected: list[Any] = []
    mapped(collected.append, tree)
    return collected
