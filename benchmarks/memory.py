"""Share that an update's learning takes of a device's memory, by precision, accumulation and rematerialisation.

    python -m benchmarks.memory [--torso latent] [--size 0.3] [--rows 1024] [--seconds] [--json FILE]

One JSON object a line: `temp_bytes`, what the compiler needs beside arguments and outputs of PPO's `learn` with the
settings of the recipe `driving`, an encoder by attention, and two minibatches of `--rows` steps; `predicted_bytes`
by shapes alone, before anything is compiled:

    rows / accumulate x (what the way forward keeps of a row + what the widest part that is computed again needs)

With --seconds every program is run, too, and `cpu_seconds` of an update are told. Without, the compiler's last steps,
which change no buffer, are left out, for its sake.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import results
from longhaul.algorithms import actor_critic as algorithms_actor_critic
from longhaul.algorithms import ppo
from longhaul.algorithms.actor_critic import Policy
from longhaul.algorithms.config import PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.bench.harness import cpu_seconds
from longhaul.config import recipes
from longhaul.driving.sim import observation
from longhaul.networks import actor_critic
from longhaul.runtime import config_fields, device_memory, mesh
from longhaul.runtime.provenance import provenance
from longhaul.spaces import Discrete
from longhaul.types import Algorithm, PyTree, Rollout, Spec, Successors

STEPS, MINIBATCHES, REPEATS = 32, 2, 3

SPEC = Spec(observation.shapes(16, 10, 64), Discrete(91), agents=1)
"""What an agent sees of 16 others, 10 points of its route and 64 pieces of road; its actions as the recipe has them."""


def config(args: argparse.Namespace, precision: str, accumulate: int, remat: str) -> PPOConfig:
    return config_fields.replaced(
        recipes.recipe("driving").algorithm, torso=args.torso, model_size=args.size, num_minibatches=MINIBATCHES,
        update_epochs=1, chunk=args.rows, precision=precision, accumulate=accumulate, remat=remat,
    )  # fmt: skip


def experience(algorithm: Algorithm, state: PyTree, rows: int) -> Rollout:
    """Shapes of MINIBATCHES x `rows` agent steps."""
    columns = MINIBATCHES * rows // STEPS

    def like(*lead: int) -> PyTree:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), SPEC.observation)

    def of(kind: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((STEPS, columns), kind)

    acted = jax.eval_shape(algorithm.act, algorithm.policy(state), (), like(columns), jax.random.key(0))
    extras = jax.tree.map(lambda x: jax.ShapeDtypeStruct((STEPS, *x.shape), x.dtype), acted[2])
    successors = Successors(like(columns), like(1, columns))
    return Rollout(
        like(STEPS, columns), of(jnp.int32), of(jnp.float32), of(bool), of(bool), of(bool), extras, successors, (),
        jax.ShapeDtypeStruct((), jnp.int32),
    )  # fmt: skip


def predicted(config: PPOConfig, rows: int) -> int:
    """Bytes that the gradient of `rows` rows at once takes, by shapes."""
    network = algorithms_actor_critic.network(SPEC, config)
    params = jax.eval_shape(network.init, jax.random.key(0))
    seen = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), SPEC.observation)

    def value(params: PyTree, seen: PyTree) -> jax.Array:
        parameters, value, _ = network.apply(Policy(params, ()), (), seen)
        return jnp.sum(parameters) + jnp.sum(value)

    kept = jax.eval_shape(lambda p, x: jax.vjp(lambda p: value(p, x), p)[1], params, seen)
    remade = [_kept(each) for each in _parts(jax.make_jaxpr(value)(params, seen).jaxpr)]
    return _bytes(kept) - _bytes(params) + max(remade, default=0)


def _parts(jaxpr: Any) -> Iterator[Any]:
    """The equations of what is computed again, loops and all."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("checkpoint", "remat", "remat2"):
            yield equation
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _parts(inner)


def _kept(equation: Any) -> int:
    """Bytes that a part keeps, computed once more, beside its arguments."""
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]

    def run(*values: Any) -> Any:
        return jax.core.eval_jaxpr(equation.params["jaxpr"], (), *values)

    return max(0, _bytes(jax.eval_shape(lambda *x: jax.vjp(run, *x)[1], *shapes)) - _bytes(shapes))


def _bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def filled(shapes: PyTree, seed: int = 0) -> PyTree:
    """Arrays of these shapes with numbers that no step is odd by."""
    rng = np.random.default_rng(seed)

    def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
        drawn = rng.normal(scale=0.1, size=x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape)
        return jnp.asarray(drawn + (x.dtype == bool), x.dtype)

    return jax.tree.map(fill, shapes)


def figure(args: argparse.Namespace, precision: str, accumulate: int, remat: str) -> dict[str, Any]:
    ppo_config = config(args, precision, accumulate, remat)
    algorithm = ppo.ppo(SPEC, ppo_config, RunContext(updates=100, mean=mesh.identity))
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    data = experience(algorithm, state, args.rows)
    lowered = jax.jit(algorithm.learn, donate_argnums=0).lower(state, data, jax.random.key(0))
    quick: Any = {} if args.seconds else {"xla_backend_optimization_level": 0}
    program = lowered.compile(compiler_options=quick)
    need = device_memory.need(program)
    assert need is not None
    record: dict[str, Any] = {
        "name": "memory", "precision": precision, "accumulate": accumulate, "remat": remat,
        "temp_bytes": need.temporaries, "predicted_bytes": predicted(ppo_config, args.rows // accumulate),
    }  # fmt: skip
    if args.seconds:
        now, batch, used = filled(state), filled(data, 1), []
        for _ in range(REPEATS + 1):
            before = cpu_seconds()
            now, _ = jax.block_until_ready(program(now, batch, jax.random.key(0)))
            used.append(cpu_seconds() - before)
        record["cpu_seconds"] = statistics.median(used[1:])
    return record | {
        "torso": args.torso, "parameters": actor_critic.count(state.params), "rows": args.rows,
        "minibatches": MINIBATCHES,
    }  # fmt: skip


def main() -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--torso", default="latent", choices=actor_critic.TORSOS)
    parser.add_argument("--size", type=float, default=0.3, help="million parameters")
    parser.add_argument("--rows", type=int, default=1024, help="agent steps of a minibatch")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--accumulate", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--remat", nargs="+", default=["none", "full"])
    parser.add_argument("--seconds", action="store_true", help="run them, too")
    args = parser.parse_args()
    for each in itertools.product(args.precision, args.accumulate, args.remat):
        results.emit(figure(args, *each) | {"device": provenance()["devices"]}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
