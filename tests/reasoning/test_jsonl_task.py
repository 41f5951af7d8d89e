"""Questions from a file: reading, checkers, calculations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from longhaul.reasoning import jsonl_task, tasks
from longhaul.reasoning.tasks import Problem


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def worth(task: tasks.Task, problem: Problem, completion: str) -> tuple[float, float]:
    return task.reward(problem, completion), task.soundness(problem, completion)


GSM = [
    {"question": "Natalia sold 48 clips, then half as many, 2 times less. How many?",
     "answer": "She sold 48/2 = <<48/2=24>>24.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"},
    {"question": "A house costs $1,000 and more by 50. What does it cost?", "answer": "1,050\n#### 1,050"},
]  # fmt: skip


def always(problem: Problem, completion: str) -> bool:
    return "yes" in completion


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gsm.jsonl"
    path.write_text("\n".join(map(json.dumps, GSM)) + "\n\n")
    return path


def test_questions_are_read_and_their_solutions_are_right(file: Path) -> None:
    task = jsonl_task.questions(file)
    found = {problem.answer: problem for problem in tasks.problems(task, rng(), 20)}
    assert set(found) == {"72", "1,050"}
    assert found["72"].steps == ("48/2=24", "48+24=72")
    assert worth(task, found["72"], GSM[0]["answer"]) == (1.0, 1.0)
    assert worth(task, found["1,050"], task.demonstration(found["1,050"], rng())) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("check", "completion", "wanted"),
    [
        ("numeric", "#### 1050", 1.0),
        ("numeric", "#### $1,050.00", 1.0),
        ("numeric", "so it is 1050.", 1.0),
        ("numeric", "1050 or 7", 0.0),
        ("numeric", "1050 #### 7", 0.0),
        ("numeric", "#### NaN", 0.0),
        ("numeric", "", 0.0),
        ("exact", "#### 1,050", 1.0),
        ("exact", "#### 1050", 0.0),
        ("exact", "1,050", 0.0),
        (f"{__name__}:always", "yes", 1.0),
        (f"{__name__}:always", "no", 0.0),
    ],
)
def test_checkers(check: str, completion: str, wanted: float) -> None:
    assert jsonl_task.checker(check)(Problem("what?", "1,050"), completion) == wanted


@pytest.mark.parametrize(
    ("completion", "wanted"),
    [
        ("<<48/2=24>> <<48+24=72>> #### 72", 1.0),
        ("<<48/2=25>> <<48+25=73>>", 0.0),  # wrong, and what follows from it
        ("<<48/2=24>> <<3*3=9>>", 0.5),  # right, but about something else
        ("<<48/2=24>> <<what=24>>", 0.5),
        ("#### 72", 0.0),
    ],
)
def test_calculations_by_hand(completion: str, wanted: float) -> None:
    assert jsonl_task.calculated(Problem(GSM[0]["question"], "72"), completion) == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"question": "a", "answer": "b"}\n{"question": "a"}', r":2: .*'answer'"),
        ('{"question": 1, "answer": "b"}', ":1: question and answer must be text"),
        ("[", ":1: "),
        ("", "holds no question"),
    ],
)
def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        jsonl_task.questions(path)


@pytest.mark.parametrize("check", ["numerical", "nowhere.at.all:f", "json:nothing", "json:__name__"])
def test_a_checker_that_is_not_there_is_named(check: str) -> None:
    with pytest.raises(ValueError, match=f"check is '{check}'"):
        jsonl_task.checker(check)
