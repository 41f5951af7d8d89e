"""SwanLab beside a run, by the real library in offline mode."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from longhaul.telemetry.trackers import swanlab as tracker
from tests.helpers.tracked_runs import tracked_folder, write


@pytest.fixture(autouse=True)
def _no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SWANLAB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "home"))


def test_where_it_goes_follows_the_environment_and_the_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracker.resolved() == "offline"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text("machine api.swanlab.cn login user password x\n")
    assert tracker.resolved() == "cloud"
    for word, mode in (("offline", "offline"), ("online", "cloud"), ("disabled", "disabled")):
        monkeypatch.setenv("SWANLAB_MODE", word)
        assert tracker.resolved() == mode
    monkeypatch.setenv("SWANLAB_MODE", "of")
    with pytest.raises(ValueError, match="SWANLAB_MODE is 'of'; it must be one of cloud, local, offline, disabled"):
        tracker.resolved()


def points(file: Path) -> list[tuple[int, float]]:
    """(step, value) of ppo/entropy in a file of the library's version 0.6."""
    from swanlab.log.backup.datastore import DataStore

    found, store = [], DataStore()
    store.open_for_scan(str(file))
    while (line := store.scan()) is not None:
        data = json.loads(line)["data"]
        if data.get("key") == "ppo/entropy" and "metric" in data:
            found.append((data["step"], data["metric"]["data"]))
    store._fp.close()
    return found


@pytest.mark.slow
def test_a_run_that_goes_on_has_one_history(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    folder, notes = tracked_folder(tmp_path, tracker="swanlab"), []
    write(folder, range(1, 6), notes=notes, stopped=True)
    write(folder, range(4, 9), notes=notes)
    (place,) = (folder / "swanlab").glob("run-*")
    assert notes[-1] == f"SwanLab: offline; swanlab sync {place}"
    assert len(notes) == 2
    (file,) = place.glob("*.swanlab")
    assert points(file) == [(update, 1.0 / update) for update in range(1, 9)]
