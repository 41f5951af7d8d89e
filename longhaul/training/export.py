"""Export of a trained policy: a program that needs JAX or an ONNX runtime alone, or its arrays in a file.

    policy.jax           the policy's mode as a program of jax.export, for a batch of any size on CPU, GPU and TPU
    policy.onnx          the same as an ONNX model (onnx_program.py); it also returns the head's outputs, `parameters`
    policy.safetensors   the arrays by name, as --init-from reads them; also policy.npz
    policy.json          names, shapes and types of what goes in and comes out; the run, its digest

A program takes {name: array [B, ...]} and returns the action [B, ...]; of a policy with a memory it takes and returns
that, too. It is checked in a process of its own, which imports JAX, or onnxruntime, and not Longhaul: it must give the
same actions.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
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

from longhaul.algorithms import external, registry
from longhaul.runtime.errors import RunError, first_line, last_line
from longhaul.runtime.files import apply_umask
from longhaul.runtime.provenance import params_sha256
from longhaul.training import onnx_program
from longhaul.training.api import Policy
from longhaul.training.init_from import names
from longhaul.training.run_dir import write_json
from longhaul.types import PyTree

KINDS = ("jax", "onnx", "safetensors", "npz")

PLATFORMS = ("cpu", "cuda", "tpu")
"""Platforms that an exported program runs on."""

CHECKED = 1001
"""Observations of the check; an odd number, which no program was compiled for. Of images, fewer."""

MOST_CHECKED = 1 << 20
"""Most numbers of all observations of the check, so that it takes seconds."""

CLOSE = {"fp32": 1e-5, "bf16": 0.02}
"""Precision of a policy -> largest difference of an action's numbers, the head's outputs or the memory; above 1, as a
share of the largest number. Rounding to bf16 depends on what a compiler fuses."""

TIES = {"fp32": 0.002, "bf16": 0.02}
"""Largest share of choices that differ: two choices can be as good as each other up to rounding."""

RUNNERS = {
    "jax": """
import sys
import jax, numpy as np
from jax import export
program = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
given = dict(np.load(sys.argv[2]))
seen = {name[1:]: value for name, value in given.items() if name[0] == "o"}
memory = {name[1:]: value for name, value in given.items() if name[0] == "m"}
action, after = program.call(seen, memory) if memory else (program.call(seen), {})
assert not [name for name in sys.modules if name.startswith("longhaul")]
np.savez(sys.argv[3], action=np.asarray(action), **{"next_" + name: np.asarray(x) for name, x in after.items()})
""",
    "onnx": """
import sys
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
given = {name[1:]: value for name, value in np.load(sys.argv[2]).items()}
results = session.run(None, {x.name: given[x.name] for x in session.get_inputs()})
assert not [name for name in sys.modules if name.split(".")[0] in ("longhaul", "jax")]
np.savez(sys.argv[3], **dict(zip([x.name for x in session.get_outputs()], results)))
""",
}
"""Programs of the process that checks an export, with paths of the export, its input and its output."""


def save(policy: Policy, kind: str, folder: Path, name: str = "policy") -> list[Path]:
    """Files of a policy, written to `folder`. Raises RunError where an export does not give the policy's actions."""
    if kind not in KINDS:
        raise RunError(f"--to is {kind!r}; choose one of {', '.join(KINDS)}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{kind}"
    if kind in RUNNERS:
        partial = folder / f"{name}.{kind}.partial"
        partial.write_bytes(program(policy) if kind == "jax" else onnx(policy))
        try:
            check(policy, partial, kind)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    else:
        arrays = {name: np.asarray(leaf) for name, leaf in names(policy.params, "params").items()}
        if kind == "npz":
            np.savez(path, **arrays)  # type: ignore[arg-type]
        else:
            from safetensors.numpy import save_file

            save_file(arrays, path)
            apply_umask(path)
    about = folder / f"{name}.json"
    write_json(about, description(policy))
    return [path, about]


def description(policy: Policy) -> dict[str, Any]:
    """Shapes and types of what goes in and comes out, as JSON can hold them."""

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
    """The policy's mode as a serialised program of jax.export, its parameters inside. RunError where it can't be."""
    from jax import export

    if importlib.util.find_spec("flatbuffers") is None:
        raise RunError("--to jax needs flatbuffers; pip install 'longhaul-rl[export]', or take safetensors or npz")
    (batch,) = export.symbolic_shape("b")
    observation = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype), policy.spec.observation)
    memory = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), policy.memory(1))
    arguments = (names(observation, "observation"), names(memory, "memory")) if policy.recurrent else (
        names(observation, "observation"),
    )  # fmt: skip
    folders = jax.config.jax_hlo_source_file_canonicalization_regex  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")  # no path of this machine goes with it
        exported = export.export(jax.jit(_by_names(policy)), platforms=PLATFORMS)(*arguments)
    except Exception as error:
        raise RunError(
            f"this policy can't be exported by jax.export: {first_line(error)}; --to safetensors has its arrays"
        ) from error
    finally:
        jax.config.update("jax_hlo_source_file_canonicalization_regex", folders)
    return bytes(exported.serialize())


def onnx(policy: Policy) -> bytes:
    """The policy's mode and its head's outputs as a serialised ONNX model. RunError where it can't be."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise RunError("--to onnx is checked by onnxruntime; pip install 'longhaul-rl[export]', or take --to jax")
    act, seen = _by_names(policy, head=True), names(policy.spec.observation, "observation")
    memory = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in _memory(policy).items()}

    def by_one_dict(inputs: dict[str, Any]) -> dict[str, Any]:
        groups = ({name: inputs[name] for name in group} for group in ((seen, memory) if memory else (seen,)))
        action, *others = act(*groups)
        later = {f"next_{name}": x for name, x in others.pop().items()} if memory else {}
        return {"action": action, **later} | ({"parameters": others[0]} if others else {})

    return onnx_program.translate(by_one_dict, seen | memory, json.dumps(description(policy)))


def _memory(policy: Policy) -> dict[str, Any]:
    """Leaves of a memory of one column by name; none where the policy has none."""
    return names(policy.memory(1), "memory") if policy.recurrent else {}


def _head(policy: Policy) -> Callable[..., Any] | None:
    """Function (params, memory, observation [B, ...]) -> outputs of the policy's head; None for an algorithm of the
    user's own, which only acts."""
    if external.is_own(type(policy.run.algorithm)):
        return None
    network = registry.network(policy.spec, policy.run.algorithm)
    return lambda params, memory, seen: network.apply(params, memory, seen)[0]


def _by_names(policy: Policy, head: bool = False) -> Callable[..., Any]:
    """The policy as a function of leaves by name, [B, ...]: mapped over one observation, for a batch of no known size.

    Networks reshape by the sizes of their batch, which a symbolic size does not allow. With `head` the results are
    (action, the head's outputs), and the memory behind them.
    """
    seen_form, memory_form = jax.tree.structure(policy.spec.observation), jax.tree.structure(policy.memory(1))
    params = jax.tree.map(jnp.asarray, policy.params)
    seen_names, memory_names = list(names(policy.spec.observation, "observation")), list(_memory(policy))
    parameters = _head(policy) if head else None

    def one(seen: dict[str, Any], held: dict[str, Any]) -> tuple[Any, ...]:
        observation = jax.tree.unflatten(seen_form, [seen[name][None] for name in seen_names])
        memory = jax.tree.unflatten(memory_form, [held[name][None] for name in memory_names])
        action, after = policy.act(params, memory, observation, None)
        outputs = () if parameters is None else (parameters(params, memory, observation)[0],)
        later = {name: x[0] for name, x in zip(memory_names, jax.tree.leaves(after), strict=True)}
        return (action[0], *outputs, *((later,) if memory_names else ()))

    if policy.recurrent:
        return jax.vmap(one)
    return jax.vmap(lambda seen: one(seen, {}) if head else one(seen, {})[0])


def check(policy: Policy, path: Path, kind: str = "jax") -> None:
    """Raises RunError where the program at `path` gives other results than the policy, in a process of its own."""
    seen = _observations(policy)
    held = policy.memory(len(jax.tree.leaves(seen)[0])) if policy.recurrent else ()
    inputs = names(seen, "observation"), names(held, "memory") if policy.recurrent else {}
    action, after = policy(seen, memory=held) if policy.recurrent else (policy(seen), ())
    head = _head(policy)
    expected = {"action": action} | ({"parameters": jax.jit(head)(policy.params, held, seen)} if head else {})
    expected |= {f"next_{name}": x for name, x in names(after, "memory").items()} if policy.recurrent else {}
    precision = getattr(getattr(policy.run.algorithm, "network", None), "precision", "fp32")
    with tempfile.TemporaryDirectory() as scratch:
        given, result = Path(scratch) / "given.npz", Path(scratch) / "result.npz"
        arrays = {f"{letter}{name}": np.asarray(x) for letter, group in zip("om", inputs) for name, x in group.items()}
        np.savez(given, **arrays)  # type: ignore[arg-type]
        command = [sys.executable, "-I", "-c", RUNNERS[kind], str(path.resolve()), str(given), str(result)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=scratch)
        if done.returncode:
            raise RunError(f"{path} does not run outside Longhaul: {last_line(done.stderr)}")
        with np.load(result) as outputs:
            for name in outputs.files:
                _compare(path, name, precision, outputs[name], np.asarray(expected[name]))


def _compare(path: Path, name: str, precision: str, exported: np.ndarray, expected: np.ndarray) -> None:
    if exported.dtype.kind in "iu":
        gap = float(np.mean(exported != expected))
        close, difference = gap <= TIES[precision], f"in {gap:.2%} of observations"
    else:
        gap = float(np.max(np.abs(exported - expected)) / max(float(np.max(np.abs(expected))), 1.0))
        close, difference = gap <= CLOSE[precision], f"by up to {gap:.2g}"
    if not close:  # NaN is not
        outputs = "actions" if name == "action" else name
        raise RunError(f"{path} gives other {outputs} than the run's policy, {difference}; report this as a bug")


def _observations(policy: Policy) -> PyTree:
    """Observations with the spec's shapes: numbers of its types, masks with all actions legal."""
    draw = np.random.default_rng(0)
    size = sum(leaf.size for leaf in jax.tree.leaves(policy.spec.observation))
    count = min(CHECKED, MOST_CHECKED // size | 1)

    def one(leaf: Any) -> np.ndarray:
        shape = (count, *leaf.shape)
        if leaf.dtype == bool:
            return np.ones(shape, bool)
        kind = np.dtype(leaf.dtype).kind
        return (
            draw.integers(0, 2, shape).astype(leaf.dtype)
            if kind in "iu"
            else draw.normal(size=shape).astype(leaf.dtype)
        )

    return jax.tree.map(one, policy.spec.observation)
