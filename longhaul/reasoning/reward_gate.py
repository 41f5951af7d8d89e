"""The gate between imitation and rewards: a policy whose written steps are not sound enough is taught, not rewarded.

Rewards raise what a policy does already: where it hardly reasons they teach it to guess. So while the soundness of what
it writes is below a threshold, it imitates verified chains; from there on, rewards teach. The measure must be grounded,
steps of this very problem: right sums about something else read 0.95 where 25 % of the answers were right.

The chains are a solver's, or the policy's own that are right and sound, one of a problem at most (STaR, Zelikman et al.
2022, arXiv 2203.14465; where we differ, they are of this very policy, and no rationale is made from the answer). A few
lucky ones would be learnt by heart: an update with fewer than so many learns nothing.

Hysteresis keeps the gate from flapping. Patience ends a scaffolding that does not help: after so many looks without a
rise the gate stays open for good, and says so (`through`).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from longhaul.reasoning.config import CHAINS, GateConfig


class Gate(NamedTuple):
    """Where it stands; all scalars."""

    open: jax.Array  # bool: rewards teach
    through: jax.Array  # bool: patience has ended, and it stays open
    level: jax.Array  # float32, soundness at the last look
    best: jax.Array  # float32, since it closed
    waited: jax.Array  # int32: looks since `best` rose
    visits: jax.Array  # int32: how often it closed


def check(config: GateConfig) -> None:
    """Raises ValueError, naming value, bound and remedy."""
    for name in ("threshold", "hysteresis", "rise"):
        value = getattr(config, name)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"gate_{name} is {value}; it must lie in 0 to 1")
    if config.chains not in CHAINS:
        raise ValueError(f"gate_chains is {config.chains!r}; it must be one of {', '.join(CHAINS)}")
    for name in ("patience", "every", "fewest"):
        if getattr(config, name) < 1:
            raise ValueError(f"gate_{name} is {getattr(config, name)}; it must be at least 1")


def begin(config: GateConfig) -> Gate:
    """Closed, where there is a threshold to pass."""
    shut = config.threshold > 0.0
    zero = jnp.int32(0)
    return Gate(jnp.bool_(not shut), jnp.bool_(False), jnp.float32(0.0), jnp.float32(0.0), zero, jnp.int32(shut))


def look(config: GateConfig, gate: Gate, level: jax.Array) -> Gate:
    """The gate after completions of this soundness."""
    risen = level >= gate.best + config.rise
    best = jnp.where(risen, level, gate.best)
    waited = jnp.where(risen, 0, gate.waited + 1)
    through = gate.through | (~gate.open & (waited >= config.patience))
    bound = jnp.where(gate.open, config.threshold - config.hysteresis, config.threshold)
    open_ = through | (level >= bound)
    closes = gate.open & ~open_
    best = jnp.where(closes, level, best)  # a rise is over where this visit began
    return Gate(open_, through, level, best, jnp.where(closes | open_, 0, waited), gate.visits + closes)
