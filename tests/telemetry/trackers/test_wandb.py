"""Weights & Biases beside a run: asked for or not, and each record once, whatever is killed.

No failure of it ends or holds up a run: a module of its name plays the server, and what fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

from longhaul.cli.main import main
from longhaul.envs.hackmatrix.environment import hackmatrix
from longhaul.envs.hackmatrix.reward import PARTS
from longhaul.runtime.errors import RunError
from longhaul.runtime.launch.process import Process
from longhaul.telemetry import sinks, tracking
from longhaul.telemetry.trackers import wandb
from longhaul.training.run_dir import find_folder, load_run
from tests.helpers import small_runs
from tests.helpers.small_runs import small
from tests.helpers.tracked_runs import record, tracked_folder, write

BLOCK, HEAD = 32768, 7
"""Bytes of a block of a .wandb file, and of the file's and each chunk's head (LevelDB's log format)."""


class Offline(NamedTuple):
    """Records of an offline folder of wandb."""

    id: str
    project: str
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    exits: list[int]

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for row in self.rows]


def chunks(data: bytes) -> list[bytes]:
    """The records of a .wandb file, whole."""
    found, part, at = [], b"", HEAD
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if left < HEAD or kind == 0:
            at += left
            continue
        part += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (1, 4):  # whole, or the last of several
            found.append(part)
            part = b""
    return found


def read(folder: Path) -> Offline:
    """The only offline folder of wandb anywhere below `folder`."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.rglob("*.wandb")
    run, rows, exits = None, [], []
    for data in chunks(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("run") and run is None:
            run = record.run
        if record.HasField("history"):
            items = record.history.item
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
        if record.HasField("exit"):
            exits.append(record.exit.exit_code)
    assert run is not None
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    return Offline(run.run_id, run.project, run.display_name, config, rows, exits)


NEEDS_WANDB = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb, of the extra logging, is not installed")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user's shell and home have, no server is asked."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


# --------------------------------------------------------------------------------------------------- what is wanted


def values(**changes: Any) -> dict[str, Any]:
    return {"wandb": False, "project": None, "entity": None, "wandb-mode": None} | changes


def test_the_id_is_that_of_the_old_trainer() -> None:
    assert tracking.run_id("hackmatrix-jax-feb01-26-1") == "a6cf6b32"  # the first digits of the name's md5sum


def test_nothing_is_tracked_unless_asked_for_and_a_run_keeps_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: True)  # type: ignore[attr-defined]
    nothing: frozenset[str] = frozenset()
    assert tracking.chosen(values(), nothing, "pong") == {}
    assert tracking.chosen(values(project="a"), frozenset({"project"}), "pong") == {}
    begun = tracking.chosen(values(wandb=True), frozenset({"wandb"}), "pong")["wandb"]
    assert begun == tracking.Tracking("", True, "pong")
    kept = begun._replace(id="abcd1234", mode="offline")
    assert tracking.chosen(values(), nothing, "pong", {"wandb": kept}) == {"wandb": kept}
    assert tracking.chosen(values(), frozenset({"wandb"}), "pong", {"wandb": kept}) == {
        "wandb": kept._replace(on=False)
    }
    given = frozenset({"wandb-mode"})
    assert tracking.chosen(values(**{"wandb-mode": "online"}), given, "pong", {"wandb": kept}) == {
        "wandb": kept._replace(mode="online")
    }
    monkeypatch.setenv("WANDB_PROJECT", "sports")
    monkeypatch.setenv("WANDB_ENTITY", "us")
    named = tracking.chosen(values(wandb=True, entity="me"), frozenset({"wandb"}), "pong")
    assert named["wandb"] == tracking.Tracking("", True, "sports", "me")


def test_where_it_goes_follows_the_flag_the_environment_and_the_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wandb.resolved(None) == "offline"
    (tmp_path / "netrc").write_text("machine elsewhere.org login user password x\n")
    assert wandb.resolved(None) == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert wandb.resolved(None) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.mine.org")
    assert wandb.resolved(None) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb.resolved(None) == "online"
    for word, mode in (("offline", "offline"), ("dryrun", "offline"), ("disabled", "disabled")):
        monkeypatch.setenv("WANDB_MODE", word)
        assert wandb.resolved(None) == mode
    assert wandb.resolved("online") == "online"
    monkeypatch.setenv("WANDB_MODE", "of")
    with pytest.raises(ValueError, match="WANDB_MODE is 'of'; it must be one of online, offline, disabled"):
        wandb.resolved(None)


def test_without_the_package_it_is_said_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert main(["train", "cartpole", "--wandb"]) == 2
    assert "--wandb needs wandb: pip install 'longhaul-rl[logging]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = tracked_folder(tmp_path)
    (folder / "wandb.json").write_text('{"id": ')
    with pytest.raises(tracking.TrackingError, match=r"wandb.json can't be read .*; remove it"):
        tracking.load(folder)


def test_a_run_is_found_by_its_id(tmp_path: Path) -> None:
    folder, other = tracked_folder(tmp_path), tracked_folder(tmp_path, "other")
    tracking.save(other, {"wandb": tracking.Tracking("from-a-sweep", True, "games")})
    runs = tmp_path / "runs"
    assert find_folder(runs, tracking.run_id("run")) == find_folder(runs, "run") == folder
    assert find_folder(runs, "from-a-sweep") == other
    (other / "wandb.json").unlink()
    assert find_folder(runs, tracking.run_id("other")) == other
    with pytest.raises(RunError, match="no run 'from-a-sweep'"):
        find_folder(runs, "from-a-sweep")


# ----------------------------------------------------------------------------------------------------------- offline


KILLED = """
    import os, signal, sys
    from contextlib import closing
    from pathlib import Path
    from longhaul.telemetry import sinks as telemetry
    from longhaul.telemetry import tracking
    folder = Path(sys.argv[1])
    with (
        closing(telemetry.jsonl(folder / "metrics.jsonl")) as lines,
        tracking.mirror(folder, lambda line: None, lambda: False) as sink,
    ):
        for update in range(1, 8):
            row = {"update": update, "env_steps": update, "agent_steps": update, "wall_seconds": 1.0, "sps": 1.0}
            lines.write(row)
            sink.write(row)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@NEEDS_WANDB
@pytest.mark.slow
def test_killed_at_once_it_leaves_its_last_record_too(tmp_path: Path) -> None:
    """The run is killed while its tracker has not even begun: that sends what is in the file, and ends by itself."""
    folder = tracked_folder(tmp_path)
    program = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder)]
    done = subprocess.run(program, cwd=ROOT, stderr=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    write(folder, range(6, 10))  # waits for the tracker of the killed run
    assert read(folder).steps == list(range(1, 10))


@NEEDS_WANDB
@pytest.mark.slow
def test_the_folder_of_another_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one name share an id, and here the folder that wandb writes to as well."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "shared"))
    one, two = tracked_folder(tmp_path / "one"), tracked_folder(tmp_path / "two")
    write(one, range(1, 3))
    time.sleep(1.1)  # wandb names its folders by seconds
    write(two, range(1, 4))
    assert len(list((tmp_path / "shared/wandb").glob("offline-run-*"))) == 2


@NEEDS_WANDB
def test_without_credentials_it_says_that_it_stays_offline(tmp_path: Path) -> None:
    folder, notes = tracked_folder(tmp_path, mode=None), []
    write(folder, range(1, 2), notes=notes)
    assert notes[0] == "W&B: there are no credentials (wandb login, or WANDB_API_KEY), so the run is logged offline"
    (place,) = (folder / "wandb").glob("offline-run-*")
    assert notes[1:] == [f"W&B: offline; wandb sync {place}"]


# --------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@NEEDS_WANDB
def test_a_run_of_training_is_mirrored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What metrics.jsonl has, and nothing else, is in wandb's file."""
    small_runs.make_quick(monkeypatch)
    folder = tmp_path / "run"
    folder.mkdir()
    tracking.save(folder, {"wandb": tracking.Tracking("", True, "small", None, "offline")})
    small_runs.loop.train(small(), folder, resumed=False)
    found, records = read(folder), sinks.read(folder / "metrics.jsonl")
    assert found.steps == [r["update"] for r in records] == list(range(4, 61, 4))
    before = [None, *records[:-1]]
    for row, mine, last in zip(found.rows, records, before, strict=True):
        assert {k: v for k, v in row.items() if not k.startswith("_")} == wandb.renamed(mine, last)
        total = mine["ppo/policy_loss"] + 0.5 * mine["ppo/value_loss"] - 0.01 * mine["ppo/entropy"]
        assert row["train/total_loss"] == pytest.approx(total, rel=1e-5)
        assert row["train/mean_reward"] == 1.0
    assert (found.config["num_envs"], found.config["learning_rate"]) == (8, small().algorithm.lr)
    assert found.config["id"] == found.name == "run"


@NEEDS_WANDB
@pytest.mark.slow
def test_stopped_and_killed_a_run_has_one_history(tmp_path: Path) -> None:
    """SIGTERM, then SIGKILL of everything, then to the end by the run's W&B id."""
    words = "train cartpole --num-envs 8 --num-steps 16 --hidden-dim 8 --total-timesteps 3e6 --log-interval 100"
    words += " --save-interval 400 --evaluation-episodes 2 --checkpoint-dir checkpoints"
    command = [sys.executable, "-m", "longhaul", *words.split()]
    environment = os.environ | {"WANDB_MODE": "offline"}
    folder = tmp_path / "checkpoints/mine"
    metrics = folder / "metrics.jsonl"

    def begin(*more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, *more], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)

    def wait(process: subprocess.Popen[bytes], update: int) -> None:
        while not metrics.exists() or not sinks.read(metrics) or sinks.read(metrics)[-1]["update"] < update:
            assert process.poll() is None
            time.sleep(0.01)

    process = begin("--wandb", "--run-name", "mine")
    wait(process, 1000)
    process.terminate()
    assert process.wait(60) == 75
    first = read(folder)
    assert first.id == tracking.run_id("mine")
    assert first.exits == [75]
    for seen in (4000, 8000):
        process = begin("--resume-run", first.id)
        wait(process, seen)
        process.kill()
        process.wait(60)
    process = begin("--resume-run", first.id)
    assert process.wait(300) == 0
    last = read(folder)
    assert last[:3] == first[:3]
    run = load_run(folder)
    assert run.log_interval == 100
    total = int(3e6) // 128
    assert last.steps == [r["update"] for r in sinks.read(metrics)] == [*range(100, total, 100), total]
    assert last.exits == [0]


# ------------------------------------------------------------------------------------------------------------- faults

FAKE = """
    import json, os, signal, sys, time
    class Settings:
        def __init__(self, **options): pass
    def teardown(): pass
    class Run:
        url, resumed, starting_step = "https://w/run", {resumed}, {starting}
        class settings: sync_dir = os.environ["FAKE"]
        def log(self, row, step):
            {log}
            with open(os.environ["FAKE"] + "/log", "a") as file: print(step, file=file)
        def mark_preempting(self): pass
        def finish(self, exit_code):
            {finish}
            with open(os.environ["FAKE"] + "/exit", "w") as file: file.write(str(exit_code))
    def init(mode, id, resume=None, **rest):
        {init}
        return Run()
"""


class Server(NamedTuple):
    folder: Path

    @property
    def steps(self) -> list[int]:
        log = self.folder / "log"
        return [int(line) for line in log.read_text().split()] if log.exists() else []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(what its functions do) -> a wandb that the tracker finds before the real one."""

    def make(**parts: str) -> Server:
        whole = {"resumed": "False", "starting": "0", "log": "pass", "finish": "pass", "init": "pass"} | parts
        package = tmp_path / "fake"
        package.mkdir(exist_ok=True)
        (package / "wandb.py").write_text(textwrap.dedent(FAKE).format(**whole))
        monkeypatch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)
        # The bytecode of one written in the same second, as long, would be taken for it.
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        monkeypatch.setenv("FAKE", str(package))
        return Server(package)

    return make


def test_online_only_what_the_server_lacks_is_sent(tmp_path: Path, fake: Any) -> None:
    """Its last step is asked for: it may be before the checkpoint (a machine that failed) or after it (a kill)."""
    folder, notes = tracked_folder(tmp_path, mode="online"), []
    server = fake()
    write(folder, range(1, 6), notes=notes)
    assert notes == ["W&B: https://w/run"]
    assert server.steps == [1, 2, 3, 4, 5]
    for starting, begin, sent in ((4, 6, [4, 5, 6, 7]), (9, 7, [9]), (20, 8, [])):
        server = fake(resumed="True", starting=str(starting))
        (server.folder / "log").unlink(missing_ok=True)
        write(folder, range(begin, begin + 3 if starting == 9 else 8 if starting == 4 else 12))
        assert server.steps == sent


def test_a_server_that_cannot_be_reached_leaves_an_offline_folder(tmp_path: Path, fake: Any) -> None:
    folder, notes = tracked_folder(tmp_path, mode="online"), []
    server = fake(init="if mode == 'online': raise RuntimeError('no route to host\\nmore')")
    write(folder, range(1, 4), notes=notes)
    assert notes[0] == "W&B does not take the run (no route to host), so it is logged offline"
    assert server.steps == [1, 2, 3]
    assert "Traceback" in (folder / "wandb.log").read_text()


@pytest.mark.parametrize(
    ("parts", "phrase"),
    [
        ({"init": "raise RuntimeError('broken')"}, "W&B failed: broken"),
        ({"init": "os._exit(3)"}, "W&B"),
        ({"log": "raise RuntimeError('broken')"}, "W&B failed: broken"),
        ({"log": "os.kill(os.getpid(), signal.SIGSEGV)"}, "W&B"),
        ({"log": "time.sleep(1000)"}, "W&B did not finish"),
        ({"finish": "time.sleep(1000)"}, "W&B did not finish"),
    ],
)
def test_no_failure_of_wandb_ends_or_holds_up_a_run(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch, parts: dict[str, str], phrase: str
) -> None:
    fake(**parts)
    monkeypatch.setattr(tracking, "PATIENCE", 1.0 if "finish" in phrase else 60.0)  # who ends by himself may be slow
    folder, notes = tracked_folder(tmp_path), []
    write(folder, range(1, 2000), notes=notes)  # more words than a pipe holds, were none of them read
    failures = [note for note in notes if not note.startswith("W&B: offline")]
    assert 1 <= len(failures) <= 2
    assert phrase in failures[0]
    assert len(set(notes)) == len(notes)
    assert len(sinks.read(folder / "metrics.jsonl")) == 1999


def test_a_run_that_fails_says_so_and_its_error_goes_on(tmp_path: Path, fake: Any) -> None:
    server, folder = fake(), tracked_folder(tmp_path)
    with pytest.raises(ZeroDivisionError), tracking.mirror(folder, lambda line: None, lambda: False):
        _ = 1 / 0
    assert (server.folder / "exit").read_text() == "1"


def test_signals_stay_the_runs_own(tmp_path: Path, fake: Any) -> None:
    """SIGTERM reaches whole groups of processes: the tracker sends what there is, and then ends."""
    server, folder = fake(), tracked_folder(tmp_path)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.MonkeyPatch.context() as patch:
        started: list[Process] = []
        patch.setattr(tracking, "Process", lambda *words, **rest: started.append(Process(*words, **rest)) or started[0])
        with tracking.mirror(folder, lambda line: None, lambda: True):
            while not (server.folder / wandb.MARK).exists():
                time.sleep(0.02)
            for number in (signal.SIGTERM, signal.SIGINT):
                started[0].send(number)
            (folder / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert os.getpgid(0) != started[0].id
    assert server.steps == [1]
    assert (server.folder / "exit").read_text() == "75"


# --------------------------------------------------------------------------------------------- names of the old trainer


THEIRS = {
    *(f"train/{name}" for name in ("pg_loss", "vf_loss", "ent_loss", "total_loss", "entropy")),
    *(f"train/{name}" for name in ("approx_kl", "clip_frac")),
    *(f"train/{name}" for name in ("mean_reward", "mean_episode_length", "mean_episode_return", "num_episodes")),
    *(f"train/{name}" for name in ("updates_per_second", "update_step", "steps_per_second")),
    *(f"key/{name}" for name in ("mean_reward", "mean_episode_return", "mean_episode_length")),
    *(f"reward/{name}" for name in PARTS),
    *(f"actions/{name}_frac" for name in ("move", "siphon", "program")),
    "stats/highest_stage",
}
"""Metrics that the old trainer logs, and what its specification wanted it to."""


def test_a_record_of_hackmatrix_has_all_the_old_names() -> None:
    game = hackmatrix(boards=2)
    told = jax.eval_shape(lambda key: game.metrics(game.reset(key)[0]), jax.random.key(0))
    learnt = ("policy_loss", "value_loss", "total_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm", "lr")
    names = ["episode/count", "episode/return", "episode/length", *(f"episode/{name}" for name in told)]
    names += [f"peak/{name}" for name in game.spec.peaks] + [f"ppo/{name}" for name in learnt]
    found = wandb.renamed(record(4, **dict.fromkeys(names, 1.0)))
    ours = {"env_steps", "agent_steps", "wall_seconds", "ppo/grad_norm", "ppo/lr", "episode/stage", "episode/score"}
    assert set(found) == THEIRS | ours


def test_renaming_changes_units_as_the_old_trainer_has_them() -> None:
    told = {
        "episode/count": 6.0, "episode/return": -3.0, "episode/length": 20.0, "episode/reward_kills": 1.0,
        "episode/reward_damage_penalty": -4.0, "ppo/entropy": 2.0, "ppo/policy_loss": 0.25, "peak/stage": 3.0,
    }  # fmt: skip
    found = wandb.renamed(record(6, **told), record(4))
    assert found["train/mean_reward"] == found["key/mean_reward"] == -0.15
    assert (found["reward/kills"], found["reward/damage_penalty"]) == (0.05, -0.2)  # together the mean reward
    assert found["train/num_episodes"] == 3.0  # an update
    assert found["train/ent_loss"] == -found["train/entropy"] == -2.0
    assert found["train/steps_per_second"] == 640.0
    assert found["train/updates_per_second"] == 20.0  # of 32 steps each
    assert (found["train/update_step"], found["train/pg_loss"], found["stats/highest_stage"]) == (6, 0.25, 3.0)
    assert not [name for name in found if name.startswith(("episode/", "peak/"))]


def test_a_record_without_an_ended_episode_leaves_its_means_out() -> None:
    found = wandb.renamed(record(2, **{"episode/count": 0.0, "episode/return": None, "episode/length": None}))
    assert not [name for name in found if "mean_" in name]
    assert found["train/num_episodes"] == 0.0
