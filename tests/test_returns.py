"""Oracles: sums written out in NumPy; reductions to n-step returns and to one-step errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import returns
from tests.helpers.quick import quick


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
    stacked = [jnp.stack(leaf, axis=1) for leaf in zip(*columns, strict=True)]
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
