"""Feeds damaged and hostile files of every format to the readers, and the scenarios' compiler behind them.

    python -m benchmarks.fuzz 100000 [--seed 0] [--kinds womd-example,nuplan] [--files PATH...] [--json FILE]

Input i of a seed is always the same one. Each must give one clear line (`BadData`), or a log that is sound and compiles
to a scenario, or is refused there by one clear line. A worker process reads them under limits: of memory (2 GiB more
than it starts with), of 5 CPU-seconds an input, and with every event of Python's that runs something or opens a file
for writing counted. Where a worker dies or stops, that input is a finding and the next worker goes on behind it. The
counts are printed as one JSON line; the exit code is 1 if there is a finding. `tests/helpers/damaged_inputs.py` makes
the inputs;
`--files` damages real files instead of small made ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

MEMORY, SECONDS, PATIENCE = 2 << 30, 5.0, 120.0
"""Bytes that an input may take, CPU-seconds that it may last, and seconds after which a silent worker is ended."""

FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.", "ctypes.", "pickle.")
"""Beginnings of the names of audit events that no reader may cause."""


class TooLong(BaseException):
    """Past every `except Exception`, so that no reader takes it for a fault of the file."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="how many inputs")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="formats, separated by commas; all without")
    parser.add_argument("--files", nargs="*", default=[], help="real files to damage")
    parser.add_argument("--json", help="write the counts to this file, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args, Path(args.worker))
        return 0
    report = supervise(args)
    print(json.dumps(report), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(report) + "\n")
    return 1 if report["findings"] else 0


def supervise(args: argparse.Namespace) -> dict[str, Any]:
    """Runs workers until every input has been read; -> the report."""
    outcomes: dict[str, Counter[str]] = {}
    findings: list[dict[str, Any]] = []
    begin, last, peak, slowest = time.monotonic(), args.first + args.count, (0, 0), (0.0, 0)
    done = args.first
    with tempfile.TemporaryDirectory() as folder:
        while done < last:
            for line in worker(args, done, last - done, Path(folder)):
                if line is None:  # it ended without a word about this input
                    findings.append({"input": done, "what": "the worker died, or stopped"})
                    outcomes.setdefault("?", Counter())["died"] += 1
                    done += 1
                    break
                if "finding" in line:
                    findings.append({"input": done, "kind": line["kind"], "what": line["finding"]})
                    print(json.dumps(findings[-1]), file=sys.stderr, flush=True)
                outcomes.setdefault(line["kind"], Counter())[line["outcome"]] += 1
                peak, slowest = max(peak, (line["peak"], done)), max(slowest, (line["seconds"], done))
                done += 1
    return {
        "inputs": args.count,
        "seed": args.seed,
        "outcomes": {kind: dict(sorted(counter.items())) for kind, counter in sorted(outcomes.items())},
        "findings": findings,
        "slowest": {"seconds": slowest[0], "input": slowest[1]},
        "peak": {"megabytes": peak[0] >> 20, "input": peak[1]},
        "wall_seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]), 1),
    }


def worker(args: argparse.Namespace, first: int, count: int, folder: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of one worker process, and None where it ends before it has read everything."""
    command = [sys.executable, "-m", "benchmarks.fuzz", str(count), "--first", str(first), "--seed", str(args.seed)]
    command += ["--kinds", args.kinds, "--worker", str(folder), "--files", *args.files]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_DEFAULT_MEMORY_POOL"), "1")
    threads["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | threads) as process:
        assert process.stdout is not None
        left, buffer = count, b""
        while left:
            if not select.select([process.stdout], [], [], PATIENCE)[0]:
                process.kill()
                break
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                break
            *lines, buffer = (buffer + part).split(b"\n")
            for line in lines:
                left -= 1
                yield json.loads(line)
        if left:
            yield None


def work(args: argparse.Namespace, folder: Path) -> None:
    """Reads one input after the other, a line for each on stdout."""
    from tests.helpers import damaged_inputs

    scratch = folder / "input"
    makers: list[tuple[str, Any]]
    if args.files:
        makers = [(Path(path).name, real(Path(path))) for path in args.files]
    else:
        sound = damaged_inputs.Sources(folder)
        kinds = [kind for kind in damaged_inputs.KINDS if not args.kinds or kind in args.kinds.split(",")]
        makers = [(kind, sound.makers[kind]) for kind in kinds]
    caused: list[str] = []
    watching = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching:
            return
        if event.startswith(FORBIDDEN):
            caused.append(event)
        elif event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
            caused.append(f"open {arguments[0]!s:.80} to write")

    for kind, maker in makers:  # what is imported late is imported now
        attempt(put(maker(np.random.default_rng((args.seed, 1))), scratch))
    sys.addaudithook(watch)
    warnings.simplefilter("error", RuntimeWarning)  # numbers that overflow were not looked at
    limit(MEMORY)
    signal.signal(signal.SIGPROF, stop)
    for number in range(args.first, args.first + args.count):
        kind, maker = makers[number % len(makers)]
        path = put(maker(np.random.default_rng((args.seed, number))), scratch)
        caused.clear()
        begin, watching = time.process_time(), True
        try:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            outcome, finding = attempt(path)
        except TooLong as error:
            outcome, finding = "slow", f"took more than {SECONDS} CPU-seconds, then at {place(error)}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            watching = False
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if (folder / "canary").exists() or caused:
            outcome, finding = "ran", f"it ran something: {sorted(set(caused))}"
            (folder / "canary").unlink(missing_ok=True)
        line = {"kind": kind, "outcome": outcome, "peak": peak, "seconds": round(time.process_time() - begin, 3)}
        print(json.dumps(line | ({"finding": finding} if finding else {})), flush=True)


def stop(*_: object) -> None:
    raise TooLong


def limit(memory: int) -> None:
    """Bounds this process's address space to what it has now and `memory` bytes more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def put(files: dict[str, bytes], scratch: Path) -> Path:
    """Writes the files of one input; -> the one to be read."""
    shutil.rmtree(scratch, ignore_errors=True)
    for name, data in files.items():
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return scratch / next(iter(files))


def attempt(path: Path) -> tuple[str, str | None]:
    """Reads and compiles one input; -> (outcome, what is wrong with it)."""
    from longhaul.driving.datasets.log import BadData

    try:
        return taken(path), None
    except BadData as error:
        message = str(error)
        clear = message.isprintable() and len(message) < 1000 and str(path.parent) in message
        return "refused", None if clear else f"unclear: {message[:300]!r}"
    except AssertionError as error:
        return "unsound", f"unsound: {error}"
    except Exception as error:
        return "escaped", f"{type(error).__name__}: {str(error)[:200]} at {place(error)}"


def place(error: BaseException) -> str:
    """The last three places of ours that an error went through."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "longhaul" in each.filename]
    return ", ".join(f"{Path(each.filename).name}:{each.lineno}" for each in frames[-3:])


def taken(path: Path) -> str:
    """Reads all logs (or scenarios) of a file and compiles them; AssertionError where one is not sound."""
    from longhaul.driving.datasets import readers
    from longhaul.driving.datasets.log import BadData
    from longhaul.driving.scenario.from_log import scenario_from_log
    from longhaul.driving.shards import shard

    if readers.detect(path) == readers.SHARD:
        for scenario in shard.open(path):
            sound(scenario)
        return "read"
    outcome = "read"
    for log in readers.read(path):
        tracks = log.tracks
        assert np.isfinite(tracks.position).all(), "a position is not finite"
        assert np.isfinite(tracks.heading).all(), "a heading is not finite"
        assert tracks.valid[log.sdc].any(), "the ego is never there"
        assert 0 <= log.current < len(log.times), "no such step"
        try:
            scenario = scenario_from_log(log, agents=2, route_margin=3.0)
        except BadData as error:
            outcome, refusal = "not compiled", str(error)
            assert refusal.isprintable(), f"unclear: {refusal[:200]!r}"
            continue
        sound(scenario)
    return outcome


def sound(scenario: Any) -> None:
    """What the simulator relies on; AssertionError where it is not so. Packs and stacks it, too."""
    from longhaul.driving.scenario.bank import stack
    from longhaul.driving.shards.shard import pack, unpack

    for name in ("pose", "velocity", "size", "route", "route_length", "expert_s", "field_origin"):
        assert np.isfinite(getattr(scenario, name)).all(), f"{name} is not finite"
    assert scenario.dt > 0, "no time step"
    assert (scenario.controlled < len(scenario.kind)).all(), "a controlled agent that is not there"
    stack([scenario], agents=1)
    with contextlib.suppress(ValueError):  # a clear refusal: numbers that no record holds
        unpack(pack(scenario))


def real(path: Path) -> Any:
    """A maker of damaged copies of a real file; TFRecords are damaged inside their frames."""
    from longhaul.driving.datasets import readers as sources
    from longhaul.driving.datasets import womd
    from tests.helpers import damaged_inputs as mutations
    from tests.helpers import log_files as made

    data = path.read_bytes()
    beside = {other.name: other.read_bytes() for other in path.parent.glob("log_map_archive_*") if other != path}
    payload = next(womd.records(path))[1] if sources.detect(path) == sources.TFRECORD else None

    def make(random: np.random.Generator) -> dict[str, bytes]:
        if payload is not None:
            pick = mutations.damage if random.integers(0, 2) else mutations.damage_fields
            return {path.name: made.framed([pick(payload, random)])}
        if beside and random.integers(0, 2):
            return {path.name: data} | {name: mutations.damage(other, random) for name, other in beside.items()}
        return {path.name: mutations.damage(data, random)} | beside

    return make


if __name__ == "__main__":
    sys.exit(main())
