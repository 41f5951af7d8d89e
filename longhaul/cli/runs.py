"""The commands `runs`, `compare`, `report`, `rm`: runs of a folder as a table, side by side, reported, removed."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longhaul.cli import flags, tables
from longhaul.cli.flags import ALONE, DEBUG, INT, OUTPUT, PATH, TEXT, Flag, FlagError, choice
from longhaul.cli.run_flags import RUN, RUNS_DIR, folder_of
from longhaul.config.run import Run
from longhaul.driving.render.recording import Recording
from longhaul.runtime import bounded_json, config_fields, files, object_store
from longhaul.runtime.errors import FAILED, RunError
from longhaul.telemetry import health_log, screen, sinks
from longhaul.telemetry.films import Film
from longhaul.training import comparison
from longhaul.training import runs as folder_runs
from longhaul.training.run_dir import find_folder, read_result
from longhaul.training.runs import Summary

if TYPE_CHECKING:
    from longhaul.training import final_evaluation

SORTS = {
    "newest": lambda run: -run.created,
    "name": lambda run: run.name,
    "status": lambda run: run.status,
    "steps": lambda run: -run.steps,
    "rate": lambda run: -(run.rate or 0.0),
    "return": lambda run: -(run.value if run.value is not None else float("-inf")),
}

JSON = Flag("json", OUTPUT, None, "write the result to this file; - is stdout")

CURVE = 16
"""Letters of a curve in the table."""


def runs(argv: Sequence[str]) -> int:
    """`longhaul runs [FILTER...] [--sort ...] [--json FILE]`."""
    some = Flag("FILTER", TEXT, (), "words or patterns in name, recipe, environment, algorithm or status; "
                "FIELD=VALUE is a setting (lr=0.001)", many=True)  # fmt: skip
    order = Flag("sort", choice(tuple(SORTS)), "newest", "order of the rows")
    most = Flag("most", INT, None, "rows", shown="all", least=1)
    parsed = flags.parse("runs", "The runs of a folder.", {"": [some, order, most, RUNS_DIR, JSON, DEBUG]}, argv).values
    folder = folder_runs.local(parsed["runs-dir"])
    shown = [
        run
        for run in folder_runs.summaries(folder)
        if all(_matches_filter(folder, run, word) for word in parsed["FILTER"])
    ]
    shown = sorted(shown, key=SORTS[parsed["sort"]])[: parsed["most"]]
    rows, where, filters = [run._asdict() for run in shown], parsed["runs-dir"], parsed["FILTER"]
    tables.report(parsed["json"], rows, lambda: _print(shown, where, filters))
    return 0


def _matches_filter(folder: Path, run: Summary, word: str) -> bool:
    """True if a run is what one word of a filter asks for."""
    field, equals, value = word.partition("=")
    if equals:
        settings = folder_runs.config(folder / run.name)
        named = [held for name, held in settings.items() if field.replace("-", "_") in (name, name.rpartition(".")[2])]
        return any(_comparable(held) == _comparable(value) for held in named)
    texts = (run.name, run.recipe, run.environment, run.algorithm, run.status)
    return any(word in text or fnmatchcase(text, word) for text in texts)


def _comparable(value: Any) -> Any:
    """A value for a comparison: numbers as numbers, whatever their form."""
    with suppress(TypeError, ValueError):
        return float(value)
    return config_fields.plain(value).lower()


def _print(shown: Sequence[Summary], where: str, filters: Sequence[str]) -> None:
    if not shown:
        folder = next((word for word in filters if Path(word).is_dir()), None)
        hint = "" if folder is None else f"; {folder} is a folder: longhaul runs --runs-dir {folder}"
        asked = f" fits {' '.join(filters)}" if filters else ""
        missing = object_store.address(where) is None and not Path(where).is_dir()
        print(f"no run in {where}{asked}{hint}{'; there is no such folder' * missing}")
        return
    levels = screen.LEVELS["utf" in (sys.stdout.encoding or "").lower()]
    rows = [
        [
            run.name, run.status, f"{run.steps:,}", f"{run.steps / run.total_steps:.0%}" if run.total_steps else "-",
            "-" if run.rate is None else f"{run.rate:,.0f}", _number(run.value), _number(run.trained),
            screen.sparkline(run.spark, CURVE, levels), screen.duration(max(0.0, time.time() - run.updated)),
        ]
        for run in shown
    ]  # fmt: skip
    tables.table(["run", "status", "steps", "done", "steps/s", "return", "evaluated", "curve", "ago"], rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


# ---------------------------------------------------------------------------------------------------------- comparison


def compare(argv: Sequence[str]) -> int:
    """`longhaul compare RUN RUN... [--metric NAME...] [--json FILE]`."""
    some = Flag("RUN", TEXT, (), "runs by name or folder, or patterns of names", many=True)
    which = Flag("metric", TEXT, (), "metrics of the records", many=True, shown="return, rate and scores of episodes")
    about = (
        "Differences of runs in settings, and their final metrics; runs that differ in the seed alone are one group."
    )
    parsed = flags.parse("compare", about, {"": [some, which, RUNS_DIR, JSON, DEBUG]}, argv).values
    folders = _named_folders(parsed["RUN"], Path(parsed["runs-dir"]))
    if len(folders) < 2:
        raise FlagError("which runs? longhaul compare RUN RUN... [--metric NAME...]")
    curves, groups, differences = comparison.compare(folders)
    names = dict.fromkeys(name for each in curves.values() for name in each.names)
    metrics = parsed["metric"] or [name for name in names if name in MAIN]
    if unknown := [name for name in metrics if name not in names]:
        hint = flags.suggestion(unknown[0], list(names), f"there are {', '.join(list(names)[:8])}")
        raise RunError(f"--metric is {unknown[0]!r}, which no run has; {hint}")
    rows = comparison.table(curves, groups, metrics)

    def show() -> None:
        if differences:
            settings = {name.rpartition(".")[2]: values for name, values in differences.items()}
            tables.table(
                ["run", *settings], [[name, *(config_fields.plain(values[i]) for values in settings.values())]
                                     for i, name in enumerate(folders)],
            )  # fmt: skip
            print()
        tables.table(
            ["runs", "metric", "mean", "2.5 %", "97.5 %", "IQM", "2.5 %", "97.5 %", "count"],
            [
                [", ".join(row.runs), row.metric, *(_finite(value) for value in row[3:]), str(len(row.values))]
                for row in rows
            ],
        )

    plain = {"runs": list(folders), "differences": differences, "table": [row._asdict() for row in rows]}
    tables.report(parsed["json"], plain, show)
    return 0


MAIN = tuple(f"episode/{name}" for name in ("return", "accuracy", "goal", "progress", "collision", "offroad")) + (
    "sps",
)
"""Metrics that are compared if none is named."""


def _finite(value: float) -> str:
    return "-" if value != value else f"{value:,.4g}"


def _named_folders(names: Sequence[str], runs_dir: Path) -> dict[str, Path]:
    """Folders by the names of the runs that words name, patterns among them."""
    folder = folder_runs.local(runs_dir)
    paths: dict[str, Path] = {}
    for word in names:
        matching = [name for name in folder_runs.names(folder) if fnmatchcase(name, word)]
        chosen = [folder / name for name in matching] or [find_folder(runs_dir, word)]
        paths |= {path.name: path for path in chosen}
    return paths


# -------------------------------------------------------------------------------------------------------------- report


def report(argv: Sequence[str]) -> int:
    """`longhaul report RUN [--checkpoint STEP] [--member N] [--out FILE]`."""
    own = (
        Flag("checkpoint", INT, None, "evaluate the checkpoint after this many updates; 0: the newest", least=0),
        Flag("member", INT, None, "of a folder with many runs, report this one", least=0),
        Flag("past-violations", ALONE, False,
             "with --checkpoint: drawn episodes go on after a collision, off the road, past a red"),
        Flag("out", PATH, None, "the page to write", shown="report.html in the run's folder"),
    )  # fmt: skip
    about = "The report of a run as it stands: while it trains, after a stop or a kill, and for a checkpoint."
    parsed = flags.parse("report", about, {"": [RUN, *own, RUNS_DIR, DEBUG]}, argv).values
    if parsed["past-violations"] and parsed["checkpoint"] is None:
        raise FlagError("--past-violations is on, and no checkpoint is to be driven; give --checkpoint 0, say")
    if parsed["out"] is not None and Path(parsed["out"]).is_dir():
        raise FlagError(f"--out is {parsed['out']!r}, a folder; give a file in it")
    folder = folder_of(parsed, "longhaul report RUN [--checkpoint STEP]")
    member, step = parsed["member"], parsed["checkpoint"]
    page = folder / "report.html"
    if (member, step, parsed["out"]) == (None, None, None) and (folder / "result.json").is_file() and page.is_file():
        print(page)  # of the run's end, with its evaluation and films
        return 0
    with screen.stage("importing", plain=False):
        from longhaul.training import members
        from longhaul.training import report as pages
        from longhaul.training.run_dir import load_run
    run = load_run(folder)
    if member is not None or (run.many and step is not None):
        members.chosen(run, member, folder.name)
    records, result = _records_and_result(folder, member)
    recordings: list[Recording] = []
    films: list[Film] = []
    name = "report"
    if step is not None:
        number, compared = _evaluated(folder, member, step, past_violations=parsed["past-violations"])
        recordings, films = compared.recordings, compared.films
        result = {"status": f"checkpoint {number}", "evaluation": compared.means, "chains": compared.chains}
        records = [record for record in records if number is None or record["update"] <= number]
        name += f"-{number}"
    name += "" if member is None else f"-run-{member}"
    page = Path(parsed["out"] or folder / f"{name}.html")
    pages.write_report(
        page, run=bounded_json.read(folder / "run.json") | {"id": folder.name}, records=records, result=result,
        recordings=recordings, films=films, findings=health_log.read(folder),
        runs=_members(folder, run, result) if member is None else "",
    )  # fmt: skip
    print(page)
    return 0


def _records_and_result(folder: Path, member: int | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(records, result) of a run as far as it is, or of one member of a population."""
    from longhaul.training import members

    path = folder / ("metrics.jsonl" if member is None else members.FILE)
    records = sinks.read(path) if path.is_file() else []
    result = read_result(folder) if (folder / "result.json").is_file() else {}
    if member is None:
        return records, result
    own = (result.get("members") or {member: {}})[member]
    about = {name: result[name] for name in ("status", "compile_seconds") if name in result}
    return [members.of_member(record, member) for record in records], about | {"evaluation": own.get("evaluation", {})}


def _evaluated(
    folder: Path, member: int | None, step: int, *, past_violations: bool
) -> tuple[int | None, final_evaluation.Compared]:
    """(updates, evaluation) of the checkpoint after `step` updates; 0: of the newest."""
    from longhaul.training import final_evaluation
    from longhaul.training.checkpoint.resume import restore_policy

    steps = files.checkpoint_steps(folder)
    number = step or (steps[-1] if steps else None)
    with screen.stage("restoring the policy", plain=False):
        run, policy, untrained = restore_policy(folder, member, number)
    return number, final_evaluation.compare(run, policy, untrained, past_violations=past_violations)


def _members(folder: Path, run: Run, result: Mapping[str, Any]) -> str:
    """Section of a report on the runs of a population."""
    from longhaul.training import members

    if not run.many:
        return ""
    return members.section(folder, result) if "members" in result else members.unfinished(folder, run)


# ------------------------------------------------------------------------------------------------------------- removal


def rm(argv: Sequence[str]) -> int:
    """`longhaul rm RUN... [--yes]`."""
    some = Flag("RUN", TEXT, (), "runs by name or folder, or patterns of names", many=True)
    yes = Flag("yes", ALONE, False, "do not ask")
    about = "Removes runs with all their files. Keeps those that train, and those that another run began from."
    parsed = flags.parse("rm", about, {"": [some, yes, RUNS_DIR, DEBUG]}, argv).values
    if object_store.address(parsed["runs-dir"]):
        raise FlagError(f"--runs-dir is {parsed['runs-dir']}; runs of a store are removed by its own tools")
    if not parsed["RUN"]:
        raise FlagError("which runs? longhaul rm RUN...")
    folders = _named_folders(parsed["RUN"], Path(parsed["runs-dir"]))
    sources = _sources(Path(parsed["runs-dir"]), folders)
    gone = []
    for name, folder in folders.items():
        if folder_runs.trains(folder):
            tables.progress(f"{name} is kept: it trains")
        elif others := sources.get(folder.resolve()):
            tables.progress(f"{name} is kept: {', '.join(others)} began from it")
        else:
            gone.append(folder)
    if not gone:
        return FAILED
    if not parsed["yes"]:
        if not sys.stdin.isatty():
            raise FlagError(
                f"{len(gone)} run{'s' * (len(gone) != 1)} would be removed, and nobody can be asked here; give --yes"
            )
        print(*(str(folder) for folder in gone), sep="\n")
        if input(f"remove {len(gone)} run{'s' * (len(gone) != 1)}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return FAILED
    for folder in gone:
        files.remove(folder)
        print(f"removed {folder}")
    return 0


def _sources(runs_dir: Path, leaving: Mapping[str, Path]) -> dict[Path, list[str]]:
    """Folders that runs which stay began from, with the names of these runs."""
    sources: dict[Path, list[str]] = {}
    for run in folder_runs.summaries(runs_dir):
        if run.init_from and run.name not in leaving:
            sources.setdefault(Path(run.init_from.partition("@")[0]).resolve(), []).append(run.name)
    return sources
