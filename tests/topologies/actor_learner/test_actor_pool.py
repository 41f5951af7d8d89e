"""Actors in processes: killed, stopped, failing or writing nonsense, they change no number; nothing is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.cli import status
from longhaul.runtime import heartbeat, signals
from longhaul.topologies import actor_process
from longhaul.topologies.actor_learner import actor_pool
from longhaul.topologies.actor_learner import shared_buffers as buffers
from longhaul.topologies.actor_learner.actor_pool import ActorPool
from longhaul.topologies.actor_process import ActorError
from longhaul.topologies.staleness import Rule
from longhaul.training import actor_learner
from tests.helpers import fake_actors
from tests.helpers.alive import lives
from tests.helpers.fake_actors import Plan

UPDATES = 12


def alone(rule: Rule, updates: int = UPDATES) -> int:
    """Last number that a run must have, computed without a crew: pinned, so that nothing depends on time."""
    key, states = 11, np.arange(2 * rule.places, dtype=np.int64).reshape(-1, 2)
    totals = [0]
    for batch in range(updates):
        version = max(0, batch - (rule.staleness or 0))
        seen = fake_actors.weights(version, totals[version])[:12].view(np.float32)
        total = totals[-1]
        for place in range(rule.places):
            seed = key + 31 * batch + 7 * place + version
            states[place] = (states[place] * 5 + seed + int(seen.sum())) % 10_007
            data = np.arange(8, dtype=np.int64).reshape(4, 2) * seed % 101 + states[place]
            total = (total * 13 + int(data.sum()) * (place + 1)) % 1_000_003
        totals.append(total)
    return totals[-1]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Of descriptors, shared memory with a name, or children."""

    def there() -> tuple[int, list[str], str]:
        names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
        shared = sorted(name for name in names if not name.startswith("sem."))  # semaphores are not ours
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        return len(os.listdir("/proc/self/fd")), shared, children.read_text() if children.exists() else ""

    before = there()
    yield
    assert there() == before


def run(rule: Rule, plan: Plan, marks: Path, kind: str) -> tuple[int, list[int], ActorPool]:
    with closing(fake_actors.crew(rule, plan, marks, kind)) as mine:
        fake_actors.begin(mine)
        total, ages = fake_actors.learn(mine, UPDATES)
    return total, ages, mine


@pytest.mark.parametrize("bound", [0, 2])
def test_threads_do_what_was_ordered(tmp_path: Path, bound: int) -> None:
    rule = Rule(3, bound, pin=True, until=UPDATES)
    total, ages, mine = run(rule, {}, tmp_path, "thread")
    assert total == alone(rule)
    assert ages == [min(bound, u) for u in range(UPDATES) for _ in range(3)]
    assert mine.news == []


def test_a_thread_at_work_is_not_waited_for_when_the_run_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back later, when the pool is closed, and finds what it writes to."""
    begun, ends, failed = threading.Event(), threading.Event(), []

    def collect(weights: Any, state: Any, key: Any, ticket: Any, version: int) -> Any:
        begun.set()
        ends.wait()
        return [np.asarray(state[0])], [np.zeros((4, 2), np.int64), np.int64(version)], [np.float32(0.0)]

    monkeypatch.setattr(threading, "excepthook", failed.append)
    pool = ActorPool(Rule(1, 0), fake_actors.SHAPES, lambda actor: collect, kind="thread")
    fake_actors.begin(pool)
    assert pool.take(begun.is_set) is None
    with monkeypatch.context() as patch:
        patch.setattr(actor_pool, "LEAVE", 0.1)
        pool.close()
    working = [thread for thread in threading.enumerate() if thread.name.startswith(signals.AT_WORK)]
    assert len(working) == 2
    ends.set()
    for thread in working:
        thread.join(10)
        assert not thread.is_alive()
    assert failed == []


@pytest.mark.parametrize("bound", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_faults_of_processes_change_no_number(tmp_path: Path, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is killed twice, one stops (and is silent for too long), one fails once."""
    monkeypatch.setattr(heartbeat, "FROZEN", 0.5)
    plan: Plan = {(0, 2): "kill", (0, 6): "kill", (1, 4): "stop", (2, 5): "fail"}
    rule = Rule(3, bound, pin=True, until=UPDATES)
    total, ages, mine = run(rule, plan, tmp_path, "process")
    assert total == alone(rule)
    assert len(ages) == UPDATES * 3, "a rollout was dropped, or counted twice"
    told = sorted(mine.news)
    assert [line.partition(":")[0] for line in told] == ["actor 0", "actor 0", "actor 1", "actor 2"]
    assert "SIGKILL" in told[0]
    assert "it was stopped for" in told[2]
    assert re.search(r"ValueError \(fake_actors.py, line \d+\): the environment broke", told[3])
    assert mine.restarts == 4


@pytest.mark.slow
def test_hits_at_random_moments_change_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an actor is at: killed, stopped for a while, or stopped for good."""
    monkeypatch.setattr(heartbeat, "FROZEN", 0.3)
    rng, updates, hits = random.Random(5), 60, ["kill"] * 4 + ["pause"] * 3 + ["stop"] * 3
    rng.shuffle(hits)
    rule = Rule(2, 1, pin=True, until=updates)
    plan: Plan = {(actor, batch): "waits" for actor in range(2) for batch in range(updates)}  # that it takes a while

    def send(process: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)

    def hit(what: str, process: int) -> None:
        send(process, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        if what == "pause":
            time.sleep(0.1)
            send(process, signal.SIGCONT)

    timers: list[threading.Timer] = []
    with closing(fake_actors.crew(rule, plan, tmp_path, "process")) as mine:
        fake_actors.begin(mine)

        def disturb(version: int) -> None:
            if version % 5 == 4 and hits:
                there = [row["process"] for row in mine.report()["actors"] if row["state"] != "ended"]
                timers.append(threading.Timer(rng.uniform(0.0, 0.03), hit, (hits.pop(), rng.choice(there))))
                timers[-1].start()

        total, ages = fake_actors.learn(mine, updates, disturb)
        for timer in timers:
            timer.join()
        restarts = mine.restarts
    assert len(timers) == 10
    assert restarts >= 5, "seven were to be replaced; some may have been hit while they began"
    assert len(ages) == updates * 2
    assert total == alone(rule, updates)


def test_a_bound_holds_where_actors_run_free(tmp_path: Path) -> None:
    """Not pinned: whoever is slow, nothing is older than 2 updates, and something is."""
    for bound in (2, None):
        marks = tmp_path / str(bound)
        marks.mkdir()
        _, ages, _ = run(Rule(2, bound, until=UPDATES), {(0, 3): "awaits 1-5", (1, 5): "comes"}, marks, "thread")
        assert len(ages) == UPDATES * 2
        assert max(ages) <= 2 if bound is None else max(ages) == 2  # without a bound one actor may do the other's


def test_nonsense_is_rejected_and_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot of another ticket, a torn one, one by weights that never were: none is learnt from."""
    rule = Rule(2, 0, pin=True, until=UPDATES)
    check, spoilt = buffers.SharedBuffers.check, []

    def spoil(shared: buffers.SharedBuffers, actor: int, ticket: buffers.Ticket) -> buffers.Head:
        word = {2: buffers.WRITTEN, 4: buffers.BEGUN, 6: buffers.ACTED_BY, 8: buffers.OWNER}.get(ticket.batch)
        if word is not None and ticket.batch not in spoilt:
            spoilt.append(ticket.batch)
            shared._heads[ticket.batch % shared.size.depth, ticket.place, word] += 3 + 2**32
        return check(shared, actor, ticket)

    monkeypatch.setattr(buffers.SharedBuffers, "check", spoil)
    total, _, mine = run(rule, {}, tmp_path, "process")
    assert spoilt == [2, 4, 6, 8]
    assert total == alone(rule)
    assert len(mine.news) == 4


def test_who_always_fails_ends_the_run_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_process, "RESTARTS", actor_process.RESTARTS._replace(allowed=1))
    mine = fake_actors.crew(Rule(2, 0), {(1, 0): "always"}, tmp_path, "process")
    with closing(mine):
        fake_actors.begin(mine)
        with pytest.raises(
            ActorError, match=r"actor 1 failed 2 times .* \(fake_actors.py, line \d+\): the environment broke"
        ):
            fake_actors.learn(mine, 3)


LEARNER = """
import sys, time
from pathlib import Path
from longhaul.topologies.staleness import Rule
from tests.helpers import fake_actors
mine = fake_actors.crew(Rule(2, 0), {}, Path(sys.argv[1]), "process")
fake_actors.begin(mine)
fake_actors.learn(mine, 3)
print(*[row["process"] for row in mine.report()["actors"]], flush=True)
time.sleep(60)
"""


def test_a_learner_that_is_killed_takes_its_actors_along(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEARNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as learner:
        assert learner.stdout is not None
        actors = [int(word) for word in learner.stdout.readline().split()]
        assert len(actors) == 2
        os.kill(actors[0], signal.SIGSTOP)  # who is stopped ends, too
        learner.kill()
        deadline = time.monotonic() + 20.0
        while any(lives(actor) for actor in actors) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(lives(actor) for actor in actors)


def test_an_actor_that_was_silent_for_too_long_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, and nothing comes of it: it is no stopped process."""
    monkeypatch.setattr(heartbeat, "SILENCE", 2.0)
    rule = Rule(2, 0, pin=True, until=UPDATES)
    total, _, mine = run(rule, {(1, 3): "hang"}, tmp_path, "process")
    assert total == alone(rule)
    assert len(mine.news) == 1
    assert "actor 1: it was silent" in mine.news[0]


# ------------------------------------------------------------------------------------------------ longhaul status


def test_status_shows_actors_in_rows_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(fake_actors.crew(Rule(2, 1), {}, tmp_path, "thread")) as mine:
        fake_actors.begin(mine)
        fake_actors.learn(mine, 4)
        told = mine.report()
    names = ("staleness_mean", "learner_wait", "actor_wait", "restarts", "environment_seconds")
    told |= {"staleness": 1, "kind": "thread", "metrics": dict.fromkeys(names, 0.25)}
    told["bottleneck"] = actor_learner.bottleneck(told["metrics"] | {"learner_wait": 0.5})
    (tmp_path / "live.json").write_text(json.dumps(told | {"time": told["time"] - 60.0}))
    status.show_live(tmp_path)
    shown = capsys.readouterr().out
    for words in (
        "0.25, bound 1",
        "learner 25%",
        "bottleneck  environment",
        "60 s ago, which is long",
        str(os.getpid()),
    ):
        assert words in shown
    assert shown.count("\n") == 7 + 3
    status.show_live(tmp_path / "nowhere")
    assert capsys.readouterr().out == ""


def test_the_bottleneck_is_whom_others_wait_for() -> None:
    waits = {"learner_wait": 0.1, "actor_wait": 0.6}
    assert actor_learner.bottleneck(waits) == "learner"
    waits |= {"learner_wait": 0.9, "environment_seconds": 1.0, "inference_seconds": 3.0}
    assert actor_learner.bottleneck(waits) == "inference"
    assert actor_learner.bottleneck({"learner_wait": 0.9, "actor_wait": 0.6}) == "actors"
