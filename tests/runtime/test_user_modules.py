"""Objects by "module:name": found in the working folder too, in parts; what is missing is named with its remedy."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.runtime import user_modules


def test_a_module_of_the_working_folder_is_found_and_names_have_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_this_test.py").write_text(
        "class Worlds:\n    class Small:\n        size = 3\n\n_hidden = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    assert user_modules.load("module_of_this_test:Worlds.Small").size == 3
    assert user_modules.load("module_of_this_test:_hidden") == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("json", "'json' names no function; write module:function"),
        ("json:", "'json:' names no function"),
        ("json:load_s", "json has no load_s; did you mean loads"),
        ("json:zzz", "json has no zzz; it has"),
        ("longhaul.sum_tree:annotation", "longhaul.sum_tree has no annotation; it has"),  # annotations are no function
        ("no_such_module:f", "ModuleNotFoundError: .*; run from the folder that has it, install it, or add its folder"),
        ("__main__:NotThere", "a notebook or a script has defined NotThere; go on there, or define NotThere"),
    ],
)
def test_a_missing_module_or_function_is_named_with_its_remedy(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        user_modules.load(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("1 +", "SyntaxError: invalid syntax"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(failing_module_5.py, line 1\)"),
        ("\nint('x')", r"ValueError: invalid literal .* \(failing_module_9.py, line 2\)"),
        ("import json\njson.loads('{')", r"JSONDecodeError: .* \(failing_module_27.py, line 2\)"),
    ],
)
def test_a_module_that_fails_says_why(broken: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"failing_module_{len(broken)}"
    (tmp_path / f"{name}.py").write_text(broken)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=f"{name} can't be imported: {says}"):
        user_modules.load(f"{name}:f")


def test_names_of_this_form_are_told_from_others() -> None:
    assert user_modules.is_named("a.b:C.d") and user_modules.is_named("my_net:network")
    assert not any(map(user_modules.is_named, ("mlp", "a:", ":b", "a/b:c", "a b:c", "")))


def test_the_source_of_an_object_is_the_file_that_defines_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "defining_module.py").write_text("__version__ = '3'\n\ndef made():\n    pass\n")
    (tmp_path / "passing_module.py").write_text("from defining_module import made\nnumber = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = user_modules.source("passing_module:made")
    digest = hashlib.sha256((tmp_path / "defining_module.py").read_bytes()).hexdigest()
    assert found == ("defining_module", "3", digest)
    assert user_modules.source("passing_module:number").module == "passing_module"
    assert user_modules.change(found._asdict(), found) is None and user_modules.change(None, found) is None
    line = user_modules.change(found._asdict() | {"sha256": "0", "version": "2"}, found)
    assert line == "defining_module 2 -> 3 has changed since this run began; what follows may not repeat it"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: 1 if x > 0 else 2, r"can't be traced by JAX: TracerBool.*; take functions of jax.numpy"),
        (lambda x: float(x), r"can't be traced by JAX: Concret.*; take functions of jax.numpy"),
        (lambda x: np.sin(x), r"can't be traced by JAX: TracerArray.*; take functions of jax.numpy"),
        (lambda x: [][1], r"can't be traced by JAX: IndexError: .* \(test_user_modules.py, line \d+\)"),
    ],
)
def test_the_remedy_of_what_cant_be_traced_is_that_of_jaxs_own_errors(function: Any, says: str) -> None:
    with pytest.raises(Exception) as caught:
        jax.eval_shape(function, jnp.float32(0.0))
    told = user_modules.untraceable("step", caught.value)
    assert re.fullmatch(f"step {says}(, not if.*)?", told), told
