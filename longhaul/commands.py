"""The commands `train` and `status`, and those that say what there is; their flags, their output, their exit codes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul import flags, printing, recipes, settings, telemetry, training
from longhaul.envs import registry
from longhaul.feed import feed
from longhaul.flags import DEBUG, TEXT, Flag, FlagError
from longhaul.folders import find_folder, load_run, new_folder, save_run
from longhaul.provenance import provenance
from longhaul.run import Driving, Run, agents, named, resolve
from longhaul.scaling import command as scaling
from longhaul.settings import RUNS_DIR

RUN = Flag("RUN", TEXT, None, "a run's name or folder", shown="")


def train(words: Sequence[str]) -> int:
    """`longhaul train RECIPE [--flags]`."""
    if not words or words[0].startswith("-"):
        if words and words[0] in ("-h", "--help"):
            _train_help()
            return 0
        raise FlagError(f"name a recipe first: longhaul train RECIPE [--flags]; there are {', '.join(recipes.RECIPES)}")
    if words[0] in recipes.GRIDS:
        return scaling.run(words[0], words[1:], f"train {words[0]}")
    recipe = recipes.recipe(words[0])
    about = recipes.about(recipe.recipe)
    parsed = flags.parse(f"train {recipe.recipe}", about, settings.table(recipe), words[1:])
    runs_dir = Path(parsed.values["runs-dir"])
    if parsed.values["resume"] is not None:
        folder = find_folder(runs_dir, parsed.values["resume"])
        run = resolve(settings.resumed(folder, recipe.recipe, parsed))
        print(folder, flush=True)
        outcome = training.train(run, folder, resumed=True)
    else:
        run = resolve(settings.chosen(recipe, parsed))
        folder, outcome = _begin(runs_dir, run, parsed.values["run-name"])
    if outcome.result is not None:
        printing.scores(outcome.result["evaluation"])
        print(f"report: {folder / 'report.html'}")
    return outcome.code


def _train_help() -> None:
    print("usage: longhaul train RECIPE [--flags]\n\nTrains, and prints the run's folder first. The recipes:\n")
    printing.listing((f"  {name}", about) for name, about in recipes.described())
    print(
        "\nlonghaul train RECIPE --help shows its flags with their defaults, longhaul train RECIPE --resume ID goes on."
        "\nExit codes: 0 done, 1 failed, 2 bad input, 75 stopped by a signal after saving."
    )


def _begin(runs_dir: Path, run: Run, name: str | None) -> tuple[Path, training.Outcome]:
    """A new run from its folder on. Whoever has read the folder's name can go on with it, be it killed at once.

    A run that is refused before it began (by a damaged log, say) leaves no folder.
    """
    task = run.environment
    if not isinstance(task, Driving):
        named(task)  # what is unknown or missing is said before anything is made
    assert run.devices is not None
    training.prepare_devices(run.devices, run.threads)
    source = feed(run) if isinstance(task, Driving) and task.data else None
    about = provenance() | {"data": source.about if source else None}
    folder = new_folder(runs_dir, run, name)
    try:
        save_run(folder, run, about)
        print(folder, flush=True)
        return folder, training.train(run, folder, resumed=False, source=source)
    except (ValueError, OSError):
        if {path.name for path in folder.iterdir()} <= {"run.json", "run.json.partial"}:
            shutil.rmtree(folder)
        raise


# ---------------------------------------------------------------------------------------------------- what there is


def show_recipes(words: Sequence[str]) -> int:
    """`longhaul recipes`."""
    flags.parse("recipes", "The recipes of longhaul train.", {"": [DEBUG]}, words)
    printing.listing(recipes.described())
    return 0


def show_envs(words: Sequence[str]) -> int:
    """`longhaul envs`."""
    flags.parse("envs", "The environments of longhaul train ppo --env NAME.", {"": [DEBUG]}, words)
    printing.listing([*registry.names(), ("driving", "the recipe driving: generated scenarios, or logs by --data")])
    return 0


def status(words: Sequence[str]) -> int:
    """`longhaul status RUN`."""
    parsed = flags.parse("status", "How far a run is.", {"": [RUN, RUNS_DIR, DEBUG]}, words).values
    if parsed["RUN"] is None:
        raise FlagError("which run? longhaul status RUN")
    folder = find_folder(Path(parsed["runs-dir"]), parsed["RUN"])
    run = load_run(folder)
    about = json.loads((folder / "run.json").read_text())
    last, lines = _last_record(folder / "metrics.jsonl")
    result = folder / "result.json"
    saved = sorted({int(name) for path in folder.glob("checkpoints/*") if (name := path.name.split(".")[0]).isdigit()})
    update = run.num_envs * agents(run) * run.num_steps
    done, total = last.get("agent_steps", 0), run.total_steps // update * update
    going_on = f"not done; longhaul train {run.recipe} --resume {folder.name} goes on"
    rows = [
        ("run", str(folder)),
        ("recipe", run.recipe),
        ("commit", str(about.get("commit") or "unknown")),
        ("state", "done" if result.is_file() else going_on),
        ("agent steps", f"{done:,} of {total:,} ({done / total:.1%})"),
        ("updates", f"{last.get('update', 0)}, in {lines} records"),
        ("checkpoints", ", ".join(map(str, saved)) or "none"),
    ]
    shown = ("wall_seconds", "sps", "episode/return")
    rows += [(name, f"{last[name]:,.1f}") for name in shown if last.get(name) is not None]
    if lines:
        age = time.time() - (folder / "metrics.jsonl").stat().st_mtime
        rows.append(("last record", f"{max(0, round(age))} s ago"))
    printing.listing(rows)
    if result.is_file():
        printing.scores(json.loads(result.read_text())["evaluation"])
    return 0


def _last_record(path: Path) -> tuple[dict[str, Any], int]:
    """(the last whole record of a metrics file, how many there are)."""
    if not path.is_file():
        return {}, 0
    records = telemetry.read(path)
    return (records[-1] if records else {}), len(records)
