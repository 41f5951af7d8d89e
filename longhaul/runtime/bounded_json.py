"""JSON of others: read within bounds of size, memory and depth, which are checked before anything is built.

A document of empty objects takes thirty times its size in memory, and a deep one overflows the stack of code that walks
it. What a document will take is estimated from its punctuation, in one pass of C. Strings may hold the same characters,
so that the estimate is an upper one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 384 << 20
"""Bytes of memory that a document and its text may take: fifty times what the largest real log takes."""

MOST_DEPTH = 100
"""Lists and objects within one another; configurations and logs have fewer than ten."""

MOST_HEADER = 4 << 20
"""Bytes of the header of a safetensors file, some 100 for each array; those of large models have some hundred kB."""

CONTAINER, VALUE = 128, 64
"""Bytes of a list or an object with few entries; of a value or a key, with its place in the container."""


def parse(data: bytes | str, most: int = MOST_BYTES) -> Any:
    """Document of a text in UTF-8. Raises ValueError, one line, for no JSON, or one beyond `most` bytes of memory."""
    if (memory := weight(data)) > most:
        raise ValueError(
            f"it is no usable JSON: it takes {memory >> 20:,} MB of memory; {most >> 20:,} MB are possible"
        )
    try:
        document = json.loads(data if isinstance(data, str) else data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON from character {error.pos} on (line {error.lineno}): {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, no UTF-8
        raise ValueError(f"it is no usable JSON: {error}") from error
    if depth_above(document, MOST_DEPTH):
        raise ValueError(f"it is no usable JSON: more than {MOST_DEPTH} lists and objects are within one another")
    return document


def read(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """Object in a file. Raises OSError; ValueError, one line that names the file, for anything else."""
    try:
        if (size := path.stat().st_size) > most:
            raise ValueError(f"it has {size:,} bytes; {most:,} are possible")
        document = parse(path.read_bytes(), most)
        if not isinstance(document, dict):
            raise ValueError(f"it holds a {type(document).__name__}, and an object is needed")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return document


def check_safetensors(path: Path) -> None:
    """Raises OSError, or ValueError, one line, where the JSON header of a safetensors file is too long to be read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER:
        raise ValueError(f"{path}: its header has {length:,} bytes; {MOST_HEADER:,} are possible")


def weight(data: bytes | str) -> int:
    """Bytes of memory that a document and its text take, at most about."""
    data = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    width = 1 if data.isascii() and b"\\u" not in data else 4  # of a letter, in the text and in a value
    values, containers = data.count(b",") + data.count(b":"), data.count(b"[") + data.count(b"{")
    return len(data) * (1 + 2 * width) + VALUE * values + CONTAINER * containers


def depth_above(document: Any, most: int) -> bool:
    """True where more than `most` lists and objects are within one another."""
    level = [document]
    for _ in range(most + 1):
        level = [
            inner
            for each in level
            for inner in (each.values() if type(each) is dict else each if type(each) is list else ())
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True
