"""Frames come out as they went in, or not at all."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from longhaul.envs.host.vector import HostSpec
from longhaul.spaces import Box, Discrete, Leaf, Masked, MultiDiscrete
from longhaul.topologies.inference_server import wire
from longhaul.topologies.inference_server.wire import Codec, Due, WireError
from tests.helpers.malformed_frames import CODEC, COLUMNS, malformed, observe


def random_spec(rng: np.random.Generator) -> HostSpec:
    """Any observation, any action."""

    def leaf() -> Leaf:
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(4)))
        return Leaf(shape, np.dtype(str(rng.choice(["uint8", "int32", "float32", "bool", "float64", "int16"]))))

    trees = [leaf(), {"b": leaf(), "a": (leaf(), None)}, Masked({"x": leaf()}, Leaf((3,), np.dtype(bool))), [leaf()]]
    actions = [Discrete(3), MultiDiscrete((2, 3)), Box((-1.0,) * 4, (1.0,) * 4)]
    return HostSpec(trees[int(rng.integers(4))], actions[int(rng.integers(3))])


@pytest.mark.parametrize("seed", range(25))
def test_frames_read_back_bit_for_bit(seed: int) -> None:
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
        memory = bytearray(bytes(wire.HEAD_BYTES) + payload)
        assert codec.write_head(memory, due, head.finals) == len(data)
        assert memory == data
        act = Due(wire.ACT, 3, 2, number)
        action = codec.action(rng.bytes(codec.action_bytes))
        answer = codec.act_frame(act, action)
        codec.check_head(wire.read(answer, codec.most), act)
        assert codec.action(answer, wire.HEAD_BYTES).tobytes() == action.tobytes()
        sent, came = codec.block(payload, head.finals), codec.observed(data, head.finals, first=number == 0)
        for a, b in zip((*sent.observation, *sent.final, *sent[1:4]), (*came.observation, *came.final, *came[1:4])):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        assert sent.scores.tobytes() == came.scores.tobytes()
        assert sent.known.tobytes() == came.known.tobytes()
        with pytest.raises(ValueError, match="read-only"):
            came.reward[0] = 1.0


def test_environments_that_read_other_data_have_other_layouts() -> None:
    spec = HostSpec(Leaf((2,), np.dtype(np.float32)), Discrete(2))
    layouts = [wire.layout(dataclasses.replace(spec, data=data), 3) for data in ("", "maps 1a", "maps 2b")]
    assert len({layout.digest for layout in layouts}) == 3
    assert wire.difference(layouts[1].text, layouts[2].text) == "the server has 'maps 1a' where the actor has 'maps 2b'"


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
    """True where a frame passes all checks; anything but WireError escapes."""
    try:
        head = wire.read(data, CODEC.most)
        CODEC.check_head(head, due)
        CODEC.observed(data, head.finals, first=due.step == 0)
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
