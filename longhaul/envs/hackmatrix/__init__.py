"""HackMatrix, a turn-based game on six by six cells, as an environment by either of two rule sets."""

from __future__ import annotations

from collections.abc import Callable

from longhaul.envs.hackmatrix import board_generation, environment
from longhaul.envs.hackmatrix.swift_rules.environment import canonical
from longhaul.types import Environment

RULES: dict[str, Callable[..., Environment]] = {"jax": environment.hackmatrix, "canonical": canonical}
"""The rules of the game's JAX trainer [J], and those of the Swift game [S], each with fixes of its own."""


def make(
    boards: int = board_generation.BOARDS, board_seed: int = 0, max_steps: int | None = 1000,
    fixes: tuple[str, ...] = (), rules: str = "jax",
) -> Environment:  # fmt: skip
    """The game by `rules`, one of RULES, on `boards` boards; arguments and errors are those of its function."""
    if rules not in RULES:
        raise ValueError(f"rules is {rules!r}; there are {', '.join(RULES)}")
    return RULES[rules](boards, board_seed, max_steps, fixes)


def fixed(boards: int = board_generation.BOARDS, board_seed: int = 0, max_steps: int | None = 1000) -> environment.Game:
    """The game by the trainer's rules with all of `environment.FIXES`."""
    return environment.hackmatrix(boards, board_seed, max_steps, tuple(environment.FIXES))
