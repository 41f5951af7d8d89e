"""Receiver process of `longhaul sync bench`: commands on stdin, one a line, answers on stdout, one JSON object a line.

It also measures the limits of any transport: a private copy of another process's memory, and a bare loopback socket.
"""

from __future__ import annotations

import json
import mmap
import shutil
import socket
import sys
import threading
import time
from typing import Any

import numpy as np

from longhaul.weight_sync.receiver import follow


class Probe:
    """Executes commands; times are those of `time.monotonic`, which all processes of a machine share."""

    def __init__(self, address: str, size: int, descriptor: int, budget: int) -> None:
        self.at: dict[int, float] = {}
        self._came = threading.Condition()
        self.receiver = follow([address], name="probe", budget=budget, on_commit=self._note)
        self.source = np.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
        self.private = np.ones(size, np.uint8)  # touches its pages

    def _note(self, version: int) -> None:
        with self._came:
            self.at[version] = time.monotonic()
            self._came.notify_all()

    def wait(self, version: int) -> dict[str, Any]:
        """Time at which a version came, and its stages."""
        with self._came:
            if not self._came.wait_for(lambda: version in self.at, 120):
                raise TimeoutError(f"version {version} did not come: {self.receiver.errors}")
        root = self.receiver.held.root.hex()
        return {"at": self.at[version], "root": root, "peak": self.receiver.peak_bytes, **self.receiver.seconds}

    def copy(self) -> dict[str, Any]:
        """Limit of memory: a private copy."""
        began = time.monotonic()
        self.private[:] = self.source
        return {"began": began, "at": time.monotonic()}

    def stream(self, port: int) -> dict[str, Any]:
        """Limit of a loopback socket: bare bytes."""
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            into, done = self.private.data, 0
            while done < len(into):
                done += sock.recv_into(into[done:])
        return {"at": time.monotonic()}


def main() -> None:
    """Entry point. Arguments: those of Probe, and a folder to remove at the end, which a killed sender can't remove."""
    address, size, descriptor, budget, folder = sys.argv[1:]
    probe = Probe(address, int(size), int(descriptor), int(budget))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command, _, number = line.strip().partition(" ")
        used = time.process_time()
        if command == "copy":
            answer = probe.copy()
        elif command == "cpu":
            answer = {"cpu": time.process_time()}
        else:
            answer = (probe.wait if command == "wait" else probe.stream)(int(number))
        print(json.dumps({**answer, "used": time.process_time() - used}), flush=True)
    probe.receiver.close()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
