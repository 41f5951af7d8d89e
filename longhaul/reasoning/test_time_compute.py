"""Test-time compute: accuracy at fixed weights by the budget of steps, by samples, and with an early stop.

The budget forces an answer after so many steps (s1, Muennighoff et al. 2025, arXiv 2501.19393); samples vote (Wang et
al. 2022, 2203.11171). All samples of a problem are drawn once: smaller numbers are parts of these, and the early stop
takes them in order, so that differences come from the rule alone and not from the samples.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning import tokenizer, turns
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.evaluate import evaluate_on_host, evaluate_reasoning, quality, quality_on_host
from longhaul.reasoning.sampler import UNBOUNDED, Bank, Drawn, Sampling, sampler
from longhaul.reasoning.tasks import Problem, Task
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.types import Key, Params

SELECTIONS = ("majority", "weighted", "verified", "best_of_n")


class Chain(NamedTuple):
    """Completion of a problem with its scores."""

    text: str
    answer: str | None  # None: it never ended
    steps: tuple[str, ...]
    log_prob: float  # mean of its tokens
    soundness: float  # share of its steps that are the problem's
    reward: float  # of the checker


class Solution(NamedTuple):
    """Answer to a problem, with its chains and votes."""

    prompt: str
    answer: str | None
    chain: Chain | None  # the best that ends in the answer
    chains: tuple[Chain, ...]
    votes: dict[str, float]  # answer -> its votes, most first
    drawn: int  # chains sampled in this call: 0 for a cached answer
    settled: bool  # by an early stop


Draw = Callable[[Sequence[str], int], list[list[tuple[str, float]]]]
"""(prompts, chains of each) -> for each prompt its list of (completion, mean log-probability of its tokens)."""


@dataclass(frozen=True)
class Config:
    """Number of chains, early stop, selection and cache."""

    samples: int = 16  # most chains of a problem
    wave: int = 4  # chains sampled between two counts of the votes
    lead: float = 2.0  # votes ahead at which sampling stops; 0: never early
    select: str = "majority"  # one of SELECTIONS
    cache: int = 1024  # problems; 0: none


def check(config: Config) -> None:
    """Raises ValueError, with value, bound and remedy."""
    for name, least in (("samples", 1), ("wave", 1), ("lead", 0), ("cache", 0)):
        if getattr(config, name) < least:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least {least}")
    if config.select not in SELECTIONS:
        raise ValueError(f"select is {config.select!r}; it must be one of {', '.join(SELECTIONS)}")


def judge(task: Task, problem: Problem, text: str, log_prob: float) -> Chain:
    """Chain of a completion of a problem."""
    written = task.reading(text)
    return Chain(text, written.answer, written.steps, log_prob, task.soundness(problem, text),
                 task.reward(problem, text))  # fmt: skip


def votes(chains: Sequence[Chain], select: str) -> dict[str, float]:
    """Votes by answer, most first; of equal ones the first written. "weighted" counts the soundness."""
    counted: Counter[str] = Counter()
    for chain in chains:
        if chain.answer is not None:
            counted[chain.answer] += chain.soundness if select == "weighted" else 1.0  # type: ignore[assignment]
    return dict(counted.most_common())


def choose(chains: Sequence[Chain], select: str) -> Chain | None:
    """Chain whose answer is returned; None where none ended.

    "verified" is the first that the checker accepts, "best_of_n" the one with the greatest reward, then soundness.
    Without an accepted chain, and for the other selections, it is the leader of the votes, by its soundest, then
    likeliest chain.
    """
    ended = [chain for chain in chains if chain.answer is not None]
    if not ended:
        return None
    if select == "verified":
        accepted = next((chain for chain in ended if chain.reward == 1.0), None)
        if accepted is not None:
            return accepted
    if select == "best_of_n":
        return max(ended, key=lambda chain: (chain.reward, chain.soundness, chain.log_prob))
    leader = next(iter(votes(ended, select)))
    return max((c for c in ended if c.answer == leader), key=lambda chain: (chain.soundness, chain.log_prob))


def settled(chains: Sequence[Chain], config: Config) -> bool:
    """True where further samples cannot matter."""
    if config.lead <= 0:
        return False
    if config.select in ("verified", "best_of_n"):
        return any(chain.reward == 1.0 for chain in chains)
    counts = list(votes(chains, config.select).values())
    ahead = counts[0] - (counts[1] if len(counts) > 1 else 0.0) if counts else 0.0
    return ahead >= config.lead or ahead > config.samples - len(chains)


class ReasoningOptimizer:
    """Solver of problems by chains of a policy of some version, with a cache.

    Example: `ReasoningOptimizer(task, draw).solve(["3+4-2="])[0].answer`.
    """

    def __init__(self, task: Task, draw: Draw, config: Config | None = None, *, version: int = 0) -> None:
        """Solver of a task with `Task.posed`. Raises ValueError for an impossible config."""
        self.config = config or Config()
        check(self.config)
        self._task, self._draw, self._version = task, draw, version
        self._known: OrderedDict[str, tuple[int, Solution]] = OrderedDict()  # (version, solution) by prompt

    def update(self, draw: Draw, version: int) -> None:
        """New weights. Answers of the old ones are discarded, except verified chains."""
        self._draw, self._version = draw, version

    def verified(self) -> list[tuple[str, Chain]]:
        """Pairs (prompt, chain) of all cached chains that the checker accepts with sound steps."""
        chains = ((prompt, solution.chain) for prompt, (_, solution) in self._known.items())
        return [(prompt, chain) for prompt, chain in chains if chain is not None and _is_fact(chain)]

    def solve(self, questions: Sequence[str | Problem]) -> list[Solution]:
        """Solutions of problems, in order. Raises ValueError for a prompt that is no problem of the task."""
        prompts = [each.prompt if isinstance(each, Problem) else each for each in questions]
        problems = {prompt: self._as_problem(each) for prompt, each in zip(prompts, questions, strict=True)}
        solutions = {prompt: cached for prompt in problems if (cached := self._cached_draws(prompt)) is not None}
        open_: dict[str, list[Chain]] = {prompt: [] for prompt in problems if prompt not in solutions}
        while open_:
            drawn = len(next(iter(open_.values())))
            count = min(self.config.wave, self.config.samples - drawn)
            posed = [problems[prompt].prompt for prompt in open_]
            for prompt, texts in zip(list(open_), self._draw(posed, count), strict=True):
                chains = open_[prompt]
                chains += [judge(self._task, problems[prompt], *each) for each in texts]
                full, early = len(chains) >= self.config.samples, settled(chains, self.config)
                if full or early:
                    del open_[prompt]
                    best, counts = choose(chains, self.config.select), votes(chains, self.config.select)
                    answer, stopped_early = best.answer if best else None, early and not full
                    solutions[prompt] = Solution(
                        prompt, answer, best, tuple(chains), counts, len(chains), stopped_early
                    )
                    self._known[prompt] = self._version, solutions[prompt]
                    while len(self._known) > self.config.cache:
                        self._known.popitem(last=False)
        return [solutions[prompt] for prompt in prompts]

    def _as_problem(self, each: str | Problem) -> Problem:
        if isinstance(each, Problem):
            return each
        if self._task.posed is None:
            raise ValueError(f"{self._task.name} has the problems of its file alone; name one of them")
        return self._task.posed(each)

    def _cached_draws(self, prompt: str) -> Solution | None:
        version, solution = self._known.get(prompt, (self._version, None))
        if solution is None:
            return None
        if version != self._version and (solution.chain is None or not _is_fact(solution.chain)):
            del self._known[prompt]
            return None
        self._known.move_to_end(prompt)
        return solution._replace(drawn=0)


def _is_fact(chain: Chain) -> bool:
    return chain.reward == 1.0 and chain.soundness == 1.0


ROOM, ROWS = 8, 64
"""Multiple of tokens to which prompts are padded, and completions that are decoded together."""


def drawing(
    config: ModelConfig,
    params: Params,
    sampling: Sampling,
    *,
    max_reasoning_steps: int = UNBOUNDED,
    seed: int = 0,
    tokeniser: Tokeniser = tokenizer.TOKENISER,
) -> Draw:
    """Sampler of completions of at most `max_reasoning_steps` steps, different in each call; group and wave of
    `sampling` do not matter.

    Prompts go in batches of few shapes, so that few programs are compiled. After as many steps the answer's mark is
    inserted. Raises ValueError for a text with unknown characters, and for a bound where `tokeniser` has no such mark.
    """
    if max_reasoning_steps < 0:
        raise ValueError(f"max_reasoning_steps is {max_reasoning_steps}; it must be at least 0")
    if max_reasoning_steps < UNBOUNDED and tokeniser.answer == tokenizer.NONE:
        raise ValueError(
            f"max_reasoning_steps is {max_reasoning_steps}, and this vocabulary has no mark of an answer; leave it out"
        )
    sampling = dataclasses.replace(sampling, group=1, wave=ROWS)
    sample = jax.jit(sampler(config, sampling, tokeniser=tokeniser))
    go_on = turns.continuing(config, sampling, tokeniser).go_on
    calls = 0

    def draw(prompts: Sequence[str], count: int) -> list[list[tuple[str, float]]]:
        nonlocal calls
        encoded = [tokeniser.ask(prompt) for prompt in prompts for _ in range(count)]
        room = -(-max(map(len, encoded)) // ROOM) * ROOM
        rows = 1 << (len(encoded) - 1).bit_length()  # a power of two
        padded = [[tokeniser.pad] * (room - len(each)) + each for each in encoded]
        padded += [padded[0]] * (rows - len(padded))
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), calls), rows)
        calls += 1
        drawn = jax.device_get(sample(params, jnp.asarray(np.array(padded, np.int32)), keys,
                                      jnp.int32(max_reasoning_steps)))  # fmt: skip
        drawn = go_on(params, padded, drawn, keys)
        return texts(drawn, count, tokeniser)[: len(prompts)]

    return draw


def texts(drawn: Drawn, group: int, tokeniser: Tokeniser = tokenizer.TOKENISER) -> list[list[tuple[str, float]]]:
    """Completions in groups side by side: each one's text, and the mean log-probability of its sampled tokens."""
    means = np.asarray(drawn.log_prob).sum(axis=1) / np.maximum(np.asarray(drawn.taken).sum(axis=1), 1)
    rows = [(tokeniser.decode(row), float(mean)) for row, mean in zip(np.asarray(drawn.token), means, strict=True)]
    return [rows[first : first + group] for first in range(0, len(rows), group)]


class ByBudget(NamedTuple):
    """Shares of right answers with chains of at most so many steps."""

    steps: int
    pass_at_1: float
    majority: float  # of all samples


class BySamples(NamedTuple):
    """Shares of right answers of so many samples of each problem, the mean over all parts of the samples."""

    samples: int
    majority: float
    some: float  # share of problems with a right sample: pass@k


class Stopped(NamedTuple):
    """Savings of the early stop."""

    drawn: float  # mean number of samples of a problem
    share: float  # of all samples
    accuracy: float  # share of right answers
    full: float  # share of right answers where all samples vote


class Thinking(NamedTuple):
    """Accuracy by budgets of steps and by samples, and the early stop beside all samples."""

    budgets: tuple[ByBudget, ...]
    samples: tuple[BySamples, ...]
    stop: Stopped

    def plain(self) -> dict[str, Any]:
        """Plain dicts and lists for JSON."""
        rows = {name: [each._asdict() for each in getattr(self, name)] for name in ("budgets", "samples")}
        return rows | {"stop": self.stop._asdict()}


def think(
    task: Task,
    questions: Sequence[Problem],
    bank: Bank,
    params: Params,
    key: Key,
    *,
    config: ModelConfig,
    sampling: Sampling,
    settings: Config,
    tokeniser: Tokeniser = tokenizer.TOKENISER,
) -> Thinking:
    """Accuracy of a policy on `questions`, the problems of `bank`, by budget, by samples, and with the early stop of
    `settings`.

    `settings.samples` equals `sampling.group`, or ValueError is raised; budgets go from 0 steps to those of the longest
    problem. A task that the host checks has no budgets.
    """
    if settings.samples != sampling.group:
        raise ValueError(f"samples is {settings.samples}; it must be the group, {sampling.group}")
    group, by_budget = sampling.group, []
    if task.exact:
        evaluate = evaluate_reasoning(config, sampling)
        for steps in range(max(len(problem.steps) for problem in questions) + 1):
            scored, _ = jax.device_get(evaluate(params, bank, key, jnp.int32(steps)))
            by_budget.append(ByBudget(steps, float(np.mean(scored.pass_at_1)), float(np.mean(scored.majority_at_k))))
        drawn = jax.device_get(evaluate(params, bank, key, jnp.int32(UNBOUNDED)))[1]
    else:
        drawn = evaluate_on_host(task, questions, config, sampling, tokeniser)(params, bank, key)[1]
    scores, by_samples = jax.jit(quality, static_argnums=2), []
    counts = [1 << power for power in range(group.bit_length()) if group % (1 << power) == 0]
    for count in sorted({*counts, group}):
        if task.exact:
            parts = jax.tree.map(functools.partial(jnp.repeat, repeats=group // count, axis=0), bank)
            scored = jax.device_get(scores(parts, drawn, count))
        else:
            problems = [problem for problem in questions for _ in range(group // count)]
            scored = quality_on_host(task, problems, drawn, tokeniser, count)
        by_samples.append(BySamples(count, float(np.mean(scored.majority_at_k)), float(np.mean(scored.pass_at_k))))
    stop = stopped(task, questions, texts(drawn, group, tokeniser), settings)
    return Thinking(tuple(by_budget), tuple(by_samples), stop)


def stopped(
    task: Task, questions: Sequence[Problem], drawn: Sequence[Sequence[tuple[str, float]]], settings: Config
) -> Stopped:
    """Accuracy of drawn samples, taken in order, with an early stop, and of all of them."""

    def solved(lead: float) -> tuple[float, float]:
        """Mean samples of a problem and share of right answers."""
        left = {problem.prompt: iter(each) for problem, each in zip(questions, drawn, strict=True)}

        def draw(prompts: Sequence[str], count: int) -> list[list[tuple[str, float]]]:
            return [[next(left[prompt]) for _ in range(count)] for prompt in prompts]

        rule = Config(settings.samples, settings.wave, lead, settings.select, cache=0)
        solutions = ReasoningOptimizer(task, draw, rule).solve(questions)
        right = [each.chain is not None and each.chain.reward == 1.0 for each in solutions]
        return float(np.mean([each.drawn for each in solutions])), float(np.mean(right))

    count, accuracy = solved(settings.lead)
    return Stopped(count, count / settings.samples, accuracy, solved(0.0)[1])
