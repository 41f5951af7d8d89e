"""Completions of servers: bodies as they are documented, requests that move, answers that are refused."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from longhaul.reasoning import rollout_servers, tokenizer
from longhaul.reasoning.rollout_servers import (
    DIALECTS,
    Answer,
    Ask,
    Choice,
    Refused,
    Rules,
    Server,
    ServerError,
    Servers,
    checked,
)
from tests.helpers.rollout_server import RolloutServer

RULES = Rules(4, 1.0, (9,), ("\n",), 10)
ASKS = [Ask((place % 9,), 2, place) for place in range(12)]
EXPECTED = [[Answer((p % 9,) * n, (-0.5,) * n, (3,) * n) for n in (1, 2)] for p in range(12)]


def version_of(label: str) -> int:
    if label not in ("2", "3"):
        raise Refused(f"{label} is unknown")
    return int(label)


def servers(*several: RolloutServer, dialect: str = "vllm", revive: Any = None, **changes: Any) -> Servers:
    settings: dict[str, Any] = {"requests": 2, "seconds": 20.0, "patience": 20.0}
    back = revive or (lambda server: None)
    made = Servers([each.address for each in several], DIALECTS[dialect], RULES, version_of, back,
                   **settings | changes)  # fmt: skip
    return made


def complaint(made: Servers, asks: Sequence[Ask], seen: Callable[[], bool] | None = None) -> str:
    """Error of a call whose patience ends once `seen` (each server failed): a short one might end before."""

    def beat() -> None:
        if seen() if seen else all(server.why for server in made.all):
            made.patience = 0.01

    with pytest.raises(ServerError) as caught:
        made.complete(asks, 3, beat)
    return str(caught.value)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RolloutServer, RolloutServer]]:
    monkeypatch.setattr(rollout_servers, "LOOK", 0.01)
    monkeypatch.setattr(rollout_servers, "REST", 0.02)
    monkeypatch.setattr(rollout_servers, "SOON", 0.1)
    with ExitStack() as closed:
        pair = closed.enter_context(RolloutServer()), closed.enter_context(RolloutServer())
        for each in pair:
            each.label = "3"
        yield pair


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect_asks_as_documented_and_reads_groups_in_order(
    dialect: str, two: tuple[RolloutServer, RolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in refuses bodies with any other field."""
    assert servers(*two, dialect=dialect).complete(ASKS, 3) == EXPECTED
    asked = two[0].asks(DIALECTS[dialect].route) + two[1].asks(DIALECTS[dialect].route)
    assert len(asked) == 12
    inner = asked[0].get("sampling_params", asked[0])
    assert (inner["temperature"], inner["n"], inner["stop"], inner["min_p"]) == (1.0, 2, ["\n"], 0.0)
    two[0].label = two[1].label = "2"
    monkeypatch.setattr(rollout_servers, "REST", 60.0)
    why = complaint(servers(*two, dialect=dialect), ASKS[:1])
    assert why.startswith("no server answered for 0.01 s") and "of version 2, and 3 is the oldest" in why


@pytest.mark.parametrize("fault", ["die", "garbage", "error"])
def test_requests_of_a_server_that_fails_move_and_it_comes_back(
    fault: str, two: tuple[RolloutServer, RolloutServer]
) -> None:
    first, second = two
    first.fault = lambda route: fault
    second.fault = lambda route: 0.02  # else it would answer all before the other is back
    back = threading.Event()

    def revive(server: Server) -> None:
        assert server.address == first.address
        if len(second.asked) < 4:
            raise ConnectionRefusedError("it starts")
        first.fault = lambda route: None
        back.set()

    news: list[str] = []
    made = servers(*two, revive=revive, note=news.append)
    assert made.complete(ASKS, 3) == EXPECTED
    assert back.is_set() and made.moved >= 1
    assert made.complete(ASKS, 3) == EXPECTED
    assert [first.address in line for line in news] == [True, True] and "is back" in news[1]


def test_a_slow_server_holds_up_nothing(two: tuple[RolloutServer, RolloutServer]) -> None:
    slow, _ = two
    slow.fault = lambda route: 30.0 if len(slow.asked) == 1 else None
    began = time.monotonic()
    made = servers(*two)
    assert made.complete(ASKS, 3) == EXPECTED
    assert time.monotonic() - began < 15.0 and made.moved == 1
    assert {server.why for server in made.all} == {None}


def test_without_any_server_a_call_ends_in_time_and_says_why(two: tuple[RolloutServer, RolloutServer]) -> None:
    for each in two:
        each.fault = lambda route: "die"
    tried: list[Server] = []

    def revive(server: Server) -> None:
        tried.append(server)
        raise ConnectionRefusedError("nobody listens")

    made = servers(*two, revive=revive)
    why = complaint(made, ASKS, lambda: all(tried.count(server) > 1 for server in made.all))
    assert re.match(r"no server answered for 0\.01 s .*nobody listens.*nobody listens", why)


def test_while_no_server_answers_the_run_says_that_it_waits_and_for_which(
    two: tuple[RolloutServer, RolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_servers, "SILENT", 0.1)
    monkeypatch.setattr(rollout_servers, "AGAIN", 0.1)
    for each in two:
        each.fault = lambda route: "die"
    news: list[str] = []

    def waits() -> list[str]:
        return [line for line in news if line.startswith("waits for a server")]

    def revive(server: Server) -> None:
        if len(waits()) < 2:
            raise ConnectionRefusedError("nobody listens")
        for each in two:
            each.fault = lambda route: None

    made = servers(*two, revive=revive, note=news.append, patience=5.0)
    assert made.complete(ASKS, 3) == EXPECTED
    addresses = rf"{two[0].address}: .*nobody listens; {two[1].address}: .*nobody listens"
    assert re.fullmatch(rf"waits for a server, [45] s more at most; none answers \({addresses}\)", waits()[0])
    told = len(waits())
    assert made.complete(ASKS, 3) == EXPECTED and len(waits()) == told  # nothing to wait for
    two[0].fault = lambda route: "die"
    assert made.complete(ASKS, 3) == EXPECTED and len(waits()) == told  # the other answers


def test_a_request_that_is_refused_itself_is_an_error_at_once(two: tuple[RolloutServer, RolloutServer]) -> None:
    made = Servers([two[0].address], DIALECTS["vllm"], RULES._replace(temperature=1), version_of, lambda server: None)
    with pytest.raises(ServerError, match=r"refuses with 422: .*does not take"):  # the stand-in wants a float
        made.complete(ASKS, 3)
    with pytest.raises(ValueError, match="no address of a server"):
        Server("localhost:8000")


def test_a_completion_of_two_versions_says_which_token_is_of_which(two: tuple[RolloutServer, RolloutServer]) -> None:
    for each in two:
        each.labels = [("2", 0.5), ("3", 1.0)]
    (group,) = servers(*two).complete([Ask((1,), 4, 0)], 2)
    assert [answer.version for answer in group] == [(3,), (2, 3), (2, 3, 3), (2, 2, 3, 3)]


GOOD = Choice([1, 2], [-0.1, -2.0], "stop", [("3", 0, 2)])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"token": []}, "0 tokens"),
        ({"token": [1] * 5}, "1 to 4 are possible"),
        ({"token": [1, 10]}, "beyond the vocabulary of 10"),
        ({"token": [1, "2"]}, "beyond the vocabulary"),
        ({"token": [1, True]}, "beyond the vocabulary"),
        ({"log_prob": [-0.1]}, "1 log-probabilities"),
        ({"log_prob": [-0.1, float("nan")]}, "log-probability that is none"),
        ({"log_prob": [-0.1, None]}, "log-probability that is none"),
        ({"log_prob": [-0.1, 0.5]}, "log-probability that is none"),
        ({"reason": "abort"}, "it ended by 'abort'"),
        ({"labels": [("default", 0, 2)]}, "default is unknown"),
        ({"labels": [("2", 0, 2)]}, "version 2, and 3 is the oldest"),
        ({"labels": [("3", 0, 1)]}, "versions of 1 tokens are missing"),
        ({"labels": [("3", 0, 1), ("3", 0, 2)]}, "do not cover the tokens"),
        ({"labels": None}, "versions of 2 tokens are missing"),
    ],
)
def test_an_answer_that_can_not_be_is_refused(change: dict[str, Any], why: str) -> None:
    assert checked(GOOD, RULES, version_of, 3) == Answer((1, 2), (-0.1, -2.0), (3, 3))
    with pytest.raises(Refused, match=why):
        checked(GOOD._replace(**change), RULES, version_of, 3)


def test_an_answer_that_is_too_large_is_not_read(
    two: tuple[RolloutServer, RolloutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_servers, "ANSWER", 10)
    monkeypatch.setattr(rollout_servers, "TOKEN", 1)
    monkeypatch.setattr(rollout_servers, "REST", 60.0)
    assert "more than 18 bytes" in complaint(servers(*two), ASKS[:1])


def test_a_completion_ends_at_the_token_or_text_that_ends_it() -> None:
    words = tokenizer.stopped(tokenizer.BYTES, "##")
    assert [tokenizer.ended_at([*text.encode()], words) for text in ("a##b", "a#", "#a##")] == [3, 2, 4]
    assert tokenizer.ended_at([97, tokenizer.BYTE_END, 98], words) == 2
