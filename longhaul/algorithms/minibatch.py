"""Minibatches: all steps of the optimiser that an update takes, and the optimiser's state as one vector meanwhile.

The gradient of a minibatch is accumulated over chunks that fit a core's cache (with `accumulate`, a device's memory):
the same gradient, 1.5 times faster on a CPU at large batches. Minibatches are drawn by a bijection instead of a sort.

On a CPU, Adam on a dozen small leaves is dozens of small kernels, so `optax.flatten` has it work on one vector. A
checkpoint keeps its moments leaf by leaf all the same: so it fits runs whose parameters are split over devices, each
with its moments, where one vector would bring all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from longhaul import prng
from longhaul.algorithms import batch_scaling, values
from longhaul.algorithms.actor_critic import annealing
from longhaul.algorithms.config import InMinibatches
from longhaul.algorithms.run_context import RunContext, Spread
from longhaul.types import Key, Metrics, Params, PyTree


def optimiser_steps(
    loss: Callable[..., tuple[jax.Array, Metrics]],
    live: Callable[[Params], Params],
    optimiser: optax.GradientTransformation,
    config: InMinibatches,
    context: RunContext,
    parts: Sequence[str],
) -> Callable[..., tuple[Params, optax.OptState, Metrics]]:
    """Function (params, opt_state, update, batch, key) -> (params, opt_state, metrics) after all epochs over the batch;
    metrics are means over rows and steps.

    `loss` takes (params, batch, entropy weight) to sums over rows of the loss and of its parts, whose names are
    `parts`. A batch is a NamedTuple of rows, `memory` and `weight` among them.
    """
    mean, isolated, split = context.mean, context.isolated, context.split
    working = optimiser if split else optax.flatten(optimiser)
    scheduled = _schedules(config, context)
    axis = 1 if config.network.memory else 0
    gradient = _in_chunks(loss, live, axis, context)

    def optimise(
        params: Params, opt_state: optax.OptState, update: jax.Array, batch: Any, key: Key
    ) -> tuple[Params, optax.OptState, Metrics]:
        if not config.network.memory:
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        division = _division(config, batch, axis)
        share = jnp.float32(1.0) if batch.weight is None else jnp.maximum(mean(isolated(jnp.mean)(batch.weight)), 1e-8)
        norm = share * division.size  # one for the whole batch: no minibatch weighs more
        lr, weight = scheduled(update)

        def minibatch(carried: Any, index: jax.Array) -> tuple[Any, None]:
            params, opt_state, totals, stopped = carried
            grads, parts = isolated(gradient)(params, batch, index, weight)
            grads = jax.tree.map(lambda g: g / norm, grads)
            grads = context.mean_of(grads, gradient, params, batch, index, weight)
            parts = parts | {"grad_norm": optax.tree.norm(grads) * norm}
            directions, new_state = working.update(grads, opt_state)
            new = jax.tree.map(lambda p, d: p - lr * d, params, directions)
            if config.kl_stop is not None:
                stopped = stopped | (mean(parts["approx_kl"]) > config.kl_stop * norm)
                old = (params, opt_state)
                new, new_state = jax.tree.map(lambda a, b: jnp.where(stopped, a, b), old, (new, new_state))
            return (new, new_state, jax.tree.map(jnp.add, totals, parts), stopped), None

        def epoch(carried: Any, key: Key) -> tuple[Any, None]:
            index = prng.permutation(key, division.rows).reshape(division.minibatches, -1, division.chunk)
            return jax.lax.scan(minibatch, carried, index)[0], None

        totals = {name: jnp.float32(0.0) for name in (*parts, "grad_norm")}
        packed_state = opt_state if split else pack(opt_state, params)
        carried = (params, packed_state, totals, jnp.bool_(False))
        keys = jax.random.split(key, division.epochs)
        (params, ended, totals, _), _ = jax.lax.scan(epoch, carried, keys)
        opt_state = ended if split else unpack(ended, opt_state, params)
        steps = division.epochs * division.minibatches
        means = mean(jax.tree.map(lambda x: x / (norm * steps), totals))
        if "policy_loss" in means:
            value_loss = means.get("value_loss", jnp.float32(0.0))  # imitation has none
            means["total_loss"] = means["policy_loss"] + config.vf_coef * value_loss - weight * means["entropy"]
        return params, opt_state, means | {"lr": lr}

    return optimise


def _schedules(config: InMinibatches, context: RunContext) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Function of an update's number to its learning rate and its weight of the entropy."""
    schedule = annealing(context)
    rate = schedule(config.lr, 0.0 if config.anneal else config.lr)
    final = config.ent_coef if config.ent_coef_final is None else config.ent_coef_final
    entropy_weight = schedule(config.ent_coef, final)

    def scheduled(update: jax.Array) -> tuple[jax.Array, jax.Array]:
        lr, weight = jnp.maximum(rate(update), 0.0), entropy_weight(update)  # rounding may end just below 0
        if config.warmup:
            lr = lr * jnp.minimum((update + 1).astype(jnp.float32) / config.warmup, 1.0)
        return lr, weight

    return scheduled


class _Division(NamedTuple):
    """Division of a batch into minibatches, and of these into chunks."""

    rows: int  # of the batch; with memory its columns
    size: int  # rows [T x columns, with memory] of a minibatch
    minibatches: int
    epochs: int
    chunk: int  # rows, or columns, whose gradient is computed at once


def _division(config: InMinibatches, batch: Any, axis: int) -> _Division:
    """Division of a batch of rows [rows, ...], or with memory of columns [T, columns, ...]."""
    shape = jax.tree.leaves(batch._replace(memory=()))[0].shape
    rows, steps = shape[axis], 1 if axis == 0 else shape[0]
    fixed = config.num_minibatches, config.update_epochs
    minibatches, epochs = batch_scaling.decide(rows, rows, "none", *fixed)
    most = max(1, values.at_once(config.chunk) // steps)
    chunk = chunk_of(rows // minibatches // (config.accumulate or 1), most)
    return _Division(rows, steps * rows // minibatches, minibatches, epochs, chunk)


def _in_chunks(
    loss: Callable[..., tuple[jax.Array, Metrics]], live: Callable[[Params], Params], axis: int, context: RunContext
) -> Callable[[Params, Any, jax.Array, jax.Array], tuple[PyTree, Metrics]]:
    """Function (params, batch, index [chunks, rows], entropy weight) -> gradient and parts of the loss, summed over
    these rows."""
    grad = jax.grad(loss, has_aux=True)

    def gradient(params: Params, batch: Any, index: jax.Array, weight: jax.Array) -> tuple[PyTree, Metrics]:
        params, back = jax.vjp(live, params)

        def of_chunk(chunk: jax.Array) -> Any:
            return grad(params, _take(batch, chunk, axis, context.spread), weight)

        def add(total: Any, chunk: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, of_chunk(chunk)), None

        if index.shape[0] == 1:
            total, parts = of_chunk(index[0])
            return back(total)[0], parts
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_chunk, index[0]))
        if context.overlaps(params):  # the last one stands outside of the loop, whose results are there at its end
            total, parts = add(jax.lax.scan(add, zeros, index[:-1])[0], index[-1])[0]
        else:
            total, parts = jax.lax.scan(add, zeros, index)[0]
        return back(total)[0], parts

    return gradient


def _take(batch: Any, index: jax.Array, axis: int, spread: Spread) -> Any:
    """Rows of a batch, or columns, by their index."""
    rows = jax.tree.map(lambda x: jnp.take(x, index, axis=axis, mode="clip"), batch._replace(memory=()))
    return spread(rows, axis)._replace(memory=spread(jax.tree.map(lambda x: x[index], batch.memory), 0))


def chunk_of(n: int, most: int) -> int:
    """Largest divisor of n that is at most `most`; n itself where that would make far too many chunks (n prime)."""
    largest = next(d for d in range(min(n, most), 0, -1) if n % d == 0)
    return largest if 8 * largest >= min(n, most) else n


def pack(opt_state: optax.OptState, params: Params) -> optax.OptState:
    """State with one vector for each part that has the parameters' structure, like that of `optax.flatten`."""
    is_like = _is_like(params)

    def to_vector(part: PyTree) -> PyTree:
        return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(part)]) if is_like(part) else part

    return jax.tree.map(to_vector, opt_state, is_leaf=is_like)


def unpack(packed: optax.OptState, opt_state: optax.OptState, params: Params) -> optax.OptState:
    """Inverse of `pack`; only the structure of `opt_state` matters."""
    leaves, is_like = jax.tree.leaves(params), _is_like(params)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1].tolist()

    def to_leaves(part: PyTree, vector: PyTree) -> PyTree:
        if not is_like(part):
            return vector
        parts = [x.reshape(leaf.shape) for x, leaf in zip(jnp.split(vector, ends), leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(params), parts)

    return jax.tree.map(to_leaves, opt_state, packed, is_leaf=is_like)


def _is_like(params: Params) -> Callable[[PyTree], bool]:
    """Test whether a part of a state has the parameters' structure."""
    structure: Any = jax.tree.structure(params)
    return lambda part: bool(jax.tree.structure(part) == structure)
