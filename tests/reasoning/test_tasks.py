"""Tasks with checkers: problems against a direct computation, demonstrations, hand-written completions, files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from longhaul.reasoning import tasks, tokenizer
from longhaul.reasoning.tasks import Problem


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def worth(task: tasks.Task, problem: Problem, completion: str) -> tuple[float, float]:
    return task.reward(problem, completion), task.soundness(problem, completion)


MADE = [tasks.arithmetic(direct=0.0, noise=0.0), tasks.addition(direct=0.0), tasks.countdown(aimless=0.0)]


@pytest.mark.parametrize("task", MADE, ids=lambda task: task.name)
def test_a_faultless_demonstration_is_right_and_sound(task: tasks.Task) -> None:
    random = rng()
    for problem in tasks.problems(task, random, 200):
        completion = task.demonstration(problem, random)
        assert worth(task, problem, completion) == (1.0, 1.0)
        assert tokenizer.decode(tokenizer.encode(problem.prompt + completion)) == problem.prompt + completion
        assert worth(task, problem, completion[:-1])[0] == 0.0  # without its end
        if task.exact:
            assert completion == tasks.write(problem.steps, problem.answer)


def test_arithmetic_is_that_of_whole_numbers() -> None:
    counts = set()
    for problem in tasks.problems(tasks.arithmetic(2, 4), rng(), 300):
        assert re.fullmatch(r"[0-4]([-+][0-4]){2,4}=", problem.prompt)
        assert int(problem.answer) == eval(problem.prompt[:-1]) % 5
        counts.add(len(problem.steps))
    assert counts == {2, 3, 4}


@pytest.mark.parametrize(
    ("completion", "wanted"),
    [
        ("3+4=2;2-2=0;>0$", (1.0, 1.0)),
        (">0$", (1.0, 0.0)),  # right without a step
        ("3+4=2;2-2=1;>0$", (1.0, 0.5)),
        ("1+1=2;2-2=0;>0$", (1.0, 0.0)),  # right sums of something else
        ("3+4=2;2-2=0;0+0=0;>0$", (1.0, 2 / 3)),
        ("3+4=2;2-2=0;>1$", (0.0, 1.0)),
        ("3+4=2;2-2=0>0$", (1.0, 0.5)),  # a step that is not ended
        ("3+4=2;2-", (0.0, 0.5)),
        ("3+4=2;2-2=0;>0>0$", (0.0, 1.0)),
        ("", (0.0, 0.0)),
    ],
)
def test_completions_of_arithmetic_by_hand(completion: str, wanted: tuple[float, float]) -> None:
    task = tasks.arithmetic()
    assert worth(task, Problem("3+4-2=", "0", ("3+4=2", "2-2=0")), completion) == pytest.approx(wanted)


def test_demonstrations_have_the_habits_that_they_are_asked_for() -> None:
    task, random = tasks.arithmetic(4, 4, direct=0.3, noise=0.05), rng()
    drawn = [(p, task.demonstration(p, random)) for p in tasks.problems(task, random, 3000)]
    direct = [completion == f">{problem.answer}$" for problem, completion in drawn]
    assert np.mean(direct) == pytest.approx(0.3, abs=0.03)
    chains = [worth(task, *each)[1] for each, short in zip(drawn, direct, strict=True) if not short]
    assert np.mean(np.array(chains) == 1.0) == pytest.approx(
        (1 - 0.05 * 4 / 5) ** 4, abs=0.03
    )  # any digit: 1 in 5 right


def test_addition_carries() -> None:
    found = {problem.prompt: problem for problem in tasks.problems(tasks.addition(1, 3), rng(), 500)}
    for prompt, problem in found.items():
        a, b = map(int, prompt[:-1].split("+"))
        assert problem.answer == str(a + b)
    problem = next(
        p for p in tasks.problems(tasks.addition(2, 2), rng(), 20_000, distinct=False) if p.prompt == "47+85="
    )
    assert tasks.write(problem.steps, problem.answer) == "7+5+0=12;4+8+1=13;>132$"


@pytest.mark.parametrize(
    ("completion", "wanted"),
    [
        ("3*5=15;15-2=13;>3*5-2$", (1.0, 1.0)),
        ("5*3=15;15-2=13;>(5*3)-2$", (1.0, 1.0)),
        (">3*5-2$", (1.0, 0.0)),
        (">13$", (0.0, 0.0)),  # none of the numbers
        (">5+5+3$", (0.0, 0.0)),  # one of them twice
        (">15-2$", (0.0, 0.0)),
        ("3*5=15;>3*5-2$", (1.0, 0.5)),
        ("3*5=14;14-2=12;>3*5-2$", (1.0, 0.0)),
        ("3*5=15;15-3=12;>3*5-2$", (1.0, 0.5)),  # the 3 is gone
        (">3*5-2**1$", (0.0, 0.0)),
        (">-(2-3*5)$", (0.0, 0.0)),  # no sign of one number
        (">((((((((((((((((((((3$", (0.0, 0.0)),
    ],
)
def test_completions_of_countdown_by_hand(completion: str, wanted: tuple[float, float]) -> None:
    assert worth(tasks.countdown(), Problem("3,5,2:13=", "13"), completion) == wanted


def test_aimless_demonstrations_of_countdown_miss_sometimes() -> None:
    task, random = tasks.countdown(aimless=1.0), rng()
    drawn = [worth(task, p, task.demonstration(p, random)) for p in tasks.problems(task, random, 300)]
    rewards, sound = np.array(drawn).T
    assert 0.02 < np.mean(rewards) < 0.5
    assert np.all(sound == 1.0)


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
    task = tasks.questions(file)
    found = {problem.answer: problem for problem in tasks.problems(task, rng(), 20)}
    assert set(found) == {"72", "1,050"}
    assert found["72"].steps == ("48/2=24", "48+24=72")
    assert worth(task, found["72"], GSM[0]["answer"]) == (1.0, 1.0)
    assert worth(task, found["1,050"], task.demonstration(found["1,050"], rng())) == (1.0, 0.0)
    windows = file.with_name("windows.jsonl")
    windows.write_bytes(file.read_text().replace("\n", "\r\n").encode("utf-8-sig"))
    assert tasks.questions(windows).listed == task.listed


@pytest.mark.parametrize(("written", "answer"), [("7", "7"), ("-0.5", "-0.5"), ("1e3", "1000.0"), ('"7"', "7")])
def test_an_answer_may_be_a_number(tmp_path: Path, written: str, answer: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"question": "what?", "answer": {written}}}')
    task = tasks.questions(path)
    (problem,) = task.listed
    assert problem.answer == answer and task.reward(problem, f"It is {answer}.") == 1.0


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
def test_checkers_judge_answers(check: str, completion: str, wanted: float) -> None:
    assert tasks.checker(check)(Problem("what?", "1,050"), completion) == wanted


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
    assert tasks.calculated(Problem(GSM[0]["question"], "72"), completion) == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"question": "a", "answer": "b"}\n{"question": "a"}', ":2: is an object with question; each line is "),
        ('{"prompt": "a", "answer": "b"}', 'is an object with prompt, answer; each line is {"question": "3'),
        ('["a"]', ":1: is a list; each line is "),
        ('{"question": 1, "answer": "b"}', ":1: question is 1; it must be text in quotes"),
        ('{"question": "1", "answer": true}', ":1: answer is True; it must be text in quotes"),
        ('{"question": "1", "answer": NaN}', ":1: answer is nan; it must be text in quotes"),
        ("[", ":1: "),
        ("", "holds no question"),
    ],
)
def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        tasks.questions(path)


@pytest.mark.parametrize("check", ["numerical", "nowhere.at.all:f", "json:nothing", "json:__name__", f"{__name__}:one"])
def test_a_checker_that_is_not_there_is_named(check: str) -> None:
    with pytest.raises(ValueError, match=f"check is '{check}'"):
        tasks.checker(check)


def one(completions: list[str]) -> list[float]:
    """Reward function of another library: of a list of completions."""
    return [0.0 for _ in completions]


def test_a_verifier_that_gives_no_finite_number_counts_as_wrong() -> None:
    lines: list[str] = []
    reward = tasks.guarded(lambda problem, completion: float(completion), "mine", lines.append)
    assert [reward(Problem("what?", "1"), text) for text in ("0.5", "nan", "inf", "x")] == [0.5, 0.0, 0.0, 0.0]
    reason = "the verifier of mine raises ValueError('nan is no finite number') for 'nan'; such answers count as wrong"
    assert lines == [reason]


def test_a_checker_is_found_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `longhaul train` is started: by a script of another folder."""
    (tmp_path / "verifier_of_a_test.py").write_text("def score(problem, completion):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert tasks.checker("verifier_of_a_test:score")(Problem("what?", "1"), "2") == 0.5
    with pytest.raises(ValueError, match="verifier_of_a_test has no scor; did you mean score"):
        tasks.checker("verifier_of_a_test:scor")
    sys.modules.pop("verifier_of_a_test")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("3-5", "-5"), ("1.2,5", "5"), ("1.2.3", "0.3"), ("5,,.5 ,,", "5.5"), ("x ,-,5", "-5"), ("7.", "7"), (",,", None)],
)
def test_the_last_number_of_a_text(text: str, wanted: str | None) -> None:
    assert tasks.reading(text).answer == wanted


@pytest.mark.parametrize("text", ["," * 60_000, "-," * 60_000, f"#### {'1' * 60_000}x", "<<" * 60_000, "1." * 60_000])
def test_no_completion_takes_long_to_read(text: str) -> None:
    """Expressions with two ways to match the same letters took half a minute for each of these."""
    problem = tasks.Problem(text, "1")
    assert tasks.checker("numeric")(problem, text) == 0.0
    tasks.reading(text)
    tasks.calculated(problem, text)
