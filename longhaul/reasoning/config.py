"""Configurations of reasoning: problems, the language model, the gate between imitation and rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from longhaul.networks.config import PRECISIONS, REMATS
from longhaul.reasoning import tasks
from longhaul.reasoning.tasks import Task
from longhaul.runtime.config_fields import setting

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

GYM = "reasoning-gym:"
"""Beginning of the name of a task of reasoning-gym."""

FORMATS = ("text", "line", "tags")
"""Formats of an answer: the whole completion; its last line; after any thinking, between <answer> and </answer>."""


@dataclass(frozen=True)
class Reasoning:
    """Problems with answers that a program checks. Of a run, `num_envs` are problems of an update, a group of
    completions each, and `num_steps` the most tokens of one."""

    task: str = setting(
        "arithmetic", f"task of the problems: {', '.join(TASKS)}, or reasoning-gym:NAME; longhaul reason shows them"
    )
    task_settings: str = setting("", "settings of a task of reasoning-gym, such as min_terms=2,max_terms=3")
    shots: int = setting(0, "solved examples before each question of reasoning-gym", least=0, most=64)
    answer_format: str = setting(
        "text", "answer of reasoning-gym in a completion: all of it, its last line, or between <answer> tags",
        choices=FORMATS,
    )  # fmt: skip
    chat: bool = setting(False, "put a question into the model's chat template")
    system: str = setting("", "system prompt of --chat")
    stop: str = setting("", "text that ends a completion, beside the model's own tokens; \\n is a newline")
    tools: str = setting(
        "", "functions that a completion calls as [NAME(TEXT)->: calculator, package.module:function, with commas"
    )
    fewest: int = setting(1, "operations of a problem, or digits of a number; at most --most", least=1)
    most: int = setting(4, "most operations or digits; numbers of countdown", least=1, most=64)
    held_out_fewest: int = setting(2, "fewest operations of a held-out problem, on which a run is evaluated", least=1)
    problems: int = setting(16_384, "problems to train on", least=1, most=2**24)
    wave: int = setting(
        128, "completions that are written at a time; where one ends, the next begins; affects speed", least=1,
        most=2**20,
    )  # fmt: skip
    questions: str = setting(
        "", "file of --task questions: JSONL with a question and an answer a line, in GSM8K's format"
    )
    held_out_questions: str = setting(
        "", "another such file, to be evaluated on; none: questions of the first, held out there"
    )
    check: str = setting(
        "numeric", "comparison of answers: numeric, exact, or package.module:function, (problem, completion) -> reward"
    )
    template: str = setting("{question}\n", "text around a question, with {question} in its place; \\n is a newline")

    @property
    def exact(self) -> bool:
        """True where the device can check completions."""
        return self.task in EXACT

    @property
    def in_words(self) -> bool:
        """True where prompts are text in a model's own vocabulary, or in bytes."""
        return self.task == QUESTIONS or self.task.startswith(GYM)


CHAINS = ("solver", "own")


@dataclass(frozen=True)
class GateConfig:
    """Gate between imitation and rewards."""

    threshold: float = setting(
        0.0, "soundness, or share of right answers of a model in words, below which the policy imitates verified "
        "chains; 0: rewards teach always", least=0, most=1,
    )  # fmt: skip
    hysteresis: float = setting(
        0.1, "fall of soundness below the threshold after which imitation begins again", least=0, most=1
    )
    patience: int = setting(10, "looks without a rise after which the gate stays open", least=1)
    rise: float = setting(0.01, "rise of the best soundness since the gate closed that counts", least=0, most=1)
    every: int = setting(10, "updates between two looks while it is closed", least=1)
    chains: str = setting(
        "solver", "source of imitated chains: a solver, or own samples that are right and sound", choices=CHAINS
    )
    verdict: bool = False  # of a model in words: looks at verdicts, as text has no steps to check
    fewest: int = setting(4, "fewest own chains of a device's share of an update that are learnt from", least=1)


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

    family: str = setting(
        "qwen3", "family of the model: Llama, Qwen2 (biases), Qwen3 (normalised queries and keys)", choices=FAMILIES
    )
    vocabulary: int = 23
    width: int = setting(64, "width of the residual stream", least=1)
    layers: int = setting(2, "layers of attention and a gated perceptron", least=1, most=4096)
    heads: int = setting(2, "heads of queries", least=1)
    kv_heads: int = setting(2, "heads of keys and values, each shared by equally many heads of queries", least=1)
    head_dim: int = setting(32, "width of a head", least=1)
    hidden: int = setting(192, "width of the gated perceptron", least=1)
    eps: float = setting(1e-6, "epsilon of the root mean square normalisation")
    theta: float = setting(10_000.0, "base of the rotary frequencies")
    rope_scaling: RopeScaling | None = None
    tied: bool = setting(True, "tie the output's kernel to the embedding")
    context: int = setting(4096, "context length in the model's files; no bound here")
    pad: int = 0  # the token that pads, and is never chosen; -1: none of the vocabulary, and -1 pads
    precision: str = setting(
        "fp32", "type of the layers' computation; parameters and logits are fp32", choices=PRECISIONS
    )
    remat: str = setting("none", "parts of a layer computed again for the gradient, which saves memory", choices=REMATS)
    lora: int = setting(
        0, "rank of LoRA's factors beside each kernel of the layers, which alone are learnt; 0: all learns", least=0,
        most=1024, flag="lora",
    )  # fmt: skip
    frozen: str = setting(
        "fp32", "type in which --lora keeps the kernels that it does not learn; bf16 rounds them, for half the memory",
        choices=PRECISIONS,
    )  # fmt: skip

    @property
    def biased(self) -> bool:
        return self.family == "qwen2"

    @property
    def normed(self) -> bool:
        return self.family == "qwen3"
