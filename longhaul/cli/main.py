"""The command `longhaul`: which command, and what its end means.

Exit codes: 0 done; 1 a run or check failed; 2 bad input, one line on stderr; 75 stopped by a signal after saving.
What is heavy is imported where it is needed, so that `longhaul --help` and `longhaul data inspect` start at once.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import longhaul
from longhaul.cli import flags, tables
from longhaul.cli.flags import DEBUG, FLOAT, INT, PATH, TEXT, Flag, FlagError, choice
from longhaul.runtime.launch.process import end_with_parent

COMMANDS = {
    "train": "train by a recipe, or go on with a run",
    "evaluate": "what a policy scores, by metric and scenario",
    "render": "a picture of a policy driving: .gif, .mp4, .html, .png",
    "data inspect": "what is in driving logs",
    "data convert": "driving logs to shards, compact and checked, to train on",
    "play": "HackMatrix in the terminal: play it, or watch an agent",
    "reason": "a language model's chains about a problem, their votes, the answer",
    "recipes": "the recipes of longhaul train",
    "envs": "the environments of longhaul train ppo --env NAME",
    "actor": "environments on this machine for a run's inference server on another",
    "launch": "a training run in several processes, here or on Ray, looked after: launch --hosts N -- train ...",
    "status": "how far a run is",
    "doctor": "whether a run is in good health, or a recipe fit for many devices",
    "scaling": "a grid of runs over model sizes and scenarios, and the law through it",
    "profile": "where the time of a recipe's updates goes, from a trace",
    "plan": "time, cost, memory of a run on 1 to 1,024 devices",
    "sync plan": "what an update of a large model's parameters costs, stage by stage",
    "sync serve": "versions of parameters, from a folder or another server, to any number of receivers",
    "sync pull": "the newest version of who serves, as safetensors files",
    "sync status": "what a server of parameters has, and who follows it",
    "sync bench": "how long a version takes from one process to others, by stages, beside the machine's limits",
    "bench": "a benchmark by its name, one JSON object per figure",
}

ENTRIES = {
    "train": ("train", "train"),
    "evaluate": ("evaluate", "evaluate"),
    "render": ("evaluate", "render"),
    "play": ("play.command", "play"),
    "reason": ("reason", "reason"),
    "recipes": ("list", "show_recipes"),
    "envs": ("list", "show_envs"),
    "status": ("status", "status"),
    "doctor": ("doctor", "doctor"),
    "scaling": ("scaling", "scaling"),
    "profile": ("profile", "profile"),
    "plan": ("plan", "command"),
}
"""Command -> (module of `longhaul.cli`, function in it)."""

FLAGS = ("--help", "--version", "--debug")

FAILED, BAD_INPUT = 1, 2

INTERRUPTED = "interrupted; nothing was saved"

LONGEST = 600
"""Characters of an error's line."""


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command; -> its exit code. `words` default to those of the process."""
    words = list(sys.argv[1:] if words is None else words)
    end_with_parent()  # before what is heavy is imported, which takes a while
    debug = "--debug" in words
    # Before anything loads it: its threads gain nothing here and cost seconds where cores are busy, and the last bits
    # of initial weights would depend on their number.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # names in files may hold what a terminal's encoding has not
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # tyro's, after a help
        return end.code if isinstance(end.code, int) else 0
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except KeyboardInterrupt:
        return _say(INTERRUPTED, FAILED)
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        return _say(_line(error), BAD_INPUT if isinstance(error, (ValueError, OSError)) else FAILED)


def _say(line: str, code: int) -> int:
    print(f"longhaul: error: {line}", file=sys.stderr, flush=True)
    return code


def _line(error: Exception) -> str:
    """An error as one line, without what could control a terminal."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        text = "the disk is full; make room, then try again or --resume the run" if full else error.strerror
        text = text if error.filename is None else f"{error.filename}: {text}"
    elif not isinstance(error, (ValueError, OSError)):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    text = tables.clean(" ".join(text.split())) or type(error).__name__
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."


def _run(words: list[str]) -> int:
    rest = [word for word in words if word != "--debug"]
    if not rest or rest[0] in ("-h", "--help", "help"):
        _help()
        return 0 if rest else BAD_INPUT
    if rest[0] == "--version":
        print(f"longhaul {longhaul.__version__}")
        return 0
    if rest[0] == "data":
        return _data(rest[1:])
    if rest[0] == "sync":
        from longhaul.cli import sync_plan

        return sync_plan.sync(rest[1:])
    command, names = rest[0], [name for name in COMMANDS if " " not in name]
    if command not in names:
        what, there = ("flag", list(FLAGS)) if command.startswith("-") else ("command", [*names, "data", "sync"])
        otherwise = f"there are {', '.join(FLAGS if what == 'flag' else COMMANDS)}"
        raise FlagError(f"longhaul has no {what} {command!r}; {flags.suggestion(command, there, otherwise)}")
    if command == "bench":
        return _bench(rest[1:])
    if command == "actor":
        from longhaul.cli import actor

        with _ending_at_once():
            return actor.actor(rest[1:])
    if command == "launch":
        from longhaul.cli import launch

        return launch.launch(rest[1:])
    with _ending_at_once():
        return _entry(command)(rest[1:])


def _entry(command: str) -> Callable[[Sequence[str]], int]:
    """Function of a command, from its own module alone: most modules import JAX, which takes seconds."""
    module, name = ENTRIES[command]
    function: Callable[[Sequence[str]], int] = getattr(importlib.import_module(f"longhaul.cli.{module}"), name)
    return function


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Within it Ctrl-C ends the process where `training` does not listen: JAX swallows some KeyboardInterrupts."""
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: os._exit(_say(INTERRUPTED, FAILED)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _help() -> None:
    print("usage: longhaul COMMAND [...]\n")
    print("Reinforcement learning for billions of environment steps, end to end on the device.\n")
    tables.listing((f"  {name}", line) for name, line in COMMANDS.items())
    print(
        "\nlonghaul COMMAND --help says more; --debug shows the traceback of an error; --version."
        "\nExit codes: 0 done, 1 failed, 2 bad input, 75 stopped by a signal after saving."
    )


DATA_USAGE = (
    "longhaul data inspect PATH... [--json FILE] [--picture FILE] [--pictures FOLDER], longhaul data convert SRC... OUT"
)


def _data(words: Sequence[str]) -> int:
    """`longhaul data inspect` and `longhaul data convert`."""
    if words and words[0] in ("inspect", "convert"):
        return {"inspect": _inspect, "convert": _convert}[words[0]](words[1:])
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {DATA_USAGE.replace(', ', chr(10) + '       ')}")
        return 0
    given = f"longhaul data has no command {words[0]!r}" if words else "name what to do with the data"
    raise FlagError(f"{given}; there are {DATA_USAGE}")


def _convert(words: Sequence[str]) -> int:
    """`longhaul data convert SRC... OUT`; files with errors are counted and listed, with exit code 1."""
    from longhaul.driving.scenario.compile import ROUTES
    from longhaul.driving.scenario.scenario import CONTROLS

    paths = Flag("PATH", PATH, (), "files, folders, globs; the last is the folder to write", many=True, shown="")
    workers = Flag("workers", INT, None, "processes", shown="one a core")
    per_shard = Flag("per_shard", INT, 256, "scenarios of a shard")
    agents = Flag("agents", INT, 1, "controlled agents of a scenario, at most")
    horizon = Flag("horizon", INT, None, "most steps of a scenario", shown="to the log's end")
    about = "Packs driving logs into shards to train on: compact and checked. Goes on where it was stopped."
    control = Flag("control", flags.choice(tuple(CONTROLS)), "vehicles", "whom they may be: vehicles, or all that move")
    routes = Flag("routes", flags.choice(ROUTES), "log", "along what routes lead: the logged ways, or lanes")
    sizes = [workers, per_shard, agents, horizon, control, routes]
    parsed = flags.parse("data convert", about, {"": [paths, *sizes, DEBUG]}, words).values
    if len(parsed["PATH"]) < 2:
        raise FlagError("from where to where? longhaul data convert SRC... OUT")

    from longhaul.driving.shards.convert import Progress, convert

    def show(now: Progress) -> None:
        print(f"{now.files:,} of {now.of:,} files, {now.scenarios:,} scenarios", file=sys.stderr, flush=True)

    *given, out = parsed["PATH"]
    sizes_given = {name: parsed[name] for name in ("per_shard", "agents", "horizon", "control", "routes")}
    count = os.cpu_count() or 1 if parsed["workers"] is None else parsed["workers"]
    report = convert(given, Path(out), workers=count, progress=show, **sizes_given)
    print(f"{out}: {report.scenarios:,} scenarios in {len(report.shards)} shards, {report.bytes:,} bytes")
    for path, message in report.errors:
        _say(tables.clean(f"{path}: {message}" if path not in message else message), FAILED)
    return FAILED if report.errors else 0


def _inspect(words: Sequence[str]) -> int:
    """`longhaul data inspect PATH... [--json FILE] [--picture FILE] [--pictures FOLDER]`."""
    paths = Flag("PATH", PATH, (), "files, folders, globs", many=True, shown="")
    out = Flag("json", PATH, None, "write the counts and ranges to this file; - is stdout", shown="")
    one = Flag("picture", PATH, None, "draw the first scenario to this .png, .svg or .html", shown="")
    each = Flag("pictures", PATH, None, "draw every scenario to this folder, as .png", shown="")
    about = "Counts and ranges of what is in driving logs, as they have it."
    parsed = flags.parse("data inspect", about, {"": [paths, out, one, each, DEBUG]}, words).values
    if not parsed["PATH"]:
        raise FlagError("which logs? longhaul data inspect PATH... [--json FILE] [--picture FILE]")
    tables.check_json(parsed["json"])

    from longhaul.driving import inspect_logs
    from longhaul.driving.datasets import readers

    readers.expand(parsed["PATH"])  # a path that means nothing is bad input; a bad file is a finding
    report = inspect_logs.inspect(parsed["PATH"], _drawing(parsed["picture"], parsed["pictures"]))
    if parsed["json"] != "-":
        _print_files(report["files"])
    if parsed["json"] is not None:
        tables.write_json(parsed["json"], report)
    for file in report["files"]:
        if file["error"] is not None:
            _say(tables.clean(file["error"]), FAILED)
    return FAILED if report["errors"] else 0


def _drawing(one: str | None, folder: str | None) -> Callable[[Path, Any], None] | None:
    """What draws each scenario that is inspected; None where no picture is asked for."""
    if one is None and folder is None:
        return None

    from longhaul.driving.render import log_picture

    if one is not None and Path(one).suffix.lower() not in log_picture.SUFFIXES:
        raise FlagError(f"--picture {one}: name a file that ends in {', '.join(log_picture.SUFFIXES)}")
    drawn: set[str] = set()

    def draw(_: Path, shown: Any) -> None:
        if one is not None and not drawn:
            log_picture.save(shown, Path(one))
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in shown.id)[:100]
        while name in drawn:
            name += "-again"
        drawn.add(name)
        if folder is not None:
            log_picture.save(shown, Path(folder) / f"{name}.png")

    return draw


def _print_files(files: Sequence[dict[str, Any]]) -> None:
    """A row a scenario, a table a file; then a table of ranges."""
    for file in files:
        scenarios = file["scenarios"]
        what = f"{len(scenarios)} scenario{'' if len(scenarios) == 1 else 's'}"
        print(tables.clean(f"{file['path']}: {file['format'] or 'unknown format'}, {what}"))
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


def _bench(words: Sequence[str]) -> int:
    """`longhaul bench NAME [--json FILE]`."""
    if words and words[0] == "hackmatrix":
        from longhaul.cli import bench_hackmatrix

        return bench_hackmatrix.run(words[1:])
    name = Flag("NAME", TEXT, None, "which; without: lists them", shown="")
    out = Flag("json", PATH, None, "write the figures as a list to this file, too", shown="")
    driving = [
        Flag("data", PATH, (), "of driving-step, driving-env: the logs; without: generated scenarios", True, ""),
        Flag("objects", INT, (), "likewise: objects at most, a figure for each; a power of two", True, "32, 64"),
        Flag("batch", INT, None, "likewise: worlds; of replay and sac: steps of a sample", shown="256"),
        Flag("devices", INT, None, "likewise: devices", shown="as a training run"),
        Flag("agents", INT, (), "of driving-env: controlled agents at most, a figure for each", True, "1"),
        Flag("road_points", INT, None, "of driving-env: pieces of road that an agent sees", shown="0"),
        Flag("num_envs", INT, None, "of cartpole, driving-train, hackmatrix-env, hackmatrix-ppo: worlds", shown="256"),
        Flag("num_steps", INT, None, "of all but those of cartpole and driving-train: steps of each", shown="its own"),
        Flag("precision", choice(("fp32", "bf16")), None, "of hackmatrix-ppo, sac", shown="fp32"),
        Flag("env", TEXT, (), "of actors, central and sac: environments, a figure for each", True, "its own"),
        Flag("actors", INT, None, "likewise: how many", shown="2"),
        Flag("worlds", INT, None, "of central: worlds of each group of an actor", shown="256"),
        Flag("slots", INT, None, "likewise: groups of an actor", shown="2"),
        Flag("actor_kind", choice(("process", "thread")), None, "of actors", shown="process"),
        Flag("staleness", INT, None, "of actors", shown="1"),
        Flag("streams", INT, None, "of transport: slots of the client", shown="16"),
        Flag("model", TEXT, None, "of sync: whose parameters, by its name", shown="qwen3-0.6b"),
        Flag("receivers", INT, None, "of sync: processes", shown="2"),
        Flag(
            "lane",
            choice(("shm", "grpc", "tcp", "folder")),
            (),
            "a figure for each; of central: shm, grpc; of sync: shm, tcp, folder",
            True,
            "the first two",
        ),
        Flag("rules", choice(("jax", "canonical")), None, "of hackmatrix-env", shown="jax"),
        Flag("columns", INT, None, "of replay: rows are so wide", shown="64"),
        Flag("size", INT, None, "of replay, and of sac in --env: steps that it holds", shown="1000000, 65536"),
        Flag("fill", FLOAT, None, "of sac in --env: the share of its replay that is full", shown="0"),
        Flag("gradient_steps", INT, (), "likewise: steps of the optimiser, a figure for each", True, "1, 16"),
        Flag(
            "peer_python",
            PATH,
            None,
            "the Python of an environment with flashbax (of replay), Brax (of sac) or transformers (of reasoning)",
            shown="",
        ),
    ]
    groups = {"": [name, out, DEBUG], "sizes": driving}
    about = "Measures; one JSON object per figure. longhaul bench hackmatrix has flags of its own: --grid --num-envs "
    about += "--num-steps --precision --devices --repeats --json --page; see longhaul bench hackmatrix --help."
    parsed = flags.parse("bench", about, groups, words).values
    tables.check_json(parsed["json"])

    from longhaul.bench import harness

    if parsed["NAME"] is None:
        tables.listing(harness.NAMES.items())
        return 0
    if parsed["NAME"] not in harness.NAMES:
        hint = flags.suggestion(parsed["NAME"], list(harness.NAMES), f"there are {', '.join(harness.NAMES)}")
        raise FlagError(f"no benchmark is named {parsed['NAME']!r}; {hint}")
    sizes = {f.name: parsed[f.name] for f in driving if parsed[f.name] not in (None, (), [])}
    compared = ("replay", "sac", "reasoning")
    known = harness.sizes(parsed["NAME"]) | ({"peer_python"} if parsed["NAME"] in compared else set())
    unknown = [name for name in sizes if name not in known]
    if unknown:
        raise FlagError(f"{parsed['NAME']} has no --{unknown[0].replace('_', '-')}; see longhaul bench --help")
    figures = []
    for figure in harness.run(parsed["NAME"], **sizes):
        figures.append(figure)
        tables.write_line(figure)
    if parsed["json"] not in (None, "-"):
        tables.write_json(parsed["json"], figures)
    return 0
