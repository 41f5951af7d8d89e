"""A language model in Python writes what the full forward says, in its template, within bounds; and goes out again."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longhaul
from longhaul.algorithms.config import GRPOConfig
from longhaul.config import resolve as runs
from longhaul.config.run import Run
from longhaul.reasoning import huggingface, transformer
from longhaul.reasoning.config import ModelConfig, Reasoning
from longhaul.runtime.errors import RunError
from longhaul.training.language_model import LanguageModel, of_run
from tests.helpers import small_chat
from tests.helpers.quick import language_model, quick

ROOM = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    small_chat.write(made)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LanguageModel]:
    made = longhaul.language_model(folder)
    yield made
    made.close()


@quick
def scores(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    config = dataclasses.replace(small_chat.CONFIG, vocabulary=params["embedding"].shape[0])
    return jax.nn.log_softmax(transformer.forward(config, params, tokens, mask))


def oracle(model: LanguageModel, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Log-probabilities [N, V] at each token of a completion, by the full forward."""
    whole, count = np.zeros((1, ROOM), np.int32), len(prompt) + len(tokens)
    whole[0, :count] = prompt + tokens
    params = jax.tree.map(jnp.asarray, model.params)
    return np.asarray(scores(params, whole, np.arange(ROOM)[None] < count))[0, len(prompt) - 1 : count - 1]


def test_completions_are_the_likeliest_by_the_full_forward(model: LanguageModel) -> None:
    (first,), (second,) = model.complete(["How are", "3+4="], max_tokens=12)
    for prompt, row in (("How are", first), ("3+4=", second)):
        found = oracle(model, model.tokeniser.encode(prompt), row.tokens)
        assert row.tokens == found.argmax(axis=1).tolist() and len(row.tokens) == 12
        np.testing.assert_allclose(row.log_probs, found.max(axis=1), atol=1e-4)
        assert (row.text, row.finish) == (model.tokeniser.decode(row.tokens), "length")


def test_a_question_is_read_as_it_stands_and_a_conversation_in_the_template(model: LanguageModel) -> None:
    asked = "3+4="
    assert model(asked, max_tokens=8) == model.complete(asked, max_tokens=8)[0][0].text
    assert model([asked, "x"], max_tokens=8)[0] == model(asked, max_tokens=8)
    turns = [{"role": "user", "content": asked}]
    conversation = huggingface.conversation(Path(model.source))(turns)
    assert len(conversation) > len(model.tokeniser.encode(asked))
    reply = model.chat(turns, max_tokens=8)
    numbers: list[int] = []
    for _ in range(8):
        numbers.append(int(oracle(model, conversation, [*numbers, 0])[-1].argmax()))
    assert reply == model.tokeniser.decode(numbers)


def test_draws_are_many_and_the_same_by_their_seed(model: LanguageModel) -> None:
    (rows,) = model.complete("abc", n=4, temperature=1.0, max_tokens=6, seed=3)
    assert len({row.text for row in rows}) > 1
    assert model.complete("abc", n=4, temperature=1.0, max_tokens=6, seed=3) == [rows]
    assert model.complete("abc", n=4, temperature=1.0, max_tokens=6, seed=4) != [rows]


def test_a_stop_ends_a_completion_and_is_not_in_it(model: LanguageModel) -> None:
    whole = model("How are", max_tokens=12)
    assert isinstance(whole, str)
    row = model.complete("How are", max_tokens=12, stop=whole[4])[0][0]
    assert (row.text, row.finish) == (whole.partition(whole[4])[0], "stop")


def test_a_run_writes_as_long_as_it_was_trained_and_ends_at_its_stop() -> None:
    config = ModelConfig(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, hidden=16)
    algorithm = GRPOConfig(model=config, group=4)
    sizes: dict[str, Any] = {"num_envs": 2, "num_steps": 24, "total_steps": 24 * 8, "devices": 1}
    run = runs.resolve(Run("small", environment=Reasoning(), algorithm=algorithm, **sizes))
    assert isinstance(run.algorithm, GRPOConfig)
    model = LanguageModel(of_run("mine", run, language_model(run.algorithm.model)))
    row = model.complete("3+4-2=")[0][0]
    assert len(row.tokens) == 24 or row.finish == "stop"
    with pytest.raises(RunError, match="mine has no chat template"):
        model.chat([{"role": "user", "content": "3"}])
    with pytest.raises(RunError, match="'hello' can't be read: 'h' is no character of the vocabulary"):
        model("hello")
    model.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n": 0}, "n is 0; it must be a whole number, 1 at least"),
        ({"n": 4}, "n is 4 at temperature 0, where all completions are the same; give a temperature"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be 0, or 0.001 to 100"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0, and at most 1"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number, 1 at least"),
        ({"max_tokens": 1 << 20}, "a prompt has 3 tokens, and max_tokens is 1048576: more than the model's context"),
        ({"stop": [""]}, "stop has an empty text; leave it out"),
        ({"stop": [3]}, "stop is 3; it must be a text, or a list of texts"),
        ({"seed": -1}, "seed is -1; it must be a whole number, 0 at least"),
    ],
)
def test_impossible_settings_are_one_line(model: LanguageModel, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words.replace("(", r"\(")):
        model.complete("abc", **settings)


def test_what_is_no_text_is_one_line(model: LanguageModel) -> None:
    with pytest.raises(RunError, match="'' has no token; give a text"):
        model("")
    with pytest.raises(RunError, match="question is 3; it must be a text"):
        model([3])  # type: ignore[list-item]
    with pytest.raises(RunError, match=r"messages is .*; it must be a list of"):
        model.chat([{"role": "user"}])
    with pytest.raises(RunError, match="nowhere"):
        longhaul.language_model("nowhere")


def test_a_folder_that_lacks_a_file_is_one_line(model: LanguageModel, tmp_path: Path) -> None:
    out = model.export(tmp_path / "out")
    (out / "tokenizer.json").unlink()
    with pytest.raises(RunError, match=r"tokenizer.json is not there; give the folder of a model"):
        longhaul.language_model(out)
    (out / "config.json").unlink()
    with pytest.raises(RunError, match=r"config.json is not there; give a folder with config.json and"):
        longhaul.language_model(out)


def test_closed_it_holds_no_engine_and_writes_on(model: LanguageModel) -> None:
    before = model("abc", max_tokens=4)
    engine = weakref.ref(model._engine)
    model.close()
    gc.collect()
    assert engine() is None
    assert model("abc", max_tokens=4) == before


def test_it_is_not_pickled(model: LanguageModel) -> None:
    with pytest.raises(TypeError, match=r"load it where it is needed: longhaul.language_model\(RUN\)"):
        pickle.dumps(model)


def test_a_script_that_has_had_a_conversation_ends_without_a_word(folder: Path) -> None:
    program = (
        "import sys\nfrom longhaul.reasoning import huggingface\n"
        "ask = huggingface.conversation(sys.argv[1])\n"
        "assert ask([{'role': 'user', 'content': 'Hi'}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_exported_model_writes_the_same(model: LanguageModel, tmp_path: Path) -> None:
    again = longhaul.language_model(model.export(tmp_path / "out"))
    assert again.complete(["abc", "x"], max_tokens=8) == model.complete(["abc", "x"], max_tokens=8)
    assert again.chat([{"role": "user", "content": "x"}], max_tokens=4)
    again.close()
