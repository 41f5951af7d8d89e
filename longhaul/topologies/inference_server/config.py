"""Configuration of the inference-server topology and its validation."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longhaul.runtime import config_fields
from longhaul.runtime.config_fields import FREE, setting
from longhaul.runtime.errors import FieldError

if TYPE_CHECKING:
    from longhaul.runtime.credentials import Credentials

LANES = ("shm", "grpc")

MOST_SLOTS = 8

CENTRAL = ("central",)
"""Topologies with an inference server."""


@dataclass(frozen=True)
class ServerConfig:
    """Options of the topology `central`; number of actors and staleness are in `actor_learner.config.ActorConfig`."""

    lane: str = setting(
        "shm",
        "transport of observations in the topology central: shared memory, or gRPC",
        choices=LANES,
        resume=FREE,
        topologies=CENTRAL,
    )
    slots: int = setting(
        2,
        "groups of worlds of an actor of the topology central: it steps one while the others wait for actions",
        least=1,
        most=MOST_SLOTS,
        topologies=CENTRAL,
    )
    bind: str | None = setting(
        None,
        "HOST:PORT at which --lane grpc waits for longhaul actor; none: the run begins its actors itself",
        resume=FREE,
        topologies=CENTRAL,
    )
    token_file: str | None = setting(
        None, "a file with the token that actors must show", path=True, resume=FREE, topologies=CENTRAL
    )
    tls_cert: str | None = setting(
        None,
        "the server's certificate (PEM); needed beyond loopback, with its key and a token",
        path=True,
        resume=FREE,
        topologies=CENTRAL,
    )
    tls_key: str | None = setting(None, "the certificate's key (PEM)", path=True, resume=FREE, topologies=CENTRAL)


def check(central: ServerConfig, *, envs: int, actors: int, kind: str) -> None:
    """Validation; raises FieldError, and ValueError for an unusable file of credentials."""
    from longhaul.runtime import credentials

    config_fields.check(central)
    groups = actors * central.slots
    if envs % groups:
        raise FieldError(
            "num_envs",
            f"{envs}, which {actors} actors with {central.slots} groups each can't share evenly",
            f"choose a multiple of {groups}",
        )
    if kind == "ray" and central.lane != "grpc":
        raise FieldError(
            "lane", f"{central.lane}, and --actor-kind is ray, without shared memory", "choose --lane grpc"
        )
    if central.lane == "shm":
        for name in ("bind", "token_file", "tls_cert", "tls_key"):
            if getattr(central, name) is not None:
                raise FieldError(name, "given, and --lane is shm, which has no address", "choose --lane grpc")
    if central.lane == "grpc":
        check_installed()
    held = load(central)
    if central.bind is not None and kind != "ray":  # a run on Ray creates missing credentials
        credentials.check_bind(central.bind, held)


def check_installed() -> None:
    """Check for the library of `--lane grpc`; FieldError without."""
    if importlib.util.find_spec("grpc") is None:
        raise FieldError("lane", "grpc, which needs grpcio", "pip install 'longhaul-rl[cluster]'")


def load(central: ServerConfig) -> Credentials:
    """Credentials of the server. ValueError for an unusable file."""
    from longhaul.runtime import credentials

    return credentials.load(central.token_file, central.tls_cert, central.tls_key)
