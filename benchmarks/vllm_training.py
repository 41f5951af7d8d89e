"""GRPO that a real vLLM samples, which is killed in the middle, beside the run that samples itself.

    python -m benchmarks.vllm_training --python VLLM_PYTHON [--json FILE] [--away 30] [--seeds 0 1]
    python -m benchmarks.vllm_training --python VLLM_PYTHON --model smollm2-135m --updates 24
    python -m benchmarks.vllm_training --python VLLM_PYTHON --fixed 5 [--model smollm2-135m]

VLLM_PYTHON is a Python with vLLM and this package. The first line is of a tiny random model that learns sums in words
from six questions; the second is the recipe `reasoning-smollm`. Both runs of a seed are one update behind
(`--staleness 1`). Once half of the updates are done the server is killed, and started again after `--away` seconds; 0
leaves it alone. The ends of the runs of several seeds are compared by their means (`compared`).

The third line trains nothing: it compares completions of both samplers with the same weights, of as many versions as
`--fixed` says, token by token.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import results
from benchmarks.vllm_updates import ONE_CORE, ROOT
from longhaul.cli import run_flags
from longhaul.config.resolve import both, resolve
from longhaul.reasoning import huggingface, sampler, transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.rollout_servers import Ask
from longhaul.reasoning.sampler import Completions
from longhaul.training import reasoning_setup, rollout_servers
from longhaul.types import Params

SMALL = "tiny qwen2, one layer of 64"
WORDS = ("<end>", "<none>", "what", "is", "more", "than", "?", "one", "two", "three", "####", *"12345")
NUMBERS = {"one": 1, "two": 2, "three": 3}
TINY = ModelConfig("qwen2", len(WORDS), 64, 1, 2, 1, 32, 48)
"""vLLM's attention on a CPU has no smaller heads."""


def tiny(folder: Path) -> list[str]:
    """Writes a random model, its tokeniser and its questions; -> the words of `longhaul train`, but for the updates.

    In groups of 8 at a rate of 0.01 most seeds lose their entropy early, whoever samples, and the ends say nothing.
    """
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
        *("--group", "32", "--lr", "0.003", "--num-minibatches", "1", "--num-envs", "8", "--num-steps", "4"),
        *("--loss", "grpo", "--warmup", "0", "--actors", "1", "--evaluation-episodes", "2"),
    ]


class Server:
    """vLLM's server of a model, in a group of processes of its own."""

    def __init__(self, python: str, model: Path, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._words = [
            str(Path(python).parent / "vllm"), "serve", str(model), "--port", str(port), "--host", "127.0.0.1",
            "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "64", "--enable-scale-out",
            "--enforce-eager", "--block-size", "32", "--weight-transfer-config", '{"backend": "longhaul"}',
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


# ------------------------------------------------------------------------------------------------- the same weights


PROMPTS = 64
"""Prompts of a version, each of one group of completions."""

MOVED = 0.03
"""Change from one version to the next, as a share of each array's root mean square; and a tenth of that beside it."""


def moved(params: Params, number: int) -> Params:
    """Parameters with noise, biases and norms included."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(number), len(leaves))

    def one(x: jax.Array, key: jax.Array) -> jax.Array:
        size = MOVED * (jnp.sqrt(jnp.mean(jnp.square(x))) + 0.1)
        return x + size * jax.random.normal(key, x.shape, x.dtype)

    return jax.tree.unflatten(structure, [one(*each) for each in zip(leaves, keys, strict=True)])


def fixed(words: list[str], url: str, scratch: Path, versions: int, prompts: int) -> dict[str, Any]:
    """Figures of completions by a server and by this package, of the same prompts with the same weights."""
    recipe, parsed = run_flags.of_recipe("train", "", (), [*words, "--lora", "0", "--rollout-servers", url])
    run = resolve(run_flags.chosen(recipe, parsed))
    _, config = both(run)
    known, bank, mark = reasoning_setup.tokeniser(run), reasoning_setup.bank(run), reasoning_setup.marker(run)
    asked, rng = np.asarray(bank.prompt), np.random.default_rng(0)
    draw = jax.jit(sampler.sampler(config.model, reasoning_setup.sampling(run), tokeniser=known))
    forward = jax.jit(lambda params, prompt, token: sampler.log_probs(config.model, params, prompt, token, 1.0))
    params = huggingface.load(config.model_folder)[1]
    parts: dict[str, list[Figures]] = {"vllm": [], "itself": []}
    with ExitStack() as closed:
        fleet = rollout_servers.opened(run, scratch, closed, lambda line: print(line, file=sys.stderr), known)
        for version in range(versions):
            params = moved(params, version) if version else params
            which = rng.integers(0, len(asked), prompts)
            fleet.bring(version, params)
            asks = [Ask(tuple(int(x) for x in asked[place] if x != known.pad), config.group, 0) for place in which]
            answers = fleet.servers.complete(asks, version)
            data = rollout_servers.filled(asked[which], which, answers, run.num_steps, known)
            keys = jax.random.split(jax.random.fold_in(jax.random.key(run.seed), version), prompts * config.group)
            drawn = jax.device_get(draw(params, asked[which], keys, jnp.int32(sampler.UNBOUNDED)))
            for name, each in (("vllm", data), ("itself", data._replace(**drawn._asdict()))):
                log_prob, entropy = forward(params, jnp.asarray(asked[which]), jnp.asarray(each.token))
                marked, _ = mark(each, {})
                parts[name].append(figures(marked, np.asarray(log_prob), np.asarray(entropy), config.group, known.ends))
            print(json.dumps({"version": version, "labels": sorted({int(x) for x in data.version})}), file=sys.stderr)
    whole = {name: Figures(*map(np.concatenate, zip(*some))) for name, some in parts.items()}
    return {
        "weights": versions, "prompts": prompts, "group": config.group,
        **{name: summed(each) for name, each in whole.items()},
        "apart": {
            name: apart(getattr(whole["vllm"], name) - getattr(whole["itself"], name))
            for name in ("reward", "length", "cut", "entropy", "different")
        },
    }  # fmt: skip


class Figures(NamedTuple):
    """Figures of groups [G], of completions [B] and of tokens [T]."""

    reward: np.ndarray  # [G], means of the groups; so the next four
    length: np.ndarray
    cut: np.ndarray
    entropy: np.ndarray  # of a token's distribution
    different: np.ndarray  # completions that differ, of a group
    surprise: np.ndarray  # [B]: of the tokens drawn, above what their distributions let expect
    off: np.ndarray  # [T]: |recorded log-probability - that of a full forward|
    off_end: np.ndarray  # the same of tokens that end a completion


def figures(data: Completions, log_prob: np.ndarray, entropy: np.ndarray, group: int, ends: tuple[int, ...]) -> Figures:
    """Figures of completions [B, N] in groups, by the log-probabilities and entropies of a full forward."""
    token, written = np.asarray(data.token), np.asarray(data.written)
    count = written.sum(axis=1)

    def of_groups(each: np.ndarray) -> np.ndarray:
        return np.asarray(each, np.float64).reshape(-1, group).mean(axis=1)

    off = np.abs(np.asarray(data.log_prob) - log_prob)
    kinds = [len({tuple(row) for row in rows}) for rows in token.reshape(-1, group, token.shape[1])]
    return Figures(
        of_groups(np.asarray(data.reward)), of_groups(count), of_groups(np.asarray(data.cut)),
        of_groups((entropy * written).sum(axis=1) / count), np.array(kinds, np.float64),
        (-(log_prob + entropy) * written).sum(axis=1), off[written], off[written & np.isin(token, ends)],
    )  # fmt: skip


def summed(found: Figures) -> dict[str, float]:
    """Means, and the largest difference of log-probabilities; `surprise` is in standard errors from 0."""
    means = {name: float(np.mean(getattr(found, name))) for name in ("reward", "length", "cut", "entropy", "different")}
    means |= {"tokens": len(found.off), "ends": len(found.off_end), "log_prob_off": float(found.off.max())}
    if len(found.off_end):
        means["log_prob_off_ends"] = float(found.off_end.max())
    return {name: round(x, 7) for name, x in means.items()} | {"surprise": apart(found.surprise)}


def apart(each: np.ndarray) -> float:
    """Mean of independent numbers, in its standard errors; 0 where all are 0."""
    error = float(np.std(each, ddof=1)) / math.sqrt(len(each))
    return round(float(np.mean(each)) / error, 2) if error else 0.0


def compared(one: list[float], other: list[float]) -> dict[str, float]:
    """Difference of the means of runs of two kinds, one number a seed, and its standard error (Welch)."""
    error = math.sqrt(sum(float(np.var(each, ddof=1)) / len(each) for each in (one, other)))
    return {"difference": round(float(np.mean(one) - np.mean(other)), 4), "standard_error": round(error, 4)}


# ------------------------------------------------------------------------------------------------------------ training


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


def quality(output: str) -> dict[str, float]:
    """pass@1 after and before training, from the table that a run prints at its end."""
    lines = [line.split() for line in output.splitlines()]
    heads = [line for line in lines if line[:1] == ["policy"] and "pass_at_1" in line]
    found = {line[0]: line for line in lines if heads and line[:1] in (["trained"], ["untrained"])}
    return {f"pass_at_1_{name}": float(line[heads[-1].index("pass_at_1")]) for name, line in found.items()}


def told(found: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Figures of a run."""
    rewards = [row["episode/return"] for row in found]
    means = {name: round(float(np.mean([row[f"grpo/{name}"] for row in found])), 4) for name in ("entropy", "mismatch")}
    most = {name: max(row[name] for row in found) for name in ("actors/staleness_max", "grpo/staleness")}
    return {
        "updates": len(found), "first": round(float(np.mean(rewards[:5])), 4), "rewards": rewards,
        "last": round(float(np.mean(rewards[-10:])), 4), **means, "first_mismatch": found[0]["grpo/mismatch"],
        "entropies": [round(row["grpo/entropy"], 3) for row in found[::6]],
        "mean_staleness": round(float(np.mean([row["grpo/staleness"] for row in found])), 4),
        **most, "seconds": round(seconds, 1),
    }  # fmt: skip


def measured(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    if args.model is None:
        model, completions = scratch / "model", 8 * 32 * 4
        model.mkdir()
        words = tiny(model)
    else:
        model, completions = args.model.resolve(), 8 * 16 * 6
        words = ["reasoning-smollm", "--threads", "1"]
    words += ["--model-folder", str(model), "--staleness", "1", "--total-steps", str(args.updates * completions)]
    name = model.name if args.model else SMALL
    log = args.log or scratch / "server.log"
    server = Server(args.python, model, args.port, log.absolute())
    figure: dict[str, Any] = {
        "benchmark": "vllm_training", "model": name, "updates": args.updates, "away": args.away, "seeds": {},
    }  # fmt: skip
    try:
        server.wait()
        if args.fixed:
            return {"benchmark": "vllm_training", "model": name} | fixed(
                words, server.url, scratch, args.fixed, args.prompts
            )
        for seed in args.seeds:
            pair: dict[str, Any] = {}
            folder, moments = scratch / f"vllm-{seed}", list[float]()
            if args.away:
                watch = threading.Thread(
                    target=outage, args=(server, folder, args.updates // 2, args.away, moments), daemon=True
                )
                watch.start()
            found, output, seconds = trained(folder, [*words, "--seed", str(seed), "--rollout-servers", server.url])
            if args.away:
                watch.join(args.away + 600.0)
            pair["vllm"] = {
                **told(found, seconds), **quality(output),
                "down_seconds": round(moments[1] - moments[0], 1) if moments else 0.0,
                "moved_requests": sum(row["actors/moved_requests"] for row in found),
                "pause_seconds": round(float(np.median([row["actors/pause_seconds"] for row in found])), 3),
                "lines": [line.strip() for line in output.splitlines() if server.url in line],
            }  # fmt: skip
            if not args.alone:
                found, output, seconds = trained(scratch / f"itself-{seed}", [*words, "--seed", str(seed)])
                pair["itself"] = told(found, seconds) | quality(output)
            figure["seeds"][str(seed)] = pair
            print(json.dumps({"seed": seed, **pair}), file=sys.stderr, flush=True)
    finally:
        server.kill()
    if len(args.seeds) > 1 and not args.alone:
        ends = [[pair[kind]["last"] for pair in figure["seeds"].values()] for kind in ("vllm", "itself")]
        figure["compared"] = compared(*ends)
    return figure


def main() -> None:
    flags = results.parser(__doc__)
    flags.add_argument("--python", required=True, help="Python with vLLM")
    flags.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct; without it the tiny model")
    flags.add_argument("--updates", type=int, default=120)
    flags.add_argument("--away", type=float, default=30.0, help="seconds for which the server is away; 0: it is not")
    flags.add_argument("--fixed", type=int, default=0, help="versions of fixed weights; nothing is trained then")
    flags.add_argument("--prompts", type=int, default=PROMPTS, help="prompts of each such version")
    flags.add_argument("--seeds", type=int, nargs="+", default=[0])
    flags.add_argument("--alone", action="store_true", help="without the run that samples itself")
    flags.add_argument("--port", type=int, default=8124)
    flags.add_argument("--log", type=Path, help="file of the server's output")
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results.emit(measured(args, Path(scratch)), args.json)


if __name__ == "__main__":
    main()
