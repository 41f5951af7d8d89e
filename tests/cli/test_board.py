"""The command `board`: its address, its token, and its errors."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import uvicorn

from longhaul.cli.board import board
from longhaul.cli.flags import FlagError


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_token_is_asked_for_beyond_loopback_alone(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        for each in sockets:
            each.close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    assert board([str(tmp_path), "--host", host, "--port", "0"]) == 0
    assert ("?token=" in capsys.readouterr().out) == (host == "0.0.0.0")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(FlagError, match="give another"):
        board([str(tmp_path), "--port", str(taken.getsockname()[1])])


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match=r"there is no folder .*/nope; give"):
        board([str(tmp_path / "nope")])
