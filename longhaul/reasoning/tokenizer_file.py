"""Check of a tokenizer.json before the library of Hugging Face reads it.

The file is a stranger's program: steps that replace texts by longer ones, and regular expressions. A dozen steps of a
line each make a thousand gigabytes of one letter, and the library ends the process where it gets no memory.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longhaul.runtime import bounded_json

MOST_MEMORY = 1 << 30
"""Bytes of memory of the file as JSON; three times what the largest vocabularies take."""

MOST_GROWTH = 64
"""Times that all steps may lengthen a text; Unicode's own decompositions lengthen a letter by 18."""

MOST_LETTERS = 1 << 13
"""Letters of a token, and of a pattern; the longest known ones have a thousand."""

MOST_NUMBER = 1 << 21
"""Numbers of tokens; the largest vocabularies have 262,144."""

MOST_STEPS = 64

REPEATS = 3
"""Repetitions without a bound in one alternative of a regular expression, of which none is within another."""

LISTS = ("normalizers", "pretokenizers", "decoders", "processors")
"""Fields with the steps of a sequence."""


def check(path: Path) -> None:
    """Raises OSError, or ValueError, one line, for a file that is none, or that could take all time or memory."""
    fields = bounded_json.read(path, MOST_MEMORY)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        steps = list(itertools.islice(_steps(fields.get(part)), MOST_STEPS + 1))
        if len(steps) > MOST_STEPS:
            raise ValueError(f"{path}: {part} has more than {MOST_STEPS} steps")
        if (growth := math.prod(map(_growth, steps))) > MOST_GROWTH:
            raise ValueError(f"{path}: {part} makes a text {growth:.3g} times as long; {MOST_GROWTH} is possible")
        for pattern in map(_pattern, steps):
            if why := _slow_reason(pattern):
                raise ValueError(f"{path}: {part} has the regular expression {pattern!r:.80}, which {why}")
    _check_vocabulary(path, fields)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        for name in LISTS:
            for inner in part.get(name) or () if isinstance(part.get(name), list) else ():
                yield from _steps(inner)


def _growth(step: dict[str, Any]) -> float:
    """Times that a step may lengthen a text of one letter."""
    kind, pattern = step.get("type"), step.get("pattern")
    if kind == "Replace":
        literal = pattern.get("String", "") if isinstance(pattern, dict) else ""
        letters = len(literal) if isinstance(literal, str) else 0
        content = len(str(step.get("content", "")))
        return max(1.0, content / letters) if letters else 1.0 + content
    if kind == "TemplateProcessing":
        return float(max([1, *(len(step[name]) for name in ("single", "pair") if isinstance(step.get(name), list))]))
    if kind == "Precompiled":
        return MOST_GROWTH / 4  # a table of letters; those of SentencePiece are Unicode's
    return 1.0 + len(str(step.get("prepend", "")) if kind == "Prepend" else "")


def _pattern(step: dict[str, Any]) -> str:
    """Regular expression of a step, or ""."""
    pattern = step.get("pattern")
    return str(pattern.get("Regex", "")) if isinstance(pattern, dict) else ""


TOKEN = re.compile(r"\\.|\[(?:\\.|\[:\w+:\]|[^\]\\])*\]|\((?:\?[^:)]*:|\?[=!<>]+)?|[*+]|\{\d*,?\d*\}|[)|]|.", re.DOTALL)


def _slow_reason(pattern: str) -> str:
    """Why a search by a regular expression may take more than a power of the text's length, or ""."""
    if len(pattern) > MOST_LETTERS:
        return f"has {len(pattern):,} letters; {MOST_LETTERS:,} are possible"
    groups, before = [0], ""  # repetitions in the alternative of each open group
    most = [0]
    for piece in TOKEN.findall(pattern):
        if re.fullmatch(r"\\[1-9k]", piece):
            return "refers to what it has found"
        if piece.startswith("("):
            groups.append(0)
            most.append(0)
        elif piece == "|":
            most[-1], groups[-1] = max(most[-1], groups[-1]), 0
        elif piece == ")" and len(groups) > 1:
            inside = max(most.pop(), groups.pop())
            groups[-1] += inside
            before = ")" if inside else ""
            continue
        elif piece in ("*", "+") or re.fullmatch(r"\{\d*,(\d{3,})?\}|\{\d{3,}\}", piece):
            if before == ")":
                return "repeats a repetition"
            if before not in ("*", "+"):  # else it is possessive
                groups[-1] += 1
            if groups[-1] > REPEATS:
                return f"has more than {REPEATS} repetitions in a row"
        before = piece
    return ""


def _check_vocabulary(path: Path, fields: dict[str, Any]) -> None:
    for word, number in _vocabulary(fields):
        if type(word) is not str or type(number) is not int:
            raise ValueError(
                f"{path}: token {word!r:.40} has the number {number!r:.40}; texts and whole numbers are needed"
            )
        if len(word) > MOST_LETTERS:
            raise ValueError(f"{path}: token {number} has {len(word):,} letters; {MOST_LETTERS:,} are possible")
        if not 0 <= number < MOST_NUMBER:
            raise ValueError(f"{path}: token {word!r:.40} has the number {number}; below {MOST_NUMBER:,} is possible")


def _vocabulary(fields: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(token, its number) of the vocabulary, and of what is added to it."""
    model, added = fields.get("model"), fields.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    elif isinstance(vocabulary, list):  # of Unigram: (token, its score)
        yield from ((each[0] if isinstance(each, list) and each else each, i) for i, each in enumerate(vocabulary))
    for each in added if isinstance(added, list) else ():
        if isinstance(each, dict):
            yield each.get("content"), each.get("id")
