"""Gloo's listener: strangers are dropped where no group meets, and who has come stays."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable

import pytest

from longhaul.runtime import gloo_listener
from longhaul.runtime.gloo_listener import MEETING, Guard, Meetings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="filters are Linux's")


def test_a_group_meets_until_all_have_come_and_a_while_longer() -> None:
    meetings, pair, four = Meetings(), ["cpu:gloo/0,2048/0", "cpu:gloo/0,2048/1"], "cpu:gloo/0,1,2048,2049/"
    assert meetings.go_on([], 0.0)  # none has met yet
    assert meetings.go_on(pair[:1], 100.0)
    assert meetings.go_on(pair, 200.0) and meetings.go_on(pair, 199.0 + MEETING)
    assert not meetings.go_on(pair, 200.0 + MEETING)
    some = pair + [f"{four}{rank}" for rank in range(3)]
    assert meetings.go_on(some, 1000.0) and meetings.go_on([*some, f"{four}3"], 2000.0)
    assert not meetings.go_on([*some, f"{four}3"], 2000.0 + MEETING)


def reached(listener: socket.socket) -> bool:
    with socket.socket() as tried:
        tried.settimeout(0.3)  # less than TCP's second
        return tried.connect_ex(listener.getsockname()) == 0


def until(ready: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60.0
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)
    return ready()


def test_strangers_are_dropped_but_while_a_group_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_listener, "TURN", 0.05)
    monkeypatch.setattr(gloo_listener, "MEETING", 0.2)
    keys, guards, ends = list[str](), list[Guard](), contextlib.ExitStack()
    monkeypatch.setattr(gloo_listener, "Guard", lambda *given: guards.append(Guard(*given)))

    def make() -> socket.socket:
        made = ends.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        made.setblocking(False)
        return made

    own = make()
    descriptors = len(os.listdir("/dev/fd"))
    listener = gloo_listener.guarded(make, lambda: list(keys))()
    assert len(os.listdir("/dev/fd")) == descriptors + 2  # the guard holds one of its own
    assert not os.get_blocking(listener.fileno())  # as Gloo's loop needs it
    assert reached(listener)
    with socket.create_connection(listener.getsockname()) as early:
        keys += ["cpu:gloo/0,1/0", "cpu:gloo/0,1/1"]
        assert until(lambda: not reached(listener))
        assert reached(own)  # no listener of others
        early.sendall(b"still here")
    keys.append("cpu:gloo/0,2/0")
    with socket.socket() as late:  # dropped at first, it asks again by itself
        late.settimeout(60.0)
        late.connect(listener.getsockname())
    keys.append("cpu:gloo/0,2/2")
    assert until(lambda: not reached(listener))
    guards[0].end()
    assert len(os.listdir("/dev/fd")) == descriptors + 1
    ends.close()


def test_no_group_meets_where_descriptors_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        guard = Guard([socket.socket(fileno=os.dup(listener.fileno()))], list, most=gloo_listener._lowest_free() + 8)
        assert reached(listener)
        held = [os.dup(0) for _ in range(8)]
        assert until(lambda: not reached(listener))
        for each in held:
            os.close(each)
        assert until(lambda: reached(listener))
        guard.end()
