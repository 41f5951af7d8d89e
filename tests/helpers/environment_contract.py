"""The contract of `longhaul.types.Environment`, as a check that any environment can be put through.

`check_environment(environment)` raises AssertionError at the first promise that is broken. It rolls a few worlds with
random legal actions, resetting those that ended, so it wants an environment whose episodes end within `steps`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.spaces import Box, Discrete, Masked, Measure, MultiDiscrete
from longhaul.types import Environment, Spec, TimeStep

WORLDS = 3


class Compiled(NamedTuple):
    """An environment's functions for several worlds as two programs, compiled once for all checks."""

    renew: Any  # (keys, which bool [WORLDS], states, observations) -> the same, fresh in these worlds; who is active
    step: Any  # (keys, states, observations) -> random legal actions, states, time steps, who is active


def _compile(environment: Environment) -> Compiled:
    def renew(key: jax.Array, fresh: jax.Array, state: Any, seen: Any) -> Any:
        new = environment.reset(key)
        state, seen = jax.tree.map(lambda a, b: jnp.where(fresh, a, b), new, (state, seen))
        return state, seen, environment.active(state)

    def step(key: jax.Array, state: Any, seen: Any) -> Any:
        action = sample_action(environment.spec, key, seen)
        state, result = environment.step(key, state, action)
        return action, state, result, environment.active(state)

    return Compiled(jax.jit(jax.vmap(renew)), jax.jit(jax.vmap(step)))


def check_environment(environment: Environment, steps: int = 64) -> None:
    """Holds one environment to the contract; `steps` is how long its worlds are rolled."""
    spec = environment.spec
    assert environment.spec == spec, "spec changes from one reading to the next"
    _check_spec(spec)
    _check_shapes(environment)
    _check_object(environment)
    compiled = _compile(environment)
    state, seen = jax.eval_shape(jax.vmap(environment.reset), jax.random.split(jax.random.key(0), WORLDS))
    blank = jax.tree.map(_blank, (state, seen))
    _check_keys(environment, compiled, blank)
    _check_roll(environment.spec, compiled, blank, steps)


def sample_action(spec: Spec, key: jax.Array, observation: Any) -> jax.Array:
    """A random legal action for one world (a row per agent), within the bounds of a Box."""
    lead = () if spec.agents is None else (spec.agents,)
    match spec.action:
        case Discrete(n):
            if isinstance(observation, Masked):
                return jax.random.categorical(key, jnp.where(observation.mask, 0.0, -jnp.inf)).astype(jnp.int32)
            return jax.random.randint(key, lead, 0, n)
        case MultiDiscrete(sizes):
            return jax.random.randint(key, (*lead, len(sizes)), 0, _rows(np.array(sizes, np.int32), lead))
        case Box(low, high):
            low_rows, high_rows = (_rows(np.array(bound, np.float32), lead) for bound in (low, high))
            unit = jax.random.uniform(key, low_rows.shape)
            return low_rows + unit * (high_rows - low_rows)


def _rows(vector: np.ndarray, lead: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(vector), (*lead, *vector.shape))


def _check_spec(spec: Spec) -> None:
    for leaf in jax.tree.leaves(spec.observation):
        assert isinstance(leaf, jax.ShapeDtypeStruct), f"spec.observation holds {leaf!r}, no ShapeDtypeStruct"
    assert spec.agents is None or spec.agents >= 1
    assert spec.truncation_interval >= 1
    assert spec.max_steps is None or spec.max_steps >= 1
    match spec.action:
        case Discrete(n):
            assert n >= 1, f"Discrete({n}) leaves no action to take"
            if isinstance(spec.observation, Masked):
                mask = spec.observation.mask
                assert (mask.shape, mask.dtype) == ((n,), jnp.dtype(bool)), "the mask of a Discrete(n) is bool [n]"
        case MultiDiscrete(sizes):
            assert len(sizes) >= 1
            assert min(sizes) >= 1
        case Box(low, high):
            assert len(low) == len(high) >= 1
            assert all(bottom < top for bottom, top in zip(low, high))


def _form(tree: Any) -> Any:
    """Structure, shape, dtype and weakness of type: what a scan must find unchanged."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in leaves]


def _check_shapes(environment: Environment) -> None:
    """reset, step, active and metrics give what the spec says, and a step keeps the form of the state."""
    spec, key = environment.spec, jax.random.key(0)
    lead = () if spec.agents is None else (spec.agents,)
    state, observation = jax.eval_shape(environment.reset, key)
    promised = jax.tree.map(lambda leaf: ((*lead, *leaf.shape), leaf.dtype), spec.observation)
    given = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), observation)
    assert given == promised, f"reset gives {given}, spec.observation promises {promised}"
    action = jax.eval_shape(lambda k, seen: sample_action(spec, k, seen), key, observation)
    after, step = jax.eval_shape(environment.step, key, state, action)
    assert isinstance(step, TimeStep)
    assert _form(after) == _form(state), "step changes the form of the state; a scan over it would fail or recompile"
    assert _form(step.observation) == _form(observation), "step and reset give observations of different forms"
    assert _form(step.successor) == _form(observation)
    number, flag = (lead, jnp.dtype(jnp.float32), False), (lead, jnp.dtype(bool), False)
    assert _form(step.reward)[1] == [number], f"reward is {step.reward}, not float32 {lead}"
    assert _form(step.terminated)[1] == [flag], f"terminated is {step.terminated}, not bool {lead}"
    assert _form(step.truncated)[1] == [flag], f"truncated is {step.truncated}, not bool {lead}"
    assert _form(jax.eval_shape(environment.active, state))[1] == [flag], f"active does not give bool {lead}"
    for name, score in jax.eval_shape(environment.metrics, state).items():
        assert isinstance(score, Measure), f"metric {name} is {score}, not a Measure: a value with its validity"
        assert _form(score)[1] == [number, flag], f"metric {name} is {score}, not float32 and bool {lead}"


def _check_object(environment: Environment) -> None:
    """An environment does not reset itself: the successor IS the observation, so that it costs nothing."""

    def trace(key: jax.Array) -> jax.Array:
        state, observation = environment.reset(key)
        _, step = environment.step(key, state, sample_action(environment.spec, key, observation))
        pairs = zip(jax.tree.leaves(step.observation), jax.tree.leaves(step.successor), strict=True)
        assert all(one is other for one, other in pairs), "successor is not the same object as the observation"
        return step.reward

    jax.eval_shape(trace, jax.random.key(1))


def _assert_equal(one: Any, other: Any, message: str, tolerance: float = 0.0) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance, err_msg=message)


def _blank(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)


def _check_keys(environment: Environment, many: Compiled, blank: Any) -> None:
    """The same key gives the same bits; vectorised calls agree with single ones."""

    @jax.jit
    def alone(key: jax.Array) -> Any:
        state, seen = environment.reset(key)
        return (state, seen), environment.step(key, state, sample_action(environment.spec, key, seen))

    keys = jax.random.split(jax.random.key(4), WORLDS)
    state, seen, _ = many.renew(keys, np.ones(WORLDS, bool), *blank)
    _, *following, _ = many.step(keys, state, seen)
    for i in range(WORLDS):
        begun, after = alone(keys[i])
        again, after_again = alone(keys[i])
        _assert_equal(begun, again, "reset with the same key differs")
        _assert_equal(after, after_again, "step with the same key differs")
        mine, its_after = jax.tree.map(lambda leaf, i=i: leaf[i], ((state, seen), following))
        _assert_equal(mine, begun, "reset under vmap differs from reset alone", 1e-5)
        _assert_equal(its_after, after, "step under vmap differs", 1e-5)


def _check_roll(spec: Spec, many: Compiled, blank: Any, steps: int) -> None:
    """Worlds rolled by random legal actions and reset when no agent plays: flags, ends and limits are as promised."""
    lead = () if spec.agents is None else (spec.agents,)
    renew, step = many
    everywhere = np.ones(WORLDS, bool)
    state, seen, active = renew(jax.random.split(jax.random.key(5), WORLDS), everywhere, *blank)
    playing = np.asarray(active)
    assert playing.reshape(WORLDS, -1).any(axis=1).all(), "after reset nobody plays"
    length = np.zeros((WORLDS,), np.int64)
    # Counted in steps of the agent's world, over resets: long ago to begin with.
    since = np.full((WORLDS, *lead), spec.truncation_interval, np.int64)
    for t in range(steps):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(6), t), WORLDS)
        _, state, result, active = step(keys, state, seen)
        length, since = length + 1, since + 1
        terminated, truncated, after = (np.asarray(x) for x in (result.terminated, result.truncated, active))
        ended = (terminated | truncated) & playing
        np.testing.assert_array_equal(
            after, playing & ~ended, err_msg="active is not: played before, and not ended now"
        )
        _check_finite(result, playing)
        cut = truncated & ~terminated & playing  # a step that is both is an end, and has no successor to keep
        assert (since[cut] >= spec.truncation_interval).all(), (
            f"truncated again after {since[cut].min()} steps; truncation_interval promises {spec.truncation_interval}"
        )
        since = np.where(cut, 0, since)
        over = ~after.reshape(WORLDS, -1).any(axis=1)
        if spec.max_steps is not None:
            assert (over | (length < spec.max_steps)).all(), f"an episode goes on after max_steps = {spec.max_steps}"
        state, seen, active = renew(keys, over, state, result.observation)
        playing, length = np.asarray(active), np.where(over, 0, length)
        if isinstance(seen, Masked):
            legal = np.asarray(seen.mask).any(axis=-1)
            assert legal[playing].all(), "an agent plays without a legal action"
    # Uncommitted and committed inputs, or a weak type, would each show as a second program.
    assert step._cache_size() == 1, f"step was compiled {step._cache_size()} times"
    assert renew._cache_size() == 1, f"reset was compiled {renew._cache_size()} times"


def _check_finite(result: TimeStep, playing: np.ndarray) -> None:
    assert np.isfinite(np.asarray(result.reward)[playing]).all(), "a reward is not finite"
    for leaf in jax.tree.leaves(result.observation):
        assert np.isfinite(np.asarray(leaf, np.float64)[playing]).all(), "an observation is not finite"
