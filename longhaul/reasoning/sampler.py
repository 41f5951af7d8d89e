"""Sampling of completions: a bank of problems on the device, groups of completions, their checks, the collector.

A problem's answer stands in the bank as tokens, so that rewards are computed where completions are sampled and an
update is one compiled program. That is for tasks with one right answer (`Task.exact`); for others the bank has prompts
and demonstrations, and the host checks the completions (`marking`).

A budget is in steps, not tokens: after that many steps the answer's mark is inserted (s1, Muennighoff et al. 2025,
arXiv 2501.19393). Such a token was not sampled, and `taken` is False for it: no loss may count it. The learner's
`transformer.forward` reads the prompt, `decode.step` each later token; they agree up to rounding. Both give float32
logits, used at the same temperature.

Each completion has a key of its own: its tokens depend on neither its batch nor its place there. Where draws are
truncated (top-k, top-p, min-p) both log-probabilities are recorded, before and after; the learner's ratio is to the
former.

Where we differ from engines for large models: all completions of a wave take the slots of the longest allowed one, so
that shapes are static and memory never grows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import prng
from longhaul.reasoning import decode, draw, tokenizer, transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.tasks import Problem, Task
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.reasoning.verifier import Marks, checked, ended, marks
from longhaul.runtime.errors import FieldError
from longhaul.types import INFERENCE, Collector, Key, Metrics, Params

LOGITS = 2**23
"""Most logits that a loss has at a time: 32 MB, whatever the batch. Their gradient computes them again."""

APART = 8
"""One problem in so many is for looks at a closed gate alone."""

UNBOUNDED = 2**30
"""Budget of steps that no completion reaches."""


class Bank(NamedTuple):
    """Problems as tokens, M of them, easier ones first: prompts padded on the left, the rest on the right."""

    prompt: jax.Array  # int32 [M, P]
    solution: jax.Array  # int32 [M, N], with all steps
    demonstration: jax.Array  # int32 [M, N]


class Completions(NamedTuple):
    """Completions of at most N tokens, B of them, those of one problem side by side: the learner's data.

    Example: the prompt "3+4=" and the completion ">2$" under a budget of 0 steps: `written` is True for three tokens,
    `taken` for "2" and "$", because `>` was inserted.
    """

    prompt: jax.Array  # int32 [B, P]
    token: jax.Array  # int32 [B, N], PAD behind the end
    written: jax.Array  # bool [B, N]: up to and with the end
    taken: jax.Array  # bool [B, N]: a loss may count it: sampled by the policy and, for OWN, in a verified chain
    log_prob: jax.Array  # float32 [B, N], of sampling, before truncation; 0 where it was not sampled
    behaviour: jax.Array  # float32 [B, N]: the same after top-k, top-p and min-p
    reward: jax.Array  # float32 [B]
    soundness: jax.Array  # float32 [B]
    lesson: jax.Array  # int32 [B], one of those below
    version: jax.Array  # int32 [B]: number of updates behind the weights
    problem: jax.Array  # int32 [B]: place in the bank
    cut: jax.Array  # bool [B]: without an end; known together with the reward

    @property
    def taught(self) -> jax.Array:
        """Flag bool [B]: to be imitated, for any reward."""
        return self.lesson != SAMPLED


def together(parts: Sequence[Completions]) -> Completions:
    """One batch of the completions of several samplers, whole groups side by side."""
    return jax.tree.map(lambda *each: jnp.concatenate(each), *parts)


SAMPLED, DEMONSTRATED, SOLVED, OWN = range(4)
"""Lessons: the policy's own completions, to be rewarded; the bank's demonstrations; its verified solutions; own
completions, of which the verified ones are imitated."""


class Speaker(NamedTuple):
    """Part of a learner's state that sampling needs."""

    params: Params
    lesson: jax.Array  # int32: kind of the next completions
    reach: jax.Array  # float32: share of the bank, from its beginning, that may be imitated
    look: jax.Array | int = 0  # int32: 1 for a look at a closed gate


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling."""

    length: int = 34  # most tokens of a completion
    group: int = 16  # completions of a problem
    temperature: float = 1.0  # 0: always the likeliest token
    wave: int = 64  # rows decoded together; on a CPU fewer stay in its cache
    top_k: int = 0  # most tokens to draw from; 0: all
    top_p: float = 1.0  # probability of the likeliest tokens, from which alone one is drawn
    min_p: float = 0.0  # least probability of a token, as a share of the likeliest one's

    @property
    def rule(self) -> draw.Rule:
        return draw.Rule(self.temperature, self.top_k, self.top_p, self.min_p)


def check(sampling: Sampling) -> None:
    """Raises FieldError, with value, bound and remedy."""
    for name, least in (("temperature", 0.0), ("top_k", 0), ("min_p", 0.0)):
        if not getattr(sampling, name) >= least:
            raise FieldError(name, getattr(sampling, name), f"it must be at least {least:g}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise FieldError("top_p", sampling.top_p, "it must be above 0 and at most 1; 1 keeps all tokens")
    if not sampling.min_p <= 1.0:
        raise FieldError("min_p", sampling.min_p, "it must be at most 1; 0 keeps all tokens")


# ------------------------------------------------------------------------------------------------------------- banks


def bank(
    task: Task,
    problems: Sequence[Problem],
    rng: np.random.Generator,
    length: int,
    words: Tokeniser = tokenizer.TOKENISER,
) -> Bank:
    """Bank of a task's problems, with a demonstration of each, for completions of at most `length` tokens.

    Raises ValueError for a longer text; texts of questions from a file (`Task.listed`) are cut instead.
    """

    def ended(text: str) -> list[int]:
        numbers = words.encode(text)
        return numbers if numbers and numbers[-1] in words.ends else [*numbers, *words.ends[:1]]

    prompts = [words.ask(problem.prompt) for problem in problems]
    solutions = [ended(task.solution(problem, rng)) for problem in problems]
    demonstrations = [ended(task.demonstration(problem, rng)) for problem in problems]
    longest = max(map(len, [*solutions, *demonstrations]))
    if longest > length and not task.listed:
        raise ValueError(f"length is {length}, and a solution has {longest} tokens; give at least as many")
    room = max(map(len, prompts))
    left = np.array([[words.pad] * (room - len(each)) + each for each in prompts], np.int32)
    solution, demonstration = (
        np.array([each[:length] + [words.pad] * (length - len(each)) for each in some], np.int32)
        for some in (solutions, demonstrations)
    )
    return Bank(jnp.asarray(left), jnp.asarray(solution), jnp.asarray(demonstration))


# ---------------------------------------------------------------------------------------------------------- sampling


class Drawn(NamedTuple):
    """Fields of `Completions` from sampling."""

    token: jax.Array
    written: jax.Array
    taken: jax.Array
    log_prob: jax.Array
    behaviour: jax.Array


class _Decoding(NamedTuple):
    """State between two tokens."""

    t: jax.Array
    cache: decode.Cache
    logits: jax.Array  # [V, B], of the next token
    drawn: Drawn  # [N, B], time first, so that one token of all rows is one block
    steps: jax.Array  # int32 [B], written so far
    matched: jax.Array  # int32 [B]: characters of the stop text with which a row ends
    answering: jax.Array  # bool [B]: the mark is written
    ended: jax.Array  # bool [B]


def sampler(
    config: ModelConfig,
    how: Sampling,
    *,
    ends: bool = True,
    words: Tokeniser = tokenizer.TOKENISER,
) -> Callable[..., Drawn]:
    """Function (params, prompt [M, P], keys [M * group], budget) -> a group of completions of each prompt, which is
    read once; a loop of decode steps. A completion depends on its prompt and key alone.

    `budget` int32: most steps of each; it has no effect for `words` without steps and answers. The loop ends with the
    longest completion; without `ends`, with the last allowed token. Raises FieldError for an impossible `how`.
    """
    check(how)
    pad, length, group, rule = words.pad, how.length, how.group, how.rule

    def sample(params: Params, prompt: jax.Array, keys: Key, budget: jax.Array) -> Drawn:
        rows, room = group * prompt.shape[0], prompt.shape[1]
        hidden, kept = transformer.trunk(config, params, prompt, prompt != pad, keeps=True)
        assert kept is not None
        logits = jnp.repeat(transformer.unembed(config, params, hidden[:, -1]), group, axis=0).T
        kept = jax.tree.map(lambda x: jnp.repeat(x, group, axis=1), kept)
        prompt = jnp.repeat(prompt, group, axis=0)
        nothing, none = jnp.zeros((length, rows), bool), jnp.zeros(rows, bool)
        zero = jnp.zeros((length, rows))
        blank = Drawn(jnp.full((length, rows), pad, jnp.int32), nothing, nothing, zero, zero)
        cache = decode.begin(kept, prompt != pad, room + length)
        zeros = jnp.zeros(rows, jnp.int32)
        begun = _Decoding(jnp.int32(0), cache, logits, blank, zeros, zeros, none, none)
        kernels = decode.prepare(config, params, room + length)
        uniforms = jax.vmap(lambda key: prng.uniform(key, (length, 2)), out_axes=1)(keys)

        def one(now: _Decoding) -> _Decoding:
            token, *log_probs = draw.chosen(now.logits, uniforms[now.t], rule, pad)
            forced = (now.steps >= budget) & ~now.answering
            token = jnp.where(now.ended, pad, jnp.where(forced, words.answer, token))
            taken = ~now.ended & ~forced
            row = Drawn(token, ~now.ended, taken, *(jnp.where(taken, x, 0.0) for x in log_probs))
            drawn = jax.tree.map(lambda all_, new: jax.lax.dynamic_update_index_in_dim(all_, new, now.t, 0), now.drawn,
                                 row)  # fmt: skip
            answering = now.answering | (token == words.answer)
            count = now.steps + ((token == words.step) & ~now.answering)
            logits, cache = decode.step(config, kernels, token, now.cache)
            matched, stops = now.matched, _any_of(token, words.ends)
            if words.stop is not None:
                matched = jnp.asarray(words.stop)[now.matched, token]
                stops |= matched == len(words.stop)
            ended = now.ended | stops & ends
            matched = jnp.where(ended, 0, matched)
            return _Decoding(now.t + 1, cache, logits, drawn, count, matched, answering, ended)

        def goes_on(now: _Decoding) -> jax.Array:
            return (now.t < length) & ~jnp.all(now.ended)

        with jax.named_scope(INFERENCE):
            drawn = jax.lax.while_loop(goes_on, one, begun).drawn
        return jax.tree.map(jnp.transpose, drawn)

    return sample


def _any_of(token: jax.Array, numbers: Sequence[int]) -> jax.Array:
    """Flag of each token: it is one of `numbers`; bool."""
    return functools.reduce(jnp.logical_or, (token == number for number in numbers), jnp.zeros(token.shape, bool))


def in_waves(sample: Callable[..., Drawn], wave: int) -> Callable[..., Drawn]:
    """Sampler that decodes at most about `wave` prompts at a time."""

    def some(params: Params, prompt: jax.Array, keys: Key, budget: jax.Array) -> Drawn:
        rows = prompt.shape[0]
        count = next(n for n in range(-(-rows // wave), rows + 1) if rows % n == 0)
        if count == 1:
            return sample(params, prompt, keys, budget)
        parts = prompt.reshape(count, rows // count, -1), keys.reshape(count, -1)
        drawn = jax.lax.map(lambda each: sample(params, *each, budget), parts)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), drawn)

    return some


def log_probs(
    config: ModelConfig, params: Params, prompt: jax.Array, text: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """(log-probability of each token, entropy of its distribution), float32 [B, N], of completions [B, N].

    `prompt` [M, P]: one for B / M completions side by side, and read once. All tokens up to the padding, `config.pad`,
    are read. Differentiable, but for the entropy.
    """
    (rows, steps), asked = text.shape, prompt != config.pad
    shared = rows > len(prompt)
    if shared:
        first, kept = transformer.trunk(config, params, prompt, asked, keeps=True)
        assert kept is not None
        before, read = transformer.Past(kept, asked), text[:, :-1]
        rest, _ = transformer.trunk(config, params, read, read != config.pad, past=before)
        hidden = jnp.concatenate([jnp.repeat(first[:, -1:], rows // len(prompt), axis=0), rest], axis=1)
    else:
        whole = jnp.concatenate([prompt, text], axis=1)
        hidden = transformer.trunk(config, params, whole, whole != config.pad)[0][:, prompt.shape[1] - 1 : -1]

    @jax.checkpoint
    def some(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        inner, token = part
        scores = draw.scored(transformer.unembed(config, params, inner), temperature, pad=config.pad)
        fixed = jax.lax.stop_gradient(scores)
        chosen = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0]
        return chosen, -jnp.sum(jnp.exp(fixed) * fixed, axis=-1)

    flat = hidden.reshape(rows * steps, -1), text.reshape(-1)
    size = max(1, LOGITS // config.vocabulary)
    if rows * steps <= size:
        found = some(flat)
    else:  # a whole number of pieces, so that one program computes each
        count = -(-rows * steps // size)
        short = count * size - rows * steps
        pieces = jax.tree.map(
            lambda x: jnp.pad(x, [(0, short), *[(0, 0)] * (x.ndim - 1)]).reshape(count, size, *x.shape[1:]), flat
        )
        found = jax.tree.map(lambda x: x.reshape(-1)[: rows * steps], jax.lax.map(some, pieces))
    return jax.tree.map(lambda x: x.reshape(rows, steps), found)


# --------------------------------------------------------------------------------------------------------- collector


def judged(
    data: Completions, marks: Marks, ended: Any, group: int, *, stepwise: bool = True
) -> tuple[Completions, dict[str, Any]]:
    """(completions with rewards and soundness, sums over them), on the host and on the device. `ended` bool [B].

    Of the policy's own chains to imitate, only the first verified one of a problem counts: the others are the same. Its
    answer is right and, where texts have steps, it is sound.
    """
    rows = data.token.shape[0]
    facts = ((marks.reward == 1.0) & ((marks.soundness == 1.0) | (not stepwise))).reshape(-1, group)
    first = (facts & (facts.cumsum(axis=1) == 1)).reshape(-1, 1)
    taken = data.taken & (first | (data.lesson != OWN)[:, None])
    groups = marks.reward.reshape(-1, group)
    sums = {
        "episodes": rows,
        "episode/return": marks.reward.sum(),
        "episode/length": data.written.sum(),
        "episode/soundness": marks.soundness.sum(),
        "episode/steps": marks.steps.sum(),
        "episode/cut": rows - ended.sum(),
        "episode/informative": group * (groups.max(axis=1) > groups.min(axis=1)).sum(),
    }
    return data._replace(taken=taken, reward=marks.reward, soundness=marks.soundness, cut=~ended), sums


Marking = Callable[[Completions, Metrics], tuple[Completions, Metrics]]
"""(sampled completions, sums over them) -> both with rewards; NumPy's arrays."""


def marking(task: Task, problems: Sequence[Problem], words: Tokeniser, group: int) -> Marking:
    """Function that checks completions of a bank of these problems on the host, in groups.

    It runs between sampling and learning, in the actor that sampled; in an asynchronous run beside the learner.
    """

    def mark(data: Completions, metrics: Metrics) -> tuple[Completions, Metrics]:
        token = np.asarray(data.token)
        asked = [problems[int(place)] for place in np.asarray(data.problem)]
        known, sums = judged(
            data, marks(task, asked, map(words.decode, token)), ended(token, words), group,
            stepwise=words.step != tokenizer.NONE,
        )  # fmt: skip
        whole: Metrics = {name: np.asarray(sums[name], np.float32) for name in metrics}  # type: ignore[misc]
        return known, whole

    return mark


def chosen_problems(key: Key, prompts: int, count: int) -> jax.Array:
    """Places int32 [prompts] in a bank of `count` problems: those of a rollout."""
    return jax.random.randint(key, (prompts,), 0, count)


def collector(
    config: ModelConfig,
    problems: Bank,
    sampling: Sampling,
    *,
    prompts: int,
    words: Tokeniser = tokenizer.TOKENISER,
    exact: bool = True,
    gated: bool = False,
) -> Collector:
    """Collector of groups of completions of `prompts` random problems, to be rewarded or imitated where verified; or of
    as many texts of the bank, to be imitated.

    `params` are a `Speaker`, whose `lesson` decides. Metrics are sums over the completions: of reward
    ("episode/return"), tokens ("episode/length"), soundness, steps, completions cut at the length, and completions in
    groups whose rewards differ, from which something is learnt. If the device can't check them (not `exact`), rewards
    and sums are 0 until `marking` computes them. If `gated`, every `APART`th problem is for looks at a closed gate, and
    is never imitated.
    """
    if not sampling.temperature > 0.0:
        raise ValueError(f"temperature is {sampling.temperature}; to learn it must be above 0")
    rows = prompts * sampling.group
    sample = in_waves(sampler(config, sampling, words=words), max(1, sampling.wave // sampling.group))
    count = problems.prompt.shape[0]
    gated = gated and count >= APART

    def start(key: Key) -> tuple[()]:
        return ()

    def unseen(key: Key, rows: int, reach: jax.Array | int) -> jax.Array:
        """Problems of the first `reach` that no look is at."""
        place = jax.random.randint(key, (rows,), 0, jnp.maximum(reach - reach // APART, 1))
        return place + place // (APART - 1)

    def of_the_bank(speaker: Speaker, key: Key, text: jax.Array) -> tuple[jax.Array, Drawn]:
        reach = jnp.clip(jnp.ceil(count * speaker.reach).astype(jnp.int32), 1, count)
        which = unseen(key, rows, reach) if gated else jax.random.randint(key, (rows,), 0, reach)
        written = text[which] != words.pad
        nothing = jnp.zeros(written.shape)
        return which, Drawn(text[which], written, written, nothing, nothing)

    def sampled(speaker: Speaker, key: Key) -> tuple[jax.Array, Drawn]:
        key_which, key_sample = jax.random.split(key)
        which = chosen_problems(key_which, prompts, count)
        if gated:
            looked = which // APART * APART + APART - 1
            looked = jnp.where(looked < count, looked, APART - 1)
            which = jnp.where(speaker.look == 1, looked, which)
            which = jnp.where(speaker.lesson == OWN, unseen(key_which, prompts, count), which)
        drawn = sample(speaker.params, problems.prompt[which], prng.split(key_sample, rows), jnp.int32(UNBOUNDED))
        return jnp.repeat(which, sampling.group), drawn

    lessons = (
        sampled,
        lambda speaker, key: of_the_bank(speaker, key, problems.demonstration),
        lambda speaker, key: of_the_bank(speaker, key, problems.solution),
    )

    def collect(
        speaker: Speaker, carry: tuple[()], key: Key, version: jax.Array
    ) -> tuple[tuple[()], Completions, Metrics]:
        source = jnp.where(speaker.lesson == OWN, SAMPLED, speaker.lesson)
        which, drawn = jax.lax.switch(source, lessons, speaker, key)
        solution, text, nothing = problems.solution[which], drawn.token, jnp.zeros(rows)
        lesson, made = (jnp.broadcast_to(x, (rows,)).astype(jnp.int32) for x in (speaker.lesson, version))
        data = Completions(
            problems.prompt[which], text, drawn.written, drawn.taken, drawn.log_prob, drawn.behaviour, nothing, nothing,
            lesson, made, which.astype(jnp.int32), jnp.zeros(rows, bool),
        )  # fmt: skip
        marks = checked(solution, text) if exact else Marks(nothing, nothing, nothing)
        known, sums = judged(data, marks, jnp.any(_any_of(text, words.ends), axis=1), sampling.group)
        floats = {name: jnp.asarray(value, jnp.float32) for name, value in sums.items()}
        return (), known if exact else data, floats

    return Collector(start, collect, rows * sampling.length, prompts * sampling.length)
