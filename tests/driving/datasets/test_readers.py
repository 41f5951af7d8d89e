"""What users name on the command line: files, folders, patterns, and what is wrong with them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData
from tests.helpers import log_files as made
from tests.helpers.log_files import encode


def some(folder: Path) -> dict[str, Path]:
    return made.write_all(made.make_log(11, 5), folder)


def test_folders_are_searched_through_and_foreign_files_passed_over(tmp_path: Path) -> None:
    paths = some(tmp_path)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    shutil.copy(paths["gpudrive"], deep / "z.json")
    for name in ("README.md", ".hidden.json", "dataset_summary.pkl", "dataset_mapping.pkl", "log_map_archive_1.json"):
        (deep / name).write_text("nothing")
    found = readers.expand([str(tmp_path)])
    assert found == [*sorted(paths.values()), deep / "z.json"]
    assert readers.expand([str(tmp_path), str(tmp_path)]) == found


def test_patterns_and_order_and_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = some(tmp_path)
    monkeypatch.chdir(tmp_path)
    scenario = paths["womd-scenario"].name
    (tmp_path / "notes.txt").write_text("nothing")
    assert readers.expand(["*.pkl", scenario, "*"]) == [
        Path("scenarionet.pkl"),
        Path(scenario),
        Path("gpudrive.json"),
        Path("womd-example.tfrecord"),
    ]
    assert readers.expand(["gpudrive.json", str(paths["gpudrive"]), "./gpudrive.json"]) == [Path("gpudrive.json")]
    assert readers.expand(["**/*.json"]) == [Path("gpudrive.json")]
    assert readers.expand(["notes.txt"]) == [Path("notes.txt")]  # named by itself: reading it says what is wrong


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
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
def test_paths_that_mean_nothing(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadData, match=message) as caught:
        readers.expand([str(tmp_path / name)])
    assert str(caught.value).startswith(str(tmp_path / name))
    assert str(caught.value).count(name) == 1
    assert "\n" not in str(caught.value)


def test_the_home_of_nobody_is_bad_data() -> None:
    with pytest.raises(BadData, match=r"^~nobody-of-this-name/logs: cannot be read: "):
        readers.expand(["~nobody-of-this-name/logs"])


def test_load_reads_in_order_up_to_a_limit(tmp_path: Path) -> None:
    log = made.make_log(11, 5)
    many = [made.scenario(replace(log, id=f"s{number}")) for number in range(5)]
    made.write_records(tmp_path / "b.tfrecord", many)
    shutil.copy(some(tmp_path)["gpudrive"], tmp_path / "a.json")
    given = [str(tmp_path / "b.tfrecord"), str(tmp_path / "a.json")]
    found = [log.id for path in readers.expand(given) for log in readers.read(path)]
    assert found == ["s0", "s1", "s2", "s3", "s4", "straight"]


def test_the_format_is_told_by_content(tmp_path: Path) -> None:
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
        ("a.json", b"{", "it is no JSON from byte 1"),
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
def test_files_that_are_no_logs(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(BadData, match=message) as caught:
        list(readers.read(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_records_that_are_no_scenarios(tmp_path: Path) -> None:
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
def test_files_that_may_not_be_read(tmp_path: Path) -> None:
    path = some(tmp_path)["gpudrive"]
    path.chmod(0)
    with pytest.raises(BadData, match="cannot be read: Permission denied"):
        list(readers.read(path))
