"""Objects of the user's own modules by "package.module:name", and the digest of their source."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from longhaul.runtime.errors import did_you_mean, first_line


def is_named(name: str) -> bool:
    """True for "package.module:name"."""
    module, colon, path = name.partition(":")
    return bool(colon and path) and all(part.isidentifier() for part in module.split("."))


def load(name: str) -> Any:
    """Object that "module:name" names, the working folder's modules among them; ValueError, one line, if there is none.

    "name" may have parts: "my_env:Corridor.small".
    """
    module, _, path = name.partition(":")
    if not module or not path:
        raise ValueError(f"{name!r} names no function; write module:function")
    target = imported(module)
    for part in path.split("."):
        if part not in dir(target):
            if module == "__main__":
                raise ValueError(f"a notebook or a script has defined {path}; go on there, or define {path} here first")
            names = _names(sys.modules[module])
            near = difflib.get_close_matches(path, names, n=3, cutoff=0.5)
            hint = did_you_mean(near, f"it has {', '.join(names[:8]) or 'nothing'}")
            raise ValueError(f"{module} has no {path}; {hint}")
        target = getattr(target, part)
    return target


def _names(module: ModuleType) -> list[str]:
    """Public names of a module that are no modules, those that it imports last."""
    public = {name: each for name, each in vars(module).items() if not name.startswith("_")}
    names = [name for name, each in public.items() if not isinstance(each, ModuleType | type(annotations))]
    return sorted(names, key=lambda name: getattr(public[name], "__module__", module.__name__) != module.__name__)


def imported(module: str) -> Any:
    """A module, the working folder's among them; ValueError, one line, if it can't be imported."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever a module raises as it is imported
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        if module.endswith(".py"):
            raise ValueError(f"{module} is a file; write {module.removesuffix('.py')}:NAME") from error
        remedy = "; run from the folder that has it, install it, or add its folder to PYTHONPATH" if missing else ""
        at = "" if missing or isinstance(error, SyntaxError) else place(error)  # a SyntaxError says where
        raise ValueError(f"{module} can't be imported: {_named(error)}{at}{remedy}") from error


def place(error: BaseException) -> str:
    """ " (my_env.py, line 7)", where the user's own code raised an error or called what did; "" where none had a part.

    What is in this package, in Python's own library or installed is not the user's.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.abspath(frame.filename)
        installed = {"site-packages", "dist-packages"} & {*Path(path).parts}
        if os.path.isfile(path) and not installed and not path.startswith(NOT_OWN):
            return f" ({os.path.basename(path)}, line {frame.lineno})"
    return ""


def described(error: BaseException) -> str:
    """Kind of an error, the first line of what it says, and where the user's code raised it."""
    return _named(error) + place(error)


def _named(error: BaseException) -> str:
    kind, line = type(error).__name__, first_line(error)
    return line if line == kind else f"{kind}: {line}"


def untraceable(what: str, error: BaseException) -> str:
    """Text of an error in tracing `what`, with the remedy where it is JAX's own, about a value that is traced."""
    is_jaxs = any(kind.__name__ == "JAXTypeError" for kind in type(error).__mro__)  # known without importing JAX
    remedy = "; take functions of jax.numpy, not if, float() or NumPy's, for what depends on arrays" if is_jaxs else ""
    return f"{what} can't be traced by JAX: {described(error)}{remedy}"


NOT_OWN = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(os.__file__) + os.sep)
"""Folders of this package and of Python's own library."""


class Source(NamedTuple):
    """Module of an object of the user's, as a run's run.json keeps it."""

    module: str
    version: str | None  # of the module, where it has one
    sha256: str | None  # of the module's file


def source(name: str) -> Source:
    """Origin of the object "module:name", which is where it is defined, or of a "module". ValueError, one line, if
    there is none."""
    within, named, _ = name.partition(":")
    defined = getattr(load(name) if named else imported(within), "__module__", None)
    module = sys.modules[defined if defined in sys.modules else within]
    path = getattr(module, "__file__", None)
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else None
    return Source(module.__name__, getattr(module, "__version__", None), digest)


def change(before: Mapping[str, Any] | None, now: Source | None) -> str | None:
    """One line where a run's module is not the one that it began with."""
    if now is None or not before or before["sha256"] in (None, now.sha256):
        return None
    versions = f" {before['version']} -> {now.version}" if before["version"] != now.version else ""
    return f"{now.module}{versions} has changed since this run began; what follows may not repeat it"
