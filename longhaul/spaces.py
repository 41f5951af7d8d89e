"""Those types that processes without JAX speak too: actions, masks, measures, and trees of NumPy arrays.

`types` has them as well, for everybody who computes with JAX. A tree is what JAX takes for one: dicts, tuples, named
tuples, lists, None; its leaves come in JAX's order, dicts by key.
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
    """A vector of independent choices, int32 [len(sizes)]; choice i is in 0 .. sizes[i]-1."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A float32 vector within `low` .. `high`, both of the action's length."""

    low: tuple[float, ...]
    high: tuple[float, ...]


Action = Discrete | MultiDiscrete | Box


class Measure(NamedTuple):
    """A number with its validity: a mask travels with its value.

    Not every episode can tell every metric: without a light, nobody knows whether the agent heeds red. Where `valid` is
    False, `value` means nothing and counts nowhere. Example: of Measure([1.0, 7.0, 0.0], [True, False, True]) the mean
    is 0.5, over 2 episodes.
    """

    value: Any  # float32 [...]
    valid: Any  # bool [...]


class Masked(NamedTuple):
    """An observation that comes with the set of actions that are legal now."""

    observation: Tree
    mask: Any  # bool [..., n]: True where the action is legal


@dataclass(frozen=True)
class Leaf:
    """An array's form. `choices`: it holds whole numbers, each below its entry, which mean no quantity."""

    shape: tuple[int, ...]
    dtype: np.dtype
    choices: tuple[int, ...] | None = None  # as many as the array has numbers


def action_shape(action: Action) -> tuple[tuple[int, ...], np.dtype]:
    """(shape, dtype) of one action."""
    match action:
        case Discrete():
            return (), np.dtype(np.int32)
        case MultiDiscrete(sizes):
            return (len(sizes),), np.dtype(np.int32)
        case Box(low, _):
            return (len(low),), np.dtype(np.float32)


def mapped(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """The tree of `function(leaf, *leaves of the others)`. ValueError where the others are of another form."""
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
    """The leaves in JAX's order."""
    found: list[Any] = []
    mapped(found.append, tree)
    return found
