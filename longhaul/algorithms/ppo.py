"""Proximal policy optimisation (Schulman et al. 2017), with generalised advantage estimation.

Where we differ from the usual code: V(s) and V(successor) can never come from two networks, for values are computed
here, all at once and from the current parameters. Where acting gives them for nothing (a shared torso) its values are
taken, if it was by these very parameters: the rollout's version says so. A truncated step bootstraps from its own
successor; the gradient of a minibatch is summed over chunks that fit a core's cache, which is the same
gradient, 1.5 times faster on the CPU at large batches; minibatches are drawn by a bijection instead of a sort;
advantages are normalised once over the whole batch.

With memory, minibatches are whole columns, replayed from the memory that the rollout began with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from longhaul import dial, networks, normalise, returns, shuffle
from longhaul.algorithms import values
from longhaul.distributions import Distribution, distribution
from longhaul.scaling import rules
from longhaul.types import Algorithm, Key, Masked, Metrics, Params, PyTree, Rollout, Spec


@dataclass(frozen=True)
class Config:
    """PPO's hyperparameters; the defaults are PureJaxRL's."""

    lr: float = 2.5e-4
    anneal: bool = True  # the learning rate falls to 0 over the run, linearly
    warmup: int = 0  # updates over which the learning rate rises to it at the beginning, linearly
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int | None = 4  # None: chosen by `run.resolve`, else 4, or what divides the batch
    update_epochs: int | None = 4
    clip_eps: float = 0.2
    clip_value: bool = True
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    ent_coef_final: float | None = None  # annealed to, linearly; None: constant
    max_grad_norm: float = 0.5
    adam_eps: float = 1e-5  # added to the root of Adam's second moment
    normalise_advantage: bool = True
    normalise_observation: bool = False
    reward_scale: float = 1.0
    kl_stop: float | None = None  # no further step of an update once approx_kl passed it
    torso: str = "mlp"
    hidden_dim: int = 64
    num_layers: int = 2
    model_size: float | None = None  # millions of parameters, from which hidden_dim and num_layers follow
    activation: str = "tanh"  # of mlp and deepset
    shared: bool = False  # actor and critic of mlp and deepset have one torso, without memory, too
    init: str = "orthogonal"  # of mlp, deepset and heads; "lecun" is Flax's default
    memory: int = 0  # width of the recurrent unit; 0: none
    chunk: int = 1024  # rows of a minibatch whose gradient is taken at once
    precision: str = "fp32"  # of the torso; "bf16": in bfloat16, with parameters, heads and losses in float32
    remat: bool = False  # compute an encoder's blocks again for the gradient instead of keeping them


Apart = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function of one shard -> the same, computed apart from what is around it (shards.py)."""


class State(NamedTuple):
    params: Params
    opt_state: optax.OptState
    moments: normalise.Moments | tuple[()]
    updates: jax.Array  # int32


class Policy(NamedTuple):
    """What acting needs."""

    params: Params
    moments: normalise.Moments | tuple[()]


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


def check(config: Config, *, columns: int, steps: int) -> None:
    """Raises ValueError, naming value, bound and remedy, where the sizes of one shard can't work."""
    rows, unit = (columns, "environments") if config.memory else (columns * steps, "steps of a batch")
    for name in ("num_minibatches", "update_epochs", "chunk", "hidden_dim", "num_layers"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 1")
    if config.warmup < 0:
        raise ValueError(f"warmup is {config.warmup}; it must be at least 0")
    if rows % (config.num_minibatches or 1):
        raise ValueError(
            f"num_minibatches is {config.num_minibatches}, which does not divide the {rows} {unit} of one device; "
            f"choose a divisor of {rows}, or change num_envs or num_steps"
        )
    for name in ("gamma", "gae_lambda"):
        if not 0.0 <= getattr(config, name) <= 1.0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must lie in 0 to 1")
    if not config.adam_eps > 0.0:  # 0 / 0 where an input is never there
        raise ValueError(f"adam_eps is {config.adam_eps}; it must be above 0")
    for name in ("lr", "clip_eps", "max_grad_norm"):
        if not getattr(config, name) >= 0.0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 0")
    if config.model_size is not None and not dial.LEAST <= config.model_size <= dial.MOST:
        raise ValueError(
            f"model_size is {config.model_size}; it must lie in {dial.LEAST:g} to {dial.MOST:g} (millions of "
            "parameters)"
        )


def _loss(
    network: networks.ActorCritic, policy: Distribution, config: Config
) -> Callable[..., tuple[jax.Array, Metrics]]:
    """(params, batch, entropy weight) -> sums over rows of the loss (the paper's equation 9) and of its parts."""

    def loss(params: Params, batch: Batch, entropy_weight: jax.Array) -> tuple[jax.Array, Metrics]:
        if batch.begins is None:
            parameters, value, _ = network.apply(params, (), batch.observation)
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


def _moments(
    x: jax.Array, weight: jax.Array | None, mean: Callable[[PyTree], PyTree], apart: Apart
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of x over all shards, where weight is 1."""
    if weight is None:  # no share to agree on: a shard has nothing to tell but two numbers
        first, second = mean(apart(lambda x: (jnp.mean(x), jnp.mean(x * x)))(x))
    else:
        sums = apart(lambda x, weight: (jnp.mean(x * weight), jnp.mean(x * x * weight), jnp.mean(weight)))
        first, second, share = mean(sums(x, weight))
        first, second = (s / jnp.maximum(share, 1e-8) for s in (first, second))
    return first, jnp.maximum(second - first**2, 0.0)


def _parts(spec: Spec, config: Config) -> tuple[PyTree, Distribution, networks.ActorCritic]:
    """What the network sees of one observation, the policy's distribution, and the network."""
    seen = spec.observation.observation if isinstance(spec.observation, Masked) else spec.observation
    if spec.expand is not None:
        if config.normalise_observation:
            raise ValueError(
                "normalise_observation is on, and this environment's observations are stored packed; turn it off"
            )
        seen = jax.eval_shape(spec.expand, seen)
    policy = distribution(spec.action)
    if config.normalise_observation and config.torso != "mlp" and any(len(x.shape) == 2 for x in jax.tree.leaves(seen)):
        raise ValueError(
            f"normalise_observation is on, and torso {config.torso} reads from an item's last feature whether it is "
            "there, which would be normalised too; turn it off, or take torso mlp"
        )
    options: dict[str, Any] = {
        "free": policy.free, "torso": config.torso, "activation": config.activation, "memory": config.memory,
        "precision": config.precision, "remat": config.remat, "shared": config.shared, "begin": config.init,
    }  # fmt: skip
    width, depth = config.hidden_dim, config.num_layers
    if config.model_size is not None:
        width, depth = dial.shape(seen, policy.size, config.model_size, **options)
    expand, live = spec.expand, None
    if spec.compact is not None and networks.takes_live(config.torso, config.shared, config.memory):
        expand, live = spec.compact
    network = networks.actor_critic(seen, policy.size, sizes=(width,) * depth, live=live, **options)
    return seen, policy, _expanding(network, expand)


def _expanding(network: networks.ActorCritic, expand: Callable[[PyTree], PyTree] | None) -> networks.ActorCritic:
    """`network` for stored observations: they are expanded where they are used, never kept so."""
    if expand is None:
        return network

    def apply(params: Params, memory: PyTree, observation: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        return network.apply(params, memory, expand(observation))

    return network._replace(apply=apply)


def _look(moments: normalise.Moments | tuple[()], observation: PyTree) -> tuple[PyTree, jax.Array | None]:
    """What the network sees of an observation, and the mask of legal actions."""
    visible, mask = observation if isinstance(observation, Masked) else (observation, None)
    if isinstance(moments, normalise.Moments):
        visible = normalise.apply(moments, visible)
    return visible, mask


def critic(spec: Spec, config: Config) -> Callable[[Policy, PyTree, PyTree], jax.Array]:
    """(policy, memory, observation [B, ...]) -> the value that the learner believes in, float32 [B]."""
    network = _parts(spec, config)[2]

    def value(policy: Policy, memory: PyTree, observation: PyTree) -> jax.Array:
        return network.apply(policy.params, memory, _look(policy.moments, observation)[0])[1]

    return value


def network(spec: Spec, config: Config) -> networks.ActorCritic:
    """The network of a `Policy`, which `apply` takes for parameters: what it would do, and what it believes in."""
    inner = _parts(spec, config)[2]

    def apply(policy: Policy, memory: PyTree, observation: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        return inner.apply(policy.params, memory, _look(policy.moments, observation)[0])

    return inner._replace(apply=apply)


def annealing(updates: int, first: int = 0, done: float = 0.0) -> Callable[[float, float], optax.Schedule]:
    """(begin, end) -> update -> what goes from `begin` to `end` over a run, of which `done` is past at `first`."""

    def schedule(begin: float, end: float) -> optax.Schedule:
        return optax.linear_schedule(begin + (end - begin) * done, end, updates - first, transition_begin=first)

    return schedule


def ppo(
    spec: Spec,
    config: Config,
    *,
    updates: int,
    mean: Callable[[PyTree], PyTree],
    apart: Apart = lambda function: function,
    first: int = 0,
    done: float = 0.0,
) -> Algorithm:
    """PPO for environments of `spec`, annealed over `updates` updates; `mean` averages over the shards.

    Between two means, what is computed of a shard's numbers goes through `apart`.

    A run that goes on from update `first` with batches of another size has the share `done` of it behind it there.
    """
    masked = isinstance(spec.observation, Masked)
    seen, policy, network = _parts(spec, config)
    # On one flat vector: Adam on a dozen small leaves is dozens of small kernels.
    optimiser = optax.flatten(
        optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))
    )
    schedule = annealing(updates, first, done)
    optimise = _optimise(_loss(network, policy, config), network.live, optimiser, config, schedule, mean, apart)

    def init(key: Key) -> State:
        params = network.init(key)
        moments = normalise.start(seen) if config.normalise_observation else ()
        return State(params, optimiser.init(params), moments, jnp.int32(0))

    free = config.shared and not config.memory  # values come with the policy

    def act(acting: Policy, memory: PyTree, observation: PyTree, key: Key | None) -> tuple[jax.Array, PyTree, Any]:
        visible, mask = _look(acting.moments, observation)
        parameters, value, memory = network.apply(acting.params, memory, visible)
        raw = policy.mode(parameters, mask) if key is None else policy.sample(parameters, mask, key)
        extras = {"raw": raw, "log_prob": policy.log_prob(parameters, mask, raw)}
        return policy.action(raw), memory, extras | ({"value": value} if free else {})

    def see(state: State, data: Rollout) -> Batch:
        """The batch of one shard, whose advantages are not normalised yet."""
        visible, mask = _look(state.moments, data.observation)
        others = [_look(state.moments, o)[0] for o in data.successors]
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
        unexplained, spread = (_moments(x, weight, mean, apart)[1] for x in (batch.advantage, batch.target))
        if config.normalise_advantage:
            centre, variance = _moments(batch.advantage, weight, mean, apart)
            batch = batch._replace(advantage=(batch.advantage - centre) / (jnp.sqrt(variance) + 1e-8))
        params, opt_state, metrics = optimise(state.params, state.opt_state, state.updates, batch, key)
        metrics["explained_variance"] = 1.0 - unexplained / jnp.maximum(spread, 1e-8)
        moments = state.moments
        # After the update: this batch was acted and learnt with the old ones.
        if isinstance(moments, normalise.Moments):
            raw = data.observation.observation if masked else data.observation
            moments = normalise.update(moments, raw, None if weight is None else data.valid, mean, apart)
        return State(params, opt_state, moments, state.updates + 1), {f"ppo/{k}": v for k, v in metrics.items()}

    return Algorithm(init, lambda state: Policy(state.params, state.moments), network.memory, act, learn)


def _optimise(
    loss: Callable[..., tuple[jax.Array, Metrics]],
    live: Callable[[Params], Params],
    optimiser: optax.GradientTransformation,
    config: Config,
    schedule: Callable[[float, float], optax.Schedule],
    mean: Callable[[PyTree], PyTree],
    apart: Apart,
) -> Callable[..., tuple[Params, optax.OptState, Metrics]]:
    """(params, opt_state, update, batch, key) -> all epochs over the batch; metrics are means over rows and steps."""
    rate = schedule(config.lr, 0.0 if config.anneal else config.lr)
    final = config.ent_coef if config.ent_coef_final is None else config.ent_coef_final
    entropy_weight = schedule(config.ent_coef, final)
    axis = 1 if config.memory else 0

    def take(batch: Batch, index: jax.Array) -> Batch:
        rows = jax.tree.map(lambda x: jnp.take(x, index, axis=axis, mode="clip"), batch._replace(memory=()))
        return rows._replace(memory=jax.tree.map(lambda x: x[index], batch.memory))

    def gradient(params: Params, batch: Batch, index: jax.Array, weight: jax.Array) -> tuple[PyTree, Metrics]:
        """Sums over the rows index [chunks, rows]."""
        params, back = jax.vjp(live, params)
        grad = jax.grad(loss, has_aux=True)

        def add(total: Any, chunk: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, grad(params, take(batch, chunk), weight)), None

        if index.shape[0] == 1:
            total, parts = grad(params, take(batch, index[0]), weight)
        else:
            shapes = jax.eval_shape(grad, params, take(batch, index[0]), weight)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            total, parts = jax.lax.scan(add, zeros, index)[0]
        return back(total)[0], parts

    def optimise(
        params: Params, opt_state: optax.OptState, update: jax.Array, batch: Batch, key: Key
    ) -> tuple[Params, optax.OptState, Metrics]:
        if not config.memory:
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        rows = batch.advantage.shape[axis]
        given = config.num_minibatches, config.update_epochs
        minibatches, epochs = rules.decide(rows, rows, "none", *given)
        deep = 1 if axis == 0 else batch.advantage.shape[0]
        chunk = chunk_of(rows // minibatches, max(1, config.chunk // deep))
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
            directions, new_state = optimiser.update(grads, opt_state)
            new = jax.tree.map(lambda p, d: p - lr * d, params, directions)
            if config.kl_stop is not None:
                stopped = stopped | (mean(parts["approx_kl"]) > config.kl_stop * norm)
                old = (params, opt_state)
                new, new_state = jax.tree.map(lambda a, b: jnp.where(stopped, a, b), old, (new, new_state))
            return (new, new_state, jax.tree.map(jnp.add, totals, parts), stopped), None

        def epoch(carried: Any, key: Key) -> tuple[Any, None]:
            index = shuffle.permutation(key, rows).reshape(minibatches, -1, chunk)
            return jax.lax.scan(minibatch, carried, index)[0], None

        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
        carried = (params, opt_state, {name: jnp.float32(0.0) for name in names}, jnp.bool_(False))
        keys = jax.random.split(key, epochs)
        (params, opt_state, totals, _), _ = jax.lax.scan(epoch, carried, keys)
        steps = epochs * minibatches
        told = mean(jax.tree.map(lambda x: x / (norm * steps), totals))
        told["total_loss"] = told["policy_loss"] + config.vf_coef * told["value_loss"] - weight * told["entropy"]
        return params, opt_state, told | {"lr": lr}

    return optimise


def chunk_of(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`; n itself where that would make far too many chunks (n prime)."""
    best = next(d for d in range(min(n, most), 0, -1) if n % d == 0)
    return best if 8 * best >= min(n, most) else n
