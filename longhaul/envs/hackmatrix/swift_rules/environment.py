"""HackMatrix as an `Environment`: one step of the canonical rules [S], those of the Swift game.

Facts of the rules come from charleseff/hack-matrix; the code is ours. Where we differ from that game: at most 20
enemies and 20 transmissions exist at once, what is beyond is lost; UNDO goes back DEPTH turns at most; boards are
drawn in advance (`board_generation`); and where several first steps of an enemy are equally good it chooses among
all of them as the rules say, while the Swift game's search finds a single one (`FIXES`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import prng
from longhaul.envs.hackmatrix import board_generation as drawn
from longhaul.envs.hackmatrix import observation, reward
from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.rules import ends_turn
from longhaul.envs.hackmatrix.state import CORNERS, SIDE, SLOTS, Tally
from longhaul.envs.hackmatrix.swift_rules import rules
from longhaul.envs.hackmatrix.swift_rules import state as c
from longhaul.envs.hackmatrix.swift_rules.state import Cells, Ground, State
from longhaul.spaces import Masked, Measure
from longhaul.types import Key, Spec, TimeStep, transition

WORDS = 66
"""Random words of a step: 3 for WARP and POLY, 40 for enemies' moves, 20 for transmissions, 3 for the next stage."""

FIXES = {
    "victory": "completing the last stage is worth its own 100, and not the 64 of the stage before",
    "undo": "UNDO does not go back into an earlier stage, whose exit would count once more",
    "steps": "of equally good steps enemies take the first (up, down, left, right), as the Swift program comes to do",
}
"""Changes to the rules, one by one; nothing is by default.

The first two are defects of the Swift game. The third is the other way round: that its search marks cells when it
queues them leaves one first step only, so that the preferences and the chance of the rules never come to bear there.
"""

EXIT_SIDES = np.array(
    [[[(1 << 1) | (1 << 6), 0], [1 << 7, 0]], [[(1 << 4) | (1 << 11), 0], [1 << 10, 0]],
     [[0, (1 << 6) | (1 << 13)], [0, 1 << 7]], [[0, (1 << 11) | (1 << 16)], [0, 1 << 10]]], np.uint32,
)  # fmt: skip
"""Sides by corner: the set of the two cells beside it, and that of the cell diagonal to it."""

SHORT = observation.compact(
    frozenset({*observation.OF_BLOCKS, observation.SIPHONED}), frozenset({observation.PICKUP, observation.EXIT})
)
"""Channels that networks take: corners have no blocks, other cells neither exits nor data siphons."""


@dataclass(frozen=True, eq=False)
class Canonical:
    bank: drawn.Bank
    spec: Spec
    fixes: tuple[str, ...] = ()

    def reset(self, key: Key) -> tuple[State, Masked]:
        """The first stage: a random corner, one of three gifts, and one transmission."""
        words = c.once(prng.bits(key, (25,)))
        zero, no = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
        nobody, nowhere = jnp.zeros(SLOTS, jnp.int32), jnp.zeros(2, jnp.uint32)
        corner = jnp.asarray(CORNERS)[words[0] & 3]
        gift = words[1] % 3
        state = State(
            row=corner // SIDE, col=corner % SIDE, hp=zero + w.MOST_HP, credits=jnp.where(gift == 0, 10, zero),
            energy=jnp.where(gift == 1, 11, zero), siphons=jnp.where(gift == 2, 1, zero), attack=zero + 1, score=zero,
            programs=jnp.zeros((), jnp.uint32), stage=zero + 1, turn=zero, next_task=zero, interval=zero + c.INTERVAL,
            pool=zero, attacks=zero, show=no, calm=no, step=no, over=no, board=zero, exit=zero, door=zero,
            reduced=zero, siphoned=nowhere, centre=nowhere, removed=nowhere, pickup=nowhere, foes=nobody, sent=nobody,
            history=c.no_history(),
            tally=Tally(jnp.zeros(len(reward.PARTS), jnp.float32), zero, zero, zero, zero + 1),
        )  # fmt: skip
        state = self._enter(state, words[2:5])
        state = rules.send(state, self._ground(state).blocks, zero + 1, nobody, words[5:])
        return state, self._see(state)

    def step(self, key: Key, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """Action: int32, 0 .. 27. One that is not legal does nothing, gains nothing and ends the game."""
        words = c.once(prng.bits(key, (WORDS,)))
        ground, before = self._ground(state), state
        valid = jnp.any(rules.legal(state, ground) & (np.arange(w.ACTIONS) == action))
        way = self._way(state, ground)
        acted, outcome = rules.act(state, ground, action, words[:3])
        acted = c.restore(acted, action == w.UNDO)
        ended = outcome.reached
        turned, due = rules.respond(acted, ground.blocks, words[3:43], "steps" in self.fixes)
        responds = valid & ends_turn(action) & ~ended
        plays = responds & ~acted.step
        won = valid & ended & (state.stage == w.STAGES)
        enters = valid & ended & ~won
        healed = acted._replace(hp=jnp.minimum(acted.hp + ended, w.MOST_HP))
        entered = self._enter(healed._replace(stage=state.stage + 1, interval=12 - state.stage), words[63:66])
        state = _choose([(enters, entered), (responds, turned), (valid, healed)], before)
        pool = jnp.where(plays, state.pool, 0)
        number = jnp.where(enters, state.stage, pool + (due & plays))
        first = due & plays & (np.arange(SLOTS) == 0)
        origin = jnp.where(enters, 0, jnp.where(first, 1 << 9, 1 << 8))
        after_ground = self._ground(state)
        state = rules.send(state._replace(pool=state.pool - pool), after_ground.blocks, number, origin, words[43:63])
        state = state._replace(history=c.remember(state, plays))
        if "undo" in self.fixes:
            forgotten = state.history._replace(depth=jnp.where(enters, 0, state.history.depth))
            state = state._replace(history=forgotten)
        died = state.hp <= 0
        completed = valid & ended
        approach = jnp.where(died, 0, way - jnp.where(completed, 0, self._way(state, after_ground)))
        # The Swift game, which leaves the number of the stage at 8, pays the 64 of the seventh for the last.
        paid = before.stage if "victory" in self.fixes else jnp.minimum(before.stage, w.STAGES - 1)
        events = reward.Events(
            died, completed, won, paid, outcome.killed, outcome.collected, approach,
            jnp.maximum(before.hp - state.hp, 0), jnp.maximum(state.hp - before.hp, 0), self._missed(before, ground),
        )  # fmt: skip
        parts = jnp.where(valid, reward.parts(before, state, action, events), 0.0)
        over = ~valid | died | won
        tally = state.tally.add(parts, action, state.stage + won)
        late = tally.late(over, self.spec.max_steps)
        state = state._replace(over=over | late, tally=tally)
        return state, transition(self._see(state), jnp.sum(parts), over, late)

    def _enter(self, state: State, words: jax.Array) -> State:
        """`state` on a new board around the enemies and transmissions that it has; `words`: 3 random uint32."""
        exit_, pickup = w.next_exit(state.row, state.col, words[0])
        number = (words[1] % drawn.NUMBERS).astype(jnp.int32)
        shelf = (words[1] // drawn.NUMBERS % self.bank.shelves).astype(jnp.int32)
        shelf = (exit_ * drawn.NUMBERS + number) * self.bank.shelves + shelf
        taken = c.places(state.foes) | c.places(state.sent)
        place, removed = self._clear(shelf, exit_, taken, words[2])
        empty, no = jnp.zeros(2, jnp.uint32), jnp.zeros((), bool)
        zero = jnp.zeros((), jnp.int32)
        return state._replace(
            board=drawn.SHELF * shelf + place, exit=exit_, door=exit_, turn=zero, next_task=state.interval,
            show=no, calm=no, step=no, attacks=zero, reduced=zero, siphoned=empty, centre=empty,
            removed=removed.words(), pickup=pickup,
        )  # fmt: skip

    def _clear(self, shelf: jax.Array, exit_: jax.Array, taken: Cells, word: jax.Array) -> tuple[jax.Array, Cells]:
        """(place on a shelf of the board with the fewest blocks in `taken` cells, those blocks).

        Of several such boards, a random one. Where the block beside the exit falls away, that diagonal to the exit
        does, too: a cell that is joined to the exit alone would be no free one.
        """
        shelves = jnp.asarray(self.bank.blocks.reshape(-1, drawn.SHELF, 2))[shelf]
        hit = shelves & taken.words()[None]
        overlap = jnp.sum(jax.lax.population_count(hit), axis=1).astype(jnp.int32)
        odd = 2 * np.arange(drawn.SHELF, dtype=np.uint32) + 1
        lot = (((word | 1) * (odd * np.uint32(0x9E3779B1))) >> 12).astype(jnp.int32)
        key = overlap << 20 | lot
        place = jnp.argmin(key)
        chosen = np.arange(drawn.SHELF) == place
        removed = c.cells(jnp.sum(jnp.where(chosen[:, None], hit, np.uint32(0)), axis=0, dtype=jnp.uint32))
        blocks = c.cells(jnp.sum(jnp.where(chosen[:, None], shelves, np.uint32(0)), axis=0, dtype=jnp.uint32))
        sides = jnp.asarray(EXIT_SIDES)[exit_]
        diagonal = (blocks & c.cells(sides[1])).only((removed & c.cells(sides[0])).any())
        return place.astype(jnp.int32), removed | diagonal

    def active(self, state: State) -> jax.Array:
        return ~state.over

    def metrics(self, state: State) -> dict[str, Measure]:
        """The parts of the return, the shares of actions, and how far it came."""
        return reward.metrics(state.tally, state.score)

    def _ground(self, state: State) -> Ground:
        return c.ground(jnp.asarray(self.bank.cell)[state.board], jnp.asarray(self.bank.blocks)[state.board], state)

    def _missed(self, state: State, ground: Ground) -> jax.Array:
        walls = (ground.blocks & ~c.cells(state.siphoned)).flags()
        player = c.cell_at(state.row, state.col)
        return reward.missed(state, ground, walls, (player | c.beside(player)).flags() & walls)

    def _way(self, state: State, ground: Ground) -> jax.Array:
        corner = c.cells(jnp.asarray(w.CORNER_BITS)[state.exit])
        return rules.way(ground.blocks, c.cell_at(state.row, state.col), corner)

    def _see(self, state: State) -> Masked:
        ground = self._ground(state)
        return Masked(observe(state, ground), rules.legal(state, ground))


def _choose(cases: list[tuple[jax.Array, State]], otherwise: State) -> State:
    """The first of `cases` whose condition is true."""
    chosen = otherwise
    for condition, state in reversed(cases):
        chosen = jax.tree.map(lambda a, b, yes=condition: jnp.where(yes, a, b), state, chosen)
    return chosen


def observe(state: State, ground: Ground) -> observation.Packed:
    """The packed observation of a game: of several enemies in a cell the first shows, of question blocks that they are.

    Program 31 is none.
    """
    known = ground.points << 2 | ground.program << 6 | ground.spawn << 11
    board = jnp.where(ground.hidden, w.QUESTION | 31 << 6, ground.kind | known)
    board = board | ground.credits << 15 | ground.energy << 17
    siphoned = c.cells(state.siphoned) & ground.blocks
    door = c.cells(jnp.asarray(w.CORNER_BITS)[state.door])
    sets = (siphoned, c.cells(state.centre), c.cells(state.pickup), door)
    for place, which in zip((19, 20, 21, 22), sets, strict=True):
        board = board | which.flags().astype(jnp.int32) << place
    return observation.Packed(observation.about(state), state.programs, board, _life(state))


def _life(state: State) -> jax.Array:
    """int16 [CELLS]; a hidden cryptog hides who came after it into its cell, too."""
    e, p = state.enemies, state.pending
    hidden = (e.kind == w.CRYPTOG) & (e.row != state.row) & (e.col != state.col) & ~state.show
    code = 1 << e.kind | e.hp << 4 | e.stunned.astype(jnp.int32) << 6 | e.siphoned.astype(jnp.int32) << 7
    code = jnp.where(hidden, 0, code)
    place = jnp.where(e.alive, SIDE * e.row + e.col, -1)
    sent = jnp.where(p.turns > 0, SIDE * p.row + p.col, -1)
    turns = jnp.minimum(p.turns, 4) << 8
    cell = np.arange(w.CELLS)
    shown, coming = jnp.zeros(w.CELLS, jnp.int32), jnp.zeros(w.CELLS, jnp.int32)
    for slot in reversed(range(SLOTS)):  # unrolled: every operation runs along the cells
        shown = jnp.where(cell == place[slot], code[slot], shown)
        coming = jnp.where(cell == sent[slot], turns[slot], coming)
    return (shown | coming).astype(jnp.int16)


def canonical(
    boards: int = drawn.BOARDS, board_seed: int = 0, max_steps: int | None = 1000, fixes: tuple[str, ...] = ()
) -> Canonical:
    """The game of the canonical rules on at least `boards` boards drawn from `board_seed`; `fixes`: some of FIXES.

    Neither ends a game early; `max_steps`, at which the Swift game's trainer does, truncates ours (None: nothing).
    """
    for name in fixes:
        if name not in FIXES:
            raise ValueError(f"fixes names {name!r}; the canonical rules have {', '.join(FIXES)}")
    return Canonical(drawn.draw_shelves(board_seed, boards), observation.spec(max_steps, SHORT), fixes)
