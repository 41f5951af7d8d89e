"""The sum tree: chances by weight, exact sums after many changes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import sum_tree
from longhaul.sum_tree import FANOUT
from tests.helpers.quick import quick


@pytest.mark.parametrize(
    "n", [FANOUT + 1, *(pytest.param(many, marks=pytest.mark.slow) for many in (1, FANOUT, 5000, 300_000))]
)
def test_weights_are_chances(n: int) -> None:
    """Chi-square of 200,000 draws over at most 100 groups of places, whose weights span three decades."""
    draw = np.random.default_rng(n)
    weights = (10.0 ** draw.uniform(-2, 1, n)).astype(np.float32)
    weights[draw.random(n) < 0.3] = 0.0
    weights[0] = 1.0
    tree = quick(lambda new: sum_tree.change(sum_tree.start(n), [(jnp.int32(0), new)]))(weights)
    count = 200_000
    index, weight = quick(sum_tree.draw, static_argnums=2)(tree, jax.random.key(n), count)
    assert np.all(np.asarray(weight) > 0.0) and np.array_equal(weights[index], weight)
    groups = np.array_split(np.arange(n), min(n, 100))
    wanted = np.array([weights[g].sum(dtype=np.float64) for g in groups])
    counts = np.bincount(np.asarray(index), minlength=n)
    found = np.array([counts[g].sum() for g in groups])
    there = wanted > 0
    wanted = wanted / wanted.sum() * count
    chi = np.sum((found[there] - wanted[there]) ** 2 / wanted[there])
    free = there.sum() - 1
    assert found[~there].sum() == 0 and chi < free + 5.0 * math.sqrt(2.0 * max(free, 1))


@pytest.mark.slow
def test_a_million_operations_on_priorities_leave_exact_sums() -> None:
    """Weights set in places and in rows, a quarter of a million of each: leaves equal NumPy's, sums are theirs."""
    n, rounds, k = 10_000, 50, 5000

    def both(i: jax.Array, tree: sum_tree.Tree) -> sum_tree.Tree:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), i), 4)
        row = jax.random.randint(keys[0], (), 0, n - k), jax.random.uniform(keys[1], (k,))
        # Distinct places: of equal ones any may win.
        where = (jax.random.randint(keys[2], (), 0, n) + 7 * jnp.arange(k)) % n
        tree = sum_tree.change(tree, [row], where, jnp.cos(1.0 * where) + 1.0)
        drawn, _ = sum_tree.draw(tree, keys[3], k)
        return sum_tree.change(tree, (), drawn, jnp.zeros(k))

    tree = jax.jit(lambda: jax.lax.fori_loop(0, rounds, both, sum_tree.start(n)))()
    model = np.zeros(n, np.float32)
    keys = jax.jit(lambda i: jax.random.split(jax.random.fold_in(jax.random.key(0), i), 4))
    draw = quick(sum_tree.draw, static_argnums=2)
    numbers = jax.jit(lambda key, other: (jax.random.randint(key, (), 0, n - k), jax.random.uniform(other, (k,))))
    first = jax.jit(lambda key: jax.random.randint(key, (), 0, n))
    made = jax.jit(lambda new: sum_tree.change(sum_tree.start(n), [(jnp.int32(0), new)]))
    for i in range(rounds):
        a, b, c, d = keys(i)
        at, values = numbers(a, b)
        model[int(at) : int(at) + k] = values
        where = (int(first(c)) + 7 * np.arange(k)) % n
        model[where] = np.asarray(jnp.cos(1.0 * jnp.asarray(where)) + 1.0)
        drawn, weight = draw(made(model), d, k)
        assert np.array_equal(model[np.asarray(drawn)], weight)
        model[np.asarray(drawn)] = 0.0
    np.testing.assert_array_equal(np.asarray(tree.leaves)[:n], model)
    np.testing.assert_allclose(float(jnp.sum(tree.sums[-1])), model.sum(dtype=np.float64), rtol=1e-5)
