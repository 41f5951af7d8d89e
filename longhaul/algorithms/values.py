"""Values of a rollout and of its successors, log-probabilities by other parameters, recurrent networks along time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from longhaul import returns
from longhaul.networks import actor_critic
from longhaul.types import Params, PyTree, Rollout, platform

ROWS_OF_A_CORE, ROWS_OF_AN_ACCELERATOR = 1_024, 65_536
"""Rows of a batch computed at once: on a core those that fit its cache, on an accelerator, which starts a kernel in the
time of a few thousand rows, many more."""


def along_time(
    network: actor_critic.ActorCritic, params: Params, memory: jax.Array, observation: PyTree, begins: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Recurrent network along time: parameters [T, B, n], values [T, B], memory after each step [T, B, width]."""
    initial = jnp.zeros_like(memory)

    def step(memory: jax.Array, now: tuple[PyTree, jax.Array]) -> tuple[jax.Array, Any]:
        inputs, begin = now
        memory = jnp.where(begin[:, None], initial, memory)
        parameters, value, memory = network.apply(params, memory, inputs)
        return memory, (parameters, value, memory)

    return jax.lax.scan(step, memory, (observation, begins))[1]


def estimates(
    network: actor_critic.ActorCritic,
    params: Params,
    data: Rollout,
    observation: PyTree,
    chunk: int | None,
    updates: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """V(observation) and V(successor), float32 [T, B] each, all from `params`, which are those after `updates` updates.

    `observation` are the network's inputs for (the steps, `successors.last`, `successors.truncated`).
    """
    steps, last, truncated = observation
    if not isinstance(data.memory, tuple):
        _, value, after = along_time(network, params, data.memory, steps, begins(data))
        return value, _recurrent_successors(network, params, data, value, after, last, truncated)
    value_of = functools.partial(_values, network, params, chunk=chunk)
    if "value" in data.extras:
        later = value_of(jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), last, truncated))
        value = jax.lax.cond(data.version == updates, lambda: data.extras["value"], lambda: value_of(steps))
        return value, returns.successor_values(value, later[0], later[1:], data.truncated)
    t = len(data.reward)
    value = value_of(jax.tree.map(lambda x, y, z: jnp.concatenate([x, y[None], z]), steps, last, truncated))
    return value[:t], returns.successor_values(value[:t], value[t], value[t + 1 :], data.truncated)


def _values(network: actor_critic.ActorCritic, params: Params, rows: PyTree, *, chunk: int | None) -> jax.Array:
    """Values [N, B] of observations [N, B, ...] without memory."""
    lead = jax.tree.leaves(rows)[0].shape[:2]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
    return by_chunks(lambda part: network.apply(params, (), part)[1], flat, chunk).reshape(lead)


def _recurrent_successors(
    network: actor_critic.ActorCritic, params: Params, data: Rollout, value: jax.Array, after: jax.Array, last: PyTree,
    truncated: PyTree,
) -> jax.Array:  # fmt: skip
    """V(successor) with memory; `after` [T, B, width] is the memory after each step."""
    ended = (data.terminated | data.truncated)[-1]
    last_value = network.apply(params, jnp.where(ended[:, None], jnp.zeros_like(after[-1]), after[-1]), last)[1]
    # A truncated episode would have continued with the memory after its last step: it is picked out slot by slot.
    slot = jnp.cumsum(data.truncated, axis=0) - data.truncated
    slots = jnp.arange(jax.tree.leaves(truncated)[0].shape[0])
    lies_here = data.truncated[None] & (slot[None] == slots[:, None, None])  # [K, T, B]
    remembered = jnp.take_along_axis(after, jnp.argmax(lies_here, axis=1)[..., None], axis=0)
    truncated_value = network.apply(params, remembered, truncated)[1]
    return returns.successor_values(value, last_value, truncated_value, data.truncated)


def log_probs_and_values(
    network: actor_critic.ActorCritic, log_prob: Callable[[jax.Array, Any], jax.Array], params: Params, data: Rollout,
    observation: PyTree, taken: PyTree, chunk: int | None, updates: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Log pi(a | s), V(s) and V(successor), float32 [T, B] each, by `params`, of a rollout of any older policy.

    Arguments are those of `estimates`; `log_prob` takes (the policy's parameters, `taken`), which is [T, B, ...].
    """
    steps, last, truncated = observation
    t, b = data.reward.shape
    if not isinstance(data.memory, tuple):
        parameters, value, after = along_time(network, params, data.memory, steps, begins(data))
        log_pi = log_prob(parameters, taken)
        return log_pi, value, _recurrent_successors(network, params, data, value, after, last, truncated)

    def judge(rows: tuple[PyTree, PyTree]) -> tuple[jax.Array, jax.Array]:
        parameters, value, _ = network.both(params, (), rows[0])
        return log_prob(parameters, rows[1]), value

    def of_steps() -> tuple[jax.Array, jax.Array]:
        rows = jax.tree.map(lambda x: x.reshape(t * b, *x.shape[2:]), (steps, taken))
        judged: tuple[jax.Array, jax.Array] = jax.tree.map(lambda x: x.reshape(t, b), by_chunks(judge, rows, chunk))
        return judged

    if "value" in data.extras:  # acting computed both: they are used if its parameters were the same
        known = data.extras["log_prob"], data.extras["value"]
        log_pi, value = jax.lax.cond(jnp.all(data.version == updates), lambda: known, of_steps)
    else:
        log_pi, value = of_steps()
    others = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), last, truncated)
    later = _values(network, params, others, chunk=chunk)
    return log_pi, value, returns.successor_values(value, later[0], later[1:], data.truncated)


def begins(data: Rollout) -> jax.Array:
    """Flag bool [T, B]: memory was reset before the step (the first row begins with the memory of the rollout)."""
    ended = data.terminated | data.truncated | ~data.valid
    return jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]])


def at_once(chunk: int | None) -> int:
    """Number of rows to compute at once: `chunk`, or a default for the device."""
    if chunk is not None:
        return chunk
    return ROWS_OF_A_CORE if platform() == "cpu" else ROWS_OF_AN_ACCELERATOR


def by_chunks(function: Callable[[PyTree], Any], rows: PyTree, chunk: int | None) -> Any:
    """Result of function(rows), arrays [rows], computed `chunk` rows at a time (None: a default for the device)."""
    chunk = at_once(chunk)
    n = jax.tree.leaves(rows)[0].shape[0]
    whole = n - n % chunk
    if whole <= chunk:
        return function(rows)
    blocks = jax.tree.map(lambda x: x[:whole].reshape(whole // chunk, chunk, *x.shape[1:]), rows)
    done = jax.tree.map(lambda x: x.reshape(whole), jax.lax.map(function, blocks))
    if whole == n:
        return done
    rest = function(jax.tree.map(lambda x: x[whole:], rows))
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), done, rest)
