"""The topology `actors`: with S = 0 it is `fused` bit for bit, with S > 0 its bound holds, and pinned it repeats."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from longhaul import rollout
from longhaul.algorithms import registry
from longhaul.algorithms.config import PPOConfig
from longhaul.config.run import Named
from longhaul.environment import vectorise
from longhaul.envs import probes
from longhaul.networks.config import NetworkConfig
from longhaul.rollout import collector, join
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError
from longhaul.telemetry.aggregate import Sums
from longhaul.topologies import fused
from longhaul.topologies.actor_learner import learner
from longhaul.topologies.actor_learner.actor_pool import ActorPool, Batch
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.topologies.staleness import Rule, Ticket
from longhaul.training import actor_learner
from longhaul.training.checkpoint.resume import restore_policy
from longhaul.types import Algorithm, Progress
from tests.end_to_end.test_algorithm_matrix import APPO, impala
from tests.helpers.checkable_environment import Chaos
from tests.helpers.small_runs import after, begin, make_quick, records, result, resume, small
from tests.topologies.test_fused import simple

UPDATES, WORLDS, STEPS = 12, 12, 5


def of_chaos(algorithm: Algorithm, worlds: int) -> fused.CollectorIn:
    collect = collector(vectorise(Chaos(peaks=("score",)), worlds), algorithm.act, algorithm.memory, steps=STEPS)
    return lambda context: collect


def plain(tree: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(tree)]


@functools.cache
def by_fused(devices: int) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, np.ndarray]]:
    """(state, carry, metrics [UPDATES]) of a run on so many devices."""
    algorithm, mesh = simple(), meshes.make_mesh(devices)
    collector_in = of_chaos(algorithm, WORLDS // devices)
    progress = fused.start(algorithm, fused.entering(collector_in, mesh), (), jax.random.key(0), mesh)
    program = fused.compiled(algorithm, collector_in, progress, (), mesh, block=UPDATES)
    progress, rows = program(progress, (), jnp.int32(UPDATES))
    return plain(progress.state), plain(progress.carry), jax.device_get(rows)


Made = tuple[jax.stages.Compiled, Mesh, learner.CompiledActor, Algorithm, Callable[[], Progress]]


@functools.cache
def parts(devices: int, count: int) -> Made:
    algorithm, mesh = simple(), meshes.make_mesh(devices)
    collector_in = of_chaos(algorithm, WORLDS // count)
    enter = learner.entering(collector_in, count)

    def start() -> Progress:
        return fused.start(algorithm, enter, (), jax.random.key(0), mesh)

    begun = start()
    does = learner.acting(collector_in, jax.eval_shape(algorithm.policy, begun.state))
    return learner.compiled(algorithm, does, join, begun, mesh, actors=count), mesh, does, algorithm, start


def run(
    made: Made, rule: Rule, make: Any = None, enter: Any = None, begun: Progress | None = None
) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, np.ndarray]]:  # fmt: skip
    """(state, carry, metrics of each update) of a run, from `begun` on if that is given."""
    update, mesh, does, algorithm, start = made
    rows, begun = [], begun or start()
    if rule.pinned and not isinstance(begun.carry, learner.PinnedCarry):
        past = tuple(np.zeros(does.shapes.weight_bytes, np.uint8) for _ in range(rule.pinned))
        begun = begun._replace(carry=learner.PinnedCarry(begun.carry, past))
    with closing(ActorPool(rule, does.shapes, make or (lambda actor: does.collect), kind="thread")) as crew:
        weights = learner.weights_of(algorithm, mesh)
        calls = learner.actors(update, mesh, crew, begun, weights, updates=rule.until, enter=enter)
        for progress, n, row in calls:
            assert n == 1
            rows.append(jax.device_get(row))
        carry = plain(progress.carry)
    state = plain(progress.state)
    return state, carry, {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("slow", [False, True])
def test_without_staleness_it_is_fused_bit_for_bit(slow: bool) -> None:
    """State, environments and metrics; also where one actor is always late."""
    made = parts(2, 2)

    def make(actor: int) -> Any:
        def collect(weights: Any, state: Any, key: Any, ticket: Ticket, version: int) -> Any:
            if slow and actor == 0:
                time.sleep(0.01)
            return made[2].collect(weights, state, key, ticket, version)

        return collect

    state, carry, rows = run(made, Rule(2, 0, until=UPDATES), make)
    expected, its_carry, its_rows = by_fused(2)
    assert_same(state, expected)
    assert_same(carry, [x.reshape(2, len(x) // 2, *x.shape[1:]) for x in its_carry])
    for name, values in its_rows.items():
        np.testing.assert_array_equal(rows[name], values, err_msg=name)
    assert np.all(rows["actors/staleness_max"] == 0)
    assert np.unique(rows["toy/step"]).size == UPDATES


@pytest.mark.parametrize("bound", [0, 2])
def test_actors_that_enter_other_states_go_on_as_those_of_a_new_run(bound: int) -> None:
    """A pinned run with its older weights."""
    made, rule = parts(2, 2), Rule(2, bound, bound > 0, UPDATES)
    other = jax.tree.map(lambda x: x[::-1].copy(), made[4]().carry)
    left: list[Progress] = []

    def enter(progress: Progress) -> tuple[Progress, int]:
        if int(progress.updates) == 0:
            return progress, UPDATES // 2
        assert int(progress.updates) == UPDATES // 2
        left.append(jax.tree.map(jnp.array, learner.entered(progress, lambda key, context: begins, ())))
        return left[0], UPDATES

    begins = learner.PinnedCarry(other, ()) if bound else other
    whole = run(made, rule, enter=enter)
    assert_same(whole[0], run(made, rule, begun=left[0])[0])
    assert np.any(whole[0][0] != run(made, rule)[0][0]), "in the states of before it learns something else"


def test_a_run_that_leaves_does_not_wait_for_an_update_that_changes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state before it is intact, so the run saves that one and ends while the update still computes."""
    monkeypatch.setattr(learner, "GRACE", 0.0)
    computes, ends, done = threading.Event(), threading.Event(), threading.Event()

    def update(changing: Any, fixed: Any, key: Any, count: Any, *data: Any) -> Any:
        computes.set()
        ends.wait(60.0)
        done.set()
        return [x + 1.0 for x in changing], count + 1, {"toy/step": np.zeros(1)}, jnp.zeros(1, jnp.uint8)

    pool = SimpleNamespace(rule=Rule(1, 0, until=2), open=lambda *_: None, take=lambda leaving: Batch([], [], []),
                           worked=lambda: (0.0, 0.0), waited=0.0, queue=0, restarts=0, learnt=lambda weights: None,
                           carry=list)  # fmt: skip
    begun = Progress([jnp.float32(1.0), jnp.arange(3.0)], (), jax.random.key(0), jnp.int32(0))
    parts = learner.Parted(jax.tree.structure(begun.state), (False, True))
    try:
        calls = learner.actors(update, meshes.make_mesh(1), pool, begun, lambda state: np.zeros(1, np.uint8),
                               updates=2, leaving=computes.is_set, parts=parts)  # type: ignore[arg-type]  # fmt: skip
        assert list(calls) == []
        assert not done.is_set()
        assert_same(plain(begun.state), [np.float32(1.0), np.arange(3.0, dtype=np.float32)])  # type: ignore[list-item]
    finally:
        ends.set()


@pytest.mark.slow
def test_arrays_that_no_update_changes_are_held_in_common_and_do_not_travel() -> None:
    inner = simple()

    def learn(state: Any, data: Any, key: Any) -> Any:
        after, metrics = inner.learn(state[0], data, key)
        return (after, state[1]), metrics

    algorithm = Algorithm(
        lambda key: (jnp.float32(0.3), jnp.arange(3.0) / 15.0), lambda state: state, inner.memory,
        lambda policy, *rest: inner.act(policy[0] + policy[1].sum(), *rest), learn, lambda tree: (False, True),
    )  # fmt: skip
    mesh, collector_in = meshes.make_mesh(1), of_chaos(algorithm, WORLDS)
    policy = jax.eval_shape(algorithm.init, jax.random.key(0))
    ends, sizes = [], []
    for shared in (False, True):
        begun = fused.start(algorithm, learner.entering(collector_in, 1), (), jax.random.key(0), mesh)
        parts = learner.parted(policy, algorithm, shared=shared)
        fixed = begun.state[1]
        does = learner.acting(collector_in, policy, held=(parts, [fixed]) if shared else None)
        update = learner.compiled(algorithm, does, join, begun, mesh, actors=1)
        make = dict.fromkeys(range(1), does.collect).__getitem__
        with closing(ActorPool(Rule(1, 0, until=3), does.shapes, make, kind="thread")) as crew:
            publish = learner.weights_of(algorithm, mesh, shared=shared)
            for progress, _, _ in learner.actors(update, mesh, crew, begun, publish, updates=3, parts=parts):
                end = plain(progress.state)
        assert (progress.state[1] is fixed) == shared
        ends.append(end)
        sizes.append(does.shapes.weight_bytes)
    assert_same(*ends)
    assert sizes == [16, 4]


@pytest.mark.slow
def test_a_learner_of_fewer_devices_learns_the_same_from_the_same_actors() -> None:
    """Two actors' rollouts are joined on one device: what they lived is that of two devices while nothing differs yet.

    The noise that the learner draws is a shard's, so states drift apart; the first rollouts are the same.
    """
    _, _, rows = run(parts(1, 2), Rule(2, 0, until=UPDATES))
    _, _, its_rows = by_fused(2)
    for name in ("episodes", "episode/return", "episode/length", "peak/score"):
        np.testing.assert_allclose(rows[name][0], its_rows[name][0], rtol=1e-6)


@pytest.mark.parametrize("bound", [1, 2])
def test_the_bound_is_kept_and_reached_and_a_pinned_run_repeats(bound: int) -> None:
    made = parts(2, 2)
    free = run(made, Rule(2, bound, until=UPDATES))[2]
    assert free["actors/staleness_max"].max() <= bound
    rule = Rule(2, bound, pin=True, until=UPDATES)
    one, other = run(made, rule), run(made, rule)
    assert_same(one[0], other[0])
    assert_same(one[1], other[1])
    np.testing.assert_array_equal(one[2]["actors/staleness_max"], np.minimum(np.arange(UPDATES), bound))
    assert np.any(one[0][0] != by_fused(2)[0][0]), "older weights act differently"


@pytest.mark.slow  # what is learnt of them is compared bit for bit above
def test_joined_rollouts_are_those_of_one_wide_collector() -> None:
    """Every leaf goes to its place: columns side by side, the oldest version."""
    algorithm = simple()
    policy = jnp.float32(0.5)
    wide = of_chaos(algorithm, 6)(())
    carry = wide.start(jax.random.key(1))
    data = jax.jit(wide.collect)(policy, carry, jax.random.key(2), jnp.int32(3))[1]

    def columns(low: int, high: int, version: int) -> rollout.Rollout:
        cut = jax.tree.map(lambda x: x[:, low:high], data._replace(successors=(), memory=(), version=()))
        last = jax.tree.map(lambda x: x[low:high], data.successors.last)
        truncated = jax.tree.map(lambda x: x[:, low:high], data.successors.truncated)
        return cut._replace(
            successors=data.successors._replace(last=last, truncated=truncated), memory=data.memory,
            version=jnp.int32(version),
        )  # fmt: skip

    assert_same(plain(join([columns(0, 2, 5), columns(2, 6, 3)])), plain(data))


# -------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `make_quick`; the learner, too, is compiled once."""
    make_quick(monkeypatch)
    made: list[actor_learner.CompiledActorLearner] = []
    prepare = actor_learner.prepare

    def once(*args: Any) -> actor_learner.CompiledActorLearner:
        made.extend([] if made else [prepare(*args)])
        return made[0]

    monkeypatch.setattr(actor_learner, "prepare", once)


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
def test_a_pinned_run_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two versions behind the newest in its checkpoints, and a record of every update."""
    acting = ActorConfig(2, "thread", 2, pin=True)
    made = small(topology="actors", acting=acting, total_steps=8 * 16 * 20, log_interval=1)
    begin(made, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Sums, "add", after(9, lambda: signal.raise_signal(signal.SIGINT), Sums.add))
        assert begin(made, tmp_path / "cut").code == 75
    assert not (tmp_path / "cut" / "live.json").exists()
    assert resume(tmp_path / "cut").code == 0
    assert result(tmp_path / "cut") == result(tmp_path / "whole")
    names = ("actors/actor_wait", "actors/learner_wait", "actors/queue")
    told = [
        [{k: v for k, v in record.items() if k not in names} for record in records(tmp_path / name)]
        for name in ("cut", "whole")
    ]
    assert told[0] == told[1]
    assert [record["actors/staleness_max"] for record in told[0]] == [0.0, 1.0] + [2.0] * 18


@pytest.mark.slow
def test_processes_end_as_fused_does_also_when_an_actor_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The parameters after 100 updates of PPO, bit for bit; the actor in the middle of them."""
    sizes: dict[str, Any] = {"devices": 2, "total_steps": 8 * 16 * 100, "threads": 4}
    begin(small(**sizes), tmp_path / "fused")

    def kill() -> None:
        told = json.loads((tmp_path / "acted" / "live.json").read_text())
        os.kill(told["actors"][1]["process"], signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(Sums, "add", after(40, kill, Sums.add))
        begin(small(topology="actors", acting=ActorConfig(2, "process"), **sizes), tmp_path / "acted")
    assert "actor 1: it was ended by SIGKILL" in capfd.readouterr().err
    one, other = result(tmp_path / "fused"), result(tmp_path / "acted")
    assert one["params_sha256"] == other["params_sha256"]
    kept = [[r["ppo/total_loss"] for r in records(tmp_path / name)] for name in ("fused", "acted")]
    assert kept[0] == kept[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "algorithm", "bound"),
    [
        *((name, "ppo", 1) for name in ("two_step", "time_limit", "successor", "agents", "masked")),
        ("time_limit", "impala", 2),
        ("masked", "appo", None),
    ],
)
def test_actors_find_the_values_of_the_probes(name: str, algorithm: str, bound: int | None, tmp_path: Path) -> None:
    """In threads, behind, values within 0.1 of the oracle: bootstraps, masks and columns are right."""
    probe = probes.PROBES[name]()
    config: Any = impala(**(APPO if algorithm == "appo" else {}))(probe)
    if algorithm == "ppo":
        config = PPOConfig(
            lr=3e-3, gamma=probe.gamma, gae_lambda=probe.gae_lambda, ent_coef=0.0, clip_value=False, num_minibatches=2,
            network=NetworkConfig(hidden_dim=32),
        )  # fmt: skip
    made = small(
        environment=Named(f"probe/{name}"), algorithm=config, topology="actors", acting=ActorConfig(2, "thread", bound),
        num_envs=16, num_steps=32, total_steps=16 * 32 * 300 * (probe.environment.spec.agents or 1), save_interval=None,
    )  # fmt: skip
    begin(made, tmp_path / "run")
    _, policy, _ = restore_policy(tmp_path / "run")
    value = registry.critic(probe.environment.spec, made.algorithm)
    for seen, worth in probe.value:
        observation = jax.tree.map(lambda x: jnp.asarray(x)[None], seen)
        assert float(value(policy, (), observation)[0]) == pytest.approx(worth, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topology": "sebulba"}, "--topology is 'sebulba'"),
        ({"acting": ActorConfig(3)}, "--actors is 3, which can't share 8 worlds"),
        ({"acting": ActorConfig(2, "fork")}, "--actor-kind is 'fork'"),
        ({"acting": ActorConfig(2, staleness=None, pin=True)}, "--pin is on and --staleness is none"),
    ],
)
def test_runs_that_can_not_be_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        small(**({"topology": "actors"} | changes))
