"""Counts of a log whose contents are known, and of the real files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from longhaul.driving import inspect_logs
from longhaul.driving.datasets import readers
from longhaul.driving.render import log_picture
from longhaul.driving.render.frames import COLOURS
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.shards import shard
from tests.helpers import argoverse_files
from tests.helpers import log_files as made

STRAIGHT = {
    "id": "straight",
    "steps": 91,
    "tracks": 6,
    "vehicles": 3,
    "pedestrians": 1,
    "cyclists": 1,
    "others": 1,
    "valid_steps": 6 * 91 - 10 - 5,
    "sdc_index": 2,
    "road_points": 51 + 51 + 101 + 101 + 101 + 101 + 1 + 4 + 4 + 4,
    "lanes": 3,
    "road_lines": 1,
    "road_edges": 2,
    "crosswalks": 1,
    "stop_signs": 1,
    "speed_bumps": 1,
    "lights_max": 2,
    "tracks_to_predict": 2,
}


def test_counts_are_the_same_in_every_format(tmp_path: Path) -> None:
    log = made.make_log()
    for kind, path in made.write_all(log, tmp_path).items():
        report = inspect_logs.inspect([str(path)])
        assert json.loads(json.dumps(report)) == report
        bare = kind in ("womd-scenario", "scenarionet")  # these have speed limits, too
        expected = STRAIGHT | {"road_points": STRAIGHT["road_points"] - bare}
        assert_ranges(report["files"][0]["scenarios"][0].pop("ranges"), [20.1168, 20.1168] if bare else None)
        assert report == {
            "files": [{"path": str(path), "format": kind, "scenarios": [expected], "error": None}],
            "scenarios": 1,
            "errors": 0,
        }


def assert_ranges(ranges: dict[str, Any], limits: list[float] | None) -> None:
    """Those of the log that all formats hold: everybody's way over nine seconds, where it is known."""
    assert tuple(ranges) == inspect_logs.RANGES
    expected = {
        "duration": 9.0,
        "dt": [0.1, 0.1],
        "x": [0.0, 196.0],  # the last vehicle is first known half a second after it stood at 200
        "y": [-5.0, 8.5],
        "z": [1.0, 1.0],
        "speed": [0.0, 10.0],
        "valid_share": (6 * 91 - 15) / (6 * 91),
        "speed_limit": limits,
        "track_ids": [3, 1 << 30],
        "feature_ids": [101, 110],
    }
    sizes = ranges.pop("sizes")
    for name, value in expected.items():
        assert ranges[name] == (None if value is None else pytest.approx(value, abs=1e-5)), name
    assert sizes == {
        "vehicle": {"length": [4.5, 12.0], "width": [2.0, 2.5], "height": [1.5, 3.0]},
        "pedestrian": {"length": [0.5, 0.5], "width": [0.5, 0.5], "height": [1.75, 1.75]},
        "cyclist": {"length": [1.75, 1.75], "width": [0.5, 0.5], "height": [1.75, 1.75]},
        "other": {"length": [0.5, 0.5], "width": [0.5, 0.5], "height": [1.0, 1.0]},
    }


def test_ranges_of_a_shard_are_those_of_its_scenarios(tmp_path: Path) -> None:
    path = tmp_path / "a.lhs"
    shard.write(path, [scenario_from_log(made.make_log())])
    ranges = inspect_logs.inspect([str(path)])["files"][0]["scenarios"][0]["ranges"]
    assert (ranges["z"], ranges["speed_limit"], ranges["track_ids"]) == (None, None, None)
    assert ranges["duration"] == pytest.approx(8.0, abs=1e-5)
    assert ranges["x"] == pytest.approx([-10.0 + 10.0, 192.0 - 10.0], abs=0.02)  # from the ego at the current step
    assert ranges["sizes"]["vehicle"]["length"] == pytest.approx([4.5, 12.0])
    assert 0.9 < ranges["valid_share"] <= 1.0


def test_pictures_show_every_body_and_the_whole_way(tmp_path: Path) -> None:
    """A log, and the shard made of it: in the picture there are pixels of each kind, at the ego's place its own."""
    log = made.make_log()
    for shown in (log, scenario_from_log(log)):
        drawn = log_picture.sketch(shown)
        log_picture.save(shown, tmp_path / "a.png")
        with Image.open(tmp_path / "a.png") as image:
            picture = np.asarray(image)
        scale = log_picture.scale_of(drawn)
        assert picture.shape[1] == pytest.approx((drawn.high - drawn.low)[0] * scale, abs=2)
        x, y = (np.array([-drawn.low[0], drawn.high[1]]) * scale).astype(int)
        assert tuple(picture[y, x]) == COLOURS["ego"]
        for role in ("vehicle", "pedestrian", "cyclist", "road", "edge"):
            assert (picture == COLOURS[role]).all(-1).any(), role
        log_picture.save(shown, tmp_path / "a.svg")
        root = ET.fromstring((tmp_path / "a.svg").read_text())
        assert len(root) == 2 + len(list(log_picture.visible(drawn.strokes, drawn.low, drawn.high)))
        log_picture.save(shown, tmp_path / "a.html")
        assert "straight" in (tmp_path / "a.html").read_text()
    with pytest.raises(ValueError, match=r"none of .png, .svg, .html"):
        log_picture.save(log, tmp_path / "a.gif")


def test_a_log_without_a_map_is_drawn(tmp_path: Path) -> None:
    log = made.make_log(11, 5)
    bare = replace(log, features=(), tracks=replace(log.tracks, valid=log.tracks.valid & (np.arange(6) == 2)[:, None]))
    log_picture.save(bare, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] > 100


def test_counts_that_a_format_lacks_are_null(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (file,) = inspect_logs.inspect([str(argoverse_files.write(made.make_log(), tmp_path))])["files"]
    assert file["scenarios"][0].pop("ranges")["z"] is None
    lines, edges = 2 * 51 + 101, 4 + 4  # of each area the three sides that are not shared
    assert file["scenarios"] == [
        STRAIGHT
        | {"lights_max": None, "stop_signs": None, "speed_bumps": None}
        | {"road_lines": 3, "road_edges": 2, "road_points": 203 + lines + edges + 4}
    ]


def test_without_light_states_the_lights_are_null(tmp_path: Path) -> None:
    document = made.gpudrive(made.make_log())
    for lights, expected in (({}, 0), (None, None)):
        document["tl_states"] = lights
        path = tmp_path / "a.json"
        path.write_text(json.dumps(document))
        assert inspect_logs.inspect([str(path)])["files"][0]["scenarios"][0]["lights_max"] == expected


def test_errors_are_reported_by_file_and_never_raised(tmp_path: Path) -> None:
    log = made.make_log(11, 5)
    good, cut, foreign = (tmp_path / name for name in ("good.json", "cut.tfrecord", "foreign.dat"))
    good.write_text(json.dumps(made.gpudrive(log)))
    made.write_records(cut, [made.scenario(log)] * 2)
    cut.write_bytes(cut.read_bytes()[:-1])
    foreign.write_bytes(b"something else")
    report = inspect_logs.inspect([str(good), str(cut), str(foreign), str(tmp_path / "none"), str(good)])
    found = [(file["format"], len(file["scenarios"]), file["error"] is None) for file in report["files"]]
    assert found == [("gpudrive", 1, True), ("womd-scenario", 1, False), (None, 0, False), (None, 0, False)]
    assert (report["scenarios"], report["errors"]) == (2, 3)
    for file in report["files"][1:]:
        assert file["error"].startswith(file["path"])


REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "womd/motion_data_one_example.tfrecord": (
        "womd-example",
        {
            "id": "a3bb37c25ce56418",
            "steps": 91,
            "tracks": 128,
            "vehicles": 119,
            "pedestrians": 8,
            "cyclists": 1,
            "others": 0,
        }
        | {"valid_steps": 6228, "sdc_index": 8, "road_points": 20000, "lights_max": 16, "tracks_to_predict": 8}
        | {"lanes": 131, "road_lines": 78, "road_edges": 45, "crosswalks": 0, "stop_signs": 0, "speed_bumps": 0},
    ),
    "womd/motion_data_one_scenario.tfrecord": (
        "womd-scenario",
        {
            "id": "637f20cafde22ff8",
            "steps": 91,
            "tracks": 83,
            "vehicles": 70,
            "pedestrians": 10,
            "cyclists": 3,
            "others": 0,
        }
        | {"valid_steps": 4596, "sdc_index": 82, "road_points": 19628, "lights_max": 12, "tracks_to_predict": 3}
        | {"lanes": 199, "road_lines": 59, "road_edges": 28, "crosswalks": 4, "stop_signs": 8, "speed_bumps": 3},
    ),
    "gpudrive/tfrecord-00000-of-01000_325.json": (
        "gpudrive",
        {"tracks": 62, "valid_steps": 3751, "road_points": 10527, "steps": 91, "sdc_index": 61, "lights_max": 0}
        | {"lanes": 61, "road_lines": 16, "road_edges": 17, "crosswalks": 4, "stop_signs": 6, "speed_bumps": 0},
    ),
    "gpudrive/tfrecord-00000-of-01000_4.json": (
        "gpudrive",
        {"tracks": 81, "valid_steps": 4802, "road_points": 5388, "steps": 91, "sdc_index": 80, "cyclists": 1},
    ),
    "scenarionet/sd_nuscenes_v1.0-mini_scene-0061.pkl": (
        "scenarionet",
        {"tracks": 226, "steps": 191, "valid_steps": 22611, "road_points": 17030, "lights_max": 0, "others": 136},
    ),
    "scenarionet/sd_waymo_v1.2_eb4b91b10ca94ff2.pkl": (
        "scenarionet",
        {"tracks": 45, "vehicles": 45, "steps": 199, "valid_steps": 4618, "road_points": 27597, "lights_max": 14},
    ),
    "argoverse2/scenario_0a1e6f0a-1817-4a98-b02e-db8c9327d151.parquet": (
        "argoverse2",
        {"tracks": 58, "vehicles": 32, "pedestrians": 12, "others": 14, "steps": 110, "valid_steps": 2434}
        | {"lanes": 71, "crosswalks": 6, "road_edges": 2, "lights_max": None, "stop_signs": None},
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_counts_of_real_logs_are_those_that_were_counted(logs: Path, name: str) -> None:
    if name.startswith("argoverse2"):
        pytest.importorskip("pyarrow")
    if not (logs / name).exists():
        pytest.skip(f"no {name} among the real logs")
    (file,) = inspect_logs.inspect([str(logs / name)])["files"]
    kind, expected = REAL[name]
    assert (file["format"], file["error"]) == (kind, None)
    (found,) = file["scenarios"]
    assert {key: found[key] for key in expected} == expected


def test_the_counts_of_every_real_log_are_known(logs: Path) -> None:
    found = {str(path.relative_to(logs)) for path in readers.expand([str(logs)])}
    assert found <= set(REAL)


def test_ranges_of_real_logs_are_plausible(logs: Path) -> None:
    """Values that a mistake in units or columns would throw out: cars of cars' size at cars' speed, 10 or 20 Hz."""
    name = "womd/motion_data_one_scenario.tfrecord"
    if not (logs / name).exists():
        pytest.skip(f"no {name} among the real logs")
    (file,) = inspect_logs.inspect([str(logs / name)])["files"]
    ranges = file["scenarios"][0]["ranges"]
    assert ranges["duration"] == pytest.approx(9.0, abs=0.01)
    assert ranges["speed_limit"][1] == pytest.approx(45 * 0.44704, abs=1e-3)  # miles an hour
    assert ranges["valid_share"] == pytest.approx(4596 / (83 * 91), abs=1e-6)
    assert 3.0 < ranges["sizes"]["vehicle"]["length"][0] < ranges["sizes"]["vehicle"]["length"][1] < 25.0
    assert 10.0 < ranges["speed"][1] < 40.0
