"""Setup of a run on prompts: vocabulary, model files, problems and verifier."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms.config import GRPOConfig
from longhaul.config.resolve import both, tokeniser
from longhaul.config.run import Run
from longhaul.reasoning import huggingface, problem_sets, tokenizer, transformer, turns
from longhaul.reasoning.config import Reasoning
from longhaul.reasoning.problem_sets import World
from longhaul.reasoning.sampler import OWN, SAMPLED, Bank, Completions, Drawn, Speaker, marking
from longhaul.reasoning.tokenizer import Budget, Tokeniser
from longhaul.runtime.errors import RunError
from longhaul.topologies.actor_learner.learner import Finish
from longhaul.types import Key, Metrics, Params, PyTree, Spec


def words(run: Run, budget: Budget | None = None) -> Tokeniser:
    task, config = both(run)
    return tokeniser(config.model_folder, task, budget) if task.in_words else tokenizer.TOKENISER


def loaded(run: Run, state: PyTree) -> PyTree:
    """Algorithm state with the weights of the run's model files, if any, in the same layout."""
    if not isinstance(run.algorithm, GRPOConfig) or not run.algorithm.model_folder:
        return state
    try:
        _, found = huggingface.load(run.algorithm.model_folder)
    except huggingface.HubError as error:
        raise RunError(f"--model-folder: {error}") from error

    model = run.algorithm.model

    def like(old: Params) -> Params:  # copied: an update donates its arguments
        adapters, kernels = transformer.split(model, old) if model.lora else ({}, old)
        new = jax.tree.map(lambda new, was: jax.device_put(jnp.array(new, was.dtype), was.sharding), found, kernels)
        return transformer.joined(adapters, new) if model.lora else new

    return state._replace(params=like(state.params), reference=like(state.reference) if state.reference else ())


def bank(run: Run) -> Bank:
    """Problems of a resolved run in the device's format. Raises RunError if there are too few."""
    task, _ = both(run)
    assert run.evaluation_episodes is not None
    try:
        return problem_sets.training(
            task, seed=run.seed, without=run.evaluation_episodes, length=run.num_steps, words=words(run)
        )
    except ValueError as error:
        raise RunError(f"--task {task.task}: {error}") from error


def spec(run: Run) -> Spec:
    """Spec in place of an environment's."""
    _, config = both(run)
    return problem_sets.spec(run.num_steps, config.model.vocabulary)


def world(run: Run, made: Bank) -> World:
    """World of a run on prompts, in place of an environment."""
    return World(spec(run), made)


def finisher(run: Run) -> Finish | None:
    """Host's part of collecting for a resolved run: later turns of its completions, and their verifier; None if the
    device verifies."""
    if not isinstance(run.environment, Reasoning) or run.environment.exact:
        return None
    task, config = both(run)
    assert run.evaluation_episodes is not None
    asked, known = problem_sets.asked(task, np.random.default_rng(run.seed), run.evaluation_episodes), words(run)
    mark = marking(problem_sets.task(task), asked, known, config.group)
    on = turns.continuing(config.model, run.num_steps, config.temperature, task.wave, known)

    def finish(speaker: Speaker, key: Key, data: Completions, sums: Metrics) -> tuple[Completions, Metrics]:
        if speaker.lesson in (SAMPLED, OWN):
            drawn = Drawn(data.token, data.written, data.taken, data.log_prob)
            data = data._replace(**on(speaker.params, data.prompt, drawn, key)._asdict())
        return mark(data, sums)

    return finish
