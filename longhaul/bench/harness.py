"""Benchmarks: how fast, as one JSON object a figure.

Every figure has a process of its own, because JAX fixes the number of CPU devices and threads when it starts: the
process prepares, compiles, runs once to warm up, and then repeats when asked to. A peer, another library's program for
the same work, is asked in turn with ours, so that both meet the same load of the machine; where that load is high,
compare CPU-seconds.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from longhaul.bench.cases import actors as acting_workloads
from longhaul.bench.cases import central, reasoning, replay, sync, training
from longhaul.bench.cases.training import Prepared
from longhaul.config.run import MOST
from longhaul.runtime.launch.process import PIPE, Process
from longhaul.runtime.provenance import provenance

NAMES = {
    "ppo-cartpole": "PPO at PureJaxRL's CartPole settings, with 4, 512 and 2,048 environments",
    "seeds": "16 runs of PPO in one program, each with PureJaxRL's CartPole settings and 4 environments",
    "deterministic": "the same training without and with --deterministic, on 1 device and on 8",
    "driving-step": "dynamics, collision and off-road of all objects of driving worlds",
    "driving-env": "whole environment steps of driving: observation, reward, ends, metrics, resets",
    "driving-train": "training by the driving recipe",
    "replay": "rows added and steps sampled in turn, evenly and by priority, beside bare look-ups; --peer-python",
    "sac": "training by the pendulum-sac recipe; --env brax/NAME --peer-python: beside Brax's SAC",
    "hackmatrix-ppo": "training by the hackmatrix recipe, with peak memory",
    "hackmatrix": "the same with its starts, cold and warm, and shares; --grid: over sizes and precisions",
    "hackmatrix-env": "whole steps of HackMatrix by random legal actions: mask, observation, reward, resets",
    "reasoning": "tokens sampled by a small language model, and learnt from; --peer-python: beside transformers",
    "transport": "steps and actions between two processes through shared memory, 64 x 128 float32 each",
    "actors": "CartPole by actors on the host, training included; --actors --staleness --env --num-envs",
    "central": "central inference for actors' processes, no learner; --env --actors --worlds --slots --lane",
    "sync": "a model's parameters to other processes, by lane; beside the limits; --model --receivers --lane",
    "transport-grpc": "the same by gRPC, in turn with a bare gRPC echo of as many bytes",
}

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

    Options are the benchmark's sizes (see CASES), and those of `figure`. Raises ValueError for a name that is not in
    NAMES, for sizes that can't be and for too few repeats.
    """
    if name not in NAMES:
        raise ValueError(f"no benchmark is named {name!r}; there are {', '.join(NAMES)}")
    common = {key: options.pop(key) for key in ("repeats", "peer_python", "peer_path") if key in options}
    for size, value in options.items():  # all that is known, before anything starts
        check(size, value)
    cases = CASES[name](**options)
    for case in cases:
        if "objects" in case:
            training.check_bank(case["objects"])
    for case in cases:
        yield figure(name, case, **common)


def check(size: str, value: Any) -> None:
    """Raises ValueError, naming value, bound and remedy, where no benchmark can have this size."""
    flag, least = f"--{size.replace('_', '-')}", 0 if size in FROM_ZERO else 1
    for each in value if isinstance(value, Sequence) else (value,):
        if size == "fill" and not 0.0 <= each <= 1.0:
            raise ValueError(f"{flag} is {each}; it must lie in 0 to 1")
        if isinstance(each, int) and not isinstance(each, bool) and size != "fill" and not least <= each <= MOST:
            raise ValueError(f"{flag} is {each}; it must lie in {least} to {MOST}")


def sizes(name: str) -> frozenset[str]:
    """Sizes that `run` takes for a benchmark."""
    mine = frozenset(inspect.signature(CASES[name]).parameters)
    return mine | sizes("driving-step") if "sizes" in mine else mine


def figure(
    name: str,
    case: dict[str, Any],
    *,
    repeats: int = LEAST_REPEATS,
    peer_python: str | None = None,
    peer_path: str | None = None,
) -> dict[str, Any]:
    """One figure: medians over `repeats`.

    With `peer_python` and `peer_path` (the Python and the folder of `ppo.py` of a PureJaxRL) the peer repeats in turn
    with us; `peer_ratio` and `peer_cpu_ratio` are the medians of the repeats' ratios, above 1 where we are faster.
    """
    if repeats < LEAST_REPEATS:
        raise ValueError(f"{repeats} repeats; a median of fewer than {LEAST_REPEATS} says little")
    compared = peer_python is not None and name in PEER_OF and not case.get("bare")
    compared &= name != "sac" or (case["env"] or "").startswith("brax/")
    compared &= PEER_OF.get(name) != "purejaxrl_ppo" or peer_path is not None
    if compared and not PEERS.is_dir():
        raise ValueError("a peer runs a program of benchmarks/peers, which no installation has; use a clone's command")
    with ExitStack() as workers:
        command = [sys.executable, "-c", OURS, json.dumps([name, case])]
        ours = workers.enter_context(Worker(command, {"LONGHAUL_CACHE": "off"}))  # compile_seconds are the compiler's
        others = None
        if compared:
            # One thread where we have one, as `run.prepare_devices` says. With two it may hang where seeds are vmapped.
            few = {"NPROC": "1"} if ours.about["config"].get("devices") == 1 else {}
            few |= {"NPROC": "4"} if name == "seeds" else {}
            words = [str(Path(peer_path).resolve())] if peer_path is not None else []
            command = [str(peer_python), str(PEERS / f"{PEER_OF[name]}.py"), json.dumps(ours.about), *words]
            others = workers.enter_context(Worker(command, few))
        pairs = [(ours.ask(), others.ask() if others else None) for _ in range(repeats)]
    mine, theirs = [one for one, _ in pairs], [other for _, other in pairs if other is not None]
    about = {key: ours.about[key] for key in ("versions", "commit", "device")}
    record = {"name": name, "config": ours.about["config"], **medians(ours.about, mine), "repeats": repeats, **about}
    reference = REFERENCE.get(case.get("num_envs", 0)) if name == "ppo-cartpole" else None
    if reference is not None:
        record |= {"reference_per_second": reference, "ratio": record["per_second"] / reference}
    if others is not None:
        record["peer"] = medians(others.about, theirs) | {"versions": others.about["versions"]}
        share = ours.about["steps"] / others.about["steps"]
        for ratio, key in (("peer_ratio", "wall_seconds"), ("peer_cpu_ratio", "cpu_seconds")):
            record[ratio] = statistics.median(share * b[key] / a[key] for a, b in zip(mine, theirs, strict=True))
    return record


def medians(about: dict[str, Any], rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Record of one program's repeats; `about` is what its worker said."""
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

    def ask(self, what: str = "go") -> dict[str, float]:
        """One repeat, or what else its program knows by a line."""
        self._process.say(f"{what}\n".encode())
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
    """Loop of one of our workers, to its end, be that an error: no thread that a figure has begun outlives it."""
    try:
        _serve()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _serve() -> None:
    """Prepares the case in its arguments, then repeats it for every line that comes in."""
    name, case = json.loads(sys.argv[1])
    try:
        prepared = WORKLOADS[name](**case)
    except ValueError as error:  # bad input, as for any command: a log that can't be read, sizes that don't fit
        tell({"refused": str(error)})
        os._exit(1)
    prepared.work(prepared.begin(0))
    about = provenance()
    device = ", ".join(f"{count} x {kind}" for kind, count in about["devices"].items())
    ready = {"config": prepared.config, "steps": prepared.steps, "unit": prepared.unit, "device": device}
    tell(ready | {key: about[key] for key in ("versions", "commit")} | {"compile_seconds": prepared.compile_seconds})
    for i, _ in enumerate(sys.stdin):
        tell(measure(prepared, i + 1))


def measure(prepared: Prepared, number: int) -> dict[str, float]:
    """One repeat: its wall and CPU seconds (of all threads, and of children that ended), and what it found."""
    given = jax.block_until_ready(prepared.begin(number))
    used, began = cpu_seconds(), time.perf_counter()
    found = prepared.work(given)
    return {"wall_seconds": time.perf_counter() - began, "cpu_seconds": cpu_seconds() - used} | found


def cpu_seconds() -> float:
    """CPU-seconds of all threads of the process, and of children that ended."""
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def tell(what: dict[str, Any]) -> None:
    """A worker's answer."""
    print(MARK + json.dumps(what), flush=True)


# ------------------------------------------------------------------------------------------------------------ sizes


def _ppo_cartpole(
    *, num_envs: Sequence[int] | int = (4, 512, 2048), total_steps: int | None = None, devices: int | None = None
) -> list[dict[str, Any]]:
    num_envs = (num_envs,) if isinstance(num_envs, int) else num_envs
    steps = {n: total_steps or (499_712 if n < 64 else 2_097_152) for n in num_envs}
    return [{"num_envs": n, "total_steps": steps[n], "devices": devices} for n in num_envs]


def _seeds(
    *, runs: int = 16, num_envs: int = 4, num_steps: int = 128, total_steps: int = 102_400, devices: int | None = None,
    together: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    sizes = {"runs": runs, "num_envs": num_envs, "num_steps": num_steps, "total_steps": total_steps}
    return [sizes | {"devices": devices, "together": together}]


def _deterministic(*, num_envs: Sequence[int] | int = 512, total_steps: int = 262_144) -> list[dict[str, Any]]:
    return [
        case | {"deterministic": flag}
        for devices in (1, 8)
        for case in _ppo_cartpole(num_envs=num_envs, total_steps=total_steps, devices=devices)
        for flag in (False, True)
    ]


def _driving(
    *,
    objects: Sequence[int] = (32, 64),
    batch: int = 256,
    num_steps: int = 256,
    scenarios: int = 64,
    devices: int | None = None,
    data: Sequence[str] = (),
) -> list[dict[str, Any]]:
    sizes = {"batch": batch, "num_steps": num_steps, "scenarios": scenarios, "devices": devices, "data": list(data)}
    return [{"objects": n} | sizes for n in objects]


def _driving_env(
    *, agents: Sequence[int] = (1,), road_points: int = 0, objects: Sequence[int] = (32, 64), **sizes: Any
) -> list[dict[str, Any]]:
    cases = _driving(objects=objects, **sizes)
    return [case | {"agents": n, "road_points": road_points} for case in cases for n in agents]


def _driving_train(
    *, total_steps: int = 131_072, num_envs: int = 256, scenarios: int = 256, devices: int | None = None
) -> list[dict[str, Any]]:
    return [{"total_steps": total_steps, "num_envs": num_envs, "scenarios": scenarios, "devices": devices}]


def _hackmatrix_env(
    *, num_envs: int = 256, num_steps: int = 32, rollouts: int = 20, devices: int | None = None, rules: str = "jax"
) -> list[dict[str, Any]]:
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "rollouts": rollouts, "devices": devices}
    return [sizes | {"rules": rules}]


def _hackmatrix_ppo(
    *,
    num_envs: int = 256,
    num_steps: int = 128,
    precision: str = "fp32",
    total_steps: int | None = None,
    devices: int | None = None,
) -> list[dict[str, Any]]:
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "precision": precision}
    return [sizes | {"total_steps": total_steps, "devices": devices}]


def _transport(*, rows: int = 64, width: int = 128, streams: int = 16, messages: int = 100_000) -> list[dict[str, Any]]:
    sizes = {"rows": rows, "width": width, "streams": streams, "messages": messages}
    return [sizes | {"copies": copies} for copies in (1, 2)]


def _actors(
    *,
    env: Sequence[str] = (
        "numpy/longhaul.envs.host.numpy_cartpole:cartpole",
        "gymnasium/CartPole-v1",
        "gymnasium/CartPole-v1?vectorised=False",  # one by one, as peers step them
        "cartpole",
    ),
    num_envs: int = 512,
    num_steps: int = 64,
    actors: int = 2,
    actor_kind: str = "process",
    staleness: int = 1,
    updates: int = 20,
) -> list[dict[str, Any]]:
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "actors": actors, "actor_kind": actor_kind}
    return [sizes | {"env": name, "staleness": staleness, "updates": updates} for name in env]


def _central(
    *,
    env: Sequence[str] = ("numpy/longhaul.envs.host.numpy_cartpole:cartpole", "gymnasium/CartPole-v1"),
    actors: int = 2,
    worlds: int = 256,
    slots: int = 2,
    lane: Sequence[str] = ("shm", "grpc"),
    num_steps: int = 64,
    batches: int = 6,
) -> list[dict[str, Any]]:
    sizes = {"actors": actors, "worlds": worlds, "slots": slots, "num_steps": num_steps, "batches": batches}
    return [sizes | {"env": name, "lane": by} for name in env for by in _lanes(lane, "shm", "grpc")]


def _lanes(wanted: Sequence[str], *there: str) -> Sequence[str]:
    """`wanted`, where all of them are `there`; else ValueError."""
    for name in wanted:
        if name not in there:
            raise ValueError(f"lane is {name!r}; this benchmark has {', '.join(there)}")
    return wanted


def _transport_grpc(
    *,
    rows: int = 64,
    width: int = 128,
    streams: int = 16,
    messages: int = 4_000,
) -> list[dict[str, Any]]:
    return [{"rows": rows, "width": width, "streams": streams, "messages": messages}]


def _sync(
    *,
    model: str = "qwen3-0.6b",
    receivers: int = 2,
    lane: Sequence[str] = ("shm", "tcp"),
    learning_rate: float | None = None,
) -> list[dict[str, Any]]:
    sizes = {"model": model, "receivers": receivers, "learning_rate": learning_rate}
    sync.check(model, receivers)
    return [sizes | {"lane": by} for by in _lanes(lane, "shm", "tcp", "folder")]


CASES: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "ppo-cartpole": _ppo_cartpole,
    "seeds": _seeds,
    "deterministic": _deterministic,
    "driving-step": _driving,
    "driving-env": _driving_env,
    "driving-train": _driving_train,
    "replay": replay.cases,
    "sac": replay.sac_cases,
    "hackmatrix-ppo": _hackmatrix_ppo,
    "hackmatrix": _hackmatrix_ppo,
    "hackmatrix-env": _hackmatrix_env,
    "reasoning": reasoning.cases,
    "transport": _transport,
    "actors": _actors,
    "central": _central,
    "sync": _sync,
    "transport-grpc": _transport_grpc,
}
"""Name -> (sizes) -> the workload's arguments, one case a figure. `devices` None: as many as a training run takes."""

WORKLOADS: dict[str, Callable[..., Prepared]] = {
    "ppo-cartpole": training.ppo_cartpole,
    "seeds": training.seeds,
    "deterministic": training.ppo_cartpole,
    "driving-step": training.driving_step,
    "driving-env": training.driving_env,
    "driving-train": training.driving_train,
    "replay": replay.replay,
    "sac": replay.sac,
    "hackmatrix-ppo": training.hackmatrix_ppo,
    "hackmatrix": training.hackmatrix_ppo,
    "hackmatrix-env": training.hackmatrix_env,
    "reasoning": reasoning.reasoning,
    "transport": central.shared_transport,
    "actors": acting_workloads.actors,
    "central": central.central,
    "sync": sync.sync,
    "transport-grpc": central.transport,
}
"""Names of all benchmarks. Of `hackmatrix` the whole figure is made by `scaling.speed`; here it is its training
alone."""
