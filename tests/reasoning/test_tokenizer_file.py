"""The file of a tokeniser as a stranger's program: known forms pass, and what takes all time or memory is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longhaul.reasoning import tokenizer_file
from longhaul.reasoning.huggingface import HubError, tokeniser

PLAIN: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "b"},
}  # fmt: skip


def write(folder: Path, **fields: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(PLAIN | fields))
    return folder / "tokenizer.json"


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replaced(old: str, new: str, count: int = 1) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": {"String": old}, "content": new}] * count


WORDS = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    "fields",
    [
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(WORDS), {"type": "ByteLevel"}]}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, *replaced(" ", "_")]}},
        {"decoder": {"type": "Sequence", "decoders": [*replaced("_", " "), {"type": "Fuse"}]}},
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b", -1.5]]}},
    ],
)
def test_usual_forms_pass(fields: dict[str, Any], tmp_path: Path) -> None:
    tokenizer_file.check(write(tmp_path, **fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": replaced("a", "a" * 10, 12)}}, "1e\\+12 times as long"),
        ({"decoder": {"type": "Sequence", "decoders": replaced("", "a" * 99)}}, "100 times as long"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100}}, "more than 64 steps"),
        ({"pre_tokenizer": split("(a+)+$")}, "repeats a repetition"),
        ({"pre_tokenizer": split("(?:a|b*){2,}c")}, "repeats a repetition"),
        ({"pre_tokenizer": split("a*a*a*a*b")}, "more than 3 repetitions"),
        ({"pre_tokenizer": split(r"(a)\1")}, "refers to what it has found"),
        ({"model": {"type": "WordLevel", "vocab": {"a" * 9000: 0}, "unk_token": "a"}}, "9,000 letters"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}}, "the number 4294967295"),
        ({"model": {"type": "WordLevel", "vocab": {"a": None}, "unk_token": "a"}}, "the number None"),
    ],
)
def test_files_that_would_take_all_time_or_memory_are_one_line(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    write(tmp_path, **fields)
    with pytest.raises(HubError, match=words) as raised:
        tokeniser(tmp_path)
    assert "\n" not in str(raised.value) and "tokenizer.json" in str(raised.value)


def test_an_expression_that_gives_up_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    write(tmp_path, pre_tokenizer=split("(?:a|a){28}c"))
    with pytest.raises(HubError, match="can't read 'aaaa"):
        tokeniser(tmp_path).encode("a" * 30)


def test_numbers_beyond_the_count_of_tokens_belong_to_the_vocabulary(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    write(tmp_path, model={"type": "WordLevel", "vocab": {"a": 0, "b": 7}, "unk_token": "a"})
    words = tokeniser(tmp_path)
    assert words.encode("b") == [7] and words.size == 8
