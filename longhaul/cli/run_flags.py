"""A Run as flags: one for each of its fields, flat, with the recipe's values as defaults."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from longhaul.algorithms import external
from longhaul.cli import flags
from longhaul.cli.flags import ALONE, DEBUG, FLOAT, INT, PATH, SWITCH, TEXT, Flag, FlagError, Kind, choice, optional
from longhaul.config import files, recipes
from longhaul.config.aliases import ALIASES
from longhaul.config.population import Population
from longhaul.config.run import PUBLISHED, Run
from longhaul.runtime import config_fields
from longhaul.runtime.config_fields import Leaf, Setting
from longhaul.runtime.devices import MeshShape
from longhaul.runtime.errors import RunError
from longhaul.runtime.files import expanded
from longhaul.telemetry import tracking
from longhaul.telemetry.trackers import wandb
from longhaul.training import hub
from longhaul.training.run_dir import called, find_folder, find_or_fetch, load_run, own_algorithm

GROUPS = {
    "run": "The run.",
    "environment": "What it trains in.",
    "algorithm": "How it learns.",
    "saving": "What is kept, how often and where.",
    "health": "What a healthy run keeps to, at most or at least.",
}

ALGORITHM = Flag(
    "algorithm", TEXT, None, "another algorithm than the recipe's, with flags of its own: by name, or module:name"
)

RUNS_DIR = Flag(
    "runs-dir", PATH, "runs", "folder of all runs; a run's is NAME in it, and its checkpoints are in NAME/checkpoints",
    aliases=ALIASES["runs-dir"],
)  # fmt: skip

CONFIG = Flag("config", optional(PATH), None, "settings by name: .yaml, .toml, .json or a run.json; flags go before it")

RUN = Flag("RUN", TEXT, None, "a run's name or folder")

FOLDERS = (
    RUNS_DIR,
    Flag("run-name", TEXT, None, "name of the run's folder", shown="recipe and time"),
    Flag("run-suffix", TEXT, None, "added to recipe and time, where no run-name is given"),
    Flag("resume", TEXT, None, "go on with this run (its name, folder or W&B id) to its end",
         aliases=ALIASES["resume"]),
)  # fmt: skip

TRACKING = (
    Flag("track", choice((*tracking.KINDS, "none")), (), "trackers that receive the metrics; a run that goes on keeps "
         "to them; none: stop", many=True),
    Flag("wandb", SWITCH, False, "send metrics to Weights & Biases, as --track wandb does"),
    Flag("project", TEXT, None, "of the trackers", shown="WANDB_PROJECT or the like, or the recipe"),
    Flag("entity", TEXT, None, "of W&B or SwanLab: a user or a team", shown="WANDB_ENTITY, or the user's own"),
    Flag(
        "wandb-mode", optional(choice(wandb.MODES)), None, "send now, write to a folder, or do nothing",
        shown="WANDB_MODE, or online where there are credentials, else offline",
    ),
    Flag("artifact", SWITCH, False, "send checkpoints to W&B, from which --resume ID goes on without the folder",
         shown="online"),
    Flag("rewind", ALONE, False, "with --resume: W&B drops what it has after the checkpoint"),
)  # fmt: skip
"""Flags of tracking: not part of a Run, since no number depends on them."""

PUBLISHING = (
    Flag("publish", TEXT, (), "tcp:HOST:PORT, shm:NAME, a folder, or run: RUN/weights; a run that goes on keeps to it; "
         "none: stop", many=True),
    Flag("publish-every", INT, 1, "updates from one version to the next"),
    Flag("publish-precision", choice(PUBLISHED), "as-is", "type in which fp32 parameters are published"),
    Flag("publish-token-file", optional(PATH), None, "a file with the token that receivers must know"),
    Flag("publish-anchor", INT, 1, "versions in a folder from one full snapshot to the next; the others are deltas"),
)  # fmt: skip
"""Flags of publication: not part of a Run either."""

SIDE_BY_SIDE = tuple(leaf.name.replace("_", "-") for leaf in config_fields.walk(Population()))
"""Flags that make many runs of one."""


def folder_of(values: Mapping[str, Any], usage: str, on_hub: bool = False) -> Path:
    """Folder of the run that RUN names; with `on_hub` also of a policy: hf:USER/NAME, pretrained."""
    if values["RUN"] is None:
        raise FlagError(f"which run? {usage}")
    if on_hub and hub.is_address(values["RUN"]):
        return hub.folder_of(values["RUN"])
    return find_folder(Path(values["runs-dir"]), values["RUN"])


def run_flags(run: Run) -> list[Flag]:
    """The flags of `run`, with its values as defaults."""
    return [flag_of(leaf, run) for leaf in config_fields.walk(run)]


def flag_of(leaf: Leaf, run: Run) -> Flag:
    """The flag of a described field."""
    described, value = leaf.setting, leaf.value
    if leaf.name == "mesh" and run.devices:
        value = run.mesh
    shown = "auto" if described.auto and value is None else "none" if value is None else None
    return Flag(
        name_of(leaf), MESH if leaf.name == "mesh" else _kind(described, _hints(leaf.owner)[leaf.path[-1]]), value,
        described.help, many=isinstance(leaf.value, tuple), shown=shown, aliases=ALIASES.get(name_of(leaf), ()),
        bare=described.bare,
    )  # fmt: skip


def name_of(leaf: Leaf) -> str:
    return leaf.name.replace("_", "-")


_hints = cache(typing.get_type_hints)


def _kind(described: Setting, hint: Any) -> Kind:
    """Kind of the values of a field, by its annotation."""
    if described.choices:
        return choice(described.choices, described.own)
    inner = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if typing.get_origin(hint) is types.UnionType:
        return optional(_kind(described, inner[0]))
    if typing.get_origin(hint) is tuple:
        return _kind(described, inner[0])
    return PATH if described.path else {int: INT, float: FLOAT, str: TEXT, bool: SWITCH}[hint]


def _mesh(word: str) -> MeshShape:
    """ "data=8,model=2" -> Shape(8, 2)."""
    axes = dict(part.split("=") for part in word.split(","))
    data, model = int(axes.pop("data", "1")), int(axes.pop("model", "1"))
    if axes or data < 1 or model < 1:
        raise ValueError(word)
    return MeshShape(data, model)


MESH = Kind("data=N", "data=N or data=N,model=M with N and M at least 1", _mesh)

MATTER = (
    *("env", "data", "task", "questions", "model-folder", "recorded"),
    *("total-steps", "num-envs", "num-steps", "seed", "lr", "gamma", "ent-coef"),
    *("batch-size", "replay-size", "gradient-steps", "num-minibatches", "update-epochs", "group", "temperature"),
    *("torso", "hidden-dim", "scenarios", "agents", "traffic", "topology", "actors", "staleness"),
    *("run-name", "runs-dir", "resume", "config", "dry-run", "track", "seeds", "mesh", "init-from"),
    *("evaluation-episodes", "precision", "debug"),
)
"""Flags that matter, the most important first: the help of a recipe has the first `FEW` of those that it has."""

FEW = 20


def matter(flags: Mapping[str, Sequence[Flag]], run: Run) -> list[str]:
    """Names of the flags that matter for a recipe."""
    names = {flag.name for group in flags.values() for flag in group}
    if run.topology == "fused":
        names -= {"actors", "staleness"}
    return [name for name in MATTER if name in names][:FEW]


def table(run: Run) -> dict[str, list[Flag]]:
    """All flags of `longhaul train RECIPE` by heading, as `flags.parse` takes them."""
    headings = GROUPS | {"algorithm": f"How it learns: {external.title(run.algorithm)}."}
    groups: dict[str, list[Flag]] = {f"{name}: {about}": [] for name, about in headings.items()}
    groups[f"algorithm: {headings['algorithm']}"].append(ALGORITHM._replace(default=external.name_of(run.algorithm)))
    own = {name_of(leaf) for leaf in config_fields.walk(run)}
    for leaf in config_fields.walk(run):
        group = leaf.setting.group or (leaf.path[0] if leaf.path[0] in GROUPS else "run")
        flag = flag_of(leaf, run)
        flag = flag._replace(aliases=tuple(name for name in flag.aliases if name not in own))
        if flag.name == "env" and run.recipe in recipes.NO_ENV:
            flag = flag._replace(shown="needed")
        groups[f"{group}: {headings[group]}"].append(flag)
    groups[f"saving: {headings['saving']}"] += FOLDERS
    groups["publishing: the policy's versions, to whoever follows them (docs/sync.md)."] = list(PUBLISHING)
    groups["tracking: W&B, MLflow, SwanLab, Trackio, beside the run's own metrics.jsonl (docs/tracking.md)."] = list(
        TRACKING
    )
    groups[""] = [DEBUG]
    return groups


def of_recipe(command: str, about: str, own: Sequence[Flag], argv: Sequence[str]) -> tuple[Run, flags.Parsed]:
    """The recipe that `argv` begins with, and its flags: the command's own, and all of `longhaul train`."""
    if not argv or argv[0].startswith("-"):
        if argv and argv[0] in ("-h", "--help"):
            flags.parse(f"{command} RECIPE", f"{about} All flags of longhaul train count, too.", {"": own}, argv)
        raise FlagError(f"name a recipe first: longhaul {command} RECIPE; there are {', '.join(recipes.RECIPES)}")
    recipe = with_algorithm(recipes.recipe(argv[0]), argv)
    groups = table(recipe)
    groups[""] = [*own, *groups[""]]
    return recipe, flags.parse(f"{command} {recipe.recipe}", about, groups, argv[1:])


def with_algorithm(recipe: Run, argv: Sequence[str]) -> Run:
    """`recipe` with the algorithm that the words name by --algorithm, the file of --config, or the run of --resume.

    The words are not parsed yet, since its fields are flags.
    """
    name, path, run_id = (unparsed_value(argv, flag) for flag in ("algorithm", "config", "resume"))
    if name is None and path is not None:
        name = files.algorithm(files.load(expanded(path)))
    elif name is None and run_id is not None:
        where = unparsed_value(argv, "project"), unparsed_value(argv, "entity")
        runs_dir = expanded(unparsed_value(argv, "runs-dir") or RUNS_DIR.default)
        name = own_algorithm(find_or_fetch(runs_dir, run_id, recipe.recipe, *where))
    return recipe if name is None else recipes.with_algorithm(recipe, name)


def unparsed_value(argv: Sequence[str], name: str) -> str | None:
    """Value of a flag in words that are not parsed yet; None where it is not given."""
    last = None
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        written, equals, value = word.partition("=")
        if written.replace("_", "-") in (f"--{name}", *(f"--{alias}" for alias in ALIASES.get(name, ()))):
            last = value if equals else after
    return last or None


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of flags by the names of their settings."""
    return {name.replace("-", "_"): value for name, value in values.items()}


def chosen(recipe: Run, parsed: flags.Parsed) -> Run:
    """The recipe's Run as the flags change it. Raises RunError where a flag would change nothing."""
    from longhaul.config.resolve import changed

    return changed(recipe, given_settings(recipe, parsed))


def given_settings(recipe: Run, parsed: flags.Parsed) -> dict[str, Any]:
    """Settings that the words gave, and the file of --config before them, by the names of fields."""
    named = sorted({flag.name for flag in run_flags(recipe)} & parsed.given)
    path = parsed.values.get("config")
    stored = {} if path is None else files.read(files.load(Path(path)), recipe, Path(path))
    return stored | fields({name: parsed.values[name] for name in named})


def given_fields(run: Run, parsed: flags.Parsed) -> dict[str, Any]:
    """Settings of `run` that the words gave, by field, as JSON holds them."""
    settings = given_settings(run, parsed)
    return {name: str(value) if isinstance(value, MeshShape | Path) else value for name, value in settings.items()}


def resumed(folder: Path, recipe: Run, parsed: flags.Parsed) -> Run:
    """Run of a folder that is resumed. Raises RunError where a flag contradicts it."""
    from longhaul.training.checkpoint import resume

    stored = load_run(folder)
    if stored.recipe != recipe.recipe:
        raise RunError(
            f"run {folder.name} is of recipe {stored.recipe}, and {recipe.recipe} is asked for; "
            f"longhaul train {stored.recipe} --resume {called(folder)}"
        )
    if "algorithm" in parsed.given and type(recipe.algorithm) is not type(stored.algorithm):
        raise RunError(
            f"--algorithm is {parsed.values['algorithm']}, and run {folder.name} has "
            f"{external.name_of(stored.algorithm)}; leave --algorithm out, or start a new run without --resume"
        )
    if "run-name" in parsed.given:
        raise RunError(
            f"--run-name and --resume {folder.name} are both given; a run that goes on keeps its name: leave "
            "--run-name out"
        )
    own = parsed.given & {flag.name for flag in (*run_flags(recipe), *run_flags(stored))}
    return resume.continued(folder, stored, fields({name: parsed.values[name] for name in sorted(own)}))
