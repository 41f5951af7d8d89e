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

from longhaul.algorithms import registry as learners
from longhaul.algorithms.context import Context
from longhaul.cli import flags, live_status, run_flags, scaling, tables
from longhaul.cli.flags import ALONE, DEBUG, TEXT, Flag, FlagError
from longhaul.cli.run_flags import RUNS_DIR
from longhaul.config import recipes
from longhaul.config.resolve import agents, named, resolve
from longhaul.config.run import Driving, Named, Run
from longhaul.config.serialize import from_dict, to_dict
from longhaul.diagnostics.compiled_run import subject
from longhaul.envs import registry, suites
from longhaul.envs.host import registry as host
from longhaul.runtime import device_memory, heartbeat, partition, process_group
from longhaul.runtime.devices import on_cpu
from longhaul.runtime.errors import RunError
from longhaul.runtime.mesh import identity
from longhaul.runtime.mesh_shape import MeshShape
from longhaul.runtime.provenance import provenance
from longhaul.telemetry import forecast, sinks, wandb
from longhaul.training import loop, population_report, publish
from longhaul.training.checkpoint import resume
from longhaul.training.data import feed, spec
from longhaul.training.run_dir import called, find_folder, load_run, new_folder, save_run

RUN = Flag("RUN", TEXT, None, "a run's name or folder", shown="")

DRY_RUN = Flag("dry-run", ALONE, False, "compile, tell the memory that it takes, and stop", shown="")

SEEN = 30.0
"""Seconds in which a folder that one host made must appear on the others."""


def train(words: Sequence[str]) -> int:
    """`longhaul train RECIPE [--flags]`, with other processes where the environment says so."""
    if {"-h", "--help"} & set(words):
        return _train(words)
    process_group.start(process_group.find(os.environ, tpu=process_group.on_tpu(os.environ)))
    if process_group.together() and not on_cpu():
        jax.devices()  # which comes when all ask, and would be asked for later here than there
    return process_group.follow(_follow) if process_group.index() > 0 else process_group.lead(lambda: _train(words))


def _follow() -> None:
    """What process 0 was told to train."""
    run = from_dict(Run, process_group.hear("run"))
    loop.prepare_devices(run.all_devices, run.threads)
    jax.devices()
    told = process_group.hear("folder")
    folder, deadline = Path(told["folder"]), time.monotonic() + SEEN
    while not (folder / "run.json").is_file():  # a network's file system takes its time
        if time.monotonic() > deadline:
            raise RunError(f"{folder} is not seen here; --runs-dir must be a folder that all hosts share")
        time.sleep(0.1)
    loop.train(run, folder, resumed=told["resumed"])


def _told(run: Run) -> Run:
    """`run`, of which the other processes hear."""
    process_group.tell("run", to_dict(run))
    return run


def _train(words: Sequence[str]) -> int:
    if not words or words[0].startswith("-"):
        if words and words[0] in ("-h", "--help"):
            _train_help()
            return 0
        there = ", ".join(name for name, _ in recipes.described())
        raise FlagError(f"name a recipe first: longhaul train RECIPE [--flags]; there are {there}")
    if words[0] in recipes.GRIDS:
        if process_group.together():
            raise FlagError(f"{words[0]} is a grid of runs, each in one process; leave longhaul launch out")
        return scaling.run(words[0], words[1:], f"train {words[0]}")
    recipe = recipes.recipe(words[0])
    about = recipes.about(recipe.recipe)
    table = run_flags.table(recipe)
    table[""] = [DRY_RUN, *table[""]]
    parsed = flags.parse(f"train {recipe.recipe}", about, table, words[1:])
    runs_dir = Path(parsed.values["runs-dir"])
    if parsed.values["dry-run"]:
        return _dry(runs_dir, recipe, parsed)
    if parsed.values["resume"] is not None:
        folder = find_folder(runs_dir, parsed.values["resume"])
        tracked = wandb.chosen(parsed.values, parsed.given, recipe.recipe, wandb.load(folder))
        run = _told(resolve(run_flags.resumed(folder, recipe.recipe, _fitting(parsed, folder))))
        published = publish.chosen(parsed.values, parsed.given, publish.load(folder))
        wandb.save(folder, tracked)
        publish.save(folder, published)
        _say_unused(parsed, tracked)
        print(folder, flush=True)
        outcome = loop.train(run, folder, resumed=True)
    else:
        tracked = wandb.chosen(parsed.values, parsed.given, recipe.recipe)
        publish.chosen(parsed.values, parsed.given)
        _say_unused(parsed, tracked)
        run = _there(_told(resolve(run_flags.chosen(recipe, parsed))))
        folder, outcome = _begin(runs_dir, run, parsed, tracked)
    if outcome.result is not None:
        _show(outcome.result)
        print(f"report: {folder / 'report.html'}")
    return outcome.code


def _there(run: Run) -> Run:
    """`run`, if its environment is one of a suite that is installed; else RunError, before there is a folder."""
    if isinstance(run.environment, Named) and suites.is_suite(run.environment.env):
        loop.prepare_devices(run.all_devices, run.threads)  # importing a suite may start JAX, as Brax does
        named(run.environment)
    return run


def _show(result: dict[str, Any]) -> None:
    """The table of a result: of policies, or of runs."""
    if "members" not in result:
        tables.scores(result["evaluation"])
        return
    header, rows, footer = population_report.columns(result["members"])
    tables.table(header, [[tables.number(value) for value in row] for row in rows], footer=footer)


def _dry(runs_dir: Path, recipe: Run, parsed: flags.Parsed) -> int:
    """Compiles the run that is asked for, and prints what it takes of a device's memory; leaves no folder."""
    if process_group.together():
        raise FlagError("--dry-run is of one process; leave longhaul launch out")
    if parsed.values["resume"] is None:
        run = resolve(run_flags.chosen(recipe, parsed))
    else:
        folder = find_folder(runs_dir, parsed.values["resume"])
        run = resolve(run_flags.resumed(folder, recipe.recipe, _fitting(parsed, folder)))
    assert run.devices is not None
    loop.prepare_devices(run.devices, run.threads)
    if isinstance(run.environment, Named):
        named(run.environment)
    made = subject(run)
    parts = device_memory.parts(made.assembly.algorithm, made.start(run.seed), made.context)
    found = device_memory.footprint(made.executable, made.assembly.mesh, parts)
    if found is None:
        print("the compiler does not say what memory the run takes")
        return 0
    if refusal := found.refusal():
        raise RunError(refusal)
    tables.listing(found.rows())
    if warning := found.warning():
        print(warning, file=sys.stderr)
    return 0


def _fitting(parsed: flags.Parsed, folder: Path) -> flags.Parsed:
    """`parsed`, on fewer devices where some are gone. Under a launcher alone, which starts again with nobody there."""
    if heartbeat.DESCRIPTOR not in os.environ or on_cpu():
        return parsed
    run = load_run(folder)
    wanted: MeshShape = parsed.values["mesh"] if "mesh" in parsed.given else run.mesh
    envs: int = parsed.values["num-envs"] if "num-envs" in parsed.given else run.num_envs
    there = [sum(device.process_index == i for device in jax.devices()) for i in range(process_group.count())]
    assert wanted.data is not None
    left = MeshShape(resume.fewer(wanted.data, there, envs, wanted.model), wanted.model)
    if left == wanted:
        return parsed
    count = wanted.data * wanted.model
    print(f"{sum(there)} of {count} devices are there; goes on with {left}", file=sys.stderr, flush=True)
    return parsed._replace(values=parsed.values | {"mesh": left}, given=parsed.given | {"mesh"})


def _say_unused(parsed: flags.Parsed, tracked: wandb.Tracking | None) -> None:
    for flag in wandb.unused(parsed.given, tracked):
        print(f"{flag} does nothing without --wandb", file=sys.stderr)


def _train_help() -> None:
    print("usage: longhaul train RECIPE [--flags]\n\nTrains, and prints the run's folder first. The recipes:\n")
    tables.listing((f"  {name}", about) for name, about in recipes.described())
    print(
        "\nlonghaul train RECIPE --help shows its flags with their defaults, longhaul train RECIPE --resume ID goes on."
        "\nExit codes: 0 done, 1 failed, 2 bad input, 75 stopped by a signal after saving."
    )


def _begin(runs_dir: Path, run: Run, parsed: flags.Parsed, tracked: wandb.Tracking | None) -> tuple[Path, loop.Outcome]:
    """A new run from its folder on. Whoever has read the folder's name can go on with it, be it killed at once.

    A run that is refused before it began (by a damaged log, say) leaves no folder.
    """
    task = run.environment
    if isinstance(task, Named):
        named(task)  # what is unknown or missing is said before anything is made
    assert run.devices is not None
    loop.prepare_devices(run.all_devices, run.threads)
    if isinstance(task, Driving) or run.model > 1:  # elsewhere nothing dear is made before that is asked for
        algorithm = learners.make(spec(run), run.algorithm, Context(updates=1, mean=identity))
        partition.check(jax.eval_shape(algorithm.init, jax.random.key(0)), run.mesh)
    source = feed(run) if isinstance(task, Driving) and task.data else None
    about = provenance() | {"data": source.about if source else None}
    folder = new_folder(runs_dir, run, parsed.values["run-name"], parsed.values["run-suffix"])
    try:
        wandb.save(folder, tracked)
        publish.save(folder, publish.chosen(parsed.values, parsed.given))
        save_run(folder, run, about)
        print(folder, flush=True)
        return folder, loop.train(run, folder, resumed=False, source=source)
    except (ValueError, OSError):
        if {path.name for path in folder.iterdir()} <= {"run.json", "run.json.partial", wandb.FILE, publish.FILE}:
            shutil.rmtree(folder)
        raise


# ---------------------------------------------------------------------------------------------------- what there is


def show_recipes(words: Sequence[str]) -> int:
    """`longhaul recipes`."""
    flags.parse("recipes", "The recipes of longhaul train.", {"": [DEBUG]}, words)
    tables.listing(recipes.described())
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
    tables.listing([*registry.names(), ("driving", "the recipe driving: generated scenarios, or logs by --data")])
    print("\nOf other libraries, on the device:")
    tables.listing(suites.rows())
    print("\nOn the host, for actors:")
    tables.listing(host.names())
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
    tracked = wandb.load(folder)
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
    tables.listing(rows)
    live_status.show(folder)
    if result.is_file():
        _show(json.loads(result.read_text()))
    return 0


def _records(path: Path) -> list[dict[str, Any]]:
    """The whole records of a metrics file; none where there is no file."""
    return sinks.read(path) if path.is_file() else []
