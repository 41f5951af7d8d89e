"""Text as numbers: what a tokeniser is, and the 23 characters of the tasks that are made here; no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

CHARACTERS = "_0123456789+-*/=;>$,:()"
"""All there are. `_` pads; `;` ends a written step, `>` begins the answer, `$` ends a text."""

PAD, STEP, ANSWER, END = (CHARACTERS.index(character) for character in "_;>$")


class Tokeniser(NamedTuple):
    """Text to numbers and back."""

    size: int  # of the vocabulary
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def encode(text: str) -> list[int]:
    """A number a character. Raises ValueError for one that is not of the vocabulary."""
    for character in text:
        if character not in CHARACTERS:
            raise ValueError(f"{character!r} is no character of the vocabulary, {CHARACTERS[1:]}")
    return [CHARACTERS.index(character) for character in text]


def decode(numbers: Sequence[int]) -> str:
    """The text up to its end, `$`, or to the first padding after it began."""
    text = "".join(CHARACTERS[int(number)] for number in numbers).lstrip("_").split("_", 1)[0]
    head, end, _ = text.partition("$")
    return head + end


TOKENISER = Tokeniser(len(CHARACTERS), encode, decode)
