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
import optax
import pytest

from longhaul.algorithms import minibatch, ppo
from longhaul.algorithms.actor_critic import State
from longhaul.algorithms.config import PPOConfig
from longhaul.algorithms.context import Context
from longhaul.cli import flags, main, run_flags
from longhaul.config import recipes
from longhaul.config.resolve import resolve
from longhaul.diagnostics.compiled_run import Subject, subject
from longhaul.networks import actor_critic
from longhaul.networks.precision import POLICIES, REMATS
from longhaul.runtime import device_memory
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError
from longhaul.spaces import Discrete
from longhaul.topologies import fused
from longhaul.training import finish, run_dir
from longhaul.types import Rollout, Spec, Successors
from tests.helpers.small_runs import begin, small

QUICK = {"xla_backend_optimization_level": 0}
"""Most of these programs run once; compiling them takes longer than running them ever does."""

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
    """How far two pytrees lie apart, against the length of the other."""
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
    return jax.jit(slope, compiler_options=QUICK)(params)


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
    assert run_flags.CHOICES["remat"] == ("none", *POLICIES)
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

STEPS, COLUMNS = 6, 8
STEP = PPOConfig(
    hidden_dim=16, num_layers=1, num_minibatches=1, update_epochs=1, max_grad_norm=1e9, lr=1e-2, chunk=4096
)  # fmt: skip
"""One step on the whole batch: Adam's first moment is then a tenth of the gradient."""

LEARNERS = {
    "mlp": STEP,
    "memory": replace(STEP, memory=6),
    "encoder": replace(STEP, torso="latent", hidden_dim=32),
    "lean": replace(STEP, shared=True, precision="bf16", remat="full"),
}


def learner(config: PPOConfig) -> tuple[Any, State, Rollout]:
    """(learn, a state, experience of which some steps do not count)."""
    spec = Spec(SEEN, Discrete(3), agents=2)
    algorithm = ppo.ppo(spec, config, Context(updates=10, mean=meshes.identity))
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(algorithm.init, jax.random.key(0)))
    state = state._replace(params=drawn(state.params, scale=0.3))
    rng = np.random.default_rng(3)
    raw = jnp.asarray(rng.integers(0, 3, (STEPS, COLUMNS)), jnp.int32)
    ends = jnp.asarray(rng.random((STEPS, COLUMNS)) < 0.2)
    data = Rollout(
        drawn(SEEN, STEPS, COLUMNS, seed=4), raw, drawn(jnp.zeros(()), STEPS, COLUMNS, seed=5), ends,
        jnp.zeros_like(ends), jnp.asarray(rng.random((STEPS, COLUMNS)) < 0.7),
        {"raw": raw, "log_prob": jnp.log(jnp.asarray(rng.uniform(0.2, 0.5, (STEPS, COLUMNS)), jnp.float32))},
        Successors(drawn(SEEN, COLUMNS, seed=6), drawn(SEEN, 1, COLUMNS)),
        drawn(jax.eval_shape(lambda: algorithm.memory(COLUMNS)), seed=7), jnp.int32(0),
    )  # fmt: skip
    return jax.jit(algorithm.learn, compiler_options=QUICK), state, data


def gradient(state: State) -> Any:
    return next(x.mu for x in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu"))


@pytest.mark.parametrize(
    "kind", ["lean", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mlp", "memory", "encoder"))]
)
def test_accumulated_it_is_the_gradient_of_one_big_batch(kind: str) -> None:
    """Also where pieces have different numbers of steps that count; parameters and moments are float32 throughout."""
    config = LEARNERS[kind]
    learn, state, data = learner(config)
    whole, told = learn(state, data, jax.random.key(2))
    pieces, parts = learner(replace(config, accumulate=4))[0](state, data, jax.random.key(2))
    assert float(optax.tree.norm(gradient(whole))) > 1e-3
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(pieces))
    assert relative(gradient(pieces), gradient(whole)) < 1e-6
    assert relative(pieces.params, whole.params) < 1e-6
    for name in told:
        np.testing.assert_allclose(parts[name], told[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("accumulate", "chunk", "pieces"), [(None, 4096, 1), (None, 6, 8), (4, 4096, 4), (4, 6, 8), (3, 5, 12)]
)
def test_pieces_are_as_many_as_asked_for_and_no_larger_than_a_chunk(
    accumulate: int | None, chunk: int, pieces: int
) -> None:
    seen: list[int] = []
    chunk_of = minibatch.chunk_of

    def noted(n: int, most: int) -> int:
        seen.append(STEPS * COLUMNS // chunk_of(n, most))
        return chunk_of(n, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minibatch, "chunk_of", noted)
        learn, state, data = learner(replace(STEP, accumulate=accumulate, chunk=chunk))
        jax.eval_shape(learn, state, data, jax.random.key(2))
    assert seen == [pieces]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accumulate": 5}, "--accumulate is 5, .* the 64 steps of a minibatch; choose one of 1, 2, 4, 8, 16, 32, 64$"),
        ({"accumulate": 3, "memory": 4}, "the 4 environments of a minibatch; choose one of 1, 2, 4$"),
        ({"accumulate": 0}, "--accumulate is 0; it must be at least 1"),
    ],
)
def test_pieces_that_do_not_divide_are_named_with_those_that_do(change: dict[str, Any], words: str) -> None:
    run = small()
    with pytest.raises(RunError, match=words):
        resolve(replace(run, algorithm=replace(run.algorithm, **change)))


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
def made() -> Subject:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPROC", "4")
        return subject(small(devices=2))


@pytest.mark.slow
def test_all_of_progress_is_donated(made: Subject) -> None:
    """By the compiled program itself: each part of it has its result in its place, and no byte is there twice."""
    progress = made.start(0)
    text = made.text().splitlines()[0]
    aliases = re.findall(r"\{[\d,\s]*\}: \((\d+), \{\}, (?:may|must)-alias\)", text)
    assert sorted(map(int, aliases)) == list(range(len(jax.tree.leaves(progress))))
    need = device_memory.need(made.executable)
    assert need is not None
    assert need.donated == device_memory.held(progress)
    assert need.arguments - need.donated == device_memory.held(made.context) + 4, "the bank, and the number of updates"


def test_parts_are_those_of_one_device(made: Subject) -> None:
    progress = made.start(0)
    parts = device_memory.parts(made.assembly.algorithm, progress, made.context)
    assert parts["parameters"] == 4 * made.parameters
    assert 2 * parts["parameters"] < parts["optimiser"] < 2 * parts["parameters"] + 64, "two moments and some counters"
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(progress.carry))
    assert 2 * parts["environments"] == whole, "each of two devices has half of them"
    assert parts["bank"] == 0


def test_the_footprint_is_told_before_the_first_update(
    made: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and memory.json; a warning where it is tight; an error, exit code 2 and no folder where it can't fit."""
    need = device_memory.need(made.executable)
    assert need is not None
    program = fused.Program(made.executable, made.assembly.mesh)
    monkeypatch.setattr(fused, "compiled", lambda *args, **words: program)
    monkeypatch.setattr(finish, "evaluations", lambda *args: iter(()))
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
