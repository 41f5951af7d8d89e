"""`longhaul doctor`: what it says of sick and healthy runs and recipes, and its exit codes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from longhaul.algorithms.config import PPOConfig
from longhaul.cli import doctor, main
from longhaul.networks.config import NetworkConfig
from longhaul.telemetry import health, health_log, sinks
from longhaul.training import data, loop
from longhaul.training.run_dir import save_run
from tests.helpers.small_runs import small


def test_who_learns_from_a_replay_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "pendulum-sac"]) == 2
    assert (
        "doctor pendulum-sac: SAC learns from a replay, and this is for algorithms without" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_learning_rate_of_ten_is_a_run_that_fails(longhaul: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that no longer looks: found while it trains, by the doctor afterwards, and on the report's page."""
    ill = PPOConfig(num_minibatches=2, update_epochs=1, lr=10.0, network=NetworkConfig(hidden_dim=8))
    folder = Path("runs/ill")
    folder.mkdir(parents=True)
    loop.train(small(algorithm=ill), folder, resumed=False)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert any("entropy is" in line for line in said)
    assert {finding.check for finding in health_log.read(folder)} >= {"entropy"}
    assert "hardly explores" in (folder / "report.html").read_text()
    code, out, _ = longhaul("doctor", "ill", "--json", "found.json")
    assert code == main.FAILED
    found = json.loads(Path("found.json").read_text())
    by_name = {check["check"]: check for check in found["checks"]}
    assert found["verdict"] == "fail"
    assert by_name["entropy"]["verdict"] == "fail" and by_name["entropy"]["remedy"]
    assert by_name["records"]["verdict"] == "pass"
    assert any(line.startswith("entropy") and "fail" in line for line in out.splitlines())


def _finished(folder: Path, records: list[dict[str, Any]]) -> None:
    """A run's files without a run."""
    folder.mkdir(parents=True)
    save_run(folder, small(), {})
    sink = sinks.jsonl(folder / "metrics.jsonl")
    for record in records:
        sink.write(record)
    sink.close()


def _record(update: int, **changes: float) -> dict[str, float]:
    steps = 128 * update
    healthy = {
        "ppo/lr": 3e-3, "ppo/entropy": 0.5, "ppo/approx_kl": 0.01, "ppo/clip_fraction": 0.1, "ppo/value_loss": 1.0,
        "episode/count": 5.0, "episode/return": float(update), "episode/length": 20.0, "sps": 1e4,
    }  # fmt: skip
    return {"update": update, "env_steps": steps, "agent_steps": steps, "wall_seconds": 1.0} | healthy | changes


def test_a_run_fails_whose_problem_lasts_to_its_end(longhaul: Any) -> None:
    _finished(Path("runs/well"), [_record(update) for update in range(1, 61)])
    code, out, _ = longhaul("doctor", "well")
    assert code == 0 and " fail" not in out and " warn" not in out
    _finished(Path("runs/was"), [_record(u, **{"ppo/approx_kl": 0.3 * (u < 40)}) for u in range(1, 61)])
    code, out, _ = longhaul("doctor", "was")
    assert code == 0 and "1 warn" in out, "what is over warns"
    _finished(Path("runs/is"), [_record(u, **{"ppo/approx_kl": 0.3 * (u > 40)}) for u in range(1, 61)])
    code, out, _ = longhaul("doctor", "is", "--json", "-")
    plain = json.loads(out)
    assert code == 1 and [c["check"] for c in plain["checks"] if c["verdict"] == "fail"] == ["kl"]
    _finished(Path("runs/twice"), [_record(u) for u in (1, 2, 2, 3)])
    assert longhaul("doctor", "twice")[0] == 1
    _finished(Path("runs/solved"), [_record(u, **{"ppo/explained_variance": -160.0}) for u in range(1, 61)])
    code, out, _ = longhaul("doctor", "solved", "--json", "-")
    critic = next(check for check in json.loads(out)["checks"] if check["check"] == "critic")
    assert code == 0 and critic["verdict"] == "warn" and "-1.6e+02" in critic["value"], "no finding, and no pass"
    _finished(Path("runs/new"), [])
    code, out, _ = longhaul("doctor", "new")
    assert code == 0 and " skip" in out
    assert longhaul("doctor", f"file://{Path('runs/new').absolute()}")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a run or a recipe"),
        (("cartpol",), "no run or recipe is named 'cartpol'; did you mean cartpole"),
        (("xyz",), "no recipe is named 'xyz', and no run 'xyz' in runs"),
        (("cartpole", "--seeds", "2"), "--seeds is 2"),
        (("cartpole", "--updates", "0"), "--updates is 0"),
        (("cartpole", "--json", "nowhere/x.json"), "--json"),
    ],
)
def test_bad_words_are_one_line_and_exit_code_2(longhaul: Any, words: tuple[str, ...], said: str) -> None:
    code, out, err = longhaul("doctor", *words)
    assert (code, out, err.count("\n")) == (main.BAD_INPUT, "", 1)
    assert said in err


@pytest.mark.slow
def test_a_recipe_that_passes(longhaul: Any) -> None:
    sizes = ("--num-envs", "4", "--num-steps", "32", "--hidden-dim", "4", "--mesh", "data=2")
    code, out, _ = longhaul("doctor", "cartpole", "--quick", *sizes, "--json", "found.json")
    found = json.loads(Path("found.json").read_text())
    assert code == 0, out
    assert [check["check"] for check in found["checks"]] == [
        "sizes", "learning rate", "compilation", "memory", "host copies", "collectives",
    ]  # fmt: skip
    by_name = {check["check"]: check for check in found["checks"]}
    assert {check["verdict"] for check in found["checks"]} <= {"pass", "warn"}
    assert by_name["compilation"]["figures"]["cached"], "the second time it came from the cache"
    assert found["run"]["num_envs"] == 4


def test_sizes_that_can_not_work_fail(longhaul: Any) -> None:
    code, out, _ = longhaul("doctor", "cartpole", "--quick", "--num-envs", "7", "--mesh", "data=2")
    assert code == main.FAILED
    assert "multiple of 2" in out


def test_every_health_check_has_words_and_a_verdict() -> None:
    assert set(doctor.WORDS) == set(health.CHECKS)
    found = doctor.examine(small(), [_record(update) for update in range(1, 61)])
    assert [check.name for check in found] == list(health.CHECKS)
    spec = data.spec(small())
    assert health_log.least_entropy(spec.action) == pytest.approx(0.02 * math.log(2))
