"""Rollouts on the learner's device: those of an actor in a thread, number by number, and in the tensors' own memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.config.run import Named
from longhaul.envs.host import registry
from longhaul.envs.host.vector import DeviceStep
from longhaul.runtime.errors import FieldError, RunError
from longhaul.spaces import Tree, mapped
from longhaul.topologies.actor_learner import device_rollout, host_rollout
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.topologies.actor_learner.host_rollout import Sizes
from longhaul.topologies.actor_learner.learner import tree
from longhaul.topologies.staleness import Ticket
from tests.helpers.counting import counting
from tests.helpers.small_runs import begin, records, small

TENSORS = "torch/tests.helpers.host_environments:Tensors?action_bound=1.0"
CARTPOLE = "numpy/longhaul.envs.host.numpy_cartpole:cartpole?max_steps=5"
KEY = np.array([3, 4], np.uint32)


class OnDevice:
    """A vector of the host by the protocol of those on a device; `tells`: finals are known. It begins in `state`."""

    def __init__(self, worlds: int, tells: bool, state: Tree = None) -> None:
        self._inner, self._tells, self._state = registry.make(registry.describe(CARTPOLE), worlds), tells, state
        self.spec, self.columns = self._inner.spec, worlds

    def begin_on_device(self, seed: int) -> Tree:
        seen = self._inner.reset(seed)
        if self._state is None:
            return mapped(jnp.array, seen)
        self._inner.restore(self._state)
        return jnp.array(self._state["physics"], jnp.float32)

    def on_device(self, action: Any) -> DeviceStep:
        led_to = self._inner.step(np.asarray(action))
        final = np.array(led_to.observation)
        final[led_to.finals.columns] = led_to.finals.observation
        made = (jnp.array(x) for x in led_to[:4])
        return DeviceStep(*made, jnp.array(final) if self._tells else None)


def described(worlds: int, steps: int) -> Any:
    """(what an actor does, the state that it begins with) with `counting`."""
    sizes, algorithm = Sizes(worlds, steps), counting()
    does = host_rollout.acting(CARTPOLE, algorithm, jax.ShapeDtypeStruct((), jnp.float32), sizes)
    return does, jax.tree.map(
        lambda x: np.array(x[0]), host_rollout.entering(CARTPOLE, algorithm, sizes, 1)(jax.random.key(5), ())
    )


def test_a_rollout_on_the_device_is_that_of_an_actor_number_by_number() -> None:
    """Cut after 5 steps, so that rollouts of 13 hold truncations, whose successors are not the next starts."""
    does, begun = described(6, 13)
    collector = device_rollout.Collector(counting(), does.data, OnDevice(6, True, begun.state), 13, 0, KEY)
    carry: Any = jax.tree.leaves(begun)
    cuts = 0
    for number in range(3):
        carry, data, scores = does.collect([np.float32(0.5)], carry, KEY, Ticket(number, 0, -1, number), number)
        collected = collector.collect(jnp.float32(0.5), number)
        expected = tree(does.data, [np.array(x) for x in data])
        named = jax.tree_util.tree_leaves_with_path(expected)
        for (path, want), have in zip(named, jax.tree.leaves(collected.rollout), strict=True):
            np.testing.assert_array_equal(np.asarray(have)[0], want, err_msg=f"{number} {path}")
        sums = tree(does.scores, scores)
        for name in host_rollout.SCORES[:3]:
            np.testing.assert_allclose(collected.scores[name][0], sums[name], rtol=1e-6)
        cuts += int(expected.truncated.sum())
    assert cuts > 6


def test_without_finals_a_truncated_step_leads_to_what_it_started_from() -> None:
    does, _ = described(4, 6)
    collector = device_rollout.Collector(counting(), does.data, OnDevice(4, False), 6, 0, KEY)
    rollout = collector.collect(jnp.float32(0.5), 0).rollout
    assert rollout.truncated[0, 4].all()
    np.testing.assert_array_equal(rollout.successors.truncated[0, 0], rollout.observation[0, 4])


def test_more_truncations_than_the_limit_promises_are_told() -> None:
    does, _ = described(4, 12)
    collector = device_rollout.Collector(counting(), does.data, OnDevice(4, True), 12, 0, KEY)
    collector._slots = 1
    with pytest.raises(ValueError, match="truncates an episode 2 times in 12 steps; its limit promises 1 at most"):
        collector.collect(jnp.float32(0.5), 0)


@pytest.mark.parametrize(
    ("acting", "env", "words"),
    [
        ({}, "jax/cartpole", "no tensors on it; choose --actor-kind process or thread"),
        ({"staleness": 2}, TENSORS, "the learner acts by itself: leave it out"),
        ({"actors": 3}, TENSORS, "a device has one: choose 1"),
        ({"pin": True}, TENSORS, "the learner acts by itself: leave it out"),
    ],
)
def test_environments_and_settings_that_the_learner_cannot_step_are_refused(acting: Any, env: str, words: str) -> None:
    if env == TENSORS:
        pytest.importorskip("torch")
    with pytest.raises((RunError, FieldError), match=words):
        small(environment=Named(env), topology="actors", acting=ActorConfig(actor_kind="device", **acting))
    with pytest.raises(RunError, match="central inference has actors elsewhere; choose --topology actors"):
        small(topology="central", acting=ActorConfig(actor_kind="device"))


@pytest.mark.parametrize("tell", [True, False])
def test_a_run_on_the_device_learns_what_one_with_an_actor_in_a_thread_does(tell: bool, runs_dir: Path) -> None:
    pytest.importorskip("torch")
    env = Named(f"{TENSORS}&tell={tell}&final_observations={tell}")
    ends = {}
    for kind in ("thread", "device"):
        acting = ActorConfig(1, kind)
        run = small(environment=env, topology="actors", acting=acting, devices=1, num_envs=8, total_steps=8 * 16 * 6)
        folder = runs_dir / kind
        begin(run, folder)
        ends[kind] = [{k: v for k, v in each.items() if "actors/" not in k} for each in records(folder)]
    assert len(ends["device"]) == 2
    for mine, other in zip(ends["device"], ends["thread"], strict=True):  # programs that act round differently
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-6, nan_ok=True)


def test_tensors_and_arrays_share_their_memory() -> None:
    torch = pytest.importorskip("torch")
    vector: Any = registry.make(registry.describe(TENSORS), 64)
    vector.begin_on_device(0)
    given = []
    inner, step = vector._inner, vector._inner.step
    inner.step = lambda action: given.append(action) or step(action)
    action = jnp.full((64, 1), -0.5)
    led_to = vector.on_device(action)
    assert given[0].data_ptr() == action.unsafe_buffer_pointer()
    inner.step = lambda action: (seen, reward, *flags, {})
    seen, reward, flags = torch.ones(64, 2), torch.ones(64), (torch.ones(64, dtype=torch.bool),) * 2
    led_to = vector.on_device(action)
    assert led_to.observation.unsafe_buffer_pointer() == seen.data_ptr()
    assert led_to.reward.unsafe_buffer_pointer() == reward.data_ptr()
    assert led_to.terminated.unsafe_buffer_pointer() == flags[0].data_ptr()
