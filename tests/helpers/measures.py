"""Measures of known values."""

from __future__ import annotations

from typing import Any

import numpy as np

from longhaul.spaces import Measure


def measured(values: Any, valid: Any = None) -> Measure:
    """Values, all of them valid by default."""
    values = np.asarray(values, float)
    return Measure(values, np.ones(values.shape, bool) if valid is None else np.asarray(valid, bool))
