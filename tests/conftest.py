"""Surroundings of every test: the CPU, four forced devices, no implicit rank promotion, real logs where they are.

Warnings are errors (pyproject.toml). The persistent compilation cache stays off: a test that loads a program of
yesterday proves nothing about the code of today, and an entry half-written by a killed worker would break the next run.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import psutil
import pytest

# Before JAX starts, and inherited by the processes that tests start. NPROC sizes XLA's pool of CPU threads (otherwise:
# one a core, or one a device). On two cores and one device that pool has two threads, and a vmapped training run or a
# chain of collectives can hang there, all threads waiting for one another; four are enough. Idle threads sleep, so that
# workers of pytest-xdist do not slow each other down by them.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "4"
os.environ["LONGHAUL_CACHE"] = "off"
# One thread each for the libraries that would otherwise take all cores in each worker of pytest-xdist.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# The processes that tests start find this project, and what the user's PYTHONPATH has beside it (the only way in where
# nothing can be installed).
ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
# A run of the tests must not depend on what the user's shell has set, nor ask for a terminal.
for variable in ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_X64", "JAX_DISABLE_JIT", "JAX_DEBUG_NANS", "XLA_FLAGS"):
    os.environ.pop(variable, None)
# Most of what tests take is the compiler's. LLVM's loop strength reduction is half of a program with a replay; it moves
# the arithmetic of addresses, and no number. JAX 0.10's newer emitters of fusions take a third of all (test_ppo.py and
# driving/sim/test_simulator.py: 170 CPU-seconds, 113 without). LLVM's optimisation is a quarter of the simulator's
# (test_simulator.py and test_metrics.py: 71, 51 without). The search for loops to simplify is another quarter (one
# program of the simulator: 6.6 CPU-seconds, 4.6 without). `make test` does without them; `make test-all` and pytest by
# itself compile as users do, and so does a test with the fixture `optimised`, but for XLA's flags. A flag that an XLA
# does not know ends the process, so only where it is known. A program that is split for several threads of the compiler
# costs one more copy of each function (PPO's update on a probe: 2.26 CPU-seconds, 1.93 in one piece), and the workers
# have no core to spare.
os.environ["XLA_FLAGS"] = "--xla_backend_extra_options=-disable-lsr"
if version("jax").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
if os.environ.get("QUICK_COMPILE"):
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # Of JAX's own: checks of mutable arrays, of which there are none here, and where in the source an operation is.
    os.environ["JAX_MUTABLE_ARRAY_CHECKS"] = "0"
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    if version("jax").startswith("0.10."):
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_disable_hlo_passes=simplify-while-loops"

# Where the tests have no bytecode yet, one worker makes it and the others wait: each would make all of it, which is a
# third of what a worker takes until its first test. A file that is there anyhow is the lock.
COLLECTING = open(ROOT / "pyproject.toml")  # noqa: SIM115  (until the tests are collected)
LAST = max((ROOT / "tests").rglob("test_*.py"))
if "PYTEST_XDIST_WORKER" in os.environ and not list(Path(cache_from_source(LAST)).parent.glob(f"{LAST.stem}.*")):
    fcntl.flock(COLLECTING, fcntl.LOCK_EX)

DEVICES = 4
ROOM = max(3 << 29, psutil.virtual_memory().available // 3)
"""Bytes that each of two workers may grow by before it drops the programs of earlier files: later files compile anew
what they need of them, and dropping takes four to eight seconds."""

import jax  # noqa: E402  (the environment must be set first)
import jaxlib  # noqa: E402

from longhaul.telemetry import screen  # noqa: E402
from longhaul.training import evaluate  # noqa: E402
from tests.helpers import shared_programs  # noqa: E402

if "--xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]:
    shared_programs.share()
    # A traceback for each operation that is traced. Without it and the two settings above all tests took 1,032
    # CPU-seconds, and 1,061 with them and 34 tests fewer.
    jaxlib._jax.set_tracebacks_enabled(False)
jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing makes objects by the million, and the collector looks at all of them again and again: a fifth of what tests
# take (test_ppo.py and test_actor_critic.py: 34 CPU-seconds, 27 with these two lines).
gc.freeze()
gc.set_threshold(50_000, 20, 50)
screen.PLAIN_SOON = 600.0  # a line after some seconds would depend on the machine
assert len(jax.devices()) == DEVICES  # from here on: a run that a test makes must not be the one that decides

TOGETHER = {
    "tests/algorithms/test_ppo.py": "actor_critics",
    "tests/algorithms/test_impala.py": "actor_critics",
    "tests/driving/sim/test_evasion.py": "simulators",
    "tests/driving/sim/test_insertion.py": "simulators",
    "tests/driving/sim/test_safety.py": "simulators",
    "tests/driving/sim/test_simulator.py": "simulators",
    "tests/driving/sim/test_traffic.py": "simulators",
    "tests/end_to_end/test_resume.py": "small_runs",
    "tests/telemetry/trackers/test_wandb.py": "small_runs",
    "tests/topologies/actor_learner/test_host_rollout.py": "small_runs",
    "tests/topologies/actor_learner/test_learner.py": "small_runs",
    "tests/topologies/actor_learner/test_placement.py": "small_runs",
    "tests/training/checkpoint/test_resume.py": "small_runs",
    "tests/training/test_api.py": "corridor_runs",
    "tests/training/test_export.py": "corridor_runs",
    "tests/training/test_hub.py": "normalised_runs",
    "tests/training/test_init_from.py": "normalised_runs",
    "tests/training/test_loop.py": "small_runs",
    "tests/training/test_periodic_evaluation.py": "small_runs",
    "tests/training/test_publish.py": "small_runs",
}
"""Files whose tests share compiled programs, which take a quarter of a minute to compile: one worker runs them all."""


def pytest_collection_finish() -> None:
    COLLECTING.close()  # and the lock is free
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each file to one worker, as `--dist loadfile` does; and files of one name in `TOGETHER` to the same."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return TOGETHER.get(file, file)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def logs() -> Path:
    """The folder of real driving logs: LONGHAUL_DATA, else ../shared/data beside the project. Skips without one."""
    folder = Path(os.environ.get("LONGHAUL_DATA", "../shared/data"))
    folder = folder if folder.is_absolute() else ROOT / folder
    if not folder.is_dir():
        pytest.skip(f"no real logs at {folder}: set LONGHAUL_DATA to a folder with womd/ and gpudrive/")
    return folder


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """An empty folder for runs, the test's own."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def longhaul(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(words) -> (exit code, stdout, stderr) of the command in this process, in an empty folder."""
    from longhaul.cli import main  # after the hook above

    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = main.main(list(words))
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def quick_runs() -> Iterator[pytest.MonkeyPatch]:
    """Runs of a module's tests share what is compiled, by `make_quick`."""
    from tests.helpers.small_runs import make_quick

    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        yield patch


def resident() -> int:
    return psutil.Process().memory_info().rss


bound = 1 << 29
"""Bytes resident when programs were dropped last. Much stays resident that is freed: past a fixed bound every file
compiled all anew, and the collector took half a second at its end (in 150 of 245 files: 113 CPU-seconds)."""


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    """What JAX keeps of a file's programs goes at its end, where a worker has grown by `ROOM` since it last did.

    The collector leaves alone what stays: each collection that a test asks for would take a second.
    """
    global bound
    yield
    if resident() > bound + ROOM:
        shared_programs.PROGRAMS.clear()
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()  # which the thresholds above all but leave out
        with suppress(AttributeError):  # where the C library is not GNU's
            ctypes.CDLL(None).malloc_trim(0)  # of 2.1 GB 0.6 are left; without it, about 2
        bound = resident()
    gc.freeze()


DRAWN = evaluate.filmed


@pytest.fixture(scope="session", autouse=True)
def without_films() -> Iterator[None]:
    """A run draws no episodes at its end, which take two thirds of a small one, unless the test has `filmed`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "filmed", lambda run, *policies: [])
        yield


@pytest.fixture
def filmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw an episode of each policy at their end, as a user's do."""
    monkeypatch.setattr(evaluate, "filmed", DRAWN)


@pytest.fixture
def optimised() -> Iterator[None]:
    """Programs of the test are optimised as users' are: two programs of the same sums then agree to the last bit."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()  # what an earlier test compiled is not
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with NPROC as above: a run that an earlier one made in this process has set its own."""
    monkeypatch.setenv("NPROC", "4")
