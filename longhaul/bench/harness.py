"""Benchmarks: how fast, as one JSON object a figure.

Every figure has a process of its own, because JAX fixes the number of CPU devices and threads when it starts: the
process prepares, compiles, runs once to warm up, and then repeats when asked to. A peer, another library's program for
the same work, is asked in turn with ours, so that both meet the same load of the machine; where that load is high,
compare CPU-seconds.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from longhaul.bench.cases import actors as acting
from longhaul.bench.cases import central, reasoning, replay, sync, training
from longhaul.bench.cases.training import Prepared
from longhaul.config.run import MOST
from longhaul.runtime.launch.process import PIPE, Process
from longhaul.runtime.provenance import provenance


class Benchmark(NamedTuple):
    about: str
    work: Callable[..., Prepared]
    sizes: Mapping[str, Any]  # with their defaults; of several values each has a figure
    each: Mapping[str, Sequence[Any]] = {}  # what nobody chooses: each value has a figure


HOST_CARTPOLES = (
    "numpy/longhaul.envs.host.numpy_cartpole:cartpole",
    "gymnasium/CartPole-v1",
    "gymnasium/CartPole-v1?vectorised=False",  # one by one, as peers step them
    "cartpole",
)

DRIVING = {"objects": (32, 64), "batch": 256, "num_steps": 256, "scenarios": 64, "devices": None, "data": ()}
HACKMATRIX = {"num_envs": 256, "num_steps": 128, "precision": "fp32", "total_steps": None, "devices": None}

BENCHMARKS = {
    "ppo-cartpole": Benchmark(
        "PPO at PureJaxRL's CartPole settings, with 4, 512 and 2,048 environments",
        training.ppo_cartpole,
        {"num_envs": (4, 512, 2048), "total_steps": None, "devices": None},
    ),
    "seeds": Benchmark(
        "16 runs of PPO in one program, each with PureJaxRL's CartPole settings and 4 environments",
        training.seeds,
        {"runs": 16, "num_envs": 4, "num_steps": 128, "total_steps": 102_400, "devices": None, "together": None},
    ),
    "deterministic": Benchmark(
        "the same training without and with --deterministic, on 1 device and on 8",
        training.ppo_cartpole,
        {"num_envs": 512, "total_steps": 262_144},
        {"devices": (1, 8), "deterministic": (False, True)},
    ),
    "driving-scenarios": Benchmark(
        "generated scenarios made and compiled: of the ego; of 16 agents, and kept from 1, 8 or 12 on",
        training.driving_scenarios,
        {"scenarios": 64},
        {"driven": ((1, 1), (16, 1), (16, 8), (16, 12))},
    ),
    "driving-step": Benchmark(
        "dynamics, collision and off-road of all objects of driving worlds",
        training.driving_step,
        DRIVING,
    ),
    "driving-env": Benchmark(
        "whole environment steps of driving: observation, reward, ends, metrics, resets",
        training.driving_env,
        DRIVING | {"agents": (1,), "road_points": 0},
    ),
    "driving-train": Benchmark(
        "training by the driving recipe",
        training.driving_train,
        {"total_steps": 131_072, "num_envs": 256, "scenarios": 256, "devices": None},
    ),
    "train": Benchmark(
        "training by any recipe, of --recipe; four updates a repeat",
        training.train,
        {"recipe": ("cartpole",), "settings": {}, "devices": None},
    ),
    "replay": Benchmark(
        "rows added and steps sampled in turn, evenly and by priority, beside bare look-ups; --peer-python",
        replay.replay,
        {
            "columns": 64, "width": 64, "size": 1_000_000, "batch": 256, "iterations": 2_000, "half": False,
            "fill": (0.01, 1.0),
        },
        {"kind": ("bare", "even", "prioritised")},
    ),
    "sac": Benchmark(
        "training by the pendulum-sac recipe; --env brax/NAME --peer-python: beside Brax's SAC",
        replay.sac,
        {
            "total_steps": None, "devices": None, "env": (), "num_envs": 64, "gradient_steps": (1, 16), "batch": 256,
            "size": None, "fill": 0.0, "precision": "fp32",
        },
    ),
    "hackmatrix-ppo": Benchmark(
        "training by the hackmatrix recipe, with peak memory",
        training.hackmatrix_ppo,
        HACKMATRIX,
    ),
    "hackmatrix": Benchmark(
        "the same with its starts, cold and warm, and shares; --grid: over sizes and precisions",
        training.hackmatrix_ppo,
        HACKMATRIX,
    ),
    "hackmatrix-env": Benchmark(
        "whole steps of HackMatrix by random legal actions: mask, observation, reward, resets",
        training.hackmatrix_env,
        {"num_envs": 256, "num_steps": 32, "rollouts": 20, "devices": None, "rules": "jax"},
    ),
    "reasoning": Benchmark(
        "tokens sampled by a small language model, and learnt from; --peer-python: beside transformers",
        reasoning.reasoning,
        {"rows": 64, "prompt": 16, "length": 48, "width": 64, "layers": 2, "calls": 8},
        {"what": ("sample", "train")},
    ),
    "transport": Benchmark(
        "steps and actions between two processes through shared memory, 64 x 128 float32 each",
        central.shared_transport,
        {"rows": 64, "width": 128, "streams": 16, "messages": 100_000},
        {"copies": (1, 2)},
    ),
    "actors": Benchmark(
        "CartPole by actors on the host, training included; --actors --staleness --env --num-envs",
        acting.actors,
        {
            "env": HOST_CARTPOLES, "num_envs": 512, "num_steps": 64, "actors": 2, "actor_kind": "process",
            "staleness": 1, "updates": 20,
        },
    ),
    "central": Benchmark(
        "central inference for actors' processes, no learner; --env --actors --worlds --slots --lane",
        central.central,
        {
            "env": HOST_CARTPOLES[:2], "actors": 2, "worlds": 256, "slots": 2, "lane": ("shm", "grpc"),
            "num_steps": 64, "batches": 6,
        },
    ),
    "sync": Benchmark(
        "a model's parameters to other processes, by lane; beside the limits; --model --receivers --lane",
        sync.sync,
        {"model": "qwen3-0.6b", "receivers": 2, "learning_rate": None, "lane": ("shm", "tcp")},
    ),
    "transport-grpc": Benchmark(
        "the same by gRPC, in turn with a bare gRPC echo of as many bytes",
        central.transport,
        {"rows": 64, "width": 128, "streams": 16, "messages": 4_000},
    ),
}  # fmt: skip
"""Benchmarks by name. `devices` None: as many as a training run takes. Of `hackmatrix` this is the training alone; its
whole figure is made by `hackmatrix_grid`."""

LANES = {"central": ("shm", "grpc"), "sync": ("shm", "tcp", "folder")}

LEAST_REPEATS = 5

REFERENCE = {4: 158_668.0, 512: 208_800.0, 2048: 133_700.0}
"""PureJaxRL's env steps per second by environments, once measured on two idle cores of another machine."""

PEERS = Path(__file__).resolve().parents[2] / "benchmarks/peers"
PEER_OF = {
    "ppo-cartpole": "purejaxrl_ppo", "seeds": "purejaxrl_ppo", "replay": "flashbax_replay", "sac": "brax_sac",
    "reasoning": "transformers_reasoning",
}  # fmt: skip
"""Name -> program of another library that does the same, in `PEERS`; only a clone of the project has it."""

FROM_ZERO = ("road_points", "staleness")
"""Sizes that may be 0; all others are 1 or more."""

MARK = "figure "
"""Begins a worker's answers; anything else that a library prints is not one."""


def run(name: str, **options: Any) -> Iterator[dict[str, Any]]:
    """The figures of a benchmark, one after the other, as `longhaul bench` prints them.

    Options are the benchmark's sizes, and those of `figure`. Raises ValueError for an unknown name, for sizes that
    can't be and for too few repeats.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"no benchmark is named {name!r}; there are {', '.join(BENCHMARKS)}")
    common = {key: options.pop(key) for key in ("repeats", "peer_python", "peer_path") if key in options}
    for size, value in options.items():  # all that is known, before anything starts
        check(size, value)
    several = cases(name, **options)
    for case in several:
        if "objects" in case:
            training.check_bank(case["objects"])
        if name == "sync":
            sync.check(case["model"], case["receivers"])
    for case in several:
        yield figure(name, case, **common)


def cases(name: str, **sizes: Any) -> list[dict[str, Any]]:
    """Arguments of a benchmark's work, one case a figure. Raises ValueError for sizes that it does not have."""
    benchmark = BENCHMARKS[name]
    if unknown := sizes.keys() - benchmark.sizes.keys():
        raise ValueError(f"{name} has no {', '.join(sorted(unknown))}; its sizes are {', '.join(benchmark.sizes)}")
    chosen = {**benchmark.each, **benchmark.sizes, **sizes}
    for lane in chosen.get("lane", ()):
        if lane not in LANES[name]:
            raise ValueError(f"lane is {lane!r}; this benchmark has {', '.join(LANES[name])}")
    if name == "sac" and not chosen["env"]:  # the recipe's
        chosen |= {"env": (None,), "gradient_steps": 8}
    if "data" in chosen:  # all of them are one figure's
        chosen["data"] = [list(chosen["data"])]
    values = [value if isinstance(value, tuple | list) else (value,) for value in chosen.values()]
    return [dict(zip(chosen, each, strict=True)) for each in itertools.product(*values)]


def check(size: str, value: Any) -> None:
    """Raises ValueError, naming value, bound and remedy, where no benchmark can have this size."""
    flag, least = f"--{size.replace('_', '-')}", 0 if size in FROM_ZERO else 1
    for each in value if isinstance(value, Sequence) else (value,):
        if size == "fill" and not 0.0 <= each <= 1.0:
            raise ValueError(f"{flag} is {each}; it must lie in 0 to 1")
        if isinstance(each, int) and not isinstance(each, bool) and size != "fill" and not least <= each <= MOST:
            raise ValueError(f"{flag} is {each}; it must lie in {least} to {MOST}")


def figure(
    name: str,
    case: dict[str, Any],
    *,
    repeats: int = LEAST_REPEATS,
    peer_python: str | None = None,
    peer_path: str | None = None,
    turn: AbstractContextManager[object] | None = None,
) -> dict[str, Any]:
    """One figure: medians over `repeats`.

    With `peer_python` and `peer_path` (the Python and the folder of `ppo.py` of a PureJaxRL) the peer repeats in turn
    with us; `peer_ratio` and `peer_cpu_ratio` are the medians of the repeats' ratios, above 1 where we are faster.
    `turn` is entered before the first repeat: figures that are prepared side by side are measured one at a time.
    """
    if repeats < LEAST_REPEATS:
        raise ValueError(f"{repeats} repeats; give {LEAST_REPEATS} or more: a median of fewer says little")
    compared = peer_python is not None and name in PEER_OF and case.get("kind") != "bare"
    compared &= name != "sac" or (case["env"] or "").startswith("brax/")
    compared &= PEER_OF.get(name) != "purejaxrl_ppo" or peer_path is not None
    if compared and not PEERS.is_dir():
        raise ValueError("a peer runs a program of benchmarks/peers, which no installation has; use a clone's command")
    with ExitStack() as workers:
        command = [sys.executable, "-c", OURS, json.dumps([name, case])]
        ours = workers.enter_context(Worker(command, {"LONGHAUL_CACHE": "off"}))  # compile_seconds are the compiler's
        others = None
        if compared:
            # One thread where we have one, as `prepare_devices` says. With two it may hang where seeds are vmapped.
            few = {"NPROC": "1"} if ours.about["config"].get("devices") == 1 else {}
            few |= {"NPROC": "4"} if name == "seeds" else {}
            words = [str(Path(peer_path).resolve())] if peer_path is not None else []
            command = [str(peer_python), str(PEERS / f"{PEER_OF[name]}.py"), json.dumps(ours.about), *words]
            others = workers.enter_context(Worker(command, few))
        with turn or nullcontext():
            pairs = [(ours.ask(), others.ask() if others else None) for _ in range(repeats)]
    mine, peers = [own for own, _ in pairs], [other for _, other in pairs if other is not None]
    about = {key: ours.about[key] for key in ("versions", "commit", "device")}
    record = {"name": name, "config": ours.about["config"], **medians(ours.about, mine), "repeats": repeats, **about}
    reference = REFERENCE.get(case.get("num_envs", 0)) if name == "ppo-cartpole" else None
    if reference is not None:
        record |= {"reference_per_second": reference, "ratio": record["per_second"] / reference}
    if others is not None:
        record["peer"] = medians(others.about, peers) | {"versions": others.about["versions"]}
        share = ours.about["steps"] / others.about["steps"]
        for ratio, key in (("peer_ratio", "wall_seconds"), ("peer_cpu_ratio", "cpu_seconds")):
            record[ratio] = statistics.median(share * b[key] / a[key] for a, b in zip(mine, peers, strict=True))
    return record


def medians(about: dict[str, Any], rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Record of one program's repeats; `about` is its worker's description."""
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    wall, cpu, steps = middle.pop("wall_seconds"), middle.pop("cpu_seconds"), about["steps"]
    return {
        "steps": steps,
        "unit": about["unit"],
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "per_second": steps / wall,
        "per_cpu_second": steps / cpu,
        "compile_seconds": about["compile_seconds"],
        **middle,
    }


# ---------------------------------------------------------------------------------------------------------- workers

OURS = "from longhaul.bench.harness import serve; serve()"


class Worker:
    """Process of a figure: `ask` is one repeat, `about` what it reported when it was ready."""

    def __init__(
        self, command: list[str], defaults: dict[str, str], settings: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`defaults` are variables of its environment where ours has none, `settings` in any case."""
        variables = defaults | dict(os.environ) | dict(settings)
        self._process = Process(command, variables=variables, talks=True, out=PIPE, tied=False)
        try:
            self.about = self._answer()
        except BaseException:
            self.__exit__()
            raise

    @property
    def id(self) -> int:
        return self._process.id

    def ask(self, message: str = "go") -> dict[str, float]:
        """One repeat, or what else its program knows by a line."""
        self._process.say(f"{message}\n".encode())
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.out is not None
        for line in self._process.out:
            if line.startswith(MARK.encode()):
                answer: dict[str, Any] = json.loads(line[len(MARK) :])
                if "refused" in answer:
                    raise ValueError(answer["refused"])
                return answer
        self._process.wait()
        raise RuntimeError(f"the benchmark's process ended with code {self._process.code}; its message is above")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        """Waits for its end alone: what it began may hold its output open for ever."""
        self._process.end()


def serve() -> None:
    """Worker that prepares the case in its arguments, then repeats it for every line that comes in.

    Its end may be an error: no thread that a figure has begun outlives it.
    """
    name, case = json.loads(sys.argv[1])
    try:
        try:
            prepared = BENCHMARKS[name].work(**case)
        except ValueError as error:  # bad input, as for any command: a log that can't be read, sizes that don't fit
            tell({"refused": str(error)})
            os._exit(1)
        prepared.work(prepared.begin(0))
        tell(introduction(prepared))
        for i, _ in enumerate(sys.stdin):
            tell(measure(prepared, i + 1))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def introduction(prepared: Prepared) -> dict[str, Any]:
    """First message of a worker: configuration, versions and device of its program, which is ready."""
    about = provenance()
    device = ", ".join(f"{count} x {kind}" for kind, count in about["devices"].items())
    origin = {"device": device, "versions": about["versions"], "commit": about["commit"]}
    return {name: getattr(prepared, name) for name in ("config", "steps", "unit", "compile_seconds")} | origin


def measure(prepared: Prepared, number: int) -> dict[str, float]:
    """One repeat: its wall and CPU seconds (of all threads, and of children that ended), and what it found."""
    inputs = jax.block_until_ready(prepared.begin(number))
    used, began = cpu_seconds(), time.perf_counter()
    figures = prepared.work(inputs)
    return {"wall_seconds": time.perf_counter() - began, "cpu_seconds": cpu_seconds() - used} | figures


def cpu_seconds() -> float:
    """CPU-seconds of all threads of the process, and of children that ended."""
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def tell(record: dict[str, Any]) -> None:
    """A worker's answer."""
    print(MARK + json.dumps(record), flush=True)
