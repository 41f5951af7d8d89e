"""`longhaul launch`: several processes of one training run, started and looked after from outside.

Each process gets the environment that `process_group.find` reads. Where one dies the others abort or hang, so all are
ended; with `--restarts` they begin again from the newest intact checkpoint. The supervisor runs no JAX: nothing that
they do can take it down, and where it is killed itself, they end too. They run on this machine
(`runtime.launch.local`) or on a Ray cluster (`runtime.launch.ray`); the rest is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from longhaul.cli import flags
from longhaul.cli.flags import DEBUG, FLOAT, INT, TEXT, Flag, FlagError, choice
from longhaul.runtime import heartbeat
from longhaul.runtime.devices import machine_memory
from longhaul.runtime.launch import local
from longhaul.runtime.launch.supervisor import DEADLINE, say, supervise

FOOTPRINT = 2**29
"""Bytes that a process takes at least: training CartPole on four worlds takes 0.62 GB."""

ABOUT = "Several processes of one training run, looked after: longhaul launch --hosts N -- train RECIPE ..."

FLAGS = (
    Flag("hosts", INT, 2, "processes, each of which stands for a host", least=1),
    Flag("devices_per_host", INT, None, "devices of each process", shown="the machine's cores, shared", least=1),
    Flag("restarts", INT, 0, "new starts from the newest checkpoint, after deaths without a new one between", least=0),
    Flag("deadline", FLOAT, DEADLINE, "seconds from a process's start, or a save, to updates", least=heartbeat.SILENCE),
    Flag("on", choice(("here", "ray")), "here", "where: on this machine, or on the nodes of a Ray cluster"),
    DEBUG,
)

RAY = (
    Flag("address", TEXT, "auto",
         "of the cluster: HOST:PORT; auto: RAY_ADDRESS, or one on this machine; local: a new one"),
    Flag("place", choice(("strict", "spread", "pack")), "strict",
         "strict: each process has a node of its own; spread: on as many nodes as there are; pack: on few"),
    Flag("fewest", INT, None, "processes with which a run may go on where nodes are gone", shown="all", least=1),
    Flag("patience", FLOAT, 60.0, "seconds that a start waits for nodes", least=0),
)  # fmt: skip


def _split_argv(argv: list[str]) -> tuple[list[str], list[str]]:
    """(flags of launch, the command behind them); -- between the two may be left out."""
    cut = argv.index("--") if "--" in argv else argv.index("train") if "train" in argv else len(argv)
    return argv[:cut], argv[cut:][argv[cut : cut + 1] == ["--"] :]


def launch(argv: Sequence[str]) -> int:
    """`longhaul launch [--hosts N] [--devices-per-host M] [--restarts K] [--on ray] -- train RECIPE ...`."""
    own, command = _split_argv(list(argv))
    groups = {"": list(FLAGS), "ray: With --on ray, which needs longhaul-rl[cluster].": list(RAY)}
    given = flags.parse("launch", ABOUT, groups, own)
    values = given.values
    if command[:1] != ["train"]:
        raise FlagError("what is to be launched? longhaul launch --hosts N -- train RECIPE ...")
    count, devices, restarts, deadline = (values[n] for n in ("hosts", "devices_per_host", "restarts", "deadline"))
    if values["on"] == "ray":
        from longhaul.runtime.launch import ray, ray_cluster

        fewest = values["fewest"] or count
        if fewest > count:
            raise FlagError(f"--fewest is {fewest}; it must be at most --hosts, {count}")
        layout = ray.Wanted(count, fewest, devices, values["place"], values["patience"])
        with ray_cluster.joined(values["address"]):
            return supervise(command, ray.starter(layout, say), restarts, deadline)
    lost = [f"--{flag.name}" for flag in RAY if flag.name in given.given]
    if lost:
        raise FlagError(f"{', '.join(lost)} can be given with --on ray only; add it, or leave them out")
    total = machine_memory()
    if count > (most := max(1, total // FOOTPRINT)):  # they would take the machine down together
        raise FlagError(
            f"--hosts is {count}; this machine's {total / 1e9:.1f} GB hold at most {most} processes, "
            f"of {FOOTPRINT / 1e9:.1f} GB or more each; choose fewer, or a cluster by --on ray"
        )
    return supervise(command, functools.partial(local.Local, count=count, devices=devices), restarts, deadline)
