"""Hints for a player of HackMatrix: the keys, what actions do, and why one is not legal.

The mask of legal actions decides; what is said here only explains it, for both rule sets.
"""

from __future__ import annotations

from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.view import View

KEYS = {
    w.SIPHON: "s", w.PUSH: "p", w.PULL: "f", w.CRASH: "c", w.WARP: "w", w.POLY: "y", w.WAIT: ".", w.DEBUG: "d",
    w.ROW: "r", w.COL: "o", w.UNDO: "u", w.STEP: "t", w.SIPH: "i", w.EXCH: "x", w.SHOW: "v", w.RESET: "e",
    w.CALM: "m", w.D_BOM: "b", w.DELAY: "z", w.ANTI_V: "a", w.SCORE: "$", w.REDUC: "-", w.ATK: "+", w.HACK: "g",
}  # fmt: skip
"""The key of each action but the moves; h, j, k, l, n and q are taken."""

ACTION_OF = {key: action for action, key in KEYS.items()} | {
    "up": w.UP, "down": w.DOWN, "left": w.LEFT, "right": w.RIGHT,
    "k": w.UP, "j": w.DOWN, "h": w.LEFT, "l": w.RIGHT, " ": w.SIPHON,
}  # fmt: skip

DOES = {
    w.PUSH: "every enemy goes one cell away from you",
    w.PULL: "every enemy comes one cell nearer",
    w.CRASH: "harms enemies; needs something in the eight cells around you",
    w.WARP: "to a random enemy or transmission, which is removed",
    w.POLY: "every enemy becomes one of another kind",
    w.WAIT: "passes the turn",
    w.DEBUG: "harms enemies on blocks",
    w.ROW: "harms enemies in your row",
    w.COL: "harms enemies in your column",
    w.UNDO: "takes the last step back, as far as the rules let it",
    w.STEP: "enemies do not move in their next turn",
    w.SIPH: "a data siphon",
    w.EXCH: "credits into 4 energy",
    w.SHOW: "cryptogs are seen, in this stage",
    w.RESET: "full health",
    w.CALM: "no more scheduled transmissions",
    w.D_BOM: "the nearest daemon explodes",
    w.DELAY: "transmissions come 3 turns later",
    w.ANTI_V: "harms viruses",
    w.SCORE: "points, the more the earlier the stage",
    w.REDUC: "siphoning unsiphoned blocks sends one transmission fewer",
    w.ATK: "stronger attacks, twice a stage",
    w.HACK: "harms enemies on siphoned blocks",
}

NEEDS = {
    w.PUSH: "there is no enemy",
    w.PULL: "there is no enemy",
    w.CRASH: "there is no block, enemy or transmission in the eight cells around you",
    w.WARP: "there is no enemy and no transmission",
    w.POLY: "there is no enemy",
    w.DEBUG: "no enemy stands on a block",
    w.ROW: "no enemy is in your row",
    w.COL: "no enemy is in your column",
    w.UNDO: "there is nothing to take back",
    w.EXCH: "there are no credits",
    w.SHOW: "it is on",
    w.RESET: "your health is full",
    w.CALM: "it is on",
    w.D_BOM: "there is no daemon",
    w.DELAY: "there is no transmission",
    w.ANTI_V: "there is no virus",
    w.SCORE: "it is the last stage",
    w.REDUC: "no unsiphoned block would send anything",
    w.ATK: "it was used twice in this stage, or the attack is at its most",
    w.HACK: "there is no siphoned block",
}
"""Reason where a program that is owned and paid for is not legal."""


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
    for what, cost, stock in (("credits", w.CREDITS, view.credits), ("energy", w.ENERGY, view.energy)):
        if stock < cost[action]:
            return f"{name}: it costs {cost[action]} {what}, and you have {stock}"
    return f"{name}: {NEEDS.get(action, 'the rules do not allow it now')}"


def cost(action: int) -> str:
    """Cost of an action: "3c2e", "2e", "" for nothing."""
    parts = ((w.CREDITS[action], "c"), (w.ENERGY[action], "e"))
    return "".join(f"{amount}{unit}" for amount, unit in parts if amount)


def action_of(word: str) -> int | None:
    """The action of a word: its name, or its number."""
    if word.isdecimal() and word.isascii() and int(word) < w.ACTIONS:
        return int(word)
    return w.NAMES.index(word.lower()) if word.lower() in w.NAMES else None
