"""Tickets: who may act when, so that staleness is bounded by construction and nothing is dropped.

Rollouts are tickets 0, 1, 2, ...; N of them make a batch, and ticket i is place i % N of batch i // N. With v updates
finished, a ticket of batch b may start only when b <= v + S, and the learner takes batches in order. So what update b
learns from was acted by version b - S or a later one: S = 0 is the synchronous loop, S > 0 is stale-synchronous (Ho et
al., "More effective distributed ML via a stale synchronous parallel parameter server", NeurIPS 2013; the capacity rule
of AReaL, made deterministic by the order). Place k of each batch then belongs to actor k.

Without a bound (S None) an actor that is free takes the next ticket, whichever that is; only room bounds how far it
gets. All is pure: a `Book` and functions from one to the next. Whoever loses an actor asks it for nothing: its tickets
stay in the book, and the one that takes its place does them.
"""

from __future__ import annotations

from typing import NamedTuple

AHEAD = 2
"""Batches that may be under way beside the learner's where nothing else bounds it."""

LATEST = -1
"""The version of a ticket that is acted with the newest weights there are."""


class Ticket(NamedTuple):
    batch: int
    place: int  # 0 .. N-1 in it
    version: int  # of the weights that must act; LATEST: the newest
    turn: int  # so many rollouts of its environment came before


class Rule(NamedTuple):
    """How far acting may run ahead of learning."""

    places: int  # N, tickets of a batch; as many as actors
    staleness: int | None  # S; None: no bound but room
    pin: bool = False  # act with exactly version b - S
    until: int = 2**62  # batches of the run; no ticket after them is given out
    oldest: int = 0  # version that can be pinned

    @property
    def ahead(self) -> int:
        """Batches after the learner's that may be under way."""
        return AHEAD if self.staleness is None else self.staleness

    @property
    def rooms(self) -> int:
        """Batches that lie in memory at once: those under way, and the last one learnt."""
        return self.ahead + 2

    @property
    def versions(self) -> int:
        """Versions of the weights that lie in memory at once: all that may act yet, and the one that is written."""
        return self.ahead + 2

    @property
    def pinned(self) -> int:
        """Versions before the newest one that must be known to go on exactly."""
        return (self.staleness or 0) if self.pin else 0

    @property
    def turns(self) -> int:
        """Rollouts of one environment of which it must be known how they ended, the last one learnt among them."""
        return self.ahead + 2


class Book(NamedTuple):
    """Who has which tickets. `given[a]` are those of actor a that are not learnt yet, oldest first, of which the first
    `done[a]` are finished."""

    rule: Rule
    version: int  # finished updates
    given: tuple[tuple[Ticket, ...], ...]
    done: tuple[int, ...]
    turn: tuple[int, ...]  # of each actor's next ticket
    following: int  # the next ticket, where nobody owns places


def opened(rule: Rule, version: int, turns: tuple[int, ...] | None = None) -> Book:
    """The book of a run that has made `version` updates, of which no ticket is out."""
    if rule.staleness is not None and rule.staleness < 0:
        raise ValueError(f"staleness is {rule.staleness}; it must be at least 0, or none")
    if rule.pin and rule.staleness is None:
        raise ValueError("pin is on and staleness is none; pinned versions need a bound: give a staleness")
    if rule.places < 1:
        raise ValueError(f"{rule.places} actors; at least 1 is needed")
    n = rule.places
    return Book(rule, version, ((),) * n, (0,) * n, turns or (version,) * n, version * n)


def hand_out(book: Book) -> tuple[Book, list[tuple[int, Ticket]]]:
    """Every ticket that may start now, with the actor that gets it, in order."""
    rule, last = book.rule, min(book.version + book.rule.ahead, book.rule.until - 1)
    out: list[tuple[int, Ticket]] = []
    given, turn, following = list(book.given), list(book.turn), book.following
    for batch in range(book.version, last + 1):
        for place in range(rule.places):
            if rule.staleness is None:
                if batch * rule.places + place < following:
                    continue
                actor = min(range(rule.places), key=lambda a: (len(given[a]) - book.done[a], len(given[a]), a))
                if len(given[actor]) >= rule.ahead + 1 or len(given[actor]) - book.done[actor] >= 2:
                    return book._replace(given=tuple(given), turn=tuple(turn), following=following), out
                following += 1
            else:
                actor = place
                if turn[actor] > batch:
                    continue
            version = max(rule.oldest, batch - (rule.staleness or 0)) if rule.pin else LATEST
            ticket = Ticket(batch, place, version, turn[actor])
            given[actor] += (ticket,)
            turn[actor] += 1
            out.append((actor, ticket))
    return book._replace(given=tuple(given), turn=tuple(turn), following=following), out


def finished(book: Book, actor: int) -> tuple[Book, Ticket]:
    """The actor finished its oldest unfinished ticket; -> which one. ValueError where it has none."""
    given, done = book.given[actor], book.done[actor]
    if done == len(given):
        raise ValueError(f"actor {actor} finished a rollout that nobody asked for")
    return book._replace(done=_with(book.done, actor, done + 1)), given[done]


def missing(book: Book) -> list[int]:
    """The actors whom the learner's next batch waits for; none: it is whole."""
    there = {t.place for given, done in zip(book.given, book.done) for t in given[:done] if t.batch == book.version}
    if len(there) == book.rule.places:
        return []
    waited = {
        actor
        for actor, (given, done) in enumerate(zip(book.given, book.done))
        if any(t.batch == book.version for t in given[done:])
    }
    return sorted(waited) or list(range(book.rule.places))


def queue(book: Book) -> int:
    """Finished rollouts that wait for the learner."""
    return sum(book.done)


def learnt(book: Book) -> Book:
    """The next update is finished. ValueError where its batch was not whole."""
    if missing(book):
        raise ValueError(f"batch {book.version} was learnt before it was whole")
    over = [sum(t.batch == book.version for t in given) for given in book.given]
    given = tuple(tuple(t for t in tickets if t.batch != book.version) for tickets in book.given)
    return book._replace(
        version=book.version + 1, given=given, done=tuple(d - n for d, n in zip(book.done, over))
    )  # fmt: skip


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
