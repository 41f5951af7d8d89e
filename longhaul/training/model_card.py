"""Published form of a policy: a folder with its arrays, its program, how it was made, and a model card.

    policy.safetensors   the arrays by name        policy.jax, policy.onnx   the programs of `longhaul export`
    policy.json          what goes in and out      run.json      the run: settings, versions, commit
    README.md            the model card            report.html   curves and scores

The report has no pictures of driving: scenarios may be bound by their publishers' terms. No path, host or address of
the machine is in the folder: paths are cut to their last part, and the command line is written anew from the settings
that the user gave.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longhaul.config.population import Population
from longhaul.config.run import Driving, Run, to_dict
from longhaul.runtime import bounded_json
from longhaul.runtime.errors import RunError
from longhaul.telemetry import sinks
from longhaul.training import api, export, report
from longhaul.training.confidence import Estimate
from longhaul.training.hub import Address
from longhaul.training.run_dir import read_result, write_json

KEPT = ("versions", "python", "backend", "devices", "commit")
"""Fields of run.json that say nothing of a machine's place or name."""

TERMS = (
    "Publishers' terms bind what is trained on their logs: those of the Waymo Open Dataset, nuScenes and nuPlan allow "
    "non-commercial use, Argoverse 2 is under CC BY-NC-SA 4.0."
)


def write(policy: api.Policy, source: Path, folder: Path, address: Address, licence: str | None = None) -> None:
    """Folder of what `longhaul push` uploads of a run's folder `source`. Raises RunError where a part can't be made."""
    for kind in ("safetensors", "jax"):
        export.save(policy, kind, folder)
    try:
        export.save(policy, "onnx", folder)
    except RunError as error:  # some networks have no such form
        print(f"without policy.onnx: {error}", file=sys.stderr, flush=True)
    stored = bounded_json.read(source / "run.json")
    run = dataclasses.replace(
        policy.run,
        population=Population(),
        devices=1,  # whatever machine it is loaded on
        model=1,
        acting=dataclasses.replace(policy.run.acting, ray_address="auto"),
        central=dataclasses.replace(policy.run.central, bind=None, token_file=None, tls_cert=None, tls_key=None),
    )
    whole = {"format": stored["format"], "id": address.repository.split("/")[1], "recipe": run.recipe}
    whole |= {"run": without_paths(to_dict(run)), "asked": without_paths(stored.get("asked", {}))}
    whole |= {name: stored[name] for name in KEPT if name in stored}
    write_json(folder / "run.json", whole)
    metrics, result = source / "metrics.jsonl", _result(source)
    records = sinks.read(metrics) if metrics.is_file() else []
    report.write_report(folder / "report.html", run=whole, records=records, result=without_paths(result))
    (folder / "README.md").write_text(card(policy, stored, result, address, licence), "utf-8")


def without_paths(value: Any) -> Any:
    """Settings with each path of a machine cut to its last part."""
    if isinstance(value, Mapping):
        return {name: without_paths(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(inner) for inner in value]
    if isinstance(value, str) and (value.startswith(("/", "~", ".")) or "://" in value):
        return value.rstrip("/").rpartition("/")[2]
    return value


def _result(source: Path) -> dict[str, Any]:
    return read_result(source) if (source / "result.json").is_file() else {}


def scores(policy: api.Policy, result: Mapping[str, Any]) -> dict[str, Estimate]:
    """Scores with intervals; without those of result.json where the data of the evaluation are gone."""
    try:
        return api.evaluate(policy).estimates
    except (ValueError, OSError):
        trained = dict(result.get("evaluation", {}).get("trained", {}))
        episodes = int(trained.pop("episodes", 0))
        nan = float("nan")
        return {name: Estimate(x, nan, nan, episodes) for name, x in trained.items() if isinstance(x, int | float)}


def card(
    policy: api.Policy, stored: Mapping[str, Any], result: Mapping[str, Any], address: Address, licence: str | None
) -> str:
    """Text of the model card, Markdown with the hub's metadata in front."""
    import yaml

    run, estimates = policy.run, scores(policy, result)
    env = "driving" if isinstance(run.environment, Driving) else export.description(policy)["environment"]
    name = address.repository.split("/")[1]
    results = [
        {"type": f"mean_{metric}", "name": f"mean {metric}", "value": round(estimate.mean, 4)}
        for metric, estimate in estimates.items()
    ]
    task = {"type": "reinforcement-learning", "name": "reinforcement learning"}
    entry = {"task": task, "dataset": {"name": env, "type": env}, "metrics": results}
    head = {"library_name": "longhaul", "tags": list(dict.fromkeys(("reinforcement-learning", "jax", env, run.recipe)))}
    head |= {"license": licence} if licence else {}
    head |= {"model-index": [{"name": name, "results": [entry]}]} if results else {}
    seen = ", ".join(
        f'"{key}": {key.rpartition(".")[2]}' for key in export.names(policy.spec.observation, "observation")
    )
    versions = ", ".join(f"{package} {version}" for package, version in stored.get("versions", {}).items())
    steps = result.get("agent_steps")
    lines = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n",
        f"# {name}\n",
        f"A policy for `{env}`, trained by Longhaul with the recipe `{run.recipe}`.\n",
        "## Scores\n",
        "The policy's mode on whole episodes whose starts do not depend on training; means with 95 % intervals.\n",
        "| metric | mean | 95 % interval | episodes |\n|---|--:|--:|--:|",
        *(f"| {metric} | {e.mean:.4g} | {_interval(e)} | {e.episodes} |" for metric, e in estimates.items()),
        "\n## Use\n",
        "```python\nimport longhaul\n",
        f'policy = longhaul.load("{address}")\naction = policy(observation)\n```\n',
        "Without Longhaul, by its exported program (`policy.json` says what goes in and comes out; `policy.onnx` is "
        "the same for ONNX):\n",
        '```python\nfrom jax import export\n\nprogram = export.deserialize(bytearray(open("policy.jax", "rb").read()))',
        f"action = program.call({{{seen}}})\n```\n",
        "To train on from here:\n",
        f"    longhaul train {run.recipe} --init-from {address}\n",
        "## Training\n",
        f"    {command(run.recipe, stored.get('asked', {}))}\n",
        f"Seed {run.seed}, {f'{steps:,} agent steps' if steps else f'up to {run.total_steps:,} agent steps'}.",
        f"Commit {stored.get('commit') or 'unknown'}; {versions}, Python {stored.get('python', '?')}.",
        "`run.json` holds every setting.\n",
        "## Data\n",
        data(run, stored, licence),
    ]
    return "\n".join(lines) + "\n"


def _interval(estimate: Estimate) -> str:
    return "–" if estimate.low != estimate.low else f"{estimate.low:.4g} to {estimate.high:.4g}"


def command(recipe: str, asked: Mapping[str, Any]) -> str:
    """Command line with the settings that the user gave."""
    arguments = ["longhaul", "train", recipe]
    for name, value in without_paths(asked).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments.append(flag if value else f"--no-{flag[2:]}")
        else:
            arguments += [flag, *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(arguments)


def data(run: Run, stored: Mapping[str, Any], licence: str | None) -> str:
    """Data that the policy was trained on, and whose terms bind it."""
    task, about = run.environment, stored.get("data") or {}
    recorded = task.data if isinstance(task, Driving) else getattr(run.algorithm, "recorded", ())
    terms = f"Licence of this policy: {licence}." if licence else "The publisher of this policy named no licence."
    if not recorded:
        source = "generated scenarios" if isinstance(task, Driving) else "its environment, which makes its own episodes"
        return f"No recorded data: {source}. {terms}"
    counts = ", ".join(f"{name} {value}" for name, value in about.items())
    files = ", ".join(f"`{name}`" for name in without_paths(recorded))
    return f"Recorded data: {files}{f' ({counts})' if counts else ''}. {TERMS} {terms}"
