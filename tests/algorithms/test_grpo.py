"""GRPO and its kin: advantages and weights by hand, the first gradient, accumulation, shards, clipping, imitation."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import grpo, registry
from longhaul.algorithms.config import LOSSES, GRPOConfig, Loss
from longhaul.algorithms.run_context import RunContext
from longhaul.reasoning import sampler, tokenizer, transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.replay import Sizes
from longhaul.runtime import mesh as meshes
from tests.helpers.quick import quick

TINY = ModelConfig(width=16, layers=1, heads=1, kv_heads=1, head_dim=16, hidden=16)
ROWS, LENGTH, GROUP = 8, 6, 4


def config(**changes: Any) -> GRPOConfig:
    return dataclasses.replace(GRPOConfig(model=TINY, group=GROUP, num_minibatches=1), **changes)


judge = quick(lambda params, prompt, token: sampler.log_probs(TINY, params, prompt, token, 1.0)[0])
"""Program of parameters, prompts and tokens to the log-probabilities of all tokens."""


@functools.cache
def completions() -> tuple[Any, sampler.Completions]:
    """Parameters, and completions of some lengths that they sampled, with a group whose rewards are equal."""
    params = quick(lambda key: transformer.init(key, TINY))(jax.random.key(0))
    rng = np.random.default_rng(0)
    prompt = np.repeat(rng.integers(1, 23, (ROWS // GROUP, 3)), GROUP, axis=0).astype(np.int32)
    token = rng.integers(1, 23, (ROWS, LENGTH)).astype(np.int32)
    written = np.arange(LENGTH)[None] < np.array([2, 6, 3, 4, 5, 6, 1, 6])[:, None]
    taken = written & (rng.random((ROWS, LENGTH)) < 0.8)
    taken[:, 0] = True
    token = np.where(written, token, tokenizer.PAD)
    log_prob = judge(params, prompt, token)
    reward = np.array([1, 0, 0, 0.5, 1, 1, 1, 1], np.float32)
    acted = jnp.where(taken, log_prob, 0.0)
    arrays = map(jnp.asarray, (prompt, token, written, taken, acted, acted, reward))
    zero, problem = jnp.zeros(ROWS, jnp.int32), jnp.arange(ROWS) // GROUP
    return params, sampler.Completions(*arrays, jnp.linspace(0.0, 0.5, ROWS), zero, zero, problem, zero > 0)


def test_advantages_by_hand() -> None:
    reward = jnp.array([1.0, 0.0, 0.0, 1.0, 0.1, 0.1, 0.1, 0.1, 3.0, 0.0, 0.0, 0.0])
    plain, informative = grpo.advantages(reward, 4, scaled=False)
    np.testing.assert_allclose(plain, [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, 2.25, -0.75, -0.75, -0.75])
    np.testing.assert_array_equal(informative, np.repeat([True, False, True], 4))
    scaled, _ = grpo.advantages(reward, 4, scaled=True)
    np.testing.assert_allclose(scaled[:4], [1, -1, -1, 1], rtol=1e-3)
    assert (np.asarray(scaled[4:8]) == 0.0).all()  # exactly, though the mean of 0.1 is rounded
    np.testing.assert_allclose(scaled[8:], np.array([2.25, -0.75, -0.75, -0.75]) / np.std([3, 0, 0, 0]), rtol=1e-3)


@pytest.mark.parametrize(
    ("over", "wanted"),
    [
        ("token", [[1 / 3, 1 / 3, 0], [0, 1 / 3, 0], [0, 0, 0]]),
        ("sequence", [[1 / 4, 1 / 4, 0], [0, 1 / 2, 0], [0, 0, 0]]),
        ("constant", [[1 / 9, 1 / 9, 0], [0, 1 / 9, 0], [0, 0, 0]]),
    ],
)
def test_weights_by_hand(over: str, wanted: list[list[float]]) -> None:
    taken = jnp.array([[True, True, False], [False, True, False], [True, True, True]])
    found = grpo.weights(taken, jnp.array([True, True, False]), over, meshes.identity)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def first(settings: GRPOConfig, data: sampler.Completions, params: Any) -> tuple[Any, dict[str, jax.Array]]:
    """The gradient at the parameters that sampled, and the parts of the loss."""
    loss = LOSSES[settings.loss]
    advantage, informative = grpo.advantages(data.reward, GROUP, scaled=loss.scaled)
    weight = grpo.weights(data.taken, informative, loss.over, meshes.identity)
    batch = grpo.Batch(data, advantage, weight, jnp.zeros(data.token.shape))
    at_once = jax.grad(grpo.objective(settings), has_aux=True)
    gradient = grpo.in_micro_batches(at_once, settings.accumulate, meshes.spread)
    return quick(gradient)(params, batch)


def reinforce(params: Any, data: sampler.Completions, loss: Loss) -> Any:
    """The gradient of -A log p, over the tokens or completions that the variant averages, written out."""
    reward = np.asarray(data.reward).reshape(-1, GROUP)
    advantage = reward - reward.mean(axis=1, keepdims=True)
    if loss.scaled:
        advantage = advantage / (reward.std(axis=1, keepdims=True) + 1e-4)
    kept = np.asarray(data.taken) & (np.ptp(reward, axis=1) > 0).repeat(GROUP)[:, None]
    advantage = jnp.asarray(advantage.reshape(-1))

    def total(params: Any) -> jax.Array:
        log_prob, _ = sampler.log_probs(TINY, params, data.prompt, data.token, 1.0)
        each = -advantage[:, None] * log_prob * kept
        if loss.over == "token":
            return jnp.sum(each) / kept.sum()
        if loss.over == "constant":
            return jnp.sum(each) / each.size
        rows = kept.any(axis=1)
        return jnp.mean((jnp.sum(each, axis=1) / jnp.asarray(np.maximum(kept.sum(axis=1), 1)))[rows])

    return quick(jax.grad(total))(params)


def near(found: Any, wanted: Any, tolerance: float) -> None:
    size = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(wanted))
    assert size > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance * size, rtol=0), found, wanted)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "grpo" else pytest.mark.slow) for name in LOSSES]
)
def test_the_first_gradient_is_that_of_reinforce(name: str) -> None:
    params, data = completions()
    found, parts = first(config(loss=name), data, params)
    near(found, reinforce(params, data, LOSSES[name]), 2e-5)
    assert float(parts["clip_fraction"]) == 0.0
    assert abs(float(parts["approx_kl"])) < 1e-6


@pytest.mark.slow
def test_truncated_draws_count_by_the_probability_that_was_left() -> None:
    """A draw from q = p / 0.5 on the tokens that are left counts half, the importance weight p / q, unless corrections
    are off."""
    params, data = completions()
    halved = data._replace(behaviour=data.log_prob - jnp.log(0.5))
    whole, _ = first(config(), data, params)
    for correction, factor in (("truncate", 0.5), ("none", 1.0)):
        found, parts = first(config(top_p=0.5, correction=correction), halved, params)
        near(found, jax.tree.map(lambda x, by=factor: by * x, whole), 2e-6)
        assert float(parts["clip_fraction"]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_pieces_of_a_batch_are_the_batch(name: str) -> None:
    params, data = completions()
    data = data._replace(log_prob=data.log_prob - 0.1)  # off-policy, so that ratios count
    whole, told = first(config(loss=name, clip_low=0.05), data, params)
    settings = config(loss=name, clip_low=0.05, num_minibatches=1, accumulate=ROWS)  # each its own prompt
    registry.check(settings, Sizes(1, ROWS, LENGTH))
    pieces, also = first(settings, data, params)
    near(pieces, whole, 1e-6)
    assert float(also["loss"]) == pytest.approx(float(told["loss"]), abs=1e-6)


def updated(far: float = 0.3, **changes: Any) -> tuple[Any, Any, Any]:
    """(parameters, Adam's first moments, metrics) after an update of completions from a sampler that is `far` away."""
    settings = config(**{"num_minibatches": 2, "warmup": 0, "lr": 1e-3} | changes)
    made = grpo.grpo(None, settings, RunContext(updates=2, mean=meshes.identity))
    params, data = completions()
    fresh = quick(made.init)(jax.random.key(1))
    if settings.model.lora:
        params = transformer.joined(transformer.split(settings.model, fresh.params)[0], params)
    reference = jax.tree.map(lambda x: 1.1 * x, params) if fresh.reference else ()
    state = fresh._replace(params=params, reference=reference, updates=jnp.int32(1))
    off = jnp.linspace(-far, far, ROWS * LENGTH).reshape(ROWS, LENGTH)
    reward = jnp.array([1.0, 0, 0, 0.5, 0, 1, 1, 1])
    lesson = jnp.arange(ROWS) % 2 * sampler.DEMONSTRATED if settings.taught else data.lesson
    data = data._replace(log_prob=jnp.where(data.taken, data.log_prob + off, 0.0), reward=reward, lesson=lesson)
    after, told = quick(made.learn)(state, data, jax.random.key(2))
    return after.params, after.opt_state[1].mu, told


@pytest.mark.slow  # the next one compares probabilities, reasoning/test_packing.py those of all models
@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "dapo"},
        {"loss": "grpo", "kl_coef": 0.1},
        {"loss": "dr_grpo", "correction": "mask", "correction_cap": 1.2},
        {"loss": "gspo", "num_minibatches": 1},
        {"loss": "cispo", "overlong": 0.5, "top_k": 5},
        {"loss": "dapo", "taught": 1, "lr_taught": 1e-3},
        {"loss": "dapo", "model": dataclasses.replace(TINY, lora=2), "kl_coef": 0.1},
    ],
    ids=lambda changes: changes["loss"],
)
def test_packed_completions_give_the_same_update(changes: dict[str, Any]) -> None:
    """Though they share rows, and some tokens, as those of tools, count in no loss."""
    (plain, first, told), (packed, moment, also) = (updated(pack=pack, **changes) for pack in (0, 12))
    near(moment, first, 1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), packed, plain)
    assert float(told["grpo/grad_norm"]) > 0.01
    for name in told:
        assert float(also[name]) == pytest.approx(float(told[name]), rel=1e-4, abs=1e-6), name


def test_packed_completions_have_the_probabilities_of_the_sampler() -> None:
    """A learning rate of 0 keeps both minibatches on-policy."""
    _, _, told = updated(0.0, pack=12, lr=0.0)
    assert float(told["grpo/grad_norm"]) > 0.01
    for name in ("approx_kl", "mismatch", "clip_fraction"):
        assert abs(float(told[f"grpo/{name}"])) < 1e-6, name


def test_completions_that_teach_nothing_are_in_no_row() -> None:
    _, data = completions()  # the second group's rewards are equal
    batch = grpo._batch(config(pack=32), data, ())
    row = grpo._over_rows(config(pack=32), lambda row: row.here.astype(jnp.int32), data, batch.weight)
    assert row.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_ratios_are_clipped_as_each_loss_says() -> None:
    acted, taken = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    log_prob = jnp.log(jnp.array([[1.5, 0.5]]))

    def slope(name: str, worth: float) -> np.ndarray:
        """d loss / d log-probability of the two tokens."""

        def total(x: jax.Array) -> jax.Array:
            return jnp.sum(grpo.surrogate(LOSSES[name], x, acted, taken, jnp.array([worth]))[0])

        return np.asarray(jax.grad(total)(log_prob))[0]

    np.testing.assert_allclose(slope("dapo", 1.0), [0.0, -0.5], atol=1e-6)  # too high is cut where it is good
    np.testing.assert_allclose(slope("dapo", -1.0), [1.5, 0.0], atol=1e-6)  # too low where it is bad
    np.testing.assert_allclose(slope("cispo", 1.0), [-1.28, -0.5], rtol=1e-5)  # truncated, and never cut
    np.testing.assert_allclose(slope("cispo", -1.0), [1.28, 0.5], rtol=1e-5)
    mean = np.sqrt(1.5 * 0.5)  # one ratio for both, below 1 - 3e-4
    np.testing.assert_allclose(slope("gspo", 1.0), [-mean, -mean], rtol=1e-5)
    np.testing.assert_allclose(slope("gspo", -1.0), [0.0, 0.0], atol=1e-6)


@functools.cache
def learnt() -> tuple[Any, Any, Any]:
    """Results of one update, with KL and two minibatches: from rewards, from demonstrations, from equal rewards."""
    settings = config(kl_coef=0.1, num_minibatches=2, taught=1, warmup=0, lr=1e-2, lr_taught=1e-2)
    made = grpo.grpo(None, settings, RunContext(updates=2, mean=meshes.identity))
    params, data = completions()
    begun = quick(made.init)(jax.random.key(1))
    state = begun._replace(params=params, updates=jnp.int32(1), imitated=jnp.int32(1))
    learn = quick(made.learn)
    equal = data._replace(reward=jnp.ones(ROWS))
    cases = data, data._replace(lesson=jnp.full(ROWS, sampler.DEMONSTRATED)), equal
    return state, [learn(state, each, jax.random.key(2)) for each in cases], learn


def log_probs(params: Any) -> jax.Array:
    """Log-probabilities of all tokens of the completions."""
    data = completions()[1]
    return judge(params, data.prompt, data.token)


@pytest.mark.slow
def test_an_update_raises_what_was_rewarded_and_tells_how_far_the_sampler_is() -> None:
    state, ((after, told), *_), learn = learnt()
    params, data = completions()
    before, now = (log_probs(each) for each in (params, after.params))
    gain = np.asarray(jnp.sum((now - before) * data.taken, axis=1))
    assert gain[0] > 0 > gain[1] + gain[2]
    assert float(told["grpo/mismatch"]) < 1e-5
    _, stale = learn(state, data._replace(log_prob=data.log_prob - 0.25 * data.taken), jax.random.key(2))
    assert float(stale["grpo/mismatch"]) == pytest.approx(0.25, abs=1e-4)
    assert int(after.updates) == 2
    jax.tree.map(np.testing.assert_array_equal, after.reference, params)


@pytest.mark.slow
def test_demonstrations_are_imitated_whatever_their_reward() -> None:
    _, (_, (after, told), _), _ = learnt()
    params, data = completions()
    before, now = (log_probs(each) for each in (params, after.params))
    gain = np.asarray(jnp.sum((now - before) * data.taken, axis=1))
    assert gain.sum() > 0.5
    assert float(told["grpo/loss"]) == 0.0
    mean = -np.asarray(before)[np.asarray(data.taken)].mean()
    assert float(told["grpo/imitation_loss"]) == pytest.approx(mean, rel=0.15)  # of two minibatches, one step between


@pytest.mark.slow
def test_groups_that_are_all_equal_teach_nothing() -> None:
    state, (*_, (after, told)), _ = learnt()
    assert float(told["grpo/grad_norm"]) < 1e-6
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


@pytest.mark.slow
@pytest.mark.parametrize("pack", [0, 12])
def test_two_shards_are_one_batch(pack: int) -> None:
    """Also where one of them has more rows than the other."""
    params, data = completions()
    data = data._replace(reward=jnp.array([1.0, 0, 0, 0.5, 0, 1, 1, 1]))
    mesh = meshes.make_mesh(2, 1)
    settings = config(loss="grpo", lr=1.0, warmup=0, pack=pack)
    whole = grpo.grpo(None, settings, RunContext(updates=1, mean=meshes.identity))
    parts = grpo.grpo(None, settings, RunContext(updates=1, mean=meshes.mean_over_data))
    state = whole.init(jax.random.key(1))._replace(params=params)
    P = jax.sharding.PartitionSpec
    specs = sampler.Completions(*[P("data")] * 12)
    split = meshes.per_shard(lambda s, d: parts.learn(s, d, jax.random.key(0)), mesh, (P(), specs), (P(), P()))
    (_, one), (_, two) = quick(whole.learn)(state, data, jax.random.key(0)), quick(split)(state, data)
    for name in ("loss", "entropy", "grad_norm"):
        assert float(two[f"grpo/{name}"]) == pytest.approx(float(one[f"grpo/{name}"]), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": "ppo"}, "loss is 'ppo'; it must be one of grpo, dr_grpo, dapo, gspo, cispo"),
        ({"group": 1}, "group is 1; it must be at least 2"),
        ({"group": 3}, "group is 3; it must divide the completions of a shard, 8"),
        ({"num_minibatches": 3}, "num_minibatches is 3"),
        ({"num_minibatches": 1, "accumulate": 3}, "with accumulate 3 it must divide the groups of a shard"),
        ({"accumulate": 2, "pack": 16}, "accumulate is 2; with --pack the micro-batches are its rows; give 1"),
        ({"lr": 0.0}, "lr is 0.0; it must be above 0"),
        ({"kl_coef": -1.0}, "kl_coef is -1.0; it must be at least 0"),
    ],
)
def test_sizes_that_can_not_work_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        registry.check(config(**changes), Sizes(1, ROWS, LENGTH))


def test_a_warm_start_comes_from_the_easiest_quarter_to_all() -> None:
    settings = config(taught=100, curriculum=0.6)
    shares = [float(grpo.curriculum_share(settings, jnp.int32(u))) for u in (0, 20, 40, 60, 99)]
    assert shares == pytest.approx([0.25, 0.25, 0.625, 1.0, 1.0])
    assert float(grpo.curriculum_share(config(taught=100, curriculum=0.0), jnp.int32(1))) == 1.0


def test_the_rate_falls_to_a_tenth_in_the_last_third() -> None:
    """Updates from rewards: 2 taught, 30 more, two steps of the optimiser each."""
    rewards = SimpleNamespace(lesson=jnp.zeros(4, jnp.int32))

    def at(updates: int, step: int = 0, of: int = 32, **changes: Any) -> float:
        state = SimpleNamespace(updates=jnp.int32(updates), imitated=jnp.int32(2))
        settings = config(taught=2, lr=1e-3, num_minibatches=2, update_epochs=1, **({"warmup": 0} | changes))
        return float(grpo._rate(settings, state, rewards, of, meshes.identity)(jnp.int32(step)))  # type: ignore[arg-type]

    assert [at(2), at(12), at(22)] == pytest.approx([1e-3] * 3)
    assert at(27) == pytest.approx(5.5e-4)
    assert at(31, 1) == pytest.approx(1e-4 + 9e-4 * 3 / 60)
    assert at(31, 1, anneal=False) == pytest.approx(1e-3)
    most = 2**31 - 1  # updates; int32 counts no four billion steps of the optimiser
    assert [at(most // 2, of=most), at(most - 1, of=most)] == pytest.approx([1e-3, 1e-4])
    assert at(most // 2 + 9, of=most, warmup=10) == pytest.approx(1e-3)


def test_ratios_far_from_the_sampler_are_truncated_or_masked() -> None:
    acted, taken = jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
    log_prob = jnp.log(jnp.array([[4.0, 0.9, 0.2]]))

    def slope(correction: str) -> list[float]:
        """d loss / d log-probability of a bad completion's tokens, which DAPO's clipping bounds below alone."""

        def total(x: jax.Array) -> jax.Array:
            each, _ = grpo.surrogate(LOSSES["dapo"], x, acted, taken, jnp.array([-1.0]), correction, 3.0)
            return jnp.sum(each)

        return np.round(np.asarray(jax.grad(total)(log_prob))[0], 5).tolist()

    assert slope("none") == [4.0, pytest.approx(0.9), 0.0]
    assert slope("truncate") == [0.0, pytest.approx(0.9), 0.0]
    assert slope("mask") == [0.0, pytest.approx(0.9), 0.0]
    assert float(grpo.surrogate(LOSSES["dapo"], log_prob, acted, taken, jnp.array([-1.0]), "mask", 3.0)[0][0, 0]) == 0.0


def test_long_completions_lose_reward_and_cut_ones_can_be_left_out() -> None:
    _, data = completions()  # of 2, 6, 3, 4, 5, 6, 1, 6 tokens of 6
    soft = grpo.shaped(config(overlong=0.5), data)
    np.testing.assert_allclose(data.reward - soft, [0, 1, 0, 1 / 3, 2 / 3, 1, 0, 1], atol=1e-6)
    light = grpo.shaped(config(length_penalty=0.6), data)
    np.testing.assert_allclose(data.reward - light, np.array([2, 6, 3, 4, 5, 6, 1, 6]) / 10, atol=1e-6)
    data = data._replace(cut=jnp.arange(ROWS) == 1)
    kept, left = (
        grpo._batch(config(mask_truncated=flag), data, ()).weight.any(axis=1).tolist() for flag in (False, True)
    )
    assert (kept[1], left[1], left[0]) == (True, False, True)


@pytest.mark.slow
def test_lora_moves_its_factors_alone() -> None:
    model = dataclasses.replace(TINY, lora=2)
    settings = config(model=model, lr=1e-2, warmup=0, num_minibatches=1, kl_coef=0.1)
    made = grpo.grpo(None, settings, RunContext(updates=1, mean=meshes.identity))
    state = made.init(jax.random.key(0))
    _, data = completions()
    after, metrics = quick(made.learn)(state, data, jax.random.key(1))
    moved, rest = transformer.split(model, after.params)
    _, before = transformer.split(model, state.params)
    jax.tree.map(np.testing.assert_array_equal, rest, before)
    assert all(np.any(x) for name, x in moved["layers"].items() if name.endswith("_up"))
    assert float(metrics["grpo/reference_kl"]) == pytest.approx(0.0, abs=1e-6)  # the factors begin as nothing
    sizes = {x.size for x in jax.tree.leaves(after.opt_state)}
    assert max(sizes) == max(x.size for x in jax.tree.leaves(moved))
