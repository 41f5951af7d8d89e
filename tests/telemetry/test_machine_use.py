"""Use of the machine: a driver that answers, fails, hangs or is missing delays nothing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from longhaul.telemetry import machine_use

ANSWER = "37, 1024, 81559\n0, 2048, 81559"


@pytest.mark.parametrize(
    ("does", "shown"),
    [
        (f"echo '{ANSWER}'", "GPU 0 37 %, 1.0 of 79.6 GiB  GPU 1 0 %, 2.0 of 79.6 GiB"),
        ("echo '[N/A], 1, 2'", ""),
        ("echo 'No devices were found' >&2; exit 6", ""),
        ("exec sleep 600", ""),
        (None, ""),
    ],
    ids=["two", "unknown", "none", "hangs", "missing"],
)
def test_use_of_gpus_is_shown_where_the_driver_says_it(
    does: str | None, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program in the driver's place, asked as the driver is, answers, fails, hangs, or is not there."""
    asked = tmp_path / "asked"
    if does is not None:
        (tmp_path / machine_use.QUERY[0]).write_text(f'#!/bin/sh\necho "$@" >> {asked}\n{does}\n')
        (tmp_path / machine_use.QUERY[0]).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(machine_use, "PERIOD", 0.02)
    monkeypatch.setattr(machine_use, "PATIENCE", 0.2 if does == "exec sleep 600" else 60.0)
    use, ends = machine_use.meter(), time.monotonic() + 60.0

    def calls() -> list[str]:
        return asked.read_text().splitlines() if asked.exists() else []

    text = use()
    while "GPU" not in text and len(calls()) < (2 if does else 0):  # two calls: the answer to the first was taken
        assert time.monotonic() < ends
        time.sleep(0.02)
        text = use()
    assert "memory " in text
    assert shown in text
    assert ("GPU" in text) == bool(shown)
    assert set(calls()) == ({" ".join(machine_use.QUERY[1:])} if does else set())
    while any(thread.name == "use of GPUs" for thread in threading.enumerate()):
        time.sleep(0.02)
