"""JSON within bounds: what is refused before it is built, and an estimate of memory that is no lower than the truth."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from longhaul.runtime import bounded_json

DOCUMENTS: dict[str, Any] = {
    "empty objects": [{}] * 50_000,
    "small objects": [{"x": i + 0.5, "y": i + 0.25, "z": 0.125 * i} for i in range(20_000)],
    "keys": {f"key {i}": i + 0.5 for i in range(50_000)},
    "empty lists": [[]] * 50_000,
    "numbers": [i + 0.5 for i in range(50_000)],
    "words": ["ab"] * 50_000,
    "wide letters": ["\N{OLIVE}" + "a" * 100_000] * 3,
}


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("plain", [True, False])
def test_the_estimate_is_no_lower_than_the_truth(name: str, plain: bool) -> None:
    data = json.dumps(DOCUMENTS[name], ensure_ascii=plain).encode()
    tracemalloc.start()
    try:
        document = bounded_json.parse(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert document == DOCUMENTS[name]
    assert peak < 1.3 * bounded_json.weight(data) < 40 * peak
    with pytest.raises(ValueError, match=r"it takes \d+ MB of memory; \d+ MB are possible"):
        bounded_json.parse(data, peak // 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "it is no JSON from character 1 on"),
        (b"[]", "it holds a list, and an object is needed"),
        (b"[" * 100_000, "it is no usable JSON: maximum recursion depth"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "more than 100 lists and objects are within one another"),
        (b'{"n": ' + b"9" * 5000 + b"}", "it is no usable JSON: Exceeds the limit"),
        (b'{"\xff": 1}', "it is no usable JSON: 'utf-8' codec"),
    ],
)
def test_a_file_that_holds_no_object_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says) as caught:
        bounded_json.read(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_document_at_the_bounds_is_read(tmp_path: Path) -> None:
    path, depth = tmp_path / "a.json", bounded_json.MOST_DEPTH
    path.write_text('\ufeff{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}", "utf-8")
    assert json.dumps(bounded_json.read(path)["a"]).count("[") == depth - 1
    assert bounded_json.parse("3") == 3


def test_a_safetensors_file_of_a_million_empty_arrays_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for length, fits in ((bounded_json.MOST_HEADER, True), (bounded_json.MOST_HEADER + 1, False), (2**63, False)):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        with nullcontext() if fits else pytest.raises(ValueError, match=f"its header has {length:,} bytes; 4,"):
            bounded_json.check_safetensors(path)
