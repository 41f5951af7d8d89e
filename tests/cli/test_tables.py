"""Tables and numbers as people and programs read them: aligned, plain where nobody looks, null where not finite."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from longhaul.cli import tables
from tests.helpers.command_line import tree


def test_a_plain_table_is_aligned_and_keeps_control_characters_out(capsys: pytest.CaptureFixture[str]) -> None:
    tables.table(["name", "value"], [["a\x1b[31m", "1.000"], ["longer", "-"]], footer=["mean", "12.500"])
    out = capsys.readouterr().out
    assert out == "name     value\na?[31m   1.000\nlonger       -\nmean    12.500\n"


def test_a_terminal_gets_a_table_in_colours_unless_they_are_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown() -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream := Terminal())
            tables.table(["name", "value"], [["a", "1.000"], ["b[red]", "-"]], footer=["mean", "12.500"])
        return stream.getvalue()

    monkeypatch.setenv("TERM", "dumb")
    assert shown() == "name     value\na        1.000\nb[red]       -\nmean    12.500\n"
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1m" in shown()
    assert "b[red]" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "b[red]" in shown()
    assert "\x1b" not in shown()


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": [float("nan"), 1.5], "b": {"c": float("inf")}}
    tables.write_json(str(tmp_path / "x.json"), value)
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [None, 1.5], "b": {"c": None}}
    tables.write_json("-", value)
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}}
    assert tree(tmp_path) == ["x.json"]


def test_columns_have_an_order_of_meaning() -> None:
    assert tables.columns(["zeal", "return", "accuracy", "age", "length"]) == [
        "accuracy", "return", "length", "age", "zeal",
    ]  # fmt: skip
    few = ["zeal", "return", "accuracy"]
    assert tables.columns(few, most=3) == ["accuracy", "return", "zeal"]
    assert tables.columns(few, most=2) == ["accuracy", "return"]
