"""Benchmarks of the replay, and of learning from it.

Of the replay: rows added and samples drawn in turn, in one compiled loop. flashbax, another library's replay, does the
same work under its own Python: rows of the same size into a buffer of as many steps, samples of as many pairs,
priorities of as many set. It keeps items as they are, so that both keep float32.

A bare case does nothing but look up as many pairs of rows at random in an array of the ring's size and fill: what the
machine's memory alone makes of it, beside which the replay's own cost is to be read.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

from longhaul import prng
from longhaul import replay as replays
from longhaul.algorithms import off_policy
from longhaul.algorithms.config import SACConfig
from longhaul.bench.cases.training import Prepared, peak_bytes, training
from longhaul.config import recipes
from longhaul.config.run import Named, Run
from longhaul.replay import Cursor, Ring, Sizes
from longhaul.spaces import Discrete
from longhaul.types import Local, PyTree, Rollout, Spec, Successors

INTERVAL = 1000
"""Steps between truncations of the worlds that the replay is for."""


def replay(
    columns: int, width: int, size: int, batch: int, iterations: int, half: bool, fill: float, kind: str
) -> Prepared:  # fmt: skip
    """`iterations` times: a row of `columns` steps of `width` floats added, `batch` steps sampled and summed.

    Before that a share `fill` of the ring of `size` steps is taken to be filled; of random numbers, which cost as much.
    """
    prioritised = kind == "prioritised"
    config = {
        "columns": columns, "width": width, "size": max(2, size // columns) * columns, "batch": batch,
        "iterations": iterations, "prioritised": prioritised, "half": half, "fill": fill, "bare": kind == "bare",
    }  # fmt: skip
    if kind == "bare":
        return _bare(config)
    spec = Spec(jax.ShapeDtypeStruct((width,), jnp.float32), Discrete(18), None, INTERVAL, None)
    action = jax.ShapeDtypeStruct((), jnp.uint8)
    store = replays.replay(spec, action, Sizes(1, columns, 1), size, half=half, prioritised=prioritised)
    fill_rows = max(1, int(fill * store.rows))

    def rollout(key: jax.Array) -> Rollout:
        seen = jax.random.normal(key, (1, columns, width))
        none = jnp.zeros((1, columns), bool)
        successors = Successors(seen[0], seen)
        return Rollout(
            seen, jnp.zeros((1, columns), jnp.int32), seen[..., 0], none, none, ~none, (), successors, (), jnp.int32(0)
        )

    def once(i: jax.Array, carried: Any) -> Any:
        ring, cursor, total, data, key = carried
        new = data._replace(observation=data.observation + total)  # what is added is not known before
        ring, cursor = store.add(ring, cursor, new._replace(successors=Successors(new.observation[0], new.observation)))
        sample = store.sample(ring, cursor, jax.random.fold_in(key, i), batch, 0.4)
        seen = jnp.sum(sample.observation) + jnp.sum(sample.successor) + jnp.sum(sample.weight)
        ring = store.prioritise(ring, sample, jnp.abs(sample.rewards[0]) + 0.1)
        return ring, cursor, 1e-9 * seen, data, key

    def many(ring: Ring, cursor: Any, data: Rollout, key: jax.Array) -> Any:
        return jax.lax.fori_loop(0, iterations, once, (ring, cursor, jnp.float32(0.0), data, key))[:3]

    def filled(key: jax.Array) -> Any:
        ring = jax.tree.map(lambda x: x[0], store.start())
        data = rollout(key)

        def add(_: jax.Array, carried: tuple[Ring, replays.Cursor]) -> tuple[Ring, replays.Cursor]:
            ring, cursor = carried
            return store.add(ring, cursor, data)

        return jax.lax.fori_loop(0, fill_rows, add, (ring, replays.start_cursor()))

    ring, cursor = jax.block_until_ready(jax.jit(filled)(jax.random.key(0)))
    data, held = rollout(jax.random.key(1)), sum(x.nbytes for x in jax.tree.leaves(ring))
    began = time.perf_counter()
    program = jax.jit(many, donate_argnums=0).lower(ring, cursor, data, jax.random.key(0)).compile()
    compiled = time.perf_counter() - began
    state = [ring, cursor]
    del ring

    def work(key: jax.Array) -> dict[str, float]:
        state[0], state[1], total = program(state[0], state[1], data, key)
        jax.block_until_ready(total)
        return {"peak_bytes": peak_bytes(), "ring_bytes": float(held)}

    config |= {"size": store.rows * columns}
    return Prepared(config, iterations * batch, "sampled steps", compiled, jax.random.key, work)


def _bare(config: dict[str, Any]) -> Prepared:
    """`iterations` times `batch` rows and those after them, looked up at random and summed; nothing is written."""
    columns, batch, iterations = config["columns"], config["batch"], config["iterations"]
    rows = config["size"] // columns
    filled = max(2, int(config["fill"] * rows))
    store = jnp.zeros((rows, columns, config["width"]), jnp.uint16 if config["half"] else jnp.float32)

    def once(i: jax.Array, carried: Any) -> Any:
        store, total, key = carried
        drawn = prng.bits(jax.random.fold_in(key, i), (2, batch))
        row, column = ((x % jnp.uint32(n)).astype(jnp.int32) for x, n in zip(drawn, (filled - 1, columns), strict=True))
        # Places follow from the sum before, as a learner's do from its parameters: no look-up begins ahead of its time.
        row = row + (total > 1e30)
        seen = store[row, column].astype(jnp.float32), store[row + 1, column].astype(jnp.float32)
        return store, total + jnp.sum(seen[0]) + jnp.sum(seen[1]), key

    def many(store: jax.Array, key: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, iterations, once, (store, jnp.float32(0.0), key))[1]

    store = jax.block_until_ready(jax.jit(lambda x: x + 1)(store))  # written, so that each page is there
    began = time.perf_counter()
    program = jax.jit(many).lower(store, jax.random.key(0)).compile()
    compiled = time.perf_counter() - began

    def work(key: jax.Array) -> dict[str, float]:
        jax.block_until_ready(program(store, key))
        return {"ring_bytes": float(store.nbytes)}

    return Prepared(config, iterations * batch, "sampled steps", compiled, jax.random.key, work)


def sac(
    total_steps: int | None, devices: int | None, env: str | None, num_envs: int, gradient_steps: int, batch: int,
    size: int | None, fill: float, precision: str,
) -> Prepared:  # fmt: skip
    """Training by the recipe `pendulum-sac`; in another environment with Brax's networks, on one device by default.

    A share `fill` of the replay of `size` steps is taken to be filled, of random numbers: what is learnt from costs the
    same whatever it is, but some replays are dearer once they are full.
    """
    if env is None:
        run = dataclasses.replace(recipes.recipe("pendulum-sac"), total_steps=total_steps or 10_000, devices=devices)
        return training(run, "env steps", {})
    total_steps = total_steps or 256 * num_envs // gradient_steps
    settings = SACConfig(
        batch_size=batch, gradient_steps=gradient_steps, learning_starts=num_envs,
        replay_size=size or max(total_steps, 65_536),
        network=dataclasses.replace(SACConfig.network, precision=precision),
    )  # fmt: skip
    run = Run(
        "bench", Named(env), settings, total_steps=total_steps, num_envs=num_envs, num_steps=1, devices=devices or 1
    )
    prepared = training(run, "env steps", {"env": env, "fill": fill})
    full = jax.jit(lambda state: filled(state, fill), donate_argnums=0)

    def begin(number: int) -> PyTree:
        progress = prepared.begin(number)
        return progress._replace(state=full(progress.state)) if fill else progress

    return prepared._replace(begin=begin)


def filled(state: off_policy.State, fill: float) -> off_policy.State:
    """`state` with a share of its replay filled."""
    assert isinstance(state.replay, Local)
    ring, key = state.replay.value, jax.random.key(0)
    seen, action = (
        jax.tree.map(lambda x: prng.uniform(key, x.shape).astype(x.dtype), part)
        for part in (ring.observation, ring.action)
    )
    ring = ring._replace(observation=seen, action=action, ending=jnp.full_like(ring.ending, replays.ON))
    rows = ring.reward.shape[1]
    last = jnp.int32(min(int(fill * rows), rows - 1))
    return state._replace(replay=Local(ring), cursor=Cursor(last, last))
