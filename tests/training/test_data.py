"""Training in shards that hold more than the device: chunks come as the stream says, and a run that was ended anywhere
ends as if nothing had been."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.config import resolve as runs
from longhaul.config.run import Driving, Run, to_dict
from longhaul.driving import scenario_source
from longhaul.driving.scenario import bank as banks
from longhaul.driving.scenario.scenario import GREEN, RED, Scenario
from longhaul.driving.shards import shard, stream
from longhaul.driving.sim import device_bank, simulator
from longhaul.runtime import process_group
from longhaul.runtime.errors import RunError
from longhaul.spaces import Discrete, Measure
from longhaul.topologies import fused
from longhaul.topologies.actor_learner import learner
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.training import actor_learner, assemble, compilation, final_evaluation, loop
from longhaul.training import data as feeds
from longhaul.training.checkpoint.checkpoint import Checkpoints
from longhaul.training.data import Feeding, Place
from longhaul.types import Spec, TimeStep, transition
from tests.helpers.driving_scenarios import line, scenario
from tests.helpers.launch_faults import wait_for
from tests.helpers.small_runs import after, begin, checkpoints, make_quick, records, result, resume, small
from tests.runtime.test_process_group import together

COUNT, BANK, PERIOD = 7, 3, 2

EGO = simulator.Config(neighbours=1, waypoints=1)


def different(number: int) -> Scenario:
    """Scenarios of 8 to 14 steps and 1 to 7 agents; some have a light, one has no road. The ego's speed tells them."""
    steps = 8 + number
    ego = line((0.0, 0.0), (1.0 + number, 0.0), steps)
    others = [line((12.0 + 8.0 * i, 3.0), (2.0, 0.0), steps) for i in range(number)]
    lights = [(9.0, [RED] * steps), (15.0, [RED] * 4 + [GREEN] * (steps - 4))][: number % 3]
    road = None if number == 2 else lambda x, y: np.abs(y) - 3.0 - number
    made = scenario([ego, *others], drivers=1 + number % 2, lights=lights, road=road, points=100 + number)
    return made._replace(id=f"number {number}")


SCENARIOS = [different(number) for number in range(COUNT)]


def written(folder: Path) -> Path:
    """The scenarios in shards of 4, 0 and 3."""
    for name, part in (("a", SCENARIOS[:4]), ("b", []), ("c", SCENARIOS[4:])):
        shard.write(folder / f"{name}.lhs", part)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("shards"))


class Glanced(NamedTuple):
    scenario: jax.Array
    t: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Glance:
    """Episodes of 4 steps in which a policy sees and earns the length of a scenario's route. Driving in it would show
    no more of what a run does with its chunks, and takes a minute to compile."""

    tables: Any

    @property
    def spec(self) -> Spec:
        return Spec(jax.ShapeDtypeStruct((2,), jnp.float32), Discrete(3), None, 4, 4)

    def see(self, state: Glanced) -> jax.Array:
        return jnp.stack([self.tables.route_length[state.scenario, 0] / 10, state.t.astype(jnp.float32)])

    def reset(self, key: jax.Array) -> tuple[Glanced, jax.Array]:
        state = Glanced(jax.random.randint(key, (), 0, self.tables.scenarios), jnp.int32(0))
        return state, self.see(state)

    def step(self, key: jax.Array, state: Glanced, action: jax.Array) -> tuple[Glanced, TimeStep]:
        state = state._replace(t=state.t + 1)
        seen = self.see(state)
        return state, transition(seen, seen[0] * (action == 1), jnp.bool_(False), state.t >= 4)

    def active(self, state: Glanced) -> jax.Array:
        return jnp.bool_(True)

    def metrics(self, state: Glanced) -> dict[str, Measure]:
        return {"seen": Measure(self.see(state)[0], jnp.bool_(True))}


@pytest.fixture(scope="module")
def quick() -> Iterator[pytest.MonkeyPatch]:
    prepare = actor_learner.prepare
    prepared: dict[str, Any] = {}

    def prepare_once(run: Run, *given: Any) -> Any:
        key = repr((run.acting, run.devices, run.total_steps))
        if key not in prepared:
            prepared[key] = prepare(run, *given)
        return prepared[key]

    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        patch.setattr(feeds, "_within", lambda *_: Glance)
        patch.setattr(actor_learner, "prepare", prepare_once)
        yield patch


def streaming(data: Path, updates: int = 11, devices: int = 1, num_envs: int = 4, **changes: Any) -> Run:
    """A tiny run in chunks of 3 of the 7 scenarios, 2 updates in each; with 4 environments, `updates` in all."""
    task = Driving((str(data),), bank=BANK, bank_updates=PERIOD, simulator=EGO)
    task = dataclasses.replace(task, **changes)
    return small(
        environment=task, num_envs=num_envs, num_steps=5, total_steps=4 * 5 * updates, devices=devices, block=2,
        log_interval=2, save_interval=3,
    )  # fmt: skip


def plain(tree: Any) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(plain(one), plain(other), strict=True):
        np.testing.assert_array_equal(a, b)


def contexts(run: Run, count: int, at: Place | None = None) -> list[feeds.Fed]:
    opened = feeds.feed(run).open(at or Place())
    found = [next(opened) for _ in range(count)]
    opened.close()
    return found


def numbers(fed: feeds.Fed) -> list[int]:
    """Which scenarios a context holds, by the length of their routes."""
    lengths = [float(each.route_length[0]) for each in SCENARIOS]
    return [int(np.abs(np.array(lengths) - length).argmin()) for length in np.asarray(fed.context.route_length[:, 0])]


# ---------------------------------------------------------------------------------------------------------- chunks


def test_chunks_hold_what_the_stream_says_and_have_one_shape(data: Path) -> None:
    found = contexts(streaming(data), 6)
    position: Any = (0, 0)
    for i, fed in enumerate(found):
        assert (fed.place.swaps, fed.following.swaps) == (i, i + 1)
        assert fed.place.position == position
        chosen, position = stream.picks(COUNT, BANK, position, seed=3)
        assert fed.following.position == position
        assert numbers(fed) == chosen.tolist()
    assert sorted(numbers(found[0])) != sorted(numbers(found[1]))
    shapes = {tuple(leaf.shape for leaf in jax.tree.leaves(fed.context)) for fed in found}
    assert len(shapes) == 1


@pytest.mark.parametrize("traffic", ["log", "idm"])
def test_shapes_of_chunks_are_known_before_one_is_read(data: Path, traffic: str) -> None:
    for bank in (1, 2, 5):
        run = streaming(data, bank=bank, simulator=dataclasses.replace(EGO, traffic=traffic))
        (fed,) = contexts(run, 1)
        assert compilation.matches(fed.context, feeds.feed(run).like)
        assert not compilation.matches(fed.context, feeds.feed(streaming(data, bank=3)).like)


def test_a_place_leads_to_the_same_chunk_also_from_json(data: Path) -> None:
    run = streaming(data)
    found = contexts(run, 4)
    for fed in found[1:]:
        saved = feeds.place(json.loads(json.dumps(fed.place.plain())))
        assert saved == fed.place
        (again,) = contexts(run, 1, saved)
        assert again.place == fed.place
        assert again.following == fed.following
        assert_same(again.context, fed.context)


def test_room_is_where_scenarios_lie_one_behind_the_other_and_nowhere_else() -> None:
    """What differs between banks that are padded to the same sizes is what `device_bank.FLAT` names."""
    sizes = banks.sizes_of(14, 7, 106, 2)
    seen: set[str] = set()
    for reactive in (False, True):
        few, many = (
            device_bank.arrange(banks.stack(some, agents=2, sizes=sizes), 2, reactive=reactive)
            for some in ([SCENARIOS[0], SCENARIOS[2]], [SCENARIOS[5], SCENARIOS[6]])
        )
        for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(few), jax.tree.leaves(many), strict=True):
            name = jax.tree_util.keystr(path)
            seen |= {name}
            for axis in range(one.ndim):
                assert one.shape[axis] == other.shape[axis] or axis == device_bank.FLAT.get(name), name
    assert device_bank.FLAT.keys() <= seen


@pytest.mark.slow
def test_worlds_in_a_chunk_are_driven_as_in_a_bank_of_all(data: Path) -> None:
    """Room and padding change nothing, and neither does who else is in the chunk."""
    run = streaming(data)
    (fed,) = contexts(run, 1)
    library = stream.open([str(data)])
    every = simulator.driving(banks.stack([library[i] for i in range(COUNT)]), EGO)
    chunk = feeds.feed(run).within(fed.context)
    assert_same(driven(chunk, np.arange(BANK)), driven(every, np.array(numbers(fed))))


def driven(environment: Any, indices: np.ndarray) -> Any:
    """Observations of worlds on seven steps of braking and steering."""

    def step(state: Any, key: jax.Array) -> Any:
        following, led_to = environment.step(key, state, np.array([[1, 8]], np.int32))
        return following, (led_to, environment.metrics(following))

    def drive(index: jax.Array) -> Any:
        state, seen = environment.start(index)
        return seen, jax.lax.scan(step, state, jax.random.split(jax.random.key(0), 7))[1]

    return jax.jit(jax.vmap(drive))(indices)


def test_never_more_than_two_chunks_are_held(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run through 30 chunks: the one of now, and one ahead."""
    held: list[weakref.ref[Any]] = []
    most = []
    send = feeds._send

    def watched(run: Run, host: Any) -> Any:
        most.append(1 + sum(each() is not None for each in held))
        sent = send(run, host)
        held.append(weakref.ref(sent.cells))
        return sent

    monkeypatch.setattr(feeds, "_send", watched)
    feeding = Feeding(feeds.feed(streaming(data, updates=30 * PERIOD)))
    wait_for(lambda: len(held) == 2)  # the thread is ahead
    for updates in range(PERIOD, 30 * PERIOD, PERIOD):
        assert feeding.ends(updates)
        feeding.turn(updates)
        assert feeding.now.place.swaps == updates // PERIOD
    feeding.close()
    assert len(most) >= 30
    assert max(most) == 2


def test_a_bank_that_holds_all_is_the_bank_of_all(data: Path) -> None:
    run = streaming(data)
    assert isinstance(run.environment, Driving)
    every, large = (
        feeds.feed(dataclasses.replace(run, environment=dataclasses.replace(run.environment, bank=bank)))
        for bank in (None, COUNT)
    )
    assert every.period is large.period is None
    one, other = (next(source.open(Place())) for source in (every, large))
    assert_same(one.context, other.context)
    assert one.following == one.place == Place()
    assert every.within(one.context).spec == large.within(other.context).spec


def test_cuts_hold_in_chunks_as_in_banks(data: Path) -> None:
    run = streaming(data, horizon=6, objects=3)
    for fed in contexts(run, 3):
        assert np.asarray(fed.context.steps).tolist() == [6] * BANK
        assert np.sum(np.asarray(fed.context.body)[:, 2] > 0, axis=-1).max() == 3
    spec = feeds.feed(run).within(fed.context).spec
    assert (spec.max_steps, spec.truncation_interval) == (5, 5)
    with pytest.raises(ValueError, match=r"scenario 0 was compiled for 1 controlled agents, fewer than 2"):
        feeds.feed(streaming(data, simulator=dataclasses.replace(EGO, agents=2)))


# ------------------------------------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def whole(data: Path, quick: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of 11 updates in 6 chunks, never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        compiled = fused.compiled
        who = threading.current_thread
        patch.setattr(fused, "compiled", lambda *given, **more: WHO.append(who().name) or compiled(*given, **more))
        assert begin(streaming(data), folder).code == 0
    return folder


WHO: list[str] = []
"""The threads that compiled the program of updates of `whole`."""


@pytest.mark.slow
def test_the_program_is_compiled_once_beside_the_reading(whole: Path) -> None:
    assert [f"{compilation.THREAD}_0"] == WHO


def ended_the_same(folder: Path, whole: Path) -> bool:
    return result(folder) == result(whole) and records(folder) == records(whole)


def test_calls_end_where_a_chunk_does(whole: Path) -> None:
    """With calls of 2 updates in chunks of 2, records are of 2, the last of 1."""
    assert [r["update"] for r in records(whole)] == [2, 4, 6, 8, 10, 11]
    assert checkpoints(whole) == [6, 10, 11]


@pytest.mark.parametrize("save", [2, *(pytest.param(save, marks=pytest.mark.slow) for save in (1, 3))])
def test_a_run_that_was_stopped_ends_the_same(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: int
) -> None:
    """At the end of a chunk or within one, and again at the next save."""
    folder = tmp_path / "run"
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(
                Checkpoints, "save", after(save, lambda: signal.raise_signal(signal.SIGTERM), Checkpoints.save)
            )
            outcome = resume(folder) if folder.exists() else begin(streaming(data), folder)
        assert outcome.code in (0, loop.STOPPED)
    assert resume(folder).code == 0
    assert ended_the_same(folder, whole)


def test_a_run_that_stays_in_its_chunk_is_another(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests above would show nothing."""
    monkeypatch.setattr(Feeding, "ends", lambda feeding, updates: False)
    assert begin(streaming(data), tmp_path / "run").code == 0
    assert result(tmp_path / "run")["params_sha256"] != result(whole)["params_sha256"]


def test_worlds_begin_anew_in_another_chunk(data: Path, quick: pytest.MonkeyPatch) -> None:
    run = streaming(data)
    source = feeds.feed(run)
    feeding = Feeding(source)
    assembly = assemble.assemble(run, source.within, feeding.now.context)
    progress = assembly.start(run.seed, feeding.now.context)
    first = plain(progress.carry)
    assert_same(fused.entered(progress, assembly.enter, feeding.now.context).carry.worlds.state.t, np.zeros(4))
    progress = progress._replace(updates=progress.updates + PERIOD)
    feeding.turn(PERIOD)
    entered = fused.entered(progress, assembly.enter, feeding.now.context)
    state = entered.carry.worlds.state
    assert_same(state.t, np.zeros(4))
    lengths = [float(SCENARIOS[numbers(feeding.now)[i]].route_length[0]) / 10 for i in np.asarray(state.scenario)]
    np.testing.assert_allclose(np.asarray(entered.carry.observation)[:, 0], lengths, atol=1e-3)
    assert any(np.any(a != b) for a, b in zip(first, plain(entered.carry), strict=True))
    assert_same(entered.state, progress.state)
    feeding.close()


# ---------------------------------------------------------------------------------------------------------- actors


def by_actors(data: Path, acting: ActorConfig, devices: int = 1, updates: int = 11, **changes: Any) -> Run:
    run = dataclasses.replace(streaming(data, updates, **changes), topology="actors", acting=acting, devices=devices)
    return runs.resolve(run)


def learnt(folder: Path) -> Any:
    """The parameters of a run at its end, and of each record what does not tell of the actors' work."""
    seen = [{k: v for k, v in r.items() if not k.startswith("actors/")} for r in records(folder)]
    return result(folder)["params_sha256"], seen


def stopped_at_each_save(run: Run, folder: Path) -> list[int]:
    """Trains with a stop after each save; the updates after which it stopped."""
    stops = []
    while not (folder / "result.json").exists():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoints, "save", after(1, lambda: signal.raise_signal(signal.SIGTERM), Checkpoints.save))
            outcome = resume(folder) if folder.exists() else begin(run, folder)
        assert outcome.code in (0, loop.STOPPED)
        stops.append(max(checkpoints(folder)))
    return stops


@pytest.mark.slow  # quick: tests/topologies/actor_learner/test_learner.py
def test_an_actor_learns_in_chunks_what_fused_does_also_if_it_was_stopped(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    """Parameters and what was seen, bit for bit; stops lie at the end of a chunk and within one."""
    stops = []
    for every in (3, 2):
        run, folder = by_actors(data, ActorConfig(1, "thread")), tmp_path / f"run-{every}"
        stops += stopped_at_each_save(dataclasses.replace(run, save_interval=every), folder)
        assert learnt(folder) == learnt(whole)
    assert {stop % PERIOD for stop in stops} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("asked", [(), (2, 3), (3,)])
def test_two_actors_are_two_devices_of_fused(
    data: Path, quick: pytest.MonkeyPatch, tmp_path: Path, asked: tuple[int, ...]
) -> None:
    """On the learner's devices, on two others, and both on one of those."""
    assert begin(dataclasses.replace(streaming(data), devices=2), tmp_path / "fused").code == 0
    run = by_actors(data, ActorConfig(2, "thread", actor_devices=asked), devices=2)
    stopped_at_each_save(run, tmp_path / "run")
    assert learnt(tmp_path / "run") == learnt(tmp_path / "fused")


@pytest.mark.slow
def test_pinned_actors_end_the_same_also_if_they_were_stopped(
    data: Path, quick: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Weights of two updates ago act at the beginning of a chunk, too: they are those that a checkpoint has."""
    run = by_actors(data, ActorConfig(2, "thread", 2, pin=True))
    assert begin(run, tmp_path / "whole").code == 0
    stopped_at_each_save(run, tmp_path / "run")
    assert learnt(tmp_path / "run") == learnt(tmp_path / "whole")
    for record in records(tmp_path / "whole")[1:]:
        assert record["actors/staleness_max"] == 2
    other = by_actors(data, ActorConfig(2, "thread", 0))
    assert begin(other, tmp_path / "other").code == 0
    assert learnt(tmp_path / "other")[0] != learnt(tmp_path / "whole")[0]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [None, 1])
def test_rollouts_of_a_chunk_are_driven_in_it_from_their_beginning(
    data: Path, quick: pytest.MonkeyPatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int | None
) -> None:
    """Also where actors may run ahead: they wait for the next chunk. Each device of theirs has two, the learner's
    none."""
    driven, sizes = actor_learner.Scenarios.driven, list[int]()
    held: list[weakref.ref[Any]] = []
    found: list[tuple[int, int, set[float], Any]] = []
    send = feeds._send

    def watched(run: Run, host: Any) -> Any:
        sizes.append(1 + sum(each() is not None for each in held))
        sent = send(run, host)
        assert {device.id for device in sent.cells.devices()} == {1, 3}
        held.append(weakref.ref(sent.cells))
        return sent

    def noted(scenarios: Any, acting: Any, device: jax.Device) -> Any:
        collect = driven(scenarios, acting, device)

        def run(weights: Any, state: Any, key: Any, ticket: Any, version: int) -> Any:
            ended = collect(weights, state, key, ticket, version)
            rollout = learner.tree(acting.data, ended[1])
            found.append((ticket.batch, device.id, {*rollout.observation[:, :, 0].ravel().tolist()},
                          rollout.observation[0, :, 1].tolist()))  # fmt: skip
            return ended

        return run

    monkeypatch.setattr(feeds, "_send", watched)
    monkeypatch.setattr(actor_learner.Scenarios, "driven", noted)
    run = by_actors(data, ActorConfig(2, "thread", staleness, actor_devices=(1, 3)))
    assert begin(run, tmp_path / "run").code == 0
    assert {device for _, device, _, _ in found} == {1, 3}
    assert sorted(batch for batch, *_ in found) == sorted([*range(11)] * 2)
    position: Any = (0, 0)
    for chunk in range(6):
        chosen, position = stream.picks(COUNT, BANK, position, seed=3)
        there = np.array([SCENARIOS[i].route_length[0] / 10 for i in chosen])
        inside = [each for each in found if each[0] // PERIOD == chunk]
        for _, _, lengths, _ in inside:
            assert all(np.abs(there - length).min() < 1e-3 for length in lengths)
        for device in (1, 3):
            first = next(times for _, acted_on, _, times in inside if acted_on == device)
            assert first == [0.0, 0.0]
    assert max(sizes) == 2


def test_a_device_that_is_not_there_is_named_before_anything_is_read(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "open", lambda *_: pytest.fail("it was read"))
    with pytest.raises(RunError, match="there is no device 7"):
        feeds.feed(by_actors(data, ActorConfig(2, "thread", actor_devices=(7,))))


def test_a_mesh_that_can_split_nothing_is_named_before_scenarios_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario_source, "generated", lambda *_, **__: pytest.fail("they were made"))
    with pytest.raises(ValueError, match="no parameters of this network can be split into 3 parts"):
        feeds.feed(small(environment=Driving(), devices=1, model=3))


# ------------------------------------------------------------------------------------------------------------ data


@pytest.mark.usefixtures("quick")
def test_other_data_are_noticed_when_a_run_is_gone_on_with(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder, part = streaming(data), tmp_path / "run", data / "c.lhs"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", after(1, lambda: signal.raise_signal(signal.SIGTERM), Checkpoints.save))
        assert begin(run, folder).code == loop.STOPPED
    assert json.loads((folder / "run.json").read_text())["data"]["scenarios"] == COUNT
    resident = streaming(data, bank=None, bank_updates=None)
    about = {"data": feeds.feed(resident).about}
    before = part.read_bytes()
    try:
        for scenarios, message in [
            (SCENARIOS[4:6], "holds 6 scenarios, and 7 when run"),
            ([*SCENARIOS[4:6], SCENARIOS[3]], "holds 7 other scenarios than when run"),
        ]:
            shard.write(part, scenarios)
            with pytest.raises(RunError, match=message) as raised:
                resume(folder)
            assert "\n" not in str(raised.value)
            with pytest.raises(RunError, match=message):
                feeds.check(resident, feeds.feed(resident), about, "run")
    finally:
        part.write_bytes(before)
    feeds.check(resident, feeds.feed(resident), about, "run")


def test_hosts_read_disjoint_chunks_of_one_padding(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two hosts by 3 of 7 scenarios: in 7 chunks each is read 6 times, and no two read one at once."""
    found = []
    for host in range(2):
        monkeypatch.setattr(feeds, "process_group", SimpleNamespace(index=lambda host=host: host, count=lambda: 2))
        found.append(contexts(streaming(data, updates=13, bank_by_host=True), 7))
    given = [[numbers(fed) for fed in each] for each in found]
    assert len({*given[0][0], *given[1][0]}) == 2 * BANK
    assert sorted(number for each in given for chunk in each for number in chunk) == sorted([*range(COUNT)] * 6)
    for one, other in zip(*found, strict=True):
        assert (one.place, one.following) == (other.place, other.following)
        assert [x.shape for x in plain(one.context)] == [x.shape for x in plain(other.context)]
    monkeypatch.undo()
    alone, whole = (contexts(streaming(data, bank_by_host=by_host), 2) for by_host in (True, False))
    assert_same([fed.context for fed in alone], [fed.context for fed in whole])  # of one process it changes nothing


def train_by_host(folder: Path) -> int:
    """In each of two processes of two devices: trains, and writes down what it read."""
    read, picks = [], stream.picks

    def noted(*given: Any, **options: Any) -> Any:
        chosen, after = picks(*given, **options)
        read.extend(chosen.tolist() if "share" in options else ())
        return chosen, after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "picks", noted)
        patch.setattr(final_evaluation, "evaluations", lambda *_, **__: iter(()))
        patch.setattr(feeds, "_within", lambda *_: Glance)
        run = streaming(folder / "shards", devices=4, num_envs=8, bank_by_host=True)
        if folder.name == "acted":
            run = dataclasses.replace(run, topology="actors", acting=ActorConfig(4, "thread"))
        loop.train(runs.resolve(run), folder / "run", resumed=False)
    (folder / f"read-{process_group.index()}").write_text(json.dumps(read[: 2 * BANK]))
    return 0


@pytest.mark.slow
def test_two_processes_read_disjoint_scenarios_whose_union_is_the_epoch(tmp_path: Path) -> None:
    """And learn the same from them fused and with actors."""
    for folder in (tmp_path / "fused", tmp_path / "acted"):
        (folder / "shards").mkdir(parents=True), (folder / "run").mkdir()
        for name, part in (("a", SCENARIOS[:4]), ("c", SCENARIOS[4:6])):  # six: an epoch is one chunk of each
            shard.write(folder / "shards" / f"{name}.lhs", part)
        ended = together("train_by_host", folder, "training.test_data")
        assert [code for code, _ in ended] == [0, 0], ended
        assert json.loads((folder / "run/result.json").read_text())["status"] == "done"
        both = [json.loads((folder / f"read-{i}").read_text()) for i in range(2)]
        for epoch in range(2):
            mine, theirs = (each[epoch * BANK : (epoch + 1) * BANK] for each in both)
            assert sorted(mine + theirs) == list(range(6))
        assert both[0][:BANK] != both[0][BANK:]
    (one, seen), (other, its_seen) = (learnt(tmp_path / name / "run") for name in ("acted", "fused"))
    assert one == other
    for mine, theirs in zip(seen, its_seen, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)  # sums of four places are added up in another order


def test_impossible_settings_of_streaming_are_one_line(data: Path) -> None:
    for task, message in [
        (Driving((str(data),), bank=0), "--bank is 0; it must be at least 1"),
        (Driving(bank=4), "--bank is 4, and there is no --data"),
        (Driving((str(data),), bank=4, bank_updates=0), "--bank-updates is 0; it must be at least 1"),
        (Driving((str(data),), bank_updates=3), "it needs --bank"),
        (Driving((str(data),), bank_by_host=True), "--bank-by-host is on; it needs --bank"),
        (Driving(objects=1, simulator=simulator.Config(agents=2)), "--objects is 1; it must be at least --agents, 2"),
    ]:
        with pytest.raises(RunError, match=message):
            runs.resolve(Run("bad", task))


def test_a_chunk_is_seen_eight_times_if_nothing_is_said() -> None:
    task = Driving(("x.lhs",), bank=100)
    assert runs.resolve(Run("r", task, num_envs=64, num_steps=50, devices=1)).environment.bank_updates == 20  # type: ignore[union-attr]
    task = dataclasses.replace(task, horizon=40)
    assert runs.resolve(Run("r", task, num_envs=64, num_steps=50, devices=1)).environment.bank_updates == 10  # type: ignore[union-attr]


TRAIN = """
import json, sys
from pathlib import Path
from longhaul.training import run_dir as folders
from longhaul.config import run as runs
from longhaul.training import loop as training
folder, resumed = Path(sys.argv[1]), Path(sys.argv[1], "run.json").exists()
run = folders.load_run(folder) if resumed else runs.from_dict(runs.Run, json.loads(sys.argv[2]))
sys.exit(training.train(run, folder, resumed=resumed).code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("acting", [None, ActorConfig(2, "thread")])
def test_killed_between_two_chunks_it_ends_bit_identical(
    data: Path, tmp_path: Path, acting: ActorConfig | None
) -> None:
    """kill -9, in processes of their own, of a run that drives."""
    run = streaming(data) if acting is None else by_actors(data, acting)
    run = dataclasses.replace(run, save_interval=1, threads=1)
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}

    def started(folder: Path) -> subprocess.Popen:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", TRAIN, str(folder), json.dumps(to_dict(run))]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for updates in (4, 9):
        process = started(killed)
        while process.poll() is None and not (killed / f"checkpoints/{updates}").exists():
            time.sleep(0.001)
        process.kill()
        process.wait()
    assert started(killed).wait() == started(whole).wait() == 0
    assert learnt(killed) == learnt(whole)
    assert acting is not None or ended_the_same(killed, whole)
