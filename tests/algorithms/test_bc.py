"""Imitation: an expert's actions lead along his way; what is known of him is learnt, and nothing else is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import registry
from longhaul.algorithms.config import BCConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.config import recipes
from longhaul.config import resolve as runs
from longhaul.config.run import Driving, Named, Run
from longhaul.driving import scenario_source
from longhaul.driving.datasets.log import BadData
from longhaul.driving.sim import dynamics
from longhaul.driving.sim.dynamics import Drive, Motion
from longhaul.environment import advising, vectorise
from longhaul.envs.probes import PROBES
from longhaul.networks.config import NetworkConfig
from longhaul.rollout import Guide, collector
from longhaul.runtime import mesh as meshes
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.spaces import Box, Discrete, Masked
from longhaul.topologies import fused
from longhaul.training import assemble, offline_data
from longhaul.training.data import feed
from longhaul.types import Guided, Rollout, Successors, TimeStep
from tests.helpers.quick import quick

# ---------------------------------------------------------------------------------------------- the expert of a log

FOLLOWED = {
    ("bicycle", "continuous"): 0.05, ("bicycle", "discrete"): 0.1, ("delta", "continuous"): 1e-3,
}  # fmt: skip
"""Metres from the log within which whoever takes the expert's actions stays."""


@pytest.fixture(scope="module")
def logged() -> Motion:
    """Positions of four on a winding road, with changing speeds, [T, E]; by fine integration."""
    fine = np.arange(6000)[:, None] / 1000.0
    phase = np.array([0.0, 1.0, 2.0, 4.0])
    heading, speed = 0.4 * np.sin(0.9 * fine + phase), 7.0 + 4.0 * np.sin(0.7 * fine + 2.0 * phase)
    x, y = (np.cumsum(speed * turn(heading), axis=0) / 1000.0 for turn in (np.cos, np.sin))
    return Motion(*(jnp.asarray(part[::100], jnp.float32) for part in (x, y, heading, speed)))


@pytest.mark.parametrize(("model", "actions"), FOLLOWED)
def test_the_actions_of_a_log_lead_along_it(model: str, actions: str, logged: Motion) -> None:
    away = _replayed(model, actions, logged, logged)
    assert float(jnp.max(away)) < FOLLOWED[model, actions]
    if actions == "continuous":
        beside = logged._replace(x=logged.x.at[0].add(1.0), y=logged.y.at[0].add(-0.7))
        came_back = _replayed(model, actions, beside, logged)
        assert float(jnp.max(came_back[-1])) < 0.1 and float(jnp.max(came_back[0])) > 0.5


def _replayed(model: str, actions: str, begin: Motion, logged: Motion) -> jax.Array:
    """float32 [T, E]: metres from the log of who begins at `begin` and takes its actions."""
    limits, dt = dynamics.VEHICLE, jnp.float32(0.1)

    def step(now: Drive, aim: Motion) -> tuple[Drive, jax.Array]:
        action = dynamics.nearest_action(now, aim, limits, dt, model, actions)
        after = dynamics.act(now, action, limits, dt, model, actions)
        return after, jnp.hypot(after.motion.x - aim.x, after.motion.y - aim.y)

    nothing = jnp.zeros_like(begin.x[0])
    first = Drive(jax.tree.map(lambda x: x[0], begin), nothing, nothing)
    return quick(lambda: jax.lax.scan(step, first, jax.tree.map(lambda x: x[1:], logged))[1])()


# -------------------------------------------------------------------------------------------------------- cloning


@dataclass(frozen=True)
class Shown:
    """A probe with an expert: in places whose first number is positive he does `best`, of others nothing is known."""

    inner: Any
    best: Any
    poison: Any  # what he seems to do where nothing is known
    action: Any

    @property
    def spec(self) -> Any:
        return replace(self.inner.spec, action=self.action)

    def reset(self, key: Any) -> Any:
        return self.inner.reset(key)

    def step(self, key: Any, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        return self.inner.step(key, state, jnp.zeros((), jnp.int32))

    def active(self, state: Any) -> jax.Array:
        return self.inner.active(state)

    def metrics(self, state: Any) -> dict:
        return {}

    def demonstrate(self, state: Any) -> tuple[jax.Array, jax.Array]:
        known = jnp.ravel(self.inner._observe(state.place))[0] > 0.0
        return jnp.where(known, jnp.asarray(self.best), jnp.asarray(self.poison)), known


SETTINGS: dict[str, Any] = {"lr": 2e-2, "num_minibatches": 2, "hidden_dim": 16, "num_layers": 1}


def test_an_expert_is_asked_everywhere_and_followed_in_his_worlds() -> None:
    probe = PROBES["successor"]()  # one of four places has a positive first number
    environment = Shown(probe.environment, jnp.int32(2), jnp.int32(1), Discrete(3))
    config = replaced(BCConfig(), **SETTINGS)
    algorithm = registry.make(environment.spec, config, RunContext(updates=1, mean=meshes.identity))
    guide = Guide(advising(environment, 8), 0.5)
    collect = collector(vectorise(environment, 8), algorithm.act, algorithm.memory, steps=16, guide=guide)
    policy = algorithm.policy(quick(algorithm.init)(jax.random.key(0)))
    run = quick(lambda key: collect.collect(policy, collect.start(key), key, jnp.int32(0))[1])
    data = jax.device_get(run(jax.random.key(1)))
    extras = data.extras
    assert isinstance(extras, Guided) and extras.own == ()
    np.testing.assert_array_equal(extras.known, data.observation[..., 0] > 0.0)
    np.testing.assert_array_equal(extras.action, np.where(extras.known, 2, 1))
    np.testing.assert_array_equal(extras.followed, extras.known & (np.arange(8) < 4))
    assert 0.1 < extras.known.mean() < 0.5
    assert np.all(data.action[extras.followed] == 2) and not np.all(data.action[~extras.followed] == 2)


@pytest.mark.slow
def test_a_vector_is_cloned_where_it_is_known() -> None:
    """Maximum likelihood: the mean is the expert's, also at a bound of the range; an unknown action may be NaN."""
    seen = jnp.asarray(np.eye(4, dtype=np.float32)[np.arange(64) % 4]).reshape(4, 16, 4)
    best = jnp.array([[0.5, 1.0], [-1.0, 4.0], [0.0, 2.0], [jnp.nan, 1e9]], jnp.float32)
    known = seen[..., 3] == 0.0
    spec = replace(PROBES["successor"]().environment.spec, action=Box((-1.0, 0.0), (1.0, 4.0)))
    algorithm = registry.make(spec, replaced(BCConfig(), **SETTINGS), RunContext(updates=200, mean=meshes.identity))
    nothing, never = jnp.zeros((4, 16)), jnp.zeros((4, 16), bool)
    extras = Guided((), seen @ jnp.where(jnp.isnan(best), 0.0, best), known, known)
    extras = extras._replace(action=jnp.where(known[..., None], extras.action, jnp.nan))
    following = Successors(seen[0], seen[:1])
    data = Rollout(
        seen, jnp.zeros((4, 16, 2)), nothing, never, never, ~never, extras, following, (), jnp.int32(0)
    )  # fmt: skip

    def learn(state: Any, key: Any) -> Any:
        return algorithm.learn(state, data, key)

    run = jax.jit(lambda key: jax.lax.scan(learn, algorithm.init(key), jax.random.split(key, 200)))
    state, metrics = run(jax.random.key(0))
    action = algorithm.act(algorithm.policy(state), (), jnp.eye(4), None)[0]
    np.testing.assert_allclose(action[:3], best[:3], atol=0.1)
    loss, error = metrics["bc/policy_loss"], metrics["bc/error"]
    assert loss[-1] < loss[0] - 2.0 and error[-1] < 0.03 < 0.3 < error[0]
    assert float(metrics["bc/known"][0]) == 0.75


# ------------------------------------------------------------------------------------------------------ recordings


def test_recorded_steps_are_cloned_by_a_run(tmp_path: Path) -> None:
    """Recorded expert: it pushes the pole's cart where it leans; two files, of [T, B] and [N] steps."""
    rng = np.random.default_rng(0)
    seen = rng.uniform(-0.2, 0.2, (40, 10, 4)).astype(np.float32)
    action = (seen[..., 2] + 0.5 * seen[..., 3] > 0).astype(np.int64)
    offline_data.save(tmp_path / "a.npz", seen, action)
    (tmp_path / "b").mkdir()
    for name, array in (("observation", seen[0]), ("action", action[0])):
        np.save(tmp_path / "b" / f"{name}.npy", array)
    files = (str(tmp_path / "a.npz"), str(tmp_path / "b"))
    config = BCConfig(recorded=files, lr=1e-2, network=NetworkConfig(hidden_dim=16, num_layers=1))
    run = Run("small", Named("cartpole"), config, total_steps=64 * 200, num_envs=8, num_steps=8, devices=1)
    run = runs.resolve(run)
    found = offline_data.read(files, runs.named(run.environment).spec)
    assert found.rows == 410
    context = jax.tree.map(jnp.asarray, found)
    made = assemble.assemble(run, lambda _: runs.named(run.environment), context)
    progress = made.start(0, context)
    program = fused.compiled(made.algorithm, made.collector_in, progress, context, made.mesh, block=200)
    [(progress, _, metrics)] = list(fused.fused(program, progress, context, updates=200, block=200))
    assert metrics["bc/error"][-1] < 0.1 < 0.2 < metrics["bc/error"][0]
    act = quick(lambda policy, seen: made.algorithm.act(policy, (), seen, None)[0])
    told = np.asarray(act(made.policy(progress.state), found.observation))
    assert np.mean(told == found.action) > 0.9


def test_recordings_that_do_not_fit_the_environment_are_named(tmp_path: Path) -> None:
    spec = runs.named(Named("cartpole")).spec
    good: dict[str, Any] = {"observation": np.zeros((5, 4), np.float32), "action": np.zeros(5, int)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"action": None}, "has no action; it holds observation"),
        ({"observation": np.zeros((5, 3), np.float32)}, r"observation is float32 \(5, 3\); .* must be \(5, 4\)"),
        ({"observation": np.zeros((4, 4), np.float32)}, r"must be \(5, 4\)"),
        ({"observation": np.full((5, 4), np.nan, np.float32)}, "not finite"),
        ({"action": np.array([0, 1, 2, 0, 0])}, r"action 2 is 2; it must lie in 0 to 1"),
        ({"action": np.zeros(5)}, "of float64, and the environment's of int32"),
        ({"action": np.zeros(0, int), "observation": np.zeros((0, 4), np.float32)}, "N at least 1"),
    ]
    for i, (changes, message) in enumerate(cases):
        path = tmp_path / f"{i}.npz"
        np.savez(path, **{name: array for name, array in (good | changes).items() if array is not None})
        with pytest.raises(BadData, match=message):
            offline_data.read([str(path)], spec)
    (tmp_path / "text.npz").write_text("no zip")
    (tmp_path / "empty").mkdir()
    for name, message in (("text.npz", "can't be read"), ("empty", "holds no .npz"), ("gone", "no such file")):
        with pytest.raises(BadData, match=message):
            offline_data.read([str(tmp_path / name)], spec)


@pytest.mark.parametrize(("seen", "done"), [("observations", "actions"), ("obs", "acts")])
def test_names_of_other_libraries_are_taken(seen: str, done: str, tmp_path: Path) -> None:
    """D4RL's and imitation's, beside arrays that are not needed; ours go before them."""
    spec = runs.named(Named("cartpole")).spec
    wanted = np.arange(20, dtype=np.float32).reshape(5, 4), np.array([0, 1, 1, 0, 1])
    arrays = {seen: wanted[0], done: wanted[1], "rewards": np.zeros(5)}
    np.savez(tmp_path / "theirs.npz", **arrays)
    np.savez(tmp_path / "both.npz", **(arrays | {seen: np.zeros((5, 4)), "observation": wanted[0]}))
    for name in ("theirs", "both"):
        found = offline_data.read([str(tmp_path / f"{name}.npz")], spec)
        np.testing.assert_array_equal(found.observation, wanted[0])
        np.testing.assert_array_equal(found.action, wanted[1])


def test_a_file_that_holds_more_than_memory_does_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Zeros of two machines by size, in a file of a few kB; a .npy says that it is long, and is not."""
    spec, zeros = runs.named(Named("cartpole")).spec, np.zeros((1 << 20, 4), np.float32)
    np.savez_compressed(tmp_path / "a.npz", observation=zeros, action=np.zeros(1 << 20, int))
    np.savez(tmp_path / "b.npz", **{str(i): np.zeros(0) for i in range(1001)})
    (tmp_path / "c").mkdir()
    with (tmp_path / "c" / "action.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (1 << 40,)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline_data, "most_of_a_file", lambda: 1 << 23)
        for name, message in (("a.npz", "holds 25,166,"), ("b.npz", "holds 1,001 arrays"), ("c", "can't be read")):
            with pytest.raises(BadData, match=message):
                offline_data.read([str(tmp_path / name)], spec)


def test_masks_and_names_of_parts_are_kept(tmp_path: Path) -> None:
    probe = PROBES["masked"]()
    spec = probe.environment.spec
    shape = spec.observation.observation.shape
    seen, mask = np.ones((3, *shape), np.float32), np.array([[True, False, True]] * 3)[:, : spec.action.n]
    offline_data.save(tmp_path / "a.npz", Masked(seen, mask), np.zeros(3, int))
    found = offline_data.read([str(tmp_path / "a.npz")], spec)
    np.testing.assert_array_equal(found.observation.mask, mask)
    spec = replace(spec, observation={"far": spec.observation.observation, "near": spec.observation.observation})
    offline_data.save(tmp_path / "b.npz", {"far": seen, "near": 2.0 * seen}, np.zeros(3, int))
    with np.load(tmp_path / "b.npz") as arrays:
        assert sorted(arrays.files) == ["action", "observation/far", "observation/near"]
    np.testing.assert_array_equal(offline_data.read([str(tmp_path / "b.npz")], spec).observation["near"], 2.0)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run("x", Driving(), BCConfig(recorded=("a.npz",))), "--recorded is a.npz"),
        (Run("x", Driving(), BCConfig(), topology="actors"), "--topology is actors"),
        (Run("x", Driving(), BCConfig(expert_share=1.5)), "--expert-share is 1.5; it must lie in 0 to 1"),
        (Run("x", Named("cartpole"), BCConfig(recorded=("a.npz",), network=NetworkConfig(memory=8))), "--memory is 8"),
    ],
)
def test_a_run_that_has_nobody_to_imitate_is_refused(run: Run, message: str) -> None:
    with pytest.raises(RunError, match=message):
        runs.resolve(replace(run, devices=1))


def test_without_a_record_nobody_is_there_to_imitate() -> None:
    with pytest.raises(RunError, match="no expert in cartpole; give --recorded"):
        feed(runs.resolve(Run("x", Named("cartpole"), BCConfig(), devices=1)))


@pytest.mark.slow
def test_the_simulators_expert_drives_a_log_to_its_end() -> None:
    """Through the whole environment: everybody who takes his actions reaches the goal and touches nothing."""
    from longhaul.driving.scenario.bank import stack
    from longhaul.driving.sim.config import Config
    from longhaul.driving.sim.simulator import driving

    made = scenario_source.generated(1_000_000, 6, agents=1, horizon=None, workers=1)
    environment = driving(stack(made, agents=1), Config(actions="continuous"))

    def roll(index: jax.Array) -> Any:
        def step(state: Any, _: None) -> Any:
            action, known = environment.demonstrate(state)
            return environment.step(jax.random.key(0), state, action)[0], known | ~state.playing

        state, known = jax.lax.scan(step, environment.start(index)[0], None, length=environment.spec.max_steps)
        return environment.metrics(state), known

    metrics, known = jax.device_get(jax.jit(jax.vmap(roll))(jnp.arange(len(made))))
    assert np.all(known) and np.all(metrics["accuracy"].value == 1.0) and np.all(metrics["goal"].value == 1.0)


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")  # of Minari's temporary folder
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_data_set_of_minaris_is_read_without_last_observations_and_what_is_not_there_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minari = pytest.importorskip("minari", reason="minari is not installed")
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    collector, seen, done = minari.DataCollector(gymnasium.make("CartPole-v1"), data_format="arrow"), [], []
    for episode in range(3):
        observation, _ = collector.reset(seed=episode)
        over = False
        while not over:
            seen.append(observation)
            done.append(len(done) % 2)
            observation, _, terminated, truncated, _ = collector.step(done[-1])
            over = terminated or truncated
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Minari's, on what a public data set should tell
        collector.create_dataset("test/cartpole-v0")
    collector.close()
    spec = runs.named(Named("cartpole")).spec
    recorded = offline_data.read(["minari:test/cartpole-v0"], spec)
    np.testing.assert_array_equal(recorded.observation, np.stack(seen).astype(np.float32))
    np.testing.assert_array_equal(recorded.action, done)
    run = runs.resolve(runs.replaced(recipes.recipe("bc"), {"recorded": ("minari:test/cartpole-v0",)}))
    assert registry.recorded(run.algorithm) == ("minari:test/cartpole-v0",)  # no path
    for name, says in (("test/cartpole-v1", "did you mean test/cartpole-v0"), ("x", "minari download x fetches")):
        with pytest.raises(BadData, match=f"minari:{name}: there is no such data set on this machine; {says}"):
            offline_data.read([f"minari:{name}"], spec)
