"""The order of the packages, held: who may import whom, who starts without JAX, which libraries are optional.

The rules read the syntax tree (imports inside functions count too); what is imported transitively is asked of a fresh
process. Every rule is also fed a violation, so that it can be seen to fail.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "longhaul"

ROOT = "(root)"
ORDER = (
    *(ROOT, "runtime", "networks", "telemetry", "reasoning", "algorithms", "driving", "envs", "topologies"),
    *("weight_sync", "config", "training", "diagnostics", "bench", "cli"),
)
"""A package imports from itself and from those before it. The files of DOORS are exempt."""

DOORS = ("__init__", "__main__")
"""Files that open the package to Python and to the shell: they import from its end, `__init__` only when it is used."""

MOST_ROOT_FILES = 12

FORBIDDEN = {
    "topologies": ("algorithms", "driving"),
    "algorithms": ("environment", "envs", "driving"),
    "driving/datasets": ("driving/sim", "driving/shards", "environment"),
}
"""Folder -> folders and files that it may not import, whatever the order says."""

NO_JAX = (
    *("driving/datasets", "driving/scenario", "driving/shards", "driving/generator", "driving/scenario_source"),
    *(
        "runtime/devices",
        "runtime/launch",
        "runtime/process_group",
        "runtime/credentials",
        "runtime/shared_memory",
        "runtime/worker_pool",
        "runtime/config_fields",
    ),
    *("spaces", "reasoning/tasks", "reasoning/tokenizer"),
    *("envs/host/registry", "envs/host/vector", "envs/host/gymnasium_vector", "envs/host/numpy_cartpole"),
    *("envs/host/torch_vector", "envs/gymnasium_export"),
    *("topologies/actor_process", "topologies/staleness"),
    *(f"topologies/actor_learner/{name}" for name in ("actor", "actor_pool", "config", "shared_buffers")),
    *(
        f"topologies/inference_server/{name}"
        for name in ("actor", "actor_pool", "config", "grpc_transport", "shm_transport", "wire")
    ),
    "weight_sync",
    *("algorithms/config", "networks/config", "reasoning/config", "driving/sim/config"),
    *("config/run", "config/recipes", "config/population", "training/run_dir", "training/hub"),
    *("training/runs", "training/comparison", "training/board", "cli/board"),
    *("cli/main", "cli/flags", "cli/tables", "cli/launch", "cli/sync"),
    *("cli/run_flags", "cli/train", "cli/status", "cli/data", "cli/bench"),
)
"""Files and folders that start fast and run in worker processes: NumPy only, transitively."""

CORE = {
    *("jax", "optax", "orbax", "numpy", "rich", "google_crc32c", "tensorboardX", "PIL"),
    *("ml_dtypes", "numba", "psutil", "safetensors", "scipy", "yaml"),
}
OPTIONAL = {
    *("stoa", "gymnax", "brax", "jumanji", "mujoco_playground", "navix", "craftax", "gymnasium", "ale_py", "envpool"),
    *("xminigrid", "pgx", "flax"),
    *("torch", "stable_baselines3", "vllm", "nixl"),
    *("ray", "grpc", "pyarrow", "google", "tensorboard", "wandb", "tokenizers", "tensorflow"),
    *("gguf", "jinja2", "reasoning_gym"),
    *("fsspec", "obstore", "mlflow", "swanlab", "trackio", "IPython"),
    *("imageio_ffmpeg", "minari", "shapely", "starlette", "uvicorn"),
    *("llvmlite", "xxhash", "zstandard", "flatbuffers", "onnx", "huggingface_hub"),
}
"""Import names: what pyproject.toml asks for always, and with an extra."""

COMPILED = (
    *("weight_sync/delta/numba_kernels", "weight_sync/xxh3_kernels"),
    *("driving/generator/kernels", "driving/scenario/kernels"),
)
"""Files of numba's functions: they load numba at import, so they are themselves imported inside functions alone."""


class Import(NamedTuple):
    module: str  # "longhaul.driving.scenario.bank", "numpy"
    line: int
    on_load: bool  # False inside a function or under TYPE_CHECKING


FILES = sorted(str(path.relative_to(PACKAGE).with_suffix("")) for path in PACKAGE.rglob("*.py"))


@cache
def is_module(module: str) -> bool:
    inner = "/".join(module.split(".")[1:])
    return module.split(".")[0] == "longhaul" and (not inner or inner in FILES or f"{inner}/__init__" in FILES)


@cache
def imports(source: str, name: str) -> tuple[Import, ...]:
    """Every import of the file `name` ("driving/bank"); `from a import b` gives a.b where there is such a file."""
    package = ["longhaul", *name.split("/")[:-1]]

    def visit(node: ast.AST, on_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, on_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if is_module(inner) else base, node.lineno, on_load)
        else:
            lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            )
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, ast.expr):  # no import is within one, and most nodes are
                    yield from visit(child, on_load and not lazy)

    return tuple(visit(ast.parse(source), True))


def package_of(name: str) -> str:
    """ "driving/sim/traffic" -> "driving"; "rollout" -> "(root)"."""
    return name.split("/")[0] if "/" in name else ROOT


def within(name: str, folders: Iterable[str]) -> bool:
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def violations(name: str, source: str) -> list[str]:
    """Breaches of the rules by the file `name` with the text `source`, one sentence each."""
    if package_of(name) not in ORDER:
        return [f"longhaul/{name}.py is in no package of ORDER (tests/test_layers.py)"]
    rank, found = ORDER.index(package_of(name)), []
    for module, line, on_load in imports(source, name):
        where = f"longhaul/{name}.py:{line} imports {module}"
        head, *rest = module.split(".")
        if head == "longhaul":
            target = "/".join(rest)
            if not is_module(module):
                found.append(f"{where}, which is not there")
                continue
            there = rest[0] if rest and rest[0] in ORDER else ROOT
            if ORDER.index(there) > rank and name not in DOORS:
                found.append(f"{where}: {there} comes after {package_of(name)}")
            for folder, banned in FORBIDDEN.items():
                if within(name, [folder]) and within(target, banned):
                    found.append(f"{where}: {folder} must not know of it")
        elif head in OPTIONAL:
            if on_load and not within(name, COMPILED):
                found.append(f"{where} on loading: an optional dependency belongs inside the function that needs it")
        elif head not in CORE and head not in sys.stdlib_module_names:
            found.append(f"{where}, which pyproject.toml does not ask for")
    return found


def brought_in(modules: list[str], banned: set[str]) -> list[str]:
    """The first of `modules`, imported one after the other in a fresh process, that brings in one of `banned`."""
    program = (
        "import importlib, sys\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
        f"    found = sorted({banned!r} & sys.modules.keys())\n"
        "    if found:\n"
        "        print(f'{module} imports {found}')\n"
        "        break\n"
    )
    return run(program).splitlines()


def run(program: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_packages_import_only_from_those_before_them() -> None:
    assert [line for name in FILES for line in violations(name, (PACKAGE / f"{name}.py").read_text())] == []


def test_the_root_is_small_and_every_package_is_in_the_order() -> None:
    assert len([name for name in FILES if "/" not in name]) <= MOST_ROOT_FILES
    assert {package_of(name) for name in FILES} == set(ORDER)
    assert len(ORDER) <= 15  # 14 packages and the root


def test_files_import_each_other_in_no_circle() -> None:
    edges = {
        name: {
            target
            for each in imports((PACKAGE / f"{name}.py").read_text(), name)
            if each.on_load
            and each.module.startswith("longhaul.")
            and (target := "/".join(each.module.split(".")[1:])) in FILES
        }
        for name in FILES
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in FILES:
        visit(name, ())


def test_files_of_worker_processes_import_no_jax() -> None:
    files = [name for name in FILES if within(name, NO_JAX) and not within(name, COMPILED)]
    assert all(any(within(name, [folder]) for name in files) for folder in NO_JAX)
    modules = [f"longhaul.{name.replace('/', '.').removesuffix('.__init__')}" for name in files]
    assert brought_in(modules, {"jax", "jaxlib"} | OPTIONAL) == []


def test_the_package_starts_with_nothing() -> None:
    assert brought_in(["longhaul"], {"jax", "numpy", *CORE, *OPTIONAL}) == []


@pytest.mark.parametrize(
    ("name", "line", "word"),
    [
        ("types", "from longhaul.runtime import mesh", "comes after"),
        ("types", "def f():\n    import longhaul.cli.main", "comes after"),
        ("driving/scenario/bank", "from ...config.run import Run", "comes after"),
        ("topologies/fused", "from longhaul.algorithms import ppo", "must not know"),
        ("topologies/fused", "from longhaul.driving.sim import simulator", "must not know"),
        ("algorithms/ppo", "def f():\n    from longhaul.environment import vectorise", "must not know"),
        ("algorithms/ppo", "from longhaul import driving", "must not know"),
        ("rollout", "import flax.linen as nn", "optional"),
        ("training/evaluate", "import pyarrow", "optional"),
        ("training/evaluate", "import pandas", "does not ask"),
        ("training/evaluate", "import longhaul.surprise_module", "not there"),
        ("surprise/module", "", "no package"),
    ],
)
def test_the_rules_can_fail(name: str, line: str, word: str) -> None:
    found = violations(name, line)
    assert len(found) == 1 or word == "must not know"
    assert any(word in sentence for sentence in found)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("distributions", "from longhaul import returns"),
        ("driving/datasets/argoverse", "def f():\n    import pyarrow"),
        ("cli/main", "import rich\nfrom longhaul.config.recipes import find"),
        ("driving/scenario/bank", "from .scenario import Scenario"),
    ],
)
def test_the_rules_can_hold(name: str, line: str) -> None:
    assert violations(name, line) == []


def test_a_hidden_import_of_jax_is_seen() -> None:
    assert brought_in(["longhaul.types"], {"jax"}) == ["longhaul.types imports ['jax']"]
