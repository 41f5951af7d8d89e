"""Driving in recorded or generated scenarios, as an `Environment`: the bank stays, an episode is a few numbers.

The state holds the scenario's number, the time, the motion of the controlled agents and their score; everything else
is read from the tables, one slice a step. Each geometric quantity is computed once (`features`), and observation,
reward, termination and metrics share it. A reset is a new scenario number.

An agent ends by one of `Config.terminations`, or is truncated when the log ends. Whoever ended is gone for the others
from the next step on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving import dynamics, objectives, traffic
from longhaul.driving import tables as banks
from longhaul.driving.bank import Bank
from longhaul.driving.dynamics import Motion
from longhaul.driving.features import RED, Features, Pose, extract
from longhaul.driving.geometry import wrap
from longhaul.driving.objectives import EVENTS, Ride, Tally, Weights
from longhaul.driving.observation import MAX_WAYPOINTS, Motives, Observation, observe, shapes, waypoint_offsets
from longhaul.driving.tables import Tables
from longhaul.driving.traffic import Reactive, Scene
from longhaul.types import Action, Box, Key, MultiDiscrete, Spec, TimeStep, transition

TRAFFICS = ("log", "idm")
DRIVERS = ("policy", "log", "idm", "constant")
ACTIONS = ("discrete", "continuous")


@dataclass(frozen=True)
class Config:
    """One way to drive in a bank."""

    agents: int = 1
    """Controlled agents of a world; 1 is the ego alone. The bank must have as many."""
    traffic: str = "log"
    """The others: "log" replays them, with "idm" vehicles react along their logged way."""
    driver: str = "policy"
    """Who drives the agents: the "policy", or a baseline that ignores actions: "log", "idm", "constant" (speed)."""
    actions: str = "discrete"
    """"discrete": acceleration and steering from grids; "continuous": both within [-1, 1]."""
    terminations: tuple[str, ...] = EVENTS
    """The events that end an episode."""
    weights: Weights = field(default_factory=Weights)
    neighbours: int = 8
    """How many of the nearest others an agent sees."""
    waypoints: int = 10
    """Points of the route ahead that it sees."""


class State(NamedTuple):
    """One world. Everything is [A] but the scenario's number, the time and the reactive vehicles [N]."""

    scenario: jax.Array  # int32
    t: jax.Array  # int32
    motion: Motion
    acceleration: jax.Array  # m/s^2, in the last step
    curvature: jax.Array  # 1/m, likewise
    s: jax.Array  # arc length along the route, m: the cursor
    playing: jax.Array  # bool
    reactive: Reactive | None
    tally: Tally


class Frame(NamedTuple):
    """What a picture of one world needs."""

    pose: jax.Array  # float32 [N, 3]: x, y, heading
    size: jax.Array  # float32 [N, 2]: length, width
    kind: jax.Array  # int32 [N]
    present: jax.Array  # bool [N]
    controlled: jax.Array  # bool [N]
    expert: jax.Array  # float32 [3]: where the log has the ego
    light_position: jax.Array  # float32 [L, 2], of the ego's route; NaN is padding
    light_state: jax.Array  # int32 [L]
    scenario: jax.Array  # int32
    t: jax.Array  # int32


class Drive(NamedTuple):
    """How the controlled agents moved in one step, each [A]."""

    motion: Motion
    acceleration: jax.Array
    curvature: jax.Array


@dataclass(frozen=True, eq=False)
class Simulator:
    """An `Environment`; made by `driving`."""

    config: Config
    tables: Tables
    spec: Spec
    search: int  # metres of route in which an agent is looked for after a step

    @property
    def scenarios(self) -> int:
        return self.tables.scenarios

    def reset(self, key: Key) -> tuple[State, Observation]:
        """A scenario drawn from all with equal chances."""
        return self.start(jax.random.randint(key, (), 0, self.scenarios, jnp.int32))

    def start(self, index: jax.Array | int) -> tuple[State, Observation]:
        """Scenario `index` (0 .. scenarios - 1) from its beginning."""
        tables, agents = self.tables, self.config.agents
        scenario = jnp.asarray(index, jnp.int32)
        t = jnp.zeros((), jnp.int32)
        motion, there = self._logged(scenario, t)
        zeros = jnp.zeros(agents, jnp.float32)
        state = State(
            scenario=scenario,
            t=t,
            motion=motion,
            acceleration=zeros,
            curvature=zeros,
            s=tables.start_s[scenario],
            playing=there,
            reactive=traffic.begin(tables, scenario),
            tally=objectives.begin(agents, zeros),
        )
        here = self._scene(state)
        features = self._features(state, here)
        state = state._replace(s=features.s, tally=objectives.begin(agents, features.s))
        return state, self._observe(state, here, features)

    def step(self, key: Key, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """Action: int32 [A, 2] or float32 [A, 2], by `Config.actions`; ignored unless the policy drives."""
        del key  # nothing is drawn: scenarios differ, their course does not
        tables, config = self.tables, self.config
        dt, length = tables.dt[state.scenario], tables.route_length[state.scenario]
        last = tables.steps[state.scenario] - 1
        if config.driver == "idm" or state.reactive is not None:
            before = self._scene(state)
        drive = self._drive(state, before if config.driver == "idm" else None, action, dt)
        reactive = state.reactive
        if reactive is not None:
            reactive = traffic.react(tables, state.scenario, state.t, before, reactive)
        after = state._replace(
            t=state.t + 1,
            motion=drive.motion,
            acceleration=drive.acceleration,
            curvature=drive.curvature,
            reactive=reactive,
        )
        here = self._scene(after)
        features = self._features(after, here)
        over = after.t >= last
        logged, present = self._logged(state.scenario, after.t)
        events = objectives.judge(features, length, over)
        if config.driver == "log":  # where the log has lost an agent, nothing can be said about it
            events = jax.tree.map(lambda event: event & present, events)
        ride = self._ride(state, drive, dt)
        reward = objectives.reward(config.weights, events, state.tally, features, ride, length)
        terminated = jnp.zeros_like(state.playing)
        for name in config.terminations:
            terminated = terminated | getattr(events, name)
        divergence = jnp.hypot(drive.motion.x - logged.x, drive.motion.y - logged.y)
        after = after._replace(
            s=features.s,
            tally=objectives.score(state.tally, state.playing, events, features, ride, divergence, present),
            playing=state.playing & ~terminated & ~over,
        )
        terminated = terminated & state.playing
        truncated = state.playing & ~terminated & over
        observation = self._observe(after, here, features)
        return after, transition(observation, jnp.where(state.playing, reward, 0.0), terminated, truncated)

    def active(self, state: State) -> jax.Array:
        """bool [A]: who still plays."""
        return state.playing

    def metrics(self, state: State) -> dict[str, jax.Array]:
        """See `objectives`; float32 [A]."""
        return objectives.metrics(state.tally, self.tables.route_length[state.scenario])

    def frame(self, state: State) -> Frame:
        """A picture of the world as it is now."""
        tables, here = self.tables, self._scene(state)
        logged, _ = self._logged(state.scenario, state.t)
        stop = tables.light_s[state.scenario, 0]
        place = jnp.clip(jnp.where(jnp.isfinite(stop), stop, 0.0), 0.0, tables.route.shape[3] - banks.BEHIND - 1)
        index = banks.BEHIND + place.astype(jnp.int32)
        line = tables.route[state.scenario, 0, :2, index]
        return Frame(
            pose=jnp.stack([here.x, here.y, here.heading], -1),
            size=2.0 * jnp.stack([here.half_length, here.half_width], -1),
            kind=here.kind.astype(jnp.int32),
            present=here.present,
            controlled=here.slot >= 0,
            expert=jnp.stack([logged.x[0], logged.y[0], logged.heading[0]]),
            light_position=jnp.where(jnp.isfinite(stop)[:, None], line, jnp.nan),
            light_state=tables.light_state[state.scenario, self._time(state.t), 0].astype(jnp.int32),
            scenario=state.scenario,
            t=state.t,
        )

    def _time(self, t: jax.Array) -> jax.Array:
        return jnp.minimum(t, self.tables.motion.shape[1] - 1)

    def _logged(self, scenario: jax.Array, t: jax.Array) -> tuple[Motion, jax.Array]:
        """Where the log has the controlled agents at step t, and whether it has them: each [A]."""
        controlled = self.tables.controlled[scenario]
        logged = self.tables.motion[scenario, self._time(t), :, jnp.maximum(controlled, 0)]
        x, y, heading, vx, vy, present = (logged[:, i] for i in range(6))
        return Motion(x, y, heading, jnp.hypot(vx, vy)), (present > 0.5) & (controlled >= 0)

    def _scene(self, state: State) -> Scene:
        there = state.playing
        if self.config.driver == "log":
            there = there & self._logged(state.scenario, state.t)[1]
        return traffic.scene(self.tables, state.scenario, self._time(state.t), state.motion, there, state.reactive)

    def _poses(self, state: State) -> Pose:
        slots = jnp.arange(self.config.agents, dtype=jnp.int32)
        motion = state.motion
        return Pose(motion.x, motion.y, motion.heading, state.s, slots, self.tables.controlled[state.scenario])

    def _features(self, state: State, here: Scene) -> Features:
        def one(pose: Pose) -> Features:
            return extract(self.tables, self.search, state.scenario, self._time(state.t), here, pose)

        return jax.vmap(one)(self._poses(state))

    def _observe(self, state: State, here: Scene, features: Features) -> Observation:
        tables, config = self.tables, self.config
        own = jnp.maximum(tables.controlled[state.scenario], 0)
        motives = Motives(
            speed=state.motion.speed,
            acceleration=state.acceleration,
            curvature=state.curvature,
            half_length=here.half_length[own],
            half_width=here.half_width[own],
            left=tables.route_length[state.scenario] - features.s,
        )
        offsets = waypoint_offsets(config.waypoints)

        def one(features: Features, pose: Pose, motives: Motives) -> Observation:
            return observe(features, here, pose, motives, config.neighbours, offsets)

        return jax.vmap(one)(features, self._poses(state), motives)

    def _drive(self, state: State, here: Scene | None, action: jax.Array, dt: jax.Array) -> Drive:
        """The next motion of the controlled agents."""
        speed, zeros = state.motion.speed, jnp.zeros_like(state.motion.speed)
        if self.config.driver == "log":
            logged, present = self._logged(state.scenario, state.t + 1)
            motion = jax.tree.map(lambda new, old: jnp.where(present, new, old), logged, state.motion)
            return Drive(motion, *dynamics.invert(state.motion, motion, dt))
        if here is not None:
            return self._follow(state, here, dt)
        if self.config.driver == "constant":
            acceleration, curvature = zeros, zeros
        else:
            scale = dynamics.discrete if self.config.actions == "discrete" else dynamics.continuous
            acceleration, curvature = scale(action, speed)
        motion = dynamics.advance(state.motion, acceleration, curvature, dt)
        return Drive(motion, (motion.speed - speed) / dt, curvature)

    def _follow(self, state: State, here: Scene, dt: jax.Array) -> Drive:
        """IDM along the own route: behind leaders, before red lights, slowly through bends."""
        features, speed = self._features(state, here), state.motion.speed
        hindrance = traffic.interaction(speed, features.gap, jnp.maximum(features.leader_speed, 0.0))
        # a red light counts while a stop is possible
        stop = features.light_distance
        braking = jnp.square(speed) / (2.0 * jnp.maximum(stop, 0.1))
        red = ((features.light_state == RED) & (braking < 8.0)) | ((features.light_state == RED + 1) & (braking < 3.0))
        halt = traffic.interaction(speed, stop + 1.0, jnp.zeros_like(stop))
        hindrance = jnp.maximum(hindrance, jnp.where(red, halt, 0.0))
        offsets = np.arange(banks.AHEAD, dtype=np.float32)
        bend = traffic.bend_speed(features.route[:, 2, banks.BEHIND :], 1.0, offsets)
        desired = jnp.minimum(self.tables.desired[state.scenario], bend)
        distance, after = dynamics.travel(speed, traffic.idm(speed, desired, hindrance), dt)
        s = features.s + distance

        def place(slot: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            points, first = banks.window(self.tables, state.scenario, slot, s, 2)
            x, y, heading = banks.ahead_of(points, first, s, np.zeros(1, np.int64))
            return x[0], y[0], wrap(heading[0])

        x, y, heading = jax.vmap(place)(jnp.arange(self.config.agents, dtype=jnp.int32), s)
        moves = distance > 1e-3  # who stands keeps the pose that the log gave it
        old = state.motion
        motion = Motion(
            jnp.where(moves, x, old.x), jnp.where(moves, y, old.y), jnp.where(moves, heading, old.heading), after
        )
        return Drive(motion, (after - speed) / dt, dynamics.invert(state.motion, motion, dt)[1])

    def _ride(self, state: State, drive: Drive, dt: jax.Array) -> Ride:
        """How a step felt; the first has no jerk, for nothing is known of what was before."""
        before, after = state.motion, drive.motion
        longitudinal = (after.speed - before.speed) / dt
        yaw = wrap(after.heading - before.heading) / dt
        jerk = jnp.where(state.t > 0, (longitudinal - state.acceleration) / dt, 0.0)
        return Ride(longitudinal, yaw * 0.5 * (before.speed + after.speed), jerk, yaw)


def driving(bank: Bank, config: Config | None = None) -> Simulator:
    """The environment of a bank of NumPy arrays, which it puts on the default device.

    Raises ValueError, naming the value and the remedy, where config and bank do not fit.
    """
    config = config or Config()
    check(bank, config)
    tables = banks.tabulate(bank, config.agents, config.traffic == "idm")
    action: Action = MultiDiscrete((len(dynamics.ACCELERATIONS), len(dynamics.STEERINGS)))
    if config.actions == "continuous":
        action = Box((-1.0, -1.0), (1.0, 1.0))
    spec = Spec(
        observation=shapes(config.neighbours, config.waypoints),
        action=action,
        agents=config.agents,
        truncation_interval=int(bank.steps.min()) - 1,
        max_steps=int(bank.steps.max()) - 1,
    )
    search = max(8, int(np.ceil(1.3 * dynamics.MAX_SPEED * float(bank.dt.max()))) + 2)
    return Simulator(config, tables, spec, search)


def check(bank: Bank, config: Config) -> None:
    """Raises ValueError where config and bank do not fit."""
    available = bank.controlled.shape[1]
    if not 1 <= config.agents <= available:
        raise ValueError(f"agents is {config.agents}: the bank has 1 .. {available}; stack it with more")
    for name, value, known in (
        ("traffic", config.traffic, TRAFFICS),
        ("driver", config.driver, DRIVERS),
        ("actions", config.actions, ACTIONS),
        *(("terminations", value, EVENTS) for value in config.terminations),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}: choose from {', '.join(known)}")
    if config.neighbours < 1:
        raise ValueError(f"neighbours is {config.neighbours}: an agent sees at least 1")
    if not 1 <= config.waypoints <= MAX_WAYPOINTS:
        raise ValueError(f"waypoints is {config.waypoints}: choose 1 .. {MAX_WAYPOINTS}")
    if bank.steps.min() < 2:
        raise ValueError(f"scenario {int(bank.steps.argmin())} has {int(bank.steps.min())} step: leave it out")
    if not bank.dt.min() > 0:
        raise ValueError(f"scenario {int(bank.dt.argmin())} has dt {float(bank.dt.min())}: seconds above 0 are needed")
