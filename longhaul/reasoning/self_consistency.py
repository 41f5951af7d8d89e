"""Self-consistency: several chains of reasoning of one problem, their vote, an early stop, and a cache of solutions.

Self-consistency (Wang et al. 2022, arXiv 2203.11171) samples chains and lets their answers vote; adaptive consistency
(Aggarwal et al. 2023, 2305.11860) stops once the vote is settled. Here it is settled when the leader is `lead` votes
ahead, or cannot be caught with the remaining samples. The budget of a chain is in steps, not tokens (sampler.py).

A cached answer belongs to one version of the weights and is discarded with the next; a chain that the checker accepts
is a fact and stays. So the cache is also a replay of verified chains, for imitation.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning import tokenizer
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.sampler import UNBOUNDED, Drawn, in_waves, sampler
from longhaul.reasoning.tasks import Problem, Task
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.types import Params

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


# -------------------------------------------------------------------------------------------------------- selection


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


# ------------------------------------------------------------------------------------------------------------ solving


class _Entry(NamedTuple):
    version: int
    solution: Solution


class ReasoningOptimizer:
    """Solver of problems by chains of a policy of some version, with a cache.

    Example: `ReasoningOptimizer(task, draw).solve(["3+4-2="])[0].answer`.
    """

    def __init__(self, task: Task, draw: Draw, config: Config | None = None, *, version: int = 0) -> None:
        """Solver of a task with `Task.posed`. Raises ValueError for an impossible config."""
        config = config or Config()
        check(config)
        self.config, self.version = config, version
        self._task, self._draw = task, draw
        self._known: OrderedDict[str, _Entry] = OrderedDict()

    def update(self, draw: Draw, version: int) -> None:
        """New weights. Answers of the old ones are discarded, except verified chains."""
        self._draw, self.version = draw, version

    def verified(self) -> list[tuple[str, Chain]]:
        """Pairs (prompt, chain) of all cached chains that the checker accepts with sound steps."""
        return [(prompt, entry.solution.chain) for prompt, entry in self._known.items()
                if entry.solution.chain is not None and _is_fact(entry.solution.chain)]  # fmt: skip

    def solve(self, prompts: Sequence[str]) -> list[Solution]:
        """Solutions of problems, in order. Raises ValueError for a prompt that is no problem of the task."""
        problems = {prompt: self._posed(prompt) for prompt in prompts}
        solutions = {prompt: cached for prompt in problems if (cached := self._remembered(prompt)) is not None}
        open_: dict[str, list[Chain]] = {prompt: [] for prompt in problems if prompt not in solutions}
        while open_:
            drawn = len(next(iter(open_.values())))
            count = min(self.config.wave, self.config.samples - drawn)
            asked = [problems[prompt].prompt for prompt in open_]
            for prompt, texts in zip(list(open_), self._draw(asked, count), strict=True):
                chains = open_[prompt]
                chains += [judge(self._task, problems[prompt], *each) for each in texts]
                full, early = len(chains) >= self.config.samples, settled(chains, self.config)
                if full or early:
                    solutions[prompt] = self._solution(prompt, tuple(open_.pop(prompt)), early and not full)
                    self._remember(prompt, solutions[prompt])
        return [solutions[prompt] for prompt in prompts]

    def _posed(self, prompt: str) -> Problem:
        if self._task.posed is None:
            raise ValueError(f"{self._task.name} has the problems of its file alone; name one of them")
        return self._task.posed(prompt)

    def _solution(self, prompt: str, chains: tuple[Chain, ...], early: bool) -> Solution:
        best = choose(chains, self.config.select)
        counts = votes(chains, self.config.select)
        return Solution(prompt, best.answer if best else None, best, chains, counts, len(chains), early)

    def _remembered(self, prompt: str) -> Solution | None:
        entry = self._known.get(prompt)
        if entry is None:
            return None
        chain = entry.solution.chain
        if entry.version != self.version and (chain is None or not _is_fact(chain)):
            del self._known[prompt]
            return None
        self._known.move_to_end(prompt)
        return entry.solution._replace(drawn=0)

    def _remember(self, prompt: str, solution: Solution) -> None:
        self._known[prompt] = _Entry(self.version, solution)
        while len(self._known) > self.config.cache:
            self._known.popitem(last=False)


def _is_fact(chain: Chain) -> bool:
    return chain.reward == 1.0 and chain.soundness == 1.0


# ---------------------------------------------------------------------------------------- chains of a language model

ROOM, ROWS = 8, 64
"""Multiple of tokens to which prompts are padded, and completions that are decoded together."""


def drawing(
    config: ModelConfig,
    params: Params,
    *,
    length: int,
    temperature: float = 1.0,
    max_reasoning_steps: int = UNBOUNDED,
    seed: int = 0,
    words: Tokeniser = tokenizer.TOKENISER,
) -> Draw:
    """Sampler of completions of at most `length` tokens and `max_reasoning_steps` steps, different in each call.

    Prompts go in batches of few shapes, so that few programs are compiled.

    After as many steps the answer's mark is inserted. Raises ValueError for a text with unknown characters, and for a
    bound where `words` have no such mark.
    """
    if max_reasoning_steps < 0:
        raise ValueError(f"max_reasoning_steps is {max_reasoning_steps}; it must be at least 0")
    if max_reasoning_steps < UNBOUNDED and words.answer == tokenizer.NONE:
        raise ValueError(f"max_reasoning_steps is {max_reasoning_steps}, and this vocabulary has no mark of an answer")
    sample = jax.jit(in_waves(sampler(config, length, temperature, words=words), ROWS))
    calls = 0

    def draw(prompts: Sequence[str], count: int) -> list[list[tuple[str, float]]]:
        nonlocal calls
        encoded = [words.encode(prompt) for prompt in prompts for _ in range(count)]
        room = -(-max(map(len, encoded)) // ROOM) * ROOM
        rows = 1 << (len(encoded) - 1).bit_length()  # a power of two
        padded = [[words.pad] * (room - len(each)) + each for each in encoded]
        padded += [padded[0]] * (rows - len(padded))
        key = jax.random.fold_in(jax.random.key(seed), calls)
        calls += 1
        drawn = jax.device_get(sample(params, jnp.asarray(np.array(padded, np.int32)), key,
                                      jnp.int32(max_reasoning_steps)))  # fmt: skip
        return texts(drawn, count, words)[: len(prompts)]

    return draw


def texts(drawn: Drawn, group: int, words: Tokeniser = tokenizer.TOKENISER) -> list[list[tuple[str, float]]]:
    """Completions in groups side by side: each one's text, and the mean log-probability of its sampled tokens."""
    means = np.asarray(drawn.log_prob).sum(axis=1) / np.maximum(np.asarray(drawn.taken).sum(axis=1), 1)
    rows = [(words.decode(row), float(mean)) for row, mean in zip(np.asarray(drawn.token), means, strict=True)]
    return [rows[first : first + group] for first in range(0, len(rows), group)]
