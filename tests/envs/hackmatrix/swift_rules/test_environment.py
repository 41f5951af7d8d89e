"""The canonical rules of HackMatrix: each statement of the rule sheet that can be set up, its programs among them, with
outcomes by hand; what holds in any game under random play, its beginnings and its boards."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.envs import hackmatrix, registry
from longhaul.envs.hackmatrix import board_generation as drawn
from longhaul.envs.hackmatrix import observation
from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.state import CORNERS
from longhaul.envs.hackmatrix.swift_rules import rules
from longhaul.envs.hackmatrix.swift_rules import state as c
from longhaul.envs.hackmatrix.swift_rules.environment import FIXES, SHORT, Canonical, canonical
from tests.helpers.hackmatrix_games import about
from tests.helpers.hackmatrix_swift_games import LANES, World, bank, cells, game, looker, same, starts, stepper, words

BLOCK = (w.DATA, 1)
ALL = tuple(FIXES)
"""One more program to compile, and not one for each fix; slow."""


# ------------------------------------------------------------------------------------------------- moves and attacks


def test_a_move_shapes_and_takes_no_resources() -> None:
    """Case 1; and only data siphons are picked up by walking."""
    g = World((3, 3), money={(4, 3): (2, 0)})
    assert same(g.do(w.UP)) == 0.04
    assert g.at == (4, 3)
    assert (g.value("turn"), g.value("credits")) == (1, 0)


def test_a_move_is_legal_unless_an_edge_or_an_empty_block_is_in_the_way() -> None:
    """Case 2; a block beside the player is in the way unless an enemy stands on it, also a siphoned one."""
    assert World((0, 0)).legal() == {w.UP, w.RIGHT}
    assert World((5, 5), exit=0, door=0).legal() == {w.DOWN, w.LEFT}
    blocks = {(4, 3): BLOCK, (3, 4): BLOCK, (2, 3): BLOCK}
    g = World((3, 3), blocks=blocks, siphoned=words([(2, 3)])).enemy(w.GLITCH, 3, 4).enemy(w.VIRUS, 5, 3)
    assert g.legal() == {w.LEFT, w.RIGHT}


def test_a_data_siphon_is_picked_up() -> None:
    """Case 3."""
    g = World((3, 3), pickup=words([(4, 3)]))
    assert same(g.do(w.UP)) == 1.04
    assert g.value("siphons") == 1
    assert cells(g.value("pickup")) == set()


@pytest.mark.parametrize(
    ("blocks", "lives", "at"),
    [({}, False, (0, 3)), ({(2, 3): BLOCK}, True, (1, 3)), ({(5, 3): BLOCK}, False, (0, 3))],
)
def test_a_block_stops_the_line(blocks: Any, lives: bool, at: Any) -> None:
    """Case 4 [S]: behind a block nobody is struck, on it an enemy is."""
    g = World((0, 3), blocks=blocks).enemy(w.GLITCH, 5, 3, 1)
    assert same(g.do(w.UP)) == (0.04 if lives else 0.29)
    assert g.at == at
    assert len(g.enemies()) == lives


def test_a_survivor_is_stunned() -> None:
    """Case 5 [S]."""
    g = World((3, 3)).enemy(w.VIRUS, 4, 3)
    assert same(g.do(w.UP)) == -0.01
    assert g.enemies() == [(w.VIRUS, 4, 3, 1)]
    assert g.value("hp") == 3
    assert g.stunned() == [False], "until the end of the turn"
    assert same(g.do(w.UP)) == 0.29


def test_a_transmission_is_struck_before_the_enemy_in_its_cell() -> None:
    g = World((3, 3)).transmission(4, 3, 3).enemy(w.DAEMON, 4, 3)
    assert same(g.do(w.UP)) == 0.3 - 0.01 - 1
    assert g.pending(0) == []
    assert g.enemies() == [(w.DAEMON, 4, 3, 3)]


@pytest.mark.parametrize(("scheduled", "gained"), [(False, 0.29), (True, -0.01)])
def test_who_comes_of_a_schedule_is_worth_nothing(scheduled: bool, gained: float) -> None:
    """Case 6 [S]: a transmission counts as a kill, and an enemy; not those that the schedule sent."""
    g = World((3, 3)).transmission(4, 3, 3, scheduled=scheduled)
    assert same(g.do(w.UP)) == gained
    assert g.at == (3, 3)
    g = World((3, 3)).enemy(w.VIRUS, 5, 3, 1, scheduled=scheduled)
    assert same(g.do(w.UP)) == gained
    g = World((3, 3), energy=1).own(w.WAIT).transmission(0, 3, 1, scheduled=scheduled)
    g.do(w.WAIT)
    assert same(g.do(w.DOWN)) == -0.01, "struck where it appeared, and stunned"
    assert same(g.do(w.DOWN)) == gained, "what it was when it was sent"


# ---------------------------------------------------------------------------------------------------- enemies' turn


@pytest.mark.parametrize(
    ("enemy", "ends", "hp"),
    [
        ((w.DAEMON, 3, 0), (2, 0), 3),
        ((w.VIRUS, 4, 0), (2, 0), 3),
        ((w.VIRUS, 3, 0), (1, 0), 3),
        ((w.VIRUS, 2, 0), (1, 0), 2),
        ((w.VIRUS, 1, 0), (1, 0), 2),
        ((w.DAEMON, 0, 1), (0, 1), 2),
    ],
)
def test_enemies_approach_or_attack(enemy: tuple[int, int, int], ends: Any, hp: int) -> None:
    """Case 7 [S]: an attack instead of a step, and no more after it; a virus may attack with its second."""
    g = World((0, 0), energy=1).own(w.WAIT).enemy(*enemy)
    assert same(g.do(w.WAIT)) == pytest.approx(-0.06 - (3 - hp))
    assert g.enemies()[0][1:3] == ends
    assert g.value("hp") == hp


@pytest.mark.slow
def test_of_equally_good_steps_each_is_taken() -> None:
    g = World((0, 0), energy=1).own(w.WAIT).enemy(w.DAEMON, 2, 2)
    g.do(w.WAIT)
    where = [g.enemies(lane)[0][1:3] for lane in range(64)]
    assert set(where) == {(1, 2), (2, 1)}
    assert 15 < where.count((1, 2)) < 49
    g = World((0, 0), energy=1, fixes=ALL).own(w.WAIT).enemy(w.DAEMON, 2, 2)
    g.do(w.WAIT)
    assert g.enemies()[0][1:3] == (1, 2), "down comes before left"


def test_enemies_go_round_blocks_and_a_glitch_does_not() -> None:
    """Cases 8 and 9 [S]."""
    blocks = {(2, 0): BLOCK}
    g = World((0, 0), blocks=blocks, energy=1).own(w.WAIT).enemy(w.GLITCH, 3, 0).enemy(w.DAEMON, 3, 1)
    g.do(w.WAIT)
    assert [e[1:3] for e in g.enemies()] == [(2, 0), (2, 1)]
    g = World((0, 0), blocks=blocks, energy=1).own(w.WAIT).enemy(w.DAEMON, 3, 0)
    g.do(w.WAIT)
    assert g.enemies()[0][1:3] == (3, 1)


def test_cryptogs_and_glitches_prefer_their_own_among_equally_good_steps() -> None:
    """A cryptog stays out of the player's row and column, a glitch goes over blocks."""
    g = World((1, 1), energy=1).own(w.WAIT).enemy(w.CRYPTOG, 2, 4)
    g.do(w.WAIT)
    assert g.enemies()[0][1:3] == (2, 3), "and not (1, 4), in the player's row"
    g = World((0, 0), blocks={(2, 3): BLOCK}, energy=1).own(w.WAIT).enemy(w.GLITCH, 3, 3)
    g.do(w.WAIT)
    assert g.enemies()[0][1:3] == (2, 3)


def test_nobody_enters_a_cell_that_is_taken() -> None:
    g = World((0, 0), energy=1).own(w.WAIT).enemy(w.DAEMON, 3, 0).enemy(w.DAEMON, 4, 0)
    g.do(w.WAIT)
    for lane in range(64):
        first, second = (e[1:3] for e in g.enemies(lane))
        assert first == (2, 0)
        assert second in {(3, 0), (4, 1)}, "behind it, or past it when it had its step before"


def test_round_others_or_else_straight_on_or_else_anywhere_near() -> None:
    walls = {(1, 2): BLOCK, (2, 1): BLOCK, (3, 2): BLOCK, (3, 1): BLOCK}
    # A pocket (2, 2) with one way out, (2, 3), which is taken by somebody stunned: no free neighbour, so it stays.
    g = World((2, 5), blocks=walls, energy=1).own(w.WAIT).enemy(w.DAEMON, 2, 2).enemy(w.DAEMON, 2, 3)
    g.state = g.state._replace(foes=g.state.foes | np.where(np.arange(20) == 1, 1 << 12, 0))
    g.do(w.WAIT)
    assert [e[1:3] for e in g.enemies()] == [(2, 2), (2, 3)]
    # A corridor whose way on is taken: past blocks alone the next cell is still good.
    row = {(1, col): BLOCK for col in range(6)} | {(3, col): BLOCK for col in range(6)}
    g = World((2, 5), blocks=row, energy=1).own(w.WAIT).enemy(w.DAEMON, 2, 0).enemy(w.DAEMON, 2, 3)
    g.state = g.state._replace(foes=g.state.foes | np.where(np.arange(20) == 1, 1 << 12, 0))
    g.do(w.WAIT)
    assert g.enemies()[0][1:3] == (2, 1)
    # No way at all: the free neighbour that is nearest.
    g = World((5, 0), blocks=row, energy=1).own(w.WAIT).enemy(w.DAEMON, 2, 3)
    g.do(w.WAIT)
    assert g.enemies()[0][1:3] == (2, 2)


def test_who_appears_waits_a_turn() -> None:
    """Case 10 [S]."""
    g = World((0, 0), energy=2).own(w.WAIT).transmission(1, 0, 1, w.VIRUS)
    assert same(g.do(w.WAIT)) == -0.06
    assert g.enemies() == [(w.VIRUS, 1, 0, 2)]
    assert same(g.do(w.WAIT)) == -1.06


def test_scheduled_transmissions_come_at_the_stages_interval() -> None:
    """Case 27 [S]; the interval is the stage's own."""
    g = World((0, 0), energy=1, turn=11, interval=9).own(w.WAIT)
    g.do(w.WAIT)
    assert (g.value("turn"), g.value("next_task")) == (12, 21)
    places = {g.pending(lane)[0] for lane in range(64)}
    assert all(turns == 1 for _, _, turns in places)
    assert not {place for *place, _ in places if 0 in place}, "out of the line of fire"
    assert len(places) > 15
    assert (g.state.sent[:, 0] >> 8 & 3 == 2).all(), "scheduled, and of no siphon"
    g = World((0, 0), energy=1, turn=11, calm=True).own(w.WAIT)
    g.do(w.WAIT)
    assert g.pendings() == [[]] * 64
    assert g.value("next_task") == 12


def test_the_last_cells_are_found() -> None:
    """Cells in the line of fire are the second choice, blocks and people none."""
    blocks = {(row, col): BLOCK for row in range(1, 6) for col in range(1, 6)}
    g = World((0, 0), blocks=blocks, energy=1, turn=11).own(w.WAIT).enemy(w.DAEMON, 0, 2)
    g.do(w.WAIT)
    # The daemon stands at (0, 1) by then: the cells behind it are not in the line of fire, those above are.
    assert {g.pending(lane)[0][:2] for lane in range(64)} == {(0, 2), (0, 3), (0, 4), (0, 5)}


def test_step_skips_the_whole_turn() -> None:
    """Case 25 [S]."""
    g = World((0, 1), energy=4, turn=11).own(w.STEP, w.WAIT).enemy(w.DAEMON, 0, 2).transmission(5, 5, 1)
    g.do(w.STEP)
    assert g.value("step") is True
    assert same(g.do(w.WAIT)) == -0.06
    assert (g.value("turn"), g.value("step"), g.value("hp")) == (11, False, 3)
    assert g.pending(0) == [(5, 5, 1)]
    assert same(g.state.history.depth) == 0


# ------------------------------------------------------------------------------------------------------------ siphon


def test_the_siphon_takes_the_whole_cross() -> None:
    """Cases 11 and 12 [S]: score 3 + 9, a program, 2 credits here and 1 energy beside; 3 + 9 + 5 to come."""
    blocks = {(4, 3): (w.DATA, 3), (3, 2): (w.PROGRAM, 3), (2, 3): (w.DATA, 9)}
    money = {(3, 3): (2, 0), (3, 4): (0, 1), (0, 0): (3, 0)}
    g = World((3, 3), blocks=blocks, money=money, siphons=1)
    assert same(g.do(w.SIPHON)) == pytest.approx(-0.01 + 6.0 + 0.15)
    assert (g.value("score"), g.value("credits"), g.value("energy"), g.value("siphons")) == (12, 2, 1, 0)
    assert g.value("programs") == 1 << 3
    assert (g.value("interval"), g.value("next_task"), g.value("turn")) == (11, 17, 1)
    assert cells(g.value("siphoned")) == {(3, 3), (4, 3), (2, 3), (3, 2), (3, 4)}
    assert cells(g.value("centre")) == {(3, 3)}
    for pending in g.pendings():
        assert len(pending) == 17
        assert len({p[:2] for p in pending}) == 17
        assert {p[2] for p in pending} == {1}
    assert (np.asarray(g.state.sent)[:, :17] >> 8 & 3 == 1).all(), "of a siphon"
    assert g.value("pool") == 0
    assert w.HACK in g.own(w.HACK).set(credits=2, energy=2).legal(), "some cell is siphoned"
    g.set(siphons=1, sent=np.zeros(20)).do(w.SIPHON)
    assert (g.value("score"), g.value("credits"), g.value("interval")) == (12, 4 - 2, 10)


def test_a_siphon_with_nothing_around_delays_too() -> None:
    g = World((3, 3), siphons=1, interval=4)
    assert same(g.do(w.SIPHON)) == -0.01
    assert (g.value("interval"), g.value("next_task"), g.value("siphons")) == (4, 17, 0)
    assert w.SIPHON not in g.legal()


def test_a_question_block_tells_when_it_is_siphoned() -> None:
    g = World((3, 3), blocks={(4, 3): (w.QUESTION, 6), (3, 2): (w.QUESTION, 0, 21)}, siphons=1)
    board = g.seen().board[0].reshape(6, 6)
    hidden = w.QUESTION | 31 << 6
    assert (board[4, 3], board[3, 2]) == (hidden, hidden)
    g.do(w.SIPHON)
    assert (g.value("score"), g.value("programs")) == (6, 1 << 21)
    board = g.seen().board[0].reshape(6, 6)
    assert (board[4, 3], board[3, 2]) == (w.DATA | 6 << 2 | 1 << 19, w.PROGRAM | 21 << 6 | 1 << 19)
    assert {len(p) for p in g.pendings()} == {6 + 8}


def test_the_pool_waits_for_a_turn() -> None:
    g = World((3, 3), blocks={(4, 3): (w.DATA, 2)}, siphons=1, step=True)
    g.do(w.SIPHON)
    assert (g.value("pool"), g.pendings()) == (2, [[]] * 64)
    g.do(w.DOWN)
    assert g.value("pool") == 0
    assert {len(p) for p in g.pendings()} == {2}


def test_a_better_place_to_siphon_from() -> None:
    """The same block from the other side, with 3 more credits; and a place with another block does not count."""
    money = {(3, 5): (3, 0), (0, 1): (3, 0)}
    g = World((3, 2), blocks={(3, 3): (w.DATA, 4), (0, 0): (w.DATA, 4)}, money=money, siphons=1)
    g.do(w.SIPHON)
    assert same(g.parts["siphon_quality"]) == pytest.approx(-0.5 * 0.05 * 3)
    g = World((3, 2), blocks={(3, 3): (w.DATA, 4), (0, 0): (w.DATA, 4)}, money={(0, 1): (3, 0)}, siphons=1)
    g.do(w.SIPHON)
    assert same(g.parts["siphon_quality"]) == 0


# -------------------------------------------------------------------------------------------------- stages and ends


def test_the_exit_is_left_at_once() -> None:
    """Case 14 [S]: no enemy turn; who is there stays, and the whole distance counts."""
    g = World((5, 4), hp=1, credits=10, energy=5, show=True, calm=True, attacks=2, turn=7, siphons=1, interval=6)
    g.enemy(w.DAEMON, 5, 3).enemy(w.VIRUS, 0, 2).transmission(2, 2, 3)
    assert same(g.do(w.RIGHT)) == pytest.approx(-0.01 + 1 + 0.15 + 1 + 0.05)
    assert g.at == (5, 5)
    assert [g.value(name) for name in ("stage", "hp", "turn", "interval", "next_task")] == [2, 2, 0, 11, 11]
    assert [g.value(name) for name in ("show", "calm", "attacks", "siphons")] == [False, False, 0, 1]
    assert g.enemies() == [(w.DAEMON, 5, 3, 3), (w.VIRUS, 0, 2, 2)]
    for lane, pending in enumerate(g.pendings()):
        assert pending[0] == (2, 2, 3)
        assert len(pending) == 3, "two of the second stage"
        pickup = cells(g.state.pickup[lane])
        exit_ = divmod(int(w.CORNERS[g.state.exit[lane]]), 6)
        assert len(pickup) == 2
        assert pickup | {exit_, (5, 5)} == {(0, 0), (0, 5), (5, 0), (5, 5)}
    assert len(set(g.state.exit.tolist())) == 3
    assert not g.over.any()


def test_warp_leads_to_the_exit_and_ends_the_stage() -> None:
    """Case 24 [S]."""
    g = World((0, 0), credits=2, energy=2, turn=5).own(w.WARP).enemy(w.VIRUS, 5, 5)
    assert same(g.do(w.WARP)) == pytest.approx(-0.01 + 1 + 0.3 - 0.2 + 0.5)
    assert (g.at, g.value("stage"), g.enemies()) == ((5, 5), 2, [])
    g = World((0, 0), credits=2, energy=2).own(w.WARP).enemy(w.VIRUS, 3, 3).transmission(2, 2, 3).enemy(w.DAEMON, 4, 4)
    g.do(w.WARP)
    where = {(int(row), int(col)) for row, col in zip(g.state.row, g.state.col, strict=True)}
    assert where == {(3, 3), (2, 2), (4, 4)}
    assert g.value("turn") == 0


@pytest.mark.parametrize(("fixes", "stage"), [((), 64), pytest.param(ALL, 100, marks=pytest.mark.slow)])
def test_victory_pays_stage_and_score(fixes: tuple[str, ...], stage: int) -> None:
    """Case 15 [S]: the number of the stage stays, and the seventh stage's reward is paid for the eighth."""
    g = World((5, 4), stage=8, score=10, fixes=fixes).enemy(w.VIRUS, 0, 0)
    assert same(g.do(w.RIGHT)) == pytest.approx(-0.01 + stage + 1500 + 0.05)
    assert g.over.all()
    assert g.value("stage") == 8
    assert same(g.state.tally.stage) == 9
    assert g.value("turn") == 0


@pytest.mark.parametrize(("stage", "expected"), [(1, -1.06), (4, -4.56), (8, -64.56)])
def test_death_ends_a_game_at_the_cost_of_its_stage(stage: int, expected: float) -> None:
    """Cases 13 and 28."""
    g = World((0, 0), energy=1, hp=1, stage=stage).own(w.WAIT).enemy(w.VIRUS, 1, 0)
    assert same(g.do(w.WAIT)) == expected
    assert g.over.all()


def test_death_by_what_a_siphon_brought() -> None:
    """And a step towards the exit is worth nothing to who dies."""
    g = World((0, 0), energy=1, hp=1).own(w.WAIT).enemy(w.VIRUS, 1, 0, siphoned=True)
    assert same(g.do(w.WAIT)) == -11.06
    g = World((1, 1), hp=1).enemy(w.DAEMON, 2, 0)
    assert same(g.do(w.UP)) == -1.01
    assert g.over.all()


@pytest.mark.parametrize(
    ("action", "own"),
    [
        (w.LEFT, ()),
        (w.UP, ()),
        (w.SIPHON, ()),
        (w.WAIT, ()),
        (w.UNDO, (w.UNDO,)),
        (w.ATK, (w.ATK,)),
        (w.HACK, (w.HACK,)),
    ],
)
def test_an_illegal_action_ends_the_game(action: int, own: tuple[int, ...]) -> None:
    g = World((0, 0), blocks={(1, 0): BLOCK}, credits=9, energy=9, attacks=2).own(*own).enemy(w.DAEMON, 0, 4)
    before = g.state
    assert action not in g.legal()
    assert same(g.do(action)) == 0
    assert g.over.all()
    jax.tree.map(np.testing.assert_array_equal, before, g.state._replace(tally=before.tally, over=before.over))
    assert not g.state.tally.parts.any()


@pytest.mark.parametrize("fixes", [(), pytest.param(ALL, marks=pytest.mark.slow)])
def test_an_undo_over_a_stage_brings_its_exit_back(fixes: tuple[str, ...]) -> None:
    """As in the Swift game: the old board, whose exit counts once more; the fix forgets what was before."""
    g = World((5, 3), credits=1, fixes=fixes).own(w.UNDO)
    g.do(w.RIGHT)
    assert (g.at, g.value("stage")) == ((5, 4), 1)
    g.do(w.RIGHT)
    assert (g.at, g.value("stage")) == ((5, 5), 2)
    if fixes:
        assert same(g.state.history.depth) == 0
    else:
        g.do(w.UNDO)
        assert (g.at, g.value("stage"), g.value("door")) == ((5, 4), 2, 3)
        g.do(w.RIGHT)
        assert g.value("stage") == 3


def test_rules_and_fixes_are_chosen_by_name() -> None:
    assert isinstance(hackmatrix.make(8, rules="canonical"), Canonical)
    assert isinstance(registry.make("hackmatrix-canonical", boards=8), Canonical)
    with pytest.raises(ValueError, match="rules is 'swift'; there are jax, canonical"):
        hackmatrix.make(8, rules="swift")
    with pytest.raises(ValueError, match="fixes names 'kills'; the canonical rules have victory"):
        canonical(8, fixes=("kills",))


# ----------------------------------------------------------------------------------------------------------- programs


@pytest.mark.slow
def test_push_and_pull_move_enemies_one_a_cell_whatever_blocks_are_there() -> None:
    """Case 19 [S]: no test of blocks, one enemy a cell, nobody on the player."""
    g = World((3, 3), blocks={(5, 3): BLOCK}, energy=2).own(w.PUSH).enemy(w.VIRUS, 4, 3).enemy(w.DAEMON, 4, 4)
    g.enemy(w.GLITCH, 0, 5).enemy(w.VIRUS, 3, 4)
    assert same(g.do(w.PUSH)) == -0.11
    assert [e[1:3] for e in g.enemies()] == [(5, 3), (5, 5), (0, 5), (3, 5)]
    assert (g.value("energy"), g.value("turn")) == (0, 0)
    g = World((3, 3), energy=2).own(w.PULL).enemy(w.VIRUS, 5, 3).enemy(w.VIRUS, 4, 4).enemy(w.DAEMON, 2, 3)
    g.enemy(w.CRYPTOG, 0, 1)
    g.do(w.PULL)
    assert [e[1:3] for e in g.enemies()] == [(4, 3), (3, 4), (2, 3), (1, 2)]
    g = World((3, 3), energy=2).own(w.PULL).enemy(w.VIRUS, 5, 3).enemy(w.VIRUS, 5, 4)
    g.do(w.PULL)
    assert [e[1:3] for e in g.enemies()] == [(4, 3), (5, 4)], "first come"
    g = World((3, 3), energy=2).own(w.PUSH).enemy(w.VIRUS, 5, 4).enemy(w.VIRUS, 4, 4)
    g.do(w.PUSH)
    assert [e[1:3] for e in g.enemies()] == [(5, 5), (4, 4)], "past the border by the other axis; first come"


def test_crash_clears_the_eight_cells_around() -> None:
    blocks = {(4, 3): BLOCK, (2, 2): (w.DATA, 5), (5, 1): BLOCK, (3, 4): BLOCK}
    g = World((3, 3), blocks=blocks, credits=3, energy=2, siphoned=words([(4, 3)])).own(w.CRASH)
    g.enemy(w.DAEMON, 4, 4).enemy(w.GLITCH, 3, 4).enemy(w.VIRUS, 0, 0).enemy(w.VIRUS, 3, 2, scheduled=True)
    g.transmission(2, 4, 3).transmission(5, 3, 3)
    assert same(g.do(w.CRASH)) == pytest.approx(-0.01 + 3 * 0.3 - 0.25 + 0.1), "the way of 6 steps is one of 4"
    assert g.enemies() == [(w.VIRUS, 0, 0, 2)]
    assert g.pending(0) == [(5, 3, 3)]
    assert cells(g.value("removed")) == {(4, 3), (2, 2), (3, 4)}
    assert g.legal() == {w.UP, w.DOWN, w.LEFT, w.RIGHT}
    assert (g.seen().board[0] & 3).reshape(6, 6)[4, 3] == 0
    assert w.CRASH in World((0, 0), blocks={(1, 1): BLOCK}, credits=3, energy=2).own(w.CRASH).legal()
    assert w.CRASH not in World((0, 0), blocks={(2, 1): BLOCK}, credits=3, energy=2).own(w.CRASH).legal()


def test_crash_opens_a_way() -> None:
    wall = {(row, 3): BLOCK for row in range(6)}
    g = World((0, 2), blocks=wall, credits=3, energy=2).own(w.CRASH)
    assert same(g.do(w.CRASH)) == -0.26, "no way before: nothing is nearer"
    assert same(g.do(w.RIGHT)) == 0.04, "8 steps became 7"


def test_poly_keeps_the_harm() -> None:
    g = World((3, 3), credits=1, energy=1).own(w.POLY).enemy(w.DAEMON, 0, 0, 1).enemy(w.DAEMON, 0, 1, 2)
    g.enemy(w.VIRUS, 5, 5, 1)
    rewards = g.do(w.POLY)
    assert set(rewards) == {0.19}, "two harms leave nothing of any other kind"
    kinds = set()
    for lane in range(64):
        (first, *_, hp), (second, *_, last) = g.enemies(lane)
        assert (first != w.DAEMON, hp) == (True, 1)
        assert second != w.VIRUS
        assert last == (2 if second == w.DAEMON else 1)
        kinds |= {first, 10 + second}
    assert kinds == {w.VIRUS, w.GLITCH, w.CRYPTOG, 10 + w.DAEMON, 10 + w.GLITCH, 10 + w.CRYPTOG}


@pytest.mark.parametrize(("action", "places"), [(w.ROW, ((3, 0), (3, 5), (4, 3))), (w.COL, ((0, 3), (5, 3), (3, 4)))])
def test_row_and_column_use_the_attack_damage(action: int, places: Any) -> None:
    """Case 20 [S]: damage 2, survivors stunned."""
    g = World((3, 3), credits=3, energy=1, attack=2).own(action)
    for kind, place in zip((w.VIRUS, w.DAEMON, w.VIRUS), places, strict=True):
        g.enemy(kind, *place)
    g.do(action)
    assert g.enemies() == [(w.DAEMON, *places[1], 1), (w.VIRUS, *places[2], 2)]
    assert g.stunned() == [True, False]


def test_the_bomb_hurts_and_stuns_who_is_near() -> None:
    """Case 21."""
    g = World((3, 3), credits=3).own(w.D_BOM).enemy(w.DAEMON, 5, 5).enemy(w.DAEMON, 4, 5, 1).enemy(w.VIRUS, 4, 4)
    assert same(g.do(w.D_BOM)) == pytest.approx(-0.01 + 0.3 - 0.15)
    assert g.enemies() == [(w.DAEMON, 5, 5, 2), (w.VIRUS, 4, 4, 1)]
    assert g.stunned() == [True, True]


def test_viruses_blocks_and_siphoned_cells() -> None:
    """Case 22 [S]."""
    g = World((3, 3), credits=3).own(w.ANTI_V).enemy(w.VIRUS, 0, 0, 1).enemy(w.VIRUS, 0, 1).enemy(w.DAEMON, 0, 2)
    g.do(w.ANTI_V)
    assert g.enemies() == [(w.VIRUS, 0, 1, 1), (w.DAEMON, 0, 2, 3)]
    assert g.stunned() == [True, False]
    blocks = {(1, 1): BLOCK, (2, 2): BLOCK}
    g = World((3, 3), blocks=blocks, credits=3, attack=2).own(w.DEBUG).enemy(w.DAEMON, 1, 1).enemy(w.VIRUS, 0, 1)
    g.do(w.DEBUG)
    assert g.enemies() == [(w.DAEMON, 1, 1, 1), (w.VIRUS, 0, 1, 2)]
    assert g.stunned() == [True, False]
    assert w.DEBUG not in World((3, 3), blocks=blocks, credits=3).own(w.DEBUG).enemy(w.VIRUS, 0, 1).legal()
    g = World((3, 3), blocks=blocks, credits=2, energy=2, attack=2, siphoned=words([(1, 1), (0, 0)])).own(w.HACK)
    g.enemy(w.DAEMON, 1, 1).enemy(w.VIRUS, 0, 0).enemy(w.VIRUS, 2, 2)
    assert same(g.do(w.HACK)) == pytest.approx(-0.01 + 0.3 - 0.2)
    assert g.enemies() == [(w.DAEMON, 1, 1, 1), (w.VIRUS, 2, 2, 2)], "a siphoned cell without a block counts, too"
    assert w.HACK not in World((3, 3), blocks=blocks, credits=2, energy=2).own(w.HACK).legal()


def test_programs_cost_and_pay_what_the_cases_say() -> None:
    """Cases 16 to 18, 23 and 26 [S]; w.SIPH+ is no data siphon that was walked on, w.ATK+ has no upper bound."""
    g = World((0, 0), credits=5).own(w.SIPH)
    assert same(g.do(w.SIPH)) == -0.26
    assert (g.value("siphons"), g.value("turn")) == (1, 0)
    g = World((0, 0), credits=8).own(w.EXCH)
    assert same(g.do(w.EXCH)) == -0.01
    assert (g.value("credits"), g.value("energy")) == (4, 4)
    assert w.EXCH not in World((0, 0), credits=3).own(w.EXCH).legal()
    g = World((0, 0), hp=1, energy=4).own(w.RESET)
    assert same(g.do(w.RESET)) == 1.79
    assert same(World((0, 0), hp=2, energy=4).own(w.RESET).do(w.RESET)) == 0.49
    g = World((0, 0), credits=99, energy=99, attack=3).own(w.ATK)
    g.do(w.ATK)
    g.do(w.ATK)
    assert g.value("attack") == 5
    assert w.ATK not in g.legal()
    g = World((0, 0), stage=2, energy=5).own(w.SCORE)
    assert same(g.do(w.SCORE)) == 2.74
    assert w.SCORE not in World((0, 0), stage=8, energy=5).own(w.SCORE).legal()
    g = World((0, 0), credits=4, energy=4).own(w.DELAY, w.SHOW, w.CALM).transmission(3, 3, 2)
    g.do(w.DELAY)
    assert g.pending(0) == [(3, 3, 5)]
    g.do(w.SHOW)
    assert g.value("show") is True
    g.set(credits=2, energy=4).do(w.CALM)
    assert not {w.SHOW, w.CALM} & g.set(credits=9, energy=9).legal()
    g = World((3, 3), blocks={(4, 3): (w.DATA, 3), (0, 0): (w.PROGRAM, 5)}, credits=2, energy=1, siphons=1).own(w.REDUC)
    g.do(w.REDUC)
    spawn = g.seen().board[0] >> 11 & 15
    assert (spawn[27], spawn[0]) == (2, 0)
    g.do(w.SIPHON)
    assert {len(p) for p in g.pendings()} == {2}
    assert w.REDUC not in g.set(credits=2, energy=1).legal()


def test_undo_goes_back_turn_by_turn() -> None:
    """The first one gives back only what was done since the last enemies' turn; cost, stage and schedule aside."""
    g = World((2, 2), credits=3, blocks={(4, 4): BLOCK}, siphons=1).own(w.UNDO, w.SHOW)
    assert w.UNDO not in g.legal()
    g.do(w.UP)
    g.do(w.SIPHON)
    assert cells(g.value("siphoned")) == {(3, 2), (4, 2), (2, 2), (3, 1), (3, 3)}
    g.do(w.SHOW)
    assert (g.value("credits"), g.value("show"), same(g.state.history.depth)) == (1, True, 2)
    assert same(g.do(w.UNDO)) == pytest.approx(-0.01 + 0.1)
    assert (g.value("credits"), g.value("show"), g.value("turn")) == (3, False, 2)
    g.do(w.UNDO)
    assert (g.at, g.value("turn"), g.value("siphons"), g.value("credits")) == ((3, 2), 1, 1, 3)
    assert cells(g.value("siphoned")) == set()
    assert (g.value("interval"), g.value("next_task")) == (11, 17), "not restored"
    assert w.UNDO not in g.legal()


def test_undo_restores_enemies_and_the_ring_forgets() -> None:
    g = World((0, 0), credits=9, energy=9, hp=3).own(w.UNDO, w.WAIT).enemy(w.DAEMON, 0, 2, scheduled=True)
    hp = []
    for _ in range(6):
        g.set(hp=3).do(w.WAIT)
        hp.append(g.value("hp"))
    assert hp == [3, 2, 2, 2, 2, 2]
    assert same(g.state.history.depth) == 4
    for number in (6, 5, 4, 3):
        g.do(w.UNDO)
        assert g.value("turn") == number
    assert w.UNDO not in g.legal()
    assert g.enemies() == [(w.DAEMON, 0, 1, 3)]
    assert same(g.do(w.RIGHT)) == -0.01
    g.set(attack=3)
    assert same(g.do(w.RIGHT)) == 0.29, "who came back counts as nobody's"


# -------------------------------------------------------------------------------------------------------- random play

STEPS = 120
MOVERS = (w.PUSH, w.PULL, w.POLY)
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
def test_invariants_hold_in_drawn_games(without: tuple[int, ...]) -> None:
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
    kept = (after.stage == state.stage) & (action != w.UNDO)
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


@pytest.mark.slow
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
        assert set(kept[0]) <= set(foes.tolist()), "all but whom w.WARP struck"
        assert len(kept[0]) >= len(foes) - 1
        gone = len(set(sent.tolist()) - set(kept[1]))
        assert gone + len(foes) - len(kept[0]) == (action[t, b] == w.WARP)
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


def test_a_game_begins_in_a_corner_with_one_gift_and_one_transmission() -> None:
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


def test_boards_of_the_bank_are_sound_and_have_the_rules_shares() -> None:
    own = drawn.draw_shelves(0, 2000)
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


def test_boards_with_a_cut_off_cell_or_an_enclosed_block_are_unsound() -> None:
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
        return rules.way(c.cells(words), c.cell_at(start // 6, start % 6), c.cell_at(goal // 6, goal % 6))

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
    return np.concatenate([about(s), grid.reshape(-1)])


def test_the_observation_is_that_of_the_rules() -> None:
    _, _, _, led_to, after = _columns(())
    # The network's own form, put back into the whole vector: what it leaves out is 0 in every game.
    packed = jax.tree.map(lambda x: x[::8, ::5], led_to.observation.observation)
    expanded = np.asarray(observation.expand(packed))
    short = np.zeros_like(expanded)
    short[..., list(SHORT.places)] = np.asarray(SHORT.expand(packed))
    np.testing.assert_array_equal(short, expanded)
    states = jax.tree.map(lambda x: x[::8, ::5], after)
    for t in range(expanded.shape[0]):
        for b in range(expanded.shape[1]):
            one = jax.tree.map(lambda x, t=t, b=b: x[t, b], states)
            np.testing.assert_allclose(expanded[t, b], _shown(one), atol=1e-6)
    shown = set(np.flatnonzero(expanded[..., 33:].reshape(-1, 42).any(0)).tolist())
    assert shown == set(range(42)), "every channel was seen"


@pytest.mark.slow  # all moves and lines of the rules are of such sets
def test_sets_of_cells_move_as_coordinates_do() -> None:
    """Moved sets against coordinates."""

    def sets(row: jax.Array, col: jax.Array) -> Any:
        one = c.cell_at(row, col)
        return one.words(), [move(one).words() for move in c.MOVES]

    rows, columns = np.divmod(np.arange(36, dtype=np.int32), 6)
    alone, moves = jax.jit(jax.vmap(sets))(rows, columns)
    for i, (row, col) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        assert cells(alone[i]) == {(row, col)}
        steps = ((row + 1, col), (row - 1, col), (row, col - 1), (row, col + 1))
        assert [cells(moved[i]) for moved in moves] == [
            {(r, k)} if 0 <= r < 6 and 0 <= k < 6 else set() for r, k in steps
        ]
    some = c.cells(jnp.asarray(words([(0, 0), (3, 5)])))
    assert cells((~some).words()) == {divmod(i, 6) for i in range(36)} - {(0, 0), (3, 5)}
    assert np.flatnonzero(some.flags()).tolist() == [0, 23]
    stops = c.cells(jnp.asarray(words([(0, 3), (4, 0)])))
    assert cells(c.line(c.cell_at(jnp.int32(0), jnp.int32(0)), stops, c.right).words()) == {(0, 1), (0, 2), (0, 3)}
    ring = c.around(c.cell_at(jnp.int32(0), jnp.int32(0))).words()
    assert cells(ring) == {(0, 1), (1, 0), (1, 1)}
