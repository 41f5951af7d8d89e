"""Exchange between environment-only actors and the inference server: frames, and the interface of their transports.

A frame is a head of 48 bytes, little-endian, and a payload. Both sides derive the layout (names, dtypes, shapes) from
their own environment, and the first frame compares the two; no later frame describes its arrays, because lengths follow
from the layout and from two counts in the head. Nothing is pickled, parsed or allocated by a count that a frame claims.
A frame that is not due raises `WireError`, and its stream ends. There is no checksum: TCP and TLS
guarantee the integrity of a stream.

    HELLO    actor -> server   I am actor `group`, with `finals` groups of `columns` columns; `step` is a number by
                               which to know me again; payload: my layout, as text
    WELCOME  server -> actor   your first group is `group`, this is your life `incarnation`; payload: a seed a group;
                               after how many steps states are wanted, and a bit for each group whose own follows,
                               to go on from; then the names of the scores that are wanted, as text
    OBSERVE  actor -> server   the result of step `step` of a group, and the observation for its next action
    ACT      server -> actor   the actions that follow on it
    REFUSE   server -> actor   the stream ends; payload: the reason, as text; `step` 1: trying again later may help
    BYE      actor -> server   I leave for good

A life may outlast its stream, as networks fail. HELLO with `incarnation` is of an actor that comes back to that life;
before its layout it says the number of the step that each group is at. WELCOME then has as payload how many steps of
each group came. The actor sends again the step that did not come, and the server the actions that did not.

Step 0 of a life is its first observation; reward and flags mean nothing there, but that all columns are truncated: the
state to go on from was lost, and new episodes begin. The payload of OBSERVE is one step of a
`HostVector`, with final observations and scores of the `finals` columns whose episode ended. The group's state follows
(`actor.write_state`) if the step ends a trajectory and states are wanted.
Arrays lie at multiples of 8 bytes; the same blocks lie in shared memory, where no frame is copied.

An actor has `slots` groups of environments, and steps one while the other waits for its actions (double buffering).
Group g is slot g % slots of actor g // slots. A life of an actor begins with step 0 of each of its groups. Its end is
reported once, and nothing of that life arrives afterwards.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from longhaul.envs.host.vector import HostSpec
from longhaul.spaces import Leaf, Tree, action_shape, leaves, mapped

MAGIC, VERSION = b"LHCI", 4

HELLO, WELCOME, OBSERVE, ACT, REFUSE, BYE = range(1, 7)
"""Kinds of frames."""

ANY = 2**32 - 1
"""Actor number in a HELLO that asks for any free number."""

MOST_TEXT, MOST_GROUPS = 65_536, 64
"""Bounds on untrusted input: bytes of a text (layout, reason); groups of an actor."""

LOST = 1
"""Row of flags that is set in step 0 of a life whose state was lost: `truncated`."""

HEAD = struct.Struct("<4sHHIIQIIQQ")
HEAD_BYTES = HEAD.size


class WireError(ValueError):
    """Frame that is not due or is malformed; the message is one line."""


class Keeps(NamedTuple):
    """Size and schedule of the states that actors send."""

    size: int = 0  # bytes of a group's state; 0: none is reported
    every: int = 0  # trajectory length: the state follows its last step; 0: never

    def after(self, step: int) -> int:
        """Bytes that follow step number `step` of a life."""
        return self.size if self.every and step and not step % self.every else 0


NOTHING = Keeps()


class Head(NamedTuple):
    """Head of a frame; unsigned numbers."""

    kind: int
    group: int = 0
    incarnation: int = 0
    step: int = 0
    columns: int = 0
    finals: int = 0
    digest: int = 0  # of the layout
    length: int = 0  # bytes of the payload


class Due(NamedTuple):
    """Numbers that the next frame of a group must have."""

    kind: int
    group: int
    incarnation: int
    step: int


class Field(NamedTuple):
    """Array of one column."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Layout(NamedTuple):
    """Arrays of steps and actions, for groups of `columns` columns."""

    columns: int
    observation: tuple[Field, ...]  # the leaves, in order
    action: Field
    scores: tuple[str, ...]  # scores of a finished episode that the server wants
    form: Tree  # tree of Leaf: structure of the observation
    data: str = ""  # as `HostSpec.data`

    @property
    def text(self) -> str:
        """Text that both sides must agree on before they exchange steps."""
        fields = [*self.observation, self.action]
        lines = [f"{name} {dtype} {'x'.join(map(str, shape)) or 'scalar'}" for name, dtype, shape in fields]
        return "\n".join([f"columns {self.columns}", *lines, *([self.data] if self.data else [])])

    @property
    def digest(self) -> int:
        return int.from_bytes(hashlib.sha256("\n".join([self.text, *self.scores]).encode()).digest()[:8], "little")

    def tree(self, arrays: list[np.ndarray]) -> Tree:
        """Observation tree of these leaves."""
        left = iter(arrays)
        return mapped(lambda leaf: next(left), self.form)


class Block(NamedTuple):
    """Step of a group, as views of memory; `observation` has the leaves in order."""

    observation: list[np.ndarray]  # [C, ...]
    reward: np.ndarray  # float32 [C]
    flags: np.ndarray  # bool [3, C]: terminated, truncated, valid
    columns: np.ndarray  # int32 [F], ascending: columns whose episode ended
    final: list[np.ndarray]  # [F, ...], observations after their last steps
    scores: np.ndarray  # float32 [names, F]
    known: np.ndarray  # bool [names, F]: where they are valid


def layout(spec: HostSpec, columns: int, scores: tuple[str, ...] = ()) -> Layout:
    """Layout of groups of `columns` columns of an environment."""
    found: list[Leaf] = leaves(spec.observation)
    shape, dtype = action_shape(spec.action)
    observed = tuple(_field(f"observation/{i}", leaf.dtype, leaf.shape) for i, leaf in enumerate(found))
    return Layout(columns, observed, _field("action", dtype, shape), tuple(sorted(scores)), spec.observation, spec.data)


def _field(name: str, dtype: Any, shape: tuple[int, ...]) -> Field:
    kind = np.dtype(dtype)
    if kind.kind not in "biuf" or kind.byteorder == ">":
        raise ValueError(f"{name} is {kind}; only booleans, whole numbers and floats of this machine travel")
    return Field(name, kind.name, tuple(shape))


# -------------------------------------------------------------------------------------------------------------- blocks


class _Part(NamedTuple):
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]


class Codec:
    """Layout with the positions of its arrays in a block, and with the schedule of states."""

    def __init__(self, layout: Layout, keeps: Keeps = NOTHING) -> None:
        self.layout, self.digest, self._columns, self.keeps = layout, layout.digest, layout.columns, keeps
        self.action_bytes = _padded(layout.columns * layout.action.nbytes)
        self._action = np.dtype(layout.action.dtype), (layout.columns, *layout.action.shape)
        self._known: dict[int, tuple[list[_Part], int]] = {}  # by finals: at most columns + 1
        self._unended: tuple[Any, ...] = ()  # fields of a block about finished episodes, if none finished
        self._unended = self.block(bytearray(self.block_bytes(0)), 0)[3:]
        self._first = self._parts(0)[0][: len(layout.observation) + 2]
        self._calm = np.frombuffer(_quiet(layout.columns), bool).reshape(3, -1)
        most = max(self.block_bytes(layout.columns) + keeps.size, self.action_bytes)
        self.most = HEAD_BYTES + max(most, MOST_TEXT + MOST_GROUPS * keeps.size)

    def _parts(self, finals: int) -> tuple[list[_Part], int]:
        """Observation, reward, flags, columns, final, scores, known; and the total bytes."""
        if finals in self._known:
            return self._known[finals]
        layout, names = self.layout, len(self.layout.scores)
        c, f = layout.columns, finals
        forms: list[tuple[str, tuple[int, ...]]] = [(x.dtype, (c, *x.shape)) for x in layout.observation]
        forms += [("float32", (c,)), ("bool", (3, c)), ("int32", (f,))]
        forms += [(x.dtype, (f, *x.shape)) for x in layout.observation]
        forms += [("float32", (names, f)), ("bool", (names, f))]
        parts, offset = [], 0
        for name, shape in forms:
            dtype = np.dtype(name)
            parts.append(_Part(offset, dtype, shape))
            offset += _padded(math.prod(shape) * dtype.itemsize)
        return self._known.setdefault(finals, (parts, offset))

    def block_bytes(self, finals: int) -> int:
        """Bytes of a step in which `finals` episodes ended."""
        return self._parts(finals)[1]

    def block(self, memory: Any, finals: int, offset: int = 0) -> Block:
        """Views of a step in `memory`, from `offset` on; read-only if the memory is."""
        parts, n = self._parts(finals)[0], len(self.layout.observation)
        if not finals and self._unended:
            *seen, reward, flags = [np.ndarray(shape, dtype, memory, offset + at) for at, dtype, shape in self._first]
            return Block(seen, reward, flags, *self._unended)
        views = [np.ndarray(shape, dtype, memory, offset + at) for at, dtype, shape in parts]
        return Block(views[:n], views[n], views[n + 1], views[n + 2], views[n + 3 : 2 * n + 3], views[-2], views[-1])

    def _calm_block(self, data: bytes, offset: int) -> Block | None:
        """Views of a step in which no episode ended and all columns are valid; None for any other step."""
        *seen, reward, flags = self._first
        begin = offset + flags.offset
        if data[begin : begin + self._calm.size] != _quiet(self._columns):
            return None
        leaves = []
        for at, dtype, shape in seen:  # a comprehension would cost another call per frame
            leaves.append(np.ndarray(shape, dtype, data, offset + at))
        earned = np.ndarray(reward.shape, reward.dtype, data, offset + reward.offset)
        return Block(leaves, earned, self._calm, *self._unended)

    def action(self, memory: Any, offset: int = 0) -> np.ndarray:
        """View of actions [C, ...] in `memory`."""
        dtype, shape = self._action
        return np.ndarray(shape, dtype, memory, offset)

    def check_head(self, head: Head, due: Due) -> None:
        """Check of a frame: it is due, and its counts give its length; else WireError."""
        if head[:4] != due:
            raise WireError(f"a frame is {tuple(head[:4])} (kind, group, life, step), and {tuple(due)} is due")
        if head.digest != self.digest or head.columns != self._columns:
            raise WireError("a frame is of another layout than its stream")
        most = head.columns if due.kind == OBSERVE else 0
        if head.finals > most:
            raise WireError(f"{head.finals} final observations; there can be {most}")
        wanted = self.length(due, head.finals)
        if head.length != wanted:
            raise WireError(f"a payload of {head.length} bytes, where the layout gives {wanted}")

    def length(self, due: Due, finals: int) -> int:
        """Payload bytes of a due frame."""
        if due.kind != OBSERVE:
            return self.action_bytes
        return self.block_bytes(finals) + self.keeps.after(due.step)

    def write_head(self, memory: bytearray, due: Due, finals: int) -> int:
        """Bytes of a frame, whose head is written before its payload in `memory`."""
        length = self.length(due, finals)
        HEAD.pack_into(memory, 0, MAGIC, VERSION, *due, self._columns, finals, self.digest, length)
        return HEAD_BYTES + length

    def act_frame(self, due: Due, action: np.ndarray) -> bytes:
        """Frame of actions [C, ...]."""
        memory = bytearray(HEAD_BYTES + self.action_bytes)
        self.write_head(memory, due, 0)
        self.action(memory, HEAD_BYTES)[...] = action
        return bytes(memory)

    def observed(self, data: bytes, finals: int, *, first: bool) -> Block:
        """Step in a frame whose head was checked; views of its bytes. WireError if it is inconsistent."""
        step = None if finals else self._calm_block(data, HEAD_BYTES)
        if step is None:
            step = self.block(data, finals, HEAD_BYTES)
            _check_flags(step, first=first)
        if not first:
            _check_reward(step.reward)
        return step

    def state(self, memory: Any, finals: int, offset: int = 0) -> np.ndarray:
        """View of the state [size] after a step in `memory`."""
        return np.frombuffer(memory, np.uint8, self.keeps.size, offset + self.block_bytes(finals))


def _padded(size: int) -> int:
    return -(-size // 8) * 8


@functools.cache
def _others(count: int) -> int:
    """Mask of `count` bytes without the lowest bit of each."""
    return int.from_bytes(b"\xfe" * count, "little")


@functools.cache
def _quiet(columns: int) -> bytes:
    """Flags of a step without ends, all columns valid."""
    return bytes(2 * columns) + b"\1" * columns


def check_block(step: Block, *, first: bool) -> None:
    """Check of a step; WireError if it is inconsistent. `first`: it begins a life, so no episode may end."""
    _check_flags(step, first=first)
    if not first:
        _check_reward(step.reward)


def _check_flags(step: Block, *, first: bool) -> None:
    """Check the flags and the columns whose episode ended."""
    # Bytes, because NumPy does not notice a bool that is neither 0 nor 1. Each row is one long integer: for so few
    # flags Python's arithmetic is several times as fast as NumPy calls.
    rows, columns = step.flags.tobytes(), step.flags.shape[1]
    if rows == _quiet(columns) and not len(step.columns):
        return
    number = int.from_bytes
    terminated, truncated = number(rows[:columns], "little"), number(rows[columns : 2 * columns], "little")
    valid = number(rows[2 * columns :], "little")
    flags = terminated | truncated | valid
    if flags & _others(columns) or (step.known.size and step.known.view(np.uint8).max() > 1):
        raise WireError("a flag is neither 0 nor 1")
    if first and len(step.columns):
        raise WireError("a life that begins with the end of an episode")
    ended = 0 if first else (terminated | truncated) & valid
    if ended or len(step.columns):
        where = np.frombuffer(ended.to_bytes(columns, "little"), bool).nonzero()[0]
        if where.astype(np.int32).tobytes() != step.columns.tobytes():
            raise WireError(f"{len(where)} episodes ended, and {len(step.columns)} final observations are of others")


def _check_reward(reward: np.ndarray) -> None:
    """Check the rewards [C]."""
    # One number tests all rewards; it may overflow with finite rewards, so they are checked again.
    if not math.isfinite(reward.dot(reward)) and not np.isfinite(reward).all():
        raise WireError("a reward is not finite")


# -------------------------------------------------------------------------------------------------------------- frames


def frame(head: Head, payload: bytes = b"") -> bytes:
    """Bytes of a frame; its head gets the length of the payload."""
    return HEAD.pack(MAGIC, VERSION, *head[:-1], len(payload)) + payload


def read(data: bytes, most: int) -> Head:
    """Head of a complete frame, with magic, version, kind and length checked; else WireError. A frame longer than
    `most` is not read."""
    if not HEAD_BYTES <= len(data) <= most:
        raise WireError(f"a frame of {len(data)} bytes; it must have {HEAD_BYTES} to {most}")
    magic, version, *numbers = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"a frame that begins with {magic!r}; it must begin with {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"a frame of version {version}; this is version {VERSION}: use the same longhaul on both sides")
    head = Head._make(numbers)
    if head.length != len(data) - HEAD_BYTES:
        raise WireError(f"a frame says {head.length} bytes of payload, and has {len(data) - HEAD_BYTES}")
    if not HELLO <= head.kind <= REFUSE:
        raise WireError(f"a frame of kind {head.kind}; there are {HELLO} to {REFUSE}")
    return head


def text(data: bytes, offset: int = 0) -> str:
    """Text payload of a frame, from `offset` on. Raises WireError."""
    size = len(data) - HEAD_BYTES - offset
    if size > MOST_TEXT:
        raise WireError(f"a text of {size} bytes; at most {MOST_TEXT} are read")
    try:
        return data[HEAD_BYTES + offset :].decode()
    except UnicodeDecodeError as error:
        raise WireError("a text that is not UTF-8") from error


def difference(mine: str, theirs: str) -> str:
    """First difference of two layouts, for a refusal."""
    rows, others = mine.split("\n"), theirs.split("\n")
    for i in range(max(len(rows), len(others))):
        ours, yours = (side[i] if i < len(side) else "nothing" for side in (rows, others))
        if ours != yours:
            return f"the server has {ours[:100]!r} where the actor has {yours[:100]!r}"
    return "nothing"


# ----------------------------------------------------------------------------------------------------------- transports


class Arrival(NamedTuple):
    """Checked step of a group; its views are valid until the group is answered or its actor lost."""

    group: int
    life: int
    first: bool  # first step of a life: reward and flags mean nothing, but `LOST`
    step: Block
    state: np.ndarray | None = None  # uint8, a copy; at the end of a trajectory, if states are wanted


class Answer(NamedTuple):
    """Answer to the arrival of the same group and life."""

    group: int
    life: int
    action: np.ndarray  # [C, ...]


Held = Mapping[int, np.ndarray]
"""Group -> state from which its next life continues; other groups begin new episodes."""

NONE_HELD: Held = {}


class Lost(NamedTuple):
    """End of an actor's life."""

    actor: int
    why: str


class Transport(Protocol):
    """Server side, for one thread. Only `wait` waits."""

    def wait(self, seconds: float) -> None:
        """Wait for an event, at most `seconds`; it may return early."""

    def take(self) -> list[Arrival | Lost]:
        """Events since the last call, in order."""

    def answer(self, answers: Sequence[Answer]) -> None:
        """Answer to waiting groups; actions are copied. Answers to a lost life are dropped."""

    def cut(self, actor: int, why: str) -> None:
        """End an actor's life; `take` reports it later."""

    def live(self) -> frozenset[int]:
        """Actors with an open stream."""

    def close(self) -> None: ...


class ActorBlocks(Protocol):
    """Actor side of both transports: write a step to `blocks[slot]`, its finished episodes to the block of `ended`,
    then call `post`."""

    codec: Codec  # with the wanted scores once open; so are the blocks
    blocks: list[Block]

    def held(self, slot: int) -> np.ndarray | None:
        """State from which a group continues; None: new episodes."""

    def ended(self, slot: int, finals: int) -> Block: ...

    def keeps(self, slot: int, finals: int) -> np.ndarray | None:
        """Memory for the group's state, if the server wants it with the next posted step; else None."""

    def post(self, slot: int, finals: int) -> None:
        """Transfer of the step, without waiting."""


class ActorTransport(ActorBlocks, Protocol):
    """Actor side with coroutines. `ShmActorTransport` has the same methods, and blocks instead."""

    async def open(self) -> list[int]:
        """Begin a life; -> one seed per group. WireError if it is refused, OSError if there is no server."""

    async def next(self) -> tuple[int, np.ndarray]:
        """Next (slot, actions [C, ...]), valid until that slot is posted again."""

    async def close(self) -> None: ...
