"""Less memory for the same numbers: rematerialisation, accumulation, bfloat16, donation, and what is told of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.cli import flags, main, run_flags
from longhaul.config import recipes
from longhaul.diagnostics.program import Program, compiled
from longhaul.networks import actor_critic
from longhaul.networks.config import REMATS
from longhaul.networks.precision import POLICIES
from longhaul.runtime import device_memory
from longhaul.runtime.errors import RunError
from longhaul.topologies import fused
from longhaul.training import loop, run_dir
from tests.helpers.quick import QUICK, quick
from tests.helpers.small_runs import begin, small

SEEN = {"ego": jax.ShapeDtypeStruct((3,), jnp.float32), "items": jax.ShapeDtypeStruct((5, 4), jnp.float32)}
ROWS = 24

KINDS: dict[str, dict[str, Any]] = {
    "mlp": {"torso": "mlp"},
    "shared": {"torso": "mlp", "shared": True},
    "deepset": {"torso": "deepset"},
    "recurrent": {"torso": "deepset", "memory": 6},
    "latent": {"torso": "latent"},
    "mtr": {"torso": "mtr"},
}


def drawn(tree: Any, *lead: int, seed: int = 0, scale: float = 0.5) -> Any:
    """Numbers like the shapes of a pytree, with further axes in front."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=scale, size=(*lead, *x.shape)), jnp.float32), tree)


def objective(kind: str, remat: str, precision: str = "fp32") -> tuple[Any, Any]:
    """(parameters with life in them, what is to be descended: a loss of all that the network gives)."""
    network = actor_critic.actor_critic(
        SEEN, 3, sizes=(16, 16), activation="gelu", remat=remat, precision=precision, **KINDS[kind]
    )
    params, seen = drawn(jax.eval_shape(network.init, jax.random.key(0))), drawn(SEEN, ROWS, seed=1)
    memory = drawn(jax.eval_shape(lambda: network.memory(ROWS)), seed=2)

    def loss(params: Any) -> jax.Array:
        found = jax.tree.leaves(network.apply(params, memory, seen))
        return sum((jnp.sum(jnp.square(x)) for x in found), start=jnp.float32(0.0))

    return params, loss


def kept(kind: str, remat: str) -> int:
    """Bytes that the way forward keeps for the gradient, beside the parameters, by their shapes."""
    params, loss = objective(kind, remat)
    back = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(back))


def relative(one: Any, other: Any) -> float:
    """Relative distance of two pytrees."""
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    apart = sum(float(np.sum(np.square(np.asarray(a, np.float64) - np.asarray(b)))) for a, b in pairs)
    return (apart / sum(float(np.sum(np.square(np.asarray(b, np.float64)))) for _, b in pairs)) ** 0.5


# --------------------------------------------------------------------------------------------------- rematerialisation

DEAR = ("latent", "mtr")
"""Torsos that take long to compile; a wayformer's parts are theirs."""

CASES = [
    pytest.param(kind, remat, marks=[pytest.mark.slow] * (kind in DEAR))
    for kind, remat in [*((kind, "full") for kind in KINDS), ("shared", "dots"), ("latent", "dots-no-batch")]
]


@cache
def descended(kind: str, remat: str) -> Any:
    params, loss = objective(kind, remat)
    slope = jax.grad(loss)
    assert ("remat" in str(jax.make_jaxpr(slope)(params))) == (remat != "none")
    return quick(slope)(params)


@pytest.mark.parametrize(("kind", "remat"), CASES)
def test_what_is_computed_again_gives_the_same_gradient(kind: str, remat: str) -> None:
    assert relative(descended(kind, remat), descended(kind, "none")) < 1e-6


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in DEAR)) for kind in KINDS])
def test_a_policy_keeps_what_it_says(kind: str) -> None:
    """Nothing but inputs, then products with kernels too, then all products, then everything."""
    none, full, dots, projections = (kept(kind, remat) for remat in REMATS)
    assert full < none
    assert full <= projections <= dots
    if kind in DEAR:
        assert full < 0.6 * none, "a block's input is a small part of what it computes"
        assert projections < dots < none, "attention's products are the difference"


def test_every_policy_has_a_flag_and_an_unknown_one_is_named() -> None:
    assert ("none", *POLICIES) == REMATS
    with pytest.raises(ValueError, match="remat is 'some'; it must be one of none, full, dots, dots-no-batch"):
        actor_critic.actor_critic(SEEN, 3, remat="some")


@pytest.mark.parametrize(
    ("words", "remat", "accumulate"),
    [
        ([], "none", None),
        (["--remat", "dots"], "dots", None),
        (["--remat=dots-no-batch", "--accumulate", "4"], "dots-no-batch", 4),
        (["--remat", "--micro-batches", "2"], "full", 2),
        (["--micro-batches=8", "--remat"], "full", 8),
        (["--remat", "true"], "full", None),
        (["--remat=false"], "none", None),
        (["--no-remat"], "none", None),
    ],
)
def test_flags_as_they_are_and_as_a_switch_once_was(words: list[str], remat: str, accumulate: int | None) -> None:
    recipe = recipes.recipe("driving")
    run = run_flags.chosen(recipe, flags.parse("train driving", "", run_flags.table(recipe), words))
    assert (run.algorithm.remat, run.algorithm.accumulate) == (remat, accumulate)


@pytest.mark.parametrize(("then", "now"), [(False, "none"), (True, "full")])
def test_run_files_from_before_still_say_how_to_go_on(tmp_path: Path, then: bool, now: str) -> None:
    run = small()
    run_dir.save_run(tmp_path, run, {})
    written = json.loads((tmp_path / "run.json").read_text())
    written["run"]["algorithm"]["remat"] = then
    del written["run"]["algorithm"]["accumulate"]
    (tmp_path / "run.json").write_text(json.dumps(written))
    assert run_dir.load_run(tmp_path) == replace(run, algorithm=replace(run.algorithm, remat=now, accumulate=None))


# -------------------------------------------------------------------------------------------------------- accumulation


@pytest.mark.slow
def test_memory_falls_as_shapes_foretell() -> None:
    """A quarter of the rows at once need a quarter of what is kept; blocks computed again keep their inputs alone."""
    rows, need = 512, {}
    for remat, accumulate in (("none", 1), ("none", 4), ("full", 1)):
        network = actor_critic.actor_critic(SEEN, 3, torso="latent", sizes=(32, 32, 32), remat=remat)
        params, seen = jax.eval_shape(network.init, jax.random.key(0)), drawn(SEEN, accumulate, rows // accumulate)

        def slope(params: Any, seen: Any, network: Any = network) -> Any:
            def add(total: Any, part: Any) -> tuple[Any, None]:
                one = jax.grad(lambda p: jnp.sum(network.apply(p, (), part)[0]))(params)
                return jax.tree.map(jnp.add, total, one), None

            return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), seen)[0]

        found = device_memory.need(jax.jit(slope).lower(params, seen).compile(compiler_options=QUICK))
        assert found is not None
        need[remat, accumulate] = found.temporaries
    assert 0.2 < need["none", 4] / need["none", 1] < 0.35
    assert need["full", 1] < 0.6 * need["none", 1]


# ---------------------------------------------------------------------------------------------- donation and footprint


@pytest.fixture(scope="module")
def made() -> Program:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPROC", "4")
        return compiled(small(devices=2))


@pytest.mark.slow
def test_all_of_progress_is_donated(made: Program) -> None:
    """Compiled program: each part has its result in its place, and no byte exists twice."""
    progress = made.start(0)
    text = made.text().splitlines()[0]
    aliases = re.findall(r"\{[\d,\s]*\}: \((\d+), \{\}, (?:may|must)-alias\)", text)
    assert sorted(map(int, aliases)) == list(range(len(jax.tree.leaves(progress))))
    need = device_memory.need(made.executable)
    assert need is not None
    assert need.donated == device_memory.held(progress)
    assert need.arguments - need.donated == device_memory.held(made.context) + 4, "the bank, and the number of updates"


def test_parts_are_those_of_one_device(made: Program) -> None:
    progress = made.start(0)
    parts = device_memory.parts(made.assembly.algorithm, progress, made.context)
    assert parts["parameters"] == 4 * made.parameters
    assert 2 * parts["parameters"] < parts["optimiser"] < 2 * parts["parameters"] + 64, "two moments and some counters"
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(progress.carry))
    assert 2 * parts["environments"] == whole, "each of two devices has half of them"
    assert parts["bank"] == 0


def test_the_footprint_is_told_before_the_first_update(
    made: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and memory.json; a warning where it is tight; an error, exit code 2 and no folder where it can't fit."""
    need = device_memory.need(made.executable)
    assert need is not None
    program = fused.Program(made.executable, made.assembly.mesh)
    monkeypatch.setattr(fused, "compiled", lambda *args, **words: program)
    monkeypatch.setattr(loop, "evaluations", lambda *args: iter(()))
    monkeypatch.setattr(device_memory, "memory_of", lambda device: 2 * need.total * 20 // 19)
    run = small(devices=2, total_steps=8 * 16 * 2)
    found = begin(run, tmp_path / "tight").result
    told = capsys.readouterr().err
    assert told.index("memory a device: ") < told.index("agent steps"), "before the first record"
    assert "warning: that is 95% of what a device has" in told
    written = json.loads((tmp_path / "tight" / device_memory.FILE).read_text())
    assert found is not None
    assert found["memory"] == written
    assert written["needed"] == need.total
    assert written["share"] == pytest.approx(0.95, rel=1e-3)

    monkeypatch.setattr(device_memory, "memory_of", lambda device: 2 * (need.total - 1))
    words = ["train", "cartpole", "--runs-dir", str(tmp_path / "runs"), "--run-name", "large", "--mesh", "data=2"]
    words += ["--num-envs", "8", "--num-steps", "16", "--hidden-dim", "8", "--num-minibatches", "2", "--block", "2"]
    assert main.main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"needs {need.total:,} bytes on each of 2 device(s), and one has {need.total - 1:,}" in line
    assert all(remedy in line for remedy in ("--num-envs", "--accumulate", "--remat", "--mesh"))
    assert not (tmp_path / "runs" / "large").exists()


@pytest.mark.slow
def test_a_dry_run_tells_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "cartpole", "--dry-run", "--runs-dir", str(tmp_path / "runs"), "--mesh", "data=1"]
    words += ["--num-envs", "4", "--num-steps", "8", "--hidden-dim", "8", "--num-layers", "1"]
    assert main.main(words) == 0
    rows = dict(re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines())
    assert rows["parameters"] == "428 B", "two towers of 4 x 8 + 8, and heads of 8 x 2 + 2 and 8 + 1"
    assert rows["memory a device"].endswith(f"of {device_memory.size(device_memory.memory_of(jax.devices()[0]) or 0)}")
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_prepares_the_devices_of_both_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []

    def prepare(devices: int, threads: int | None) -> None:
        prepared.append(devices)
        raise RunError("far enough")

    monkeypatch.setattr(loop, "prepare_devices", prepare)
    assert main.main(["train", "cartpole", "--dry-run", "--mesh", "data=1,model=2"]) == 2
    assert prepared == [2]
