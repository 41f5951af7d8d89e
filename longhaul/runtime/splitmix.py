"""SplitMix64 (Steele, Lea and Flood 2014): random bits of a counter, for processes without JAX.

The k-th number of the stream of a seed is mix(seed + k * GOLDEN), k from 1 on.
"""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser, uint64 of any shape: every input bit changes every output bit with probability near one half."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
