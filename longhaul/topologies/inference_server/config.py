"""Configuration of the inference-server topology and its validation."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longhaul.runtime.credentials import Credentials

LANES = ("shm", "grpc")

MOST_SLOTS = 8


@dataclass(frozen=True)
class ServerConfig:
    """Options of the topology `central`; number of actors and staleness are in `actor_learner.config.ActorConfig`."""

    lane: str = "shm"
    slots: int = 2  # groups of environments per actor: it steps one while the others wait
    bind: str | None = None  # HOST:PORT; None: the run starts its actors on this machine
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None


def check(central: ServerConfig, *, envs: int, actors: int, kind: str) -> None:
    """Validation; ValueError names the field, its value, the bound and the remedy."""
    from longhaul.runtime import credentials

    if central.lane not in LANES:
        raise ValueError(f"lane is {central.lane!r}; it must be one of {', '.join(LANES)}")
    if not 1 <= central.slots <= MOST_SLOTS:
        raise ValueError(f"slots is {central.slots}; it must lie in 1 to {MOST_SLOTS}")
    groups = actors * central.slots
    if envs % groups:
        raise ValueError(
            f"num_envs is {envs}, which {actors} actors with {central.slots} groups each can't share evenly; choose a "
            f"multiple of {groups}"
        )
    if kind == "ray" and central.lane != "grpc":
        raise ValueError(f"lane is {central.lane}, and --actor-kind is ray, without shared memory; choose --lane grpc")
    if central.lane == "shm":
        for name in ("bind", "token_file", "tls_cert", "tls_key"):
            if getattr(central, name) is not None:
                raise ValueError(f"{name} is given, and --lane is shm, which has no address; choose --lane grpc")
    if central.lane == "grpc":
        check_installed()
    held = load(central)
    if central.bind is not None and kind != "ray":  # a run on Ray creates missing credentials
        credentials.check_bind(central.bind, held)


def check_installed() -> None:
    """Check that `--lane grpc` finds its library; else ValueError."""
    if importlib.util.find_spec("grpc") is None:
        raise ValueError("lane is grpc, which needs grpcio: pip install 'longhaul-rl[cluster]'")


def load(central: ServerConfig) -> Credentials:
    """Credentials of the server. ValueError for an unusable file."""
    from longhaul.runtime import credentials

    return credentials.load(central.token_file, central.tls_cert, central.tls_key)
