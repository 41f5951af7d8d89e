"""What a policy scores on whole episodes, beside the policies that one wants to see it beside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import mesh as meshes
from longhaul import rollout, worlds
from longhaul.algorithms import ppo
from longhaul.driving import recording, simulator
from longhaul.driving.bank import Bank, stack
from longhaul.driving.recording import Recording
from longhaul.driving.scenario import Scenario
from longhaul.run import Driving, Run, cores
from longhaul.types import Environment, Params

POLICIES = ("run", "untrained", "idm", "log", "constant")
"""Who can be evaluated: the run's policy, the same before training, and drivers that no learning made."""

FAULTS = ("collision", "offroad", "red_light", "goal")


class Scores(NamedTuple):
    """float64 [E] each, an agent's episode a row; `names` [E] says of which scenario ("" where there is none)."""

    metrics: dict[str, np.ndarray]
    names: list[str]

    def means(self) -> dict[str, Any]:
        """The means, and how many `episodes` there were."""
        return {name: float(np.mean(values)) for name, values in self.metrics.items()} | {"episodes": len(self.names)}


def play_classic(run: Run, environment: Environment, policy: Params, episodes: int) -> Scores:
    """`episodes` episodes by the policy's mode, from starts that do not depend on training."""
    algorithm = ppo.ppo(environment.spec, run.algorithm, updates=1, mean=meshes.identity)
    limit = environment.spec.max_steps
    if limit is None:
        raise ValueError("episodes of this environment may never end; give it a time limit to evaluate in it")
    player = jax.jit(rollout.play(environment, algorithm.act, algorithm.memory, steps=limit), static_argnums=2)
    begun = jax.jit(rollout.starts, static_argnums=(0, 2))(environment, jax.random.key(run.seed + 10_000), episodes)
    episodes_played, _ = player(policy, begun, None, jax.random.key(run.seed + 20_000))
    return _scores(episodes_played, [""] * episodes)


def _scores(episodes: rollout.Episodes, names: Sequence[str]) -> Scores:
    episodes = jax.device_get(episodes)
    valid = np.asarray(episodes.valid)
    metrics = {name: np.asarray(values, np.float64)[valid] for name, values in episodes.scores.items()}
    return Scores(metrics, [name for name, row in zip(names, valid, strict=True) for _ in range(int(row.sum()))])


class Drives(NamedTuple):
    """A set of scenarios to be driven by one policy after the other."""

    run: Run
    scenarios: list[Scenario]
    bank: Bank

    def player(
        self, driver: str, record: Sequence[int] = ()
    ) -> Callable[[Params | None], tuple[Scores, list[Recording]]]:
        """policy -> what it scores on each scenario once, and recordings of those that `record` numbers.

        `driver` is the simulator's: "policy", or one that needs none: "idm", "log", "constant". Compiles once.
        """
        task = self.run.environment
        assert isinstance(task, Driving)
        environment = simulator.driving(self.bank, dataclasses.replace(task.simulator, driver=driver))
        algorithm = ppo.ppo(environment.spec, self.run.algorithm, updates=1, mean=meshes.identity)
        act, memory = (algorithm.act, algorithm.memory) if driver == "policy" else (_hands_off, lambda count: ())
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
            return _scores(episodes, [s.id for s in self.scenarios]), films

        return play

    def play(self, policy: Params | None, driver: str, record: Sequence[int] = ()) -> tuple[Scores, list[Recording]]:
        """One policy, as `player` has it."""
        return self.player(driver, record)(policy)

    def only(self, which: int) -> Drives:
        """The drive in scenario number `which` alone."""
        scenarios = [self.scenarios[which]]
        return Drives(self.run, scenarios, stack(scenarios, agents=self.bank.controlled.shape[1]))

    def _film(self, frames: Any, i: int, which: int, label: str) -> Recording:
        """The recording of scenario `which` from the stacked frames [T+1, E, ...] of episode i."""
        frame, active, metrics = jax.tree.map(lambda leaf: leaf[:, i], frames)
        scenario = self.scenarios[which]
        playing = np.any(active, axis=-1)
        end = len(playing) if playing.all() else int(np.argmin(playing)) + 1
        ego = {name: float(values[end - 1, 0]) for name, values in metrics.items()}
        events = {name: _first(metrics[name][:end, 0]) for name in FAULTS if name in metrics}
        return Recording(
            id=scenario.id, dt=scenario.dt, pose=frame.pose[:end], size=frame.size[0],
            kind=frame.kind[0].astype(np.int8), present=frame.present[:end], controlled=frame.controlled[0],
            expert=frame.expert[:end], route=scenario.route[0, : int(scenario.route_points[0]), :2],
            light_position=frame.light_position[0], light_state=frame.light_state[:end].T.astype(np.int8),
            drawing=scenario.drawing, events=events, label=label, metrics=ego,
        )  # fmt: skip


def _hands_off(policy: Params, memory: Any, observation: Any, key: Any) -> tuple[jax.Array, Any, Any]:
    """Who acts where the simulator drives: its actions are not looked at."""
    count = jax.tree.leaves(observation)[0].shape[0]
    return jnp.zeros((count, 2), jnp.int32), memory, ()


def _first(values: np.ndarray) -> int | None:
    """The first frame at which a metric that starts at 0 is above it."""
    return int(np.argmax(values > 0)) if np.any(values > 0) else None


def drives(run: Run, data: Sequence[str] = (), count: int | None = None) -> Drives:
    """The scenarios of `data`; else those of the run's own data; else generated ones that no run trains in."""
    task = run.environment
    assert isinstance(task, Driving)
    agents, horizon = task.simulator.agents, task.horizon
    paths = tuple(data) or task.data
    if paths:
        scenarios = worlds.from_logs(paths, agents=agents, horizon=horizon)[:count]
    else:
        count = count or run.evaluation_episodes or 128
        scenarios = worlds.generated(worlds.HELD_OUT, count, agents=agents, horizon=horizon, workers=cores())
    return Drives(run, scenarios, stack(scenarios, agents=agents))


def label(recordings: Sequence[Recording], policy: str) -> list[Recording]:
    recording.check(recordings)
    return [r._replace(label=policy) for r in recordings]
