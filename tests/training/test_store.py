"""Runs in stores: whatever moment a machine or the store is lost at, what the store holds goes on bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import fsspec
import numpy as np
import pytest

from longhaul.runtime import object_store
from longhaul.runtime.errors import RunError
from longhaul.runtime.object_store import Store, Unreachable
from longhaul.training import run_dir, store
from longhaul.training.checkpoint.checkpoint import Checkpoints
from longhaul.training.store import Mirror
from tests.helpers import azure_server
from tests.helpers.s3_server import BUCKET, S3Server


@pytest.fixture(autouse=True)
def _staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_STAGING", str(tmp_path / "staging"))


class Failing(Store):
    """A store that is out of reach after so many objects were written or removed."""

    left = 10**9

    def put(self, name: str, path: Path, size: int) -> None:
        self._count()
        super().put(name, path, size)

    def remove(self, name: str) -> None:
        self._count()
        super().remove(name)

    def _count(self) -> None:
        if self.left <= 0:
            raise Unreachable("out of reach")
        self.left -= 1


def trained(folder: Path, *steps: int) -> None:
    """A run's folder with a checkpoint after each of `steps`, and a record an update."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text("{}")
    with closing(Checkpoints(folder / "checkpoints", keep=2)) as checkpoints:
        for step in steps:
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"update": step}) + "\n")
            checkpoints.save(step, {"w": np.full(3, step, np.float32)})
            checkpoints.wait()


def mirror_of(folder: Path, remote: Store) -> Mirror:
    """Mirror that looks only when it is told to."""
    mirror = Mirror(folder, f"{remote.url}/{folder.name}", period=3600.0)
    mirror._ending.set()  # its thread would look soon after the start
    mirror._thread.join()
    mirror._store = remote
    return mirror


def resumable(url: str, name: str) -> tuple[int, int] | None:
    """(step of the newest intact checkpoint, last record) of what the store has; None where there is none."""
    shutil.rmtree(store.staging(url), ignore_errors=True)
    try:
        folder = store.local_folder(url, name)
    except RunError:
        return None
    with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        newest = checkpoints.newest()
    if newest is None:
        return None
    records = [json.loads(line)["update"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return newest.step, records[-1]


def test_whichever_object_is_the_last_the_store_holds_a_whole_run(tmp_path: Path) -> None:
    url, folder = f"file://{tmp_path}/remote", tmp_path / "local" / "run"
    remote, seen = Failing(url), []
    mirror = mirror_of(folder, remote)
    trained(folder, 1, 2)
    mirror.once()
    assert resumable(url, "run") == (2, 2)
    trained(folder, 3, 4)  # 1 and 2 are gone
    for _ in range(100):
        remote.left = 1  # one object more each time
        try:
            mirror.once(last=True)
        except Unreachable:
            seen.append(resumable(url, "run"))
            continue
        break
    assert set(seen) == {(2, 4), (3, 4), (4, 4)} and seen == sorted(seen)
    mirror.close()
    assert resumable(url, "run") == (4, 4)
    assert {path.name for path in (tmp_path / "remote/run/checkpoints").iterdir() if any(path.rglob("*.json"))} == {
        "3",
        "4",
    }


def test_a_damaged_object_costs_its_checkpoint_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, folder = f"file://{tmp_path}/remote", tmp_path / "local" / "run"
    trained(folder, 1, 2)
    mirror_of(folder, Store(url)).close()
    parts = [path for path in (tmp_path / "remote/run/checkpoints/2/progress").rglob("*") if path.is_file()]
    data = bytearray(max(parts, key=lambda path: path.stat().st_size).read_bytes())
    data[len(data) // 2] ^= 1
    max(parts, key=lambda path: path.stat().st_size).write_bytes(data)
    assert resumable(url, "run") == (1, 2)
    assert "checkpoint 2 in" in capsys.readouterr().err


def test_objects_whose_names_lead_out_of_the_folder_are_left_out(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/paths/run/run.json", b"{}")
    names = [f"run/{tmp_path}/evil", f"run/{'../' * 30}{tmp_path}/evil", "run/../evil", "run/./evil"]
    files.store |= {f"/paths/{name}": files.store["/paths/run/run.json"] for name in names}
    folder = store.fetched(Store("memory://paths"), "run")
    assert [path for path in tmp_path.rglob("*") if "evil" in path.name] == []
    assert (folder / "run.json").read_bytes() == b"{}"


def test_a_folder_that_is_as_new_as_the_store_stays(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    folder = store.staging(url) / "run"
    trained(folder, 1, 2)
    mirror_of(folder, Store(url)).close()
    trained(folder, 3)
    assert store.local_folder(url, "run") == folder
    assert "3" in (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("")
    shutil.rmtree(folder / "checkpoints")
    with run_dir.alone(folder):  # a process of this machine trains there
        store.local_folder(url, "run")
        assert (folder / "metrics.jsonl").read_text() == ""
    store.local_folder(url, "run")
    assert (folder / "checkpoints/2/manifest.json").is_file()


def test_a_store_that_is_away_is_said_once_and_caught_up_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PAUSES", (0.01, 0.02))
    url, folder, said = f"file://{tmp_path}/remote", tmp_path / "local" / "run", []
    trained(folder, 1)
    remote = Failing(url)
    remote.left = 3
    mirror = Mirror(folder, f"{url}/run", said.append, period=0.01)
    mirror._store = remote
    wait(lambda: len(said) == 1)
    trained(folder, 2)
    time.sleep(0.1)
    assert said == ["out of reach; it trains on, and tries again"]
    remote.left = 10**9
    wait(lambda: len(said) == 2)
    assert "is in reach again" in said[1]
    remote.left = 0
    trained(folder, 3)
    with pytest.raises(RunError, match=r"out of reach; the run is whole in .*/local/run: train --resume file://"):
        mirror.close(patience=0.05)
    assert resumable(url, "run") == (2, 2)


def wait(done, seconds: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_names_of_other_runs_are_told(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    trained(tmp_path / "local" / "first", 1)
    mirror_of(tmp_path / "local" / "first", Store(url)).close()
    with pytest.raises(RunError, match=r"no run 'frist' in file://.*; did you mean first"):
        run_dir.find_folder(Path(url), "frist")
    assert run_dir.find_folder(Path("elsewhere"), f"{url}/first").name == "first"


# -------------------------------------------------------------------------------------------------------------- clouds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3") / "log")
    yield server
    server.stop()


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address in the bucket of a real S3 server on this machine."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/runs"


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_run_in_a_cloud_comes_back_byte_for_byte(
    scheme: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        if scheme == "az":
            if (command := shutil.which("azurite-blob")) is None:
                pytest.skip("azurite-blob is not on the PATH (npm install azurite)")
            for name, value in stack.enter_context(azure_server.serving(command, BUCKET, tmp_path)).items():
                monkeypatch.setenv(name, value)
        comes_back(f"{scheme}://{BUCKET}/of-{scheme}", tmp_path)


def comes_back(bucket: str, tmp_path: Path) -> None:
    folder = tmp_path / "local" / "run"
    trained(folder, 1, 2)
    (folder / "large.bin").write_bytes(os.urandom(object_store.WHOLE + 5))  # in parts
    (folder / "wandb").mkdir()
    (folder / "wandb" / "log").write_text("stays here")
    mirror_of(folder, Store(bucket)).close()
    assert resumable(bucket, "run") == (2, 2)
    fetched = store.staging(bucket) / "run"
    names = sorted(path.relative_to(fetched) for path in fetched.rglob("*") if path.is_file())
    assert all(
        (fetched / name).read_bytes() == (folder / name).read_bytes() for name in names if name.name != store.MARK
    )
    assert Path("large.bin") in names and Path("wandb/log") not in names
    assert store.address_of(fetched) == run_dir.called(fetched) == f"{bucket}/run"


def test_a_wrong_address_is_one_line(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refusal(url: str) -> str:
        with pytest.raises(RunError) as caught:
            store.prepared(url, lambda local: make(local / "run"))
        assert not (store.staging(url) / "run").exists()
        return str(caught.value)

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True)
        return folder

    assert (
        refusal("s3://nothing/runs") == "s3://nothing/runs: there is no such bucket; make it, or give another address"
    )
    assert refusal("s4://bucket/runs").startswith("s4://bucket/runs: no store has the scheme 's4'; did you mean s3")
    assert refusal("s3://") == "s3:// names no bucket; give s3://BUCKET/FOLDER"
    trained(tmp_path / "local" / "run", 1)
    mirror_of(tmp_path / "local" / "run", Store(bucket)).close()
    assert refusal(bucket) == f"run 'run' exists in {bucket}; choose another --run-name, or --resume run"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert "is out of reach" in refusal(bucket)
