"""Safety check of commands: a driver keeps a way out, and is smooth while it has one.

A command is safe if one of a few manoeuvres that follow it, along the own route, meets nobody within HORIZON seconds
and passes no red light: braking firmly, holding the speed, or hurrying on; and if the speed after it still allows for
the bends of that route. Others keep their velocity; those that drive along the route follow its bends, come nearer to
it or leave it for a while as they do now, and those ahead on it brake from now on. Without such a manoeuvre the driver
is in a state of inevitable collision (Fraichard and Asama, "Inevitable collision states", 2004), as far as this model
of the world goes. An unsafe command is replaced by the safe acceleration that is nearest to it; where none is safe, by
the one that comes to a conflict last, and by the hardest braking if that is near. This is the shield of Alshiekh et
al., "Safe reinforcement learning via shielding", 2018, with a model of motion in place of an automaton.

A steering is replaced by one that follows the route, or the way 0.6 m beside it, where it, held for a while and
followed by the way back to the route, leads over the road's edge or into others, and the other one does less so.

Braking firmly is less than what the brakes hold, so that a driver whose last way out it was still has the rest.

A command is replaced as soon as gentle braking is not enough any more, by gentle braking while firm braking still is.
While it is safe, an acceleration stays within GENTLE, changes by at most BRAKING_JERK and PUSHING_JERK, and jolts
nobody: the choices of a discrete policy lie farther apart than what passengers like in a step.

Two who are slow and whose ways cross would wait for each other for ever, since each keeps clear of what the other might
do. One of them goes first (`goes_first`): it takes the other to brake from now on, and waits only where that would not
be enough.

Nothing is looked at but what an observation is made of: the nearest others that the agent perceives and the first in
the way, with their size and velocity now (an observation tells the distance and the speed of the latter), the next
light of its route and its colour now, the route, and the road's edges. Who comes from behind does not count: the one
behind keeps the distance. Those who do not react are evaded by `evasion`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.driving.datasets.log import PEDESTRIAN
from longhaul.driving.scenario.scenario import RED, ROUTE_SPACING
from longhaul.driving.sim.device_bank import AHEAD, BEHIND
from longhaul.driving.sim.dynamics import MAX_CURVATURE, Drive, Limits, arc, travel
from longhaul.driving.sim.features import NARROW, STOPPED, Agent, Features, time_to_contact
from longhaul.driving.sim.geometry import (
    FREE,
    OPEN,
    Field,
    Relative,
    clearance,
    corners,
    into,
    nearest,
    out_of,
    pick,
    project,
    separation,
    wrap,
)
from longhaul.driving.sim.idm import bend_speed
from longhaul.driving.sim.observation import RANGE, nearness
from longhaul.driving.sim.traffic import Scene

HORIZON, STEP = 3.0, 0.25
"""s: how far ahead is looked, and how often on the way."""

ACCELERATIONS = np.array([-6.0, -3.5, 1.5], np.float32)
"""m/s^2, choices in place of an unsafe command: as hard as these, as hard as is gentle, or as soft as EASING."""

EASING = np.array([-0.4, -0.8, -1.6], np.float32)
"""m/s^2, changes of acceleration in a step."""

FIRM, SOFT, HURRIED = -4.5, -2.2, 1.5
"""m/s^2: the braking and the pushing of the manoeuvres that follow."""

OTHERS_BRAKE = 3.0
"""m/s^2, of those ahead on the own route, and of those who let the agent go first."""

SLOW = 3.0
"""m/s: of two who are both slower and whose ways cross, one goes first. Faster ones have time to see who does."""

CROSSING = 0.3
"""Sine of the angle from which on ways cross."""

SETTING_OFF = 1.5
"""m/s^2 with which both are taken to come to where their ways cross."""

RIGHT = 0.5
"""s by which who comes from the right may be later, and goes first."""

SWEPT = 0.25
"""Share of the way from one look to the next by which a box is longer at either end."""

MARGIN = 0.2
"""m to be kept of others; less where they are nearer already."""

STANDING = 1.1
"""m to be kept ahead; less where they are nearer already. Who brakes by SOFT to this gap before somebody who stands is
1 s from a contact or more: d / sqrt(2 SOFT (d - STANDING)) has its minimum 1 s where STANDING = SOFT / 2."""

PUSHING_JERK, BRAKING_JERK = 4.0, 8.0
"""m/s^3: the largest change of a safe acceleration, up and down; V-Max's limit of comfort is 8.3."""

GENTLE = -3.2, 2.3
"""m/s^2, within nuPlan's limits of comfort (-4.05 and 2.4); whoever stops by no more than this is not jolted."""

RELEASED = -1.5
"""m/s^2 to which hard braking may be released at once."""

LATERAL = 4.7
"""m/s^2 across, below nuPlan's limit of comfort (4.89)."""

IMMINENT = 1.75
"""s to a conflict that nothing avoids, below which the brakes are used as far as they go."""

CREEP = 0.005
"""m by which one may come nearer in a step to who is in the way, beyond what gentle braking needs."""

CALM, PRICE = 1.2, 20.0
"""s to a contact with who is ahead, if both went on as they are, below which a gentle choice is preferred by which it
is later, and what 1 s of that is worth, m/s^2. nuPlan and V-Max want 0.95 s."""

NEAR = 1.0
"""s to a conflict above which braking stays gentle: others may turn out to do something else."""

FIRM_TIER, LAST_TIER = -1e2, -1e3
"""Ranks below all others, of choices after which only firm braking avoids a conflict, and of those after which nothing
does."""

LATENESS = 10.0
"""m/s^2 that a second until a conflict is worth, if nothing avoids it."""

BLEND = 6.0
"""m of the way on which an agent that is beside its route comes back to it."""

ALONG, BESIDE = 0.9, 10.0
"""Cosine of the angle to the own route, and m beside it, within which others are taken to follow its bends."""

DRIFT = 1.5
"""s for which those go on nearer to the own route, or away from it, as they do now."""

WOBBLE = 0.4
"""m/s across the own route that are not taken for drift."""

BEND, SLOWING = 4.0, -2.5
"""m/s^2: the lateral acceleration with which a bend of the own route is met, and the braking that is enough for it."""

LINE = 0.3
"""m kept before a stop line."""

EDGE, SIDE, LESS = 0.1, 0.3, 0.02
"""m to be kept of the road's edge and of others by steering, and by how much following the route must do better."""

HELD = 0.4
"""s for which a curvature is held before the way back to the route."""

STEERED = np.array([0.4, 0.8, 1.2], np.float32)
"""s after which it is looked where a curvature led."""

OFFSETS, RATHER = np.array([0.0, 0.6, -0.6], np.float32), np.array([0.0, 0.02, 0.02], np.float32)
"""m to the left of the route that are steered to, and by how many a way beside it must keep clearer of others."""

PURSUIT = 4.0, 0.9
"""m and s: how far ahead on the route is steered to, the larger of both (pure pursuit: Coulter, 1992)."""


class Boxes(NamedTuple):
    """Boxes of the others that are looked at, [K], at some times, [T]."""

    x: jax.Array  # [T, K]
    y: jax.Array
    cos: jax.Array
    sin: jax.Array
    half: tuple[jax.Array, jax.Array]  # half length and half width, [K]
    least: jax.Array  # [K], m: the gap below which there is a conflict; -FREE for who does not count
    ahead: jax.Array  # [K], m: by how much more ahead


Others = tuple[jax.Array, jax.Array]
"""Indices [K] of the others that are looked at, and whether each counts."""


class View(NamedTuple):
    """An agent, and what it perceives before a step of `dt` seconds."""

    agent: Agent
    features: Features
    scene: Scene
    others: Others
    limits: Limits
    road: Field
    dt: jax.Array


def view_of(
    agent: Agent, features: Features, scene: Scene, limits: Limits, road: Field, dt: jax.Array, count: int
) -> View:
    """View of an agent that looks at `count` of the others."""
    return View(agent, features, scene, relevant(features, count), limits, road, dt)


def keep_safe(view: View, drive: Drive, comfortable: tuple[jax.Array, jax.Array]) -> tuple[Drive, jax.Array]:
    """(next motion of one agent: `drive`, to which its command leads, or that of the nearest safe acceleration; bool:
    the command was unsafe). `comfortable` are the lowest and the highest acceleration that jolt nobody
    (`metrics.gentle_range`).

    Choices rank in three tiers: first those after which gentle braking is enough, the nearest to the command; then
    those after which firm braking is, the nearest to gentle braking; then the latest conflict, or the hardest braking
    if it is near.
    """
    now, limits, dt = view.agent.drive, view.limits, view.dt
    before = now.acceleration
    low, high = jnp.maximum(comfortable[0], GENTLE[0]), jnp.minimum(comfortable[1], GENTLE[1])
    most = jnp.maximum(before + PUSHING_JERK * dt, RELEASED)
    smooth = jnp.clip(jnp.clip(drive.acceleration, before - BRAKING_JERK * dt, most), low, high)
    eased = jnp.maximum(before + EASING, low)
    choices = jnp.concatenate([smooth[None], eased, low[None], jnp.asarray(ACCELERATIONS)])
    choices = jnp.maximum(choices, -limits.braking)
    conflict = time_to_conflict(view, choices, jnp.maximum(low, SLOWING))
    seconds = conflict.by_any
    safe, gentle = seconds >= HORIZON, conflict.by_gentle >= HORIZON
    crowding = jnp.maximum(CALM - contact_after(view, choices), 0.0)
    crowding = jnp.where(choices > smooth, jnp.maximum(crowding, crowding[0]), crowding)
    near = -jnp.abs(choices - smooth) - PRICE * crowding
    last = LAST_TIER + LATENESS * seconds + jnp.where(jnp.max(seconds) < IMMINENT, -choices, near)
    rank = jnp.where(gentle, near, jnp.where(safe, FIRM_TIER - jnp.abs(choices - low), last))
    chosen = choices[jnp.argmax(rank)]
    # what is far off may turn out to be nothing: until it is near, as hard as is gentle
    chosen = jnp.where(jnp.max(seconds[: 2 + len(EASING)]) >= NEAR, jnp.maximum(chosen, low), chosen)
    chosen = jnp.where(gentle[0] & (crowding[0] <= 0.0), smooth, chosen)
    grip = LATERAL / jnp.maximum(jnp.square(now.motion.speed), 1e-3)
    curvature, steered = keep_clear(view, drive.curvature)
    return arc(now, chosen, jnp.clip(curvature, -grip, grip), limits, dt), ~gentle[0] | steered


def contact_after(view: View, choices: jax.Array) -> jax.Array:
    """Seconds [C] to a contact with somebody ahead if all went on as they are after each of `choices` [C]."""
    chosen, there = view.others
    others, speed = view.features.others, view.agent.drive.motion.speed
    after = travel(speed, choices, view.dt, view.limits.speed)[1][:, None]
    x, y, cos, sin, vx, vy, length, width = (
        pick(values, chosen)[None]
        for values in (others.x, others.y, others.cos, others.sin, others.vx, others.vy, *others.half)
    )
    ahead = there[None] & (jnp.abs(y) <= NARROW * x)
    boxes = Relative(x, y, cos, sin, others.own, (length, width), vx - (after - speed), vy)
    contact = jnp.min(jnp.where(ahead, time_to_contact(boxes), FREE), axis=-1)
    return jnp.where(after[:, 0] < STOPPED, FREE, contact)


def keep_clear(view: View, curvature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`curvature`, 1/m, or where this leads over the road's edge or into others, that which follows the route or the
    way beside it, whichever does so least; and whether it was replaced, a bool."""
    features, (x, y, heading, speed) = view.features, view.agent.drive.motion
    reach = jnp.maximum(PURSUIT[0], PURSUIT[1] * speed)
    aim_x, aim_y, _ = on_route(features, features.s + reach)
    aim_x, aim_y = into(aim_x - x, aim_y - y, jnp.cos(heading), jnp.sin(heading))
    follow = 2.0 * (aim_y + jnp.asarray(OFFSETS)) / jnp.maximum(jnp.square(aim_x) + jnp.square(aim_y), 1.0)
    choices = jnp.concatenate([curvature[None], jnp.clip(follow, -MAX_CURVATURE, MAX_CURVATURE)])
    # held for a while: how far beside the route then, and at which angle to it
    held = speed * np.float32(HELD)
    bend = wrap(on_route(features, features.s + held)[2] - on_route(features, features.s)[2])
    turn = choices * held - bend
    lateral = features.lateral + held * jnp.sin(features.heading_error + 0.5 * turn)
    way, blend = speed * (STEERED - np.float32(HELD)), jnp.maximum(BLEND, speed)

    def after(lateral: jax.Array, error: jax.Array) -> tuple[jax.Array, ...]:
        return return_to(features, features.s + held, lateral, error, way, blend)

    own_poses = jax.vmap(after)(lateral, features.heading_error + turn)
    x, y, cos, sin = (value[..., None] for value in own_poses)  # [4, T, 1]
    half_length, half_width = features.others.own
    box_x, box_y = (value[None, None] for value in corners(half_length, half_width))
    dx, dy = out_of(box_x, box_y, cos, sin)
    over = jnp.max(clearance(view.road, x + dx, y + dy), axis=(1, 2)) + EDGE
    over = jnp.where(features.kind == PEDESTRIAN, -OPEN, over)
    boxes = others_at(view, STEERED)
    gap = gaps((x, y, cos, sin), (half_length, half_width), boxes)
    gap = jnp.min(jnp.where(boxes.least[None, None] > -FREE, gap, FREE), axis=(1, 2))
    crowded = SIDE - jnp.maximum(gap, 0.0)
    least = jnp.argmin(jnp.maximum(jnp.maximum(over[1:], 0.0), jnp.maximum(crowded[1:], 0.0) + RATHER)) + 1
    over = jnp.maximum(over, crowded)
    replaced = (over[0] > 0.0) & (over[least] < over[0] - LESS)
    return jnp.where(replaced, choices[least], curvature), replaced


class Conflict(NamedTuple):
    """Seconds [C] to the first conflict after each choice and the best manoeuvre; HORIZON where there is none."""

    by_gentle: jax.Array  # manoeuvres without FIRM braking
    by_any: jax.Array


def time_to_conflict(view: View, choices: jax.Array, slowing: jax.Array) -> Conflict:
    """First conflict after each of `choices` [C], m/s^2 for one step. `slowing` is the braking that is enough before a
    bend."""
    features, limits, dt, speed = view.features, view.limits, view.dt, view.agent.drive.motion.speed
    times = np.arange(1, round(HORIZON / STEP) + 1, dtype=np.float32) * np.float32(STEP)
    way = distances(speed, choices, times, limits, dt)  # [C, F, T]
    # held back from fusion: a CPU would work out a pose anew for each of the others
    others = others_at(view, times, turns=True)
    own_poses, boxes = lax.optimization_barrier((poses(features, way), others))
    # longer by what is swept half way to the next look, so that no corner is cut between two
    own_length, own_width = features.others.own
    moved = jnp.diff(way, axis=-1, prepend=0.0)[..., None]
    forward = 0.5 * boxes.ahead[None, None, None]
    own = own_length + SWEPT * moved + forward, jnp.broadcast_to(own_width, moved.shape)
    x, y, cos, sin = (value[..., None] for value in own_poses)  # [C, F, T, 1]
    gap = gaps((x, y, cos, sin), own, boxes, forward)  # [C, F, T, K]
    stop = features.light_distance
    stoppable = jnp.square(speed) < 2.0 * limits.braking * stop
    red = (features.light_state == RED) & stoppable
    hit = jnp.any(gap < boxes.least[None, None, None], axis=-1) | (red & (way > jnp.maximum(stop - LINE, 0.0)))
    before = (times - np.float32(STEP)).reshape(1, 1, -1)
    seconds = jnp.min(jnp.where(hit, before, np.float32(HORIZON)), axis=-1)
    bend = bend_speed(features.route[2, BEHIND:], ROUTE_SPACING, np.arange(AHEAD, dtype=np.float32), BEND)
    fast = (travel(speed, choices, dt, limits.speed)[1] > bend) & (choices > slowing)
    seconds = jnp.where(fast[:, None], jnp.minimum(seconds, HORIZON - STEP), seconds)
    return Conflict(jnp.max(seconds[:, 1:], axis=-1), jnp.max(seconds, axis=-1))


def distances(speed: jax.Array, choices: jax.Array, times: np.ndarray, limits: Limits, dt: jax.Array) -> jax.Array:
    """Metres [C, F, T] driven after `times` [T] with each of `choices` [C] for `dt` and each manoeuvre from then on."""
    begun, then = travel(speed, choices, dt, limits.speed)
    manoeuvres = jnp.asarray([FIRM, SOFT, 0.0, HURRIED])[None, :, None]
    left = jnp.maximum(times - dt, 0.0)[None, None]
    return begun[:, None, None] + travel(then[:, None, None], manoeuvres, left, limits.speed)[0]


def gaps(own_pose: tuple[jax.Array, ...], own: tuple[Any, Any], boxes: Boxes, forward: Any = 0.0) -> jax.Array:
    """Metres [..., T, K] between the own box and those of others.

    `mine`: x, y, cosine and sine [..., T, 1]; `own`: half length and half width of a box whose centre is `forward`
    metres ahead of them.
    """
    x, y, cos, sin = own_pose
    lead = (None,) * (x.ndim - 2)
    other_x, other_y, other_cos, other_sin = (value[lead] for value in boxes[:4])
    half_length, half_width = (value[(*lead, None)] for value in boxes.half)
    dx, dy = into(other_x - x, other_y - y, cos, sin)
    turn_cos, turn_sin = other_cos * cos + other_sin * sin, other_sin * cos - other_cos * sin
    return separation(Relative(dx - forward, dy, turn_cos, turn_sin, own, (half_length, half_width)))


def on_route(features: Features, s: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, y and heading of the own route at arc lengths `s` [...]; beyond its window it goes straight on."""
    place = s / ROUTE_SPACING - features.route_first.astype(jnp.float32)
    index = jnp.clip(place.astype(jnp.int32), 0, BEHIND + AHEAD - 2)
    part = place - index.astype(jnp.float32)
    (x, y, low), (next_x, next_y, high) = ([pick(row, i) for row in features.route] for i in (index, index + 1))
    return x + part * (next_x - x), y + part * (next_y - y), low + jnp.clip(part, 0.0, 1.0) * wrap(high - low)


def poses(features: Features, way: jax.Array) -> tuple[jax.Array, ...]:
    """x, y, cosine and sine along the own route after `way` [...] metres, coming back to it from beside it."""
    return return_to(features, features.s, features.lateral, features.heading_error, way, BLEND)


def return_to(
    features: Features, s: jax.Array, lateral: jax.Array, error: jax.Array, way: jax.Array, blend: float | jax.Array
) -> tuple[jax.Array, ...]:
    """x, y, cosine and sine after `way` [...] metres from arc length `s` of the own route, to which one comes back on
    `blend` metres from `lateral` beside it and a heading `error`, rad."""
    x, y, along = on_route(features, s + way)
    slope = jnp.tan(jnp.clip(error, -0.8, 0.8))
    fade, growth = jnp.exp(-way / blend), slope + lateral / blend
    aside = lateral + growth * way
    heading = along + jnp.arctan((growth - aside / blend) * fade)
    return x - aside * fade * jnp.sin(along), y + aside * fade * jnp.cos(along), jnp.cos(heading), jnp.sin(heading)


def relevant(features: Features, count: int) -> Others:
    """The `count` others that may matter most: those nearest, now and at their closest approach, or in the way; the
    first in the way always, those who follow behind never."""
    others, seen = features.others, features.seen
    length, width = others.half
    behind = others.x + length * jnp.abs(others.cos) + width * jnp.abs(others.sin) < -others.own[0]
    now, then = nearness(others)
    rank = jnp.minimum(now + then, features.blocks)
    rank = jnp.where(features.blocks < jnp.minimum(features.gap + 1e-3, FREE), 0.0, rank)
    counts = seen & (now < RANGE) & ~(behind & (others.cos > 0.7))
    chosen = nearest(jnp.where(counts, rank, FREE), count)
    return chosen, pick(counts, chosen)


def goes_first(agent: Agent, own_length: jax.Array, chosen: jax.Array, others: tuple[jax.Array, ...]) -> jax.Array:
    """Precedence of the agent over each of the others, bool [K]: True where both are slow and it goes before the other.

    Where their straight ways cross, who would be there sooner goes first; who comes from the right may be RIGHT later.
    Where they drive almost along one line, who has the lower number goes first. Both find the same; the number stands
    for any mark that both can read, as a number plate. `others`: x, y, cosine, sine, velocity, half length, kind [K].
    """
    own_x, own_y, heading, speed = agent.drive.motion
    other_x, other_y, other_cos, other_sin, vx, vy, length, kind = others
    own_cos, own_sin = jnp.cos(heading), jnp.sin(heading)
    x, y = into(other_x - own_x, other_y - own_y, own_cos, own_sin)
    cos, sin = into(other_cos, other_sin, own_cos, own_sin)
    pace = vx * other_cos + vy * other_sin
    crosses = jnp.abs(sin) > CROSSING
    slant = jnp.where(crosses, sin, 1.0)
    mine, theirs = x - y * cos / slant - own_length, -y / slant - length
    later = arrival(mine, speed) - arrival(theirs, pace)
    later = jnp.where(crosses, later + RIGHT * jnp.sign(sin), (agent.object - chosen).astype(jnp.float32))
    return (later < 0.0) & (speed < SLOW) & (jnp.abs(pace) < SLOW) & (kind != PEDESTRIAN)


def arrival(distance: jax.Array, speed: jax.Array) -> jax.Array:
    """Seconds to a place `distance` metres ahead for who sets off; 0 for who is past it."""
    speed, distance = jnp.maximum(speed, 0.0), jnp.maximum(distance, 0.0)
    return (jnp.sqrt(jnp.square(speed) + 2.0 * SETTING_OFF * distance) - speed) / SETTING_OFF


def others_at(view: View, times: np.ndarray, turns: bool = False) -> Boxes:
    """Boxes of the others at `times` [T], as the agent keeps clear of them; with `turns`, those before whom it goes
    brake from now on."""
    features, scene, speed = view.features, view.scene, view.agent.drive.motion.speed
    chosen, there = view.others
    known = (
        scene.x,
        scene.y,
        scene.cos,
        scene.sin,
        scene.vx,
        scene.vy,
        scene.half_length,
        scene.half_width,
        scene.kind,
    )
    x, y, cos, sin, vx, vy, half_length, half_width, kind = (pick(values, chosen) for values in known)
    apart = pick(features.separation, chosen)
    least = jnp.minimum(MARGIN, 0.7 * apart)
    least = jnp.where(there, least, -FREE)
    s, lateral, heading = jax.vmap(lambda x, y: project(features.route, features.route_first, x, y))(x, y)
    route_cos, route_sin = jnp.cos(heading), jnp.sin(heading)
    pace, facing = vx * route_cos + vy * route_sin, cos * route_cos + sin * route_sin
    # nobody comes nearer by more than a tenth, and to who is in the way by no more than gentle braking needs
    stop = jnp.square(speed) / (-2.0 * SOFT) - jnp.square(jnp.maximum(pace, 0.0)) / (2.0 * OTHERS_BRAKE)
    kept = jnp.where(pick(features.blocks, chosen) < FREE, apart - CREEP - jnp.maximum(stop, 0.0), 0.0)
    ahead = jnp.clip(jnp.maximum(0.9 * apart, kept) - MARGIN, 0.0, STANDING - MARGIN)
    first = features.route_first.astype(jnp.float32)
    within = (s > first + 0.5) & (s < first + np.float32(BEHIND + AHEAD - 2))
    follows = within & (jnp.abs(facing) > ALONG) & (jnp.abs(lateral) < BESIDE) & (kind != PEDESTRIAN)
    time = times[:, None]
    gone = jnp.broadcast_to(time, (len(times), len(chosen)))
    if turns:
        fast = jnp.maximum(jnp.hypot(vx, vy), 1e-3)[None]
        ended = jnp.minimum(time, fast / OTHERS_BRAKE)
        yields = goes_first(view.agent, features.others.own[0], chosen, (x, y, cos, sin, vx, vy, half_length, kind))
        gone = jnp.where(yields, ended - 0.5 * OTHERS_BRAKE * ended * ended / fast, time)
    braked = jnp.minimum(time, jnp.maximum(pace, 0.0)[None] / OTHERS_BRAKE)
    slowing = pace[None] * braked - 0.5 * OTHERS_BRAKE * braked * braked
    bent_s = s[None] + jnp.where((facing > 0.0)[None], slowing, pace[None] * time)
    bent_x, bent_y, bent = on_route(features, bent_s)
    aside = vy * route_cos - vx * route_sin
    aside = aside - jnp.clip(aside, -WOBBLE, WOBBLE)
    lateral = lateral[None] + aside[None] * jnp.minimum(gone, DRIFT)
    turn_cos, turn_sin = jnp.cos(bent - heading[None]), jnp.sin(bent - heading[None])
    places = (
        (bent_x - lateral * jnp.sin(bent), x[None] + vx[None] * gone),
        (bent_y + lateral * jnp.cos(bent), y[None] + vy[None] * gone),
        (cos[None] * turn_cos - sin[None] * turn_sin, jnp.broadcast_to(cos[None], bent.shape)),
        (sin[None] * turn_cos + cos[None] * turn_sin, jnp.broadcast_to(sin[None], bent.shape)),
    )
    swept = half_length + SWEPT * STEP * jnp.hypot(vx, vy)
    x, y, cos, sin = (jnp.where(follows[None], a, b) for a, b in places)
    return Boxes(x, y, cos, sin, (swept, half_width), least, ahead)
