"""Objects of the user's own modules by "package.module:name"."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any


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
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever a module raises as it is imported
        line = (str(error).strip().splitlines() or [""])[0]
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        remedy = "; run from the folder that has it, install it, or add its folder to PYTHONPATH" if missing else ""
        raise ValueError(f"{module} can't be imported: {type(error).__name__}: {line}{remedy}") from error
    there = [each for each in vars(found) if not each.startswith("_")]
    for part in path.split("."):
        if part not in dir(found):
            near = difflib.get_close_matches(path, there, n=3, cutoff=0.5)
            if module == "__main__":
                raise ValueError(f"a notebook or a script has defined {path}; go on with longhaul.resume there")
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(there[:8]) or 'nothing'}"
            raise ValueError(f"{module} has no {path}; {hint}")
        found = getattr(found, part)
    return found
