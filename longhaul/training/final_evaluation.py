"""Final evaluation of a run: the trained policy beside the untrained one and, in driving, beside IDM and the log.

It ends in result.json, whose presence means that the run is complete, and in report.html. Evaluations while a run
trains are in periodic_evaluation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from longhaul.config.run import Driving, Run
from longhaul.driving.render.recording import Recording
from longhaul.networks import actor_critic
from longhaul.runtime import bounded_json
from longhaul.runtime import device_memory as footprints
from longhaul.runtime.provenance import params_sha256
from longhaul.runtime.signals import Stop
from longhaul.telemetry import health_log, sinks
from longhaul.telemetry.films import Film
from longhaul.training import evaluate, evaluate_driving, members, report
from longhaul.training.assemble import Assembly
from longhaul.training.clock import Clock
from longhaul.training.compilation import THREAD
from longhaul.training.run_dir import write_json
from longhaul.types import Params

FILMS = 6
"""Scenarios drawn in a report."""


def result(
    run: Run, folder: Path, assembly: Assembly, policy: Params, untrained: Params, clock: Clock, stop: Stop
) -> dict[str, Any]:
    """Content of result.json, after the evaluation; report.html is written with it. Raises Stopped."""
    seconds = clock.read()
    both = jax.device_put((policy, untrained), jax.local_devices()[0])

    def look() -> None:
        stop.look(assembly.updates)

    parameters = actor_critic.count(policy.params)
    recordings: list[Recording] = []
    films: list[Film] = []
    if run.many:
        scores = members.evaluated(run, assembly.members, both[0], both[1], look)
        parameters //= len(assembly.members)
    else:
        compared = compare(run, both[0], both[1], look=look)
        scores = {"evaluation": compared.means} | ({"chains": compared.chains} if compared.chains else {})
        recordings, films = compared.recordings, compared.films
    measured = folder / footprints.FILE  # device memory, before the first update
    steps, ledger = assembly.agent_steps(assembly.updates), clock.ledger  # of each run; `sps` is the sum over all
    content: dict[str, Any] = {
        "status": "done",
        "agent_steps": steps,
        "env_steps": assembly.env_steps(assembly.updates),
        "train_seconds": seconds.train,
        "compile_seconds": seconds.compile,
        "trace_seconds": seconds.trace,
        "wall_seconds": seconds.wall,
        "start_seconds": seconds.start,
        "cache": {"hits": ledger.hits, "misses": ledger.misses} if ledger.hits + ledger.misses else None,
        "sps": steps * max(1, len(assembly.members)) / max(seconds.train, 1e-9),
        "params_sha256": params_sha256(policy.params),
        "parameters": parameters,
        "memory": bounded_json.read(measured) if measured.exists() else None,
        **scores,
    }
    report.write_report(
        folder / "report.html", run=bounded_json.read(folder / "run.json"),
        records=sinks.read(folder / "metrics.jsonl"), result=content, recordings=recordings, films=films,
        findings=health_log.read(folder), runs=members.section(folder, content) if run.many else "",
    )  # fmt: skip
    write_json(folder / "result.json", content)  # last: its presence means that the run is complete
    return content


class Compared(NamedTuple):
    """Evaluations of a run's policies, with pictures of their episodes."""

    means: dict[str, dict[str, Any]]  # by the name of the policy
    chains: list[dict[str, Any]]  # of a language model: both policies' about the same problems
    recordings: list[Recording]
    films: list[Film]


def compare(
    run: Run,
    policy: Params,
    untrained: Params,
    *,
    past_violations: bool = False,
    look: Callable[[], None] = lambda: None,
) -> Compared:
    """Evaluation of all policies; calls `look` after each. Recordings go on past violations if asked."""
    means: dict[str, dict[str, Any]] = {}
    chains: dict[str, Sequence[dict[str, Any]]] = {}
    recordings: list[Recording] = []
    for evaluated in evaluations(run, policy, untrained, past_violations=past_violations):
        means[evaluated.name], chains[evaluated.name] = evaluated.means, evaluated.chains
        recordings += evaluated.recordings
        look()
    films = evaluate.filmed(run, ("trained", policy), ("untrained", untrained))
    return Compared(means, evaluate.conversations(chains), recordings, films)


class Evaluated(NamedTuple):
    """Evaluation of one policy."""

    name: str
    means: dict[str, Any]
    recordings: Sequence[Recording] = ()  # of driving
    chains: Sequence[dict[str, Any]] = ()  # of a language model


def evaluations(run: Run, policy: Params, untrained: Params, *, past_violations: bool = False) -> Iterator[Evaluated]:
    """Evaluation of each policy. Recordings go on past violations if asked."""
    assert run.evaluation_episodes is not None
    if not isinstance(run.environment, Driving):
        score = evaluate.scorer(run, run.evaluation_episodes)
        for name, params in (("trained", policy), ("untrained", untrained)):
            scores, chains = score(params)
            yield Evaluated(name, scores.means(), chains=chains)
        return
    drives = evaluate_driving.drives(run)
    films = min(FILMS, len(drives.scenarios))
    by_policy, idm, log = (drives.player(driver, films) for driver in ("policy", "idm", "log"))
    with ThreadPoolExecutor(1, thread_name_prefix=THREAD) as compiler:  # the policy's program is longest
        rules = compiler.map(lambda play: play.compile(None), (idm, log))
        shown = evaluate_driving.telling(by_policy(policy)[0], films)
        list(rules)
    for name, play, params in (
        ("trained", by_policy, policy), ("untrained", by_policy, untrained), ("idm", idm, None), ("log", log, None),
    ):  # fmt: skip
        scores, recorded = play(params, shown)
        if past_violations:
            driver, changes = "policy" if play is by_policy else name, evaluate_driving.past_violations(run)
            _, recorded = drives.subset(shown).play(params, driver, range(films), **changes)
        yield Evaluated(name, scores.means(), evaluate_driving.label(recorded, name))
