"""Environments on the host: all keep the contract, and equal the same environment stepped by hand."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax
import numpy as np
import pytest

from longhaul.algorithms import ppo
from longhaul.algorithms.config import PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.envs import registry
from longhaul.envs.host import gymnasium_vector, numpy_cartpole, torch_vector
from longhaul.envs.host import registry as host
from longhaul.envs.host import vector as vectors
from longhaul.envs.host.vector import Description, HostStep, HostVector
from longhaul.runtime.mesh import identity
from longhaul.spaces import Box, Leaf, Masked, MultiDiscrete, leaves, mapped
from tests.helpers.host_environments import length
from tests.helpers.host_vector_contract import actions, check_vector, roll, same

MODES = ("SameStep", "NextStep", "Disabled")
COUNT, SYNC, ALE = (f"vector/tests.helpers.host_environments:{name}" for name in ("Count", "sync", "ale"))
SHORT = {"max_num_frames_per_episode": 60, "noop_max": 9}  # 15 steps


def made(name: str, worlds: int = 3, **options: Any) -> HostVector:
    return host.make(host.describe(name, **options), worlds, 0)


CONFORM = [
    ("gymnasium/CartPole-v1", {"max_episode_steps": 16}, True),
    ("gymnasium/CartPole-v1", {"max_episode_steps": 16, "vectorised": False}, True),
    ("gymnasium/Pendulum-v1", {"max_episode_steps": 20}, True),
    ("gymnasium/FrozenLake-v1", {}, True),
    ("gymnasium/Blackjack-v1", {}, True),
    ("gymnasium/Taxi-v4", {"max_episode_steps": 20, "mask": "action_mask"}, True),
    ("gymnasium/MountainCarContinuous-v0", {"max_episode_steps": 20}, True),
    *((COUNT, {"mode": mode}, False) for mode in MODES),
    *((SYNC, {"mode": mode, "max_episode_steps": 16, "truncation_interval": 16}, True) for mode in MODES),
    pytest.param("ale/breakout", SHORT, True, marks=pytest.mark.slow),
    ("numpy/longhaul.envs.host.numpy_cartpole:cartpole", {"max_steps": 16}, True),
    pytest.param("jax/cartpole", {"max_steps": 16}, True, marks=pytest.mark.slow),  # compared step by step below
    pytest.param("jax/pendulum", {"max_steps": 20}, True, marks=pytest.mark.slow),
    ("jax/probe/agents", {}, False),
    ("jax/probe/masked", {}, False),
]


@pytest.mark.parametrize(("name", "options", "differs"), CONFORM, ids=lambda x: str(x))
def test_every_vector_keeps_the_contract(name: str, options: dict[str, Any], differs: bool) -> None:
    taken = check_vector(lambda: made(name, **options), steps=40, differs=differs)
    assert any(len(step.finals.columns) for step in taken), "nothing ended, nothing was checked"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CartPole-v1", {"max_episode_steps": 12}),
        ("Pendulum-v1", {"max_episode_steps": 9}),
        ("FrozenLake-v1", {}),
        ("Taxi-v4", {"max_episode_steps": 15}),
    ],
)
def test_a_loop_equals_the_environment_stepped_by_hand(name: str, options: dict[str, Any]) -> None:
    masked = {"mask": "action_mask"} if name == "Taxi-v4" else {}
    vector = made(f"gymnasium/{name}", 3, vectorised=False, **masked, **options)
    taken = roll(vector, 11, 60)
    random, seen = np.random.default_rng(11), vector.reset(11)
    chosen = []
    for step in taken:
        chosen.append(actions(vector.spec, 3, seen, random))
        seen = step.observation
    for world, seed in enumerate(vectors.seeds(11, 3)):
        alone = gym.make(name, **options)
        alone.reset(seed=seed)
        for t, step in enumerate(taken):
            observation, reward, terminated, truncated, _ = alone.step(chosen[t][world])
            assert step.reward[world] == np.float32(reward)
            assert (step.terminated[world], step.truncated[world]) == (terminated, truncated)
            if terminated or truncated:
                last = step.finals.observation
                last = last.observation if masked else last
                assert np.array_equal(last[step.finals.columns == world][0], np.asarray(observation, last.dtype))
                observation, infos = alone.reset()
                if masked:
                    assert np.array_equal(step.observation.mask[world], infos["action_mask"].astype(bool))
            following = step.observation.observation if masked else step.observation
            assert np.array_equal(following[world], np.asarray(observation, following.dtype))
    assert any(step.truncated.any() for step in taken) or name == "FrozenLake-v1"


Transition = tuple[Any, ...]


def transitions(vector: HostVector, seed: int, steps: int, choose: Any) -> list[list[Transition]]:
    """Of each column its valid steps: what was seen, reward, ends, and what was seen next, the truth where it ended.

    `choose(column, n)` is the action of a column's n-th valid step, so that dead steps shift nothing.
    """
    seen, waits = mapped(np.copy, vector.reset(seed)), np.zeros(vector.columns, bool)
    found: list[list[Transition]] = [[] for _ in range(vector.columns)]
    for _ in range(steps):
        action = np.array([choose(column, len(rows)) for column, rows in enumerate(found)], np.int32)
        step: HostStep = mapped(np.copy, vector.step(action))
        final = dict(zip(step.finals.columns.tolist(), range(len(step.finals.columns)), strict=True))
        for column in np.flatnonzero(step.valid):
            to, row = (step.finals.observation, final[column]) if column in final else (step.observation, column)
            flags = (step.reward[column], step.terminated[column], step.truncated[column])
            found[column].append((vectors.take(seen, column), *flags, vectors.take(to, row)))
        assert not step.valid[waits].any() or vector._mode != "NextStep"  # type: ignore[attr-defined]
        seen, waits = step.observation, step.terminated | step.truncated
    return found


@pytest.mark.parametrize("mode", MODES)
def test_in_each_autoreset_mode_the_transitions_are_those_that_follow_from_the_rules(mode: str) -> None:
    found = transitions(made(COUNT, mode=mode), 0, 30, lambda column, n: n % 3)
    for world, rows in enumerate(found):
        assert len(rows) >= 20
        episode = count = 0
        last = 0  # -1 in the environment's words
        for n, (seen, reward, terminated, truncated, led_to) in enumerate(rows):
            assert seen["where"].tolist() == [world, episode, count]
            assert seen["last"][0] == last
            count, last, end = count + 1, n % 3 + 1, length(world, episode)
            assert led_to["where"].tolist() == [world, episode, count]
            assert led_to["last"][0] == last
            assert reward == count
            assert (terminated, truncated) == (count == end != 5, count == end == 5)
            if count == end:
                episode, count, last = episode + 1, 0, 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (SYNC, {"max_episode_steps": 12}),
        (SYNC, {"env_id": "Taxi-v4", "max_episode_steps": 12, "mask": "action_mask"}),
        pytest.param(ALE, {**SHORT, "truncation_interval": 15}, marks=pytest.mark.slow),
        (ALE, {**SHORT, "truncation_interval": 15, "episodic_life": True}),
    ],
)
def test_the_modes_of_an_environment_give_the_same_transitions(name: str, options: dict[str, Any]) -> None:
    chosen = np.random.default_rng(3).integers(0, 2, (3, 60))
    modes = MODES[:2] if name == ALE else MODES  # the emulator has no third
    each = [transitions(made(name, mode=mode, **options), 5, 40, lambda column, n: chosen[column, n]) for mode in modes]
    for column in range(3):
        compared = min(len(found[column]) for found in each)
        assert compared >= 30
        for found in each[1:]:
            assert same(found[column][:compared], each[0][column][:compared])
    ends = [row for rows in each[0] for row in rows if row[2] or row[3]]
    assert any(row[3] for row in ends)
    # What ended an episode is not what the next begins with.
    firsts = [following[0] for rows in each[0] for row, following in itertools.pairwise(rows) if row[2] or row[3]]
    assert any(not same(row[4], first) for row, first in zip(ends, firsts, strict=False))


def test_gymnasiums_vector_cartpole_steps_as_its_scalar_one_does() -> None:
    vector = made("gymnasium/CartPole-v1", 4, max_episode_steps=30)
    alone = gym.make("CartPole-v1").unwrapped
    found = transitions(vector, 2, 80, lambda column, n: (n // 2) % 2)
    checked = 0
    for rows in found:
        for n, (seen, reward, terminated, _, led_to) in enumerate(rows):
            alone.reset()
            alone.state = seen.astype(np.float64)
            expected, its_reward, its_end, _, _ = alone.step((n // 2) % 2)
            np.testing.assert_allclose(led_to, expected, rtol=1e-5, atol=1e-5)  # the vector keeps 64 bits
            assert reward == its_reward
            assert terminated == its_end or abs(abs(expected[2]) - alone.theta_threshold_radians) < 1e-5
            checked += terminated
    assert checked >= 4


def test_the_numpy_cartpole_steps_as_gymnasiums_and_its_starts_know_no_history() -> None:
    ours, alone = numpy_cartpole.cartpole(5, max_steps=500), gym.make("CartPole-v1").unwrapped
    ours.reset(3)
    for t in range(12):
        before = ours.state()["physics"]
        chosen = np.array([t % 2, 1, 0, 1, (t // 3) % 2])
        _, _, terminated, _ = ours.step(chosen)
        for world in range(5):
            alone.reset()
            alone.state = before[world]
            _, _, its_end, _, _ = alone.step(int(chosen[world]))
            np.testing.assert_allclose(ours.state()["physics"][world], alone.state, rtol=1e-12, atol=1e-15)
            assert terminated[world] == its_end
    again, first = numpy_cartpole.cartpole(5), np.arange(5) == 0
    again.restore(ours.state())
    seen = again.restart(first)
    assert np.array_equal(seen[1:], ours.state()["physics"][1:].astype(np.float32)), "the others are where they were"
    late = ours.restart(np.array([False, True, False, False, True]))
    fresh = numpy_cartpole.cartpole(5)
    fresh.reset(3)
    assert np.array_equal(fresh.restart(np.ones(5, bool))[[1, 4]], late[[1, 4]])
    for _ in range(numpy_cartpole.AHEAD):  # past those that are drawn at once
        late = ours.restart(np.ones(5, bool))
    for world, episode in enumerate(numpy_cartpole.AHEAD + np.array([0, 1, 0, 0, 1])):
        start = numpy_cartpole.START * (
            2.0 * numpy_cartpole.uniform(3, np.array([world]), np.array([episode]), 4) - 1.0
        )
        assert np.array_equal(late[world], start[0].astype(np.float32))
    drawn = numpy_cartpole.uniform(1, np.arange(20_000), np.zeros(20_000, np.int64), 4)
    assert abs(drawn.mean() - 0.5) < 0.005
    assert abs(drawn.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(drawn.T) - np.eye(4)).max() < 0.03


def test_our_own_environments_equal_the_pure_functions_with_the_same_keys() -> None:
    vector, world = made("jax/cartpole", 16, max_steps=9), registry.make("cartpole", max_steps=9)
    taken = roll(vector, 4, 40)
    step = jax.jit(world.step)
    random = np.random.default_rng(4)
    chosen = [actions(vector.spec, 16, None, random) for _ in taken]
    for column in (0, 13):
        key = jax.random.fold_in(jax.random.key(4), column)
        episodes, steps = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
        state, seen = world.reset(jax.random.fold_in(episodes, 0))
        episode = 0
        for t, was in enumerate(taken):
            state, led_to = step(jax.random.fold_in(steps, t), state, chosen[t][column])
            np.testing.assert_allclose(was.reward[column], led_to.reward)
            assert was.truncated[column] == bool(led_to.truncated)
            seen = led_to.observation
            if led_to.terminated | led_to.truncated:
                last = was.finals.observation[was.finals.columns == column][0]
                np.testing.assert_allclose(last, led_to.successor, rtol=1e-6)
                episode += 1
                state, seen = world.reset(jax.random.fold_in(episodes, episode))
            np.testing.assert_allclose(was.observation[column], seen, rtol=1e-6)
    # All sixteen are truncated at once where they live so long: more than one call begins anew.
    assert max(len(was.finals.columns) for was in taken) > 2


def test_a_module_before_a_name_registers_it_as_in_gymnasium_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    line = f"import gymnasium\ngymnasium.register('Late-v0', entry_point={entry!r}, max_episode_steps=7)\n"
    (tmp_path / "late_worlds.py").write_text(line)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    vector = made("gymnasium/late_worlds:Late-v0")
    assert (vector.spec.max_steps, vector.worlds) == (7, 3)
    vector.close()
    with pytest.raises(ValueError, match="no_such_worlds can't be imported: ModuleNotFoundError"):
        made("gymnasium/no_such_worlds:Late-v0")


def test_agents_are_columns_and_wait_for_their_world() -> None:
    vector = made("jax/probe/agents", 2)  # agent j plays j + 1 steps
    vector.reset(0)
    for _ in range(2):
        for t in range(3):
            step = vector.step(np.zeros(6, np.int32))
            assert step.valid.tolist() == [t <= j for j in (0, 1, 2)] * 2
            assert step.finals.columns.tolist() == [t, 3 + t]
            assert step.truncated[[t, 3 + t]].tolist() == [t == 1] * 2
            assert step.terminated[[t, 3 + t]].tolist() == [t != 1] * 2


def test_a_description_is_plain_data_and_processes_start_without_jax() -> None:
    wanted = host.describe("numpy/longhaul.envs.host.numpy_cartpole:cartpole", max_steps=9)
    assert pickle.loads(pickle.dumps(wanted)) == wanted == Description(*wanted)
    assert hash(wanted) == hash(host.describe("numpy/longhaul.envs.host.numpy_cartpole:cartpole", max_steps=9))
    program = (
        "import sys\n"
        "from longhaul.envs.host import registry as host\n"
        "for name in ('gymnasium/CartPole-v1', 'gymnasium/Pendulum-v1', 'ale/pong',\n"
        "             'numpy/longhaul.envs.host.numpy_cartpole:cartpole'):\n"
        "    vector = host.make(host.describe(name), 2, 0)\n"
        "    vector.reset(0)\n"
        "    vector.close()\n"
        "print('jax' in sys.modules, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_a_name_of_an_earlier_version_is_that_of_today() -> None:
    assert host.describe("numpy/longhaul.envs.batched:cartpole?max_steps=9") == host.describe(
        "numpy/longhaul.envs.host.numpy_cartpole:cartpole", max_steps=9
    )


def test_options_may_stand_in_a_name_and_other_question_marks_are_a_path() -> None:
    named = host.describe("ale/pong?img_height=42&episodic_life=True&roms=here")
    assert named == host.describe("ale/pong", img_height=42, episodic_life=True, roms="here")
    assert host.describe("driving/logs/part-?.tfrecord").name == "logs/part-?.tfrecord"


def test_spaces_become_forms() -> None:
    spaces = gym.spaces
    box = gymnasium_vector.observation_way(spaces.Box(0, 255, (4, 5), np.uint8))
    assert box.form == Leaf((4, 5), np.dtype(np.uint8))
    assert gymnasium_vector.observation_way(spaces.Box(0, 1, (2,), np.float64)).form.dtype == np.float32
    pair = gymnasium_vector.observation_way(spaces.MultiDiscrete([2, 3], start=[5, 1]))
    assert pair.form == Leaf((2,), np.dtype(np.int32), (2, 3))
    assert pair.convert(np.array([[6, 3]])).tolist() == [[1, 2]]
    legal = spaces.Dict({"observation": spaces.Discrete(3), "action_mask": spaces.Box(0, 1, (4,), np.int8)})
    assert isinstance(gymnasium_vector.observation_way(legal).form, Masked)
    with pytest.raises(ValueError, match="arrays of a fixed size can't hold them"):
        gymnasium_vector.observation_way(spaces.Text(4))

    torque = gymnasium_vector.action_way(spaces.Box(-2, 3, (1, 2), np.float64))
    assert torque.form == Box((-2.0, -2.0), (3.0, 3.0))
    assert torque.convert(np.zeros((7, 2), np.float32)).shape == (7, 1, 2)
    assert torque.convert(np.zeros((7, 2), np.float32)).dtype == np.float64
    assert gymnasium_vector.action_way(spaces.MultiBinary(2)).form == MultiDiscrete((2, 2))
    grid = gymnasium_vector.action_way(spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [0, 0]]))
    assert grid.form == MultiDiscrete((2, 3, 4, 5))
    assert grid.convert(np.array([[1, 2, 3, 4]], np.int32)).tolist() == [[[2, 3], [3, 4]]]
    free = spaces.Box(-np.inf, np.inf, (2,))
    with pytest.raises(ValueError, match=r"action_bound=1\.0 gives them some"):
        gymnasium_vector.action_way(free)
    assert gymnasium_vector.action_way(free, 1.5).form == Box((-1.5, -1.5), (1.5, 1.5))
    with pytest.raises(ValueError, match="they must be Discrete"):
        gymnasium_vector.action_way(spaces.Dict({"a": spaces.Discrete(2)}))


def test_discrete_observations_are_one_hot() -> None:
    spec = vectors.specification(made("gymnasium/FrozenLake-v1").spec)
    assert spec.expand is not None
    assert spec.expand(np.array([[3], [15]], np.int32)).shape == (2, 1, 16)
    assert np.argmax(spec.expand(np.array([[3], [15]], np.int32)), -1).tolist() == [[3], [15]]
    blackjack = vectors.specification(made("gymnasium/Blackjack-v1").spec)
    assert blackjack.expand is not None
    seen = blackjack.expand(tuple(np.array([n], np.int32) for n in (17, 3, 1)))
    assert [x.shape for x in seen] == [(1, 32), (1, 11), (1, 2)]
    assert vectors.specification(made("gymnasium/CartPole-v1").spec).expand is None
    assert host.specification(made("gymnasium/FrozenLake-v1")).expand is not None
    assert host.specification(made("jax/cartpole")) == registry.make("cartpole").spec


@pytest.mark.slow  # actor_learner/test_host_rollout.py acts in vectors
def test_an_algorithm_acts_on_what_a_vector_gives() -> None:
    vector = made("gymnasium/Taxi-v4", 2, mask="action_mask")
    algorithm = ppo.ppo(vectors.specification(vector.spec), PPOConfig(), RunContext(updates=1, mean=identity))
    policy = algorithm.policy(jax.jit(algorithm.init)(jax.random.key(0)))
    seen, act = vector.reset(1), jax.jit(algorithm.act)
    for t in range(8):
        action, _, _ = act(policy, (), seen, jax.random.key(t))
        assert np.take_along_axis(seen.mask, np.asarray(action)[:, None], 1).all()
        seen = vector.step(np.asarray(action)).observation


def test_observations_may_be_lists_of_numbers() -> None:
    plain, arrays = (made(f"single/tests.helpers.own_environments:{name}Corridor") for name in ("Plain", "Gym"))
    assert same(plain.reset(3), arrays.reset(3))
    ended = 0
    for _ in range(12):
        steps = [vector.step(np.ones(3, np.int32)) for vector in (plain, arrays)]
        assert same(*steps)
        ended += len(steps[0].finals.columns)
    assert ended and steps[0].finals.observation.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("driving", {}, "'driving' is a kind of environments on the host; write one of them: driving/generated"),
        ("cartpole", {}, "'cartpole' is no environment on the host; write KIND/NAME, KIND one of gymnasium"),
        ("gym/CartPole-v1", {}, "KIND one of gymnasium"),
        ("gymnasium/CartPol-v1", {}, "CartPol-v1 can't be made"),
        ("gymnasium/CartPole-v1", {"wrong": 3}, "CartPole-v1 can't be made: .*wrong"),
        ("ale/pongg", {}, "pongg can't be made"),
        ("vector/json:nothing", {}, "json has no nothing"),
        ("single/tests.helpers.own_environments:OldCorridor", {}, r"'seed'; Gymnasium's is reset\(self, \*, seed=None"),
        (
            "vector/tests.helpers.own_environments:unasked_vector",
            {},
            r"the number of worlds: def make\(num_envs\)",
        ),
        ("vector/tests.helpers.own_environments:fixed_vector", {}, "has made 2 worlds, and 3 were asked for"),
        ("numpy/nowhere:f", {}, "nowhere can't be imported"),
        ("numpy/longhaul.envs.host.numpy_cartpole:cartpole", {"max_steps": 0}, "max_steps is 0"),
        ("numpy/longhaul.envs.host.numpy_cartpole:cartpole", {"wrong": 0}, "unexpected keyword argument 'wrong'"),
        ("jax/cartpol", {}, "did you mean cartpole"),
        ("gymnasium/CartPole-v1", {"mask": "action_mask"}, "infos have no 'action_mask'"),
        ("gymnasium/Pendulum-v1", {"mask": "action_mask"}, "a mask of legal actions for actions that are a Box"),
    ],
)
def test_bad_input_is_answered_in_a_line(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        made(name, **options).reset(0)
    assert "\n" not in str(caught.value)


def test_no_environments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_envs is 0; at least 1"):
        made("jax/cartpole", 0)


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(host.KINDS, "envpool", host.KINDS["envpool"]._replace(needs=("json", "not_there")))
    with pytest.raises(ValueError, match=r"envpool/Pong-v5 needs not_there: pip install longhaul-rl\[envpool\]"):
        made("envpool/Pong-v5")
    assert any("needs not_there" in line for _, line in host.names())


def test_a_broken_promise_of_truncation_is_found() -> None:
    vector = made(COUNT, 3, truncation_interval=20)
    with pytest.raises(ValueError, match=r"truncates an episode 10 steps after another.*truncation_interval=10"):
        roll(vector, 0, 40)


def test_a_spoiled_vector_fails_the_check() -> None:
    class Spoiled:
        """Tells the next episode's first observation for the last one's end, as cleanrl#198 did."""

        def __init__(self) -> None:
            self._inner = made(COUNT)
            self.spec, self.worlds, self.columns = self._inner.spec, 3, 3
            self.reset, self.close, self.state = self._inner.reset, self._inner.close, self._inner.state
            self._mode = ""

        def step(self, action: np.ndarray, out: Any = None) -> HostStep:
            step = self._inner.step(action, out)
            wrong = vectors.take(step.observation, step.finals.columns)
            return step._replace(finals=step.finals._replace(observation=wrong))

    rows = transitions(Spoiled(), 0, 12, lambda column, n: 0)[0]  # type: ignore[arg-type]
    ends = [row for row in rows if row[2] or row[3]]
    assert ends
    assert all(row[4]["where"][2] == 0 for row in ends), "the rules' test above would see it"


def test_interval_starts_anew() -> None:
    interval = vectors.Interval(made(COUNT, truncation_interval=4).spec, 1)
    interval.check(np.array([True]))
    for _ in range(3):
        interval.check(np.array([False]))
    interval.check(np.array([True]))
    with pytest.raises(ValueError, match="1 steps after another"):
        interval.check(np.array([True]))
    assert leaves(made(COUNT).spec.observation)[0].choices == (4,)


def test_tensors_are_seen_in_their_own_memory_and_finals_are_told_or_not() -> None:
    torch = pytest.importorskip("torch")
    name = "torch/tests.helpers.host_environments:Tensors"
    for tell in (True, False):
        options = {"tell": tell, "final_observations": tell, "action_bound": 1.0}
        check_vector(lambda options=options: made(name, 3, **options), steps=20)
        vector = made(name, 3, **options)
        seen = vector.reset(2).copy()
        assert vector.spec.true_successors == tell
        assert vector.spec.observation == Leaf((2,), np.dtype(np.float32))
        for t in range(1, 9):
            step = vector.step(np.array([[-1.0], [-1.0], [1.0 if t == 3 else -1.0]], np.float32))
            final = step.finals
            for row, column in enumerate(final.columns):
                expected = seen[column] + [tell, 0.0]  # the step's number, where the environment tells it
                assert np.array_equal(final.observation[row], expected)
            assert step.terminated.tolist() == [False, False, t == 3]
            assert step.truncated[:2].tolist() == [t in (4, 8)] * 2
            seen = step.observation.copy()
    with pytest.raises(ValueError, match=r"without bounds; the option action_bound=1\.0"):
        made(name)
    tensor = torch.arange(6.0).reshape(2, 3)
    assert np.shares_memory(torch_vector._numpy(tensor), tensor.numpy())
    vector = made(name, 3, action_bound=1.0)
    vector.reset(0)
    led_to = vector.on_device(jax.numpy.full((3, 1), -0.5))  # type: ignore[attr-defined]
    assert led_to.reward.tolist() == [1.0] * 3
    assert led_to.observation.shape == (3, 2)
    assert not led_to.terminated.any()


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_envpool_keeps_the_contract(name: str) -> None:
    pytest.importorskip("envpool")
    taken = check_vector(lambda: made(f"envpool/{name}", max_episode_steps=20), steps=50)
    assert any(not step.valid.all() for step in taken)
    assert any(len(step.finals.columns) for step in taken)
