"""HTTP client of inference engines, against a server that answers as asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from longhaul.weight_sync.engine_http import EngineError, Routes


@contextmanager
def answering(status: int, text: bytes) -> Iterator[tuple[str, list[tuple[str, str | None, Any]]]]:
    """(address, [(path, authorization, body) of each request])."""
    asked: list[tuple[str, str | None, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("text", "parsed"), [(b'{"success": true}', {"success": True}), (b"", None), (b"OK", None), (b"[1]", [1])]
)
def test_an_answer_is_parsed_where_it_is_json(text: bytes, parsed: Any) -> None:
    with answering(200, text) as (address, asked):
        assert Routes(address + "/", 10.0, None).post("pause?mode=keep", {"a": 1}) == parsed
    assert asked == [("/pause?mode=keep", None, {"a": 1})]


def test_a_token_travels_as_a_bearer() -> None:
    with answering(200, b"{}") as (address, asked):
        Routes(address, 10.0, "secret").post("resume", {})
    assert asked == [("/resume", "Bearer secret", {})]


def test_an_error_of_the_engine_is_one_line() -> None:
    with answering(422, b'{"detail":\n  "no such\r\nfield"}') as (address, _), pytest.raises(EngineError) as raised:
        Routes(address, 10.0, None).post("resume", {})
    assert str(raised.value) == f'{address}/resume failed with 422: {{"detail": "no such field"}}'


@pytest.mark.parametrize("address", ["127.0.0.1:30000", "file:///etc/hosts", "ftp://127.0.0.1"])
def test_an_address_is_one_of_http(address: str) -> None:
    with pytest.raises(ValueError, match="no address of a server"):
        Routes(address, 10.0, None)
