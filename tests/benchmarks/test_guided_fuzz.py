"""What the guided fuzzer found once, and a short run of it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks import guided_fuzz

ROOT = Path(__file__).resolve().parents[2]

FINDINGS = sorted((ROOT / "tests" / "helpers" / "findings").glob("*/*"))


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_inputs_that_a_fuzzer_found_are_refused(path: Path, tmp_path: Path) -> None:
    target = guided_fuzz.TARGETS[path.parent.name](tmp_path)
    for seed in target.seeds:
        target.read(seed)
    with pytest.raises(target.refuses):
        target.read(path.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("name", guided_fuzz.TARGETS)
def test_a_target_reads_or_refuses_what_it_begins_from(name: str, tmp_path: Path) -> None:
    target = guided_fuzz.TARGETS[name](tmp_path)
    for seed in target.seeds:
        with suppress(*target.refuses):
            target.read(seed)


@pytest.mark.slow
def test_a_minute_finds_nothing() -> None:
    pytest.importorskip("atheris")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.guided_fuzz", "--minutes", "1"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *rows, together = done.stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows] == list(guided_fuzz.TARGETS)
    assert int(together.split()[1].replace(",", "")) > 1000


def test_a_finding_is_reported(tmp_path: Path) -> None:
    """A reader of the fuzzer's own that fails for one byte."""
    pytest.importorskip("atheris")
    script = (
        "import sys; from benchmarks import guided_fuzz as fuzz\n"
        "def read(data):\n    if data[:1] == b'?': raise KeyError('found')\n"
        "fuzz.TARGETS['own'] = lambda folder: fuzz.Target([b'!'], read, (ValueError,))\n"
        f"sys.exit(fuzz.work('own', __import__('pathlib').Path({str(tmp_path)!r}), 0.5))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "KeyError: 'found'" in done.stdout
    (kept,) = (tmp_path / "findings" / "own").iterdir()
    assert kept.read_bytes().startswith(b"?")
