"""Metrics of an episode: those of the field's benchmarks, summed up step by step on the device.

A metric is a value with its validity (`types.Measure`): a log without lights tells nothing about red lights. `Tally` is
what is kept of each controlled agent, 33 bytes; `score` adds a step, `metrics` reads it. Steps of agents that do not
play, and those in which a replayed log has lost the agent, count nowhere. Verdicts are 1 or 0. Where the sources
(Waymax, arXiv 2310.08710; V-Max, arXiv 2503.08388; nuPlan, arXiv 2106.11810) disagree, here is what we take:

- `accuracy`, `collision`, `offroad`, `red_light`, `goal`: the events of `reward`, 1 if ever. `offroad` is valid
  where the source has edges, `red_light` if a light of the route was known at any step; both not for pedestrians.
  Accuracy (V-Max): none of the three.
- `at_fault_collision`: the first step of each contact is judged, since nothing stops boxes that overlap. An agent is at
  fault only if it moves, at 0.05 m/s or more (nuPlan; V-Max also blames a standing agent for meeting pedestrians and
  cyclists). Then it is at fault if it meets a pedestrian, a cyclist or a standing vehicle; if it touches with its front
  bumper; or if it touches with its side while its box reaches into several lanes. In the last case objects within 30
  degrees behind it do not count (nuPlan).
- `progress`: the largest arc length along the route by the log's, at most 1 (V-Max's ratio); 1 where the goal was
  reached or the log moved less than 0.5 m. `making_progress`: whether that is at least 0.2 (nuPlan: above).
- `distance`: the arc length that was driven, m, for kilometres between infractions.
- `progression` (Waymax): the arc length now by the log's at its end, both from the log's beginning; may be above 1.
  Not valid where the log moved less than 0.5 m.
- `time_to_collision`: whether it always was 0.95 s or more; `smallest_ttc`: the smallest, within 0.02 s, valid if any
  was below 5 s (V-Max's horizon; nuPlan's is 3 s, the verdict is the same). Of boxes that go on as they are; others
  count within 30 degrees ahead (V-Max), while the agent moves. nuPlan also counts those at its sides in junctions.
- `comfort`: the share of steps within V-Max's limits of `reward`, by differences from step to step.
- `comfortable`: nuPlan's verdict for the whole episode, its limits below. It filters with Savitzky and Golay's windows
  of up to 1.5 s, half of which lie in the future; we smooth each acceleration and its change exponentially over 0.3 s,
  and the yaw rate likewise. The magnitude of the jerk is left out.
- `speed_limit` (nuPlan, V-Max): 1 less the mean excess over the limit of the nearest lane that leads the agent's way,
  by 2.23 m/s, not below 0. Limits that the source does not give, but the lane's kind, are at least the log's own top
  speed (V-Max). Means over all steps, those without a known limit too; valid if it was known at any.
- `lanes` (V-Max): 1 if the box reached into several lanes beside each other for at most 3.4 s in all, 0.5 up to 5.7 s,
  else 0. A lane ends midway to the next one, at most 1.75 m from its centre: sources do not tell widths.
- `driving_direction` (nuPlan): 1 if less than 2 m were driven against the traffic within any 1 s, 0.5 below 6 m, else
  0. Windows begin every 0.2 s; lengths are kept in 2 cm, so that the sum is right within a few centimetres. Against the
  traffic is in a lane at more than 120 degrees, in no other, and not on the own route (within 1.75 m of it and 90
  degrees): in junctions people drive where lanes cross.
- `wrong_way` (Waymax's distance above 3.5 m, as a verdict): 1 if ever neither the route nor any lane that leads within
  90 degrees of the heading was within 3.5 m. Waymax's paths are the ego's feasible ones, without a heading.
- `off_route` (Waymax, likewise): 1 if ever farther than 5 m beside the route, or 2 m farther than from such a lane.
- `speed_limit`, `lanes`, `driving_direction`, `wrong_way` are valid where a lane was within 5 m at any step, and not
  for pedestrians. `off_route` needs the route alone.
- Lanes are known some 8 m around the routes of a scenario's agents, and 20 m after their goals; farther away they are
  found no more, or those nearest to the routes are. In the densest junctions a few are missing (`road_lookup`).
- `log_divergence`: the mean distance to where the log has the agent, over the steps at which it has (Waymax; ADE);
  `final_divergence`: that of the last such step (FDE), within 1 cm, at most 655 m. Valid if there was any.
- `kinematic_infeasibility` (Waymax): 1 if any step needs more than 10.4 m/s^2 or a curvature above 0.3 1/m of a
  bicycle. Below 0.6 m/s no curvature is asked for: a tracker's jitter. Not valid for pedestrians.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.datasets.log import PEDESTRIAN
from longhaul.driving.sim.features import Features, OnLanes
from longhaul.driving.sim.reward import STILL, Conduct, Events, Ride, excess
from longhaul.driving.sim.road_lookup import HALF_WIDTH
from longhaul.spaces import Measure

TTC_BOUND, TTC_HORIZON = 0.95, 5.0  # s
MAKING_PROGRESS = 0.2
SPEEDING = 2.23  # m/s
STRADDLING = (3.4, 5.7)  # s
AGAINST = (2.0, 6.0)  # m
AGAINST_WINDOW, AGAINST_SLOT = 1.0, 0.2  # s
WRONG_WAY, OFF_ROUTE, FARTHER = 3.5, 5.0, 2.0  # m
MAX_FEASIBLE, MAX_BENT, CRAWLING = 10.4, 0.3, 0.6  # m/s^2, 1/m, m/s

MIN_LONGITUDINAL, MAX_LONGITUDINAL, MAX_LATERAL = -4.05, 2.40, 4.89  # m/s^2
MAX_JERK, MAX_YAW, MAX_YAW_ACCELERATION = 4.13, 0.95, 1.93  # m/s^3, rad/s, rad/s^2
EASY_JERK = 4.0
"""m/s^3, MAX_JERK less what rounding takes."""

SMOOTHING = 0.3
"""nuPlan's limits of comfort, and the time, s, over which is smoothed."""

FLAGS = (
    *("collision", "offroad", "red_light", "goal", "at_fault", "touching", "wrong_way", "off_route", "near_collision"),
    *("uncomfortable", "infeasible", "against", "far_against", "laned", "limited", "lit"),
)
"""The low bits of `Tally.marks`, what has ever been; "touching": in the last step."""

STRADDLED, TTC = 16, 24
"""Positions in `Tally.marks` at which the 8 bits of these begin."""

TTC_UNIT, LONG_UNIT, PART_UNIT = 0.02, 0.02, 0.01  # s, m, m
EXCESS_UNIT, FINAL_UNIT = 1e-3, 1e-2  # m
FELT_UNIT, TURN_UNIT = 1e-3, 1e-4  # m/s^2 and m/s^3; rad/s


class Tally(NamedTuple):
    """Score of an episode so far, each [A]. Numbers of fewer than 32 bits stop at their ends."""

    marks: jax.Array  # uint32: FLAGS; steps in several lanes; the smallest time to collision, TTC_UNIT
    furthest: jax.Array  # float32, m along the route
    steps: jax.Array  # int16: steps played
    comfortable: jax.Array  # int16: of them, within V-Max's limits
    divergence: jax.Array  # float32: mean over the steps at which the log had the agent, m
    logged: jax.Array  # int16: those steps
    final: jax.Array  # uint16, FINAL_UNIT: at the last of them
    speeding: jax.Array  # uint16, EXCESS_UNIT: how much less far it would have come at the limit
    slots: jax.Array  # uint32: driven against the traffic in the last four slots, 8 bits of LONG_UNIT each, newest low
    part: jax.Array  # uint8, PART_UNIT: likewise in the slot that has begun
    felt: jax.Array  # int16, FELT_UNIT: smoothed longitudinal acceleration
    jerk: jax.Array  # int16, FELT_UNIT: smoothed change of it
    turn: jax.Array  # int16, TURN_UNIT: smoothed yaw rate

    def has(self, name: str) -> jax.Array:
        """bool [A]: one of FLAGS."""
        return (self.marks >> FLAGS.index(name)) & 1 > 0

    def straddled(self) -> jax.Array:
        """uint32 [A]: steps in several lanes."""
        return (self.marks >> STRADDLED) & 0xFF

    def ttc(self) -> jax.Array:
        """uint32 [A]: the smallest time to collision, TTC_UNIT; 255 where there was none."""
        return self.marks >> TTC

    @property
    def happened(self) -> Events:
        """Events that have happened."""
        return Events(*(self.has(name) for name in Events._fields))


class Course(NamedTuple):
    """Inputs of a step's score beside events, features and ride."""

    t: jax.Array  # int32 scalar: steps since the scenario's beginning
    dt: jax.Array  # s, scalar
    speed: jax.Array  # m/s [A], the mean over the step
    top: jax.Array  # m/s [A]: the log's highest speed, about
    divergence: jax.Array  # m [A], from where the log has the agent
    logged: jax.Array  # bool [A]: whether it has


def begin(agents: int, s: jax.Array) -> Tally:
    """Nothing scored yet, at arc lengths `s` [A]."""

    def none(kind: jax.typing.DTypeLike) -> jax.Array:
        return jnp.zeros(agents, kind)

    i16, u16 = jnp.int16, jnp.uint16
    return Tally(
        marks=jnp.full(agents, 255 << TTC, jnp.uint32), furthest=s, steps=none(i16), comfortable=none(i16),
        divergence=none(jnp.float32), logged=none(i16), final=none(u16), speeding=none(u16), slots=none(jnp.uint32),
        part=none(jnp.uint8), felt=none(i16), jerk=none(i16), turn=none(i16),
    )  # fmt: skip


def score(tally: Tally, counts: jax.Array, events: Events, features: Features, ride: Ride, course: Course) -> Tally:
    """Tally [A] after a step; that of agents for whom the step does not count, by `counts` bool [A], is unchanged."""
    lanes, ttc = features.lanes, features.ttc
    comfort = smoothed(tally, ride, course)
    limit = limit_of(lanes, course)
    over = speeding(limit, course) * course.dt
    aside = jnp.abs(features.lateral)
    on_way = jnp.where(jnp.cos(features.heading_error) > 0.0, aside, np.inf)
    against = driven_against(tally, lanes.against & (on_way > HALF_WIDTH), course)
    bent = (jnp.abs(ride.yaw) > MAX_BENT * course.speed) & (course.speed >= CRAWLING)
    now = {
        **events._asdict(),
        "at_fault": events.collision & features.fault & ~tally.has("touching"),
        "touching": events.collision,
        "wrong_way": jnp.minimum(on_way, lanes.along) > WRONG_WAY,
        "off_route": (aside > OFF_ROUTE) | (aside > lanes.along + FARTHER),
        "near_collision": ttc < TTC_BOUND,
        "uncomfortable": comfort.exceeded,
        "infeasible": (jnp.abs(ride.longitudinal) > MAX_FEASIBLE) | bent,
        "against": against.metres >= AGAINST[0],
        "far_against": against.metres >= AGAINST[1],
        "laned": lanes.near,
        "limited": limit > 0.0,
        "lit": features.lit,
    }
    marks = tally.marks & np.uint32((1 << STRADDLED) - 1 - (1 << FLAGS.index("touching")))
    for i, name in enumerate(FLAGS):
        marks = marks | (now[name].astype(jnp.uint32) << i)
    straddled = jnp.minimum(tally.straddled() + lanes.straddles, 255)
    nearest = jnp.minimum(tally.ttc(), _quantised_unsigned(ttc, TTC_UNIT, jnp.uint8).astype(jnp.uint32))
    known = tally.logged + course.logged.astype(jnp.int16)
    share = (course.divergence - tally.divergence) / jnp.maximum(known, 1).astype(jnp.float32)
    after = Tally(
        marks=marks | (straddled << STRADDLED) | (nearest << TTC),
        furthest=jnp.maximum(tally.furthest, features.s),
        steps=tally.steps + np.int16(1),
        comfortable=tally.comfortable + (excess(ride) <= 0.0).astype(jnp.int16),
        divergence=tally.divergence + jnp.where(course.logged, share, 0.0),
        logged=known,
        final=jnp.where(course.logged, _quantised_unsigned(course.divergence, FINAL_UNIT, jnp.uint16), tally.final),
        speeding=_quantised_unsigned(tally.speeding.astype(jnp.float32) * EXCESS_UNIT + over, EXCESS_UNIT, jnp.uint16),
        slots=against.slots,
        part=against.part,
        felt=comfort.felt,
        jerk=comfort.jerk,
        turn=comfort.turn,
    )
    return jax.tree.map(lambda new, old: jnp.where(counts, new, old), after, tally)


def limit_of(lanes: OnLanes, course: Course) -> jax.Array:
    """Speed limit [A], m/s; 0 where it is unknown."""
    return jnp.where(lanes.inferred, jnp.maximum(lanes.rule, course.top), lanes.rule)


def speeding(limit: jax.Array, course: Course) -> jax.Array:
    """Excess over the speed limit [A], m/s; 0 where that is unknown."""
    return jnp.where(limit > 0.0, jnp.maximum(course.speed - limit, 0.0), 0.0)


def conduct(tally: Tally, features: Features, ride: Ride, course: Course) -> Conduct:
    """Conduct of a step by the rules of the metrics; `tally` is the one before it."""
    over = speeding(limit_of(features.lanes, course), course)
    return Conduct(over, smoothed(tally, ride, course).exceeded, features.ttc < TTC_BOUND)


class Comfort(NamedTuple):
    """Smoothed motion after a step, each [A]; the numbers as `Tally` keeps them."""

    felt: jax.Array
    jerk: jax.Array
    turn: jax.Array
    exceeded: jax.Array  # bool: any is beyond nuPlan's limits


def smoothed(tally: Tally, ride: Ride, course: Course) -> Comfort:
    """Exponentially smoothed acceleration, jerk and yaw rate after a step; `tally` is the one before it."""
    weight = 1.0 - jnp.exp(-course.dt / SMOOTHING)
    first = tally.steps == 0
    felt, jerk = (value.astype(jnp.float32) * FELT_UNIT for value in (tally.felt, tally.jerk))
    turn = tally.turn.astype(jnp.float32) * TURN_UNIT
    change = jnp.where(first, 0.0, weight * (ride.longitudinal - felt))
    turning = jnp.where(first, 0.0, weight * (ride.yaw - turn))
    felt = jnp.where(first, ride.longitudinal, felt + change)
    turn = jnp.where(first, ride.yaw, turn + turning)
    jerk = jerk + weight * (change / course.dt - jerk)
    exceeded = (
        (felt < MIN_LONGITUDINAL)
        | (felt > MAX_LONGITUDINAL)
        | (jnp.abs(jerk) > MAX_JERK)
        | (jnp.abs(turn) > MAX_YAW)
        | (jnp.abs(turning) > MAX_YAW_ACCELERATION * course.dt)
        | (jnp.abs(turn) * course.speed > MAX_LATERAL)
    )
    return Comfort(_quantised(felt, FELT_UNIT), _quantised(jerk, FELT_UNIT), _quantised(turn, TURN_UNIT), exceeded)


def gentle_range(tally: Tally, dt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lowest and highest acceleration [A], m/s^2, that may be held from now on without a jerk beyond nuPlan's limit.

    `smoothed` smooths twice. With keep = 1 - weight, the jerk n steps on is keep^n times today's, plus n keep^(n - 1)
    weight^2 / dt times the difference of the acceleration from the one felt now: linear in it, for every n. Nothing is
    known of the jerk of a first step.
    """
    weight = 1.0 - jnp.exp(-dt / SMOOTHING)
    steps = np.arange(1, 13, dtype=np.float32).reshape(-1, *([1] * tally.felt.ndim))
    felt, jerk = (value.astype(jnp.float32) * FELT_UNIT for value in (tally.felt, tally.jerk))
    left = (1.0 - weight) ** steps * jerk[None]
    gain = weight * weight / dt * steps * (1.0 - weight) ** (steps - 1.0)
    low = felt + jnp.max((-EASY_JERK - left) / gain, axis=0)
    high = felt + jnp.min((EASY_JERK - left) / gain, axis=0)
    first = tally.steps == 0
    return jnp.where(first, -np.inf, low), jnp.where(first, np.inf, high)


class Against(NamedTuple):
    """Metres driven against the traffic, each [A]; `slots` and `part` as in `Tally`."""

    slots: jax.Array
    part: jax.Array
    metres: jax.Array  # in the window that ends with this step; 0 where no slot ends


def driven_against(tally: Tally, against: jax.Array, course: Course) -> Against:
    """Way against the traffic after a step; `against`, bool [A]: this step was."""
    steps_a_slot = jnp.maximum(jnp.round(AGAINST_SLOT / course.dt), 1.0)
    slots_a_window = jnp.round(AGAINST_WINDOW / (steps_a_slot * course.dt))
    ends = course.t % steps_a_slot.astype(jnp.int32) == 0
    metres = tally.part.astype(jnp.float32) * PART_UNIT + jnp.where(against, course.speed * course.dt, 0.0)
    before = jnp.zeros_like(metres)
    for k in range(4):
        slot = ((tally.slots >> (8 * k)) & 0xFF).astype(jnp.float32) * LONG_UNIT
        before = before + jnp.where(slots_a_window > k + 1, slot, 0.0)
    shifted = (tally.slots << 8) | _quantised_unsigned(metres, LONG_UNIT, jnp.uint8).astype(jnp.uint32)
    part = jnp.where(ends, np.uint8(0), _quantised_unsigned(metres, PART_UNIT, jnp.uint8))
    return Against(jnp.where(ends, shifted, tally.slots), part, jnp.where(ends, before + metres, 0.0))


def _quantised_unsigned(value: jax.Array, unit: float, kind: jax.typing.DTypeLike) -> jax.Array:
    """The nearest number of `unit`, within the range of an unsigned type."""
    most = float(jnp.iinfo(kind).max)
    return jnp.clip(jnp.round(value * np.float32(1.0 / unit)), 0.0, most).astype(kind)


def _quantised(value: jax.Array, unit: float) -> jax.Array:
    """The nearest number of `unit` as int16."""
    return jnp.clip(jnp.round(value * np.float32(1.0 / unit)), -32767.0, 32767.0).astype(jnp.int16)


def metrics(
    tally: Tally,
    *,
    s: jax.Array,
    start: jax.Array,
    length: jax.Array,
    kind: jax.Array,
    dt: jax.Array,
    edged: jax.Array,
) -> dict[str, Measure]:
    """An episode's metrics, [A]: of agents of `kind` (log.VEHICLE ...) at arc length `s`, m, where the log's is `start`
    at its beginning and `length` at its end. `dt`, s, and `edged`, whether the road's edges are known, are scalars."""
    has = tally.has
    moved, walks = length >= STILL, kind == PEDESTRIAN
    steps = jnp.maximum(tally.steps, 1).astype(jnp.float32)
    bad = has("collision") | has("offroad") | has("red_light")
    progress = jnp.clip(tally.furthest / jnp.maximum(length, STILL), 0.0, 1.0)
    progress = jnp.where(moved & ~has("goal"), progress, 1.0)
    straddled = tally.straddled().astype(jnp.float32) * dt - 1e-4  # times that are not quite multiples of dt
    exceeded = tally.speeding.astype(jnp.float32) * EXCESS_UNIT
    laned, known, every = has("laned") & ~walks, tally.logged > 0, jnp.ones_like(bad)
    values = {
        "accuracy": (~bad, every),
        "collision": (has("collision"), every),
        "at_fault_collision": (has("at_fault"), every),
        "offroad": (has("offroad"), edged & ~walks),
        "red_light": (has("red_light"), has("lit") & ~walks),
        "wrong_way": (has("wrong_way"), laned),
        "off_route": (has("off_route"), every),
        "progress": (progress, every),
        "distance": (jnp.maximum(s - start, 0.0), every),
        "progression": ((s - start) / jnp.maximum(length - start, STILL), moved),
        "making_progress": (progress >= MAKING_PROGRESS, every),
        "goal": (has("goal"), every),
        "time_to_collision": (~has("near_collision"), every),
        "smallest_ttc": (tally.ttc().astype(jnp.float32) * TTC_UNIT, tally.ttc() < round(TTC_HORIZON / TTC_UNIT)),
        "comfort": (tally.comfortable.astype(jnp.float32) / steps, every),
        "comfortable": (~has("uncomfortable"), every),
        "speed_limit": (jnp.maximum(1.0 - exceeded / (SPEEDING * steps * dt), 0.0), has("limited") & ~walks),
        "lanes": (_grade(straddled > STRADDLING[0], straddled > STRADDLING[1]), laned),
        "driving_direction": (_grade(has("against"), has("far_against")), laned),
        "log_divergence": (tally.divergence, known),
        "final_divergence": (tally.final.astype(jnp.float32) * FINAL_UNIT, known),
        "kinematic_infeasibility": (has("infeasible"), ~walks),
    }
    return {name: Measure(value.astype(jnp.float32), valid) for name, (value, valid) in values.items()}


def _grade(fault: jax.Array, grave: jax.Array) -> jax.Array:
    """1, 0.5 after some of a fault, 0 after much."""
    return jnp.where(grave, 0.0, jnp.where(fault, 0.5, 1.0))
