"""Load of `longhaul serve`: many clients while its weights change: `python -m benchmarks.serve_load [--json FILE]`.

    python -m benchmarks.serve_load [--run RUN | --model FOLDER] [--clients 200] [--seconds 120] [--swaps 50]

Each client asks again as soon as it is answered, over a connection that it keeps: half greedily for one completion,
half for two that are sampled with top-p. Meanwhile versions are published by TCP, which the server follows: the model's
weights under eight different changes. Every greedy completion must be, token by token, what the full forward gives with
the weights of the version that the answer names (`wrong` counts those that are not), and every answer must name a
version that was published. Without `--run` a model of `reasoning-arithmetic` is trained for an update. Memory is the
server's, in the first and in the last quarter of the time and at most.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from benchmarks import results
from longhaul.reasoning import huggingface, transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.runtime.provenance import provenance
from longhaul.training import reasoning_setup
from longhaul.training.checkpoint.resume import restore_policy
from longhaul.training.serving import live_weights
from longhaul.types import Params
from longhaul.weight_sync import transports
from longhaul.weight_sync.publisher import Publisher

KINDS = 8
"""Different weights that versions have in turn."""

TRAIN = ("train", "reasoning-arithmetic", "--num-envs", "8", "--group", "4", "--total-steps", "1088",
         "--evaluation-episodes", "8", "--run-name", "model")  # fmt: skip

TEXTS = ("3+4=", "12-5=", "7*8=", "(2+3)*4=", "9-9+1=", "6*7-2=", "15+27=", "8/2=")
PLAIN = ("The capital of France is", "2 + 2 =", "Once upon a time", "def main():")


def varied(params: Params, kind: int) -> Params:
    """Weights of a kind: those of the model, each scaled a little differently."""
    draw = np.random.default_rng(kind)
    return jax.tree.map(lambda x: (np.asarray(x) * (1.0 + 0.05 * draw.normal())).astype(np.float32), params)


def expected(
    config: ModelConfig, params: Params, words: Tokeniser, texts: Sequence[str], length: int
) -> list[list[int]]:
    """Greedy completions by the full forward, which reads the whole text for each token."""
    asked = [words.encode(text) for text in texts]
    room = max(map(len, asked)) + length

    @jax.jit
    def following(params: Params, tokens: jax.Array, count: jax.Array) -> jax.Array:
        logits = transformer.forward(config, params, tokens, jnp.arange(room)[None] < count)[0, count - 1]
        barred = jnp.arange(config.vocabulary) == words.pad
        return jnp.argmax(jnp.where(barred, transformer.NEVER, logits))

    found = []
    for each in asked:
        whole, count = np.zeros((1, room), np.int32), len(each)
        whole[0, :count] = each
        while count < len(each) + length:
            whole[0, count] = following(params, whole, np.int32(count))
            count += 1
            if whole[0, count - 1] in words.ends:
                break
        found.append(whole[0, len(each) : count].tolist())
    return found


class Load:
    """Clients, and what they were answered."""

    def __init__(
        self, port: int, texts: Sequence[str], length: int, expected_tokens: list[list[list[int]]] | None
    ) -> None:
        self.port, self.texts, self.length, self.wanted = port, texts, length, expected_tokens
        self.seconds: list[float] = []
        self.failures: Counter[str] = Counter()
        self.versions: Counter[str] = Counter()
        self.wrong = self.tokens = 0
        self.published: set[str] = set()

    async def client(self, number: int, until: float) -> None:
        draw = np.random.default_rng(number)
        stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while time.monotonic() < until:
            which, greedy = int(draw.integers(len(self.texts))), bool(draw.integers(2))
            body: dict[str, Any] = {"prompt": self.texts[which], "max_tokens": self.length}
            body |= {"temperature": 0} if greedy else {"n": 2, "top_p": 0.9, "logprobs": 0}
            began = time.perf_counter()
            try:
                stream = stream or await asyncio.open_connection("127.0.0.1", self.port)
                status, reply = await self._asked(*stream, json.dumps(body).encode())
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self.failures[type(error).__name__] += 1
                stream = None
                continue
            if status != 200:
                self.failures[str(status)] += 1
                continue
            self.seconds.append(time.perf_counter() - began)
            self._checked(which, greedy, reply)
        if stream is not None:
            stream[1].close()

    async def _asked(self, reader: Any, writer: Any, body: bytes) -> tuple[int, Any]:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
        return int(lines[0].split()[1]), json.loads(await reader.readexactly(length))

    def _checked(self, which: int, greedy: bool, reply: Any) -> None:
        version = reply["weight_version"]
        self.versions[version] += 1
        if version not in self.published:
            self.failures["unknown version"] += 1
        self.tokens += reply["usage"]["completion_tokens"]
        if greedy and self.wanted is not None:
            self.wrong += reply["choices"][0]["token_ids"] != self.wanted[int(version) % len(self.wanted)][which]


async def measured(load: Load, publish: Any, server: psutil.Process, args: Any) -> dict[str, Any]:
    """Figures of a load for `given.seconds`, after a warm-up."""
    publish(1)
    await asyncio.gather(*(load.client(n, time.monotonic() + args.warm) for n in range(args.clients)))
    load.seconds.clear(), load.failures.clear(), load.versions.clear()
    load.wrong = load.tokens = 0
    began, memory = time.monotonic(), []
    used = sum(server.cpu_times()[:2])

    async def watch() -> None:
        done = 0
        while (now := time.monotonic() - began) < args.seconds:
            memory.append(server.memory_info().rss)
            if now >= done * args.seconds / args.swaps:
                done += 1
                await asyncio.to_thread(publish, 1 + done)
            await asyncio.sleep(0.25)

    await asyncio.gather(watch(), *(load.client(n, began + args.seconds) for n in range(args.clients)))
    took, quarter = time.monotonic() - began, len(memory) // 4
    times = sorted(load.seconds)
    return {
        "requests": len(times),
        "failures": dict(load.failures),
        "wrong": load.wrong,
        "checked_tokens": load.wanted is not None,
        "versions_answered": len(load.versions),
        "requests_per_second": len(times) / took,
        "tokens_per_second": load.tokens / took,
        "p50_seconds": times[len(times) // 2],
        "p99_seconds": times[len(times) * 99 // 100],
        "most_seconds": times[-1],
        "server_cpu_share": (sum(server.cpu_times()[:2]) - used) / took,
        "memory_first": statistics.median(memory[:quarter]),
        "memory_last": statistics.median(memory[-quarter:]),
        "memory_most": max(memory),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--run", type=Path, help="folder of a language model's run")
    parser.add_argument("--model", type=Path, help="folder of a language model in Hugging Face's files")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--warm", type=float, default=20.0, help="seconds of load before, in which the server compiles")
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--no-check", action="store_true", help="do not compare tokens")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        folder, texts = args.model or args.run, PLAIN if args.model else TEXTS
        if folder is None:
            subprocess.run([sys.executable, "-m", "longhaul", *TRAIN], cwd=scratch, check=True, stdout=sys.stderr)
            folder = Path(scratch) / "runs/model"
        if args.model:
            config, params = huggingface.load(folder)
            known = huggingface.tokeniser(folder)
        else:
            run, policy, _ = restore_policy(folder)
            algorithm: Any = run.algorithm
            config, params, known = algorithm.model, live_weights.merged(algorithm.model, policy.params), \
                reasoning_setup.tokeniser(run)  # fmt: skip
        kinds = [varied(params, kind) for kind in range(1 if args.model else KINDS)]
        wanted = None
        if not args.no_check:
            wanted = [expected(config, kind, known, texts, args.length) for kind in kinds]
        sender = transports.serve("tcp:127.0.0.1:0")
        with Publisher("load", transports=[sender]) as publisher:
            command = [sys.executable, "-m", "longhaul", "serve", str(folder.absolute()), "--port", "0", "--follow",
                       sender.address, "--rows", str(args.rows), "--queue", "4096"]  # fmt: skip
            served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=scratch)
            try:
                assert served.stdout is not None
                port = int(served.stdout.readline().strip().rpartition(":")[2])
                load = Load(port, texts, args.length, wanted)
                load.published.add("0" if args.model else str(_newest(folder)))

                def publish(version: int) -> None:
                    load.published.add(str(version))
                    publisher.publish(version, huggingface.exported(config, kinds[version % len(kinds)]))

                found = asyncio.run(measured(load, publish, psutil.Process(served.pid), args))
                served.send_signal(signal.SIGTERM)
                found["exit_code"] = served.wait(60)
            finally:
                served.kill()
    names = {"clients": args.clients, "seconds": args.seconds, "swaps": args.swaps, "length": args.length,
             "rows": args.rows, "params": sum(np.size(x) for x in jax.tree.leaves(params))}  # fmt: skip
    results.emit(
        {"name": "serve-load", "config": names, **found, "device": ", ".join(provenance()["devices"])}, args.json
    )
    return int(bool(found["failures"]) or found["wrong"] > 0)


def _newest(folder: Path) -> int:
    return max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())


if __name__ == "__main__":
    sys.exit(main())
