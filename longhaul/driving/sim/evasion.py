"""Evasion of those who do not react: who they are believed to be, and plans that keep out of their way.

The safety check (`safety`) leaves it to those who follow to keep their distance, and waits where others pass. With a
driver who is asleep, both end in a collision. Three kinds of driving say that nobody is in control: a velocity that is
kept exactly although it is time to brake; hard pushing although it is time to brake; and, of a vehicle, pushing or
swerving that is harder than that of who reacts, and always alike. A vehicle that once drove so is wild: it is never
trusted again. Who reacts does none of them, so evasion costs nothing beside others: a driver who sees the agent brakes,
steers, or at least wavers. Nor does a vehicle that was measured: its velocities are noisy.

Where the check's command, followed by braking or holding the speed, meets somebody who is believed not to react, or who
stands, or leads over the road's edge, the best of a few plans is driven instead: an acceleration or two in turn and an
offset from the route, rolled forward as the vehicle would drive them, and chosen anew in each step. Plans keep clear of
everybody, of the road's edge and of red lights; where none does so with the usual room, with little room. Those who do
not react are taken to go on as they do now, and so is everybody else who keeps the velocity: who is asleep is seldom
alone. The others move as the check takes them. Nobody knows what a wild vehicle will do: each plan is held against
several of its futures, and the plan of the least risk is driven.

Few agents evade, so plans are made in a loop over those who need one (`conditional.only_where`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.driving.datasets.log import PEDESTRIAN, VEHICLE
from longhaul.driving.scenario.scenario import RED
from longhaul.driving.sim.conditional import if_any
from longhaul.driving.sim.dynamics import MAX_CURVATURE, Drive, arc, steerable, travel
from longhaul.driving.sim.features import Features, relative, time_to_contact
from longhaul.driving.sim.geometry import FREE, clearance, corners, into, nearest, out_of, pick
from longhaul.driving.sim.observation import RANGE, nearness
from longhaul.driving.sim.safety import (
    FIRM,
    LINE,
    PURSUIT,
    SOFT,
    SWEPT,
    Boxes,
    Others,
    View,
    gaps,
    on_route,
    others_at,
)
from longhaul.driving.sim.traffic import Scene

# ---------------------------------------------------------------------------------------------------- the belief

ASLEEP, KEPT = 1.0, 0.5
"""m/s^2 of braking that is due for an agent, and s for which the velocity was kept until then."""

SOON = 2.0
"""s to a contact from which on it counts. Until then bends of the ways may keep two apart."""

EXACT = 0.05
"""m/s^2, along and across, by which a velocity that is kept changes at most, and by which an acceleration does from one
step to the next. Drivers waver by more. Measured velocities do, too: with sensors less exact than this nobody is
believed to be asleep, or wild."""

PUSHED, PUSHES_ON = 0.5, 0.2
"""m/s^2 of braking that is due, and s of pushing until then."""

PUSHING = 2.5
"""m/s^2 from which somebody pushes hard: more than passengers like, and more than copies and reactive vehicles do."""

SWERVING, WILD = 4.8, 0.3
"""m/s^2 across from which a vehicle swerves: more than the check ever steers (`safety.LATERAL`); and s for which one
that swerves, or pushes hard, does exactly the same before it is wild."""

ASKED = 8
"""Others who keep the velocity, the nearest to agents, for whom it is asked in a step whether they run into anybody."""

MOVES = 0.5
"""m/s: who is slower stands."""

JUMP = 20.0
"""m/s^2 of change beyond which somebody has just appeared, or was put elsewhere."""


class Habits(NamedTuple):
    """Driving of everybody in a world until now, each [N]."""

    vx: jax.Array  # m/s
    vy: jax.Array
    push: jax.Array  # m/s^2, along
    turn: jax.Array  # m/s^2, across
    kept: jax.Array  # s for which the velocity was kept
    pushed: jax.Array  # s of pushing
    harsh: jax.Array  # s for which an acceleration was kept that is harder than those of who reacts
    wild: jax.Array  # bool: harsh for WILD, at any time
    blind: jax.Array  # bool: believed not to react


def begin(scene: Scene) -> Habits:
    """Habits before anything is known."""
    zeros, never = jnp.zeros_like(scene.vx), jnp.zeros_like(scene.present)
    return Habits(scene.vx, scene.vy, zeros, zeros, zeros, zeros, zeros, never, never)


def watch(
    habits: Habits, scene: Scene, features: Features, speed: jax.Array, counts: jax.Array, excused: jax.Array,
    dt: jax.Array,
) -> Habits:  # fmt: skip
    """Habits after a step of `dt` seconds that led to `scene`. `features` and `speed` are those of the agents [A];
    others should brake for those who `counts`. Who is `excused` [N] is not harsh: agents that evade, as their warning
    lights tell."""
    push, turn = into((scene.vx - habits.vx) / dt, (scene.vy - habits.vy) / dt, scene.cos, scene.sin)
    moves = scene.present & (jnp.square(scene.vx) + jnp.square(scene.vy) > MOVES * MOVES)
    change = jnp.square(push) + jnp.square(turn)
    sane = moves & (change < JUMP * JUMP)
    same = jnp.square(push - habits.push) + jnp.square(turn - habits.turn) < EXACT * EXACT
    kept = jnp.where(moves & (change < EXACT * EXACT), habits.kept + dt, 0.0)
    pushed = jnp.where(sane & (push > PUSHING), habits.pushed + dt, 0.0)
    harsh = sane & (scene.kind == VEHICLE) & ~excused & ((push > PUSHING) | (jnp.abs(turn) > SWERVING))
    harsh = jnp.where(harsh, jnp.where(same, habits.harsh, 0.0) + dt, 0.0)
    asleep, hasty, wild = kept > KEPT - 1e-3, pushed > PUSHES_ON - 1e-3, habits.wild | (harsh > WILD - 1e-3)
    due, when = jax.vmap(demand)(features, speed)
    due = jnp.where(counts[:, None], due, 0.0)
    called = asleep & jnp.any((due > ASLEEP) & (when < SOON), axis=0)
    called = called | (hasty & jnp.any(due > PUSHED, axis=0))
    called = called | runs_into(scene, features, counts, asleep & ~habits.blind)
    blind = wild | ((asleep | hasty) & (habits.blind | called))
    sane = sane.astype(jnp.float32)
    return Habits(scene.vx, scene.vy, sane * push, sane * turn, kept, pushed, harsh, wild, blind)


def demand(features: Features, speed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(braking, m/s^2, by which each of the others [N] would just not touch the agent; s until they touch) if the agent
    keeps its velocity of `speed`."""
    others = features.others
    pace = (others.vx + speed) * others.cos + others.vy * others.sin
    closing = jnp.maximum(pace - jnp.maximum(speed * others.cos, 0.0), 0.0)
    when = time_to_contact(others)
    # who closes v t metres from speed v to 0 brakes by v / 2t
    braking = jnp.where(features.seen & (when < FREE), closing / (2.0 * jnp.maximum(when, 0.05)), 0.0)
    return braking, when


def runs_into(scene: Scene, features: Features, counts: jax.Array, asleep: jax.Array) -> jax.Array:
    """bool [N]: who of those `asleep` runs into somebody, whoever that is. ASKED of them are looked at: the nearest to
    agents [A] that `counts`."""
    apart = jnp.hypot(features.others.x, features.others.y)
    apart = jnp.min(jnp.where(counts[:, None], apart, FREE), axis=0)
    chosen = nearest(jnp.where(asleep & (apart < RANGE), apart, FREE), ASKED)

    def one(mine: jax.Array) -> jax.Array:
        pose = scene.x[mine], scene.y[mine], scene.cos[mine], scene.sin[mine]
        others = relative(scene, mine, (scene.half_length[mine], scene.half_width[mine]), pose)
        pace = scene.vx[mine] * pose[2] + scene.vy[mine] * pose[3]
        closing = pace - jnp.maximum(pace + others.vx, 0.0)
        when = time_to_contact(others)
        meets = scene.present & (jnp.arange(len(scene.x)) != mine) & (when < SOON)
        return jnp.any(meets & (closing > 2.0 * ASLEEP * jnp.maximum(when, 0.05)))

    found = jax.vmap(one)(chosen) & pick(asleep & (apart < RANGE), chosen)
    return jnp.any(found[:, None] & (chosen[:, None] == jnp.arange(len(asleep))[None]), axis=0)


# ----------------------------------------------------------------------------------------------------- the plans

HORIZON, STEP = 4.0, 0.25
"""s: how far ahead plans are driven, and in which steps."""

PUSHES = (
    *((push, push, 0.0) for push in (-6.0, -3.0, -1.0, 0.0, 1.5, 3.0, 5.0)),
    *((5.0, 0.0, 0.5), (5.0, 0.0, 1.0), (5.0, -6.0, 1.0), (3.0, -3.0, 1.0), (-6.0, 5.0, 0.5)),
)
"""Accelerations of plans: m/s^2 at first, m/s^2 later, and s until then."""

SIDES = (0.0, 0.9, -0.9, 1.8, -1.8, 2.7, -2.7, 3.6, -3.6, 5.0, -5.0)
"""m to the left of the route of plans."""

PLANS = np.array([(*pushes, side) for pushes in PUSHES for side in SIDES], np.float32).T
"""Accelerations and offset of all plans, [4, P]."""

WAITS = np.array([(push, push, 0.0, 0.0) for push in (FIRM, SOFT, 0.0)], np.float32).T
"""What may follow the check's command after LASTS, as PLANS. It is not counted on that the agent will push."""

LASTS = 0.5
"""s for which the check's command is taken to last."""

LANE = 0.95
"""m beside the route up to which those who follow, and react, keep their distance."""

LOOKED = 16
"""Others that are looked at."""

EDGE, ROOM, GAP = 0.2, 0.3, 0.05
"""m to be kept of the road's edge, of those who do not react, and of all others; less where they are nearer already."""

TIGHT = 0.02
"""m to be kept of anybody and of the road's edge where no plan keeps more."""

REACH = 2.5, PURSUIT[1]
"""m and s: how far ahead on the route is steered to, the larger of both: for who is slow, nearer than in `safety`."""

BETTER = 0.15
"""s by which a plan must come later to a conflict than the check's command."""

LEAVING, NEAR = 2.0, 3.0
"""Costs of leaving the lane, and of 1 m less than 1 m of room to who does not react. A metre beside the route costs 1,
and so does a difference of 2 m/s^2 to the check's command."""

NOW = np.nan
"""In FUTURES: as it is now."""

FUTURES = np.array(
    [
        (9.0, NOW, NOW, 0.0),
        (0.5, NOW, 0.0, 0.0),
        (0.0, 4.0, 0.0, 0.0),
        (0.0, -6.0, 0.0, 0.0),
        (0.0, NOW, 3.0, 1.0),
        (0.0, NOW, -3.0, 1.0),
        (0.0, NOW, 6.0, 1.0),
        (0.0, NOW, -6.0, 1.0),
        (0.0, 1.2, NOW, 0.5),
        (0.0, -3.0, NOW, 0.5),
        (0.5, NOW, 4.0, 1.0),
        (0.5, NOW, -4.0, 1.0),
    ],
    np.float32,
)
"""Futures of a wild vehicle, [F, 4]: s for which it goes on as now; then its push, m/s^2; its acceleration across, and
s for which that lasts before it goes straight on."""

CHANCES = np.array([0.25, 0.2] + [0.055] * 10, np.float32)
"""Chance of each of FUTURES."""

STRANGE, ROOM_STRANGE = 6, 0.2
"""Wild vehicles that are looked at, and m to be kept of them."""

FADES, RISK = 1.5, 300.0
"""s by which a contact must come later to count e times less, and cost of one at once."""

NOTICED, SAFER = 0.05, 0.03
"""Risk from which on an agent evades, and by how much a plan must lower it."""


class Ways(NamedTuple):
    """Plans as the vehicle drives them, [P, T]."""

    x: jax.Array
    y: jax.Array
    cos: jax.Array
    sin: jax.Array
    ridden: jax.Array  # m along the route


class Obstacles(NamedTuple):
    """Objects that plans keep clear of, as they are predicted for each STEP of HORIZON."""

    view: View  # of the others [K] that are looked at
    habits: Habits
    strange: Others  # wild vehicles
    boxes: Boxes  # of the others, [T, K]
    blind: jax.Array  # bool [K]: is taken to go on as now
    stands: jax.Array  # bool [K]
    behind: jax.Array  # bool [K]: follows


def predicted(view: View, habits: Habits) -> Obstacles:
    """Obstacles of an agent."""
    strange = wildest(view, habits.wild)
    view, blind, behind = around(view, habits)
    chosen, there = view.others
    times = np.float32(STEP) * np.arange(1, round(HORIZON / STEP) + 1, dtype=np.float32)
    boxes = unchanged(view, habits, others_at(view, times), blind)
    speed = jnp.hypot(pick(view.scene.vx, chosen), pick(view.scene.vy, chosen))
    return Obstacles(view, habits, strange, boxes, blind, there & (speed < MOVES), behind)


class Conflicts(NamedTuple):
    """Conflicts of ways [P]."""

    met: jax.Array  # bool [2, P, T, K]: nearer to others than the usual room, and than little
    barred: jax.Array  # bool [2, P, T]
    gap: jax.Array  # m, [P, T, K]
    risk: jax.Array  # [P], of contacts with wild vehicles

    def part(self, which: slice) -> Conflicts:
        """Conflicts of some of the ways."""
        return Conflicts(self.met[:, which], self.barred[:, which], self.gap[which], self.risk[which])


def conflicts(obstacles: Obstacles, ways: Ways) -> Conflicts:
    """Conflicts of each of `ways` with obstacles, the road's edge and a red light."""
    view = obstacles.view
    moved = jnp.diff(ways.ridden, axis=1, prepend=0.0)[..., None]
    own_length, own_width = view.features.others.own
    own = own_length + SWEPT * moved, jnp.broadcast_to(own_width, moved.shape)
    x, y, cos, sin = (value[..., None] for value in ways[:4])
    gap = gaps((x, y, cos, sin), own, obstacles.boxes)
    usual = jnp.minimum(jnp.where(obstacles.blind, ROOM, GAP), 0.7 * pick(view.features.separation, view.others[0]))
    met = gap[None] < jnp.stack([usual, jnp.minimum(usual, TIGHT)])[:, None, None]
    beside_wild = jnp.any(obstacles.strange[1])
    risk = if_any(risks)(beside_wild, view, obstacles.habits, obstacles.strange, (x, y, cos, sin), own)
    return Conflicts(met, forbidden(view, ways), gap, risk)


def unharmed(obstacles: Obstacles, found: Conflicts) -> jax.Array:
    """Seconds [2, P] until who does not react, or stands, or the road's edge is met, with the usual room and little."""
    counts = obstacles.blind | obstacles.stands
    return seconds(jnp.any(found.met & counts[None, None, None], axis=-1) | found.barred)


def threatened(view: View, habits: Habits, drive: Drive) -> jax.Array:
    """bool: the check's command, which leads to `drive`, meets somebody, whatever of WAITS follows. Else `plan`, which
    looks at all of PLANS, evades nobody."""
    obstacles = predicted(view, habits)
    waits = conflicts(obstacles, roll(view, drive, WAITS, LASTS)[0])
    lasts = unharmed(obstacles, waits)[0]
    risky = jnp.min(harm(lasts) + waits.risk) > NOTICED
    return jnp.where(jnp.any(obstacles.strange[1]), risky, jnp.max(lasts) + BETTER < HORIZON)


def plan(view: View, habits: Habits, drive: Drive) -> tuple[Drive, jax.Array]:
    """(`drive`, to which the check's command leads, or the first step of the plan that evades those who are believed
    not to react; bool: it evades)."""
    obstacles = predicted(view, habits)
    blind, there = obstacles.blind, obstacles.view.others[1]
    count = WAITS.shape[1]
    commanded = np.where(np.arange(count + PLANS.shape[1]) < count, LASTS, 0.0)
    ways, curvature = roll(view, drive, np.concatenate([WAITS, PLANS], axis=1), commanded)
    both = conflicts(obstacles, ways)
    waits, found = both.part(slice(count)), both.part(slice(count, None))
    lasting = unharmed(obstacles, waits)
    push, side = jnp.asarray(PLANS[0]), jnp.asarray(PLANS[3])
    leaves = jnp.abs(side) > LANE
    counts = there[None] & ((blind | ~obstacles.behind)[None] | leaves[:, None])  # [P, K]
    free = seconds(jnp.any(found.met & counts[None, :, None], axis=-1) | found.barred)
    room = jnp.min(jnp.where(blind, found.gap, FREE), axis=(1, 2))
    cost = 0.5 * jnp.abs(push - drive.acceleration) + jnp.abs(side) + LEAVING * leaves
    cost = cost + NEAR * jnp.clip(1.0 - room, 0.0, 1.0)
    roomy, tight = jnp.any(free >= HORIZON, axis=1)
    which = (tight & ~roomy).astype(jnp.int32)
    lasts, longest = free[which], jnp.max(lasting[which])
    best = jnp.argmax(jnp.where(lasts >= HORIZON, -cost, -1e3 + 10.0 * lasts - 0.1 * cost))
    evades = lasts[best] > longest + BETTER
    # beside wild vehicles, of which only risks are known, the plan of least risk and cost
    risk_of_command, risk_of_plan = jnp.min(harm(lasting[0]) + waits.risk), harm(free[0]) + found.risk
    safest = jnp.argmin(RISK * risk_of_plan + cost)
    safer = (risk_of_command > NOTICED) & (risk_of_plan[safest] < risk_of_command - SAFER)
    beside_wild = jnp.any(obstacles.strange[1])
    best, evades = jnp.where(beside_wild, safest, best), jnp.where(beside_wild, safer, evades)
    evaded = arc(view.agent.drive, push[best], curvature[count + best], view.limits, view.dt)
    return jax.tree.map(lambda new, old: jnp.where(evades, new, old), evaded, drive), evades


def seconds(hit: jax.Array) -> jax.Array:
    """Seconds to the first conflict of `hit` [..., T], HORIZON where there is none."""
    times = np.arange(hit.shape[-1], dtype=np.float32) * np.float32(STEP)
    return jnp.min(jnp.where(hit, jnp.broadcast_to(times, hit.shape), np.float32(HORIZON)), axis=-1)


def harm(time: jax.Array) -> jax.Array:
    """Risk of a contact after `time` seconds."""
    return jnp.where(time >= HORIZON, 0.0, jnp.exp(-time / FADES))


def around(view: View, habits: Habits) -> tuple[View, jax.Array, jax.Array]:
    """The view of the nearest others on all sides but those who are wild, those who are blind first; who of them is
    taken to go on as now, and who follows, bool [K]."""
    features, others = view.features, view.features.others
    now, then = nearness(others)
    counts = features.seen & (now < RANGE) & ~habits.wild
    rank = jnp.where(habits.blind, 0.0, jnp.minimum(now + then, features.blocks))
    chosen = nearest(jnp.where(counts, rank, FREE), LOOKED)
    length, width = others.half
    behind = others.x + length * jnp.abs(others.cos) + width * jnp.abs(others.sin) < -others.own[0]
    behind = behind & (others.cos > 0.7)
    there, blind = pick(counts, chosen), pick(habits.blind | (habits.kept > KEPT - 1e-3), chosen)
    return view._replace(others=(chosen, there)), blind & there, pick(behind, chosen)


def wildest(view: View, wild: jax.Array) -> Others:
    """The nearest STRANGE of those who are `wild`, now and at their closest approach."""
    now, then = nearness(view.features.others)
    counts = view.features.seen & (now < RANGE) & wild
    chosen = nearest(jnp.where(counts, now + then, FREE), STRANGE)
    return chosen, pick(counts, chosen)


def risks(view: View, habits: Habits, strange: Others, pose: tuple[jax.Array, ...], own: tuple[Any, Any]) -> jax.Array:
    """Risk [P] of contacts with those who are `strange` on each of P ways, of `pose` [P, T, 1] and half sizes `own`."""
    chosen, there = strange
    gap = gaps(pose, own, futures(view, habits, chosen))  # [P, T, F * K]
    near = jnp.minimum(ROOM_STRANGE, 0.7 * pick(view.features.separation, chosen))
    near, there = (jnp.tile(value, len(FUTURES))[None, None] for value in (near, there))
    met = (gap < near) & there
    when = seconds(jnp.moveaxis(met, 1, -1)).reshape(-1, len(FUTURES), STRANGE)
    return jnp.sum(harm(when) * CHANCES[None, :, None], axis=(1, 2))


def futures(view: View, habits: Habits, chosen: jax.Array) -> Boxes:
    """Boxes [T, F * K] of the objects `chosen` [K] at each STEP, in each of FUTURES."""
    scene, steps = view.scene, round(HORIZON / STEP)
    known = (scene.x, scene.y, scene.heading, scene.vx, scene.vy, habits.push, habits.turn)
    x, y, heading, vx, vy, push, turn = (pick(value, chosen)[None, None] for value in known)
    begun = (np.arange(steps, dtype=np.float32) * np.float32(STEP))[:, None, None]
    until, pushes, turns, lasts = (row[None, :, None] for row in FUTURES.T)
    push = jnp.where((begun < until) | np.isnan(pushes), push, np.nan_to_num(pushes))
    then = jnp.where(begun < until + lasts, jnp.where(np.isnan(turns), turn, np.nan_to_num(turns)), 0.0)
    turn = jnp.where(begun < until, turn, then)  # [T, F, K]
    speed = jnp.hypot(vx, vy)
    after = jnp.maximum(speed + STEP * jnp.cumsum(jnp.broadcast_to(push, turn.shape), axis=0), 0.0)
    before = jnp.concatenate([jnp.broadcast_to(speed, after[:1].shape), after[:-1]])
    way = 0.5 * STEP * (before + after)
    bent = way * jnp.clip(turn / jnp.maximum(jnp.square(before), 1.0), -MAX_CURVATURE, MAX_CURVATURE)
    turned = jnp.clip(jnp.cumsum(bent, axis=0), -1.5, 1.5)
    along = jnp.where(speed > MOVES, jnp.arctan2(vy, vx), heading) + turned - 0.5 * bent
    x, y = x + jnp.cumsum(way * jnp.cos(along), axis=0), y + jnp.cumsum(way * jnp.sin(along), axis=0)
    x, y, cos, sin = (
        value.reshape(steps, -1) for value in (x, y, jnp.cos(heading + turned), jnp.sin(heading + turned))
    )
    half = tuple(jnp.tile(pick(value, chosen), len(FUTURES)) for value in (scene.half_length, scene.half_width))
    nothing = jnp.zeros_like(half[0])
    return Boxes(x, y, cos, sin, (half[0], half[1]), nothing, nothing)


def unchanged(view: View, habits: Habits, boxes: Boxes, blind: jax.Array) -> Boxes:
    """`boxes` at each STEP, but those who are `blind` [K] keep their acceleration and curvature, whatever the road
    does."""
    chosen, scene = view.others[0], view.scene
    time = jnp.asarray(np.float32(STEP) * np.arange(1, boxes.x.shape[0] + 1, dtype=np.float32))[:, None]
    known = (scene.x, scene.y, scene.heading, scene.vx, scene.vy, habits.push, habits.turn)
    x, y, heading, vx, vy, push, turn = (pick(value, chosen)[None] for value in known)
    speed = jnp.hypot(vx, vy)
    way, _ = travel(speed, push, time)
    bend = turn / jnp.maximum(jnp.square(speed), 1.0)
    half = jnp.clip(0.5 * bend * way, -1.5, 1.5)
    chord, along = way * jnp.sinc(half / jnp.pi), jnp.arctan2(vy, vx) + half
    turned = heading + 2.0 * half
    kept = x + chord * jnp.cos(along), y + chord * jnp.sin(along), jnp.cos(turned), jnp.sin(turned)
    x, y, cos, sin = (jnp.where(blind[None], new, old) for new, old in zip(kept, boxes[:4], strict=True))
    return boxes._replace(x=x, y=y, cos=cos, sin=sin)


def forbidden(view: View, ways: Ways) -> jax.Array:
    """bool [2, P, T]: the agent is nearer to the road's edge than EDGE, and than TIGHT; or past a red light before
    which it could stop."""
    features, speed = view.features, view.agent.drive.motion.speed
    x, y, cos, sin = (value[:, ::2, None] for value in ways[:4])  # the edge is looked up at every second step
    box_x, box_y = (value[None, None] for value in corners(*features.others.own))
    dx, dy = out_of(box_x, box_y, cos, sin)
    over = jnp.max(clearance(view.road, x + dx, y + dy), axis=-1)
    now, kept = jnp.max(features.corner_clearance), np.array([EDGE, TIGHT], np.float32)[:, None, None]
    off = over[None] + kept > jnp.maximum(now + kept, 0.0)
    off = jnp.repeat(off, 2, axis=2)[:, :, : ways.x.shape[1]] & (features.kind != PEDESTRIAN)
    stop = features.light_distance
    red = (features.light_state == RED) & (jnp.square(speed) < 2.0 * view.limits.braking * stop)
    return off | (red & (ways.ridden > jnp.maximum(stop - LINE, 0.0)))[None]


def roll(view: View, drive: Drive, plans: np.ndarray, lasts: np.ndarray | float) -> tuple[Ways, jax.Array]:
    """(ways of `plans` [4, P], as PLANS, from `lasts` seconds [P] on, until which the check's command `drive` holds;
    the first curvature of each [P])."""
    features, limits = view.features, view.limits
    first, then, until, side = plans
    begun = np.arange(round(HORIZON / STEP), dtype=np.float32) * np.float32(STEP)
    pushes, held = np.where(begun[:, None] < until, first, then), begun[:, None] < lasts

    def spread(value: jax.Array) -> jax.Array:
        return jnp.broadcast_to(value, side.shape)

    def step(carry: tuple[Drive, jax.Array], at: tuple[jax.Array, jax.Array]) -> Any:
        (now, s), (push, held) = carry, at
        x, y, heading, speed = now.motion
        reach = jnp.maximum(REACH[0], REACH[1] * speed)
        aim_x, aim_y, along = on_route(features, s + reach)
        aim_x, aim_y = aim_x - side * jnp.sin(along), aim_y + side * jnp.cos(along)
        aim_x, aim_y = into(aim_x - x, aim_y - y, jnp.cos(heading), jnp.sin(heading))
        grip = steerable(speed, limits)
        follow = jnp.clip(2.0 * aim_y / jnp.maximum(jnp.square(aim_x) + jnp.square(aim_y), 1.0), -grip, grip)
        bend = jnp.where(held, drive.curvature, follow)
        after = arc(now, jnp.where(held, drive.acceleration, push), bend, limits, jnp.float32(STEP))
        error = heading - on_route(features, s)[2]
        s = s + 0.5 * STEP * (speed + after.motion.speed) * jnp.maximum(jnp.cos(error), 0.0)
        return (after, s), (after.motion, s, bend)

    now = jax.tree.map(spread, view.agent.drive), spread(features.s)
    _, (motion, s, bend) = lax.scan(step, now, (jnp.asarray(pushes), jnp.asarray(held)))
    x, y, heading = motion.x.T, motion.y.T, motion.heading.T
    return Ways(x, y, jnp.cos(heading), jnp.sin(heading), s.T - features.s), bend[0]
