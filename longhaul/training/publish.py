"""Publication of a run's policy while it trains, as versions of `longhaul.weight_sync`.

A version's number is that of the update after which it was taken. Its tensors are `policy(state)`, parameters and
normalisers, under their paths. A language model's are its parameters as transformers, vLLM and SGLang name them, and
these load a version's folder as it is. Training waits for one copy on the device; transfer to the host, digests, files
and network run beside it. Each start of a trainer is a new epoch, so that a resumed or rolled-back run is never taken
for stale. Versions with non-finite numbers are not published.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from longhaul.algorithms.config import GRPOConfig
from longhaul.config.run import Run
from longhaul.reasoning import huggingface, transformer
from longhaul.runtime import bounded_json, credentials, files, process_group
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError
from longhaul.types import Params, PyTree
from longhaul.weight_sync import transports
from longhaul.weight_sync.producer import Producer, named
from longhaul.weight_sync.protocol import Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.transports.base import Transport
from longhaul.weight_sync.transports.folder import FolderTransport

FILE = "publish.json"
"""File of a run's folder with its `Publishing`."""

EPOCH = "publish_epoch"
"""File of a run's folder with the epoch of the newest trainer that published it."""

FOLDER = "weights"
"""Folder of a run's versions, where it publishes to `run`."""

FLAGS = ("publish", "publish-every", "publish-precision", "publish-token-file", "publish-anchor")
"""Flags of `longhaul train`, in the order of `Publishing`'s fields."""

SETTINGS = Settings(quorum=0, lease=30.0)
"""Settings of the publisher: it waits for no receiver; each takes the newest version when it can."""

PATIENCE, HASTE = 60.0, 5.0
"""Seconds for which a run that is done, or that a signal stops, waits at its end for its receivers."""

Tell = Callable[[int, int, PyTree], None]
"""(updates done, updates of this call, the algorithm's state): publishes a version where one is due."""


class Publishing(NamedTuple):
    """Publication of a run, as its folder keeps it."""

    to: tuple[str, ...]  # addresses of transports; "run" is the run's own folder
    every: int = 1  # updates
    precision: str = "as-is"
    token_file: str | None = None
    anchor: int = 1  # every `anchor`-th version in a folder is whole, the others are changes


def chosen(values: Mapping[str, Any], given: frozenset[str], before: Publishing | None = None) -> Publishing | None:
    """Publication that the flags ask for, after `before`; None for none. Raises RunError, one line."""
    known = before or Publishing(())
    changes = {field: values[flag] for field, flag in zip(Publishing._fields, FLAGS, strict=True) if flag in given}
    settings = known._replace(**changes)
    to = tuple(address(word) for word in settings.to if word != "none")
    if not to:
        if set(changes) - {"to"}:
            raise RunError(f"{', '.join(f'--{flag}' for flag in FLAGS[1:])} need --publish ADDRESS")
        return None
    if settings.every < 1:
        raise RunError(f"--publish-every is {settings.every}; it must be at least 1 update")
    if settings.anchor < 1:
        raise RunError(f"--publish-anchor is {settings.anchor}; it must be at least 1 version")
    flags = {"xxhash": "--publish"}
    if settings.anchor > 1:
        flags |= dict.fromkeys(("zstandard", "numba"), f"--publish-anchor {settings.anchor}")
    for library, flag in flags.items():
        if importlib.util.find_spec(library) is None:
            raise RunError(f"{flag} needs {library}: pip install 'longhaul-rl[sync]'")
    return settings._replace(to=to)


def address(word: str) -> str:
    """Destination of a word: `run`, the address of a transport, or a folder. RunError for a wrong address."""
    if word.startswith(("http://", "https://")):
        raise RunError(
            f"--publish is {word}; servers that sample for a run take its weights with --rollout-servers {word}, and "
            "others follow shm:NAME, tcp:HOST:PORT or a folder"
        )
    plain = ":" not in word or "/" in word or Path(word).is_dir()
    if word == "run" or (word.partition(":")[0] not in transports.KINDS and plain):
        return word if word == "run" else f"folder:{Path(word).expanduser().absolute()}"
    try:
        transports.split(word)
    except ValueError as error:
        raise RunError(f"--publish {word}: {error}") from error
    return word


def load(folder: Path) -> Publishing | None:
    """Publication of the run in `folder`; None for none. Raises RunError where its file is damaged."""
    try:
        settings = bounded_json.read(folder / FILE)
        return Publishing(tuple(settings.pop("to")), **settings)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{folder / FILE} can't be read ({error}); remove it, and give --publish again") from error


def save(folder: Path, publishing: Publishing | None) -> None:
    """Record of the publication of the run in `folder`."""
    if publishing is not None:
        files.write(folder / FILE, json.dumps(publishing._asdict(), indent=2) + "\n")
    else:
        (folder / FILE).unlink(missing_ok=True)


def next_epoch(folder: Path) -> int:
    """Epoch of a trainer that starts now: the time in nanoseconds, but above the last one if the clock went back."""
    try:
        before = int((folder / EPOCH).read_bytes()[:32])
    except (OSError, ValueError):
        before = -1
    epoch = max(time.time_ns(), before + 1)
    files.write(folder / EPOCH, f"{epoch}\n")
    return epoch


class Form(NamedTuple):
    """Form in which a policy is published."""

    policy: Callable[[PyTree], Params]  # of the algorithm's state
    tensors: Callable[[Params], Mapping[str, Any]] = named
    beside: Mapping[str, bytes] = {}  # files of each version's folder


def form_of(run: Run, policy: Callable[[PyTree], Params], precision: str) -> Form:
    """Form of a run's versions: Hugging Face's for a language model, with LoRA merged, else the `policy` by paths."""
    if not isinstance(run.algorithm, GRPOConfig):
        return Form(policy)
    model = run.algorithm.model
    plain, dtype = dataclasses.replace(model, lora=0), "bfloat16" if precision == "bf16" else "float32"
    files = huggingface.beside(plain, run.algorithm.model_folder or None, dtype)

    def whole(state: PyTree) -> Params:
        return {**state.params, "layers": transformer.merged(model, state.params["layers"])}

    return Form(whole, functools.partial(huggingface.exported, plain), files)


@contextmanager
def publishing(
    folder: Path,
    run: Run,
    policy: Callable[[PyTree], Params],
    mesh: Mesh,
    note: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Tell]:
    """Context in which the run in `folder` is published as it asks for.

    The yielded function is called after each call of the topology, before the state is donated, in all processes alike.
    At the end the last version is delivered to the receivers, with less patience where a signal has `stopped` the run.
    """
    settings = load(folder)
    if settings is None:
        yield lambda done, n, state: None
        return
    form = form_of(run, policy, settings.precision)
    every, snapshot = settings.every, copying(form.policy, mesh, settings.precision)

    def take(copied: tuple[Params, jax.Array]) -> Mapping[str, Any]:
        params, finite = copied
        if not finite:
            raise ValueError("its numbers are not finite")
        return form.tensors(params)

    with ExitStack() as closed:
        producer, opened = None, []
        if process_group.index() == 0:
            token = credentials.load(token_file=settings.token_file, environment=True).token
            for word in settings.to:
                opened.append(_transport(word, folder, settings.anchor, form, token))
                closed.callback(opened[-1].close)
            publisher = Publisher(folder.name, epoch=next_epoch(folder), transports=opened, settings=SETTINGS)
            closed.callback(publisher.close, 0.0)  # a finished run has drained it; an error ends it at once
            note(f"publishes its policy to {', '.join(transport.address for transport in opened)}")
            producer = closed.enter_context(Producer(publisher, take, note))

        def tell(done: int, n: int, state: PyTree) -> None:
            if done // every == (done - n) // every:
                return
            copied = snapshot(state)
            if producer is not None:
                producer.publish(done, copied)

        yield tell
        if producer is not None:
            if not producer.drain(HASTE if stopped() else PATIENCE):
                note("warning: not all receivers of the run's versions have the last one")
            note(f"{producer.published} versions were published, the newest {producer.newest}")


def _transport(word: str, folder: Path, anchor: int, form: Form, token: str | None) -> Transport:
    """Way to receivers that a word of --publish names; "run" is a folder within the run's."""
    where = f"folder:{folder / FOLDER}" if word == "run" else word
    kind, rest = transports.split(where)
    if kind == "folder":
        return FolderTransport(rest, anchor=anchor, beside=form.beside)
    return transports.serve(where, token)


def copying(policy: Callable[[PyTree], Params], mesh: Mesh, precision: str) -> Callable[[PyTree], Any]:
    """Function of a state that returns (copy of its policy, whether all its numbers are finite), without waiting.

    With several processes each has the whole copy.
    """

    def fresh(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.bfloat16) if precision == "bf16" and leaf.dtype == jnp.float32 else jnp.copy(leaf)

    def copied(state: PyTree) -> tuple[Params, jax.Array]:
        params = policy(state)
        floats = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats] or [True]))
        return jax.tree.map(fresh, params), finite

    return jax.jit(copied, out_shardings=meshes.replicated(mesh) if process_group.together() else None)
