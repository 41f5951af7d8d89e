"""Proximal policy optimisation (Schulman et al. 2017), with generalised advantage estimation.

Where we differ from the usual code: V(s) and V(successor) can never come from two networks, for values are computed
here, all at once and from the current parameters. Where acting gives them for nothing (a shared torso) its values are
taken, if it was by these very parameters: the rollout's version says so. A truncated step bootstraps from its own
successor; the gradient of a minibatch is accumulated over chunks that fit a core's cache (with `accumulate`, a device's
memory), which is the same gradient, 1.5 times faster on the CPU at large batches; minibatches are drawn by a bijection
instead of a sort; advantages are normalised once over the whole batch.

With memory, minibatches are whole columns, replayed from the memory that the rollout began with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from longhaul import normalise, prng, returns
from longhaul.algorithms import actor_critic, batch_scaling, values
from longhaul.algorithms import minibatch as flat
from longhaul.algorithms.actor_critic import Apart, look, moments_of
from longhaul.algorithms.actor_critic import Policy as Policy
from longhaul.algorithms.actor_critic import State as State
from longhaul.algorithms.actor_critic import annealing as annealing
from longhaul.algorithms.actor_critic import critic as critic
from longhaul.algorithms.actor_critic import network as network
from longhaul.algorithms.config import PPOConfig
from longhaul.distributions import Distribution
from longhaul.networks import actor_critic as networks
from longhaul.spaces import Masked
from longhaul.types import Algorithm, Key, Metrics, Params, PyTree, Rollout, Spec


class Batch(NamedTuple):
    """Rows of a rollout, [rows, ...]; with memory: whole columns, [T, columns, ...]."""

    observation: PyTree
    mask: jax.Array | None
    raw: jax.Array
    log_prob: jax.Array
    value: jax.Array  # of the parameters before the update
    advantage: jax.Array  # normalised
    target: jax.Array  # for the value
    weight: jax.Array | None  # float32; None where every row counts alike
    begins: jax.Array | None  # bool [T, columns]: an episode begins here, so memory is put back
    memory: PyTree  # [columns, width] or ()


def check(config: PPOConfig, *, columns: int, steps: int) -> None:
    """Raises ValueError, naming value, bound and remedy, where the sizes of one shard can't work."""
    actor_critic.check(
        config, columns=columns, steps=steps, shares=("gamma", "gae_lambda"), least=("lr", "clip_eps", "max_grad_norm")
    )
    if not config.adam_eps > 0.0:  # 0 / 0 where an input is never there
        raise ValueError(f"adam_eps is {config.adam_eps}; it must be above 0")


PARTS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
"""Of the loss, as they are told."""


def _loss(
    network: networks.ActorCritic, policy: Distribution, config: PPOConfig
) -> Callable[..., tuple[jax.Array, Metrics]]:
    """(params, batch, entropy weight) -> sums over rows of the loss (the paper's equation 9) and of its parts."""

    def loss(params: Params, batch: Batch, entropy_weight: jax.Array) -> tuple[jax.Array, Metrics]:
        if batch.begins is None:
            parameters, value, _ = (network.both or network.apply)(params, (), batch.observation)
        else:
            parameters, value, _ = values.along_time(network, params, batch.memory, batch.observation, batch.begins)
        log_ratio = policy.log_prob(parameters, batch.mask, batch.raw) - batch.log_prob
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1.0 - config.clip_eps, 1.0 + config.clip_eps)
        surrogate = -jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
        error = jnp.square(value - batch.target)
        if config.clip_value:
            near = batch.value + jnp.clip(value - batch.value, -config.clip_eps, config.clip_eps)
            error = jnp.maximum(error, jnp.square(near - batch.target))
        entropy = policy.entropy(parameters, batch.mask)
        total = surrogate + config.vf_coef * 0.5 * error - entropy_weight * entropy
        parts = {
            "policy_loss": surrogate,
            "value_loss": 0.5 * error,
            "entropy": entropy,
            "approx_kl": (ratio - 1.0) - log_ratio,
            "clip_fraction": (jnp.abs(ratio - 1.0) > config.clip_eps).astype(jnp.float32),
        }
        if batch.weight is not None:
            total, parts = jax.tree.map(lambda x: x * batch.weight, (total, parts))
        return jnp.sum(total), jax.tree.map(jnp.sum, parts)

    return loss


def ppo(
    spec: Spec,
    config: PPOConfig,
    *,
    updates: int,
    mean: Callable[[PyTree], PyTree],
    apart: Apart = lambda function: function,
    first: int = 0,
    done: float = 0.0,
    split: bool = False,
) -> Algorithm:
    """PPO for environments of `spec`, annealed over `updates` updates; `mean` averages over the shards.

    Between two means, what is computed of a shard's numbers goes through `apart`.

    A run that goes on from update `first` with batches of another size has the share `done` of it behind it there.
    Say `split` where parameters are split over devices: then the optimiser takes them one by one.
    """
    masked = isinstance(spec.observation, Masked)
    made = actor_critic.parts(spec, config)
    network = made.network
    optimiser = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))
    schedule = annealing(updates, first, done)
    optimise = optimiser_steps(
        _loss(network, made.policy, config), network.live, optimiser, config, schedule, mean, apart, PARTS, split=split
    )

    def see(state: State, data: Rollout) -> Batch:
        """The batch of one shard, whose advantages are not normalised yet."""
        visible, mask = look(state.moments, data.observation)
        others = [look(state.moments, o)[0] for o in data.successors]
        value, successor = values.estimates(
            network, state.params, data, (visible, *others), config.chunk, state.updates
        )
        estimate = jax.vmap(
            lambda r, v, s, end, cut: returns.gae(r, v, s, end, cut, gamma=config.gamma, lam=config.gae_lambda),
            in_axes=1, out_axes=1,
        )  # fmt: skip
        advantage = estimate(data.reward * config.reward_scale, value, successor, data.terminated, data.truncated)
        weight = data.valid.astype(jnp.float32) if spec.agents is not None else None
        begins = values.begins(data) if config.memory else None
        return Batch(
            visible, mask, data.extras["raw"], data.extras["log_prob"], value, advantage, advantage + value, weight,
            begins, data.memory,
        )  # fmt: skip

    def learn(state: State, data: Rollout, key: Key) -> tuple[State, Metrics]:
        batch = apart(see)(state, data)
        weight = batch.weight
        unexplained, spread = (moments_of(x, weight, mean, apart)[1] for x in (batch.advantage, batch.target))
        if config.normalise_advantage:
            centre, variance = moments_of(batch.advantage, weight, mean, apart)
            batch = batch._replace(advantage=(batch.advantage - centre) / (jnp.sqrt(variance) + 1e-8))
        params, opt_state, metrics = optimise(state.params, state.opt_state, state.updates, batch, key)
        metrics["explained_variance"] = 1.0 - unexplained / jnp.maximum(spread, 1e-8)
        moments = state.moments
        # After the update: this batch was acted and learnt with the old ones.
        if isinstance(moments, normalise.Moments):
            raw = data.observation.observation if masked else data.observation
            moments = normalise.update(moments, raw, None if weight is None else data.valid, mean, apart)
        return State(params, opt_state, moments, state.updates + 1), {f"ppo/{k}": v for k, v in metrics.items()}

    return Algorithm(
        actor_critic.starting(made, config, optimiser), lambda state: Policy(state.params, state.moments),
        network.memory, actor_critic.acting(made, config), learn,
    )  # fmt: skip


class Passes(NamedTuple):
    """What `optimiser_steps` reads of a config, for algorithms of which some is always as it is here."""

    lr: float
    anneal: bool
    warmup: int
    num_minibatches: int | None
    update_epochs: int | None
    memory: int
    chunk: int | None
    accumulate: int | None
    kl_stop: float | None = None
    vf_coef: float = 1.0
    ent_coef: float = 0.0
    ent_coef_final: float | None = None


def _take(batch: Any, index: jax.Array, axis: int) -> Any:
    """These rows of a batch, or these columns."""
    rows = jax.tree.map(lambda x: jnp.take(x, index, axis=axis, mode="clip"), batch._replace(memory=()))
    return rows._replace(memory=jax.tree.map(lambda x: x[index], batch.memory))


def optimiser_steps(
    loss: Callable[..., tuple[jax.Array, Metrics]],
    live: Callable[[Params], Params],
    optimiser: optax.GradientTransformation,
    config: Any,
    schedule: Callable[[float, float], optax.Schedule],
    mean: Callable[[PyTree], PyTree],
    apart: Apart,
    told: Sequence[str],
    *,
    split: bool,
) -> Callable[..., tuple[Params, optax.OptState, Metrics]]:
    """(params, opt_state, update, batch, key) -> all epochs over the batch; metrics are means over rows and steps.

    `config` is this algorithm's, or has the fields of `Passes`. `loss` takes (params, batch, entropy weight) to sums
    over rows of the loss and of its parts, which are named `told`. A batch is a NamedTuple of rows, with `memory`
    and `weight` among them. Say `split` where parameters are split over devices: then the optimiser takes
    them one by one.
    """
    working = optimiser if split else optax.flatten(optimiser)
    rate = schedule(config.lr, 0.0 if config.anneal else config.lr)
    final = config.ent_coef if config.ent_coef_final is None else config.ent_coef_final
    entropy_weight = schedule(config.ent_coef, final)
    axis = 1 if config.memory else 0

    def gradient(params: Params, batch: Any, index: jax.Array, weight: jax.Array) -> tuple[PyTree, Metrics]:
        """Sums over the rows index [chunks, rows]."""
        params, back = jax.vjp(live, params)
        grad = jax.grad(loss, has_aux=True)

        def add(total: Any, chunk: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, grad(params, _take(batch, chunk, axis), weight)), None

        if index.shape[0] == 1:
            total, parts = grad(params, _take(batch, index[0], axis), weight)
        else:
            shapes = jax.eval_shape(grad, params, _take(batch, index[0], axis), weight)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            total, parts = jax.lax.scan(add, zeros, index)[0]
        return back(total)[0], parts

    def optimise(
        params: Params, opt_state: optax.OptState, update: jax.Array, batch: Any, key: Key
    ) -> tuple[Params, optax.OptState, Metrics]:
        if not config.memory:
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        shape = jax.tree.leaves(batch._replace(memory=()))[0].shape
        rows = shape[axis]
        given = config.num_minibatches, config.update_epochs
        minibatches, epochs = batch_scaling.decide(rows, rows, "none", *given)
        deep = 1 if axis == 0 else shape[0]
        chunk = chunk_of(rows // minibatches // (config.accumulate or 1), max(1, values.at_once(config.chunk) // deep))
        share = jnp.float32(1.0) if batch.weight is None else jnp.maximum(mean(apart(jnp.mean)(batch.weight)), 1e-8)
        norm = share * (deep * rows // minibatches)  # one for the whole batch: no minibatch weighs more
        lr, weight = jnp.maximum(rate(update), 0.0), entropy_weight(update)  # rounding may end just below 0
        if config.warmup:
            lr = lr * jnp.minimum((update + 1).astype(jnp.float32) / config.warmup, 1.0)

        def minibatch(carried: Any, index: jax.Array) -> tuple[Any, None]:
            params, opt_state, totals, stopped = carried
            grads, parts = apart(gradient)(params, batch, index, weight)
            grads = mean(jax.tree.map(lambda g: g / norm, grads))
            parts = parts | {"grad_norm": optax.tree.norm(grads) * norm}
            directions, new_state = working.update(grads, opt_state)
            new = jax.tree.map(lambda p, d: p - lr * d, params, directions)
            if config.kl_stop is not None:
                stopped = stopped | (mean(parts["approx_kl"]) > config.kl_stop * norm)
                old = (params, opt_state)
                new, new_state = jax.tree.map(lambda a, b: jnp.where(stopped, a, b), old, (new, new_state))
            return (new, new_state, jax.tree.map(jnp.add, totals, parts), stopped), None

        def epoch(carried: Any, key: Key) -> tuple[Any, None]:
            index = prng.permutation(key, rows).reshape(minibatches, -1, chunk)
            return jax.lax.scan(minibatch, carried, index)[0], None

        totals = {name: jnp.float32(0.0) for name in (*told, "grad_norm")}
        begun = opt_state if split else flat.pack(opt_state, params)
        carried = (params, begun, totals, jnp.bool_(False))
        keys = jax.random.split(key, epochs)
        (params, ended, totals, _), _ = jax.lax.scan(epoch, carried, keys)
        opt_state = ended if split else flat.unpack(ended, opt_state, params)
        steps = epochs * minibatches
        means = mean(jax.tree.map(lambda x: x / (norm * steps), totals))
        if "policy_loss" in means:
            of_value = means.get("value_loss", jnp.float32(0.0))  # who imitates has none
            means["total_loss"] = means["policy_loss"] + config.vf_coef * of_value - weight * means["entropy"]
        return params, opt_state, means | {"lr": lr}

    return optimise


def chunk_of(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`; n itself where that would make far too many chunks (n prime)."""
    best = next(d for d in range(min(n, most), 0, -1) if n % d == 0)
    return best if 8 * best >= min(n, most) else n
