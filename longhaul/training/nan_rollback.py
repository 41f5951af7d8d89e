"""Rollback of updates whose numbers are not finite.

Finiteness is computed on the device inside the compiled call and read with the metrics. A run with such an update goes
back to the checkpoint before it and continues with other random numbers, a *detour*: the number of detours is folded
into the run's key and stored in run.json and every later checkpoint, so that resuming stays exact.

`poison/UPDATE` in the run's folder is itself a run at that checkpoint, with no detours left: resuming it repeats the
update.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from longhaul.config.run import Run
from longhaul.runtime import bounded_json, pytree_serialization
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError
from longhaul.runtime.provenance import params_sha256
from longhaul.topologies import fused
from longhaul.training.checkpoint.checkpoint import Checkpoint
from longhaul.training.run_dir import write_json
from longhaul.types import Progress

FOLDER = "poison"

DETOURS = 2**32 - 2
"""Constant folded into the run's key for detours: no update has this number, nor `fused.ENTRIES`."""


class Poisoned(Exception):
    """An update whose parameters or metrics are not finite."""

    def __init__(self, update: int, metrics: dict[str, float], progress: Progress):
        super().__init__(update)
        self.update = update
        self.metrics = metrics
        self.progress = progress  # possibly some updates later
        self.before: Checkpoint | None = None  # the newest intact checkpoint

    def names(self) -> str:
        odd = [name for name, value in self.metrics.items() if not math.isfinite(value)]
        return ", ".join(odd[:3]) + ", ..." * (len(odd) > 3) if odd else "the parameters"


def look(rows: Mapping[str, np.ndarray], n: int, update: int, progress: Progress) -> dict[str, np.ndarray]:
    """Rows without the finiteness row. Raises Poisoned for the first of the n updates up to `update` that is not
    finite."""
    sound, rest = rows[fused.FINITE], {name: values for name, values in rows.items() if name != fused.FINITE}
    if not np.all(sound[:n]):
        first = int(np.argmin(sound[:n]))
        values = {name: float(values[first]) for name, values in rest.items() if not name.startswith("peak/")}
        raise Poisoned(update - n + first + 1, values, progress)
    return rest


def detours(folder: Path) -> int:
    """Number of detours of a run so far."""
    return len(bounded_json.read(folder / "run.json").get("detours", ()))


def around(progress: Progress, checkpoint: Checkpoint | None, detours: int, mesh: Mesh) -> Progress:
    """Progress of a checkpoint (None: of the start) after the run's last detour."""
    if detours == (checkpoint.metadata.get("detours", 0) if checkpoint else 0):
        return progress
    key = jax.random.fold_in(jax.random.fold_in(progress.key, DETOURS), detours)
    return progress._replace(key=meshes.everywhere(key, mesh))


def keep(run: Run, folder: Path, poisoned: Poisoned) -> tuple[int, str]:
    """(number of detours with this one, message), after the evidence is kept and the detour recorded.

    Raises RunError after `run.rollbacks` detours.
    """
    path = folder / "run.json"
    about: dict[str, Any] = bounded_json.read(path)
    taken, since = about.get("detours", []), poisoned.before
    where = _new_folder(folder / FOLDER, poisoned.update)
    back = since.step if since else 0
    state = jax.tree.map(meshes.local_part, poisoned.progress.state)
    odd = {  # the elements of each leaf that are not finite
        name: f"{count} of {leaf.size}"
        for name, leaf in pytree_serialization.name(state).items()
        if jnp.issubdtype(leaf.dtype, jnp.floating) and (count := int(np.sum(~np.isfinite(leaf.astype(np.float32)))))
    }
    after = int(poisoned.progress.updates.addressable_data(0))
    facts = {
        "update": poisoned.update,
        "metrics": {name: v if math.isfinite(v) else str(v) for name, v in poisoned.metrics.items()},
        "state": {"after": after, "sha256": params_sha256(state), "not_finite": odd},
    }
    write_json(where / "poison.json", facts | {"checkpoint": back, "detours": len(taken)})
    for name in ("metrics.jsonl", *([f"checkpoints/{since.name}"] if since else [])):
        if (folder / name).exists():
            _link(folder / name, where / name)
    changed = {"changed": {"rollbacks": [run.rollbacks, 0]}, "update": back}
    write_json(where / "run.json", about | {
        "id": where.name, "run": about["run"] | {"rollbacks": 0}, "history": [*about.get("history", ()), changed],
    })  # fmt: skip
    event = f"update {poisoned.update} made numbers that are not finite ({poisoned.names()}); kept in {where}"
    if len(taken) >= run.rollbacks:
        before = f", after {len(taken)} detours of {run.rollbacks}" if taken else ""
        raise RunError(
            f"{event}{before}; lower --lr or --max-grad-norm, see to the rewards, or allow more --rollbacks "
            f"(now {run.rollbacks})"
        )
    entry = {"update": poisoned.update, "checkpoint": back, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    write_json(path, about | {"detours": [*taken, entry]})
    count = len(taken) + 1
    return count, f"{event}; goes on from update {back} with other random numbers ({count} of {run.rollbacks})"


def _new_folder(parent: Path, update: int) -> Path:
    for attempt in range(1, 1000):
        folder = parent / (str(update) if attempt == 1 else f"{update}.{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise RunError(f"{parent} holds a thousand folders of update {update}; remove some")


def _link(source: Path, target: Path) -> None:
    """Link a checkpoint's files, which never change; copy files that grow."""
    if not source.is_dir():
        shutil.copy2(source, target)
        return
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except OSError:  # a file system without links
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
