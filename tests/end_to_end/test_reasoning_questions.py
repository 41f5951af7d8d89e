"""Runs whose completions the host checks: a loaded model on a file of questions, countdown, and what can't be."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms.config import GRPOConfig
from longhaul.cli import reason
from longhaul.config import recipes
from longhaul.config import resolve as runs
from longhaul.config.run import Run
from longhaul.reasoning import host_verifier, huggingface, problem_sets, sampler, tasks, tokenizer, transformer
from longhaul.reasoning.config import ModelConfig, Reasoning
from longhaul.runtime.errors import RunError
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.training import evaluate, load_policy, reasoning_setup
from tests.helpers.small_runs import begin, make_quick, records

WORDS = ("<end>", "<none>", "what", "is", "more", "than", "?", "one", "two", "three", "####", *"12345")
MODEL = ModelConfig("qwen2", len(WORDS), 16, 1, 2, 1, 8, 16)
LENGTH = 4


@pytest.fixture(scope="module", autouse=True)
def _programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model in Hugging Face's files, with its tokeniser, and a file of questions."""
    made = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    folder = tmp_path_factory.mktemp("model")
    huggingface.save(folder, MODEL, transformer.init(jax.random.key(7), MODEL))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0]}')
    inner = made.Tokenizer(made.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<none>"))
    inner.pre_tokenizer = made.pre_tokenizers.Whitespace()
    inner.save(str(folder / "tokenizer.json"))
    numbers = {"one": 1, "two": 2, "three": 3}
    rows = [
        {"question": f"what is {a} more than {b} ?", "answer": f"#### {x + y}"}
        for a, x in numbers.items() for b, y in numbers.items() if x + y < 6
    ]  # fmt: skip
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def asking(folder: Path, **changes: Any) -> Run:
    """60 updates of 8 questions, 8 completions of each, in one thread."""
    settings: dict[str, Any] = {
        "environment": Reasoning(task="questions", questions=str(folder / "sums.jsonl"), template="{question}"),
        "algorithm": GRPOConfig(model_folder=str(folder), group=8, lr=2e-2, warmup=0, num_minibatches=1),
        "topology": "actors", "acting": ActorConfig(1, "thread"), "total_steps": 60 * 64 * LENGTH, "num_envs": 8,
        "num_steps": LENGTH, "devices": 1, "log_interval": 1, "evaluation_episodes": 2,
    }  # fmt: skip
    return runs.resolve(Run("small-questions", **(settings | changes)))


def test_a_loaded_model_learns_from_questions_that_the_host_checks(folder: Path, tmp_path: Path) -> None:
    """Six are trained on, two held out. It begins with the files' weights, and learns which number answers what."""
    run = asking(folder)
    assert begin(run, tmp_path / "run").code == 0
    found = records(tmp_path / "run")
    rewards = [row["episode/return"] for row in found]
    assert np.mean(rewards[:5]) < 0.35 < 0.55 < np.mean(rewards[-10:])
    assert max(row["grpo/mismatch"] for row in found) < 1e-4
    stored, trained, untrained = load_policy.restore_policy(tmp_path / "run")
    assert stored == run
    jax.tree.map(np.testing.assert_array_equal, untrained.params, huggingface.load(folder)[1])
    assert not np.array_equal(trained.params["embedding"], untrained.params["embedding"])


@pytest.mark.slow
def test_a_run_two_updates_behind_ends_no_lower_than_one_that_is_not(folder: Path, tmp_path: Path) -> None:
    """From rewards alone, two threads, two seeds each; but for noise, of which so few questions make much."""
    algorithm = GRPOConfig(model_folder=str(folder), group=8, lr=1e-2, warmup=0, num_minibatches=1)
    ends: dict[int, list[float]] = {0: [], 2: []}
    for seed in (0, 1):
        for staleness, found in ends.items():
            acting, steps = ActorConfig(2, "thread", staleness), 120 * 64 * LENGTH
            run = asking(folder, algorithm=algorithm, acting=acting, seed=seed, total_steps=steps)
            assert begin(run, tmp_path / f"{staleness}-{seed}").code == 0
            rows = records(tmp_path / f"{staleness}-{seed}")
            assert max(row["actors/staleness_max"] for row in rows) == staleness
            assert np.mean([row["episode/return"] for row in rows[:5]]) < 0.35
            found.append(float(np.mean([row["episode/return"] for row in rows[-20:]])))
    assert min(ends[0] + ends[2]) > 0.6, ends
    assert np.mean(ends[2]) > np.mean(ends[0]) - 0.15, ends


@pytest.mark.slow
def test_a_run_on_questions_is_evaluated_and_asked(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = asking(folder, total_steps=2 * 64 * LENGTH)
    assert begin(run, tmp_path / "run").code == 0
    _, trained, _ = load_policy.restore_policy(tmp_path / "run")
    scores, chains = evaluate.reasoner(run, 2)(trained)
    assert [chain["prompt"] for chain in chains] == [each.prompt for each in problem_sets.held_out(run.environment, 2)]
    assert scores.means()["pass_at_k"] >= scores.means()["pass_at_1"]
    known, other = json.loads((folder / "sums.jsonl").read_text().splitlines()[0])["question"], "what is two ?"
    assert reason.reason([str(tmp_path / "run"), known, other, "--samples", "4"]) == 0
    shown = capsys.readouterr().out
    assert known in shown and other in shown
    assert "  ?" in shown.split(other)[1].split("votes")[0].rsplit("\n", 2)[1]  # nobody knows what is right


# --------------------------------------------------------------------------------------------------- host and device


ARITHMETIC = tasks.arithmetic(1, 3, direct=0.0, noise=0.2)
CHARACTERS = ModelConfig(width=16, layers=1, heads=1, kv_heads=1, head_dim=16, hidden=16)


def test_the_host_marks_completions_as_the_device_does() -> None:
    """A task with one right answer, checked by both: own samples, demonstrations, and own chains to be imitated."""
    rng = np.random.default_rng(0)
    asked = tasks.problems(ARITHMETIC, rng, 12)
    bank = sampler.bank(ARITHMETIC, asked, rng, 21)
    how = sampler.Sampling(21, group=4, temperature=0.5, wave=32)
    params = transformer.init(jax.random.key(0), CHARACTERS)
    mark = host_verifier.marking(ARITHMETIC, asked, tokenizer.TOKENISER, how.group)

    @jax.jit
    def both(lesson: jax.Array) -> Any:
        speaker = sampler.Speaker(params, lesson, jnp.float32(1.0))
        return [
            sampler.collector(CHARACTERS, bank, how, prompts=8, exact=exact).collect(
                speaker, (), jax.random.key(1), jnp.int32(3)
            )[1:]
            for exact in (True, False)
        ]

    for lesson in (sampler.DEMONSTRATED, sampler.SAMPLED, sampler.OWN):
        device, raw = jax.device_get(both(jnp.int32(lesson)))
        assert not raw[0].reward.any()
        host = mark(*raw)
        jax.tree.map(np.testing.assert_array_equal, host, device)
        assert [x.dtype for x in jax.tree.leaves(host)] == [x.dtype for x in jax.tree.leaves(raw)]
        assert device[0].reward.any() or lesson != sampler.DEMONSTRATED


def test_quality_is_the_same_on_the_host() -> None:
    asked = [tasks.Problem("3+4-2=", "0", ("3+4=2", "2-2=0")), tasks.Problem("1+1=", "2", ("1+1=2",))]
    texts = ["3+4=2;2-2=0;>0$", ">1$", ">1$", "3+4=2;", ">4$", "1+1=2;>2$", ">2$", ">0$"]
    rows = [tokenizer.encode(text) for text in texts]
    token = jnp.array([row + [tokenizer.PAD] * (21 - len(row)) for row in rows], jnp.int32)
    drawn = sampler.Drawn(token, token != tokenizer.PAD, token != tokenizer.PAD, jnp.zeros(token.shape))
    found = host_verifier.quality(ARITHMETIC, asked, jax.device_get(drawn), tokenizer.TOKENISER, 4)
    assert found.pass_at_1.tolist() == [0.25, 0.5]
    assert found.majority_at_k.tolist() == [0.0, 1.0]
    assert found.pass_at_k.tolist() == [1.0, 1.0]
    assert found.soundness.tolist() == [0.375, 0.25]
    assert found.truncated.tolist() == [0.25, 0.0]
    assert found.steps.tolist() == [0.75, 0.25]


def test_a_reward_that_is_no_number_is_named() -> None:
    odd = ARITHMETIC._replace(reward=lambda problem, completion: float("nan"))
    with pytest.raises(ValueError, match=r"the checker of arithmetic gives nan for '>1\$'; a reward must be finite"):
        host_verifier.marks(odd, [tasks.Problem("1+1=", "2")], [">1$"])


# ----------------------------------------------------------------------------------------------------------- refusals


def test_bytes_are_the_words_of_a_model_without_files(folder: Path) -> None:
    run = asking(folder, algorithm=GRPOConfig(group=8), num_steps=5, total_steps=64 * 5)
    assert isinstance(run.algorithm, GRPOConfig)
    assert (run.algorithm.model.vocabulary, run.algorithm.model.pad) == (257, -1)
    words = reasoning_setup.words(run)
    assert words.decode([*words.encode("né ∑ 3"), tokenizer.BYTE_END, 65]) == "né ∑ 3"
    bank = reasoning_setup.bank(run)
    assert bank.prompt.shape[0] == 6
    assert {words.decode(row) for row in np.asarray(bank.demonstration)} == {"#### "}  # cut at the length


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topology": "fused"}, "--task questions is checked on the host; give --topology actors"),
        ({"algorithm": GRPOConfig(model_folder="/nowhere")}, "/nowhere/tokenizer.json is not there"),
        ({"environment": Reasoning(task="questions", template="Q:")}, r"--template is 'Q:'; it must have {question}"),
        ({"environment": Reasoning(task="countdown", fewest=1, most=1, held_out_fewest=1)}, "--most is 1; countdown"),
        ({"environment": Reasoning()}, "problems of --task arithmetic are written in 23 characters"),
    ],
)
def test_what_can_not_be_is_one_line(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        asking(folder, **changes)


@pytest.mark.parametrize(
    ("task", "held", "words"),
    [
        ({"questions": ""}, 2, "--task questions: no file is given; give --questions FILE.jsonl"),
        ({"questions": "/nowhere.jsonl"}, 2, "/nowhere.jsonl: .* give a JSONL file"),
        ({}, 8, "sums has 8 questions, and all are held out; give --evaluation-episodes fewer"),
        ({}, 9, "sums has 8 questions, and 9 are to be held out; give --evaluation-episodes fewer"),
        ({"check": "what"}, 2, "check is 'what'; it must be numeric, exact, or package.module:function"),
    ],
)
def test_a_file_that_will_not_do_is_one_line(folder: Path, task: dict[str, Any], held: int, words: str) -> None:
    run = asking(folder, evaluation_episodes=held, algorithm=GRPOConfig(group=8))
    with pytest.raises(RunError, match=words):
        reasoning_setup.bank(dataclasses.replace(run, environment=dataclasses.replace(run.environment, **task)))


def test_another_file_may_be_held_out(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(json.dumps({"question": "what is one ?", "answer": "#### 1"}))
    run = asking(folder, evaluation_episodes=1)
    assert isinstance(run.environment, Reasoning)
    task = dataclasses.replace(run.environment, held_out_questions=str(tmp_path / "other.jsonl"))
    assert [each.prompt for each in problem_sets.held_out(task, 1)] == ["what is one ?"]
    assert len(problem_sets.asked(task, np.random.default_rng(0), 1)) == 8


def test_the_recipe_asks_for_a_file() -> None:
    with pytest.raises(RunError, match="give --questions FILE"):
        reasoning_setup.bank(runs.resolve(recipes.recipe("reasoning-questions")))


@pytest.mark.slow
def test_countdown_is_imitated_and_rewarded(tmp_path: Path) -> None:
    """Two numbers: imitation alone learns to answer, of which the host says what is right."""
    run = runs.resolve(Run(
        "small-countdown", Reasoning(task="countdown", most=2, problems=512),
        GRPOConfig(model=ModelConfig(), group=8, taught=60), topology="actors", acting=ActorConfig(1, "thread"),
        total_steps=80 * 64 * 16, num_envs=8, num_steps=16, devices=1, log_interval=1, evaluation_episodes=16,
    ))  # fmt: skip
    assert begin(run, tmp_path / "run").code == 0
    taught, own = ([row for row in records(tmp_path / "run") if row["grpo/taught"] == lesson] for lesson in (1.0, 0.0))
    assert 0.4 < np.mean([row["episode/return"] for row in taught]) < 0.9  # half of them miss the target
    assert np.mean([row["episode/return"] for row in own[-5:]]) > 0.2
    assert np.mean([row["episode/soundness"] for row in own[-5:]]) > 0.3
