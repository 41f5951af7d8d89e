"""The comparison with RLlib: the arithmetic of its records, what it refuses, and (slow) that both sides train."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import actors_peer


def test_ratios_are_medians_of_rounds() -> None:
    about = {"unit": "env steps", "config": {}, "compile_seconds": 1.0, "versions": {}}
    abouts = {"rllib": about, "rllib-vector": about, "longhaul-vector": about | {"steps": 1000, "commit": "abc"}}
    rounds = [
        {
            "rllib": {"steps": 100, "wall_seconds": 1.0, "cpu_seconds": 2.0, "alone_seconds": 1.0},
            "rllib-vector": {"steps": 100, "wall_seconds": 1.0, "cpu_seconds": share, "alone_seconds": 1.0},
            "longhaul-vector": {"wall_seconds": 2.0, "cpu_seconds": cpu},
        }
        for share, cpu in ((4.0, 1.0), (1.0, 2.0), (1.0, 4.0))
    ]
    found = actors_peer.compared(rounds, abouts)
    ours, theirs = found["longhaul-vector"], found["rllib"]
    assert (theirs["per_cpu_second"], theirs["alone_per_cpu_second"], theirs["per_second"]) == (50.0, 100.0, 100.0)
    assert (ours["per_second"], ours["per_cpu_second"], ours["commit"]) == (500.0, 500.0, "abc")
    # 1000, 500 and 250 a CPU-second; theirs 50 in each round, the better of the two 50, 100 and 100.
    assert (ours["peer_cpu_ratio"], ours["best_cpu_ratio"], ours["peer_ratio"]) == (10.0, 5.0, 5.0)
    assert "peer_ratio" not in theirs and json.loads(json.dumps(found)) == found


def test_too_few_repeats_and_uneven_actors_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, line in ((["--repeats", "4"], "a median of fewer than 5"), (["--actors", "3"], "choose a divisor")):
        monkeypatch.setattr(sys, "argv", ["peer", "--python", sys.executable, *words])
        with pytest.raises(SystemExit):
            actors_peer.main()
        assert line in capsys.readouterr().err


@pytest.mark.slow
def test_both_sides_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("ray.rllib")
    out = tmp_path / "peer.jsonl"
    words = ["--python", sys.executable, "--algorithms", "impala", "--steps", "3200", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["peer", *words])
    assert actors_peer.main() == 0
    records = {record["program"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert set(records) == {*actors_peer.THEIRS, *actors_peer.OURS}
    for program, record in records.items():
        assert record["steps"] >= 3200 and record["mean_return"] > 9.0
        if program in actors_peer.THEIRS:
            assert record["learnt"] > 0.8, "what was sampled was learnt from"
            assert record["cpu_seconds"] > record["alone_seconds"] > 0.0
