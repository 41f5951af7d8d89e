"""`longhaul.render`: the picture of `longhaul render`, from Python; bad input is one line before anything is driven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import longhaul
from longhaul.cli.main import main
from longhaul.config.resolve import named
from longhaul.config.run import Named
from longhaul.driving.render import save
from longhaul.training import drawing, evaluate
from longhaul.training.checkpoint import resume
from tests.helpers.drawn_policies import drawn


@pytest.fixture(scope="module")
def policy() -> longhaul.Policy:
    return drawn("cartpole")


def test_a_policy_is_drawn_as_its_film_shows_it(policy: longhaul.Policy, tmp_path: Path) -> None:
    drawn_to = longhaul.render(policy, tmp_path / "new" / "a.png")
    assert drawn_to == tmp_path / "new" / "a.png"
    images = evaluate.filmer(policy.run, "cartpole", named(Named("cartpole")))(policy.params).images
    save.film(images, tmp_path / "b.png", "")
    assert drawn_to.read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"out": "a.bmp"}, r"out is 'a.bmp'; its suffix must be one of .gif, .mp4, .html, .png"),
        ({"out": "a.gif"}, r"out is 'a.gif'; that is a folder"),
        ({"policy": "ppo"}, r"policy is 'ppo'; it must be one of run, untrained, idm, log, constant"),
        ({"policy": "pretrained"}, r"it must be one of run, .*; pretrained is a run of its own: give it as run"),
        ({"policy": []}, r"policy is ''; it must be one of run"),
        ({"policy": "untrained"}, "a loaded Policy is one policy"),
        ({"traffic": "slow"}, r"traffic is 'slow'; it must be one of log, idm"),
        ({"traffic": "idm"}, r"traffic is idm; it is for driving, and run cartpole is cartpole; leave it out"),
        ({"data": "LOGS"}, r"data is LOGS; it is for driving"),
        ({"scenario": ["a", "b"]}, r"scenario is a b; it is for driving"),
        ({"safety": True}, r"safety is True; it is for driving"),
        ({"policy": ["run", "run"]}, r"policy is run run; cartpole is drawn for one policy at a time"),
        ({"episodes": 0}, r"episodes is 0; it must be a whole number, 1 at least"),
    ],
)
def test_impossible_drawings_are_one_line(
    policy: longhaul.Policy, given: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gif").mkdir()
    with pytest.raises(ValueError, match=words):
        longhaul.render(policy, **{"out": "b.gif", **given})
    assert [path.name for path in tmp_path.iterdir()] == ["a.gif"]


def test_without_a_run_drivers_alone_drive() -> None:
    with pytest.raises(ValueError, match=r"whose drive\? give a RUN"):
        longhaul.render(out="a.gif")


def test_driving_hands_on_what_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    class Asked(Exception):
        pass

    def drives(run: Any, data: Any, episodes: Any, traffic: Any) -> None:
        asked.append((run.environment.simulator.safety, data, episodes, traffic))
        raise Asked

    monkeypatch.setattr(drawing.evaluate_driving, "drives", drives)
    monkeypatch.setattr(resume, "prepare_devices", lambda *_: None)
    for run, given in (
        ("pretrained", {"policy": "idm", "data": tmp_path}),
        ("pretrained", {"policy": ["log", "idm"], "data": [tmp_path, "b"], "safety": False, "episodes": np.int64(3)}),
        (None, {"policy": "constant", "scenario": "x", "traffic": "self"}),
    ):
        with pytest.raises(Asked):
            longhaul.render(run, "a.gif", **given)
    here = str(tmp_path)
    assert asked == [(True, [here], 1, None), (False, [here, "b"], 3, None), (True, [], None, "self")]


@pytest.mark.slow
def test_a_drive_from_python_is_that_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["render", "--policy", "log", "constant", "--out", "a.html"]) == 0
    longhaul.render(out="b.html", policy=["log", "constant"])
    assert Path("a.html").read_bytes() == Path("b.html").read_bytes()
    assert b"constant" in Path("a.html").read_bytes()
