"""Start of a run from parameters that are there: another run's checkpoint, or a file of arrays.

    --init-from RUN, RUN@STEP, params.npz, params.safetensors, checkpoint.pkl, hf:USER/NAME[@REVISION], pretrained

Leaves are matched by their path in the algorithm's state, written with dots: "params.policy.kernel". What the source
has not begins as it would without; a shape that does not fit is an error. `params_STEP.npz` and `checkpoint_STEP.pkl`
of the trainer that HackMatrix came with are read, too (`legacy_params.py`).
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longhaul.config.run import Run
from longhaul.runtime import bounded_json, pytree_serialization
from longhaul.runtime.devices import most_of_a_file
from longhaul.runtime.errors import RunError, first_line
from longhaul.runtime.provenance import params_sha256
from longhaul.training import hub, legacy_params
from longhaul.training.checkpoint.checkpoint import CheckpointError, Checkpoints
from longhaul.training.run_dir import find_folder
from longhaul.types import Discrete, PyTree, Spec

PARTS = {"parameters": ("params", "target", "reference"), "normaliser": ("moments",), "optimiser": ("opt_state",)}
"""Part of an algorithm's state -> its fields."""


def located(source: str, runs_dir: Path) -> str:
    """`source` as an absolute path, with its step where it is a run's: the same from every folder. One on the hub gets
    its commit, which stays the same.

    Raises RunError where there is neither such a file nor such a run.
    """
    if hub.is_address(source):
        return hub.pinned(source)
    if Path(source).suffix in (".npz", ".safetensors", ".pkl"):
        if not Path(source).expanduser().is_file():
            raise RunError(f"--init-from is {source}, and there is no such file; give a RUN, a FILE or hf:USER/NAME")
        return os.path.abspath(os.path.expanduser(source))
    name, _, step = source.partition("@")
    if step and not step.isdecimal():
        raise RunError(f"--init-from is {source}; behind the @ stands the number of a checkpoint, RUN@120")
    folder = os.path.abspath(find_folder(runs_dir, name))
    return f"{folder}@{step}" if step else folder


def applied(run: Run, spec: Spec, state: PyTree) -> tuple[PyTree, str]:
    """(the algorithm's state with what the run's source has, a line on what matched).

    In a population every member begins from the same. Raises RunError where nothing matches, or a shape does not fit.
    """
    assert run.init_from is not None
    source = arrays(run.init_from, spec)
    fields = {name for part in run.init_parts for name in PARTS[part]}
    named = {dotted(name): leaf for name, leaf in pytree_serialization.name(state).items()}
    values, matched = dict(named), {part: [0, 0] for part in run.init_parts}
    for name, leaf in named.items():
        field = name.partition(".")[0]
        if field not in fields:
            continue
        count = matched[next(part for part in run.init_parts if field in PARTS[part])]
        count[1] += 1
        if name in source:
            values[name] = _like(name, source[name], leaf, run)
            count[0] += 1
    if not any(count for count, _ in matched.values()):
        raise RunError(
            f"--init-from {run.init_from} has none of this run's leaves; it has "
            f"{', '.join(sorted(source)[:4])}, and the "
            f"run {', '.join(sorted(name for name in named if name.partition('.')[0] in fields)[:4])}"
        )
    shares = ", ".join(f"{count} of {total} of the {part}" for part, (count, total) in matched.items() if total)
    lacking = [name for name in named if name.partition(".")[0] in fields and name not in source]
    if lacking:
        shares += f"; without {', '.join(lacking[:4])}" + (f" and {len(lacking) - 4} more" if lacking[4:] else "")
    tree = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(state), [values[name] for name in named])
    return tree, f"begins from {run.init_from}: {shares}"


def _like(name: str, value: np.ndarray, leaf: Any, run: Run) -> Any:
    """`value` in the place and type of a leaf."""
    shape = leaf.shape[1:] if run.many else leaf.shape
    if value.shape != shape:
        raise RunError(
            f"--init-from {run.init_from}: {name} is {list(value.shape)} there and {list(shape)} here; give the sizes "
            "of its network, or another source"
        )
    whole = np.broadcast_to(value, leaf.shape).astype(leaf.dtype)
    return pytree_serialization.put(whole, leaf.sharding)


def names(tree: PyTree, alone: str) -> dict[str, Any]:
    """Leaves of a tree by dotted name, in the tree's order; `alone` is the name of an only leaf."""
    named = {dotted(name): leaf for name, leaf in pytree_serialization.name(tree).items()}
    return {alone: next(iter(named.values()))} if len(named) == 1 else named


def published(folder: Path, like: PyTree) -> PyTree:
    """Policy in a folder from the hub, in the form of `like`. Raises RunError where it is another, or damaged."""
    try:
        stored, named = _of_safetensors(folder / hub.POLICY), names(like, "params")
    except _UnreadableError as error:
        raise RunError(f"{error}: the file is damaged; download or install it again") from error
    found, needed = ({name: f"{x.dtype}{list(x.shape)}" for name, x in each.items()} for each in (stored, named))
    for name in sorted(found.keys() | needed.keys()):
        if found.get(name) != needed.get(name):
            raise RunError(
                f"{folder / hub.POLICY} is not the policy of the run.json beside it: {name} is "
                f"{found.get(name, 'absent')}, and the network for its observation needs {needed.get(name, 'none')}; "
                "push it again, or use the Longhaul that wrote it"
            )
    policy = jax.tree.unflatten(jax.tree.structure(like), [stored[name] for name in named])
    recorded, digest = bounded_json.read(folder / "policy.json").get("params_sha256"), params_sha256(policy.params)
    if recorded != digest:
        raise RunError(
            f"{folder / hub.POLICY} is damaged: its arrays have the digest {digest[:12]}, and policy.json says "
            f"{str(recorded)[:12]}; download or install it again"
        )
    return policy


def dotted(name: str) -> str:
    """`.params['policy']['kernel']` -> `params.policy.kernel`."""
    return ".".join(part for part in re.split(r"[\[\]'.]+", name) if part)


def arrays(source: str, spec: Spec) -> dict[str, np.ndarray]:
    """Arrays of a source by dotted name. Raises RunError, one line, where it can't be read."""
    path = hub.folder_of(source) / hub.POLICY if hub.is_address(source) else Path(source)
    try:
        if path.suffix == ".npz":
            return _of_npz(path, spec)
        if path.suffix == ".safetensors":
            return _of_safetensors(path)
        if path.suffix == ".pkl":
            return _of_legacy(path, spec)
        return _of_run(source)
    except _UnreadableError as error:
        raise RunError(f"--init-from {error}") from error
    except (legacy_params.LegacyError, CheckpointError, OSError) as error:
        raise RunError(f"--init-from: {error}") from error


def _of_npz(path: Path, spec: Spec) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > (most := most_of_a_file()):
            raise RunError(
                f"--init-from {path} holds more than {most:,} bytes, three quarters of the memory; give a smaller file"
            )
        if entries and all(legacy_params.NAME.fullmatch(entry.filename) for entry in entries):
            return _of_legacy(path, spec)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (RunError, legacy_params.LegacyError):
        raise
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise RunError(
            f"--init-from {path} is no whole .npz file of arrays ({first_line(error)}); copy it again"
        ) from error


def _of_legacy(path: Path, spec: Spec) -> dict[str, np.ndarray]:
    """Arrays of the old HackMatrix trainer, by the names of our network."""
    if not isinstance(spec.action, Discrete) or spec.expand is None:
        raise RunError(
            f"--init-from {path} is of the old HackMatrix trainer, and this run is of something else; take the recipe "
            "hackmatrix"
        )
    _, policy = legacy_params.load(path, spec)
    return {dotted(name): np.asarray(leaf) for name, leaf in pytree_serialization.name(policy).items()}


class _UnreadableError(ValueError):
    """A safetensors file that can't be read: its path, and what is wrong."""


def _of_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    try:
        bounded_json.check_safetensors(path)
        tensors: dict[str, np.ndarray] = load_file(path)
    except Exception as error:  # its own kinds, which say what is wrong with the file
        raise _UnreadableError(f"{path}: {first_line(error)}") from error
    return tensors


def _of_run(source: str) -> dict[str, np.ndarray]:
    """Arrays of the state in a run's checkpoint, the newest intact one where no step is named."""
    folder, _, step = source.partition("@")
    with closing(Checkpoints(Path(folder) / "checkpoints")) as checkpoints:
        stored = checkpoints.at(int(step)) if step else checkpoints.newest()
        if stored is None:
            raise RunError(f"--init-from {source}: no such checkpoint; it has {checkpoints.steps() or 'none'}")
        return {
            dotted(name).removeprefix("state."): value for name, value in checkpoints.arrays(stored, ".state.").items()
        }
