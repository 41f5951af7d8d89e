"""What an update of parameters costs: a model of its stages, each a number of bytes over a rate, and nothing hidden.

Shards go straight from trainers to receivers, each byte of a replica once (`plan`); replicas that the trainers' links
can't feed pass buckets on to one another (`relay`). Stages overlap bucket by bucket, so that an update takes as long as
its busiest resource (stages that share one add up), and what the others need for one bucket; `serial` is the sum, with
no overlap at all. What consumers feel is the swap alone. The rates are data sheets' and assumptions, and printed;
`local` predicts a run on one machine from rates measured there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

GB = 1e9


@dataclass(frozen=True)
class Setting:
    """Who sends what to whom, over what. Bytes, bytes a second, seconds; links in each direction."""

    params: float
    itemsize: float = 2.0  # bf16
    trainers: int = 256
    replicas: int = 16
    per_replica: int = 16  # receivers that share one copy
    nic: float = 50 * GB  # of an accelerator: 400 Gb/s
    efficiency: float = 0.9  # of links, that is reached
    pcie: float = 55 * GB  # generation 5, as measured by many
    hbm: float = 3350 * GB  # H100
    staged: bool = False  # through the hosts' memory, for want of direct access of the network to accelerators
    relay: bool = True  # replicas pass on what they got where that is faster
    bucket: float = 256e6
    delta_ratio: float = 50.0  # dense bytes / bytes of the delta
    codec_share: float = 0.2  # of the accelerator's memory bandwidth that diff, encoding and decoding reach there
    cores: int = 16  # of a host, an accelerator
    core_encode: float = 1.0 * GB  # dense bytes a core encodes, and decodes, a second
    core_decode: float = 2.0 * GB
    latency: float = 50e-6  # of a message of the protocol
    swap: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("params", "itemsize", "nic", "pcie", "hbm", "bucket", "core_encode", "core_decode"):
            if not (value := getattr(self, name)) > 0.0:
                raise ValueError(f"{name} is {value:g}; it must be above 0")
        for name in ("trainers", "replicas", "per_replica", "cores"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("efficiency", "codec_share"):
            if not 0.0 < (value := getattr(self, name)) <= 1.0:
                raise ValueError(f"{name} is {value:g}; it must lie above 0 and not above 1")
        if self.delta_ratio < 1.0:
            raise ValueError(f"delta_ratio is {self.delta_ratio:g}; it must be at least 1, where a delta is no smaller")

    @property
    def nbytes(self) -> float:
        return self.params * self.itemsize


class Term(NamedTuple):
    """One stage: seconds over all its bytes, and how they come about."""

    name: str
    seconds: float
    formula: str
    on: str = ""  # the resource it keeps busy; "": it overlaps with nothing


class Cost(NamedTuple):
    """An update of one kind."""

    name: str
    terms: tuple[Term, ...]
    buckets: int  # that pass through the stages of a receiver
    pause: float  # what a consumer feels of it

    @property
    def serial(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def pipelined(self) -> float:
        """The busiest resource, one bucket in each of the others, and what can't overlap."""
        busy = self.busy
        slowest = max(busy.values(), default=0.0)
        fixed = sum(term.seconds for term in self.terms if not term.on)
        return slowest + (sum(busy.values()) - slowest) / self.buckets + fixed

    @property
    def busy(self) -> dict[str, float]:
        """Seconds of each resource."""
        found: dict[str, float] = {}
        for term in self.terms:
            if term.on:
                found[term.on] = found.get(term.on, 0.0) + term.seconds
        return found

    @property
    def bottleneck(self) -> str:
        """The resource that is busiest, or the longest stage where none overlaps."""
        busy = self.busy or {term.name: term.seconds for term in self.terms}
        return max(busy, key=lambda name: busy[name])


def costs(of: Setting) -> tuple[Cost, ...]:
    """The kinds of update that there are: full, and by deltas made on the accelerators or by the hosts' cores."""
    return full(of), delta(of), delta(of, host=True)


def full(of: Setting) -> Cost:
    """All of the parameters."""
    return _cost("full", of, 1.0, [], [])


def delta(of: Setting, host: bool = False) -> Cost:
    """A delta: the same ways, fewer bytes; but whole shards are read for the difference, and again to apply it."""
    shard, part = of.nbytes / of.trainers, of.nbytes / of.per_replica
    on = of.hbm * of.codec_share
    if host:
        before = [
            Term("base from accelerator", shard / of.pcie, "bytes / trainers / PCIe", "sender PCIe"),
            Term("encode", shard / (of.cores * of.core_encode), "bytes / trainers / cores / encoding", "sender cores"),
        ]
        each = "bytes / receivers of a replica"
        after = [
            Term("decode", part / (of.cores * of.core_decode), f"{each} / cores / decoding", "receiver cores"),
            Term("place", part / of.pcie, f"{each} / PCIe", "receiver PCIe"),
        ]
        return _cost("delta, by host cores", of, of.delta_ratio, before, after)
    before = [
        Term("diff", 2.0 * shard / of.hbm, "2 x bytes / trainers / memory", "sender memory"),
        Term("encode", shard / on, "bytes / trainers / (memory x codec's share)", "sender memory"),
    ]
    each = "bytes / receivers of a replica"
    after = [Term("decode", part / on, f"{each} / (memory x codec's share)", "receiver memory")]
    return _cost("delta, on accelerators", of, of.delta_ratio, before, after)


def _cost(name: str, of: Setting, ratio: float, before: list[Term], after: list[Term]) -> Cost:
    """The stages of a transfer of bytes / ratio between what comes before and after it."""
    sent, nic = of.nbytes / ratio, of.nic * of.efficiency
    part = sent / of.per_replica
    over = "" if ratio == 1.0 else " / ratio"
    direct = of.replicas * sent / (of.trainers * nic)
    passed = sent / (of.trainers * nic)
    buckets = max(1, math.ceil(part / of.bucket))
    relayed = of.relay and direct > max(part / nic, passed)
    each = f"bytes{over} / receivers of a replica"
    sender = Term("sender NIC", direct, f"replicas x bytes{over} / trainers / link", "sender NIC")
    if relayed:
        sender = Term("sender NIC", passed, f"bytes{over} / trainers / link: to the first replica", "sender NIC")
    terms = [*before, sender, Term("receiver NIC", part / nic, f"{each} / link", "receiver NIC")]
    if relayed:
        hops = math.ceil(math.log2(of.replicas)) if of.replicas > 1 else 0
        terms.append(Term("relay NIC", part / nic, f"{each} / link, on the way out", "receiver NIC, out"))
        filling = hops * part / buckets / nic
        terms.append(Term("relay filling", filling, "log2(replicas) x a bucket / link"))
    if of.staged:
        out = f"bytes{over} / trainers / PCIe"
        terms.append(Term("sender PCIe", sent / of.trainers / of.pcie, out, "sender PCIe"))
        terms.append(Term("receiver PCIe", part / of.pcie, f"{each} / PCIe", "receiver PCIe"))
    copied = 3.0 * of.nbytes / of.per_replica / of.hbm
    staging = "3 x bytes / receivers of a replica / memory"
    terms += [*after, Term("staging and check", copied, staging, "receiver memory")]
    messages = 4.0 * of.latency * math.ceil(math.log2(max(2, of.replicas * of.per_replica)))
    terms.append(Term("protocol", messages, "4 messages x log2(receivers) x latency"))
    terms.append(Term("swap", of.swap, "the pause that consumers feel"))
    return Cost(name, tuple(terms), buckets, of.swap)


def assumptions(of: Setting) -> list[tuple[str, str]]:
    """Every number that the model takes as given, in words."""
    return [
        ("parameters", f"{of.params:.4g} of {of.itemsize:g} bytes: {of.nbytes / GB:,.1f} GB"),
        ("trainers", f"{of.trainers:,}, each with {of.nbytes / of.trainers / GB:,.2f} GB of them"),
        ("receivers", f"{of.replicas:,} replicas of {of.per_replica:,}, each with "
         f"{of.nbytes / of.per_replica / GB:,.1f} GB"),
        ("link", f"{of.nic * 8 / GB:g} Gb/s an accelerator and direction, of which {of.efficiency:.0%} is reached"),
        ("path", "through the hosts' memory, by PCIe" if of.staged else "from accelerator to accelerator"),
        ("PCIe, memory", f"{of.pcie / GB:g} GB/s, {of.hbm / GB:g} GB/s"),
        ("bucket", f"{of.bucket / 1e6:g} MB a receiver"),
        ("relay", "replicas pass on what they got where that is faster" if of.relay else "none"),
        ("delta", f"{of.delta_ratio:g} times smaller than dense: it follows from the learning rate (docs/sync.md)"),
        ("codec on accelerators", f"{of.codec_share:.0%} of the memory's bandwidth: assumed, there is no kernel yet"),
        ("codec on hosts", f"{of.cores} cores an accelerator, each {of.core_encode / GB:g} GB/s encoding and "
         f"{of.core_decode / GB:g} decoding"),
        ("staging", "written, read for its digest, and read by the first use; then one pointer is swapped"),
        ("messages", f"{of.latency * 1e6:g} us each; swap {of.swap * 1e3:g} ms"),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- local runs


class Rates(NamedTuple):
    """Bytes a second of one thread of this machine while as many work as do in a run (`rates` measures them)."""

    gather: float  # copied into an image that is there already, with digests
    loopback: float  # through TCP sockets, digested as they come, by two cores that carry both ends of them all
    digest: float  # of an image that is mapped


def local(
    nbytes: float, receivers: int, cores: int, rates: Rates, lane: str = "shm", delay: float = 2e-3, threads: int = 2,
    verify: str = "once",
) -> Cost:  # fmt: skip
    """A run on one machine, by shared memory (`shm`) or TCP: who has no core of his own waits for one.

    The sender copies once, with digests, in so many threads. Then receivers map the image, which all of them together
    read `once` for its digests, or each of them ("always"), or none ("moved"); or the sender pours a stream to each,
    digested as it comes. `delay` is for messages. Nothing overlaps: a version is offered when it is whole. Raises
    ValueError for another lane.
    """
    if lane not in ("shm", "tcp"):
        raise ValueError(f"no local lane is named {lane!r}; there are shm and tcp")
    copied = nbytes / rates.gather / max(1, min(threads, cores))
    gather = Term("gather", copied, "bytes / threads / copying with digests")
    messages = Term("protocol", delay, "messages")
    if lane == "shm":
        beside = max(1, min(receivers, cores))  # who read at once
        passes = {"once": 1, "always": receivers, "moved": 0}[verify]
        check = Term("check", passes * nbytes / beside / rates.digest, f"{passes} x bytes / {beside} at once / digest")
        return Cost("shared memory", (gather, check, messages), 1, 0.0)
    streams = max(1.0, 2.0 * receivers / max(2, cores))  # both ends of a stream want a core
    wire = Term("wire", streams * nbytes / rates.loopback, "rounds x bytes / loopback")
    return Cost("TCP", (gather, wire, messages), 1, 0.0)
