"""The fused topology: where a run is cut changes no number, shards stay apart, only gradients cross between them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from longhaul.algorithms import ppo
from longhaul.algorithms.config import PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.environment import vectorise
from longhaul.networks.config import NetworkConfig
from longhaul.rollout import collector
from longhaul.runtime import mesh as meshes
from longhaul.topologies import fused
from longhaul.types import Algorithm, Collector, Metrics, Progress
from tests.helpers.checkable_environment import Chaos

UPDATES, WORLDS = 8, 3


def simple(rate: float = 0.1) -> Algorithm:
    """A learner whose one number drifts with the mean reward and some noise, and tilts how it acts."""

    def act(policy: jax.Array, memory: Any, seen: jax.Array, key: Any) -> tuple[jax.Array, Any, Any]:
        drawn = jax.random.uniform(key, seen.shape[:1])
        return ((drawn + policy) * 3.0).astype(jnp.int32) % 3, memory, {}

    def learn(state: jax.Array, data: Any, key: Any) -> tuple[jax.Array, Metrics]:
        step = meshes.mean_over_data(jnp.mean(data.reward) + jax.random.normal(key))
        return state + rate * step, {"toy/step": step}

    empty = lambda columns: jnp.zeros((columns, 0))  # noqa: E731  # as of physics without muscles: it has a layout
    return Algorithm(lambda key: jnp.float32(0.5), lambda state: state, empty, act, learn)


Parts = tuple[Algorithm, fused.CollectorIn, Mesh]


def parts(devices: int, rate: float = 0.1) -> Parts:
    algorithm = simple(rate)
    collect = collector(vectorise(Chaos(peaks=("score",)), WORLDS), algorithm.act, algorithm.memory, steps=5)
    return algorithm, lambda context: collect, meshes.make_mesh(devices)


def begin(made: Parts, context: Any = ()) -> Progress:
    algorithm, collector_in, mesh = made
    return fused.start(algorithm, fused.entering(collector_in, mesh), context, jax.random.key(0), mesh)


def plain(tree: Any) -> Any:
    """NumPy copies, keys as their bits."""

    def one(x: jax.Array) -> np.ndarray:
        return np.array(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.map(one, tree)


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def two() -> tuple[Parts, fused.Program]:
    made = parts(2)
    algorithm, collector_in, mesh = made
    return made, fused.compiled(algorithm, collector_in, begin(made), (), mesh, block=UPDATES)


def whole(program: fused.Program, progress: Progress, block: int) -> tuple[Any, Any, list[int]]:
    """(the last progress, rows of metrics, sizes of the calls)."""
    rows, sizes = [], []
    for progress, n, metrics in fused.fused(program, progress, (), updates=UPDATES, block=block):
        rows.append(jax.tree.map(lambda x: np.asarray(x)[:n], metrics))  # noqa: B023
        sizes.append(n)
    return plain(progress), jax.tree.map(lambda *x: np.concatenate(x), *rows), sizes


def test_where_a_run_is_cut_changes_no_number(two):
    made, program = two
    expected, rows, sizes = whole(program, begin(made), UPDATES)
    assert sizes == [UPDATES]
    assert expected.updates == UPDATES
    assert np.unique(rows["toy/step"]).size == UPDATES, "every update draws anew"
    assert np.all(rows["episodes"] > 0)
    for block, calls in ((1, [1] * 8), (3, [3, 3, 2])):
        progress, other, sizes = whole(program, begin(made), block)
        assert sizes == calls
        assert_same(progress, expected)
        assert_same(other, rows)


@pytest.mark.slow
def test_a_program_of_smaller_blocks_changes_no_number(two):
    made, program = two
    expected, rows, _ = whole(program, begin(made), UPDATES)
    algorithm, collector_in, mesh = made
    smaller = fused.compiled(algorithm, collector_in, begin(made), (), mesh, block=3)
    progress, other, _ = whole(smaller, begin(made), 3)
    assert_same(progress, expected)
    assert_same(other, rows)


def test_a_run_goes_on_from_what_was_saved_of_it(two):
    """Also when progress has been to the host and back."""
    made, program = two
    expected, _, _ = whole(program, begin(made), UPDATES)
    progress, _ = program(begin(made), (), jnp.int32(5))
    shardings = jax.tree.map(lambda x: x.sharding, progress)
    bits = plain(progress)._replace(key=progress.key)
    returned = jax.tree.map(jax.device_put, bits, shardings)
    assert_same(whole(program, returned, UPDATES)[0], expected)
    assert list(fused.fused(program, returned._replace(updates=jnp.int32(UPDATES)), (), updates=UPDATES, block=3)) == []


def test_progress_is_donated_and_nothing_compiles_or_moves_after_the_first_call(two):
    made, program = two
    progress, _ = program(begin(made), (), jnp.int32(1))
    compiled: list[str] = []

    def listen(event: str, seconds: float, **words: Any) -> None:
        if "compile" in event:
            compiled.append(event)

    given = [progress.state, *jax.tree.leaves(progress.carry)]
    count = jnp.int32(2)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with jax.transfer_guard("disallow"):
            progress, metrics = program(progress, (), count)
            jax.block_until_ready((progress, metrics))
        assert compiled == []
        jax.jit(lambda x: x * 3.25)(1.0)
        assert compiled, "the listener hears nothing"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert all(leaf.is_deleted() for leaf in given), "two copies of everything would be needed"
    with pytest.raises(RuntimeError, match=r"deleted|donated"):
        np.asarray(given[0])


@pytest.mark.slow
def test_shards_are_independent_runs(monkeypatch):
    """Without learning, a shard's experience is that of a run on one device that goes by the shard's number.

    And scores are the sums over both, or the greater one.
    """
    made = parts(2, rate=0.0)
    algorithm, collector_in, mesh = made
    together = fused.compiled(algorithm, collector_in, begin(made), (), mesh, block=UPDATES)
    everyone, rows, _ = whole(together, begin(made), UPDATES)
    alone = []
    for shard in (0, 1):
        monkeypatch.setattr(meshes, "shard_index", lambda: jnp.int32(shard))  # noqa: B023
        made = parts(1, rate=0.0)
        algorithm, collector_in, mesh = made
        program = fused.compiled(algorithm, collector_in, begin(made), (), mesh, block=UPDATES)
        progress, scores, _ = whole(program, begin(made), UPDATES)
        mine = jax.tree.map(lambda x: x[shard * WORLDS : (shard + 1) * WORLDS], everyone.carry)  # noqa: B023
        assert_same(progress.carry, mine)
        alone.append((progress, scores))
    (first, one), (second, other) = alone
    assert np.any(first.carry.observation != second.carry.observation), "both shards live the same"
    for name in ("episodes", "episode/return", "episode/length", "episode/score"):
        np.testing.assert_array_equal(rows[name], one[name] + other[name])
    np.testing.assert_array_equal(rows["peak/score"], np.maximum(one["peak/score"], other["peak/score"]))
    assert rows["episodes"].sum() > UPDATES


def computations(text: str) -> dict[str, str]:
    """The computations of an HLO module by name."""
    found = {}
    for block in re.split(r"\n\n", text):
        head = re.search(r"^(?:ENTRY )?%?([\w.\-]+) .*\{", block, re.MULTILINE)
        if head:
            found[head.group(1)] = block
    return found


def collectives(text: str) -> list[tuple[int, str]]:
    """(depth in loops, operation) of everything that crosses devices."""
    parts_of = computations(text)
    entry = next(name for name, block in parts_of.items() if re.search(r"^ENTRY", block, re.MULTILINE))
    found = []

    def visit(name: str, depth: int) -> None:
        for line in parts_of[name].splitlines()[1:]:
            crossing = re.search(r" (all-\w+|collective-\w+|reduce-scatter|send|recv|infeed|outfeed)(-start)?\(", line)
            if crossing:
                found.append((depth, crossing.group(1)))
            for kind, inner in re.findall(r"(body|condition|calls|to_apply|branch_computations)=\{?%?([\w.\-]+)", line):
                if inner in parts_of and not crossing:
                    visit(inner, depth + (kind == "body"))

    visit(entry, 0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("agents", [None, 2])
def test_one_all_reduce_a_step_of_the_optimiser(agents):
    """And two small ones an update: moments of the advantages, and metrics. Nothing else crosses devices.

    The loops are: updates (1), epochs (2), minibatches (3). Slow: every day diagnostics/test_checks.py counts what
    crosses in such a program, by the parser of `longhaul doctor`.
    """
    environment, mesh = Chaos(agents=agents), meshes.make_mesh(2)
    config = PPOConfig(num_minibatches=3, update_epochs=2, network=NetworkConfig(hidden_dim=8, num_layers=1))
    algorithm = ppo.ppo(environment.spec, config, RunContext(updates=4, mean=meshes.mean_over_data))
    collect = collector(vectorise(environment, WORLDS), algorithm.act, algorithm.memory, steps=4)
    made = algorithm, lambda context: collect, mesh
    progress = jax.eval_shape(lambda: begin(made))
    text = fused.lowered(algorithm, lambda context: collect, progress, (), mesh, block=2).compile().as_text()
    assert sorted(collectives(text)) == [(1, "all-reduce"), (1, "all-reduce"), (3, "all-reduce")]
    assert "callback" not in text


def test_a_context_is_an_argument_that_may_change_between_calls():
    """The program holds none: its text is the same for another, and it goes on in another without compiling."""

    def collector_in(context: jax.Array) -> Collector:
        plain_one = collector(vectorise(Chaos(), WORLDS), algorithm.act, algorithm.memory, steps=5)

        def collect(params: Any, carry: Any, key: Any, version: Any) -> Any:
            after, data, scores = plain_one.collect(params, carry, key, version)
            return after, data._replace(reward=data.reward + context[1]), scores | {"context": context[0]}

        return plain_one._replace(collect=collect)

    algorithm, mesh = simple(), meshes.make_mesh(2)
    one, other = (jax.device_put(jnp.array([n, n / 8]), meshes.replicated(mesh)) for n in (1.0, 2.0))
    enter = fused.entering(collector_in, mesh)
    begun = fused.start(algorithm, enter, one, jax.random.key(0), mesh)
    texts = {fused.lowered(algorithm, collector_in, begun, each, mesh, block=2).as_text() for each in (one, other)}
    assert len(texts) == 1
    program = fused.compiled(algorithm, collector_in, begun, one, mesh, block=2)
    first, rows = program(begun, one, jnp.int32(2))
    assert rows["context"].tolist() == [2.0, 2.0], "the sum over two shards"
    before = plain(first)
    second, rows = program(fused.entered(first, enter, other), other, jnp.int32(2))
    assert rows["context"].tolist() == [4.0, 4.0]
    assert not np.any(one.is_deleted() or other.is_deleted())
    begun = fused.start(algorithm, enter, one, jax.random.key(0), mesh)
    assert np.any(plain(fused.entered(begun, enter, one).carry.observation) != plain(begun.carry.observation))
    assert np.any(plain(second.carry.observation) != before.carry.observation)


def test_an_empty_call_is_named():
    algorithm, collector_in, mesh = made = parts(1)
    with pytest.raises(ValueError, match="compiled call of 0 updates"):
        fused.compiled(algorithm, collector_in, begin(made), (), mesh, block=0)
