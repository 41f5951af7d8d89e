"""Proximal policy optimisation (Schulman et al. 2017), with generalised advantage estimation.

Where we differ from the usual code: values are not stored while acting but computed here, all at once and from the
current parameters, so that V(s) and V(successor) can never come from two networks; a truncated step bootstraps from
its own successor; the gradient of a minibatch is summed over chunks that fit a core's cache, which is the same
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
from longhaul.distributions import Distribution, distribution
from longhaul.types import Algorithm, Key, Masked, Metrics, Params, PyTree, Rollout, Spec


@dataclass(frozen=True)
class Config:
    """PPO's hyperparameters; the defaults are PureJaxRL's."""

    lr: float = 2.5e-4
    anneal: bool = True  # the learning rate falls to 0 over the run, linearly
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    update_epochs: int = 4
    clip_eps: float = 0.2
    clip_value: bool = True
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    ent_coef_final: float | None = None  # annealed to, linearly; None: constant
    max_grad_norm: float = 0.5
    normalise_advantage: bool = True
    normalise_observation: bool = False
    reward_scale: float = 1.0
    kl_stop: float | None = None  # no further step of an update once approx_kl passed it
    torso: str = "mlp"
    hidden_dim: int = 64
    num_layers: int = 2
    model_size: float | None = None  # millions of parameters, from which hidden_dim and num_layers follow
    activation: str = "tanh"  # of mlp and deepset
    memory: int = 0  # width of the recurrent unit; 0: none
    chunk: int = 1024  # rows of a minibatch whose gradient is taken at once
    precision: str = "fp32"  # of the torso; "bf16": in bfloat16, with parameters, heads and losses in float32
    remat: bool = False  # compute an encoder's blocks again for the gradient instead of keeping them


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
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 1")
    if rows % config.num_minibatches:
        raise ValueError(
            f"num_minibatches is {config.num_minibatches}, which does not divide the {rows} {unit} of one device; "
            f"choose a divisor of {rows}, or change num_envs or num_steps"
        )
    for name in ("gamma", "gae_lambda"):
        if not 0.0 <= getattr(config, name) <= 1.0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must lie in 0 to 1")
    for name in ("lr", "clip_eps", "max_grad_norm"):
        if not getattr(config, name) >= 0.0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 0")
    if config.model_size is not None and not dial.LEAST <= config.model_size <= dial.MOST:
        raise ValueError(
            f"model_size is {config.model_size}; it must lie in {dial.LEAST:g} to {dial.MOST:g} (millions of "
            "parameters)"
        )


def _along_time(
    network: networks.ActorCritic, params: Params, memory: jax.Array, observation: PyTree, begins: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The recurrent network along time: parameters [T, B, n], values [T, B], memory after each step [T, B, width]."""
    initial = jnp.zeros_like(memory)

    def step(memory: jax.Array, now: tuple[PyTree, jax.Array]) -> tuple[jax.Array, Any]:
        seen, begin = now
        memory = jnp.where(begin[:, None], initial, memory)
        parameters, value, memory = network.apply(params, memory, seen)
        return memory, (parameters, value, memory)

    return jax.lax.scan(step, memory, (observation, begins))[1]


def _values(
    network: networks.ActorCritic, params: Params, data: Rollout, observation: PyTree, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """V(observation) and V(successor), float32 [T, B] each, all from `params`.

    `observation` is (of the steps, of `successors.last`, of `successors.truncated`), as the network sees them.
    """
    steps, last, truncated = observation
    t, b = data.reward.shape
    if isinstance(data.memory, tuple):
        k = jax.tree.leaves(truncated)[0].shape[0]
        rows = jax.tree.map(lambda x, y, z: jnp.concatenate([x, y[None], z]), steps, last, truncated)
        rows = jax.tree.map(lambda x: x.reshape((t + 1 + k) * b, *x.shape[2:]), rows)
        value = _by_chunks(lambda part: network.apply(params, (), part)[1], rows, chunk).reshape(t + 1 + k, b)
        return value[:t], returns.successor_values(value[:t], value[t], value[t + 1 :], data.truncated)
    _, value, after = _along_time(network, params, data.memory, steps, _begins(data))
    ended = (data.terminated | data.truncated)[-1]
    last_value = network.apply(params, jnp.where(ended[:, None], jnp.zeros_like(after[-1]), after[-1]), last)[1]
    # A truncated episode would have gone on with the memory after its last step: pick it out, slot by slot.
    slot = jnp.cumsum(data.truncated, axis=0) - data.truncated
    which = jnp.arange(jax.tree.leaves(truncated)[0].shape[0])
    here = data.truncated[None] & (slot[None] == which[:, None, None])  # [K, T, B]
    remembered = jnp.take_along_axis(after, jnp.argmax(here, axis=1)[..., None], axis=0)
    truncated_value = network.apply(params, remembered, truncated)[1]
    return value, returns.successor_values(value, last_value, truncated_value, data.truncated)


def _begins(data: Rollout) -> jax.Array:
    """bool [T, B]: memory was put back before the step (the first row begins with the memory of the rollout)."""
    ended = data.terminated | data.truncated | ~data.valid
    return jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]])


def _by_chunks(function: Callable[[PyTree], jax.Array], rows: PyTree, chunk: int) -> jax.Array:
    """function(rows), `chunk` rows at a time where there are more: what one core computes stays in its cache."""
    n = jax.tree.leaves(rows)[0].shape[0]
    whole = n - n % chunk
    if whole <= chunk:
        return function(rows)
    blocks = jax.tree.map(lambda x: x[:whole].reshape(whole // chunk, chunk, *x.shape[1:]), rows)
    done = jax.lax.map(function, blocks).reshape(whole)
    if whole == n:
        return done
    return jnp.concatenate([done, function(jax.tree.map(lambda x: x[whole:], rows))])


def _loss(
    network: networks.ActorCritic, policy: Distribution, config: Config
) -> Callable[..., tuple[jax.Array, Metrics]]:
    """(params, batch, entropy weight) -> sums over rows of the loss (the paper's equation 9) and of its parts."""

    def loss(params: Params, batch: Batch, entropy_weight: jax.Array) -> tuple[jax.Array, Metrics]:
        if batch.begins is None:
            parameters, value, _ = network.apply(params, (), batch.observation)
        else:
            parameters, value, _ = _along_time(network, params, batch.memory, batch.observation, batch.begins)
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


def _moments(x: jax.Array, weight: jax.Array | None, mean: Callable[[PyTree], PyTree]) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of x over all shards, where weight is 1."""
    if weight is None:  # no share to agree on: a shard has nothing to tell but two numbers
        first, second = mean((jnp.mean(x), jnp.mean(x * x)))
    else:
        first, second, share = mean((jnp.mean(x * weight), jnp.mean(x * x * weight), jnp.mean(weight)))
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
        "precision": config.precision, "remat": config.remat,
    }  # fmt: skip
    width, depth = config.hidden_dim, config.num_layers
    if config.model_size is not None:
        width, depth = dial.shape(seen, policy.size, config.model_size, **options)
    network = networks.actor_critic(seen, policy.size, sizes=(width,) * depth, **options)
    return seen, policy, _expanding(network, spec.expand)


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


def ppo(spec: Spec, config: Config, *, updates: int, mean: Callable[[PyTree], PyTree]) -> Algorithm:
    """PPO for environments of `spec`, annealed over `updates` updates; `mean` averages over the shards."""
    masked = isinstance(spec.observation, Masked)
    seen, policy, network = _parts(spec, config)
    # On one flat vector: Adam on a dozen small leaves is dozens of small kernels.
    optimiser = optax.flatten(
        optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))
    )
    optimise = _optimise(_loss(network, policy, config), optimiser, config, updates, mean)

    def init(key: Key) -> State:
        params = network.init(key)
        moments = normalise.start(seen) if config.normalise_observation else ()
        return State(params, optimiser.init(params), moments, jnp.int32(0))

    def act(acting: Policy, memory: PyTree, observation: PyTree, key: Key | None) -> tuple[jax.Array, PyTree, Any]:
        visible, mask = _look(acting.moments, observation)
        parameters, _, memory = network.apply(acting.params, memory, visible)
        raw = policy.mode(parameters, mask) if key is None else policy.sample(parameters, mask, key)
        return policy.action(raw), memory, {"raw": raw, "log_prob": policy.log_prob(parameters, mask, raw)}

    def learn(state: State, data: Rollout, key: Key) -> tuple[State, Metrics]:
        visible, mask = _look(state.moments, data.observation)
        others = [_look(state.moments, o)[0] for o in data.successors]
        value, successor = _values(network, state.params, data, (visible, *others), config.chunk)
        estimate = jax.vmap(
            lambda r, v, s, end, cut: returns.gae(r, v, s, end, cut, gamma=config.gamma, lam=config.gae_lambda),
            in_axes=1, out_axes=1,
        )  # fmt: skip
        advantage = estimate(data.reward * config.reward_scale, value, successor, data.terminated, data.truncated)
        target = advantage + value
        weight = data.valid.astype(jnp.float32) if spec.agents is not None else None
        unexplained, spread = (_moments(x, weight, mean)[1] for x in (advantage, target))
        if config.normalise_advantage:
            centre, variance = _moments(advantage, weight, mean)
            advantage = (advantage - centre) / (jnp.sqrt(variance) + 1e-8)
        begins = _begins(data) if config.memory else None
        batch = Batch(
            visible, mask, data.extras["raw"], data.extras["log_prob"], value, advantage, target, weight, begins,
            data.memory,
        )  # fmt: skip
        params, opt_state, metrics = optimise(state.params, state.opt_state, state.updates, batch, key)
        metrics["explained_variance"] = 1.0 - unexplained / jnp.maximum(spread, 1e-8)
        moments = state.moments
        # After the update: this batch was acted and learnt with the old ones.
        if isinstance(moments, normalise.Moments):
            raw = data.observation.observation if masked else data.observation
            moments = normalise.update(moments, raw, None if weight is None else data.valid, mean)
        return State(params, opt_state, moments, state.updates + 1), {f"ppo/{k}": v for k, v in metrics.items()}

    return Algorithm(init, lambda state: Policy(state.params, state.moments), network.memory, act, learn)


def _optimise(
    loss: Callable[..., tuple[jax.Array, Metrics]],
    optimiser: optax.GradientTransformation,
    config: Config,
    updates: int,
    mean: Callable[[PyTree], PyTree],
) -> Callable[..., tuple[Params, optax.OptState, Metrics]]:
    """(params, opt_state, update, batch, key) -> all epochs over the batch; metrics are means over rows and steps."""
    rate = optax.linear_schedule(config.lr, 0.0 if config.anneal else config.lr, updates)
    final = config.ent_coef if config.ent_coef_final is None else config.ent_coef_final
    entropy_weight = optax.linear_schedule(config.ent_coef, final, updates)
    axis = 1 if config.memory else 0

    def take(batch: Batch, index: jax.Array) -> Batch:
        rows = jax.tree.map(lambda x: jnp.take(x, index, axis=axis, mode="clip"), batch._replace(memory=()))
        return rows._replace(memory=jax.tree.map(lambda x: x[index], batch.memory))

    def gradient(params: Params, batch: Batch, index: jax.Array, weight: jax.Array) -> tuple[PyTree, Metrics]:
        """Sums over the rows index [chunks, rows]."""
        grad = jax.grad(loss, has_aux=True)
        if index.shape[0] == 1:
            return grad(params, take(batch, index[0]), weight)

        def add(total: Any, chunk: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, grad(params, take(batch, chunk), weight)), None

        shapes = jax.eval_shape(grad, params, take(batch, index[0]), weight)
        return jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), index)[0]

    def optimise(
        params: Params, opt_state: optax.OptState, update: jax.Array, batch: Batch, key: Key
    ) -> tuple[Params, optax.OptState, Metrics]:
        if not config.memory:
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        rows = batch.advantage.shape[axis]
        deep = 1 if axis == 0 else batch.advantage.shape[0]
        chunk = chunk_of(rows // config.num_minibatches, max(1, config.chunk // deep))
        share = jnp.float32(1.0) if batch.weight is None else jnp.maximum(mean(jnp.mean(batch.weight)), 1e-8)
        norm = share * (deep * rows // config.num_minibatches)  # one for the whole batch: no minibatch weighs more
        lr, weight = jnp.maximum(rate(update), 0.0), entropy_weight(update)  # rounding may end just below 0

        def minibatch(carried: Any, index: jax.Array) -> tuple[Any, None]:
            params, opt_state, totals, stopped = carried
            grads, parts = gradient(params, batch, index, weight)
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
            index = shuffle.permutation(key, rows).reshape(config.num_minibatches, -1, chunk)
            return jax.lax.scan(minibatch, carried, index)[0], None

        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
        carried = (params, opt_state, {name: jnp.float32(0.0) for name in names}, jnp.bool_(False))
        keys = jax.random.split(key, config.update_epochs)
        (params, opt_state, totals, _), _ = jax.lax.scan(epoch, carried, keys)
        steps = config.update_epochs * config.num_minibatches
        return params, opt_state, mean(jax.tree.map(lambda x: x / (norm * steps), totals)) | {"lr": lr}

    return optimise


def chunk_of(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`; n itself where that would make far too many chunks (n prime)."""
    best = next(d for d in range(min(n, most), 0, -1) if n % d == 0)
    return best if 8 * best >= min(n, most) else n
