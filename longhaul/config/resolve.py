"""Resolution of a Run: a recipe changed by settings, every open field decided, every size checked."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longhaul.algorithms import batch_scaling, registry
from longhaul.algorithms import external as external_algorithms
from longhaul.algorithms.config import AlgorithmConfig, APGConfig, BCConfig, GRPOConfig, OffPolicy, Reasoner
from longhaul.config import aliases
from longhaul.config.population import SCENARIOS, Member, check
from longhaul.config.run import MOST, TOPOLOGIES, Driving, Named, Run, from_dict
from longhaul.driving.sim import config as sim
from longhaul.driving.sim.config import HELD_OUT
from longhaul.envs import external, suite_adapters
from longhaul.envs import registry as environments
from longhaul.envs.host.registry import is_hosted
from longhaul.envs.registry import spec_stub
from longhaul.reasoning import huggingface, problem_sets, rollout_servers, tokenizer, tools
from longhaul.reasoning.config import QUESTIONS, ModelConfig, Reasoning
from longhaul.reasoning.tokenizer import Budget, Tokeniser
from longhaul.replay import Sizes
from longhaul.runtime import batch_shards, config_fields, process_group
from longhaul.runtime.devices import MeshShape, announce, cores, default_threads, on_cpu, prepare_devices, started
from longhaul.runtime.errors import FieldError, ModuleError, RunError
from longhaul.runtime.user_modules import load
from longhaul.topologies.actor_learner import config as layouts
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.topologies.inference_server import config as lanes
from longhaul.types import Environment

MOST_RECORDS = 4096
"""Records of metrics in a run, about, however long it is: a record sums up as many updates as that takes."""

EPISODES = {Driving: 128, Reasoning: 256}
"""Episodes of an evaluation: scenarios, problems; 100 elsewhere."""

VISITS, EPISODE = 8, 80
"""Visits of each scenario of a bank before others come; steps that an episode is taken to have."""


def resolve(run: Run, *, stored: bool = False) -> Run:
    """`run` with every None decided and every size checked. Raises RunError naming value, bound and remedy.

    Of a `stored` run, which other processes may evaluate than trained it, these need not share the devices.
    """
    try:
        return _resolved(run, stored=stored)
    except FieldError as error:
        raise error.of_flag() from None


def _resolved(run: Run, *, stored: bool) -> Run:
    if run.model < 1:
        raise FieldError("mesh", run.mesh, "model must be at least 1")
    config_fields.check(run)
    if isinstance(run.environment, Driving):
        _check_driving(run.environment)
    _check_reasoning(run)
    run = _with_model_files(run)
    _check_expert(run)
    siblings = members_of(run)
    runs = len(siblings)
    devices, processes = run.devices or _default_devices(run, runs), process_group.count()
    _check_shares(run, devices, runs, 1 if stored else processes)
    run = _imported(run, devices, fused=run.topology == "fused")
    acting = _actors(run, devices)
    _check_layout(run, devices)
    steps = run.num_envs * agents(run) * run.num_steps
    algorithm = _checked_algorithm(run, devices, siblings)
    updates = _updates(run, steps)
    log_interval, block = _intervals(run, updates, steps * runs)
    together = run.population.together or (1 if on_cpu() else runs // devices)
    many = dataclasses.replace(run.population, together=together) if run.many else run.population
    task = _relocated(run, siblings)
    episodes = run.evaluation_episodes or EPISODES.get(type(task), 100)
    return dataclasses.replace(
        run, environment=task, algorithm=algorithm, acting=acting, base_batch=run.base_batch or steps, devices=devices,
        threads=run.threads or default_threads(-(-devices * run.model // processes)) * processes,
        log_interval=log_interval, block=block, evaluation_episodes=episodes, population=many,
    )  # fmt: skip


def _checked_algorithm(run: Run, devices: int, siblings: Sequence[Member]) -> AlgorithmConfig:
    """Algorithm's config with its passes over a batch decided, checked with the values of each member of a sweep."""
    columns = _columns(run, devices)
    algorithm = _learning(run, run.num_envs * agents(run) * run.num_steps, columns)
    if run.lr_rule != "none" and "lr" not in config_fields.values(algorithm):
        raise FieldError("lr_rule", run.lr_rule, f"{external_algorithms.title(algorithm)} has no lr; leave it out")
    sizes = Sizes(parts(run, devices), columns, run.num_steps)
    for values in ({}, *(member.algorithm for member in siblings if run.population.sweep)):
        registry.check(config_fields.replaced(algorithm, **values), sizes)
    if run.many and run.evaluation_interval:
        raise FieldError("evaluation_interval", run.evaluation_interval, "a population is evaluated at its end; give 0")
    if files := registry.recorded(algorithm):
        assert isinstance(algorithm, BCConfig)
        algorithm = dataclasses.replace(algorithm, recorded=absolute(files))
    return algorithm


def _learning(run: Run, steps: int, columns: int) -> AlgorithmConfig:
    """The algorithm with minibatches and epochs for a batch of `steps` steps, `columns` columns of it on a device."""
    config = run.algorithm
    if not external_algorithms.in_minibatches(config):
        return config
    rows = columns if external_algorithms.memory(config) else columns * run.num_steps
    fixed = config.num_minibatches, config.update_epochs
    minibatches, epochs = batch_scaling.decide(steps, rows, run.scaling, *fixed)
    return dataclasses.replace(config, num_minibatches=minibatches, update_epochs=epochs)


def _updates(run: Run, steps: int) -> int:
    """Updates of a run, of `steps` agent steps each. Raises RunError where there is none, or there are too many."""
    updates = run.total_steps // steps
    if not 1 <= updates <= MOST:
        raise RunError(
            f"--total-steps is {run.total_steps}, which is {updates} updates of {steps} "
            f"(--num-envs x agents x --num-steps); give {steps} to {steps * MOST}"
        )
    return updates


def _intervals(run: Run, updates: int, steps: int) -> tuple[int, int]:
    """(updates of a record, updates of a compiled call); a record sums up whole calls."""
    # Many small updates a call, so that the host costs nothing; but some calls a second, so that it can stop and save.
    interval = min(run.log_interval or updates, updates)
    pretrained = isinstance(run.algorithm, GRPOConfig) and run.algorithm.model_folder  # an update takes seconds
    most = 1 if pretrained else min(64, 32_768 // steps, run.save_interval or updates)
    block = max(1, min(run.block or most, interval))
    if run.log_interval is None:
        return block * -(-updates // (block * MOST_RECORDS)), block
    whole = next(n for n in range(block, 0, -1) if interval % n == 0)
    if 3 * whole >= block:
        return interval, whole
    calls = -(-interval // block)  # a record of a little less, rather than calls that are far too short
    return calls * (interval // calls), interval // calls


def _relocated(run: Run, siblings: Sequence[Member]) -> Driving | Named | Reasoning:
    """Task of a run, whose data are found again from wherever the run is gone on with."""
    task = run.environment
    if not isinstance(task, Driving):
        return task
    if SCENARIOS in siblings[0].values:  # the members share the first ones
        task = dataclasses.replace(task, scenarios=int(max(member.values[SCENARIOS] for member in siblings)))
    updates = _bank_updates(task, run.num_envs * run.num_steps)
    return dataclasses.replace(task, data=absolute(task.data), bank_updates=updates)


def _bank_updates(task: Driving, steps: int) -> int | None:
    """So many updates of `steps` steps that each scenario of the bank is driven about `VISITS` times."""
    if task.bank is None or task.bank_updates is not None:
        return task.bank_updates
    return -(-VISITS * task.bank * min(EPISODE, task.horizon or EPISODE) // steps)


def _default_devices(run: Run, runs: int) -> int:
    """Shards on all local devices. On a CPU one a core, where batches are large enough to be worth cutting.

    Of a population as many as share its `runs` evenly.
    """
    if run.many:
        count = min(cores(), started() or cores()) if on_cpu() else jax.local_device_count()
        return max(n for n in range(1, min(count, runs) + 1) if runs % n == 0)
    processes, model = process_group.count(), run.model
    if on_cpu() and run.topology != "fused":  # actors have the cores
        return processes
    if on_cpu():
        columns = run.num_envs * (agents(run) if isinstance(run.environment, Reasoning) else 1)
        own = int(os.environ.get(process_group.DEVICES, 0)) or (cores() if columns >= 64 else 1)
    else:
        own = jax.local_device_count()
    own = min(own, started() or own)

    def odd(all_: int) -> bool:
        shares = max(1, all_ // model)
        return bool(all_ % model or run.num_envs % shares or (run.deterministic and batch_shards.VIRTUAL % shares))

    while own > 1 and odd(processes * own):
        own -= 1
    return max(1, processes * own // model)


# --------------------------------------------------------------------------------- settings by the names of their flags


def changed(recipe: Run, settings: Mapping[str, Any]) -> Run:
    """`recipe` with the given settings, by the names of their flags with underscores; `mesh` is a MeshShape.

    Where no topology is given, actors step an environment that is on the host: in threads, where no other process finds
    its class. A recipe of driving leaves its safety check out with dynamics that it can't check. Raises RunError where
    a setting is unknown, or would change nothing.
    """
    usual = config_fields.values(recipe)
    base = recipe.num_envs * agents(recipe) * recipe.num_steps  # before num_envs and the like change it
    run = replaced(dataclasses.replace(recipe, base_batch=recipe.base_batch or base), settings)
    if "topology" not in settings and run.topology == "fused" and not run.many:
        imported = _imported(run, run.devices or _default_devices(run, 1), fused=False).environment
        if isinstance(imported, Named) and is_hosted(imported.env):
            run = dataclasses.replace(run, topology="actors")
    if run.topology == "actors" and "actor_kind" not in settings and not _importable(run):
        run = dataclasses.replace(run, acting=dataclasses.replace(run.acting, actor_kind="thread"))
    task = run.environment
    if isinstance(task, Driving) and "safety" not in settings and task.simulator.dynamics not in sim.CHECKED:
        run = replaced(run, {"safety": False})  # a recipe's own choice gives way
    check_topology(run, {name: value for name, value in settings.items() if value != usual.get(name)})
    return run


def replaced(run: Run, settings: Mapping[str, Any]) -> Run:
    """`run` with other values of settings, by the names of their flags with underscores.

    RunError where there is no such setting, or where it takes no value of that type.
    """
    for name, value in typed(run, settings).items():
        if name == "mesh":
            run = dataclasses.replace(run, devices=value.data, model=value.model)
        else:
            run = config_fields.replaced(run, **{name: value})
    return run


def typed(run: Run, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Values of settings as their fields hold them. Raises RunError as `replaced` does."""
    known = {leaf.name: leaf for leaf in config_fields.walk(run)}
    fields: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in known:
            hint = aliases.hint(run, name, f"longhaul train {run.recipe} --help lists them")
            raise RunError(f"recipe {run.recipe} has no setting {name!r}; {hint}")
        if name == "mesh":
            fields[name] = value
            continue
        hint = typing.get_type_hints(known[name].owner)[known[name].path[-1]]
        try:
            fields[name] = from_dict(hint, _plain(value, hint))
        except TypeError as error:
            flag = f"--{name.replace('_', '-')}"
            raise RunError(
                f"{flag} is {value!r:.200}; it must be {_allowed(hint)}{_sweep_remedy(name, hint)}"
            ) from error
    return fields


def _plain(value: Any, hint: Any) -> Any:
    """A setting's value in the form of its annotation: NumPy's and JAX's numbers as Python's, 1e6 as a whole number, a
    path as its text, a text alone as a list of one. Raises TypeError for a number that JAX traces."""
    kinds = typing.get_args(hint) or (hint,)
    if typing.get_origin(hint) is tuple:
        alone = isinstance(value, str | Path) or not isinstance(value, list | tuple)
        return [_plain(each, kinds[0]) for each in ([value] if alone else value)]
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0:
        value = value.item()
    if isinstance(value, Path) and str in kinds:
        return str(value)
    return int(value) if isinstance(value, float) and value.is_integer() and int in kinds else value


def _importable(run: Run) -> bool:
    """False where an actor's process would not find the class or function of a user: of environment, algorithm, network
    or verifier."""
    task = run.environment
    names = [external_algorithms.name_of(run.algorithm), *([task.env] if isinstance(task, Named) else [])]
    names += [str(leaf.value) for leaf in config_fields.walk(run) if leaf.name in ("torso", "check")]
    return all(map(external.importable, names))


def check_topology(run: Run, changes: Mapping[str, Any]) -> None:
    """Raises RunError where a setting that was changed is not one of the run's topology."""
    topologies = {leaf.name: leaf.setting.topologies for leaf in config_fields.walk(run)}
    for name, value in changes.items():
        have, flag = topologies[name] or TOPOLOGIES, name.replace("_", "-")
        setting = f"--{flag} is {'on' if value is True else config_fields.plain(value)}"
        if run.topology in TOPOLOGIES and run.topology not in have:
            raise RunError(
                f"{setting}, and --topology {run.topology} has none; choose --topology {' or '.join(have)}, "
                f"or leave --{flag} out"
            )
        if name == "ray_address" and run.acting.actor_kind != "ray":
            raise RunError(f"{setting}, and --actor-kind is {run.acting.actor_kind}; choose --actor-kind ray")


WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
"""Types of settings as errors call them."""


def _allowed(hint: Any) -> str:
    """Values of a setting by its annotation, for a person."""
    if typing.get_origin(hint) is tuple:
        return f"a list, each of it {_allowed(typing.get_args(hint)[0])}"
    inner = [kind for kind in typing.get_args(hint) if kind is not type(None)] or [hint]
    named = " or ".join(WORDS.get(kind, str(kind)) for kind in inner)
    return f"{named}, or None" if type(None) in typing.get_args(hint) else named


def _sweep_remedy(name: str, hint: Any) -> str:
    """Remedy for a number that is given several values."""
    if name == "seed":
        return "; runs with several seeds are seeds=N"
    if name == "seeds":
        return ", how many; the first is seed"
    if name == "sweep":
        return ", as lr=1e-4,1e-3"
    return f'; runs with several values are sweep="{name}=V1,V2"' if float in (hint, *typing.get_args(hint)) else ""


# ------------------------------------------------------------------------------------------------------- sizes of a run


def members_of(run: Run) -> tuple[Member, ...]:
    """The runs of a population; of any other run it alone. Raises RunError where they can't be trained together."""
    generated = isinstance(run.environment, Driving) and not run.environment.data
    members = check(run.population, run.algorithm, run.seed, HELD_OUT if generated else None)
    if not run.many:
        return members
    clashes = {
        f"--topology {run.topology}": run.topology != "fused",
        "--deterministic": run.deterministic,
        f"--mesh {run.mesh}": run.model > 1,
        "--fsdp": run.fsdp,
        "longhaul launch": process_group.together(),
        "--bank": isinstance(run.environment, Driving) and run.environment.bank is not None,
    }
    for name, clash in clashes.items():
        if clash:
            raise RunError(f"{name} does not go with --seeds and --sweep, which train on one host, fused; leave it out")
    if run.seed + run.population.seeds - 1 > MOST:
        raise RunError(f"--seed is {run.seed}, and --seeds {run.population.seeds}; the last must be at most {MOST}")
    return members


def agents(run: Run) -> int:
    """Columns of the batch that one world makes."""
    if isinstance(run.environment, Driving):
        return run.environment.simulator.agents
    if isinstance(run.environment, Reasoning):
        assert isinstance(run.algorithm, Reasoner)
        return run.algorithm.group
    if suite_adapters.is_suite(run.environment.env):  # its import may start JAX before the devices are set
        return 1
    return named(run.environment).spec.agents or 1


def _columns(run: Run, devices: int) -> int:
    """Columns of a device's batch: worlds x agents."""
    return run.num_envs // parts(run, devices) * agents(run)


def parts(run: Run, devices: int) -> int:
    """In how many the batch is computed."""
    return 1 if run.many or run.fsdp else batch_shards.VIRTUAL if run.deterministic else devices


def named(environment: Named) -> Environment:
    """The environment of that name; RunError with the nearest names where there is none."""
    try:
        return spec_stub(environment.env) if is_hosted(environment.env) else environments.make(environment.env)
    except ValueError as error:
        raise RunError(str(error)) from error


# --------------------------------------------------------------------------------------------------------------- checks


def _check_shares(run: Run, devices: int, runs: int, processes: int) -> None:
    """Raises RunError where devices can't share the runs, or the worlds, evenly, or processes the devices."""
    if run.many and runs % devices:
        raise RunError(
            f"--mesh is {run.mesh}, whose devices can't share {runs} runs evenly; choose data=N with N a divisor"
        )
    if devices * run.model % processes:
        raise RunError(
            f"--mesh is {MeshShape(devices, run.model)}, of {devices * run.model} devices, which {processes} processes "
            f"can't share evenly; choose a multiple of {processes}, or another number of processes"
        )
    if run.num_envs % devices and not run.many:
        fewer = f"--mesh {MeshShape(1, run.model)}" if processes == 1 else "another number of processes"
        raise RunError(
            f"--num-envs is {run.num_envs}, which {devices} devices can't share evenly; "
            f"choose a multiple of {devices}, or {fewer}"
        )


def _check_layout(run: Run, devices: int) -> None:
    """Raises RunError for settings that the layout on the mesh excludes, or a batch too large for a device."""
    if run.deterministic and (odd := batch_shards.refusal(devices, run.num_envs)):
        raise RunError(odd)
    if run.deterministic and run.model > 1:
        raise RunError(
            f"--deterministic with --mesh {MeshShape(devices, run.model)}: sums over the model axis have no fixed "
            "order; choose model=1"
        )
    if run.fsdp:
        _check_fsdp(run, devices)
    if isinstance(run.environment, Driving) and run.environment.bank_by_host:
        if run.fsdp or run.model > 1:
            raise RunError(
                "--bank-by-host does not go with devices that share parameters, which must see the same scenarios; "
                "leave it or --fsdp and model=M out"
            )
        if run.deterministic:
            raise RunError(
                "--deterministic does not go with --bank-by-host: scenarios then follow from the number of processes; "
                "leave one out"
            )
    steps = _columns(run, devices) * run.num_steps
    if steps > MOST:
        raise RunError(
            f"--num-envs x agents x --num-steps is {steps} on a device; it must be at most {MOST}: give fewer, or more "
            "devices by --mesh data=N"
        )


def _check_fsdp(run: Run, devices: int) -> None:
    """Raises RunError where fully sharded data parallelism can't be."""
    if devices == 1:
        raise RunError("--fsdp splits parameters over the devices of --mesh data=N, and N is 1; choose data=2 or more")
    if run.deterministic:
        raise RunError("--deterministic does not go with --fsdp, whose sums have no fixed order; leave one out")
    if isinstance(run.algorithm, OffPolicy):
        name = external_algorithms.title(run.algorithm)
        raise RunError(f"--fsdp does not go with {name}, whose replay lies by device; leave --fsdp out")


def _check_driving(task: Driving) -> None:
    """Raises FieldError where settings of driving do not fit each other."""
    sim.check_settings(task.simulator)
    if task.bank is not None and not task.data:
        raise FieldError("bank", f"{task.bank}, and there is no --data", "of generated scenarios, --scenarios are held")
    if task.bank_updates is not None and task.bank is None:
        raise FieldError("bank_updates", task.bank_updates, "it needs --bank")
    if task.bank_by_host and task.bank is None:
        raise FieldError("bank_by_host", "on", "it needs --bank")
    if task.skip_bad_logs and (task.bank is not None or not task.data):
        why = "it needs --data" if task.bank is None else "it is for logs, and --bank takes shards; leave it out"
        raise FieldError("skip_bad_logs", "on", why)
    if task.simulator.reward is not None and task.simulator.conditioning:
        raise FieldError("reward", task.simulator.reward, "--conditioning draws weights of terms, and it has none")
    if task.least > task.simulator.agents:
        raise FieldError("least", task.least, f"it must lie in 1 to --agents, {task.simulator.agents}")
    if task.objects < task.simulator.agents:
        raise FieldError("objects", task.objects, f"it must be at least --agents, {task.simulator.agents}")


def _check_expert(run: Run) -> None:
    """Raises RunError where imitation, or gradients through environments, do not fit the topology and task."""
    share, files, task = registry.guidance(run.algorithm), registry.recorded(run.algorithm), run.environment
    if isinstance(run.algorithm, APGConfig) and run.topology != "fused":
        raise RunError(
            f"--topology is {run.topology}, and gradients pass through environments in one program: choose fused"
        )
    if share is None and not files:
        return
    if run.topology != "fused":
        raise RunError(
            f"--topology is {run.topology}, and {run.algorithm.title} asks an expert in the same program: choose fused"
        )
    if files and isinstance(task, Driving):
        raise RunError(f"--recorded is {files[0]}, and in driving the expert is asked as it goes: leave it out")


def _check_reasoning(run: Run) -> None:
    """Raises RunError or FieldError where settings of reasoning do not fit each other, the algorithm or topology."""
    if isinstance(run.environment, Reasoning) != isinstance(run.algorithm, Reasoner):
        raise RunError(
            f"recipe {run.recipe}: GRPO and its kin learn from prompts, and nothing else does; take a recipe "
            "reasoning-..., or another algorithm"
        )
    if not isinstance(run.environment, Reasoning):
        return
    if run.topology == "central" or (run.topology == "actors" and run.acting.actor_kind == "ray"):
        raise RunError("completions are sampled by the learner, its threads or its processes; give --topology actors "
                       "--actor-kind thread, or leave both out")  # fmt: skip
    problem_sets.check(run.environment)
    assert isinstance(run.algorithm, GRPOConfig)
    if run.algorithm.resample and run.topology != "actors":
        raise RunError(f"--resample is {run.algorithm.resample}, and actors sample again; give --topology actors")
    if run.algorithm.pack and run.fsdp:
        raise RunError(f"--pack is {run.algorithm.pack}, and --fsdp splits rows over devices; leave one of them out")
    if run.acting.rollout_servers:
        _check_rollout_servers(run, run.environment, run.algorithm)
    if not run.environment.exact and run.topology != "actors":
        raise RunError(f"--task {run.environment.task} is checked on the host; give --topology actors")


def _check_rollout_servers(run: Run, task: Reasoning, config: GRPOConfig) -> None:
    """Raises RunError where completions of servers do not fit the run's other settings."""
    acting = run.acting
    for wrong, why in (
        (run.topology != "actors" or acting.actor_kind != "thread", "needs --topology actors --actor-kind thread"),
        (process_group.together(), "is for a run of one process; leave longhaul launch out"),
        (not task.in_words, f"asks servers with a model's own vocabulary, and --task {task.task} has another"),
        (config.taught > 0 or config.gate.threshold > 0.0, "samples all completions; leave --taught and "
         "--gate-threshold at 0"),
        (bool(task.tools), "has no later turns; leave --tools out"),
        (config.resample > 0, "samples a group once; leave --resample at 0"),
        (config.temperature != 1.0, "takes log-probabilities as servers give them, without a temperature; leave "
         "--temperature at 1"),
        ((config.top_k, config.top_p, config.min_p) != (0, 1.0, 0.0), "draws from all tokens; leave --top-k, --top-p "
         "and --min-p out"),
        (acting.pin, "has the newest weights alone; leave --pin out"),
        (acting.rollout_updates == "plugin" and acting.rollout_api != "vllm", f"and --rollout-api {acting.rollout_api}"
         ": longhaul's backend is for vLLM; give --rollout-updates folder or none"),
        (acting.rollout_updates == "folder" and acting.rollout_api == "completions", "and --rollout-updates folder: "
         "only vLLM and SGLang load folders; give --rollout-api vllm or sglang"),
    ):  # fmt: skip
        if wrong:
            raise RunError(f"--rollout-servers {why}")
    for address in acting.rollout_servers:
        try:
            rollout_servers.Server(address)
        except ValueError as error:
            raise RunError(f"--rollout-servers: {error}") from error


# ----------------------------------------------------------------------------------- the user's environment, and actors


def _imported(run: Run, devices: int, *, fused: bool) -> Run:
    """`run` with the name by which an environment of the user's own is made; its module is imported for that, and that
    of a reward of the user's own.

    JAX is told of its devices before: what a module computes on loading may start it. RunError, one line, where there
    is no such environment.
    """
    task = run.environment
    own_reward = task.simulator.reward if isinstance(task, Driving) else None
    own_world = isinstance(task, Named) and (external.is_external(task.env) or task.env in external.installed())
    if own_reward is None and not own_world:
        return run
    everything, threads = devices * run.model, os.environ.get("NPROC")
    prepare_devices(everything, run.threads, inline=run.topology != "fused" and everything == 1)
    announce(everything, run.threads)
    flag = f"--reward {own_reward}"
    try:
        if not isinstance(task, Named):
            pays = load(str(own_reward))
            if isinstance(pays, type) or not callable(pays):
                raise ValueError(f"it is a {type(pays).__name__}; give a function of a reward.Step")
            return run
        flag = f"--env {task.env}"
        return dataclasses.replace(run, environment=Named(external.canonical(task.env, fused)))
    except ValueError as error:
        raise ModuleError(f"{flag}: {error}") from error
    finally:
        if started() is None:  # nothing is decided yet
            os.environ.pop("NPROC", None)
            os.environ.update({} if threads is None else {"NPROC": threads})


def _actors(run: Run, devices: int) -> ActorConfig:
    """Actors of the run, checked against its topology, environment and devices."""
    if run.topology == "fused":
        if isinstance(run.environment, Named) and is_hosted(run.environment.env):
            raise RunError(f"--env {run.environment.env} is stepped on the host; choose --topology actors or central")
        return run.acting
    if run.deterministic:
        raise RunError("--deterministic needs --topology fused; actors repeat with --staleness 0, or with --pin")
    if process_group.together() and run.topology == "central":
        raise RunError("--topology is central, which trains in one process; leave longhaul launch out")
    if run.topology == "actors" and run.model > 1 and devices * run.model // process_group.count() % run.model:
        raise RunError(
            f"--mesh is {MeshShape(devices, run.model)}, and with --topology actors the {run.model} devices of a shard "
            f"lie in one process: give each process {run.model} (--devices-per-host), or choose --topology fused"
        )
    if process_group.together() and run.acting.actor_kind == "ray":
        raise RunError("--actor-kind ray does not go with longhaul launch; choose process or thread")
    if run.topology == "central":
        return _inference_actors(run, devices)
    if isinstance(run.environment, Driving) and run.acting.actor_kind != "thread":
        raise RunError(
            f"--actor-kind is {run.acting.actor_kind}, and actors drive in the scenarios of the learner's process; "
            "choose --actor-kind thread"
        )
    if run.acting.actor_kind == "device":
        _check_on_device(run, devices)
    return layouts.decided(run.acting, envs=run.num_envs, devices=devices, cores=cores())


def _check_on_device(run: Run, devices: int) -> None:
    """Raises RunError where the learner of a run can't step the environment on its device by itself."""
    task = run.environment
    if not isinstance(task, Named) or not task.env.startswith("torch/"):
        env = f"--env {task.env}" if isinstance(task, Named) else f"recipe {run.recipe}"
        raise RunError(
            f"--actor-kind is device, and {env} has no tensors on it; choose --actor-kind process or thread, or an "
            "environment torch/MODULE:FACTORY"
        )
    if run.fsdp or run.model > 1:
        split = "--fsdp is on" if run.fsdp else f"--mesh is {MeshShape(devices, run.model)}"
        raise RunError(
            f"{split}, and with --actor-kind device the policy acts where it lies, whole: leave it out, or choose "
            "--actor-kind thread"
        )
    if devices != process_group.count():
        raise RunError(
            f"--mesh is {run.mesh}, and with --actor-kind device a process has one device: choose --mesh data=1, or "
            f"longhaul launch --hosts {devices}"
        )


def _inference_actors(run: Run, devices: int) -> ActorConfig:
    """Actors of central inference, checked."""
    if isinstance(run.environment, Driving):
        _check_driving_elsewhere(run, run.environment)
    if run.acting.actor_kind == "device":
        raise RunError("--actor-kind is device, and central inference has actors elsewhere; choose --topology actors")
    if len(run.acting.actor_devices) > 1:
        raise FieldError(
            "actor_devices", config_fields.plain(run.acting.actor_devices), "central inference acts on one: give one"
        )
    if run.acting.pin:
        raise RunError("--pin is on, and central inference acts with the newest weights; choose --topology actors")
    groups = run.central.slots * devices  # columns of a batch are cut among devices, and among groups
    acting = run.acting
    if acting.actors is None:
        fit = [n for n in range(1, cores() + 1) if run.num_envs % (n * groups) == 0]
        acting = dataclasses.replace(acting, actors=fit[-1] if fit else 1)
    assert acting.actors is not None
    try:
        lanes.check(run.central, envs=run.num_envs, actors=acting.actors, kind=acting.actor_kind)
    except FieldError:
        raise
    except ValueError as error:  # of a file of credentials
        raise RunError(str(error)) from error
    return acting


def _check_driving_elsewhere(run: Run, task: Driving) -> None:
    """Raises FieldError where actors of central inference can't drive as the run asks."""
    if task.bank is not None and (run.central.bind is not None or run.acting.actor_kind == "ray"):
        where = "--actor-kind ray" if run.acting.actor_kind == "ray" else "--bind"
        raise FieldError("bank", f"{task.bank}, and actors on other machines hold all scenarios",
                         f"leave it out, or leave {where} out")  # fmt: skip
    reward = task.simulator.reward
    if reward is not None and not external.importable(reward):
        raise FieldError("reward", f"{reward}, which processes of actors can't import",
                         "put it into a module, or give --topology fused")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- paths


def absolute(paths: Sequence[str]) -> tuple[str, ...]:
    """Paths as a resolved run has them, to be found again from anywhere."""
    return tuple(map(_path, paths))


def _path(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path)) if path and not path.startswith(MINARI) else path


MINARI = "minari:"
"""Prefix of a data set of Minari's by its name, where a path may stand."""


# --------------------------------------------------------------------------------------------- language models in files


def both(run: Run) -> tuple[Reasoning, GRPOConfig]:
    """(task, algorithm) of a run that trains a language model."""
    assert isinstance(run.environment, Reasoning) and isinstance(run.algorithm, GRPOConfig)
    return run.environment, run.algorithm


def _with_model_files(run: Run) -> Run:
    """`run` with the paths of its questions and its model made absolute, and with the model that its files tell of.

    Raises RunError, one line, where they can't be read or don't fit each other. Of a run that was fitted before no file
    is read again.
    """
    if not isinstance(run.environment, Reasoning) or not isinstance(run.algorithm, GRPOConfig):
        return run
    task, config = run.environment, run.algorithm
    if not task.in_words:
        if config.model_folder:
            raise RunError(
                f"--model-folder is {config.model_folder}, and problems of --task {task.task} are written in "
                f"{len(tokenizer.CHARACTERS)} characters of their own; choose --task {QUESTIONS}, "
                "or leave it out"
            )
        return run
    paths: dict[str, Any] = {name: _path(getattr(task, name)) for name in ("questions", "held_out_questions")}
    config = dataclasses.replace(config, gate=dataclasses.replace(config.gate, verdict=True))
    if config.model.pad != tokenizer.NONE:
        config = dataclasses.replace(config, model_folder=_path(config.model_folder))
        own_tokeniser = tokeniser(config.model_folder, task)
        known = _model_of(config, own_tokeniser) if config.model_folder else config.model
        size = known.vocabulary if config.model_folder else own_tokeniser.size
        config = dataclasses.replace(config, model=dataclasses.replace(known, vocabulary=size, pad=tokenizer.NONE))
    return dataclasses.replace(run, environment=dataclasses.replace(task, **paths), algorithm=config)


def tokeniser(folder: str, task: Reasoning, budget: Budget | None = None) -> Tokeniser:
    """Tokeniser of a model's folder, for prompts and completions of `task`; bytes where there is no folder.

    Raises RunError, one line, where the folder is not there or can't be read, or `task` needs what it lacks.
    """
    stop = problem_sets.plain(task.stop)
    try:
        replies = {tools.MARK: tools.replies(task.tools)} if task.tools else {}
    except ValueError as error:
        raise RunError(f"--tools: {error}") from error
    if budget is not None:
        replies[budget.step] = budget.reply
    if not folder:
        if task.chat:
            raise RunError("--chat needs the template of a model; give --model-folder, or leave it out")
        return tokenizer.stopped(tokenizer.BYTES, stop, replies)
    if not Path(folder).is_dir():
        raise RunError(
            f"--model-folder {folder} is not there; longhaul fetch smollm2-135m writes one, and hf download NAME "
            "--local-dir FOLDER any of the hub"
        )
    try:
        loaded = huggingface.tokeniser(folder, chat=task.chat, system=problem_sets.plain(task.system))
    except ImportError as error:
        raise RunError(f"--model-folder {folder} needs {error.name}; pip install 'longhaul-rl[llm]'") from error
    except huggingface.HubError as error:
        raise RunError(f"--model-folder: {error}") from error
    return tokenizer.stopped(loaded, stop, replies)


def _model_of(config: GRPOConfig, own_tokeniser: Tokeniser) -> ModelConfig:
    """The model of a folder, which computes as `config` says."""
    try:
        published = huggingface.config(config.model_folder)
    except huggingface.HubError as error:
        raise RunError(f"--model-folder: {error}") from error
    if own_tokeniser.size > published.vocabulary:
        raise RunError(
            f"--model-folder {config.model_folder} has a tokeniser of {own_tokeniser.size} tokens and a model of "
            f"{published.vocabulary}; they must be of one model"
        )
    if not own_tokeniser.ends:
        raise RunError(f"--model-folder {config.model_folder} says nowhere what ends a text; put eos_token_id into its "
                       "generation_config.json")  # fmt: skip
    return computing_as(published, config.model)


def computing_as(shapes: ModelConfig, own: ModelConfig) -> ModelConfig:
    """A model's architecture with the precision, LoRA and memory settings of a run's."""
    kept = {name: getattr(own, name) for name in ("precision", "remat", "lora", "frozen")}
    return dataclasses.replace(shapes, **kept)
