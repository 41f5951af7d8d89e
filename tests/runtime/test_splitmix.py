"""SplitMix64: numbers of its authors' program."""

from __future__ import annotations

import numpy as np

from longhaul.runtime.splitmix import GOLDEN, mix


def test_the_first_numbers_of_a_seed_are_those_of_the_reference() -> None:
    """Outputs of splitmix64.c (Vigna 2015) with x = 1234567."""
    with np.errstate(over="ignore"):
        states = np.uint64(1234567) + GOLDEN * np.arange(1, 6, dtype=np.uint64)
        found = mix(states).tolist()
    assert found == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
