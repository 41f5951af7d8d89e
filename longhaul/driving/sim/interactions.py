"""Behaviour of an agent towards others and on its lanes at one moment: what metrics need, in closed form.

Everything is for one agent (batches come from `jax.vmap`); `measures` says what is made of it over an episode.

Time to collision is that of two boxes which keep their headings and velocities: along each of the four axes of both
boxes (those of `geometry.separation`) they overlap during one interval of time, and they touch while all four do. So
nothing is stepped through.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.datasets.log import CYCLIST, PEDESTRIAN
from longhaul.driving.sim.geometry import FREE, into
from longhaul.driving.sim.road_lookup import HALF_WIDTH, LanesHere

STOPPED = 0.05
"""m/s: who is slower stands (nuPlan, V-Max)."""

NARROW = float(np.tan(np.deg2rad(30.0)))
"""Others are ahead, or behind, within 30 degrees of the agent's axis."""

NEAR_LANE = 5.0
"""Metres to the nearest lane beyond which nothing is said about lanes."""

OPPOSED = -0.5
"""The cosine of the angle to a lane below which an agent drives against it: 120 degrees."""

PARALLEL = 0.8
"""The cosine, either way, from which an agent drives along a lane."""

SEPARATE = 2.0
"""Metres between the centres of two lanes that are beside each other; nearer ones lie over each other, in junctions."""


class Towards(NamedTuple):
    """An agent and the others."""

    ttc: jax.Array  # s until it touches somebody ahead; FREE if it does not
    fault: jax.Array  # bool: it touches somebody, and would be at fault if the contact began now


class OnLanes(NamedTuple):
    """An agent and the lanes for its kind of traffic."""

    near: jax.Array  # bool: some lane is within NEAR_LANE
    along: jax.Array  # m to the nearest lane that leads within 90 degrees of its heading; FREE without
    against: jax.Array  # bool: it is in a lane that leads against it, and in none that does not
    straddles: jax.Array  # bool: its box reaches from its lane into another beside it
    limit: jax.Array  # m/s, of the nearest lane that leads its way; 0 unknown
    inferred: jax.Array  # bool: the limit is not the source's, but that of the lane's kind


def time_to_contact(
    x: jax.Array,
    y: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    vx: jax.Array,
    vy: jax.Array,
    half: tuple[jax.Array, jax.Array],
    other: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Seconds until boxes touch that go on as they are, 0 where they do; FREE if they never will.

    `x`, `y`, `vx`, `vy`: the other's centre and relative velocity in the frame of the one; `cos`, `sin`: of the
    difference of headings; `half` and `other`: half length and half width.
    """
    length, width = half
    other_length, other_width = other
    c, s = jnp.abs(cos), jnp.abs(sin)
    u, v = into(x, y, cos, sin)
    du, dv = into(vx, vy, cos, sin)
    begins = jnp.zeros_like(x)
    ends = jnp.full_like(x, FREE)
    for place, speed, reach in (
        (x, vx, length + other_length * c + other_width * s),
        (y, vy, width + other_length * s + other_width * c),
        (u, du, other_length + length * c + width * s),
        (v, dv, other_width + length * s + width * c),
    ):
        away = jnp.abs(place)
        closing = jnp.where(place < 0.0, speed, -speed)
        closing = jnp.where(jnp.abs(closing) < 1e-6, 1e-6, closing)
        gap, nearer, rate = away - reach, closing > 0.0, 1.0 / closing
        begins = jnp.maximum(begins, jnp.where(gap > 0.0, jnp.where(nearer, gap * rate, FREE), 0.0))
        ends = jnp.minimum(ends, jnp.where(nearer, away + reach, gap) * rate)
    return jnp.where(begins <= ends, jnp.minimum(begins, FREE), FREE)


def front_inside(
    x: jax.Array,
    y: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    half: tuple[jax.Array, jax.Array],
    other: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """bool: the front bumper, a line, meets the other's box; arguments as of `time_to_contact`."""
    length, width = half
    other_length, other_width = other
    c, s = jnp.abs(cos), jnp.abs(sin)
    u, v = into(x - length, y, cos, sin)
    return (
        (jnp.abs(x - length) <= other_length * c + other_width * s)
        & (jnp.abs(y) <= width + other_length * s + other_width * c)
        & (jnp.abs(u) <= other_length + width * s)
        & (jnp.abs(v) <= other_width + width * c)
    )


def towards(
    x: jax.Array,
    y: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    vx: jax.Array,
    vy: jax.Array,
    half: tuple[jax.Array, jax.Array],
    other: tuple[jax.Array, jax.Array],
    *,
    seen: jax.Array,
    touches: jax.Array,
    kind: jax.Array,
    speed: jax.Array,
    straddles: jax.Array,
) -> Towards:
    """Towards the others, [N] each; `speed` is the agent's own, `kind` theirs, `touches` whose box overlaps its own.

    Only those ahead count for time to collision, and only while the agent moves.
    """
    moving = speed >= STOPPED
    beside = jnp.abs(y)
    ahead = seen & (beside <= NARROW * x)
    contact = time_to_contact(x, y, cos, sin, vx, vy, half, other)
    ttc = jnp.where(moving, jnp.min(jnp.where(ahead, contact, FREE), axis=-1), FREE)
    stands = jnp.square(vx + speed) + jnp.square(vy) < STOPPED * STOPPED
    frail = (kind == PEDESTRIAN) | (kind == CYCLIST)
    behind = beside <= -NARROW * x
    front = front_inside(x, y, cos, sin, half, other)
    fault = touches & (frail | stands | front | (straddles & ~behind))
    return Towards(ttc, moving & jnp.any(fault, axis=-1))


def on_lanes(
    lanes: LanesHere, cos: jax.Array, sin: jax.Array, half: tuple[jax.Array, jax.Array], kind: jax.Array
) -> OnLanes:
    """On the `lanes` around the centre of an agent of this kind and heading; cyclists alone have lanes for bicycles."""
    counts = (lanes.lane >= 0) & (~lanes.bike | (kind == CYCLIST))
    distance = jnp.where(counts, lanes.distance, FREE)
    turn = lanes.cos * cos + lanes.sin * sin
    across = jnp.abs(lanes.cos * sin - lanes.sin * cos)
    along = jnp.where(turn > 0.0, distance, FREE)
    nearest = jnp.argmin(along)
    known = along[nearest] <= NEAR_LANE
    within = distance <= HALF_WIDTH
    opposed = turn < OPPOSED
    reach = half[0] * across + half[1] * jnp.abs(turn)
    parallel = jnp.where(jnp.abs(turn) >= PARALLEL, distance, FREE)
    # offsets to the left of the agent, whichever way the lane leads; two lanes meet midway between their centres
    lateral = jnp.where(turn > 0.0, lanes.lateral, -lanes.lateral)
    apart = jnp.abs(lateral - lateral[jnp.argmin(parallel)])
    reaches = (parallel - reach < jnp.minimum(0.5 * apart, HALF_WIDTH)) & (apart >= SEPARATE)
    return OnLanes(
        near=jnp.min(distance) <= NEAR_LANE,
        along=along[nearest],
        against=jnp.any(within & opposed) & ~jnp.any(within & ~opposed),
        straddles=jnp.any(reaches),
        limit=jnp.where(known, lanes.limit[nearest], 0.0),
        inferred=known & lanes.inferred[nearest],
    )
