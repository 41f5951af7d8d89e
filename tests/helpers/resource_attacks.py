"""Small inputs that once took all memory or all time, each with what reads it.

    python -m tests.helpers.resource_attacks NAME    reads one; CPU-seconds and peak megabytes on stdout, as JSON

Each was made by hand against a reader (`ATTACKS`). A test of each reader asks for one line that refuses it, and
`benchmarks/fuzz.py` starts from them.
"""

from __future__ import annotations

import json
import resource
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers import nuplan_files
from tests.helpers.log_files import make_log

LIMIT = 8 << 30
"""Bytes of address space in which an attack is measured: the machine outlives a reader without bounds."""


class Attack(NamedTuple):
    make: Callable[[Path], Path]  # writes the input into a folder; -> the path to be read
    read: Callable[[Path], Any]


def generated_columns(folder: Path) -> Path:
    """A nuPlan database of some kB, of whose table `log` each row has 30 MB, which the file computes."""
    path = nuplan_files.write(make_log(25, 4), folder)
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE log")
        db.execute("CREATE TABLE log (map_version TEXT, location TEXT AS (hex(zeroblob(15000000))))")
        db.executemany("INSERT INTO log (map_version) VALUES (?)", [("x",)] * 150)
        db.commit()
    return path


def added_defaults(folder: Path) -> Path:
    """The same by a default value of 60 kB, which no row stores, in 60,000 rows."""
    path = nuplan_files.write(make_log(25, 4), folder)
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE log")
        db.execute("CREATE TABLE log (map_version TEXT)")
        db.executemany("INSERT INTO log VALUES (?)", [("",)] * 60_000)
        db.execute(f"ALTER TABLE log ADD COLUMN location TEXT DEFAULT '{'x' * 60_000}'")
        db.commit()
    return path


def doubled_pickle(folder: Path) -> Path:
    """Pairs of one another, 300,000 deep: they stand for 2 ** 300,000 values, a number of 40 kB."""
    path = folder / "a.pkl"
    path.write_bytes(b"\x80\x04)" + b"2\x86" * 300_000 + b".")
    return path


def empty_sets(folder: Path) -> Path:
    """A list of two million sets, of one byte each in the file."""
    path = folder / "a.pkl"
    path.write_bytes(b"\x80\x04](" + b"\x8f" * 2_000_000 + b"e.")
    return path


def dictionary_text(folder: Path, rows: int = 250_000) -> Path:
    """A parquet whose rows have one text of 2,000 characters, stored once."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from longhaul.driving.datasets.argoverse import COLUMNS

    part, path = 250_000, folder / "a.parquet"
    numbers = dict.fromkeys(COLUMNS, pa.array([0] * part, pa.int8()))
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * part, pa.int32()), ["x" * 2000])
    table = pa.table(numbers | dict.fromkeys(("track_id", "object_type"), texts))
    with parquet.ParquetWriter(path, table.schema) as writer:
        for _ in range(rows // part):
            writer.write_table(table)
    return path


def empty_objects(folder: Path) -> Path:
    path = folder / "a.json"
    path.write_bytes(b'{"objects": [' + b"{}," * 33_000_000 + b"{}]}")
    return path


def nested_lists(folder: Path) -> Path:
    path = folder / "a.json"
    path.write_bytes(b'{"objects": ' + b"[" * 5_000_000)
    return path


def many_layers(folder: Path) -> Path:
    """A model of a few kB whose config.json says 100,000,000 layers."""
    import jax

    from longhaul.reasoning import huggingface
    from longhaul.reasoning.config import ModelConfig
    from longhaul.reasoning.transformer import init

    config = ModelConfig("llama", vocabulary=8, width=4, layers=1, heads=1, kv_heads=1, head_dim=4, hidden=4)
    huggingface.save(folder, config, init(jax.random.key(0), config))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 100_000_000}))
    return folder


def text(content: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "completion.txt"
        path.write_text(content)
        return path

    return make


def log(path: Path) -> Any:
    from longhaul.driving.datasets import readers

    return list(readers.read(path))


def model(folder: Path) -> Any:
    from longhaul.reasoning import huggingface

    return huggingface.load(folder)


def answer(path: Path) -> Any:
    from longhaul.reasoning import tasks

    return tasks.reading(path.read_text())


ATTACKS = {
    "generated-columns": Attack(generated_columns, log),
    "added-defaults": Attack(added_defaults, log),
    "doubled-pickle": Attack(doubled_pickle, log),
    "empty-sets": Attack(empty_sets, log),
    "dictionary-text": Attack(dictionary_text, log),
    "many-rows": Attack(partial(dictionary_text, rows=4_000_000), log),
    "empty-objects": Attack(empty_objects, log),
    "nested-lists": Attack(nested_lists, log),
    "many-layers": Attack(many_layers, model),
    "commas": Attack(text("," * 60_000), answer),
    "digits": Attack(text(f"#### {'1' * 60_000}x"), answer),
}


def main() -> None:
    attack = ATTACKS[sys.argv[1]]
    with tempfile.TemporaryDirectory() as folder:
        path = attack.make(Path(folder))
        size = path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.iterdir())
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, began = _peak(), time.process_time()
        try:
            outcome = f"read: {attack.read(path)!r:.60}"
        except (Exception, MemoryError) as error:
            outcome = f"{type(error).__name__}: {str(error).replace(folder, '')[:200]}"
        seconds = time.process_time() - began
    about = {"attack": sys.argv[1], "bytes": size, "seconds": round(seconds, 2), "megabytes": _peak() - before}
    print(json.dumps(about | {"outcome": outcome}))


def _peak() -> int:
    """Greatest memory of this process since it was last cleared, MB."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) >> 10


if __name__ == "__main__":
    main()
