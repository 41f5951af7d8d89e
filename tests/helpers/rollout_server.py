"""Stand-ins for inference servers: the routes and bodies that vLLM, SGLang and `longhaul serve` document, checked.

A body with a field that is missing, unknown or of another type is answered with 422, as these servers do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PLAIN: dict[str, Any] = {"top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float,
                         "presence_penalty": float, "frequency_penalty": float}  # fmt: skip
VLLM = PLAIN | {"n": int, "max_tokens": int, "temperature": float, "logprobs": int, "stop": list,
                "stop_token_ids": list}  # fmt: skip
SGLANG = PLAIN | {"n": int, "sampling_seed": int, "max_new_tokens": int, "temperature": float, "stop": list,
                  "stop_token_ids": list}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {"token_ids": list, "sampling_params": VLLM},
    "/v1/completions": PLAIN
    | {"model": str, "prompt": list, "n": int, "seed": int, "max_tokens": int, "temperature": float, "logprobs": int,
       "return_token_ids": bool, "stop": list},
    "/generate": {"input_ids": list, "sampling_params": SGLANG, "return_logprob": bool},
    "/pause_generation": {"mode": str},
    "/continue_generation": {},
    "/update_weights_from_disk": {"model_path": str, "weight_version": str, "flush_cache": bool,
                                  "abort_all_requests": bool},
    "/pause?mode=keep": {},
    "/resume": {},
    "/reset_prefix_cache?reset_running_requests=true": {},
    "/collective_rpc": {"method": str, "kwargs": {"weights_path": str}},
    "/update_weight_version": {"new_version": str},
}  # fmt: skip


def fits(body: Any, form: Any) -> bool:
    if isinstance(form, dict):
        return isinstance(body, dict) and body.keys() == form.keys() and all(fits(body[k], form[k]) for k in form)
    return isinstance(body, form) and not (form is int and isinstance(body, bool))


Sample = Callable[[list[int], int, int, int], list[tuple[list[int], list[float], str]]]
"""(prompt, count, most tokens, seed) -> (token ids, log-probabilities, finish reason) of each completion."""


def counting(prompt: list[int], count: int, most: int, seed: int) -> list[tuple[list[int], list[float], str]]:
    """Completions that repeat the prompt's first token, the i-th i + 1 times."""
    return [(prompt[:1] * (i + 1), [-0.5] * (i + 1), "stop") for i in range(count)]


class RolloutServer:
    """A server in threads of this process. Its behaviour may change while it runs: `fault(route)` may return "die"
    (no answer), "garbage", "error", or seconds to wait; `load(folder)` takes a version's folder."""

    def __init__(self, sample: Sample = counting, load: Callable[[str], object] = lambda folder: None) -> None:
        self.sample, self.load, self.label = sample, load, "default"
        self.labels: list[tuple[str, float]] | None = None  # shares of a completion by version, beginning with these
        self.fault: Callable[[str], str | float | None] = lambda route: None
        self.asked: list[tuple[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._answer(self, None)

            def do_POST(self) -> None:
                server._answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        self._ended = threading.Event()
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def __enter__(self) -> RolloutServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()

    def asks(self, route: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == route]

    def _answer(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        route = handler.path
        self.asked.append((route, body))
        fault = self.fault(route)
        if isinstance(fault, float):
            self._ended.wait(fault)
        if fault == "die":
            handler.close_connection = True
            handler.connection.close()
            return
        status, answer = (500, {}) if fault == "error" else (200, None)
        if body is not None and not fits(body, BODIES.get(route)):
            status, answer = 422, {"detail": f"{route} does not take {json.dumps(body)[:200]}"}
        elif status == 200:
            answer = self._made(route, body)
        data = b"{garbage" if fault == "garbage" else json.dumps(answer).encode()
        try:
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
        except OSError:
            handler.close_connection = True

    def _made(self, route: str, body: Any) -> Any:
        if body is None:
            return {"/v1/models": {"data": [{"id": "tiny"}]}}.get(route, {"weight_version": self.label})
        if route == "/collective_rpc":
            self.load(body["kwargs"]["weights_path"])
            return {"results": [None]}
        if route == "/update_weight_version":
            self.label = body["new_version"]
        if route == "/update_weights_from_disk":
            self.load(body["model_path"])
            self.label = body["weight_version"]
            return {"success": True, "message": "Succeeded to update model weights."}
        if route == "/inference/v1/generate":
            sampling = body["sampling_params"]
            made = self.sample(body["token_ids"], sampling["n"], sampling["max_tokens"], len(self.asked))
            return {"choices": [self._choice(i, *each) for i, each in reversed(list(enumerate(made)))]}
        if route == "/v1/completions":
            made = self.sample(body["prompt"], body["n"], body["max_tokens"], body["seed"])
            return {"weight_version": self.label, "choices": [
                {"index": i, "token_ids": token, "logprobs": {"token_logprobs": probs}, "finish_reason": why}
                for i, (token, probs, why) in enumerate(made)
            ]}  # fmt: skip
        if route == "/generate":
            sampling = body["sampling_params"]
            made = self.sample(body["input_ids"], sampling["n"], sampling["max_new_tokens"], sampling["sampling_seed"])
            return [
                {"output_ids": token, "meta_info": {
                    "finish_reason": {"type": why}, "weight_version": self.label,
                    "output_token_logprobs": [[p, t, None] for p, t in zip(probs, token, strict=True)]}}
                for token, probs, why in made
            ]  # fmt: skip
        return {}

    def _choice(self, index: int, token: list[int], probs: list[float], why: str) -> dict[str, Any]:
        spans, begin = [], 0
        for label, share in self.labels or [(self.label, 1.0)]:
            end = len(token) if (label, share) == (self.labels or [(self.label, 1.0)])[-1] else int(share * len(token))
            spans.append({"version": label, "start": begin, "end": end})
            begin = end
        content = [{"token_id": t, "logprob": p, "rank": 1, "top_logprobs": []} for t, p in zip(token, probs)]
        return {"index": index, "logprobs": {"content": content}, "finish_reason": why, "token_ids": token,
                "weight_versions": spans}  # fmt: skip
