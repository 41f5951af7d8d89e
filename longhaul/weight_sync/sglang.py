"""SGLang's routes for new weights: versions as folders, which its own loader reads.

A folder of a language model's run is a model as SGLang reads it (`transports.folder`). The order is pause, load, go on.
A pause puts running requests back in the queue: they are computed again with the new weights, and the tokens that they
have stay. The route for tensors in memory takes pickles of SGLang's own, and is not used here.

The bodies are those of SGLang's documentation; no SGLang runs where this is tested.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from longhaul.runtime import bounded_json
from longhaul.weight_sync.vllm import EngineError

MOST = 1 << 20
"""Bytes of an answer, at most."""


class Http:
    """Routes of a server at `url`; `token` is that of `--api-key`. A failure is an EngineError."""

    def __init__(self, url: str, seconds: float = 300.0, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no address of a server; write http://HOST:PORT")
        self._url, self._seconds = url.rstrip("/"), seconds
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def pause(self) -> None:
        self._post("pause_generation", {"mode": "retract"})

    def reload(self, folder: str, weight_version: str) -> None:
        """Loads a version's folder. EngineError where SGLang says that it failed."""
        body = {"model_path": folder, "weight_version": weight_version, "flush_cache": True,
                "abort_all_requests": False}  # fmt: skip
        told = self._post("update_weights_from_disk", body)
        if not (isinstance(told, dict) and told.get("success") is True):
            why = told.get("message") if isinstance(told, dict) else told
            raise EngineError(f"{self._url}/update_weights_from_disk failed: {why!s:.300}")

    def resume(self) -> None:
        self._post("continue_generation", {})

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        asked = urllib.request.Request(f"{self._url}/{route}", json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(asked, timeout=self._seconds) as answer:
                text = answer.read(MOST)
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(4096).decode(errors="replace").split())
            raise EngineError(f"{self._url}/{route} failed with {error.code}: {said}") from None
        try:
            return bounded_json.parse(text) if text.strip() else None
        except ValueError:
            return None  # a word in plain text
