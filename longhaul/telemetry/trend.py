"""Does a short curve rise? Mann and Kendall's test (Mann 1945; Kendall 1975), and Theil and Sen's slope (Sen 1968)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Trend(NamedTuple):
    z: float  # Kendall's S in standard deviations, above 0 where values rise
    gain: float  # Sen's slope from the first value to the last
    noise: float  # deviation of a value from its neighbours'


def trend(values: Sequence[float]) -> Trend:
    """Of values at equal distances, at least three; ties count as neither rise nor fall."""
    n = len(values)
    pairs = [(j - i, values[j] - values[i]) for i, j in itertools.combinations(range(n), 2)]
    s = sum((rise > 0) - (rise < 0) for _, rise in pairs)
    ties = [len(list(same)) for _, same in itertools.groupby(sorted(values))]
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    z = (s - (s > 0) + (s < 0)) / math.sqrt(variance) if variance > 0 else 0.0
    steps = [abs(b - a) for a, b in itertools.pairwise(values)]
    noise = 1.4826 * statistics.median(steps) / math.sqrt(2.0)
    return Trend(z, (n - 1) * statistics.median(rise / apart for apart, rise in pairs), noise)
