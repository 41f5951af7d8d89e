"""Tasks with problems whose answers a program can check: chained arithmetic, addition, countdown.

A task has problems, demonstrations with written steps, a reward for a completion, and its soundness: the share of its
written steps that belong to the problem. Right arithmetic alone is not enough: a policy learns to write right sums
about other numbers.

A completion of these tasks is steps, each ended by `;`, then `>`, the answer and `$`: "3+4=2;2-2=0;>0$". This is NumPy
and plain Python only: `sampler.bank` puts problems on the device.

Countdown is TinyZero's (Pan et al. 2025), and has many right answers.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIGNS: dict[str, Callable[[Any, Any], Any]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}

MODULUS = 5
"""Modulus of the sums and differences of chained arithmetic: a result is one digit."""

GREATEST, LIMIT = 9, 99
"""Largest number of countdown; largest result of one of its steps."""

MARK = "####"
"""Mark of the final answer in GSM8K's format."""

CALCULATIONS = re.compile(r"<<([^<>]*)>>")
"""Calculations of GSM8K's format: <<48/2=24>>."""

NUMBERS = re.compile(r"(?:-|(?<!,))[\d,]*\.?\d+", re.ASCII)
"""Numbers in a text. None begins behind a comma: the commas before a digit belong to it, and of many commas without
one only the first is a beginning, so that the time is linear."""

MOST_FILE, MOST_LINE = 256 << 20, 64 << 20
"""Bytes of a file of questions, and of the memory that a line of it takes."""

FORM = 'each line is {"question": "3 + 4 =", "answer": "7"}'
"""Form of a line of a file of questions, as errors show it."""

ATTEMPTS = 100
"""Most draws for each wanted problem; after them the task is taken to have no more."""


class Problem(NamedTuple):
    prompt: str
    answer: str  # text between `>` and `$`; of countdown the target, which many answers reach
    steps: tuple[str, ...] = ()  # of the solution; () where there are many
    entry: Any = None  # what a library's verifier needs


class Written(NamedTuple):
    """Parts of a completion."""

    steps: tuple[str, ...]  # ended by `;`
    unfinished: bool  # another one was begun
    answer: str | None  # None without an end


def read(completion: str) -> Written:
    """Parts of a text. Example: "3+4=2;>0$" -> (("3+4=2",), False, "0"); "3+4=2;2-" -> (("3+4=2",), True, None)."""
    head, mark, tail = completion.partition(">")
    *steps, rest = head.split(";")
    answer = tail.removesuffix("$") if mark and tail.endswith("$") else None
    return Written(tuple(steps), rest not in ("", "$"), answer)


def write(steps: Sequence[str], answer: str) -> str:
    """Inverse of `read`."""
    return "".join(f"{step};" for step in steps) + f">{answer}$"


def in_steps(problem: Problem, rng: np.random.Generator) -> str:
    """Right completion of a problem that has only one."""
    return write(problem.steps, problem.answer)


class Task(NamedTuple):
    """Kind of problems as pure functions."""

    name: str
    problem: Callable[[np.random.Generator], Problem]
    demonstration: Callable[[Problem, np.random.Generator], str]  # a completion to learn from
    reward: Callable[[Problem, str], float]  # (problem, completion) -> 0 to 1
    soundness: Callable[[Problem, str], float]  # (problem, completion) -> 0 to 1
    exact: bool  # `Problem.answer` and `Problem.steps` are the only right ones, so that the device can check them
    posed: Callable[[str], Problem] | None = None  # the problem of a prompt; ValueError where it is none of the task's
    solution: Callable[[Problem, np.random.Generator], str] = in_steps  # a completion that is right
    reading: Callable[[str], Written] = read
    listed: tuple[Problem, ...] = ()  # all problems, where they are not generated


def common(true: Sequence[str], written: Written) -> float:
    """Share of steps that are the problem's: their longest common beginning over the longer one's length."""
    longer = max(len(true), len(written.steps) + written.unfinished)
    pairs = enumerate(zip(true, written.steps, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(true), len(written.steps)))
    return same / longer if longer else 1.0


def _exact_reward(problem: Problem, completion: str) -> float:
    return float(read(completion).answer == problem.answer)


def _common_steps(problem: Problem, completion: str) -> float:
    return common(problem.steps, read(completion))


def problems(
    task: Task, rng: np.random.Generator, count: int, *, without: Collection[str] = (), distinct: bool = False
) -> list[Problem]:
    """Problems, `count` of them, whose prompts are not in `without`. Raises ValueError where there are fewer."""
    chosen: list[Problem] = []
    seen = set(without)
    for _ in range(ATTEMPTS * count):
        if len(chosen) == count:
            return chosen
        drawn = task.problem(rng)
        if drawn.prompt not in seen:
            chosen.append(drawn)
            seen |= {drawn.prompt} if distinct else set()
    if len(chosen) == count:
        return chosen
    raise ValueError(f"{count} problems of {task.name} are wanted, and {len(chosen)} were found; ask for fewer")


# ------------------------------------------------------------------------------------------------------- arithmetic


def arithmetic(fewest: int = 2, most: int = 4, *, direct: float = 0.3, noise: float = 0.05) -> Task:
    """Sums and differences from left to right, modulo `MODULUS`: "3+4-2=" is "3+4=2;2-2=0;>0$".

    `fewest` to `most` operations, uniformly. The share `direct` of the demonstrations has the answer alone, so that a
    policy has two habits like a pretrained one; in the others each step's result is, with probability `noise`, a random
    digit, with which the chain continues. Raises ValueError unless 1 <= `fewest` <= `most`; `posed` raises it for a
    text that is no such sum.
    """
    if not 1 <= fewest <= most:
        raise ValueError(f"fewest is {fewest}; it must lie in 1 to most, {most}")

    def problem(rng: np.random.Generator) -> Problem:
        count = int(rng.integers(fewest, most + 1))
        terms = [int(term) for term in rng.integers(0, MODULUS, count + 1)]
        signs = [str(sign) for sign in rng.choice(["+", "-"], count)]
        rest = "".join(f"{sign}{term}" for sign, term in zip(signs, terms[1:], strict=True))
        return posed(f"{terms[0]}{rest}=")

    def posed(prompt: str) -> Problem:
        if not re.fullmatch(r"\d([-+]\d)*=", prompt, re.ASCII):
            raise ValueError(f"{prompt!r} is no chain of sums and differences; one looks like 3+4-2=")
        terms, signs = [int(digit) for digit in prompt[:-1:2]], list(prompt[1:-1:2])
        if max(terms) >= MODULUS:
            raise ValueError(f"{prompt!r} has the digit {max(terms)}; sums are modulo {MODULUS}, and digits below it")
        steps, last = _chain(terms, signs)
        return Problem(prompt, str(last), steps)

    def demonstration(problem: Problem, rng: np.random.Generator) -> str:
        if rng.random() < direct:
            return write((), problem.answer)
        terms, signs = [int(digit) for digit in problem.prompt[:-1:2]], list(problem.prompt[1:-1:2])
        wrong = [int(rng.integers(MODULUS)) if rng.random() < noise else None for _ in signs]
        steps, last = _chain(terms, signs, wrong)
        return write(steps, str(last))

    return Task("arithmetic", problem, demonstration, _exact_reward, _common_steps, exact=True, posed=posed)


def _chain(
    terms: Sequence[int], signs: Sequence[str], instead: Sequence[int | None] = ()
) -> tuple[tuple[str, ...], int]:
    """(steps, last result); a number in `instead` replaces a step's result."""
    steps, now = [], terms[0]
    for sign, term, other in itertools.zip_longest(signs, terms[1:], instead):
        result = SIGNS[sign](now, term) % MODULUS if other is None else other
        steps.append(f"{now}{sign}{term}={result}")
        now = result
    return tuple(steps), now


def addition(fewest: int = 2, most: int = 3, *, direct: float = 0.3) -> Task:
    """Addition of numbers of `fewest` to `most` digits, digit by digit from the last, with the carry.

    "47+85=" is "7+5+0=12;4+8+1=13;>132$". The share `direct` of the demonstrations has the answer alone. Raises
    ValueError as `arithmetic` does.
    """
    if not 1 <= fewest <= most:
        raise ValueError(f"fewest is {fewest}; it must lie in 1 to most, {most}")

    def problem(rng: np.random.Generator) -> Problem:
        digits = int(rng.integers(fewest, most + 1))
        least = 10 ** (digits - 1) if digits > 1 else 0
        a, b = (int(number) for number in rng.integers(least, 10**digits, 2))
        return posed(f"{a}+{b}=")

    def posed(prompt: str) -> Problem:
        match = re.fullmatch(r"(\d+)\+(\d+)=", prompt, re.ASCII)
        if match is None:
            raise ValueError(f"{prompt!r} is no sum of two numbers; one looks like 47+85=")
        a, b = int(match[1]), int(match[2])
        steps, carry = [], 0
        for place in range(max(len(match[1]), len(match[2]))):
            x, y = (number // 10**place % 10 for number in (a, b))
            steps.append(f"{x}+{y}+{carry}={x + y + carry}")
            carry = (x + y + carry) // 10
        return Problem(prompt, str(a + b), tuple(steps))

    def demonstration(problem: Problem, rng: np.random.Generator) -> str:
        return write(() if rng.random() < direct else problem.steps, problem.answer)

    return Task("addition", problem, demonstration, _exact_reward, _common_steps, exact=True, posed=posed)


# -------------------------------------------------------------------------------------------------------- countdown


def countdown(count: int = 3, *, aimless: float = 0.5) -> Task:
    """Countdown: each of `count` numbers once, by + - *, to a target: "3,5,2:13=" is "3*5=15;15-2=13;>3*5-2$".

    Results lie in 0 to `LIMIT`. The share `aimless` of the demonstrations reaches another number. Raises ValueError for
    fewer than 2 numbers; `posed` raises it for a text that is no countdown.
    """
    if count < 2:
        raise ValueError(f"count is {count}; countdown needs at least 2 numbers")

    def problem(rng: np.random.Generator) -> Problem:
        numbers = [int(number) for number in rng.integers(1, GREATEST + 1, count)]
        target = _combined(numbers, rng).result
        return Problem(f"{','.join(map(str, numbers))}:{target}=", str(target))

    def solution(problem: Problem, rng: np.random.Generator) -> str:
        numbers, target = numbers_and_target(problem)
        while (chain := _combined(numbers, rng)).result != target:
            pass  # this ends: the target was reached when the problem was generated
        return write(chain.steps, chain.expression)

    def demonstration(problem: Problem, rng: np.random.Generator) -> str:
        if rng.random() >= aimless:
            return solution(problem, rng)
        chain = _combined(numbers_and_target(problem)[0], rng)
        return write(chain.steps, chain.expression)

    def reward(problem: Problem, completion: str) -> float:
        answer = read(completion).answer
        numbers, target = numbers_and_target(problem)
        result = None if answer is None else evaluate(answer)
        return float(result is not None and result[0] == target and sorted(result[1]) == sorted(numbers))

    def soundness(problem: Problem, completion: str) -> float:
        """Share of steps before the first that is wrong or uses a number that is not available."""
        available, sound = Counter(numbers_and_target(problem)[0]), 0
        steps, unfinished, _ = read(completion)
        for step in steps:
            parts = re.fullmatch(r"(\d{1,4})([-+*])(\d{1,4})=(\d{1,8})", step, re.ASCII)
            if parts is None:
                break
            first, second, result = int(parts[1]), int(parts[3]), int(parts[4])
            used = Counter([first, second])
            if SIGNS[parts[2]](first, second) != result or used - available:
                break
            available = available - used + Counter([result])
            sound += 1
        return sound / max(len(steps) + unfinished, count - 1)

    def posed(prompt: str) -> Problem:
        if not re.fullmatch(r"\d+(,\d+)+:\d+=", prompt, re.ASCII):
            raise ValueError(f"{prompt!r} is no countdown; one looks like 3,5,2:13=")
        return Problem(prompt, prompt.partition(":")[2].removesuffix("="))

    return Task("countdown", problem, demonstration, reward, soundness, False, posed, solution)


class _Chain(NamedTuple):
    """Numbers that were combined to one."""

    steps: list[str]
    expression: str
    result: int


def _combined(numbers: Sequence[int], rng: np.random.Generator) -> _Chain:
    """Numbers combined at random, until no result leaves the range. This ends: the sum of all is always possible."""
    while (chain := _attempt(numbers, rng)) is None:
        pass
    return chain


def _attempt(numbers: Sequence[int], rng: np.random.Generator) -> _Chain | None:
    """Numbers combined at random; None where a result leaves the range."""
    terms = [(number, str(number)) for number in numbers]
    steps = []
    while len(terms) > 1:
        i, j = (int(index) for index in rng.choice(len(terms), 2, replace=False))
        sign = str(rng.choice(list(SIGNS)))
        (a, first), (b, second) = terms[i], terms[j]
        result = SIGNS[sign](a, b)
        if not 0 <= result <= LIMIT:
            return None
        steps.append(f"{a}{sign}{b}={result}")
        terms = [term for index, term in enumerate(terms) if index not in (i, j)]
        terms.append((result, f"({first}{sign}{second})"))
    result, expression = terms[0]
    return _Chain(steps, expression.removeprefix("(").removesuffix(")"), result)


def numbers_and_target(problem: Problem) -> tuple[list[int], int]:
    """Numbers and target of a problem of countdown."""
    numbers, _, target = problem.prompt.removesuffix("=").partition(":")
    return [int(number) for number in numbers.split(",")], int(target)


def evaluate(expression: str) -> tuple[int, list[int]] | None:
    """(value, numbers) of an expression of whole numbers, + - * and brackets; None for anything else."""
    if len(expression) > 64 or not re.fullmatch(r"[-+*()0-9]+", expression, re.ASCII):
        return None
    try:
        root = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    signs = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
    numbers: list[int] = []

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in signs:
            return int(signs[type(node.op)](value(node.left), value(node.right)))
        raise ValueError(type(node).__name__)

    try:
        return value(root), numbers
    except ValueError:
        return None


QUESTION = "{question}"
"""Placeholder of the question in a template."""


def questions(
    path: Path | str, *, check: str = "numeric", template: str = QUESTION, report: Callable[[str], None] = print
) -> Task:
    """Questions of a JSONL file with `question` and `answer` a line, in GSM8K's format: the final answer after `MARK`.

    A prompt is `template` with the question in the place of {question}. A repeated question is left out.

    `check` is "numeric" (numbers are compared: 1,000 is 1000.0; without `MARK` the last number of a completion counts),
    "exact" (the text after `MARK`, without outer spaces), or the path of a user's function, "package.module:function",
    (problem, completion) -> reward. A problem's steps are GSM8K's calculations, <<48/2=24>>; `soundness` is the share
    of a completion's calculations that are right and use numbers of the question or of earlier calculations. A function
    that raises counts as wrong; its first error is reported.

    Raises ValueError, one line with file and line, for an unreadable line.
    """
    if QUESTION not in template:
        raise ValueError(f"template is {template!r}; it must have {QUESTION} where the question stands")
    reward = guarded(checker(check), check, report)
    known: dict[str, tuple[Problem, str]] = {}
    try:
        if (size := Path(path).stat().st_size) > MOST_FILE:
            raise ValueError(f"{path}: has {size:,} bytes; {MOST_FILE:,} are possible: give fewer questions")
        text = Path(path).read_text(encoding="utf-8-sig")  # Windows' programs begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"{path}: {reason}; give a JSONL file") from error
    for line_number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            question, answer = _question(line, f"{path}:{line_number}")
            known.setdefault(question.prompt, (question, answer))
    if not known:
        raise ValueError(f"{path}: holds no question; write one a line")

    def prompted(problem: Problem) -> Problem:
        return problem._replace(prompt=template.replace(QUESTION, problem.prompt))

    listed_problems = {name: prompted(question) for name, (question, _) in known.items()}
    bare = {listed_problems[name].prompt: each for name, each in known.items()}
    listed = tuple(listed_problems.values())

    def solution(problem: Problem, rng: np.random.Generator) -> str:
        return bare[problem.prompt][1]

    def soundness(problem: Problem, completion: str) -> float:
        """Soundness by the question's numbers, without the template's."""
        return calculated(bare.get(problem.prompt, (problem, ""))[0], completion)

    def posed(prompt: str) -> Problem:
        """Problem by its question or its whole prompt; a text that is not in the file has no known answer."""
        question = bare[prompt][0].prompt if prompt in bare else prompt
        return listed_problems.get(question) or prompted(Problem(question, ""))

    return Task(
        Path(path).stem, lambda rng: listed[int(rng.integers(len(listed)))], solution, reward, soundness, False, posed,
        solution, reading, listed,
    )  # fmt: skip


def _question(line: str, where: str) -> tuple[Problem, str]:
    from longhaul.runtime import bounded_json  # a Run is described without it

    try:
        fields = bounded_json.parse(line, MOST_LINE)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {FORM}") from error
    if not isinstance(fields, dict) or not {"question", "answer"} <= fields.keys():
        held = (
            f"n object with {', '.join(list(fields)[:8])}" if isinstance(fields, dict) else f" {type(fields).__name__}"
        )
        raise ValueError(f"{where}: is a{held}; {FORM}")
    question, solution = fields["question"], fields["answer"]
    if isinstance(solution, int | float) and not isinstance(solution, bool) and abs(solution) < math.inf:
        solution = str(solution)
    for name, value in (("question", question), ("answer", solution)):
        if not isinstance(value, str):
            raise ValueError(f"{where}: {name} is {value!r:.80}; it must be text in quotes")
    answer = solution.rpartition(MARK)[2].strip()
    return Problem(question, answer, tuple(CALCULATIONS.findall(solution))), solution


def checker(check: str) -> Callable[[Problem, str], float]:
    """Reward function of `check`. Raises ValueError for an unknown one."""
    if check == "exact":
        return lambda problem, completion: float(_after_mark(completion) == problem.answer)
    if check == "numeric":

        def numeric(problem: Problem, completion: str) -> float:
            expected = number(problem.answer)
            return float(expected is not None and expected == number(_answer(completion)))

        return numeric
    from longhaul.runtime import user_modules  # a Run is described without it

    if not user_modules.is_named(check):
        raise ValueError(f"check is {check!r}; it must be numeric, exact, or package.module:function")
    try:
        function: Any = user_modules.load(check)
    except ValueError as error:
        raise ValueError(f"check is {check!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"check is {check!r}, which is no function; give numeric, exact, or package.module:function")
    try:
        taken = inspect.signature(function)
    except ValueError:  # of a function in C
        taken = None
    if taken is not None:
        try:
            taken.bind("problem", "completion")
        except TypeError as error:
            raise ValueError(
                f"check is {check!r}, which takes {taken}; a verifier is called as function(problem, completion), and "
                "returns a number"
            ) from error
    return lambda problem, completion: float(function(problem, completion))


def guarded(
    reward: Callable[[Problem, str], float], name: str, report: Callable[[str], None]
) -> Callable[[Problem, str], float]:
    """Reward function that is 0 where `reward`, a library's or the user's, raises or gives no finite number; the first
    error is reported."""
    failed: list[str] = []

    def safe(problem: Problem, completion: str) -> float:
        try:
            value = reward(problem, completion)
            if not math.isfinite(value):
                raise ValueError(f"{value} is no finite number")
            return value
        except (Exception, SystemExit) as error:  # of any kind
            if not failed:
                failed.append(completion)
                report(f"the verifier of {name} raises {error!r} for {completion!r:.200}; such answers count as wrong")
            return 0.0

    return safe


def _after_mark(completion: str) -> str | None:
    """Text after the last `MARK`."""
    _, mark, tail = completion.rpartition(MARK)
    return tail.strip() if mark else None


def _answer(completion: str) -> str:
    """Text after the last `MARK`, else the last number; "" where there is none."""
    final = _after_mark(completion)
    return final if final is not None else ([match[0] for match in NUMBERS.finditer(completion)] or [""])[-1]


def reading(completion: str) -> Written:
    """Calculations of a completion and its answer, as a plain number such that 1,050 and 1050.00 are one answer."""
    answer = _answer(completion)
    value = number(answer)
    answer = answer if value is None else f"{value.normalize():f}"
    return Written(tuple(CALCULATIONS.findall(completion)), False, answer or None)


def number(text: str) -> Decimal | None:
    """Number in a common notation: "$1,000.50" is 1000.50; None for anything else."""
    plain = text.strip().lstrip("$").rstrip(".%").replace(",", "")
    return Decimal(plain) if re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)", plain, re.ASCII) else None


def calculated(problem: Problem, completion: str) -> float:
    """Share of a completion's calculations, <<48/2=24>>, that are right and about the question's numbers.

    Each has two numbers, both of the question or earlier results. 0 without any calculation.
    """
    known = {number(match[0].removeprefix("-")) for match in NUMBERS.finditer(problem.prompt)}
    written = CALCULATIONS.findall(completion)
    sound = 0
    for each in written:
        parts = re.fullmatch(r"\s*([\d.,]+)\s*([-+*/])\s*([\d.,]+)\s*=\s*(-?[\d.,]+)\s*", each, re.ASCII)
        if parts is None:
            continue
        a, b, result = (number(parts[place]) for place in (1, 3, 4))
        if a is None or b is None or result is None:
            continue
        right = result * b == a if parts[2] == "/" else SIGNS[parts[2]](a, b) == result
        sound += right and a in known and b in known
        known |= {result} if right else set()
    return sound / len(written) if written else 0.0
