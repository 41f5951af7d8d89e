"""Policies on a hub, by Hugging Face's own library against a stand-in: what goes up, comes down and is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import longhaul
from longhaul.cli import main, push
from longhaul.config import recipes
from longhaul.config.run import Driving
from longhaul.training import export, hub, model_card
from tests.helpers import hub_server
from tests.helpers.hub_server import Hub
from tests.helpers.small_runs import quick_programs
from tests.training.test_init_from import SMALL

constants = pytest.importorskip("huggingface_hub.constants")

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the library's own, by its client

_programs = quick_programs(evaluated=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secret-place")
    longhaul.train("cartpole", runs_dir=folder, run_name="source", **SMALL)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with hub_server.serving() as found:
        yield found


@pytest.fixture(autouse=True)
def user(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who is signed in, with an empty cache."""
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in stores large files by git LFS


@pytest.fixture(scope="module")
def pushed(runs: Path, server: Hub) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.address)
        patch.setenv("HF_TOKEN", hub_server.TOKEN)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(export, "check", lambda policy, path, kind="jax": None)  # which test_export.py calls
        words = ["source", "hf:someone/pole", "--private", "--message", "first", "--licence", "mit"]
        assert push.push([*words, "--runs-dir", str(runs)]) == 0
    return "hf:someone/pole"


def test_a_pushed_repository_is_complete_and_names_no_machine(pushed: str, server: Hub, runs: Path) -> None:
    repository = server.repositories["someone/pole"]
    assert repository.private and repository.messages == ["first"]
    files = repository.commits[repository.head]
    assert sorted(files) == [
        *("README.md", "policy.jax", "policy.json", "policy.onnx", "policy.safetensors", "report.html", "run.json")
    ]
    assert {path for path, (_, large) in files.items() if large} == {"policy.jax", "policy.onnx", "policy.safetensors"}
    stored = json.loads((runs / "source" / "run.json").read_text())
    for content, _ in files.values():
        for secret in (str(runs), str(Path.cwd()), platform.node().ljust(3, "!"), hub_server.TOKEN, stored["platform"]):
            assert secret.encode() not in content
    about = json.loads(files["run.json"][0])
    page = files["report.html"][0].decode()
    assert "Learning curves" in page and "50" in page and stored["commit"][:12] in page
    assert about["commit"] == stored["commit"] and not about.keys() & {"host", "platform", "cpus", "command"}


def test_the_card_has_scores_with_intervals_and_how_to_load_it(pushed: str, server: Hub, runs: Path) -> None:
    repository = server.repositories["someone/pole"]
    card = repository.commits[repository.head]["README.md"][0].decode()
    _, front, text = card.split("---\n", 2)
    head = yaml.safe_load(front)
    estimate = longhaul.evaluate("source", runs_dir=runs).estimates["return"]
    (entry,) = head["model-index"][0]["results"]
    assert head["library_name"] == "longhaul" and head["license"] == "mit"
    assert {"type": "mean_return", "name": "mean return", "value": round(estimate.mean, 4)} in entry["metrics"]
    row = f"| return | {estimate.mean:.4g} | {estimate.low:.4g} to {estimate.high:.4g} | 4 |"
    words = "longhaul train cartpole --num-envs 4 --num-steps 8 --total-steps 128 --evaluation-episodes 4"
    for line in (row, 'longhaul.load("hf:someone/pole")', words, "--init-from hf:someone/pole", "Seed 3, 128 agent"):
        assert line in text
    assert "No recorded data: its environment, which makes its own episodes. Licence of this policy: mit." in text


def test_a_policy_from_the_hub_acts_and_scores_as_its_run(pushed: str, runs: Path, server: Hub) -> None:
    here, there = longhaul.load("source", runs_dir=runs), longhaul.load(pushed)
    jax.tree.map(np.testing.assert_array_equal, here.params, there.params)
    rows = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
    np.testing.assert_array_equal(here(rows), there(rows))
    taken = [line.rpartition("/")[2] for line in server.requests if "/resolve/" in line]
    assert set(taken) == set(hub.FILES)  # and no README, no program
    before = len(server.requests)
    assert (
        longhaul.evaluate(f"{pushed}@{server.repositories['someone/pole'].head}").mean == longhaul.evaluate(here).mean
    )
    assert len(server.requests) == before  # a commit that is in the cache needs no contact


def test_commands_take_its_address(pushed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, path in (("there", pushed), ("here", "source")):
        assert main.main(["evaluate", path, "--runs-dir", str(runs), "--json", f"{name}.json"]) == 0
    here, there = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("here", "there"))
    assert here.pop("run") == "source" and len(there.pop("run")) == 40 and here == there
    assert main.main(["export", pushed, "--to", "npz"]) == 0
    assert sorted(os.listdir(tmp_path / "export")) == ["policy.json", "policy.npz"]


@pytest.mark.slow
def test_a_run_begins_from_it_and_records_its_commit(
    pushed: str, server: Hub, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = longhaul.train("cartpole", runs_dir=runs, run_name="begun", init_from=pushed, **(SMALL | {"lr": 0.0}))
    assert begun.run.init_from == f"{pushed}@{server.repositories['someone/pole'].head}"
    assert "12 of 12 of the parameters, 3 of 3 of the normaliser" in capsys.readouterr().err
    before = longhaul.load("source", runs_dir=runs).params.params
    jax.tree.map(np.testing.assert_array_equal, begun.policy.params.params, before)


@pytest.mark.slow
def test_a_second_push_is_a_second_commit(pushed: str, server: Hub, runs: Path) -> None:
    repository = server.repositories["someone/pole"]
    first = repository.head
    assert main.main(["push", "source", "hf:someone/pole", "--runs-dir", str(runs), "--licence", "apache-2.0"]) == 0
    assert repository.messages[1:] == ["Policy of run source"] and repository.head != first
    assert hub.download(hub.parse(f"{pushed}@{first}")).name == first


REFUSED: dict[str, tuple[str, str]] = {
    "another address": ("push source gs://bucket/pole", "'gs://bucket/pole' is no address of a policy; write hf:"),
    "no name": ("push source hf:pole", "'hf:pole' is no address of a policy; write hf:USER/NAME"),
    "no address": ("push source", "where to? longhaul push RUN hf:USER/NAME"),
    "no run": ("push nowhere hf:someone/pole", "no run 'nowhere' in"),
    "a policy from there": ("push hf:someone/pole hf:someone/other", "is a policy without its run"),
    "no repository": ("evaluate hf:someone/nothing", "hf:someone/nothing: there is no such repository, or your token"),
    "no revision": ("evaluate hf:someone/pole@" + 40 * "0", "there is no such revision; leave it out for the newest"),
    "no such source": ("train cartpole --init-from hf:someone/nothing", "hf:someone/nothing: there is no such"),
    "resumed": ("train cartpole --resume hf://someone/pole", "hf://someone/pole is a policy without its run; give"),
    "status": ("status hf:someone/pole", "hf:someone/pole is a policy without its run; give a run"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_missing_repositories_and_files_are_one_line(
    case: str, pushed: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, says = REFUSED[case]
    capsys.readouterr()
    assert main.main([*words.split(), "--runs-dir", str(runs)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_a_token_that_is_missing_or_refused_and_no_contact_are_one_line(
    pushed: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> str:
        capsys.readouterr()
        assert main.main([*words, "--runs-dir", str(runs)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    monkeypatch.setattr(model_card, "write", lambda policy, folder, scratch, *_: (scratch / "file").write_text("x"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    assert "hf:someone/new: your token is refused (401)" in told("push", "source", "hf:someone/new")
    monkeypatch.delenv("HF_TOKEN")
    assert "no token of Hugging Face; run `hf auth login`, or set HF_TOKEN" in told("push", "source", "hf:someone/new")
    assert "there is no such repository, or your token may not see it" in told("evaluate", pushed)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "no contact with http://127.0.0.1:9, and it is not in the cache" in told("evaluate", pushed)


def test_a_repository_of_something_else_is_refused(server: Hub, pushed: str) -> None:
    whole = server.repositories["someone/pole"]
    files = dict(whole.commits[whole.head])
    other = hub_server.Repository(False, {"a" * 40: {"README.md": files["README.md"]}})
    files["policy.safetensors"] = _arrays(sun=np.zeros(3, np.float32)), True
    server.repositories |= {"someone/text": other, "someone/false": hub_server.Repository(False, {"b" * 40: files})}
    with pytest.raises(
        ValueError, match=r"text holds no policy of Longhaul: it lacks policy\.safetensors, policy\.json"
    ):
        longhaul.load("hf:someone/text")
    with pytest.raises(ValueError, match=r"is not the policy of the run\.json beside it: .* is .*; push it again"):
        longhaul.load("hf:someone/false")


def _arrays(**arrays: np.ndarray) -> bytes:
    from safetensors.numpy import save

    return bytes(save(arrays))


def test_paths_are_cut_to_their_last_part() -> None:
    given = {"data": ["/home/me/logs/womd", "~/x/*.tfrecord"], "env": "ale/pong", "lr": 0.1, "init": "gs://b/runs/a@12"}
    found = {"data": ["womd", "*.tfrecord"], "env": "ale/pong", "lr": 0.1, "init": "a@12"}
    assert model_card.without_paths(given) == found
    asked = {"data": ["/a/b c"], "anneal": False, "total_steps": 7, "shared": True}
    line = "longhaul train driving --data 'b c' --no-anneal --total-steps 7 --shared"
    assert model_card.command("driving", asked) == line


def test_recorded_data_and_its_terms_are_named() -> None:
    run = dataclasses.replace(recipes.recipe("driving"), environment=Driving(data=("/home/me/womd/*.tfrecord",)))
    text = model_card.data(run, {"data": {"scenarios": 3, "sha256": "ab12"}}, None)
    assert text.startswith("Recorded data: `*.tfrecord` (scenarios 3, sha256 ab12). Publishers' terms bind")
    assert text.endswith("The publisher of this policy named no licence.")
