"""Weights of a server that follow a run: its published versions, or its checkpoints."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longhaul.reasoning import huggingface, transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.runtime.errors import RunError
from longhaul.training.checkpoint.weight_source import CheckpointSource
from longhaul.training.publish import FOLDER
from longhaul.types import Params, PyTree
from longhaul.weight_sync import consumers, transports
from longhaul.weight_sync.receiver import Receiver

RUN = "run"
"""Address of the served run itself: the folder that it publishes to, or else its checkpoints."""

PARAMS = "params."
"""Beginning of the names of a language model's parameters among those of its run's policy."""

Take = Callable[[str, PyTree], None]
"""(version, parameters): takes newer weights."""


def address(word: str, folder: Path) -> str:
    """Address of a transport, or the path of a run with checkpoints. Raises RunError for anything else."""
    if word == RUN:
        return f"folder:{folder / FOLDER}" if (folder / FOLDER).is_dir() else str(folder)
    if word.partition(":")[0] not in transports.KINDS:
        path = Path(word)
        if (path / FOLDER).is_dir() and (path / "run.json").is_file():
            return f"folder:{path / FOLDER}"
        if (path / "run.json").is_file():
            return word
        if path.is_dir():
            return f"folder:{word}"
        raise RunError(f"--follow {word}: neither a run, a folder nor an address; write run, or tcp:HOST:PORT")
    try:
        transports.split(word)
    except ValueError as error:
        raise RunError(f"--follow {word}: {error}") from error
    return word


def follow(
    where: str, token: str | None, convert: Callable[[Mapping[str, np.ndarray]], Params], take: Take,
    note: Callable[[str], None],
) -> Receiver:  # fmt: skip
    """Receiver that gives each version to `take`. A version that does not fit is noted, and the old one serves on."""

    def connect() -> Any:
        return transports.connect(where, token, "serve") if ":" in where else CheckpointSource(where)

    connected = threading.Event()

    def committed(version: int) -> None:
        connected.wait()
        number, tensors = receiver.latest()
        try:
            take(str(number), convert(tensors))
        except ValueError as error:
            note(f"version {number} is not served: {error}")

    receiver = Receiver(connect, on_commit=committed)
    connected.set()
    return receiver


def like(params: PyTree) -> Callable[[Mapping[str, np.ndarray]], PyTree]:
    """Conversion to a policy of the form of `params`; ValueError for tensors of another form."""

    def convert(tensors: Mapping[str, np.ndarray]) -> PyTree:
        return jax.tree.map(np.array, consumers.to_jax(tensors, params))  # copied: the receiver's memory is used again

    return convert


def language_model(config: ModelConfig, params: Params) -> Callable[[Mapping[str, np.ndarray]], Params]:
    """Conversion to a language model's parameters, from Hugging Face's names or those of a run's policy; LoRA merged.

    `params` are those of a run's checkpoint, of the form of `config`.
    """
    plain = dataclasses.replace(config, lora=0)

    def convert(tensors: Mapping[str, np.ndarray]) -> Params:
        if huggingface.WHOLE["embedding"] in tensors:
            return huggingface.imported(plain, tensors.items(), "the version")
        inner = {name.removeprefix(PARAMS): x for name, x in tensors.items() if name.startswith(PARAMS)}
        return merged(config, consumers.to_jax(inner, params))

    return convert


def merged(config: ModelConfig, params: Params) -> Params:
    """Parameters without LoRA's factors, which are added to their kernels; copies."""
    whole = {**params, "layers": transformer.merged(config, params["layers"])}
    return jax.tree.map(np.array, whole)


def check_reachable(where: str, token: str | None) -> None:
    """Raises RunError where nobody answers at an address."""
    if ":" not in where or where.startswith("folder:"):
        return
    try:
        with closing(transports.connect(where, token, "status")) as source:
            source.status()
    except OSError as error:
        raise RunError(f"--follow {where}: nobody answers ({error.strerror or error}); is it served there?") from error
