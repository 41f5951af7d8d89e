"""Parameters split over the model axis: the same numbers as whole ones, on devices that hold a part each."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms.config import GRPOConfig, PPOConfig, SACConfig
from longhaul.cli import flags, run_flags
from longhaul.cli.flags import FlagError
from longhaul.config import recipes
from longhaul.config import resolve as runs
from longhaul.config.run import Driving, Run
from longhaul.diagnostics import checks, hlo
from longhaul.diagnostics.compiled_run import Program, compiled
from longhaul.networks.config import NetworkConfig
from longhaul.reasoning import transformer
from longhaul.reasoning.config import ModelConfig, Reasoning
from longhaul.runtime import device_memory, partition
from longhaul.runtime import mesh as meshes
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.topologies import fused
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.training import assemble, compilation, final_evaluation, loop, run_dir
from longhaul.training import data as feeds
from longhaul.training.assemble import Assembly
from longhaul.training.checkpoint.checkpoint import Checkpoints
from longhaul.training.checkpoint.resume import restore_policy
from longhaul.types import Progress
from tests.helpers.small_runs import begin, make_quick, resume, small, stop
from tests.runtime.test_process_group import together

UPDATES = 3


class Made(NamedTuple):
    program: Program
    begun: Any  # the state at the beginning, on the host
    progress: Progress  # after some updates
    rows: dict[str, np.ndarray]  # of the last one

    @property
    def assembly(self) -> Assembly:
        return self.program.assembly

    @property
    def executable(self) -> jax.stages.Compiled:
        return self.program.executable


def cartpole(**changes: Any) -> Run:
    config = PPOConfig(num_minibatches=2, update_epochs=2, lr=3e-3, network=NetworkConfig(hidden_dim=32, shared=True))
    return small(**{"algorithm": config, "devices": 2, "block": UPDATES, "log_interval": UPDATES, **changes})


def driving(**changes: Any) -> Run:
    """Two agents in small generated scenarios; one step of the optimiser an update."""
    recipe = recipes.recipe("driving")
    assert isinstance(recipe.environment, Driving)
    seen = dataclasses.replace(recipe.environment.simulator, agents=2, neighbours=4, waypoints=4, road_points=8)
    task = dataclasses.replace(recipe.environment, scenarios=4, objects=8, horizon=20, simulator=seen)
    config = replaced(PPOConfig(), num_minibatches=1, update_epochs=1, lr=3e-3, hidden_dim=32, torso="deepset")
    settled = {"environment": task, "algorithm": config, "num_envs": 4, "num_steps": 8, "total_steps": 640}
    return cartpole(**(settled | changes))


def make(run: Run) -> Made:
    """`run` after its first updates, as training makes them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than these runs ever do
    try:
        made = compiled(run)
        progress = made.start(run.seed)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)  # `make test` compiles all without
    begun = jax.tree.map(np.array, jax.device_get(progress.state))
    progress, _ = made.updates(progress, UPDATES - 1)
    progress, rows = made.updates(progress, 1)  # what a call gives, the next one takes
    return Made(made, begun, progress, rows)


@pytest.fixture(scope="module")
def cartpoles() -> tuple[Made, Made]:
    return make(cartpole()), make(cartpole(model=2))


@pytest.fixture(scope="module")
def drives() -> tuple[Made, Made]:
    return make(driving()), make(driving(model=2))


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) for name in ("cartpoles", "drives")])
def pair(request: pytest.FixtureRequest) -> tuple[Made, Made]:
    """(on data=2, on data=2,model=2)."""
    found: tuple[Made, Made] = request.getfixturevalue(request.param)
    return found


def close(a: Any, b: Any, bound: float) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = (jax.random.key_data(each) for each in (x, y))
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=bound, atol=bound)


def test_numbers_are_those_of_whole_parameters(pair: tuple[Made, Made]) -> None:
    whole, split = pair
    jax.tree.map(np.testing.assert_array_equal, whole.begun, split.begun)
    moved = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), whole.begun.params,
                                             jax.device_get(whole.progress.state.params))))  # fmt: skip
    assert moved > 1e-3, "nothing was learnt that could differ"
    close(whole.progress.state, split.progress.state, 1e-5)
    close(whole.progress.carry, split.progress.carry, 1e-4)
    close(whole.rows, split.rows, 1e-4)
    assert split.rows[fused.FINITE].all()


@pytest.mark.slow
def test_fully_sharded_parameters_give_the_numbers_of_one_device() -> None:
    """Worlds and parameters over two devices, each of them two that share the model: one shard, nothing is averaged."""
    whole, split = make(cartpole(devices=1)), make(cartpole(devices=2, model=2, fsdp=True))
    close(whole.progress.state, split.progress.state, 1e-5)
    close(whole.progress.carry, split.progress.carry, 1e-4)
    close(whole.rows, split.rows, 1e-4)
    share = partition.shares(jax.eval_shape(lambda: split.progress.state), 2, 2)
    for device in split.assembly.mesh.devices.flat:
        of_state, of_carry = (
            sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == device)
            for tree in (split.progress.state, split.progress.carry)
        )
        assert of_state == share.own < 0.45 * share.whole
        assert of_carry == sum(x.nbytes for x in jax.tree.leaves(split.progress.carry)) // 2


@pytest.mark.slow
def test_the_doctor_counts_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel in parts once to act, once forwards and once backwards; a program that gathers one again fails."""
    made = make(cartpole(devices=2, fsdp=True)).program
    found = checks.crossings(made)
    assert found.verdict == checks.PASS, found
    assert found.figures["passes"] == 2 * made.optimiser_steps + 1 and found.figures["split_bytes"] == 4 * 32 * 32
    assert found.figures["gathered_bytes"] == found.figures["passes"] * found.figures["split_bytes"]
    real = hlo.crossings(made.text())
    inside = [each for each in real if each.operation == "all-gather" and each.times() == made.optimiser_steps]
    assert [each.bytes for each in inside] == 2 * [4 * 32 * 32], "small leaves are whole on each device"
    again = next(each for each in real if each.operation == "all-gather" and each.bytes == 4 * 32 * 32)
    monkeypatch.setattr(hlo, "crossings", lambda text: [*real, again])
    assert checks.crossings(made).verdict == checks.FAIL


@pytest.mark.slow
def test_a_language_model_takes_its_share_of_each_device_and_gathers_a_kernel_once_a_pass() -> None:
    """Four devices learn by rows and gather each layer, and sample by heads: nothing of the cache ever moves."""
    model = ModelConfig(width=128, layers=8, heads=8, kv_heads=4, head_dim=16, hidden=512, remat="full")
    config = GRPOConfig(model=model, group=4, taught=1, num_minibatches=1, accumulate=2)
    rows, steps = 32, 24
    base = Run("tiny", environment=Reasoning(problems=64, most=3, wave=rows), algorithm=config, num_envs=8,
               num_steps=steps, total_steps=2 * rows * steps, block=1, log_interval=1)  # fmt: skip
    alone, shared = (compiled(runs.resolve(dataclasses.replace(base, devices=n, fsdp=n > 1))) for n in (1, 4))
    across = hlo.crossings(shared.text())
    size = 4 * model.width * model.hidden
    gathers = [each for each in across if each.operation == "all-gather" and each.bytes == size]
    passes = 2 * model.layers * config.accumulate
    assert sum(each.times() for each in gathers) == 3 * passes, "gate, up and narrow: once forwards, once backwards"
    cache = 4 * model.kv_heads * model.head_dim * rows * steps  # of a layer's keys, at least
    sampling = [each.bytes for each in across if each.loops.count(None) > 1]  # within the loop over updates
    assert 0 < max(sampling) < cache
    moved = [each.bytes for each in across if each.operation == "all-to-all"]
    queries = 4 * model.layers * model.width * model.heads * model.head_dim // 4  # a device's kernels of them
    assert max(moved, default=0) < queries, "each device samples with the parts of kernels that lie on it"
    whole, own = (need.total for each in (alone, shared) if (need := device_memory.need(each.executable)))
    layer = 2 * 4 * (transformer.size(model) // model.layers)  # whole, and its gradient
    assert own - layer < 1.1 * whole / 4


TINY_MODEL = ModelConfig(width=32, layers=2, heads=2, kv_heads=2, head_dim=16, hidden=64)


def hackmatrix() -> Run:
    run = recipes.recipe("hackmatrix")
    config = replaced(run.algorithm, num_minibatches=1, update_epochs=1, hidden_dim=64)
    return dataclasses.replace(run, algorithm=config, num_envs=8, num_steps=8, total_steps=8 * 8 * UPDATES)


def reasoning() -> Run:
    config = GRPOConfig(model=TINY_MODEL, group=4, taught=1, lr_taught=1e-3, lr=1e-3)
    return Run("tiny", environment=Reasoning(problems=64, most=3), algorithm=config, num_envs=4, num_steps=21,
               total_steps=4 * 4 * 21 * UPDATES)  # fmt: skip


def latent() -> Run:
    config = PPOConfig(num_minibatches=1, update_epochs=1, network=NetworkConfig(hidden_dim=32, torso="latent"))
    return driving(algorithm=config, num_steps=8, total_steps=2 * 4 * 8 * UPDATES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "topology"),
    [*itertools.product([latent, hackmatrix, reasoning], ["fused", "actors"]), (hackmatrix, "central")],
)
def test_split_runs_end_with_the_parameters_of_one_device(
    base: Callable[[], Run], topology: str, tmp_path: Path
) -> None:
    """Latent driving, HackMatrix and reasoning: `data=2,model=2` fully sharded, and two actors with such a learner."""
    acting = ActorConfig(actors=None if topology == "fused" else 2, actor_kind="thread", staleness=0)
    ended = []
    for number, mesh in enumerate(({"devices": 1, "model": 1}, {"devices": 2, "model": 2, "fsdp": True})):
        changes: dict[str, Any] = {"topology": topology, "acting": acting, "block": 1, "log_interval": 1, **mesh}
        run = runs.resolve(dataclasses.replace(base(), evaluation_episodes=8, save_interval=UPDATES, **changes))
        assert begin(run, tmp_path / str(number)).code == 0
        ended.append(restore_policy(tmp_path / str(number))[1])
    close(*ended, 1e-5)


def acted(**changes: Any) -> Run:
    """Twelve updates by four actors in threads."""
    acting = ActorConfig(4, "thread", staleness=0)
    return cartpole(topology="actors", acting=acting, total_steps=8 * 16 * 12, block=1, log_interval=2, **changes)


def begin_in_parts(folder: Path) -> int:
    """In each of two processes of two devices, two actors each: trains, and stops."""
    run = acted(devices=4, fsdp=True)
    return loop.train(run, folder, resumed=False, callback=lambda record: record["update"] == 4).code


def go_on_in_parts(folder: Path) -> int:
    """In each of two such processes: trains to the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(final_evaluation, "evaluations", lambda *_, **__: iter(()))
        return loop.train(run_dir.load_run(folder), folder, resumed=True).code


@pytest.mark.slow
def test_learners_that_share_parameters_end_as_one_device(tmp_path: Path) -> None:
    """Of four parts each of two processes has two; each reads the rollouts of its own actors."""
    parted, alone = tmp_path / "parted", tmp_path / "alone"
    parted.mkdir()
    for step, expected in (("begin_in_parts", loop.STOPPED), ("go_on_in_parts", 0)):
        ended = together(step, parted, "end_to_end.test_model_axis")
        assert [code for code, _ in ended] == [expected, expected], ended
    assert begin(acted(devices=1), alone).code == 0
    (run, ours, begun), (_, theirs, _) = map(restore_policy, (parted, alone))
    assert run.fsdp
    moved = jax.tree.map(lambda a, b: float(np.max(np.abs(np.asarray(a) - np.asarray(b)))), ours.params, begun.params)
    assert max(jax.tree.leaves(moved)) > 1e-3
    close(ours, theirs, 1e-5)


def test_who_acts_is_who_learns(pair: tuple[Made, Made]) -> None:
    """At a learning rate of 0, to which it falls at a run's end, the policy that learns is that which acted."""
    made = pair[1]
    progress = jax.tree.map(lambda x: x.copy(), made.progress)
    end = meshes.everywhere(jnp.int32(made.assembly.updates), made.assembly.mesh)
    progress = progress._replace(state=progress.state._replace(updates=end))
    still, rows = made.program.updates(progress, 2)
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(p.state.params) for p in (made.progress, still)))
    assert np.all(np.abs(rows["ppo/approx_kl"]) < 1e-6)
    assert np.all(rows["ppo/clip_fraction"] == 0.0)
    assert np.all(rows["ppo/grad_norm"] > 1e-3)


def test_each_device_holds_its_part(pair: tuple[Made, Made]) -> None:
    whole, split = pair
    shares = partition.shares(jax.eval_shape(lambda: split.progress.state), 2)
    assert shares.own < 0.8 * shares.whole
    arguments = [made.executable.memory_analysis().argument_size_in_bytes for made in pair]
    assert arguments[0] - arguments[1] == shares.whole - shares.own
    for device in split.assembly.mesh.devices.flat:
        parts = [s.data.nbytes for x in jax.tree.leaves(split.progress.state) for s in x.addressable_shards
                 if s.device == device]  # fmt: skip
        assert sum(parts) == shares.own
    kernels = split.progress.state.params["torso" if "torso" in split.progress.state.params else "actor"]
    one, other = kernels["layer_1"]["kernel"].addressable_shards[:2]
    assert not np.array_equal(one.data, other.data), "both devices have the same part"
    assert all(x.is_fully_replicated for x in jax.tree.leaves(whole.progress.state))


def test_gradients_meet_once_an_optimiser_step_in_parts(pair: tuple[Made, Made]) -> None:
    for made, model in zip(pair, (1, 2), strict=True):
        found = [each for each in hlo.crossings(made.executable.as_text()) if each.over_shards(model)]
        assert {each.operation for each in found} == {"all-reduce"}
        params = made.assembly.algorithm.policy(made.progress.state).params
        n, own = (partition.shares(params, m) for m in (1, model))
        large = [each for each in found if each.bytes >= n.whole // model]
        assert len(large) == 1, found
        assert large[0].bytes <= own.own + 256, "gradients, and some numbers beside"
        assert sum(each.bytes for each in found if each not in large) < 256, "some numbers an update"


def test_the_doctor_tells_parts_from_shards(pair: tuple[Made, Made]) -> None:
    for made, model in zip(pair, (1, 2), strict=True):
        found = checks.crossings(made.program)
        assert found.verdict == checks.PASS, found
        assert found.figures["gradients"] == made.program.optimiser_steps
        assert (found.figures["within"] > 0) == (model == 2)
        assert ("among 2 parts of the model" in found.value) == (model == 2)


@pytest.mark.parametrize("odd", [jnp.nan, jnp.inf])
def test_a_number_that_is_not_finite_is_seen_in_whichever_part_it_lies(odd: float) -> None:
    mesh = meshes.make_mesh(2, 2)
    look = jax.jit(meshes.per_shard(fused.is_finite, mesh, (fused.EVERYWHERE,), fused.EVERYWHERE))
    sound = {"kernel": jnp.ones((32, 64))}
    layout = partition.shardings(sound, mesh)
    assert look(jax.device_put(sound, layout))
    for row, column in ((0, 0), (0, 63), (31, 63)):
        broken = {"kernel": sound["kernel"].at[row, column].set(odd)}
        assert not look(jax.device_put(broken, layout))


def test_a_checkpoint_fits_any_mesh(pair: tuple[Made, Made], tmp_path: Path) -> None:
    """Saved in parts, restored whole, in other parts or over other shards: bit for bit what it was."""
    made = pair[1]

    def on(data: int, model: int) -> Progress:
        mesh = meshes.make_mesh(data, model)
        everywhere = meshes.replicated(mesh)
        layout = partition.shardings(made.progress.state, mesh), meshes.sharded(mesh), everywhere, everywhere
        shapes = jax.eval_shape(lambda: made.progress)
        return jax.tree.map(
            lambda where, part: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), part)
            if not isinstance(part, type(made.progress.state))
            else jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), part, where),
            Progress(*layout), shapes, is_leaf=lambda x: x is layout[0],
        )  # fmt: skip

    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(UPDATES, made.progress)
        for shape in ((2, 1), (1, 4), (2, 2), (1, 1)):
            restored = checkpoints.latest(on(*shape))
            assert restored is not None
            close(restored.progress, made.progress, 0.0)
            kernels = [x for x in jax.tree.leaves(restored.progress.state.params) if x.size >= partition.LEAST]
            assert all(x.is_fully_replicated == (shape[1] == 1) for x in kernels)


# ---------------------------------------------------------------------------------------------------------- runs


class Enough(Exception):
    """What was to be seen is seen."""


@pytest.mark.slow
def test_a_run_is_gone_on_with_whole(
    cartpoles: tuple[Made, Made], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in parts is stopped; with `--mesh data=2` it goes on from the very numbers; it ends in parts too."""
    split = cartpoles[1]
    folder, run, seen = tmp_path / "run", cartpole(model=2), []

    def compiled_before(run: Run, assembly: Assembly, feeding: Any, progress: Progress, *_: Any) -> Any:
        seen.append(jax.tree.map(np.array, jax.device_get(progress.state)))
        if run.model == 1:
            raise Enough
        return fused.Program(split.executable, assembly.mesh)

    make_quick(monkeypatch)
    monkeypatch.setattr(compilation, "assemble", lambda run, *_: cartpoles[run.model - 1].assembly)
    monkeypatch.setattr(compilation, "compiled", compiled_before)
    stop(run, folder)
    assert "parameters and optimiser are split over 2 devices" in capfd.readouterr().err
    about = (folder / "run.json").read_text()
    assert json.loads(about)["run"]["model"] == 2
    parsed = flags.parse("train small", "", run_flags.table(run), ["--mesh", "data=2"])
    whole = runs.resolve(run_flags.resumed(folder, run, parsed))
    assert (whole.devices, whole.model) == (2, 1)
    with pytest.raises(Enough):
        loop.train(whole, folder, resumed=True)
    assert "model 1 (was 2): nothing is dropped" in " ".join(capfd.readouterr().err.split())
    (folder / "run.json").write_text(about)
    outcome = resume(folder)
    assert outcome.code == 0
    assert outcome.result is not None
    first, in_whole, in_parts = seen
    jax.tree.map(np.testing.assert_array_equal, in_whole, in_parts)
    assert in_whole.updates > first.updates == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": 0}, "--mesh is data=2; model must be at least 1"),
        ({"num_envs": 7, "total_steps": 7 * 16, "model": 2}, "choose a multiple of 2, or --mesh data=1,model=2"),
        ({"devices": 1, "fsdp": True}, "--fsdp splits parameters over the devices of --mesh data=N, and N is 1"),
        ({"fsdp": True, "deterministic": True}, "--deterministic does not go with --fsdp"),
        ({"fsdp": True, "algorithm": SACConfig()}, "--fsdp does not go with SAC, whose replay lies by device"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        cartpole(**changes)


def test_a_network_that_cannot_be_split_is_refused() -> None:
    narrow = PPOConfig(network=NetworkConfig(hidden_dim=8))
    for run in (cartpole(model=3, devices=1), cartpole(model=2, algorithm=narrow)):
        source = feeds.feed(run)
        with pytest.raises(ValueError, match=r"no parameters of this network can be split into [23] parts: choose"):
            assemble.assemble(run, source.within, ())


@pytest.mark.parametrize("word", ["data", "data=0", "data=2,model=0", "model=x", "data=2,model=2,model", "mdl=2"])
def test_a_mesh_that_means_nothing_is_refused(word: str) -> None:
    with pytest.raises(FlagError, match="it must be data=N or data=N,model=M with N and M at least 1"):
        flags.parse("train", "", run_flags.table(recipes.recipe("cartpole")), ["--mesh", word])


def test_the_flag_says_both_sizes_and_a_run_keeps_them(tmp_path: Path) -> None:
    recipe = recipes.recipe("cartpole")
    parsed = flags.parse("train", "", run_flags.table(recipe), ["--mesh", "data=3,model=2", "--num-envs", "12"])
    run = runs.resolve(run_flags.chosen(recipe, parsed))
    assert (run.devices, run.model, run.all_devices) == (3, 2, 6)
    run_dir.save_run(tmp_path, run, {})
    assert run_dir.load_run(tmp_path) == run
    kept = run_flags.resumed(tmp_path, recipe, flags.parse("train", "", run_flags.table(recipe), []))
    assert kept.mesh == (3, 2, False)
    alone = flags.parse("train", "", run_flags.table(recipe), ["--mesh", "data=3"])
    assert run_flags.resumed(tmp_path, recipe, alone).mesh == (3, 1, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settled",
    [
        {"memory": 32},
        {"shared": True, "precision": "bf16"},
        {"normalise_observation": True, "kl_stop": 0.02, "num_minibatches": 4},
    ],
)
def test_other_networks_agree_too(settled: dict[str, Any]) -> None:
    settled = {"hidden_dim": 32, "num_minibatches": 2, "update_epochs": 2, "lr": 3e-3} | settled
    config = replaced(PPOConfig(), **settled)
    whole, split = (make(cartpole(algorithm=config, model=model)) for model in (1, 2))
    close(whole.progress.state, split.progress.state, 2e-3 if config.network.precision == "bf16" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("torso", ["latent", "mtr"])
def test_encoders_agree_too(torso: str) -> None:
    network = NetworkConfig(hidden_dim=32, num_layers=2, torso=torso, remat="full")
    config = PPOConfig(num_minibatches=1, update_epochs=1, network=network)
    whole, split = (make(driving(algorithm=config, model=model)) for model in (1, 2))
    close(whole.progress.state, split.progress.state, 1e-5)
