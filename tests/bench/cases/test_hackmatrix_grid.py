"""The table of HackMatrix's speeds: its cells, what is kept when it is interrupted, its page; one real cell, tiny."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from longhaul.bench.cases import hackmatrix_grid
from longhaul.bench.cases.hackmatrix_grid import Cell
from longhaul.cli import bench_hackmatrix, flags
from longhaul.cli.flags import FlagError
from longhaul.runtime.errors import RunError
from tests.bench.cases.test_training import FIELDS


def made(cell: Cell, *, per_second: float = 20_000.0, commit: str = "c0ffee1234") -> dict[str, Any]:
    """A figure as `speed.figure` has it."""
    devices = cell.devices or 2
    return {
        "name": "hackmatrix",
        "cell": cell._asdict(),
        "config": cell._asdict() | {"devices": devices, "threads": 2, "num_minibatches": 4, "update_epochs": 2},
        "per_second": per_second,
        "per_cpu_second": per_second / devices,
        "repeats": 5,
        "versions": {"jax": "1.2.3"},
        "commit": commit,
        "device": f"{devices} x cpu",
        "start": {
            "cold": {"seconds": 60.0, "cpu_seconds": 50.0},
            "warm": {"seconds": 12.0, "cpu_seconds": 11.0},
        },
        "warm_shares": {"seconds": 0.2, "cpu_seconds": 0.22, "ready_cpu_seconds": 0.15},
        "cpu_microseconds": 87.654,
        "peak_bytes": 3 << 29,
        "shares": {"environment": 0.05, "inference": 0.15, "learning": 0.8},
        "hours": 1e8 / per_second / 3600,
        "load": [0.5, 1.25],
        "goals": {"per_second": 18_000.0, "steps": 100_000_000, "hours": 2.0},
    }


def cells(*words: str) -> list[Cell]:
    return bench_hackmatrix.chosen(flags.parse("bench hackmatrix", "", {"": bench_hackmatrix.FLAGS}, words).values)


def test_the_grid_is_the_documents_and_flags_narrow_it() -> None:
    grid = cells("--grid")
    assert [(c.num_envs, c.num_steps) for c in grid[::2]] == list(hackmatrix_grid.SIZES)
    assert {c.precision for c in grid} == {"fp32", "bf16"} and len(grid) == 10
    assert cells() == [Cell("hackmatrix", 256, 128, "fp32")]
    assert cells("--precision", "bf16", "--num-envs", "64", "128", "--devices", "1") == [
        Cell("hackmatrix", n, 128, "bf16", 1) for n in (64, 128)
    ]
    assert [c.precision for c in cells("--grid", "--num-steps", "8")] == ["fp32", "bf16"]
    with pytest.raises(RunError, match="--num-envs is 3"):
        cells("--grid", "--num-envs", "3", "--devices", "2")


def test_measured_cells_are_kept_and_an_interruption_loses_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "grid.json")
    asked = cells("--grid")
    done: list[Cell] = []

    def interrupted(cell: Cell) -> dict[str, Any]:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(cell)
        return made(cell)

    with pytest.raises(KeyboardInterrupt):
        bench_hackmatrix.measured(asked, path, interrupted)
    assert [one["config"]["precision"] for one in json.loads(Path(path).read_text())] == ["fp32", "bf16", "fp32"]

    again: list[Cell] = []
    figures = bench_hackmatrix.measured(asked, path, lambda cell: (again.append(cell), made(cell))[1])
    assert done + again == asked, "each cell once"
    assert [cell.same(figure) for cell, figure in zip(asked, figures, strict=True)] == [True] * 10
    assert json.loads(Path(path).read_text()) == figures
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == figures[:3] + figures
    assert err.count("kept from") == 3 and "of commit c0ffee1234" in err


def test_a_figure_of_other_devices_is_another_cell() -> None:
    cell = Cell("hackmatrix", 256, 128, "fp32")
    figure = json.loads(json.dumps(made(cell)))
    assert cell.same(figure)
    for other in ({"devices": 2}, {"precision": "bf16"}, {"num_steps": 64}, {"num_envs": 512}, {"recipe": "cartpole"}):
        assert not cell._replace(**other).same(figure)


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"name": "sac", "config": {}}]', '[{"name": "hackmatrix"}]'])
def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(FlagError, match="holds no figures of bench hackmatrix; name another file"):
        bench_hackmatrix.measured(cells(), str(path), made)
    assert path.read_text() == text


def test_the_pages_table_has_the_figures() -> None:
    slow, fast = (made(Cell("hackmatrix", 256, 128, p), per_second=s) for p, s in (("bf16", 9e3), ("fp32", 21_234.5)))
    lines = bench_hackmatrix.page([slow, fast | {"commit": "c0ffee1234+"}]).splitlines()
    assert {line.count("|") for line in lines[:4]} == {11}
    assert lines[2] == (
        "| 256 x 128 | bf16 | 4 x 2 | 60.0 (50.0) | 12.0 (11.0) | 9,000 | 87.7 | 1.50 | 5 / 15 / 80 | 3.09 |"
    )
    assert lines[3].endswith("| 21,234 | 87.7 | 1.50 | 5 / 15 / 80 | 1.31 |")
    assert lines[5] == "At least 18,000 steps a second: 1 of 2. 100,000,000 steps in at most 2 hours: 1 of 2."
    assert lines[6] == "Until its program is ready, a warm start takes 15% to 15% of a cold one's CPU time."
    assert lines[7] == (
        "Measured on 2 x cpu, 2 threads, JAX 1.2.3, at commit c0ffee1, c0ffee1+; medians of 5 updates. "
        "Load of the machine: 0.5 to 1.25."
    )
    assert lines[8] == ""
    assert lines[11:] == ["| bf16 | 256 x 128, fp32, 2 x cpu | 256 x 128, bf16, 2 x cpu | 0.42 | 0.42 |"]


def test_each_change_is_compared_with_the_cell_that_lacks_it_alone() -> None:
    def fast(envs: int, steps: int, precision: str = "fp32", devices: int | None = None) -> dict[str, Any]:
        speed = envs * (2 if steps == 256 else 1) * (3 if precision == "bf16" else 1) / (devices or 0.5)
        return made(Cell("hackmatrix", envs, steps, precision, devices), per_second=float(speed))

    sizes = [fast(*size, precision) for size in hackmatrix_grid.SIZES for precision in hackmatrix_grid.PRECISIONS]
    rows = bench_hackmatrix.compared([*sizes, fast(256, 128, devices=1)])
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("more environments", "8.00", "8.00"),
        ("longer rollouts", "2.00", "2.00"),
        ("all devices", "2.00", "1.00"),
        ("bf16", "3.00", "3.00"),
        ("bf16", "3.00", "3.00"),
    ]
    assert bench_hackmatrix.compared(sizes[:1]) == []
    assert bench_hackmatrix.page([*sizes, fast(256, 128, devices=1)]).count("\n| 256 x 128 |") == 2, (
        "one device: compared"
    )


def test_the_page_is_written_between_its_marks_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    fresh = bench_hackmatrix.placed(str(page), "longhaul bench hackmatrix --grid", "| old |\n")
    page.write_text(f"# Before\n\n{fresh}\nAfter\n")
    assert bench_hackmatrix.placed(str(page), "longhaul bench hackmatrix --grid", "| new |\n") == (
        "# Before\n\n<!-- begin: longhaul bench hackmatrix --grid -->\n| new |\n"
        "<!-- end: longhaul bench hackmatrix --grid -->\n\nAfter\n"
    )
    page.write_text("# A page without a place\n")
    with pytest.raises(FlagError, match="lacks the lines <!-- begin: longhaul bench"):
        bench_hackmatrix.placed(str(page), "longhaul bench hackmatrix --grid", "| new |\n")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [((1.0, 3.0, 10.0), (0.1, 0.2, 0.7)), ((2.0, 1.0, 4.0), (0.5, 0.0, 0.5)), ((5.0, 6.0, 4.0), (5 / 6, 1 / 6, 0.0))],
)
def test_shares_sum_to_one_even_where_clocks_lie(seconds: Sequence[float], expected: Sequence[float]) -> None:
    found = hackmatrix_grid.shares(*seconds)
    assert list(found) == ["environment", "inference", "learning"]
    assert found == pytest.approx(dict(zip(found, expected, strict=True)))
    assert math.isclose(sum(found.values()), 1.0)


@pytest.mark.slow
def test_a_measured_cell_has_all_fields_and_they_agree() -> None:
    found = hackmatrix_grid.figure(Cell("cartpole", 4, 8, "fp32", 1))
    assert [field for field in found if field in FIELDS] == FIELDS
    assert json.loads(json.dumps(found)) == found
    assert found["steps"] == 32 and found["device"] == "1 x cpu"
    assert math.isclose(found["per_cpu_second"] * found["cpu_microseconds"], 1e6)
    assert math.isclose(sum(found["shares"].values()), 1.0)
    assert min(found["shares"].values()) >= 0.0
    assert 50 << 20 < found["peak_bytes"] < 4 << 30
    parts = ("assemble_seconds", "trace_seconds", "compile_seconds", "first_update_seconds")
    for start in found["start"].values():
        assert sum(start[part] for part in parts) < start["seconds"], "and the process's own start"
        assert 0.0 < start["ready_cpu_seconds"] <= start["cpu_seconds"]
    cold, warm = (found["start"][name]["compile_seconds"] for name in ("cold", "warm"))
    assert warm < cold, "read from the cache"


def test_too_few_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match="4 repeats; give 5 or more"):
        hackmatrix_grid.figure(Cell("cartpole", 4, 8, "fp32"), repeats=4)
    with pytest.raises(FlagError, match="--repeats is 4"):
        bench_hackmatrix.run(["--repeats", "4"])


def test_asking_for_cells_leaves_the_devices_to_the_workers() -> None:
    """A GPU's memory, and a TPU as a whole, belongs to the first process that starts JAX on it."""
    program = (
        "from longhaul.bench.cases import hackmatrix_grid as speed\nfrom longhaul.cli import bench_hackmatrix\n"
        "speed.cells('hackmatrix', speed.SIZES, speed.PRECISIONS, None)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
