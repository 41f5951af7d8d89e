"""Small worlds whose outcome is known: a straight road along x, ten metres wide, with what a test puts on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.datasets.log import VEHICLE
from longhaul.driving.scenario.bank import Bank, stack
from longhaul.driving.scenario.scenario import CELL, Scenario
from longhaul.driving.sim.config import Config, Weights
from longhaul.driving.sim.device_bank import DeviceBank
from longhaul.driving.sim.simulator import Simulator, driving

LANE = 5.0
"""Metres from the middle of the road to its edge."""

DT = 0.1
MOST = 121
"""Steps of the longest world."""

STRAIGHT = (3, 6)
"""The discrete action that changes nothing."""


def line(start: Sequence[float], velocity: Sequence[float], steps: int) -> np.ndarray:
    """Poses [T, 3] of somebody who goes straight on at one velocity, looking where it goes (along x if it stands)."""
    time = DT * np.arange(steps)[:, None]
    heading = np.arctan2(velocity[1], velocity[0])
    place = np.asarray(start, np.float64) + time * np.asarray(velocity, np.float64)
    return np.concatenate([place, np.full((steps, 1), heading)], -1).astype(np.float32)


def scenario(
    poses: Sequence[np.ndarray],
    *,
    drivers: int = 1,
    sizes: Sequence[tuple[float, float]] | None = None,
    kinds: Sequence[int] | None = None,
    present: np.ndarray | None = None,
    lights: Sequence[tuple[float, Sequence[int]]] = (),
    road: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = lambda x, y: np.abs(y) - LANE,
    points: int = 140,
) -> Scenario:
    """A scenario from everybody's poses [T, 3]; the first `drivers` are controlled, their routes straight from pose 0.

    `road`: signed distance in metres by x and y, None for none; `lights`: of every route, (arc length, state by step).
    """
    pose = np.stack(poses, 1).astype(np.float32)
    steps, count = pose.shape[:2]
    velocity = np.gradient(pose[..., :2], DT, axis=0).astype(np.float32)
    begin = pose[0, :drivers]
    s = np.arange(points)
    direction = np.stack([np.cos(begin[:, 2]), np.sin(begin[:, 2])], -1)
    route = np.zeros((drivers, points, 3), np.float32)
    route[..., :2] = begin[:, None, :2] + direction[:, None] * s[None, :, None]
    route[..., 2] = begin[:, None, 2]
    travelled = np.linalg.norm(pose[:, :drivers, :2] - begin[:, :2], axis=-1).T
    field, origin = np.zeros((0, 0), np.int16), np.zeros(2, np.float32)
    if road is not None:
        origin = np.array([-30.0, -20.0], np.float32)
        x, y = np.meshgrid(origin[0] + CELL * np.arange(360), origin[1] + CELL * np.arange(81))
        field = np.round(100.0 * road(x, y)).astype(np.int16)
    light_s = np.array([[at for at, _ in lights]] * drivers, np.float32).reshape(drivers, len(lights))
    states = np.array([list(by_step) for _, by_step in lights], np.int8).reshape(len(lights), steps)
    return Scenario(
        id="made by hand",
        steps=steps,
        dt=DT,
        pose=pose,
        velocity=velocity,
        present=np.ones((steps, count), bool) if present is None else present,
        size=np.array(sizes or [(4.0, 2.0)] * count, np.float32),
        kind=np.array(kinds or [VEHICLE] * count, np.int8),
        controlled=np.arange(drivers, dtype=np.int32),
        route=route,
        route_length=travelled[:, -1].astype(np.float32),
        route_points=np.full(drivers, points, np.int32),
        expert_s=travelled.astype(np.float32),
        light_s=light_s,
        light_state=np.broadcast_to(states, (drivers, len(lights), steps)).copy(),
        field=field,
        field_origin=origin,
        drawing=(),
    )


def bank(*scenarios: Scenario, agents: int = 1) -> Bank:
    return stack(scenarios, agents=agents)


ENDLESS: dict[str, Any] = {"agents": 3, "terminations": ()}
"""Settings of several agents, and of worlds in which no event ends the episode. With the safety check or without, they
have one program: the check takes longer to compile than all else."""


class OptionallySafe(Simulator):
    """A simulator that does as the safety check says where it is `careful`, a bool of the program."""

    careful: jax.Array

    def _check(self, state: Any, here: Any, drive: Any, *rest: Any) -> Any:
        safe, unsafe = super()._check(state, here, drive, *rest)
        return jax.tree.map(lambda new, old: jnp.where(self.careful, new, old), safe, drive), unsafe & self.careful


class Trip:
    """One world driven to its log's end: what happened at each step."""

    def __init__(self, environment: Simulator, actions: Any = STRAIGHT):
        config, tables = environment.config, same_shapes(environment.tables)
        count = int(tables.steps[0]) - 1
        plan = np.zeros((MOST - 1, config.agents, 2), np.int32)
        plan[:count] = actions
        settings = replace(config, weights=Weights())
        if replace(settings, safety=False) == Config(**ENDLESS):
            settings = replace(settings, safety=True)
        program = _program(settings, environment.search)
        first, states, steps, metrics = program(tables, plan, asdict(config.weights), config.safety, count)
        self.first = jax.tree.map(np.asarray, first)  # the observation before the first step
        self.states = jax.tree.map(lambda x: np.asarray(x)[:count], states)  # after each step, [T, ...]
        self.steps = jax.tree.map(lambda x: np.asarray(x)[:count], steps)
        at_end = {name: [np.asarray(leaf)[count - 1].tolist() for leaf in measure] for name, measure in metrics.items()}
        self.metrics = {name: value for name, (value, _) in at_end.items()}  # by agent, [A]
        self.valid = {name: valid for name, (_, valid) in at_end.items()}


def same_shapes(tables: DeviceBank) -> DeviceBank:
    """The tables of one scenario, padded so that all tests of one configuration share one compiled program."""

    def pad(array: Any, axis: int, size: int) -> np.ndarray:
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, size - array.shape[axis])
        return np.pad(np.asarray(array), widths)

    def lay(lines: Any, size: int) -> Any:
        return lines._replace(points=pad(lines.points, 1, size))

    rows = {name: pad(getattr(tables.map, name), 0, 4096) for name in ("place", "shape", "lane", "directory")}
    blocks = {"points": pad(tables.map.points, 0, 256), "lanes": pad(tables.map.lanes, 0, 256 * 16)}
    paths = tables.paths
    if paths is not None:
        paths = paths._replace(lines=lay(paths.lines, 120 * 16))
    return tables._replace(
        motion=pad(tables.motion, 0, MOST),
        routes=lay(tables.routes, 16 * 240),
        lights=tables.lights._replace(states=pad(tables.lights.states, 0, 16 * MOST)),
        cells=pad(tables.cells, 0, 45 * 11 * 81),
        tiles=pad(tables.tiles, 0, 45 * 11),
        paths=paths,
        map=tables.map._replace(**rows, **blocks),
    )


@lru_cache
def _program(config: Config, search: int) -> Any:
    """(tables, actions [MOST - 1, A, 2], weights of the reward, whether the safety check is heeded, how many steps) ->
    first observation; states, time steps and metrics by step."""

    def roll(tables: DeviceBank, plan: jax.Array, weights: dict[str, jax.Array], careful: Any, count: Any) -> Any:
        known = replace(config, weights=Weights(**weights))  # type: ignore[arg-type]
        environment = OptionallySafe(known, tables, None, search)  # type: ignore[arg-type]
        object.__setattr__(environment, "careful", careful)
        state, observation = environment.start(0)

        def step(state: Any, action: jax.Array) -> Any:
            following, step = environment.step(jax.random.key(0), state, action)
            return following, (following, step, environment.metrics(following))

        traced, shapes = jax.make_jaxpr(step, return_shape=True)(state, plan[0])  # once: it takes two seconds

        def driven(state: Any, action: jax.Array) -> Any:
            leaves = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *jax.tree.leaves((state, action)))
            return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

        def over(state: Any, action: jax.Array) -> Any:
            return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1])

        def body(state: Any, given: Any) -> Any:
            action, t = given
            return jax.lax.cond(t < count, driven, over, state, action)  # what nobody looks at is not driven

        return observation, *jax.lax.scan(body, state, (plan, jnp.arange(MOST - 1)))[1]

    # The program of the check drives some sixty trips. Optimised, it takes 10 CPU-seconds longer to compile, and each
    # trip one for three to five.
    options = {"xla_backend_optimization_level": 1} if config.safety else None
    return jax.jit(roll, compiler_options=options)


def trip(made: Scenario, actions: Any = STRAIGHT, **config: Any) -> Trip:
    return Trip(driving(bank(made, agents=config.get("agents", 1)), Config(**config)), actions)
