"""Brax's SAC in turn with `longhaul bench sac`: its epochs are the repeats, between which it waits to be asked.

Its evaluations are left out, as ours are, and its replay begins as full as ours does. A function that JAX has no more,
without which the released Brax can't train at all, is put back (`jax.device_put_replicated`, Brax's issue 671).
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import turns
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def replicated(tree: Any, devices: Any) -> Any:
    sharding = NamedSharding(Mesh(np.array(devices), "i"), PartitionSpec("i"))
    return jax.tree.map(lambda x: jax.device_put(jnp.stack([jnp.asarray(x)] * len(devices)), sharding), tree)


if not hasattr(jax, "device_put_replicated"):
    jax.device_put_replicated = replicated

from brax import envs  # noqa: E402
from brax.training import acting, replay_buffers  # noqa: E402
from brax.training.agents.sac import networks  # noqa: E402
from brax.training.agents.sac import train as sac  # noqa: E402

WARM, MOST = 3, 200
"""Epochs before the first repeat, as Brax compiles anew in the second and third; and those that can be asked for."""

record = turns.about()
config = record["config"]
name, _, query = config["env"].partition("/")[2].partition("?")
options = dict(part.split("=") for part in query.split("&")) if query else {}
began, epochs, mark = time.perf_counter(), -1, (0.0, 0.0)


def progress(step: int, metrics: Any) -> None:
    """Answer to the repeat that has ended, and wait for the next."""
    global epochs, mark
    now, used = time.perf_counter(), turns.cpu_seconds()
    epochs += 1
    if epochs < WARM:
        return
    if epochs == WARM:
        turns.ready(now - began, ["jax", "brax"])
    else:
        turns.tell({"wall_seconds": now - mark[0], "cpu_seconds": used - mark[1]})
    if not sys.stdin.readline():
        sys.exit(0)
    mark = time.perf_counter(), turns.cpu_seconds()


empty = replay_buffers.UniformSamplingQueue.init


def full(self: Any, key: jax.Array) -> Any:
    state, filled = empty(self, key), jnp.int32(config["fill"] * self._data_shape[0])
    return state.replace(data=jax.random.uniform(key, self._data_shape), insert_position=filled)


if config["fill"]:
    replay_buffers.UniformSamplingQueue.init = full
acting.Evaluator.run_evaluation = lambda self, params, training_metrics, aggregate_episodes=True: dict(training_metrics)
hidden, prefill = (config["hidden_dim"],) * config["num_layers"], config["learning_starts"]
sac.train(
    envs.get_environment(name, **options), num_timesteps=prefill + (WARM + MOST) * record["steps"],
    episode_length=1000, num_envs=config["num_envs"], num_eval_envs=1, num_evals=1 + WARM + MOST,
    learning_rate=config["lr"], discounting=config["gamma"], batch_size=config["batch_size"], tau=config["tau"],
    min_replay_size=prefill, max_replay_size=config["replay_size"], grad_updates_per_step=config["gradient_steps"],
    max_devices_per_host=1, progress_fn=progress,
    network_factory=functools.partial(networks.make_sac_networks, hidden_layer_sizes=hidden),
)  # fmt: skip
