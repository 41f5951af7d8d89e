"""The ways of a version: shared memory on a host, TCP between hosts, a folder that outlives both."""

from __future__ import annotations

from longhaul.central import credentials
from longhaul.sync.lanes.base import Lane, Source


def connect(address: str, token: str | None = None, name: str = "receiver") -> Source:
    """A receiver's end of the lane at shm:NAME, tcp:HOST:PORT or folder:PATH. ValueError for another address."""
    kind, rest = split(address)
    if kind == "shm":
        from longhaul.sync.lanes import shared

        return shared.connect(rest, name)
    if kind == "folder":
        from longhaul.sync.lanes.folder import FolderSource

        return FolderSource(rest)
    from longhaul.sync.lanes import tcp

    return tcp.connect(rest, name, token)


def serve(address: str, token: str | None = None) -> Lane:
    """A sender's end of the lane at an address; tcp:HOST:0 takes a port that is free, which the lane's own names."""
    kind, rest = split(address)
    if kind == "shm":
        from longhaul.sync.lanes import shared

        return shared.lane(rest)
    if kind == "folder":
        from longhaul.sync.lanes.folder import FolderLane

        return FolderLane(rest)
    from longhaul.sync.lanes import tcp

    return tcp.lane(rest, token)


def split(address: str) -> tuple[str, str]:
    """(kind, where) of an address. ValueError where it is none."""
    kind, _, rest = address.partition(":")
    if not rest or kind not in ("shm", "tcp", "folder"):
        raise ValueError(f"{address!r} is no address; write shm:NAME, tcp:HOST:PORT or folder:PATH")
    if kind == "tcp":
        credentials.split(rest)
    return kind, rest
