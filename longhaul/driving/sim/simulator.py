"""Driving in recorded or generated scenarios, as an `Environment`: the bank stays, an episode is a few numbers.

The state holds the scenario's number, the time, the motion of the controlled agents and their score; everything else
is read from the tables, one slice a step. Each geometric quantity is computed once (`features`), and observation,
reward, termination and metrics share it. A reset is a new scenario number.

An agent ends by one of `Config.terminations`, or is truncated when the log ends. Whoever ended is gone for the others
from the next step on, if `Config.goal` and `Config.crash` do not say otherwise (`goals`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import prng
from longhaul.driving.datasets.log import CYCLIST, PEDESTRIAN
from longhaul.driving.scenario.bank import Bank
from longhaul.driving.sim import (
    controllers,
    device_bank,
    dynamics,
    goal_behaviour,
    traffic,
)
from longhaul.driving.sim import (
    metrics as measures,
)
from longhaul.driving.sim import (
    reward as objectives,
)
from longhaul.driving.sim.actions import make_actions
from longhaul.driving.sim.config import Config, Sight, Weights, check_settings, sight_of
from longhaul.driving.sim.device_bank import DeviceBank
from longhaul.driving.sim.dynamics import MODELS, WHEELBASE, Drive, Limits, Motion
from longhaul.driving.sim.features import Features, Pose, extract
from longhaul.driving.sim.metrics import Course, Tally
from longhaul.driving.sim.observation import Motives, Observation, observe, shapes, waypoint_offsets
from longhaul.driving.sim.perception import perceive, perceive_road
from longhaul.driving.sim.reward import Events
from longhaul.driving.sim.road_lookup import describe, pieces
from longhaul.driving.sim.traffic import Reactive, Scene
from longhaul.spaces import Measure
from longhaul.types import Key, Spec, TimeStep, transition


class State(NamedTuple):
    """One world. Everything is [A] but the scenario's number, the time and the reactive vehicles [N]."""

    scenario: jax.Array  # int32
    t: jax.Array  # int32
    motion: Motion
    acceleration: jax.Array  # float16, m/s^2, in the last step
    curvature: jax.Array  # float16, 1/m, likewise
    s: jax.Array  # arc length along the route, m: the cursor
    stage: jax.Array  # uint8, see `goals`
    reactive: Reactive | None
    tally: Tally
    goals: jax.Array | None = None  # int8: how often it reached its goal; None unless it begins anew
    episode: jax.Array | None = None  # uint32 scalar, see `conditioning`; None without

    @property
    def playing(self) -> jax.Array:
        """bool [A]: whose episode is running."""
        return goal_behaviour.playing(self.stage)

    @property
    def drive(self) -> Drive:
        return Drive(self.motion, self.acceleration.astype(jnp.float32), self.curvature.astype(jnp.float32))

    def moved(self, drive: Drive) -> State:
        """The state after a motion."""
        acceleration, curvature = (value.astype(jnp.float16) for value in drive[1:])
        return self._replace(motion=drive.motion, acceleration=acceleration, curvature=curvature)


class Frame(NamedTuple):
    """Data of a picture of one world."""

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


@dataclass(frozen=True, eq=False)
class Simulator:
    """An `Environment`; made by `driving`."""

    config: Config
    tables: DeviceBank
    spec: Spec
    search: int  # metres of route in which an agent is looked for after a step

    @property
    def scenarios(self) -> int:
        return self.tables.scenarios

    @property
    def sight(self) -> Sight:
        return sight_of(self.config)

    def reset(self, key: Key) -> tuple[State, Observation]:
        """A scenario drawn from all with equal chances."""
        index = jax.random.randint(key, (), 0, self.scenarios, jnp.int32)
        seeing = jax.random.fold_in(key, 2) if self.sight.draws else None
        if not self.config.conditioning:
            return self.start(index, key=seeing)
        return self.start(index, jax.random.bits(jax.random.fold_in(key, 1), (), jnp.uint32) | 1, key=seeing)

    def start(
        self, index: jax.Array | int, episode: jax.Array | int = 0, key: Key | None = None
    ) -> tuple[State, Observation]:
        """Scenario `index` (0 .. scenarios - 1) from its beginning; `episode` is of `conditioning`. What chance hides
        in the first observation is drawn from `key`, or where there is none, from the scenario's number."""
        tables, agents = self.tables, self.config.agents
        scenario = jnp.asarray(index, jnp.int32)
        t = jnp.zeros((), jnp.int32)
        motion, there = self._logged(scenario, t)
        zeros = jnp.zeros(agents, jnp.float32)
        state = State(
            scenario=scenario,
            t=t,
            motion=motion,
            acceleration=zeros.astype(jnp.float16),
            curvature=zeros.astype(jnp.float16),
            s=tables.start_s[scenario],
            stage=goal_behaviour.begin(there),
            reactive=traffic.begin(tables, scenario),
            tally=measures.begin(agents, zeros),
            goals=jnp.zeros(agents, jnp.int8) if self.config.goal == "respawn" else None,
            episode=jnp.asarray(episode, jnp.uint32) if self.config.conditioning else None,
        )
        here = self._scene(state)
        features = self._features(state, here)
        state = state._replace(s=features.s, tally=measures.begin(agents, features.s))
        if key is None and self.sight.draws:
            key = jax.random.fold_in(jax.random.key(0), scenario)
        return state, self._observe(state, here, features, key)

    def step(self, key: Key, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """Action: [A, ...] as `spec.action` says, by `Config.dynamics` and `actions`; ignored unless the policy
        drives. What is drawn from `key` is what chance hides from sight: scenarios differ, their course does not."""
        tables, config = self.tables, self.config
        dt, length = tables.dt[state.scenario], tables.route_length[state.scenario]
        last = tables.steps[state.scenario] - 1
        state, held = self._put_back(state)
        if config.driver == "idm" or state.reactive is not None:
            before = self._scene(state)
        drive = self._drive(state, before if config.driver == "idm" else None, action, dt)
        if held is not None:
            drive = controllers.rest(state.drive, held, drive)
        reactive = state.reactive
        if reactive is not None:
            reactive = traffic.react(tables, state.scenario, state.t, before, reactive)
        after = state.moved(drive)._replace(t=state.t + 1, reactive=reactive)
        here = self._scene(after)
        features = self._features(after, here)
        over = after.t >= last
        logged, present = self._logged(state.scenario, after.t)
        events = objectives.judge(features, length, over)
        counts = paid = state.playing if held is None else state.playing & ~held
        if config.driver == "log":  # where the log has lost an agent, nothing can be said about it
            events = jax.tree.map(lambda event: event & present, events)
            counts = counts & present & self._logged(state.scenario, state.t)[1]
        events = self._spared(state, events)
        ride = controllers.feel(state.drive, drive, state.t == 0, dt)
        happened, furthest = _payable(state), state.tally.furthest
        reward = objectives.reward(self._weights(state), events, happened, furthest, features, ride, length)
        failed, arrived = jnp.zeros_like(state.playing), events.goal & ("goal" in config.terminations)
        for name in config.terminations:
            failed = failed | getattr(events, name) if name != "goal" else failed
        terminated = failed | arrived
        if config.goal == "respawn":
            arrived = arrived & (length >= objectives.STILL)
            terminated = failed | (terminated & ~arrived)
        divergence = jnp.hypot(drive.motion.x - logged.x, drive.motion.y - logged.y)
        if state.goals is not None:  # who begins anew has left its log
            present = present & (state.goals == 0)
        mean_speed = 0.5 * (state.motion.speed + drive.motion.speed)
        course = Course(after.t, dt, mean_speed, tables.desired[state.scenario] / 1.1, divergence, present)
        after = after._replace(
            s=features.s,
            tally=measures.score(state.tally, counts, events, features, ride, course),
            stage=goal_behaviour.following(
                state.stage, failed, arrived, over, goal_behaviour.clear(features), config.goal, config.crash
            ),
        )
        if state.goals is not None:
            after = after._replace(goals=state.goals + (state.playing & events.goal))
        if "stop" in (config.goal, config.crash):
            after = after.moved(controllers.halt(after.drive, after.stage == goal_behaviour.STANDING))
        terminated = terminated & state.playing
        truncated = state.playing & ~terminated & over
        observation = self._observe(after, here, features, key)
        return after, transition(observation, jnp.where(paid, reward, 0.0), terminated, truncated)

    def active(self, state: State) -> jax.Array:
        """bool [A]: who still plays."""
        return state.playing

    def demonstrate(self, state: State) -> tuple[jax.Array, jax.Array]:
        """Action of `Config.expert`, as `spec.action` says it, [A, ...], and for whom that is known, bool [A]: by
        the log for who is near it and will be there in the next step."""
        config, scenario, dt = self.config, state.scenario, self.tables.dt[state.scenario]
        if config.expert == "idm":
            features = self._features(state, self._scene(state))
            aim, known = controllers.follow(self.tables, scenario, state.drive, features, dt).motion, state.playing
        else:
            (logged, _), (aim, there) = self._logged(scenario, state.t), self._logged(scenario, state.t + 1)
            known = state.playing & there & controllers.beside(state.motion, logged)
        limits = self._limits(scenario)
        return controllers.tell(state.drive, aim, limits, dt, config.dynamics, config.actions), known

    def metrics(self, state: State) -> dict[str, Measure]:
        """See `measures`; [A]. Where agents begin anew, how often each reached its goal, too: `goals`."""
        tables, scenario = self.tables, state.scenario
        found = measures.metrics(
            state.tally,
            measures.Trip(
                s=state.s,
                start=tables.start_s[scenario],
                length=tables.route_length[scenario],
                kind=self._bodies(scenario)[0],
                dt=tables.dt[scenario],
                edged=jnp.min(tables.field_shape[scenario]) >= 2,
            ),
        )
        if state.goals is not None:
            found["goals"] = Measure(state.goals.astype(jnp.float32), jnp.ones(state.goals.shape, bool))
        return found

    def frame(self, state: State) -> Frame:
        """A picture of the world as it is now."""
        tables, here = self.tables, self._scene(state)
        logged, _ = self._logged(state.scenario, state.t)
        stop, lights = device_bank.lights_at(tables, state.scenario, state.t, jnp.int32(0))
        place = jnp.floor(jnp.where(jnp.isfinite(stop), stop, 0.0))
        line = jax.vmap(lambda s: device_bank.place_on(tables, state.scenario, jnp.int32(0), s))(place)[:, :2]
        return Frame(
            pose=jnp.stack([here.x, here.y, here.heading], -1),
            size=2.0 * jnp.stack([here.half_length, here.half_width], -1),
            kind=here.kind.astype(jnp.int32),
            present=here.present,
            controlled=here.slot >= 0,
            expert=jnp.stack([logged.x[0], logged.y[0], logged.heading[0]]),
            light_position=jnp.where(jnp.isfinite(stop)[:, None], line, jnp.nan),
            light_state=lights.astype(jnp.int32),
            scenario=state.scenario,
            t=state.t,
        )

    def _logged(self, scenario: jax.Array, t: jax.Array) -> tuple[Motion, jax.Array]:
        """Logged positions of the controlled agents at step t, and whether it has them: each [A]."""
        controlled = self.tables.controlled[scenario]
        x, y, heading, vx, vy, present = device_bank.logged_at(self.tables, scenario, t, jnp.maximum(controlled, 0))
        return Motion(x, y, heading, jnp.hypot(vx, vy)), (present > 0.5) & (controlled >= 0)

    def _scene(self, state: State) -> Scene:
        there = goal_behaviour.present(state.stage)
        if self.config.driver == "log":
            there = there & self._logged(state.scenario, state.t)[1]
        drift = self.config.traffic == "constant"
        return traffic.scene(self.tables, state.scenario, state.t, state.motion, there, state.reactive, drift)

    def _poses(self, state: State) -> Pose:
        slots = jnp.arange(self.config.agents, dtype=jnp.int32)
        motion = state.motion
        return Pose(motion.x, motion.y, motion.heading, state.s, slots, self.tables.controlled[state.scenario])

    def _features(self, state: State, here: Scene) -> Features:
        def one(pose: Pose) -> Features:
            return extract(self.tables, self.search, state.scenario, state.t, here, pose)

        return jax.vmap(one)(self._poses(state))

    def _observe(self, state: State, here: Scene, features: Features, key: Key | None) -> Observation:
        tables, config, sight = self.tables, self.config, self.sight
        own = jnp.maximum(tables.controlled[state.scenario], 0)
        motives = Motives(
            speed=state.motion.speed,
            acceleration=state.drive.acceleration,
            curvature=state.drive.curvature,
            half_length=here.half_length[own],
            half_width=here.half_width[own],
            left=tables.route_length[state.scenario] - features.s,
        )
        offsets = waypoint_offsets(config.waypoints)

        def one(features: Features, pose: Pose, motives: Motives, key: Key | None) -> Observation:
            seen = here
            if not sight.perfect:
                seen = perceive(sight, here, pose, key)
                features = extract(tables, self.search, state.scenario, state.t, seen, pose)
            found = observe(features, seen, pose, motives, config.neighbours, offsets)
            if not config.road_points:
                return found
            cos, sin = jnp.cos(pose.heading), jnp.sin(pose.heading)
            road = pieces(tables.map, state.scenario, pose.x, pose.y, cos, sin, config.road_points)
            return found._replace(points=describe(perceive_road(sight, road, key)))

        keys = prng.split(key, config.agents) if key is not None and sight.draws else None
        seen = jax.vmap(one, in_axes=(0, 0, 0, None if keys is None else 0))(
            features, self._poses(state), motives, keys
        )
        if state.episode is None:
            return seen
        return seen._replace(ego=jnp.concatenate([seen.ego, objectives.draws(state.episode, config.agents)], -1))

    def _drive(self, state: State, here: Scene | None, action: jax.Array, dt: jax.Array) -> Drive:
        """The next motion of the controlled agents; `here` for IDM alone."""
        config = self.config
        if config.driver == "log":
            return controllers.replay(state.drive, *self._logged(state.scenario, state.t + 1), dt)
        if here is not None:
            return controllers.follow(self.tables, state.scenario, state.drive, self._features(state, here), dt)
        if config.driver == "constant":
            return controllers.coast(state.drive, dt)
        limits = self._limits(state.scenario)
        return controllers.act(state.drive, action, limits, dt, config.dynamics, config.actions)

    def _bodies(self, scenario: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Kind, int32, and length, m, of the controlled agents, each [A]."""
        half_length, _, kind, _ = self.tables.body[scenario][:, jnp.maximum(self.tables.controlled[scenario], 0)]
        return kind.astype(jnp.int32), 2.0 * half_length

    def _limits(self, scenario: jax.Array) -> Limits:
        """Limits of the controlled agents."""
        kind, length = self._bodies(scenario)
        if self.config.control == "all":
            return dynamics.limits_of(kind, length)
        return dynamics.VEHICLE._replace(wheelbase=WHEELBASE * length)

    def _weights(self, state: State) -> Weights:
        """Reward weights of each agent."""
        if state.episode is None:
            return self.config.weights
        return objectives.weigh(self.config.weights, objectives.draws(state.episode, self.config.agents))

    def _spared(self, state: State, events: Events) -> Events:
        """The events without those that mean nothing: ghosts collide with nobody, and people may leave the road."""
        if self.config.goal == "respawn":
            events = events._replace(collision=events.collision & (state.stage != goal_behaviour.GHOST))
        if self.config.control == "all":
            events = events._replace(offroad=events.offroad & (self._bodies(state.scenario)[0] != PEDESTRIAN))
        return events

    def _put_back(self, state: State) -> tuple[State, jax.Array | None]:
        """The state with everybody who arrived at its log's beginning, and who is not driven in this step: bool [A],
        or None where that is nobody for sure."""
        if self.config.goal != "respawn":
            stands = state.stage == goal_behaviour.STANDING
            return state, stands if "stop" in (self.config.goal, self.config.crash) else None
        back = state.stage == goal_behaviour.ARRIVED
        start, _ = self._logged(state.scenario, jnp.zeros_like(state.t))
        s = self.tables.start_s[state.scenario]
        zeros = jnp.zeros_like(state.acceleration)
        motion = jax.tree.map(lambda new, old: jnp.where(back, new, old), start, state.motion)
        state = state._replace(
            motion=motion,
            acceleration=jnp.where(back, zeros, state.acceleration),
            curvature=jnp.where(back, zeros, state.curvature),
            s=jnp.where(back, s, state.s),
            stage=jnp.where(back, goal_behaviour.GHOST, state.stage).astype(jnp.uint8),
            tally=state.tally._replace(furthest=jnp.where(back, s, state.tally.furthest)),
        )
        return state, back | (state.stage == goal_behaviour.STANDING)


def _shapes(config: Config) -> Observation:
    """The shapes of one agent's observation."""
    seen = shapes(config.neighbours, config.waypoints, config.road_points)
    more = len(objectives.RANGES) if config.conditioning else 0
    return seen._replace(ego=jax.ShapeDtypeStruct((seen.ego.shape[0] + more,), jnp.float32))


def _payable(state: State) -> Events:
    """Events before a step, with each goal as if it were the first where agents begin anew."""
    happened = state.tally.happened
    if state.goals is None:
        return happened
    return happened._replace(goal=jnp.zeros_like(happened.goal))


def driving(bank: Bank, config: Config | None = None) -> Simulator:
    """The environment of a bank of NumPy arrays, which it puts on the default device.

    Raises ValueError, naming the value and the remedy, where config and bank do not fit.
    """
    config = config or Config()
    check(bank, config)
    # A bank that a program closes over stays an array beside it; else it is text inside of it, and larger. Not set for
    # all: JAX 0.11 can't lower programs of others (Brax) with it, whose functions compiled by themselves hold arrays.
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    made = outline(config, least=int(bank.steps.min()), most=int(bank.steps.max()), dt=float(bank.dt.max()))
    return replace(made, tables=device_bank.tabulate(bank, config.agents, config.traffic == "idm"))


def outline(config: Config, *, least: int, most: int, dt: float) -> Simulator:
    """The environment without tables, for all that hold scenarios of `least` to `most` steps of at most `dt` seconds.

    `dataclasses.replace(outline(...), tables=tables)` drives in them.
    """
    if config.driver == "log" and config.goal == "respawn":  # a log is not driven twice
        config = replace(config, goal="remove")
    spec = Spec(
        observation=_shapes(config),
        action=make_actions(config.actions, MODELS[config.dynamics]().grids).action,
        agents=config.agents,
        truncation_interval=least - 1,
        max_steps=most - 1,
    )
    search = max(8, int(np.ceil(1.3 * dynamics.MAX_SPEED * dt)) + 2)
    return Simulator(config, None, spec, search)  # type: ignore[arg-type]


def check(bank: Bank, config: Config) -> None:
    """Raises ValueError where a setting is none, or config and bank do not fit."""
    check_settings(config)
    available = bank.controlled.shape[1]
    if config.agents > available:
        raise ValueError(f"agents is {config.agents}: the bank has 1 .. {available}; stack it with more")
    driven = np.take_along_axis(bank.kind, np.maximum(bank.controlled[:, 1 : config.agents], 0), 1)
    slow = ((bank.controlled[:, 1 : config.agents] >= 0) & np.isin(driven, (PEDESTRIAN, CYCLIST))).sum()
    if slow and config.control == "vehicles":
        raise ValueError(f"control is 'vehicles': the bank has {slow} cyclists and pedestrians to control; choose all")
    if bank.steps.min() < 2:
        raise ValueError(f"scenario {int(bank.steps.argmin())} has {int(bank.steps.min())} step: leave it out")
    if not bank.dt.min() > 0:
        raise ValueError(f"scenario {int(bank.dt.argmin())} has dt {float(bank.dt.min())}: seconds above 0 are needed")
