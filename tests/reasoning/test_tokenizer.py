"""The vocabulary of the generated tasks."""

from __future__ import annotations

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
