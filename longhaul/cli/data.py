"""The commands `data inspect` and `data convert`: driving logs, counted and packed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longhaul.cli import flags, tables
from longhaul.cli.flags import DEBUG, INT, OUTPUT, PATH, Flag, FlagError
from longhaul.cli.tables import say
from longhaul.runtime.errors import FAILED

KINDS = ("vehicles", "pedestrians", "cyclists", "others")

USAGE = (
    "longhaul data inspect PATH... [--json FILE] [--picture FILE] [--pictures FOLDER]",
    "longhaul data convert SRC... OUT",
)


def data(argv: Sequence[str]) -> int:
    """`longhaul data inspect` and `longhaul data convert`."""
    return flags.of_group("data", {"inspect": _inspect, "convert": _convert}, USAGE, argv)


def _convert(argv: Sequence[str]) -> int:
    """`longhaul data convert SRC... OUT`; files with errors are counted and listed, with exit code 1."""
    from longhaul.driving.scenario.from_log import ROUTES
    from longhaul.driving.scenario.scenario import CONTROLS

    paths = Flag("PATH", PATH, (), "files, folders, globs; the last is the folder to write", many=True)
    workers = Flag("workers", INT, None, "processes", shown="one a core")
    per_shard = Flag("per_shard", INT, 256, "scenarios of a shard")
    agents = Flag("agents", INT, 1, "controlled agents of a scenario, at most")
    horizon = Flag("horizon", INT, None, "most steps of a scenario", shown="to the log's end")
    about = "Packs driving logs into shards to train on: compact and checked. Goes on where it was stopped."
    control = Flag(
        "control", flags.choice(tuple(CONTROLS)), "vehicles", "kinds of controlled agents: vehicles, or all that move"
    )
    routes = Flag("routes", flags.choice(ROUTES), "log", "source of routes: the logged ways, or lanes")
    sizes = [workers, per_shard, agents, horizon, control, routes]
    parsed = flags.parse("data convert", about, {"": [paths, *sizes, DEBUG]}, argv).values
    if len(parsed["PATH"]) < 2:
        raise FlagError("from where to where? longhaul data convert SRC... OUT")

    from longhaul.driving.shards.convert import Progress, convert

    def show(now: Progress) -> None:
        tables.progress(f"{now.files:,} of {now.of:,} files, {now.scenarios:,} scenarios")

    *sources, out = parsed["PATH"]
    sizes_given = {name: parsed[name] for name in ("per_shard", "agents", "horizon", "control", "routes")}
    count = os.cpu_count() or 1 if parsed["workers"] is None else parsed["workers"]
    report = convert(sources, Path(out), workers=count, progress=show, **sizes_given)
    print(f"{out}: {report.scenarios:,} scenarios in {len(report.shards)} shards, {report.bytes:,} bytes")
    for path, message in report.errors:
        say(f"{path}: {message}" if path not in message else message, FAILED)
    return FAILED if report.errors else 0


def _inspect(argv: Sequence[str]) -> int:
    """`longhaul data inspect PATH... [--json FILE] [--picture FILE] [--pictures FOLDER]`."""
    paths = Flag("PATH", PATH, (), "files, folders, globs", many=True)
    out = Flag("json", OUTPUT, None, "write the counts and ranges to this file; - is stdout")
    picture = Flag("picture", PATH, None, "draw the first scenario to this .png, .svg or .html")
    each = Flag("pictures", PATH, None, "draw every scenario to this folder, as .png")
    about = "Counts and ranges of what is in driving logs, as they have it."
    parsed = flags.parse("data inspect", about, {"": [paths, out, picture, each, DEBUG]}, argv).values
    if not parsed["PATH"]:
        raise FlagError("which logs? longhaul data inspect PATH... [--json FILE] [--picture FILE]")

    from longhaul.driving import inspect_logs
    from longhaul.driving.datasets import readers

    readers.expand(parsed["PATH"])  # a path that means nothing is bad input; a bad file is a finding
    report = inspect_logs.inspect(parsed["PATH"], _drawing(parsed["picture"], parsed["pictures"]))
    tables.report(parsed["json"], report, lambda: _print_files(report["files"]))
    for file in report["files"]:
        if file["error"] is not None:
            say(file["error"], FAILED)
    return FAILED if report["errors"] else 0


def _drawing(picture: str | None, folder: str | None) -> Callable[[Path, Any], None] | None:
    """Function that draws each inspected scenario; None without --picture and --pictures."""
    if picture is None and folder is None:
        return None

    from longhaul.driving.render import log_picture

    if picture is not None and Path(picture).suffix.lower() not in log_picture.SUFFIXES:
        raise FlagError(f"--picture {picture}: name a file that ends in {', '.join(log_picture.SUFFIXES)}")
    drawn: set[str] = set()

    def draw(_: Path, shown: Any) -> None:
        if picture is not None and not drawn:
            log_picture.save(shown, Path(picture))
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in shown.id)[:100]
        while name in drawn:
            name += "-again"
        drawn.add(name)
        if folder is not None:
            log_picture.save(shown, Path(folder) / f"{name}.png")

    return draw


def _summary(files: Sequence[dict[str, Any]]) -> str:
    """ "2 files (womd), 34 scenarios, 5.1 minutes, 310 tracks: 290 vehicles, 12 pedestrians, 8 cyclists, 0 others"."""
    scenarios = [each for file in files for each in file["scenarios"]]
    formats = ", ".join(sorted({file["format"] or "unknown format" for file in files}))
    parts = [f"{len(files):,} file{'s' * (len(files) != 1)} ({formats})"]
    parts.append(f"{len(scenarios):,} scenario{'s' * (len(scenarios) != 1)}")
    parts.append(f"{sum(each['ranges']['duration'] or 0.0 for each in scenarios) / 60:,.1f} minutes")
    counts = {name: sum(each[name] or 0 for each in scenarios) for name in KINDS}
    parts.append(f"{sum(each['tracks'] or 0 for each in scenarios):,} tracks")
    kinds = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    wrong = sum(file["error"] is not None for file in files)
    errors = f"; {wrong:,} file{'s' * (wrong != 1)} with an error" if wrong else ""
    return f"{', '.join(parts)}: {kinds}{errors}"


def _print_files(files: Sequence[dict[str, Any]]) -> None:
    """One line on all; then for each file a row a scenario, and a table of ranges."""
    print(_summary(files))
    for file in files:
        scenarios = file["scenarios"]
        size = f"{len(scenarios)} scenario{'' if len(scenarios) == 1 else 's'}"
        print(tables.clean(f"{file['path']}: {file['format'] or 'unknown format'}, {size}"))
        if scenarios:
            names = [name for name in scenarios[0] if name not in ("id", "ranges")]
            rows = [[str(each["id"]), *(tables.number(each[name]) for name in names)] for each in scenarios]
            tables.table(["scenario", *names], rows)
            names = [name for name in scenarios[0]["ranges"] if name != "sizes"]
            rows = [[str(each["id"]), *(tables.span(each["ranges"][name]) for name in names)] for each in scenarios]
            tables.table(["scenario", *names], rows)
            rows = [
                [str(each["id"]), kind, *(tables.span(box.get(side)) for side in ("length", "width", "height"))]
                for each in scenarios
                for kind, box in each["ranges"]["sizes"].items()
            ]
            tables.table(["scenario", "kind", "length", "width", "height"], rows)
