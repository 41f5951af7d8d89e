"""Transports of versions by address: shared memory on a host, TCP between hosts, a folder that outlives processes."""

from __future__ import annotations

from longhaul.runtime import credentials
from longhaul.weight_sync.transports.base import Source, Transport

KINDS = ("shm", "tcp", "tls", "folder")
"""Kinds of addresses: shm:NAME, tcp:HOST:PORT, tls:HOST:PORT, folder:PATH."""


def connect(address: str, token: str | None = None, name: str = "receiver") -> Source:
    """Receiver's end of the transport at an address, as shm:NAME or tcp:HOST:PORT. ValueError for a wrong address."""
    kind, rest = split(address)
    if kind == "shm":
        from longhaul.weight_sync.transports import shared_memory

        return shared_memory.connect(rest, name)
    if kind == "folder":
        from longhaul.weight_sync.transports.folder import FolderSource

        return FolderSource(rest)
    if kind == "tls":
        from longhaul.weight_sync.transports import tls

        return tls.connect(rest, name, token)
    from longhaul.weight_sync.transports import tcp

    return tcp.connect(rest, name, token)


def serve(address: str, token: str | None = None) -> Transport:
    """Sender's end of the transport at an address; tcp:HOST:0 takes a free port, which `Transport.address` names."""
    kind, rest = split(address)
    if kind == "shm":
        from longhaul.weight_sync.transports import shared_memory

        return shared_memory.serve(rest)
    if kind == "folder":
        from longhaul.weight_sync.transports.folder import FolderTransport

        return FolderTransport(rest)
    if kind == "tls":
        from longhaul.weight_sync.transports import tls

        return tls.serve(rest, token)
    from longhaul.weight_sync.transports import tcp

    return tcp.serve(rest, token)


def split(address: str) -> tuple[str, str]:
    """(kind, rest) of an address, as a URL too: tcp://HOST:PORT. ValueError for a wrong one."""
    kind, _, rest = address.partition(":")
    if kind != "folder":
        rest = rest.removeprefix("//")
    if not rest or kind not in KINDS:
        raise ValueError(f"{address!r} is no address; write shm:NAME, tcp:HOST:PORT, tls:HOST:PORT or folder:PATH")
    if kind in ("tcp", "tls"):
        credentials.split(rest)
    return kind, rest
