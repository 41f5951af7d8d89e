"""Description of a run, its recipes and its checks.

`Run`, `RunError` and `recipe` are plain data and start fast; `config.resolve` decides what a Run leaves open, with JAX.
"""

from longhaul.config.recipes import recipe
from longhaul.config.run import Run
from longhaul.runtime.errors import RunError

__all__ = ["Run", "RunError", "recipe"]
