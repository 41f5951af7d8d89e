"""Setup of a run on prompts: vocabulary, model files, problems and verifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms.config import GRPOConfig
from longhaul.config import resolve
from longhaul.config.resolve import both
from longhaul.config.run import Run
from longhaul.reasoning import huggingface, problem_sets, tokenizer, tools, transformer, turns
from longhaul.reasoning.config import Reasoning
from longhaul.reasoning.problem_sets import World
from longhaul.reasoning.sampler import OWN, SAMPLED, Bank, Completions, Drawn, Marking, Sampling, Speaker, marking
from longhaul.reasoning.tokenizer import Budget, Tokeniser
from longhaul.runtime.errors import RunError
from longhaul.topologies.actor_learner.actor import Collect, Leaves
from longhaul.topologies.actor_learner.learner import Finish
from longhaul.topologies.staleness import Ticket
from longhaul.types import Key, Metrics, Params, Progress, PyTree, Spec


def tokeniser(run: Run, budget: Budget | None = None) -> Tokeniser:
    task, config = both(run)
    return resolve.tokeniser(config.model_folder, task, budget) if task.in_words else tokenizer.TOKENISER


def loaded(run: Run, state: PyTree) -> PyTree:
    """Algorithm state with the weights of the run's model files, if any, in the same layout. RunError if they can't be
    read."""
    if not isinstance(run.algorithm, GRPOConfig) or not run.algorithm.model_folder:
        return state
    model = run.algorithm.model
    adapters, kernels = transformer.split(model, state.params) if model.lora else ({}, state.params)
    places = jax.tree.map(lambda was: (was.dtype, was.sharding), kernels)
    for was in jax.tree.leaves((kernels, state.reference)):
        was.delete()  # there is room for one model
    try:
        _, stored = huggingface.load(run.algorithm.model_folder)
    except huggingface.HubError as error:
        raise RunError(f"--model-folder: {error}") from error

    def placed(part: dict[str, Any], where: dict[str, Any]) -> Params:  # copied: an update donates its arguments
        arrays: dict[str, Any] = {}
        for name in list(part):
            array = part.pop(name)
            arrays[name] = (
                placed(array, where[name])
                if isinstance(array, dict)
                else jax.device_put(jnp.array(array, where[name][0]), where[name][1])
            )
            del array
        return arrays

    params = transformer.joined(adapters, placed(stored, places)) if model.lora else placed(stored, places)
    return state._replace(params=params, reference=jax.tree.map(jnp.copy, params) if state.reference else ())


def adapts(run: Run) -> bool:
    """True where a run learns LoRA's factors alone, beside arrays of its model's files."""
    config = run.algorithm
    return (
        isinstance(config, GRPOConfig)
        and bool(config.model_folder and config.model.lora)
        and not run.many
        and run.init_from is None
    )


def adapters(run: Run, progress: Progress) -> Progress:
    """Progress of a run that `adapts`, without the arrays of its model's files."""
    assert isinstance(run.algorithm, GRPOConfig)
    learnt, _ = transformer.split(run.algorithm.model, progress.state.params)
    return progress._replace(state=progress.state._replace(params=learnt))


def whole(run: Run, progress: Progress, begun: Progress) -> Progress:
    """Inverse of `adapters`, with the arrays of `begun`."""
    assert isinstance(run.algorithm, GRPOConfig)
    _, rest = transformer.split(run.algorithm.model, begun.state.params)
    params = transformer.joined(progress.state.params, rest)
    return progress._replace(state=progress.state._replace(params=params))


def sampling(run: Run, group: int | None = None) -> Sampling:
    """Settings of a resolved run's sampling, for groups of another size if given.

    No more completions are written at a time than an update has: an evaluation takes no more memory than is announced.
    """
    task, config = both(run)
    wave = min(task.wave, run.num_envs * config.group)
    return Sampling(
        run.num_steps, config.group if group is None else group, config.temperature, wave, config.top_k,
        config.top_p, config.min_p,
    )  # fmt: skip


def check_task(run: Run) -> None:
    """Check of a resolved run's task before its folder is there. Raises RunError for an unreadable file, or a task or
    verifier that there is not."""
    task, _ = both(run)
    try:
        problem_sets.task(task)
        if task.held_out_questions:
            problem_sets.held_out_task(task)
    except ValueError as error:
        raise RunError(f"--task {task.task}: {error}") from error


def bank(run: Run) -> Bank:
    """Problems of a resolved run in the device's format. Raises RunError if there are too few."""
    task, _ = both(run)
    assert run.evaluation_episodes is not None
    problem_sets.report_again()
    try:
        return problem_sets.training(
            task, seed=run.seed, without=run.evaluation_episodes, length=run.num_steps, tokeniser=tokeniser(run)
        )
    except ValueError as error:
        raise RunError(f"--task {task.task}: {error}") from error


def spec(run: Run) -> Spec:
    """Spec in place of an environment's."""
    _, config = both(run)
    return problem_sets.spec(run.num_steps, config.model.vocabulary)


def world(run: Run, bank: Bank) -> World:
    """World of a run on prompts, in place of an environment."""
    return World(spec(run), bank)


def marker(run: Run) -> Marking:
    """Verifier of a resolved run's completions, on the host."""
    task, config = both(run)
    assert run.evaluation_episodes is not None
    problems = problem_sets.training_problems(task, np.random.default_rng(run.seed), run.evaluation_episodes)
    return marking(problem_sets.task(task), problems, tokeniser(run), config.group)


class Finisher(NamedTuple):
    """Host's part of collecting: later turns of completions, and their verifier."""

    finish: Finish
    ahead: Callable[[PyTree, PyTree], jax.stages.Compiled | None]
    """(shapes of the policy, of the data) -> program of later turns, if any; their tools are started. So both are there
    when the run is weighed."""


def finisher(run: Run) -> Finisher | None:
    """Host's part of collecting for a resolved run; None if the device verifies."""
    if not isinstance(run.environment, Reasoning) or run.environment.exact:
        return None
    _, config = both(run)
    called, mark, known = run.environment.tools, marker(run), tokeniser(run)
    later = turns.continuing(config.model, sampling(run), known)

    def finish(speaker: Speaker, key: Key, data: Completions, sums: Metrics) -> tuple[Completions, Metrics]:
        if speaker.lesson in (SAMPLED, OWN):
            drawn = Drawn(*(getattr(data, name) for name in Drawn._fields))
            keys = jax.random.split(key, len(data.token))
            data = data._replace(**later.go_on(speaker.params, data.prompt, drawn, keys)._asdict())
        return mark(data, sums)

    def ahead(policy: PyTree, data: PyTree) -> jax.stages.Compiled | None:
        if called:
            tools.start(called)
        return later.program(policy.params, data.prompt.shape)

    return Finisher(finish, ahead)


RESAMPLED = 3
"""Number folded into the run's key for `resampling`, beside those of the topology."""


def resampling(collect: Collect, like: PyTree, group: int, times: int) -> Collect:
    """Rollout function that replaces groups with equal rewards, at most `times` times, by groups of further rollouts
    whose rewards differ: DAPO's dynamic sampling, bounded. `like` has the structure of the completions.

    Its scores stay those of the first rollout: of problems as they are drawn, not of those that teach.
    """

    def dull(data: Completions) -> np.ndarray:
        """Flag of each group: rewarded completions, all of them alike."""
        reward, lesson = (np.asarray(x).reshape(-1, group) for x in (data.reward, data.lesson))
        return np.asarray((reward == reward[:, :1]).all(axis=1) & (lesson == SAMPLED).all(axis=1))

    def collect_again(
        weights: list[np.ndarray], state: Leaves, key: np.ndarray, ticket: Ticket, version: int
    ) -> tuple[Leaves, Leaves, Leaves]:
        after, leaves, scores = collect(weights, state, key, ticket, version)
        key_size = jax.random.key_data(jax.random.key(0)).size
        own = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key[:key_size])), RESAMPLED)
        for turn in range(times):
            data: Completions = jax.tree.unflatten(jax.tree.structure(like), leaves)
            wanting = np.flatnonzero(dull(data))
            if not len(wanting):
                break
            other = np.asarray(jax.random.key_data(jax.random.fold_in(own, turn)))
            after, fresh, _ = collect(weights, after, other, ticket, version)
            useful = np.flatnonzero(~dull(jax.tree.unflatten(jax.tree.structure(like), fresh)))[: len(wanting)]
            to, of = (
                (groups[: len(useful), None] * group + np.arange(group)[None]).ravel() for groups in (wanting, useful)
            )
            leaves = [_placed(np.array(old), to, np.asarray(new)[of]) for old, new in zip(leaves, fresh, strict=True)]
        return after, leaves, scores

    return collect_again


def _placed(array: np.ndarray, rows: np.ndarray, new: np.ndarray) -> np.ndarray:
    array[rows] = new
    return array
