"""Listener of Gloo, which sums over CPUs, kept shut where no group of processes meets.

Gloo accepts every connection while its process lives, keeps each for good, and aborts where no descriptor is left: a
stranger ends a run by connecting often. It has no setting for that. Its listener is needed only while the processes of
a group of devices meet, and each of them says in the key-value store of JAX's coordination service that it comes. At
other times a socket filter drops every new connection. Connections that exist have no filter. A process
that asks before the filter is off asks again a second later, as TCP does by itself.

Filters are Linux's; elsewhere the listener stays open.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from longhaul.runtime import descriptors

KEYS = "cpu:gloo"
"""Folder of the key-value store with a folder for each group, called by its devices: 0,1,2048/RANK."""

MEETING = 20.0
"""Seconds for which a group may still meet after its last member has come."""

TURN = 0.5
"""Seconds between looks at the store."""

HURRY = 0.05
"""Seconds between looks at the descriptors while the listener is open."""

ATTACH, DETACH = 26, 27
"""Options of a socket, SO_ATTACH_FILTER and SO_DETACH_FILTER."""


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint32))


_NOTHING = _Instruction(0x06, 0, 0, 0)
"""Program of a filter (BPF_RET | BPF_K): zero bytes of each packet pass."""


def drop_newcomers(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, ATTACH, struct.pack("HxxxxxxP", 1, ctypes.addressof(_NOTHING)))


def take_newcomers(listener: socket.socket) -> None:
    with contextlib.suppress(FileNotFoundError):  # it has no filter
        listener.setsockopt(socket.SOL_SOCKET, DETACH, 0)


def listeners() -> list[socket.socket]:
    """TCP sockets of this process that listen, by descriptors of their own."""
    sockets = []
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            sock = socket.socket(fileno=copy) if stat.S_ISSOCK(os.fstat(copy).st_mode) else None
            of_tcp = sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6)
            if sock is not None and of_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sockets.append(sock)  # no `sock.dup`, which would make Gloo's accept wait
            else:
                os.close(copy if sock is None else sock.detach())
    return sockets


class Meetings:
    """Groups that meet, by the store's keys: those of which members lack, or came less than MEETING seconds ago."""

    def __init__(self) -> None:
        self._met: dict[str, float] = {}  # when all had come

    def go_on(self, keys: Iterable[str], now: float) -> bool:
        """True while a group meets, or none has met yet."""
        come = Counter(key.rsplit("/", 1)[0] for key in keys)
        for group, members in come.items():
            if members > group.rsplit("/", 1)[-1].count(","):
                self._met.setdefault(group, now)
        return not come or any(now - self._met.get(group, now) < MEETING for group in come)


class Guard:
    """Thread that opens and shuts listeners; `keys` are those of the store at the time."""

    def __init__(self, guarded: Sequence[socket.socket], keys: Callable[[], Iterable[str]], most: int) -> None:
        """`most`: descriptors of this process with which the listeners are shut in any case."""
        self._guarded, self._keys, self._most = guarded, keys, most
        self._meetings, self._open = Meetings(), True
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="longhaul-gloo", daemon=True)
        self._thread.start()
        atexit.register(self.end)  # a thread within C++ must not outlive the interpreter

    def end(self) -> None:
        """End of the thread, whose descriptors of the listeners are closed."""
        atexit.unregister(self.end)
        self._over.set()
        self._thread.join(5.0)
        for each in self._guarded:
            each.close()

    def _work(self) -> None:
        with contextlib.suppress(Exception):  # the store is gone, as the run will be
            while not self._over.is_set():
                meet = self._meetings.go_on(self._keys(), time.monotonic())
                until = time.monotonic() + TURN
                while not self._over.is_set() and time.monotonic() < until:
                    self._set(meet and _lowest_free() < self._most)
                    self._over.wait(HURRY if meet else TURN)

    def _set(self, accepting: bool) -> None:
        if accepting != self._open:
            for each in self._guarded:
                (take_newcomers if accepting else drop_newcomers)(each)
            self._open = accepting


def _lowest_free() -> int:
    """Number that the next descriptor gets; the limit where there is none."""
    try:
        number = os.dup(0)
    except OSError:
        return sys.maxsize
    os.close(number)
    return number


def guarded(make: Callable[..., Any], keys: Callable[[], Iterable[str]]) -> Callable[..., Any]:
    """`make`, which makes Gloo's transport, such that its listener is guarded."""

    def made(*given: Any, **named: Any) -> Any:
        before = listeners()
        transport = make(*given, **named)
        known = {each.getsockname() for each in before}
        fresh = []
        for each in listeners():
            if each.getsockname() in known:
                each.close()
            else:
                fresh.append(each)
        for each in before:
            each.close()
        Guard(fresh, keys, descriptors.raise_limit() // 2)
        return transport

    return made if sys.platform == "linux" else make
