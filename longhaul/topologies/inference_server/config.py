"""How a run lays out central inference: plain data, and what may be chosen."""

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
    """Of the topology `central`, beside the actors and the staleness of `actors.settings.ActorConfig`."""

    lane: str = "shm"
    slots: int = 2  # groups of environments of an actor: it steps one while the others wait
    bind: str | None = None  # HOST:PORT; None: actors are begun by the run, on this machine
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None


def check(central: ServerConfig, *, envs: int, actors: int, kind: str) -> None:
    """Raises ValueError naming the field, its value, the bound and the remedy."""
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
    if central.bind is not None and kind != "ray":  # whose run makes what lacks
        credentials.check_bind(central.bind, held)


def check_installed() -> None:
    """Raises ValueError where the lane `grpc` lacks a library."""
    if importlib.util.find_spec("grpc") is None:
        raise ValueError("lane is grpc, which needs grpcio: pip install 'longhaul-rl[cluster]'")


def load(central: ServerConfig) -> Credentials:
    """What the server shows and asks for. ValueError where a file can't be used."""
    from longhaul.runtime import credentials

    return credentials.load(central.token_file, central.tls_cert, central.tls_key)
