"""The screen of HackMatrix: a view of a game -> styled lines, 80 columns by 24 rows. Pure; nothing is printed here.

A cell shows who is in it above and what is in it below. V2 is a virus with 2 health, D, G and C the other kinds, "~"
behind one is stunned; t1 a transmission that comes in one turn; x5 what siphoning the block sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from longhaul.envs.hackmatrix import hints, reward
from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.view import Cell, View

Span = tuple[str, str]
"""A text and its style: words of STYLES, "" for none."""


Line = tuple[Span, ...]


WIDTH = 7
"""Columns inside a cell."""

PANEL = 12
"""Rows for programs."""

LETTERS = "VDGC"
KINDS = ("red", "yellow", "magenta", "cyan")
"""Styles of enemies by kind."""


class Style(NamedTuple):
    """The characters of a board."""

    player: str
    block: str
    siphoned: str
    pickup: str
    centre: str
    across: str
    down: str
    corners: tuple[tuple[str, str, str], ...]  # a left end, a crossing and a right end: top, middle, bottom
    sent: str


UNICODE = Style("◉", "▓", "░", "◆", "○", "─", "│", (("┌", "┬", "┐"), ("├", "┼", "┤"), ("└", "┴", "┘")), "↯")
ASCII = Style("@", "#", "s", "*", "o", "-", "|", (("+", "+", "+"),) * 3, "t")


class Last(NamedTuple):
    """The last step."""

    action: int
    reward: float
    parts: tuple[float, ...]  # [15]


class Opinion(NamedTuple):
    """Opinion of an agent on a game."""

    probabilities: tuple[float, ...]  # by action; 0 where it is not legal
    value: float


def screen(
    view: View, *, title: str, last: Last | None = None, opinion: Opinion | None = None, message: str = "",
    keys: str = "", style: Style = ASCII, reveal: bool = False,
) -> list[Line]:  # fmt: skip
    """The whole screen. `reveal` shows what the player does not see; `keys` is the line at the end."""
    returned = sum(view.parts)
    state = f"step {view.steps}  return {returned:.2f}"
    head = [(title, "bold"), (" " * max(2, 80 - len(title) - len(state)), ""), (state, "")]
    beside = panel(view)
    lines = [tuple(head)]
    for i, line in enumerate(board(view, style, reveal)):
        lines.append((*line, (" ", ""), *beside[i]) if i < len(beside) else line)
    lines.append(_last(last))
    lines.append(_opinion(opinion) if opinion is not None else _moves(view))
    lines.append(((message, "bold yellow"),))
    lines.append(((keys, "dim"),))
    return lines


# -------------------------------------------------------------------------------------------------------- the board


def board(view: View, style: Style, reveal: bool = False) -> list[Line]:
    """The board with its frame: 19 lines of 49 columns, row 5 above."""
    lines = [_edge(style, 0)]
    for row in reversed(range(w.SIDE)):
        who = [_who(view, row, col, style, reveal) for col in range(w.SIDE)]
        what = [_what(view.cells[w.SIDE * row + col], style) for col in range(w.SIDE)]
        lines += [_framed(who, style), _framed(what, style)]
        lines.append(_edge(style, 1 if row else 2))
    return lines


def _edge(style: Style, place: int) -> Line:
    left, middle, right = style.corners[place]
    return ((left + middle.join([style.across * WIDTH] * w.SIDE) + right, "dim"),)


def _framed(cells: Sequence[Sequence[Span]], style: Style) -> Line:
    spans: list[Span] = [(style.down, "dim")]
    for cell in cells:
        spans += [*cell, (" " * (WIDTH - _length(cell)), ""), (style.down, "dim")]
    return tuple(span for span in spans if span[0])


def _length(spans: Sequence[Span]) -> int:
    return sum(len(text) for text, _ in spans)


def _who(view: View, row: int, col: int, style: Style, reveal: bool) -> list[Span]:
    """The upper line of a cell: the player, enemies, transmissions; at its right end what a block sends."""
    there: list[Span] = [(style.player, "bold green")] if (view.row, view.col) == (row, col) else []
    for enemy in view.enemies:
        if (enemy.row, enemy.col) == (row, col) and (reveal or not enemy.hidden):
            text = f"{LETTERS[enemy.kind]}{enemy.hp}{'~' if enemy.stunned else ''}"
            there.append((text, f"bold {KINDS[enemy.kind]}"))
    there += [(f"{style.sent}{s.turns}", "blue") for s in view.sent if (s.row, s.col) == (row, col)]
    cell = view.cells[w.SIDE * row + col]
    sends = f"x{cell.spawn}" if cell.kind != w.NONE and cell.spawn and not cell.siphoned else ""
    shown = _fit(there, WIDTH - len(sends))
    gap = WIDTH - _length(shown) - len(sends)
    return [*shown, (" " * gap, ""), (sends, "dim")] if sends else shown


def _fit(spans: list[Span], room: int) -> list[Span]:
    """Spans that fit; "+4" stands for four more."""
    if _length(spans) <= room:
        return spans
    for kept in range(len(spans) - 1, -1, -1):
        more = f"+{len(spans) - kept}"
        if _length(spans[:kept]) + len(more) <= room:
            return [*spans[:kept], (more, "bold")]
    return []


def _what(cell: Cell, style: Style) -> list[Span]:
    """The lower line of a cell: its block, or what lies there."""
    if cell.kind != w.NONE:
        mark = style.siphoned if cell.siphoned else style.block
        named = cell.kind in (w.PROGRAM, w.QUESTION) and cell.program >= 0
        text = w.NAMES[cell.program].upper() if named else str(cell.points) if cell.kind == w.DATA else "?"
        return [(mark + text, "dim" if cell.siphoned else "cyan" if cell.kind == w.PROGRAM else "blue")]
    found: list[Span] = []
    if cell.exit:
        found.append(("EXIT", "bold green"))
    if cell.pickup:
        found.append((style.pickup, "bold yellow"))
    found += [(f"{n}{unit}", "yellow") for n, unit in ((cell.credits, "c"), (cell.energy, "e")) if n]
    if cell.centre or cell.siphoned:
        found.append((style.centre if cell.centre else style.siphoned, "dim"))
    spaced = [span for each in found for span in ((" ", ""), each)][1:]
    return spaced if _length(spaced) <= WIDTH else found


# --------------------------------------------------------------------------------------------------- what is beside it


def panel(view: View) -> list[Line]:
    """Stage, stocks and programs: at most 19 lines of 30 columns."""
    health = "green" if view.hp > 2 else "yellow" if view.hp > 1 else "bold red"
    on = [name for name, is_on in (("show", view.show), ("calm", view.calm), ("step", view.step)) if is_on]
    won = view.stage > w.STAGES
    stage = "won" if won else f"stage {view.stage} of {w.STAGES}"
    lines: list[Line] = [
        ((f"{stage:14}", "bold"), (f"turn {view.turn}", "")),
        ((f"{f'hp {view.hp} of {w.MOST_HP}':14}", health), (f"attack {view.attack}", "")),
        ((f"{f'credits {view.credits}':14}energy {view.energy}", ""),),
        ((f"{f'siphons {view.siphons}':14}score {view.score}", ""),),
        ((f"next task in turn {view.next_task}", "dim"),),
        ((f"on: {', '.join(on)}" if on else "", "cyan"),),
        ((f"programs: {'' if view.programs else 'none'}".rstrip(), "bold" if view.programs else "dim"),),
    ]
    entries = [_program(view, action) for action in view.programs]
    rows = min(len(entries), PANEL)
    for i in range(rows):
        second = entries[i + PANEL] if i + PANEL < len(entries) else ()
        lines.append((*entries[i], *second))
    return lines


def _program(view: View, action: int) -> Line:
    """A program with its key, in brackets where it is legal, and its cost: 15 columns."""
    legal = view.legal[action] and not view.over
    key = f"[{hints.KEYS[action]}]" if legal else f" {hints.KEYS[action]} "
    return ((f"{key}{w.NAMES[action]:7}{hints.cost(action):5}", "bold" if legal else "dim"),)


# ----------------------------------------------------------------------------------------------------- the lines below


def _last(last: Last | None) -> Line:
    if last is None:
        return (("", ""),)
    total = "green" if last.reward > 0 else "red" if last.reward < -0.5 else ""
    return ((f"{w.NAMES[last.action]}: ", ""), (f"{last.reward:+.2f}", total), (f"  {parts(last.parts)}", "dim"))


def parts(values: Sequence[float]) -> str:
    """The parts of a reward that are not zero."""
    shown = ((name, value) for name, value in zip(reward.PARTS, values, strict=True) if abs(value) >= 0.0005)
    return ", ".join(f"{name.replace('_', ' ')} {value:+.2f}" for name, value in shown)


def _moves(view: View) -> Line:
    """The moves and the siphon that are legal."""
    if view.over:
        return (("", ""),)
    if not any(view.legal):
        return (("there is nothing that you can do", "dim"),)
    able = [w.NAMES[action] for action in range(w.FIRST_PROGRAM) if view.legal[action]]
    return ((f"you can go or strike: {', '.join(able)}" if able else "you can only run a program", "dim"),)


def _opinion(opinion: Opinion) -> Line:
    """Actions of an agent, likeliest first, and what it believes the rest of the game is worth."""
    ranked = sorted(range(w.ACTIONS), key=lambda action: -opinion.probabilities[action])
    chances = [(w.NAMES[a], opinion.probabilities[a]) for a in ranked[:4] if opinion.probabilities[a] >= 0.005]
    said = "  ".join(f"{name} {100 * p:.0f} %" for name, p in chances)
    return ((f"value {opinion.value:+.2f}  ", "bold"), (said, "cyan"))


def pages(style: Style) -> list[list[Line]]:
    """The pages of help: the keys and what is on the board; the programs."""
    keys = [
        ("arrows", "or h j k l: go, or strike what is in line"), ("s, space", "siphon the best block beside you"),
        ("letters", "run a program, see the next page"), ("n", "a new game"), ("q", "quit"), ("?", "this help"),
    ]  # fmt: skip
    marks = [
        (style.player, "you"), ("V2", "a virus with 2 health: two cells a turn"), ("D3", "a daemon: 3 health at first"),
        ("G2", "a glitch: goes over blocks"), ("C2", "a cryptog: seen in your row or column alone"),
        ("V2~", "one that is stunned"), (f"{style.sent}1", "a transmission: in one turn an enemy comes of it"),
        (f"{style.block}5", "a block with 5 points"), (f"{style.block}PUSH", "a block with a program"),
        ("x5", "siphoning the block sends 5 transmissions"), (f"{style.siphoned}5", "a siphoned block"),
        (style.pickup, "a data siphon: go there to take it"), ("2c 1e", "2 credits, 1 energy"),
        (style.centre, "siphoned from here"), ("EXIT", "the way to the next stage; there are 8"),
    ]  # fmt: skip
    first: list[Line] = [(("HackMatrix: get through 8 stages alive, with a score", "bold"),)]
    first += [((f"  {mark:10}", "bold"), (text, "")) for mark, text in (*keys, *marks)]
    second: list[Line] = [(("Programs: their key, name, cost in credits and energy, and what they do", "bold"),)]
    for action, text in hints.DOES.items():
        names = f"{w.NAMES[action]:7}{hints.cost(action):5}"
        second.append(((f"  {hints.KEYS[action]}  ", "bold"), (names, ""), (text, "dim")))
    return [first, second]
