"""The attacker of `benchmarks.connections`: what it opens, what it says, and that it stays on this machine."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

from benchmarks.connections import GREETING, Reading, Window, attack, compared, listener


def heard(kind: str, count: int) -> list[bytes]:
    """What each of `count` connections has said when the attack is over."""
    said: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        socks = [server.accept()[0] for _ in range(count)]
        for sock in socks:
            with closing(sock):
                data = b""
                while more := sock.recv(4096):
                    data += more
                said.append(data)

    thread = threading.Thread(target=accept)
    thread.start()
    for _ in attack(kind, server.getsockname(), count, 40.0):
        pass
    thread.join()
    server.close()
    return said


def test_each_kind_says_what_it_is_for() -> None:
    assert heard("idle", 5) == [b""] * 5
    assert all(heard("lying", 5)[:4])
    slow = heard("slow", 60)
    assert slow[0] == GREETING[: len(slow[0])] and len(slow[0]) == 1 and slow[-1] == b""


def test_other_machines_are_left_alone() -> None:
    with pytest.raises(ValueError, match="another machine"):
        next(attack("idle", ("192.0.2.1", 80), 1, 1.0))


def test_losses_are_of_the_quiet_times_around() -> None:
    before, begin = Reading(0.0, 0, 1, 20, 0, 0.0, 0.0, 0.0), Reading(10.0, 1000, 2, 20, 0, 10.0, 0.0, 1.0)
    end, after = Reading(20.0, 1900, 5, 22, 0, 19.5, 0.5, 2.0), Reading(30.0, 2900, 6, 20, 2**20, 29.5, 0.5, 2.0)
    found = compared([Window(before, begin, 20), Window(end, after, 22)], [Window(begin, end, 52)])
    assert (found["per_second"], found["loss"], found["cpu_loss"]) == (90, 0.1, round(1 - 900 / 9.5 / 100, 4))
    assert (found["cpu_losses"], found["listening_cpu"]) == ([found["cpu_loss"]], 0.05)
    assert (found["newest_version"], found["descriptors"], found["memory_mb"]) == ([2, 5], [20, 52, 20], [0, 0, 1])
    assert "loss_to_control" not in found
    control = Window(after, Reading(40.0, 3850, 6, 20, 0, 39.0, 0.5, 3.0), 20)  # the attacker alone costs 0.05
    found = compared([Window(before, begin, 20), Window(end, after, 22)], [Window(begin, end, 52)], [control])
    assert (found["loss_to_control"], found["losses_to_control"]) == (round(1 - 90 / 95, 4), [round(1 - 90 / 95, 4)])


def test_the_control_holds_connections_and_accepts_none() -> None:
    with listener() as address:
        for kind in ("idle", "slow", "lying"):
            assert max(attack(kind, address, 120, 100.0)) > 40  # none was ended
