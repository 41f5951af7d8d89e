"""Who died first, of processes that run anywhere: `watch` over scripted ones."""

from __future__ import annotations

import signal

import pytest

from longhaul.cli import launch
from longhaul.runtime.launch import supervisor
from longhaul.runtime.launch.supervisor import Death, Ended, Look, watch

RUNS, KILLED, ABORTED = Look(), Look(code=-signal.SIGKILL), Look(code=-signal.SIGABRT)
LOST = Look(lost="on 10.0.0.2 is lost: no answer for 16 s")


class Scripted:
    """Shows one row of looks after the other, the last for ever."""

    pause = 0.0

    def __init__(self, *rows: tuple[Look, ...]):
        self._rows = list(rows)
        self.sent: list[int] = []
        self.ended = 0

    def look(self) -> list[Look]:
        return list(self._rows.pop(0) if len(self._rows) > 1 else self._rows[0])

    def send(self, number: int) -> None:
        self.sent.append(number)

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize(
    ("rows", "ended"),
    [
        ([(RUNS, RUNS), (RUNS, LOST)], Ended((None, None), Death(1, -signal.SIGKILL, LOST.lost))),
        # The one that is left aborts for the sake of the lost one, and may be seen before it.
        ([(ABORTED, RUNS), (ABORTED, RUNS), (ABORTED, LOST)],
         Ended((-signal.SIGABRT, None), Death(1, -signal.SIGKILL, LOST.lost))),
        ([(ABORTED, LOST)], Ended((-signal.SIGABRT, None), Death(1, -signal.SIGKILL, LOST.lost))),
        # One that was killed is to blame itself.
        ([(RUNS, RUNS), (KILLED, LOST)], Ended((-signal.SIGKILL, None), Death(0, -signal.SIGKILL))),
        ([(RUNS, RUNS), (Look(code=0), RUNS), (Look(code=0), Look(code=75))], Ended((0, 75), None)),
    ],
)  # fmt: skip
def test_who_is_to_blame(rows: list[tuple[Look, ...]], ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOST", 0.01)
    scripted = Scripted(*rows)
    assert watch(scripted, [], 60.0) == ended
    assert scripted.ended == 1


def test_a_lost_process_is_said_in_a_line_and_all_may_start_again() -> None:
    ended = watch(Scripted((RUNS, LOST)), [], 60.0)
    assert launch.report(ended) == "process 1 on 10.0.0.2 is lost: no answer for 16 s"
    assert launch.verdict(ended, [], True) == launch.FAILED


def test_signals_are_passed_once_those_too_that_came_during_the_start() -> None:
    done = Look(code=75)
    scripted = Scripted((RUNS, RUNS), (RUNS, RUNS), (done, done))
    assert watch(scripted, [15], 60.0) == Ended((75, 75), None)
    assert scripted.sent == [15]


def test_all_are_ended_where_looking_fails() -> None:
    scripted = Scripted()
    with pytest.raises(IndexError):
        watch(scripted, [], 60.0)
    assert scripted.ended == 1
