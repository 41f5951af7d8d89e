"""Queue of an engine: its bound counts what waits, and its end comes after what was submitted."""

from __future__ import annotations

import pytest

from longhaul.training.serving.work_queue import QueueFull, WorkQueue


def test_a_request_beyond_the_bound_is_refused_and_changes_nothing() -> None:
    queue = WorkQueue[str]("letters", 5, len)
    queue.submit("abc")
    with pytest.raises(QueueFull, match=r"^3 letters wait; at most 5 may$"):
        queue.submit("def")
    queue.submit("de")
    assert queue.waiting == ["abc", "de"] and queue.length == 5


def test_the_end_answers_what_waits_and_takes_no_more() -> None:
    queue, answered = WorkQueue[int]("numbers", 9, lambda number: 1), list[int]()
    for number in range(9):
        queue.submit(number)

    def answer() -> None:
        while True:
            with queue.changed:
                queue.changed.wait_for(lambda: queue.waiting or queue.closing)
                if not queue.waiting:
                    return
                answered.append(queue.waiting.pop(0))

    assert not queue.alive
    queue.start(answer)
    queue.close()
    assert answered == [*range(9)] and not queue.alive
    with pytest.raises(RuntimeError, match="the server ends"):
        queue.submit(9)
