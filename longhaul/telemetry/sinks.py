"""Metric sinks of a run: a file of JSON lines, and TensorBoard; `telemetry/screen.py` has a third.

A record is a flat dict: "update", "env_steps", "agent_steps", "wall_seconds", "sps", then "group/name" metrics. Values
are numbers (Python's, NumPy's or JAX's scalars) or strings. A sink is a pair of functions, `write(record)` and
`close()`; `fan` combines several. Non-finite numbers become null in JSON, and are left out of TensorBoard.

Exact resume: `truncate_after(path, update)` before `jsonl(path)`, and `tensorboard(folder, after=agent_steps)`, with
the numbers of the checkpoint. Each record up to a checkpoint must be written before the checkpoint is saved. A line or
an event is with the operating system when `write` returns: a killed process loses none.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from longhaul.runtime import bounded_json

Record = Mapping[str, Any]

MOST_WAITING = 10_000
"""Largest number of records that wait for disk space."""

COUNTS, TIMES = ("update", "env_steps", "agent_steps"), ("wall_seconds", "sps")


class MetricsError(OSError):
    """Metrics cannot be written; the message is one line."""


def _ignore(*given: Any) -> None:
    """Part of a sink that does nothing."""


class Sink(NamedTuple):
    write: Callable[[Record], None] = _ignore
    close: Callable[[], None] = _ignore
    flush: Callable[[], None] = _ignore  # writes records that wait for disk space; OSError while there is none
    note: Callable[[str], None] = _ignore  # prints one line beside the progress


def patient(sink: Sink, warn: Callable[[str], None]) -> Sink:
    """Sink whose records wait in memory while the disk is full; `warn` takes a line when waiting starts.

    At most `MOST_WAITING` records wait. `close` raises MetricsError if there is still no space.
    """
    waiting: deque[Record] = deque()

    def empty() -> None:
        while waiting:
            sink.write(waiting[0])
            waiting.popleft()

    def write(record: Record) -> None:
        began = not waiting
        waiting.append(record)
        try:
            empty()
        except MetricsError as error:
            if not _is_full(error.__cause__) or len(waiting) > MOST_WAITING:
                raise
            if began:
                warn(f"warning: {error}; until there is room, records wait in memory")

    def flush() -> None:
        try:
            empty()
        except MetricsError as error:
            raise error.__cause__ or error from None

    def close() -> None:
        try:
            empty()
        finally:
            sink.close()

    return Sink(write, close, flush)


def fan(*sinks: Sink) -> Sink:
    """Sink that writes to all. `close` closes all, even if one fails, and raises a failure."""

    def write(record: Record) -> None:
        for sink in sinks:
            sink.write(record)

    def close() -> None:
        with ExitStack() as closed:
            for sink in reversed(sinks):
                closed.callback(sink.close)

    return Sink(write, close)


# ------------------------------------------------------------------------------------------------------ JSON lines


def jsonl(path: str | os.PathLike[str], plain: Callable[[Record], dict[str, Any]] | None = None) -> Sink:
    """Sink that appends one line a record, converted by `plain`. A torn last line of a killed process goes first."""
    plain = plain or as_plain
    file = Path(path)
    with _as_metrics_error(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(descriptor, _whole_bytes(descriptor))

    def write(record: Record) -> None:
        _append(descriptor, file, json.dumps(plain(record), allow_nan=False).encode() + b"\n")

    return Sink(write, _closer(descriptor))


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Records of a file without a torn last line. Raises ValueError if another line is no record."""
    return [record for _, record in _lines(Path(path))]


def truncate_after(path: str | os.PathLike[str], update: int) -> dict[str, Any] | None:
    """Removal of the records after `update` and of a torn last line; -> the last record kept, or None.

    The file is replaced atomically, so that a kill here changes nothing. A missing file stays missing.
    """
    file = Path(path)
    if not file.exists():
        return None
    last = None
    partial = file.with_name(file.name + ".partial")
    with _as_metrics_error(file):
        with open(partial, "wb") as kept:
            for line, record in _lines(file):
                number = record.get("update")
                if not isinstance(number, int):
                    raise ValueError(
                        f"a record in {file} has 'update': {number!r}, not a whole number: remove its line"
                    )
                if number <= update:
                    kept.write(line)
                    last = record
            kept.flush()
            os.fsync(kept.fileno())
        os.replace(partial, file)
    return last


def as_plain(record: Record) -> dict[str, Any]:
    """A record as JSON can hold it. Raises ValueError for a value that is neither a number nor a string."""
    plain: dict[str, Any] = {}
    for name, value in record.items():
        if value is None or isinstance(value, (str, bool, int)):
            plain[name] = value
            continue
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"metric {name} is a {type(value).__name__}: give a number or a string") from error
        plain[name] = int(value) if name in COUNTS else number if math.isfinite(number) else None
    return plain


def _lines(file: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(line, record) of each whole line."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = bounded_json.parse(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not _is_sound(record):
                raise ValueError(f"line {number} of {file} is not a record: {line[:60]!r}; remove the line")
            yield line, record


def _is_sound(record: Mapping[str, Any]) -> bool:
    """True where counts are counts, times are numbers, and no number has hundreds of digits."""
    long = any(type(value) is int and value.bit_length() > 64 for value in record.values())
    counted = all(type(record.get(name, 0)) is int for name in COUNTS)
    return not long and counted and all(type(record.get(name)) in (int, float, type(None)) for name in TIMES)


def _whole_bytes(descriptor: int) -> int:
    """Size in bytes up to the end of the last whole line."""
    if not os.fstat(descriptor).st_size:  # nothing can be mapped
        return 0
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1


def _append(descriptor: int, file: Path, data: bytes) -> None:
    """Append all of `data` or nothing."""
    before = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, data)
        if written < len(data):  # a filling disk takes a part first; the next call has the reason
            written += os.write(descriptor, data[written:])
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        os.ftruncate(descriptor, before)
        raise _error(file, error) from error


def _closer(descriptor: int) -> Callable[[], None]:
    """Function that closes once; a second call does nothing."""
    open_ones = [descriptor]

    def close() -> None:
        while open_ones:
            os.close(open_ones.pop())

    return close


@contextmanager
def _as_metrics_error(file: Path) -> Iterator[None]:
    """Context in which an OSError becomes a MetricsError that names `file`."""
    try:
        yield
    except OSError as error:
        raise _error(file, error) from error


def _is_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _error(file: Path, error: OSError) -> MetricsError:
    full = _is_full(error)
    reason = "the disk is full" if full else error.strerror or str(error)
    return MetricsError(f"cannot write metrics to {file}: {reason}; {'make room' if full else 'see to it'} and resume")


# ----------------------------------------------------------------------------------------------------- TensorBoard


EVENTS = re.compile(r"events\.out\.tfevents\.(\d{1,12})\.")
"""Names of TensorBoard's files, with the second in which they began."""


def tensorboard(folder: str | os.PathLike[str], *, after: int | None = None) -> Sink:
    """Sink of a TensorBoard event file in which a step is an agent step.

    On resuming, `after` is the checkpoint's agent steps: TensorBoard then drops later steps of older files.
    tensorboardX encodes the events. Its writer is not used: its thread loses the last events of a killed process, and
    waits for ever on a full disk.
    """
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import masked_crc32c

    def frame(event: Any) -> bytes:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))

    folder = Path(folder)  # TensorBoard reads its files in the order of their names: this one is the last
    taken = [int(match[1]) for path in folder.glob("events.out.*") if (match := EVENTS.match(path.name))]
    seconds = max(int(time.time()), max(taken, default=0) + 1)
    file = folder / f"events.out.tfevents.{seconds}.{socket.gethostname()}"
    with _as_metrics_error(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
    _append(descriptor, file, frame(Event(wall_time=time.time(), file_version="brain.Event:2")))
    if after is not None:
        start = SessionLog(status=SessionLog.START)
        _append(descriptor, file, frame(Event(wall_time=time.time(), step=after + 1, session_log=start)))

    def write(record: Record) -> None:
        numbers = {name: value for name, value in as_plain(record).items() if isinstance(value, (int, float))}
        step = numbers.pop("agent_steps")
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        _append(descriptor, file, frame(Event(wall_time=time.time(), step=step, summary=Summary(value=values))))

    return Sink(write, _closer(descriptor))
