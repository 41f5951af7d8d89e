"""Rematerialisation: the same gradient of fewer kept numbers, its flags, and runs from before there were several."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.cli import flags, run_flags
from longhaul.config import recipes
from longhaul.networks import actor_critic
from longhaul.networks.config import REMATS
from longhaul.networks.layers import POLICIES
from longhaul.runtime import device_memory
from longhaul.runtime.config_fields import replaced
from longhaul.training import run_dir
from tests.helpers.quick import QUICK, quick
from tests.helpers.small_runs import small

SEEN = {"ego": jax.ShapeDtypeStruct((3,), jnp.float32), "items": jax.ShapeDtypeStruct((5, 4), jnp.float32)}
ROWS = 24

KINDS: dict[str, dict[str, Any]] = {
    "mlp": {"torso": "mlp"},
    "shared": {"torso": "mlp", "shared": True},
    "deepset": {"torso": "deepset"},
    "recurrent": {"torso": "deepset", "memory": 6},
    "latent": {"torso": "latent"},
    "mtr": {"torso": "mtr"},
}


def drawn(tree: Any, *lead: int, seed: int = 0, scale: float = 0.5) -> Any:
    """Numbers like the shapes of a pytree, with further axes in front."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=scale, size=(*lead, *x.shape)), jnp.float32), tree)


def objective(kind: str, remat: str, precision: str = "fp32") -> tuple[Any, Any]:
    """(parameters with life in them, what is to be descended: a loss of all that the network gives)."""
    network = actor_critic.actor_critic(
        SEEN, 3, sizes=(16, 16), activation="gelu", remat=remat, precision=precision, **KINDS[kind]
    )
    params, seen = drawn(jax.eval_shape(network.init, jax.random.key(0))), drawn(SEEN, ROWS, seed=1)
    memory = drawn(jax.eval_shape(lambda: network.memory(ROWS)), seed=2)

    def loss(params: Any) -> jax.Array:
        found = jax.tree.leaves(network.apply(params, memory, seen))
        return sum((jnp.sum(jnp.square(x)) for x in found), start=jnp.float32(0.0))

    return params, loss


def kept(kind: str, remat: str) -> int:
    """Bytes that the way forward keeps for the gradient, beside the parameters, by their shapes."""
    params, loss = objective(kind, remat)
    back = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(back))


def relative(one: Any, other: Any) -> float:
    """Relative distance of two pytrees."""
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    apart = sum(float(np.sum(np.square(np.asarray(a, np.float64) - np.asarray(b)))) for a, b in pairs)
    return (apart / sum(float(np.sum(np.square(np.asarray(b, np.float64)))) for _, b in pairs)) ** 0.5


# --------------------------------------------------------------------------------------------------- rematerialisation

DEAR = ("latent", "mtr")
"""Torsos that take long to compile; a wayformer's parts are theirs."""

CASES = [
    pytest.param(kind, remat, marks=[pytest.mark.slow] * (kind in DEAR))
    for kind, remat in [*((kind, "full") for kind in KINDS), ("shared", "dots"), ("latent", "dots-no-batch")]
]


@cache
def descended(kind: str, remat: str) -> Any:
    params, loss = objective(kind, remat)
    slope = jax.grad(loss)
    assert ("remat" in str(jax.make_jaxpr(slope)(params))) == (remat != "none")
    return quick(slope)(params)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "remat"), CASES)
def test_recomputation_gives_the_same_gradient(kind: str, remat: str) -> None:
    assert relative(descended(kind, remat), descended(kind, "none")) < 1e-6


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in DEAR)) for kind in KINDS])
def test_a_policy_keeps_what_it_says(kind: str) -> None:
    """Nothing but inputs, then products with kernels too, then all products, then everything."""
    none, full, dots, projections = (kept(kind, remat) for remat in REMATS)
    assert full < none
    assert full <= projections <= dots
    if kind in DEAR:
        assert full < 0.6 * none, "a block's input is a small part of what it computes"
        assert projections < dots < none, "attention's products are the difference"


def test_every_policy_has_a_flag_and_an_unknown_one_is_named() -> None:
    assert ("none", *POLICIES) == REMATS
    with pytest.raises(ValueError, match="remat is 'some'; it must be one of none, full, dots, dots-no-batch"):
        actor_critic.actor_critic(SEEN, 3, remat="some")


@pytest.mark.parametrize(
    ("words", "remat", "accumulate"),
    [
        ([], "none", None),
        (["--remat", "dots"], "dots", None),
        (["--remat=dots-no-batch", "--accumulate", "4"], "dots-no-batch", 4),
        (["--remat", "--micro-batches", "2"], "full", 2),
        (["--micro-batches=8", "--remat"], "full", 8),
        (["--remat", "true"], "full", None),
        (["--remat=false"], "none", None),
        (["--no-remat"], "none", None),
    ],
)
def test_flags_as_they_are_and_as_a_switch_once_was(words: list[str], remat: str, accumulate: int | None) -> None:
    recipe = recipes.recipe("driving")
    run = run_flags.chosen(recipe, flags.parse("train driving", "", run_flags.table(recipe), words))
    assert (run.algorithm.network.remat, run.algorithm.accumulate) == (remat, accumulate)


@pytest.mark.parametrize(("then", "now"), [(False, "none"), (True, "full")])
def test_run_files_from_before_still_say_how_to_go_on(tmp_path: Path, then: bool, now: str) -> None:
    run = small()
    run_dir.save_run(tmp_path, run, {})
    written = json.loads((tmp_path / "run.json").read_text())
    algorithm = written["run"]["algorithm"]
    algorithm |= algorithm.pop("network") | {"remat": then}
    del algorithm["accumulate"]
    (tmp_path / "run.json").write_text(json.dumps(written))
    assert run_dir.load_run(tmp_path) == replaced(run, remat=now, accumulate=None)


@pytest.mark.slow
def test_memory_falls_as_shapes_foretell() -> None:
    """A quarter of the rows at once need a quarter of what is kept; blocks computed again keep their inputs alone."""
    rows, need = 512, {}
    for remat, accumulate in (("none", 1), ("none", 4), ("full", 1)):
        network = actor_critic.actor_critic(SEEN, 3, torso="latent", sizes=(32, 32, 32), remat=remat)
        params, seen = jax.eval_shape(network.init, jax.random.key(0)), drawn(SEEN, accumulate, rows // accumulate)

        def slope(params: Any, seen: Any, network: Any = network) -> Any:
            def add(total: Any, part: Any) -> tuple[Any, None]:
                one = jax.grad(lambda p: jnp.sum(network.apply(p, (), part)[0]))(params)
                return jax.tree.map(jnp.add, total, one), None

            return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), seen)[0]

        found = device_memory.need(jax.jit(slope).lower(params, seen).compile(compiler_options=QUICK))
        assert found is not None
        need[remat, accumulate] = found.temporaries
    assert 0.2 < need["none", 4] / need["none", 1] < 0.35
    assert need["full", 1] < 0.6 * need["none", 1]
