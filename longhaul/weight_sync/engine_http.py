"""HTTP client of inference engines' routes for new weights, which vllm.py and sglang.py share."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, Protocol

from longhaul.runtime import bounded_json

MOST = 1 << 20
"""Bytes of an engine's answer, at most."""


class EngineError(RuntimeError):
    """Call that an engine refused, or that failed there; one line."""


class Reloading(Protocol):
    """Server that loads a version's folder by its own loader: `vllm.Http`, or `sglang.Http`."""

    def pause(self) -> None: ...

    def reload(self, folder: str, weight_version: str) -> None: ...

    def resume(self) -> None: ...


class Routes:
    """Routes of an engine's server at `url`; `token` is that of its `--api-key`."""

    def __init__(self, url: str, seconds: float, token: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no address of a server; write http://HOST:PORT")
        self.url, self._seconds = url.rstrip("/"), seconds
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def post(self, route: str, body: dict[str, Any]) -> Any:
        """Answer of a route, parsed; None where it is no JSON. Raises EngineError."""
        asked = urllib.request.Request(f"{self.url}/{route}", json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(asked, timeout=self._seconds) as answer:
                text = answer.read(MOST)
        except urllib.error.HTTPError as error:
            reply = " ".join(error.read(4096).decode(errors="replace").split())
            raise EngineError(f"{self.url}/{route} failed with {error.code}: {reply}") from None
        try:
            return bounded_json.parse(text) if text.strip() else None
        except ValueError:
            return None  # a word in plain text
