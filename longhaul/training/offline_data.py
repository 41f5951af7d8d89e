"""Recorded demonstrations: arrays of observations and actions for imitation (`algorithms/bc.py`).

A file `.npz`, or a folder of `.npy` files, holds `observation` [N, ...] and `action` [N, ...] by these names: steps in
any order, in the environment's format. Each array of a composite observation is `observation/NAME`; where actions can
be illegal, `mask` [N, n] marks the legal ones (without it all are legal). Names of D4RL's and imitation's files are
taken, too (`OTHER`). Leading axes are free, for example [T, B],
and equal in all arrays. A folder of `.npz` files is their concatenation. `minari:NAME` is a data set of Minari's that
is on this machine.

`read` reports in one line what does not fit the environment. Rows lie on the device, and rollouts draw them uniformly
with replacement.
"""

from __future__ import annotations

import difflib
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.config.resolve import MINARI
from longhaul.driving.datasets.log import BadData
from longhaul.runtime.devices import most_of_a_file
from longhaul.runtime.errors import did_you_mean, first_line
from longhaul.spaces import Box, Discrete, Masked, action_shape, unmasked
from longhaul.types import Collector, Guided, Key, Metrics, Params, PyTree, Rollout, Spec, Successors

LOOSE = 1e-3
"""Tolerance of a bound as a share of its range, for rounding."""

OTHER = {"observations": "observation", "obs": "observation", "actions": "action", "acts": "action"}
"""Names of arrays in other libraries' files -> ours."""

MOST_ARRAYS = 1000
"""Arrays of a file."""


class Recorded(NamedTuple):
    """N demonstrated steps."""

    observation: PyTree  # [N, ...], in the environment's format
    action: Any  # [N, ...]

    @property
    def rows(self) -> int:
        return int(self.action.shape[0])


def save(path: Path | str, observation: PyTree, action: Any) -> None:
    """File of steps in `read`'s format: an observation [..., *shape] (`Masked` or not), and actions [..., *shape]."""
    seen, mask = unmasked(observation)
    arrays: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in _leaves(seen).items()}
    arrays |= {"action": np.asarray(action)} | ({} if mask is None else {"mask": np.asarray(mask)})
    np.savez_compressed(path, **arrays)


def read(paths: Sequence[str], spec: Spec) -> Recorded:
    """All steps in the files and folders `paths`. Raises BadData, one line, if they do not fit `spec`."""
    opened = [each for path in paths for each in (_of_minari(path) if path.startswith(MINARI) else _open(Path(path)))]
    checked = [_checked(where, arrays, spec) for where, arrays in opened]
    recorded: Recorded = jax.tree.map(lambda *parts: np.concatenate(parts), *checked)
    return recorded


def _of_minari(path: str) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Steps of a data set of Minari's, as `_open` gives those of files, without an episode's last observation."""
    try:
        import minari
    except ImportError as error:
        raise BadData(f"{path} needs minari: pip install 'longhaul-rl[minari]'") from error
    name = path.removeprefix(MINARI)
    names = sorted(minari.list_local_datasets())
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = did_you_mean(near, f"minari download {name} fetches a public one")
        raise BadData(f"{path}: there is no such data set on this machine; {hint}")
    try:
        episodes = [
            {name: leaf[: len(episode)] for name, leaf in _leaves(episode.observations).items()}
            | {"action": np.asarray(episode.actions)}
            for episode in minari.load_dataset(name).iterate_episodes()
        ]
    except (ImportError, OSError, ValueError) as error:  # h5py is missing, say
        raise BadData(f"{path}: can't be read by Minari: {first_line(error)}; download it again") from error
    return [(path, jax.tree.map(lambda *parts: np.concatenate(parts), *episodes))]


def _open(path: Path) -> list[tuple[Path, Mapping[str, np.ndarray]]]:
    """(path, arrays by name) of each record at `path`."""
    path = path.expanduser()
    if not path.exists():
        raise BadData(f"{path}: there is no such file or folder; check the path")
    if path.is_dir():
        arrays = {str(file.relative_to(path).with_suffix("")): _load(file) for file in sorted(path.rglob("*.npy"))}
        if arrays:
            return [(path, arrays)]
        files = sorted(path.glob("*.npz"))
        if not files:
            raise BadData(
                f"{path}: holds no .npz files, and no observation.npy and action.npy; name the folder that does"
            )
        return [each for file in files for each in _open(file)]
    if path.suffix != ".npz":
        raise BadData(f"{path}: is no .npz file; numpy.savez writes one")
    archive, loaded = _load(path), {}
    entries, most = archive.zip.infolist(), most_of_a_file()
    if len(entries) > MOST_ARRAYS or (size := sum(entry.file_size for entry in entries)) > most:
        excess = f"{len(entries):,} arrays" if len(entries) > MOST_ARRAYS else f"{size:,} bytes"
        raise BadData(
            f"{path}: holds {excess}; {MOST_ARRAYS:,} arrays and {most:,} bytes are possible; give several files"
        )
    for name in archive.files:
        try:
            loaded[name] = archive[name]
        except Exception as error:  # zipfile and zlib raise many kinds
            raise BadData(f"{path}: {name} can't be read: {first_line(error)}; write it again") from error
    return [(path, loaded)]


def _load(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode=None if path.suffix == ".npz" else "r", allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise BadData(f"{path}: can't be read as NumPy's: {first_line(error)}; numpy.savez writes one") from error


def _leaves(observation: PyTree) -> dict[str, Any]:
    """ "observation", or "observation/NAME" -> a leaf of it."""
    leaves = jax.tree_util.tree_flatten_with_path({"observation": observation})[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _named(name: str) -> str:
    """Our name of an array: "observation/left" for "obs/left"."""
    first, slash, rest = name.partition("/")
    return OTHER.get(first, first) + slash + rest


def _checked(where: Path | str, arrays: Mapping[str, np.ndarray], spec: Spec) -> Recorded:
    """Rows of one record. Raises BadData."""
    arrays = {_named(name): array for name, array in arrays.items()} | dict(arrays)
    expected, mask = unmasked(spec.observation)
    names = _leaves(expected)
    shape, dtype = action_shape(spec.action)
    forms = {name: (leaf.shape, np.dtype(leaf.dtype)) for name, leaf in names.items()} | {"action": (shape, dtype)}
    if mask is not None:
        forms["mask"] = mask.shape, np.dtype(bool)
    missing = [name for name in forms if name not in arrays and name != "mask"]
    if missing:
        raise BadData(
            f"{where}: has no {missing[0]}; it holds {', '.join(sorted(arrays)) or 'nothing'}: rename one, or add it"
        )
    lead = arrays["action"].shape[: arrays["action"].ndim - len(shape)]
    if not lead or not math.prod(lead):
        form = f"{arrays['action'].dtype} {arrays['action'].shape}"
        inner = ", ".join(map(str, shape)) or "no more axes"
        raise BadData(f"{where}: action is {form}; it must be [N, {inner}], N at least 1")
    if "mask" in forms and "mask" not in arrays:
        arrays = {**arrays, "mask": np.ones((*lead, *forms["mask"][0]), bool)}
    converted = {}
    for name, (inner, kind) in forms.items():
        array = arrays[name]
        if array.shape != (*lead, *inner):
            form = f"{array.dtype} {array.shape}"
            raise BadData(f"{where}: {name} is {form}; for these actions it must be {(*lead, *inner)}")
        if not np.can_cast(array.dtype, kind, "same_kind"):
            raise BadData(f"{where}: {name} is of {array.dtype}, and the environment's of {kind}; convert it")
        if not np.all(np.isfinite(array)):
            raise BadData(f"{where}: {name} has numbers that are not finite; leave those steps out")
        converted[name] = np.ascontiguousarray(array.reshape(-1, *inner), kind)
    space, action = spec.action, converted["action"]
    if isinstance(space, Box):
        low, high = np.asarray(space.low), np.asarray(space.high)
        least, most = low - LOOSE * (high - low), high + LOOSE * (high - low)
        allowed = f"{low.tolist()} to {high.tolist()}"
    else:
        least = np.zeros(action.shape[1:])
        most = np.asarray(space.n if isinstance(space, Discrete) else space.sizes) - 1
        allowed = f"0 to {most.tolist()}"
    odd = np.flatnonzero(((action < least) | (action > most)).reshape(len(action), -1).any(-1))
    if len(odd):
        raise BadData(f"{where}: action {odd[0]} is {action[odd[0]].tolist()}; it must lie in {allowed}")
    seen = jax.tree.unflatten(jax.tree.structure(expected), [converted[name] for name in names])
    return Recorded(Masked(seen, converted["mask"]) if "mask" in forms else seen, converted["action"])


def collector(recorded: Recorded, *, columns: int, steps: int) -> Collector:
    """Rollouts [steps, columns] of uniformly drawn rows: no policy acts, and no episode ends."""

    def collect(params: Params, carry: PyTree, key: Key, version: jax.Array) -> tuple[PyTree, Rollout, Metrics]:
        index = jax.random.randint(key, (steps, columns), 0, recorded.action.shape[0])
        observation, action = jax.tree.map(lambda x: x[index], tuple(recorded))
        never, always = jnp.zeros((steps, columns), bool), jnp.ones((steps, columns), bool)
        following = Successors(*(jax.tree.map(lambda x, i=i: x[i], observation) for i in (-1, slice(0, 1))))
        data = Rollout(
            observation, action, jnp.zeros((steps, columns), jnp.float32), never, never, always,
            Guided((), action, always, always), following, (), version,
        )  # fmt: skip
        return carry, data, {name: jnp.float32(0.0) for name in ("episodes", "episode/return", "episode/length")}

    return Collector(lambda key: (), collect, steps * columns, steps * columns)
