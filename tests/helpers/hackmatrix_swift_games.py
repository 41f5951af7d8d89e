"""Games of the canonical rules in a state of one's own, sixty-four at once: the same state, different chances."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.envs.hackmatrix import board_generation as drawn
from longhaul.envs.hackmatrix import reward
from longhaul.envs.hackmatrix import state as world
from longhaul.envs.hackmatrix.state import DATA, QUESTION
from longhaul.envs.hackmatrix.swift_rules import state as c
from longhaul.envs.hackmatrix.swift_rules.environment import Canonical, canonical

LANES = 64
Place = tuple[int, int]


@functools.cache
def game(fixes: tuple[str, ...] = ()) -> Canonical:
    return canonical(896, fixes=fixes)


@functools.cache
def _resetter() -> Any:
    return jax.jit(jax.vmap(game().reset))


def starts(seed: int = 3) -> Any:
    """Beginnings of LANES games: (states, what is seen)."""
    return jax.device_get(_resetter()(jax.random.split(jax.random.key(seed), LANES)))


@functools.cache
def bank(cell: bytes | None = None, blocks: bytes | None = None) -> drawn.Bank:
    """The game's, with a shelf more at its end, which no stage comes to: of the board that is given, or empty."""
    own = np.frombuffer(cell, np.int32) if cell else np.zeros(36, np.int32)
    standing = np.frombuffer(blocks, np.uint32) if blocks else np.zeros(2, np.uint32)
    pairs = zip(game().bank, (own, standing), strict=True)
    return drawn.Bank(*(np.concatenate([old, np.repeat(new[None], drawn.SHELF, 0)]) for old, new in pairs))


@functools.cache
def _first() -> Any:
    return starts()[0]


@functools.cache
def stepper(fixes: tuple[str, ...] = ()) -> Any:
    def run(bank: drawn.Bank, state: c.State, action: Any, keys: Any) -> Any:
        made = Canonical(bank, game().spec, fixes)
        return jax.vmap(made.step)(keys, state, action)

    return jax.jit(run)


@functools.cache
def looker() -> Any:
    return jax.jit(lambda bank, state: jax.vmap(Canonical(bank, game().spec)._see)(state))


def same(values: Any) -> Any:
    """The one value of all lanes."""
    values = np.asarray(values)
    np.testing.assert_array_equal(values, np.broadcast_to(values[:1], values.shape))
    return values[0].item() if values[0].ndim == 0 else values[0]


def cells(words: Any) -> set[Place]:
    """The cells of a set of a single game, uint32 [2]."""
    return {divmod(18 * half + i, 6) for half in range(2) for i in range(18) if int(words[half]) >> i & 1}


def words(places: Any) -> np.ndarray:
    """uint32 [2]: the reverse of `cells`."""
    flags = np.zeros(36, bool)
    for row, col in places:
        flags[6 * row + col] = True
    return drawn.words(flags[None])[0]


class World:
    """LANES games in one state. The exit is (5, 5) and the board empty unless said."""

    def __init__(
        self,
        at: Place,
        *,
        blocks: dict[Place, tuple[int, ...]] | None = None,
        money: dict[Place, tuple[int, int]] | None = None,
        fixes: tuple[str, ...] = (),
        **values: Any,
    ) -> None:
        """`blocks`: cell -> (kind, points or program[, spawn count]); of a question block, (kind, points, program).
        `money`: cell -> (credits, energy)."""
        kinds = np.zeros(36, np.int64)
        points, program, spawn, credits, energy = (np.zeros(36, np.int64) for _ in range(5))
        for (row, col), (kind, content, *rest) in (blocks or {}).items():
            cell = 6 * row + col
            kinds[cell] = kind
            is_data = kind == DATA or (kind == QUESTION and content > 0)
            points[cell] = content if is_data else 0
            program[cell] = 0 if is_data else rest[0] if kind == QUESTION else content
            count = content if is_data else c.SPAWN[program[cell]]
            spawn[cell] = rest[0] if rest and kind != QUESTION else count
        for (row, col), amounts in (money or {}).items():
            credits[6 * row + col], energy[6 * row + col] = amounts
        own = drawn.pack(kinds, points, program, spawn, credits, energy).astype(np.int32)
        self.bank = bank(own.tobytes(), drawn.words((kinds > 0)[None])[0].tobytes())
        self.fixes = fixes
        start = jax.tree.map(lambda x: x[0], _first())
        nobody, nowhere, zero = np.zeros(20, np.int32), np.zeros(2, np.uint32), 0
        plain: dict[str, Any] = {
            "row": at[0], "col": at[1], "credits": zero, "energy": zero, "siphons": zero,
            "board": len(self.bank.cell) - 1, "exit": 3, "door": 3, "pickup": nowhere, "foes": nobody, "sent": nobody,
        } | values  # fmt: skip
        typed = {name: np.asarray(value, getattr(start, name).dtype) for name, value in plain.items()}
        self.state = jax.tree.map(lambda x: np.broadcast_to(x, (LANES, *np.shape(x))), start._replace(**typed))

    def set(self, **values: Any) -> World:
        typed = {name: np.asarray(value, getattr(self.state, name).dtype) for name, value in values.items()}
        wide = {name: np.broadcast_to(value, getattr(self.state, name).shape) for name, value in typed.items()}
        self.state = self.state._replace(**wide)
        return self

    def enemy(
        self, kind: int, row: int, col: int, hp: int = 0, *, siphoned: bool = False, scheduled: bool = False
    ) -> World:
        """One more in the next slot, whole unless said."""
        foes = np.array(self.state.foes)
        slot = int((foes[0] > 0).sum())
        code = kind | row << 2 | col << 5 | siphoned << 8 | scheduled << 9
        foes[:, slot] = code | (hp or (3 if kind == world.DAEMON else 2)) << 10
        self.state = self.state._replace(foes=foes)
        return self

    def transmission(self, row: int, col: int, turns: int, kind: int = 0, *, scheduled: bool = False) -> World:
        sent = np.array(self.state.sent)
        sent[:, int((sent[0] > 0).sum())] = kind | row << 2 | col << 5 | scheduled << 9 | turns << 10
        self.state = self.state._replace(sent=sent)
        return self

    def own(self, *actions: int) -> World:
        return self.set(programs=sum(1 << (action - 5) for action in actions))

    def legal(self) -> set[int]:
        return set(np.flatnonzero(same(looker()(self.bank, self.state).mask)).tolist())

    def seen(self) -> Any:
        """The packed observations."""
        return jax.device_get(looker()(self.bank, self.state).observation)

    def do(self, action: int, seed: int = 0) -> np.ndarray:
        """The rewards of LANES chances, to four places."""
        keys = jax.random.split(jax.random.key(seed), LANES)
        before = np.asarray(self.state.tally.parts)
        state, led_to = stepper(self.fixes)(self.bank, self.state, jnp.full(LANES, action, jnp.int32), keys)
        self.state = jax.device_get(state)
        self.over = np.asarray(led_to.terminated)
        self.parts = dict(zip(reward.PARTS, (np.asarray(state.tally.parts) - before).round(4).T, strict=True))
        return np.asarray(led_to.reward).astype(np.float64).round(4)

    def value(self, name: str) -> Any:
        """Values that all lanes agree on."""
        return same(getattr(self.state, name))

    @property
    def at(self) -> Place:
        return self.value("row"), self.value("col")

    def enemies(self, lane: int | None = None) -> list[tuple[int, int, int, int]]:
        """(kind, row, column, health), in order; of all lanes, or of one."""
        foes = same(self.state.foes) if lane is None else self.state.foes[lane]
        e = c.enemies(foes)
        return [(int(e.kind[i]), int(e.row[i]), int(e.col[i]), int(e.hp[i])) for i in np.flatnonzero(foes > 0)]

    def stunned(self) -> list[bool]:
        foes = same(self.state.foes)
        return [bool(x) for x in c.enemies(foes).stunned[foes > 0]]

    def pending(self, lane: int) -> list[tuple[int, int, int]]:
        """(row, column, turns)."""
        p = c.pending(self.state.sent[lane])
        return [(int(p.row[i]), int(p.col[i]), int(p.turns[i])) for i in np.flatnonzero(p.turns > 0)]

    def pendings(self) -> list[list[tuple[int, int, int]]]:
        return [self.pending(lane) for lane in range(LANES)]
