"""The screen of HackMatrix: fixed games as exact text, what a player is told, and views of states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longhaul.cli.play.terminal import COLOURS, STYLES, plain
from longhaul.envs.hackmatrix import screen
from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.screen import Cell, Enemy, Sent, View

EMPTY = Cell(w.NONE, 0, -1, 0, 0, 0, False, False, False, False)


def made(cells: dict[tuple[int, int], Cell] | None = None, **changes: Any) -> View:
    """The first stage's start, with some cells and fields of one's own."""
    grid = [EMPTY] * 36
    grid[35] = EMPTY._replace(exit=True)
    for (row, col), cell in (cells or {}).items():
        grid[6 * row + col] = cell
    start = View(
        row=0, col=0, hp=3, credits=0, energy=0, siphons=0, attack=1, score=0, stage=1, turn=0, next_task=12,
        show=False, calm=False, step=False, over=False, steps=0, programs=(),
        legal=tuple(action in (w.UP, w.RIGHT) for action in range(28)), cells=tuple(grid), enemies=(), sent=(),
        parts=(0.0,) * 15,
    )  # fmt: skip
    return start._replace(**changes)


BUSY = made(
    {
        (0, 1): Cell(w.DATA, 7, -1, 7, 0, 0, False, False, False, False),
        (2, 2): Cell(w.PROGRAM, 0, w.ANTI_V, 2, 0, 0, False, False, False, False),
        (2, 3): Cell(w.DATA, 3, -1, 3, 0, 0, True, False, False, False),
        (3, 1): EMPTY._replace(credits=2),
        (3, 2): EMPTY._replace(energy=3, pickup=True),
        (3, 3): EMPTY._replace(centre=True),
        (4, 4): Cell(w.QUESTION, 0, -1, 0, 0, 0, False, False, False, False),
        (5, 0): EMPTY._replace(pickup=True),
    },
    row=3, col=3, hp=2, credits=5, energy=7, siphons=1, attack=2, score=12, stage=3, turn=14, next_task=29, show=True,
    steps=17, programs=(w.PUSH, w.WAIT, w.HACK), legal=tuple(a in (0, 1, 4, w.PUSH, w.WAIT) for a in range(28)),
    enemies=(
        Enemy(w.VIRUS, 2, 3, 5, False, False), Enemy(w.DAEMON, 3, 2, 2, True, False),
        Enemy(w.GLITCH, 1, 5, 5, False, False), Enemy(w.GLITCH, 2, 5, 5, False, False),
        Enemy(w.VIRUS, 1, 5, 5, False, False), Enemy(w.VIRUS, 1, 5, 5, False, False),
        Enemy(w.CRYPTOG, 2, 0, 0, False, True),
    ),
    sent=(Sent(3, 3, 3), Sent(1, 0, 5)), parts=(-0.17, 3.0, *([0.0] * 13)),
)  # fmt: skip

START = """\
HackMatrix                                                   step 0  return 0.00
+-------+-------+-------+-------+-------+-------+ stage 1 of 8  turn 0
|       |       |       |       |       |       | hp 3 of 3     attack 1
|       |       |       |       |       |EXIT   | credits 0     energy 0
+-------+-------+-------+-------+-------+-------+ siphons 0     score 0
|       |       |       |       |       |       | next task in turn 12
|       |       |       |       |       |       |
+-------+-------+-------+-------+-------+-------+ programs: none
|       |       |       |       |       |       |
|       |       |       |       |       |       |
+-------+-------+-------+-------+-------+-------+
|       |       |       |       |       |       |
|       |       |       |       |       |       |
+-------+-------+-------+-------+-------+-------+
|       |       |       |       |       |       |
|       |       |       |       |       |       |
+-------+-------+-------+-------+-------+-------+
|@      |       |       |       |       |       |
|       |       |       |       |       |       |
+-------+-------+-------+-------+-------+-------+

you can go or strike: up, right

"""

MIDDLE = """\
HackMatrix, game 2                                          step 17  return 2.83
┌───────┬───────┬───────┬───────┬───────┬───────┐ stage 3 of 8  turn 14
│       │       │       │       │       │G1G2+2 │ hp 2 of 3     attack 2
│◆      │       │       │       │       │EXIT   │ credits 5     energy 7
├───────┼───────┼───────┼───────┼───────┼───────┤ siphons 1     score 12
│       │       │       │       │       │       │ next task in turn 29
│       │       │       │       │▓?     │       │ on: show
├───────┼───────┼───────┼───────┼───────┼───────┤ programs:
│       │       │       │◉↯3    │       │V2     │ [p]push   2e
│       │2c     │◆ 3e   │○      │       │       │ [.]wait   1e
├───────┼───────┼───────┼───────┼───────┼───────┤  g hack   2c2e
│       │       │D3~  x2│       │       │       │
│       │       │▓ANTI-V│░3     │       │       │
├───────┼───────┼───────┼───────┼───────┼───────┤
│       │       │       │       │       │       │
│       │       │       │       │       │       │
├───────┼───────┼───────┼───────┼───────┼───────┤
│       │     x7│       │       │       │↯1     │
│       │▓7     │       │       │       │       │
└───────┴───────┴───────┴───────┴───────┴───────┘
right: -0.96  step penalty -0.01, damage penalty -1.00, resource gain +0.05
you can go or strike: up, down, siphon
push: there is no enemy
?: help"""


def text(lines: list[screen.Line]) -> str:
    return "\n".join(plain(line) for line in lines)


def test_the_start_is_drawn_as_it_is_kept() -> None:
    assert text(screen.screen(made(), title="HackMatrix")) == START


def test_a_game_in_the_middle() -> None:
    parts = [0.0] * 15
    parts[0], parts[6], parts[11] = -0.01, -1.0, 0.05
    shown = screen.screen(
        BUSY, title="HackMatrix, game 2", last=screen.Last(w.RIGHT, -0.96, tuple(parts)), keys="?: help",
        message="push: there is no enemy", style=screen.UNICODE,
    )  # fmt: skip
    assert text(shown) == MIDDLE


def test_hidden_cryptogs_are_shown_when_revealed() -> None:
    hidden, all_of_it = (text(screen.board(BUSY, screen.ASCII, reveal)) for reveal in (False, True))
    assert "C2" not in hidden
    assert all_of_it.splitlines()[16].startswith("|C2     |")


def test_it_fits_a_terminal_of_80_by_24_with_all_programs() -> None:
    view = BUSY._replace(programs=tuple(range(5, 28)), legal=(True,) * 28, hp=1)
    lines = screen.screen(view, title="HackMatrix", style=screen.UNICODE)
    assert len(lines) == 24
    assert max(len(plain(line)) for line in lines) <= 80
    assert all(w.NAMES[action] in text(lines) for action in range(5, 28))
    for page in screen.pages(screen.ASCII):
        assert len(page) <= 24
        assert max(len(plain(line)) for line in page) <= 80


def test_ascii_is_ascii_and_styles_are_known() -> None:
    view = BUSY._replace(programs=tuple(range(5, 28)))
    opinion = screen.Opinion(tuple(np.eye(28)[3].tolist()), -1.5)
    for style in (screen.ASCII, screen.UNICODE):
        for line in screen.screen(view, title="x", opinion=opinion, style=style):
            assert plain(line).isascii() or style is screen.UNICODE
            assert {word for _, words in line for word in words.split()} <= {*STYLES, *COLOURS}


def test_an_agents_opinion_names_the_likeliest_actions_first() -> None:
    chances = [0.0] * 28
    chances[w.UP], chances[w.WAIT], chances[w.HACK], chances[w.SIPHON] = 0.25, 0.004, 0.6, 0.146
    line = screen.screen(made(), title="x", opinion=screen.Opinion(tuple(chances), 3.25))[-3]
    assert plain(line) == "value +3.25  hack 60 %  up 25 %  siphon 15 %"


# --------------------------------------------------------------------------------------------------- reasons and keys


@pytest.mark.parametrize(
    ("changes", "action", "reason"),
    [
        ({}, w.UP, None),
        ({}, w.DOWN, "down: the board ends there"),
        ({"row": 3, "col": 3}, w.LEFT, "left: a block is in the way, and there is nothing to strike"),
        ({}, w.SIPHON, "siphon: you have no data siphon"),
        ({}, w.PUSH, "push: you do not own it; siphon beside a block that holds it"),
        ({"programs": (w.CRASH,), "credits": 2, "energy": 9}, w.CRASH, "crash: it costs 3 credits, and you have 2"),
        ({"programs": (w.CRASH,), "credits": 3, "energy": 1}, w.CRASH, "crash: it costs 2 energy, and you have 1"),
        ({"programs": (w.PUSH,), "energy": 2}, w.PUSH, "push: there is no enemy"),
        ({"programs": (w.RESET,), "energy": 4}, w.RESET, "reset: your health is full"),
        ({"over": True}, w.UP, "the game is over"),
    ],
)
def test_why_an_action_is_not_legal(changes: dict[str, Any], action: int, reason: str | None) -> None:
    assert screen.why(made(**changes), action) == reason


def test_there_is_a_reason_exactly_where_the_mask_says_no() -> None:
    view = made(programs=tuple(range(5, 28)), credits=9, energy=9, siphons=1, legal=(False,) * 28)
    for action in range(28):
        assert screen.why(view, action), w.NAMES[action]
        legal = tuple(a == action for a in range(28))
        assert screen.why(view._replace(legal=legal), action) is None


def test_each_action_has_one_key_of_its_own_and_none_of_the_games() -> None:
    keys = ["s", *(program.key for program in screen.PROGRAMS.values())]
    assert set(screen.PROGRAMS) == set(range(w.FIRST_PROGRAM, 28))
    assert len(set(keys)) == len(keys) == 24
    assert not set(keys) & set("hjklnq?")
    assert all(key == key.lower() and len(key) == 1 for key in keys)
    assert {action for key, action in screen.ACTION_OF.items()} == set(range(28))


@pytest.mark.parametrize(
    ("word", "action"),
    [
        ("up", 0),
        ("UP", 0),
        ("27", 27),
        ("siph+", w.SIPH),
        ("anti-v", w.ANTI_V),
        ("28", None),
        ("-1", None),
        ("x", None),
    ],
)
def test_an_action_is_read_from_its_name_or_number(word: str, action: int | None) -> None:
    assert screen.action_of(word) == action


def test_costs_are_said_as_the_rules_have_them() -> None:
    assert [screen.cost(a) for a in (w.UP, w.PUSH, w.CRASH, w.SIPH, w.ATK)] == ["", "2e", "3c2e", "5c", "4c4e"]


# ------------------------------------------------------------------------------------------------ from states to views


def channels(cell: Cell) -> np.ndarray:
    """float32 [42]: a cell by section 9 of the rules, nobody in it."""
    found = np.zeros(42, np.float32)
    if cell.kind != w.NONE:
        found[6 + cell.kind] = 1
    found[10], found[11], found[35] = cell.points / 9, cell.siphoned, cell.spawn / 9
    if cell.program >= 0:
        found[12 + cell.program - 5] = 1
    found[37], found[38] = cell.credits / 3, cell.energy / 3
    found[39], found[40], found[41] = cell.pickup, cell.exit, cell.centre
    return found


def some_cell(rng: np.random.Generator) -> Cell:
    kind = int(rng.integers(4))
    points, spawn, credits, energy = (int(rng.integers(n)) for n in (10, 10, 4, 4))
    program = int(rng.integers(5, 28)) if kind >= w.PROGRAM else -1
    flags = (bool(flag) for flag in rng.integers(0, 2, 4))
    return Cell(kind, points, program, spawn, credits, energy, *flags)


def test_a_view_is_what_the_observation_and_the_slots_say() -> None:
    rng = np.random.default_rng(0)
    grid = [some_cell(rng) for _ in range(36)]
    seen = np.concatenate([rng.random(33, np.float32), np.concatenate([channels(cell) for cell in grid])])
    alive = np.zeros(20, bool)
    alive[[1, 4, 7]] = True
    kind = np.full(20, w.CRYPTOG)
    row, col = np.full(20, 2), np.full(20, 2)
    row[4], kind[7] = 5, w.DAEMON
    turns = np.zeros(20, int)
    turns[3] = 2
    numbers = {
        "row": 5, "col": 1, "hp": 2, "credits": 60, "energy": 3, "siphons": 1, "attack": 2, "score": 8, "stage": 4,
        "turn": 31, "next_task": 40,
    }  # fmt: skip
    state = SimpleNamespace(
        **numbers, show=False, calm=True, step=False, over=False, programs=np.uint32(1 << 5 | 1 << 22),
        tally=SimpleNamespace(moves=7, siphons=1, programs=2, parts=np.arange(15.0)),
        enemies=SimpleNamespace(alive=alive, kind=kind, row=row, col=col, hp=np.arange(20), stunned=alive),
        pending=SimpleNamespace(turns=turns, row=row, col=col),
    )  # fmt: skip
    mask = np.arange(28) % 3 == 0
    view = screen.view(state, seen, mask)
    assert view.cells == tuple(grid)
    assert {name: getattr(view, name) for name in numbers} == numbers
    assert view.programs == (w.WAIT, w.HACK)
    assert view.legal == tuple(mask.tolist())
    assert (view.calm, view.show, view.steps, view.parts[14]) == (True, False, 10, 14.0)
    assert view.enemies == (
        Enemy(w.CRYPTOG, 1, 2, 2, True, True), Enemy(w.CRYPTOG, 4, 5, 2, True, False),
        Enemy(w.DAEMON, 7, 2, 2, True, False),
    )  # fmt: skip
    assert view.sent == (Sent(2, 2, 2),)
    state.show = True
    assert not any(enemy.hidden for enemy in screen.view(state, seen, mask).enemies)
