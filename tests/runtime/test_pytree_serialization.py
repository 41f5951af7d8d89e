"""A pytree taken apart and put together is the same; what cannot be taken apart is refused by name."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.runtime import pytree_serialization

TREE = {
    "layers": [jnp.array([[1.0, -0.0]]), {"b/c": np.arange(3, dtype=np.uint8)}],
    "keys": jax.random.split(jax.random.key(0), 2),
    "no keys": jax.random.split(jax.random.key(0), 2)[:0],
    "weak": jnp.asarray(-0.0),
    "scalar": np.float32(2.5),
    "numbers": (True, 2**70, -0.0, float("-inf")),
    "nothing": (None, (), {}, jnp.zeros((3, 0), jnp.int8)),
}


def there_and_back(tree: Any, like: Any) -> Any:
    """The tree through NumPy arrays and JSON."""
    arrays, table = pytree_serialization.split(tree)
    held = {name: np.array(array) for name, array in arrays.items()}
    read = json.loads(json.dumps(table))
    named = pytree_serialization.name(like)
    pytree_serialization.fit(read, named, "a file")
    placed = [pytree_serialization.place(held.get(name), leaf, read[name]) for name, leaf in named.items()]
    return jax.tree.unflatten(jax.tree.structure(like), placed)


def test_names_are_paths() -> None:
    names = list(pytree_serialization.name({"a": [0, {"b/c": 1}], "n": None}))
    assert names == ["['a'][0]", "['a'][1]['b/c']"]
    assert list(pytree_serialization.name(3)) == ["(the whole)"]


def test_apart_and_together_is_the_identity() -> None:
    back = there_and_back(TREE, TREE)
    assert jax.tree.structure(back) == jax.tree.structure(TREE)
    for found, wanted in zip(jax.tree.leaves(back), jax.tree.leaves(TREE), strict=True):
        assert type(found) is type(wanted)
        assert repr(found) == repr(wanted)  # tells dtype, weak type, sign of zero and a key's data
    assert pytree_serialization.split(back)[1] == pytree_serialization.split(TREE)[1]


def test_arrays_with_elements_are_stored_and_numbers_are_not() -> None:
    arrays, table = pytree_serialization.split(TREE)
    assert sorted(arrays) == ["['keys']", "['layers'][0]", "['layers'][1]['b/c']", "['scalar']", "['weak']"]
    assert sorted(arrays) == sorted(name for name, entry in table.items() if pytree_serialization.is_stored(entry))
    assert pytree_serialization.target(TREE["keys"], table["['keys']"]).shape == (2, 2)


def test_numpy_arrays_are_copied() -> None:
    values = np.zeros(3)
    arrays, _ = pytree_serialization.split([values])
    values[:] = 1.0
    assert not arrays["[0]"].any()


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (b"bytes", r"leaf \[0\]\['x'\] is a bytes: arrays, keys and Python numbers can be saved"),
        (1j, r"leaf \[0\]\['x'\] is a complex"),
        (np.array([{}]), r"leaf \[0\]\['x'\] has dtype object"),
        (np.zeros(2, [("a", "f4")]), r"leaf \[0\]\['x'\] has dtype \[\('a', '<f4'\)\]"),
        (np.array("2020", "M8"), r"leaf \[0\]\['x'\] has dtype datetime64"),
    ],
)
def test_leaves_that_are_no_numbers_are_refused(leaf: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pytree_serialization.split([{"x": leaf}])
