"""HTTP of a server: OpenAI's completions and chat for language models, `/act` for other policies; a Starlette
application.

Every field of a request is checked before it reaches the engine, and a field that is not supported is refused by name.
Each answer says in `weight_version` which version of the weights it is from. What differs from OpenAI's API: token ids
are always returned, as vLLM does on demand, and log-probabilities are those at the request's temperature.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from longhaul.reasoning.huggingface import Conversation, HubError
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.runtime import bounded_json
from longhaul.runtime.errors import first_line
from longhaul.training.init_from import names
from longhaul.training.serving import metrics
from longhaul.training.serving.actions import Engine as ActionEngine
from longhaul.training.serving.actions import Question
from longhaul.training.serving.completions import (
    LEAST_TEMPERATURE,
    MOST_ROWS,
    MOST_TEMPERATURE,
    TOPS,
    Job,
    Row,
    text_of,
)
from longhaul.training.serving.completions import Engine as TextEngine
from longhaul.training.serving.work_queue import Engine, QueueFull, Work, WorkQueue

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

BODY_SECONDS = 10.0
"""Seconds within which a request's body must have come."""

SLACK = 30.0
"""Seconds beyond a request's deadline in which its answer must have been read."""

COMPILATION = 600.0
"""Seconds that programs of new sizes may add to a request's deadline."""

WEIGHT = 64
"""Bytes of memory that the document of a request may take, for each byte that its body may have."""

LATE = "its deadline is over; ask for less at once, or start the server with a larger --deadline"

MOST_STOPS, LONGEST_STOP = 16, 256

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "ignore_eos": (None, False),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_k": (None, 0, -1),
}
"""Fields of OpenAI's and vLLM's requests that are not supported, and the values that mean nothing."""

IGNORED = frozenset({"metadata", "model", "return_token_ids", "store", "stream_options", "user"})
"""Fields that change no answer here."""

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Coroutine[Any, Any, None]]


class Refused(ValueError):
    """A request that can't be answered: its status and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Bounds(NamedTuple):
    """Bounds of every request."""

    body: int = 1 << 20  # bytes
    deadline: float = 60.0  # seconds from its head to its answer


# --------------------------------------------------------------------------------------------------------------- fields


def number(body: Mapping[str, Any], name: str, default: float, least: float, most: float, *, whole: bool) -> Any:
    """Number of a field within bounds. Raises Refused."""
    value = body.get(name)
    value = default if value is None else value
    right = isinstance(value, int) or (isinstance(value, float) and not whole)
    if isinstance(value, bool) or not right or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise Refused(400, f"{name} is {_short(value)}; it must be {kind} from {least:g} to {most:g}")
    return value


def _short(value: Any) -> str:
    return f"{value!r:.40}"


def _check_names(body: Mapping[str, Any], known: frozenset[str]) -> None:
    for name, value in body.items():
        if name in known or name in IGNORED:
            continue
        if name not in NEUTRAL:
            raise Refused(
                400, f"there is no field {_short(name)}; leave it out, or give one of {', '.join(sorted(known))}"
            )
        if value not in NEUTRAL[name]:
            raise Refused(400, f"{name} is {_short(value)}, which is not supported; leave it out")


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    value = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(value, list) or len(value) > MOST_STOPS or not all(
        isinstance(each, str) and 0 < len(each) <= LONGEST_STOP for each in value
    ):  # fmt: skip
        raise Refused(
            400, f"stop is {_short(value)}; it must be at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} letters"
        )
    return tuple(value)


# -------------------------------------------------------------------------------------------------------------- answers


class Texts:
    """Answers of a language model."""

    def __init__(
        self, engine: TextEngine, tokeniser: Tokeniser, name: str, bounds: Bounds, *,
        stop: tuple[str, ...] = (), chat: Conversation | None = None,
    ) -> None:  # fmt: skip
        self.engine, self._tokeniser, self._name, self._bounds, self._chat = engine, tokeniser, name, bounds, chat
        self._stop = stop
        self._template = asyncio.Lock()

    async def completions(self, request: Request) -> Response:
        body = await read(request, self._bounds)
        return await self._answer(request, body, self._prompts(body.get("prompt")), chat=False)

    async def chat(self, request: Request) -> Response:
        body = await read(request, self._bounds)
        return await self._answer(request, body, [await self._conversation(request, body.get("messages"))], chat=True)

    async def models(self, request: Request) -> Response:
        about = {"id": self._name, "object": "model", "created": 0, "owned_by": "longhaul",
                 "max_model_len": self.engine.limits.prompt_tokens + self.engine.limits.tokens}  # fmt: skip
        return _json({"object": "list", "data": [about]})

    def _prompts(self, value: Any) -> list[list[int]]:
        """Token ids of each prompt."""
        if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
            value = [value]
        if not isinstance(value, list) or not 0 < len(value) <= MOST_ROWS:
            raise Refused(400, f"prompt is {_short(value)}; it must be a text, token ids, or a list of at most "
                          f"{MOST_ROWS} of them")  # fmt: skip
        return [self._tokens(each) for each in value]

    def _tokens(self, value: Any) -> list[int]:
        most = self.engine.limits.prompt_tokens
        if isinstance(value, str):
            if len(value) > 64 * most:
                why = f"at most {64 * most:,}, and {most} tokens, are possible; shorten it"
                raise Refused(400, f"the prompt has {len(value):,} letters; {why}")
            try:
                value = self._tokeniser.encode(value)
            except ValueError as error:
                raise Refused(400, f"the prompt {_short(value)} can't be read: {error}") from error
        size = self.engine.config.vocabulary
        right = isinstance(value, list) and all(type(each) is int and 0 <= each < size for each in value[: most + 1])
        if not right:
            raise Refused(400, f"the prompt is {_short(value)}; it must be a text, or token ids from 0 to {size - 1}")
        if not 0 < len(value) <= most:
            raise Refused(400, f"the prompt has {len(value):,} tokens; give it 1 to {most}")
        return list(value)

    async def _conversation(self, request: Request, turns: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template."""
        if self._chat is None:
            raise Refused(400, "this model has no chat template; take /v1/completions")
        if not isinstance(turns, list) or not 0 < len(turns) <= 1000:
            raise Refused(400, f"messages is {_short(turns)}; it must be a list of 1 to 1000 turns")
        plain = [_turn(each) for each in turns]
        letters, most = sum(len(each["content"]) for each in plain), 64 * self.engine.limits.prompt_tokens
        if letters > most:
            raise Refused(400, f"messages have {letters:,} letters; at most {most:,} are possible; leave old turns out")
        async with self._template:  # one process fills in templates, for those who still wait
            if await request.is_disconnected():
                raise Refused(499, "the client left")
            try:
                tokens = await asyncio.to_thread(self._chat, plain)
            except HubError as error:
                raise Refused(400, str(error)) from error
        return self._tokens(tokens)

    def _job(self, body: Mapping[str, Any], prompts: list[list[int]], *, chat: bool) -> Job:
        limits = self.engine.limits
        known = {"max_tokens", "n", "temperature", "top_p", "stop", "seed", "logprobs", "stream"}
        known |= {"messages", "max_completion_tokens", "top_logprobs"} if chat else {"prompt"}
        _check_names(body, frozenset(known))
        if chat and body.get("max_completion_tokens") is not None:
            body = {**body, "max_tokens": body["max_completion_tokens"]}
        if chat:
            logprobs = _flag(body, "logprobs")
            tops = number(body, "top_logprobs", 0, 0, TOPS, whole=True) if logprobs else 0
        else:
            tops = number(body, "logprobs", 0, 0, TOPS, whole=True)
        n = number(body, "n", 1, 1, MOST_ROWS, whole=True)
        if n * len(prompts) > MOST_ROWS:
            why = f"at most {MOST_ROWS} completions are possible; ask in several requests"
            raise Refused(400, f"n is {n} for {len(prompts)} prompts; {why}")
        temperature = float(number(body, "temperature", 1.0, 0.0, MOST_TEMPERATURE, whole=False))
        if 0.0 < temperature < LEAST_TEMPERATURE:
            raise Refused(400, f"temperature is {temperature:g}; it must be 0, or at least {LEAST_TEMPERATURE:g}")
        usual = limits.tokens if chat else min(16, limits.tokens)
        return Job(
            prompts=prompts,
            max_tokens=number(body, "max_tokens", usual, 1, limits.tokens, whole=True),
            deadline=time.monotonic() + self._bounds.deadline,
            n=n,
            temperature=temperature,
            top_p=float(number(body, "top_p", 1.0, 1e-6, 1.0, whole=False)),
            stop=_stops(body) + self._stop,
            seed=number(body, "seed", secrets.randbits(32), 0, 2**63 - 1, whole=True),
            tops=tops,
        )

    async def _answer(self, request: Request, body: Mapping[str, Any], prompts: list[list[int]], *, chat: bool) -> Any:
        job = self._job(body, prompts, chat=chat)
        detailed = _flag(body, "logprobs") if chat else body.get("logprobs") is not None
        if _flag(body, "stream"):
            return self._streamed(job, chat=chat, detailed=detailed)
        submit(self.engine.queue, job)
        await finished(request, job)
        choices = [self._choice(job, place, chat=chat, detailed=detailed) for place in range(len(job.rows))]
        read_, written = sum(map(len, prompts)), sum(len(row.tokens) for row in job.rows)
        usage = {"prompt_tokens": read_, "completion_tokens": written, "total_tokens": read_ + written}
        return _json(self._head(job, chat=chat) | {"choices": choices, "usage": usage})

    def _head(self, job: Job, *, chat: bool, chunk: bool = False) -> dict[str, Any]:
        kind = "chat.completion" + ".chunk" * chunk if chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(8)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._name,
            "weight_version": job.version,
        }

    def _choice(self, job: Job, place: int, *, chat: bool, detailed: bool) -> dict[str, Any]:
        row = job.rows[place]
        text = text_of(self._tokeniser, job, row)
        inner = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        details = self._details(row, chat=chat) if detailed else None
        return {"index": place, **inner, "finish_reason": row.finish, "logprobs": details, "token_ids": row.tokens,
                "prompt_token_ids": job.prompts[place // job.n]}  # fmt: skip

    def _details(self, row: Row, *, chat: bool) -> dict[str, Any]:
        """Log-probabilities of a completion's tokens, in the form of either API."""

        def word(token: int) -> str:
            return self._tokeniser.decode([token])

        if chat:
            tops = row.tops or [[]] * len(row.tokens)
            return {"content": [
                {"token": word(token), "logprob": log_prob, "bytes": list(word(token).encode()),
                 "top_logprobs": [{"token": word(other), "logprob": each} for other, each in top]}
                for token, log_prob, top in zip(row.tokens, row.log_probs, tops, strict=True)
            ]}  # fmt: skip
        texts = [word(token) for token in row.tokens]
        offsets = np.cumsum([0, *map(len, texts)])[:-1].tolist()
        best = [{word(other): log_prob for other, log_prob in top} for top in row.tops] if row.tops else None
        return {"tokens": texts, "token_logprobs": row.log_probs, "top_logprobs": best, "text_offset": offsets}

    def _streamed(self, job: Job, *, chat: bool, detailed: bool) -> Response:
        """Server-sent events: the text of each row as it comes."""
        from starlette.responses import StreamingResponse

        loop, heard = asyncio.get_running_loop(), asyncio.Queue[int]()

        def hear(place: int) -> None:
            loop.call_soon_threadsafe(heard.put_nowait, place)

        job.heard = hear
        job.done.add_done_callback(lambda done: hear(-1))
        submit(self.engine.queue, job)
        held = max((len(stop) for stop in job.stop), default=1) - 1

        async def events() -> AsyncIterator[str]:
            sent = [0] * len(job.rows)
            counts = [0] * len(job.rows)
            ended: set[int] = set()
            head: dict[str, Any] = {}
            try:
                while len(ended) < len(job.rows):
                    place = await heard.get()
                    if place < 0 and (error := job.done.exception()) is not None:
                        yield f"data: {json.dumps(_error(*_failure(error)))}\n\n"
                        return
                    for each in range(len(job.rows)) if place < 0 else [place]:
                        row = job.rows[each]
                        if each in ended or (len(row.tokens) == counts[each] and not row.finish):
                            continue
                        head = head or self._head(job, chat=chat, chunk=True)
                        finish, text = row.finish, text_of(self._tokeniser, job, row)
                        until = len(text) if finish else max(sent[each], len(text.rstrip("\ufffd")) - held)
                        part, sent[each] = text[sent[each] : until], until
                        inner = {"delta": {"role": "assistant", "content": part}} if chat else {"text": part}
                        new = Row(row.tokens[counts[each] :], row.log_probs[counts[each] :], row.tops[counts[each] :])
                        counts[each] += len(new.tokens)
                        details = self._details(new, chat=chat) if detailed else None
                        choice = {"index": each, **inner, "finish_reason": finish or None, "logprobs": details,
                                  "token_ids": new.tokens}  # fmt: skip
                        yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n"
                        if finish:
                            ended.add(each)
                yield "data: [DONE]\n\n"
            finally:
                job.cancelled = True  # nothing where it is done

        return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-store"})


class Actions:
    """Answers of a policy."""

    def __init__(self, engine: ActionEngine, bounds: Bounds) -> None:
        self.engine, self._bounds = engine, bounds
        policy = engine.policy
        self._observation = names(policy.spec.observation, "observation")
        self._memory = names(policy.memory(1), "memory") if policy.recurrent else {}
        self._start = {name: np.asarray(x) for name, x in self._memory.items()}

    async def act(self, request: Request) -> Response:
        body = await read(request, self._bounds)
        _check_names(body, frozenset({"observation", "memory", "deterministic", "seed"}))
        if "observation" not in body:
            wanted = ", ".join(f"{name} {list(x.shape)}" for name, x in self._observation.items())
            raise Refused(400, f"observation is missing; give {wanted}, or a batch of at most {self.engine.rows}")
        forms = {name: (x.shape, x.dtype) for name, x in self._observation.items()}
        observation, count, single = arrays("observation", body["observation"], forms, self.engine.rows)
        if self._memory and body.get("memory") is not None:
            forms = {name: (x.shape[1:], x.dtype) for name, x in self._memory.items()}
            memory, held, _ = arrays("memory", body["memory"], forms, self.engine.rows)
            if held != count:
                raise Refused(400, f"memory is a batch of {held}, and observation of {count}; give one memory for each "
                              "observation")  # fmt: skip
        elif body.get("memory") is not None:
            raise Refused(400, f"memory is {_short(body['memory'])}, and this policy has none; leave it out")
        else:
            memory = {name: np.repeat(x, count, axis=0) for name, x in self._start.items()}
        deterministic = _flag(body, "deterministic", default=True)
        seed = None if body.get("seed") is None else number(body, "seed", 0, 0, 2**32 - 1, whole=True)
        deadline = time.monotonic() + self._bounds.deadline
        question = Question(observation, memory, count, deadline, deterministic, None if deterministic else seed)
        submit(self.engine.queue, question)
        await finished(request, question)

        def plain(x: Any) -> Any:
            return (x[0] if single else x).tolist()

        reply: dict[str, Any] = {"action": plain(question.action), "weight_version": question.version}
        if self._memory:
            reply["memory"] = {name: plain(x) for name, x in question.after.items()}
        return _json(reply)


def arrays(
    label: str, value: Any, forms: Mapping[str, tuple[tuple[int, ...], Any]], most: int
) -> tuple[dict[str, np.ndarray], int, bool]:
    """(arrays [B, ...] by name, B, whether it was one without a batch's axis) of a JSON document. Raises Refused."""
    if len(forms) == 1 and not isinstance(value, dict):
        value = {next(iter(forms)): value}
    if not isinstance(value, dict) or value.keys() != forms.keys():
        given = ", ".join(value) if isinstance(value, dict) else _short(value)
        raise Refused(400, f"{label} has {given[:80]}; it must have {', '.join(forms)}")
    parsed: dict[str, np.ndarray] = {}
    sizes: set[int | None] = set()
    for name, (shape, dtype) in forms.items():
        part = label if name == label else f"{label} {name}"
        try:
            array = np.array(value[name])
        except (ValueError, OverflowError):
            array = np.array(None)
        kind = np.dtype(dtype).kind
        kinds = {"i": "iu", "u": "iu", "b": "b"}.get(kind, "fiu")
        fits = array.dtype.kind in kinds and (array.shape == shape or (array.shape[1:] == shape and array.shape[0] > 0))
        if not fits:
            given = f"of {list(array.shape)}" if array.shape and array.dtype.kind in "iufb" else _short(value[name])
            wanted = f"an array {list(shape)} of {np.dtype(dtype).name}, or a batch of such"
            raise Refused(400, f"{part} is {given}; it must be {wanted}")
        if kind in "iu":
            bounds = np.iinfo(dtype)
            if array.size and not (bounds.min <= array.min() and array.max() <= bounds.max):
                wanted = f"{bounds.min} to {bounds.max}, as {np.dtype(dtype).name} holds them"
                raise Refused(
                    400, f"{part} has numbers from {array.min()} to {array.max()}; give numbers from {wanted}"
                )
        sizes.add(None if array.shape == shape else len(array))
        with np.errstate(over="ignore"):
            parsed[name] = array.astype(dtype)
        if kind not in "iub" and not (finite := np.isfinite(parsed[name].astype(np.float64))).all():
            odd = f"{part} has {array[~finite][0]}, which is not finite as {np.dtype(dtype).name}"
            raise Refused(400, f"{odd}; give finite numbers")
    if len(sizes) > 1:
        batches = ", ".join(sorted("one" if size is None else f"a batch of {size}" for size in sizes))
        raise Refused(400, f"{label} has parts that are {batches}; give all of them one batch")
    (count,) = sizes
    if count is None:
        return {name: array[None] for name, array in parsed.items()}, 1, True
    if count > most:
        raise Refused(400, f"{label} is a batch of {count}; at most {most} are possible; ask in several requests")
    return parsed, count, False


def _turn(value: Any) -> dict[str, str]:
    """Turn of a conversation with its text in one piece. Raises Refused."""
    role, content = (value.get("role"), value.get("content")) if isinstance(value, dict) else (None, None)
    if isinstance(content, list):
        parts = [
            each.get("text") if isinstance(each, dict) and each.get("type") == "text" else None for each in content
        ]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise Refused(
            400, f"messages has {_short(value)}; a turn has the role system, user or assistant, and a content"
        )
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise Refused(400, f"messages has {_short(content)}, which is no text: {error}") from error
    return {"role": role, "content": content}


def _flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(400, f"{name} is {_short(value)}; it must be true or false")
    return default if value is None else value


# ------------------------------------------------------------------------------------------------------------- requests


async def read(request: Request, bounds: Bounds) -> dict[str, Any]:
    """Object in a request's body. Raises Refused for a body that is too long, too slow, cut off, or no object."""
    from starlette.requests import ClientDisconnect

    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"content-type is {_short(kind)}; send JSON with content-type: application/json")
    length = request.headers.get("content-length", "")
    if length.isdigit() and len(length) < 20 and int(length) > bounds.body:
        raise Refused(413, _too_long(f"{int(length):,}", bounds))
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > bounds.body:
                    raise Refused(413, _too_long(f"{len(data):,} or more", bounds))
    except TimeoutError:
        raise Refused(
            408, f"{len(data):,} bytes of the body came within {BODY_SECONDS:g} s; send all of it by then"
        ) from None
    except ClientDisconnect:
        raise Refused(499, "the client left") from None
    try:
        body = bounded_json.parse(bytes(data), WEIGHT * bounds.body)
    except ValueError as error:
        raise Refused(400, f"the body: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, f"the body is {_short(body)}; it must be an object")
    return body


def _too_long(count: str, bounds: Bounds) -> str:
    most = f"at most {bounds.body:,} are possible"
    return f"the body has {count} bytes; {most}; shorten it, or start the server with a larger --body-kb"


def submit(queue: WorkQueue[Work], work: Work) -> None:
    """Puts work into an engine's queue. Raises Refused where that is full, or it ends."""
    try:
        queue.submit(work)
    except QueueFull as error:
        raise Refused(429, f"{error}; ask for fewer, or again later") from error
    except RuntimeError as error:
        raise Refused(503, str(error)) from error


async def finished(request: Request, work: Job | Question) -> None:
    """Waits until an engine is done with work, whose deadline it moves where it compiles. Raises Refused where that
    failed or is late, or the client left."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    work.done.add_done_callback(lambda done: loop.call_soon_threadsafe(ended.set))
    left, waits = asyncio.ensure_future(request.receive()), asyncio.ensure_future(ended.wait())
    try:
        while not (left.done() or waits.done()) and (over := work.deadline + 1.0 - time.monotonic()) > 0.0:
            await asyncio.wait((left, waits), timeout=over, return_when=asyncio.FIRST_COMPLETED)
        if not work.done.done():
            raise Refused(499, "the client left") if left.done() else Refused(504, LATE)
        if (error := work.done.exception()) is not None:
            raise Refused(*_failure(error)) from error
    finally:
        work.cancelled = True
        left.cancel()
        waits.cancel()


def _failure(error: BaseException) -> tuple[int, str]:
    if isinstance(error, TimeoutError):
        return 504, LATE
    return 500, f"the model failed: {first_line(error)[:200]}"


def _json(value: Any, status: int = 200) -> Any:
    from starlette.responses import Response

    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


ERRORS = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": ERRORS.get(status, "server_error" if status >= 500 else
                                                             "invalid_request_error"), "code": status}}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- application


def application(
    answers: Texts | Actions, token: str | None, hosts: Sequence[str], bounds: Bounds, about: Mapping[str, Any]
) -> App:
    """Application of a language model's or a policy's answers.

    With a `token` every request but `/health` needs it. Without `hosts` any Host header is taken.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    engine: Engine = answers.engine
    requests = metrics.Requests()

    async def health(request: Request) -> Response:
        state = {"status": "ok" if engine.queue.alive else "failed", "weight_version": engine.version,
                 "queue": engine.queue.length, **about}  # fmt: skip
        return _json(state, 200 if engine.queue.alive else 503)

    async def measured(request: Request) -> Response:
        text = metrics.text(requests, engine)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        answer = _json(_error(error.status, str(error)), error.status)
        if error.status == 429:
            answer.headers["retry-after"] = "1"
        if error.status in (408, 413):
            answer.headers["connection"] = "close"
        return answer

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        served = ", ".join(f"{'POST' if 'POST' in (route.methods or ()) else 'GET'} {route.path}" for route in routes)
        problem = {404: "is not served here", 405: f"does not take {request.method}"}.get(error.status_code)
        line = error.detail if problem is None else f"{request.url.path[:100]} {problem}; there are {served}"
        return _json(_error(error.status_code, line), error.status_code)

    routes = [Route("/health", health), Route("/metrics", measured)]
    if isinstance(answers, Texts):
        routes += [
            Route("/v1/completions", answers.completions, methods=["POST"]),
            Route("/v1/chat/completions", answers.chat, methods=["POST"]),
            Route("/v1/models", answers.models),
        ]
    else:
        routes.append(Route("/act", answers.act, methods=["POST"]))
    inner = Starlette(routes=routes, exception_handlers={Refused: refuse, HTTPException: unknown})
    known = {route.path for route in routes}
    return guarded(inner, token, hosts, bounds, requests, frozenset(known))


def guarded(
    app: App, token: str | None, hosts: Sequence[str], bounds: Bounds, requests: metrics.Requests, known: frozenset[str]
) -> App:
    """Application behind the checks of host, origin and token, which counts requests and ends late ones."""

    async def answered(scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        status, began = 500, time.perf_counter()
        requests.under_way += 1

        async def noted(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            async with asyncio.timeout(bounds.deadline + SLACK + BODY_SECONDS + COMPILATION):
                refusal = _refusal(headers, scope, token, hosts)
                if refusal is None:
                    await app(scope, receive, noted)
                else:
                    await _json(_error(*refusal), refusal[0])(scope, receive, noted)
        except TimeoutError:  # a reader that does not read: uvicorn closes the connection
            status = 504
        finally:
            requests.under_way -= 1
            route = scope["path"] if scope["path"] in known else "other"
            requests.note(route, status, time.perf_counter() - began)

    return answered


def _refusal(
    headers: Mapping[str, str], scope: Scope, token: str | None, hosts: Sequence[str]
) -> tuple[int, str] | None:
    """Status and reason for which a request goes no further; None if it may."""
    host = headers.get("host", "")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if hosts and name.strip("[]") not in hosts:
        return 421, f"the host is {_short(host)}; this server answers as {', '.join(hosts)} alone"
    if "origin" in headers and headers["origin"] not in (f"http://{host}", f"https://{host}"):
        return 403, f"the origin is {_short(headers['origin'])}; only pages of {_short(host)} itself are answered"
    if token is not None and scope["path"] != "/health":
        sent = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent.encode(), token.encode()):
            return 401, "the token is missing, or another one; give the server's, as authorization: Bearer TOKEN"
    return None
