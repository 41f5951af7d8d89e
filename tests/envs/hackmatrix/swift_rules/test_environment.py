"""The canonical rules of HackMatrix: each statement of the rule sheet that can be set up, with outcomes by hand."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from longhaul.envs import hackmatrix, registry
from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.swift_rules.environment import FIXES, Canonical, canonical
from tests.helpers.hackmatrix_swift_games import World, cells, same, words

BLOCK = (w.DATA, 1)
ALL = tuple(FIXES)
"""One more program to compile, and not one for each fix."""


# ------------------------------------------------------------------------------------------------- moves and attacks


def test_a_move_shapes_and_takes_no_resources() -> None:
    """Case 1; and only data siphons are picked up by walking."""
    g = World((3, 3), money={(4, 3): (2, 0)})
    assert same(g.do(w.UP)) == 0.04
    assert g.at == (4, 3)
    assert (g.value("turn"), g.value("credits")) == (1, 0)


def test_the_mask_of_moves() -> None:
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


def test_preferences_among_equally_good_steps() -> None:
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


def test_scheduled_transmissions() -> None:
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


def test_warp_to_the_exit() -> None:
    """Case 24 [S]."""
    g = World((0, 0), credits=2, energy=2, turn=5).own(w.WARP).enemy(w.VIRUS, 5, 5)
    assert same(g.do(w.WARP)) == pytest.approx(-0.01 + 1 + 0.3 - 0.2 + 0.5)
    assert (g.at, g.value("stage"), g.enemies()) == ((5, 5), 2, [])
    g = World((0, 0), credits=2, energy=2).own(w.WARP).enemy(w.VIRUS, 3, 3).transmission(2, 2, 3).enemy(w.DAEMON, 4, 4)
    g.do(w.WARP)
    where = {(int(row), int(col)) for row, col in zip(g.state.row, g.state.col, strict=True)}
    assert where == {(3, 3), (2, 2), (4, 4)}
    assert g.value("turn") == 0


@pytest.mark.parametrize(("fixes", "stage"), [((), 64), (ALL, 100)])
def test_victory(fixes: tuple[str, ...], stage: int) -> None:
    """Case 15 [S]: the number of the stage stays, and the seventh stage's reward is paid for the eighth."""
    g = World((5, 4), stage=8, score=10, fixes=fixes).enemy(w.VIRUS, 0, 0)
    assert same(g.do(w.RIGHT)) == pytest.approx(-0.01 + stage + 1500 + 0.05)
    assert g.over.all()
    assert g.value("stage") == 8
    assert same(g.state.tally.stage) == 9
    assert g.value("turn") == 0


@pytest.mark.parametrize(("stage", "expected"), [(1, -1.06), (4, -4.56), (8, -64.56)])
def test_death(stage: int, expected: float) -> None:
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
def test_what_is_not_legal_ends_the_game(action: int, own: tuple[int, ...]) -> None:
    g = World((0, 0), blocks={(1, 0): BLOCK}, credits=9, energy=9, attacks=2).own(*own).enemy(w.DAEMON, 0, 4)
    before = g.state
    assert action not in g.legal()
    assert same(g.do(action)) == 0
    assert g.over.all()
    jax.tree.map(np.testing.assert_array_equal, before, g.state._replace(tally=before.tally, over=before.over))
    assert not g.state.tally.parts.any()


def test_an_undo_over_a_stage_brings_its_exit_back() -> None:
    """As in the Swift game: the old board, whose exit counts once more; the fix forgets what was before."""
    for fixes in ((), ALL):
        g = World((5, 3), credits=1, fixes=fixes).own(w.UNDO)
        g.do(w.RIGHT)
        assert (g.at, g.value("stage")) == ((5, 4), 1)
        g.do(w.RIGHT)
        assert (g.at, g.value("stage")) == ((5, 5), 2)
        if fixes:
            assert same(g.state.history.depth) == 0
            continue
        g.do(w.UNDO)
        assert (g.at, g.value("stage"), g.value("door")) == ((5, 4), 2, 3)
        g.do(w.RIGHT)
        assert g.value("stage") == 3


def test_how_the_rules_are_chosen() -> None:
    assert isinstance(hackmatrix.make(8, rules="canonical"), Canonical)
    assert isinstance(registry.make("hackmatrix-canonical", boards=8), Canonical)
    with pytest.raises(ValueError, match="rules is 'swift'; there are jax, canonical"):
        hackmatrix.make(8, rules="swift")
    with pytest.raises(ValueError, match="fixes names 'kills'; the canonical rules have victory"):
        canonical(8, fixes=("kills",))
