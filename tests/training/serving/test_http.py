"""Completions by HTTP are the model's, whatever joins the batch; versions, bounds, refusals, a policy's actions."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from starlette.testclient import TestClient

from longhaul.algorithms import registry
from longhaul.algorithms.run_context import RunContext
from longhaul.reasoning import rollout_servers, tokenizer, transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.runtime import device_memory
from longhaul.runtime import mesh as meshes
from longhaul.training.api import Policy
from longhaul.training.data import spec
from longhaul.training.serving import actions, batch_programs, completions, http, live_weights, metrics
from longhaul.training.serving.completions import Engine, Job, Limits
from longhaul.training.serving.work_queue import QueueFull
from longhaul.weight_sync.producer import named
from tests.helpers import shared_programs
from tests.helpers.quick import language_model, quick
from tests.helpers.small_runs import small

CONFIG = ModelConfig(width=16, layers=2, heads=2, kv_heads=1, head_dim=8, hidden=16)
WORDS = tokenizer.TOKENISER
BOUNDS = http.Bounds(body=4096, deadline=60.0)
TOKEN = "a-token-of-sixteen-or-more"
LENGTH = 16 + 40


@functools.cache
def weights() -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.float32(3.0) * np.asarray(x)), language_model(CONFIG))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Of four rows: each size of a batch is a program."""
    made = Engine(CONFIG, weights(), WORDS, Limits(16, 40, rows=4, queue=64), "3")
    yield made
    made.queue.close()


@pytest.fixture
def wide() -> Iterator[Engine]:
    """Of sixteen rows, a batch that grows twice."""
    made = Engine(CONFIG, weights(), WORDS, Limits(16, 40, rows=16, queue=64), "3")
    yield made
    made.queue.close()


@pytest.fixture(scope="module")
def answers(engine: Engine) -> http.Texts:
    return http.Texts(engine, WORDS, "tiny", BOUNDS, chat=lambda turns: WORDS.encode(turns[-1]["content"]))


def client(answers: Any, token: str | None = None, host: str = "127.0.0.1") -> Any:
    hosts = () if token else ("127.0.0.1",)
    return TestClient(http.application(answers, token, hosts, BOUNDS, {"model": "tiny"}), base_url=f"http://{host}")


@pytest.fixture(scope="module")
def asked(answers: http.Texts) -> Any:
    return client(answers)


@quick
def scores(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Log-probabilities of each next token; padding is never chosen."""
    return jax.nn.log_softmax(transformer.forward(CONFIG, params, tokens, mask).at[..., 0].set(-1e30))


def oracle(prompt: list[int], tokens: list[int], params: Any = None) -> np.ndarray:
    """Log-probabilities [N, V] at each token of a completion, by the full forward."""
    whole = np.zeros((1, LENGTH), np.int32)
    count = len(prompt) + len(tokens)
    whole[0, :count] = prompt + tokens
    found = scores(weights() if params is None else params, whole, np.arange(LENGTH)[None] < count)
    return np.asarray(found)[0, len(prompt) - 1 : count - 1]


def job(prompt: str, **given: Any) -> Job:
    return Job([WORDS.encode(prompt)], given.pop("max_tokens", 20), time.monotonic() + 60.0, **given)


# ---------------------------------------------------------------------------------------------------------- completions


@pytest.mark.slow
def test_completions_of_a_batch_that_grows_are_those_of_the_full_forward(wide: Engine) -> None:
    jobs = [job("3+4="[: 1 + i % 4], temperature=0.0 if i % 2 else 1.0, seed=i, n=1 + i % 3, max_tokens=8 + i) for i in
            range(14)]  # fmt: skip
    for each in jobs:
        wide.queue.submit(each)
    for each in jobs:
        each.done.result(60.0)
        for row in each.rows:
            known = oracle(each.prompts[0], row.tokens)
            np.testing.assert_allclose(
                row.log_probs, np.take_along_axis(known, np.array(row.tokens)[:, None], 1)[:, 0], atol=2e-4
            )
            if each.temperature == 0.0:
                assert row.tokens == known.argmax(1).tolist()
            assert (row.finish == "stop") == (row.tokens[-1] == tokenizer.END)
            assert row.finish == "stop" or len(row.tokens) == each.max_tokens
    alone = job("3", temperature=1.0, seed=8, n=3, max_tokens=16)
    wide.queue.submit(alone)
    alone.done.result(60.0)
    assert [row.tokens for row in alone.rows] == [row.tokens for row in jobs[8].rows]  # the others changed nothing
    assert len({tuple(row.tokens) for each in jobs for row in each.rows if each.temperature}) > 4


def test_a_rollout_is_asked_for_and_read_as_a_run_does(asked: Any) -> None:
    """Its requests have no field that is refused, and its answers all that a learner needs."""
    dialect, prompt = rollout_servers.DIALECTS["completions"], WORDS.encode("3+4=")
    rules = rollout_servers.Rules(8, 1.0, WORDS.ends, (";",), CONFIG.vocabulary)
    answer = asked.post(dialect.route, json=dialect.body(rollout_servers.Ask(tuple(prompt), 3, 7), rules, "tiny"))
    assert answer.status_code == 200, answer.text
    assert int(asked.get(dialect.version_route).json()["weight_version"]) == 3
    group = [rollout_servers.checked(choice, rules, int, 3) for choice in dialect.read(answer.json())]
    assert len(group) == 3
    for each in group:
        known = np.take_along_axis(oracle(prompt, list(each.token)), np.array(each.token)[:, None], 1)[:, 0]
        np.testing.assert_allclose(each.log_prob, known, atol=2e-4)
        assert set(each.version) == {3}


def test_a_draw_of_top_p_is_from_the_smallest_set_that_has_it() -> None:
    logits = np.random.default_rng(0).normal(size=CONFIG.vocabulary).astype(np.float32) * 2
    keys = np.stack([np.full(64, 7), np.arange(64)], 1).astype(np.uint32)
    progress = batch_programs.idle(64, 16)._replace(
        key=keys, top_p=np.full(64, 0.6, np.float32), active=np.ones(64, bool), wanted=np.ones(64, bool)
    )
    token, log_prob, top, _ = quick(lambda x, p: batch_programs.draw(x, p, 0, 5))(
        np.repeat(logits[:, None], 64, 1), progress
    )
    share = np.exp(logits[1:]) / np.exp(logits[1:]).sum()
    order = np.argsort(-share)
    kept = order[: np.searchsorted(np.cumsum(share[order]), 0.6) + 1] + 1
    assert set(np.asarray(token).tolist()) == set(kept.tolist())
    np.testing.assert_allclose(log_prob, np.log(share[np.asarray(token) - 1]), atol=1e-5)
    assert np.asarray(top)[:, 0].tolist() == (order[:5] + 1).tolist()


def test_an_answer_is_from_one_version_and_newer_weights_serve_after_it(engine: Engine) -> None:
    other = jax.tree.map(lambda x: -np.asarray(x), weights())
    names = {f"params.{name}": np.asarray(x) for name, x in named(other).items()}
    old = job("3+4=", temperature=0.0, n=6, max_tokens=40)  # more than the rows of a batch
    engine.queue.submit(old)
    while old.version is None:
        time.sleep(0.001)
    engine.offer("4", live_weights.language_model(CONFIG, weights())(names))
    new = job("3+4=", temperature=0.0)
    engine.queue.submit(new)
    for each, version, params in ((old, "3", weights()), (new, "4", other)):
        each.done.result(60.0)
        assert each.version == version
        for row in each.rows:
            assert row.tokens == oracle(each.prompts[0], row.tokens, params).argmax(1).tolist()
    engine.offer("3", weights())


def test_a_full_queue_refuses_and_a_late_request_frees_its_row(engine: Engine) -> None:
    with pytest.raises(QueueFull, match="at most 64 may"):
        engine.queue.submit(job("3", n=65))
    late = job("3", n=20, max_tokens=40)
    late.deadline = time.monotonic() - 1.0
    engine.queue.submit(late)
    with pytest.raises(TimeoutError):
        late.done.result(60.0)
    after = job("3")
    engine.queue.submit(after)
    after.done.result(60.0)


def test_a_deadline_does_not_count_what_is_compiled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    read, clock, passed = engine._programs.read, time.monotonic, [0.0]

    def slow(*given: Any) -> Any:
        passed[0] += 100.0
        return read(*given)

    first = job("3")
    engine.queue.submit(first)
    first.done.result(60.0)
    for compiled, late in ((False, False), (True, True)):
        trimmed: list[bool] = []
        with monkeypatch.context() as patch:
            patch.setattr(engine._programs, "read", slow)
            patch.setattr(completions, "time", SimpleNamespace(monotonic=lambda: clock() + passed[0]))
            patch.setattr(device_memory, "trim", lambda to=trimmed: to.append(True))
            if not compiled:
                engine._programs._kept.clear()
            asked = job("3")
            asked.deadline = clock() + passed[0] + 60.0
            engine.queue.submit(asked)
            assert (asked.done.exception(60.0) is not None) == late
            assert bool(trimmed) != compiled, "what the compiler took is given back"


def test_programs_of_whatever_sizes_are_few_and_the_others_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is the machine's again: JAX itself knows of no more."""
    backend = jax.devices()[0].client
    monkeypatch.setattr(shared_programs, "PROGRAMS", {})

    def there() -> int:
        shared_programs.PROGRAMS.clear()
        return len(backend.live_executables())

    most, sizes = 4, [(64, 1), (64, 2), (128, 1), (64, 1)]
    programs = batch_programs.Programs(CONFIG, 128, WORDS.ends, WORDS.pad, most)
    kernels = programs.prepare(weights())
    found, before, counts = [], there(), []
    for slots, rows in sizes:
        state = programs.blank(slots, rows)
        progress = batch_programs.idle(rows, 16)
        chunks, logits = programs.read(weights(), np.full((1, 16), 3, np.int32), np.full(1, 16, np.int32))
        progress.lengths[0] = progress.own[0] = 16
        progress.most[0], progress.active[0], progress.temperature[0] = 8, True, 0.0
        state = programs.join(state, chunks[0], logits, 0, np.where(np.arange(rows) == 0, 0, -1).astype(np.int32))
        state, progress, drawn = programs.run(kernels, state, progress)
        found.append(np.asarray(drawn.token)[:, 0].tolist())
        assert len(programs) == most
        counts.append(there() - before)
        del state, chunks, logits, progress, drawn
    assert programs.compiled == 3 * len(sizes) + 1, "the one that reads is used each time"
    assert max(counts) <= most and len({tuple(each) for each in found}) == 1, (counts, found)


def test_a_conversation_whose_client_left_fills_in_no_template(engine: Engine) -> None:
    """Else clients that come and go would make those wait who stay."""
    filled: list[str] = []

    def chat(turns: Any) -> list[int]:
        filled.append(turns[-1]["content"])
        return WORDS.encode("3")

    answers = http.Texts(engine, WORDS, "tiny", BOUNDS, chat=chat)
    app = http.application(answers, None, (), BOUNDS, {"model": "tiny"})

    async def asked(content: str, *, leaves: bool) -> int:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        messages += [{"type": "http.disconnect"}] * leaves
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop(0)

        async def send(message: dict[str, Any]) -> None:
            statuses.append(message.get("status", 0))

        headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"",
                 "headers": headers, "root_path": "", "scheme": "http", "http_version": "1.1"}  # fmt: skip
        await app(scope, receive, send)
        return statuses[0]

    async def storm() -> list[int]:
        async with answers._template:  # another conversation is being filled in
            tasks = [asyncio.ensure_future(asked(str(i), leaves=i != 5)) for i in range(10)]
            await asyncio.sleep(0.2)
        return await asyncio.gather(*tasks)

    assert asyncio.run(storm()) == [200 if i == 5 else 499 for i in range(10)]
    assert filled == ["5"]


def test_an_error_of_a_batch_fails_its_requests_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine._programs, "read", broken)
        failed = job("3")
        engine.queue.submit(failed)
        with pytest.raises(MemoryError):
            failed.done.result(60.0)
    after = job("3")
    engine.queue.submit(after)
    after.done.result(60.0)


# ----------------------------------------------------------------------------------------------------------------- HTTP


def test_an_answer_has_text_tokens_and_log_probabilities(asked: Any) -> None:
    body = {"prompt": ["3+4=", WORDS.encode("12")], "n": 2, "max_tokens": 6, "seed": 1, "logprobs": 2, "stop": "9"}
    found = asked.post("/v1/completions", json=body).json()
    assert found["weight_version"] == "3" and found["object"] == "text_completion" and len(found["choices"]) == 4
    assert found["usage"]["prompt_tokens"] == 6
    for place, choice in enumerate(found["choices"]):
        assert choice["index"] == place and choice["prompt_token_ids"] == WORDS.encode(("3+4=", "12")[place // 2])
        text, details = WORDS.decode(choice["token_ids"]), choice["logprobs"]
        assert choice["text"] == text.partition("9")[0] and text.count("9") <= 1
        assert choice["finish_reason"] == ("stop" if "9" in text or text.endswith("$") else "length")
        assert choice["finish_reason"] == "stop" or len(choice["token_ids"]) == 6
        assert "".join(details["tokens"]) == text and len(details["token_logprobs"]) == len(choice["token_ids"])
        assert all(len(top) == 2 for top in details["top_logprobs"])
    assert asked.post("/v1/completions", json=body).json()["choices"] == found["choices"]  # by its seed
    turns = {"messages": [{"role": "user", "content": [{"type": "text", "text": "3+4="}]}], "temperature": 0,
             "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 1}  # fmt: skip
    (chat,) = asked.post("/v1/chat/completions", json=turns).json()["choices"]
    (plain,) = asked.post("/v1/completions", json={"prompt": "3+4=", "temperature": 0, "max_tokens": 5}).json()[
        "choices"
    ]
    assert chat["message"]["content"] == plain["text"] and plain["logprobs"] is None
    assert all(each["token"] == each["top_logprobs"][0]["token"] for each in chat["logprobs"]["content"])
    assert asked.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_a_stream_has_the_same_text_in_pieces(asked: Any) -> None:
    body = {"prompt": "3+4=", "n": 2, "max_tokens": 30, "seed": 3, "stop": ["$", "77"]}
    whole = asked.post("/v1/completions", json=body).json()["choices"]
    lines = asked.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    for place, choice in enumerate(whole):
        own = [part for part in parts if part["index"] == place]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "prompt is None; it must be a text, token ids, or a list"),
        ({"prompt": ""}, 400, "the prompt has 0 tokens; give it 1 to 16"),
        ({"prompt": "1" * 17}, 400, "the prompt has 17 tokens; give it 1 to 16"),
        (
            {"prompt": "1" * 3000},
            400,
            "the prompt has 3,000 letters; at most 1,024, and 16 tokens, are possible; shorten it",
        ),
        ({"prompt": "hello"}, 400, "'h' is no character of the vocabulary"),
        ({"prompt": "\ud800"}, 400, "the prompt '\\ud800' can't be read: "),
        ({"prompt": [23]}, 400, "token ids from 0 to 22"),
        ({"prompt": [1, True]}, 400, "token ids from 0 to 22"),
        ({"prompt": ["1", 2]}, 400, "it must be a text, or token ids"),
        ({"prompt": "1", "n": 0}, 400, "n is 0; it must be a whole number from 1 to 128"),
        (
            {"prompt": ["1"] * 20, "n": 20},
            400,
            "n is 20 for 20 prompts; at most 128 completions are possible; ask in several",
        ),
        ({"prompt": "1", "n": 65}, 429, "0 completions wait; at most 64 may; ask for fewer, or again later"),
        ({"prompt": "1", "max_tokens": 41}, 400, "max_tokens is 41; it must be a whole number from 1 to 40"),
        ({"prompt": "1", "max_tokens": 1.5}, 400, "max_tokens is 1.5; it must be a whole number"),
        ({"prompt": "1", "temperature": -1}, 400, "temperature is -1; it must be a number from 0 to 100"),
        ({"prompt": "1", "temperature": 1e-5}, 400, "it must be 0, or at least 0.001"),
        ({"prompt": "1", "top_p": 0}, 400, "top_p is 0"),
        ({"prompt": "1", "logprobs": 6}, 400, "logprobs is 6"),
        ({"prompt": "1", "seed": -1}, 400, "seed is -1"),
        ({"prompt": "1", "stop": [""]}, 400, "stop is ['']"),
        ({"prompt": "1", "stream": 1}, 400, "stream is 1; it must be true or false"),
        ({"prompt": "1", "echo": True}, 400, "echo is True, which is not supported"),
        ({"prompt": "1", "tempreature": 1}, 400, "there is no field 'tempreature'; leave it out, or give one of"),
        ([1], 400, "the body is [1]; it must be an object"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused_in_one_line(
    asked: Any, body: Any, status: int, words: str
) -> None:
    found = asked.post("/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"})
    assert found.status_code == status and words in found.json()["error"]["message"]
    assert "\n" not in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        ({"content": b"{"}, 400, "it is no JSON from character 1 on"),
        ({"content": b'{"prompt": "1", "temperature": NaN}'}, 400, "temperature is nan; it must be a number from 0"),
        ({"content": b"[" * 4000}, 400, "no usable JSON"),
        ({"content": b"1" * 4000}, 400, "the body is 1111"),
        ({"content": b"\xff\xfe"}, 400, "no usable JSON"),
        ({"content": b" " * 5000}, 413, "the body has 5,000 bytes; at most 4,096 are possible; shorten it, or start"),
        ({"content": (b" " for _ in range(5000))}, 413, "or more bytes; at most 4,096 are possible; shorten it"),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, "content-type is 'text/plain'; send JSON"),
        (
            {"content": b"{}", "headers": {"content-type": "application/json", "origin": "http://elsewhere"}},
            403,
            "the origin is 'http://elsewhere'; only pages of '127.0.0.1' itself are answered",
        ),
    ],
)
def test_a_body_that_is_no_request_is_refused(asked: Any, given: dict[str, Any], status: int, words: str) -> None:
    found = asked.post("/v1/completions", **{"headers": {"content-type": "application/json"}} | given)
    assert found.status_code == status, found.text
    assert words in found.json()["error"]["message"]


def test_a_client_that_leaves_within_its_request_is_no_error(answers: http.Texts) -> None:
    """Else the server would write a traceback for each of them, as many as a stranger likes."""
    parts = iter([{"type": "http.request", "body": b'{"pro', "more_body": True}, {"type": "http.disconnect"}])
    sent = []

    async def receive() -> Any:
        return next(parts)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"90")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    asyncio.run(http.application(answers, None, ("127.0.0.1",), BOUNDS, {})(scope, receive, send))
    assert [each.get("status") for each in sent] == [499, None] and not any(parts)


def test_a_conversation_without_a_template_or_with_odd_turns_is_refused(engine: Engine, asked: Any) -> None:
    turns = [{"role": "user", "content": "1"}]
    plain = client(http.Texts(engine, WORDS, "tiny", BOUNDS))
    assert "no chat template" in plain.post("/v1/chat/completions", json={"messages": turns}).text
    for odd in (
        None,
        [],
        ["x"],
        [{"role": "tool", "content": "1"}],
        [{"role": "user", "content": [{"type": "image"}]}],
    ):
        assert asked.post("/v1/chat/completions", json={"messages": odd}).status_code == 400


def test_a_token_a_foreign_host_and_the_metrics(answers: http.Texts, asked: Any) -> None:
    foreign = client(answers, host="rebound.example").get("/health")
    assert foreign.status_code == 421
    assert "the host is 'rebound.example'; this server answers as 127.0.0.1" in foreign.json()["error"]["message"]
    known = client(answers, TOKEN, "10.0.0.5")
    assert known.get("/health").json() == {"status": "ok", "weight_version": "3", "queue": 0, "model": "tiny"}
    assert known.get("/metrics").status_code == known.post("/v1/completions", json={}).status_code == 401
    assert known.get("/metrics", headers={"authorization": f"Bearer {TOKEN}é".encode()}).status_code == 401
    text = known.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
    assert 'longhaul_requests_total{route="/metrics",status="401"} 2' in text
    assert 'longhaul_request_seconds_bucket{route="/health",le="+Inf"} 1' in text
    assert 'longhaul_weights_info{version="3"} 1' in text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families)) and all(
        line.startswith(("#", "longhaul_")) for line in text.splitlines()
    )
    nothing, wrong = asked.get("/v1/nothing"), asked.get("/v1/completions")
    assert (nothing.status_code, wrong.status_code) == (404, 405)
    there = "there are GET /health, GET /metrics, POST /v1/completions, POST /v1/chat/completions, GET /v1/models"
    assert nothing.json()["error"]["message"] == f"/v1/nothing is not served here; {there}"
    assert wrong.json()["error"]["message"] == f"/v1/completions does not take GET; {there}"
    counted = metrics.Requests()
    counted.note("/x", 200, 0.3)
    assert 'le="0.25"} 0' in metrics.text(counted, answers.engine)


# -------------------------------------------------------------------------------------------------------------- actions


@pytest.fixture(scope="module")
def acting() -> Iterator[http.Actions]:
    run = small()
    algorithm = registry.make(spec(run), run.algorithm, RunContext(updates=1, mean=meshes.identity))
    state = quick(algorithm.init)(jax.random.key(0))
    engine = actions.Engine(Policy(run, jax.tree.map(np.asarray, algorithm.policy(state))), 8, 16, "5")
    yield http.Actions(engine, BOUNDS)
    engine.queue.close()


def test_actions_are_the_policys_for_one_and_for_many(acting: http.Actions) -> None:
    asked, seen = client(acting), np.random.default_rng(0).normal(size=(3, 4))
    wanted = np.asarray(acting.engine.policy(seen.astype(np.float32))).tolist()
    assert asked.post("/act", json={"observation": seen.tolist()}).json() == {"action": wanted, "weight_version": "5"}
    for row, action in zip(seen, wanted, strict=True):
        assert asked.post("/act", json={"observation": row.tolist()}).json()["action"] == action
    drawn = {"observation": np.zeros((8, 4)).tolist(), "deterministic": False, "seed": 3}
    first = asked.post("/act", json=drawn).json()["action"]
    assert asked.post("/act", json=drawn).json()["action"] == first and len(set(first)) == 2
    acting.engine.offer("6", live_weights.like(acting.engine.policy.params)(named(acting.engine.policy.params)))
    assert asked.post("/act", json=drawn).json() == {"action": first, "weight_version": "6"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "observation is missing; give observation [4], or a batch of at most 8"),
        ({"observation": [1, 2, 3]}, "observation is of [3]; it must be an array [4] of float32, or a batch of such"),
        ({"observation": [[1, 2, 3, 4], [1]]}, "observation is [[1, 2, 3, 4], [1]]; it must be an array [4]"),
        ({"observation": [[[1, 2, 3, 4]]]}, "is of [1, 1, 4]; it must be an array [4]"),
        ({"observation": []}, "is of [0]; it must be an array [4]"),
        ({"observation": [1, 2, 3, "x"]}, "is [1, 2, 3, 'x']; it must be an array [4]"),
        ({"observation": [1, 2, 3, 1e39]}, "has 1e+39, which is not finite as float32; give finite numbers"),
        ({"observation": [1, 2, 3, 10**400]}, "is [1, 2, 3, 100000000000000000000000000000; it must be an array [4]"),
        ({"observation": {"x": [1]}}, "observation has x; it must have observation"),
        ({"observation": [[0, 0, 0, 0]] * 9}, "a batch of 9; at most 8 are possible; ask in several requests"),
        ({"observation": [0, 0, 0, 0], "memory": [1]}, "memory is [1], and this policy has none; leave it out"),
        ({"observation": [0, 0, 0, 0], "deterministic": 0}, "deterministic is 0; it must be true or false"),
    ],
)
def test_an_observation_that_does_not_fit_is_refused(acting: http.Actions, body: Any, words: str) -> None:
    found = client(acting).post("/act", json=body)
    assert found.status_code == 400 and words in found.json()["error"]["message"]
