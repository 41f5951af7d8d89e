"""The board: what it answers and refuses, its events, and its pages in a real browser where one is installed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from longhaul.training import board
from tests.helpers import browser
from tests.training.test_runs import make, record

MARKUP = '<img src=x onerror="document.title=1">'
TOKEN = "a-token-of-sixteen-or-more"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


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


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    config = uvicorn.Config(
        board.application(str(folder)), port=0, log_config=None, log_level="error", lifespan="off",
        timeout_graceful_shutdown=1, ws="none",
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.mark.slow
@pytest.mark.skipif(browser.find() is None, reason="no Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_in_a_browser(folder: Path, address: str, scheme: Any, width: int) -> None:
    """Live within 2 s, nothing from elsewhere, no error, text for markup, and no finding of axe."""
    axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright")
    api = pytest.importorskip("playwright.sync_api")
    faults: list[str] = []
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser.find(), args=FLAGS)
        page = opened.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith((address, "data:")) else faults.append(asked.url))

        def sound() -> None:
            violations = axe_playwright.Axe().run(page).response["violations"]
            assert [(each["id"], each["nodes"][0]["html"]) for each in violations] == []
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
            assert faults == []

        page.goto(address)
        page.wait_for_selector("#runs tbody tr")
        assert page.locator("#runs img").count() == 0 and page.get_by_text(MARKUP).count() == 1
        page.keyboard.press("/")
        page.keyboard.type("done")
        api.expect(page.locator("#runs tbody tr")).to_have_count(1)
        sound()
        page.goto(f"{address}/run/b")
        page.wait_for_selector("#live.on")
        page.locator("figure.chart").first.focus()
        page.keyboard.press("ArrowLeft")
        with open(folder / "b" / "metrics.jsonl", "a") as file:
            file.write(record(4321))
        api.expect(page.locator("dl.figures")).to_contain_text("432,100", timeout=2000)
        sound()
        page.goto(f"{address}/compare?run=a&run=b&run=c&seeds=1")
        page.wait_for_selector("canvas")
        sound()
        opened.close()
