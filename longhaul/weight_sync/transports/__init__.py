"""The ways of a version: shared memory on a host; TCP, gloo or NIXL between hosts; a folder that outlives them all."""

from __future__ import annotations

from longhaul.runtime import credentials
from longhaul.weight_sync.transports.base import Lane, Source

KINDS = ("shm", "tcp", "folder", "gloo", "nixl")
"""Of addresses."""


def connect(address: str, token: str | None = None, name: str = "receiver") -> Source:
    """A receiver's end of the lane at an address, as shm:NAME or tcp:HOST:PORT. ValueError for what is none."""
    kind, rest = split(address)
    if kind == "shm":
        from longhaul.weight_sync.transports import shared_memory

        return shared_memory.connect(rest, name)
    if kind == "folder":
        from longhaul.weight_sync.transports.folder import FolderSource

        return FolderSource(rest)
    if kind == "gloo":
        from longhaul.weight_sync.transports import gloo

        return gloo.connect(rest, name, token)
    if kind == "nixl":
        from longhaul.weight_sync.transports import nixl

        return nixl.connect(rest, name, token)
    from longhaul.weight_sync.transports import tcp

    return tcp.connect(rest, name, token)


def serve(address: str, token: str | None = None) -> Lane:
    """A sender's end of the lane at an address; tcp:HOST:0 takes a port that is free, which the lane's own names."""
    kind, rest = split(address)
    if kind == "shm":
        from longhaul.weight_sync.transports import shared_memory as shared

        return shared.lane(rest)
    if kind == "folder":
        from longhaul.weight_sync.transports.folder import FolderLane

        return FolderLane(rest)
    if kind == "gloo":
        from longhaul.weight_sync.transports import gloo as group

        return group.lane(rest, token)
    if kind == "nixl":
        from longhaul.weight_sync.transports import nixl

        return nixl.lane(rest, token)
    from longhaul.weight_sync.transports import tcp

    return tcp.lane(rest, token)


def split(address: str) -> tuple[str, str]:
    """(kind, where) of an address. ValueError where it is none."""
    kind, _, rest = address.partition(":")
    if not rest or kind not in KINDS:
        raise ValueError(
            f"{address!r} is no address; write shm:NAME, tcp:HOST:PORT, folder:PATH, gloo:HOST:PORT or nixl:HOST:PORT"
        )
    if kind not in ("shm", "folder"):
        credentials.split(rest)
    return kind, rest
