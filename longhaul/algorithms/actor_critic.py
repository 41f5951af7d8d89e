"""Common part of algorithms with an actor and a critic in one network: the network, the state, acting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from longhaul import normalise
from longhaul.algorithms.config import InMinibatches, OnActorCritic
from longhaul.algorithms.run_context import RunContext
from longhaul.distributions import Distribution, distribution
from longhaul.networks import actor_critic, model_size
from longhaul.runtime.errors import FieldError
from longhaul.spaces import unmasked
from longhaul.types import Act, Key, Params, PyTree, Rollout, Spec


class State(NamedTuple):
    params: Params
    opt_state: optax.OptState
    moments: normalise.Moments | tuple[()]  # of the observations; () without normalise_observation
    updates: jax.Array  # int32: finished ones


class Policy(NamedTuple):
    """Part of the state that acting needs."""

    params: Params
    moments: normalise.Moments | tuple[()]


def check(config: InMinibatches, *, columns: int, steps: int) -> None:
    """Raises FieldError for impossible sizes of one shard."""
    rows, unit = (columns, "environments") if config.network.memory else (columns * steps, "steps of a batch")
    if rows % (config.num_minibatches or 1):
        raise FieldError(
            "num_minibatches",
            f"{config.num_minibatches}, which does not divide the {rows} {unit} of one device",
            f"choose a divisor of {rows}, or change --num-envs or --num-steps",
        )
    minibatch = rows // (config.num_minibatches or 1)
    if config.accumulate is not None and minibatch % config.accumulate:
        divisors = [str(n) for n in range(1, minibatch + 1) if minibatch % n == 0]
        raise FieldError(
            "accumulate",
            f"{config.accumulate}, which does not divide the {minibatch} {unit.split()[0]} of a minibatch",
            f"choose one of {', '.join(divisors[:8])}{', ...' if len(divisors) > 8 else ''}",
        )


class Parts(NamedTuple):
    """Network of an algorithm with actor and critic, and the distribution that its outputs mean."""

    inputs: PyTree  # input of the network for one observation, as ShapeDtypeStruct
    policy: Distribution
    network: actor_critic.ActorCritic


def parts(spec: Spec, config: OnActorCritic, *, norm: bool = False) -> Parts:
    """Network of a config for environments of `spec`; `norm` normalises its layers. Raises ValueError where the two do
    not fit."""
    net = config.network
    inputs, _ = unmasked(spec.observation)
    if spec.expand is not None:
        if config.normalise_observation:
            raise ValueError(
                "normalise_observation is on, and this environment's observations are stored packed; turn it off"
            )
        inputs = jax.eval_shape(spec.expand, inputs)
    policy = distribution(spec.action)
    if config.normalise_observation and net.torso != "mlp" and any(len(x.shape) == 2 for x in jax.tree.leaves(inputs)):
        raise ValueError(
            f"normalise_observation is on, and torso {net.torso} reads from an item's last feature whether it is "
            "there, which would be normalised too; turn it off, or take torso mlp"
        )
    options: dict[str, Any] = {
        "free": policy.free, "torso": net.torso, "activation": net.activation, "memory": net.memory,
        "precision": net.precision, "remat": net.remat, "shared": net.shared, "init": net.init, "norm": norm,
    }  # fmt: skip
    width, depth = net.hidden_dim, net.num_layers
    if net.model_size is not None:
        width, depth = model_size.width_and_depth(inputs, policy.size, net.model_size, **options)
    expand, live = spec.expand, None
    if spec.compact is not None and actor_critic.takes_live(net.torso, net.shared, net.memory, norm):
        expand, live = spec.compact
    network = actor_critic.actor_critic(inputs, policy.size, sizes=(width,) * depth, live=live, **options)
    if expand is None:
        return Parts(inputs, policy, network)

    def expanding(apply: actor_critic.Apply) -> actor_critic.Apply:
        """Stored observations are expanded at their use and never kept expanded."""
        return lambda params, memory, observation: apply(params, memory, expand(observation))

    return Parts(inputs, policy, network._replace(apply=expanding(network.apply), both=expanding(network.both)))


def look(moments: normalise.Moments | tuple[()], observation: PyTree) -> tuple[PyTree, jax.Array | None]:
    """(input of the network, mask of legal actions bool [..., n] or None) for stored observations, leading axes free.

    The input is normalised by `moments`, where there are some; `Parts.network` itself expands what is stored packed.
    """
    visible, mask = unmasked(observation)
    if isinstance(moments, normalise.Moments):
        visible = normalise.apply(moments, visible)
    return visible, mask


def starting(parts: Parts, config: OnActorCritic, optimiser: optax.GradientTransformation) -> Callable[[Key], State]:
    """Function of a key to the state before the first update."""

    def init(key: Key) -> State:
        params = parts.network.init(key)
        moments = normalise.start(parts.inputs) if config.normalise_observation else ()
        return State(params, optimiser.init(params), moments, jnp.int32(0))

    return init


def acting(parts: Parts, config: OnActorCritic, *, extras: bool = True) -> Act:
    """`Algorithm.act`. Its extras are the raw action and its log-probability, and the value where it costs nothing (one
    torso, no memory)."""
    _, policy, network = parts
    value_is_free = config.network.shared and not config.network.memory

    def act(acting: Policy, memory: PyTree, observation: PyTree, key: Key | None) -> tuple[jax.Array, PyTree, Any]:
        visible, mask = look(acting.moments, observation)
        parameters, value, memory = network.apply(acting.params, memory, visible)
        raw = policy.mode(parameters, mask) if key is None else policy.sample(parameters, mask, key)
        if not extras:
            return policy.action(raw), memory, ()
        results = {"raw": raw, "log_prob": policy.log_prob(parameters, mask, raw)}
        if value_is_free:
            results["value"] = value
        return policy.action(raw), memory, results

    return act


def network(spec: Spec, config: OnActorCritic) -> actor_critic.ActorCritic:
    """Network whose `apply` takes a `Policy` for parameters: policy parameters and value."""
    inner = parts(spec, config).network

    def apply(policy: Policy, memory: PyTree, observation: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        return inner.apply(policy.params, memory, look(policy.moments, observation)[0])

    return inner._replace(apply=apply, both=apply)


def advanced(
    state: State,
    params: Params,
    opt_state: optax.OptState,
    data: Rollout,
    weight: jax.Array | None,
    context: RunContext,
) -> State:
    """State after an update. Its moments follow here: acting and learning of this batch used the old ones.

    `weight` is None where every step counts; else `data.valid` [T, B] says which do.
    """
    moments = state.moments
    if isinstance(moments, normalise.Moments):
        inputs, valid = look((), data.observation)[0], None if weight is None else data.valid
        moments = normalise.update(moments, inputs, valid, context.mean, context.isolated)
    return State(params, opt_state, moments, state.updates + 1)


def explained_variance(error: jax.Array, target: jax.Array, weight: jax.Array | None, context: RunContext) -> jax.Array:
    """Share of the targets' variance that the values before the update explain: a scalar over all shards.

    `error` is target less value. `error`, `target` and `weight` (0 or 1; None: all count) have one shape.
    """
    unexplained, spread = (moments_of(x, weight, context)[1] for x in (error, target))
    return 1.0 - unexplained / jnp.maximum(spread, 1e-8)


def normalised(advantage: jax.Array, weight: jax.Array | None, context: RunContext) -> jax.Array:
    """Advantages, any shape, shifted and scaled to mean 0 and deviation 1 over all shards where `weight` is 1."""
    centre, variance = moments_of(advantage, weight, context)
    return (advantage - centre) / (jnp.sqrt(variance) + 1e-8)


def moments_of(x: jax.Array, weight: jax.Array | None, context: RunContext) -> tuple[jax.Array, jax.Array]:
    """(mean, variance), scalars over all shards, of x where `weight`, of its shape, is 1 (None: everywhere)."""
    mean, isolated = context.mean, context.isolated

    def of_means(first: jax.Array, second: jax.Array, share: jax.Array | float) -> tuple[jax.Array, jax.Array]:
        first, second = first / share, second / share
        return first, jnp.maximum(second - first**2, 0.0)

    # Isolated: whether a product is rounded before the subtraction depends on the program around it.
    if weight is None:  # no share to agree on: a shard sends two numbers
        first, second = mean(isolated(lambda x: (_mean(x), _mean(x * x)))(x))
        return isolated(lambda first, second: of_means(first, second, 1.0))(first, second)
    sums = isolated(lambda x, weight: (_mean(x * weight), _mean(x * x * weight), _mean(weight)))
    first, second, share = mean(sums(x, weight))
    return isolated(of_means)(first, second, jnp.maximum(share, 1e-8))


SUMMANDS = 16
"""Numbers added up one after the other, side by side with others: few kernels, all of them wide."""


def _mean(x: jax.Array) -> jax.Array:
    """Mean with a fixed order of additions. XLA's own sums have none: the same sum was rounded differently in another
    program on eight devices. The barrier keeps a product from being fused with its addition."""
    sums = jax.lax.optimization_barrier(x.reshape(-1))
    while len(sums) > 1:
        rows = jnp.pad(sums, (0, -len(sums) % SUMMANDS)).reshape(SUMMANDS, -1)
        sums = functools.reduce(jnp.add, rows)
    return sums[0] / x.size


def annealing(context: RunContext) -> Callable[[float, float], optax.Schedule]:
    """(begin, end) -> schedule from `begin` to `end` over a run, a function of the update's number."""
    updates, first, done = context.updates, context.first, context.done

    def schedule(begin: float, end: float) -> optax.Schedule:
        return optax.linear_schedule(begin + (end - begin) * done, end, updates - first, transition_begin=first)

    return schedule
