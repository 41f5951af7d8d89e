"""Evaluation of a policy on whole episodes against baseline policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image

from longhaul import rollout
from longhaul.algorithms import registry
from longhaul.algorithms.config import Reasoner
from longhaul.algorithms.run_context import RunContext
from longhaul.config.resolve import named
from longhaul.config.run import Named, Run
from longhaul.driving.sim import config
from longhaul.envs import pictures
from longhaul.envs.callback import Called
from longhaul.envs.registry import SpecStub
from longhaul.reasoning import evaluate as quality
from longhaul.reasoning import problem_sets, sampler
from longhaul.reasoning.config import Reasoning
from longhaul.runtime import mesh as meshes
from longhaul.spaces import Measure
from longhaul.telemetry import films, screen
from longhaul.telemetry.films import Film
from longhaul.topologies.actor_learner import host_rollout
from longhaul.training import reasoning_setup
from longhaul.types import Environment, Params

POLICIES = ("run", "untrained", "idm", "log", "constant")
"""Policies that can be evaluated: the run's, the same before training, and rule-based drivers."""

TRAFFICS = (*config.TRAFFICS, "self")
"""Traffic in an evaluation: the simulator's kinds around the ego alone, or "self", where the policy drives all agents.
"""

MOST = 64
"""Largest number of agents that the policy drives in one scenario with "self"."""

EVENTS = ("collision", "offroad", "red_light", "goal")

FRAMES = 500
"""Largest number of pictures of an episode."""

SAMPLES = 8
"""Completions of a problem in an evaluation: the k of pass@k and majority@k."""

SHOWN = 12
"""Chains shown in a report, each of another problem."""


class Waits(NamedTuple):
    """Tracks that begin in the middle of an episode and waited for room (`driving.sim.insertion`)."""

    tracks: int
    seconds: float  # of all of them


class Scores(NamedTuple):
    """Metrics of E agent episodes, a row each; `names` [E] are the scenarios' ("" if there is none)."""

    metrics: dict[str, Measure]  # NumPy: value float64, valid bool
    names: list[str]
    scenario: np.ndarray | None = None  # number of the scenario; None if all episodes are independent
    agent: np.ndarray | None = None  # index of the agent in its scenario
    kind: np.ndarray | None = None  # kind of it, as `datasets.log` numbers them
    waits: Waits | None = None  # None where no track waits by rule

    def groups(self) -> np.ndarray:
        """Group of each episode, int [E]: equal for episodes of one scenario."""
        return np.arange(len(self.names)) if self.scenario is None else self.scenario

    def means(self) -> dict[str, Any]:
        """Means over the episodes that report it (left out if none does), and the number of `episodes`."""
        means = {name: float(np.mean(m.value[m.valid])) for name, m in self.metrics.items() if m.valid.any()}
        return means | {"episodes": len(self.names)}


def player(run: Run, environment: Environment, episodes: int) -> Callable[..., Scores]:
    """(policy, seed) -> scores of the policy's mode in `episodes` episodes, whose starts do not depend on training.

    The seed is the run's by default. Compiles once. The environment may be one on the host. Raises ValueError where its
    episodes may never end.
    """
    algorithm = registry.make(environment.spec, run.algorithm, RunContext(updates=1, mean=meshes.identity))
    if isinstance(environment, SpecStub | Called):
        name = environment.name if isinstance(environment, SpecStub) else f"single/{environment.name}"

        def play_on_host(policy: Params, seed: int = run.seed) -> Scores:
            with screen.stage(f"{episodes} episodes played on the host"):
                return Scores(host_rollout.play(name, algorithm, policy, episodes, seed + 10_000), [""] * episodes)

        return play_on_host
    limit = environment.spec.max_steps
    if limit is None:
        raise ValueError("episodes of this environment may never end; give it a time limit to evaluate in it")
    through = jax.jit(rollout.play(environment, algorithm.act, algorithm.memory, steps=limit), static_argnums=2)
    begin = jax.jit(rollout.starts, static_argnums=(0, 2))

    def play(policy: Params, seed: int = run.seed) -> Scores:
        with screen.stage(f"{episodes} episodes played"):
            starts = begin(environment, jax.random.key(seed + 10_000), episodes)
            played, _ = through(policy, starts, None, jax.random.key(seed + 20_000))
            return _scores(played, [""] * episodes)

    return play


def filmer(run: Run, name: str, environment: Environment, shown: int | None = None) -> Callable[[Params], Film]:
    """policy -> film of one episode of its mode, of at most `FRAMES` steps, with at most `shown` pictures.

    Raises ValueError where there are none.
    """
    algorithm = registry.make(environment.spec, run.algorithm, RunContext(updates=1, mean=meshes.identity))
    if isinstance(environment, SpecStub | Called):
        return lambda policy: _film(*host_rollout.film(name, algorithm, policy, FRAMES, run.seed))
    if environment.spec.agents is not None:
        raise ValueError(f"{name} has no picture: it has several agents")
    draw = pictures.painter(name, environment)

    @jax.jit
    def step(policy: Params, state: Any, seen: Any, memory: Any, key: Any) -> Any:
        action, memory, _ = algorithm.act(policy, memory, jax.tree.map(lambda leaf: leaf[None], seen), None)
        after, led_to = environment.step(key, state, action[0])
        return after, led_to.successor, memory, led_to.reward, led_to.terminated | led_to.truncated

    def play(policy: Params) -> Film:
        remembered, total = algorithm.memory(1), 0.0
        state, seen = jax.jit(environment.reset)(jax.random.key(run.seed))
        moments = [jax.device_get((state, seen))]
        for t in range(FRAMES - 1):
            key = jax.random.fold_in(jax.random.key(run.seed + 1), t)
            state, seen, remembered, reward, over = step(policy, state, seen, remembered, key)
            moments.append(jax.device_get((state, seen)))
            total += float(reward)
            if over:
                break
        chosen = [moments[i] for i in films.even(len(moments), shown or FRAMES)]
        return _film(draw(*zip(*chosen, strict=True)), len(moments) - 1, total)

    return play


def _film(images: Sequence[Image.Image], steps: int, total: float) -> Film:
    return Film("", f"{steps:,} steps, return {total:,.4g}", images)


def filmed(run: Run, *policies: tuple[str, Params]) -> list[Film]:
    """Film of an episode of each policy, for a page; without pictures where the environment has none."""
    task = run.environment
    if not isinstance(task, Named):
        return []
    try:
        play = filmer(run, task.env, named(task), films.PICTURES)
        with screen.stage("drawing an episode"):
            return [play(policy)._replace(label=label) for label, policy in policies]
    except Exception as error:  # an environment of the user's own may raise anything, and a page needs no picture
        return [Film("", str(error) or type(error).__name__)]


def reasoner(run: Run, count: int) -> Callable[..., tuple[Scores, list[dict[str, Any]]]]:
    """(policy, seed) -> (scores on `count` held-out problems, the same for all runs of a task; example chains).

    Each row is a problem, over `SAMPLES` completions at the run's temperature. Compiles once.
    """
    task, config = run.environment, run.algorithm
    assert isinstance(task, Reasoning) and isinstance(config, Reasoner)
    held_out, problems, tokeniser = (
        problem_sets.held_out_task(task),
        problem_sets.held_out_problems(task, count),
        reasoning_setup.tokeniser(run),
    )
    bank = sampler.bank(held_out, problems, np.random.default_rng(problem_sets.HELD_OUT), run.num_steps, tokeniser)
    sampling = reasoning_setup.sampling(run, SAMPLES)
    evaluate = quality.evaluate_reasoning(config.model, sampling) if task.exact else (
        quality.evaluate_on_host(held_out, problems, config.model, sampling, tokeniser)
    )  # fmt: skip

    def score(policy: Params, seed: int = run.seed) -> tuple[Scores, list[dict[str, Any]]]:
        with screen.stage(f"{count} problems answered"):
            scores, drawn = jax.device_get(evaluate(policy.params, bank, jax.random.key(seed + 10_000)))
        valid = np.ones(count, bool)
        metrics = {name: Measure(np.asarray(value, np.float64), valid) for name, value in scores._asdict().items()}
        firsts = (tokeniser.decode(row) for row in drawn.token[: SHOWN * SAMPLES : SAMPLES])
        chains = [
            {"prompt": problem.prompt, "chain": text, "right": held_out.reward(problem, text) == 1.0}
            for problem, text in zip(problems, firsts, strict=False)
        ]
        return Scores(metrics, [problem.prompt for problem in problems]), chains

    return score


def conversations(chains: Mapping[str, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Chains of the policies "trained" and "untrained" about the same problems, in one row each: the latter's are
    `before` and `before_right`."""
    pairs = zip(chains.get("trained", ()), chains.get("untrained", ()), strict=True)
    return [after | {"before": old["chain"], "before_right": old["right"]} for after, old in pairs]


def scorer(run: Run, count: int) -> Callable[..., tuple[Scores, list[dict[str, Any]]]]:
    """(policy, seed) -> (scores, example chains of a language model) in any environment but driving."""
    if isinstance(run.environment, Reasoning):
        return reasoner(run, count)
    assert isinstance(run.environment, Named)
    play = player(run, named(run.environment), count)
    return lambda policy, seed=run.seed: (play(policy, seed), [])


def _scores(episodes: rollout.Episodes, names: Sequence[str]) -> Scores:
    episodes = jax.device_get(episodes)
    valid = np.asarray(episodes.valid)
    metrics = {
        name: Measure(np.asarray(score.value, np.float64)[valid], np.asarray(score.valid)[valid])
        for name, score in episodes.scores.measures().items()
    }
    scenario, slot = np.nonzero(valid)
    return Scores(metrics, [names[i] for i in scenario.tolist()], None, slot)
