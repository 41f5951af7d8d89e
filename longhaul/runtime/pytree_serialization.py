"""Leaves of a pytree by name: a table of their types, arrays of their values, and the way back.

A leaf's name is its path, `jax.tree_util.keystr`: ".state.params['w']". `None`, `()`, `{}` are structure, not leaves.
Leaves are JAX arrays, typed keys, NumPy arrays and scalars, and Python's bool, int and float. Typed keys become their
data; Python numbers and empty arrays, which a file of arrays need not hold, are in the table alone.
"""

from __future__ import annotations

import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.types import PyTree

REMEDY = "resume with the settings in the run's run.json, or start a new run"

Entry = dict[str, Any]
"""Table entry of a leaf, as JSON can hold it: "dtype", "shape"; "value" of a Python number, "key" (generator of a typed
key), "weak" (true for a JAX array of weak dtype)."""


def name(tree: PyTree) -> dict[str, Any]:
    """Leaves by name. Raises ValueError if two have the same."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path) or "(the whole)": leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError(f"{len(leaves)} leaves have {len(named)} different names: give the pytree's nodes other keys")
    return named


def describe(leaf_name: str, leaf: Any) -> Entry:
    """dtype and shape of a leaf or a `jax.ShapeDtypeStruct`. Raises ValueError for anything but arrays and numbers."""
    if isinstance(leaf, (bool, int, float)) and not isinstance(leaf, np.generic):
        return {"dtype": f"Python {type(leaf).__name__}", "shape": []}
    remedy = "arrays, keys and Python numbers can be saved; put it into the metadata"
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)):
        raise ValueError(f"leaf {leaf_name} is a {type(leaf).__name__}: {remedy}")
    if not _is_key(leaf) and (np.dtype(leaf.dtype).kind not in "biufcV" or np.dtype(leaf.dtype).names):
        raise ValueError(f"leaf {leaf_name} has dtype {leaf.dtype}: {remedy}")
    return {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}


def split(tree: PyTree) -> tuple[dict[str, Any], dict[str, Entry]]:
    """-> (arrays by name, JAX's or copies of NumPy's; the table of all leaves)."""
    arrays: dict[str, Any] = {}
    table: dict[str, Entry] = {}
    values: jax.Array | np.ndarray
    for leaf_name, leaf in name(tree).items():
        entry = table[leaf_name] = describe(leaf_name, leaf)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(f"leaf {leaf_name} is a shape without values: give an array")
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            entry["value"] = struct.pack("<d", leaf).hex() if isinstance(leaf, float) else str(int(leaf))
            continue
        if not isinstance(leaf, jax.Array):
            values = np.array(leaf, order="C")
        elif _is_key(leaf):
            values, entry["key"] = jax.random.key_data(leaf), str(jax.random.key_impl(leaf))
        else:
            values, entry["weak"] = leaf, leaf.weak_type  # a lost weak type would change promotions after resuming
        if is_stored(entry):
            arrays[leaf_name] = values
    return arrays, table


def is_stored(entry: Entry) -> bool:
    """True if the leaf's values are among the arrays of `split`, not in the table."""
    return "value" not in entry and 0 not in entry["shape"]


def fit(table: dict[str, Entry], like: dict[str, Any], where: str, *, part: bool = False) -> None:
    """Check of a table: ValueError with the leaf's name if the table does not fit the named leaves of `like`.

    With `part` the table may have more.
    """
    for leaf_name, leaf in like.items():
        needed = describe(leaf_name, leaf)
        if leaf_name not in table:
            raise ValueError(f"{where} has no leaf {leaf_name} ({_form_text(needed)}), which this run has: {REMEDY}")
        stored = table[leaf_name]
        if (needed["dtype"], needed["shape"]) != (stored["dtype"], stored["shape"]):
            difference = f"{_form_text(stored)} in {where}, and {_form_text(needed)} in this run"
            raise ValueError(f"leaf {leaf_name} is {difference}: {REMEDY}")
    surplus = sorted(table.keys() - like.keys())
    if surplus and not part:
        stored = table[surplus[0]]
        raise ValueError(f"{where} has a leaf {surplus[0]} ({_form_text(stored)}), which this run has not: {REMEDY}")


def target(leaf: Any, entry: Entry) -> Any:
    """Target of a stored leaf for a reader: a JAX array if it has a placement, else a NumPy array."""
    if "key" not in entry and _sharding(leaf) is not None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf))
    data = _key_data(leaf) if "key" in entry else leaf
    return np.broadcast_to(np.zeros((), data.dtype), data.shape)


def place(value: Any, leaf: Any, entry: Entry) -> Any:
    """Saved leaf in the form of `leaf`: Python, NumPy or JAX, with its sharding.

    `value` is the array read for `target`; None if the leaf is not stored.
    """
    if "value" in entry:
        text = entry["value"]
        return struct.unpack("<d", bytes.fromhex(text))[0] if isinstance(leaf, float) else type(leaf)(int(text))
    if value is None:
        data = _key_data(leaf) if "key" in entry else leaf
        value = np.zeros(data.shape, data.dtype)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return np.asarray(value)[()] if isinstance(leaf, np.generic) else np.asarray(value)
    if "key" in entry:
        value = jax.random.wrap_key_data(jnp.asarray(value), impl=entry["key"])
    elif entry.get("weak"):
        # An indexed update keeps the weak type of its target, and these bits.
        zero = jnp.asarray(np.zeros((), value.dtype).item())
        value = jnp.broadcast_to(zero, value.shape).at[...].set(jnp.asarray(value))
    sharding = _sharding(leaf)
    return jnp.asarray(value) if sharding is None else put(value, sharding)


def put(value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Array, NumPy's or JAX's, in this layout. All processes of the layout pass the same value, and each takes its own
    part without communication."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if isinstance(value, jax.core.Tracer):  # of a program that is asked for its shapes alone
        return value
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    if _is_key(value):
        data = put(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape of a key array's data; `leaf` may itself be a shape."""
    data: jax.ShapeDtypeStruct = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return data


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Sharding that a leaf must have; None: default device and free to move (uncommitted), like a fresh array."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def _form_text(entry: Entry) -> str:
    return f"{entry['dtype']} {entry['shape']}"
