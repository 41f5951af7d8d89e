"""A real vLLM server that takes new weights while clients ask: tokens, digests, pauses.

    python -m benchmarks.vllm_updates --model smollm2-135m --python VLLM_PYTHON --json FILE [--untied] [--compiled]
    VLLM_PYTHON -m benchmarks.vllm_updates --model smollm2-135m --in-process --json FILE

VLLM_PYTHON is a Python with vLLM, transformers and this package. Each update is published by a process of its own
(`--sender`) and brought to the server over HTTP, while 4 clients ask. After each: the answers to 50 prompts are greedy
by transformers with the same weights, and how many of their tokens an old output layer would have changed; the digest
of each layer, as it computes, is the sender's; answers of one version are those of its check; answers of two versions
are right on both sides. One update is refused in the middle, and one sender is killed with
half of its tensors sent. At the end vLLM loads a version's folder by its own loader.

`copy_seconds` is the time to copy the tensors once, into memory that was written before. `held_seconds` is the longest
call before the pause, in which the server packs tensors and makes no token. The second line updates an `LLM` of this
process instead, without clients.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.peers import moved_weights
from longhaul.weight_sync import transports, vllm
from longhaul.weight_sync.engine_http import EngineError
from longhaul.weight_sync.publisher import Publisher

ROOT = Path(__file__).resolve().parent.parent
CLIENTS, PROMPTS = 4, 50
REFUSED, KILLED = 2, 3
"""Updates before which one is refused, and in which the sender is killed."""

LINK = f"shm:@longhaul-vllm-updates-{os.getpid()}"
NOUNS = ("capital of France", "sum of 2 and 3", "largest planet", "colour of the sky", "name of a dog",
         "first month", "opposite of hot", "author of Hamlet", "metal in a magnet", "number of legs")  # fmt: skip
FORMS = ("The {} is", "What is the {}? It is", "Tell me the {}.", "Q: {}\nA:", "I always forget the {}, which is")
ONE_CORE = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
DIGESTS = "benchmarks.peers.vllm_digests.Digests"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def call(url: str, route: str, body: Any = None, seconds: float = 300.0) -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url + route, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=seconds) as answer:
        return json.loads(answer.read() or b"null")


# ----------------------------------------------------------------------------------------------------------- a sender


def sender(folder: Path, url: str) -> None:
    """Process that publishes and updates: a line of JSON {"do", "version", "number"} to a line of JSON."""
    base = moved_weights.base(folder)
    with Publisher("vllm-updates", transports=[transports.serve(LINK)]) as publisher:
        http = vllm.Http(url)
        rollout = vllm.Rollout(publisher, http, [LINK])
        for line in sys.stdin:
            asked = json.loads(line)
            number, answer = asked["number"], {}
            tensors = moved_weights.moved(base, asked["version"])
            if asked["do"] == "update":
                began = time.monotonic()
                rollout.update(number, tensors, 120.0, label=str(asked["version"]))
                answer = {"seconds": time.monotonic() - began, "paused": rollout.paused, "held": rollout.held}
                answer |= copied(tensors)
                answer["digests"] = digests(tensors)
            else:  # "refuse": without the last tensor; "half": killed when half is sent
                vllm.offer(publisher, number, tensors, 120.0)
                root, count = publisher.status()["root"], len(tensors)
                http.start_weight_update()
                end = count - 1 if asked["do"] == "refuse" else count // 2
                http.update_weights(vllm.Announced(number, root, 0, end, False, 120.0)._asdict())
                if asked["do"] == "half":
                    os.kill(os.getpid(), signal.SIGKILL)
                http.pause()
                try:
                    http.update_weights(vllm.Announced(number, root, end, end, True, 120.0)._asdict())
                except EngineError as error:
                    answer = {"refused": str(error)[-300:]}
            print(json.dumps(answer), flush=True)


def copied(tensors: dict[str, np.ndarray]) -> dict[str, float]:
    room = {name: np.zeros_like(x) for name, x in tensors.items()}
    began = time.monotonic()
    for name, x in tensors.items():
        np.copyto(room[name], x)
    return {"copy_seconds": time.monotonic() - began}


def digests(tensors: dict[str, np.ndarray]) -> dict[str, str]:
    """SHA-256 of each of vLLM's layers, by its name: some are joined there."""
    parts: dict[str, list[np.ndarray]] = {}
    for name in tensors:
        head, _, last = name.removesuffix(".weight").rpartition(".")
        joined, olds = next(((new, olds) for new, olds in FUSED.items() if last in olds), (last, (last,)))
        layer = f"{head}.{joined}" if head else joined
        parts[layer] = [tensors[f"{head}.{old}.weight" if head else name] for old in olds]
    if moved_weights.HEAD not in tensors:
        parts["lm_head"] = parts["model.embed_tokens"]
    found = {}
    for layer, arrays in parts.items():
        digest = hashlib.sha256()
        for x in arrays:
            digest.update(np.ascontiguousarray(x).tobytes())
        found[layer] = digest.hexdigest()
    return found


class Child:
    """Process that answers lines of JSON."""

    def __init__(self, words: list[str]) -> None:
        variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables, cwd=ROOT
        )

    def ask(self, **asked: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


# ----------------------------------------------------------------------------------------------------------- a server


def untied(folder: Path, to: Path) -> Path:
    """Copy of a tied model with an output layer of its own."""
    from safetensors.numpy import save_file

    shutil.copytree(folder, to)
    tensors = moved_weights.base(folder)
    head = moved_weights.moved({moved_weights.HEAD: tensors[moved_weights.EMBEDDING]}, 1 << 20)
    save_file(tensors | head, to / "model.safetensors", metadata={"format": "pt"})
    about = json.loads((to / "config.json").read_text()) | {"tie_word_embeddings": False}
    (to / "config.json").write_text(json.dumps(about))
    return to


def served(python: str, model: Path, port: int, log: Path, compiled: bool) -> subprocess.Popen[bytes]:
    variables = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT),
    } | ONE_CORE  # fmt: skip
    words = [
        str(Path(python).parent / "vllm"), "serve", str(model), "--port", str(port), "--host", "127.0.0.1", "--dtype",
        "float32", "--max-model-len", "256", "--max-num-seqs", "64", "--enable-scale-out",
        "--weight-transfer-config", '{"backend": "longhaul"}', "--worker-extension-cls", DIGESTS,
        *(() if compiled else ("--enforce-eager",)),
    ]  # fmt: skip
    variables["PATH"] = f"{Path(python).parent}:{variables['PATH']}"
    return subprocess.Popen(words, env=variables, stdout=log.open("wb"), stderr=subprocess.STDOUT, cwd=log.parent,
                            start_new_session=True)  # fmt: skip


class Clients:
    """Clients that ask for greedy answers while they may."""

    def __init__(self, url: str, prompts: list[list[int]], length: int) -> None:
        self.url, self.prompts, self.length = url, prompts, length
        self.answers: list[tuple[int, list[int], list[Any]]] = []
        self.failed: list[str] = []
        self.go, self.over = threading.Event(), False
        self.busy = 0
        self._lock = threading.Lock()
        for number in range(CLIENTS):
            threading.Thread(target=self._work, args=(number,), daemon=True).start()

    def asked(self, place: int) -> tuple[list[int], list[Any]]:
        sampling = {"max_tokens": self.length, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        reply = call(
            self.url, "/inference/v1/generate", {"token_ids": self.prompts[place], "sampling_params": sampling}
        )
        (choice,) = reply["choices"]
        return choice["token_ids"], choice["weight_versions"]

    def _work(self, number: int) -> None:
        rng = np.random.default_rng(number)
        while not self.over:
            self.go.wait()
            with self._lock:
                self.busy += 1
            place = int(rng.integers(len(self.prompts)))
            try:
                answer = (place, *self.asked(place))
                with self._lock:
                    self.answers.append(answer)
            except Exception as error:
                self.failed.append(repr(error))
            with self._lock:
                self.busy -= 1

    def still(self) -> list[tuple[int, list[int], list[Any]]]:
        """Answers so far, once none is under way."""
        self.go.clear()
        while self.busy:
            time.sleep(0.05)
        found, self.answers = self.answers, []
        return found


# ------------------------------------------------------------------------------------------------------------ the whole


def main() -> None:
    flags = results.parser(__doc__)
    flags.add_argument("--model", type=Path, required=True, help="folder of a model")
    flags.add_argument("--python", help="Python with vLLM")
    flags.add_argument("--untied", action="store_true", help="give the model an output layer of its own")
    flags.add_argument("--compiled", action="store_true", help="let vLLM compile the model, as it does by itself")
    flags.add_argument("--in-process", action="store_true", help="update vLLM in this process")
    flags.add_argument("--updates", type=int, default=20)
    flags.add_argument("--length", type=int, default=16, help="tokens of an answer")
    flags.add_argument("--seconds", type=float, default=3600.0, help="no update begins later than this")
    flags.add_argument("--port", type=int, default=8123)
    flags.add_argument("--log", type=Path, help="file of the server's output")
    flags.add_argument("--sender", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.sender:
        sender(args.model, args.sender)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server ends, too
    with tempfile.TemporaryDirectory() as scratch:
        model = untied(args.model, Path(scratch) / "untied") if args.untied else args.model.resolve()
        if args.in_process:
            results.emit(in_process(args, model), args.json)
            return
        log = args.log or Path(scratch) / "server.log"
        server = served(args.python, model, args.port, log.absolute(), args.compiled)
        children: list[Child] = []
        try:
            figure = measured(args, model, Path(scratch), server, children)
        finally:
            for child in children:
                child.close()
            for sent_signal in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(server.pid, sent_signal)
                    server.wait(20.0)
        results.emit(figure, args.json)


def prompts_of(model: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [words.encode(form.format(noun), add_special_tokens=False).ids for noun in NOUNS for form in FORMS]


def measured(
    args: argparse.Namespace, model: Path, scratch: Path, server: subprocess.Popen[bytes], children: list[Child]
) -> dict[str, Any]:
    url, began = f"http://127.0.0.1:{args.port}", time.monotonic()
    reference = Child([args.python, str(ROOT / "benchmarks/peers/vllm_reference.py"), str(model)])
    children.append(reference)
    while True:
        try:
            urllib.request.urlopen(f"{url}/health").close()
            break
        except OSError:
            if server.poll() is not None:
                raise SystemExit(f"vLLM ended with {server.returncode}") from None
            time.sleep(1.0)
    command = [sys.executable, "-m", "benchmarks.vllm_updates", "--model", str(model), "--sender", url]
    children.append(Child(command))
    prompts = prompts_of(model)
    assert len(prompts) == PROMPTS
    clients = Clients(url, prompts, args.length)
    checked: dict[str, list[list[int]]] = {}
    rows: list[dict[str, Any]] = []
    sums = dict.fromkeys(("answers", "of_two_versions", "of_two_right", "as_checked", "digests_equal"), 0)
    refused = ""

    def every(label: str) -> list[list[int]]:
        with ThreadPoolExecutor(PROMPTS) as pool:
            found = list(pool.map(clients.asked, range(PROMPTS)))
        assert {span["version"] for _, spans in found for span in spans} == {label}, (label, found[0][1])
        return [token for token, _ in found]

    checked["default"] = every("default")
    first = reference.ask(call="check", prompts=prompts, tokens=checked["default"], old=1)
    before, last = "default", 0
    for version in range(1, args.updates + 1):
        if time.monotonic() - began > args.seconds:
            break
        clients.go.set()
        time.sleep(1.0)  # all clients are in the middle of an answer
        if version == REFUSED:
            refused = children[-1].ask(do="refuse", version=1000 + version, number=10 * version - 5)["refused"]
        if version == KILLED:
            assert children[-1].ask(do="half", version=2000 + version, number=10 * version - 5) is None
            children.append(Child(command))
        result = children[-1].ask(do="update", version=version, number=10 * version)
        answers = clients.still()
        label = str(version)
        checked[label] = every(label)
        theirs = call(url, "/collective_rpc", {"method": "digests"})["results"][0]
        sums["digests_equal"] += theirs == result["digests"]
        sums["answers"] += len(answers)
        mixed = []
        for place, token, spans in answers:
            if len(spans) == 1:
                sums["as_checked"] += token == checked[spans[0]["version"]][place]
            else:
                assert [span["version"] for span in spans] == [before, label], spans
                cut = spans[0]["end"]
                assert token[:cut] == checked[before][place][:cut], "tokens of the older version"
                mixed.append((prompts[place] + token, len(prompts[place]) + cut))
        reference.ask(call="load", version=version)
        right = reference.ask(call="tails", rows=[row for row, _ in mixed], firsts=[x for _, x in mixed])["right"]
        sums["of_two_versions"] += len(mixed)
        sums["of_two_right"] += right
        found = reference.ask(call="check", prompts=prompts, tokens=checked[label], old=last)
        changed = sum(a != b for a, b in zip(checked[label], checked[before], strict=True))
        spent = {name: result[name] for name in ("seconds", "paused", "held", "copy_seconds")}
        rows.append(found | spent | {"changed": changed})
        print(json.dumps({"version": version, **sums, **rows[-1]}), file=sys.stderr)
        before, last = label, version
    disk = by_folder(url, model, scratch, last + 1)
    reference.ask(call="load", version=last + 1)
    own = reference.ask(call="check", prompts=prompts, tokens=every("disk"), old=last)
    clients.over = True

    return {
        "benchmark": "vllm_updates", "model": args.model.name, "tied": not args.untied, "compiled": args.compiled,
        "updates": last, "prompts": PROMPTS, "length": args.length, "before": first, **summed(rows),
        "changed_answers": [row["changed"] for row in rows], **sums, "failed_requests": clients.failed,
        "refused": refused, "killed_senders": int(last >= KILLED),
        "update_seconds": round(statistics.median(row["seconds"] for row in rows), 3),
        "disk_pause_seconds": round(disk, 3), "disk_equal": own["equal"], "disk_tokens": own["tokens"],
        "disk_near_ties": own["near_ties"],
    }  # fmt: skip


def in_process(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    os.environ.update(ONE_CORE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), dtype="float32", max_model_len=256, max_num_seqs=64, enforce_eager=not args.compiled,
              weight_transfer_config={"backend": "longhaul"}, worker_extension_cls=DIGESTS)  # fmt: skip
    base, prompts = moved_weights.base(model), prompts_of(model)
    greedy = SamplingParams(max_tokens=args.length, temperature=0.0, ignore_eos=True, detokenize=False)
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    reference = Child([sys.executable, str(ROOT / "benchmarks/peers/vllm_reference.py"), str(model)])
    rows: list[dict[str, Any]] = []
    same = 0
    try:
        with Publisher("vllm-updates", transports=[transports.serve(LINK)]) as publisher:
            rollout = vllm.Rollout(publisher, vllm.InProcess(llm), [LINK])
            for version in range(1, args.updates + 1):
                tensors = moved_weights.moved(base, version)
                rollout.update(version, tensors, 120.0)
                spent = {"paused": rollout.paused, "held": rollout.held} | copied(tensors)
                same += llm.collective_rpc("digests") == [digests(tensors)]
                tokens = [list(each.outputs[0].token_ids) for each in llm.generate(asked, greedy, use_tqdm=False)]
                assert llm.get_weight_version() == str(version)
                reference.ask(call="load", version=version)
                rows.append(spent | reference.ask(call="check", prompts=prompts, tokens=tokens, old=version - 1))
                print(json.dumps({"version": version, "digests_equal": same, **rows[-1]}), file=sys.stderr)
    finally:
        reference.close()
    return {
        "benchmark": "vllm_updates", "in_process": True, "model": args.model.name, "tied": not args.untied,
        "compiled": args.compiled, "updates": len(rows), "prompts": PROMPTS, "length": args.length,
        "digests_equal": same, **summed(rows),
    }  # fmt: skip


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums of tokens, and medians of seconds, over updates."""

    def middle(name: str) -> float:
        return round(statistics.median(row[name] for row in rows), 3)

    copies = [row["paused"] / row["copy_seconds"] for row in rows]
    return {
        "tokens": sum(row["tokens"] for row in rows), "equal": sum(row["equal"] for row in rows),
        "near_ties": sum(row["near_ties"] for row in rows), "wrong_prompts": sum(len(row["wrong"]) for row in rows),
        "old_head_differs": [row["old_head_differs"] for row in rows], "pause_seconds": middle("paused"),
        "copy_seconds": middle("copy_seconds"), "held_seconds": middle("held"),
        "pause_in_copies": [round(x, 2) for x in (min(copies), statistics.median(copies), max(copies))],
    }  # fmt: skip


def by_folder(url: str, model: Path, scratch: Path, version: int) -> float:
    """Seconds in which the server is paused for its own loader, of a version's folder."""
    from safetensors.numpy import save_file

    folder = scratch / "version"
    shutil.copytree(model, folder)
    save_file(moved_weights.moved(moved_weights.base(model), version), folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    http = vllm.Http(url)
    began = time.monotonic()
    http.pause()
    http.reload(str(folder), "disk")
    http.resume()
    return time.monotonic() - began


if __name__ == "__main__":
    main()
