"""Tasks of reasoning-gym."""

from __future__ import annotations

import numpy as np
import pytest

from longhaul.reasoning import gym_tasks, tasks
from tests.helpers.libraries import library

library("reasoning_gym", "reasoning-gym is not installed")

SMALL = "min_terms=2,max_terms=2,min_digits=1,max_digits=1"


def sums(**rest: object) -> tasks.Task:
    return gym_tasks.task("chain_sum", SMALL, template="Q: {question}\nA: ", **rest)  # type: ignore[arg-type]


def test_the_librarys_verifier_marks_an_answer() -> None:
    made = sums()
    for problem in tasks.problems(made, np.random.default_rng(0), 20, distinct=True):
        numbers = problem.prompt.removesuffix("\nA: ").rstrip(" =").split(" ")[-3:]
        value = {"+": int(numbers[0]) + int(numbers[2]), "-": int(numbers[0]) - int(numbers[2])}[numbers[1]]
        assert problem.answer == str(value)
        assert (made.reward(problem, f" {value}\n"), made.reward(problem, f"{value + 1}")) == (1.0, 0.0)
        assert made.reward(problem, made.solution(problem, np.random.default_rng(0))) == 1.0


def test_solved_examples_stand_before_a_question() -> None:
    bare, shown = (tasks.problems(sums(shots=n), np.random.default_rng(3), 1)[0].prompt for n in (0, 2))
    assert shown.count("Q: ") == 3
    *examples, last = shown.split("\n\n")
    assert all(int(example.rsplit("A: ", 1)[1]) is not None for example in examples)
    assert last.startswith("Q: ")
    assert last.endswith("A: ")
    assert bare.count("Q: ") == 1


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("text", " 12 ", "12"),
        ("text", " ", None),
        ("line", "first 3\nthen 4\n", "then 4"),
        ("tags", "<think><answer>1</answer></think> <answer> 2 </answer>", "2"),
        ("tags", "2", None),
    ],
)
def test_an_answer_is_read_in_its_format(form: str, text: str, found: str | None) -> None:
    assert gym_tasks.answer(text, form) == found


@pytest.mark.parametrize(
    ("raised", "shown"), [(KeyError("entry"), "KeyError('entry')"), (SystemExit(3), "SystemExit(3)")]
)
def test_a_verifier_that_raises_counts_as_wrong_and_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, shown: str
) -> None:
    data = gym_tasks.library().create_dataset("chain_sum", size=10, seed=0)

    def fails(answer: str, entry: object) -> float:
        raise raised

    monkeypatch.setattr(type(data), "score_answer", lambda self, answer, entry: fails(answer, entry))
    lines: list[str] = []
    made = sums(report=lines.append)
    problem = tasks.problems(made, np.random.default_rng(0), 1)[0]
    assert [made.reward(problem, text) for text in ("1", "2")] == [0.0, 0.0]
    assert lines == [f"the verifier of chain_sum raises {shown} for '1'; such answers count as wrong"]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("chain_sums", "", "has no 'chain_sums'; did you mean chain_sum"),
        ("chain_sum", "min_terms", "written like min_terms=2"),
        ("chain_sum", "min_terms=0", "--task-settings is 'min_terms=0': .*; chain_sum has min_terms, max_terms"),
        ("chain_sum", "least=1", "--task-settings is 'least=1': .*; chain_sum has min_terms, max_terms"),
    ],
)
def test_unknown_tasks_and_settings_are_one_line(name: str, settings: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        gym_tasks.task(name, settings)
    assert "\n" not in str(caught.value)
