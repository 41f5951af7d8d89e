"""TLS around the TCP transport: versions arrive, and only who has the right certificates is served."""

from __future__ import annotations

import contextlib
import gc
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from longhaul.runtime import credentials
from longhaul.weight_sync import transports
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import follow
from longhaul.weight_sync.transports import tls
from longhaul.weight_sync.transports.socket_server import STRANGERS

TOKEN = "a-token-of-sixteen-or-more"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and keys of two authorities, a and b."""
    made: Path = tmp_path_factory.mktemp("tls")
    for name in "ab":
        found = credentials.self_signed("127.0.0.1")
        assert found.certificate is not None and found.key is not None
        (made / f"{name}.pem").write_bytes(found.certificate)
        (made / f"{name}.key").write_bytes(found.key)
    return made


@pytest.fixture
def sender(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    monkeypatch.setenv("LONGHAUL_TLS_CERT", str(folder / "a.pem"))
    monkeypatch.setenv("LONGHAUL_TLS_KEY", str(folder / "a.key"))
    monkeypatch.setenv("LONGHAUL_TLS_CA", "")  # as good as unset
    with Publisher("a", transports=[transports.serve("tls:127.0.0.1:0", TOKEN)]) as made:
        monkeypatch.delenv("LONGHAUL_TLS_CERT"), monkeypatch.delenv("LONGHAUL_TLS_KEY")
        yield made


def address(sender: Publisher) -> str:
    return sender._transports[0].address


def test_versions_arrive_encrypted(sender: Publisher, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, params = address(sender), {"w": np.arange(300_000, dtype=np.float32)}
    monkeypatch.setenv("LONGHAUL_TLS_CA", str(folder / "a.pem"))
    with follow([where], token=TOKEN) as receiver:
        for version in (1, 2):
            params["w"] = params["w"] + version
            sender.publish(version, params)
            assert receiver.wait(version, 10.0), receiver.errors
            np.testing.assert_array_equal(receiver.latest()[1]["w"], params["w"])
    with pytest.raises(PermissionError):
        transports.connect(where, "another-token-of-sixteen", "x")
    monkeypatch.setenv("LONGHAUL_TLS_CA", str(folder / "b.pem"))
    with pytest.raises(ConnectionError, match="is LONGHAUL_TLS_CA the file of its authority"):
        transports.connect(where, TOKEN, "x")
    host, port = credentials.split(where.removeprefix("tls:"))
    with socket.create_connection((host, port)) as plain:  # and nothing comes in the clear
        plain.settimeout(5.0)
        plain.sendall(b"LHS1" + bytes(60))
        assert b"hello" not in plain.recv(4096)


def test_strangers_in_a_handshake_are_few(sender: Publisher, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest makes room, and versions arrive meanwhile."""
    monkeypatch.setattr(tls, "RATE", 200.0)
    where, descriptors = address(sender), Path("/dev/fd")
    monkeypatch.setenv("LONGHAUL_TLS_CA", str(folder / "a.pem"))
    with follow([where], token=TOKEN) as receiver, contextlib.ExitStack() as ends:
        sender.publish(1, {"w": np.ones(3, np.float32)})
        assert receiver.wait(1, 10.0), receiver.errors
        before = len(list(descriptors.iterdir()))
        made = [socket.create_connection(credentials.split(where.removeprefix("tls:"))) for _ in range(4 * STRANGERS)]
        for sock in made:
            ends.enter_context(sock).settimeout(5.0)
        for sock in made[: 3 * STRANGERS]:
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
        assert len(list(descriptors.iterdir())) - before - len(made) <= STRANGERS + 2
        sender.publish(2, {"w": np.ones(3, np.float32)})
        assert receiver.wait(2, 10.0), receiver.errors
        made[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):  # the newest is left alone until its time is over
            made[-1].recv(1)


def test_a_connection_outlives_the_garbage_collector(
    sender: Publisher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop keeps its tasks by weak references alone."""
    monkeypatch.setenv("LONGHAUL_TLS_CA", str(folder / "a.pem"))
    with follow([address(sender)], token=TOKEN) as receiver:
        for version in (1, 2, 3):
            sender.publish(version, {"w": np.ones(3, np.float32)})
            assert receiver.wait(version, 10.0), receiver.errors
            with socket.create_connection(credentials.split(address(sender).removeprefix("tls:"))) as other:
                other.sendall(b"no TLS")  # another one is the newest
                other.recv(4096)
            gc.collect()
        assert receiver.errors == []


@pytest.fixture
def few_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "RATE", 1e-9)


def test_a_newcomer_does_not_wait_behind_the_silent(
    few_handshakes: None, sender: Publisher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate of handshakes holds back who asks for one alone."""
    monkeypatch.setenv("LONGHAUL_TLS_CA", str(folder / "a.pem"))
    sender.publish(1, {"w": np.ones(3, np.float32)})
    with contextlib.ExitStack() as ends:
        for _ in range(3 * STRANGERS):
            ends.enter_context(socket.create_connection(credentials.split(address(sender).removeprefix("tls:"))))
        with follow([address(sender)], token=TOKEN) as receiver:
            assert receiver.wait(1, 10.0), receiver.errors


def test_with_an_authority_a_receiver_needs_a_certificate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in zip(tls.VARIABLES, ("a.pem", "a.key", "b.pem"), strict=True):
        monkeypatch.setenv(name, str(folder / file))
    with Publisher("a", transports=[transports.serve("tls:127.0.0.1:0")]) as sender:
        sender.publish(1, {"w": np.ones(3, np.float32)})
        monkeypatch.setenv("LONGHAUL_TLS_CA", str(folder / "a.pem"))
        with pytest.raises((OSError, ssl.SSLError)):  # with the sender's own, which b has not signed
            transports.connect(address(sender), None, "x").status()
        for name, file in zip(tls.VARIABLES[:2], ("b.pem", "b.key"), strict=True):
            monkeypatch.setenv(name, str(folder / file))
        with follow([address(sender)]) as receiver:
            assert receiver.wait(1, 10.0), receiver.errors


def test_a_missing_certificate_or_key_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tls.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="needs a certificate: set LONGHAUL_TLS_CERT and LONGHAUL_TLS_KEY"):
        transports.serve("tls:127.0.0.1:0")
    monkeypatch.setenv("LONGHAUL_TLS_CERT", str(folder / "a.pem"))
    monkeypatch.setenv("LONGHAUL_TLS_KEY", str(folder / "b.key"))
    with pytest.raises(ValueError, match="is not the key of"):
        transports.serve("tls:127.0.0.1:0")
    monkeypatch.setenv("LONGHAUL_TLS_KEY", str(folder / "a.key"))
    with pytest.raises(ValueError, match="give a token, or set LONGHAUL_TLS_CA"):
        transports.serve("tls:0.0.0.0:0")
