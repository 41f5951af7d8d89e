"""Tokenisers: their type, the 23 characters of the generated tasks, and bytes; without JAX."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

CHARACTERS = "_0123456789+-*/=;>$,:()"
"""Vocabulary of the generated tasks. `_` pads; `;` ends a written step, `>` begins the answer, `$` ends a text."""

PAD, STEP, ANSWER, END = (CHARACTERS.index(character) for character in "_;>$")

NONE = -1
"""Number in place of a token that a vocabulary does not have."""


class Tokeniser(NamedTuple):
    """Functions from text to numbers and back, and the meaning of some numbers."""

    size: int  # of the vocabulary
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]  # of a completion, up to its end or padding
    pad: int = NONE  # NONE: -1 pads, which no text contains
    ends: tuple[int, ...] = ()  # each ends a text; a demonstration ends with the first
    step: int = NONE  # ends a written step
    answer: int = NONE  # begins the answer
    stop: np.ndarray | None = None  # int32 [S, V], of a text that ends a completion: see `stopped`
    chat: Callable[[str], list[int]] | None = None  # a question within the model's chat template

    def ask(self, question: str) -> list[int]:
        """Numbers of a prompt."""
        return (self.chat or self.encode)(question)


def encode(text: str) -> list[int]:
    """Number of each character. Raises ValueError for a character outside the vocabulary."""
    for character in text:
        if character not in CHARACTERS:
            raise ValueError(f"{character!r} is no character of the vocabulary, {CHARACTERS[1:]}")
    return [CHARACTERS.index(character) for character in text]


def decode(numbers: Sequence[int]) -> str:
    """Text up to its end, `$`, or to the first padding after its beginning."""
    text = "".join(CHARACTERS[int(number)] for number in numbers).lstrip("_").split("_", 1)[0]
    head, end, _ = text.partition("$")
    return head + end


TOKENISER = Tokeniser(len(CHARACTERS), encode, decode, PAD, (END,), STEP, ANSWER)


def cut(numbers: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Numbers of a completion before its first end, and before padding."""
    return list(itertools.takewhile(lambda number: number not in (NONE, *ends), map(int, numbers)))


def stopped(words: Tokeniser, stop: str) -> Tokeniser:
    """`words` whose completions also end with the text `stop`, in however many tokens it is written.

    `Tokeniser.stop` is the automaton of Knuth, Morris and Pratt over tokens: [s, v] is the number of characters of
    `stop` with which a text ends that ended with s of them before token v, at most all of them.
    """
    pieces = [words.decode([number]) if number not in words.ends else "" for number in range(words.size)]
    table = np.zeros((len(stop), words.size), np.int32)
    for state in range(len(stop)):
        for number, piece in enumerate(pieces):
            text = stop[:state] + piece
            ways = range(min(len(stop), len(text)), -1, -1)
            table[state, number] = len(stop) if stop in text else next(n for n in ways if text.endswith(stop[:n]))

    def decode(numbers: Sequence[int]) -> str:
        return words.decode(numbers).partition(stop)[0]

    return words._replace(decode=decode, stop=table)


BYTE_END = 256


def _text(numbers: Sequence[int]) -> str:
    return bytes(cut(numbers, (BYTE_END,))).decode("utf-8", errors="replace")


BYTES = Tokeniser(257, lambda text: list(text.encode()), _text, ends=(BYTE_END,))
"""Tokeniser of UTF-8 bytes and one number that ends a text: for models with random initial weights."""
