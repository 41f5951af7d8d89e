"""Protocol of updates as pure functions of frozen states: which receiver holds, and is offered, which version.

bind -> prepare(version, base) -> transfer to staging -> verify -> ready (quorum: all, k, or none) -> commit | abort.
Two-phase commit (Gray, 1978) with presumed abort, and leases (Gray and Cheriton, 1989) instead of waiting: a receiver
that is silent past its lease, or not ready by its deadline, is dropped, and gets the whole version when it binds again.
Nothing here reads a clock, a socket or memory: times are arguments, so that a test plays every order of events.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, NamedTuple

Quorum = Literal["all"] | int
"""Receivers that must be ready before a version counts: all that were bound when it was prepared, any k, or 0."""


class ProtocolError(ValueError):
    """Request against the protocol; nothing has changed. The message names the rule."""


class Held(NamedTuple):
    """Version that a receiver serves; version -1: none."""

    run: str = ""
    epoch: int = -1
    version: int = -1
    root: bytes = b""


NOTHING = Held()


class Settings(NamedTuple):
    """Settings of a cohort."""

    quorum: Quorum = "all"
    lease: float = 10.0  # seconds of silence, after which a receiver is dropped
    deadline: float = 60.0  # seconds from an offer to ready
    retries: int = 2  # after damage


STANDARD = Settings()


class Offer(NamedTuple):
    """Version for a receiver; with a `base` it may come as the changes since then, else (-1) whole."""

    run: str
    epoch: int
    version: int
    base: int
    root: bytes
    seconds: float  # until the receiver must be ready


class Phase(StrEnum):
    """Phase of a receiver: nothing offered, a version on its way, a version verified."""

    IDLE = "idle"
    STAGING = "staging"
    READY = "ready"


class Verdict(StrEnum):
    COMMIT = "commit"
    ABORT = "abort"
    WAIT = "wait"


# ------------------------------------------------------------------------------------------------------- the sender


class ReceiverState(NamedTuple):
    """A receiver as the sender knows it."""

    held: Held
    lease: float  # time at which its silence is too long
    phase: Phase = Phase.IDLE
    target: int = -1  # version that it was offered, until it reports the outcome
    deadline: float = 0.0  # time by which it must be ready
    failures: int = 0  # in succession


class Round(NamedTuple):
    """A version that is prepared and not yet decided."""

    version: int
    root: bytes
    deadline: float
    electors: frozenset[str]  # receivers bound when it was prepared, and neither dropped nor gone since
    ready: frozenset[str] = frozenset()
    spoilt: int = 0  # electors that found it damaged in every attempt


class Cohort(NamedTuple):
    """State of a sender."""

    run: str
    epoch: int
    settings: Settings = STANDARD
    receivers: Mapping[str, ReceiverState] = {}
    round: Round | None = None
    committed: int = -1  # newest version that counts, -1 before the first
    root: bytes = b""  # of `committed`
    before: tuple[int, bytes] = (-1, b"")  # version that counted before it, and its root
    prepared: int = -1  # newest version that was ever prepared
    aborted: frozenset[int] = frozenset()
    dropped: tuple[tuple[str, str], ...] = ()  # (name, reason), the newest last, at most REMEMBERED


REMEMBERED = 64
"""Dropped receivers that are kept for status and error messages."""


def open_cohort(run: str, epoch: int, settings: Settings = STANDARD) -> Cohort:
    """Cohort without receivers. ValueError for settings that can't work."""
    quorum, lease, deadline, retries = settings
    if quorum != "all" and (not isinstance(quorum, int) or quorum < 0):
        raise ValueError(f"quorum is {quorum!r}; it must be 'all', or a number: 0 or more")
    if not (lease > 0 and deadline > 0 and retries >= 0):
        raise ValueError(f"lease {lease}, deadline {deadline} seconds must be above 0, retries {retries} at least 0")
    return Cohort(run, epoch, settings)


def bind(cohort: Cohort, name: str, held: Held, now: float) -> Cohort:
    """Adds a receiver. ProtocolError where it must not be served from here."""
    if name in cohort.receivers:
        raise ProtocolError(f"receiver {name} is bound already")
    _check_held(cohort, held)
    return _with(cohort, name, ReceiverState(held, now + cohort.settings.lease))


def _check_held(cohort: Cohort, held: Held) -> None:
    if held.run and held.run != cohort.run:
        raise ProtocolError(f"the receiver serves run {held.run}, this is run {cohort.run}; restart it to change")
    if held.run and held.epoch > cohort.epoch:
        raise ProtocolError(
            f"the receiver has seen epoch {held.epoch} of the run, this is {cohort.epoch}: superseded; end this trainer"
        )


def heard(cohort: Cohort, name: str, now: float) -> Cohort:
    """Renews the lease at a sign of life. ProtocolError for a dropped receiver: it must bind again."""
    return _with(cohort, name, receiver(cohort, name)._replace(lease=now + cohort.settings.lease))


def receiver(cohort: Cohort, name: str) -> ReceiverState:
    """State of a receiver. ProtocolError where it was dropped, or never bound."""
    try:
        return cohort.receivers[name]
    except KeyError:
        why = next((why for dropped, why in reversed(cohort.dropped) if dropped == name), "never bound")
        raise ProtocolError(f"receiver {name} is not of the cohort ({why}); it must bind again") from None


def prepare(cohort: Cohort, version: int, root: bytes, now: float) -> Cohort:
    """Prepares a new version, the newest of its epoch. ProtocolError where it is not, or another one is undecided."""
    if version <= cohort.prepared:
        raise ProtocolError(f"version {version} is stale: epoch {cohort.epoch} has prepared {cohort.prepared}")
    if cohort.round is not None:
        raise ProtocolError(f"version {cohort.round.version} is undecided; {version} comes after it")
    fresh = Round(version, root, now + cohort.settings.deadline, frozenset(cohort.receivers))
    return settle(cohort._replace(round=fresh, prepared=version))


def offer(cohort: Cohort, name: str, now: float) -> tuple[Cohort, Offer | None]:
    """Offers an idle receiver the newest version, undecided or not; None where it has that."""
    member = receiver(cohort, name)
    if member.phase is not Phase.IDLE:
        raise ProtocolError(f"receiver {name} is {member.phase} with version {member.target}; it must end that first")
    newest, last = (cohort.committed, cohort.root), cohort.before
    if cohort.round is not None:
        newest, last = cohort.round[:2], newest
    version, root = newest
    mine = member.held.run == cohort.run and member.held.epoch == cohort.epoch
    if version < 0 or (mine and member.held.version >= version):
        return cohort, None
    base = last[0] if mine and member.held[2:] == last and not member.failures else -1
    seconds = cohort.settings.deadline
    member = member._replace(phase=Phase.STAGING, target=version, deadline=now + seconds)
    return _with(cohort, name, member), Offer(cohort.run, cohort.epoch, version, base, root, seconds)


def ready(cohort: Cohort, name: str, version: int, root: bytes, now: float) -> Cohort:
    """Records that a receiver has staged and verified a version. A repeated report changes nothing."""
    member = _staging(cohort, name, version, (Phase.STAGING, Phase.READY))
    undecided = cohort.round is not None and cohort.round.version == version
    wanted = cohort.round.root if undecided and cohort.round else cohort.root if version == cohort.committed else None
    if wanted is not None and root != wanted:
        raise ProtocolError(f"receiver {name} is ready with another version {version} than was sent")
    lease = now + cohort.settings.lease
    cohort = _with(cohort, name, member._replace(phase=Phase.READY, lease=lease))
    if undecided and cohort.round:
        cohort = cohort._replace(round=cohort.round._replace(ready=cohort.round.ready | {name}))
    return settle(cohort)


def failed(cohort: Cohort, name: str, version: int, why: str, now: float) -> Cohort:
    """Records that a receiver could not take a version. It is offered the newest one whole again, `retries` times."""
    member = _staging(cohort, name, version, (Phase.STAGING,))
    failures = member.failures + 1
    if failures > cohort.settings.retries:
        return settle(drop(cohort, name, f"version {version} failed {failures} times: {why}", spoilt=True))
    lease = now + cohort.settings.lease
    return _with(cohort, name, member._replace(phase=Phase.IDLE, target=-1, failures=failures, lease=lease))


def verdict(cohort: Cohort, version: int) -> Verdict:
    """Outcome of a version that was offered."""
    if version in cohort.aborted or version > cohort.prepared or version < 0:
        return Verdict.ABORT
    return Verdict.WAIT if cohort.round is not None and cohort.round.version == version else Verdict.COMMIT


def done(cohort: Cohort, name: str, held: Held, now: float) -> Cohort:
    """Records that a receiver has followed the verdict, and serves `held`."""
    member = receiver(cohort, name)
    _check_held(cohort, held)
    if member.phase is not Phase.READY:
        raise ProtocolError(f"receiver {name} ends a version that it was not ready for")
    outcome = verdict(cohort, member.target)
    serves_it = (held.epoch, held.version) == (cohort.epoch, member.target)
    if outcome is Verdict.WAIT or (outcome is Verdict.ABORT and serves_it):
        raise ProtocolError(f"receiver {name} serves version {member.target}, which does not count")
    return _with(cohort, name, ReceiverState(held, now + cohort.settings.lease))


def drop(cohort: Cohort, name: str, why: str, spoilt: bool = False) -> Cohort:
    """Removes a receiver; `spoilt`: because it could not take what was sent."""
    if name not in cohort.receivers:
        return cohort
    receivers = {key: value for key, value in cohort.receivers.items() if key != name}
    undecided = cohort.round
    if undecided is not None and name in undecided.electors:
        undecided = undecided._replace(
            electors=undecided.electors - {name}, ready=undecided.ready - {name}, spoilt=undecided.spoilt + spoilt
        )
    dropped = (*cohort.dropped, (name, why))[-REMEMBERED:]
    return settle(cohort._replace(receivers=receivers, round=undecided, dropped=dropped))


def tick(cohort: Cohort, now: float) -> Cohort:
    """Ends the leases and deadlines that have passed, and decides an undecided version by then."""
    for name, member in list(cohort.receivers.items()):
        if member.phase is Phase.STAGING:
            if member.deadline <= now:
                cohort = drop(cohort, name, f"not ready with version {member.target} by its deadline")
        elif member.lease <= now:
            cohort = drop(cohort, name, f"silent for {cohort.settings.lease:g} s")
    late = cohort.round
    if late is not None and late.deadline <= now:
        for name in late.electors - late.ready:  # bound, but it never requested the version
            cohort = drop(cohort, name, f"not ready with version {late.version} by the round's deadline")
        if cohort.round is not None:
            cohort = _end(cohort, cohort.settings.quorum == "all" and not cohort.round.spoilt)
    return cohort


def settle(cohort: Cohort) -> Cohort:
    """Decides the undecided version once its quorum is ready, or no elector is left to wait for.

    "all" counts live receivers: dropped ones are not waited for. Where none took the version, and some found it
    damaged, it is damaged at its source, and aborted.
    """
    undecided, quorum = cohort.round, cohort.settings.quorum
    if undecided is None:
        return cohort
    if quorum == "all":
        if undecided.electors <= undecided.ready:
            return _end(cohort, bool(undecided.ready) or not undecided.spoilt)
    elif len(undecided.ready) >= quorum:
        return _end(cohort, True)
    return cohort


def wakes(cohort: Cohort) -> float | None:
    """Time at which `tick` may next change anything; None: never."""
    times = [member.deadline if member.phase is Phase.STAGING else member.lease for member in cohort.receivers.values()]
    times += [] if cohort.round is None else [cohort.round.deadline]
    return min(times, default=None)


def _end(cohort: Cohort, counts: bool) -> Cohort:
    ended = cohort.round
    assert ended is not None
    if counts:
        before = (cohort.committed, cohort.root)
        return cohort._replace(round=None, committed=ended.version, root=ended.root, before=before)
    awaited = {member.target for member in cohort.receivers.values()}
    return cohort._replace(round=None, aborted=frozenset((cohort.aborted & awaited) | {ended.version}))


def _staging(cohort: Cohort, name: str, version: int, phases: tuple[Phase, ...]) -> ReceiverState:
    member = receiver(cohort, name)
    if member.phase not in phases or member.target != version:
        raise ProtocolError(f"receiver {name} names version {version}; it is {member.phase} with {member.target}")
    return member


def _with(cohort: Cohort, name: str, member: ReceiverState) -> Cohort:
    return cohort._replace(receivers={**cohort.receivers, name: member})


# ----------------------------------------------------------------------------------------------------- the receiver


class ReceiverSide(NamedTuple):
    """State of a receiver, on its own side: the version that it serves, and the one that it stages."""

    held: Held = NOTHING
    phase: Phase = Phase.IDLE
    offered: Offer | None = None
    deadline: float = 0.0


def accept(side: ReceiverSide, offered: Offer, now: float) -> ReceiverSide:
    """Starts to stage an offer. ProtocolError where it is stale, of another run, or upon a base that is not held."""
    held = side.held
    if side.phase is not Phase.IDLE:
        raise ProtocolError(f"version {offered.version} is offered while another is {side.phase}")
    if held.run and offered.run != held.run:
        raise ProtocolError(f"version {offered.version} is of run {offered.run}; {held.run} is served")
    if (offered.epoch, offered.version) <= (held.epoch, held.version):
        raise ProtocolError(
            f"version {offered.version} of epoch {offered.epoch} is stale; {held.version} of {held.epoch} is served"
        )
    if offered.base >= 0 and (offered.epoch, offered.base) != (held.epoch, held.version):
        raise ProtocolError(f"version {offered.version} builds upon {offered.base}; {held.version} is held")
    return ReceiverSide(held, Phase.STAGING, offered, now + offered.seconds)


def staged(side: ReceiverSide, root: bytes, now: float) -> ReceiverSide:
    """Records that the offered version is complete and verified, with this root."""
    if side.phase is not Phase.STAGING or side.offered is None:
        raise ProtocolError("nothing is being staged")
    if root != side.offered.root:
        raise ProtocolError(f"what came as version {side.offered.version} is another one: its root differs")
    if now > side.deadline:
        raise ProtocolError(f"version {side.offered.version} came after its deadline")
    return side._replace(phase=Phase.READY)


def commit(side: ReceiverSide, version: int) -> ReceiverSide:
    """Serves the staged version from now on."""
    offered = side.offered
    if side.phase is not Phase.READY or offered is None or offered.version != version:
        raise ProtocolError(f"version {version} is to be served, but is not staged")
    return ReceiverSide(Held(offered.run, offered.epoch, version, offered.root))


def lost(side: ReceiverSide) -> ReceiverSide:
    """Gives up the staged version: aborted, or the sender is gone without a verdict (presumed abort)."""
    return ReceiverSide(side.held)
