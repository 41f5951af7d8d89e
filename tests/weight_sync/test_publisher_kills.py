"""A receiver or a sender of weights killed in any phase: nobody is held up, and no wrong version is served."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from longhaul.weight_sync.protocol import Settings
from longhaul.weight_sync.publisher import Publisher
from tests.helpers.weight_sync_transports import is_whole, process, receivers, tensors, until, way

QUICK = Settings(lease=3.0, deadline=3.0, retries=1)


RECEIVER = """
import sys, threading, time
from longhaul.weight_sync.transports import socket_server as sockets
from longhaul.weight_sync.receiver import follow
address, phase, version = sys.argv[1], sys.argv[2], int(sys.argv[3])
first = threading.Lock()
def say():  # once, whichever thread comes first
    if first.acquire(blocking=False):
        print("here", flush=True)
def hang(name, after):
    before = getattr(sockets.SocketSource, name)
    def hung(self, *args):
        told = [each for each in args if getattr(getattr(each, "offer", each), "version", each) == version]
        found = before(self, *args) if after else None
        if told:
            say()
            time.sleep(600)
        return before(self, *args) if not after else found
    setattr(sockets.SocketSource, name, hung)
if phase != "serving":
    hang(*{"asked": ("fetch", False), "fetched": ("fetch", True), "staged": ("ready", False), "ready": ("ready", True),
           "committed": ("done", False)}[phase])
receiver = follow([address], name="victim")
assert receiver.wait(version, 60)
held = receiver.latest()
say()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("kind", "phase"),
    [("shared", phase) for phase in ("fetched", "ready", "serving")]
    + [("tcp", phase) for phase in ("asked", "staged", "committed")],
)
def test_a_receiver_killed_in_any_phase_holds_nobody_up(kind: str, phase: str, tmp_path: Path) -> None:
    there = way(kind, tmp_path)
    lane = there.serve()
    with Publisher("run", transports=[lane], settings=Settings(deadline=30.0)) as sender, receivers(there) as (other,):
        sender.publish(1, tensors(1))
        assert other.wait(1, 20)
        with process(sys.executable, "-c", RECEIVER, lane.address, phase, "2") as victim:
            assert victim.stdout is not None
            until(lambda: len(sender.status()["receivers"]) == 2)
            until(lambda: {each["version"] for each in sender.status()["receivers"]} == {1})
            sender.publish(2, tensors(2))
            assert victim.stdout.readline() == "here\n"
            victim.send_signal(signal.SIGKILL)
            victim.wait()
        began = time.monotonic()
        assert sender.wait(2, 20) and other.wait(2, 20), other.errors
        for version in range(3, 9):  # every image serves again
            sender.publish(version, tensors(version))
            assert other.wait(version, 20), other.errors
            assert is_whole(*other.latest())
        assert time.monotonic() - began < 25
        assert sender.peak_bytes <= 4 * sender.status()["image_bytes"]


SENDER = """
import sys, time
import numpy as np
from longhaul.weight_sync import publisher as engine
from longhaul.weight_sync.transports import framing as wire
from longhaul.weight_sync.transports import serve
address, phase = sys.argv[1:]
def hang(*_):
    print("here", flush=True)
    time.sleep(600)
lane = serve(address)
sender = engine.Publisher("run", epoch=1, transports=[lane])
def tensors(v):
    return {"a": np.full(200_000, v, np.int32), "b": np.full((7, 3), v, np.float32), "c": np.array(v, np.uint8)}
sender.publish(1, tensors(1))
assert sys.stdin.readline() == "go\\n"
if phase == "pouring":
    def half(self, data, seconds):
        self.sock.sendall(data[: len(data) // 2])
        hang()
    wire.Wire.pour = half
elif phase == "deciding":
    engine.Publisher.ready = hang
elif phase == "offering":
    engine.Publisher.ask = hang
sender.publish(2, tensors(2))
time.sleep(600)
"""


@pytest.mark.parametrize(("kind", "phase"), [("tcp", "pouring"), ("tcp", "deciding"), ("shared", "deciding")])
def test_a_sender_killed_in_any_phase_leaves_the_old_version_served(kind: str, phase: str, tmp_path: Path) -> None:
    there = way(kind, tmp_path)
    lane = there.serve()
    address = lane.address
    lane.close()
    with receivers(there) as (receiver,):
        with process(sys.executable, "-c", SENDER, address, phase) as sender:
            assert sender.stdin is not None and sender.stdout is not None
            assert receiver.wait(1, 30), receiver.errors
            sender.stdin.write("go\n")
            sender.stdin.flush()
            assert sender.stdout.readline() == "here\n"
            sender.send_signal(signal.SIGKILL)
            sender.wait()
        time.sleep(0.1)
        assert receiver.latest()[0] == 1 and is_whole(*receiver.latest())
        with Publisher("run", epoch=2, transports=[there.serve()]) as again:
            again.publish(1, tensors(1, 200_000))
            until(lambda: receiver.held.epoch == 2)
            assert is_whole(*receiver.latest())
