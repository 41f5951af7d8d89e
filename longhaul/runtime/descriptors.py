"""Limit of open descriptors of this process, which a server's connections share with everything else."""

from __future__ import annotations

import contextlib
import os
import resource

MOST = 65_536
"""Descriptors that a process ever asks for: some programs that it starts go through all of them."""

RESERVE = 64
"""Descriptors that a server's connections leave to the rest of the process: checkpoints are saved with them."""


def raise_limit() -> int:
    """Soft limit of open descriptors, raised to the hard one, at most to MOST."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    target = MOST if hard == unlimited else min(hard, MOST)
    if soft != unlimited and soft < target:
        with contextlib.suppress(OSError, ValueError):  # macOS has another bound, which it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
    return MOST if soft == unlimited else soft


def room() -> int:
    """Connections that this process may still take, its RESERVE kept. The limit is raised first."""
    with contextlib.suppress(OSError):
        return raise_limit() - len(os.listdir("/dev/fd")) - RESERVE
    return raise_limit() // 2
