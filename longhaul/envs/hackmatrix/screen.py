"""Screen of HackMatrix: one game as a player sees it (`View`), hints, and styled lines, 80 columns by 24 rows.

A view's cells come from the 1,545 numbers that a network sees, which are the same for both rule sets; enemies and
transmissions from their slots, since several may share a cell. The mask decides what is legal; hints only explain it.

A cell of the screen shows who is in it above and what is in it below; `pages` explains the signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from longhaul.envs.hackmatrix import reward
from longhaul.envs.hackmatrix import state as w


class Cell(NamedTuple):
    """One cell. Its content is what may be known: a question block tells none."""

    kind: int  # NONE, DATA, PROGRAM, QUESTION
    points: int
    program: int  # action id, -1 for none
    spawn: int
    credits: int
    energy: int
    siphoned: bool
    centre: bool
    pickup: bool
    exit: bool


class Enemy(NamedTuple):
    kind: int
    hp: int
    row: int
    col: int
    stunned: bool
    hidden: bool  # a cryptog that the player does not see


class Sent(NamedTuple):
    """A transmission."""

    turns: int  # left
    row: int
    col: int


class View(NamedTuple):
    row: int
    col: int
    hp: int
    credits: int
    energy: int
    siphons: int
    attack: int
    score: int
    stage: int
    turn: int
    next_task: int
    show: bool
    calm: bool
    step: bool
    over: bool
    steps: int
    programs: tuple[int, ...]  # action ids
    legal: tuple[bool, ...]  # by action
    cells: tuple[Cell, ...]  # row by row from the bottom
    enemies: tuple[Enemy, ...]
    sent: tuple[Sent, ...]
    parts: tuple[float, ...]  # sums of the parts of the reward so far


def view(state: Any, seen: np.ndarray, mask: np.ndarray) -> View:
    """View of a game: its state, the 1,545 numbers and the legal actions, all on the host."""
    names = ("row", "col", "hp", "credits", "energy", "siphons", "attack", "score", "stage", "turn", "next_task")
    numbers: dict[str, Any] = {name: int(getattr(state, name)) for name in names}
    flags: dict[str, Any] = {name: bool(getattr(state, name)) for name in ("show", "calm", "step", "over")}
    tally = state.tally
    e, p = state.enemies, state.pending
    enemies = []
    for i in np.flatnonzero(e.alive).tolist():
        place = int(e.row[i]), int(e.col[i])
        inline = place[0] == numbers["row"] or place[1] == numbers["col"]
        hidden = int(e.kind[i]) == w.CRYPTOG and not inline and not flags["show"]
        enemies.append(Enemy(int(e.kind[i]), int(e.hp[i]), *place, bool(e.stunned[i]), hidden))
    owned = int(state.programs)
    return View(
        **numbers,
        **flags,
        steps=int(tally.moves) + int(tally.siphons) + int(tally.programs),
        programs=tuple(w.FIRST_PROGRAM + i for i in range(w.PROGRAMS) if owned >> i & 1),
        legal=tuple(bool(flag) for flag in mask),
        cells=cells(seen),
        enemies=tuple(enemies),
        sent=tuple(Sent(int(p.turns[i]), int(p.row[i]), int(p.col[i])) for i in np.flatnonzero(p.turns > 0).tolist()),
        parts=tuple(float(part) for part in tally.parts),
    )


def cells(seen: np.ndarray) -> tuple[Cell, ...]:
    """The cells of an observation, float32 [1545]."""
    grid = np.asarray(seen, np.float64)[10 + w.PROGRAMS :].reshape(w.CELLS, -1)
    board = []
    for channels in grid:
        block, programs = channels[7:10] > 0.5, channels[12:35] > 0.5
        board.append(
            Cell(
                kind=int(np.argmax(block)) + 1 if block.any() else w.NONE,
                points=round(9 * channels[10]),
                program=w.FIRST_PROGRAM + int(np.argmax(programs)) if programs.any() else -1,
                spawn=round(9 * channels[35]),
                credits=round(3 * channels[37]),
                energy=round(3 * channels[38]),
                siphoned=bool(channels[11] > 0.5),
                centre=bool(channels[41] > 0.5),
                pickup=bool(channels[39] > 0.5),
                exit=bool(channels[40] > 0.5),
            )
        )
    return tuple(board)


# ---------------------------------------------------------------------------------------------------------------- hints


class Program(NamedTuple):
    key: str
    does: str
    needs: str = "the rules do not allow it now"  # why it is not legal where it is owned and paid for


PROGRAMS = {
    w.PUSH: Program("p", "every enemy goes one cell away from you", "there is no enemy"),
    w.PULL: Program("f", "every enemy comes one cell nearer", "there is no enemy"),
    w.CRASH: Program(
        "c",
        "harms enemies; needs something in the eight cells around you",
        "there is no block, enemy or transmission in the eight cells around you",
    ),
    w.WARP: Program(
        "w", "to a random enemy or transmission, which is removed", "there is no enemy and no transmission"
    ),
    w.POLY: Program("y", "every enemy becomes one of another kind", "there is no enemy"),
    w.WAIT: Program(".", "passes the turn"),
    w.DEBUG: Program("d", "harms enemies on blocks", "no enemy stands on a block"),
    w.ROW: Program("r", "harms enemies in your row", "no enemy is in your row"),
    w.COL: Program("o", "harms enemies in your column", "no enemy is in your column"),
    w.UNDO: Program("u", "takes the last step back, as far as the rules let it", "there is nothing to take back"),
    w.STEP: Program("t", "enemies do not move in their next turn"),
    w.SIPH: Program("i", "a data siphon"),
    w.EXCH: Program("x", "credits into 4 energy", "there are no credits"),
    w.SHOW: Program("v", "cryptogs are seen, in this stage", "it is on"),
    w.RESET: Program("e", "full health", "your health is full"),
    w.CALM: Program("m", "no more scheduled transmissions", "it is on"),
    w.D_BOM: Program("b", "the nearest daemon explodes", "there is no daemon"),
    w.DELAY: Program("z", "transmissions come 3 turns later", "there is no transmission"),
    w.ANTI_V: Program("a", "harms viruses", "there is no virus"),
    w.SCORE: Program("$", "points, the more the earlier the stage", "it is the last stage"),
    w.REDUC: Program(
        "-", "siphoning unsiphoned blocks sends one transmission fewer", "no unsiphoned block would send anything"
    ),
    w.ATK: Program(
        "+", "stronger attacks, twice a stage", "it was used twice in this stage, or the attack is at its most"
    ),
    w.HACK: Program("g", "harms enemies on siphoned blocks", "there is no siphoned block"),
}
"""The programs by action; h, j, k, l, n, q and s are other keys."""

ACTION_OF = {program.key: action for action, program in PROGRAMS.items()} | {
    "up": w.UP, "down": w.DOWN, "left": w.LEFT, "right": w.RIGHT,
    "k": w.UP, "j": w.DOWN, "h": w.LEFT, "l": w.RIGHT, "s": w.SIPHON, " ": w.SIPHON,
}  # fmt: skip


def why(view: View, action: int) -> str | None:
    """Why an action is not legal now; None where it is."""
    name = w.NAMES[action]
    if view.over:
        return "the game is over"
    if view.legal[action]:
        return None
    if action < w.SIPHON:
        row, col = view.row + int(w.DROW[action]), view.col + int(w.DCOL[action])
        if not (0 <= row < w.SIDE and 0 <= col < w.SIDE):
            return f"{name}: the board ends there"
        return f"{name}: a block is in the way, and there is nothing to strike"
    if action == w.SIPHON:
        return "siphon: you have no data siphon"
    if action not in view.programs:
        return f"{name}: you do not own it; siphon beside a block that holds it"
    for currency, cost, stock in (("credits", w.CREDITS, view.credits), ("energy", w.ENERGY, view.energy)):
        if stock < cost[action]:
            return f"{name}: it costs {cost[action]} {currency}, and you have {stock}"
    return f"{name}: {PROGRAMS[action].needs}"


def cost(action: int) -> str:
    """Cost of an action: "3c2e", "2e", "" for nothing."""
    parts = ((w.CREDITS[action], "c"), (w.ENERGY[action], "e"))
    return "".join(f"{amount}{unit}" for amount, unit in parts if amount)


def action_of(word: str) -> int | None:
    """The action of a word: its name, or its number."""
    if word.isdecimal() and word.isascii() and int(word) < w.ACTIONS:
        return int(word)
    return w.NAMES.index(word.lower()) if word.lower() in w.NAMES else None


# ----------------------------------------------------------------------------------------------------------- the screen

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
        who = [_occupants_line(view, row, col, style, reveal) for col in range(w.SIDE)]
        contents = [_contents_line(view.cells[w.SIDE * row + col], style) for col in range(w.SIDE)]
        lines += [_framed(who, style), _framed(contents, style)]
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


def _occupants_line(view: View, row: int, col: int, style: Style, reveal: bool) -> list[Span]:
    """The upper line of a cell: the player, enemies, transmissions; at its right end what a block sends."""
    spans: list[Span] = [(style.player, "bold green")] if (view.row, view.col) == (row, col) else []
    for enemy in view.enemies:
        if (enemy.row, enemy.col) == (row, col) and (reveal or not enemy.hidden):
            text = f"{LETTERS[enemy.kind]}{enemy.hp}{'~' if enemy.stunned else ''}"
            spans.append((text, f"bold {KINDS[enemy.kind]}"))
    spans += [(f"{style.sent}{s.turns}", "blue") for s in view.sent if (s.row, s.col) == (row, col)]
    cell = view.cells[w.SIDE * row + col]
    sends = f"x{cell.spawn}" if cell.kind != w.NONE and cell.spawn and not cell.siphoned else ""
    shown = _fit(spans, WIDTH - len(sends))
    gap = WIDTH - _length(shown) - len(sends)
    return [*shown, (" " * gap, ""), (sends, "dim")] if sends else shown


def _fit(spans: list[Span], room: int) -> list[Span]:
    """Spans that fit; "+4" stands for four more."""
    if _length(spans) <= room:
        return spans
    for count in range(len(spans) - 1, -1, -1):
        more = f"+{len(spans) - count}"
        if _length(spans[:count]) + len(more) <= room:
            return [*spans[:count], (more, "bold")]
    return []


def _contents_line(cell: Cell, style: Style) -> list[Span]:
    """The lower line of a cell: its block, or what lies there."""
    if cell.kind != w.NONE:
        mark = style.siphoned if cell.siphoned else style.block
        named = cell.kind in (w.PROGRAM, w.QUESTION) and cell.program >= 0
        text = w.NAMES[cell.program].upper() if named else str(cell.points) if cell.kind == w.DATA else "?"
        return [(mark + text, "dim" if cell.siphoned else "cyan" if cell.kind == w.PROGRAM else "blue")]
    content: list[Span] = []
    if cell.exit:
        content.append(("EXIT", "bold green"))
    if cell.pickup:
        content.append((style.pickup, "bold yellow"))
    content += [(f"{n}{unit}", "yellow") for n, unit in ((cell.credits, "c"), (cell.energy, "e")) if n]
    if cell.centre or cell.siphoned:
        content.append((style.centre if cell.centre else style.siphoned, "dim"))
    spaced = [span for part in content for span in ((" ", ""), part)][1:]
    return spaced if _length(spaced) <= WIDTH else content


# --------------------------------------------------------------------------------------------------- what is beside it


def panel(view: View) -> list[Line]:
    """Stage, stocks and programs: at most 19 lines of 30 columns."""
    health = "green" if view.hp > 2 else "yellow" if view.hp > 1 else "bold red"
    active = [name for name, is_on in (("show", view.show), ("calm", view.calm), ("step", view.step)) if is_on]
    won = view.stage > w.STAGES
    stage = "won" if won else f"stage {view.stage} of {w.STAGES}"
    lines: list[Line] = [
        ((f"{stage:14}", "bold"), (f"turn {view.turn}", "")),
        ((f"{f'hp {view.hp} of {w.MOST_HP}':14}", health), (f"attack {view.attack}", "")),
        ((f"{f'credits {view.credits}':14}energy {view.energy}", ""),),
        ((f"{f'siphons {view.siphons}':14}score {view.score}", ""),),
        ((f"next task in turn {view.next_task}", "dim"),),
        ((f"on: {', '.join(active)}" if active else "", "cyan"),),
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
    key = f"[{PROGRAMS[action].key}]" if legal else f" {PROGRAMS[action].key} "
    return ((f"{key}{w.NAMES[action]:7}{cost(action):5}", "bold" if legal else "dim"),)


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
    actions = "  ".join(f"{name} {100 * p:.0f} %" for name, p in chances)
    return ((f"value {opinion.value:+.2f}  ", "bold"), (actions, "cyan"))


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
    for action, program in PROGRAMS.items():
        names = f"{w.NAMES[action]:7}{cost(action):5}"
        second.append(((f"  {program.key}  ", "bold"), (names, ""), (program.does, "dim")))
    return [first, second]
