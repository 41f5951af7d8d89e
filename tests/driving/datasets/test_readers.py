"""Files, folders and patterns that users name; and each format gives back the log that the fixture wrote."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path as FilePath

import numpy as np
import pytest

from longhaul.driving.datasets import (
    argoverse,
    gpudrive,
    lane_boundaries,
    readers,
    scenarionet,
    womd,
)
from longhaul.driving.datasets.log import EDGE_BOUNDARY, LANE_STREET, VEHICLE, BadData, Feature, Lights, Malformed, Path
from tests.helpers import argoverse_files
from tests.helpers import log_files as made
from tests.helpers.log_files import encode
from tests.helpers.resource_attacks import ATTACKS

ROOT = FilePath(__file__).resolve().parents[3]


def some(folder: FilePath) -> dict[str, FilePath]:
    return made.write_all(made.make_log(11, 5), folder)


def test_folders_are_searched_through_and_foreign_files_passed_over(tmp_path: FilePath) -> None:
    paths = some(tmp_path)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    shutil.copy(paths["gpudrive"], deep / "z.json")
    for name in ("README.md", ".hidden.json", "dataset_summary.pkl", "dataset_mapping.pkl", "log_map_archive_1.json"):
        (deep / name).write_text("nothing")
    found = readers.expand([str(tmp_path)])
    assert found == [*sorted(paths.values()), deep / "z.json"]
    assert readers.expand([str(tmp_path), str(tmp_path)]) == found


def test_patterns_and_order_and_duplicates(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = some(tmp_path)
    monkeypatch.chdir(tmp_path)
    scenario = paths["womd-scenario"].name
    (tmp_path / "notes.txt").write_text("nothing")
    assert readers.expand(["*.pkl", scenario, "*"]) == [
        FilePath("scenarionet.pkl"),
        FilePath(scenario),
        FilePath("gpudrive.json"),
        FilePath("womd-example.tfrecord"),
    ]
    assert readers.expand(["gpudrive.json", str(paths["gpudrive"]), "./gpudrive.json"]) == [FilePath("gpudrive.json")]
    assert readers.expand(["**/*.json"]) == [FilePath("gpudrive.json")]
    assert readers.expand(["notes.txt"]) == [FilePath("notes.txt")]  # named by itself: reading it says what is wrong


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: FilePath) -> None:
    odd = tmp_path / "odd[1].json"
    shutil.copy(some(tmp_path)["gpudrive"], odd)
    assert readers.expand([str(odd)]) == [odd]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "no such file or folder: check"),
        ("*.nothing", "no driving logs match: check"),
        ("empty", "no driving logs in this"),
    ],
)
def test_paths_that_mean_nothing_are_one_line(tmp_path: FilePath, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadData, match=message) as caught:
        readers.expand([str(tmp_path / name)])
    assert str(caught.value).startswith(str(tmp_path / name))
    assert str(caught.value).count(name) == 1
    assert "\n" not in str(caught.value)


def test_the_home_of_nobody_is_bad_data() -> None:
    with pytest.raises(BadData, match=r"^~nobody-of-this-name/logs: cannot be read: "):
        readers.expand(["~nobody-of-this-name/logs"])


def test_files_are_read_in_order(tmp_path: FilePath) -> None:
    log = made.make_log(11, 5)
    many = [made.scenario(replace(log, id=f"s{number}")) for number in range(5)]
    made.write_records(tmp_path / "b.tfrecord", many)
    shutil.copy(some(tmp_path)["gpudrive"], tmp_path / "a.json")
    given = [str(tmp_path / "b.tfrecord"), str(tmp_path / "a.json")]
    found = [log.id for path in readers.expand(given) for log in readers.read(path)]
    assert found == ["s0", "s1", "s2", "s3", "s4", "straight"]


def test_the_format_is_told_by_content(tmp_path: FilePath) -> None:
    for kind, path in some(tmp_path).items():
        disguised = tmp_path / f"{kind}.dat"
        shutil.copy(path, disguised)
        ((found, log),) = readers.scan(disguised)
        assert (found, log.id) == (kind, "straight")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"\x7fELF and so on", "is none of: a TFRecord .* GPUDrive JSON"),
        ("a.json", b"", "is empty"),
        ("a.json", b"{", "it is no JSON from character 1"),
        ("a.json", b'{"a": 1}', "has no list `objects`"),
        ("a.json", b"[1, 2]", "has no list `objects`"),
        ("a.json", b'{"objects": []}', "it has no objects"),
        ("a.json", b'{"objects": [3]}', "not GPUDrive's structure: TypeError"),
        ("a.json", b"[" * 200_000, "no usable JSON"),
        ("a.json", b'{"objects": [], "n": ' + b"9" * 5000 + b"}", "no usable JSON"),
        ("a.json", b'{"\xff": 1}', "no usable JSON"),
        ("a.tfrecord", b"not a record at all", "record 0 at byte 0: the length's checksum is wrong"),
        ("a.parquet", b"PAR1 and nothing PAR1", "parquet"),
        ("a.pkl", b"\x80\x04N.", "has no `tracks`"),
        ("a.pkl", b"\x80\x04", "no usable pickle"),
    ],
)
def test_files_that_are_no_logs(tmp_path: FilePath, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(BadData, match=message) as caught:
        list(readers.read(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        pytest.param("generated-columns", "table log computes its column location", marks=pytest.mark.slow),
        ("added-defaults", "table log has more rows or text than the file has bytes"),
        ("doubled-pickle", "it has more than 100 lists and dicts within one another"),
        ("empty-sets", "its values take .* MB; 384 MB are possible"),
        ("many-rows", "it has 4000000 rows; 262144 are possible"),
        ("dictionary-text", "its rows have 1,.* bytes of text; 67,108,864 are possible"),
        ("empty-objects", "it takes .* MB of memory; 384 MB are possible"),
        ("nested-lists", "it takes .* MB of memory; 384 MB are possible"),
    ],
)
def test_small_files_that_would_take_all_memory(tmp_path: FilePath, attack: str, message: str) -> None:
    """Seconds and megabytes of each: `python -m tests.helpers.resource_attacks`."""
    pytest.importorskip("pyarrow")
    path = ATTACKS[attack].make(tmp_path)
    with pytest.raises(BadData, match=message) as caught:
        list(readers.read(path))
    assert str(caught.value).startswith(str(path))


LIMITED = """
import sys
from pathlib import Path
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData

readers.MEMORY, readers.SECONDS = 1 << 28, 0.3

def endless():
    while True:
        try:
            pow(3, 100_000)
        except Exception:
            pass

for work in (lambda: bytes(1 << 30), endless):
    try:
        with readers.limited(Path("a.json")):
            work()
    except BadData as error:
        print(error)
print(len(bytes(1 << 30)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")
def test_a_reader_without_bounds_ends_at_those_of_its_process() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == [
        "a.json: takes more than 256 MB of memory: leave it out, or split it",
        "a.json: takes more than 0 s of CPU time: leave it out, or split it",
        str(1 << 30),
    ]


def test_records_that_are_no_scenarios(tmp_path: FilePath) -> None:
    path = tmp_path / "a.tfrecord"
    good = made.scenario(made.make_log(11, 5))
    image = made.serialise({"image/encoded": [b"png"], "label": np.array([3])})
    for payload, message in [
        (image, "no usable womd-example record: it has no state/is_sdc"),
        (b"some text", "neither a WOMD tf.Example nor a WOMD Scenario"),
        (b"", "neither a WOMD tf.Example nor a WOMD Scenario"),
        (encode(5, b"id"), "no usable womd-scenario record: it names no ego"),
        (encode(5, b"id") + encode(6, 0), "it has no tracks"),
    ]:
        made.write_records(path, [good, payload])
        read = readers.read(path)
        assert next(read).id == "straight"
        with pytest.raises(BadData, match=message) as caught:
            next(read)
        assert str(caught.value).startswith(f"{path}: record 1 at byte {16 + len(good)}: ")


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root may read everything")
def test_files_that_may_not_be_read(tmp_path: FilePath) -> None:
    path = some(tmp_path)["gpudrive"]
    path.chmod(0)
    with pytest.raises(BadData, match="cannot be read: Permission denied"):
        list(readers.read(path))


HERE = FilePath("here.json")


@pytest.mark.parametrize(("steps", "current"), [(91, 10), (11, 10), (199, 0), (2, 1)])
def test_every_format_gives_the_log_back(tmp_path: FilePath, steps: int, current: int) -> None:
    log = made.make_log(steps, current)
    for kind, path in made.write_all(log, tmp_path).items():
        (found,) = readers.read(path)
        if kind == "gpudrive":  # the format has no current step: it is 10, or the last
            expected = replace(made.bare(log), source="gpudrive", current=min(10, steps - 1))
        elif kind == "womd-example":
            expected = made.bare(log)
        else:
            expected = replace(log, source={"womd-scenario": "womd"}.get(kind, kind))
        # the lights of records come in the order of first sight, here the row order
        made.assert_same(found, _without_unseen(expected) if kind != "scenarionet" else expected)


def _without_unseen(log: made.Log) -> made.Log:
    seen = log.lights.valid.any(axis=1)
    return replace(
        log, lights=Lights(*(getattr(log.lights, name)[seen] for name in ("lane", "position", "state", "valid")))
    )


def test_tfexample_keeps_the_indices_of_the_file() -> None:
    """Unused slots before the last used one stay, so that the ego's index is the file's own; those behind it go."""
    log = made.make_log()
    features = made.example(log, spare=122)
    for name in ("past", "current", "future"):
        features[f"state/{name}/valid"].reshape(128, -1)[1] = 0
    found = womd.read_example(made.serialise(features))
    assert found.sdc == 2
    assert found.tracks.valid.shape == (6, 91)
    assert not found.tracks.valid[1].any()
    assert not found.tracks.position[1].any()


def test_tfexample_takes_times_from_the_ego_or_falls_back() -> None:
    log = made.make_log()
    uneven = made.single(log.times + 0.01 * np.sin(np.arange(91)))
    features = made.example(replace(log, times=uneven))
    np.testing.assert_allclose(womd.read_example(made.serialise(features)).times, uneven - uneven[0], atol=1e-6)
    features["state/past/timestamp_micros"][:] = -1
    np.testing.assert_allclose(womd.read_example(made.serialise(features)).times, np.arange(91) * 0.1)
    for name in ("past", "current", "future"):
        del features[f"state/{name}/timestamp_micros"]
    np.testing.assert_allclose(womd.read_example(made.serialise(features)).times, np.arange(91) * 0.1)


def test_tfexample_gives_the_paths_of_the_ego() -> None:
    x = np.arange(40.0)
    ways = (np.stack([x, 0.0 * x, x * 0.25], 1), np.stack([x, x, 0.0 * x], 1)[:7], np.zeros((1, 3)))
    log = replace(made.make_log(), paths=tuple(Path(way, i == 1) for i, way in enumerate(ways)))
    features = made.example(log)
    found = womd.read_example(made.serialise(features))
    made.assert_same(found, made.bare(log))
    assert [path.on_route for path in found.paths] == [False, True]  # the third has one point: it is no way
    for path, way in zip(found.paths, ways[:2], strict=True):
        np.testing.assert_array_equal(path.points, way)
    del features["path_samples/valid"]
    with pytest.raises(Malformed, match="path_samples/valid"):
        womd.read_example(made.serialise(features))
    features = made.example(log) | {"path_samples/on_route": np.array([1, 0])}
    features["path_samples/valid"] = features["path_samples/valid"][:-1]
    with pytest.raises(Malformed, match="path_samples has"):
        womd.read_example(made.serialise(features))


def test_tfexample_lives_without_lights_and_map() -> None:
    features = made.example(made.make_log())
    less = {name: values for name, values in features.items() if name.startswith(("state/", "scenario/"))}
    found = womd.read_example(made.serialise(less))
    assert not found.has_lights
    assert found.lights.state.shape == (0, 91)
    assert found.features == ()


def test_road_points_are_grouped_by_id_and_type_in_order() -> None:
    identity = np.array([5, 5, 9, 5, 5, 9, 5])
    kind = np.array([2, 2, 15, 2, -(2**40), 15, 0])  # what no byte holds means nothing
    points = np.arange(21.0).reshape(7, 3)
    found = womd.group(identity, kind, points)
    assert [(each.id, each.kind) for each in found] == [(5, 2), (9, 15), (5, 0), (5, LANE_STREET)]
    assert [each.points[:, 0].tolist() for each in found] == [[0, 3, 9], [6, 15], [12], [18]]


def test_scenario_has_no_limit_of_tracks() -> None:
    log = made.make_log()
    many = np.arange(300) % 6
    tracks = replace(log.tracks, **{name: getattr(log.tracks, name)[many] for name in log.tracks.__dataclass_fields__})
    log = replace(log, tracks=tracks, sdc=299, predict=(298,))
    made.assert_same(womd.read_scenario(made.scenario(log)), log)


def test_scenario_reads_points_with_missing_and_foreign_fields() -> None:
    """A zero coordinate may be left out, and fields that we do not know are passed over."""
    log = made.make_log()
    odd = encode(2, 5.0) + encode(3, 1.0) + encode(9, b"more")
    line = encode(1, 1) + encode(2, encode(1, 3.0) + encode(2, 4.0) + encode(3, 1.0)) + encode(2, odd)
    found = womd.read_scenario(made.scenario(log) + encode(8, encode(1, 55) + encode(5, line)) + encode(12, b"lidar"))
    assert (found.features[-1].id, found.features[-1].kind) == (55, EDGE_BOUNDARY)
    np.testing.assert_array_equal(found.features[-1].points, [[3, 4, 1], [0, 5, 1]])
    assert len(found.features) == len(log.features) + 1


@pytest.mark.parametrize("layout", ["steps", "per step", "numbers"])
def test_gpudrive_reads_lights_in_other_layouts(layout: str) -> None:
    log = made.make_log()
    document = made.gpudrive(log)
    valid, state, position = log.lights.valid, log.lights.state, log.lights.position
    if layout == "steps":  # one dictionary of lanes a step
        document["tl_states"] = [
            {
                str(log.lights.lane[row]): {
                    "state": made.SIGNALS[state[row, step]],
                    **dict(zip("xyz", position[row].tolist())),
                }
                for row in np.flatnonzero(valid[:, step])
            }
            for step in range(91)
        ]
        expected = log.lights
    else:  # no time_index: a state for every step, the stop point once
        for row, light in enumerate(document["tl_states"].values()):
            names = [made.SIGNALS[each] for each in state[row]]
            light |= {
                "state": names if layout == "per step" else state[row].tolist(),
                **dict(zip("xyz", position[row].tolist())),
            }
            del light["time_index"]
        expected = replace(log.lights, valid=np.ones_like(valid))
    found = gpudrive.read(json.dumps(document).encode(), HERE)
    made.assert_same(found, replace(made.bare(log), source="gpudrive", lights=expected))


def test_gpudrive_tolerates_what_versions_leave_out() -> None:
    log = made.make_log()
    document = made.gpudrive(log)
    del document["metadata"], document["tl_states"], document["scenario_id"]
    document["objects"][2]["is_sdc"] = True
    for each in document["objects"]:
        del each["height"], each["id"]
        each["heading"] = np.rad2deg(each["heading"]).tolist()
    for road in document["roads"]:
        road["map_element_id"] = -1
        for point in road["geometry"]:
            del point["z"]
    found = gpudrive.read(json.dumps(document).encode(), HERE)
    assert (found.id, found.sdc, found.predict, found.has_lights) == ("straight.json", 2, (), False)
    np.testing.assert_allclose(found.tracks.heading, log.tracks.heading, atol=1e-6)
    np.testing.assert_array_equal(found.tracks.size[..., :2], log.tracks.size[..., :2])
    assert not found.tracks.size[..., 2].any()
    kinds = [each.kind for each in found.features]
    assert kinds == [{12: 6, 16: EDGE_BOUNDARY}.get(each.kind, each.kind) for each in log.features]
    np.testing.assert_array_equal(found.features[0].points, log.features[0].points * [1, 1, 0])


def test_gpudrive_without_an_ego_takes_a_vehicle_that_is_always_seen_and_drives_furthest() -> None:
    log = made.make_log()
    document = made.gpudrive(log)
    del document["metadata"]
    first, *others = (index for index, kind in enumerate(log.tracks.kind) if kind == VEHICLE)
    for index in (first, *others):  # seen all the time; all stand but the first
        each = document["objects"][index]
        each["valid"] = [True] * 91
        each["position"] = [{"x": 1.0 + step * (index == first), "y": 5.0 * index, "z": 0.0} for step in range(91)]
        each["velocity"], each["heading"] = [{"x": 10.0 * (index == first), "y": 0.0}] * 91, [0.0] * 91
    assert gpudrive.read(json.dumps(document).encode(), HERE).sdc == first
    document["objects"][first]["valid"][3] = False
    assert gpudrive.read(json.dumps(document).encode(), HERE).sdc in others
    for each in document["objects"]:
        each["valid"] = [step != 10 for step in range(91)]
    with pytest.raises(Malformed, match=r"it names no ego.*at step 10 no vehicle is seen"):
        gpudrive.read(json.dumps(document).encode(), HERE)
    for each in document["objects"][:2]:
        each["is_sdc"] = True
    with pytest.raises(Malformed, match="it names 2 egos: objects 0 and 1"):
        gpudrive.read(json.dumps(document).encode(), HERE)


def test_gpudrive_fills_and_marks_invalid_steps() -> None:
    """A step at -10000 is invalid even where the file says otherwise."""
    document = made.gpudrive(made.make_log())
    document["objects"][0]["valid"] = [True] * 91
    found = gpudrive.read(json.dumps(document).encode(), HERE)
    np.testing.assert_array_equal(found.tracks.valid, made.make_log().tracks.valid)
    assert np.abs(found.tracks.position).max() < 1000


def test_scenarionet_numbers_features_of_foreign_ids() -> None:
    log = made.make_log()
    document = made.scenarionet(log)
    features = {f"lane-{key}": value for key, value in document["map_features"].items()}
    features["lane-101"]["exit_lanes"] = ["lane-102", "elsewhere"]
    features["lane-102"]["entry_lanes"] = np.array(["lane-101"])
    features["lane-103"]["polyline"] = features["lane-103"]["polyline"][:2]
    features["lane-104"]["polyline"] = np.array([[1.0, 2.0], [3.0, 4.0]])
    document |= {"map_features": features, "dynamic_map_states": {}}
    for track in document["tracks"].values():
        track["state"]["position"] = track["state"]["position"][:, :2].astype(np.float64)
    document["metadata"] |= {"tracks_to_predict": [{"track_index": 3}], "sdc_id": "?", "sdc_track_index": np.int64(2)}
    found = scenarionet.read(pickle.dumps(document, protocol=2))
    assert [each.id for each in found.features] == list(range(10))
    assert (found.features[0].exit, found.features[1].entry) == ((1,), (0,))
    np.testing.assert_array_equal(found.features[3].points, [[1, 2, 0], [3, 4, 0]])
    assert (found.predict, found.sdc, found.has_lights, len(found.lights.lane)) == ((3,), 2, True, 0)
    np.testing.assert_array_equal(found.tracks.position, log.tracks.position * [1, 1, 0])


def test_scenarionet_reads_lights_of_metadrives_first_files(tmp_path: FilePath) -> None:
    """Lanes and stop points by step, zeros where nothing was known, states by WOMD's numbers; a TFRecord's name."""
    log = made.make_log()
    document = made.scenarionet(log)
    known, lights = log.lights.valid & (log.lights.state > 0), document["dynamic_map_states"]
    for row, light in enumerate(lights.values()):
        light["state"] = {
            "object_state": np.where(known[row], log.lights.state[row], 0),
            "lane": np.where(known[row], light.pop("lane"), 0),
            "stop_point": np.where(known[row, :, None], light.pop("stop_point"), 0.0),
        }
    path = tmp_path / "sd_training.tfrecord-00000-of-01000_1.pkl"
    path.write_bytes(pickle.dumps(document, protocol=4))
    assert known.any(axis=1).all() and not known.all()
    (found,) = readers.read(path)
    for name, value in (("lane", log.lights.lane), ("position", log.lights.position), ("valid", known)):
        np.testing.assert_array_equal(getattr(found.lights, name), value)
    np.testing.assert_array_equal(found.lights.state, np.where(known, log.lights.state, 0))


def test_scenarionet_has_no_speed_limits_where_it_filled_in_one() -> None:
    """It writes 100 km/h for every lane of sources that have none; beside another limit it is one."""
    document = made.scenarionet(made.make_log())
    lanes = [each for each in document["map_features"].values() if "entry_lanes" in each]
    for known in (None, 50.0):
        for lane, limit in zip(lanes, (100.0, 100.0, known), strict=False):
            lane.pop("speed_limit_mph", None)
            lane["speed_limit_kmh"] = limit
        found = scenarionet.read(pickle.dumps(document, protocol=2)).features
        limits = {each.speed_limit for each in found if each.kind == LANE_STREET}
        assert limits == ({None} if known is None else {100 / 3.6, 50 / 3.6} | limits & {None})


def test_argoverse_gives_tracks_sizes_by_type_and_edges_of_the_union(tmp_path: FilePath) -> None:
    pytest.importorskip("pyarrow")
    log = made.make_log(steps=110, current=49)
    (found,) = readers.read(argoverse_files.write(log, tmp_path))
    np.testing.assert_array_equal(found.tracks.valid, log.tracks.valid)
    np.testing.assert_array_equal(found.tracks.position, log.tracks.position * [1, 1, 0])
    np.testing.assert_array_equal(found.tracks.heading, log.tracks.heading)
    np.testing.assert_array_equal(found.tracks.velocity, log.tracks.velocity)
    np.testing.assert_array_equal(found.tracks.kind, log.tracks.kind)
    assert (found.sdc, found.predict, found.current, found.has_lights) == (2, (0, 3), 49, False)
    expected = [argoverse.SIZES["vehicle"], argoverse.SIZES["pedestrian"], argoverse.SMALL]
    np.testing.assert_array_equal(found.tracks.size[[2, 1, 5], -1], np.array(expected, np.float32))
    lanes = [each for each in found.features if each.kind == LANE_STREET]
    assert [(each.id, each.entry, each.exit) for each in lanes] == [(101, (), (102,)), (102, (101,), ()), (103, (), ())]
    edges = [each for each in found.features if each.kind == EDGE_BOUNDARY]
    ends = np.concatenate([np.diff(each.points[:, :2], axis=0) for each in edges])
    middle = np.concatenate([(each.points[1:, :2] + each.points[:-1, :2]) / 2 for each in edges])
    assert [len(each.points) for each in edges] == [4, 4]
    # all around the road, counterclockwise, and nothing across it where the two areas meet
    assert np.linalg.norm(ends, axis=1).sum() == pytest.approx(2 * (200 + 7))
    assert (ends[np.abs(middle[:, 1] + 3.5) < 1e-9, 0] > 0).all()
    assert (ends[np.abs(middle[:, 1] - 3.5) < 1e-9, 0] < 0).all()
    assert not ((np.abs(middle[:, 0] - 100) < 0.5) & (np.abs(middle[:, 1]) < 3)).any()


def test_argoverse_makes_centre_lines_where_there_are_none(tmp_path: FilePath) -> None:
    pytest.importorskip("pyarrow")
    path = argoverse_files.write(made.make_log(), tmp_path)
    where = tmp_path / "log_map_archive_straight.json"
    document = json.loads(where.read_text())
    for lane in document["lane_segments"].values():
        del lane["centerline"]
        lane["left_lane_boundary"] = lane["left_lane_boundary"][:: len(lane["left_lane_boundary"]) - 1]
    where.write_text(json.dumps(document))
    (found,) = readers.read(path)
    for one, other in zip((each for each in found.features if each.kind == LANE_STREET), made.make_features()):
        np.testing.assert_allclose(one.points, other.points * [1, 1, 0], atol=1e-9)


def test_argoverse_says_what_is_missing(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    path = argoverse_files.write(made.make_log(), tmp_path)
    (tmp_path / "log_map_archive_straight.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(BadData, match=r"its map log_map_archive_straight\.json cannot be read.*put it beside"):
        list(readers.read(path))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(BadData, match=r'pip install "longhaul-rl\[data\]"'):
        list(readers.read(path))


def test_argoverse_takes_no_more_rows_than_there_is_memory(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    path = argoverse_files.write(made.make_log(), tmp_path)
    monkeypatch.setattr(argoverse, "MOST_ROWS", 500)
    with pytest.raises(BadData, match="it has 531 rows; 500 are possible"):
        list(readers.read(path))


def test_points_inside_a_ring_are_told_from_those_outside() -> None:
    ring = np.array([[0, 0], [4, 0], [4, 4], [2, 1], [0, 4], [0, 0]], float)
    points = np.array([[1, 1], [2, 2], [3, 1], [5, 1], [-1, 0.5], [2, 0.9]])
    assert lane_boundaries.inside(points, [ring]).tolist() == [True, False, True, False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state/is_sdc": np.zeros(9, int)}, "0 tracks are the ego"),
        ({"state/is_sdc": np.ones(9, int)}, "6 tracks are the ego"),
        ({"state/current/x": np.zeros(8, np.float32)}, "8 values, which 9 tracks do not divide"),
        ({"state/past/x": np.zeros(9, np.float32)}, "state/[*]/x has 82 steps"),
        ({"state/past/valid": [b"1"]}, "holds bytes"),
        ({"roadgraph_samples/id": np.zeros(3, int)}, "3 ids"),
        ({"traffic_light_state/current/id": np.zeros(3, int)}, "steps do not divide"),
        ({"state/current/x": np.full(9, np.nan, np.float32)}, "not finite"),
        ({"state/current/x": np.full(9, 1e9, np.float32)}, "beyond 1e[+]08"),
        (
            {
                "state/future/valid": np.zeros(720, int),
                "state/past/valid": np.zeros(90, int),
                "state/current/valid": np.eye(1, 9, 5, int)[0],
            },
            "valid at no step",
        ),
    ],
)
def test_tfexample_says_what_does_not_fit(change: dict[str, np.ndarray], message: str) -> None:
    features = made.example(made.make_log()) | change
    with pytest.raises(Malformed, match=message), np.errstate(all="ignore"):
        womd.read_example(made.serialise(features))


def test_features_without_points_are_no_features() -> None:
    log = made.make_log()
    empty = replace(log, features=(*log.features, Feature(77, 12, np.zeros((0, 3)))))
    made.assert_same(womd.read_scenario(made.scenario(empty)), log)
    assert len(gpudrive.read(json.dumps(made.gpudrive(empty)).encode(), HERE).features) == len(log.features)
