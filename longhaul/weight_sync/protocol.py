"""The protocol of updates as pure functions of frozen states: who holds what, who is offered what, when it counts.

bind -> prepare(version, base) -> transfer to staging -> verify -> ready (quorum: all, k, or none) -> commit | abort.
Two-phase commit (Gray, 1978) with presumed abort, and leases (Gray and Cheriton, 1989) in the place of waiting: who
is silent past its lease, or not ready by its deadline, is dropped, and gets the whole version when it comes again.
Nothing here reads a clock, a socket or memory: times are arguments, so that a test plays every order of events.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, NamedTuple

Quorum = Literal["all"] | int
"""How many must be ready before a version counts: all who were bound when it was prepared, k of any, or 0: none."""


class ProtocolError(ValueError):
    """What a side asked for is against the protocol; nothing has changed. The message says which rule."""


class Held(NamedTuple):
    """What a receiver serves."""

    run: str = ""
    epoch: int = -1
    version: int = -1
    root: bytes = b""


NOTHING = Held()


class Settings(NamedTuple):
    """Of a cohort. Seconds: `lease` of silence, `deadline` from an offer to ready. `retries` after damage."""

    quorum: Quorum = "all"
    lease: float = 10.0
    deadline: float = 60.0
    retries: int = 2


STANDARD = Settings()


class Offer(NamedTuple):
    """A version for a receiver; with a `base` it may come as what changed since, else (-1) whole."""

    run: str
    epoch: int
    version: int
    base: int
    root: bytes
    seconds: float  # until who was offered it must be ready


class Phase(StrEnum):
    IDLE = "idle"
    STAGING = "staging"
    READY = "ready"


class Verdict(StrEnum):
    COMMIT = "commit"
    ABORT = "abort"
    WAIT = "wait"


# ------------------------------------------------------------------------------------------------------- the sender


class Member(NamedTuple):
    """A receiver as the sender knows it. `target` is what it was offered, until it says how that ended."""

    held: Held
    lease: float  # when its silence is too long
    phase: Phase = Phase.IDLE
    target: int = -1
    deadline: float = 0.0  # when it must be ready
    failures: int = 0  # in succession


class Round(NamedTuple):
    """A version that is prepared and not yet decided."""

    version: int
    root: bytes
    deadline: float
    electors: frozenset[str]  # bound when it was prepared, and neither dropped nor gone since
    ready: frozenset[str] = frozenset()
    spoilt: int = 0  # electors that found it damaged to the end
    held: bool = False  # whether it may count is said elsewhere, and not yet


class Cohort(NamedTuple):
    """A sender's whole knowledge. `committed` is the newest version that counts, -1 before the first."""

    run: str
    epoch: int
    settings: Settings = STANDARD
    members: Mapping[str, Member] = {}
    round: Round | None = None
    committed: int = -1
    root: bytes = b""  # of `committed`
    before: tuple[int, bytes] = (-1, b"")  # what counted before it, and its root
    prepared: int = -1  # the newest version that ever was
    aborted: frozenset[int] = frozenset()
    dropped: tuple[tuple[str, str], ...] = ()  # who was, and why; the newest last, at most REMEMBERED


REMEMBERED = 64


def open_cohort(run: str, epoch: int, settings: Settings = STANDARD) -> Cohort:
    """A cohort of nobody. ValueError for settings that can't work."""
    quorum, lease, deadline, retries = settings
    if quorum != "all" and (not isinstance(quorum, int) or quorum < 0):
        raise ValueError(f"quorum is {quorum!r}; 'all', or how many: 0 or more")
    if not (lease > 0 and deadline > 0 and retries >= 0):
        raise ValueError(f"lease {lease}, deadline {deadline} seconds must be above 0, retries {retries} at least 0")
    return Cohort(run, epoch, settings)


def bind(cohort: Cohort, name: str, held: Held, now: float) -> Cohort:
    """A receiver comes, or comes again under another name. ProtocolError where it must not be served from here."""
    if name in cohort.members:
        raise ProtocolError(f"receiver {name} is bound already")
    _check_held(cohort, held)
    return _with(cohort, name, Member(held, now + cohort.settings.lease))


def _check_held(cohort: Cohort, held: Held) -> None:
    if held.run and held.run != cohort.run:
        raise ProtocolError(f"the receiver serves run {held.run}, this is run {cohort.run}; start it anew to change")
    if held.run and held.epoch > cohort.epoch:
        raise ProtocolError(f"the receiver has seen epoch {held.epoch} of the run, this is {cohort.epoch}: superseded")


def heard(cohort: Cohort, name: str, now: float) -> Cohort:
    """Any sign of life renews the lease. ProtocolError for who was dropped: it must bind anew."""
    return _with(cohort, name, member(cohort, name)._replace(lease=now + cohort.settings.lease))


def member(cohort: Cohort, name: str) -> Member:
    try:
        return cohort.members[name]
    except KeyError:
        why = next((why for dropped, why in reversed(cohort.dropped) if dropped == name), "never bound")
        raise ProtocolError(f"receiver {name} is not of the cohort ({why}); it must bind anew") from None


def prepare(cohort: Cohort, version: int, root: bytes, now: float, held: bool = False) -> Cohort:
    """A new version, the newest of its epoch. ProtocolError where it is not, or another one is undecided.

    One that is `held` is undecided until its `release`, from which its deadline counts: a relay prepares what its own
    sender has not decided.
    """
    if version <= cohort.prepared:
        raise ProtocolError(f"version {version} is stale: epoch {cohort.epoch} has prepared {cohort.prepared}")
    if cohort.round is not None:
        raise ProtocolError(f"version {cohort.round.version} is undecided; {version} comes after it")
    fresh = Round(version, root, now + cohort.settings.deadline, frozenset(cohort.members), held=held)
    return settle(cohort._replace(round=fresh, prepared=version))


def release(cohort: Cohort, version: int, counts: bool, now: float) -> Cohort:
    """A version that was held may count, by its quorum; or it is as if it had never been prepared, and may come again.

    Nothing happens where it is not held.
    """
    held = cohort.round
    if held is None or held.version != version or not held.held:
        return cohort
    if not counts:
        return cohort._replace(round=None, prepared=version - 1)
    return settle(cohort._replace(round=held._replace(held=False, deadline=now + cohort.settings.deadline)))


def offer(cohort: Cohort, name: str, now: float) -> tuple[Cohort, Offer | None]:
    """What an idle receiver should fetch next: the newest there is, undecided or not; None where it has that."""
    one = member(cohort, name)
    if one.phase is not Phase.IDLE:
        raise ProtocolError(f"receiver {name} is {one.phase} with version {one.target}; it must end that first")
    newest, last = (cohort.committed, cohort.root), cohort.before
    if cohort.round is not None:
        newest, last = cohort.round[:2], newest
    version, root = newest
    mine = one.held.run == cohort.run and one.held.epoch == cohort.epoch
    if version < 0 or (mine and one.held.version >= version):
        return cohort, None
    base = last[0] if mine and one.held[2:] == last and not one.failures else -1
    seconds = cohort.settings.deadline
    one = one._replace(phase=Phase.STAGING, target=version, deadline=now + seconds)
    return _with(cohort, name, one), Offer(cohort.run, cohort.epoch, version, base, root, seconds)


def ready(cohort: Cohort, name: str, version: int, root: bytes, now: float) -> Cohort:
    """A receiver has all of a version in staging, and it is whole. A word said twice changes nothing."""
    one = _staging(cohort, name, version, (Phase.STAGING, Phase.READY))
    undecided = cohort.round is not None and cohort.round.version == version
    wanted = cohort.round.root if undecided and cohort.round else cohort.root if version == cohort.committed else None
    if wanted is not None and root != wanted:
        raise ProtocolError(f"receiver {name} is ready with another version {version} than was sent")
    lease = now + cohort.settings.lease
    cohort = _with(cohort, name, one._replace(phase=Phase.READY, lease=lease))
    if undecided and cohort.round:
        cohort = cohort._replace(round=cohort.round._replace(ready=cohort.round.ready | {name}))
    return settle(cohort)


def failed(cohort: Cohort, name: str, version: int, why: str, now: float) -> Cohort:
    """A receiver could not take a version. It is offered the whole of the newest again, `retries` times."""
    one = _staging(cohort, name, version, (Phase.STAGING,))
    failures = one.failures + 1
    if failures > cohort.settings.retries:
        cohort = drop(cohort, name, f"version {version} failed {failures} times: {why}", spoilt=True)
        return settle(cohort)
    lease = now + cohort.settings.lease
    return _with(cohort, name, one._replace(phase=Phase.IDLE, target=-1, failures=failures, lease=lease))


def verdict(cohort: Cohort, version: int) -> Verdict:
    """What became of a version that was offered."""
    if version in cohort.aborted or version > cohort.prepared or version < 0:
        return Verdict.ABORT
    return Verdict.WAIT if cohort.round is not None and cohort.round.version == version else Verdict.COMMIT


def done(cohort: Cohort, name: str, held: Held, now: float) -> Cohort:
    """A receiver has done what the verdict said, and serves `held`."""
    one = member(cohort, name)
    _check_held(cohort, held)
    if one.phase is not Phase.READY:
        raise ProtocolError(f"receiver {name} ends what it was not ready for")
    outcome = verdict(cohort, one.target)
    serves_it = (held.epoch, held.version) == (cohort.epoch, one.target)
    if outcome is Verdict.WAIT or (outcome is Verdict.ABORT and serves_it):
        raise ProtocolError(f"receiver {name} serves version {one.target}, which does not count")
    return _with(cohort, name, Member(held, now + cohort.settings.lease))


def drop(cohort: Cohort, name: str, why: str, spoilt: bool = False) -> Cohort:
    """A receiver is gone, or as good as gone; `spoilt`: because it could not take what was sent."""
    if name not in cohort.members:
        return cohort
    members = {key: value for key, value in cohort.members.items() if key != name}
    now = cohort.round
    if now is not None and name in now.electors:
        now = now._replace(electors=now.electors - {name}, ready=now.ready - {name}, spoilt=now.spoilt + spoilt)
    dropped = (*cohort.dropped, (name, why))[-REMEMBERED:]
    return settle(cohort._replace(members=members, round=now, dropped=dropped))


def tick(cohort: Cohort, now: float) -> Cohort:
    """Time passes: leases and deadlines end, and then an undecided version is decided."""
    for name, one in list(cohort.members.items()):
        if one.phase is Phase.STAGING:
            if one.deadline <= now:
                cohort = drop(cohort, name, f"not ready with version {one.target} by its deadline")
        elif one.lease <= now:
            cohort = drop(cohort, name, f"silent for {cohort.settings.lease:g} s")
    late = cohort.round
    if late is not None and not late.held and late.deadline <= now:
        for name in late.electors - late.ready:  # bound, but never asked for it
            cohort = drop(cohort, name, f"not ready with version {late.version} by the round's deadline")
        if cohort.round is not None:
            cohort = _end(cohort, cohort.settings.quorum == "all" and not cohort.round.spoilt)
    return cohort


def settle(cohort: Cohort) -> Cohort:
    """Decides what can be decided: a quorum is ready, or none that was to be is left.

    "all" counts who still lives: the dead are not waited for. Where nobody took the version, and some could not, it is
    damaged at its source, and aborted.
    """
    now, quorum = cohort.round, cohort.settings.quorum
    if now is None or now.held:
        return cohort
    if quorum == "all":
        if now.electors <= now.ready:
            return _end(cohort, bool(now.ready) or not now.spoilt)
    elif len(now.ready) >= quorum:
        return _end(cohort, True)
    return cohort


def wakes(cohort: Cohort) -> float | None:
    """When `tick` may next change anything; None: never."""
    times = [one.deadline if one.phase is Phase.STAGING else one.lease for one in cohort.members.values()]
    times += [] if cohort.round is None or cohort.round.held else [cohort.round.deadline]
    return min(times, default=None)


def _end(cohort: Cohort, counts: bool) -> Cohort:
    ended = cohort.round
    assert ended is not None
    if counts:
        before = (cohort.committed, cohort.root)
        return cohort._replace(round=None, committed=ended.version, root=ended.root, before=before)
    awaited = {one.target for one in cohort.members.values()}
    return cohort._replace(round=None, aborted=frozenset((cohort.aborted & awaited) | {ended.version}))


def _staging(cohort: Cohort, name: str, version: int, phases: tuple[Phase, ...]) -> Member:
    one = member(cohort, name)
    if one.phase not in phases or one.target != version:
        raise ProtocolError(f"receiver {name} speaks of version {version}; it is {one.phase} with {one.target}")
    return one


def _with(cohort: Cohort, name: str, one: Member) -> Cohort:
    return cohort._replace(members={**cohort.members, name: one})


# ----------------------------------------------------------------------------------------------------- the receiver


class Seat(NamedTuple):
    """A receiver's own knowledge: what it serves, and what it is about to."""

    held: Held = NOTHING
    phase: Phase = Phase.IDLE
    offered: Offer | None = None
    deadline: float = 0.0


def accept(seat: Seat, offered: Offer, now: float) -> Seat:
    """Begins to stage an offer. ProtocolError where it is stale, of another run, or upon a base that is not held."""
    held = seat.held
    if seat.phase is not Phase.IDLE:
        raise ProtocolError(f"version {offered.version} is offered while another is {seat.phase}")
    if held.run and offered.run != held.run:
        raise ProtocolError(f"version {offered.version} is of run {offered.run}; {held.run} is served")
    if (offered.epoch, offered.version) <= (held.epoch, held.version):
        raise ProtocolError(
            f"version {offered.version} of epoch {offered.epoch} is stale; {held.version} of {held.epoch} is served"
        )
    if offered.base >= 0 and (offered.epoch, offered.base) != (held.epoch, held.version):
        raise ProtocolError(f"version {offered.version} builds upon {offered.base}; {held.version} is held")
    return Seat(held, Phase.STAGING, offered, now + offered.seconds)


def staged(seat: Seat, root: bytes, now: float) -> Seat:
    """All is there and verified, with this root."""
    if seat.phase is not Phase.STAGING or seat.offered is None:
        raise ProtocolError("nothing is being staged")
    if root != seat.offered.root:
        raise ProtocolError(f"what came as version {seat.offered.version} is another one: its root differs")
    if now > seat.deadline:
        raise ProtocolError(f"version {seat.offered.version} came after its deadline")
    return seat._replace(phase=Phase.READY)


def commit(seat: Seat, version: int) -> Seat:
    """The staged version is served from now on."""
    offered = seat.offered
    if seat.phase is not Phase.READY or offered is None or offered.version != version:
        raise ProtocolError(f"version {version} is to be served, but is not staged")
    return Seat(Held(offered.run, offered.epoch, version, offered.root))


def lost(seat: Seat) -> Seat:
    """What was staged counts no more: aborted, or the sender is gone before it said (presumed abort)."""
    return Seat(seat.held)
