"""`longhaul sync bench --peers`: each other way brings the same bytes, or is told to be missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longhaul.bench.cases import sync_peers, sync_ways
from longhaul.bench.cases.sync_peers import Took, condensed
from longhaul.cli import main


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
@pytest.mark.parametrize("name", sync_ways.WAYS)
def test_a_way_brings_what_was_sent(name: str) -> None:
    if without := sync_ways.missing(name):
        pytest.skip(f"{without} is not installed")
    found = sync_peers.measure(name, "tiny", 1)  # which compares digests
    assert found["peer"] == name and found["wall_seconds"] > 0


def test_the_command_writes_what_is_there_and_tells_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bare sockets alone; both receivers' digests are compared with the sender's on the way."""
    ways = {"socket": sync_ways.WAYS["socket"], "other": sync_ways.Known(sync_ways.Socket, ("no_such_library",))}
    monkeypatch.setattr(sync_ways, "WAYS", ways)
    out = tmp_path / "figures.json"
    assert main.main(f"sync bench --peers --model tiny --repeats 1 --json {out}".split()) == 0
    said = capsys.readouterr()
    assert said.err == "other is left out: no_such_library is not installed\n"
    (found,) = json.loads(out.read_text())
    assert json.loads(said.out) == found and found["peer"] == "socket" and found["times_ours"] > 0


@pytest.mark.parametrize("words", ["--receivers 3", "--repeats 0", "--lane tcp"])
def test_words_that_mean_nothing_for_peers_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(f"sync bench --peers {words}".split()) == 2
    assert "--peers has 2 receivers" in capsys.readouterr().err
