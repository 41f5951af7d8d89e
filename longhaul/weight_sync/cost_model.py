"""Cost model of an update of parameters: each stage is a number of bytes over a rate.

Shards go straight from trainers to receivers, each byte of a replica once (`resharding.plan`); replicas that the
trainers' links can't feed pass buckets on to one another. Stages overlap bucket by bucket: an update takes as long as
its busiest resource (stages that share one add up), plus the time of one bucket in the others; `serial` is the sum
without overlap. Consumers notice the swap alone. Rates are from data sheets or assumed, and printed; `local` predicts a
run on one machine from rates measured there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longhaul.runtime.errors import FieldError

GB = 1e9


@dataclass(frozen=True)
class Setting:
    """Sizes and rates of an update, in bytes, bytes a second and seconds; link rates hold for each direction."""

    params: float
    itemsize: float = 2.0  # bf16
    trainers: int = 256
    replicas: int = 16
    per_replica: int = 16  # receivers that share one replica
    nic: float = 50 * GB  # link of an accelerator: 400 Gb/s
    efficiency: float = 0.9  # share of a link's rate that is reached
    pcie: float = 55 * GB  # PCIe 5, as usually measured
    hbm: float = 3350 * GB  # H100
    staged: bool = False  # through the hosts' memory, without direct access of the network to accelerators
    relay: bool = True  # replicas pass buckets on where that is faster
    bucket: float = 256e6
    delta_ratio: float = 50.0  # dense bytes / bytes of the delta
    codec_share: float = 0.2  # share of an accelerator's memory bandwidth that encoding and decoding reach
    cores: int = 16  # of a host, for each accelerator
    core_encode: float = 1.0 * GB  # dense bytes that a core encodes a second
    core_decode: float = 2.0 * GB  # dense bytes that a core decodes a second
    latency: float = 50e-6  # seconds of a message
    swap: float = 1e-3
    memory: float = 180 * GB  # of an accelerator: a B200's

    def __post_init__(self) -> None:
        for name in ("params", "itemsize", "nic", "pcie", "hbm", "bucket", "core_encode", "core_decode", "memory"):
            if not (value := getattr(self, name)) > 0.0:
                raise FieldError(name, f"{value:g}", "it must be above 0")
        for name in ("trainers", "replicas", "per_replica", "cores"):
            if (value := getattr(self, name)) < 1:
                raise FieldError(name, value, "it must be at least 1")
        for name in ("efficiency", "codec_share"):
            if not 0.0 < (value := getattr(self, name)) <= 1.0:
                raise FieldError(name, f"{value:g}", "it must lie above 0 and not above 1")
        if self.delta_ratio < 1.0:
            raise FieldError("delta_ratio", f"{self.delta_ratio:g}", "it must be at least 1")
        least = math.ceil(self.nbytes / self.memory)
        for name, value, count, remedy in (
            ("receivers", f"{self.replicas}x{self.per_replica}", self.per_replica, "share a replica among"),
            ("trainers", f"{self.trainers}", self.trainers, "take"),
        ):
            if count < least:
                raise FieldError(
                    name, value,
                    f"each would hold {self.nbytes / count / GB:,.0f} GB of parameters in {self.memory / GB:,.0f} GB; "
                    f"give more memory (--memory-gb), or {remedy} at least {least}",
                )  # fmt: skip

    @property
    def nbytes(self) -> float:
        return self.params * self.itemsize

    @property
    def held(self) -> float:
        """Bytes of a receiver's part."""
        return self.nbytes / self.per_replica


class Term(NamedTuple):
    """One stage: its seconds over all bytes, and their formula."""

    name: str
    seconds: float
    formula: str
    on: str = ""  # resource that it keeps busy; "": it overlaps with nothing


class Cost(NamedTuple):
    """Cost of one kind of update."""

    name: str
    terms: tuple[Term, ...]
    buckets: int  # of a receiver, which pass through the stages
    pause: float  # seconds that a consumer waits

    @property
    def serial(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def pipelined(self) -> float:
        """Seconds of the busiest resource, of one bucket in each other, and of the stages that can't overlap."""
        busy = self.busy
        slowest = max(busy.values(), default=0.0)
        fixed = sum(term.seconds for term in self.terms if not term.on)
        return slowest + (sum(busy.values()) - slowest) / self.buckets + fixed

    @property
    def busy(self) -> dict[str, float]:
        """Seconds of each resource."""
        busy: dict[str, float] = {}
        for term in self.terms:
            if term.on:
                busy[term.on] = busy.get(term.on, 0.0) + term.seconds
        return busy

    @property
    def bottleneck(self) -> str:
        """Busiest resource, or the longest stage where none overlaps."""
        busy = self.busy or {term.name: term.seconds for term in self.terms}
        return max(busy, key=lambda name: busy[name])


def costs(case: Setting) -> tuple[Cost, ...]:
    """Costs of the kinds of update: full, by deltas made on the accelerators, by deltas made by the hosts' cores."""
    return full(case), delta(case), delta(case, host=True)


def full(case: Setting) -> Cost:
    """Cost of sending all parameters."""
    return _cost("full", case, 1.0, [], [])


def delta(case: Setting, host: bool = False) -> Cost:
    """Cost of a delta: fewer bytes travel, but whole shards are read for the difference and again to apply it."""
    shard, part = case.nbytes / case.trainers, case.nbytes / case.per_replica
    codec_rate = case.hbm * case.codec_share
    if host:
        before = [
            Term("base from accelerator", shard / case.pcie, "bytes / trainers / PCIe", "sender PCIe"),
            Term(
                "encode", shard / (case.cores * case.core_encode), "bytes / trainers / cores / encoding", "sender cores"
            ),
        ]
        each = "bytes / receivers of a replica"
        after = [
            Term("decode", part / (case.cores * case.core_decode), f"{each} / cores / decoding", "receiver cores"),
            Term("place", part / case.pcie, f"{each} / PCIe", "receiver PCIe"),
        ]
        return _cost("delta, by host cores", case, case.delta_ratio, before, after)
    before = [
        Term("diff", 2.0 * shard / case.hbm, "2 x bytes / trainers / memory", "sender memory"),
        Term("encode", shard / codec_rate, "bytes / trainers / (memory x codec's share)", "sender memory"),
    ]
    each = "bytes / receivers of a replica"
    after = [Term("decode", part / codec_rate, f"{each} / (memory x codec's share)", "receiver memory")]
    return _cost("delta, on accelerators", case, case.delta_ratio, before, after)


def _cost(name: str, case: Setting, ratio: float, before: list[Term], after: list[Term]) -> Cost:
    """Cost of a transfer of bytes / ratio, between the terms `before` and `after`."""
    sent, nic = case.nbytes / ratio, case.nic * case.efficiency
    part = sent / case.per_replica
    over = "" if ratio == 1.0 else " / ratio"
    direct = case.replicas * sent / (case.trainers * nic)
    passed = sent / (case.trainers * nic)
    buckets = max(1, math.ceil(part / case.bucket))
    relayed = case.relay and direct > max(part / nic, passed)
    each = f"bytes{over} / receivers of a replica"
    sender = Term("sender NIC", direct, f"replicas x bytes{over} / trainers / link", "sender NIC")
    if relayed:
        sender = Term("sender NIC", passed, f"bytes{over} / trainers / link: to the first replica", "sender NIC")
    terms = [*before, sender, Term("receiver NIC", part / nic, f"{each} / link", "receiver NIC")]
    if relayed:
        hops = math.ceil(math.log2(case.replicas)) if case.replicas > 1 else 0
        terms.append(Term("relay NIC", part / nic, f"{each} / link, on the way out", "receiver NIC, out"))
        filling = hops * part / buckets / nic
        terms.append(Term("relay filling", filling, "log2(replicas) x a bucket / link"))
    if case.staged:
        out = f"bytes{over} / trainers / PCIe"
        terms.append(Term("sender PCIe", sent / case.trainers / case.pcie, out, "sender PCIe"))
        terms.append(Term("receiver PCIe", part / case.pcie, f"{each} / PCIe", "receiver PCIe"))
    copied = 3.0 * case.nbytes / case.per_replica / case.hbm
    staging = "3 x bytes / receivers of a replica / memory"
    terms += [*after, Term("staging and check", copied, staging, "receiver memory")]
    messages = 4.0 * case.latency * math.ceil(math.log2(max(2, case.replicas * case.per_replica)))
    terms.append(Term("protocol", messages, "4 messages x log2(receivers) x latency"))
    terms.append(Term("swap", case.swap, "the pause that consumers feel"))
    return Cost(name, tuple(terms), buckets, case.swap)


def assumptions(case: Setting) -> list[tuple[str, str]]:
    """Assumptions of the model: (name, value in words)."""
    return [
        ("parameters", f"{case.params:.4g} of {case.itemsize:g} bytes: {case.nbytes / GB:,.1f} GB"),
        ("trainers", f"{case.trainers:,}, each with {case.nbytes / case.trainers / GB:,.2f} GB of them"),
        ("receivers", f"{case.replicas:,} replicas of {case.per_replica:,}, each with "
         f"{case.nbytes / case.per_replica / GB:,.1f} GB"),
        ("memory", f"{2.0 * case.held / GB:,.1f} GB of {case.memory / GB:,.0f} while a receiver stages a version "
         f"beside its own{': too much' if 2.0 * case.held > case.memory else ''}"),
        ("link", f"{case.nic * 8 / GB:g} Gb/s an accelerator and direction, of which {case.efficiency:.0%} "
         "is reached"),
        ("path", "through the hosts' memory, by PCIe" if case.staged else "from accelerator to accelerator"),
        ("PCIe, memory", f"{case.pcie / GB:g} GB/s, {case.hbm / GB:g} GB/s"),
        ("bucket", f"{case.bucket / 1e6:g} MB a receiver"),
        ("relay", "replicas pass on what they got where that is faster" if case.relay else "none"),
        ("delta", f"{case.delta_ratio:g} times smaller than dense: it follows from the learning rate (docs/sync.md)"),
        ("codec on accelerators", f"{case.codec_share:.0%} of the memory's bandwidth: assumed, there is no kernel yet"),
        ("codec on hosts", f"{case.cores} cores an accelerator, each {case.core_encode / GB:g} GB/s encoding and "
         f"{case.core_decode / GB:g} decoding"),
        ("staging", "written, read for its digest, and read by the first use; then one pointer is swapped"),
        ("messages", f"{case.latency * 1e6:g} us each; swap {case.swap * 1e3:g} ms"),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- local runs


class Rates(NamedTuple):
    """Bytes a second of one thread of this machine while all threads of a run work (`bench.cases.sync.Sample`)."""

    gather: float  # copied into an image with digests
    loopback: float  # through TCP sockets, digested as they arrive, by two cores for both ends
    digest: float  # digested of a mapped image


def local(nbytes: float, receivers: int, cores: int, rates: Rates, lane: str = "shm") -> Cost:
    """Cost of a run on one machine, by shared memory (`shm`) or TCP. ValueError for another lane.

    The sender copies once, with digests, in two threads. By shared memory the receivers map the image and read it once,
    together, for its digests; by TCP the sender sends each a stream that is digested as it arrives. Stages do not
    overlap: a version is offered when it is complete. A process without a core of its own waits for one.
    """
    if lane not in ("shm", "tcp"):
        raise ValueError(f"no local lane is named {lane!r}; there are shm and tcp")
    copied = nbytes / rates.gather / max(1, min(2, cores))
    gather = Term("gather", copied, "bytes / threads / copying with digests")
    messages = Term("protocol", 2e-3, "messages")
    if lane == "shm":
        readers = max(1, min(receivers, cores))
        check = Term("check", nbytes / readers / rates.digest, f"bytes / {readers} at once / digest")
        return Cost("shared memory", (gather, check, messages), 1, 0.0)
    streams = max(1.0, 2.0 * receivers / max(2, cores))  # both ends of a stream want a core
    wire = Term("wire", streams * nbytes / rates.loopback, "rounds x bytes / loopback")
    return Cost("TCP", (gather, wire, messages), 1, 0.0)


class Rehearsal(NamedTuple):
    """Sharded round (`weight_sync.sharded.Outcome`), small or whole: bytes, and the seconds until each stage's end."""

    sent: int  # by the sender that sends most
    received: int  # by the receiver that gets most
    prepared: float
    written: float
    verified: float
    ended: float


def sharded(sent: int, received: int, smaller: Sequence[Rehearsal], larger: Sequence[Rehearsal]) -> Cost:
    """Cost of a sharded round in which the busiest sender sends `sent` bytes, and the busiest receiver gets `received`.

    `smaller` are rounds of next to nothing, and `larger` of a part of the plan (`resharding.sample`), by the same
    processes, whose pages, numbers at once and lengths of runs are those of the whole. Medians of both make the line on
    which each stage lies: messages, and seconds a byte. ValueError where `larger` have no more bytes than `smaller`.
    """
    few, more = ([statistics.median(each) for each in zip(*rounds, strict=True)] for rounds in (smaller, larger))
    if more[0] <= few[0] or more[1] <= few[1]:
        raise ValueError("rounds of a part must have more bytes than those of next to nothing; give a larger share")
    stages = [[b - a for a, b in zip((0.0, *times), times)] for times in (few[2:], more[2:])]

    def line(stage: int, nbytes: int, side: int) -> float:
        slope = (stages[1][stage] - stages[0][stage]) / (more[side] - few[side])
        return max(stages[0][stage] + slope * (nbytes - few[side]), 0.0)

    return Cost(
        "sharded",
        (
            Term("prepare", stages[1][0], "messages"),
            Term("send", line(1, sent, 0), "messages + bytes of the busiest sender / its rate"),
            Term("verify", line(2, received, 1), "messages + bytes of the busiest receiver / its rate"),
            Term("decide", stages[1][3], "messages"),
        ),
        1,
        0.0,
    )
