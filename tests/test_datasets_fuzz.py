"""Damaged input of every format: a clear error or a log, whatever is cut, flipped or replaced.

TFRecord's checksums would find every damage, so the payloads are damaged before they are framed.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from longhaul.datasets import sources, tfrecord
from longhaul.datasets.log import BadData, Log
from tests import fixtures_argoverse
from tests import fixtures_logs as made

STEPS, CURRENT = 12, 4
PIECES = (
    b"\xff" * 9 + b"\x01",
    b"\x00" * 8,
    b"\x7f\xf0",
    b"NaN",
    b"1e999",
    b"-1",
    b"[]",
    b"{}",
    b"null",
    b"\x80\x80\x80\x80\x10",
)


def damaged(payload: bytes, random: np.random.Generator) -> bytes:
    """The payload with one to four bits flipped, cut, a part repeated or left out, or a piece put in."""
    data = bytearray(payload)
    for _ in range(random.integers(1, 5)):
        where = int(random.integers(0, max(len(data), 1)))
        choice = random.integers(0, 8)
        if choice < 4 and data:
            data[where] ^= 1 << int(random.integers(0, 8))
        elif choice == 4:
            piece = PIECES[random.integers(0, len(PIECES))]
            data[where : where + int(random.integers(0, 2)) * len(piece)] = piece
        elif choice == 5:
            del data[where : where + int(random.integers(1, 40))]
        elif choice == 6:
            data[where:where] = data[where : where + int(random.integers(1, 200))]
        elif random.integers(0, 4) == 0:
            del data[where:]
    return bytes(data)


def attempt(path: Path) -> bool:
    """Whether the file could be read; anything but logs or one clear line is a failure of the test."""
    try:
        for log in sources.read(path):
            assert isinstance(log, Log)
            assert np.isfinite(log.tracks.position).all()
            assert log.tracks.valid[log.sdc].any()
            assert 0 <= log.current < len(log.times)
    except BadData as error:
        message = str(error)
        assert path.name in message or "log_map_archive" in message
        assert "\n" not in message
        assert len(message) < 1000
        return False
    return True


@pytest.mark.parametrize("kind", ["womd-example", "womd-scenario", "gpudrive", "scenarionet"])
def test_damaged_payloads(kind: str, tmp_path: Path) -> None:
    payload = made.payloads(made.make_log(STEPS, CURRENT))[kind]
    random = np.random.default_rng(7)
    path = tmp_path / "damaged"
    read = 0
    for _ in range(600):
        data = damaged(payload, random)
        if kind.startswith("womd"):
            tfrecord.write(path, [data])
        else:
            path.write_bytes(data)
        read += attempt(path)
    assert 0 < read < 600  # some damage is to values alone, and most is found


@pytest.mark.parametrize("kind", ["womd-example", "womd-scenario", "gpudrive", "scenarionet"])
def test_payloads_cut_anywhere(kind: str, tmp_path: Path) -> None:
    payload = made.payloads(made.make_log(STEPS, CURRENT))[kind]
    path = tmp_path / "damaged"
    for cut in np.linspace(0, len(payload) - 1, 150).astype(int).tolist():
        if kind.startswith("womd"):
            tfrecord.write(path, [payload[:cut]])
        else:
            path.write_bytes(payload[:cut])
        attempt(path)


def test_damaged_parquets_and_maps(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = fixtures_argoverse.write(made.make_log(STEPS, CURRENT), tmp_path)
    where = tmp_path / "log_map_archive_straight.json"
    table, document = path.read_bytes(), where.read_bytes()
    random = np.random.default_rng(3)
    for turn in range(300):
        path.write_bytes(damaged(table, random) if turn % 2 else table)
        where.write_bytes(document if turn % 2 else damaged(document, random))
        attempt(path)


def test_json_with_every_value_replaced(tmp_path: Path) -> None:
    """Each key of GPUDrive's document in turn holds something of another kind, or is missing."""
    path = tmp_path / "damaged.json"
    document = made.gpudrive(made.make_log(STEPS, CURRENT))
    holders = [
        document,
        document["objects"][2],
        document["objects"][0]["position"][5],
        document["roads"][0],
        document["metadata"],
    ]
    holders += [
        document["roads"][0]["geometry"][0],
        document["tl_states"]["102"],
        document["metadata"]["tracks_to_predict"][0],
    ]
    for holder in holders:
        for key, before in list(holder.items()):
            for wrong in (None, -1, 10**30, 1e308, float("nan"), "text", [], {}, [[]], [None], True, [1e308] * STEPS):
                holder[key] = wrong
                path.write_text(json.dumps(document))
                attempt(path)
            del holder[key]
            path.write_text(json.dumps(document))
            attempt(path)
            holder[key] = before
    path.write_text(json.dumps(document))
    assert attempt(path)
