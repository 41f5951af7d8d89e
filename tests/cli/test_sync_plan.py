"""The command `longhaul sync plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longhaul.cli import main, sync_plan
from longhaul.weight_sync import cost_model
from longhaul.weight_sync.cost_model import Setting

WORDS = ["sync", "plan", "--params", "1e12", "--trainers", "256", "--receivers", "16x16", "--nic", "400Gb/s"]


def test_the_command_prints_every_term(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main.main([*WORDS, "--delta-ratio", "40", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["setting"]["nic"] == 50e9
    assert found["setting"]["delta_ratio"] == 40.0
    expected = cost_model.costs(Setting(params=1e12, delta_ratio=40.0))
    assert [each["seconds"] for each in found["updates"]] == [each.pipelined for each in expected]
    for each in expected:
        assert each.name in printed
        assert all(term.name in printed and term.formula in printed for term in each.terms)
    assert all(line in printed for _, line in cost_model.assumptions(Setting(params=1e12, delta_ratio=40.0)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sync"], "there are longhaul sync"),
        (["sync", "plane"], "longhaul sync has no command 'plane'"),
        (["sync", "plan"], "--params is missing: longhaul sync plan --params 1e12"),
        ([*WORDS, "--nic", "fast"], "a rate with its unit, as 400Gb/s"),
        ([*WORDS, "--nic", "400"], "--nic is '400'; it must be a rate with its unit, as 400Gb/s or 50GB/s"),
        ([*WORDS, "--hbm", "3.35e12"], "--hbm is '3.35e12'; it must be a rate with its unit"),
        ([*WORDS, "--receivers", "16y16"], "16x16"),
        ([*WORDS, "--cores", "0"], "cores is 0; it must be at least 1"),
    ],
)
def test_bad_words_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("word", "rate"), [("400Gb/s", 5e10), ("50GB/s", 5e10), ("1.5TB/s", 1.5e12), ("1e9B/s", 1e9)])
def test_rates(word: str, rate: float) -> None:
    assert sync_plan.RATE.read(word) == pytest.approx(rate)
