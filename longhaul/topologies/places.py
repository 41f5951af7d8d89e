"""Places in batches: which trajectory of which batch a group of environments fills next, so that staleness is bounded
by construction and nothing counts twice.

A batch has a place for each group. With v updates finished, batch b may be begun only when b <= v + S; so S = 0 is the
synchronous loop. Place k then belongs to group k, and a group that died leaves its place to its successor, which begins
it anew. Without a bound (S None) a group takes the first place that is free, whosever it was: who is away holds up
nobody, and only room bounds how far the others get.

The same rule as `actors.tickets`, for trajectories that the server itself assembles.
"""

from __future__ import annotations

from typing import NamedTuple

AHEAD = 2
"""Batches that may be under way beside the learner's where nothing else bounds it."""


class Place(NamedTuple):
    batch: int
    number: int  # 0 .. N-1 in it


class Places:
    """N groups; `version` updates are finished."""

    def __init__(self, groups: int, staleness: int | None, version: int, until: int) -> None:
        if staleness is not None and staleness < 0:
            raise ValueError(f"staleness is {staleness}; it must be at least 0, or none")
        self.groups, self.staleness, self.version, self.until = groups, staleness, version, until
        self._mine: list[Place | None] = [None] * groups
        self._batch = [version] * groups  # that a group fills next, with a bound
        self._free: list[Place] = []  # given back, without a bound
        self._following = version * groups
        self._filled: dict[int, set[int]] = {}

    @property
    def ahead(self) -> int:
        """Batches after the learner's that may be under way."""
        return AHEAD if self.staleness is None else self.staleness

    @property
    def rooms(self) -> int:
        """Batches that lie in memory at once."""
        return self.ahead + 1

    def begin(self, group: int) -> Place | None:
        """The place that a group fills next; None where it must wait for the learner."""
        assert self._mine[group] is None, "it fills another"
        if self.staleness is not None:
            place = Place(self._batch[group], group)
        elif self._free:
            place = self._free[0]
        else:
            place = Place(*divmod(self._following, self.groups))
        if place.batch > self.version + self.ahead or place.batch >= self.until:
            return None
        if self.staleness is None:
            if self._free:
                self._free.pop(0)
            else:
                self._following += 1
        self._mine[group] = place
        return place

    def fill(self, group: int) -> Place:
        """A group's place is full."""
        place = self._mine[group]
        assert place is not None
        filled = self._filled.setdefault(place.batch, set())
        assert place.number not in filled, "a trajectory counted twice"
        filled.add(place.number)
        self._mine[group] = None
        self._batch[group] = place.batch + 1
        return place

    def lose(self, group: int) -> bool:
        """A group is gone: its place is to be filled from its beginning. -> whether it had one."""
        place, self._mine[group] = self._mine[group], None
        if place is not None and self.staleness is None:
            self._free = sorted([*self._free, place])
        return place is not None

    def whole(self) -> bool:
        """Whether the learner's next batch is there."""
        return len(self._filled.get(self.version, ())) == self.groups

    def learnt(self) -> None:
        """Another update is finished."""
        assert self.whole(), "learnt before it was whole"
        del self._filled[self.version]
        self.version += 1
