"""Oracles: sums written out in NumPy; reductions to n-step returns and to one-step errors; V-trace against the paper's
sums, and what it converges to."""

from __future__ import annotations

import itertools
import math
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import returns
from tests.helpers.quick import quick

INF = math.inf


def stream(seed=0, steps=40):
    rng = np.random.default_rng(seed)
    reward, value, successor = rng.normal(size=(3, steps)).astype(np.float32)
    terminated = rng.random(steps) < 0.1
    truncated = (rng.random(steps) < 0.1) & ~terminated
    return reward, value, successor, terminated, truncated


def oracle(reward, value, successor, terminated, truncated, gamma, lam):
    """Equation 16 as a double sum: A_t = sum_l (gamma lam)^l delta_{t+l}, up to the episode's end."""
    out = np.zeros(len(reward))
    for t in range(len(reward)):
        weight = 1.0
        for i in range(t, len(reward)):
            bootstrap = 0.0 if terminated[i] else gamma * successor[i]
            out[t] += weight * (reward[i] + bootstrap - value[i])
            weight *= gamma * lam
            if terminated[i] or truncated[i]:
                break
    return out


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (0.9, 0.0), (1.0, 1.0)])
def test_gae_is_the_double_sum(gamma, lam):
    data = stream()
    ours = quick(partial(returns.gae, gamma=gamma, lam=lam))(*map(jnp.asarray, data))
    np.testing.assert_allclose(ours, oracle(*data, gamma, lam), rtol=2e-5, atol=2e-5)


def test_truncation_bootstraps_and_termination_does_not():
    one = jnp.ones(1)
    no, yes = jnp.zeros(1, bool), jnp.ones(1, bool)
    gae = quick(partial(returns.gae, gamma=0.9, lam=0.95))
    cut = gae(one, 0 * one, 10 * one, no, yes)
    end = gae(one, 0 * one, 10 * one, yes, no)
    assert cut[0] == pytest.approx(10.0) and end[0] == pytest.approx(1.0)


def test_successors_are_found_where_the_type_says():
    """The example of `types.Successors`, with values for observations, beside a column that is never truncated."""
    value = jnp.array([[0.0, 5.0], [1.0, 6.0], [20.0, 7.0], [21.0, 8.0]])
    truncated = jnp.array([[False, False], [True, False], [False, False], [False, False]])
    found = quick(returns.successor_values)(
        value, jnp.array([22.0, 9.0]), jnp.array([[2.0, -1.0], [-1.0, -1.0]]), truncated
    )
    np.testing.assert_array_equal(found, [[1, 6], [2, 7], [21, 8], [22, 9]])


def test_gae_batches_by_vmap():
    columns = [stream(seed) for seed in range(3)]
    stacked = [np.stack(leaf, axis=1) for leaf in zip(*columns, strict=True)]
    batched = quick(jax.vmap(partial(returns.gae, gamma=0.97, lam=0.9), in_axes=1, out_axes=1))(*stacked)
    for i, column in enumerate(columns):
        np.testing.assert_allclose(batched[:, i], oracle(*column, 0.97, 0.9), rtol=2e-5, atol=2e-5)


def mixture(reward, successor, terminated, truncated, gamma, lam):
    """The forward view: of the n-step returns up to an end, (1 - lam) lam^(n-1) each and the rest on the longest."""
    out = np.zeros(len(reward))
    for t in range(len(reward)):
        total, discount, weight = 0.0, 1.0, 1.0
        for i in range(t, len(reward)):
            total += discount * reward[i]
            discount *= gamma
            whole = total + (0.0 if terminated[i] else discount * successor[i])
            last = terminated[i] or truncated[i] or i == len(reward) - 1
            out[t] += weight * (1.0 if last else 1.0 - lam) * whole
            weight *= lam
            if last:
                break
    return out


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.65), (0.9, 0.0), (1.0, 1.0)])
def test_q_lambda_is_the_mixture_of_n_step_returns(gamma, lam):
    reward, _, successor, terminated, truncated = stream(3)
    data = map(jnp.asarray, (reward, successor, terminated, truncated))
    ours = quick(partial(returns.q_lambda, gamma=gamma, lam=lam))(*data)
    np.testing.assert_allclose(
        ours, mixture(reward, successor, terminated, truncated, gamma, lam), rtol=2e-5, atol=2e-5
    )


def test_q_lambda_is_gae_above_the_values_where_these_are_the_successors_before():
    reward, value, successor, terminated, truncated = stream(4)
    value[1:] = np.where((terminated | truncated)[:-1], value[1:], successor[:-1])
    data = [jnp.asarray(x) for x in (reward, value, successor, terminated, truncated)]
    ours = quick(partial(returns.q_lambda, gamma=0.97, lam=0.8))(data[0], *data[2:])
    advantage = quick(partial(returns.gae, gamma=0.97, lam=0.8))(*data)
    np.testing.assert_allclose(ours, value + advantage, rtol=2e-5, atol=2e-5)


# -------------------------------------------------------------------------------------------------------------- V-trace


def acted(seed: int = 0, steps: int = 40) -> tuple[np.ndarray, ...]:
    """(log_ratio, reward, value, successor_value, terminated, truncated); successors are next values but at ends."""
    rng = np.random.default_rng(seed)
    log_ratio, reward, value, other = rng.normal(size=(4, steps)).astype(np.float32)
    terminated = rng.random(steps) < 0.1
    truncated = (rng.random(steps) < 0.1) & ~terminated
    successor = np.where(terminated | truncated, other, np.append(value[1:], other[-1]))
    return log_ratio, reward, value, successor, terminated, truncated


def papers_sum(
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
    """Compiled with a rolled scan: unrolling it changes no number and is most of what compiling takes."""
    scan = jax.lax.scan

    def rolled(*data: Any) -> returns.VTrace:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.lax, "scan", lambda *args, unroll, **options: scan(*args, **options))
            return returns.vtrace(*data, **numbers)

    return quick(rolled)


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
        data = acted(seed)
        found = vtrace(data, gamma=gamma, lam=lam, rho_clip=rho, c_clip=c, pg_rho_clip=pg)
        target, advantage = papers_sum(data, *numbers)
        np.testing.assert_allclose(found.target, target, rtol=3e-5, atol=3e-5)
        np.testing.assert_allclose(found.advantage, advantage, rtol=3e-5, atol=1e-4)


def test_vtrace_gives_numbers_worked_out_by_hand() -> None:
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
    _, *rest = acted(5)
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
    _, *rest = acted(6)
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
        one, two = acted(1, 7), acted(2, 9)
        end = {"terminated": 4, "truncated": 5}[kind]
        one[9 - end][-1], one[end][-1] = False, True
        joined = tuple(np.concatenate(pair) for pair in zip(one, two, strict=True))
        whole = vtrace(joined, gamma=0.95, lam=0.9, c_clip=2.0, rho_clip=3.0)
        for part, where in ((one, slice(0, 7)), (two, slice(7, 16))):
            alone = vtrace(part, gamma=0.95, lam=0.9, c_clip=2.0, rho_clip=3.0)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a[where], b, rtol=1e-5, atol=1e-6), whole, alone)  # noqa: B023


def test_truncation_counts_its_own_successor_and_nothing_behind_it() -> None:
    data = [x.copy() for x in acted(3, 10)]
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
    data = acted(4)
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
    data = tuple(jnp.asarray(x) for x in acted(7))

    def total(log_ratio: jax.Array, value: jax.Array, successor: jax.Array) -> jax.Array:
        found = returns.vtrace(log_ratio, data[1], value, successor, *data[4:], gamma=0.9)
        return jnp.sum(found.target) + jnp.sum(found.advantage)

    for slope in quick(jax.grad(total, argnums=(0, 1, 2)))(data[0], data[2], data[3]):
        np.testing.assert_array_equal(slope, np.zeros(40))
    columns = [acted(seed) for seed in range(3)]
    stacked = [np.stack(leaf, axis=1) for leaf in zip(*columns, strict=True)]
    batched = quick(jax.vmap(lambda *a: returns.vtrace(*a, gamma=0.97, lam=0.9), in_axes=1, out_axes=1))(*stacked)
    for i, column in enumerate(columns):
        np.testing.assert_allclose(
            batched.target[:, i], papers_sum(column, 0.97, 0.9, 1.0, 1.0, 1.0)[0], rtol=3e-5, atol=3e-5
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
        vtrace(acted(), **({"gamma": 0.9} | numbers))
