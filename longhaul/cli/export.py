"""The command `export`: a run's policy as a program without Longhaul, or as a file of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longhaul.cli import flags
from longhaul.cli.evaluate import MEMBER, STEP
from longhaul.cli.flags import DEBUG, PATH, Flag, choice, optional
from longhaul.cli.run_flags import RUN, RUNS_DIR, folder_of
from longhaul.training import api, hub
from longhaul.training import export as exports

FLAGS = (
    RUN,
    Flag("to", choice(exports.KINDS), "jax", "a program that needs JAX, or an ONNX runtime, alone; or arrays by name"),
    Flag("out", optional(PATH), None, "the folder to write to", shown="export, in the run's folder"),
    STEP,
    MEMBER,
    RUNS_DIR,
    DEBUG,
)


def export(words: Sequence[str]) -> int:
    """`longhaul export RUN [--to jax|onnx|safetensors|npz] [--out FOLDER] [--step N]`."""
    about = "A run's policy as files that others use: its mode, checked in a process without Longhaul."
    parsed = flags.parse("export", about, {"": FLAGS}, words).values
    folder = folder_of(parsed, "longhaul export RUN --to jax", on_hub=True)
    policy = api.load(folder, member=parsed["member"], step=parsed["step"])
    for path in exports.save(
        policy, parsed["to"], Path(parsed["out"] or ("export" if hub.is_address(parsed["RUN"]) else folder / "export"))
    ):
        print(path)
    return 0
