"""Whole runs with central inference: actors in processes are killed, runs are stopped, and what can't be is refused."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from longhaul.algorithms.config import PPOConfig
from longhaul.config.run import Driving, Named, Run
from longhaul.driving.shards import stream
from longhaul.driving.sim import config as simulator
from longhaul.driving.sim import shared_bank
from longhaul.networks.config import NetworkConfig
from longhaul.runtime.errors import RunError
from longhaul.telemetry.aggregate import Sums
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.topologies.inference_server import learner as topology
from longhaul.topologies.inference_server.config import ServerConfig
from longhaul.training import final_evaluation, loop
from tests.helpers.inference_server_runs import POLES, processes
from tests.helpers.small_runs import after, begin, checkpoints, records, result, resume, small
from tests.training.test_data import BANK, COUNT, EGO, SCENARIOS, written


def in_processes(**changes: Any) -> Run:
    settings: dict[str, Any] = {
        "environment": Named(str(POLES)), "topology": "central", "acting": ActorConfig(2, staleness=1), "num_envs": 16,
        "total_steps": 8 * 16 * 60, "num_steps": 8,
    }  # fmt: skip
    return small(**(settings | changes))


@pytest.mark.slow
def test_a_killed_actor_is_replaced_and_a_run_goes_on_from_its_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An actor is killed in one update, the whole run stopped in a later one: each update is made once."""
    before, run, real = processes(), in_processes(), topology.central
    monkeypatch.setattr(final_evaluation, "evaluations", lambda *_, **__: iter(()))
    killed: list[int] = []

    def central(*args: Any, **options: Any) -> Any:
        for progress, n, rows in real(*args, **options):
            if int(progress.updates) == 5:
                killed.extend(sorted(processes() - before)[:1])
                os.kill(killed[-1], signal.SIGKILL)
            if int(progress.updates) == 40 and len(killed) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield progress, n, rows

    monkeypatch.setattr(topology, "central", central)
    folder = tmp_path / "run"
    assert begin(run, folder).code == loop.STOPPED
    assert processes() == before, "something is left"
    killed.append(-1)
    assert resume(folder).code == 0
    assert processes() == before
    found = records(folder)
    assert [row["update"] for row in found] == sorted({row["update"] for row in found})
    assert found[-1]["update"] == 60
    assert found[-1]["agent_steps"] == 60 * 128
    assert sum(row["central/lost"] for row in found) > 0, "nobody was killed"
    assert max(row["central/staleness_max"] for row in found) == 1


TASKS = {
    "poles": Named(str(POLES)),
    "cartpole": Named("cartpole"),
    "driving": Driving(
        scenarios=4, horizon=12, simulator=simulator.Config(agents=2, neighbours=2, waypoints=2, conditioning=True)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_run_without_staleness_that_was_stopped_ends_as_one_that_was_not(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_evaluation, "evaluations", lambda *_, **__: iter(()))
    acting = ActorConfig(2, staleness=0)
    environment = TASKS[task]
    steps = 8 * 16 * (environment.simulator.agents if isinstance(environment, Driving) else 1)
    run = in_processes(environment=environment, acting=acting, total_steps=12 * steps, log_interval=1)
    assert begin(run, tmp_path / "whole").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(Sums, "add", after(5, lambda: signal.raise_signal(signal.SIGINT), Sums.add))
        assert begin(run, tmp_path / "cut").code == loop.STOPPED
    assert resume(tmp_path / "cut").code == 0
    assert result(tmp_path / "cut") == result(tmp_path / "whole")
    told = [[kept(row) for row in records(tmp_path / name)] for name in ("cut", "whole")]
    assert told[0] == told[1]


@pytest.mark.slow
def test_actors_drive_in_one_chunk_after_the_other_also_if_the_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops lie at the end of a chunk, after update 3, and within one, after update 5."""
    monkeypatch.setattr(final_evaluation, "evaluations", lambda *_, **__: iter(()))
    (tmp_path / "shards").mkdir()
    task = Driving((str(written(tmp_path / "shards")),), bank=BANK, bank_updates=3, simulator=EGO)
    run = in_processes(
        environment=task, acting=ActorConfig(2, staleness=0), num_envs=8, num_steps=5, total_steps=8 * 5 * 6,
        log_interval=1, save_interval=3, block=1,
    )  # fmt: skip
    driven, real = [], shared_bank.sharing

    def sharing(tables: Any) -> Any:
        driven.append(tables.route_length[:, 0].tolist())
        return real(tables)

    monkeypatch.setattr(shared_bank, "sharing", sharing)
    assert begin(run, tmp_path / "whole").code == 0
    position: Any = (0, 0)
    assert len(driven) == 2
    for lengths in driven:
        chosen, position = stream.picks(COUNT, BANK, position, seed=3)
        assert lengths == [SCENARIOS[i].route_length[0] for i in chosen]
    folder = tmp_path / "cut"
    for updates, last in ((2, 3), (1, 5)):
        with monkeypatch.context() as patch:
            patch.setattr(Sums, "add", after(updates, lambda: signal.raise_signal(signal.SIGINT), Sums.add))
            assert (resume(folder) if folder.exists() else begin(run, folder)).code == loop.STOPPED
        assert checkpoints(folder)[-1] == last
    assert resume(folder).code == 0
    assert result(folder) == result(tmp_path / "whole")
    assert [kept(row) for row in records(folder)] == [kept(row) for row in records(tmp_path / "whole")]


@pytest.mark.slow
@pytest.mark.parametrize(("actions", "lane"), [("discrete", "shm"), ("continuous", "grpc")])
def test_driving_that_learns_nothing_acts_as_its_policy_says(actions: str, lane: str, tmp_path: Path) -> None:
    """With lr 0 the learner finds again what the server drew, with memory too."""
    settings = {"agents": 2, "neighbours": 2, "waypoints": 2, "conditioning": True, "actions": actions}
    task = Driving(scenarios=4, horizon=12, simulator=simulator.Config(**settings))
    network = NetworkConfig(hidden_dim=8, memory=8)
    learns = PPOConfig(num_minibatches=1, update_epochs=1, lr=0.0, network=network)
    run = in_processes(
        environment=task, algorithm=learns, acting=ActorConfig(2, staleness=0), central=ServerConfig(lane),
        total_steps=4 * 8 * 16 * 2, log_interval=1,
    )  # fmt: skip
    assert begin(run, tmp_path / "run").code == 0
    rows = records(tmp_path / "run")
    assert len(rows) == 4
    assert max(abs(row["ppo/approx_kl"]) for row in rows) < 1e-6
    assert sum(row["episode/count"] for row in rows) >= 8 * 2  # 32 steps of at most 11
    assert {"episode/collision", "episode/progress"} <= set(rows[-1])


def kept(record: dict[str, Any]) -> dict[str, Any]:
    """What is no matter of time."""
    names = ("central/actor_wait", "central/learner_wait", "central/inference", "central/batch", "central/fill")
    return {name: value for name, value in record.items() if name not in names}


def test_a_reward_that_actors_can_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "pay", lambda step: 0.0, raising=False)
    with pytest.raises(RunError, match="--reward is __main__:pay, which processes of actors can't import; put it into"):
        in_processes(environment=Driving(simulator=simulator.Config(reward="__main__:pay")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"acting": ActorConfig(3)}, "--num-envs is 16, which 3 actors with 2 groups each .* choose a multiple of 6"),
        ({"acting": ActorConfig(2, pin=True, staleness=1)}, "--pin is on, and central inference acts with the newest"),
        ({"acting": ActorConfig(2, staleness=-1)}, "--staleness is -1; it must be at least 0, or none"),
        (
            {"environment": Driving(("logs",), bank=4), "central": ServerConfig("grpc", bind="127.0.0.1:1")},
            "--bank is 4, and actors on other machines hold all scenarios; leave it out, or leave --bind out",
        ),
        ({"central": ServerConfig(slots=0)}, "--slots is 0; it must lie in 1 to 8"),
        ({"central": ServerConfig(slots=0), "acting": ActorConfig()}, "--slots is 0; it must lie in 1 to 8"),
        ({"central": ServerConfig("pigeon")}, "--lane is 'pigeon'; it must be one of shm, grpc"),
        ({"central": ServerConfig(bind="127.0.0.1:1")}, "--bind is given, and --lane is shm, which has no address"),
        (
            {"central": ServerConfig("grpc", bind="0.0.0.0:1")},
            "--bind is 0.0.0.0:1, .* give --token-file and --tls-cert",
        ),
        ({"central": ServerConfig("grpc", bind="nowhere")}, "^--bind 'nowhere' is no address; write HOST:PORT"),
    ],
)
def test_runs_that_can_not_be_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        in_processes(**changes)
