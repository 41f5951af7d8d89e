"""HackMatrix by the trainer's rules: the worked cases of the rule sheet; what holds in any game under random play, what
it shows, its fixes, and packed observations in PPO."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import actor_critic as algorithms_actor_critic
from longhaul.algorithms import ppo
from longhaul.algorithms.config import PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.config import recipes
from longhaul.environment import vectorise
from longhaul.envs import registry
from longhaul.envs.hackmatrix import board_generation, observation
from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.environment import FIXES, Game, hackmatrix
from longhaul.envs.hackmatrix.state import CELLS, CORNERS, State
from longhaul.networks import actor_critic
from longhaul.networks.config import NetworkConfig
from longhaul.rollout import collector
from longhaul.runtime.config_fields import replaced
from longhaul.spaces import Masked
from longhaul.types import Environment
from tests.helpers.hackmatrix_games import LANES, World, about, game, looker, stepper


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


def test_programs_have_their_effect_and_end() -> None:
    g = World((0, 0), credits=2, energy=4).own(w.CALM, w.SHOW)
    g.do(w.CALM)
    assert bool(g.state.calm) and w.CALM not in g.legal()
    g = World((0, 0), credits=8, energy=8).own(w.ATK)
    g.do(w.ATK), g.do(w.ATK)
    assert int(g.state.attack) == 3 and w.ATK not in g.legal()
    g = World((0, 0), credits=1, energy=1).own(w.POLY).enemy(0, w.DAEMON, 3, 3, 1)
    g.do(w.POLY)
    assert g.enemies[0][0] != w.DAEMON and g.enemies[0][3] == 2


# -------------------------------------------------------------------------------------------------------- random play

STEPS = 72


def _rich(game: Game, key: jax.Array) -> State:
    """A game in the middle: some stage on a board of the bank, with programs, credits, energy and siphons."""
    state, _ = game.reset(key)
    words = jax.random.bits(key, (6,))
    corner = jnp.asarray(CORNERS)[words[0] % 4]
    stage = 1 + (words[1] % 7).astype(jnp.int32)
    state = state._replace(row=corner // 6, col=corner % 6, stage=stage, programs=words[2] >> 9)
    stocks = {"credits": words[3] % 12, "energy": words[3] // 12 % 12, "siphons": words[4] % 4}
    state = state._replace(**{name: value.astype(jnp.int32) for name, value in stocks.items()})
    return game.advance(state, words[4:])


@functools.cache
def _played(fixes: tuple[str, ...] = ()) -> Any:
    """(states [T, LANES], what is seen, actions, rewards, parts [T, LANES, 15], states after, ended) of random legal
    play, in NumPy."""
    made = game(fixes)

    def rich(key: jax.Array) -> State:
        state = _rich(made, key)
        return state._replace(past=state._replace(past=())) if "undo" in fixes else state

    begin, rng = jax.jit(jax.vmap(rich)), np.random.default_rng(0)
    key_begin, key_step = jax.random.split(jax.random.key(1))
    state = jax.device_get(begin(jax.random.split(key_begin, LANES)))
    rows = []
    for number in range(STEPS):
        seen = jax.device_get(looker()(made.bank, state))
        action = np.where(seen.mask, rng.random(seen.mask.shape), -1.0).argmax(-1).astype(np.int32)
        keys = jax.random.split(jax.random.fold_in(key_step, number), LANES)
        after, led_to = jax.device_get(stepper(fixes)(made.bank, state, action, keys))
        ended = led_to.terminated
        rows.append((state, seen, action, led_to.reward, after.tally.parts - state.tally.parts, after, ended))
        fresh = jax.device_get(begin(jax.random.split(jax.random.fold_in(key_begin, number), LANES)))

        def chosen(a: Any, b: Any, ended: Any = ended) -> Any:
            return np.where(ended.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        state = jax.tree.map(chosen, fresh, after)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def test_invariants_hold_in_drawn_games() -> None:
    state, seen, action, gained, parts, after, _ = _played()
    assert (state.hp > 0).all()
    assert after.hp.min() >= 0
    assert after.hp.max() <= 3
    for name in ("row", "col"):
        assert ((getattr(after, name) >= 0) & (getattr(after, name) < 6)).all()
        for slots in (after.enemies, after.pending):
            assert ((getattr(slots, name) >= 0) & (getattr(slots, name) < 6)).all()
    for name in ("credits", "energy", "siphons", "score"):
        assert getattr(after, name).min() >= 0, f"{name} below 0 in legal play"
    assert set(np.unique(after.attack)) <= {1, 2, 3}
    assert ((after.enemies.hp > 0) | ~after.enemies.alive).all()
    assert (after.spawn >= 0).all()
    assert not (after.siphoned & after.pickup).any(), "what is siphoned is a block"
    legal = np.moveaxis(seen.mask, -1, 0)
    for program in range(w.PROGRAMS):
        which = legal[5 + program]
        assert (state.programs[which] >> program & 1).all(), "a program that is not owned is offered"
        assert (state.credits[which] >= w.CREDITS[5 + program]).all()
        assert (state.energy[which] >= w.ENERGY[5 + program]).all()
    assert seen.mask.any(-1).all()
    np.testing.assert_allclose(parts.sum(-1), gained, atol=2e-3, rtol=1e-5)
    assert (parts[..., 0] < 0).all()
    assert len(np.unique(action)) > 24, "nearly every action was played"
    assert (after.stage > state.stage).any()
    assert game().spec.max_steps == 1000


def _shown(s: Any) -> np.ndarray:
    """The 1,545 numbers of one game by section 9 of the rules, cell by cell and slot by slot."""
    code = game().bank.cell[s.board]
    grid = np.zeros((6, 6, 42))
    for cell in range(36):
        here = grid[cell // 6, cell % 6]
        sets = (s.siphoned, s.centre, s.collected, s.pickup)
        in_set = [bool(int(words[cell // 18]) >> cell % 18 & 1) for words in sets]
        kind, points, program = code[cell] & 3, code[cell] >> 2 & 15, code[cell] >> 6 & 31
        here[7:10] = [kind == k for k in (1, 2, 3)]
        here[10], here[11], here[35] = points / 9, in_set[0], s.spawn[cell] / 9
        if kind >= 2:
            here[12 + program] = 1
        if not in_set[2]:
            here[37:39] = (code[cell] >> 15 & 3) / 3, (code[cell] >> 17 & 3) / 3
        here[39], here[40], here[41] = in_set[3], cell == CORNERS[s.exit], in_set[1]
    e, p = s.enemies, s.pending
    for i in range(20):
        if e.alive[i] and (e.kind[i] != 3 or e.row[i] == s.row or e.col[i] == s.col or s.show):
            here = grid[e.row[i], e.col[i]]
            here[e.kind[i]] = 1
            here[4:7] = e.hp[i] / 3, e.stunned[i], e.siphoned[i]
        if p.turns[i] > 0:
            grid[p.row[i], p.col[i], 36] = min(p.turns[i] / 4, 1)
    return np.concatenate([about(s), grid.reshape(-1)])


def test_the_observation_is_that_of_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    state, seen, *_ = _played()
    expanded = np.asarray(observation.expand(seen.observation))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")  # whose words are turned first
        np.testing.assert_array_equal(observation.expand(seen.observation), expanded)
    assert expanded.shape == (STEPS, LANES, 1545)
    assert expanded.dtype == np.float32
    stunned = 0
    for t in range(0, STEPS, 5):
        for b in range(0, LANES, 7):
            one = jax.tree.map(operator.itemgetter((t, b)), state)
            np.testing.assert_allclose(expanded[t, b], _shown(one), atol=1e-6)
            stunned += bool(one.enemies.stunned.any())
    channels = expanded[..., 33:].reshape(-1, 42)
    shown = set(np.flatnonzero(channels.any(0)).tolist())
    assert set(range(42)) - shown <= {5, 9}, "every channel but stunned and question blocks was seen"


def test_a_packed_observation_is_small() -> None:
    shapes = jax.tree.leaves(observation.shapes())
    assert sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in shapes) < 240


# ------------------------------------------------------------------------------------------------------------ fixes


def test_the_registered_game_without_defects_has_every_fix() -> None:
    fixed, trainers = (registry.make(name, boards=8) for name in ("hackmatrix-fixed", "hackmatrix"))
    assert isinstance(fixed, Game) and isinstance(trainers, Game)
    assert (fixed.fixes, trainers.fixes) == (tuple(FIXES), ())


def test_an_unknown_fix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'all'; there are start, undo"):
        hackmatrix(8, fixes=("all",))


def test_fix_start_gives_the_first_stage_a_board() -> None:
    made = game(("start",))
    state, _ = made.reset(jax.random.key(0))
    assert 5 <= (np.asarray(made.bank.cell[state.board]) & 3 > 0).sum() <= 11
    assert int((state.pending.turns > 0).sum()) == 1
    assert np.flatnonzero(w.spread_bits(state.pickup)).tolist() == [5, 30]
    assert (int(state.hp), int(state.stage)) == (3, 1)
    assert not np.any(np.asarray(game().bank.cell[game().reset(jax.random.key(0))[0].board]))


@pytest.mark.slow
def test_fix_undo_goes_back() -> None:
    g = World((3, 3), programs=1 << w.UNDO - 5, credits=2, fixes=("undo",))
    g.do(w.UP)
    assert g.at == (4, 3)
    g.do(w.UNDO)
    assert (g.at, int(g.state.turn), int(g.state.credits)) == ((3, 3), 0, 1)
    assert not g.state.undo
    g = World((4, 5), fixes=("undo",))
    g.do(w.UP)
    assert g.state.stage == 2
    assert not g.state.undo, "no way back to an earlier stage"


def test_fix_boards_joins_all_corners() -> None:
    joined = board_generation.joined(board_generation.draw(0, 400, connected=True).distance)
    assert joined.all()
    assert 0.2 < board_generation.joined(board_generation.draw(0, 400).distance).mean() < 0.9


def _fix(name: str) -> Any:
    """The rules without a fix, and with it: a program more to compile."""
    return [(), pytest.param((name,), marks=pytest.mark.slow)]


@pytest.mark.parametrize("fixes", _fix("kills"))
def test_fix_kills_pays_for_no_stage(fixes: tuple[str, ...]) -> None:
    g = World((5, 4), fixes=fixes).enemy(0, w.VIRUS, 0, 0)
    g.do(w.RIGHT)
    assert g.parts["kills"] == (0.0 if fixes else 0.3)


@pytest.mark.parametrize("fixes", _fix("exit"))
def test_fix_exit_is_safe(fixes: tuple[str, ...]) -> None:
    g = World((5, 4), hp=2, fixes=fixes).enemy(0, w.VIRUS, 3, 5)
    g.do(w.RIGHT)
    assert (g.state.stage, g.state.hp) == (2, 3 if fixes else 2), "struck on the exit, and one regained"


@pytest.mark.parametrize("fixes", _fix("spread"))
def test_fix_spread_stacks_nothing(fixes: tuple[str, ...]) -> None:
    g = World((3, 3), blocks={(4, 3): (w.PROGRAM, 4)}, siphons=1, fixes=fixes)
    g.do(w.SIPHON)
    places = [(row, col) for row, col, _ in g.pending]
    assert len(places) == 2
    assert len(set(places)) == (2 if fixes else 1)
    assert ((4, 3) in places) == (not fixes)
    assert (3, 3) not in places


@pytest.mark.parametrize("fixes", _fix("health"))
def test_fix_health_counts_both(fixes: tuple[str, ...]) -> None:
    g = World((5, 4), hp=2, fixes=fixes).enemy(0, w.VIRUS, 3, 5)
    g.do(w.RIGHT)
    assert (g.parts["damage_penalty"], g.parts["hp_recovery"]) == ((-1.0, 1.0) if fixes else (0.0, 0.0))


@pytest.mark.slow
def test_fix_shaping_pays_the_last_step() -> None:
    g = World((5, 4), fixes=("shaping",))
    g.do(w.RIGHT)
    assert g.parts["distance_shaping"] == 0.05


@pytest.mark.slow
def test_all_fixes_together_keep_the_books() -> None:
    _, seen, _, gained, parts, after, _ = _played(tuple(FIXES))
    np.testing.assert_allclose(parts.sum(-1), gained, atol=2e-3, rtol=1e-5)
    assert min(after.credits.min(), after.energy.min(), after.siphons.min()) >= 0
    assert seen.mask.any(-1).all()


def test_boxed_in_the_turn_passes() -> None:
    g = World((0, 0), blocks={(0, 1): (w.DATA, 3), (1, 0): (w.DATA, 3)}).enemy(0, w.DAEMON, 5, 5)
    assert g.legal() == {w.UP}
    rich = World((0, 0), blocks={(0, 1): (w.DATA, 3), (1, 0): (w.DATA, 3)}, energy=9, credits=9)
    assert w.WAIT not in rich.legal(), "not owned"
    g.do(w.UP)
    assert (g.at, int(g.state.turn), int(g.state.energy)) == ((0, 0), 1, 0)
    assert g.enemies[0][1] == 4


# ---------------------------------------------------------------------------------------------- packed observations


@dataclass(frozen=True, eq=False)
class Expanded:
    """The game with its observations expanded, as a trainer without `Spec.expand` would have it."""

    inner: Game

    @property
    def spec(self) -> Any:
        seen = self.inner.spec.observation
        wide = jax.eval_shape(observation.expand, seen.observation)
        return replace(self.inner.spec, observation=Masked(wide, seen.mask), expand=None)

    def reset(self, key: jax.Array) -> Any:
        state, seen = self.inner.reset(key)
        return state, seen._replace(observation=observation.expand(seen.observation))

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Any:
        state, led_to = self.inner.step(key, state, action)
        seen = led_to.observation._replace(observation=observation.expand(led_to.observation.observation))
        return state, led_to._replace(observation=seen, successor=seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


SMALL = PPOConfig(num_minibatches=2, update_epochs=2, chunk=16, anneal=False, network=NetworkConfig(hidden_dim=8))


def _trained(environment: Environment, config: PPOConfig = SMALL) -> Any:
    """(rollout, state after two updates of PPO)."""
    learner = ppo.ppo(environment.spec, config, RunContext(updates=2, mean=lambda x: x))
    gather = collector(vectorise(environment, 4), learner.act, learner.memory, steps=16)

    @jax.jit
    def update(state: Any, carry: Any, key: jax.Array) -> Any:
        carry, data, _ = gather.collect(learner.policy(state), carry, key, jnp.int32(0))
        state, metrics = learner.learn(state, data, jax.random.fold_in(key, 1))
        return state, carry, data, metrics

    state, carry = jax.jit(learner.init)(jax.random.key(5)), jax.jit(gather.start)(jax.random.key(6))
    for number in range(2):
        state, carry, data, metrics = update(state, carry, jax.random.key(number))
    return data, state, metrics


@pytest.mark.slow
def test_ppo_stores_packed_observations_and_learns_the_same() -> None:
    game = hackmatrix(64)
    packed, state, metrics = _trained(game)
    wide, wide_state, wide_metrics = _trained(Expanded(game))
    stored = packed.observation.observation
    assert isinstance(stored, observation.Packed)
    assert jax.tree.map(lambda x: (x.shape[2:], x.dtype), stored) == jax.tree.map(
        lambda x: (x.shape, x.dtype), observation.shapes()
    )
    np.testing.assert_array_equal(observation.expand(stored), wide.observation.observation)
    same: Callable[..., Any] = np.testing.assert_array_equal
    jax.tree.map(same, (packed.action, state, metrics), (wide.action, wide_state, wide_metrics))


def test_the_short_input_leaves_out_only_numbers_that_are_always_0() -> None:
    _, seen, *_ = _played()
    packed = seen.observation
    whole, short = np.asarray(observation.expand(packed)), np.asarray(observation.TRAINER.expand(packed))
    places = np.array(observation.TRAINER.places)
    assert (len(places), len(set(places.tolist()))) == (1325, 1325)
    np.testing.assert_array_equal(short, whole[..., places])
    assert not np.delete(whole, places, axis=-1).any()


@pytest.mark.slow
def test_any_words_expand_as_their_bits_say() -> None:
    """Cells of any content, question blocks and the stunned among them, read one by one."""
    rng = np.random.default_rng(0)
    n = 40
    board = [rng.integers(0, most, (n, CELLS)) for most in (4, 10, 23, 10, 4, 4, 2, 2, 2, 2)]
    life = [rng.integers(0, most, (n, CELLS)) for most in (16, 4, 2, 2, 5)]
    words = sum(part << shift for part, shift in zip(board, (0, 2, 6, 11, 15, 17, 19, 20, 21, 22), strict=True))
    alive = sum(part << shift for part, shift in zip(life, (0, 4, 6, 7, 8), strict=True))
    player = rng.integers(0, 4, (n, 9))
    owned = rng.integers(0, 1 << 23, n)
    packed = observation.Packed(
        jnp.asarray(player, jnp.int16), jnp.asarray(owned, jnp.uint32), jnp.asarray(words, jnp.int32),
        jnp.asarray(alive, jnp.int16),
    )  # fmt: skip
    expected = np.zeros((n, CELLS, 42))
    kind, points, program, spawn, credits, energy, siphoned, centre, pickup, leads = board
    for channel, value in enumerate((*((life[0] >> k & 1) for k in range(4)), life[1] / 3, life[2], life[3])):
        expected[..., channel] = value
    for k in (1, 2, 3):
        expected[..., 6 + k] = kind == k
    expected[..., 10], expected[..., 11] = points / 9, siphoned
    for p in range(23):
        expected[..., 12 + p] = (program == p) & (kind >= 2)
    tail = (spawn / 9, life[4] / 4, credits / 3, energy / 3, pickup, leads, centre)
    for channel, value in enumerate(tail, start=35):
        expected[..., channel] = value
    scale = np.array([5, 5, 3, 50, 50, 7, 10, 2])
    about = (player[:, :8] - np.array([0, 0, 0, 0, 0, 1, 0, 1])) / scale
    flags = np.stack([player[:, 8] & 1, player[:, 8] >> 1 & 1], -1)
    programs = owned[:, None] >> np.arange(23) & 1
    expected = np.concatenate([about, flags, programs, expected.reshape(n, -1)], -1)
    found = jax.jit(observation.expand)(packed)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    one = jax.tree.map(lambda x: x[3], packed)
    np.testing.assert_array_equal(observation.expand(one), found[3])


def test_the_recipes_network_is_the_trainers() -> None:
    """1545 inputs, two shared layers of 256, 28 actions and a value."""
    settings = recipes.recipe("hackmatrix").algorithm
    network = algorithms_actor_critic.network(hackmatrix(8).spec, settings)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    assert actor_critic.count(shapes) == 469_021
    assert shapes["torso"]["layer_0"]["kernel"].shape == (1545, 256)
    assert (settings.adam_eps, settings.network.init) == (1e-8, "lecun")


@pytest.mark.slow
def test_without_a_learning_rate_the_policy_stays_what_acted() -> None:
    """The trainer's own approx_kl is then 1e-5 to 4e-5: it pairs actions with other observations."""
    changes = {"lr": 0.0, "hidden_dim": 32, "num_minibatches": 2, "chunk": 32}
    settings = replaced(recipes.recipe("hackmatrix").algorithm, **changes)
    _, _, metrics = _trained(hackmatrix(64), settings)
    assert abs(float(metrics["ppo/approx_kl"])) < 1e-6
    assert float(metrics["ppo/clip_fraction"]) == 0.0
    assert float(metrics["ppo/grad_norm"]) > 1e-3


def test_packed_observations_cannot_be_normalised() -> None:
    with pytest.raises(ValueError, match="stored packed"):
        ppo.ppo(hackmatrix(8).spec, PPOConfig(normalise_observation=True), RunContext(updates=1, mean=lambda x: x))
