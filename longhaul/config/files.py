"""Settings of a run in a file: YAML, TOML or JSON, or another run's run.json.

    recipe: ppo
    env: cartpole
    num_envs: 64
    algorithm:
      lr: 0.0003
      network: {hidden_dim: 128}

A setting stands under the name of its flag with underscores, alone or inside the config that it belongs to. `render`
writes every setting of a Run so that `read` gives the same Run.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from longhaul.algorithms import external
from longhaul.config import aliases
from longhaul.config.run import Run
from longhaul.runtime import config_fields
from longhaul.runtime.devices import MeshShape
from longhaul.runtime.errors import RunError
from longhaul.runtime.user_modules import is_named

FORMATS = (".yaml", ".yml", ".toml", ".json")

MOST_BYTES, MOST_VALUES = 1 << 18, 1 << 15
"""Bytes of a file, of which YAML's parser reads some 100,000 a second, and values that it may stand for. A run.json has
some kB and some hundred values."""

MOST_DEPTH = 100
"""Lists, tables and parts of a name within one another. Both parsers take the square of it in time."""

TOO_DEEP = "its parts are within one another without an end"


def load(path: Path) -> dict[str, Any]:
    """Content of a file, without what run.json has beside the Run. Raises RunError where it can't be read."""
    if path.suffix not in FORMATS:
        raise RunError(f"--config is {path}; its suffix must be one of {', '.join(FORMATS)}")
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ValueError(f"it has {size:,} bytes; settings have at most {MOST_BYTES:,}")
        text = path.read_text("utf-8-sig")
        _check_depth(text)
        content = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except FileNotFoundError as error:
        raise RunError(f"--config {path} is not there: check the path") from error
    except (OSError, ValueError) as error:
        raise RunError(
            f"--config {path} can't be read: {' '.join(str(error).split())}; correct it, or write one by --print-config"
        ) from error
    except RecursionError as error:
        raise RunError(f"--config {path} can't be read: {TOO_DEEP}; write one by --print-config") from error
    if not isinstance(content, dict):
        raise RunError(f"--config {path} holds a {type(content).__name__}; it must be settings by name")
    if "format" in content and isinstance(content.get("run"), dict):  # run.json
        return dict(content["run"])
    return content


def _check_depth(text: str) -> None:
    """Raises ValueError for a text with more than MOST_DEPTH brackets within one another, or parts of a dotted name."""
    depth = 0
    for bracket in re.findall(r"[][{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        if depth > MOST_DEPTH:
            raise ValueError(TOO_DEEP)
    plain = re.sub(r"""\"(?:[^"\\\n]|\\.)*\"|'[^'\n]*'""", "a", text)  # a part of a name may be any text in quotes
    if any(name.count(".") > MOST_DEPTH for name in re.findall(r"[\w. \t-]+", plain)):
        raise ValueError(TOO_DEEP)


def _yaml(text: str) -> Any:
    """Content of YAML, and so of JSON; 1e-3 is a number, which YAML 1.1 takes for a text."""
    import yaml

    class Loader(yaml.SafeLoader):
        flat = 0

        def flatten_mapping(self, node: Any) -> None:  # of the merge key <<, which doubles what it names twice
            super().flatten_mapping(node)
            self.flat += len(node.value)
            if self.flat > MOST_VALUES:
                raise ValueError(f"its merge keys stand for more than {MOST_VALUES:,} values")

    try:
        content = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return _numbers(content, itertools.count())


def _numbers(value: Any, counted: Iterator[int]) -> Any:
    if next(counted) > MOST_VALUES:  # an alias of aliases stands for any number of values
        raise ValueError(f"it stands for more than {MOST_VALUES:,} values")
    if isinstance(value, dict):
        return {key: _numbers(inner, counted) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner, counted) for inner in value]
    if isinstance(value, int) and value.bit_length() > 64:  # YAML reads 59:59:59 as a number, too
        raise ValueError(f"a number has {value.bit_length():,} bits; 64 are possible")
    if isinstance(value, str) and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def read(content: Mapping[str, Any], recipe: Run, path: Path) -> dict[str, Any]:
    """Settings of a file's content by the names of their flags with underscores, for a recipe.

    Raises RunError, with the nearest names, where a key is no setting.
    """
    known = {leaf.name: leaf for leaf in config_fields.walk(recipe)}
    by_path = {leaf.path: leaf.name for leaf in known.values()}
    inside = {leaf.path[:depth] for leaf in known.values() for depth in range(1, len(leaf.path))}
    renamed = aliases.aliases_of(recipe)
    settings: dict[str, Any] = {}

    def visit(tree: Mapping[str, Any], where: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            if not isinstance(key, str):
                raise RunError(f"--config {path}: {key!r:.80} is no name of a setting; longhaul train --help has them")
            place = (*where, key)
            if isinstance(value, dict) and (place in inside or key not in known):
                if place not in inside:
                    raise RunError(
                        f"--config {path}: {'.'.join(place)} is no part of recipe {recipe.recipe}; --print-config "
                        "shows its parts"
                    )
                yield from visit(value, place)
            elif place in by_path:
                yield by_path[place], value
            elif key in known or key in renamed:
                yield key, value
            elif key in ("kind", "recipe") or _field(recipe, place):
                continue  # of run.json: what is no setting is decided again
            else:
                hint = aliases.hint(recipe, key, f"longhaul train {recipe.recipe} --help")
                raise RunError(f"--config {path}: {'.'.join(place)} is no setting of recipe {recipe.recipe}; {hint}")

    for name, value in visit(content, ()):
        settings[name] = tuple(value) if isinstance(value, list) else value
    settings = aliases.canonical(recipe, settings)
    if isinstance(settings.get("sweep"), Mapping):
        settings["sweep"] = sweep(settings["sweep"])
    if "mesh" in settings:
        settings["mesh"] = mesh(settings["mesh"], content.get("model", 1), f"--config {path}: ")
    return settings


def algorithm(content: Mapping[str, Any]) -> str | None:
    """Name of the algorithm in a file's content, where it is the user's own."""
    inner = content.get("algorithm")
    kind = inner.get("kind") if isinstance(inner, dict) else None
    return str(kind) if kind is not None and is_named(str(kind)) else None


def _field(config: Any, place: tuple[str, ...]) -> bool:
    """True where a config, or one in it, has a field at this place."""
    for name in place[:-1]:
        config = getattr(config, name, None)
    return dataclasses.is_dataclass(config) and place[-1] in {field.name for field in dataclasses.fields(config)}


def mesh(value: Any, model: Any = 1, where: str = "") -> MeshShape:
    """ "data=2,model=1", {"data": 2}, 2 or None as a shape. RunError, which begins with `where`, for anything else."""
    try:
        if isinstance(value, str):
            value = dict(part.split("=") for part in value.split(","))
        if isinstance(value, dict):
            return MeshShape(int(value["data"]), int(value.get("model", 1)))
        return MeshShape(None if value is None else int(value), int(model))
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{where}mesh is {value!r}; write data=2 or data=2,model=2") from error


def sweep(values: Mapping[str, Any]) -> tuple[str, ...]:
    """{"lr": [0.001, 0.0003]} as --sweep has it: "lr=0.001,0.0003". A text stays: {"lr": "1e-4..1e-2:8"}."""

    def listed(some: Any) -> str:
        if isinstance(some, str):
            return some
        return ",".join(map(str, some)) if isinstance(some, Iterable) else str(some)

    return tuple(f"{name}={listed(some)}" for name, some in values.items())


def render(run: Run) -> str:
    """Every setting of a Run as YAML, as `load` reads it."""
    import yaml

    tree: dict[str, Any] = {"recipe": run.recipe}
    if external.is_own(type(run.algorithm)):
        tree["algorithm"] = {"kind": external.name_of(run.algorithm)}
    for leaf in config_fields.walk(run):
        *parents, last = leaf.path
        inner = tree
        for name in parents:
            inner = inner.setdefault(name, {})
        value = str(run.mesh) if leaf.name == "mesh" and run.devices else leaf.value
        inner["mesh" if leaf.name == "mesh" else last] = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=120)
    return text
