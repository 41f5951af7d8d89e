"""Staleness bound: order of the rollouts of actors such that no update learns from too old weights.

Rollouts are tickets 0, 1, 2, ...; N of them make a batch, and ticket i is place i % N of batch i // N. With v updates
finished, a ticket of batch b may start only when b <= v + S, and the learner takes batches in order. So the data of
update b come from version b - S or a later one: S = 0 is the synchronous loop, S > 0 is stale-synchronous (Ho et al.,
"More effective distributed ML via a stale synchronous parallel parameter server", NeurIPS 2013; the capacity rule of
AReaL, made deterministic by the order). Place k of each batch then belongs to actor k.

Without a bound (S None) a free actor takes the next ticket; only memory limits its lead.

Both topologies use this rule. The learner of `actor_learner` hands tickets out ahead (`hand_out`); the successor of a
dead actor finishes the same tickets. The inference server gives each group of environments one ticket at a time
(`begin`); a lost group returns its ticket (`lose`), because the server assembles the rollouts itself.
All functions are pure: they take a `Book` and return the next one.
"""

from __future__ import annotations

from typing import NamedTuple

AHEAD = 2
"""Batches after the learner's that may be collected without a staleness bound: one fills while one waits."""

LATEST = -1
"""Version number in a ticket that means the newest weights."""


class Ticket(NamedTuple):
    batch: int
    place: int  # 0 .. N-1 in it
    version: int  # of the weights that must act; LATEST: the newest
    turn: int  # rollouts of its environment before this one


class Rule(NamedTuple):
    """Bound on the lead of acting over learning; validated by `opened`."""

    places: int  # N, tickets of a batch, one per actor
    staleness: int | None  # S; None: no bound but memory
    pin: bool = False  # act with exactly version b - S
    until: int = 2**62  # batches of the run; no ticket of a later batch is handed out
    oldest: int = 0  # version that can be pinned

    @property
    def ahead(self) -> int:
        """Batches after the learner's that may be collected."""
        return AHEAD if self.staleness is None else self.staleness

    @property
    def depth(self) -> int:
        """Number of batches, of states of each environment and of versions of the weights in memory at once: those
        being collected or acting, and the last one learnt or the one being written."""
        return self.ahead + 2

    @property
    def pinned(self) -> int:
        """Versions before the newest one that an exact resume needs."""
        return (self.staleness or 0) if self.pin else 0


class Book(NamedTuple):
    """Tickets of each actor. `given[a]`: those of actor a not learnt yet, oldest first; the first `done[a]` are
    finished."""

    rule: Rule
    version: int  # finished updates
    given: tuple[tuple[Ticket, ...], ...]
    done: tuple[int, ...]
    turn: tuple[int, ...]  # of each actor's next ticket
    following: int  # number of the next new ticket, if places have no owners
    free: tuple[int, ...] = ()  # returned ticket numbers, ascending, if places have no owners
    there: int = 0  # finished tickets of the learner's next batch

    @property
    def whole(self) -> bool:
        """True if the learner's next batch is complete."""
        return self.there == self.rule.places


def opened(rule: Rule, version: int) -> Book:
    """Book of a run after `version` updates, without tickets. Raises ValueError for an impossible `rule`."""
    if rule.staleness is not None and rule.staleness < 0:
        raise ValueError(f"staleness is {rule.staleness}; it must be at least 0, or none")
    if rule.pin and rule.staleness is None:
        raise ValueError("pin is on and staleness is none; pinned versions need a bound: give a staleness")
    if rule.places < 1:
        raise ValueError(f"{rule.places} actors; at least 1 is needed")
    n = rule.places
    return Book(rule, version, ((),) * n, (0,) * n, (version,) * n, version * n)


def entered(book: Book, until: int) -> Book:
    """Book of the same run up to batch `until`. ValueError while tickets are out: their environments are in use."""
    if any(book.given):
        raise ValueError(f"actors have rollouts of before batch {book.version} under way; learn from those first")
    return book._replace(rule=book.rule._replace(until=until))


def begin(book: Book, actor: int) -> tuple[Book, Ticket | None]:
    """Next ticket of an actor; None while it must wait for the learner."""
    rule, number = book.rule, book.following
    if rule.staleness is None:
        if book.free:
            number = book.free[0]
        batch, place = divmod(number, rule.places)
    else:
        batch, place = book.turn[actor], actor
    if batch > book.version + rule.ahead or batch >= rule.until:
        return book, None
    version = max(rule.oldest, batch - (rule.staleness or 0)) if rule.pin else LATEST
    ticket = Ticket(batch, place, version, book.turn[actor])
    book = book._replace(
        given=_with(book.given, actor, (*book.given[actor], ticket)), turn=_with(book.turn, actor, ticket.turn + 1)
    )
    if rule.staleness is None and book.free:
        book = book._replace(free=book.free[1:])
    elif rule.staleness is None:
        book = book._replace(following=number + 1)
    return book, ticket


def hand_out(book: Book) -> tuple[Book, list[tuple[int, Ticket]]]:
    """All tickets that may start now, each with its actor, in order."""
    out: list[tuple[int, Ticket]] = []
    for actor in _owners(book):
        if actor is None:
            actor = min(range(book.rule.places), key=lambda a: (_unfinished(book, a), len(book.given[a]), a))
            if len(book.given[actor]) > book.rule.ahead or _unfinished(book, actor) >= 2:
                break
        book, ticket = begin(book, actor)
        if ticket is None:
            break
        out.append((actor, ticket))
    return book, out


def _owners(book: Book) -> list[int | None]:
    """Owners of the tickets that may start, in ticket order; None: the least busy actor."""
    rule = book.rule
    last = min(book.version + rule.ahead, rule.until - 1)
    if rule.staleness is None:
        return [None] * (max(0, (last + 1) * rule.places - book.following) + len(book.free))
    batches = range(book.version, last + 1)
    return [actor for batch in batches for actor in range(rule.places) if book.turn[actor] <= batch]


def _unfinished(book: Book, actor: int) -> int:
    return len(book.given[actor]) - book.done[actor]


def finished(book: Book, actor: int) -> tuple[Book, Ticket]:
    """(book, ticket): the oldest unfinished ticket of an actor is finished. ValueError if it has none."""
    given, done = book.given[actor], book.done[actor]
    if done == len(given):
        raise ValueError(f"actor {actor} finished a rollout that nobody asked for")
    complete = book.there + (given[done].batch == book.version)
    return book._replace(done=_with(book.done, actor, done + 1), there=complete), given[done]


def lose(book: Book, actor: int) -> tuple[Book, bool]:
    """(book with the unfinished tickets of an actor returned, to be started again; flag that it had any)."""
    given, done = book.given[actor], book.done[actor]
    lost = given[done:]
    if not lost:
        return book, False
    book = book._replace(
        given=_with(book.given, actor, given[:done]), turn=_with(book.turn, actor, lost[0].turn)
    )  # fmt: skip
    if book.rule.staleness is None:
        numbers = [ticket.batch * book.rule.places + ticket.place for ticket in lost]
        book = book._replace(free=tuple(sorted([*book.free, *numbers])))
    return book, True


def learnt(book: Book) -> Book:
    """Book after the next update. ValueError if its batch was incomplete."""
    if not book.whole:
        raise ValueError(f"batch {book.version} was learnt before it was whole")
    over = [sum(t.batch == book.version for t in given) for given in book.given]
    given = tuple(tuple(t for t in tickets if t.batch != book.version) for tickets in book.given)
    done = tuple(d - n for d, n in zip(book.done, over))
    complete = sum(t.batch == book.version + 1 for mine, d in zip(given, done) for t in mine[:d])
    return book._replace(version=book.version + 1, given=given, done=done, there=complete)


def _with(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])
