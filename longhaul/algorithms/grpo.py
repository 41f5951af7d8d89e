"""GRPO and its variants (Shao et al. 2024, arXiv 2402.03300): a policy gradient on groups of completions, no critic.

A completion's advantage is its reward less the mean of its group. The variants differ in the data of `LOSSES`: a ratio
of tokens or of sequences, its clipping, the average of the losses, the scaling of advantages. GRPO; Dr.GRPO (Liu et al.
2025, 2503.20783); DAPO (Yu et al. 2025, 2503.14476); GSPO (Zheng et al. 2025, 2507.18071); CISPO (MiniMax 2025,
2506.13585).

- **Groups** whose rewards are all exactly equal teach nothing and count nowhere. Dynamic sampling (`resample`) replaces
  them, a bounded number of times, so that batches keep their shape.
- **The divisor** of a loss covers all completions of an optimiser's step, on all shards, and is known before any
  gradient. So the gradient is the same in one piece and in micro-batches, of whole groups or of parts of one.
- **The ratio** is to the log-probabilities that the sampler recorded. `mismatch` is the learner's mean difference from
  them in an update's first minibatch: rounding alone where both have the same parameters.
- **Prompts** are read once a group, since minibatches are whole groups unless the run imitates. With `pack` a minibatch
  is read in rows of several completions (reasoning/packing.py), without those that teach nothing.

Where we differ:

- The same learner imitates demonstrations (`Completions.taught`), with learning rates of their own: in a warm start of
  `GRPOConfig.taught` updates, and while the gate (reasoning/reward_gate.py) is closed.
- The KL divergence is to the policy before the first update from rewards; with LoRA, to the model without it.
- The ratio to the sampler's probability is bounded by `correction` (truncated or masked importance sampling; Yao et al.
  2025).
- Where top-k, top-p or min-p truncate draws, the clipped ratio is to the probability before truncation, and a token's
  loss is weighed by the probability that truncation left. The two make the importance weight of the draw.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from longhaul.algorithms.config import LOSSES, GRPOConfig, Loss
from longhaul.algorithms.run_context import RunContext, Spread
from longhaul.distributions import k3
from longhaul.reasoning import packing, transformer
from longhaul.reasoning import reward_gate as gates
from longhaul.reasoning.draw import Rule
from longhaul.reasoning.sampler import DEMONSTRATED, OWN, SAMPLED, SOLVED, Completions, Speaker, log_probs
from longhaul.runtime.errors import FieldError
from longhaul.types import Algorithm, Key, Metrics, Params, PyTree, changing

EASIEST_SHARE = 0.25
"""Share of demonstrations in the first third of a curriculum."""

FINAL_SHARE = 0.1
"""Share of a learning rate at its end: it falls in the last third of the warm start, and of the rest of the run."""


class State(NamedTuple):
    params: Params
    opt_state: optax.OptState
    reference: Params | tuple[()]  # policy of the KL divergence
    updates: jax.Array  # int32
    imitated: jax.Array  # int32: number of these that imitated
    gate: gates.Gate


class Batch(NamedTuple):
    """Completions [B, ...] of an optimiser's step, with their advantages and weights."""

    data: Completions
    advantage: jax.Array  # float32 [B]
    weight: jax.Array  # float32 [B, N]: a token's part of the loss; sums to 1 over all shards, except for "constant"
    reference: jax.Array  # float32 [B, N]: log-probabilities by the reference; zeros where there is no KL
    row: packing.Row | tuple[()] = ()  # the row of these completions that is read, where they are packed


def check(config: GRPOConfig, *, columns: int, steps: int) -> None:
    """Raises FieldError for impossible settings or sizes of one shard."""
    if columns % config.group:
        raise FieldError("group", config.group, f"it must divide the completions of a shard, {columns}")
    for name in ("num_minibatches", "update_epochs"):
        if getattr(config, name) is None:
            raise FieldError(name, None, "it must be at least 1")
    assert config.num_minibatches is not None
    unit = config.group if grouped(config) else 1
    if columns % (config.num_minibatches * unit) or not _divides_evenly(
        columns // config.num_minibatches, config.accumulate, unit
    ):
        units = "completions" if unit == 1 else "groups"
        raise FieldError(
            "num_minibatches",
            config.num_minibatches,
            f"with accumulate {config.accumulate} it must divide the {units} of a shard, {columns // unit}; accumulate "
            "may also split each group into equal parts",
        )
    if config.pack and config.accumulate > 1:
        raise FieldError(
            "accumulate", config.accumulate, "with --pack the micro-batches are its rows; give 1, or --pack 0"
        )
    try:
        transformer.check(config.model)
    except FieldError as error:
        raise error.within("model_") from error


def _divides_evenly(rows: int, pieces: int, group: int) -> bool:
    """True if so many rows, in whole groups, fall into equal pieces that are whole groups or equal parts of groups."""
    size = rows // pieces
    return rows % pieces == 0 and size > 0 and (size % group == 0 or group % size == 0)


def grouped(config: GRPOConfig) -> bool:
    """True where nothing is ever imitated, so that completions lie in groups of one prompt."""
    return config.taught == 0 and config.gate.threshold == 0.0


def truncates(config: GRPOConfig) -> bool:
    """True where some tokens are never drawn."""
    return Rule(config.temperature, config.top_k, config.top_p, config.min_p).truncated


def shaped(config: GRPOConfig, data: Completions) -> jax.Array:
    """Rewards float32 [B] less the penalties of length: DAPO's for the last share `overlong` of the allowed tokens, and
    one in proportion to the tokens."""
    most = data.written.shape[1]
    share = jnp.sum(data.written, axis=1, dtype=jnp.float32) / most
    reward = data.reward - config.length_penalty * share
    if config.overlong > 0.0:
        reward -= jnp.clip((share - (1.0 - config.overlong)) / config.overlong, 0.0, 1.0)
    return reward


def advantages(reward: jax.Array, group: int, *, scaled: bool) -> tuple[jax.Array, jax.Array]:
    """(advantages, flag that the group teaches something), both [B], of rewards [B] with groups side by side.

    A_i = r_i - mean(r), over the group; with `scaled` divided by its standard deviation (plus 1e-4), as GRPO's are.
    Equal rewards of a group are found by comparing the numbers, not by their deviation, which rounding makes non-zero.
    """
    groups = reward.reshape(-1, group)
    informative = jnp.max(groups, axis=1, keepdims=True) > jnp.min(groups, axis=1, keepdims=True)
    centred = groups - jnp.mean(groups, axis=1, keepdims=True)
    if scaled:
        centred = centred / (jnp.std(groups, axis=1, keepdims=True) + 1e-4)
    advantage = jnp.where(informative, centred, 0.0)
    return advantage.reshape(-1), jnp.broadcast_to(informative, groups.shape).reshape(-1)


def weights(taken: jax.Array, counted: jax.Array, over: str, mean: Callable[[PyTree], PyTree]) -> jax.Array:
    """Weight [B, N] of each token of completions in the loss; 0 for completions that are not `counted` [B].

    `mean` is over shards: a sum of weighted losses, averaged over shards, is the average that `over` names.
    """
    kept = taken & counted[:, None]
    if over == "constant":
        return kept / jnp.float32(taken.size)
    if over == "token":
        return kept / jnp.maximum(mean(jnp.sum(kept, dtype=jnp.float32)), 1.0)
    own = jnp.sum(kept, axis=1, dtype=jnp.float32)
    return kept / jnp.maximum(own, 1.0)[:, None] / jnp.maximum(mean(jnp.sum(own > 0, dtype=jnp.float32)), 1.0)


def surrogate(
    loss: Loss,
    log_prob: jax.Array,
    acted: jax.Array,
    taken: jax.Array,
    advantage: jax.Array,
    correction: str = "none",
    cap: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """(loss of each token, flag that its ratio was clipped), [B, N]; `acted` are log-probabilities of sampling.

    -min(rho A, clip(rho, 1 - low, 1 + high) A), where rho = pi / acting pi is the token's, or the sequence's geometric
    mean (GSPO); with the clip "weight" -sg(clip(rho, 1 - low, 1 + high)) A log pi (CISPO), sg without gradient.
    A ratio above `cap` is truncated; with "mask" a token above it, or below 1 / cap, counts nothing.
    """
    log_ratio = jnp.where(taken, log_prob - acted, 0.0)
    if loss.level == "sequence":
        count = jnp.maximum(jnp.sum(taken, axis=1, keepdims=True), 1)
        mean_log_ratio = jax.lax.stop_gradient(jnp.sum(log_ratio, axis=1, keepdims=True) / count)
        log_ratio = jnp.where(taken, mean_log_ratio + log_prob - jax.lax.stop_gradient(log_prob), 0.0)  # GSPO-token's
    ratio, token_advantage = jnp.exp(log_ratio), advantage[:, None]
    if correction == "truncate":
        ratio = jnp.minimum(ratio, cap)
    if correction == "mask":
        token_advantage = jnp.where(jnp.abs(log_ratio) > math.log(cap), 0.0, token_advantage)
    bounded = jnp.clip(ratio, 1.0 - loss.low, 1.0 + loss.high)
    if loss.clip == "weight":
        return -jax.lax.stop_gradient(bounded) * token_advantage * log_prob, bounded != ratio
    plain, clipped = ratio * token_advantage, bounded * token_advantage
    return -jnp.minimum(plain, clipped), plain > clipped


def curriculum_share(config: GRPOConfig, updates: jax.Array) -> jax.Array:
    """Share float32 scalar of demonstrations, easier ones first, that a warm start uses after `updates` (int32 scalar).

    The result of a sum depends on both its terms and on neither alone: among many other problems a model finds that out
    after hundreds of updates, or never; among problems of one sum, soon.
    """
    behind = updates / jnp.maximum(config.curriculum * config.taught, 1e-6)
    return EASIEST_SHARE + (1.0 - EASIEST_SHARE) * jnp.clip(1.5 * behind - 0.5, 0.0, 1.0).astype(jnp.float32)


def _rate(
    config: GRPOConfig, state: State, data: Completions, updates: int, mean: Callable[[PyTree], PyTree]
) -> Callable[..., Any]:
    """Function of the optimiser's step within an update to the learning rate, that of the most frequent lesson.

    `updates` are those of the whole run.
    """
    assert config.num_minibatches is not None and config.update_epochs is not None
    steps = float(config.num_minibatches * config.update_epochs)  # int32 ends at 2^31 steps of the optimiser
    shares = mean(jnp.stack([jnp.mean(data.lesson == DEMONSTRATED), jnp.mean(data.lesson >= SOLVED)]))

    def falling(left: jax.Array) -> jax.Array:
        return jnp.clip(FINAL_SHARE + 3.0 * (1.0 - FINAL_SHARE) * left, FINAL_SHARE, 1.0)

    def rate(step: jax.Array) -> jax.Array:
        taught = steps * state.imitated + step
        rewarded = steps * (state.updates - state.imitated) + step
        warm = config.lr_taught * falling(1.0 - taught / max(steps * config.taught, 1))
        left = (steps * (updates - state.updates) - step) / max(steps * (updates - config.taught), 1)
        imitating = jnp.where(shares[0] > 0.5, warm, config.lr_scaffold)
        chosen = jnp.where(jnp.sum(shares) > 0.5, imitating, config.lr * (falling(left) if config.anneal else 1.0))
        count = jnp.where(jnp.sum(shares) > 0.5, taught, rewarded)
        return chosen * jnp.clip((count + 1) / max(config.warmup, 1), 0.0, 1.0)

    return rate


def objective(config: GRPOConfig) -> Callable[[Params, Batch], tuple[jax.Array, Metrics]]:
    """Function (params, batch) -> sums over its tokens of the weighted loss, and of its parts."""
    loss = LOSSES[config.loss]
    loss = loss._replace(
        low=loss.low if config.clip_low is None else config.clip_low,
        high=loss.high if config.clip_high is None else config.clip_high,
    )

    def total(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        data = batch.data
        if batch.row:
            log_prob, entropy = packing.log_probs(config.model, params, batch.row, data.token, config.temperature)
        else:
            log_prob, entropy = log_probs(config.model, params, _prompts(config, data), data.token, config.temperature)
        token_loss, clipped = surrogate(
            loss, log_prob, data.log_prob, data.taken, batch.advantage, config.correction, config.correction_cap
        )
        if truncates(config) and config.correction != "none":
            token_loss = token_loss * jnp.exp(data.log_prob - data.behaviour)
        taught = data.taught[:, None]
        own = data.taken & ~taught
        log_ratio = jnp.where(own, log_prob - data.log_prob, 0.0)
        parts = {
            "entropy": entropy,
            "approx_kl": k3(log_ratio),
            "clip_fraction": clipped.astype(jnp.float32),
            "mismatch": jnp.abs(log_ratio),
            "own": own.astype(jnp.float32),
            "corrected": (jnp.abs(log_ratio) > math.log(config.correction_cap)).astype(jnp.float32),
            "reference_kl": jnp.zeros_like(token_loss),
        }
        if config.kl_coef > 0.0:
            parts["reference_kl"] = k3(jnp.where(data.taken, batch.reference - log_prob, 0.0))
            token_loss = token_loss + config.kl_coef * parts["reference_kl"]
        parts["loss"] = jnp.where(taught, 0.0, token_loss)
        parts["imitation_loss"] = jnp.where(taught, -log_prob, 0.0)
        token_loss = parts["loss"] + parts["imitation_loss"]
        summed = {name: jnp.sum(batch.weight * part) for name, part in parts.items()}
        return jnp.sum(batch.weight * token_loss), summed

    return total


def _prompts(config: GRPOConfig, data: Completions) -> jax.Array:
    """Prompts: one of each group, or part of a group, where completions lie in groups."""
    return data.prompt[:: min(config.group, len(data.prompt))] if grouped(config) else data.prompt


def in_micro_batches(
    function: Callable[[Params, Batch], Any], pieces: int, spread: Spread
) -> Callable[[Params, Batch], Any]:
    """Function that sums over a batch's rows, computed one micro-batch after the other, each `spread` over devices."""
    if pieces == 1:
        return lambda params, batch: function(params, spread(batch, 0))

    def run(params: Params, batch: Batch) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(pieces, -1, *x.shape[1:]) if x.ndim else x, batch)
        parts = spread(parts, 1)

        def piece(i: jax.Array) -> Any:
            return function(params, jax.tree.map(lambda x: x[i] if x.ndim else x, parts))

        def add(i: jax.Array, sums: Any) -> Any:
            return jax.tree.map(jnp.add, sums, piece(i))

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(piece, jnp.int32(0)))
        return jax.lax.fori_loop(0, pieces, add, zeros)

    return run


def in_rows(config: GRPOConfig, function: Callable[[Params, Batch], Any]) -> Callable[[Params, Batch], Any]:
    """Function that sums over a batch's completions, packed into rows and computed row by row."""

    def run(params: Params, batch: Batch) -> Any:
        def of_row(row: packing.Row) -> Any:
            in_row = row.here[:, None]
            data = batch.data._replace(taken=batch.data.taken & in_row)
            return function(params, batch._replace(data=data, weight=jnp.where(in_row, batch.weight, 0.0), row=row))

        return _over_rows(config, of_row, batch.data, batch.weight)

    return run


def _over_rows(config: GRPOConfig, function: Callable[[packing.Row], Any], data: Completions, counts: jax.Array) -> Any:
    """Sum of function(row) over the rows of completions, of whose tokens those of `counts` [B, N] count."""
    room = max(config.pack, data.prompt.shape[1] + data.token.shape[1])
    to = packing.packed(data.prompt, data.problem, counts, room=room, pad=config.model.pad)
    return packing.summed(function, to, data.prompt, data.token, room=room)


def _batch(config: GRPOConfig, data: Completions, reference: Params) -> Batch:
    """Batch of one shard; `weight` is the mask of tokens that count."""
    advantage, informative = advantages(shaped(config, data), config.group, scaled=LOSSES[config.loss].scaled)
    if config.mask_truncated:
        informative &= ~data.cut
    counts = (informative | data.taught)[:, None] & data.taken
    zeros = jnp.zeros(data.token.shape)
    reference_log_prob = _reference_log_probs(config, data, counts, reference) if config.kl_coef else zeros
    return Batch(data, advantage, counts, reference_log_prob)


def _reference_log_probs(config: GRPOConfig, data: Completions, counts: jax.Array, reference: Params) -> jax.Array:
    """Log-probabilities [B, N] by the reference, of the tokens that count [B, N] at least."""
    plain = dataclasses.replace(config.model, lora=0)
    assert config.num_minibatches is not None
    pieces = config.num_minibatches * config.accumulate

    def of_row(row: packing.Row) -> jax.Array:
        return packing.log_probs(plain, reference, row, data.token, config.temperature)[0]

    def of_piece(part: Completions) -> jax.Array:
        return log_probs(plain, reference, _prompts(config, part), part.token, config.temperature)[0]

    if config.pack:
        log_prob: jax.Array = _over_rows(config, of_row, data, counts)
        return log_prob
    parts = jax.tree.map(lambda x: x.reshape(pieces, -1, *x.shape[1:]), data)
    return of_piece(data) if pieces == 1 else jax.lax.map(of_piece, parts).reshape(data.token.shape)


def _next_gate(
    config: GRPOConfig, state: State, data: Completions, mean: Callable[[PyTree], PyTree]
) -> tuple[gates.Gate, jax.Array]:
    """(gate after these completions, flag that nothing is learnt from them: a look at a closed gate, or too few own
    chains)."""
    own = (~data.taught).astype(jnp.float32)
    count = mean(jnp.sum(own))
    measure = data.reward == 1.0 if config.gate.verdict else data.soundness
    level = mean(jnp.sum(own * measure)) / jnp.maximum(count, 1.0)
    after = gates.look(config.gate, state.gate, level)
    after = jax.tree.map(lambda new, old: jnp.where(count > 0.0, new, old), after, state.gate)
    copies = data.lesson == OWN
    chains = mean(jnp.sum(copies & jnp.any(data.taken, axis=1), dtype=jnp.float32))
    lacking = (mean(jnp.mean(copies, dtype=jnp.float32)) > 0.5) & (chains < config.gate.fewest)
    return after, ((count > 0.0) & ~after.open) | lacking


def _shuffled_rows(config: GRPOConfig, rows: int, key: Key) -> jax.Array:
    """Numbers of completions, int32 [steps, rows of a minibatch], shuffled, by whole groups where they lie in such."""
    assert config.num_minibatches is not None and config.update_epochs is not None
    unit = config.group if grouped(config) else 1
    keys = jax.random.split(key, config.update_epochs)
    orders = jax.vmap(lambda each: jax.random.permutation(each, rows // unit))(keys)
    return (orders[..., None] * unit + jnp.arange(unit)[None, None]).reshape(-1, rows // config.num_minibatches)


def _metrics(
    parts: Metrics, state: State, data: Completions, gate: gates.Gate, mean: Callable[[PyTree], PyTree]
) -> tuple[Metrics, jax.Array]:
    """(metrics of an update from the `parts` of its steps, share of its completions that were imitated)."""
    own = parts.pop("own")[0]  # of the first step, whose parameters are those that were sent to the sampler
    mismatch = parts.pop("mismatch")[0] / jnp.where(own > 0.0, own, 1.0)
    metrics = jax.tree.map(jnp.mean, parts)
    imitates = mean(jnp.mean(data.taught, dtype=jnp.float32))
    metrics |= {"mismatch": mismatch, "taught": imitates, "gate_open": gate.open.astype(jnp.float32)}
    metrics |= {"gate_visits": gate.visits.astype(jnp.float32), "gate_through": gate.through.astype(jnp.float32)}
    metrics["staleness"] = mean(jnp.mean((state.updates - data.version).astype(jnp.float32)))
    return metrics, imitates


def grpo(spec: Any, config: GRPOConfig, context: RunContext) -> Algorithm:
    """Learner of `Completions`; acting is the sampler's. Of the context only `updates` and `mean` matter."""
    updates, mean = context.updates, context.mean
    over = LOSSES[config.loss].over
    optimiser = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(b2=config.adam_b2))
    total = objective(config)

    def init(key: Key) -> State:
        params = transformer.init(key, config.model, blank=bool(config.model_folder))
        reference = jax.tree.map(jnp.copy, params) if config.kl_coef > 0.0 and not config.model.lora else ()
        zero, opt_state = jnp.int32(0), optimiser.init(transformer.split(config.model, params)[0])
        return State(params, opt_state, reference, zero, zero, gates.begin(config.gate))

    def policy(state: State) -> Speaker:
        """Lesson of the next update: verified chains while the gate is closed, except for a look every few updates."""
        looks = (state.updates - config.taught) % config.gate.every == 0
        after = jnp.where(state.gate.open | looks, SAMPLED, SOLVED if config.gate.chains == "solver" else OWN)
        warm = state.updates < config.taught
        lesson = jnp.where(warm, DEMONSTRATED, after).astype(jnp.int32)
        share = jnp.where(warm, curriculum_share(config, state.updates), 1.0)
        return Speaker(state.params, lesson, share, (looks & ~state.gate.open & ~warm).astype(jnp.int32))

    def learn(state: State, data: Completions, key: Key) -> tuple[State, Metrics]:
        own_params, rest = transformer.split(config.model, state.params)
        at_once = jax.grad(lambda learnt, batch: total(transformer.joined(learnt, rest), batch), has_aux=True)
        gradient = (
            in_rows(config, at_once) if config.pack else in_micro_batches(at_once, config.accumulate, context.spread)
        )
        reference = state.reference
        if config.kl_coef > 0.0 and not config.model.lora:
            only_imitated = state.updates == state.imitated
            reference = jax.tree.map(lambda new, old: jnp.where(only_imitated, new, old), state.params, reference)
        batch = _batch(config, data, rest or reference)
        rate = _rate(config, state, data, updates, mean)

        def step(carried: tuple[Params, optax.OptState], xs: tuple[jax.Array, jax.Array]) -> tuple[Any, Metrics]:
            (params, opt_state), (order, number) = carried, xs
            minibatch = jax.tree.map(lambda x: x[order] if x.ndim else x, batch)
            taken, taught = minibatch.weight, minibatch.data.taught
            counts = jnp.any(taken, axis=1)
            imitated = weights(taken, counts & taught, "token", mean)
            reinforced = weights(taken, counts & ~taught, over, mean)
            weight = jnp.where(taught[:, None], imitated, reinforced)
            grads, parts = mean(gradient(params, minibatch._replace(weight=weight)))
            directions, opt_state = optimiser.update(grads, opt_state, params)
            lr = rate(number)
            params = jax.tree.map(lambda p, d: p - lr * d, params, directions)
            return (params, opt_state), parts | {"grad_norm": optax.tree.norm(grads), "lr": lr}

        orders = _shuffled_rows(config, batch.advantage.shape[0], key)
        before = own_params, state.opt_state
        learnt, parts = jax.lax.scan(step, before, (orders, jnp.arange(len(orders))))
        gate, held = _next_gate(config, state, data, mean)
        if not grouped(config):  # else nothing is ever held, and the old parameters need no memory
            learnt = jax.tree.map(lambda new, old: jnp.where(held, old, new), learnt, before)
        params, opt_state = transformer.joined(learnt[0], rest), learnt[1]
        metrics, imitates = _metrics(parts, state, data, gate, mean)
        imitated = state.imitated + (imitates > 0.5)
        after = State(params, opt_state, reference, state.updates + 1, imitated, gate)
        return after, {f"grpo/{name}": value for name, value in metrics.items()}

    def act(params: Params, memory: PyTree, observation: PyTree, key: Key | None) -> Any:
        raise NotImplementedError("completions are sampled by reasoning.sampler.collector, token by token with a cache")

    def fixed(tree: Any) -> Any:  # a State or a Speaker
        flags = changing(tree)
        learnt, rest = transformer.split(config.model, flags.params)
        return flags._replace(params=transformer.joined(learnt, jax.tree.map(lambda _: True, rest)))

    return Algorithm(init, policy, lambda count: (), act, learn, fixed)


def network(spec: Any, config: GRPOConfig) -> Any:
    """Raises ValueError: a language model has no actor and no critic."""
    raise ValueError("a language model has no values and no actions; use longhaul evaluate, or longhaul reason")
