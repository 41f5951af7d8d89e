"""Games by the trainer's rules in a state of one's own; and LANES at once, so that all tests share one program."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.envs.hackmatrix import board_generation, reward
from longhaul.envs.hackmatrix import state as world
from longhaul.envs.hackmatrix.board_generation import Boards
from longhaul.envs.hackmatrix.environment import Game, hackmatrix
from longhaul.envs.hackmatrix.state import DATA, VIRUS, State

LANES = 64
KEY = jax.random.key(0)
Fixes = tuple[str, ...]


@functools.cache
def game(fixes: Fixes = ()) -> Game:
    return hackmatrix(256, fixes=fixes)


@functools.cache
def stepper(fixes: Fixes = ()) -> Any:
    """(bank, states, actions, keys) of LANES games -> (states, what they led to)."""

    def step(bank: Boards, state: State, action: Any, keys: Any) -> Any:
        return jax.vmap(Game(bank, game().spec, fixes).step)(keys, state, action)

    return jax.jit(step)


@functools.cache
def looker() -> Any:
    """(bank, states) of LANES games -> what is seen."""
    return jax.jit(lambda bank, state: jax.vmap(Game(bank, game().spec)._see)(state))


@functools.cache
def _first(fixes: Fixes) -> State:
    return jax.device_get(game(fixes).reset(KEY)[0])


class World:
    """One game on a board of one's own."""

    def __init__(
        self,
        at: tuple[int, int],
        *,
        blocks: dict[tuple[int, int], tuple[int, int]] | None = None,
        fixes: Fixes = (),
        **values: Any,
    ) -> None:
        """`blocks`: cell -> (kind, points or program)."""
        cell = np.zeros(36, np.int64)
        for (row, col), (kind, content) in (blocks or {}).items():
            data = kind == DATA
            packed = (kind, content, 0, content, 0, 0) if data else (kind, 0, content, 2, 0, 0)
            cell[6 * row + col] = board_generation.pack(*(np.int64(x) for x in packed))
        bank = game(fixes).bank
        self.fixes, self.bank = fixes, bank._replace(cell=bank.cell.copy(), distance=bank.distance.copy())
        self.bank.cell[-1] = cell
        self.bank.distance[-1] = board_generation.distances((cell > 0)[None])[0]
        self.state = _first(fixes)
        self.set(row=at[0], col=at[1], spawn=(cell >> 11) & 15, **values)
        if "undo" in fixes:
            self.state = self.state._replace(past=self.state._replace(past=()))

    def set(self, **values: Any) -> World:
        typed = {name: np.asarray(value, getattr(self.state, name).dtype) for name, value in values.items()}
        self.state = self.state._replace(**typed)
        return self

    def _put(self, slots: Any, number: int, values: tuple[Any, ...]) -> Any:
        """`slots` with these values in one of them."""
        own = np.arange(world.SLOTS) == number
        return type(slots)(*(np.where(own, np.asarray(v, x.dtype), x) for x, v in zip(slots, values, strict=True)))

    def enemy(self, slot: int, kind: int, row: int, col: int, hp: int | None = None) -> World:
        new = (True, kind, row, col, hp or (3 if kind == world.DAEMON else 2), False, False)
        self.state = self.state._replace(enemies=self._put(self.state.enemies, slot, new))
        return self

    def sent(self, slot: int, row: int, col: int, turns: int, kind: int = VIRUS) -> World:
        new = (turns, kind, row, col, False)
        self.state = self.state._replace(pending=self._put(self.state.pending, slot, new))
        return self

    def own(self, *actions: int) -> World:
        return self.set(programs=sum(1 << (action - 5) for action in actions))

    def siphoned(self, row: int, col: int) -> World:
        return self.set(siphoned=self.state.siphoned | np.asarray(world.bits(jnp.int32(6 * row + col))))

    def _wide(self) -> State:
        return jax.tree.map(lambda x: np.broadcast_to(x, (LANES, *np.shape(x))), self.state)

    def legal(self) -> set[int]:
        return set(np.flatnonzero(looker()(self.bank, self._wide()).mask[0]).tolist())

    def do(self, action: int) -> float:
        """The reward of an action, to four places."""
        before, actions = self.state.tally.parts, np.full(LANES, action, np.int32)
        keys = jnp.broadcast_to(KEY, (LANES,))
        wide = jax.device_get(stepper(self.fixes)(self.bank, self._wide(), actions, keys))
        self.state, led_to = jax.tree.map(lambda x: x[0], wide)
        self.over = bool(led_to.terminated)
        parts = (self.state.tally.parts - before).astype(np.float64).round(4)
        self.parts = dict(zip(reward.PARTS, parts.tolist(), strict=True))
        return round(float(led_to.reward), 4)

    def way(self) -> int:
        """Steps to the exit."""
        return int(Game(self.bank, game().spec)._way(self.state))

    @property
    def at(self) -> tuple[int, int]:
        return int(self.state.row), int(self.state.col)

    @property
    def enemies(self) -> list[tuple[int, int, int, int]]:
        """(kind, row, col, hp) of those alive, by slot."""
        e = self.state.enemies
        return [(int(e.kind[i]), int(e.row[i]), int(e.col[i]), int(e.hp[i])) for i in np.flatnonzero(e.alive)]

    @property
    def pending(self) -> list[tuple[int, int, int]]:
        """(row, col, turns) of the transmissions."""
        p = self.state.pending
        return [(int(p.row[i]), int(p.col[i]), int(p.turns[i])) for i in np.flatnonzero(p.turns > 0)]


def about(s: Any) -> list[float]:
    """The first 33 numbers of a game by section 9 of the rules, of either rule set: the player's and the programs."""
    return [
        *(s.row / 5, s.col / 5, s.hp / 3, min(s.credits / 50, 1), min(s.energy / 50, 1), (s.stage - 1) / 7),
        *(s.siphons / 10, (s.attack - 1) / 2, float(s.show), float(s.calm)),
        *(float(s.programs >> i & 1) for i in range(23)),
    ]
