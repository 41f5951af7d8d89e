"""Evaluation of policies in driving scenarios."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import rollout
from longhaul.algorithms import registry
from longhaul.algorithms.run_context import RunContext
from longhaul.config.run import Driving, Run
from longhaul.driving import scenario_source
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData
from longhaul.driving.evaluation import benchmark_scores
from longhaul.driving.evaluation.realism import realism
from longhaul.driving.render import recording
from longhaul.driving.render.recording import Recording, Verdict
from longhaul.driving.scenario.bank import Bank, stack
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.sim import simulator
from longhaul.driving.sim.config import HELD_OUT
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import cores
from longhaul.spaces import Measure
from longhaul.telemetry import screen
from longhaul.training.evaluate import EVENTS, MOST, Scores, _scores
from longhaul.types import Environment, Params


class Drives(NamedTuple):
    """Scenarios to be driven by several policies."""

    run: Run
    scenarios: list[Scenario]
    bank: Bank
    files: tuple[str, ...] = ()  # file of each scenario; () if generated

    def simulator(self, driver: str, **changes: Any) -> simulator.Simulator:
        """Environment of the scenarios: the run's, with `changes` to its configuration."""
        task = self.run.environment
        assert isinstance(task, Driving)
        return simulator.driving(self.bank, dataclasses.replace(task.simulator, driver=driver, **changes))

    def actor(self, environment: Environment, driver: str) -> tuple[rollout.Act, Callable[[int], Any]]:
        """(act, memory) of the run's policy; a placeholder if the simulator drives."""
        if driver != "policy":  # the simulator ignores these actions

            def act(policy: Params, memory: Any, observation: Any, key: Any) -> tuple[jax.Array, Any, Any]:
                return jnp.zeros((jax.tree.leaves(observation)[0].shape[0], 2), jnp.int32), memory, ()

            return act, lambda count: ()
        algorithm = registry.make(environment.spec, self.run.algorithm, RunContext(updates=1, mean=meshes.identity))
        return algorithm.act, algorithm.memory

    def player(self, driver: str, films: int = 0, **changes: Any) -> Callable[..., tuple[Scores, list[Recording]]]:
        """(policy, numbers of `films` scenarios) -> (its scores on each scenario, recordings of those scenarios).

        `driver` is the simulator's: "policy", or a rule: "idm", "log", "constant". The first scenarios are recorded by
        default. Compiles once, whichever are recorded. `changes` are to the simulator's configuration.
        """
        environment = self.simulator(driver, **changes)
        act, memory = self.actor(environment, driver)
        steps = environment.spec.max_steps
        assert steps is not None
        index = jnp.arange(environment.scenarios)

        @jax.jit
        def program(policy: Params | None, some: jax.Array) -> Any:
            def observe(state: Any) -> Any:
                chosen = jax.tree.map(lambda leaf: leaf[some], state)
                return jax.vmap(lambda s: (environment.frame(s), environment.active(s), environment.metrics(s)))(chosen)

            through = rollout.play(environment, act, memory, steps=steps, observe=observe if films else None)
            return through(policy, jax.vmap(environment.start)(index), None, jax.random.key(1))

        def play(policy: Params | None, record: Sequence[int] = range(films)) -> tuple[Scores, list[Recording]]:
            with screen.stage(f"{len(self.scenarios)} scenarios driven by {driver}"):
                episodes, frames = jax.device_get(program(policy, np.array(record, np.int32)))
            drawn = [self._film(frames, i, which, driver) for i, which in enumerate(record)]
            return self._scored(_scores(episodes, [s.id for s in self.scenarios]), episodes.valid), drawn

        return play

    def play(
        self, policy: Params | None, driver: str, record: Sequence[int] = (), **changes: Any
    ) -> tuple[Scores, list[Recording]]:
        """Scores and recordings of one policy, as from `player`."""
        return self.player(driver, len(record), **changes)(policy, record)

    def _scored(self, scores: Scores, valid: np.ndarray) -> Scores:
        """Scores with the agent of each row and the benchmarks' aggregates."""
        scenario, slot = np.nonzero(valid)
        agent = np.array([self.scenarios[i].controlled[j] for i, j in zip(scenario, slot, strict=True)], int)
        return Scores(benchmark_scores.aggregates(scores.metrics) | scores.metrics, scores.names, scenario, agent)

    def some(self, which: Sequence[int]) -> Drives:
        """Drives restricted to these scenarios."""
        chosen = [self.scenarios[i] for i in which]
        files = tuple(self.files[i] for i in which) if self.files else ()
        return Drives(self.run, chosen, stack(chosen, agents=self.bank.controlled.shape[1]), files)

    def _film(self, frames: Any, i: int, which: int, label: str) -> Recording:
        """Recording of scenario `which` from the stacked frames [T+1, E, ...] of episode i."""
        frame, active, metrics = jax.tree.map(lambda leaf: leaf[:, i], frames)
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


def drives(run: Run, data: Sequence[str] = (), count: int | None = None, traffic: str | None = None) -> Drives:
    """Scenarios of `data`, else of the run's own data, else generated ones that no run trains in.

    At most `count` are compiled; by default all of `data`, or the run's number. `traffic` is one of `TRAFFICS`, by
    default the run's own with the agents that it trains. Raises BadData, one line, if data cannot be used.
    """
    task = run.environment
    assert isinstance(task, Driving)
    settings = task.simulator
    if traffic is not None:
        agents = min(MOST, task.objects) if traffic == "self" else 1
        settings = dataclasses.replace(settings, agents=agents, traffic="log" if traffic == "self" else traffic)
    task = dataclasses.replace(task, simulator=settings)
    paths = tuple(data) or task.data
    files: tuple[str, ...] = ()
    if paths:
        loaded = _from_files(task, paths, count if data else count or run.evaluation_episodes)
        files, scenarios = tuple(file for file, _ in loaded), [scenario for _, scenario in loaded]
    else:
        count = count or run.evaluation_episodes or 128
        scenarios = scenario_source.generated(
            HELD_OUT, count, agents=settings.agents, horizon=task.horizon, workers=cores(),
            control=settings.control,
        )  # fmt: skip
    if traffic == "self":  # no empty slots
        most = max(int(np.sum(scenario.controlled >= 0)) for scenario in scenarios)
        task = dataclasses.replace(task, simulator=dataclasses.replace(settings, agents=max(most, 1)))
    run = dataclasses.replace(run, environment=task)
    return Drives(run, scenarios, stack(scenarios, agents=task.simulator.agents), files)


def _from_files(task: Driving, paths: Sequence[str], count: int | None) -> list[tuple[str, Scenario]]:
    """First `count` scenarios of the files at `paths`, each with its file; no more are compiled."""
    loaded: list[tuple[str, Scenario]] = []
    for path in readers.expand(paths):
        left = None if count is None else count - len(loaded)
        if left == 0:
            break
        scenarios = scenario_source.from_logs(
            [str(path)], agents=task.simulator.agents, horizon=task.horizon, objects=task.objects, count=left,
            control=task.simulator.control,
        )  # fmt: skip
        loaded += [(str(path), scenario) for scenario in scenarios]
    if not loaded:
        raise BadData(f"{', '.join(map(str, paths))}: no scenario to evaluate in; give other data")
    return loaded


def worst(scores: Scores, count: int) -> list[int]:
    """The numbers of the `count` worst scenarios, worst first: by accuracy, then V-Max's score, progress and return.

    Each is the mean over the scenario's episodes that tell it; scenarios that do not tell one come after those that do.
    """
    group = scores.groups()
    keys = [name for name in ("accuracy", "vmax_score", "progress", "return") if name in scores.metrics]

    def badness(number: int) -> list[float]:
        of = (scores.metrics[name].valid & (group == number) for name in keys)
        return [float(np.mean(scores.metrics[n].value[some])) if some.any() else np.inf for n, some in zip(keys, of)]

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
    driver ("idm", "log", "constant") drives once, and the rollouts are copies.
    """
    if count < 1:
        raise ValueError(f"rollouts is {count}; realism needs at least 1")
    environment = drives.simulator(driver, terminations=())
    act, memory = drives.actor(environment, driver)
    steps = environment.spec.max_steps
    assert steps is not None
    worlds = count if driver == "policy" else 1

    def observe(state: Any) -> Any:
        frame = jax.vmap(environment.frame)(state)
        return frame.pose, frame.present

    through = rollout.play(environment, act, memory, steps=steps, observe=observe)

    @jax.jit
    def program(params: Params | None, which: jax.Array, key: jax.Array) -> Any:
        starts = jax.vmap(environment.start)(jnp.broadcast_to(which, (worlds,)))
        return through(params, starts, key if driver == "policy" else None, key)[1]

    rows = []
    with screen.stage("scenarios for realism", len(drives.scenarios)) as advance:
        for i, scenario in enumerate(drives.scenarios):
            advance(i)
            frames = jax.device_get(program(policy, jnp.int32(i), jax.random.fold_in(jax.random.key(2), i)))
            cut = (leaf[: scenario.steps, :, : scenario.kind.shape[0]] for leaf in frames)  # [T, R, N, ...]
            rows.append(realism(scenario, *(np.repeat(np.swapaxes(leaf, 0, 1), count // worlds, 0) for leaf in cut)))
    metrics = {
        name: Measure(np.array([row[name].value for row in rows], float), np.array([row[name].valid for row in rows]))
        for name in rows[0]
    }
    return Scores(metrics, [scenario.id for scenario in drives.scenarios], np.arange(len(rows)))
