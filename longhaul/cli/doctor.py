"""The command `doctor`: is this run in good health, and is this recipe fit for many devices?"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from longhaul.algorithms import registry
from longhaul.cli import flags, run_flags, tables
from longhaul.cli.flags import ALONE, DEBUG, INT, OUTPUT, Flag, FlagError
from longhaul.cli.run_flags import RUNS_DIR
from longhaul.config import recipes
from longhaul.config.resolve import agents, resolve
from longhaul.config.run import Run, to_dict
from longhaul.diagnostics import checks, compiled_run
from longhaul.diagnostics.checks import FAIL, HEADER, PASS, VERDICTS, WARN, Check, failed, skipped
from longhaul.diagnostics.compiled_run import Program, compiled, smaller
from longhaul.runtime import files, object_store
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.errors import RunError, one_line
from longhaul.runtime.provenance import provenance
from longhaul.runtime.user_modules import is_named
from longhaul.telemetry import health, health_log, sinks
from longhaul.telemetry.health import Finding, Reading
from longhaul.training import data as feeds
from longhaul.training.run_dir import find_folder, load_run

JSON = Flag("json", OUTPUT, None, "write the table to this file, too; - is stdout, without the table")
QUICK = Flag("quick", ALONE, False, "only what the compiled program shows, without training")
SEEDS = Flag("seeds", INT, checks.LEAST_SEEDS, "runs on each side of the test of convergence")
UPDATES = Flag("updates", INT, None, "updates of each of them", shown="what a minute allows", least=2)

USAGE = "longhaul doctor RUN [--json FILE], or longhaul doctor RECIPE [--quick] [--json FILE] [--flags of train]"

WORDS = {
    "finite": ("{:.0f} numbers that are not finite", "{:.0f}"),
    "lr": ("{:.3g}", "> {:g}"),
    "entropy": ("{:.3g} nats", ">= {:.3g}"),
    "kl": ("{:.2g} nats an update", "<= {:g}"),
    "clip": ("{:.1%} of ratios clipped", "<= {:.0%}"),
    "value loss": ("{:.3g}", "<= {:.3g}"),
    "critic": ("explained variance {:.2g}", ">= {:g}, or a return that has risen"),
    "episodes": ("{:.0f} updates without an episode's end", "<= {:.0f}"),
    "plateau": ("return {:+.3g} over the window", "> {:.2g}, or solved, or annealed"),
    "stalling": ("episodes {:.2f} times as long over the window", "<= {:g}, or a return that rises"),
    "loss of return": ("{:.0%} of what was gained", "<= {:.0%}"),
    "speed": ("{:,.0f} agent steps a second", ">= {:,.0f}"),
}
"""Formats of the value and the bound of each health check in a table."""

WIDE = 90
"""Characters to which values are filled up; longer ones push their bound to the right."""

MINUTE, LEAST_UPDATES, MOST_UPDATES = 60.0, 8, 60
"""Seconds that the test of convergence should take, and the updates of a run in it."""


def doctor(argv: Sequence[str]) -> int:
    """`longhaul doctor RUN` and `longhaul doctor RECIPE`; exit code 1 where a check fails."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: {USAGE.replace(', or ', chr(10) + '       ')}\n\nMeasures, a verdict a check. The recipes:\n")
        tables.listing((f"  {name}", recipes.about(name)) for name in recipes.RECIPES)
        return 0
    if not argv or argv[0].startswith("-"):
        raise FlagError(f"name a run or a recipe first: {USAGE}")
    own = is_named(argv[0]) and object_store.address(argv[0]) is None
    return _recipe(argv) if argv[0] in recipes.RECIPES or own else _run(argv)


def _show(results: list[Check], about: dict[str, Any], path: str | None) -> int:
    """Prints the table, writes the file; -> the exit code."""
    if path != "-":
        for line in table(results):
            print(tables.clean(line))
        counts = {verdict: sum(check.verdict == verdict for check in results) for verdict in VERDICTS}
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    bad = failed(results)
    if path is not None:
        verdict = FAIL if bad else WARN if any(check.verdict == WARN for check in results) else PASS
        tables.write_json(path, about | {"verdict": verdict, "checks": [check.plain() for check in results]})
    return 1 if bad else 0


def table(results: Sequence[Check]) -> list[str]:
    """Lines of text: a row a check, and below it what to do, where there is something to do."""
    rows = [HEADER[:4], *((check.name, check.verdict, check.value, check.bound) for check in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    widths[2] = min(widths[2], WIDE)
    lines = []
    for row, check in zip(rows, (None, *results), strict=True):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)).rstrip())
        if check is not None and check.remedy:
            lines.append(" " * (sum(widths[:2]) + 4) + f"-> {check.remedy}")
    return lines


# ------------------------------------------------------------------------------------------------------------- a run


def _run(argv: Sequence[str]) -> int:
    """`longhaul doctor RUN`: its records and findings."""
    run_flag = Flag("RUN", flags.TEXT, None, "a run's name or folder, or a recipe")
    parsed = flags.parse("doctor", "Health of a run.", {"": [run_flag, RUNS_DIR, JSON, DEBUG]}, argv).values
    runs_dir = Path(parsed["runs-dir"])
    try:
        folder = find_folder(runs_dir, parsed["RUN"])
    except RunError as error:
        runs = [path.parent.name for path in runs_dir.glob("*/run.json")]
        near = flags.nearest(parsed["RUN"], [*recipes.RECIPES, *runs])
        if near:
            raise RunError(f"no run or recipe is named {parsed['RUN']!r}; did you mean {' or '.join(near)}?") from None
        raise RunError(f"no recipe is named {parsed['RUN']!r}, and {error}") from None
    run = load_run(folder)
    metrics = folder / "metrics.jsonl"
    records = sinks.read(metrics) if metrics.exists() else []
    results = [*_files(folder, records), *examine(run, records)]
    return _show(results, {"run": folder.name, "recipe": run.recipe, "folder": str(folder)}, parsed["json"])


def _files(folder: Path, records: Sequence[health.Record]) -> Iterator[Check]:
    """Check that records and checkpoints are whole."""
    updates = [record["update"] for record in records]
    repeated = [b for a, b in itertools.pairwise(updates) if b <= a]
    last = updates[-1] if updates else 0
    value = f"{len(updates)}, the last of update {last}"
    if not updates:
        yield skipped("records", "none yet", "ask again when the run has written some")
    else:
        remedy = f"{len(repeated)} records stand twice: the file was changed from outside"
        yield Check("records", FAIL if repeated else PASS, value, "each update once", remedy if repeated else "")
    saved = files.checkpoint_steps(folder)
    done = (folder / "result.json").is_file()
    value = ", ".join(map(str, saved)) or "none"
    if done and (not saved or saved[-1] < last):
        yield Check("checkpoints", WARN, value, f"one of update {last}", "keep the newest: evaluate and play need it")
    else:
        yield Check("checkpoints", PASS, value)


def examine(run: Run, records: Sequence[health.Record]) -> list[Check]:
    """A verdict of every health check on the records of a run: `fail` where a grave finding lasts to their end."""
    if not records:
        return [skipped(check, "no records", "ask again when the run has written some") for check in health.CHECKS]
    last, steps = records[-1], run.num_envs * agents(run) * run.num_steps
    left = max(0, run.total_steps - int(last["agent_steps"])) // steps
    plan = health_log.plan(feeds.spec(run), int(last["update"]) + left, run.num_steps)
    seen = health.review(records, plan, run.health)
    findings: dict[str, list[Finding]] = {}
    for finding in seen.findings():
        findings.setdefault(finding.check, []).append(finding)
    return [_verdict(check, findings.get(check, []), seen.readings.get(check)) for check in health.CHECKS]


def _verdict(check: str, findings: Sequence[Finding], reading: Reading | None) -> Check:
    value, bound = WORDS[check]
    if findings:
        finding = findings[-1]
        lasts = finding.until is None
        when = f"since update {finding.since}" if lasts else f"from update {finding.since} to {finding.until}"
        often = f", {len(findings)} times in all" if len(findings) > 1 else ""
        verdict = FAIL if lasts and check in health.GRAVE else WARN
        says, all_of_them = f"{finding.says} ({when}{often})", [each._asdict() for each in findings]
        return Check(check, verdict, says, bound.format(finding.bound), finding.remedy, {"findings": all_of_them})
    if reading is None:
        return skipped(check, "can't be said from these records", "")
    figures = {"value": reading.value, "bound": reading.bound}
    if check == "critic" and reading.value < reading.bound:  # no finding, since the return has risen
        remedy = f"harmless where returns hardly differ any more; else {health.REMEDIES[check]}"
        return Check(check, WARN, value.format(reading.value), bound.format(reading.bound), remedy, figures)
    return Check(check, PASS, value.format(reading.value), bound.format(reading.bound), "", figures)


# ---------------------------------------------------------------------------------------------------------- a recipe


def _recipe(argv: Sequence[str]) -> int:
    """`longhaul doctor RECIPE`: the scaling checklist."""
    recipe = recipes.recipe(argv[0])
    try:
        registry.on_policy(recipe.algorithm)
    except ValueError as error:
        raise FlagError(f"doctor {recipe.recipe}: {error}") from error
    groups = {
        title: [flag for flag in group if flag.name not in run_flags.SIDE_BY_SIDE]
        for title, group in run_flags.table(recipe).items()
    }
    groups[""] = [QUICK, SEEDS, UPDATES, JSON, *groups[""]]
    parsed = flags.parse(f"doctor {recipe.recipe}", "Fitness of a recipe for many devices.", groups, argv[1:])
    values = parsed.values
    if values["seeds"] < checks.LEAST_SEEDS:
        raise FlagError(f"--seeds is {values['seeds']}; give {checks.LEAST_SEEDS} or more: fewer can't tell anything")
    run = run_flags.chosen(recipe, parsed)
    results = []
    for check in checkup(run, quick=values["quick"], seeds=values["seeds"], updates=values["updates"]):
        tables.progress(f"{check.name}: {check.verdict}, {check.value}")
        results.append(check)
    about = {"recipe": run.recipe, "run": to_dict(run), "provenance": provenance()}
    return _show(results, about, values["json"])


def checkup(run: Run, *, quick: bool, seeds: int, updates: int | None) -> Iterator[Check]:
    """The checks of a Run that is not resolved yet, as they are done."""
    sizes, resolved = checks.sizes(run)
    yield sizes
    if resolved is None:
        return
    yield checks.rate(resolved)
    several = _prepare(run, resolved)
    program = None
    for check in _guarded("compilation", lambda: checks.compilation(resolved)):
        if isinstance(check, Check):
            yield check
        else:
            timed, program = check
            yield timed
    if program is None:
        return
    yield checks.memory(program)
    yield checks.host(program)
    many = program if _devices(program) > 1 else None
    if many is None and several:
        many = compiled(resolve(dataclasses.replace(run, devices=several)))
    yield checks.crossings(many) if many else of_two_shards(run)
    if quick:
        return
    yield from _guarded("lr 0", lambda: checks.still(resolved))
    determined, seconds = checks.determinism(program)
    yield determined
    yield checks.stalls(program, seconds)
    if many is None:
        yield skipped("all-reduce", "one device", "ask again on a machine with several devices")
        yield skipped("convergence", "one device", "ask again on a machine with several devices")
        return
    yield checks.all_reduce(many, seconds if many is program else checks.update_seconds(many))
    alone = program if _devices(program) == 1 else compiled(resolve(dataclasses.replace(run, devices=1, fsdp=False)))
    fitting = int(MINUTE / (2 * seeds * max(seconds, 1e-6)))
    n = updates or min(max(fitting, LEAST_UPDATES), MOST_UPDATES)
    yield checks.convergence(alone, many, seeds=seeds, updates=n)


def _devices(program: Program) -> int:
    """Devices that share an update's worlds."""
    return program.assembly.mesh.shape[meshes.DATA] * program.assembly.mesh.shape[meshes.FSDP]


def _guarded(name: str, work: Callable[[], Any]) -> Iterator[Any]:
    """Result of `work`; a failed check where the device can't do it."""
    try:
        yield work()
    except (jax.errors.JaxRuntimeError, RunError) as error:
        yield Check(
            name, FAIL, one_line(error), "it can be done", "make the batch or the network smaller, and ask again"
        )


def _prepare(run: Run, resolved: Run) -> int | None:
    """Starts JAX with at least two devices where they can be forced; -> how many others than one can be asked of."""
    prepare_devices(max(resolved.all_devices, 2), max(resolved.threads or 1, 2))
    count = len(jax.devices()) // run.model
    for devices in range(count, 1, -1):
        try:
            resolve(dataclasses.replace(run, devices=devices))
        except RunError:
            continue
        return devices
    return None


# --------------------------------------------------------------------------------------- two devices in another process


def of_two_shards(run: Run) -> Check:
    """The collectives of a small batch on two shards of forced CPU devices, in a process of its own."""
    try:
        plain = compiled_run.ask(smaller(run, devices=2), "longhaul.cli.doctor", "collectives")
    except RunError as error:
        return skipped("collectives", str(error), "ask again with several devices")
    name, verdict, value, bound, remedy = (plain[key] for key in HEADER)
    return Check(name, verdict, f"{value} (two CPU devices, a small batch)", bound, remedy, plain["figures"])


def collectives(run: Run) -> dict[str, Any]:
    """The check of a resolved run, as JSON can hold it: what that process does."""
    return checks.crossings(compiled(run)).plain()
