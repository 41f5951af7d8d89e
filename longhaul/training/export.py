"""Export of a trained policy: a program that needs JAX alone, or its arrays in a file.

    policy.jax           the policy's mode as a program of jax.export, for a batch of any size on CPU, GPU and TPU
    policy.safetensors   the arrays by name, as --init-from reads them; also policy.npz
    policy.json          names, shapes and types of what goes in and comes out; the run, its digest

A program takes {name: array [B, ...]} and returns the action [B, ...]; of a policy with a memory it takes and returns
that, too. It is checked in a process of its own, which imports JAX and not Longhaul: it must give the same actions.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.runtime import pytree_serialization
from longhaul.runtime.errors import RunError
from longhaul.runtime.provenance import params_sha256
from longhaul.training.api import Policy
from longhaul.training.init_from import dotted
from longhaul.training.run_dir import write_json
from longhaul.types import PyTree

KINDS = ("jax", "safetensors", "npz")

PLATFORMS = ("cpu", "cuda", "tpu")
"""Platforms that an exported program runs on."""

CHECKED = 7
"""Observations of the check; an odd number, which no program was compiled for."""

RUNNER = """
import sys
import jax, numpy as np
from jax import export
program = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
given = dict(np.load(sys.argv[2]))
seen = {name[1:]: value for name, value in given.items() if name[0] == "o"}
memory = {name[1:]: value for name, value in given.items() if name[0] == "m"}
action, after = program.call(seen, memory) if memory else (program.call(seen), {})
assert not [name for name in sys.modules if name.startswith("longhaul")]
np.savez(sys.argv[3], action=np.asarray(action), **{"m" + name: np.asarray(x) for name, x in after.items()})
"""
"""Program of the process that checks an export, with paths of the export, its input and its output."""


def names(tree: PyTree, alone: str) -> dict[str, Any]:
    """Leaves of a tree by dotted name, in the tree's order; `alone` is the name of an only leaf."""
    named = {dotted(name): leaf for name, leaf in pytree_serialization.name(tree).items()}
    return {alone: next(iter(named.values()))} if len(named) == 1 else named


def save(policy: Policy, kind: str, folder: Path, name: str = "policy") -> list[Path]:
    """Writes a policy to `folder`; -> the files. Raises RunError where an export does not give the policy's actions."""
    if kind not in KINDS:
        raise RunError(f"--to is {kind!r}; choose one of {', '.join(KINDS)}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{kind}"
    if kind == "jax":
        partial = folder / f"{name}.jax.partial"
        partial.write_bytes(program(policy))
        try:
            check(policy, partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    else:
        arrays = {name: np.asarray(leaf) for name, leaf in names(policy.params, "params").items()}
        if kind == "npz":
            np.savez(path, **arrays)  # type: ignore[arg-type]
        else:
            _save_safetensors(path, arrays)
    about = folder / f"{name}.json"
    write_json(about, description(policy))
    return [path, about]


def _save_safetensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise RunError("--to safetensors needs safetensors; pip install 'longhaul-rl[export]', or take npz") from error
    save_file(arrays, path)


def description(policy: Policy) -> dict[str, Any]:
    """What goes in and comes out, as JSON can hold it."""

    def forms(named: dict[str, Any], batch: int) -> dict[str, Any]:
        return {name: {"shape": list(x.shape[batch:]), "dtype": str(x.dtype)} for name, x in named.items()}

    action = policy.spec.action
    return {
        "recipe": policy.run.recipe,
        "environment": str(getattr(policy.run.environment, "env", type(policy.run.environment).__name__)),
        "params_sha256": params_sha256(policy.params.params),
        "observation": forms(names(policy.spec.observation, "observation"), 0),
        "memory": forms(names(policy.memory(1), "memory"), 1) if policy.recurrent else {},
        "action": {"kind": type(action).__name__} | dataclasses.asdict(action),
    }


def program(policy: Policy) -> bytes:
    """The policy's mode as a serialised program of jax.export, its parameters inside."""
    from jax import export

    if importlib.util.find_spec("flatbuffers") is None:
        raise RunError("--to jax needs flatbuffers; pip install 'longhaul-rl[export]', or take safetensors or npz")
    (batch,) = export.symbolic_shape("b")
    observation = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype), policy.spec.observation)
    memory = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), policy.memory(1))
    given = (names(observation, "observation"), names(memory, "memory")) if policy.recurrent else (
        names(observation, "observation"),
    )  # fmt: skip
    try:
        exported = export.export(jax.jit(_by_names(policy)), platforms=PLATFORMS)(*given)
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunError(
            f"this policy can't be exported by jax.export: {line}; --to safetensors has its arrays"
        ) from error
    return bytes(exported.serialize())


def _by_names(policy: Policy) -> Callable[..., Any]:
    """The policy as a function of leaves by name, [B, ...]: mapped over one observation, for a batch of no known size.

    Networks reshape by the sizes of their batch, which a symbolic size does not allow.
    """
    seen_form, memory_form = jax.tree.structure(policy.spec.observation), jax.tree.structure(policy.memory(1))
    params = jax.tree.map(jnp.asarray, policy.params)
    seen_names, memory_names = (
        list(names(policy.spec.observation, "observation")),
        list(names(policy.memory(1), "memory")),
    )

    def one(seen: dict[str, Any], held: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        observation = jax.tree.unflatten(seen_form, [seen[name][None] for name in seen_names])
        memory = jax.tree.unflatten(memory_form, [held[name][None] for name in memory_names])
        action, after = policy.act(params, memory, observation, None)
        return action[0], {name: x[0] for name, x in zip(memory_names, jax.tree.leaves(after), strict=True)}

    if policy.recurrent:
        return jax.vmap(one)
    return jax.vmap(lambda seen: one(seen, {})[0])


def check(policy: Policy, path: Path) -> None:
    """Raises RunError where the program at `path` gives other actions than the policy, in a process of its own."""
    seen = _observations(policy)
    held = policy.memory(CHECKED) if policy.recurrent else ()
    wanted, after = policy(seen, memory=held) if policy.recurrent else (policy(seen), ())
    with tempfile.TemporaryDirectory() as scratch:
        given, result = Path(scratch) / "given.npz", Path(scratch) / "result.npz"
        arrays = {f"o{name}": np.asarray(x) for name, x in names(seen, "observation").items()}
        arrays |= {f"m{name}": np.asarray(x) for name, x in names(held, "memory").items()} if policy.recurrent else {}
        np.savez(given, **arrays)  # type: ignore[arg-type]
        command = [sys.executable, "-I", "-c", RUNNER, str(path.resolve()), str(given), str(result)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=scratch)
        if done.returncode:
            raise RunError(f"{path} does not run outside Longhaul: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        with np.load(result) as found:
            gap = _gap(found["action"], np.asarray(wanted))
            for name, leaf in names(after, "memory").items() if policy.recurrent else ():
                gap = max(gap, _gap(found[f"m{name}"], np.asarray(leaf)))
    if gap > 1e-5:
        raise RunError(f"{path} gives other actions than the run's policy, by up to {gap:.2g}; report this as a bug")


def _gap(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.max(np.abs(one.astype(np.float64) - other.astype(np.float64)), initial=0.0))


def _observations(policy: Policy) -> PyTree:
    """Observations with the spec's shapes: numbers of its types, masks with all actions legal."""
    draw = np.random.default_rng(0)

    def one(leaf: Any) -> np.ndarray:
        shape = (CHECKED, *leaf.shape)
        if leaf.dtype == bool:
            return np.ones(shape, bool)
        kind = np.dtype(leaf.dtype).kind
        return (
            draw.integers(0, 2, shape).astype(leaf.dtype)
            if kind in "iu"
            else draw.normal(size=shape).astype(leaf.dtype)
        )

    return jax.tree.map(one, policy.spec.observation)
