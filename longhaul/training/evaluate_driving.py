"""Evaluation of policies in driving scenarios."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from longhaul import rollout
from longhaul.algorithms import registry
from longhaul.algorithms.run_context import RunContext
from longhaul.config.run import Driving, Run
from longhaul.driving import scenario_source
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData
from longhaul.driving.evaluation import benchmark_scores, scenario_set
from longhaul.driving.evaluation.realism import realism
from longhaul.driving.evaluation.scenario_set import ScenarioSet
from longhaul.driving.render import recording
from longhaul.driving.render.recording import Recording, Verdict
from longhaul.driving.scenario.bank import Bank, stack
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.shards import stream
from longhaul.driving.sim import device_bank, simulator
from longhaul.driving.sim.config import Config
from longhaul.driving.sim.device_bank import DeviceBank
from longhaul.rollout import MeasureTable
from longhaul.runtime import each_device
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import cores, on_cpu
from longhaul.runtime.each_device import EachDevice
from longhaul.runtime.errors import RunError, did_you_mean
from longhaul.spaces import Measure
from longhaul.telemetry import screen
from longhaul.training.evaluate import EVENTS, MOST, Scores, Waits
from longhaul.types import Act, Environment, Params

LANES = 64
"""Largest number of scenarios that one program drives at a time on a CPU. Results never depend on what else is in
memory: a scenario's lane follows from its number alone, whatever the number of devices."""

WIDE = 512
"""That number on an accelerator, whose step takes as long for few scenarios."""

WORTH = 1024
"""Driven agents by which another core of a CPU pays: it compiles a program of its own, which takes about a minute."""

MARGIN = 1.5
"""Room in the padded tables by the need of the first batch: few later ones need more, which compiles again."""


class Batch(NamedTuple):
    """Scenarios that D devices drive at once, `lanes` on each."""

    numbers: np.ndarray  # int [D, lanes]; -1 is padding
    agents: np.ndarray  # int [D, lanes, A]: index of each driven agent in its scenario
    kinds: np.ndarray  # int [D, lanes, A]: kind of it
    tables: tuple[DeviceBank, ...]  # those of each device, on it


@dataclasses.dataclass(frozen=True)
class Player:
    """(policy, numbers of scenarios) -> (its scores on each scenario, recordings of those scenarios)."""

    play: Callable[..., tuple[Scores, list[Recording]]]
    compile: Callable[[Params | None], None]
    """Does beforehand, in any thread, what the first play would begin with."""

    def __call__(self, *about: Any) -> tuple[Scores, list[Recording]]:
        return self.play(*about)


class Drives(NamedTuple):
    """Scenarios to be driven by several policies, in batches of constant memory."""

    run: Run
    scenarios: ScenarioSet
    share: tuple[int, int] = (0, 1)  # number of this process among those that drive together

    @property
    def files(self) -> tuple[str, ...]:
        """File of each scenario; () if generated."""
        return self.scenarios.files

    def shell(self, driver: str, **changes: Any) -> simulator.Simulator:
        """Environment of the scenarios without their tables: the run's, with `changes` to its configuration."""
        task, facts = self.run.environment, self.scenarios.facts
        assert isinstance(task, Driving)
        config = dataclasses.replace(task.simulator, driver=driver, **changes)
        return simulator.outline(config, least=facts.shortest, most=facts.sizes.steps, dt=facts.dt)

    def actor(self, environment: Environment, driver: str) -> tuple[Act, Callable[[int], Any]]:
        """(act, memory) of the run's policy; a placeholder if the simulator drives."""
        if driver != "policy":  # the simulator ignores these actions

            def act(policy: Params, memory: Any, observation: Any, key: Any) -> tuple[jax.Array, Any, Any]:
                return jnp.zeros((jax.tree.leaves(observation)[0].shape[0], 2), jnp.int32), memory, ()

            return act, lambda count: ()
        algorithm = registry.make(environment.spec, self.run.algorithm, RunContext(updates=1, mean=meshes.identity))
        return algorithm.act, algorithm.memory

    @property
    def lanes(self) -> int:
        """Scenarios of a batch on one device."""
        count = len(self.scenarios)
        return -(-count // -(-count // (LANES if on_cpu() else WIDE)))

    def batches(self, config: Config, devices: Sequence[jax.Device], partners: bool = False) -> Generator[Batch]:
        """All scenarios in order, `lanes` to a device; a thread prepares the next batch meanwhile. Tables for
        `traffic.Partners` let all but the ego react."""
        count, lanes = len(self.scenarios), self.lanes
        room: dict[str, int] = {}
        reactive, driven = config.traffic == "idm" or partners, 1 if partners else config.agents

        def arranged(first: int) -> tuple[np.ndarray, Bank, DeviceBank]:
            numbers = np.arange(first, first + lanes)
            chosen = [self.scenarios[int(i)] for i in np.where(numbers < count, numbers, first % count)]
            bank = stack(chosen, agents=config.agents, sizes=self.scenarios.facts.sizes)
            simulator.check(bank, config)
            return (
                np.where(numbers < count, numbers, -1),
                bank,
                device_bank.arrange(bank, config.agents, reactive=reactive, driven=driven),
            )

        def make() -> Iterator[Batch]:
            index, processes = self.share
            worth = lanes * len(devices)
            for turn in range(-(-count // (worth * processes))):  # equally many in each process
                first = (turn * processes + index) * worth
                numbers, banks, hosts = zip(*(arranged(first + lanes * d) for d in range(len(devices))))
                for name in device_bank.lengths(hosts[0]):
                    need = max(device_bank.lengths(host)[name] for host in hosts)
                    if need > room.get(name, 0):
                        room[name] = int(MARGIN * need)
                tables = [jax.device_put(device_bank.padded(h, room), d) for h, d in zip(hosts, devices, strict=True)]
                agents = np.stack([bank.controlled for bank in banks])
                kinds = np.stack([np.take_along_axis(b.kind, np.maximum(b.controlled, 0), 1) for b in banks])
                yield Batch(np.stack(numbers), agents, kinds, tuple(tables))

        return stream.prefetch(make(), 1)

    def opener(self, config: Config, devices: Sequence[jax.Device], partners: bool = False) -> Callable[[], Any]:
        """Context of all batches, to be opened any number of times: those of few scenarios are prepared once."""
        if len(self.scenarios) > scenario_set.MOST_HELD:
            return lambda: closing(self.batches(config, devices, partners))
        held = list(self.batches(config, devices, partners))
        return lambda: nullcontext(held)

    def devices(self) -> tuple[jax.Device, ...]:
        """Devices of this process that drive: as many as there are batches for, and on a CPU as many as pay."""
        task, count = self.run.environment, len(self.scenarios)
        assert isinstance(task, Driving)
        batches = -(-count // self.lanes)
        return each_device.local(min(batches, max(1, count * task.simulator.agents // WORTH)) if on_cpu() else batches)

    def player(self, driver: str, films: int = 0, **changes: Any) -> Player:
        """Player of the scenarios, which records `films` of them.

        `driver` is the simulator's: "policy", or a rule: "idm", "log", "constant". The first scenarios are recorded by
        default. Compiles once a device, whichever are recorded. `changes` are to the simulator's configuration.
        """
        shell = self.shell(driver, **changes)
        act, memory = self.actor(shell, driver)
        steps, inserts = shell.spec.max_steps, shell.inserts()
        assert steps is not None

        def drive(policy: Params | None, tables: DeviceBank, selected: jax.Array) -> Any:
            environment = dataclasses.replace(shell, tables=tables)

            def observe(state: Any, metrics: MeasureTable) -> Any:
                waiting = (state.t, jax.vmap(environment.waiting)(state)) if inserts else ()
                if not films:
                    return waiting, ()
                state, metrics = jax.tree.map(lambda leaf: leaf[selected], (state, metrics))
                return waiting, (jax.vmap(environment.frame)(state), jax.vmap(environment.active)(state), metrics)

            watched = observe if films or inserts else None
            through = rollout.play(environment, act, memory, steps=steps, observe=watched)
            starts = jax.vmap(environment.start)(jnp.arange(self.lanes))
            return through(policy, starts, None, jax.random.key(1))

        program = EachDevice(drive, self.devices())
        opened = self.opener(shell.config, program.devices)

        def compile(policy: Params | None) -> None:
            with opened() as batches:
                first, none = next(iter(batches)), np.zeros((len(program.devices), films), np.int32)
                program(program.put(policy), first.tables, none)

        def play(policy: Params | None, record: Sequence[int] = range(films)) -> tuple[Scores, list[Recording]]:
            policies, rows, recordings, waited = program.put(policy), [], {}, np.zeros(2)
            count = len(self.scenarios)
            title = f"{count} scenario{'s' * (count != 1)} driven by {driver}"
            with screen.stage(title, len(self.scenarios)) as advance, opened() as batches:
                for batch in batches:
                    # (film, its scenario, the device and the lane that drive it) of those to record in this batch
                    filmed = [
                        (i, scenario, device, lane)
                        for i, scenario in enumerate(record)
                        for device, lane in np.argwhere(batch.numbers == scenario)
                    ]
                    selected = np.zeros((len(program.devices), films), np.int32)
                    for i, _, device, lane in filmed:
                        selected[device, i] = lane
                    episodes, seen = zip(*program(policies, batch.tables, selected), strict=True)
                    rows.append(rows_of(episodes, batch))
                    if inserts:
                        waited += waits_of([waiting for waiting, _ in seen], batch)
                    for i, scenario, device, _ in filmed:
                        recordings[scenario] = self._film(seen[device][1], i, scenario, driver)
                    advance(int(batch.numbers.max()) + 1)
            scores = joined(rows, self)
            if inserts:
                if self.share[1] > 1:
                    waited = np.sum(_gather_rows(waited[None]), axis=0)
                scores = scores._replace(waits=Waits(int(waited[0]), float(waited[1])))
            return scores, [recordings[scenario] for scenario in record]

        return Player(play, compile)

    def play(
        self, policy: Params | None, driver: str, record: Sequence[int] = (), **changes: Any
    ) -> tuple[Scores, list[Recording]]:
        """Scores and recordings of one policy, as from `player`."""
        return self.player(driver, len(record), **changes)(policy, record)

    def subset(self, which: Sequence[int]) -> Drives:
        """Drives restricted to these scenarios."""
        files = tuple(self.files[i] for i in which) if self.files else ()
        return Drives(self.run, scenario_set.in_memory([self.scenarios[i] for i in which], files))

    def named(self, ids: Sequence[str]) -> Drives:
        """Drives restricted to the scenarios of these ids, each that has one of them; all where none is given.
        RunError, with the nearest, for an id that is not there."""
        present = list(self.scenarios.ids)
        for each in ids:
            if each not in present:
                known = list(dict.fromkeys(present))
                near = [id_ for id_ in known if id_.startswith(each)][:3] or difflib.get_close_matches(each, known)
                few = f"there are {', '.join(present[:3])}{' ...' if len(present) > 3 else ''}"
                hint = did_you_mean(near, few)
                raise RunError(f"no scenario is named {each!r}; {hint}")
        places = [i for each in dict.fromkeys(ids) for i, id_ in enumerate(present) if id_ == each]
        return self.subset(places) if ids else self

    def _film(self, frames: Any, i: int, which: int, label: str) -> Recording:
        """Recording of scenario `which` from the stacked frames [T+1, E, ...] of episode i."""
        frame, active, table = jax.tree.map(lambda leaf: leaf[:, i], frames)
        metrics = table.measures()
        scenario = self.scenarios[which]
        playing = np.any(active, axis=-1)
        end = len(playing) if playing.all() else int(np.argmin(playing)) + 1
        slots = np.flatnonzero(active[0]) if active[0].any() else np.zeros(1, int)
        verdicts = [_verdict(int(scenario.controlled[slot]), slot, end, metrics) for slot in slots.tolist() if slot > 0]
        ego = _verdict(int(scenario.controlled[0]), 0, end, metrics)
        return Recording(
            id=scenario.id, dt=scenario.dt, pose=frame.pose[:end], size=frame.size[0],
            kind=frame.kind[0].astype(np.int8), present=frame.present[:end], controlled=frame.controlled[0],
            expert=frame.expert[:end], route=scenario.route[0, : int(scenario.route_points[0]), :2],
            light_position=frame.light_position[0], light_state=frame.light_state[:end].T.astype(np.int8),
            drawing=scenario.drawing, events=ego.events, label=label, metrics=ego.metrics, ego=ego.agent,
            others=tuple(verdicts),
        )  # fmt: skip


def _verdict(agent: int, slot: int, end: int, metrics: dict[str, Measure]) -> Verdict:
    """Events and scores of an agent until frame `end`; metrics are [T+1, A]."""
    scores = {name: float(m.value[end - 1, slot]) for name, m in metrics.items() if m.valid[end - 1, slot]}
    happened = {name: np.flatnonzero(metrics[name].value[:end, slot] > 0) for name in EVENTS if name in metrics}
    events = {name: int(at[0]) if name in scores and len(at) else None for name, at in happened.items()}
    return Verdict(agent, events, scores)


def drives(
    run: Run, data: Sequence[str] = (), count: int | None = None, traffic: str | None = None, seed: int = 0
) -> Drives:
    """Scenarios of `data`, else of the run's own data, else generated ones that no run trains in.

    At most `count`; by default all of `data`, or the run's number. Of shards they are a sample that `seed` draws, of
    raw logs the first. `traffic` is one of `TRAFFICS`, by default the run's own with the agents that it trains. Raises
    BadData, one line, if data cannot be used.
    """
    task = run.environment
    assert isinstance(task, Driving)
    settings = task.simulator
    if traffic is not None:
        agents = min(MOST, task.objects) if traffic == "self" else 1
        settings = dataclasses.replace(settings, agents=agents, traffic="log" if traffic == "self" else traffic)
    paths = tuple(data) or task.data
    if paths:
        count = count if data else count or run.evaluation_episodes
        files = readers.expand(paths)
        if all(readers.detect(path) == readers.SHARD for path in files):
            library = stream.open([str(path) for path in files])
            if traffic == "self":  # as many as the shards were compiled for
                settings = dataclasses.replace(settings, agents=min(settings.agents, int(library.sizes["A"].min())))
            stream.check(library, " ".join(paths), agents=settings.agents, control=settings.control)
            scenarios = scenario_set.packed(
                library, count, agents=settings.agents, horizon=task.horizon, objects=task.objects, seed=seed
            )
        else:
            task = dataclasses.replace(task, simulator=settings)
            loaded = _from_files(task, paths, count)
            scenarios = scenario_set.in_memory([scenario for _, scenario in loaded], [file for file, _ in loaded])
    else:
        scenarios = scenario_set.generated(
            count or run.evaluation_episodes or 128, agents=settings.agents, horizon=task.horizon,
            control=settings.control, workers=cores(), seed=seed,
        )  # fmt: skip
    if traffic == "self":  # no empty slots
        settings = dataclasses.replace(settings, agents=scenarios.facts.driven)
    return Drives(dataclasses.replace(run, environment=dataclasses.replace(task, simulator=settings)), scenarios)


def _from_files(task: Driving, paths: Sequence[str], count: int | None) -> list[tuple[str, Scenario]]:
    """First `count` scenarios of the files, each with its file; no more are compiled."""
    each = scenario_source.by_file(
        paths, count=count, skip_bad=task.skip_bad_logs, agents=task.simulator.agents, horizon=task.horizon,
        objects=task.objects, control=task.simulator.control,
    )  # fmt: skip
    loaded = [(str(path), scenario) for path, scenarios in each for scenario in scenarios]
    if not loaded:
        raise BadData(f"{', '.join(paths)}: no scenario to evaluate in; give other data")
    return loaded


def rows_of(by_device: Sequence[rollout.Episodes], batch: Batch) -> Scores:
    """Scores of a batch from the episodes of each device, a row an agent; `names` are still to be filled in."""
    episodes = jax.tree.map(lambda *leaves: np.stack(leaves), *by_device)
    played = np.asarray(episodes.valid) & (batch.numbers >= 0)[..., None]
    metrics = {
        name: Measure(np.asarray(score.value, np.float64)[played], np.asarray(score.valid)[played])
        for name, score in episodes.scores.measures().items()
    }
    device, lane, slot = np.nonzero(played)
    return Scores(
        metrics, [], batch.numbers[device, lane], batch.agents[device, lane, slot], batch.kinds[device, lane, slot]
    )


def waits_of(by_device: Sequence[tuple[np.ndarray, np.ndarray]], batch: Batch) -> np.ndarray:
    """Tracks that waited in a batch, and seconds for which they did, [2], from the time [T+1, E] of each frame and
    whether each object waits in it [T+1, E, N]. The frames after an episode repeat its last one."""
    tracks, seconds = 0, 0.0
    for device, (t, waiting) in enumerate(by_device):
        waiting = waiting & (np.diff(t, axis=0, prepend=-1) > 0)[..., None] & (batch.numbers[device] >= 0)[:, None]
        tracks += int(np.sum(np.any(waiting, axis=0)))
        seconds += float(np.sum(waiting, axis=(0, 2)) @ np.asarray(batch.tables[device].dt, np.float64))
    return np.array([tracks, seconds])


def joined(rows: Sequence[Scores], drives: Drives) -> Scores:
    """Scores of all batches, of all processes that share them, with the benchmarks' aggregates."""
    names = list(rows[0].metrics)
    parts = [
        np.column_stack([part.groups(), part.agent, part.kind, *(x for m in part.metrics.values() for x in m)])  # type: ignore[list-item]
        for part in rows
    ]
    table = np.concatenate(parts)
    if drives.share[1] > 1:
        table = _gather_rows(table)
    table = table[np.argsort(table[:, 0], kind="stable")]
    scenario, agent, kind = table[:, :3].astype(int).T
    metrics = {name: Measure(table[:, 3 + 2 * i], table[:, 4 + 2 * i] > 0.5) for i, name in enumerate(names)}
    scored = benchmark_scores.aggregates(metrics) | metrics
    return Scores(scored, [drives.scenarios.ids[i] for i in scenario.tolist()], scenario, agent, kind)


def _gather_rows(table: np.ndarray) -> np.ndarray:
    """Rows, float64, of all processes, each of which must call this."""
    counts = multihost_utils.process_allgather(np.array(len(table)))
    padded = np.zeros((int(counts.max()), table.shape[1]))
    padded[: len(table)] = table
    bits = multihost_utils.process_allgather(padded.view(np.uint32))  # JAX would round float64
    return np.concatenate([np.ascontiguousarray(b).view(np.float64)[:n] for b, n in zip(bits, counts.tolist())])


def past_violations(run: Run) -> dict[str, Any]:
    """Changes to the simulator's configuration with which an episode ends at its goal alone."""
    task = run.environment
    assert isinstance(task, Driving)
    return {"terminations": tuple(name for name in task.simulator.terminations if name == "goal")}


def worst(scores: Scores, count: int) -> list[int]:
    """The numbers of the `count` worst scenarios, worst first: by accuracy, then V-Max's score, progress and return.

    Each is the mean over the scenario's episodes that tell it; scenarios that do not tell one come after those that do.
    """
    group = scores.groups()
    keys = [name for name in ("accuracy", "vmax_score", "progress", "return") if name in scores.metrics]

    def badness(number: int) -> list[float]:
        valid = (scores.metrics[name].valid & (group == number) for name in keys)
        return [float(np.mean(scores.metrics[n].value[rows])) if rows.any() else np.inf for n, rows in zip(keys, valid)]

    return sorted(dict.fromkeys(group.tolist()), key=badness)[:count]


def telling(scores: Scores, count: int) -> list[int]:
    """`count` scenarios worth a look, by turns the worst of each kind of failure; then the first ones."""
    group, order = scores.groups(), worst(scores, len(scores.names))
    kinds = []
    for name in EVENTS:
        metric = scores.metrics.get(name)
        if metric is not None:
            failed = metric.valid & ((metric.value > 0) != (name == "goal"))
            kinds.append([number for number in order if np.any(failed & (group == number))])
    by_turns = [number for rank in itertools.zip_longest(*kinds) for number in rank if number is not None]
    return list(dict.fromkeys([*by_turns, *sorted(order)]))[:count]


def label(recordings: Sequence[Recording], policy: str) -> list[Recording]:
    recording.check(recordings)
    return [r._replace(label=policy) for r in recordings]


ROLLOUTS = 32
"""Rollouts of a scenario, the number of the Waymo Open Sim Agents Challenge."""


def score(drives: Drives, policy: Params | None, driver: str, count: int = ROLLOUTS) -> Scores:
    """Realism of each scenario over `count` rollouts, a row each; metrics have the names of `realism.realism`.

    The policy's actions are samples. Nothing ends before the log, since realism needs whole rollouts. A deterministic
    driver ("idm", "log", "constant") drives once, and the rollouts are copies. Raises ValueError for no rollout.
    """
    if count < 1:
        raise ValueError(f"rollouts is {count}; realism needs at least 1")
    shell, devices = drives.shell(driver, terminations=()), each_device.local(1)
    act, memory = drives.actor(shell, driver)
    steps = shell.spec.max_steps
    assert steps is not None
    worlds = count if driver == "policy" else 1

    @jax.jit
    def program(params: Params | None, tables: DeviceBank, which: jax.Array, key: jax.Array) -> Any:
        environment = dataclasses.replace(shell, tables=tables)

        def observe(state: Any, _: MeasureTable) -> Any:
            frame = jax.vmap(environment.frame)(state)
            return frame.pose, frame.present

        starts = jax.vmap(environment.start)(jnp.broadcast_to(which, (worlds,)))
        through = rollout.play(environment, act, memory, steps=steps, observe=observe)
        return through(params, starts, key if driver == "policy" else None, key)[1]

    rows = []
    total = len(drives.scenarios)
    with (
        screen.stage("scenarios for realism", total) as advance,
        closing(drives.batches(shell.config, devices)) as all_,
    ):
        for batch in all_:
            for lane, i in enumerate(batch.numbers[0].tolist()):
                if i < 0:
                    continue
                advance(i)
                scenario, key = drives.scenarios[i], jax.random.fold_in(jax.random.key(2), i)
                frames = jax.device_get(program(policy, batch.tables[0], jnp.int32(lane), key))
                cut = (leaf[: scenario.steps, :, : scenario.kind.shape[0]] for leaf in frames)  # [T, R, N, ...]
                each = (np.repeat(np.swapaxes(leaf, 0, 1), count // worlds, 0) for leaf in cut)
                rows.append(realism(scenario, *each))
    metrics = {
        name: Measure(np.array([row[name].value for row in rows], float), np.array([row[name].valid for row in rows]))
        for name in rows[0]
    }
    return Scores(metrics, list(drives.scenarios.ids), np.arange(len(rows)))
