"""The contract of `longhaul.envs.host.vector.HostVector`, as a check that any vector can be put through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from longhaul.envs.host.vector import HostSpec, HostStep, HostVector, Slot, slot
from longhaul.spaces import Box, Discrete, Leaf, Masked, MultiDiscrete, action_shape, leaves, mapped

Make = Callable[[], HostVector]


def actions(spec: HostSpec, columns: int, observation: Any, random: np.random.Generator) -> np.ndarray:
    """Random legal ones."""
    shape, dtype = action_shape(spec.action)
    match spec.action:
        case Discrete(n):
            if isinstance(observation, Masked):
                assert observation.mask.any(axis=-1).all(), "nothing is legal"
                return np.array([random.choice(np.flatnonzero(mask)) for mask in observation.mask], dtype)
            return random.integers(0, n, columns).astype(dtype)
        case MultiDiscrete(sizes):
            return random.integers(0, sizes, (columns, *shape)).astype(dtype)
        case Box(low, high):
            return random.uniform(low, high, (columns, *shape)).astype(dtype)


def roll(
    vector: HostVector, seed: int, steps: int, *, begin: bool = True, begun: Any = None, out: list[Slot] | None = None
) -> list[HostStep]:
    """`steps` steps of random actions, each step's arrays copied."""
    observation = vector.reset(seed) if begin else begun
    random, taken = np.random.default_rng(seed), []
    for t in range(steps):
        action = actions(vector.spec, vector.columns, observation, random)
        step = vector.step(action, None if out is None else out[t])
        observation = step.observation
        taken.append(mapped(np.copy, step))
    return taken


def same(a: Any, b: Any) -> bool:
    """Bit by bit, types too."""
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    return all(np.array_equal(x, y) and np.asarray(x).dtype == np.asarray(y).dtype for x, y in pairs)


def check_vector(make: Make, steps: int = 64, differs: bool = True) -> list[HostStep]:
    """Holds a vector to the contract; AssertionError at the first promise that is broken. `differs`: by the seed."""
    first, second, other = make(), make(), make()
    try:
        _check_spec(first)
        taken = roll(first, 7, steps)
        observation = second.reset(7)
        random, since = np.random.default_rng(7), np.full(second.columns, second.spec.truncation_interval or 2**30)
        other.reset(8)
        for step in taken:
            action = actions(second.spec, second.columns, observation, random)
            other_seen = other.step(action).observation  # what another does changes nothing here
            again = second.step(action)
            assert same(again, step), "the same seed and actions give other numbers"
            observation = again.observation
            _check_step(second, step, since)
        assert not differs or not same(other_seen, taken[-1].observation), "another seed gives the same numbers"
        _check_in_place(make, taken)
        _check_errors(first)
        _check_state(first, second, taken)
        return taken
    finally:
        for vector in (first, second, other):
            vector.close()


def _check_spec(vector: HostVector) -> None:
    spec = vector.spec
    assert vector.columns == vector.worlds * (spec.agents or 1)
    for leaf in leaves(spec.observation):
        assert isinstance(leaf, Leaf)
        assert leaf.dtype.itemsize <= 4
        assert leaf.choices is None or len(leaf.choices) == int(np.prod(leaf.shape))
    seen = vector.reset(0)
    mapped(lambda leaf, x: _check_form(leaf, x, vector.columns), spec.observation, seen)


def _check_form(leaf: Leaf, array: np.ndarray, rows: int) -> None:
    assert array.shape == (rows, *leaf.shape), f"{array.shape}, and {rows} of {leaf.shape} are promised"
    assert array.dtype == leaf.dtype
    if leaf.choices is not None:
        assert (array >= 0).all()
        assert (array.reshape(rows, len(leaf.choices)) < leaf.choices).all()


def _check_step(vector: HostVector, step: HostStep, since: np.ndarray) -> None:
    columns = vector.columns
    assert [x.dtype.name for x in step[1:5]] == ["float32", "bool", "bool", "bool"]
    assert all(x.shape == (columns,) for x in step[1:5])
    mapped(lambda leaf, x: _check_form(leaf, x, columns), vector.spec.observation, step.observation)
    assert not step.reward[~step.valid].any()
    assert not (step.terminated | step.truncated)[~step.valid].any()
    ended = np.flatnonzero(step.terminated | step.truncated)
    finals = step.finals
    assert finals.columns.dtype == np.int32
    assert np.array_equal(finals.columns, ended), "finals are not of the columns that ended"
    mapped(lambda leaf, x: _check_form(leaf, x, len(ended)), vector.spec.observation, finals.observation)
    for measure in finals.scores.values():
        assert measure.value.shape == measure.valid.shape == (len(ended),)
    since += 1
    if len(ended):
        assert (since[step.truncated] >= (vector.spec.truncation_interval or 2**30)).all()
        since[step.truncated] = 0


def _check_in_place(make: Make, taken: list[HostStep]) -> None:
    """Steps written into the rows of a rollout [T, 2B], every second column of which is somebody else's."""
    vector = make()
    spec, columns = vector.spec, vector.columns
    memory = [slot(spec, 2 * columns) for _ in taken]
    for whole in memory:
        for leaf in leaves(whole):
            leaf[:] = 1
    out = [mapped(lambda x: x[::2], whole) for whole in memory]
    again = roll(vector, 7, len(taken), out=out)
    assert all(same(a, b) for a, b in zip(again, taken, strict=True)), "in place the numbers are others"
    assert all(same(Slot(*step[:5]), place) for step, place in zip(again, out, strict=True)), "not in place"
    others = (leaf[1::2] for whole in memory for leaf in leaves(whole))
    assert all((leaf == 1).all() for leaf in others), "somebody else's memory was written"
    begun = slot(spec, columns)
    assert vector.reset(7, begun) is begun.observation
    vector.close()


def _check_errors(vector: HostVector) -> None:
    _, dtype = action_shape(vector.spec.action)
    for wrong in (np.zeros((vector.columns + 1, 1), dtype), np.zeros(vector.columns, np.complex64)):
        with pytest.raises(ValueError, match="actions are"):
            vector.step(wrong)


def _check_state(first: HostVector, second: HostVector, taken: list[HostStep]) -> None:
    """A state goes on with the same bits, in another vector and more than once."""
    middle = roll(first, 7, len(taken) // 2)[-1]
    state = first.state()
    if state is None:
        return
    assert all(isinstance(leaf, (np.ndarray, np.generic)) for leaf in leaves(state))
    kept = mapped(np.copy, state)
    after = roll(first, 5, len(taken), begin=False, begun=middle.observation)
    assert same(kept, state), "a state that was told is changed by what follows"
    for vector in (second, first):
        vector.restore(kept)
        again = roll(vector, 5, len(taken), begin=False, begun=middle.observation)
        assert all(same(a, b) for a, b in zip(again, after, strict=True)), "a restored state goes on otherwise"
