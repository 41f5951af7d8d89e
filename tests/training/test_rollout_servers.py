"""Weights that go out to servers, and their completions as data of a learner; whole runs are in end_to_end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.reasoning import rollout_servers as requests
from longhaul.reasoning import tokenizer
from longhaul.reasoning.rollout_servers import DIALECTS, Answer, Refused, Rules, Server, Servers
from longhaul.training import rollout_servers
from longhaul.training.rollout_servers import ByFolder, ByThemselves, Fleet
from longhaul.weight_sync import sglang, vllm
from tests.helpers.rollout_server import RolloutServer

RULES = Rules(4, 1.0, (9,), (), 10)
PARAMS = {"w": np.arange(6, dtype=np.float32)}


def fleet(updates: Any, epoch: int | None, addresses: list[str], dialect: str = "vllm") -> Fleet:
    def servers(version_of: Any, revive: Any) -> Servers:
        return Servers(addresses, DIALECTS[dialect], RULES, version_of, revive, patience=60.0)

    return Fleet(updates, epoch, lambda params: params, servers)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_versions_reach_servers_as_folders_and_one_that_was_away_gets_the_newest(
    dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "LOOK", 0.01)
    monkeypatch.setattr(requests, "REST", 0.01)
    loaded: list[str] = []
    load_route = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}[dialect]
    with RolloutServer(load=loaded.append) as one, RolloutServer() as other:
        engine = {"vllm": vllm.Http, "sglang": sglang.Http}[dialect]
        made = fleet(ByFolder(tmp_path, "run", 77, {}, engine), 77, [one.address, other.address], dialect)
        seconds, paused = made.bring(1, PARAMS)
        assert seconds > paused > 0.0
        assert (one.label, other.label) == ("77-1", "77-1")
        assert made.bring(1, PARAMS)[1] == 0.0  # they have it
        other.fault = lambda route: "error" if route == load_route else None
        made.bring(2, PARAMS)
        assert (one.label, other.label) == ("77-2", "77-1")
        assert [server.why is None for server in made.servers.all] == [True, False]
        (group,) = made.servers.complete([requests.Ask((1, 2), 2, 0)], 2)  # by the one that has it
        assert [answer.version for answer in group] == [(2,), (2, 2)]
        other.fault, one.fault = lambda route: None, lambda route: "die"
        (group,) = made.servers.complete([requests.Ask((1, 2), 1, 0)], 2)
        assert other.label == "77-2" and group[0].version == (2,)
        assert [Path(each).name for each in loaded] == ["version-77-1", "version-77-2"]
        made.close()


def test_a_server_gets_a_folder_by_its_own_label_also_where_a_version_comes_meanwhile(tmp_path: Path) -> None:
    """One that is revived while the run goes on would serve older weights as the newest."""
    loaded: list[tuple[str, str]] = []

    class Engine:
        def pause(self) -> None:
            if not loaded:
                updates.offer(2, lambda: PARAMS, "77-2")

        def reload(self, folder: str, weight_version: str) -> None:
            loaded.append((Path(folder).name, weight_version))

        def resume(self) -> None: ...

    updates = ByFolder(tmp_path, "run", 77, {}, lambda address: Engine())
    updates.offer(1, lambda: PARAMS, "77-1")
    for _ in range(2):
        updates.load(Server("http://127.0.0.1:1"))
    assert loaded == [("version-77-1", "77-1"), ("version-77-2", "77-2")]
    updates.close()


@pytest.mark.parametrize("label", ["default", "76-1", "1", "77-3", "77-", "x77-1", "77-1x"])
def test_a_label_of_no_version_of_this_run_is_refused(label: str) -> None:
    made = fleet(ByThemselves(), 77, ["http://127.0.0.1:1"])
    made.version = 2
    assert made._version_of("77-2") == 2
    with pytest.raises(Refused, match="no version of this run's"):
        made._version_of(label)
    made.close()


def test_servers_that_follow_the_run_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LOOK", 0.01)
    monkeypatch.setattr(requests, "REST", 0.01)
    with RolloutServer() as server:
        server.label = "0"
        made = fleet(ByThemselves(), None, [server.address], "completions")
        made.bring(1, PARAMS, 1)
        assert "it has version 0, and 1 is the oldest" in str(made.servers.all[0].why)

        def follows(route: str) -> None:
            server.label = str(int(len(server.asked) > 4))

        server.fault = follows
        (group,) = made.servers.complete([requests.Ask((5,), 1, 0)], 1)
        assert group == [Answer((5,), (-0.5,), (1,))]
        assert len(server.asks("/v1/completions")) == 1  # nothing was asked of the older version
        made.close()


def test_a_vllm_that_restarts_is_initialised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Engine:
        def __init__(self, publisher: Any, engine: Any, addresses: Any, token: Any) -> None:
            told.append("init")
            self.paused = 0.25

        def load(self, version: int, sizes: Any, seconds: float, label: str) -> None:
            told.append(label)

    monkeypatch.setattr(vllm, "Rollout", Engine)
    updates = rollout_servers.ByPlugin("shm:@test-restart", "run", 5, None)
    server = Server("http://127.0.0.1:1")
    for version, why in ((1, None), (2, None), (2, "it was away"), (3, None)):
        if told[-1:] != [f"5-{version}"]:
            updates.offer(version, lambda: PARAMS, f"5-{version}")
        server.why = why
        assert updates.load(server) == 0.25
    assert told == ["init", "5-1", "5-2", "init", "5-2", "5-3"]
    updates.close()


def test_completions_are_laid_out_for_the_learner() -> None:
    words = tokenizer.stopped(tokenizer.BYTES, "!")
    text = [ord(each) for each in "ab!c"]
    answers = [[Answer(tuple(text), (-1.0, -2.0, -3.0, -4.0), (4, 4, 5, 5)), Answer((97,), (-0.5,), (5,))]]
    data = rollout_servers.filled(np.array([[-1, 7]]), np.array([3]), answers, 5, words)
    assert data.prompt.tolist() == [[-1, 7], [-1, 7]] and data.problem.tolist() == [3, 3]
    assert data.token.tolist() == [[97, 98, 33, -1, -1], [97, -1, -1, -1, -1]]
    assert data.log_prob.tolist() == [[-1.0, -2.0, -3.0, 0.0, 0.0], [-0.5, 0.0, 0.0, 0.0, 0.0]]
    assert (data.behaviour == data.log_prob).all()  # nothing is cut from the distribution
    assert data.written.sum(axis=1).tolist() == [3, 1] and data.version.tolist() == [4, 5]
    assert (data.taken == data.written).all() and not data.taught.any()
