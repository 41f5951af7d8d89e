"""Malformed frames, made from whole ones in every way that we know, for tests and for those who want more of them."""

from __future__ import annotations

import numpy as np

from longhaul.envs.host.vector import HostSpec
from longhaul.spaces import Discrete, Leaf
from longhaul.topologies.inference_server import wire
from longhaul.topologies.inference_server.wire import Codec, Head

COLUMNS, SLOTS = 6, 2

CODEC = Codec(
    wire.layout(
        HostSpec({"map": Leaf((2, 3), np.dtype(np.uint8)), "speed": Leaf((5,), np.dtype(np.float32))}, Discrete(4)),
        COLUMNS,
        ("goal", "crash"),
    )
)
"""Small, with everything in it."""

BARE = Codec(CODEC.layout._replace(scores=()))
"""Knowledge of an actor before the server has told which scores it wants."""


def step(rng: np.random.Generator, codec: Codec = CODEC, *, first: bool = False) -> tuple[int, bytes]:
    """(episodes that ended, a block) of a random step that contradicts nothing."""
    flags = rng.random((3, codec.layout.columns)) < 0.4
    if first:
        flags[:] = False
    ended = ((flags[0] | flags[1]) & flags[2]).nonzero()[0]
    memory = bytearray(rng.bytes(codec.block_bytes(len(ended))))
    block = codec.block(memory, len(ended))
    block.flags[:], block.columns[:] = flags, ended
    block.reward[:] = rng.standard_normal(codec.layout.columns)
    block.known[:] = rng.random(block.known.shape) < 0.5
    return len(ended), bytes(memory)


def hello(actor: int, codec: Codec = CODEC, name: int = 7) -> bytes:
    head = Head(wire.HELLO, actor, 0, name, codec.layout.columns, SLOTS, codec.digest)
    return wire.frame(head, codec.layout.text.encode())


def observe(
    rng: np.random.Generator, group: int, life: int, number: int, codec: Codec = CODEC
) -> tuple[Head, bytes]:  # fmt: skip
    """The head and the payload of a whole step."""
    finals, payload = step(rng, codec, first=number == 0)
    return Head(wire.OBSERVE, group, life, number, codec.layout.columns, finals, codec.digest), payload


def malformed(rng: np.random.Generator, head: Head, payload: bytes) -> bytes:
    """A frame that is not the one of this head and payload."""
    whole = wire.frame(head, payload)
    match rng.integers(9):
        case 0:  # any bytes
            return rng.bytes(int(rng.integers(0, 2 * len(whole))))
        case 1:  # cut off
            return whole[: int(rng.integers(0, len(whole)))]
        case 2:  # longer
            return whole + rng.bytes(int(rng.integers(1, 64)))
        case 3:  # some bits of the head turned, but the group's, which may name another one that is due
            bad, where = bytearray(whole), [*range(8), *range(12, wire.HEAD_BYTES)]
            for _ in range(int(rng.integers(1, 8))):
                bad[rng.choice(where)] ^= 1 << int(rng.integers(8))
            return bytes(bad) if bytes(bad) != whole else b""
        case 4:  # another number in the head, and all consistent
            field = str(rng.choice(["kind", "group", "incarnation", "step", "columns", "finals", "digest"]))
            wide = {"digest": 64, "step": 64, "kind": 16}.get(field, 32)
            near = [getattr(head, field) + 1, 2**wide - 1, int(rng.integers(2**15))]
            value = int(near[int(rng.integers(3))]) % 2**wide
            if value == getattr(head, field):
                return b""
            return wire.frame(head._replace(**{field: value}), payload)
        case 5:  # a length that is not its own
            bad = bytearray(whole)
            bad[40:48] = int(rng.integers(2**62)).to_bytes(8, "little")
            return bytes(bad)
        case 6:  # a payload of another size
            return wire.frame(head, rng.bytes(int(rng.integers(0, 2 * len(payload) + 9))) + b"\0" * 3)
        case 7:  # a flag that is none
            return wire.frame(head, _spoilt(payload, "flags", head, rng))
        case _:  # ends of others, or a reward that is no number
            return wire.frame(head, _spoilt(payload, "other", head, rng))


def _spoilt(payload: bytes, fault: str, head: Head, rng: np.random.Generator) -> bytes:
    memory = bytearray(payload)
    block = CODEC.block(memory, head.finals)
    if fault == "flags":
        block.flags.view(np.uint8)[int(rng.integers(3)), int(rng.integers(COLUMNS))] = rng.integers(2, 256)
    elif head.finals and rng.random() < 0.7:
        block.columns[int(rng.integers(head.finals))] = rng.choice([-1, COLUMNS, 2**31 - 1, -(2**31)])
    elif head.step == 0:
        return b""
    else:
        block.reward[int(rng.integers(COLUMNS))] = rng.choice([np.nan, np.inf, -np.inf])
    return bytes(memory)
