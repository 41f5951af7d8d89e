"""One game of HackMatrix as a player sees it, in plain numbers: what the screen is drawn from.

Cells come from the 1,545 numbers that a network sees, which are the same for all rule sets; enemies and transmissions
from their slots, since several may share a cell.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

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
    found = []
    for channels in grid:
        block, programs = channels[7:10] > 0.5, channels[12:35] > 0.5
        found.append(
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
    return tuple(found)
