"""Text as numbers: what a tokeniser is, the 23 characters of the tasks that are made here, and bytes; no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

CHARACTERS = "_0123456789+-*/=;>$,:()"
"""All there are. `_` pads; `;` ends a written step, `>` begins the answer, `$` ends a text."""

PAD, STEP, ANSWER, END = (CHARACTERS.index(character) for character in "_;>$")


NONE = -1
"""In the place of a token that a vocabulary does not have."""


class Tokeniser(NamedTuple):
    """Text to numbers and back, and what some of the numbers mean."""

    size: int  # of the vocabulary
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]  # of a completion, up to its end or padding
    pad: int = NONE  # NONE: -1 pads, which no text has
    ends: tuple[int, ...] = ()  # a text ends with any of them; one to learn from with the first
    step: int = NONE  # ends a written step
    answer: int = NONE  # begins the answer


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


TOKENISER = Tokeniser(len(CHARACTERS), encode, decode, PAD, (END,), STEP, ANSWER)


def cut(numbers: Sequence[int], ends: Sequence[int]) -> list[int]:
    """A completion's numbers before its first end, and before padding."""
    found: list[int] = []
    for number in map(int, numbers):
        if number == NONE or number in ends:
            break
        found.append(number)
    return found


BYTE_END = 256


def _text(numbers: Sequence[int]) -> str:
    return bytes(cut(numbers, (BYTE_END,))).decode("utf-8", errors="replace")


BYTES = Tokeniser(257, lambda text: list(text.encode()), _text, ends=(BYTE_END,))
"""UTF-8, and one number that ends a text: for models that begin with nothing."""
