"""Population-based training: parents, exploration, and the learning rate that it finds."""

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms import pbt
from longhaul.algorithms.pbt import Tuned


def test_the_worst_fifth_goes_on_from_the_best_fifth() -> None:
    scores = jnp.array([5.0, jnp.nan, 9.0, 1.0, 4.0, 8.0, 3.0, 2.0, 6.0, 7.0])
    for seed in range(20):
        found = pbt.parents(scores, jax.random.key(seed)).tolist()
        assert [i for i in range(10) if found[i] != i] == [1, 3]
        assert {found[1], found[3]} <= {2, 5}
    assert pbt.parents(jnp.zeros(10), jax.random.key(0)).tolist() == list(range(10))


def test_who_is_copied_keeps_its_values_and_who_copies_moves_them() -> None:
    values = jnp.arange(1.0, 11.0)
    step = pbt.evolve({"lr": (1.0, 10.5)})
    after = step(Tuned({"lr": values}, {"w": values * 10}), values, jax.random.key(1))
    np.testing.assert_array_equal(after.values["lr"][2:], values[2:])
    for i in (0, 1):
        parent = float(after.state["w"][i]) / 10
        assert parent in (9.0, 10.0)
        allowed = [parent * 0.8, min(parent * 1.2, 10.5)]
        assert min(abs(float(after.values["lr"][i]) - value) for value in allowed) < 1e-5
