"""Rollouts from environments on the host: every number of worlds that are known is in its place, and state travels."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import returns
from longhaul.config.run import Named
from longhaul.envs.registry import spec_stub
from longhaul.runtime.errors import RunError
from longhaul.telemetry.aggregate import Sums
from longhaul.topologies.actor_learner import host_rollout
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.topologies.actor_learner.host_rollout import Carry, Sizes
from longhaul.topologies.actor_learner.learner import CompiledActor as Does
from longhaul.topologies.actor_learner.learner import tree
from longhaul.topologies.staleness import Ticket
from longhaul.types import Rollout
from tests.helpers.counting import counting
from tests.helpers.host_environments import length
from tests.helpers.small_runs import after, begin, make_quick, result, resume, small

COUNT, CARTPOLE = "vector/tests.helpers.host_environments:Count", "numpy/longhaul.envs.host.numpy_cartpole:cartpole"
KEY = np.array([3, 4], np.uint32)


def acting(name: str, sizes: Sizes) -> tuple[Does, Carry]:
    """(what an actor does, the state that it begins with)."""
    algorithm = counting()
    policy = jax.ShapeDtypeStruct((), jnp.float32)
    does = host_rollout.acting(name, algorithm, policy, sizes)
    begun = host_rollout.entering(name, algorithm, sizes, 1)(jax.random.key(5), ())
    return does, jax.tree.map(lambda x: x[0], begun)


def turn(does: Does, carry: Any, number: int) -> tuple[Any, Rollout, dict[str, float]]:
    """(what is handed on, copies of the rollout, its scores)."""
    ticket = Ticket(number, 0, -1, number)
    after_, data, scores = does.collect([np.float32(0.5)], carry, KEY, ticket, number)
    assert [(x.shape, str(np.asarray(x).dtype)) for x in data] == [tuple(leaf) for leaf in does.shapes.data]
    return after_, jax.tree.map(np.array, tree(does.data, data)), tree(does.scores, scores)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_every_number_of_known_worlds_is_in_its_place(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three worlds, two rollouts of 13 steps: who is where, what it earned, how it ended, what was remembered."""
    describe = host_rollout.registry.describe
    monkeypatch.setattr(host_rollout.registry, "describe", lambda name: describe(name, mode=mode))
    spec_stub.cache_clear()
    does, begun = acting(COUNT, Sizes(3, 13))
    carry: Any = jax.tree.leaves(begun)
    ended, earned = 0, 0.0
    for number in range(2):
        carry, data, scores = turn(does, carry, number)
        for world in range(3):
            cuts = 0
            for t in range(13):
                _, episode, step = data.observation["where"][t, world].astype(int)
                if not data.valid[t, world]:
                    assert mode == "NextStep"
                    assert not data.terminated[t, world] | data.truncated[t, world]
                    assert data.reward[t, world] == 0.0
                    continue
                assert data.reward[t, world] == step + 1
                over = step + 1 == length(world, episode)
                cut = over and length(world, episode) == 5
                assert (data.terminated[t, world], data.truncated[t, world]) == (over and not cut, cut)
                assert data.extras["remembered"][t, world] == step, "memory is put back where an episode begins"
                if cut:
                    led_to = data.successors.truncated["where"][cuts, world]
                    assert led_to.tolist() == [world, episode, 5]
                    cuts += 1
                if over:
                    ended, earned = ended + 1, earned + (step + 1) * (step + 2) / 2
        last = returns.successor_values(
            *(jnp.asarray(x) for x in (data.observation["where"][..., 2], data.successors.last["where"][:, 2],
                                       data.successors.truncated["where"][..., 2], data.truncated))
        )  # fmt: skip
        goes_on = data.valid & ~data.terminated
        assert np.all(np.asarray(last)[goes_on] == data.observation["where"][..., 2][goes_on] + 1)
        ended, earned = ended - int(scores["episodes"]), earned - float(scores["episode/return"])
    assert (ended, earned) == (0, 0.0)
    spec_stub.cache_clear()


def test_another_actor_goes_on_exactly_where_the_state_can_be_told() -> None:
    """Its second rollout is that of the actor that did the first, bit for bit; so is one that is done twice."""
    does, begun = acting(CARTPOLE, Sizes(4, 20))
    assert [str(np.asarray(x).dtype) for x in jax.tree.leaves(begun)] == [leaf.dtype for leaf in does.shapes.carry]
    assert "float64" in [leaf.dtype for leaf in does.shapes.carry], "nothing is cut on its way"
    first, _, _ = turn(does, jax.tree.leaves(begun), 0)
    first = [np.array(x) for x in first]
    other, _ = acting(CARTPOLE, Sizes(4, 20))
    carry, expected, _ = turn(does, does.collect._after, 1)  # type: ignore[attr-defined]
    for again in (other, does):
        after_, data, scores = turn(again, first, 1)
        assert scores["actors/begun_anew"] == 0
        for one, two in zip(jax.tree.leaves((expected, carry)), jax.tree.leaves((data, after_)), strict=True):
            np.testing.assert_array_equal(one, two)


def test_where_the_state_can_not_be_told_that_it_begins_anew_is_told() -> None:
    does, begun = acting(COUNT, Sizes(3, 4))
    carry, _, scores = turn(does, jax.tree.leaves(begun), 0)
    assert scores["actors/begun_anew"] == 0
    copied = [np.array(x) for x in carry]
    _, data, scores = turn(acting(COUNT, Sizes(3, 4))[0], copied, 1)
    assert scores["actors/begun_anew"] == 3
    assert np.all(data.observation["where"][0, :, 1:] == 0)


def test_a_policy_is_evaluated_on_the_first_episodes_that_end() -> None:
    algorithm = counting()._replace(
        act=lambda policy, memory, seen, key: (jnp.zeros(memory.shape[0], jnp.int32), memory, {})
    )
    scores = host_rollout.play(COUNT, algorithm, jnp.float32(0.5), 3, 0)
    assert scores["length"].value.tolist() == [3.0, 5.0, 2.0]
    assert scores["return"].value.tolist() == [6.0, 15.0, 3.0]
    assert scores["return"].valid.all()


def test_only_actors_step_on_the_host() -> None:
    with pytest.raises(RunError, match="choose --topology actors"):
        small(environment=Named(CARTPOLE))
    with pytest.raises(RunError, match="nowhere"):
        small(environment=Named("numpy/nowhere:cartpole"), topology="actors", acting=ActorConfig(2))
    with pytest.raises(ValueError, match="choose --topology actors"):
        spec_stub(CARTPOLE).reset(jax.random.key(0))


@pytest.mark.slow
def test_a_run_on_the_host_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_quick(monkeypatch)
    acting = ActorConfig(2, "thread")
    made = small(environment=Named(CARTPOLE), topology="actors", acting=acting, total_steps=8 * 16 * 20)
    begin(made, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Sums, "add", after(9, lambda: signal.raise_signal(signal.SIGINT), Sums.add))
        assert begin(made, tmp_path / "cut").code == 75
    assert resume(tmp_path / "cut").code == 0
    assert result(tmp_path / "cut") == result(tmp_path / "whole")
