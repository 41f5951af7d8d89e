"""The commands `data inspect` and `data convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers import log_files
from tests.helpers.command_line import assert_refused


def test_inspect_counts_and_names_errors(longhaul: Any, tmp_path: Path) -> None:
    log = log_files.make_log()
    paths = log_files.write_all(log, tmp_path)
    code, out, err = longhaul("data", "inspect", paths["gpudrive"].name, paths["womd-example"].name, "--json", "r.json")
    assert (code, err) == (0, "")
    report = json.loads((tmp_path / "r.json").read_text())
    assert [file["format"] for file in report["files"]] == ["gpudrive", "womd-example"]
    assert [s["tracks"] for file in report["files"] for s in file["scenarios"]] == [6, 6]
    summary, head, header, row = out.splitlines()[:4]
    counts = "12 tracks: 6 vehicles, 2 pedestrians, 2 cyclists, 2 others"
    assert summary == f"2 files (gpudrive, womd-example), 2 scenarios, 0.3 minutes, {counts}"
    assert head == f"{paths['gpudrive'].name}: gpudrive, 1 scenario"
    assert dict(zip(header.split(), row.split()))["vehicles"] == "3"

    paths["gpudrive"].write_bytes(paths["gpudrive"].read_bytes()[:-50])
    code, out, err = longhaul("data", "inspect", str(tmp_path), "--json", "-")
    assert code == 1
    files = {Path(file["path"]).name: file["error"] for file in json.loads(out)["files"]}
    assert [name for name, error in files.items() if error] == ["gpudrive.json", "r.json"]
    assert err.count("\n") == 2
    assert str(paths["gpudrive"]) in err.splitlines()[0]


def test_convert_packs_what_can_be_read_and_names_what_can_not(longhaul: Any, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    paths = log_files.write_all(log_files.make_log(), tmp_path / "logs")
    (tmp_path / "logs" / "broken.json").write_text("{")
    code, out, err = longhaul("data", "convert", str(tmp_path / "logs"), "packed", "--workers", "1")
    assert code == 1 and f"{len(paths)} scenarios in 1 shards" in out
    assert "broken.json" in err.splitlines()[-1]
    code, out, err = longhaul("data", "inspect", "packed", "--json", "-")
    assert code == 0 and json.loads(out)["scenarios"] == len(paths)
    assert_refused(longhaul("data", "convert", "logs", "--control", "nobody"), "one of vehicles, all")
    assert_refused(longhaul("data", "convert", "logs", "packed", "--control", "all"), "made with control = vehicles")
    assert_refused(longhaul("data", "convert", "logs"), "from where to where?")
    assert_refused(longhaul("data", "convert", "nowhere", "out"), "nowhere: no such file or folder")
