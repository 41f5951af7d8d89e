"""Driving in recorded or generated scenarios, as an `Environment`: the bank stays, an episode is a few numbers.

The state holds the scenario's number, the time, the motion of the controlled agents and their score; everything else
is read from the tables, one slice a step. Each geometric quantity is computed once (`features`), and observation,
reward, termination and metrics share it. A reset is a new scenario number.

An agent ends by one of `Config.terminations`, or is truncated when the log ends. A world's agents are each in one
stage, a number kept in the state:

- PLAYING: drives, sees and is seen.
- GONE: its episode is over (or its slot is empty); it is nowhere.
- STANDING: its episode is over; it stands where it ended, an obstacle to all, from the step after the event on. It
  stands at once, whatever its speed was.
- ARRIVED: reached its goal and is put back in the next step; nowhere meanwhile.
- GHOST: was put back, and is not free yet. It drives and sees; nobody sees or meets it, and it collides with nobody.

`Config.goal` is the fate of an agent that reaches its goal:

- "remove": its episode ends, and it is GONE.
- "stop": its episode ends, and it is STANDING.
- "respawn": it is paid for the goal and goes on. In the next step, of which nothing is paid or counted, it is put back
  to where its log begins, as a GHOST, with its route ahead of it once more. A ghost becomes real after a step in which
  nobody real was within CLEARANCE, less what each comes nearer in HEED seconds; of several ghosts only the first does
  in one step, so that two never become real within each other. Its episode ends by another event or with the log.

Goals that only the log's end decides (nothing to reach) are as with "remove", and so are all where the log drives.

`Config.crash` is the fate of an agent whose episode ends by any other event: "remove" or "stop", likewise. Where goal
and failure fall in one step, it failed.

All others are in the world while their logs have them, but for those that wait for room (`insertion`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import prng
from longhaul.driving.datasets.log import CYCLIST, PEDESTRIAN
from longhaul.driving.scenario.bank import Bank
from longhaul.driving.sim import device_bank, dynamics, evasion, idm, insertion, metrics, reward, safety, traffic
from longhaul.driving.sim.conditional import only_where
from longhaul.driving.sim.config import Config, Weights, check_settings
from longhaul.driving.sim.device_bank import DeviceBank
from longhaul.driving.sim.dynamics import MODELS, VEHICLE, WHEELBASE, Drive, Limits, Motion, hold
from longhaul.driving.sim.evasion import Habits
from longhaul.driving.sim.features import Agent, Features, extract
from longhaul.driving.sim.geometry import wrap
from longhaul.driving.sim.metrics import Course, Tally
from longhaul.driving.sim.observation import (
    LIMIT,
    RANGE,
    Observation,
    observe,
    perceive,
    perceive_road,
    shapes,
    view_limit,
    waypoint_offsets,
)
from longhaul.driving.sim.reward import Events, Ride
from longhaul.driving.sim.road_lookup import describe, pieces
from longhaul.driving.sim.traffic import Partners, Reactive, Scene
from longhaul.spaces import Measure
from longhaul.types import Key, Spec, TimeStep, transition

GONE, STANDING, PLAYING, GHOST, ARRIVED = range(5)
"""Stages, uint8; from PLAYING on the episode is running."""

CLEARANCE, HEED = 0.5, 1.0
"""m to be free around a ghost before it becomes real, and s of the others' approach that count against it."""


class State(NamedTuple):
    """One world. Everything is [A] but the scenario's number, the time and the reactive vehicles [N]."""

    scenario: jax.Array  # int32
    t: jax.Array  # int32
    motion: Motion
    acceleration: jax.Array  # float16, m/s^2, in the last step
    curvature: jax.Array  # float16, 1/m, likewise
    s: jax.Array  # arc length along the route, m: the cursor
    stage: jax.Array  # uint8
    reactive: Reactive | None
    tally: Tally
    goals: jax.Array | None = None  # int8: how often it reached its goal; None unless goals put it back
    episode: jax.Array | None = None  # uint32 scalar, see `reward.weight_draws`; None without conditioning
    partners: Partners | None = None  # what drives the others; None: as the configuration says
    habits: Habits | None = None  # [N], of all objects; None where no agent evades
    inserted: jax.Array | None = None  # bool [N]: is in the world; None where tracks begin as logged

    @property
    def playing(self) -> jax.Array:
        """Flag bool [A]: the agent's episode is running."""
        return self.stage >= PLAYING

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


class _Advance(NamedTuple):
    """Motion of a step."""

    drive: Drive  # of the controlled agents
    unsafe: jax.Array | None  # bool [A]: the safety check replaced the command; None without it
    reactive: Reactive | None


class _Ends(NamedTuple):
    """Ends of episodes in a step, bool [A] each."""

    failed: jax.Array
    arrived: jax.Array
    terminated: jax.Array  # the episode is over, by either


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

    def reset(self, key: Key) -> tuple[State, Observation]:
        """A scenario drawn with equal chances from all, or from the first `tables.among`; how it begins may be drawn,
        too (`Config.bystanders`, `start_offset`, `start_speed`)."""
        config = self.config
        among = self.scenarios if self.tables.among is None else self.tables.among
        index = jax.random.randint(key, (), 0, among, jnp.int32)
        return self.start(
            index,
            jax.random.bits(jax.random.fold_in(key, 1), (), jnp.uint32) | 1 if config.conditioning else 0,
            key=jax.random.fold_in(key, 2) if config.draws else None,
            partners=self._bystanders(jax.random.fold_in(key, 3)) if any(config.bystanders) else None,
            moved=jax.random.fold_in(key, 4) if any(config.start_offset) or config.start_speed > 0.0 else None,
        )

    def start(
        self, index: jax.Array | int, episode: jax.Array | int = 0, key: Key | None = None,
        partners: Partners | None = None, moved: Key | None = None,
    ) -> tuple[State, Observation]:  # fmt: skip
        """(state, observation) at the beginning of scenario `index`, an int32 scalar of 0 .. scenarios - 1.

        `episode`, a uint32 scalar, is that of `reward.weight_draws`.

        What chance hides in the first observation is drawn from `key`; without one, from the scenario's number. With
        the key `moved`, agents begin beside their logs (`Config.start_offset`, `start_speed`).
        """
        tables, agents = self.tables, self.config.agents
        scenario = jnp.asarray(index, jnp.int32)
        t = jnp.zeros((), jnp.int32)
        motion, present = self._logged(scenario, t)
        if partners is not None:
            present = present & partners.driven
        if moved is not None:
            motion = self._perturbed(moved, motion)
        zeros = jnp.zeros(agents, jnp.float32)
        state = State(
            scenario=scenario,
            t=t,
            motion=motion,
            acceleration=zeros.astype(jnp.float16),
            curvature=zeros.astype(jnp.float16),
            s=tables.start_s[scenario],
            stage=jnp.where(present, PLAYING, GONE).astype(jnp.uint8),
            reactive=traffic.begin(tables, scenario),
            tally=metrics.begin(agents, zeros),
            goals=jnp.zeros(agents, jnp.int8) if self.config.goal == "respawn" else None,
            episode=jnp.asarray(episode, jnp.uint32) if self.config.conditioning else None,
            partners=partners,
        )
        scene = self._scene(state)
        features = self._features(state, scene)
        state = state._replace(s=features.s, tally=metrics.begin(agents, features.s))
        if self.inserts(partners):
            state = state._replace(inserted=scene.present)
        if self._evades:
            state = state._replace(habits=evasion.begin(scene))
        if key is None and self.config.draws:
            key = jax.random.fold_in(jax.random.key(0), scenario)
        return state, self._observe(state, scene, features, key)

    def step(self, key: Key, state: State, action: jax.Array) -> tuple[State, TimeStep]:
        """(state, time step) after an action [A, ...] of `spec.action`, which is ignored unless the policy drives.

        `Config.dynamics` and `actions` give it its meaning. `key` draws what chance hides from sight, and no more: with
        the same actions a scenario takes the same course.
        """
        tables, config = self.tables, self.config
        dt, length = tables.dt[state.scenario], tables.route_length[state.scenario]
        state, held = self._respawned(state)
        advance = self._advance(key, state, action, held, dt)
        drive = advance.drive
        after = state.moved(drive)._replace(t=state.t + 1, reactive=advance.reactive)
        after, scene = self._with_room(after)
        features = self._features(after, scene)
        over = after.t >= tables.steps[state.scenario] - 1
        logged, present = self._logged(state.scenario, after.t)
        events = reward.detect_events(features, length, over)
        counts = paid = state.playing if held is None else state.playing & ~held
        if config.driver == "log":  # where the log has lost an agent, its events mean nothing
            events = jax.tree.map(lambda event: event & present, events)
            counts = counts & present & self._logged(state.scenario, state.t)[1]
        events = self._without_exempt(state, events)
        ride = reward.ride_of(state.drive, drive, state.t == 0, dt)
        course = self._course(state, after, logged, present, dt)
        pay = self._reward(state, events, features, ride, course, length, advance.unsafe)
        ends = self._ends(state, events, length)
        after = after._replace(
            s=features.s,
            tally=metrics.score(state.tally, counts, events, features, ride, course),
            stage=next_stage(state.stage, ends.failed, ends.arrived, over, clear(features), config.goal, config.crash),
        )
        if state.habits is not None:
            speed, real = drive.motion.speed, state.stage == PLAYING
            assert advance.unsafe is not None
            excused = (scene.slot >= 0) & advance.unsafe[jnp.maximum(scene.slot, 0)]
            after = after._replace(habits=evasion.watch(state.habits, scene, features, speed, real, excused, dt))
        if state.goals is not None:
            after = after._replace(goals=state.goals + (state.playing & events.goal))
        if "stop" in (config.goal, config.crash):
            halted = after.motion._replace(speed=jnp.zeros_like(after.motion.speed))
            after = after.moved(hold(after.stage == STANDING, halted, after.drive))
        terminated = ends.terminated & state.playing
        truncated = state.playing & ~terminated & over
        observation = self._observe(after, scene, features, key)
        return after, transition(observation, jnp.where(paid, pay, 0.0), terminated, truncated)

    def _advance(self, key: Key, state: State, action: jax.Array, held: jax.Array | None, dt: jax.Array) -> _Advance:
        """Motion of a step from `state`. Agents that are `held` [A] stay where they are."""
        config, reactive = self.config, state.reactive
        checked = config.safety and config.driver == "policy"
        if config.driver == "idm" or reactive is not None or checked:
            before = self._scene(state)
        drive = self._drive(state, before if config.driver == "idm" else None, action, dt)
        unsafe = None
        if checked:
            drive, unsafe = self._check(state, before, drive, dt, key)
        if held is not None:
            drive = hold(held, state.motion, drive)
        if reactive is not None:
            reactive = traffic.react(self.tables, state.scenario, state.t, before, reactive, state.partners)
        return _Advance(drive, unsafe, reactive)

    def _course(self, state: State, after: State, logged: Motion, present: jax.Array, dt: jax.Array) -> Course:
        """Course of a step from `state` to `after`, beside the log where that has the agents, `present` [A]."""
        motion = after.motion
        mean_speed = 0.5 * (state.motion.speed + motion.speed)
        divergence = jnp.hypot(motion.x - logged.x, motion.y - logged.y)
        if state.goals is not None:  # an agent that was put back has left its log
            present = present & (state.goals == 0)
        return Course(after.t, dt, mean_speed, self.tables.desired[state.scenario] / 1.1, divergence, present)

    def _reward(
        self, state: State, events: Events, features: Features, ride: Ride, course: Course, length: jax.Array,
        unsafe: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        """Reward [A] of a step from `state`, by `Config.weights` or the user's own `Config.reward`."""
        config, happened, furthest = self.config, state.tally.happened, state.tally.furthest
        if state.goals is not None:  # an agent that was put back is paid for each goal
            happened = happened._replace(goal=jnp.zeros_like(happened.goal))
        if config.reward is not None:
            metres = reward.covered(furthest, features, length)
            return reward.user_reward(config.reward, reward.Step(events, happened, metres, features, ride, length))
        conduct = metrics.conduct(state.tally, features, ride, course) if config.weights.conduct else None
        pay = reward.reward(self._weights(state), events, happened, furthest, features, ride, length, conduct)
        return pay if unsafe is None else pay + config.weights.unsafe * unsafe

    def _ends(self, state: State, events: Events, length: jax.Array) -> _Ends:
        """Ends of episodes by the events of a step, as `Config.terminations` and `Config.goal` say."""
        config = self.config
        failed, arrived = jnp.zeros_like(state.playing), events.goal & ("goal" in config.terminations)
        for name in config.terminations:
            failed = failed | getattr(events, name) if name != "goal" else failed
        terminated = failed | arrived
        if config.goal == "respawn":
            arrived = arrived & (length >= reward.STILL)
            terminated = failed | (terminated & ~arrived)
        return _Ends(failed, arrived, terminated)

    def active(self, state: State) -> jax.Array:
        return state.playing

    def demonstrate(self, state: State) -> tuple[jax.Array, jax.Array]:
        """Action of `Config.expert` in `spec.action`, [A, ...], and a flag that it is known, bool [A]. The log knows
        it for agents near their logged place that have one in the next step, too."""
        config, scenario, dt = self.config, state.scenario, self.tables.dt[state.scenario]
        if config.expert == "idm":
            features = self._features(state, self._scene(state))
            aim, known = idm.follow(self.tables, scenario, state.drive, features, dt).motion, state.playing
        else:
            (logged, _), (aim, present) = self._logged(scenario, state.t), self._logged(scenario, state.t + 1)
            known = state.playing & present & dynamics.near_log(state.motion, logged)
        limits = self._limits(scenario)
        return dynamics.nearest_action(state.drive, aim, limits, dt, config.dynamics, config.actions), known

    def metrics(self, state: State) -> dict[str, Measure]:
        """Metrics [A] of the module `metrics`; where agents are put back, also `goals`: how often each reached its
        goal."""
        tables, scenario = self.tables, state.scenario
        values = metrics.metrics(
            state.tally,
            s=state.s,
            start=tables.start_s[scenario],
            length=tables.route_length[scenario],
            kind=self._bodies(scenario)[0],
            dt=tables.dt[scenario],
            edged=jnp.min(tables.field_shape[scenario]) >= 2,
        )
        if state.goals is not None:
            values["goals"] = Measure(state.goals.astype(jnp.float32), jnp.ones(state.goals.shape, bool))
        return values

    def frame(self, state: State) -> Frame:
        """A picture of the world as it is now."""
        tables, scene = self.tables, self._scene(state)
        logged, _ = self._logged(state.scenario, state.t)
        stop, lights = device_bank.lights_at(tables, state.scenario, state.t, jnp.int32(0))
        place = jnp.floor(jnp.where(jnp.isfinite(stop), stop, 0.0))
        line = jax.vmap(lambda s: device_bank.place_on(tables, state.scenario, jnp.int32(0), s))(place)[:, :2]
        return Frame(
            pose=jnp.stack([scene.x, scene.y, scene.heading], -1),
            size=2.0 * jnp.stack([scene.half_length, scene.half_width], -1),
            kind=scene.kind.astype(jnp.int32),
            present=scene.present,
            controlled=scene.slot >= 0,
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

    def _bystanders(self, key: Key) -> Partners:
        """Partners of a world, drawn by `Config.bystanders`: in such a world each agent but the ego is one with an even
        chance. In the other worlds all agents are driven, and the rest react if `Config.traffic` says so."""
        replayed, drifting = self.config.bystanders
        uniform = prng.uniform(key, (1 + self.config.agents,))
        usual = traffic.REACTING if self.config.traffic == "idm" else traffic.DRIVEN
        kind = jnp.where(uniform[0] < replayed + drifting, traffic.DRIFTING, usual)
        kind = jnp.where(uniform[0] < replayed, traffic.REPLAYED, kind)
        ego = jnp.arange(self.config.agents) == 0
        driven = ego | (kind == usual) | (uniform[1:] < 0.5)
        unit = jnp.ones((), jnp.float32)
        return Partners(kind.astype(jnp.int32), driven, unit, unit, jnp.array(True), jnp.array(True))

    def _perturbed(self, key: Key, motion: Motion) -> Motion:
        """Motion [A] of agents that begin beside their log, at another angle and speed, at most two deviations away."""
        config, (aside, turned) = self.config, self.config.start_offset
        normal = jnp.clip(prng.normal(jax.random.fold_in(key, 0), (2, config.agents)), -2.0, 2.0)
        chance, share = prng.uniform(jax.random.fold_in(key, 1), (2, config.agents))
        speed = jnp.where(chance < config.start_speed, 1.2 * share * motion.speed, motion.speed)
        lateral = aside * normal[0]
        return Motion(
            motion.x - lateral * jnp.sin(motion.heading),
            motion.y + lateral * jnp.cos(motion.heading),
            wrap(motion.heading + turned * normal[1]),
            speed,
        )

    def _scene(self, state: State) -> Scene:
        present = (state.stage == PLAYING) | (state.stage == STANDING)
        if self.config.driver == "log":
            present = present & self._logged(state.scenario, state.t)[1]
        drift = self.config.traffic == "constant"
        tables, reactive = self.tables, state.reactive
        return traffic.scene_at(
            tables, state.scenario, state.t, state.motion, present, reactive, drift, state.partners, state.inserted
        )

    def inserts(self, partners: Partners | None = None) -> bool:
        """True if tracks may have to wait for room, as `insertion` says."""
        simulated = self.config.agents > 1 or self.config.traffic == "idm" or partners is not None
        return simulated and self.config.driver != "log"

    def waiting(self, state: State) -> jax.Array:
        """Flag bool [N]: the object's track has begun, and waits for room."""
        scene = self._scene(state._replace(inserted=None))
        there = scene.present if state.inserted is None else state.inserted
        return scene.present & ~there & (scene.slot < 0)

    def _with_room(self, state: State) -> tuple[State, Scene]:
        """The state after a motion, with those inserted whose tracks begin and who have room, and its scene."""
        scene = self._scene(state._replace(inserted=None))
        if state.inserted is None:
            return state, scene
        begins, drives = scene.present & ~state.inserted & (scene.slot < 0), scene.present & (scene.slot >= 0)
        if state.partners is not None:
            begins = begins & insertion.simulated(state.partners)
        if state.reactive is not None:
            reacts = traffic.reacts(self.tables, state.scenario, state.partners)
            begins, drives = begins & ~reacts, drives | (scene.present & reacts)
        scene = insertion.insert(scene, begins, drives, self.tables.dt[state.scenario])
        return state._replace(inserted=scene.present), scene

    def _agents(self, state: State) -> Agent:
        slots = jnp.arange(self.config.agents, dtype=jnp.int32)
        return Agent(state.drive, state.s, slots, self.tables.controlled[state.scenario])

    def _features(self, state: State, scene: Scene) -> Features:
        def of_agent(agent: Agent) -> Features:
            return extract(self.tables, self.search, state.scenario, state.t, scene, agent)

        return jax.vmap(of_agent)(self._agents(state))

    def _observe(self, state: State, scene: Scene, features: Features, key: Key | None) -> Observation:
        tables, config = self.tables, self.config
        offsets = waypoint_offsets(config.waypoints)
        left = tables.route_length[state.scenario] - features.s

        def view_of(features: Features, agent: Agent, left: jax.Array, key: Key | None) -> Observation:
            seen = scene
            if not config.perfect:
                seen = perceive(config, scene, agent, key)
                features = extract(tables, self.search, state.scenario, state.t, seen, agent)
            view = observe(features, seen, agent, left, config.neighbours, offsets)
            if config.speed_limit:
                limit = view_limit(features.lanes.limit, agent.drive.motion.speed)
                view = view._replace(ego=jnp.concatenate([view.ego, limit]))
            if not config.road_points:
                return view
            x, y, heading, _ = agent.drive.motion
            road = pieces(tables.map, state.scenario, x, y, jnp.cos(heading), jnp.sin(heading), config.road_points)
            return view._replace(points=describe(perceive_road(config, road, key)))

        keys = prng.split(key, config.agents) if key is not None and config.draws else None
        axes = (0, 0, 0, None if keys is None else 0)
        views = jax.vmap(view_of, in_axes=axes)(features, self._agents(state), left, keys)
        if state.episode is None:
            return views
        return views._replace(ego=jnp.concatenate([views.ego, reward.weight_draws(state.episode, config.agents)], -1))

    def _drive(self, state: State, scene: Scene | None, action: jax.Array, dt: jax.Array) -> Drive:
        """The next motion of the controlled agents; `scene` for IDM alone."""
        config, now = self.config, state.drive
        if config.driver == "log":  # to where the log has them next, where it has them
            logged, present = self._logged(state.scenario, state.t + 1)
            motion = jax.tree.map(lambda new, old: jnp.where(present, new, old), logged, now.motion)
            return Drive(motion, *dynamics.invert(now.motion, motion, dt))
        if scene is not None:
            return idm.follow(self.tables, state.scenario, now, self._features(state, scene), dt)
        if config.driver == "constant":
            zeros = jnp.zeros_like(now.motion.speed)
            return dynamics.arc(now, zeros, zeros, VEHICLE, dt)
        limits = self._limits(state.scenario)
        return dynamics.act(now, action, limits, dt, config.dynamics, config.actions)

    def _check(self, state: State, scene: Scene, drive: Drive, dt: jax.Array, key: Key) -> tuple[Drive, jax.Array]:
        """`drive` with unsafe commands replaced, by what each agent perceives before the step, and a flag that they
        were, bool [A]."""
        config = self.config

        def checked(
            agent: Agent, drive: Drive, limits: Limits, gentle: Any, key: Key | None
        ) -> tuple[Drive, jax.Array, Features]:
            seen = scene if config.perfect else perceive(config, scene, agent, key)
            features = extract(self.tables, self.search, state.scenario, state.t, seen, agent)
            view = safety.view_of(agent, features, seen, limits, road, dt, config.neighbours)
            return *safety.keep_safe(view, drive, gentle), features

        road = device_bank.field(self.tables, state.scenario)
        keys = prng.split(key, config.agents) if config.draws else None
        limits = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (config.agents,)), self._limits(state.scenario))
        check_all = jax.vmap(checked, in_axes=(0, 0, 0, 0, None if keys is None else 0))
        gentle = metrics.gentle_range(state.tally, dt)
        safe, unsafe, features = check_all(self._agents(state), drive, limits, gentle, keys)
        if state.habits is not None:
            safe, unsafe = self._evade(state, scene, features, safe, unsafe, limits, dt)
        if state.partners is None:
            return safe, unsafe
        counts = state.partners.checked | (jnp.arange(config.agents) == 0)
        return jax.tree.map(lambda new, old: jnp.where(counts, new, old), safe, drive), unsafe & counts

    @property
    def _evades(self) -> bool:
        """True if agents evade objects that do not react, which they know from how those have moved until now."""
        return self.config.safety and self.config.driver == "policy" and self.config.perfect

    def _evade(
        self, state: State, scene: Scene, features: Features, drive: Drive, unsafe: jax.Array, limits: Limits,
        dt: jax.Array,
    ) -> tuple[Drive, jax.Array]:  # fmt: skip
        """`drive` and `unsafe` [A] of a checked command, or those of the plan that evades objects that do not react."""

        def view_of(agent: Any, world: Any, tables: DeviceBank) -> safety.View:
            (about, features, limits, *_), (scenario, here, _, dt) = agent, world
            road = device_bank.field(tables, scenario)
            return safety.view_of(about, features, here, limits, road, dt, self.config.neighbours)

        def threatened(agent: Any, world: Any, tables: DeviceBank) -> jax.Array:
            (*_, drive, _), (_, _, habits, _) = agent, world
            return evasion.threatened(view_of(agent, world, tables), habits, drive)

        def evaded(agent: Any, world: Any, tables: DeviceBank) -> tuple[Drive, jax.Array]:
            (*_, drive, unsafe), (_, _, habits, _) = agent, world
            drive, evades = evasion.plan(view_of(agent, world, tables), habits, drive)
            return drive, unsafe | evades

        assert state.habits is not None
        blind = state.habits.blind & scene.present
        agents = self._agents(state)
        at = agents.drive.motion
        near = jnp.hypot(at.x[:, None] - scene.x[None], at.y[:, None] - scene.y[None]) < RANGE
        needed = state.playing & jnp.any(near & blind[None] & (scene.slot[None] != agents.slot[:, None]), axis=-1)
        if state.partners is not None:
            needed = needed & (state.partners.checked | (agents.slot == 0))
        given = (agents, features, limits, drive, unsafe), (state.scenario, scene, state.habits, dt), self.tables
        needed = only_where(threatened)(needed, jnp.zeros_like(needed), *given)
        return only_where(evaded)(needed, (drive, unsafe), *given)

    def _bodies(self, scenario: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Kind, int32, and length, m, of the controlled agents, each [A]."""
        half_length, _, kind, _ = self.tables.body[scenario][:, jnp.maximum(self.tables.controlled[scenario], 0)]
        return kind.astype(jnp.int32), 2.0 * half_length

    def _limits(self, scenario: jax.Array) -> Limits:
        """Limits of the controlled agents."""
        kind, length = self._bodies(scenario)
        if self.config.control == "all":
            return dynamics.limits_of(kind, length)
        return VEHICLE._replace(wheelbase=WHEELBASE * length)

    def _weights(self, state: State) -> Weights:
        """Reward weights of each agent."""
        if state.episode is None:
            return self.config.weights
        return reward.drawn_weights(self.config.weights, reward.weight_draws(state.episode, self.config.agents))

    def _without_exempt(self, state: State, events: Events) -> Events:
        """Events without those that mean nothing: ghosts collide with nothing, and pedestrians may leave the road."""
        if self.config.goal == "respawn":
            events = events._replace(collision=events.collision & (state.stage != GHOST))
        if self.config.control == "all":
            events = events._replace(offroad=events.offroad & (self._bodies(state.scenario)[0] != PEDESTRIAN))
        return events

    def _respawned(self, state: State) -> tuple[State, jax.Array | None]:
        """State with the agents that ARRIVED put back to where their log begins, and a flag bool [A] of those that are
        held in this step; None where no agent can be."""
        if self.config.goal != "respawn":
            return state, state.stage == STANDING if "stop" in (self.config.goal, self.config.crash) else None
        back = state.stage == ARRIVED
        start, _ = self._logged(state.scenario, jnp.zeros_like(state.t))
        s = self.tables.start_s[state.scenario]
        state = state.moved(hold(back, start, state.drive))._replace(
            s=jnp.where(back, s, state.s),
            stage=jnp.where(back, GHOST, state.stage).astype(jnp.uint8),
            tally=state.tally._replace(furthest=jnp.where(back, s, state.tally.furthest)),
        )
        return state, back | (state.stage == STANDING)


def clear(features: Features) -> jax.Array:
    """Flag bool [A]: no object is near, nor comes near soon. `features` have a leading [A]."""
    others = features.others
    distance = jnp.maximum(jnp.hypot(others.x, others.y), 0.1)
    closing = jnp.maximum(-(others.x * others.vx + others.y * others.vy) / distance, 0.0)
    return ~jnp.any(features.seen & (features.separation - HEED * closing < CLEARANCE), axis=-1)


def next_stage(
    stage: jax.Array, failed: jax.Array, arrived: jax.Array, over: jax.Array, free: jax.Array, goal: str, crash: str
) -> jax.Array:
    """Stages [A] after a step. `failed` and `arrived` [A] are of episodes that the step ends or puts back, `over` is
    True where the log ends, `free` is the result of `clear`."""
    plays = stage >= PLAYING
    if goal == "respawn":
        ready = (stage == GHOST) & free
        first = ready & (jnp.arange(len(stage)) == jnp.argmax(ready))
        stage = jnp.where(first, PLAYING, stage)
        stage = jnp.where(plays & arrived, ARRIVED, stage)
        arrived = jnp.zeros_like(arrived)
    stage = jnp.where(plays & arrived, STANDING if goal == "stop" else GONE, stage)
    stage = jnp.where(plays & failed, STANDING if crash == "stop" else GONE, stage)
    return jnp.where(plays & over, GONE, stage).astype(jnp.uint8)


def driving(bank: Bank, config: Config | None = None) -> Simulator:
    """The environment of a bank of NumPy arrays, which it puts on the default device.

    Raises ValueError, naming the value and the remedy, where config and bank do not fit.
    """
    config = config or Config()
    check(bank, config)
    # A bank that a program closes over stays an array beside it; else it is text inside of it, and larger. Not set for
    # all: JAX 0.11 can't lower programs of others (Brax) with it, whose functions compiled by themselves hold arrays.
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    shell = outline(config, least=int(bank.steps.min()), most=int(bank.steps.max()), dt=float(bank.dt.max()))
    return replace(shell, tables=device_bank.tabulate(bank, config.agents, reactive=config.traffic == "idm"))


def arranged(bank: Bank, config: Config) -> tuple[Simulator, DeviceBank]:
    """(environment without tables, its tables as NumPy arrays). Raises ValueError as `driving`."""
    check(bank, config)
    shell = outline(config, least=int(bank.steps.min()), most=int(bank.steps.max()), dt=float(bank.dt.max()))
    return shell, device_bank.arrange(bank, config.agents, reactive=config.traffic == "idm")


def outline(config: Config, *, least: int, most: int, dt: float) -> Simulator:
    """The environment without tables, for all that hold scenarios of `least` to `most` steps of at most `dt` seconds.

    `dataclasses.replace(outline(...), tables=tables)` drives in them.
    """
    if config.driver == "log" and config.goal == "respawn":  # a log is not driven twice
        config = replace(config, goal="remove")
    numbers = LIMIT * config.speed_limit + len(reward.RANGES) * config.conditioning
    seen = shapes(config.neighbours, config.waypoints, config.road_points, numbers)
    spec = Spec(
        observation=seen,
        action=dynamics.make_actions(config.actions, MODELS[config.dynamics]().grids).action,
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
