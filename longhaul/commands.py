"""What the commands that need JAX do; their flags, their output, their exit codes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longhaul import evaluation, flags, printing, recipes, settings, telemetry, training
from longhaul.datasets import sources
from longhaul.driving import render as pictures
from longhaul.driving.recording import Recording
from longhaul.envs import registry
from longhaul.flags import DEBUG, INT, PATH, TEXT, Flag, FlagError, choice
from longhaul.provenance import provenance
from longhaul.run import Driving, Run, RunError, agents, find_folder, load_run, named, new_folder, resolve, save_run
from longhaul.settings import RUNS_DIR

RUN = Flag("RUN", TEXT, None, "a run's name or folder", shown="")
DATA = Flag("data", PATH, (), "driving logs: files, folders, globs", many=True, shown="")
JSON = Flag("json", PATH, None, "write the result to this file; - is stdout", shown="")

PICTURES = (".gif", ".mp4", ".html", ".png")


def train(words: Sequence[str]) -> int:
    """`longhaul train RECIPE [--flags]`."""
    if not words or words[0].startswith("-"):
        if words and words[0] in ("-h", "--help"):
            _train_help()
            return 0
        raise FlagError(f"name a recipe first: longhaul train RECIPE [--flags]; there are {', '.join(recipes.RECIPES)}")
    recipe = recipes.recipe(words[0])
    about = (recipes.RECIPES[recipe.recipe].__doc__ or "").splitlines()[0]
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
    elif task.data:
        sources.expand(task.data)
    assert run.devices is not None
    training.prepare_devices(run.devices, run.threads)
    about = provenance()
    folder = new_folder(runs_dir, run, name)
    try:
        save_run(folder, run, about)
        print(folder, flush=True)
        return folder, training.train(run, folder, resumed=False)
    except (ValueError, OSError):
        if {path.name for path in folder.iterdir()} <= {"run.json", "run.json.partial"}:
            shutil.rmtree(folder)
        raise


# ------------------------------------------------------------------------------------------------------- evaluation


def evaluate(words: Sequence[str]) -> int:
    """`longhaul evaluate RUN [--policy ...] [--data PATH...] [--episodes N] [--json FILE]`."""
    policy = Flag("policy", choice(evaluation.POLICIES), "run", "the run's policy, the untrained one, or a driver")
    episodes = Flag("episodes", INT, None, "how many; with --data, at most as many as it holds", shown="as in the run")
    groups = {"": [RUN, policy, DATA, episodes, JSON, RUNS_DIR, DEBUG]}
    parsed = flags.parse("evaluate", "What a policy scores on whole episodes.", groups, words).values
    folder = _folder(parsed, "evaluate")
    printing.check_json(parsed["json"])
    who, count = parsed["policy"], parsed["episodes"]
    if count is not None and count < 1:
        raise FlagError(f"--episodes is {count}; it must be at least 1")
    run, acting = _policy(folder, who)
    if isinstance(run.environment, Driving):
        drives = evaluation.drives(run, parsed["data"], count)
        scores, _ = drives.play(acting, _driver(who))
    elif parsed["data"]:
        raise FlagError(f"--data is for driving, and run {folder.name} is {run.environment.env}; leave --data out")
    else:
        scores = evaluation.play_classic(run, named(run.environment), acting, count or run.evaluation_episodes or 100)
    if parsed["json"] != "-":
        _print_scores(scores, by_scenario=isinstance(run.environment, Driving))
    if parsed["json"] is not None:
        printing.write_json(parsed["json"], _report(folder.name, who, scores))
    return 0


def _folder(parsed: dict[str, Any], command: str) -> Path:
    if parsed["RUN"] is None:
        hint = " [--flags]: RUN first, or before --data" if command == "evaluate" else ""
        raise FlagError(f"which run? longhaul {command} RUN{hint}")
    return find_folder(Path(parsed["runs-dir"]), parsed["RUN"])


def _policy(folder: Path, who: str) -> tuple[Run, Any]:
    """(the run, the policy that acts in it): None for a driver that no learning made."""
    if who in ("run", "untrained"):
        run, trained, untrained = training.restore_policy(folder)
        return run, trained if who == "run" else untrained
    run = load_run(folder)
    if not isinstance(run.environment, Driving):
        task = run.environment.env
        raise FlagError(f"--policy is {who!r}, a driver, and run {folder.name} is {task}; give run or untrained")
    training.prepare_devices(run.devices or 1, run.threads)
    return run, None


def _driver(who: str) -> str:
    return "policy" if who in ("run", "untrained") else who


def _print_scores(scores: evaluation.Scores, *, by_scenario: bool) -> None:
    names = printing.columns(scores.metrics)
    columns = [np.asarray(scores.metrics[name], float) for name in names]
    if by_scenario:
        rows = [[scenario, *(printing.number(float(c[i])) for c in columns)] for i, scenario in enumerate(scores.names)]
        mean = [f"mean of {len(scores.names)}", *(printing.number(float(c.mean())) for c in columns)]
        printing.table(["scenario", *names], rows, footer=mean)
        return
    rows = [
        [name, *(printing.number(float(f(c))) for f in (np.mean, np.std, np.min, np.max))]
        for name, c in zip(names, columns)
    ]
    printing.table([f"{len(scores.names)} episodes", "mean", "std", "min", "max"], rows)


def _report(run_id: str, who: str, scores: evaluation.Scores) -> dict[str, Any]:
    """What --json holds. With several agents a scenario has as many entries."""
    values = {name: np.asarray(column, float).tolist() for name, column in scores.metrics.items()}
    entries = [{"id": name} | {m: column[i] for m, column in values.items()} for i, name in enumerate(scores.names)]
    return {
        "run": run_id,
        "policy": who,
        "episodes": len(scores.names),
        "mean": {name: float(np.mean(column)) for name, column in values.items()},
        "std": {name: float(np.std(column)) for name, column in values.items()},
        "scenarios": [entry for entry in entries if entry["id"]],
    }


# --------------------------------------------------------------------------------------------------------- pictures


def render(words: Sequence[str]) -> int:
    """`longhaul render RUN|--policy ... [--data PATH...] [--scenario ID] --out FILE`."""
    policy = Flag("policy", choice(evaluation.POLICIES), "run", "who drives; without RUN: idm, log or constant")
    scenario = Flag("scenario", TEXT, None, "the scenario's id", shown="the first")
    out = Flag("out", PATH, None, ".gif, .mp4, .html (a page with a player) or .png (a film strip)", shown="needed")
    groups = {"": [RUN, policy, DATA, scenario, out, RUNS_DIR, DEBUG]}
    parsed = flags.parse("render", "Draws one scenario as a policy drives it.", groups, words).values
    who = parsed["policy"]
    _check_out(parsed["out"])
    if parsed["RUN"] is not None:
        folder = find_folder(Path(parsed["runs-dir"]), parsed["RUN"])
        stored = load_run(folder).environment
        if not isinstance(stored, Driving):
            raise FlagError(f"only driving can be drawn, and run {folder.name} is {stored.env}; name another run")
        run, acting = _policy(folder, who)
    elif who in ("run", "untrained"):
        raise FlagError("whose drive? give a RUN, or --policy idm, log or constant")
    else:
        run, acting = resolve(recipes.recipe("driving")), None
    recording = _film(run, acting, who, parsed["data"], parsed["scenario"])
    pictures.save([recording], parsed["out"], fps=max(1, min(50, round(1 / recording.dt))))
    print(parsed["out"])
    return 0


def _check_out(out: str | None) -> None:
    """Raises FlagError before work is done for nothing."""
    if out is None:
        raise FlagError("where to? give --out drive.gif (or .mp4, .html, .png)")
    if Path(out).suffix.lower() not in PICTURES:
        raise FlagError(f"--out is {out!r}; its suffix must be one of {', '.join(PICTURES)}")


def _film(run: Run, acting: Any, who: str, data: Sequence[str], scenario: str | None) -> Recording:
    """The recording of one scenario, by its id, else the first."""
    drives = evaluation.drives(run, data, 1 if scenario is None else None)
    ids = [each.id for each in drives.scenarios]
    if scenario is not None and scenario not in ids:
        hint = flags.suggestion(scenario, ids, f"there are {', '.join(ids[:3])}" + (" ..." if len(ids) > 3 else ""))
        raise RunError(f"no scenario is named {scenario!r}; {hint}")
    which = 0 if scenario is None else ids.index(scenario)
    recording = drives.only(which).play(acting, _driver(who), [0])[1][0]
    return recording._replace(label="trained" if who == "run" else who)


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
    folder = _folder(parsed, "status")
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
