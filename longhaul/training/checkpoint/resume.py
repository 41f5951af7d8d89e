"""Resuming a run, also with other sizes: carried and dropped state, their record in run.json; and restoring its policy.

A run counts in steps: an update of another size is another share of its total. So each checkpoint records its sizes and
steps. If the run's sizes have changed, it counts from there (its `Origin`), environments restart where their states do
not fit, and the rest goes on.

Order safe against a kill: run.json gets the new sizes after the checkpoint was restored with them, and before the first
update. A run killed in between has a checkpoint of the old sizes and a run.json of the new ones, as at the time of the
resume, and resumes alike.

Each checkpoint holds its Run. So where run.json says otherwise, and no resume in its history did, it was edited by
hand: that is refused, or taken and recorded where the user says so. Older checkpoints hold none, and resume as ever.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms import registry
from longhaul.algorithms.config import GRPOConfig, OffPolicy
from longhaul.algorithms.run_context import RunContext
from longhaul.config.resolve import absolute, agents, check_topology, replaced, resolve
from longhaul.config.run import BEGINNING, MOST, Driving, Named, Origin, Run, to_dict
from longhaul.reasoning import huggingface
from longhaul.reasoning.config import Reasoning
from longhaul.runtime import bounded_json, config_fields, device_memory
from longhaul.runtime import mesh as meshes
from longhaul.runtime.config_fields import CHANGEABLE, FIXED
from longhaul.runtime.devices import prepare_devices, started
from longhaul.runtime.errors import RunError
from longhaul.telemetry import screen
from longhaul.topologies import fused
from longhaul.training import data as feeds
from longhaul.training import hub, init_from, members, reasoning_setup
from longhaul.training.assemble import Assembly
from longhaul.training.checkpoint.checkpoint import Checkpoint, Checkpoints
from longhaul.training.data import Feed
from longhaul.training.legacy_runs import as_current
from longhaul.training.run_dir import called, load_asked_settings, load_run, write_json
from longhaul.types import Params, Progress, PyTree

SIZES = ("num_envs", "num_steps", "devices", "model")

BEGIN_ANEW = "the environments begin anew, and episodes under way are dropped"
PERIOD = "the updates in these scenarios are counted anew"


class Standing(NamedTuple):
    """State of a run at a resume."""

    origin: Origin  # where it counts from
    resized: dict[str, tuple[int, int]]  # name -> (checkpoint's size, current size), where they differ
    updates: int = 0  # made
    agent_steps: int = 0


BASE = "base"
"""Metadata of a checkpoint that has LoRA's factors alone: digest of the model's files that have the rest."""


def based(run: Run) -> dict[str, str]:
    """`BASE` of a run's checkpoints, if they have it."""
    if not reasoning_setup.adapts(run):
        return {}
    assert isinstance(run.algorithm, GRPOConfig)
    return {BASE: huggingface.digest(run.algorithm.model_folder)}


def counted(run: Run, assembly: Assembly, updates: int) -> dict[str, Any]:
    """Sizes and steps for the metadata of a checkpoint after `updates` updates."""
    sizes = {name: getattr(run, name) for name in SIZES}
    steps = {"agent_steps": assembly.agent_steps(updates), "env_steps": assembly.env_steps(updates)}
    return {"sizes": sizes, "steps": steps, "origin": assembly.origin._asdict(), "run": to_dict(run)}


def standing(run: Run, checkpoint: Checkpoint | None) -> Standing:
    """Standing of the resolved `run` at a checkpoint; at its start if there is none.

    Raises RunError if no whole update of the new sizes is left, but one of the old sizes is.
    """
    if checkpoint is None:
        return Standing(BEGINNING, {})
    sizes, steps = checkpoint.metadata["sizes"], checkpoint.metadata["steps"]
    resized = {name: (sizes[name], getattr(run, name)) for name in SIZES if sizes[name] != getattr(run, name)}
    if resized and isinstance(run.algorithm, OffPolicy):
        name, (before, now) = next(iter(resized.items()))
        raise RunError(
            f"{name} is {now}, and this run's replay is laid out for {before}; go on with {before}, or start a new run"
        )
    if run.many and "num_envs" in resized:
        raise RunError(
            f"--num-envs is {run.num_envs}, and the runs that go on side by side have {sizes['num_envs']} each; "
            "leave it out"
        )
    if steps["agent_steps"] > run.total_steps:
        raise RunError(
            f"--total-steps is {run.total_steps}, and {steps['agent_steps']} are done; give more, or leave it out"
        )
    if resized.keys().isdisjoint(("num_envs", "num_steps")):
        return Standing(Origin(**checkpoint.metadata["origin"]), resized, checkpoint.step, steps["agent_steps"])
    origin = Origin(checkpoint.step, steps["agent_steps"], steps["env_steps"], checkpoint.metadata["place"]["swaps"])
    left = run.total_steps - origin.agent_steps
    before, after = (envs * rows * agents(run) for envs, rows in (
        (sizes["num_envs"], sizes["num_steps"]), (run.num_envs, run.num_steps),
    ))  # fmt: skip
    if after > left >= before:
        raise RunError(
            f"--num-envs {run.num_envs} and --num-steps {run.num_steps} make updates of {after} steps, and "
            f"{left} are left of --total-steps {run.total_steps}; choose smaller ones"
        )
    if (last := origin.updates + left // after) > MOST:
        raise RunError(
            f"--num-envs {run.num_envs} and --num-steps {run.num_steps} make {last} updates in all; at most {MOST} are "
            "possible: choose larger ones"
        )
    return Standing(origin, resized, checkpoint.step, origin.agent_steps)


def restored(
    run: Run, checkpoints: Checkpoints, checkpoint: Checkpoint, begun: Progress, now: Standing, source: Feed,
    assembly: Assembly, context: PyTree,
) -> Progress:  # fmt: skip
    """Progress of the checkpoint in the layout of `begun`, on the current mesh, in the run's `context`."""
    if not restarts_episodes(now, source):
        return _restored(run, checkpoints, checkpoint, begun)
    kept = _restored(run, checkpoints, checkpoint, begun._replace(carry=()), part=True)
    return fused.entered(kept, assembly.enter, context)


def _restored(
    run: Run, checkpoints: Checkpoints, checkpoint: Checkpoint, begun: Progress, *, part: bool = False
) -> Progress:
    """Progress of a checkpoint as `Checkpoints.restore` has it; where it has LoRA's factors alone, the rest is that of
    `begun`. Raises RunError if the model's files have changed since."""
    if BASE not in checkpoint.metadata:
        return checkpoints.restore(checkpoint, begun, part=part).progress
    assert isinstance(run.algorithm, GRPOConfig)
    if (now := huggingface.digest(folder := run.algorithm.model_folder)) != (recorded := checkpoint.metadata[BASE]):
        raise RunError(
            f"the weights in {folder} have SHA-256 {now[:12]}, and checkpoint {checkpoint.step} adapts those of "
            f"{str(recorded)[:12]}; bring these back"
        )
    kept = checkpoints.restore(checkpoint, reasoning_setup.adapters(run, begun), part=part).progress
    return reasoning_setup.whole(run, kept, begun)


def restarts_episodes(now: Standing, source: Feed) -> bool:
    """True if the checkpoint's environment states do not fit the run's sizes, or its place in the data."""
    return "num_envs" in now.resized or ("num_steps" in now.resized and source.period is not None)


def dropped(now: Standing, source: Feed) -> list[str]:
    """Lines on state that is not carried over."""
    counts = source.period is not None and bool(now.resized.keys() & {"num_envs", "num_steps"})
    return [BEGIN_ANEW] * restarts_episodes(now, source) + [PERIOD] * counts


def fewer(shards: int, devices_of: Sequence[int], envs: int, model: int = 1) -> int:
    """Largest number up to `shards`, of `model` devices each, that share `envs` worlds evenly.

    `devices_of` is the number of devices of each process; each gives equally many. Raises RunError if there is none.
    """
    devices = shards * model
    for own in range(min(*devices_of, devices // len(devices_of)), 0, -1):
        left, rest = divmod(own * len(devices_of), model)
        if not rest and envs % left == 0:
            return left
    work = f"{envs} worlds" if model == 1 else f"{envs} worlds and {model} parts of the parameters"
    raise RunError(f"of {devices} devices {sum(devices_of)} are there, which can't share {work}; give a --num-envs"
                   + " or --mesh" * (model > 1))  # fmt: skip


def changes(before: Any, now: Any) -> dict[str, list[Any]]:
    """Name -> [before, now] of the fields that differ between two Runs; nested ones by their own name."""
    before, now = (value if isinstance(value, dict) else to_dict(value) for value in (before, now))
    differences: dict[str, list[Any]] = {}
    for name, value in now.items():
        if isinstance(value, dict) and isinstance(before.get(name), dict):
            differences |= changes(before[name], value)
        elif value != before.get(name):
            differences[name] = [before.get(name), value]
    return differences


def edits(folder: Path, checkpoint: Checkpoint) -> dict[str, list[Any]]:
    """Name -> [in the checkpoint, in run.json] of the fields that were edited by hand."""
    if "run" not in checkpoint.metadata:
        return {}
    known: dict[str, Any] = {}  # by the last resume that changed it
    for entry in bounded_json.read(folder / "run.json").get("history", ()):
        known |= {name: after for name, (_, after) in entry["changed"].items()}
    now = json.loads(json.dumps(to_dict(load_run(folder))))
    pairs = changes(as_current(checkpoint.metadata["run"]), now)
    return {name: pair for name, pair in pairs.items() if name not in known or known[name] != pair[1]}


def check_edits(folder: Path, checkpoint: Checkpoint, edited: Mapping[str, list[Any]]) -> None:
    """Raises RunError that names each edited field of run.json."""
    if edited:
        raise RunError(
            f"{folder / 'run.json'} was edited since checkpoint {checkpoint.step}: {_words(edited)}; put that back, or "
            "give --take-edits to go on with it"
        )


def _words(pairs: Mapping[str, list[Any]]) -> str:
    values = {name: [f"{x:g}" if isinstance(x, float) else str(x) for x in pair] for name, pair in pairs.items()}
    return ", ".join(f"{name} {after} (was {before})" for name, (before, after) in values.items())


def _longer(run: Run, now: Standing) -> str:
    """Words on annealed schedules of a run with another end; "" where it has none."""
    left = 1.0 - now.agent_steps / run.total_steps
    rate = f": the learning rate is {left:.0%} of its largest again and falls to 0 at the new end"
    return rate if getattr(run.algorithm, "anneal", False) else ""


def record(
    folder: Path, run: Run, now: Standing, source: Feed, about: Mapping[str, Any], edited: Mapping[str, list[Any]]
) -> None:
    """Record in run.json, and on stderr, of a resumed run's changed settings; `edited` are those changed in it by hand.

    Its history gets the changes, time, update and dropped state; `about` are further fields of run.json.
    """
    changed, lost = {**edited, **changes(load_run(folder), run)}, dropped(now, source)
    if changed or now.resized:
        listed = _words({name: list(pair) for name, pair in now.resized.items()} | changed)
        print(
            f"goes on after update {now.updates}, {now.agent_steps:,} of {run.total_steps:,} steps, with {listed}: "
            f"{' and '.join(lost) or 'nothing is dropped'}; parameters, optimiser, normalisers and schedules go on"
            f"{_longer(run, now) if 'total_steps' in changed else ''}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    if not changed:  # or recorded already, by a process killed before it saved
        return
    path = folder / "run.json"
    before: dict[str, Any] = bounded_json.read(path)
    entry = {
        "update": now.updates,
        "agent_steps": now.agent_steps,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "changed": changed,
        "dropped": lost,
        "command": list(sys.argv),
        "edited": sorted(edited),
    }
    write_json(path, {**before, **about, "run": to_dict(run), "history": [*before.get("history", ()), entry]})


def continued(folder: Path, stored: Run, given: Mapping[str, Any]) -> Run:
    """The Run of a folder that goes on with the given settings, by the names of their flags with underscores.

    What was not chosen at the run's start follows from them again. Raises RunError where a setting is fixed and says
    otherwise, and where the steps are fewer than those that are done.
    """
    known = {leaf.name: leaf for leaf in config_fields.walk(stored)}
    before = config_fields.values(stored) | {"mesh": stored.mesh}
    free: dict[str, Any] = {}
    for name, value in given.items():
        flag = name.replace("_", "-")
        if name not in known:
            raise RunError(f"run {folder.name} has no --{flag}; leave it out")
        if isinstance(value, tuple) and known[name].setting.path:  # as `resolve` keeps them
            value = absolute(value)
        if known[name].setting.resume != FIXED:
            free[name] = value
        elif value != before[name]:
            raise RunError(
                f"--{flag} is {config_fields.plain(value)}, and run {folder.name} has "
                f"{config_fields.plain(before[name])}; "
                f"leave --{flag} out, or start a new run without --resume"
            )
    changed = {name: value for name, value in free.items() if value != before[name]}
    if any(known[name].setting.resume == CHANGEABLE for name in changed):
        stored = reopened(stored, frozenset(known[name].path[-1] for name in free) | load_asked_settings(folder).keys())
    run = replaced(stored, free)
    check_topology(run, changed)
    return run


OPEN = (("log_interval", "block"), ("threads",), ("num_minibatches", "update_epochs"), ("bank_updates",))
"""Fields of a Run that `resolve` decides, grouped as they are decided."""


def reopened(run: Run, given: frozenset[str]) -> Run:
    """The resolved `run` with derived fields reset, so that they follow from other sizes.

    Fields are reset only where `resolve` would decide the same again: a user's choice and fields in `given` stay.
    """
    opened = run
    for names in OPEN:
        if given.isdisjoint(names):
            left = _without(run, names)
            if resolve(left) == run:
                opened = _without(opened, names)
    return opened


def _without(value: Any, names: tuple[str, ...]) -> Any:
    """A dataclass with None in the fields of these names, at any depth."""
    new: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if field.name in names:
            new[field.name] = None
        elif field.name in ("algorithm", "environment"):
            new[field.name] = _without(inner, names)
    return dataclasses.replace(value, **new)


def named_task(run: Run) -> str:
    """Name of a run's environment or task."""
    task = run.environment
    return task.env if isinstance(task, Named) else task.task if isinstance(task, Reasoning) else "driving"


def policy_of(folder: Path, who: str, member: int | None = None, step: int | None = None) -> tuple[Run, Params | None]:
    """(the run, the policy that acts in it): None for a driver that no learning made. RunError where none fits."""
    if who in ("run", "untrained"):
        with screen.stage("restoring the policy", plain=False):
            run, trained, untrained = restore_policy(folder, member, step)
        return run, trained if who == "run" else untrained
    run = load_run(folder)
    if not isinstance(run.environment, Driving):
        task = named_task(run)
        raise RunError(f"--policy is {who!r}, a driver, and run {folder.name} is {task}; give run or untrained")
    prepare_devices(run.all_devices, run.threads)
    return run, None


def restore_policy(folder: Path, member: int | None = None, step: int | None = None) -> tuple[Run, Params, Params]:
    """(run, its policy from a checkpoint, the untrained policy), on the host, for evaluation.

    The checkpoint is the newest intact one, or that after `step` updates. A folder from the hub has one policy.
    Only the policy is restored, without training data. In a folder of many runs it is that of `member`, and the
    returned run has its seed. Raises RunError if there is none.
    """
    run = load_run(folder)
    which = members.chosen(run, member, folder.name) if run.many or member is not None else None
    if started() is None:  # else it acts on what is there
        prepare_devices(run.all_devices, run.threads)
    if run.many:
        algorithm, begun = members.initial_states(run, feeds.spec(run))
    else:
        algorithm = registry.make(feeds.spec(run), run.algorithm, RunContext(updates=1, mean=meshes.identity))
        key = jax.random.split(jax.random.key(run.seed), 3)[0]  # as in `fused.start`
        begun = device_memory.allocated(jax.jit(algorithm.init), key)
        begun = reasoning_setup.loaded(run, begun)
    if (folder / hub.POLICY).is_file() and not (folder / "checkpoints").is_dir():
        untrained = jax.tree.map(np.array, jax.device_get(algorithm.policy(begun)))
        return run, init_from.published(folder, untrained), untrained
    progress = Progress(begun, (), (), jnp.int32(0))  # type: ignore[arg-type]
    with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        checkpoint = checkpoints.newest() if step is None else checkpoints.at(step)
        if checkpoint is None and step is not None:
            raise RunError(f"run {folder.name} keeps no checkpoint {step}; it has {checkpoints.steps()}")
        if checkpoint is None:
            raise RunError(
                f"{folder} has no checkpoint yet; go on with --resume {called(folder)}, or wait for its first save"
            )
        restored = _restored(run, checkpoints, checkpoint, progress, part=True)

    def acting(state: Any) -> Params:
        if run.many:
            state = jax.tree.map(lambda x: x[member], state)
        policy = algorithm.policy(state)
        return jax.tree.map(np.array, jax.device_get(policy.state if run.many else policy))

    if which is not None:
        run = dataclasses.replace(run, seed=which.seed)
    return run, acting(restored.state), acting(begun)
