"""Frames come out as they went in, or not at all; and whoever sends garbage harms nobody else."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.central import wire
from longhaul.central.credentials import NOBODY, Credentials, check_bind, load, split
from longhaul.central.frames import Frames
from longhaul.central.grpc_lane import PATH, GrpcLane, GrpcLine
from longhaul.central.lane import Answer, Arrival, Lost
from longhaul.central.streaming import run
from longhaul.central.wire import Codec, Due, WireError
from longhaul.forms import Box, Discrete, Leaf, Masked, MultiDiscrete
from longhaul.vectors import HostSpec
from tests.wire_fuzz import CODEC, COLUMNS, SLOTS, hello, malformed, observe

pytest.importorskip("grpc")

BARE = Codec(CODEC.layout._replace(scores=()))
"""What an actor knows before the server has told which scores it wants."""


def random_spec(rng: np.random.Generator) -> HostSpec:
    """Any observation, any action."""

    def leaf() -> Leaf:
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(4)))
        return Leaf(shape, np.dtype(str(rng.choice(["uint8", "int32", "float32", "bool", "float64", "int16"]))))

    trees = [leaf(), {"b": leaf(), "a": (leaf(), None)}, Masked({"x": leaf()}, Leaf((3,), np.dtype(bool))), [leaf()]]
    actions = [Discrete(3), MultiDiscrete((2, 3)), Box((-1.0,) * 4, (1.0,) * 4)]
    return HostSpec(trees[int(rng.integers(4))], actions[int(rng.integers(3))])


@pytest.mark.parametrize("seed", range(25))
def test_what_goes_in_comes_out_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = tuple(f"score{i}" for i in range(rng.integers(3)))
    codec = Codec(wire.layout(random_spec(rng), int(rng.integers(1, 40)), names))
    for number in range(4):
        head, payload = observe(rng, 3, 2, number, codec)
        data = wire.frame(head, payload)
        found = wire.read(data, codec.most)
        assert found == head._replace(length=len(payload))
        due = Due(wire.OBSERVE, 3, 2, number)
        codec.check_head(found, due)
        steps = Frames(codec, *due[:3])
        assert steps.whole(data, number) == head.finals
        assert steps.told(number, head.finals, payload) == data
        assert steps.sealed(bytearray(bytes(wire.HEAD_BYTES) + payload), number, head.finals) == data
        act = Due(wire.ACT, 3, 2, number)
        action = codec.action(rng.bytes(codec.action_bytes))
        actions = Frames(codec, *act[:3])
        answer = actions.acts(number, action)
        codec.check_head(wire.read(answer, codec.most), act)
        assert actions.whole(answer, number) == 0
        assert codec.action(answer, wire.HEAD_BYTES).tobytes() == action.tobytes()
        sent, came = codec.block(payload, head.finals), steps.observed(data, head.finals, first=number == 0)
        for a, b in zip((*sent.observation, *sent.final, *sent[1:4]), (*came.observation, *came.final, *came[1:4])):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        assert sent.scores.tobytes() == came.scores.tobytes()
        assert sent.known.tobytes() == came.known.tobytes()
        with pytest.raises(ValueError, match="read-only"):
            came.reward[0] = 1.0


def test_arrays_of_a_block_do_not_overlap_and_fill_it() -> None:
    for finals in range(COLUMNS + 1):
        memory = bytearray(CODEC.block_bytes(finals))
        block = CODEC.block(memory, finals)
        arrays = [*block.observation, *block.final, block.reward, block.flags, block.columns, block.scores, block.known]
        for i, array in enumerate(arrays):
            array.view(np.uint8).reshape(-1)[:] = i + 1
        for i, array in enumerate(arrays):
            assert (array.view(np.uint8) == i + 1).all()
        assert sum(array.nbytes for array in arrays) <= len(memory) < sum(a.nbytes for a in arrays) + 8 * len(arrays)


def accepted(data: bytes, due: Due) -> bool:
    """Whether a frame passes all checks; anything but WireError escapes."""
    try:
        steps = Frames(CODEC, *due[:3])
        steps.observed(data, steps.whole(data, due.step), first=due.step == 0)
    except WireError:
        return False
    return True


def reject(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for i in range(count):
        number = int(rng.integers(3))
        head, payload = observe(rng, 3, 1, number)
        due = Due(wire.OBSERVE, 3, 1, number)
        assert accepted(wire.frame(head, payload), due)
        bad = malformed(rng, head, payload)
        assert not accepted(bad, due), f"malformed frame {i} of seed {seed} passed: {bad.hex()}"


def test_no_malformed_frame_passes() -> None:
    reject(2_000, 0)


@pytest.mark.slow
def test_no_malformed_frame_of_very_many_passes() -> None:
    reject(100_000, 1)


# ---------------------------------------------------------------------------------------------------- a living server


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Echo:
    """A server that answers each group with its first reward's bits, in a thread; and what it saw."""

    def __init__(self, lane: GrpcLane) -> None:
        self.lane, self.arrivals, self.lost, self.most = lane, 0, 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            self.lane.wait(0.05)
            answers = []
            events = self.lane.take()
            self.most = max(self.most, len(events))
            for event in events:
                if isinstance(event, Lost):
                    self.lost += 1
                elif isinstance(event, Arrival):
                    self.arrivals += 1
                    value = np.full(COLUMNS, event.step.reward.view(np.int32)[0], np.int32)
                    answers.append(Answer(event.group, event.life, value))
            self.lane.answer(answers)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def turning(lane: GrpcLane) -> Iterator[GrpcLane]:
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
def silent() -> Iterator[GrpcLane]:
    """A lane that nobody turns yet."""
    with closing(GrpcLane(CODEC, 5, SLOTS, lambda actor, life: [actor, life])) as lane:
        yield lane


@pytest.fixture
def lane(silent: GrpcLane) -> Iterator[GrpcLane]:
    with turning(silent):
        yield silent


async def play_well(address: str, over: asyncio.Event, life: int) -> int:
    """Actor 0, which must get the answers to its own steps, in order, whatever others do; -> steps."""
    rng, line = np.random.default_rng(5), GrpcLine(BARE, SLOTS, address, actor=0, credentials=Credentials())
    assert await line.open() == [0, life], "another one was actor 0 meanwhile"
    wanted, done = [0, 0], 0

    async def post(slot: int) -> None:
        line.blocks[slot].flags[:] = False
        line.blocks[slot].reward[:] = rng.random()
        wanted[slot] = int(line.blocks[slot].reward.view(np.int32)[0])
        await line.post(slot, 0)

    for slot in range(SLOTS):
        await post(slot)
    while not over.is_set():
        async with asyncio.timeout(20.0):
            slot, action = await line.next()
        assert (action == wanted[slot]).all()
        await asyncio.sleep(0.002)  # the test is of the others
        await post(slot)
        done += 1
    await line.close()
    return done


async def play_badly(call: Any, rng: np.random.Generator, actor: int, more: int = 0) -> None:
    """One stream with one malformed frame somewhere, and `more` after it; it must be ended by the server."""
    import grpc

    try:
        greeting = hello(actor, name=int(rng.integers(2**60)))
        chance = rng.random()
        if chance < 0.1:
            await call.write(malformed(rng, *observe(rng, actor * SLOTS, 1, 0)))
        elif chance < 0.2:
            bad = bytearray(greeting)
            bad[int(rng.integers(len(bad)))] ^= 1 << int(rng.integers(8))
            await call.write(bytes(bad))
        else:
            await call.write(greeting)
            welcome = wire.read(await call.read(), CODEC.most)
            if welcome.kind == wire.WELCOME:
                last = actor * SLOTS + SLOTS - 1  # the group after it is another's
                head, payload = observe(rng, last, welcome.incarnation, 0)
                for _ in range(1 + more):
                    await call.write(malformed(rng, head, payload))
        async with asyncio.timeout(20.0):
            while (await call.read()) is not grpc.aio.EOF:
                pass
    except (grpc.RpcError, asyncio.InvalidStateError):
        pass


async def attack(address: str, frames: int, life: int = 1, more: int = 0) -> int:
    """So many malformed frames from four streams at once, while actor 0 plays; -> its steps. `more` follow in each."""
    import grpc

    over = asyncio.Event()
    good = asyncio.create_task(play_well(address, over, life))
    await asyncio.sleep(0.2)

    async def bad(actor: int) -> None:
        rng = np.random.default_rng(actor)
        async with grpc.aio.insecure_channel(address) as channel:
            for _ in range(frames // 4 // (1 + more)):
                await play_badly(channel.stream_stream(PATH)(), rng, actor, more)

    await asyncio.gather(*(bad(actor) for actor in range(1, 5)))
    over.set()
    return await good


def under_attack(lane: GrpcLane, frames: int, more: int = 0) -> None:
    with closing(Echo(lane)) as echo:
        run(attack(lane.address, 200))  # all that is made once
        before = resident()
        steps = run(attack(lane.address, frames, life=2, more=more))
        grown = resident() - before
        assert steps > frames / (1 + more) / 100, "the good stream was held up"
        assert grown < 48 * 2**20, f"{grown / 2**20:.0f} MiB more after {frames} malformed frames"
        assert echo.most <= 5 * (SLOTS + 2), "more waited than one step for each group"


def test_malformed_frames_harm_nobody_else(silent: GrpcLane) -> None:
    under_attack(silent, 2_000)


@pytest.mark.slow
def test_very_many_malformed_frames_harm_nobody_else(silent: GrpcLane) -> None:
    """Many in each stream, whose end the sender does not wait for."""
    under_attack(silent, 100_000, more=49)


class Fed:
    """A stream without a network: what its actor says is made as it is read."""

    def __init__(self, rng: np.random.Generator, actor: int) -> None:
        self._rng, self._actor, self._read = rng, actor, 0
        self.answers: list[bytes] = []

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    def cancelled(self) -> bool:
        return False

    async def read(self) -> Any:
        self._read += 1
        if self._read == 1:
            return hello(self._actor, name=int(self._rng.integers(2**60)))
        life = wire.read(self.answers[0], CODEC.most).incarnation
        return malformed(self._rng, *observe(self._rng, self._actor * SLOTS, life, 0))

    async def write(self, frame: bytes) -> None:
        self.answers.append(frame)


def refused(lane: GrpcLane, streams: int) -> None:
    """Each stream's second frame is malformed: it ends with a reason, and nothing of it arrives."""
    rng, before = np.random.default_rng(3), 0
    for number in range(streams):
        fed = Fed(rng, number % 5)
        stream = lane._loop.create_task(lane._play(None, fed))
        while not stream.done():
            lane._turn(0.0)
        first, last = (wire.read(answer, CODEC.most).kind for answer in (fed.answers[0], fed.answers[-1]))
        assert (len(fed.answers), first, last) == (2, wire.WELCOME, wire.REFUSE)
        assert [type(event) for event in lane.take()] == [Lost]
        assert not lane.live()
        if number == streams // 10:
            before = resident()
    assert resident() - before < 16 * 2**20, "memory grows with what is refused"


def test_a_malformed_frame_ends_its_stream(silent: GrpcLane) -> None:
    refused(silent, 1_000)


@pytest.mark.slow
def test_each_of_very_many_malformed_frames_ends_its_stream(silent: GrpcLane) -> None:
    refused(silent, 100_000)


# ------------------------------------------------------------------------------------------------- who may speak at all


async def greet(lane: GrpcLane, credentials: Credentials = NOBODY, codec: Codec = BARE) -> None:
    """Says HELLO and is welcome; raises what GrpcLine.open raises."""
    line = GrpcLine(codec, SLOTS, lane.address, actor=0, credentials=credentials)
    try:
        await line.open()
    finally:
        await line.close()


def test_another_environment_is_refused_with_the_difference(lane: GrpcLane) -> None:
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


def test_an_actor_that_is_here_is_not_pushed_out_by_another_process(lane: GrpcLane) -> None:
    import grpc

    async def both() -> str:
        line = GrpcLine(BARE, SLOTS, lane.address, actor=2, credentials=Credentials())
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


def test_who_sends_more_than_is_due_is_ended_at_once(lane: GrpcLane) -> None:
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


def test_frames_longer_than_any_of_the_layout_are_not_received(lane: GrpcLane) -> None:
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
        closing(GrpcLane(CODEC, 1, SLOTS, lambda a, life: [0, 0], credentials=Credentials(SECRET))) as lane,
        turning(lane),
    ):
        run(greet(lane, Credentials(SECRET)))
        for wrong in (None, SECRET[:-1], SECRET + "x", "0123456789abcdef-another"):
            with pytest.raises(WireError, match="the token is missing or wrong"):
                run(greet(lane, Credentials(wrong)))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key) of localhost."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    return cert, key


def test_with_tls_only_who_knows_the_server_speaks_to_it(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = map(str, certificate)
    token = tmp_path / "token"
    token.write_text(SECRET + "\n")
    theirs = load(str(token), cert, key)
    ours = load(str(token), tls_ca=cert)
    with closing(GrpcLane(CODEC, 1, SLOTS, lambda a, life: [0, 0], credentials=theirs)) as lane, turning(lane):
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
