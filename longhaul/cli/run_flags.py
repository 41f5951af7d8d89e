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

HELP: dict[str, str] = {
    "total-steps": "agent steps to train for",
    "num-envs": "worlds that are stepped at once",
    "num-steps": "steps of each world between two updates",
    "scaling": "minibatches and epochs that are not given: 4 and 4, or by the batch where it is above 32,768 steps",
    "lr-rule": "how lr follows from the batch, against that of --base-batch: not, linearly, by the square root",
    "base-batch": "agent steps of the update that lr is meant for",
    "warmup": "updates over which the learning rate rises to lr at the beginning",
    "seeds": "runs side by side in one program, each as if alone: with the seed, the next, ...",
    "sweep": "runs side by side, too: lr=1e-4..1e-3:8, lr=1e-4,3e-4; of several hyperparameters every combination",
    "pbt-interval": "updates after which a sweep's worst runs go on from its best ones, with values beside theirs",
    "together": "of the runs on a device, how many are computed at once; a matter of speed, and of last bits",
    "seed": "all random numbers come from it",
    "mesh": "devices: data=N of them share the worlds; with model=M each of these is M, which share the parameters",
    "deterministic": "the same parameters on 1, 2, 4 and 8 devices, bit for bit",
    "threads": "of the CPU, in all; the last bits of sums depend on it",
    "topology": "how acting and learning are laid out",
    "actors": "of the topologies actors and central: who share the worlds",
    "actor-kind": "actors in processes of their own, in threads of the learner's, or on the nodes of a Ray cluster",
    "ray-address": "HOST:PORT of the cluster of --actor-kind ray; auto: RAY_ADDRESS, or one here; local: a new one",
    "staleness": "updates that the weights which acted may be behind; 0: none, as fused; none: without bound",
    "pin": "act with exactly the weights that --staleness allows, so that the run can be repeated bit for bit",
    "lane": "of the topology central, how observations come: by shared memory, or by gRPC",
    "slots": "groups of worlds of an actor of the topology central: it steps one while the others wait for actions",
    "bind": "HOST:PORT at which --lane grpc waits for longhaul actor; none: the run begins its actors itself",
    "token-file": "a file with the token that actors must show",
    "tls-cert": "the server's certificate (PEM); needed beyond loopback, with its key and a token",
    "tls-key": "the certificate's key (PEM)",
    "evaluation-episodes": "episodes, or scenarios never trained in, of the evaluation at the end",
    "env": "the environment; longhaul envs lists them",
    "data": "driving logs to train in: files, folders, globs; without: generated scenarios",
    "bank": "scenarios of the shards in --data that are held at once, others after --bank-updates; none: all",
    "bank-updates": "updates in the same scenarios of the bank",
    "scenarios": "generated scenarios to train in",
    "objects": "most agents of a scenario, the nearest to the ego's path",
    "horizon": "most steps of a scenario; none: to the log's end",
    "agents": "controlled agents of a world",
    "least": "agents that a generated scenario must have to control, to be trained in",
    "expert": "whom imitation learns from: the log, or the Intelligent Driver Model along the route",
    "control": "whom the agents may be: vehicles, or all that move, cyclists and pedestrians too",
    "dynamics": "how agents move, and what actions are: acceleration and curvature, or wheels, moves, jerks",
    "goal": "who reaches its goal is removed, stops there, or begins anew",
    "crash": "who ends by another event is removed, or stops there",
    "conditioning": "drivers draw reward weights of their own, and see them",
    "traffic": "the others replay the log, react by the Intelligent Driver Model, or keep their velocity",
    "actions": "what the policy chooses from",
    "terminations": "events that end an episode",
    "neighbours": "nearest others that an agent sees",
    "waypoints": "points of the route ahead that it sees",
    "road-points": "pieces of road around an agent that it sees; 200 reach about 60 m",
    "observation-noise": "deviations of others' position (m), heading (rad) and velocity (m/s) as an agent sees them",
    "observation-mask": "chance that an agent misses one of the others, or a piece of road, in a step",
    "view-range": "metres beyond which an agent sees neither others nor road; none: any",
    "view-angle": "radians of an agent's field of view, around straight ahead",
    "view-occlusion": "boxes hide who is behind them",
    "reward-progress": "for a metre along the route",
    "reward-collision": "for a collision",
    "reward-offroad": "for leaving the road",
    "reward-red-light": "for running a red light",
    "reward-goal": "for reaching the goal",
    "reward-discomfort": "for each exceeded limit of comfort, a step",
    "reward-haste": "for needing to brake hard, a step",
    "reward-lateral": "for a metre beside the route, a step",
    "reward-heading": "for 1 - cos of the angle to the route, a step",
    "recorded": "what to imitate: .npz files of observation and action, or folders of them; none: the expert shows it",
    "expert-share": "of the worlds that the expert drives; in the others the policy does, and he says what he would",
    "imitation": "weight of how unlikely SAC finds what an expert did (BC-SAC); 0: nobody is asked",
    "detach": "APG's gradient passes through what the policy does, and not through what it sees",
    "lr": "learning rate",
    "optimiser": "RMSProp, or Adam",
    "rms-decay": "share of its past that RMSProp's second moment keeps in a step",
    "rms-eps": "what RMSProp adds to its second moment, within the root",
    "momentum": "of RMSProp's steps",
    "anneal": "let the learning rate fall to 0 over the run; of GRPO and its kin to a tenth, at its end",
    "gamma": "discount of a step",
    "gae-lambda": "lambda of the advantage estimate",
    "q-lambda": "lambda of PQN's returns: 0 looks a step ahead, 1 to the rollout's end",
    "vtrace-lambda": "lambda of V-trace: below 1 its targets reach less far",
    "rho-clip": "most that the policy's ratio to the actor's may be in errors and gradients; none: any",
    "c-clip": "most that it may be in the trace; none: any",
    "num-minibatches": "minibatches of an epoch, which must divide a device's batch; none: by --scaling",
    "update-epochs": "passes over the batch of an update; none: by --scaling",
    "clip-eps": "how far the policy's ratio may move",
    "clip-value": "clip the value's loss, too",
    "vf-coef": "weight of the value's loss",
    "ent-coef": "weight of the entropy",
    "ent-coef-final": "what ent-coef goes to over the run; none: constant",
    "max-grad-norm": "longer gradients are cut to it",
    "adam-eps": "what Adam adds to the root of its second moment",
    "normalise-advantage": "advantages of a batch get mean 0 and deviation 1",
    "normalise-observation": "observations by running mean and deviation",
    "reward-scale": "factor on rewards for learning",
    "reward-clip": "rewards within -1 and 1, or 0.3 min(tanh r, 0) + 5 max(tanh r, 0)",
    "kl-stop": "end an update once approx_kl passed it",
    "torso": "network before the heads; deepset: neighbours without order; latent, wayformer, mtr: by attention",
    "hidden-dim": "width of a layer",
    "num-layers": "layers of the torso, or blocks of an encoder by attention",
    "model-size": "millions of parameters, 0.3 to 25, from which hidden-dim and num-layers follow; none: they count",
    "activation": "between layers of mlp and deepset",
    "shared": "actor and critic of mlp and deepset have one torso, without memory, too",
    "init": "first weights of mlp, deepset and heads; lecun: Flax's default",
    "memory": "width of the recurrent unit; 0: none",
    "chunk": "rows of a minibatch whose gradient is taken at once; a matter of speed; none: what suits the device",
    "accumulate": "pieces of a minibatch, at least, over which its gradient is summed: the same one, in less memory",
    "precision": "what the torso computes in; parameters and losses are fp32",
    "remat": "what of the torso is computed again for its gradient, in less memory: nothing, all, all but products",
    "tau": "how far target networks follow, a step of the optimiser",
    "n-step": "rewards that a target sums before it trusts a critic",
    "temperature": "weight of SAC's entropy; none: learnt. Of GRPO and its kin: at which completions are sampled",
    "target-entropy": "nats that SAC's temperature aims at; none: -1 a dimension, or half of what choices allow",
    "layer-norm": "layers are normalised, which PQN needs to be stable",
    "double": "DQN's target has the network choose, and its target network judge",
    "duelling": "the network of DQN or PQN has a value, and advantages about it",
    "epsilon": "share of random actions when learning begins",
    "epsilon-final": "what it goes to",
    "exploration": "share of the run over which it goes there",
    "noise": "deviation of what TD3 adds to actions, of which the range is -1 to 1",
    "target-noise": "and to its target's, for critics that are smooth in actions",
    "noise-clip": "most that is added to its target's",
    "actor-interval": "steps of the optimiser, of which TD3's actor and its targets join one",
    "task": "what problems are about; longhaul reason shows them",
    "fewest": "operations of a problem, or digits of a number; at most --most",
    "most": "likewise, at most",
    "held-out-fewest": "of problems held out, on which a run is evaluated",
    "problems": "to train on",
    "wave": "completions that are sampled together; a matter of speed",
    "questions": "of --task questions: a JSONL file with a question and an answer a line, in GSM8K's format",
    "held-out-questions": "another such file, to be evaluated on; none: questions of the first, held out there",
    "check": "how an answer is compared: numeric, exact, or package.module:function, (problem, completion) -> reward",
    "template": "what is around a question, where {question} stands for it",
    "loss": "how groups of completions are learnt from",
    "clip-low": "how far below 1 a ratio may be; none: the loss's own",
    "clip-high": "how far above 1 it may be",
    "lr-taught": "learning rate of the warm start",
    "lr-scaffold": "learning rate of imitation while the gate is closed",
    "adam-b2": "share of its past that Adam's second moment keeps in a step",
    "kl-coef": "weight of the KL divergence to the policy before the first update from rewards",
    "group": "completions of a problem",
    "taught": "updates of the warm start, which imitates demonstrations",
    "curriculum": "share of the warm start over which harder demonstrations join the easiest quarter; 0: all at once",
    "model-folder": "a model in Hugging Face's files that learning begins with, and its sizes; none: random weights",
    "gate-threshold": "soundness below which the policy imitates verified chains; 0: rewards teach always",
    "gate-hysteresis": "how far below the threshold it must fall to be taught again",
    "gate-patience": "looks without a rise after which the gate stays open",
    "gate-rise": "of soundness, to count as one",
    "gate-every": "updates between two looks",
    "gate-chains": "whose verified chains it imitates: a solver's, or its own samples that are right and sound",
    "gate-fewest": "own chains of a device's share of an update, below which it learns nothing from them",
    "model-family": "of the language model: Llama, Qwen2 (biases), Qwen3 (normalised queries and keys)",
    "model-width": "of its residual",
    "model-layers": "of attention and a gated perceptron each",
    "model-heads": "of queries",
    "model-kv-heads": "of keys and values, each shared by as many heads of queries",
    "model-head-dim": "width of a head",
    "model-hidden": "width of the gated perceptron",
    "model-eps": "of the root mean square normalisation",
    "model-theta": "base of the rotary frequencies",
    "model-tied": "the embedding is the output's kernel, too",
    "model-context": "tokens that it is said to be trained on",
    "model-precision": "what its layers compute in; parameters and logits are fp32",
    "model-remat": "what of a layer is computed again for the gradient, in less memory",
    "batch-size": "steps of a step of the optimiser, drawn from the replay, over all devices",
    "gradient-steps": "of the optimiser, an update",
    "learning-starts": "steps in the replay before learning; until then actions are drawn evenly",
    "replay-size": "steps that the replay holds, over all devices",
    "replay-precision": "how float observations are kept in the replay; bf16 takes half the memory",
    "priority-exponent": "of the error, for the chance of a step to be sampled; none: all alike",
    "importance-exponent": "of the weights that make up for priorities; rises to 1 over the run",
    "log-interval": "updates of a record of metrics",
    "block": "updates of a compiled call; between calls a run logs, saves and stops",
    "save-interval-minutes": "minutes between two checkpoints",
    "save-interval": "updates between two checkpoints, instead of minutes",
    "keep": "newest checkpoints that stay",
    "keep-every": "of each so many updates one checkpoint stays for good, beside the newest; none: only those",
    "rollbacks": "goings back from updates with NaN or infinity, each on with other random numbers; then the run fails",
    "health": "say it when a run falls ill, or gets well again",
    "health-entropy": "nats below which the policy has collapsed; none: chosen by the actions",
    "health-kl": "approx_kl above which the policy moves too far an update; none: any",
    "health-clip": "clip fraction above which too many steps are cut off; none: any",
    "health-window": "share of the run in which the return should rise; none: it need not",
    "health-solved": "mean return from which on it need not rise; none: there is no such",
}
"""Help of each flag of a Run."""

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
"""Prefixes of the flags of nested settings."""

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
"""Values of --remat and --no-remat without a value: the flag was a switch once."""

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
"""Flags of tracking: not part of a Run, since no number depends on them."""

PUBLISHING = (
    Flag("publish", TEXT, (), "tcp:HOST:PORT, shm:NAME, a folder, or run: RUN/weights; a run that goes on keeps to it; "
         "none: stop", True, shown=""),
    Flag("publish-every", INT, 1, "updates from one version to the next"),
    Flag("publish-precision", choice(PUBLISHED), "as-is", "what parameters of fp32 are published in"),
    Flag("publish-token-file", optional(PATH), None, "a file with the token that receivers must know", shown=""),
    Flag("publish-anchor", INT, 1, "of versions in a folder each so manyth is whole, the others what changed"),
)  # fmt: skip
"""Flags of publication: not part of a Run either."""


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
