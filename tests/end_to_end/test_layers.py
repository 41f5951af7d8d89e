"""The design's layers, held: who may import whom, who stays free of JAX, who may import flax.

The rules read the syntax tree (imports inside functions count too); what is imported transitively is asked of a fresh
process. Every rule is also fed a violation, so that it can be seen to fail.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "longhaul"

# Layer, then its files. A file may import from lower layers, and from the files named before it on its own line;
# an indented line goes on with the one before.
TABLE = """
0  __init__ forms types pulse telemetry randomness leaves staging pages records workers caches compilation clock
   stopping terminal tracking tracker
0  algorithms/__init__
0  datasets/__init__ datasets/log
0  driving/__init__
0  envs/__init__ envs/hackmatrix/__init__
0  topologies/__init__
0  central/__init__
0  actors/__init__
0  scaling/__init__
0  reasoning/__init__ reasoning/tokens reasoning/tasks reasoning/questions
   reasoning/optimiser
0  verdicts
0  sync/__init__ sync/reference sync/streams sync/intake sync/kernels sync/packing sync/loops sync/digests
   sync/codec sync/delta
0  sync/layout sync/plan sync/cost
1  trends health watch
1  precision returns distributions encoders convolutions perceptron pooling networks dial normalise mesh partition
   shards hosts shuffle provenance footprint membership
   actors/tickets actors/memory actors/doorbell actors/lane actors/desk actors/worker actors/children actors/far
   actors/crew actors/settings actors/slots
1  vectors central/credentials
1  priorities replay
1  sync/manifest sync/images sync/ledger sync/protocol sync/wire sync/files
1  datasets/projection
1  scaling/law scaling/ceiling scaling/forecast scaling/rules scaling/compiled scaling/instructions scaling/trace
   scaling/chips scaling/plan
1  datasets/wire datasets/soundness datasets/tfrecord datasets/plain_pickle datasets/outlines datasets/geopackage
1  driving/scenario driving/codes driving/tiles driving/polylines driving/edges driving/lanes driving/routes
   driving/guides driving/roads driving/extents driving/compile driving/bank
2  environment rollout recordings
2  reasoning/model reasoning/hub reasoning/decoding reasoning/checking reasoning/sampling reasoning/gate
   reasoning/problems reasoning/quality reasoning/marking reasoning/drawing reasoning/thinking
2  central/states central/wire central/frames central/lane central/streaming central/grpc_lane central/shared_lane
   central/batcher central/places central/crew central/episodes central/trajectories central/inference central/server
   central/settings
3  sync/changes sync/chain sync/buffers sync/lanes/base sync/lanes/sockets sync/lanes/shared
   sync/lanes/tcp sync/torch_arrays sync/lanes/folder sync/lanes/group sync/lanes/nixl sync/lanes/__init__ sync/engine
   sync/receiver sync/geometry sync/probe sync/relay sync/rates sync/producer sync/consumers sync/vllm
2  datasets/packing datasets/shards datasets/kept
2  datasets/womd datasets/womd_scenario datasets/gpudrive datasets/scenarionet datasets/argoverse
2  driving/bodies driving/flow driving/generator
2  driving/geometry driving/roadmap driving/conduct driving/dynamics driving/kinds driving/actions driving/tables
   driving/room
2  driving/scores driving/behaviour driving/realism
3  datasets/nuplan_map datasets/nuplan datasets/sources datasets/inspection datasets/scenarios datasets/journal
3  driving/traffic driving/features driving/perception driving/observation driving/objectives driving/measures
   driving/goals driving/conditioning driving/drivers driving/config driving/simulator
3  driving/recording driving/frames driving/player driving/render driving/overview
3  envs/hackmatrix/world envs/hackmatrix/boards envs/hackmatrix/actions envs/hackmatrix/turn envs/hackmatrix/reward
   envs/hackmatrix/observation envs/hackmatrix/canonical_world envs/hackmatrix/canonical_boards
   envs/hackmatrix/canonical_actions envs/hackmatrix/canonical_turn envs/hackmatrix/canonical_undo
   envs/hackmatrix/canonical_reward envs/hackmatrix/canonical envs/hackmatrix/game envs/hackmatrix/view
   envs/hackmatrix/hints envs/hackmatrix/screen
   envs/probes envs/classic envs/suite_worlds envs/suites envs/registry
   envs/host_spaces envs/host_gymnasium envs/host_numpy envs/batched envs/host_torch envs/host_jax
3  algorithms/actor_critic algorithms/values algorithms/flat algorithms/ppo algorithms/impala algorithms/bc
   algorithms/apg algorithms/grpo
   algorithms/off_policy algorithms/pqn algorithms/sac algorithms/dqn algorithms/td3 learners population
3  checkpoint
4  datasets/convert datasets/stream
4  topologies/fused topologies/population topologies/actors topologies/central worlds curves legacy matches spectating
   envs/host_driving envs/host envs/gym_export hosted central/client central/far
5  report intervals experiment refusals prompting members run folders feed ahead resumption acting serving evaluation
   resimulation poison policies member_records ranking ending publishing training
   scaling/page
   scaling/grid
6  driving_recipes recipes workloads peers acting_workloads central_workloads replay_workloads reasoning_workloads
   sync_workloads bench scaling/speed
   sync_ways sync_peers sync_layouts
   scaling/profile scaling/subject scaling/agreement scaling/checks
7  printing live flags meanings settings scaling/command scaling/speed_command scaling/profile_command
   scaling/elsewhere scaling/plan_command scaling/doctor sync_checkpoints sync_shell sync_command
   commands assessment reason_command console play gang processes cluster launch actor_command cli
   __main__
"""

NO_JAX = (
    *("datasets/*", "actors/*", "workers", "caches", "worlds", "cli", "flags", "printing", "hosts", "launch", "pulse"),
    *("sync_command", "sync_shell", "sync_ways", "sync_peers"),
    *("forms", "vectors", "gang", "processes", "cluster", "membership", "envs/gym_export"),
    *(f"envs/{name}" for name in ("host", "host_spaces", "host_gymnasium", "host_numpy", "host_torch", "batched")),
    *(
        f"central/{name}"
        for name in ("states", "wire", "frames", "credentials", "lane", "streaming", "grpc_lane", "shared_lane")
    ),
    *(f"sync/{name}" for name in ("manifest", "images", "protocol", "wire", "files", "buffers", "lanes/*")),
    *(f"sync/{name}" for name in ("engine", "changes", "receiver", "geometry", "probe", "relay", "producer")),
    *(f"sync/{name}" for name in ("consumers", "vllm", "chain", "torch_arrays")),
    *(
        "central/batcher",
        "central/places",
        "central/crew",
        "central/episodes",
        "central/client",
        "central/far",
        "central/settings",
    ),
    *(f"reasoning/{name}" for name in ("tokens", "tasks", "questions", "optimiser")),
    *(f"driving/{name}" for name in ("scenario", "compile", "generator", "roads", "lanes", "bank")),
    *(f"sync/{name}" for name in ("reference", "loops", "codec", "delta", "layout", "plan", "cost")),
)
"""Files that start fast and run in worker processes: NumPy only, transitively."""

FORBIDDEN = {
    "topologies/*": ("algorithms", "envs", "driving"),
    "algorithms/*": ("environment", "envs", "driving", "datasets"),
    "datasets/*": ("driving/simulator", "environment"),
}
"""What a folder may not import, whatever the layers say."""

CORE = {
    *("jax", "optax", "orbax", "flax", "numpy", "tyro", "rich", "matplotlib", "jaxtyping", "google_crc32c"),
    "tensorboardX",
    "PIL",
    "ml_dtypes",
}
OPTIONAL = {
    *("stoa", "gymnax", "brax", "jumanji", "mujoco_playground", "navix", "craftax", "gymnasium", "ale_py", "envpool"),
    *("xminigrid", "pgx"),
    *("torch", "stable_baselines3", "vllm", "nixl"),
    *("ray", "grpc", "pyarrow", "tensorboard", "wandb", "tokenizers", "safetensors", "tensorflow"),
    *("beartype", "imageio_ffmpeg"),
    *("numba", "llvmlite", "xxhash", "zstandard"),
}
"""Import names: what pyproject.toml asks for always, and with an extra."""

COMPILED = {
    (f"sync/{name}", library)
    for name in ("kernels", "packing", "streams", "intake")
    for library in ("numba", "llvmlite")
}
"""A file of numba's functions is numba's on loading; so it is itself imported inside functions alone."""


class Place(NamedTuple):
    layer: int
    before: frozenset[str]  # the files named before it on its line


class Import(NamedTuple):
    module: str  # "longhaul.driving.scenario.bank", "numpy"
    line: int
    on_load: bool  # False inside a function or under TYPE_CHECKING


def read_table(table: str) -> dict[str, Place]:
    places = {}
    for layer, *files in (line.split() for line in table.strip().replace("\n  ", " ").splitlines()):
        for i, name in enumerate(files):
            assert name not in places, f"{name} stands twice in the table"
            places[name] = Place(int(layer), frozenset(files[:i]))
    return places


PLACES = read_table(TABLE)


def imports(source: str, name: str) -> Iterator[Import]:
    """Every import of the file `name` ("driving/bank"); `from a import b` gives a.b where the table has such a file."""
    package = ["longhaul", *name.split("/")[:-1]]

    def visit(node: ast.AST, on_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, on_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if as_file(inner) in PLACES else base, node.lineno, on_load)
        else:
            lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            )
            for child in ast.iter_child_nodes(node):
                yield from visit(child, on_load and not lazy)

    yield from visit(ast.parse(source), True)


def as_file(module: str) -> str:
    """ "longhaul.driving.scenario.bank" -> "driving/bank"; "longhaul.driving" -> "driving/__init__"; others -> ""."""
    head, *rest = module.split(".")
    if head != "longhaul":
        return ""
    inner = "/".join(rest)
    return f"{inner}/__init__".lstrip("/") if not inner or (PACKAGE / inner).is_dir() else inner


def matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(pattern.removesuffix("*").rstrip("/") + "/")


def violations(name: str, source: str) -> list[str]:
    """What the file `name` with the text `source` does against the rules, one sentence each."""
    if name not in PLACES:
        return [f"longhaul/{name}.py stands in no layer: add it to TABLE in tests/end_to_end/test_layers.py"]
    found = []
    for module, line, on_load in imports(source, name):
        where = f"longhaul/{name}.py:{line} imports {module}"
        root, target = module.split(".")[0], as_file(module)
        if target:
            there = PLACES.get(target)
            if there is None:
                found.append(f"{where}, which stands in no layer")
            elif there.layer >= PLACES[name].layer and target not in PLACES[name].before:
                found.append(f"{where} (layer {there.layer}) from layer {PLACES[name].layer}: only downwards")
            for folder, banned in FORBIDDEN.items():
                if matches(name, folder) and any(matches(target, pattern) for pattern in banned):
                    found.append(f"{where}: {folder} must not know of it")
        elif root == "flax" and name != "networks":
            found.append(f"{where}: only networks.py imports flax")
        elif root in OPTIONAL:
            if on_load and (name, root) not in COMPILED:
                found.append(f"{where} on loading: an optional dependency belongs inside the function that needs it")
        elif root not in CORE and root not in sys.stdlib_module_names:
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
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


FILES = sorted(str(path.relative_to(PACKAGE).with_suffix("")) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_a_file_keeps_to_its_layer(name: str) -> None:
    assert violations(name, (PACKAGE / f"{name}.py").read_text()) == []


def test_the_readers_and_makers_of_scenarios_import_no_jax() -> None:
    files = [name for name in FILES if any(matches(name, pattern) for pattern in NO_JAX)]
    assert "datasets/log" in files
    modules = [f"longhaul.{name.replace('/', '.').removesuffix('.__init__')}" for name in files]
    assert brought_in(modules, {"jax", "jaxlib", "flax"} | OPTIONAL) == []


def test_the_package_starts_with_nothing() -> None:
    assert brought_in(["longhaul"], {"jax", "numpy", *CORE, *OPTIONAL}) == []


@pytest.mark.parametrize(
    ("name", "line", "word"),
    [
        ("types", "from longhaul import returns", "downwards"),
        ("types", "def f():\n    import longhaul.cli.main", "downwards"),
        ("returns", "from longhaul.distributions import action", "downwards"),
        ("driving/bank", "from ..run import Run", "downwards"),
        ("topologies/fused", "from longhaul.algorithms import ppo", "must not know"),
        ("topologies/fused", "from longhaul.envs.probes import credit", "must not know"),
        ("algorithms/ppo", "def f():\n    from longhaul.environment import vectorise", "must not know"),
        ("algorithms/ppo", "from longhaul import driving", "must not know"),
        ("rollout", "import flax.linen as nn", "only networks.py"),
        ("evaluation", "import pyarrow", "optional"),
        ("evaluation", "import pandas", "does not ask"),
        ("evaluation", "import longhaul.surprise_module", "no layer"),
        ("surprise_module", "", "no layer"),
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
        ("networks", "import flax.linen as nn"),
        ("datasets/argoverse", "def f():\n    import pyarrow"),
        ("cli", "import tyro\nfrom longhaul.config.recipes import find"),
        ("driving/bank", "from .scenario import Scenario"),
    ],
)
def test_the_rules_can_hold(name: str, line: str) -> None:
    assert violations(name, line) == []


def test_a_hidden_import_of_jax_is_seen() -> None:
    assert brought_in(["longhaul.types"], {"jax"}) == ["longhaul.types imports ['jax']"]
