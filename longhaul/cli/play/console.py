"""Games at the terminal: played by keys or by words, watched on a screen or printed step by step.

Each of these loops returns the records of its games; what is played is decided elsewhere, and nothing of a terminal is
known here but lines to be shown and keys that come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from longhaul.cli.play import games
from longhaul.cli.play.games import Choice, Game, Playing, Record
from longhaul.cli.play.terminal import END, Screen, plain
from longhaul.envs.hackmatrix import screen
from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.screen import Line

KEYS = "arrows, hjkl: go   s: siphon   letters: programs   n: new game   q: quit   ?: help"
WATCHING = "space: pause   .: one step   + -: faster, slower   n: next game   q: quit"
WORDS = "a name or number of an action a line; new, help, quit"
HOLD = 5
"""Steps' time for which the end of a game is shown."""

FASTEST, SLOWEST = 0.02, 5.0
"""Seconds a step that keys can set."""

Write = Callable[[str], None]


class Look(NamedTuple):
    """Style in which games are shown."""

    title: str
    style: screen.Style
    reveal: bool = False  # what the player does not see, too


def lines(
    playing: Playing, look: Look, *, choice: Choice | None = None, message: str = "", keys: str = ""
) -> list[Line]:
    """The screen of a game."""
    return screen.screen(
        playing.view, title=f"{look.title}, game {playing.number + 1}", last=playing.last,
        opinion=None if choice is None else choice.opinion, message=message, keys=keys, style=look.style,
        reveal=look.reveal,
    )  # fmt: skip


def ended(playing: Playing) -> str:
    """Outcome of a game, in words; "" while it goes on."""
    view = playing.view
    if playing.end == "won":
        return f"won with {view.score} points"
    where = f"on stage {view.stage}, after {view.steps} steps"
    return {"died": f"died {where}", "cut": f"stopped {where}"}.get(playing.end, "")


# ---------------------------------------------------------------------------------------------------------- by hand


def by_keys(game: Game, look: Look, window: Screen) -> list[Record]:
    """Games played by single keys."""
    records: list[Record] = []
    playing, message, asked = game.begin(0), "", False
    while True:
        if playing.end:
            message = f"{ended(playing)}; n: a new game, q: quit"
        window.draw(lines(playing, look, message=message, keys=KEYS))
        key = window.key(None) or ""
        sure, asked, message = asked or bool(playing.end) or not playing.actions, False, ""
        if key in (END, "q", "Q"):
            return records + _unfinished_record(playing)
        if key in ("n", "N"):
            if sure:
                records += _unfinished_record(playing)
                playing = game.begin(playing.number + 1)
            else:
                asked, message = True, "n again leaves this game and begins another"
        elif key == "?":
            for page in screen.pages(look.style):
                window.draw(page)
                window.key(None)
        else:
            playing, message = _after_action(game, playing, screen.ACTION_OF.get(key.lower()), key)


def _after_action(game: Game, playing: Playing, action: int | None, word: str) -> tuple[Playing, str]:
    """The game after an action, or as it is and why."""
    if action is None:
        return playing, f"{word!r} is no action; ? shows what there is" if word else ""
    refused = screen.why(playing.view, action)
    return (playing, refused) if refused is not None else (game.step(playing, action), "")


def _unfinished_record(playing: Playing) -> list[Record]:
    """The record of a game that is left; none where nothing was done."""
    return [games.record(playing)] if playing.actions else []


def by_words(game: Game, look: Look, words: Iterable[str], write: Write) -> list[Record]:
    """Games played by words; `write` gets lines of text."""
    records: list[Record] = []
    playing = game.begin(0)
    _write(lines(playing, look, keys=WORDS), write)
    for word in words:
        if word.lower() in ("q", "quit"):
            break
        if word.lower() in ("n", "new"):
            records += _unfinished_record(playing)
            playing, message = game.begin(playing.number + 1), ""
        elif word.lower() in ("?", "help"):
            for page in screen.pages(look.style):
                _write(page, write)
            continue
        else:
            action = screen.action_of(word)
            action = screen.ACTION_OF.get(word.lower()) if action is None else action
            before = playing
            playing, message = _after_action(game, playing, action, word)
            if playing is before:
                write(message)
                continue
        _write(lines(playing, look, message=ended(playing)), write)
    return records + _unfinished_record(playing)


def split(stream: Iterable[str]) -> Iterator[str]:
    """The words of lines, as they come; what follows a "#" is none."""
    for line in stream:
        yield from line.partition("#")[0].split()


def _write(shown: Sequence[Line], write: Write) -> None:
    texts = [plain(line) for line in shown]
    while texts and not texts[-1]:
        texts.pop()
    for text in (*texts, ""):
        write(text)


# -------------------------------------------------------------------------------------------------------- an agent's


class Pace(NamedTuple):
    delay: float  # seconds a step
    paused: bool = False


def watched(game: Game, look: Look, window: Screen, *, episodes: int, limit: int, delay: float) -> list[Record]:
    """An agent's games on a screen, until all are played or a key ends it."""
    records: list[Record] = []
    pace, word = Pace(delay), "step"
    for number in range(episodes):
        playing = game.begin(number)
        while not playing.end:
            choice = _choice(game, playing)
            message = f"{'paused; ' if pace.paused else ''}next: {w.NAMES[choice.action]}"
            window.draw(lines(playing, look, choice=choice, message=message, keys=WATCHING))
            word, pace = _wait(window, pace)
            if word != "step":
                break
            playing = _after_agent(game, playing, choice, limit)
        records += _unfinished_record(playing)
        if playing.end:
            window.draw(lines(playing, look, message=ended(playing), keys=WATCHING))
            word, pace = _wait(window, pace, times=HOLD)
        if word == "quit":
            break
    return records


def _wait(window: Screen, pace: Pace, times: int = 1) -> tuple[str, Pace]:
    """("step", "next" or "quit", the pace that keys have set) after the time of a step, or of several."""
    until = time.monotonic() + times * pace.delay
    while True:
        key = window.key(None if pace.paused else max(0.0, until - time.monotonic()))
        if key is None or key in (".", "right"):
            return "step", pace
        if key in (END, "q", "Q"):
            return "quit", pace
        if key in ("n", "N"):
            return "next", pace
        if key == " ":
            pace = pace._replace(paused=not pace.paused)
        elif key in "+-" and key:
            delay = pace.delay / 2 if key == "+" else max(pace.delay, FASTEST) * 2
            pace = pace._replace(delay=min(max(delay, FASTEST), SLOWEST))


def printed(game: Game, look: Look, *, episodes: int, limit: int, boards: bool, write: Write) -> list[Record]:
    """An agent's games as text: a board, or a line, a step."""
    records = []
    for number in range(episodes):
        playing = game.begin(number)
        while not playing.end:
            choice = _choice(game, playing)
            if boards:
                _write(lines(playing, look, choice=choice, message=f"next: {w.NAMES[choice.action]}"), write)
            playing = _after_agent(game, playing, choice, limit)
            if not boards:
                write(line(playing, choice))
        if boards:
            _write(lines(playing, look, message=ended(playing)), write)
        records.append(games.record(playing))
    return records


def line(playing: Playing, choice: Choice) -> str:
    """The step that a choice led to, in a line."""
    assert playing.last is not None
    chance = choice.opinion.probabilities[choice.action]
    end = f"  {ended(playing)}" if playing.end else ""
    return (
        f"game {playing.number + 1}  step {len(playing.actions)}  {w.NAMES[choice.action]} {100 * chance:.0f} %  "
        f"value {choice.opinion.value:+.2f}  reward {playing.last.reward:+.2f}{end}"
    )


def _choice(game: Game, playing: Playing) -> Choice:
    assert game.choose is not None
    return game.choose(playing)


def _after_agent(game: Game, playing: Playing, choice: Choice, limit: int) -> Playing:
    """The game after the agent's choice; cut at the most steps."""
    after = game.step(games.remembered(playing, choice), choice.action)
    return after if after.end or len(after.actions) < limit else after._replace(end="cut")
