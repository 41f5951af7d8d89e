"""Figures of an accelerator that are compiled side by side and measured one at a time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks import gpu
from longhaul.bench import harness


def test_nobody_measures_before_all_are_ready_or_have_failed_and_then_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []
    inside: list[int] = []
    released = threading.Event()

    def figure(benchmark: str, case: dict[str, Any], *, turn: gpu.Turn) -> dict[str, Any]:
        if benchmark == "fails":
            released.wait(60.0)
            order.append("failed")
            raise RuntimeError("its process ended")
        if benchmark == "late":
            released.wait(60.0)
        order.append("ready")
        with turn:
            inside.append(1)
            assert len(inside) == 1  # alone
            order.append("measured")
            time.sleep(0.02)
            inside.pop()
        return {"name": benchmark, "config": case}

    monkeypatch.setattr(harness, "figure", figure)
    names = ("soon", "late", "fails", "soon")
    device = gpu.Device(len(names))
    with ThreadPoolExecutor(len(names)) as threads:
        found = [threads.submit(gpu.measure, name, name, {}, {}, gpu.Turn(device), None) for name in names]
        while order.count("ready") < 2:
            time.sleep(0.001)
        time.sleep(0.05)
        assert order == ["ready", "ready"]
        released.set()
        assert [each.result() for each in found] == [True, True, False, True]
    assert order[-3:] == ["measured"] * 3
    assert '"error": "its process ended"' in capsys.readouterr().out
