"""More thinking at fixed weights: chains in waves, their votes, an early stop, and a cache of what was found.

Self-consistency (Wang et al. 2022, arXiv 2203.11171) draws chains and lets their answers vote; adaptive consistency
(Aggarwal et al. 2023, 2305.11860) stops once the vote is settled. Here it is settled when the leader is `lead` votes
ahead, or can't be caught with the samples that are left. The budget of a chain is in steps, not tokens (`sampling`).

A cached answer is of one version of the weights, and a new version forgets it; but a chain that the checker accepts is
a fact, and stays. So the cache is a replay of verified chains, too, for imitation.

No JAX: who draws chains is an argument (`drawing.py` has the model).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longhaul.reasoning.tasks import Problem, Task

SELECTIONS = ("majority", "weighted", "verified", "best_of_n")


class Chain(NamedTuple):
    """One completion of a problem, judged."""

    text: str
    answer: str | None  # None: it never ended
    steps: tuple[str, ...]
    log_prob: float  # mean of its tokens
    soundness: float  # share of its steps that are the problem's
    reward: float  # what the checker gives


class Solution(NamedTuple):
    """What was found about a problem."""

    prompt: str
    answer: str | None
    chain: Chain | None  # the best that ends in the answer
    chains: tuple[Chain, ...]
    votes: dict[str, float]  # answer -> its votes, most first
    drawn: int  # chains for this call: 0 where the cache knew
    settled: bool  # before all samples were drawn


Draw = Callable[[Sequence[str], int], list[list[tuple[str, float]]]]
"""(prompts, chains of each) -> of each prompt its (completion, mean log-probability of its tokens)."""


@dataclass(frozen=True)
class Config:
    """How much is thought, and what of it counts."""

    samples: int = 16  # chains of a problem, at most
    wave: int = 4  # chains that are drawn before votes are counted
    lead: float = 2.0  # votes ahead at which it stops; 0: never early
    select: str = "majority"  # one of SELECTIONS
    cache: int = 1024  # problems; 0: none


def check(config: Config) -> None:
    """Raises ValueError, naming value, bound and remedy."""
    for name, least in (("samples", 1), ("wave", 1), ("lead", 0), ("cache", 0)):
        if getattr(config, name) < least:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least {least}")
    if config.select not in SELECTIONS:
        raise ValueError(f"select is {config.select!r}; it must be one of {', '.join(SELECTIONS)}")


# -------------------------------------------------------------------------------------------------------- selection


def judge(task: Task, problem: Problem, text: str, log_prob: float) -> Chain:
    """A completion of a problem as a chain."""
    written = task.reading(text)
    return Chain(text, written.answer, written.steps, log_prob, task.soundness(problem, text),
                 task.reward(problem, text))  # fmt: skip


def votes(chains: Sequence[Chain], select: str) -> dict[str, float]:
    """answer -> votes, most first; of equal ones the first written. "weighted" votes by soundness."""
    counted: Counter[str] = Counter()
    for chain in chains:
        if chain.answer is not None:
            counted[chain.answer] += chain.soundness if select == "weighted" else 1.0  # type: ignore[assignment]
    return dict(counted.most_common())


def choose(chains: Sequence[Chain], select: str) -> Chain | None:
    """The chain whose answer is given; None where none ended.

    "verified" is the first that the checker accepts, "best_of_n" the one with the greatest reward, then soundness;
    where none is accepted, and for the others, the leader of the votes, by its soundest, then likeliest chain.
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
    """Whether further samples are not worth drawing."""
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
    """Answers problems by chains of a policy of some version, and remembers.

    Example: `ReasoningOptimizer(task, draw).solve(["3+4-2="])[0].answer`.
    """

    def __init__(self, task: Task, draw: Draw, config: Config | None = None, *, version: int = 0) -> None:
        """`task` must say what a prompt means (`Task.posed`). Raises ValueError for a config that can't be."""
        config = config or Config()
        check(config)
        self.config, self.version = config, version
        self._task, self._draw = task, draw
        self._known: OrderedDict[str, _Entry] = OrderedDict()

    def update(self, draw: Draw, version: int) -> None:
        """Goes on with other weights. What was found with those before is forgotten, but for verified chains."""
        self._draw, self.version = draw, version

    def verified(self) -> list[tuple[str, Chain]]:
        """(prompt, chain) of all remembered chains that the checker accepts with sound steps."""
        return [(prompt, entry.solution.chain) for prompt, entry in self._known.items()
                if entry.solution.chain is not None and _is_fact(entry.solution.chain)]  # fmt: skip

    def solve(self, prompts: Sequence[str]) -> list[Solution]:
        """The answers to problems, in order. Raises ValueError for a prompt that is no problem of the task."""
        problems = {prompt: self._posed(prompt) for prompt in prompts}
        found = {prompt: solution for prompt in problems if (solution := self._remembered(prompt)) is not None}
        open_: dict[str, list[Chain]] = {prompt: [] for prompt in problems if prompt not in found}
        while open_:
            drawn = len(next(iter(open_.values())))
            count = min(self.config.wave, self.config.samples - drawn)
            asked = [problems[prompt].prompt for prompt in open_]
            for prompt, texts in zip(list(open_), self._draw(asked, count), strict=True):
                chains = open_[prompt]
                chains += [judge(self._task, problems[prompt], *each) for each in texts]
                full, early = len(chains) >= self.config.samples, settled(chains, self.config)
                if full or early:
                    found[prompt] = self._solution(prompt, tuple(open_.pop(prompt)), early and not full)
                    self._remember(prompt, found[prompt])
        return [found[prompt] for prompt in prompts]

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
