"""The ways of a version: shared memory on a host, TCP between hosts, a folder that outlives both."""

from __future__ import annotations

from longhaul.sync.lanes.base import Source


def connect(address: str, token: str | None = None, name: str = "receiver") -> Source:
    """A receiver's end of the lane at shm:NAME, tcp:HOST:PORT or folder:PATH. ValueError for another address."""
    kind, _, rest = address.partition(":")
    if not rest or kind not in ("shm", "tcp", "folder"):
        raise ValueError(f"{address!r} is no address; write shm:NAME, tcp:HOST:PORT or folder:PATH")
    if kind == "shm":
        from longhaul.sync.lanes import shared

        return shared.connect(rest, name)
    from longhaul.sync.lanes import tcp

    return tcp.connect(rest, name, token)
