"""Environments on the host, many at a time, as actors step them: NumPy arrays in, NumPy arrays out.

A `HostVector` is W worlds that reset themselves, B = W x A columns. Who makes one says what was wanted as plain data
(`Description`), so that another process can make it; `envs.host.make` does. This file and it import no JAX: a process
that steps Atari starts without.

Worlds that reset themselves do it in three ways, and only the adapters know which: in the step that ended the episode,
in the step after it, or when told. A vector looks the same in all three cases:

- `observation` is what the next action is chosen on.
- `finals` are the observations that steps truly led to, before any reset, of exactly the columns whose episode ended.
- A step that was none is not `valid`: where the environment resets in the step after the end, that step ignores its
  action; where a world has agents, those that wait for its end. Such a step means nothing and counts nowhere.

Example, one column that resets in the same step, and one that does it in the next; both end at their second step:

    step  observation  ended  valid  finals          observation  ended  valid  finals
      1        o1        -      x                         o1         -      x
      2        p0        x      x      o2                 o2         x      x      o2
      3        p1        -      x                         p0         -      -
      4        p2        -      x                         p1         -      x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from longhaul.spaces import Action, Leaf, Masked, Measure, Tree, action_shape, leaves, mapped

if TYPE_CHECKING:
    from longhaul import types


class Description(NamedTuple):
    """Description of an environment as plain data: pickles, hashes, and fits on a command line."""

    kind: str  # "gymnasium", "ale", "jax" ...
    name: str  # "CartPole-v1", "pong", "module:factory" ...
    options: tuple[tuple[str, Any], ...] = ()  # sorted by name

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True)
class HostSpec:
    """Spec of a vector, without JAX; `specification` makes a `types.Spec` of it.

    `observation` is a tree of `Leaf` for ONE column (a `Masked` where actions can be illegal). `agents` is the A of
    columns = worlds x A, None for ordinary environments. `truncation_interval` and `max_steps` are `types.Spec`'s.
    `true_successors` False: the environment does not tell what truncated steps led to; `finals` has there what the
    step started from, the nearest that is known.
    """

    observation: Tree
    action: Action
    agents: int | None = None
    truncation_interval: int | None = 1
    max_steps: int | None = None
    true_successors: bool = True


class Slot(NamedTuple):
    """Memory for one step of all columns, [B, ...] each; in an actor, a place in a shared rollout."""

    observation: Tree
    reward: np.ndarray  # float32 [B]
    terminated: np.ndarray  # bool [B]
    truncated: np.ndarray  # bool [B]
    valid: np.ndarray  # bool [B]


class Finals(NamedTuple):
    """Ends of episodes: the columns where `valid & (terminated | truncated)`, ascending, F of them."""

    columns: np.ndarray  # int32 [F]
    observation: Tree  # [F, ...], what the step truly led to
    scores: dict[str, Measure]  # float32, bool [F]: what the environment says of the episode, beside return and length


class HostStep(NamedTuple):
    """Result of a step. Arrays are those of the `Slot` that was given; else they are good until the next call."""

    observation: Tree  # [B, ...], what the next action is chosen on
    reward: np.ndarray  # float32 [B]
    terminated: np.ndarray  # bool [B]
    truncated: np.ndarray  # bool [B]; both flags where the environment set both: then nothing follows
    valid: np.ndarray  # bool [B]: whether this step was one
    finals: Finals


class HostVector(Protocol):
    """W worlds that reset themselves; see this file's head. One thread at a time may use one.

    Actions are [B, ...] as `forms.action_shape(spec.action)` says. `state` is everything that decides what comes, as
    a tree of arrays that `restore` of any vector of the same description and size takes; None where the environment can
    not tell it. Two vectors of one description, size and seed give the same bits for the same actions.
    """

    @property
    def spec(self) -> HostSpec: ...

    @property
    def worlds(self) -> int: ...

    @property
    def columns(self) -> int: ...

    def reset(self, seed: int, out: Slot | None = None) -> Tree:
        """Begins anew in all worlds -> their observations [B, ...], in `out.observation` where given."""

    def step(self, action: np.ndarray, out: Slot | None = None) -> HostStep: ...

    def state(self) -> Tree | None: ...

    def restore(self, state: Tree) -> None: ...

    def close(self) -> None: ...


def slot(spec: HostSpec, columns: int) -> Slot:
    """Fresh memory for a step of so many columns."""
    observation = mapped(lambda leaf: np.zeros((columns, *leaf.shape), leaf.dtype), spec.observation)
    flags = (np.zeros(columns, bool) for _ in range(3))
    return Slot(observation, np.zeros(columns, np.float32), *flags)


def no_finals(spec: HostSpec) -> Finals:
    """Finals of a step that ended nothing."""
    observation = mapped(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), spec.observation)
    return Finals(np.zeros(0, np.int32), observation, {})


def write(out: Tree, values: Tree) -> None:
    """Copies the leaves of `values` into those of `out`, which may be of another type."""
    if isinstance(out, np.ndarray):  # the most, and every step
        out[...] = values
        return
    mapped(lambda to, value: to.__setitem__(..., value), out, values)


def take(tree: Tree, rows: np.ndarray) -> Tree:
    """Copies of so many rows of each leaf."""
    if isinstance(tree, np.ndarray):
        return tree[rows]
    return mapped(lambda leaf: np.asarray(leaf)[rows], tree)


def seeds(seed: int, worlds: int) -> list[int]:
    """A seed below 2**31 for each world. Vectors of neighbouring seeds share none, as seed + i would."""
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(worlds, np.uint32) >> 1]


def check_action(spec: HostSpec, columns: int, action: Any) -> np.ndarray:
    """`action` as an array of the right form; ValueError naming both forms."""
    shape, dtype = action_shape(spec.action)
    given = np.asarray(action)
    if given.shape != (columns, *shape) or given.dtype.kind != dtype.kind:
        raise ValueError(f"actions are {given.dtype} {given.shape}; {columns} columns take {dtype} {(columns, *shape)}")
    return given


def specification(spec: HostSpec) -> types.Spec:
    """The same for algorithms; of a whole vector `envs.host.specification` knows more.

    What means no quantity (`Leaf.choices`) is stored as it is, and seen by networks as ones of many.
    """
    import jax
    import jax.numpy as jnp

    from longhaul import types

    observed = spec.observation.observation if isinstance(spec.observation, Masked) else spec.observation
    forms = leaves(observed)

    def one_hot(leaf: jax.Array, form: Leaf) -> jax.Array:
        if form.choices is None:
            return leaf
        lead = leaf.shape[: leaf.ndim - len(form.shape)]
        flat = leaf.reshape(*lead, len(form.choices))
        parts = [jax.nn.one_hot(flat[..., i], n, dtype=jnp.float32) for i, n in enumerate(form.choices)]
        return jnp.concatenate(parts, axis=-1)

    def expand(tree: types.PyTree) -> types.PyTree:
        stored, form = jax.tree.flatten(tree)
        return jax.tree.unflatten(form, [one_hot(leaf, f) for leaf, f in zip(stored, forms, strict=True)])

    return types.Spec(
        observation=mapped(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), spec.observation),
        action=spec.action,
        agents=spec.agents,
        truncation_interval=spec.truncation_interval,
        max_steps=spec.max_steps,
        expand=expand if any(form.choices is not None for form in forms) else None,
    )
