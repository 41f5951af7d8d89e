"""Tools that a completion calls: a calculator, and Python functions by name, each in a process with limits.

A completion calls with "[NAME(ARGUMENTS)->"; the result and "]" are put behind it, and the model goes on (Toolformer,
Schick et al. 2023, arXiv 2302.04761). No loss counts what a tool wrote, and a verifier does not see calls.

A function has the text between the brackets, and its result is written as text. An error is a result too: its type.
"""

from __future__ import annotations

import ast
import functools
import json
import operator
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from longhaul.reasoning.tasks import Problem, Task
from longhaul.runtime import user_modules

MARK, END = ")->", "]"
"""Ends of a call, and of its result."""

CALL = re.compile(r"\[(\w+)\(([^\[\]]*)\)->(?:[^\[\]]*\])?")

CALCULATOR = "calculator"

SECONDS, BYTES, LETTERS = 2.0, 1 << 30, 64
"""Limits of a call: seconds of the clock, memory of its process, and letters of a result."""

MOST = 1 << 10
"""Letters of a result that leave the process."""

ALONE = 30
"""Seconds of a call after which its process ends, as where its parent was killed; the system sees to it, whatever C
code is doing."""


def calculator(text: str) -> str:
    """Value of an expression of numbers, + - * / // % ** and brackets. Raises ValueError for another text."""
    signs: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    }  # fmt: skip

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in signs:
            return signs[type(node.op)](value(node.left), value(node.right))
        raise ValueError(type(node).__name__)

    result = value(ast.parse(text.strip(), mode="eval").body)
    return f"{result:.12g}" if isinstance(result, float) else str(result)


class Tool:
    """Function by its path in a process, which is started by the first call, and again where it was lost."""

    def __init__(self, path: str, seconds: float | None = None) -> None:
        """`seconds`: of a call, at most ALONE; None: SECONDS."""
        self._path, self._seconds, self._turn = path, seconds, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, text: str) -> str:
        with self._turn:
            self._start()
            if self._process is None:
                return "TimeoutError"
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(text).encode() + b"\n")
                self._process.stdin.flush()
                return self._answer(self._seconds or SECONDS)
            except BrokenPipeError:
                return self._lost("BrokenPipeError")

    def start(self) -> None:
        """Starts the process before the first call."""
        with self._turn:
            self._start()

    def _start(self) -> None:
        if self._process is None:
            command = [sys.executable, "-m", "longhaul.reasoning.tools", self._path]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
            self._answer(30.0)  # its imports

    def _answer(self, seconds: float) -> str:
        assert self._process is not None and self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return self._lost("TimeoutError")
        line = self._process.stdout.readline()
        return str(json.loads(line)) if line.endswith(b"\n") else self._lost("MemoryError")

    def _lost(self, why: str) -> str:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()
        self._process = None
        return why


@functools.cache
def _load_tools(names: str) -> dict[str, Tool]:
    """Tools by their names in a completion."""
    tools: dict[str, Tool] = {}
    for each in map(str.strip, names.split(",")):
        path = f"{__name__}:{CALCULATOR}" if each == CALCULATOR else each
        if ":" not in path:
            raise ValueError(f"{each!r} is no tool; give {CALCULATOR}, or package.module:function")
        if not callable(user_modules.load(path)):
            raise ValueError(f"{each} is no function; give {CALCULATOR}, or package.module:function")
        tools[path.rpartition(":")[2]] = Tool(path)
    return tools


def start(names: str) -> None:
    """Starts the processes of tools, which else the first call of each does."""
    for each in _load_tools(names).values():
        each.start()


@functools.cache
def replies(names: str) -> Callable[[str], str]:
    """Function of a completion that ends in a call to what stands behind it: the result of a tool of `names`, such as
    "calculator,package.module:function". Raises ValueError where one is no function."""
    tools = _load_tools(names)

    def reply(text: str) -> str:
        calls = CALL.findall(text)
        if not calls or calls[-1][0] not in tools:
            return f"no such tool{END}"
        name, argument = calls[-1]
        return re.sub(r"[\s\[\]]+", " ", tools[name](argument))[:LETTERS].strip() + END

    return reply


def without_calls(task: Task) -> Task:
    """Task whose verifier sees a completion without its calls and their results."""

    def plain(text: str) -> str:
        return CALL.sub("", text)

    def reward(problem: Problem, text: str) -> float:
        return task.reward(problem, plain(text))

    def soundness(problem: Problem, text: str) -> float:
        return task.soundness(problem, plain(text))

    return task._replace(reward=reward, soundness=soundness, reading=lambda text: task.reading(plain(text)))


def main(argv: Sequence[str]) -> None:
    """Process of a tool: a line of JSON in, one out."""
    function = user_modules.load(argv[0])
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a function prints is no result

    def write(result: str) -> None:
        out.write(json.dumps(result) + "\n")
        out.flush()

    write("ready")
    for line in sys.stdin:
        signal.alarm(ALONE)
        try:
            write(str(function(json.loads(line)))[:MOST])
        except Exception as error:  # of any kind: the model reads it
            write(type(error).__name__)
        signal.alarm(0)


if __name__ == "__main__":
    main(sys.argv[1:])
