"""Dynamic sampling, where groups that teach nothing are replaced, a bounded number of times; settings of sampling."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.config.recipes import reasoning_smollm
from longhaul.reasoning.sampler import DEMONSTRATED, SAMPLED, Completions
from longhaul.topologies.staleness import Ticket
from longhaul.training.reasoning_setup import resampling, sampling

RUN = np.asarray(jax.random.key_data(jax.random.key(0)))


def rewarded(*rewards: str, lesson: int = SAMPLED, problem: int = 0) -> Completions:
    """Groups of two completions, by their rewards; `problem` tells which rollout they are of."""
    reward = np.array([float(digit) for group in rewards for digit in group], np.float32)
    rows, flags = len(reward), np.ones((len(reward), 1), bool)
    numbers, nothing = np.zeros((rows, 1), np.int32), np.zeros((rows, 1), np.float32)
    return Completions(
        numbers, numbers, flags, flags, nothing, nothing, reward, reward, np.full(rows, lesson, np.int32),
        np.zeros(rows, np.int32), np.full(rows, problem, np.int32), np.zeros(rows, bool),
    )  # fmt: skip


def run(rollouts: list[Completions], times: int) -> tuple[Completions, list[bytes]]:
    """(completions of a rollout, keys of all that were made)."""
    keys, left = [], list(rollouts)

    def collect(weights: Any, state: Any, key: np.ndarray, ticket: Ticket, version: int) -> Any:
        keys.append(key.tobytes())
        data = left.pop(0)
        return [], jax.tree.leaves(data), [np.float32(data.reward.sum())]

    made = resampling(collect, rollouts[0], 2, times)
    _, leaves, scores = made([], [], RUN, Ticket(0, 0, 0, 0), 0)
    assert scores == [rollouts[0].reward.sum()]  # of the problems as they were drawn
    assert len(set(keys)) == len(keys) == len(rollouts) - len(left)
    return jax.tree.unflatten(jax.tree.structure(rollouts[0]), leaves), keys


def test_dull_groups_are_replaced_in_order_until_none_is_left() -> None:
    rollouts = [
        rewarded("11", "01", "00", "00"),
        rewarded("00", "10", "11", "00", problem=1),
        rewarded("01", "00", "10", "01", problem=2),
        rewarded("01", problem=3),
    ]
    found, _ = run(rollouts, 5)
    assert np.asarray(found.reward).reshape(-1, 2).tolist() == [[1, 0], [0, 1], [0, 1], [1, 0]]
    assert np.asarray(found.problem)[::2].tolist() == [1, 0, 2, 2]
    once, _ = run(rollouts, 1)
    assert np.asarray(once.problem)[::2].tolist() == [1, 0, 0, 0]


def test_imitated_completions_are_not_sampled_again() -> None:
    found, keys = run([rewarded("11", "00", lesson=DEMONSTRATED)], 3)
    assert len(keys) == 1
    assert jnp.all(found.problem == 0)


def test_an_evaluation_writes_no_more_completions_at_a_time_than_an_update_has() -> None:
    """Its cache has as many rows, and so no more memory than is announced."""
    run = dataclasses.replace(reasoning_smollm(), num_envs=2)
    assert sampling(run).wave == sampling(run, 8).wave == 2 * 16
    assert sampling(dataclasses.replace(run, num_envs=64)).wave == 128
