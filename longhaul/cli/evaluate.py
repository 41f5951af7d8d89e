"""The commands `evaluate` and `render`: scores of a policy as tables and files, and pictures of how it drives."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from longhaul.cli import flags, tables
from longhaul.cli.flags import DEBUG, INT, OUTPUT, PATH, TEXT, Flag, FlagError, choice
from longhaul.cli.run_flags import RUN, RUNS_DIR, folder_of
from longhaul.config.run import MOST as MOST_SEED
from longhaul.config.run import Driving, Run
from longhaul.driving.evaluation import infractions
from longhaul.driving.evaluation.infractions import Rate
from longhaul.driving.render import save as pictures
from longhaul.driving.render.frames import KINDS
from longhaul.runtime import files, process_group
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.errors import FieldError
from longhaul.spaces import Measure
from longhaul.telemetry import screen
from longhaul.training import cross_play, drawing, evaluate_driving, hub
from longhaul.training import evaluate as evaluation
from longhaul.training import report as run_report
from longhaul.training.checkpoint.resume import named_task, policy_of, restore_policy
from longhaul.training.confidence import Estimate, bootstrap
from longhaul.training.evaluate import Scores
from longhaul.training.evaluate_driving import Drives

MEMBER = Flag("member", INT, None, "number of a run that --seeds or --sweep trained in one folder")
STEP = Flag("step", INT, None, "updates after which the checkpoint was saved", shown="the newest", least=1,
            aliases=("checkpoint",))  # fmt: skip
DATA = Flag("data", PATH, (), "driving logs: files, folders, globs", many=True)
JSON = Flag("json", OUTPUT, None, "write the result to this file; - is stdout")
TRAFFIC = Flag(
    "traffic", choice(evaluation.TRAFFICS), None,
    "the others around the ego; with self, the policy drives all that can be driven", shown="as in the run",
)  # fmt: skip

SAFETY = Flag("safety", flags.SWITCH, None, "check the policy's commands, and replace those that lead into a collision",
              shown="as in the run")  # fmt: skip

SKIP = Flag("skip-bad-logs", flags.SWITCH, None, "name and leave out logs that can't be used; else the first is"
            " an error", shown="as in the run")  # fmt: skip

SCENARIO = Flag("scenario", TEXT, (), "ids of scenarios", shown="the first", many=True)

WORST = ("html", "gif")

PAST = Flag("past-violations", flags.ALONE, False, "drawn episodes go on after a collision, off the road, past a red")

WHO = (*evaluation.POLICIES, hub.PRETRAINED)

FLAGS = (
    RUN,
    MEMBER,
    STEP,
    Flag("policy", choice(WHO), "run", "the run's policy, the untrained one, the shipped one, or a driver"),
    DATA,
    SKIP,
    SCENARIO._replace(help="ids of scenarios to drive alone", shown="all"),
    TRAFFIC,
    SAFETY,
    Flag("episodes", INT, None, "scenarios; of shards a sample, of raw logs the first", shown="as in the run", least=1),
    Flag(
        "seed",
        INT,
        None,
        "seed of the episodes; of driving, of the sample of scenarios that --episodes takes",
        shown="as in the run; of driving 0",
        least=0,
        most=MOST_SEED,
    ),
    Flag(
        "devices",
        INT,
        None,
        "devices that drive at once, at most; no result depends on it",
        shown="as in the run",
        least=1,
    ),
    JSON,
    Flag(
        "cross-play",
        TEXT,
        (),
        "the ego among these partners: idm, log, constant, hurried, slow, adversary, untrained, early (a shipped "
        "checkpoint of early training), runs (RUN, RUN@STEP, pretrained); self is always there",
        many=True,
    ),
    Flag("csv", OUTPUT, None, "write a row an episode to this file; - is stdout"),
    Flag("realism", flags.ALONE, False, "likelihood of the log among rollouts of each scenario"),
    Flag("rollouts", INT, evaluate_driving.ROLLOUTS, "rollouts of a scenario, for --realism", least=1),
    Flag("worst", INT, 0, "worst scenarios to draw", shown="none", least=0),
    Flag("worst-dir", PATH, None, "the folder to draw them in", shown="worst, in the run's folder"),
    Flag("worst-as", choice(WORST), "html", "pages with a player, or animations"),
    PAST,
    RUNS_DIR,
    DEBUG,
)


class Result(NamedTuple):
    """Result of an evaluation."""

    scores: Scores
    estimates: dict[str, Estimate]
    drives: Drives | None = None
    realism: Scores | None = None


# ------------------------------------------------------------------------------------------------------- evaluation


def evaluate(argv: Sequence[str]) -> int:
    """`longhaul evaluate RUN [--policy ...] [--data PATH...] [--traffic ...] [--json FILE] [--csv FILE] ...`."""
    about = "Scores of a policy on whole episodes, with 95 % intervals."
    flagged = flags.parse("evaluate", about, {"": FLAGS}, argv)
    parsed = _with_pretrained(flagged.values)
    if parsed["RUN"] is None and parsed["policy"] not in ("run", "untrained"):
        parsed["RUN"] = hub.PRETRAINED  # whose settings a driver needs, no more
    folder = folder_of(
        parsed,
        "longhaul evaluate RUN [--flags], RUN before --data; or --policy pretrained, which needs none",
        on_hub=True,
    )
    _check_flags(parsed, flagged.given)
    process_group.start(process_group.find(os.environ, tpu=process_group.on_tpu(os.environ)))
    if parsed["devices"] is not None or process_group.together():
        prepare_devices(parsed["devices"] or process_group.count())
        jax.devices()  # what the run asks for changes nothing any more
    run, acting = policy_of(folder, parsed["policy"], parsed["member"], parsed["step"])
    for name in ("safety", "skip-bad-logs"):
        run = _with_setting(run, name, parsed[name], folder)
    if parsed["cross-play"]:
        return _cross_play(folder, parsed, run, acting)
    if (result := _score_policy(folder, parsed, run, acting)) is None:
        return 0
    if "-" not in (parsed["json"], parsed["csv"]):
        _print(result)
    if parsed["csv"] is not None:
        rows, text = _episode_rows(result), io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]) if rows else ["id"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(files.finite(row) for row in rows)
        tables.write_text(parsed["csv"], text.getvalue())
    if parsed["json"] is not None:
        tables.write_json(parsed["json"], _report(folder.name, parsed, result))
    if parsed["worst"]:
        where = parsed["worst-dir"] or ("worst" if hub.is_address(parsed["RUN"]) else folder / "worst")
        _draw_worst(result, acting, parsed, Path(where))
    return 0


NEEDED = {
    **dict.fromkeys(
        ("worst-dir", "worst-as", "past-violations"), ("worst", "nothing is to be drawn; give --worst 3, say")
    ),
    "rollouts": ("realism", "nothing is simulated several times; give --realism, or leave it out"),
}
"""Flags that mean something beside another alone -> that one, and what to say without it."""


def _check_flags(parsed: dict[str, Any], explicit: frozenset[str]) -> None:
    """Raises FlagError where flags of `evaluate`, some of them `explicit`, do not go together."""
    if parsed["scenario"] and parsed["episodes"] is not None:
        raise FlagError(
            f"--episodes is {parsed['episodes']}, and --scenario names those to drive; leave one of them out"
        )
    if parsed["json"] == parsed["csv"] == "-":
        raise FlagError("--json and --csv are both stdout; write one of them to a file")
    where = parsed["worst-dir"]
    for name, (other, remedy) in NEEDED.items():
        if name in explicit and not parsed[other]:
            raise FlagError(f"--{name} is {'on' if parsed[name] is True else repr(parsed[name])}, and {remedy}")
    if where is not None and Path(where).exists() and not Path(where).is_dir():
        raise FlagError(f"--worst-dir is {where!r}, a file; give a folder")
    if parsed["cross-play"]:
        for name in ("csv", "realism", "worst", "traffic"):
            if parsed[name]:
                raise FlagError(f"--{name} is not for --cross-play; leave one of them out")
        if parsed["policy"] != "run":
            raise FlagError(
                f"--policy is {parsed['policy']!r}; with --cross-play the ego is a run's policy; leave it out"
            )


def _score_policy(folder: Path, parsed: dict[str, Any], run: Run, acting: Any) -> Result | None:
    """Scores of the policy `acting`; None in a process other than the first one, which has those of all."""
    drives = real = None
    if isinstance(run.environment, Driving):
        who = drawing.driver_of(parsed["policy"])
        seed = parsed["seed"] or 0
        drives = evaluate_driving.drives(run, parsed["data"], parsed["episodes"], parsed["traffic"], seed)
        drives = drives.named(parsed["scenario"])
        scores, _ = drives.play(acting, who)
        if process_group.index() > 0:
            return None
        drives = drives._replace(share=(0, 1))
        if parsed["realism"]:
            real = evaluate_driving.score(drives, acting, who, parsed["rollouts"])
    else:
        if process_group.together():
            raise FlagError(
                f"several processes evaluate driving alone, and run {folder.name} is {named_task(run)}; "
                "evaluate it in one"
            )
        for name in ("data", "scenario", "traffic", "realism", "worst"):
            if parsed[name]:
                task = named_task(run)
                raise FlagError(f"--{name} is for driving, and run {folder.name} is {task}; leave --{name} out")
        count = parsed["episodes"] or run.evaluation_episodes or 100
        seed = run.seed if parsed["seed"] is None else parsed["seed"]
        scores, _ = evaluation.scorer(run, count)(acting, seed)
    return Result(scores, bootstrap(scores.metrics, scores.groups()), drives, real)


def _cross_play(folder: Path, parsed: dict[str, Any], run: Run, acting: Any) -> int:
    """The matrix of policies as the ego, by who drives the others."""
    if not isinstance(run.environment, Driving):
        raise FlagError(f"--cross-play is for driving, and run {folder.name} is {named_task(run)}; leave it out")
    conditioned = run.environment.simulator.conditioning
    egos, partners = _cast(folder, parsed, acting, conditioned)
    sought = "adversary" in parsed["cross-play"]
    drives = evaluate_driving.drives(run, parsed["data"], parsed["episodes"], "self", parsed["seed"] or 0)
    drives = drives.named(parsed["scenario"])._replace(share=(process_group.index(), process_group.count()))
    play = cross_play.arena(drives)
    if sought:
        partners.append(cross_play.adversary(play, acting, conditioned, seed=parsed["seed"] or 0))
    cells = cross_play.matrix(play, egos, partners)
    if process_group.index() == 0:
        found = cross_play.conditioning_of(partners[-1], conditioned) if sought else None
        _write_cross_play(folder, parsed, {"run": folder.name, "cells": cells, "adversary": found})
    return 0


def _cast(
    folder: Path, parsed: dict[str, Any], acting: Any, conditioned: bool
) -> tuple[dict[str, Any], list[cross_play.Partner]]:
    """Policies of egos by name, and the partners that --cross-play names but the adversary, which is sought later."""
    egos, partners = {folder.name: acting}, [cross_play.Partner("self")]
    for word in dict.fromkeys(parsed["cross-play"]):
        if word == "adversary":
            continue
        if word in cross_play.RULES:
            partners.append(cross_play.RULES[word])
        elif word in ("hurried", "slow"):
            partners.append(cross_play.styled(word, conditioned))
        elif word == "untrained":
            untrained = restore_policy(folder, parsed["member"], parsed["step"])[2]
            partners.append(cross_play.Partner(word, policy=untrained, checked=False))
        elif word == hub.EARLY:
            early = restore_policy(hub.folder_of(hub.EARLY))[1]
            partners.append(cross_play.Partner(word, policy=cross_play.fitting(word, early, acting)))
        else:
            name, _, step = word.partition("@")
            if step and not step.isdecimal():
                raise FlagError(f"--cross-play is {word}; behind the @ stands the number of a checkpoint, RUN@120")
            other = folder_of(parsed | {"RUN": name}, "", on_hub=True)
            params = cross_play.fitting(word, restore_policy(other, None, int(step) if step else None)[1], acting)
            partners.append(cross_play.Partner(word, policy=params))
            if not step:
                egos[word] = params
    return egos, partners


def _write_cross_play(folder: Path, parsed: dict[str, Any], report: dict[str, Any]) -> None:
    """The matrix as a table, as JSON, and in the run's folder and report."""
    if parsed["json"] != "-":
        rows = [
            [cell["ego"], cell["partner"], *(tables.number(cell["mean"].get(name)) for name in cross_play.METRICS),
             *(tables.number(value) for value in cell["interval"].get("accuracy", (None, None))), str(cell["episodes"])]
            for cell in report["cells"]
        ]  # fmt: skip
        tables.table(["ego", "partners", *cross_play.METRICS, "2.5 %", "97.5 %", "episodes"], rows)
    if parsed["json"] is not None:
        tables.write_json(parsed["json"], report)
    if not hub.is_address(parsed["RUN"]):
        tables.write_json(str(folder / run_report.CROSS_PLAY), report)
        run_report.draw_cross_play(folder)


def _with_setting(run: Run, name: str, value: bool | None, folder: Path) -> Run:
    """`run` with a setting of driving changed by its flag `name`; None: as in the run."""
    if value is None:
        return run
    if not isinstance(run.environment, Driving):
        raise FlagError(f"--{name} is for driving, and run {folder.name} is {named_task(run)}; leave it out")
    return replaced(run, **{name.replace("-", "_"): value})


def _with_pretrained(parsed: dict[str, Any]) -> dict[str, Any]:
    """Values of flags in which `--policy pretrained` is written as the RUN that it stands for."""
    who = parsed["policy"]
    many = (who,) if isinstance(who, str) else who
    if hub.PRETRAINED not in many:
        return parsed
    if parsed["RUN"] not in (None, hub.PRETRAINED):
        raise FlagError(f"--policy pretrained is a policy of its own; leave {parsed['RUN']} out")
    written = tuple("run" if each == hub.PRETRAINED else each for each in many)
    return parsed | {"RUN": hub.PRETRAINED, "policy": written[0] if isinstance(who, str) else written}


# ----------------------------------------------------------------------------------------------- tables and files


def values_or_none(measure: Measure) -> list[float | None]:
    """A metric's values, None where the episode does not tell it."""
    return [float(value) if valid else None for value, valid in zip(*measure, strict=True)]


def _print(result: Result) -> None:
    scores, drives = result.scores, result.drives
    if drives is None:
        rows = []
        for name in tables.columns(scores.metrics):
            known = [value for value in values_or_none(scores.metrics[name]) if value is not None]
            mean, *rest = [float(f(known)) if known else None for f in (np.mean, np.std, np.min, np.max)]
            rows.append([name, *map(tables.number, (mean, *_interval(result.estimates.get(name)), *rest))])
        tables.table([f"{len(scores.names)} episodes", "mean", "2.5 %", "97.5 %", "std", "min", "max"], rows)
        return
    names = tables.columns(scores.metrics, most=tables.MOST)
    _print_groups("scenario", scores.groups(), drives.scenarios.ids, scores, names)
    if len(set(drives.files)) > 1:
        paths = list(dict.fromkeys(drives.files))
        of_file = np.array([paths.index(drives.files[i]) for i in scores.groups()])
        print()
        _print_groups("file", of_file, [Path(path).name for path in paths], scores, names)
    print()
    _print_estimates("metric", result.estimates)
    _print_infractions(infractions.rates(scores.metrics))
    if scores.waits is not None and scores.waits.tracks:
        waits = scores.waits
        print(f"\n{waits.tracks} track{'s' * (waits.tracks != 1)} waited for room, {waits.seconds:.1f} s in all")
    if result.realism is not None:
        print()
        _print_estimates("realism", bootstrap(result.realism.metrics, result.realism.groups()))


def _interval(estimate: Estimate | None) -> tuple[float | None, float | None]:
    """Interval of a metric; None where there is none."""
    if estimate is None or not np.isfinite(estimate.low):
        return None, None
    return estimate.low, estimate.high


def _print_groups(title: str, group: np.ndarray, titles: Sequence[str], scores: Scores, names: Sequence[str]) -> None:
    """A row a group of episodes: the means over those that tell a metric; the means of all at the end."""
    rows = []
    for i in dict.fromkeys(group.tolist()):
        cells = [_mean(scores.metrics[name], group == i) for name in names]
        rows.append([titles[i], *map(tables.number, cells), str(int(np.sum(group == i)))])
    every = np.ones(len(group), bool)
    means = [tables.number(_mean(scores.metrics[name], every)) for name in names]
    footer = [f"mean of {len(group)}", *means, str(len(group))]
    tables.table([title, *names, "episodes"], rows, footer=footer)


def _mean(measure: Measure, of: np.ndarray) -> float | None:
    known = measure.valid & of
    return float(np.mean(measure.value[known])) if np.any(known) else None


def _print_estimates(title: str, estimates: dict[str, Estimate]) -> None:
    rows = []
    for name in tables.columns(estimates):
        estimate = estimates[name]
        shown = (tables.number(value) if np.isfinite(value) else "-" for value in estimate[:3])
        rows.append([name, *shown, str(estimate.episodes)])
    tables.table([title, "mean", "2.5 %", "97.5 %", "episodes"], rows)


def _print_infractions(rates: dict[str, Rate]) -> None:
    """Kilometres from one infraction to the next; "-" is an open end."""
    rows = [
        [name, str(rate.events), *(f"{km:.2f}" if np.isfinite(km) else "-" for km in rate[1:])]
        for name, rate in rates.items()
    ]
    if rows:
        print()
        tables.table(["infraction", "count", "km driven", "km between", "2.5 %", "97.5 %"], rows)


def _episode_rows(result: Result) -> list[dict[str, Any]]:
    """A row an episode: its place, its agent, and each metric, None where the episode has none."""
    scores, drives = result.scores, result.drives
    values = {name: values_or_none(measure) for name, measure in scores.metrics.items()}
    rows = []
    for i, name in enumerate(scores.names):
        row: dict[str, Any] = {"id": name}
        if drives is not None and scores.agent is not None and scores.kind is not None:
            row |= {"agent": int(scores.agent[i]), "kind": KINDS.get(int(scores.kind[i]), "other")}
            row |= {"file": drives.files[scores.groups()[i]]} if drives.files else {}
        rows.append(row | {metric: column[i] for metric, column in values.items()})
    return rows


def _report(run_id: str, parsed: dict[str, Any], result: Result) -> dict[str, Any]:
    """Content of --json. With several agents a scenario has as many entries."""
    estimates = result.estimates
    known = {name: m.value[m.valid] for name, m in result.scores.metrics.items() if m.valid.any()}
    task = None if result.drives is None else result.drives.run.environment
    report = {
        "run": run_id,
        "policy": parsed["policy"],
        "traffic": parsed["traffic"],
        "safety": isinstance(task, Driving)
        and task.simulator.safety
        and drawing.driver_of(parsed["policy"]) == "policy",
        "episodes": len(result.scores.names),
        "mean": {name: float(np.mean(values)) for name, values in known.items()},
        "std": {name: float(np.std(values)) for name, values in known.items()},
        "interval": {name: [estimate.low, estimate.high] for name, estimate in estimates.items()},
        "told": {name: estimate.episodes for name, estimate in estimates.items()},
        "infractions": {name: rate._asdict() for name, rate in infractions.rates(result.scores.metrics).items()},
        "waits": None if result.scores.waits is None else result.scores.waits._asdict(),
        "scenarios": [entry for entry in _episode_rows(result) if entry["id"]],
    }
    if result.realism is None:
        return report
    real = bootstrap(result.realism.metrics, result.realism.groups())
    return report | {
        "realism": {
            "rollouts": parsed["rollouts"],
            "mean": {name: estimate.mean for name, estimate in real.items()},
            "interval": {name: [estimate.low, estimate.high] for name, estimate in real.items()},
            "scenarios": _episode_rows(Result(result.realism, real)),
        }
    }


# ------------------------------------------------------------------------------------------------ worst scenarios


def _draw_worst(result: Result, acting: Any, parsed: dict[str, Any], folder: Path) -> None:
    """Draws them into `folder`, and names each file."""
    assert result.drives is not None
    chosen = evaluate_driving.worst(result.scores, parsed["worst"])
    who, some = parsed["policy"], result.drives.subset(chosen)
    changes = evaluate_driving.past_violations(some.run) if parsed["past-violations"] else {}
    _, films = some.play(acting, drawing.driver_of(who), range(len(chosen)), **changes)
    folder.mkdir(parents=True, exist_ok=True)
    for place, film in enumerate(films, 1):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", film.id)[:80]
        path = folder / f"{place:02}-{name}.{parsed['worst-as']}"
        with screen.stage(f"drawing {path.name}"):
            pictures.save([drawing.labelled(film, who)], path, fps=drawing.rate(film))
        if "-" not in (parsed["json"], parsed["csv"]):
            print(path, flush=True)


# --------------------------------------------------------------------------------------------------------------- render


def render(argv: Sequence[str]) -> int:
    """`longhaul render RUN|--policy ... [--data PATH...] [--scenario ID...] [--traffic ...] --out FILE`."""
    policy = Flag(
        "policy", choice(WHO), ("run",), "drivers, side by side; without RUN: pretrained, idm, log or constant",
        many=True,
    )  # fmt: skip
    count = Flag("episodes", INT, 1, "scenarios, the first ones, where none is named", least=1)
    out = Flag("out", PATH, None, ".gif, .mp4, .html (a page with a player) or .png (a film strip)", shown="needed")
    groups = {"": [RUN, MEMBER, STEP, policy, DATA, SKIP, SCENARIO, count, TRAFFIC, SAFETY, PAST, out, RUNS_DIR, DEBUG]}
    about = "Draws scenarios as policies drive them, or an episode of another environment."
    parsed = _with_pretrained(flags.parse("render", about, groups, argv).values)
    if parsed["out"] is None:
        raise FlagError("where to? give --out drive.gif (or .mp4, .html, .png)")
    try:
        drawing.check_file(parsed["out"])
        folder = None if parsed["RUN"] is None else folder_of(parsed, "", on_hub=True)
        run, acting = drawing.of_run(folder, parsed["policy"], parsed["member"], parsed["step"])
        name = "" if folder is None else folder.name
        drawing.draw(
            run, name, parsed["policy"], acting, parsed["out"], data=parsed["data"], scenarios=parsed["scenario"],
            episodes=parsed["episodes"], traffic=parsed["traffic"], safety=parsed["safety"],
            skip_bad_logs=parsed["skip-bad-logs"], past_violations=parsed["past-violations"],
        )  # fmt: skip
    except FieldError as error:
        raise error.of_flag() from error
    print(parsed["out"])
    return 0
