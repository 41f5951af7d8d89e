"""The command `play`: HackMatrix in the terminal, by hand or by an agent.

Single keys and a screen of its own where stdin and stdout are a terminal; elsewhere a word a line, and plain text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.cli import flags, tables
from longhaul.cli.flags import ALONE, DEBUG, FLOAT, INT, OUTPUT, PATH, TEXT, Flag, FlagError, choice
from longhaul.cli.play import console, games, terminal
from longhaul.cli.play.console import Look
from longhaul.cli.play.games import Agent, Record
from longhaul.cli.run_flags import RUNS_DIR
from longhaul.config.resolve import named
from longhaul.config.run import MOST, Named
from longhaul.envs import registry
from longhaul.envs.hackmatrix import reward, screen
from longhaul.envs.hackmatrix import state as w
from longhaul.runtime import files
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.errors import RunError
from longhaul.telemetry.screen import is_terminal
from longhaul.training import legacy_params, run_dir
from longhaul.training.checkpoint.resume import restore_policy
from longhaul.types import Environment

RULES = {"jax": "hackmatrix", "canonical": "hackmatrix-canonical"}
"""Environments of the registry."""

GAMES = tuple(RULES.values())

PLAYED = (*GAMES, "hackmatrix-fixed")
"""Environments whose runs are watched."""

SHOW = ("auto", "boards", "steps", "table")


def play(argv: Sequence[str]) -> int:
    """`longhaul play hackmatrix [--run RUN | --params FILE | --latest] [--rules ...] [--json FILE] ...`."""
    about = "HackMatrix in the terminal: play it, or watch an agent. In the game, ? shows the keys."
    parsed = flags.parse("play", about, _flags(), argv)
    values = parsed.values
    _check(values)
    name, environment, agent = _game_and_agent(values, parsed.given)
    records = _play_by_hand(values, environment) if agent is None else _play_by_agent(values, environment, agent)
    tables.report(values["json"], _report(name, values, agent, records), lambda: _print(records))
    return 0


def _flags() -> dict[str, list[Flag]]:
    agent = [
        Flag("run", TEXT, None, "watch the newest policy of this run, its name or folder"),
        Flag("latest", ALONE, False, "watch the newest policy of all runs of the game"),
        Flag("params", PATH, None, "watch a params_STEP.npz of the game's own trainer, or a folder's newest"),
        Flag("episodes", INT, 3, "games to watch", least=1, most=MOST),
        Flag("greedy", ALONE, False, "do what is likeliest, the default"),
        Flag("sample", ALONE, False, "draw from the policy instead of doing what is likeliest"),
        Flag("max-steps", INT, 1000, "steps after which a game is cut", least=1, most=MOST),
        Flag("delay", FLOAT, 0.3, "seconds a step on a terminal", least=0.0, most=60.0),
        Flag("show", choice(SHOW), "auto", "boards, a line a step, or the table alone; auto: boards on a terminal"),
    ]  # fmt: skip
    return {
        "": [
            Flag("GAME", choice(GAMES), None, "which game"),
            Flag("rules", choice(tuple(RULES)), None, "those of the game's own trainer, or of the game", shown="jax"),
            Flag("fixes", TEXT, (), "defects of the rules to put right, by name", many=True),
            Flag("seed", INT, 0, "boards and chance come from it, and from the game's number", least=0, most=MOST),
            Flag("reveal", ALONE, False, "show cryptogs that the player does not see"),
            Flag("json", OUTPUT, None, "write what was played to this file; - is stdout"),
            RUNS_DIR,
            DEBUG,
        ],
        "agent: Who plays, if not you.": agent,
    }


def _check(values: dict[str, Any]) -> None:
    """Raises FlagError for flags that mean nothing, before work is done."""
    if values["GAME"] is None:
        raise FlagError("which game? longhaul play hackmatrix [--run RUN | --params FILE | --latest]")
    for pair in (("run", "params"), ("run", "latest"), ("params", "latest"), ("greedy", "sample")):
        if all(values[name] for name in pair):
            raise FlagError(f"--{pair[0]} and --{pair[1]} are both given; leave one out")
    if values["rules"] is not None and values["GAME"] not in ("hackmatrix", RULES[values["rules"]]):
        raise FlagError(f"--rules is {values['rules']}, and {values['GAME']} has others; leave one out")


# ------------------------------------------------------------------------------------------------------- who plays what


def _game_and_agent(values: dict[str, Any], explicit: frozenset[str]) -> tuple[str, Environment, Agent | None]:
    """The game with its name, and the agent if one plays it."""
    name = RULES[values["rules"]] if values["rules"] is not None else values["GAME"]
    if values["run"] is not None or values["latest"]:
        runs_dir = Path(values["runs-dir"])
        folder = latest(runs_dir) if values["latest"] else run_dir.find_folder(runs_dir, values["run"])
        _check_run(folder)
        run, policy, _ = restore_policy(folder)
        assert isinstance(run.environment, Named)
        agent = Agent(folder.name, run.algorithm, policy)
        if explicit & {"rules", "fixes"} or name != "hackmatrix":
            return name, _game(name, values, values["max-steps"]), agent
        return run.environment.env, named(run.environment), agent
    prepare_devices(1)
    if values["params"] is None:
        return name, _game(name, values, None), None
    environment = _game(name, values, values["max-steps"])
    path = legacy_params.find(Path(values["params"]))
    return name, environment, Agent(path.name, *legacy_params.load(path, environment.spec))


def _game(name: str, values: dict[str, Any], max_steps: int | None) -> Environment:
    fixes = {"fixes": tuple(values["fixes"])} if values["fixes"] else {}
    return registry.make(name, max_steps=max_steps, **fixes)


def _check_run(folder: Path) -> None:
    """Raises RunError where a run is not of the game."""
    task = run_dir.load_run(folder).environment
    if not isinstance(task, Named) or task.env not in PLAYED:
        game = task.env if isinstance(task, Named) else getattr(task, "task", "driving")
        raise RunError(f"run {folder.name} is {game}, not hackmatrix; name another, or longhaul evaluate {folder.name}")


def latest(runs_dir: Path) -> Path:
    """The folder of the run of the game with the newest checkpoint. Raises RunError where there is none."""
    saved = sorted(
        (path for path in runs_dir.glob("*/checkpoints/*") if files.CHECKPOINT.fullmatch(path.name) and path.is_dir()),
        key=lambda path: path.stat().st_mtime, reverse=True,
    )  # fmt: skip
    for folder in dict.fromkeys(path.parent.parent for path in saved):
        try:
            _check_run(folder)
        except RunError:
            continue
        return folder
    raise RunError(f"no run of hackmatrix in {runs_dir} has a checkpoint; longhaul train hackmatrix makes one")


def _look(values: dict[str, Any], who: str) -> Look:
    style = screen.UNICODE if terminal.is_unicode(sys.stdout) else screen.ASCII
    rules = f", rules {values['rules']}" if values["rules"] else ""
    return Look(f"HackMatrix{who}, seed {values['seed']}{rules}", style, values["reveal"])


def _is_live() -> bool:
    return is_terminal(sys.stdin) and is_terminal(sys.stdout)


def _play_by_hand(values: dict[str, Any], environment: Environment) -> list[Record]:
    look = _look(values, "")
    live = _is_live()
    if live:
        tables.progress("compiling the game ...")
    game = games.game(environment, values["seed"])
    if live:
        with terminal.screen() as window:
            return console.by_keys(game, look, window)
    write = (lambda text: None) if values["json"] == "-" else _print_line  # stdout is for JSON
    return console.by_words(game, look, console.split(sys.stdin), write)


def _play_by_agent(values: dict[str, Any], environment: Environment, agent: Agent) -> list[Record]:
    greedy, episodes, limit = not values["sample"], values["episodes"], values["max-steps"]
    live = _is_live()
    show = values["show"]
    if show == "auto":
        show = "boards" if live else "table"
    if show == "table" or (values["json"] == "-" and not live):
        return list(games.table(environment, values["seed"], agent, episodes=episodes, greedy=greedy, limit=limit))
    if live:
        tables.progress("compiling the game ...")
    game = games.game(environment, values["seed"], agent, greedy=greedy)
    look = _look(values, f", {tables.clean(agent.label)}")
    if show == "boards" and live:
        with terminal.screen() as window:
            return console.watched(game, look, window, episodes=episodes, limit=limit, delay=values["delay"])
    return console.printed(game, look, episodes=episodes, limit=limit, boards=show == "boards", write=_print_line)


def _print_line(text: str) -> None:
    print(text, flush=True)


# ------------------------------------------------------------------------------------------------------------- results


def _print(records: Sequence[Record]) -> None:
    """A table of all games."""
    if not records:
        return
    columns = (
        ("return", [r.total for r in records]), ("length", [r.length for r in records]),
        ("highest stage", [r.stage for r in records]), ("score", [r.score for r in records]),
    )  # fmt: skip
    rows = [[name, *(tables.number(float(f(of))) for f in (np.mean, np.min, np.max))] for name, of in columns]
    count = f"{len(records)} game{'' if len(records) == 1 else 's'}"
    tables.table([count, "mean", "least", "most"], rows)
    print(", ".join(f"{count} {end}" for end, count in games.ends(records).items() if count))


def _report(name: str, values: dict[str, Any], agent: Agent | None, records: Sequence[Record]) -> dict[str, Any]:
    """Content of --json."""
    episodes = []
    for r in records:
        row = {"episode": r.episode, "return": round(r.total, 6), "length": r.length}
        parts = {part: round(value, 6) for part, value in zip(reward.PARTS, r.parts, strict=True)}
        outcome = {"stage": r.stage, "score": r.score, "end": r.end, "reward": parts}
        acted = {} if r.actions is None else {"actions": [w.NAMES[action] for action in r.actions]}
        episodes.append(row | outcome | acted)
    head = {"game": name, "fixes": list(values["fixes"]), "seed": values["seed"]}
    who = {"agent": None if agent is None else agent.label, "greedy": not values["sample"]}
    return {**head, **who, "summary": games.summary(records), "episodes": episodes}
