"""Central inference: what is learnt is what happened, once, whoever dies, and by whichever lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from longhaul.algorithms import ppo
from longhaul.algorithms.config import PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.envs.host import registry
from longhaul.envs.host.jax_vector import JaxVector, Programs
from longhaul.envs.host.vector import HostStep, HostVector, LostState, Slot, specification
from longhaul.envs.probes import PROBES, Probe
from longhaul.networks.config import NetworkConfig
from longhaul.runtime import heartbeat
from longhaul.runtime.config_fields import replaced
from longhaul.topologies.inference_server import wire
from longhaul.topologies.staleness import AHEAD
from longhaul.types import Algorithm
from tests.end_to_end.test_algorithm_matrix import LEARNERS, UPDATES, check, make
from tests.helpers import checkable_environment
from tests.helpers.inference_server_runs import POLES, Gone, Site, Sizes, by_hand, jitted, site

SMALL = PPOConfig(num_minibatches=2, update_epochs=1, lr=1e-2, network=NetworkConfig(hidden_dim=8, num_layers=1))


def poles(actor: int, slot: int) -> HostVector:
    return registry.make(POLES, Sizes().worlds)


@cache
def of_poles() -> tuple[Any, Algorithm]:
    spec = specification(poles(0, 0).spec)
    return spec, ppo.ppo(spec, SMALL, RunContext(updates=100, mean=lambda tree: tree))


@cache
def of_poles_remembered() -> tuple[Any, Algorithm]:
    spec = specification(poles(0, 0).spec)
    return spec, ppo.ppo(spec, replaced(SMALL, memory=8), RunContext(updates=100, mean=lambda tree: tree))


def learnt(
    lane: str, updates: int, *, of: Callable[[], tuple[Any, Algorithm]] = of_poles, dies: Sequence[int] = ()
) -> tuple[list[np.ndarray], list[np.ndarray]]:  # fmt: skip
    """(parameters, all actions) after so many updates; actor 1's lives end with these steps of theirs."""
    sizes, (spec, algorithm) = Sizes(), of()
    learn, left = jitted(algorithm.learn), list(dies)
    state, actions = jitted(algorithm.init)(jax.random.key(0)), []

    def make(actor: int, slot: int) -> HostVector:
        if (actor, slot) != (1, 1) or not left:
            return poles(actor, slot)
        return Frail(poles(actor, slot), when=left.pop(0))

    with site(algorithm, spec, make, sizes, lane=lane, begun=False) as here:
        actors = {actor: here.begin(actor) for actor in range(sizes.actors)}
        for update in range(updates):
            serve(here, actors)
            data, _, versions = here.server.gather()
            assert (versions == update).all()
            actions += list(np.array(data.action))
            state, _ = learn(state, data, jax.random.key(update))
            jax.block_until_ready(state)
            here.server.learnt(algorithm.policy(state))
    return [np.asarray(x) for x in jax.tree.leaves(algorithm.policy(state))], actions


def test_without_staleness_it_is_the_synchronous_loop_by_either_lane() -> None:
    _, algorithm = of_poles()
    wanted, acted = by_hand(algorithm, poles, Sizes(), 3, jax.random.key(7))
    shared, shared_acted = learnt("shm", 3)
    np.testing.assert_array_equal(acted, shared_acted)
    for one, other in zip(wanted, shared, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    sent, sent_acted = learnt("grpc", 3)
    np.testing.assert_array_equal(shared_acted, sent_acted)
    for one, other in zip(shared, sent, strict=True):
        np.testing.assert_array_equal(one, other)  # bit for bit: only the way of the bytes differs
    begun = algorithm.policy(jitted(algorithm.init)(jax.random.key(0)))
    assert any((a != b).any() for a, b in zip(wanted, jax.tree.leaves(begun)))


@pytest.mark.parametrize(
    ("lane", "of"),
    [
        ("shm", of_poles),
        pytest.param("grpc", of_poles, marks=pytest.mark.slow),
        pytest.param("shm", of_poles_remembered, marks=pytest.mark.slow),
    ],
)
def test_without_staleness_an_actor_that_dies_changes_nothing(lane: str, of: Any) -> None:
    """In its first trajectory, amid a later one, and in that again: its successor goes on from where that began."""
    whole, acted = learnt(lane, 4, of=of)
    again, acted_again = learnt(lane, 4, of=of, dies=(3, 13, 2, 6))
    np.testing.assert_array_equal(acted, acted_again)
    for one, other in zip(whole, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("lane", ["shm", "grpc"])
def test_an_actor_whose_state_was_lost_begins_new_episodes(lane: str) -> None:
    sizes, (spec, algorithm) = Sizes(steps=2), of_poles()
    lives: list[HostVector] = []

    def make(actor: int, slot: int) -> HostVector:
        if (actor, slot) != (1, 1):
            return poles(actor, slot)
        lives.append(Frail(poles(actor, slot), when=1000 if lives else 4, forgets=True))
        return lives[-1]

    with site(algorithm, spec, make, sizes, lane=lane, begun=False) as here:
        actors = {actor: here.begin(actor) for actor in range(sizes.actors)}
        state = jitted(algorithm.init)(jax.random.key(0))
        for _ in range(2):
            serve(here, actors)
            data, _, _ = here.server.gather()
            seen = np.array(data.observation)
            standing = here.server.standing
            here.server.learnt(algorithm.policy(state))
    assert standing is not None
    assert len(lives) == 2
    first = np.array(poles(1, 1).reset(1000 + 11))
    np.testing.assert_array_equal(seen[0, -sizes.worlds :], first)
    assert standing.length.tolist() == [[4] * sizes.worlds] * 3 + [[2] * sizes.worlds]


# ------------------------------------------------------------------------------------------------- what was learnt from


INTERVAL, CHAOS_SIZES = 4, Sizes(worlds=4, steps=10)


class Frail:
    """A vector whose step number `when` ends its actor, or makes it wait for `gate`; one that `forgets` restores no
    state."""

    def __init__(
        self, inner: HostVector, when: int, gate: threading.Event | None = None, *, forgets: bool = False
    ) -> None:
        self._inner, self._when, self._gate, self._steps, self._forgets = inner, when, gate, 0, forgets
        self.spec, self.worlds, self.columns = inner.spec, inner.worlds, inner.columns

    def reset(self, seed: int, out: Slot | None = None) -> Any:
        return self._inner.reset(seed, out)

    def state(self) -> Any:
        return self._inner.state()

    def restore(self, state: Any) -> None:
        if self._forgets:
            raise LostState("its form has changed")
        self._inner.restore(state)

    def step(self, action: np.ndarray, out: Slot | None = None) -> HostStep:
        self._steps += 1
        if self._steps == self._when:
            if self._gate is None:
                raise Gone
            self._gate.wait(60.0)
        return self._inner.step(action, out)


def serve(here: Site, actors: dict[int, threading.Thread] | None = None) -> None:
    """Until the learner's batch is whole; fails where that takes a minute. Those of `actors` that died begin again."""
    deadline = time.monotonic() + 60.0
    while not here.server.book.whole:
        here.server.serve(0.05)
        for actor, thread in (actors or {}).items():
            if not thread.is_alive():
                here.lane.cut(actor, "it died")
                actors[actor] = here.begin(actor)
        assert time.monotonic() < deadline, "it stands still"


@cache
def of_chaos_compiled() -> Programs:
    return Programs(checkable_environment.Chaos(interval=INTERVAL), CHAOS_SIZES.worlds)


def chaotic() -> JaxVector:
    return JaxVector(of_chaos_compiled())


def check_chaos(data: Any) -> tuple[int, int]:
    """Every step of a batch led to what it must have led to -> (truncations, ends)."""
    n, age = checkable_environment.decode(data.observation)
    led = checkable_environment.follow(n, age, np.asarray(data.action), INTERVAL)
    np.testing.assert_array_equal(data.reward, np.asarray(led.reward, np.float32))
    np.testing.assert_array_equal(data.terminated, led.terminated)
    np.testing.assert_array_equal(data.truncated, led.truncated & ~led.terminated)
    ended = led.terminated | led.truncated
    last_n, last_age = checkable_environment.decode(data.successors.last)
    next_n, next_age = np.concatenate([n[1:], last_n[None]]), np.concatenate([age[1:], last_age[None]])
    np.testing.assert_array_equal(next_n[~ended], led.n[~ended])
    np.testing.assert_array_equal(next_age[~ended], led.age[~ended])
    assert (next_age[ended] == 0).all(), "a fresh episode follows"
    cut_n, cut_age = checkable_environment.decode(data.successors.truncated)
    used = np.zeros(n.shape[1], int)
    for t in range(len(n)):
        for b in np.flatnonzero(np.asarray(data.truncated[t])):
            assert (cut_n[used[b], b], cut_age[used[b], b]) == (led.n[t, b], led.age[t, b])
            used[b] += 1
    return int(used.sum()), int(ended.sum())


@cache
def of_chaos() -> tuple[Any, Algorithm]:
    spec = checkable_environment.Chaos(interval=INTERVAL).spec
    return spec, ppo.ppo(spec, SMALL, RunContext(updates=100, mean=lambda tree: tree))


@pytest.mark.parametrize(
    ("lane", "staleness"),
    [("shm", 2), ("grpc", 1), *(pytest.param("shm", age, marks=pytest.mark.slow) for age in (0, None))],
)
def test_every_step_is_what_happened_and_follows_on_the_one_before(lane: str, staleness: int | None) -> None:
    spec, algorithm = of_chaos()
    sizes = CHAOS_SIZES._replace(staleness=staleness)
    truncated = ended = 0.0
    told, oldest, before = 0.0, 0, None
    with site(algorithm, spec, lambda actor, slot: chaotic(), sizes, lane=lane) as here:
        for update in range(6):
            serve(here)
            data, sums, versions = here.server.gather()
            some_truncated, some_ended = check_chaos(data)
            truncated, ended = truncated + some_truncated, ended + some_ended
            told += sums.get("episodes", 0)
            oldest = max(oldest, update - int(versions.min()))
            assert data.version == versions.min()
            if staleness is not None:  # each column goes on where it was
                if before is not None:
                    np.testing.assert_array_equal(data.observation[0], before)
                before = np.array(data.successors.last)
            deadline = time.monotonic() + 60.0
            while here.server.can_act:  # a learner that is slow: so acting runs ahead as far as it may
                here.server.serve(0.01)
                assert time.monotonic() < deadline, "it stands still"
            here.server.learnt(algorithm.policy(jitted(algorithm.init)(jax.random.key(update))))
    assert truncated > 20, "without truncations it tests little"
    assert told == ended, "episodes are counted once each"
    assert oldest == (AHEAD if staleness is None else staleness), "the bound is kept and reached"


@pytest.mark.parametrize(("lane", "staleness"), [("shm", 0), ("shm", None), ("grpc", 0)])
def test_an_actor_that_dies_amid_a_trajectory_leaves_nothing_of_it(lane: str, staleness: int | None) -> None:
    """Its successor fills the place anew: every trajectory learnt from is whole, by one actor, and there once."""
    spec, algorithm = of_chaos()
    sizes = CHAOS_SIZES._replace(staleness=staleness)
    lives = [0]

    def make(actor: int, slot: int) -> HostVector:
        if actor == 1 and slot == 0:
            lives[0] += 1
            return Frail(chaotic(), when=14) if lives[0] <= 2 else chaotic()  # type: ignore[return-value]
        return chaotic()

    told = ended = 0.0
    with site(algorithm, spec, make, sizes, lane=lane, begun=False) as here:
        actors = {actor: here.begin(actor) for actor in range(sizes.actors)}
        policy = algorithm.policy(jitted(algorithm.init)(jax.random.key(0)))
        for _ in range(6):
            serve(here, actors)
            data, sums, _ = here.server.gather()
            ended += check_chaos(data)[1]
            told += sums.get("episodes", 0)
            here.server.learnt(policy)
        meter = here.server.meter
    assert lives[0] == 3
    assert meter.lost >= 2
    assert meter.discarded > 0, "it died between trajectories, which tests little"
    assert told == ended


def test_one_that_stands_still_is_found_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound the others fill its places."""
    monkeypatch.setattr(heartbeat, "SILENCE", 1.5)
    monkeypatch.setattr(heartbeat, "TIMES", 0.0)
    spec, algorithm = of_poles()
    gate, sizes = threading.Event(), Sizes(staleness=None)

    def make(actor: int, slot: int) -> HostVector:
        return Frail(poles(0, 0), 13, gate) if actor == 1 else poles(0, 0)  # type: ignore[return-value]

    policy = algorithm.policy(jitted(algorithm.init)(jax.random.key(0)))
    with site(algorithm, spec, make, sizes) as here:
        for _ in range(8):
            serve(here)
            here.server.gather()
            here.server.learnt(policy)
        assert here.lane.live() == {0}
        gate.set()


@pytest.mark.parametrize("lane", ["shm", pytest.param("grpc", marks=pytest.mark.slow)])
def test_nobody_is_late_while_the_server_learns(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had cut off all its actors when it came back from a first update that took long to compile."""
    spec, algorithm = of_chaos()
    policy = algorithm.policy(jitted(algorithm.init)(jax.random.key(0)))
    with site(algorithm, spec, lambda actor, slot: chaotic(), CHAOS_SIZES._replace(staleness=1), lane=lane) as here:
        serve(here)
        here.server.gather()
        with monkeypatch.context() as hurried:
            hurried.setattr(heartbeat, "SILENCE", 0.4)
            hurried.setattr(heartbeat, "TIMES", 0.0)
            time.sleep(0.5)
            here.server.learnt(policy)
            here.server.serve(0.0)
        serve(here)
        assert here.server.meter.lost == 0


@pytest.mark.parametrize(
    "what", [*(pytest.param(what, marks=pytest.mark.slow) for what in ("flag", "step")), "finals", "reward"]
)
def test_garbage_in_shared_memory_ends_its_actor_alone(what: str) -> None:
    spec, algorithm = of_poles()
    with site(algorithm, spec, poles, Sizes(actors=2, staleness=None), begun=False) as here:
        ends = here.lane.join(1)  # type: ignore[attr-defined]
        codec = wire.Codec(wire.layout(poles(0, 0).spec, 3))
        from longhaul.topologies.inference_server.shm_transport import FINALS, POSTED, ShmActorTransport

        line = ShmActorTransport(codec, 2, ends)
        line.post(0, 0)
        here.server.serve(0.05)
        here.server.serve(0.05)
        line.next()
        if what == "flag":
            line.blocks[0].flags.view(np.uint8)[1, 1] = 7
        if what == "finals":
            line._views.theirs[0, FINALS] = 99
        if what == "reward":
            line.blocks[0].reward[2] = np.nan
        line._views.theirs[0, POSTED] = 9 if what == "step" else 2
        here.begin(0)
        for _ in range(2):
            serve(here)
            here.server.gather()
            here.server.learnt(algorithm.policy(jitted(algorithm.init)(jax.random.key(0))))
        assert here.lane.live() == {0}
        assert here.server.meter.lost == 1
        line.close()


# ------------------------------------------------------------------------------------------------------ values, learnt


def probed(probe: Probe, name: str, lane: str, staleness: int | None) -> tuple[Any, Algorithm]:
    algorithm = make(probe, LEARNERS[name], lambda tree: tree)
    learn = jitted(algorithm.learn)
    sizes, environment = Sizes(2, 2, 16, 16, staleness), probe.environment
    state = jitted(algorithm.init)(jax.random.key(0))
    programs = Programs(environment, sizes.worlds)
    with site(algorithm, environment.spec, lambda a, s: JaxVector(programs), sizes, lane=lane) as here:
        for update in range(UPDATES):
            serve(here)
            data, _, _ = here.server.gather()
            state, _ = learn(state, data, jax.random.key(update))
            jax.block_until_ready(state)
            here.server.learnt(algorithm.policy(state))
    return jax.device_get(algorithm.policy(state)), algorithm


@pytest.mark.parametrize(
    ("probe", "name", "lane", "staleness"),
    [
        pytest.param("successor", "ppo", "shm", 0, marks=pytest.mark.slow),
        pytest.param("memory", "ppo-gru", "shm", 0, marks=pytest.mark.slow),
        pytest.param("agents", "ppo", "grpc", 0, marks=pytest.mark.slow),
        pytest.param("time_limit", "ppo", "shm", 1, marks=pytest.mark.slow),
        pytest.param("masked", "ppo", "grpc", None, marks=pytest.mark.slow),
        pytest.param("multi_discrete", "ppo", "shm", 0, marks=pytest.mark.slow),
        pytest.param("continuous", "ppo", "shm", 0, marks=pytest.mark.slow),
        pytest.param("time_limit", "impala", "shm", 2, marks=pytest.mark.slow),
        pytest.param("masked", "appo", "grpc", None, marks=pytest.mark.slow),
    ],
)
def test_the_known_values_are_learnt(probe: str, name: str, lane: str, staleness: int | None) -> None:
    made = PROBES[probe]()
    policy, algorithm = probed(made, name, lane, staleness)
    check(made, LEARNERS[name], algorithm, policy)
