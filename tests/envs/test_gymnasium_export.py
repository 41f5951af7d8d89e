"""Our environments as Gymnasium's: its own checker, its conventions of ends, and a learner that is not ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import jax
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from longhaul.envs import gymnasium_export, registry
from longhaul.envs.host import driving_vector
from longhaul.envs.host import registry as host
from longhaul.spaces import Leaf, mapped
from tests.helpers.host_vector_contract import check_vector

DRIVING = {"scenarios": 2, "horizon": 12}
PAIRS = {**DRIVING, "agents": 2, "least": 2, "goal": "stop", "actions": "continuous"}


# Gymnasium warns of Box spaces without bounds; observations have none.
pytestmark = pytest.mark.filterwarnings("ignore:.*(infinity|infinite|Box observation space).*")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cartpole", {}),
        ("mountaincar-continuous", {}),
        ("probe/masked", {}),
        pytest.param("driving", DRIVING, marks=pytest.mark.slow),
    ],
)
def test_gymnasiums_checker_finds_nothing(name: str, options: dict[str, Any]) -> None:
    environment = gymnasium_export.single(name, **options)
    check_env(environment, skip_render_check=True)
    environment.close()


@pytest.mark.slow
def test_driving_agents_are_columns_with_finals_and_scores_by_gymnasiums_convention() -> None:
    made = gymnasium_export.vector("driving", 3, **PAIRS)
    assert (made.num_envs, made.metadata["autoreset_mode"]) == (6, AutoresetMode.SAME_STEP)
    observation, _ = made.reset(seed=4)
    assert made.observation_space.contains(observation)
    assert set(observation) == {"ego", "route", "road", "lights", "agents"}
    made.action_space.seed(0)
    ends = 0
    for _ in range(24):
        observation, reward, terminated, truncated, infos = made.step(made.action_space.sample())
        assert made.observation_space.contains(observation)
        ended = (terminated | truncated) & infos["valid"]
        assert not reward[~infos["valid"]].any()
        assert ("final_obs" in infos) == ended.any()
        if ended.any():
            assert np.array_equal(infos["_final_obs"], ended)
            assert all(made.single_observation_space.contains(row) for row in infos["final_obs"][ended])
            assert all(row is None for row in infos["final_obs"][~ended])
            assert np.array_equal(infos["final_info"]["_progress"] & ~ended, np.zeros(6, bool))
        ends += int(ended.sum())
    assert ends >= 6
    with pytest.raises(ValueError, match=r"has 2 agents; gymnasium\.Env has one"):
        gymnasium_export.single("driving", **PAIRS)


@pytest.mark.slow
def test_driving_on_the_host_keeps_the_contract_and_goes_on_exactly() -> None:
    description = host.describe("driving/generated", **PAIRS)
    taken = check_vector(lambda: host.make(description, 3), steps=24)
    finals = [step.finals for step in taken if len(step.finals.columns)]
    assert finals
    # What scores an episode is what the pure functions say of its last state.
    assert {"progress", "collision", "offroad"} <= set(finals[0].scores)
    with pytest.raises(ValueError, match="unexpected keyword argument 'agent'"):
        host.make(host.describe("driving/generated", agent=2), 1)
    with pytest.raises(ValueError, match="scenarios is 0"):
        driving_vector.driving_environment(scenarios=0)


def test_a_single_environment_equals_the_pure_functions() -> None:
    made, world = gymnasium_export.single("cartpole", max_steps=20), registry.make("cartpole", max_steps=20)
    observation, _ = made.reset(seed=5)
    seed = int(np.random.Generator(np.random.PCG64(np.random.SeedSequence(5))).integers(2**31))
    key = jax.random.fold_in(jax.random.key(seed), 0)
    state, seen = world.reset(jax.random.fold_in(jax.random.fold_in(key, 0), 0))
    np.testing.assert_allclose(observation, seen, rtol=1e-6)
    for t in range(20):
        observation, reward, terminated, truncated, _ = made.step(np.int64(t % 2))
        state, led_to = world.step(key, state, t % 2)
        np.testing.assert_allclose(observation, led_to.observation, rtol=1e-5, atol=1e-6)
        assert (reward, terminated, truncated) == (1.0, bool(led_to.terminated), bool(led_to.truncated))
        if terminated or truncated:
            break
    assert terminated or truncated


def test_packed_observations_are_seen_as_networks_see_them() -> None:
    form = gymnasium_export.observation_space(
        {"a": Leaf((2,), np.dtype(bool)), "b": (Leaf((), np.dtype(np.int32)), None)}
    )
    assert isinstance(form, gym.spaces.Dict)
    tree = {"a": np.array([[True, False]]), "b": (np.array([3], np.int32), None)}
    assert form.contains(mapped(lambda leaf: np.asarray(leaf[0]), gymnasium_export.as_spaces(tree)))
    made = gymnasium_export.vector("probe/masked", 2)
    observation, infos = made.reset(seed=0)
    assert np.array_equal(observation["action_mask"], infos["action_mask"])
    assert observation["action_mask"].dtype == np.int8


def test_names_are_known_to_gymnasium() -> None:
    ids = gymnasium_export.register()
    assert ids == gymnasium_export.register()
    assert {"longhaul/driving-v0", "longhaul/cartpole-v0"} <= set(ids)
    made = gym.make_vec("longhaul/cartpole-v0", 5, vectorization_mode="vector_entry_point")
    assert made.num_envs == 5
    alone = gym.make("longhaul/pendulum-v0")
    assert alone.action_space == gym.spaces.Box(-2.0, 2.0, (1,))


def returns(choose: Callable[[np.ndarray], np.ndarray], steps: int = 400) -> float:
    """The mean return of the first episodes of 64 poles."""
    made = gymnasium_export.vector("cartpole", 64, max_steps=200)
    observation, _ = made.reset(seed=9)
    total, alive = np.zeros(64), np.ones(64, bool)
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = made.step(choose(observation))
        total += reward * alive
        alive &= ~(terminated | truncated)
        if not alive.any():
            break
    return float(total.mean())


@pytest.mark.slow
def test_stable_baselines_is_told_what_an_episode_of_driving_scored() -> None:
    pytest.importorskip("stable_baselines3")
    made = gymnasium_export.stable_baselines("driving", 4, **DRIVING)
    made.reset()
    told = [info for _ in range(13) for info in made.step(np.zeros(4, np.int64))[3] if info]
    assert len(told) >= 4
    assert all({"progress", "collision", "terminal_observation"} <= set(info) for info in told)


def test_a_learner_that_is_not_ours_learns_through_it() -> None:
    """Random search over linear policies (Mania, Guy and Recht 2018): a pole is kept up by one within a few draws."""
    random = np.random.default_rng(0)
    tried = [random.normal(size=4) for _ in range(12)]
    scores = [returns(lambda seen, w=w: (seen @ w > 0).astype(np.int64), 200) for w in tried]
    assert max(scores) > 150
    assert returns(lambda seen: random.integers(0, 2, 64)) < 40


def test_stable_baselines_trains_on_it() -> None:
    stable = pytest.importorskip("stable_baselines3")
    made = gymnasium_export.stable_baselines("cartpole", 8, max_steps=200)
    model = stable.PPO("MlpPolicy", made, n_steps=64, batch_size=128, learning_rate=1e-3, seed=0, device="cpu")
    model.learn(12_000)
    after = returns(lambda seen: model.predict(seen, deterministic=True)[0], 200)
    assert after > 80
    driving = gymnasium_export.stable_baselines("driving", 4, **DRIVING)
    stable.PPO("MultiInputPolicy", driving, n_steps=16, batch_size=32, seed=0, device="cpu").learn(128)


@pytest.fixture(scope="module")
def rllib() -> Iterator[Any]:
    """RLlib, on a Ray of its own with one core."""
    pytest.importorskip("torch")
    ray = pytest.importorskip("ray")
    found = pytest.importorskip("ray.rllib")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield found
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # Ray begins its processes by it, beside threads of JAX
@pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning")  # RLlib names all environments alike
@pytest.mark.parametrize(
    ("name", "options", "batch", "longest"), [("cartpole", {"max_steps": 200}, 512, 200), ("driving", DRIVING, 96, 12)]
)
def test_rllib_trains_on_it(rllib: Any, name: str, options: dict[str, Any], batch: int, longest: int) -> None:
    """Two updates by its PPO: every step counts, every episode's end, and what was learnt is another policy."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.connectors.env_to_module import FlattenObservations
    from ray.tune import register_env

    def flat(*_: Any, **__: Any) -> Any:
        return FlattenObservations()

    register_env(f"ours-{name}", lambda _: gymnasium_export.single(name, **options))
    config = PPOConfig().environment(f"ours-{name}").training(train_batch_size_per_learner=batch, num_epochs=2)
    config = config.training(minibatch_size=batch // 4).env_runners(
        num_env_runners=0, num_envs_per_env_runner=4, env_to_module_connector=flat if name == "driving" else None
    )
    algorithm = config.build_algo()
    before = mapped(np.copy, algorithm.get_module().get_state())
    told = [algorithm.train() for _ in range(2)]
    after = algorithm.get_module().get_state()
    seen = told[-1]["env_runners"]
    assert seen["num_env_steps_sampled_lifetime"] >= 2 * batch
    assert 1 <= seen["episode_len_min"] <= seen["episode_len_max"] <= longest
    assert np.isfinite(seen["episode_return_mean"])
    if name == "cartpole":
        # 1 a step; the windows of the two means differ.
        assert seen["episode_return_mean"] == pytest.approx(seen["episode_len_mean"], abs=0.5)
    assert told[-1]["learners"]["default_policy"]["num_module_steps_trained_lifetime"] >= 2 * batch
    assert any(not np.array_equal(after[key], before[key]) for key in before)
    algorithm.stop()
