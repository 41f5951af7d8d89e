"""The steps of a group in one life, or the actions for it, as frames: what their heads have in common is packed once.

What a frame's head must be follows from what is due, and one comparison tells whether it is that; only of another one
is looked at what is wrong with it.
"""

from __future__ import annotations

import numpy as np

from longhaul.topologies.inference_server import frames
from longhaul.topologies.inference_server.frames import ACT, HEAD, HEAD_BYTES, OBSERVE, Block, Codec, Due, WireError


class Frames:
    """Steps (`OBSERVE`) or actions (`ACT`) of a group. ValueError without xxhash."""

    def __init__(self, codec: Codec, kind: int, group: int, incarnation: int) -> None:
        self._codec, self._of, self._hash = codec, (kind, group, incarnation), frames.hashing()
        self._begin = HEAD.pack(frames.MAGIC, frames.VERSION, *self._of, 0, 0, 0, 0, 0)[: frames.STEP]
        self._known: dict[tuple[int, int], tuple[bytes, int]] = {}  # by finals and bytes of a state
        self._most = codec.layout.columns if kind == OBSERVE else 0
        self._states = kind == OBSERVE and codec.keeps.every > 0

    def _head(self, step: int, finals: int) -> tuple[bytes, int]:
        """(the head up to its checksum, bytes of the frame)."""
        key = finals, self._codec.keeps.after(step) if self._states else 0
        known = self._known.get(key)
        if known is None:
            about = Due(*self._of, step)
            length = self._codec.length(about, finals)
            head = HEAD.pack(frames.MAGIC, frames.VERSION, *about, *self._codec.told(finals), length)
            known = self._known[key] = head[frames.STEP + 8 :], HEAD_BYTES + length
        return self._begin + step.to_bytes(8, "little") + known[0], known[1]

    def whole(self, data: bytes, step: int) -> int:
        """The finals of a frame that is the one of this step, and undamaged. Raises WireError."""
        if len(data) >= HEAD_BYTES:
            (finals,) = frames.WORD.unpack_from(data, frames.FINALS)
            if finals <= self._most:
                begin, size = self._head(step, finals)
                if len(data) == size and data.startswith(begin):
                    check = self._hash(memoryview(data)[HEAD_BYTES:], self._hash(begin))
                    if data.startswith(check.to_bytes(frames.CHECK_BYTES, "little"), HEAD.size):
                        return int(finals)
        head = frames.read(data, self._codec.most)
        self._codec.check_head(head, Due(*self._of, step))
        raise WireError("a frame's checksum is not that of its bytes")

    def observed(self, data: bytes, finals: int, *, first: bool) -> Block:
        """The step in a whole frame; views of its bytes. WireError where it contradicts itself."""
        step = None if finals else self._codec.calm(data, HEAD_BYTES)
        if step is None:
            step = self._codec.block(data, finals, HEAD_BYTES)
            frames.check_flags(step, first=first)
        if not first:
            frames.check_reward(step.reward)
        return step

    def told(self, step: int, finals: int, payload: bytes | memoryview) -> bytes:
        """The frame of a step or of actions; `payload` is as long as the layout has it."""
        begin, _ = self._head(step, finals)
        check = self._hash(payload, self._hash(begin))
        return b"".join((begin, check.to_bytes(frames.CHECK_BYTES, "little"), payload))

    def sealed(self, memory: bytearray, step: int, finals: int) -> bytes:
        """The same of a step that lies in `memory`, behind room for a head."""
        begin, size = self._head(step, finals)
        payload = memoryview(memory)[HEAD_BYTES:size]
        check = self._hash(payload, self._hash(begin))
        return b"".join((begin, check.to_bytes(frames.CHECK_BYTES, "little"), payload))

    def acts(self, step: int, action: np.ndarray) -> bytes:
        """The frame of these actions."""
        return self.told(step, 0, self._codec.padded(action.tobytes()))


def ears(codec: Codec, first: int, slots: int, incarnation: int) -> tuple[list[Frames], list[Frames]]:
    """(steps, actions) of the groups of an actor, from its `first` on."""
    groups = range(first, first + slots)
    steps, actions = ([Frames(codec, kind, group, incarnation) for group in groups] for kind in (OBSERVE, ACT))
    return steps, actions
