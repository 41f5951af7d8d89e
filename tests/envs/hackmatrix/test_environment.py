"""HackMatrix's rules: the worked cases of the rule sheet, and what holds in any game."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.envs.hackmatrix import state as world
from longhaul.envs.hackmatrix.state import (
    ANTI_V,
    ATK,
    CALM,
    COL,
    CRASH,
    D_BOM,
    DAEMON,
    DATA,
    DEBUG,
    DELAY,
    DOWN,
    EXCH,
    GLITCH,
    HACK,
    LEFT,
    POLY,
    PROGRAM,
    PULL,
    PUSH,
    RESET,
    RIGHT,
    ROW,
    SCORE,
    SHOW,
    SIPH,
    SIPHON,
    STEP,
    UNDO,
    UP,
    VIRUS,
    WAIT,
    WARP,
)
from tests.helpers.hackmatrix_games import World


def test_case_1_a_move_shapes() -> None:
    w = World((3, 3))
    assert w.do(UP) == 0.04
    assert w.at == (4, 3) and int(w.state.turn) == 1


def test_case_2_the_edge_is_masked() -> None:
    assert World((0, 0)).legal() == {UP, RIGHT}
    assert World((5, 5)).legal() == {DOWN, LEFT}
    assert World((3, 3), blocks={(4, 3): (DATA, 1)}).legal() == {DOWN, LEFT, RIGHT}


def test_case_3_a_data_siphon_is_picked_up() -> None:
    w = World((3, 3)).set(pickup=world.bits(jnp.int32(27)))
    assert w.do(UP) == 1.04
    assert int(w.state.siphons) == 1 and not np.any(w.state.pickup)


@pytest.mark.parametrize("blocks", [{(2, 3): (DATA, 1)}, {(2, 3): (DATA, 1), (5, 3): (DATA, 2)}])
def test_case_4_a_line_attack_passes_blocks(blocks: Any) -> None:
    w = World((0, 3), blocks=blocks).enemy(0, VIRUS, 5, 3, 1)
    assert UP in w.legal()
    assert w.do(UP) == 0.29
    assert w.at == (0, 3) and w.enemies == []


def test_case_5_a_survivor_strikes_back() -> None:
    w = World((3, 3)).enemy(0, VIRUS, 4, 3)
    assert w.do(UP) == -1.01
    assert w.enemies == [(VIRUS, 4, 3, 1)] and int(w.state.hp) == 2


def test_case_6_a_transmission_is_removed() -> None:
    w = World((3, 3)).sent(0, 4, 3, 3)
    assert w.do(UP) == -0.01
    assert w.at == (3, 3) and w.pending == []


@pytest.mark.parametrize(
    ("enemy", "ends", "reward_"),
    [
        ((DAEMON, 3, 0), (2, 0), -0.06),
        ((VIRUS, 4, 0), (2, 0), -0.06),
        ((VIRUS, 3, 0), (1, 0), -1.06),
        ((DAEMON, 2, 2), (1, 2), -0.06),
    ],
)
def test_case_7_enemies_approach(enemy: tuple[int, int, int], ends: tuple[int, int], reward_: float) -> None:
    w = World((0, 0), energy=1).own(WAIT).enemy(0, *enemy)
    assert w.do(WAIT) == reward_
    assert w.enemies[0][1:3] == ends


def test_case_7_two_daemons_may_share_a_cell() -> None:
    w = World((0, 0), energy=1).own(WAIT).enemy(0, DAEMON, 4, 0).enemy(1, DAEMON, 4, 0)
    w.do(WAIT)
    assert [e[1:3] for e in w.enemies] == [(3, 0), (3, 0)]


@pytest.mark.parametrize(
    ("kind", "start", "block", "ends"),
    [
        (GLITCH, (3, 0), (2, 0), (2, 0)),
        (DAEMON, (3, 0), (2, 0), (2, 0)),
        (DAEMON, (3, 2), (2, 2), (2, 1)),
    ],
)
def test_cases_8_and_9_blocks_hardly_hinder(kind: int, start: Any, block: Any, ends: Any) -> None:
    w = World((0, 0), blocks={block: (DATA, 1)}, energy=1).own(WAIT).enemy(0, kind, *start)
    w.do(WAIT)
    assert w.enemies[0][1:3] == ends


def test_case_10_who_spawns_acts_at_once() -> None:
    w = World((0, 0), energy=1).own(WAIT).sent(0, 2, 0, 1)
    w.do(WAIT)
    assert w.enemies == [(VIRUS, 1, 0, 2)] and int(w.state.hp) == 2
    w = World((0, 0), energy=1).own(WAIT).sent(0, 5, 5, 1)
    w.do(WAIT)
    assert w.enemies == [(VIRUS, 4, 4, 2)]


def test_case_11_siphoning_data() -> None:
    w = World((3, 3), blocks={(4, 3): (DATA, 3)}, siphons=1)
    assert w.do(SIPHON) == 1.49
    assert (int(w.state.score), int(w.state.siphons), int(w.state.next_task)) == (3, 0, 17)
    assert w.pending == [(4, 3, 2)] * 3
    assert bool(world.has(w.state.siphoned, jnp.int32(27))) and bool(world.has(w.state.centre, jnp.int32(21)))


def test_case_12_a_program_comes_first() -> None:
    w = World((3, 3), blocks={(4, 3): (DATA, 9), (3, 2): (PROGRAM, 7)}, siphons=1)
    w.do(SIPHON)
    assert int(w.state.programs) == 1 << 7 and int(w.state.score) == 0
    w = World((3, 3), siphons=1)
    assert w.do(SIPHON) == -0.01
    assert int(w.state.siphons) == 0 and int(w.state.next_task) == 12


@pytest.mark.parametrize(("stage", "expected"), [(1, -1.06), (4, -4.56)])
def test_case_13_death(stage: int, expected: float) -> None:
    w = World((0, 0), energy=1, hp=1, stage=stage).own(WAIT).enemy(0, VIRUS, 1, 0)
    assert w.do(WAIT) == expected
    assert w.over


def test_case_14_the_exit() -> None:
    w = World((5, 4), hp=1, credits=10, energy=5)
    gained = w.do(RIGHT)
    unreachable = 0.05 * (w.way() == 0)
    assert gained == pytest.approx(2.14 + unreachable, abs=1e-4)
    s = w.state
    assert (int(s.stage), int(s.hp), w.at) == (2, 2, (5, 5)) and int(s.exit) != 3
    pickup = np.flatnonzero(world.spread_bits(s.pickup))
    assert len(pickup) == 2 and set(pickup) | {int(world.CORNERS[s.exit]), 35} == set(world.CORNERS.tolist())
    assert len(w.pending) == 2 and all(turns == 1 for _, _, turns in w.pending)
    blocks = int((np.asarray(w.bank.cell[s.board]) & 3 > 0).sum())
    assert 5 <= blocks <= 11 and not w.over


def test_case_15_victory() -> None:
    w = World((5, 4), stage=8, score=10)
    assert w.do(RIGHT) in (1599.99, 1600.04)
    assert w.over and int(w.state.stage) == 9 and len(w.pending) == 8


def test_case_16_reset() -> None:
    w = World((0, 0), hp=1, energy=4).own(RESET)
    assert w.do(RESET) == 1.79
    w = World((0, 0), hp=2, energy=4).own(RESET)
    assert w.do(RESET) == 0.49
    assert RESET not in World((0, 0), energy=4).own(RESET).legal()


def test_cases_17_and_18_buying() -> None:
    w = World((0, 0), credits=5).own(SIPH)
    assert w.do(SIPH) == 0.74
    assert (int(w.state.siphons), int(w.state.credits), int(w.state.turn)) == (1, 0, 0)
    w = World((0, 0), credits=8).own(EXCH)
    assert w.do(EXCH) == -0.01
    assert (int(w.state.credits), int(w.state.energy)) == (4, 4)
    assert EXCH not in World((0, 0), credits=3).own(EXCH).legal()


def test_case_19_push_and_pull() -> None:
    w = World((3, 3), energy=2).own(PUSH).enemy(0, VIRUS, 4, 3)
    w.do(PUSH)
    assert w.enemies[0][1:3] == (5, 3) and int(w.state.energy) == 0
    w = World((3, 3), energy=4).own(PULL).enemy(0, VIRUS, 5, 3).enemy(1, VIRUS, 4, 4)
    w.do(PULL)
    assert [e[1:3] for e in w.enemies] == [(4, 3), (3, 3)]
    w = World((3, 3), energy=2).own(PUSH).enemy(0, VIRUS, 4, 4).enemy(1, DAEMON, 5, 3)
    w.do(PUSH)
    assert [e[1:3] for e in w.enemies] == [(5, 5), (5, 3)]


@pytest.mark.parametrize(("action", "places"), [(ROW, ((3, 0), (3, 5), (4, 3))), (COL, ((0, 3), (5, 3), (3, 4)))])
def test_case_20_row_and_column(action: int, places: Any) -> None:
    w = World((3, 3), credits=3, energy=1, attack=2).own(action)
    for slot, (kind, place, hp) in enumerate(zip((VIRUS, DAEMON, VIRUS), places, (1, 3, 2), strict=True)):
        w.enemy(slot, kind, *place, hp)
    w.do(action)
    assert w.enemies == [(DAEMON, *places[1], 2), (VIRUS, *places[2], 2)]


def test_case_21_the_bomb() -> None:
    w = World((3, 3), credits=3).own(D_BOM).enemy(0, DAEMON, 5, 5).enemy(1, VIRUS, 4, 4)
    w.do(D_BOM)
    assert w.enemies == [(VIRUS, 4, 4, 1)] and bool(w.state.enemies.stunned[1])
    w = World((3, 3), credits=3).own(D_BOM).enemy(0, DAEMON, 5, 5).enemy(1, DAEMON, 4, 5, 1).enemy(2, VIRUS, 4, 4)
    w.do(D_BOM)
    assert w.enemies == [(DAEMON, 5, 5, 2), (VIRUS, 4, 4, 1)]
    assert np.flatnonzero(w.state.enemies.stunned).tolist() == [0, 2]


def test_case_21b_undo_and_crash() -> None:
    w = World((3, 3), credits=5).own(UNDO)
    assert UNDO not in w.legal()
    w.do(UP)
    assert UNDO in w.legal()
    assert w.do(UNDO) == -0.01
    assert w.at == (4, 3) and int(w.state.credits) == 5 and UNDO not in w.legal()
    w.do(UP)
    assert UNDO in w.legal()
    w = World((3, 3), credits=3, energy=2).own(CRASH).enemy(0, VIRUS, 4, 3, 1).enemy(1, DAEMON, 0, 0)
    w.do(CRASH)
    assert w.enemies == [(DAEMON, 0, 0, 2)]


def test_case_22_viruses_blocks_and_hacks() -> None:
    w = World((3, 3), credits=3).own(ANTI_V).enemy(0, VIRUS, 0, 0, 1).enemy(1, VIRUS, 0, 1).enemy(2, DAEMON, 0, 2)
    w.do(ANTI_V)
    assert w.enemies == [(VIRUS, 0, 1, 1), (DAEMON, 0, 2, 3)] and bool(w.state.enemies.stunned[1])
    blocks = {(1, 1): (DATA, 1), (2, 2): (DATA, 1)}
    w = World((3, 3), blocks=blocks, credits=3).own(DEBUG).enemy(0, GLITCH, 1, 1).enemy(1, VIRUS, 0, 1)
    w.do(DEBUG)
    assert w.enemies == [(GLITCH, 1, 1, 1), (VIRUS, 0, 1, 2)] and bool(w.state.enemies.stunned[0])
    w = World((3, 3), blocks=blocks, credits=2, energy=2).own(HACK).siphoned(1, 1)
    w.enemy(0, VIRUS, 1, 1, 1).enemy(1, DAEMON, 1, 1).enemy(2, VIRUS, 2, 2)
    w.do(HACK)
    assert w.enemies == [(DAEMON, 1, 1, 1), (VIRUS, 2, 2, 2)]


def test_case_23_delay_and_score() -> None:
    w = World((3, 3), credits=1, energy=2).own(DELAY).sent(0, 1, 1, 2)
    w.do(DELAY)
    assert w.pending == [(1, 1, 5)]
    w = World((0, 0), stage=2, energy=5).own(SCORE)
    assert w.do(SCORE) == 2.74
    assert SCORE not in World((0, 0), stage=8, energy=5).own(SCORE).legal()


def test_case_24_warp_completes_a_stage() -> None:
    w = World((0, 0), credits=2, energy=2).own(WARP).enemy(0, VIRUS, 5, 5)
    gained = w.do(WARP)
    # The way to the new exit counts as far as it is nearer than the old one was.
    assert gained == pytest.approx(1.09 + 0.05 * max(0, 10 - w.way()), abs=1e-4)
    assert w.at == (5, 5) and int(w.state.stage) == 2 and int(w.state.turn) == 0


def test_case_25_step() -> None:
    w = World((0, 0), energy=3).own(STEP).enemy(0, DAEMON, 4, 0)
    w.do(STEP)
    assert w.enemies == [(DAEMON, 4, 0, 3)]
    w.do(UP)
    assert w.enemies == [(DAEMON, 4, 0, 2)]
    w = World((0, 1), energy=3).own(STEP).enemy(0, DAEMON, 4, 0).enemy(1, DAEMON, 0, 0)
    w.do(STEP)
    w.do(UP)
    assert w.at == (1, 1) and [e[1:3] for e in w.enemies] == [(4, 0), (0, 0)]


def test_other_programs() -> None:
    w = World((0, 0), credits=2, energy=4).own(CALM, SHOW)
    w.do(CALM)
    assert bool(w.state.calm) and CALM not in w.legal()
    w = World((0, 0), credits=8, energy=8).own(ATK)
    w.do(ATK), w.do(ATK)
    assert int(w.state.attack) == 3 and ATK not in w.legal()
    w = World((0, 0), credits=1, energy=1).own(POLY).enemy(0, DAEMON, 3, 3, 1)
    w.do(POLY)
    assert w.enemies[0][0] != DAEMON and w.enemies[0][3] == 2
