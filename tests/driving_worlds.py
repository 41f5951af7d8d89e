"""Small worlds whose outcome is known: a straight road along x, ten metres wide, with what a test puts on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.datasets.log import VEHICLE
from longhaul.driving.bank import Bank, stack
from longhaul.driving.scenario import CELL, Scenario
from longhaul.driving.simulator import Config, Simulator, driving

LANE = 5.0
"""Metres from the middle of the road to its edge."""

RED, GREEN = 1, 3
DT = 0.1
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


class Trip:
    """One scenario driven to its end: what happened at each step."""

    def __init__(self, environment: Simulator, actions: Any = STRAIGHT, index: int = 0, steps: int | None = None):
        agents = environment.config.agents
        kind = jnp.int32 if environment.config.actions == "discrete" else jnp.float32
        count = int(environment.tables.steps[index]) - 1 if steps is None else steps
        plan = jnp.broadcast_to(jnp.asarray(actions, kind), (count, agents, 2))

        def roll(index: jax.Array) -> Any:
            state, observation = environment.start(index)

            def body(state: Any, action: jax.Array) -> Any:
                following, step = environment.step(jax.random.key(0), state, action)
                return following, (following, step)

            last, (states, steps) = jax.lax.scan(body, state, plan)
            return observation, states, steps, environment.metrics(last)

        first, states, time_steps, metrics = jax.tree.map(np.asarray, jax.jit(roll)(jnp.int32(index)))
        self.first = first  # the observation before the first step
        self.states = states  # after each step, [T, ...]
        self.steps = time_steps
        self.metrics = {name: value.tolist() for name, value in metrics.items()}


def trip(made: Scenario, actions: Any = STRAIGHT, steps: int | None = None, **config: Any) -> Trip:
    agents = config.get("agents", 1)
    return Trip(driving(bank(made, agents=agents), Config(**config)), actions, steps=steps)
