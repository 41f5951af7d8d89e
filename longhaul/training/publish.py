"""What a run publishes while it trains: its policy, as versions of `longhaul.weight_sync`, to whoever acts or serves
with it.

A version's number is that of the update it comes after; its tensors are `policy(state)`, parameters and normalisers,
under their paths. Training is held up by one copy on the device: what goes to the host, is digested, written and sent,
goes beside it. Each start of a trainer is a new epoch, so a run that goes on, or goes back, is never taken for stale.
Versions whose numbers are not finite are not published.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from longhaul.runtime import credentials, files, process_group
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError
from longhaul.types import Params, PyTree
from longhaul.weight_sync import transports
from longhaul.weight_sync.producer import Producer, named
from longhaul.weight_sync.protocol import Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.transports.folder import FolderLane

FILE = "publish.json"
"""Of a run's folder: what it publishes, and where."""

FOLDER = "weights"
"""Of a run's folder: its versions, where it publishes to `run`."""

PRECISIONS = ("as-is", "bf16")

FLAGS = ("publish", "publish-every", "publish-precision", "publish-token-file", "publish-anchor")
"""Of `longhaul train`, in the order of `Publishing`'s fields."""

SETTINGS = Settings(quorum=0, lease=30.0)
"""Nobody is waited for: each receiver takes the newest when it can."""

PATIENCE, HASTE = 60.0, 5.0
"""Seconds that a run which is done, or which a signal stops, waits at its end for who follows."""

Tell = Callable[[int, int, PyTree], None]
"""(updates done, of which in this call, the algorithm's state) -> publishes, where that is due."""


class Publishing(NamedTuple):
    """What a run publishes, as its folder keeps it."""

    to: tuple[str, ...]  # addresses of lanes; "run" is the run's own folder
    every: int = 1  # updates
    precision: str = "as-is"
    token_file: str | None = None
    anchor: int = 1  # of versions in a folder every so manyth is whole, the others what changed


def chosen(values: Mapping[str, Any], given: frozenset[str], before: Publishing | None = None) -> Publishing | None:
    """What the flags ask for, after `before`; None where nothing is published. Raises RunError, one line."""
    known = before or Publishing(())
    changes = {field: values[flag] for field, flag in zip(Publishing._fields, FLAGS, strict=True) if flag in given}
    found = known._replace(**changes)
    to = tuple(address(word) for word in found.to if word != "none")
    if not to:
        if set(changes) - {"to"}:
            raise RunError(f"{', '.join(f'--{flag}' for flag in FLAGS[1:])} need --publish ADDRESS")
        return None
    if found.every < 1:
        raise RunError(f"--publish-every is {found.every}; it must be at least 1 update")
    if found.anchor < 1:
        raise RunError(f"--publish-anchor is {found.anchor}; it must be at least 1 version")
    flags = {"xxhash": "--publish"} | ({"zstandard": f"--publish-anchor {found.anchor}"} if found.anchor > 1 else {})
    for library, flag in flags.items():
        if importlib.util.find_spec(library) is None:
            raise RunError(f"{flag} needs {library}: pip install 'longhaul[sync]'")
    return found._replace(to=to)


def address(word: str) -> str:
    """Where a word sends versions: `run`, an address of a lane, or a folder. RunError where it is an address in form
    alone."""
    plain = ":" not in word or "/" in word or Path(word).is_dir()
    if word == "run" or (word.partition(":")[0] not in transports.KINDS and plain):
        return word if word == "run" else f"folder:{Path(word).expanduser().absolute()}"
    try:
        transports.split(word)
    except ValueError as error:
        raise RunError(f"--publish {word}: {error}") from error
    return word


def load(folder: Path) -> Publishing | None:
    """What the run in `folder` publishes; None where it does not. Raises RunError where the file is damaged."""
    try:
        found = json.loads((folder / FILE).read_text())
        return Publishing(tuple(found.pop("to")), **found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{folder / FILE} can't be read ({error}); remove it, and give --publish again") from error


def save(folder: Path, publishing: Publishing | None) -> None:
    """Keeps what the run in `folder` publishes."""
    if publishing is not None:
        files.write(folder / FILE, json.dumps(publishing._asdict(), indent=2) + "\n")
    else:
        (folder / FILE).unlink(missing_ok=True)


@contextmanager
def publishing(
    folder: Path,
    policy: Callable[[PyTree], Params],
    mesh: Mesh,
    note: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Tell]:
    """Within it, what the run in `folder` asks for is published: call what it yields after each call of the topology,
    before the state is donated, in all processes alike. At its end the last version is brought to who follows; with
    less patience where a signal has `stopped` the run.
    """
    asked = load(folder)
    if asked is None:
        yield lambda done, n, state: None
        return
    every, snapshot = asked.every, copying(policy, mesh, asked.precision)
    with ExitStack() as closed:
        producer = closed.enter_context(_opened(folder, asked, note)) if process_group.index() == 0 else None

        def tell(done: int, n: int, state: PyTree) -> None:
            if done // every == (done - n) // every:
                return
            copied = snapshot(state)
            if producer is not None:
                producer.publish(done, copied)

        yield tell
        if producer is not None and not producer.drain(HASTE if stopped() else PATIENCE):
            note("warning: not all who follow the run's versions have the last one")
        if producer is not None:
            note(f"{producer.published} versions were published, the newest {producer.newest}")


def copying(policy: Callable[[PyTree], Params], mesh: Mesh, precision: str) -> Callable[[PyTree], Any]:
    """state -> (a copy of its policy, whether all its numbers are finite), dispatched and not waited for.

    Of several processes each has the whole copy.
    """

    def fresh(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.bfloat16) if precision == "bf16" and leaf.dtype == jnp.float32 else jnp.copy(leaf)

    def copied(state: PyTree) -> tuple[Params, jax.Array]:
        found = policy(state)
        floats = [leaf for leaf in jax.tree.leaves(found) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats] or [True]))
        return jax.tree.map(fresh, found), finite

    return jax.jit(copied, out_shardings=meshes.replicated(mesh) if process_group.together() else None)


@contextmanager
def _opened(folder: Path, asked: Publishing, note: Callable[[str], None]) -> Iterator[Producer]:
    token = credentials.load(token_file=asked.token_file).token if asked.token_file else None
    where = [f"folder:{folder / FOLDER}" if each == "run" else each for each in asked.to]

    def take(copied: tuple[Params, jax.Array]) -> dict[str, Any] | None:
        params, finite = copied
        if not finite:
            raise ValueError("its numbers are not finite")
        return named(params)

    with ExitStack() as closed:
        opened = []
        for each in where:
            kind, rest = transports.split(each)
            opened.append(FolderLane(rest, anchor=asked.anchor) if kind == "folder" else transports.serve(each, token))
            closed.callback(opened[-1].close)
        publisher = Publisher(folder.name, lanes=opened, settings=SETTINGS)
        closed.callback(publisher.close, 0.0)  # a run that is done has drained it; an error ends it at once
        note(f"publishes its policy to {', '.join(lane.address for lane in opened)}")
        yield closed.enter_context(Producer(publisher, take, note))
