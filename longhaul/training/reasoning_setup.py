"""A run on prompts: its vocabulary, the files of its model, its problems, and who checks what it writes."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms.config import GRPOConfig
from longhaul.config.run import Run
from longhaul.reasoning import huggingface, problem_sets, tokenizer
from longhaul.reasoning.config import QUESTIONS, ModelConfig, Reasoning
from longhaul.reasoning.host_verifier import Marking, marking
from longhaul.reasoning.problem_sets import World
from longhaul.reasoning.sampler import Bank
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.runtime.errors import RunError
from longhaul.types import Params, PyTree, Spec


def _parts(run: Run) -> tuple[Reasoning, GRPOConfig]:
    assert isinstance(run.environment, Reasoning) and isinstance(run.algorithm, GRPOConfig)
    return run.environment, run.algorithm


def _of_file(run: Run) -> bool:
    return isinstance(run.environment, Reasoning) and run.environment.task == QUESTIONS


def fitted(run: Run) -> Run:
    """`run` with the paths of its questions and its model made absolute, and with the model that its files tell of.

    Raises RunError, one line, where they can't be read or don't fit each other. Of a run that was fitted before no file
    is read again.
    """
    if not isinstance(run.environment, Reasoning) or not isinstance(run.algorithm, GRPOConfig):
        return run
    task, config = run.environment, run.algorithm
    if not _of_file(run):
        if config.model_folder:
            raise RunError(
                f"--model-folder is {config.model_folder}, and problems of --task {task.task} are written in "
                f"{len(tokenizer.CHARACTERS)} characters of their own; choose --task {QUESTIONS}, "
                "or leave it out"
            )
        return run
    paths: dict[str, Any] = {name: _absolute(getattr(task, name)) for name in ("questions", "held_out_questions")}
    if config.model.pad != tokenizer.NONE:
        config = dataclasses.replace(config, model_folder=_absolute(config.model_folder))
        words = _tokeniser(config.model_folder)
        known = _told(config, words) if config.model_folder else config.model
        size = known.vocabulary if config.model_folder else words.size
        config = dataclasses.replace(config, model=dataclasses.replace(known, vocabulary=size, pad=tokenizer.NONE))
    return dataclasses.replace(run, environment=dataclasses.replace(task, **paths), algorithm=config)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def _tokeniser(folder: str) -> Tokeniser:
    """Of a model's folder; without one, bytes."""
    try:
        return huggingface.tokeniser(folder) if folder else tokenizer.BYTES
    except ImportError as error:
        raise RunError(f"--model-folder {folder} needs {error.name}; pip install 'longhaul[llm]'") from error
    except huggingface.HubError as error:
        raise RunError(f"--model-folder: {error}") from error


def _told(config: GRPOConfig, words: Tokeniser) -> ModelConfig:
    """The model of a folder, which computes as `config` says."""
    try:
        told = huggingface.config(config.model_folder)
    except huggingface.HubError as error:
        raise RunError(f"--model-folder: {error}") from error
    if words.size > told.vocabulary:
        raise RunError(f"--model-folder {config.model_folder} has a tokeniser of {words.size} words and a model of "
                       f"{told.vocabulary}; they must be of one model")  # fmt: skip
    if not words.ends:
        raise RunError(f"--model-folder {config.model_folder} says nowhere what ends a text; put eos_token_id into its "
                       "generation_config.json")  # fmt: skip
    return dataclasses.replace(told, precision=config.model.precision, remat=config.model.remat)


def words(run: Run) -> Tokeniser:
    """The vocabulary of a resolved run."""
    _, config = _parts(run)
    return _tokeniser(config.model_folder) if _of_file(run) else tokenizer.TOKENISER


def loaded(run: Run, state: PyTree) -> PyTree:
    """An algorithm's state that begins with the weights of the run's model's files, where there are any; laid out as it
    was."""
    if not isinstance(run.algorithm, GRPOConfig) or not run.algorithm.model_folder:
        return state
    try:
        _, found = huggingface.load(run.algorithm.model_folder)
    except huggingface.HubError as error:
        raise RunError(f"--model-folder: {error}") from error

    def like(old: Params) -> Params:  # each its own copy: an update takes back what it was given
        return jax.tree.map(lambda new, was: jax.device_put(jnp.array(new, was.dtype), was.sharding), found, old)

    return state._replace(params=like(state.params), reference=like(state.reference) if state.reference else ())


def bank(run: Run) -> Bank:
    """The problems of a resolved run, as the device has them. Raises RunError where there are not enough."""
    task, _ = _parts(run)
    assert run.evaluation_episodes is not None
    try:
        return problem_sets.training(
            task, seed=run.seed, without=run.evaluation_episodes, length=run.num_steps, words=words(run)
        )
    except ValueError as error:
        raise RunError(f"--task {task.task}: {error}") from error


def spec(run: Run) -> Spec:
    """What takes the place of an environment's."""
    _, config = _parts(run)
    return problem_sets.spec(run.num_steps, config.model.vocabulary)


def world(run: Run, made: Bank) -> World:
    """What of an environment a run on prompts has."""
    return World(spec(run), made)


def checker(run: Run) -> Marking | None:
    """Who checks the completions of a resolved run on the host; None where the device does."""
    if not isinstance(run.environment, Reasoning) or run.environment.exact:
        return None
    task, config = _parts(run)
    assert run.evaluation_episodes is not None
    asked = problem_sets.asked(task, np.random.default_rng(run.seed), run.evaluation_episodes)
    return marking(problem_sets.task(task), asked, words(run), config.group)
