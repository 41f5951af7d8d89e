"""Parameters of the trainer that HackMatrix came with: `params_STEP.npz`, `final_params.npz`, `checkpoint_STEP.pkl`.

An archive of arrays with dotted names, `params.Dense_0.kernel` and so on: hidden layers with ReLU, shared by the last
two layers, the policy's and the value's. How many layers there are and how wide they are follows from the shapes. A
pickled checkpoint holds the same as a tree under `params`, of NumPy's arrays or JAX's; its step, optimiser and metrics
are passed over. A file comes from anywhere, so all of it is checked before it is used: nothing of a pickle is run
(safe_pickle.py), and nothing is read that is not as large as it has to be.
"""

from __future__ import annotations

import math
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

import jax
import numpy as np

from longhaul.algorithms import actor_critic
from longhaul.algorithms.actor_critic import Policy
from longhaul.algorithms.config import PPOConfig
from longhaul.driving.datasets import safe_pickle
from longhaul.driving.datasets.log import Malformed, told
from longhaul.networks.config import NetworkConfig
from longhaul.runtime.errors import first_line
from longhaul.spaces import Discrete
from longhaul.types import Spec

MOST_BYTES = 1 << 30
"""Most bytes of all arrays of a file."""

MOST_ARRAYS = 256

NAME = re.compile(r"(?:params\.)?Dense_(\d{1,3})\.(kernel|bias)\.npy")


class LegacyError(ValueError):
    """A file that does not hold such parameters; the message is one line."""


class Layer(NamedTuple):
    kernel: np.ndarray  # float32 [inputs, outputs]
    bias: np.ndarray  # float32 [outputs]


class Weights(NamedTuple):
    """The network of a file, first layer first."""

    hidden: tuple[Layer, ...]
    policy: Layer
    value: Layer


def find(path: Path) -> Path:
    """`path`, or the newest parameters where it is a folder: `final_params.npz`, else the highest STEP.

    Raises LegacyError where a folder has none.
    """
    if not path.is_dir():
        return path
    if (path / "final_params.npz").is_file():
        return path / "final_params.npz"
    steps = {int(m[1]): file for file in path.iterdir() if (m := re.fullmatch(r"params_(\d+)\.npz", file.name))}
    if not steps:
        raise LegacyError(f"{path} holds no params_STEP.npz and no final_params.npz; name the file")
    return steps[max(steps)]


def read(path: Path, inputs: int, actions: int) -> Weights:
    """The weights in a file, for `inputs` numbers of an observation and `actions` actions.

    Raises LegacyError, and OSError where there is no file.
    """
    if path.suffix == ".pkl":
        try:
            return _weights(path, _unpickled(path), inputs, actions)
        except Malformed as error:
            raise LegacyError(f"{path} holds no parameters: {told(error)}; give the params_STEP.npz") from error
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = _arrays(path, archive)
    except (
        *(zipfile.BadZipFile, zlib.error, UnicodeDecodeError),
        *(EOFError, NotImplementedError, RuntimeError, OSError),
    ) as error:
        if isinstance(error, OSError) and error.filename is not None:  # the file's own: it is not there, say
            raise
        about = str(error) or type(error).__name__
        raise LegacyError(f"{path} is no whole .npz file ({about}); copy it again, or name another") from error
    return _weights(path, arrays, inputs, actions)


def _arrays(path: Path, archive: zipfile.ZipFile) -> dict[tuple[int, str], np.ndarray]:
    """(number of the layer, "kernel" or "bias") -> array."""
    entries = archive.infolist()
    if len(entries) > MOST_ARRAYS:
        raise LegacyError(f"{path} holds {len(entries)} arrays; at most {MOST_ARRAYS} are expected: name another file")
    total = sum(entry.file_size for entry in entries)
    if total > MOST_BYTES:
        raise LegacyError(f"{path} holds {total:,} bytes; at most {MOST_BYTES:,} are expected: name another file")
    arrays: dict[tuple[int, str], np.ndarray] = {}
    for entry in entries:
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise LegacyError(f"{path}: {entry.filename} is compressed as no NumPy does; save it again by numpy.savez")
        place = _place(path, entry.filename, arrays)
        with archive.open(entry) as file:
            arrays[place] = _array(path, _layer_text(place), file, entry.file_size)
    return arrays


def _place(path: Path, name: str, arrays: Mapping[tuple[int, str], np.ndarray]) -> tuple[int, str]:
    """(number of the layer, "kernel" or "bias") of an array's name in an archive, which is not in `arrays`."""
    named = NAME.fullmatch(name)
    if named is None:
        name = name.removesuffix(".npy")
        raise LegacyError(
            f"{path} holds {name!r}; expected are Dense_0.kernel, Dense_0.bias and so on; name another file"
        )
    place = int(named[1]), named[2]
    if place in arrays:
        raise LegacyError(f"{path} holds {_layer_text(place)} twice; name another file")
    return place


def _unpickled(path: Path) -> dict[tuple[int, str], np.ndarray]:
    """The arrays under `params` of a pickled checkpoint. Raises Malformed, LegacyError."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise LegacyError(f"{path} holds {size:,} bytes; at most {MOST_BYTES:,} are expected: name another file")
    tree = safe_pickle.unpickle(path.read_bytes(), safe_pickle.PARAMETERS)
    tree = tree.get("params", tree) if isinstance(tree, dict) else tree
    tree = tree.get("params", tree) if isinstance(tree, dict) else tree
    if not isinstance(tree, dict):
        raise LegacyError(f"{path} holds no params; give a checkpoint_STEP.pkl or the params_STEP.npz beside it")
    arrays: dict[tuple[int, str], np.ndarray] = {}
    for layer, parts in list(tree.items())[:MOST_ARRAYS]:
        for part, value in parts.items() if isinstance(parts, dict) else [("", parts)]:
            place = _place(path, f"{layer}.{part}.npy", arrays)
            array = value.real() if isinstance(value, safe_pickle.Array) else np.asarray(None)
            if len(arrays) * array.nbytes > MOST_BYTES:
                raise LegacyError(f"{path} stands for more than {MOST_BYTES:,} bytes; name another file")
            arrays[place] = _checked(path, _layer_text(place), array)
    return arrays


def _array(path: Path, name: str, file: IO[bytes], size: int) -> np.ndarray:
    """One array as float32, of an entry of `size` bytes: its shape and kind are checked before it is read."""
    try:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"version {version} of the format")
        shape, by_column, dtype = readers[version](file)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise LegacyError(f"{path}: {name} can't be read ({first_line(error)}); name another file") from error
    _check_form(path, name, shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != size - file.tell():
        raise LegacyError(
            f"{path}: {name} is said to be {shape}, and {size - file.tell():,} bytes follow; name another file"
        )
    data = np.frombuffer(file.read(nbytes), dtype)
    return _checked(path, name, data.reshape(shape, order="F" if by_column else "C"))


def _check_form(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if dtype.kind != "f" or dtype.itemsize not in (2, 4, 8):
        raise LegacyError(
            f"{path}: {name} is of kind {dtype}; numbers of float16, float32 or float64 are needed; name another file"
        )
    if not 1 <= len(shape) <= 2 or min(shape) < 1:
        raise LegacyError(
            f"{path}: {name} is said to be {shape}; a kernel has two sizes and a bias one; name another file"
        )


def _checked(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    """An array as float32, if it is one of finite numbers."""
    _check_form(path, name, array.shape, array.dtype)
    with np.errstate(over="ignore"):  # what float32 can't hold is found below
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise LegacyError(f"{path}: {name} holds numbers that are not finite; take an earlier step")
    return array


def _weights(path: Path, arrays: dict[tuple[int, str], np.ndarray], inputs: int, actions: int) -> Weights:
    """The layers in order, each with the shape that the one before asks for."""
    count = 1 + max((number for number, _ in arrays), default=-1)
    if count < 3:
        raise LegacyError(
            f"{path} holds {count} layers; a hidden one, the policy's and the value's are needed; name another file"
        )
    for number in range(count):
        for part in ("kernel", "bias"):
            if (number, part) not in arrays:
                raise LegacyError(
                    f"{path} lacks {_layer_text((number, part))}; it holds layers up to Dense_{count - 1}: "
                    "name another file"
                )
    layers = [Layer(arrays[number, "kernel"], arrays[number, "bias"]) for number in range(count)]
    width = layers[0].kernel.shape[-1]
    sizes = [(inputs, width)] + [(width, width)] * (count - 3) + [(width, actions), (width, 1)]
    for number, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        for part, shape in (("kernel", size), ("bias", size[1:])):
            found = getattr(layer, part).shape
            if found != shape:
                raise LegacyError(f"{path}: {_layer_text((number, part))} is {found}; {shape} is needed")
    return Weights(tuple(layers[:-2]), layers[-2], layers[-1])


def _layer_text(place: tuple[int, str]) -> str:
    return f"Dense_{place[0]}.{place[1]}"


# ------------------------------------------------------------------------------------------------- as our own network


def load(path: Path, spec: Spec) -> tuple[PPOConfig, Policy]:
    """The policy of a file, and how its network is made, for an environment of `spec`. Raises LegacyError, OSError."""
    assert isinstance(spec.action, Discrete) and spec.expand is not None
    observed = jax.eval_shape(spec.expand, spec.observation.observation)
    hidden, policy, value = read(path, observed.shape[-1], spec.action.n)
    width = len(hidden[0].bias)
    network = NetworkConfig(shared=True, activation="relu", hidden_dim=width, num_layers=len(hidden))
    config = PPOConfig(network=network)
    torso = {f"layer_{i}": layer._asdict() for i, layer in enumerate(hidden)}
    params = {"torso": torso, "policy": policy._asdict(), "value": value._asdict()}
    expected = jax.eval_shape(actor_critic.network(spec, config).init, jax.random.key(0))
    shapes = jax.tree.map(lambda leaf: leaf.shape, (params, expected))
    assert shapes[0] == shapes[1], shapes
    return config, Policy(params, ())
