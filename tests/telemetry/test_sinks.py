"""Whole lines and no repeats across resumes, JSON that all can read, events that TensorBoard can."""

from __future__ import annotations

import errno
import json
import os
import resource
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import google_crc32c
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.telemetry import sinks
from longhaul.telemetry.sinks import MetricsError, jsonl, read, tensorboard, truncate_after


def record(update: int, **metrics: Any) -> dict[str, Any]:
    counts = {"update": update, "env_steps": 10 * update, "agent_steps": 20 * update, "wall_seconds": 0.5 * update}
    return {**counts, "sps": 40.0, **metrics}


def write(path: Path, *updates: int) -> None:
    with closing(jsonl(path)) as sink:
        for update in updates:
            sink.write(record(update))


def updates(path: Path) -> list[int]:
    return [entry["update"] for entry in read(path)]


def test_lines_hold_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "metrics.jsonl"
    with closing(jsonl(path)) as sink:
        sink.write(record(1, **{"loss/policy": np.float32(0.1), "loss/value": jnp.float32(2), "note/text": "é\n"}))
        sink.write({"update": np.int64(2), "agent_steps": jnp.int32(2**31 - 1), "env_steps": 2**60})
    assert path.read_bytes().count(b"\n") == 2
    assert read(path) == [
        record(1, **{"loss/policy": float(np.float32(0.1)), "loss/value": 2.0, "note/text": "é\n"}),
        {"update": 2, "agent_steps": 2**31 - 1, "env_steps": 2**60},
    ]
    assert all(isinstance(read(path)[1][name], int) for name in ("update", "agent_steps"))


def test_numbers_that_are_not_finite_are_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = {"a/nan": float("nan"), "a/inf": jnp.inf, "a/minus": -np.float32(np.inf), "a/none": None, "a/fine": 1e300}
    with closing(jsonl(path)) as sink:
        sink.write(record(1, **odd))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    (line,) = path.read_text().splitlines()
    found = json.loads(line, parse_constant=refuse)
    assert {name: found[name] for name in odd} == {**dict.fromkeys(odd), "a/fine": 1e300}


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    with closing(jsonl(tmp_path / "metrics.jsonl")) as sink:
        for value in ([1.0], np.ones(3), {}):
            with pytest.raises(ValueError, match=r"metric a/b is a .*: give a number or a string"):
                sink.write(record(1, **{"a/b": value}))
    assert read(tmp_path / "metrics.jsonl") == []


def test_resuming_at_each_update_with_each_torn_tail_repeats_and_misses_none(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    write(whole, *range(2, 13, 2))
    lines = whole.read_bytes()
    starts = [i + 1 for i, byte in enumerate(lines) if byte == ord("\n")]
    for saved in (0, 2, 6, 12):
        saved_end = [0, *starts][saved // 2]
        for end in [*range(saved_end, min(saved_end + 200, len(lines)), 7), len(lines)]:
            path = tmp_path / "metrics.jsonl"
            path.write_bytes(lines[:end])  # killed here: the lines up to the checkpoint are whole, then anything
            last = truncate_after(path, saved)
            assert last == (record(saved) if saved else None)
            assert path.read_bytes() == lines[:saved_end]
            write(path, *range(saved + 2, 13, 2))
            assert path.read_bytes() == lines
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "whole.jsonl"]


@pytest.mark.parametrize("tail", [b"{", b'{"update": 3', b"\0" * 200_000, b"x" * 65536])
def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_writer(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(tail)
    assert updates(path) == [1, 2]
    write(path, 3)
    assert updates(path) == [1, 2, 3]
    assert tail not in path.read_bytes()[-len(tail) :]
    path.write_bytes(tail)
    write(path, 4)
    assert updates(path) == [4]


def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for damage in (b"{]\n", b"3\n"):
        write(path, 1, 2)
        path.write_bytes(path.read_bytes() + damage)
        write(path, 3)
        before = path.read_bytes()
        with pytest.raises(ValueError, match=rf"line 3 of {path} is not a record: .*; remove the line"):
            truncate_after(path, 2)
        assert path.read_bytes() == before
        path.unlink()
    path.write_text('{"updates": 3}\n')
    with pytest.raises(ValueError, match="'update': None, not a whole number"):
        truncate_after(path, 2)
    assert truncate_after(tmp_path / "missing", 2) is None


def test_being_stopped_before_the_rename_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(MetricsError, match="the disk is full; make room and resume"):
        truncate_after(path, 1)
    assert path.read_bytes() == before


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_refused_line_is_a_clear_error_and_leaves_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(jsonl(path)) as sink:
        sink.write(record(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        try:
            with pytest.raises(MetricsError, match=rf"cannot write metrics to {path}: File too large; see to it"):
                sink.write(record(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert updates(path) == [1]
        sink.write(record(2))
    assert updates(path) == [1, 2]


def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"metrics.jsonl": jsonl(tmp_path / "metrics.jsonl"), "events": tensorboard(tmp_path)}
    for name, sink in both.items():
        with monkeypatch.context() as patch, closing(sink):
            patch.setattr(os, "write", full)
            with pytest.raises(MetricsError, match=rf"{tmp_path}/{name}.*: the disk is full; make room and resume$"):
                sink.write(record(1))
        sink.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(MetricsError, match=rf"cannot write metrics to {tmp_path}/file/.*; see to it and resume"):
        jsonl(tmp_path / "file" / "metrics.jsonl")


def test_a_fan_writes_to_all_and_closes_all(tmp_path: Path) -> None:
    closed: list[str] = []

    def fail() -> None:
        closed.append("failing")
        raise OSError("first")

    failing = sinks.Sink(lambda _: None, fail)
    noting = sinks.Sink(lambda _: None, lambda: closed.append("noting"))
    sink = sinks.fan(failing, jsonl(tmp_path / "a"), jsonl(tmp_path / "b"), noting)
    sink.write(record(1))
    with pytest.raises(OSError, match="first"):
        sink.close()
    assert closed == ["failing", "noting"]
    assert read(tmp_path / "a") == read(tmp_path / "b") == [record(1)]


def events(folder: Path) -> list[tuple[str, list[tuple[int, dict[str, float] | str]]]]:
    """All event files in TensorBoard's order, read by the format's definition: (name, [(step, values or else)])."""
    from tensorboardX.proto.event_pb2 import Event

    def masked(data: bytes) -> int:
        crc = google_crc32c.value(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    files = []
    for path in sorted(folder.iterdir()):
        data, place, found = path.read_bytes(), 0, []
        while place < len(data):
            length, length_crc = struct.unpack_from("<QI", data, place)
            body = data[place + 12 : place + 12 + length]
            assert masked(data[place : place + 8]) == length_crc
            assert masked(body) == struct.unpack_from("<I", data, place + 12 + length)[0]
            place += 16 + length
            event = Event.FromString(body)
            assert event.wall_time > 1.6e9
            kind = event.WhichOneof("what")
            values = {value.tag: value.simple_value for value in event.summary.value}
            found.append((event.step, values if kind == "summary" else f"{getattr(event, kind)}".strip()))
        files.append((path.name, found))
    return files


def test_events_read_back_and_resumed_runs_say_what_to_forget(tmp_path: Path) -> None:
    with closing(tensorboard(tmp_path / "events")) as sink:
        sink.write(record(1, **{"loss/policy": jnp.float32(0.5), "note/text": "not a number", "a/nan": np.nan}))
        sink.write(record(2))
        ((_, found),) = events(tmp_path / "events")  # already there: a killed process loses no event
    values = {"update": 1.0, "env_steps": 10.0, "wall_seconds": 0.5, "sps": 40.0, "loss/policy": 0.5}
    assert found[:2] == [(0, "brain.Event:2"), (20, values)]
    for after in (20, 40):  # resumed twice, within one second
        with closing(tensorboard(tmp_path / "events", after=after)) as sink:
            sink.write(record(after // 20 + 1))
    _, (_, second), (_, third) = events(tmp_path / "events")
    # TensorBoard drops what it has of step >= the step of a session's start.
    assert second[:2] == [(0, "brain.Event:2"), (21, "status: START")]
    assert third[:2] == [(0, "brain.Event:2"), (41, "status: START")]
    assert [second[2][0], third[2][0]] == [40, 60]


@pytest.mark.parametrize("stray", ["events.out.tfevents.17x.host", f"events.out.tfevents.{'9' * 200}.host"])
def test_a_stray_file_beside_the_events_stops_no_run(stray: str, tmp_path: Path) -> None:
    (tmp_path / stray).touch()
    with closing(tensorboard(tmp_path)) as sink:
        sink.write(record(1))
    assert len(list(tmp_path.iterdir())) == 2


# ------------------------------------------------------------------------------------------------------- a full disk


def test_records_wait_for_room_in_their_order_and_are_written_once(tmp_path: Path) -> None:
    full, written, said = [False], [], []

    def write(record: sinks.Record) -> None:
        if full[0]:
            raise MetricsError("the disk is full") from OSError(errno.ENOSPC, "")
        written.append(record["update"])

    sink = sinks.patient(sinks.Sink(write, lambda: written.append("closed")), said.append)
    sink.write({"update": 1})
    full[0] = True
    for update in (2, 3):
        sink.write({"update": update})
    with pytest.raises(OSError) as raised:
        sink.flush()
    assert raised.value.errno == errno.ENOSPC
    assert (written, len(said)) == ([1], 1)
    full[0] = False
    sink.write({"update": 4})
    sink.flush()
    assert written == [1, 2, 3, 4]
    full[0] = True
    sink.write({"update": 5})
    assert len(said) == 2, "said again when it is full again"
    with pytest.raises(MetricsError):
        sink.close()
    assert written[-1] == "closed"


def test_other_failures_and_too_many_records_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = [errno.EIO]

    def write(record: sinks.Record) -> None:
        raise MetricsError("no") from OSError(failure[0], "")

    sink = sinks.patient(sinks.Sink(write, lambda: None), lambda line: None)
    with pytest.raises(MetricsError):
        sink.write({"update": 1})
    failure[0] = errno.ENOSPC
    monkeypatch.setattr(sinks, "MOST_WAITING", 3)
    sink = sinks.patient(sinks.Sink(write, lambda: None), lambda line: None)
    for update in range(3):
        sink.write({"update": update})
    with pytest.raises(MetricsError):
        sink.write({"update": 3})
