"""The command `train`: its flags, its output, its exit codes. Modules with JAX are imported after the help."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path

from longhaul.algorithms.config import GRPOConfig
from longhaul.cli import flags, run_flags, tables
from longhaul.cli.flags import ALONE, Flag, FlagError
from longhaul.cli.run_flags import CONFIG
from longhaul.cli.status import show_result
from longhaul.config import aliases, files, recipes
from longhaul.config.run import Named, Run, from_dict, to_dict
from longhaul.reasoning.config import Reasoning
from longhaul.runtime import heartbeat, process_group
from longhaul.runtime.closed_pipe import outlasting
from longhaul.runtime.devices import MeshShape, announce, cores, on_cpu, prepare_announced, prepare_devices
from longhaul.runtime.errors import RunError
from longhaul.runtime.files import expanded
from longhaul.runtime.user_modules import is_named
from longhaul.telemetry import screen, tracking
from longhaul.training.run_dir import find_folder, load_run

DRY_RUN = Flag("dry-run", ALONE, False, "compile, print the memory needed, and stop")

EDITS = Flag("take-edits", ALONE, False, "with --resume: take a run.json that was edited since the checkpoint")

PRINT = Flag("print-config", ALONE, False, "print every setting as YAML, as --config takes it, and stop")

SEEN = 30.0
"""Seconds in which a folder that one host made must appear on the others."""


def train(argv: Sequence[str]) -> int:
    """`longhaul train RECIPE [--flags]`, with other processes where the environment's variables name some."""
    if {"-h", "--help", "--help-all"} & set(argv):
        return _train(argv)
    process_group.start(process_group.find(os.environ, tpu=process_group.on_tpu(os.environ)))
    if process_group.together() and not on_cpu():
        import jax

        jax.devices()  # returns once all processes have called it; elsewhere they would call it at different times
    return process_group.follow(_follow) if process_group.index() > 0 else process_group.lead(lambda: _train(argv))


def _follow() -> None:
    """Training in a process other than 0: of the run that process 0 announces."""
    from longhaul.training import loop

    prepare_announced()
    run = from_dict(Run, process_group.hear("run"))
    announced = process_group.hear("folder")
    folder, deadline = Path(announced["folder"]), time.monotonic() + SEEN
    while not (folder / "run.json").is_file():  # a network's file system takes its time
        if time.monotonic() > deadline:
            raise RunError(f"{folder} is not seen here; --runs-dir must be a folder that all hosts share")
        time.sleep(0.1)
    loop.train(run, folder, resumed=announced["resumed"], edited=announced["edited"])


def _train(argv: Sequence[str]) -> int:
    argv = _beginning_with_recipe(argv)
    if not argv or argv[0].startswith("-"):
        if argv and argv[0] in ("-h", "--help"):
            _help()
            return 0
        names = ", ".join(name for name, _ in recipes.described())
        raise FlagError(f"name a recipe first: longhaul train RECIPE [--flags]; there are {names}")
    if argv[0] in recipes.GRIDS:
        from longhaul.cli import scaling

        if process_group.together():
            raise FlagError(f"{argv[0]} is a grid of runs, each in one process; leave longhaul launch out")
        return scaling.run(argv[0], argv[1:], f"train {argv[0]}")
    if process_group.together() and on_cpu():
        _start_together(argv)
    recipe = run_flags.with_algorithm(recipes.recipe(argv[0]), argv)
    parsed = _parsed(recipe, argv[1:])
    if parsed.values["print-config"]:
        print(files.render(_requested_run(recipe, parsed)[0]), end="")
        return 0
    return _dry_run(recipe, parsed) if parsed.values["dry-run"] else _run(recipe, parsed)


def _beginning_with_recipe(argv: Sequence[str]) -> Sequence[str]:
    """Words that begin with the recipe, also where flags come first and --config or --resume names it."""
    if not argv or not argv[0].startswith("-"):
        return argv
    path, run_id = run_flags.unparsed_value(argv, "config"), run_flags.unparsed_value(argv, "resume")
    if path is not None and (name := files.load(expanded(path)).get("recipe")):
        return [str(name), *argv]
    if run_id is not None:
        runs_dir = expanded(run_flags.unparsed_value(argv, "runs-dir") or run_flags.RUNS_DIR.default)
        return [load_run(find_folder(runs_dir, run_id)).recipe, *argv]
    return argv


def _help() -> None:
    print("usage: longhaul train RECIPE [--flags]\n\nTrains, and prints the run's folder first. The recipes:\n")
    tables.listing((f"  {name}", about) for name, about in recipes.described())
    print(
        "\nlonghaul train RECIPE --help shows the flags that matter with their defaults, --help-all shows all; "
        "longhaul train RECIPE --resume ID goes on."
        "\nExit codes: 0 done, 1 failed, 2 bad input, 75 stopped by a signal after saving."
    )


def _parsed(recipe: Run, argv: Sequence[str]) -> flags.Parsed:
    """Flags of `longhaul train RECIPE`. Raises FlagError where they do not go together."""
    table = run_flags.table(recipe)
    table[""] = [CONFIG, PRINT, DRY_RUN, EDITS, *table[""]]
    parsed = flags.parse(
        f"train {recipe.recipe}", recipes.about(recipe.recipe), table, argv, few=run_flags.matter(table, recipe),
        answers=aliases.ANSWERS,
    )  # fmt: skip
    if recipe.recipe in recipes.NO_ENV and not {"env", "resume", "config", "recorded"} & parsed.given:
        raise FlagError(f"which environment? longhaul train {recipe.recipe} --env NAME; longhaul envs lists them")
    if parsed.values["config"] is not None and parsed.values["resume"] is not None:
        raise FlagError("--config and --resume are both given; a run that goes on has its settings, leave --config out")
    return parsed


def _run(recipe: Run, parsed: flags.Parsed) -> int:
    """Training of the requested run, new or resumed; -> the exit code."""
    with screen.stage("importing", plain=False):
        from longhaul.training import api, loop, publish, store

        run, folder = _requested_run(recipe, parsed)
    before = tracking.load_all(folder) if folder else None
    tracked = tracking.chosen(parsed.values, parsed.given, recipe.recipe, before)
    published = publish.chosen(parsed.values, parsed.given, publish.load(folder) if folder else None)
    for line in tracking.idle(parsed.given, tracked):
        tables.progress(line)
    announce(run.shown_devices, run.threads)
    process_group.tell("run", to_dict(run))

    def prepare(of: Path) -> None:
        tracking.save(of, tracked)
        publish.save(of, published)

    asked = run_flags.given_fields(run, parsed)
    if folder is None:
        folder, outcome = api.begin(
            run, Path(parsed.values["runs-dir"]), name=parsed.values["run-name"], suffix=parsed.values["run-suffix"],
            asked=asked, prepare=prepare, sole=True,
        )  # fmt: skip
    else:
        prepare(folder)
        print(store.shown(folder), flush=True)
        edited = parsed.values["take-edits"]
        outcome = loop.train(run, folder, resumed=True, asked=asked, edited=edited, sole=True)
    if outcome.result is not None:
        with outlasting(folder):
            show_result(outcome.result)
            print(f"report: {folder / 'report.html'}")
    return outcome.code


def _start_together(argv: Sequence[str]) -> None:
    """Starts JAX in all processes where a recipe or an algorithm is the user's own.

    Its module is imported before the flags are read, and what it computes would start JAX in this process alone.
    """
    if not any(map(is_named, (argv[0], run_flags.unparsed_value(argv, "algorithm") or ""))):
        return
    mesh, threads = run_flags.unparsed_value(argv, "mesh"), run_flags.unparsed_value(argv, "threads")
    try:
        shape = run_flags.MESH.read(mesh) if mesh else MeshShape(None)
        own = None if threads is None else int(threads)
    except ValueError:
        return  # an error line follows
    everywhere = process_group.count() * (int(os.environ.get(process_group.DEVICES, 0)) or cores())
    devices = everywhere if shape.data is None else shape.data * shape.model
    announce(devices, own)
    prepare_devices(devices, own)
    import jax

    jax.devices()


def _requested_run(recipe: Run, parsed: flags.Parsed) -> tuple[Run, Path | None]:
    """(the resolved Run that the flags request, its folder where it is resumed)."""
    from longhaul.config.resolve import resolve
    from longhaul.training import init_from

    if parsed.values["resume"] is None:
        run = run_flags.chosen(recipe, parsed)
        if run.init_from is not None:
            source = init_from.located(run.init_from, Path(parsed.values["runs-dir"]))
            run = dataclasses.replace(run, init_from=source)
        return resolve(run), None
    folder = find_folder(Path(parsed.values["runs-dir"]), parsed.values["resume"])
    return resolve(run_flags.resumed(folder, recipe, _fit_to_devices(parsed, folder))), folder


def _dry_run(recipe: Run, parsed: flags.Parsed) -> int:
    """Compiles the requested run, and prints what it takes of a device's memory; leaves no folder."""
    from longhaul.config.resolve import named
    from longhaul.diagnostics.compiled_run import compiled
    from longhaul.runtime import device_memory
    from longhaul.training import compilation

    if process_group.together():
        raise FlagError("--dry-run is of one process; leave longhaul launch out")
    if parsed.values["resume"] is None and (shaped := _with_known_shapes(run_flags.chosen(recipe, parsed))) is not None:
        return _print_memory_plans(shaped)
    run, _ = _requested_run(recipe, parsed)
    prepare_devices(run.shown_devices, run.threads)
    if isinstance(run.environment, Named):
        named(run.environment)
    if run.topology != "fused":
        footprint = compilation.learner_footprint(run)
    else:
        program = compiled(run)
        parts = device_memory.parts(program.assembly.algorithm, program.start(run.seed), program.context)
        footprint = device_memory.footprint(program.executable, program.assembly.mesh, parts, program.ahead)
    if footprint is None:
        print("the compiler does not say what memory the run takes")
        return 0
    if refusal := footprint.refusal():
        raise RunError(refusal)
    tables.listing(footprint.rows())
    if warning := footprint.warning():
        tables.progress(warning)
    return 0


def _with_known_shapes(run: Run) -> Run | None:
    """`run`, not resolved, with a model whose shapes are known by name or from a config.json that has no weights beside
    it; None for other runs."""
    from longhaul.config.resolve import computing_as
    from longhaul.diagnostics import memory_plan
    from longhaul.reasoning import huggingface

    config = run.algorithm
    if not isinstance(config, GRPOConfig) or not config.model_folder:
        return None
    folder, shapes = Path(config.model_folder), memory_plan.SHAPES.get(config.model_folder.lower())
    if shapes is None and (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
        try:
            shapes = huggingface.architecture(folder / "config.json")
        except huggingface.HubError as error:
            raise RunError(f"--model-folder: {error}") from error
    if shapes is None:
        return None
    return dataclasses.replace(run, algorithm=dataclasses.replace(config, model=computing_as(shapes, config.model)))


PROMPT = 256
"""Tokens of a prompt where no tokeniser is there to count them."""


def _print_memory_plans(run: Run) -> int:
    """Prints what a run of these shapes takes on devices of several sizes."""
    from longhaul.diagnostics import memory_plan
    from longhaul.reasoning import transformer
    from longhaul.runtime import device_memory

    assert isinstance(run.algorithm, GRPOConfig) and isinstance(run.environment, Reasoning)
    config, group = run.algorithm, run.algorithm.group
    task = run.environment
    load = memory_plan.Load(run.num_envs, PROMPT, run.num_steps, task.wave, bool(task.tools))
    plans = memory_plan.plan(config, load)
    pieces = f"rows of {config.pack} tokens" if config.pack else f"{config.accumulate} micro-batches"
    print(f"{transformer.size(config.model):,} parameters; {run.num_envs} x {group} completions of at most "
          f"{run.num_steps} tokens, prompts of {PROMPT}; {pieces}; several devices by "
          "--fsdp\n")  # fmt: skip
    names = [name for name in next(iter(plans.values())) if name not in ("capacity", "fits")]
    rows = [
        [device, *(device_memory.size(row[name]) for name in names), "fits" if row["fits"] else "does not fit"]
        for device, row in plans.items()
    ]
    tables.table(["a device of", *names, ""], rows)
    return 0


def _fit_to_devices(parsed: flags.Parsed, folder: Path) -> flags.Parsed:
    """`parsed`, on fewer devices where some are gone. Under a launcher alone, which starts again with nobody there."""
    if heartbeat.DESCRIPTOR not in os.environ or on_cpu():
        return parsed

    import jax

    from longhaul.training.checkpoint import resume

    run = load_run(folder)
    shape: MeshShape = parsed.values["mesh"] if "mesh" in parsed.given else run.mesh
    envs: int = parsed.values["num-envs"] if "num-envs" in parsed.given else run.num_envs
    devices = [sum(device.process_index == i for device in jax.devices()) for i in range(process_group.count())]
    assert shape.data is not None
    left = MeshShape(resume.fewer(shape.data, devices, envs, shape.model), shape.model)
    if left == shape:
        return parsed
    count = shape.data * shape.model
    tables.progress(f"{sum(devices)} of {count} devices are there; goes on with {left}")
    return parsed._replace(values=parsed.values | {"mesh": left}, given=parsed.given | {"mesh"})
