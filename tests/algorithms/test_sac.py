"""SAC on the probes: known values, true successors, many devices, its place in a run, and an expert to imitate."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import registry, sac, td3
from longhaul.algorithms.config import OffPolicy, SACConfig, TD3Config
from longhaul.algorithms.run_context import RunContext
from longhaul.environment import vectorise
from longhaul.envs import probes
from longhaul.envs.probes import PROBES, Probe
from longhaul.replay import Sizes, Transitions
from longhaul.rollout import collector, play, starts
from longhaul.runtime import mesh as meshes
from longhaul.runtime.config_fields import replaced
from longhaul.spaces import Box, Discrete
from longhaul.topologies import fused
from longhaul.types import Algorithm, Guided, Key, Rollout, Spec, Successors, TimeStep
from tests.helpers.quick import QUICK, quick

UPDATES, WORLDS, STEPS = 120, 16, 8


@dataclass(frozen=True)
class Steered:
    """A probe whose actions do not matter, with a vector for its action."""

    inner: Any

    @property
    def spec(self) -> Any:
        return replace(self.inner.spec, action=Box((-1.0,), (3.0,)))

    def reset(self, key: Key) -> Any:
        return self.inner.reset(key)

    def step(self, key: Key, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        return self.inner.step(key, state, jnp.zeros(action.shape[:-1], jnp.int32))

    def active(self, state: Any) -> jax.Array:
        return self.inner.active(state)

    def metrics(self, state: Any) -> dict:
        return {}


def steered(probe: Probe) -> Probe:
    return replace(probe, environment=Steered(probe.environment))


SMALL: dict[str, Any] = {
    "lr": 1e-2, "tau": 0.1, "batch_size": 128, "gradient_steps": 8, "learning_starts": 3 * WORLDS * STEPS,
    "replay_size": 4096, "hidden_dim": 32, "num_layers": 1,
}  # fmt: skip


def config(probe: Probe, **changes: Any) -> SACConfig:
    return replaced(SACConfig(), gamma=probe.gamma, **(SMALL | {"temperature": 0.0} | changes))


def trained(probe: Probe, settings: OffPolicy, devices: int = 1, wrong: Any = None) -> tuple[Any, Algorithm, Any]:
    """(the last state, the algorithm, metrics of the last updates); `wrong` changes what is learnt from."""
    mesh = meshes.make_mesh(devices)
    sizes = Sizes(devices, WORLDS // devices * (probe.environment.spec.agents or 1), STEPS)
    registry.check(settings, sizes)
    made = registry.make(probe.environment.spec, settings, RunContext(UPDATES, meshes.mean_over_data, sizes=sizes))
    algorithm = made if wrong is None else made._replace(learn=lambda s, data, key: made.learn(s, wrong(data), key))
    collect = collector(vectorise(probe.environment, WORLDS // devices), algorithm.act, algorithm.memory, steps=STEPS)
    progress = fused.start(algorithm, fused.entering(lambda _: collect, mesh), (), jax.random.key(0), mesh)
    program = fused.compiled(algorithm, lambda _: collect, progress, (), mesh, block=UPDATES)
    for progress, _, metrics in fused.fused(program, progress, (), updates=UPDATES, block=UPDATES):
        pass
    assert np.all(jax.device_get(metrics["finite"]))
    for leaf in jax.tree.leaves(progress.state.params):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert len(others) == devices - 1
        for other in others:
            np.testing.assert_array_equal(other, first, "devices' parameters have come apart")
    return jax.device_get(progress.state), algorithm, jax.device_get(metrics)


def check(probe: Probe, settings: OffPolicy, state: Any, algorithm: Algorithm) -> None:
    """The values that a learner believes in, and the return of its mode, are those that are known."""
    observations, expected = zip(*probe.value, strict=True)
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *observations)
    if isinstance(settings, SACConfig):
        found = quick(sac.critic(probe.environment.spec, settings))(state, batch)
    elif isinstance(settings, TD3Config):
        found = quick(td3.critic(probe.environment.spec, settings))(state, batch)
    else:
        found = quick(registry.network(probe.environment.spec, settings).apply)(algorithm.policy(state), (), batch)[1]
    np.testing.assert_allclose(found, expected, atol=0.05 * max(1.0, *map(abs, expected)))
    if probe.policy is not None:
        environment = probe.environment
        begun = quick(lambda key: starts(environment, key, 64))(jax.random.key(1))
        player = quick(play(environment, algorithm.act, algorithm.memory, steps=environment.spec.max_steps))
        episodes, _ = player(algorithm.policy(state), begun, None, jax.random.key(2))
        score = np.asarray(episodes.scores["return"].value)[np.asarray(episodes.valid)]
        assert abs(score.mean() - probe.best_return) <= 0.05 * max(1.0, abs(probe.best_return))


def learnt(probe: Probe, settings: OffPolicy, devices: int = 1) -> tuple[Any, Any]:
    """(the last state, metrics of the last updates) of a learner that found the known values."""
    state, algorithm, metrics = trained(probe, settings, devices)
    check(probe, settings, state, algorithm)
    return state, metrics


CHOICES = ["constant", "time_limit", "terminal_reward", "two_step", "action", "masked", "successor", "agents"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_choices_have_their_known_values(name: str) -> None:
    probe = PROBES[name]()
    learnt(probe, config(probe))


@pytest.mark.parametrize("name", ["successor", pytest.param("time_limit", marks=pytest.mark.slow)])
def test_vectors_bootstrap_from_the_true_successor(name: str) -> None:
    probe = steered(PROBES[name]())
    learnt(probe, config(probe))


@pytest.mark.slow
def test_a_swapped_successor_is_seen() -> None:
    """The test above can fail: of the next episode's first observation, the value is that of the mean, 0."""

    def swapped(data: Rollout) -> Rollout:
        following = jnp.concatenate([data.observation[1:], data.successors.last[None]])
        return data._replace(successors=Successors(data.successors.last, following))

    probe = steered(PROBES["successor"]())
    settings = config(probe)
    state, algorithm, _ = trained(probe, settings, wrong=swapped)
    with pytest.raises(AssertionError):
        check(probe, settings, state, algorithm)


@pytest.mark.slow
def test_a_vector_is_aimed() -> None:
    """The continuous probe, by priority and over several rewards: a temperature of 0 lets the deviation shrink."""
    probe = probes.continuous()
    learnt(probe, config(probe, priority_exponent=0.6, n_step=3, replay_precision="bf16"))


@pytest.mark.slow
def test_many_devices_have_rings_of_their_own_and_one_policy() -> None:
    probe = PROBES["agents"]()
    state, metrics = learnt(probe, config(probe), devices=4)
    actions = np.asarray(state.replay.value.action)
    assert len(actions) == len({ring.tobytes() for ring in actions}) == 4
    assert metrics["sac/replay"][-1] > 1000


@pytest.mark.slow
def test_the_temperature_keeps_the_entropy_that_was_asked_for() -> None:
    probe = PROBES["action"]()  # in which entropy has its price
    wanted = 0.4
    _, _, metrics = trained(probe, config(probe, temperature=None, target_entropy=wanted))
    assert metrics["sac/entropy"][-20:].mean() == pytest.approx(wanted, abs=0.1)


@pytest.mark.slow
def test_before_learning_actions_are_drawn_evenly_and_parameters_rest() -> None:
    probe = PROBES["masked"]()
    settings = config(probe, learning_starts=4096)
    state, algorithm, _ = trained(probe, settings)
    policy = algorithm.policy(state)
    begun = algorithm.init(jax.random.split(jax.random.key(0), 3)[0])
    jax.tree.map(np.testing.assert_array_equal, state.params, jax.device_get(begun.params))
    assert policy.random == 1.0
    observations = [seen for seen, _ in probe.value]
    batch = jax.tree.map(lambda *x: jnp.repeat(jnp.stack(x), 300, axis=0), *observations)
    action = np.asarray(algorithm.act(policy, (), batch, jax.random.key(1))[0]).reshape(3, 300)
    shares = np.stack([np.bincount(row, minlength=3) / 300 for row in action])
    np.testing.assert_allclose(shares, [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0]], atol=0.1)


@pytest.mark.slow  # test_replay.py compiles a ring that stays in place
def test_an_update_copies_nothing_of_the_replay() -> None:
    """XLA once read the ring as it was before a row was added, and so copied all of it to write that row."""
    spec = Spec(jax.ShapeDtypeStruct((3,), jnp.float32), Box((-1.0,) * 2, (1.0,) * 2), truncation_interval=100)
    settings = replaced(config(probes.continuous()), gradient_steps=2, hidden_dim=8, replay_size=400_000)
    algorithm = registry.make(
        spec, settings, RunContext(updates=10, mean=meshes.identity, sizes=Sizes(1, WORLDS, STEPS))
    )
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    seen, action, flag = shape((STEPS, WORLDS, 3)), shape((STEPS, WORLDS, 2)), shape((STEPS, WORLDS), dtype=bool)
    led = Successors(shape((WORLDS, 3)), shape((1, WORLDS, 3)))
    data = Rollout(seen, action, shape(flag.shape), flag, flag, flag, (), led, (), shape((), dtype=jnp.int32))
    key = jax.eval_shape(jax.random.key, 0)
    memory = jax.jit(algorithm.learn, donate_argnums=0).lower(state, data, key).compile(QUICK).memory_analysis()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.replay))
    assert memory.alias_size_in_bytes >= held and memory.temp_size_in_bytes < 0.02 * held


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"batch_size": 129}, "batch_size"),
        ({"learning_starts": 10**9}, "learning_starts"),
        ({"replay_precision": "fp8"}, "replay_precision"),
        ({"temperature": -1.0}, "temperature"),
        ({"tau": 1.5}, "tau"),
        ({"n_step": 10**6}, "n_step"),
    ],
)
def test_settings_out_of_bounds_are_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        registry.check(config(probes.constant(), **changes), Sizes(2, 8, STEPS))


# ------------------------------------------------------------------------------------------- with an expert (BC-SAC)

IMITATED: Spec = replace(PROBES["successor"]().environment.spec, action=Box((-1.0, 0.0), (1.0, 4.0)))


def sample(action: Any, weight: Any) -> Transitions:
    n = len(weight)
    nothing: Any = jnp.zeros(n)
    return Transitions(
        nothing, jnp.asarray(action), nothing[None], nothing, nothing, nothing, jnp.asarray(weight), nothing
    )


def test_the_loss_is_the_mean_over_the_experts_rows() -> None:
    """Two of four rows are the expert's, and one of these is nobody's step."""
    batch = sample([[0.1, 1.0], [0.2, 0.0], [0.3, 1.0], [0.4, 1.0]], [1.0, 1.0, 1.0, 0.0])
    rows, told = sac._imitation(SACConfig(imitation=0.5), batch, lambda kept: -10.0 * kept[:, 0])
    np.testing.assert_allclose(rows, 0.5 * np.array([2.0, 0.0, 6.0, 0.0]), rtol=1e-6)
    assert float(jnp.mean(told["imitation_loss"])) == pytest.approx((1.0 + 3.0) / 2)
    assert float(jnp.mean(told["expert"])) == 0.5
    nobody = sample([[0.1, 0.0]] * 4, [1.0] * 4)
    assert float(jnp.sum(sac._imitation(SACConfig(imitation=0.5), nobody, lambda kept: kept[:, 0])[0])) == 0.0
    assert sac._imitation(SACConfig(), batch, lambda kept: kept[:, 0])[1] == {}


def test_imitation_that_can_not_work_is_refused() -> None:
    sizes = Sizes(1, 4, 4)
    for changes, word in (
        ({"imitation": -1.0}, "imitation"),
        ({"imitation": 1.0, "expert_share": 0.0}, "expert_share"),
    ):
        with pytest.raises(ValueError, match=word):
            registry.check(replaced(SACConfig(), learning_starts=64, **changes), sizes)
    spec = replace(IMITATED, action=Discrete(3))
    with pytest.raises(ValueError, match="--actions continuous"):
        registry.make(spec, SACConfig(imitation=1.0), RunContext(updates=1, mean=meshes.identity, sizes=sizes))
    assert registry.guidance(SACConfig()) is None
    assert registry.guidance(SACConfig(imitation=0.1, expert_share=0.5)) == 0.5


@pytest.mark.slow
def test_the_expert_is_imitated_from_the_replay_and_others_are_not() -> None:
    """Without rewards, and with an entropy that weighs nothing, only likelihood is left to learn from."""
    columns, steps, updates = 8, 8, 150
    config = replaced(SACConfig(),
        lr=1e-2, imitation=1.0, temperature=0.0, batch_size=64, gradient_steps=4, learning_starts=64, replay_size=256,
        hidden_dim=16, num_layers=1,
    )  # fmt: skip
    sizes = Sizes(1, columns, steps)
    registry.check(config, sizes)
    algorithm = registry.make(IMITATED, config, RunContext(updates=updates, mean=meshes.identity, sizes=sizes))
    place = np.arange(columns * steps).reshape(steps, columns) % 4
    best = np.array([[0.5, 1.0], [-0.8, 3.5], [0.0, 2.0], [0.9, 0.4]], np.float32)
    his = np.arange(columns) < 4
    others = np.broadcast_to(np.float32([-0.9, 3.9]), (steps, columns, 2))
    action = jnp.asarray(np.where(his[:, None], best[place], others))
    seen, never = jnp.eye(4)[place], jnp.zeros((steps, columns), bool)
    extras = Guided((), action, ~never, jnp.broadcast_to(his, (steps, columns)))
    data = Rollout(
        seen, action, jnp.zeros((steps, columns)), ~never, never, ~never, extras, Successors(seen[0], seen[:1]), (),
        jnp.int32(0),
    )  # fmt: skip
    run = jax.jit(
        lambda: jax.lax.scan(
            lambda state, key: algorithm.learn(state, data, key),
            algorithm.init(jax.random.key(0)), jax.random.split(jax.random.key(1), updates),
        )
    )  # fmt: skip
    state, metrics = run()
    found = algorithm.act(algorithm.policy(state), (), jnp.eye(4), None)[0]
    np.testing.assert_allclose(found, best, atol=0.2)
    assert 0.3 < float(metrics["sac/expert"][-1]) < 0.7
    assert float(metrics["sac/imitation_loss"][-1]) < float(metrics["sac/imitation_loss"][0]) - 1.0
