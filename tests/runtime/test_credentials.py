"""Who may speak to a server of central inference: its own actors, with the token, over TLS beyond loopback."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.envs.host.vector import HostSpec
from longhaul.runtime.credentials import NOBODY, Credentials, check_bind, load, self_signed, split
from longhaul.spaces import Box, Discrete, Leaf
from longhaul.topologies.inference_server import wire
from longhaul.topologies.inference_server.grpc_transport import PATH, GrpcActorTransport, GrpcTransport, run
from longhaul.topologies.inference_server.wire import Codec, Lost, WireError
from tests.helpers.malformed_frames import BARE, CODEC, COLUMNS, SLOTS, hello, observe

pytest.importorskip("grpc")


@contextmanager
def turning(lane: GrpcTransport) -> Iterator[GrpcTransport]:
    """A lane whose streams are heard, in a thread; what comes is left for who asks later."""
    over = threading.Event()

    def turn() -> None:
        while not over.is_set():
            lane.wait(0.02)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield lane
    finally:
        over.set()
        thread.join()


@pytest.fixture
def lane() -> Iterator[GrpcTransport]:
    with closing(GrpcTransport(CODEC, 5, SLOTS, lambda actor, life: [actor, life])) as made, turning(made):
        yield made


async def greet(lane: GrpcTransport, credentials: Credentials = NOBODY, codec: Codec = BARE) -> None:
    """Says HELLO and is welcome; raises what GrpcActorTransport.open raises."""
    line = GrpcActorTransport(codec, SLOTS, lane.address, actor=0, credentials=credentials)
    try:
        await line.open()
    finally:
        await line.close()


def test_another_environment_is_refused_with_the_difference(lane: GrpcTransport) -> None:
    others = {
        "columns 7": wire.layout(HostSpec(CODEC.layout.form, Discrete(4)), 7),
        "observation/1 float64 5": wire.layout(
            HostSpec(CODEC.layout.form | {"speed": Leaf((5,), np.dtype(float))}, Discrete(4)), COLUMNS
        ),
        "action float32 1": wire.layout(HostSpec(CODEC.layout.form, Box((0.0,), (1.0,))), COLUMNS),
    }  # fmt: skip
    for word, layout in others.items():
        with pytest.raises(WireError, match=f"another environment: the server has .* where the actor has '{word}'"):
            run(greet(lane, codec=Codec(layout)))


def test_an_actor_that_is_here_is_not_pushed_out_by_another_process(lane: GrpcTransport) -> None:
    import grpc

    async def both() -> str:
        line = GrpcActorTransport(BARE, SLOTS, lane.address, actor=2, credentials=Credentials())
        await line.open()
        async with grpc.aio.insecure_channel(lane.address) as channel:
            call = channel.stream_stream(PATH)()
            await call.write(hello(2, name=99))
            answer = await call.read()
        await line.close()
        head = wire.read(answer, CODEC.most)
        assert (head.kind, head.step) == (wire.REFUSE, 1), "it may try again later"
        return wire.text(answer)

    assert run(both()) == "actor 2 is here already"


def test_who_sends_more_than_is_due_is_ended_at_once(lane: GrpcTransport) -> None:
    import grpc

    async def flood() -> int:
        rng, sent = np.random.default_rng(0), 0
        async with grpc.aio.insecure_channel(lane.address) as channel:
            call = channel.stream_stream(PATH)()
            await call.write(hello(1))
            await call.read()
            frame = wire.frame(*observe(rng, SLOTS, 1, 0))
            try:
                for sent in range(1, 100_000):
                    await call.write(frame)
            except (grpc.RpcError, asyncio.InvalidStateError):
                pass
            return sent

    assert run(flood()) < 20_000
    assert lane.take() == [Lost(1, f"a frame of group {SLOTS}, of which none is due")]


def test_frames_longer_than_any_of_the_layout_are_not_received(lane: GrpcTransport) -> None:
    import grpc

    async def shout() -> Any:
        async with grpc.aio.insecure_channel(lane.address) as channel:
            call = channel.stream_stream(PATH)()
            await call.write(bytes(CODEC.most + 1))
            await call.read()

    with pytest.raises(grpc.RpcError) as caught:
        run(shout())
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


SECRET = "0123456789abcdef-correct"


def test_a_wrong_token_is_refused() -> None:
    with (
        closing(GrpcTransport(CODEC, 1, SLOTS, lambda a, life: [0, 0], credentials=Credentials(SECRET))) as lane,
        turning(lane),
    ):
        run(greet(lane, Credentials(SECRET)))
        for wrong in (None, SECRET[:-1], SECRET + "x", "0123456789abcdef-another"):
            with pytest.raises(WireError, match="the token is missing or wrong"):
                run(greet(lane, Credentials(wrong)))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key) of 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = self_signed("127.0.0.1")
    assert made.certificate is not None and made.key is not None
    cert.write_bytes(made.certificate)
    key.write_bytes(made.key)
    return cert, key


def test_with_tls_only_who_knows_the_server_speaks_to_it(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = map(str, certificate)
    token = tmp_path / "token"
    token.write_text(SECRET + "\n")
    theirs = load(str(token), cert, key)
    ours = load(str(token), tls_ca=cert)
    with closing(GrpcTransport(CODEC, 1, SLOTS, lambda a, life: [0, 0], credentials=theirs)) as lane, turning(lane):
        run(greet(lane, ours))
        with pytest.raises(WireError, match="token"):
            run(greet(lane, ours._replace(token="0123456789abcdef-another")))
        with pytest.raises(ConnectionError):  # in the clear
            run(greet(lane, ours._replace(authority=None)))


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "[::]", "example.org", "127.0.0.1.example.org"])
def test_beyond_loopback_token_and_tls_are_asked_for(host: str) -> None:
    full = Credentials(SECRET, b"certificate", b"key")
    check_bind(f"{host}:7777", full)
    for lacking, word in (({"token": None}, "--token-file"), ({"certificate": None}, "--tls-cert and --tls-key")):
        with pytest.raises(ValueError, match=f"--bind is .*, which other machines can reach: give {word}, or bind"):
            check_bind(f"{host}:7777", full._replace(**lacking))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.3.2.1"])
def test_on_loopback_nothing_is_asked_for(host: str) -> None:
    check_bind(f"{host}:0", Credentials())


def test_bad_credentials_are_one_clear_line(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("secret")
    with pytest.raises(ValueError, match="has 6 characters; a token is one line of 16 or more"):
        load(str(short))
    with pytest.raises(ValueError, match="--tls-key nowhere: No such file"):
        load(None, str(short), "nowhere")
    with pytest.raises(ValueError, match="belong together"):
        load(None, str(short))
    for address in ("localhost", ":80", "a:b", "host:70000"):
        with pytest.raises(ValueError, match="write HOST:PORT"):
            split(address)


def test_files_that_are_no_certificate_or_key_are_named(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = map(str, certificate)
    other, plain, torn, locked = (str(tmp_path / name) for name in ("other", "plain", "torn", "locked"))
    Path(plain).write_text("root:x:0:0:root\n")
    Path(torn).write_bytes(b"\n".join(Path(key).read_bytes().splitlines()[::2]))
    Path(other).write_bytes(self_signed("localhost").key or b"")
    encrypt = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(encrypt, check=True, capture_output=True)
    for paths, told in (
        ((plain, plain), f"--tls-cert {plain} is no certificate in PEM"),
        ((key, cert), f"--tls-cert {key} is no certificate in PEM"),
        ((cert, plain), f"--tls-key {plain} is no key in PEM"),
        ((cert, torn), f"--tls-cert {cert} with --tls-key {torn} can't be read as PEM"),
        ((cert, locked), f"--tls-cert {cert} with --tls-key {locked} can't be read as PEM"),
        ((cert, other), f"--tls-key {other} is not the key of --tls-cert {cert}"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
            load(None, *paths)
    with pytest.raises(ValueError, match=f"^--tls-ca {re.escape(plain)} is no certificate in PEM"):
        load(tls_ca=plain)
