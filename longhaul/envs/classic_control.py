"""Classic control as pure functions, equal to Gymnasium's environments step by step.

CartPole-v1 (Barto, Sutton and Anderson, 1983), Pendulum-v1, MountainCar-v0 (Moore, 1990), MountainCarContinuous-v0
and Acrobot-v1 (Sutton, 1996), with the dynamics, rewards and limits of Gymnasium 1.x. Where we differ: arithmetic is
float32, and a step that both fails and meets the time limit is `terminated` only, since nothing follows it (Gymnasium
sets both flags).

The time limit is part of the state: `truncated` comes with step `max_steps`. Angles are radians, times seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from longhaul.spaces import Action, Box, Discrete, Measure
from longhaul.types import Key, Spec, TimeStep, transition


class ClassicState(NamedTuple):
    """The body and the clock. One vector, so that a reset selects two arrays and no more."""

    physics: jax.Array  # float32 [n]
    steps: jax.Array  # int32: steps taken in this episode


@dataclass(frozen=True)
class Classic:
    """A world of five small functions of its physical state; the factories below make it."""

    spec: Spec
    start: Callable[[Key], jax.Array]  # key -> physics of a fresh episode
    advance: Callable[[jax.Array, jax.Array], jax.Array]  # (physics, action) -> physics one step later
    ended: Callable[[jax.Array], jax.Array]  # physics -> bool: a state in which the task is over
    score: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (physics before, action, terminated) -> reward
    observe: Callable[[jax.Array], jax.Array]  # physics -> observation
    max_steps: int

    def reset(self, key: Key) -> tuple[ClassicState, jax.Array]:
        physics = self.start(key)
        return ClassicState(physics, jnp.zeros((), jnp.int32)), self.observe(physics)

    def step(self, key: Key, state: ClassicState, action: jax.Array) -> tuple[ClassicState, TimeStep]:
        """One step; `key` is not used, these worlds are deterministic."""
        physics, steps = self.advance(state.physics, action), state.steps + 1
        terminated = self.ended(physics)
        reward = self.score(state.physics, action, terminated)
        truncated = (steps >= self.max_steps) & ~terminated
        return ClassicState(physics, steps), transition(self.observe(physics), reward, terminated, truncated)

    def active(self, state: ClassicState) -> jax.Array:
        return ~self.ended(state.physics) & (state.steps < self.max_steps)

    def metrics(self, state: ClassicState) -> dict[str, Measure]:
        return {}


def _identity(physics: jax.Array) -> jax.Array:
    return physics


def _uniform(key: Key, size: int, bound: float) -> jax.Array:
    return jax.random.uniform(key, (size,), jnp.float32, -bound, bound)


def _spec(size: int, action: Action, max_steps: int) -> Spec:
    if max_steps < 1:
        raise ValueError(f"max_steps is {max_steps}, but an episode has at least 1 step; give a positive limit")
    return Spec(jax.ShapeDtypeStruct((size,), jnp.float32), action, None, max_steps, max_steps)


def _wrap(angle: jax.Array) -> jax.Array:
    """The same angle in [-pi, pi)."""
    return angle - 2 * math.pi * jnp.floor((angle + math.pi) * (0.5 / math.pi))


# CartPole. Physics: cart position [m], its speed [m/s], pole angle [rad], its speed [rad/s]; it is the observation too.
GRAVITY = 9.8  # m/s^2, of CartPole and Acrobot
CART_MASS, POLE_MASS = 1.0, 0.1  # kg
POLE_HALF = 0.5  # m, half the pole's length
PUSH = 10.0  # N
CARTPOLE_DT = 0.02  # s
TRACK, TILT = 2.4, math.radians(12.0)  # m, rad: beyond either the episode is over


def _cartpole_start(key: Key) -> jax.Array:
    return _uniform(key, 4, 0.05)


def _cartpole_advance(physics: jax.Array, action: jax.Array) -> jax.Array:
    """Euler's method. Scalars and one stack: XLA makes two kernels of it on the CPU; a matrix product was slower."""
    x, speed, angle, spin = physics[0], physics[1], physics[2], physics[3]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    total = CART_MASS + POLE_MASS
    push = jnp.where(action == 1, PUSH, -PUSH)
    thrust = (push + POLE_MASS * POLE_HALF * spin * spin * sin) / total
    spin_up = (GRAVITY * sin - cos * thrust) / (POLE_HALF * (4.0 / 3.0 - POLE_MASS * cos * cos / total))
    speed_up = thrust - POLE_MASS * POLE_HALF * spin_up * cos / total
    dt = CARTPOLE_DT
    return jnp.stack([x + dt * speed, speed + dt * speed_up, angle + dt * spin, spin + dt * spin_up])


def _cartpole_ended(physics: jax.Array) -> jax.Array:
    return (jnp.abs(physics[0]) > TRACK) | (jnp.abs(physics[2]) > TILT)


def _cartpole_score(physics: jax.Array, action: jax.Array, terminated: jax.Array) -> jax.Array:
    return jnp.ones((), jnp.float32)  # the step that fails earns 1 as well


def cartpole(max_steps: int = 500) -> Classic:
    """CartPole-v1: keep a pole upright by pushing its cart left (0) or right (1); 1 a step."""
    spec = _spec(4, Discrete(2), max_steps)
    return Classic(spec, _cartpole_start, _cartpole_advance, _cartpole_ended, _cartpole_score, _identity, max_steps)


# Pendulum. Physics: angle from upright [rad], not wrapped, and its speed [rad/s].
PENDULUM_GRAVITY = 10.0  # m/s^2
PENDULUM_DT = 0.05  # s
TORQUE_MAX, SPIN_MAX = 2.0, 8.0  # N m, rad/s


def _pendulum_start(key: Key) -> jax.Array:
    unit = _uniform(key, 2, 1.0)
    return jnp.stack([unit[0] * math.pi, unit[1]])


def _pendulum_advance(physics: jax.Array, action: jax.Array) -> jax.Array:
    """A rod of 1 kg and 1 m: acceleration 3g/2 sin(angle) + 3 torque; the new speed moves the angle."""
    torque = jnp.clip(action[0], -TORQUE_MAX, TORQUE_MAX)
    spin = physics[1] + (1.5 * PENDULUM_GRAVITY * jnp.sin(physics[0]) + 3.0 * torque) * PENDULUM_DT
    spin = jnp.clip(spin, -SPIN_MAX, SPIN_MAX)
    return jnp.stack([physics[0] + spin * PENDULUM_DT, spin])


def _pendulum_ended(physics: jax.Array) -> jax.Array:
    return jnp.zeros((), bool)


def _pendulum_score(physics: jax.Array, action: jax.Array, terminated: jax.Array) -> jax.Array:
    """Reward of the state BEFORE the step and the clipped torque, as in Gymnasium."""
    angle, torque = _wrap(physics[0]), jnp.clip(action[0], -TORQUE_MAX, TORQUE_MAX)
    return -(angle * angle + 0.1 * physics[1] * physics[1] + 0.001 * torque * torque)


def _pendulum_observe(physics: jax.Array) -> jax.Array:
    return jnp.stack([jnp.cos(physics[0]), jnp.sin(physics[0]), physics[1]])


def pendulum(max_steps: int = 200) -> Classic:
    """Pendulum-v1: swing a rod up and hold it by a torque in [-2, 2] N m; never terminates."""
    spec = _spec(3, Box((-TORQUE_MAX,), (TORQUE_MAX,)), max_steps)
    return Classic(
        spec, _pendulum_start, _pendulum_advance, _pendulum_ended, _pendulum_score, _pendulum_observe, max_steps
    )


# MountainCar, both kinds. Physics: position and speed, without units; it is the observation too.
LEFT, RIGHT, CAR_SPEED = -1.2, 0.6, 0.07
SLOPE = 0.0025
GOAL, GOAL_CONTINUOUS = 0.5, 0.45


def _car_start(key: Key) -> jax.Array:
    return jnp.stack([jax.random.uniform(key, (), jnp.float32, -0.6, -0.4), jnp.zeros((), jnp.float32)])


def _car_move(physics: jax.Array, force: jax.Array) -> jax.Array:
    speed = jnp.clip(physics[1] + force - SLOPE * jnp.cos(3.0 * physics[0]), -CAR_SPEED, CAR_SPEED)
    position = jnp.clip(physics[0] + speed, LEFT, RIGHT)
    # The wall on the left takes the speed away; the clip above gives LEFT exactly.
    speed = jnp.where((position <= LEFT) & (speed < 0.0), 0.0, speed)
    return jnp.stack([position, speed])


def _mountaincar_advance(physics: jax.Array, action: jax.Array) -> jax.Array:
    return _car_move(physics, (action - 1) * jnp.float32(0.001))


def _mountaincar_ended(physics: jax.Array) -> jax.Array:
    return (physics[0] >= GOAL) & (physics[1] >= 0.0)


def _mountaincar_score(physics: jax.Array, action: jax.Array, terminated: jax.Array) -> jax.Array:
    return -jnp.ones((), jnp.float32)


def mountaincar(max_steps: int = 200) -> Classic:
    """MountainCar-v0: rock a weak car out of a valley by pushing left (0), not (1) or right (2); -1 a step."""
    spec = _spec(2, Discrete(3), max_steps)
    return Classic(spec, _car_start, _mountaincar_advance, _mountaincar_ended, _mountaincar_score, _identity, max_steps)


def _continuous_advance(physics: jax.Array, action: jax.Array) -> jax.Array:
    return _car_move(physics, jnp.clip(action[0], -1.0, 1.0) * 0.0015)


def _continuous_ended(physics: jax.Array) -> jax.Array:
    return (physics[0] >= GOAL_CONTINUOUS) & (physics[1] >= 0.0)


def _continuous_score(physics: jax.Array, action: jax.Array, terminated: jax.Array) -> jax.Array:
    return jnp.where(terminated, 100.0, 0.0) - 0.1 * action[0] * action[0]  # the action as given, not clipped


def mountaincar_continuous(max_steps: int = 999) -> Classic:
    """MountainCarContinuous-v0: the same valley, a force in [-1, 1]; 100 at the goal, less 0.1 action^2 a step."""
    spec = _spec(2, Box((-1.0,), (1.0,)), max_steps)
    return Classic(spec, _car_start, _continuous_advance, _continuous_ended, _continuous_score, _identity, max_steps)


# Acrobot. Physics: angle of link 1 from hanging, of link 2 relative to link 1 [rad], and their speeds [rad/s]. Both
# links: 1 kg, 1 m, centre of mass at 0.5 m, moment of inertia 1 kg m^2; the equations of Sutton and Barto's book.
ACROBOT_DT = 0.2  # s
SPIN_MAX_1, SPIN_MAX_2 = 4.0 * math.pi, 9.0 * math.pi  # rad/s


def _acrobot_start(key: Key) -> jax.Array:
    return _uniform(key, 4, 0.1)


Motion = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _acrobot_derivative(motion: Motion, torque: jax.Array) -> Motion:
    """Time derivative of (angle 1, angle 2, speed 1, speed 2) under `torque` [N m] at the joint between the links."""
    angle_1, angle_2, spin_1, spin_2 = motion
    cos_2, sin_2 = jnp.cos(angle_2), jnp.sin(angle_2)
    d_1 = 3.5 + cos_2
    d_2 = 1.25 + 0.5 * cos_2
    phi_2 = 0.5 * GRAVITY * jnp.sin(angle_1 + angle_2)
    phi_1 = -0.5 * spin_2 * (spin_2 + 2.0 * spin_1) * sin_2 + 1.5 * GRAVITY * jnp.sin(angle_1) + phi_2
    ratio = d_2 / d_1
    spin_up_2 = (torque + ratio * phi_1 - 0.5 * spin_1 * spin_1 * sin_2 - phi_2) / (1.25 - d_2 * ratio)
    return spin_1, spin_2, -(d_2 * spin_up_2 + phi_1) / d_1, spin_up_2


def _acrobot_advance(physics: jax.Array, action: jax.Array) -> jax.Array:
    """One Runge-Kutta step of fourth order, then angles wrapped and speeds bounded."""
    torque = (action - 1) * jnp.float32(1.0)

    def ahead(slope: Motion, time: float) -> Motion:
        angle_1, angle_2, spin_1, spin_2 = (s + time * rate for s, rate in zip(start, slope, strict=True))
        return angle_1, angle_2, spin_1, spin_2

    start: Motion = (physics[0], physics[1], physics[2], physics[3])
    k_1 = _acrobot_derivative(start, torque)
    k_2 = _acrobot_derivative(ahead(k_1, 0.5 * ACROBOT_DT), torque)
    k_3 = _acrobot_derivative(ahead(k_2, 0.5 * ACROBOT_DT), torque)
    k_4 = _acrobot_derivative(ahead(k_3, ACROBOT_DT), torque)
    slopes = zip(start, k_1, k_2, k_3, k_4, strict=True)
    moved = [s + ACROBOT_DT / 6.0 * (a + 2.0 * b + 2.0 * c + d) for s, a, b, c, d in slopes]
    spins = jnp.clip(moved[2], -SPIN_MAX_1, SPIN_MAX_1), jnp.clip(moved[3], -SPIN_MAX_2, SPIN_MAX_2)
    return jnp.stack([_wrap(moved[0]), _wrap(moved[1]), *spins])


def _acrobot_ended(physics: jax.Array) -> jax.Array:
    return -jnp.cos(physics[0]) - jnp.cos(physics[0] + physics[1]) > 1.0


def _acrobot_score(physics: jax.Array, action: jax.Array, terminated: jax.Array) -> jax.Array:
    return jnp.where(terminated, jnp.float32(0.0), jnp.float32(-1.0))


def _acrobot_observe(physics: jax.Array) -> jax.Array:
    cos, sin = jnp.cos(physics[:2]), jnp.sin(physics[:2])
    return jnp.stack([cos[0], sin[0], cos[1], sin[1], physics[2], physics[3]])


def acrobot(max_steps: int = 500) -> Classic:
    """Acrobot-v1: swing a two-link arm 1 m above its pivot by a torque of -1, 0 or 1 N m (0, 1, 2); -1 a step."""
    spec = _spec(6, Discrete(3), max_steps)
    return Classic(spec, _acrobot_start, _acrobot_advance, _acrobot_ended, _acrobot_score, _acrobot_observe, max_steps)
