"""Numbers in fewer bits: how tables keep metres, radians and speeds as int16, on the host and on the device.

Positions are whole multiples of a scale of their scenario, 2 cm or finer where everything lies within 655 m of the
origin, never floats of 16 bits, whose steps grow to half a metre. Angles are 65,536ths of a turn: adding wraps by
itself. Encoding is NumPy, decoding takes arrays of either kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or jax.Array

TURN = np.float32(2.0 * np.pi / 65536.0)
"""Radians of one unit of an angle."""

MOST = 32767
"""The largest int16."""

NOTHING = -32768
"""The int16 that no number is encoded as, so that it can say that there is none."""

FINEST = 1e-3
"""The smallest scale: a millimetre, or a millimetre a second, is finer than any log."""


def scale_for(values: np.ndarray) -> np.ndarray:
    """float32 [S]: the scale at which all of `values` [S, ...] fit; FINEST where they are small."""
    largest = np.abs(values.reshape(len(values), -1)).max(1, initial=0.0)
    return np.maximum(largest.astype(np.float64) / MOST, FINEST).astype(np.float32)


def encode(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """int16: `values` as multiples of `scale`, which broadcasts against them; never NOTHING."""
    return np.clip(np.rint(values / scale.astype(np.float64)), -MOST, MOST).astype(np.int16)


def encode_angle(angle: np.ndarray) -> np.ndarray:
    """int16: angles, rad, of any number of turns."""
    units = np.rint(np.asarray(angle, np.float64) / (2.0 * np.pi) * 65536.0)
    return (np.mod(units + 32768.0, 65536.0) - 32768.0).astype(np.int16)


def decode(units: Array, scale: Array) -> Array:
    """float32: what `encode` made `units` of."""
    return units.astype(np.float32) * scale
