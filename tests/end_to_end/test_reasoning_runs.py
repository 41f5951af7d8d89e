"""Runs on prompts: held out is held out, quality by hand, a run that was stopped ends as one that was not; and runs
whose completions the host checks: a loaded model on a file of questions, countdown, and what can't be."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from longhaul.algorithms.config import GRPOConfig
from longhaul.cli import export, reason
from longhaul.cli.flags import FlagError
from longhaul.config import recipes
from longhaul.config import resolve as runs
from longhaul.config.run import Named, Run
from longhaul.reasoning import evaluate as quality
from longhaul.reasoning import (
    huggingface,
    problem_sets,
    rollout_servers,
    sampler,
    tasks,
    tokenizer,
    transformer,
    verifier,
)
from longhaul.reasoning.config import ModelConfig, Reasoning
from longhaul.runtime.errors import RunError
from longhaul.telemetry.aggregate import Sums
from longhaul.topologies.actor_learner.actor_pool import ActorPool
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.training import evaluate, loop, publish, reasoning_setup
from longhaul.training.checkpoint.checkpoint import Checkpoints
from longhaul.training.checkpoint.resume import restore_policy
from longhaul.training.publish import Publishing
from longhaul.weight_sync.transports import safetensors_files
from tests.helpers import small_chat
from tests.helpers.rollout_server import RolloutServer
from tests.helpers.small_runs import after, begin, checkpoints, records, result, resume, stop

TASK = Reasoning(problems=64, most=3)
MODEL = ModelConfig(width=16, layers=1, heads=1, kv_heads=1, head_dim=16, hidden=16)
LENGTH = 21
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("quick_runs")


def small(**changes: Any) -> Run:
    """Six updates of 2 problems in calls of 1, the first two of them taught; a checkpoint every 2."""
    settings: dict[str, Any] = {
        "environment": TASK,
        "algorithm": GRPOConfig(model=MODEL, group=4, taught=2, lr_taught=1e-2, lr=1e-2),
        "total_steps": 6 * 8 * LENGTH,
        "num_envs": 2,
        "num_steps": LENGTH,
        "devices": 1,
        "block": 1,
        "log_interval": 1,
        "save_interval": 2,
        "evaluation_episodes": 8,
    }
    return runs.resolve(Run("small-reasoning", **(settings | changes)))


@pytest.mark.slow
@pytest.mark.parametrize("pack", [0, 64])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(pack: int, tmp_path: Path) -> None:
    run = small(algorithm=dataclasses.replace(small().algorithm, pack=pack))
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    assert begin(run, whole).code == 0
    found = records(whole)
    assert [record["grpo/taught"] for record in found] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert all(record["grpo/mismatch"] < 1e-5 for record in found)
    stop(run, folder)  # in the warm start
    stop(run, folder)  # behind it
    assert resume(folder).code == 0
    assert records(folder) == found
    assert result(folder) == result(whole)
    assert len(result(folder)["params_sha256"]) == 64


@pytest.mark.slow
def test_the_curve_of_a_run_is_the_same_by_the_device_and_by_the_host(tmp_path: Path) -> None:
    """All samples vote on the device for the curve, and as chains on the host for the early stop."""
    assert begin(small(), tmp_path / "run").code == 0
    words = [str(tmp_path / "run"), "--curve", "12", "--samples", "4", "--wave", "1", "--temperature", "0.5"]
    assert reason.reason([*words, "--json", str(tmp_path / "curve.json")]) == 0
    told = json.loads((tmp_path / "curve.json").read_text())
    assert [row["steps"] for row in told["budgets"]] == [0, 1, 2, 3]
    assert [row["samples"] for row in told["samples"]] == [1, 2, 4]
    one, _, four = told["samples"]
    assert one["majority"] == one["some"]
    assert four["majority"] == pytest.approx(told["stop"]["full"])
    assert four["some"] >= max(one["some"], four["majority"])
    assert 1.0 <= told["stop"]["drawn"] == pytest.approx(4 * told["stop"]["share"])
    for odd, remedy in ((["--steps", "2"], "leave --steps out"), (["1+1="], "leave PROBLEM out")):
        with pytest.raises(FlagError, match=remedy):
            reason.reason([words[0], *odd, *words[1:]])


@pytest.mark.slow
def test_samplers_in_processes_change_no_number_also_when_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Against two threads, whose programs are the same; one process is killed in the middle of 20 updates."""
    sizes: dict[str, Any] = {"topology": "actors", "total_steps": 20 * 8 * LENGTH}
    assert begin(small(acting=ActorConfig(2, "thread"), **sizes), tmp_path / "threads").code == 0

    def kill() -> None:
        told = json.loads((tmp_path / "processes" / "live.json").read_text())
        os.kill(told["actors"][1]["process"], signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(Sums, "add", after(8, kill, Sums.add))
        assert begin(small(acting=ActorConfig(2, "process"), **sizes), tmp_path / "processes").code == 0
    assert "actor 1: it was ended by SIGKILL" in capfd.readouterr().err
    one, other = ([row["episode/return"] for row in records(tmp_path / name)] for name in ("threads", "processes"))
    assert one == other
    assert result(tmp_path / "threads")["params_sha256"] == result(tmp_path / "processes")["params_sha256"]


@pytest.mark.slow
def test_a_learner_that_is_killed_and_goes_on_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """Two processes sample with weights of two updates before; the learner is killed behind its third checkpoint."""
    run = small(topology="actors", acting=ActorConfig(2, "process", 2, True), total_steps=20 * 8 * LENGTH)
    assert begin(run, tmp_path / "whole").code == 0
    folder = tmp_path / "killed"
    program = f"""
import os, signal
from pathlib import Path
from longhaul.training.checkpoint.checkpoint import Checkpoints
from tests.end_to_end import test_reasoning_runs as here
from tests.helpers import small_chat
from tests.helpers.small_runs import after, begin

Checkpoints.wait = after(4, lambda: os.kill(os.getpid(), signal.SIGKILL), Checkpoints.wait)
run = here.small(topology="actors", acting=here.ActorConfig(2, "process", 2, True), total_steps=20 * 8 * here.LENGTH)
begin(run, Path({str(folder)!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert 0 < max(checkpoints(folder)) < 20
    assert not (folder / "result.json").exists()
    assert resume(folder).code == 0
    told = [
        [{k: v for k, v in row.items() if not k.startswith("actors/")} for row in records(where)]
        for where in (folder, tmp_path / "whole")
    ]
    assert told[0] == told[1]
    assert result(folder)["params_sha256"] == result(tmp_path / "whole")["params_sha256"]


@pytest.mark.slow
def test_the_recipe_learns_with_a_seed_that_had_been_its_worst(tmp_path: Path) -> None:
    """Seed 4 ended at 0.572 with two heads and a rope of base 10,000: the terms of long chains were not found."""
    run = runs.resolve(dataclasses.replace(recipes.recipe("reasoning-arithmetic"), seed=4, devices=1))
    assert begin(run, tmp_path / "run").code == 0
    own = [row["episode/return"] for row in records(tmp_path / "run") if row["grpo/taught"] == 0.0]
    assert 0.6 < own[0] < 0.9 < own[-1], "demonstrations leave to rewards what these are to teach"
    scores, _ = evaluate.reasoner(run, 256)(restore_policy(tmp_path / "run")[1])
    assert scores.means()["pass_at_1"] >= 0.95


# ---------------------------------------------------------------------------------------------------------- held out


def test_no_run_trains_on_what_is_held_out() -> None:
    asked = problem_sets.held_out_problems(TASK, 40)
    never = {bytes(np.array(tokenizer.encode(problem.prompt))) for problem in asked}
    assert len(never) == 40
    assert min(len(problem.steps) for problem in asked) == 2
    banks = [problem_sets.training(TASK, seed=seed, without=40, length=LENGTH) for seed in (0, 1)]
    for bank in banks:
        prompts = {bytes(row[row != tokenizer.PAD].astype(np.int64)) for row in np.asarray(bank.prompt)}
        assert not never & prompts
    assert not np.array_equal(banks[0].prompt, banks[1].prompt)
    assert problem_sets.held_out_problems(TASK, 60)[:40] == asked  # more are asked, and the first stay


# ----------------------------------------------------------------------------------------------------------- quality


def measured(texts: list[str]) -> dict[str, list[float]]:
    """The quality of completions of "3+4-2=", and of as many of "1+1=": by the device, and so by the host."""
    task = tasks.arithmetic(1, 4)
    assert task.posed is not None
    asked = [task.posed("3+4-2="), task.posed("1+1=")]
    bank = sampler.bank(task, asked, np.random.default_rng(0), LENGTH)
    rows = [tokenizer.encode(text) for text in texts]
    token = jnp.array([row + [tokenizer.PAD] * (LENGTH - len(row)) for row in rows], jnp.int32)
    written = token != tokenizer.PAD
    drawn = sampler.Drawn(token, written, written, *[jnp.zeros(token.shape)] * 2)
    found = jax.jit(quality.quality, static_argnums=2)(bank, drawn, len(texts) // 2)
    host = quality.quality_on_host(task, asked, jax.device_get(drawn), tokenizer.TOKENISER, len(texts) // 2)
    jax.tree.map(np.testing.assert_allclose, host, jax.device_get(found))
    return {name: np.asarray(value).tolist() for name, value in found._asdict().items()}


def test_quality_is_what_a_hand_counts() -> None:
    found = measured(["3+4=2;2-2=0;>0$", ">1$", ">1$", "3+4=2;", ">4$", "1+1=2;>2$", ">2$", ">0$"])
    assert found["pass_at_1"] == [0.25, 0.5]
    assert found["pass_at_k"] == [1.0, 1.0]
    assert found["majority_at_k"] == [0.0, 1.0]
    assert found["soundness"] == [0.375, 0.25]
    assert found["reasoned"] == [0.5, 0.25]
    assert found["steps"] == [0.75, 0.25]
    assert found["truncated"] == [0.25, 0.0]
    assert found["length"] == [pytest.approx(27 / 4), pytest.approx((9 + 3 + 3 + 3) / 4)]


def test_a_perfect_policy_and_one_that_never_ends() -> None:
    perfect = measured(["3+4=2;2-2=0;>0$"] * 2 + ["1+1=2;>2$"] * 2)
    for name in ("pass_at_1", "pass_at_k", "majority_at_k", "soundness", "reasoned"):
        assert perfect[name] == [1.0, 1.0], name
    endless = measured(["3+4=2;"] * 4)
    for name in ("pass_at_1", "pass_at_k", "majority_at_k"):
        assert endless[name] == [0.0, 0.0], name
    assert endless["truncated"] == [1.0, 1.0]


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environment": dataclasses.replace(TASK, task="sudoku")}, "--task is 'sudoku'; it must be one of"),
        (
            {"environment": dataclasses.replace(TASK, task="countdown")},
            "is checked on the host; give --topology actors",
        ),
        ({"environment": dataclasses.replace(TASK, fewest=4)}, "--fewest is 4; it must lie in 1 to --most, 3"),
        ({"environment": Named("cartpole")}, "learn from prompts, and nothing else does"),
        (
            {"fsdp": True, "algorithm": GRPOConfig(model=MODEL, group=4, pack=64)},
            "--pack is 64, and --fsdp splits rows over devices; leave one of them out",
        ),
        ({"topology": "central"}, "completions are sampled by the learner, its threads or its processes"),
        ({"num_envs": 3, "algorithm": GRPOConfig(model=MODEL, group=3)}, "--num-minibatches is 2"),
        ({"algorithm": GRPOConfig(model=dataclasses.replace(MODEL, heads=0))}, "--model-heads is 0"),
    ],
)
def test_impossible_settings_of_reasoning_are_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        small(**changes)


# ---------------------------------------------------------------------------------------------- questions of a file

WORDS = ("<end>", "<none>", "what", "is", "more", "than", "?", "one", "two", "three", "####", *"12345")
READER = ModelConfig("qwen2", len(WORDS), 16, 1, 2, 1, 8, 16)
SHORT = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model in Hugging Face's files, with its tokeniser, and a file of questions."""
    made = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    files = tmp_path_factory.mktemp("model")
    huggingface.save(files, READER, transformer.init(jax.random.key(7), READER))
    (files / "generation_config.json").write_text('{"eos_token_id": [0]}')
    inner = made.Tokenizer(made.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<none>"))
    inner.pre_tokenizer = made.pre_tokenizers.Whitespace()
    inner.save(str(files / "tokenizer.json"))
    numbers = {"one": 1, "two": 2, "three": 3}
    rows = [
        {"question": f"what is {a} more than {b} ?", "answer": f"#### {x + y}"}
        for a, x in numbers.items() for b, y in numbers.items() if x + y < 6
    ]  # fmt: skip
    (files / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return files


def asking(files: Path, **changes: Any) -> Run:
    """60 updates of 8 questions, 8 completions of each, in one thread."""
    settings: dict[str, Any] = {
        "environment": Reasoning(task="questions", questions=str(files / "sums.jsonl"), template="{question}"),
        "algorithm": GRPOConfig(model_folder=str(files), group=8, lr=2e-2, warmup=0, num_minibatches=1),
        "topology": "actors", "acting": ActorConfig(1, "thread"), "total_steps": 60 * 64 * SHORT, "num_envs": 8,
        "num_steps": SHORT, "devices": 1, "log_interval": 1, "evaluation_episodes": 2,
    }  # fmt: skip
    return runs.resolve(Run("small-questions", **(settings | changes)))


def test_each_update_of_a_pretrained_model_is_recorded_and_can_be_stopped_after(files: Path) -> None:
    """Its updates take seconds: many in one call would be silent for minutes."""
    run = asking(files, log_interval=None)
    assert (run.log_interval, run.block) == (1, 1)


@pytest.mark.slow
def test_a_loaded_model_learns_from_questions_that_the_host_checks(files: Path, tmp_path: Path) -> None:
    """Six are trained on, two held out. It begins with the files' weights, and learns which number answers what."""
    run = asking(files, seed=1)
    assert begin(run, tmp_path / "run").code == 0
    found = records(tmp_path / "run")
    rewards = [row["episode/return"] for row in found]
    assert np.mean(rewards[:5]) < 0.35 < 0.4 < np.mean(rewards[-10:])
    assert max(row["grpo/mismatch"] for row in found) < 1e-4
    stored, trained, untrained = restore_policy(tmp_path / "run")
    assert stored == run
    jax.tree.map(np.testing.assert_array_equal, untrained.params, huggingface.load(files)[1])
    assert not np.array_equal(trained.params["embedding"], untrained.params["embedding"])


def serving(files: Path) -> RolloutServer:
    """A server of vLLM's routes whose model is ours, and which loads folders of versions.

    What it draws follows from the prompt and the version, whichever server is asked and when: what a run learns does
    not depend on how busy the machine is.
    """
    words, held, version = huggingface.tokeniser(files), [huggingface.load(files)[1]], [0]
    draw = jax.jit(sampler.sampler(READER, sampler.Sampling(SHORT, 8), tokeniser=words))

    def sample(prompt: list[int], count: int, most: int, seed: int) -> list[tuple[list[int], list[float], str]]:
        assert (count, most) == (8, SHORT)
        asked = np.full((1, 8), -1, np.int32)
        asked[0, -len(prompt) :] = prompt
        keys = jax.random.split(jax.random.fold_in(jax.random.key(version[0]), zlib.crc32(bytes(prompt))), 8)
        drawn = jax.device_get(draw(held[0], asked, keys, jnp.int32(sampler.UNBOUNDED)))
        return [
            (token[on].tolist(), probs[on].tolist(), "stop" if 0 in token[on] else "length")
            for token, probs, on in zip(drawn.token, drawn.log_prob, drawn.written, strict=True)
        ]

    def load(folder: str) -> None:
        held[0], version[0] = huggingface.load(folder)[1], int(folder.rpartition("-")[2])

    return RolloutServer(sample, load)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_servers_sample_learns_as_well_and_one_of_them_may_die(
    staleness: int, files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers load each version from a folder. Without staleness the learner finds their log-probabilities again,
    so they sampled with its newest weights. One fails three requests, from its 40th on."""
    monkeypatch.setattr(rollout_servers, "LONGEST_REST", 0.05)
    route = "/inference/v1/generate"
    with serving(files) as one, serving(files) as other:
        one.fault = lambda asked: "die" if asked == route and 40 <= len(one.asks(route)) < 43 else None
        acting = ActorConfig(1, "thread", staleness, rollout_servers=(one.address, other.address),
                             rollout_updates="folder", rollout_requests=2)  # fmt: skip
        # By its own thread seeds 0 to 5 end at 0.66 to 0.86 with this rate; with 1e-2 seeds 0 to 7 at 0.53 to 0.99.
        algorithm = GRPOConfig(model_folder=str(files), group=8, lr=5e-3, warmup=0, num_minibatches=1)
        run = asking(files, algorithm=algorithm, acting=acting, total_steps=120 * 64 * SHORT)
        assert begin(run, tmp_path / "run").code == 0
        asked = one.asks(route) + other.asks(route)
        assert len(asked) >= 120 * 8 + 3  # each once, but for those that failed
        versions = [body["new_version"] for body in other.asks("/update_weight_version")]
    found = records(tmp_path / "run")
    rewards = [row["episode/return"] for row in found]
    assert np.mean(rewards[:5]) < 0.35 < 0.55 < np.mean(rewards[-10:])
    assert max(row["actors/staleness_max"] for row in found) <= staleness
    assert max(row["grpo/staleness"] for row in found) <= staleness
    if staleness == 0:
        assert max(row["grpo/mismatch"] for row in found) < 1e-4
        assert [int(each.partition("-")[2]) for each in versions] == list(range(120))
    assert sum(row["actors/moved_requests"] for row in found) >= 1
    told = capfd.readouterr().err
    assert f"{one.address} gets no requests" in told and f"{one.address} is back" in told


@pytest.mark.slow
def test_a_server_that_answers_with_a_run_s_own_completions_teaches_the_same(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: prompts in the same order, ends, cuts, log-probabilities, and the learning rate's schedule."""
    kept: list[sampler.Completions] = []

    def keeping(*about: Any) -> sampler.Marking:
        mark = sampler.marking(*about)

        def keep(data: sampler.Completions, sums: Any) -> Any:
            kept.append(data)
            return mark(data, sums)

        return keep

    algorithm = GRPOConfig(model_folder=str(files), group=8, lr=1e-2, num_minibatches=1)

    def run(**acting: Any) -> Run:
        actors = ActorConfig(1, "thread", 1, **acting)
        return asking(files, algorithm=algorithm, acting=actors, total_steps=12 * 64 * SHORT)

    with monkeypatch.context() as patch:
        patch.setattr(reasoning_setup, "marking", keeping)
        assert begin(run(), tmp_path / "itself").code == 0
    rows = [row for data in kept[:12] for row in zip(data.prompt, data.token, data.log_prob, data.written, strict=True)]
    ended = sum(0 in token[on] for _, token, _, on in rows)
    assert len(rows) == 12 * 64 and 10 < ended < len(rows)
    groups = iter([rows[place : place + 8] for place in range(0, len(rows), 8)])

    def sample(prompt: list[int], count: int, most: int, seed: int) -> list[tuple[list[int], list[float], str]]:
        group = next(groups)
        assert (count, most) == (8, SHORT) and all([x for x in asked if x >= 0] == prompt for asked, *_ in group)
        return [
            (token[on].tolist(), probs[on].tolist(), "stop" if 0 in token[on] else "length")
            for _, token, probs, on in group
        ]

    with RolloutServer(sample) as server:
        acting = {"rollout_servers": (server.address,), "rollout_updates": "folder", "rollout_requests": 1}
        assert begin(run(**acting), tmp_path / "server").code == 0
    assert next(groups, None) is None
    assert result(tmp_path / "server")["params_sha256"] == result(tmp_path / "itself")["params_sha256"]
    own, other = (records(tmp_path / name) for name in ("itself", "server"))
    for name in ("episode/return", "episode/length", "episode/cut", "episode/informative", "grpo/entropy", "grpo/lr"):
        assert [row[name] for row in other] == [row[name] for row in own], name


@pytest.mark.slow
def test_a_run_whose_servers_are_all_down_says_so_while_it_waits(
    files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server comes back once the line is there, or after 100 requests."""
    monkeypatch.setattr(rollout_servers, "LONGEST_REST", 0.05)
    monkeypatch.setattr(rollout_servers, "SILENT", 0.2)
    told: list[str] = []
    deaths = itertools.count()

    def is_told() -> bool:
        told.append(capfd.readouterr().err)
        return "waits for a server, " in "".join(told)

    with serving(files) as one:
        route = "/inference/v1/generate"

        def fault(_: str) -> str | None:
            return "die" if len(one.asks(route)) >= 10 and not is_told() and next(deaths) < 100 else None

        one.fault = fault
        acting = ActorConfig(1, "thread", 0, rollout_servers=(one.address,), rollout_updates="folder")
        algorithm = GRPOConfig(model_folder=str(files), group=8, num_minibatches=1)
        run = asking(files, algorithm=algorithm, acting=acting, total_steps=3 * 64 * SHORT)
        assert begin(run, tmp_path / "run").code == 0
    assert next(deaths) < 100
    assert is_told() and f"none answers ({one.address}: " in "".join(told)
    assert len(records(tmp_path / "run")) == 3


@pytest.mark.slow
def test_a_run_two_updates_behind_ends_no_lower_than_one_that_is_not(files: Path, tmp_path: Path) -> None:
    """From rewards alone, two threads, two seeds each; but for noise, of which so few questions make much."""
    algorithm = GRPOConfig(model_folder=str(files), group=8, lr=1e-2, warmup=0, num_minibatches=1)
    ends: dict[int, list[float]] = {0: [], 2: []}
    for seed in (0, 1):
        for staleness, found in ends.items():
            acting, steps = ActorConfig(2, "thread", staleness), 120 * 64 * SHORT
            run = asking(files, algorithm=algorithm, acting=acting, seed=seed, total_steps=steps)
            assert begin(run, tmp_path / f"{staleness}-{seed}").code == 0
            rows = records(tmp_path / f"{staleness}-{seed}")
            assert max(row["actors/staleness_max"] for row in rows) == staleness
            assert np.mean([row["episode/return"] for row in rows[:5]]) < 0.35
            found.append(float(np.mean([row["episode/return"] for row in rows[-20:]])))
    assert min(ends[0] + ends[2]) > 0.6, ends
    assert np.mean(ends[2]) > np.mean(ends[0]) - 0.15, ends


@pytest.mark.slow
def test_a_run_on_questions_is_evaluated_and_asked(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = asking(files, total_steps=2 * 64 * SHORT)
    assert begin(run, tmp_path / "run").code == 0
    _, trained, _ = restore_policy(tmp_path / "run")
    scores, chains = evaluate.reasoner(run, 2)(trained)
    assert [chain["prompt"] for chain in chains] == [
        each.prompt for each in problem_sets.held_out_problems(run.environment, 2)
    ]
    assert scores.means()["pass_at_k"] >= scores.means()["pass_at_1"]
    known, other = json.loads((files / "sums.jsonl").read_text().splitlines()[0])["question"], "what is two ?"
    assert reason.reason([str(tmp_path / "run"), known, other, "--samples", "4"]) == 0
    shown = capsys.readouterr().out
    assert known in shown and other in shown
    assert "  ?" in shown.split(other)[1].split("votes")[0].rsplit("\n", 2)[1]  # nobody knows what is right


# --------------------------------------------------------------------------------------------------- host and device


ARITHMETIC = tasks.arithmetic(1, 3, direct=0.0, noise=0.2)


@pytest.mark.slow
def test_the_host_marks_completions_as_the_device_does() -> None:
    """A task with one right answer, checked by both: own samples, demonstrations, and own chains to be imitated."""
    rng = np.random.default_rng(0)
    asked = tasks.problems(ARITHMETIC, rng, 12)
    bank = sampler.bank(ARITHMETIC, asked, rng, 21)
    how = sampler.Sampling(21, group=4, temperature=0.5, wave=32)
    params = transformer.init(jax.random.key(0), MODEL)
    mark = sampler.marking(ARITHMETIC, asked, tokenizer.TOKENISER, how.group)

    @jax.jit
    def both(lesson: jax.Array) -> Any:
        speaker = sampler.Speaker(params, lesson, jnp.float32(1.0))
        return [
            sampler.collector(MODEL, bank, how, prompts=8, exact=exact).collect(
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


def test_a_reward_that_is_no_number_is_named() -> None:
    odd = ARITHMETIC._replace(reward=lambda problem, completion: float("nan"))
    with pytest.raises(ValueError, match=r"the checker of arithmetic gives nan for '>1\$'; a reward must be finite"):
        verifier.marks(odd, [tasks.Problem("1+1=", "2")], [">1$"])


def test_bytes_are_the_words_of_a_model_without_files(files: Path) -> None:
    run = asking(files, algorithm=GRPOConfig(group=8), num_steps=5, total_steps=64 * 5)
    assert isinstance(run.algorithm, GRPOConfig)
    assert (run.algorithm.model.vocabulary, run.algorithm.model.pad) == (257, -1)
    words = reasoning_setup.tokeniser(run)
    assert words.decode([*words.encode("né ∑ 3"), tokenizer.BYTE_END, 65]) == "né ∑ 3"
    bank = reasoning_setup.bank(run)
    assert bank.prompt.shape[0] == 6
    assert {words.decode(row) for row in np.asarray(bank.demonstration)} == {"#### "}  # cut at the length


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topology": "fused"}, "--task questions is checked on the host; give --topology actors"),
        ({"algorithm": GRPOConfig(model_folder="/nowhere")}, "/nowhere is not there; longhaul fetch"),
        ({"environment": Reasoning(task="questions", template="Q:")}, r"--template is 'Q:'; it must have {question}"),
        ({"environment": Reasoning(task="countdown", fewest=1, most=1, held_out_fewest=1)}, "--most is 1; countdown"),
        ({"environment": Reasoning()}, "problems of --task arithmetic are written in 23 characters"),
    ],
)
def test_impossible_settings_of_questions_are_one_line(files: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        asking(files, **changes)


@pytest.mark.parametrize(
    ("changes", "acting", "words"),
    [
        ({}, {"actor_kind": "process"}, "needs --topology actors --actor-kind thread"),
        ({}, {"rollout_servers": ("127.0.0.1:8000",)}, "'127.0.0.1:8000' is no address of a server; write http://"),
        ({"algorithm": GRPOConfig(group=8, taught=3)}, {}, "leave --taught and --gate-threshold at 0"),
        ({"algorithm": GRPOConfig(group=8, temperature=0.5)}, {}, "leave --temperature at 1"),
        ({}, {"pin": True, "staleness": 1}, "leave --pin out"),
        ({}, {"rollout_api": "sglang"}, "longhaul's backend is for vLLM; give --rollout-updates folder or none"),
        ({}, {"rollout_api": "completions", "rollout_updates": "folder"}, "give --rollout-api vllm or sglang"),
    ],
)
def test_servers_that_do_not_fit_a_run_are_one_line(
    files: Path, changes: dict[str, Any], acting: dict[str, Any], words: str
) -> None:
    asked = ActorConfig(1, **{"actor_kind": "thread", "rollout_servers": ("http://127.0.0.1:8000",)} | acting)
    with pytest.raises(RunError, match=f"--rollout-servers.* {words}"):
        asking(files, **{"algorithm": GRPOConfig(group=8)} | changes, acting=asked)


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
def test_a_file_that_will_not_do_is_one_line(files: Path, task: dict[str, Any], held: int, words: str) -> None:
    run = asking(files, evaluation_episodes=held, algorithm=GRPOConfig(group=8))
    with pytest.raises(RunError, match=words):
        reasoning_setup.bank(dataclasses.replace(run, environment=dataclasses.replace(run.environment, **task)))


def test_another_file_may_be_held_out(files: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(json.dumps({"question": "what is one ?", "answer": "#### 1"}))
    run = asking(files, evaluation_episodes=1)
    assert isinstance(run.environment, Reasoning)
    task = dataclasses.replace(run.environment, held_out_questions=str(tmp_path / "other.jsonl"))
    assert [each.prompt for each in problem_sets.held_out_problems(task, 1)] == ["what is one ?"]
    assert len(problem_sets.training_problems(task, np.random.default_rng(0), 1)) == 8


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


# ------------------------------------------------------------------------------------------------- a pretrained model


def adapting(folder: Path, updates: int = 2, **task: Any) -> Run:
    """Run on sums of reasoning-gym by LoRA of a tiny model, which is written to `folder`."""
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    small_chat.write(folder)
    sums = Reasoning(
        task="reasoning-gym:chain_sum", task_settings="min_terms=2,max_terms=2,min_digits=1,max_digits=1", problems=8,
        template="{question}", stop="\\n", chat=True, **task,
    )  # fmt: skip
    algorithm = GRPOConfig(group=4, lr=1e-2, num_minibatches=1, model_folder=str(folder), model=ModelConfig(lora=2))
    return small(
        environment=sums, algorithm=algorithm, num_steps=5, total_steps=updates * 8 * 5, topology="actors",
        acting=ActorConfig(actor_kind="thread", actors=1), evaluation_episodes=4, save_interval=None,
    )  # fmt: skip


@pytest.mark.slow
def test_a_models_folder_learns_a_task_of_reasoning_gym_and_goes_out_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By LoRA in its chat template; the exported folder answers like the run."""
    run = adapting(tmp_path / "model")
    (folder := tmp_path / "run").mkdir()
    publish.save(folder, Publishing(("run",)))
    loop.train(run, folder, resumed=False)
    stored, policy, _ = restore_policy(folder)
    assert isinstance(stored.algorithm, GRPOConfig)
    config = stored.algorithm.model
    _, loaded = huggingface.load(tmp_path / "model")
    _, kept = transformer.split(config, policy.params)
    jax.tree.map(np.testing.assert_array_equal, kept, loaded)
    assert export.export([str(folder), "--to", "hf", "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    plain, merged = huggingface.load(tmp_path / "out")
    assert export.export([str(folder), "--to", "peft", "--out", str(tmp_path / "adapters")]) == 0
    by_peft = safetensors_numpy.load_file(tmp_path / "adapters" / huggingface.ADAPTER)
    factors = json.loads((tmp_path / "adapters" / huggingface.ADAPTER_CONFIG).read_text())
    assert len(by_peft) == 2 * 7 * config.layers
    place = "model.layers.0.mlp.down_proj"  # W + alpha / r B A, in PEFT's and in Hugging Face's layout
    down, up = (by_peft[f"base_model.model.{place}.lora_{letter}.weight"] for letter in "AB")
    np.testing.assert_allclose(
        merged["layers"]["narrow"][0].T,
        loaded["layers"]["narrow"][0].T + factors["lora_alpha"] / factors["r"] * up @ down, atol=1e-6,
    )  # fmt: skip
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {"tokenizer.json", "generation_config.json"}
    latest = safetensors_files.newest(folder / "weights")
    assert latest is not None
    version = folder / "weights" / safetensors_files.folder_name(*latest)
    jax.tree.map(np.testing.assert_array_equal, huggingface.load(version), (plain, merged))
    for file in ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        assert (version / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    words, again = reasoning_setup.tokeniser(stored), huggingface.tokeniser(tmp_path / "out", chat=True)
    asked = words.ask("What is 2+3?")
    assert (asked, words.ends) == (again.ask("What is 2+3?"), again.ends)
    prompt = jnp.asarray([asked], jnp.int32)
    found, wanted = (
        transformer.forward(dataclasses.replace(made, pad=-1), params, prompt, prompt >= 0)
        for made, params in ((plain, merged), (config, policy.params))
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
def test_a_run_of_lora_and_tools_that_stops_while_it_samples_ends_as_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It saves at once, without the completions that its actor is at, and LoRA's factors alone."""
    run, take, calls = adapting(tmp_path / "model", 4, tools="calculator"), ActorPool.take, itertools.count(1)
    folder = tmp_path / "stopped"
    assert begin(run, tmp_path / "whole").code == 0

    def stopped(pool: ActorPool, leaving: Callable[[], bool]) -> Any:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return take(pool, leaving)

    with monkeypatch.context() as patch:
        patch.setattr(ActorPool, "take", stopped)
        assert begin(run, folder).code == loop.STOPPED
    assert f"SIGTERM: saved after update 2; go on with --resume {folder}\n" in capfd.readouterr().err
    assert resume(folder).code == 0
    seen = [
        [{k: v for k, v in row.items() if not k.startswith("actors/")} for row in records(where)]
        for where in (folder, tmp_path / "whole")
    ]
    assert seen[0] == seen[1]
    assert len(seen[0]) == 4
    assert result(folder)["params_sha256"] == result(tmp_path / "whole")["params_sha256"]
    with closing(Checkpoints(folder / "checkpoints")) as there:
        found = there.newest()
    assert found is not None
    saved = [name for name in found.manifest["leaves"] if name.startswith(".state.params")]
    assert len(saved) == 2 * 7 and all(name.endswith(("_down']", "_up']")) for name in saved)  # the factors alone
    config, changed = huggingface.load(tmp_path / "model")
    huggingface.save(tmp_path / "model", config, jax.tree.map(lambda x: x + 1.0, changed))
    with pytest.raises(RunError, match="checkpoint 4 adapts those of"):
        restore_policy(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "riddles"}, "--task is 'riddles'; it must be one of arithmetic"),
        ({"task": "reasoning-gym:chain_sum", "chat": True}, "--chat needs the template of a model"),
    ],
)
def test_a_task_that_is_not_there_is_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        reasoning_setup.bank(
            small(
                environment=Reasoning(problems=4, **changes), algorithm=GRPOConfig(group=4, model=MODEL),
                topology="actors", acting=ActorConfig(actor_kind="thread", actors=1),
            )
        )  # fmt: skip


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("model.safetensors", None, "model.safetensors is not there; give a folder with config.json"),
        ("tokenizer.json", None, "tokenizer.json is not there"),
        ("config.json", None, "give a folder with config.json"),
        ("config.json", {"model_type": "mamba"}, "model_type is 'mamba'; it must be one of llama"),
        ("config.json", {"vocab_size": 100}, "a tokeniser of 258 tokens and a model of 100; they must be of one model"),
        ("generation_config.json", {"eos_token_id": [1, 300]}, "has no token 300, which ends a text of this model"),
        ("tokenizer_config.json", {"eos_token": "</s>"}, "has no token '</s>', which ends a text of this model"),
        ("tokenizer_config.json", {"chat_template": "{{ messages[7] }"}, "the chat template fails: "),
        ("", None, "is not there; longhaul fetch smollm2-135m writes one"),
    ],
)
def test_a_models_folder_that_will_not_do_is_one_line(
    tmp_path: Path, file: str, fields: dict[str, Any] | None, words: str
) -> None:
    """Before anything is compiled."""
    folder = tmp_path / "model"
    if file:
        small_chat.write(folder)
        path = folder / file
        if fields is None:
            path.unlink()
        else:
            path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    asked = Reasoning(task="reasoning-gym:chain_sum", chat=True)
    with pytest.raises(RunError, match=words) as caught:
        small(environment=asked, algorithm=GRPOConfig(model_folder=str(folder)), topology="actors")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "words"), [("calculate", "is no tool; give calculator"), ("json:load_all", "has no load_all")]
)
def test_a_tool_that_is_not_there_is_one_line(name: str, words: str) -> None:
    with pytest.raises(RunError, match=f"--tools: .*{words}"):
        small(environment=Reasoning(task="reasoning-gym:chain_sum", tools=name), topology="actors")
