"""What vehicles, cyclists and pedestrians can do.

Vehicles: Waymax's bounds of the bicycle (arXiv 2310.08710), the grip of a dry road; moves of `delta` that a vehicle can
make. Cyclists: braking at which a rider goes over the handlebar is about half of gravity, and 15 m/s a fast descent
(Wilson and Schmidt, "Bicycling Science", 2020). Pedestrians: a sprint of ordinary people, and a turn on the spot in a
second. On the shared real logs, 99 of 100 logged speeds lie within (vehicles 17.5, cyclists 5.6, pedestrians 3.2 m/s);
logged accelerations beyond the bounds are mostly a tracker's noise.

Objects of no known kind are taken as vehicles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.datasets.log import CYCLIST, PEDESTRIAN
from longhaul.driving.sim.dynamics import VEHICLE, WHEELBASE, Limits

LIMITS: dict[int, Limits] = {
    PEDESTRIAN: Limits(7.0, 4.0, 6.0, 3.0, 4.0, 2.0, 2.0, 6.0, 0.4),
    CYCLIST: Limits(15.0, 3.0, 5.0, 0.7, 5.0, 1.0, 1.0, 2.5, 1.1),
}
"""By kind of track; all others are `dynamics.VEHICLE`."""

HIGHEST = max(limits.speed for limits in (VEHICLE, *LIMITS.values()))
"""m/s, of all kinds."""


def tabulate() -> np.ndarray:
    """float32 [kinds, fields]: the limits by number of the kind."""
    rows = [LIMITS.get(kind, VEHICLE) for kind in range(max(LIMITS) + 2)]
    return np.array(rows, np.float32)


TABLE = tabulate()


def limits_of(kind: jax.Array, length: jax.Array) -> Limits:
    """The limits [A] of agents of these kinds (int32 [A]) and lengths (m)."""
    row = jnp.asarray(TABLE)[jnp.clip(kind, 0, len(TABLE) - 1)]
    limits = Limits(*(row[..., i] for i in range(len(Limits._fields))))
    return limits._replace(wheelbase=WHEELBASE * length)
