"""Tools: their results, their limits, and what a verifier sees of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from longhaul.reasoning import tasks, tools


def unruly(text: str) -> object:
    """Tool that does what it is told."""
    print("a line")
    if text == "sleep":
        time.sleep(60)
    if text == "grow":
        return len(bytearray(4 << 30))
    if text == "die":
        os._exit(3)
    if text.startswith("write "):
        Path(text.removeprefix("write ")).write_text("x" * 10)
    return f"<{text}>\n[x]"


@pytest.mark.parametrize(
    ("text", "value"),
    [("3 * (4+5)", "27"), ("-7//2", "-4"), ("1/8", "0.125"), ("2**70", str(2**70)), ("7.0 % 4", "3")],
)
def test_the_calculator_is_pythons(text: str, value: str) -> None:
    assert tools.calculator(text) == value


@pytest.mark.parametrize("text", ["", "x", "__import__('os')", "'a'*3", "(1).real", "1 if 1 else 2"])
def test_the_calculator_takes_numbers_alone(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        tools.calculator(text)


def test_a_tool_is_called_in_a_process_with_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints is no result; one that sleeps, grows, dies or writes gives its error, and the next call works."""
    reply = tools.replies(f"calculator, {__name__}:unruly")
    assert reply("so [calculator(12 * 12)->") == "144]"
    assert reply("[calculator(12 * 12)->144] [calculator(1 / 0)->") == "ZeroDivisionError]"
    assert reply("[unruly(quiet)->") == "<quiet> x]"
    monkeypatch.setattr(tools, "SECONDS", 0.5)
    assert reply("[unruly(sleep)->") == "TimeoutError]"
    monkeypatch.undo()
    assert reply("[unruly(grow)->") == "MemoryError]"
    assert reply("[unruly(die)->") == "MemoryError]"
    assert reply(f"[unruly(write {tmp_path / 'file'})->").startswith("OSError")
    assert reply("[unruly(again)->") == "<again> x]"
    monkeypatch.setattr(tools, "SECONDS", 0.5)
    assert reply("[calculator(9**9**9)->") == "TimeoutError]"


def test_a_call_that_nobody_waits_for_ends() -> None:
    """A power of Python's numbers hears no signal of Python's."""
    program = f"from longhaul.reasoning import tools; tools.ALONE = 1; tools.main(['{tools.__name__}:calculator'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b'"9**9**9"\n')
        process.stdin.flush()  # and stays open, as where a worker has inherited it
        assert process.wait(60) == -signal.SIGALRM


@pytest.mark.parametrize("text", ["[search(x)->", "no call ->", "[calculator(1+1->"])
def test_a_malformed_call_is_answered(text: str) -> None:
    assert tools.replies("calculator")(text) == "no such tool]"


def test_a_tool_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="has no unrule"):
        tools.replies(f"{__name__}:unrule")
    with pytest.raises(ValueError, match="'calculate' is no tool; give calculator, or package"):
        tools.replies("calculate")


def test_a_verifier_sees_no_calls() -> None:
    seen = []

    def reward(problem: tasks.Problem, text: str) -> float:
        seen.append(text)
        return float(text.strip() == "144")

    made = tools.without_calls(tasks.arithmetic()._replace(reward=reward, reading=tasks.reading))
    problem = tasks.problems(made, np.random.default_rng(0), 1)[0]
    assert made.reward(problem, "[calculator(12 * 12)->144] 144") == 1.0
    assert made.reward(problem, "[calculator(12 * 12)->144]") == 0.0
    assert made.reward(problem, "144 [calculator(12 * 12)->") == 1.0  # cut in the middle
    assert seen == [" 144", "", "144 "]
    assert made.reading("7 [calculator(12 * 12)->144]").answer == "7"
