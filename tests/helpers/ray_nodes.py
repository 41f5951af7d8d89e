"""A Ray cluster of several nodes on this machine, in a process of its own: `python -m tests.helpers.ray_nodes
CORES...`.

Beside a head without cores there is a node with each of so many cores. Prints the address; then each line of standard
input is the number of a node, which is killed. At its end nothing is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=int(cores)) for cores in sys.argv[1:]]
    print(f"address {cluster.address}", flush=True)
    for line in sys.stdin:
        cluster.remove_node(nodes[int(line)], allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


class Nodes:
    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.address = self._answer("address").split()[1]

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line
        raise RuntimeError(f"the cluster ended with {self._process.wait()}")

    def kill(self, node: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{node}\n")
        self._process.stdin.flush()
        self._answer("killed")


@contextmanager
def nodes(*cores: int) -> Iterator[Nodes]:
    """A cluster; all of its processes are gone afterwards."""
    command = [sys.executable, "-m", "tests.helpers.ray_nodes", *map(str, cores)]
    variables = {k: v for k, v in os.environ.items() if k != "NPROC"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        found = Nodes(process)
        yield found
    finally:
        try:
            process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    end = time.monotonic() + 30
    while left(found.address):
        assert time.monotonic() < end, left(found.address)
        time.sleep(0.2)


def left(address: str) -> list[int]:
    """Processes of the cluster at this address, which all of Ray's have among their words."""
    there = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if address.encode() in words and b"ray" in words and b"longhaul" not in words:
            there.append(int(place.name))
    return there


if __name__ == "__main__":
    main()
