"""The command `export`: a run's policy as a program without Longhaul, a file of arrays, or a folder of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longhaul.algorithms.config import GRPOConfig
from longhaul.cli import flags, tables
from longhaul.cli.evaluate import MEMBER, STEP
from longhaul.cli.flags import DEBUG, PATH, TEXT, Flag, FlagError, choice, optional
from longhaul.cli.run_flags import RUN, RUNS_DIR, folder_of
from longhaul.reasoning import huggingface
from longhaul.runtime.errors import RunError
from longhaul.training import api, hub
from longhaul.training import export as exports
from longhaul.training.checkpoint.resume import restore_policy

HF, PEFT = "hf", "peft"
"""Language models: config, weights, tokeniser and chat template, as transformers reads them; LoRA's adapters alone, as
PEFT reads them."""

AVERAGE = Flag(
    "average", TEXT, None,
    "RUN=SHARE: the mean of the parameters with those of RUN, which count for SHARE, 0 to 1",
)  # fmt: skip

FLAGS = (
    RUN,
    Flag(
        "to",
        choice((*exports.KINDS, HF, PEFT)),
        "jax",
        "a program that needs JAX, or an ONNX runtime, alone; arrays by name; hf: a language model's folder; peft: its "
        "adapters",
    ),
    Flag("out", optional(PATH), None, "the folder to write to", shown="export, in the run's folder"),
    AVERAGE,
    STEP,
    MEMBER,
    RUNS_DIR,
    DEBUG,
)

ANSWERS = {"format type onnx": f"the form is --to {', '.join((*exports.KINDS, HF))} or {PEFT}"}
"""Flags of other programs -> what to give."""


def export(argv: Sequence[str]) -> int:
    """`longhaul export RUN [--to jax|onnx|safetensors|npz|hf|peft] [--out FOLDER] [--step N]`."""
    about = "A run's policy as files that others use: its mode, checked in a process without Longhaul."
    parsed = flags.parse("export", about, {"": FLAGS}, argv, answers=ANSWERS).values
    folder = folder_of(parsed, "longhaul export RUN --to jax", on_hub=True)
    if parsed["to"] in (HF, PEFT):
        if parsed["average"] is not None:
            raise FlagError(f"--average is of policies that act; leave it out with --to {parsed['to']}")
        print(_language_model(folder, parsed))
        return 0
    policy = averaged_policy(parsed, folder)
    for path in exports.save(
        policy, parsed["to"], Path(parsed["out"] or ("export" if hub.is_address(parsed["RUN"]) else folder / "export"))
    ):
        print(path)
    return 0


def averaged_policy(values: Mapping[str, Any], folder: Path) -> api.Policy:
    """Policy of the run in `folder` as `member`, `step` and `average` ask for."""
    policy = api.load(folder, member=values["member"], step=values["step"])
    if values["average"] is None:
        return policy
    word, _, share = str(values["average"]).rpartition("=")
    try:
        number = float(share)
    except ValueError:
        number = -1.0
    if not word or not 0.0 <= number <= 1.0:
        raise FlagError(f"--average is {values['average']}; give RUN=SHARE, with a share of 0 to 1")
    return policy.averaged(api.load(folder_of({**values, "RUN": word}, "", on_hub=True)), number)


def _language_model(folder: Path, parsed: dict[str, Any]) -> Path:
    run, policy, _ = restore_policy(folder, parsed["member"], parsed["step"])
    if not isinstance(run.algorithm, GRPOConfig):
        raise RunError(f"run {folder.name} is no language model's; --to {parsed['to']} is for a recipe reasoning-...")
    model, source = run.algorithm.model, run.algorithm.model_folder
    out = Path(parsed["out"] or folder / "export")
    if parsed["to"] == PEFT and not (model.lora and source):
        raise RunError(f"run {folder.name} has no adapters of a model in files; --to peft is for --lora, give --to hf")
    try:
        if parsed["to"] == PEFT:
            huggingface.save_adapters(out, model, policy.params, base=source)
        else:
            huggingface.save(out, model, policy.params, source=source or None)
    except ImportError as error:
        raise RunError(f"--to {parsed['to']} needs {error.name}; pip install 'longhaul-rl[llm]'") from error
    if not source:
        tables.progress(
            f"without tokenizer.json, as the run has no --model-folder; longhaul serve {folder.name} reads texts"
        )
    return out
