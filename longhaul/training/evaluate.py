"""What a policy scores on whole episodes, beside the policies that one wants to see it beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from longhaul import rollout
from longhaul.algorithms import registry
from longhaul.algorithms.config import Reasoner
from longhaul.algorithms.context import Context
from longhaul.config.run import Run
from longhaul.driving.sim import config
from longhaul.envs.host.spec_stub import SpecStub
from longhaul.reasoning import evaluate as quality
from longhaul.reasoning import host_verifier, problem_sets, sampler
from longhaul.reasoning.config import Reasoning
from longhaul.runtime import mesh as meshes
from longhaul.spaces import Measure
from longhaul.topologies.actor_learner import host_rollout
from longhaul.training import reasoning_setup
from longhaul.types import Environment, Params

POLICIES = ("run", "untrained", "idm", "log", "constant")
"""Who can be evaluated: the run's policy, the same before training, and drivers that no learning made."""


TRAFFICS = (*config.TRAFFICS, "self")
"""Who the others are, where an evaluation says so: replayed by "log" and the like around the ego alone; with "self" the
policy drives all that can be driven."""


MOST = 64
"""Agents that a policy drives at most in one scenario with "self"."""


EVENTS = ("collision", "offroad", "red_light", "goal")


class Scores(NamedTuple):
    """An agent's episode a row, [E] each; `names` [E] says of which scenario ("" where there is none)."""

    metrics: dict[str, Measure]  # NumPy: value float64, valid bool
    names: list[str]
    scenario: np.ndarray | None = None  # int [E]: its number; None where every episode is by itself
    agent: np.ndarray | None = None  # int [E]: the agent, an index into the scenario's

    def groups(self) -> np.ndarray:
        """int [E]: equal for episodes of one scenario."""
        return np.arange(len(self.names)) if self.scenario is None else self.scenario

    def means(self) -> dict[str, Any]:
        """The means over the episodes that tell a metric (left out where none does), and how many `episodes` there
        were."""
        told = {name: float(np.mean(m.value[m.valid])) for name, m in self.metrics.items() if m.valid.any()}
        return told | {"episodes": len(self.names)}


def classic_player(run: Run, environment: Environment, episodes: int) -> Callable[..., Scores]:
    """(policy, seed) -> what it scores by its mode in `episodes` episodes, whose starts do not depend on training.

    The seed is by default the run's. Compiles once.
    """
    algorithm = registry.make(environment.spec, run.algorithm, Context(updates=1, mean=meshes.identity))
    limit = environment.spec.max_steps
    if limit is None:
        raise ValueError("episodes of this environment may never end; give it a time limit to evaluate in it")
    player = jax.jit(rollout.play(environment, algorithm.act, algorithm.memory, steps=limit), static_argnums=2)
    begin = jax.jit(rollout.starts, static_argnums=(0, 2))

    def play(policy: Params, seed: int = run.seed) -> Scores:
        begun = begin(environment, jax.random.key(seed + 10_000), episodes)
        played, _ = player(policy, begun, None, jax.random.key(seed + 20_000))
        return _scores(played, [""] * episodes)

    return play


def player(run: Run, environment: Environment, episodes: int) -> Callable[..., Scores]:
    """As `classic_player`, of environments on the host, too."""
    if not isinstance(environment, SpecStub):
        return classic_player(run, environment, episodes)
    algorithm = registry.make(environment.spec, run.algorithm, Context(updates=1, mean=meshes.identity))

    def play(policy: Params, seed: int = run.seed) -> Scores:
        return Scores(host_rollout.play(environment.name, algorithm, policy, episodes, seed + 10_000), [""] * episodes)

    return play


SAMPLES = 8
"""Completions of a problem in an evaluation: the k of pass@k and majority@k."""


SHOWN = 12
"""Chains that are told, of as many problems."""


def reasoner(run: Run, count: int) -> Callable[..., tuple[Scores, list[dict[str, Any]]]]:
    """(policy, seed) -> (how well it reasons about `count` problems held out, the same for all runs of a task; chains).

    A row a problem, over `SAMPLES` completions, at the run's temperature. Compiles once.
    """
    task, config = run.environment, run.algorithm
    assert isinstance(task, Reasoning) and isinstance(config, Reasoner)
    made, asked, words = (
        problem_sets.held_out_task(task),
        problem_sets.held_out(task, count),
        reasoning_setup.words(run),
    )
    bank = sampler.bank(made, asked, np.random.default_rng(problem_sets.HELD_OUT), run.num_steps, words)
    how = sampler.Sampling(run.num_steps, SAMPLES, config.temperature, task.wave)
    evaluate = quality.evaluate_reasoning(config.model, how) if task.exact else (
        host_verifier.evaluating(made, asked, config.model, how, words)
    )  # fmt: skip

    def score(policy: Params, seed: int = run.seed) -> tuple[Scores, list[dict[str, Any]]]:
        found, drawn = jax.device_get(evaluate(policy.params, bank, jax.random.key(seed + 10_000)))
        told = np.ones(count, bool)
        metrics = {name: Measure(np.asarray(value, np.float64), told) for name, value in found._asdict().items()}
        firsts = (words.decode(row) for row in drawn.token[: SHOWN * SAMPLES : SAMPLES])
        chains = [
            {"prompt": problem.prompt, "chain": text, "right": made.reward(problem, text) == 1.0}
            for problem, text in zip(asked, firsts, strict=False)
        ]
        return Scores(metrics, [problem.prompt for problem in asked]), chains

    return score


def play_classic(run: Run, environment: Environment, policy: Params, episodes: int) -> Scores:
    """One policy, as `player` has it."""
    return player(run, environment, episodes)(policy)


def _scores(episodes: rollout.Episodes, names: Sequence[str]) -> Scores:
    episodes = jax.device_get(episodes)
    valid = np.asarray(episodes.valid)
    metrics = {
        name: Measure(np.asarray(score.value, np.float64)[valid], np.asarray(score.valid)[valid])
        for name, score in episodes.scores.items()
    }
    scenario, slot = np.nonzero(valid)
    return Scores(metrics, [names[i] for i in scenario.tolist()], None, slot)
