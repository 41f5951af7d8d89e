"""The vocabulary of the generated tasks."""

from __future__ import annotations

import itertools

import pytest

from longhaul.reasoning import tokenizer


def test_the_vocabulary_gives_back_its_texts() -> None:
    assert len(tokenizer.CHARACTERS) == len(set(tokenizer.CHARACTERS)) == tokenizer.TOKENISER.size == 23
    text = "3+4-2=3+4=2;>(0)$"
    numbers = tokenizer.encode(text)
    assert tokenizer.decode([tokenizer.PAD, tokenizer.PAD, *numbers, 3, 4]) == text
    assert tokenizer.decode([*numbers[:4], tokenizer.PAD, 5]) == text[:4]
    with pytest.raises(ValueError, match="'x' is no character"):
        tokenizer.encode("3x4")


def test_a_stop_is_found_in_however_many_tokens_it_is_written() -> None:
    pieces = ["a", "b", "ab", "\n", "aab\n"]
    words = tokenizer.Tokeniser(len(pieces), list, lambda numbers: "".join(pieces[n] for n in numbers))
    made = tokenizer.stopped(words, "ab\n")
    assert made.stop is not None
    for numbers in itertools.product(range(len(pieces)), repeat=4):
        state, seen = 0, ""
        for number in numbers:
            state, seen = int(made.stop[state, number]), seen + pieces[number]
            assert (state == 3) == ("ab\n" in seen)
            if state == 3:
                break
    assert made.decode([0, 2, 3, 1]) == "a"


def test_several_texts_are_found_by_one_automaton() -> None:
    pieces = ["a", "b", "ab", "ba", "c"]
    words = tokenizer.Tokeniser(len(pieces), list, lambda numbers: "".join(pieces[n] for n in numbers))
    made = tokenizer.stopped(words, "abc", {"bab": str.upper, "ca": str.lower})
    assert made.stop is not None
    for numbers in itertools.product(range(len(pieces)), repeat=5):
        state, seen = 0, ""
        for number in numbers:
            state, seen = int(made.stop[state, number]), seen + pieces[number]
            assert (state == len(made.stop)) == any(text in seen for text in ("abc", "bab", "ca")), (seen, state)
            if state == len(made.stop):
                break
