"""Environments on the host, many at a time, as actors step them: NumPy arrays in, NumPy arrays out.

A `HostVector` is W worlds that reset themselves, B = W x A columns. Who makes one says what was wanted as plain data
(`Description`), so that another process can make it; `registry.make` does. This file and it import no JAX: a process
that steps Atari starts without. `NumpyVector` is the vector of any batched NumPy environment that keeps `Batched`.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from longhaul.runtime.user_modules import load
from longhaul.spaces import Action, Leaf, Measure, Tree, action_shape, leaves, mapped, unmasked

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
    step started from, the nearest that is known. `data` says what the environment reads, by a digest, "" where that is
    nothing: two vectors whose data differ are not of one environment.
    """

    observation: Tree
    action: Action
    agents: int | None = None
    truncation_interval: int | None = 1
    max_steps: int | None = None
    true_successors: bool = True
    data: str = ""


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
    scores: dict[str, Measure]  # float32, bool [F]: the environment's metrics of the episode, beside return and length


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

    Actions are [B, ...] of `spaces.action_shape(spec.action)`. `state` is everything that decides what comes, as a tree
    of arrays that `restore` of any vector of the same description and size takes; None where it can't be captured. Two
    vectors of one description, size and seed give the same bits for the same actions.
    """

    @property
    def spec(self) -> HostSpec: ...

    @property
    def worlds(self) -> int: ...

    @property
    def columns(self) -> int: ...

    def reset(self, seed: int, out: Slot | None = None) -> Tree:
        """Observations [B, ...] of new episodes in all worlds, in `out.observation` where given."""

    def step(self, action: np.ndarray, out: Slot | None = None) -> HostStep: ...

    def state(self) -> Tree | None: ...

    def restore(self, state: Tree) -> None: ...

    def close(self) -> None: ...


class DeviceStep(NamedTuple):
    """A step as arrays of JAX in the memory of the environment's tensors, good until its next step."""

    observation: Tree  # [B, ...], what the next action is chosen on
    reward: Any  # float32 [B]
    terminated: Any  # bool [B]
    truncated: Any  # bool [B]
    final: Tree | None  # [B, ...], what the step truly led to, in the columns that ended; None: it does not tell


class DeviceVector(Protocol):
    """Worlds on a device that reset themselves in the step that ended an episode. `torch_vector.TorchVector` is one."""

    spec: HostSpec
    columns: int

    def begin_on_device(self, seed: int) -> Tree:
        """New episodes in all worlds -> observations [B, ...]."""

    def on_device(self, action: Any) -> DeviceStep: ...


def slot(spec: HostSpec, columns: int) -> Slot:
    """Fresh memory for a step of so many columns."""
    observation = mapped(lambda leaf: np.zeros((columns, *leaf.shape), leaf.dtype), spec.observation)
    flags = (np.zeros(columns, bool) for _ in range(3))
    return Slot(observation, np.zeros(columns, np.float32), *flags)


def no_finals(spec: HostSpec) -> Finals:
    """Finals of a step that ended nothing."""
    return Finals(np.zeros(0, np.int32), slot(spec, 0).observation, {})


def write(out: Tree, values: Tree) -> None:
    """Copy of the leaves of `values` into those of `out`, which may be of another type."""
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
    array = np.asarray(action)
    if array.shape != (columns, *shape) or array.dtype.kind != dtype.kind:
        raise ValueError(f"actions are {array.dtype} {array.shape}; {columns} columns take {dtype} {(columns, *shape)}")
    return array


def typed(spec: HostSpec, observation: Tree) -> Tree:
    """Observations with the types of the spec."""
    return mapped(lambda leaf, value: np.asarray(value, leaf.dtype), spec.observation, observation)


def stacked(spec: HostSpec, rows: Sequence[Tree]) -> Tree:
    """Single observations as a batch of the spec's types. They may be lists of numbers where the spec has an array."""
    return mapped(
        lambda leaf, *parts: np.stack([np.asarray(part, leaf.dtype) for part in parts]), spec.observation, *rows
    )


class LostState(ValueError):
    """State that could not be captured; new episodes begin."""


NO_RESTORE = "this environment can't be put back into a state; reset it"


def no_state(vector: HostVector) -> None:
    """State of a vector whose environment has none that can be captured: None."""


def no_restore(vector: HostVector, state: Tree) -> None:
    raise ValueError(NO_RESTORE)


def specification(spec: HostSpec) -> types.Spec:
    """The same for algorithms; of a whole vector `registry.specification` knows more.

    What means no quantity (`Leaf.choices`) is stored as it is, and seen by networks as ones of many.
    """
    import jax
    import jax.numpy as jnp

    from longhaul import types

    observed, _ = unmasked(spec.observation)
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


class Batched(Protocol):
    """W worlds as NumPy computes them, all at once; arrays are [W, ...]. Example: `numpy_cartpole.CartPole`."""

    @property
    def spec(self) -> HostSpec: ...

    def reset(self, seed: int) -> Tree:
        """Observations of new episodes everywhere."""

    def step(self, action: np.ndarray) -> tuple[Tree, np.ndarray, np.ndarray, np.ndarray]:
        """-> observation, reward, terminated, truncated: what the step truly led to. It resets nothing."""

    def restart(self, which: np.ndarray) -> Tree:
        """Observations of all, after new episodes began in the worlds `which`, bool [W]."""

    def state(self) -> Tree | None:
        """All that decides what comes, as arrays; None where it can't be captured."""

    def restore(self, state: Tree) -> None: ...


class NumpyVector:
    """A `Batched` that is reset in the step that ended an episode."""

    def __init__(self, batched: Batched, worlds: int) -> None:
        self.spec, self.worlds, self.columns, self._inner = batched.spec, worlds, worlds, batched
        self._interval, self._none = Interval(self.spec, worlds), no_finals(self.spec)

    def reset(self, seed: int, out: Slot | None = None) -> Tree:
        out = slot(self.spec, self.columns) if out is None else out
        self._interval = Interval(self.spec, self.columns)
        write(out.observation, self._inner.reset(seed))
        return out.observation

    def step(self, action: np.ndarray, out: Slot | None = None) -> HostStep:
        out = slot(self.spec, self.columns) if out is None else out
        observation, reward, terminated, truncated = self._inner.step(check_action(self.spec, self.columns, action))
        out.reward[:], out.terminated[:], out.truncated[:] = reward, terminated, truncated
        out.valid.fill(True)
        self._interval.check(out.truncated)
        ended, finals = out.terminated | out.truncated, self._none
        rows = ended.nonzero()[0]
        if len(rows):
            finals = Finals(rows.astype(np.int32), typed(self.spec, take(observation, rows)), {})
            observation = self._inner.restart(ended)
        write(out.observation, observation)
        return HostStep(*out, finals)

    def state(self) -> Tree | None:
        return self._inner.state()

    def restore(self, state: Tree) -> None:
        self._interval = Interval(self.spec, self.columns)
        self._inner.restore(state)

    def close(self) -> None:
        pass


def numpy(name: str, num_envs: int, seed: int, **options: Any) -> NumpyVector:
    """`name` is module:factory, called with the number of worlds and the options; it gives a `Batched`."""
    return NumpyVector(load(name)(num_envs, **options), num_envs)
