"""The canonical HackMatrix under random play, its beginnings and its boards: what holds in any game."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.envs.hackmatrix import observation
from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.state import CORNERS, POLY, PULL, PUSH, UNDO, WARP
from longhaul.envs.hackmatrix.swift_rules import board_generation as drawn
from longhaul.envs.hackmatrix.swift_rules import enemy_turn as turn
from longhaul.envs.hackmatrix.swift_rules import state as c
from longhaul.envs.hackmatrix.swift_rules.environment import SHORT
from tests.helpers.hackmatrix_swift_games import LANES, bank, cells, game, looker, starts, stepper, words

STEPS = 120
MOVERS = (PUSH, PULL, POLY)
"""Programs that put enemies where they could not go, or make of a glitch on a block another kind."""


def _flood(free: set[Any], start: Any, wall: Any) -> set[Any]:
    """The cells of `free` that are joined with `start`, without going on from `wall`."""
    found, edge = {start}, [start]
    while edge:
        row, col = edge.pop()
        for near in ((row + 1, col), (row - 1, col), (row, col + 1), (row, col - 1)):
            if near in free and near not in found:
                found.add(near)
                if near != wall:
                    edge.append(near)
    return found


def _assert_sound(blocks: set[Any], exit_: Any, removed: set[Any] = frozenset()) -> None:  # type: ignore[assignment]
    """Free cells are joined past the exit; each block has a free neighbour."""
    free = {(row, col) for row in range(6) for col in range(6)} - blocks
    start = (0, 5) if exit_ == (0, 0) else (0, 0)
    assert _flood(free, start, exit_) == free
    for row, col in blocks:
        assert free & {(row + 1, col), (row - 1, col), (row, col + 1), (row, col - 1)}


@functools.cache
def _played(without: tuple[int, ...]) -> list[Any]:
    """[(state, seen, action, led to, state after)] of random legal play, in games with programs and resources."""
    step, look = stepper(), looker()
    state = starts(11)[0]
    rng = np.random.default_rng(0)

    def rich(state: Any) -> Any:
        programs = rng.integers(0, 1 << 23, LANES).astype(np.uint32)
        stocks = {name: rng.integers(0, 15, LANES).astype(np.int32) for name in ("credits", "energy")}
        return state._replace(programs=programs, siphons=rng.integers(0, 3, LANES).astype(np.int32), **stocks)

    fresh = state = rich(state)
    rows, seen = [], jax.device_get(look(bank(), state))
    for number in range(STEPS):
        lots = np.where(seen.mask, rng.random(seen.mask.shape), -1.0)
        exits = CORNERS[state.door]
        ahead = [exits // 6 > state.row, exits // 6 < state.row, exits % 6 < state.col, exits % 6 > state.col]
        lots[:, :4] *= np.where(np.stack(ahead, -1), 1.0, 0.5)  # more of other actions, and some completed stages
        lots[:, without] = -1.0
        action = lots.argmax(-1).astype(np.int32)
        assert seen.mask.any(-1).all()
        keys = jax.random.split(jax.random.key(number), LANES)
        after, led_to = jax.device_get(step(bank(), state, jnp.asarray(action), keys))
        rows.append((state, seen, action, led_to, after))
        over = led_to.terminated

        def chosen(a: Any, b: Any, over: Any = over) -> Any:
            return np.where(over.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        state = jax.tree.map(chosen, fresh, after)
        seen = jax.device_get(look(bank(), state)) if over.any() else led_to.observation
    return rows


@functools.cache
def _columns(without: tuple[int, ...]) -> Any:
    """The same with time as the leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *_played(without))


@pytest.mark.parametrize("without", [(), pytest.param(MOVERS, marks=pytest.mark.slow)])
def test_what_holds_in_any_game(without: tuple[int, ...]) -> None:
    state, seen, action, led_to, after = _columns(without)
    assert (state.hp > 0).all()
    assert set(np.unique(after.hp)) == {0, 1, 2, 3}
    for name in ("credits", "energy", "siphons", "score", "pool", "turn"):
        assert getattr(after, name).min() >= 0
    assert after.stage.max() <= 8
    assert after.stage.max() >= 3
    assert after.interval.min() >= 4
    assert ((after.attack >= 1) & (after.attacks <= 2)).all()
    e, p = c.enemies(after.foes), c.pending(after.sent)
    for slots, there in ((e, e.alive), (p, p.turns > 0)):
        assert ((slots.row < 6) & (slots.col < 6))[there].all()
    assert (e.hp <= np.where(e.kind == w.DAEMON, 3, 2))[e.alive].all()
    assert not e.stunned[after.turn == state.turn + 1].any(), "none after an enemies' turn"
    parts = after.tally.parts - state.tally.parts
    np.testing.assert_allclose(parts.sum(-1), led_to.reward, atol=2e-3, rtol=1e-5)
    kept = (after.stage == state.stage) & (action != UNDO)
    grown = (e.alive.sum(-1) - (state.foes > 0).sum(-1))[kept]
    assert (grown <= (state.sent > 0).sum(-1)[kept]).all(), "enemies come of transmissions alone"
    legal = np.moveaxis(seen.mask, -1, 0)
    for program in range(w.PROGRAMS):
        which = legal[5 + program]
        assert (state.programs[which] >> program & 1).all()
        assert (state.credits[which] >= w.CREDITS[5 + program]).all()
        assert (state.energy[which] >= w.ENERGY[5 + program]).all()
    played = set(np.unique(action).tolist())
    assert played >= set(range(28)) - {*without, w.D_BOM, w.RESET}
    assert not led_to.truncated.any()


def test_nobody_shares_a_cell_or_stands_on_a_block() -> None:
    """But glitches; and where no program pushes enemies, pulls them or changes their kind."""
    _, _, _, _, after = _columns(MOVERS)
    rows = game().bank.blocks[after.board] & ~after.removed
    crowded = 0
    for t in range(STEPS):
        for b in range(LANES):
            foes, sent = after.foes[t, b], after.sent[t, b]
            e = c.enemies(foes[foes > 0])
            p = c.pending(sent[sent > 0])
            enemies = list(zip(e.row.tolist(), e.col.tolist(), strict=True))
            coming = list(zip(p.row.tolist(), p.col.tolist(), strict=True))
            assert len({*enemies, *coming}) == len(enemies) + len(coming)
            blocks = cells(rows[t, b])
            walkers = [place for place, kind in zip(enemies, e.kind.tolist(), strict=True) if kind != w.GLITCH]
            assert not blocks & {*walkers, *coming}
            crowded += len(enemies) > 5
    assert crowded > 100, "it was worth a look"


def test_boards_are_sound_where_a_stage_begins() -> None:
    state, _, action, led_to, after = _columns(())
    begun = (after.stage > state.stage) & ~led_to.terminated
    assert begun.sum() > 40
    for t, b in zip(*np.nonzero(begun), strict=True):
        blocks = cells(game().bank.blocks[after.board[t, b]] & ~after.removed[t, b])
        exit_ = divmod(int(CORNERS[after.exit[t, b]]), 6)
        _assert_sound(blocks, exit_)
        foes, sent = (codes[t, b][codes[t, b] > 0] for codes in (state.foes, state.sent))
        here = (int(after.row[t, b]), int(after.col[t, b]))
        assert here != exit_
        assert not (after.siphoned[t, b].any() or after.centre[t, b].any() or after.turn[t, b])
        kept = [[code for code in codes[t, b].tolist() if code > 0] for codes in (after.foes, after.sent)]
        assert set(kept[0]) <= set(foes.tolist()), "all but whom WARP struck"
        assert len(kept[0]) >= len(foes) - 1
        gone = len(set(sent.tolist()) - set(kept[1]))
        assert gone + len(foes) - len(kept[0]) == (action[t, b] == WARP)
        assert len(kept[1]) == len(sent) - gone + after.stage[t, b], "as many more as the number of the stage"
        assert not blocks & {(code >> 2 & 7, code >> 5 & 7) for code in kept[0] + kept[1]}


def test_a_crowd_gets_a_sound_board_too() -> None:
    """Sixteen taken cells: no shelf has a board around them, so that blocks fall away."""
    made = game()
    rng = np.random.default_rng(5)
    places = rng.permuted(np.tile(np.arange(36), (256, 1)), axis=1)[:, :16]
    foes = np.zeros((256, 20), np.int32)
    foes[:, :16] = (places // 6) << 2 | (places % 6) << 5 | 2 << 10
    state = jax.tree.map(lambda x: np.broadcast_to(x[0], (256, *x.shape[1:])), starts()[0])._replace(foes=foes)
    lots = rng.integers(0, 1 << 32, (256, 3), np.uint32)
    entered = jax.device_get(jax.jit(jax.vmap(made._enter))(state, lots))
    fell = 0
    for i in range(256):
        blocks = cells(made.bank.blocks[entered.board[i]] & ~entered.removed[i])
        _assert_sound(blocks, divmod(int(CORNERS[entered.exit[i]]), 6))
        assert not blocks & {divmod(int(place), 6) for place in places[i]}
        fell += bool(entered.removed[i].any())
    assert fell > 100


def test_how_a_game_begins() -> None:
    begun = [starts(seed) for seed in range(20, 28)]
    state, seen = jax.tree.map(lambda *leaves: np.concatenate(leaves), *begun)
    at = 6 * state.row + state.col
    assert set(at.tolist()) == set(CORNERS.tolist())
    gifts = np.stack([state.credits, state.energy, state.siphons], -1)
    assert {tuple(gift) for gift in gifts.tolist()} == {(10, 0, 0), (0, 11, 0), (0, 0, 1)}
    assert abs((state.energy == 11).mean() - 1 / 3) < 0.08
    assert (CORNERS[state.exit] != at).all()
    assert len(set(zip(at.tolist(), state.exit.tolist(), strict=True))) == 12
    assert ((state.sent > 0).sum(-1) == 1).all()
    assert ((state.sent >> 10)[:, 0] == 1).all()
    assert (np.stack([state.hp, state.interval, state.next_task, state.stage], -1) == [3, 12, 12, 1]).all()
    count = np.bitwise_count(game().bank.blocks[state.board]).sum(-1)
    assert set(count.tolist()) == set(range(5, 12))
    assert seen.mask.any(-1).all()
    jax.tree.map(np.testing.assert_array_equal, begun[0], starts(20))


def test_the_same_key_plays_the_same() -> None:
    state, _, action, _, after = _played(())[40]
    step = stepper()
    keys = jax.random.split(jax.random.key(40), LANES)
    jax.tree.map(np.testing.assert_array_equal, after, jax.device_get(step(bank(), state, action, keys))[0])
    other = jax.device_get(step(bank(), state, action, jax.random.split(jax.random.key(41), LANES)))[0]
    assert (other.foes != after.foes).any()


# ------------------------------------------------------------------------------------------------------------ boards


def test_boards_of_the_bank() -> None:
    own = drawn.draw(0, 2000)
    assert len(own.cell) == 2688
    per = len(own.cell) // 28
    code = own.cell.astype(np.int64)
    kind, points, program, spawn = code & 3, code >> 2 & 15, code >> 6 & 31, code >> 11 & 15
    credits, energy = code >> 15 & 3, code >> 17 & 3
    blocks = kind > 0
    np.testing.assert_array_equal(drawn.words(blocks), own.blocks)
    np.testing.assert_array_equal(blocks.sum(1), np.tile(np.repeat(np.arange(5, 12), per), 4))
    assert not blocks[:, CORNERS].any()
    for i in range(0, len(code), 7):
        _assert_sound(cells(own.blocks[i]), divmod(int(CORNERS[i // (7 * per)]), 6))
    data = blocks & (points > 0)
    programs = blocks & ~data
    assert abs(data[blocks].mean() - 0.5) < 0.02
    assert (spawn[data] == points[data]).all()
    assert set(np.unique(points[data])) == set(range(1, 10))
    assert (spawn[programs] == c.SPAWN[program[programs]]).all()
    assert abs((kind == w.QUESTION)[blocks].mean() - 0.1) < 0.01
    assert (kind[programs & (kind != w.QUESTION)] == w.PROGRAM).all()
    assert (kind[data & (kind != w.QUESTION)] == w.DATA).all()
    for i in range(len(code)):
        drawn_here = program[i][programs[i]].tolist()
        assert len(set(drawn_here)) == len(drawn_here), "no program twice"
    amount = credits + energy
    exits = np.arange(36) == np.repeat(CORNERS, 7 * per)[:, None]
    assert ((amount > 0) == ~(blocks | exits)).all(), "on every free cell but the exit, corners too"
    shares = [(amount[amount > 0] == n).mean() for n in (1, 2, 3)]
    np.testing.assert_allclose(shares, [0.45, 0.45, 0.10], atol=0.01)
    assert not (credits.astype(bool) & energy.astype(bool)).any()


def test_what_no_board_may_be() -> None:
    """A cell joined with the rest over the exit alone, and a block among blocks."""
    open_ = np.zeros((1, 36), bool)
    assert drawn.sound(open_, np.array([35])).all()
    cut = open_.copy()
    cut[0, [28, 33]] = True  # (4, 4) and (5, 3): (5, 4) is left with the exit (5, 5)
    assert not drawn.sound(cut, np.array([35])).any()
    assert drawn.sound(cut, np.array([0])).all()
    deep = open_.copy()
    deep[0, [14, 8, 20, 13, 15]] = True
    assert not drawn.sound(deep, np.array([35])).any()


# ------------------------------------------------------------------------------------------------ ways, and the view


def test_ways_are_those_of_a_plain_search() -> None:
    rng = np.random.default_rng(3)
    blocks = rng.random((200, 36)) < rng.uniform(0.1, 0.6, (200, 1))
    start, goal = rng.integers(0, 36, (2, 200))

    def run(words: Any, start: Any, goal: Any) -> Any:
        return turn.way(c.cells(words), c.cell_at(start // 6, start % 6), c.cell_at(goal // 6, goal % 6))

    found = np.asarray(jax.jit(jax.vmap(run))(drawn.words(blocks), start, goal))
    for i in range(200):
        level, steps, seen = {divmod(int(goal[i]), 6)}, 0, set()
        at, walls, expected = divmod(int(start[i]), 6), cells(drawn.words(blocks[i : i + 1])[0]), 0
        while level and at not in level:
            seen |= level
            steps += 1
            nexts = {(r + a, k + b) for r, k in level for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1))}
            nexts = {(r, k) for r, k in nexts if 0 <= r < 6 and 0 <= k < 6} - seen
            level = nexts - walls | (nexts & {at})
            expected = steps if at in level else 0
        assert found[i] == expected


def _shown(s: Any) -> np.ndarray:
    """The 1,545 numbers of one game, cell by cell, by sections 9 and 10 of the rules."""
    code = game().bank.cell[s.board]
    about = [
        *(s.row / 5, s.col / 5, s.hp / 3, min(s.credits / 50, 1), min(s.energy / 50, 1), (s.stage - 1) / 7),
        *(s.siphons / 10, (s.attack - 1) / 2, float(s.show), float(s.calm)),
    ]
    owned = [float(s.programs >> i & 1) for i in range(23)]
    grid = np.zeros((6, 6, 42))
    siphoned, centre, removed, pickup = (cells(x) for x in (s.siphoned, s.centre, s.removed, s.pickup))
    for cell in range(36):
        place = divmod(cell, 6)
        here = grid[place]
        kind, points, program, spawn = code[cell] & 3, code[cell] >> 2 & 15, code[cell] >> 6 & 31, code[cell] >> 11 & 15
        if kind and place not in removed:
            taken = place in siphoned
            if kind == w.QUESTION and taken:
                kind = w.DATA if points else w.PROGRAM
            here[7:10] = [kind == k for k in (1, 2, 3)]
            here[11] = taken
            if kind != w.QUESTION:
                here[10] = points / 9
                here[35] = 0 if taken else max(spawn - s.reduced, 0) / 9
                if kind == w.PROGRAM:
                    here[12 + program] = 1
        elif place not in siphoned:
            here[37:39] = (code[cell] >> 15 & 3) / 3, (code[cell] >> 17 & 3) / 3
        here[39:42] = place in pickup, cell == CORNERS[s.door], place in centre
    told = set()
    for foe in s.foes[s.foes > 0].tolist():
        e = c.enemies(np.int32(foe))
        place = (int(e.row), int(e.col))
        if place not in told and (e.kind != w.CRYPTOG or place[0] == s.row or place[1] == s.col or s.show):
            grid[place][e.kind] = 1
            grid[place][4:7] = e.hp / 3, e.stunned, e.siphoned
        told.add(place)
    for sent in s.sent[s.sent > 0].tolist():
        grid[sent >> 2 & 7, sent >> 5 & 7, 36] = min((sent >> 10) / 4, 1)
    return np.concatenate([about, owned, grid.reshape(-1)])


def test_the_observation_is_that_of_the_rules() -> None:
    _, _, _, led_to, after = _columns(())
    # The network's own form, put back into the whole vector: what it leaves out is 0 in every game.
    packed = jax.tree.map(lambda x: x[::4, ::3], led_to.observation.observation)
    expanded = np.asarray(observation.expand(packed))
    short = np.zeros_like(expanded)
    short[..., list(SHORT.places)] = np.asarray(SHORT.expand(packed))
    np.testing.assert_array_equal(short, expanded)
    states = jax.tree.map(lambda x: x[::4, ::3], after)
    for t in range(expanded.shape[0]):
        for b in range(expanded.shape[1]):
            one = jax.tree.map(lambda x, t=t, b=b: x[t, b], states)
            np.testing.assert_allclose(expanded[t, b], _shown(one), atol=1e-6)
    shown = set(np.flatnonzero(expanded[..., 33:].reshape(-1, 42).any(0)).tolist())
    assert shown == set(range(42)), "every channel was seen"


def test_sets_of_cells() -> None:
    """Moved sets against coordinates."""
    for row in range(6):
        for col in range(6):
            one = c.cell_at(jnp.int32(row), jnp.int32(col))
            assert cells(one.words()) == {(row, col)}
            moved = [cells(move(one).words()) for move in c.MOVES]
            steps = ((row + 1, col), (row - 1, col), (row, col - 1), (row, col + 1))
            assert moved == [{(r, k)} if 0 <= r < 6 and 0 <= k < 6 else set() for r, k in steps]
    some = c.cells(jnp.asarray(words([(0, 0), (3, 5)])))
    assert cells((~some).words()) == {divmod(i, 6) for i in range(36)} - {(0, 0), (3, 5)}
    assert np.flatnonzero(some.flags()).tolist() == [0, 23]
    stops = c.cells(jnp.asarray(words([(0, 3), (4, 0)])))
    assert cells(c.line(c.cell_at(jnp.int32(0), jnp.int32(0)), stops, c.right).words()) == {(0, 1), (0, 2), (0, 3)}
    ring = c.around(c.cell_at(jnp.int32(0), jnp.int32(0))).words()
    assert cells(ring) == {(0, 1), (1, 0), (1, 1)}
