"""Reasoning runs: paths made absolute, the model and the tokeniser read from their files."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from longhaul.algorithms.config import GRPOConfig
from longhaul.config.run import Run
from longhaul.reasoning import huggingface, tokenizer
from longhaul.reasoning.config import QUESTIONS, ModelConfig, Reasoning
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.runtime.errors import RunError


def both(run: Run) -> tuple[Reasoning, GRPOConfig]:
    assert isinstance(run.environment, Reasoning) and isinstance(run.algorithm, GRPOConfig)
    return run.environment, run.algorithm


def reads_file(run: Run) -> bool:
    return isinstance(run.environment, Reasoning) and run.environment.task == QUESTIONS


def fitted(run: Run) -> Run:
    """`run` with the paths of its questions and its model made absolute, and with the model that its files tell of.

    Raises RunError, one line, where they can't be read or don't fit each other. Of a run that was fitted before no file
    is read again.
    """
    if not isinstance(run.environment, Reasoning) or not isinstance(run.algorithm, GRPOConfig):
        return run
    task, config = run.environment, run.algorithm
    if not reads_file(run):
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
        words = tokeniser(config.model_folder)
        known = _model_of(config, words) if config.model_folder else config.model
        size = known.vocabulary if config.model_folder else words.size
        config = dataclasses.replace(config, model=dataclasses.replace(known, vocabulary=size, pad=tokenizer.NONE))
    return dataclasses.replace(run, environment=dataclasses.replace(task, **paths), algorithm=config)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def tokeniser(folder: str) -> Tokeniser:
    """Tokeniser of a model's folder; bytes where there is no folder."""
    try:
        return huggingface.tokeniser(folder) if folder else tokenizer.BYTES
    except ImportError as error:
        raise RunError(f"--model-folder {folder} needs {error.name}; pip install 'longhaul-rl[llm]'") from error
    except huggingface.HubError as error:
        raise RunError(f"--model-folder: {error}") from error


def _model_of(config: GRPOConfig, words: Tokeniser) -> ModelConfig:
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
