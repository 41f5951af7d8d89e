"""Waymo Open Motion Dataset, the Scenario form: payload of one record -> `Log`, with the lanes' topology.

Source: the published scenario.proto and map.proto of the waymo-open-dataset (field numbers only). Any number of
tracks; points and states are decoded as columns. Lidar and camera tokens are passed over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets.log import (
    CROSSWALK,
    DRIVEWAY,
    SPEED_BUMP,
    STOP_SIGN,
    Feature,
    Lights,
    Log,
    Malformed,
    Tracks,
)
from longhaul.driving.datasets.protobuf import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    Field,
    Run,
    fields,
    runs,
    signed,
    starts,
    table,
    varint,
)
from longhaul.driving.datasets.validate import check
from longhaul.driving.datasets.womd_example import STEP, UNDEFINED, by_lane, no_lights

MPH = 0.44704
"""Metres per second in a mile per hour."""

POINT = {1: FIXED64, 2: FIXED64, 3: FIXED64}
STATE = dict.fromkeys((2, 3, 4), FIXED64) | dict.fromkeys((5, 6, 7, 8, 9, 10), FIXED32) | {11: VARINT}

LANE, LINE, EDGE = 3, 4, 5
AREAS = {7: STOP_SIGN, 8: CROSSWALK, 9: SPEED_BUMP, 10: DRIVEWAY}
"""Fields of a map feature that hold one shape."""

SHAPE = {LANE: 8, LINE: 2, EDGE: 2, 7: 2, 8: 1, 9: 1, 10: 1}
"""In which of its fields each of them keeps its points."""


class Message(NamedTuple):
    """A payload as bytes and as uint8."""

    data: bytes
    view: np.ndarray


class Outline(NamedTuple):
    """A map feature before its points are decoded."""

    id: int
    kind: int
    begins: list[np.ndarray]  # where its points begin
    lengths: list[np.ndarray]  # and how long each is, bytes
    entry: tuple[int, ...]
    exit: tuple[int, ...]
    speed_limit: float | None
    junction: bool  # a lane between two others (interpolating)


def read(payload: bytes) -> Log:
    """The log of one Scenario; `Malformed` where it is none."""
    message = Message(payload, np.frombuffer(payload, np.uint8))
    stamps: list[np.ndarray] = []
    parts: dict[int, list[Field]] = {2: [], 7: [], 8: [], 11: []}
    identity, ego, current = "", -1, 0
    for field in fields(payload, 0, len(payload)):
        if field.number == 1 and field.wire in (BYTES, FIXED64):
            if (field.stop - field.start) % 8:
                raise Malformed(f"the time stamps at byte {field.start} have {field.stop - field.start} bytes")
            stamps.append(np.frombuffer(payload, "<f8", (field.stop - field.start) // 8, field.start))
        elif field.number in parts and field.wire == BYTES:
            parts[field.number].append(field)
        elif field.number == 5 and field.wire == BYTES:
            identity = payload[field.start : field.stop].decode(errors="replace")
        elif field.number == 6 and field.wire == VARINT:
            ego = signed(field.value)
        elif field.number == 10 and field.wire == VARINT:
            current = signed(field.value)
    if ego < 0:
        raise Malformed("it names no ego (sdc_track_index)")
    tracks = _tracks(message, parts[2])
    steps = tracks.valid.shape[1]
    return check(
        Log(
            id=identity,
            source="womd",
            times=_times(stamps, steps),
            current=current,
            tracks=tracks,
            sdc=ego,
            predict=tuple(_number(message, field, 1) for field in parts[11]),
            features=_features(message, parts[8]),
            lights=_lights(message, parts[7], steps),
        )
    )


def _number(message: Message, within: Field, number: int) -> int:
    """The varint field `number` of a message, 0 where it is absent."""
    value = 0
    for field in fields(message.data, within.start, within.stop):
        if field.number == number and field.wire == VARINT:
            value = signed(field.value)
    return value


def _times(stamps: list[np.ndarray], steps: int) -> np.ndarray:
    times = np.concatenate(stamps).astype(np.float64) if stamps else np.zeros(0)
    if len(times) == steps and np.isfinite(times).all() and (np.diff(times) > 0).all():
        return times - times[0]
    return np.arange(steps) * STEP


def _tracks(message: Message, parts: list[Field]) -> Tracks:
    if not parts:
        raise Malformed("it has no tracks")
    identity, kind, begins, lengths, counts = [], [], [], [], []
    for part in parts:
        heads, states = {1: 0, 2: 0}, 0
        for item in runs(message.data, message.view, part.start, part.stop):
            if isinstance(item, Run):
                if item.number == 3:
                    begins.append(starts(item))
                    lengths.append(np.full(item.repeats, item.length))
                    states += item.repeats
            elif item.number in heads and item.wire == VARINT:
                heads[item.number] = signed(item.value)
        identity.append(heads[1])
        kind.append(min(max(heads[2], 0), 127))
        counts.append(states)
    steps = counts[0]
    if steps == 0 or set(counts) != {steps}:
        raise Malformed(f"its tracks have {min(counts)} to {max(counts)} states, not one number of steps")
    columns = table(message.data, message.view, np.concatenate(begins), np.concatenate(lengths), STATE)
    columns = columns.reshape(len(parts), steps, len(STATE))
    valid = columns[..., 9] == 1
    columns = np.where(valid[..., None], columns, 0.0)
    return Tracks(
        id=np.array(identity, np.int64),
        kind=np.array(kind, np.int8),
        position=columns[..., 0:3],
        heading=_single(columns[..., 6]),
        velocity=_single(columns[..., 7:9]),
        size=_single(columns[..., 3:6]),
        valid=valid,
    )


def _single(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


def _features(message: Message, parts: list[Field]) -> tuple[Feature, ...]:
    outlines = [outline for part in parts if (outline := _outline(message, part)) is not None and outline.begins]
    if not outlines:
        return ()
    begins = np.concatenate([array for outline in outlines for array in outline.begins])
    lengths = np.concatenate([array for outline in outlines for array in outline.lengths])
    points = table(message.data, message.view, begins, lengths, POINT)
    sizes = [sum(map(len, outline.begins)) for outline in outlines]
    return tuple(
        Feature(outline.id, outline.kind, part, outline.entry, outline.exit, outline.speed_limit, outline.junction)
        for outline, part in zip(outlines, np.split(points, np.cumsum(sizes)[:-1]))
    )


def _outline(message: Message, part: Field) -> Outline | None:
    """One map feature; None where it is of none of the kinds that have a shape."""
    identity, chosen = 0, None
    for field in fields(message.data, part.start, part.stop):
        if field.number == 1 and field.wire == VARINT:
            identity = signed(field.value)
        elif field.number in SHAPE and field.wire == BYTES:
            chosen = field
    if chosen is None:
        return None
    begins, lengths, kind, limit, junction = [], [], 0, None, False
    lanes: dict[int, list[int]] = {9: [], 10: []}
    for item in runs(message.data, message.view, chosen.start, chosen.stop):
        if isinstance(item, Run) and item.number == SHAPE[chosen.number]:
            begins.append(starts(item))
            lengths.append(np.full(item.repeats, item.length))
        elif chosen.number == LANE and item.number in lanes:
            lanes[item.number] += _lane_ids(message, item)
        elif isinstance(item, Field) and item.wire == VARINT and item.number == (2 if chosen.number == LANE else 1):
            kind = signed(item.value)
        elif isinstance(item, Field) and chosen.number == LANE and item.number == 1 and item.wire == FIXED64:
            limit = float(np.frombuffer(message.data, "<f8", 1, item.start)[0]) * MPH
        elif isinstance(item, Field) and chosen.number == LANE and item.number == 3 and item.wire == VARINT:
            junction = item.value != 0
    kind = AREAS.get(chosen.number, {LANE: 0, LINE: 5, EDGE: 14}.get(chosen.number, 0) + kind)
    kind = UNDEFINED.get(kind, kind)
    return Outline(identity, kind, begins, lengths, tuple(lanes[9]), tuple(lanes[10]), limit, junction)


def _lane_ids(message: Message, item: Field | Run) -> list[int]:
    """Ids of lanes, packed or not."""
    if isinstance(item, Field):
        return [signed(item.value)] if item.wire == VARINT else []
    ids: list[int] = []
    for begin in starts(item).tolist():
        at, stop = begin, begin + item.length  # a few numbers each: a loop is quicker than arrays
        while at < stop:
            value, at = varint(message.data, at, stop)
            ids.append(signed(value))
    return ids


def _lights(message: Message, parts: list[Field], steps: int) -> Lights:
    """Lights by lane from the states of all steps; steps beyond the tracks' are passed over."""
    lane, step, state, position = [], [], [], []
    for index, part in enumerate(parts[:steps]):
        for sighting in fields(message.data, part.start, part.stop):
            if sighting.number != 1 or sighting.wire != BYTES:
                continue
            numbers, point = {1: 0, 2: 0}, (0, 0)
            for field in fields(message.data, sighting.start, sighting.stop):
                if field.number in numbers and field.wire == VARINT:
                    numbers[field.number] = signed(field.value)
                elif field.number == 3 and field.wire == BYTES:
                    point = (field.start, field.stop - field.start)
            lane.append(numbers[1])
            step.append(index)
            state.append(numbers[2])
            position.append(point)
    if not lane:
        return no_lights(steps)
    where = np.array(position, np.int64)
    points = table(message.data, message.view, where[:, 0], where[:, 1], POINT)
    return by_lane(np.array(lane), np.array(step), np.array(state), points, steps)
