"""GRPO that a real vLLM samples, which is killed in the middle, beside the run that samples itself.

    python -m benchmarks.vllm_training --python VLLM_PYTHON [--json FILE] [--away 30] [--seeds 0 1]
    python -m benchmarks.vllm_training --python VLLM_PYTHON --model smollm2-135m --updates 24

VLLM_PYTHON is a Python with vLLM and this package. The first line is of a tiny random model that learns sums in words
from six questions; the second is the recipe `reasoning-smollm`. Both runs of a seed are one update behind
(`--staleness 1`). Once half of the updates are done the server is killed, and started again after `--away` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import results
from benchmarks.vllm_updates import ONE_CORE, ROOT
from longhaul.reasoning import huggingface, transformer
from longhaul.reasoning.config import ModelConfig

WORDS = ("<end>", "<none>", "what", "is", "more", "than", "?", "one", "two", "three", "####", *"12345")
NUMBERS = {"one": 1, "two": 2, "three": 3}
TINY = ModelConfig("qwen2", len(WORDS), 64, 1, 2, 1, 32, 48)
"""vLLM's attention on a CPU has no smaller heads."""


def tiny(folder: Path) -> list[str]:
    """Writes a random model, its tokeniser and its questions; -> the words of `longhaul train`, but for the updates."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    huggingface.save(folder, TINY, transformer.init(jax.random.key(7), TINY))
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<none>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<none>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0]}')
    asked = [
        {"question": f"what is {a} more than {b} ?", "answer": f"#### {x + y}"}
        for a, x in NUMBERS.items() for b, y in NUMBERS.items() if x + y < 6
    ]  # fmt: skip
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, asked)))
    return [
        *("reasoning-questions", "--questions", str(folder / "sums.jsonl"), "--template", "{question}"),
        *("--group", "8", "--lr", "0.01", "--num-minibatches", "1", "--num-envs", "8", "--num-steps", "4"),
        *("--loss", "grpo", "--warmup", "0", "--actors", "1", "--evaluation-episodes", "2"),
    ]


class Server:
    """vLLM's server of a model, in a group of processes of its own."""

    def __init__(self, python: str, model: Path, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._words = [
            str(Path(python).parent / "vllm"), "serve", str(model), "--port", str(port), "--host", "127.0.0.1",
            "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "64", "--enable-scale-out",
            "--enforce-eager", "--weight-transfer-config", '{"backend": "longhaul"}',
        ]  # fmt: skip
        self._variables = os.environ | ONE_CORE | {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)}
        self._variables["PATH"] = f"{Path(python).parent}:{self._variables['PATH']}"
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._words, env=self._variables, stdout=log, stderr=log,
                                             cwd=self._log.parent, start_new_session=True)  # fmt: skip

    def wait(self) -> None:
        """Waits until it answers."""
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health").close()
                return
            if self._process.poll() is not None:
                raise SystemExit(f"vLLM ended with {self._process.returncode}: {self._log}")
            time.sleep(0.5)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def rows(folder: Path) -> list[dict[str, Any]]:
    """Records of the updates of a run so far."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [row for row in map(json.loads, lines) if "episode/return" in row]


def trained(folder: Path, words: list[str]) -> tuple[list[dict[str, Any]], str, float]:
    """(records, output, seconds) of a run."""
    began = time.monotonic()
    command = [sys.executable, "-m", "longhaul", "train", *words, "--runs-dir", str(folder.parent),
               "--run-name", folder.name, "--log-interval", "1"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"the run ended with {done.returncode}: {done.stdout[-2000:]}")
    return rows(folder), done.stdout, time.monotonic() - began


def outage(server: Server, folder: Path, after: int, away: float, moments: list[float]) -> None:
    """Kills the server once `after` updates are done, and starts it again `away` seconds later."""
    while len(rows(folder)) < after:
        time.sleep(0.2)
    server.kill()
    moments.append(time.monotonic())
    time.sleep(away)
    server.start()
    server.wait()
    moments.append(time.monotonic())


def told(found: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Figures of a run."""
    rewards = [row["episode/return"] for row in found]
    most = {name: max(row[name] for row in found) for name in ("actors/staleness_max", "grpo/staleness")}
    return {
        "updates": len(found), "first": round(float(np.mean(rewards[:5])), 4), "rewards": rewards,
        "last": round(float(np.mean(rewards[-10:])), 4), "mismatch": max(row["grpo/mismatch"] for row in found),
        **most, "seconds": round(seconds, 1),
    }  # fmt: skip


def measured(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    if given.model is None:
        model, completions = scratch / "model", 64 * 4
        model.mkdir()
        words = tiny(model)
    else:
        model, completions = given.model.resolve(), 8 * 16 * 6
        words = ["reasoning-smollm", "--threads", "1"]
    words += ["--model-folder", str(model), "--staleness", "1", "--total-steps", str(given.updates * completions)]
    log = given.log or scratch / "server.log"
    server = Server(given.python, model, given.port, log.absolute())
    figure: dict[str, Any] = {
        "benchmark": "vllm_training", "model": model.name, "updates": given.updates, "away": given.away, "seeds": {},
    }  # fmt: skip
    try:
        server.wait()
        for seed in given.seeds:
            both: dict[str, Any] = {}
            folder, moments = scratch / f"vllm-{seed}", list[float]()
            watch = threading.Thread(
                target=outage, args=(server, folder, given.updates // 2, given.away, moments), daemon=True
            )
            watch.start()
            found, output, seconds = trained(folder, [*words, "--seed", str(seed), "--rollout-servers", server.url])
            watch.join(given.away + 600.0)
            both["vllm"] = told(found, seconds) | {
                "down_seconds": round(moments[1] - moments[0], 1),
                "moved_requests": sum(row["actors/moved_requests"] for row in found),
                "pause_seconds": round(float(np.median([row["actors/pause_seconds"] for row in found])), 3),
                "lines": [line.strip() for line in output.splitlines() if server.url in line],
            }
            if not given.alone:
                both["itself"] = told(*trained(scratch / f"itself-{seed}", [*words, "--seed", str(seed)])[::2])
            figure["seeds"][str(seed)] = both
            print(json.dumps(both), file=sys.stderr)
    finally:
        server.kill()
    return figure


def main() -> None:
    flags = results.parser(__doc__)
    flags.add_argument("--python", required=True, help="Python with vLLM")
    flags.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct; without it the tiny model")
    flags.add_argument("--updates", type=int, default=120)
    flags.add_argument("--away", type=float, default=30.0, help="seconds for which the server is away")
    flags.add_argument("--seeds", type=int, nargs="+", default=[0])
    flags.add_argument("--alone", action="store_true", help="without the run that samples itself")
    flags.add_argument("--port", type=int, default=8124)
    flags.add_argument("--log", type=Path, help="file of the server's output")
    given = flags.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results.emit(measured(given, Path(scratch)), given.json)


if __name__ == "__main__":
    main()
