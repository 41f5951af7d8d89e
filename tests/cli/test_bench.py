"""The command `bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.helpers.command_line import assert_refused


def test_bench_prints_an_object_a_line(longhaul: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Bench:
        BENCHMARKS: ClassVar = {"ppo-cartpole": SimpleNamespace(about="speed of PPO", sizes={})}

        @staticmethod
        def run(name: str) -> Any:
            yield {"name": name, "per_second": 1.5}
            yield {"name": name, "per_second": float("nan")}

    import longhaul.bench as package

    monkeypatch.setitem(sys.modules, "longhaul.bench.harness", Bench)
    monkeypatch.setattr(package, "harness", Bench, raising=False)
    code, out, _ = longhaul("bench", "ppo-cartpole", "--json", "b.json")
    assert code == 0
    figures = [{"name": "ppo-cartpole", "per_second": 1.5}, {"name": "ppo-cartpole", "per_second": None}]
    assert [json.loads(line) for line in out.splitlines()] == figures
    assert json.loads((tmp_path / "b.json").read_text()) == figures
    assert longhaul("bench")[:2] == (0, "ppo-cartpole  speed of PPO\n")
    assert_refused(longhaul("bench", "ppo-cartpol"), "no benchmark is named 'ppo-cartpol'; did you mean ppo-cartpole?")
