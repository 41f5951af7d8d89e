"""A page of a headless Chromium by Playwright: real clicks and keys, what it asked for, and what axe-core finds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
LIMIT = 60_000
"""Milliseconds within which a browser answers, on a machine that has much else to do."""


def find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of one browser; `close` it, since an event loop runs in this thread until then."""

    def __init__(self, program: str):
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=program, args=list(FLAGS), timeout=LIMIT)
        self.page = self._browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme="light")
        self.page.set_default_timeout(LIMIT)
        self._faults: list[str] = []
        self._requests: list[str] = []
        self.page.on("pageerror", lambda error: self._faults.append(str(error)))
        self.page.on("console", lambda message: self._faults.append(message.text) if message.type == "error" else None)
        self.page.on("request", lambda request: self._requests.append(request.url))

    def open(self, address: Path | str) -> None:
        """Loads a file or an address and waits until it is there; faults and requests begin anew."""
        self._faults.clear()
        self._requests.clear()
        self.page.goto(address.as_uri() if isinstance(address, Path) else address, wait_until="load")

    def show(self, width: int = 1280, dark: bool = False) -> None:
        """Sets the width of the window and the scheme of colours."""
        self.page.set_viewport_size({"width": width, "height": 1000})
        self.page.emulate_media(color_scheme="dark" if dark else "light")

    def run(self, script: str) -> Any:
        """Result of an asynchronous function of this body, as JSON."""
        return self.page.evaluate(f"async () => {{ {script} }}")

    def click(self, x: float, y: float) -> None:
        """A click of the mouse at a place of the window, in pixels."""
        self.page.mouse.click(x, y)

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)

    def faults(self) -> list[str]:
        """Exceptions that nobody caught, and errors on the console, since the page was opened."""
        self.run("return 0")  # so that all that happened before is read
        return list(self._faults)

    def requests(self) -> list[str]:
        """The addresses that the page has asked for since it was opened."""
        self.run("return 0")
        return list(self._requests)

    def violations(self) -> list[str]:
        """Findings of axe-core: a line for each rule with the elements that break it."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [f"{rule['id']}: {[node['html'][:120] for node in rule['nodes'][:5]]}" for rule in found]

    def wider_than_the_window(self) -> list[str]:
        """Elements that make the page scroll sideways."""
        found: list[str] = self.run("""
            const wide = document.documentElement.clientWidth;
            if (document.documentElement.scrollWidth <= wide) return [];
            return [...document.querySelectorAll("body *")]
              .filter((one) => one.getBoundingClientRect().right > wide + 1).map((one) => one.outerHTML.slice(0, 80));
            """)
        return found

    def close(self) -> None:
        self._browser.close()
        self._playwright.stop()


def opened() -> Iterator[Browser]:
    """Browser for a module's tests, to be made a fixture of it; skips them where there is none."""
    if (program := find()) is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is there")
    browser = Browser(program)
    yield browser
    browser.close()
