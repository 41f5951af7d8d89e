"""Gate between imitation and rewards: a policy whose written steps are not sound enough imitates.

Rewards reinforce what a policy does already: if it hardly reasons, they teach it to guess. So while the soundness of
its steps is below a threshold, it imitates verified chains; above it, it learns from rewards. The measure must count
steps of the same problem: right sums about other numbers scored 0.95 where 25 % of the answers were right. Text has no
steps that a program can check: there it is the share of completions that the verifier calls right, in the answer's
format. A look at a closed gate is at problems that are never imitated.

The chains are a solver's, or the policy's own right and sound ones, at most one of a problem (STaR, Zelikman et al.
2022, arXiv 2203.14465; where we differ, they are of the current policy, and no rationale is made from the answer). A
few lucky ones would be memorised: an update with fewer than `fewest` learns nothing.

Hysteresis keeps the gate from oscillating. Patience ends an imitation that does not help: after so many looks without a
rise the gate stays open for good, which `through` reports.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from longhaul.reasoning.config import GateConfig


class Gate(NamedTuple):
    """State of the gate; all scalars."""

    open: jax.Array  # bool: rewards teach
    through: jax.Array  # bool: patience has ended, and it stays open
    level: jax.Array  # float32, soundness at the last look
    best: jax.Array  # float32, since it closed
    waited: jax.Array  # int32: looks since `best` rose
    visits: jax.Array  # int32: how often it closed


def begin(config: GateConfig) -> Gate:
    """Initial gate: closed if there is a threshold."""
    shut = config.threshold > 0.0
    zero = jnp.int32(0)
    return Gate(jnp.bool_(not shut), jnp.bool_(False), jnp.float32(0.0), jnp.float32(0.0), zero, jnp.int32(shut))


def look(config: GateConfig, gate: Gate, level: jax.Array) -> Gate:
    """Gate after completions of this soundness."""
    risen = level >= gate.best + config.rise
    best = jnp.where(risen, level, gate.best)
    waited = jnp.where(risen, 0, gate.waited + 1)
    through = gate.through | (~gate.open & (waited >= config.patience))
    bound = jnp.where(gate.open, config.threshold - config.hysteresis, config.threshold)
    open_ = through | (level >= bound)
    closes = gate.open & ~open_
    best = jnp.where(closes, level, best)  # a rise is over where this visit began
    return Gate(open_, through, level, best, jnp.where(closes | open_, 0, waited), gate.visits + closes)
