"""The command `longhaul bench hackmatrix`: one cell of the table of speeds, or with --grid all of it, and its page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longhaul.bench import harness
from longhaul.bench.cases import hackmatrix_grid
from longhaul.bench.cases.hackmatrix_grid import Cell
from longhaul.cli import flags, tables
from longhaul.cli.flags import DEBUG, INT, OUTPUT, Flag, FlagError, choice
from longhaul.telemetry import screen

NAME = "hackmatrix"

ABOUT = "whole training of HackMatrix: starts cold and warm, steps, memory, shares; --grid: over sizes and precisions"

BEGIN, END = "<!-- begin: {} -->", "<!-- end: {} -->"
"""Lines of a page between which a table is written."""

PRECISION = choice(hackmatrix_grid.PRECISIONS)

FLAGS = (
    Flag("grid", flags.ALONE, False, "the whole table: 256x128 to 2048x256, fp32 and bf16"),
    Flag(
        "num-envs", INT, (), "environments, a figure for each", many=True, shown="256; with --grid those of the table"
    ),
    Flag(
        "num-steps", INT, (), "steps of each environment an update, a figure for each", many=True, shown="128; likewise"
    ),
    Flag("precision", PRECISION, (), "what the torso computes in", many=True, shown="fp32; with --grid both"),
    Flag("devices", INT, None, "devices", shown="as a training run"),
    Flag("repeats", INT, harness.LEAST_REPEATS, "updates that a figure is the median of"),
    Flag("json", OUTPUT, None, "keep the figures in this file: those that it has are not measured again"),
    Flag("page", OUTPUT, None, "write the table into this Markdown file, where it marks its place, else alone"),
    DEBUG,
)

HEADER = (
    *("envs x steps", "precision", "minibatches x epochs", "cold start, s (CPU-s)", "warm start, s (CPU-s)"),
    *("steps/s", "CPU-µs a step", "peak GiB", "env / inference / learning, %", "100 M steps, h"),
)

COMPARED = ("change", "from", "to", "steps/s, times", "steps per CPU-second, times")

Measure = Callable[[Cell], dict[str, Any]]


def run(argv: Sequence[str]) -> int:
    """`longhaul bench hackmatrix [--grid] [--flags]`."""
    parsed = flags.parse(f"bench {NAME}", f"Measures {ABOUT}.", {"": FLAGS}, argv).values
    if parsed["repeats"] < harness.LEAST_REPEATS:
        raise FlagError(
            f"--repeats is {parsed['repeats']}; give {harness.LEAST_REPEATS} or more: a median of fewer says little"
        )
    cells = chosen(parsed)

    def measure(cell: Cell) -> dict[str, Any]:
        return hackmatrix_grid.figure(cell, repeats=parsed["repeats"])

    figures = measured(cells, parsed["json"], measure)
    if parsed["grid"] and figures[0]["config"]["devices"] > 1:  # what all devices bring, at the first size
        figures += measured([cells[0]._replace(devices=1)], parsed["json"], measure)
    if parsed["page"] is not None:
        tables.write_text(parsed["page"], placed(parsed["page"], f"longhaul bench {NAME} --grid", page(figures)))
    if screen.is_terminal(sys.stdout):
        tables.table(HEADER, [row(figure) for figure in figures])
    return 0


def chosen(parsed: dict[str, Any]) -> list[Cell]:
    """The cells that the flags ask for."""
    envs, steps, precisions = (tuple(parsed[name]) for name in ("num-envs", "num-steps", "precision"))
    sizes = [(n, t) for n in envs or (hackmatrix_grid.SIZES[0][0],) for t in steps or (hackmatrix_grid.SIZES[0][1],)]
    if parsed["grid"] and not envs and not steps:
        sizes = list(hackmatrix_grid.SIZES)
    default = hackmatrix_grid.PRECISIONS if parsed["grid"] else hackmatrix_grid.PRECISIONS[:1]
    return hackmatrix_grid.cells(NAME, sizes, precisions or default, parsed["devices"])


def measured(cells: Sequence[Cell], path: str | None, measure: Measure) -> list[dict[str, Any]]:
    """The figures of `cells`, each printed; those that the file at `path` has are taken from there, others added to it.

    The file is whole after each cell, whenever the command ends.
    """
    kept = _read(path)
    figures = []
    for i, cell in enumerate(cells, 1):
        figure = next((stored for stored in kept if cell.same(stored)), None)
        where = f"{cell.num_envs}x{cell.num_steps} {cell.precision}, {i} of {len(cells)}"
        if figure is not None:
            tables.progress(f"{where}: kept from {path}, of commit {figure['commit'] or 'unknown'}")
        else:
            tables.progress(f"{where}: measuring")
            figure = measure(cell)
            kept.append(figure)
            if path not in (None, "-"):
                tables.write_json(str(path), kept)
        figures.append(figure)
        tables.write_line(figure)
    return figures


def _read(path: str | None) -> list[dict[str, Any]]:
    """The figures in a file. Raises FlagError where it holds something else, which is not to be overwritten."""
    if path in (None, "-") or not Path(str(path)).exists():
        return []
    try:
        figures = json.loads(Path(str(path)).read_text())
        if isinstance(figures, list) and all(figure["name"] == NAME and Cell(**figure["cell"]) for figure in figures):
            return figures
    except (ValueError, TypeError, KeyError):
        pass
    raise FlagError(f"--json is {path}, which holds no figures of bench {NAME}; name another file")


# ------------------------------------------------------------------------------------------------------------ table


def row(figure: dict[str, Any]) -> list[str]:
    """A figure's row of the table."""
    config, starts, shares = figure["config"], figure["start"], figure["shares"]
    return [
        f"{config['num_envs']} x {config['num_steps']}",
        config["precision"],
        f"{config['num_minibatches']} x {config['update_epochs']}",
        *(f"{starts[name]['seconds']:.1f} ({starts[name]['cpu_seconds']:.1f})" for name in ("cold", "warm")),
        f"{figure['per_second']:,.0f}",
        f"{figure['cpu_microseconds']:.1f}",
        f"{figure['peak_bytes'] / 2**30:.2f}",
        " / ".join(f"{100 * shares[name]:.0f}" for name in ("environment", "inference", "learning")),
        f"{figure['hours']:.2f}",
    ]


def page(figures: Sequence[dict[str, Any]]) -> str:
    """The table as Markdown, what each change brought, what it was measured on, how it stands to the goals."""
    shown = [figure for figure in figures if figure["cell"]["devices"] == figures[0]["cell"]["devices"]]
    goals = figures[0]["goals"]
    fast = sum(figure["per_second"] >= goals["per_second"] for figure in shown)
    soon = sum(figure["hours"] <= goals["hours"] for figure in shown)
    warm = [figure["warm_shares"]["ready_cpu_seconds"] for figure in shown]
    loads = [load for figure in figures for load in figure["load"] if load is not None]
    threads = _distinct_text(f"{figure['config']['threads']} threads" for figure in shown)
    versions = _distinct_text(f"JAX {figure['versions']['jax']}" for figure in figures)
    lines = [
        f"At least {goals['per_second']:,.0f} steps a second: {fast} of {len(shown)}. "
        f"{goals['steps']:,} steps in at most {goals['hours']:g} hours: {soon} of {len(shown)}.",
        f"Until its program is ready, a warm start takes {min(warm):.0%} to {max(warm):.0%} of a cold one's CPU time.",
        f"Measured on {_distinct_text(figure['device'] for figure in shown)}, {threads}, {versions}, at commit "
        f"{_distinct_text(short(figure['commit']) for figure in figures)}; medians of "
        f"{_distinct_text(str(figure['repeats']) for figure in figures)} updates."
        + (f" Load of the machine: {min(loads):g} to {max(loads):g}." if loads else ""),
    ]
    changes = compared(figures)
    table = markdown(HEADER, [row(figure) for figure in shown])
    brought = f"\n{markdown(COMPARED, changes)}" if changes else ""
    return f"{table}\n" + "\n".join(lines) + f"\n{brought}"


def compared(figures: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of COMPARED: what each change that was measured brought, alone."""

    def find(size: tuple[int, int], precision: str = "fp32", devices: int | None = None) -> dict[str, Any] | None:
        cell = Cell(NAME, *size, precision, devices)
        return next((figure for figure in figures if cell.same(figure)), None)

    first, many, long = hackmatrix_grid.SIZES[0], hackmatrix_grid.SIZES[-2], hackmatrix_grid.SIZES[-1]
    pairs = [
        ("more environments", find(first), find(many)),
        ("longer rollouts", find(many), find(long)),
        ("all devices", find(first, devices=1), find(first)),
        *(("bf16", find(size), find(size, "bf16")) for size in (first, long)),
    ]
    rows = []
    for name, before, after in pairs:
        if before is not None and after is not None:
            wall, cpu = (after[key] / before[key] for key in ("per_second", "per_cpu_second"))
            rows.append([name, _figure_text(before), _figure_text(after), f"{wall:.2f}", f"{cpu:.2f}"])
    return rows


def _figure_text(figure: dict[str, Any]) -> str:
    config = figure["config"]
    return f"{config['num_envs']} x {config['num_steps']}, {config['precision']}, {figure['device']}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is to the left, the others to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def short(commit: str | None) -> str:
    """Seven letters of a commit, with its "+" where files differed."""
    return "unknown" if commit is None else commit[:7] + ("+" if commit.endswith("+") else "")


def _distinct_text(values: Any) -> str:
    return ", ".join(dict.fromkeys(values))


def placed(path: str, name: str, text: str) -> str:
    """New content of the file at `path`: `text` between its lines that name it; alone where there is no such file.

    Raises FlagError where the file has no such lines: nothing is overwritten that was not written here.
    """
    begin, end = BEGIN.format(name), END.format(name)
    marked = f"{begin}\n{text}{end}\n"
    if path == "-" or not Path(path).exists():
        return marked
    before, opened, rest = Path(path).read_text().partition(f"{begin}\n")
    _, closed, after = rest.partition(f"{end}\n")
    if not opened or not closed:
        raise FlagError(f"--page is {path}, which lacks the lines {begin} and {end}; add them where the table belongs")
    return before + marked + after
