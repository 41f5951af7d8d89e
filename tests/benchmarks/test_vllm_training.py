"""The comparison of a server's completions with ours: what it shows of stand-ins that sample from our model."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import vllm_training
from longhaul.reasoning import huggingface, sampler
from tests.helpers.rollout_server import RolloutServer

CONFIG = dataclasses.replace(vllm_training.TINY, pad=-1)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words of `longhaul train` for a tiny random model, its tokeniser and its questions."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    folder = tmp_path_factory.mktemp("model")
    return [*vllm_training.tiny(folder), "--model-folder", str(folder), "--rollout-updates", "folder"]


def serving(folder: Path, temperature: float, *, told: float = 1.0, ends: bool = True) -> RolloutServer:
    """A server that samples at a temperature and reports the log-probabilities of another, with or without ends."""
    known, held = huggingface.tokeniser(folder), [huggingface.load(folder)[1]]
    draw = jax.jit(sampler.sampler(CONFIG, sampler.Sampling(4, 32, temperature), tokeniser=known))
    score = jax.jit(lambda params, asked, token: sampler.log_probs(CONFIG, params, asked, token, told)[0])

    seen, lock = Counter[tuple[int, ...]](), threading.Lock()

    def sample(prompt: list[int], count: int, most: int, seed: int) -> list[tuple[list[int], list[float], str]]:
        """Completions that depend on a prompt and how often it was asked: requests come in any order."""
        with lock:
            seen[tuple(prompt)] += 1
            keys = jax.random.split(jax.random.fold_in(jax.random.key(seen[tuple(prompt)]), sum(prompt)), count)
        asked = np.array([prompt], np.int32)
        drawn = draw(held[0], asked, keys, jnp.int32(sampler.UNBOUNDED))
        probs = np.asarray(score(held[0], asked, drawn.token))
        found = []
        for token, prob, on in zip(np.asarray(drawn.token), probs, np.asarray(drawn.written), strict=True):
            length = max(1, int(on.sum()) - (not ends and token[on][-1] in known.ends))
            found.append((token[:length].tolist(), np.minimum(prob[:length], 0.0).tolist(), "stop"))
        return found

    return RolloutServer(sample, lambda version: held.__setitem__(0, huggingface.load(version)[1]))


@pytest.mark.slow
def test_a_server_that_samples_otherwise_is_noticed(words: list[str], tmp_path: Path) -> None:
    def found(name: str, **how: Any) -> dict[str, Any]:
        with serving(Path(words[words.index("--model-folder") + 1]), **how) as server:
            return vllm_training.fixed(words, server.address, tmp_path / name, 3, 16)

    same = found("same", temperature=1.0)
    own, other = same["itself"], same["vllm"]
    assert own["tokens"] > 3 * 16 * 32 * 3 and own["ends"] > 20
    for each in (own, other):
        assert each["log_prob_off"] < 1e-4 and abs(each["surprise"]) < 4.0
    assert all(abs(each) < 4.0 for each in same["apart"].values())
    sharper = found("sharper", temperature=0.7)
    assert sharper["vllm"]["surprise"] < -8.0 and sharper["vllm"]["log_prob_off"] < 1e-4
    assert abs(sharper["itself"]["surprise"]) < 4.0
    assert found("scaled", temperature=1.0, told=0.7)["vllm"]["log_prob_off"] > 0.1
    endless = found("endless", temperature=1.0, ends=False)
    assert endless["apart"]["cut"] > 3.0, "a completion without its end counts as one that was cut"


def test_ends_of_runs_are_compared_by_their_means() -> None:
    assert vllm_training.apart(np.array([1.0, 3.0])) == 2.0
    assert vllm_training.apart(np.zeros(3)) == 0.0
    assert vllm_training.compared([0.5, 0.7], [0.2, 0.4]) == {"difference": 0.3, "standard_error": 0.1414}


def test_the_table_of_a_run_gives_its_quality() -> None:
    table = (
        "policy     length  pass_at_1  episodes\ntrained    3.1     0.738      64\nuntrained  4.0     0.383      64\n"
    )
    assert vllm_training.quality(table) == {"pass_at_1_trained": 0.738, "pass_at_1_untrained": 0.383}
    assert vllm_training.quality("trained for 3 s") == {}
