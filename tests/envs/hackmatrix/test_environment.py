"""HackMatrix's rules: the worked cases of the rule sheet, and what holds in any game."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.envs.hackmatrix import state as w
from tests.helpers.hackmatrix_games import World


def test_case_1_a_move_shapes() -> None:
    g = World((3, 3))
    assert g.do(w.UP) == 0.04
    assert g.at == (4, 3) and int(g.state.turn) == 1


def test_case_2_the_edge_is_masked() -> None:
    assert World((0, 0)).legal() == {w.UP, w.RIGHT}
    assert World((5, 5)).legal() == {w.DOWN, w.LEFT}
    assert World((3, 3), blocks={(4, 3): (w.DATA, 1)}).legal() == {w.DOWN, w.LEFT, w.RIGHT}


def test_case_3_a_data_siphon_is_picked_up() -> None:
    g = World((3, 3)).set(pickup=w.bits(jnp.int32(27)))
    assert g.do(w.UP) == 1.04
    assert int(g.state.siphons) == 1 and not np.any(g.state.pickup)


@pytest.mark.parametrize("blocks", [{(2, 3): (w.DATA, 1)}, {(2, 3): (w.DATA, 1), (5, 3): (w.DATA, 2)}])
def test_case_4_a_line_attack_passes_blocks(blocks: Any) -> None:
    g = World((0, 3), blocks=blocks).enemy(0, w.VIRUS, 5, 3, 1)
    assert w.UP in g.legal()
    assert g.do(w.UP) == 0.29
    assert g.at == (0, 3) and g.enemies == []


def test_case_5_a_survivor_strikes_back() -> None:
    g = World((3, 3)).enemy(0, w.VIRUS, 4, 3)
    assert g.do(w.UP) == -1.01
    assert g.enemies == [(w.VIRUS, 4, 3, 1)] and int(g.state.hp) == 2


def test_case_6_a_transmission_is_removed() -> None:
    g = World((3, 3)).sent(0, 4, 3, 3)
    assert g.do(w.UP) == -0.01
    assert g.at == (3, 3) and g.pending == []


@pytest.mark.parametrize(
    ("enemy", "ends", "reward_"),
    [
        ((w.DAEMON, 3, 0), (2, 0), -0.06),
        ((w.VIRUS, 4, 0), (2, 0), -0.06),
        ((w.VIRUS, 3, 0), (1, 0), -1.06),
        ((w.DAEMON, 2, 2), (1, 2), -0.06),
    ],
)
def test_case_7_enemies_approach(enemy: tuple[int, int, int], ends: tuple[int, int], reward_: float) -> None:
    g = World((0, 0), energy=1).own(w.WAIT).enemy(0, *enemy)
    assert g.do(w.WAIT) == reward_
    assert g.enemies[0][1:3] == ends


def test_case_7_two_daemons_may_share_a_cell() -> None:
    g = World((0, 0), energy=1).own(w.WAIT).enemy(0, w.DAEMON, 4, 0).enemy(1, w.DAEMON, 4, 0)
    g.do(w.WAIT)
    assert [e[1:3] for e in g.enemies] == [(3, 0), (3, 0)]


@pytest.mark.parametrize(
    ("kind", "start", "block", "ends"),
    [
        (w.GLITCH, (3, 0), (2, 0), (2, 0)),
        (w.DAEMON, (3, 0), (2, 0), (2, 0)),
        (w.DAEMON, (3, 2), (2, 2), (2, 1)),
    ],
)
def test_cases_8_and_9_blocks_hardly_hinder(kind: int, start: Any, block: Any, ends: Any) -> None:
    g = World((0, 0), blocks={block: (w.DATA, 1)}, energy=1).own(w.WAIT).enemy(0, kind, *start)
    g.do(w.WAIT)
    assert g.enemies[0][1:3] == ends


def test_case_10_who_spawns_acts_at_once() -> None:
    g = World((0, 0), energy=1).own(w.WAIT).sent(0, 2, 0, 1)
    g.do(w.WAIT)
    assert g.enemies == [(w.VIRUS, 1, 0, 2)] and int(g.state.hp) == 2
    g = World((0, 0), energy=1).own(w.WAIT).sent(0, 5, 5, 1)
    g.do(w.WAIT)
    assert g.enemies == [(w.VIRUS, 4, 4, 2)]


def test_case_11_siphoning_data() -> None:
    g = World((3, 3), blocks={(4, 3): (w.DATA, 3)}, siphons=1)
    assert g.do(w.SIPHON) == 1.49
    assert (int(g.state.score), int(g.state.siphons), int(g.state.next_task)) == (3, 0, 17)
    assert g.pending == [(4, 3, 2)] * 3
    assert bool(w.has(g.state.siphoned, jnp.int32(27))) and bool(w.has(g.state.centre, jnp.int32(21)))


def test_case_12_a_program_comes_first() -> None:
    g = World((3, 3), blocks={(4, 3): (w.DATA, 9), (3, 2): (w.PROGRAM, 7)}, siphons=1)
    g.do(w.SIPHON)
    assert int(g.state.programs) == 1 << 7 and int(g.state.score) == 0
    g = World((3, 3), siphons=1)
    assert g.do(w.SIPHON) == -0.01
    assert int(g.state.siphons) == 0 and int(g.state.next_task) == 12


@pytest.mark.parametrize(("stage", "expected"), [(1, -1.06), (4, -4.56)])
def test_case_13_death(stage: int, expected: float) -> None:
    g = World((0, 0), energy=1, hp=1, stage=stage).own(w.WAIT).enemy(0, w.VIRUS, 1, 0)
    assert g.do(w.WAIT) == expected
    assert g.over


def test_case_14_the_exit() -> None:
    g = World((5, 4), hp=1, credits=10, energy=5)
    gained = g.do(w.RIGHT)
    unreachable = 0.05 * (g.way() == 0)
    assert gained == pytest.approx(2.14 + unreachable, abs=1e-4)
    s = g.state
    assert (int(s.stage), int(s.hp), g.at) == (2, 2, (5, 5)) and int(s.exit) != 3
    pickup = np.flatnonzero(w.spread_bits(s.pickup))
    assert len(pickup) == 2 and set(pickup) | {int(w.CORNERS[s.exit]), 35} == set(w.CORNERS.tolist())
    assert len(g.pending) == 2 and all(turns == 1 for _, _, turns in g.pending)
    blocks = int((np.asarray(g.bank.cell[s.board]) & 3 > 0).sum())
    assert 5 <= blocks <= 11 and not g.over


def test_case_15_victory() -> None:
    g = World((5, 4), stage=8, score=10)
    assert g.do(w.RIGHT) in (1599.99, 1600.04)
    assert g.over and int(g.state.stage) == 9 and len(g.pending) == 8


def test_case_16_reset() -> None:
    g = World((0, 0), hp=1, energy=4).own(w.RESET)
    assert g.do(w.RESET) == 1.79
    g = World((0, 0), hp=2, energy=4).own(w.RESET)
    assert g.do(w.RESET) == 0.49
    assert w.RESET not in World((0, 0), energy=4).own(w.RESET).legal()


def test_cases_17_and_18_buying() -> None:
    g = World((0, 0), credits=5).own(w.SIPH)
    assert g.do(w.SIPH) == 0.74
    assert (int(g.state.siphons), int(g.state.credits), int(g.state.turn)) == (1, 0, 0)
    g = World((0, 0), credits=8).own(w.EXCH)
    assert g.do(w.EXCH) == -0.01
    assert (int(g.state.credits), int(g.state.energy)) == (4, 4)
    assert w.EXCH not in World((0, 0), credits=3).own(w.EXCH).legal()


def test_case_19_push_and_pull() -> None:
    g = World((3, 3), energy=2).own(w.PUSH).enemy(0, w.VIRUS, 4, 3)
    g.do(w.PUSH)
    assert g.enemies[0][1:3] == (5, 3) and int(g.state.energy) == 0
    g = World((3, 3), energy=4).own(w.PULL).enemy(0, w.VIRUS, 5, 3).enemy(1, w.VIRUS, 4, 4)
    g.do(w.PULL)
    assert [e[1:3] for e in g.enemies] == [(4, 3), (3, 3)]
    g = World((3, 3), energy=2).own(w.PUSH).enemy(0, w.VIRUS, 4, 4).enemy(1, w.DAEMON, 5, 3)
    g.do(w.PUSH)
    assert [e[1:3] for e in g.enemies] == [(5, 5), (5, 3)]


@pytest.mark.parametrize(("action", "places"), [(w.ROW, ((3, 0), (3, 5), (4, 3))), (w.COL, ((0, 3), (5, 3), (3, 4)))])
def test_case_20_row_and_column(action: int, places: Any) -> None:
    g = World((3, 3), credits=3, energy=1, attack=2).own(action)
    for slot, (kind, place, hp) in enumerate(zip((w.VIRUS, w.DAEMON, w.VIRUS), places, (1, 3, 2), strict=True)):
        g.enemy(slot, kind, *place, hp)
    g.do(action)
    assert g.enemies == [(w.DAEMON, *places[1], 2), (w.VIRUS, *places[2], 2)]


def test_case_21_the_bomb() -> None:
    g = World((3, 3), credits=3).own(w.D_BOM).enemy(0, w.DAEMON, 5, 5).enemy(1, w.VIRUS, 4, 4)
    g.do(w.D_BOM)
    assert g.enemies == [(w.VIRUS, 4, 4, 1)] and bool(g.state.enemies.stunned[1])
    g = World((3, 3), credits=3).own(w.D_BOM).enemy(0, w.DAEMON, 5, 5).enemy(1, w.DAEMON, 4, 5, 1)
    g.enemy(2, w.VIRUS, 4, 4)
    g.do(w.D_BOM)
    assert g.enemies == [(w.DAEMON, 5, 5, 2), (w.VIRUS, 4, 4, 1)]
    assert np.flatnonzero(g.state.enemies.stunned).tolist() == [0, 2]


def test_case_21b_undo_and_crash() -> None:
    g = World((3, 3), credits=5).own(w.UNDO)
    assert w.UNDO not in g.legal()
    g.do(w.UP)
    assert w.UNDO in g.legal()
    assert g.do(w.UNDO) == -0.01
    assert g.at == (4, 3) and int(g.state.credits) == 5 and w.UNDO not in g.legal()
    g.do(w.UP)
    assert w.UNDO in g.legal()
    g = World((3, 3), credits=3, energy=2).own(w.CRASH).enemy(0, w.VIRUS, 4, 3, 1).enemy(1, w.DAEMON, 0, 0)
    g.do(w.CRASH)
    assert g.enemies == [(w.DAEMON, 0, 0, 2)]


def test_case_22_viruses_blocks_and_hacks() -> None:
    g = World((3, 3), credits=3).own(w.ANTI_V).enemy(0, w.VIRUS, 0, 0, 1).enemy(1, w.VIRUS, 0, 1)
    g.enemy(2, w.DAEMON, 0, 2)
    g.do(w.ANTI_V)
    assert g.enemies == [(w.VIRUS, 0, 1, 1), (w.DAEMON, 0, 2, 3)] and bool(g.state.enemies.stunned[1])
    blocks = {(1, 1): (w.DATA, 1), (2, 2): (w.DATA, 1)}
    g = World((3, 3), blocks=blocks, credits=3).own(w.DEBUG).enemy(0, w.GLITCH, 1, 1).enemy(1, w.VIRUS, 0, 1)
    g.do(w.DEBUG)
    assert g.enemies == [(w.GLITCH, 1, 1, 1), (w.VIRUS, 0, 1, 2)] and bool(g.state.enemies.stunned[0])
    g = World((3, 3), blocks=blocks, credits=2, energy=2).own(w.HACK).siphoned(1, 1)
    g.enemy(0, w.VIRUS, 1, 1, 1).enemy(1, w.DAEMON, 1, 1).enemy(2, w.VIRUS, 2, 2)
    g.do(w.HACK)
    assert g.enemies == [(w.DAEMON, 1, 1, 1), (w.VIRUS, 2, 2, 2)]


def test_case_23_delay_and_score() -> None:
    g = World((3, 3), credits=1, energy=2).own(w.DELAY).sent(0, 1, 1, 2)
    g.do(w.DELAY)
    assert g.pending == [(1, 1, 5)]
    g = World((0, 0), stage=2, energy=5).own(w.SCORE)
    assert g.do(w.SCORE) == 2.74
    assert w.SCORE not in World((0, 0), stage=8, energy=5).own(w.SCORE).legal()


def test_case_24_warp_completes_a_stage() -> None:
    g = World((0, 0), credits=2, energy=2).own(w.WARP).enemy(0, w.VIRUS, 5, 5)
    gained = g.do(w.WARP)
    # The way to the new exit counts as far as it is nearer than the old one was.
    assert gained == pytest.approx(1.09 + 0.05 * max(0, 10 - g.way()), abs=1e-4)
    assert g.at == (5, 5) and int(g.state.stage) == 2 and int(g.state.turn) == 0


def test_case_25_step() -> None:
    g = World((0, 0), energy=3).own(w.STEP).enemy(0, w.DAEMON, 4, 0)
    g.do(w.STEP)
    assert g.enemies == [(w.DAEMON, 4, 0, 3)]
    g.do(w.UP)
    assert g.enemies == [(w.DAEMON, 4, 0, 2)]
    g = World((0, 1), energy=3).own(w.STEP).enemy(0, w.DAEMON, 4, 0).enemy(1, w.DAEMON, 0, 0)
    g.do(w.STEP)
    g.do(w.UP)
    assert g.at == (1, 1) and [e[1:3] for e in g.enemies] == [(4, 0), (0, 0)]


def test_other_programs() -> None:
    g = World((0, 0), credits=2, energy=4).own(w.CALM, w.SHOW)
    g.do(w.CALM)
    assert bool(g.state.calm) and w.CALM not in g.legal()
    g = World((0, 0), credits=8, energy=8).own(w.ATK)
    g.do(w.ATK), g.do(w.ATK)
    assert int(g.state.attack) == 3 and w.ATK not in g.legal()
    g = World((0, 0), credits=1, energy=1).own(w.POLY).enemy(0, w.DAEMON, 3, 3, 1)
    g.do(w.POLY)
    assert g.enemies[0][0] != w.DAEMON and g.enemies[0][3] == 2
