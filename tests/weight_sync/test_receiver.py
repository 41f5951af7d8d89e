"""Offers that a receiver refuses. Every transport runs the rest in transports/test_base.py."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from longhaul.weight_sync import receiver as receivers
from longhaul.weight_sync.protocol import NOTHING, ProtocolError
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.transports import connect, shared_memory, tcp
from tests.helpers.weight_sync_transports import is_whole, tensors, until


def test_a_wrong_base_and_a_stale_offer_are_refused_and_nothing_changes() -> None:
    name = f"@longhaul-test-faults-{time.monotonic_ns()}"
    with Publisher("run", epoch=4, transports=[shared_memory.serve(name)]) as sender:
        sender.publish(5, tensors(5))
        with Receiver(lambda: shared_memory.connect(name, "one")) as receiver:
            assert receiver.wait(5, 20)
            with closing(shared_memory.connect(name, "two")) as source:
                source.bind(NOTHING, 5.0)
                parcel = source.ask(NOTHING, 5.0)
                assert parcel is not None
                for change in ({"base": 4}, {"epoch": 3, "version": 9}, {}, {"run": "other", "version": 9}):
                    bent = parcel._replace(offer=parcel.offer._replace(**change))
                    with pytest.raises(ProtocolError):
                        receiver._take(source, bent)
            assert is_whole(*receiver.latest())


@pytest.mark.parametrize("given", [True, False])
def test_the_receiver_bounds_the_size_that_a_sender_names(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receivers, "machine_memory", lambda: 100)
    transport = tcp.serve()
    with Publisher("run", epoch=4, transports=[transport]) as sender:
        sender.publish(5, tensors(5))
        with Receiver(lambda: connect(transport.address), budget=1000 if given else None) as receiver:
            until(lambda: bool(receiver.errors))
            assert f"a budget of {1000 if given else 75:,} bytes" in receiver.errors[0]
            assert receiver.served is None and receiver.peak_bytes == 0


def test_a_missing_library_is_said_before_any_version_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of vLLM without it waited for 120 s at its first update."""
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ValueError, match=r"needs xxhash: pip install 'longhaul-rl\[sync\]'"):
        receivers.follow(["shm:@nobody"])


def test_a_name_is_taken_over_from_a_killed_sender_alone(tmp_path: Path) -> None:
    name = str(tmp_path / "weights")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(name)  # nobody listens any more
    with closing(shared_memory.serve(name)):
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o600
    with ExitStack() as held, socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(name)
        stopped.listen(0)
        with suppress(BlockingIOError):
            while True:  # until its queue is full
                waiting = held.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(name)
        with pytest.raises(ValueError, match="another sender serves there"):
            shared_memory.serve(name)
    os.unlink(name)
    Path(name).write_text("mine")
    with pytest.raises(ValueError, match="something else is there"):
        shared_memory.serve(name)
    assert Path(name).read_text() == "mine"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_neither_gets_nor_gives_a_version() -> None:
    name = f"@longhaul-{os.getpid()}-users"
    path = "\0" + name[1:]
    other = "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX)"
    asks = f"{other}; s.connect({path!r}); print(s.recv(1))"
    with Publisher("run", transports=[shared_memory.serve(name)]):
        assert subprocess.check_output([sys.executable, "-S", "-c", asks], timeout=20) == b"b''\n"
    serves = f"{other}; s.bind({path!r}); s.listen(); print(); input()"
    command = [sys.executable, "-S", "-u", "-c", serves]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        with pytest.raises(PermissionError, match="is served by another user"):
            shared_memory.connect(name, "one")
        server.kill()
