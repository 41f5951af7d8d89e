"""HackMatrix as an `Environment`: one step of the rules [J], those of the game's own JAX trainer.

Facts of the rules come from charleseff/hack-matrix; the code is ours. Boards come from a bank (`board_generation`), so
that a stage begins with a lookup; nothing in a step searches, sorts or scans.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul import prng
from longhaul.envs.hackmatrix import board_generation as drawn
from longhaul.envs.hackmatrix import observation, reward
from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.rules import INTERVAL, Cells, act, ends_turn, legal, respond, unpack
from longhaul.envs.hackmatrix.state import SIDE, SLOTS, Enemies, Pending, State, Tally
from longhaul.spaces import Masked, Measure
from longhaul.types import Key, Spec, TimeStep, transition

WORDS = 8
"""Random words of a step."""

FIXES = {
    "start": "the first stage has a board, too, with one transmission and two data siphons (D1)",
    "undo": "UNDO goes back to before the last step of this stage, for a credit if one is left (D2)",
    "boards": "on each board there is a way from each corner to each other (D4)",
    "kills": "enemies count as killed that the player's action removed, and only those (D5)",
    "exit": "nobody moves after the player stepped on the exit (D6)",
    "spread": "a siphon's transmissions lie on free cells, one on each, and not all on the block (D7)",
    "health": "lost and regained health count apart, and not their sum (D8)",
    "shaping": "the step onto the exit counts as an approach to it, and not to the next exit (D11)",
}
"""Defects of the trainer's rules that can be put right, one by one; none is by default.

Left as they are: enemies' greedy walk (D3) and what programs do (D9), which are other rules rather than defects. The
all-false mask (D10) is always repaired, see `rules.legal`; siphoning blocks of no value (D12) cannot happen, since
no board has any.
"""


@dataclass(frozen=True, eq=False)
class Game:
    bank: drawn.Boards
    spec: Spec
    fixes: tuple[str, ...] = ()

    def reset(self, key: Key) -> tuple[State, Masked]:
        """The first stage, whose board is empty; no chance is in it but for the fix "start"."""
        zero, no = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
        nobody, none = jnp.zeros(SLOTS, jnp.int32), jnp.zeros(SLOTS, bool)
        empty = jnp.zeros(2, jnp.uint32)
        state = State(
            row=zero, col=zero, hp=zero + w.MOST_HP, credits=zero, energy=zero, siphons=zero, attack=zero + 1,
            score=zero, programs=jnp.zeros((), jnp.uint32), stage=zero + 1, turn=zero,
            next_task=zero + INTERVAL, attacks=zero, show=no, calm=no, step=no, undo=no, over=no,
            board=zero + self.bank.cell.shape[0] + drawn.EMPTY, exit=zero + 3, siphoned=empty, centre=empty,
            collected=empty, pickup=empty,
            spawn=jnp.zeros(w.CELLS, jnp.int8), enemies=Enemies(none, nobody, nobody, nobody, nobody, none, none),
            pending=Pending(nobody, nobody, nobody, nobody, none),
            tally=Tally(jnp.zeros(len(reward.PARTS), jnp.float32), zero, zero, zero, zero + 1), past=(),
        )  # fmt: skip
        if "start" in self.fixes:
            state = self._enter(state, prng.bits(key, (1,))[0], w.CORNER_BITS[1] | w.CORNER_BITS[2])
        if "undo" in self.fixes:
            state = state._replace(past=state)
        return state, self._see(state)

    def step(self, key: Key, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """Action: int32, 0 .. 27. One that is not legal is executed as far as the rules tell."""
        # Apart: where a hash is fused with what it looks up, LLVM of jaxlib 0.11 and 0.12 compiles for ever on a CPU
        # (llvm::vputils::onlyFirstLaneUsed follows each of the 2^20 paths through its rounds).
        words = lax.optimization_barrier(prng.bits(key, (WORDS + (w.CELLS if "spread" in self.fixes else 0),)))
        cells = self._cells(state)
        missed = reward.missed(state, cells, w.spread_bits(cells.walls))
        before, way = state, self._way(state)
        acted = act(state, cells, action, jnp.concatenate([words[:4], words[WORDS:]]))
        now = cells._replace(walls=cells.walls & ~acted.siphoned)
        responds = ends_turn(action)
        if "exit" in self.fixes:
            responds &= ~self._at_exit(acted)
        after = respond(acted, now, words[4:6])
        turned = jax.tree.map(lambda a, b: jnp.where(responds, a, b), after, acted)
        died = turned.hp <= 0
        completed = self._at_exit(turned) & ((action < 4) | (action == w.WARP)) & (turned.stage <= w.STAGES)
        following = self.advance(turned, words[6:8])
        state = jax.tree.map(lambda a, b: jnp.where(completed, a, b), following, turned)
        if "undo" in self.fixes:
            state = _with_past(state, before, action, completed)
        over = died | (state.stage > w.STAGES)
        parts = reward.parts(before, state, action, self._events(before, acted, turned, state, completed, way, missed))
        tally = state.tally.add(parts, action, jnp.minimum(state.stage, w.STAGES + 1))
        late = tally.late(over, self.spec.max_steps)
        state = state._replace(over=over | late, tally=tally)
        return state, transition(self._see(state), jnp.sum(parts), over, late)

    def _events(
        self, before: State, acted: State, turned: State, after: State, completed: jax.Array, way: jax.Array,
        missed: jax.Array,
    ) -> reward.Events:  # fmt: skip
        """Events that the reward asks for: from before the step, after the action, the enemies' turn and the next
        stage."""
        way_after = self._way(after)
        if "shaping" in self.fixes:
            way_after = jnp.where(completed, 0, way_after)
        killed = jnp.maximum(jnp.sum(before.enemies.alive) - jnp.sum(after.enemies.alive), 0)
        if "kills" in self.fixes:
            killed = jnp.sum(before.enemies.alive & ~acted.enemies.alive)
        change = after.hp - before.hp
        lost, won = jnp.maximum(-change, 0), jnp.maximum(change, 0)
        if "health" in self.fixes:
            lost = acted.hp - turned.hp
            won = change + lost
        return reward.Events(
            turned.hp <= 0, completed, after.stage > w.STAGES, before.stage, killed, after.siphons - before.siphons,
            way - way_after, lost, won, missed,
        )  # fmt: skip

    def advance(self, state: State, words: jax.Array) -> State:
        """The next stage, on a board of the bank; `words`: 2 random uint32."""
        exit_, pickup = w.next_exit(state.row, state.col, words[1])
        state = state._replace(
            hp=jnp.minimum(state.hp + 1, w.MOST_HP), stage=state.stage + 1, attacks=jnp.zeros_like(state.attacks),
            show=jnp.zeros_like(state.show), step=jnp.zeros_like(state.step), exit=exit_,
        )  # fmt: skip
        return self._enter(state, words[0], pickup)

    def _enter(self, state: State, word: jax.Array, pickup: jax.Array | np.ndarray) -> State:
        """`state` on a board of its own, drawn by a random word; data siphons lie at `pickup`, uint32 [2]."""
        board = (word % np.uint32(self.bank.cell.shape[0] - 1)).astype(jnp.int32)
        sent = jnp.pad(jnp.asarray(self.bank.pending)[board].astype(jnp.int32), ((0, SLOTS - w.STAGES), (0, 0)))
        used = jnp.arange(SLOTS) < jnp.minimum(state.stage, w.STAGES)
        none, empty = jnp.zeros(SLOTS, bool), jnp.zeros(2, jnp.uint32)
        row = sent[:, 0] // SIDE
        return state._replace(
            board=board, siphoned=empty, centre=empty, collected=empty, pickup=jnp.asarray(pickup),
            spawn=((jnp.asarray(self.bank.cell)[board] >> 11) & 15).astype(jnp.int8),
            enemies=state.enemies._replace(alive=none, stunned=none),
            pending=Pending(used.astype(jnp.int32), sent[:, 1], row, sent[:, 0] - SIDE * row, none),
        )  # fmt: skip

    def _at_exit(self, state: State) -> jax.Array:
        return SIDE * state.row + state.col == jnp.asarray(w.CORNERS)[state.exit]

    def active(self, state: State) -> jax.Array:
        return ~state.over

    def _cells(self, state: State) -> Cells:
        return unpack(jnp.asarray(self.bank.cell)[state.board], state)

    def _way(self, state: State) -> jax.Array:
        distance = jnp.asarray(self.bank.distance)
        return distance[state.board, state.exit, SIDE * state.row + state.col].astype(jnp.int32)

    def _see(self, state: State) -> Masked:
        cells = self._cells(state)
        return Masked(observation.observe(state, cells), legal(state, cells))

    def metrics(self, state: State) -> dict[str, Measure]:
        """The parts of the return, the shares of actions, and how far it came."""
        return reward.metrics(state.tally, state.score)


def _with_past(state: State, before: State, action: jax.Array, completed: jax.Array) -> State:
    """The state after a step with the one before it to go back to, or that one again after UNDO."""
    undone = action == w.UNDO
    previous = before._replace(past=())
    back = before.past._replace(
        tally=state.tally, undo=jnp.bool_(False), credits=jnp.maximum(before.past.credits - w.CREDITS[w.UNDO], 0)
    )
    now = state._replace(past=(), undo=state.undo & ~completed)
    chosen = jax.tree.map(lambda a, b: jnp.where(undone, a, b), back, now)
    return chosen._replace(past=previous)


def hackmatrix(
    boards: int = drawn.BOARDS, board_seed: int = 0, max_steps: int | None = 1000, fixes: tuple[str, ...] = ()
) -> Game:
    """The game on `boards` boards drawn from `board_seed`; `fixes`: some of FIXES.

    The trainer's rules end no game early; `max_steps`, at which its evaluation stops, truncates ours (None: nothing).
    Raises ValueError for a name that is not in FIXES.
    """
    for name in fixes:
        if name not in FIXES:
            raise ValueError(f"fixes names {name!r}; there are {', '.join(FIXES)}")
    spec = observation.spec(max_steps, observation.TRAINER)
    return Game(drawn.draw(board_seed, boards, connected="boards" in fixes), spec, fixes)
