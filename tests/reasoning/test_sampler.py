"""Completions: checkers on the device against those on the host, and one small sampler against the full forward."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.reasoning import decode, draw, sampler, tasks, tokenizer, transformer, verifier
from longhaul.reasoning.config import ModelConfig
from longhaul.runtime import mesh as meshes
from longhaul.runtime import partition
from longhaul.runtime.errors import FieldError
from longhaul.types import PLATFORM
from tests.helpers.quick import language_model, quick

CONFIG = ModelConfig(width=32, layers=1, heads=2, kv_heads=1, head_dim=16, hidden=48)
LENGTH = 21
ARITHMETIC = tasks.arithmetic(1, 3, direct=0.0, noise=0.2)


@functools.cache
def drawn_problems() -> tuple[list[tasks.Problem], sampler.Bank]:
    rng = np.random.default_rng(0)
    problems = tasks.problems(ARITHMETIC, rng, 64)
    return problems, sampler.bank(ARITHMETIC, problems, rng, LENGTH)


@functools.cache
def params() -> Any:
    """Random."""
    return language_model(CONFIG)


HOW = sampler.Sampling(LENGTH, 1, 0.7, wave=24)
SAMPLE = quick(sampler.sampler(CONFIG, HOW))
KEYS = jax.random.split(jax.random.key(1), 64)


@functools.cache
def drawn(budget: int) -> sampler.Drawn:
    return SAMPLE(params(), drawn_problems()[1].prompt, KEYS, jnp.int32(budget))


# ----------------------------------------------------------------------------------------------------------- sampling


def test_recorded_log_probabilities_are_those_that_the_learner_computes() -> None:
    bank, found = drawn_problems()[1], drawn(sampler.UNBOUNDED)
    log_prob, entropy = quick(functools.partial(sampler.log_probs, CONFIG, temperature=0.7))(
        params(), bank.prompt, found.token
    )
    taken = np.asarray(found.taken)
    np.testing.assert_allclose(np.asarray(log_prob)[taken], np.asarray(found.log_prob)[taken], atol=2e-5)
    assert np.all(np.asarray(found.token)[taken] != tokenizer.PAD)
    assert np.all(found.taken == found.written)
    # Surprise is entropy on average: these are samples of what the learner takes them for.
    surprise = np.mean(-np.asarray(log_prob)[taken]) - np.mean(np.asarray(entropy)[taken])
    assert abs(surprise) < 4 * np.std(np.asarray(log_prob)[taken]) / np.sqrt(taken.sum())
    assert 0.5 < np.mean(np.asarray(entropy)[taken]) < 3.0


def test_a_completion_ends_with_its_end() -> None:
    found = drawn(sampler.UNBOUNDED)
    ended = 0
    for token, written in zip(np.asarray(found.token), np.asarray(found.written), strict=True):
        length = int(written.sum())
        assert written[:length].all()
        assert not (token[: length - 1] == tokenizer.END).any()
        assert (token[length:] == tokenizer.PAD).all()
        assert length == LENGTH or token[length - 1] == tokenizer.END
        ended += length < LENGTH
    assert 5 < ended < 64


@pytest.mark.parametrize("budget", [0, 1])
def test_a_budget_of_steps_is_kept_and_what_it_forces_is_not_chosen(budget: int) -> None:
    found, free = drawn(budget), drawn(sampler.UNBOUNDED)
    token, forced = np.asarray(found.token), np.asarray(found.written & ~found.taken)
    before_answer = np.cumsum(token == tokenizer.ANSWER, axis=1) == 0
    assert ((token == tokenizer.STEP) & before_answer).sum(axis=1).max() == budget
    assert (token[forced] == tokenizer.ANSWER).all()
    assert (np.asarray(found.log_prob)[forced] == 0.0).all()
    assert forced.sum(axis=1).max() == 1
    if budget == 0:
        assert forced[:, 0].all()
    same = ~np.cumsum(forced, axis=1).astype(bool)  # until it is forced, a budget changes nothing
    np.testing.assert_array_equal(token[same], np.asarray(free.token)[same])


def greedy(prompt: jax.Array) -> np.ndarray:
    """Tokens [B, LENGTH] of the likeliest completions, each by the full forward of all before it."""
    forward = quick(functools.partial(transformer.forward, CONFIG))
    text, ended = np.full((len(prompt), LENGTH), tokenizer.PAD, np.int32), np.zeros(len(prompt), bool)
    mask = jnp.concatenate([prompt != tokenizer.PAD, jnp.ones((len(prompt), LENGTH), bool)], axis=1)
    for t in range(LENGTH):
        logits = forward(params(), jnp.concatenate([prompt, jnp.asarray(text)], axis=1), mask)
        likeliest = 1 + np.argmax(logits[:, prompt.shape[1] + t - 1, 1:], axis=-1)
        text[:, t] = np.where(ended, tokenizer.PAD, likeliest)
        ended |= np.isin(text[:, t], SOON)
    return text


SOON = (3, 12, 20, 21)
"""Tokens that end a completion, so that lengths differ."""


@pytest.mark.parametrize(("piece", "large"), [pytest.param(64, 0, marks=pytest.mark.slow), (4, 2**24)])
def test_rows_that_are_filled_again_write_what_full_forwards_do(
    piece: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 prompts, 2 completions of each by 5 rows: the likeliest tokens, exactly; the last by 3 rows and 2 where
    that is worth it. Pieces of 4 slots, in parts of 2, are many."""
    monkeypatch.setattr(decode, "PIECE", piece)
    monkeypatch.setattr(decode, "PART", 1)  # twice as many of few rows
    monkeypatch.setattr(sampler, "LARGE", large)
    monkeypatch.setattr(sampler, "LONG", 2)
    monkeypatch.setattr(sampler, "FEWER", (1.5, 2))
    monkeypatch.setattr(sampler, "PREFILL", 40)  # prompts are prefilled 3 at a time
    prompt, words = drawn_problems()[1].prompt[:8], tokenizer.TOKENISER._replace(ends=SOON)
    how, most = dataclasses.replace(HOW, temperature=0.0, group=2, wave=5), np.arange(16) % 2 * 9 + 7
    sample = quick(sampler.sampler(CONFIG, how, tokeniser=words))
    found = sample(params(), prompt, KEYS[:16], jnp.int32(sampler.UNBOUNDED), jnp.asarray(most))
    wanted = np.where(np.arange(LENGTH)[None] < most[:, None], greedy(prompt).repeat(2, axis=0), tokenizer.PAD)
    np.testing.assert_array_equal(found.token, wanted)
    np.testing.assert_array_equal(found.written, wanted != tokenizer.PAD)
    assert set(found.written.sum(axis=1).tolist()) >= {7, 16} and found.written.sum(axis=1).min() < 7


@pytest.mark.slow
def test_prompts_are_read_where_they_are_needed_and_not_for_every_completion() -> None:
    """The compiler takes none of their products out of the three loops in which they are written."""
    sample = sampler.sampler(CONFIG, dataclasses.replace(HOW, group=4, wave=8, length=4))
    prompt = jnp.ones((6, sampler.PREFILL // 2), jnp.int32)
    program = jax.jit(sample).lower(params(), prompt, KEYS[:24], jnp.int32(9)).compile().as_text()
    assert program is not None
    inside: dict[str, list[str]] = {}
    for line in program.splitlines():
        if begun := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = "the entry" if begun[1] else begun[2]
            inside[name] = []
        elif inside:
            inside[name].append(line)
    depth, ahead = {"the entry": 0}, ["the entry"]
    while ahead:
        outer = ahead.pop()
        for line in inside[outer]:
            for how, inner in re.findall(r"(body|condition|calls|to_apply)=%?([\w.\-]+)", line):
                deep = depth[outer] + (how == "body")
                if depth.get(inner, -1) < deep:
                    depth[inner] = deep
                    ahead.append(inner)
    products = [(depth[name], line) for name, lines in inside.items() for line in lines if " dot(" in line]
    written = [(deep, named[1].count("while/body")) for deep, line in products
               if (named := re.search(r'op_name="([^"]*)"', line))]  # fmt: skip
    read = [deep for deep, asked in written if asked >= 3]
    assert read and min(read) >= 3


CUT = dataclasses.replace(HOW, temperature=0.9, top_k=12, top_p=0.9, min_p=0.05)
"""Draws from some of the tokens alone."""

GROUPED = quick(sampler.sampler(CONFIG, dataclasses.replace(CUT, group=2, wave=5)))


def test_a_completion_depends_on_its_prompt_and_key_alone() -> None:
    """Not on its place in the batch, its group or its row: the same four prompts twice, in another order and with
    other neighbours."""
    four, never = drawn_problems()[1].prompt[:4], jnp.int32(sampler.UNBOUNDED)
    prompt = jnp.concatenate([four, four])
    found = GROUPED(params(), prompt, KEYS[:16], never)
    # Of two groups of one prompt, the first ones stay and the others change places; then the last group is the first.
    order = np.arange(16).reshape(2, 4, 2)
    order[:, :, 1] = order[::-1, :, 1]
    order = order.reshape(8, 2)[::-1].reshape(-1)
    again = GROUPED(params(), prompt[::-1], KEYS[order], never)
    for name in ("token", "written", "taken"):
        np.testing.assert_array_equal(getattr(found, name)[order], getattr(again, name))
    np.testing.assert_allclose(found.behaviour[order], again.behaviour, atol=2e-5)
    assert len(np.unique(found.written.sum(axis=1))) > 3
    rows = prompt.repeat(2, axis=0)
    logits = quick(functools.partial(transformer.forward, CONFIG))(params(), rows, rows != tokenizer.PAD)
    scores = jax.nn.log_softmax(logits[:, -1].at[:, tokenizer.PAD].set(-jnp.inf) / 0.9)
    first = found.token[:, 0]
    np.testing.assert_allclose(found.log_prob[:, 0], scores[jnp.arange(16), first], atol=2e-5)
    assert (found.behaviour[:, 0] > found.log_prob[:, 0]).all()


@pytest.mark.slow
def test_a_completion_is_the_same_alone_and_in_a_group() -> None:
    """By two programs: of groups whose rows are filled again, and of a row for each completion."""
    bank, order = drawn_problems()[1], np.random.default_rng(0).permutation(16)
    prompt, never = bank.prompt[:8].repeat(2, axis=0), jnp.int32(sampler.UNBOUNDED)
    grouped = GROUPED(params(), bank.prompt[:8], KEYS[:16], never)
    single = quick(sampler.sampler(CONFIG, CUT))(params(), prompt[order], KEYS[order], never)
    for name in ("token", "written", "taken"):
        np.testing.assert_array_equal(getattr(grouped, name)[order], getattr(single, name))
    np.testing.assert_allclose(grouped.behaviour[order], single.behaviour, atol=2e-5)


@pytest.mark.slow
def test_a_model_on_two_devices_samples_what_one_does() -> None:
    """Split over the model axis, as `fused` has it; its prompts are on both devices."""
    mesh = meshes.make_mesh(1, 2)
    laid = jax.device_put(params(), partition.shardings(params(), mesh))
    assert laid["layers"]["gate"].sharding.shard_shape((1, 32, 48)) == (1, 32, 24)
    nowhere = jax.sharding.PartitionSpec()
    sample = meshes.per_shard(sampler.sampler(CONFIG, HOW), mesh, (nowhere,) * 4, nowhere)
    arguments = drawn_problems()[1].prompt, KEYS, jnp.int32(1)
    found, one = quick(sample)(laid, *meshes.everywhere(arguments, mesh)), drawn(1)
    np.testing.assert_array_equal(found.token, one.token)
    np.testing.assert_allclose(found.log_prob, one.log_prob, atol=2e-5)


@pytest.mark.slow
def test_the_collector_teaches_and_then_samples_in_groups() -> None:
    _, bank = drawn_problems()
    settings = sampler.Sampling(LENGTH, group=4, wave=16)
    made = sampler.collector(CONFIG, bank, settings, prompts=8)
    collect = quick(made.collect)
    assert (made.steps, made.env_steps) == (32 * LENGTH, 8 * LENGTH)
    solution = {bytes(np.asarray(p)): np.asarray(s) for p, s in zip(bank.prompt, bank.solution, strict=True)}
    for version, lesson in ((1, sampler.DEMONSTRATED), (2, sampler.SAMPLED), (3, sampler.SOLVED)):
        speaker = sampler.Speaker(params(), jnp.int32(lesson), jnp.float32(1.0))
        _, data, told = collect(speaker, (), jax.random.key(version), jnp.int32(version))
        wanted = np.stack([solution[bytes(np.asarray(prompt))] for prompt in data.prompt])
        np.testing.assert_array_equal(data.reward, verifier.rewards(wanted, data.token))
        groups = np.asarray(data.prompt).reshape(8, 4, -1)
        assert (data.lesson == lesson).all() and (data.version == version).all()
        assert (data.taught == (lesson != sampler.SAMPLED)).all()
        assert (groups == groups[:, :1]).all() == (version == 2)
        assert float(told["episode/return"]) == data.reward.sum()
        mixed = np.ptp(np.asarray(data.reward).reshape(8, 4), axis=1) > 0
        assert float(told["episode/informative"]) == 4 * mixed.sum()
        assert float(told["episode/soundness"]) == pytest.approx(float(data.soundness.sum()), rel=1e-6)
        if lesson == sampler.DEMONSTRATED:
            known = {bytes(np.asarray(row)) for row in bank.demonstration}
            assert all(bytes(np.asarray(row)) in known for row in data.token)
            assert float(told["episode/soundness"]) > 16
        if lesson == sampler.SOLVED:
            np.testing.assert_array_equal(data.token, wanted)
            assert (data.reward == 1.0).all() and (data.soundness == 1.0).all()
            _, few, _ = collect(speaker._replace(reach=jnp.float32(0.1)), (), jax.random.key(0), jnp.int32(0))
            first = {bytes(np.asarray(prompt)) for prompt in bank.prompt[:7]}
            assert {bytes(np.asarray(prompt)) for prompt in few.prompt} <= first


@pytest.mark.slow
def test_of_its_own_chains_a_verified_one_of_each_problem_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions are put in the place of sampled ones: right and sound, right by luck, sound but wrong."""
    _, bank = drawn_problems()
    lucky = jnp.where(bank.solution == tokenizer.STEP, tokenizer.CHARACTERS.index("+"), bank.solution)
    wrong = jnp.where(
        jnp.roll(bank.solution, 1, axis=1) == tokenizer.ANSWER, tokenizer.CHARACTERS.index("9"), bank.solution
    )
    written = {bytes(np.asarray(prompt)): i for i, prompt in enumerate(bank.prompt)}

    def scripted(*_: Any, **__: Any) -> Any:
        def sample(params: Any, prompt: Any, key: Any, budget: Any) -> sampler.Drawn:
            rows = np.array([written[bytes(np.asarray(each))] for each in prompt]).repeat(4)
            kinds = jnp.arange(len(rows))[:, None] % 4  # of a group: lucky, sound, sound, wrong
            text = jnp.select([kinds == 0, kinds == 3], [lucky[rows], wrong[rows]], bank.solution[rows])
            nothing = jnp.zeros(text.shape)
            return sampler.Drawn(text, text != tokenizer.PAD, text != tokenizer.PAD, nothing, nothing)

        return sample

    monkeypatch.setattr(sampler, "sampler", scripted)
    made = sampler.collector(CONFIG, bank, sampler.Sampling(LENGTH, group=4, wave=32), prompts=8)
    with jax.disable_jit():
        collect = functools.partial(made.collect, carry=(), key=jax.random.key(0), version=jnp.int32(0))
        own, sampled = (
            collect(sampler.Speaker(params(), jnp.int32(lesson), jnp.float32(1.0)))[1]
            for lesson in (sampler.OWN, sampler.SAMPLED)
        )
    assert own.reward.reshape(8, 4).tolist() == [[1.0, 1.0, 1.0, 0.0]] * 8
    assert own.taken.any(axis=1).reshape(8, 4).tolist() == [[False, True, False, False]] * 8
    assert own.taught.all()
    assert sampled.taken.any(axis=1).all()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [("temperature", -0.5, "at least 0"), ("top_k", -1, "at least 0"), ("top_p", 0.0, "above 0 and at most 1"),
     ("top_p", 1.5, "above 0 and at most 1"), ("min_p", -0.1, "at least 0"), ("min_p", 2.0, "at most 1")],
)  # fmt: skip
def test_an_impossible_draw_is_refused(name: str, value: float, remedy: str) -> None:
    with pytest.raises(FieldError, match=f"{name} is {value}; it must be {remedy}"):
        sampler.sampler(CONFIG, dataclasses.replace(HOW, **{name: value}))  # type: ignore[arg-type]


def test_solutions_longer_than_the_bank_are_named() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="--num-steps is 12, and a solution has 21 tokens"):
        sampler.bank(ARITHMETIC, drawn_problems()[0], rng, 12)
    sums = tasks.problems(tasks.countdown(), rng, 4)
    with pytest.raises(ValueError, match="--num-steps is 12, and a solution has"):
        sampler.bank(tasks.countdown(), sums, rng, 12)
    with pytest.raises(ValueError, match="temperature is 0"):
        sampler.collector(CONFIG, drawn_problems()[1], sampler.Sampling(temperature=0.0), prompts=1)


# ------------------------------------------------------------------------------------------------------- large models

WIDE = ModelConfig(width=16, layers=1, heads=1, kv_heads=1, head_dim=16, hidden=16, vocabulary=257, pad=-1)


def grouped_texts() -> tuple[jax.Array, jax.Array]:
    """Two prompts of different lengths, three completions of each."""
    rng = np.random.default_rng(0)
    prompt = np.where(np.arange(5)[None] < [[0], [2]], -1, rng.integers(0, 257, (2, 5)))
    text = np.where(np.arange(7)[None] < [[7], [3], [1], [7], [5], [2]], rng.integers(0, 257, (6, 7)), -1)
    return jnp.asarray(prompt, jnp.int32), jnp.asarray(text, jnp.int32)


@pytest.mark.slow
def test_a_prompt_read_once_for_its_group_and_a_loss_in_pieces_change_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, text = grouped_texts()
    params, counts = transformer.init(jax.random.key(0), WIDE), text >= 0

    def total(params: Any, asked: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_prob, entropy = sampler.log_probs(WIDE, params, asked, text, 0.9)
        return jnp.sum(jnp.where(counts, log_prob, 0.0)), jnp.where(counts, entropy, 0.0)

    slope = jax.value_and_grad(total, has_aux=True)
    wanted = quick(slope)(params, jnp.repeat(prompt, 3, axis=0))
    monkeypatch.setattr(sampler, "LOGITS", 5 * 257)  # five tokens at a time
    found = quick(lambda *x: slope(*x))(params, prompt)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(np.abs(b).max()))


def test_a_gpus_program_has_keys_and_values_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning, in the loop over tokens, and in the one that begins a completion."""
    monkeypatch.setenv(PLATFORM, "gpu")
    bank = drawn_problems()[1]
    there = jax.jit(sampler.sampler(CONFIG, HOW)).lower(params(), bank.prompt, KEYS, jnp.int32(sampler.UNBOUNDED))
    assert there.as_text().count("LayoutConstraint") == 3 * 2 * CONFIG.layers


@pytest.mark.slow
def test_a_gpus_program_draws_and_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, text = grouped_texts()
    wide, here, bank = transformer.init(jax.random.key(0), WIDE), drawn(sampler.UNBOUNDED), drawn_problems()[1]

    def total(params: Any) -> jax.Array:
        return jnp.sum(jnp.where(text >= 0, sampler.log_probs(WIDE, params, prompt, text, 0.9)[0], 0.0))

    wanted = quick(jax.value_and_grad(total))(wide)
    monkeypatch.setenv(PLATFORM, "gpu")
    monkeypatch.setattr(sampler, "LOGITS_WIDE", 5 * 257)  # five tokens at a time
    given = params(), bank.prompt, KEYS, jnp.int32(sampler.UNBOUNDED)
    np.testing.assert_array_equal(jax.jit(sampler.sampler(CONFIG, HOW))(*given).token, here.token)
    found = quick(jax.value_and_grad(lambda params: total(params)))(wide)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(np.abs(b).max()))


@pytest.mark.slow
def test_no_array_of_a_compiled_loss_has_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, text = grouped_texts()
    params = transformer.init(jax.random.key(0), WIDE)

    def largest(least: int) -> int:
        """Tokens whose logits the gradient's program has at a time."""
        monkeypatch.setattr(sampler, "LOGITS", least)
        slope = jax.grad(lambda p: jnp.sum(sampler.log_probs(WIDE, p, prompt, text, 1.0)[0]))
        shapes = re.findall(r"f32\[([\d,]+)\]", jax.jit(slope).lower(params).compile().as_text())
        arrays = [math.prod(map(int, shape.split(","))) for shape in shapes if "257" in shape.split(",")]
        return max(size // 257 for size in arrays)

    assert largest(2**24) >= text.size  # all at once, where the loss is small
    assert largest(5 * 257) <= max(5, WIDE.width)  # or the embedding itself


@pytest.mark.slow
def test_a_completion_ends_with_the_text_that_stops_it() -> None:
    words = tokenizer.stopped(tokenizer.BYTES, "ab")
    model = dataclasses.replace(WIDE, vocabulary=words.size)
    params = transformer.init(jax.random.key(0), model)
    forced = {**params, "embedding": params["embedding"] * 0.0}  # every token is as likely as another
    prompt = jnp.asarray([list(b"x?")] * 64, jnp.int32)
    few = [ord("a"), ord("b")]
    bias = jnp.where(jnp.isin(jnp.arange(words.size), jnp.array(few)), 0.0, transformer.NEVER)
    real, keys = draw.chosen, jax.random.split(jax.random.key(0), 64)
    sample = sampler.sampler(model, sampler.Sampling(8, 1), tokeniser=words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "chosen", lambda logits, *rest: real(logits + bias[:, None], *rest))
        drawn = quick(sample)(forced, prompt, keys, jnp.int32(sampler.UNBOUNDED))
    texts = ["".join(chr(c) for c in row if c >= 0) for row in np.asarray(drawn.token).tolist()]
    assert any(text.startswith("aab") for text in texts)  # a false start is no start
    for text in texts:
        _, found, tail = text.partition("ab")
        assert (tail == "" and found) or (len(text) == 8 and not found)
    assert [words.decode(row) for row in np.asarray(drawn.token)] == [text.partition("ab")[0] for text in texts]
