"""Tokenisers: their type, the 23 characters of the generated tasks, and bytes; without JAX."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
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
    stop: np.ndarray | None = None  # int32 [S, V], of texts that end a completion: see `stopped`
    replies: Mapping[str, Callable[[str], str]] = MappingProxyType({})  # by the mark that ends a turn
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


class Budget(NamedTuple):
    """Most steps of a completion: behind the last comes the text `answer` (s1, Muennighoff et al. 2025, 2501.19393)."""

    most: int
    step: str  # ends a step
    answer: str

    def reply(self, text: str) -> str:
        return self.answer if text.count(self.step) == self.most and self.answer not in text else ""


def stopped(
    tokeniser: Tokeniser, stop: str = "", replies: Mapping[str, Callable[[str], str]] = MappingProxyType({})
) -> Tokeniser:
    """`tokeniser` whose completions also end with the text `stop`, and whose turns end with each mark of `replies`, in
    however many tokens they are written.

    `Tokeniser.stop` is the automaton of Aho and Corasick over tokens. Its states are the beginnings of these texts, the
    empty one first; [s, v] is the longest with which a text ends that ended with that of s before token v, or the
    number of states where one of the texts is whole.
    """
    texts = [text for text in (stop, *replies) if text]
    if not texts:
        return tokeniser
    states = sorted({text[:end] for text in texts for end in range(len(text))}, key=lambda text: (len(text), text))
    pieces = [tokeniser.decode([number]) if number not in tokeniser.ends else "" for number in range(tokeniser.size)]
    table = np.zeros((len(states), tokeniser.size), np.int32)
    for state, before in enumerate(states):
        for number, piece in enumerate(pieces):
            text = before + piece
            whole = any(each in text for each in texts)
            table[state, number] = len(states) if whole else max(
                (n for n, begun in enumerate(states) if text.endswith(begun)), key=lambda n: len(states[n])
            )  # fmt: skip

    def decode(numbers: Sequence[int]) -> str:
        return tokeniser.decode(numbers).partition(stop)[0] if stop else tokeniser.decode(numbers)

    return tokeniser._replace(decode=decode, stop=table, replies=replies)


def ended_at(numbers: Sequence[int], tokeniser: Tokeniser) -> int:
    """Number of a completion's tokens up to and with the one that ends it; all of them where none does."""
    state = 0
    for place, number in enumerate(numbers):
        if number in tokeniser.ends:
            return place + 1
        if tokeniser.stop is not None:
            state = int(tokeniser.stop[state, number])
            if state == len(tokeniser.stop):
                return place + 1
    return len(numbers)


BYTE_END = 256


def _text(numbers: Sequence[int]) -> str:
    return bytes(cut(numbers, (BYTE_END,))).decode("utf-8", errors="replace")


BYTES = Tokeniser(257, lambda text: list(text.encode()), _text, ends=(BYTE_END,))
"""Tokeniser of UTF-8 bytes and one number that ends a text: for models with random initial weights."""
