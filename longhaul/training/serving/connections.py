"""Connections of an HTTP server, bounded: uvicorn's protocol with few strangers and no silent ones."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from longhaul.runtime import descriptors

MOST = 512
"""Connections at once, and at most half of the process's descriptors. A further one ends the oldest that has asked
nothing yet, else the oldest that waits for no answer; while all of them wait, it is closed."""

SILENT = 10.0
"""Seconds for which a connection may be without a whole request's head."""

HANDSHAKE = 5.0
"""Seconds of TLS's handshake."""


class Loop(asyncio.SelectorEventLoop):
    """Event loop whose servers end a connection that lets TLS's handshake wait; asyncio's own would wait for a minute,
    and uvicorn has no option for it."""

    async def create_server(self, factory: Any, *where: Any, **more: Any) -> Any:  # type: ignore[override]
        if more.get("ssl") is not None:
            more["ssl_handshake_timeout"] = HANDSHAKE
        return await super().create_server(factory, *where, **more)


class _Refused(asyncio.Protocol):
    """Connection beyond the bound."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def protocol(most: int = MOST, silent: float = SILENT) -> Any:
    """uvicorn's `http` option: makes the protocol of each connection."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    connections: weakref.WeakKeyDictionary[H11Protocol, None] = weakref.WeakKeyDictionary()  # the oldest first
    most = min(most, descriptors.raise_limit() // 2)

    def of(config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> asyncio.Protocol:
        alive = [each for each in connections if each.transport is None or not each.transport.is_closing()]
        if len(alive) >= most:
            if (oldest := _idle(alive)) is None:
                return _Refused()
            oldest.transport.abort()
        connection = H11Protocol(config, server_state, app_state, _loop)
        connections[connection] = None
        loop = asyncio.get_running_loop()
        loop.call_later(silent, _watch, loop, weakref.ref(connection), silent, None)
        return connection

    return of


def _idle(connections: Iterable[Any]) -> Any:
    """Connection that makes room; None: each one waits for an answer, or is in TLS's handshake."""
    known = [each for each in connections if each.transport is not None]
    asked_nothing = (each for each in known if each.cycle is None)
    answered = (each for each in known if each.cycle is not None and each.cycle.response_complete)
    return next(asked_nothing, None) or next(answered, None)


def _watch(loop: asyncio.AbstractEventLoop, held: Callable[[], Any], seconds: float, answered: Any) -> None:
    """Closes a connection that has been without a request for `seconds`; looks again after as long.

    `answered` is the request that was the last one at the look before.
    """
    connection = held()
    if connection is None:
        return
    transport, cycle = connection.transport, connection.cycle
    if transport is not None:
        if transport.is_closing():
            return
        if cycle is answered and (cycle is None or cycle.response_complete):
            transport.abort()
            return
    loop.call_later(seconds, _watch, loop, held, seconds, cycle)
