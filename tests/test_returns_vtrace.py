"""V-trace against the paper's sums written out in NumPy, its reductions, and what it converges to."""

from __future__ import annotations

import functools
import itertools
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import returns
from tests.helpers.quick import quick

INF = math.inf


def stream(seed: int = 0, steps: int = 40) -> tuple[np.ndarray, ...]:
    """(log_ratio, reward, value, successor_value, terminated, truncated); successors are next values but at ends."""
    rng = np.random.default_rng(seed)
    log_ratio, reward, value, other = rng.normal(size=(4, steps)).astype(np.float32)
    terminated = rng.random(steps) < 0.1
    truncated = (rng.random(steps) < 0.1) & ~terminated
    successor = np.where(terminated | truncated, other, np.append(value[1:], other[-1]))
    return log_ratio, reward, value, successor, terminated, truncated


def oracle(
    data: tuple[np.ndarray, ...], gamma: float, lam: float, rho: float, c: float, pg: float
) -> tuple[np.ndarray, np.ndarray]:
    """Equation 1 as it stands, a sum of products for each s, in float64; and rho_s (r_s + gamma v_{s+1} - V(x_s))."""
    log_ratio, reward, value, successor, terminated, truncated = (np.asarray(x, np.float64) for x in data)
    ratio, steps = np.exp(log_ratio), len(reward)
    ended = (terminated + truncated) > 0
    bootstrap = np.where(terminated > 0, 0.0, successor)
    target = value.copy()
    for s in range(steps):
        for t in range(s, steps):
            product = np.prod([lam * min(c, ratio[i]) for i in range(s, t)])
            delta = min(rho, ratio[t]) * (reward[t] + gamma * bootstrap[t] - value[t])
            target[s] += gamma ** (t - s) * product * delta
            if ended[t]:
                break
    following = np.where(ended, bootstrap, np.append(target[1:], bootstrap[-1]))
    return target, np.minimum(pg, ratio) * (reward + gamma * following - value)


def vtrace(data: tuple[Any, ...], **numbers: Any) -> returns.VTrace:
    return _compiled(**numbers)(*map(jnp.asarray, data))


@cache
def _compiled(**numbers: Any) -> Any:
    """Compiling takes far longer than what is compiled."""
    return quick(functools.partial(returns.vtrace, **numbers))


CASES = [
    (0.99, 1.0, 1.0, 1.0, 1.0),
    (0.9, 0.7, 1.0, 1.0, 1.0),
    (1.0, 1.0, 2.0, 1.5, 0.5),
    (0.95, 0.9, 0.5, 2.0, 3.0),
    (0.9, 0.0, 1.0, 1.0, 1.0),
    (0.9, 1.0, 0.0, 1.0, 1.0),
    (0.9, 1.0, 1.0, 0.0, 0.0),
    (0.8, 0.9, INF, INF, INF),
]
"""gamma, lambda, and the clips of rho, c and the policy's rho."""


@pytest.mark.parametrize("numbers", CASES)
def test_it_is_the_papers_sum(numbers: tuple[float, ...]) -> None:
    gamma, lam, rho, c, pg = numbers
    for seed in range(3):
        data = stream(seed)
        found = vtrace(data, gamma=gamma, lam=lam, rho_clip=rho, c_clip=c, pg_rho_clip=pg)
        target, advantage = oracle(data, *numbers)
        np.testing.assert_allclose(found.target, target, rtol=3e-5, atol=3e-5)
        np.testing.assert_allclose(found.advantage, advantage, rtol=3e-5, atol=1e-4)


def test_fixed_numbers() -> None:
    """Five steps worked out by hand; the third ends the first episode, and the last is cut by the stream's end.

    Ratios 2, 1/2, 1, 4, 1/4; gamma 1/2; rewards 1 to 5; all values 1, those after the third and last step 8 and 2.
    """
    no = np.zeros(5, bool)
    ended = np.array([False, False, True, False, False])
    data = (
        np.log([2.0, 0.5, 1.0, 4.0, 0.25]), np.arange(1.0, 6.0), np.ones(5), np.array([1.0, 1.0, 8.0, 1.0, 2.0]),
    )  # fmt: skip
    data = tuple(x.astype(np.float32) for x in data)
    # Temporal differences r + V'/2 - V, times the clipped ratios: 0.5, 0.75, 2 (terminated) or 6, 3.5, 1.25.
    found = vtrace((*data, ended, no), gamma=0.5)
    # backwards: 1.25; 3.5 + 1.25/2; 2; 0.75 + 2/4; 0.5 + 1.25/2
    np.testing.assert_allclose(found.target - 1.0, [1.125, 1.25, 2.0, 4.125, 1.25], rtol=1e-6)
    # clipped ratio x (r + v'/2 - 1), v' being 2.25, 3, nothing, 2.25 and the value 2
    np.testing.assert_allclose(found.advantage, [1.125, 0.5 * 2.5, 2.0, 4.125, 0.25 * 5.0], rtol=1e-6)
    found = vtrace((*data, no, ended), gamma=0.5)
    np.testing.assert_allclose(found.target - 1.0, [1.625, 2.25, 6.0, 4.125, 1.25], rtol=1e-6)
    np.testing.assert_allclose(found.advantage, [1.625, 0.5 * 4.5, 6.0, 4.125, 0.25 * 5.0], rtol=1e-6)
    found = vtrace((*data, no, ended), gamma=0.5, lam=0.5, rho_clip=2.0, c_clip=3.0, pg_rho_clip=1.0)
    # differences 1, 0.75, 6, 7, 1.25, of which a quarter x the clipped ratio 2, 1/2, (cut), 3 comes a step forward
    np.testing.assert_allclose(found.target - 1.0, [1.75, 1.5, 6.0, 7.9375, 1.25], rtol=1e-6)
    np.testing.assert_allclose(found.advantage, [1.25, 0.5 * 4.5, 6.0, 4.125, 0.25 * 5.0], rtol=1e-6)


def test_on_policy_without_lambda_it_is_the_return_of_n_steps() -> None:
    """Rewards to the end of the episode or of the stream, and the value of what came then (the paper's section 4.1)."""
    _, *rest = stream(5)
    reward, _, successor, terminated, truncated = rest
    found = vtrace((np.zeros(40, np.float32), *rest), gamma=0.9)
    for s in range(40):
        total = 0.0
        for t in range(s, 40):
            total += 0.9 ** (t - s) * reward[t]
            if terminated[t] or truncated[t] or t == 39:
                total += 0.9 ** (t - s + 1) * (0.0 if terminated[t] else successor[t])
                break
        assert found.target[s] == pytest.approx(total, abs=2e-5)
    np.testing.assert_allclose(found.advantage, found.target - rest[1], atol=2e-5)


@pytest.mark.parametrize("lam", [0.0, 0.6, 0.95, 1.0])
def test_on_policy_its_targets_are_those_of_gae(lam: float) -> None:
    """v - V is GAE(lambda); the policy's advantage is one difference and then GAE, not GAE itself."""
    _, *rest = stream(6)
    reward, value, successor, terminated, truncated = rest
    found = vtrace((np.zeros(40, np.float32), *rest), gamma=0.9, lam=lam)
    advantage = np.asarray(returns.gae(*map(jnp.asarray, rest), gamma=0.9, lam=lam))
    np.testing.assert_allclose(found.target - value, advantage, atol=1e-5)
    difference = reward + np.where(terminated, 0.0, 0.9 * successor) - value
    ahead = np.where(terminated | truncated, 0.0, np.append(advantage[1:], 0.0))
    np.testing.assert_allclose(found.advantage, difference + 0.9 * ahead, atol=1e-5)
    apart = np.abs(np.asarray(found.advantage) - advantage).max()
    assert (apart < 1e-5) if lam == 1.0 else (apart > 0.1)


def test_concatenated_episodes_are_as_if_apart() -> None:
    """Whatever stands on the other side of an end, of either kind."""
    for kind in ("terminated", "truncated"):
        one, two = stream(1, 7), stream(2, 9)
        end = {"terminated": 4, "truncated": 5}[kind]
        one[9 - end][-1], one[end][-1] = False, True
        joined = tuple(np.concatenate(pair) for pair in zip(one, two, strict=True))
        whole = vtrace(joined, gamma=0.95, lam=0.9, c_clip=2.0, rho_clip=3.0)
        for part, where in ((one, slice(0, 7)), (two, slice(7, 16))):
            alone = vtrace(part, gamma=0.95, lam=0.9, c_clip=2.0, rho_clip=3.0)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a[where], b, rtol=1e-5, atol=1e-6), whole, alone)  # noqa: B023


def test_truncation_counts_its_own_successor_and_nothing_behind_it() -> None:
    data = [x.copy() for x in stream(3, 10)]
    data[4][:], data[5][:] = False, False
    data[5][4] = True
    data[3][4] = 7.0
    found = vtrace(tuple(data), gamma=0.9)
    behind = [x.copy() for x in data]
    for column in behind[:4]:
        column[5:] += 3.0
    np.testing.assert_array_equal(vtrace(tuple(behind), gamma=0.9).target[:5], found.target[:5])
    ratio = min(1.0, math.exp(data[0][4]))
    assert found.advantage[4] == pytest.approx(ratio * (data[1][4] + 0.9 * 7.0 - data[2][4]), rel=1e-5)
    data[4][4], data[5][4] = True, False
    ended = vtrace(tuple(data), gamma=0.9)
    assert ended.advantage[4] == pytest.approx(ratio * (data[1][4] - data[2][4]), rel=1e-5)


def test_clips_of_zero_and_of_infinity() -> None:
    data = stream(4)
    log_ratio, reward, value, successor, terminated, _ = data
    nothing = vtrace(data, gamma=0.9, rho_clip=0.0)
    np.testing.assert_array_equal(nothing.target, value)
    np.testing.assert_array_equal(nothing.advantage, np.zeros(40))
    one_step = vtrace(data, gamma=0.9, c_clip=0.0, rho_clip=INF)
    difference = reward + np.where(terminated, 0.0, 0.9 * successor) - value
    np.testing.assert_allclose(one_step.target - value, np.exp(log_ratio) * difference, rtol=1e-5, atol=1e-5)
    wild = vtrace((log_ratio + 200.0, *data[1:]), gamma=0.9)  # ratios beyond float32
    assert np.all(np.isfinite(wild.target))
    assert np.all(np.isfinite(wild.advantage))


def test_without_clips_it_is_importance_sampling() -> None:
    """Over all sequences of three actions of another policy the mean of v_0 is the value of this one, exactly."""
    rng = np.random.default_rng(0)
    pi, mu = np.array([0.9, 0.1]), np.array([0.3, 0.7])
    reward, value, gamma = rng.normal(size=(3, 2)), rng.normal(size=3), 0.8
    mean = 0.0
    for actions in itertools.product((0, 1), repeat=3):
        taken = np.array(actions)
        data = np.log(pi / mu)[taken], reward[np.arange(3), taken], value, np.append(value[1:], 99.0)
        end = np.array([False, False, True])
        found = vtrace(
            (*(x.astype(np.float32) for x in data), end, ~end & False), gamma=gamma, rho_clip=INF, c_clip=INF
        )
        mean += np.prod(mu[taken]) * float(found.target[0])
    assert mean == pytest.approx(sum(gamma**t * pi @ reward[t] for t in range(3)), abs=1e-5)


@pytest.mark.parametrize("clip", [0.5, 1.0, 1.5, 10.0])
def test_its_fixed_point_is_the_value_of_the_clipped_policy(clip: float) -> None:
    """Value of pi_rho, min(rho mu, pi) normalised (equation 3): between the actor's policy and the learner's."""
    pi, mu, reward = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5]), np.array([1.0, -2.0, 5.0])
    clipped = np.minimum(clip * mu, pi)
    value = np.full(3, clipped @ reward / clipped.sum())
    ends = np.ones(3, bool)
    columns = [np.asarray(x, np.float32)[:, None] for x in (np.log(pi / mu), reward, value, value)]
    found = jax.vmap(lambda *one: returns.vtrace(*one, gamma=0.9, rho_clip=clip))(
        *map(jnp.asarray, columns), jnp.asarray(ends)[:, None], jnp.asarray(~ends)[:, None]
    )
    assert mu @ np.asarray(found.target)[:, 0] == pytest.approx(value[0], abs=1e-5)
    if clip == 10.0:
        assert value[0] == pytest.approx(pi @ reward)


def test_it_is_a_constant_to_gradients_and_batches_by_vmap() -> None:
    data = tuple(jnp.asarray(x) for x in stream(7))

    def total(log_ratio: jax.Array, value: jax.Array, successor: jax.Array) -> jax.Array:
        found = returns.vtrace(log_ratio, data[1], value, successor, *data[4:], gamma=0.9)
        return jnp.sum(found.target) + jnp.sum(found.advantage)

    for slope in jax.grad(total, argnums=(0, 1, 2))(data[0], data[2], data[3]):
        np.testing.assert_array_equal(slope, jnp.zeros(40))
    columns = [stream(seed) for seed in range(3)]
    stacked = [jnp.stack(leaf, axis=1) for leaf in zip(*columns, strict=True)]
    batched = jax.vmap(lambda *a: returns.vtrace(*a, gamma=0.97, lam=0.9), in_axes=1, out_axes=1)(*stacked)
    for i, column in enumerate(columns):
        np.testing.assert_allclose(
            batched.target[:, i], oracle(column, 0.97, 0.9, 1.0, 1.0, 1.0)[0], rtol=3e-5, atol=3e-5
        )


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"rho_clip": -1.0}, "rho_clip is -1.0; it must be at least 0"),
        ({"c_clip": float("nan")}, "c_clip is nan"),
        ({"pg_rho_clip": -0.1}, "pg_rho_clip is -0.1"),
        ({"gamma": 1.1}, "gamma is 1.1; it must lie in 0 to 1"),
        ({"lam": -0.1}, "lam is -0.1"),
    ],
)
def test_impossible_numbers_are_named(numbers: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        vtrace(stream(), **({"gamma": 0.9} | numbers))
