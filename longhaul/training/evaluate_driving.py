"""Evaluation of policies in driving scenarios."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import rollout
from longhaul.algorithms import registry
from longhaul.algorithms.context import Context
from longhaul.config.run import Driving, Run
from longhaul.driving import scenario_source
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData
from longhaul.driving.evaluation import benchmark_scores
from longhaul.driving.render import recording
from longhaul.driving.render.recording import Recording, Verdict
from longhaul.driving.scenario.bank import Bank, stack
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.sim import simulator
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import cores
from longhaul.spaces import Measure
from longhaul.training.evaluate import EVENTS, MOST, Scores, _scores
from longhaul.types import Environment, Params


class Drives(NamedTuple):
    """A set of scenarios to be driven by one policy after the other."""

    run: Run
    scenarios: list[Scenario]
    bank: Bank
    files: tuple[str, ...] = ()  # where each is from; () where they were generated

    def simulator(self, driver: str, **changes: Any) -> simulator.Simulator:
        """The environment of the scenarios, as the run has it but for `changes` of its configuration."""
        task = self.run.environment
        assert isinstance(task, Driving)
        return simulator.driving(self.bank, dataclasses.replace(task.simulator, driver=driver, **changes))

    def actor(self, environment: Environment, driver: str) -> tuple[rollout.Act, Callable[[int], Any]]:
        """(act, memory) of the run's policy, or of nobody where the simulator drives."""
        if driver != "policy":
            return _hands_off, lambda count: ()
        algorithm = registry.make(environment.spec, self.run.algorithm, Context(updates=1, mean=meshes.identity))
        return algorithm.act, algorithm.memory

    def player(
        self, driver: str, record: Sequence[int] = ()
    ) -> Callable[[Params | None], tuple[Scores, list[Recording]]]:
        """policy -> what it scores on each scenario once, and recordings of those that `record` numbers.

        `driver` is the simulator's: "policy", or one that needs none: "idm", "log", "constant". Compiles once.
        """
        environment = self.simulator(driver)
        act, memory = self.actor(environment, driver)
        some = np.array(record, np.int32)

        def observe(state: Any) -> Any:
            chosen = jax.tree.map(lambda leaf: leaf[some], state)
            return jax.vmap(lambda s: (environment.frame(s), environment.active(s), environment.metrics(s)))(chosen)

        steps = environment.spec.max_steps
        assert steps is not None
        through = rollout.play(environment, act, memory, steps=steps, observe=observe if record else None)
        index = jnp.arange(environment.scenarios)
        program = jax.jit(lambda p: through(p, jax.vmap(environment.start)(index), None, jax.random.key(1)))

        def play(policy: Params | None) -> tuple[Scores, list[Recording]]:
            episodes, frames = jax.device_get(program(policy))
            films = [self._film(frames, i, which, driver) for i, which in enumerate(record)]
            return self._scored(_scores(episodes, [s.id for s in self.scenarios]), episodes.valid), films

        return play

    def play(self, policy: Params | None, driver: str, record: Sequence[int] = ()) -> tuple[Scores, list[Recording]]:
        """One policy, as `player` has it."""
        return self.player(driver, record)(policy)

    def _scored(self, found: Scores, valid: np.ndarray) -> Scores:
        """Of whom each row is, and the benchmarks' scores beside what was measured."""
        scenario, slot = np.nonzero(valid)
        agent = np.array([self.scenarios[i].controlled[j] for i, j in zip(scenario, slot, strict=True)], int)
        return Scores(benchmark_scores.aggregates(found.metrics) | found.metrics, found.names, scenario, agent)

    def some(self, which: Sequence[int]) -> Drives:
        """The drives in these scenarios alone."""
        chosen = [self.scenarios[i] for i in which]
        files = tuple(self.files[i] for i in which) if self.files else ()
        return Drives(self.run, chosen, stack(chosen, agents=self.bank.controlled.shape[1]), files)

    def _film(self, frames: Any, i: int, which: int, label: str) -> Recording:
        """The recording of scenario `which` from the stacked frames [T+1, E, ...] of episode i."""
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
    """What an agent did and scored until frame `end`; metrics are [T+1, A]."""
    told = {name: float(m.value[end - 1, slot]) for name, m in metrics.items() if m.valid[end - 1, slot]}
    happened = {name: metrics[name].value[:end, slot] for name in EVENTS if name in metrics}
    events = {name: _first(values) if name in told else None for name, values in happened.items()}
    return Verdict(agent, events, told)


def _hands_off(policy: Params, memory: Any, observation: Any, key: Any) -> tuple[jax.Array, Any, Any]:
    """Who acts where the simulator drives: its actions are not looked at."""
    count = jax.tree.leaves(observation)[0].shape[0]
    return jnp.zeros((count, 2), jnp.int32), memory, ()


def _first(values: np.ndarray) -> int | None:
    """The first frame at which a metric that starts at 0 is above it."""
    return int(np.argmax(values > 0)) if np.any(values > 0) else None


def drives(run: Run, data: Sequence[str] = (), count: int | None = None, traffic: str | None = None) -> Drives:
    """The scenarios of `data`; else those of the run's own data; else generated ones that no run trains in.

    At most `count` are made; without it, all of `data`, or as many as the run says. `traffic` is one of `TRAFFICS`, by
    default the run's own, with the agents that it trains. Raises BadData, one line, where data can't be used.
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
        found = _from_files(task, paths, count if data else count or run.evaluation_episodes)
        files, scenarios = tuple(file for file, _ in found), [scenario for _, scenario in found]
    else:
        count = count or run.evaluation_episodes or 128
        scenarios = scenario_source.generated(
            scenario_source.HELD_OUT, count, agents=settings.agents, horizon=task.horizon, workers=cores(),
            control=settings.control,
        )  # fmt: skip
    if traffic == "self":  # no slots that nobody has
        most = max(int(np.sum(scenario.controlled >= 0)) for scenario in scenarios)
        task = dataclasses.replace(task, simulator=dataclasses.replace(settings, agents=max(most, 1)))
    run = dataclasses.replace(run, environment=task)
    return Drives(run, scenarios, stack(scenarios, agents=task.simulator.agents), files)


def _from_files(task: Driving, paths: Sequence[str], count: int | None) -> list[tuple[str, Scenario]]:
    """The first `count` scenarios of the files at `paths`, each with the path of its file; no more are compiled."""
    found: list[tuple[str, Scenario]] = []
    for path in readers.expand(paths):
        left = None if count is None else count - len(found)
        if left == 0:
            break
        made = scenario_source.from_logs(
            [str(path)], agents=task.simulator.agents, horizon=task.horizon, objects=task.objects, count=left,
            control=task.simulator.control,
        )  # fmt: skip
        found += [(str(path), scenario) for scenario in made]
    if not found:
        raise BadData(f"{', '.join(map(str, paths))}: no scenario to evaluate in; give other data")
    return found


def label(recordings: Sequence[Recording], policy: str) -> list[Recording]:
    recording.check(recordings)
    return [r._replace(label=policy) for r in recordings]
