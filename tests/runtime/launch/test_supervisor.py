"""First death, of processes that run anywhere: `watch` over scripted ones."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from longhaul.runtime.launch import supervisor
from longhaul.runtime.launch.supervisor import FAILED, Death, Ended, Look, watch

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
    assert supervisor.report(ended) == "process 1 on 10.0.0.2 is lost: no answer for 16 s"
    assert supervisor.verdict(ended, [], True) == FAILED


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


KILL, TERM, ABORT = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT


@pytest.mark.parametrize(
    ("codes", "asked", "there", "code"),
    [
        ((0, 0), [], True, 0),
        ((75, 75), [15], True, 75),
        ((0, 75), [], True, 75),
        ((75, None), [], True, 75),  # one that did not hear of it
        ((0, None), [], True, 1),
        ((KILL, ABORT), [], True, 1),
        ((2, 2), [], False, 2),  # bad input, which process 0 says
        ((0, 2), [], False, 1),
        ((1, None), [], True, 1),
        ((TERM, TERM), [15], True, 75),  # before they listened, in a run that can be gone on with
        ((TERM, TERM), [15], False, 1),
        ((TERM, ABORT), [], True, 1),
        ((2, 1), [15], True, 2),  # say, a full disk
    ],
)
def test_the_exit_code_of_all(codes: tuple[int | None, ...], asked: list[int], there: bool, code: int) -> None:
    assert supervisor.verdict(Ended(codes, supervisor.first_to_fail(codes)), asked, there) == code


def test_who_died_of_what_is_one_line() -> None:
    """A killed process comes before those that abort for its sake, and those before one that complains."""
    assert supervisor.first_to_fail([ABORT, KILL, 1]) == Death(1, KILL)
    assert supervisor.first_to_fail([None, ABORT]) == Death(1, ABORT)
    assert supervisor.first_to_fail([0, 75, None]) is None
    said = supervisor.report(Ended((ABORT, KILL, None), Death(1, KILL)))
    assert said == "process 1 was ended by SIGKILL; after it: process 0 was ended by SIGABRT, 2 had to be killed"
    assert supervisor.report(Ended((3, 0), Death(0, 3))) == "process 0 ended with exit code 3"
    assert "process 1 did not end after the others" in supervisor.report(Ended((0, None), None))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train cartpole --seed 1", "train cartpole --seed 1 --resume runs/x"),
        ("train cartpole --run-name x --seed 1", "train cartpole --seed 1 --resume runs/x"),
        ("train cartpole --seed 1 --run-name=x", "train cartpole --seed 1 --resume runs/x"),
        ("train cartpole --resume x --seed 1", "train cartpole --resume x --seed 1"),
        ("train cartpole --resume=x", "train cartpole --resume=x"),
    ],
)
def test_a_new_start_goes_on_with_the_run(command: str, words: str) -> None:
    assert supervisor.resume_command(command.split(), Path("runs/x")) == words.split()


def test_the_newest_step_is_that_of_a_whole_checkpoint(tmp_path: Path) -> None:
    assert supervisor.newest_step(tmp_path) == -1
    for name in ("4", "12", "12.1", "20.partial", "notes"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert supervisor.newest_step(tmp_path) == 12


def test_who_refuses_bad_input_first_makes_no_difference() -> None:
    assert supervisor.verdict(Ended((2, 2), supervisor.Death(1, 2)), [], False) == 2
    assert supervisor.verdict(Ended((None, 2), supervisor.Death(1, 2)), [], False) == FAILED
    hung = supervisor.Death(1, 2, "process 1 was stopped, and was killed")
    assert supervisor.verdict(Ended((2, 2), hung), [], False) == FAILED
