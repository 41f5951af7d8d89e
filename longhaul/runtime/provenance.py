"""Provenance of a result: versions, machine, commit, command line, and a digest of the parameters."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

import longhaul
from longhaul.runtime import pytree_serialization
from longhaul.types import PyTree

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")


def provenance() -> dict[str, Any]:
    """Provenance as JSON can hold it; unknown values are None. Starts JAX's backend, to name the devices."""
    devices = [device.device_kind for device in jax.devices()]
    return {
        "versions": {"longhaul": longhaul.__version__, **{name: metadata.version(name) for name in PACKAGES}},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": {kind: devices.count(kind) for kind in sorted(set(devices))},
        "commit": commit(Path(longhaul.__file__).resolve().parent),
        "command": list(sys.argv),
    }


def commit(package: Path) -> str | None:
    """Commit of the checkout whose root holds the folder `package`, with "+" if its files differ from it.

    None outside a checkout of its own: installed packages may lie below another one.
    """
    root = package.parent
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", package.name)
    return head + ("+" if changed else "")


def params_sha256(params: PyTree) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the leaves in sorted order of names.

    Equal exactly if the parameters are equal bit for bit, on any device. Names are the leaves' paths.
    """
    arrays, table = pytree_serialization.split(params)
    digest = hashlib.sha256()
    for name in sorted(table):
        entry = table[name]
        data = np.asarray(arrays[name]).tobytes() if name in arrays else entry.get("value", "").encode()
        for part in (name, entry["dtype"], repr(entry["shape"])):
            digest.update(part.encode() + b"\0")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _git(root: Path, *words: str) -> str | None:
    """Git's output; None if there is no git, or it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
