"""SGLang's routes, against a stand-in that takes the bodies of its documentation alone."""

from __future__ import annotations

from typing import Any

import pytest

from longhaul.weight_sync.engine_http import EngineError
from longhaul.weight_sync.sglang import Http
from tests.helpers.rollout_server import RolloutServer


def test_a_folder_is_loaded_between_pause_and_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    with RolloutServer(load=loaded.append) as server:
        http = Http(server.address + "/")
        http.pause()
        http.reload("/models/version-1-7", "1-7")
        http.resume()
        assert [route for route, _ in server.asked] == [
            "/pause_generation", "/update_weights_from_disk", "/continue_generation",
        ]  # fmt: skip
        assert server.asks("/pause_generation") == [{"mode": "retract"}]
        assert server.label == "1-7" and loaded == ["/models/version-1-7"]
        server.fault = lambda route: "error"
        with pytest.raises(EngineError, match="pause_generation failed with 500"):
            http.pause()
        server.fault = lambda route: None

        def failed(route: str, body: Any) -> Any:
            return {"success": False, "message": "Failed to load: no such folder"}

        monkeypatch.setattr(server, "_made", failed)
        with pytest.raises(EngineError, match="update_weights_from_disk failed: Failed to load: no such folder"):
            http.reload("/nowhere", "1-8")
