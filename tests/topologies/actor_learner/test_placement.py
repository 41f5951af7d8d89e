"""Placement of actors: on devices that the learner leaves free, else on its own; no number depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from longhaul.config.run import Named
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError
from longhaul.topologies.actor_learner import placement
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.topologies.staleness import Rule, Ticket
from tests.helpers.small_runs import begin, result, small
from tests.topologies.actor_learner.test_learner import UPDATES, assert_same, by_fused, parts, run


def numbers(devices: list[jax.Device]) -> list[int]:
    return [jax.devices().index(device) for device in devices]


@pytest.mark.parametrize(
    ("data", "actors", "asked", "expected"),
    [
        (1, 4, (), [1, 2, 3, 1]),  # of four devices the learner has the first
        (3, 3, (), [3, 3, 3]),
        (4, 8, (), [0, 0, 1, 1, 2, 2, 3, 3]),  # none is free: where a rollout is learnt from
        (4, 3, (2,), [2, 2, 2]),
        (1, 3, (0, 3), [0, 3, 0]),
    ],
)
def test_actors_are_where_the_learner_is_not(
    data: int, actors: int, asked: tuple[int, ...], expected: list[int]
) -> None:
    assert numbers(placement.devices(meshes.make_mesh(data), actors, asked)) == expected


def test_an_actor_is_on_the_first_device_of_the_shard_that_learns_from_it() -> None:
    assert numbers(placement.devices(meshes.make_mesh(2, 2), 4)) == [0, 1, 2, 3]
    assert numbers(placement.devices(meshes.make_mesh(2, 2), 2)) == [0, 2]


def test_a_device_that_is_not_there_is_named() -> None:
    words = r"--actor-devices is 1 7, and this process has 4 device\(s\): there is no device 7; give 0 to 3"
    with pytest.raises(RunError, match=words):
        placement.devices(meshes.make_mesh(1), 2, (1, 7))


def test_the_line_names_each_device_once() -> None:
    one, other = jax.devices()[1:3]
    assert placement.describe([one, other, one]) == "actors act on cpu:1 (0, 2), cpu:2 (1)"


@pytest.mark.parametrize("asked", [pytest.param((), marks=pytest.mark.slow), (3, 1)])
def test_rollouts_are_computed_there_and_are_the_same_bit_for_bit(asked: tuple[int, ...]) -> None:
    made = parts(2, 2)
    placed = placement.devices(made[1], 2, asked)
    seen: dict[int, set[jax.Device]] = {0: set(), 1: set()}

    def make(actor: int) -> Any:
        def collect(weights: Any, state: Any, key: Any, ticket: Ticket, version: int) -> Any:
            after, *told = made[2].collect(weights, state, key, ticket, version)
            seen[actor] |= {device for leaf in after for device in leaf.devices()}
            return after, *told

        return placement.on(placed[actor], collect)

    state, _, _ = run(made, Rule(2, 0, until=UPDATES), make)
    assert seen == {actor: {device} for actor, device in enumerate(placed)}
    assert len({*placed}) == 2
    assert_same(state, by_fused(2)[0])


def assert_ends_alike(folder: Path, topology: str, *acting: ActorConfig) -> None:
    """The runs end with the same parameters."""
    ended = []
    for i, each in enumerate(acting):
        begin(small(topology=topology, acting=each, total_steps=8 * 16 * 6), folder / str(i))
        ended.append(result(folder / str(i))["params_sha256"])
    assert len({*ended}) == 1


@pytest.mark.slow
def test_a_run_says_where_its_actors_are_and_ends_as_on_other_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_ends_alike(tmp_path, "actors", *(ActorConfig(2, "thread", actor_devices=asked) for asked in [(0,), (2, 3)]))
    said = capsys.readouterr().err
    assert "actors act on cpu:0 (0, 1)" in said
    assert "actors act on cpu:2 (0), cpu:3 (1)" in said


@pytest.mark.slow
def test_a_policy_of_central_inference_acts_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_ends_alike(tmp_path, "central", *(ActorConfig(2, actor_devices=asked) for asked in [(0,), (2,)]))
    said = capsys.readouterr().err
    assert "the policy acts on cpu:0" in said
    assert "the policy acts on cpu:2" in said


def test_central_inference_has_one_device() -> None:
    with pytest.raises(RunError, match="--actor-devices is 0 1; central inference acts on one"):
        small(topology="central", environment=Named("cartpole"), acting=ActorConfig(2, actor_devices=(0, 1)))


def test_devices_of_actors_are_shown_beside_those_of_the_mesh() -> None:
    made = small(topology="actors", acting=ActorConfig(4, "thread", actor_devices=(1, 2)), devices=2)
    assert (made.all_devices, made.shown_devices) == (2, 3)
    assert small(topology="actors", acting=ActorConfig(2)).shown_devices == 1
