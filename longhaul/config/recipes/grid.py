"""Grid of runs for a scaling law."""

from __future__ import annotations

from dataclasses import dataclass

from longhaul.config.run import Run


@dataclass(frozen=True)
class Grid:
    """What is run: `base` with each of `sizes` (million parameters) x `scenarios` x seeds base.seed + 0 .. seeds-1."""

    base: Run
    sizes: tuple[float, ...]
    scenarios: tuple[int, ...]
    seeds: int = 1
    metric: str = "goal"
