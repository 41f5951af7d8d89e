"""Gradients that meet while the backward pass goes on, over a slow link: `python -m benchmarks.overlap`.

Two processes of one device train CartPole with a wide network, whose gradients are several buckets. Their link is
slowed down by `slow_link.c`, compiled at the start: gloo's writer sleeps as long as the link would take. Measured are
seconds of an update

    together   all gradients in one all-reduce after the backward pass
    buckets    in buckets, as `longhaul.runtime.overlap` sends them

in turn, in rounds, and each over the loopback without a delay, too. What the delay adds to an update is the link's
time; what buckets save of it was hidden behind the backward pass. Prints one JSON object a round, and the medians.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from longhaul.algorithms.config import PPOConfig
from longhaul.cli import tables
from longhaul.config.resolve import resolve
from longhaul.config.run import Named, Run
from longhaul.diagnostics import calibration
from longhaul.networks.config import NetworkConfig
from longhaul.runtime import overlap

SOURCE = Path(__file__).resolve().parent / "slow_link.c"

RUN = Run(
    "ppo", Named("cartpole"),
    PPOConfig(num_minibatches=1, update_epochs=2, network=NetworkConfig(hidden_dim=512, num_layers=4, shared=True)),
    total_steps=10**6, num_envs=32, num_steps=32, devices=2,
)  # fmt: skip

CALLS = 5


def main(words: Sequence[str]) -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--rate", type=float, default=50e6, help="bytes a second of the link")
    parser.add_argument("--latency", type=float, default=1e-4, help="seconds of a message")
    parser.add_argument("--bucket", type=int, default=2**20, help="bytes of a bucket")
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(words)
    about = {"rate": args.rate, "latency": args.latency, "bucket": args.bucket, "threads": args.threads}
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "slow_link.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl"], check=True)
        slow = {"LD_PRELOAD": str(library), "SLOW_LINK": f"{args.rate} {args.latency}"}
        for _ in range(args.rounds):
            record = {"name": "overlap", **about}
            for link, variables in (("fast", {}), ("slow", slow)):
                for way, size in (("together", math.inf), ("buckets", args.bucket)):
                    request = {"bucket": size, "threads": args.threads}
                    record[f"{way}_{link}"] = calibration.ask("benchmarks.overlap", "work", request, 2, variables)
            results.emit(record, args.json)
            records.append(record)
    show(records)
    return 0


def work(request: dict[str, Any]) -> float:
    """Seconds of an update of two processes, the median of some calls."""
    overlap.BUCKET = request["bucket"]
    run = resolve(dataclasses.replace(RUN, block=1, log_interval=1))
    return calibration.timed(run, CALLS, 2 * request["threads"]).update


def show(records: Sequence[dict[str, Any]]) -> None:
    """Prints the medians, and the share of the link's time that was hidden."""

    def median(name: str) -> float:
        return statistics.median(each[name] for each in records)

    link = median("together_slow") - median("together_fast")
    hidden = (median("together_slow") - median("buckets_slow")) / link
    rows = [[way, *(f"{median(f'{way}_{link}'):.3f}" for link in ("fast", "slow"))] for way in ("together", "buckets")]
    tables.table(["s/update", "fast link", "slow link"], rows)
    print(f"the slow link takes {link:.3f} s of an update; {hidden:.0%} of it is hidden")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
