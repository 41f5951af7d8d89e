"""Rates of this machine."""

from __future__ import annotations

import math

from longhaul.bench import machine_rates


def test_this_machine_has_rates() -> None:
    found = machine_rates.measured(1 << 20, repeats=2)
    assert all(math.isfinite(rate) and rate > 1e6 for rate in found)
