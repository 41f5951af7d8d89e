"""Policy of a run's folder, from its newest intact checkpoint."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms import registry
from longhaul.algorithms.context import Context
from longhaul.config.run import Run
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.errors import RunError
from longhaul.training import data as feeds
from longhaul.training import population, reasoning_setup
from longhaul.training.checkpoint.checkpoint import Checkpoints
from longhaul.training.run_dir import called, load_run
from longhaul.types import Params, Progress


def restore_policy(folder: Path, member: int | None = None) -> tuple[Run, Params, Params]:
    """(run, its policy from the newest intact checkpoint, the untrained policy), on the host, for evaluation.

    Only the policy is restored, without training data. In a folder of many runs it is that of `member`, and the
    returned run has its seed. Raises RunError if there is none.
    """
    run = load_run(folder)
    which = population.chosen(run, member, folder.name) if run.many or member is not None else None
    prepare_devices(run.all_devices, run.threads)
    if run.many:
        algorithm, begun = population.begun(run, feeds.spec(run))
    else:
        algorithm = registry.make(feeds.spec(run), run.algorithm, Context(updates=1, mean=meshes.identity))
        begun = jax.jit(algorithm.init)(jax.random.split(jax.random.key(run.seed), 3)[0])  # key as in `fused.start`
        begun = reasoning_setup.loaded(run, begun)
    progress = Progress(begun, (), (), jnp.int32(0))  # type: ignore[arg-type]
    with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        restored = checkpoints.latest(progress, part=True)
    if restored is None:
        raise RunError(
            f"{folder} has no checkpoint yet; go on with --resume {called(folder)}, or wait for its first save"
        )

    def acting(state: Any) -> Params:
        if run.many:
            state = jax.tree.map(lambda x: x[member], state)
        policy = algorithm.policy(state)
        return jax.tree.map(np.array, jax.device_get(policy.state if run.many else policy))

    if which is not None:
        run = dataclasses.replace(run, seed=which.seed)
    return run, acting(restored.progress.state), acting(begun)
