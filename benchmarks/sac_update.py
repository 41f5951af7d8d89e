"""Cost of SAC's update without physics, ours and Brax's: a row of steps added, then so many steps of the optimiser.

    python -m benchmarks.sac_update walker2d --peer-python PYTHON --json FILE

All at the same sizes, in turn, a process and a thread each: ours in float32, ours with --precision bf16, and Brax;
first with empty replays, then with full ones. Brax's losses and its replay are called as its `train` calls them, under
a Python that has it. `walker2d` has the sizes that Brax publishes for that task; `playground` those that MuJoCo
Playground publishes for the DeepMind Control Suite, without the layer norm of its critics. `whole` is a run of the
published length, in which the replay is full once so many steps were made.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from benchmarks import results
from longhaul.algorithms import registry
from longhaul.algorithms.config import SACConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.bench import harness
from longhaul.bench.cases import replay
from longhaul.bench.harness import Worker
from longhaul.replay import Sizes
from longhaul.runtime import mesh as meshes
from longhaul.spaces import Box
from longhaul.topologies import fused
from longhaul.types import Key, Progress, Rollout, Spec, Successors

WALKER = {"seen": 17, "action": 6, "worlds": 128, "batch": 128, "gradient_steps": 32, "size": 1 << 20, "run": 7_864_320}
"""`seen` and `action` are numbers of an observation and an action, `size` and `run` steps of the worlds."""

SETTINGS = {
    "walker2d": WALKER,
    "playground": WALKER | {"batch": 512, "gradient_steps": 8, "size": 1 << 22, "run": 5_000_000},
}

UPDATES = 2
"""Of a repeat."""


def prepared(about: dict[str, Any]) -> tuple[Callable[[int], None], Callable[[], None]]:
    """(what a repeat of ours does, compiled; what fills the replay)"""
    seen, action, worlds = about["seen"], about["action"], about["worlds"]
    spec = Spec(
        jax.ShapeDtypeStruct((seen,), jnp.float32), Box((-1.0,) * action, (1.0,) * action), truncation_interval=1000
    )
    config = SACConfig(
        batch_size=about["batch"], gradient_steps=about["gradient_steps"], learning_starts=worlds,
        replay_size=about["size"], network=replace(SACConfig.network, precision=about["precision"]),
    )  # fmt: skip
    mesh, mean = meshes.make_mesh(1), meshes.mean_over_data
    algorithm = registry.make(spec, config, RunContext(updates=1000, mean=mean, sizes=Sizes(1, worlds, 1)))

    def once(i: jax.Array, carried: tuple[Any, Key]) -> tuple[Any, Key]:
        state, key = carried
        key_seen, key_learn = jax.random.split(jax.random.fold_in(key, i))
        saw, no = jax.random.normal(key_seen, (1, worlds, seen)), jnp.zeros((1, worlds), bool)
        led = Successors(0.9 * saw[0], saw)
        data = Rollout(saw, jnp.tanh(saw[..., :action]), saw[..., 0], no, no, ~no, (), led, (), jnp.int32(0))
        return algorithm.learn(state, data, key_learn)[0], key

    def many(state: Any, key: Key) -> Any:
        return jax.lax.fori_loop(0, UPDATES, once, (state, key))[0]

    shapes = jax.eval_shape(algorithm.init, jax.random.key(0))
    lies = fused.layout(Progress(shapes, (), jax.random.key(0), jnp.int32(0))).state
    program = jax.jit(meshes.per_shard(many, mesh, (lies, PartitionSpec()), lies), donate_argnums=0)
    full = jax.jit(lambda state: replay.filled(state, 1.0), donate_argnums=0)
    state = jax.jit(algorithm.init)(jax.random.key(0))

    def work(number: int) -> None:
        nonlocal state
        state = jax.block_until_ready(program(state, jax.random.key(number)))

    def fill() -> None:
        nonlocal state
        state = jax.block_until_ready(full(state))

    return work, fill


def serve() -> None:
    """Work of a worker of ours, to its end: a repeat a line, before which it fills the replay if the line says so."""
    work, fill = prepared(json.loads(sys.argv[1]))
    work(0)
    harness.tell({})
    for i, line in enumerate(sys.stdin):
        if line == "fill\n":
            fill()
        used = harness.cpu_seconds()
        work(i + 1)
        harness.tell({"cpu_seconds": harness.cpu_seconds() - used})


BRAX = """
import json, resource, sys
about, updates = json.loads(sys.argv[1]), int(sys.argv[2])
import jax, jax.numpy as jnp, optax
from brax.training import gradients, replay_buffers, types
from brax.training.agents.sac import losses, networks
d, a, worlds = about["seen"], about["action"], about["worlds"]
made = networks.make_sac_networks(observation_size=d, action_size=a, preprocess_observations_fn=lambda x, _: x)
each = losses.make_losses(sac_network=made, reward_scaling=1.0, discounting=0.99, action_size=a)
adam = optax.adam(3e-4)
of_alpha, of_critic, of_actor = (gradients.gradient_update_fn(loss, adam, pmap_axis_name=None) for loss in each)
def transition(seen, action, reward, flag, led):
    extras = {"state_extras": {"truncation": flag}, "policy_extras": {}}
    return types.Transition(seen, action, reward, 1.0 - flag, led, extras)
one = transition(jnp.zeros(d), jnp.zeros(a), jnp.zeros(()), jnp.zeros(()), jnp.zeros(d))
buffer = replay_buffers.UniformSamplingQueue(about["size"], one, about["batch"] * about["gradient_steps"])
def sgd(carried, batch):
    (alpha, actor, critic, target, states), key = carried
    key, key_alpha, key_critic, key_actor = jax.random.split(key, 4)
    _, new_alpha, s0 = of_alpha(alpha, actor, None, batch, key_alpha, optimizer_state=states[0])
    weight = jnp.exp(alpha)
    more = critic, actor, None, target, weight, batch, key_critic
    told, new_critic, s1 = of_critic(*more, optimizer_state=states[1])
    _, new_actor, s2 = of_actor(actor, None, critic, weight, batch, key_actor, optimizer_state=states[2])
    target = jax.tree.map(lambda x, y: x * (1 - 0.005) + y * 0.005, target, new_critic)
    return ((new_alpha, new_actor, new_critic, target, (s0, s1, s2)), key), told
def once(carried, key):
    state, held = carried
    key_seen, key_learn = jax.random.split(key)
    seen = jax.random.normal(key_seen, (worlds, d))
    held = buffer.insert_internal(
        held, transition(seen, jnp.tanh(seen[:, :a]), seen[:, 0], jnp.zeros(worlds), 0.9 * seen))
    held, batch = buffer.sample_internal(held)
    batch = jax.tree.map(lambda x: x.reshape((about["gradient_steps"], -1) + x.shape[1:]), batch)
    (state, _), told = jax.lax.scan(sgd, (state, key_learn), batch)
    return (state, held), jnp.mean(told)
key = jax.random.PRNGKey(0)
alpha, actor, critic = jnp.float32(0.0), made.policy_network.init(key), made.q_network.init(key)
state, held = (alpha, actor, critic, critic, tuple(map(adam.init, (alpha, critic, actor)))), buffer.init(key)
carried = jax.tree.map(lambda x: jnp.array(x, copy=True), (state, held))
program = jax.jit(lambda carried, key: jax.lax.scan(once, carried, jax.random.split(key, updates)), donate_argnums=0)
def work(number):
    global carried
    carried, _ = jax.block_until_ready(program(carried, jax.random.PRNGKey(number)))
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
work(0)
print("figure {}", flush=True)
for i, line in enumerate(sys.stdin):
    if line == "fill\\n":
        state, held = carried
        random = jax.random.uniform(key, held.data.shape)
        carried = state, held.replace(data=random, insert_position=jnp.int32(about["size"]))
        del state, held, random
    used = cpu()
    work(i + 1)
    print("figure " + json.dumps({"cpu_seconds": cpu() - used}), flush=True)
"""


def measure(name: str, peer_python: str, repeats: int) -> dict[str, Any]:
    """CPU milliseconds of an update, medians of the repeats, and Brax's by ours, above 1 where we are cheaper."""
    sizes: dict[str, Any] = SETTINGS[name]
    variables = {"NPROC": "1", "JAX_PLATFORMS": "cpu", "LONGHAUL_CACHE": "off"}
    ours = [sys.executable, "-c", "from benchmarks.sac_update import serve; serve()"]
    commands = {each: [*ours, json.dumps(sizes | {"precision": each})] for each in ("fp32", "bf16")}
    commands["brax"] = [peer_python, "-c", BRAX, json.dumps(sizes), str(UPDATES)]
    costs: dict[str, dict[str, float]] = {}
    with ExitStack() as opened:
        workers = {who: opened.enter_context(Worker(command, {}, variables)) for who, command in commands.items()}
        for fill in ("empty", "full"):
            for each in workers.values():
                each.ask("fill" if fill == "full" else "go")  # not measured
            rows = [{who: each.ask()["cpu_seconds"] for who, each in workers.items()} for _ in range(repeats)]
            costs[fill] = {who: 1e3 * statistics.median(row[who] for row in rows) / UPDATES for who in workers}
    share = sizes["size"] / sizes["run"]  # of the run's steps, at the end of which the replay is full
    costs["whole"] = {who: share * costs["empty"][who] + (1.0 - share) * costs["full"][who] for who in commands}
    return {
        "name": f"sac-update-{name}", "config": sizes, "repeats": repeats,
        "cpu_milliseconds": {fill: {who: round(x, 2) for who, x in row.items()} for fill, row in costs.items()},
        "peer_cpu_ratio": {
            fill: {who: round(row["brax"] / row[who], 3) for who in ("fp32", "bf16")} for fill, row in costs.items()
        },
        "jax": jax.__version__,
    }  # fmt: skip


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("settings", choices=tuple(SETTINGS))
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--repeats", type=int, default=harness.LEAST_REPEATS)
    args = parser.parse_args()
    results.emit(measure(args.settings, args.peer_python, args.repeats), args.json)


if __name__ == "__main__":
    main()
