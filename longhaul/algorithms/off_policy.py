"""Common part of algorithms with a replay: state, learning from a rollout, acting.

A rollout goes into the replay; then `gradient_steps` steps of the optimiser follow, each on a sample of its own and
with one mean of gradients over the shards. All of it is one compiled loop, in which the replay is written in place.
Before `learning_starts` steps are in the replay nothing is learnt, and actions are drawn uniformly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from longhaul import prng, replay
from longhaul.algorithms.actor_critic import annealing
from longhaul.algorithms.config import OffPolicy
from longhaul.algorithms.run_context import RunContext
from longhaul.networks import actor_critic
from longhaul.replay import Chosen, Cursor, Ring, Sizes, Transitions
from longhaul.runtime.errors import FieldError
from longhaul.spaces import Box, Discrete, unmasked
from longhaul.types import Act, Algorithm, Key, Local, Metrics, Params, PyTree, Rollout, Spec

PRIORITY_FLOOR = 1e-6
"""Term added to a step's error, so that every step may be sampled again (epsilon of Schaul et al. 2016)."""


class State(NamedTuple):
    params: dict[str, Params]
    target: dict[str, Params]  # targets, which follow some of `params`
    opt_state: dict[str, optax.OptState]
    replay: Local | tuple[()]  # of replay.Ring; () for a learner that only acts
    cursor: Cursor
    updates: jax.Array  # int32


class Policy(NamedTuple):
    """Part of the state that acting needs."""

    params: Params
    random: jax.Array  # float32: share of actions drawn uniformly from the legal ones


class Parts(NamedTuple):
    """Specific part of one algorithm of this kind."""

    init: Callable[[Key], dict[str, Params]]
    targets: tuple[str, ...]  # those of `params` with a target network
    loss: Callable[[dict[str, Params], dict[str, Params], Transitions, PyTree], tuple[jax.Array, Metrics, jax.Array]]
    #     (params, target, batch, noise) -> loss of each row [n], metrics of each row [n], its error for priorities [n]
    store: Callable[[jax.Array], jax.Array]  # an action -> its stored form
    stored: jax.ShapeDtypeStruct  # shape and type of the stored form
    actor: str  # the one of `params` that acts
    explore: Callable[[jax.Array], jax.Array] = lambda updates: jnp.float32(0.0)
    #     finished updates -> share of random actions, once it learns
    rare: tuple[str, ...] = ()  # those of `params` that step more rarely, together with all targets
    interval: int = 1  # steps of the optimiser for one of the rare ones
    noise: Callable[[Key, int], PyTree] = lambda key, rows: ()  # random numbers of the loss of so many rows
    mark: Callable[[jax.Array, Rollout], jax.Array] = lambda stored, data: stored  # adds to the stored actions


def check(config: OffPolicy, *, shards: int, columns: int, steps: int) -> None:
    """Raises FieldError for impossible sizes."""
    if config.batch_size % shards:
        raise FieldError(
            "batch_size",
            f"{config.batch_size}, which {shards} devices can't share evenly",
            f"choose a multiple of {shards}",
        )
    try:
        room = replay.rows_of(config.replay_size, Sizes(shards, columns, steps)) * shards * columns
    except ValueError as error:
        raise FieldError("replay_size", config.replay_size, str(error)) from error
    update = steps * columns * shards
    if not update <= config.learning_starts <= room:
        too_few = config.learning_starts < update
        remedy = f"give {update}, or lower --num-envs or --num-steps" if too_few else f"give at most {room}"
        raise FieldError(
            "learning_starts",
            config.learning_starts,
            f"it must lie between an update's steps, {update}, and what the replay holds, {room}: {remedy}",
        )
    if not config.n_step < room // (shards * columns):
        raise FieldError(
            "n_step",
            config.n_step,
            f"it must be below the replay's {room // (shards * columns)} rows; raise --replay-size",
        )


def tower(config: OffPolicy, inputs: PyTree, outputs: int, scale: float = 1.0) -> actor_critic.Tower:
    """Network of a config."""
    net = config.network
    return actor_critic.tower(
        inputs, outputs, torso=net.torso, sizes=(net.hidden_dim,) * net.num_layers, activation=net.activation,
        precision=net.precision, remat=net.remat, init=net.init, scale=scale,
    )  # fmt: skip


class Preprocessor(NamedTuple):
    """Preprocessor of stored observations into inputs of networks."""

    shape: PyTree  # of one input
    look: Callable[[PyTree], tuple[PyTree, jax.Array | None]]  # stored -> (input, mask of legal actions)


def preprocessor(spec: Spec) -> Preprocessor:
    """Preprocessor of observations without their mask, expanded where they are stored packed."""
    stored, _ = unmasked(spec.observation)
    expand = spec.expand or (lambda x: x)

    def look(observation: PyTree) -> tuple[PyTree, jax.Array | None]:
        visible, mask = unmasked(observation)
        return expand(visible), mask

    return Preprocessor(jax.eval_shape(expand, stored), look)


def uniform_legal(key: Key, mask: jax.Array | None, actions: int, rows: int) -> jax.Array:
    """Legal actions int32 [rows], all with the same chance."""
    legal = jnp.ones((rows, actions), bool) if mask is None else mask
    return jnp.argmax(jnp.where(legal, prng.uniform(key, (rows, actions)), -1.0), axis=-1).astype(jnp.int32)


def to_unit(box: Box, action: jax.Array) -> jax.Array:
    """Actions [..., d] of the environment scaled to -1 to 1, and clipped there."""
    centre, half = _centre_and_half(box, action)
    return jnp.clip((action - centre) / half, -1.0, 1.0)


def from_unit(box: Box, action: jax.Array) -> jax.Array:
    """Inverse of `to_unit`."""
    centre, half = _centre_and_half(box, action)
    return centre + half * action


def _centre_and_half(box: Box, action: jax.Array) -> list[jax.Array]:
    low, high = np.asarray(box.low, np.float32), np.asarray(box.high, np.float32)
    return [jnp.broadcast_to(x, action.shape) for x in ((high + low) / 2, (high - low) / 2)]


def q_values(critic: actor_critic.Tower, params: Sequence[Params], inputs: PyTree, action: jax.Array) -> jax.Array:
    """Values float32 [critics, ...] of a vector within -1 to 1 by several critics."""
    return jnp.stack([critic.apply(critic_params, (inputs, action))[..., 0] for critic_params in params])


def actor_network(actor: actor_critic.Tower, preprocessor: Preprocessor) -> actor_critic.ActorCritic:
    """Actor whose `apply` takes a `Policy`. Its value is 0: only the critics have one."""

    def apply(policy: Policy, memory: PyTree, observation: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        parameters = actor.apply(policy.params, preprocessor.look(observation)[0])
        return parameters, jnp.zeros(parameters.shape[:-1], jnp.float32), memory

    return actor_critic.ActorCritic(actor.init, apply, lambda columns: (), apply)


def choice_type(action: Discrete) -> jax.ShapeDtypeStruct:
    """Stored form of a choice."""
    return jax.ShapeDtypeStruct((), jnp.uint8 if action.n <= 256 else jnp.int32)


def _gradient(
    parts: Parts, params: Any, target: Any, batch: Transitions, noise: PyTree
) -> tuple[Any, Metrics, jax.Array]:
    """(gradients, metrics, each row's error) of the mean loss over the rows of a batch with a weight."""
    share = batch.weight / jnp.maximum(jnp.sum(batch.weight > 0.0), 1)

    def total(params: Any) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        rows, metrics, error = parts.loss(params, target, batch, noise)
        return jnp.sum(share * rows), ({name: jnp.sum(share * x) for name, x in metrics.items()}, error)

    grads, (metrics, error) = jax.grad(total, has_aux=True)(params)
    return grads, metrics, error


class _Learnt(NamedTuple):
    """Parts of a state that a step of the optimiser changes."""

    params: dict[str, Params]
    target: dict[str, Params]
    opt_state: dict[str, optax.OptState]


def _optimiser_step(
    config: OffPolicy, parts: Parts, optimiser: optax.GradientTransformation, before: _Learnt, grads: dict[str, Params],
    updates: jax.Array, i: jax.Array,
) -> _Learnt:  # fmt: skip
    """Parameters after step `i` of the optimiser in an update; targets follow."""
    opt_state = _with_update_count(before.opt_state, updates)
    changes = {name: optimiser.update(grads[name], opt_state[name], old) for name, old in before.params.items()}
    params = {name: optax.apply_updates(old, changes[name][0]) for name, old in before.params.items()}
    opt_state = {name: after for name, (_, after) in changes.items()}
    target = {name: optax.incremental_update(params[name], old, config.tau) for name, old in before.target.items()}
    after = _Learnt(params, target, opt_state)
    return _hold_rare_parts(parts, after, before, i) if parts.interval > 1 else after


def _hold_rare_parts(parts: Parts, after: _Learnt, before: _Learnt, i: jax.Array) -> _Learnt:
    """Result `after` a step, with the rare parts and all targets as `before` unless they join this step."""
    joins = i % parts.interval == parts.interval - 1

    def where_joins(new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(lambda x, y: jnp.where(joins, x, y), new, old)

    def rare_where_joins(new: dict[str, PyTree], old: dict[str, PyTree]) -> dict[str, PyTree]:
        return {name: where_joins(x, old[name]) if name in parts.rare else x for name, x in new.items()}

    params = rare_where_joins(after.params, before.params)
    opt_state = rare_where_joins(after.opt_state, before.opt_state)
    return _Learnt(params, where_joins(after.target, before.target), opt_state)


def _with_update_count(opt_state: PyTree, updates: jax.Array) -> PyTree:
    """State whose rate is that of an update. Optax's count is of the optimiser's steps: it ends at 2^31 - 1, begins at
    `learning_starts`, and of a rare network it has the own steps alone."""

    def at(part: PyTree) -> PyTree:
        return part._replace(count=updates) if isinstance(part, optax.ScaleByScheduleState) else part

    return jax.tree.map(at, opt_state, is_leaf=lambda part: isinstance(part, optax.ScaleByScheduleState))


def algorithm(
    spec: Spec,
    config: OffPolicy,
    parts: Parts,
    act: Act,
    context: RunContext,
) -> Algorithm:
    """Algorithm of these parts, whose `act` is that of `types.Algorithm`; without `context.sizes` it cannot learn."""
    sizes, optimiser = context.sizes, _optimiser(config, context)
    store = None if sizes is None else replay.replay(
        spec, parts.stored, sizes, config.replay_size, n_step=config.n_step, half=config.replay_precision == "bf16",
        prioritised=config.priority_exponent is not None,
    )  # fmt: skip
    optimise = None if store is None or sizes is None else _optimiser_steps(config, parts, context, store, optimiser)

    def init(key: Key) -> State:
        params = parts.init(key)
        target = {name: jax.tree.map(jnp.copy, params[name]) for name in parts.targets}
        rings = Local(store.start()) if store else ()
        opt_state = {name: optimiser.init(network) for name, network in params.items()}
        return State(params, target, opt_state, rings, replay.start_cursor(), jnp.int32(0))

    def held(cursor: Cursor) -> jax.Array:
        """Number of steps in the replay, over all shards."""
        return cursor.filled * (sizes.shards * sizes.columns if sizes else 1)

    def policy(state: State) -> Policy:
        learns = held(state.cursor) >= config.learning_starts
        return Policy(state.params[parts.actor], jnp.where(learns, parts.explore(state.updates), 1.0))

    def learn(state: State, data: Rollout, key: Key) -> tuple[State, Metrics]:
        assert store is not None and optimise is not None and isinstance(state.replay, Local), "it can only act"
        ring = jax.tree.map(lambda x: x[0], state.replay.value)
        ring, cursor = store.add(ring, state.cursor, data._replace(action=parts.mark(parts.store(data.action), data)))
        state, metrics = optimise(state._replace(cursor=cursor), ring, held(cursor), key)
        return state, {f"{config.name}/{name}": value for name, value in metrics.items()}

    return Algorithm(init, policy, lambda columns: (), act, learn)


def _optimiser(config: OffPolicy, context: RunContext) -> optax.GradientTransformation:
    # With and without a bound it has the same state, so that a run may continue with the other; only the bound reads
    # the gradients.
    cut = optax.identity() if config.max_grad_norm is None else optax.clip_by_global_norm(config.max_grad_norm)
    rate = annealing(context)(config.lr, 0.0 if config.anneal else config.lr)
    return optax.chain(cut, optax.adam(rate, eps=config.adam_eps))


def _optimiser_steps(
    config: OffPolicy, parts: Parts, context: RunContext, store: replay.Replay, optimiser: optax.GradientTransformation
) -> Callable[[State, Ring, jax.Array, Key], tuple[State, Metrics]]:
    """Function (state, its ring, steps in the replay, key) -> (state, metrics) after all steps of the optimiser that an
    update takes; there is none before `learning_starts`."""
    mean, sizes = context.mean, context.sizes
    assert sizes is not None
    rows, prioritised = config.batch_size // sizes.shards, config.priority_exponent is not None

    def optimise(state: State, ring: Ring, held: jax.Array, key: Key) -> tuple[State, Metrics]:
        cursor = state.cursor
        key_samples, key_losses = jax.vmap(lambda each: prng.split(each, 2), out_axes=1)(
            prng.split(key, config.gradient_steps)
        )
        passed = jnp.minimum(state.updates / context.updates, 1.0)
        beta = config.importance_exponent + (1.0 - config.importance_exponent) * passed

        def choose(ring: Ring, key: Key) -> Chosen:
            return store.choose(ring, cursor, key, rows, beta)

        # Random numbers are drawn before the loop: inside, XLA would compute them again in each of a dozen uses. The
        # replay is read in the loop alone: outside, XLA would read the ring before the new row is written, and copy all
        # of it to write that row. The barrier hides from XLA that the loop returns the ring unchanged.
        choices = None if prioritised else jax.vmap(functools.partial(choose, ring))(key_samples)
        noises = jax.vmap(lambda key: parts.noise(key, rows))(key_losses)

        def step(i: jax.Array, carried: Any) -> Any:
            learnt, ring, sums = carried
            ring = jax.lax.optimization_barrier(ring)
            chosen = choose(ring, key_samples[i]) if choices is None else jax.tree.map(lambda x: x[i], choices)
            noise = jax.tree.map(lambda x: x[i], noises)
            batch = store.look(ring, cursor, chosen)
            gradient = context.isolated(functools.partial(_gradient, parts))
            grads, metrics, error = gradient(learnt.params, learnt.target, batch, noise)
            grads, metrics = mean((grads, metrics))
            learnt = _optimiser_step(config, parts, optimiser, learnt, grads, state.updates, i)
            if config.priority_exponent is not None:
                ring = store.prioritise(ring, batch, (jnp.abs(error) + PRIORITY_FLOOR) ** config.priority_exponent)
            return learnt, ring, {name: sums.get(name, 0.0) + x for name, x in metrics.items()}

        steps = jnp.where(held >= config.learning_starts, config.gradient_steps, 0)
        learnt = _Learnt(state.params, state.target, state.opt_state)
        names = jax.eval_shape(step, 0, (learnt, ring, {}))[-1]
        zeros = {name: jnp.float32(0.0) for name in names}
        learnt, ring, sums = jax.lax.fori_loop(0, steps, step, (learnt, ring, zeros))
        metrics = {name: total / jnp.maximum(steps, 1) for name, total in sums.items()}
        metrics["replay"] = held.astype(jnp.float32)
        rings = Local(jax.tree.map(lambda x: x[None], ring))
        after = State(learnt.params, learnt.target, learnt.opt_state, rings, cursor, state.updates + 1)
        return after, metrics

    return optimise
