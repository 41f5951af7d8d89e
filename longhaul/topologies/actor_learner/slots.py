"""Slots for questions and answers between processes: what a server of policies and its clients speak by.

Each slot has one client. It writes a question, then counts `asked` up; the server writes the answer, then sets
`answered` to what was asked. So who dies at any instruction leaves no lock, a question that was half written is none,
and a server that is begun again finds all that are open. Nothing is copied but by who wants a copy; which slots are
open is one comparison over all of them.

    server: while open: which = slots.open();  slots.answers[0][which] = f(slots.questions[0][which]);  slots.close(which)
    client: slots.questions[0][slot] = ...;  slots.ask(slot);  wait;  slots.answers[0][slot]
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from longhaul.runtime import shared_memory
from longhaul.runtime.shared_memory import Leaf


def regions(count: int, questions: Sequence[Leaf], answers: Sequence[Leaf]) -> Iterator[tuple[str, Leaf]]:
    """What `count` slots need in memory; the leaves are of one slot."""
    yield "slots/asked", Leaf((count,), "int64")
    yield "slots/answered", Leaf((count,), "int64")
    for name, leaves in (("question", questions), ("answer", answers)):
        for i, leaf in enumerate(leaves):
            yield f"slots/{name}/{i}", Leaf((count, *leaf.shape), leaf.dtype)


class Slots:
    """One process's view of them."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._asked, self._answered = arrays["slots/asked"], arrays["slots/answered"]
        self.questions = [x for name, x in arrays.items() if name.startswith("slots/question/")]
        self.answers = [x for name, x in arrays.items() if name.startswith("slots/answer/")]
        self._seen = self._asked.copy()

    def open(self) -> np.ndarray:
        """The slots that wait for an answer, ascending."""
        self._seen[:] = self._asked
        return np.flatnonzero(self._seen != self._answered)

    def close(self, which: np.ndarray) -> None:
        """The answers of these slots, which `open` gave last, are written."""
        self._answered[which] = self._seen[which]

    def ask(self, which: np.ndarray | int) -> None:
        """The questions of these slots are written. They are the caller's own, and have their last answers."""
        self._asked[which] += 1

    def told(self, which: np.ndarray) -> np.ndarray:
        """Those of the slots `which` whose answer is there."""
        return which[self._answered[which] == self._asked[which]]


def create(count: int, questions: Sequence[Leaf], answers: Sequence[Leaf]) -> tuple[int, shared_memory.Plan]:
    """(descriptor, plan) of memory for so many slots."""
    planned = shared_memory.plan(regions(count, questions, answers))
    return shared_memory.create(planned.size), planned
