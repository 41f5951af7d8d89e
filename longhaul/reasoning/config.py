"""Configurations of reasoning: problems, the language model, the gate between imitation and rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from longhaul.reasoning import tasks
from longhaul.reasoning.tasks import Task

MADE: dict[str, Callable[[int, int], Task]] = {
    "arithmetic": tasks.arithmetic,
    "addition": tasks.addition,
    "countdown": lambda fewest, most: tasks.countdown(most),
}
"""Tasks with generated problems: name -> (fewest, most) -> the task."""


EXACT = ("arithmetic", "addition")
"""Tasks with one right answer, which the device can check."""


QUESTIONS = "questions"
"""Task whose problems come from a file."""


TASKS = (*MADE, QUESTIONS)


@dataclass(frozen=True)
class Reasoning:
    """Problems with answers that a program checks. Of a run, `num_envs` are problems of an update, a group of
    completions each, and `num_steps` the most tokens of one."""

    task: str = "arithmetic"
    fewest: int = 1  # operations of a problem, or digits
    most: int = 4  # likewise; or numbers of countdown
    held_out_fewest: int = 2  # of a problem held out
    problems: int = 16_384  # to train on
    wave: int = 128  # completions that are sampled together
    questions: str = ""  # of the task "questions": a JSONL file (`questions.questions`)
    held_out_questions: str = ""  # another, of those held out; "": they are taken from the first
    check: str = "numeric"  # how answers are compared
    template: str = "{question}\n"  # what is around a question

    @property
    def exact(self) -> bool:
        """True where the device can check completions."""
        return self.task in EXACT


CHAINS = ("solver", "own")


@dataclass(frozen=True)
class GateConfig:
    """Gate between imitation and rewards."""

    threshold: float = 0.0  # soundness from which on rewards teach; 0: always
    hysteresis: float = 0.1  # so far below the threshold it must fall to be taught again
    patience: int = 10  # looks without a rise until the gate stays open
    rise: float = 0.01  # of the best soundness since the gate closed, to count as one
    every: int = 10  # updates between two looks while it is closed
    chains: str = "solver"  # whose chains are imitated then: one of CHAINS
    fewest: int = 4  # own chains of a shard's update, below which nothing is learnt from them


FAMILIES = ("llama", "qwen2", "qwen3")
"""Qwen2 adds biases to queries, keys and values; Qwen3 has none, and normalises each head's queries and keys."""


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than those of the training.

    "linear" divides all by `factor`. "llama3" leaves wavelengths below original / high_freq_factor alone, divides those
    above original / low_freq_factor, and goes smoothly from one to the other between.
    """

    kind: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original: int = 8192  # tokens of the context before


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a language model. `huggingface.config_of` reads it from a config.json."""

    family: str = "qwen3"
    vocabulary: int = 23
    width: int = 64
    layers: int = 2
    heads: int = 2
    kv_heads: int = 2  # heads of keys and values, each shared by heads / kv_heads heads of queries
    head_dim: int = 32
    hidden: int = 192  # of the gated perceptron
    eps: float = 1e-6  # of the root mean square normalisation
    theta: float = 10_000.0  # base of the rotary frequencies
    rope_scaling: RopeScaling | None = None
    tied: bool = True  # the embedding is the output's kernel, too
    context: int = 4096  # tokens that it was trained on; told to others, and no bound here
    pad: int = 0  # the token that pads, and is never chosen; -1: none of the vocabulary, and -1 pads
    precision: str = "fp32"  # of the layers; parameters and logits are as they are
    remat: str = "none"  # what of a layer is computed again for the gradient: networks.config.REMATS

    @property
    def biased(self) -> bool:
        return self.family == "qwen2"

    @property
    def normed(self) -> bool:
        return self.family == "qwen3"
