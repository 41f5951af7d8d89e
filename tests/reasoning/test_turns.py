"""Completions of several turns: what stands behind a mark, and that it is not the policy's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import grpo
from longhaul.algorithms.config import GRPOConfig
from longhaul.reasoning import sampler, tokenizer, transformer, turns
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.sampler import UNBOUNDED, Completions, Drawn
from longhaul.reasoning.tokenizer import Budget, Tokeniser
from longhaul.runtime import device_memory

LETTERS = "abcdef"
MODEL = ModelConfig(width=16, layers=1, heads=1, kv_heads=1, head_dim=16, hidden=16, vocabulary=6, pad=-1)
ROWS, ROOM, LENGTH = 64, 3, 12


def spell(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def letters(numbers: object) -> str:
    return "".join(LETTERS[n] for n in tokenizer.cut(numbers, (5,)))  # type: ignore[arg-type]


WORDS = Tokeniser(6, spell, letters, ends=(5,))


def completions(words: Tokeniser) -> tuple[transformer.Params, np.ndarray, Drawn, Drawn]:
    """(parameters, prompts, first turns, all turns)."""
    params = transformer.init(jax.random.key(0), MODEL)
    prompt = np.array([[-1, *spell("ab")], spell("cab")] * (ROWS // 2), np.int32)
    how = sampler.Sampling(LENGTH, 1, wave=ROWS)
    first, keys = jax.jit(sampler.sampler(MODEL, how, tokeniser=words)), jax.random.split(jax.random.key(1), ROWS)
    drawn = jax.device_get(first(params, prompt, keys, jnp.int32(UNBOUNDED)))
    on = turns.continuing(MODEL, how, words).go_on
    return params, prompt, drawn, on(params, prompt, drawn, keys)


@pytest.mark.slow
def test_a_reply_stands_behind_each_mark_and_is_not_the_policys() -> None:
    """The log-probabilities of sampling are the learner's of the whole text, and a reply has no gradient, exactly."""
    asked: list[str] = []

    def reply(text: str) -> str:
        asked.append(text)
        return "bb"

    params, prompt, first, whole = completions(tokenizer.stopped(WORDS, replies={"c": reply}))
    texts = [letters(row) for row in whole.token]
    assert sum("c" in text for text in texts) > ROWS // 4
    assert all(text.endswith("c") for text in asked)
    assert max(text.count("c") for text in texts) > 1
    for text, taken, written in zip(texts, whole.taken, whole.written, strict=True):
        for place in range(len(text)):
            behind = "c" in text[max(0, place - 2) : place]
            assert taken[place] == (not behind)
            assert not behind or text[place] == "b"
        ended = 5 if len(text) < LENGTH else None
        assert written.sum() == len(text) + (ended is not None)
    np.testing.assert_array_equal(whole.log_prob[whole.written & ~whole.taken], 0.0)
    known, _ = sampler.log_probs(MODEL, params, jnp.asarray(prompt), jnp.asarray(whole.token), 1.0)
    np.testing.assert_allclose(np.where(whole.taken, known, 0.0), whole.log_prob, atol=1e-5)

    config = GRPOConfig(model=MODEL, group=4, kl_coef=0.1, correction="truncate")
    zeros, count = jnp.zeros(ROWS), jnp.zeros(ROWS, jnp.int32)
    reward = jnp.arange(ROWS, dtype=jnp.float32) % 4
    data = Completions(jnp.asarray(prompt), *map(jnp.asarray, whole), reward, zeros, count, count, count, zeros > 0)  # type: ignore[arg-type]
    batch = grpo._batch(config, data, params)
    weighed = batch._replace(weight=grpo.weights(batch.weight, jnp.any(batch.weight, axis=1), "token", lambda x: x))
    reads = grpo.log_probs

    def of_nudged(nudge: jax.Array) -> jax.Array:
        def nudged(*given: object) -> tuple[jax.Array, jax.Array]:
            found, entropy = reads(*given)  # type: ignore[arg-type]
            return found + nudge, entropy

        grpo.log_probs = nudged
        try:
            return grpo.objective(dataclasses.replace(config))(params, weighed)[0]
        finally:
            grpo.log_probs = reads

    gradient = np.asarray(jax.grad(of_nudged)(jnp.zeros((ROWS, LENGTH))))
    assert (gradient[~whole.taken] == 0.0).all()
    assert (gradient[whole.taken] != 0.0).mean() > 0.9
    assert (first.token != whole.token).any()


@pytest.mark.slow
def test_a_budget_of_steps_puts_the_answers_mark_behind_the_last() -> None:
    for most in (1, 2):
        made = tokenizer.stopped(WORDS, replies={"c": Budget(most, "c", "eb").reply})
        _, _, _, whole = completions(made)
        texts = [letters(row) for row in whole.token]
        stepped = [text for text in texts if text[:-2].count("c") >= most and "eb" not in text[: text.index("c")]]
        assert len(stepped) > ROWS // 8
        for text in stepped:
            place = [n for n, letter in enumerate(text) if letter == "c"][most - 1]
            assert "eb" in text[: place + 3]


def test_without_marks_a_completion_is_left_alone() -> None:
    first = Drawn(*(jnp.zeros((ROWS, LENGTH)) for _ in Drawn._fields))
    on = turns.continuing(MODEL, sampler.Sampling(LENGTH, 1, wave=ROWS), WORDS).go_on
    assert on({}, np.zeros((ROWS, ROOM), np.int32), first, jax.random.split(jax.random.key(1), ROWS)) is first


def test_the_program_compiled_ahead_by_shapes_serves_later_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[jax.stages.Compiled] = []
    compiled = device_memory.compiled

    def noted(*given: object) -> jax.stages.Compiled:
        made.append(compiled(*given))
        return made[-1]

    monkeypatch.setattr(device_memory, "compiled", noted)
    words = tokenizer.stopped(WORDS, replies={"c": lambda text: "bb"})
    later = turns.continuing(MODEL, sampler.Sampling(LENGTH, 1, wave=ROWS), words)
    ahead = later.program(jax.eval_shape(lambda: transformer.init(jax.random.key(0), MODEL)), (4, ROOM))
    token, zeros = np.full((4, LENGTH), -1, np.int32), np.zeros((4, LENGTH), np.float32)
    token[:, 0] = spell("c")
    first = Drawn(jnp.asarray(token), jnp.asarray(token >= 0), jnp.asarray(token >= 0), zeros, zeros)  # type: ignore[arg-type]
    keys = jax.random.split(jax.random.key(1), 4)
    whole = later.go_on(transformer.init(jax.random.key(0), MODEL), np.zeros((4, ROOM), np.int32), first, keys)
    assert made == [ahead]
    assert [letters(row)[:3] for row in whole.token] == 4 * ["cbb"]
    assert whole.written[:, 3].all()
