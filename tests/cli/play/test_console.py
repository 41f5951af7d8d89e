"""Games on a terminal: by keys, and an agent's, watched; the terminal is given back whatever happens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from longhaul.cli.play import console, terminal
from longhaul.cli.play.console import Look
from longhaul.cli.play.games import Choice, Game, Moment, Playing
from longhaul.envs.hackmatrix import screen
from longhaul.envs.hackmatrix import state as w
from tests.cli.play.test_terminal import CONTROL, ENTER, KEYPAD_OFF, LEAVE, Terminal
from tests.envs.hackmatrix.test_screen import made

ROOT = Path(__file__).resolve().parents[3]

LOOK = Look("HackMatrix", screen.ASCII)


def corridor(length: int) -> Game:
    """A game of plain Python: go right to win after `length` steps; anything else is death. For loops and screens."""
    legal = tuple(action in (w.LEFT, w.RIGHT) for action in range(28))
    state = dataclasses.make_dataclass("State", ["tally"])
    tally = dataclasses.make_dataclass("Tally", ["stage"])

    def begin(number: int) -> Playing:
        return Playing(number, Moment(state(tally(1)), (), ()), made(legal=legal))

    def step(playing: Playing, action: int) -> Playing:
        view, acted = playing.view, (*playing.actions, action)
        end = "died" if action == w.LEFT else "won" if len(acted) == length else ""
        parts = (view.parts[0] - 0.01, *view.parts[1:])
        view = view._replace(col=min(len(acted), 5), steps=len(acted), parts=parts, over=bool(end))
        last = screen.Last(action, -0.01, (-0.01,) + (0.0,) * 14)
        return playing._replace(view=view, actions=acted, end=end, last=last)

    def choose(playing: Playing) -> Choice:
        chances = [0.0] * 28
        chances[w.RIGHT], chances[w.LEFT] = 0.75, 0.25
        return Choice(w.RIGHT, screen.Opinion(tuple(chances), 0.5), ())

    return Game(begin, step, choose)


class Keys:
    """A screen whose keys are known beforehand; None is time that passes. It keeps what was drawn."""

    def __init__(self, *keys: str | None):
        self.waiting, self.drawn, self.waits = list(keys), [], []

    def key(self, seconds: float | None) -> str | None:
        self.waits.append(seconds)
        return self.waiting.pop(0) if self.waiting else terminal.END

    def draw(self, lines: Any) -> None:
        self.drawn.append([terminal.plain(line) for line in lines])

    @property
    def screen(self) -> terminal.Screen:
        return terminal.Screen(self.draw, self.key)


def test_keys_play_and_leaving_a_game_asks_first() -> None:
    keys = Keys("right", "l", "k", "%", "n", "h", "n", "N", "L", "n", "n", "?", "x", "y", "q")
    records = console.by_keys(corridor(9), LOOK, keys.screen)
    messages = [drawn[-2] for drawn in keys.drawn if len(drawn) == 24]
    assert "up: a block is in the way" in messages[3]
    assert messages[4] == "'%' is no action; ? shows what there is"
    assert messages[5] == "n again leaves this game and begins another"
    assert messages[6].startswith("died on stage 1, after 3 steps; n: a new game")
    assert [(r.episode, [w.NAMES[a] for a in r.actions or ()], r.end) for r in records] == [
        (0, ["right", "right", "left"], "died"), (2, ["right"], "left"),
    ]  # fmt: skip
    assert [drawn[0].split()[2] for drawn in keys.drawn if len(drawn) == 24][-1] == "4"
    pages = [drawn[0] for drawn in keys.drawn if not drawn[0].startswith("HackMatrix, ")]
    assert [page.split()[0] for page in pages] == ["HackMatrix:", "Programs:"]


def test_a_game_that_is_won_is_told() -> None:
    keys = Keys("l", "l", "up", "q")
    (record,) = console.by_keys(corridor(2), LOOK, keys.screen)
    assert keys.drawn[2][-2] == "won with 0 points; n: a new game, q: quit"
    assert (record.end, record.length) == ("won", 2)


def test_an_agents_game_is_paused_stepped_hastened_and_left() -> None:
    keys = Keys(None, " ", ".", ".", " ", "+", None, "-", "-", None, "n", None, None, "q")
    records = console.watched(corridor(7), LOOK, keys.screen, episodes=3, limit=50, delay=1.0)
    assert [(r.episode, r.length, r.end) for r in records] == [(0, 5, "left"), (1, 2, "left")]
    paused = [seconds is None for seconds in keys.waits]
    assert paused == [False, False, True, True, True, False, False, False, False, False, False, False, False, False]
    said = [drawn[-2] for drawn in keys.drawn]
    assert said.count("paused; next: right") == 2
    assert keys.drawn[0][-3] == "value +0.50  right 75 %  left 25 %"


def test_an_agents_game_is_cut_and_its_end_is_shown_for_longer() -> None:
    keys = Keys(*[None] * 40)
    records = console.watched(corridor(7), LOOK, keys.screen, episodes=2, limit=4, delay=0.5)
    assert [(r.length, r.end) for r in records] == [(4, "cut"), (4, "cut")]
    longest = [i for i, seconds in enumerate(keys.waits) if seconds is not None and seconds > 1]
    assert longest == [4, 9]
    assert keys.drawn[4][-2] == "stopped on stage 1, after 4 steps"


STAND_IN = """
import sys
sys.path.insert(0, {root!r})
from longhaul.cli import main as cli
from longhaul.cli.play import games as spectating
from tests.cli.play import test_console
spectating.game = lambda *_, **__: test_console.corridor(5)
sys.exit(cli.main(["play", "hackmatrix"]))
"""


@pytest.mark.slow
def test_on_a_terminal_keys_play_the_game_and_q_gives_the_terminal_back() -> None:
    with Terminal("-m", "longhaul", "play", "hackmatrix", NO_COLOR="1") as there:
        there.until(ENTER, 300)
        there.until("stage 1 of 8  turn 0")
        there.send("\x1bOA")
        there.until("up: +0.04")
        there.send("ll")
        there.until("turn 3")
        there.send("?")
        there.until("get through 8 stages alive")
        there.send("xxq")
        code, text = there.end()
        assert code == 0
        assert there.is_as_before()
        after = text[text.index(LEAVE) :].split(KEYPAD_OFF)[-1]
        assert "\x1b" not in after
        assert after.split()[:2] == ["1", "game"]
        assert "0.120" in after


@pytest.mark.slow
def test_q_ctrl_c_and_an_error_give_the_terminal_back() -> None:
    """The whole command, but for the game, which takes long to compile."""
    program = STAND_IN.format(root=str(ROOT))
    with Terminal("-c", CONTROL + program) as there:
        there.until("stage 1 of 8", 300)
        there.send("l")
        there.until("right: ")
        assert not there.is_as_before()
        there.send("\x03")
        code, text = there.end()
        assert code == 1
        assert text.index(LEAVE) < text.index("longhaul: error: interrupted")
        assert there.is_as_before()
    with Terminal("-c", program, NO_COLOR="1") as there:
        there.until("stage 1 of 8", 300)
        there.send("\x1bOC\x1bOCq")
        code, text = there.end()
        assert code == 0
        after = text[text.index(LEAVE) :].split(KEYPAD_OFF)[-1]
        assert "\x1b" not in after
        assert after.split()[:2] == ["1", "game"]
        assert there.is_as_before()
    broken = program.replace("test_console.corridor(5)", "test_console.corridor(5)._replace(step=None)")
    with Terminal("-c", broken) as there:
        there.until("stage 1 of 8", 300)
        there.send("l")
        code, text = there.end()
        assert code == 1
        assert text.index(LEAVE) < text.index("longhaul: error: TypeError")
        assert there.is_as_before()
