"""SGLang's routes for new weights: versions as folders, which its own loader reads.

A folder of a language model's run is a model as SGLang reads it (`transports.folder`). The order is pause, load, go on.
A pause puts running requests back in the queue: they are computed again with the new weights, and the tokens that they
have stay. The route for tensors in memory takes pickles of SGLang's own, and is not used here.

The bodies are those of SGLang's documentation; no SGLang runs where this is tested.
"""

from __future__ import annotations

from longhaul.weight_sync.engine_http import EngineError, Routes


class Http:
    """Routes of a server at `url`; `token` is that of `--api-key`. A failure is an EngineError."""

    def __init__(self, url: str, seconds: float = 300.0, token: str | None = None) -> None:
        self._routes = Routes(url, seconds, token)

    def pause(self) -> None:
        self._routes.post("pause_generation", {"mode": "retract"})

    def reload(self, folder: str, weight_version: str) -> None:
        """Loads a version's folder. EngineError where SGLang says that it failed."""
        body = {"model_path": folder, "weight_version": weight_version, "flush_cache": True,
                "abort_all_requests": False}  # fmt: skip
        reply = self._routes.post("update_weights_from_disk", body)
        if not (isinstance(reply, dict) and reply.get("success") is True):
            message = reply.get("message") if isinstance(reply, dict) else reply
            raise EngineError(f"{self._routes.url}/update_weights_from_disk failed: {message!s:.300}")

    def resume(self) -> None:
        self._routes.post("continue_generation", {})
