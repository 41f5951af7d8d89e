"""Names of settings that users of other libraries type: other words for ours, and answers where there is none.

They count for flags, for keywords of `longhaul.train` and in files of settings.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from longhaul.runtime import config_fields
from longhaul.runtime.errors import RunError

ALIASES = {
    "lr": ("learning-rate",), "num-envs": ("n-envs",), "num-steps": ("n-steps",), "update-epochs": ("n-epochs",),
    "clip-eps": ("clip-range",), "replay-size": ("buffer-size",), "seed": ("random-seed",),
    "total-steps": ("total-timesteps",), "accumulate": ("micro-batches",), "runs-dir": ("checkpoint-dir",),
    "resume": ("resume-run",),
}  # fmt: skip
"""Flags -> other words for them."""

ANSWERS = {
    "batch-size": "a batch is --num-envs x --num-steps, of which --num-minibatches parts are learnt from in turn",
    "gpus": "devices are given by --mesh data=N", "devices": "devices are given by --mesh data=N",
    "epochs": "passes over a batch are --update-epochs, and the length of a run is --total-steps",
    "episodes": "the length of a run is --total-steps", "output": "the folder of runs is --runs-dir",
    "optimizer": "an algorithm has its own; --algorithm my_module:MyClass is yours",
    "resume-from": "go on with --resume RUN, or begin from its parameters with --init-from RUN",
    "checkpoint": "go on with --resume RUN, or begin from its parameters with --init-from RUN",
}  # fmt: skip
"""Flags of other libraries -> what to give."""


def others(config: Any) -> dict[str, str]:
    """Other names of settings -> their own, with underscores."""
    own = {leaf.name for leaf in config_fields.walk(config)}
    named = {name.replace("-", "_"): [word.replace("-", "_") for word in some] for name, some in ALIASES.items()}
    return {word: name for name, some in named.items() if name in own for word in some if word not in own}


def canonical(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their own names, with underscores, whichever of their names were given.

    Raises RunError where two names of one setting disagree.
    """
    names = others(config)
    found: dict[str, Any] = {}
    for word, value in given.items():
        name = names.get(word, word)
        if found.setdefault(name, value) != value:
            raise RunError(f"{name} is {found[name]!r} and {value!r}, under two names of one setting; give one of them")
    return found


def hint(config: Any, word: str, otherwise: str) -> str:
    """Sentence for a name that no setting has: the answer, the nearest names, or `otherwise`."""
    if answer := ANSWERS.get(word.replace("_", "-")):
        return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), answer)
    near = difflib.get_close_matches(word, [leaf.name for leaf in config_fields.walk(config)], n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def as_typed(text: str, words: list[str]) -> str:
    """An error's text with flags as the user typed them among `words`: --learning-rate or --num_envs."""
    written = [word.partition("=")[0] for word in words if word.startswith("--")]
    typed = {word.replace("_", "-"): word for word in written}
    for name, some in ALIASES.items():
        for word in [typed[f"--{one}"] for one in some if f"--{one}" in typed]:
            typed.setdefault(f"--{name}", word)
    return re.sub(r"--[a-z][a-z-]*", lambda flag: typed.get(flag[0], flag[0]), text)
