"""Longitude and latitude to metres: the universal transverse Mercator projection (UTM) on WGS 84.

Krueger's series in the third flattening n, to n^4, as in Karney, "Transverse Mercator with an accuracy of a few
nanometers", 2011 (arXiv 1002.1417), equations 7 to 12 and 35: within a zone the rest is far below a millimetre.
"""

from __future__ import annotations

import numpy as np

WGS84 = (6378137.0, 1 / 298.257223563)
"""Equatorial radius, metres, and flattening."""

SCALE, EASTING, NORTHING_SOUTH = 0.9996, 500_000.0, 10_000_000.0
"""Scale on the central meridian, and what is added: to x, and to y on the southern half."""

ZONES_NORTH, ZONES_SOUTH = 32600, 32700
"""EPSG numbers of the zones of WGS 84 / UTM are these and the zone, 1 to 60."""


def utm(longitude: np.ndarray, latitude: np.ndarray, epsg: int) -> tuple[np.ndarray, np.ndarray]:
    """Easting and northing, metres, of places in degrees, in the projection EPSG:`epsg`; `ValueError` where it is no
    zone of UTM on WGS 84."""
    south = ZONES_SOUTH < epsg <= ZONES_SOUTH + 60
    zone = epsg - (ZONES_SOUTH if south else ZONES_NORTH)
    if not 1 <= zone <= 60:
        raise ValueError(f"EPSG:{epsg} is no zone of UTM on WGS 84 (EPSG:32601 to 32660, 32701 to 32760)")
    meridian = 6.0 * zone - 183.0
    away = (np.asarray(longitude, np.float64) - meridian + 180.0) % 360.0 - 180.0
    x, y = transverse_mercator(np.radians(away), np.radians(latitude), *WGS84)
    return EASTING + SCALE * x, (NORTHING_SOUTH if south else 0.0) + SCALE * y


def transverse_mercator(
    away: np.ndarray, latitude: np.ndarray, radius: float, flattening: float
) -> tuple[np.ndarray, np.ndarray]:
    """x, y, metres, of places `away` radians east of the central meridian, with scale 1 on it."""
    n = flattening / (2.0 - flattening)
    series = (
        n / 2 - n**2 * 2 / 3 + n**3 * 5 / 16 + n**4 * 41 / 180,
        n**2 * 13 / 48 - n**3 * 3 / 5 + n**4 * 557 / 1440,
        n**3 * 61 / 240 - n**4 * 103 / 140,
        n**4 * 49561 / 161280,
    )
    eccentricity = 2.0 * np.sqrt(n) / (1.0 + n)
    sine = np.sin(latitude)
    # the tangent of the conformal latitude
    conformal = np.sinh(np.arctanh(sine) - eccentricity * np.arctanh(eccentricity * sine))
    north = np.arctan2(conformal, np.cos(away))
    east = np.arctanh(np.sin(away) / np.hypot(1.0, conformal))
    x, y = east, north
    for order, factor in enumerate(series, 1):
        x = x + factor * np.cos(2 * order * north) * np.sinh(2 * order * east)
        y = y + factor * np.sin(2 * order * north) * np.cosh(2 * order * east)
    size = radius / (1.0 + n) * (1.0 + n**2 / 4 + n**4 / 64)
    return size * x, size * y
