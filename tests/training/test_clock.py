"""Seconds of a run by use, and the age of its process."""

import time

import psutil
import pytest

from longhaul.runtime import compile_cache
from longhaul.training import clock


def test_a_clock_splits_what_compiling_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 seconds of which the compiler took 3, then 2 without it, are 7 of compiling and 4 of tracing."""
    now = [100.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(clock, "age", lambda: now[0] - 90.0)
    ledger = compile_cache.Ledger()
    try:
        ours = clock.Clock(ledger)
        with ours.compiling():
            now[0] += 5.0
            ledger.seconds += 3.0
        with ours.compiling():
            now[0] += 2.0
        ours.started()
        now[0] += 50.0
        ours.started()
    finally:
        ledger.close()
    assert ours.read() == clock.Seconds(train=0.0, compile=7.0, wall=57.0, trace=4.0, start=17.0)


def test_age_counts_from_the_process() -> None:
    """And not from the import; wide, since a clock of the day that is set meanwhile moves what psutil tells."""
    assert clock.age() > time.perf_counter() - clock.LOADED
    assert clock.age() == pytest.approx(time.time() - psutil.Process().create_time(), abs=5.0)
