"""Completions of inference servers over HTTP: requests, their distribution over servers, and checks of the answers.

A request has a prompt as token ids and asks for a group of completions; an answer has token ids, the log-probability
with which each was sampled, and the version of the weights behind each token. Servers are vLLM, SGLang, and all that
answer `/v1/completions` with token ids, as `longhaul serve` does (`DIALECTS`).

A server that fails, or whose answer is refused, gets no requests until `revive` succeeds; its requests move to others.
So do requests of a slow server, once nothing else is to be done: the first answer counts. An answer is refused if a
token's version is unknown or too old. vLLM says which version sampled which token, `longhaul serve` which one sampled
the answer. SGLang is asked before and after; a completion between two versions counts as the older one's.
"""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from longhaul.runtime import bounded_json

ANSWER, TOKEN = 1 << 20, 1 << 9
"""Bytes of an answer, and of each token in it, at most."""

LATE, SOON = 3.0, 2.0
"""A request is late after this many times the longest one so far, and after these seconds; then it is sent to another
server, too."""

REST, LONGEST_REST = 0.5, 10.0
"""Seconds without requests to a server that failed; twice as long after each further failure, up to the second."""

LOOK = 0.1
"""Seconds between two looks for something to do."""

SILENT, AGAIN = 5.0, 60.0
"""Seconds without any server after which that is reported, and seconds from one report to the next."""


class ServerError(RuntimeError):
    """No server answers, or one refuses the request itself; one line."""


class Refused(ValueError):
    """Answer that can't be used: the request goes to another server, or to this one again once it is revived."""


class Ask(NamedTuple):
    """Request for `group` completions of a prompt."""

    prompt: tuple[int, ...]
    group: int
    seed: int


class Rules(NamedTuple):
    """Rules of sampling, and of what an answer may hold."""

    length: int  # most tokens of a completion
    temperature: float
    ends: tuple[int, ...]  # tokens that end a completion
    stops: tuple[str, ...]  # texts that end one
    vocabulary: int


class Answer(NamedTuple):
    """Completion: token ids, their log-probabilities, and the versions of the weights that sampled them."""

    token: tuple[int, ...]
    log_prob: tuple[float, ...]
    version: tuple[int, ...]


class Choice(NamedTuple):
    """Completion as a dialect reads it; `labels` are (label of the weights, first token, token behind the last)."""

    token: Sequence[int]
    log_prob: Sequence[float]
    reason: str
    labels: Sequence[tuple[str, int, int]] | None = None


# ------------------------------------------------------------------------------------------------------------ dialects


class Dialect(NamedTuple):
    """API of a kind of server."""

    route: str
    body: Callable[[Ask, Rules, str], dict[str, Any]]  # with the model's name
    read: Callable[[Any], list[Choice]]
    version_route: str  # gives `weight_version`, the label of the weights that serve now
    says: bool = True  # each answer names its weights; else they are requested before and after it


PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
         "frequency_penalty": 0.0}  # fmt: skip
"""Settings under which a token is drawn from the model's own distribution; a server's defaults may differ."""


def _vllm_request(ask: Ask, rules: Rules, model: str) -> dict[str, Any]:
    """Body without a seed: with one, vLLM 0.32 on a CPU ends at a prompt that it reads in parts ("CPU Generator does
    not use offset")."""
    sampling = PLAIN | {
        "n": ask.group, "max_tokens": rules.length, "temperature": rules.temperature, "logprobs": 0,
        "stop": list(rules.stops), "stop_token_ids": list(rules.ends),
    }  # fmt: skip
    return {"token_ids": list(ask.prompt), "sampling_params": sampling}


def _vllm_choices(payload: Any) -> list[Choice]:
    def read(choice: Any) -> Choice:
        content = choice["logprobs"]["content"]
        spans = choice["weight_versions"]
        return Choice(
            choice["token_ids"], [each["logprob"] for each in content], choice["finish_reason"],
            None if spans is None else [(span["version"], span["start"], span["end"]) for span in spans],
        )  # fmt: skip

    return [read(choice) for choice in sorted(payload["choices"], key=lambda choice: choice["index"])]


def _completions_request(ask: Ask, rules: Rules, model: str) -> dict[str, Any]:
    return PLAIN | {
        "model": model, "prompt": list(ask.prompt), "n": ask.group, "seed": ask.seed, "max_tokens": rules.length,
        "temperature": rules.temperature, "logprobs": 0, "return_token_ids": True, "stop": list(rules.stops),
    }  # fmt: skip


def _completions_choices(payload: Any) -> list[Choice]:
    def read(choice: Any) -> Choice:
        label = choice.get("weight_version", payload.get("weight_version"))
        count = len(choice["token_ids"])
        spans = None if label is None else [(str(label), 0, count)]
        versions = choice.get("weight_versions")
        if versions is not None:
            spans = [(str(span["version"]), span["start"], span["end"]) for span in versions]
        return Choice(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"], spans)

    return [read(choice) for choice in sorted(payload["choices"], key=lambda choice: choice["index"])]


def _sglang_request(ask: Ask, rules: Rules, model: str) -> dict[str, Any]:
    sampling = PLAIN | {
        "n": ask.group, "max_new_tokens": rules.length, "temperature": rules.temperature, "top_k": -1,
        "sampling_seed": ask.seed, "stop": list(rules.stops), "stop_token_ids": list(rules.ends),
    }  # fmt: skip
    return {"input_ids": list(ask.prompt), "sampling_params": sampling, "return_logprob": True}


def _sglang_choices(payload: Any) -> list[Choice]:
    def read(choice: Any) -> Choice:
        about = choice["meta_info"]
        pairs = about["output_token_logprobs"]
        token, log_prob = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
        if list(choice.get("output_ids", token)) != token:
            raise ValueError("output_ids are not the tokens of output_token_logprobs")
        return Choice(token, log_prob, about["finish_reason"]["type"])

    return [read(choice) for choice in (payload if isinstance(payload, list) else [payload])]


DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect("/inference/v1/generate", _vllm_request, _vllm_choices, "/weight_info"),
    "completions": Dialect("/v1/completions", _completions_request, _completions_choices, "/health"),
    "sglang": Dialect("/generate", _sglang_request, _sglang_choices, "/get_model_info", says=False),
}


# ------------------------------------------------------------------------------------------------------------- servers


class Server:
    """One server: its address, and what is known of its health."""

    def __init__(self, address: str) -> None:
        url = urllib.parse.urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{address!r} is no address of a server; write http://HOST:PORT")
        self.address = address.rstrip("/")
        self.model = ""
        self.why: str | None = None  # reason why it gets no requests
        self.failures = 0
        self.until = 0.0  # monotonic time of the next try
        self.reviving = False
        self._secure, self._host, self._base = url.scheme == "https", url.netloc, url.path.rstrip("/")

    def call(
        self, route: str, body: Mapping[str, Any] | None, seconds: float, token: str | None, most: int = ANSWER,
        opened: Callable[[http.client.HTTPConnection], object] = lambda connection: None,
    ) -> Any:  # fmt: skip
        """JSON of an answer. OSError or HTTPException: none came; Refused: it is none; ServerError: it is refused."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, timeout=seconds)
        opened(connection)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", self._base + route, data, headers)
            answer = connection.getresponse()
            text = answer.read(most + 1)
        finally:
            connection.close()
        if len(text) > most:
            raise Refused(f"an answer of more than {most:,} bytes")
        if answer.status in (400, 401, 403, 404, 413, 422):
            message = " ".join(text.decode(errors="replace").split())[:300]
            raise ServerError(f"{self.address}{route} refuses with {answer.status}: {message}")
        if answer.status != 200:
            raise Refused(f"status {answer.status}: {' '.join(text.decode(errors='replace').split())[:120]}")
        try:
            return bounded_json.parse(text)
        except ValueError as error:
            raise Refused(str(error)) from error


class _Work:
    """Requests of one call, and the servers that answer them."""

    def __init__(self, count: int, patience: float) -> None:
        self.changed = threading.Condition()
        self.answers: list[list[Answer] | None] = [None] * count
        self.waiting = list(range(count))[::-1]
        self.sent: dict[int, list[tuple[Server, float]]] = {place: [] for place in range(count)}
        self.open: set[http.client.HTTPConnection] = set()
        self.longest, self.progress, self.patience = 0.0, time.monotonic(), patience
        self.error: ServerError | None = None

    @property
    def over(self) -> bool:
        return self.error is not None or None not in self.answers

    def late(self, server: Server, now: float) -> int | None:
        """Request that another server alone has, and for too long."""
        after = max(SOON, LATE * self.longest) if self.longest else math.inf
        for place, holders in self.sent.items():
            if self.answers[place] is None and len(holders) == 1:
                holder, since = holders[0]
                if holder is not server and now - since > after:
                    return place
        return None


class Servers:
    """Inference servers that share the requests of a run.

    `version_of(label)` is the version of the weights that a server's label names; it raises Refused for one unknown.
    `revive(server)` brings back a server that failed: it raises OSError, HTTPException, Refused or ServerError where
    that can't be done yet. Without any answer for `patience` seconds `complete` raises ServerError.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        dialect: Dialect,
        rules: Rules,
        version_of: Callable[[str], int],
        revive: Callable[[Server], object],
        *,
        requests: int = 32,
        seconds: float = 120.0,
        patience: float = 600.0,
        token: str | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.all = [Server(address) for address in addresses]
        self.moved = 0  # requests that were answered by another server than the first
        self._dialect, self._rules, self._version_of, self._revive = dialect, rules, version_of, revive
        self._requests, self._seconds, self.patience, self._token = requests, seconds, patience, token
        self._note, self._closed = note, False

    def close(self) -> None:
        """End of each `complete`, by a ServerError."""
        self._closed = True

    def complete(
        self, asks: Sequence[Ask], oldest: int, beat: Callable[[], object] = lambda: None
    ) -> list[list[Answer]]:
        """Completions of each request, none with a token of a version before `oldest`. `beat` is called meanwhile."""
        work = _Work(len(asks), self.patience)
        threads = [
            threading.Thread(target=self._serve, args=(server, asks, oldest, work), daemon=True, name=server.address)
            for server in self.all
            for _ in range(min(self._requests, len(asks)))
        ]
        for thread in threads:
            thread.start()
        report = math.inf  # time of the next report that no server is there
        with work.changed:
            while not work.over:
                work.changed.wait(LOOK)
                beat()
                report = self._reported(report, work)
                if self._closed:
                    work.error = ServerError("the servers are left")
                if time.monotonic() - work.progress > self.patience:
                    why = "; ".join(f"{each.address}: {each.why or 'no answer'}" for each in self.all)
                    work.error = ServerError(f"no server answered for {self.patience:g} s ({why})")
            work.changed.notify_all()
            for connection in work.open:  # nobody waits for these
                with suppress(OSError, AttributeError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
        if work.error is not None:
            raise work.error
        return [answer for answer in work.answers if answer is not None]

    def fail(self, server: Server, why: str) -> None:
        """Exclusion of a server until it is revived."""
        if server.why is None:
            self._note(f"{server.address} gets no requests: {why}")
        server.why, server.failures = why, server.failures + 1
        server.until = time.monotonic() + min(REST * 2 ** (server.failures - 1), LONGEST_REST)

    # -------------------------------------------------------------------------------------------------------- inside

    def _reported(self, report: float, work: _Work) -> float:
        """Reports at the time `report` that all servers are out; returns the time of the next report."""
        now = time.monotonic()
        if any(server.why is None for server in self.all):
            return math.inf
        if report == math.inf:
            return now + SILENT
        if now < report:
            return report
        left = max(0.0, work.progress + self.patience - now)
        failures = "; ".join(f"{server.address}: {server.why}" for server in self.all)
        self._note(f"waits for a server, {left:.0f} s more at most; none answers ({failures})")
        return now + AGAIN

    def _serve(self, server: Server, asks: Sequence[Ask], oldest: int, work: _Work) -> None:
        """Takes requests of `work` to one server until all are answered."""
        while True:
            place = self._next_request(server, work)
            if place is None:
                return
            if place < 0:
                self._revived(server, work)
                continue
            began = time.monotonic()
            failure: Exception | None = None
            answers: list[Answer] = []
            try:
                answers = self._asked(server, asks[place], oldest, work)
            except Exception as error:
                failure = error
            with work.changed:
                work.sent[place] = [each for each in work.sent[place] if each[0] is not server]
                if work.over:
                    return
                if failure is None:
                    if work.answers[place] is None:
                        self.moved += bool(work.sent[place])
                        work.answers[place], work.progress = answers, time.monotonic()
                        work.longest = max(work.longest, work.progress - began)
                    server.failures = 0
                elif isinstance(failure, ServerError) or not isinstance(
                    failure, (OSError, http.client.HTTPException, Refused)
                ):
                    work.error = ServerError(" ".join(str(failure).split()))
                else:
                    if work.answers[place] is None and not work.sent[place]:
                        work.waiting.append(place)
                        self.moved += 1
                    self.fail(server, " ".join(f"{type(failure).__name__}: {failure}".split()))
                work.changed.notify_all()

    def _next_request(self, server: Server, work: _Work) -> int | None:
        """Next request for a server; -1: it is to be revived; None: all are answered."""
        with work.changed:
            while not work.over:
                now = time.monotonic()
                if server.why is not None:
                    if now >= server.until and not server.reviving:
                        server.reviving = True
                        return -1
                else:
                    place = work.waiting.pop() if work.waiting else work.late(server, now)
                    if place is not None:
                        work.sent[place].append((server, now))
                        return place
                work.changed.wait(LOOK)
            return None

    def _revived(self, server: Server, work: _Work) -> None:
        try:
            self._revive(server)
        except (OSError, http.client.HTTPException, Refused, ServerError, TimeoutError) as error:
            self.fail(server, " ".join(f"{type(error).__name__}: {error}".split()))
        else:
            self._note(f"{server.address} is back")
            server.why = None
        finally:
            with work.changed:
                server.reviving = False
                work.changed.notify_all()

    def label(self, server: Server) -> str:
        """Label of the weights that a server has now."""
        answer = server.call(self._dialect.version_route, None, self._seconds, self._token)
        try:
            return str(answer["weight_version"])
        except (LookupError, TypeError) as error:
            raise Refused(f"{self._dialect.version_route} has no weight_version") from error

    def _asked(self, server: Server, ask: Ask, oldest: int, work: _Work) -> list[Answer]:
        def opened(connection: http.client.HTTPConnection) -> None:
            with work.changed:
                work.open.add(connection)

        if self._dialect.route == "/v1/completions" and not server.model:
            server.model = _model(server.call("/v1/models", None, self._seconds, self._token))
        before = None if self._dialect.says else self.label(server)
        most = ANSWER + TOKEN * ask.group * self._rules.length
        body = self._dialect.body(ask, self._rules, server.model)
        payload = server.call(self._dialect.route, body, self._seconds, self._token, most, opened)
        try:
            choices = self._dialect.read(payload)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Refused(f"an answer of another form: {type(error).__name__}: {error}") from error
        if before is not None:
            versions = {each: self._version_of(each) for each in (before, self.label(server))}
            older = min(versions, key=lambda each: versions[each])
            choices = [choice._replace(labels=[(older, 0, len(choice.token))]) for choice in choices]
        if len(choices) != ask.group:
            raise Refused(f"{len(choices)} completions, and {ask.group} were asked for")
        return [checked(choice, self._rules, self._version_of, oldest) for choice in choices]


def _model(payload: Any) -> str:
    try:
        return str(payload["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise Refused("/v1/models names no model") from error


def checked(choice: Choice, rules: Rules, version_of: Callable[[str], int], oldest: int) -> Answer:
    """Completion of a server. Refused where a field is impossible, or a version unknown or before `oldest`."""
    token, log_prob = tuple(choice.token), tuple(choice.log_prob)
    if not 0 < len(token) <= rules.length or len(log_prob) != len(token):
        raise Refused(f"{len(token)} tokens with {len(log_prob)} log-probabilities; 1 to {rules.length} are possible")
    if not all(type(each) is int and 0 <= each < rules.vocabulary for each in token):
        raise Refused(f"a token beyond the vocabulary of {rules.vocabulary}")
    if not all(isinstance(each, float | int) and -math.inf < each <= 1e-3 for each in log_prob):
        raise Refused("a log-probability that is none")
    if choice.reason not in ("stop", "length"):
        raise Refused(f"it ended by {choice.reason!r}")
    versions: list[int] = []
    for label, begin, end in choice.labels or ():
        if begin != len(versions) or not begin <= end <= len(token):
            raise Refused("versions that do not cover the tokens")
        versions += [version_of(label)] * (end - begin)
    if len(versions) != len(token):
        raise Refused(f"the versions of {len(token) - len(versions)} tokens are missing")
    if min(versions) < oldest:
        raise Refused(f"it is of version {min(versions)}, and {oldest} is the oldest that may be learnt from")
    return Answer(token, tuple(min(0.0, float(each)) for each in log_prob), tuple(versions))
