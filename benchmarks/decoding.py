"""Decoding of completions whose lengths are log-normal (mean 64, at most 512): tokens a CPU-second on one core.

    python -m benchmarks.decoding --model smollm2-135m --side rows --json FILE
    python -m benchmarks.decoding --model smollm2-135m --side waves --json FILE
    python -m benchmarks.decoding --model smollm2-135m --side transformers --python PYTHON --json FILE

All sides write the same number of tokens behind the same prompts, groups of 16 behind each; a completion ends at its
length, whatever the model would do. `rows` is the sampler: a row whose completion ends begins the next. `waves` is the
same sampler with as many completions as rows at a time, and waits for each wave's longest. `transformers` is `generate`
with as many rows, wave by wave. CPU-seconds are of sampling with prompts and first tokens, without compilation.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import emit, parser

GROUP, MEAN, MOST, SPREAD = 16, 64, 512, 1.0


def asked(requests: int, prompt: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(prompts [M, P], lengths [N])."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.round(rng.lognormal(np.log(MEAN) - SPREAD**2 / 2, SPREAD, requests)), 1, MOST).astype(np.int32)
    return rng.integers(5, 4000, (requests // GROUP, prompt)).astype(np.int32), lengths


def ours(model: str, prompts: np.ndarray, lengths: np.ndarray, rows: int, *, waves: bool) -> dict[str, Any]:
    """CPU-seconds, and what was compiled."""
    import jax
    import jax.numpy as jnp

    from longhaul.reasoning import huggingface, sampler, tokenizer
    from longhaul.runtime.devices import prepare_devices

    prepare_devices(1)
    config, params = huggingface.load(model)
    words = tokenizer.Tokeniser(config.vocabulary, list, str, ends=(0,))
    sampling = sampler.Sampling(MOST, GROUP, wave=rows)
    together = rows if waves else len(lengths)
    params, prompts, lengths = jax.tree.map(jnp.asarray, (params, prompts, lengths))
    keys = jax.random.split(jax.random.key(0), len(lengths))

    def arguments(first: int) -> tuple[Any, ...]:
        last = first + together
        batch = prompts[first // GROUP : last // GROUP]
        return params, batch, keys[first:last], jnp.int32(sampler.UNBOUNDED), lengths[first:last]

    compiled = jax.jit(sampler.sampler(config, sampling, ends=False, tokeniser=words)).lower(*arguments(0)).compile()
    seconds = 0.0
    for first in range(0, len(lengths), together):
        inputs = arguments(first)
        began = time.process_time()
        drawn = jax.block_until_ready(compiled(*inputs))
        seconds += time.process_time() - began
        np.testing.assert_array_equal(drawn.written.sum(axis=1), inputs[-1])
    analysis = compiled.memory_analysis()
    return {"cpu_seconds": seconds, "temporary_mb": round(analysis.temp_size_in_bytes / 2**20) if analysis else None}


def peer(python: str, model: str, prompts: np.ndarray, lengths: np.ndarray, rows: int) -> dict[str, Any]:
    about = {"model": model, "rows": rows, "group": GROUP, "prompts": prompts.tolist(), "lengths": lengths.tolist()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "asked.json"
        file.write_text(json.dumps(about))
        words = [python, str(Path(__file__).parent / "peers/transformers_generate.py"), str(file)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", required=True, help="a folder of Hugging Face's files")
    flags.add_argument("--side", choices=("rows", "waves", "transformers"), default="rows")
    flags.add_argument("--python", help="Python with torch and transformers")
    flags.add_argument("--rows", type=int, default=64, help="completions written at a time")
    flags.add_argument("--requests", type=int, default=128)
    flags.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    args = flags.parse_args()
    prompts, lengths = asked(args.requests, args.prompt)
    if args.side == "transformers":
        record = peer(args.python, args.model, prompts, lengths, args.rows)
    else:
        record = ours(args.model, prompts, lengths, args.rows, waves=args.side == "waves")
    tokens = int(lengths.sum())
    figure = {
        "what": "decoding", "side": args.side, "rows": args.rows, "requests": args.requests, "prompt": args.prompt,
        "tokens": tokens, "longest": int(lengths.max()), "tokens_per_cpu_second": tokens / record["cpu_seconds"],
    }  # fmt: skip
    emit(figure | record, args.json)


if __name__ == "__main__":
    main()
