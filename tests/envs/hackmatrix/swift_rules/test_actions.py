"""The programs of the canonical HackMatrix, with outcomes by hand."""

from __future__ import annotations

from typing import Any

import pytest

from longhaul.envs.hackmatrix import state as w
from tests.helpers.hackmatrix_swift_games import World, cells, same, words

BLOCK = (w.DATA, 1)


@pytest.mark.slow
def test_push_and_pull() -> None:
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


def test_the_bomb() -> None:
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


def test_buying() -> None:
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
    for turn in (6, 5, 4, 3):
        g.do(w.UNDO)
        assert g.value("turn") == turn
    assert w.UNDO not in g.legal()
    assert g.enemies() == [(w.DAEMON, 0, 1, 3)]
    assert same(g.do(w.RIGHT)) == -0.01
    g.set(attack=3)
    assert same(g.do(w.RIGHT)) == 0.29, "who came back counts as nobody's"
