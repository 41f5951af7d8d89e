"""Command `longhaul sync plan`: the cost of an update of a model's parameters between trainers and receivers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from longhaul.cli import flags, tables
from longhaul.cli import sync as sync_shell
from longhaul.cli.flags import ALONE, DEBUG, FLOAT, INT, OUTPUT, SWITCH, TEXT, Flag, FlagError, Kind, choice
from longhaul.weight_sync import cost_model, model_shapes
from longhaul.weight_sync.cost_model import Cost, Setting

ITEMSIZES = {"float32": 4.0, "bfloat16": 2.0, "bf16": 2.0, "float16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0}

UNITS = {
    "B/s": 1.0,
    "MB/s": 1e6,
    "GB/s": 1e9,
    "TB/s": 1e12,
    "Mb/s": 1e6 / 8,
    "Gb/s": 1e9 / 8,
    "Tb/s": 1e12 / 8,
}

ABOUT = "Cost of an update of a model's parameters, stage by stage, full and by deltas; from a model, not measured."


def _rate(word: str) -> float:
    """Bytes a second: 400Gb/s -> 5e10. A unit is required: links are sold in bits, memory in bytes."""
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([KMGT]?[Bb]/s)", word.strip())
    if found is None or found[2] not in UNITS:
        raise ValueError(word)
    return float(found[1]) * UNITS[found[2]]


def _receivers(word: str) -> tuple[int, int]:
    """(replicas, receivers of each): 16x8 -> (16, 8)."""
    replicas, _, each = word.lower().partition("x")
    return int(replicas), int(each or 1)


RATE = Kind("RATE", "a rate with its unit, as 400Gb/s or 50GB/s", _rate)
RECEIVERS = Kind("MxR", "replicas x receivers of each, as 16x16", _receivers)

FLAGS = [
    Flag("params", FLOAT, None, "number of parameters, as 1e12", shown=""),
    Flag("dtype", choice(tuple(ITEMSIZES)), "bf16", "dtype that is sent"),
    Flag("trainers", INT, 256, "accelerators that hold a shard each"),
    Flag("receivers", RECEIVERS, (16, 16), "replicas x accelerators that share one", shown="16x16"),
    Flag("nic", RATE, 50e9, "an accelerator's link, each direction", shown="400Gb/s"),
    Flag("efficiency", FLOAT, 0.9, "share of links that is reached"),
    Flag("pcie", RATE, 55e9, "between accelerator and host", shown="55GB/s"),
    Flag("hbm", RATE, 3350e9, "an accelerator's memory", shown="3350GB/s"),
    Flag("staged", SWITCH, False, "through the hosts' memory"),
    Flag("relay", SWITCH, True, "replicas pass buckets on where that is faster"),
    Flag("bucket-mb", FLOAT, 256.0, "megabytes of a receiver's bucket"),
    Flag("delta-ratio", FLOAT, 50.0, "dense bytes / bytes of a delta"),
    Flag("codec-share", FLOAT, 0.2, "share of memory bandwidth that encoding on accelerators reaches"),
    Flag("cores", INT, 16, "cores of a host, an accelerator"),
    Flag("core-encode", RATE, 1e9, "dense bytes that a core encodes a second", shown="1GB/s"),
    Flag("core-decode", RATE, 2e9, "dense bytes that a core decodes a second", shown="2GB/s"),
    Flag("check", ALONE, False, "measure runs on this machine, and print the model's error", shown=""),
    Flag("model", TEXT, "qwen3-0.6b", "with --check: the model whose parameters are sent, by its name"),
    Flag("json", OUTPUT, None, "write everything to this file; - is stdout", shown=""),
    DEBUG,
]


def sync(words: Sequence[str]) -> int:
    """The group of commands `longhaul sync`."""
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]](words[1:])
    usage = ", ".join(f"longhaul sync {name}" for name in COMMANDS)
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {usage.replace(', ', chr(10) + '       ')}")
        return 0
    given = f"longhaul sync has no command {words[0]!r}" if words else "a command is missing"
    raise FlagError(f"{given}; there are {usage}")


def plan(words: Sequence[str]) -> int:
    """`longhaul sync plan --params 1e12 --trainers 256 --receivers 16x16 --nic 400Gb/s [--json FILE]`."""
    values = flags.parse("sync plan", ABOUT, {"": FLAGS}, words).values
    if values["check"]:
        return check(values["model"], values["json"])
    if values["params"] is None:
        raise FlagError("--params is missing: longhaul sync plan --params 1e12")
    replicas, each = values["receivers"]
    setting = Setting(
        values["params"], ITEMSIZES[values["dtype"]], values["trainers"], replicas, each, values["nic"],
        values["efficiency"], values["pcie"], values["hbm"], values["staged"], values["relay"],
        values["bucket-mb"] * 1e6, values["delta-ratio"], values["codec-share"], values["cores"],
        values["core-encode"], values["core-decode"],
    )  # fmt: skip
    found = cost_model.costs(setting)
    tables.report(values["json"], as_json(setting, found), lambda: show(setting, found))
    return 0


def check(model: str, out: str | None) -> int:
    """`longhaul sync plan --check`: predictions of `cost_model.local` for this machine beside measured runs."""
    model_shapes.forms(model)
    from longhaul.bench import harness

    figures = list(harness.run("sync", model=model))
    if out is not None:
        tables.write_json(out, figures)
    if out != "-":
        rows = [
            [each["config"]["lane"], _seconds(each["wall_seconds"]),
             _seconds(each["model_seconds"]), f"{each['model_error']:+.0%}"]
            for each in figures
        ]  # fmt: skip
        tables.table(["lane", "seconds", "model", "error"], rows)
    return 0


def show(of: Setting, found: Sequence[Cost]) -> None:
    """Prints assumptions, the stages of each kind, and the sums."""
    tables.listing(cost_model.assumptions(of))
    for each in found:
        print()
        rows = [[term.name, _seconds(term.seconds), term.formula] for term in each.terms]
        tables.table([each.name, "seconds", "from"], rows)
    print()
    header = ["update", "seconds", "serial", "pause", "bound by"]
    rows = [[e.name, _seconds(e.pipelined), _seconds(e.serial), _seconds(e.pause), e.bottleneck] for e in found]
    tables.table(header, rows)


def as_json(of: Setting, found: Sequence[Cost]) -> dict[str, Any]:
    """Everything that `show` prints, as numbers."""
    return {
        "setting": dataclasses.asdict(of),
        "assumptions": dict(cost_model.assumptions(of)),
        "updates": [
            {
                "name": each.name, "seconds": each.pipelined, "serial_seconds": each.serial,
                "pause_seconds": each.pause, "bottleneck": each.bottleneck, "buckets": each.buckets,
                "terms": [term._asdict() for term in each.terms],
            }
            for each in found
        ],
    }  # fmt: skip


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100.0 else f"{value:,.0f}"


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"plan": plan, **sync_shell.COMMANDS}
