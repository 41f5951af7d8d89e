"""`python -m benchmarks.peers.sync`: each other way brings the same bytes, or is reported as missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peers import sync
from benchmarks.peers.sync import Took, condensed


def test_figures_are_medians_of_ratios_within_a_repeat() -> None:
    """One repeat met twice the load of the others: seconds differ, ratios do not."""
    rows = [
        {"limit": Took(load, load / 2), "ours": Took(2 * load, load), "theirs": Took(6 * load, 4 * load)}
        for load in (1.0, 2.0, 1.0, 1.0)
    ]
    found = condensed(rows)
    assert (found["wall_seconds"], found["limit_ratio"], found["ours_limit_ratio"]) == (6.0, 6.0, 2.0)
    assert (found["times_ours"], found["cpu_times_ours"]) == (3.0, 4.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", sync.WAYS)
def test_a_way_brings_what_was_sent(name: str) -> None:
    if without := sync.missing(name):
        pytest.skip(f"{without} is not installed")
    found = sync.measure(name, "tiny", 1)  # which compares digests
    assert found["peer"] == name and found["wall_seconds"] > 0


@pytest.mark.slow
def test_the_command_writes_what_is_there_and_tells_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bare sockets alone; both receivers' digests are compared with the sender's on the way."""
    ways = {"socket": sync.WAYS["socket"], "other": sync.Known(sync.Socket, ("no_such_library",))}
    monkeypatch.setattr(sync, "WAYS", ways)
    out = tmp_path / "figures.jsonl"
    assert sync.main(f"--model tiny --repeats 1 --json {out}".split()) == 0
    said = capsys.readouterr()
    assert said.err == "other is left out: no_such_library is not installed\n"
    found = json.loads(out.read_text())
    assert json.loads(said.out) == found and found["peer"] == "socket" and found["times_ours"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--repeats 0", "--repeats is 0; it must be at least 1"),
        ("--model 1t", "choose a smaller one, or plan it by its shapes"),
        ("--model gpt-9", "no model is known"),
    ],
)
def test_wrong_words_are_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        sync.main(words.split())
    assert said in capsys.readouterr().err
