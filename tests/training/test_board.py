"""The board: what it answers and refuses, its events, and its pages in a real browser where one is installed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from starlette.testclient import TestClient

from longhaul.training import board, runs
from longhaul.training.serving import connections
from tests.helpers import browser
from tests.helpers.browser import Browser
from tests.training.test_runs import make, record

MARKUP = '<img src=x onerror="document.title=1">'
TOKEN = "a-token-of-sixteen-or-more"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path / "a", done=True), make(tmp_path / "b", lr=0.5), make(tmp_path / "c", seed=1)
    with open(make(tmp_path / MARKUP) / "metrics.jsonl", "a") as file:
        file.write(record(11, **{MARKUP: 1.0}))
    return tmp_path


def client(folder: Path, token: str | None = None, host: str = "127.0.0.1") -> Any:
    return TestClient(board.application(str(folder), token), base_url=f"http://{host}", follow_redirects=False)


def test_it_lists_shows_and_compares(folder: Path) -> None:
    asked = client(folder)
    assert {run["name"] for run in asked.get("/api/runs").json()["runs"]} == {"a", "b", "c", MARKUP}
    assert asked.get("/api/run/a").json()["summary"]["trained"] == 42.0
    curves = asked.get("/api/run/a/curves").json()
    assert curves["columns"]["episode/return"] == list(range(1, 11)) and curves["count"] == 10
    found = asked.get("/api/compare?run=a&run=b&run=c").json()
    assert found["groups"] == [["a", "c"], ["b"]] and found["differences"]["algorithm.lr"] == [0.001, 0.5, 0.001]
    assert found["lines"]["b"] == [[100 * i for i in range(1, 11)], list(range(1, 11))]
    lines = asked.get("/api/compare.csv?run=a&run=b").text.splitlines()
    assert lines[0] == "run,agent_steps,episode/return" and lines[1] == "a,100,1" and len(lines) == 21


def test_evaluations_are_answered_as_they_come(folder: Path) -> None:
    asked = client(folder)
    assert asked.get("/api/run/a/evaluations").json() == []
    line = {"update": 3, "agent_steps": 300, "episodes": 2, "metrics": {"return": [1.0, None, None]}}
    (folder / "a" / runs.EVALUATIONS).write_text(json.dumps(line) + "\n" + '{"upd')
    assert asked.get("/api/run/a/evaluations").json() == [line]


@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "\n", '{"check": [], "since": {}, "update": 1-2}\n', '{"update": 1}\nnull\n']
)
def test_a_strangers_run_is_answered_for(text: str, folder: Path) -> None:
    for file in ("run.json", "result.json", "metrics.jsonl", "health.jsonl", runs.EVALUATIONS, "memory.json"):
        (folder / "a" / file).write_text(text)
        asked = client(folder)
        for path in ("/api/runs", "/api/run/a", "/api/run/a/curves", "/api/run/a/evaluations", "/api/compare?run=a"):
            assert asked.get(path).status_code == 200, (file, path)


def test_without_a_thread_it_asks_to_come_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*words: object) -> None:
        raise RuntimeError("can't start new thread")

    asked = client(folder)
    monkeypatch.setattr(asyncio, "to_thread", none)
    found = asked.get("/api/runs")
    assert found.status_code == 503 and found.text.endswith("ask again later")


def test_only_runs_and_its_own_assets_are_reached(folder: Path) -> None:
    asked = client(folder / "b")  # beside it is what must not be reached
    for path in (
        *("/api/run/..", "/api/run/%2e%2e%2fa", "/api/run/a", "/report/..%2fa", "/assets/../board.py"),
        *("/assets/%2e%2e/board.py", "/api/events?run=..", "/api/compare?run=../a", "/assets/uplot/LICENSE"),
    ):
        assert asked.get(path).status_code == 404, path
    assert client(folder).get("/api/compare").status_code == 400


def test_a_foreign_host_and_a_foreign_origin_are_refused(folder: Path) -> None:
    assert client(folder, host="rebound.example").get("/api/runs").status_code == 421
    for host in ("localhost:8008", "127.0.0.1", "[::1]:8008", "[::1]"):
        assert client(folder).get("/api/runs", headers={"host": host}).status_code == 200
    for origin in ({}, {"origin": "http://elsewhere.example"}):
        assert client(folder).post("/player/a", headers=origin).status_code == 403
    assert client(folder).post("/player/a", headers={"origin": "http://127.0.0.1"}).json() == {
        "trouble": "there is no checkpoint yet"
    }


def test_beyond_loopback_it_asks_for_the_token(folder: Path) -> None:
    asked = client(folder, TOKEN, "10.0.0.5")
    assert asked.get("/api/runs").status_code == asked.get("/?token=wrong").status_code == 401
    assert asked.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    opened = asked.get(f"/run/x?token={TOKEN}&x=1")
    assert opened.status_code == 303 and opened.headers["location"] == "/run/x?x=1"
    assert "HttpOnly" in opened.headers["set-cookie"] and asked.get("/api/runs").status_code == 200


def test_a_runs_own_page_is_boxed_and_the_boards_has_no_inline_script(folder: Path) -> None:
    (folder / "a" / "report.html").write_text("<script>1</script>")
    asked = client(folder)
    assert asked.get("/report/a").headers["content-security-policy"].startswith("sandbox allow-scripts;")
    page = asked.get("/run/a")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "<script>" not in page.text and " style=" not in page.text and "http" not in page.text


@contextmanager
def served(folder: Path, most: int = connections.MOST, silent: float = connections.SILENT) -> Iterator[str]:
    """Address of a board of a folder."""
    server = board.server(board.application(str(folder)), most, silent)
    server.config.port = 0
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    with served(folder) as found:
        yield found


def test_strangers_who_say_nothing_take_no_place_of_those_who_ask(folder: Path) -> None:
    with served(folder, most=32, silent=0.5) as address, ExitStack() as held:
        host, port = address.removeprefix("http://").split(":")
        before, idle = len(os.listdir("/proc/self/fd")), []
        for _ in range(200):
            idle.append(held.enter_context(socket.create_connection((host, int(port)))))
            idle[-1].send(b"GET / HT")
        with urlopen(f"{address}/api/runs") as answer:
            assert len(json.load(answer)["runs"]) == 4
        assert len(os.listdir("/proc/self/fd")) <= before + 200 + 32 + 2
        idle[-1].settimeout(60.0)
        with suppress(ConnectionError):
            assert idle[-1].recv(1) == b""  # after its time, the newest too


PROGRAM = browser.find()
with_browser = pytest.mark.skipif(PROGRAM is None, reason=f"no browser: none of {', '.join(browser.NAMES)} is there")


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    opened = Browser(PROGRAM or "")
    yield opened
    opened.close()


def sound(window: Browser, address: str) -> None:
    """Fails where a page reports an error, asks elsewhere, or scrolls sideways."""
    assert window.faults() == [] and window.wider_than_the_window() == []
    assert [asked for asked in window.requests() if not asked.startswith((address, "data:"))] == []


@with_browser
def test_a_record_is_on_the_page_at_once(folder: Path, address: str, window: Browser) -> None:
    """A run's page lives, and markup in names is text: the smoke test of what `make test-all` checks in full."""
    window.show()
    window.open(address)
    window.page.wait_for_selector("#runs tbody tr:not(.gap)")
    assert window.page.locator("#runs img").count() == 0 and window.page.get_by_text(MARKUP).count() == 1
    sound(window, address)
    window.open(f"{address}/run/b")
    window.page.wait_for_selector("#live.on")
    with open(folder / "b" / "metrics.jsonl", "a") as file:
        file.write(record(4321))
    window.page.get_by_text("432,100").wait_for(timeout=30_000)
    sound(window, address)


@pytest.mark.slow
@with_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_work_by_keys_and_without_a_finding_in_a_browser(
    folder: Path, address: str, window: Browser, width: int, dark: bool
) -> None:
    """Each page by keys, with what comes while it is open, text for markup, and no finding of axe."""
    expect = pytest.importorskip("playwright.sync_api").expect
    window.show(width, dark)
    page = window.page

    def checked() -> None:
        sound(window, address)
        assert window.violations() == []
        assert page.title() != "1" and page.locator("main img").count() == 0

    window.open(address)
    page.wait_for_selector("#runs tbody tr:not(.gap)")
    page.keyboard.press("/")
    page.keyboard.type("done")
    expect(page.locator("#runs tbody tr:not(.gap)")).to_have_count(1)
    checked()
    window.open(f"{address}/run/b")
    page.wait_for_selector("#live.on")
    page.locator("figure.chart").first.focus()
    page.keyboard.press("ArrowLeft")
    assert " at " in page.locator("figure.chart output").first.inner_text()
    page.keyboard.press("+")
    assert page.locator("#reset").is_enabled()
    page.keyboard.press("0")
    chains = [{"prompt": MARKUP, "chain": f"{MARKUP} twice", "right": False}]
    with open(folder / "b" / runs.EVALUATIONS, "a") as file:
        for update in (3, 9):
            line = {"update": update, "agent_steps": 100 * update, "wall_seconds": 1.0, "episodes": 8}
            found = {"metrics": {"return": [20.0 + update, 20.0, 40.0]}, "chains": chains}
            file.write(json.dumps(line | found) + "\n")
    page.get_by_text(f"{MARKUP} twice").wait_for(timeout=30_000)
    assert "20 to 40" in page.get_by_role("region", name="Table: Evaluations during training").inner_text()
    checked()
    window.open(f"{address}/run/{quote(MARKUP)}")
    page.get_by_role("heading", name=MARKUP).first.wait_for()
    checked()
    window.open(f"{address}/compare?run=a&run=b&run=c&run={quote(MARKUP)}&seeds=1")
    page.wait_for_selector("canvas")
    checked()
    page.get_by_label("Aggregate over seeds").uncheck()
    assert "seeds" not in page.url and page.get_by_text(MARKUP).count() > 1
    checked()


@pytest.mark.slow
@with_browser
def test_of_many_runs_those_in_the_window_are_drawn(tmp_path: Path, window: Browser) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    for i in range(400):
        make(tmp_path / f"run-{i:03}", records=2)
    with served(tmp_path) as address:
        window.show()
        window.open(f"{address}/?sort=name")
        rows = window.page.locator("#runs tbody tr:not(.gap)")
        rows.first.wait_for()
        assert rows.count() < 50 and rows.first.get_attribute("aria-rowindex") == "2"
        window.run("scrollTo(0, document.body.scrollHeight)")
        window.page.get_by_text("run-399").wait_for()
        assert rows.count() < 50 and rows.last.get_attribute("aria-rowindex") == "401"
        rows.last.locator("input").focus()
        window.press("Space")
        window.run("scrollTo(0, 0)")
        window.page.get_by_text("run-399").wait_for(state="detached")
        window.run("scrollTo(0, document.body.scrollHeight)")
        window.page.get_by_text("run-399").wait_for()
        assert rows.last.locator("input").is_checked()
        window.page.locator("input[type=search]").fill("run-39")
        expect(rows).to_have_count(10)
