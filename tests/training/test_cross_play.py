"""Cross-play: partners as data drive as the simulator's kinds of traffic do; the adversary is the worst there is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from longhaul.algorithms import ppo
from longhaul.algorithms.run_context import RunContext
from longhaul.cli import evaluate
from longhaul.cli.flags import FlagError
from longhaul.config import recipes, resolve
from longhaul.config.run import Driving, Run
from longhaul.driving.sim import traffic
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.spaces import Measure
from longhaul.training import cross_play, evaluate_driving, report
from longhaul.training.cross_play import RULES, Partner, Play
from longhaul.training.evaluate import Scores
from longhaul.training.evaluate_driving import Drives


def driving(**changes: Any) -> Run:
    recipe = recipes.recipe("driving")
    algorithm = replaced(recipe.algorithm, hidden_dim=8, num_layers=1)
    environment = dataclasses.replace(recipe.environment, horizon=40)
    return resolve.resolve(
        dataclasses.replace(recipe, algorithm=algorithm, environment=environment, devices=1, **changes)
    )


@pytest.fixture(scope="module")
def met() -> tuple[Drives, Any, Play]:
    """Four scenarios, a policy, and their arena."""
    drives = evaluate_driving.drives(driving(), count=4, traffic="self")
    spec = drives.shell("policy").spec
    algorithm = ppo.ppo(spec, drives.run.algorithm, RunContext(updates=1, mean=lambda tree: tree))
    return drives, algorithm.policy(algorithm.init(jax.random.key(0))), cross_play.arena(drives)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["log", "idm", "constant", "self"])
def test_partners_are_the_traffic_of_that_name(kind: str, met: tuple[Drives, Any, Play]) -> None:
    """The ego's scores are those of an evaluation whose program knows one kind of traffic alone."""
    drives, acting, play = met
    task = drives.run.environment
    assert isinstance(task, Driving) and task.simulator.agents > 1
    found = play(acting, RULES.get(kind, Partner("self")))
    alone = task.simulator
    if kind != "self":
        alone = dataclasses.replace(alone, agents=1, traffic=kind)
    same = drives._replace(run=dataclasses.replace(drives.run, environment=dataclasses.replace(task, simulator=alone)))
    wanted = same.play(acting, "policy")[0]
    egos = np.array([drives.scenarios[i].controlled[0] for i in wanted.groups()]) == wanted.agent
    assert found.names == [name for name, ego in zip(wanted.names, egos, strict=True) if ego]
    for name, measure in wanted.metrics.items():
        np.testing.assert_array_equal(found.metrics[name].valid, measure.valid[egos], name)
        valid = measure.valid[egos]
        one, other = found.metrics[name].value[valid], measure.value[egos][valid]
        np.testing.assert_allclose(one, other, rtol=5e-3, atol=0.05, err_msg=name)  # tables of more routes are coarser


@pytest.mark.slow
def test_conditioned_partners_are_the_egos_policy_in_another_mood() -> None:
    """With the recipe's weights they are the ego's own; in haste they drive otherwise."""
    run = driving()
    task = run.environment
    assert isinstance(task, Driving)
    moody = dataclasses.replace(task, simulator=dataclasses.replace(task.simulator, conditioning=True))
    drives = evaluate_driving.drives(dataclasses.replace(run, environment=moody), count=16, traffic="self")
    algorithm = ppo.ppo(drives.shell("policy").spec, run.algorithm, RunContext(updates=1, mean=lambda tree: tree))
    policies = [algorithm.policy(algorithm.init(jax.random.key(seed))) for seed in (0, 1)]
    play = cross_play.arena(drives)
    alike = [play(policies[0], Partner("x", policy=policy)) for policy in (None, policies[0])]
    other = play(policies[0], Partner("x", policy=policies[1], draws=cross_play.HASTE))
    for name, measure in alike[0].metrics.items():
        assert measure.value.tobytes() == alike[1].metrics[name].value.tobytes()
    assert any(np.any(other.metrics[k].value != alike[0].metrics[k].value) for k in other.metrics)


def judged(accuracy: float, episodes: int = 4) -> Scores:
    every = np.ones(episodes, bool)
    metrics = {name: Measure(np.full(episodes, accuracy), every) for name in (*cross_play.METRICS, "progress")}
    return Scores(metrics, ["s"] * episodes)


@pytest.mark.parametrize("conditioned", [False, True])
def test_the_adversary_is_found_where_it_hurts_most(conditioned: bool) -> None:
    """A known landscape: fast partners, or those that fear no collision, are the worst."""
    collision = list(cross_play.RANGES).index("collision")

    def play(ego: Any, partner: Partner) -> Scores:
        return judged(1.0 + partner.draws[collision] if conditioned else 2.0 - partner.pace)

    found = cross_play.adversary(play, None, conditioned)
    if conditioned:
        assert found.kind == traffic.DRIVEN and found.draws[collision] < -0.7
    else:
        assert found.kind == traffic.REACTING and found.pace > 1.4


def test_hurried_and_slow_are_opposites() -> None:
    fast, slow = (cross_play.styled(name, False) for name in ("hurried", "slow"))
    assert fast.pace > 1.0 > slow.pace and fast.headway < 1.0 < slow.headway and slow.yields and not fast.yields
    np.testing.assert_array_equal(
        *(sign * cross_play.styled(n, True).draws for n, sign in (("hurried", 1), ("slow", -1)))
    )


def test_a_policy_of_another_shape_is_refused() -> None:
    one = {"a": np.zeros((2, 3)), "b": np.zeros(4)}
    assert cross_play.fitting("x", one, one) is one
    with pytest.raises(RunError, match=r"--cross-play x: .* \['b'\] is \[5\] there and \[4\] here; name a run"):
        cross_play.fitting("x", one | {"b": np.zeros(5)}, one)
    with pytest.raises(RunError, match="its network has other parts"):
        cross_play.fitting("x", {"a": np.zeros((2, 3))}, one)


def test_the_matrix_is_drawn_in_the_report_and_drawn_again(tmp_path: Path) -> None:
    def write(accuracy: float) -> str:
        cells = cross_play.matrix(lambda ego, partner: judged(accuracy), {"<mine>": None}, [*RULES.values()])
        (tmp_path / report.CROSS_PLAY).write_text(json.dumps({"cells": cells}))
        return cells[0]["ego"]

    assert write(0.75) == "<mine>"
    report.write_report(tmp_path / "report.html", run={}, records=[], result={})
    first = (tmp_path / "report.html").read_text()
    assert first.count("Cross-play</h2>") == 1 and first.count("0.750<br><small>") == 3 and "&lt;mine&gt;" in first
    write(0.5)
    report.draw_cross_play(tmp_path)
    again = (tmp_path / "report.html").read_text()
    assert again.count("0.500<br><small>") == 3 and "0.750<br><small>" not in again
    assert again.count("Cross-play</h2>") == 1 and again.endswith(first[-20:])


def test_words_of_the_command_are_partners_and_other_runs_are_egos_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adversary is sought later; a word that is given twice counts once."""
    monkeypatch.setattr(evaluate, "folder_of", lambda parsed, usage, on_hub: Path(parsed["RUN"]))
    monkeypatch.setattr(
        evaluate,
        "restore_policy",
        lambda folder, member=None, step=None: (None, {folder.name: np.zeros(2)}, {"new": np.zeros(2)}),
    )
    monkeypatch.setattr(cross_play, "fitting", lambda word, params, like: params)
    words = {"cross-play": ["idm", "slow", "other", "other@7", "adversary", "untrained", "early", "idm"]}
    egos, partners = evaluate._cast(Path("mine"), words | {"member": None, "step": None}, "acting", False)
    assert egos.keys() == {"mine", "other"} and egos["mine"] == "acting"
    assert [each.name for each in partners] == ["self", "idm", "slow", "other", "other@7", "untrained", "early"]
    assert [each.name for each in partners if not each.checked] == ["untrained"]
    assert partners[3].policy is egos["other"] and partners[5].policy.keys() == {"new"}
    assert partners[6].policy.keys() == {"early"}
    with pytest.raises(FlagError, match="--cross-play is other@last; behind the @ stands the number"):
        evaluate._cast(Path("mine"), words | {"cross-play": ["other@last"]}, "acting", False)
