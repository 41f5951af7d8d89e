"""A Run as flags: one for each of its fields, flat, with the recipe's values as defaults."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longhaul.algorithms import batch_scaling
from longhaul.algorithms.config import LOSSES, OPTIMISERS, REWARD_CLIPS, STORES, TITLES
from longhaul.cli import flags
from longhaul.cli.flags import DEBUG, FLOAT, INT, PATH, SWITCH, TEXT, Flag, FlagError, Kind, choice, optional
from longhaul.cli.meanings import HELP
from longhaul.config.run import PUBLISHED, TOPOLOGIES, Run
from longhaul.config.validate import check_topology
from longhaul.driving.sim import config
from longhaul.driving.sim.config import EVENTS
from longhaul.networks.config import ACTIVATIONS, INITS, PRECISIONS, REMATS, TORSOS
from longhaul.reasoning.config import CHAINS, FAMILIES, TASKS
from longhaul.runtime.errors import RunError
from longhaul.runtime.mesh_shape import MeshShape
from longhaul.telemetry import wandb
from longhaul.topologies.actor_learner.config import KINDS
from longhaul.topologies.inference_server.config import LANES
from longhaul.training.run_dir import called, load_run

CHOICES: dict[str, tuple[str, ...]] = {
    "topology": TOPOLOGIES,
    "actor-kind": KINDS,
    "lane": LANES,
    "scaling": batch_scaling.SCALINGS,
    "lr-rule": batch_scaling.LR_RULES,
    "traffic": config.TRAFFICS,
    "actions": config.ACTIONS,
    "control": tuple(config.CONTROLS),
    "expert": config.EXPERTS,
    "dynamics": config.DYNAMICS,
    "goal": config.GOALS,
    "crash": config.CRASHES,
    "terminations": EVENTS,
    "torso": TORSOS,
    "activation": ACTIVATIONS,
    "init": INITS,
    "optimiser": OPTIMISERS,
    "reward-clip": REWARD_CLIPS,
    "precision": PRECISIONS,
    "replay-precision": STORES,
    "remat": REMATS,
    "model-family": FAMILIES,
    "model-precision": PRECISIONS,
    "model-remat": REMATS,
    "task": TASKS,
    "loss": tuple(LOSSES),
    "gate-chains": CHAINS,
}

HIDDEN = ("recipe", "driver", "model", "vocabulary", "pad", "rope_scaling")
"""Fields that are no flag: the recipe is named before, who learns drives by the policy, --mesh says both sizes, a
tokeniser the vocabulary and what pads, and rope scaling is of models from elsewhere."""

SIDE_BY_SIDE = ("seeds", "sweep", "pbt-interval", "together")
"""Flags that make many runs of one."""

PREFIXES = {"gate": "gate", "model": "model", "weights": "reward"}
"""Of the flags of what lies within a field."""

AUTO = (
    *("mesh", "together", "actors", "threads", "bank-updates", "evaluation-episodes"),
    *("log-interval", "block", "base-batch"),
)
"""Flags whose None is decided from the rest."""

FREE = (
    *("actor-kind", "ray-address"),
    *("log-interval", "block", "save-interval-minutes", "save-interval", "keep", "keep-every", "rollbacks"),
    *("lane", "bind", "token-file", "tls-cert", "tls-key"),
    *("health", "health-entropy", "health-kl", "health-clip", "health-window", "health-solved"),
)
"""Flags that may differ when a run is gone on with: they change no number."""

CHANGEABLE = (
    *("num-envs", "num-steps", "mesh", "threads", "scaling", "lr-rule", "base-batch"),
    *("num-minibatches", "update-epochs", "lr", "anneal", "warmup", "gamma", "gae-lambda", "clip-eps", "clip-value"),
    *("vf-coef", "ent-coef", "ent-coef-final", "max-grad-norm", "normalise-advantage", "reward-scale", "kl-stop"),
    *("rms-decay", "rms-eps", "vtrace-lambda", "rho-clip", "c-clip", "reward-clip"),
    *("chunk", "accumulate", "precision", "remat"),
    *("tau", "target-entropy", "batch-size", "gradient-steps", "importance-exponent"),
    *("expert-share", "detach"),
    *("noise", "target-noise", "noise-clip", "actor-interval"),
    *("double", "epsilon", "epsilon-final", "exploration", "q-lambda"),
    *("clip-low", "clip-high", "lr-taught", "lr-scaffold"),
)
"""Flags that may differ, too, and change what comes: how much is done at once and how it is learnt, not what."""

GROUPS = {
    "run": "The run.",
    "environment": "What it trains in.",
    "algorithm": "How it learns.",
    "saving": "What is kept, how often and where.",
    "health": "What a healthy run keeps to, at most or at least.",
}

SAVING = ("log_interval", "block", "save_interval_minutes", "save_interval", "keep", "keep_every", "rollbacks")

ALIASES = {"total-steps": ("total-timesteps",), "accumulate": ("micro-batches",)}
"""Other words for flags of a Run: those of PureJaxRL and of HackMatrix's own trainer, and what others call them."""

BARE = {"remat": ("full", "none")}
"""What --remat and --no-remat mean, alone: it was a switch once."""

RUNS_DIR = Flag(
    "runs-dir", PATH, "runs", "folder of all runs; a run's is NAME in it, and its checkpoints are in NAME/checkpoints",
    aliases=("checkpoint-dir",),
)  # fmt: skip

FOLDERS = (
    RUNS_DIR,
    Flag("run-name", TEXT, None, "name of the run's folder", shown="recipe and time"),
    Flag("run-suffix", TEXT, None, "added to recipe and time, where no run-name is given", shown=""),
    Flag(
        "resume", TEXT, None, "go on with this run (its name, folder or W&B id) to its end", shown="",
        aliases=("resume-run",),
    ),
)  # fmt: skip

TRACKING = (
    Flag("wandb", SWITCH, False, "send metrics to Weights & Biases, too; a run that goes on keeps to it"),
    Flag("project", TEXT, None, "of W&B", shown="WANDB_PROJECT, or the recipe"),
    Flag("entity", TEXT, None, "of W&B: a user or a team", shown="WANDB_ENTITY, or the user's own"),
    Flag(
        "wandb-mode", optional(choice(wandb.MODES)), None, "send now, write to a folder, or do nothing",
        shown="WANDB_MODE, or online where there are credentials, else offline",
    ),
)  # fmt: skip
"""How a run is tracked: no part of a Run, since no number depends on it."""

PUBLISHING = (
    Flag("publish", TEXT, (), "tcp:HOST:PORT, shm:NAME, a folder, or run: RUN/weights; a run that goes on keeps to it; "
         "none: stop", True, shown=""),
    Flag("publish-every", INT, 1, "updates from one version to the next"),
    Flag("publish-precision", choice(PUBLISHED), "as-is", "what parameters of fp32 are published in"),
    Flag("publish-token-file", optional(PATH), None, "a file with the token that receivers must know", shown=""),
    Flag("publish-anchor", INT, 1, "of versions in a folder each so manyth is whole, the others what changed"),
)  # fmt: skip
"""What a run publishes: likewise."""


class Setting(NamedTuple):
    """One field of a Run: its flag, and where it lies."""

    flag: Flag
    group: str
    path: tuple[str, ...]


def settings(run: Run) -> list[Setting]:
    """The flags of `run`, with its values as defaults."""
    return list(_settings(run, (), "run"))


def _settings(value: Any, path: tuple[str, ...], group: str) -> Iterator[Setting]:
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        inner, where = getattr(value, field.name), (*path, field.name)
        if field.name in HIDDEN and not dataclasses.is_dataclass(inner):
            continue
        if dataclasses.is_dataclass(inner):
            yield from _settings(inner, where, field.name if field.name in GROUPS else group)
            continue
        name = _name(where)
        inner = value.mesh if name == "mesh" and value.devices else inner
        shown = (
            "auto"
            if name in AUTO and inner is None
            else ""
            if inner in ((), None) and name in ("data", "recorded")
            else None
        )
        many, others = isinstance(inner, tuple) and name != "mesh", ALIASES.get(name, ())
        kind = _kind(name, hints[field.name])
        flag = Flag(name, kind, inner, HELP.get(name, ""), many, shown, others, BARE.get(name, ()))
        yield Setting(flag, "saving" if field.name in SAVING else group, where)


def _name(path: tuple[str, ...]) -> str:
    """The flag of the field at `path`."""
    name = path[-1].replace("_", "-")
    if name == "devices":
        return "mesh"
    if path[0] == "health":
        return "health" if name == "watch" else f"health-{name}"
    inner = [prefix for field, prefix in PREFIXES.items() if field in path[:-1]]
    return f"{inner[0]}-{name}" if inner else name


def _kind(name: str, hint: Any) -> Kind:
    if name == "mesh":
        return MESH
    if name in CHOICES:
        return choice(CHOICES[name])
    if name in ("data", "recorded", "token-file", "tls-cert", "tls-key"):
        return PATH if name in ("data", "recorded") else optional(PATH)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return optional(_kind(name, next(kind for kind in typing.get_args(hint) if kind is not type(None))))
    if typing.get_origin(hint) is tuple:
        return _kind(name, typing.get_args(hint)[0])
    return {int: INT, float: FLOAT, str: TEXT, bool: SWITCH}[hint]


def _mesh(word: str) -> MeshShape:
    """ "data=8,model=2" -> Shape(8, 2)."""
    axes = dict(part.split("=") for part in word.split(","))
    data, model = int(axes.pop("data", "1")), int(axes.pop("model", "1"))
    if axes or data < 1 or model < 1:
        raise ValueError(word)
    return MeshShape(data, model)


MESH = Kind("data=N", "data=N or data=N,model=M with N and M at least 1", _mesh)


def table(run: Run) -> dict[str, list[Flag]]:
    """All flags of `longhaul train RECIPE` by heading, as `flags.parse` takes them."""
    headings = GROUPS | {"algorithm": f"How it learns: {TITLES[type(run.algorithm)]}."}
    groups: dict[str, list[Flag]] = {f"{name}: {about}": [] for name, about in headings.items()}
    for setting in settings(run):
        groups[f"{setting.group}: {headings[setting.group]}"].append(setting.flag)
    groups[f"saving: {headings['saving']}"] += FOLDERS
    groups["publishing: the policy's versions, to whoever follows them (docs/sync.md)."] = list(PUBLISHING)
    groups["tracking: Weights & Biases, beside the run's own metrics.jsonl."] = list(TRACKING)
    groups[""] = [DEBUG]
    return groups


def apply(run: Run, values: Mapping[str, Any]) -> Run:
    """`run` with the values of some of its flags."""
    for setting in settings(run):
        if setting.flag.name not in values:
            continue
        value = values[setting.flag.name]
        if setting.flag.name == "mesh":
            run = dataclasses.replace(run, devices=value.data, model=value.model)
        else:
            run = _replace(run, setting.path, value)
    return run


def _replace(value: Any, path: tuple[str, ...], new: Any) -> Any:
    inner = _replace(getattr(value, path[0]), path[1:], new) if len(path) > 1 else new
    return dataclasses.replace(value, **{path[0]: inner})


def chosen(recipe: Run, parsed: flags.Parsed) -> Run:
    """The recipe's Run as the flags change it. Raises RunError where a flag would change nothing."""
    from longhaul.config.resolve import agents

    usual = {setting.flag.name: setting.flag.default for setting in settings(recipe)}
    base = recipe.num_envs * agents(recipe) * recipe.num_steps  # before --num-envs and the like change it
    recipe = dataclasses.replace(recipe, base_batch=recipe.base_batch or base)
    given = {name: parsed.values[name] for name in sorted(usual.keys() & parsed.given)}
    run = apply(recipe, given)
    check_topology(run, {name: value for name, value in given.items() if value != usual[name]})
    return run


def resumed(folder: Path, recipe: str, parsed: flags.Parsed) -> Run:
    """The Run of a folder that is gone on with. Raises RunError where a flag was given that says otherwise.

    What `FREE` and `CHANGEABLE` name is taken from the flags; what was not chosen then follows from it again.
    """
    from longhaul.training.checkpoint import resume

    stored = load_run(folder)
    if stored.recipe != recipe:
        raise RunError(
            f"run {folder.name} is of recipe {stored.recipe}, and {recipe} is asked for; "
            f"longhaul train {stored.recipe} --resume {called(folder)}"
        )
    if "run-name" in parsed.given:
        raise RunError(f"--run-name and --resume {folder.name} are both given; a run that goes on keeps its name")
    before = {setting.flag.name: setting.flag for setting in settings(stored)}
    free: dict[str, Any] = {}
    for name in sorted(parsed.given):
        value = parsed.values[name]
        if name in ("data", "recorded"):  # as `resolve` keeps them
            value = tuple(os.path.abspath(os.path.expanduser(path)) for path in value)
        if name in FREE or (name in CHANGEABLE and name in before):
            free[name] = value
        elif name in before and value != before[name].default:
            raise RunError(
                f"--{name} is {_said(value)}, and run {folder.name} has {_said(before[name].default)}; "
                f"leave --{name} out, or start a new run without --resume"
            )
        elif name not in before and name in HELP:
            raise FlagError(f"run {folder.name} has no --{name}; leave it out")
    if any(value != before[name].default for name, value in free.items() if name in CHANGEABLE):
        fields = frozenset("devices" if name == "mesh" else name.replace("-", "_") for name in free)
        stored = resume.reopened(stored, fields)
    run = apply(stored, free)
    check_topology(run, {name: value for name, value in free.items() if value != before[name].default})
    return run


def _said(value: Any) -> str:
    if isinstance(value, tuple) and not isinstance(value, MeshShape):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
