"""States to which UNDO goes back in the canonical game ([S]): the ends of past enemies' turns.

An UNDO right after such an end gives back only its own cost, the next one goes back a turn, and so on. It restores
the player, enemies, transmissions and the board, also that of an earlier stage with its exit; not the number of the
stage, when the next scheduled transmission is due, nor where enemies came from: they count as neither scheduled nor
of a siphon, as in the Swift game. That game remembers every turn; ours the last DEPTH, across stages too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.state import SLOTS
from longhaul.envs.hackmatrix.swift_rules.state import DEPTH, ORIGIN, History, State

_NUMBERS = ("credits", "energy", "siphons", "score", "turn", "board", "reduced", "attack")
_SETS = ("siphoned", "centre", "removed", "pickup")
_SMALL = (("row", 3), ("col", 3), ("hp", 2), ("show", 1), ("calm", 1), ("attacks", 2), ("door", 2))
"""Numbers that share a word, with their bits."""


def empty() -> History:
    """Nothing to go back to."""
    zero = jnp.zeros((), jnp.int32)
    return History(
        zero, zero, jnp.zeros((DEPTH, 2 + len(_NUMBERS)), jnp.int32), jnp.zeros((DEPTH, 2 * len(_SETS)), jnp.uint32),
        jnp.zeros((DEPTH, SLOTS), jnp.int32), jnp.zeros((DEPTH, SLOTS), jnp.int32),
    )  # fmt: skip


def remember(state: State, happens: jax.Array) -> History:
    """The history with `state` as its last entry, or as it is."""
    past = state.history
    small, place = jnp.int32(0), 0
    for name, bits in _SMALL:
        small = small | getattr(state, name).astype(jnp.int32) << place
        place += bits
    programs = jax.lax.bitcast_convert_type(state.programs, jnp.int32)
    numbers = w.join([small, programs, *(getattr(state, name) for name in _NUMBERS)])
    sets = w.join([getattr(state, name)[i] for name in _SETS for i in range(2)])
    top = jnp.where(happens, (past.top + 1) % DEPTH, past.top)
    here = ((np.arange(DEPTH) == top) & happens)[:, None]

    def put(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(here, new[None], old)

    return History(
        jnp.where(happens, jnp.minimum(past.depth + 1, DEPTH), past.depth),
        top,
        put(numbers, past.numbers),
        put(sets, past.sets),
        put(state.foes & ~np.int32(ORIGIN), past.foes),
        put(state.sent & ~np.int32(ORIGIN), past.sent),
    )


def restore(state: State, happens: jax.Array) -> State:
    """The state after UNDO, if it happens; the entry is taken off the history."""
    past = state.history
    here = (np.arange(DEPTH) == past.top)[:, None]

    def get(entries: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(here, entries, jnp.zeros((), entries.dtype)), axis=0, dtype=entries.dtype)

    numbers, sets = get(past.numbers), get(past.sets)
    values = {name: numbers[2 + i] for i, name in enumerate(_NUMBERS)}
    values |= {name: sets[2 * i : 2 * i + 2] for i, name in enumerate(_SETS)}
    values |= {"foes": get(past.foes), "sent": get(past.sent)}
    values["programs"] = jax.lax.bitcast_convert_type(numbers[1], jnp.uint32)
    place = 0
    for name, bits in _SMALL:
        values[name] = (numbers[0] >> place & ((1 << bits) - 1)).astype(getattr(state, name).dtype)
        place += bits
    chosen = {name: jnp.where(happens, value, getattr(state, name)) for name, value in values.items()}
    history = past._replace(
        depth=past.depth - happens, top=jnp.where(happens, (past.top + DEPTH - 1) % DEPTH, past.top)
    )
    return state._replace(**chosen, history=history)  # type: ignore[arg-type]
