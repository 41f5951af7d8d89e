"""Environments of other libraries keep our contract: their last observations, and ends told from truncations.

The adapter is tested with a world of our own. Each suite that is installed is put through the same contract, and where
it has a reset of its own, through its own stepping, too.
"""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.cli import main
from longhaul.envs import registry, suite_adapters
from longhaul.envs.suite_adapters import Step, World
from longhaul.spaces import Discrete, Masked
from tests.helpers.environment_contract import check_environment, sample_action

SHORT = {
    "gymnax": "gymnax/CartPole-v1",
    "brax": "brax/inverted_pendulum?backend=spring",
    "playground": "playground/CartpoleBalance",
    "jumanji": "jumanji/Snake-v1",
    "navix": "navix/Navix-Empty-5x5-v0",
    "craftax": "craftax/Craftax-Classic-Symbolic-v1",
    "xminigrid": "xminigrid/MiniGrid-Empty-5x5",
    "pgx": "pgx/minatar-breakout",
}


@pytest.fixture(autouse=True)
def as_their_code_is(request: pytest.FixtureRequest) -> Any:
    """Suites promote ranks, which our own code may not."""
    with jax.numpy_rank_promotion("allow" if "filterwarnings" in request.keywords else "raise"):
        yield


def made(kind: str, most: int | None = None) -> Any:
    if importlib.util.find_spec(suite_adapters.SUITES[kind].module) is None:
        pytest.skip(f"{kind} is not installed")
    name = SHORT[kind]
    limit = "" if most is None else f"{'&' if '?' in name else '?'}max_steps={most}"
    return registry.make(name + limit)


def counter(ends: int = 99, cuts: int = 99, limit: int | None = None) -> World:
    """Counts its steps; ends after `ends` of them, and is truncated of its own after `cuts`."""

    def step(key: jax.Array, state: jax.Array, action: jax.Array) -> Step:
        after = state + 1
        return Step(after, {"t": after.astype(jnp.float32)}, after, after >= ends, after >= cuts)

    return World(
        Discrete(2), lambda key: (jnp.int32(0), {"t": jnp.float32(0.0)}), step, limit, None if cuts == 99 else 1
    )


def test_the_adapter_keeps_the_contract() -> None:
    check_environment(suite_adapters.adapted(counter(ends=7, limit=5)), steps=16)


@pytest.mark.parametrize(
    ("world", "most", "last", "terminated"),
    [
        (counter(ends=4), 9, 4, True),
        (counter(ends=4), 4, 4, True),  # both in one step: nothing follows, so it is an end
        (counter(limit=6), None, 6, False),
        (counter(limit=6), 3, 3, False),
        (counter(cuts=2), 9, 2, False),
        (counter(ends=2, cuts=2), 9, 2, True),
    ],
)
def test_ends_are_told_from_truncations(world: World, most: int | None, last: int, terminated: bool) -> None:
    environment = suite_adapters.adapted(world, most)
    state, _ = environment.reset(jax.random.key(0))
    for t in range(1, last + 1):
        assert environment.active(state)
        state, led_to = environment.step(jax.random.key(t), state, jnp.int32(0))
        assert float(led_to.successor["t"]) == t == float(led_to.reward)
        assert bool(led_to.terminated | led_to.truncated) == (t == last)
    assert bool(led_to.terminated) == terminated == (not bool(led_to.truncated))
    assert not environment.active(state)


def test_a_step_leaves_the_state_that_it_is_given_as_it_was() -> None:
    """Playground's tasks write their metrics into it."""

    def step(key: jax.Array, state: dict[str, jax.Array], action: jax.Array) -> Step:
        state["t"] = state["t"] + 1
        return Step(state, state["t"], state["t"], False, False)

    world = World(Discrete(2), lambda key: ({"t": jnp.float32(0.0)}, jnp.float32(0.0)), step, 9, None)
    environment = suite_adapters.adapted(world)
    state, _ = environment.reset(jax.random.key(0))
    after, _ = environment.step(jax.random.key(1), state, jnp.int32(0))
    assert (float(state.inner["t"]), float(after.inner["t"])) == (0.0, 1.0)


def test_a_suite_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install playground"):
        registry.make("playground/CartpoleBalance")
    assert all("pip install" in line for _, line in suite_adapters.rows())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", suite_adapters.SUITES)
def test_each_suite_keeps_the_contract(kind: str) -> None:
    check_environment(made(kind, 12), steps=32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", suite_adapters.SUITES)
def test_a_time_limit_truncates_and_its_successor_is_the_state_it_led_to(kind: str) -> None:
    """With a limit of n the first n steps are those without it: the same observations, to the last."""
    short, long = made(kind, 3), made(kind)
    assert short.spec.max_steps == 3 < long.spec.max_steps
    states = [each.reset(jax.random.key(1))[0] for each in (short, long)]
    seen = long.reset(jax.random.key(1))[1]
    steps = [jax.jit(each.step) for each in (short, long)]
    for t in range(3):
        key = jax.random.key(10 + t)
        action = sample_action(long.spec, key, seen)
        (states[0], cut), (states[1], on) = (go(key, state, action) for go, state in zip(steps, states, strict=True))
        seen = on.successor
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), cut.successor, on.successor)
        if bool(on.terminated):
            assert bool(cut.terminated) and not bool(cut.truncated)
            return
    assert bool(cut.truncated) and not bool(cut.terminated) and not bool(on.truncated)


IDLE = {
    "gymnax/MountainCar-v0": 1,  # no push
    "jumanji/RubiksCube-partly-scrambled-v0": 0,  # the same face, round and round
    "navix/Navix-Empty-5x5-v0": 0,  # turns left
    "xminigrid/MiniGrid-Empty-5x5": 1,
}
"""Environments with a limit of their own, and an action that never ends an episode."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IDLE)
def test_its_own_time_limit_is_a_truncation(name: str) -> None:
    """Jumanji calls it an end, and tells it from one in no other way than by when it comes."""
    if importlib.util.find_spec(suite_adapters.SUITES[name.partition("/")[0]].module) is None:
        pytest.skip(f"{name} is not installed")
    environment = registry.make(name)
    limit = environment.spec.max_steps
    assert limit < 1000 and environment.spec.truncation_interval == limit
    state, seen = environment.reset(jax.random.key(0))
    step, shape = jax.jit(environment.step), sample_action(environment.spec, jax.random.key(0), seen)
    for t in range(limit):
        assert environment.active(state), t
        state, led_to = step(jax.random.key(t), state, jnp.full_like(shape, IDLE[name]))
        assert not bool(led_to.terminated)
    assert bool(led_to.truncated) and not environment.active(state)


@pytest.mark.filterwarnings("ignore")
def test_gymnax_says_the_same_when_it_resets_itself() -> None:
    """Its own `step` tells the last observation beside the reset; ours is that one, with the same flags."""
    ours = made("gymnax")
    env, params = importlib.import_module("gymnax").make("CartPole-v1")
    key = jax.random.key(3)
    mine, _ = ours.reset(key)
    _, theirs = env.reset_env(key, params)
    step = jax.jit(ours.step)
    for t in range(40):
        key = jax.random.key(100 + t)
        action = jnp.int32(t % 2 if t < 6 else 1)
        _, theirs, reward, terminated, truncated, info = env.step(key, theirs, action, params)
        mine, led_to = step(jax.random.split(key)[0], mine, action)
        np.testing.assert_allclose(led_to.successor, info["final_observation"], rtol=1e-5, atol=1e-6)
        assert (bool(led_to.terminated), bool(led_to.truncated)) == (bool(terminated), bool(truncated))
        assert float(led_to.reward) == float(reward)
        if bool(terminated):
            assert not ours.active(mine)
            return
    raise AssertionError("the pole never fell")


@pytest.mark.filterwarnings("ignore")
def test_brax_ends_as_its_episode_wrapper_has_it() -> None:
    ours = made("brax", 30)
    training = importlib.import_module("brax.envs.wrappers.training")
    raw = importlib.import_module("brax.envs").get_environment("inverted_pendulum", backend="spring")
    env = training.EpisodeWrapper(raw, 30, 1)
    key = jax.random.key(0)
    theirs, (mine, _) = env.reset(key), ours.reset(key)
    step, own = jax.jit(ours.step), jax.jit(env.step)
    for t in range(30):
        action = jnp.array([0.05 * (-1) ** t])
        theirs = own(theirs, action)
        mine, led_to = step(key, mine, action)
        np.testing.assert_allclose(led_to.successor, theirs.obs, rtol=1e-5, atol=1e-6)
        cut = bool(theirs.info["truncation"] > 0)
        over = bool(theirs.done > 0)
        assert (bool(led_to.terminated), bool(led_to.truncated)) == (over and not cut, cut)
        if over:
            return


@pytest.mark.filterwarnings("ignore")
def test_masks_are_those_of_the_suite() -> None:
    environment = made("pgx")
    _, seen = environment.reset(jax.random.key(0))
    assert isinstance(seen, Masked) and seen.mask.shape == (environment.spec.action.n,)


EAGER = """
import jax
from pathlib import Path
from longhaul.config import resolve as runs
from longhaul.envs import suite_adapters
from longhaul.envs.suite_adapters import Step, World
from longhaul.training import api, loop
from longhaul.types import Discrete

def make(name):
    import jax.numpy as jnp
    jnp.zeros(1)  # as Brax does on import: from here on JAX has the devices that it was told of
    return World(Discrete(2), lambda key: (jnp.int32(0), jnp.zeros(1)),
                 lambda key, state, action: Step(state, jnp.zeros(1), jnp.float32(0), jnp.bool_(False)))

suite_adapters.SUITES["eager"] = suite_adapters.Suite("json", "eager", make, ("one",), "eager/one", "")
run = runs.Run("x", runs.Named("eager/one"), num_envs=64, num_steps=1, total_steps=64, devices=2)
loop.train = lambda *_, **__: None
api.begin(runs.resolve(run), Path("r"), asked={})
assert len(jax.devices()) == 2
"""


def test_a_suite_that_starts_jax_on_import_finds_all_devices(tmp_path: Path) -> None:
    """Brax does. With 64 worlds or more a run has a device a core, and was refused."""
    command = [sys.executable, "-c", EAGER]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_recipe_of_a_suite_that_is_not_installed_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    suite_adapters.make.cache_clear()  # where it is installed, a test before this one may have made it
    for words, package in (("brax-ant", "brax"), ("minatar-dqn", "gymnax"), ("cartpole --env pgx/x", "pgx")):
        assert main.main(["train", *words.split(), "--runs-dir", str(tmp_path / "runs")]) == 2
        assert f"pip install {package}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
