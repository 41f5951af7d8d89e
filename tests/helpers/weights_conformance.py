"""Conformance of `longhaul.types.Weights`: one check for every implementation."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np
import pytest

from longhaul.types import Params, Weights

PATIENCE = 30.0
"""Seconds within which a published version must arrive."""


def params_of(version: int) -> Params:
    """Parameters that tell their version in every element; two dtypes, a scalar and nested nodes."""
    return {
        "actor": {"kernel": np.full((5, 3), version, np.float32), "bias": np.full(3, version, np.float32)},
        "steps": np.array(version, np.int32),
    }


def arrived(actor: Weights, version: int) -> tuple[int, Params]:
    """Newest weights of `actor`, once they are of `version` or a later one. AssertionError where none come."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            found = actor.latest()
            if found[0] >= version:
                return found
        except LookupError:
            pass
        assert time.monotonic() < until, f"version {version} did not arrive in {PATIENCE:g} s"
        time.sleep(0.002)


def assert_version(found: tuple[int, Params], version: int, expected: Params) -> None:
    """The version and all of its parameters, bit for bit."""
    assert found[0] == version
    assert str(jax.tree.structure(found[1])) == str(jax.tree.structure(expected))
    for ours, theirs in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected), strict=True):
        assert np.asarray(ours).dtype == theirs.dtype and np.array_equal(np.asarray(ours), theirs)


def check_weights(
    learner: Weights, actor: Weights, params: Callable[[int], Params] = params_of, stays: bool = True
) -> None:
    """Duties of every implementation; `learner` and `actor` may be one object, to which nothing was published.

    `params` makes the parameters of a version. `stays`: what `latest` returned does not change later; otherwise its
    memory is reused by the next call.
    """
    with pytest.raises(LookupError):
        actor.latest()
    learner.publish(3, params(3))
    first = arrived(actor, 3)
    assert_version(first, 3, params(3))
    assert_version(actor.latest(), 3, params(3))  # reading takes nothing away

    for version in range(4, 10):  # whichever arrives, it is whole, and versions only grow
        learner.publish(version, params(version))
        found = actor.latest()
        assert 3 <= found[0] <= version
        assert_version(found, found[0], params(found[0]))
    assert_version(arrived(actor, 9), 9, params(9))
    if stays:
        assert_version(first, 3, params(3))
