"""Returns and advantages of one stream of experience [T]; batch them with `jax.vmap(..., in_axes=1, out_axes=1)`.

Every function takes `terminated` and `truncated` separately: the first ends the task (nothing follows), the second
only the watching (the successor's value counts, but the next step of the stream belongs to another episode). Arrays are
[T]: float32, and bool for `terminated` and `truncated`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


def gae(
    reward: jax.Array,
    value: jax.Array,
    successor_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    gamma: float,
    lam: float,
) -> jax.Array:
    """Generalised advantage estimates (Schulman et al. 2016, equation 16); add `value` for the lambda-return.

    `successor_value[t]` is the value of the observation that step t led to. The sum stops at both kinds of end.
    """
    bootstrap = jnp.where(terminated, 0.0, gamma * successor_value)
    delta = reward + bootstrap - value
    return _backward_sums(delta, jnp.where(terminated | truncated, 0.0, gamma * lam))


def _backward_sums(term: jax.Array, factor: jax.Array) -> jax.Array:
    """x_t = term_t + factor_t x_{t+1}, 0 behind the end of the stream."""

    def backward(following: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        term_t, factor_t = step
        total = term_t + factor_t * following
        return total, total

    return jax.lax.scan(backward, jnp.zeros_like(term[0]), (term, factor), reverse=True, unroll=16)[1]


def q_lambda(
    reward: jax.Array,
    successor_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    gamma: float,
    lam: float,
) -> jax.Array:
    """Returns of Q-learning over lambda: r_t + gamma ((1 - lam) max_a Q(s_{t+1}, a) + lam the next step's return).

    Peng's Q(lambda) (Peng and Williams 1996), as in PQN (Gallici et al. 2024): `successor_value[t]` is the greatest
    value of the observation that step t led to. A return continues past a choice that was not the greatest, where
    Watkins' is cut: random choices bias it. At the end of an episode or of the stream it looks one step ahead.
    """
    discount = jnp.where(terminated, 0.0, gamma)
    trace = jnp.where(terminated | truncated, 0.0, lam)

    def backward(following: jax.Array, step: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        r, ahead, discount_t, trace_t = step
        total = r + discount_t * ((1.0 - trace_t) * ahead + trace_t * following)
        return total, total

    steps = (reward, successor_value, discount, trace)
    return jax.lax.scan(backward, successor_value[-1], steps, reverse=True, unroll=16)[1]


class VTrace(NamedTuple):
    """Targets and advantages of V-trace for one stream; constants to any gradient."""

    target: jax.Array  # [T], v_s: of the value
    advantage: jax.Array  # [T], of the policy's gradient, weighted: rho_s (r_s + gamma v_{s+1} - V(x_s))


def vtrace(
    log_ratio: jax.Array,
    reward: jax.Array,
    value: jax.Array,
    successor_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    gamma: float,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    pg_rho_clip: float | None = None,
) -> VTrace:
    """V-trace (Espeholt et al. 2018, equation 1, and remark 2 for `lam`): off-policy targets of values and policy.

    `log_ratio[t]` is log pi(a_t) - log mu(a_t), of the learnt policy over the acting one. `rho_clip` and
    `c_clip` bound the ratio in the temporal difference and in the trace, `pg_rho_clip` (None: as `rho_clip`) that of
    the policy's gradient; infinity: no bound. The paper requires c_clip <= rho_clip; nothing here needs it.

    Where we differ: the paper has one kind of end. Here the trace stops at both kinds; at a truncated step, as at the
    last of the stream, v_{s+1} is `successor_value`, and at a terminated one 0. With `lam` below 1 the policy's
    gradient has the v_{s+1} of the paper's section 4.2, a target that contains lambda already; mixing it with
    V(x_{s+1}) by lambda again, as some code does, would turn it into GAE where pi = mu.

    Raises ValueError for a clip below 0, and for `gamma` or `lam` outside 0 to 1.
    """
    pg_rho_clip = rho_clip if pg_rho_clip is None else pg_rho_clip
    for name, clip in (("rho_clip", rho_clip), ("c_clip", c_clip), ("pg_rho_clip", pg_rho_clip)):
        if not clip >= 0.0:
            raise ValueError(f"{name} is {clip}; it must be at least 0 (infinity: no bound)")
    for name, share in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name} is {share}; it must lie in 0 to 1")
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    value, successor_value = jax.lax.stop_gradient((value, successor_value))
    ended = terminated | truncated
    discount = jnp.where(terminated, 0.0, gamma)
    delta = jnp.minimum(rho_clip, ratio) * (reward + discount * successor_value - value)
    trace = jnp.where(ended, 0.0, gamma * lam * jnp.minimum(c_clip, ratio))
    correction = _backward_sums(delta, trace)  # v_s - V(x_s)
    following = jnp.concatenate([correction[1:], jnp.zeros_like(correction[:1])])
    next_target = successor_value + jnp.where(ended, 0.0, following)
    advantage = jnp.minimum(pg_rho_clip, ratio) * (reward + discount * next_target - value)
    return VTrace(value + correction, advantage)


def successor_values(
    value: jax.Array,
    last: jax.Array,
    truncated_value: jax.Array,
    truncated: jax.Array,
) -> jax.Array:
    """Value of each step's successor, [T, ...], from the values of a rollout [T, ...] and of its `types.Successors`:
    `last` [...] and `truncated_value` [K, ...]."""
    following = jnp.concatenate([value[1:], last[None]], axis=0)
    count = jnp.cumsum(truncated.astype(jnp.int32), axis=0) - truncated
    own = jnp.take_along_axis(truncated_value, count, axis=0, mode="clip")
    return jnp.where(truncated, own, following)
