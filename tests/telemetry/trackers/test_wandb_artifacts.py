"""Checkpoints as W&B artifacts: a run that lost its machine goes on from them, bit for bit.

No server is asked: the real library logs offline, and a module of its name plays the server.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from longhaul.runtime.errors import RunError
from longhaul.telemetry import sinks, tracking
from longhaul.telemetry.trackers import wandb_artifacts as artifacts
from longhaul.training import run_dir
from tests.helpers.tracked_runs import tracked_folder, write
from tests.telemetry.trackers.test_wandb import chunks

ROOT = Path(__file__).resolve().parents[3]

SERVER = """
    import json, os, pathlib, shutil
    HOME = pathlib.Path(os.environ["FAKE"])
    class Settings:
        def __init__(self, **options): pass
    def teardown(): pass
    class Artifact:
        def __init__(self, name, type, metadata):
            self.name, self.type, self.metadata, self.files = name, type, metadata, []
        def add_dir(self, path, name):
            inner = [file for file in pathlib.Path(path).rglob("*") if file.is_file()]
            self.files += [(str(file), f"{name}/{file.relative_to(path)}") for file in inner]
        def add_file(self, path, name):
            self.files.append((path, name))
        def wait(self): pass
        def download(self, root):
            shutil.copytree(self.place / "files", root, dirs_exist_ok=True)
    class Run:
        url, resumed, starting_step = "https://w/run", False, 0
        def log(self, row, step): pass
        def log_artifact(self, artifact, aliases):
            place = HOME / "versions" / str(len(list(HOME.glob("versions/*"))))
            for path, name in artifact.files:
                (place / "files" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place / "files" / name)
            about = {"name": artifact.name, "aliases": aliases, "type": artifact.type, "metadata": artifact.metadata}
            (place / "about.json").write_text(json.dumps(about))
            for alias in aliases:
                (HOME / f"{artifact.name}:{alias}").write_text(str(place))
            return artifact
        def mark_preempting(self): pass
        def finish(self, exit_code): pass
    def init(**options):
        with open(HOME / "inits", "a") as file:
            print(json.dumps({k: options.get(k) for k in ("id", "resume", "resume_from")}), file=file)
        return Run()
    class Api:
        def artifact(self, path, type):
            name = path.split("/")[-1]
            if not (HOME / name).exists(): raise ValueError(f"artifact {path} not found")
            found = Artifact(name, type, {})
            found.place = pathlib.Path((HOME / name).read_text())
            found.metadata = json.loads((found.place / "about.json").read_text())["metadata"]
            return found
"""


@pytest.fixture(autouse=True)
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a server, for processes that are started."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "server"
    home.mkdir()
    (home / "wandb.py").write_text(textwrap.dedent(SERVER))
    monkeypatch.setenv("FAKE", str(home))
    monkeypatch.setenv("PYTHONPATH", str(home))
    return home


def versions(server: Path) -> list[dict[str, Any]]:
    return [
        json.loads((server / "versions" / str(n) / "about.json").read_text())
        for n in range(len(list(server.glob("versions/*"))))
    ]


def checkpoint(folder: Path, name: str) -> None:
    place = folder / "checkpoints" / name
    (place / "progress").mkdir(parents=True)
    (place / "progress" / "data").write_text(f"data of {name}")
    (place / "manifest.json").write_text("{}")


def test_each_checkpoint_is_sent_once(tmp_path: Path, server: Path) -> None:
    folder = tracked_folder(tmp_path, mode="online")
    checkpoint(folder, "4")
    checkpoint(folder, "10")
    checkpoint(folder, "10.1")  # the same step, saved again
    (folder / "checkpoints" / "12.partial").mkdir()
    write(folder, range(1, 11))
    key = tracking.known_id(folder)
    wanted = [["latest", f"step-{step}"] for step in (4, 10, 10)]
    assert [found["aliases"] for found in versions(server)] == wanted
    assert {(found["name"], found["type"]) for found in versions(server)} == {(f"checkpoint-{key}", "model")}
    checkpoint(folder, "14")
    write(folder, range(11, 15))
    assert [found["metadata"]["update"] for found in versions(server)] == [4, 10, 10, 14]
    last = server / "versions" / "3" / "files"
    assert sorted(str(path.relative_to(last)) for path in last.rglob("*") if path.is_file()) == [
        "checkpoints/14/manifest.json", "checkpoints/14/progress/data", "metrics.jsonl", "run.json", "wandb.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "artifact", "sent"), [("online", False, 0), ("online", None, 1), ("offline", None, 0)]
)
def test_nothing_is_sent_with_no_artifact_or_offline(
    tmp_path: Path, server: Path, mode: str, artifact: bool | None, sent: int
) -> None:
    folder = tracked_folder(tmp_path, mode=mode)
    (server / "wandb.py").write_text(
        (server / "wandb.py").read_text()
        + textwrap.dedent("""
        class settings: sync_dir = os.environ["FAKE"]
        Run.settings = settings
    """)
    )
    tracked = tracking.load_all(folder)["wandb"]
    tracking.save(folder, {"wandb": tracked._replace(artifact=artifact)})
    checkpoint(folder, "4")
    write(folder, range(1, 5))
    assert len(versions(server)) == sent


def test_a_rewound_run_goes_on_at_its_checkpoint_and_once(tmp_path: Path, server: Path) -> None:
    folder = tracked_folder(tmp_path, mode="online")
    write(folder, range(1, 9))
    tracked = tracking.load_all(folder)["wandb"]
    given = frozenset({"rewind"})
    tracking.save(folder, tracking.chosen({"rewind": True}, given, "games", {"wandb": tracked}))
    write(folder, range(5, 9))
    write(folder, range(9, 11))
    begun = [json.loads(line) for line in (server / "inits").read_text().splitlines()]
    assert [row["resume_from"] for row in begun] == [None, f"{tracked.id}?_step=4", None]
    assert [row["resume"] for row in begun] == ["allow", None, "allow"]


@pytest.mark.slow  # test_wandb.py logs offline by the real library, too
def test_the_real_library_logs_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.delenv("PYTHONPATH")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    folder = tracked_folder(tmp_path)
    tracking.save(folder, {"wandb": tracking.load_all(folder)["wandb"]._replace(artifact=True)})
    checkpoint(folder, "4")
    notes: list[str] = []
    write(folder, range(1, 5), notes=notes)
    assert len(notes) == 1
    (file,) = folder.rglob("*.wandb")
    (logged,) = [
        record.artifact for record in map(Record.FromString, chunks(file.read_bytes())) if record.HasField("artifact")
    ]
    assert (logged.name, logged.type, set(logged.aliases)) == (
        f"checkpoint-{tracking.known_id(folder)}",
        "model",
        {"latest", "step-4"},
    )
    assert "checkpoints/4/progress/data" in {entry.path for entry in logged.manifest.contents}


def test_a_run_that_w_and_b_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def artifact(self, path: str, type: str) -> Any:
            raise ValueError(f"artifact {path} of {type} not found")

    with pytest.raises(LookupError, match=r"W&B has no artifact us/games/checkpoint-abcd:latest \(artifact us/games"):
        artifacts.fetched(tmp_path / "runs", "abcd", "games", "us", Api())
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(RunError, match=r"no run 'abcd' in .*there are none yet"):
        run_dir.find_or_fetch(tmp_path / "runs", "abcd", "games", None, None)


@pytest.mark.parametrize("name", ["../other", "a/b", ""])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    class Api:
        metadata: ClassVar = {"run": name}

        def artifact(self, path: str, type: str) -> Any:
            return self

    with pytest.raises(LookupError, match="which is no name of a folder"):
        artifacts.fetched(tmp_path / "runs", "abcd", "games", None, Api())
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_killed_on_one_machine_it_goes_on_on_another(tmp_path: Path, server: Path) -> None:
    """SIGKILL, and the folder is gone: by its W&B id the run ends with the parameters of an undisturbed one."""
    words = "train cartpole --num-envs 8 --num-steps 16 --hidden-dim 8 --total-timesteps 1e6 --log-interval 100"
    words += " --save-interval 400 --evaluation-episodes 2"
    command = [sys.executable, "-m", "longhaul", *words.split()]
    environment = os.environ | {"WANDB_API_KEY": "x" * 40, "PYTHONPATH": f"{server}{os.pathsep}{ROOT}"}
    metrics = tmp_path / "runs" / "mine" / "metrics.jsonl"
    process = subprocess.Popen(
        [*command, "--run-name", "mine", "--wandb"], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
    )
    while not metrics.exists() or not sinks.read(metrics) or sinks.read(metrics)[-1]["update"] < 3000:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait(60)
    time.sleep(3.0)  # its follower sends the rest
    assert versions(server)
    shutil.rmtree(tmp_path / "runs")
    key = tracking.run_id("mine")
    done = subprocess.run(
        [*command, "--resume-run", key], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    undisturbed = [*command, "--run-name", "other"]
    subprocess.run(undisturbed, cwd=tmp_path, env=environment, check=True, capture_output=True)
    one, two = (json.loads((tmp_path / "runs" / name / "result.json").read_text()) for name in ("mine", "other"))
    assert one["params_sha256"] == two["params_sha256"]
    rows = [sinks.read(tmp_path / "runs" / name / "metrics.jsonl") for name in ("mine", "other")]
    assert [row["episode/return"] for row in rows[0]] == [row["episode/return"] for row in rows[1]]
    assert versions(server)[-1]["metadata"] == {"run": "mine", "update": int(1e6) // 128}
