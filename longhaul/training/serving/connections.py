"""Connections of an HTTP server, bounded: uvicorn's protocol with few strangers and no silent ones."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

MOST = 512
"""Connections at once; a further one is closed."""

SILENT = 10.0
"""Seconds for which a connection may be without a whole request's head."""


class _Refused(asyncio.Protocol):
    """Connection beyond the bound."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def protocol(most: int = MOST, silent: float = SILENT) -> Any:
    """uvicorn's `http` option: makes the protocol of each connection."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    made: weakref.WeakSet[H11Protocol] = weakref.WeakSet()

    def of(config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> asyncio.Protocol:
        begun = sum(each.transport is None for each in made)  # in TLS's handshake
        if len(server_state.connections) + begun >= most:
            return _Refused()
        connection = H11Protocol(config, server_state, app_state, _loop)
        made.add(connection)
        loop = asyncio.get_running_loop()
        loop.call_later(silent, _watch, loop, weakref.ref(connection), silent, None)
        return connection

    return of


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
