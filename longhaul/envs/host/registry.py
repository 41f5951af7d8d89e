"""Environments on the host by name: Gymnasium's, Atari's, EnvPool's, batched NumPy and torch ones, and our own.

A plain table: to add a kind, write the function that makes it and one line here. Nothing is imported before it is
needed, JAX least of all.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from longhaul.envs.host import vector as vectors
from longhaul.envs.host.vector import Description, HostVector

if TYPE_CHECKING:
    from longhaul import types


class Kind(NamedTuple):
    module: str  # with a function (name, num_envs, seed, **options) -> HostVector
    function: str
    needs: tuple[str, ...]  # what must be importable
    install: str  # how to get it; "" where it is always there
    example: str
    about: str


KINDS: dict[str, Kind] = {
    "gymnasium": Kind(
        "longhaul.envs.host.gymnasium_vector", "gymnasium", ("gymnasium",), "longhaul-rl[host]",
        "gymnasium/CartPole-v1", "Gymnasium's registry: its own vector form where there is one, else a loop",
    ),
    "vector": Kind(
        "longhaul.envs.host.gymnasium_vector", "vector", ("gymnasium",), "longhaul-rl[host]", "vector/my_package:make",
        "any Gymnasium vector environment, in any autoreset mode",
    ),
    "single": Kind(
        "longhaul.envs.host.gymnasium_vector", "single", ("gymnasium",), "longhaul-rl[host]", "single/my_package:Env",
        "any Gymnasium environment by its class or a function, in a loop; my_package:Env means the same",
    ),
    "parallel": Kind(
        "longhaul.envs.host.parallel_vector", "parallel", ("gymnasium",), "longhaul-rl[host]",
        "parallel/my_package:env", "PettingZoo's ParallelEnv; an agent is a column; my_package:env means the same",
    ),
    "ale": Kind(
        "longhaul.envs.host.gymnasium_vector", "ale", ("gymnasium", "ale_py"), "longhaul-rl[host]", "ale/pong",
        "Atari by ale_py's vector environment",
    ),
    "envpool": Kind(
        "longhaul.envs.host.gymnasium_vector", "envpool", ("gymnasium", "envpool"), "longhaul-rl[envpool]",
        "envpool/Pong-v5", "EnvPool, synchronous",
    ),
    "torch": Kind(
        "longhaul.envs.host.torch_vector", "torch", ("gymnasium", "torch"), "longhaul-rl[host] torch",
        "torch/my_package:make", "vector environments of torch tensors, as Isaac Lab has them",
    ),
    "numpy": Kind(
        "longhaul.envs.host.vector", "numpy", (), "", "numpy/longhaul.envs.host.numpy_cartpole:cartpole",
        "any batched NumPy environment that keeps the protocol Batched",
    ),
    "jax": Kind(
        "longhaul.envs.host.jax_vector", "named", (), "", "jax/cartpole",
        "Longhaul's own environments, stepped in batches by a compiled call",
    ),
    "driving": Kind(
        "longhaul.envs.host.driving_vector", "driving", (), "", "driving/generated",
        "driving in generated scenarios, or driving/PATH in logs; an agent is a column",
    ),
}  # fmt: skip

COMPILED = ("jax", "driving")
"""Kinds whose steps are programs of JAX."""

FORMER = {"longhaul.envs.batched:cartpole": "longhaul.envs.host.numpy_cartpole:cartpole"}
"""Names in run folders of earlier versions -> the names of today."""


def is_hosted(name: str) -> bool:
    """True if a name is that of an environment on the host: "kind/name"."""
    return name.partition("/")[0] in KINDS


def describe(name: str, **options: Any) -> Description:
    """ "kind/name" as plain data; options may follow it as in an address. ValueError where there is no such kind.

    Example: "ale/pong?img_height=42&img_width=42". Values are Python's literals, or else text.
    """
    path, written = with_options(name)
    kind, _, rest = path.partition("/")
    if path in KINDS:
        raise ValueError(f"{name!r} is a kind of environments on the host; write one of them: {KINDS[path].example}")
    if kind not in KINDS or not rest:
        raise ValueError(f"{name!r} is no environment on the host; write KIND/NAME, KIND one of {', '.join(KINDS)}")
    return Description(kind, FORMER.get(rest, rest), tuple(sorted((written | options).items())))


def address(description: Description) -> str:
    """The same as text, from which `describe` makes it."""
    written = "&".join(f"{key}={_written(value)}" for key, value in description.options)
    return f"{description}?{written}" if written else str(description)


def _written(value: Any) -> str:
    """Text that `_literal` reads as `value`, with as few quotes of the shell's as it can have."""
    if isinstance(value, str) and _literal(value) == value:
        return value
    return repr(value).replace("'", '"') if isinstance(value, dict) else repr(value)


def with_options(name: str) -> tuple[str, dict[str, Any]]:
    """(a name, the options written behind it)."""
    path, _, query = name.partition("?") if _QUERY.search(name) else (name, "", "")
    return path, {key: _literal(text) for key, text in (pair.split("=", 1) for pair in query.split("&") if pair)}


_QUERY = re.compile(r"\?\w+=[^&]*(&\w+=[^&]*)*$")
"""Options at the end of a name; other question marks are a path's."""


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def make(description: Description, num_envs: int, seed: int = 0) -> HostVector:
    """`num_envs` worlds of it, not begun yet. ValueError, one line, where it can't be."""
    if num_envs < 1:
        raise ValueError(f"num_envs is {num_envs}; at least 1 environment is needed")
    kind = KINDS[description.kind]
    lacking = missing(kind)
    if lacking:
        raise ValueError(f"{description} needs {' and '.join(lacking)}: pip install {kind.install}")
    function = vars(importlib.import_module(kind.module))[kind.function]
    try:
        return function(description.name, num_envs, seed, **dict(description.options))
    except TypeError as error:
        if "argument" in str(error):  # an option that it does not take
            raise ValueError(f"{description}: {error}") from error
        raise


def specification(vector: HostVector) -> types.Spec:
    """Spec of a vector for algorithms: of our own environments all they say, packed observations among it."""
    from longhaul.envs.host.jax_vector import JaxVector

    return vector.programs.environment.spec if isinstance(vector, JaxVector) else vectors.specification(vector.spec)


def missing(kind: Kind) -> list[str]:
    """Needed modules that are not installed."""
    return [name for name in kind.needs if importlib.util.find_spec(name) is None]


def names() -> list[tuple[str, str]]:
    """An example of every kind with one line about it, and what to install where something is missing."""
    rows = []
    for kind in KINDS.values():
        lacking = missing(kind)
        about = f"{kind.about}; needs {' and '.join(lacking)}: pip install {kind.install}" if lacking else kind.about
        rows.append((kind.example, about))
    return rows
