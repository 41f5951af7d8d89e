"""The models of motion against fine integration, their inverses, their limits, and real logs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import CYCLIST, PEDESTRIAN, VEHICLE
from longhaul.driving.sim import dynamics
from longhaul.driving.sim.config import ACTIONS
from longhaul.driving.sim.dynamics import (
    MAX_CURVATURE,
    MAX_LATERAL,
    MAX_SPEED,
    MODELS,
    Actions,
    Drive,
    Limits,
    Model,
    Motion,
    make_actions,
)
from longhaul.spaces import Box, Discrete, MultiDiscrete

DT = jnp.float32(0.1)
advance = jax.jit(dynamics.advance)


@cache
def compiled(name: str) -> Model:
    """A model of motion whose functions are compiled."""
    grids, *functions = MODELS[name]()
    return Model(grids, *map(jax.jit, functions))


def coding(name: str, grids: tuple[np.ndarray, ...]) -> Actions:
    """Actions whose functions are compiled."""
    action, read, write = make_actions(name, grids)
    return Actions(action, jax.jit(read), jax.jit(write))


def integrate(
    x: float, y: float, h: float, v: float, a: float, k: float, dt: float
) -> tuple[float, float, float, float]:
    """The same differential equation in two thousand midpoint steps, float64, with the bounds of the speed."""
    count = 2000
    tick = dt / count
    for _ in range(count):
        middle = min(max(v + a * tick / 2, 0.0), MAX_SPEED)
        turned = h + k * middle * tick / 2
        x, y = x + middle * np.cos(turned) * tick, y + middle * np.sin(turned) * tick
        h, v = h + k * middle * tick, min(max(v + a * tick, 0.0), MAX_SPEED)
    return x, y, h, v


def drives(count: int, seed: int = 0, low: float = 3.0, high: float = 20.0) -> Drive:
    """Random motions within a vehicle's limits."""
    rng = np.random.default_rng(seed)
    x, y, heading = rng.uniform(-3, 3, (3, count))
    speed = rng.uniform(low, high, count)
    curvature = rng.uniform(-0.5, 0.5, count) * np.minimum(0.2, 6.0 / speed**2)
    numbers = (x, y, heading, speed, rng.uniform(-2, 2, count), curvature)
    x, y, heading, speed, acceleration, curvature = (v.astype(np.float32) for v in numbers)
    return Drive(Motion(x, y, heading, speed), acceleration, curvature)


@pytest.mark.parametrize(
    ("speed", "acceleration", "curvature", "dt"),
    [
        (8.0, 2.0, 0.1, 0.1),
        (12.0, -3.0, -0.05, 0.5),
        (0.4, -6.0, 0.3, 0.1),  # comes to rest within the step
        (34.9, 6.0, 0.01, 0.2),  # meets the highest speed within the step
        (0.0, 0.0, 0.3, 0.1),
        (5.0, 1.0, 1e-7, 0.1),
        (10.0, 0.0, 0.3, 1.0),
    ],
)
def test_a_step_solves_the_equation_exactly(speed: float, acceleration: float, curvature: float, dt: float) -> None:
    begin = Motion(*(jnp.float32(v) for v in (3.0, -2.0, 0.7, speed)))
    end = advance(begin, jnp.float32(acceleration), jnp.float32(curvature), jnp.float32(dt))
    x, y, h, v = integrate(3.0, -2.0, 0.7, speed, acceleration, curvature, dt)
    np.testing.assert_allclose([end.x, end.y, end.speed], [x, y, v], atol=2e-4)
    assert np.cos(float(end.heading) - h) == pytest.approx(1.0, abs=1e-6)


def reference(name: str, now: list[float], command: list[float], dt: float, wheelbase: float) -> list[float]:
    """x, y, heading, speed, acceleration and curvature after a step, by the definitions, in float64."""
    x, y, h, v, a, k = now
    if name == "delta":
        move = complex(command[0], command[1]) * np.exp(1j * h)
        way = abs(move)
        speed = np.copysign(way / dt, command[0])
        bend = command[2] / way if way > 0.01 else 0.0
        return [x + move.real, y + move.imag, h + command[2], speed, (speed - v) / dt, np.clip(bend, -0.3, 0.3)]
    push, bend = command
    if name == "steering":
        bend = np.tan(bend) / wheelbase
    if name == "jerk":
        quick = 0.6 * dt / wheelbase
        push, bend = a + command[0] * dt, k + np.clip(command[1] * dt / max(v * v, 1e-3), -quick, quick)
        bend = np.clip(bend, -np.tan(0.55) / wheelbase, np.tan(0.55) / wheelbase)
    grip = 1e9 if name == "bicycle" else min(0.3, 6.0 / max(v * v, 1e-3))
    push, bend = np.clip(push, -6.0, 6.0), np.clip(bend, -grip, grip)
    x, y, h, speed = integrate(x, y, h, v, push, np.clip(bend, -0.3, 0.3), dt)
    return [x, y, h, speed, (speed - v) / dt, bend]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_each_model_is_that_of_its_definition(name: str) -> None:
    now, limits = drives(6, low=0.5), dynamics.VEHICLE._replace(wheelbase=3.1)
    model = compiled(name)
    rng = np.random.default_rng(1)
    shares = tuple(jnp.asarray(rng.uniform(-1, 1, 6), jnp.float32) for _ in model.grids)
    command = model.scale(shares, now, limits, DT)
    end = model.advance(now, command, limits, DT)
    found = np.stack([np.asarray(part, np.float64) for part in jax.tree.leaves(end)], -1)
    begun = np.stack([np.asarray(part, np.float64) for part in jax.tree.leaves(now)], -1)
    told = np.stack([np.asarray(part, np.float64) for part in command], -1)
    wanted = np.array([reference(name, list(a), list(b), float(DT), 3.1) for a, b in zip(begun, told, strict=True)])
    wanted[:, 2] = (wanted[:, 2] + np.pi) % (2 * np.pi) - np.pi
    np.testing.assert_allclose(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_inversion_gives_back_the_command(name: str) -> None:
    now, model = drives(300), compiled(name)
    rng = np.random.default_rng(2)
    shares = tuple(jnp.asarray(rng.uniform(-0.9, 0.9, 300), jnp.float32) for _ in model.grids)
    if name == "jerk":  # the wheels are as quick as the command asks for above walking pace only
        now = now._replace(acceleration=jnp.abs(now.acceleration), curvature=0.1 * now.curvature)
        shares = (jnp.abs(shares[0]), shares[1])
    if name == "steering":  # within the grip
        shares = (shares[0], 0.02 * shares[1])
    command = model.scale(shares, now, dynamics.VEHICLE, DT)
    end = model.advance(now, command, dynamics.VEHICLE, DT)
    found = model.invert(now, end.motion, dynamics.VEHICLE, DT)
    for part, wanted in zip(found, command, strict=True):
        error = np.abs(np.asarray(part) - np.asarray(wanted)) / max(1.0, float(jnp.abs(wanted).max()))
        assert np.quantile(error, 0.95) < 5e-3
        assert np.median(error) < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_shares_and_choices_are_told_and_read_alike(name: str) -> None:
    model, now = compiled(name), drives(1)
    sizes = tuple(len(grid) for grid in model.grids)
    every = np.indices(sizes).reshape(len(sizes), -1).T
    joint, many = (coding(kind, model.grids) for kind in ("joint", "discrete"))
    assert joint.action == Discrete(len(every))
    assert many.action == MultiDiscrete(sizes)
    shares = many.read(every)
    np.testing.assert_array_equal(many.write(shares), every)
    np.testing.assert_array_equal(joint.write(shares), np.arange(len(every)))
    for one, other in zip(joint.read(np.arange(len(every))), shares, strict=True):
        np.testing.assert_array_equal(one, other)
    free = coding("continuous", model.grids)
    assert free.action == Box((-1.0,) * len(sizes), (1.0,) * len(sizes))
    for one, other in zip(free.read(free.write(shares)), shares, strict=True):
        np.testing.assert_array_equal(one, other)
    assert float(free.read(np.full((1, len(sizes)), 7.0, np.float32))[0][0]) == 1.0  # what is outside is clipped
    if name != "jerk":  # whose shares near 0 end at 0
        begun = jax.tree.map(lambda x: np.repeat(x, len(every)), now)
        told = model.share(model.scale(shares, begun, dynamics.VEHICLE, DT), begun, dynamics.VEHICLE, DT)
        for one, other in zip(told, shares, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_joint_choices_number_as_the_papers() -> None:
    counts = {name: make_actions("joint", compiled(name).grids).action for name in MODELS}
    assert counts["bicycle"] == counts["steering"] == Discrete(91)
    assert counts["jerk"] == Discrete(12)
    assert ACTIONS == ("discrete", "continuous", "joint")


def test_the_default_choices_are_the_numbers_that_policies_were_trained_with() -> None:
    model, now = compiled("bicycle"), drives(91)
    shares = coding("joint", model.grids).read(np.arange(91))
    acceleration, curvature = model.scale(shares, now, dynamics.VEHICLE, DT)
    np.testing.assert_array_equal(acceleration, np.repeat(dynamics.ACCELERATIONS, 13))
    np.testing.assert_array_equal(curvature, np.tile(dynamics.STEERINGS, 7) * dynamics.steerable(now.motion.speed))
    middle = dynamics.ACCELERATIONS.tolist().index(0.0) * 13 + 6
    assert float(acceleration[middle]) == float(curvature[middle]) == 0.0


def test_grip_bounds_the_curvature() -> None:
    speed = jnp.linspace(0.0, 35.0, 50)
    now = jax.tree.map(lambda x: jnp.zeros(50), drives(1))._replace(motion=Motion(*jnp.zeros((3, 50)), speed))
    for name in ("bicycle", "steering"):
        model = compiled(name)
        for side in (-1.0, 1.0):
            shares = (jnp.ones(50), jnp.full(50, side))
            end = model.advance(now, model.scale(shares, now, dynamics.VEHICLE, DT), dynamics.VEHICLE, DT)
            assert float((jnp.abs(end.curvature) * speed**2).max()) <= MAX_LATERAL * 1.0001
            assert float(jnp.abs(end.curvature).max()) <= MAX_CURVATURE * 1.0001
    assert float(jnp.abs(end.curvature).max()) == pytest.approx(np.tan(0.55) / 2.8, rel=1e-5)


def test_a_jerk_given_as_a_share_ends_at_nothing_where_it_would_cross_it() -> None:
    model = compiled("jerk")
    begun = drives(3, low=10.0, high=10.0)
    now = begun._replace(acceleration=jnp.array([0.3, -1.0, 2.0]), curvature=jnp.array([1e-4, -1e-4, 1e-2]))
    shares = (jnp.array([-1.0, 1.0, -1.0]), jnp.array([-1.0, 1.0, -1.0]))
    end = model.advance(now, model.scale(shares, now, dynamics.VEHICLE, DT), dynamics.VEHICLE, DT)
    np.testing.assert_allclose(end.acceleration, [0.0, -0.6, 0.5], atol=2e-4)
    np.testing.assert_allclose(end.curvature[:2], 0.0, atol=1e-9)
    assert float(end.curvature[2]) == pytest.approx(1e-2 - 4.0 * 0.1 / 10.0**2, rel=1e-4)


def test_standing_still_lasts() -> None:
    begin = Motion(*(jnp.float32(v) for v in (1.0, 2.0, 0.5, 0.0)))
    end = advance(begin, jnp.float32(-6.0), jnp.float32(0.3), DT)
    np.testing.assert_allclose(np.asarray(end), np.asarray(begin), atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_everybody_stays_within_the_limits_of_its_kind(name: str) -> None:
    kind = np.repeat([VEHICLE, PEDESTRIAN, CYCLIST, 4, 0], 40)
    limits = dynamics.limits_of(jnp.asarray(kind, jnp.int32), jnp.full(200, 4.0))
    for row, number in ((0, VEHICLE), (40, PEDESTRIAN), (80, CYCLIST), (120, VEHICLE), (160, VEHICLE)):
        wanted = dynamics.LIMITS.get(number, dynamics.VEHICLE)._replace(wheelbase=2.4)
        np.testing.assert_allclose([float(field[row]) for field in limits], wanted, rtol=1e-6)
    model = compiled(name)
    zeros = jnp.zeros(200)
    now = Drive(Motion(zeros, zeros, zeros, zeros), zeros, zeros)
    shares = jax.random.uniform(jax.random.key(0), (200, len(model.grids), 200), minval=-0.1, maxval=1.0)

    def step(now: Drive, share: jax.Array) -> tuple[Drive, Drive]:
        after = model.advance(now, model.scale(tuple(share), now, limits, DT), limits, DT)
        return after, after

    seen = jax.tree.map(np.asarray, jax.lax.scan(step, now, shares)[1])
    fast = np.hypot(limits.speed, limits.slip) if name == "delta" else np.asarray(limits.speed)
    assert (np.abs(seen.motion.speed) <= fast * 1.0001).all()
    assert (np.abs(seen.motion.speed).max(0) > 0.9 * fast).mean() > (0.9 if name != "delta" else 0.5)
    assert (np.abs(seen.curvature) <= np.asarray(limits.curvature) * 1.0001).all()
    if name != "delta":
        push = np.maximum(limits.acceleration, limits.braking)
        assert (np.abs(seen.acceleration) <= push * 1.001 + 1e-3).all()


# ---------------------------------------------------------------------------------------------------- real logs


def real(folder: Path) -> tuple[Motion, np.ndarray, np.ndarray, np.ndarray]:
    """All real tracks side by side, [T, N]: motion, whether it is known; kind and length [N]."""
    columns: list[tuple[Any, ...]] = []
    for path in sorted(p for p in folder.glob("*/*") if p.suffix in (".tfrecord", ".json", ".pkl", ".parquet")):
        if path.name.startswith("log_map"):
            continue
        log = next(iter(readers.read(path)))
        tracks, origin = log.tracks, log.tracks.position[log.sdc, log.current]
        x, y = np.moveaxis(tracks.position - origin, -1, 0)[:2]
        speed = np.hypot(*np.moveaxis(tracks.velocity, -1, 0))
        known = [np.where(tracks.valid, part, 0.0) for part in (x, y, tracks.heading, speed)]
        columns.append((known, tracks.valid, tracks.kind, tracks.size.max(1)[:, 0]))
    steps = max(valid.shape[1] for _, valid, _, _ in columns)

    def side_by_side(parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.pad(p, ((0, 0), (0, steps - p.shape[1]))) for p in parts]).T

    motion = Motion(*(side_by_side([c[0][i] for c in columns]).astype(np.float32) for i in range(4)))  # type: ignore
    valid = side_by_side([c[1] for c in columns])
    kind, length = (np.concatenate([c[i] for c in columns]) for i in (2, 3))
    return motion, valid, kind, length.astype(np.float32)


def follow(name: str, actions: str | None, tracks: Any) -> tuple[np.ndarray, np.ndarray]:
    """Errors of position, m [T-1, N], of log -> actions -> motion, -1 where unknown: after each step alone, and when a
    track is followed from its beginning on. `actions` None takes the commands as they are."""
    motion, valid, kind, length = tracks
    model, limits = compiled(name), dynamics.limits_of(jnp.asarray(kind, jnp.int32), jnp.asarray(length))
    chosen = None if actions is None else make_actions(actions, model.grids)

    def drive(now: Drive, logged: Motion, limits: Limits) -> Drive:
        command = model.invert(now, logged, limits, DT)
        if chosen is not None:
            shares = chosen.read(chosen.write(model.share(command, now, limits, DT)))
            command = model.scale(shares, now, limits, DT)
        return model.advance(now, command, limits, DT)

    def step(carried: Any, row: Any) -> Any:
        single, whole, known = carried
        logged, there = row
        both = known & there
        errors = []
        for now in (single, whole):
            after = drive(now, logged, limits)
            missed = jnp.hypot(after.motion.x - logged.x, after.motion.y - logged.y)
            errors.append((after, jnp.where(both, missed, -1.0)))
        push, bend = dynamics.invert(single.motion, logged, DT, limits)
        fresh = Drive(logged, jnp.where(both, push, 0.0), jnp.where(both, bend, 0.0))
        whole = jax.tree.map(lambda on, anew: jnp.where(both, on, anew), errors[1][0], fresh)
        return (fresh, whole, there), (errors[0][1], errors[1][1])

    def run(motion: Motion, valid: jax.Array) -> Any:
        first, rest = (jax.tree.map(lambda x, part=part: x[part], motion) for part in (0, slice(1, None)))
        zeros = jnp.zeros(valid.shape[1])
        begun = Drive(first, zeros, zeros)
        return jax.lax.scan(step, (begun, begun, valid[0]), (rest, valid[1:]))[1]

    single, whole = jax.jit(run)(jax.tree.map(jnp.asarray, motion), jnp.asarray(valid))
    return np.asarray(single), np.asarray(whole)


@pytest.fixture(scope="module")
def tracks(logs: Path) -> Any:
    return real(logs)


# (of single steps: median, 99 %; of whole logs: median, 90 %), m; a quarter or so above what was measured
MEASURED = {
    ("bicycle", None, VEHICLE): (0.004, 0.22, 0.06, 1.1),
    ("bicycle", "discrete", VEHICLE): (0.004, 0.22, 0.065, 1.1),
    ("steering", None, VEHICLE): (0.004, 0.22, 0.06, 1.1),
    ("jerk", None, VEHICLE): (0.004, 0.25, 0.09, 2.2),
    ("delta", None, VEHICLE): (1e-5, 1e-3, 1e-4, 1e-3),
    ("delta", "joint", VEHICLE): (0.007, 0.12, 0.015, 0.08),
}


@pytest.mark.parametrize(("name", "actions"), sorted({key[:2] for key in MEASURED}, key=str))
def test_real_logs_are_followed_by_their_own_actions(tracks: Any, name: str, actions: str | None) -> None:
    single, whole = follow(name, actions, tracks)
    mine = tracks[2] == VEHICLE
    alone, all_along = (part[:, mine][part[:, mine] >= 0.0] for part in (single, whole))
    found = (*np.quantile(alone, [0.5, 0.99]), *np.quantile(all_along, [0.5, 0.9]))
    assert len(alone) > 1000
    assert all(np.array(found) < MEASURED[name, actions, VEHICLE]), found
    if (name, actions) == ("delta", None):  # exact but where the log jumps beyond the bounds
        motion, _, kind, _ = tracks
        move = np.hypot(np.diff(motion.x, axis=0), np.diff(motion.y, axis=0))
        turn = np.abs((np.diff(motion.heading, axis=0) + np.pi) % (2 * np.pi) - np.pi)
        within = (move < 0.1) & (turn < 0.15) & (single >= 0.0)
        assert single[within].max() < 1e-3
        assert within[:, kind == PEDESTRIAN].sum() > 100
