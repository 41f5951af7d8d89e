"""Steps of the optimiser: accumulated gradients, chunks, and the optimiser's state as one vector."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from longhaul.algorithms import minibatch, ppo
from longhaul.algorithms.actor_critic import State
from longhaul.algorithms.config import PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.config.resolve import resolve
from longhaul.diagnostics import hlo
from longhaul.networks.config import NetworkConfig
from longhaul.runtime import mesh as meshes
from longhaul.runtime import overlap
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.spaces import Discrete
from longhaul.types import Rollout, Spec, Successors
from tests.helpers.quick import quick, zeros
from tests.helpers.small_runs import small
from tests.networks.test_actor_critic_remat import SEEN, drawn, relative

STEPS, COLUMNS = 6, 8

STEP = PPOConfig(
    num_minibatches=1, update_epochs=1, max_grad_norm=1e9, lr=1e-2, chunk=4096,
    network=NetworkConfig(hidden_dim=16, num_layers=1),
)  # fmt: skip
"""One step on the whole batch: Adam's first moment is then a tenth of the gradient."""

LEARNERS = {
    "mlp": STEP,
    "memory": replaced(STEP, memory=6),
    "encoder": replaced(STEP, torso="latent", hidden_dim=32),
    "lean": replaced(STEP, shared=True, precision="bf16", remat="full"),
}


def learner(config: PPOConfig) -> tuple[Any, State, Rollout]:
    """(learn, a state, experience of which some steps do not count)."""
    spec = Spec(SEEN, Discrete(3), agents=2)
    algorithm = ppo.ppo(spec, config, RunContext(updates=10, mean=meshes.identity))
    state = zeros(algorithm.init, jax.random.key(0))
    state = state._replace(params=drawn(state.params, scale=0.3))
    rng = np.random.default_rng(3)
    raw = jnp.asarray(rng.integers(0, 3, (STEPS, COLUMNS)), jnp.int32)
    ends = jnp.asarray(rng.random((STEPS, COLUMNS)) < 0.2)
    data = Rollout(
        drawn(SEEN, STEPS, COLUMNS, seed=4), raw, drawn(jnp.zeros(()), STEPS, COLUMNS, seed=5), ends,
        jnp.zeros_like(ends), jnp.asarray(rng.random((STEPS, COLUMNS)) < 0.7),
        {"raw": raw, "log_prob": jnp.log(jnp.asarray(rng.uniform(0.2, 0.5, (STEPS, COLUMNS)), jnp.float32))},
        Successors(drawn(SEEN, COLUMNS, seed=6), drawn(SEEN, 1, COLUMNS)),
        drawn(jax.eval_shape(lambda: algorithm.memory(COLUMNS)), seed=7), jnp.int32(0),
    )  # fmt: skip
    return quick(algorithm.learn), state, data


def gradient(state: State) -> Any:
    return next(x.mu for x in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["lean", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mlp", "memory", "encoder"))]
)
def test_accumulated_it_is_the_gradient_of_one_big_batch(kind: str) -> None:
    """Also where pieces have different numbers of steps that count; parameters and moments are float32 throughout."""
    config = LEARNERS[kind]
    learn, state, data = learner(config)
    whole, told = learn(state, data, jax.random.key(2))
    pieces, parts = learner(replace(config, accumulate=4))[0](state, data, jax.random.key(2))
    assert float(optax.tree.norm(gradient(whole))) > 1e-3
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(pieces))
    assert relative(gradient(pieces), gradient(whole)) < 1e-6
    assert relative(pieces.params, whole.params) < 1e-6
    for name in told:
        np.testing.assert_allclose(parts[name], told[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("accumulate", "chunk", "pieces"),
    [
        (4, 6, 8),
        (3, 5, 12),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((None, 4096, 1), (None, 6, 8), (4, 4096, 4))),
    ],
)
def test_pieces_are_as_many_as_asked_for_and_no_larger_than_a_chunk(
    accumulate: int | None, chunk: int, pieces: int
) -> None:
    seen: list[int] = []
    chunk_of = minibatch.chunk_of

    def noted(n: int, most: int) -> int:
        seen.append(STEPS * COLUMNS // chunk_of(n, most))
        return chunk_of(n, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minibatch, "chunk_of", noted)
        learn, state, data = learner(replace(STEP, accumulate=accumulate, chunk=chunk))
        jax.eval_shape(learn, state, data, jax.random.key(2))
    assert seen == [pieces]


@pytest.mark.slow  # runtime/test_overlap.py compares means in buckets bit for bit, and their order
@pytest.mark.parametrize("chunk", [12, 4096])
def test_gradients_in_buckets_are_those_in_one_mean(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two devices, also where a minibatch is several chunks, of which the last is the one that overlaps."""
    config = replace(STEP, chunk=chunk)
    _, state, data = learner(config)
    mesh, everywhere = meshes.make_mesh(2), PartitionSpec()

    def learnt(bucket: int) -> tuple[State, list[int]]:
        monkeypatch.setattr(overlap, "BUCKET", bucket)
        context = RunContext(updates=10, mean=meshes.mean_over_data, in_buckets=overlap.mean)
        learn = ppo.ppo(Spec(SEEN, Discrete(3), agents=2), config, context).learn
        shards = meshes.per_shard(learn, mesh, (everywhere,) * 3, (everywhere, everywhere))
        program = jax.jit(shards).lower(state, data, jax.random.key(2)).compile()
        large = [each.bytes for each in hlo.crossings(program.as_text()) if each.bytes >= overlap.least()]
        return program(state, data, jax.random.key(2))[0], large

    whole, one = learnt(2**20)
    parts, several = learnt(256)
    assert len(one) == 0
    assert len(several) > 2
    assert relative(gradient(parts), gradient(whole)) < 1e-6
    assert relative(parts.params, whole.params) < 1e-6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accumulate": 5}, "--accumulate is 5, .* the 64 steps of a minibatch; choose one of 1, 2, 4, 8, 16, 32, 64$"),
        ({"accumulate": 3, "memory": 4}, "the 4 environments of a minibatch; choose one of 1, 2, 4$"),
        ({"accumulate": 0}, "--accumulate is 0; it must be at least 1"),
    ],
)
def test_pieces_that_do_not_divide_are_named_with_those_that_do(change: dict[str, Any], words: str) -> None:
    run = small()
    with pytest.raises(RunError, match=words):
        resolve(replaced(run, **change))


def test_an_optimisers_state_as_one_vector_is_that_of_optax() -> None:
    """`flat.pack` makes what `optax.flatten` would have made, after some steps too; `unpack` takes it back."""
    rng = np.random.default_rng(1)
    params = {"a": {"kernel": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)}, "b": jnp.ones(5), "c": jnp.ones(())}
    inner = optax.chain(optax.clip_by_global_norm(1e6), optax.scale_by_adam())
    outer = optax.flatten(inner)
    leafwise, whole = quick(lambda: (inner.init(params), outer.init(params)))()

    @quick
    def step(grads: Any, leafwise: Any, whole: Any) -> Any:
        leafwise, whole = inner.update(grads, leafwise)[1], outer.update(grads, whole)[1]
        return leafwise, whole, minibatch.pack(leafwise, params), minibatch.unpack(whole, leafwise, params)

    for _ in range(3):
        grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
        leafwise, whole, packed, unpacked = step(grads, leafwise, whole)
        jax.tree.map(np.testing.assert_array_equal, packed, whole)
        jax.tree.map(np.testing.assert_array_equal, unpacked, leafwise)
