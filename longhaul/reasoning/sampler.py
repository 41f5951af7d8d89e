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

Where we differ from engines for large models: each row has the slots of the longest allowed completion and of its
prompt, so that shapes are static and memory never grows.
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
from longhaul.runtime import mesh as meshes
from longhaul.runtime import partition
from longhaul.runtime.errors import FieldError
from longhaul.types import INFERENCE, Collector, Key, Metrics, Params, platform

LOGITS = 2**23
"""Most logits that a loss has at a time: 32 MB, whatever the batch. Their gradient computes them again."""

LOGITS_WIDE = 2**26
"""The same on an accelerator: 268 MB. A piece reads the whole embedding, which takes longer there than few logits."""

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
    wave: int = 64  # completions written at a time; on a CPU fewer stay in its cache
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
    tokeniser: Tokeniser = tokenizer.TOKENISER,
) -> Bank:
    """Bank of a task's problems, with a demonstration of each, for completions of at most `length` tokens.

    Raises ValueError for a longer text; texts of questions from a file (`Task.listed`) are cut instead.
    """

    def ended(text: str) -> list[int]:
        numbers = tokeniser.encode(text)
        return numbers if numbers and numbers[-1] in tokeniser.ends else [*numbers, *tokeniser.ends[:1]]

    prompts = [tokeniser.ask(problem.prompt) for problem in problems]
    solutions = [ended(task.solution(problem, rng)) for problem in problems]
    demonstrations = [ended(task.demonstration(problem, rng)) for problem in problems]
    longest = max(map(len, [*solutions, *demonstrations]))
    if longest > length and not task.listed:
        raise ValueError(f"--num-steps is {length}, and a solution has {longest} tokens; give at least as many")
    room = max(map(len, prompts))
    left = np.array([[tokeniser.pad] * (room - len(each)) + each for each in prompts], np.int32)
    solution, demonstration = (
        np.array([each[:length] + [tokeniser.pad] * (length - len(each)) for each in some], np.int32)
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


class _Flow(NamedTuple):
    """Progress of completions."""

    tokens: jax.Array  # int32 [B], written so far
    steps: jax.Array  # int32 [B]
    matched: jax.Array  # int32 [B]: characters of the stop text with which a row ends
    answering: jax.Array  # bool [B]: the mark is written
    ended: jax.Array  # bool [B]


class _Written(NamedTuple):
    """Tokens of completions."""

    token: jax.Array  # int32 [B]
    taken: jax.Array  # bool [B]
    log_prob: jax.Array  # float32 [B]
    behaviour: jax.Array  # float32 [B]


class _Prefilled(NamedTuple):
    """Prefilled prompts, C of them from number `first` on, whose completions begin next."""

    first: jax.Array  # int32
    kept: transformer.KeyValue  # of all layers
    mask: jax.Array  # bool [C, P]
    logits: jax.Array  # float32 [V, C]


class _Decoding(NamedTuple):
    """State between two tokens of S rows, in which N completions are written one after another."""

    t: jax.Array  # int32: decode steps so far
    cache: decode.Cache
    token: jax.Array  # int32 [S], the last
    flow: _Flow
    number: jax.Array  # int32 [S], of a row's completion
    begun: jax.Array  # int32: completions that have begun
    prefilled: _Prefilled
    row: jax.Array  # int32 [N]: a completion's row
    since: jax.Array  # int32 [N]: the step that reads its first token
    first: _Written  # [N], their first tokens
    log: tuple[jax.Array, _Written]  # [steps, S]: number of the completion of a step's tokens, N for none; the tokens


PREFILL = 256
"""Tokens of prompts that are prefilled together while other completions are written."""

FEWER = (2.0, 4.0)
"""Factors by which there are fewer rows, one after the other, once no completion waits and no more are left."""

LARGE, LONG = 2**24, 64
"""Parameters of a model, and tokens of its completions, whose steps are worth programs of their own for fewer rows."""


@dataclass(frozen=True)
class _Generation:
    """Completions that are being written: N of M prompts [M, P], a group of each, by S rows at a time."""

    config: ModelConfig
    sampling: Sampling
    tokeniser: Tokeniser
    ends: bool  # a completion may end before its last allowed token
    params: Params
    kernels: decode.Kernels
    prompt: jax.Array  # int32 [M, P]
    uniforms: jax.Array  # float32 [N, T, 2], of each token's draw
    budget: jax.Array  # int32: most steps of each
    most: jax.Array | None  # int32 [N]: most tokens of each

    @property
    def number(self) -> int:
        return self.sampling.group * len(self.prompt)

    @property
    def rows(self) -> int:
        return min(self.sampling.wave, self.number)

    @property
    def together(self) -> int:
        """Number of prompts that are prefilled at a time."""
        return min(max(PREFILL // self.prompt.shape[1], 1), len(self.prompt))

    # ------------------------------------------------------------------------------------------------------ a token

    def sample(self, logits: jax.Array, uniforms: jax.Array) -> draw.Token:
        return draw.chosen(logits, uniforms, self.sampling.rule, self.tokeniser.pad)

    def advance(self, flow: _Flow, drawn: draw.Token, numbers: jax.Array) -> tuple[_Flow, _Written]:
        """(progress with one more token, the token) of the completions with these numbers."""
        tokeniser, length = self.tokeniser, self.sampling.length
        most = length if self.most is None else jnp.minimum(self.most[numbers], length)
        forced = (flow.steps >= self.budget) & ~flow.answering
        token = jnp.where(forced, tokeniser.answer, drawn.token)
        answering = flow.answering | (token == tokeniser.answer)
        steps = flow.steps + ((token == tokeniser.step) & ~flow.answering)
        matched, stops = flow.matched, _is_any(token, tokeniser.ends)
        if tokeniser.stop is not None:
            matched = jnp.asarray(tokeniser.stop)[flow.matched, token]
            stops |= matched == len(tokeniser.stop)
        tokens = flow.tokens + 1
        ended = flow.ended | stops & self.ends | (tokens >= most)
        after = _Flow(tokens, steps, jnp.where(ended, 0, matched), answering, ended)
        return after, _Written(token, ~forced, *(jnp.where(forced, 0.0, x) for x in drawn[1:]))

    # ----------------------------------------------------------------------------------------------------- prompts

    def prefill(self, first: jax.Array | int, count: int) -> _Prefilled:
        """Prefilled prompts: `count` of them from number `first` on."""
        prompts = jax.lax.dynamic_slice_in_dim(self.prompt, first, count)
        mask = prompts != self.tokeniser.pad
        hidden, kept = transformer.trunk(
            self.config, self.params, prompts, mask, keeps=True, laid=partition.tensor_parallel
        )
        assert kept is not None
        logits = meshes.whole(transformer.unembed(self.config, self.params, hidden[:, -1]).T)
        return _Prefilled(jnp.int32(first), kept, mask, logits)

    def no_prefill(self) -> _Prefilled:
        """Zeros in the place of prefilled prompts, before the first ones are needed."""
        shapes = jax.eval_shape(lambda: self.prefill(0, self.together))
        nothing: _Prefilled = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return nothing._replace(first=jnp.int32(-self.together))

    def prefill_with(self, prefilled: _Prefilled, place: jax.Array) -> _Prefilled:
        """Prefilled prompts with number `place` among them: those of `prefilled`, or else others."""

        def far(prefilled: _Prefilled) -> jax.Array:
            return (place < prefilled.first) | (place >= prefilled.first + self.together)

        def near(prefilled: _Prefilled) -> _Prefilled:
            # By the loop's own state, or XLA reads before the loop, and so for every completion.
            first = jnp.where(far(prefilled), jnp.minimum(place, len(self.prompt) - self.together), prefilled.first)
            return self.prefill(first, self.together)

        return jax.lax.while_loop(far, near, prefilled)  # of at most one turn: unlike a conditional it copies nothing

    # -------------------------------------------------------------------------------------------------- completions

    def begin(self) -> _Decoding:
        """Every row with a completion, and its first token."""
        rows, number, length = self.rows, self.number, self.sampling.length
        prefilled = self.prefill(0, -(-rows // self.sampling.group))
        each, row = jnp.arange(rows) // self.sampling.group, jnp.arange(rows)
        cache = decode.begin(jax.tree.map(lambda x: x[:, each], prefilled.kept), prefilled.mask[each], length)
        drawn = self.sample(prefilled.logits[:, each], self.uniforms[:rows, 0])
        flow, written = self.advance(_blank_flow(rows), drawn, row)
        zeros = jnp.zeros(number, jnp.int32)
        first = jax.tree.map(lambda x: jnp.zeros(number, x.dtype).at[:rows].set(x), written)
        steps = length if rows == number else number * length // rows + length
        log = jax.tree.map(lambda x: jnp.zeros((steps, rows), x.dtype), written)
        none = jnp.full((steps, rows), number, jnp.int32)
        return _Decoding(jnp.int32(0), cache, written.token, flow, row, jnp.int32(rows), self.no_prefill(),
                         zeros.at[:rows].set(row), zeros, first, (none, log))  # fmt: skip

    def can_admit(self, now: _Decoding) -> jax.Array:
        """Flag: a row has ended while a completion has not begun."""
        return (now.begun < self.number) & jnp.any(now.flow.ended)

    def admit(self, now: _Decoding) -> _Decoding:
        """State in which a row that has ended begins the next completion, with its first token."""
        place, new, row = now.begun // self.sampling.group, now.begun, jnp.argmax(now.flow.ended)
        prefilled = self.prefill_with(now.prefilled, place)
        which = place - prefilled.first
        kept, mask = jax.tree.map(lambda x: x[:, which], prefilled.kept), prefilled.mask[which]
        drawn = self.sample(prefilled.logits[:, which][:, None], self.uniforms[new, :1])
        flow, written = self.advance(_blank_flow(1), drawn, new[None])

        def put(old: jax.Array, it: jax.Array) -> jax.Array:
            return jnp.where(jnp.arange(self.rows) == row, it, old)

        return now._replace(
            cache=decode.renew(now.cache, row, kept, mask), token=put(now.token, written.token),
            flow=jax.tree.map(put, now.flow, flow), number=put(now.number, new), begun=new + 1, prefilled=prefilled,
            row=now.row.at[new].set(row), since=now.since.at[new].set(now.t),
            first=jax.tree.map(lambda old, it: old.at[new].set(it[0]), now.first, written),
        )  # fmt: skip

    def unfinished(self, now: _Decoding, fewer: int = 0) -> jax.Array:
        """Flag: completions have not begun, or more than `fewer` rows have not ended."""
        return (jnp.sum(~now.flow.ended) > fewer) | (now.begun < self.number)

    def step(self, now: _Decoding) -> _Decoding:
        """One more token of each row."""
        if self.rows < self.number and len(now.token) == self.rows:
            now = jax.lax.while_loop(self.can_admit, self.admit, now)
        logits, cache = decode.step(self.config, self.kernels, now.token, now.cache)
        at = jnp.minimum(now.flow.tokens, self.sampling.length - 1)
        drawn = self.sample(logits, self.uniforms[now.number, at])
        flow, written = self.advance(now.flow, drawn, now.number)
        numbers = jnp.where(now.flow.ended, self.number, now.number)
        log = jax.tree.map(lambda all_, new: jax.lax.dynamic_update_slice(all_, new[None], (now.t, 0)), now.log,
                           (numbers, written))  # fmt: skip
        cache = cache._replace(own=jnp.where(flow.ended, 0, cache.own))
        return now._replace(t=now.t + 1, cache=cache, token=written.token, flow=flow, log=log)

    def run(self) -> Drawn:
        """All completions, the last ones of a large model by fewer rows."""
        large = transformer.size(self.config) >= LARGE and self.sampling.length >= LONG
        fewer = [count for factor in FEWER if large and (count := int(self.rows / factor))]
        now, moves = self.begin(), []
        for count in fewer:
            now = jax.lax.while_loop(functools.partial(self.unfinished, fewer=count), self.step, now)
            moves.append((now.t, now.row))
            now = _compacted(now, count)
        return self.gathered(jax.lax.while_loop(self.unfinished, self.step, now), moves)

    def gathered(self, last: _Decoding, moves: Sequence[tuple[jax.Array, jax.Array]]) -> Drawn:
        """Tokens by completion, from those by step and row; of each move its step and the rows [N] before it."""
        places = jnp.arange(self.sampling.length)[None]
        step, row = last.since[:, None] + places - 1, last.row[:, None]
        for moved, before in reversed(moves):
            row = jnp.where(step < moved, before[:, None], row)
        begins = places == 0
        written = begins | (last.log[0][step, row] == jnp.arange(self.number)[:, None])

        def whole(first: jax.Array, rest: jax.Array, nothing: Any) -> jax.Array:
            return jnp.where(written, jnp.where(begins, first[:, None], rest[step, row]), nothing)

        token, taken, *log_probs = map(whole, last.first, last.log[1], (self.tokeniser.pad, False, 0.0, 0.0))
        return Drawn(token, written, taken, *log_probs)


def _blank_flow(count: int) -> _Flow:
    """Progress of completions without a token."""
    zero, never = jnp.zeros(count, jnp.int32), jnp.zeros(count, bool)
    return _Flow(zero, zero, zero, never, never)


def _compacted(now: _Decoding, fewer: int) -> _Decoding:
    """The same completions, without most rows that have ended."""
    left = jnp.argsort(now.flow.ended, stable=True)[:fewer]
    token, flow, numbers = jax.tree.map(lambda x: x[left], (now.token, now.flow, now.number))
    return now._replace(cache=decode.of_rows(now.cache, left), token=token, flow=flow, number=numbers,
                        row=now.row.at[numbers].set(jnp.arange(fewer)))  # fmt: skip


def sampler(
    config: ModelConfig,
    sampling: Sampling,
    *,
    ends: bool = True,
    tokeniser: Tokeniser = tokenizer.TOKENISER,
) -> Callable[..., Drawn]:
    """Function (params, prompt [M, P], keys [M * group], budget, most) -> a group of completions of each prompt, which
    is read once; a loop of decode steps of `sampling.wave` rows. A completion depends on its prompt and key alone.

    A row whose completion has ended begins the next one before the next step (continuous batching: Yu et al., "Orca",
    OSDI 2022); the last completions of a large model are written by fewer rows. `budget` int32: most steps of each; it
    has no effect for `tokeniser` without steps and answers. `most` int32 [M * group]: most tokens of each, if given.
    Without `ends` a completion ends with the last allowed token alone. Raises FieldError for an impossible `sampling`.
    """
    check(sampling)

    def sample(params: Params, prompt: jax.Array, keys: Key, budget: jax.Array, most: jax.Array | None = None) -> Drawn:
        kernels = decode.prepare(config, params, sum(decode.room(prompt.shape[1], sampling.length)))
        uniforms = jax.vmap(lambda key: prng.uniform(key, (sampling.length, 2)))(keys)
        with jax.named_scope(INFERENCE):
            return _Generation(config, sampling, tokeniser, ends, params, kernels, prompt, uniforms, budget, most).run()

    return sample


def logits_at_once() -> int:
    """Most logits that a loss has at a time."""
    return LOGITS if platform() == "cpu" else LOGITS_WIDE


def _is_any(token: jax.Array, numbers: Sequence[int]) -> jax.Array:
    """Flag of each token: it is one of `numbers`; bool."""
    return functools.reduce(jnp.logical_or, (token == number for number in numbers), jnp.zeros(token.shape, bool))


def log_probs(
    config: ModelConfig, params: Params, prompt: jax.Array, text: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """(log-probability of each token, entropy of its distribution), float32 [B, N], of completions [B, N].

    `prompt` [M, P]: one for B / M completions side by side, and read once. All tokens up to the padding, `config.pad`,
    are read. Differentiable, but for the entropy.
    """
    (rows, steps), mask = text.shape, prompt != config.pad
    shared = rows > len(prompt)
    if shared:
        # The last token predicts none. A GPU reads it, too: products of 1,023 tokens take its slow paths.
        read = text[:, :-1] if platform() == "cpu" else text
        first, rest = transformer.continued(config, params, prompt, mask, read, read != config.pad)
        rest = rest[:, : steps - 1]
        hidden = jnp.concatenate([jnp.repeat(first[:, -1:], rows // len(prompt), axis=0), rest], axis=1)
    else:
        whole = jnp.concatenate([prompt, text], axis=1)
        hidden = transformer.trunk(config, params, whole, whole != config.pad)[0][:, prompt.shape[1] - 1 : -1]

    predictions = predicted(config, params, hidden.reshape(rows * steps, -1), text.reshape(-1), temperature)
    chosen, entropy = (x.reshape(rows, steps) for x in predictions)
    return chosen, entropy


def predicted(
    config: ModelConfig, params: Params, hidden: jax.Array, token: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """(log-probability, entropy), float32 [T], of tokens [T] that outputs of the layers [T, width] predict.

    No more than `logits_at_once` logits are there at a time.
    """

    @jax.checkpoint
    def some(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        inner, token = meshes.whole(part)
        logits = meshes.spread(transformer.unembed(config, params, inner), 1)
        scores = draw.scored(logits, temperature, pad=config.pad)
        fixed = jax.lax.stop_gradient(scores)
        chosen = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0]
        return chosen, -jnp.sum(jnp.exp(fixed) * fixed, axis=-1)

    if config.tied:  # its features are split; the pieces below share one exchange
        params = {**params, "embedding": meshes.spread(params["embedding"], 0)}
    number, size = len(token), max(1, logits_at_once() // config.vocabulary)
    if number <= size:
        return some((hidden, token))
    parts = meshes.parts()[1]
    parts = parts if number % parts == 0 else 1  # every piece has tokens of each device that has a part of the rows
    size = max(1, size // parts)
    count = -(-number // (parts * size))  # a whole number of pieces, so that one program computes each
    short = count * size - number // parts

    def pieces(x: jax.Array) -> jax.Array:
        x = jnp.pad(x.reshape(parts, -1, *x.shape[1:]), [(0, 0), (0, short), *[(0, 0)] * (x.ndim - 1)])
        x = meshes.spread(jnp.swapaxes(x.reshape(parts, count, size, *x.shape[2:]), 0, 1), 1)
        return x.reshape(count, parts * size, *x.shape[3:])

    def rows(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x.reshape(count, parts, size), 0, 1).reshape(parts, -1)[:, : number // parts].reshape(-1)

    results: tuple[jax.Array, jax.Array] = jax.tree.map(rows, jax.lax.map(some, jax.tree.map(pieces, (hidden, token))))
    return results


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


def marking(task: Task, problems: Sequence[Problem], tokeniser: Tokeniser, group: int) -> Marking:
    """Function that checks completions of a bank of these problems on the host, in groups.

    It runs between sampling and learning, in the actor that sampled; in an asynchronous run beside the learner.
    """

    def mark(data: Completions, metrics: Metrics) -> tuple[Completions, Metrics]:
        token = np.asarray(data.token)
        posed = [problems[int(place)] for place in np.asarray(data.problem)]
        known, sums = judged(
            data, marks(task, posed, map(tokeniser.decode, token)), ended(token, tokeniser), group,
            stepwise=tokeniser.step != tokenizer.NONE,
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
    tokeniser: Tokeniser = tokenizer.TOKENISER,
    exact: bool = True,
    gated: bool = False,
) -> Collector:
    """Collector of groups of completions of `prompts` random problems, to be rewarded or imitated where verified; or of
    as many texts of the bank, to be imitated.

    `params` are a `Speaker`, whose `lesson` decides. Metrics are sums over the completions: of reward
    ("episode/return"), tokens ("episode/length"), soundness, steps, completions cut at the length, and completions in
    groups whose rewards differ, from which something is learnt. If the device can't check them (not `exact`), rewards
    and sums are 0 until `marking` computes them. If `gated`, every `APART`th problem is for looks at a closed gate, and
    is never imitated. Raises ValueError for a temperature of 0, whose probabilities teach nothing.
    """
    if not sampling.temperature > 0.0:
        raise ValueError(f"temperature is {sampling.temperature}; to learn it must be above 0")
    rows = prompts * sampling.group
    sample = sampler(config, sampling, tokeniser=tokeniser)
    lessons = _lessons(sample, problems, sampling.group, prompts, tokeniser.pad, gated)

    def start(key: Key) -> tuple[()]:
        return ()

    def collect(
        speaker: Speaker, carry: tuple[()], key: Key, version: jax.Array
    ) -> tuple[tuple[()], Completions, Metrics]:
        source = jnp.where(speaker.lesson == OWN, SAMPLED, speaker.lesson)
        which, drawn = jax.lax.switch(source, lessons, speaker, key)
        solution, text, nothing = problems.solution[which], drawn.token, jnp.zeros(rows)
        lesson, versions = (jnp.broadcast_to(x, (rows,)).astype(jnp.int32) for x in (speaker.lesson, version))
        data = Completions(
            problems.prompt[which], text, drawn.written, drawn.taken, drawn.log_prob, drawn.behaviour, nothing, nothing,
            lesson, versions, which.astype(jnp.int32), jnp.zeros(rows, bool),
        )  # fmt: skip
        marks = checked(solution, text) if exact else Marks(nothing, nothing, nothing)
        known, sums = judged(data, marks, jnp.any(_is_any(text, tokeniser.ends), axis=1), sampling.group)
        floats = {name: jnp.asarray(value, jnp.float32) for name, value in sums.items()}
        return (), known if exact else data, floats

    return Collector(start, collect, rows * sampling.length, prompts * sampling.length)


Lesson = Callable[[Speaker, Key], tuple[jax.Array, Drawn]]
"""(speaker, key) -> (place in the bank of each row's problem, the rows)."""


def _lessons(
    sample: Callable[..., Drawn], problems: Bank, group: int, prompts: int, pad: int, gated: bool
) -> tuple[Lesson, Lesson, Lesson]:
    """Lessons SAMPLED (also of OWN), DEMONSTRATED and SOLVED: rows that the model samples, or texts of the bank."""
    rows, count = prompts * group, problems.prompt.shape[0]
    gated = gated and count >= APART

    def unseen(key: Key, rows: int, reach: jax.Array | int) -> jax.Array:
        """Problems of the first `reach` that no look is at."""
        place = jax.random.randint(key, (rows,), 0, jnp.maximum(reach - reach // APART, 1))
        return place + place // (APART - 1)

    def of_the_bank(speaker: Speaker, key: Key, text: jax.Array) -> tuple[jax.Array, Drawn]:
        reach = jnp.clip(jnp.ceil(count * speaker.reach).astype(jnp.int32), 1, count)
        which = unseen(key, rows, reach) if gated else jax.random.randint(key, (rows,), 0, reach)
        written = text[which] != pad
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
        return jnp.repeat(which, group), drawn

    return (
        sampled,
        lambda speaker, key: of_the_bank(speaker, key, problems.demonstration),
        lambda speaker, key: of_the_bank(speaker, key, problems.solution),
    )
