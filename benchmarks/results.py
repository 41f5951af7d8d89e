"""Common part of the scripts here: a parser of flags, and figures as JSON lines that say where they are from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longhaul.cli import tables
from longhaul.runtime.provenance import provenance


def parser(doc: str | None, *, file: bool = True) -> argparse.ArgumentParser:
    """Parser whose help is a module's docstring, with `--json` for `emit`."""
    flags = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if file:
        flags.add_argument("--json", type=Path, help="add the figures to this file, too, one a line")
    return flags


def emit(record: Mapping[str, Any], file: Path | None = None) -> None:
    """Print a figure, and add it to `file`: with versions, commit and the machine's load, where it lacks them."""
    about = provenance()
    origin = {"versions": about["versions"], "commit": about["commit"], "load": round(os.getloadavg()[0], 2)}
    figure = {**record, **{name: value for name, value in origin.items() if name not in record}}
    tables.write_line(figure)
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(figure) + "\n")
