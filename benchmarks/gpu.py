"""Work of one accelerator: figures of speed at its sizes, in one run that keeps to a limit of time.

    python -m benchmarks.gpu --json FILE [--only NAME...] [--together N] [--minutes 9]
        [--peer-python PYTHON --peer-path FOLDER]

The figures are those of `longhaul bench`, with thousands of worlds where its own sizes are for a few cores. Each has a
process of its own. What fails is named and left out, and makes the exit code 1; what no longer fits into the time is
named, too. With a PureJaxRL (`longhaul.bench.harness.figure`) both take turns on the same device.

Most of the time goes into compiling, on the host. With `--together N` so many figures are compiled side by side; none
is measured before all of these have run once, and one at a time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks import results
from longhaul.bench import harness

SELFPLAY = {"num_envs": 512, "least": 16, "scenarios": 1_024, "total_steps": 4_194_304}
"""Update of PufferDrive's 0.3 M agent steps a second on an RTX 4080: 512 worlds, 16 agents, 32 steps."""

RECURRENT = {"update_epochs": 1, "precision": "bf16"}

GAME = RECURRENT | {"num_steps": 32, "num_minibatches": 4, "hidden_dim": 32, "memory": 32}

BREAKOUT = GAME | {"env": "gymnax/Breakout-MinAtar", "num_envs": 8_192, "total_steps": 20_971_520}

CRAFTAX = GAME | {"env": "craftax/Craftax-Symbolic-v1", "num_envs": 4_096, "total_steps": 1_048_576}

CLASSIC = GAME | {"env": "craftax/Craftax-Classic-Symbolic-v1", "num_envs": 16_384, "total_steps": 2_097_152}

TRAINED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("selfplay", "driving-selfplay", SELFPLAY),
    ("selfplay-safety", "driving-best", SELFPLAY),
    (
        "selfplay-recurrent",
        "driving-selfplay",
        SELFPLAY | RECURRENT | {"hidden_dim": 256, "memory": 256, "num_minibatches": 8, "lr": 1e-3},
    ),
    ("breakout-recurrent", "ppo", BREAKOUT),
    ("breakout-wide", "ppo", BREAKOUT | {"hidden_dim": 512, "memory": 512, "total_steps": 5_242_880}),
    ("craftax", "ppo", CRAFTAX),
    ("craftax-classic", "ppo", CLASSIC),
    (
        "hackmatrix-best",
        "hackmatrix-best",
        {"num_envs": 4_096, "num_minibatches": 16, "update_epochs": 2, "precision": "bf16", "total_steps": 4_194_304},
    ),
)
"""Name, recipe and settings of figures that have no benchmark of their own.

Self-play at PufferDrive's sizes, without and with the safety check, and with a network of its sizes: an encoder and a
recurrent unit of 256, one epoch. Recurrent networks at PufferLib's widths, 32 and 512, in games of other libraries,
which must be installed. HackMatrix as it learns best.
"""

FIGURES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("cartpole", "ppo-cartpole", {"num_envs": (2_048,), "total_steps": 20_971_520}),
    ("cartpole-wide", "ppo-cartpole", {"num_envs": (16_384, 131_072), "total_steps": 167_772_160}),
    ("driving-train", "driving-train", {"num_envs": 4_096, "total_steps": 8_388_608, "scenarios": 1_024}),
    ("driving-env", "driving-env", {"objects": (64,), "batch": 4_096, "scenarios": 256, "agents": (1, 64)}),
    ("driving-road", "driving-env", {"objects": (64,), "batch": 4_096, "scenarios": 256, "road_points": 200}),
    ("driving-step", "driving-step", {"objects": (64,), "batch": 4_096, "scenarios": 256}),
    (
        "hackmatrix",
        "hackmatrix-ppo",
        {"num_envs": 4_096, "num_steps": 128, "precision": "bf16", "total_steps": 2_097_152},
    ),
    ("hackmatrix-env", "hackmatrix-env", {"num_envs": 16_384}),
    *((name, "train", {"recipe": (recipe,), "settings": settings}) for name, recipe, settings in TRAINED),
    ("seeds", "seeds", {"runs": 256, "total_steps": 499_712}),
    ("replay", "replay", {"size": 10_000_000, "columns": 4_096, "batch": 4_096, "iterations": 500}),
    ("reasoning", "reasoning", {"rows": 1_024, "length": 128, "width": 512, "layers": 8, "calls": 4}),
)
"""What to ask for it by, the benchmark, its sizes."""

SHARED = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}
"""Of a device that two processes take turns on: neither may take most of its memory at once, as JAX would."""

MANY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Of a device that holds the programs of several figures: each takes what it needs."""


class Device:
    """Device of several figures: nobody measures before all are ready or have failed, and then one at a time."""

    def __init__(self, figures: int) -> None:
        self.unready = figures
        self.changed = threading.Condition()


class Turn:
    """Turn of one figure at the device, held while it measures."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._settled = False

    def settle(self) -> None:
        """Nobody waits for this figure any more: it is ready, or has failed."""
        with self._device.changed:
            self._device.unready -= not self._settled
            self._settled = True
            self._device.changed.notify_all()

    def __enter__(self) -> None:
        self.settle()
        self._device.changed.acquire()
        self._device.changed.wait_for(lambda: self._device.unready == 0)

    def __exit__(self, *error: object) -> None:
        self._device.changed.release()


def measure(
    name: str, benchmark: str, case: dict[str, Any], peer: Mapping[str, Any], turn: Turn, file: Path | None
) -> bool:
    """Figure of one case, written; False if its process failed, which is told in its place."""
    began = time.monotonic()
    try:
        options = peer if benchmark in ("ppo-cartpole", "seeds") else {}
        results.emit(harness.figure(benchmark, case, turn=turn, **options), file)
        return True
    except RuntimeError as error:  # a worker's, whose own message is above
        results.emit({"name": name, "config": case, "error": str(error)})
        return False
    finally:
        turn.settle()
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = results.parser(__doc__)
    names = [name for name, *_ in FIGURES]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--together", type=int, default=1, metavar="N", help="figures compiled side by side")
    parser.add_argument("--minutes", type=float, default=60.0, help="no figure begins after so many")
    parser.add_argument("--peer-python", help="the Python of an environment with PureJaxRL's dependencies")
    parser.add_argument("--peer-path", help="the folder of PureJaxRL's ppo.py")
    args = parser.parse_args()
    if args.together < 1:
        parser.error(f"--together is {args.together}; it must be 1 or more")
    jax.config.update("jax_platforms", "cpu")  # of this process, which would take memory of what it measures
    ends = time.monotonic() + 60.0 * args.minutes
    peer = {"peer_python": args.peer_python, "peer_path": args.peer_path} if args.peer_python else {}
    os.environ |= (MANY if args.together > 1 else {}) | (SHARED if peer else {})
    asked = [figure for figure in FIGURES if figure[0] in args.only]
    several = [
        (name, benchmark, case) for name, benchmark, sizes in asked for case in harness.cases(benchmark, **sizes)
    ]
    succeeded = []
    for begin in range(0, len(several), args.together):
        group = several[begin : begin + args.together]
        if time.monotonic() > ends:
            for name, *_ in group:
                results.emit({"name": name, "left_out": f"{args.minutes:g} minutes were over"})
            continue
        device = Device(len(group))
        with ThreadPoolExecutor(len(group)) as threads:
            begun = [threads.submit(measure, *figure, peer, Turn(device), args.json) for figure in group]
        succeeded += [figure.result() for figure in begun]
    sys.exit(not all(succeeded))


if __name__ == "__main__":
    main()
