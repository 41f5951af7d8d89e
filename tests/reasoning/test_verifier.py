"""Checkers on the device against those on the host."""

from __future__ import annotations

import numpy as np
import pytest

from longhaul.reasoning import tasks, tokenizer, verifier
from tests.helpers.quick import quick

ARITHMETIC = tasks.arithmetic(1, 3, direct=0.0, noise=0.2)


def padded(texts: list[str]) -> np.ndarray:
    return np.array([(tokenizer.encode(text) + [tokenizer.PAD] * 40)[:40] for text in texts], np.int32)


def garbled(rng: np.random.Generator, text: str) -> str:
    """A completion that is right, cut, or has some characters changed, put in or left out."""
    characters = list(text)
    for _ in range(int(rng.integers(0, 4))):
        place = int(rng.integers(len(characters)))
        characters[place : place + int(rng.integers(0, 2))] = str(rng.choice(list(";>$0123+=")))
    text = "".join(characters)[: int(rng.integers(1, 40)) if rng.random() < 0.3 else 38]
    head, end, _ = text.partition("$")
    return head + end


def test_checkers_on_the_device_say_what_those_on_the_host_do() -> None:
    rng, rows, seen = np.random.default_rng(3), [], set()
    for task in (ARITHMETIC, tasks.addition(1, 3, direct=0.0)):
        for problem in tasks.problems(task, rng, 400):
            text = garbled(rng, tasks.write(problem.steps, problem.answer))
            rows.append((problem, text, task.reward(problem, text), task.soundness(problem, text)))
    solution = padded([tasks.write(problem.steps, problem.answer) for problem, *_ in rows])
    text = padded([row[1] for row in rows])
    reward, sound, steps = (np.asarray(x) for x in quick(verifier.checked)(solution, text))
    for i, (problem, written, wanted_reward, wanted_sound) in enumerate(rows):
        read = tasks.read(written)
        assert reward[i] == wanted_reward, (problem, written)
        assert sound[i] == pytest.approx(wanted_sound), (problem, written)
        assert steps[i] == len(read.steps) + read.unfinished, (problem, written)
        seen.add((wanted_reward, min(wanted_sound, 0.99) // 0.34))
    assert len(seen) == 6, "every kind of completion was asked"
