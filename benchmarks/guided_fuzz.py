"""Coverage-guided fuzzing of every reader of foreign bytes and of every wire, by atheris (libFuzzer).

    python -m benchmarks.guided_fuzz --minutes 10 [--targets pickle,wire-frame] [--corpus FOLDER] [--json FILE]

Each target is a reader that takes bytes, sound bytes to begin with, and the errors by which it may refuse. A process of
its own mutates them, and keeps what reaches new code. Any other error, more than `SECONDS` of CPU time, or more than
`MEMORY` bytes for one input is a finding: its bytes are kept under FOLDER/findings, and the table names it. What was
found and mended stands in tests/helpers/findings, and is read by a test. `benchmarks/fuzz.py` mutates whole files of
driving logs, their meaning too, and compiles what comes out; this finds what depends on single bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SECONDS, MEMORY = 1.0, 500 << 20
"""CPU-seconds and bytes that one input may take."""

LONGEST = 1 << 17
"""Bytes of an input, at most."""

BASE = 2 << 30
"""Bytes of a process with the libraries of all targets, which count as no input's."""

COMPILED = [
    "longhaul.driving.generator.kernels",
    "longhaul.driving.scenario.kernels",
    "longhaul.weight_sync.delta.numba_kernels",
    "longhaul.weight_sync.xxh3_kernels",
]
"""Modules that Numba compiles, which knows no instrumentation."""

ROOT = Path(__file__).resolve().parents[1]


class Target(NamedTuple):
    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]  # errors by which it refuses an input


class Finding(Exception):
    """An input that took too much."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--targets", default=",".join(TARGETS), help="names, separated by commas")
    parser.add_argument(
        "--corpus", type=Path, help="folder that keeps the inputs that reach new code, and the findings"
    )
    parser.add_argument("--json", type=Path, help="add each row to this file, too, at once")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return work(args.one, args.corpus, args.minutes)
    names = [name for name in args.targets.split(",") if name]
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"--targets has {unknown[0]}; there are {', '.join(TARGETS)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.corpus or Path(scratch)
        rows = []
        print(f"{'target':18} {'inputs':>10} {'edges':>6} {'slowest s':>9} {'MB':>5}  findings", flush=True)
        for name in names:
            rows.append(row := campaign(name, folder.resolve(), args.minutes / len(names)))
            findings = "; ".join(row["findings"]) or "none"
            figures = f"{row['inputs']:>10,} {row['edges']:>6} {row['slowest']:>9.3f} {row['megabytes']:>5}"
            print(f"{row['target']:18} {figures}  {findings}", flush=True)
            if args.json:
                with args.json.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
        print(f"{'together':18} {sum(row['inputs'] for row in rows):>10,}")
    return 1 if any(row["findings"] for row in rows) else 0


def campaign(name: str, folder: Path, minutes: float) -> dict[str, Any]:
    """One target for so many minutes: after a finding another process goes on."""
    row: dict[str, Any] = {"target": name, "inputs": 0, "edges": 0, "slowest": 0.0, "megabytes": 0, "findings": []}
    until = time.monotonic() + 60 * minutes
    while (left := until - time.monotonic()) > 1.0 and len(row["findings"]) < 5:
        command = [sys.executable, "-m", "benchmarks.guided_fuzz", "--one", name, "--corpus", str(folder)]
        command += ["--minutes", str(left / 60)]
        variables = os.environ | {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        figures = folder / name / "figures"
        if not figures.exists():
            raise SystemExit(f"{name} does not begin: {done.stdout[-2000:]}")
        inputs, slowest, memory = json.loads(figures.read_text())
        figures.unlink()
        row["inputs"] += inputs
        row["edges"] = max([row["edges"], *map(int, re.findall(r"cov: (\d+)", done.stdout))])
        row["slowest"], row["megabytes"] = max(row["slowest"], slowest), max(row["megabytes"], memory >> 20)
        if done.returncode:
            errors = re.findall(r"(?m)^(\w*(?:Error|Finding|Exception|Interrupt)\b.*|==\d+== ?ERROR.*)$", done.stdout)
            kept = re.findall(r"written to (\S+)", done.stdout)
            row["findings"].append(
                f"{(errors or [f'exit {done.returncode}'])[0][:200]} ({(kept or ['nothing kept'])[-1]})"
            )
    return row


def work(name: str, folder: Path, minutes: float) -> int:
    """Fuzzes one target in this process, which libFuzzer ends."""
    import atheris

    where = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    with atheris.instrument_imports(include=["longhaul"], exclude=COMPILED), where as scratch:
        run(atheris, name, folder, minutes, Path(scratch))
    return 0


def run(atheris: Any, name: str, folder: Path, minutes: float, scratch: Path) -> None:
    target = TARGETS[name](scratch)
    corpus, findings = folder / name / "corpus", folder / "findings" / name
    for each in (corpus, findings):
        each.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
        attempt(target, seed)  # what is imported and compiled late, is so now
    count, slowest, before = 0, 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def report() -> None:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        (folder / name / "figures").write_text(json.dumps([count, round(slowest, 3), most]))

    def one(data: bytes) -> None:
        nonlocal count, slowest
        count += 1
        begun = time.process_time()
        try:
            attempt(target, data)
        except BaseException:
            report()
            raise
        slowest = max(slowest, time.process_time() - begun)
        if slowest > SECONDS or count % 256 == 0:
            report()
        if slowest > SECONDS:
            raise Finding(f"{slowest:.1f} s of CPU time")
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before > MEMORY:
            report()
            raise Finding("more than 500 MB")

    report()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = {
        "max_total_time": max(1, int(60 * minutes)),
        "max_len": LONGEST,
        "timeout": 30,
        "rss_limit_mb": BASE >> 20,
    }
    words = [f"-{key}={value}" for key, value in options.items()]
    atheris.Setup([sys.argv[0], *words, f"-artifact_prefix={findings}/", str(corpus)], one)
    atheris.Fuzz()


def attempt(target: Target, data: bytes) -> None:
    with contextlib.suppress(*target.refuses):
        target.read(data)


# ------------------------------------------------------------------------------------------------------------ targets


def in_file(folder: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of files as one of bytes."""
    path = folder / name

    def of(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return of


def bounded_json(folder: Path) -> Target:
    from longhaul.runtime import bounded_json

    seeds = [b'{"a": [1, 2.5e3, "\\u00e9", null, true], "b": {"c": {}}}', b"[[[[]]]]", b'"\\ud83d"']
    return Target(seeds, bounded_json.parse, (ValueError,))


def pickles(folder: Path) -> Target:
    import pickle

    import numpy as np

    from longhaul.driving.datasets import scenarionet
    from longhaul.driving.datasets.log import Malformed
    from tests.helpers import log_files

    log = log_files.make_log(3, 1)
    whole = [pickle.dumps(log_files.scenarionet(log), protocol) for protocol in (2, 4)]
    small = [pickle.dumps({"a": [np.arange(3.0), np.float32(1)], "b": {1, 2}}, protocol) for protocol in range(6)]
    return Target([*whole, *small], scenarionet.read, (Malformed,))


def gpudrive(folder: Path) -> Target:
    from longhaul.driving.datasets import gpudrive
    from longhaul.driving.datasets.log import Malformed
    from tests.helpers import log_files

    seed = json.dumps(log_files.gpudrive(log_files.make_log(3, 1))).encode()
    return Target([seed], lambda data: gpudrive.read(data, folder / "a.json"), (Malformed,))


def womd(folder: Path) -> Target:
    import numpy as np

    from longhaul.driving.datasets import womd
    from longhaul.driving.datasets.log import Malformed
    from tests.helpers import log_files

    def read(data: bytes) -> object:
        with np.errstate(all="ignore"):
            kind = womd.kind_of(data)
            return kind and (womd.read_example if kind == womd.EXAMPLE else womd.read_scenario)(data)

    payloads = log_files.payloads(log_files.make_log(3, 1))
    return Target([payloads[womd.EXAMPLE], payloads[womd.SCENARIO]], read, (Malformed,))


def driving_file(suffix: str) -> Callable[[Path], Target]:
    """Files of a format that is read from the disk alone: TFRecord, Parquet, SQLite."""

    def make(folder: Path) -> Target:
        from longhaul.driving.datasets import readers
        from longhaul.driving.datasets.log import BadData
        from tests.helpers import damaged_inputs

        sources = damaged_inputs.Sources(folder, steps=25 if suffix == "db" else damaged_inputs.STEPS)
        for name, data in {sources.map_name: sources.map, sources.chart_name: sources.chart}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        seeds = {"parquet": sources.table, "db": sources.db}
        return Target(
            [seeds[suffix]], in_file(folder, f"a.{suffix}", lambda path: list(readers.read(path))), (BadData,)
        )

    return make


def geopackage(folder: Path) -> Target:
    import struct

    from longhaul.driving.datasets import geopackage
    from longhaul.driving.datasets.log import Malformed

    line = struct.pack("<BIIdddd", 1, 2, 2, 1.0, 2.0, 3.0, 4.0)
    polygon = struct.pack("<BIII6d", 1, 3, 1, 3, *map(float, range(6)))
    head = b"GP\0\x01" + struct.pack("<I", 4326)
    several = struct.pack("<BII", 1, 5, 2) + line + line

    def read(data: bytes) -> object:
        return geopackage.envelope(data), geopackage.shapes(data)

    return Target([head + each for each in (line, polygon, several)], read, (Malformed,))


def shard(folder: Path) -> Target:
    import zlib

    from longhaul.driving.datasets.log import Malformed
    from longhaul.driving.scenario.from_log import scenario_from_log
    from longhaul.driving.shards import shard
    from tests.helpers import log_files

    record = shard.pack(scenario_from_log(log_files.make_log(6, 2), agents=2, route_margin=3.0))
    size = shard.RECORD_HEAD.size + int.from_bytes(
        record[shard.RECORD_HEAD.size - 2 : shard.RECORD_HEAD.size], "little"
    )
    plain = record[:size] + zlib.decompress(record[size:])  # what is damaged is compressed again

    def read(data: bytes) -> object:
        return shard.unpack(data[:size] + zlib.compress(data[size:], 1))

    return Target([plain], read, (Malformed,))


def shard_file(folder: Path) -> Target:
    from longhaul.driving.datasets.log import BadData
    from longhaul.driving.shards import shard
    from tests.helpers import damaged_inputs

    sources = damaged_inputs.Sources(folder)
    seed = damaged_inputs.shelved(sources.record, sources.entry)
    return Target([seed], in_file(folder, "a.lhs", lambda path: list(shard.open(path))), (BadData,))


def legacy(folder: Path) -> Target:
    import io

    import numpy as np

    from longhaul.training import legacy_params

    file, layers = io.BytesIO(), {}
    for number, shape in enumerate([(3, 4), (4, 2), (4, 1)]):
        layers |= {f"params.Dense_{number}.kernel": np.ones(shape), f"params.Dense_{number}.bias": np.ones(shape[1])}
    np.savez(file, **layers)
    read = in_file(folder, "a.npz", lambda path: legacy_params.read(path, 3, 2))
    return Target([file.getvalue()], read, (legacy_params.LegacyError,))


def init_npz(folder: Path) -> Target:
    import io

    import numpy as np

    from longhaul.runtime.errors import RunError
    from longhaul.training import init_from

    seeds = []
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, **{"params.policy.kernel": np.ones((3, 4)), "params.policy.bias": np.zeros(4, np.float32)})
        seeds.append(file.getvalue())
    spec: Any = None  # which files of the old trainer alone need
    read = in_file(folder, "a.npz", lambda path: init_from._of_npz(path, spec))
    return Target(seeds, read, (RunError, OSError, AttributeError))


def parameters(folder: Path) -> Target:
    import pickle

    import numpy as np

    from longhaul.training import legacy_params

    sizes = enumerate([(3, 4), (4, 2), (4, 1)])
    tree = {f"Dense_{number}": {"kernel": np.ones(shape), "bias": np.ones(shape[1])} for number, shape in sizes}
    seeds = [pickle.dumps({"params": {"params": tree}, "step": 3}, protocol) for protocol in (2, 4)]
    read = in_file(folder, "a.pkl", lambda path: legacy_params.read(path, 3, 2))
    return Target(seeds, read, (legacy_params.LegacyError,))


def model_config(folder: Path) -> Target:
    from longhaul.reasoning import huggingface
    from longhaul.reasoning.config import ModelConfig

    config = ModelConfig("llama", vocabulary=8, width=4, layers=1, heads=1, kv_heads=1, head_dim=4, hidden=4)
    (folder / "model.safetensors").write_bytes(bytes(1 << 16))
    read = in_file(folder, "config.json", lambda path: huggingface.config(path.parent))
    plain = huggingface.fields_of(config)
    scaled = plain | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    return Target([json.dumps(each).encode() for each in (plain, scaled)], read, (huggingface.HubError,))


def model_weights(folder: Path) -> Target:
    import jax

    from longhaul.reasoning import huggingface
    from longhaul.reasoning.config import ModelConfig
    from longhaul.reasoning.transformer import init

    config = ModelConfig("llama", vocabulary=8, width=4, layers=1, heads=1, kv_heads=1, head_dim=4, hidden=4)
    huggingface.save(folder, config, init(jax.random.key(0), config))
    read = in_file(folder, huggingface.ONE, lambda path: huggingface.load(path.parent))
    return Target([(folder / huggingface.ONE).read_bytes()], read, (huggingface.HubError,))


def model_index(folder: Path) -> Target:
    from longhaul.reasoning import huggingface

    seed = b'{"metadata": {"total_size": 4}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    read = in_file(folder, huggingface.INDEX, lambda path: huggingface._weight_map(path.parent))
    return Target([seed], read, (huggingface.HubError,))


def chat_template(folder: Path) -> Target:
    from longhaul.reasoning import huggingface

    read = in_file(folder, "tokenizer_config.json", lambda path: huggingface._template(path.parent))
    named = {"chat_template": [{"name": "default", "template": "{{ messages }}"}], "bos_token": {"content": "<s>"}}
    return Target([b'{"chat_template": "{{ messages }}"}', json.dumps(named).encode()], read, (huggingface.HubError,))


def tokenizer(folder: Path) -> Target:
    from longhaul.reasoning import tokenizer_file

    steps = '{"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": " "}, "content": "_"}]}'
    split = '{"type": "Split", "pattern": {"Regex": "(?i:\'s|\'t)|[^\\\\r\\\\n]?\\\\p{L}+|\\\\s+(?!\\\\S)"}}'
    words = '"added_tokens": [{"id": 2, "content": "<s>"}], "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}'
    seed = f'{{"normalizer": {steps}, "pre_tokenizer": {split}, {words}}}'
    return Target([seed.encode()], in_file(folder, "tokenizer.json", tokenizer_file.check), (ValueError,))


def questions(folder: Path) -> Target:
    from longhaul.reasoning import tasks

    seed = b'{"question": "2 + 3?", "answer": "<<2+3=5>> #### 5"}\n'
    return Target([seed], in_file(folder, "a.jsonl", tasks.questions), (ValueError,))


def completions(folder: Path) -> Target:
    """Completions of a policy, which may be any text: no error at all is possible."""
    from longhaul.reasoning import tasks

    own_tasks = [tasks.arithmetic(), tasks.addition(), tasks.countdown()]
    asked = [
        tasks.Problem("3+4-2=", "0", ("3+4=2", "2-2=0")),
        tasks.Problem("47+85=", "132"),
        tasks.Problem("3,5,2:13=", "13"),
    ]
    question = tasks.Problem("2 apples and 3,000 more", "3002", ("2+3000=3002",))
    checks = [tasks.checker("numeric"), tasks.checker("exact")]

    def read(data: bytes) -> None:
        text = data.decode(errors="replace")
        for task, problem in zip(own_tasks, asked, strict=True):
            task.reward(problem, text), task.soundness(problem, text), task.reading(text)
        for check in checks:
            check(question, text)
        tasks.reading(text), tasks.calculated(question, text)

    return Target([b"3+4=2;2-2=0;>0$", b"3*5=15;15-2=13;>3*5-2$", b"<<2+3,000=3002>> #### $3,002.0"], read, ())


def settings(suffix: str) -> Callable[[Path], Target]:
    def make(folder: Path) -> Target:
        from longhaul.config import files, recipes

        recipe = recipes.cartpole()
        text = {
            ".yaml": b"lr: 1e-3\nalgorithm: {network: {hidden_dim: 32}, gamma: 0.9}\nseed: &x 1\nnum_envs: *x\n",
            ".toml": b'lr = 0.1\nmesh = "data=1"\n[algorithm.network]\nhidden_dim = 32\n',
        }[suffix]
        read = in_file(folder, f"a{suffix}", lambda path: files.read(files.load(path), recipe, path))
        return Target([text], read, (ValueError,))

    return make


def run_json(folder: Path) -> Target:
    from longhaul.config import recipes
    from longhaul.config.resolve import resolve
    from longhaul.training import run_dir

    run_dir.save_run(folder, resolve(recipes.cartpole()), {})
    read = in_file(folder, "run.json", lambda path: run_dir.read_run(path.parent))
    return Target([(folder / "run.json").read_bytes()], read, (ValueError,))


def metrics(folder: Path) -> Target:
    from longhaul.telemetry import sinks

    seed = b'{"update": 1, "env_steps": 4, "agent_steps": 4, "wall_seconds": 1.5, "sps": 3.0, "episode/return": 1.0}\n'
    return Target([seed], in_file(folder, "metrics.jsonl", sinks.read), (ValueError,))


def listed_run(folder: Path) -> Target:
    """A run that others list: no error at all is possible."""
    from longhaul.training import runs

    def read(path: Path) -> None:
        data = path.read_bytes()
        for name in ("run.json", "result.json"):
            (folder / name).write_bytes(data)
        runs.summary(folder), runs.config(folder)
        curves = runs.Curves(folder)
        curves.update(), curves.thinned()

    seed = b'{"run": {"seed": 1, "environment": {"env": "a"}}, "update": 1, "agent_steps": 4, "episode/return": 1.0}\n'
    return Target([seed, seed * 3], in_file(folder, "metrics.jsonl", read), ())


def manifest(folder: Path) -> Target:
    """Text of a manifest under a right digest: whoever writes one on purpose can do the same."""
    from longhaul.weight_sync import manifest
    from longhaul.weight_sync.digest import digest

    tensors, size = manifest.layout([("a", (3, 5), "bfloat16"), ("b.weight", (), "float32")])
    seed = manifest.text(manifest.Manifest("run", 7, 3, -1, size, tensors))

    def read(data: bytes) -> object:
        return manifest.from_bytes(manifest.MAGIC + digest(data) + len(data).to_bytes(8, "little") + data)

    return Target([seed], read, (ValueError,))


def sync_frame(folder: Path) -> Target:
    """What a socket brings: bare bytes, or (first byte odd) the text of a frame whose head is right."""
    import socket

    from longhaul.weight_sync.transports import sockets

    def read(data: bytes) -> object:
        reading, writing = socket.socketpair()
        with reading, writing:
            wire = sockets.Wire(reading)
            if data[:1] and data[0] & 1:
                text = data[1:]
                head = sockets.HEAD.pack(sockets.MAGIC, 0, 0, sockets._check(0, 0, text, b"", b""), 0, len(text))
                data = head + text
            writing.sendall(data[:100_000])
            writing.shutdown(socket.SHUT_WR)
            return wire.receive(5.0)

    head = sockets.HEAD.pack(sockets.MAGIC, 0, 0, 0, 0, 2)
    return Target([b'\x01{"kind": "bind", "name": "a"}', b"\0" + head + b"{}", head], read, (OSError,))


def changes(folder: Path) -> Target:
    """Changes of a tensor under a right checksum."""
    import numpy as np

    from longhaul.weight_sync.delta import tensor_delta

    base = np.arange(3000, dtype=np.uint16)
    after = base.copy()
    after[::50] += 3
    frames = [tensor_delta.encode(before, after, "u2") for before in (base, None)]

    def read(data: bytes) -> None:
        tensor_delta.apply(base.copy(), tensor_delta.seal(data))

    return Target([frame[: -tensor_delta.SEAL] for frame in frames], read, (ValueError,))


def safetensors(folder: Path) -> Target:
    """A version's file, whose manifest is right."""
    import numpy as np

    from longhaul.weight_sync import manifest
    from longhaul.weight_sync.transports import safetensors_files

    tensors, size = manifest.layout([("a", (3, 5), "float32"), ("b", (2,), "int8")])
    about = manifest.Manifest("run", 7, 3, -1, size, tensors)
    image = np.zeros(size, np.uint8)
    seed = safetensors_files.header(safetensors_files.shards(about)[0]) + bytes(62)
    read = in_file(
        folder, "model.safetensors",
        lambda path: safetensors_files.read(path.parent, about, image, lambda array, count: None),
    )  # fmt: skip
    return Target([seed], read, (safetensors_files.Damaged, OSError))


def central(folder: Path) -> Target:
    import numpy as np

    from longhaul.topologies.inference_server import wire
    from tests.helpers import malformed_frames

    def read(data: bytes) -> None:
        head = wire.read(data, 1 << 20)
        if head.kind == wire.OBSERVE:
            due = wire.Due(head.kind, head.group, head.incarnation, head.step)
            malformed_frames.CODEC.check_head(head, due)
            malformed_frames.CODEC.observed(data, head.finals, first=head.step == 0)
        else:
            wire.difference(malformed_frames.CODEC.layout.text, wire.text(data))

    rng = np.random.default_rng(0)
    seeds = [wire.frame(*malformed_frames.observe(rng, 0, 0, number)) for number in range(4)]
    return Target([*seeds, malformed_frames.hello(3)], read, (wire.WireError,))


def serve_texts(folder: Path) -> Target:
    """Bodies of `/v1/completions`, up to the job that the engine gets."""
    from longhaul.reasoning import tokenizer
    from longhaul.reasoning.config import ModelConfig
    from longhaul.runtime import bounded_json
    from longhaul.training.serving import http
    from longhaul.training.serving.completions import Limits

    class Idle(NamedTuple):
        limits: Limits
        config: ModelConfig

    idle: Any = Idle(Limits(64, 64), ModelConfig(vocabulary=257))
    texts = http.Texts(idle, tokenizer.BYTES, "x", http.Bounds())

    def read(data: bytes) -> object:
        body = bounded_json.parse(data, http.WEIGHT * LONGEST)
        if not isinstance(body, dict):
            return None
        return texts._job(body, texts._prompts(body.get("prompt")), chat=False)

    seeds = [
        b'{"prompt": "abc", "n": 2, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": ["a"], "seed": 1}',
        b'{"prompt": [[1, 2], "x"], "logprobs": 3, "stream": false, "echo": false, "user": "u"}',
    ]
    return Target(seeds, read, (ValueError,))


def serve_actions(folder: Path) -> Target:
    """Observations of `/act`."""
    import numpy as np

    from longhaul.runtime import bounded_json
    from longhaul.training.serving import http

    forms = {"a": ((2,), np.dtype("float32")), "b": ((), np.dtype("int32")), "c": ((1, 2), np.dtype(bool))}

    def read(data: bytes) -> object:
        return http.arrays("observation", bounded_json.parse(data, http.WEIGHT * LONGEST), forms, 8)

    seeds = [b'{"a": [1, 2.5], "b": 3, "c": [[true, false]]}', b'{"a": [[1, 2]], "b": [3], "c": [[[true, false]]]}']
    return Target(seeds, read, (ValueError,))


TARGETS: dict[str, Callable[[Path], Target]] = {
    "json": bounded_json,
    "pickle": pickles,
    "gpudrive": gpudrive,
    "womd": womd,
    "parquet": driving_file("parquet"),
    "sqlite": driving_file("db"),
    "geometry": geopackage,
    "shard-record": shard,
    "shard-file": shard_file,
    "init-npz": init_npz,
    "legacy-npz": legacy,
    "legacy-pickle": parameters,
    "model-config": model_config,
    "model-index": model_index,
    "model-weights": model_weights,
    "chat-template": chat_template,
    "tokenizer": tokenizer,
    "questions": questions,
    "completions": completions,
    "yaml": settings(".yaml"),
    "toml": settings(".toml"),
    "run-json": run_json,
    "metrics": metrics,
    "listed-run": listed_run,
    "sync-manifest": manifest,
    "sync-frame": sync_frame,
    "sync-changes": changes,
    "sync-safetensors": safetensors,
    "central-frame": central,
    "serve-texts": serve_texts,
    "serve-actions": serve_actions,
}


if __name__ == "__main__":
    sys.exit(main())
