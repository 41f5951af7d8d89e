"""Runs side by side: each as if it were alone, whatever the others do; cut and gone on with exactly; and evolving."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import pbt
from longhaul.algorithms.config import PPOConfig
from longhaul.config import recipes
from longhaul.config import resolve as resolution
from longhaul.config.population import Member, Population, members, sweeps
from longhaul.config.resolve import resolve
from longhaul.config.run import Driving, Named, Run
from longhaul.networks.config import NetworkConfig
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.telemetry import sinks
from longhaul.telemetry.aggregate import Sums
from longhaul.training import loop
from longhaul.training import members as training_members
from longhaul.training.checkpoint import resume as resumption
from longhaul.training.checkpoint.checkpoint import Checkpoint
from longhaul.training.checkpoint.resume import restore_policy
from longhaul.training.data import spec
from tests.helpers import small_runs
from tests.helpers.small_runs import begin, records, resume

SWEEP = Population(seeds=2, sweep=("lr=1e-3,3e-3",))
NARROW = PPOConfig(num_minibatches=2, update_epochs=1, lr=3e-3, network=NetworkConfig(hidden_dim=8, num_layers=1))
QUICK = {"total_steps": 8 * 16 * 12, "evaluation_episodes": 3, "devices": 2, "algorithm": NARROW}


def small(**changes: Any) -> Run:
    """12 updates of CartPole by 4 runs: seeds 3 and 4, with two learning rates."""
    return small_runs.small(**({"population": SWEEP} | QUICK | changes))


def params(folder: Path, member: int | None = None) -> Any:
    return restore_policy(folder, member)[1].params


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    run, folder = small(), tmp_path_factory.mktemp("runs") / "four"
    assert begin(run, folder).code == 0
    return run, folder


def member_lines(folder: Path) -> list[dict[str, Any]]:
    found = sinks.read(folder / training_members.FILE)
    return [{k: v for k, v in line.items() if k not in small_runs.TIMES} for line in found]


# --------------------------------------------------------------------------------------------------- as if alone


def test_each_run_is_that_of_a_program_of_its_own(four: tuple[Run, Path], tmp_path: Path) -> None:
    _, folder = four
    told = json.loads((folder / "result.json").read_text())["members"]
    assert [(row["seed"], row["hyperparameters"]["lr"]) for row in told] == [(3, 1e-3), (4, 1e-3), (3, 3e-3), (4, 3e-3)]
    which = 2
    seed, lr = told[which]["seed"], told[which]["hyperparameters"]["lr"]
    changes = {"devices": 1, "seed": seed, "algorithm": dataclasses.replace(NARROW, lr=lr)}
    alone = small_runs.small(**QUICK | changes)
    outcome = begin(alone, tmp_path / str(which))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6),
        params(folder, which), params(tmp_path / str(which)),
    )  # fmt: skip
    assert outcome.result is not None
    assert told[which]["evaluation"] == outcome.result["evaluation"]
    for mine, single in zip(member_lines(folder), records(tmp_path / str(which)), strict=True):
        assert mine["update"] == single["update"] and mine["agent_steps"] == single["agent_steps"]
        for name in ("episode/return", "episode/count", "ppo/entropy", "ppo/lr", "ppo/value_loss"):
            assert mine[name][which] == pytest.approx(single[name], rel=1e-3, abs=1e-6), name


def test_records_have_the_mean_and_the_spread_of_the_runs(four: tuple[Run, Path]) -> None:
    _, folder = four
    for mean, each in zip(records(folder), member_lines(folder), strict=True):
        for name in ("episode/return", "ppo/entropy", "hyper/lr"):
            assert mean[name] == pytest.approx(np.mean(each[name]))
            assert mean[f"{name}_std"] == pytest.approx(np.std(each[name], ddof=1))
    result = json.loads((folder / "result.json").read_text())
    scores = [row["evaluation"]["trained"]["return"] for row in result["members"]]
    low, high = scores[:2], scores[2:]  # of the settings lr=0.001 and lr=0.003
    scores = max(low, high, key=np.mean)
    assert result["setting"] == ("lr=0.003" if scores is high else "lr=0.001")
    assert result["evaluation"]["trained"]["return"] == pytest.approx(np.mean(scores))
    assert result["spread"]["trained"]["return"] == pytest.approx(np.std(scores, ddof=1))
    assert len({row["params_sha256"] for row in result["members"]}) == 4
    page = (folder / "report.html").read_text()
    assert 'class="band s0"' in page and "lr=0.003" in page
    ranks = re.findall(r"<td>(\d)</td><td>(lr=[\d.]+)</td><td>2</td>", page)
    assert ranks[0] == ("1", result["setting"]) and len(ranks) == 2
    assert "mean of 4" not in page  # no mean over settings


@pytest.mark.slow
def test_how_runs_are_laid_out_changes_nothing_but_last_bits(four: tuple[Run, Path], tmp_path: Path) -> None:
    _, folder = four
    other = small(devices=1, population=dataclasses.replace(SWEEP, together=4))
    begin(other, tmp_path / "together")
    for which in range(4):
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-5),
            params(folder, which), params(tmp_path / "together", which),
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------- cut and gone on


@pytest.mark.slow
def test_a_stopped_population_goes_on_to_the_same_end(
    four: tuple[Run, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = four
    cut = tmp_path / "four"
    take = small_runs.after(2, lambda: os.kill(os.getpid(), signal.SIGTERM), Sums.add)
    with monkeypatch.context() as patch:
        patch.setattr(Sums, "add", take)
        assert begin(run, cut).code == loop.STOPPED
    assert not (cut / "result.json").exists()
    assert resume(cut).code == 0
    assert records(cut) == records(folder)
    assert member_lines(cut) == member_lines(folder)
    assert small_runs.result(cut) == small_runs.result(folder)


# ------------------------------------------------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("lr=1e-4..1e-3:3", (1e-4, 10**-3.5, 1e-3)),
        ("gamma=0.9..0.99:4", (0.9, 0.93, 0.96, 0.99)),
        ("clip-eps=0.1,0.2", (0.1, 0.2)),
        ("ent_coef=0..1:3", (0.0, 0.5, 1.0)),
    ],
)
def test_a_sweep_is_even_on_its_scale(word: str, values: tuple[float, ...]) -> None:
    ((_, found),) = sweeps((word,)).items()
    assert found == pytest.approx(values, rel=1e-6)


def test_several_sweeps_and_seeds_make_every_combination() -> None:
    found = members(Population(2, ("lr=1e-4,1e-3", "gamma=0.9,0.99")), 5)
    assert len(found) == 8 and len({(m.seed, *m.values.values()) for m in found}) == 8
    assert found[1] == Member(6, {"lr": 1e-4, "gamma": 0.9})


@pytest.mark.parametrize(("there", "taken"), [(1, 1), (2, 2), (3, 2), (4, 4)])
def test_by_default_runs_are_on_as_many_cores_as_share_them_evenly(
    there: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolution, "cores", lambda: there)
    assert small(devices=None).devices == taken


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"population": Population(sweep=("lr=1e-3..1e-4:3",))}, "LOW < HIGH"),
        ({"population": Population(sweep=("lr=1e-3..1e-2",))}, "COUNT"),
        ({"population": Population(sweep=("lr=",))}, "--sweep is"),
        ({"population": Population(sweep=("hidden-dim=32,64",))}, "--sweep is of 'hidden-dim'"),
        ({"population": Population(sweep=("gamma=0.5,1.5",))}, "--gamma is 1.5"),
        ({"population": Population(sweep=("scenarios=4,8",))}, "--sweep is of 'scenarios', no number that can be"),
        (
            {"population": Population(sweep=("scenarios=4,8.5",)), "environment": Driving()},
            "--sweep is of scenarios=8.5; give whole numbers, 1 to",
        ),
        (
            {"population": Population(sweep=("scenarios=4,8",), pbt_interval=4), "environment": Driving()},
            "--pbt-interval is 4, and scenarios are swept",
        ),
        (
            {"population": Population(sweep=("scenarios=4,8",)), "environment": Driving(data=("logs",))},
            "--sweep is of 'scenarios', no number that can be swept",
        ),
        ({"population": Population(seeds=0)}, "--seeds is 0"),
        ({"population": Population(seeds=3, pbt_interval=4)}, "give --sweep"),
        ({"population": SWEEP, "deterministic": True, "num_envs": 8}, "--deterministic does not go with --seeds"),
        ({"population": SWEEP, "devices": 3}, "can't share 4 runs"),
        ({"population": SWEEP, "topology": "actors"}, "--topology actors does not go with --seeds"),
    ],
)  # fmt: skip
def test_impossible_sweeps_are_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(RunError, match=line):
        resolve(dataclasses.replace(Run("small", Named("cartpole"), PPOConfig()), **changes))


def test_a_hyperparameter_that_shapes_the_program_is_refused() -> None:
    with pytest.raises(ValueError, match="--sweep names width"):
        pbt.tuned(_shaped, ("width",))


def _shaped(values: Any) -> Any:
    class Made:
        memory = staticmethod(lambda columns: ())
        init = staticmethod(lambda key: jnp.zeros(int(values.get("width", 2))))

    return Made()


def test_a_member_must_be_named(four: tuple[Run, Path]) -> None:
    _, folder = four
    with pytest.raises(RunError, match="holds 4 runs; give --member 0 to 3"):
        restore_policy(folder)
    with pytest.raises(RunError, match="--member is 4; it must be 0 to 3"):
        restore_policy(folder, 4)
    assert restore_policy(folder, 1)[0].seed == 4


def test_runs_side_by_side_keep_their_environments(four: tuple[Run, Path]) -> None:
    run, _ = four
    found = Checkpoint("12", {"step": 12, "metadata": {"sizes": {name: getattr(run, name) for name in resumption.SIZES},
                                                  "steps": {"agent_steps": 0}, "origin": {}}})  # fmt: skip
    assert resumption.standing(run, found).updates == 12
    with pytest.raises(RunError, match="--num-envs is 16, and the runs"):
        resumption.standing(dataclasses.replace(run, num_envs=16), found)


# --------------------------------------------------------------------------------------- numbers that are not finite


def test_a_run_that_diverges_harms_no_other() -> None:
    lines: list[str] = []
    watch, sums = training_members.Watch(3, lines.append), Sums(3)
    finite = np.array([[True, True, True], [True, False, True]])
    rows = {"finite": finite, "episodes": np.ones((2, 3)), "episode/return": np.array([[1.0, 2, 3], [1, np.nan, 5]])}
    sums.add(2, watch.look(rows, 2, 2))
    again = Sums(3, json.loads(json.dumps(sums.pending())))
    record = again.take()
    assert record["episode/return"] == 2.5 and record["episode/return_std"] == pytest.approx(np.sqrt(4.5))
    assert "finite" not in again.each and lines == [
        "run 1 has numbers that are not finite; the others go on (updates 1 to 2)"
    ]
    with pytest.raises(RunError, match="no run has finite numbers"):
        watch.look(rows | {"finite": np.zeros((1, 3), bool)}, 1, 3)


# ------------------------------------------------------------------------------------------- population-based training


@pytest.mark.slow
def test_evolution_finds_the_learning_rate_that_learns(tmp_path: Path) -> None:
    """Of rates from 1e-7 to 1e-2 only those near the upper end learn the probe; the whole population moves there."""
    evolving = Population(sweep=("lr=1e-7..1e-2:10",), pbt_interval=5)
    run = resolve(
        Run(
            "pbt", Named("probe/action"), replaced(
                PPOConfig(), hidden_dim=8, num_minibatches=1, update_epochs=2, anneal=False
            ),
            population=evolving, total_steps=8 * 8 * 60, num_envs=8, num_steps=8, log_interval=5, evaluation_episodes=2,
        )
    )  # fmt: skip
    begin(run, tmp_path / "pbt")
    rates = np.array([line["hyper/lr"] for line in member_lines(tmp_path / "pbt")])
    assert np.median(rates[0]) < 1e-4 and np.median(rates[-1]) > 1e-3
    assert rates[-1].max() <= 1e-2 * (1 + 1e-6)


# ------------------------------------------------------------------------------------------------------- on two cores


@pytest.mark.slow
@pytest.mark.parametrize("together", ["1", "4"])
def test_two_cores_do_not_hang(together: str, tmp_path: Path) -> None:
    """The trap of vmapped training runs, at whose place ours would stand still for ever."""
    words = ["train", "cartpole", "--seeds", "8", "--num-envs", "4", "--num-steps", "32", "--total-steps", "6400"]
    words += ["--together", together, "--runs-dir", str(tmp_path), "--run-name", "a", "--evaluation-episodes", "2"]
    env = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    two = sorted(os.sched_getaffinity(0))[:2]
    with open(tmp_path / "log", "w") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "longhaul", *words], env=env, stdout=log, stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, two),
        )  # fmt: skip
        try:
            assert _working(child, quiet=90.0) == 0, (tmp_path / "log").read_text()
        finally:
            child.kill()
            child.wait()


def _working(child: subprocess.Popen[Any], quiet: float) -> int | None:
    """The child's exit code; None where it used no time of a processor for `quiet` seconds: it hangs, however busy the
    machine is."""
    used, since = 0.0, time.monotonic()
    while child.poll() is None and time.monotonic() - since < quiet:
        time.sleep(0.2)
        try:
            fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        now = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        if now > used + 0.05:
            used, since = now, time.monotonic()
    return child.poll()


def test_acting_states_are_restored_without_a_replay() -> None:
    """Whose places depend on the scenarios that a run trains in, which who evaluates it need not have."""
    run = resolve(replaced(recipes.recipe("pendulum-sac"), seeds=2, hidden_dim=8))
    algorithm, states = training_members.initial_states(run, spec(run))
    assert states.state.replay == () and jax.tree.leaves(algorithm.policy(states))
    sizes = sum(leaf.size for leaf in jax.tree.leaves(states))
    assert sizes < run.algorithm.replay_size  # of steps
