"""Longhaul: reinforcement learning for billions of environment steps, end to end on the device.

    import longhaul

    result = longhaul.train("cartpole", num_envs=64, total_steps=500_000)
    policy = longhaul.load(result.folder)

Importing the package imports neither JAX nor any optional dependency: each name below is loaded when it is used. The
parts are there too: `from longhaul.algorithms import ppo`, `from longhaul.topologies import fused`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longhaul.training.api import (
        Evaluation,
        LanguageModel,
        Policy,
        Result,
        evaluate,
        language_model,
        load,
        make,
        render,
        result,
        resume,
        runs,
        train,
    )

__version__ = "0.1.0"

__all__ = [
    "Evaluation", "LanguageModel", "Policy", "Result", "evaluate", "language_model", "load", "make", "render", "result",
    "resume", "runs", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'longhaul' has no attribute {name!r}; there are {', '.join(__all__)}")
    from longhaul.training import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
