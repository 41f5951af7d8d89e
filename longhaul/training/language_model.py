"""Language model in Python: `longhaul.language_model`, which writes by the decoder that `longhaul serve` has."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longhaul.algorithms.config import GRPOConfig
from longhaul.config.run import Run
from longhaul.reasoning import huggingface, problem_sets
from longhaul.reasoning.config import ModelConfig, Reasoning
from longhaul.reasoning.huggingface import Conversation, HubError
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.errors import RunError
from longhaul.runtime.files import expanded
from longhaul.training import reasoning_setup
from longhaul.training.serving import completions, live_weights
from longhaul.types import Params

TOKENS = 256
"""Most tokens of a completion by default, of a model that belongs to no run."""


class Completion(NamedTuple):
    """Text that a model wrote behind a prompt."""

    text: str  # before its end, and before the first stop
    finish: str  # "stop": by an end or a stop; "length": it was cut
    tokens: list[int]  # with the one that ends it
    log_probs: list[float]  # of each token, at the temperature before `top_p` cuts; at temperature 0 those at 1


class Opened(NamedTuple):
    """Language model as its files have it."""

    name: str
    config: ModelConfig  # without LoRA: its factors are merged into `params`
    params: Params
    tokeniser: Tokeniser  # `ask` asks a question as the run asked its own
    chat: Conversation | None  # None without a chat template
    stop: tuple[str, ...]  # texts that end each completion
    length: int | None  # most tokens of a run's completions; None of a model that belongs to no run
    source: str  # folder of the files that a run began with; "" without


def of_run(name: str, run: Run, params: Params) -> Opened:
    """Language model of a run, whose policy's parameters are `params`."""
    assert isinstance(run.environment, Reasoning) and isinstance(run.algorithm, GRPOConfig)
    config, source = run.algorithm.model, run.algorithm.model_folder
    stop = problem_sets.plain(run.environment.stop)
    return Opened(
        name, dataclasses.replace(config, lora=0), live_weights.merged(config, params), reasoning_setup.tokeniser(run),
        _chat(source), (stop,) if stop else (), run.num_steps, source,
    )  # fmt: skip


def of_files(folder: Path) -> Opened:
    """Language model of a folder in Hugging Face's files. Raises RunError, one line, where they are not whole."""
    prepare_devices(1)
    try:
        config, params = huggingface.load(folder)
        tokeniser, name = huggingface.tokeniser(folder), folder.resolve().name
    except HubError as error:
        raise RunError(str(error)) from error
    except ImportError as error:
        raise RunError(f"a model's files need {error.name}; pip install 'longhaul-rl[llm]'") from error
    return Opened(name, config, params, tokeniser, _chat(str(folder)), (), None, str(folder))


def is_model_folder(path: Path) -> bool:
    """True for the folder of a language model in Hugging Face's files."""
    one = (path / "config.json").is_file() or any(path.glob("*.safetensors"))
    return one and not (path / "run.json").is_file()


def _chat(folder: str) -> Conversation | None:
    try:
        return huggingface.conversation(folder) if folder else None
    except HubError:
        return None


class LanguageModel:
    """Language model that answers questions, goes on with texts and takes part in conversations.

    `model(question)` is its likeliest answer, asked as its training asked: in the chat template behind the system
    prompt, where the run had these. Tools of a run are not called: `longhaul reason` calls them.
    """

    def __init__(self, opened: Opened) -> None:
        self.name, self.config, self.params = opened.name, opened.config, opened.params
        self.tokeniser, self.source = opened.tokeniser, opened.source
        self._opened = opened

    def __repr__(self) -> str:
        return f"LanguageModel({self.name}, width {self.config.width}, {self.config.layers} layers)"

    def __reduce__(self) -> Any:
        raise TypeError("a LanguageModel can't be pickled; load it where it is needed: longhaul.language_model(RUN)")

    def __call__(
        self, question: str | Sequence[str], *, max_tokens: int | None = None, temperature: float = 0.0,
        top_p: float = 1.0, stop: str | Sequence[str] = (), seed: int = 0,
    ) -> str | list[str]:  # fmt: skip
        """Answer to a question, or the answers to several. The settings are those of `complete`."""
        single = isinstance(question, str)
        prompts = [self._read(each, self.tokeniser.ask) for each in _listed("question", question)]
        rows = self._write(prompts, 1, max_tokens, temperature, top_p, stop, seed)
        texts = [row.text for (row,) in rows]
        return texts[0] if single else texts

    def complete(
        self, prompt: str | Sequence[str], *, n: int = 1, max_tokens: int | None = None, temperature: float = 0.0,
        top_p: float = 1.0, stop: str | Sequence[str] = (), seed: int = 0,
    ) -> list[list[Completion]]:  # fmt: skip
        """`n` completions of each prompt, a text that the model goes on with as it stands.

        At `temperature` 0 each token is the likeliest; else it is drawn, from the likeliest that have probability
        `top_p` together. `seed` makes it the same each time. A completion ends at the model's end, at the first of the
        texts `stop`, or after `max_tokens` (the run's length; 256 without a run). Raises RunError, one line.
        """
        prompts = [self._read(each, self.tokeniser.encode) for each in _listed("prompt", prompt)]
        return self._write(prompts, n, max_tokens, temperature, top_p, stop, seed)

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, max_tokens: int | None = None, temperature: float = 0.0,
        top_p: float = 1.0, stop: str | Sequence[str] = (), seed: int = 0,
    ) -> str:  # fmt: skip
        """Reply to a conversation, {"role": "user", "content": TEXT} and the like, in the model's chat template."""
        conversation = self._opened.chat
        if conversation is None:
            raise RunError(f"{self.name} has no chat template; model.complete goes on with a text")
        if not messages or not all(
            isinstance(each, Mapping) and all(isinstance(each.get(name), str) for name in ("role", "content"))
            for each in messages
        ):
            raise RunError(f"messages is {messages!r:.100}; it must be a list of {{'role': ..., 'content': ...}}")
        try:
            prompt = conversation(messages)
        except HubError as error:
            raise RunError(str(error)) from error
        ((row,),) = self._write([prompt], 1, max_tokens, temperature, top_p, stop, seed)
        return row.text

    def export(self, folder: str | Path) -> Path:
        """Folder of the model in Hugging Face's files, which transformers, vLLM and SGLang read."""
        out = expanded(folder)
        huggingface.save(out, self.config, self.params, source=self._opened.source or None)
        return out

    def close(self) -> None:
        """End of the thread that decodes; a later call begins another."""
        if self.__dict__.pop("_engine", None) is not None:
            self._end()  # which gives up the engine, and its memory

    @functools.cached_property
    def _engine(self) -> completions.Engine:
        limits = completions.Limits(self.config.context, self.config.context, queue=1 << 30)
        engine = completions.Engine(self.config, self.params, self.tokeniser, limits)
        self._end = weakref.finalize(self, engine.queue.close)
        return engine

    def _read(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        try:
            numbers = encode(text)
        except ValueError as error:
            raise RunError(f"{text!r:.60} can't be read: {error}") from error
        if not numbers:
            raise RunError(f"{text!r} has no token; give a text")
        return numbers

    def _write(
        self, prompts: list[list[int]], n: int, max_tokens: int | None, temperature: float, top_p: float,
        stop: str | Sequence[str], seed: int,
    ) -> list[list[Completion]]:  # fmt: skip
        """`n` completions of each prompt."""
        longest, context = max(map(len, prompts), default=0), self.config.context
        most = min(self._opened.length or TOKENS, context - longest) if max_tokens is None else max_tokens
        _check_whole("n", n, 1)
        _check_whole("seed", seed, 0)
        if max_tokens is not None:
            _check_whole("max_tokens", max_tokens, 1)
        if longest + max(most, 1) > context:
            raise RunError(
                f"a prompt has {longest} tokens, and max_tokens is {max(most, 1)}: more than the model's context of "
                f"{context}; give fewer"
            )
        if temperature != 0.0 and not completions.LEAST_TEMPERATURE <= temperature <= completions.MOST_TEMPERATURE:
            raise RunError(
                f"temperature is {temperature!r}; it must be 0, or {completions.LEAST_TEMPERATURE:g} to "
                f"{completions.MOST_TEMPERATURE:g}"
            )
        if not 0.0 < top_p <= 1.0:
            raise RunError(f"top_p is {top_p!r}; it must be above 0, and at most 1")
        if n > 1 and temperature == 0.0:
            raise RunError(f"n is {n} at temperature 0, where all completions are the same; give a temperature")
        stops = _listed("stop", stop)
        if not all(stops):
            raise RunError("stop has an empty text; leave it out")
        if not prompts:
            return []
        job = completions.Job(
            prompts, most, math.inf, n, float(temperature), float(top_p), (*stops, *self._opened.stop), seed
        )
        self._engine.queue.submit(job)
        try:
            job.done.result()
        except BaseException:
            job.cancelled = True  # after Ctrl-C, say
            raise
        rows = [
            Completion(completions.text_of(self.tokeniser, job, row), row.finish, row.tokens, row.log_probs)
            for row in job.rows
        ]
        return [rows[first : first + n] for first in range(0, len(rows), n)]


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise RunError(f"{name} is {value!r}; it must be a whole number, {least} at least")


def _listed(name: str, texts: str | Sequence[str]) -> list[str]:
    listed = [texts] if isinstance(texts, str) else list(texts)
    for each in listed:
        if not isinstance(each, str):
            raise RunError(f"{name} is {each!r:.60}; it must be a text, or a list of texts")
    return listed
