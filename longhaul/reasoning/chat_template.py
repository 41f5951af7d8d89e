"""Chat templates of language models, filled in under limits: each is a stranger's program, in Jinja's language.

No JAX here: limits are those of a whole process, and JAX's threads would fail with it.
"""

from __future__ import annotations

from longhaul.runtime.errors import first_line
from longhaul.runtime.worker_pool import OutOfTime, bounded

MEMORY, SECONDS = 1 << 29, 2.0
"""Bytes and CPU-seconds that a template may take for one conversation."""


def fill(source: str, names: dict[str, str], turns: list[dict[str, str]]) -> str:
    """Text of a conversation that a model is to continue. ValueError, one line, where the template fails."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    place = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    place.globals["raise_exception"] = refuse
    try:
        with bounded(MEMORY, SECONDS):
            return place.from_string(source).render(messages=turns, add_generation_prompt=True, **names)
    except (MemoryError, OutOfTime) as error:
        raise ValueError(f"it takes more than {MEMORY >> 20} MB or {SECONDS:g} s") from error
    except Exception as error:  # any that it makes by what it computes
        raise ValueError(first_line(error)) from error
