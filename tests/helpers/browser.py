"""A browser of Chromium's family, driven over its debugging pipe: pages from files, real clicks and keys.

Nothing but the standard library: messages are JSON, each ended by a zero byte, on file descriptors 3 and 4.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
LIMIT = 60.0
"""Seconds within which a browser answers, on a machine that has much else to do."""

LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Puts the two pipes where the browser looks for them, and becomes the browser."""


def find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of one browser; `close` it."""

    def __init__(self, program: str, profile: Path):
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", f"--user-data-dir={profile}", "--remote-debugging-pipe",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", LAUNCH, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.send(f"{domain}.enable")
        light = [{"name": "prefers-color-scheme", "value": "light"}]
        self.send("Emulation.setEmulatedMedia", features=light)
        self.send("Emulation.setDeviceMetricsOverride", width=1280, height=1000, deviceScaleFactor=1, mobile=False)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command; events that come before it are kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                answer: dict[str, Any] = found["result"]
                return answer
            self.events.append(found)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + LIMIT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self._in, 1 << 16) if ready else b""
            assert chunk, "the browser does not answer" if not ready else "the browser ended"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, path: Path) -> None:
        """Loads a file and waits until it is there; `events` begin anew."""
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def run(self, script: str) -> Any:
        """What an asynchronous function of this body returns, as JSON."""
        code = f"(async () => {{ {script} }})()"
        found = self.send("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """A click of the mouse at a place of the window, in pixels."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def press(self, key: str, text: str = "") -> None:
        """A key pressed and let go; `text` is what it would type."""
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, **({"text": text} if text and kind == "keyDown" else {})
            )

    def faults(self) -> list[str]:
        """What went wrong in the page since it was opened: exceptions nobody caught, and errors on its console."""
        self.run("return 0")  # so that all that happened before is read
        return [
            json.dumps(event["params"])
            for event in self.events
            if event.get("method") == "Runtime.exceptionThrown"
            or (event.get("method") == "Runtime.consoleAPICalled" and event["params"]["type"] == "error")
        ]

    def requests(self) -> list[str]:
        """The addresses that the page has asked for since it was opened."""
        asked = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]

    def close(self) -> None:
        os.close(self._out)  # the browser ends when the pipe does
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
