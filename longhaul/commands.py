"""The commands `train` and `status`, and those that say what there is; their flags, their output, their exit codes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from longhaul import (
    flags,
    footprint,
    hosts,
    learners,
    live,
    partition,
    printing,
    publishing,
    pulse,
    ranking,
    recipes,
    resumption,
    settings,
    telemetry,
    tracking,
    training,
)
from longhaul.envs import host, registry, suites
from longhaul.feed import feed, spec
from longhaul.flags import ALONE, DEBUG, TEXT, Flag, FlagError
from longhaul.folders import called, find_folder, load_run, new_folder, save_run
from longhaul.mesh import Shape, identity
from longhaul.provenance import provenance
from longhaul.run import Driving, Named, Run, RunError, agents, from_dict, named, on_cpu, resolve, to_dict
from longhaul.scaling import command as scaling
from longhaul.scaling import forecast
from longhaul.scaling.subject import subject
from longhaul.settings import RUNS_DIR

RUN = Flag("RUN", TEXT, None, "a run's name or folder", shown="")

DRY_RUN = Flag("dry-run", ALONE, False, "compile, tell the memory that it takes, and stop", shown="")

SEEN = 30.0
"""Seconds in which a folder that one host made must appear on the others."""


def train(words: Sequence[str]) -> int:
    """`longhaul train RECIPE [--flags]`, with other processes where the environment says so."""
    if {"-h", "--help"} & set(words):
        return _train(words)
    hosts.start(hosts.find(os.environ, tpu=hosts.on_tpu(os.environ)))
    if hosts.together() and not on_cpu():
        jax.devices()  # which comes when all ask, and would be asked for later here than there
    return hosts.follow(_follow) if hosts.index() > 0 else hosts.lead(lambda: _train(words))


def _follow() -> None:
    """What process 0 was told to train."""
    run = from_dict(Run, hosts.hear("run"))
    training.prepare_devices(run.all_devices, run.threads)
    jax.devices()
    told = hosts.hear("folder")
    folder, deadline = Path(told["folder"]), time.monotonic() + SEEN
    while not (folder / "run.json").is_file():  # a network's file system takes its time
        if time.monotonic() > deadline:
            raise RunError(f"{folder} is not seen here; --runs-dir must be a folder that all hosts share")
        time.sleep(0.1)
    training.train(run, folder, resumed=told["resumed"])


def _told(run: Run) -> Run:
    """`run`, of which the other processes hear."""
    hosts.tell("run", to_dict(run))
    return run


def _train(words: Sequence[str]) -> int:
    if not words or words[0].startswith("-"):
        if words and words[0] in ("-h", "--help"):
            _train_help()
            return 0
        there = ", ".join(name for name, _ in recipes.described())
        raise FlagError(f"name a recipe first: longhaul train RECIPE [--flags]; there are {there}")
    if words[0] in recipes.GRIDS:
        if hosts.together():
            raise FlagError(f"{words[0]} is a grid of runs, each in one process; leave longhaul launch out")
        return scaling.run(words[0], words[1:], f"train {words[0]}")
    recipe = recipes.recipe(words[0])
    about = recipes.about(recipe.recipe)
    table = settings.table(recipe)
    table[""] = [DRY_RUN, *table[""]]
    parsed = flags.parse(f"train {recipe.recipe}", about, table, words[1:])
    runs_dir = Path(parsed.values["runs-dir"])
    if parsed.values["dry-run"]:
        return _dry(runs_dir, recipe, parsed)
    if parsed.values["resume"] is not None:
        folder = find_folder(runs_dir, parsed.values["resume"])
        tracked = tracking.chosen(parsed.values, parsed.given, recipe.recipe, tracking.load(folder))
        run = _told(resolve(settings.resumed(folder, recipe.recipe, _fitting(parsed, folder))))
        published = publishing.chosen(parsed.values, parsed.given, publishing.load(folder))
        tracking.save(folder, tracked)
        publishing.save(folder, published)
        _say_unused(parsed, tracked)
        print(folder, flush=True)
        outcome = training.train(run, folder, resumed=True)
    else:
        tracked = tracking.chosen(parsed.values, parsed.given, recipe.recipe)
        publishing.chosen(parsed.values, parsed.given)
        _say_unused(parsed, tracked)
        run = _there(_told(resolve(settings.chosen(recipe, parsed))))
        folder, outcome = _begin(runs_dir, run, parsed, tracked)
    if outcome.result is not None:
        _show(outcome.result)
        print(f"report: {folder / 'report.html'}")
    return outcome.code


def _there(run: Run) -> Run:
    """`run`, if its environment is one of a suite that is installed; else RunError, before there is a folder."""
    if isinstance(run.environment, Named) and suites.is_suite(run.environment.env):
        training.prepare_devices(run.all_devices, run.threads)  # importing a suite may start JAX, as Brax does
        named(run.environment)
    return run


def _show(result: dict[str, Any]) -> None:
    """The table of a result: of policies, or of runs."""
    if "members" not in result:
        printing.scores(result["evaluation"])
        return
    header, rows, footer = ranking.columns(result["members"])
    printing.table(header, [[printing.number(value) for value in row] for row in rows], footer=footer)


def _dry(runs_dir: Path, recipe: Run, parsed: flags.Parsed) -> int:
    """Compiles the run that is asked for, and prints what it takes of a device's memory; leaves no folder."""
    if hosts.together():
        raise FlagError("--dry-run is of one process; leave longhaul launch out")
    if parsed.values["resume"] is None:
        run = resolve(settings.chosen(recipe, parsed))
    else:
        folder = find_folder(runs_dir, parsed.values["resume"])
        run = resolve(settings.resumed(folder, recipe.recipe, _fitting(parsed, folder)))
    assert run.devices is not None
    training.prepare_devices(run.devices, run.threads)
    if isinstance(run.environment, Named):
        named(run.environment)
    made = subject(run)
    parts = footprint.parts(made.assembly.algorithm, made.start(run.seed), made.context)
    found = footprint.footprint(made.executable, made.assembly.mesh, parts)
    if found is None:
        print("the compiler does not say what memory the run takes")
        return 0
    if refusal := found.refusal():
        raise RunError(refusal)
    printing.listing(found.rows())
    if warning := found.warning():
        print(warning, file=sys.stderr)
    return 0


def _fitting(parsed: flags.Parsed, folder: Path) -> flags.Parsed:
    """`parsed`, on fewer devices where some are gone. Under a launcher alone, which starts again with nobody there."""
    if pulse.DESCRIPTOR not in os.environ or on_cpu():
        return parsed
    run = load_run(folder)
    wanted: Shape = parsed.values["mesh"] if "mesh" in parsed.given else run.mesh
    envs: int = parsed.values["num-envs"] if "num-envs" in parsed.given else run.num_envs
    there = [sum(device.process_index == i for device in jax.devices()) for i in range(hosts.count())]
    assert wanted.data is not None
    left = Shape(resumption.fewer(wanted.data, there, envs, wanted.model), wanted.model)
    if left == wanted:
        return parsed
    count = wanted.data * wanted.model
    print(f"{sum(there)} of {count} devices are there; goes on with {left}", file=sys.stderr, flush=True)
    return parsed._replace(values=parsed.values | {"mesh": left}, given=parsed.given | {"mesh"})


def _say_unused(parsed: flags.Parsed, tracked: tracking.Tracking | None) -> None:
    for flag in tracking.unused(parsed.given, tracked):
        print(f"{flag} does nothing without --wandb", file=sys.stderr)


def _train_help() -> None:
    print("usage: longhaul train RECIPE [--flags]\n\nTrains, and prints the run's folder first. The recipes:\n")
    printing.listing((f"  {name}", about) for name, about in recipes.described())
    print(
        "\nlonghaul train RECIPE --help shows its flags with their defaults, longhaul train RECIPE --resume ID goes on."
        "\nExit codes: 0 done, 1 failed, 2 bad input, 75 stopped by a signal after saving."
    )


def _begin(
    runs_dir: Path, run: Run, parsed: flags.Parsed, tracked: tracking.Tracking | None
) -> tuple[Path, training.Outcome]:
    """A new run from its folder on. Whoever has read the folder's name can go on with it, be it killed at once.

    A run that is refused before it began (by a damaged log, say) leaves no folder.
    """
    task = run.environment
    if isinstance(task, Named):
        named(task)  # what is unknown or missing is said before anything is made
    assert run.devices is not None
    training.prepare_devices(run.all_devices, run.threads)
    if isinstance(task, Driving) or run.model > 1:  # elsewhere nothing dear is made before that is asked for
        algorithm = learners.make(spec(run), run.algorithm, updates=1, mean=identity)
        partition.check(jax.eval_shape(algorithm.init, jax.random.key(0)), run.mesh)
    source = feed(run) if isinstance(task, Driving) and task.data else None
    about = provenance() | {"data": source.about if source else None}
    folder = new_folder(runs_dir, run, parsed.values["run-name"], parsed.values["run-suffix"])
    try:
        tracking.save(folder, tracked)
        publishing.save(folder, publishing.chosen(parsed.values, parsed.given))
        save_run(folder, run, about)
        print(folder, flush=True)
        return folder, training.train(run, folder, resumed=False, source=source)
    except (ValueError, OSError):
        if {path.name for path in folder.iterdir()} <= {"run.json", "run.json.partial", tracking.FILE, publishing.FILE}:
            shutil.rmtree(folder)
        raise


# ---------------------------------------------------------------------------------------------------- what there is


def show_recipes(words: Sequence[str]) -> int:
    """`longhaul recipes`."""
    flags.parse("recipes", "The recipes of longhaul train.", {"": [DEBUG]}, words)
    printing.listing(recipes.described())
    return 0


def show_envs(words: Sequence[str]) -> int:
    """`longhaul envs [SUITE]`."""
    suite = Flag("SUITE", TEXT, None, "list all environments of this suite", shown="")
    asked = flags.parse(
        "envs", "The environments of longhaul train ppo --env NAME.", {"": [suite, DEBUG]}, words
    ).values
    if asked["SUITE"] is not None:
        for name in suites.names(asked["SUITE"]):
            print(name)
        return 0
    printing.listing([*registry.names(), ("driving", "the recipe driving: generated scenarios, or logs by --data")])
    print("\nOf other libraries, on the device:")
    printing.listing(suites.rows())
    print("\nOn the host, for actors:")
    printing.listing(host.names())
    return 0


def status(words: Sequence[str]) -> int:
    """`longhaul status RUN`."""
    parsed = flags.parse("status", "How far a run is.", {"": [RUN, RUNS_DIR, DEBUG]}, words).values
    if parsed["RUN"] is None:
        raise FlagError("which run? longhaul status RUN")
    folder = find_folder(Path(parsed["runs-dir"]), parsed["RUN"])
    run = load_run(folder)
    about = json.loads((folder / "run.json").read_text())
    found = _records(folder / "metrics.jsonl")
    last, lines = (found[-1] if found else {}), len(found)
    result = folder / "result.json"
    saved = sorted({int(name) for path in folder.glob("checkpoints/*") if (name := path.name.split(".")[0]).isdigit()})
    update = run.num_envs * agents(run) * run.num_steps
    done = last.get("agent_steps", 0)
    total = done + (run.total_steps - done) // update * update  # `done` may be in updates of other sizes
    going_on = f"not done; longhaul train {run.recipe} --resume {called(folder)} goes on"
    rows = [
        ("run", str(folder)),
        ("recipe", run.recipe),
        ("topology", run.topology),
        ("commit", str(about.get("commit") or "unknown")),
        ("state", "done" if result.is_file() else going_on),
        ("agent steps", f"{done:,} of {total:,} ({done / total:.1%})"),
        ("updates", f"{last.get('update', 0)}, in {lines} records"),
        ("checkpoints", ", ".join(map(str, saved)) or "none"),
    ]
    tracked = tracking.load(folder)
    if tracked is not None:
        rows.append(("W&B", f"{tracked.id} in project {tracked.project}{'' if tracked.on else ', no more'}"))
    shown = ("wall_seconds", "sps", "episode/return")
    rows += [(name, f"{last[name]:,.1f}") for name in shown if last.get(name) is not None]
    rows += forecast.said(found)
    if about.get("detours"):
        rows.append(("detours", f"{len(about['detours'])} of {run.rollbacks}, around numbers that were not finite"))
    if lines:
        age = time.time() - (folder / "metrics.jsonl").stat().st_mtime
        rows.append(("last record", f"{max(0, round(age))} s ago"))
    printing.listing(rows)
    live.show(folder)
    if result.is_file():
        _show(json.loads(result.read_text()))
    return 0


def _records(path: Path) -> list[dict[str, Any]]:
    """The whole records of a metrics file; none where there is no file."""
    return telemetry.read(path) if path.is_file() else []
